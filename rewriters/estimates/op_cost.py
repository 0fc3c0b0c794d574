"""Cost model: seconds of ops and of tile loops, from op rules and the rates of a machine.

The time of an op is the sum of:

- its call;
- its arithmetic, slower for filter gradients of images whose rows exceed a cache;
- memory that it reads and writes;
- windows that its kernel copies (im2col);
- first touches of newly mapped memory.

An accelerator computes while the host starts further ops, so the longer of both counts: the call, or the other terms.

A loop runs an op once in each iteration, on the part of the image that the iteration covers, halo included, and on
full weights. Its iterations also cut out, pad and write tiles, and compute their places.

Ops run one after another, except for the two gradients of a convolution. While one of them copies windows, which
keeps few cores busy, the other one uses the remaining cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import weakref
from collections.abc import Collection, Iterable, Mapping

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.kernel_scratch import (
    KernelShape,
    full_call,
    idle_cores,
    is_convolution,
    is_direct,
    may_be_direct,
    row_bytes,
    scratch_bytes,
    unfolds,
    window_bytes,
)
from rewriters.device.op_buffers import allocates, forwards_input_buffer, may_run_in_place
from rewriters.emission.lowering import lower
from rewriters.errors import NotTileableError
from rewriters.estimates.instruction_cost import (
    HOST_OPS_OF_BATCH,
    HOST_OPS_PER_AXIS,
    HOST_OPS_PER_REGION,
    InstructionCosts,
)
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.registry import find_rule
from rewriters.tiling.tile_planner import TileLoop

__all__: list[str] = []

_ANY = ""
"""Key of the rate of all op types without a rate of their own."""

DIRECT = "direct"
"""Key of the rate of convolution gradients whose kernels do not unfold images."""


def sum_in_order(seconds: Iterable[float]) -> float:
    """Return the sum of durations, rounded after each addition.

    `sum` compensates for rounding since Python 3.12. Of equally fast plans another one would be chosen there.
    """
    return functools.reduce(operator.add, seconds, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineRates:
    """Rates of a machine, per second.

    Attributes:
        flops: Floating point operations, by op type; `""` is for all others.
        float64_slowdown: Time of an operation in float64 over that in other types.
        long_row_bytes: Bytes of a row of the image and of the output gradient from which on a filter gradient gets
            slower.
        long_row_slowdown: Time of the arithmetic of a filter gradient with rows of twice these bytes or more, over that
            with short rows.
        touched: Bytes read and written, by op type; `""` is for all others.
        weights: Bytes of weights or weight gradients of an op that counts arithmetic. Kernels copy them into a layout
            of their own in every call.
        unfolded: Bytes of windows that a convolution or its gradient copies, by op type; `DIRECT` is for gradients
            whose kernels do not unfold images.
        first_touch: Bytes of newly mapped memory; infinite where the allocator keeps large regions.
        first_touch_min_bytes: Bytes from which on a result is in newly mapped memory.
        call: Seconds to start an op.
        kernel_call: Further seconds to start an op that counts arithmetic, by op type; 0 for all others. A kernel on a
            CPU prepares its weights and its threads. Types that oneDNN does not compute have simpler kernels.
        host_call: Seconds to run an op on a few integers in host memory, such as the place of a tile.
        copied: Bytes swapped to host memory, or to the page cache of a disk, or back.
        overlapped: Whether the device computes while the host starts ops and while tensors are swapped.
        disk_write: Bytes written to disk.
        disk_read: Bytes read from disk.
    """

    flops: Mapping[str, float]
    touched: Mapping[str, float]
    weights: float
    unfolded: Mapping[str, float] = dataclasses.field(default_factory=dict)
    first_touch: float = math.inf
    first_touch_min_bytes: int = 2**25
    call: float = 0.0
    kernel_call: Mapping[str, float] = dataclasses.field(default_factory=dict)
    host_call: float = 0.0
    copied: float = 1e9
    overlapped: bool = False
    disk_write: float = 1e9
    disk_read: float = 1e9
    float64_slowdown: float = 1.0
    long_row_bytes: int = 2**20
    long_row_slowdown: float = 1.0

    def swapped(self, seconds: float, out: int, back: int, to_disk: bool) -> float:
        """Return the seconds of a step with swaps.

        Args:
            seconds: Seconds of the step without swaps.
            out: Bytes of all swap-outs.
            back: Bytes of all swap-ins.
            to_disk: Whether the disk itself is written and read, and not its page cache alone. Disk transfers run
                concurrently with the step, as transfers between an accelerator and host memory do.
        """
        copying = (out + back) / self.copied
        disk = out / self.disk_write + back / self.disk_read if to_disk else 0.0
        return max(seconds, copying, disk) if self.overlapped else max(seconds, disk) + copying

    def with_files(self, seconds: float, written: int, read: int, to_disk: bool) -> float:
        """Return the seconds of a step whose loops write and read files.

        Args:
            seconds: Seconds of the step if its tensors were in memory.
            written: Bytes that loops write. The disk writes them concurrently with the step.
            read: Bytes that loops read. An iteration waits for them.
            to_disk: As for `swapped`.
        """
        waiting = read / self.disk_read if to_disk else 0.0
        return self.swapped(seconds, written, 0, to_disk) + read / self.copied + waiting


NOMINAL = MachineRates(flops={_ANY: 1e11}, touched={_ANY: 1.25e10}, weights=2.5e9)
"""Rates of a machine of the 2020s, within a factor of two: 8 flops take as long as moving a byte.

docs/develop/decisions.md has the measurement behind the rate of weights: "Every iteration pays for its weights".
"""


@dataclasses.dataclass(frozen=True)
class _Work:
    """Work of an op on full-size images.

    Attributes:
        flops: Floating point operations.
        image_bytes: Bytes of images that the op reads and writes.
        other_bytes: Bytes of all other tensors: weights and their gradients, reductions.
        call: Shape of the kernel call, if the kernel copies windows.
        result_bytes: Bytes of each image result with memory of its own.
        row_bytes: Bytes of a row of the images, if the time of the kernel depends on them.
    """

    flops: float
    image_bytes: int
    other_bytes: int
    call: KernelShape | None
    result_bytes: tuple[int, ...]
    row_bytes: float


class CostModel:
    """Seconds of the ops and the tile loops of one step.

    Args:
        analysis: Analysis of the step.
        batch: Batch size where the graph leaves it open.
        rates: Rates of the machine.

    Attributes:
        device: The device.
        gradient_pairs: One gradient of each convolution, with the other one, which may run concurrently.
    """

    def __init__(self, analysis: GraphAnalysis, batch: int, rates: MachineRates = NOMINAL) -> None:
        self.analysis = analysis
        self.device = analysis.graph.device
        self.batch = batch
        self.rates = rates
        self._work: dict[Node, _Work] = {}
        self._ops: dict[Node, float] = {}
        self._iterations = weakref.WeakKeyDictionary[TileLoop, dict[Node, tuple[_Work, float]]]()
        self._loops = weakref.WeakKeyDictionary[TileLoop, float]()
        self.gradient_pairs = _pairs(analysis)

    def op(self, node: Node) -> float:
        """Return the seconds of a full-size op."""
        if node not in self._ops:
            work = self._work_of(node)
            self._ops[node] = self._call_seconds(node, work) if work else 0.0
        return self._ops[node]

    def step(self, nodes: Collection[Node]) -> float:
        """Return the seconds of full-size ops, summed in the order of the graph, because that of a set is arbitrary."""
        nodes = self.analysis.sorted(nodes)
        return sum_in_order(map(self.op, nodes)) - self.concurrency_savings(nodes)

    def concurrency_savings(self, nodes: Iterable[Node], tile_loop: TileLoop | None = None) -> float:
        """Return the seconds that ops save because some run concurrently; full-size ops if `tile_loop` is `None`."""
        ops = dict.fromkeys(nodes)
        pairs = ((node, self.gradient_pairs[node]) for node in ops if self.gradient_pairs.get(node) in ops)
        return sum_in_order(self._saved(*pair, tile_loop) for pair in pairs)

    @functools.cached_property
    def lower_bound(self) -> CostModel:
        """Cost model whose times no loop with as many iterations or more falls below.

        More iterations mostly take longer. They may take less time in four cases:

        - Results become too small for newly mapped memory.
        - Tiles have so few pixels that a kernel for volumes unfolds them.
        - Tiles have so few images that both gradients of a convolution leave cores idle.
        - Rows of tiles are so short that they fit the second-level cache.
        """
        return LowerBoundCost(self)

    def _saved(self, first: Node, second: Node, tile_loop: TileLoop | None) -> float:
        """Return the seconds saved by two ops that use each other's idle cores, at most those of the shorter op."""
        seconds, idle = [], 0.0
        for node in (first, second):
            seconds.append(self.op(node) if tile_loop is None else self.op_in_loop(tile_loop, node))
            idle += self._idle(node, tile_loop)
        return min(*seconds, idle)

    def _idle(self, node: Node, tile_loop: TileLoop | None) -> float:
        """Return the seconds in which a gradient copies windows, times the fraction of cores that is idle then."""
        work = self._work_of(node)
        if work is None or work.call is None:
            return 0.0
        iterations = 1 if tile_loop is None else self.num_iterations(tile_loop)
        call = work.call
        if tile_loop is not None and iterations > 1:
            call = self._iteration_work(tile_loop, node)[0].call or call
        return iterations * self._windows(node, call) * self._idle_cores(node, call)

    def _idle_cores(self, node: Node, call: KernelShape) -> float:
        return idle_cores(node, call, self.device)

    def tile_loop(self, tile_loop: TileLoop) -> float:
        """Return the seconds of a loop: its body, and the copies between tiles and full-size tensors."""
        if tile_loop not in self._loops:
            self._loops[tile_loop] = self.body(tile_loop) + self._copies(tile_loop)
        return self._loops[tile_loop]

    def bind(self, tile_loop: TileLoop, seconds: float) -> None:
        """Set the seconds of a loop to those of an equal one."""
        self._loops[tile_loop] = seconds

    def body(self, tile_loop: TileLoop) -> float:
        """Return the seconds of the ops of a loop in all iterations, halos included."""
        seconds = sum_in_order(self.op_in_loop(tile_loop, node) for node in tile_loop.body)
        seconds -= self.concurrency_savings(tile_loop.body, tile_loop)
        return seconds + sum_in_order(self._moments(pair.image) for pair in tile_loop.moments)

    def _moments(self, image: Tensor) -> float:
        """Return the seconds of the mean, the squared differences and their mean that a loop computes for each tile."""
        size, touched = image.num_bytes(self.batch), self.rates.touched
        return 2 * size / _rate(touched, "Mean") + 2 * size / _rate(touched, "SquaredDifference")

    def op_in_loop(self, tile_loop: TileLoop, node: Node) -> float:
        """Return the seconds of one op in all iterations of a loop.

        Work on images is divided among the iterations. Each iteration reads the weights and computes reductions over
        its tile, such as weight gradients. In deep layers that may take longer than the arithmetic.
        """
        work = self._work_of(node)
        if work is None:
            return 0.0
        iterations = self.num_iterations(tile_loop)
        if iterations == 1:
            return self.op(node)
        return iterations * self._call_seconds(node, *self._iteration_work(tile_loop, node))

    def _iteration_work(self, tile_loop: TileLoop, node: Node) -> tuple[_Work, float]:
        """Return the work of an op with the kernel call of one iteration, and the fraction of images in it."""
        cached = self._iterations.setdefault(tile_loop, {})
        if node not in cached:
            work = self._work[node]
            rebuilt = [node.inputs[position] for position in find_rule(node).shape_operands(self.analysis.view(node))]
            full_size = [t for t in _tensors(node) if t not in tile_loop.regions and t not in rebuilt]
            other_bytes = sum(t.num_bytes(self.batch) for t in full_size)
            image_bytes = max(work.image_bytes + work.other_bytes - other_bytes, 0)
            coverage = _coverage(self.analysis, tile_loop, node)
            call = None if work.call is None else self.iteration_call(work.call, tile_loop, coverage)
            row = work.row_bytes * _width_fraction(self.analysis, tile_loop, node) if work.row_bytes else 0.0
            iteration = _Work(work.flops, image_bytes, other_bytes, call, work.result_bytes, row)
            cached[node] = iteration, coverage / self.num_iterations(tile_loop)
        return cached[node]

    def iteration_call(self, call: KernelShape, tile_loop: TileLoop, coverage: float) -> KernelShape:
        """Return the shape of a kernel call in an iteration: some of the images, and a tile of each."""
        tiles = math.prod(tile_loop.grid.spatial)
        fraction = coverage / tiles
        images = -(-call.images * tiles // self.num_iterations(tile_loop))
        windows, pixels = (max(round(fraction * number), 1) for number in (call.small, call.large))
        return KernelShape(images, windows, pixels, is_tile=True)

    def num_iterations(self, tile_loop: TileLoop) -> int:
        return min(tile_loop.grid.batch, self.batch) * math.prod(tile_loop.grid.spatial)

    def _call_seconds(self, node: Node, work: _Work, fraction: float = 1.0) -> float:
        """Return the seconds of one call on a fraction of the images; `work.call` is the shape of that call."""
        rates, seconds = self.rates, self._kernel_seconds(node, work, fraction)
        return max(rates.call, seconds) if rates.overlapped else rates.call + seconds

    def _kernel_seconds(self, node: Node, work: _Work, fraction: float) -> float:
        """Return the seconds of one call without those to start it."""
        rates = self.rates
        seconds = fraction * work.image_bytes / _rate(rates.touched, node.kernel)
        first_touch = sum_in_order(self._first_touch(fraction * size) for size in work.result_bytes)
        if not work.flops:
            return seconds + work.other_bytes / _rate(rates.touched, node.kernel) + first_touch
        slowdown = self._row_slowdown(work) * (rates.float64_slowdown if node.outputs[0][0].name == "float64" else 1.0)
        seconds += slowdown * fraction * work.flops / _rate(rates.flops, node.kernel) + work.other_bytes / rates.weights
        if self.device.unfolds_convolutions or self.device.onednn_computes(node.outputs[0][0]):
            seconds += rates.kernel_call.get(node.kernel, 0.0)
        if work.call is not None:
            seconds += self._windows(node, work.call)
        return seconds + first_touch

    def _row_slowdown(self, work: _Work) -> float:
        """Return the time of arithmetic over that with short rows.

        Measured with 64 channels: 1.4 at 1.25 times `long_row_bytes`, 1.9 at 1.5, 2.8 at 2, and 3.1 at 2.5.
        """
        excess = min(max(work.row_bytes / self.rates.long_row_bytes - 1, 0.0), 1.0)
        return 1 + (self.rates.long_row_slowdown - 1) * excess

    def _windows(self, node: Node, call: KernelShape) -> float:
        """Return the seconds to copy windows, block by block, into one buffer."""
        windows = window_bytes(node, call, self.device)
        rate = self.rates.unfolded.get(DIRECT if is_direct(node, call, self.device) else node.op, math.inf)
        return windows / rate + self._first_touch(min(scratch_bytes(node, call, self.device), windows))

    def _first_touch(self, num_bytes: float) -> float:
        """Return the seconds of the page faults of a buffer, which a small buffer does not have."""
        return num_bytes / self.rates.first_touch if num_bytes >= self.rates.first_touch_min_bytes else 0.0

    def _copies(self, tile_loop: TileLoop) -> float:
        """Return the seconds of a loop outside of its body: slices, pads, writes, accumulation, places of tiles."""
        iterations, rates = self.num_iterations(tile_loop), self.rates
        program, costs = lower(self.analysis, tile_loop), InstructionCosts(self.analysis, self.batch, iterations)
        work = costs.of_program(program)
        axes = sum(count > 1 for count in tile_loop.grid.spatial)
        host_calls = HOST_OPS_PER_AXIS * axes + HOST_OPS_PER_REGION * work.regions
        host_calls += HOST_OPS_OF_BATCH if tile_loop.grid.batch > 1 else 0
        starting = work.calls * rates.call + host_calls * rates.host_call
        return work.moved_bytes / _rate(rates.touched, _ANY) + iterations * starting

    def _work_of(self, node: Node) -> _Work | None:
        """Return the work of an op; `None` if it touches no memory."""
        if node not in self._work:
            self._work[node] = self._full_size_work(node)
        work = self._work[node]
        return work if work.image_bytes or work.other_bytes else None

    def _full_size_work(self, node: Node) -> _Work:
        if forwards_input_buffer(node) or not allocates(node) or reads_shape_only(node):
            return _Work(0.0, 0, 0, None, (), 0)
        analysis, batch = self.analysis, self.batch
        flops, weights = 0.0, list[Tensor]()
        with contextlib.suppress(NotTileableError):
            rule, view = find_rule(node), analysis.view(node)
            flops = rule.flops(view, batch)
            weights = rule.weights(view) if flops else []
        touched = [(t.num_bytes(batch), analysis.is_image(t) and t not in weights) for t in _tensors(node)]
        image_bytes = sum(size for size, is_image in touched if is_image)
        other_bytes = sum(size for size, is_image in touched if not is_image)
        call = full_call(node, batch)
        results = [] if self._runs_in_place(node) else touched[len(node.inputs) :]
        result_bytes = tuple(size for size, is_image in results if is_image)
        copies_windows, row = flops and window_bytes(node, call, self.device), row_bytes(node, self.device)
        return _Work(flops, image_bytes, other_bytes, call if copies_windows else None, result_bytes, row)

    def _runs_in_place(self, node: Node) -> bool:
        """Return whether an op's kernel writes into the buffer of an operand without another consumer."""
        if not may_run_in_place(node):
            return False
        sizes = [node.out(index).num_bytes(self.batch) for index in range(len(node.outputs))]
        return any(t.num_bytes(self.batch) in sizes and len(self.analysis.consumers[t]) == 1 for t in node.inputs)


class LowerBoundCost(CostModel):
    """Implements `CostModel.lower_bound`."""

    def __init__(self, costs: CostModel) -> None:
        rates = dataclasses.replace(costs.rates, first_touch=math.inf, long_row_slowdown=1.0)
        super().__init__(costs.analysis, costs.batch, rates)
        self._work, self._iterations = costs._work, costs._iterations
        self.gradient_pairs = costs.gradient_pairs

    def _windows(self, node: Node, call: KernelShape) -> float:
        return 0.0 if may_be_direct(node, self.device) else super()._windows(node, call)

    def _idle_cores(self, node: Node, call: KernelShape) -> float:
        # Images one after another keep one core busy.
        return idle_cores(node, dataclasses.replace(call, images=1), self.device)


def _pairs(analysis: GraphAnalysis) -> dict[Node, Node]:
    """Return pairs of the two gradients of each convolution, whose TensorFlow kernels run concurrently."""
    device, pairs = analysis.graph.device, dict[Node, Node]()
    paired: set[Node] = set()
    for node in filter(is_convolution, analysis.order):
        # One of them reads the image at the position where the convolution reads it, the other one the filter.
        gradients = [
            [consumer for consumer, at in analysis.consumers[tensor] if at == position and unfolds(consumer, device)]
            for position, tensor in enumerate(node.inputs[:2])
        ]
        for first, second in itertools.product(*gradients):
            if first.inputs[-1] == second.inputs[-1] and first not in paired and second not in paired:
                pairs[first] = second
                paired |= {first, second}
    return pairs


def _rate(rates: Mapping[str, float], op: str) -> float:
    return rates.get(op, rates[_ANY])


def _tensors(node: Node) -> list[Tensor]:
    """Return the operands and the results of an op."""
    return [*node.inputs, *(node.out(index) for index in range(len(node.outputs)))]


def overlapped_bytes(analysis: GraphAnalysis, tile_loop: TileLoop, batch: int) -> int:
    """Return the bytes of images that the iterations of a loop compute more than once."""
    extra = 0.0
    for node in tile_loop.body:
        results = (node.out(index) for index in range(len(node.outputs)))
        result_bytes = sum(tensor.num_bytes(batch) for tensor in results if tensor in tile_loop.regions)
        extra += max(_coverage(analysis, tile_loop, node) - 1, 0) * result_bytes
    return int(extra)


def _coverage(analysis: GraphAnalysis, tile_loop: TileLoop, node: Node) -> float:
    """Return the pixels that an op works on in all iterations, over the pixels of the image."""
    result = 1.0
    cost_operand = find_rule(node).cost_operand(analysis.view(node))
    for axis, plan in enumerate(tile_loop.plans[node]):
        rows, tensor = plan.kept, node.out()
        if cost_operand is not None:
            rows, tensor = plan.needs[cost_operand], node.inputs[cost_operand]
        elif rows is None:
            position = next(p for p, need in reversed(list(enumerate(plan.needs))) if need is not None)
            rows, tensor = plan.needs[position], node.inputs[position]
        assert rows is not None
        extent = analysis.view(node).extent(tensor, axis)
        result *= float(rows.size.sum()) / extent
    return result


def _width_fraction(analysis: GraphAnalysis, tile_loop: TileLoop, node: Node) -> float:
    """Return the length of the longest row of a tile that a filter gradient reads, over that of the image."""
    rows = tile_loop.plans[node][-1].needs[0]
    extent = analysis.view(node).extent(node.inputs[0], len(tile_loop.plans[node]) - 1)
    return 1.0 if rows is None else float(rows.size.max()) / extent
