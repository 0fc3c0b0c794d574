"""How a memory budget is met: tiles, swaps, or both, whichever is predicted to be fastest.

A step that fits as it is is left as it is. Otherwise the candidates are tiles alone, swaps
alone, and, where none of these fits or all would take more than `MOST_ALONE` times as
long, tiles together with swaps of what they leave. If nothing fits, what needs least is
tried, small tensors swapped too.

Each of these finds with a larger budget nothing that is slower, and so does the fastest of
them; no plan counts as faster than the step as it was.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Protocol

from rewriters.device.peak_memory import Peak
from rewriters.emission.tile_pass import SegmentPlan
from rewriters.errors import BudgetError
from rewriters.tiling.ft_segments import SkippedOps
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._planner.barrier_search import Barriers, BarrierSearch
from tflms_sft._planner.inference_search import ForwardSearch
from tflms_sft._planner.swap_search import SwapSearch
from tflms_sft._planner.tile_search import TileSearch
from tflms_sft._planner.traced_step import Candidate, TracedStep, at_peak, unsupported_layers
from tflms_sft._report.summary import transient_memory
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.text import shortened

MOST_ALONE = 1.5
"""Time, over that of the plain step, above which tiles and swaps together are tried."""

TOGETHER = (0.7, 0.5, 0.35, 0.25, 0.17, 0.12)
"""Parts of the plain step's peak that tiles alone may need, swaps taking the rest: from few tiles to many."""

SMALLEST_SWAP, LARGEST_SWAP = 2**16, 2**20
"""Tensors below are never worth a transfer; above always."""

SLOW = 2.0
"""Time, over that of the plain step, above which a plan says what larger budgets would give."""

MORE = ((1.25, "a quarter more"), (2.0, "twice as much"))
"""Those budgets, over the one that is given; the second only if the step is slow with the first as well."""

FASTER_BY = 0.9
"""Time, over that of the plan for less memory, that is worth to be told."""

MOST_NAMES = 6
"""Layers after which the list in an error is cut short."""


BOTH = "tiles and swaps, because neither fit alone"
LESS = "a larger budget is faster: less is swapped"
FASTER = "tiles and swaps, because either alone would take longer"
NO_SWAPS = "nothing is swapped: without a backward phase nothing waits for one"


class TilingSearch(Protocol):
    """Finds tiles.

    Attributes:
        left: What cannot be tiled.
    """

    left: list[SkippedOps]

    @property
    def smallest(self) -> Candidate:
        """The plan with the lowest peak that is found."""

    def cheapest(self, limit: int) -> Candidate | None:
        """The plan with the least work found whose step stays below `limit` bytes."""

    def proposed(self, target: int) -> Candidate | None:
        """What is proposed for a target, whether its step meets it or not."""


@dataclasses.dataclass(frozen=True)
class BudgetPlan:
    """What to do with a step.

    Attributes:
        plans: Segments to tile.
        left: What cannot be tiled.
        swaps: What to swap then, if anything.
        why: The part of the rule that applied.
        more: What larger budgets would give, if it is slow.
    """

    plans: list[SegmentPlan]
    left: list[SkippedOps]
    swaps: SwapParams | None = None
    why: str = ""
    more: str = ""


@dataclasses.dataclass(frozen=True)
class FeasiblePlan:
    """A choice that fits.

    Attributes:
        choice: What to do.
        seconds: Time of the step.
        peak_bytes: Its peak.
    """

    choice: BudgetPlan
    seconds: float
    peak_bytes: int


def plans_within_budget(traced: TracedStep, params: AutoParams, advise: bool = False) -> Iterator[BudgetPlan]:
    """What fits, the fastest first: there are others if that cannot be carried out.

    Tiles with swaps are weighed by an outline of the tiled graph, which may have tensors to swap where the graph itself
    has none.

    Args:
        traced: A step.
        params: The budget.
        advise: Whether to look, for one that is slow, for what larger budgets would give.

    Raises:
        BudgetError: After the last one; it names the smallest budget that can be met and what takes most then.
    """
    why = ""
    if not traced.analysis.backward:
        why = NO_SWAPS if isinstance(params.swap, SwapParams) else ""
        params = dataclasses.replace(params, swap=False)
    search = _search(traced)
    for found in itertools.chain(_fitting(traced, search, params), _least(traced, search, params)):
        more = _larger_budgets(traced, search, params, found) if advise else ""
        yield dataclasses.replace(found.choice, why=found.choice.why or why, more=more)
        if found.choice.swaps is not None:  # There is nothing to swap after all.
            params = dataclasses.replace(params, swap=False)
    raise _too_small(traced, params, search)


def _larger_budgets(traced: TracedStep, search: TilingSearch, params: AutoParams, option: FeasiblePlan) -> str:
    """How long a step would take at most with more memory; empty if it is not slow, or would be as slow.

    Near the smallest budget that can be met a little more memory is worth much. Tiles alone are looked for, of which
    the search has made most already: swaps would take several times as long to find, and are taken where they are
    faster.
    """
    told: list[str] = []
    seconds = option.seconds
    for factor, words in MORE:
        if seconds <= SLOW * traced.seconds:
            break
        limit = limit_of(traced, dataclasses.replace(params, memory_budget=int(factor * params.memory_budget)))
        tiles = traced.plain if traced.plain.peak.peak_bytes <= limit else search.cheapest(limit)
        if tiles is not None and tiles.time_ratio * traced.seconds <= FASTER_BY * seconds:
            seconds = max(tiles.time_ratio, 1.0) * traced.seconds
            ratio = f"{seconds / traced.seconds:.2f}x"
            told.append(f"{words} {ratio}" if told else f"{words} takes {ratio} the time or less")
    if told:
        return f"a larger budget is much faster: {', '.join(told)}"
    return LESS if seconds > SLOW * traced.seconds and option.choice.swaps is not None else ""


def limit_of(traced: TracedStep, params: AutoParams) -> int:
    """Most that a predicted peak may be."""
    return int(params.memory_budget * (1 - params.headroom) / traced.correction)


def _fitting(traced: TracedStep, search: TilingSearch, params: AutoParams) -> list[FeasiblePlan]:
    """What fits of the step as it is, tiles, swaps, and both, the fastest first."""
    limit, plain = limit_of(traced, params), traced.plain.peak.peak_bytes
    if plain <= limit:
        return [FeasiblePlan(BudgetPlan([], search.left), traced.seconds, plain)]
    options = []
    tiles = search.cheapest(limit)
    if tiles is not None:
        seconds = tiles.time_ratio * traced.seconds
        options.append(FeasiblePlan(BudgetPlan(tiles.plans, search.left), seconds, tiles.peak.peak_bytes))
    if params.swap is not False:
        options += _swapped(traced, search, swaps_within(params), tiles, plain, limit)
    return sorted(options, key=lambda option: (max(option.seconds, traced.seconds), option.peak_bytes))


def _search(traced: TracedStep) -> TilingSearch:
    """What finds tiles for a step."""
    if not traced.analysis.backward:
        return ForwardSearch(traced)
    barriers = Barriers(traced)
    return BarrierSearch(traced, barriers) if barriers.present else TileSearch(traced)


def swaps_within(params: AutoParams, least: bool = False) -> SwapParams:
    """What may be swapped for a budget: small tensors only if it is small, or where the `least` memory is wanted."""
    if isinstance(params.swap, SwapParams):
        return params.swap
    smallest = SMALLEST_SWAP if least else max(SMALLEST_SWAP, min(LARGEST_SWAP, params.memory_budget // 256))
    return SwapParams(ctrld_strategy="direct_order", fuse_swapins=True, max_in_flight=1, min_bytes=smallest)


def _swapped(
    traced: TracedStep, search: TilingSearch, wanted: SwapParams, tiles: Candidate | None, plain: int, limit: int
) -> list[FeasiblePlan]:
    """Swaps alone, and with tiles if they are worth trying."""
    tiled = math.inf if tiles is None else max(tiles.time_ratio, 1.0) * traced.seconds
    # What is over the limit has to leave and come back at least.
    if tiled <= traced.rates.swapped(traced.seconds, plain - limit, plain - limit, to_disk=False):
        return []
    options = []
    swaps = SwapSearch(traced, [], wanted)
    alone = swaps.tuned(limit)
    if alone is not None and swaps.has_room(alone):
        why = "no tiles fit" if tiles is None else f"tiles would take {tiled / traced.seconds:.2f} times as long"
        seconds = swaps.seconds(alone, traced.seconds)
        options.append(FeasiblePlan(BudgetPlan([], search.left, alone, f"swaps, because {why}"), seconds, limit))
    fastest = min([tiled, *(option.seconds for option in options)])
    if fastest > MOST_ALONE * traced.seconds:
        why = BOTH if fastest == math.inf else FASTER
        targets = [part * plain for part in TOGETHER if part * plain > limit]
        options += _together(traced, search, wanted, why, [*targets, limit], limit)
    return [option for option in options if option.seconds < tiled]


def _together(
    traced: TracedStep, search: TilingSearch, wanted: SwapParams, why: str, targets: Iterable[float], limit: int
) -> Iterator[FeasiblePlan]:
    """Tiles that need more than there is, and swaps."""
    for target in targets:
        candidate = search.proposed(int(target))
        if candidate is not None and candidate.plans:
            swaps = SwapSearch(traced, candidate.plans, wanted)
            rest = swaps.tuned(limit)
            if rest is not None and swaps.has_room(rest):
                seconds = swaps.seconds(rest, candidate.time_ratio * traced.seconds)
                yield FeasiblePlan(BudgetPlan(candidate.plans, search.left, rest, why), seconds, limit)


def _least(traced: TracedStep, search: TilingSearch, params: AutoParams) -> Iterator[FeasiblePlan]:
    """The plans of `_smallest`: whatever it tells is the smallest budget has to be met, and any above."""
    if params.swap is False:
        return
    limit = limit_of(traced, params)
    for candidate in (traced.plain, search.smallest):
        swaps = SwapSearch(traced, candidate.plans, swaps_within(params, least=True))
        found = swaps.tuned(limit)
        if found is not None:
            why = BOTH if candidate.plans else "swaps, because no tiles fit"
            seconds = swaps.seconds(found, candidate.time_ratio * traced.seconds)
            yield FeasiblePlan(BudgetPlan(candidate.plans, search.left, found, why), seconds, limit)


def _too_small(traced: TracedStep, params: AutoParams, search: TilingSearch) -> BudgetError:
    peak, plans = _smallest(traced, params, search)
    smallest = int(peak.peak_bytes * traced.correction / (1 - params.headroom)) + 1
    corrected = ""
    if traced.correction != 1:
        corrected = (
            f" An earlier plan was measured to take {traced.correction:.2f} times what was predicted. "
            + fragmentation_hint(traced.correction, int(params.memory_budget), peak.peak_bytes)
        )
    parts, name = takes_most(traced, plans, peak)
    layers = unsupported_layers(traced, search.left)
    stuck = f" Left as they are: {shortened(layers, MOST_NAMES)}." if layers else ""
    error = BudgetError(
        "`memory_budget` is too small for this step. Received: memory_budget="
        f"{format_bytes(params.memory_budget)} ({params.memory_budget} bytes). The smallest plan found needs "
        f"{format_bytes(smallest)} ({smallest} bytes, headroom of {params.headroom:.0%} included), of which {parts} "
        f"and variables are {format_bytes(traced.fixed_bytes)}. Raise the budget, or shrink the batch or the "
        f"image.{corrected}{stuck}"
    )
    error.smallest_bytes = smallest
    error.tensor = name
    return error


def fragmentation_hint(off: float, budget: int, least: int = 0) -> str:
    """Why a step may take more than was predicted, and what to do.

    Args:
        off: What it was measured to take, over what was predicted.
        budget: Bytes.
        least: What is predicted of the plan that needs least, if that is known.
    """
    text = (
        "In a process that has trained before, and be it a training that was interrupted, memory is in more pieces: "
        "train in a fresh process"
    )
    if least * off > budget:
        return f"{text}; no plan is so small that more `headroom` would do."
    headroom = min(math.ceil((1 - 1 / off) * 100) / 100, 0.99)
    return f"{text}, or leave more of the budget free, such as `headroom={headroom:g}`."


def takes_most(traced: TracedStep, plans: list[SegmentPlan], peak: Peak) -> tuple[str, str]:
    """What takes most at a peak, for an error, and the name of the largest tensor.

    What is taken only while something runs is told if no tensor is as large: then that sets the peak.
    """
    tensors, own = at_peak(traced, plans, peak)
    name, size = tensors[0] if tensors else ("the variables", traced.fixed_bytes)
    running = [f"{format_bytes(taken)} are {what}, " for what, taken in transient_memory(own) if taken > size]
    return f"{''.join(running)}`{name}` is {format_bytes(size)}", name


def _smallest(traced: TracedStep, params: AutoParams, search: TilingSearch) -> tuple[Peak, list[SegmentPlan]]:
    """The lowest peak of tiles, of swaps, and of both, and the tiles."""
    peaks = [(search.smallest.peak, search.smallest.plans)]
    if params.swap is not False:
        for plans in ([], search.smallest.plans):
            found = SwapSearch(traced, plans, swaps_within(params, least=True)).smallest()
            peaks.extend([] if found is None else [(found[1], plans)])
    return min(peaks, key=lambda one: one[0].peak_bytes)
