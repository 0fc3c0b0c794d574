"""Images in files of several shapes: each shape has a plan of its own, and results equal those of plain training."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE
from image_files import L, note_regions, pixels, write_images, zarr

import tflms_sft
from tflms_sft._sources.open_shapes import UnknownSizes

pytestmark = pytest.mark.usefixtures("double_precision")

SHAPES = ((40, 36), (24, 50), (40, 36), (33, 36))


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
        self.other, self.plans = other, []

    def on_train_batch_end(self, batch, logs=None):
        self.plans.append(self.other.plan)


def test_each_shape_has_a_plan_and_results_equal_plain_training(files, regions):
    expected = trained(make_model(), files)
    regions.clear()
    tiles = tflms_sft.SFT((2, 2), verbose=0)
    noted = Plans(tiles)
    assert_equal(trained(make_model(), files, [tiles, noted]), expected)
    assert len({id(plan) for plan in noted.plans}) == len({*SHAPES}) == 3
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
        [*model.inputs, results], tflms_sft.ImageWriter("zarr", "float64", overwrite=True)(model.output, results)
    )
    tiles = tflms_sft.SFT((2, 2), verbose=0)
    expected = [model.predict(tf.constant([path]), verbose=0)[0] for path in files[0]]
    targets = [str(tmp_path / f"result{number}") for number in range(len(SHAPES))]
    for callbacks in ([], [tiles]):
        arguments = [tf.constant(files[0]), tf.constant(targets)]
        numbers = predictor.predict(arguments, batch_size=1, verbose=0, callbacks=callbacks)
        assert list(numbers) == [scores.size for scores in expected]
        for path, scores in zip(targets, expected, strict=True):
            assert_equal(zarr().open_array(path)[...], scores)
    assert tiles.predict_plan.segments


def test_budget_holds_for_the_largest_shape(files):
    expected = trained(make_model(), files)
    callback = tflms_sft.MemoryBudget(350_000, verbose=0)
    noted = Plans(callback)
    assert_equal(trained(make_model(), files, [callback, noted]), expected)
    assert all(plan.predicted.peak_bytes <= 350_000 < plan.original.peak_bytes for plan in noted.plans)


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
    text = r"it has the shape \(24, 50(, 3)?\), but the step is planned for \(40, 36(, 3)?\). Call `tflms_sft.rewrite`"
    with pytest.raises(tflms_sft.ImageReadError, match=text):
        step(*second)


def test_step_of_a_model_is_verified(files):
    batch = tuple(tf.constant([paths[1]]) for paths in files)
    assert tflms_sft.verify(make_model(), batch, tflms_sft.SFTParams((2, 2)))


@pytest.mark.parametrize("is_fixed", [True, False], ids=["fixed batch", "open batch"])
@pytest.mark.parametrize("name", ["SFT", "MemoryBudget"])
def test_trained_callback_is_verified(files, name, is_fixed):
    """The callback has trained images of three shapes; its plan is that of the last one."""
    last = tuple(tf.constant([paths[-1]]) for paths in files)
    data = data_of(files) if is_fixed else tf.data.Dataset.from_tensor_slices(tuple(files)).batch(1)
    callback = getattr(tflms_sft, name)((2, 2) if name == "SFT" else 350_000, verbose=0)
    model = make_model()
    model.fit(data, shuffle=False, verbose=0, callbacks=[callback])
    assert callback.plan.batch_is_fixed == is_fixed
    assert tflms_sft.verify(model, last, callback)


def test_shape_must_be_known_where_it_cannot_be_looked_up(files, step_of):
    step = step_of(make_model())
    with pytest.raises(tflms_sft.RewriteError, match="no files are known when the step is traced. Pass example paths"):
        tflms_sft.rewrite(step, tflms_sft.SFTParams((2, 2)))
    with pytest.raises(tflms_sft.RewriteError, match=r"is unknown: \(1, None, None.*Give the `ImageReader`"):
        tflms_sft.rewrite(step.get_concrete_function(), tflms_sft.SFTParams((2, 2)))
    with pytest.raises(tflms_sft.RewriteError, match="no files are known .*not with `steps_per_execution`"):
        # Two batches in one execution would need one shape.
        trained(make_model(steps_per_execution=2), files, [tflms_sft.SFT((2, 2), verbose=0)])


def test_batches_of_several_sizes_alternate(files):
    """The plan of a batch of two images serves one image of the same shape."""
    paths = [tf.constant([names[0], names[2]]) for names in files]  # Of one shape.
    batches = [[names[:count] for names in paths] for count in (2, 1, 2, 1)]
    expected = make_model()
    losses = [expected.train_on_batch(*batch)[0] for batch in batches]
    model = make_model()
    with tflms_sft.budget(model, 700_000, verbose=0) as budget:
        assert [model.train_on_batch(*batch)[0] for batch in batches] == pytest.approx(losses, rel=TOLERANCE)
        assert budget.plan.segments and len(budget.sizes.steps) == 1


def test_step_that_fits_is_traced_once(files):
    traces = []
    largest_first = [[paths[number] for number in (0, 3, 0)] for paths in files]
    model = make_model()
    step = model.train_step
    model.train_step = lambda data: traces.append(data) or step(data)
    noted = Plans(callback := tflms_sft.MemoryBudget("1GiB", verbose=0))
    model.fit(data_of(largest_first), shuffle=False, verbose=0, callbacks=[callback, noted])
    assert not callback.plan.segments and len({id(plan) for plan in noted.plans}) == 1
    assert len(traces) == 2, "for the first image, and for any"


@pytest.mark.parametrize("keywords", [False, True])
def test_arguments_in_any_order(files, keywords):
    model = make_model()
    model.optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(paths, *, scale, masks):
        return model.train_step((paths, masks))["loss"] * scale

    images, masks = (tf.constant([paths[1]]) for paths in files)
    arguments = {"masks": masks, "paths": images, "scale": tf.constant(2.0, "float64")}
    positional = [] if keywords else [arguments.pop("paths")]
    expected = float(make_model().train_on_batch(images, masks)[0])
    fast = tflms_sft.rewrite(step, tflms_sft.SFTParams((2, 2)), *positional, **arguments)
    assert fast.plan.segments
    assert float(fast(*positional, **arguments)) == pytest.approx(2 * expected, rel=TOLERANCE)


def test_method_of_a_class(files):
    model = make_model()
    model.optimizer.build(model.trainable_variables)

    class Trainer:
        @tf.function(autograph=False)
        def step(self, masks, paths):
            return model.train_step((paths, masks))["loss"]

    images, masks = (tf.constant([paths[1]]) for paths in files)
    fast = tflms_sft.rewrite(Trainer().step, tflms_sft.SFTParams((2, 2)), masks, images)
    expected = float(make_model().train_on_batch(images, masks)[0])
    assert fast.plan.segments and float(fast(masks, images)) == pytest.approx(expected, rel=TOLERANCE)


def test_paths_that_the_step_computes_are_refused(files):
    reader = tflms_sft.ImageReader("zarr", (None, None, 3))
    call = tf.function(lambda paths: reader(paths), autograph=False)
    steps = [
        lambda masks, paths: tf.reduce_sum(reader(tf.strings.join([paths, ""]))),
        # A nested function has arguments of its own, and keeps its trace for other shapes.
        lambda masks, paths: tf.reduce_sum(call(paths)),
    ]
    for step in steps:
        with pytest.raises(tflms_sft.RewriteError, match="computed in the step, or in a function that the step calls"):
            batch = (tf.constant([paths[0]]) for paths in files[::-1])
            tflms_sft.rewrite(tf.function(step, autograph=False), tflms_sft.SFTParams((2, 2)), *batch)


def test_images_and_labels_of_a_batch_are_not_held():
    unknown_sizes = UnknownSizes()
    image, paths = tf.zeros((1, 40, 40, 3)), tf.constant(["a"])
    unknown_sizes.set_arguments((image, paths))
    assert image.ref() not in {each.ref() for each in unknown_sizes._arguments if each is not None}
    assert unknown_sizes.shapes() == []


def test_keys_of_a_reader_are_a_vector(tmp_path):
    reader = tflms_sft.ImageReader("zarr", (None, None, 3))
    with pytest.raises(ValueError, match=r"`keys` must have the shape \(batch,\). Received: keys='a.zarr'"):
        reader.shape_in_files("a.zarr")
    with pytest.raises(tflms_sft.ImageReadError, match="must name at least one image"):
        reader.shape_in_files([])


def test_remedy_names_the_argument(tmp_path):
    (path,) = write_images(tmp_path, "zarr", pixels(0, 1, 20, 24, 3), "image")
    remedies = {
        ((24, 20, 3), None): "Pass the order of its dimensions as `axes`",
        ((20, 24, 3, 2), None): "Pass a `shape` with a size for each dimension",
        ((16, 16, 3), None): "Pass the sizes of the file as `shape`, with None for those",
        ((16, 16, 3), tflms_sft.RandomView(flips=(0,))): "A reader with a `view` needs files of one shape",
    }
    for (shape, view), remedy in remedies.items():
        reader = tflms_sft.ImageReader("zarr", shape, view=view)
        with pytest.raises(tflms_sft.ImageReadError, match=remedy):
            reader.shape_in_files([path])


def test_other_sizes_and_types_are_refused(tmp_path):
    (path,) = write_images(tmp_path, "zarr", pixels(0, 1, 20, 20, 4), "image")
    reader = tflms_sft.ImageReader("zarr", (None, None, 3))
    with pytest.raises(tflms_sft.ImageReadError, match=r"shape \(20, 20, 4\), expected \(None, None, 3\)"):
        reader.shape_in_files([path])
    with pytest.raises(ValueError, match="needs all sizes"):
        tflms_sft.ImageReader("zarr", (None, 20, 3), view=tflms_sft.RandomView(flips=(0,)))
    again = tflms_sft.ImageReader.from_config(reader.get_config())
    assert again.image_shape == (None, None, 3)
