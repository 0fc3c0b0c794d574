"""Values that are as long as the batch, but not made of its data: numbers of samples, noise of a fixed seed, rows.

A step traced for a micro-batch has such a value for that alone, and all micro-batches would read the same one. The
samples of the second one have other numbers than those of the first, so it is made for the whole batch and cut as
arguments are. What only says where in a tensor something is, such as the rows of `tf.gather_nd`, stays: in the tensor
of a micro-batch rows are counted from 0.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import PipelineError
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.variables import variable_handles
from rewriters.pipelining.micro_batch_reduction import BatchGrowth
from rewriters.pipelining.step_partition import StepPartition

__all__: list[str] = []

_INDEX_ARITHMETIC = frozenset(
    ("Add", "AddV2", "BroadcastTo", "Cast", "ConcatV2", "ExpandDims", "Identity", "Mul", "Pack", "Reshape", "Squeeze")
) | frozenset(("StridedSlice", "Sub", "Tile", "Transpose"))


def without_data(analysis: GraphAnalysis, parts: StepPartition, batched: set[Node]) -> set[Node]:
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
        shared = node not in parts.per_micro_batch
        pure = bool(node.inputs) and not node.stateful and not variable_handles(node)
        if shared or reads_shape_only(node) or (pure and all(t.node in found for t in node.inputs)):
            found.add(node)
    return found


class MicroBatchUse(enum.Enum):
    """What micro-batches do with a value that is not made of the batch's data."""

    OWN = "each has the same, or one that its own size tells"
    CUT = "each reads its part of what is made for the whole batch"
    PLACE = "it says where in something of the micro-batch's own something is"


class BatchSizedValues:
    """Tells of values that do not depend on data how micro-batches, which do, read them.

    Args:
        analysis: Of the step as traced for one micro-batch.
        parts: Its parts.
        without: Operations `without_data`.
        growth: How much larger a tensor is for the batch, `None` if that is not known.
        alike: Whether each sample has the same there, so that any part of it will do.
    """

    def __init__(
        self,
        analysis: GraphAnalysis,
        parts: StepPartition,
        without: set[Node],
        growth: Callable[[Tensor], BatchGrowth | None],
        alike: Callable[[Tensor], bool],
    ) -> None:
        self._analysis = analysis
        self._parts = parts
        # What autodiff makes of gradients is a micro-batch's own, such as one over the number of its samples.
        self.forward = without - analysis.backward
        self._growth = growth
        self._alike = alike
        self._found: dict[Tensor, MicroBatchUse] = {}

    def cross(self, node: Node) -> bool:
        """Whether an operation reads values as micro-batches do: one of the backward phase, or of data."""
        return node not in self.forward and node not in self._parts.update and not reads_shape_only(node)

    def use(self, tensor: Tensor) -> MicroBatchUse:
        """How micro-batches read it.

        Raises:
            PipelineError: If it has to be cut, and cannot be.
        """
        if tensor not in self._found:
            self._found[tensor] = self._use(tensor)
        return self._found[tensor]

    def to_cut(self) -> list[Tensor]:
        """All values that have to be made for the whole batch and cut.

        Raises:
            PipelineError: If one of them cannot be cut.
        """
        read = dict.fromkeys(t for node in self._analysis.order if self.cross(node) for t in node.inputs)
        return [tensor for tensor in read if self.use(tensor) is MicroBatchUse.CUT]

    def _use(self, tensor: Tensor) -> MicroBatchUse:
        source = tensor.node
        if source not in self.forward or source.op == "Placeholder" or not tensor.shape:
            return MicroBatchUse.OWN
        growth, by_size = self._growth(tensor), source in self._parts.per_micro_batch
        if growth is None and not (by_size and None in tensor.shape):
            return MicroBatchUse.OWN
        if (growth is not None and not growth.axes) or self._alike(tensor):
            return MicroBatchUse.OWN
        uses = self._uses(tensor)
        if uses == {"place"}:
            return MicroBatchUse.PLACE
        if growth is None or growth.axes != (0,) or len(uses) > 1:
            why = "as values and as places" if len(uses) > 1 else "along another axis than the first"
            raise PipelineError(
                f"`{tensor.name}` ({source.op}) does not depend on data and is as long as the batch, and "
                f"micro-batches would need another part of it each; it cannot be cut: it is used {why}, or its size is "
                "not known. Pass it as an argument of the step, trace the step with a known batch, or use "
                "`micro_batches=1`."
            )
        return MicroBatchUse.CUT

    def _uses(self, tensor: Tensor) -> set[str]:
        """What becomes of a value: `"value"`, `"place"`, or both; without forward readers, what the others say."""
        return set(self._ends(tensor, self._analysis.backward)) or set(self._ends(tensor, ()))

    def _ends(self, tensor: Tensor, left_out: Container[Node]) -> Iterator[str]:
        """The same for each reader: integers that end as operands which say where something is are a `"place"`."""
        seen, stack = {tensor}, [tensor]
        while stack:
            current = stack.pop()
            for reader, position in self._analysis.consumers.get(current, ()):
                if reader in self._parts.update or reader in left_out or reads_shape_only(reader):
                    continue
                if current.dtype.is_integer and _is_place(reader, position, self._growth):
                    yield "place"
                elif reader.op in _INDEX_ARITHMETIC and current.dtype.is_integer and reader.out().dtype.is_integer:
                    if reader.out() not in seen:
                        seen.add(reader.out())
                        stack.append(reader.out())
                else:
                    yield "value"


def with_more_data(analysis: GraphAnalysis, parts: StepPartition, cut: list[Tensor]) -> StepPartition:
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
    return dataclasses.replace(
        parts, per_micro_batch=parts.per_micro_batch | found, batch_dependent=parts.batch_dependent | found
    )


def is_offset_by_micro_batch(here: Any, whole: Any, parts: int) -> bool:
    """Whether rows that are named are those of a micro-batch if they are counted from its first one.

    Args:
        here: Where a micro-batch has them; `None` if that is not known, and is taken to be so.
        whole: The same for the batch.
        parts: Number of micro-batches.
    """
    if not isinstance(here, np.ndarray) or not isinstance(whole, np.ndarray):
        return True
    if whole.shape != (parts * here.shape[0], *here.shape[1:]):
        return False
    ahead = (whole.reshape(parts, *here.shape) - here).reshape(parts, -1)
    return bool((ahead == ahead[1, :1] * np.arange(parts)[:, None]).all())


def _is_place(reader: Node, position: int, growth: Callable[[Tensor], BatchGrowth | None]) -> bool:
    """Whether an operand says where in something is what has the batch as its first axis."""
    if reader.op in ("GatherNd", "GatherV2", "TensorScatterUpdate", "TensorScatterAdd") and position == 1:
        searched: Tensor = reader.inputs[0]
    elif (reader.op, position) in (("ScatterNd", 0), ("UnsortedSegmentSum", 1)):
        searched = reader.out()
    else:
        return False
    found = growth(searched)
    return found is None or found.axes == (0,)
