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

MAX_CONCLUSIVE_NOISE = 1e-2
"""Largest noise of a conclusive comparison; above it a wrong result could pass as rounding."""

NEAR_LIMIT_FACTOR = 3
"""Difference over its limit up to which it is inconclusive: one sample of the noise gives its order of magnitude."""

OUTPUT, GRADIENT, VARIABLE = "output", "gradient", "variable"
KINDS = (OUTPUT, GRADIENT, VARIABLE)

EQUAL, DIFFERENT, CANNOT_TELL, NOTHING_REWRITTEN = "equal", "different", "cannot tell", "nothing rewritten"

_MAX_NAMES = 3

_REMEDIES = {
    "": 'to decide, repeat in float64: call `keras.config.set_floatx("float64")` before the model is built, without '
    "casts to float32 in the model and its loss; for a step of your own, use float64 variables and arguments. A "
    "smaller image may suffice",
    "float64": "to decide, give another image, or a smaller one",
}


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
            for gradients also one with a scaled loss. The largest counts.
        limit: Largest relative difference that rounding explains: the limit of the dtype for a step of this size, or
            ten times the noise.
        ok: Whether rounding explains the difference.
        conclusive: Whether `ok` can be trusted: not where it is true at a noise above 1 %, nor where the difference
            exceeds its limit by less than a factor of three.

    Variables are compared with the update of the original step from the gradients of the rewritten step, which are
    compared themselves. If that does not explain the difference, they are compared with the original step.
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

    @property
    def conclusive(self) -> bool:
        """Tell whether `ok` tells right from wrong."""
        if not math.isfinite(self.noise):
            return False
        return self.relative > NEAR_LIMIT_FACTOR * self.limit or (self.ok and self.noise <= MAX_CONCLUSIVE_NOISE)


def badness(item: Difference) -> tuple[bool, bool, float]:
    """Return a sort key: largest for differences that rounding does not explain, then for inconclusive ones."""
    return item.conclusive and not item.ok, not item.conclusive, item.relative


@dataclasses.dataclass(frozen=True, eq=False)
class Verification:
    """The result of `verify`; true if something was rewritten and all comparisons show equal results.

    False means different, nothing rewritten, or that the comparison cannot tell; `verdict` says which.

    Attributes:
        verdict: `"equal"`, `"different"`, `"cannot tell"`, or `"nothing rewritten"`.
        ok: Whether the verdict is `"equal"`; the truth value of the object.
        differences: Differences of all compared tensors.
        outputs: Worst difference of the results, such as the loss; `None` if the step returns nothing.
        gradients: Worst difference of the gradients; `None` if none could be compared.
        variables: Worst difference of weights, optimizer slots, statistics, metrics and seeds; `None` without any.
        unclear: Differences that are not conclusive, the noisiest first.
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
        """Tell whether the verdict is `"equal"`."""
        return self.verdict == EQUAL

    def __bool__(self) -> bool:
        """Return `ok`, for `assert tflms_sft.verify(...)`."""
        return self.ok

    @property
    def verdict(self) -> str:
        """`"equal"`, `"different"`, `"cannot tell"`, or `"nothing rewritten"`."""
        if self._wrong:
            return DIFFERENT
        if not self.plan.changed:
            return NOTHING_REWRITTEN
        return CANNOT_TELL if self.unclear else EQUAL

    @property
    def unclear(self) -> tuple[Difference, ...]:
        """Differences that are not conclusive, the noisiest first."""
        unclear = (item for item in self.differences if not item.conclusive)
        return tuple(sorted(unclear, key=lambda item: item.noise, reverse=True))

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

    def _worst(self, kind: str) -> Difference | None:
        """Return the largest difference of a kind, preferably one that rounding does not explain."""
        of_kind = (item for item in self.differences if item.kind == kind)
        return max(of_kind, key=badness, default=None)

    @property
    def _wrong(self) -> list[Difference]:
        return [item for item in self.differences if item.conclusive and not item.ok]

    def summary(self) -> str:
        """Return a report of several lines: the verdict, the largest difference of each kind, and remarks."""
        lines = [f"{self._verdict_text()}, after {self.steps} step(s)", f"  {self.plan.headline()}"]
        lines.append(f"  compared with the original step: {_rewriting(self.plan)}")
        lines.append(f"  {'largest of':<14}{'difference':>11}{'limit':>11}{'noise':>11}   tensor")
        for kind in KINDS:
            number = sum(item.kind == kind for item in self.differences)
            worst = self._worst(kind)
            if worst is not None:
                lines.append(f"  {f'{number} {kind}(s)':<14}{_numbers(worst)}   {worst.name}")
        lines.extend(f"  wrong: {item.kind} {item.name}: {item.relative:.1e}" for item in self._wrong[:_MAX_NAMES])
        return "\n".join([*lines, *self._remarks()])

    def _verdict_text(self) -> str:
        number, unclear = len(self.differences), self.unclear
        if self.verdict == DIFFERENT:
            return f"DIFFERENT: rounding does not explain {len(self._wrong)} of {number} tensors"
        if self.verdict == NOTHING_REWRITTEN:
            return "Nothing was rewritten, so nothing was verified: request tiles or a smaller budget"
        if self.verdict == EQUAL:
            return f"Equal up to {self.dtype} rounding: {number} tensors compared"
        if self._has_infinite_noise:
            return f"CANNOT TELL: {len(unclear)} of {number} tensors are not finite"
        if self.random_ops:
            return (
                f"CANNOT TELL: the step draws new random numbers in every run, which changes {unclear[0].name} by "
                f"{unclear[0].noise:.1e}; {number} tensors compared"
            )
        return f"CANNOT TELL: {self.dtype} rounding could hide a wrong result in {len(unclear)} of {number} tensors"

    @property
    def _has_infinite_noise(self) -> bool:
        return any(not math.isfinite(item.noise) for item in self.differences)

    def _remarks(self) -> list[str]:
        lines = []
        if self._has_infinite_noise:
            lines.append("  the original step yields values that are not finite and cannot be compared: use other data")
        elif self.unclear and not self.random_ops:
            lines.extend(f"  unclear:      {_numbers(item)}   {item.name}" for item in self.unclear[:_MAX_NAMES])
            lines.append(f"  {_REMEDIES['float64' if self.dtype == 'float64' else '']}")
        outputs = self.outputs
        if outputs is not None and outputs.ok and outputs.relative > ROUNDING_LIMITS[self.dtype]:
            lines.append(
                f"  {outputs.name} differs by {outputs.relative:.1e}, as sums over height and width of large images do "
                f"in {self.dtype}: tiles add fewer pixels at a time, which is usually nearer to the exact value"
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


def _numbers(item: Difference) -> str:
    """Return the columns of a table: difference, limit and noise."""
    return "".join(f"{value:>11.1e}" for value in (item.relative, item.limit, item.noise))


def _rewriting(plan: Plan) -> str:
    """Return the kinds of rewriting in a plan: a comparison of swaps, for example, tests no tiles."""
    parts = [f"tiles of {len(plan.segments)} segment(s)" if plan.segments else "no tiles"]
    parts.append(f"swaps of {len(plan.swaps)} tensor(s)" if plan.swaps else "no swaps")
    if plan.pipeline is not None:
        parts.append(f"a pipeline of {len(plan.pipeline.stages)} stage(s)")
    return ", ".join(parts)
