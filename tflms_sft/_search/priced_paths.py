"""Fastest plan within a memory limit: a shortest path whose bytes have a price at each moment of the step.

Stretches of the step between two frontiers are the edges (`stretch_graph.py`). The bytes of the chosen ways and homes
have to stay within a limit at every moment.

Lagrange multipliers turn the limits into prices, in seconds for each byte and moment (H. Everett, "Generalized Lagrange
Multiplier Method for Solving Problems of Optimum Allocation of Resources", 1963). At fixed prices every stretch and
every tensor chooses on its own, and a shortest path chooses the frontiers. Its cost, less the price of the whole limit,
is a lower bound of the time of every plan that fits. Prices rise where the path exceeds the limit, and fall where it is
below (M. Held and R. M. Karp, "The Traveling-Salesman Problem and Minimum Spanning Trees: Part II", 1971). The length
of a step is that of B. T. Polyak, "Minimization of Unsmooth Functionals", 1969, equation 6.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from tflms_sft._search.path_beam import PathBeam
from tflms_sft._search.path_exchanges import PathExchanges
from tflms_sft._search.stretch_graph import Path, Picks, Stretch, StretchGraph

MAX_ROUNDS = 120
"""Rounds of prices for one limit."""

MAX_ROUNDS_FROM_PRICES = 40
"""Rounds of prices for one limit, from those of a similar search on."""

MAX_FITTED = 20_000
"""Rounds without a higher bound that seek a path that fits, times the number of stretches."""

PATIENCE = 6
"""Rounds without a higher bound after which the step length is halved."""

SMALL_GAP = 0.005
"""Distance of plan and bound, over the bound, at which the search ends."""

WIDE_GAP = 0.05
"""Distance of plan and bound, over the bound, above which a beam search seeks a faster plan."""

BEAM_FACTORS = (1.0, 0.5, 2.0)
"""Multiples of the prices for beam searches: paths at higher prices leave more room to the stretches at their end."""

WORTH_IMPROVING = 1.1
"""Time of a path that fits, over the least so far, up to which it is improved."""

MAX_IMPROVED = 1500
"""Stretches of all paths that are improved for one limit."""

MAX_REPAIRED = 5
"""Paths that raised the bound, and are repaired until they fit."""

MAX_PRICE_FACTOR, FACTOR_BISECTIONS = 1e9, 5
"""Factor of prices up to which a path that fits is sought, and the bisections for the smallest one."""

LIMIT_BISECTIONS = 10
"""Bisections for the smallest limit that a path meets."""


@dataclasses.dataclass(frozen=True)
class Solution:
    """Result of a search.

    Attributes:
        path: The fastest plan found that fits; `None` if none was found.
        bound: Lower bound of the time of every plan that fits.
        prices: Seconds for each byte at each moment, with which the bound was found.
    """

    path: Path | None
    bound: float
    prices: np.ndarray


class PricedPaths:
    """Plans of one step over given stretches.

    Args:
        stretches: All stretches; each ends at a later frontier than it begins.

    Attributes:
        graph: The stretches, with corrections of their bytes.
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.graph = StretchGraph(stretches)
        self._exchanges = PathExchanges(self.graph)

    def least_limit(self, high: float) -> float:
        """Return the smallest limit found that some path meets at all moments without corrections, `high` if none."""
        self.graph.forget_corrections()
        low = 0.0
        for _ in range(LIMIT_BISECTIONS):
            middle = (low + high) / 2
            path = self._least_usage(np.full(self.graph.usage.shape[1], middle))
            low, high = (middle, high) if path is None else (low, middle)
        return high

    def fastest_within(self, limits: np.ndarray, prices: np.ndarray | None = None) -> Solution:
        """Return the fastest plan found whose bytes stay within the limits of all moments.

        Args:
            limits: Bytes at each moment.
            prices: Prices of a similar search, with which fewer rounds suffice.
        """
        rounds = MAX_ROUNDS if prices is None else MAX_ROUNDS_FROM_PRICES
        best, bound, raised = self._ascent(limits, np.zeros(len(limits)) if prices is None else prices, rounds)
        if best is None or best.seconds - bound > SMALL_GAP * abs(bound):
            best = self._with_repairs(best, raised, limits)
        for factor in BEAM_FACTORS:
            if best is None or best.seconds - bound > WIDE_GAP * abs(bound):
                best = self._with_beam(best, raised[-1][1], limits, factor)
        return Solution(None if best is None else self.graph.path(best), bound, raised[-1][1])

    def near(self, path: Path, limits: np.ndarray, prices: np.ndarray) -> Path:
        """Return a path within the limits that differs little from another one; the nearest found if none fits.

        Args:
            path: A path of these stretches.
            limits: Bytes at each moment.
            prices: Seconds for each byte at each moment, by which replacements are compared.
        """
        start = self.graph.numbered(path)
        picks = self._exchanges.repaired(start, prices, limits, same_stretches=True)
        if not picks.fits(limits):
            picks = self._exchanges.repaired(start, prices, limits)
        if picks.fits(limits):
            picks = self._exchanges.improved(picks, prices, limits, same_stretches=True)
        return self.graph.path(picks)

    def _ascent(
        self, limits: np.ndarray, prices: np.ndarray, rounds: int
    ) -> tuple[Picks | None, float, Sequence[tuple[Picks, np.ndarray]]]:
        """Raise the lower bound by prices, and improve the paths that they propose.

        Returns:
            The fastest path found that fits, if any; the bound; and the last paths that raised it, with their prices.
        """
        bound, length, stale = -np.inf, 1.0, 0
        best = self._least_usage(limits)
        raised = collections.deque[tuple[Picks, np.ndarray]](maxlen=MAX_REPAIRED)
        tried, least, improved, fitted = set[bytes](), np.inf, 0, 0
        for _ in range(rounds):
            path = self._cheapest(prices)
            value = path.seconds + float(prices @ (path.usage - limits))
            stale = 0 if value > bound else stale + 1
            if value > bound:
                bound = value
                raised.append((path, prices))
            fitted += len(self.graph.stretches) if stale else 0
            for fitting in self._fitting(path, prices, limits) if fitted <= MAX_FITTED or not stale else ():
                is_worth = fitting.seconds < WORTH_IMPROVING * least and improved < MAX_IMPROVED
                if is_worth and fitting.usage.tobytes() not in tried:
                    tried.add(fitting.usage.tobytes())
                    improved += len(fitting.stretches)
                    least = min(least, fitting.seconds)
                    best = min(filter(None, (best, self._exchanges.improved(fitting, prices, limits))), key=_rank)
            if best is not None and best.seconds - bound <= SMALL_GAP * abs(bound):
                break
            if stale >= PATIENCE:
                prices, length, stale = raised[-1][1], length / 2, 0
                continue
            excess = path.usage - limits
            excess[(prices == 0) & (excess < 0)] = 0.0
            squares = float(excess @ excess)
            if not squares:
                break
            target = best.seconds if best is not None else max(2 * abs(bound), 1e-9)
            prices = np.maximum(prices + length * max(target - value, SMALL_GAP * abs(value)) / squares * excess, 0.0)
        return best, bound, raised

    def _with_repairs(
        self, best: Picks | None, raised: Sequence[tuple[Picks, np.ndarray]], limits: np.ndarray
    ) -> Picks | None:
        """Return the fastest of a path and of those that raised the bound, each repaired until it fits."""
        for path, prices in reversed(raised):
            repaired = self._exchanges.repaired(path, prices, limits)
            if repaired.fits(limits):
                best = min(filter(None, (best, self._exchanges.improved(repaired, prices, limits))), key=_rank)
            elif best is None:
                break
        return best

    def _with_beam(self, best: Picks | None, prices: np.ndarray, limits: np.ndarray, factor: float) -> Picks | None:
        """Return the faster of a path and of the one that a beam search finds at a multiple of the prices."""
        path = PathBeam(self.graph, factor * prices, limits).fastest()
        if path is not None:
            best = min(filter(None, (best, self._exchanges.improved(path, prices, limits))), key=_rank)
        return best

    def _cheapest(self, prices: np.ndarray) -> Picks:
        """Return the path with the lowest cost at fixed prices."""
        return self.graph.shortest(self.graph.costs(prices))

    def _fitting(self, path: Picks, prices: np.ndarray, limits: np.ndarray) -> Iterator[Picks]:
        """Yield the path if it fits, or else the first paths that fit as the prices rise by a common factor."""
        if path.fits(limits):
            yield path
            return
        low, high, fitting = 1.0, 2.0, None
        while fitting is None and high < MAX_PRICE_FACTOR and prices.any():
            dearer = self._cheapest(high * prices)
            low, high, fitting = (low, high, dearer) if dearer.fits(limits) else (high, 2 * high, None)
        if fitting is None:
            return
        for _ in range(FACTOR_BISECTIONS):
            middle = (low * high) ** 0.5
            dearer = self._cheapest(middle * prices)
            low, high, fitting = (low, middle, dearer) if dearer.fits(limits) else (middle, high, fitting)
        yield fitting

    def _least_usage(self, limits: np.ndarray) -> Picks | None:
        """Return a path that fits, found by a growing weight of moments that exceed the limit; `None` if none is found.

        The weights multiply, so that the worst moment dominates after some rounds (S. A. Plotkin, D. B. Shmoys and
        E. Tardos, "Fast Approximation Algorithms for Fractional Packing and Covering Problems", 1995).
        """
        weights = np.full(len(limits), 1.0 / len(limits))
        for _ in range(MAX_ROUNDS):
            path = self.graph.shortest(self.graph.costs(weights / np.maximum(limits, 1.0)) - self.graph.seconds)
            if path.fits(limits):
                return path
            load = path.usage / np.maximum(limits, 1.0)
            weights = weights * np.exp2(load / load.max())
            weights /= weights.sum()
        return None


def _rank(path: Picks) -> tuple[float, float]:
    """Return a sort key: faster first, and among equals the one that needs less memory."""
    return path.seconds, float(path.usage.max())
