"""Training on tiles of images: on four replicas it is that on whole images, and what would not be is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from children import printed
from keras import layers
from sample_nets import described

from rewriters.errors import RewriteError
from tflms_sft.unets import Architecture, sample_parallel, sample_tiling

TOLERANCE = 1e-12
# Keras before 3.10 logs the losses of the first replica alone.
LOGS_ALL_REPLICAS = getattr(keras.metrics.Mean().total, "synchronization", None) == "on_read"
LEAST = Architecture("least", 2, 1)


# On devices ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    """Return the output of a child process with several devices, which must exist before TensorFlow starts."""
    return printed("replicated.py", "fit", "loop", "uneven")


@pytest.fixture(scope="module")
def found_slowly():
    return printed("replicated.py", "row", "two for each", "half of the batch", "tiles of tiles", "clipped")


def the_same(results, steps):
    """Losses of all steps, logs, `evaluate`; then all weights, slots and counters, in each replica."""
    assert "4" in results
    for result in results.values():
        assert result["variables"] < TOLERANCE and (result["losses"] < TOLERANCE or not LOGS_ALL_REPLICAS)
        assert result["copies"] and result["steps"] == steps
        assert result["moved"] > 1e-3, "they have trained"


@pytest.mark.parametrize(("case", "steps"), [("fit", 5), ("loop", 5)])
def test_sample_parallel_training_equals_whole_images(found, case, steps):
    the_same(found[case], steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "steps"), [("row", 5), ("two for each", 5), ("half of the batch", 4), ("tiles of tiles", 2)]
)
def test_sample_parallel_of_other_cases_equals_whole_images(found_slowly, case, steps):
    the_same(found_slowly[case], steps)


@pytest.mark.slow
def test_clipping_per_replica_differs_and_is_refused(found_slowly):
    clipped = found_slowly["clipped"]
    assert clipped["error"] > 1e-3
    text = "`global_clipnorm` of the optimizer clips the gradients of each replica, here of tiles, before they are"
    assert clipped["refusal"].startswith(text)
    assert "Received: global_clipnorm=0.01. Leave it out, or use one replica." in clipped["refusal"]


def test_tiles_not_divisible_by_replicas_are_refused(found):
    start = "The number of tiles in a batch must be a multiple of the 4 replicas of the model's strategy"
    any_number, two = found["uneven"]
    assert any_number.startswith(start) and two.startswith(start)
    assert "`parts` of 3 tiles per image, in batches of any number of images. Use a multiple of 4" in any_number
    assert "`parts` of 3 tiles per image, in batches of 2 images." in two


# Cutting ------------------------------------------------------------------------------------------------------------


def of_arrays(sizes=(30, 30), results=None, count=2, batch=2, channels=1, weights=()):
    """A data set whose labels are as large as the results, or as said."""
    rows = results or [LEAST.result_rows(own) for own in sizes]
    arrays = np.random.rand(count, *sizes, 1), np.random.rand(count, *rows, channels), *weights
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch)


def net(**options):
    return described(LEAST, None, **options)


@pytest.mark.parametrize("parts", [(2, 2), (1, 4), (3, 1), (1, 1)])
def test_sample_weights_count_each_pixel_once(parts):
    keras.config.set_floatx("float64")
    sizes = 34, 46
    rows = [LEAST.result_rows(own) for own in sizes]
    numbers = np.arange(2 * np.prod(rows), dtype=float).reshape(2, *rows)
    own = np.random.rand(2, *rows)
    data = tf.data.Dataset.from_tensors((tf.zeros((2, *sizes, 1)), numbers, own))
    ((images, labels, weights),) = sample_parallel(net(), data, parts)
    tiles = parts[0] * parts[1]
    assert len(images) == len(labels) == len(weights) == 2 * tiles
    assert images.dtype == tf.float32 and weights.dtype == tf.float64
    found = np.zeros(numbers.size)
    np.add.at(found, labels.numpy().astype(int).ravel(), weights.numpy().ravel())
    factor = tiles * np.prod(labels.shape[1:]) / np.prod(rows)
    np.testing.assert_allclose(found, factor * own.ravel(), rtol=1e-13)
    assert np.count_nonzero(weights) == numbers.size


def test_sample_weights_of_sum_loss_are_one():
    data = of_arrays()
    ((*_, weights),) = sample_parallel(net(), data, (2, 2), "sum")
    assert {*np.unique(weights)} == {0, 1} and np.sum(weights) == 2 * LEAST.result_rows(30) ** 2


@pytest.mark.parametrize(("levels", "convolutions"), [(2, 1), (3, 1), (3, 2)])
def test_split_into_any_number_gives_smallest_tiles(levels, convolutions):
    architecture = Architecture("any", levels, convolutions)
    axis = sample_tiling(described(architecture, None)).axes[0]
    for rows in range(axis.smallest, axis.smallest + 30 * axis.alignment, axis.alignment):
        parts = 1
        while True:
            try:
                tiles = axis.split(rows, parts)
            except ValueError as error:
                assert f"`parts` must be from 1 to {parts - 1}: {rows} rows" in str(error)
                break
            assert len(tiles) == parts
            assert [tile.first for tile in tiles] == [0, *(tile.last for tile in tiles[:-1])]
            assert tiles[-1].last == axis.result_rows(rows) and all(tile.last > tile.first for tile in tiles)
            (tile_rows,) = {tile.end - tile.begin for tile in tiles}
            for tile in tiles:
                axis.check(tile.begin, tile.end)
                begin, end = axis.result_of(tile)
                assert 0 <= begin <= tile.first and tile.last <= end <= axis.result_rows(rows)
                assert tile.keep == slice(tile.first - begin, tile.last - begin)
            smaller = tile_rows - axis.alignment
            if parts > 1 and smaller >= axis.smallest and axis.result_rows(smaller) >= axis.alignment:
                assert len(axis.tiles(rows, smaller)) > parts, "smaller tiles would not do"
            parts += 1
        assert parts > 2 or rows < axis.smallest + 2 * axis.alignment


# Refusals -----------------------------------------------------------------------------------------------------------


def refused(text, model=None, data=None, parts=(2, 2), error=ValueError, **options):
    with pytest.raises(error, match=text):
        sample_parallel(model or net(), data or of_arrays(), parts, **options)


def test_sample_parallel_with_wrong_sizes_is_refused():
    refused("`loss_reduction` must be .* Received: loss_reduction='none'", loss_reduction="none")
    refused(r"a tf.data.Dataset of batches; of arrays it is tf.data.Dataset.from_tensor", data=[1], error=TypeError)
    refused(r"`parts` needs 2 numbers, one for each axis. Received: parts=\(4,\)", parts=(4,))
    refused("`parts` must be from 1 to 11: 30 rows of axis 1 .*Received: parts=12", parts=(1, 12))
    refused("`parts` must be from 1 to .* Received: parts=0", parts=(0, 1))
    text = "`rows of the images` must be 10 plus a multiple of 2.*=31. Nearest: 30 or 32"
    refused(text, data=of_arrays((30, 31), (22, 23)))
    text = r"`dataset` must have labels of 22 x 22 pixels, .* Received: labels of shape \(None, 30, 30, 1\)"
    refused(text, data=of_arrays(results=(30, 30)))
    text = r"`dataset` must have weights of 22 x 22 pixels, .* Received: weights of shape \(None,\)"
    refused(text, data=of_arrays(weights=[np.ones(2)]))
    text = r"`dataset` must yield batches \(images, labels\) or .* images of static size. Received: a data set of "
    refused(text, data=of_arrays().map(lambda x, y: x))
    unknown = tf.TensorSpec((None, None, 30, 1)), tf.TensorSpec((None, 22, 22, 1))
    refused(text, data=tf.data.Dataset.from_generator(lambda: iter(()), output_signature=unknown))


def test_sample_parallel_of_unsuited_model_is_refused():
    refused("`model` must take tiles of 20 x 20 rows. Received: .* Leave its size open", described(LEAST, 30))
    image = keras.Input((None, None, 1))
    refused("pads its image", keras.Model(image, layers.Conv2D(1, 9, padding="same")(image)), error=RewriteError)
    normal = layers.BatchNormalization()(layers.Conv2D(1, 9)(image))
    refused("cannot run on tiles of an image", keras.Model(image, normal), error=RewriteError)
    regular = layers.Conv2D(1, 9, activity_regularizer="l2", kernel_regularizer="l2")(image)
    refused("`model` has 1 loss.* of activations", keras.Model(image, regular))


def dice(labels, results):
    return keras.losses.dice(labels, results)


def per_pixel(labels, results):
    return tf.reduce_mean((labels - results) ** 2, -1)


@pytest.mark.parametrize(
    "loss", ["mse", per_pixel, keras.losses.Huber(), "binary_crossentropy", "crossentropy", ["mse"]]
)
def test_sample_parallel_accepts_losses_per_pixel(loss):
    model = net()
    model.compile("sgd", loss)
    tiles, labels, *_ = next(iter(sample_parallel(model, of_arrays(), (2, 2))))
    assert len(tiles) == len(labels) == 8, "four tiles of each of two images"


def test_sample_parallel_of_other_losses_is_refused():
    model = net()
    for loss in (dice, keras.losses.Dice(), keras.losses.Dice(axis=(1, 2))):
        model.compile("sgd", loss)
        refused("a value for each pixel. Received: .* the shape .* for 2 images with results of 12 x 12 pixels", model)
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    sample_parallel(model, of_arrays(), (2, 2), "sum")
    refused('needs a loss with reduction="mean" or "sum_over_batch_size".*reduction=.sum.', model)
    model.compile("sgd", "mse")
    refused('`loss_reduction="sum"` needs a loss with reduction="sum". Received: .*.mse.', model, loss_reduction="sum")
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    refused("reduction='mean_with_sample_weight'", model)


def classes(loss):
    """A model that tells three classes of pixels apart."""
    image = keras.Input((None, None, 1))
    model = keras.Model(image, layers.Conv2D(3, 9)(image))
    model.compile("sgd", loss)
    return model


class Marked(layers.Layer):
    """Has losses look at positive pixels alone."""

    supports_masking = True

    def call(self, x):
        return x

    def compute_mask(self, x, previous_mask=None):
        return x[..., 0] > 0


def test_masked_mean_losses_are_refused():
    """A mean of them divides by the pixels that are left, those of overlaps among them."""

    def cross_entropy(**options):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)

    def of_two(labels, results):
        return keras.losses.sparse_categorical_crossentropy(labels, results, from_logits=True, ignore_class=0)

    data = of_arrays(results=(22, 22)).map(lambda images, labels: (images, tf.cast(3 * labels, tf.int64)[..., 0]))
    sample_parallel(classes(cross_entropy()), data, (2, 2))
    for loss in (cross_entropy(ignore_class=0), of_two):
        refused("must not mask pixels .`ignore_class`, a mask., because the mean .* sums", classes(loss), data)
    sample_parallel(classes(cross_entropy(ignore_class=0, reduction="sum")), data, (2, 2), "sum")
    image = keras.Input((None, None, 1))
    masked = keras.Model(image, Marked()(layers.Conv2D(1, 9)(image)))
    masked.compile("sgd", "mse")
    refused("must not mask pixels .* a model whose result has a mask", masked)


def test_sample_parallel_warns_of_random_layers():
    image = x = keras.Input((None, None, 1))
    for layer in (layers.Dropout(0.5, name="drop"), layers.GaussianNoise(1.0, name="noise"), layers.Dropout(0.0)):
        x = layer(layers.Conv2D(2, 3)(x))
    model = keras.Model(image, x)
    model.compile("sgd", "mse")
    assert sample_tiling(model).draws == ()
    text = "`model` draws random numbers per tile, .*: layer 'drop' .Dropout., layer 'noise' .GaussianNoise.. "
    with pytest.warns(UserWarning, match=text):
        sample_parallel(model, of_arrays(results=(24, 24), channels=2), (2, 2))
