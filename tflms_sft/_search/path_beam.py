"""Paths within limits, built stretch by stretch, many at a time.

Prices propose paths of the whole step, of which none may fit. A beam search (B. T. Lowerre, "The Harpy Speech
Recognition System", 1976) builds paths from the first frontier on, leaves out those that can no longer fit, and keeps
the cheapest of each frontier.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tflms_sft._search.stretch_graph import ROUNDING, Picks, StretchGraph

WIDTH = 60
"""Paths that are continued from a frontier."""

WAYS_FACTORS = (0.0, 0.5, 1.0, 2.0, 8.0)
"""Factors of the prices at which a stretch chooses its options; it also may have those with the least bytes."""


@dataclasses.dataclass(frozen=True)
class _Begun:
    """Paths up to a frontier, each with the path that it continues.

    Attributes:
        costs: Time of each, and price of its bytes.
        seconds: Time of each.
        usage: Bytes of each at each moment.
        before: Number of the path that each continues.
        edges: Number of the edge that it adds.
    """

    costs: np.ndarray
    seconds: np.ndarray
    usage: np.ndarray
    before: np.ndarray
    edges: np.ndarray

    def only(self, chosen: np.ndarray) -> _Begun:
        """Return some of the paths."""
        return _Begun(*(getattr(self, field.name)[chosen] for field in dataclasses.fields(self)))

    @staticmethod
    def all_of(parts: list[_Begun]) -> _Begun:
        """Return the paths of several parts."""
        return _Begun(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(_Begun)))


class PathBeam:
    """A beam search for a fast path at fixed prices.

    Args:
        graph: The stretches.
        prices: Seconds for each byte at each moment.
        limits: Bytes at each moment.
    """

    def __init__(self, graph: StretchGraph, prices: np.ndarray, limits: np.ndarray) -> None:
        self._graph = graph
        self._allowed = (1 + ROUNDING) * limits
        self._dear = np.flatnonzero(prices > 0) if prices.any() else np.arange(len(prices))
        self._least = graph.least_usage()
        costs, seconds = graph.costs(prices), graph.seconds
        bytes_at_prices = costs - seconds
        choices = [*(seconds + factor * bytes_at_prices for factor in WAYS_FACTORS), graph.usage.sum(axis=1)]
        self._chosen = [graph.cheapest_options(choice) for choice in choices]
        sums = [
            [graph.sums(of_option[chosen]) for chosen in self._chosen] for of_option in (costs, seconds, graph.usage)
        ]
        self._costs, self._seconds, self._usage = (np.stack(of_factor) for of_factor in sums)

    def fastest(self) -> Picks | None:
        """Return the fastest path found that fits; `None` if none was found."""
        graph = self._graph
        none = np.array([-1])
        waiting: list[list[_Begun]] = [[] for _ in range(graph.last + 1)]
        waiting[0].append(_Begun(np.zeros(1), np.zeros(1), np.zeros((1, len(self._allowed))), none, none))
        expanded: list[_Begun] = []
        count = 0
        for frontier in range(graph.last):
            if waiting[frontier]:
                begun = _Begun.all_of(waiting[frontier])
                begun = begun.only(np.argsort(begun.costs, kind="stable")[:WIDTH])
                waiting[frontier] = []
                expanded.append(begun)
                for end, longer in self._continued(begun, frontier, count):
                    waiting[end].append(longer)
                count += len(begun.costs)
        if not waiting[graph.last]:
            return None
        ended = _Begun.all_of(waiting[graph.last])
        best = ended.only(np.array([np.argmin(ended.seconds)]))
        return self._picks(int(best.before[0]), int(best.edges[0]), _Begun.all_of(expanded))

    def _continued(self, begun: _Begun, frontier: int, first: int) -> list[tuple[int, _Begun]]:
        """Return the paths with one more stretch that may still fit, by the frontier at its end.

        Args:
            begun: Paths up to the frontier.
            frontier: The frontier.
            first: Number of the first of these paths.
        """
        leaving = self._graph.leaving[frontier]
        result = []
        for end in dict.fromkeys(end for _, end in leaving):
            stretches = np.array([number for number, other in leaving if other == end])
            factors, places = self._distinct(stretches)
            room = self._allowed - self._least[end] - self._usage[factors, stretches[places]]
            fits = np.all(begun.usage[:, None, self._dear] <= room[None, :, self._dear], axis=2)
            paths, edges = np.nonzero(fits)
            costs = begun.costs[paths] + self._costs[factors, stretches[places]][edges]
            cheapest = np.argsort(costs, kind="stable")[: 2 * WIDTH]
            paths, edges, costs = paths[cheapest], edges[cheapest], costs[cheapest]
            fits = np.all(begun.usage[paths] <= room[edges], axis=1)
            paths, edges, costs = paths[fits], edges[fits], costs[fits]
            if len(paths):
                factors, numbers = factors[edges], stretches[places[edges]]
                seconds = begun.seconds[paths] + self._seconds[factors, numbers]
                usage = begun.usage[paths] + self._usage[factors, numbers]
                of_edges = factors * len(self._graph.stretches) + numbers
                result.append((end, _Begun(costs, seconds, usage, first + paths, of_edges)))
        return result

    def _distinct(self, stretches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the factors of the prices and the positions of stretches, without those that choose the same."""
        costs, seconds = self._costs[:, stretches], self._seconds[:, stretches]
        is_new = np.ones(costs.shape, dtype=bool)
        for factor in range(1, len(costs)):
            same = (costs[:factor] == costs[factor]) & (seconds[:factor] == seconds[factor])
            is_new[factor] = ~same.any(axis=0)
        factors, places = np.nonzero(is_new)
        return factors, places

    def _picks(self, before: int, edge: int, expanded: _Begun) -> Picks:
        """Return the path that ends with an edge, which continues the expanded path number `before`."""
        numbers, options = list[int](), list[np.ndarray]()
        while edge >= 0:
            factor, number = divmod(edge, len(self._graph.stretches))
            numbers.append(number)
            options.append(self._chosen[factor][self._graph.spans[number]])
            before, edge = int(expanded.before[before]), int(expanded.edges[before])
        return self._graph.picks(reversed(numbers), options[::-1])
