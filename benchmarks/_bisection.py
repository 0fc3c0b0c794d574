"""Bisection for the largest number that fits, such as a batch size or the rows of an image."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], guess: int, part: float = 0.0) -> int:
    """Return the largest number that fits, found by bisection. All smaller numbers must fit as well.

    Args:
        fits: Predicate of a number from 1 up; expensive, so it is called rarely.
        guess: First number to try.
        part: Relative precision: the result may be this fraction below the largest number.

    Returns:
        The number, 0 if not even 1 fits.
    """
    low, high, stride = 0, None, max(guess // 16, 1)
    trial = max(guess, 1)
    while high is None or high - low > max(1, int(part * low)):
        if fits(trial):
            low = trial
        else:
            high = trial
        if high is None or (low == 0 and high > 1 and stride < high):  # No bound on one side yet: double the stride.
            trial = low + stride if high is None else high - stride
            stride *= 2
        else:
            trial = (low + high) // 2
    return low


def extrapolated(peak: Callable[[int], int], memory: int, few: int, more: int) -> int:
    """Return a number whose peak is about `memory`, by two steps of the secant method.

    Args:
        peak: Function from a number to its peak in bytes.
        memory: Wanted peak in bytes.
        few: First number.
        more: Second number.
    """
    for _ in range(2):
        per_image = max((peak(more) - peak(few)) / (more - few), 1.0)
        guess = min(more + int((memory - peak(more)) / per_image), 16 * more)
        few, more = more, max(guess, 1)
        if few == more:
            break
    return more
