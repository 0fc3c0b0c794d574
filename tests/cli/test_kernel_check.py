"""`tflms-sft doctor --kernels`: the GPU kernels of small steps, on a machine without a GPU."""

import json

import keras
import pytest
import tensorflow as tf

from tflms_sft._cli import doctor, kernel_check
from tflms_sft._cli.main import main


@pytest.fixture
def checked(monkeypatch, capsys):
    """Run the check alone on some networks; return its exit code and stdout."""
    for name in ("_machine", "_tensorflow", "_budget", "_keras", "_try_tiles"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    for name in ("_spill", "_try_swaps"):
        monkeypatch.setattr(doctor, name, lambda directory: iter(()))

    def run(networks, *arguments):
        monkeypatch.setattr(kernel_check, "example_networks", lambda: networks)
        return main(["doctor", "--kernels", "--quiet", *arguments]), capsys.readouterr().out

    return run


needs_kernels = pytest.mark.skipif(not tf.test.is_built_with_cuda(), reason="needs a build with GPU kernels")


@needs_kernels
@pytest.mark.parametrize("names", [["segmentation"], ["images", "mixed precision", "volumes", "attention"]])
def test_ops_of_small_steps_have_gpu_kernels(names, checked):
    networks = {name: network for name, network in kernel_check.example_networks().items() if name in names}
    assert list(networks) == names
    policy = keras.config.dtype_policy()
    code, out = checked(networks, "--json")
    found = json.loads(out)
    lines = {line["name"]: line for line in found["lines"]}
    assert (code, found["ok"]) == (0, True) and keras.config.dtype_policy() is policy
    assert lines["GPU kernels"]["text"].endswith("without a GPU kernel: none")
    assert {row["GPU kernel"] for row in found["kernels"]} == {"yes"}
    rows = {(row["op"], row["type"]): row for row in found["kernels"]}
    padded = [row["where"] for row in found["kernels"] if row["op"] == "PadV2"]
    assert all(any(f"{name} (loop)" in where for where in padded) for name in names)
    assert rows["StridedSlice", "float32"]["host arguments"] == "begin end strides"
    assert rows["StridedSlice", "int32"]["host arguments"] == "begin end input output strides"


@needs_kernels
def test_op_without_a_gpu_kernel_fails(checked):
    class OnHost(keras.layers.Layer):
        def call(self, x):
            return x + tf.ensure_shape(tf.numpy_function(lambda y: 0 * y, [x], x.dtype), x.shape)

        def compute_output_shape(self, input_shape):
            return input_shape

    def build():
        image = keras.Input((8, 8, 3))
        x = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(4, 3, padding="same")(image))
        return keras.Model(image, OnHost()(x))

    code, out = checked({"host": (2, "float32", build)})
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 1 and any(
        line.startswith("FAILED GPU kernels") and line.endswith("kernel: PyFunc float32") for line in lines
    )
    assert lines[lines.index("op type GPU kernel host arguments where") + 1] == "PyFunc float32 no host"


@needs_kernels
def test_tensors_that_loops_copy_fail(checked, monkeypatch):
    monkeypatch.setattr("rewriters.emission.loop_emitter.reads_gpu_memory", lambda graph, node, tensor: False)
    code, out = checked({"volumes": kernel_check.example_networks()["volumes"]})
    (line,) = [line for line in out.splitlines() if "GPU copies" in line]
    assert code == 1 and line.startswith("FAILED") and "(int32) of volumes" in line


def test_build_without_gpu_kernels_fails_with_a_sentence(checked, monkeypatch):
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: False)
    code, out = checked(kernel_check.example_networks())
    assert code == 1 and "The installed TensorFlow has no GPU kernels to check." in out and "host arguments" not in out
