"""Window tensors, their images, and the ops on images that may replace ops on window tensors.

A *window tensor* holds the windows of all images in one dimension: `(batch * windows, pixels, channels)`. Its *image*
has the same elements in the same order, and a dimension for the batch and for each axis of windows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.static_values import StaticEvaluator, add_constant, op_attrs

__all__: list[str] = []

MAX_RANK = 8
"""Dimensions for which TensorFlow has kernels of slices and selections."""


class Region:
    """A set of window tensors that ops connect. All ops of a region are rewritten, or none."""

    def __init__(self) -> None:
        self._parent: Region | None = None
        self._failed = False

    @property
    def root(self) -> Region:
        """Return the region that joined regions share."""
        return self if self._parent is None else self._parent.root

    @property
    def failed(self) -> bool:
        """Return whether some op of the region cannot be rewritten."""
        return self.root._failed

    def fail(self) -> None:
        """Mark the region as one that is not rewritten."""
        self.root._failed = True

    def join(self, other: Region) -> None:
        """Connect two regions."""
        if self.root is not other.root:
            self.root._failed |= other.failed
            other.root._parent = self.root


@dataclasses.dataclass(frozen=True)
class Windows:
    """A window tensor.

    Attributes:
        image: Its image.
        dim: Dimension of the window tensor that joins several dimensions of the image.
        joined: Number of joined dimensions.
        batch: Batch size of the image, a number or a symbol.
        region: Region of the window tensor.
    """

    image: Tensor
    dim: int
    joined: int
    batch: Any
    region: Region

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """Return the sizes of the joined dimensions; `None` for an unknown batch size."""
        return tuple(self.image.shape or ())[self.dim : self.dim + self.joined]

    def dims(self, dim: int) -> list[int]:
        """Return the dimensions of the image for a dimension of the window tensor."""
        if dim == self.dim:
            return list(range(dim, dim + self.joined))
        return [dim if dim < self.dim else dim + self.joined - 1]


class WindowGraph:
    """A graph, its window tensors, and the new ops on images.

    Attributes:
        graph: The graph.
        evaluate: Its static values.
        windows: Window tensors.
        replaced: New result and its region, by the result that it may replace.
        new_nodes: New op and its region, by the op that it may replace.
    """

    def __init__(self, graph: Graph, evaluate: StaticEvaluator) -> None:
        self.graph = graph
        self.evaluate = evaluate
        self.windows: dict[Tensor, Windows] = {}
        self.replaced: dict[Tensor, tuple[Tensor, Region]] = {}
        self.new_nodes: dict[Node, tuple[Node, Region]] = {}

    def record(self, node: Node, image: Tensor, dim: int, operand: Windows, index: int = 0) -> None:
        """Record the image of a result that is a window tensor, like an operand.

        Raises:
            NotTileableError: If more than its batch size is unknown, or it has too many dimensions.
        """
        shape = image.shape or ()
        if None in shape[1:] or len(shape) > MAX_RANK:
            raise NotTileableError(f"`{node.out(index).name}` has an unknown size, or too many dimensions as an image")
        image.node.control_inputs = self._control_inputs(node, operand.region)
        self.windows[node.out(index)] = dataclasses.replace(operand, image=image, dim=dim)
        self.replaced[node.out(index)] = image, operand.region
        self.new_nodes[node] = image.node, operand.region

    def replace(self, node: Node, new: Tensor, operand: Windows) -> None:
        """Record the replacement of a result that is an ordinary tensor."""
        new.node.control_inputs = self._control_inputs(node, operand.region)
        self.replaced[node.out()] = new, operand.region
        self.new_nodes[node] = new.node, operand.region

    def _control_inputs(self, node: Node, region: Region) -> list[Node]:
        """Return the control inputs of a new op: those of the old op, or the new ops in their place."""
        controls = []
        for old in node.control_inputs:
            control, control_region = self.new_nodes.get(old, (old, region))
            region.join(control_region)
            controls.append(control)
        return controls

    def add(self, near: Node, op: str, operands: Sequence[Tensor], attrs: Any, shape: Sequence[int | None]) -> Tensor:
        """Add an op with the dtype of the result of `near`, and return its result."""
        return self.graph.add_beside(near, op, operands, attrs, [(near.outputs[0][0], tuple(shape))]).out()

    def ints(self, near: Node, value: tuple[int, ...] | int, dtype: tf.DType = tf.int32) -> Tensor:
        """Add a constant."""
        return add_constant(self.graph, f"{near.name}/windows", value, dtype)

    def reshaped(self, near: Node, source: Tensor, shape: Sequence[int | None]) -> Tensor:
        """Add a reshape; at most one size may be unknown."""
        sizes = self.ints(near, tuple(-1 if size is None else size for size in shape))
        attrs = op_attrs(T=source.dtype, Tshape=tf.int32)
        return self.graph.add_beside(near, "Reshape", [source, sizes], attrs, [(source.dtype, tuple(shape))]).out()

    def add_shape(
        self, near: Node, image: Tensor, shape: Sequence[int | None], dtype: tf.DType, factor: int = 1
    ) -> Tensor:
        """Add a shape whose first size, if unknown, is `factor` times that of an image."""
        if None not in shape:
            return self.ints(near, tuple(size or 0 for size in shape), dtype)

        def added(op: str, operands: Sequence[Tensor], attrs: Any, size: int) -> Tensor:
            return self.graph.add_beside(near, op, operands, attrs, [(dtype, (size,))]).out()

        sizes = added("Shape", [image], op_attrs(T=image.dtype, out_type=dtype), len(image.shape or ()))
        attrs = op_attrs(T=dtype, Index=tf.int32)
        batch = added("Slice", [sizes, self.ints(near, (0,)), self.ints(near, (1,))], attrs, 1)
        batch = added("Mul", [batch, self.ints(near, (factor,), dtype)], op_attrs(T=dtype), 1)
        other_sizes = self.ints(near, tuple(size or 0 for size in shape[1:]), dtype)
        attrs = op_attrs(T=dtype, Tidx=tf.int32, N=2)
        return added("ConcatV2", [batch, other_sizes, self.ints(near, 0)], attrs, len(shape))

    def split(self, near: Node, tensor: Tensor, dim: int, windows: Windows) -> Tensor | None:
        """Split a dimension of an ordinary tensor in the same way as that of a window tensor.

        A dimension of size 1, which is broadcast, becomes several of size 1.

        Returns:
            `None` if the dimension may have another size.
        """
        shape, sizes = tensor.shape or (), windows.sizes
        if shape[dim] == 1:
            sizes = (1,) * len(sizes)
        elif not self._may_split(tensor, dim, windows):
            return None
        return self.reshaped(near, tensor, (*shape[:dim], *sizes, *shape[dim + 1 :]))

    def _may_split(self, tensor: Tensor, dim: int, windows: Windows) -> bool:
        """Return whether a dimension of a tensor has the size of the joined dimensions of a window tensor."""
        size = (tensor.shape or ())[dim]
        if None not in windows.sizes or size is not None:
            return size == math.prod(number or 0 for number in windows.sizes)
        leading_sizes = self.evaluate.sizes
        multiple = leading_sizes.multiple(windows.batch, math.prod(number or 1 for number in windows.sizes))
        return dim == 0 and leading_sizes.assume_equal(leading_sizes.of(tensor), multiple)

    def windows_of(self, node: Node, position: int = 0) -> Windows | None:
        """Return an operand as a window tensor; `None` for an ordinary tensor."""
        return self.windows.get(node.inputs[position])
