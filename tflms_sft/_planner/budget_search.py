"""Plans within a memory budget: tiles, swaps, or both, whichever is predicted to be fastest.

A step that fits is not rewritten. Otherwise the candidates are tiles, which may have results in files, and swaps alone.
Where nothing fits yet, or all take more than `MAX_TIME_RATIO_ALONE` times as long as the original step and no results
may lie in files, more are candidates: swaps of small tensors too, and tiles together with swaps. If nothing fits, the
plan that needs least is tried.

Plans of smaller budgets for the same traced step are candidates, so that a larger budget is never slower in a process.
No plan counts as faster than the original step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator

import tensorflow as tf

from rewriters.device.peak_memory import Peak
from rewriters.emission.file_buffers import FileBuffers, reason_without_files
from rewriters.emission.tile_pass import SegmentPlan
from rewriters.errors import BudgetError
from tflms_sft._barriers.barrier_search import BarrierSearch
from tflms_sft._barriers.barriers import Barriers
from tflms_sft._machine.memory_info import device_memory_limit, device_names
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._planner.budget_plan import BudgetPlan, FeasiblePlan, TileSearch, have_room, of_tiles
from tflms_sft._planner.plan_description import reasons, takes_most
from tflms_sft._planner.swap_planner import reason_without_tier
from tflms_sft._planner.swap_search import SwapSearch
from tflms_sft._report.summary import excess_remedy, time_text
from tflms_sft._search.priced_search import PricedSearch
from tflms_sft._search.traced_step import (
    Candidate,
    TracedStep,
    least_peak,
    seconds_of,
)
from tflms_sft._util.byte_sizes import enough_bytes, format_bytes
from tflms_sft._util.text import shortened

MAX_TIME_RATIO_ALONE = 1.5
"""Time, over that of the original step, above which tiles and swaps together are tried."""

HIDDEN_SWAPS_TIME_RATIO = 1.02
"""Time of a step whose transfers are hidden by ops, over that of the original step, with a margin."""

MIN_SWAPPED_FRACTION = 0.5
"""Least bytes that swaps move each way, over the bytes above the limit; fragmentation may fall, too."""

TILE_PEAK_FRACTIONS = (0.7, 0.5, 0.35, 0.25, 0.17, 0.12)
"""Fractions of the original step's peak that tiles leave for swaps to reduce further: from few tiles to many."""

SMALLEST_SWAP, LARGEST_SWAP = 2**16, 2**20
"""Limits of `min_bytes`: smaller tensors are never worth a transfer, larger ones always."""

SLOW_TIME_RATIO = 2.0
"""Time, over that of the original step, above which a plan notes the time with larger budgets, and the smallest plan
competes.
"""

LARGER_BUDGETS = ((1.25, "a quarter more"), (2.0, "twice as much"))
"""Ratios of larger budgets to the given one, with names; the next if the step is slow with the one before."""

MAX_NOTED_TIME_RATIO = 0.9
"""Time with a larger budget, over that of the plan, that is worth a note."""

FAST_TIME_RATIO = 2.0
"""Largest time, over that of the original step, within a budget that an error suggests instead of a slow one."""

MAX_BUDGETS_TRIED, FAST_BUDGET_PRECISION = 5, 1.1
"""Limits of the search for such a budget: trials, and its ratio to one that is known to be slower."""

MAX_HELPFUL_FRACTION = 0.95
"""Smallest budget with swaps, over that without, that is worth a mention."""

HALF_PRECISION_FRACTION = 0.75
"""Assumed bytes beside variables in half precision, over those in float32, which some gradients and sums keep."""

SAFE_FRACTION = 0.85
"""Fraction of the estimated pixels that an error suggests. Scratch memory shrinks less than the image."""

MIN_HEADROOM = 0.05
"""The smallest headroom that an error suggests, because peaks vary."""

MAX_NAMES = 6
"""Layers after which the list in an error is cut short."""

BOTH = "tiles and swaps, because neither fit alone"
LESS = "a larger budget is faster: less is swapped"
FASTER = "tiles and swaps, because either alone would take longer"
NO_SWAPS = "nothing is swapped: a step without a backward pass saves no tensors"


def plans_within_budget(traced: TracedStep, params: AutoParams, advise: bool = False) -> Iterator[BudgetPlan]:
    """Yield the plans that fit, the fastest first; the next one is for a caller who cannot carry out the one before.

    That happens with tiles and swaps: they are weighed by a skeleton of the tiled graph, which may have tensors to
    swap where the graph itself has none. With `advise`, a slow plan notes the time with larger budgets.

    Raises:
        BudgetError: After the last plan, with the smallest budget that can be met and the largest tensor then. If the
            plans that fit take more than `max_slowdown` times as long as the original step, with a faster budget.
    """
    params, why = _with_possible_swaps(traced, params)
    search = _search(traced, _files_allowed(traced, params))
    least = LeastMemory(traced, search, params)
    slow: list[FeasiblePlan] = []
    for feasible in itertools.chain(
        feasible_plans(traced, search, params, least), least.within(limit_of(traced, params))
    ):
        if feasible.seconds > params.max_slowdown * traced.seconds:
            slow.append(feasible)
            continue
        advice = larger_budgets(traced, search, params, feasible) if advise else ""
        yield dataclasses.replace(feasible.plan, why=feasible.plan.why or why, advice=advice)
        if feasible.plan.swaps is not None:  # The graph has nothing to swap after all.
            params = dataclasses.replace(params, swap=False)
            least = LeastMemory(traced, search, params)
    if slow:
        raise _too_slow(traced, params, search, min(slow, key=lambda plan: plan.seconds))
    raise _too_small(traced, params, search, least)


def fitting_plans(traced: TracedStep, params: AutoParams) -> Iterator[FeasiblePlan]:
    """Yield the plans that fit, the fastest first, whatever `max_slowdown` says."""
    params, _ = _with_possible_swaps(traced, params)
    search = _search(traced, _files_allowed(traced, params))
    least = LeastMemory(traced, search, params)
    yield from feasible_plans(traced, search, params, least)
    yield from least.within(limit_of(traced, params))


def least_memory(traced: TracedStep, params: AutoParams) -> Candidate:
    """Return the plan with the lowest peak, with the swaps that `params` allow; it meets all budgets that can be met.

    This takes less time than a search.
    """
    params, _ = _with_possible_swaps(traced, params)
    return LeastMemory(traced, _search(traced, _files_allowed(traced, params)), params).smallest()


def _with_possible_swaps(traced: TracedStep, params: AutoParams) -> tuple[AutoParams, str]:
    """Return parameters without swaps if the step can swap no tensor, and the reason."""
    if not traced.analysis.backward:
        why = NO_SWAPS if isinstance(params.swap, SwapParams) else ""
    elif params.swap is True and (reason := _reason_without_swaps(traced, params)):
        why = f"nothing is swapped, because {reason}"
    else:
        return params, ""
    return dataclasses.replace(params, swap=False), why


def larger_budgets(traced: TracedStep, search: TileSearch, params: AutoParams, option: FeasiblePlan) -> str:
    """Return a note of the time with more memory; empty if the step is not slow, or would be as slow.

    Near the smallest budget that can be met a little more memory saves much time. The note is an upper bound: it
    considers tiles alone, which the search has mostly planned already, while swaps take several times as long to plan.
    """
    texts: list[str] = []
    seconds = option.seconds
    for factor, words in LARGER_BUDGETS:
        budget, memory = int(factor * params.memory_budget), device_memory_limit(traced.devices)
        if seconds <= SLOW_TIME_RATIO * traced.seconds or (memory is not None and budget > memory):
            break
        limit = limit_of(traced, dataclasses.replace(params, memory_budget=budget))
        tiles = traced.plain if traced.plain.peak.peak_bytes <= limit else search.proposed(limit)
        fits = tiles is not None and tiles.peak.peak_bytes <= limit
        if tiles is not None and fits and tiles.time_ratio * traced.seconds <= MAX_NOTED_TIME_RATIO * seconds:
            seconds = max(tiles.time_ratio, 1.0) * traced.seconds
            texts.append(f"{words} {_relative_time(seconds / traced.seconds, is_first=not texts)}")
    if texts:
        return f"a larger budget is much faster: {', '.join(texts)}"
    if option.plan.swaps is None or seconds <= SLOW_TIME_RATIO * traced.seconds:
        return ""
    # Fewer swaps save no more time than all of them take.
    return LESS if seconds_of(traced, option.plan.plans) <= MAX_NOTED_TIME_RATIO * seconds else ""


def _relative_time(ratio: float, *, is_first: bool) -> str:
    """Return a text for an upper bound of a time over that of the original step, as the first or second of a list."""
    text = f"takes at most {ratio:.2f}x the time of the original step" if is_first else f"{ratio:.2f}x"
    return "is as fast as the original step" if f"{ratio:.2f}" == "1.00" else text


def limit_of(traced: TracedStep, params: AutoParams) -> int:
    """Return the largest predicted peak, in bytes, that a budget allows."""
    return int(params.memory_budget * (1 - params.headroom)) - traced.excess_bytes


def feasible_plans(
    traced: TracedStep, search: TileSearch, params: AutoParams, least: LeastMemory
) -> list[FeasiblePlan]:
    """Return the plans that fit of the original step, tiles, swaps, and both, the fastest first."""
    limit, plain = limit_of(traced, params), traced.plain.peak.peak_bytes
    if plain <= limit:
        return [FeasiblePlan(BudgetPlan([], search.left), traced.seconds, plain)]
    if limit <= traced.fixed_bytes:
        return []
    options = []
    swap = swaps_within(traced, params)
    excess = int(MIN_SWAPPED_FRACTION * (plain - limit))
    least_swapped = math.inf
    if params.swap is not False:
        least_swapped = traced.rates.swapped(traced.seconds, excess, excess, to_disk=False)
    are_hidden = least_swapped <= HIDDEN_SWAPS_TIME_RATIO * traced.seconds  # Then tiles need not be searched.
    alone = swaps_alone(traced, swap, limit) if are_hidden else None
    swapped = math.inf if alone is None else alone.seconds
    _tell(traced, [] if alone is None else [alone])
    tiles, tiled = None, traced.seconds
    if tiled < swapped:
        tiles = _fastest_tiles(search, limit)
    if tiled < swapped and (tiles is None or not have_room(traced, tiles)):
        tiles = _fastest_tiles(search.in_memory, limit)
    if tiles is not None:
        tiled = max(tiles.time_ratio, 1.0) * traced.seconds
        options.append(of_tiles(traced, tiles, search.left))
        _tell(traced, options)
    if not are_hidden and least_swapped < (math.inf if tiles is None else tiled):
        alone = swaps_alone(traced, swap, limit)
        swapped = math.inf if alone is None else alone.seconds
    if alone is not None and (tiles is None or swapped < tiled):
        ratios = [f"{max(seconds / traced.seconds, 1.0):.2f}x" for seconds in (tiled, swapped)]
        slower = f"tiles would take {ratios[0]} the time" if len(set(ratios)) > 1 else "tiles are no faster"
        why = slower if tiles is not None or tiled >= swapped else "no tiles fit"
        plan = dataclasses.replace(alone.plan, left=search.left, why=f"swaps, because {why}")
        options.append(dataclasses.replace(alone, plan=plan))
    slow = MAX_TIME_RATIO_ALONE * traced.seconds
    if not options:
        options += least.swaps_alone(limit)
    _tell(traced, options)
    fastest = min((option.seconds for option in options), default=math.inf)
    decides_on_files = search.in_memory is not search
    if params.swap is not False and fastest > (math.inf if decides_on_files and options else slow):
        options += _together(traced, search.in_memory, swap, limit, fastest)
    earlier: list[FeasiblePlan] = traced.once(f"plans {params.swap}", list)  # Those of smaller budgets fit as well.
    fitting = [one for one in earlier if one.peak_bytes <= limit and have_room(traced, one.plan)]
    earlier += [one for one in options if one not in earlier]
    options += [one for one in fitting if one not in options]
    return sorted(options, key=lambda option: (max(option.seconds, traced.seconds), option.peak_bytes))


def _fastest_tiles(search: TileSearch, limit: int) -> Candidate | None:
    """Return the fastest tile plan found within a limit; the smallest plan competes with a slow one.

    An error names the budget and the time of the smallest plan, so that no slower plan may be chosen for that budget.
    """
    tiles = search.fastest_within(limit)
    is_slow = tiles is None or tiles.time_ratio > SLOW_TIME_RATIO
    if is_slow and search.smallest.peak.peak_bytes <= limit:
        tiles = search.fastest_within(limit)  # Plans that a search has modelled for the smallest one count.
    return tiles


def _files_allowed(traced: TracedStep, params: AutoParams) -> FileBuffers | None:
    """Return the rule for results of loops in files; `None` if none may be written, or no tensor is large enough."""
    swap = swaps_within(traced, params)
    if params.swap is False or not swap.page_cache or reason_without_files(swap.directory, traced.device):
        return None
    files = FileBuffers(swap.directory, traced.batch)
    results = (node.out(index) for node in traced.analysis.order for index in range(len(node.outputs)))
    return files if any(map(files.holds, results)) else None


def _tell(traced: TracedStep, plans: Iterable[FeasiblePlan]) -> None:
    """Tell the listener of the step about plans that fit."""
    for plan in plans:
        if traced.found is not None:
            traced.found(plan.seconds / traced.seconds)


def _search(traced: TracedStep, files: FileBuffers | None = None) -> TileSearch:
    """Return the search for tile plans of a step, with the estimates of earlier searches for it.

    A search that decides on files may use those of the rule `files`.
    """

    def begin() -> TileSearch:
        if traced.analysis.backward:
            barriers = traced.once("barriers", lambda: Barriers(traced))
            if barriers.present:
                return BarrierSearch(dataclasses.replace(traced, files=files), barriers)
        return PricedSearch(dataclasses.replace(traced, files=files))

    return traced.once(f"search {files}", begin)


def swaps_within(traced: TracedStep, params: AutoParams, least: bool = False) -> SwapParams:
    """Return the swaps that a budget allows: of small tensors only if it is small, or if `least` memory is wanted."""
    if isinstance(params.swap, SwapParams):
        return params.swap
    min_bytes = SMALLEST_SWAP if least else max(SMALLEST_SWAP, min(LARGEST_SWAP, params.memory_budget // 256))
    in_flight = None if traced.device.is_gpu else 1  # Beside a GPU the search chooses the number of swap-outs.
    return SwapParams(ctrld_strategy="direct_order", fuse_swapins=True, min_bytes=min_bytes, max_in_flight=in_flight)


def _reason_without_swaps(traced: TracedStep, params: AutoParams) -> str:
    """Return why a budget can swap no tensor; empty if it can swap some."""
    return reason_without_tier(swaps_within(traced, params), traced.device)


def swaps_alone(traced: TracedStep, swap: SwapParams, limit: int) -> FeasiblePlan | None:
    """Return the plan with swaps alone, if one fits."""
    swaps = SwapSearch(traced, [], swap)
    alone = swaps.tuned(limit)
    if alone is None or not swaps.has_room(alone):
        return None
    return FeasiblePlan(BudgetPlan([], [], alone), swaps.seconds(alone, traced.seconds), swaps.peak_bytes(alone))


def _together(
    traced: TracedStep, search: TileSearch, swap: SwapParams, limit: int, fastest: float
) -> Iterator[FeasiblePlan]:
    """Yield plans of tiles that need more than the limit, and swaps that reduce them to it.

    Planning swaps takes long. So tiles are skipped with which no swaps fit, and those that are estimated to take
    `fastest` seconds or more where only their excess over the limit leaves and comes back.
    """
    plain, why = traced.plain.peak.peak_bytes, BOTH if fastest == math.inf else FASTER
    tried: set[tuple[float, int]] = set()
    for target in (*(fraction * plain for fraction in TILE_PEAK_FRACTIONS if fraction * plain > limit), limit):
        tiles = search.proposed(int(target))
        if tiles is None or not tiles.plans or (tiles.time_ratio, tiles.peak.peak_bytes) in tried:
            continue
        tried.add((tiles.time_ratio, tiles.peak.peak_bytes))
        seconds, excess = tiles.time_ratio * traced.seconds, max(tiles.peak.peak_bytes - limit, 0)
        if traced.rates.swapped(seconds, excess, excess, to_disk=False) >= fastest:
            continue
        if least_peak(traced, tiles.plans) > limit:
            continue
        swaps = SwapSearch(traced, tiles.plans, swap)
        tuned = swaps.tuned(limit)
        if tuned is not None and swaps.has_room(tuned):
            seconds = swaps.seconds(tuned, seconds)
            if seconds < fastest:
                fastest = seconds
                both = FeasiblePlan(
                    BudgetPlan(tiles.plans, search.left, tuned, why=why), seconds, swaps.peak_bytes(tuned)
                )
                _tell(traced, [both])
                yield both


class LeastMemory:
    """The plans that need least: the smallest tiles, in memory and in files, and swaps of small tensors too."""

    def __init__(self, traced: TracedStep, search: TileSearch, params: AutoParams) -> None:
        self._traced = traced
        self._search = search
        self._params = params

    def _swapped(self) -> Iterator[tuple[Candidate, SwapSearch]]:
        """Yield plans of tiles with the search for their swaps, each planned when it is needed."""
        if self._params.swap is False:
            return
        yield self._traced.plain, self._untiled
        if self._search.in_memory.smallest.plans:
            yield self._search.in_memory.smallest, self._tiled

    @property
    def _tiles(self) -> Candidate:
        """The smallest tiles, with results in files if the disk has room for these."""
        tiles = self._search.smallest
        return tiles if have_room(self._traced, tiles) else self._search.in_memory.smallest

    @functools.cached_property
    def _untiled(self) -> SwapSearch:
        return self._swap_search([])

    @functools.cached_property
    def _tiled(self) -> SwapSearch:
        return self._swap_search(self._search.in_memory.smallest.plans)

    def _swap_search(self, plans: list[SegmentPlan]) -> SwapSearch:
        return SwapSearch(self._traced, plans, swaps_within(self._traced, self._params, least=True))

    def swaps_alone(self, limit: int) -> list[FeasiblePlan]:
        """Return the plan with swaps of small tensors, too, and without tiles, if it fits and they have room."""
        if self._params.swap is False:
            return []
        plans = self._with_swaps(self._traced.plain, self._untiled, limit)
        return [plan for plan in plans if plan.plan.swaps is not None and self._untiled.has_room(plan.plan.swaps)]

    def within(self, limit: int) -> Iterator[FeasiblePlan]:
        """Yield the plans that fit, so that the smallest budget that an error names can be met, and any above."""
        tiles = self._tiles
        if tiles.plans and tiles.peak.peak_bytes <= limit:
            yield of_tiles(self._traced, tiles, self._search.left)
        for candidate, swaps in self._swapped():
            yield from self._with_swaps(candidate, swaps, limit)

    def _with_swaps(self, candidate: Candidate, swaps: SwapSearch, limit: int) -> list[FeasiblePlan]:
        """Return the plan with tiles and swaps, if it fits."""
        tuned = swaps.tuned(limit)
        if tuned is None:
            return []
        why = BOTH if candidate.plans else "swaps, because no tiles fit"
        seconds = swaps.seconds(tuned, candidate.time_ratio * self._traced.seconds)
        plan = BudgetPlan(candidate.plans, self._search.left, tuned, why=why)
        return [FeasiblePlan(plan, seconds, swaps.peak_bytes(tuned))]

    def smallest(self) -> Candidate:
        """Return the plan with the lowest peak of tiles, of swaps, and of both; its time includes transfers."""
        smallest, original_seconds = self._tiles, self._traced.seconds
        for candidate, swaps in self._swapped():
            if swaps.smallest is not None and swaps.smallest[1].peak_bytes < smallest.peak.peak_bytes:
                count, peak = swaps.smallest
                params = dataclasses.replace(swaps.params, n_tensors=count)
                seconds = swaps.seconds(params, candidate.time_ratio * original_seconds)
                smallest = Candidate(candidate.plans, peak, seconds / original_seconds)
        return smallest


def _too_small(traced: TracedStep, params: AutoParams, search: TileSearch, least: LeastMemory) -> BudgetError:
    plan, subject = least.smallest(), "The smallest plan found"
    smallest = _smallest_budget(traced, params, plan.peak)
    corrected = ""
    if traced.excess_bytes > 0:
        corrected = f" An earlier plan took {format_bytes(traced.excess_bytes)} more than predicted."
        budget, is_used = int(params.memory_budget), traced.in_used_process
        remedy = excess_remedy(traced.excess_bytes, budget, plan.peak.peak_bytes, is_used=is_used)
        corrected += f" {remedy}".rstrip()
    original = _smallest_budget(dataclasses.replace(traced, excess_bytes=0), params, traced.plain.peak)
    if params.memory_budget < original < smallest:  # What a plan took more than predicted, the original step may not.
        plan, smallest, subject = traced.plain, original, "The original step"
    parts, name = takes_most(traced, plan.plans, plan.peak)
    limited = ""
    if params.memory_budget == device_memory_limit(traced.devices):
        limited = f", all that TensorFlow allocates on {device_names(traced.devices)}"
    layers = [f"{name}: {reason}" for name, reason in reasons(traced, search.left)]
    untiled = f" Not tiled: {shortened(layers, MAX_NAMES, '; ')}." if layers else ""
    error = BudgetError(
        "`memory_budget` is too small for this step. Received: memory_budget="
        f"{format_bytes(params.memory_budget)} ({params.memory_budget} bytes{limited}). {subject} needs "
        f"{format_bytes(smallest)} ({smallest} bytes, headroom of {params.headroom:.0%} included), of which {parts} "
        f"and variables are {format_bytes(traced.fixed_bytes)}.{untiled}{corrected} "
        f"{_remedy(traced, params, search, smallest, plan)}"
    )
    error.smallest_bytes = smallest
    error.tensor = name
    return error


def _too_slow(traced: TracedStep, params: AutoParams, search: TileSearch, plan: FeasiblePlan) -> BudgetError:
    """Return the error for a step whose plans all take longer than `max_slowdown` allows; `plan` is the fastest."""
    ratio = plan.seconds / traced.seconds
    budget, faster = _fast_budget(dataclasses.replace(traced, found=None), params, search)
    memory = device_memory_limit(traced.devices)
    larger = f'memory_budget="{enough_bytes(budget)}", which takes {faster:.2f} times as long, or '
    error = BudgetError(
        "`memory_budget` makes this step slow. Received: memory_budget="
        f"{format_bytes(params.memory_budget)} ({params.memory_budget} bytes), within which the fastest plan is "
        f"predicted to take {ratio:.3g} times as long as the original step, with a peak of "
        f"{format_bytes(plan.peak_bytes)}. "
        f"Expected: at most max_slowdown={params.max_slowdown:g}. Pass {'' if memory and budget > memory else larger}"
        f"`max_slowdown={math.ceil(ratio * 1.01)}` to train with this plan."
    )
    error.smallest_bytes = budget
    error.tensor = takes_most(traced, [], traced.plain.peak)[1]
    return error


def _fast_budget(traced: TracedStep, params: AutoParams, search: TileSearch) -> tuple[int, float]:
    """Return a small budget within which a step takes at most `FAST_TIME_RATIO` times as long, and its ratio.

    Bisects geometrically between the given budget, which is too small, and the one that the original step needs.
    """
    slow, fast, ratio = params.memory_budget, _smallest_budget(traced, params, traced.plain.peak), 1.0
    for _ in range(MAX_BUDGETS_TRIED):
        if fast <= FAST_BUDGET_PRECISION * slow:
            break
        budget = int(math.sqrt(slow * fast))
        larger = dataclasses.replace(params, memory_budget=budget)
        plans = feasible_plans(traced, search, larger, LeastMemory(traced, search, larger))
        if plans and plans[0].seconds <= min(FAST_TIME_RATIO, params.max_slowdown) * traced.seconds:
            fast, ratio = budget, max(plans[0].seconds / traced.seconds, 1.0)
        else:
            slow = budget
    return fast, ratio


def _smallest_budget(traced: TracedStep, params: AutoParams, peak: Peak) -> int:
    """Return the smallest budget whose limit allows a peak."""
    return int((peak.peak_bytes + traced.excess_bytes) / (1 - params.headroom)) + 1


def _remedy(traced: TracedStep, params: AutoParams, search: TileSearch, smallest: int, plan: Candidate) -> str:
    """Return what would help a budget that is too small, with estimates.

    `plan` is the plan that needs least, and `smallest` the budget that it needs.

    All bytes but those of variables are taken to be proportional to the batch size, to the pixels of an image, and to
    the bytes of a number.
    """
    budget, fixed = params.memory_budget, traced.fixed_bytes
    larger = f'Pass memory_budget="{enough_bytes(smallest)}" or more ({time_text(plan.time_ratio)})'
    if plan.time_ratio > params.max_slowdown:
        larger += f" with `max_slowdown={math.ceil(1.01 * plan.time_ratio)}`"
    memory = device_memory_limit(traced.devices)
    if memory is not None and smallest > memory:
        larger = f"TensorFlow allocates {format_bytes(memory)} on {device_names(traced.devices)}: use more memory"
    headroom = math.floor(100 * (1 - (plan.peak.peak_bytes + traced.excess_bytes) / budget)) / 100
    # After a step above its prediction more headroom is the remedy.
    if traced.excess_bytes <= 0 and headroom >= MIN_HEADROOM:
        larger += f", or `headroom={headroom:g}` with the same budget"
    if params.swap is False and traced.analysis.backward and not _reason_without_swaps(traced, params):
        peak = LeastMemory(traced, search, dataclasses.replace(params, swap=True)).smallest().peak
        with_swaps = _smallest_budget(traced, params, peak)
        if with_swaps <= MAX_HELPFUL_FRACTION * smallest:
            larger += f", or allow swaps: `swap=True` needs {enough_bytes(with_swaps)}"
    if fixed >= budget:
        return f"{larger}: weights and optimizer slots alone are {format_bytes(fixed)}."
    fraction = (budget - fixed) / max(smallest - fixed, 1)
    images = int(traced.batch * fraction)
    half = ""
    if fraction >= HALF_PRECISION_FRACTION and not _is_mixed(traced):
        policy = "mixed_float16" if traced.device.is_gpu else "mixed_bfloat16"
        half = f' Or build the model with `keras.config.set_dtype_policy("{policy}")`: it may fit, too.'
    if images:
        return f"{larger}, or shrink the batch: {images} instead of {traced.batch} is estimated to fit.{half}"
    shrunk = "the image" if traced.batch == 1 else "the batch and the image"
    pixels = f"one image with {SAFE_FRACTION * traced.batch * fraction:.0%} of the pixels is estimated to fit"
    return f"{larger}, or shrink {shrunk}: {pixels}.{half}"


def _is_mixed(traced: TracedStep) -> bool:
    """Return whether a step has tensors of half precision already."""
    nodes = traced.analysis.graph.nodes.values()
    return any(dtype in (tf.float16, tf.bfloat16) for node in nodes for dtype, _ in node.outputs)
