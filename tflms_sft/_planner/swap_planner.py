"""Application of swap parameters: tier, leads, graph with swaps, predicted time, and records for the plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Sequence

import tensorflow as tf

from rewriters.analysis.autodiff_roles import in_scope
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.peak_memory import Peak, waits
from rewriters.emission.tile_pass import SegmentPlan, loop_nodes
from rewriters.errors import SwapError
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import Graph, Node
from rewriters.pipelining.stage_passes import StagedStep, with_swaps
from rewriters.scheduling.memory_order import in_memory_order
from rewriters.swapping.recompute_pooling import forward_pool_of, recomputed_pool_name
from rewriters.swapping.spill_store import SpillStore, is_in_memory, reason_unsupported
from rewriters.swapping.swap_pass import (
    Swap,
    SwapPlan,
    SwapResult,
    insert_swaps,
    plan_swaps,
    without_copies,
)
from rewriters.swapping.tiers import DiskTier, HostSkeletonTier, HostTier
from rewriters.swapping.transfer_schedule import LeadTimes, Timetable, concurrent_swap_outs, simulate
from tflms_sft._machine.memory_info import exceeds_page_cache
from tflms_sft._params.device_names import machine_of, remote_devices
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._planner.plan_description import peak_names
from tflms_sft._report.plan import Plan, amend_plan
from tflms_sft._report.plan_records import PlannedSwap
from tflms_sft._search.traced_step import TracedStep, backward_scopes, op_times, predicted_peak
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.open_files import open_descriptors, open_file_limits
from tflms_sft._util.text import nearest, shortened

SWAP_OUT_SLOWDOWN = 4.0
"""Time of a swap-out beside other ops, over the measured one, that predicted peaks allow for."""

AUTOMATIC_LEAD = 1.0
"""Lead of a swap-in, over the smallest sufficient one, where transfers overlap with computation. Three times as much
saved little more time in simulations of a device that runs ahead."""

MAX_AUTOMATIC_IN_FLIGHT, DEFAULT_IN_FLIGHT = 3, 2
"""Concurrent swap-outs at most where the number is automatic, and where transfers do not overlap with computation."""

MAX_REASONS = 4
"""Reasons after which an error is cut short."""


def is_host_tier(params: SwapParams, device: DeviceModel) -> bool:
    """Return whether tensors are swapped to host memory, as they are by default from a GPU."""
    return params.tier == "host" or (params.tier == "auto" and device.is_gpu)


def overlaps(traced: TracedStep, params: SwapParams) -> bool:
    """Return whether transfers overlap with computation, so that the lead of a swap-in matters."""
    return traced.rates.overlapped and is_host_tier(params, traced.device)


class SwapTiming:
    """Times of the ops of a graph, tiled or not, that is prepared for swaps, and of transfers beside them."""

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
        batch, runs_ahead = self._traced.batch, self._traced.device.is_gpu
        outs, ins = (
            {node: node.inputs[0].num_bytes(batch) / self._rate if transfers else 0.0 for node in nodes}
            for nodes in (result.swap_outs, result.swap_ins)
        )
        return simulate(result.graph, self.seconds, outs, ins, runs_ahead=runs_ahead)

    def peak(self, result: SwapResult, params: SwapParams, away: Container[Node], limit: int | None) -> Peak:
        """Return the predicted peak of a step with swaps; where transfers take time, the higher one of two orders.

        In the first order swap-ins take no time. In the simulated one ops that wait for no swap-in run early. Results
        of the swap-outs in `away` are not in the device's memory; `limit` is that of `predicted_peak`.
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


@dataclasses.dataclass
class Swapped:
    """A graph with swaps.

    Attributes:
        graph: The graph.
        swaps: The swaps.
        left: Names of tensors that stay, with reasons.
        tier: Destination of the swapped tensors; it has to live as long as the graph may run.
        peak: Function from the limit of `predicted_peak` to the predicted peak.
        waiting: Time by which transfers delay the step, if they overlap with computation.
    """

    graph: Graph
    swaps: list[Swap]
    left: list[tuple[str, str]]
    tier: HostTier | DiskTier
    peak: Callable[[int | None], Peak]
    waiting: float | None = None


class NothingToSwapError(SwapError):
    """The graph has no tensor that the parameters allow to swap; another graph of the same step may have some."""


def apply_swaps(traced: TracedStep, graph: Graph, params: SwapParams, plans: Sequence[SegmentPlan] = ()) -> Swapped:
    """Insert swaps into a graph of a step, in which the segments of `plans` are tiled.

    Raises:
        NothingToSwapError: If nothing can be swapped.
        SwapError: For names that are not in the graph, a tier that is not available, and a step on other machines.
    """
    check_here(traced)
    batch, tier = traced.batch, make_tier(params, traced.device)
    check_names(traced, graph, params)
    analysis = prepared(traced, graph, params)
    timing = SwapTiming(traced, plans, analysis, params)
    params = timing.resolved(params)
    plan = timing.plan(params)
    if not plan.swaps:
        raise NothingToSwapError(_nothing(analysis, params, plan, batch))
    problem = no_room(tier, plan.swaps, batch)
    if problem:
        raise SwapError(problem)
    assert params.max_in_flight is not None
    try:
        result = insert_swaps(analysis, plan.swaps, tier, params.max_in_flight)
    except SwapError as error:  # Of this graph: tiles alone may keep the budget.
        raise NothingToSwapError(str(error)) from None
    # A swap-out to disk returns the number of a file, which lies in the device's memory.
    away = frozenset(result.swap_outs) if isinstance(tier, HostTier) else frozenset[Node]()
    peak = functools.partial(timing.peak, result, params, away)
    waiting = timing.waiting_seconds(result) if overlaps(traced, params) else None
    return Swapped(result.graph, plan.swaps, plan.left, tier, peak, waiting)


def swap_in_stages(
    traced: TracedStep, staged: StagedStep, params: SwapParams, devices: Sequence[str], micro_batches: int
) -> tuple[StagedStep, HostTier | DiskTier]:
    """Insert swaps into the stages, tiled or not, of the step of a micro-batch.

    Raises:
        SwapError: As `apply_swaps` raises it, and for stages on other machines.
    """
    check_here(traced, devices)
    tier = make_tier(params, traced.device)
    check_names(traced, staged.analysis.graph, params)
    swapped = with_swaps(
        staged,
        params.options(),
        tier=tier,
        batch=traced.batch,
        max_in_flight=params.max_in_flight or DEFAULT_IN_FLIGHT,
        backward_scopes=params.optimizer_scopes,
    )
    if not swapped.swaps:
        raise SwapError(_nothing(swapped.analysis, params, SwapPlan([], list(swapped.left)), traced.batch))
    problem = no_room(tier, swapped.swaps, traced.batch, micro_batches)
    if problem:
        raise SwapError(problem)
    return swapped, tier


def prepared(traced: TracedStep, graph: Graph, params: SwapParams) -> GraphAnalysis:
    """Return the analysis of a graph that is prepared for swaps, cached for the graph of the original step."""
    scopes = backward_scopes(graph, params.optimizer_scopes)
    cache = traced.models.prepared if graph is traced.analysis.graph else {}
    key = params.min_bytes, scopes
    if scopes not in cache:
        cache[scopes] = without_copies(graph, scopes, traced.forward)
    if key not in cache:
        cache[key] = in_memory_order(cache[scopes], params.min_bytes, traced.batch, scopes, traced.forward)
    return cache[key]


def check_here(traced: TracedStep, devices: Iterable[str] = ()) -> None:
    """Refuse a step on several machines, further devices that it is to run on included.

    A Python function that a graph calls runs in the program that created it, wherever the op is placed. The swapped
    tensors of a worker would cross the network to this machine and back.

    Raises:
        SwapError: With the devices.
    """
    remote = sorted({*remote_devices(traced.concrete_fn), *filter(machine_of, devices)})
    if remote:
        raise SwapError(
            f"The step also runs on other machines, {shortened(remote, MAX_REASONS)}, whose tensors would be swapped "
            "to this machine through the network. Use swaps only in programs with local devices."
        )


def make_tier(params: SwapParams, device: DeviceModel) -> HostTier | DiskTier:
    """Return the tier of the parameters.

    Raises:
        SwapError: For the host tier without an accelerator, where swapped tensors would stay in the same memory, and
            for the disk tier on a system without spill files.
    """
    reason = reason_without_tier(params, device)
    if not reason:
        return HostTier() if is_host_tier(params, device) else DiskTier(SpillStore(params.directory, params.page_cache))
    if is_host_tier(params, device):
        remedy = 'Use `tier="disk"`'
    elif reason_unsupported():
        remedy = "Use tiles alone: `SFTParams`, or `swap=False` with a budget"
    else:
        remedy = "Use `page_cache=True`"
    raise SwapError(f"{reason[0].upper()}{reason[1:]}. {remedy}.")


def reason_without_tier(params: SwapParams, device: DeviceModel) -> str:
    """Return why no tensor can be swapped with these parameters on this system; empty if some can be."""
    if is_host_tier(params, device):
        has_host = device.is_gpu or len(tf.config.list_logical_devices("CPU")) > 1
        text = '`tier="host"` needs an accelerator: without one, host memory is the memory of the device'
        return "" if has_host else text
    reason = reason_unsupported(params.page_cache)
    return reason and f"this system cannot swap to disk: {reason}"


def swapped_seconds(
    traced: TracedStep, graph: Graph, swaps: Iterable[Swap], params: SwapParams, seconds: float, waiting: float | None
) -> float:
    """Return the time of a step whose graph is prepared for swaps, given its time without swaps.

    `waiting` is the time by which transfers delay the step, if that was simulated.
    """
    seconds += _serialisation_seconds(traced, graph) + _recomputation_seconds(traced, graph)
    if waiting is not None:
        return seconds + waiting
    sizes = [(swap.tensor.num_bytes(traced.batch), len(swap.swap_ins)) for swap in swaps]
    out, back = sum(size for size, _ in sizes), sum(size * times for size, times in sizes)
    return traced.rates.swapped(seconds, out, back, _to_disk(traced, params, out))


def _to_disk(traced: TracedStep, params: SwapParams, out: int) -> bool:
    """Return whether `out` swapped bytes reach the disk itself, not its page cache alone."""
    return not is_host_tier(params, traced.device) and (not params.page_cache or exceeds_page_cache(out))


def out_seconds(traced: TracedStep, outs: Iterable[Node], params: SwapParams) -> dict[Node, float]:
    """Return the seconds that each swap-out may last, while its tensor stays in memory."""
    sizes = {out: sum(tensor.num_bytes(traced.batch) for tensor in out.inputs) for out in outs}
    rates = traced.rates
    rate = min(rates.copied, rates.disk_write) if _to_disk(traced, params, sum(sizes.values())) else rates.copied
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


def no_room(tier: HostTier | DiskTier, swaps: Sequence[Swap], batch: int, times: int = 1) -> str:
    """Return the reason why a tier lacks room for `times` copies of the swaps now, with the remedy; empty if it has."""
    if not isinstance(tier, DiskTier):
        return ""
    needed = times * sum(swap.tensor.num_bytes(batch) for swap in swaps)
    lists = any(swap.saved is not None for swap in swaps)  # Their elements share a file.
    return _no_space(tier.store, needed) or _no_files(times * sum(swap.saved is None for swap in swaps) + lists)


def _no_space(store: SpillStore, needed: int) -> str:
    free = store.free_bytes()
    if needed <= free:
        return ""
    return (
        f"`spill_dir` has too little space. A step swaps {format_bytes(needed)} ({needed} bytes) to "
        f"{store.directory!r}, where {format_bytes(free)} are free. Pass another directory, or swap fewer tensors "
        "(`n_tensors`)."
    )


def _no_files(needed: int) -> str:
    """Return the reason why the process may not open `needed` more files; empty if it may."""
    limit, _ = open_file_limits()
    opened = len(open_descriptors() or ())
    if opened + needed <= limit:
        return ""
    return (
        f"A step swaps {needed} tensors to disk, each to a file of its own. This process may have {limit} files "
        f"open, and has {opened}. Raise the limit (`ulimit -n {2 * (opened + needed)}` in the shell), or swap "
        "fewer tensors (`n_tensors`, or a larger `min_bytes`)."
    )


def check_names(traced: TracedStep, graph: Graph, params: SwapParams) -> None:
    """Refuse scopes, ops and op types that neither the original step nor its tiled graph has.

    Raises:
        SwapError: For the first of them, with the nearest name that exists.
    """
    nodes = {**traced.analysis.graph.nodes, **graph.nodes}
    names = list(nodes)
    scopes = list(dict.fromkeys(part for name in names for part in _prefixes(name)))
    types = list(dict.fromkeys(node.op for node in nodes.values()))
    single = () if params.starting_scope is None else (params.starting_scope,)
    for argument, values in (
        ("optimizer_scopes", params.optimizer_scopes),
        ("starting_scope", single),
        ("excl_scopes", params.excl_scopes),
        ("incl_scopes", params.incl_scopes),
    ):
        _require(argument, values, lambda scope: any(in_scope(name, scope) for name in names), scopes)
    _require("starting_op_names", params.starting_op_names, nodes.__contains__, names)
    for argument in ("excl_types", "incl_types"):
        _require(argument, getattr(params, argument), types.__contains__, types)


def _prefixes(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[: count + 1]) for count in range(len(parts))] + parts


def _require(argument: str, values: Iterable[str], exists: Callable[[str], bool], names: list[str]) -> None:
    for name in values:
        if not exists(name):
            raise SwapError(f"`{argument}` names nothing in the step. Received: {name!r}. {nearest(name, names)}")


def _nothing(analysis: GraphAnalysis, params: SwapParams, plan: SwapPlan, batch: int) -> str:
    """Return the reason why nothing is swapped, with the remedy."""
    everything = dataclasses.replace(params.options(), min_bytes=0, excl_scopes=(), excl_types=(), incl_scopes=())
    everything = dataclasses.replace(everything, incl_types=(), starting_scope=None, starting_op_names=(), n_tensors=-1)
    candidates = plan_swaps(analysis, everything, batch).swaps
    if plan.left:
        shown = "; ".join(f"`{name}`: {reason}" for name, reason in plan.left[:MAX_REASONS])
        return f"No tensor can be swapped: {shown}. Lower `lb` or raise `ub`."
    if not candidates:
        return (
            "No tensor can be swapped: the backward pass reads no result of a forward op much later. Pass a step that "
            "computes gradients, with layers between a tensor and its last consumer."
        )
    largest = max(swap.tensor.num_bytes(batch) for swap in candidates)
    return (
        f"The parameters exclude all {len(candidates)} tensor(s) that could be swapped, the largest of "
        f"{format_bytes(largest)}. Lower `min_bytes` ({format_bytes(params.options().min_bytes)}), or widen scopes, "
        "types or the starting point."
    )


def with_swap_records(
    plan: Plan,
    traced: TracedStep,
    graph: Graph,
    swaps: Iterable[Swap],
    left: Iterable[tuple[str, str]],
    tier: HostTier | DiskTier,
) -> Plan:
    """Return a plan with the records of the swaps in a graph, and of tensors that stay, by their display names."""
    names = peak_names(traced)
    records = [
        PlannedSwap(
            tensor=names.tensor_called(s.tensor.name, graph)
            if s.saved is None
            else names.element(s.tensor.node.name, s.saved.element),
            num_bytes=s.tensor.num_bytes(traced.batch),
            readers=tuple(tuple(reader.name for reader in way.readers) for way in s.swap_ins),
            controls=tuple(way.control.name for way in s.swap_ins),
        )
        for s in swaps
    ]
    note = ""
    if isinstance(tier, DiskTier) and is_in_memory(tier.store.directory):
        directory = repr(tier.store.directory)
        note = f"{directory} is in memory, so swapping to it saves no memory: pass a directory on disk as `spill_dir`"
    return amend_plan(
        plan,
        note,
        swaps=tuple(records),
        swap_tier="host" if isinstance(tier, HostTier) else "disk",
        not_swapped=tuple((names.tensor_called(name, graph), names.in_text(why, graph)) for name, why in left),
    )
