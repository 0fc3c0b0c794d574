"""The device that a graph is rewritten for: facts that travel with the graph, as the target of a module in a compiler.

This module does not import TensorFlow. `device_detection.py` reads the facts of the present machine.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

__all__: list[str] = []

USABLE_FRACTION = 0.9
"""Fraction of a GPU's memory that tensors and the free chunks between them may fill; the executor's order varies."""

DEFAULT_CACHE_BYTES = 2 * 2**20
"""Last-level cache that 3-D kernels assume where the system reports none."""

_ONEDNN_NEEDS = {
    "bfloat16": ({"avx512f"}, {"avx_ne_convert"}),
    "float16": ({"avx512bw", "avx512_fp16"}, {"avx512bw", "amx_fp16"}, {"avx_ne_convert"}),
}
"""Processor flags that oneDNN needs to compute in a type (tensorflow/core/util/util.cc)."""

CONTEXT_BYTES = 400 * 2**20
"""Memory that the CUDA context and its libraries take, which no tensor can use; 300 to 600 MiB on most cards."""

_RESERVED_MIB = ((6, 500), (7, 1050), (8, 1536), (99, 1800))
"""MiB that TensorFlow leaves to the system, up to a major compute capability
(tensorflow/core/common_runtime/gpu/gpu_device.cc, MinSystemMemory)."""


def gpu_maps_pages() -> bool:
    """Return whether TensorFlow allocates memory of a GPU from CUDA's pool."""
    return os.environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async"


@dataclasses.dataclass(frozen=True)
class Card:
    """Data sheet of a graphics card.

    Attributes:
        name: Name in `--device-model`.
        title: Name of the product.
        compute_capability: Version of its instructions, such as 8.6.
        memory_bytes: Memory of the card.
        memory_rate: Bytes/s between its memory and its cores.
        host_rate: Bytes/s between its memory and the host, in one direction.
        float32: Floating point operations/s in float32.
        float64: Floating point operations/s in float64, without tensor cores.
        tf32: Operations/s of its tensor cores, without sparsity, on float32 rounded to 10 bits; 0 without such cores.
    """

    name: str
    title: str
    compute_capability: float
    memory_bytes: int
    memory_rate: float
    host_rate: float
    float32: float
    float64: float
    tf32: float = 0.0

    @property
    def memory_limit(self) -> int:
        """Return the bytes that TensorFlow allocates on the card if nothing else uses it."""
        reserved = next(mib for major, mib in _RESERVED_MIB if int(self.compute_capability) <= major)
        return self.memory_bytes - CONTEXT_BYTES - reserved * 2**20

    def device_model(self, host: DeviceModel) -> DeviceModel:
        """Return the device of the machine of `host` with this card, for `planning_for`."""
        return dataclasses.replace(
            host,
            name="GPU:0",
            card=self,
            compute_capability=self.compute_capability,
            has_allocator_stats=True,
            min_counted_bytes=0,
            memory_limit=self.memory_limit,
            grows=False,
            maps_pages=gpu_maps_pages(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """Facts about a device and its host.

    Attributes:
        name: Name in TensorFlow, such as `"GPU:0"`.
        card: Planned graphics card; `None` for a device of this machine.
        compute_capability: Compute capability of a GPU, such as 8.6; 0 for a CPU.
        has_allocator_stats: Whether the allocator reports its peak: a GPU's does, and a CPU's with oneDNN.
        min_counted_bytes: Bytes below which a block is not in the allocator's statistics, as on a CPU with oneDNN.
        memory_limit: Bytes that TensorFlow may allocate on a GPU; `None` on a CPU, where nothing limits them. Memory
            that other processes use when TensorFlow starts is not included, also with memory growth.
        grows: Whether the allocator takes memory in several regions: a CPU's does, and a GPU's with memory growth.
        maps_pages: Whether a GPU's memory comes from CUDA's pool, which maps free pages to any address. TensorFlow's
            statistics then count requested bytes (xla/stream_executor/gpu/gpu_cudamallocasync_allocator.cc).
        processor_flags: Flags of the host's processor, as Linux names them.
        intra_op_threads, inter_op_threads: Threads of the host.
        l2_bytes, l3_bytes: Caches that 2-D kernels assume on every machine.
        last_level_cache_bytes: Last-level cache that 3-D kernels assume: the machine's, or a default.
        second_level_cache_bytes: Second-level cache of a core; 0 if it is unknown.
    """

    name: str
    card: Card | None = None
    compute_capability: float = 0.0
    has_allocator_stats: bool = False
    min_counted_bytes: int = 0
    memory_limit: int | None = None
    grows: bool = True
    maps_pages: bool = False
    processor_flags: frozenset[str] = frozenset()
    intra_op_threads: int = 1
    inter_op_threads: int = 1
    l2_bytes: int = 256 * 2**10
    l3_bytes: int = 30 * 2**20
    last_level_cache_bytes: int = DEFAULT_CACHE_BYTES
    second_level_cache_bytes: int = 0

    @property
    def is_gpu(self) -> bool:
        """Return whether the device is a GPU; otherwise it is a CPU."""
        return self.name.startswith("GPU")

    @property
    def uses_onednn(self) -> bool:
        """Return whether TensorFlow replaces ops by those of oneDNN, whose allocator has statistics.

        The gradients of a filter and of a bias may then become one op. The gradient of max pooling reads a workspace of
        the forward kernel.
        """
        return not self.is_gpu and self.has_allocator_stats

    @property
    def unfolds_convolutions(self) -> bool:
        """Return whether convolution gradients unfold the image (im2col), as TensorFlow's own CPU kernels do."""
        return not self.is_gpu and not self.has_allocator_stats

    def onednn_computes(self, dtype: Any) -> bool:
        """Return whether oneDNN has kernels for a type on this processor; otherwise TensorFlow uses its own."""
        if dtype.name == "float32":
            return True
        return any(needed <= self.processor_flags for needed in _ONEDNN_NEEDS.get(dtype.name, ()))

    @property
    def writes_in_place(self) -> bool:
        """Return whether `InplaceUpdate` is the fastest way to replace rows; on a GPU strided assignment is as fast."""
        return not self.is_gpu

    @property
    def comparing_kernels(self) -> frozenset[str]:
        """Return the ops whose kernels search for bitwise equal operands, as `MaxPoolGrad` on a GPU."""
        return frozenset(("MaxPoolGrad",)) if self.is_gpu else frozenset()

    @property
    def usable_bytes(self) -> int | None:
        """Return the bytes that tensors and the free chunks between them may fill; `None` without a limit or chunks."""
        return None if self.memory_limit is None or self.maps_pages else int(USABLE_FRACTION * self.memory_limit)


_Change = Callable[[DeviceModel], DeviceModel]

_planned: contextvars.ContextVar[_Change | None] = contextvars.ContextVar("planned device", default=None)


def planned_instead(device: DeviceModel) -> DeviceModel:
    """Return the device that plans are made for in place of `device`: another one within `planning_for`."""
    change = _planned.get()
    return device if change is None else change(device)


@contextlib.contextmanager
def planning_for(change: _Change) -> Iterator[None]:
    """Plan for a device that need not be in this machine, within this context.

    Args:
        change: Function from the device that would be planned for to the other one, called for each graph that is read:
            a script may configure TensorFlow within the context.
    """
    outer = _planned.get()
    token = _planned.set(change if outer is None else lambda device: change(outer(device)))
    try:
        yield
    finally:
        _planned.reset(token)
