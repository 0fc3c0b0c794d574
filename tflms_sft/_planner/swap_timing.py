"""Time of a step with swaps, and the automatic choice of leads and of the number of concurrent swap-outs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Sequence

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device import properties
from rewriters.device.peak_memory import Peak, waits
from rewriters.emission.tile_pass import SegmentPlan, loop_nodes
from rewriters.ir.graph import Graph, Node
from rewriters.swapping.recompute_pooling import forward_pool_of, recomputed_pool_name
from rewriters.swapping.swap_pass import Swap, SwapPlan, SwapResult, insert_swaps, plan_swaps
from rewriters.swapping.tiers import HostSkeletonTier
from rewriters.swapping.transfer_schedule import LeadTimes, Timetable, concurrent_swap_outs, simulate
from tflms_sft._machine.memory_info import free_memory
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._planner.traced_step import TracedStep, op_times, predicted_peak

MAX_PAGE_CACHE_FRACTION = 0.5
"""Fraction of the machine's free memory that the page cache may take before writes reach the disk."""

SWAP_OUT_SLOWDOWN = 4.0
"""Time of a swap-out beside other ops, over the measured one, that predicted peaks allow for."""

AUTOMATIC_LEAD = 1.0
"""Lead of a swap-in, over the smallest sufficient one, where transfers overlap with computation. Three times as much
saved little more time in simulations of a device that runs ahead."""

MAX_AUTOMATIC_IN_FLIGHT, DEFAULT_IN_FLIGHT = 3, 2
"""Concurrent swap-outs at most where the number is automatic, and where transfers do not overlap with computation."""


def is_host_tier(params: SwapParams) -> bool:
    """Return whether tensors are swapped to host memory, as they are by default from a GPU."""
    return params.tier == "host" or (params.tier == "auto" and properties.name().startswith("GPU"))


def overlaps(traced: TracedStep, params: SwapParams) -> bool:
    """Return whether transfers overlap with computation, so that the lead of a swap-in matters."""
    return traced.rates.overlapped and is_host_tier(params)


class SwapTiming:
    """Times of the ops of a graph that is prepared for swaps, and of transfers beside them.

    Args:
        traced: The step.
        plans: Its segments.
        analysis: Analysis of its graph, tiled or not, prepared for swaps.
        params: Parameters of the swaps.
    """

    def __init__(
        self, traced: TracedStep, plans: Sequence[SegmentPlan], analysis: GraphAnalysis, params: SwapParams
    ) -> None:
        self._traced = traced
        self._plans = list(plans)
        self._analysis = analysis
        self._rate = traced.rates.copied
        self._overlaps = overlaps(traced, params)
        of_name = op_times(traced, self._plans, loop_nodes(analysis.graph))
        self.seconds: Callable[[Node], float] = lambda node: of_name(node.name)

    def plan(self, params: SwapParams) -> SwapPlan:
        """Return the swaps for parameters with a lead."""
        times = LeadTimes(self.seconds, self._rate, params.lead) if params.lead else None
        return plan_swaps(self._analysis, params.options(), self._traced.batch, times)

    def in_flight(self, params: SwapParams, swaps: Iterable[Swap]) -> int:
        """Return the number of concurrent swap-outs, so many that no producer waits for the link unless it is full."""
        if params.max_in_flight is not None:
            return params.max_in_flight
        if not self._overlaps:
            return DEFAULT_IN_FLIGHT
        outs: dict[Node, float] = {}
        for swap in swaps:
            node = swap.tensor.node
            outs[node] = outs.get(node, 0.0) + swap.tensor.num_bytes(self._traced.batch) / self._rate
        return min(concurrent_swap_outs(self._analysis.order, self.seconds, outs), MAX_AUTOMATIC_IN_FLIGHT)

    def waiting_seconds(self, result: SwapResult) -> float:
        """Return the time by which transfers delay a step."""
        return self._simulated(result).seconds - self._simulated(result, transfers=False).seconds

    def _simulated(self, result: SwapResult, *, transfers: bool = True) -> Timetable:
        """Return the times of a step, with or without the durations of its transfers."""
        batch, runs_ahead = self._traced.batch, properties.name().startswith("GPU")
        outs, ins = (
            {node: node.inputs[0].num_bytes(batch) / self._rate if transfers else 0.0 for node in nodes}
            for nodes in (result.swap_outs, result.swap_ins)
        )
        return simulate(result.graph, self.seconds, outs, ins, runs_ahead=runs_ahead)

    def peak(self, result: SwapResult, params: SwapParams, away: Container[Node], limit: int | None) -> Peak:
        """Return the predicted peak of a step with swaps; where transfers take time, the higher one of two orders.

        In the first order swap-ins take no time. In the simulated one ops that wait for no swap-in run early.

        Args:
            result: The step with swaps.
            params: Their parameters.
            away: Swap-outs whose results are not in the device's memory.
            limit: As for `predicted_peak`.
        """
        traced, slow = self._traced, out_seconds(self._traced, result.swap_outs, params)
        orders = [None, self._simulated(result).order] if self._overlaps else [None]
        peaks = [
            predicted_peak(traced, self._plans, limit=limit, graph=result.graph, away=away, slow=slow, order=order)
            for order in orders
        ]
        return max(peaks, key=lambda peak: peak.peak_bytes)

    def resolved(self, params: SwapParams) -> SwapParams:
        """Return the parameters with the lead and the number of concurrent swap-outs that they leave open."""
        if params.lead is None:
            params = dataclasses.replace(params, lead=AUTOMATIC_LEAD if self._overlaps else 0.0)
        return dataclasses.replace(params, max_in_flight=self.in_flight(params, self.plan(params).swaps))

    def inserted(self, params: SwapParams, swaps: Sequence[Swap]) -> SwapResult:
        """Return the graph with swaps to host memory, for the model."""
        return insert_swaps(self._analysis, swaps, HostSkeletonTier(), self.in_flight(params, swaps))


def swapped_seconds(
    traced: TracedStep, graph: Graph, swaps: Iterable[Swap], params: SwapParams, seconds: float, waiting: float | None
) -> float:
    """Return the time of a step with swaps.

    Args:
        traced: The step.
        graph: Its graph, prepared for swaps.
        swaps: The swaps.
        params: Their parameters.
        seconds: Time without swaps.
        waiting: Time by which transfers delay the step, if it was simulated.
    """
    seconds += _serialisation_seconds(traced, graph) + _recomputation_seconds(traced, graph)
    if waiting is not None:
        return seconds + waiting
    sizes = [(swap.tensor.num_bytes(traced.batch), len(swap.swap_ins)) for swap in swaps]
    out, back = sum(size for size, _ in sizes), sum(size * times for size, times in sizes)
    return traced.rates.swapped(seconds, out, back, _to_disk(params, out))


def _to_disk(params: SwapParams, out: int) -> bool:
    """Return whether `out` swapped bytes reach the disk itself, not its page cache alone."""
    if is_host_tier(params):
        return False
    if not params.page_cache:
        return True
    free = free_memory()
    return free is not None and out > free * MAX_PAGE_CACHE_FRACTION


def out_seconds(traced: TracedStep, outs: Iterable[Node], params: SwapParams) -> dict[Node, float]:
    """Return the seconds that each swap-out may last, while its tensor stays in memory."""
    sizes = {out: sum(tensor.num_bytes(traced.batch) for tensor in out.inputs) for out in outs}
    rates = traced.rates
    rate = min(rates.copied, rates.disk_write) if _to_disk(params, sum(sizes.values())) else rates.copied
    slowdown = 1.0 if overlaps(traced, params) else SWAP_OUT_SLOWDOWN  # No core copies beside an accelerator.
    return {out: slowdown * size / rate for out, size in sizes.items()}


def _serialisation_seconds(traced: TracedStep, graph: Graph) -> float:
    """Return the seconds lost because gradients that ran concurrently are serialised in a graph for swaps."""
    order = graph.execution_order()
    position = {node.name: number for number, node in enumerate(order)}
    serialised: list[Node] = []
    for pair in traced.costs.gradient_pairs.items():
        numbers = sorted(position[node.name] for node in pair if node.name in position)
        if len(numbers) == len(pair) and waits(order, *numbers):
            serialised.extend(pair)
    return traced.costs.concurrency_savings(serialised)


def _recomputation_seconds(traced: TracedStep, graph: Graph) -> float:
    """Return the seconds of poolings that are recomputed for their gradients."""
    nodes = traced.analysis.graph.nodes.values()
    pools = [forward_pool_of(node) for node in nodes if recomputed_pool_name(node) in graph.nodes]
    return sum(traced.costs.op(pool) for pool in pools if pool is not None)
