"""Times of swaps that run concurrently with computation: a simulator of a step, and leads of swap-ins.

The device computes one op at a time. Swap-outs run one after another, and so do swap-ins, on a link with both
directions. A GPU also runs ahead: TensorFlow launches ops before the ops before them have ended.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from rewriters.ir.graph import Graph, Node

__all__: list[str] = []

Seconds = Callable[[Node], float]
"""Duration of an op."""


@dataclasses.dataclass(frozen=True)
class LeadTimes:
    """Times from which leads of swap-ins are chosen.

    Attributes:
        seconds: Duration of each op of the graph before swapping.
        rate: Bytes/s of the link in one direction.
        lead: Lead over the smallest one with which the consumer does not wait; 0 for no lead.
    """

    seconds: Seconds
    rate: float
    lead: float = 1.0


@dataclasses.dataclass(frozen=True)
class Timetable:
    """Simulated times of a step.

    Attributes:
        begins: Begin of each op and each transfer, in seconds from the start of the step.
        ends: End of each of them.
        order: All of them in the order in which memory changes: swap-outs by their end, all others by their begin.
    """

    begins: Mapping[Node, float]
    ends: Mapping[Node, float]
    order: Sequence[Node]

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return max(self.ends.values(), default=0.0)


class _Lane(enum.Enum):
    COMPUTE = enum.auto()
    OUT = enum.auto()
    IN = enum.auto()


def simulate(
    graph: Graph,
    seconds: Seconds,
    outs: Mapping[Node, float],
    ins: Mapping[Node, float],
    *,
    runs_ahead: bool = False,
) -> Timetable:
    """Simulate a step with swaps; of the ops that are ready, the one that was ready first begins.

    Args:
        graph: The step.
        seconds: Duration of each op that is no transfer.
        outs: Swap-outs with their durations.
        ins: Swap-ins with their durations.
        runs_ahead: Whether an op is launched when the ops before it are, as on a GPU. A transfer waits there for all
            ops that have been launched (tensorflow/core/common_runtime/gpu/gpu_util.cc), and a swap-in starts when its
            trigger has ended.
    """
    waiting, after = graph.dependencies()
    begins: dict[Node, float] = {}
    ends: dict[Node, float] = {}
    free = dict.fromkeys(_Lane, 0.0)
    events: list[tuple[float, int, Sequence[Node]]] = []  # Time, number, and nodes that no longer wait for the sender.
    numbers = itertools.count()

    def start(node: Node, now: float) -> None:
        lane = _Lane.OUT if node in outs else _Lane.IN if node in ins else _Lane.COMPUTE
        computes = lane is _Lane.COMPUTE
        duration = seconds(node) if computes else outs[node] if node in outs else ins[node]
        begin = max(now, free[lane])
        if runs_ahead and not computes:
            begin = max(begin, free[_Lane.COMPUTE])
        begins[node], ends[node] = begin, begin + duration
        free[lane] = ends[node]
        followers = after[node]
        if runs_ahead and computes:
            heapq.heappush(events, (now, next(numbers), [other for other in followers if other not in ins]))
            followers = [other for other in followers if other in ins]
        heapq.heappush(events, (ends[node], next(numbers), followers))

    for node in [node for node, count in waiting.items() if not count]:
        start(node, 0.0)
    while events:
        now, _, followers = heapq.heappop(events)
        for node in followers:
            waiting[node] -= 1
            if not waiting[node]:
                start(node, now)
    return Timetable(begins, ends, sorted(begins, key=lambda node: ends[node] if node in outs else begins[node]))


@dataclasses.dataclass(frozen=True, eq=False)
class Fetch:
    """A swap-in before its trigger is known.

    Attributes:
        source: Producer of the tensor.
        consumer: First op that reads the copy.
        seconds: Duration of a transfer of the tensor.
    """

    source: Node
    consumer: Node
    seconds: float


class LeadPlanner:
    """Chooses when swap-ins have to start at the latest, in the order of a graph without swaps.

    Where the link is the bottleneck, consumers wait, and ops after them are later by that time. So no lead becomes
    longer than the transfers before it require.

    Args:
        order: Ops in execution order.
        seconds: Duration of each op.
        ready: Level of the forward phase at which each op can run. A trigger is at least as high as its consumer.
        backward: Ops of the backward phase.
        fetches: The swap-ins.
    """

    def __init__(
        self,
        order: Sequence[Node],
        seconds: Seconds,
        ready: Mapping[Node, int],
        backward: Iterable[Node],
        fetches: Sequence[Fetch],
    ) -> None:
        self.ends: dict[Node, float] = {}
        self._fetches = fetches
        self._begins: dict[Node, float] = {}
        consumers: dict[Node, list[Fetch]] = {}
        for fetch in fetches:
            consumers.setdefault(fetch.consumer, []).append(fetch)
        phase = frozenset(backward)
        levels, times = [-1], [0.0]  # Time from which on triggers of each level exist.
        now = link = 0.0
        for node in order:
            for fetch in consumers.get(node, ()):
                written = self.ends[fetch.source] + fetch.seconds
                opened = times[min(bisect.bisect_left(levels, ready[node]), len(times) - 1)] if node in phase else 0.0
                link = max(link, written, opened) + fetch.seconds
                now = max(now, link)
            if node in phase and ready[node] > levels[-1]:
                levels.append(ready[node])
                times.append(now)
            self._begins[node] = now
            now += seconds(node)
            self.ends[node] = now

    def latest_starts(self, lead: float) -> dict[Fetch, float]:
        """Return the time at which each swap-in has to start, so that neither its consumer nor a later one waits.

        `lead` is a multiple of the smallest sufficient lead.
        """
        starts: dict[Fetch, float] = {}
        link = math.inf
        for fetch in sorted(self._fetches, key=lambda fetch: -self._begins[fetch.consumer]):
            needed = self._begins[fetch.consumer]
            link = min(link, needed) - fetch.seconds
            starts[fetch] = needed - lead * (needed - link)
        return starts


def concurrent_swap_outs(order: Sequence[Node], seconds: Seconds, outs: Mapping[Node, float]) -> int:
    """Return the number of swap-outs under way with which no producer waits for one of them.

    Args:
        order: Ops in execution order, without swaps.
        seconds: Duration of each op.
        outs: Producers of swapped tensors, each with the seconds of its swap-outs.
    """
    now = link = 0.0
    ended: list[float] = []
    most = 1
    for node in order:
        if node in outs:
            most = max(most, 1 + sum(end > now for end in ended))
        now += seconds(node)
        if node in outs:
            link = max(link, now) + outs[node]
            ended.append(link)
    return most
