"""Tensors in files that have no name: nobody else can open them, and nothing is left of them when the process ends."""

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
    """Whether files in a directory lie in memory themselves; `False` where the system does not tell.

    Args:
        directory: Any path.
        mounts: The system's table of file systems.
    """
    path = os.path.join(os.path.realpath(directory), "")
    found, kind = "", ""
    with contextlib.suppress(OSError), open(mounts, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            _, point, type_ = (*line.split(" "), "", "", "")[:3]
            point = os.path.join(point.replace("\\040", " "), "")
            if path.startswith(point) and len(point) >= len(found):
                found, kind = point, type_
    return kind in ("tmpfs", "ramfs")


class SpillError(OSError):
    """A tensor could not be written to disk, or read back."""


@dataclasses.dataclass
class _SpilledTensor:
    """A tensor in a file, with how often it is still read, and the arrays that were made of the file's pages."""

    file: IO[bytes]
    num_bytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    reads: int
    pages: list[weakref.ref[mmap.mmap]] = dataclasses.field(default_factory=list)

    @property
    def in_use(self) -> int:
        """Arrays of its pages that are alive."""
        return sum(pages() is not None for pages in self.pages)


class SpillStore:
    """Writes arrays to files in a directory and reads them back.

    The files are made without a name where the file system can do that, and lose it at once elsewhere; the operating
    system takes them away when they are closed or when the process ends in whatever way. A file is written again by
    the next step, which is several times faster than to write a new one.

    Args:
        directory: Where.
        page_cache: Whether written pages may stay in memory that the operating system can take back. Without,
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
        """Put an array away, to be read `reads` times; returns the number by which it is read.

        Raises:
            SpillError: Naming the directory, the bytes needed, and the bytes free.
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
        """A file of an earlier array that nobody reads any more, of that size if there is one, or a new one."""
        with self._lock:
            self._look()
            self._collect()
            # Batches of many sizes would leave files of each.
            free = next((files for files in (self._free.get(size), *self._free.values()) if files), None)
            if free:
                file = free.pop()
                file.truncate(size)
                return file
        return tempfile.TemporaryFile(dir=self.directory, buffering=0)

    def read(self, number: Any) -> np.ndarray:
        """The array of that number; after its last read the file is gone.

        It lies in memory pages of its own, which TensorFlow takes over as they are: other memory, which need not
        begin at a multiple of 64 bytes, it copies.

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
            self._look()
            held.reads -= 1
            held.pages.append(weakref.ref(pages))
        return np.frombuffer(pages, np.uint8).view(held.dtype).reshape(held.shape)

    def _pages(self, descriptor: int, size: int) -> mmap.mmap:
        """Memory with the contents of a file.

        With the page cache it is the cache's own pages, copied only if TensorFlow computes in place; without it
        they are read past it.
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
        """Let files be written again that nobody will read and whose pages nobody has.

        They are looked for. To be called when an array's life ends would be simpler, but an interrupt that arrives
        in such a call is lost.
        """
        for number, held in list(self._held.items()):
            if held.reads == 0 and not held.in_use:
                del self._held[number]
                self._free.setdefault(held.num_bytes, []).append(held.file)

    def look(self) -> None:
        """Note how much is in memory, before some of it is given back."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        """Note how much is in memory, whenever that is about to change."""
        self._peak = max(self._peak, self._in_memory() + self._allocated())

    def reset_peak(self, allocated: Callable[[], int] | None = None) -> None:
        """Start to look for the most bytes that are in memory at a time.

        Args:
            allocated: Most bytes that the device's allocator had given out since it was asked last.
        """
        with self._lock:
            self._allocated = allocated or _nothing
            self._peak = 0
            self._look()

    def peak_bytes(self) -> int:
        """Most bytes that were in memory at a time: arrays that had been read, and what was allocated meanwhile."""
        with self._lock:
            self._look()
            return self._peak

    def clear(self) -> None:
        """Close all files: those of a step that did not end, and those kept for the next one."""
        with self._lock:
            _close_all(self._held, self._free)

    def free_bytes(self) -> int:
        """Bytes that the directory's file system has free."""
        return shutil.disk_usage(self.directory).free

    def _failure(self, name: str, needed: int, error: OSError) -> SpillError:
        free = "unknown"
        with contextlib.suppress(OSError):
            free = str(self.free_bytes())
        what = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written: {error.strerror}"
        return SpillError(
            f"The disk of {self.directory!r} {what}. Swapping out `{name}` needs {needed} bytes, {free} are free. "
            "Give another directory as `spill_dir=`, or swap fewer tensors."
        )


def _nothing() -> int:
    return 0


def _close_all(held: dict[int, _SpilledTensor], free: dict[int, list[IO[bytes]]]) -> None:
    for file in (*(one.file for one in held.values()), *itertools.chain(*free.values())):
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
