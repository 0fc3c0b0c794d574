"""The LMS pass: swaps tensors with a long reuse distance out of the device's memory, and in again.

Le et al., "TFLMS: Large Model Support in TensorFlow by Graph Rewriting" (2018). An edge from f1 to f2 becomes
f2 . si . so . f1 (Eq. 5 and 6). The swap-out runs when the tensor has been computed; a control edge delays the swap-in
until shortly before the tensor is read. All swap-outs of a tensor are one op (4.2.2). Swap-ins are one op where their
consumers are close to each other (4.2.3). The tier (`tiers.py`) defines the place of swapped tensors.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from rewriters.analysis import summation_order
from rewriters.analysis.autodiff_roles import in_scope, reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis, require_analysed
from rewriters.device.merged_kernels import cycle_of_merged, merged_ops
from rewriters.errors import RewriteError, SwapError
from rewriters.ir.graph import Graph, Node, Tensor, ancestors, predecessors, producers
from rewriters.ir.graph_pass import GraphPass, PassResult, run_pass, run_passes
from rewriters.ir.legality import Stage
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.scheduling.control_edges import ControlEdge
from rewriters.scheduling.delay_early_ops import earliest_forward_level
from rewriters.scheduling.memory_order import after_exchanges
from rewriters.swapping.loop_swaps import SavedList, is_filled_by_loop, saved_list, swap_lists
from rewriters.swapping.recompute_pooling import RecomputePooling
from rewriters.swapping.shrink_broadcasts import ShrinkBroadcasts
from rewriters.swapping.tiers import Tier
from rewriters.swapping.transfer_schedule import Fetch, LeadPlanner, LeadTimes
from rewriters.swapping.trigger_search import TriggerSearch

__all__: list[str] = []

_SOURCES = ops_with(Trait.SOURCE) | {"ReadVariableOp"}
"""Ops whose results are never swapped: arguments, constants and parameters stay on the device anyway."""


@dataclasses.dataclass(frozen=True)
class SwapOptions:
    """Parameters of table 2 of the paper, after their checks; `LMSParams` documents each."""

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
    """One copy of a tensor back onto the device.

    Attributes:
        readers: Ops that read this copy.
        control: Op after which the swap-in starts.
    """

    readers: list[Node]
    control: Node


@dataclasses.dataclass
class Swap:
    """A tensor that leaves the device.

    Attributes:
        tensor: Tensor that is swapped.
        swap_ins: Copies back onto the device, in γ.
        merged: Whether TensorFlow may flatten its producer with other sums, which then must get no more control edges.
        saved: The list, for a tensor list, which leaves the device element by element.
    """

    tensor: Tensor
    swap_ins: list[SwapIn]
    merged: bool = False
    saved: SavedList | None = None


@dataclasses.dataclass
class SwapPlan:
    """Selection of the tensors to swap.

    Attributes:
        swaps: Swaps, in the order in which the search visits the tensors.
        left: (name of a tensor, reason why it stays).
    """

    swaps: list[Swap]
    left: list[tuple[str, str]]


def without_copies(graph: Graph, scopes: tuple[str, ...] = (), forward: Container[str] = ()) -> GraphAnalysis:
    """Return the analysis of a graph without broadcast copies, in which gradients of max-poolings recompute these.

    The graph may contain tile loops. `scopes` and `forward` as for `GraphAnalysis`.
    """
    latest: GraphAnalysis | None = None

    def analyse(graph: Graph) -> GraphAnalysis:
        nonlocal latest
        if latest is None or latest.graph is not graph:
            latest = GraphAnalysis(graph, scopes, forward)
        return latest

    return analyse(run_passes(graph, [ShrinkBroadcasts(analyse), RecomputePooling(analyse)]).graph)


def plan_swaps(analysis: GraphAnalysis, options: SwapOptions, batch: int, times: LeadTimes | None = None) -> SwapPlan:
    """Select tensors to swap, their swap-ins and control ops.

    Args:
        analysis: Analysis that `in_memory_order` returned.
        options: Parameters of the selection.
        batch: Batch size, where the graph leaves it open.
        times: Times from which leads within `options.lb` and `options.ub` are chosen. By default all leads are as
            short as these bounds allow.
    """
    selector = _SwapSelector(analysis, options, batch)
    plan = selector.run()
    if times is not None:
        selector.advance(plan.swaps, times)
    return plan


class _SwapSelector:
    def __init__(self, analysis: GraphAnalysis, options: SwapOptions, batch: int) -> None:
        self.analysis = analysis
        self.options = options
        self.batch = batch
        self.fixed = summation_order.flattenable_sums(analysis)
        ready = earliest_forward_level(analysis)
        no_triggers = self.fixed | merged_ops(analysis.graph, analysis.consumers).keys()
        self.search = TriggerSearch(
            analysis.graph, analysis.backward, levels=analysis.level, ready=ready, fixed=no_triggers
        )
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
        """Yield the tensors of forward ops, breadth first from each group of starting ops (5.1)."""
        seen: set[Node] = set()
        for starts in self._starts():
            queue = collections.deque(node for node in starts if node not in seen)
            seen.update(queue)
            while queue:
                node = queue.popleft()
                yield from (node.out(index) for index in range(len(node.outputs)))
                for index in range(len(node.outputs)):
                    for reader, _ in self.analysis.consumers.get(node.out(index), ()):
                        if reader not in seen and reader not in self.analysis.backward:
                            seen.add(reader)
                            queue.append(reader)

    def _starts(self) -> list[list[Node]]:
        """Return the ops that the options name; by default the arguments, then draws, such as those of dropout."""
        scope, names = self.options.starting_scope, self.options.starting_op_names
        forward = [node for node in self.analysis.order if node not in self.analysis.backward]
        if scope is None and not names:
            data = self.analysis.data
            arguments = [t.node for t in self.analysis.graph.inputs if t.node in data]
            draws = [n for n in forward if n in data and not any(before in data for before in producers(n))]
            return [arguments, draws]
        return [[n for n in forward if n.name in names or (scope is not None and in_scope(n.name, scope))]]

    def _swap(self, tensor: Tensor) -> Swap | None:
        """Return the swap of a tensor, `None` if it stays."""
        if is_filled_by_loop(tensor):
            return self._list_swap(tensor)
        edges = self._long_edges(tensor)
        if not edges or not self._is_selected(tensor):
            return None
        if tensor.num_bytes(self.batch) < max(self.options.min_bytes, 1):
            return None
        if any(
            summation_order.is_order_sensitive(self.analysis, reader, tensor)
            for reader, _ in self.analysis.consumers[tensor]
        ):
            self.left.append((tensor.name, "swapping might change the order of additions in a sum that reads it"))
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
                self.left.append((tensor.name, f"no op can trigger its swap-in for `{reader.name}`"))
            else:
                swap_ins.append(SwapIn([reader], control))
        return Swap(tensor, _merged(swap_ins), tensor.node in self.fixed) if swap_ins else None

    def _list_swap(self, tensor: Tensor) -> Swap | None:
        """Return the swap of a tensor list, whose elements are read in reverse order: the loops order the swap-ins."""
        if not self._is_selected(tensor) or tensor.num_bytes(self.batch) < max(self.options.min_bytes, 1):
            return None
        saved = saved_list(self.analysis.graph, tensor, self.analysis.consumers)
        if isinstance(saved, str):
            self.left.append((tensor.name, saved))
            return None
        if saved.reader not in self.analysis.backward:
            return None
        return Swap(tensor, [SwapIn([saved.reader], saved.reader)], saved=saved)

    def _long_edges(self, tensor: Tensor) -> list[Node]:
        """Return consumers much later in γ, in that order: backward ops, and forward ops after a long branch (4.1)."""
        if tensor.node.op in _SOURCES or tensor.node not in self.analysis.data or not _is_data(tensor):
            return []
        level, backward = self.search.level, self.analysis.backward
        readers = [reader for reader, _ in self.analysis.consumers.get(tensor, ()) if not reads_shape_only(reader)]
        last_forward = max((level[reader] for reader in readers if reader not in backward), default=level[tensor.node])
        late_readers: list[Node] = []
        for reader in dict.fromkeys(readers):
            distance = level[reader] - level[tensor.node]
            branch = self.options.swap_branches and distance > self.options.branch_threshold
            late = self.search.ready[reader] > last_forward if reader in backward else branch
            if distance > 1 and late and not reader.may_write_variable:
                late_readers.append(reader)
        return sorted(late_readers, key=level.__getitem__)

    def _is_selected(self, tensor: Tensor) -> bool:
        """Return whether scopes and types select a tensor; exclusion overrides inclusion."""
        node, options = tensor.node, self.options
        if any(in_scope(node.name, scope) for scope in options.excl_scopes) or node.op in options.excl_types:
            return False
        if not options.incl_scopes and not options.incl_types:
            return True
        return any(in_scope(node.name, scope) for scope in options.incl_scopes) or node.op in options.incl_types

    def _control(self, source: Node, reader: Node, is_early: Callable[[Node], bool] | None = None) -> Node | None:
        options = self.options
        backward = reader in self.analysis.backward
        if options.ctrld_strategy == "chain_rule" and backward:
            return self.search.chain_rule(source, reader, options.lb, options.ub, is_early)
        return self.search.direct_order(source, reader, options.lb, options.ub, is_early)

    def advance(self, swaps: Iterable[Swap], times: LeadTimes) -> None:
        """Let swap-ins start so early that their transfers end before the consumers can begin."""
        fetches = {
            Fetch(swap.tensor.node, swap_in.readers[0], swap.tensor.num_bytes(self.batch) / times.rate): swap_in
            for swap in swaps
            if swap.saved is None
            for swap_in in swap.swap_ins
        }
        order, ready = self.analysis.order, self.search.ready
        planner = LeadPlanner(order, times.seconds, ready, self.analysis.backward, list(fetches))
        for fetch, start in planner.latest_starts(times.lead).items():

            def is_early(node: Node, start: float = start) -> bool:
                return planner.ends[node] <= start

            control = self._control(fetch.source, fetch.consumer, is_early)
            fetches[fetch].control = control or fetches[fetch].control
        for swap in swaps:
            swap.swap_ins = _merged(swap.swap_ins)


def _merged(swap_ins: Iterable[SwapIn]) -> list[SwapIn]:
    """Merge the swap-ins of a tensor that start together: their copies would exist at the same time."""
    merged: dict[Node, SwapIn] = {}
    for swap_in in swap_ins:
        if swap_in.control in merged:
            merged[swap_in.control].readers += swap_in.readers
        else:
            merged[swap_in.control] = swap_in
    return list(merged.values())


def _is_data(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool or tensor.dtype.is_complex


@dataclasses.dataclass(frozen=True)
class SwapResult(PassResult):
    """A graph with swaps.

    Attributes:
        swap_outs: Swap-outs, in the order of the swaps, without those inside of loops.
        swap_ins: Swap-ins, in that order.
    """

    swap_outs: tuple[Node, ...] = ()
    swap_ins: tuple[Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class InsertSwaps(GraphPass[SwapResult]):
    """Adds swap-outs, swap-ins that wait for a trigger, and releases of the copies; bounds the swap-outs in flight.

    Attributes:
        analysis: Analysis of the graph, for which the swaps were planned.
        swaps: Swaps to add.
        tier: Place of the swapped tensors.
        max_in_flight: Swap-outs that may be under way at a time. Further tensors are not computed before one of them
            has ended.
    """

    new_stateful_ops = frozenset(("PyFunc", "While"))
    stage = Stage.SWAPPED

    analysis: GraphAnalysis
    swaps: Sequence[Swap]
    tier: Tier
    max_in_flight: int

    def requires(self, graph: Graph) -> None:
        """Check that the swaps were planned for the graph."""
        require_analysed(graph, self.analysis)

    def call(self, graph: Graph) -> SwapResult:
        """Add the swaps and the edges that order them.

        Raises:
            SwapError: If an edge closes a cycle, also after TensorFlow has merged ops. That is a mistake in the
                search for control ops.
        """
        if not self.swaps:
            return SwapResult(graph, changed=False)
        level = self.analysis.level
        new = graph.copy()
        outs: list[_SwapOut] = []
        chains: list[_SwapInChain] = []
        for swap in self.swaps:
            if swap.saved is None:
                out, swap_ins = self._insert(new, swap)
                outs.append(out)
                chains.extend(swap_ins)
        done = tuple(out.done for out in outs)
        is_acyclic = not cycle_of_merged(graph)  # A cycle from before swapping is not reported.
        limits = _limit_in_flight(new, outs, self.max_in_flight, after_exchanges(self.analysis))
        _add_unless_cyclic(new, limits, is_acyclic)
        outs += self._insert_lists(new)
        _add_unless_cyclic(new, _wait_for_releases(chains, level), is_acyclic)
        needed = ancestors(out.done for out in outs)  # by the new edges too
        last = max(level.values()) + 1
        updates = {new.nodes[node.name]: level[node] for node in level if node.may_write_variable}
        _run_updates_last(new, outs, {node: at if node in needed else last for node, at in updates.items()})
        try:
            new.execution_order()
        except RewriteError as error:
            raise SwapError(f"Swaps would create a cycle in the step. {error} Please report it.") from None
        cycle = cycle_of_merged(new) if is_acyclic else []
        if cycle:
            raise SwapError(
                f"Swaps would create a cycle in the step: TensorFlow would merge ops around {cycle}. Please report it."
            )
        return SwapResult(new, changed=True, swap_outs=done, swap_ins=tuple(chain.start for chain in chains))

    def _insert_lists(self, new: Graph) -> list[_SwapOut]:
        """Swap elements of lists, loop by loop; return the loops that swap them out."""
        by_loop: dict[tuple[Node, Node], list[SavedList]] = {}
        for swap in self.swaps:
            if swap.saved is not None:
                by_loop.setdefault((swap.tensor.node, swap.saved.reader), []).append(swap.saved)
        outs = []
        for (loop, reader), lists in by_loop.items():
            num_nodes = len(new.nodes)
            swap_lists(new, lists, self.tier)
            self.tier.release(new, new.unique_name(f"lms/{loop.name}/given_back"), [new.nodes[reader.name]])
            _set_metadata(new, num_nodes, reader)
            producer = new.nodes[loop.name]
            outs.append(_SwapOut(self.analysis.level[loop], producer, producer, merged=True))
        return outs

    def _insert(self, new: Graph, swap: Swap) -> tuple[_SwapOut, list[_SwapInChain]]:
        """Add the ops of one swap to the new graph."""
        tier = self.tier
        source = Tensor(new.nodes[swap.tensor.node.name], swap.tensor.index)
        num_nodes = len(new.nodes)
        prefix = f"lms/{source.node.name}" + (f"_{source.index}" if source.index else "")
        swapped = tier.swap_out(new, source, new.unique_name(f"{prefix}/swap_out"), len(swap.swap_ins))
        _set_metadata(new, num_nodes, source.node)
        out = _SwapOut(self.analysis.level[swap.tensor.node], source.node, swapped.node, swap.merged)
        chains: list[_SwapInChain] = []
        for number, swap_in in enumerate(swap.swap_ins):
            num_nodes = len(new.nodes)
            name = new.unique_name(f"{prefix}/swap_in_{number}")
            copy = tier.swap_in(new, swapped, source, new.nodes[swap_in.control.name], name)
            new.nodes[name].loop = copy.node.loop = source.estimated_size()
            readers = [new.nodes[reader.name] for reader in swap_in.readers]
            for node in readers:
                node.inputs = [copy if t == source else t for t in node.inputs]
            release = tier.release(new, new.unique_name(f"{prefix}/given_back_{number}"), readers)
            chains.append(_SwapInChain(new.nodes[name], swap_in, release))
            _set_metadata(new, num_nodes, readers[0])
        return out, chains


def _set_metadata(graph: Graph, num_nodes: int, like: Node) -> None:
    """Give the nodes, but constants, that were added after the first `num_nodes` the metadata of another one."""
    for node in itertools.islice(graph.nodes.values(), num_nodes, None):
        node.metadata = like.metadata if node.op != "Const" else node.metadata


def insert_swaps(analysis: GraphAnalysis, swaps: Sequence[Swap], tier: Tier, max_in_flight: int) -> SwapResult:
    """Run `InsertSwaps` on the analysed graph."""
    return run_pass(InsertSwaps(analysis, swaps, tier, max_in_flight), analysis.graph)


@dataclasses.dataclass(frozen=True)
class _SwapOut:
    """A swap-out.

    Attributes:
        level: γ of the tensor's producer.
        producer: Op that computes the tensor.
        done: Op that takes the tensor away.
        merged: See `Swap.merged`.
    """

    level: int
    producer: Node
    done: Node
    merged: bool


@dataclasses.dataclass(frozen=True)
class _SwapInChain:
    """A swap-in.

    Attributes:
        start: Op that the swap-in begins with.
        plan: Swap-in as planned.
        release: Op that frees the copy, if the tier needs one.
    """

    start: Node
    plan: SwapIn
    release: Node | None


def _add_unless_cyclic(graph: Graph, edges: Iterable[ControlEdge], is_acyclic: bool) -> None:
    """Add edges that only lower the peak; remove all of them if they close the first cycle of merged ops."""
    edges = list(edges)
    for edge in edges:
        edge.node.control_inputs.append(edge.before)
    if edges and is_acyclic and cycle_of_merged(graph):
        for edge in edges:
            edge.node.control_inputs.remove(edge.before)


def _limit_in_flight(
    graph: Graph, outs: list[_SwapOut], max_in_flight: int, fixed: Container[str]
) -> Iterator[ControlEdge]:
    """Let the producer of a tensor wait for the swap-out on its device `max_in_flight` before it, unless it is fixed.

    Otherwise tensors queue up on the device where writing is slower than computing. Like every edge that swapping
    adds, the edge leads from a lower to a higher γ, so that it closes no cycle.
    """
    on_device: dict[str, list[_SwapOut]] = {}
    for out in sorted(outs, key=lambda out: out.level):
        on_device.setdefault(graph.device_of(out.producer), []).append(out)
    for ordered in on_device.values():
        for before, after in zip(ordered, ordered[max_in_flight:], strict=False):
            if after.level > before.level and not after.merged and after.producer.name not in fixed:
                yield ControlEdge(after.producer, before.done)


def _wait_for_releases(chains: list[_SwapInChain], level: Mapping[Node, int]) -> Iterator[ControlEdge]:
    """Let a swap-in wait until the copies are freed whose consumers ran before its control op.

    Both become ready at the same time; without the edge both copies may exist at the peak.
    """
    starts: dict[Node, list[Node]] = {}
    for chain in chains:
        starts.setdefault(chain.plan.control, []).append(chain.start)
    waiting = {chain.release: chain.plan.readers for chain in chains if chain.release is not None}
    for control in sorted(starts, key=level.__getitem__):
        ended = {
            release: readers
            for release, readers in waiting.items()
            if max(level[reader] for reader in readers) <= level[control]
        }
        if not ended:
            continue
        lowest = min(level[reader] for readers in ended.values() for reader in readers)

        def late(node: Node, lowest: int = lowest) -> list[Node]:
            return [before for before in predecessors(node) if level[before] >= lowest]

        passed = ancestors([control], late)
        for release in [release for release, readers in ended.items() if passed.issuperset(readers)]:
            del waiting[release]
            for start in starts[control]:
                yield ControlEdge(start, release)


def _run_updates_last(graph: Graph, outs: list[_SwapOut], updates: Mapping[Node, int]) -> None:
    """Let variables change after the swap-outs have ended, so that a failed swap-out leaves them unchanged.

    One op stands for all swap-outs up to a level: edges from each swap-out to each update would be too many.

    Args:
        graph: The new graph; it is edited.
        outs: Swap-outs of the graph.
        updates: Ops that write a variable, each with the level γ below which swap-outs run first. That is the op's own
            level if a swapped tensor depends on its effect, such as the state of a random generator.
    """
    outs = sorted(outs, key=lambda out: out.level)
    passed, ended = 0, list[Node]()
    for node, level in sorted(updates.items(), key=lambda item: item[1]):
        before = passed
        while passed < len(outs) and outs[passed].level < level:
            passed += 1
        if passed > before:
            done = [out.done for out in outs[before:passed]]
            ended = [graph.add(Node(graph.unique_name("lms/swapped_out"), "NoOp", (), control_inputs=[*ended, *done]))]
        node.control_inputs.extend(ended)
