"""Decisions of a plan as JSON, from which it is rebuilt for an equal step without a search.

Ops are stored by their position in the order of the graph, not by name: Keras numbers layers through, so that the
second model of a process has other names than the first one.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rewriters.emission.file_buffers import FileBuffers
from rewriters.emission.tile_pass import SegmentPlan, plan_segment
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.region_reads import REGION_READ, REGION_WRITE
from rewriters.scheduling.memory_order import MemoryOrder
from rewriters.tiling.ft_segments import find_components
from rewriters.tiling.one_loop import with_final_sums
from rewriters.tiling.segment import build_segment
from rewriters.tiling.tile_planner import Grid, Halo
from tflms_sft._barriers.barriers import Barriers
from tflms_sft._barriers.tiled_loops import TiledLoops
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._planner.budget_plan import BudgetPlan
from tflms_sft._search.segment_tilings import LoopEstimates
from tflms_sft._search.traced_step import TracedStep
from tflms_sft._version import __version__

FORMAT = 6
"""Version of the JSON object."""

Recipe = dict[str, Any]


PYTHON_FUNCTION = "token"
"""Attribute of a Python call that names its function."""


def step_key(traced: TracedStep) -> str:
    """Return a hash of everything of a step that its plan depends on, without names."""
    return traced.once("key", lambda: _hash(traced))


def _hash(traced: TracedStep) -> str:
    numbers: dict[Tensor, int] = {}
    functions = {f.signature.name: [node.op for node in f.node_def] for f in traced.analysis.graph.library.function}
    sizes = sorted(traced.analysis.graph.sizes.items())
    digest = hashlib.sha256(repr((FORMAT, __version__, traced.batch, sizes, list(traced.variables))).encode())
    for node in traced.analysis.order:
        attrs = sorted(
            (key, functions.get(value.func.name) or value.SerializeToString(deterministic=True))
            for key, value in node.attrs.items()
            if key in (REGION_READ, REGION_WRITE) or not key.startswith("_")
            if key != PYTHON_FUNCTION  # Its number differs in each process.
        )
        operands = [numbers.setdefault(tensor, len(numbers)) for tensor in node.inputs]
        digest.update(repr((node.op, operands, node.outputs, attrs)).encode())
    return digest.hexdigest()


def recipe_of(traced: TracedStep, choice: BudgetPlan, memory_budget: int | None) -> Recipe:
    """Return the decisions of a plan as JSON."""
    position = traced.analysis.position
    return {
        "format": FORMAT,
        "step": step_key(traced),
        "segments": [_segment_recipe(position, plan) for plan in choice.plans],
        "swaps": None if choice.swaps is None else dataclasses.asdict(choice.swaps),
        "files": None if choice.files is None else _files_recipe(position, choice.files, choice.plans),
        "order": choice.order.value,
        "why": choice.why,
        "advice": choice.advice,
        "memory_budget": memory_budget,
    }


def _segment_recipe(position: Mapping[Node, int], plan: SegmentPlan) -> Recipe:
    segment = plan.segment
    return {
        "name": segment.name,
        "ops": sorted(position[node] for node in segment.forward if node not in segment.final),
        "backward": sorted(position[node] for node in segment.backward) if segment.loop_specs else [],
        "one_loop": segment.one_loop,
        "final": bool(segment.final),
        "stored": _tensors(position, segment.stored),
        "dropped": _tensors(position, segment.dropped),
        "barriers": bool(segment.loop_specs),
        "grids": [[loop.grid.batch, *loop.grid.spatial] for loop in plan.loops],
        "halo": plan.halo.value,
    }


def _files_recipe(position: Mapping[Node, int], files: FileBuffers, plans: Sequence[SegmentPlan]) -> Recipe:
    if files.tensors is None:
        return {"directory": files.directory, "tensors": None, "rows": []}
    tensors = _tensors(position, (tensor for tensor in files.tensors if tensor.node in position))
    rows = [number for number, plan in enumerate(plans) if not files.tensors.isdisjoint(_saved_rows(plan))]
    return {"directory": files.directory, "tensors": tensors, "rows": rows}


def _saved_rows(plan: SegmentPlan) -> set[Tensor]:
    """Return the tensors with the rows that the loops of a segment save for each other."""
    return {save.saved for loop in plan.loops for save in loop.saves}


def _files_from(traced: TracedStep, recipe: Recipe, plans: Sequence[SegmentPlan]) -> FileBuffers:
    if recipe["tensors"] is None:
        return FileBuffers(recipe["directory"], traced.batch)
    order = traced.analysis.order
    tensors = {order[index].out(output) for index, output in recipe["tensors"]}
    tensors.update(*(_saved_rows(plans[number]) for number in recipe["rows"]))
    return FileBuffers(recipe["directory"], traced.batch, frozenset(tensors))


def _tensors(position: Mapping[Node, int], tensors: Iterable[Tensor]) -> list[list[int]]:
    return sorted([position[tensor.node], tensor.index] for tensor in tensors)


def plan_from(traced: TracedStep, recipe: Recipe) -> BudgetPlan | None:
    """Return the plan of a recipe for a step; `None` if the recipe is for another step or version."""
    if recipe.get("format") != FORMAT or recipe.get("step") != step_key(traced):
        return None
    backward_ops: set[Node] = set()
    plans = []
    barriers = Barriers(traced)
    for item in recipe["segments"]:
        try:
            is_chain = not item["barriers"]
            plan = _chain_plan(traced, item, backward_ops) if is_chain else _barrier_plan(traced, item)
        except NotTileableError:
            return None
        backward_ops.update(plan.segment.backward)
        plans.append(plan)
    swaps = None if recipe["swaps"] is None else SwapParams(**recipe["swaps"])
    has_barriers = bool(traced.analysis.backward) and barriers.present
    left = barriers.left if has_barriers else find_components(traced.analysis)[1]
    files = None if recipe["files"] is None else _files_from(traced, recipe["files"], plans)
    return BudgetPlan(plans, left, swaps, files, MemoryOrder(recipe["order"]), recipe["why"], recipe["advice"])


def _grids(item: Recipe) -> list[Grid]:
    return [Grid(batch, tuple(spatial)) for batch, *spatial in item["grids"]]


def _barrier_plan(traced: TracedStep, item: Recipe) -> SegmentPlan:
    order = traced.analysis.order
    allowed = {order[index] for index in (*item["ops"], *item["backward"])}
    stored, dropped = (frozenset(order[index].out(n) for index, n in item[key]) for key in ("stored", "dropped"))
    segment = Barriers(traced, allowed).segment_storing(item["name"], stored, dropped)
    return TiledLoops(LoopEstimates(traced), segment, halo=Halo(item["halo"])).planned(_grids(item))


def _chain_plan(traced: TracedStep, item: Recipe, backward_ops: set[Node]) -> SegmentPlan:
    order = traced.analysis.order
    ops = {order[index] for index in item["ops"]}
    stored = frozenset(order[index].out(output) for index, output in item["stored"])
    segment = build_segment(traced.analysis, item["name"], ops, backward_ops)
    segment = dataclasses.replace(segment, stored=stored, one_loop=item["one_loop"])
    halo = Halo(item["halo"])
    segment = with_final_sums(traced.analysis, segment) if item["final"] else segment
    forward, *others = _grids(item)
    return plan_segment(traced.analysis, segment, forward, others[-1] if others else None, halo)
