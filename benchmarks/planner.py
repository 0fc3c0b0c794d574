"""Accuracy of predicted peaks and times of plans, for eight networks with three budgets each.

    python -m benchmarks.planner [--runs 2] [--peaks 3] [--cases NAME ...] [--parts 4/5 3/5 ...] [--json planner.json]

Budgets are 4/5, 3/5 and 2/5 of the original step's predicted peak; U-Nets, whose volumes at full resolution need more
than 2/5, have 1/2 instead. Every run plans, times the original and the rewritten step in turns, and measures peaks
with `tflms_sft.measure`. The time ratio is the median over all pairs of steps.

The exit code is 0 if all of these hold:

- The largest measured peak of every plan is within its budget.
- The median peak of at least 11 of 12 plans is within 10 % of the predicted one.
- The time ratio of at least 5 of 6 plans is within 15 % of the predicted one.
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

MAX_PEAK_ERROR, MAX_TIME_ERROR = 0.10, 0.15
"""Largest relative difference of a median peak, and of a median time ratio, that counts as near the prediction."""

MIN_NEAR_PEAKS_FRACTION, MIN_NEAR_TIMES_FRACTION = 11 / 12, 5 / 6
"""Fractions of the plans that have to be near their predictions."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A network and its training data.

    Attributes:
        name: Name in the table and on the command line.
        task: The network.
        image_size: Height, width and depth.
        batch: Batch size.
        parts: Budgets, over the original step's predicted peak.
    """

    name: str
    task: _nets.Task
    image_size: int
    batch: int
    parts: tuple[str, ...] = ("4/5", "3/5", "2/5")


def _task(name: str, image_size: int, batch: int) -> Case:
    return Case(name, _nets.TASKS[name], image_size, batch)


def _unet(name: str, image_size: int) -> Case:
    return dataclasses.replace(_task(name, image_size, 1), parts=("4/5", "3/5", "1/2"))


def _application(name: str, image_size: int, batch: int) -> Case:
    build = functools.partial(_nets.application, name)
    task = _nets.Task(name, build, 2, 3, False, image_size=image_size, batch=batch)
    return Case(name, task, image_size, batch)


CASES = {
    case.name: case
    for case in (
        _task("vgg16", 640, 1),
        _task("darknet19", 1024, 1),
        _task("resnet50", 320, 4),
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
    """Plan for a budget in bytes, train, and return predictions and measurements."""
    del emit
    import tensorflow as tf

    import tflms_sft

    chosen = CASES[case]
    step = chosen.task.step(chosen.image_size, chosen.batch)
    batch = tuple(map(tf.constant, chosen.task.noise(chosen.image_size, chosen.batch)))
    step.get_concrete_function()  # Traces the step, so that planning is timed without it.
    began = time.perf_counter()
    rewritten = tflms_sft.rewrite(step, tflms_sft.AutoParams(budget), *batch)
    planned = time.perf_counter() - began
    for run in (step, rewritten):
        run(*batch).numpy()  # Includes graph optimisation, which is not timed.
    pairs = [(_timed(step, batch), _timed(rewritten, batch)) for _ in range(steps)]
    measurements = [tflms_sft.measure(rewritten, *batch) for _ in range(peaks)]
    plan = rewritten.plan
    return {
        "predicted_bytes": plan.predicted.peak_bytes,
        "predicted_ratio": plan.predicted.time_ratio,
        "planned_seconds": planned,
        "headline": plan.headline(),
        "peaks": [measurement.peak_bytes for measurement in measurements],
        "source": measurements[0].source,
        "seconds": pairs,
    }


def _timed(run: Any, batch: Any) -> float:
    began = time.perf_counter()
    run(*batch).numpy()
    return time.perf_counter() - began


def plain_peak(*, case: str, emit: _child.Emit) -> int:
    """Return the predicted peak of the original step, which is traced but not run."""
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


Runs = Sequence[dict[str, Any]]
"""Results of the children for one budget."""


def row(name: str, budget: int, runs: Runs) -> tuple[list[str], Verdict]:
    """Return a line of the table, and the verdict on the plan."""
    predicted, ratio = runs[0]["predicted_bytes"], runs[0]["predicted_ratio"]
    peaks = [peak for run in runs for peak in run["peaks"]]
    median = statistics.median(peaks)
    measured = statistics.median(rewritten / plain for run in runs for plain, rewritten in run["seconds"])
    verdict = Verdict(
        within=max(peaks) <= budget,
        near_peak=abs(median / predicted - 1) <= MAX_PEAK_ERROR,
        near_time=abs(ratio / measured - 1) <= MAX_TIME_ERROR,
    )
    return [
        name,
        *(f"{value / MIB:.0f} MiB" for value in (budget, predicted)),
        f"{median / MIB:.0f} MiB ({median / predicted - 1:+.0%})" + ("" if verdict.near_peak else " far"),
        f"{max(peaks) / MIB:.0f} MiB" + ("" if verdict.within else " OVER"),
        f"{ratio:.2f}",
        f"{measured:.2f} ({ratio / measured - 1:+.0%})" + ("" if verdict.near_time else " far"),
        f"{statistics.median(run['planned_seconds'] for run in runs):.0f} s",
    ], verdict


def failed_row(name: str, budget: int) -> tuple[list[str], Verdict]:
    """Return the line of a budget for which a run failed, and the verdict."""
    dashes = ["-"] * (len(HEADINGS) - 3)
    return [name, f"{budget / MIB:.0f} MiB", "FAILED", *dashes], Verdict(False, False, False)


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
        f"{number} plans: largest peak within the budget in {within}, median within {MAX_PEAK_ERROR:.0%} of the "
        f"predicted peak in {peaks}, time ratio within {MAX_TIME_ERROR:.0%} in {times}"
    )
    are_near = peaks >= MIN_NEAR_PEAKS_FRACTION * number and times >= MIN_NEAR_TIMES_FRACTION * number
    return text, within == number and are_near


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.planner", __doc__)
    add = parser.add_argument
    names = list(CASES)
    add("--cases", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}; default: all")
    add("--parts", nargs="+", type=_arguments.budget, metavar="PART", help="budgets; default: three for each network")
    add("--runs", type=_arguments.positive, default=2, help="processes per plan; default: %(default)s")
    add("--peaks", type=_arguments.positive, default=3, help="measured peaks per process; default: %(default)s")
    add("--steps", type=_arguments.positive, default=5, help="timed pairs of steps per process; default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    return parser.parse_args(arguments)


def _runs(case: str, budgets: Sequence[int], options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Return the results of all runs for each budget; a failed run has the reason."""
    runs: list[list[dict[str, Any]]] = [[] for _ in budgets]
    for _ in range(options.runs):
        for results, budget in zip(runs, budgets, strict=True):
            kwargs = {"case": case, "budget": budget, "steps": options.steps, "peaks": options.peaks}
            try:
                results.append(_child.call_in_child("benchmarks.planner:examine", kwargs))
            except _child.ChildError as error:
                results.append({"failed": _child.first_line(str(error))})
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if the conditions for the exit code 0 do not hold."""
    options = parse_arguments(arguments)
    report = _results.provenance("benchmarks.planner", arguments)
    lines, verdicts, networks = [HEADINGS, ["---"] * len(HEADINGS)], [], {}
    for case in options.cases:
        original_bytes = _child.call_in_child("benchmarks.planner:plain_peak", {"case": case})
        budgets = [_arguments.budget_bytes(part, original_bytes) for part in options.parts or CASES[case].parts]
        results = _runs(case, budgets, options)
        networks[case] = {str(budget): runs for budget, runs in zip(budgets, results, strict=True)}
        for budget, runs in zip(budgets, results, strict=True):
            failed = next((run["failed"] for run in runs if "failed" in run), None)
            line, verdict = row(case, budget, runs) if failed is None else failed_row(case, budget)
            print(" | ".join(line), flush=True)
            print(f"    {runs[0]['headline'] if failed is None else failed}", flush=True)
            lines.append(line)
            verdicts.append(verdict)
        text, suffices = totals(verdicts)
        printed = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        if options.json:  # After each network, because a later failure would otherwise lose an hour of results.
            _results.write(options.json, {**report, "networks": networks, "totals": text}, {"plans": printed})
    print(f"\n{printed}\n\n{text}")
    return 0 if suffices else 1


if __name__ == "__main__":
    _child.leave_with(main)
