"""Spill files of swapped tensors. They have no name: no other process can open them, and none outlives the process."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import IO, Any

import numpy as np

__all__: list[str] = []


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


@dataclasses.dataclass
class _SpilledTensor:
    """A tensor in a file.

    Attributes:
        file: The file.
        num_bytes: Size of the tensor.
        dtype: Element type.
        shape: Shape.
        reads: Number of reads to come.
        pages: Mappings of the file that were returned as arrays.
    """

    file: IO[bytes]
    num_bytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    reads: int
    pages: list[weakref.ref[mmap.mmap]] = dataclasses.field(default_factory=list)

    @property
    def in_use(self) -> int:
        """Number of arrays over the file's pages that are alive."""
        return sum(pages() is not None for pages in self.pages)


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
        self._held: dict[int, _SpilledTensor] = {}
        self._free: dict[int, list[IO[bytes]]] = {}
        weakref.finalize(self, _close_all, self._held, self._free)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._peak = 0
        self._allocated: Callable[[], int] = _nothing

    def write(self, array: np.ndarray, reads: int, name: str) -> int:
        """Write an array that will be read `reads` times, and return its number.

        Raises:
            SpillError: If the disk is full or fails. The message names the directory, the bytes needed and the bytes
                free.
        """
        file: IO[bytes] | None = None
        try:
            file = self._file(array.nbytes)
            _write_all(file.fileno(), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            if not self.page_cache:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            if file is not None:
                file.close()
            raise self._failure(name, array.nbytes, error) from None
        with self._lock:
            number = next(self._numbers)
            self._held[number] = _SpilledTensor(file, array.nbytes, array.dtype, array.shape, reads)
        return number

    def _file(self, size: int) -> IO[bytes]:
        """Return a file whose array is no longer read, preferably of the given size, or else a new file."""
        with self._lock:
            self._record_peak()
            self._collect()
            # A file of another size is better than none: batches of many sizes would leave files of each size.
            free = next((files for files in (self._free.get(size), *self._free.values()) if files), None)
            if free:
                file = free.pop()
                file.truncate(size)
                return file
        return tempfile.TemporaryFile(dir=self.directory, buffering=0)

    def read(self, number: Any) -> np.ndarray:
        """Return the array with a number; after its last read the file may be overwritten.

        The array lies in memory pages of its own, which TensorFlow uses without a copy. It copies arrays that do not
        begin at a multiple of 64 bytes.

        Raises:
            SpillError: If the disk fails.
        """
        held = self._held[int(number)]
        if not held.num_bytes:
            held.reads -= 1
            return np.zeros(held.shape, held.dtype)
        try:
            pages = self._pages(held.file.fileno(), held.num_bytes)
        except OSError as error:
            raise SpillError(f"Swapping in from {self.directory!r} failed: {error}") from None
        with self._lock:
            self._record_peak()
            held.reads -= 1
            held.pages.append(weakref.ref(pages))
        return np.frombuffer(pages, np.uint8).view(held.dtype).reshape(held.shape)

    def _pages(self, descriptor: int, size: int) -> mmap.mmap:
        """Return memory with the contents of a file.

        With the page cache these are the cache's own pages, copied on write. Without it the file is read into anonymous
        memory.
        """
        if self.page_cache:
            return mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _read_all(descriptor, memoryview(pages))
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return pages

    def _in_memory(self) -> int:
        return sum(held.num_bytes * held.in_use for held in self._held.values())

    def _collect(self) -> None:
        """Free the files that will not be read again and whose pages no array uses.

        The method polls. A finalizer on each array would be simpler, but an interrupt that arrives inside of a
        finalizer is lost.
        """
        for number, held in list(self._held.items()):
            if held.reads == 0 and not held.in_use:
                del self._held[number]
                self._free.setdefault(held.num_bytes, []).append(held.file)

    def record_peak(self) -> None:
        """Record how many bytes are in memory, before some of them are freed."""
        with self._lock:
            self._record_peak()

    def _record_peak(self) -> None:
        """Record how many bytes are in memory; the caller holds the lock and is about to change that number."""
        self._peak = max(self._peak, self._in_memory() + self._allocated())

    def reset_peak(self, allocated: Callable[[], int] | None = None) -> None:
        """Start a new measurement of `peak_bytes`.

        Args:
            allocated: Function that returns the peak of the device's allocator since its last call.
        """
        with self._lock:
            self._allocated = allocated or _nothing
            self._peak = 0
            self._record_peak()

    def peak_bytes(self) -> int:
        """Return the peak of the bytes of arrays that were read plus the bytes of the allocator."""
        with self._lock:
            self._record_peak()
            return self._peak

    def clear(self) -> None:
        """Close all files: those of a step that failed, and those that the next step would overwrite."""
        with self._lock:
            _close_all(self._held, self._free)

    def free_bytes(self) -> int:
        """Return the free bytes of the directory's file system."""
        return shutil.disk_usage(self.directory).free

    def _failure(self, name: str, needed: int, error: OSError) -> SpillError:
        free = "unknown"
        with contextlib.suppress(OSError):
            free = str(self.free_bytes())
        problem = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written: {error.strerror}"
        return SpillError(
            f"The disk of {self.directory!r} {problem}. Swapping out `{name}` needs {needed} bytes, {free} are free. "
            "Give another directory as `spill_dir=`, or swap fewer tensors."
        )


def _nothing() -> int:
    return 0


def _close_all(held: dict[int, _SpilledTensor], free: dict[int, list[IO[bytes]]]) -> None:
    for file in (*(tensor.file for tensor in held.values()), *itertools.chain(*free.values())):
        file.close()
    held.clear()
    free.clear()


def _write_all(descriptor: int, data: memoryview) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], written)


def _read_all(descriptor: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], done)
        if count == 0:
            raise OSError(errno.EIO, "the file is shorter than what was written")
        done += count
