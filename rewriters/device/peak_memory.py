"""Peak memory: the bytes that are alive at the worst moment of a step.

Liveness analysis over the graph with known shapes, in the order of an executor that runs first what is ready first. A
tensor is allocated when its op runs and freed after its last consumer. Ops that forward their operand's buffer, or may
overwrite it, allocate nothing, as in TensorFlow. A tile loop is one op during which some of its iterations run. The
allocations are replayed against a model of the device's allocator.

Unknown are the executor's order among ready ops and the inner allocations of kernels; the measured peak is reported
next to the predicted one. `estimates/unmodelled.py` lists the ops whose tensors have sizes that no graph contains.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from rewriters.device.allocator import Allocator, ExactAllocator, empty_pool, pools
from rewriters.device.kernel_scratch import op_scratch
from rewriters.device.op_buffers import allocates, forwards_input_buffer, may_run_in_place
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import IN_FILES, LOOPS, Graph, Node, Tensor, ancestors, predecessors
from rewriters.ir.loop_bodies import folded_tensors, is_folded
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_PYTHON_CALLS = ops_with(Trait.PYTHON_CALL)

MAX_FRAGMENTATION = 1.6
"""Bytes of memory over bytes in use from which on no plan is checked for fragmentation; plans needed up to 1.4."""

FRAGMENTATION_STEP = 1.03
"""Ratio of the sizes of memory that are tried."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """The worst moment of a step.

    Attributes:
        peak_bytes: Bytes that the device counts as allocated, including fixed ones, plus `fragmentation_bytes`.
        at: Name of the op that runs at the peak.
        largest: (name, bytes) of the largest live tensors, largest first. The tensor lists that a loop fills count as
            one, under the name of the loop.
        timeline: (op name, bytes allocated while it runs), in order.
        own_bytes: Bytes that exist only while this op runs: kernel scratch, or all memory of a loop's iteration.
        fragmentation_bytes: Bytes of free chunks between tensors, on a GPU that is nearly full.
    """

    peak_bytes: int
    at: str
    largest: tuple[tuple[str, int], ...]
    timeline: tuple[tuple[str, int], ...]
    own_bytes: int
    fragmentation_bytes: int = 0


class Action(enum.Enum):
    """Kinds of allocation events."""

    ALLOCATE = "allocate"
    MAP = "map"
    RUN = "run"
    FREE = "free"


_TAKES = frozenset((Action.ALLOCATE, Action.MAP))


class AllocationEvent(NamedTuple):
    """One event of an allocation trace.

    Attributes:
        action: Kind of the event.
        key: Number of the buffer, for `ALLOCATE`, `MAP` (memory of another allocator) and `FREE`.
        num_bytes: Size of the buffer, or scratch bytes of an op.
        name: Tensor that is allocated, loop whose list is allocated, or op that runs.
        blocks: Scratch blocks of an op, in bytes.
    """

    action: Action
    key: int
    num_bytes: int
    name: str
    blocks: tuple[int, ...] = ()


@dataclasses.dataclass
class _Allocation:
    """A buffer of one or more tensors, which alias each other.

    Attributes:
        key: Number of the buffer in events.
        num_bytes: Its size.
        foreign: Whether it is not TensorFlow's own, as a NumPy array, which TensorFlow never overwrites.
        uses: Reads that are still to come.
    """

    key: int
    num_bytes: int
    foreign: bool
    uses: int = 0


class _Scheduler:
    """Tracks buffers through ops that run one after another."""

    def __init__(
        self,
        order: Sequence[Node],
        num_bytes: Callable[[Tensor], int],
        *,
        keep: Iterable[Tensor],
        alias: Callable[[Node], bool],
    ) -> None:
        self.events: list[AllocationEvent] = []
        self._num_bytes = num_bytes
        self._alias = alias
        self._buffers: dict[Tensor, _Allocation] = {}
        self._alive: dict[int, _Allocation] = {}
        self._keys = itertools.count()
        self._reads: dict[Tensor, int] = {}
        for tensor in itertools.chain(keep, *(_needed(node) for node in order)):
            self._reads[tensor] = self._reads.get(tensor, 0) + 1

    def run(self, node: Node, scratch: tuple[int, ...]) -> None:
        """Record the allocation of results, the run of the op, then frees of tensors without further consumers."""
        reusable = self._reusable(node)
        outputs = [node.out(index) for index in range(len(node.outputs))]
        shared = node.loop.output_buffers if node.loop is not None else {}
        for tensor in sorted(outputs, key=lambda tensor: tensor.index in shared) if shared else outputs:
            buffer, reusable = self._buffer(node, tensor, reusable)
            buffer.uses += self._reads.get(tensor, 0)
            self._buffers[tensor] = buffer
        if allocates(node):
            self.events.append(AllocationEvent(Action.RUN, -1, sum(scratch), node.name, scratch))
        needed = _needed(node)
        for tensor in needed:
            held = self._buffers.get(tensor)
            if held is not None:
                held.uses -= 1
        for tensor in (*needed, *outputs):
            held = self._buffers.get(tensor)
            if held is not None and held.uses <= 0 and held.key in self._alive:
                del self._alive[held.key]
                self.events.append(AllocationEvent(Action.FREE, held.key, 0, tensor.name))

    def end(self) -> list[AllocationEvent]:
        """Return all events, with frees of all live buffers at the end."""
        return [*self.events, *(AllocationEvent(Action.FREE, key, 0, "") for key in self._alive)]

    def _buffer(
        self, node: Node, tensor: Tensor, reusable: _Allocation | None
    ) -> tuple[_Allocation, _Allocation | None]:
        """Return the buffer of a result, an operand's or a new one, and the operand buffer that is left for reuse."""
        source = self._buffers.get(node.inputs[0]) if node.inputs else None
        if source is not None and self._alias(node):
            return source, reusable
        held = self._held_elsewhere(node, tensor)
        if held is not None:
            return held, reusable
        if reusable is not None and self._num_bytes(tensor) == reusable.num_bytes:
            return reusable, None
        # A loop fills its lists even if nobody reads them; its other unread results count with its iterations.
        unread = not self._reads.get(tensor) and node.op in LOOPS and tensor.dtype != tf.variant
        silent = unread or not allocates(node)
        foreign = node.op in _PYTHON_CALLS
        buffer = _Allocation(next(self._keys), 0 if silent else self._num_bytes(tensor), foreign)
        if buffer.num_bytes:
            self._alive[buffer.key] = buffer
            elementwise = tensor.dtype == tf.variant  # Elements of a list are allocated one by one, and fill gaps.
            action = Action.MAP if foreign or elementwise else Action.ALLOCATE
            name = node.name if elementwise and node.op in LOOPS else tensor.name
            self.events.append(AllocationEvent(action, buffer.key, buffer.num_bytes, name))
        return buffer, reusable

    def _held_elsewhere(self, node: Node, tensor: Tensor) -> _Allocation | None:
        """Return the buffer of a result of a loop, or of one of several identities, that exists already."""
        facts, index = node.loop, tensor.index
        if node.op == "IdentityN":
            return self._buffers.get(node.inputs[index])
        if facts is None:
            return None
        if index in facts.operand_buffers:
            return self._buffers.get(node.inputs[facts.operand_buffers[index]])
        if index in facts.output_buffers:
            owner = self._buffers[node.out(facts.output_buffers[index])]
            return owner if owner.num_bytes else None
        if node.op not in LOOPS or facts.body is None or tensor.dtype == tf.variant:
            return None
        before = node.inputs[index]  # The first iteration frees it, and the last one returns as many bytes.
        buffer = self._buffers.get(before)
        ends = buffer is not None and buffer.uses == node.inputs.count(before) == 1 and not buffer.foreign
        is_same = ends and buffer is not None and buffer.num_bytes == self._num_bytes(tensor)
        return buffer if is_same and allocates(before.node) else None

    def _reusable(self, node: Node) -> _Allocation | None:
        """Return the buffer of an operand that ends here and that the op may overwrite."""
        if not may_run_in_place(node):
            return None
        wanted = self._num_bytes(node.out())
        for tensor in node.inputs:
            buffer = self._buffers.get(tensor)
            if buffer is None or buffer.uses != node.inputs.count(tensor) or buffer.num_bytes != wanted:
                continue
            if allocates(tensor.node) and not buffer.foreign:
                return buffer
        return None


def _needed(node: Node) -> list[Tensor]:
    """Return the operands of an op. Arrays made by Python also live until the op that releases them has run."""
    if node.op not in _PYTHON_CALLS or node.inputs:
        return node.inputs
    read = dict.fromkeys(tensor for reader in node.control_inputs for tensor in reader.inputs)
    return [tensor for tensor in read if _source(tensor).op in _PYTHON_CALLS]


def _source(tensor: Tensor) -> Node:
    node = tensor.node
    while forwards_input_buffer(node) and node.inputs:
        node = node.inputs[0].node
    return node


def schedule(
    order: Sequence[Node],
    num_bytes: Callable[[Tensor], int],
    scratch: Mapping[Node, tuple[int, ...]],
    keep: Iterable[Tensor] = (),
    alias: Callable[[Node], bool] = forwards_input_buffer,
) -> list[AllocationEvent]:
    """Return the allocation events of ops that run in a given order.

    Args:
        order: Ops in execution order.
        num_bytes: Bytes of a tensor.
        scratch: Scratch blocks of each op, in bytes.
        keep: Tensors that are freed only at the end.
        alias: Whether an op forwards its operand's buffer.
    """
    scheduler = _Scheduler(order, num_bytes, keep=keep, alias=alias)
    for node in order:
        scheduler.run(node, scratch.get(node, ()))
    return scheduler.end()


def most_alive(
    order: Sequence[Node],
    batch: int,
    keep: Iterable[Tensor] = (),
    scratch: Mapping[Node, tuple[int, ...]] | None = None,
) -> int:
    """Return the peak bytes of op results, without an allocator's rounding; parameters as for `schedule`."""
    return peak_bytes_of(schedule(order, lambda t: t.num_bytes(batch), scratch or {}, keep), ExactAllocator())


class IterationTrace(NamedTuple):
    """Allocations of one iteration of a tile loop.

    Attributes:
        events: In order.
        late: Events with delayed frees, for two concurrent ops (`with_delayed_frees`).
    """

    events: list[AllocationEvent]
    late: list[AllocationEvent]


def peak_bytes_of(events: Sequence[AllocationEvent], pool: Allocator) -> int:
    """Replay events and return the peak bytes while an op runs."""
    allocate, give, maps = Action.ALLOCATE, Action.FREE, Action.MAP  # Lookups of enums and methods are slow.
    new_block, free_block = pool.allocate, pool.free
    held: dict[int, Any] = {}
    most = pool.in_use
    for action, key, num_bytes, _, blocks in events:
        if action is allocate:
            held[key] = new_block(num_bytes)
        elif action is give:
            free_block(held.pop(key))
        elif action is maps:
            held[key] = pool.map(num_bytes)
        elif blocks:
            handles = [pool.allocate(block) for block in blocks]
            most = max(most, pool.in_use)
            for handle in handles:
                pool.free(handle)
        elif pool.in_use > most:
            most = pool.in_use
    return most


def worst_kernel(events: Sequence[AllocationEvent]) -> tuple[int, str, int]:
    """Return the worst moment of an iteration: its bytes, the op that runs then, and the scratch bytes of this op."""
    held: dict[int, int] = {}
    now = 0
    worst = (0, "", 0)
    for action, key, num_bytes, name, _ in events:
        if action in _TAKES:
            held[key] = num_bytes
            now += num_bytes
        elif action is Action.FREE:
            now -= held.pop(key)
        elif now + num_bytes > worst[0]:
            worst = (now + num_bytes, name, num_bytes)
    return worst


def sizes_at_peak(events: Sequence[AllocationEvent]) -> list[int]:
    """Return the sizes of the tensors and scratch blocks that are alive at the worst moment of an iteration."""
    held: dict[int, int] = {}
    worst, sizes = 0, list[int]()
    for action, key, num_bytes, _, blocks in events:
        if action in _TAKES:
            held[key] = num_bytes
        elif action is Action.FREE:
            del held[key]
        elif sum(held.values()) + num_bytes > worst:
            worst, sizes = sum(held.values()) + num_bytes, [*held.values(), *blocks]
    return sizes


def replay(
    events: Sequence[AllocationEvent],
    pool: Allocator,
    iterations: Mapping[str, Sequence[Sequence[AllocationEvent]]] | None = None,
    above: int = -1,
    replicas: int = 1,
) -> Peak:
    """Replay a step, including iterations of loops; earlier allocations of `pool` stay.

    Args:
        events: Events in order.
        pool: Memory of the device.
        iterations: Traces of the iterations that run one after another in a loop, by its name.
        above: Peak bytes up to which `Peak.largest` stays empty, which saves time.
        replicas: Number of equal loops, or ops with scratch memory, that run concurrently on as many devices.
    """
    allocate, give, maps, inner = Action.ALLOCATE, Action.FREE, Action.MAP, iterations or {}
    new_block, free_block = pool.allocate, pool.free
    held: dict[int, Any] = {}
    timeline: list[tuple[str, int]] = []
    peak, worst, at, own_bytes = pool.in_use, 0, "", 0
    for number, (action, key, num_bytes, name, blocks) in enumerate(events):
        if action is allocate:
            held[key] = new_block(num_bytes)
            continue
        if action is give:
            free_block(held.pop(key))
            continue
        if action is maps:
            held[key] = pool.map(num_bytes)
            continue
        before = now = pool.in_use
        if blocks or name in inner:  # Most ops have no scratch memory and are no loops.
            handles = [pool.allocate(block) for block in blocks]
            now = max([pool.in_use, *(peak_bytes_of(iteration, pool) for iteration in inner.get(name, ()))])
            for handle in handles:
                pool.free(handle)
            now = before + replicas * (now - before)
        timeline.append((name, now))
        if now > peak:
            peak, worst, at, own_bytes = now, number, name, now - before
    return Peak(peak, at, _largest(events[:worst]) if peak > above else (), tuple(timeline), own_bytes)


def with_delayed_frees(events: Sequence[AllocationEvent], loops: Container[str] = ()) -> list[AllocationEvent]:
    """Return a copy of the events in which each free happens after the next op has allocated, for two concurrent ops.

    A loop begins when all ops before it have ended.
    """
    result: list[AllocationEvent] = []
    waiting: list[AllocationEvent] = []
    for event in events:
        if event.action is Action.FREE:
            waiting.append(event)
            continue
        if event.action is Action.RUN:
            before = event.name in loops
            result.extend([*waiting, event] if before else [event, *waiting])
            waiting = []
        else:
            result.append(event)
    return [*result, *waiting]


def _largest(events: Sequence[AllocationEvent]) -> tuple[tuple[str, int], ...]:
    alive: dict[int, AllocationEvent] = {}
    for event in events:
        if event.action in _TAKES:
            alive[event.key] = event
        elif event.action is Action.FREE:
            del alive[event.key]
    sizes: dict[str, int] = {}
    for event in alive.values():
        sizes[event.name] = sizes.get(event.name, 0) + event.num_bytes
    return tuple(sorted(sizes.items(), key=lambda item: -item[1])[:10])


@dataclasses.dataclass(frozen=True)
class AllocationTrace:
    """Allocations of a graph, without those of the iterations of its loops.

    Attributes:
        events: In order.
        late: Events with delayed frees, for two concurrent ops (`with_delayed_frees`).
        held: Bytes of each tensor that lives throughout: variables and arguments.
        folded_bytes: Bytes of tensors that constant folding fills once and never frees.
        device: The device.
    """

    events: list[AllocationEvent]
    late: list[AllocationEvent]
    held: list[int]
    folded_bytes: int
    device: DeviceModel


def graph_schedule(
    graph: Graph,
    loops: Container[str],
    batch: int,
    fixed: Sequence[int],
    *,
    away: Container[Node] = (),
    slow: Mapping[Node, float] | None = None,
    seconds: Callable[[Node], float] | None = None,
    order: Sequence[Node] | None = None,
) -> AllocationTrace:
    """Return the allocations of a graph.

    Args:
        graph: A step.
        loops: Names of its tile loops.
        batch: Batch size that stands for an unknown one.
        fixed: Bytes of each variable.
        away: Ops whose results lie in other memory; each consumer has a copy on the device.
        slow: Seconds of ops that run concurrently with others, such as writes to a disk.
        seconds: Duration of each other op. Without it slow ops end only when all others wait for them.
        order: Order of the ops, if it is known.
    """

    def num_bytes(tensor: Tensor) -> int:
        if tensor.node in away or is_folded(tensor) or _is_in_file(tensor):
            return 0
        return tensor.num_bytes(batch)

    def alias(node: Node) -> bool:
        return forwards_input_buffer(node) and node not in away and not any(t.node in away for t in node.inputs)

    order = graph.execution_order(slow, seconds) if order is None else order
    scratch = concurrent_scratch({node: op_scratch(node, batch, graph.device) for node in order}, order, graph.device)
    events = schedule(order, num_bytes, scratch, graph.outputs, alias)
    held = [*fixed, *(t.num_bytes(batch) for t in graph.inputs)]
    folded_bytes = sum(t.num_bytes(batch) for t in folded_tensors(graph))
    return AllocationTrace(events, with_delayed_frees(events, loops), held, folded_bytes, graph.device)


def _is_in_file(tensor: Tensor) -> bool:
    return IN_FILES in tensor.node.attrs and tensor.index in tensor.node.attrs[IN_FILES].list.i


def graph_peak(
    trace: AllocationTrace,
    iterations: Mapping[str, Sequence[IterationTrace]],
    limit: int | None = None,
    replicas: int = 1,
) -> Peak:
    """Return the peak of a graph over the states that the device's memory may be in.

    Args:
        trace: Allocations of the graph.
        iterations: Traces of the iterations that run one after another in a tile loop, by its name.
        limit: Bytes above which the first state suffices.
        replicas: As for `replay`. The peak is the sum over all devices.
    """
    worst: Peak | None = None
    runs = _runs(trace, iterations)
    scale = sum(trace.held) + max((e.num_bytes for e in trace.events), default=0)
    for pool in pools(trace.device, scale):
        _allocate_held(trace, pool)
        for events, inner in runs:
            peak = replay(events, pool, inner, -1 if worst is None else worst.peak_bytes, replicas)
            worst = peak if worst is None or peak.peak_bytes > worst.peak_bytes else worst
            if limit is not None and worst.peak_bytes > limit:
                return worst
    assert worst is not None
    return worst if replicas > 1 else _with_fragmentation(worst, trace, runs, limit)


_Run = tuple[list[AllocationEvent], dict[str, list[list[AllocationEvent]]]]
"""Events of a graph, and those of the iterations of each loop."""


def _runs(trace: AllocationTrace, iterations: Mapping[str, Sequence[IterationTrace]]) -> tuple[_Run, _Run]:
    """Return two runs of a graph, the second with delayed frees; it starts with fragmented memory."""
    return (
        (trace.events, {name: [one.events for one in of_loop] for name, of_loop in iterations.items()}),
        (trace.late, {name: [one.late for one in of_loop] for name, of_loop in iterations.items()}),
    )


def _allocate_held(trace: AllocationTrace, pool: Allocator) -> None:
    for amount in trace.held:
        pool.allocate(amount)
    pool.map(trace.folded_bytes)


def _with_fragmentation(peak: Peak, trace: AllocationTrace, runs: Iterable[_Run], limit: int | None) -> Peak:
    """Return the peak of a graph that nearly fills a GPU with the free chunks between tensors that it needs.

    An allocation fails there although enough bytes are free, if no free chunk is large enough. With memory to spare,
    chunks cost nothing, and `get_memory_info` does not count them.

    Args:
        peak: Peak without a limit of the device.
        trace: As for `graph_peak`.
        runs: Runs of the graph.
        limit: As for `graph_peak`.
    """
    usable, memory = trace.device.usable_bytes, trace.device.memory_limit
    if usable is None or memory is None or not usable / MAX_FRAGMENTATION < peak.peak_bytes <= memory:
        return peak
    needed = least = max(usable, peak.peak_bytes)
    while not _fits(trace, runs, needed):
        needed = int(needed * FRAGMENTATION_STEP)
        if limit is not None and needed > limit:
            break
    lost = needed - peak.peak_bytes if needed > least else 0
    return dataclasses.replace(peak, peak_bytes=peak.peak_bytes + lost, fragmentation_bytes=lost)


def _fits(trace: AllocationTrace, runs: Iterable[_Run], num_bytes: int) -> bool:
    pool = empty_pool(trace.device, num_bytes)
    try:
        _allocate_held(trace, pool)
        for events, inner in runs:
            replay(events, pool, inner, above=num_bytes)
    except MemoryError:
        return False
    return True


def concurrent_scratch(
    scratch: Mapping[Node, int], originals: Iterable[Node], device: DeviceModel
) -> dict[Node, tuple[int, ...]]:
    """Return the scratch blocks of each op together with those of ops that run concurrently.

    Both gradients of a convolution wait for the same tensor: they run, and allocate, concurrently if no edge orders
    them. So do gradients of several convolutions whose results are summed, up to the number of inter-op threads.

    Args:
        scratch: Bytes of each op, in execution order.
        originals: The ops in the original graph, where both gradients share an operand.
        device: The device.
    """
    order = list(originals)
    groups: dict[Tensor, list[int]] = {}
    for number, (amount, node) in enumerate(zip(scratch.values(), order, strict=True)):
        if amount and len(node.inputs) > 1:
            groups.setdefault(node.inputs[-1], []).append(number)
    op_bytes, most = list(scratch.values()), device.inter_op_threads
    blocks: list[tuple[int, ...]] = [(amount,) if amount else () for amount in op_bytes]
    for numbers in groups.values():
        free = {pair for pair in itertools.combinations(numbers, 2) if not waits(order, *pair)}
        for number in numbers:
            beside = [number]
            for other in sorted(numbers, key=op_bytes.__getitem__, reverse=True):
                if all((min(other, one), max(other, one)) in free for one in beside):
                    beside.append(other)
            blocks[number] = tuple(op_bytes[one] for one in beside[:most])
    return dict(zip(scratch, blocks, strict=True))


def waits(order: Sequence[Node], first: int, second: int) -> bool:
    """Return whether the op at one position of an order waits for the op at an earlier position."""
    between = set(order[first:second])
    return order[first] in ancestors([order[second]], lambda node: between.intersection(predecessors(node)))
