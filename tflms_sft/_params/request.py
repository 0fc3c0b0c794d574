"""`RewriteRequest`: the parameter objects of one rewriting, in the order in which they apply."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tflms_sft._params.pipeline_params import PipelineParams
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._params.tile_params import AUTO, AutoParams, SFTParams
from tflms_sft._util.byte_sizes import format_bytes


@dataclasses.dataclass(frozen=True)
class RewriteRequest:
    """Tiles, swaps and a pipeline for a step; tiles apply before swaps, and both inside the stages of a pipeline.

    Attributes:
        tiles: Explicit tiles, a budget, or `None`.
        swaps: Explicit swaps; `None` without swaps and with a budget, whose swaps are in `tiles`.
        pipeline: The pipeline, or `None`.
    """

    tiles: SFTParams | AutoParams | None = None
    swaps: SwapParams | None = None
    pipeline: PipelineParams | None = None

    @property
    def budget(self) -> AutoParams | None:
        """The budget; the plan for it holds up to one batch size. `None` for explicit parameters."""
        return self.tiles if isinstance(self.tiles, AutoParams) else None

    def without_plan(self) -> RewriteRequest:
        """Return the request without a saved plan; the budget of that plan stays."""
        return self if self.budget is None else dataclasses.replace(self, tiles=self.budget.without_plan())

    def aim(self, *, again: bool = False) -> str:
        """Return the text of the progress line for planning, `again` if a measured peak has corrected the model."""
        if self.budget is not None:
            budget = self.budget.without_plan().memory_budget
            shown = "the free memory" if budget == AUTO else format_bytes(budget)
            return f"planning {'again with the measured peak, ' if again else ''}for a budget of {shown}"
        if self.pipeline is not None:
            return "planning a pipeline"
        return "planning swaps" if self.tiles is None else "planning tiles"


def parse_request(params: Any) -> RewriteRequest:
    """Return the request of one parameter object or a list of them.

    Raises:
        TypeError: If `params` contains anything else, or two objects of one kind.
        ValueError: If the combination or its order is not supported.
    """
    items: Sequence[Any] = params if isinstance(params, (list, tuple)) else [params]
    tiles = [item for item in items if isinstance(item, (SFTParams, AutoParams))]
    swaps = [item for item in items if isinstance(item, SwapParams)]
    pipelines = [item for item in items if isinstance(item, PipelineParams)]
    num_params = len(tiles) + len(swaps) + len(pipelines)
    if not items or num_params < len(items) or max(len(tiles), len(swaps), len(pipelines)) > 1:
        budgets = [item for item in items if isinstance(item, (str, int))]
        hint = f" For a budget: `AutoParams({budgets[0]!r})`." if budgets else ""
        raise TypeError(
            "`params` must be `SFTParams(...)`, `AutoParams(...)`, `LMSParams(...)` or `PipelineParams(...)`, or a "
            "list of one of the first two, `LMSParams(...)` and `PipelineParams(...)`, each at most once. "
            f"Received: params={params!r}.{hint}"
        )
    if pipelines and tiles and isinstance(tiles[0], AutoParams):
        raise ValueError(
            "`params` must not combine a budget with a pipeline: there is no search for a budget per device yet. Give "
            "explicit tiles (`SFTParams`) and swaps (`LMSParams`) for which the plan's `peak_bytes` fit. "
            f"Received: params={params!r}."
        )
    if tiles and swaps and items.index(swaps[0]) < items.index(tiles[0]):
        raise ValueError(
            "`params` must have `LMSParams` last: tiling comes first, because swapped tensors cannot be tiled. "
            f"Received: params={params!r}."
        )
    if tiles and swaps and isinstance(tiles[0], AutoParams):
        if tiles[0].swap is not True:
            raise ValueError(f"`params` restricts swaps twice. Omit `swap=` or `LMSParams`. Received: {params!r}.")
        return RewriteRequest(dataclasses.replace(tiles[0], swap=swaps[0]))
    return RewriteRequest(tiles[0] if tiles else None, swaps[0] if swaps else None, pipelines[0] if pipelines else None)
