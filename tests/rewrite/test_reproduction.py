"""A dump has the graph after each pass, a summary of the changes, and a script that rewrites the saved step again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tflms_sft
from rewriters.ir.graph_pass import dumping_to
from tflms_sft._rewrite.reproduction import reproduce

ROOT = Path(__file__).parents[2]


def train_step(model, images, labels):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(images, training=True) - labels) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable.assign_sub(0.1 * gradient)
    return loss


def model():
    image = x = keras.Input((32, 32, 3))
    for filters in (4, 8):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return keras.Model(image, layers.GlobalAveragePooling2D()(layers.BatchNormalization()(x)))


def dump(directory, params):
    with dumping_to(str(directory)):
        rewritten(params)
    (folder,) = directory.iterdir()
    return folder


def rewritten(params):
    net = model()
    step = tf.function(lambda images, labels: train_step(net, images, labels))
    return tflms_sft.rewrite(step, params, tf.TensorSpec((2, 32, 32, 3)), tf.TensorSpec((2, 8)))


@pytest.fixture(scope="module")
def tiled(tmp_path_factory):
    params = [tflms_sft.SFTParams((2, 1)), tflms_sft.LMSParams(min_bytes=1)]
    return dump(tmp_path_factory.mktemp("dump") / "tiled", params)


def test_dump_has_a_file_for_each_pass_that_changed_the_graph(tiled):
    names = [path.name for path in sorted(tiled.glob("[0-9]*.txt"))]
    passes = [re.fullmatch(r"\d\d-(\w+)\.txt", name)[1] for name in names]
    assert [int(name[:2]) for name in names] == list(range(len(names)))
    assert passes[0] == "traced" and passes[-1] == "InsertSwaps"
    assert {"prune", "MergeConstants", "insert_tile_loops", "DelayEarlyOps"} < set(passes)
    loops = (tiled / names[passes.index("insert_tile_loops")]).read_text(encoding="utf-8")
    assert re.search(r"sft/segment1/forward1/while = .* # forward, tile loop segment1/forward1 2x1", loops)
    assert re.search(r"Conv2D\(.*\) .*# layer conv2d", (tiled / names[0]).read_text(encoding="utf-8"))


def test_dump_summary_counts_and_explains_the_changes(tiled):
    summary = (tiled / "summary.txt").read_text(encoding="utf-8")
    assert summary.startswith("Plan for batch 2: 1 segment(s)")
    row = re.search(r"^\d\d-insert_tile_loops +(\d+) +(\d+) +(\d+) ", summary, re.MULTILINE)
    before = re.search(r"^\d\d-MergeConstants +(\d+) ", summary, re.MULTILINE)
    number, added, removed = map(int, row.groups())
    assert number == int(before[1]) + added - removed and min(added, removed) > 10
    assert "insert_tile_loops: Replace the ops of planned segments by tile loops.\n  added: " in summary
    assert "  ~ gradient_tape/pow/sub (Sub): waits for sub\n" in summary
    assert (
        "  segment1/forward2 runs 9 ops in each of 2x1 tiles, of which 6 run again\n"
        "    each tile reads its part of images float32[2,32,32,3]\n"
    ) in summary


def test_reproduce_one_pass_shows_its_difference(tiled, capsys):
    path = next(tiled.glob("*-insert_tile_loops.txt"))
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("Conv2DBackpropFilter(", "Conv2DForwardFilter(", 1), encoding="utf-8")
    try:
        assert not reproduce(tiled, int(path.name[:2]))
    finally:
        path.write_text(text, encoding="utf-8")
    output = capsys.readouterr().out
    assert output.startswith(f"{path.name}: differs\n--- dump\n+++ present\n")
    assert "Conv2DForwardFilter" in output and output.count(": ") and "00-traced" not in output


def test_reproduce_script_runs_in_another_process(tiled):
    command = [sys.executable, str(tiled / "reproduce.py"), "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert result.stdout == "01-prune.txt: equal\n"


def test_reproduce_same_code_gives_equal_graphs_and_a_missing_one_differs(tiled, capsys):
    extra = tiled / "99-Extra.txt"
    extra.write_text("graph(\n):\n", encoding="utf-8")
    try:
        assert not reproduce(tiled)
        *equal, last = re.findall(r"^\d\d-\w+\.txt: .*", capsys.readouterr().out, re.MULTILINE)
        assert len(equal) == len(list(tiled.glob("[0-9]*.txt"))) - 1 and last == "99-Extra.txt: differs"
        assert all(line.endswith(": equal") for line in equal)
        assert not reproduce(tiled, 99) and "99-Extra.txt: differs" in capsys.readouterr().out
    finally:
        extra.unlink()
    assert not reproduce(tiled, 98)


def test_reproduce_training_and_evaluation(tmp_path):
    """The optimizer's variables count for the peak of an evaluation, whose step does not read them."""
    net, images, labels = model(), np.ones((2, 32, 32, 3), "float32"), np.ones((2, 8), "float32")
    net.compile("adam", "mse", jit_compile=False)
    with dumping_to(str(tmp_path / "fit")):
        callback = tflms_sft.SFT((2, 1), verbose=0, batch_shape=images.shape)
        net.fit(images, labels, verbose=0, validation_data=(images, labels), callbacks=[callback])
    folders = sorted((tmp_path / "fit").iterdir())
    assert len(folders) == 2 and all(map(reproduce, folders))


def test_dump_that_cannot_be_written_warns(tmp_path):
    (tmp_path / "file").write_text("")
    with dumping_to(str(tmp_path / "file")), pytest.warns(UserWarning, match="the passes cannot be written to"):
        assert rewritten(tflms_sft.SFTParams((2, 1))).plan.changed


def test_dump_each_rewriting_has_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TFLMS_SFT_DUMP", str(tmp_path / "steps"))
    rewritten(tflms_sft.LMSParams(min_bytes=1))
    rewritten(tflms_sft.SFTParams((2, 1)))
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["step-01", "step-02"]


def test_dump_is_off_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rewritten(tflms_sft.SFTParams((2, 1))).plan.changed and not list(tmp_path.iterdir())
