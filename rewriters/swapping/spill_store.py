"""Spill files of swapped tensors. They have no name: no other process can open them, and none outlives the process."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import math
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np

__all__: list[str] = []

ARRAY_ALIGNMENT_BYTES = 64
"""Multiple at which TensorFlow uses the memory of an array without a copy."""

_READ_BYTES = 2**20
"""Bytes that are read at a time where the system cannot read into memory that is there."""

_FULL_DISK = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def reason_unsupported(page_cache: bool = True) -> str:
    """Return why this system cannot write spill files and read them back; empty if it can."""
    if not all(hasattr(os, name) for name in ("pwrite", "pread")):
        return "it needs `os.pwrite` and `os.pread` (Linux or macOS)"
    if not page_cache and not all(hasattr(os, name) for name in ("fdatasync", "posix_fadvise")):
        return "`page_cache=False` needs `os.fdatasync` and `os.posix_fadvise` (Linux)"
    return ""


def is_in_memory(directory: str, mounts: str = "/proc/self/mounts") -> bool:
    """Return whether the file system of a directory lies in memory; `False` where the system does not report it.

    Args:
        directory: Any path.
        mounts: Path of the system's table of file systems.
    """
    path = os.path.join(os.path.realpath(directory), "")
    mount, file_system = "", ""
    with contextlib.suppress(OSError), open(mounts, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            _, point, type_ = (*line.split(" "), "", "", "")[:3]
            point = os.path.join(point.replace("\\040", " "), "")
            if path.startswith(point) and len(point) >= len(mount):
                mount, file_system = point, type_
    return file_system in ("tmpfs", "ramfs")


class SpillError(OSError):
    """A tensor that could not be written to disk or read back."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """An array of a record.

    Attributes:
        dtype: Element type.
        shape: Shape.
        begin: Position of its first byte in the record.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int

    def view(self, record: np.ndarray) -> np.ndarray:
        """Return the array in the bytes of its record."""
        count = math.prod(self.shape) * self.dtype.itemsize
        return record[self.begin : self.begin + count].view(self.dtype).reshape(self.shape)


@dataclasses.dataclass
class _Spilled:
    """A record: arrays that are written and read together.

    Attributes:
        file: File that the record is in.
        begin: Position of its first byte in a file that records share; `None` for a file of its own.
        num_bytes: Size of the record.
        parts: The arrays.
        reads: Number of reads to come.
    """

    file: IO[bytes]
    begin: int | None
    num_bytes: int
    parts: tuple[_Part, ...]
    reads: int


class SpillStore:
    """Writes arrays to files in a directory and reads them back.

    The files are created without a name, or are unlinked at once where the file system cannot do that. The operating
    system deletes them when they are closed or when the process ends. The next step overwrites a file, which is several
    times faster than to write a new one.

    Args:
        directory: Directory of the files.
        page_cache: Whether written pages may stay in the page cache, which the operating system can reclaim. Otherwise
            every write waits for the disk.
    """

    def __init__(self, directory: str, page_cache: bool = True) -> None:
        self.directory = directory
        self.page_cache = page_cache
        self._held: dict[int, _Spilled] = {}
        self._free: dict[int, list[IO[bytes]]] = {}
        self._shared: dict[int, list[int]] = {}
        self._shared_file: list[IO[bytes]] = []
        self._shared_end = 0
        self._copies: list[tuple[weakref.ref[np.ndarray], int]] = []
        weakref.finalize(self, _close_all, self._held, self._free, self._shared_file)
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._peak = 0
        self._allocated: Callable[[], int] = lambda: 0

    def write(self, array: np.ndarray, reads: int, name: str) -> int:
        """Write an array that will be read `reads` times to a file of its own, and return its number.

        Raises:
            SpillError: If the disk is full or fails. The message names the directory, the bytes needed and the bytes
                free.
        """
        return self._write([array], lambda: (self._file(array.nbytes), None), reads, name)

    def write_record(self, arrays: Sequence[np.ndarray], name: str) -> int:
        """Write arrays that will be read once, together, to a file that all records share, and return their number.

        Loops write many small records, more than a process may have files open.

        Raises:
            SpillError: As `write` raises it.
        """
        return self._write(arrays, lambda: self._place(_layout(arrays)[1]), 1, name)

    def _write(
        self, arrays: Sequence[np.ndarray], place: Callable[[], tuple[IO[bytes], int | None]], reads: int, name: str
    ) -> int:
        file: IO[bytes] | None = None
        begin: int | None = None
        parts, size = _layout(arrays)
        try:
            file, begin = place()
            for array, part in zip(arrays, parts, strict=True):
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                write_all(file.fileno(), data, (begin or 0) + part.begin)
            if not self.page_cache:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), begin or 0, size, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            if file is not None and begin is None:
                file.close()
            raise self._failure(name, size, error) from None
        with self._lock:
            number = next(self._numbers)
            self._held[number] = _Spilled(file, begin, size, parts, reads)
        return number

    def _place(self, size: int) -> tuple[IO[bytes], int]:
        """Return the shared file, and a position in it that no record uses."""
        with self._lock:
            self.record_peak()
            if not self._shared_file:
                self._shared_file.append(tempfile.TemporaryFile(dir=self.directory, buffering=0))
                self._shared_end = 0
            if self._shared.get(size):
                return self._shared_file[0], self._shared[size].pop()
            begin = self._shared_end
            self._shared_end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE  # No page of two records.
            return self._shared_file[0], begin

    def _file(self, size: int) -> IO[bytes]:
        """Return a file whose array has been read, preferably of the given size, or else a new file."""
        with self._lock:
            self.record_peak()
            # A file of another size is better than none: batches of many sizes would leave files of each size.
            free = next((files for files in (self._free.get(size), *self._free.values()) if files), None)
            if free:
                file = free.pop()
                file.truncate(size)
                return file
        return tempfile.TemporaryFile(dir=self.directory, buffering=0)

    def read(self, number: Any) -> np.ndarray:
        """Return the array with a number; after its last read the file may be overwritten.

        TensorFlow uses the memory of the array, which begins at a multiple of 64 bytes, without a copy.

        Raises:
            SpillError: If the disk fails.
        """
        return self.read_record(number)[0]

    def read_record(self, number: Any) -> list[np.ndarray]:
        """Return the arrays with a number, as `read` returns one.

        Raises:
            SpillError: If the disk fails.
        """
        number = int(number)
        held = self._held[number]
        memory, record = _aligned(held.num_bytes)
        try:
            _read_all(held.file.fileno(), record.data, held.begin or 0)
            if not self.page_cache:
                os.posix_fadvise(held.file.fileno(), held.begin or 0, held.num_bytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise SpillError(
                f"Swapping in from {self.directory!r} failed: {error}. Pass another directory as `spill_dir=`."
            ) from None
        with self._lock:
            self.record_peak()
            self._copies.append((weakref.ref(memory), held.num_bytes))
            held.reads -= 1
            if not held.reads:
                self._free_record(number, held)
        return [part.view(record) for part in held.parts]

    def _free_record(self, number: int, held: _Spilled) -> None:
        """Let other records take the place of one that has been read."""
        if self._held.pop(number, None) is None:  # `clear` has closed the file.
            return
        if held.begin is None:
            self._free.setdefault(held.num_bytes, []).append(held.file)
        else:
            self._shared.setdefault(held.num_bytes, []).append(held.begin)

    def record_peak(self) -> None:
        """Record how many bytes are in memory, before that number changes."""
        with self._lock:
            self._copies = [(memory, size) for memory, size in self._copies if memory() is not None]
            self._peak = max(self._peak, sum(size for _, size in self._copies) + self._allocated())

    def reset_peak(self, allocated: Callable[[], int] | None = None) -> None:
        """Start a new measurement of `peak_bytes`; `allocated` returns the allocator's peak since its last call."""
        with self._lock:
            self._allocated = allocated or (lambda: 0)
            self._peak = 0
            self.record_peak()

    def peak_bytes(self) -> int:
        """Return the peak of the bytes of arrays that were read plus the bytes of the allocator."""
        self.record_peak()
        return self._peak

    def clear(self) -> None:
        """Close all files: those of a step that failed, and those that the next step would overwrite."""
        with self._lock:
            _close_all(self._held, self._free, self._shared_file)
            self._shared.clear()

    def free_bytes(self) -> int:
        """Return the free bytes of the directory's file system."""
        return shutil.disk_usage(self.directory).free

    def _failure(self, name: str, needed: int, error: OSError) -> SpillError:
        problem = write_problem(self.directory, f"Swapping out `{name}`", needed, error)
        return SpillError(f"{problem} Pass another directory as `spill_dir=`, or swap fewer tensors.")


def write_problem(directory: str, action: str, needed: int, error: OSError) -> str:
    """Return a text for a write to a directory that has failed.

    Args:
        directory: The directory.
        action: Purpose of the write, the beginning of a sentence.
        needed: Bytes that it needs.
        error: Its error.
    """
    free = "unknown"
    with contextlib.suppress(OSError):
        free = str(shutil.disk_usage(directory).free)
    problem = "is full" if error.errno in _FULL_DISK else f"cannot be written: {error.strerror}"
    return f"The disk of {directory!r} {problem}. {action} needs {needed} bytes, {free} are free."


def _layout(arrays: Sequence[np.ndarray]) -> tuple[tuple[_Part, ...], int]:
    """Return the arrays as parts of a record, each at a multiple of 64 bytes, and the size of the record."""
    parts: list[_Part] = []
    end = 0
    for array in arrays:
        begin = -(-end // ARRAY_ALIGNMENT_BYTES) * ARRAY_ALIGNMENT_BYTES
        parts.append(_Part(array.dtype, array.shape, begin))
        end = begin + array.nbytes
    return tuple(parts), end


def _aligned(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an array that owns memory, and `size` bytes of that memory.

    The C library keeps freed memory for the next record, up to 32 MiB, and NumPy asks for large pages above. Small
    pages of a mapping would cost a page fault each, and those of a mapped file a copy where TensorFlow writes to them.
    """
    memory = np.empty(size + ARRAY_ALIGNMENT_BYTES, np.uint8)
    begin = -memory.ctypes.data % ARRAY_ALIGNMENT_BYTES
    return memory, memory[begin : begin + size]


def _close_all(held: dict[int, _Spilled], free: dict[int, list[IO[bytes]]], shared: list[IO[bytes]]) -> None:
    for file in (*(record.file for record in held.values()), *itertools.chain(*free.values()), *shared):
        file.close()
    held.clear()
    free.clear()
    shared.clear()


def write_all(descriptor: int, data: memoryview, begin: int) -> None:
    """Write all bytes to a file, from a position on; the system may write fewer in one call."""
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], begin + written)


def _read_all(descriptor: int, into: memoryview, begin: int) -> None:
    done = 0
    while done < len(into):
        count = _read(descriptor, into[done:], begin + done)
        if count == 0:
            raise OSError(errno.EIO, "the file is shorter than the swapped tensor")
        done += count


def _read(descriptor: int, into: memoryview, begin: int) -> int:
    """Read bytes into memory, and return their number, which may be less than the size of the memory."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [into], begin)
    part = os.pread(descriptor, min(len(into), _READ_BYTES), begin)
    into[: len(part)] = part
    return len(part)
