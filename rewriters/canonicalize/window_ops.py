"""Handlers, by op type, that add the op on images in place of an op on window tensors."""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Sequence

import tensorflow as tf

from rewriters.canonicalize.per_pixel_calls import add_per_pixel_call
from rewriters.canonicalize.window_graph import WindowGraph, Windows
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.static_values import op_attrs
from rewriters.rules.contraction import einsum_labels
from rewriters.rules.elementwise import ELEMENTWISE
from rewriters.rules.reduction import REDUCTIONS
from rewriters.rules.reshape import groups
from rewriters.rules.slicing import AxisSlice, cuts

__all__: list[str] = []

MAX_SOFTMAX_RANK = 5
"""Dimensions for which TensorFlow has a softmax: oneDNN refuses more."""

BATCH_STAND_IN = 1_000_003
"""Stands for the batch size: a prime larger than other sizes, so that products show which dimensions hold it."""


def _sizes_after(windows: Windows, out: Tensor, dim: int) -> tuple[int | None, ...]:
    """Return the shape of the image of a result whose dimension `dim` holds the windows."""
    shape = out.shape or ()
    return (*shape[:dim], *windows.sizes, *shape[dim + 1 :])


def _elementwise(folder: WindowGraph, node: Node) -> bool:
    """Rewrite an elementwise op."""
    out = node.out()
    rank = len(out.shape or ())
    offsets = [rank - len(tensor.shape or ()) for tensor in node.inputs]
    pairs = [(folder.windows[t], offset) for t, offset in zip(node.inputs, offsets, strict=True) if t in folder.windows]
    first, offset = pairs[0]
    dim = first.dim + offset
    if any(other.dim + o != dim or not _same_sizes(folder, other, first) for other, o in pairs[1:]):
        return False
    operands = []
    for tensor, offset in zip(node.inputs, offsets, strict=True):
        operand: Tensor | None = tensor
        if tensor in folder.windows:
            operand = folder.windows[tensor].image
        elif offset <= dim:
            operand = folder.split(node, tensor, dim - offset, first)
        if operand is None:
            return False
        operands.append(operand)
    image = folder.add(node, node.op, operands, dict(node.attrs), _sizes_after(first, out, dim))
    folder.record(node, image, dim, first)
    return True


def _same_sizes(folder: WindowGraph, one: Windows, other: Windows) -> bool:
    """Return whether the joined dimensions of two window tensors have equal sizes."""
    if one.sizes != other.sizes:
        return False
    return None not in one.sizes or folder.evaluate.sizes.assume_equal(one.batch, other.batch)


def _last_dimension(folder: WindowGraph, node: Node) -> bool:
    """Rewrite an op over the last dimension: a softmax, or a bias."""
    windows = folder.windows_of(node)
    if windows is None or any(tensor in folder.windows for tensor in node.inputs[1:]):
        return False
    channels_first = "data_format" in node.attrs and node.attrs["data_format"].s != b"NHWC"
    if channels_first or windows.dim == len(node.inputs[0].shape or ()) - 1:
        return False
    operands = [windows.image, *node.inputs[1:]]
    if node.op == "BiasAddGrad":
        folder.replace(node, folder.add(node, node.op, operands, dict(node.attrs), node.out().shape or ()), windows)
        return True
    shape = windows.image.shape or ()
    if "Softmax" in node.op and len(shape) > MAX_SOFTMAX_RANK:
        image = add_per_pixel_call(folder.graph, node, operands, [(windows.image.dtype, shape)]).out()
    else:
        image = folder.add(node, node.op, operands, dict(node.attrs), shape)
    folder.record(node, image, windows.dim, windows)
    return True


def _reduction(folder: WindowGraph, node: Node) -> bool:
    """Rewrite a reduction."""
    windows, axes = folder.windows_of(node), folder.evaluate.reduction_axes(node)
    if windows is None or axes is None:
        return False
    keeps = node.attrs["keep_dims"].b
    reduced = sorted(new for axis in axes for new in windows.dims(axis))
    source = windows.image.shape or ()
    shape = [1 if dim in reduced else size for dim, size in enumerate(source) if keeps or dim not in reduced]
    operands = [windows.image, folder.ints(node, tuple(reduced), node.inputs[1].dtype)]
    image = folder.add(node, node.op, operands, dict(node.attrs), shape)
    if windows.dim in axes:
        folder.replace(node, folder.reshaped(node, image, node.out().shape or ()) if keeps else image, windows)
    else:
        before = 0 if keeps else sum(axis < windows.dim for axis in axes)
        folder.record(node, image, windows.dim - before, windows)
    return True


def _transpose(folder: WindowGraph, node: Node) -> bool:
    """Rewrite a transposition."""
    windows, order = folder.windows_of(node), folder.evaluate.ints(node.inputs[1])
    if windows is None or order is None:
        return False
    image_order = tuple(moved for dim in order for moved in windows.dims(dim))
    operands = [windows.image, folder.ints(node, image_order, node.inputs[1].dtype)]
    shape = [(windows.image.shape or ())[dim] for dim in image_order]
    image = folder.add(node, "Transpose", operands, dict(node.attrs), shape)
    folder.record(node, image, order.index(windows.dim), windows)
    return True


def _repeat(folder: WindowGraph, node: Node) -> bool:
    """Rewrite a repetition, or a broadcast, along other dimensions than that of the windows."""
    windows, have, want = folder.windows_of(node), node.inputs[0].shape or (), node.out().shape or ()
    if windows is None or len(have) != len(want):
        return False
    if node.op == "Tile":
        times = folder.evaluate.ints(node.inputs[1])
    else:
        sizes = folder.evaluate.sizes
        if have[0] is None and not sizes.provably_equal(sizes.of(node.inputs[0]), sizes.of(node.out())):
            return False  # The batch may be repeated.
        times = tuple(1 if old == new else new or 0 for old, new in zip(have, want, strict=True))
    if times is None or times[windows.dim] != 1:
        return False
    multiples = (*times[: windows.dim], *(1,) * windows.joined, *times[windows.dim + 1 :])
    attrs = op_attrs(T=windows.image.dtype, Tmultiples=tf.int32)
    operands = [windows.image, folder.ints(node, multiples)]
    image = folder.add(node, "Tile", operands, attrs, _sizes_after(windows, node.out(), windows.dim))
    folder.record(node, image, windows.dim, windows)
    return True


def _product(folder: WindowGraph, node: Node) -> bool:
    """Rewrite an `Einsum`: one letter for each joined dimension replaces the letter of the windows."""
    *labels, out = einsum_labels(node)
    pairs = [(folder.windows[t], text) for t, text in zip(node.inputs, labels, strict=True) if t in folder.windows]
    windows = pairs[0][0]
    (letter, *others) = {text[other.dim] for other, text in pairs}
    if others or not all(_same_sizes(folder, other, windows) for other, _ in pairs):
        return False
    sizes: dict[str, set[int | None]] = {}
    for tensor, text in zip(node.inputs, labels, strict=True):
        for label, size in zip(text, tensor.shape or (), strict=True):
            sizes.setdefault(label, set()).add(size)
    if any(1 in label_sizes and len(label_sizes) > 1 for label_sizes in sizes.values()):
        return False  # TensorFlow broadcasts dimensions of an ellipsis only.
    unused = (label for label in string.ascii_letters if label not in "".join([*labels, out]))
    letters = "".join(next(unused) for _ in range(windows.joined))
    operands = []
    for tensor, text in zip(node.inputs, labels, strict=True):
        operand: Tensor | None = tensor
        if tensor in folder.windows:
            operand = folder.windows[tensor].image
        elif letter in text:
            operand = folder.split(node, tensor, text.index(letter), windows)
        if operand is None:
            return False
        operands.append(operand)
    equation = ",".join(text.replace(letter, letters) for text in labels) + "->" + out.replace(letter, letters)
    attrs = {**node.attrs, **op_attrs(equation=equation)}
    if letter in out:
        dim = out.index(letter)
        image = folder.add(node, "Einsum", operands, attrs, _sizes_after(windows, node.out(), dim))
        folder.record(node, image, dim, windows)
    else:
        folder.replace(node, folder.add(node, "Einsum", operands, attrs, node.out().shape or ()), windows)
    return True


def _matrix_product(folder: WindowGraph, node: Node) -> bool:
    """Rewrite the products of the matrices in the last two dimensions of two tensors."""
    first, second = (folder.windows.get(tensor) for tensor in node.inputs)
    shapes = [tensor.shape or () for tensor in node.inputs]
    if first is None or second is None or first.dim != second.dim or not _same_sizes(folder, first, second):
        return False
    if len(shapes[0]) != len(shapes[1]) or first.dim >= len(shapes[0]) - 2:
        return False
    shape = _sizes_after(first, node.out(), first.dim)
    image = folder.add(node, node.op, [first.image, second.image], dict(node.attrs), shape)
    folder.record(node, image, first.dim, first)
    return True


def _stack(folder: WindowGraph, node: Node) -> bool:
    """Rewrite a stack of windows, or their concatenation along another dimension."""
    is_stack = node.op == "Pack"
    parts = node.inputs if is_stack else node.inputs[:-1]
    stacked = [folder.windows[tensor] for tensor in parts if tensor in folder.windows]
    axis = node.attrs["axis"].i if is_stack else folder.evaluate(node.inputs[-1])
    if len(stacked) != len(parts) or not isinstance(axis, int):
        return False
    windows, axis = stacked[0], axis % len(node.out().shape or ())
    if any(other.dim != windows.dim or not _same_sizes(folder, other, windows) for other in stacked):
        return False
    if not is_stack and axis == windows.dim:
        return False
    dim = windows.dim + (is_stack and axis <= windows.dim)
    new = axis + windows.joined - 1 if axis > dim else axis
    operands, attrs = [other.image for other in stacked], dict(node.attrs)
    if is_stack:
        attrs |= op_attrs(axis=new)
    else:
        operands.append(folder.ints(node, new, node.inputs[-1].dtype))
    image = folder.add(node, node.op, operands, attrs, _sizes_after(windows, node.out(), dim))
    folder.record(node, image, dim, windows)
    return True


def _unstack(folder: WindowGraph, node: Node) -> bool:
    """Rewrite an op with a result for each entry, or for each part, of another dimension."""
    position = 1 if node.op == "Split" else 0
    windows = folder.windows_of(node, position)
    rank = len(node.inputs[position].shape or ())
    axis = node.attrs["axis"].i if node.op == "Unpack" else folder.evaluate(node.inputs[0 if position else 2])
    if windows is None or not isinstance(axis, int) or axis % rank == windows.dim:
        return False
    axis %= rank
    (new,), dim = windows.dims(axis), windows.dim - (node.op == "Unpack" and axis < windows.dim)
    attrs, operands = dict(node.attrs), [windows.image, *node.inputs[1:]]
    if node.op == "Unpack":
        attrs |= op_attrs(axis=new)
    elif node.op == "Split":
        operands = [folder.ints(node, new), windows.image]
    else:
        operands[2] = folder.ints(node, new)
    shapes = [_sizes_after(windows, node.out(index), dim) for index in range(len(node.outputs))]
    outputs = [(dtype, shape) for (dtype, _), shape in zip(node.outputs, shapes, strict=True)]
    images = folder.graph.add_beside(node, node.op, operands, attrs, outputs)
    for index in range(len(node.outputs)):
        folder.record(node, images.out(index), dim, windows, index)
    return True


def _slice(folder: WindowGraph, node: Node) -> bool:
    """Rewrite a slice along other dimensions than that of the windows, or its gradient."""
    position = 4 if node.op == "StridedSliceGrad" else 0
    windows, sliced = folder.windows_of(node, position), node.out() if position else node.inputs[0]
    shape, bounds = sliced.shape or (), [folder.evaluate.ints(tensor) for tensor in node.inputs[1:4]]
    if windows is None or None in bounds:
        return False
    slices = cuts(node, shape, bounds)  # type: ignore[arg-type]
    place = windows.dim if position == 0 else next((c.dim for c in slices if c.out == windows.dim), None)
    if place is None or any(cut.stride < 1 for cut in slices):
        return False
    whole = next(cut for cut in slices if cut.dim == place)
    out = node.out() if position == 0 else node.inputs[4]
    if whole.out is None or not _is_full(whole, shape):
        return False
    entries: list[tuple[int, int, int]] = []
    masks = dict.fromkeys(("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"), 0)
    for cut in slices:
        for _ in range(windows.joined if cut is whole else 1):
            bit = 1 << len(entries)
            masks["new_axis_mask"] |= bit * (cut.dim is None)
            masks["shrink_axis_mask"] |= bit * (cut.dim is not None and cut.out is None)
            masks["begin_mask"] |= bit * _is_full(cut, shape)
            masks["end_mask"] |= bit * _is_full(cut, shape)
            size = 1 if cut.size is None else cut.size
            entries.append((cut.begin, cut.begin + size * cut.stride, cut.stride))
    operands = [folder.ints(node, tuple(entry), node.inputs[1].dtype) for entry in zip(*entries, strict=True)]
    attrs = {**node.attrs, **op_attrs(**masks)}
    if position:
        full = _sizes_after(windows, node.out(), place)
        sizes = folder.add_shape(node, windows.image, full, node.inputs[0].dtype)
        image = folder.add(node, node.op, [sizes, *operands, windows.image], attrs, full)
        folder.record(node, image, place, windows)
    else:
        image = folder.add(node, node.op, [windows.image, *operands], attrs, _sizes_after(windows, out, whole.out))
        folder.record(node, image, whole.out, windows)
    return True


def _is_full(cut: AxisSlice, shape: Sequence[int | None]) -> bool:
    """Return whether a slice keeps a dimension and takes all of its entries."""
    return None not in (cut.dim, cut.out) and (cut.begin, cut.size, cut.stride) == (0, shape[cut.dim], 1)  # type: ignore[index]


def _slice_of_sizes(folder: WindowGraph, node: Node) -> bool:
    """Rewrite a `Slice` along other dimensions than that of the windows."""
    windows, leading_sizes = folder.windows_of(node), folder.evaluate.sizes
    first, count = folder.evaluate.ints(node.inputs[1]), folder.evaluate(node.inputs[2])
    have, want = node.inputs[0].shape or (), node.out().shape or ()
    if windows is None or first is None or not isinstance(count, tuple):
        return False
    place, joined, dtype = windows.dim, windows.joined, node.inputs[1].dtype
    full = leading_sizes.of(node.inputs[0]) if place == 0 else have[place]
    if first[place] != 0 or (count[place] != -1 and not leading_sizes.assume_equal(count[place], full)):
        return False
    if None in (*want[:place], *want[place + 1 :]):
        return False
    begin = (*first[:place], *(0,) * joined, *first[place + 1 :])
    size = (*want[:place], *(-1,) * joined, *want[place + 1 :])
    operands = [windows.image, folder.ints(node, begin, dtype), folder.ints(node, size, dtype)]  # type: ignore[arg-type]
    image = folder.add(node, "Slice", operands, dict(node.attrs), _sizes_after(windows, node.out(), place))
    folder.record(node, image, place, windows)
    return True


def _shape(folder: WindowGraph, node: Node) -> bool:
    """Rewrite a shape: the number of windows is a multiple of the batch size of the image."""
    windows, shape = folder.windows_of(node), node.inputs[0].shape or ()
    if windows is None or None in shape[1:]:
        return False
    factor = 1 if windows.dim else math.prod(size or 1 for size in windows.sizes[1:])
    folder.replace(node, folder.add_shape(node, windows.image, shape, node.outputs[0][0], factor), windows)
    return True


def _reshape(folder: WindowGraph, node: Node) -> bool:
    """Reshape the image instead; the result may be a window tensor again."""
    windows, out = folder.windows_of(node), node.out()
    if windows is None:
        return False
    image, shape = windows.image, out.shape or ()
    have, want = list(image.shape or ()), list(shape)
    if None in want[1:] or 0 in (*have, *want):
        return False
    if have[0] in (None, 1) and want:  # Otherwise a batch of one image would look like no dimension.
        have[0] = BATCH_STAND_IN
        if want[0] is None:
            want[0], remainder = divmod(math.prod(have), math.prod(want[1:]))  # type: ignore[arg-type]
            if remainder:
                return False
        else:
            want[0] *= BATCH_STAND_IN
    matching = groups(have, want)  # type: ignore[arg-type]
    if matching is None:
        return False
    run = set(range(windows.dim, windows.dim + windows.joined))
    joined = [(ins, outs[0]) for ins, outs in matching if len(ins) > 1 and len(outs) == 1 and run.intersection(ins)]
    if not joined:
        folder.replace(node, folder.reshaped(node, image, shape), windows)
        return True
    (ins, dim), *others = joined
    gaps = set(range(ins[0], ins[-1] + 1)).difference(ins)
    if others or any(have[gap] != 1 for gap in gaps):
        return False
    sizes_of_run = (image.shape or ())[ins[0] : ins[-1] + 1]
    new = folder.reshaped(node, image, (*shape[:dim], *sizes_of_run, *shape[dim + 1 :]))
    folder.record(node, new, dim, dataclasses.replace(windows, joined=len(sizes_of_run)))
    return True


_Handler = Callable[[WindowGraph, Node], bool]
HANDLERS: dict[str, _Handler] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("Softmax", "LogSoftmax", "BiasAdd", "BiasAddGrad"), _last_dimension),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(("Pack", "ConcatV2"), _stack),
    **dict.fromkeys(("Tile", "BroadcastTo"), _repeat),
    **dict.fromkeys(("Unpack", "Split", "SplitV"), _unstack),
    **dict.fromkeys(("Reshape", "ExpandDims", "Squeeze"), _reshape),
    "BatchMatMulV2": _matrix_product,
    "Einsum": _product,
    "Shape": _shape,
    "Slice": _slice_of_sizes,
    **dict.fromkeys(("StridedSlice", "StridedSliceGrad"), _slice),
    "Transpose": _transpose,
}
"""Each adds the op on images, and returns whether there is one."""
