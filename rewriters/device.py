"""Every question of what the device and its kernels are like, in one place."""

from __future__ import annotations

import functools
import math
import os

import tensorflow as tf

from rewriters.allocator import BestFit, Exact, Pool
from rewriters.graph import Node

__all__: list[str] = []


_ALIAS = frozenset(
    "Identity IdentityN Reshape Squeeze ExpandDims StopGradient PreventGradient Snapshot Bitcast EnsureShape".split()
)
_IN_PLACE = frozenset(
    "Abs Add AddN AddV2 BiasAdd Cast Ceil ClipByValue Cos Div DivNoNan Elu EluGrad Erf Erfc Exp Expm1 Floor LeakyRelu "
    "LeakyReluGrad Log Log1p Maximum Minimum Mul MulNoNan Neg Pow RealDiv Reciprocal Relu Relu6 Relu6Grad ReluGrad "
    "Round Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Softplus SoftplusGrad Softsign "
    "SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Sub Tanh TanhGrad".split()
)
_NO_BYTES = frozenset(["Placeholder", "Const", "ReadVariableOp", "VarHandleOp", "Empty", "NoOp"])
"""Ops whose outputs exist anyway (arguments, weights) or are counted elsewhere (a loop's buffers)."""


def passes_on(node: Node) -> bool:
    """Whether an op's output is its operand's buffer."""
    return node.op in _ALIAS and len(node.outputs) == 1


def overwrites(node: Node) -> bool:
    """Whether an op's kernel takes the buffer of an operand that nobody else reads."""
    return node.op in _IN_PLACE


def allocates(node: Node) -> bool:
    """Whether an op makes something that was not there before."""
    return node.op not in _NO_BYTES


def name() -> str:
    """The device whose memory counts: the first GPU if there is one."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def keeps_statistics() -> bool:
    """Whether the device's allocator tells its peak: a GPU's does, a CPU's with oneDNN."""
    try:
        tf.config.experimental.get_memory_info(name())
    except (ValueError, RuntimeError, tf.errors.OpError):
        return False
    return True


def pool() -> Pool:
    """A model of the device's empty memory.

    Where the device keeps statistics they are those of TensorFlow's best-fit allocator; otherwise
    memory comes from the C library. A GPU gives all of its memory at once unless told to let it grow.
    """
    if not keeps_statistics() or os.environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async":
        return Exact()
    gpus = tf.config.list_physical_devices("GPU")
    return BestFit(growing=not gpus or bool(tf.config.experimental.get_memory_growth(gpus[0])))


@functools.cache
def unfolds_convolutions() -> bool:
    """Whether gradients of convolutions unfold the image (im2col): TensorFlow's own CPU kernels do, oneDNN's not."""
    return name().startswith("CPU") and not keeps_statistics()


def kernel_scratch(node: Node, pixels: int) -> int:
    """Bytes that a convolution's kernel allocates for itself while it runs.

    Args:
        node: The op.
        pixels: Rows times columns of its small side (one per window) that it works on.

    Returns:
        Bytes; 0 for other ops, and on a GPU. TensorFlow's own CPU kernels, which are also those for
        float64, unfold one image for a gradient: a row of `taps * channels` per window. oneDNN keeps the
        filter, or its gradient, in a layout of its own, once more on the way in or out.
    """
    if not name().startswith("CPU") or node.op not in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"):
        return 0
    gradient = node.op != "Conv2D"
    dtype = node.outputs[0][0]
    shape = node.outputs[0][1] if node.op == "Conv2DBackpropFilter" else node.inputs[1].shape
    if shape is None or None in shape:
        return 0
    sizes = [int(dim or 1) for dim in shape]
    if unfolds_convolutions() or dtype == tf.float64:
        return pixels * math.prod(sizes[:3]) * dtype.size if gradient else 0
    return 2 * math.prod(sizes) * dtype.size
