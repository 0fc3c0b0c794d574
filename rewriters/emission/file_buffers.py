"""Full-size results of tile loops in files instead of memory.

A result lies in mapped pages of a file without a name. TensorFlow uses these pages without a copy, so that loops read
and write regions of the file as they read and write regions of a tensor in memory. The operating system writes pages to
the disk, and reads them again when an iteration needs them. After each iteration the process returns its pages.
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

from rewriters.device import properties
from rewriters.ir.graph import Tensor
from rewriters.swapping.spill_store import SpillError, is_in_memory, write_problem
from rewriters.tiling.tile_planner import TileLoop

__all__: list[str] = []

MIN_FILE_BYTES = 2**20
"""Smallest result that is worth a file: a file is created in each step."""

FILE_OP = "PyFunc"
"""Op that creates a file."""

_mapped = weakref.WeakSet[mmap.mmap]()
_lock = threading.Lock()


def reason_without_files(directory: str) -> str:
    """Return why results cannot lie in files of a directory; empty if they can."""
    if properties.name().startswith("GPU"):
        return "loops on a GPU write to its memory"
    if not hasattr(os, "posix_fallocate") or not hasattr(mmap, "MADV_DONTNEED"):
        return "it needs `os.posix_fallocate` and `mmap.MADV_DONTNEED` (Linux)"
    return f"the files of {directory!r} lie in memory" if is_in_memory(directory) else ""


def accumulator_dtype(dtype: tf.DType) -> tf.DType:
    """Return the dtype of a sum: float32 for half precision, else the dtype of the summands."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


@dataclasses.dataclass(frozen=True)
class FileBuffers:
    """Rule that selects the results that lie in files.

    Attributes:
        directory: Directory of the files.
        batch: Batch size that stands for an unknown one.
    """

    directory: str
    batch: int

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is large enough for a file."""
        return tensor.num_bytes(self.batch) >= MIN_FILE_BYTES

    def results(self, tile_loop: TileLoop) -> set[Tensor]:
        """Return the results of a loop that lie in files: images, gradients of images, and saved rows.

        A gradient in half precision stays in memory: it is summed in single precision, and the cast of its sum would be
        in memory as a whole.
        """
        sums = (tensor for tensor in tile_loop.accumulates if accumulator_dtype(tensor.dtype) == tensor.dtype)
        saved = (save.saved for save in tile_loop.saves)
        return {tensor for tensor in (*tile_loop.writes, *sums, *saved) if self.holds(tensor)}

    def zeros(self, shape: Any, dtype: tf.DType) -> Any:
        """Emit an op that creates a file of zeros, and return it as a tensor, which may be written to in place."""
        return tf.numpy_function(_zeros_of(dtype), [self.directory, shape], dtype, stateful=True)


@functools.cache  # TensorFlow refers to Python functions weakly.
def _zeros_of(dtype: tf.DType) -> Any:
    def zeros(directory: bytes, shape: np.ndarray) -> np.ndarray:
        return _mapped_zeros(directory.decode(), shape.tolist(), np.dtype(dtype.as_numpy_dtype))

    return zeros


def _mapped_zeros(directory: str, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array of zeros in a new file without a name, which the operating system deletes with the array.

    Raises:
        SpillError: If the disk is full or fails. The file is allocated first: a write to a mapped page of a full disk
            would end the process.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            pages = mmap.mmap(file.fileno(), size)
    except OSError as error:
        problem = write_problem(directory, "A tensor between tile loops", size, error)
        remedy = "Pass another directory in `swap=LMSParams(spill_dir=...)`, or a larger budget."
        raise SpillError(f"{problem} {remedy}") from None
    with _lock:
        _mapped.add(pages)
    return np.frombuffer(pages, np.uint8).view(dtype).reshape(shape)


def return_pages(after: Sequence[Any]) -> Any:
    """Emit an op that returns the pages of all files to the operating system after some ops have run."""
    with tf.control_dependencies(after):
        return tf.numpy_function(_return_pages, [], tf.int64, stateful=True)


def _return_pages() -> np.int64:
    """Release the pages of all files. Their contents stay in the page cache, or go to the disk."""
    with _lock:
        files = list(_mapped)
    for pages in files:
        pages.madvise(mmap.MADV_DONTNEED)
    return np.int64(len(files))
