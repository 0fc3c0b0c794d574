"""Steps that read images from files compute what steps compute that receive the images."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE
from image_files import L, note_regions, pixels, reader, write_images

import tflms_sft
from tflms_sft._sources import formats, region_reads

pytestmark = pytest.mark.usefixtures("double_precision")

CLASSES = 3


@pytest.fixture
def reads(monkeypatch):
    return note_regions(monkeypatch)


def labels(seed, *shape):
    return np.random.default_rng(seed).integers(0, CLASSES, shape).astype("uint8")


def plain_convolutions(x):
    for filters in (4, 6):
        x = L.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return x


def normalised(x):
    x = L.Conv2D(4, 3, strides=2, padding="same", use_bias=False)(x)
    x = L.ReLU()(L.BatchNormalization()(x))
    x = L.Conv2D(6, 3, padding="same", use_bias=False)(x)
    x = L.ReLU()(L.BatchNormalization()(x))
    return L.UpSampling2D(2)(x)


def flipped(x):
    return plain_convolutions(keras.ops.flip(x, axis=(1, 2)))


def volumes(x):
    return L.Conv3D(4, 3, padding="same", activation="relu")(x)


NETS = {
    "convolutions": (plain_convolutions, (40, 36, 3)),
    "BatchNorm": (normalised, (40, 36, 3)),
    "flips": (flipped, (40, 36, 3)),
    "volumes": (volumes, (12, 14, 10, 2)),
}


def make_model(net, shape, image_reader=None, mask_reader=None):
    """Return a compiled model that segments images, in arrays without readers, otherwise in files."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input(shape, dtype="uint8") if image_reader is None else keras.Input((), dtype="string")
    x = L.Rescaling(1 / 255)(inputs if image_reader is None else image_reader(inputs))
    head = L.Conv3D(CLASSES, 1) if len(shape) == 4 else L.Conv2D(CLASSES, 1)
    outputs = head(net(x))
    model = (
        keras.Model(inputs, outputs)
        if mask_reader is None
        else tflms_sft.ReadingModel(inputs, outputs, labels=mask_reader)
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], jit_compile=False)
    return model


def trained(model, x, y, callbacks=()):
    """Train three steps; return the losses and all variables."""
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(1, drop_remainder=True)
    history = model.fit(data, epochs=1, shuffle=False, verbose=0, callbacks=list(callbacks)).history
    return [*history["loss"], *history["accuracy"], *map(np.array, model.variables)]


def assert_equal(results, expected):
    for value, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=TOLERANCE, atol=TOLERANCE)


def is_tile(size, shape):
    return np.prod(size[1:]) < np.prod(shape)


STRIPS = ("convolutions", "volumes")
"""Networks whose longest segment has strips that carry their halo rows."""


@pytest.mark.parametrize("name, halo", [*((name, "recompute") for name in NETS), *((name, "carry") for name in STRIPS)])
def test_tiles_of_files_train_as_arrays_in_memory(tmp_path, reads, name, halo):
    net, shape = NETS[name]
    images, masks = pixels(0, 3, *shape), labels(1, 3, *shape[:-1])
    expected = trained(make_model(net, shape), images, masks)
    x, y = write_images(tmp_path, "zarr", images), write_images(tmp_path, "zarr", masks, "mask")
    model = make_model(net, shape, reader("zarr", images), reader("zarr", masks))
    grid = (3, 1) if halo == "carry" else (2, 2)
    callback = tflms_sft.SFT(grid if len(shape) == 3 else (*grid, 1), halo=halo, verbose=0)
    assert_equal(trained(model, x, y, [callback]), expected)
    assert callback.plan.segments
    image_reads = [size for size in reads if len(size) == len(shape) + 1]
    assert image_reads and all(is_tile(size, shape) for size in image_reads)
    mask_reads = [size for size in reads if len(size) == len(shape)]
    assert mask_reads and all(is_tile(size, shape[:-1]) for size in mask_reads)


def test_plain_training_reads_whole_images(tmp_path, reads):
    net, shape = NETS["convolutions"]
    images, masks = pixels(0, 3, *shape), labels(1, 3, *shape[:-1])
    x, y = write_images(tmp_path, "zarr", images), write_images(tmp_path, "zarr", masks, "mask")
    model = make_model(net, shape, reader("zarr", images), reader("zarr", masks))
    assert_equal(trained(model, x, y), trained(make_model(net, shape), images, masks))
    assert set(reads) == {(1, *shape), (1, *shape[:-1])}
    assert len(reads) == 6  # The loss and the metric share a read.


@pytest.mark.parametrize("labels", ["zarr", 3])
def test_labels_that_are_no_readers(labels):
    paths = keras.Input((2,))
    with pytest.raises(TypeError, match="`labels` must be readers. Received: labels="):
        tflms_sft.ReadingModel(paths, L.Dense(1)(paths), labels=labels)


def test_evaluation_reads_tiles(tmp_path, reads):
    net, shape = NETS["convolutions"]
    images, masks = pixels(0, 4, *shape), labels(1, 4, *shape[:-1])
    expected = make_model(net, shape).evaluate(images, masks, batch_size=2, verbose=0)
    x, y = write_images(tmp_path, "zarr", images), write_images(tmp_path, "zarr", masks, "mask")
    model = make_model(net, shape, reader("zarr", images), reader("zarr", masks))
    callback = tflms_sft.MemoryBudget(150_000, verbose=0)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(2, drop_remainder=True)
    np.testing.assert_allclose(model.evaluate(data, verbose=0, callbacks=[callback]), expected, rtol=1e-6)
    (segment,) = callback.evaluate_plan.segments
    assert segment.tile_rows and all(is_tile(size, (2, *shape[: len(size) - 1])) for size in reads)


def test_constant_paths_are_read_at_each_call(tmp_path, reads):
    images = pixels(0, 1, *NETS["convolutions"][1])
    (path,) = write_images(tmp_path, "numpy", images)
    image_reader = reader("numpy", images)
    mean = tf.function(lambda: tf.reduce_mean(tf.cast(image_reader(tf.constant([path])), tf.float64)), autograph=False)
    assert float(mean()) == float(mean()) == pytest.approx(images.mean())
    assert len(reads) == 2


def test_saved_plan_is_for_an_equal_model(tmp_path):
    net, shape = NETS["convolutions"]
    images, masks = pixels(0, 1, *shape), labels(1, 1, *shape[:-1])
    x, y = write_images(tmp_path, "zarr", images), write_images(tmp_path, "zarr", masks, "mask")
    callback = tflms_sft.MemoryBudget(400_000, verbose=0)
    first = trained(make_model(net, shape, reader("zarr", images), reader("zarr", masks)), x, y, [callback])
    callback.plan.save(tmp_path / "plan.json")
    keras.backend.clear_session()
    again = tflms_sft.MemoryBudget(400_000, plan=tmp_path / "plan.json", verbose=0)
    model = make_model(net, shape, reader("zarr", images), reader("zarr", masks))
    assert_equal(trained(model, x, y, [again]), first)
    assert again.plan.segments == callback.plan.segments


def test_all_tiles_but_the_first_of_a_loop_are_read_ahead(tmp_path, monkeypatch):
    net, shape = NETS["convolutions"]
    images, masks = pixels(0, 1, *shape), labels(1, 1, *shape[:-1])
    x, y = write_images(tmp_path, "zarr", images), write_images(tmp_path, "zarr", masks, "mask")
    threads = []
    read = region_reads.RegionReads._read

    def noted(self, *arguments):
        threads.append(threading.current_thread().name)
        return read(self, *arguments)

    monkeypatch.setattr(region_reads.RegionReads, "_read", noted)
    callback = tflms_sft.SFT((2, 2), verbose=0)
    trained(make_model(net, shape, reader("zarr", images), reader("zarr", masks)), x, y, [callback])
    assert len(threads) % 4 == 0 and callback.plan.segments
    assert threads.count("tflms-sft read ahead") == len(threads) * 3 / 4


def test_equal_branches_read_with_their_own_readers(tmp_path):
    """Their loops run the same program but for the reader."""
    shape = (40, 36, 3)
    images = pixels(0, 2, *shape)
    x = write_images(tmp_path, "numpy", images)
    brighter = tflms_sft.ImageReader(lambda path: formats.ArraySource(np.load(path) // 2), shape)

    def build(readers):
        keras.utils.set_random_seed(3)
        inputs = [keras.Input(shape, dtype="uint8") if r is None else keras.Input((), dtype="string") for r in readers]
        branches = []
        for tensor, image_reader in zip(inputs, readers, strict=True):
            image = L.Rescaling(1 / 255)(tensor if image_reader is None else image_reader(tensor))
            branches.append(L.GlobalAveragePooling2D()(plain_convolutions(image)))
        model = keras.Model(inputs, L.Dense(1)(L.Concatenate()(branches)))
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        return model

    def trained_on(model, first, second, callbacks=()):
        data = tf.data.Dataset.from_tensor_slices(((first, second), np.ones((2, 1)))).batch(1, drop_remainder=True)
        model.fit(data, shuffle=False, verbose=0, callbacks=list(callbacks))
        return list(map(np.array, model.variables))

    expected = trained_on(build([None, None]), images, images // 2)
    callback = tflms_sft.SFT((2, 2), verbose=0)
    assert_equal(trained_on(build([reader("numpy", images), brighter]), x, x, [callback]), expected)
    assert len(callback.plan.segments) == 2


def test_unknown_batch_size_is_that_of_the_paths(tmp_path, reads):
    """The last batch is smaller; the size of the batch, which the loss divides by, needs no image."""
    net, shape = NETS["convolutions"]
    images, masks = pixels(0, 3, *shape), labels(1, 3, *shape[:-1])
    x, y = write_images(tmp_path, "zarr", images), write_images(tmp_path, "zarr", masks, "mask")

    def weights_after(model, first, second, callbacks=()):
        data = tf.data.Dataset.from_tensor_slices((first, second)).batch(2)
        model.fit(data, shuffle=False, verbose=0, callbacks=list(callbacks))
        return list(map(np.array, model.variables))

    expected = weights_after(make_model(net, shape), images, masks)
    model = make_model(net, shape, reader("zarr", images), reader("zarr", masks))
    assert_equal(weights_after(model, x, y, [tflms_sft.MemoryBudget(700_000, verbose=0)]), expected)
    assert reads and all(is_tile(size, (2, *shape[: len(size) - 1])) for size in reads)


def planned(image_shape, in_files, params):
    """Return the plan of a step on an image that is only planned."""
    keras.utils.set_random_seed(0)
    image = tflms_sft.ImageReader("zarr", image_shape) if in_files else None
    masks = tflms_sft.ImageReader("zarr", image_shape[:-1]) if in_files else None
    model = make_model(plain_convolutions, image_shape, image, masks)
    model.optimizer.build(model.trainable_variables)
    shapes = ((1,), (1,)) if in_files else ((1, *image_shape), (1, *image_shape[:-1]))
    specs = [tf.TensorSpec(shape, tf.string if in_files else tf.uint8) for shape in shapes]
    step = tf.function(lambda x, y: model.train_step((x, y)), input_signature=specs, autograph=False)
    return tflms_sft.rewrite(step, params).plan


def test_gradient_of_a_mean_per_pixel_counts_no_bytes():
    """A map of gradients as large as the image, 512 MiB in float64, would exceed the budget."""
    plan = planned((8192, 8192, 3), True, tflms_sft.AutoParams("64MiB", swap=False))
    assert plan.predicted.peak_bytes < 64 * 2**20


def test_iteration_counts_the_region_that_is_read_ahead():
    shape = (64, 64, 30)
    in_memory, in_files = (planned(shape, place, tflms_sft.SFTParams((2, 1))) for place in (False, True))
    ((height, width),) = {segment.tile_rows[0] for segment in in_files.segments}
    pairs = zip(in_memory.segments[0].tile_bytes, in_files.segments[0].tile_bytes, strict=True)
    # In memory a tile is sliced once; from files, two regions are in memory.
    assert all(file - array >= height * width * shape[2] for array, file in pairs)
