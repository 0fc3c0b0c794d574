"""Random crops, flips and quarter turns: tiles show the regions of whole views, masks the same as images."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE
from image_files import L, pixels, reader, write_images

import tflms_sft
from tflms_sft._sources import random_view

SHAPE = (48, 40, 3)


def views(image, view):
    """Return all views of an image."""
    height, width = view.shape(image.shape)[:2]
    for top, left in itertools.product(range(image.shape[0] - height + 1), range(image.shape[1] - width + 1)):
        crop = image[top : top + height, left : left + width]
        for number in range(len(view.flips) + 1):
            for flips in itertools.combinations(view.flips, number):
                for turns in range(4 if view.turns else 1):
                    yield np.rot90(np.flip(crop, flips), turns)


@pytest.mark.parametrize("flips", [(), (0,), (0, 1)])
@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_regions_of_views(flips, turns):
    image = pixels(0, 9, 11, 2)
    view = random_view.DrawnView((6, 6, 2), (2, 3), flips, turns)
    whole = np.rot90(np.flip(image[2:8, 3:9], flips), turns)
    for region in ((slice(0, 6), slice(0, 6), slice(0, 2)), (slice(1, 3), slice(2, 6), slice(1, 2))):
        np.testing.assert_array_equal(view.shown(image[view.source_region(region)]), whole[region])


def test_draws_are_views_and_all_occur(tmp_path):
    image = pixels(0, 7, 6, 1)
    (path,) = write_images(tmp_path, "numpy", image[None])
    view = tflms_sft.RandomView(crop=(6, 6), flips=(1,), turns=True, seed=2)
    image_reader = reader("numpy", image[None], view=view)
    allowed = {possible.tobytes() for possible in views(image, view)}
    drawn = {drawn.tobytes() for drawn in image_reader(tf.constant([path] * 300), training=True).numpy()}
    assert drawn == allowed and len(allowed) == 16
    np.testing.assert_array_equal(image_reader(tf.constant([path]))[0], image[:6])  # Outside of training: the centre.


def make_model(image_reader, mask_reader):
    keras.utils.set_random_seed(1)
    paths = keras.Input((), dtype="string")
    x = L.Rescaling(1 / 255)(image_reader(paths))
    x = L.Conv2D(4, 3, padding="same", activation="relu")(x)
    x = L.Conv2D(1, 3, padding="same")(x)
    model = tflms_sft.ReadingModel(paths, x, labels=mask_reader)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], jit_compile=False)
    return model


def trained(folder, callbacks):
    """Train on images whose masks are their first channel; return the losses and all variables."""
    keras.config.set_floatx("float64")
    images = pixels(0, 4, *SHAPE)
    x, y = write_images(folder, "zarr", images), write_images(folder, "zarr", images[..., :1], "mask")
    view = tflms_sft.RandomView(crop=(32, 32), flips=(0, 1), turns=True, seed=5)
    model = make_model(reader("zarr", images, view=view), reader("zarr", images[..., :1], view=view))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(2, drop_remainder=True)
    history = model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history
    return [*history["loss"], *history["mae"], *map(np.array, model.variables)]


def test_tiles_of_views_train_as_whole_views(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "tiled").mkdir()
    callback = tflms_sft.SFT((2, 2, 2), verbose=0)
    expected, results = trained(tmp_path / "plain", []), trained(tmp_path / "tiled", [callback])
    assert callback.plan.segments
    for value, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=TOLERANCE, atol=TOLERANCE)


WRAPPERS = {"eager": lambda function: function, "graph": lambda function: tf.function(function, autograph=False)}


def readers_of(folder, num_images=8, seed=3):
    """Return paths of images and masks, and their readers, which have one view; masks are the first channel."""
    images = pixels(0, num_images, *SHAPE)
    x, y = write_images(folder, "numpy", images), write_images(folder, "numpy", images[..., :1], "mask")
    view = tflms_sft.RandomView(crop=(20, 20), flips=(0, 1), turns=True, seed=seed)
    image_reader, mask_reader = (reader("numpy", like, view=view) for like in (images, images[..., :1]))
    return tf.constant(x), tf.constant(y), image_reader, mask_reader


@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", WRAPPERS)
def test_masks_show_the_views_of_images(tmp_path, outer, inner):
    x, y, image_reader, mask_reader = readers_of(tmp_path)
    read = WRAPPERS[inner](lambda paths: image_reader(paths, training=True))
    both = WRAPPERS[outer](lambda paths, masks: (read(paths), mask_reader(masks, training=True)))
    before = None
    for _ in range(3):
        shown, masks = both(x, y)
        np.testing.assert_array_equal(shown[..., :1], masks)
        assert before is None or not np.array_equal(before, masks)
        before = masks


def test_reader_that_has_drawn_less_often_catches_up(tmp_path):
    x, y, image_reader, mask_reader = readers_of(tmp_path)
    for _ in range(3):
        image_reader(x, training=True)
    np.testing.assert_array_equal(image_reader(x, training=True)[..., :1], mask_reader(y, training=True))


def test_calls_in_one_graph_draw_or_do_not(tmp_path):
    x, _, image_reader, _ = readers_of(tmp_path)
    first, second, centre = tf.function(
        lambda paths: [image_reader(paths, training=training) for training in (True, True, False)], autograph=False
    )(x)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(centre, pixels(0, 8, *SHAPE)[:, 14:34, 10:30])


@pytest.mark.parametrize("eagerly", [False, True])
def test_loss_and_metric_read_one_mask(tmp_path, eagerly):
    x, y, image_reader, mask_reader = readers_of(tmp_path)
    paths = keras.Input((), dtype="string")
    red = keras.ops.cast(image_reader(paths)[..., :1], "float32")
    outputs = L.Conv2D(1, 1, use_bias=False, kernel_initializer="ones")(red)
    model = tflms_sft.ReadingModel(paths, outputs, labels=mask_reader)
    model.compile("sgd", "mae", metrics=["mae"], run_eagerly=eagerly)
    assert model.train_on_batch(x, y, return_dict=True) == {"loss": 0.0, "mae": 0.0}
    assert model.evaluate(x, y, batch_size=4, verbose=0) == [0.0, 0.0]


@pytest.mark.parametrize("seed", [3, None])
def test_saved_models_draw_equal_views(tmp_path, seed):
    x, y, image_reader, mask_reader = readers_of(tmp_path, seed=seed)
    paths = keras.Input((), dtype="string")
    outputs = L.Conv2D(1, 1)(L.Rescaling(1.0)(image_reader(paths)))
    model = tflms_sft.ReadingModel(paths, outputs, labels=mask_reader)
    model.compile(keras.optimizers.SGD(1e-6), "mse", jit_compile=False)
    model.train_on_batch(x, y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, tflms_sft.ReadingModel)
    assert loaded.train_on_batch(x, y) == model.train_on_batch(x, y)
    shown, masks = (loaded.layers[1](x, training=True), loaded.label_readers(y, training=True))
    np.testing.assert_array_equal(shown[..., :1], masks)


def test_views_of_indices_and_saved_readers(tmp_path):
    images = pixels(0, 2, *SHAPE)
    paths = write_images(tmp_path, "numpy", images)
    view = tflms_sft.RandomView(crop=(20, 30), flips=(1,), seed=3)
    image_reader = reader("numpy", images, paths=paths, view=view)
    loaded = tflms_sft.ImageReader.from_config(image_reader.get_config())
    assert loaded.get_config() == image_reader.get_config()
    np.testing.assert_array_equal(loaded(tf.constant([1]))[0], images[1, 14:34, 5:35])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"crop": (0, 5)}, "`crop` must be a sequence of integers of at least 1"),
        ({"crop": (16.5, 16)}, "`crop` must be a sequence of integers of at least 1"),
        ({"crop": 32}, "`crop` must be a sequence of integers of at least 1. Received: crop=32"),
        ({"flips": (-1,)}, "`flips` must be a sequence of integers of at least 0"),
        ({"crop": (49, 40)}, "`crop` must lie inside of the image"),
        ({"flips": (3,)}, "`flips` must be axes of the image"),
        ({"turns": True}, r"`turns` requires equal sizes along the first two axes. Received: \(48, 40\)"),
    ],
)
def test_invalid_views(arguments, message):
    with pytest.raises(ValueError, match=message):
        tflms_sft.ImageReader("numpy", SHAPE, view=tflms_sft.RandomView(**arguments))
