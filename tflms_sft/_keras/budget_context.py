"""`budget`: a context manager for `train_on_batch` and hand-written loops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tflms_sft._keras.messages import peak_line
from tflms_sft._keras.rewriting_callback import checked_shape, checked_verbose, say, started
from tflms_sft._keras.train_step_patch import StepPatch
from tflms_sft._params.request import parse_request
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._params.tile_params import AUTO, AutoParams
from tflms_sft._report.plan import Plan


@contextlib.contextmanager
def budget(
    model: Any,
    memory_budget: Any = AUTO,
    *,
    headroom: float = 0.1,
    swap: bool | SwapParams = True,
    batch_shape: Sequence[int] | None = None,
    verbose: int = 1,
) -> Iterator[StepPatch]:
    """Rewrite a model's train step for `train_on_batch` and hand-written loops over `model.train_step`.

    Args:
        model: A compiled Keras model with weights.
        memory_budget: Most bytes alive on the device at any moment of a step: an int, a string such as `"8GiB"`, or
            `"auto"`, the default, as in `MemoryBudget`.
        headroom: Part of the budget that the prediction leaves free. Defaults to 0.1.
        swap: Whether activations may be swapped, or `LMSParams`. Defaults to `True`.
        batch_shape: `(batch, height, width, channels)` of the largest batch. Defaults to `None`: that of the first.
        verbose: 0 prints nothing. Defaults to 1.

    Yields:
        An object whose `plan` is set after the first step.

    Raises:
        BudgetError: In the first step, if no plan fits.
        RewriteError: For a model that cannot be rewritten.
        TypeError: For a value of the wrong type.
        ValueError: For a wrong value, and if something else rewrites the model at the time.

    Example:
    >>> with tflms_sft.budget(model, "2GiB"):
    ...     for images, labels in data:
    ...         model.train_on_batch(images, labels)
    """
    installation: StepPatch
    verbose = checked_verbose(verbose)

    def planned(plan: Plan) -> None:
        if verbose:
            say(started(installation, plan))

    def measured(plan: Plan) -> None:
        if verbose:
            say(peak_line(plan, planned_again=installation.planned_again))

    params = parse_request(AutoParams(memory_budget, headroom, swap))
    report = say if verbose else None
    shape = checked_shape(batch_shape)
    installation = StepPatch(model, params, shape, planned, measured, owner="`budget`", say=report)
    installation.install()
    try:
        yield installation
    finally:
        installation.restore()
