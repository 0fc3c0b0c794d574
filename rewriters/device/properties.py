"""Every question of what the device and its kernels are like, in one place."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import tensorflow as tf

from rewriters.device.allocator import Allocator, BestFitAllocator, ExactAllocator
from rewriters.ir import tf_internals
from rewriters.ir.graph import Node
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_ALIASES = ops_with(Trait.FORWARDS_BUFFER)
_IN_PLACE = ops_with(Trait.IN_PLACE)
_FUSION_ROOTS = ops_with(Trait.FUSION_ROOT)
_EPILOGUES = ops_with(Trait.FUSION_EPILOGUE)
_PADDING = ops_with(Trait.FUSED_PADDING)
_NO_ALLOCATION = ops_with(Trait.NO_ALLOCATION)

_ONEDNN_NEEDS = {
    tf.bfloat16: ({"avx512f"}, {"avx_ne_convert"}),
    tf.float16: ({"avx512bw", "avx512_fp16"}, {"avx512bw", "amx_fp16"}, {"avx_ne_convert"}),
}
"""What a processor must be able to do for oneDNN to compute in a type (tensorflow/core/util/util.cc)."""

STATES = 6
"""States of a growing pool that are tried; peaks differ by a third between them."""


def forwards_input_buffer(node: Node) -> bool:
    """Whether an op's output is its operand's buffer."""
    return node.op in _ALIASES and len(node.outputs) == 1


def may_run_in_place(node: Node) -> bool:
    """Whether an op's kernel takes the buffer of an operand that nobody else reads."""
    return node.op in _IN_PLACE


def may_fuse_with_consumer(node: Node, reader: Node | None = None) -> bool:
    """Whether TensorFlow may make an operation one with its reader, such as a convolution and its bias.

    oneDNN does so whatever edges there are: what the reader waits for must not wait for the operation.

    Args:
        node: The operation.
        reader: Its only reader; any if it is not given.
    """
    if node.op in _PADDING:
        return reader is None or reader.op in _FUSION_ROOTS
    return node.op in _FUSION_ROOTS | _EPILOGUES and (reader is None or reader.op in _EPILOGUES)


def comparing_kernels() -> frozenset[str]:
    """Ops whose kernels look for operands that are the same to the last bit: a GPU's where the maximum came from."""
    return frozenset(("MaxPoolGrad",)) if name().startswith("GPU") else frozenset()


def pool_grad_needs_forward_workspace() -> bool:
    """Whether the kernel of a maximum tells that of its gradient where it was found: oneDNN's do."""
    return name().startswith("CPU") and has_allocator_stats()


def writes_in_place() -> bool:
    """Whether rows of a tensor are best replaced by `InplaceUpdate`: a GPU's strided assignment is as fast."""
    return name().startswith("CPU")


def allocates(node: Node) -> bool:
    """Whether an op makes something that was not there before."""
    return node.op not in _NO_ALLOCATION


def name() -> str:
    """The device whose memory counts: the first GPU if there is one."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def has_allocator_stats() -> bool:
    """Whether the device's allocator tells its peak: a GPU's does, a CPU's with oneDNN."""
    try:
        tf.config.experimental.get_memory_info(name())
    except (ValueError, RuntimeError, tf.errors.OpError):
        return False
    return True


@functools.cache
def counted_from() -> int:
    """Bytes below which a block is not in the allocator's statistics: with oneDNN others, from another allocator."""
    if not has_allocator_stats():
        return 0
    for size in (2**power for power in range(8, 21)):
        before = tf.config.experimental.get_memory_info(name())["current"]
        with tf.device(name()):
            block = tf.identity(tf.zeros(size, tf.uint8))
        after = tf.config.experimental.get_memory_info(name())["current"]
        del block
        if after - before >= size:
            return size if size > 256 else 0
    return 0


def most_memory() -> int:
    """Bytes that TensorFlow may take of the accelerator whose memory counts."""
    return tf_internals.memory_limits()[name()]


def pool() -> Allocator:
    """A model of the device's empty memory.

    Where the device keeps statistics they are those of TensorFlow's best-fit allocator; otherwise
    memory comes from the C library. A GPU gives all of its memory at once unless told to let it grow.
    """
    if not has_allocator_stats() or os.environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async":
        return ExactAllocator()
    return BestFitAllocator(_grows(), counted_from())


def pools(scale: int) -> Iterator[Allocator]:
    """The same in several states that earlier work of about `scale` bytes may leave it in, empty ones first."""
    first = pool()
    yield first
    if isinstance(first, BestFitAllocator) and _grows():
        yield from (BestFitAllocator.used(number, scale, counted_from()) for number in range(1, STATES))


def _grows() -> bool:
    gpus = tf.config.list_physical_devices("GPU")
    return not gpus or bool(tf.config.experimental.get_memory_growth(gpus[0]))


@functools.cache
def unfolds_convolutions() -> bool:
    """Whether gradients of convolutions unfold the image (im2col): TensorFlow's own CPU kernels do, oneDNN's not."""
    return name().startswith("CPU") and not has_allocator_stats()


def onednn_computes(dtype: tf.DType) -> bool:
    """Whether oneDNN has kernels for numbers of this type on this processor; TensorFlow takes its own otherwise."""
    if dtype == tf.float32:
        return True
    return any(needed <= _processor() for needed in _ONEDNN_NEEDS.get(dtype, ()))


@functools.cache
def _processor() -> frozenset[str]:
    """What the processor can do, as Linux calls it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
    except OSError:
        return frozenset()


def num_threads() -> int:
    """Threads that share the work of an operation on a CPU."""
    return tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1


def num_operations() -> int:
    """Operations that run at once on a CPU."""
    return tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
