"""Memory that convolutions allocate on a GPU beside their results: copies of operands, and cuDNN's workspace.

TensorFlow pads an image that cuDNN cannot pad evenly, and transposes operands if cuDNN computes channels first. The
gradient of an image is computed beside its result (tensorflow/core/kernels/conv_ops_impl.h,
conv_grad_input_ops.cc, conv_grad_filter_ops.cc, conv_ops_gpu.cc; the benchmark of a GPU measures all of them).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence

import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.device_detection import planned_device
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import Node
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

SWITCHED_OFF = ("layout_optimizer", "remapping", "memory_optimization")
"""TensorFlow's graph optimizers that rewritten steps switch off on a GPU, as fields of `RewriterConfig`."""

_FILTER_GRADIENTS = ops_with(Trait.CONV_FILTER_GRADIENT)
_INPUT_GRADIENTS = ops_with(Trait.CONV_INPUT_GRADIENT)

_VOLTA, _AMPERE = 7, 8
"""Compute capabilities from which cuDNN has tensor cores for float16, and for float32 rounded to TF32 and bfloat16."""

_WINOGRAD_RATIO = 2.25
"""Transformed entries per entry of both operands of Winograd's algorithm, with tiles of 4 x 4 and filters of 3 x 3."""

_WINOGRAD_FILTERS = 16
"""Copies of the filter that this algorithm makes, as measured."""

_DEFAULT_WORKSPACE_MIB = 4096


def computes_channels_last(dtype: tf.DType, device: DeviceModel) -> bool:
    """Return whether cuDNN convolves tensors of a type as TensorFlow stores them, with channels last."""
    capability = device.compute_capability
    if dtype == tf.float32:
        return capability >= _AMPERE and tf.config.experimental.tensor_float_32_execution_enabled()
    return (dtype == tf.float16 and capability >= _VOLTA) or (dtype == tf.bfloat16 and capability >= _AMPERE)


def convolution_scratch(
    node: Node, image: int, windows: int, sizes: Sequence[int], device: DeviceModel, *, is_padded: bool
) -> int:
    """Return the scratch bytes of a convolution or of a gradient of one on a GPU.

    Args:
        node: The op.
        image: Bytes of the images that windows slide over, in a loop those of a tile.
        windows: Bytes of the images with one pixel per window.
        sizes: Filter shape, taps first.
        device: The GPU.
        is_padded: Whether the images have their padding already.
    """
    dtype, taps = node.outputs[0][0], sizes[:-2]
    strides = list(node.attrs["strides"].list.i[1:-1]) if "strides" in node.attrs else [1] * len(taps)
    if math.prod(taps) == 1 and math.prod(strides) == 1:
        return 0  # A matrix product.
    is_filter_gradient = node.op in _FILTER_GRADIENTS
    channels_last = computes_channels_last(dtype, device)
    size = math.prod(sizes) * dtype.size
    if not channels_last:
        size += image + windows
    elif node.op in _INPUT_GRADIENTS:
        size += image
    if not is_padded and math.prod(strides) > 1 and "padding" in node.attrs and node.attrs["padding"].s == b"SAME":
        size += image
    workspace = 0
    if max(taps) > 3:
        workspace = 2 * image
    elif math.prod(strides) > 1:
        workspace = image
    elif is_filter_gradient and not channels_last and set(taps) == {3}:
        workspace = int(_WINOGRAD_RATIO * (image + windows)) + _WINOGRAD_FILTERS * math.prod(sizes) * dtype.size
    return size + min(workspace, workspace_limit())


def workspace_limit() -> int:
    """Return the bytes that cuDNN may use for the workspace of a convolution."""
    try:
        return max(int(os.environ["TF_CUDNN_WORKSPACE_LIMIT_IN_MB"]), 0) * 2**20
    except (KeyError, ValueError):
        return _DEFAULT_WORKSPACE_MIB * 2**20


def without_gpu_optimizers() -> contextlib.AbstractContextManager[None]:
    """Return a context whose functions run without layout optimizer, remapper and memory optimizer on a GPU.

    With channels first the layout optimizer adds transposes around tile loops and in their bodies. The remapper fuses
    convolutions with their bias and activation, and the fused kernel transposes image and result
    (tensorflow/core/kernels/conv_ops_fused_impl.h). No plan counts these copies, which are as large as the tiles. If
    its own estimate exceeds the memory of the GPU, the memory optimizer swaps more tensors, also those of loops.
    """
    return tf_internals.functions_without(SWITCHED_OFF) if planned_device().is_gpu else contextlib.nullcontext()
