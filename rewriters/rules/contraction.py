"""Products and cross-entropies per pixel: `Einsum`, and calls that run a matrix op on the pixels of images."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rewriters.device.kernel_scratch import multiplies_in_single_precision
from rewriters.errors import NotTileableError
from rewriters.ir.graph import PER_PIXEL, Node, Tensor
from rewriters.rules.axis_layouts import AxisMap
from rewriters.rules.elementwise import Pointwise, run_per_pixel
from rewriters.rules.intervals import Interval, hull_of, whole
from rewriters.rules.registry import AxisPlan, Emitter, OpView, Rule, TileKind, tiling_rule

__all__: list[str] = []

CROSS_ENTROPIES = ("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
CLASSIFICATIONS = (*CROSS_ENTROPIES, "InTopKV2")
"""Ops on the scores and on the label of each row of a matrix."""


def einsum_labels(node: Node) -> list[str]:
    """Return one letter per dimension of the operands of an `Einsum`, then of the result, without an ellipsis.

    Raises:
        NotTileableError: If a rank is unknown, or a letter occurs twice.
    """
    equation = node.attrs["equation"].s.decode().replace(" ", "")
    free = "".join(letter for letter in string.ascii_letters if letter not in equation)
    parts = equation.replace("->", ",").split(",")
    labels = []
    for part, tensor in zip(parts, [*node.inputs, node.out()], strict=True):
        if tensor.shape is None:
            raise NotTileableError(f"`{tensor.name}` has an unknown rank")
        hidden = free[: len(tensor.shape) - len(part.replace("...", ""))]
        labels.append(part.replace("...", hidden[::-1]))  # Reversed: broadcasting aligns the last dimensions.
    if any(len(set(letters)) < len(letters) for letters in labels):
        raise NotTileableError("an Einsum over a diagonal")
    return labels


@tiling_rule("Einsum")
class Einsum(Rule):
    """Product of images, or of images and matrices, by the letters of the batch and of the axes.

    - If the result has the axes of some operands, it is computed per pixel. Between barriers, an operand with other
      axes is read whole in each tile: the keys and values of attention for tiles of queries.
    - If neither batch nor axes are left, it is a reduction over the image, such as the gradient of a matrix.
    - If the batch is left, and none of the axes, it is a reduction with a result per image. The gradient of keys is
      one: it has the axes of keys, and is a sum over queries.
    """

    def _images(self, op: OpView) -> list[int]:
        """Return the operands that share the batch of the result; all operands of a reduction over the image."""
        *operands, out = einsum_labels(op.node)
        if self._sums(op):
            return list(range(len(operands)))
        return [position for position, letters in enumerate(operands) if letters and out and letters[0] == out[0]]

    def _sums(self, op: OpView) -> bool:
        """Return whether neither batch nor axes are left."""
        *operands, out = einsum_labels(op.node)
        return all(letters and letters[0] not in out for letters in operands)

    def sequences(self, op: OpView) -> list[Tensor]:
        """Return the operand with three dimensions of a product with a matrix, such as a dense layer on tokens."""
        try:
            first, *others = einsum_labels(op.node)
        except NotTileableError:
            return []
        is_product = len(others) == 2 and len(others[0]) == 2 and first[:2] == others[-1][:2]
        return [op.node.inputs[0]] if is_product and len(first) == 3 else []

    def links(self, op: OpView) -> list[AxisMap]:
        """Link the dimensions with equal letters."""
        try:
            *operands, out = einsum_labels(op.node)
            images = self._images(op)
        except NotTileableError:
            return []
        target, letters = op.node.out(), out
        if self._sums(op):
            target, letters = op.node.inputs[0], operands[0]
        images = images if self._sums(op) else self._linked(op, operands, out, images)
        pairs = [(op.node.inputs[p], operands[p]) for p in images if op.node.inputs[p] != target]
        return [
            AxisMap(
                tensor, target, {dim: letters.index(letter) for dim, letter in enumerate(labels) if letter in letters}
            )
            for tensor, labels in pairs
            if labels[0] == letters[0]
        ]

    def _linked(self, op: OpView, operands: Sequence[str], out: str, images: Sequence[int]) -> list[int]:
        """Return the operands whose axes may be those of the result.

        If several operands have a dimension of the result to themselves, those whose dimension is a channel are left
        out: the scores of attention are normalised over the keys. The last dimension is one if nothing normalises.
        """
        channels = {out[dim] for dim in op.layouts.channels(op.node.out())} or {out[-1]}
        shared = {p: "".join(operands[q] for q in images if q != p) for p in images}
        alone = {p for p in images if any(letter in out and letter not in shared[p] for letter in operands[p])}
        is_channel = {p for p in alone if (channels & set(operands[p])) - set(shared[p])}
        return [p for p in images if len(alone) < 2 or p not in is_channel]

    def read_whole(self, op: OpView) -> list[int]:
        """Return the operands with other axes than the result, and the same batch; none if all have other axes."""
        *operands, out = einsum_labels(op.node)
        images = self._images(op)
        if self._sums(op) or op.layouts.of(op.node.out()) is None:
            return []
        place = self._place_of_result(op, out)
        others = [p for p in images if self._axes(self._places(op, operands[p], p)) != self._axes(place)]
        return others if len(others) < len(images) else []

    def _place_of_result(self, op: OpView, out: str) -> list[str | None]:
        return [out[0], *(None if dim is None else out[dim] for dim in op.layout(op.node.out()).dims)]

    @staticmethod
    def _axes(place: Sequence[str | None]) -> set[str]:
        return {letter for letter in place[1:] if letter is not None}

    def _reduces_per_image(self, op: OpView) -> bool:
        """Return whether all operands have equal axes, and the result keeps the batch and no axis."""
        *operands, out = einsum_labels(op.node)
        images = self._images(op)
        if self._sums(op) or not images or len(images) < len(operands):
            return False
        places = [self._places(op, operands[p], p) for p in images]
        axes = self._axes(places[0])
        return bool(axes) and all(place == places[0] for place in places) and axes.isdisjoint(out)

    def per_image(self, op: OpView) -> bool:
        """Return whether a reduction has a result per image."""
        return not self._sums(op)

    def _places(self, op: OpView, letters: str, position: int) -> list[str | None]:
        """Return the letters of the batch and of every axis."""
        dims = op.layout(op.node.inputs[position]).dims
        return [letters[0], *(None if dim is None else letters[dim] for dim in dims)]

    def _sizes(self, op: OpView, position: int) -> list[Any]:
        """Return whether there is a single image, and the rows along each axis: an ellipsis broadcasts."""
        tensor = op.node.inputs[position]
        assert tensor.shape is not None
        return [tensor.shape[0] == 1, *(op.extent(tensor, axis) for axis in op.axes(tensor))]

    def _check(self, op: OpView, kinds: Sequence[TileKind], whole: Sequence[int] = ()) -> None:
        *operands, out = einsum_labels(op.node)
        images = [position for position in self._images(op) if position not in whole]
        if any(kinds[position] is not TileKind.FULL for position in whole):
            raise NotTileableError("an Einsum with an operand that has other axes and is not split along the batch")
        places = [self._places(op, operands[position], position) for position in images]
        if not images or any(kinds[position] is TileKind.INVARIANT for position in images):
            raise NotTileableError("an Einsum of operands that are the same for all tiles")
        if any(place != places[0] for place in places):
            raise NotTileableError("an Einsum of images with different axis orders")
        sizes = [self._sizes(op, position) for position in images]
        if any(size != sizes[0] for size in sizes):
            raise NotTileableError("an Einsum that broadcasts one image over another")
        moved = {letter for letter in places[0] if letter is not None}
        for position, letters in enumerate(operands):
            if position in images:
                continue
            shared = moved & set(letters) - {operands[images[0]][0]} if position in whole else moved & set(letters)
            if shared or (position not in whole and kinds[position] is not TileKind.INVARIANT):
                raise NotTileableError("an Einsum that combines different pixels of an image")
        if self._sums(op):
            if moved.intersection(out):
                raise NotTileableError("an Einsum that combines different pixels of an image")
            return
        dims = op.layout(op.node.out()).dims
        if [out[0], *(None if dim is None else out[dim] for dim in dims)] != places[0]:
            raise NotTileableError("an Einsum that moves the axes of an image, or sums over some of them")
        if [op.extent(op.node.out(), axis) for axis in range(len(dims))] != sizes[0][1:]:
            raise NotTileableError("an Einsum that broadcasts an image along an axis")

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the result, which is linear in each operand."""
        self._check(op, kinds)
        partial = [kind for kind in kinds if kind is TileKind.PARTIAL]
        if len(partial) > 1:
            raise NotTileableError("Einsum is not linear in two gradients")
        if self._sums(op):
            if not partial:
                raise NotTileableError("it reduces over the image, so that everything after it waits for all tiles")
            return TileKind.REDUCED
        return TileKind.PARTIAL if partial else TileKind.FULL

    def result_kind_gathered(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the result if all operands are true values."""
        if self._reduces_per_image(op):
            if any(kind is not TileKind.FULL for kind in kinds):
                raise NotTileableError("an Einsum of operands that are the same for all tiles")
            return TileKind.REDUCED
        self._check(op, kinds, self.read_whole(op))
        return TileKind.REDUCED if self._sums(op) else TileKind.FULL

    def _rows(self, op: OpView, axis: int, rows: Interval) -> list[Interval | None]:
        images, read_whole = self._images(op), self.read_whole(op)
        needs: list[Interval | None] = [rows if p in images else None for p in range(len(op.node.inputs))]
        for position in read_whole:
            needs[position] = whole(op.extent(op.node.inputs[position], axis), len(rows.lo))
        return needs

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require rows `out` of every image with the axes of the result, and all rows of the others."""
        return AxisPlan(out, out, self._rows(op, axis, out))

    def summed(self, op: OpView) -> int:
        """Return the first image; any operand serves."""
        return 0

    def operand_rows_for_reduction(self, op: OpView, axis: int, cell: Interval) -> AxisPlan:
        """Require the rows of the cell from all images."""
        return AxisPlan(None, None, self._rows(op, axis, cell))

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the rows of the gradient."""
        rows = hull_of([part for part in parts if part is not None])
        rows = rows.clip(op.extent(op.node.inputs[self._images(op)[0]], axis))
        out = None if self._sums(op) else rows
        return AxisPlan(out, out, self._rows(op, axis, rows))

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run on the tile, in float32 where the kernel for half precision is slow."""
        if not multiplies_in_single_precision(op.node, op.device):
            return emitter.clone(op.node, operands)
        equation = op.node.attrs["equation"].s
        product = tf.raw_ops.Einsum(inputs=[tf.cast(operand, tf.float32) for operand in operands], equation=equation)
        return [tf.cast(product, op.node.outputs[0][0])]

    def weights(self, op: OpView) -> list[Tensor]:
        """Return the operands that each iteration reads in full, and the result of a reduction."""
        images = set(self._images(op)) - set(self.read_whole(op))
        image_operands = [tensor for position, tensor in enumerate(op.node.inputs) if position not in images]
        is_reduced = self._sums(op) or self._reduces_per_image(op)
        return [*image_operands, op.node.out()] if is_reduced else image_operands

    def flops(self, op: OpView, batch: int) -> float:
        """Return two operations per combination of letters; 0 if a size is unknown."""
        try:
            labels = einsum_labels(op.node)
        except NotTileableError:
            return 0.0
        sizes: dict[str, int] = {}
        for letters, tensor in zip(labels, op.node.inputs, strict=False):
            for number, (letter, size) in enumerate(zip(letters, tensor.shape or (), strict=True)):
                sizes[letter] = (batch if number == 0 else 0) if size is None else size
        return 2.0 * math.prod(float(size) for size in sizes.values())


@tiling_rule("MatMul")
class MatMul(Rule):
    """Product of samples and a matrix; with `transpose_a` the gradient of the matrix, a sum over the batch.

    Products of pixels are `Einsum`s after canonicalization.
    """

    def _sums(self, op: OpView) -> bool:
        return bool(op.node.attrs["transpose_a"].b)

    def data(self, op: OpView) -> list[int]:
        """Return the positions of the operands that hold samples."""
        return [0, 1] if self._sums(op) else [0]

    def links(self, op: OpView) -> list[AxisMap]:
        """Link samples and their products."""
        return [] if self._sums(op) else [AxisMap(op.node.inputs[0], op.node.out(), {0: 0})]

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the result, which is linear in each operand."""
        result = self.result_kind_gathered(op, [TileKind.FULL if k is TileKind.PARTIAL else k for k in kinds])
        partial = kinds.count(TileKind.PARTIAL)
        if result is TileKind.FULL:
            return kinds[0]
        if partial == 1:
            return result
        raise NotTileableError("it reduces over the batch, so that everything after it waits for all tiles")

    def result_kind_gathered(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the result if all operands are true values."""
        if not op.layouts.are_rows:
            raise NotTileableError("it mixes all pixels of an image")
        if self._sums(op):
            if any(kind is not TileKind.FULL for kind in kinds) or op.node.attrs["transpose_b"].b:
                raise NotTileableError("a product over the batch with a tensor that is the same for all tiles")
            if None in (op.node.out().shape or (None,)):
                raise NotTileableError("a product over the batch of unknown size")
            return TileKind.REDUCED
        if kinds[1] is not TileKind.INVARIANT:
            raise NotTileableError("a product of samples with each other")
        return kinds[0]

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require the samples."""
        return AxisPlan(out, out, [out, None])

    def summed(self, op: OpView) -> int:
        """Return the first operand; the other one has the same samples."""
        return 0

    def operand_rows_for_reduction(self, op: OpView, axis: int, cell: Interval) -> AxisPlan:
        """Require the samples of both operands."""
        return AxisPlan(None, None, [cell, cell])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the samples of the gradient."""
        rows = hull_of([part for part in parts if part is not None])
        return AxisPlan(None, None, [rows, rows]) if self._sums(op) else AxisPlan(rows, rows, [rows, None])

    def weights(self, op: OpView) -> list[Tensor]:
        """Return the matrix."""
        return [op.node.out() if self._sums(op) else op.node.inputs[1]]

    def flops(self, op: OpView, batch: int) -> float:
        """Return two operations per sample and entry of the matrix; 0 in steps of images, or if a size is unknown."""
        samples, other = op.node.inputs[0].shape, (op.node.out() if self._sums(op) else op.node.inputs[1]).shape
        if not op.layouts.are_rows or not samples or not other or None in (*samples[1:], *other):
            return 0.0
        return 2.0 * (batch if samples[0] is None else samples[0]) * math.prod(map(int, other))  # type: ignore[arg-type]


@tiling_rule(*CLASSIFICATIONS)
class Classification(Pointwise):
    """Op on the scores and on the label of each pixel, as `matrices_to_images.py` calls it.

    Cross-entropies return the loss and its gradient by the scores. `InTopKV2`, whose third operand is a number, tells
    whether the label is among the best classes.
    """

    def data(self, op: OpView) -> list[int]:
        """Return scores and labels."""
        return [0, 1]

    def links(self, op: OpView) -> list[AxisMap]:
        """Link equal dimensions of all tensors."""
        features = op.node.inputs[0]
        if features.shape is None:
            return []
        pixels = {dim: dim for dim in range(len(features.shape) - 1)}
        return [
            AxisMap(features, tensor, pixels)
            for tensor in self._others(op)
            if tensor.shape is not None and len(tensor.shape) in (len(pixels), len(pixels) + 1)
        ]

    @staticmethod
    def _others(op: OpView) -> list[Tensor]:
        """Return the labels and the results."""
        return [op.node.inputs[1], *map(op.node.out, range(len(op.node.outputs)))]

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `FULL` for forward values; the channels must come last."""
        if PER_PIXEL not in op.node.attrs:
            raise NotTileableError("the rows of its matrix are not the pixels of an image")
        if any(kind is not TileKind.FULL for kind in kinds[:2]):
            raise NotTileableError(f"{op.node.op} needs an image, and labels for each of its pixels")
        features = op.node.inputs[0]
        if len(features.shape or ()) - 1 in op.layout(features).dims:
            raise NotTileableError("its classes are an axis of the image")
        if any(op.layout(tensor) != op.layout(features) for tensor in self._others(op)):
            raise NotTileableError("its labels have another axis order than the image")
        return TileKind.FULL

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require rows `out` of scores and labels."""
        return AxisPlan(out, out, [out, out, *[None] * (len(op.node.inputs) - 2)])

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run the body of the called function inline."""
        return run_per_pixel(op.node.kernel, op.device, *operands)
