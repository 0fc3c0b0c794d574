"""Structural signatures of loops and segments, equal for those that run the same program.

Networks repeat themselves: most blocks of a stage differ in their weights alone, which a loop receives as arguments.
Loops with equal signatures are traced once and share a body. Tracing takes most of the time to rewrite a large
network.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.emission.loop_program import Part
from rewriters.emission.loop_tensors import loop_input_tensors, loop_operand, loop_output_tensors
from rewriters.emission.lowering import lower
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.region_reads import is_region_read
from rewriters.ir.static_values import MAX_ELEMENTS
from rewriters.rules.intervals import Interval
from rewriters.rules.registry import TileKind
from rewriters.tiling.checkpoint_selection import LoopSpec
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import TileLoop

__all__: list[str] = []


def program_signature(analysis: GraphAnalysis, segment: Segment, tile_loop: TileLoop) -> Hashable:
    """Return a key that is equal for two loops if tracing them gives the same function of their inputs.

    It holds everything that tracing reads: ops with their attributes, edges and roles, static operands, shapes and
    kinds, and the rows of every tensor in every tile. It holds no names.
    """
    return _ProgramHasher(analysis, segment, tile_loop).signature()


def loop_signature(analysis: GraphAnalysis, kinds: Mapping[Tensor, TileKind], loop: LoopSpec) -> Hashable:
    """Return a key that is equal for loops between barriers that need equal memory and time on any equal grid."""
    hasher = StructuralHasher(analysis, kinds)
    body = tuple(map(hasher.operation, loop.body))
    ends = (loop.reads, loop.writes, [node.out() for node in loop.sums])
    numbers = tuple(tuple(map(hasher.number, tensors)) for tensors in ends)
    moments = tuple(tuple(map(hasher.number, (pair.image, pair.mean, pair.variance))) for pair in loop.moments)
    return (loop.backward, body, numbers, moments, hasher.tensors())


def segment_signature(analysis: GraphAnalysis, segment: Segment) -> Hashable:
    """Return a key that is equal for segments without barriers that need equal memory and time on any equal grid."""
    hasher = StructuralHasher(analysis, segment.kinds)
    body = tuple(tuple(map(hasher.operation, nodes)) for nodes in (segment.forward, segment.backward))
    ends = (segment.entries, segment.exits, segment.grad_entries, segment.grad_exits, segment.reductions)
    numbers = tuple(tuple(map(hasher.number, tensors)) for tensors in ends)
    sums = tuple(hasher.number(node.out()) for node in segment.sums)
    return (segment.one_loop, body, numbers, sums, hasher.tensors())


class StructuralHasher:
    """Numbers tensors in the order in which it meets them, and describes ops and tensors without their names."""

    def __init__(self, analysis: GraphAnalysis, kinds: Mapping[Tensor, TileKind]) -> None:
        self.analysis = analysis
        self.kinds = kinds
        self.numbers: dict[Tensor, int] = {}

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor."""
        return self.numbers.setdefault(tensor, len(self.numbers))

    def operation(self, node: Node) -> tuple[Hashable, ...]:
        """Return the type, device, attributes, operands and results of an op."""
        operands = tuple(self.number(tensor) for tensor in node.inputs)
        results = tuple(self.number(node.out(index)) for index in range(len(node.outputs)))
        attrs = tuple(sorted((key, value.SerializeToString(deterministic=True)) for key, value in node.attrs.items()))
        return (node.op, node.device, attrs, operands, results)

    def tensor(self, tensor: Tensor) -> tuple[Hashable, ...]:
        """Return the shape, dtype, kind and static value of a tensor."""
        return (tensor.shape, tensor.dtype, self.kinds.get(tensor), self._static(tensor))

    def tensors(self) -> tuple[Hashable, ...]:
        """Return all numbered tensors, with their numbers of consumers, which decide whether ops run in place."""
        analysis = self.analysis
        return tuple((self.tensor(t), analysis.extents(t), len(analysis.consumers.get(t, ()))) for t in self.numbers)

    def _static(self, tensor: Tensor) -> Hashable:
        """Return what op rules can know of a tensor's value."""
        node = tensor.node
        if node.op == "Const" and math.prod(dim or 0 for dim in tensor.shape or ()) <= MAX_ELEMENTS:
            return node.attrs["value"].SerializeToString(deterministic=True)
        value: Any = self.analysis.evaluate(tensor)
        return (value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


class _ProgramHasher(StructuralHasher):
    """Describes the program of a planned loop."""

    def __init__(self, analysis: GraphAnalysis, segment: Segment, tile_loop: TileLoop) -> None:
        super().__init__(analysis, segment.kinds)
        self.segment = segment
        self.tile_loop = tile_loop
        self._part_numbers: dict[Part, int] = {}

    def signature(self) -> Hashable:
        tile_loop, program = self.tile_loop, lower(self.analysis, self.tile_loop)
        inputs = tuple(self.number(tensor) for tensor in loop_input_tensors(tile_loop, self.segment))
        instructions = self._described([*program.instructions, *program.outputs])
        results = tuple(self.number(tensor) for tensor in loop_output_tensors(tile_loop))
        roles = (len(tile_loop.writes), len(tile_loop.accumulates), tuple(map(self.number, tile_loop.reads)))
        tensors = tuple(map(self.tensor, self.numbers))
        files = tuple(self.operation(t.node) for t in tile_loop.reads if is_region_read(t.node))
        operands = tuple(self.number(loop_operand(t)) for t in tile_loop.reads)
        loop = (tile_loop.backward, tile_loop.grid, tile_loop.order, tile_loop.row_axis)
        return (loop, inputs, instructions, results, roles, tensors, files, operands)

    def _described(self, value: Any) -> Hashable:
        """Return a key of a part of the program: names of types, numbers of tensors and parts, rows of all tiles."""
        if isinstance(value, Part):
            number = self._part_numbers.setdefault(value, len(self._part_numbers))
            return (number, self.number(value.tensor), self._described(value.region))
        if isinstance(value, Tensor):
            return self.number(value)
        if isinstance(value, Node):
            return (self.operation(value), self._described(self.tile_loop.plans[value]))
        if isinstance(value, Interval):
            return value.key
        if isinstance(value, np.ndarray):
            return value.tobytes()
        if isinstance(value, (list, tuple)):
            return tuple(map(self._described, value))
        if dataclasses.is_dataclass(value):
            fields = (getattr(value, field.name) for field in dataclasses.fields(value))
            return (type(value).__name__, *map(self._described, fields))
        return value
