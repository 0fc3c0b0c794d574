"""Which operations run on tiles where sums over the image lie between them, and in which loop each of them first can.

A mean over the image, such as a moment of BatchNorm in training mode, makes all that depends on it wait for all tiles:
it is a *barrier*. No operation is one by its type. Every operation is of one of three sorts:

- *tiled*: it has a rule and makes an image;
- a *sum*: it reduces images over all tiled axes (moments, gradients of filters and biases);
- *outside*: everything else, which runs once, on whole tensors, between two loops.

The level of an operation is the number of loops that have to end before it can run. Operations of one level share a
loop. Forward and backward are not told apart: a gradient is an image like any other, each turn of a loop makes the
rows of it that it needs (it *gathers*), and operations that add forward values to a gradient are nothing special.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.inlining import is_xla_call
from rewriters.rules.reduction import Reduce
from rewriters.rules.registry import TileKind, find_rule

__all__: list[str] = []


@dataclasses.dataclass(frozen=True)
class MomentPair:
    """A variance that can be computed in the same loop as the mean that it is taken about.

    Attributes:
        image: What the moments are of.
        mean: Result of the first reduction.
        variance: Result of the second one.
        axes: Both reduce over.
        keep_dims: Whether the axes stay, in the variance.
    """

    image: Tensor
    mean: Tensor
    variance: Tensor
    axes: tuple[int, ...]
    keep_dims: bool


@dataclasses.dataclass
class BarrierLevels:
    """Sorts and levels.

    Attributes:
        analysis: Of the graph.
        tiled: Operations that run on tiles, in topological order.
        sums: Reductions over the image, in topological order.
        kinds: Of the operands of both, and of the results of the tiled ones.
        level: Of every operation.
        moments: By the operation that makes the variance.
        refused: Why other forward operations on images run on whole ones.
    """

    analysis: GraphAnalysis
    tiled: list[Node]
    sums: list[Node]
    kinds: dict[Tensor, TileKind]
    level: dict[Node, int]
    moments: dict[Node, MomentPair]
    refused: dict[Node, str]

    def operands(self, node: Node) -> list[Tensor]:
        """What a tiled operation or a sum reads of images: a variance the image itself."""
        if node in self.moments:
            return [self.moments[node].image]
        rebuilt = find_rule(node).shape_operands(self.analysis.view(node))
        read = (tensor for position, tensor in enumerate(node.inputs) if position not in rebuilt)
        return [tensor for tensor in dict.fromkeys(read) if self.kinds.get(tensor) is TileKind.FULL]


def assign_levels(analysis: GraphAnalysis, allowed: Container[Node] | None = None, merge: bool = True) -> BarrierLevels:
    """Sort the operations of a graph.

    Args:
        analysis: Of the graph.
        allowed: Operations that may run on tiles; all if it is not given.
        merge: Whether a variance may share the loop of its mean.
    """
    excluded: set[Node] = set()
    while True:
        roles = _Sorter(analysis, allowed, merge, excluded).run()
        ended = _ended_among_pixels(analysis, roles)
        if not ended:
            return roles
        excluded |= ended


def _ended_among_pixels(analysis: GraphAnalysis, roles: BarrierLevels) -> set[Node]:
    """Operations on images made of pixels that others read, on whole ones: no turn could hand over its part."""
    inside = {*roles.tiled, *roles.sums}
    found = set()
    for node in roles.tiled:
        for tensor in (node.out(index) for index in range(len(node.outputs))):
            if analysis.entries_per_image(tensor) != 1:
                readers = (reader for reader, _ in analysis.consumers.get(tensor, ()) if not reads_shape_only(reader))
                if tensor in analysis.graph.outputs or any(reader not in inside for reader in readers):
                    found.add(node)
    return found


class _Sorter:
    def __init__(
        self, analysis: GraphAnalysis, allowed: Container[Node] | None, merge: bool, excluded: Container[Node]
    ) -> None:
        self.analysis = analysis
        self.allowed = allowed
        self.merge = merge
        self.excluded = excluded
        self.kinds: dict[Tensor, TileKind] = {}
        own = {device: main_images(analysis, device) for device in {node.device for node in analysis.order}}
        whole, self.axes = main_images(analysis)
        self.batch = {device: batch if axes else whole for device, (batch, axes) in own.items()}
        """By device: replicas have a batch each."""
        self.sort: dict[Node, TileKind] = {}
        self.refused: dict[Node, str] = {}
        self.summed: set[Tensor] = set()
        """What is computed from sums alone, such as the scales and offsets of a normalisation."""
        self.filters: set[Tensor] = set()
        """Gradients of filters and what an optimizer makes of them; they have four dimensions, as images have."""

    def run(self) -> BarrierLevels:
        for node in self.analysis.order:
            if node not in self.analysis.data:
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
            if kind is TileKind.REDUCED or (kind is None and data and self.summed.issuperset(data)):
                self.summed.update(results)
        sums = [node for node, kind in self.sort.items() if kind is TileKind.REDUCED]
        moments = {node: found for node in sums if self.merge and (found := self._moments(node)) is not None}
        tiled = [node for node, kind in self.sort.items() if kind is TileKind.FULL]
        return BarrierLevels(self.analysis, tiled, sums, self.kinds, self._levels(moments), moments, self.refused)

    def _kind(self, node: Node) -> TileKind | None:
        """`FULL` for a tiled operation, `REDUCED` for a sum, `None` for others."""
        if self.allowed is not None and node not in self.allowed:
            return None
        try:
            if node in self.excluded:
                raise NotTileableError("it works on images made of pixels, which what follows takes as a whole")
            kinds = self._operands(node)
            result = find_rule(node).result_kind_gathered(self.analysis.view(node), kinds)
            self._check(node, kinds, result)
        except NotTileableError as error:
            images = [t for t in node.inputs if _is_spatial(self.analysis, t)]
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
        if TileKind.FULL in kinds:
            kinds = [
                TileKind.FULL if p in data and self._is_weight_of_pixels(t) else kind
                for p, (t, kind) in enumerate(zip(node.inputs, kinds, strict=True))
            ]
        return kinds

    def _is_weight_of_pixels(self, tensor: Tensor) -> bool:
        """Whether something that no image goes into, beside one, has a value for each pixel."""
        one = tensor.shape is not None and tensor.shape[:1] == (1,)
        return one and tensor.node not in self.analysis.data and _is_spatial(self.analysis, tensor)

    def _is_filter(self, node: Node) -> bool:
        """Whether an operation that does not run on tiles makes something of a filter's gradient."""
        try:
            data = find_rule(node).data(self.analysis.view(node))
        except NotTileableError:
            data = list(range(len(node.inputs)))
        return any(t in self.filters for p, t in enumerate(node.inputs) if p in data)

    def _check(self, node: Node, kinds: list[TileKind], result: TileKind) -> None:
        """Refuse images of unknown size, and operations that have nothing to do with images."""
        full = [t for t, kind in zip(node.inputs, kinds, strict=True) if kind is TileKind.FULL]
        results = [node.out(index) for index in range(len(node.outputs))] if result is TileKind.FULL else []
        for tensor in (*full, *results):
            if not self.analysis.has_known_size(tensor):
                raise NotTileableError(f"`{tensor.name}` has an unknown image size {tensor.shape}")
            if len(self.analysis.extents(tensor) or ()) != self.axes:
                raise NotTileableError(f"`{tensor.name}` of shape {tensor.shape} has another number of axes")
            if not self._in_batch(tensor, node.device) and not self._is_weight_of_pixels(tensor):
                raise NotTileableError(f"`{tensor.name}` of shape {tensor.shape} is of another number of images")
        spatial = [_is_spatial(self.analysis, tensor) for tensor in results or full]
        if not (all(spatial) if results else any(spatial)):
            raise NotTileableError("it makes one value for all pixels")

    def _operand(self, tensor: Tensor, device: str) -> TileKind:
        """Kind of what stands in the place of an image for an operation on a device."""
        if self.sort.get(tensor.node) is TileKind.FULL:
            return TileKind.FULL
        if tensor.node not in self.analysis.data or not self.analysis.is_image(tensor):
            return TileKind.INVARIANT
        if tensor in self.filters or not self._in_batch(tensor, device) or self.analysis.entries_per_image(tensor) != 1:
            return TileKind.INVARIANT
        one_value = not _is_spatial(self.analysis, tensor)
        return TileKind.FULL if one_value or tensor not in self.summed else TileKind.INVARIANT

    def _in_batch(self, tensor: Tensor, device: str) -> bool:
        """Whether a tensor has as many images as the batch of a device: turns take their part of all of them alike.

        Two arguments of unknown numbers are taken to have the same where an operation takes images of both.
        """
        if self.analysis.entries_per_image(tensor) != 1:
            return True  # It was made of what has been looked at.
        sizes = self.analysis.evaluate.sizes
        return sizes.meet(sizes.of(tensor), self.batch[device])

    def _moments(self, node: Node) -> MomentPair | None:
        """The moments that a mean of squared differences from a mean belongs to (B. P. Welford, 1962)."""
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
            return None  # Those of a turn would have to be merged in their place.
        for image, other in (difference.inputs, reversed(difference.inputs)):
            mean = _source(other)
            if (
                mean.node.op != "Mean"
                or mean.node.inputs[0] != image
                or self.sort.get(mean.node) is not TileKind.REDUCED
            ):
                continue
            same = rule.axes(self.analysis.view(mean.node)) == axes and mean.node.attrs["keep_dims"].b
            waits = node.control_inputs or difference.control_inputs or node.inputs[0].node.control_inputs
            if same and not waits and image.dtype.is_floating and mean.dtype == node.out().dtype:
                keep = bool(node.attrs["keep_dims"].b)
                return MomentPair(image, mean, node.out(), tuple(sorted(axes)), keep)
        return None

    def _levels(self, moments: dict[Node, MomentPair]) -> dict[Node, int]:
        level: dict[Node, int] = {}
        for node in self.analysis.order:
            if node in moments:
                level[node] = level[moments[node].mean.node]
                continue
            own = self.sort.get(node)
            # The batch of what is tiled is asked of the entries; what is outside has to be there to be asked.
            asks = reads_shape_only(node)
            before = [t.node for t in node.inputs if not asks or self.sort.get(t.node) is None]
            found = [self._after(other, own, level) for other in dict.fromkeys(before)]
            found += [self._after(other, own, level) for other in node.control_inputs]
            level[node] = max(found, default=0)
        return level

    def _after(self, before: Node, own: TileKind | None, level: dict[Node, int]) -> int:
        """Loops that have to end before what reads a node can run."""
        sort = self.sort.get(before)
        if sort is None:
            return level[before]
        same_loop = sort is TileKind.FULL and own is not None
        return level[before] + (0 if same_loop else 1)


def main_images(analysis: GraphAnalysis, device: str | None = None) -> tuple[Any, int]:
    """The number of images, and of their axes, that most of what the forward phase makes has, there or anywhere."""
    elements: dict[tuple[Any, int], int] = {}
    for node in analysis.order:
        if node in analysis.backward or node not in analysis.data or not node.inputs:
            continue
        if device not in (None, node.device):
            continue
        for tensor in (node.out(index) for index in range(len(node.outputs))):
            if _is_spatial(analysis, tensor) and analysis.entries_per_image(tensor) == 1:
                key = (analysis.evaluate.sizes.of(tensor), len(analysis.extents(tensor) or ()))
                elements[key] = elements.get(key, 0) + tensor.num_bytes()
    return max(elements, key=elements.__getitem__, default=(None, 0))


def _source(tensor: Tensor) -> Tensor:
    """What a tensor is passed on from."""
    while tensor.node.op in ("StopGradient", "Identity", "PreventGradient") and tensor.node.inputs:
        tensor = tensor.node.inputs[0]
    return tensor


def _is_spatial(analysis: GraphAnalysis, tensor: Tensor) -> bool:
    """Whether a tensor has more than one pixel."""
    return analysis.has_known_size(tensor) and any(rows != 1 for rows in analysis.extents(tensor) or ())
