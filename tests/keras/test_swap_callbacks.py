"""Tests of `LMSParams`, `LMS` and the spill store, including full disks and killed processes."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients import gradient_step, model_of
from keras import layers

import tflms_sft
from rewriters.ir.device_detection import planned_device
from rewriters.swapping.spill_store import SpillError, SpillStore, is_in_memory
from tflms_sft import LMS, LMSParams, RewriteError, SegmentSpec, SFTParams, SwapError
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._planner.swap_planner import reason_without_tier

X = np.random.default_rng(0).normal(size=(6, 24, 24, 3))
Y = np.arange(6) % 3
SETTINGS = {"verbose": 0, "shuffle": False, "batch_size": 2}


def net(dropout=0.0, frozen=False, **compiled):
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    image = x = keras.Input((24, 24, 3), name="photo")
    for name in ("one", "two", "three"):
        x = layers.Conv2D(6, 3, padding="same", name=name)(x)
        x = layers.ReLU(name=f"{name}_relu")(layers.BatchNormalization(trainable=not frozen)(x))
    x = layers.MaxPooling2D(2, name="pool")(x)
    x = layers.Dropout(dropout, seed=1)(x) if dropout else x
    model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": "adam", "loss": loss, "jit_compile": False, **compiled})
    return model


def state(model):
    return [np.array(v) for v in (*model.variables, *model.optimizer.variables)]


def same(model, plain):
    return all(np.array_equal(a, b) for a, b in zip(state(model), state(plain), strict=True))


def swapping(path, **options):
    return LMS(**{"tier": "disk", "spill_dir": path, "min_bytes": 0, "verbose": 0, **options})


# Parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"n_tensors": -2}, ValueError, "`n_tensors` must be at least -1. Received: n_tensors=-2"),
        ({"n_tensors": 0}, ValueError, "`n_tensors` must be at least 1, or -1 for all"),
        ({"n_tensors": 1.5}, TypeError, "`n_tensors` must be an integer. Received: n_tensors=1.5"),
        ({"lb": -1}, ValueError, "`lb` must be at least 0. Received: lb=-1"),
        ({"lb": True}, TypeError, "`lb` must be an integer"),
        ({"ub": 0}, ValueError, "`ub` must be at least 1"),
        ({"lb": 7, "ub": 6}, ValueError, "`lb` must not be above `ub`. Received: lb=7, ub=6"),
        ({"ctrld_strategy": "random"}, ValueError, '`ctrld_strategy` must be "chain_rule" or "direct_order". Received'),
        ({"tier": "cloud"}, ValueError, '`tier` must be "auto" or "host" or "disk". Received: tier=.cloud.'),
        ({"fuse_swapins": 1}, TypeError, "`fuse_swapins` must be a bool. Received: fuse_swapins=1"),
        ({"swap_branches": None}, TypeError, "`swap_branches` must be a bool"),
        ({"page_cache": "no"}, TypeError, "`page_cache` must be a bool"),
        ({"branch_threshold": -1}, ValueError, "`branch_threshold` must be at least 0"),
        ({"fuse_distance": -1}, ValueError, "`fuse_distance` must be at least 0"),
        ({"max_in_flight": 0}, ValueError, "`max_in_flight` must be at least 1"),
        ({"min_bytes": "1 furlong"}, ValueError, "`min_bytes` must be a positive number followed by one of"),
        ({"excl_scopes": 3}, TypeError, "`excl_scopes` must be a name or several names. Received: excl_scopes=3"),
        ({"incl_types": [""]}, TypeError, "`incl_types` must be a name or several names"),
        ({"starting_scope": 3}, TypeError, "`starting_scope` must be the name of a scope"),
        ({"spill_dir": "/no/such/place"}, ValueError, "`spill_dir` must be an existing directory. Received"),
        ({"spill_dir": 3}, TypeError, "`spill_dir` must be a path. Received: spill_dir=3"),
        ({"spill_dir": "/proc"}, ValueError, "`spill_dir` must be a writable directory"),
    ],
)
def test_swap_params_invalid_values_are_refused(options, kind, text):
    for make in (LMSParams, LMS):
        with pytest.raises(kind, match=text):
            make(**options)


def test_swap_params_defaults_equal_tflms_table_2():
    params = LMSParams()
    assert (params.n_tensors, params.lb, params.ub, params.ctrld_strategy) == (-1, 1, 10000, "chain_rule")
    assert (params.fuse_swapins, params.swap_branches, params.branch_threshold) == (False, False, 0)
    assert params.starting_scope is None and params.starting_op_names == () == params.excl_scopes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"excl_scopes": "tow"}, "`excl_scopes` names nothing in the step. Received: 'tow'. Nearest: .*'two"),
        ({"incl_types": {"Rlu"}}, "`incl_types` names nothing in the step. Received: 'Rlu'. Nearest: 'Relu'"),
        ({"starting_op_names": ["functional"]}, "`starting_op_names` names nothing in the step"),
        ({"starting_scope": "fuctional"}, "`starting_scope` names nothing in the step. .* Nearest: 'functional"),
        ({"optimizer_scopes": "sgd"}, "`optimizer_scopes` names nothing in the step"),
        ({"min_bytes": "1GiB"}, "exclude all .* tensor.s. that could be swapped, .* Lower `min_bytes` .1.00 GiB."),
        (
            {"ctrld_strategy": "direct_order", "lb": 9000},
            "no op can trigger its swap-in for .* Lower `lb` or raise `ub`",
        ),
    ],
)
def test_lms_infeasible_parameters_raise_before_first_step(tmp_path, options, text):
    model, plain = net(), net()
    plain.optimizer.build(plain.trainable_variables)
    with pytest.raises(SwapError, match=text):
        model.fit(X, Y, callbacks=[swapping(tmp_path, **options)], **SETTINGS)
    assert same(model, plain)
    model.fit(X, Y, **SETTINGS)


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="needs a machine without an accelerator")
def test_lms_host_tier_without_accelerator_is_refused():
    with pytest.raises(SwapError, match="needs an accelerator.*Use `tier=.disk.`"):
        net().fit(X, Y, callbacks=[LMS(tier="host")], **SETTINGS)
    device = planned_device()
    assert reason_without_tier(SwapParams(tier="host"), device).startswith('`tier="host"` needs an accelerator')
    assert not reason_without_tier(SwapParams(), device)


def test_lms_full_directory_is_refused_before_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(SpillStore, "free_bytes", lambda self: 1000)
    with pytest.raises(SwapError, match=f"too little space. A step swaps .* to .{tmp_path}., where 1000 B are free"):
        net().fit(X, Y, callbacks=[swapping(tmp_path)], **SETTINGS)


def test_lms_too_few_file_handles_are_refused_before_first_step(tmp_path, monkeypatch):
    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("resource.getrlimit", lambda which: (opened + 3, 10**6))
    with pytest.raises(SwapError, match=f"each to a file of its own. This process may have {opened + 3} files open"):
        net().fit(X, Y, callbacks=[swapping(tmp_path)], **SETTINGS)
    net().fit(X, Y, callbacks=[swapping(tmp_path, n_tensors=1)], **SETTINGS)


def test_swap_params_directory_in_memory_is_replaced_or_noted(tmp_path, monkeypatch):
    """The longest matching mount point decides."""
    table = tmp_path / "mounts"
    (tmp_path / "a b" / "c").mkdir(parents=True)
    space = str(tmp_path / "a b").replace(" ", "\\040")
    table.write_text(f"disk / ext4 rw 0 0\n\nodd\ntmpfs {space} tmpfs rw 0 0\ndisk {space}/c ext4 rw 0 0\n")
    found = [is_in_memory(str(tmp_path / path), str(table)) for path in ("", "a b", "a b/d", "a b/c", "a bc")]
    assert found == [False, True, True, False, False]
    assert not is_in_memory(str(tmp_path), str(tmp_path / "no such table"))
    disks = {"/var/tmp"}
    monkeypatch.setattr("tflms_sft._params.swap_params.is_in_memory", lambda path: path not in disks)
    assert LMSParams().directory == "/var/tmp" and LMSParams(spill_dir=tmp_path).directory == str(tmp_path)
    disks.clear()
    assert LMSParams().directory == tempfile.gettempdir()
    monkeypatch.setattr("tflms_sft._planner.swap_planner.is_in_memory", lambda path: True)
    callback = swapping(tmp_path)
    net().fit(X, Y, callbacks=[callback], **SETTINGS)
    assert f"{str(tmp_path)!r} is in memory, so swapping to it saves no memory" in callback.plan.notes[-1]


def test_parse_request_swaps_before_tiles_is_refused(tmp_path):
    step = tf.function(lambda x: x)
    with pytest.raises(ValueError, match="must have `LMSParams` last: tiling comes first"):
        tflms_sft.rewrite(step, [LMSParams(), SFTParams()], X)


# Training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_cache", (True, False))
def test_lms_fit_is_bitwise_equal_and_leaves_no_file(tmp_path, page_cache, capfd):
    model, plain = net(), net()
    callback = swapping(tmp_path, page_cache=page_cache, verbose=1)
    model.fit(X, Y, epochs=2, callbacks=[callback], **SETTINGS)
    plain.fit(X, Y, epochs=2, **SETTINGS)
    assert same(model, plain) and os.listdir(tmp_path) == [] and open_files(tmp_path) == []
    plan = callback.plan
    assert plan.changed and plan.swap_tier == "disk" and plan.swapped_bytes == sum(s.num_bytes for s in plan.swaps)
    assert f"{len(plan.swaps)} tensor(s) of" in capfd.readouterr().out
    assert "swapped to disk" in plan.headline() and "swapped in after" in plan.summary() and '"swaps"' in plan.to_json()
    assert plan.predicted.peak_bytes < plan.original.peak_bytes


def test_lms_peak_includes_arrays_read_from_disk(tmp_path, monkeypatch, plan_with):
    """The tier is created after the measurement has begun, while the step is traced."""
    watched = []
    monkeypatch.setattr("tflms_sft._keras.train_step_patch.watch_tier", watched.append)
    plan_with(has_allocator_stats=True, min_counted_bytes=0)
    net().fit(X, Y, epochs=2, callbacks=[swapping(tmp_path)], **SETTINGS)
    (tier,) = watched
    assert tier.store.directory == str(tmp_path)


@pytest.mark.parametrize("tiles", [3, LMSParams()])
def test_lms_wrong_tiles_argument_is_refused(tiles):
    with pytest.raises(TypeError, match=r"`tiles` must be `SFTParams\(...\)` or None. Received: tiles="):
        LMS(tiles=tiles)


def recurrent_net(layer):
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    image = keras.Input((24, 24, 3))
    model = keras.Model(image, layers.Dense(3)(layers.Flatten()(layer()(layers.Reshape((24, 72))(image)))))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


@pytest.mark.parametrize(
    "layer",
    (
        lambda: layers.GRU(4, return_sequences=True),
        lambda: layers.LSTM(4, dropout=0.2, seed=1),
        lambda: layers.Bidirectional(layers.LSTM(4)),
    ),
    ids=("gru", "lstm", "bidirectional"),
)
def test_lms_recurrent_layer_equals_original(layer, tmp_path):
    model, plain = recurrent_net(layer), recurrent_net(layer)
    plain.fit(X, Y, **SETTINGS)
    callback = swapping(tmp_path, incl_types=("While",))
    model.fit(X, Y, callbacks=[callback], **SETTINGS)
    assert any("in every iteration" in swap.tensor for swap in callback.plan.swaps)
    differences = [np.max(np.abs(a - b), initial=0) for a, b in zip(state(model), state(plain), strict=True)]
    assert max(differences) <= 1e-10
    assert os.listdir(tmp_path) == [] and open_files(tmp_path) == []


def test_lms_recurrent_layer_several_steps_per_execution_equals_original(tmp_path):
    def compiled():
        model = recurrent_net(lambda: layers.GRU(4))
        model.compile("adam", model.loss, jit_compile=False, steps_per_execution=3)
        return model

    model, plain = compiled(), compiled()
    plain.fit(X, Y, epochs=2, **SETTINGS)
    model.fit(X, Y, epochs=2, callbacks=[swapping(tmp_path, incl_types=("While",))], **SETTINGS)
    differences = [np.max(np.abs(a - b), initial=0) for a, b in zip(state(model), state(plain), strict=True)]
    assert max(differences) <= 1e-10


def test_lms_with_tiles_equals_original(tmp_path):
    """Swaps change no bit of the step in tiles, which equals the original up to rounding."""
    model, tiled, plain = (net(frozen=True) for _ in range(3))
    tiles = SFTParams((2, 2), [SegmentSpec("photo", "two_relu")])
    callback = swapping(tmp_path, tiles=tiles)
    model.fit(X, Y, callbacks=[callback], **SETTINGS)
    tiled.fit(X, Y, callbacks=[tflms_sft.SFT((2, 2), [SegmentSpec("photo", "two_relu")], verbose=0)], **SETTINGS)
    plain.fit(X, Y, **SETTINGS)
    assert same(model, tiled) and len(callback.plan.segments) == 1
    assert all(np.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(state(model), state(plain), strict=True))
    assert any("two_relu" in swap.tensor or swap.tensor.startswith("sft/") for swap in callback.plan.swaps)
    assert (
        "1 segment(s) in 2 rows x 2 columns of tiles" in callback.plan.headline()
        and "swapped to disk" in callback.plan.headline()
    )


@pytest.mark.parametrize("strategy", ["chain_rule", "direct_order"])
def test_lms_with_tiles_swaps_tensors_between_segments(tmp_path, strategy):
    """Only loops consume it, and ops that the backward loops start with are backward ops."""
    model, plain = net(frozen=True), net(frozen=True)
    tiles = SFTParams((2, 2), [SegmentSpec("photo", "one_relu"), SegmentSpec("one_relu", "pool")])
    callback = swapping(tmp_path, tiles=tiles, ctrld_strategy=strategy)
    model.fit(X, Y, callbacks=[callback], **SETTINGS)
    plain.fit(X, Y, callbacks=[tflms_sft.SFT(tiles.num_tiles, tiles.segments, verbose=0)], **SETTINGS)
    assert same(model, plain)
    readers = [reader for swap in callback.plan.swaps for back in swap.readers for reader in back]
    assert "sft/segment2/backward/while" in readers


def test_lms_with_barriers_larger_lb_swaps_same_tensors(tmp_path):
    """The ops that backward loops start with are backward ops."""
    keras.config.set_floatx("float64")
    image = x = keras.Input((16, 16, 3))
    for _ in range(2):
        x = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(x))
        x = layers.MaxPooling2D()(layers.ReLU()(x))
    step = gradient_step(model_of(image, x))
    found = []
    for lb in (1, 5):
        swaps = LMSParams(ctrld_strategy="direct_order", lb=lb, min_bytes=0, tier="disk", spill_dir=str(tmp_path))
        plan = tflms_sft.rewrite(step, [SFTParams((2, 1)), swaps], tf.zeros((2, 16, 16, 3), "float64")).plan
        found.append([swap.tensor for swap in plan.swaps if "/while" in str(swap.readers)])
    assert found[0] == found[1] and len(found[0]) > 1
    result = tflms_sft.verify(step, tf.constant(X[:2, :16, :16]), [SFTParams((2, 1)), swaps])
    assert result and result.dtype == "float64"


def test_rewrite_swaps_equals_original(tmp_path):
    """Before and after a measurement, which restores the variables."""
    model, plain = net(), net()
    for either in (model, plain):
        either.optimizer.build(either.trainable_variables)
    step, original = (tf.function(lambda x, y, net=either: net.train_step((x, y))) for either in (model, plain))
    params = LMSParams(tier="disk", spill_dir=tmp_path, min_bytes=0)
    batch = tf.constant(X[:2]), tf.constant(Y[:2])
    fast = tflms_sft.rewrite(step, params, *batch)
    for _ in range(2):
        assert float(fast(*batch)["loss"]) == float(original(*batch)["loss"])
        assert fast.plan.swaps and same(model, plain)
        assert tflms_sft.measure(fast, *batch).peak_bytes > 0


def test_spill_store_two_trainings_share_directory(tmp_path):
    models = net(), net()
    with_both = [swapping(tmp_path), swapping(tmp_path, n_tensors=3)]
    for _ in range(2):
        for model, callback in zip(models, with_both, strict=True):
            model.fit(X, Y, callbacks=[callback], **SETTINGS)
    assert same(*models) and os.listdir(tmp_path) == []


# What goes wrong ----------------------------------------------------------------------------------------------


def test_lms_with_data_of_known_length_counts_steps_as_plain(tmp_path):
    """At the end of a data set of unknown length, plain Keras begins one more step, which counters may count."""

    def batches():
        for start in (0, 4):
            yield X[start : start + 4], Y[start : start + 4]

    signature = (tf.TensorSpec((None, 24, 24, 3), tf.float64), tf.TensorSpec((None,), tf.int64))
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    data = data.apply(tf.data.experimental.assert_cardinality(2))
    model, plain = (net(dropout=0.3) for _ in range(2))
    callback = swapping(tmp_path)
    got = model.fit(data, epochs=3, callbacks=[callback], **SETTINGS).history
    want = plain.fit(data, epochs=3, **SETTINGS).history
    assert callback.plan.swaps and np.allclose(got["loss"], want["loss"], rtol=1e-10)
    assert same(model, plain) and int(model.optimizer.iterations) == 6


def open_files(directory):
    """Return the open files of this process in a directory, unnamed ones included."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if path.startswith(str(directory)):
            found.append(path)
    return found


def test_spill_store_full_disk_leaves_variables_unchanged(tmp_path, monkeypatch):
    """Moving statistics, the seeds of dropout and the optimizer's counter are checked too."""
    model, real, written, room = net(dropout=0.1), os.pwrite, [], [10**6]

    def train(samples):
        callback = swapping(tmp_path, min_bytes=X[0].nbytes)
        model.fit(X[:samples], Y[:samples], callbacks=[callback], **SETTINGS)

    def full(descriptor, data, offset):
        written.append(len(data))
        if len(written) >= room[0]:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr("os.pwrite", full)
    train(2)
    before, room[0] = state(model), 2 * len(written)  # It is the last one of the step that fails.
    text = f"(?s)SpillError.*The disk of .{tmp_path}. is full.*bytes, .* are free"
    with pytest.raises(tf.errors.OpError, match=text):
        train(6)
    monkeypatch.undo()
    assert all(np.array_equal(a, b) for a, b in zip(state(model), before, strict=True))
    assert os.listdir(tmp_path) == [] and open_files(tmp_path) == []
    train(6)


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 200 KiB, which needs root."""
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_spill_store_full_file_system_raises(small_disk, monkeypatch):
    model, plain = net(), net()
    for either in (model, plain):
        either.fit(X, Y, **SETTINGS)
    with pytest.raises(tflms_sft.SwapError, match="`spill_dir` has too little space"):
        model.fit(X, Y, callbacks=[swapping(small_disk)], **SETTINGS)
    monkeypatch.setattr(
        "rewriters.swapping.spill_store.SpillStore.free_bytes", lambda self: 10**12
    )  # As if it filled up later.
    with pytest.raises(tf.errors.OpError, match=f"SpillError: The disk of .{small_disk}. is full"):
        model.fit(X, Y, callbacks=[swapping(small_disk)], **SETTINGS)
    assert same(model, plain)
    assert os.listdir(small_disk) == [] and open_files(small_disk) == []
    model.fit(X[:2], Y[:2], **SETTINGS)


CHILD = """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Shells have it ignored in the background.
    import numpy as np, keras, tflms_sft
    from keras import layers
    image = x = keras.Input((64, 64, 3))
    for _ in range(6):
        x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    model = keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    tell = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: print("step", flush=True))
    swap = tflms_sft.LMS(tier="disk", spill_dir=sys.argv[1], min_bytes=0)
    data = np.zeros((4000, 64, 64, 3), "float32"), np.zeros(4000)
    try:
        model.fit(*data, batch_size=4, verbose=0, callbacks=[swap, tell])
    except KeyboardInterrupt:
        model.fit(data[0][:4], data[1][:4], verbose=0)
        print("usable", flush=True)
"""


@pytest.mark.parametrize("sent", (signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)))
def test_spill_store_killed_process_leaves_no_file(tmp_path, sent):
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        for line in child.stdout:
            if line.startswith("step"):
                break
        time.sleep(0.05)
        assert os.listdir(tmp_path) == [], "files have no name while they are there"
        child.send_signal(sent)
        rest, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert ("usable" in rest) == (sent == signal.SIGINT)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("page_cache", (True, False))
def test_spill_store_files_are_private_and_reused(tmp_path, page_cache):
    store = SpillStore(str(tmp_path), page_cache)
    array = np.arange(12.0).reshape(3, 4)
    number = store.write(array, 2, "test")
    (file,) = (held.file for held in store._held.values())
    assert os.fstat(file.fileno()).st_mode & 0o077 == 0
    first = store.read(number)
    assert np.array_equal(first, array) and open_files(tmp_path)
    first[:] = 0  # An operation that computes in place.
    second = store.read(number)
    assert np.array_equal(second, array)
    other = store.write(array + 1, 1, "test")  # It takes the file of the first, whose arrays are copies.
    assert np.array_equal(second, array) and not first.any()
    third = store.write(array + 2, 1, "test")
    assert len({held.file for held in store._held.values()}) == 2
    assert np.array_equal(store.read(other), array + 1) and np.array_equal(store.read(third), array + 2)
    assert file in sum(store._free.values(), []) and len(sum(store._free.values(), [])) == 2
    store.clear()
    assert not open_files(tmp_path)


def test_spill_store_many_sizes_share_one_file(tmp_path):
    store = SpillStore(str(tmp_path))
    for size in (3000, 5000, 1000, 4000):
        assert np.array_equal(store.read(store.write(np.arange(size), 1, "a")), np.arange(size))
        (file,) = open_files(tmp_path)
    assert [os.stat(file.fileno()).st_size for files in store._free.values() for file in files] == [4000 * 8]


def test_spill_store_peak_counts_arrays_in_memory(tmp_path):
    store = SpillStore(str(tmp_path))
    numbers = [store.write(np.ones(1000), 1, "test") for _ in range(3)]
    first, second = store.read(numbers[0]), store.read(numbers[1])
    assert store.peak_bytes() == 16000
    del first
    third = store.read(numbers[2])
    assert store.peak_bytes() == 16000 and third.sum() == second.sum() == 1000
    del second, third
    store.reset_peak()
    assert store.peak_bytes() == 0


def test_spill_store_peak_adds_allocator_peak(tmp_path):
    store = SpillStore(str(tmp_path))
    numbers = [store.write(np.ones(1000), 1, "test") for _ in range(2)]
    peaks = iter([10, 500, 70, 3])
    store.reset_peak(lambda: next(peaks))
    first = store.read(numbers[0])  # 500 before it, when nothing else was in memory.
    second = store.read(numbers[1])  # 70 beside the first.
    del first
    assert second.sum() == 1000 and store.peak_bytes() == 8070  # And 3 beside the second.


def test_spill_store_releases_arrays_at_next_transfer(tmp_path):
    store, alive = SpillStore(str(tmp_path)), []
    record_peak = store.record_peak
    store.record_peak = lambda: (record_peak(), alive.append(sum(size for _, size in store._copies)))[0]
    model = net()
    step = tf.function(lambda x, y: model.train_step((x, y)))
    params = LMSParams(tier="disk", spill_dir=tmp_path, min_bytes=0, ctrld_strategy="direct_order", fuse_swapins=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tflms_sft._planner.swap_planner.SpillStore", lambda *_: store)
        model.optimizer.build(model.trainable_variables)
        fast = tflms_sft.rewrite(step, params, tf.constant(X[:2]), tf.constant(Y[:2]))
    fast(X[:2], Y[:2])
    largest = max(swap.num_bytes for swap in fast.plan.swaps)
    # Two large ones, beside vectors of the batch normalization.
    assert len(alive) > 20 and max(alive) < 2.1 * largest


@pytest.mark.parametrize("dtype", ("float32", "float16", "int8", "bool", "bfloat16", "complex64"))
@pytest.mark.parametrize("shape", ((), (0,), (3,), (2, 0, 3), (2, 3, 4)))
def test_spill_store_restores_any_dtype_and_shape(tmp_path, dtype, shape):
    store = SpillStore(str(tmp_path))
    array = np.ones(shape, tf.dtypes.as_dtype(dtype).as_numpy_dtype)
    back = store.read(store.write(array, 1, "test"))
    assert back.dtype == array.dtype and back.shape == array.shape and np.array_equal(back, array)


def test_spill_store_missing_directory_is_named(tmp_path):
    store = SpillStore(str(tmp_path / "gone"))
    with pytest.raises(SpillError, match="gone' cannot be written: No such file"):
        store.write(np.ones(3), 1, "test")
    assert issubclass(SpillError, OSError) and not issubclass(SpillError, RewriteError)
