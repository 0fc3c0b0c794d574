"""Predictions that are written to files by tiles equal those that `predict` returns."""

import errno

import keras
import numpy as np
import pytest
import tensorflow as tf
from image_files import L, pixels, reader, write_images, zarr

import tflms_sft
from tflms_sft._sources import image_writer

SHAPE = (120, 100, 3)


@pytest.fixture
def written(monkeypatch):
    """Sizes of all regions that are written."""
    sizes = []
    write = image_writer.RegionWrites.__call__

    def noted(self, values, keys, begin):
        sizes.append(values.shape)
        return write(self, values, keys, begin)

    monkeypatch.setattr(image_writer.RegionWrites, "__call__", noted)
    return sizes


def make_model(image_reader):
    keras.utils.set_random_seed(1)
    paths = keras.Input((), dtype="string")
    x = L.Rescaling(1 / 255)(image_reader(paths))
    for _ in range(2):
        x = L.Conv2D(4, 3, padding="same", activation="relu")(x)
    return keras.Model(paths, L.Conv2D(2, 1)(x))


def predictor(model, target, head=lambda x: x, **options):
    results = keras.Input((), dtype="string")
    return keras.Model([*model.inputs, results], tflms_sft.ImageWriter(target, **options)(head(model.output), results))


def opened(target, path):
    return zarr().open_array(path)[...] if target == "zarr" else np.load(path)


@pytest.mark.parametrize("target", ["zarr", "numpy"])
def test_predictions_are_written_by_tiles(tmp_path, written, target):
    keras.config.set_floatx("float64")
    images = pixels(0, 3, *SHAPE)
    x = write_images(tmp_path, "zarr", images)
    model = make_model(reader("zarr", images))
    expected = model.predict(tf.constant(x), batch_size=1, verbose=0)
    y = [str(tmp_path / f"result{number}") for number in range(3)]
    writing = predictor(model, target, dtype="float64")
    callback = tflms_sft.MemoryBudget(400_000, verbose=0)
    counts = writing.predict([tf.constant(x), tf.constant(y)], batch_size=1, verbose=0, callbacks=[callback])
    assert callback.predict_plan.segments and not callback.predict_plan.segments[0].backward_ops
    assert counts.tolist() == [expected[0].size] * 3
    assert len(written) > 3 and all(np.prod(size) < expected[0].size for size in written)
    for path, values in zip(y, expected, strict=True):
        np.testing.assert_allclose(opened(target, path), values, rtol=1e-10, atol=1e-12)


def test_classes_are_written_in_tiles_of_a_batch(tmp_path, written):
    images = pixels(0, 4, *SHAPE)
    x = write_images(tmp_path, "zarr", images)
    model = make_model(reader("zarr", images))
    expected = model.predict(tf.constant(x), batch_size=4, verbose=0).argmax(-1)
    y = [str(tmp_path / f"result{number}") for number in range(4)]
    writing = predictor(model, "zarr", lambda logits: keras.ops.argmax(logits, -1), dtype="uint8")
    callback = tflms_sft.MemoryBudget(600_000, verbose=0)
    writing.predict([tf.constant(x), tf.constant(y)], batch_size=4, verbose=0, callbacks=[callback])
    assert callback.predict_plan.segments and len(written) > 1
    for path, values in zip(y, expected, strict=True):
        np.testing.assert_array_equal(zarr().open_array(path)[...], values)
        assert zarr().open_array(path).dtype == np.uint8


def test_plain_prediction_writes_whole_images(tmp_path, written):
    images = pixels(0, 2, *SHAPE)
    x = write_images(tmp_path, "zarr", images)
    model = make_model(reader("zarr", images))
    expected = model.predict(tf.constant(x), batch_size=2, verbose=0)
    y = [str(tmp_path / f"result{number}.npy") for number in range(2)]
    writing = predictor(model, "numpy")
    writing.predict([tf.constant(x), tf.constant(y)], batch_size=2, verbose=0)
    assert written == [expected.shape]
    np.testing.assert_allclose(np.load(y[1]), expected[1], rtol=1e-5, atol=1e-6)


def test_file_that_exists(tmp_path):
    images = pixels(0, 1, *SHAPE)
    (x,) = write_images(tmp_path, "zarr", images)
    model = make_model(reader("zarr", images))
    (tmp_path / "result").write_text("a result")
    arguments = [tf.constant([x]), tf.constant([str(tmp_path / "result")])]
    callback = tflms_sft.SFT((2, 2), verbose=0)
    with pytest.raises(tflms_sft.ImageWriteError, match="result`: it exists. Remove it, or pass `overwrite=True`"):
        predictor(model, "zarr").predict(arguments, verbose=0, callbacks=[callback])
    assert (tmp_path / "result").read_text() == "a result"
    predictor(model, "zarr", overwrite=True).predict(arguments, verbose=0)
    assert zarr().open_array(tmp_path / "result").shape == (*SHAPE[:2], 2)


@pytest.mark.parametrize("zarr_format", [None, 2, 3])
def test_folder_that_is_no_array_is_kept(tmp_path, zarr_format):
    """A group of arrays neither, whose root has a file `zarr.json`, too."""
    folder = tmp_path / "precious"
    folder.mkdir()
    if zarr_format:
        zarr().create_group(folder, zarr_format=zarr_format).create_array("a", shape=(2,), dtype="int8")[:] = 7
    else:
        (folder / "zarr.json").write_text("[1, ")
    writer = tflms_sft.ImageWriter("zarr", overwrite=True)
    with pytest.raises(tflms_sft.ImageWriteError, match="precious`: it is a folder, but no zarr array. Write"):
        writer(tf.zeros([1, 8, 8, 2]), tf.constant([str(folder)]))
    if zarr_format:
        assert list(zarr().open_array(folder / "a")) == [7, 7]
    else:
        assert (folder / "zarr.json").read_text() == "[1, "


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_array_is_overwritten(tmp_path, zarr_format):
    zarr().create_array(tmp_path / "a", shape=(2,), dtype="int8", zarr_format=zarr_format)
    tflms_sft.ImageWriter("zarr", overwrite=True)(tf.zeros([1, 8, 8, 2]), tf.constant([str(tmp_path / "a")]))
    assert zarr().open_array(tmp_path / "a").shape == (8, 8, 2)


def test_images_of_a_batch_with_one_path(tmp_path):
    path = str(tmp_path / "result")
    with pytest.raises(tflms_sft.ImageWriteError, match="Several images of a batch have one path"):
        tflms_sft.ImageWriter("numpy")(tf.zeros([2, 8, 8, 2]), tf.constant([path, path]))


def test_targets_of_users_and_errors(tmp_path):
    class Full:
        def __setitem__(self, region, values):
            raise OSError(28, "No space left on device")

    writer = tflms_sft.ImageWriter(lambda path, shape, dtype: Full())
    with pytest.raises(tflms_sft.ImageWriteError, match=r"\[0:8, 0:8, 0:2\] of the image `a`: .*No space left"):
        writer(tf.zeros([1, 8, 8, 2]), tf.constant(["a"]))
    with pytest.raises(ValueError, match="cannot be saved: its `target` is a function"):
        writer.get_config()


def test_any_write_that_fails_raises_its_error(tmp_path, cached_plans):
    images = pixels(0, 1, *SHAPE)
    written, fails_at = [], 0

    class Target:
        def __setitem__(self, region, values):
            written.append(values.size)
            if len(written) == fails_at:
                raise OSError(errno.ENOSPC, "No space left on device")

    writing = predictor(make_model(reader("zarr", images)), lambda path, shape, dtype: Target(), overwrite=True)
    arguments = [tf.constant(write_images(tmp_path, "zarr", images)), tf.constant(["a"])]
    callback = tflms_sft.MemoryBudget(130_000, verbose=0)
    expected = writing.predict(arguments, verbose=0, callbacks=[callback])
    num_writes = len(written)
    assert num_writes >= 6
    for number in (1, num_writes // 2, num_writes):
        written.clear()
        fails_at = number
        with pytest.raises(tflms_sft.ImageWriteError, match=r"\[.*\] of the image `a`: .*No space left"):
            writing.predict(arguments, verbose=0, callbacks=[callback])
    fails_at = 0
    np.testing.assert_array_equal(writing.predict(arguments, verbose=0, callbacks=[callback]), expected)


def test_writers_are_saved_and_loaded():
    writer = tflms_sft.ImageWriter("numpy", "uint8", overwrite=True, name="classes")
    assert tflms_sft.ImageWriter.from_config(writer.get_config()).get_config() == writer.get_config()


@pytest.mark.parametrize("target, message", [("png", "Unknown `target`. Received: 'png'"), (3, "must be a format")])
def test_invalid_targets(target, message):
    with pytest.raises(ValueError, match=message):
        tflms_sft.ImageWriter(target)
