"""Regions of full-size tensors, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from rewriters.emission.buffers import DeviceBuffer, FileBuffer, empty_buffer, stacked
from rewriters.ir.device_detection import planned_device

SHAPE = (3, 5, 4)


@st.composite
def regions(draw):
    """Begin and size of every dimension, or `None`."""
    spans = []
    for extent in SHAPE:
        begin = draw(st.integers(0, extent - 1))
        spans.append(draw(st.sampled_from([None, (begin, draw(st.integers(1, extent - begin)))])))
    return spans


def slices(region):
    return tuple(slice(None) if span is None else slice(span[0], sum(span)) for span in region)


def as_tensors(region):
    """Return a region whose numbers are known at run time only."""
    return [None if span is None else tuple(tf.constant(n) for n in span) for span in region]


def run(method, region, value=None, at_run_time=False):
    """Call one method of a buffer inside a `tf.function`; return the tensor before and the result."""

    @tf.function(autograph=False)
    def body(whole, part):
        buffer = DeviceBuffer(whole, planned_device())
        spans = as_tensors(region) if at_run_time else region
        return buffer.read(spans) if method == "read" else getattr(buffer, method)(spans, part)

    whole = np.arange(60.0).reshape(SHAPE)
    part = tf.constant(whole if value is None else value)
    return whole, np.array(body(tf.constant(whole), part))


@settings(deadline=None, max_examples=25, derandomize=True)
@given(regions(), st.booleans())
def test_device_buffer_read_write_accumulate_regions(region, at_run_time):
    whole, result = run("read", region, at_run_time=at_run_time)
    np.testing.assert_array_equal(result, whole[slices(region)])
    value = -1.0 - np.random.default_rng(0).random(result.shape)
    for method in ("write", "accumulate"):
        whole, result = run(method, region, value, at_run_time)
        whole[slices(region)] = value if method == "write" else whole[slices(region)] + value
        np.testing.assert_array_equal(result, whole)


def test_device_buffer_read_keeps_static_sizes():
    @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 3), tf.float32)])
    def body(x):
        part = DeviceBuffer(x, planned_device()).read([None, (tf.shape(x)[0], 5), (2, tf.shape(x)[0]), None])
        assert part.shape.as_list() == [None, 5, None, 3]
        whole = DeviceBuffer(x, planned_device()).accumulate([None, (1, 5), (0, tf.shape(x)[0]), None], part)
        assert whole.shape.as_list() == [None, 8, 8, 3]
        return whole

    assert body(tf.ones((2, 8, 8, 3))).shape == (2, 8, 8, 3)


def test_device_buffer_full_region_is_not_copied():
    @tf.function(autograph=False)
    def body(x):
        assert DeviceBuffer(x, planned_device()).read([None, None]) is x
        return DeviceBuffer(x, planned_device()).write([None, None], x + 1.0)

    function = body.get_concrete_function(tf.TensorSpec((2, 3), tf.float32))
    assert not {"StridedSlice", "TensorStridedSliceUpdate"} & {op.type for op in function.graph.get_operations()}
    assert np.all(function(tf.zeros((2, 3))) == 1.0)


@pytest.mark.parametrize("rows", [2, None])
def test_file_buffer_full_region_is_written_in_place(rows):
    @tf.function(input_signature=[tf.TensorSpec((rows, 3)), tf.TensorSpec((rows, 3))])
    def body(whole, part):
        device = planned_device()
        buffer = FileBuffer(FileBuffer(whole, device).write([None, None], part), device)
        return buffer.accumulate([None, None], part)

    whole, part = tf.zeros((2, 3)), tf.constant([[1.0, 2, 3], [4, 5, 6]])
    result = body(whole, part)
    assert result.shape == (2, 3)
    np.testing.assert_array_equal(result, 2 * part.numpy())
    np.testing.assert_array_equal(whole, result)  # The same memory.


def test_device_buffer_filled_by_loop():
    @tf.function(input_signature=[tf.TensorSpec((None, 6), tf.float32)])
    def body(x):
        rows = tf.shape(x)[0]
        buffer = empty_buffer(stacked([rows, 6]), tf.float32, True, planned_device())

        def turn(tile, buffer):
            part = DeviceBuffer(x, planned_device()).read([None, (2 * tile, 3)])
            return tile + 1, DeviceBuffer(buffer, planned_device()).accumulate([None, (2 * tile, 3)], part)

        shapes = (tf.TensorShape([]), tf.TensorShape([None, 6]))
        return tf.while_loop(lambda tile, _: tile < 2, turn, (tf.constant(0), buffer), shapes)[1]

    x = np.arange(12.0, dtype="float32").reshape(2, 6)
    np.testing.assert_array_equal(body(tf.constant(x)), x * [1, 1, 2, 1, 1, 0])


@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.float64, tf.int32])
def test_empty_buffer_zero_is_zero(dtype):
    assert np.all(tf.function(lambda: empty_buffer(stacked([50, 50]), dtype, True, planned_device()))() == 0)


def test_stacked_integers_is_constant():
    @tf.function(autograph=False)
    def body(n):
        return stacked([1, 2]), stacked([1, n])

    function = body.get_concrete_function(tf.TensorSpec((), tf.int64))
    assert [t.dtype for t in function.outputs] == [tf.int32, tf.int32]
    assert [v.numpy().tolist() for v in function(tf.constant(7, tf.int64))] == [[1, 2], [1, 7]]
    with tf.Graph().as_default():
        assert stacked([1, 2]).op.type == "Const"
