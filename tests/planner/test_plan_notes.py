"""Notes of plans say something: no ratios of 1.00, no hints that do not help."""

from types import SimpleNamespace

import pytest

from rewriters.ir.device_model import DeviceModel
from tflms_sft import AutoParams
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._planner import budget_search
from tflms_sft._planner.budget_plan import BudgetPlan, FeasiblePlan
from tflms_sft._planner.budget_search import LESS
from tflms_sft._search.traced_step import Candidate

PARAMS = AutoParams(1000, headroom=0)


def traced(plain_bytes):
    """A step of one second."""
    plain = Candidate([], SimpleNamespace(peak_bytes=plain_bytes), 1.0)
    rates = SimpleNamespace(swapped=lambda *_, **__: 1.0)
    facts = {"rates": rates, "device": DeviceModel(name="CPU:0"), "devices": (), "found": None}
    facts["once"] = lambda name, compute: compute()
    return SimpleNamespace(seconds=1.0, excess_bytes=0, plain=plain, fixed_bytes=0, **facts)


def search(ratio):
    """A search whose fastest tiles take `ratio` times the time of the step; that finds none for `None`."""
    tiles = None if ratio is None else Candidate([None], SimpleNamespace(peak_bytes=900), ratio)
    fake = SimpleNamespace(fastest_within=lambda limit: tiles, proposed=lambda limit: tiles, left=[])
    fake.in_memory, fake.smallest = fake, Candidate([None], SimpleNamespace(peak_bytes=2**40), 9.0)
    return fake


@pytest.mark.parametrize(
    ("plain", "ratio", "note"),
    [
        (1200, 2.0, "a larger budget is much faster: a quarter more is as fast as the original step"),
        (5000, 1.001, "a larger budget is much faster: a quarter more is as fast as the original step"),
        (5000, 1.5, "a larger budget is much faster: a quarter more takes at most 1.50x the time of the original step"),
        (1900, 2.1, "a larger budget is much faster: a quarter more takes at most 2.10x the time of the original step, "
        "twice as much is as fast as the original step"),
        (5000, 2.4, ""),
        (5000, None, ""),
    ],
)  # fmt: skip
def test_larger_budgets_are_noted_with_what_they_save(plain, ratio, note):
    option = FeasiblePlan(BudgetPlan([], []), 2.5, 1000)
    assert budget_search.larger_budgets(traced(plain), search(ratio), PARAMS, option) == note


@pytest.mark.parametrize(("without_swaps", "note"), [(1.0, LESS), (2.2, LESS), (2.4, "")])
def test_fewer_swaps_are_noted_only_if_swaps_take_long(without_swaps, note, monkeypatch):
    monkeypatch.setattr(budget_search, "seconds_of", lambda traced, plans: without_swaps)
    option = FeasiblePlan(BudgetPlan([], [], SwapParams()), 2.5, 1000)
    assert budget_search.larger_budgets(traced(5000), search(None), PARAMS, option) == note


@pytest.mark.parametrize(
    ("ratio", "why"),
    [
        (1.004, "swaps, because tiles are no faster"),
        (1.3, "swaps, because tiles would take 1.30x the time"),
        (None, "swaps, because no tiles fit"),
    ],
)
def test_swaps_are_explained_by_the_time_of_tiles(ratio, why, monkeypatch):
    swaps = FeasiblePlan(BudgetPlan([], [], SwapParams()), 1.001, 1000)
    monkeypatch.setattr(budget_search, "swaps_alone", lambda *_: swaps)
    plans = budget_search.feasible_plans(traced(5000), search(ratio), PARAMS, SimpleNamespace())
    assert plans[0].plan.why == why
