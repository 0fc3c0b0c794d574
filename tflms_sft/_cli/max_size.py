"""`tflms-sft max-input` and `max-batch`: predict the largest image, longest sequence or largest batch within a budget.

Both search twice: for the plain step and for the rewritten step.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rewriters.errors import BudgetError
from tflms_sft._cli import model_loading, step_options
from tflms_sft._cli.exit_status import NOT_MET, OK, Outcome, Progress, UsageError, table
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._report.plan import Plan
from tflms_sft._util.bisection import extrapolated, largest
from tflms_sft._util.byte_sizes import format_bytes

__all__: list[str] = []

FIRST_SIZE = 128
"""Height and width, in pixels, of the first image tried for a model without a fixed size."""

MAX_DOUBLINGS = 4
"""Number of times that the first size is doubled if a model cannot be built for it."""


class SizeAxis(Protocol):
    """The quantity that a search varies: the batch size, or the size of images.

    Attributes:
        unit: Divisor of all sizes.
        power: Exponent of the size with which memory grows approximately.
        first: Size to start with.
    """

    unit: int
    power: int
    first: int

    def step(self, size: int) -> step_options.PlannableStep:
        """Trace the step for a size."""

    def shown(self, size: int) -> str:
        """Return a size as text."""


class BatchSizes:
    """The batch size, in examples."""

    power = 1

    def __init__(self, options: argparse.Namespace, model: Any, why: str) -> None:
        self.unit = self.first = options.multiple_of
        self._context = (options, model, why)
        fixed = [tensor.shape[0] for tensor in getattr(model, "inputs", None) or () if tensor.shape[0] is not None]
        if fixed:
            raise UsageError(
                f"max-batch needs a model with a free batch size. Received: model {model.name!r}, whose batch size is "
                f"fixed at {fixed[0]}."
            )

    def step(self, size: int) -> step_options.PlannableStep:
        options, model, why = self._context
        return step_options.trace(model, why, step_options.input_specs(model, options.input_shape, size), options)

    def shown(self, size: int) -> str:
        return f"batch {size}"


class SideLengths:
    """The common length of the spatial axes of an image (height, width, depth) in pixels, or of a sequence in steps."""

    def __init__(self, options: argparse.Namespace, model: Any, why: str) -> None:
        self.unit = options.multiple_of
        self._context = (options, model, why)
        self._shape, self._is_free = _image_shape(model, options.input_shape)
        self._axes = _varied_axes(self._shape)
        self.power = len(self._axes)
        fixed = [self._shape[axis] for axis in self._axes if self._shape[axis] is not None]
        self.first = -(-(min(fixed) if fixed else FIRST_SIZE) // self.unit) * self.unit

    def step(self, size: int) -> step_options.PlannableStep:
        options, model, why = self._context
        shape = tuple(size if axis in self._axes else length for axis, length in enumerate(self._shape))
        if not self._is_free and shape != self._shape:
            model = model_loading.resized(model, shape)
        return step_options.trace(model, why, step_options.input_specs(model, [(None, shape)], options.batch), options)

    def shown(self, size: int) -> str:
        return "x".join(str(size if axis in self._axes else length) for axis, length in enumerate(self._shape))


def _varied_axes(shape: Sequence[int | None]) -> tuple[int, ...]:
    """Return the axes of an example whose length varies; that of a sequence of tokens is its only one."""
    return (0,) if len(shape) == 1 else model_loading.spatial_axes(len(shape))


def _image_shape(model: Any, given: Sequence[tuple[str | None, tuple[int, ...]]]) -> tuple[tuple[Any, ...], bool]:
    """Return the shape of one image, and whether the model accepts images of any size."""
    inputs = list(getattr(model, "inputs", None) or ())
    if len(inputs) > 1:
        raise UsageError(
            f"max-input needs a model with one input. Received: model {model.name!r} with {len(inputs)} inputs. Try "
            "single sizes with `tflms-sft plan --input-shape NAME=...`."
        )
    if inputs:
        shape, free = tuple(inputs[0].shape[1:]), None in inputs[0].shape[1:]
        axes = _varied_axes(shape)
        if given and len(given[0][1]) == len(shape):  # The number of channels may be open as well.
            template = given[0][1]
            shape = tuple(
                template[axis] if length is None and axis not in axes else length for axis, length in enumerate(shape)
            )
    else:
        if len(given) != 1:
            raise UsageError(
                f"Model {model.name!r} does not declare its input. Give one --input-shape, such as 64,64,3."
            )
        shape, free = given[0][1], True
    is_of_tokens = len(shape) == 1 and bool(inputs) and "int" in str(inputs[0].dtype)
    if len(shape) not in (2, 3, 4) and not is_of_tokens:
        raise UsageError(
            f"max-input needs a model of tokens (integers), sequences, images or volumes. Received: model "
            f"{model.name!r}, whose examples have {len(shape)} axes."
        )
    if any(size is None for axis, size in enumerate(shape) if axis not in _varied_axes(shape)):
        raise UsageError(
            f"Model {model.name!r} does not fix its number of channels. Give any --input-shape, such as 64,64,3."
        )
    return shape, free


@dataclasses.dataclass(frozen=True)
class LargestSize:
    """The largest size that fits.

    Attributes:
        size: Batch size, or pixels along each axis; 0 if no size fits.
        shown: The size as text.
        peak_bytes: Predicted peak.
        time_ratio: Predicted time over that of the plain step.
        how: Headline of the plan.
        is_limit: Whether `--max-size` excluded larger sizes.
    """

    size: int
    shown: str
    peak_bytes: int | None = None
    time_ratio: float | None = None
    how: str = ""
    is_limit: bool = False


class SizeSearch:
    """Searches for the largest size with and without rewriting.

    Methods count sizes in units, as `count`.

    Attributes:
        params: The budget. The first traced step resolves `"auto"` for the whole search.
        assumed: Assumptions of the latest traced step.
    """

    def __init__(self, axis: SizeAxis, params: AutoParams, *, options: argparse.Namespace, progress: Progress) -> None:
        self._axis = axis
        self.params = params
        self._within = options.within
        self._max_count = options.max_size // axis.unit
        self._progress = progress
        self._latest: tuple[int, step_options.PlannableStep] | None = None
        self._plain_peaks: dict[int, int] = {}
        self._plans: dict[int, Plan | None] = {}
        self._smallest: dict[int, int] = {}
        self._fixed_bytes = 0
        self.assumed: step_options.Assumed | None = None

    @property
    def limit(self) -> int:
        """Largest allowed prediction, in bytes."""
        return int(self.params.memory_budget * (1 - self.params.headroom))

    def plain(self) -> LargestSize:
        """Return the largest size of the plain step."""
        first = self._first()
        low, high = (first, 2 * first) if 2 * first <= self._max_count else (max(first // 2, 1), first)
        guess = high if low == high else extrapolated(self._plain_peak, self.limit, low, high, self._axis.power)
        count = largest(lambda n: self._plain_peak(n) <= self.limit, guess, self._within, self._max_count)
        return self._result(count, self._plain_peaks.get(count), 1.0, "original step")

    def rewritten(self, plain: LargestSize) -> LargestSize:
        """Return the largest size with tiles and swaps, which is at least that of the plain step."""
        low = plain.size // self._axis.unit
        guess = self._guess(min(max(2 * low, self._first()), self._max_count))
        count = largest(lambda n: n <= low or self._plan(n) is not None, guess, self._within, self._max_count)
        plan = self._plan(count) if count else None
        if plan is None:
            return self._result(0, None, None, "")
        return self._result(count, plan.predicted.peak_bytes, plan.predicted.time_ratio, plan.headline())

    def _guess(self, count: int) -> int:
        """Return a first guess, extrapolated from the memory that a size above the largest needs at least."""
        while self._plan(count) is not None and count < self._max_count:
            count = min(2 * count, self._max_count)
        needed = self._smallest.get(count, 0)
        fixed = self._fixed_bytes
        if needed <= fixed or self.limit <= fixed:
            return count
        return max(int(count * ((self.limit - fixed) / (needed - fixed)) ** (1 / self._axis.power)), 1)

    def _first(self) -> int:
        """Return a size for which the model can be built."""
        count = min(self._axis.first // self._axis.unit, self._max_count)
        for _ in range(MAX_DOUBLINGS):
            try:
                self._plain_peak(count)
                return count
            except UsageError:
                if 2 * count > self._max_count:
                    raise
                count *= 2
        self._plain_peak(count)
        return count

    def _plain_peak(self, count: int) -> int:
        """Return the predicted peak of the plain step in bytes."""
        count = min(count, self._max_count)
        if count not in self._plain_peaks:
            size = count * self._axis.unit
            step = self._step(count)
            self._plain_peaks[count] = step.plain_bytes
            self._progress.say(f"{self._axis.shown(size)}, original: {format_bytes(step.plain_bytes)} (worst case)")
        return self._plain_peaks[count]

    def _plan(self, count: int) -> Plan | None:
        """Return a plan within the budget, or `None` if there is none."""
        if count not in self._plans:
            shown = self._axis.shown(count * self._axis.unit)
            try:
                plan = self._plans[count] = self._step(count).plan(self.params, self._progress, advise=False)
                self._progress.say(f"{shown}, rewritten: {format_bytes(plan.predicted.peak_bytes)}")
            except BudgetError as error:
                self._plans[count] = None
                self._smallest[count] = int(error.smallest_bytes * (1 - self.params.headroom))
                self._progress.say(f"{shown}, rewritten: too large, needs {format_bytes(error.smallest_bytes)}")
        return self._plans[count]

    def _step(self, count: int) -> step_options.PlannableStep:
        if self._latest is None or self._latest[0] != count:
            self._latest = None
            gc.collect()  # The previous graph has reference cycles, and is as large as the next graph.
            self._latest = count, self._axis.step(count * self._axis.unit)
            self._fixed_bytes = self._latest[1].traced.fixed_bytes
            self.params = self.params.resolved(self._fixed_bytes)
            self.assumed = self._latest[1].assumed
        return self._latest[1]

    def _result(self, count: int, peak: int | None, ratio: float | None, how: str) -> LargestSize:
        size = count * self._axis.unit
        shown = self._axis.shown(size) if size else "none fits"
        return LargestSize(size, shown, peak if size else None, ratio if size else None, how, count == self._max_count)


def execute(options: argparse.Namespace) -> Outcome:
    """Search for the largest size.

    Raises:
        RewriteError: If the step cannot be rewritten at any size.
        UsageError: For wrong arguments.
    """
    step_options.budget_params(options)  # Refuses a wrong budget before the model is built.
    progress = Progress(options.quiet)
    with progress.doing(f"building {options.model}"):
        model, why = step_options.load(options)
        if options.command == "max-batch":
            model = step_options.of_given_size(model, options.input_shape)
    axis: Callable[..., SizeAxis] = SideLengths if options.command == "max-input" else BatchSizes
    search = SizeSearch(
        axis(options, model, why), step_options.budget_params(options), options=options, progress=progress
    )
    with progress.doing("searching for the largest size, original step"):
        plain = search.plain()
    with progress.doing("searching for the largest size, rewritten step"):
        rewritten = search.rewritten(plain)
    assert search.assumed is not None
    params = search.params
    results = {"plain": plain, "rewritten": rewritten}
    data = {
        "command": options.command,
        "budget_bytes": params.memory_budget,
        "headroom": params.headroom,
        "within": options.within,
        "assumed": dataclasses.asdict(search.assumed),
        **{name: dataclasses.asdict(result) for name, result in results.items()},
    }
    text = _text(options, params, search.assumed, results)
    return Outcome(text, data, OK if rewritten.size else NOT_MET)


def _text(
    options: argparse.Namespace, params: AutoParams, assumed: step_options.Assumed, results: dict[str, LargestSize]
) -> str:
    rows = [["", "largest", "worst-case peak", "time (1 = original)", ""]]
    for name, result in zip(("original", "rewritten"), results.values(), strict=True):
        peak = "" if result.peak_bytes is None else format_bytes(result.peak_bytes)
        time = "" if result.time_ratio is None else f"{result.time_ratio:.2f}x"
        rows.append([name, result.shown, peak, time, "limited by --max-size" if result.is_limit else ""])
    thing = "input" if options.command == "max-input" else "batch"
    multiples = f", multiples of {options.multiple_of} (--multiple-of)" if options.multiple_of > 1 else ""
    lines = [
        f"Model {assumed.model!r}: {assumed.num_weights:,} weights, {assumed.optimizer}, {assumed.loss}",
        f"Largest {thing} within {format_bytes(params.memory_budget)} with a headroom of {params.headroom:.0%}; "
        f"predicted on {assumed.device}, at most {options.within:.0%} too small{multiples}",
        table(rows),
    ]
    if results["rewritten"].how:
        lines.append(f"rewritten: {results['rewritten'].how}")
    return "\n".join(lines)
