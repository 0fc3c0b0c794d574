"""Bisection: the largest number that fits, asked for as seldom as may be."""

import pytest

from benchmarks._bisection import extrapolated, largest


def threshold(answer, asked):
    def fits(number):
        asked.append(number)
        return number <= answer

    return fits


@pytest.mark.parametrize("guess", [1, 2, 7, 30, 500])
def test_largest_tries_each_number_once(guess):
    for answer in range(60):
        asked = []
        assert largest(threshold(answer, asked), guess) == answer
        assert len(asked) == len(set(asked)) <= 14
        assert 1 <= min(asked)


@pytest.mark.parametrize("guess", [1, 90, 5000])
def test_largest_with_precision_tries_fewer(guess):
    exact, rough = [], []
    assert largest(threshold(1000, exact), guess) == 1000
    assert 980 <= largest(threshold(1000, rough), guess, part=0.02) <= 1000
    assert len(rough) < len(exact)
    few = []
    assert 950 <= largest(threshold(1000, few), 1030, part=0.05) <= 1000
    assert len(few) <= 4


def test_extrapolated_of_polynomial_peak_is_near():
    assert extrapolated(lambda batch: 10 + 3 * batch, 100, 2, 8) == 30
    assert extrapolated(lambda batch: 100 + max(0, batch - 10), 150, 2, 8) in range(50, 70)
    assert extrapolated(lambda batch: 1000 * batch, 500, 2, 8) == 1
    assert extrapolated(lambda batch: 7, 500, 2, 8) > 8  # a flat start is not followed for ever
