"""Rules of window ops for all geometries: sizes, kernels, strides, paddings and grids."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from one_op import Const, OneOp, image

from rewriters.tiling.tile_planner import Grid

WINDOWS = {
    "Conv2D": "convolution",
    "Conv2DBackpropInput": "convolution",
    "Conv2DBackpropFilter": "convolution",
    "DepthwiseConv2dNative": "depthwise",
    "DepthwiseConv2dNativeBackpropInput": "depthwise",
    "DepthwiseConv2dNativeBackpropFilter": "depthwise",
    "MaxPool": "pool",
    "MaxPoolGrad": "pool",
    "AvgPool": "pool",
    "AvgPoolGrad": "pool",
}


@st.composite
def windows(draw, family: str) -> tuple[tuple[int, int], tuple[int, int], dict[str, Any], Grid]:
    """Draw image size, kernel, attributes and a grid; tiles may be thinner than a halo, and more than rows."""
    size = draw(st.tuples(st.integers(5, 15), st.integers(5, 15)))
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    if family == "depthwise":
        stride = stride[:1] * 2  # The op takes nothing else.
    padding = draw(st.sampled_from(["SAME", "VALID"] if family == "pool" else ["SAME", "VALID", "EXPLICIT"]))
    attrs: dict[str, Any] = {"strides": [1, *stride, 1], "padding": padding}
    if padding == "EXPLICIT":
        sides = [draw(st.integers(0, k - 1)) for k in kernel for _ in range(2)]
        attrs["explicit_paddings"] = [0, 0, *sides, 0, 0]
    grid = Grid(draw(st.integers(1, 2)), (draw(st.integers(1, 6)), draw(st.integers(1, 6))))
    return size, kernel, attrs, grid


def window_operands(
    op_type: str, size: tuple[int, int], kernel: tuple[int, int], attrs: dict[str, Any]
) -> dict[str, Any]:
    """Return operands for an op of `WINDOWS`; the small side has TensorFlow's size."""
    x = image(2, *size, 2)
    if WINDOWS[op_type] == "pool":
        attrs = attrs | {"ksize": [1, *kernel, 1]}
        if op_type.startswith("Max"):
            x = np.round(x)  # Ties.
            y = tf.raw_ops.MaxPool(input=tf.constant(x), **attrs).numpy()
            return {"input": x, **attrs} if op_type == "MaxPool" else max_pool_operands(x, y, attrs)
        y = tf.raw_ops.AvgPool(value=tf.constant(x), **attrs).numpy()
        gradient = {"orig_input_shape": Const(x.shape), "grad": image(*y.shape), **attrs}
        return {"value": x, **attrs} if op_type == "AvgPool" else gradient
    w = image(*kernel, 2, 2)
    depthwise = WINDOWS[op_type] == "depthwise"
    forward = tf.raw_ops.DepthwiseConv2dNative if depthwise else tf.raw_ops.Conv2D
    y = image(*forward(input=tf.constant(x), filter=tf.constant(w), **attrs).shape)
    if op_type.endswith("Input"):
        return {"input_sizes": Const(x.shape), "filter": w, "out_backprop": y, **attrs}
    if op_type.endswith("Filter"):
        return {"input": x, "filter_sizes": Const(w.shape), "out_backprop": y, **attrs}
    return {"input": x, "filter": w, **attrs}


def max_pool_operands(x: np.ndarray, y: np.ndarray, attrs: dict[str, Any]) -> dict[str, Any]:
    return {"orig_input": x, "orig_output": y, "grad": image(*y.shape), **attrs}


def check_windows(op_type: str, drawn: tuple[Any, ...]) -> None:
    size, kernel, attrs, grid = drawn
    assert not OneOp(op_type, window_operands(op_type, size, kernel, attrs)).differing(grid)


@pytest.mark.parametrize("op_type", WINDOWS)
@settings(deadline=None, max_examples=8, derandomize=True)
@given(data=st.data())
def test_windows_of_any_geometry(op_type, data):
    check_windows(op_type, data.draw(windows(WINDOWS[op_type])))


@pytest.mark.slow
@pytest.mark.parametrize("op_type", WINDOWS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_window_rules_of_any_geometry_long(op_type, data):
    check_windows(op_type, data.draw(windows(WINDOWS[op_type])))
