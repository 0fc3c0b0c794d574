"""Where a network is cut into stages."""

from __future__ import annotations

from collections.abc import Sequence

from rewriters.errors import PipelineError
from rewriters.graph import Tensor
from rewriters.stages import Separators, separators
from tflms_sft._compile import Traced
from tflms_sft._names import display_names, resolve

NEARLY = 1.1
"""What the largest stage may be over that of the most even cuts, for less to be sent."""


def named_cuts(traced: Traced, names: Sequence[str]) -> list[list[Tensor]]:
    """Tensors by the names of layers, operations or tensors."""
    return [resolve(name, "stages", traced.analysis.graph, traced.record) for name in names]


def choose_cuts(traced: Traced, count: int) -> list[list[Tensor]]:
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
    evenest = _best(found, count, None)[0]
    _, chosen = _best(found, count, evenest * NEARLY)
    return [[found.tensors[index]] for index in chosen]


def _best(found: Separators, count: int, limit: float | None) -> tuple[float, list[int]]:
    """Cuts with the smallest largest stage; with a limit for that, those of which least is sent.

    By dynamic programming over (cuts made, last cut).
    """
    ends = [*found.before, found.total]
    sent = [*found.num_bytes, 0]
    # Of each last cut: cost, and the cuts.
    best: dict[int, tuple[float, list[int]]] = {}
    for index in range(len(found.tensors)):
        if limit is None:
            best[index] = ends[index], [index]
        elif ends[index] <= limit:
            best[index] = sent[index], [index]
    for number in range(1, count):
        last = number == count - 1
        following: dict[int, tuple[float, list[int]]] = {}
        for index in [len(found.tensors)] if last else range(len(found.tensors)):
            for before, (cost, chosen) in best.items():
                if before >= index:
                    continue
                size = ends[index] - ends[before]
                if limit is None:
                    value = max(cost, size)
                elif size <= limit:
                    value = cost + sent[index]
                else:
                    continue
                if index not in following or value < following[index][0]:
                    following[index] = value, chosen if last else [*chosen, index]
        best = following
    return best[len(found.tensors)]
