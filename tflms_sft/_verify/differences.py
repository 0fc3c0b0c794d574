"""How far a rewritten step is from its original: what `verify` tells."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tflms_sft._report.plan import Plan
from tflms_sft._util.text import shortened

FLOOR = 1e-3
"""Some gradients are zero in exact arithmetic; below this size differences are absolute."""

EXPECTED = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Relative differences that rounding explains in each type, from thousands of random networks (`make fuzz`)."""

COARSE = 0.05
"""Above it a mistake might pass as rounding, and the summary says so."""

OUTPUT, GRADIENT, VARIABLE = "output", "gradient", "variable"
KINDS = (OUTPUT, GRADIENT, VARIABLE)

_MOST_NAMES = 3


def difference(got: Any, want: Any, floor: float = FLOOR) -> float:
    """`max|got - want| / max(max|want|, floor)`; anything else that differs is infinitely wrong."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    if not _is_number(got.dtype) or not got.size:
        return 0.0 if np.array_equal(got, want) else math.inf
    got, want = got.astype(np.float64), want.astype(np.float64)
    worst = float(np.max(np.abs(got - want)) / max(float(np.max(np.abs(want))), floor))
    return worst if math.isfinite(worst) else math.inf


def _is_number(dtype: Any) -> bool:
    """Whether differences can be taken; bfloat16 is of a kind of its own in NumPy."""
    return dtype.kind in "fiu" or dtype.name in EXPECTED


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one tensor of the rewritten step is from that of the original.

    Attributes:
        kind: `"output"`, `"gradient"` or `"variable"`.
        name: Of the result, of the variable (that a gradient is for), or of the tensor.
        relative: `max|a - b| / max(max|b|, floor)`; infinite where something is not finite, and for another shape.
        noise: The same between two runs of the original, the second with its weights off by one rounding; for
            variables also with the gradients of the rewritten step.
        limit: Most that rounding explains: what the type is expected to give in a step of this size, or ten times the
            noise.
    """

    kind: str
    name: str
    relative: float
    noise: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether rounding explains it."""
        return math.isfinite(self.relative) and self.relative <= self.limit


def badness(found: Difference) -> tuple[bool, float]:
    """Largest for what rounding does not explain."""
    return not found.ok, found.relative


@dataclasses.dataclass(frozen=True, eq=False)
class Verification:
    """What `verify` found. It is true if something was rewritten, and everything is the same to rounding.

    Attributes:
        differences: Of every tensor that was compared.
        dtype: The coarsest type that images are computed in.
        steps: Steps that were run.
        plan: Of the rewritten step.
        not_compared: (gradient, why) of those that are no tensor of both graphs.
        random_ops: Operations that draw other numbers in every run, whatever the state.
    """

    differences: tuple[Difference, ...]
    dtype: str
    steps: int
    plan: Plan
    not_compared: tuple[tuple[str, str], ...] = ()
    random_ops: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether rounding explains every difference; not where nothing was rewritten, which shows nothing."""
        return self.plan.changed and not self.drowned and all(found.ok for found in self.differences)

    def __bool__(self) -> bool:
        """As `ok`, so that `assert tflms_sft.verify(...)` does what it says."""
        return self.ok

    @property
    def drowned(self) -> Difference | None:
        """The worst of what a step that draws anew moves so much that a mistake might pass as that."""
        coarse = (found for found in self.differences if self.random_ops and found.ok and found.limit > COARSE)
        return max(coarse, key=lambda found: found.noise, default=None)

    @property
    def outputs(self) -> Difference | None:
        """The worst of the results, such as the loss; `None` if the step returns nothing."""
        return self._worst(OUTPUT)

    @property
    def gradients(self) -> Difference | None:
        """The worst of the gradients; `None` if none could be compared."""
        return self._worst(GRADIENT)

    @property
    def variables(self) -> Difference | None:
        """The worst of the weights, optimizer slots, statistics, metrics and seeds; `None` without any."""
        return self._worst(VARIABLE)

    @property
    def sensitive(self) -> Difference | None:
        """The gradient that rounding moves most, if a mistake in it might pass as rounding."""
        coarse = (found for found in self.differences if found.kind == GRADIENT and found.ok and found.limit > COARSE)
        return max(coarse, key=lambda found: found.noise, default=None)

    def _worst(self, kind: str) -> Difference | None:
        """One that rounding does not explain if there is one, otherwise the largest."""
        of_kind = (found for found in self.differences if found.kind == kind)
        return max(of_kind, key=badness, default=None)

    def summary(self) -> str:
        """A report of several lines."""
        wrong = [found for found in self.differences if not found.ok]
        not_finite = any(not math.isfinite(found.noise) for found in wrong)
        if wrong and all(not math.isfinite(found.noise) for found in wrong):
            first = f"CANNOT TELL: {len(wrong)} of {len(self.differences)} tensors are not finite"
        elif wrong:
            first = f"DIFFERENT: rounding does not explain {len(wrong)} of {len(self.differences)} tensors"
        elif not self.plan.changed:
            first = "Nothing was rewritten, so that this shows nothing: ask for tiles, or for a smaller budget"
        elif self.drowned:
            first = f"CANNOT TELL: the step draws other numbers in every run, which moves {self.drowned.name} by more"
            first += f" than {COARSE:.0%}; {len(self.differences)} tensors compared"
        elif self.sensitive:
            first = f"No difference beyond rounding, which is large here: {len(self.differences)} tensors compared"
        else:
            first = f"The same, to the rounding of {self.dtype}: {len(self.differences)} tensors compared"
        lines = [f"{first}, after {self.steps} step(s)", f"  {self.plan.headline()}"]
        lines.append(f"  {'largest of':<14}{'difference':>11}{'explained':>11}{'noise':>11}   tensor")
        for kind in KINDS:
            number = sum(found.kind == kind for found in self.differences)
            found = self._worst(kind)
            if found is not None:
                numbers = "".join(f"{value:>11.1e}" for value in (found.relative, found.limit, found.noise))
                lines.append(f"  {f'{number} {kind}(s)':<14}{numbers}   {found.name}")
        lines.extend(f"  wrong: {found.kind} {found.name}: {found.relative:.1e}" for found in wrong[:_MOST_NAMES])
        if not_finite:
            lines.append("  the plain step gives numbers that are not finite, which cannot be compared: use other data")
        if self.sensitive is not None and not self.random_ops:
            lines.append(
                f"  the step itself is sensitive: with its weights off by one rounding, the gradient of "
                f"{self.sensitive.name} moves by {self.sensitive.noise:.1e}. More images in the batch, or float64, "
                "show more"
            )
        for name, reason in self.not_compared[:_MOST_NAMES]:
            lines.append(f"  not compared: the gradient {name}: {reason}")
        if len(self.not_compared) > _MOST_NAMES:
            lines.append(f"  not compared: {len(self.not_compared) - _MOST_NAMES} more (`not_compared`)")
        if self.random_ops:
            lines.append(
                f"  {shortened(self.random_ops, _MOST_NAMES)} draw(s) other numbers in every run: what depends on "
                "them is compared to within its noise only. Operations whose seed is in a variable or an argument, as "
                "those of Keras' layers, draw the same in both"
            )
        return "\n".join(lines)
