"""Models of a device's allocator, which replay a sequence of allocations.

TensorFlow's allocator (`BFCAllocator`: best fit with coalescing) returns the smallest free chunk that is large enough.
It splits the chunk only if the remainder is worth it, so a tensor may occupy up to twice its size, and the device's
peak counts the chunk. Where tensors are few and large, as in a tile loop, that is a third of the peak.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
from random import Random
from typing import Any

from rewriters.ir.device_model import DeviceModel

__all__: list[str] = []

MIB = 2**20

POOL_STATES = 6
"""States of a growing pool that are tried; their peaks differ by a third."""


class ExactAllocator:
    """Allocator without fragmentation, such as `malloc` for large blocks.

    Attributes:
        in_use: Bytes that the device counts as allocated.
    """

    def __init__(self) -> None:
        self.in_use = 0

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory and return a handle for `free`."""
        self.in_use += num_bytes
        return num_bytes

    map = allocate

    def free(self, handle: Any) -> None:
        """Free an allocation."""
        self.in_use -= handle


@dataclasses.dataclass(eq=False, slots=True)
class _Chunk:
    """A piece of a region, free or in use, with links to its neighbours."""

    address: int
    size: int
    free: bool = True
    before: _Chunk | None = None
    behind: _Chunk | None = None


class BestFitAllocator:
    """TensorFlow's best-fit allocator with coalescing, with its default options.

    Args:
        growing: Whether it takes memory from the device in regions of doubling size (a CPU, and a GPU with memory
            growth) rather than in one region.
        least: Bytes below which a block comes from another allocator, as on a CPU with oneDNN.
        limit: Bytes of all regions together.
    """

    UNIT = 256
    FIRST_REGION = 2 * MIB
    MAX_UNUSED_BYTES = 128 * MIB
    """Bytes of remainder from which on a chunk is always split."""
    UNLIMITED_BYTES = 2**50

    def __init__(self, growing: bool, least: int = 0, limit: int = UNLIMITED_BYTES) -> None:
        self.in_use = 0
        self._least = least
        self._unmapped = limit
        self._region = self.FIRST_REGION if growing else limit
        self._end = 0
        self._free: list[tuple[int, int, _Chunk]] = []

    @classmethod
    def used(cls, number: int, scale: int, least: int = 0) -> BestFitAllocator:
        """Return a growing pool as other work may have left it: fragmented, with some chunks still allocated.

        Args:
            number: Index of the pool; 0 is a fresh one.
            scale: Approximate bytes of the other work.
            least: As for the constructor.

        Returns:
            A pool whose `in_use` is 0: earlier allocations do not count.
        """
        pool, random = cls(True, least), Random(number)
        if number:
            held = [pool.allocate(random.randint(1, scale)) for _ in range(random.randint(1, 4))]
            for handle in held[: random.randint(0, len(held))]:
                pool.free(handle)
            pool.in_use = 0
        return pool

    def allocate(self, num_bytes: int) -> _Chunk | int | None:
        """Allocate memory.

        Raises:
            MemoryError: If no free chunk is large enough, and none can be added within the limit.
        """
        if num_bytes <= 0:
            return None
        if num_bytes < self._least:
            return self.map(num_bytes)
        wanted = self._rounded(num_bytes)
        index = bisect.bisect_left(self._free, (wanted, -1))
        if index == len(self._free):
            if wanted > self._unmapped:
                self._collect_free_regions(wanted)
            self._grow(wanted)
            index = bisect.bisect_left(self._free, (wanted, -1))
        chunk = self._free.pop(index)[2]
        chunk.free = False
        if chunk.size >= 2 * wanted or chunk.size - wanted >= self.MAX_UNUSED_BYTES:
            self._split(chunk, wanted)
        self.in_use += chunk.size
        return chunk

    def map(self, num_bytes: int) -> int:
        """Count bytes outside of the pool, such as mapped pages of a file, and return a handle for `free`."""
        self.in_use += num_bytes
        return num_bytes

    def free(self, handle: _Chunk | int | None) -> None:
        """Free an allocation and coalesce it with free neighbours."""
        if handle is None:
            return
        if isinstance(handle, int):
            self.in_use -= handle
            return
        self.in_use -= handle.size
        chunk = handle
        if chunk.behind is not None and chunk.behind.free:
            self._forget(chunk.behind)
            self._join(chunk, chunk.behind)
        if chunk.before is not None and chunk.before.free:
            chunk = chunk.before
            self._forget(chunk)
            assert chunk.behind is not None
            self._join(chunk, chunk.behind)
        self._offer(chunk)

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.UNIT) * self.UNIT

    def _collect_free_regions(self, wanted: int) -> None:
        """Return regions without allocations to the device, as TensorFlow does on a GPU before it runs out of memory.

        Raises:
            MemoryError: If that is not enough.
        """
        regions = [chunk for _, _, chunk in self._free if chunk.before is None and chunk.behind is None]
        available = self._unmapped + sum(region.size for region in regions)
        if wanted > available:
            raise MemoryError(f"No chunk of {wanted} bytes is free, with {self.in_use} bytes in use.")
        for region in regions:
            self._forget(region)
        self._unmapped = available

    def _grow(self, wanted: int) -> None:
        enough = self._region >= wanted
        while self._region < wanted:
            self._region *= 2
        size = min(self._region, self._unmapped // self.UNIT * self.UNIT)
        self._unmapped -= size
        self._offer(_Chunk(self._end, size))
        self._end += size + self.UNIT  # Regions do not coalesce.
        if enough:
            self._region *= 2

    def _split(self, chunk: _Chunk, wanted: int) -> None:
        remainder = _Chunk(chunk.address + wanted, chunk.size - wanted, True, chunk, chunk.behind)
        if chunk.behind is not None:
            chunk.behind.before = remainder
        chunk.behind, chunk.size = remainder, wanted
        self._offer(remainder)

    def _join(self, chunk: _Chunk, behind: _Chunk) -> None:
        chunk.size += behind.size
        chunk.behind = behind.behind
        if behind.behind is not None:
            behind.behind.before = chunk

    def _offer(self, chunk: _Chunk) -> None:
        chunk.free = True
        bisect.insort(self._free, (chunk.size, chunk.address, chunk))

    def _forget(self, chunk: _Chunk) -> None:
        del self._free[bisect.bisect_left(self._free, (chunk.size, chunk.address))]


Allocator = ExactAllocator | BestFitAllocator


def empty_pool(device: DeviceModel, limit: int = BestFitAllocator.UNLIMITED_BYTES) -> Allocator:
    """Return a model of a device's empty memory, in which the best-fit allocator has at most `limit` bytes.

    A device with statistics has TensorFlow's best-fit allocator; otherwise memory comes from the C library. A GPU takes
    all of its memory in one region unless memory growth is on.
    """
    if not device.has_allocator_stats or device.maps_pages:
        return ExactAllocator()
    return BestFitAllocator(device.grows, device.min_counted_bytes, limit)


def pools(device: DeviceModel, scale: int) -> Iterator[Allocator]:
    """Yield models of the memory in states that work of about `scale` bytes may leave, empty ones first."""
    first = empty_pool(device)
    yield first
    if isinstance(first, BestFitAllocator) and device.grows:
        yield from (BestFitAllocator.used(number, scale, device.min_counted_bytes) for number in range(1, POOL_STATES))
