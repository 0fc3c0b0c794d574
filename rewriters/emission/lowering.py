"""Lowers a planned tile loop to its program."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from rewriters.analysis import summation_order
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.merged_kernels import may_fuse_with_consumer
from rewriters.emission.loop_program import (
    Accumulate,
    AddRows,
    Carry,
    Fit,
    Instruction,
    Join,
    LoopProgram,
    MergeMoments,
    Output,
    Part,
    Receive,
    Reduce,
    Run,
    Save,
    Slice,
    Write,
)
from rewriters.emission.loop_tensors import BATCH_DIM, loop_operand
from rewriters.errors import RewriteError
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.intervals import Interval
from rewriters.rules.registry import find_rule
from rewriters.tiling.tile_planner import Region, TileLoop, covers, with_rows

__all__: list[str] = []


MAX_PROGRAMS = 8
"""Programs that are cached: a search estimates memory and time of one loop after another, and drops most of them."""

_programs = weakref.WeakKeyDictionary[TileLoop, tuple[weakref.ref[GraphAnalysis], LoopProgram]]()


def lower(analysis: GraphAnalysis, tile_loop: TileLoop) -> LoopProgram:
    """Return the program of a planned loop; the latest programs are cached.

    Raises:
        RewriteError: If an op needs rows of a forward value that an iteration does not hold.
    """
    cached = _programs.get(tile_loop)
    if cached is None or cached[0]() is not analysis:
        while len(_programs) >= MAX_PROGRAMS:
            del _programs[next(iter(_programs))]
        cached = _programs[tile_loop] = weakref.ref(analysis), _Lowering(analysis, tile_loop).program()
    return cached[1]


class _Lowering:
    """Appends the instructions of one iteration, op by op. A part that several ops need is computed once."""

    def __init__(self, analysis: GraphAnalysis, tile_loop: TileLoop) -> None:
        self._analysis = analysis
        self._loop = tile_loop
        self._instructions: list[Instruction] = []
        self._parts: dict[Tensor, Part] = {}
        self._fits: dict[tuple[object, ...], Part] = {}
        self._joined: dict[tuple[Tensor, float | str], Part] = {}
        self._received: dict[Tensor, Part] = {}
        self._passed: dict[Tensor, Part] = {}
        self._pending_reductions: list[Part] = []
        self._waits: tuple[Part, ...] = ()

    def program(self) -> LoopProgram:
        """Return the program."""
        for node in self._loop.body:
            self._run(node)
        outputs = tuple(self._outputs())
        return LoopProgram(tuple(self._instructions), outputs)

    # Ops -----------------------------------------------------------------------------------------------------

    def _run(self, node: Node) -> None:
        """Append an op, before it the operands that it needs, and after it the rows that the iteration keeps."""
        reductions = self._reductions_before(node)
        operands = tuple(self._operands(node))
        plan = self._loop.plans[node]
        computed: Region | None = None if plan[0].kept is None else tuple(p.computed for p in plan)  # type: ignore[misc]
        tensors = [node.out(index) for index in range(len(node.outputs))]
        results = tuple(None if t in self._loop.reads else Part(t, computed) for t in tensors)
        self._instructions.append(Run(node=node, operands=operands, results=results, reductions=reductions))
        for part in filter(None, results):
            self._parts[part.tensor] = part if computed is None else self._held(part)
        if node.op not in summation_order.SUMS:  # A control edge would change the order of summation.
            self._pending_reductions += [p for p in results if p is not None and p.tensor in self._loop.reductions]

    def _held(self, part: Part) -> Part:
        """Return the rows of a result that the iteration keeps, from those that its op computes."""
        tensor = part.tensor
        if tensor in self._loop.carries and self._is_gradient(tensor):
            return self._finished(part)
        return self._fitted(part, tuple(p.kept for p in self._loop.plans[tensor.node]), 0.0)  # type: ignore[misc]

    def _reductions_before(self, node: Node) -> tuple[Part, ...]:
        """Return the reductions that have to end before an op begins; only gradients of layer inputs wait.

        An example is the gradient of a later layer's filter. The executor may run it at any time, and its operands
        stay alive until then.
        """
        if not self._is_gradient(node.out()) or not find_rule(node).flops(self._analysis.view(node), 1):
            return ()
        reductions, self._pending_reductions = self._pending_reductions, []
        return tuple(reductions)

    def _operands(self, node: Node) -> list[Part | Tensor | None]:
        """Return the operands of an op, in the rows that it needs."""
        rule, view, plan = find_rule(node), self._analysis.view(node), self._loop.plans[node]
        rebuilt = rule.shape_operands(view)
        meets_gradient = any(map(self._is_gradient, node.inputs))
        operands: list[Part | Tensor | None] = []
        for position, tensor in enumerate(node.inputs):
            if position in rebuilt:
                operands.append(None)
            elif tensor in self._loop.regions and plan[0].needs[position] is not None:
                need: Region = tuple(p.needs[position] for p in plan)  # type: ignore[misc]
                self._waits = self._gradients_beside(node, tensor)
                operands.append(self._rows(tensor, need, rule.operand_fill(view, position), meets_gradient))
                self._waits = ()
            else:
                operands.append(tensor)
        return operands

    def _gradients_beside(self, node: Node, tensor: Tensor) -> tuple[Part, ...]:
        """Return the other gradients that an op reads, for which the rows that it needs of an operand wait.

        The executor would slice a full-size tensor when the iteration begins, and crop and pad a recomputed activation
        as soon as it exists. The copies would occupy memory until the gradient exists. TensorFlow may fuse two ops, and
        the fused op must not wait for itself.
        """
        return tuple(
            self._parts[t]
            for t in node.inputs
            if t != tensor and t in self._parts and self._is_awaited(t.node)
            if not may_fuse_with_consumer(t.node, node)
        )

    def _is_awaited(self, node: Node) -> bool:
        """Return whether slices, crops and pads of an op's other operands wait for an operand that `node` computes."""
        # A control edge from a sum would change the order of summation.
        return node in self._analysis.backward and not summation_order.may_be_flattened(self._analysis, node)

    def _is_gradient(self, tensor: Tensor) -> bool:
        """Return whether the rows of a tensor may be partial sums."""
        return tensor in self._loop.regions and tensor not in self._loop.values

    # Rows ----------------------------------------------------------------------------------------------------

    def _part(self, tensor: Tensor) -> Part:
        """Return the rows that the iteration holds; slice a full-size tensor when it is first needed."""
        if tensor not in self._parts:
            self._parts[tensor] = part = Part(tensor, self._loop.regions[tensor])
            self._instructions.append(
                Slice(result=part, is_full=loop_operand(tensor) == tensor and self._is_full(part), waits=self._waits)
            )
        return self._parts[tensor]

    def _is_full(self, part: Part) -> bool:
        """Return whether a part is the full tensor in every iteration."""
        if self._loop.grid.batch != 1 and part.tensor.shape and part.tensor.shape[BATCH_DIM] != 1:
            return False
        extents = self._analysis.extents(part.tensor) or ()
        return all(np.all(rows.size == extent) for rows, extent in zip(part.region or (), extents, strict=True))

    def _rows(self, tensor: Tensor, need: Region, fill: float | str, meets_gradient: bool = False) -> Part:
        """Return the rows `need` of a tensor.

        An op that also reads a gradient cuts them out of rows that were joined for an earlier op, if it can. The joined
        rows mostly stay alive until the gradient in any case. Reading them releases the rows as they were computed.
        """
        joined = self._joined.get((tensor, fill))
        if meets_gradient and joined is not None and not self._is_gradient(tensor):
            assert joined.region is not None
            if covers(joined.region, need):
                return self._fitted(joined, need, fill)
        self._check_held(tensor, need)
        carry = self._loop.carries.get(tensor)
        if carry is None or self._is_gradient(tensor):
            part = self._fitted(self._part(tensor), need, fill)
            if self._loop.carries and tensor not in self._loop.reads and not covers(self._loop.regions[tensor], need):
                self._joined.setdefault((tensor, fill), part)
            return part
        rows = need[self._loop.row_axis]
        if np.all((rows.lo >= carry.received.hi) | (rows.size == 0)):
            return self._fitted(self._part(tensor), need, fill)
        key = (tensor, fill, *(i.key for i in need))
        if key not in self._fits:
            self._fits[key] = self._with_received(tensor, need, fill)
            self._joined.setdefault((tensor, fill), self._fits[key])
        return self._fits[key]

    def _check_held(self, tensor: Tensor, need: Region) -> None:
        """Check that the iteration holds all rows of a forward value that lie in the image.

        Forward values may be padded outside of the image only. Gradients are zero wherever the iteration holds no rows.
        """
        region = self._loop.regions[tensor]
        if self._is_gradient(tensor) or all(held.same(needed) for held, needed in zip(region, need, strict=True)):
            return
        extents = self._analysis.extents(tensor)
        assert extents is not None and None not in extents
        axes = zip(region, need, extents, strict=True)
        if not all(held.covers(needed.clip(extent)) for held, needed, extent in axes):  # type: ignore[arg-type]
            raise RewriteError(
                f"A tile loop holds fewer rows of `{tensor.name}` than an op in it reads, and would compute other "
                "results than the original step. Please report it."
            )

    def _fitted(self, part: Part, need: Region, fill: float | str, may_be_view: bool = True) -> Part:
        """Return the rows `need` of a part, cropped and padded."""
        assert part.region is not None
        if all(h.same(n) for h, n in zip(part.region, need, strict=True)):
            return part
        key = (part, fill, may_be_view, *(i.key for i in need))
        if key not in self._fits:
            result = Part(part.tensor, need)
            self._instructions.append(
                Fit(result=result, part=part, fill=fill, may_be_view=may_be_view, waits=self._waits)
            )
            self._fits[key] = result
        return self._fits[key]

    # Carried rows --------------------------------------------------------------------------------------------

    def _rows_received(self, tensor: Tensor, like: Part) -> Part:
        """Return the rows of a tensor from the previous iteration or another loop; `like` has their batch size."""
        if tensor not in self._received:
            carry = self._loop.carries[tensor]
            part = Part(tensor, with_rows(self._loop.regions[tensor], self._loop.row_axis, carry.received))
            self._instructions.append(Receive(result=part, carry=carry, like=like, waits=self._waits))
            self._received[tensor] = part
        return self._received[tensor]

    def _with_received(self, tensor: Tensor, need: Region, fill: float | str, may_be_view: bool = True) -> Part:
        """Return the rows `need` of a tensor from the computed rows and the received rows above them, with one copy.

        The computed rows are padded, and the received rows written into the padding.
        """
        axis, region = self._loop.row_axis, self._loop.regions[tensor]
        above = self._rows_received(tensor, self._part(tensor))
        inner = tuple(_intersection(have, needed) for have, needed in zip(region, need, strict=True))
        inner = with_rows(inner, axis, _intersection(self._loop.carries[tensor].received, need[axis]))
        if all(rows.same(needed) for rows, needed in zip(inner, need, strict=True)):
            return self._fitted(above, need, 0.0, may_be_view)
        padded = self._fitted(self._part(tensor), need, fill, may_be_view)
        if not np.any(inner[axis].size):
            return padded
        received = self._fitted(above, inner, 0.0)
        result = Part(tensor, need)
        self._instructions.append(Join(result=result, padded=padded, received=received, waits=self._waits))
        return result

    def _finished(self, part: Part) -> Part:
        """Return the rows of a gradient that no later iteration adds to, and note those that the iteration carries.

        The rows are one row of zeros where the iteration completes none.
        """
        tensor, computed = part.tensor, part.region
        assert computed is not None
        region, axis = self._loop.regions[tensor], self._loop.row_axis
        carry, received = self._loop.carries[tensor], self._rows_received(tensor, part)
        summed, in_place = Interval(carry.passed.lo, carry.received.hi), find_rule(tensor.node).own_memory
        if not computed[axis].covers(summed):
            computed, in_place = with_rows(computed, axis, computed[axis].hull(summed)), False
            part = self._fitted(part, computed, 0.0)
        total = Part(tensor, computed)
        self._instructions.append(
            AddRows(result=total, part=part, received=received, in_place=in_place, waits=self._waits)
        )
        finished = self._fitted(total, with_rows(region, axis, Interval(carry.passed.hi, carry.received.hi)), 0.0)
        self._passed[tensor] = self._fitted(total, with_rows(region, axis, carry.passed), 0.0, may_be_view=False)
        return self._fitted(finished, region, 0.0)

    def _rows_to_pass(self, tensor: Tensor) -> Part:
        """Return the rows of a tensor for the next iteration."""
        if tensor in self._passed:
            return self._passed[tensor]
        need = with_rows(self._loop.regions[tensor], self._loop.row_axis, self._loop.carries[tensor].passed)
        return self._with_received(tensor, need, 0.0, may_be_view=False)

    # Outputs -------------------------------------------------------------------------------------------------

    def _outputs(self) -> list[Output]:
        """Return the outputs of the loop, and the rows that it carries."""
        loop = self._loop
        outputs: list[Output] = []
        for tensor in loop.writes:
            part = self._rows(tensor, loop.cells[tensor], 0.0)
            outputs.append(Write(part=part, is_full=self._is_full(part)))
        for part in map(self._part, loop.accumulates):
            outputs.append(Accumulate(part=part, is_full=self._is_full(part)))
        for pair in loop.moments:
            part = self._rows(pair.image, loop.cells[pair.image], 0.0)
            outputs.append(MergeMoments(part=part, pair=pair, has_one_tile=loop.grid.num_tiles == 1))
        merged = {tensor for pair in loop.moments for tensor in (pair.mean, pair.variance)}
        outputs += [self._reduction(tensor) for tensor in loop.reductions if tensor not in merged]
        for save in loop.saves:
            regions = [with_rows(save.region, loop.row_axis, rows) for rows, _ in save.slots]
            outputs.append(Save(parts=tuple(self._rows(save.tensor, rows, 0.0) for rows in regions), save=save))
        carried = [tensor for tensor, carry in loop.carries.items() if carry.saved is None]
        return [*outputs, *(Carry(part=self._rows_to_pass(tensor)) for tensor in carried)]

    def _reduction(self, tensor: Tensor) -> Reduce:
        rule, view = find_rule(tensor.node), self._analysis.view(tensor.node)
        cell = None
        if rule.per_pixel(view):
            rows: Sequence[Interval] = self._loop.cells[tensor.node.inputs[rule.summed(view)]]
            cell = tuple(zip(rule.result_dims(view), rows, strict=True))
        sizes = [(rows.size, tensor.shape[dim]) for dim, rows in cell or () if dim is not None and tensor.shape]
        has_all_images = self._loop.grid.batch == 1 or not rule.per_image(view)
        return Reduce(
            part=self._part(tensor),
            combination=rule.combined(view),
            per_image=rule.per_image(view),
            cell=cell,
            is_full=has_all_images and all(np.all(size == full) for size, full in sizes),
        )


def _intersection(rows: Interval, others: Interval) -> Interval:
    """Return the rows in both intervals; an empty interval inside `others` where there are none."""
    lo = np.clip(rows.lo, others.lo, others.hi)
    return Interval(lo, np.maximum(np.clip(rows.hi, others.lo, others.hi), lo))
