"""One op in a graph of its own, on the whole image and on tiles; a helper, no test."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from equivalence import TOLERANCE, error

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import canonicalize_graph
from rewriters.emission import tile_pass
from rewriters.errors import NotTileableError
from rewriters.ir.graph import PER_PIXEL, Graph, Tensor
from rewriters.ir.graph_reader import from_concrete_function
from rewriters.rules.contraction import CLASSIFICATIONS
from rewriters.rules.registry import TileKind, find_rule
from rewriters.step_importer import StepImporter
from rewriters.tiling.checkpoint_selection import LoopSpec
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid, TilePlanner

BATCH, HEIGHT, WIDTH = 3, 13, 14
FULL, PARTIAL, INVARIANT, REDUCED = TileKind.FULL, TileKind.PARTIAL, TileKind.INVARIANT, TileKind.REDUCED


@dataclasses.dataclass(frozen=True)
class Const:
    """An operand that is part of the graph; arrays are arguments of it."""

    value: Any


def per_pixel_op(op_type: str) -> Any:
    """An op on matrices of pixels between the reshapes that a step has there."""

    def best(predictions: Any, targets: Any, k: Any, name: str) -> Any:
        matrix = tf.reshape(predictions, [-1, predictions.shape[-1]])
        found = tf.raw_ops.InTopKV2(predictions=matrix, targets=tf.reshape(targets, [-1]), k=k, name=name)
        return tf.reshape(found, tf.shape(targets))

    def run(features: Any, labels: Any, name: str) -> Any:
        classes, shape = features.shape[-1], tf.shape(features)
        flat = [-1, classes] if labels.shape.rank == features.shape.rank else [-1]
        loss, gradient = getattr(tf.raw_ops, op_type)(
            features=tf.reshape(features, [-1, classes]), labels=tf.reshape(labels, flat), name=name
        )
        return [tf.reshape(loss, shape[:-1]), tf.reshape(gradient, shape)]

    return best if op_type == "InTopKV2" else run


class OneOp:
    """A graph with a single op, its operands as arguments, and the means to run it on tiles."""

    def __init__(self, op_type: str, operands: dict[str, Any], batch_known: bool = True) -> None:
        leaves = tf.nest.flatten(operands)
        self.arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
        per_pixel = op_type in CLASSIFICATIONS
        raw_op = per_pixel_op(op_type) if per_pixel else getattr(tf.raw_ops, op_type)

        def body(*args: Any) -> Any:
            remaining = iter(args)
            values = [
                next(remaining)
                if isinstance(leaf, np.ndarray)
                else tf.constant(leaf.value)
                if isinstance(leaf, Const)
                else leaf
                for leaf in leaves
            ]
            return raw_op(**tf.nest.pack_sequence_as(operands, values), name="the_op")

        def shape(array: np.ndarray) -> tuple[int | None, ...]:
            unknown = array.ndim >= 3 and array.shape[0] == BATCH and not batch_known
            return (None, *array.shape[1:]) if unknown else array.shape

        specs = [tf.TensorSpec(shape(a), a.dtype) for a in self.arrays]
        self.concrete_fn = tf.function(body, autograph=False).get_concrete_function(*specs)
        graph = from_concrete_function(self.concrete_fn)
        self.analysis = GraphAnalysis(canonicalize_graph(graph) if per_pixel else graph)
        nodes = self.analysis.graph.nodes
        self.node = next(node for node in nodes.values() if PER_PIXEL in node.attrs) if per_pixel else nodes["the_op"]
        self.rule = find_rule(self.node)
        self.view = self.analysis.view(self.node)

    def result_kind(self, kinds: tuple[TileKind, ...]) -> TileKind:
        return self.rule.result_kind(self.view, kinds)

    def accepted(self) -> Iterator[tuple[tuple[TileKind, ...], TileKind]]:
        """All kinds of operands that the rule takes, with the kind of the result."""
        data = self.rule.data(self.view)
        choices = [
            (FULL, PARTIAL) if p in data and self.analysis.layouts.of(t) is not None else (INVARIANT,)
            for p, t in enumerate(self.node.inputs)
        ]
        for kinds in itertools.product(*choices):
            try:
                yield kinds, self.result_kind(kinds)
            except NotTileableError:
                continue

    def tiled(self, kinds: tuple[TileKind, ...], result: TileKind, grid: Grid) -> Graph:
        """The op in a tile loop of its own: forward, or backward if a gradient goes in."""
        outs = [self.node.out(i) for i in range(len(self.node.outputs))]
        by_kind: dict[TileKind, list[Tensor]] = {kind: [] for kind in TileKind}
        for tensor, kind in zip(self.node.inputs, kinds, strict=True):
            by_kind[kind].append(tensor)
        segment = Segment(
            name="alone",
            entries=by_kind[FULL],
            exits=outs if result is FULL else [],
            forward=[self.node] if result is FULL else [],
            backward=[] if result is FULL else [self.node],
            kinds=dict(zip(self.node.inputs, kinds, strict=True)) | dict.fromkeys(outs, result),
            grad_entries=by_kind[PARTIAL],
            grad_exits=outs if result is PARTIAL else [],
            reductions=outs if result is REDUCED else [],
            invariants=by_kind[INVARIANT],
        )
        planner = TilePlanner(self.analysis, segment)
        tile_loop = planner.forward(grid) if result is FULL else planner.backward(grid)
        return tile_pass.tile_segments(self.analysis, [tile_pass.SegmentPlan(segment, [tile_loop])])

    def gathered(self, grid: Grid) -> Graph | None:
        """The op in a loop of a segment with barriers; `None` if its rule refuses, or `tiled` makes the same loop."""
        data = self.rule.data(self.view)
        kinds = [FULL if p in data and self.analysis.is_image(t) else INVARIANT for p, t in enumerate(self.node.inputs)]
        try:
            result = self.rule.result_kind_gathered(self.view, kinds)
        except NotTileableError:
            return None
        if result is FULL and any(kind is FULL for _, kind in self.accepted()):
            return None
        by_kind = {kind: [t for t, k in zip(self.node.inputs, kinds, strict=True) if k is kind] for kind in TileKind}
        outs = [self.node.out(i) for i in range(len(self.node.outputs))]
        writes, sums = (outs, []) if result is FULL else ([], [self.node])
        segment = Segment(
            name="alone",
            entries=by_kind[FULL],
            exits=writes,
            forward=[self.node],
            backward=[],
            kinds=dict(zip(self.node.inputs, kinds, strict=True)) | dict.fromkeys(writes, FULL),
            grad_entries=[],
            grad_exits=[],
            reductions=[node.out() for node in sums],
            invariants=by_kind[INVARIANT],
            loop_specs=[
                LoopSpec(
                    level=0, backward=False, writes=writes, sums=sums, moments=[], body=[self.node], reads=by_kind[FULL]
                )
            ],
        )
        return tile_pass.tile_segments(self.analysis, [tile_pass.plan_segment(self.analysis, segment, grid)])

    def run(self, graphs: list[Graph]) -> list[list[np.ndarray]]:
        """The results of the op, and of each graph. All are in one function, which is traced and optimized once."""
        importers = [StepImporter(graph, self.concrete_fn) for graph in graphs]
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in self.concrete_fn.inputs]

        @tf.function(input_signature=specs, autograph=False)
        def function(*args: Any) -> Any:
            return [tf.nest.flatten(each(args)) for each in (lambda args: self.concrete_fn(*args), *importers)]

        return [[np.array(value) for value in values] for values in function(*map(tf.constant, self.arrays))]

    def fitting(self, grid: Grid) -> Grid:
        """The grid for as many axes as there are; images that are made of pixels are not split."""
        tensors = (*self.node.inputs, self.node.out())
        layouts = [layout for t in tensors if (layout := self.analysis.layouts.of(t)) is not None]
        axes = max(len(layout.dims) for layout in layouts)
        batch = grid.batch if all(layout.batch_fold == 1 for layout in layouts) else 1
        return Grid(batch, (*grid.spatial, *[max(grid.spatial) // 2 + 1] * (axes - len(grid.spatial)))[:axes])

    def differing(self, *grids: Grid) -> dict[str, float]:
        """For every accepted use and grid where tiles give something else: the error."""
        types = {t.dtype for t in (*self.node.inputs, self.node.out()) if t.dtype.is_floating}
        tolerance = 1e-6 if len(types) == 1 and tf.float32 in types else TOLERANCE
        graphs: dict[str, Graph] = {}
        for grid in map(self.fitting, grids):
            gathered = self.gathered(grid)
            if gathered is not None:
                graphs[f"gathered, grid {grid}"] = gathered
            for kinds, result in self.accepted():
                use = f"{[k.value for k in kinds]} -> {result.value}, grid {grid}"
                graphs[use] = self.tiled(kinds, result, grid)
        assert graphs, f"no use of {self.node.op} is accepted"
        want, *results = self.run(list(graphs.values()))
        errors = [max(error(g, w) for g, w in zip(got, want, strict=True)) for got in results]
        return {use: worst for use, worst in zip(graphs, errors, strict=True) if not worst <= tolerance}


def image(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> np.ndarray:
    """Random numbers; by default three images of 13x14 pixels with 4 channels."""
    shape = shape or (3, HEIGHT, WIDTH, 4)
    return np.random.default_rng(seed + len(shape)).uniform(low, high, size=shape)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).integers(1, 9, size=shape or (3, HEIGHT, WIDTH, 4)).astype("int32")


def flags(*shape: int, seed: int = 0) -> np.ndarray:
    return image(*shape, seed=seed) > 0
