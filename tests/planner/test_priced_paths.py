"""Priced paths against all paths of small problems."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tflms_sft._search.path_beam import PathBeam
from tflms_sft._search.priced_paths import PricedPaths
from tflms_sft._search.stretch_graph import Option, Path, Step, Stretch


def random_problem(seed, frontiers=5, ways=3, homes=2):
    """Return stretches between all frontiers: a faster way needs more bytes, and a longer stretch saves fewer tensors.

    The moments are the forward pass of each interval between neighbours, then their backward pass.
    """
    random = np.random.default_rng(seed)
    seconds = random.uniform(1, 5, frontiers)
    working = random.uniform(2, 20, frontiers)
    saved = random.uniform(1, 10, frontiers)
    stretches = []
    for begin, end in itertools.combinations(range(frontiers + 1), 2):
        inside = slice(begin, end)
        options = []
        for number in range(ways):
            usage = np.zeros(2 * frontiers)
            size = working[inside].sum() / (number + 1) ** 1.5
            usage[begin:end] = size / 2
            usage[2 * frontiers - end : 2 * frontiers - begin] = size
            halo = 1 + 0.15 * number * random.uniform(0.5, 1.5) * (end - begin)
            options.append(Option(float(seconds[inside].sum() * halo), usage, number))
        resident = np.zeros(2 * frontiers)
        resident[end : 2 * frontiers - end] = saved[end - 1]
        away = Option(float(saved[end - 1] * random.uniform(0.05, 0.3)), 0.1 * resident, "file")
        places = [[Option(0.0, resident, "memory"), away][:homes]] if end < frontiers else []
        stretches.append(Stretch(begin, end, options, places))
    return stretches


def all_paths(stretches, last, begin=0):
    if begin == last:
        yield ()
        return
    for stretch in stretches:
        if stretch.begin == begin:
            for options in itertools.product(stretch.ways, *stretch.homes):
                for rest in all_paths(stretches, last, stretch.end):
                    yield (Step(stretch, options), *rest)


def path_of(steps):
    options = [option for step in steps for option in step.options]
    usage = np.sum([option.usage for option in options], axis=0)
    return Path(steps, sum(option.seconds for option in options), usage)


def fits(path, limits):
    return bool(np.all(path.usage <= limits * (1 + 1e-9)))


def limits_of(paths, fraction, moments):
    """Return a limit between the lowest peak of all paths and that of the fastest one."""
    peaks = [path.usage.max() for path in paths]
    fastest = min(paths, key=lambda path: path.seconds)
    return np.full(moments, min(peaks) + fraction * (fastest.usage.max() - min(peaks)) + 1e-9)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), fraction=st.floats(0.0, 1.0))
def test_plan_and_bound_enclose_the_optimum_of_all_paths(seed, fraction):
    stretches = random_problem(seed, frontiers=4)
    paths = [path_of(steps) for steps in all_paths(stretches, 4)]
    limits = limits_of(paths, fraction, 8)
    optimum = min(path.seconds for path in paths if fits(path, limits))
    solution = PricedPaths(stretches).fastest_within(limits)
    assert solution.bound <= optimum * (1 + 1e-9)
    if solution.path is not None:
        assert fits(solution.path, limits) and solution.path.seconds >= optimum * (1 - 1e-9)
        again = path_of(solution.path.steps)
        assert solution.path.seconds == pytest.approx(again.seconds)
        assert solution.path.usage == pytest.approx(again.usage)


def test_plans_of_random_problems_are_mostly_optimal():
    ratios, gaps = [], []
    for seed, fraction in itertools.product(range(12), (0.02, 0.2, 0.6)):
        stretches = random_problem(seed, frontiers=4)
        paths = [path_of(steps) for steps in all_paths(stretches, 4)]
        limits = limits_of(paths, fraction, 8)
        optimum = min(path.seconds for path in paths if fits(path, limits))
        solution = PricedPaths(stretches).fastest_within(limits)
        assert solution.path is not None, (seed, fraction)
        ratios.append(solution.path.seconds / optimum)
        gaps.append(optimum / solution.bound)
    assert np.mean(np.isclose(ratios, 1.0)) >= 0.9 and max(ratios) < 1.1
    assert np.median(gaps) < 1.1


def test_larger_limits_have_lower_bounds_below_faster_plans():
    problem = PricedPaths(random_problem(3, frontiers=6))
    seconds, bounds = [], []
    free = problem.fastest_within(np.full(12, 1e9))
    for limit in np.linspace(0.2, 1.0, 8) * free.path.usage.max():
        solution = problem.fastest_within(np.full(12, limit))
        if solution.path is not None:
            seconds.append(solution.path.seconds)
            bounds.append(solution.bound)
    assert (
        len(seconds) > 4
        and seconds[0] > seconds[-1]
        and bounds == pytest.approx(sorted(bounds, reverse=True), rel=0.01)
    )
    assert all(bound <= one * (1 + 1e-9) for bound, one in zip(bounds, seconds, strict=True))


def test_a_limit_that_nothing_meets_has_no_plan():
    solution = PricedPaths(random_problem(0)).fastest_within(np.full(10, 0.01))
    assert solution.path is None


def test_prices_are_zero_without_a_limit():
    problem = PricedPaths(random_problem(1))
    solution = problem.fastest_within(np.full(10, 1e9))
    fastest = min(map(path_of, all_paths(random_problem(1), 5)), key=lambda path: path.seconds)
    assert solution.path.seconds == pytest.approx(fastest.seconds)
    assert solution.bound == pytest.approx(solution.path.seconds) and not solution.prices.any()


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.7])
def test_beam_finds_paths_that_fit_and_are_near_the_optimum(fraction):
    ratios = []
    for seed in range(10):
        stretches = random_problem(seed, frontiers=4)
        paths = [path_of(steps) for steps in all_paths(stretches, 4)]
        limits = limits_of(paths, fraction, 8)
        optimum = min(path.seconds for path in paths if fits(path, limits))
        priced = PricedPaths(stretches)
        found = PathBeam(priced.graph, priced.fastest_within(limits).prices, limits).fastest()
        assert found is not None
        path = priced.graph.path(found)
        again = path_of(path.steps)
        assert fits(again, limits) and [path.seconds, *path.usage] == pytest.approx([again.seconds, *again.usage])
        assert path.steps[0].stretch.begin == 0 and path.steps[-1].stretch.end == 4
        ratios.append(path.seconds / optimum)
    assert min(ratios) >= 1 - 1e-9 and np.mean(ratios) < 1.1


@pytest.mark.parametrize("moment", range(8))
def test_beam_keeps_limits_at_moments_without_a_price(moment):
    fitting = 0
    for seed in range(6):
        stretches = random_problem(seed, frontiers=4)
        limits = limits_of([path_of(steps) for steps in all_paths(stretches, 4)], 0.1, 8)
        found = PathBeam(PricedPaths(stretches).graph, 1e-3 * np.eye(8)[moment], limits).fastest()
        fitting += found is not None
        assert found is None or found.fits(limits)
    assert fitting > 0


def test_beam_without_a_path_that_fits_finds_none():
    graph = PricedPaths(random_problem(0)).graph
    assert PathBeam(graph, np.ones(10), np.full(10, 1e-3)).fastest() is None


def test_least_usage_of_paths_is_that_of_all_paths_at_each_moment():
    stretches = random_problem(3, frontiers=3)
    least = PricedPaths(stretches).graph.least_usage()
    for frontier in range(3):
        paths = [path_of(steps) for steps in all_paths(stretches, 3, frontier)]
        assert least[frontier] == pytest.approx(np.min([path.usage for path in paths], axis=0))
    assert not least[3].any()
