"""Results of tile loops in files: equal to the original step, without traces on the disk, and unchanged by failures."""

import dataclasses
import errno
import gc
import importlib
import math
import os
import signal
import subprocess
import sys
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, Step, error, keras_step, noise_step

import tflms_sft
from rewriters.emission import file_buffers
from rewriters.emission.file_buffers import FileBuffers, FilePool
from rewriters.estimates.loop_memory import IterationModel
from rewriters.swapping.spill_store import SpillError
from tflms_sft._planner import budget_plan, budget_search

pytestmark = pytest.mark.usefixtures("double_precision")

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


@pytest.fixture
def in_files(monkeypatch, tmp_path, set_min_file_bytes):
    """Write all results of tile loops to files of a directory, which hold NaN; return the shapes of these files."""
    shapes = []
    array = FilePool.array

    def recorded(pool, shape, dtype, zero):
        shapes.append(tuple(shape))
        result = array(pool, shape, dtype, zero)
        if not zero:
            result[...] = np.nan
        return result

    set_min_file_bytes(0)
    monkeypatch.setattr(FilePool, "array", recorded)
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
    assert not list(file_buffers.mapped_files) and not os.listdir(directory)


@pytest.mark.parametrize("known_batch", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_with_results_in_files_equal_the_original(in_files, sizes_created, tmp_path, name, known_batch):
    make, params = STEPS[name]
    errors = errors_of(make(known_batch=known_batch), params)
    assert {name: value for name, value in errors.items() if not value <= TOLERANCE} == {}
    assert 1 <= len(sizes_created) < len(in_files)
    assert_no_files(tmp_path)


def test_loop_of_one_tile_writes_its_results_to_files(in_files, monkeypatch):
    """The value of its only iteration must not take the place of the file."""
    array, arrays = FilePool.array, []

    def recorded(*arguments):
        arrays.append(array(*arguments))
        return arrays[-1]

    monkeypatch.setattr(FilePool, "array", recorded)
    errors = errors_of(keras_step(residual, (20, 16)), tflms_sft.SFTParams((1, 1), memory_capacity=1))
    assert {name: value for name, value in errors.items() if not value <= TOLERANCE} == {}
    assert len(arrays) >= 8
    assert all(np.nan_to_num(array).any() for array in arrays), "neither zeros nor NaN as at the beginning"


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
    array = FilePool(str(tmp_path)).array((64, 2**17), np.dtype("float32"), False)
    before = resident_file_bytes()
    array[...] = 3
    assert resident_file_bytes() - before > array.nbytes / 2
    file_buffers.release_pages()
    assert resident_file_bytes() - before < array.nbytes / 2
    assert array.min() == array.max() == 3


@pytest.fixture
def sizes_created(monkeypatch):
    """Sizes of the files that are created."""
    created, new_file = [], file_buffers.create_file

    def recorded(directory, size):
        created.append(size)
        return new_file(directory, size)

    monkeypatch.setattr(file_buffers, "create_file", recorded)
    return created


def test_file_of_an_array_that_died_serves_again(tmp_path, sizes_created):
    pool, floats, mib = FilePool(str(tmp_path)), np.dtype("float32"), 2**20
    array = pool.array((3, 2**18), floats, False)
    other = pool.array((2**18,), floats, True)
    array[...] = 3
    del array
    again = pool.array((3 * 2**17, 2), floats, True)
    assert sizes_created == [3 * mib, mib] and not again.any() and not other.any()
    again[...] = 5
    del again
    assert (pool.array((3, 2**18), floats, False) == 5).all() and len(sizes_created) == 2


def test_zeros_are_written_whole_or_the_error_names_the_disk(tmp_path, monkeypatch):
    pool, numbers, write = FilePool(str(tmp_path)), np.dtype("uint8"), os.pwrite
    pool.array((1000,), numbers, False)[...] = 3
    monkeypatch.setattr(os, "pwrite", lambda file, data, begin: write(file, data[:300], begin))
    array = pool.array((1000,), numbers, True)
    assert not array.any()
    del array

    def failing(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(SpillError, match="A tensor between tile loops needs 1000 bytes"):
        pool.array((1000,), numbers, True)


def test_files_of_sizes_that_no_step_uses_are_deleted(tmp_path, sizes_created):
    pool, numbers = FilePool(str(tmp_path)), np.dtype("uint8")
    for size in (1000, 1001, 1002, 1003, 1000, 400, 401, 400, 401):
        pool.array((size,), numbers, False)
        assert sum(map(len, pool._free)) + size <= file_buffers.POOL_SLACK * 1003
    assert sizes_created == [1000, 1001, 1002, 1003, 1000, 400, 401]


def test_file_pool_deletes_free_files_where_the_disk_is_full(tmp_path, monkeypatch):
    pool, numbers, allocate, failed = FilePool(str(tmp_path)), np.dtype("uint8"), os.posix_fallocate, []
    held, *others = [pool.array((1000,), numbers, False) for _ in range(3)]
    others.clear()

    def limited(file, begin, size):
        if pool._free:
            failed.append(size)
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    assert len(pool.array((1500,), numbers, True)) == 1500 and failed == [1500] and len(held) == 1000


def test_half_precision_equals_tiles_in_memory(in_files, tmp_path, monkeypatch):
    """Activations lie in files; gradients of images, which are summed in single precision, do not."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    step, params = keras_step(residual, (20, 16), floatx="float32"), tflms_sft.SFTParams((3, 2), memory_capacity=1)
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
        file_buffers._pool(str(tmp_path)).clear()

        def failing(*arguments, number=number, calls=calls):
            calls.append(arguments)
            if len(calls) >= number:
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
def large_step(monkeypatch, set_rates, set_min_file_bytes):
    """Return a step whose tiles in memory recompute activations, on a machine that copies fast."""
    set_min_file_bytes(2**14)
    monkeypatch.setattr(budget_search, "MAX_TIME_RATIO_ALONE", 1.0)
    set_rates(copied=1e11)
    return keras_step(lambda x: residual(normalised(4)(x)), (256, 192), floatx="float32")


@pytest.fixture
def set_free_disk(monkeypatch):
    """Return a function that sets the free bytes of all disks."""

    def set_free_disk(num_bytes):
        monkeypatch.setattr(budget_plan.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=num_bytes))

    return set_free_disk


def with_budget(step, directory, budget=BUDGET, **options):
    swap = options.pop("swap", tflms_sft.LMSParams(tier="disk", spill_dir=directory, min_bytes=0))
    return tflms_sft.rewrite(step.function, tflms_sft.AutoParams(budget, swap=swap, **options), *step.specs)


def lies_in_files(plan, directory):
    return any("between tile loops" in note and f"files of '{directory}'" in note for note in plan.notes)


def test_files_take_the_predicted_bytes(large_step, tmp_path, monkeypatch, sizes_created):
    """A file serves again after the last loop that reads it, and in the next step."""
    sizes, peaks = [], []
    create = FilePool.array

    def array(*arguments):
        result = create(*arguments)
        sizes.append(result.nbytes)
        peaks.append(sum(map(len, list(file_buffers.mapped_files))))
        return result

    monkeypatch.setattr(FilePool, "array", array)
    rewritten = with_budget(large_step, tmp_path)
    batch = [tf.constant(array) for array in large_step.batches[0]]
    rewritten(*batch)
    assert 0 < max(peaks) <= file_buffers.POOL_SLACK * rewritten.plan.file_bytes
    first, number = len(sizes_created), len(sizes)
    for _ in range(2):
        rewritten(*batch)
    assert max(peaks) <= file_buffers.POOL_SLACK * rewritten.plan.file_bytes < sum(sizes[:number])
    assert first == len(sizes_created) < number and len(sizes) == 3 * number
    note = f"{number} tensors between tile loops lie in files"
    assert any(note in line for line in rewritten.plan.notes)


def test_budget_writes_results_to_files_where_tiles_in_memory_are_slower(large_step, tmp_path):
    in_memory = with_budget(large_step, tmp_path, swap=False).plan
    rewritten = with_budget(large_step, tmp_path)
    assert lies_in_files(rewritten.plan, tmp_path) and not lies_in_files(in_memory, tmp_path)
    assert in_memory.predicted.time_ratio > rewritten.plan.predicted.time_ratio
    assert rewritten.plan.predicted.peak_bytes <= 0.9 * BUDGET
    want, got = large_step.run(large_step.concrete_fn), large_step.run(rewritten)
    assert max(error(got[name], want[name]) for name in want) < 1e-3  # Single precision.
    del rewritten
    assert_no_files(tmp_path)


def test_files_are_not_used_without_the_page_cache_or_room(large_step, tmp_path, set_free_disk):
    swap = tflms_sft.LMSParams(tier="disk", spill_dir=tmp_path, min_bytes=0, page_cache=False)
    assert not lies_in_files(with_budget(large_step, tmp_path, swap=swap).plan, tmp_path)
    set_free_disk(1000)
    assert not lies_in_files(with_budget(large_step, tmp_path).plan, tmp_path)


def test_smallest_plan_of_a_chain_needs_no_room_on_a_full_disk(tmp_path, set_free_disk, set_min_file_bytes):
    """Without room for files the smallest budget is that of tiles in memory, and it can be met."""
    set_min_file_bytes(2**12)
    step, budgets = keras_step(convolutions, (64, 48)), []
    swap = tflms_sft.LMSParams(tier="disk", spill_dir=tmp_path, n_tensors=1, min_bytes="1GiB")
    for free in (2**40, 0):
        set_free_disk(free)
        with pytest.raises(tflms_sft.BudgetError) as caught:
            with_budget(step, tmp_path, 20_000, swap=swap)
        budgets.append(caught.value.smallest_bytes)
    assert budgets[0] < budgets[1]
    plan = with_budget(step, tmp_path, budgets[1], swap=swap, max_slowdown=math.inf).plan
    assert plan.segments and not lies_in_files(plan, tmp_path)


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
params = tflms_sft.AutoParams(12_000_000, swap=swap, max_slowdown=1e9)
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
