"""Memory of the iterations of a loop, against the emitted body, tile by tile."""

import keras
import pytest
import tensorflow as tf
from gradients import gradient_step
from keras import layers

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import read_canonical
from rewriters.device.peak_memory import Action
from rewriters.emission.loop_emitter import trace_loop
from rewriters.emission.tile_pass import plan_segment
from rewriters.estimates import loop_memory
from rewriters.estimates.loop_memory import iteration_peak_bytes, loop_iterations
from rewriters.tiling.segment import build_segment
from rewriters.tiling.tile_planner import Grid

FLOAT = 4


@pytest.fixture(autouse=True)
def no_scratch(monkeypatch):
    """Set kernel scratch, which depends on the processor, to zero."""
    monkeypatch.setattr(loop_memory, "scratch_bytes", lambda *_: 0)


def planned(*body, grid=(4, 4), size=64, batch=1, channels=8, batch_tiles=1):
    image = x = keras.Input((size, size, channels))
    for layer in body:
        x = layer(x)
    model = keras.Model(image, layers.GlobalAveragePooling2D()(x))
    step = gradient_step(model)
    analysis = GraphAnalysis(read_canonical(step.get_concrete_function(tf.TensorSpec((batch, size, size, channels)))))
    ops = {n for n in analysis.order if n.op in FORWARD and n not in analysis.backward}
    segment = build_segment(analysis, "segment1", ops, set())
    return analysis, segment, plan_segment(analysis, segment, Grid(batch_tiles, grid)).loops


FORWARD = ("Conv2D", "BiasAdd", "Relu", "MaxPool")


def conv(kernel=3, **options):
    return layers.Conv2D(8, kernel, padding="same", **options)


def peaks(analysis, tile_loop, batch=1):
    """Return the peak bytes of each iteration."""
    result = []
    for turn in loop_iterations(analysis, tile_loop, batch):
        held, alive, most = {}, 0, 0
        for action, key, num_bytes, *_ in turn.events:
            if action is Action.ALLOCATE:
                held[key] = num_bytes
                alive += num_bytes
            elif action is Action.FREE:
                alive -= held.pop(key)
            most = max(most, alive)
        assert alive == 0 and not held, "a turn gives everything back"
        result.append(most)
    return result


def image(rows, columns, channels=8):
    return rows * columns * channels * FLOAT


def test_iteration_peak_is_slice_padded_slice_and_result():
    analysis, _, (forward, *_) = planned(conv(use_bias=False))
    corner, edge, *_ = iteration_peaks = peaks(analysis, forward)
    assert len(iteration_peaks) == 9
    # The slice at a corner has 17 x 17 rows and is padded to 18 x 18; slice and padded copy, or copy and result.
    assert corner == max(image(17, 17) + image(18, 18), image(18, 18) + image(16, 16))
    assert edge == image(17, 18) + image(18, 18)
    assert iteration_peaks[4] == image(18, 18) + image(16, 16), "inside, nothing is padded"


def test_iteration_peak_pointwise_convolution_has_no_pad():
    analysis, _, (forward, *_) = planned(conv(1, use_bias=False))
    assert set(peaks(analysis, forward)) == {2 * image(16, 16)}


def test_iteration_peak_single_tile_has_no_slice():
    analysis, _, (forward, *_) = planned(conv(use_bias=False), grid=(1, 1))
    assert peaks(analysis, forward) == [image(64, 64)], "the image itself is read"


def test_iteration_peak_batch_tiles_hold_fraction_of_batch():
    analysis, _, (forward, *_) = planned(conv(use_bias=False), grid=(1, 1), batch=4, batch_tiles=2)
    assert peaks(analysis, forward, batch=4) == [2 * (2 * image(64, 64))], "a slice of two images, and the result"


def test_iteration_peak_counts_frames_that_are_folded_into_the_batch():
    analysis, _, (forward, *_) = planned(conv(use_bias=False), grid=(1, 1), batch=12)
    assert peaks(analysis, forward, batch=3) == [12 * image(64, 64)], "of 3 episodes with 4 frames each"
    analysis, _, (forward, *_) = planned(conv(use_bias=False), grid=(1, 1), batch=12, batch_tiles=2)
    assert peaks(analysis, forward, batch=3) == [6 * (2 * image(64, 64))]


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (5, 4)])
def test_iteration_peak_bytes_is_that_of_corner_or_inner_tile(grid):
    analysis, _, tile_loops = planned(conv(activation="relu"), conv(activation="relu"), layers.MaxPool2D(2), grid=grid)
    for tile_loop in tile_loops:
        iteration_peaks = peaks(analysis, tile_loop)
        assert iteration_peak_bytes(analysis, tile_loop, 1) in iteration_peaks
        assert iteration_peak_bytes(analysis, tile_loop, 1) >= 0.9 * max(iteration_peaks)


def test_iteration_events_backward_accumulates_in_place():
    def added(*first):
        analysis, segment, (_, backward) = planned(*first, conv(activation="relu"), conv(activation="relu"))
        turn = loop_iterations(analysis, backward, 1)[4].events
        adds = [event.name for event in turn if event.name.startswith("AddV2/")]
        return segment, [event for event in turn if event.name in adds], turn

    segment, adds, _ = added()
    assert not segment.grad_exits and not adds, "nobody asked for the image's gradient"
    segment, adds, turn = added(layers.DepthwiseConv2D(3, padding="same"))
    (gradient,) = segment.grad_exits
    assert [event.action for event in adds] == [Action.RUN], "its result takes the place of what was there"
    held = [e for e in turn if e.name.startswith(f"StridedSlice/{gradient.name}") and e.action is Action.ALLOCATE]
    assert [e.num_bytes for e in held] == [image(20, 20)], "two halos of a row each on both sides"


@pytest.mark.parametrize("grid", [(2, 2), (3, 5)])
@pytest.mark.parametrize("kernel", [1, 3])
def test_iteration_model_crops_and_pads_like_emitted_loop(grid, kernel):
    analysis, segment, tile_loops = planned(conv(kernel, activation="relu"), conv(3), layers.MaxPool2D(2), grid=grid)
    for tile_loop in tile_loops:
        graph = trace_loop(analysis, segment, tile_loop)
        body = next(f for f in graph.as_graph_def().library.function if "body" in f.signature.name)
        emitted = [node.op for node in body.node_def]
        turns = [turn.events for turn in loop_iterations(analysis, tile_loop, 1)]
        modelled = {e.name.split("/")[0] for turn in turns for e in turn if e.action is Action.RUN}
        assert ("PadV2" in emitted) == ("PadV2" in modelled)
        padded = {e.name for turn in turns for e in turn if e.name.startswith("PadV2/") and e.action is Action.RUN}
        assert len(padded) == emitted.count("PadV2")
