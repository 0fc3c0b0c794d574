"""Test the promises of a budget on random nets, and plans of small nets against all possible plans."""

import collections
import dataclasses
import itertools
import math
import random

import fuzz
import keras
import pytest
import tensorflow as tf
from gradients import gradient_step, model_of
from keras import layers

from rewriters.errors import BudgetError
from rewriters.estimates.op_cost import DIRECT, NOMINAL
from rewriters.tiling import ft_segments
from tflms_sft import AutoParams
from tflms_sft._planner import budget_search
from tflms_sft._planner.swap_search import SwapSearch
from tflms_sft._search.block_chain import BlockChain
from tflms_sft._search.priced_search import PricedSearch
from tflms_sft._search.segment_plans import segment_plans
from tflms_sft._search.traced_step import analyse_step, predict, seconds_of

NUM_RANDOM_PLANS = 300
"""Number of random plans that a search is compared with."""

NUM_BUDGETS = 5
"""Number of budgets that are tried for each net."""


def seconds(traced, choice):
    """Return the predicted time and peak of a plan."""
    time = seconds_of(traced, choice.plans) if choice.plans else traced.seconds
    if choice.swaps is None:
        return time, predict(traced, choice.plans).peak.peak_bytes
    swaps = SwapSearch(traced, choice.plans, choice.swaps)
    return swaps.seconds(choice.swaps, time), swaps.peak(choice.swaps.n_tensors, choice.swaps.lb).peak_bytes


def ladder(traced, swap, number):
    """Return budgets from the smallest that an error names up to the peak of the original step."""
    plain = predict(traced, []).peak.peak_bytes
    with pytest.raises(BudgetError) as caught:
        next(budget_search.plans_within_budget(traced, AutoParams(1, 0.0, swap, max_slowdown=math.inf)))
    smallest = caught.value.smallest_bytes
    assert smallest <= plain + 1
    return [int(smallest * (plain / smallest) ** (step / (number - 1))) + 1 for step in range(number)]


def check_budgets(traced, swap, number=NUM_BUDGETS):
    """Assert that every budget from the smallest on is met, and that a larger one is never slower."""
    times = []
    for budget in ladder(traced, swap, number):
        params = AutoParams(budget, 0.0, swap, max_slowdown=math.inf)
        time, peak = seconds(traced, next(budget_search.plans_within_budget(traced, params)))
        assert peak <= budget
        times.append(max(time, traced.seconds))
    for smaller, larger in itertools.pairwise(times):
        assert larger <= smaller * (1 + 1e-9), [time / traced.seconds for time in times]
    return f"{len(set(times))} times"


TINY = dataclasses.replace(
    NOMINAL,
    first_touch=1e7,
    first_touch_min_bytes=2**14,
    unfolded={"Conv2DBackpropInput": 1e9, "Conv2DBackpropFilter": 2e9, "Conv3DBackpropFilterV2": 4e9, DIRECT: 1e8},
)
"""Rates of a machine on which more iterations may be faster: the tensors of small nets are large for it."""


def network(model, optimizer, params, *, known_batch, linear=False, part=None, updates=1):
    """Check the budgets of a random net; replaces `fuzz.compare`."""
    del params, part, updates
    step = fuzz.step_for(model, optimizer, known_batch, linear)
    traced = analyse_step(step.concrete_fn, batch=3)
    if len(model.layers) % 3 == 0:
        traced = dataclasses.replace(traced, rates=TINY)
    return check_budgets(traced, swap=len(model.layers) % 2 == 0)


@pytest.mark.parametrize("number", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_random_nets_larger_budget_is_never_slower(number):
    outcomes = collections.Counter()
    fuzz.run(number, None, outcomes, shrink=False, check=network)
    assert outcomes.total() == number


def normed(*, residual):
    """Return a step with BatchNorm in training mode, with or without residual connections."""
    image = x = keras.Input((64, 64, 3))
    for filters in (8, 8, 16, 16):
        y = layers.Conv2D(filters, 3, padding="same")(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        x = layers.Add()([x, y]) if residual and x.shape[-1] == filters else y
    model = keras.Model(image, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))
    step = gradient_step(model, tf.TensorSpec((2, 64, 64, 3)))
    return analyse_step(step.get_concrete_function())


@pytest.mark.parametrize(
    ("residual", "number", "rates"),
    [
        (False, 6, NOMINAL),
        *(
            pytest.param(residual, 24, rates, marks=pytest.mark.slow)
            for residual in (False, True)
            for rates in (NOMINAL, TINY)
        ),
    ],
)
def test_net_with_barriers_larger_budget_is_never_slower(residual, number, rates):
    traced = normed(residual=residual)
    traced = dataclasses.replace(traced, rates=rates)
    check_budgets(traced, swap=False, number=number)


@pytest.mark.parametrize("backward", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_net_faster_in_more_tiles_larger_budget_is_never_slower(backward):
    traced = (small if backward else forward)(8, 8, 8)
    traced = dataclasses.replace(traced, rates=TINY)
    check_budgets(traced, swap=False, number=16)


def few(*filters, size=(40, 24)):
    """Return a model of a few convolutions, whose images take most of its memory."""
    image = x = keras.Input((*size, 3))
    for number, channels in enumerate(filters):
        x = layers.Conv2D(channels, 3, padding="same", activation="relu", name=f"conv{number}")(x)
        if number % 2:
            x = layers.MaxPooling2D(2)(x)
    return model_of(image, x)


def forward(*filters):
    """Return an inference step of `few`."""
    model = few(*filters)
    call = tf.function(lambda images: model(images, training=False), input_signature=[tf.TensorSpec((1, 40, 24, 3))])
    return analyse_step(call.get_concrete_function())


def small(*filters, size=(40, 24)):
    """Return a training step of `few`."""
    step = gradient_step(few(*filters, size=size), tf.TensorSpec((1, *size, 3)))
    return analyse_step(step.get_concrete_function())


def some_plans(traced, number):
    """Yield peak and seconds of random combinations of tiled and untiled stretches between cuts."""
    ((component,), _) = ft_segments.find_components(traced.analysis)
    chain, generator = BlockChain(traced, component), random.Random(number)

    def options(first, last):
        yield chain.untiled(first, last)
        for tiles in chain.tilings(first, last):
            for grid in tiles.grids:
                yield from (tiles.with_checkpoints(tiles.choice(grid), n) for n in range(len(tiles.candidates) + 1))

    stretches = {ends: list(options(*ends)) for ends in itertools.combinations(chain.bounds, 2)}
    for _ in range(number):
        inner = [bound for bound in chain.bounds[1:-1] if generator.random() < 0.5]
        ends = itertools.pairwise([chain.bounds[0], *inner, chain.bounds[-1]])
        choices = [generator.choice(stretches[pair]) for pair in ends]
        tiled = [(component, choice) for choice in choices if choice.grid is not None]
        plans = [plan for plan in segment_plans(traced, tiled) if plan is not None]
        yield predict(traced, plans).peak.peak_bytes, seconds_of(traced, plans)


@pytest.mark.parametrize(
    ("filters", "size", "parts"),
    [
        ((8, 8), (16, 6), (0.0, 0.1, 0.3, 0.6, 0.9)),
        pytest.param((8, 8), (40, 24), (0.0, 0.1, 0.3, 0.6, 0.9), marks=pytest.mark.slow),
        pytest.param((8, 8, 8), (40, 24), (0.1, 0.2, 0.3, 0.6, 0.9), marks=pytest.mark.slow),
    ],
)
def test_priced_search_is_near_the_best_of_random_plans(filters, size, parts):
    traced = small(*filters, size=size)
    plans = list(some_plans(traced, NUM_RANDOM_PLANS))
    least, plain = min(peak for peak, _ in plans), predict(traced, []).peak.peak_bytes
    assert len(plans) > 20 and least < 0.9 * plain
    for part in parts:
        limit = int((least + part * (plain - least)) * 1.03) + 1
        best = min(time for peak, time in plans if peak <= limit)
        candidate = PricedSearch(traced).fastest_within(limit)
        assert candidate is not None and candidate.peak.peak_bytes <= limit
        assert candidate.time_ratio * traced.seconds <= 1.1 * best, part
