"""Properties of the device and its kernels."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import tensorflow as tf

from rewriters.device.allocator import Allocator, BestFitAllocator, ExactAllocator
from rewriters.device.cards import planned_card
from rewriters.ir import tf_internals
from rewriters.ir.graph import Node
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_ALIASES = ops_with(Trait.FORWARDS_BUFFER)
_IN_PLACE = ops_with(Trait.IN_PLACE)
_FUSION_ROOTS = ops_with(Trait.FUSION_ROOT)
_EPILOGUES = ops_with(Trait.FUSION_EPILOGUE)
_PADDING = ops_with(Trait.FUSED_PADDING)
_SCALES = ops_with(Trait.SCALES)
_NO_ALLOCATION = ops_with(Trait.NO_ALLOCATION)

_ONEDNN_NEEDS = {
    tf.bfloat16: ({"avx512f"}, {"avx_ne_convert"}),
    tf.float16: ({"avx512bw", "avx512_fp16"}, {"avx512bw", "amx_fp16"}, {"avx_ne_convert"}),
}
"""Processor flags that oneDNN needs to compute in a type (tensorflow/core/util/util.cc)."""

POOL_STATES = 6
"""States of a growing pool that are tried; their peaks differ by a third."""

USABLE_FRACTION = 0.9
"""Fraction of a GPU's memory that tensors and the free chunks between them may fill; the executor's order varies."""


def device_of(node: Node) -> str:
    """Return the device that an op runs on, such as `"GPU:1"`; the planned one if the op names none."""
    return node.device.rpartition("/")[2].removeprefix("device:") or name()


def forwards_input_buffer(node: Node) -> bool:
    """Return whether the output of an op is its operand's buffer (an alias)."""
    return node.op in _ALIASES and len(node.outputs) == 1


def may_run_in_place(node: Node) -> bool:
    """Return whether the kernel may write into an operand's buffer that has no other consumer."""
    return node.op in _IN_PLACE


def may_fuse_with_consumer(node: Node, reader: Node | None = None) -> bool:
    """Return whether TensorFlow may fuse an operation with its consumer, such as a convolution and its bias.

    oneDNN fuses regardless of control edges: nodes before the consumer must not wait for the operation.

    Args:
        node: The operation.
        reader: Its only consumer; any if it is not given.
    """
    if node.op in _PADDING:
        return reader is None or reader.op in _FUSION_ROOTS
    return node.op in _FUSION_ROOTS | _EPILOGUES and (reader is None or reader.op in _EPILOGUES)


def may_move_constant(node: Node, reader: Node | None = None) -> bool:
    """Return whether TensorFlow may compute the constant factor of an op with that of its only consumer.

    (x * 2) * c becomes x * (2 * c) once c is a constant (`ConstantPushDown` in TensorFlow's constant folding). Ops that
    wait for the first product then wait for c.

    Args:
        node: The operation.
        reader: Its only consumer; any if it is not given.
    """
    has_constant = node.op in _SCALES and any(tensor.node.op == "Const" for tensor in node.inputs)
    return has_constant and (reader is None or reader.op in _SCALES)


def comparing_kernels() -> frozenset[str]:
    """Return the ops whose kernels search for bitwise equal operands, as `MaxPoolGrad` on a GPU."""
    return frozenset(("MaxPoolGrad",)) if name().startswith("GPU") else frozenset()


def pool_grad_needs_forward_workspace() -> bool:
    """Return whether the gradient of max pooling reads a workspace of the forward kernel, as with oneDNN."""
    return _uses_onednn()


def merges_bias_gradients() -> bool:
    """Return whether the gradients of a filter and of a bias may become one op, as with oneDNN."""
    return _uses_onednn()


def _uses_onednn() -> bool:
    """Return whether TensorFlow replaces ops by those of oneDNN, whose allocator has statistics."""
    return name().startswith("CPU") and has_allocator_stats()


def writes_in_place() -> bool:
    """Return whether `InplaceUpdate` is the fastest way to replace rows; on a GPU a strided assignment is as fast."""
    return name().startswith("CPU")


def allocates(node: Node) -> bool:
    """Return whether an op allocates its result."""
    return node.op not in _NO_ALLOCATION


def name() -> str:
    """Return the device whose memory is planned: the card that plans are made for, otherwise the first GPU."""
    return "GPU:0" if planned_card() or tf.config.list_logical_devices("GPU") else "CPU:0"


def compute_capability() -> float:
    """Return the compute capability of the planned GPU, such as 8.6; 0 without one."""
    card = planned_card()
    if card is not None:
        return card.compute_capability
    return _compute_capability() if name().startswith("GPU") else 0.0


@functools.cache
def _compute_capability() -> float:
    details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
    major, minor = details.get("compute_capability", (0, 0))
    return major + minor / 10


def has_allocator_stats() -> bool:
    """Return whether the device's allocator reports its peak: a GPU's does, and a CPU's with oneDNN."""
    return planned_card() is not None or _has_allocator_stats(name())


@functools.cache
def _has_allocator_stats(device: str) -> bool:
    try:
        tf.config.experimental.get_memory_info(device)
    except (ValueError, RuntimeError, tf.errors.OpError):
        return False
    return True


def min_counted_bytes() -> int:
    """Return the bytes below which a block is not in the allocator's statistics, as on a CPU with oneDNN."""
    return _min_counted_bytes() if planned_card() is None and has_allocator_stats() else 0


@functools.cache
def _min_counted_bytes() -> int:
    for size in (2**power for power in range(8, 21)):
        before = tf.config.experimental.get_memory_info(name())["current"]
        # While a step is traced, an op without this scope would allocate nothing.
        with tf.init_scope(), tf.device(name()):
            block = tf.identity(tf.zeros(size, tf.uint8))
        after = tf.config.experimental.get_memory_info(name())["current"]
        del block
        if after - before >= size:
            return size if size > 256 else 0
    return 0


def memory_limit(device: str = "") -> int | None:
    """Return the bytes that TensorFlow may allocate on a GPU; `None` on a CPU, where nothing limits them.

    Memory that other processes use when TensorFlow starts is not included, also with memory growth.

    Args:
        device: The GPU, by default the planned one.
    """
    card = planned_card()
    if card is not None:
        return card.memory_limit
    device = device or name()
    return _memory_limit(device) if device.startswith("GPU") else None


@functools.cache
def _memory_limit(device: str) -> int:
    return tf_internals.memory_limits()[device]


def usable_bytes() -> int | None:
    """Return the bytes that tensors and the free chunks between them may fill; `None` without a limit or chunks."""
    limit = memory_limit()
    return None if limit is None or _maps_pages() else int(USABLE_FRACTION * limit)


def pool(limit: int = BestFitAllocator.UNLIMITED_BYTES) -> Allocator:
    """Return a model of the device's empty memory.

    A device with statistics has TensorFlow's best-fit allocator; otherwise memory comes from the C library. A GPU takes
    all of its memory in one region unless memory growth is on.

    Args:
        limit: Bytes of the best-fit allocator.
    """
    if not has_allocator_stats() or _maps_pages():
        return ExactAllocator()
    return BestFitAllocator(_grows(), min_counted_bytes(), limit)


def pools(scale: int) -> Iterator[Allocator]:
    """Yield models of the memory in states that work of about `scale` bytes may leave, empty ones first."""
    first = pool()
    yield first
    if isinstance(first, BestFitAllocator) and _grows():
        yield from (BestFitAllocator.used(number, scale, min_counted_bytes()) for number in range(1, POOL_STATES))


def _maps_pages() -> bool:
    """Return whether a GPU's memory comes from CUDA's pool, which maps free pages to any address.

    TensorFlow's statistics then count requested bytes (xla/stream_executor/gpu/gpu_cudamallocasync_allocator.cc).
    """
    return name().startswith("GPU") and os.environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async"


def _grows() -> bool:
    if planned_card() is not None:
        return False
    gpus = tf.config.list_physical_devices("GPU")
    return not gpus or bool(tf.config.experimental.get_memory_growth(gpus[0]))


def unfolds_convolutions() -> bool:
    """Return whether convolution gradients unfold the image (im2col), as TensorFlow's own CPU kernels do."""
    return name().startswith("CPU") and not has_allocator_stats()


def onednn_computes(dtype: tf.DType) -> bool:
    """Return whether oneDNN has kernels for a type on this processor; otherwise TensorFlow uses its own."""
    if dtype == tf.float32:
        return True
    return any(needed <= _processor() for needed in _ONEDNN_NEEDS.get(dtype, ()))


@functools.cache
def _processor() -> frozenset[str]:
    """Return the processor's flags, as Linux names them."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
    except OSError:
        return frozenset()


def num_threads() -> int:
    """Return the number of intra-op threads of the CPU."""
    return tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1


def num_operations() -> int:
    """Return the number of inter-op threads of the CPU."""
    return tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
