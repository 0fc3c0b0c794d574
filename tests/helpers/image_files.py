"""Images in files of all formats, and models that read them."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import keras
import nibabel
import numpy as np
import pytest
import tifffile

import tflms_sft
from tflms_sft._sources import region_reads

L = keras.layers


def zarr() -> ModuleType:
    """Return the library; skip the test where it is missing: it has no release for Python 3.10."""
    return pytest.importorskip("zarr")


def pixels(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape).astype("uint8")


def note_regions(monkeypatch):
    """Return a list that receives the sizes of all regions that are read."""
    sizes = []
    read = region_reads.RegionReads._read

    def noted(self, images, begin, size):
        sizes.append(tuple(size.tolist()))
        return read(self, images, begin, size)

    monkeypatch.setattr(region_reads.RegionReads, "_read", noted)
    return sizes


def write_zarr(path, image, version=3, chunks=None, shards=None):
    array = zarr().create_array(
        str(path),
        shape=image.shape,
        chunks=chunks or tuple(min(size, 16) for size in image.shape),
        shards=shards,
        dtype=image.dtype,
        zarr_format=version,
        config={"write_empty_chunks": True},
    )
    array[...] = image


def write_group(path, image):
    group = zarr().open_group(str(path), mode="w")
    for level, pixels in enumerate((image, image[::2, ::2])):
        array = group.create_array(
            str(level), shape=pixels.shape, chunks=(16, 16, *pixels.shape[2:]), dtype=pixels.dtype
        )
        array[...] = pixels


def write_tiff(path, image, compression="zlib"):
    """Write a pyramid of two levels."""
    options = {"tile": (16, 16), "photometric": "rgb", "compression": compression}
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(image, subifds=1, **options)
        tiff.write(np.ascontiguousarray(image[::2, ::2]), subfiletype=1, **options)


def write_slide(path, image):
    """Write a TIFF file that OpenSlide takes for a slide: its levels are pages of their own."""
    options = {"tile": (16, 16), "photometric": "rgb", "compression": "zlib"}
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(image, **options)
        tiff.write(np.ascontiguousarray(image[::2, ::2]), subfiletype=1, **options)


def write_hdf5(path, image):
    with h5py.File(path, "w") as file:
        file.create_dataset("scan/pixels", data=image, chunks=tuple(min(size, 16) for size in image.shape))


def write_nifti(path, image):
    nibabel.save(nibabel.Nifti1Image(image, np.eye(4)), path)


WRITERS: dict[str, tuple[str, Callable[..., None]]] = {
    "zarr": ("zarr", write_zarr),
    "tiff": ("tif", write_tiff),
    "openslide": ("svs.tif", write_slide),
    "hdf5": ("h5", write_hdf5),
    "nifti": ("nii", write_nifti),
    "numpy": ("npy", np.save),
}
"""Suffix and writer of each format."""


def write_images(folder: Path, image_format: str, images: Any, name: str = "image") -> list[str]:
    """Write images to files; return their paths."""
    suffix, write = WRITERS[image_format]
    paths = [folder / f"{name}{number}.{suffix}" for number in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        write(path, image)
    return [str(path) for path in paths]


def reader(image_format: str, images: np.ndarray, **options: Any) -> tflms_sft.ImageReader:
    """Return a reader of images like these."""
    return tflms_sft.ImageReader(image_format, images.shape[1:], str(images.dtype), **options)
