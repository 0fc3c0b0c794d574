"""Images in files of several shapes: each shape has a plan of its own, and results equal those of plain training."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import zarr
from equivalence import TOLERANCE
from image_files import L, note_regions, write_images

import tflms_sft

SHAPES = ((40, 36), (24, 50), (40, 36), (33, 36))


@pytest.fixture(autouse=True)
def double_precision():
    keras.config.set_floatx("float64")


def pixels(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape).astype("uint8")


@pytest.fixture
def files(tmp_path):
    """Paths of images and of masks of several shapes."""
    paths = []
    for name, channels in (("image", (3,)), ("mask", ())):
        paths.append([])
        for number, shape in enumerate(SHAPES):
            values = pixels(number, 1, *shape, *channels)
            (path,) = write_images(tmp_path, "zarr", values if channels else values % 3, f"{name}{number}-")
            paths[-1].append(path)
    return paths


def make_model(metrics=("accuracy",), **options):
    """Return a compiled model with batch normalisation that segments images of any shape."""
    keras.utils.set_random_seed(3)
    paths = keras.Input((), dtype="string")
    x = L.Rescaling(1 / 255)(tflms_sft.ImageReader("zarr", (None, None, 3))(paths))
    x = L.ReLU()(L.BatchNormalization()(L.Conv2D(4, 3, padding="same", use_bias=False)(x)))
    x = L.Conv2D(6, 3, padding="same", activation="relu")(x)
    model = tflms_sft.ReadingModel(paths, L.Conv2D(3, 1)(x), labels=tflms_sft.ImageReader("zarr", (None, None)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss, metrics=list(metrics), jit_compile=False, **options)
    return model


def data_of(files):
    return tf.data.Dataset.from_tensor_slices(tuple(files)).batch(1, drop_remainder=True)


def trained(model, files, callbacks=(), epochs=2):
    history = model.fit(data_of(files), epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)).history
    variables = (*model.variables, *model.optimizer.variables)
    return [*history["loss"], *history["accuracy"], *map(np.array, variables)]


def assert_equal(results, expected):
    for value, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture
def regions(monkeypatch):
    return note_regions(monkeypatch)


class Plans(keras.callbacks.Callback):
    """Notes the plan of each batch of another callback."""

    def __init__(self, other):
        super().__init__()
        self.other, self.found = other, []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(self.other.plan)


def test_each_shape_has_a_plan_and_results_equal_plain_training(files, regions):
    expected = trained(make_model(), files)
    regions.clear()
    tiles = tflms_sft.SFT((2, 2), verbose=0)
    plans = Plans(tiles)
    assert_equal(trained(make_model(), files, [tiles, plans]), expected)
    assert len({id(plan) for plan in plans.found}) == len({*SHAPES}) == 3
    whole = [(1, *shape, *channels) for shape in SHAPES for channels in ((), (3,))]
    assert regions and not {*regions} & {*whole}


def test_evaluation_and_prediction_of_several_shapes(files):
    plain = make_model()
    expected = plain.evaluate(data_of(files), verbose=0)
    model = make_model()
    tiles = tflms_sft.SFT((2, 2), verbose=0)
    assert_equal(model.evaluate(data_of(files), verbose=0, callbacks=[tiles]), expected)
    for path, shape in zip(files[0], SHAPES, strict=True):
        images = tf.constant([path])
        scores = model.predict(images, verbose=0, callbacks=[tiles])
        assert scores.shape == (1, *shape, 3)
        assert_equal(scores, plain.predict(images, verbose=0))


def test_predictions_of_several_shapes_are_written(files, tmp_path):
    model = make_model()
    results = keras.Input((), dtype="string")
    predictor = keras.Model(
        [*model.inputs, results],
        tflms_sft.ImageWriter("zarr", "float64", overwrite=True)(model.output, results),
    )
    tiles = tflms_sft.SFT((2, 2), verbose=0)
    expected = [model.predict(tf.constant([path]), verbose=0)[0] for path in files[0]]
    targets = [str(tmp_path / f"result{number}") for number in range(len(SHAPES))]
    for callbacks in ([], [tiles]):
        arguments = [tf.constant(files[0]), tf.constant(targets)]
        numbers = predictor.predict(arguments, batch_size=1, verbose=0, callbacks=callbacks)
        assert list(numbers) == [scores.size for scores in expected]
        for path, scores in zip(targets, expected, strict=True):
            assert_equal(zarr.open_array(path)[...], scores)
    assert tiles.predict_plan.segments


def test_budget_holds_for_the_largest_shape(files):
    expected = trained(make_model(), files)
    callback = tflms_sft.MemoryBudget(350_000, verbose=0)
    plans = Plans(callback)
    assert_equal(trained(make_model(), files, [callback, plans]), expected)
    assert all(plan.predicted.peak_bytes <= 350_000 < plan.original.peak_bytes for plan in plans.found)


def test_images_of_a_batch_have_one_shape(files):
    data = tf.data.Dataset.from_tensor_slices(tuple(files)).batch(2, drop_remainder=True)
    text = r"Received: \(40, 36(, 3)?\) of `.*(image|mask)0.*` and \(24, 50(, 3)?\) of `.*(image|mask)1.*batches of one"
    with pytest.raises(tflms_sft.ImageReadError, match=text):
        make_model().fit(data, shuffle=False, verbose=0, callbacks=[tflms_sft.SFT((2, 2), verbose=0)])
    with pytest.raises(tf.errors.OpError, match=text):
        make_model().fit(data, shuffle=False, verbose=0)


def test_indices_instead_of_paths(files):
    paths = keras.Input((), dtype="int32")
    reader = tflms_sft.ImageReader("zarr", (None, None, 3), paths=files[0])
    keras.utils.set_random_seed(1)
    x = L.Conv2D(4, 3, padding="same", activation="relu")(L.Rescaling(1 / 255)(reader(paths)))
    x = L.Conv2D(4, 3, padding="same", activation="relu")(x)
    model = keras.Model(paths, L.Dense(2)(L.GlobalAveragePooling2D()(x)))
    model.compile("sgd", "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices(([0, 1, 2, 3], np.ones((4, 2)))).batch(1, drop_remainder=True)
    weights = model.get_weights()
    expected = model.fit(data, shuffle=False, verbose=0).history["loss"]
    model.set_weights(weights)
    tiles = tflms_sft.SFT((2, 2), verbose=0)
    assert_equal(model.fit(data, shuffle=False, verbose=0, callbacks=[tiles]).history["loss"], expected)
    assert tiles.plan.segments


@pytest.fixture
def step_of():
    """Return a function that makes the training step of a model."""

    def make(model):
        model.optimizer.build(model.trainable_variables)
        specs = [tf.TensorSpec([1], tf.string)] * 2
        return tf.function(lambda x, y: model.train_step((x, y)), input_signature=specs, autograph=False)

    return make


def test_rewritten_step_is_for_the_shape_of_its_example(files, step_of):
    first, second = ([tf.constant([paths[number]]) for paths in files] for number in (0, 1))
    expected = {name: float(value) for name, value in step_of(make_model())(*first).items()}
    step = tflms_sft.rewrite(step_of(make_model()), tflms_sft.SFTParams((2, 2)), *first)
    assert step.plan.segments
    results = {name: float(value) for name, value in step(*first).items()}
    assert results == pytest.approx(expected, rel=TOLERANCE)
    text = r"it has the shape \(24, 50(, 3)?\), expected \(40, 36(, 3)?\). The step is planned for one shape"
    with pytest.raises(tflms_sft.ImageReadError, match=text):
        step(*second)


def test_step_of_a_model_is_verified(files):
    batch = tuple(tf.constant([paths[1]]) for paths in files)
    assert tflms_sft.verify(make_model(), batch, tflms_sft.SFTParams((2, 2)))


def test_shape_must_be_known_where_it_cannot_be_looked_up(files, step_of):
    step = step_of(make_model())
    with pytest.raises(tflms_sft.RewriteError, match="(?s)unknown when the step is planned.*example arguments"):
        tflms_sft.rewrite(step, tflms_sft.SFTParams((2, 2)))
    with pytest.raises(tflms_sft.RewriteError, match=r"is unknown: \(1, None, None.*Give the `ImageReader`"):
        tflms_sft.rewrite(step.get_concrete_function(), tflms_sft.SFTParams((2, 2)))
    with pytest.raises(tflms_sft.RewriteError, match="is unknown when the step is planned"):
        # Two batches in one execution would need one shape.
        trained(make_model(steps_per_execution=2), files, [tflms_sft.SFT((2, 2), verbose=0)])


def test_other_sizes_and_types_are_refused(tmp_path):
    (path,) = write_images(tmp_path, "zarr", pixels(0, 1, 20, 20, 4), "image")
    reader = tflms_sft.ImageReader("zarr", (None, None, 3))
    with pytest.raises(tflms_sft.ImageReadError, match=r"shape \(20, 20, 4\), expected \(None, None, 3\)"):
        reader.shape_in_files([path])
    with pytest.raises(ValueError, match="needs all sizes"):
        tflms_sft.ImageReader("zarr", (None, 20, 3), view=tflms_sft.RandomView(flips=(0,)))
    again = tflms_sft.ImageReader.from_config(reader.get_config())
    assert again.image_shape == (None, None, 3)
