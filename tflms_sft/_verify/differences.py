"""`Difference` and `Verification`: the result of `verify`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tflms_sft._report.plan import Plan
from tflms_sft._util.text import shortened

ABSOLUTE_FLOOR = 1e-3
"""Magnitude below which differences are absolute, because some gradients are zero in exact arithmetic."""

ROUNDING_LIMITS = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest relative differences due to rounding for each dtype, from thousands of random networks (`make fuzz`)."""

MAX_CONCLUSIVE_LIMIT = 0.05
"""Largest limit of a conclusive comparison; above it a wrong result could pass as rounding."""

OUTPUT, GRADIENT, VARIABLE = "output", "gradient", "variable"
KINDS = (OUTPUT, GRADIENT, VARIABLE)

_MAX_NAMES = 3


def difference(got: Any, want: Any, floor: float = ABSOLUTE_FLOOR) -> float:
    """Return `max|got - want| / max(max|want|, floor)`.

    The result is infinite if shapes, dtypes or non-numeric values differ, or a value is not finite.
    """
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    if not _is_number(got.dtype) or not got.size:
        return 0.0 if np.array_equal(got, want) else math.inf
    got, want = got.astype(np.float64), want.astype(np.float64)
    worst = float(np.max(np.abs(got - want)) / max(float(np.max(np.abs(want))), floor))
    return worst if math.isfinite(worst) else math.inf


def _is_number(dtype: Any) -> bool:
    """Tell whether values of a dtype can be subtracted; NumPy has no numeric kind for bfloat16."""
    return dtype.kind in "fiu" or dtype.name in ROUNDING_LIMITS


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between a tensor of the rewritten step and that of the original step.

    Attributes:
        kind: `"output"`, `"gradient"` or `"variable"`.
        name: Name of the result, of the variable, of the variable of a gradient, or of the tensor.
        relative: `max|a - b| / max(max|b|, floor)`; infinite if shapes differ or a value is not finite.
        noise: Relative difference between two runs of the original step: one with each weight changed by one rounding,
            for gradients also one with a scaled loss, for variables also the original update with the gradients of the
            rewritten step. The largest counts.
        limit: Largest relative difference that rounding explains: the limit of the dtype for a step of this size, or
            ten times the noise.
        ok: Whether rounding explains the difference.
    """

    kind: str
    name: str
    relative: float
    noise: float
    limit: float

    @property
    def ok(self) -> bool:
        """Tell whether rounding explains the difference."""
        return math.isfinite(self.relative) and self.relative <= self.limit


def badness(item: Difference) -> tuple[bool, float]:
    """Return a sort key that is largest for differences that rounding does not explain."""
    return not item.ok, item.relative


@dataclasses.dataclass(frozen=True, eq=False)
class Verification:
    """The result of `verify`; true if something was rewritten and rounding explains every difference.

    Attributes:
        ok: Whether something was rewritten and rounding explains every difference.
        differences: Differences of all compared tensors.
        outputs: Worst difference of the results, such as the loss; `None` if the step returns nothing.
        gradients: Worst difference of the gradients; `None` if none could be compared.
        variables: Worst difference of weights, optimizer slots, statistics, metrics and seeds; `None` without any.
        drowned: Noisiest difference of a step with random ops, if a wrong result could pass as its noise; else `None`.
        sensitive: Difference of the noisiest gradient, if a wrong result could pass as its rounding; else `None`.
        dtype: Floating dtype with the fewest digits in which images are computed, such as `"float32"`.
        steps: Number of steps that were run.
        plan: Plan of the rewritten step.
        not_compared: (gradient, reason) of gradients that are not a tensor of both graphs.
        random_ops: Names of ops that draw new random numbers in every run, regardless of the state.
    """

    differences: tuple[Difference, ...]
    dtype: str
    steps: int
    plan: Plan
    not_compared: tuple[tuple[str, str], ...] = ()
    random_ops: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Tell whether something was rewritten and rounding explains every difference."""
        return self.plan.changed and not self.drowned and all(item.ok for item in self.differences)

    def __bool__(self) -> bool:
        """Return `ok`, for `assert tflms_sft.verify(...)`."""
        return self.ok

    @property
    def drowned(self) -> Difference | None:
        """Noisiest difference of a step with random ops, if a wrong result could pass as its noise."""
        if not self.random_ops:
            return None
        inconclusive = (item for item in self.differences if item.ok and item.limit > MAX_CONCLUSIVE_LIMIT)
        return max(inconclusive, key=lambda item: item.noise, default=None)

    @property
    def outputs(self) -> Difference | None:
        """Worst difference of the results, such as the loss; `None` if the step returns nothing."""
        return self._worst(OUTPUT)

    @property
    def gradients(self) -> Difference | None:
        """Worst difference of the gradients; `None` if none could be compared."""
        return self._worst(GRADIENT)

    @property
    def variables(self) -> Difference | None:
        """Worst difference of weights, optimizer slots, statistics, metrics and seeds; `None` without any."""
        return self._worst(VARIABLE)

    @property
    def sensitive(self) -> Difference | None:
        """Difference of the noisiest gradient, if a wrong result could pass as its rounding."""
        gradients = (item for item in self.differences if item.kind == GRADIENT)
        inconclusive = (item for item in gradients if item.ok and item.limit > MAX_CONCLUSIVE_LIMIT)
        return max(inconclusive, key=lambda item: item.noise, default=None)

    def _worst(self, kind: str) -> Difference | None:
        """Return the largest difference of a kind, preferably one that rounding does not explain."""
        of_kind = (item for item in self.differences if item.kind == kind)
        return max(of_kind, key=badness, default=None)

    def summary(self) -> str:
        """Return a report of several lines: the verdict, the largest difference of each kind, and remarks."""
        lines = [f"{self._verdict()}, after {self.steps} step(s)", f"  {self.plan.headline()}"]
        lines.append(f"  {'largest of':<14}{'difference':>11}{'limit':>11}{'noise':>11}   tensor")
        for kind in KINDS:
            number = sum(item.kind == kind for item in self.differences)
            worst = self._worst(kind)
            if worst is not None:
                numbers = "".join(f"{value:>11.1e}" for value in (worst.relative, worst.limit, worst.noise))
                lines.append(f"  {f'{number} {kind}(s)':<14}{numbers}   {worst.name}")
        wrong = self._unexplained()
        lines.extend(f"  wrong: {item.kind} {item.name}: {item.relative:.1e}" for item in wrong[:_MAX_NAMES])
        if any(not math.isfinite(item.noise) for item in wrong):
            lines.append("  the original step yields values that are not finite and cannot be compared: use other data")
        return "\n".join([*lines, *self._remarks()])

    def _unexplained(self) -> list[Difference]:
        return [item for item in self.differences if not item.ok]

    def _verdict(self) -> str:
        wrong, number = self._unexplained(), len(self.differences)
        if wrong and all(not math.isfinite(item.noise) for item in wrong):
            return f"CANNOT TELL: {len(wrong)} of {number} tensors are not finite"
        if wrong:
            return f"DIFFERENT: rounding does not explain {len(wrong)} of {number} tensors"
        if not self.plan.changed:
            return "Nothing was rewritten, so nothing was verified: request tiles or a smaller budget"
        if self.drowned:
            return (
                f"CANNOT TELL: the step draws new random numbers in every run, which changes {self.drowned.name} by "
                f"more than {MAX_CONCLUSIVE_LIMIT:.0%}; {number} tensors compared"
            )
        if self.sensitive:
            return f"Equal up to rounding, which is large here: {number} tensors compared"
        return f"Equal up to {self.dtype} rounding: {number} tensors compared"

    def _remarks(self) -> list[str]:
        lines = []
        if self.sensitive is not None and not self.random_ops:
            lines.append(
                f"  the step is sensitive to rounding: if its weights change by one rounding, the gradient of "
                f"{self.sensitive.name} changes by {self.sensitive.noise:.1e}. For a stricter comparison, use more "
                "images or float64"
            )
        for name, reason in self.not_compared[:_MAX_NAMES]:
            lines.append(f"  not compared: the gradient {name}: {reason}")
        if len(self.not_compared) > _MAX_NAMES:
            lines.append(f"  not compared: {len(self.not_compared) - _MAX_NAMES} more (`not_compared`)")
        if self.random_ops:
            lines.append(
                f"  {shortened(self.random_ops, _MAX_NAMES)} draw(s) new random numbers in every run: tensors that "
                "depend on them are compared only up to their noise. Ops whose seed is a variable or an argument, such "
                "as Keras layers, draw the same numbers in both steps"
            )
        return lines
