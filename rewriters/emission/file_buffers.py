"""Full-size results of tile loops in files instead of memory.

A result lies in mapped pages of a file without a name. TensorFlow uses these pages without a copy, so that loops read
and write regions of the file as they read and write regions of a tensor in memory. The operating system writes pages to
the disk, and reads them again when an iteration needs them. After each iteration the process returns its pages.

Steps use the files of earlier steps again, because pages of a new file take about 20 times as long to write.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import Tensor
from rewriters.swapping.spill_store import SpillError, is_in_memory, write_all, write_problem
from rewriters.tiling.tile_planner import TileLoop

__all__: list[str] = []

MIN_FILE_BYTES = 2**20
"""Smallest result that is worth a file, which a call of Python returns in each step."""

FILE_OP = "PyFunc"
"""Op that returns a file."""

_CHUNK_BYTES = 2**20
"""Bytes that are written at a time."""

POOL_SLACK = 1.25
"""Bytes of all files of a pool over the most that were in use together. Sizes that a step no longer uses exceed it."""

mapped_files = weakref.WeakKeyDictionary[mmap.mmap, int]()
"""Descriptors of all files by their pages."""

_lock = threading.Lock()


def reason_without_files(directory: str, device: DeviceModel) -> str:
    """Return why the results of loops on a device cannot lie in files of a directory; empty if they can."""
    if device.is_gpu:
        return "loops on a GPU write to its memory"
    if not hasattr(os, "posix_fallocate") or not hasattr(mmap, "MADV_DONTNEED"):
        return "it needs `os.posix_fallocate` and `mmap.MADV_DONTNEED` (Linux)"
    return f"the files of {directory!r} lie in memory" if is_in_memory(directory) else ""


def accumulator_dtype(dtype: tf.DType) -> tf.DType:
    """Return the dtype of a sum: float32 for half precision, else the dtype of the summands."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


class FilePool:
    """Mapped files without a name in a directory. A file whose array has died serves again.

    The operating system deletes a file when the pool and its array have died, or when the process ends.

    Args:
        directory: Directory of the files.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._used: list[tuple[weakref.ref[np.ndarray], mmap.mmap]] = []
        self._peak_bytes = 0

    def array(self, shape: Sequence[int], dtype: np.dtype[Any], zero: bool) -> np.ndarray:
        """Return an array in a file, of zeros or with any contents.

        Raises:
            SpillError: If the disk is full or fails.
        """
        size = math.prod(shape) * dtype.itemsize
        pages = self._reused(size)
        try:
            if pages is None:
                pages = self._created(size)
            elif zero:
                _write_zeros(mapped_files[pages], size)
        except OSError as error:
            problem = write_problem(self.directory, "A tensor between tile loops", size, error)
            remedy = "Pass another directory in `swap=LMSParams(spill_dir=...)`, or a larger budget."
            raise SpillError(f"{problem} {remedy}") from None
        memory = np.frombuffer(pages, np.uint8)
        with self._lock:
            self._used.append((weakref.ref(memory), pages))
        return memory.view(dtype).reshape(shape)

    def clear(self) -> None:
        """Delete all files; those with an array as soon as it dies."""
        with self._lock:
            self._free.clear()
            self._used.clear()

    def _reused(self, size: int) -> mmap.mmap | None:
        """Return a free file of this size. If there is none, delete those that have been free longest for a new one."""
        with self._lock:
            used = []
            for memory, pages in self._used:
                # A finalizer on each array would be simpler, but an interrupt that arrives inside of one is lost.
                if memory() is None:
                    self._free.append(pages)
                else:
                    used.append((memory, pages))
            self._used = used
            in_use = size + sum(len(pages) for _, pages in used)
            self._peak_bytes = max(self._peak_bytes, in_use)
            for pages in reversed(self._free):
                if len(pages) == size:
                    self._free.remove(pages)
                    return pages
            while self._free and in_use + sum(map(len, self._free)) > POOL_SLACK * self._peak_bytes:
                del self._free[0]
            return None

    def _created(self, size: int) -> mmap.mmap:
        """Return a new file of zeros. If the disk is full, all free files make room for it."""
        try:
            return create_file(self.directory, size)
        except OSError:
            with self._lock:
                self._free.clear()
            return create_file(self.directory, size)


def create_file(directory: str, size: int) -> mmap.mmap:
    """Return the pages of a new file of zeros.

    The file is allocated first: a write to a mapped page of a full disk would end the process. Then it is written as a
    whole, because Linux then maps many of its pages at one page fault. If mapped writes created the pages, each
    iteration would have a page fault for each of them.
    """
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        _write_zeros(file.fileno(), size)
        pages, descriptor = mmap.mmap(file.fileno(), size), os.dup(file.fileno())
    weakref.finalize(pages, os.close, descriptor)
    with _lock:
        mapped_files[pages] = descriptor
    return pages


def _write_zeros(descriptor: int, size: int) -> None:
    """Fill a file with zeros. Writes through its pages would read the old contents from the disk."""
    zeros = memoryview(bytes(_CHUNK_BYTES))
    for begin in range(0, size, _CHUNK_BYTES):
        write_all(descriptor, zeros[: size - begin], begin)


@dataclasses.dataclass(frozen=True)
class FileBuffers:
    """Rule that selects the results that lie in files.

    Attributes:
        directory: Directory of the files.
        batch: Batch size that stands for an unknown one.
        tensors: Tensors that lie in files; all that are large enough if `None`.
    """

    directory: str
    batch: int
    tensors: frozenset[Tensor] | None = None

    @functools.cached_property
    def pool(self) -> FilePool:
        """The files, shared with all other rules for this directory."""
        return _pool(self.directory)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in a file, for which it has to be large enough."""
        is_selected = self.tensors is None or tensor in self.tensors
        return is_selected and self.takes(tensor.num_bytes(self.batch))

    def takes(self, num_bytes: int) -> bool:
        """Return whether a tensor of some bytes is large enough for a file."""
        return num_bytes >= MIN_FILE_BYTES

    def results(self, tile_loop: TileLoop) -> set[Tensor]:
        """Return the results of a loop that lie in files: images, gradients of images, and saved rows.

        A gradient in half precision stays in memory: it is summed in single precision, and the cast of its sum would be
        in memory as a whole.
        """
        sums = (tensor for tensor in tile_loop.accumulates if accumulator_dtype(tensor.dtype) == tensor.dtype)
        saved = (save.saved for save in tile_loop.saves)
        return {tensor for tensor in (*tile_loop.writes, *sums, *saved) if self.holds(tensor)}

    def buffer(self, shape: Any, dtype: tf.DType, zero: bool) -> Any:
        """Emit an op that returns a file as a tensor, of zeros or with any contents; it may be written to in place."""
        return tf.numpy_function(_array_of(dtype, zero), [self.directory, shape], dtype, stateful=True)


_pools = weakref.WeakValueDictionary[str, FilePool]()


def _pool(directory: str) -> FilePool:
    """Return the pool of a directory."""
    with _lock:
        return _pools.setdefault(directory, FilePool(directory))


@functools.cache  # TensorFlow refers to Python functions weakly.
def _array_of(dtype: tf.DType, zero: bool) -> Any:
    def array(directory: bytes, shape: np.ndarray) -> np.ndarray:
        return _pool(directory.decode()).array(shape.tolist(), np.dtype(dtype.as_numpy_dtype), zero)

    return array


def return_pages(after: Sequence[Any]) -> Any:
    """Emit an op that returns the pages of all files to the operating system after some ops have run."""
    with tf.control_dependencies(after):
        return tf.numpy_function(release_pages, [], tf.int64, stateful=True)


def release_pages() -> np.int64:
    """Release the pages of all files. Their contents stay in the page cache, or go to the disk."""
    with _lock:
        files = list(mapped_files)
    for pages in files:
        pages.madvise(mmap.MADV_DONTNEED)
    return np.int64(len(files))
