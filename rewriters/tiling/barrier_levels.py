"""Levels: the first loop in which each op can run if reductions over the image lie between tiled ops.

A reduction over the image, such as a moment of BatchNorm in training mode, is a *barrier*: ops that depend on it wait
for all tiles. Every op is of one of three sorts:

- *tiled*: it has a rule, and its result is an image;
- *reduction* (`sums`): it reduces images over all tiled axes (moments, gradients of filters and biases);
- *outside*: any other op, which runs once, on full-size tensors, between two loops.

A tiled op may also read all rows of an image in each tile, as attention reads keys and values. The image is a barrier,
too: its loop has to end first.

The level of an op is the number of loops that have to end before it can run. Ops of one level share a loop. Forward and
backward ops are treated alike. A gradient is an image, of which each iteration computes (*gathers*) the rows that it
needs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container
from typing import Any

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.graph_reader import is_xla_call
from rewriters.rules.reduction import Reduce
from rewriters.rules.registry import TileKind, find_rule

__all__: list[str] = []


@dataclasses.dataclass(frozen=True)
class MomentPair:
    """A mean and a variance about it that can be computed in the same loop.

    Attributes:
        image: Operand of the mean.
        mean: The mean.
        variance: Mean of the squared differences from it.
        axes: Axes of both reductions.
        keep_dims: Whether the variance keeps these axes.
    """

    image: Tensor
    mean: Tensor
    variance: Tensor
    axes: tuple[int, ...]
    keep_dims: bool


@dataclasses.dataclass
class BarrierLevels:
    """Kinds and levels of the ops of a graph.

    Attributes:
        analysis: Analysis of the graph.
        tiled: Ops that run on tiles, in topological order.
        sums: Reductions over the image, in topological order.
        kinds: Kinds of the operands of both, and of the results of tiled ops.
        level: Level of every op.
        moments: Pairs of moments, by the op that computes the variance.
        refused: Reason why another forward op on images is not tiled.
    """

    analysis: GraphAnalysis
    tiled: list[Node]
    sums: list[Node]
    kinds: dict[Tensor, TileKind]
    level: dict[Node, int]
    moments: dict[Node, MomentPair]
    refused: dict[Node, str]
    _operands: dict[Node, list[Tensor]] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def operands(self, node: Node) -> list[Tensor]:
        """Return the images that a tiled op or a reduction reads; for the variance of a pair, the image of the pair."""
        if node not in self._operands:
            self._operands[node] = self._read_images(node)
        return self._operands[node]

    @functools.cached_property
    def read_whole(self) -> set[Tensor]:
        """Images of which some tile reads all rows."""
        return {tensor for node in self.tiled for tensor in _read_whole(self.analysis, node)}

    def _read_images(self, node: Node) -> list[Tensor]:
        if node in self.moments:
            return [self.moments[node].image]
        rebuilt = find_rule(node).shape_operands(self.analysis.view(node))
        read = (tensor for position, tensor in enumerate(node.inputs) if position not in rebuilt)
        return [tensor for tensor in dict.fromkeys(read) if self.kinds.get(tensor) is TileKind.FULL]


def assign_levels(analysis: GraphAnalysis, allowed: Container[Node] | None = None, merge: bool = True) -> BarrierLevels:
    """Return the sorts and levels of the ops of a graph.

    Args:
        analysis: Analysis of the graph.
        allowed: Ops that may run on tiles; all if `None`.
        merge: Whether a variance may share the loop of its mean.
    """
    excluded: set[Node] = set()
    while True:
        roles = _KindAssigner(analysis, allowed=allowed, merge=merge, excluded=excluded).run()
        folded = _folded_results(analysis, roles)
        if not folded:
            return roles
        excluded |= folded


def _folded_results(analysis: GraphAnalysis, roles: BarrierLevels) -> set[Node]:
    """Return tiled ops whose folded results (space to batch) untiled ops read, which no iteration could write."""
    inside = {*roles.tiled, *roles.sums}
    nodes = set()
    for node in roles.tiled:
        for tensor in (node.out(index) for index in range(len(node.outputs))):
            if analysis.entries_per_image(tensor) != 1:
                consumers = (other for other, _ in analysis.consumers.get(tensor, ()) if not reads_shape_only(other))
                if tensor in analysis.graph.outputs or any(other not in inside for other in consumers):
                    nodes.add(node)
    return nodes


class _KindAssigner:
    """Assigns kinds and levels to ops, in topological order.

    Attributes:
        kinds: Kinds of the operands of tiled ops and reductions, and of the results of tiled ops.
        axes: Number of spatial axes of most images.
        batch: Batch size of most images of each device; each replica has its own.
        sort: `FULL` for a tiled op, `REDUCED` for a reduction.
        refused: Reason why another forward op on images is not tiled.
        summed: Tensors computed from reductions alone, such as the scales and offsets of a normalisation.
        filters: Gradients of filters, and results of the optimizer. They have as many dimensions as images.
    """

    def __init__(
        self, analysis: GraphAnalysis, *, allowed: Container[Node] | None, merge: bool, excluded: Container[Node]
    ) -> None:
        self.analysis = analysis
        self.allowed = allowed
        self.merge = merge
        self.excluded = excluded
        self.kinds: dict[Tensor, TileKind] = {}
        by_device = {device: main_images(analysis, device) for device in {node.device for node in analysis.order}}
        step_batch, self.axes = main_images(analysis)
        self.batch = {device: batch if axes else step_batch for device, (batch, axes) in by_device.items()}
        self.sort: dict[Node, TileKind] = {}
        self.refused: dict[Node, str] = {}
        self.summed: set[Tensor] = set()
        self.filters: set[Tensor] = set()

    def run(self) -> BarrierLevels:
        for node in self.analysis.order:
            if node not in self.analysis.data and not self._makes_constant_image(node):
                continue
            kind = self._kind(node)
            if kind is not None:
                self.sort[node] = kind
            if kind is TileKind.FULL:
                self.kinds.update((node.out(index), kind) for index in range(len(node.outputs)))
            results = [node.out(index) for index in range(len(node.outputs))]
            if "BackpropFilter" in node.op or (kind is None and self._is_filter(node)):
                self.filters.update(results)
            data = [t for t in node.inputs if t.node in self.analysis.data]
            reduced = kind is TileKind.REDUCED and not self._keeps_rows(node)
            if reduced or (kind is None and data and self.summed.issuperset(data)):
                self.summed.update(results)
        sums = [node for node, kind in self.sort.items() if kind is TileKind.REDUCED]
        pairs = {node: self._moments(node) for node in sums} if self.merge else {}
        moments = {node: pair for node, pair in pairs.items() if pair is not None}
        tiled = [node for node, kind in self.sort.items() if kind is TileKind.FULL]
        return BarrierLevels(self.analysis, tiled, sums, self.kinds, self._levels(moments), moments, self.refused)

    def _makes_constant_image(self, node: Node) -> bool:
        """Return whether an op computes an image from smaller operands and no data, such as a mask.

        Tiles compute their rows of it.
        """
        has_operands = bool(node.inputs and node.outputs) and node not in self.analysis.backward
        if not has_operands or not self._is_weight_of_pixels(node.out()) or not self._is_read_as_image(node.out()):
            return False
        if any(tensor.node in self.sort for tensor in node.inputs):
            return True
        return node.out().num_bytes() > sum(tensor.num_bytes() for tensor in node.inputs)

    def _is_read_as_image(self, tensor: Tensor) -> bool:
        """Return whether all consumers read a tensor as data, and none as the filter of a convolution."""
        for reader, position in self.analysis.consumers.get(tensor, ()):
            try:
                if position not in find_rule(reader).data(self.analysis.view(reader)):
                    return False
            except NotTileableError:
                continue  # It is not tiled.
        return True

    def _keeps_rows(self, node: Node) -> bool:
        """Return whether a reduction has a result for each row of each image, which iterations can split."""
        rule, view = find_rule(node), self.analysis.view(node)
        return rule.per_image(view) and (rule.per_pixel(view) or self.analysis.is_spatial(node.out()))

    def _kind(self, node: Node) -> TileKind | None:
        """Return `FULL` for a tiled op, `REDUCED` for a reduction, `None` for other ops."""
        if self.allowed is not None and node not in self.allowed:
            return None
        try:
            if node in self.excluded:
                raise NotTileableError(
                    "an untiled op reads its images, which are folded into the batch (space to batch)"
                )
            kinds = self._operands(node)
            result = find_rule(node).result_kind_gathered(self.analysis.view(node), kinds)
            self._check(node, kinds, result)
        except NotTileableError as error:
            images = [t for t in node.inputs if self.analysis.is_spatial(t)]
            reads_image = any(self._operand(t, node.device) is TileKind.FULL for t in images)
            if node not in self.analysis.backward and reads_image and not reads_shape_only(node):
                self.refused[node] = str(error)
            return None
        for tensor, kind in zip(node.inputs, kinds, strict=True):
            self.kinds.setdefault(tensor, kind)
        return result

    def _operands(self, node: Node) -> list[TileKind]:
        if is_xla_call(node):
            raise NotTileableError("XLA compiles it as a whole")
        if node.stateful:
            raise NotTileableError("it has side effects or draws random numbers")
        data = find_rule(node).data(self.analysis.view(node))
        kinds = [
            self._operand(t, node.device) if p in data or self.sort.get(t.node) is TileKind.FULL else TileKind.INVARIANT
            for p, t in enumerate(node.inputs)
        ]
        if TileKind.FULL in kinds or node not in self.analysis.data:
            kinds = [
                TileKind.FULL if p in data and self._is_image_without_data(t, node.device) else kind
                for p, (t, kind) in enumerate(zip(node.inputs, kinds, strict=True))
            ]
        return kinds

    def _is_weight_of_pixels(self, tensor: Tensor) -> bool:
        """Return whether a tensor that depends on no image has a value for each pixel."""
        has_one_entry = tensor.shape is not None and tensor.shape[:1] == (1,)
        return has_one_entry and tensor.node not in self.analysis.data and self.analysis.is_spatial(tensor)

    def _is_image_without_data(self, tensor: Tensor, device: str) -> bool:
        """Return whether a tensor that depends on no image has a value for each pixel: a weight, or a gradient.

        Examples are the gradient of a sum of scores, with which a gradient of a gradient begins, and a mask.
        """
        if self._is_weight_of_pixels(tensor):
            return True
        is_constant = tensor.node not in self.analysis.data
        return is_constant and self.analysis.is_spatial(tensor) and self._in_batch(tensor, device)

    def _is_filter(self, node: Node) -> bool:
        """Return whether an untiled op reads the gradient of a filter, or a tensor computed from one."""
        try:
            data = find_rule(node).data(self.analysis.view(node))
        except NotTileableError:
            data = list(range(len(node.inputs)))
        return any(t in self.filters for p, t in enumerate(node.inputs) if p in data)

    def _check(self, node: Node, kinds: list[TileKind], result: TileKind) -> None:
        """Refuse images of unknown size and ops without an image."""
        full = [t for t, kind in zip(node.inputs, kinds, strict=True) if kind is TileKind.FULL]
        results = [node.out(index) for index in range(len(node.outputs))] if result is TileKind.FULL else []
        for tensor in (*full, *results):
            if not self.analysis.has_known_size(tensor):
                raise NotTileableError(f"`{tensor.name}` has an unknown image size {tensor.shape}")
            if len(self.analysis.extents(tensor) or ()) != self.axes:
                raise NotTileableError(
                    f"`{tensor.name}` of shape {tensor.shape} does not have {self.axes} spatial axes"
                )
            if not self._in_batch(tensor, node.device) and not self._is_weight_of_pixels(tensor):
                raise NotTileableError(f"`{tensor.name}` of shape {tensor.shape} has another batch size")
        spatial = [self.analysis.is_spatial(tensor) for tensor in results or full]
        if not (all(spatial) if results else any(spatial)):
            raise NotTileableError("it reduces over the image")

    def _operand(self, tensor: Tensor, device: str) -> TileKind:
        """Return the kind of an image operand of an op on a device."""
        if self.sort.get(tensor.node) is TileKind.FULL:
            return TileKind.FULL
        if tensor.node not in self.analysis.data or not self.analysis.is_image(tensor):
            return TileKind.INVARIANT
        if tensor in self.filters or not self._in_batch(tensor, device) or self.analysis.entries_per_image(tensor) != 1:
            return TileKind.INVARIANT
        is_invariant = self.analysis.is_spatial(tensor) and tensor in self.summed
        return TileKind.INVARIANT if is_invariant else TileKind.FULL

    def _in_batch(self, tensor: Tensor, device: str) -> bool:
        """Return whether a tensor has the batch size of a device, so that iterations can split it with other images.

        Two arguments of unknown batch size are assumed to have the same one if an op reads images of both.
        """
        if self.analysis.entries_per_image(tensor) != 1:
            return True  # The tensor that was folded has been checked.
        sizes = self.analysis.evaluate.sizes
        size, batch = sizes.of(tensor), self.batch[device]
        return sizes.are_combined(size, batch) and sizes.assume_equal(size, batch)

    def _moments(self, node: Node) -> MomentPair | None:
        """Return the pair of moments of a mean of squared differences (B. P. Welford, 1962); `None` for other ops."""
        difference = node.inputs[0].node
        if node.op != "Mean" or self.sort.get(difference) is not TileKind.FULL:
            return None
        if difference.op == "Square":
            difference = difference.inputs[0].node
            if difference.op != "Sub":
                return None
        elif difference.op != "SquaredDifference":
            return None
        rule = find_rule(node)
        assert isinstance(rule, Reduce)
        axes = rule.axes(self.analysis.view(node))
        if rule.per_pixel(self.analysis.view(node)):
            return None  # `MergedMoments` merges moments over the image only.
        for image, other in (difference.inputs, reversed(difference.inputs)):
            mean = _source(other)
            if (
                mean.node.op != "Mean"
                or mean.node.inputs[0] != image
                or self.sort.get(mean.node) is not TileKind.REDUCED
            ):
                continue
            same_axes = rule.axes(self.analysis.view(mean.node)) == axes and mean.node.attrs["keep_dims"].b
            nodes = (node, difference, node.inputs[0].node)
            has_control_inputs = any(other.control_inputs for other in nodes)
            if same_axes and not has_control_inputs and image.dtype.is_floating and mean.dtype == node.out().dtype:
                keep = bool(node.attrs["keep_dims"].b)
                return MomentPair(image=image, mean=mean, variance=node.out(), axes=tuple(sorted(axes)), keep_dims=keep)
        return None

    def _levels(self, moments: dict[Node, MomentPair]) -> dict[Node, int]:
        level: dict[Node, int] = {}
        for node in self.analysis.order:
            if node in moments:
                level[node] = level[moments[node].mean.node]
                continue
            sort = self.sort.get(node)
            # A shape op of a tiled tensor reads the batch size of an entry instead (`TilePass._repoint_shapes`).
            is_shape_op = reads_shape_only(node)
            data = [t.node for t in node.inputs if not is_shape_op or self.sort.get(t.node) is None]
            levels = [self._level_after(other, sort, level) for other in (*dict.fromkeys(data), *node.control_inputs)]
            whole = _read_whole(self.analysis, node) if sort is TileKind.FULL else ()
            levels += [self._level_after(tensor.node, None, level) for tensor in whole]
            level[node] = max(levels, default=0)
        return level

    def _level_after(self, producer: Node, sort: TileKind | None, level: dict[Node, int]) -> int:
        """Return the first level of an op of some sort that depends on `producer`."""
        producer_sort = self.sort.get(producer)
        if producer_sort is None:
            return level[producer]
        same_loop = producer_sort is TileKind.FULL and sort is not None
        return level[producer] + (0 if same_loop else 1)


def _read_whole(analysis: GraphAnalysis, node: Node) -> list[Tensor]:
    """Return the images of which each tile of a tiled op reads all rows."""
    return [node.inputs[position] for position in find_rule(node).read_whole(analysis.view(node))]


def main_images(analysis: GraphAnalysis, device: str | None = None) -> tuple[Any, int]:
    """Return the batch size and number of axes of most bytes of forward images, on one device or on all of them."""
    num_bytes: dict[tuple[Any, int], int] = {}
    for node in analysis.order:
        if node in analysis.backward or node not in analysis.data or not node.inputs:
            continue
        if device not in (None, node.device):
            continue
        for tensor in (node.out(index) for index in range(len(node.outputs))):
            if analysis.is_spatial(tensor) and analysis.entries_per_image(tensor) == 1:
                key = (analysis.evaluate.sizes.of(tensor), len(analysis.extents(tensor) or ()))
                num_bytes[key] = num_bytes.get(key, 0) + tensor.num_bytes()
    return max(num_bytes, key=num_bytes.__getitem__, default=(None, 0))


def _source(tensor: Tensor) -> Tensor:
    """Return the tensor whose value a chain of identities forwards."""
    while tensor.node.op in ("StopGradient", "Identity", "PreventGradient") and tensor.node.inputs:
        tensor = tensor.node.inputs[0]
    return tensor
