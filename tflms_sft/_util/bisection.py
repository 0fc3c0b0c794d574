"""Finds the largest number that fits: of images in a batch, of rows in an image."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], guess: int, part: float = 0.0, most: int | None = None) -> int:
    """Finds the largest number that fits by bisection, where all smaller ones do as well.

    Args:
        fits: Asked for numbers from 1 up, as seldom as may be.
        guess: Where to begin; the better, the fewer are asked.
        part: The result may be too small by this part of it.
        most: Larger ones are not asked for; `None` for no such limit.

    Returns:
        The number, 0 if not even 1 fits.
    """
    low, high, stride = 0, None, max(guess // 16, 1)
    asked = max(guess, 1)
    while low != most and (high is None or high - low > max(1, int(part * low))):
        asked = asked if most is None else min(asked, most)
        if fits(asked):
            low = asked
        else:
            high = asked
        if high is None or (low == 0 and high > 1 and stride < high):  # one side is open: further away
            asked = low + stride if high is None else high - stride
            stride *= 2
        else:
            asked = (low + high) // 2
    return low


def extrapolated(peak: Callable[[int], int], memory: int, few: int, more: int, power: int = 1) -> int:
    """Guesses the number with that peak from the peaks of two, and once more from that of the guess.

    Args:
        peak: Bytes of a number.
        memory: Bytes that are looked for.
        few: A number.
        more: Another one.
        power: Of the number, with which bytes grow: 2 for rows of a square image.
    """
    for _ in range(2):
        per_image = max((peak(more) - peak(few)) / (more**power - few**power), 1.0)
        guess = min(more**power + int((memory - peak(more)) / per_image), (16 * more) ** power)
        few, more = more, max(int(max(guess, 1) ** (1 / power)), 1)
        if few == more:
            break
    return more
