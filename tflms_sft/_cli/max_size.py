"""`tflms-sft max-input` and `max-batch`: predict the largest image, longest sequence or largest batch within a budget.

Both search twice: for the original step and for the rewritten step. Memory scales with the batch size or with the area
of an image, so the next size is extrapolated from the memory of the latest one. For the rewritten step that is the
memory of the smallest plan, which is found sooner than the fastest one; only the result is planned in full.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rewriters.errors import BudgetError
from tflms_sft._cli import model_loading, step_options
from tflms_sft._cli.exit_status import NOT_MET, OK, Outcome, Progress, UsageError
from tflms_sft._cli.stop_signals import Stop, stoppable
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.text import aligned

__all__: list[str] = []

FIRST_SIZE = 128
"""Height and width, in pixels, of the first image tried for a model without a fixed size."""

FIRST_GROWTH = 4
"""First size of the rewritten step that is tried, over the largest size of the original step."""

SMALLEST = "the smallest plan; the fastest one was not searched for"
"""Description of a result whose size has not been planned in full."""

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
        plain: Largest size of the original step found so far.
        rewritten: Largest size of the rewritten step found so far.
    """

    def __init__(self, axis: SizeAxis, params: AutoParams, *, options: argparse.Namespace, progress: Progress) -> None:
        self._axis = axis
        self.params = params
        self._within = options.within
        self._max_slowdown = params.max_slowdown
        self._max_count = options.max_size // axis.unit
        self._progress = progress
        self._latest: tuple[int, step_options.PlannableStep] | None = None
        self._plain_peaks: dict[int, int] = {}
        self._fixed_bytes = 0
        self.assumed: step_options.Assumed | None = None
        self.plain = self.rewritten = self._result(0)

    @property
    def limit(self) -> int:
        """Largest allowed prediction, in bytes."""
        return int(self.params.memory_budget * (1 - self.params.headroom))

    def search_plain(self) -> None:
        """Find the largest size of the original step."""
        self._largest(lambda count: (self._plain_peak(count), self._plain_peak(count) <= self.limit), 0, self._first())

    def search_rewritten(self) -> None:
        """Find the largest size with tiles and swaps, which is at least that of the original step."""
        plain = self.plain.size // self._axis.unit
        self.rewritten = self.plain
        low = self._largest(self._try, plain, min(max(FIRST_GROWTH * plain, self._first()), self._max_count))
        while self.rewritten.how == SMALLEST and not self._plan(low):  # The disk may lack room for its swaps.
            low = max(low - max(int(self._within * low), 1), plain)
            self.rewritten = self._result(low, how=SMALLEST) if low > plain else self.plain

    def _largest(self, trial: Callable[[int], tuple[int, bool]], low: int, count: int) -> int:
        """Return a count that fits, at most `--within` below the largest one.

        Args:
            trial: Returns for a count the bytes that it needs, and whether it fits.
            low: A count that fits.
            count: The first count to try.
        """
        needs: dict[int, int] = {}
        high: int | None = None
        stride, sides = 1, (False, True)
        while low < self._max_count and (high is None or high - low > max(1, int(self._within * low))):
            needs[count], fits = trial(count)
            low, high = (count, high) if fits else (low, count)
            sides = (sides[-1], fits)
            margin = max(int(self._within * low), 1)
            if high is None:
                stride = max(2 * stride, margin)  # Estimates may be too low each time.
                count = min(max(self._estimate(needs, count, count), low + stride), self._max_count)
                continue
            is_stalled = sides[0] == sides[1] and len(needs) > 2
            estimate = (low + high) // 2 if is_stalled else self._estimate(needs, low, high, latest=count)
            count = min(max(estimate, low + max(margin // 2, 1)), high - 1)
        return low

    def _estimate(self, needs: Mapping[int, int], low: int, high: int, latest: int = 0) -> int:
        """Return the count at which a power law through the bytes of two counts meets the limit.

        Where one of them is unknown, the law is the usual one through the latest count. A count that fits but is slow
        tells nothing of bytes: then it is the middle.
        """
        if needs.get(high, 0) <= self.limit and low < high:
            return (low + high) // 2
        growing = {count: max(num_bytes - self._fixed_bytes, 1) for count, num_bytes in needs.items()}
        room, power = max(self.limit - self._fixed_bytes, 1), float(self._axis.power)
        count = latest or high
        if low in growing and high in growing and growing[low] < growing[high]:
            power, count = math.log(growing[high] / growing[low]) / math.log(high / low), low
        return int(count * (room / growing[count]) ** (1 / power))

    def _try(self, count: int) -> tuple[int, bool]:
        """Return the bytes of the smallest plan for a size, and whether the size fits and is fast enough."""
        step, shown = self._step(count), self._axis.shown(count * self._axis.unit)
        smallest = step.least_memory(self.params, self._progress)
        peak, ratio = smallest.peak.peak_bytes, max(smallest.time_ratio, 1.0)
        if peak > self.limit:
            self._progress.say(f"{shown}, rewritten: does not fit, smallest plan {format_bytes(peak)}")
            return peak, False
        if ratio > self._max_slowdown:  # Another plan may be faster.
            return peak, self._plan(count)
        self._progress.say(f"{shown}, rewritten: fits, smallest plan {format_bytes(peak)} at {ratio:.2f}x the time")
        self.rewritten = self._result(count, peak, ratio, SMALLEST)
        return peak, True

    def _plan(self, count: int) -> bool:
        """Return whether the fastest plan within the budget is fast enough, and set it as the result then."""
        shown = self._axis.shown(count * self._axis.unit)
        try:
            # A line names the time of a slow plan, instead of an error.
            params = dataclasses.replace(self.params, max_slowdown=math.inf)
            plan = self._step(count).plan(params, self._progress, advise=False)
        except BudgetError as error:
            self._progress.say(f"{shown}, rewritten: does not fit, needs {format_bytes(error.smallest_bytes)}")
            return False
        peak, ratio = plan.predicted.peak_bytes, plan.predicted.time_ratio
        is_fast = ratio <= self._max_slowdown
        verdict = "fits" if is_fast else "too slow"
        self._progress.say(f"{shown}, rewritten: {verdict}, fastest plan {format_bytes(peak)} at {ratio:.2f}x the time")
        if is_fast:
            self.rewritten = self._result(count, peak, ratio, plan.headline())
        return is_fast

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
            peak = self._plain_peaks[count] = self._step(count).plain_bytes
            fits = peak <= self.limit
            shown = f"{self._axis.shown(size)}, original: {'fits' if fits else 'does not fit'}"
            self._progress.say(f"{shown}, {format_bytes(peak)} (worst case)")
            if fits and size > self.plain.size:
                self.plain = self._result(count, peak, 1.0, "original step")
        return self._plain_peaks[count]

    def _step(self, count: int) -> step_options.PlannableStep:
        if self._latest is None or self._latest[0] != count:
            self._latest = None
            gc.collect()  # The previous graph has reference cycles, and is as large as the next graph.
            self._latest = count, self._axis.step(count * self._axis.unit)
            self._fixed_bytes = self._latest[1].traced.fixed_bytes
            self.params = self.params.resolved(self._fixed_bytes)
            self.assumed = self._latest[1].assumed
        return self._latest[1]

    def _result(self, count: int, peak: int | None = None, ratio: float | None = None, how: str = "") -> LargestSize:
        size = count * self._axis.unit
        shown = self._axis.shown(size) if size else "none fits"
        return LargestSize(size, shown, peak, ratio, how, count == self._max_count)


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
    with stoppable(options.time_limit) as stop:
        with progress.doing("searching for the largest size, original step"):
            search.search_plain()
        with progress.doing("searching for the largest size, rewritten step"):
            search.search_rewritten()
    if stop.reason:
        progress.say(stop.reason)
    results = {"plain": search.plain, "rewritten": max(search.rewritten, search.plain, key=lambda result: result.size)}
    data = {
        "command": options.command,
        "budget_bytes": search.params.memory_budget,
        "headroom": search.params.headroom,
        "within": options.within,
        "max_slowdown": search.params.max_slowdown,
        "stopped": stop.reason,
        "assumed": None if search.assumed is None else dataclasses.asdict(search.assumed),
        **{name: dataclasses.asdict(result) for name, result in results.items()},
    }
    code = OK if results["rewritten"].size else NOT_MET
    return Outcome(_text(options, search, stop, results), data, code if stop.code is None else stop.code)


def _text(options: argparse.Namespace, search: SizeSearch, stop: Stop, results: dict[str, LargestSize]) -> str:
    if search.assumed is None:
        return f"{stop.reason} before a size was tried"
    params, assumed = search.params, search.assumed
    rows = [["", "largest", "worst-case peak", "time (1 = original)", ""]]
    for name, result in zip(("original", "rewritten"), results.values(), strict=True):
        peak = "" if result.peak_bytes is None else format_bytes(result.peak_bytes)
        time = "" if result.time_ratio is None else f"{result.time_ratio:.2f}x"
        rows.append([name, result.shown, peak, time, "limited by --max-size" if result.is_limit else ""])
    thing = "input" if options.command == "max-input" else "batch"
    multiples = f", multiples of {options.multiple_of} (--multiple-of)" if options.multiple_of > 1 else ""
    precision = f"{stop.reason}, larger ones may fit" if stop.reason else f"at most {options.within:.0%} too small"
    lines = [
        f"Model {assumed.model!r}: {assumed.num_weights:,} weights, {assumed.optimizer}, {assumed.loss}",
        f"Largest {thing} within {format_bytes(params.memory_budget)} with a headroom of {params.headroom:.0%}; "
        f"predicted on {assumed.device}, {precision}{multiples}",
        *aligned(rows),
    ]
    if results["rewritten"].how:
        lines.append(f"rewritten: {results['rewritten'].how}")
    return "\n".join(lines)
