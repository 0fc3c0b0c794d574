"""`budget`: a context manager for `train_on_batch` and hand-written loops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tflms_sft._keras.rewriting_callback import checked_shape, checked_verbose, say
from tflms_sft._keras.train_step_patch import StepPatch
from tflms_sft._params.request import parse_request
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._rewrite.swap_tuning import LMSParams


@contextlib.contextmanager
def budget(
    model: Any,
    memory_budget: int | str = "auto",
    *,
    headroom: float = 0.1,
    swap: bool | LMSParams = True,
    max_slowdown: float = 10.0,
    batch_shape: Sequence[int] | None = None,
    verbose: int = 1,
) -> Iterator[StepPatch]:
    """Keep a model's train step within a memory budget inside a `with` block.

    Use it with `train_on_batch` and with hand-written loops over `model.train_step`. For `fit`, use the callback
    `MemoryBudget`. The original step is restored at the end of the block.

    Args:
        model (keras.Model): A compiled model with weights.
        memory_budget: Upper bound for the bytes alive on the device at any moment of a step, weights and optimizer
            slots included: an int, or a string such as `"8GiB"`. `"auto"`: 90 % of the memory that is free when the
            first step is planned, on the device, or on a CPU in the machine or container.
        headroom: Fraction of the budget that the prediction leaves free, from 0 to below 1.
        swap: Whether activations may be swapped to host memory or disk, or `LMSParams` that select them.
        max_slowdown: Longest time of a step, over that of the original step, that the planner accepts by prediction.
            See `MemoryBudget`.
        batch_shape: `(batch, height, width, channels)` of the largest batch; of sequences and volumes likewise.
            `None`: the shape of the first batch. See `MemoryBudget`.
        verbose: 0 prints nothing, 1 a line with the plan and one with the measured peak.

    Yields:
        An object whose attribute `plan` is the `Plan`; `None` before the first step.

    Raises:
        BudgetError: In the first step, if no plan fits.
        RewriteError: If the model cannot be rewritten.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or something else rewrites the model at the same time.

    Examples:
        >>> with tflms_sft.budget(model, "2GiB"):
        ...     for images, labels in data:
        ...         model.train_on_batch(images, labels)
    """
    verbose = checked_verbose(verbose)
    patch = StepPatch(
        model,
        parse_request(AutoParams(memory_budget, headroom, swap, max_slowdown=max_slowdown)),
        batch_shape=checked_shape(batch_shape),
        owner="`budget`",
        say=say if verbose else None,
    )
    try:
        patch.installer.install()
        yield patch
    finally:
        patch.installer.restore()
