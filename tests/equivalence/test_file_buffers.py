"""Results of tile loops in files: equal to the original step, without traces on the disk, and unchanged by failures."""

import dataclasses
import errno
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import types
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, Step, error, keras_step, noise_step

import tflms_sft
from rewriters.emission import file_buffers
from rewriters.emission.file_buffers import FileBuffers
from rewriters.estimates.loop_memory import IterationModel
from rewriters.estimates.op_cost import NOMINAL
from tflms_sft._planner import budget_search

L = keras.layers


def normalised(filters, strides=1):
    def apply(x):
        x = L.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
        return L.ReLU()(L.BatchNormalization()(x))

    return apply


def residual(x):
    x = normalised(4)(x)
    return normalised(6, 2)(L.Add()([x, normalised(4)(x)]))


def convolutions(x):
    for filters in (4, 4, 6):
        x = L.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return L.MaxPooling2D(2)(x)


def unet(x):
    skip = normalised(4)(x)
    x = L.Conv2DTranspose(4, 2, 2)(normalised(6)(L.MaxPooling2D(2)(skip)))
    return normalised(4)(L.Concatenate()([skip, x]))


def attention_step(**options):
    tokens = keras.Input((24, 8))
    x = L.LayerNormalization()(tokens)
    x = L.Add()([tokens, L.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)])
    return noise_step(keras.Model(tokens, L.Dense(5)(L.LayerNormalization()(x))), 5, 2, 2, **options)


STEPS = {
    "residual": (lambda **options: keras_step(residual, (20, 16), **options), tflms_sft.SFTParams((3, 2))),
    "convolutions": (lambda **options: keras_step(convolutions, (20, 16), **options), tflms_sft.SFTParams((3, 2))),
    "strips": (
        lambda **options: keras_step(convolutions, (32, 16), **options),
        tflms_sft.SFTParams((4, 1), halo="carry"),
    ),
    "normalised strips": (
        lambda **options: keras_step(residual, (32, 16), **options),
        tflms_sft.SFTParams((4, 1), halo="carry"),
    ),
    "unet": (lambda **options: keras_step(unet, (20, 16), **options), tflms_sft.SFTParams((2, 2))),
    "attention": (attention_step, tflms_sft.SFTParams((1, 4))),
}


@pytest.fixture(autouse=True)
def double_precision():
    keras.config.set_floatx("float64")


@pytest.fixture
def in_files(monkeypatch, tmp_path):
    """Write all results of tile loops to files of a directory; return the shapes of these files."""
    shapes = []
    mapped_zeros = file_buffers._mapped_zeros

    def recorded(directory, shape, dtype):
        shapes.append(tuple(shape))
        return mapped_zeros(directory, shape, dtype)

    monkeypatch.setattr(file_buffers, "MIN_FILE_BYTES", 0)
    monkeypatch.setattr(file_buffers, "_mapped_zeros", recorded)
    rewrite = importlib.import_module("tflms_sft._rewrite.rewrite")
    analyse_step = rewrite.analyse_step

    def analysed(*arguments, **options):
        traced = analyse_step(*arguments, **options)
        return dataclasses.replace(traced, files=FileBuffers(str(tmp_path), traced.batch))

    monkeypatch.setattr(rewrite, "analyse_step", analysed)
    return shapes


def errors_of(step: Step, params):
    rewritten = tflms_sft.rewrite(step.function, params, *step.specs)
    assert rewritten.plan.segments
    want, got = step.run(step.concrete_fn), step.run(rewritten)
    return {name: error(got[name], want[name]) for name in want}


def assert_no_files(directory):
    gc.collect()
    tf.convert_to_tensor(np.ones(3))  # TensorFlow frees arrays of Python functions when it converts the next one.
    assert not list(file_buffers._mapped) and not os.listdir(directory)


@pytest.mark.parametrize("known_batch", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_with_results_in_files_equal_the_original(in_files, tmp_path, name, known_batch):
    make, params = STEPS[name]
    errors = errors_of(make(known_batch=known_batch), params)
    assert {name: value for name, value in errors.items() if not value <= TOLERANCE} == {}
    assert len(in_files) >= 2
    assert_no_files(tmp_path)


def test_loop_of_one_tile_writes_its_results_to_files(in_files, tmp_path, monkeypatch):
    """The value of its only iteration must not take the place of the file."""
    mapped_zeros, arrays = file_buffers._mapped_zeros, []

    def recorded(*arguments):
        arrays.append(mapped_zeros(*arguments))
        return arrays[-1]

    monkeypatch.setattr(file_buffers, "_mapped_zeros", recorded)
    errors = errors_of(keras_step(residual, (20, 16)), tflms_sft.SFTParams((1, 1)))
    assert {name: value for name, value in errors.items() if not value <= TOLERANCE} == {}
    assert len(arrays) >= 8
    assert all(array.any() for array in arrays)


def test_iteration_counts_the_pages_of_files(in_files, monkeypatch):
    step, params = keras_step(residual, (20, 16)), tflms_sft.SFTParams((3, 2))
    counted = tflms_sft.rewrite(step.function, params, *step.specs).plan.segments
    monkeypatch.setattr(IterationModel, "_add_pages", lambda *_: None)
    without = tflms_sft.rewrite(step.function, params, *step.specs).plan.segments
    assert [segment.tile_rows for segment in counted] == [segment.tile_rows for segment in without]
    assert all(sum(a.tile_bytes) > sum(b.tile_bytes) for a, b in zip(counted, without, strict=True))


def resident_file_bytes():
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssFile"))


def test_returned_pages_keep_their_contents(tmp_path):
    array = file_buffers._mapped_zeros(str(tmp_path), (64, 2**17), np.dtype("float32"))
    before = resident_file_bytes()
    array[...] = 3
    assert resident_file_bytes() - before > array.nbytes / 2
    file_buffers._return_pages()
    assert resident_file_bytes() - before < array.nbytes / 2
    assert array.min() == array.max() == 3


def test_half_precision_equals_tiles_in_memory(in_files, tmp_path, monkeypatch):
    """Activations lie in files; gradients of images, which are summed in single precision, do not."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    step, params = keras_step(residual, (20, 16), floatx="float32"), tflms_sft.SFTParams((3, 2))
    got = step.run(tflms_sft.rewrite(step.function, params, *step.specs))
    assert in_files
    assert_no_files(tmp_path)
    monkeypatch.setattr(FileBuffers, "results", lambda *_: set())
    expected = step.run(tflms_sft.rewrite(step.function, params, *step.specs))
    assert max(error(got[name], expected[name]) for name in expected) < 1e-6


def test_files_that_cannot_be_created_change_no_variable(in_files, tmp_path, monkeypatch):
    step = keras_step(residual, (20, 16))
    rewritten = tflms_sft.rewrite(step.function, tflms_sft.SFTParams((3, 2)), *step.specs)
    batch = [tf.constant(array) for array in step.batches[0]]
    rewritten(*batch)
    num_files = len(in_files)
    assert num_files >= 4
    allocate = os.posix_fallocate
    for number in range(1, num_files + 1):
        before, calls = [np.array(v) for v in step.variables], []

        def failing(*arguments, number=number, calls=calls):
            calls.append(arguments)
            if len(calls) == number:
                raise OSError(errno.ENOSPC, "No space left on device")
            return allocate(*arguments)

        monkeypatch.setattr(os, "posix_fallocate", failing)
        text = f"(?s)SpillError: The disk of .{tmp_path}. is full.*needs .* bytes, .* are free.*spill_dir="
        with pytest.raises(tf.errors.OpError, match=text):
            rewritten(*batch)
        assert all(np.array_equal(a, np.array(b)) for a, b in zip(before, step.variables, strict=True)), number
        assert_no_files(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    rewritten(*batch)
    assert not np.array_equal(before[0], np.array(step.variables[0]))


# Budgets ----------------------------------------------------------------------------------------------------

BUDGET = 12_000_000


@pytest.fixture
def large_step(monkeypatch):
    """Return a step whose tiles in memory recompute activations, on a machine that copies fast."""
    monkeypatch.setattr(file_buffers, "MIN_FILE_BYTES", 2**14)
    monkeypatch.setattr(budget_search, "MAX_TIME_RATIO_ALONE", 1.0)
    rewrite = importlib.import_module("tflms_sft._rewrite.rewrite")
    monkeypatch.setattr(rewrite, "machine_rates", lambda _: dataclasses.replace(NOMINAL, copied=1e11))
    return keras_step(lambda x: residual(normalised(4)(x)), (256, 192), floatx="float32")


def with_budget(step, directory, budget=BUDGET, **options):
    swap = options.pop("swap", tflms_sft.LMSParams(tier="disk", spill_dir=directory, min_bytes=0))
    return tflms_sft.rewrite(step.function, tflms_sft.AutoParams(budget, swap=swap, **options), *step.specs)


def lies_in_files(plan, directory):
    return any("between tile loops" in note and f"files of '{directory}'" in note for note in plan.notes)


def test_files_take_at_most_the_predicted_bytes(large_step, tmp_path, monkeypatch):
    """Files are created when a loop begins, and deleted after the last loop that reads them."""
    sizes, total, peak, lock = [], 0, 0, threading.Lock()
    create = file_buffers._mapped_zeros

    def note(num_bytes):
        nonlocal total, peak
        with lock:
            total += num_bytes
            peak = max(peak, total)

    def zeros(directory, shape, dtype):
        array = create(directory, shape, dtype)
        sizes.append(array.nbytes)
        note(array.nbytes)
        pages = array
        while isinstance(pages.base, np.ndarray):
            pages = pages.base
        weakref.finalize(pages, note, -array.nbytes)
        return array

    monkeypatch.setattr(file_buffers, "_mapped_zeros", zeros)
    rewritten = with_budget(large_step, tmp_path)
    rewritten(*map(tf.constant, large_step.batches[0]))
    assert total == 0 < peak <= rewritten.plan.file_bytes < sum(sizes)
    assert any(f"{len(sizes)} tensors between tile loops lie in files" in note for note in rewritten.plan.notes)


def test_budget_writes_results_to_files_where_tiles_in_memory_are_slower(large_step, tmp_path):
    in_memory = with_budget(large_step, tmp_path, swap=False).plan
    rewritten = with_budget(large_step, tmp_path)
    assert lies_in_files(rewritten.plan, tmp_path) and not lies_in_files(in_memory, tmp_path)
    assert in_memory.predicted.time_ratio > rewritten.plan.predicted.time_ratio
    assert rewritten.plan.predicted.peak_bytes <= 0.9 * BUDGET
    want, got = large_step.run(large_step.concrete_fn), large_step.run(rewritten)
    assert max(error(got[name], want[name]) for name in want) < 1e-3  # Single precision.
    assert_no_files(tmp_path)


def test_files_are_not_used_without_the_page_cache_or_room(large_step, tmp_path, monkeypatch):
    swap = tflms_sft.LMSParams(tier="disk", spill_dir=tmp_path, min_bytes=0, page_cache=False)
    assert not lies_in_files(with_budget(large_step, tmp_path, swap=swap).plan, tmp_path)
    monkeypatch.setattr(budget_search.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1000))
    assert not lies_in_files(with_budget(large_step, tmp_path).plan, tmp_path)


def test_saved_plan_writes_to_the_same_files(large_step, tmp_path):
    plan = with_budget(large_step, tmp_path).plan
    plan.save(tmp_path / "plan.json")
    again = with_budget(large_step, tmp_path, plan=tmp_path / "plan.json").plan
    assert again.predicted.peak_bytes == plan.predicted.peak_bytes
    assert lies_in_files(again, tmp_path)


KILLED = """
import sys, keras, numpy as np, tensorflow as tf, tflms_sft
from rewriters.emission import file_buffers
L = keras.layers
file_buffers.MIN_FILE_BYTES = 2**14
x = image = keras.Input((256, 192, 3), batch_size=2)
for filters in (4, 4, 4, 6):
    x = L.ReLU()(L.BatchNormalization()(L.Conv2D(filters, 3, padding="same")(x)))
model = keras.Model(image, L.Dense(3)(L.GlobalAveragePooling2D()(x)))
model.compile("sgd", "mse", jit_compile=False)
swap = tflms_sft.LMSParams(tier="disk", spill_dir=sys.argv[1], min_bytes=0)
params = tflms_sft.AutoParams(12_000_000, swap=swap)
data = tf.zeros((2, 256, 192, 3)), tf.zeros((2, 3))
model.optimizer.build(model.trainable_variables)
step = tflms_sft.rewrite(tf.function(lambda x, y: model.train_step((x, y)), autograph=False), params, *data)
assert any("lie in files" in note for note in step.plan.notes), step.plan
print("ready", flush=True)
while True:
    step(*data)
"""


def test_killed_process_leaves_no_file(tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.5)
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL and os.listdir(tmp_path) == []
