"""Predicted kernel scratch equals that of TensorFlow's own kernels."""

import pytest
import tensorflow as tf

import tflms_sft
from rewriters.canonicalize.canonicalize import read_canonical
from rewriters.device.kernel_scratch import full_call, is_direct, op_scratch, window_bytes
from rewriters.ir.device_detection import detect_device, planned_device
from rewriters.ir.device_model import planning_for
from rewriters.ir.graph_reader import from_concrete_function

pytestmark = pytest.mark.skipif(not planned_device().unfolds_convolutions, reason="oneDNN has other kernels")


@pytest.fixture(autouse=True)
def device():
    """Plan for the machine's caches, which other tests do without."""
    with planning_for(lambda device: detect_device(device.name)):
        yield planned_device()


# Pixels a side, channels in and out, images, taps a side, stride, axes.
CALLS = [
    (64, 64, 64, 4, 3, 1, 2),
    (32, 128, 128, 4, 3, 1, 2),
    (8, 512, 512, 4, 3, 1, 2),
    (16, 16, 16, 4, 3, 1, 2),
    (64, 64, 64, 1, 3, 1, 2),
    (64, 64, 256, 4, 1, 1, 2),
    (8, 64, 64, 32, 3, 1, 2),
    (33, 24, 16, 2, 3, 2, 2),
    (32, 16, 16, 1, 3, 1, 3),
    (32, 16, 16, 2, 3, 1, 3),
    (32, 16, 16, 4, 3, 1, 3),
    (16, 16, 16, 8, 3, 1, 3),
    (48, 4, 16, 1, 3, 1, 3),
    (32, 16, 32, 1, 1, 1, 3),
    (24, 8, 12, 1, 3, 2, 3),
    (16, 8, 8, 2, 2, 2, 3),
]


def gradient(kind, size, channels, filters, images, taps, stride, axes):
    """Return a gradient of a convolution, and tensors to call it with."""
    out = -(-size // stride)
    image, result = (images, *(size,) * axes, channels), (images, *(out,) * axes, filters)
    kernel = (*(taps,) * axes, channels, filters)
    operand = image if kind == "filter" else kernel
    known, sizes = ("filter_sizes", kernel) if kind == "filter" else ("input_sizes", image)
    version = "" if axes == 2 else "V2"
    op = getattr(tf.raw_ops, f"Conv{axes}DBackprop{kind.capitalize()}{version}")
    name = "input" if kind == "filter" else "filter"

    @tf.function(input_signature=[tf.TensorSpec(operand), tf.TensorSpec(result)])
    def function(x, grad):
        strides = [1, *(stride,) * axes, 1]
        return op(**{name: x, known: sizes}, out_backprop=grad, strides=strides, padding="SAME")

    return function, (tf.random.normal(operand), tf.random.normal(result))


@pytest.mark.parametrize("kind", ["input", "filter"])
@pytest.mark.parametrize("sizes", CALLS, ids=str)
def test_scratch_bytes_equal_measured_unfolding(kind, sizes, device):
    function, operands = gradient(kind, *sizes)
    (node,) = (n for n in read_canonical(function.get_concrete_function()).nodes.values() if "Backprop" in n.op)
    held = sum(int(tf.size(x)) * 4 for x in operands)
    measured = tflms_sft.measure(function, *operands).peak_bytes - held
    assert op_scratch(node, 1, device) == measured
    assert is_direct(node, full_call(node, 1), device) == (measured == 0)
    size, channels, filters, images, taps, stride, axes = sizes
    windows = images * (-(-size // stride)) ** axes * taps**axes * (filters if measured == 0 else channels) * 4
    assert window_bytes(node, full_call(node, 1), device) == windows


@pytest.mark.parametrize("kind", ["input", "filter"])
@pytest.mark.parametrize("sizes", CALLS[:8], ids=str)
def test_scratch_of_gradient_without_shape_is_that_of_its_image(kind, sizes, device):
    """Gradients in the loop of a recurrent layer have no shape if the batch size is open."""
    function, _ = gradient(kind, *sizes)
    (node,) = (n for n in read_canonical(function.get_concrete_function()).nodes.values() if "Backprop" in n.op)
    images, expected = sizes[3], op_scratch(node, 1, device)
    grad = node.inputs[2]
    grad.node.outputs[grad.index] = (grad.dtype, (None,) * 4)
    image = node if kind == "input" else node.inputs[0].node
    image.outputs[0] = (image.outputs[0][0], (None, *image.outputs[0][1][1:]))
    assert expected and op_scratch(node, images, device) == expected


def test_unfolding_cases_cover_both_outcomes(device):
    found = []
    for sizes in CALLS:
        for kind in ("input", "filter"):
            function, _ = gradient(kind, *sizes)
            (node,) = (n for n in read_canonical(function.get_concrete_function()).nodes.values() if "Backprop" in n.op)
            found.append(op_scratch(node, 1, device) > 0)
    assert any(found) and not all(found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("op", ["MatMul", "BatchMatMulV2"])
def test_products_in_half_precision_convert_operands_and_result(op, dtype, device):
    first, second = (tf.cast(tf.random.normal(shape), dtype) for shape in ((3, 48, 32), (3, 32, 64)))
    if op == "MatMul":
        function = tf.function(lambda x, y: tf.raw_ops.MatMul(a=x, b=y), autograph=False)
        first, second = first[0], second[0]
    else:
        function = tf.function(lambda x, y: tf.raw_ops.BatchMatMulV2(x=x, y=y), autograph=False)
    graph = tf_graph(function, first, second)
    (node,) = (n for n in graph.nodes.values() if n.op == op)
    entries = sum(int(tf.size(x)) for x in (first, second, function(first, second)))
    held = sum(int(tf.size(x)) * x.dtype.size for x in (first, second))
    assert op_scratch(node, 1, device) == tflms_sft.measure(function, first, second).peak_bytes - held
    assert op_scratch(node, 1, device) == (0 if dtype == "float32" else 4 * entries)


def tf_graph(function, *operands):
    return from_concrete_function(function.get_concrete_function(*operands))
