"""How a memory budget is met: tiles, swaps, or both.

The rule, of which the plan repeats the part that applied:

1. A step that fits as it is is left as it is.
2. Tiles, if some fit that take at most `MOST_TILED` times the work.
3. Otherwise swaps, if they fit: the fewest tensors, fetched as early as there is room.
4. Otherwise tiles, whatever they take.
5. Otherwise as few tiles as will do together with swaps of what they leave.
6. Otherwise what needs least, small tensors swapped too.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from rewriters.errors import BudgetError
from rewriters.ft import LeftAlone
from rewriters.memory import Peak
from rewriters.sft import SegmentPlan
from tflms_sft._barriers import Barriers, BarrierSearch
from tflms_sft._compile import Candidate, Traced, predict, unsupported_layers
from tflms_sft._lms_params import LMSParams
from tflms_sft._params import AutoParams
from tflms_sft._search import TileSearch
from tflms_sft._text import shortened
from tflms_sft._tuning import Swaps
from tflms_sft._units import format_bytes

MOST_TILED = 1.5
"""Work, over that of the plain step, above which swaps are tried before tiles."""

TOGETHER = (4.0, 2.8, 2.0, 1.4, 1.0)
"""Parts of the budget that tiles alone may need, swaps taking the rest: from few tiles to many."""

SMALLEST_SWAP, LARGEST_SWAP = 2**16, 2**20
"""Tensors below are never worth a transfer; above always."""

MOST_NAMES = 6
"""Layers after which the list in an error is cut short."""


BOTH = "tiles and swaps, because neither fit alone"


class Search(Protocol):
    """Finds tiles.

    Attributes:
        left: What cannot be tiled.
    """

    left: list[LeftAlone]

    @property
    def smallest(self) -> Candidate:
        """The plan with the lowest peak that is found."""

    def cheapest(self, limit: int) -> Candidate | None:
        """The plan with the least work found whose step stays below `limit` bytes."""

    def proposed(self, target: int) -> Candidate | None:
        """What is proposed for a target, whether its step meets it or not."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What to do with a step.

    Attributes:
        plans: Segments to tile.
        left: What cannot be tiled.
        swaps: What to swap then, if anything.
        why: The part of the rule that applied.
    """

    plans: list[SegmentPlan]
    left: list[LeftAlone]
    swaps: LMSParams | None = None
    why: str = ""


def choose(traced: Traced, params: AutoParams) -> Choice:
    """Tiles and swaps by the rule.

    Raises:
        BudgetError: If nothing fits; it names the smallest budget that can be met and the largest tensor then.
    """
    limit = int(params.memory_budget * (1 - params.headroom))
    barriers = Barriers(traced)
    search: Search = BarrierSearch(traced, barriers) if barriers.present else TileSearch(traced)
    if predict(traced, [])[0].peak_bytes <= limit:
        return Choice([], search.left)
    tiles = search.cheapest(limit)
    if tiles is not None and (tiles.time_ratio <= MOST_TILED or params.swap is False):
        return Choice(tiles.plans, search.left)
    found = None if params.swap is False else _swapped(traced, search, swaps_within(params), tiles, limit)
    if found is not None:
        return found
    if tiles is not None:
        return Choice(tiles.plans, search.left, why="tiles, because swaps do not fit")
    found = None if params.swap is False else _least(traced, search, params, limit)
    if found is not None:
        return found
    raise _too_small(traced, params, search)


def swaps_within(params: AutoParams, least: bool = False) -> LMSParams:
    """What may be swapped for a budget: small tensors only if it is small, or where the `least` memory is wanted."""
    if isinstance(params.swap, LMSParams):
        return params.swap
    smallest = SMALLEST_SWAP if least else max(SMALLEST_SWAP, min(LARGEST_SWAP, params.memory_budget // 256))
    return LMSParams(ctrld_strategy="direct_order", fuse_swapins=True, max_in_flight=1, min_bytes=smallest)


def _swapped(
    traced: Traced, search: Search, wanted: LMSParams, tiles: Candidate | None, limit: int
) -> Choice | None:
    """Swaps alone, or if need be with tiles; `None` if tiles alone are better or nothing fits."""
    alone = Swaps(traced, [], wanted).tuned(limit)
    if alone is not None:
        costs = "" if tiles is None else f", because tiles would take {tiles.time_ratio:.2f} times the work"
        return Choice([], search.left, alone, f"swaps{costs or ', because no tiles fit'}")
    if tiles is not None:
        return None
    for part in TOGETHER:
        candidate = search.proposed(int(part * limit))
        if candidate is not None and candidate.plans:
            rest = Swaps(traced, candidate.plans, wanted).tuned(limit)
            if rest is not None:
                return Choice(candidate.plans, search.left, rest, BOTH)
    return None


def _least(traced: Traced, search: Search, params: AutoParams, limit: int) -> Choice | None:
    """The plans of `_smallest`: whatever it tells is the smallest budget has to be met, and any above."""
    for plans in ([], search.smallest.plans):
        found = Swaps(traced, plans, swaps_within(params, least=True)).tuned(limit)
        if found is not None:
            return Choice(plans, search.left, found, BOTH if plans else "swaps, because no tiles fit")
    return None


def _too_small(traced: Traced, params: AutoParams, search: Search) -> BudgetError:
    peak = _smallest(traced, params, search)
    smallest = int(peak.peak_bytes / (1 - params.headroom)) + 1
    name, size = peak.largest[0] if peak.largest else ("the variables", traced.fixed_bytes)
    layers = unsupported_layers(traced, search.left)
    stuck = f" Left as they are: {shortened(layers, MOST_NAMES)}." if layers else ""
    error = BudgetError(
        "`memory_budget` is too small for this step. Received: memory_budget="
        f"{format_bytes(params.memory_budget)} ({params.memory_budget} bytes). The smallest plan found needs "
        f"{format_bytes(smallest)} ({smallest} bytes, headroom of {params.headroom:.0%} included), of which `{name}` "
        f"is {format_bytes(size)} and variables are {format_bytes(traced.fixed_bytes)}. Raise the budget, or shrink "
        f"the batch or the image.{stuck}"
    )
    error.smallest_bytes = smallest
    error.tensor = name
    return error


def _smallest(traced: Traced, params: AutoParams, search: Search) -> Peak:
    """The lowest peak of tiles, of swaps, and of both."""
    peaks = [search.smallest.peak]
    if params.swap is not False:
        for plans in ([], search.smallest.plans):
            found = Swaps(traced, plans, swaps_within(params, least=True)).smallest()
            peaks.extend([] if found is None else [found[1]])
    return min(peaks, key=lambda peak: peak.peak_bytes)
