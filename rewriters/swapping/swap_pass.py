"""The LMS pass: swap tensors that wait long out of the device's memory, and in again.

Le et al., "TFLMS: Large Model Support in TensorFlow by Graph Rewriting" (2018). An edge from f1 to f2 becomes
f2 . si . so . f1 (Eq. 5 and 6): a swap-out that runs when the tensor is made, and a swap-in that a control edge holds
back until the tensor is soon needed. All swap-outs of a tensor are one (4.2.2), swap-ins are one where their readers
are close (4.2.3). Where the tensor is meanwhile is a matter of the tier (`tiers.py`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Container, Iterable, Mapping

from rewriters.analysis import summation_order
from rewriters.analysis.autodiff_roles import in_scope, reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import RewriteError
from rewriters.ir.graph import Graph, Node, Tensor, ancestors, predecessors
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.scheduling.delay_early_ops import delay_early_ops, earliest_forward_level
from rewriters.scheduling.serialize_ops import serialize_large_ops, serialize_scratch_groups
from rewriters.swapping.recompute_pooling import recompute_pooling
from rewriters.swapping.shrink_broadcasts import shrink_broadcasts
from rewriters.swapping.tiers import Tier
from rewriters.swapping.trigger_search import TriggerSearch

__all__: list[str] = []

_SOURCES = ops_with(Trait.SOURCE) | {"ReadVariableOp"}
"""What makes tensors that are there anyway: arguments, constants, and parameters, which are never swapped."""


@dataclasses.dataclass(frozen=True)
class SwapOptions:
    """Table 2 of the paper, checked and without defaults; see `LMSParams` for the meanings."""

    starting_scope: str | None = None
    starting_op_names: tuple[str, ...] = ()
    excl_scopes: tuple[str, ...] = ()
    incl_scopes: tuple[str, ...] = ()
    excl_types: tuple[str, ...] = ()
    incl_types: tuple[str, ...] = ()
    n_tensors: int = -1
    lb: int = 1
    ub: int = 10000
    ctrld_strategy: str = "chain_rule"
    fuse_swapins: bool = False
    fuse_distance: int = 10
    swap_branches: bool = False
    branch_threshold: int = 0
    min_bytes: int = 0


@dataclasses.dataclass
class SwapIn:
    """One way back onto the device.

    Attributes:
        readers: Operations that read this copy.
        control: Operation after which it starts.
    """

    readers: list[Node]
    control: Node


@dataclasses.dataclass
class Swap:
    """A tensor that leaves the device.

    Attributes:
        tensor: What is swapped.
        swap_ins: Its copies on the way back, in γ.
        merged: Whether what makes it may be made one with other sums, and must have no more control edges.
    """

    tensor: Tensor
    swap_ins: list[SwapIn]
    merged: bool = False


@dataclasses.dataclass
class SwapPlan:
    """What is swapped and what is not.

    Attributes:
        swaps: In the order in which the search meets the tensors.
        left: (name of a tensor, why it stays).
    """

    swaps: list[Swap]
    left: list[tuple[str, str]]


def prepare_for_swapping(
    graph: Graph, min_bytes: int, batch: int, scopes: tuple[str, ...] = (), forward: Container[str] = ()
) -> GraphAnalysis:
    """The graph without what is large, early, or there at once for nothing: what swapping alone cannot help.

    Args:
        graph: As it is, loops of an earlier pass included.
        min_bytes: Results below may be early, and made in any order.
        batch: Size of an unknown batch.
        scopes: Of operations that belong to the backward phase, as for `GraphAnalysis`.
        forward: Names of operations that belong to the forward phase, as for `GraphAnalysis`.
    """
    small = GraphAnalysis(shrink_broadcasts(GraphAnalysis(graph, scopes, forward)), scopes, forward)
    recompute_pooling(small.graph, small.backward)
    small = GraphAnalysis(small.graph, scopes, forward)
    late = delay_early_ops(small, min_bytes, batch)
    backward, untouched = (
        {node.name for node in nodes} for nodes in (small.backward, summation_order.flattenable_sums(small))
    )
    serialize_large_ops(late, backward, untouched, min_bytes, batch)
    serialize_scratch_groups(late)
    return GraphAnalysis(late, scopes, forward)


def plan_swaps(analysis: GraphAnalysis, options: SwapOptions, batch: int) -> SwapPlan:
    """Choose tensors, their swap-ins and the control operations.

    Args:
        analysis: Of the graph, prepared.
        options: What to swap.
        batch: Size of an unknown batch.
    """
    return _Planner(analysis, options, batch).run()


class _Planner:
    def __init__(self, analysis: GraphAnalysis, options: SwapOptions, batch: int) -> None:
        self.analysis = analysis
        self.options = options
        self.batch = batch
        self.untouched = summation_order.flattenable_sums(analysis)
        ready = earliest_forward_level(analysis)
        self.search = TriggerSearch(analysis.graph, analysis.backward, analysis.level, ready, self.untouched)
        self.left: list[tuple[str, str]] = []

    def run(self) -> SwapPlan:
        swaps: list[Swap] = []
        for tensor in self._reachable():
            if 0 <= self.options.n_tensors <= len(swaps):
                break
            swap = self._swap(tensor)
            if swap is not None:
                swaps.append(swap)
        return SwapPlan(swaps, self.left)

    def _reachable(self) -> Iterable[Tensor]:
        """Tensors of forward operations, breadth first from the starting operations (5.1)."""
        queue = collections.deque(self._starts())
        seen = set(queue)
        while queue:
            node = queue.popleft()
            yield from (node.out(index) for index in range(len(node.outputs)))
            for index in range(len(node.outputs)):
                for reader, _ in self.analysis.consumers.get(node.out(index), ()):
                    if reader not in seen and reader not in self.analysis.backward:
                        seen.add(reader)
                        queue.append(reader)

    def _starts(self) -> list[Node]:
        scope, names = self.options.starting_scope, self.options.starting_op_names
        forward = [node for node in self.analysis.order if node not in self.analysis.backward]
        if scope is None and not names:
            return [t.node for t in self.analysis.graph.inputs if t.node in self.analysis.data]
        return [n for n in forward if n.name in names or (scope is not None and in_scope(n.name, scope))]

    def _swap(self, tensor: Tensor) -> Swap | None:
        """The swap of a tensor, `None` if it stays."""
        edges = self._long_edges(tensor)
        if not edges or not self._wanted(tensor):
            return None
        if tensor.num_bytes(self.batch) < max(self.options.min_bytes, 1):
            return None
        if any(
            summation_order.is_order_sensitive(self.analysis, reader, tensor)
            for reader, _ in self.analysis.consumers[tensor]
        ):
            self.left.append((tensor.name, "it is added up with others, in an order that swapping might change"))
            return None
        swap_ins: list[SwapIn] = []
        for reader in edges:
            level = self.search.level[reader]
            if self.options.fuse_swapins and swap_ins:
                first = self.search.level[swap_ins[-1].readers[0]]
                if level - first <= self.options.fuse_distance:
                    swap_ins[-1].readers.append(reader)
                    continue
            control = self._control(tensor.node, reader)
            if control is None:
                self.left.append((tensor.name, f"nothing is found that could trigger its way back to `{reader.name}`"))
            else:
                swap_ins.append(SwapIn([reader], control))
        return Swap(tensor, swap_ins, tensor.node in self.untouched) if swap_ins else None

    def _long_edges(self, tensor: Tensor) -> list[Node]:
        """Readers that come much later, in γ: backward ones, and those at the end of a long branch (4.1)."""
        if tensor.node.op in _SOURCES or tensor.node not in self.analysis.data or not _is_data(tensor):
            return []
        level, backward = self.search.level, self.analysis.backward
        readers = [reader for reader, _ in self.analysis.consumers.get(tensor, ()) if not reads_shape_only(reader)]
        last_forward = max((level[reader] for reader in readers if reader not in backward), default=level[tensor.node])
        found: dict[Node, None] = {}
        for reader in readers:
            distance = level[reader] - level[tensor.node]
            branch = self.options.swap_branches and distance > self.options.branch_threshold
            late = self.search.ready[reader] > last_forward if reader in backward else branch
            if distance > 1 and late and not _updates(reader):
                found[reader] = None
        return sorted(found, key=level.__getitem__)

    def _wanted(self, tensor: Tensor) -> bool:
        """Whether scopes and types let it go; what is excluded stays even if it is included."""
        node, options = tensor.node, self.options
        if any(in_scope(node.name, scope) for scope in options.excl_scopes) or node.op in options.excl_types:
            return False
        if not options.incl_scopes and not options.incl_types:
            return True
        return any(in_scope(node.name, scope) for scope in options.incl_scopes) or node.op in options.incl_types

    def _control(self, source: Node, reader: Node) -> Node | None:
        options = self.options
        backward = reader in self.analysis.backward
        if options.ctrld_strategy == "chain_rule" and backward:
            return self.search.chain_rule(source, reader, options.lb, options.ub)
        return self.search.direct_order(source, reader, options.lb, options.ub)


def _is_data(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool or tensor.dtype.is_complex


def _updates(node: Node) -> bool:
    """Whether an operation writes a variable: edges next to variables are left alone (5.1)."""
    return node.op.startswith(("Assign", "Resource")) and not node.op.startswith("ResourceGather")


def insert_swaps(
    analysis: GraphAnalysis, swaps: list[Swap], tier: Tier, max_in_flight: int
) -> tuple[Graph, list[Node]]:
    """A new graph with swap-outs and swap-ins, and the swap-outs.

    Args:
        analysis: Of the graph that the swaps were planned for.
        swaps: What to swap.
        tier: Where to.
        max_in_flight: Swap-outs that may be under way at a time; further tensors are not made before one has ended.

    Raises:
        RewriteError: If the graph had a cycle then, which is a mistake in a strategy.
    """
    level = analysis.level
    new = analysis.graph.copy()
    outs: list[_Out] = []
    ways: list[_SwapInChain] = []
    for swap in swaps:
        source = Tensor(new.nodes[swap.tensor.node.name], swap.tensor.index)
        prefix = f"lms/{source.node.name}" + (f"_{source.index}" if source.index else "")
        held = tier.swap_out(new, source, new.unique_name(f"{prefix}/swap_out"), len(swap.swap_ins))
        outs.append(_Out(level[swap.tensor.node], source.node, held.node, swap.merged))
        for number, swap_in in enumerate(swap.swap_ins):
            name = new.unique_name(f"{prefix}/swap_in_{number}")
            back = tier.swap_in(new, held, source, new.nodes[swap_in.control.name], name)
            readers = [new.nodes[reader.name] for reader in swap_in.readers]
            for node in readers:
                node.inputs = [back if t == source else t for t in node.inputs]
            given = tier.give_back(new, new.unique_name(f"{prefix}/given_back_{number}"), readers)
            ways.append(_SwapInChain(new.nodes[name], swap_in, given))
    _bound(outs, max_in_flight)
    _one_by_one(ways, level)
    needed = ancestors(out.done for out in outs)  # by the new edges too
    last = max(level.values()) + 1
    updates = {new.nodes[node.name]: level[node] for node in level if _updates(node)}
    _updates_last(new, outs, {node: at if node in needed else last for node, at in updates.items()})
    try:
        new.execution_order()
    except RewriteError as error:
        raise RewriteError(f"Swapping would make the step wait for itself: {error}") from None
    return new, [out.done for out in outs]


@dataclasses.dataclass(frozen=True)
class _Out:
    """A swap-out: γ of what makes the tensor, that operation, the one that takes the tensor away; see `Swap.merged`."""

    level: int
    producer: Node
    done: Node
    merged: bool


def _bound(outs: list[_Out], max_in_flight: int) -> None:
    """Let the producer of a tensor wait for the swap-out of one `max_in_flight` before it.

    Otherwise, where writing is slower than computing, tensors queue up on the device. Like every edge that
    swapping adds, it leads from a lower to a higher γ, so that no cycle comes about.
    """
    outs = sorted(outs, key=lambda out: out.level)
    for before, after in zip(outs, outs[max_in_flight:], strict=False):
        if after.level > before.level and not after.merged:
            after.producer.control_inputs.append(before.done)


@dataclasses.dataclass(frozen=True)
class _SwapInChain:
    """The operation that a swap-in starts with, what was planned, and the operation that gives its tensor back."""

    start: Node
    plan: SwapIn
    given: Node | None


def _one_by_one(ways: list[_SwapInChain], level: Mapping[Node, int]) -> None:
    """Let a swap-in wait until the tensors are given back whose readers ran before its control operation.

    Both become ready at the same time, and what is given back last is at the worst moment still there.
    """
    starts: dict[Node, list[Node]] = {}
    for way in ways:
        starts.setdefault(way.plan.control, []).append(way.start)
    waiting = {way.given: way.plan.readers for way in ways if way.given is not None}
    for control in sorted(starts, key=level.__getitem__):
        ended = {given: readers for given, readers in waiting.items() if _last(readers, level) <= level[control]}
        lowest = min((level[reader] for readers in ended.values() for reader in readers), default=0)
        passed = _ancestors(control, level, lowest) if ended else set()
        for given in [given for given, readers in ended.items() if passed.issuperset(readers)]:
            del waiting[given]
            for start in starts[control]:
                start.control_inputs.append(given)


def _last(readers: Iterable[Node], level: Mapping[Node, int]) -> int:
    return max(level[reader] for reader in readers)


def _ancestors(node: Node, level: Mapping[Node, int], lowest: int) -> set[Node]:
    """A node and those before it that are not below a level."""
    found, stack = {node}, [node]
    while stack:
        for before in predecessors(stack.pop()):
            if before not in found and level[before] >= lowest:
                found.add(before)
                stack.append(before)
    return found


def _updates_last(graph: Graph, outs: list[_Out], updates: Mapping[Node, int]) -> None:
    """Variables change after the swap-outs have ended, so that a failed one leaves them as they were.

    An operation stands for all swap-outs up to a level: edges from each of them to each update would be too many.

    Args:
        graph: The new graph; it is edited.
        outs: Its swap-outs.
        updates: What writes a variable, with the level γ below which swap-outs come first: its own if a swapped tensor
            is computed from what it does, such as the state of a generator that is drawn from again.
    """
    outs = sorted(outs, key=lambda out: out.level)
    passed, ended = 0, list[Node]()
    for node, level in sorted(updates.items(), key=lambda item: item[1]):
        before = passed
        while passed < len(outs) and outs[passed].level < level:
            passed += 1
        if passed > before:
            done = [out.done for out in outs[before:passed]]
            ended = [graph.add(Node(graph.unique_name("lms/swapped_out"), "NoOp", (), [*ended, *done]))]
        node.control_inputs.extend(ended)
