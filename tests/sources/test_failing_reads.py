"""A read that fails changes no variable and leaves no thread; regions are read ahead, two in memory at most."""

import errno
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from image_files import L, pixels, reader, write_images

import tflms_sft
from tflms_sft._sources import formats, open_images, region_reads

SHAPE = (40, 36, 3)


class Failing(formats.ArraySource):
    """An image in memory of which a read fails.

    Attributes:
        reads: Number of reads so far.
        fails_at: Number of the read that fails.
        is_short: Whether it returns too few rows; otherwise it raises an error.
    """

    reads = 0
    fails_at = -1
    counting = threading.Lock()
    is_short = False

    def __getitem__(self, region):
        with self.counting:  # Two threads read concurrently.
            type(self).reads += 1
            fails = type(self).reads == self.fails_at
        if fails and not self.is_short:
            raise OSError(errno.EIO, "Input/output error")
        return super().__getitem__(region)[: -1 if fails else None]


@pytest.fixture
def failing():
    return type("Failing", (Failing,), {})


def make_model(image_reader, mask_reader):
    keras.utils.set_random_seed(1)
    paths = keras.Input((), dtype="string")
    x = L.Rescaling(1 / 255)(image_reader(paths))
    x = L.ReLU()(L.BatchNormalization()(L.Conv2D(4, 3, padding="same")(x)))
    x = L.Dropout(0.2)(L.Conv2D(4, 3, padding="same", activation="relu")(x))
    model = tflms_sft.ReadingModel(paths, L.Conv2D(1, 1)(x), labels=mask_reader)
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True), metrics=["mae"], jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def train_once(model, x, y, callback):
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(1, drop_remainder=True)
    model.fit(data, shuffle=False, verbose=0, callbacks=[callback])


def variables(model):
    return {variable.path: np.array(variable) for variable in model.variables if "seed" not in variable.path}


def assert_same(before, after):
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("stride", [19, 1])
def test_any_read_that_fails_changes_no_variable(failing, stride, is_short):
    images, masks = pixels(0, *SHAPE), pixels(1, *SHAPE[:2], 1) % 2
    arrays = {"image": images, "mask": masks}
    open_image = lambda path: failing(arrays[path])  # noqa: E731
    model = make_model(tflms_sft.ImageReader(open_image, SHAPE), tflms_sft.ImageReader(open_image, masks.shape))
    callback = tflms_sft.SFT((2, 2), verbose=0)
    train_once(model, ["image"], ["mask"], callback)
    num_reads, failing.is_short = failing.reads, is_short
    reason = r"shape \(\d+, .*expected \(\d+, .*truncated" if is_short else "Input/output error"
    assert callback.plan.segments and num_reads >= 12
    for number in range(num_reads, 0, -stride):
        failing.reads, failing.fails_at, before = 0, number, variables(model)
        with pytest.raises(tflms_sft.ImageReadError, match=rf"\[.*\] of the image `(image|mask)`: .*{reason}"):
            train_once(model, ["image"], ["mask"], callback)
        assert_same(before, variables(model))
    failing.fails_at = -1
    before = variables(model)
    train_once(model, ["image"], ["mask"], callback)
    assert any(not np.array_equal(value, before[path]) for path, value in variables(model).items())


def threads_ahead():
    return [thread for thread in threading.enumerate() if thread.name == "tflms-sft read ahead"]


def test_error_names_the_file_and_training_continues_after_a_repair(tmp_path):
    images, masks = pixels(0, 2, *SHAPE), pixels(1, 2, *SHAPE[:2], 1) % 2
    x, y = write_images(tmp_path, "zarr", images), write_images(tmp_path, "zarr", masks, "mask")
    model = make_model(reader("zarr", images), reader("zarr", masks))
    chunk = tmp_path / "image1.zarr" / "c" / "2" / "2" / "0"
    content = chunk.read_bytes()
    chunk.unlink()
    callback = tflms_sft.SFT((2, 2), verbose=0)
    with pytest.raises(tflms_sft.ImageReadError, match=f"`{x[1]}`: the chunk `c/2/2/0` is missing"):
        train_once(model, x, y, callback)
    for thread in threads_ahead():
        thread.join(5)
    assert not threads_ahead()
    assert int(model.optimizer.iterations) == 1
    chunk.write_bytes(content)
    train_once(model, x, y, callback)
    assert int(model.optimizer.iterations) == 3


def test_rewritten_steps_raise_the_error_of_the_read(tmp_path):
    images = pixels(0, 1, *SHAPE)
    (path,) = write_images(tmp_path, "numpy", images)
    masks = tflms_sft.ImageReader(lambda path: formats.ArraySource(pixels(1, *SHAPE[:2], 1)), (*SHAPE[:2], 1))
    model = make_model(reader("numpy", images), masks)

    @tf.function(input_signature=[tf.TensorSpec([1], tf.string)], autograph=False)
    def step(keys):
        return model.train_step((keys, keys))

    fast = tflms_sft.rewrite(step, tflms_sft.SFTParams((2, 2)))
    fast(tf.constant([path]))
    with pytest.raises(tflms_sft.ImageReadError, match="`nothing`: .*No such file"):
        fast(tf.constant(["nothing"]))


# Reading ahead ----------------------------------------------------------------------------------------------


def reads_of(image):
    spec = open_images.ImageSpec(lambda path: formats.ArraySource(image), lambda path: (), image.shape, image.dtype)
    return region_reads.RegionReads(open_images.OpenImages(spec), None)


KEYS = np.array([b"image"], object)


def test_next_region_is_read_ahead_and_taken():
    image = pixels(0, 8, 8, 1)
    reads, size = reads_of(image), np.array([1, 4, 8, 1])
    first = reads(KEYS, np.array([0, 0, 0, 0]), size, np.array([0, 4, 0, 0]), size)
    ((_, ahead),) = reads.ahead.values()
    np.testing.assert_array_equal(first[0], image[:4])
    np.testing.assert_array_equal(ahead.result()[0], image[4:])
    second = reads(KEYS, np.array([0, 4, 0, 0]), size, np.array([0, 0, 0, 0]), 0 * size)
    assert second is ahead.result()
    assert not reads.ahead


def test_region_read_ahead_for_another_tile_is_dropped():
    image = pixels(0, 8, 8, 1)
    reads, size = reads_of(image), np.array([1, 2, 8, 1])
    reads(KEYS, np.array([0, 0, 0, 0]), size, np.array([0, 2, 0, 0]), size)
    values = reads(KEYS, np.array([0, 6, 0, 0]), size, np.array([0, 0, 0, 0]), 0 * size)
    np.testing.assert_array_equal(values[0], image[6:])
    assert not reads.ahead


def test_error_ahead_is_raised_when_the_region_is_needed(failing):
    image = pixels(0, 8, 8, 1)
    spec = open_images.ImageSpec(lambda path: failing(image), lambda path: (), image.shape, image.dtype)
    reads, size = region_reads.RegionReads(open_images.OpenImages(spec), None), np.array([1, 4, 8, 1])
    failing.fails_at = 2
    reads(KEYS, np.array([0, 0, 0, 0]), size, np.array([0, 4, 0, 0]), size)
    with pytest.raises(tflms_sft.ImageReadError, match=r"region \[4:8, 0:8, 0:1\]"):
        reads(KEYS, np.array([0, 4, 0, 0]), size, np.array([0, 0, 0, 0]), 0 * size)


@pytest.mark.parametrize("has_several_shapes", [False, True])
def test_few_images_stay_open(has_several_shapes):
    def opened(path):
        return formats.ArraySource(pixels(0, 8, 8 + has_several_shapes * int(path), 1))

    images = open_images.OpenImages(open_images.ImageSpec(opened, lambda path: (), (8, None, 1), np.dtype("uint8")))
    reads = region_reads.RegionReads(images, None)
    for number in range(2 * open_images.MAX_OPEN_IMAGES):
        key = str(number).encode()
        shape = reads.shape([key])
        size = np.array([1, *shape])
        reads.of_shape(shape)(np.array([key], object), 0 * size, size, 0 * size, 0 * size)
    assert len(images._images) == open_images.MAX_OPEN_IMAGES
