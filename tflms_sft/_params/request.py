"""The request that a user's parameter objects make: tiles, swaps, a pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rewriters.errors import RewriteError
from tflms_sft._params.pipeline_params import PipelineParams
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._params.tile_params import AUTO, AutoParams, SFTParams
from tflms_sft._util.byte_sizes import format_bytes


@dataclasses.dataclass(frozen=True)
class RewriteRequest:
    """What to do with a step: tiles before swaps, both inside of the stages of a pipeline."""

    tiles: SFTParams | AutoParams | None = None
    swaps: SwapParams | None = None
    pipeline: PipelineParams | None = None

    @property
    def has_budget(self) -> bool:
        """Whether the plan holds for one size of the batch."""
        return isinstance(self.tiles, AutoParams)

    def aim(self) -> str:
        """What is going on while a plan is made."""
        if isinstance(self.tiles, AutoParams):
            budget = self.tiles.memory_budget
            return f"planning for a budget of {'what is free' if budget == AUTO else format_bytes(budget)}"
        if self.pipeline is not None:
            return "planning a pipeline"
        return "planning swaps" if self.tiles is None else "planning tiles"

    def without_swaps(self, why: str) -> RewriteRequest:
        """The same with tiles alone.

        Raises:
            RewriteError: If swaps are asked for.
        """
        auto = isinstance(self.tiles, AutoParams)
        if self.swaps is not None or (auto and isinstance(self.tiles.swap, SwapParams)):  # type: ignore[union-attr]
            raise RewriteError(f"{why}, between which nothing can be swapped yet. Ask for tiles alone: `SFT`.")
        return RewriteRequest(dataclasses.replace(self.tiles, swap=False)) if auto else self  # type: ignore[type-var]


def parse_request(params: Any) -> RewriteRequest:
    """The parameter objects of a list.

    Raises:
        TypeError: For anything else.
        ValueError: For an order that makes no sense.
    """
    items: Sequence[Any] = params if isinstance(params, (list, tuple)) else [params]
    tiles = [item for item in items if isinstance(item, (SFTParams, AutoParams))]
    swaps = [item for item in items if isinstance(item, SwapParams)]
    pipelines = [item for item in items if isinstance(item, PipelineParams)]
    known = len(tiles) + len(swaps) + len(pipelines)
    if not items or known < len(items) or max(len(tiles), len(swaps), len(pipelines)) > 1:
        budgets = [item for item in items if isinstance(item, (str, int))]
        hint = f" For a budget: `AutoParams({budgets[0]!r})`." if budgets else ""
        raise TypeError(
            "`params` must be `SFTParams(...)`, `AutoParams(...)`, `LMSParams(...)` or `PipelineParams(...)`, or a "
            "list of one of the first two, `LMSParams(...)` and `PipelineParams(...)`, each at most once. "
            f"Received: params={params!r}.{hint}"
        )
    if pipelines and tiles and isinstance(tiles[0], AutoParams):
        raise ValueError(
            "`params` has a budget and a pipeline: what each device may hold is not searched for yet. Say which tiles "
            "the stages run in (`SFTParams`), and what they swap (`LMSParams`), until the plan's `peak_bytes` fit. "
            f"Received: params={params!r}."
        )
    if tiles and swaps and items.index(swaps[0]) < items.index(tiles[0]):
        raise ValueError(
            "`params` tiles first and then swaps what is left between the segments; swapped tensors cannot be tiled. "
            f"Give `LMSParams` last. Received: params={params!r}."
        )
    if tiles and swaps and isinstance(tiles[0], AutoParams):
        if tiles[0].swap is not True:
            raise ValueError(f"`params` tells twice what may be swapped: leave out `swap=`. Received: {params!r}.")
        return RewriteRequest(dataclasses.replace(tiles[0], swap=swaps[0]))
    return RewriteRequest(tiles[0] if tiles else None, swaps[0] if swaps else None, pipelines[0] if pipelines else None)
