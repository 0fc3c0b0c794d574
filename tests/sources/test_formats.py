"""Files of all formats yield the regions that are asked for; files that cannot be read raise one clear error."""

import gzip
import os
import shutil
import threading
import time
from concurrent import futures

import keras
import nibabel
import numpy as np
import pytest
import tensorflow as tf
from image_files import WRITERS, reader, write_group, write_images, write_tiff, write_zarr, zarr

import tflms_sft
from tflms_sft._sources import formats

SHAPE = (50, 44, 3)


def pixels(*shape):
    return np.random.default_rng(0).integers(0, 256, shape).astype("uint8")


def region_of(image_reader, path, begin, size):
    """Read a region of one image as a tile loop does."""
    keys, nothing = np.array([path.encode()], object), np.zeros(len(begin) + 1, np.int64)
    return image_reader._reads(keys, np.array([0, *begin]), np.array([1, *size]), nothing, nothing)[0]


def whole(image_reader, path):
    return region_of(image_reader, path, [0] * len(image_reader.image_shape), image_reader.image_shape)


@pytest.mark.parametrize("image_format", WRITERS)
def test_every_format_yields_regions(tmp_path, image_format):
    image = pixels(*SHAPE)
    (path,) = write_images(tmp_path, image_format, image[None])
    image_reader = reader(image_format, image[None])
    np.testing.assert_array_equal(image_reader(tf.constant([path]))[0], image)
    np.testing.assert_array_equal(region_of(image_reader, path, (17, 3, 0), (20, 40, 3)), image[17:37, 3:43])
    np.testing.assert_array_equal(region_of(image_reader, path, (49, 43, 2), (1, 1, 1)), image[49:, 43:, 2:])


@pytest.mark.parametrize("version", [2, 3])
def test_both_zarr_versions(tmp_path, version):
    image = pixels(*SHAPE)
    write_zarr(tmp_path / "image.zarr", image, version)
    np.testing.assert_array_equal(whole(reader("zarr", image[None]), str(tmp_path / "image.zarr")), image)


def test_zarr_shards(tmp_path):
    image = pixels(*SHAPE)
    write_zarr(tmp_path / "image.zarr", image, chunks=(8, 8, 3), shards=(16, 16, 3))
    np.testing.assert_array_equal(whole(reader("zarr", image[None]), str(tmp_path / "image.zarr")), image)


@pytest.mark.parametrize("image_format, write", [("zarr", write_group), ("tiff", write_tiff)])
def test_levels_of_pyramids(tmp_path, image_format, write):
    image = pixels(*SHAPE)
    path = str(tmp_path / "pyramid")
    write(path, image)
    reduced = image[::2, ::2]
    np.testing.assert_array_equal(whole(reader(image_format, reduced[None], level=1), path), reduced)


def test_named_arrays(tmp_path):
    image = pixels(*SHAPE)
    write_group(tmp_path / "group.zarr", image)
    (path,) = write_images(tmp_path, "hdf5", image[None])
    np.testing.assert_array_equal(whole(reader("zarr", image[None], array="0"), str(tmp_path / "group.zarr")), image)
    np.testing.assert_array_equal(whole(reader("hdf5", image[None], array="scan/pixels"), path), image)


def test_order_of_axes_and_dimensions_of_one_entry(tmp_path):
    image = pixels(*SHAPE)
    write_zarr(tmp_path / "first.zarr", np.ascontiguousarray(image.transpose(2, 0, 1)[None]))
    image_reader = reader("zarr", image[None], axes=(2, 3, 1))
    path = str(tmp_path / "first.zarr")
    np.testing.assert_array_equal(whole(image_reader, path), image)
    np.testing.assert_array_equal(region_of(image_reader, path, (5, 7, 1), (9, 8, 2)), image[5:14, 7:15, 1:])


def test_file_without_channels_is_an_image_with_one(tmp_path):
    image = pixels(30, 20)
    (path,) = write_images(tmp_path, "numpy", image[None])
    np.testing.assert_array_equal(whole(reader("numpy", image[None, ..., None]), path), image[..., None])


def test_scaled_volume(tmp_path):
    volume = nibabel.Nifti1Image(pixels(8, 9, 10).astype("int16"), np.eye(4))
    volume.header.set_slope_inter(0.5, 2.0)
    nibabel.save(volume, tmp_path / "scan.nii")
    expected = nibabel.load(tmp_path / "scan.nii").get_fdata()
    image_reader = tflms_sft.ImageReader("nifti", expected.shape, "float64")
    np.testing.assert_array_equal(whole(image_reader, str(tmp_path / "scan.nii")), expected)


def test_batches_of_paths_and_of_indices(tmp_path):
    images = pixels(3, *SHAPE)
    paths = write_images(tmp_path, "numpy", images)
    np.testing.assert_array_equal(reader("numpy", images)(tf.constant(paths)), images)
    by_index = reader("numpy", images, paths=paths)
    np.testing.assert_array_equal(by_index(tf.constant([2, 0])), images[[2, 0]])


def test_sources_of_users():
    image = pixels(*SHAPE)
    image_reader = tflms_sft.ImageReader(lambda path: formats.ArraySource(image + len(path)), SHAPE)
    np.testing.assert_array_equal(whole(image_reader, "abc"), image + 3)


# Files that cannot be read -----------------------------------------------------------------------------------


def truncated(path):
    os.truncate(path, os.path.getsize(path) * 2 // 3)


def removed(path):
    shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def test_missing_chunk(tmp_path):
    image = pixels(*SHAPE)
    write_zarr(tmp_path / "image.zarr", image)
    path = str(tmp_path / "image.zarr")
    os.remove(tmp_path / "image.zarr" / "c" / "1" / "1" / "0")
    strict, lenient = reader("zarr", image[None]), reader("zarr", image[None], fill_missing_chunks=True)
    np.testing.assert_array_equal(region_of(strict, path, (0, 0, 0), (16, 44, 3)), image[:16])
    message = (
        rf"region \[10:20, 10:20, 0:3\] of the image `{path}`: the chunk `c/1/1/0` is missing.*fill_missing_chunks"
    )
    with pytest.raises(tflms_sft.ImageReadError, match=message):
        region_of(strict, path, (10, 10, 0), (10, 10, 3))
    assert not whole(lenient, path)[16:32, 16:32].any()


@pytest.mark.parametrize("image_format", ["tiff", "numpy", "hdf5", "nifti"])
def test_truncated_file(tmp_path, image_format):
    image = pixels(*SHAPE)
    (path,) = write_images(tmp_path, image_format, image[None])
    truncated(path)
    with pytest.raises(tflms_sft.ImageReadError, match=f"region .* of the image `{path}`"):
        whole(reader(image_format, image[None]), path)


@pytest.mark.parametrize("image_format", WRITERS)
def test_file_that_vanishes_or_is_no_image(tmp_path, image_format):
    image = pixels(*SHAPE)
    (path,) = write_images(tmp_path, image_format, image[None])
    image_reader = reader(image_format, image[None])
    whole(image_reader, path)
    removed(path)
    with pytest.raises(tflms_sft.ImageReadError, match=f"`{path}`.*No such file"):
        whole(image_reader, path)
    (tmp_path / "text").write_text("no image")
    with pytest.raises(tflms_sft.ImageReadError, match="of the image `.*text`"):
        whole(image_reader, str(tmp_path / "text"))


def test_file_that_changes(tmp_path):
    image = pixels(*SHAPE)
    (path,) = write_images(tmp_path, "numpy", image[None])
    image_reader = reader("numpy", image[None])
    whole(image_reader, path)
    np.save(path, image + 1)
    os.utime(path, ns=(1, 1))
    with pytest.raises(tflms_sft.ImageReadError, match="has changed since it was opened"):
        whole(image_reader, path)
    np.testing.assert_array_equal(whole(image_reader, path), image + 1)  # A later step opens it again.


@pytest.mark.parametrize("options", [{"level": 0}, {"array": "0"}, {"array": "/0"}])
def test_array_of_a_group_that_changes(tmp_path, options):
    image, path = pixels(*SHAPE), tmp_path / "pyramid.zarr"
    write_group(path, image)
    image_reader = tflms_sft.ImageReader("zarr", SHAPE, **options)
    whole(image_reader, str(path))
    del zarr().open_group(str(path))["0"]
    zarr().open_group(str(path)).create_array("0", shape=SHAPE, chunks=SHAPE, dtype="uint8")[...] = image + 1
    with pytest.raises(tflms_sft.ImageReadError, match="has changed since it was opened. Call `close`"):
        whole(image_reader, str(path))
    np.testing.assert_array_equal(whole(image_reader, str(path)), image + 1)


@pytest.mark.parametrize(
    "write_shape, options, message",
    [
        ((50, 44, 4), {}, r"it has the shape \(50, 44, 4\), expected \(50, 44, 3\)"),
        ((3, 50, 44), {}, "Pass the order of its dimensions as `axes`"),
        ((2, 50, 44, 3), {"axes": (1, 2, 3)}, r"it has the shape \(2, 50, 44, 3\)"),
        ((50, 44, 3), {"dtype": "uint16"}, "numbers of type uint8, expected uint16"),
    ],
)
def test_unexpected_shape_or_type(tmp_path, write_shape, options, message):
    np.save(tmp_path / "image.npy", pixels(*write_shape))
    image_reader = tflms_sft.ImageReader("numpy", SHAPE, **options)
    with pytest.raises(tflms_sft.ImageReadError, match=message):
        whole(image_reader, str(tmp_path / "image.npy"))


def test_compressed_volume(tmp_path):
    (path,) = write_images(tmp_path, "nifti", pixels(1, 8, 9, 10))
    with open(path, "rb") as file, gzip.open(f"{path}.gz", "wb") as compressed:
        compressed.write(file.read())
    with pytest.raises(tflms_sft.ImageReadError, match=r"cannot be read in parts. Decompress it with `gunzip"):
        whole(tflms_sft.ImageReader("nifti", (8, 9, 10)), f"{path}.gz")


def test_remote_file():
    with pytest.raises(tflms_sft.ImageReadError, match=r"`s3://bucket/image.zarr`: .*Copy it to a local disk"):
        whole(tflms_sft.ImageReader("zarr", SHAPE), "s3://bucket/image.zarr")


def test_level_that_does_not_exist(tmp_path):
    image = pixels(*SHAPE)
    for image_format in ("tiff", "openslide"):
        (path,) = write_images(tmp_path, image_format, image[None])
        with pytest.raises(tflms_sft.ImageReadError, match="it has 2 levels, not a level 5"):
            whole(reader(image_format, image[None], level=5), path)


def test_slide_level_that_is_not_reduced_by_an_integer(tmp_path):
    image = pixels(51, 44, 3)
    (path,) = write_images(tmp_path, "openslide", image[None])
    with pytest.raises(tflms_sft.ImageReadError, match="level 1 is reduced by .* cannot be read exactly"):
        whole(tflms_sft.ImageReader("openslide", (26, 22, 3), level=1), path)


def test_hdf5_file_with_several_datasets(tmp_path):
    import h5py

    with h5py.File(tmp_path / "two.h5", "w") as file:
        file["a"] = file["b"] = pixels(*SHAPE)
        file["c"] = pixels(*SHAPE)
    with pytest.raises(tflms_sft.ImageReadError, match=r"it holds \d datasets: a.* as `array`"):
        whole(tflms_sft.ImageReader("hdf5", SHAPE), str(tmp_path / "two.h5"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("jpeg", SHAPE), "Unknown `source`. Received: 'jpeg'. Expected one of"),
        ((3, SHAPE), "`source` must be a format or a function"),
        (("numpy", (5,)), "`shape` must have at least two sizes"),
        (("numpy", (5, 0)), "`shape` must have at least two sizes, each a positive integer or None"),
        (("numpy", (None, 0, 3)), r"`shape` must have at least two sizes.*Received: shape=\(None, 0, 3\)"),
        (("numpy", (5, 2.5)), r"`shape` must have at least two sizes.*Received: shape=\(5, 2.5\)"),
        (("numpy", 64), "`shape` must have at least two sizes.*Received: shape=64"),
        (("numpy", SHAPE, "uint9"), "`dtype` must be one of .*Received: dtype='uint9'"),
        (("numpy", SHAPE, "mixed_float16"), "`dtype` must be one of"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        tflms_sft.ImageReader(*arguments)


@pytest.mark.parametrize("axes", [(0, 1), (0, 1, 1), (0, 1, -1)])
def test_invalid_axes(axes):
    with pytest.raises(ValueError, match="`axes` must name a different dimension of the file"):
        tflms_sft.ImageReader("zarr", SHAPE, axes=axes)


def test_package_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(formats.PACKAGES, "zarr", ("no_such_package",))
    with pytest.raises(ImportError, match=r'`pip install "tflms-sft\[zarr\]"`'):
        tflms_sft.ImageReader("zarr", SHAPE)


def test_inputs_of_another_type(tmp_path):
    with pytest.raises(ValueError, match="must be strings with paths. Received: dtype='int32'"):
        tflms_sft.ImageReader("zarr", SHAPE)(tf.constant([1]))
    with pytest.raises(ValueError, match="must be integers, indices of `paths`. Received: dtype='string'"):
        tflms_sft.ImageReader("zarr", SHAPE, paths=["a"])(tf.constant(["a"]))


def test_index_that_does_not_exist():
    with pytest.raises(tflms_sft.ImageReadError, match="There is no image 4. Expected: an index from 0 to 0"):
        tflms_sft.ImageReader("zarr", SHAPE, paths=["a"])(tf.constant([4]))


@pytest.mark.parametrize("paths", ["image.zarr", []])
def test_invalid_paths(paths):
    with pytest.raises(ValueError, match="`paths` must be a sequence of at least one path"):
        tflms_sft.ImageReader("zarr", SHAPE, paths=paths)


@pytest.mark.parametrize("keys", [tf.constant([["a"]]), tf.constant("a")])
def test_keys_of_another_shape(keys):
    with pytest.raises(ValueError, match=r"must have the shape \(batch,\)"):
        tflms_sft.ImageReader("zarr", SHAPE)(keys)


def test_numbers_in_another_byte_order(tmp_path):
    image = pixels(*SHAPE).astype(">u2")
    np.save(tmp_path / "image.npy", image)
    image_reader = tflms_sft.ImageReader("numpy", SHAPE, "uint16")
    np.testing.assert_array_equal(whole(image_reader, str(tmp_path / "image.npy")), image)


def test_source_that_returns_another_type_than_it_says():
    class Lying(formats.ArraySource):
        def __getitem__(self, region):
            return super().__getitem__(region) + 0.5

    image_reader = tflms_sft.ImageReader(lambda path: Lying(pixels(*SHAPE)), SHAPE)
    with pytest.raises(tflms_sft.ImageReadError, match="its region has numbers of type float64, expected uint8"):
        whole(image_reader, "a")


def test_closed_reader_opens_files_again(tmp_path):
    import h5py

    image = pixels(*SHAPE)
    (path,) = write_images(tmp_path, "hdf5", image[None])
    image_reader = reader("hdf5", image[None])
    whole(image_reader, path)
    image_reader.close()
    with h5py.File(path, "a") as file:
        file["scan/pixels"][...] = 7
    assert np.all(whole(image_reader, path) == 7)


def test_group_without_the_level(tmp_path):
    image = pixels(*SHAPE)
    write_group(tmp_path / "group.zarr", image)
    with pytest.raises(tflms_sft.ImageReadError, match=r"it is a group of \['0', '1'\], without '5'"):
        whole(reader("zarr", image[None], level=5), str(tmp_path / "group.zarr"))


def test_readers_are_saved_and_loaded():
    image_reader = tflms_sft.ImageReader("zarr", SHAPE, "uint16", level=2, axes=(2, 0, 1), name="slides")
    loaded = tflms_sft.ImageReader.from_config(image_reader.get_config())
    assert loaded.get_config() == image_reader.get_config()
    with pytest.raises(ValueError, match="`own` cannot be saved: its `source` is a function"):
        tflms_sft.ImageReader(open, SHAPE, name="own").get_config()


def test_headers_of_numpy_files_are_parsed_one_by_one(tmp_path, monkeypatch):
    """NumPy's parser is not safe in threads."""
    path, is_loading, overlaps, load = tmp_path / "a.npy", threading.Lock(), [], np.load
    np.save(path, np.zeros((4, 4, 3)))

    def slow(*args, **options):
        overlaps.append(not is_loading.acquire(blocking=False))
        time.sleep(0.05)
        if not overlaps[-1]:
            is_loading.release()
        return load(*args, **options)

    monkeypatch.setattr(np, "load", slow)
    with futures.ThreadPoolExecutor(4) as pool:
        sources = list(pool.map(lambda _: formats.open_numpy(str(path)), range(4)))
    assert overlaps == [False] * 4 and {source.shape for source in sources} == {(4, 4, 3)}


def test_truncated_numpy_file(tmp_path):
    (path,) = write_images(tmp_path, "numpy", pixels(1, *SHAPE))
    os.truncate(path, 1000)
    with pytest.raises(tflms_sft.ImageReadError, match=f"`{path}`: .*Is it truncated"):
        whole(reader("numpy", pixels(1, *SHAPE)), path)


def test_indices_in_floating_point_are_refused(tmp_path):
    """They would be converted to the type of the images, 299.0 to 43."""
    paths = write_images(tmp_path, "numpy", pixels(2, *SHAPE))
    image_reader = reader("numpy", pixels(2, *SHAPE), paths=paths)
    for keys in (tf.constant([1.0]), keras.Input(())):
        with pytest.raises(ValueError, match="must be integers, indices of `paths`. Received: dtype='float32'"):
            image_reader(keys)
