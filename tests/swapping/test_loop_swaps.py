"""Swaps of the tensor lists of loops: results are equal, lists are selected, and nothing is left behind."""

import os

import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, error
from graph_rewrites import assert_lines, new_lines
from loops import (
    BATCH,
    LENGTH,
    NETS,
    STEPS,
    adversarial_step,
    branch_step,
    growing_step,
    loop_step,
    nested_step,
    step_with_weight,
    twice_step,
    while_step,
)
from swapping import file_bytes, num_unread, swapped

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import read_canonical
from rewriters.ir.graph import LOOPS
from rewriters.ir.text import graph_text
from rewriters.scheduling.memory_order import in_memory_order
from rewriters.swapping.spill_store import SpillStore
from rewriters.swapping.swap_pass import SwapOptions, insert_swaps, plan_swaps, without_copies
from rewriters.swapping.tiers import DiskTier, HostTier


@pytest.fixture(params=["host", "disk"])
def tier(request, tmp_path):
    return HostTier() if request.param == "host" else DiskTier(SpillStore(str(tmp_path)))


def largest_error(step, function):
    """Return the largest difference of results and variables after all steps."""
    want, got = step.run(step.concrete_fn), step.run(function)
    assert list(want) == list(got)
    return max(error(got[name], want[name]) for name in want)


def swapped_lists(result):
    return [swap for swap in result.plan.swaps if swap.saved is not None]


@pytest.mark.parametrize("net", NETS)
def test_swapped_loop_any_tier_computes_same_results(net, tier):
    step = loop_step(net)
    result = swapped(step, tier)
    assert swapped_lists(result)
    assert largest_error(step, result.function) <= TOLERANCE


@pytest.mark.parametrize("function", (while_step, nested_step, twice_step, growing_step, branch_step))
def test_swapped_loop_written_by_hand_computes_same_results(function, tier):
    step = step_with_weight(function)
    result = swapped(step, tier)
    assert bool(swapped_lists(result)) == (function is not twice_step)
    assert largest_error(step, result.function) <= TOLERANCE


def test_swapped_stack_of_growing_list_has_estimated_size(tier):
    """The length of the list is in no shape; each unknown size would count as the batch size."""

    def step(x, weight):
        with tf.GradientTape() as tape:
            states = tf.TensorArray(x.dtype, 0, dynamic_size=True, element_shape=x.shape)
            _, states = tf.while_loop(
                lambda i, _: i < LENGTH, lambda i, s: (i + 1, s.write(i, tf.tanh(x @ weight))), (0, states)
            )
            y = states.stack()
            for _ in range(4):
                y = tf.sin(tf.tanh(y))
            loss = tf.reduce_sum(y)
        return loss, tape.gradient(loss, weight)

    graph = swapped(step_with_weight(step), tier).graph
    copies = [n.out() for n in graph.nodes.values() if "/swap_in_" in n.name and None in (n.out().shape or ())]
    assert copies and {tensor.num_bytes(1000) for tensor in copies} == {LENGTH * BATCH * 4 * 8}


def test_swapped_loop_min_bytes_selects_lists_by_size_of_all_elements():
    step = loop_step("gru")
    sizes = sorted(swap.tensor.num_bytes(BATCH) for swap in swapped_lists(swapped(step)))
    assert len(set(sizes)) > 0 and sizes[0] >= STEPS
    selected = swapped_lists(swapped(step, min_bytes=sizes[-1]))
    assert len(selected) == sizes.count(sizes[-1])
    assert not swapped_lists(swapped(step, min_bytes=sizes[-1] + 1))


@pytest.mark.parametrize(
    ("function", "reason"),
    (
        (nested_step, "its elements are lists of an inner loop"),
        (twice_step, "its consumer is no loop of the backward pass"),
    ),
)
def test_swapped_loop_other_use_of_list_is_left_alone(function, reason):
    assert reason in dict(swapped(step_with_weight(function)).plan.left).values()


def test_swapped_loop_several_steps_leave_no_records(tmp_path):
    tier = DiskTier(SpillStore(str(tmp_path)))
    step = loop_step("stacked", steps=1)
    result = swapped(step, tier)
    step.run(result.function)
    size = file_bytes(tier.store)
    for _ in range(3):
        step.run(result.function)
    # TensorFlow may hold the arrays of the last iterations until it calls Python again.
    assert 0 < file_bytes(tier.store) <= 2 * size and os.listdir(tmp_path) == []
    assert num_unread(tier.store) == 0


def test_swapped_loop_full_disk_leaves_variables_unchanged(tmp_path, monkeypatch):
    tier = DiskTier(SpillStore(str(tmp_path)))
    step = loop_step("gru", steps=1)
    result = swapped(step, tier, min_bytes=100)
    want = step.run(result.function)
    before = [np.array(variable) for variable in step.variables]
    real, calls = os.pwrite, []

    def full(descriptor, data, offset):
        calls.append(offset)
        if len(calls) == 8:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(tf.errors.OpError, match=r"SpillError.*is full\. Swapping out `lms/.*/while/swap_out`"):
        result.function(*map(tf.constant, step.batches[0]))
    monkeypatch.setattr("os.pwrite", real)
    assert all(np.array_equal(np.array(v), old) for v, old in zip(step.variables, before, strict=True))
    tier.clear()
    assert num_unread(tier.store) == file_bytes(tier.store) == 0
    got = step.run(result.function)
    assert all(np.array_equal(got[name], want[name]) for name in want)


def test_write_record_arrays_of_any_type_are_read_back(tmp_path):
    store = SpillStore(str(tmp_path))
    arrays = [np.arange(5, dtype="int8"), np.random.rand(3, 4), np.zeros((0, 2), "float32"), np.array(True)]
    numbers = [store.write_record(arrays, "x") for _ in range(3)]
    for number in numbers:
        got = store.read_record(number)
        assert all(np.array_equal(g, a) and g.dtype == a.dtype for g, a in zip(got, arrays, strict=True))
        assert got[1].ctypes.data % 64 == 0


def test_write_record_read_records_give_their_place_away(tmp_path):
    store = SpillStore(str(tmp_path))
    for _ in range(3):
        for number in [store.write_record([np.ones(1000)], "x") for _ in range(4)]:
            store.read_record(number)
    assert file_bytes(store) == 3 * 8192 + 8000


def test_write_record_arrays_in_use_are_not_overwritten(tmp_path):
    store = SpillStore(str(tmp_path))
    (first,) = store.read_record(store.write_record([np.ones(1000)], "x"))
    store.write_record([np.zeros(1000)], "x")
    assert first.sum() == 1000


@pytest.mark.parametrize("min_bytes", (1, 2**8, 2**12, 2**16))
def test_plan_swaps_second_forward_pass_swaps_lists_whatever_is_delayed(min_bytes):
    """Zeros that wait for a first backward pass make no ops of a second forward pass backward."""
    analysis = without_copies(read_canonical(adversarial_step().get_concrete_function()))
    plan = plan_swaps(in_memory_order(analysis, min_bytes, BATCH), SwapOptions(), BATCH)
    filled = [node for node in analysis.order if node.op in LOOPS and node not in analysis.backward]
    emptied = {swap.tensor.node for swap in plan.swaps if swap.saved is not None}
    # The gradient of the generator is not computed in the step of the discriminator.
    assert len(filled) == 5 and len(emptied) == 4


def test_insert_swaps_elements_of_a_list_leave_in_their_iteration():
    """Iterations do not overlap, and the backward loop begins when the forward loop has ended."""

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.sin(y)), (0, x))
        return tape.gradient(y, x)

    function = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec((2,)))
    analysis = GraphAnalysis(read_canonical(function))
    swaps = plan_swaps(analysis, SwapOptions(), 2).swaps
    graph = insert_swaps(analysis, swaps, HostTier(), 1).graph
    lines = new_lines(graph_text(analysis.graph), graph_text(graph))
    assert_lines(
        [line for line in lines if "return" not in line and "Placeholder_1" not in line],
        """
        lms/while/swap_out = int64[...] PyFunc(Placeholder_3) on /device:CPU:0
        lms/while/swap_out/EnsureShape = int64[] EnsureShape(lms/while/swap_out) {shape=[]}
        while/TensorListPushBack = variant[] TensorListPushBack(Placeholder_4, lms/while/swap_out/EnsureShape)
        gradient_tape/while/while_grad = (int32[], int32[], int32[], float32[2], variant[]) While(0, -1, while, [1.0,
              1.0], while:4) {parallel_iterations=1} after [while]
        lms/while/swap_in/number = (variant[], int64[]) TensorListPopBack(Placeholder_4, [])
        lms/while/swap_in = float32[...] PyFunc(lms/while/swap_in/number:1) on /device:CPU:0
        lms/while/swap_in/EnsureShape = float32[2] EnsureShape(lms/while/swap_in) {shape=[2]}
        gradient_tape/while/gradients/while/Sin_grad/Cos = float32[2] Cos(lms/while/swap_in/EnsureShape)
    """,
    )
