"""Where a network is cut into stages."""

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
from tflms_sft._planner.traced_step import TracedStep
from tflms_sft._trace.layer_names import display_names, of_all_calls, resolve

NEARLY = 1.25
"""What the largest stage may be over that of the most even cuts, and they over the smallest, for less to be sent."""


def named_cuts(traced: TracedStep, names: Sequence[str]) -> list[list[Tensor]]:
    """Tensors by the names of layers, operations or tensors.

    A layer that several batches go through is cut at each of its calls, as one of a discriminator that is given fakes
    and reals; not one that is called again on what it has made. Calls after an update are a part of that.
    """
    graph, record = traced.analysis.graph, traced.record
    found = []
    for name in names:
        calls = _before_updates(of_all_calls(name, graph, record), traced.analysis)
        beside = calls and not any(_depends(one, other) for one, other in itertools.permutations(calls, 2))
        found.append(list(itertools.chain(*calls)) if beside else resolve(name, "stages", graph, record))
    return found


def _before_updates(calls: list[list[Tensor]], analysis: GraphAnalysis) -> list[list[Tensor]]:
    """Calls of a layer that do not depend on what an update has changed."""
    if not calls:
        return []
    order, backward = analysis.order, analysis.backward
    after = update_descendants(order, update_nodes(analysis.graph, order, backward))
    return [tensors for tensors in calls if not any(t.node in after for t in tensors)]


def _depends(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether the values of some tensors depend on some others."""
    before = ancestors((t.node for t in tensors), producers)
    return any(t.node in before for t in others)


def cut_names(traced: TracedStep, cuts: Sequence[Sequence[Tensor]]) -> tuple[str, ...]:
    """A name for each cut that can be written instead of its tensors."""
    graph, record = traced.analysis.graph, traced.record
    names = display_names(graph, record)
    found = []
    for first, *others in cuts:
        name = names.get(first, first.name)
        layer = name.rpartition("/")[0]
        calls = list(itertools.chain(*of_all_calls(layer, graph, record))) if others else []
        found.append(layer if calls == [first, *others] else name)
    return tuple(found)


def choose_cuts(traced: TracedStep, count: int) -> list[list[Tensor]]:
    """The most even cuts, by what the forward phase leaves for the backward one; among nearly even ones the smallest.

    Raises:
        PipelineError: If there are not enough tensors that separate the network.
    """
    if count == 1:
        return []
    found = separators(traced.analysis, traced.batch)
    names = display_names(traced.analysis.graph, traced.record)
    layers = found.only([t for t in found.tensors if t in names])
    found = layers if len(layers.tensors) >= count - 1 else found
    if len(found.tensors) < count - 1:
        raise PipelineError(
            f"`stages` asks for {count} stages, and this network can be cut at {len(found.tensors)} tensor(s) only, "
            f"so that there are at most {len(found.tensors) + 1} stages. Ask for fewer, or name cuts that connections "
            f"skip: stages=[...]. Received: stages={count}."
        )
    largest = _best(found, count, 0, math.inf, max)[0] * NEARLY
    smallest = -_best(found, count, 0, largest, max, lambda size, sent: -size)[0] / NEARLY
    _, chosen = _best(found, count, smallest, largest, operator.add, lambda size, sent: sent)
    return [[found.tensors[index]] for index in chosen]


def _best(
    found: Separators,
    count: int,
    smallest: float,
    largest: float,
    together: Callable[[float, float], float],
    cost: Callable[[float, float], float] = lambda size, sent: size,
) -> tuple[float, list[int]]:
    """Cuts into stages of some size that cost least, by dynamic programming over (cuts made, last cut).

    Args:
        found: Where can be cut.
        count: Number of stages.
        smallest: Bytes of a stage, at least.
        largest: Bytes of a stage, at most.
        together: Cost of stages from those of some and of the next one.
        cost: Cost of a stage from its bytes and the bytes that it sends on.
    """
    ends = [*found.before, found.total]
    sent = [*found.num_bytes, 0]
    end = len(found.tensors)
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
