"""Swaps of the tensor lists of loops: results are equal, lists are found, and nothing is left behind."""

import os

import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, error
from loops import NETS, loop_step, while_step
from swapping import swapped

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.swapping.spill_store import SpillStore
from rewriters.swapping.tiers import DiskTier, HostTier


@pytest.fixture(params=["host", "disk"])
def tier(request, tmp_path):
    return HostTier() if request.param == "host" else DiskTier(SpillStore(str(tmp_path)))


def largest_error(step, function):
    """Return the largest relative difference of results and variables after all steps."""
    want, got = step.run(step.concrete_fn), step.run(function)
    assert list(want) == list(got)
    return max(error(got[name], want[name]) for name in want)


def saved_lists(result):
    return [swap for swap in result.plan.swaps if swap.saved is not None]


@pytest.mark.parametrize("net", NETS)
def test_swapped_loop_any_tier_computes_same_results(net, tier):
    step = loop_step(net)
    result = swapped(step, tier)
    assert saved_lists(result)
    assert largest_error(step, result.function) <= TOLERANCE


def test_swapped_loop_of_tf_while_loop_computes_same_results(tier):
    step = while_step()
    result = swapped(step, tier)
    assert saved_lists(result)
    assert largest_error(step, result.function) <= TOLERANCE
