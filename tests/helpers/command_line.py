"""The program, and a directory with networks of a user, for tests of the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tflms_sft._cli.main import main

ROOT = Path(__file__).parents[2]

NETS = """
import keras
from keras import layers

def build(size=None, classes=5, top="softmax", compiled=False):
    print("noise of the user's")
    image = x = keras.Input((size, size, 3), name="image")
    for name in ("conv1", "conv2"):
        x = layers.Conv2D(8, 3, padding="same", activation="relu", name=name)(x)
    x = layers.GlobalAveragePooling2D()(layers.MaxPool2D(name="pool")(x))
    model = keras.Model(image, layers.Dense(classes, activation=top)(x), name="small")
    if compiled:
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], jit_compile=False)
    return model

def flat():
    return keras.Sequential([keras.Input((32, 32, 3)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(3)])

def nested():
    inner = build(32)
    inner.get_layer("conv1").trainable = False
    return keras.Sequential([keras.Input((32, 32, 3)), layers.Rescaling(2.0), inner])

def text():
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(50, 8)(tokens)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)])
    return keras.Model(tokens, layers.Dense(50, activation="softmax")(x), name="text")

def two_inputs():
    a, b = keras.Input((16, 16, 2), name="a"), keras.Input((None, None, 2), name="b")
    parts = [layers.GlobalMaxPooling2D()(layers.Conv2D(4, 3)(x)) for x in (a, b)]
    outputs = {"class": layers.Dense(3, activation="softmax")(parts[0]), "size": layers.Dense(1)(parts[1])}
    return keras.Model({"b": b, "a": a}, outputs)

class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.conv = layers.Conv2D(4, 3, activation="relu")
        self.head = layers.Conv2D(2, 1)

    def call(self, x):
        return self.head(self.conv(x))

def custom_loss():
    model = build(16, top=None)
    def loss(labels, logits):
        return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    model.compile("sgd", loss)
    return model

def number():
    return 3

def broken():
    raise KeyError("no such thing")
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """The working directory of a user, with networks in it."""
    (tmp_path / "zoo.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("zoo", None)


@pytest.fixture
def cli(directory, capsys):
    """Runs a command in the directory of a user; returns its exit code, stdout and stderr."""

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


def process(*command, **environment):
    """Run Python in a process of its own, and return how it ended."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=environment)
