"""The device of a graph: a graph keeps the one that it was read for."""

import pytest
import tensorflow as tf
from devices import planning_for_card, planning_with
from equivalence import Cut, keras_step, plan
from keras import layers

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import read_canonical
from rewriters.emission.tile_pass import tile_segments
from rewriters.ir.device_detection import planned_device
from rewriters.ir.device_model import DeviceModel, planning_for
from rewriters.ir.graph import LOOPS
from rewriters.ir.graph_reader import from_concrete_function
from rewriters.ir.loop_bodies import function_of


def test_graph_its_copies_and_its_loops_keep_the_device_that_it_was_read_for():
    count = tf.function(lambda x: tf.while_loop(lambda y: y < 9.0, lambda y: (y + 1.0,), (x,))[0])
    traced = count.get_concrete_function(tf.TensorSpec(()))
    with planning_for_card("h200"):
        graph = from_concrete_function(traced)
    (loop,) = (node for node in graph.nodes.values() if node.op in LOOPS)
    assert graph.device.is_gpu and not planned_device().is_gpu
    assert graph.device == graph.copy().device == function_of(graph, loop, "body").device


def test_step_read_for_a_gpu_is_emitted_for_it():
    step = keras_step(lambda x: layers.Conv2D(4, 3, padding="same", name="out")(x), (12, 10), 2, steps=1)
    emitted = []
    for facts in ({}, {"name": "GPU:0"}):
        with planning_with(**facts):
            analysis = GraphAnalysis(read_canonical(step.concrete_fn))
        graph = tile_segments(analysis, plan(analysis, [Cut(grid=(2, 2))]))
        emitted.append({node.op for function in graph.library.function for node in function.node_def})
    on_cpu, on_gpu = emitted
    assert "HostConst" in on_gpu - on_cpu and "InplaceUpdate" in on_cpu - on_gpu


def test_planned_devices_are_nested():
    with planning_with(intra_op_threads=3), planning_for_card("h200", inter_op_threads=5):
        device = planned_device()
    assert (device.name, device.intra_op_threads, device.inter_op_threads) == ("GPU:0", 3, 5)


def test_device_is_detected_when_a_graph_is_read():
    """Not before: a user's script may set the number of threads until TensorFlow has started."""
    with planning_for(lambda _: pytest.fail("detected")):
        pass


@pytest.mark.parametrize(
    ("flags", "types"), [((), []), (("avx512f",), ["bfloat16"]), (("avx_ne_convert",), ["bfloat16", "float16"])]
)
def test_onednn_computes_half_precision_on_some_processors(flags, types):
    device = DeviceModel(name="CPU:0", processor_flags=frozenset(flags))
    computed = [name for name in ("bfloat16", "float16", "float64") if device.onednn_computes(tf.as_dtype(name))]
    assert computed == types
