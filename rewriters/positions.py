"""Values that are as long as the batch, but not made of its data: numbers of samples, noise of a fixed seed, rows.

A step traced for a micro-batch has such a value for that alone, and all micro-batches would read the same one. The
samples of the second one have other numbers than those of the first, so it is made for the whole batch and cut as
arguments are. What only says where in a tensor something is, such as the rows of `tf.gather_nd`, stays: in the tensor
of a micro-batch rows are counted from 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from rewriters.analysis import Analysis
from rewriters.combining import Growth
from rewriters.errors import PipelineError
from rewriters.graph import Node, Tensor
from rewriters.micro import Parts
from rewriters.resources import handles
from rewriters.roles import reads_shape_only
from rewriters.values import constant

__all__: list[str] = []

_INDEX_ARITHMETIC = frozenset(
    ("Add", "AddV2", "BroadcastTo", "Cast", "ConcatV2", "ExpandDims", "Identity", "Mul", "Pack", "Reshape", "Squeeze")
) | frozenset(("StridedSlice", "Sub", "Tile", "Transpose"))

_UNIFORM = frozenset(("BroadcastTo", "Cast", "ExpandDims", "Identity", "Neg", "Reshape", "Squeeze", "Tile"))


def without_data(analysis: Analysis, parts: Parts, batched: set[Node]) -> set[Node]:
    """Operations whose values depend on the batch by its size at most.

    Args:
        analysis: Of the step as traced for one micro-batch.
        parts: Its parts.
        batched: The arguments that have the batch axis.
    """
    found: set[Node] = set()
    for node in analysis.order:
        if node in parts.update or node in batched:
            continue
        shared = node not in parts.repeated
        pure = bool(node.inputs) and not node.stateful and not handles(node)
        if shared or reads_shape_only(node) or (pure and all(t.node in found for t in node.inputs)):
            found.add(node)
    return found


def to_cut(
    analysis: Analysis, parts: Parts, without: set[Node], growth: Callable[[Tensor], Growth | None]
) -> list[Tensor]:
    """What has to be made for the whole batch and cut, because micro-batches read another part of it each.

    Args:
        analysis: Of the step as traced for one micro-batch.
        parts: Its parts.
        without: Operations `without_data`.
        growth: How much larger a tensor is for the batch, `None` if that is not known.

    Raises:
        PipelineError: If it cannot be cut.
    """
    found: dict[Tensor, None] = {}
    for node in analysis.order:
        if node not in parts.repeated or node in without or reads_shape_only(node):
            continue
        for tensor in node.inputs:
            source = tensor.node
            if source not in without or source in analysis.backward or source.op == "Placeholder" or not tensor.shape:
                continue
            if tensor in found or _is_uniform(source):
                continue
            if _is_cut(tensor, growth(tensor), source in parts.repeated, set(_uses(analysis, parts, tensor, growth))):
                found[tensor] = None
    return list(found)


def with_more_data(analysis: Analysis, parts: Parts, cut: list[Tensor]) -> Parts:
    """The parts of a step in which some shared values are cut: what reads them runs for each micro-batch.

    Args:
        analysis: Of the step as traced for one micro-batch.
        parts: Its parts.
        cut: The values.
    """
    inside = set(cut)
    found: set[Node] = set()
    for node in analysis.order if cut else ():
        if node not in parts.update and not reads_shape_only(node):
            if any(t in inside or t.node in found for t in node.inputs):
                found.add(node)
    return dataclasses.replace(parts, repeated=parts.repeated | found, direct=parts.direct | found)


def _is_cut(tensor: Tensor, growth: Growth | None, by_size: bool, uses: set[str]) -> bool:
    """Whether a value that is read by micro-batches has to be cut; `by_size`: it depends on the size of the batch."""
    if growth is None and not (by_size and tensor.shape and None in tensor.shape):
        return False
    if (growth is not None and not growth.axes) or uses <= {"place"}:
        return False
    if growth is None or growth.axes != (0,) or len(uses) > 1:
        why = "as values and as places" if len(uses) > 1 else "along another axis than the first"
        raise PipelineError(
            f"`{tensor.name}` ({tensor.node.op}) does not depend on data and is as long as the batch, and "
            f"micro-batches would need another part of it each; it cannot be cut: it is used {why}, or its size is not "
            "known. Pass it as an argument of the step, trace the step with a known batch, or use `micro_batches=1`."
        )
    return True


def _uses(
    analysis: Analysis, parts: Parts, tensor: Tensor, growth: Callable[[Tensor], Growth | None]
) -> Iterator[str]:
    """What becomes of a value: integers that end as operands which say where something is are a `"place"`."""
    seen, stack = {tensor}, [tensor]
    while stack:
        current = stack.pop()
        for reader, position in analysis.readers.get(current, ()):
            if reader in parts.update or reader in analysis.backward or reads_shape_only(reader):
                continue
            if current.dtype.is_integer and _is_place(reader, position, growth):
                yield "place"
            elif reader.op in _INDEX_ARITHMETIC and current.dtype.is_integer and reader.out().dtype.is_integer:
                if reader.out() not in seen:
                    seen.add(reader.out())
                    stack.append(reader.out())
            else:
                yield "value"


def _is_place(reader: Node, position: int, growth: Callable[[Tensor], Growth | None]) -> bool:
    """Whether an operand says where in something is what has the batch as its first axis."""
    if reader.op in ("GatherNd", "GatherV2", "TensorScatterUpdate", "TensorScatterAdd") and position == 1:
        searched: Tensor = reader.inputs[0]
    elif reader.op == "ScatterNd" and position == 0:
        searched = reader.out()
    else:
        return False
    found = growth(searched)
    return found is None or found.axes == (0,)


def _is_uniform(node: Node) -> bool:
    """Whether all entries are the same number: any part of it is the same."""
    if node.op == "Fill":
        return True
    if node.op in _UNIFORM:
        return _is_uniform(node.inputs[0].node) or node.inputs[0].shape == ()
    value = constant(node)
    return value is not None and value.size > 0 and bool((value == value.flat[0]).all())
