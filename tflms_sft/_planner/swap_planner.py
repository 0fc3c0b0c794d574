"""From swap parameters to a graph with swaps, and what the plan says of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from rewriters.analysis.autodiff_roles import in_scope
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device import properties
from rewriters.device.peak_memory import waits
from rewriters.emission.tile_pass import loop_nodes
from rewriters.errors import SwapError
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.pipelining.stage_passes import StagedStep, with_swaps
from rewriters.swapping.recompute_pooling import again_name, pooled_for
from rewriters.swapping.spill_store import SpillStore, is_in_memory
from rewriters.swapping.swap_pass import Swap, SwapPlan, insert_swaps, plan_swaps, prepare_for_swapping
from rewriters.swapping.tiers import DiskTier, HostTier
from tflms_sft._machine.memory_info import free_memory
from tflms_sft._params.device_names import machine_of, remote_devices
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._planner.traced_step import TracedStep
from tflms_sft._report.plan_records import PlannedSwap
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.text import nearest, shortened

MOST_CACHED = 0.5
"""Part of the machine's free memory that a disk's cache may take without writing at once."""

DELAYED = 4.0
"""How many times longer than measured a swap-out may take beside what else runs, for all that is said of memory."""

MOST_REASONS = 4
"""Reasons after which an error is cut short."""


@dataclasses.dataclass
class Swapped:
    """A graph with swaps.

    Attributes:
        graph: The graph.
        swaps: What is swapped.
        left: (tensor, why it stays).
        tier: Where to; it has to live as long as the graph may run.
        outs: Swap-outs, and for how many seconds each may go on.
        away: Those whose results are not in the device's memory.
    """

    graph: Graph
    swaps: list[Swap]
    left: list[tuple[str, str]]
    tier: HostTier | DiskTier
    outs: Mapping[Node, float]
    away: frozenset[Node]


class NothingToSwapError(SwapError):
    """There is nothing in the graph that could be swapped as asked for; another one of the same step may have some."""


def apply_swaps(traced: TracedStep, graph: Graph, params: SwapParams) -> Swapped:
    """Swap as the parameters say.

    Args:
        traced: The step.
        graph: Its graph, tiled or not.
        params: What to swap.

    Raises:
        NothingToSwapError: If nothing can be swapped.
        SwapError: For names that are not in the graph, a tier that is not there, and a step on other machines.
    """
    check_here(traced)
    batch, tier = traced.batch, make_tier(params)
    check_names(traced, graph, params)
    analysis = prepared(traced, graph, params)
    plan = plan_swaps(analysis, params.options(), batch)
    if not plan.swaps:
        raise NothingToSwapError(_nothing(analysis, params, plan, batch))
    refused = no_room(tier, plan.swaps, batch)
    if refused:
        raise SwapError(refused)
    new, outs = insert_swaps(analysis, plan.swaps, tier, params.max_in_flight)
    # A swap-out to disk makes the number of a file, which the device may well have.
    away = frozenset(outs) if isinstance(tier, HostTier) else frozenset[Node]()
    return Swapped(new, plan.swaps, plan.left, tier, out_seconds(traced, outs, params), away)


def swap_in_stages(
    traced: TracedStep, staged: StagedStep, params: SwapParams, devices: Sequence[str], micro_batches: int
) -> tuple[StagedStep, HostTier | DiskTier]:
    """Swap inside of the stages of a pipeline.

    Args:
        traced: The step of a micro-batch.
        staged: The same in stages, tiled or not.
        params: What to swap.
        devices: Of the stages.
        micro_batches: How many a step has.

    Raises:
        SwapError: As for `apply_swaps`; for stages on other machines too.
    """
    check_here(traced, devices)
    tier = make_tier(params)
    check_names(traced, staged.analysis.graph, params)
    found = with_swaps(staged, params.options(), tier, traced.batch, params.max_in_flight, params.optimizer_scopes)
    if not found.swaps:
        raise SwapError(_nothing(found.analysis, params, SwapPlan([], list(found.left)), traced.batch))
    refused = no_room(tier, found.swaps, traced.batch, micro_batches)
    if refused:
        raise SwapError(refused)
    return found, tier


def prepared(traced: TracedStep, graph: Graph, params: SwapParams) -> GraphAnalysis:
    """The graph as swaps are planned for it; without tiles that is what they were chosen by."""
    loops = [name for (_, phase), name in loop_nodes(graph).items() if phase.startswith("backward")]
    scopes = (*params.optimizer_scopes, *(name.rpartition("/")[0] for name in loops))  # with what a loop begins with
    known = traced.prepared if graph is traced.analysis.graph else {}
    key = params.min_bytes, scopes
    if key not in known:
        known[key] = prepare_for_swapping(graph, params.min_bytes, traced.batch, scopes, traced.forward)
    return known[key]


def check_here(traced: TracedStep, devices: Iterable[str] = ()) -> None:
    """Refuse a step on several machines.

    Functions in Python that a graph calls run in the program that made them, wherever they are placed: what a worker
    swaps to disk would be sent here and back. And the host is this one's.

    Args:
        traced: The step.
        devices: Others that it is to run on.

    Raises:
        SwapError: With the devices.
    """
    afar = sorted({*remote_devices(traced.concrete_fn), *filter(machine_of, devices)})
    if afar:
        raise SwapError(
            f"The step is also on other machines, {shortened(afar, MOST_REASONS)}, and what is swapped goes to the "
            "disk or the host memory of this one, through the network. Swap in programs whose devices are their own."
        )


def make_tier(params: SwapParams) -> HostTier | DiskTier:
    """The tier that was asked for.

    Raises:
        SwapError: For the host tier without an accelerator: what is swapped out would stay in the same memory.
    """
    beside = properties.name().startswith("GPU") or len(tf.config.list_logical_devices("CPU")) > 1
    if params.tier == "host" and not beside:
        raise SwapError(
            '`tier="host"` needs an accelerator: on a machine without one host memory is the device\'s own. '
            'Use `tier="disk"`.'
        )
    if params.tier == "host" or (params.tier == "auto" and properties.name().startswith("GPU")):
        return HostTier()
    return DiskTier(SpillStore(params.directory, params.page_cache))


def swapped_seconds(
    traced: TracedStep, graph: Graph, swaps: Iterable[Swap], params: SwapParams, seconds: float
) -> float:
    """Time of a step with these swaps, which takes `seconds` without; `graph` was prepared for swaps."""
    seconds += _one_by_one(traced, graph) + _made_again(traced, graph)
    sizes = [(swap.tensor.num_bytes(traced.batch), len(swap.swap_ins)) for swap in swaps]
    out, back = sum(size for size, _ in sizes), sum(size * times for size, times in sizes)
    return traced.rates.swapped(seconds, out, back, _to_disk(params, out))


def _to_disk(params: SwapParams, out: int) -> bool:
    """Whether so many bytes that leave go to the disk itself, and not to its cache in memory alone."""
    return isinstance(make_tier(params), DiskTier) and (not params.page_cache or out > free_memory() * MOST_CACHED)


def out_seconds(traced: TracedStep, outs: Iterable[Node], params: SwapParams) -> dict[Node, float]:
    """For how many seconds each swap-out may go on, what it takes away being still there."""
    sizes = {out: sum(tensor.num_bytes(traced.batch) for tensor in out.inputs) for out in outs}
    rates = traced.rates
    rate = min(rates.copied, rates.disk_write) if _to_disk(params, sum(sizes.values())) else rates.copied
    return {out: DELAYED * size / rate for out, size in sizes.items()}


def _one_by_one(traced: TracedStep, graph: Graph) -> float:
    """Seconds that a step takes longer because gradients that ran at once wait for one another in a graph for swaps."""
    order = graph.execution_order()
    position = {node.name: number for number, node in enumerate(order)}
    apart: list[Node] = []
    for pair in traced.costs.gradient_pairs.items():
        numbers = sorted(position[node.name] for node in pair if node.name in position)
        if len(numbers) == len(pair) and waits(order, *numbers):
            apart.extend(pair)
    return traced.costs.concurrency_savings(apart)


def _made_again(traced: TracedStep, graph: Graph) -> float:
    """Seconds for poolings that are made again for their gradients."""
    nodes = traced.analysis.graph.nodes.values()
    pools = [pooled_for(node) for node in nodes if again_name(node) in graph.nodes]
    return sum(traced.costs.op(pool) for pool in pools if pool is not None)


def notes(tier: HostTier | DiskTier) -> tuple[str, ...]:
    """What a user should know of where tensors go."""
    if isinstance(tier, DiskTier) and is_in_memory(tier.store.directory):
        where = tier.store.directory
        return (f"{where!r} is in memory, so that swapping there saves none: give a disk as `spill_dir`",)
    return ()


def no_room(tier: HostTier | DiskTier, swaps: Sequence[Swap], batch: int, times: int = 1) -> str:
    """Why so much cannot be swapped there now, so many times over, with the remedy; empty if it can."""
    if not isinstance(tier, DiskTier):
        return ""
    needed = times * sum(swap.tensor.num_bytes(batch) for swap in swaps)
    return _no_space(tier.store, needed) or _no_files(times * len(swaps))


def _no_space(store: SpillStore, needed: int) -> str:
    free = store.free_bytes()
    if needed <= free:
        return ""
    return (
        f"`spill_dir` has too little space: a step swaps {format_bytes(needed)} ({needed} bytes) to "
        f"{store.directory!r}, {format_bytes(free)} are free. Give another directory, or swap fewer tensors "
        "(`n_tensors`)."
    )


def _no_files(needed: int) -> str:
    """A process may have so many files open and no more."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = 0
    with contextlib.suppress(OSError):  # Not every system tells what is open.
        opened = len(os.listdir("/proc/self/fd"))
    if limit == resource.RLIM_INFINITY or opened + needed <= limit:
        return ""
    return (
        f"A step swaps {needed} tensors to disk, each to a file of its own; this process may have {limit} files "
        f"open, and has {opened}. Raise the limit (`ulimit -n {2 * (opened + needed)}` in the shell), or swap "
        "fewer tensors (`n_tensors`, or a larger `min_bytes`)."
    )


def check_names(traced: TracedStep, graph: Graph, params: SwapParams) -> None:
    """Refuse scopes, operations and types that the step has neither as it was nor tiled, with the nearest it has.

    Raises:
        SwapError: For the first of them.
    """
    nodes = {**traced.analysis.graph.nodes, **graph.nodes}
    names = list(nodes)
    scopes = list(dict.fromkeys(part for name in names for part in _prefixes(name)))
    types = list(dict.fromkeys(node.op for node in nodes.values()))
    single = () if params.starting_scope is None else (params.starting_scope,)
    for argument, wanted in (
        ("optimizer_scopes", params.optimizer_scopes),
        ("starting_scope", single),
        ("excl_scopes", params.excl_scopes),
        ("incl_scopes", params.incl_scopes),
    ):
        _require(argument, wanted, lambda scope: any(in_scope(name, scope) for name in names), scopes)
    _require("starting_op_names", params.starting_op_names, nodes.__contains__, names)
    for argument in ("excl_types", "incl_types"):
        _require(argument, getattr(params, argument), types.__contains__, types)


def _prefixes(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[: count + 1]) for count in range(len(parts))] + parts


def _require(argument: str, wanted: Iterable[str], known: Callable[[str], bool], names: list[str]) -> None:
    for name in wanted:
        if not known(name):
            raise SwapError(f"`{argument}` names nothing in the step. Received: {name!r}. {nearest(name, names)}")


def _nothing(analysis: GraphAnalysis, params: SwapParams, plan: SwapPlan, batch: int) -> str:
    """Why nothing is swapped."""
    everything = dataclasses.replace(params.options(), min_bytes=0, excl_scopes=(), excl_types=(), incl_scopes=())
    everything = dataclasses.replace(everything, incl_types=(), starting_scope=None, starting_op_names=(), n_tensors=-1)
    found = plan_swaps(analysis, everything, batch).swaps
    if plan.left:
        shown = "; ".join(f"`{name}`: {reason}" for name, reason in plan.left[:MOST_REASONS])
        return (
            f"Nothing can be swapped. {shown}. Lower `lb` or raise `ub`; what loops keep inside, such as recurrent "
            "layers, is not swapped."
        )
    if not found:
        return (
            "Nothing can be swapped: no forward operation makes a tensor that the backward phase reads much later. "
            "Pass a step that computes gradients, with layers between a tensor and its last reader; what loops keep "
            "inside, such as recurrent layers, is not swapped."
        )
    largest = max(swap.tensor.num_bytes(batch) for swap in found)
    return (
        f"Nothing is swapped: {len(found)} tensor(s) could be, the largest of {format_bytes(largest)}, and scopes, "
        f"types, the starting point or `min_bytes` ({format_bytes(params.options().min_bytes)}) leave none. Widen them."
    )


def described(swaps: Iterable[Swap], batch: int, names: Mapping[Tensor, str]) -> tuple[PlannedSwap, ...]:
    """What the plan says of each swap."""
    return tuple(
        PlannedSwap(
            tensor=names.get(s.tensor, s.tensor.name),
            num_bytes=s.tensor.num_bytes(batch),
            readers=tuple(tuple(reader.name for reader in way.readers) for way in s.swap_ins),
            controls=tuple(way.control.name for way in s.swap_ins),
        )
        for s in swaps
    )
