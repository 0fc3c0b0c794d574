"""`tflms-sft max-input` and `max-batch`: the largest that fits, as it is and rewritten, by prediction."""

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
"""Rows and columns of the first image that is tried, where the model does not say."""

DOUBLINGS = 4
"""How often the first size is doubled if a model cannot be built for it."""


class Varied(Protocol):
    """What is varied: the batch, or the size of images.

    Attributes:
        unit: Sizes are multiples of it.
        power: Memory grows about with this power of the size.
        first: A size to begin with.
    """

    unit: int
    power: int
    first: int

    def step(self, size: int) -> step_options.PlannableStep:
        """The step for a size."""

    def shown(self, size: int) -> str:
        """A size in words."""


class Batches:
    """The number of examples."""

    power = 1

    def __init__(self, options: argparse.Namespace, model: Any, why: str) -> None:
        self.unit = self.first = options.multiple_of
        self._parts = (options, model, why)
        fixed = [tensor.shape[0] for tensor in getattr(model, "inputs", None) or () if tensor.shape[0] is not None]
        if fixed:
            raise UsageError(f"Model {model.name!r} is made for batches of {fixed[0]}; there is nothing to vary.")

    def step(self, size: int) -> step_options.PlannableStep:
        options, model, why = self._parts
        return step_options.trace(model, why, step_options.input_specs(model, options.input_shape, size), options)

    def shown(self, size: int) -> str:
        return f"batch {size}"


class ImageSizes:
    """Height, width and depth of an image, the same for all of them."""

    def __init__(self, options: argparse.Namespace, model: Any, why: str) -> None:
        self.unit = options.multiple_of
        self._parts = (options, model, why)
        self._own, self._free = _image_shape(model, options.input_shape)
        self._axes = model_loading.spatial_axes(len(self._own))
        self.power = len(self._axes)
        known = [self._own[axis] for axis in self._axes if self._own[axis] is not None]
        self.first = -(-(min(known) if known else FIRST_SIZE) // self.unit) * self.unit

    def step(self, size: int) -> step_options.PlannableStep:
        options, model, why = self._parts
        shape = tuple(size if axis in self._axes else own for axis, own in enumerate(self._own))
        if not self._free and shape != self._own:
            model = model_loading.resized(model, shape)
        return step_options.trace(model, why, step_options.input_specs(model, [(None, shape)], options.batch), options)

    def shown(self, size: int) -> str:
        return "x".join(str(size if axis in self._axes else own) for axis, own in enumerate(self._own))


def _image_shape(model: Any, given: Sequence[tuple[str | None, tuple[int, ...]]]) -> tuple[tuple[Any, ...], bool]:
    """Shape of one image, and whether the model takes any size."""
    inputs = list(getattr(model, "inputs", None) or ())
    if len(inputs) > 1:
        raise UsageError(
            f"Model {model.name!r} has {len(inputs)} inputs; max-input varies the size of one. Try sizes with "
            "`tflms-sft plan --input-shape NAME=...`."
        )
    if inputs:
        shape, free = tuple(inputs[0].shape[1:]), None in inputs[0].shape[1:]
        axes = model_loading.spatial_axes(len(shape))
        if given and len(given[0][1]) == len(shape):  # Where the number of channels is open as well.
            template = given[0][1]
            shape = tuple(template[axis] if own is None and axis not in axes else own for axis, own in enumerate(shape))
    else:
        if len(given) != 1:
            raise UsageError(f"Model {model.name!r} does not tell its input; give one --input-shape, such as 64,64,3.")
        shape, free = given[0][1], True
    if len(shape) not in (2, 3, 4):
        raise UsageError(f"Model {model.name!r} takes no images, but examples with {len(shape)} axes.")
    if any(size is None for axis, size in enumerate(shape) if axis not in model_loading.spatial_axes(len(shape))):
        raise UsageError(f"Model {model.name!r} leaves its channels open: give any --input-shape, such as 64,64,3.")
    return shape, free


@dataclasses.dataclass(frozen=True)
class Found:
    """The largest that fits.

    Attributes:
        size: 0 if none does.
        shown: The same in words.
        peak_bytes: Predicted.
        time_ratio: Predicted time over that of the plain step.
        how: What is done to the step.
        is_limit: Whether no larger one was tried (`--max-size`).
    """

    size: int
    shown: str
    peak_bytes: int | None = None
    time_ratio: float | None = None
    how: str = ""
    is_limit: bool = False


class SizeSearch:
    """Looks for the largest size with and without rewriting. Sizes are counted in units.

    Attributes:
        params: The budget; `"auto"` is resolved when the first step is traced, and stays that.
        assumed: What the latest step was traced for.
    """

    def __init__(self, varied: Varied, params: AutoParams, options: argparse.Namespace, progress: Progress) -> None:
        self._varied = varied
        self.params = params
        self._within = options.within
        self._most = options.max_size // varied.unit
        self._progress = progress
        self._latest: tuple[int, step_options.PlannableStep] | None = None
        self._plain: dict[int, int] = {}
        self._plans: dict[int, Plan | None] = {}
        self._smallest: dict[int, int] = {}
        self._fixed = 0
        self.assumed: step_options.Assumed | None = None

    @property
    def limit(self) -> int:
        """Bytes that a prediction may come to."""
        return int(self.params.memory_budget * (1 - self.params.headroom))

    def plain(self) -> Found:
        """Without rewriting."""
        first = self._first()
        few, more = (first, 2 * first) if 2 * first <= self._most else (max(first // 2, 1), first)
        guess = more if few == more else extrapolated(self._peak, self.limit, few, more, self._varied.power)
        number = largest(lambda n: self._peak(n) <= self.limit, guess, self._within, self._most)
        return self._found(number, self._plain.get(number), 1.0, "as it is")

    def rewritten(self, plain: Found) -> Found:
        """With tiles and swaps; what fits as it is fits then too."""
        low = plain.size // self._varied.unit
        guess = self._guess(min(max(2 * low, self._first()), self._most))
        number = largest(lambda n: n <= low or self._plan(n) is not None, guess, self._within, self._most)
        plan = self._plan(number) if number else None
        if plan is None:
            return self._found(0, None, None, "")
        return self._found(number, plan.predicted.peak_bytes, plan.predicted.time_ratio, plan.headline())

    def _guess(self, number: int) -> int:
        """About the largest, from the least memory that one that is too large needs."""
        while self._plan(number) is not None and number < self._most:
            number = min(2 * number, self._most)
        needs = self._smallest.get(number, 0)
        if needs <= self._fixed or self.limit <= self._fixed:
            return number
        return max(int(number * ((self.limit - self._fixed) / (needs - self._fixed)) ** (1 / self._varied.power)), 1)

    def _first(self) -> int:
        """A size that the model can be built for."""
        number = min(self._varied.first // self._varied.unit, self._most)
        for _ in range(DOUBLINGS):
            try:
                self._peak(number)
                return number
            except UsageError:
                if 2 * number > self._most:
                    raise
                number *= 2
        self._peak(number)
        return number

    def _peak(self, number: int) -> int:
        """Of the step as it is."""
        number = min(number, self._most)
        if number not in self._plain:
            size = number * self._varied.unit
            step = self._step(number)
            self._plain[number] = step.plain_bytes
            self._progress.say(f"{self._varied.shown(size)}, plain: {format_bytes(step.plain_bytes)} at worst")
        return self._plain[number]

    def _plan(self, number: int) -> Plan | None:
        """What is done to keep the budget; `None` if nothing does."""
        if number not in self._plans:
            shown = self._varied.shown(number * self._varied.unit)
            try:
                plan = self._plans[number] = self._step(number).plan(self.params, self._progress, advise=False)
                self._progress.say(f"{shown}, rewritten: {format_bytes(plan.predicted.peak_bytes)}")
            except BudgetError as error:
                self._plans[number] = None
                self._smallest[number] = int(error.smallest_bytes * (1 - self.params.headroom))
                self._progress.say(f"{shown}, rewritten: too large, needs {format_bytes(error.smallest_bytes)}")
        return self._plans[number]

    def _step(self, number: int) -> step_options.PlannableStep:
        if self._latest is None or self._latest[0] != number:
            self._latest = None
            gc.collect()  # The graph before is full of cycles, and as large as the next one.
            self._latest = number, self._varied.step(number * self._varied.unit)
            self._fixed = self._latest[1].traced.fixed_bytes
            self.params = self.params.resolved(self._fixed)
            self.assumed = self._latest[1].assumed
        return self._latest[1]

    def _found(self, number: int, peak: int | None, ratio: float | None, how: str) -> Found:
        size = number * self._varied.unit
        shown = self._varied.shown(size) if size else "none fits"
        return Found(size, shown, peak if size else None, ratio if size else None, how, number == self._most)


def execute(options: argparse.Namespace) -> Outcome:
    """Look for the largest size.

    Raises:
        RewriteError: If the step cannot be rewritten whatever its size.
        UsageError: For wrong arguments.
    """
    step_options.budget_params(options)  # Refused before anything is built.
    progress = Progress(options.quiet)
    with progress.doing(f"building {options.model}"):
        model, why = step_options.load(options)
        if options.command == "max-batch":
            model = step_options.of_given_size(model, options.input_shape)
    kind: Callable[..., Varied] = ImageSizes if options.command == "max-input" else Batches
    search = SizeSearch(kind(options, model, why), step_options.budget_params(options), options, progress)
    with progress.doing("looking for the largest plain step"):
        plain = search.plain()
    with progress.doing("looking for the largest rewritten step"):
        rewritten = search.rewritten(plain)
    assert search.assumed is not None
    params = search.params
    found = {"plain": plain, "rewritten": rewritten}
    data = {
        "command": options.command,
        "budget_bytes": params.memory_budget,
        "headroom": params.headroom,
        "within": options.within,
        "assumed": dataclasses.asdict(search.assumed),
        **{name: dataclasses.asdict(one) for name, one in found.items()},
    }
    text = _text(options, params, search.assumed, found)
    return Outcome(text, data, OK if rewritten.size else NOT_MET)


def _text(
    options: argparse.Namespace, params: AutoParams, assumed: step_options.Assumed, found: dict[str, Found]
) -> str:
    rows = [["", "largest", "peak at worst", "time", ""]]
    for name, one in found.items():
        peak = "" if one.peak_bytes is None else format_bytes(one.peak_bytes)
        time = "" if one.time_ratio is None else f"{one.time_ratio:.2f}x"
        rows.append([name, one.shown, peak, time, "the largest that was tried (--max-size)" if one.is_limit else ""])
    what = "image" if options.command == "max-input" else "batch"
    sizes = f" and multiples of {options.multiple_of} (--multiple-of)" if options.multiple_of > 1 else ""
    lines = [
        f"Model {assumed.model!r}: {assumed.num_weights:,} weights, {assumed.optimizer}, {assumed.loss}",
        f"Largest {what} within {format_bytes(params.memory_budget)}, of which {params.headroom:.0%} are left free; by "
        f"prediction, to {options.within:.0%}{sizes}, on {assumed.device}",
        table(rows),
    ]
    if found["rewritten"].how:
        lines.append(f"rewritten: {found['rewritten'].how}")
    return "\n".join(lines)
