"""Budgets on a GPU that is not in this machine: its memory bounds them, and plans leave room for fragmentation."""

import functools
import math

import keras
import numpy as np
import pytest
from devices import planning_for_card
from gradients import gradient_step, model_of
from keras import layers

import tflms_sft
from rewriters.device import peak_memory
from rewriters.device.cards import CARDS
from tflms_sft import AutoParams, BudgetError
from tflms_sft._machine.memory_info import free_device_memory

TITLE = CARDS["rtx2080ti"].title
IMAGES = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype("float32")


@functools.cache
def step():
    """Return a training step of six convolutions."""
    image = x = keras.Input((64, 64, 3), name="photo")
    for number in range(6):
        x = layers.Conv2D(16, 3, padding="same", activation="relu", name=f"conv{number}")(x)
    return gradient_step(model_of(image, x))


def plan(budget, memory, **options):
    with planning_for_card("rtx2080ti", memory_limit=memory):
        return tflms_sft.rewrite(step(), AutoParams(budget, swap=False, max_slowdown=math.inf, **options), IMAGES).plan


@pytest.fixture(scope="module")
def original():
    """Return the prediction of the original step."""
    return plan("1GiB", 2**34).original


def test_auto_budget_is_a_fraction_of_the_card(original):
    memory = original.peak_bytes
    with planning_for_card("rtx2080ti", memory_limit=memory):
        assert free_device_memory() == memory
    found = plan("auto", memory)
    assert found.memory_budget == int(0.9 * memory)
    assert found.changed and found.predicted.peak_bytes <= 0.9 * found.memory_budget
    assert "instead of" not in "".join(found.notes)


def test_budget_above_the_card_is_reduced_with_a_note(original):
    memory = int(0.8 * original.peak_bytes)
    found = plan("11GiB", memory)
    assert found.memory_budget == memory
    assert found.changed and found.predicted.peak_bytes <= 0.9 * memory
    end = f"instead of 11 GiB: TensorFlow allocates no more on {TITLE}"
    (note,) = (note for note in found.notes if note.endswith(end))
    assert note in found.summary()


def test_budget_within_the_card_is_kept(original):
    found = plan(original.peak_bytes, 4 * original.peak_bytes, headroom=0)
    assert found.memory_budget == original.peak_bytes and not found.changed
    assert "GPU:0" not in "".join(found.notes)


def test_remedy_for_a_card_that_is_too_small_is_another_device(original):
    with pytest.raises(
        BudgetError, match=r"allocates 19. KiB on NVIDIA GeForce RTX 2080 Ti: use more memory.*, or shrink the batch"
    ):
        plan("11GiB", 200_000)


def test_advice_of_larger_budgets_stops_at_the_memory_of_the_card(original, monkeypatch):
    monkeypatch.setattr("tflms_sft._planner.budget_search.SLOW_TIME_RATIO", 0.0)
    budget = int(0.5 * original.peak_bytes)
    advice = "a larger budget is much faster"
    assert any(advice in note for note in plan(budget, 4 * budget, headroom=0).notes)
    assert not any(advice in note for note in plan(budget, budget, headroom=0).notes)


@pytest.mark.parametrize("is_counted", [True, False])
def test_plan_leaves_room_for_fragmentation(is_counted, original, monkeypatch):
    """Plans for a whole memory fit into it; without fragmentation counted, some would run out of memory."""
    add = peak_memory._with_fragmentation
    seen = {}

    def record(peak, trace, runs, limit):
        found = add(peak, trace, runs, limit) if is_counted else peak
        seen[found.peak_bytes] = trace, runs
        return found

    monkeypatch.setattr(peak_memory, "_with_fragmentation", record)

    def runs_within(memory):
        seen.clear()
        peak = plan(memory, memory, headroom=0).predicted.peak_bytes
        with planning_for_card("rtx2080ti", memory_limit=memory):
            return peak_memory._fits(*seen[peak], memory)

    memories = [int(fraction * original.peak_bytes) for fraction in (0.5, 0.8, 1.01)]
    assert all(map(runs_within, memories)) == is_counted


def test_summary_names_scratch_and_fragmentation(original):
    text = plan("1GiB", 2**34).summary()
    assert "kernel scratch (copies, cuDNN workspace) of conv" in text
    # The original step needs more than 90 % of this memory with the chunks between its tensors, and fewer bytes.
    full = plan(int(original.peak_bytes / 0.9) + 10_000, int(original.peak_bytes / 0.9) + 10_000, headroom=0)
    names = dict(full.original.largest)
    assert names["free chunks between tensors (fragmentation)"] == full.original.peak_bytes - original.peak_bytes > 0
