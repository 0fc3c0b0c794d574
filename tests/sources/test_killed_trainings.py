"""A training that is killed at any moment leaves no file, and goes on to the same weights."""

import multiprocessing
import os
import pathlib
import random
import signal

import killed_training
import numpy as np
import pytest
from image_files import zarr


@pytest.fixture(scope="module")
def start():
    """Start a training in a process of its own, forked from one that has imported TensorFlow."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensorflow", "keras", "zarr", "tflms_sft", "killed_training"])

    def begin(folder, steps):
        parent, child = context.Pipe(duplex=False)
        process = context.Process(target=killed_training.train, args=(str(folder), steps, child), daemon=True)
        process.start()
        child.close()
        return process, parent

    return begin


def prepared(folder):
    """Write an image and a mask to a new folder."""
    (folder / "spill").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, killed_training.SHAPE).astype("uint8")
    for name, values in (("image", pixels), ("mask", pixels[..., 0] % 3)):
        array = zarr().create_array(
            str(folder / f"{name}.zarr"),
            shape=values.shape,
            chunks=(128, 128, *values.shape[2:]),
            dtype="uint8",
            config={"write_empty_chunks": True},
        )
        array[...] = values
    return folder


def saved(folder):
    """Return the steps that a model has taken, and its saved weights and slots of the optimizer."""
    model = killed_training.build(killed_training.SHAPE)
    model.load_weights(folder / "saved.weights.h5")
    return int(model.optimizer.iterations), list(map(np.array, (*model.variables, *model.optimizer.variables)))


def received(connection):
    """Return the next step that a training begins."""
    assert connection.poll(120), "no step has begun"
    return connection.recv()


def holds_files(process, folder):
    """Return whether a process has unnamed files of a folder in its memory."""
    maps = pathlib.Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return any(str(folder) in line and "(deleted)" in line for line in maps)


@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_training_leaves_no_file_and_goes_on(start, tmp_path, kills):
    moments, folder, begun, with_files = random.Random(kills), prepared(tmp_path / "killed"), 0, 0
    for number in range(kills):
        process, connection = start(folder, 10**6)
        assert received(connection) >= begun
        # The first step includes tracing and planning. Most kills hit a later one.
        in_first_step = number % 4 == 0
        begun = begun if in_first_step else received(connection)
        process.join(moments.uniform(0, 2 if in_first_step else 0.5))
        while connection.poll():
            begun = connection.recv()
        with_files += holds_files(process, folder / "spill")
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert os.listdir(folder / "spill") == []
    assert with_files >= kills // 20, "few kills hit a step that has tensors in files"
    steps, finished = begun + 2, [folder, prepared(tmp_path / "whole")]
    for each in finished:
        process, connection = start(each, steps)
        process.join(300)
        assert process.exitcode == 0 and os.listdir(each / "spill") == []
    (steps_killed, killed), (steps_whole, whole) = map(saved, finished)
    assert steps_killed == steps_whole == steps
    for got, expected in zip(killed, whole, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
