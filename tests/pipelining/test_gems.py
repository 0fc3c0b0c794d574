"""GEMS' equations against schedules that are executed, and against what GEMS has measured."""

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from rewriters.pipelining.schedule_simulator import simulate
from rewriters.pipelining.schedules import make
from tflms_sft import gems


@st.composite
def stages(draw, least=1):
    """Whole seconds of forward, backward and borders: all sums of them are exact."""
    n = draw(st.integers(least, 6))
    seconds = st.lists(st.integers(1, 9), min_size=n, max_size=n)
    borders = draw(st.lists(st.integers(0, 4), min_size=n - 1, max_size=n - 1))
    return draw(seconds), draw(seconds), borders


def level(forward, backward):
    return sum(forward[:-1]) == sum(backward[:-1])


ETA = st.integers(1, 7)


@settings(deadline=None)
@given(stages(), ETA)
def test_equations_1_to_5_equal_simulated_basic_schedules(case, eta):
    forward, backward, borders = case
    alone = simulate(make("basic", len(forward), 1), forward, backward)
    assert alone.seconds == gems.compute(forward, backward)
    idle = [100 * seconds / alone.seconds for seconds in alone.idle]
    assert gems.underutilized(forward, backward) == pytest.approx(idle)
    schedule = make("basic", len(forward), eta)
    assert simulate(schedule, forward, backward).seconds == gems.delayed(forward, backward, eta)
    together = simulate(schedule, forward, backward, borders)
    assert together.seconds == gems.total(forward, backward, borders, eta)
    assert gems.total(forward, backward, borders) == sum(forward) + sum(backward) + gems.communication(borders)


@settings(deadline=None)
@given(stages(), ETA)
def test_master_takes_its_formula_and_at_least_the_bound(case, eta):
    forward, backward, borders = case
    schedule = make("master", len(forward), eta)
    assert simulate(schedule, forward, backward).seconds == gems.master(forward, backward, eta)
    seconds = simulate(schedule, forward, backward, borders).seconds
    assert seconds == gems.master(forward, backward, eta, borders)
    assert seconds >= gems.master_bound(forward, backward, eta, borders)
    assert gems.mast(forward, backward, borders) == gems.master(forward, backward, 2, borders)


@settings(deadline=None)
@given(stages(), st.integers(2, 7))
@example(([1, 1, 5, 1], [5, 1, 1, 1], [0] * 3), 2)  # Sums are enough: BP_2 < FP_2 there.
def test_equation_6_and_bound_are_exact_as_documented(case, eta):
    forward, backward, _ = case
    n = len(forward)
    took = simulate(make("mast", n, 2), forward, backward).seconds
    assert took >= gems.mast_printed(forward, backward)
    assert (took == gems.mast_printed(forward, backward)) == gems.mast_holds(forward, backward)
    took = simulate(make("master", n, eta), forward, backward).seconds
    assert (took == gems.master_bound(forward, backward, eta)) == gems.mast_holds(forward, backward)
    if all(backward[n - i - 1] >= forward[i - 1] for i in range(1, n)):
        assert gems.mast_holds(forward, backward)


@settings(deadline=None)
@given(stages())
def test_equation_8_with_the_simulated_time_is_the_idle_time_of_mast(case):
    forward, backward, _ = case
    found = simulate(make("mast", len(forward), 2), forward, backward)
    idle = [100 * seconds / found.seconds for seconds in found.idle]
    assert gems.mast_underutilized(forward, backward) == pytest.approx(idle)


@settings(deadline=None)
@given(stages(), ETA, st.booleans())
def test_equations_9_and_10_for_level_stages_lack_one_backward(case, eta, leveled):
    forward, backward, _ = case
    if leveled:
        backward = forward[:-1] + backward[-1:]
    assume(gems.mast_holds(forward, backward))
    took = simulate(make("master", len(forward), eta), forward, backward).seconds
    lacking = 0 if eta % 2 else sum(backward)
    right = level(forward, backward) or eta <= 2
    assert (took == gems.master_printed(forward, backward, eta) + lacking) == right
    if eta % 2 == 0:
        saved = gems.delayed(forward, backward, eta) - took
        assert (gems.improved_printed(forward, backward, eta) == saved) == right


@settings(deadline=None)
@given(stages(), ETA, st.integers(0, 3))
def test_saving_of_master_is_linear_in_eta_as_in_equation_11(case, eta, allreduce):
    forward, backward, _ = case

    def saved(eta):
        took = simulate(make("master", len(forward), eta), forward, backward).seconds
        return gems.delayed(forward, backward, eta) - took - allreduce

    assert gems.improved(forward, backward, eta, allreduce) == saved(eta)
    assert gems.improved_from_measured(saved(2), saved(4), eta) == saved(eta)
    assert saved(eta) <= (eta - 1) * sum(forward[:-1]) - allreduce


def test_equation_9_lacks_a_backward_of_all_stages():
    """n = 4 and a unit for all: figure 8b has 13 units, equation 6 says 13, equation 9 says 9."""
    ones = [1] * 4
    assert gems.mast_printed(ones, ones) == gems.mast(ones, ones) == 13
    assert gems.master_printed(ones, ones, 2) == 9
    assert gems.master_printed(ones, ones, 3) == gems.master(ones, ones, 3) == 18
    assert (gems.master_printed(ones, ones, 4), gems.master(ones, ones, 4)) == (19, 23)
    assert gems.improved_printed(ones, ones, 4) == gems.improved(ones, ones, 4) == 4 * 8 - 23


def test_longer_forwards_than_backwards_exceed_equation_6():
    assert gems.mast_printed([2] * 4, [1] * 4) == 18
    assert gems.mast([2] * 4, [1] * 4) == 21 == simulate(make("mast", 4, 2), [2] * 4, [1] * 4).seconds


@settings(deadline=None)
@given(stages(), st.integers(1, 4), st.integers(1, 3), st.data())
def test_gradient_exchanges_add_their_unhidden_time(case, eta, replicas, data):
    forward, backward, borders = case
    n = len(forward)
    schedule = make("master", n, eta, replicas)
    reduce = data.draw(st.lists(st.integers(0, 20), min_size=n, max_size=n))
    reduce = [seconds if len(schedule.devices_of(stage)) > 1 else 0 for stage, seconds in enumerate(reduce)]
    without = simulate(schedule, forward, backward, borders).seconds
    seen = simulate(schedule, forward, backward, borders, reduce=reduce).seconds - without
    assert seen == gems.exchange(backward, reduce, borders, inverted=eta > 1)
    assert reduce[0] <= seen <= 2 * max(reduce)  # Equation 7 counts two.


@settings(deadline=None)
@given(stages(), st.integers(1, 4), st.integers(1, 3))
def test_hybrid_formulas_equal_simulated_schedules(case, eta, replicas):
    forward, backward, borders = case
    gradients = [100.0 * (stage + 1) for stage in range(len(forward))]
    schedule = make("master", len(forward), eta, replicas)
    reduce = [
        gems.ring_all_reduce(amount, len(schedule.devices_of(stage)), 64.0, 0.125)
        for stage, amount in enumerate(gradients)
    ]
    took = simulate(schedule, forward, backward, borders, reduce=reduce).seconds
    given = (forward, backward, eta, replicas, gradients, 64.0, 0.125, borders)
    assert gems.hybrid(*given) == pytest.approx(took)
    alone = gems.hybrid(*given[:3], 1, *given[4:])
    assert gems.scaling(*given) == pytest.approx(replicas * alone / took)


def test_ring_allreduce_moves_almost_twice_the_gradients():
    assert gems.ring_all_reduce(1e9, 1, 1e9) == 0
    assert gems.ring_all_reduce(1e9, 2, 1e9) == 1
    assert gems.ring_all_reduce(1e9, 1000, 1e9) == pytest.approx(2, rel=2e-3)
    assert gems.ring_all_reduce(0, 5, 1e9, latency=0.5) == 4


# What GEMS has measured ---------------------------------------------------------------------------------------------


def faster(n, eta, ratio=1.0, overhead=0.0):
    """Equal stages; `overhead` is what every step takes besides, in parts of a micro-batch, and basic has eta steps."""
    forward, backward = [1.0] * n, [ratio] * n
    besides = overhead * gems.compute(forward, backward)
    return (gems.delayed(forward, backward, eta) + eta * besides) / (gems.master(forward, backward, eta) + besides)


@settings(deadline=None)
@given(stages(), st.integers(1, 64))
def test_speedup_is_at_most_the_ceiling(case, eta):
    forward, backward, borders = case
    took = gems.master(forward, backward, eta, borders)
    assert gems.total(forward, backward, borders, eta) / took <= 2 * eta / (eta + 1)


def test_published_mast_time_on_16_gpus_is_below_the_schedule_bound():
    """1.36 in figure 11 (n = 16): the text says less than 1.5, the schedule less than 4/3; with equal stages 1.31."""
    assert faster(16, 2) == pytest.approx(1.306, abs=1e-3) == max(faster(16, 2, r / 8) for r in range(1, 33))
    # A step for each image, as basic takes, has its overhead each time: an eighth of a micro-batch explains it.
    assert faster(16, 2, overhead=0.128) == pytest.approx(1.36, abs=1e-3)


def test_published_master_time_on_4_gpus_is_below_equal_stages():
    """1.83 in figure 12 (n = 4). Equal stages: less than 1.6 for any η; it takes a light last stage."""
    assert faster(4, 64) == pytest.approx(1.585, abs=1e-3)
    assert 1.599 < faster(4, 10**6) < 1.6
    light = [1.0, 1.0, 1.0, 0.3]
    assert gems.mast_holds(light, light)
    assert gems.delayed(light, light, 64) / gems.master(light, light, 64) == pytest.approx(1.80, abs=0.01)


def test_table_2_lies_between_equal_and_doubled_backwards():
    """A residual network of 110 layers on 4 GPUs: 1.16 with MAST, 1.51 with MASTER and η = 16 (IX-B)."""
    for eta, measured, longer, equal in ((2, 1.16, 1.143, 1.231), (16, 1.51, 1.306, 1.542)):
        assert faster(4, eta, ratio=2) == pytest.approx(longer, abs=1e-3)
        assert faster(4, eta) == pytest.approx(equal, abs=1e-3)
        assert longer < measured < equal


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_figure_of_1024_gpus_implies_the_other(ratio):
    """128 pipelines of 8 GPUs are 89 times one with MAST and 124.58 times with η = 64 (VII-F)."""
    forward, backward = [1.0] * 8, [ratio] * 8
    seen = (128 / 89 - 1) * gems.master(forward, backward, 2)
    took = gems.master(forward, backward, 64)
    assert 128 * took / (took + seen) == pytest.approx(124.58, rel=0.012)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: gems.compute([], []), "`forward` and `backward` need a number for each stage"),
        (lambda: gems.master([1], [1, 2], 2), "`forward` and `backward` need"),
        (lambda: gems.master([1, 1], [1, 2], 0), "`eta` must be at least 1. Received: eta=0"),
        (lambda: gems.mast([1, 1], [1, 2], [1, 1]), "`transfer` needs 1 numbers"),
        (lambda: gems.master_bound([1, 1], [1], 2), "`forward` and `backward` need"),
        (lambda: gems.delayed([1, 1], [1, 1], 0), "`eta` must be at least 1"),
        (lambda: gems.hybrid([1], [1], 1, 0, [1], 1), "`replicas` must be at least 1"),
        (lambda: gems.hybrid([1, 1], [1], 1, 2, [1], 1), "`forward` and `backward` need"),
        (lambda: gems.exchange([1, 1], [1, 1], []), "`transfer` needs 1 numbers"),
        (lambda: gems.ring_all_reduce(1, 0, 1), "`devices` must be at least 1"),
    ],
)
def test_invalid_formula_arguments_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()
