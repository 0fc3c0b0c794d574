"""Predicted and measured peaks and times of plans for eight networks under three budgets each.

    python -m benchmarks.planner [--runs 2] [--peaks 3] [--cases NAME ...] [--parts 4/5 3/5 ...] [--json planner.json]

A budget is a part of what the plain step is predicted to need: 4/5, 3/5 and 2/5, for the U-Nets 1/2, whose volumes at
the highest resolution leave no less where the plain step unfolds nothing (with oneDNN). Every run is a process of its
own: it plans, trains some steps, the plain and the rewritten one in turns, so that a drift of the machine meets both
alike, and measures the peaks of some more (`tflms_sft.measure`). The time of a plan is the median over all pairs of
steps.

Three questions are put to every plan. Is the largest measured peak within the budget? Is the median within 10 % of the
predicted peak? Is the ratio of the median times within 15 % of the predicted one? The exit code is 0 if all plans keep
the first, 11 of 12 the second, and 5 of 6 the third.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _nets, _results

MIB = 2**20

NEAR_PEAK, NEAR_TIME = 0.10, 0.15
"""How far a median may be from what was predicted."""

ENOUGH_PEAKS, ENOUGH_TIMES = 11 / 12, 5 / 6
"""Parts of the plans that have to be near."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A network and its training data.

    Attributes:
        name: In the table, and on the command line.
        task: The network.
        image_size: Height, width and depth.
        batch: Images of a batch.
        parts: Budgets, over what the plain step needs.
    """

    name: str
    task: _nets.Task
    image_size: int
    batch: int
    parts: tuple[str, ...] = ("4/5", "3/5", "2/5")


def _of(name: str, image_size: int, batch: int) -> Case:
    return Case(name, _nets.TASKS[name], image_size, batch)


def _unet(name: str, image_size: int) -> Case:
    return dataclasses.replace(_of(name, image_size, 1), parts=("4/5", "3/5", "1/2"))


def _application(name: str, image_size: int, batch: int) -> Case:
    build = functools.partial(_nets.application, name)
    task = _nets.Task(name, build, 2, 3, False, image_size=image_size, batch=batch)
    return Case(name, task, image_size, batch)


CASES = {
    case.name: case
    for case in (
        _of("vgg16", 640, 1),
        _of("darknet19", 1024, 1),
        _of("resnet50", 320, 4),
        _application("MobileNetV2", 256, 4),
        _application("DenseNet121", 224, 2),
        _application("Xception", 320, 2),
        _unet("unet3d-dice", 64),
        _unet("unet3d", 48),
    )
}


# ----------------------------------------------------------------------------------------------------------
# In the child.


def examine(*, case: str, budget: int, steps: int, peaks: int, emit: _child.Emit) -> dict[str, Any]:
    """Plans for a budget in bytes, trains, and returns what was promised and what was measured."""
    del emit
    import tensorflow as tf

    import tflms_sft

    chosen = CASES[case]
    step = chosen.task.step(chosen.image_size, chosen.batch)
    batch = tuple(map(tf.constant, chosen.task.noise(chosen.image_size, chosen.batch)))
    step.get_concrete_function()  # Tracing is no part of planning.
    began = time.perf_counter()
    changed = tflms_sft.rewrite(step, tflms_sft.AutoParams(budget), *batch)
    planned = time.perf_counter() - began
    for run in (step, changed):
        run(*batch).numpy()  # It also pays for graph optimisation.
    pairs = [(_timed(step, batch), _timed(changed, batch)) for _ in range(steps)]
    found = [tflms_sft.measure(changed, *batch) for _ in range(peaks)]
    plan = changed.plan
    return {
        "predicted_bytes": plan.predicted.peak_bytes,
        "predicted_ratio": plan.predicted.time_ratio,
        "planned_seconds": planned,
        "headline": plan.headline(),
        "peaks": [one.peak_bytes for one in found],
        "source": found[0].source,
        "seconds": pairs,
    }


def _timed(run: Any, batch: Any) -> float:
    began = time.perf_counter()
    run(*batch).numpy()
    return time.perf_counter() - began


def plain_peak(*, case: str, emit: _child.Emit) -> int:
    """Returns the predicted peak of the plain step, which is traced and not run."""
    del emit
    import tflms_sft

    chosen = CASES[case]
    step = chosen.task.step(chosen.image_size, chosen.batch)
    return tflms_sft.rewrite(step, tflms_sft.AutoParams("1TiB")).plan.original.peak_bytes


# ----------------------------------------------------------------------------------------------------------
# In the parent.


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Comparison of a plan's predictions with its measurements.

    Attributes:
        within: Whether the largest measured peak is within the budget.
        near_peak: Whether the median peak is near the predicted one.
        near_time: Whether the ratio of times is near the predicted one.
    """

    within: bool
    near_peak: bool
    near_time: bool


Found = Sequence[dict[str, Any]]
"""What children returned, of one budget."""


def row(name: str, budget: int, found: Found) -> tuple[list[str], Verdict]:
    """Return a line of the table, and the verdict on the plan."""
    predicted, ratio = found[0]["predicted_bytes"], found[0]["predicted_ratio"]
    peaks = [peak for one in found for peak in one["peaks"]]
    median = statistics.median(peaks)
    measured = statistics.median(rewritten / plain for one in found for plain, rewritten in one["seconds"])
    verdict = Verdict(
        max(peaks) <= budget, abs(median / predicted - 1) <= NEAR_PEAK, abs(ratio / measured - 1) <= NEAR_TIME
    )
    return [
        name,
        *(f"{value / MIB:.0f} MiB" for value in (budget, predicted)),
        f"{median / MIB:.0f} MiB ({median / predicted - 1:+.0%})" + ("" if verdict.near_peak else " far"),
        f"{max(peaks) / MIB:.0f} MiB" + ("" if verdict.within else " OVER"),
        f"{ratio:.2f}",
        f"{measured:.2f} ({ratio / measured - 1:+.0%})" + ("" if verdict.near_time else " far"),
        f"{statistics.median(one['planned_seconds'] for one in found):.0f} s",
    ], verdict


def failed_row(name: str, budget: int) -> tuple[list[str], Verdict]:
    """The line of a budget that was not met at all, which keeps nothing."""
    rest = ["-"] * (len(HEADINGS) - 3)
    return [name, f"{budget / MIB:.0f} MiB", "FAILED", *rest], Verdict(False, False, False)


HEADINGS = [
    "network",
    "budget",
    "predicted peak",
    "measured, median",
    "largest",
    "predicted time, of plain",
    "measured",
    "planned in",
]


def totals(verdicts: Sequence[Verdict]) -> tuple[str, bool]:
    """Return a line with totals, and whether they suffice."""
    number = len(verdicts)
    within, peaks, times = (
        sum(getattr(verdict, name) for verdict in verdicts) for name in ("within", "near_peak", "near_time")
    )
    text = (
        f"{number} plans: largest peak within the budget in {within}, median within {NEAR_PEAK:.0%} of the predicted "
        f"peak in {peaks}, time ratio within {NEAR_TIME:.0%} in {times}"
    )
    return text, within == number and peaks >= ENOUGH_PEAKS * number and times >= ENOUGH_TIMES * number


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = _arguments.parser("benchmarks.planner", __doc__)
    add = parser.add_argument
    names = list(CASES)
    add("--cases", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}; default: all")
    add("--parts", nargs="+", type=_arguments.budget, metavar="PART", help="budgets; default: three for each network")
    add("--runs", type=_arguments.positive, default=2, help="processes for each; default: %(default)s")
    add("--peaks", type=_arguments.positive, default=3, help="peaks that each of them measures; default: %(default)s")
    add("--steps", type=_arguments.positive, default=5, help="pairs of steps that are timed; default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    return parser.parse_args(arguments)


def _runs(case: str, budgets: Sequence[int], options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The figures of each budget, or why there are none."""
    found: list[list[dict[str, Any]]] = [[] for _ in budgets]
    for _ in range(options.runs):
        for results, budget in zip(found, budgets, strict=True):
            kwargs = {"case": case, "budget": budget, "steps": options.steps, "peaks": options.peaks}
            try:
                results.append(_child.call_in_child("benchmarks.planner:examine", kwargs))
            except _child.ChildError as error:
                results.append({"failed": _child.first_line(str(error))})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints; returns 1 if too few plans kept what they promised."""
    options = parse_arguments(arguments)
    report = _results.provenance("benchmarks.planner", arguments)
    lines, verdicts, networks = [HEADINGS, ["---"] * len(HEADINGS)], [], {}
    for case in options.cases:
        needed = _child.call_in_child("benchmarks.planner:plain_peak", {"case": case})
        budgets = [_arguments.budget_bytes(part, needed) for part in options.parts or CASES[case].parts]
        found = _runs(case, budgets, options)
        networks[case] = {str(budget): own for budget, own in zip(budgets, found, strict=True)}
        for budget, own in zip(budgets, found, strict=True):
            failed = next((one["failed"] for one in own if "failed" in one), None)
            line, verdict = row(case, budget, own) if failed is None else failed_row(case, budget)
            print(" | ".join(line), flush=True)
            print(f"    {own[0]['headline'] if failed is None else failed}", flush=True)
            lines.append(line)
            verdicts.append(verdict)
        text, enough = totals(verdicts)
        printed = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        if options.json:  # After each network: an hour may be lost otherwise.
            _results.write(options.json, {**report, "networks": networks, "totals": text}, {"plans": printed})
    print(f"\n{printed}\n\n{text}")
    return 0 if enough else 1


if __name__ == "__main__":
    _child.leave_with(main)
