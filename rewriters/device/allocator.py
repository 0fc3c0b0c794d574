"""What a device's allocator makes of a sequence of allocations.

TensorFlow's allocator (`BFCAllocator`: best fit with coalescing) hands out the smallest
free chunk that is large enough, and splits it only if the rest is worth it. A tensor may
so occupy up to twice its size, and the device's peak counts the chunk. Where tensors
are few and large, as in a tile loop, that is a third of the peak; a model of the
peak has to follow it.
"""

from __future__ import annotations

import bisect
import dataclasses
from random import Random
from typing import Any, Protocol

__all__: list[str] = []

MIB = 2**20


class Allocator(Protocol):
    """Memory of a device."""

    in_use: int
    """Bytes that the device counts as taken."""

    def allocate(self, num_bytes: int) -> Any:
        """Take memory; returns a handle for `free`."""

    def map(self, num_bytes: int) -> Any:
        """Count memory that is not the device's, such as pages of a file; returns a handle for `free`."""

    def free(self, handle: Any) -> None:
        """Give it back."""


class ExactAllocator:
    """An allocator without loss, such as `malloc` for large blocks."""

    def __init__(self) -> None:
        self.in_use = 0

    def allocate(self, num_bytes: int) -> int:
        """Take memory."""
        self.in_use += num_bytes
        return num_bytes

    map = allocate

    def free(self, handle: int) -> None:
        """Give it back."""
        self.in_use -= handle


@dataclasses.dataclass(eq=False, slots=True)
class _Chunk:
    """A piece of a region, free or in use, between its neighbours."""

    address: int
    size: int
    free: bool = True
    before: _Chunk | None = None
    behind: _Chunk | None = None


class BestFitAllocator:
    """TensorFlow's best-fit allocator with coalescing, as its default options make it.

    Args:
        growing: Whether it takes memory from the device in regions of doubling size (a CPU, and a GPU
            with memory growth) rather than all at once.
        least: Bytes below which a block comes from elsewhere, as on a CPU with oneDNN.
    """

    UNIT = 256
    FIRST_REGION = 2 * MIB
    MOST_LOST = 128 * MIB
    """A chunk with this much to spare is split in any case."""

    def __init__(self, growing: bool, least: int = 0) -> None:
        self.in_use = 0
        self._least = least
        self._region = self.FIRST_REGION if growing else 2**50
        self._end = 0
        self._free: list[tuple[int, int, _Chunk]] = []

    @classmethod
    def used(cls, number: int, scale: int, least: int = 0) -> BestFitAllocator:
        """A growing pool as other work may have left it: in pieces, some of them still taken.

        Args:
            number: Which of many such pools; 0 is a fresh one.
            scale: About the bytes of the other work.
            least: As for the pool.

        Returns:
            A pool whose `in_use` is 0: what is taken already does not count.
        """
        pool, random = cls(True, least), Random(number)
        if number:
            held = [pool.allocate(random.randint(1, scale)) for _ in range(random.randint(1, 4))]
            for handle in held[: random.randint(0, len(held))]:
                pool.free(handle)
            pool.in_use = 0
        return pool

    def allocate(self, num_bytes: int) -> _Chunk | int | None:
        """Take memory."""
        if num_bytes <= 0:
            return None
        if num_bytes < self._least:
            return self.map(num_bytes)
        wanted = -(-num_bytes // self.UNIT) * self.UNIT
        index = bisect.bisect_left(self._free, (wanted, -1))
        if index == len(self._free):
            self._grow(wanted)
            index = bisect.bisect_left(self._free, (wanted, -1))
        chunk = self._free.pop(index)[2]
        chunk.free = False
        if chunk.size >= 2 * wanted or chunk.size - wanted >= self.MOST_LOST:
            self._split(chunk, wanted)
        self.in_use += chunk.size
        return chunk

    def map(self, num_bytes: int) -> int:
        """Count memory that is elsewhere."""
        self.in_use += num_bytes
        return num_bytes

    def free(self, handle: _Chunk | int | None) -> None:
        """Give it back, joined with free neighbours."""
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

    def _grow(self, wanted: int) -> None:
        enough = self._region >= wanted
        while self._region < wanted:
            self._region *= 2
        self._offer(_Chunk(self._end, self._region))
        self._end += self._region + self.UNIT  # Regions do not join.
        if enough:
            self._region *= 2

    def _split(self, chunk: _Chunk, wanted: int) -> None:
        rest = _Chunk(chunk.address + wanted, chunk.size - wanted, True, chunk, chunk.behind)
        if chunk.behind is not None:
            chunk.behind.before = rest
        chunk.behind, chunk.size = rest, wanted
        self._offer(rest)

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
