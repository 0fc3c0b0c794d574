"""Opens images in files: zarr, TIFF, slides, NIfTI, HDF5 and NumPy.

Each format is read by its usual library, which is imported when the first reader of such files is made.
"""

from __future__ import annotations

import importlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tflms_sft._sources.source import Region, Source

__all__: list[str] = []

PACKAGES = {
    "zarr": ("zarr",),
    "tiff": ("tifffile", "zarr"),
    "openslide": ("openslide",),
    "nifti": ("nibabel",),
    "hdf5": ("h5py",),
    "numpy": ("numpy",),
}
"""Packages that each format requires."""

FORMATS = tuple(PACKAGES)

NPY_MAGIC = b"\x93NUMPY"

Fingerprint = tuple[int, ...]
"""Size, modification time and inode of a file."""


def fingerprint(path: str, array: str | None = None, level: int = 0) -> Fingerprint:
    """Return numbers that differ after a change of a file; of a zarr array, those of its metadata file.

    Args:
        path: The file, or the folder of a zarr array or group.
        array: Name of the array in a group.
        level: Level of a pyramid, whose arrays are named by numbers.

    Raises:
        OSError: If there is no such file.
    """
    node = Path(path, (array or "").strip("/"))
    folders = (node / str(level), node, Path(path))
    metadata = (folder / name for folder in folders for name in ("zarr.json", ".zarray", ".zgroup"))
    status = os.stat(next(filter(Path.exists, metadata), path))
    return (status.st_size, status.st_mtime_ns, status.st_ino)


def check_format(argument: str, value: object, formats: Iterable[str]) -> None:
    """Refuse an argument that is neither a function nor one of the formats, and a format whose packages are missing."""
    if callable(value):
        return
    if not isinstance(value, str):
        raise ValueError(f"`{argument}` must be a format or a function. Received: {argument}={value!r}.")
    if value not in formats:
        known = tuple(formats)
        raise ValueError(f"Unknown `{argument}`. Received: {value!r}. Expected one of {known}, or a function.")
    for package in PACKAGES[value]:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ImportError(
                f"Images of format {value!r} require the package `{package}`. Received: {error}. "
                f'Install it with `pip install "tflms-sft[{value}]"`.'
            ) from error


class ArraySource:
    """An array with a shape, a dtype and `__getitem__`; `after_read` is called after each read."""

    def __init__(self, array: Any, after_read: Callable[[], object] | None = None) -> None:
        self._array = array
        self._after_read = after_read
        self.shape = tuple(map(int, array.shape))
        self.dtype = np.dtype(array.dtype)

    def __getitem__(self, region: Region) -> np.ndarray:
        """Return a copy of a region."""
        result = np.array(self._array[region])
        if self._after_read is not None:
            self._after_read()
        return result


class ZarrSource(ArraySource):
    """A zarr array, version 2 or 3. A chunk without a file is an error unless `fills_missing`."""

    def __init__(self, array: Any, fills_missing: bool) -> None:
        super().__init__(array)
        place = array.store_path
        self._root = None if fills_missing else Path(place.store.root) / place.path

    def __getitem__(self, region: Region) -> np.ndarray:
        """Return a region.

        Raises:
            FileNotFoundError: If a chunk of it is missing.
        """
        if self._root is not None:
            for path in self._chunks(self._root, region):
                if not path.exists():
                    raise FileNotFoundError(
                        f"the chunk `{path.relative_to(self._root)}` is missing. Restore it, or pass "
                        "`fill_missing_chunks=True` if chunks that hold only the fill value were not written"
                    )
        return super().__getitem__(region)

    def _chunks(self, root: Path, region: Region) -> Iterator[Path]:
        """Yield the files that hold the numbers of a region."""
        sizes = self._array.shards or self._array.chunks
        places = [range(s.start // size, -(-s.stop // size)) for s, size in zip(region, sizes, strict=True)]
        for place in np.ndindex(*map(len, places)):
            key = [indices[number] for indices, number in zip(places, place, strict=True)]
            yield root / self._array.metadata.encode_chunk_key(tuple(key))


class SlideSource:
    """A level of a whole-slide image in RGB.

    Raises:
        ValueError: If the slide has no such level, or the level's reduction is no integer: tiles would not fit.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, slide: Any, level: int) -> None:
        if level >= slide.level_count:
            raise ValueError(f"it has {slide.level_count} levels, not a level {level}")
        width, height = slide.level_dimensions[level]
        self.shape = (height, width, 3)
        reductions = [full / size for full, size in zip(slide.dimensions, (width, height), strict=True)]
        self._reduction = round(reductions[0])
        if any(reduction != self._reduction for reduction in reductions):
            raise ValueError(
                f"level {level} is reduced by {reductions[0]:.6g} and {reductions[1]:.6g}, and regions of it cannot be "
                "read exactly. Choose another level, or convert it to zarr"
            )
        self._slide = slide
        self._level = level

    def __getitem__(self, region: Region) -> np.ndarray:
        """Return a region."""
        rows, columns, channels = region
        corner = (columns.start * self._reduction, rows.start * self._reduction)
        size = (columns.stop - columns.start, rows.stop - rows.start)
        return np.asarray(self._slide.read_region(corner, self._level, size))[..., :3][..., channels]


def open_zarr(path: str, array: str | None, level: int, fill_missing_chunks: bool) -> Source:
    """Open a zarr array, or one of a group: the array named, or the level of a pyramid."""
    import zarr

    node = zarr.open(path, mode="r", path=array)
    if isinstance(node, zarr.Group):
        if str(level) not in node:
            raise ValueError(f"it is a group of {sorted(node.keys())}, without {str(level)!r}. Pass `array` or `level`")
        node = node[str(level)]
    return ZarrSource(node, fill_missing_chunks)


def open_tiff(path: str, array: str | None, level: int, **_: Any) -> Source:
    """Open a series of a TIFF file, at a level of its pyramid."""
    import tifffile
    import zarr

    with tifffile.TiffFile(path) as tiff:
        series = tiff.series[int(array or 0)]
        if level >= len(series.levels):
            raise ValueError(f"it has {len(series.levels)} levels, not a level {level}")
        _check_length(path, series.levels[level].pages)
    store = tifffile.imread(path, series=int(array or 0), level=level, aszarr=True)
    source = ArraySource(zarr.open(store, mode="r"))
    weakref.finalize(source, store.close)
    return source


def _check_length(path: str, pages: Sequence[Any]) -> None:
    """Refuse a truncated file, whose missing tiles the library would fill with zeros."""
    length = os.path.getsize(path)
    for page in pages:
        ends = [begin + size for begin, size in zip(page.dataoffsets, page.databytecounts, strict=True)]
        if max(ends, default=0) > length:
            raise OSError(f"it is truncated: it has {length} bytes, and its image ends at {max(ends)}")


def open_slide(path: str, level: int, **_: Any) -> Source:
    """Open a level of a whole-slide image."""
    import openslide

    return SlideSource(openslide.OpenSlide(path), level)


def open_nifti(path: str, **_: Any) -> Source:
    """Open a volume; its numbers are scaled as the header says."""
    import nibabel

    if path.endswith(".gz"):
        raise ValueError("a compressed file cannot be read in parts. Decompress it with `gunzip --keep`")
    volume: Any = nibabel.load(path, mmap=False).dataobj  # type: ignore[attr-defined]
    source = ArraySource(volume)
    if (volume.slope, volume.inter) != (1.0, 0.0):
        source.dtype = np.dtype(np.float64)  # The type of scaled numbers.
    return source


def open_hdf5(path: str, array: str | None, **_: Any) -> Source:
    """Open a dataset of an HDF5 file: the one named, or the only one."""
    import h5py  # type: ignore[import-untyped]

    file = h5py.File(path, "r")
    names: list[str] = [array] if array else []
    if not names:
        file.visititems(lambda name, node: names.append(name) if isinstance(node, h5py.Dataset) else None)
    if len(names) != 1:
        raise ValueError(f"it holds {len(names)} datasets: {', '.join(names[:5])}. Pass the name of one as `array`")
    return ArraySource(file[names[0]])


_PARSING = threading.Lock()
"""Held while NumPy parses the header of a file, with `ast`. In some releases of CPython, 3.11.7 for instance, `ast` may
fail with a `SystemError` if several threads parse (CPython issue 106905)."""


def open_numpy(path: str, **_: Any) -> Source:
    """Open an array of an `.npy` file. Its pages are released after each read: they would count as memory."""
    with open(path, "rb") as file:
        if file.read(len(NPY_MAGIC)) != NPY_MAGIC:
            raise ValueError("it is no `.npy` file, as `numpy.save` writes them")
    try:
        with _PARSING:
            pages: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{error}. Is it truncated, or an array of Python objects?") from error
    mapping: Any = pages._mmap  # Nothing public releases pages.
    return ArraySource(pages, lambda: mapping.madvise(mmap.MADV_DONTNEED))


OPENERS: dict[str, Callable[..., Source]] = {
    "zarr": open_zarr,
    "tiff": open_tiff,
    "openslide": open_slide,
    "nifti": open_nifti,
    "hdf5": open_hdf5,
    "numpy": open_numpy,
}
"""Functions that open a file. Arguments: path, and by name `array`, `level` and `fill_missing_chunks` of a reader."""
