"""Cuts of a network into the stages of a pipeline."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence

from rewriters.analysis.autodiff_roles import update_descendants, update_nodes
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import PipelineError
from rewriters.ir.graph import Tensor, ancestors, producers
from rewriters.pipelining.stage_assignment import Separators, separators
from tflms_sft._params.pipeline_params import PipelineParams
from tflms_sft._pipeline.device_selection import available_devices
from tflms_sft._search.traced_step import TracedStep
from tflms_sft._trace.layer_names import of_all_calls, resolve

MAX_STAGE_RATIO = 1.25
"""Largest stage over that of the most even cuts, and their smallest stage over a smaller one, for less to be sent."""


def requested_cuts(traced: TracedStep, params: PipelineParams) -> list[list[Tensor]]:
    """Return the tensors of each cut: those named, or for a number of stages, by default one for each device."""
    if isinstance(params.stages, tuple):
        return _named_cuts(traced, params.stages)
    return _choose_cuts(traced, params.num_stages or max(len(available_devices()) // params.data_replicas, 1))


def _named_cuts(traced: TracedStep, names: Sequence[str]) -> list[list[Tensor]]:
    """Return the tensors of each cut, given the names of layers, ops or tensors.

    A layer that several batches pass, such as fakes and reals in a discriminator, is cut at each of its calls. A layer
    whose calls depend on each other is not. Calls after an update belong to the update.
    """
    graph, record = traced.analysis.graph, traced.record
    cuts = []
    for name in names:
        calls = _before_updates(of_all_calls(name, graph, record), traced.analysis)
        independent = calls and not any(_depends(one, other) for one, other in itertools.permutations(calls, 2))
        cuts.append(list(itertools.chain(*calls)) if independent else resolve(name, "stages", graph, record))
    return cuts


def _before_updates(calls: list[list[Tensor]], analysis: GraphAnalysis) -> list[list[Tensor]]:
    """Return the calls of a layer that do not depend on an updated variable."""
    if not calls:
        return []
    order, backward = analysis.order, analysis.backward
    after = update_descendants(order, update_nodes(analysis.graph, order, backward))
    return [tensors for tensors in calls if not any(t.node in after for t in tensors)]


def _depends(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether the values of some tensors depend on some others."""
    before = ancestors((t.node for t in tensors), producers)
    return any(t.node in before for t in others)


def cut_names(traced: TracedStep, cuts: Sequence[Sequence[Tensor]]) -> tuple[str, ...]:
    """Return for each cut a name that `requested_cuts` resolves to its tensors."""
    graph, record = traced.analysis.graph, traced.record
    shown = []
    for first, *others in cuts:
        name = traced.names.get(first, first.name)
        layer = name.rpartition("/")[0]
        calls = list(itertools.chain(*of_all_calls(layer, graph, record))) if others else []
        shown.append(layer if calls == [first, *others] else name)
    return tuple(shown)


def _choose_cuts(traced: TracedStep, count: int) -> list[list[Tensor]]:
    """Return the cuts with the most even bytes saved for the backward pass; of nearly even ones the smallest tensors.

    Raises:
        PipelineError: If there are not enough tensors that separate the network.
    """
    if count == 1:
        return []
    candidates = separators(traced.analysis, traced.batch)
    layers = candidates.only([t for t in candidates.tensors if t in traced.names])
    candidates = layers if len(layers.tensors) >= count - 1 else candidates
    available = len(candidates.tensors)
    if available < count - 1:
        raise PipelineError(
            f"`stages` must be at most {available + 1}, because this network can be cut at {available} tensor(s) only. "
            f"Received: stages={count}. Use fewer stages, or name the cuts, which skip connections may cross: "
            "stages=[...]."
        )
    largest = _best(candidates, count, 0, math.inf, max)[0] * MAX_STAGE_RATIO
    smallest = -_best(candidates, count, 0, largest, max, lambda size, sent: -size)[0] / MAX_STAGE_RATIO
    _, chosen = _best(candidates, count, smallest, largest, operator.add, lambda size, sent: sent)
    return [[candidates.tensors[index]] for index in chosen]


def _best(
    candidates: Separators,
    count: int,
    smallest: float,
    largest: float,
    together: Callable[[float, float], float],
    cost: Callable[[float, float], float] = lambda size, sent: size,
) -> tuple[float, list[int]]:
    """Return the least cost of `count` stages, and its cuts, by dynamic programming over (number of cuts, last cut).

    A stage has from `smallest` to `largest` bytes. `cost` maps its bytes and the bytes that it sends to its cost, which
    `together` combines with that of the stages before it.
    """
    ends = [*candidates.before, candidates.total]
    sent = [*candidates.num_bytes, 0]
    end = len(candidates.tensors)
    best: dict[int, tuple[float, list[int]]] = {-1: (-math.inf if together is max else 0.0, [])}
    for number in range(count):
        following: dict[int, tuple[float, list[int]]] = {}
        for index in [end] if number == count - 1 else range(end):
            for before, (so_far, chosen) in best.items():
                size = ends[index] - (ends[before] if before >= 0 else 0)
                if before < index and smallest <= size <= largest:
                    value = together(so_far, cost(size, sent[index]))
                    if index not in following or value < following[index][0]:
                        following[index] = value, [*chosen, index]
        best = following
    value, chosen = best[end]
    return value, chosen[:-1]
