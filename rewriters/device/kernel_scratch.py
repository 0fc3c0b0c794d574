"""Kernel scratch: memory that kernels allocate for themselves while they run.

TensorFlow's own CPU kernels compute gradients of convolutions as matrix products. They serve float64 always, and
float16 on most processors. An image is unfolded (im2col) into a row of taps times channels per window. The number of
images that are unfolded concurrently depends on a cache size, not on the batch size
(tensorflow/core/kernels/conv_grad_input_ops.h, conv_grad_filter_ops.h, conv_grad_ops_3d.cc).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import tensorflow as tf

from rewriters.device.gpu_kernels import convolution_scratch
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import PER_PIXEL, Node, Shape, Tensor
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

T = TypeVar("T")

_FILTER_GRADIENTS = ops_with(Trait.CONV_FILTER_GRADIENT)
_INPUT_GRADIENTS = ops_with(Trait.CONV_INPUT_GRADIENT)
_FORWARD = ops_with(Trait.CONVOLUTION)
_UNFOLDING = _FILTER_GRADIENTS | _INPUT_GRADIENTS | {"MaxPoolGrad"}
_DEPTHWISE = ops_with(Trait.DEPTHWISE_GRADIENT)
_COUNTED = _UNFOLDING | _FORWARD
_MATRIX_PRODUCTS = ops_with(Trait.MATRIX_PRODUCT)
_PRODUCTS = _MATRIX_PRODUCTS | {"Einsum"}
_VOLUMES = ops_with(Trait.VOLUMETRIC)
_SOFTMAX = ops_with(Trait.SOFTMAX)

MAX_UNFOLDING_RATIO = 25
"""Unfolded entries per operand entry above which a 3-D kernel does not unfold."""


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """Sizes that a kernel runs on.

    Attributes:
        images: Number of images.
        small: Pixels of an image on the small side: one per window.
        large: Pixels of an image on the large side, over which windows slide.
        is_tile: Whether the images are tiles, which the emission has padded.
    """

    images: int
    small: int
    large: int
    is_tile: bool = False


def scratch_bytes(node: Node, call: KernelShape, device: DeviceModel) -> int:
    """Return the scratch bytes of a convolution, a gradient of one, a pooling gradient or a cross-entropy.

    They are 0 for other ops, and on a GPU for all but convolutions (`op_scratch` adds that of softmax). The gradient of
    max pooling recomputes the maxima with their positions. A cross-entropy needs an entry per pixel. oneDNN copies a
    filter, or its gradient, once between the layout of TensorFlow and its own.

    Args:
        node: The op.
        call: Sizes that its kernel runs on, in a loop those of a tile.
        device: The device.
    """
    if not node.outputs:
        return 0
    if device.is_gpu:
        sizes = _filter_sizes(node)
        if sizes is None:
            return 0
        pixel_bytes = call.images * node.outputs[0][0].size
        image, windows = pixel_bytes * call.large * sizes[-2], pixel_bytes * call.small * sizes[-1]
        return convolution_scratch(node, image, windows, sizes, device, is_padded=call.is_tile)
    dtype = node.outputs[0][0]
    if PER_PIXEL in node.attrs:
        return 0 if node.kernel in _SOFTMAX else call.images * call.small * dtype.size
    if node.op == "MaxPoolGrad":
        channels = int((node.outputs[0][1] or (0,))[-1] or 0)
        return call.images * call.small * channels * (dtype.size + tf.int64.size) if _own(node, device) else 0
    sizes = _filter_sizes(node)
    if sizes is None:
        return 0
    if _own(node, device):
        return unfolded_at_once(node.op, dtype, call, sizes, device) * dtype.size
    return math.prod(sizes) * dtype.size if node.op not in _VOLUMES else 0


def softmax_scratch(node: Node, result_bytes: int, device: DeviceModel) -> int:
    """Return the scratch bytes of a softmax with a result of `result_bytes`; 0 for other ops.

    On a GPU the kernel allocates two tensors of the result's shape, for maxima and for sums, and uses one entry of each
    row (tensorflow/core/kernels/softmax_op_gpu.cu.cc). Sums have at least 32 bits.
    """
    if node.kernel not in _SOFTMAX or not device.is_gpu:
        return 0
    size = node.outputs[0][0].size
    return result_bytes + result_bytes // size * max(size, tf.float32.size)


def multiplies_in_single_precision(node: Node, device: DeviceModel) -> bool:
    """Return whether a product in half precision runs in float32, because the processor has no kernel for its type.

    TensorFlow's kernels of matrix products convert their operands (tensorflow/core/kernels/matmul_op_impl.h). That of
    `Einsum` does not, and takes about ten times as long. Loops therefore cast its operands.
    """
    if node.op not in _PRODUCTS or not node.outputs or device.is_gpu:
        return False
    dtype = node.outputs[0][0]
    return dtype in (tf.float16, tf.bfloat16) and _own(node, device)


def product_scratch(node: Node, operand_bytes: Sequence[int], result_bytes: int, device: DeviceModel) -> int:
    """Return the scratch bytes of a matrix product or an `Einsum`; 0 for other ops.

    They are copies in float32 of operands and result in half precision, where the kernel computes in it.
    """
    if not multiplies_in_single_precision(node, device):
        return 0
    return (sum(operand_bytes) + result_bytes) * tf.float32.size // node.outputs[0][0].size


class ConcurrencyGroup(Generic[T]):
    """Groups of large-scratch operations that may run concurrently: both gradients of a convolution.

    Both are ready at the same time, and unfolding one image occupies one core. In a rewritten step a group waits for
    the group before it, so that scratch memory stays within the prediction.

    Args:
        member: Decides which operations belong to groups. Operations with the same gradient, their last operand, form
            one.
    """

    def __init__(self, member: Callable[[Node], bool]) -> None:
        self._member = member
        self._gradient: Tensor | None = None
        self._own: list[T] = []
        self._last: list[T] = []

    def before(self, node: Node) -> list[T]:
        """Return the values for which `node`, the next in order, must wait."""
        if not self._member(node):
            return []
        return self._last if node.inputs[-1] == self._gradient else self._own

    def add(self, node: Node, value: T) -> None:
        """Append a node; later groups wait for `value`."""
        if self._member(node):
            if node.inputs[-1] != self._gradient:
                self._gradient, self._own, self._last = node.inputs[-1], [], self._own
            self._own.append(value)


def takes_memory(node: Node, device: DeviceModel) -> bool:
    """Return whether a gradient runs on a CPU by a kernel of TensorFlow, not oneDNN, with large scratch memory."""
    return bool(node.outputs) and node.op in _UNFOLDING and not device.is_gpu and _own(node, device)


def is_conv_or_pool_grad(node: Node) -> bool:
    """Return whether an operation is a gradient of a convolution or of max pooling, with any kernel."""
    return node.op in _UNFOLDING | _DEPTHWISE


def unfolds(node: Node, device: DeviceModel) -> bool:
    """Return whether an operation is a convolution gradient with a kernel of TensorFlow's own."""
    return takes_memory(node, device) and node.op in _FILTER_GRADIENTS | _INPUT_GRADIENTS


def idle_cores(node: Node, call: KernelShape, device: DeviceModel) -> float:
    """Return the fraction of idle cores while a gradient kernel copies windows: each image occupies one core."""
    sizes = _filter_sizes(node)
    if sizes is None or not unfolds(node, device) or not call.small:
        return 0.0
    entries = unfolded_at_once(node.op, node.outputs[0][0], call, sizes, device)
    at_once, threads = entries // (call.small * math.prod(sizes[:-1])), device.intra_op_threads
    return 1 - min(at_once, call.images, threads) / threads if at_once else 0.0


def window_bytes(node: Node, call: KernelShape, device: DeviceModel) -> int:
    """Return the bytes of all windows that the kernel of a convolution or of its gradient copies in one call.

    They are windows of the image. A filter gradient without unfolding has windows of the output gradient, with its
    channels.
    """
    sizes = _filter_sizes(node)
    if sizes is None or not _own(node, device):
        return 0
    channels = sizes[-1] if node.op in _FILTER_GRADIENTS and is_direct(node, call, device) else sizes[-2]
    return call.images * call.small * math.prod(sizes[:-2]) * channels * node.outputs[0][0].size


def is_direct(node: Node, call: KernelShape, device: DeviceModel) -> bool:
    """Return whether a gradient kernel does not unfold, as 3-D kernels may, and is slower."""
    sizes = _filter_sizes(node)
    if sizes is None or not may_be_direct(node, device):
        return False
    return not unfolded_at_once(node.op, node.outputs[0][0], call, sizes, device)


def may_be_direct(node: Node, device: DeviceModel) -> bool:
    """Return whether `is_direct` depends on the sizes that the kernel runs on."""
    return node.op in _VOLUMES - _FORWARD and _own(node, device)


def row_bytes(node: Node, device: DeviceModel) -> int:
    """Return the bytes of a row of the image and of the output gradient that the kernel of a filter gradient reads.

    They are 0 for kernels whose time does not depend on them: those of a GPU, those of TensorFlow's own, and oneDNN's
    for windows of one pixel.
    """
    sizes = _filter_sizes(node)
    if node.op not in _FILTER_GRADIENTS or sizes is None or math.prod(sizes[:-2]) == 1:
        return 0
    if device.is_gpu or _own(node, device):
        return 0
    rows = (node.inputs[0].shape or ())[-2:], (node.inputs[2].shape or ())[-2:]
    return sum(math.prod(int(size or 0) for size in row) for row in rows) * node.outputs[0][0].size


def is_convolution(node: Node) -> bool:
    """Return whether an op is a forward convolution."""
    return node.op in _FORWARD


def full_call(node: Node, batch: int) -> KernelShape:
    """Return the sizes that the kernel of a full-size op runs on."""
    if PER_PIXEL in node.attrs:
        images, *rows = node.outputs[0][1] or (0,)
        return KernelShape(batch if images is None else images, math.prod(int(number or 0) for number in rows), 0)
    if node.op in _FORWARD:
        small, large = node.outputs[0][1], node.inputs[0].shape
    elif len(node.inputs) == 3:
        small = node.inputs[2].shape
        large = node.outputs[0][1] if node.op in _INPUT_GRADIENTS else node.inputs[0].shape
        small = _shape_of_windows(node, small, large)
    else:
        return KernelShape(batch, 0, 0)
    if small is None or len(small) < 4:
        return KernelShape(batch, 0, 0)
    windows, pixels = (math.prod(int(dim or 0) for dim in (shape or ())[1:-1]) for shape in (small, large))
    return KernelShape(batch if small[0] is None else small[0], windows, pixels)


def _shape_of_windows(node: Node, small: Shape, large: Shape) -> Shape:
    """Return the shape of the output gradient of a convolution, from that of the image where it is unknown.

    The gradients in the loop of a recurrent layer have no shape if the batch size is open. Without padding the image
    has fewer windows than the result says.
    """
    is_known = small is not None and None not in small[1:-1]
    if is_known or large is None or None in large[1:-1] or "strides" not in node.attrs:
        return small
    sizes = zip(large[1:-1], node.attrs["strides"].list.i[1:-1], strict=True)
    return (large[0], *(-(-int(size or 0) // stride) for size, stride in sizes), None)


def may_take_scratch(node: Node) -> bool:
    """Return whether an op may have scratch bytes; a search asks this of millions of ops, most of which have none."""
    return node.op in _COUNTED or node.op in _PRODUCTS or node.kernel in _SOFTMAX or PER_PIXEL in node.attrs


def op_scratch(node: Node, batch: int, device: DeviceModel) -> int:
    """Return the scratch bytes of a full-size op on a device."""
    if not may_take_scratch(node):
        return 0
    result_bytes = node.out().num_bytes(batch)
    if node.op in _MATRIX_PRODUCTS:
        return product_scratch(node, [tensor.num_bytes(batch) for tensor in node.inputs], result_bytes, device)
    return scratch_bytes(node, full_call(node, batch), device) + softmax_scratch(node, result_bytes, device)


def slid_over(node: Node) -> int | None:
    """Return the position of the operand that a gradient's windows slide over; `None` if that is its result."""
    return None if node.op in _INPUT_GRADIENTS else 0


def _own(node: Node, device: DeviceModel) -> bool:
    """Return whether an op runs a kernel of TensorFlow's own."""
    return device.unfolds_convolutions or not device.onednn_computes(node.outputs[0][0])


def _filter_sizes(node: Node) -> list[int] | None:
    """Return the filter shape of a convolution or of its gradient, taps first; `None` for other ops."""
    if node.op not in _FILTER_GRADIENTS | _INPUT_GRADIENTS | _FORWARD:
        return None
    shape = node.outputs[0][1] if node.op in _FILTER_GRADIENTS else node.inputs[1].shape
    return None if shape is None or None in shape else [int(dim or 1) for dim in shape]


def unfolded_at_once(op: str, dtype: tf.DType, call: KernelShape, sizes: Sequence[int], device: DeviceModel) -> int:
    """Return the number of entries that TensorFlow's own kernel unfolds concurrently; `sizes` has the taps first.

    It is 0 for a forward convolution, and for a 3-D kernel that does not unfold.
    """
    row, channels = math.prod(sizes[:-1]), sizes[-1]
    unit = call.small * (row + channels) + row * channels
    if op in _FORWARD or not call.small * call.images * row:
        return 0
    cache = device.last_level_cache_bytes if op in _VOLUMES else device.l3_bytes
    alone = op in _INPUT_GRADIENTS and call.images == 1
    if op == "Conv2DBackpropInput":  # One image keeps all threads busy.
        alone = alone or unit // device.intra_op_threads >= device.l2_bytes // dtype.size
    unfolded = (1 if alone else max(-(-(cache // dtype.size) // unit), 1)) * call.small * row
    if op in _VOLUMES:
        operands = call.images * (call.large * sizes[-2] + call.small * channels) + row * channels
        return 0 if unfolded // operands > MAX_UNFOLDING_RATIO else unfolded
    return unfolded
