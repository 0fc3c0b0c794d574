"""How long operations take, from the op rules and a machine's rates.

The time of an operation is a sum: its call, its arithmetic, the memory that it reads and
writes, what its kernel copies for itself, and memory that the system has to hand out
anew. A loop runs it once a turn on the part of the image that the turn covers, halos
included, and on whole weights. Operations run one after another, but for the two
gradients of a convolution: while one copies windows, which keeps few cores busy, the
other one has the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device import properties
from rewriters.device.kernel_scratch import (
    KernelShape,
    full_call,
    idle_cores,
    is_convolution,
    is_direct,
    may_be_direct,
    scratch_bytes,
    unfolds,
    window_bytes,
)
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.registry import find_rule
from rewriters.tiling.tile_planner import TileLoop

__all__: list[str] = []

_ANY = ""
"""Stands for every op type that has no rate of its own."""

DIRECT = "direct"
"""Stands for the gradients of convolutions that do without unfolding."""


@dataclasses.dataclass(frozen=True)
class MachineRates:
    """What a machine does in a second.

    Attributes:
        flops: Floating point operations, by op type; `""` is for all others.
        touched: Bytes that are read and written, by op type; `""` is for all others.
        weights: Bytes of weights, or of their gradients, of an op that counts arithmetic: kernels copy them into a
            layout of their own in every call.
        unfolded: Bytes of windows that a convolution or a gradient of one copies, by op type; `DIRECT` is for
            gradients that do without unfolding.
        fresh: Bytes of a large result that are touched for the first time, where the system hands such out anew.
        fresh_from: Bytes from which on a result is large.
        call: Seconds to start an operation.
        copied: Bytes that are swapped to host memory, or to a disk's cache, or back.
        overlapped: Whether the device computes while that happens.
        disk_write: Bytes that are written to disk.
        disk_read: Bytes that are read from disk.
    """

    flops: Mapping[str, float]
    touched: Mapping[str, float]
    weights: float
    unfolded: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fresh: float = math.inf
    fresh_from: int = 2**25
    call: float = 0.0
    copied: float = 1e9
    overlapped: bool = False
    disk_write: float = 1e9
    disk_read: float = 1e9

    def swapped(self, seconds: float, out: int, back: int, to_disk: bool) -> float:
        """Seconds of a step in which so many bytes leave and come back.

        Args:
            seconds: Of the step without.
            out: Bytes that leave.
            back: Bytes that come back, each time counted.
            to_disk: Whether the disk itself writes and reads them, and not its cache in memory alone. That goes on
                beside the step, as transfers between an accelerator and host memory do.
        """
        copying = (out + back) / self.copied
        beside = out / self.disk_write + back / self.disk_read if to_disk else 0.0
        return max(seconds, copying, beside) if self.overlapped else max(seconds, beside) + copying


NOMINAL = MachineRates(flops={_ANY: 1e11}, touched={_ANY: 1.25e10}, weights=2.5e9)
"""A machine of this decade, within a factor of two: eight operations take as long as moving a byte.

docs/decisions.md has the measurement behind the rate of weights: "Every turn pays for its weights".
"""


@dataclasses.dataclass(frozen=True)
class _Work:
    """What an op does on whole images.

    Attributes:
        flops: Arithmetic.
        images: Bytes of images that are read and written.
        whole: Bytes of everything else: weights and their gradients, sums.
        call: What its kernel is called with, if it copies windows.
        made: Bytes of each result that takes memory of its own.
    """

    flops: float
    images: int
    whole: int
    call: KernelShape | None
    made: tuple[int, ...]


class CostModel:
    """Seconds of the operations of one step.

    Args:
        analysis: Of the step.
        batch: Size of an unknown batch.
        rates: Of the machine.

    Attributes:
        pairs: Gradients of convolutions, and for each the one that may run at the same time.
    """

    def __init__(self, analysis: GraphAnalysis, batch: int, rates: MachineRates = NOMINAL) -> None:
        self.analysis = analysis
        self.batch = batch
        self.rates = rates
        self._work: dict[Node, _Work] = {}
        self._ops: dict[Node, float] = {}
        self.pairs = _pairs(analysis)

    def op(self, node: Node) -> float:
        """The full-size op."""
        if node not in self._ops:
            work = self._work_of(node)
            self._ops[node] = self._seconds(node, work, 1.0, work.images, work.whole) if work else 0.0
        return self._ops[node]

    def step(self, nodes: Iterable[Node]) -> float:
        """Many full-size ops."""
        nodes = list(nodes)
        return sum(map(self.op, nodes)) - self.at_once(nodes)

    def at_once(self, nodes: Iterable[Node], tile_loop: TileLoop | None = None) -> float:
        """Seconds that full-size ops, or those of a loop, save where two run at once that could run one by one."""
        own = set(nodes)
        pairs = ((node, self.pairs[node]) for node in own if self.pairs.get(node) in own)
        return sum(self._saved(*pair, tile_loop) for pair in pairs)

    @functools.cached_property
    def least(self) -> CostModel:
        """Times below which these do not fall, in as many turns or more.

        More turns mostly take longer. They may take less where results become too small for the system to hand out
        anew, pixels so few that a kernel for volumes unfolds them, or images so few that both gradients of a
        convolution leave cores to each other.
        """
        return LowerBoundCost(self)

    def _saved(self, first: Node, second: Node, tile_loop: TileLoop | None) -> float:
        """By the cores that both leave idle; they take no less than the longer one."""
        taken, idle = [], 0.0
        for node in (first, second):
            taken.append(self.op(node) if tile_loop is None else self.turns(tile_loop, node))
            idle += self._idle(node, tile_loop)
        return min(*taken, idle)

    def _idle(self, node: Node, tile_loop: TileLoop | None) -> float:
        """Seconds of a gradient while windows are copied, times the part of all cores that is idle then."""
        work = self._work_of(node)
        if work is None or work.call is None:
            return 0.0
        turns = 1 if tile_loop is None else self._num_turns(tile_loop)
        call = work.call if tile_loop is None or turns == 1 else self._in_a_turn(work.call, tile_loop, node)
        return turns * self._windows(node, call) * self._idle_cores(node, call)

    def _idle_cores(self, node: Node, call: KernelShape) -> float:
        return idle_cores(node, call)

    def tile_loop(self, tile_loop: TileLoop) -> float:
        """All turns of a loop, with what it does around its body."""
        return self.body(tile_loop) + self._moves(tile_loop)

    def body(self, tile_loop: TileLoop) -> float:
        """Every op of a loop, in all turns, by the part of the image that it covers, halos included."""
        seconds = sum(self.turns(tile_loop, node) for node in tile_loop.body) - self.at_once(tile_loop.body, tile_loop)
        return seconds + sum(self._moments(tile_loop, pair.image) for pair in tile_loop.moments)

    def _moments(self, tile_loop: TileLoop, image: Tensor) -> float:
        """A mean, the squared differences from it, and their mean, which a loop makes anew of parts of an image."""
        size, touched = image.num_bytes(self.batch), self.rates.touched
        calls = 3 * self._num_turns(tile_loop) * self.rates.call
        return 2 * size / _rate(touched, "Mean") + 2 * size / _rate(touched, "SquaredDifference") + calls

    def turns(self, tile_loop: TileLoop, node: Node) -> float:
        """One op in all turns of a loop.

        Turns share what is cut into tiles. Weights are read in each of them, and sums over the image, such as the
        gradients of weights, are made in each: in deep layers that may take longer than the arithmetic.
        """
        work = self._work_of(node)
        if work is None:
            return 0.0
        turns = self._num_turns(tile_loop)
        if turns == 1:
            return self.op(node)
        rebuilt = [node.inputs[position] for position in find_rule(node).shape_operands(self.analysis.view(node))]
        tensors = _tensors(node)
        whole = sum(t.num_bytes(self.batch) for t in tensors if t not in tile_loop.regions and t not in rebuilt)
        part = _coverage(self.analysis, tile_loop, node) / turns
        call = None if work.call is None else self._in_a_turn(work.call, tile_loop, node)
        images = max(work.images + work.whole - whole, 0)
        return turns * self._seconds(node, dataclasses.replace(work, call=call), part, images, whole)

    def _in_a_turn(self, call: KernelShape, tile_loop: TileLoop, node: Node) -> KernelShape:
        """What a kernel is called with in a turn of a loop: some of the images, and of each a tile."""
        tiles = math.prod(tile_loop.grid.spatial)
        part = _coverage(self.analysis, tile_loop, node) / tiles
        images = -(-call.images * tiles // self._num_turns(tile_loop))
        return KernelShape(images, *(max(round(part * pixels), 1) for pixels in (call.small, call.large)))

    def _num_turns(self, tile_loop: TileLoop) -> int:
        return min(tile_loop.grid.batch, self.batch) * math.prod(tile_loop.grid.spatial)

    def _seconds(self, node: Node, work: _Work, part: float, images: int, whole: int) -> float:
        """One call on a part of the images; the kernel is called with `work.call` then."""
        rates = self.rates
        seconds = rates.call + part * images / _rate(rates.touched, node.op)
        if not work.flops:
            return seconds + whole / _rate(rates.touched, node.op) + sum(self._fresh(part * size) for size in work.made)
        seconds += part * work.flops / _rate(rates.flops, node.op) + whole / rates.weights
        if work.call is not None:
            seconds += self._windows(node, work.call)
        return seconds + sum(self._fresh(part * size) for size in work.made)

    def _windows(self, node: Node, call: KernelShape) -> float:
        """Copying windows, piece by piece, into the same memory."""
        windows = window_bytes(node, call)
        rate = self.rates.unfolded.get(DIRECT if is_direct(node, call) else node.op, math.inf)
        return windows / rate + self._fresh(min(scratch_bytes(node, call), windows))

    def _fresh(self, num_bytes: float) -> float:
        """Touching a new result for the first time, where the system hands large ones out anew."""
        return num_bytes / self.rates.fresh if num_bytes >= self.rates.fresh_from else 0.0

    def _moves(self, tile_loop: TileLoop) -> float:
        """What a loop does around its body: cuts tiles out of whole tensors, puts them together, adds up sums."""
        turns = self._num_turns(tile_loop)
        if turns == 1:
            return 0.0
        cut = [
            tensor
            for tensor in (*tile_loop.reads, *tile_loop.writes, *tile_loop.accumulates)
            if tensor in tile_loop.regions
        ]
        moved = sum(2 * t.num_bytes(self.batch) * _part(self.analysis, tile_loop, t) for t in cut)
        moved += sum(t.num_bytes(self.batch) for t in tile_loop.accumulates)
        moved += turns * sum(3 * t.num_bytes(self.batch) for t in tile_loop.reductions)
        calls = turns * (len(cut) + len(tile_loop.reductions))
        return moved / _rate(self.rates.touched, _ANY) + calls * self.rates.call

    def _work_of(self, node: Node) -> _Work | None:
        """What an op does; `None` if it does nothing."""
        if node not in self._work:
            self._work[node] = self._found(node)
        work = self._work[node]
        return work if work.images or work.whole else None

    def _found(self, node: Node) -> _Work:
        if properties.forwards_input_buffer(node) or not properties.allocates(node) or reads_shape_only(node):
            return _Work(0.0, 0, 0, None, ())
        analysis, batch = self.analysis, self.batch
        flops, weights = 0.0, list[Tensor]()
        with contextlib.suppress(NotTileableError):
            rule, view = find_rule(node), analysis.view(node)
            flops = rule.flops(view, batch)
            weights = rule.weights(view) if flops else []
        touched = [(t.num_bytes(batch), analysis.is_image(t) and t not in weights) for t in _tensors(node)]
        images = sum(size for size, is_image in touched if is_image)
        whole = sum(size for size, is_image in touched if not is_image)
        call = full_call(node, batch)
        made = [] if self._takes_over(node) else [size for size, is_image in touched[len(node.inputs) :] if is_image]
        return _Work(flops, images, whole, call if flops and window_bytes(node, call) else None, tuple(made))

    def _takes_over(self, node: Node) -> bool:
        """Whether an op's kernel writes into the buffer of an operand that nobody else reads."""
        if not properties.may_run_in_place(node):
            return False
        sizes = [node.out(index).num_bytes(self.batch) for index in range(len(node.outputs))]
        return any(t.num_bytes(self.batch) in sizes and len(self.analysis.consumers[t]) == 1 for t in node.inputs)


class LowerBoundCost(CostModel):
    """See `CostModel.least`."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__(costs.analysis, costs.batch, dataclasses.replace(costs.rates, fresh=math.inf))
        self._work = costs._work
        self.pairs = costs.pairs

    def _windows(self, node: Node, call: KernelShape) -> float:
        return 0.0 if may_be_direct(node) else super()._windows(node, call)

    def _idle_cores(self, node: Node, call: KernelShape) -> float:
        return idle_cores(node, dataclasses.replace(call, images=1))  # One after another keeps one core busy.


def _pairs(analysis: GraphAnalysis) -> dict[Node, Node]:
    """The two gradients of each convolution, of which TensorFlow's own kernels run at once."""
    pairs: dict[Node, Node] = {}
    taken: set[Node] = set()
    for node in filter(is_convolution, analysis.order):
        # One of them reads the image where the convolution does, the other one the filter.
        gradients = [
            [reader for reader, at in analysis.consumers[tensor] if at == position and unfolds(reader)]
            for position, tensor in enumerate(node.inputs[:2])
        ]
        for first, second in itertools.product(*gradients):
            if first.inputs[-1] == second.inputs[-1] and first not in taken and second not in taken:
                pairs[first] = second
                taken |= {first, second}
    return pairs


def _rate(rates: Mapping[str, float], op: str) -> float:
    return rates.get(op, rates[_ANY])


def _tensors(node: Node) -> list[Tensor]:
    """What an op reads and makes."""
    return [*node.inputs, *(node.out(index) for index in range(len(node.outputs)))]


def overlapped_bytes(analysis: GraphAnalysis, tile_loop: TileLoop, batch: int) -> int:
    """Bytes of images that the turns of a loop make more than once."""
    extra = 0.0
    for node in tile_loop.body:
        results = (node.out(index) for index in range(len(node.outputs)))
        made = sum(tensor.num_bytes(batch) for tensor in results if tensor in tile_loop.regions)
        extra += max(_coverage(analysis, tile_loop, node) - 1, 0) * made
    return int(extra)


def _coverage(analysis: GraphAnalysis, tile_loop: TileLoop, node: Node) -> float:
    """Rows times columns that an op runs on in all turns, over those of the image."""
    result = 1.0
    worked = find_rule(node).cost_operand(analysis.view(node))
    for axis, plan in enumerate(tile_loop.plans[node]):
        rows, tensor = plan.kept, node.out()
        if worked is not None:
            rows, tensor = plan.needs[worked], node.inputs[worked]
        elif rows is None:
            position = next(p for p, need in reversed(list(enumerate(plan.needs))) if need is not None)
            rows, tensor = plan.needs[position], node.inputs[position]
        assert rows is not None
        extent = analysis.view(node).extent(tensor, axis)
        result *= float(rows.size.sum()) / extent
    return result


def _part(analysis: GraphAnalysis, tile_loop: TileLoop, tensor: Tensor) -> float:
    """Rows times columns of a tensor that turns hold, over those of the image."""
    rows = zip(tile_loop.regions[tensor], analysis.extents(tensor) or (), strict=True)
    return math.prod(float(interval.size.sum()) / (extent or 1) for interval, extent in rows)
