"""Tests of trainings whose batches differ in size: each size has a plan of its own."""

import itertools
import math
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from training import SETTINGS, X, Y, both, budgeted, is_plain, measure_steps, net, same, same_history, tiles

import tflms_sft
from tflms_sft._batches import size_selector
from tflms_sft._batches.batch_limits import check_batch_shape
from tflms_sft._batches.planned_step import EXTENSION, MARGIN, BatchSizes, PlannedStep, shapes_of
from tflms_sft._batches.size_selector import SizeSelector
from tflms_sft._keras.peak_watch import PeakWatch
from tflms_sft._keras.step_planner import Excesses, StepPlanner
from tflms_sft._params.request import RewriteRequest
from tflms_sft._report.plan_records import Measurement
from tflms_sft._search.traced_step import analyse_step, predict, with_sizes
from tflms_sft._trace.layer_names import LayerRecord
from tflms_sft._util.keras_internals import TRAINING

pytestmark = pytest.mark.usefixtures("cached_plans")

both_plans = pytest.mark.parametrize(("budget", "changed"), [("1GiB", False), ("240KiB", True)])

IMAGES = tf.TensorSpec((None, None, 24, 3), tf.float64), tf.TensorSpec((None,), tf.int64)


def dataset(batches, signature=IMAGES):
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    return data.apply(tf.data.experimental.assert_cardinality(len(batches)))


def check_fit(make, data, callbacks, **options):
    """Assert that a training with callbacks equals plain training; return both models."""
    model, plain = make(), make()
    got = model.fit(data(), callbacks=callbacks, **SETTINGS, **options)
    assert same_history(got, plain.fit(data(), **SETTINGS, **options)) and same(model, plain) and is_plain(model)
    return model, plain


def unsized():
    return net(size=None)


def cut(rows, start=0, samples=4):
    return X[start : start + samples, :rows], Y[start : start + samples]


@both
def test_images_of_two_sizes_equal_plain(make, capsys, monkeypatch):
    """The third batch is of the first size again, and the last one smaller."""
    measure_steps(monkeypatch, None)
    batches = [cut(24), cut(18), cut(24, 4), cut(18, 8, 2)]
    callback = make(verbose=1)
    check_fit(unsized, lambda: dataset(batches), [callback], epochs=2)
    out = capsys.readouterr().out
    started = [line for line in out.splitlines() if "predicted peak" in line]
    assert out.count("not measured") == 1, "the reason is the same for both sizes"
    assert len(started) == 2 and "for batches of 4x18x24x3; each size has its own plan" in started[1]
    assert callback.plan.changed


def test_sizes_of_evaluation_and_prediction_equal_plain():
    batches = [cut(24), cut(18), cut(24, 4)]
    model = net(size=None)
    want = model.evaluate(dataset(batches), verbose=0), model.predict(dataset(batches), verbose=0)
    callback = tiles()
    got = [method(dataset(batches), verbose=0, callbacks=[callback]) for method in (model.evaluate, model.predict)]
    np.testing.assert_allclose(got[0], want[0], rtol=1e-10)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-10)
    assert callback.evaluate_plan.changed and callback.predict_plan.changed


@both_plans
def test_sizes_of_evaluation_and_prediction_under_budget_equal_plain(budget, changed):
    """The second size is the smaller one, which a step of any size would serve."""
    batches = [cut(24), cut(18), cut(20, 4)]
    model, callback = net(size=None), tflms_sft.MemoryBudget(budget, verbose=0)
    want = model.evaluate(dataset(batches), verbose=0), model.predict(dataset(batches), verbose=0)
    got = [method(dataset(batches), verbose=0, callbacks=[callback]) for method in (model.evaluate, model.predict)]
    np.testing.assert_allclose(got[0], want[0], rtol=1e-10)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-10)
    assert callback.evaluate_plan.changed == changed


def test_sizes_of_train_on_batch_that_fit_equal_plain():
    model, plain = reader(), reader()
    with tflms_sft.budget(model, "1GiB", verbose=0) as patch:
        for batch in texts(16, 9, 12, 16):
            assert np.allclose(model.train_on_batch(*batch), plain.train_on_batch(*batch), rtol=1e-10)
        assert not patch.plan.changed
    assert same(model, plain)


def test_sizes_of_train_on_batch_equal_plain():
    model, plain, plans = net(size=None), net(size=None), []
    with tflms_sft.budget(model, "700KiB", verbose=0) as patch:
        for batch in (cut(24), cut(18), cut(24, 4), cut(18, 4)):
            assert np.allclose(model.train_on_batch(*batch), plain.train_on_batch(*batch), rtol=1e-10)
            plans.append(patch.plan)
    assert plans[0] is plans[2] is not plans[1] is plans[3] and plans[0].changed
    assert same(model, plain)


def texts(*lengths):
    random = np.random.default_rng(0)
    return [(random.integers(1, 40, (4, length)), random.normal(size=(4, 1))) for length in lengths]


def reader():
    """A network for tokens of any length."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(3)
    token = keras.Input((None,), dtype="int32")
    x = layers.GRU(8)(layers.Embedding(40, 8)(token))
    model = keras.Model(token, layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    return model


TOKENS = tf.TensorSpec((None, None), tf.int64), tf.TensorSpec((None, 1), tf.float64)


def test_padded_texts_that_fit_share_one_plan_for_shorter_ones(capsys):
    """A step that is not rewritten is traced for any length; a longer text is planned first."""
    callback = tflms_sft.MemoryBudget("1GiB")
    check_fit(reader, lambda: dataset(texts(16, 9, 21), TOKENS), [callback])
    assert not callback.plan.changed
    assert capsys.readouterr().out.count("nothing rewritten") == 2


def test_padded_texts_that_swap_equal_plain():
    callback = tflms_sft.LMS(min_bytes=0, tier="disk")
    check_fit(reader, lambda: dataset(texts(16, 9, 16, 21), TOKENS), [callback])
    assert callback.plan.swaps


def test_length_counts_in_the_predicted_peak():
    """The length of a text is no batch size: predicted memory grows with it."""
    peaks = []
    for length in (16, 64):
        callback = tflms_sft.MemoryBudget("1GiB", verbose=0)
        reader().fit(dataset(texts(length), TOKENS), callbacks=[callback], **SETTINGS)
        peaks.append(callback.plan.predicted.peak_bytes)
    assert peaks[1] > 2 * peaks[0]


def test_buckets_with_more_shorter_texts_equal_plain(capsys):
    """A step that is not rewritten runs more shorter texts, which are predicted to fit."""
    random = np.random.default_rng(0)
    batches = [
        (random.integers(1, 40, (samples, length)), np.ones((samples, 1))) for samples, length in ((4, 16), (8, 9))
    ]
    check_fit(reader, lambda: dataset(batches, TOKENS), [tflms_sft.MemoryBudget("1GiB")])
    assert capsys.readouterr().out.count("nothing rewritten") == 1


def test_batch_shape_is_compared_with_the_inputs_of_known_rank():
    replicas = [tf.TensorSpec((None, 16, 16, 3))] * 2
    with pytest.raises(
        ValueError, match=r"of model 'net': \(None, 16, 16, 3\)\. Received: batch_shape=\(4, 16, 18, 3\)"
    ):
        check_batch_shape([*replicas, tf.TensorSpec(None)], (4, 16, 18, 3), "net")
    check_batch_shape([*replicas, tf.TensorSpec(None)], (4, 16, 16, 3), "net")
    check_batch_shape([*replicas, tf.TensorSpec(None)], (4, 16, 18), "net")


def test_batch_shape_of_the_largest_image_holds_for_smaller_ones(capsys):
    batches = [cut(18), cut(24)]
    model, _ = check_fit(unsized, lambda: dataset(batches), [budgeted(batch_shape=(4, 24, 24, 3), verbose=1)])
    assert "for batches of 4x24x24x3" in capsys.readouterr().out
    with pytest.raises(ValueError, match="`batch_shape` must be the shape of an input"):
        model.fit(dataset(batches), callbacks=[budgeted(batch_shape=(4, 24, 20, 3))], **SETTINGS)


def test_saved_plan_is_for_the_first_size_alone(tmp_path):
    first, file = budgeted(), tmp_path / "plan.json"
    net(size=None).fit(dataset([cut(24)]), callbacks=[first], **SETTINGS)
    first.plan.save(file)
    check_fit(unsized, lambda: dataset([cut(24), cut(18)]), [budgeted(plan=file)])


def test_validation_that_is_not_rewritten_is_traced_once_for_all_sizes():
    """The evaluation does not contain the layer that the segment ends at."""
    model, traces = net(size=None), []
    model.test_step = lambda data: traces.append(data) or {"mean": tf.reduce_mean(model.layers[1](data[0]))}
    sizes = [cut(rows) for rows in (24, 18, 20, 22)]
    callback = tiles(segments=[tflms_sft.SegmentSpec("photo", "pool0")], verbose=1)
    model.fit(dataset([cut(24)]), validation_data=dataset(sizes), epochs=2, callbacks=[callback], **SETTINGS)
    assert callback.evaluate_plan is None and len(traces) < len(sizes)


def test_measured_peak_of_each_step_includes_its_batch(monkeypatch):
    """The callback fetches each batch of open size before its step."""
    counted = []
    measure_steps(monkeypatch, lambda step_bytes: counted.append(list(step_bytes)) or 1)
    net(size=None).fit(dataset([cut(24), cut(24, 4), cut(18)]), callbacks=[budgeted()], **SETTINGS)
    assert [4 * rows * 24 * 3 * 8 in sizes for rows, sizes in zip((24, 24, 18), counted, strict=True)] == [True] * 3


def test_second_size_over_budget_raises_and_restores():
    model = net(size=None)
    with pytest.raises(tflms_sft.BudgetError) as error:
        model.fit(dataset([cut(8), (np.tile(X[:4], (1, 40, 1, 1)), Y[:4])]), callbacks=[budgeted()], **SETTINGS)
    assert error.value.smallest_bytes > 700 * 2**10 and is_plain(model)
    assert "This batch of 4x960x24x3 follows batches of other sizes" in str(error.value)


def test_selector_has_a_step_for_each_size_and_lets_the_step_find_the_end_of_data(monkeypatch):
    """Plain training, too, calls the step once more: TensorFlow may count an iteration of the optimizer then."""
    monkeypatch.setattr(size_selector, "MANY_SIZES", 2)
    told, functions = [], itertools.count()
    sizes = SizeSelector(net(), RewriteRequest(), lambda: next(functions), tell=told.append)
    data, steps = iter(dataset([cut(24), cut(18), cut(24)])), []
    for _ in range(3):
        batches, peeked = sizes.take(data)
        assert batches is peeked
        steps.append(sizes.current)
    assert steps[0] is steps[2] is not steps[1] and sizes.steps == steps[:2] and next(functions) == 1
    assert steps[1].sizes.has_margin and not steps[0].sizes.has_margin
    (line,) = told
    assert "batches of 2 sizes so far; each size is traced and planned separately" in line
    assert sizes.take(data) == (data, None)


def test_several_steps_per_execution_of_two_sizes_are_refused():
    model = net(size=None, steps_per_execution=2)
    text = "^The step is planned for images of 24x24.*with `steps_per_execution=1`.*Received: 20x24.$"
    with pytest.raises(tflms_sft.RewriteError, match=text):
        model.fit(dataset([cut(24), cut(20)]), callbacks=[tiles()], **SETTINGS)
    assert is_plain(model)


class Retrace(keras.callbacks.Callback):
    """Has the step traced again after each batch, as callbacks that freeze layers do."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.make_train_function(force=True)


def test_step_that_is_traced_again_between_sizes_equals_plain():
    batches = [cut(24), cut(18), cut(24, 4), cut(18, 4)]
    check_fit(unsized, lambda: dataset(batches), [tiles(), Retrace()])


def test_excess_of_one_size_leaves_the_plans_of_others(monkeypatch):
    """Only the size whose later step needed more than its budget is planned again."""
    peaks = itertools.chain([600, 500, 750], itertools.repeat(600))
    measure_steps(monkeypatch, lambda step_bytes: next(peaks) * 2**10)
    callback, plans = budgeted(verbose=1), []
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: plans.append(callback.plan))
    batches = [cut(24), cut(18), cut(24, 4)]
    check_fit(unsized, lambda: dataset(batches), [callback, look], epochs=2)
    first, small, *_, last = plans
    assert small is not first is not last


@pytest.mark.parametrize("excess", [{0: 20}, {0: 20, 1: 30}])
def test_each_size_is_corrected_by_its_own_peak(excess):
    """A size that has kept to its budget is corrected by the latest peak of the model."""
    model, functions = net(), itertools.count()
    steps = [PlannedStep(lambda: next(functions)) for _ in range(2)]
    sizes = types.SimpleNamespace(steps=steps)
    planner = StepPlanner(
        *(model, TRAINING, RewriteRequest(), None, sizes, PeakWatch()),
        excesses=Excesses(),
        has_epochs=True,
        on_plan=print,
        say=print,
    )
    for number, step in enumerate(steps):
        plan = types.SimpleNamespace(memory_budget=1000, predicted=types.SimpleNamespace(peak_bytes=1000))
        step.settle(plan, None, [])
        peak = 1000 + excess.get(number, 0)
        planner.check_later_run(step, plan, Measurement(peak, "a test"))
    for _ in range(2):
        planner.plan_again()
    assert [step.plan is None for step in steps] == [number in excess for number in (0, 1)]
    assert [planner.excess_bytes(step) for step in steps] == [20, excess.get(1, 20)]
    assert next(functions) == len(excess)


def planned(shapes, is_open):
    class Plan:
        batch = 4

    return PlannedStep(print, BatchSizes(shapes), plan=Plan(), is_open=is_open, batch_limit=object())


def test_planned_step_holds_for_fewer_samples():
    step = planned([(4, 24, 24, 3), (4,)], is_open=False)
    assert step.holds_for([(2, 24, 24, 3), (2,)]) and not step.holds_for([(5, 24, 24, 3), (5,)])
    assert not step.holds_for([(4, 20, 24, 3), (4,)]) and not step.holds_for([(4, 24, 24, 3)])


def test_planned_step_of_any_size_holds_for_smaller_sizes():
    step = planned([(4, 24, 24, 3), (4,)], is_open=True)
    assert step.holds_for([(4, 20, 24, 3), (4,)]) and not step.holds_for([(4, 20, 25, 3), (4,)])


def test_shapes_of_batch_without_weights():
    assert shapes_of((X[:4], Y[:4], None)) == [(4, 24, 24, 3), (4,), ()]
    assert shapes_of(tf.ragged.constant([[1.0], [1.0, 2.0]])) == [(3,), (3,)], "values and row splits"


GRAPHS = tuple(
    tf.TensorSpec(shape, dtype)
    for shape, dtype in (((None, 5), tf.float64), ((None, 2), tf.int32), ((None,), tf.int32), ((None, 1), tf.float64))
)


def graphs(*sizes):
    """Batches of nodes, edges between them, the graph of each node, and a target for each graph."""
    random = np.random.default_rng(1)
    for nodes, edges, count in sizes:
        owner = np.sort(random.integers(0, count, nodes))
        yield (random.normal(size=(nodes, 5)), random.integers(0, nodes, (edges, 2)), owner), np.ones((count, 1))


class Messages(keras.layers.Layer):
    """Sends the state of each node along the edges, and adds up the nodes of each graph."""

    def build(self, shapes):
        self.kernel = self.add_weight(shape=(5, 16))

    def call(self, inputs):
        nodes, edges, owner = inputs
        for _ in range(2):
            wide = tf.nn.tanh(tf.gather(nodes, edges[:, 1]) @ self.kernel)
            nodes = tf.math.unsorted_segment_sum(wide, edges[:, 0], tf.shape(nodes)[0])[:, :5]
        return tf.math.segment_sum(nodes, owner)

    def compute_output_shape(self, shapes):
        return None, 5


def graph_network():
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(3)
    inputs = [keras.Input((5,)), keras.Input((2,), dtype="int32"), keras.Input((), dtype="int32")]
    model = keras.Model(inputs, layers.Dense(1)(Messages()(inputs)))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=False)
    return model


def graph_data(*sizes):
    return dataset(list(graphs(*sizes)), (GRAPHS[:3], GRAPHS[3]))


def test_leading_sizes_are_no_batch_size_and_grow_without_a_new_plan(capsys):
    """Nodes, edges and graphs lead the tensors of a step that is not rewritten: no batch is refused."""
    sizes = [(30, 90, 4), (20, 130, 4), (45, 60, 2), (500, 2000, 40)]
    callback = tflms_sft.MemoryBudget("1GiB")
    model, plain = check_fit(graph_network, lambda: graph_data(*sizes), [callback])
    assert capsys.readouterr().out.count("nothing rewritten") == 1
    for method in ("evaluate", "predict"):
        results = [
            getattr(each, method)(graph_data(*sizes), verbose=0, **options)
            for each, options in ((model, {"callbacks": [callback]}), (plain, {}))
        ]
        np.testing.assert_allclose(*results, rtol=1e-10)


def test_each_leading_size_counts_in_the_predicted_peak():
    peaks = []
    for sizes in ((30, 90, 4), (30, 9000, 4)):
        callback = tflms_sft.MemoryBudget("1GiB", verbose=0)
        graph_network().fit(graph_data(sizes), callbacks=[callback], **SETTINGS)
        peaks.append(callback.plan.predicted.peak_bytes)
    assert peaks[1] > 10 * peaks[0]


def test_swaps_hold_for_smaller_leading_sizes_and_are_planned_again_for_larger_ones(capsys):
    sizes = [(300, 900, 8), (200, 800, 8), (300, 1300, 8)]
    whole = tflms_sft.MemoryBudget("1GiB", verbose=0)
    graph_network().fit(graph_data(sizes[2]), callbacks=[whole], **SETTINGS)
    swaps = tflms_sft.LMSParams(min_bytes=0)
    callback = tflms_sft.MemoryBudget(int(0.75 * whole.plan.predicted.peak_bytes), headroom=0, swap=swaps)
    check_fit(graph_network, lambda: graph_data(*sizes), [callback])
    out = capsys.readouterr().out
    assert out.count("predicted peak") == 2 and "for batches of 300x5, 1300x2, 300, 8x1" in out
    assert callback.plan.changed


def test_limit_of_a_larger_batch_and_margin_are_for_the_sizes_of_the_first_one():
    sizes = BatchSizes([(4, 8, 8, 3), (4, 10), (30, 2)], has_margin=True)
    sizes.raise_batch(8)
    assert list(sizes.leading_limits) == [8, 8, math.ceil(30 * MARGIN)]
    assert sizes.drop_margin() and list(sizes.leading_limits) == [4, 4, 30] and not sizes.drop_margin()
    sizes.raise_batch(8)
    assert list(sizes.leading_limits) == [8, 8, 30]


def test_plan_after_an_excess_is_for_sizes_that_were_seen():
    """An extended step holds for more than it has seen."""
    plan, limit = types.SimpleNamespace(changed=False), types.SimpleNamespace(fits=lambda sizes: True)
    step = PlannedStep(print, BatchSizes([(30, 2), (4,)], arguments=[0, 1]), plan=plan, batch_limit=limit)
    assert step.extend([(50, 2), (3,)])
    assert list(step.sizes.leading_limits) == [50 * EXTENSION, 4]
    step.plan_again()
    assert list(step.sizes.leading_limits) == [50, 4]


def test_step_for_equal_sizes_has_no_estimates_of_unlike_sizes():
    """The facts of a graph belong to one set of sizes."""

    @tf.function(autograph=False)
    def step(x, y):
        rows = tf.boolean_mask(x, x[:, 0] > 0)
        return tf.reduce_sum(tf.tanh(x)) + tf.reduce_sum(tf.exp(y)) + tf.reduce_sum(tf.sin(rows))

    specs = tf.TensorSpec((None, 100)), tf.TensorSpec((None, 100))
    concrete_fn = step.get_concrete_function(*specs)

    def peak(traced):
        return predict(traced, []).peak.peak_bytes

    unlike, equal = (analyse_step(concrete_fn, LayerRecord(), 400, sizes=sizes) for sizes in ({0: 100, 1: 50}, {}))
    assert peak(with_sizes(unlike, {0: 400, 1: 400})) == peak(equal) > peak(unlike)


class OfRagged(keras.Model):
    """Adds up the rows of each sample of a ragged batch."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(8, "tanh")
        self.last = layers.Dense(1)

    def call(self, x):
        return self.last(tf.math.segment_sum(self.dense(x.values), x.value_rowids()))


def test_ragged_batches_under_budget_equal_plain(capsys):
    """The number of rows varies more than that of the samples."""
    rows = [[3, 2, 4, 1], [9, 8, 7, 30], [1, 1]]
    batches = [tf.RaggedTensor.from_row_lengths(np.ones((sum(lengths), 5)), lengths) for lengths in rows]
    spec = tf.RaggedTensorSpec((None, None, 5), tf.float64, ragged_rank=1), tf.TensorSpec((None, 1), tf.float64)
    trained = []
    for callbacks in ([tflms_sft.MemoryBudget("1GiB")], []):
        keras.utils.set_random_seed(3)
        keras.config.set_floatx("float64")
        model = OfRagged()
        model(batches[0])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
        data = dataset([(x, np.ones((x.shape[0], 1))) for x in batches], spec)
        trained.append((model, model.fit(data, callbacks=callbacks, **SETTINGS)))
    assert same_history(trained[0][1], trained[1][1]) and same(trained[0][0], trained[1][0])
    assert capsys.readouterr().out.count("nothing rewritten") == 1


def sequences(kind):
    """Batches of two sequences with a target for each; their lengths differ, and the last batch has one."""
    lengths = (5, 9, 40, 38, 37)

    def each():
        for number, length in enumerate(lengths):
            yield np.random.default_rng(number).normal(size=(length, 3)), np.ones(1)

    signature = tf.TensorSpec((None, 3), tf.float64), tf.TensorSpec((1,), tf.float64)
    data = tf.data.Dataset.from_generator(each, output_signature=signature)
    if kind == "padded":
        data = data.padded_batch(2)
    else:
        data = data.bucket_by_sequence_length(lambda x, _: tf.shape(x)[0], [10, 50], [2, 2, 2])
    return data.apply(tf.data.experimental.assert_cardinality(3))


def sequence_model():
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(2)
    image = x = keras.Input((None, 3))
    for _ in range(3):
        x = layers.Conv1D(8, 3, padding="same", activation="tanh")(x)
    model = keras.Model(image, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    return model


@pytest.mark.parametrize("kind", ["padded", pytest.param("bucketed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", [None, 0.8], ids=["plain", "rewritten"])
def test_sequences_of_several_lengths_under_budget_equal_plain(kind, part, capsys):
    whole = tflms_sft.MemoryBudget("1GiB", verbose=0)
    longest = (np.ones((2, 40, 3)), np.ones((2, 1)))
    sequence_model().fit(*longest, callbacks=[whole], **SETTINGS)
    budget = "1GiB" if part is None else int(part * whole.plan.predicted.peak_bytes)
    callback = tflms_sft.MemoryBudget(budget, headroom=0, max_slowdown=math.inf)
    check_fit(sequence_model, lambda: sequences(kind), [callback], epochs=2)
    out = capsys.readouterr().out
    assert ("segment(s)" in out or "swapped" in out) is (part is not None)
