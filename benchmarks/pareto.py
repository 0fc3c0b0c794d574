"""Predicted time of plans for many budgets and networks, with the time that planning takes.

    python -m benchmarks.pareto [--networks vgg16 resnet50 ...] [--tiles] [--json pareto.json]

No step runs. A budget is the bytes of all variables and a fraction of the rest of the original step's predicted peak;
the last column is the smallest budget that a plan meets. Predictions are for nominal rates and oneDNN's kernels, so
that they are the same on every CPU.

The exit code is 0 if no plan takes longer than one of a smaller budget.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _nets, _results

ENVIRONMENT = {"TFLMS_SFT_RATES": "nominal", "TF_ENABLE_ONEDNN_OPTS": "1"}

FRACTIONS = (0.9, 0.75, 0.6, 0.5, 0.42, 0.33, 0.25, 0.2, 0.15, 0.12, 0.1)
"""Fractions of the memory beside variables."""

Row = dict[str, Any]

Signature = tuple[Any, Sequence[Any]]
"""A step, and its arguments or specs."""


def _of_task(name: str, size: int, batch: int = 1) -> Signature:
    return _nets.TASKS[name].step(size, batch), ()


def _of_application(name: str, size: int, batch: int = 1) -> Signature:
    task = _nets.Task(name, functools.partial(_nets.application, name), 2, 3, False, image_size=size, batch=batch)
    return task.step(size, batch), ()


def _of_tokens(name: str, size: int) -> Signature:
    from benchmarks._sequence_nets import training_step

    return training_step(name, size)[0], ()


NETWORKS: dict[str, Callable[[], Signature]] = {
    "vgg16": functools.partial(_of_task, "vgg16", 1024),
    "resnet50": functools.partial(_of_task, "resnet50", 1024),
    "densenet121": functools.partial(_of_application, "DenseNet121", 512),
    "efficientnetb0": functools.partial(_of_application, "EfficientNetB0", 640),
    "mobilenetv3small": functools.partial(_of_application, "MobileNetV3Small", 640, 2),
    "inceptionv3": functools.partial(_of_application, "InceptionV3", 768),
    "convnexttiny": functools.partial(_of_application, "ConvNeXtTiny", 512),
    "xception": functools.partial(_of_application, "Xception", 512),
    "nasnetmobile": functools.partial(_of_application, "NASNetMobile", 512),
    "unet": functools.partial(_of_tokens, "unet", 512),
    "unet3d": functools.partial(_of_task, "unet3d-dice", 96),
    "vision-transformer": functools.partial(_of_tokens, "vision-transformer", 256),
    "language-model": functools.partial(_of_tokens, "language-model", 2048),
}
"""Functions that build a training step, by name."""


# In the child.


def planned(*, network: str, swap: bool, emit: _child.Emit) -> Row:
    """Plan a step within all budgets.

    Args:
        network: Name of the network.
        swap: Whether plans may use files and swaps.
        emit: Called with each point.

    Returns:
        The network, and its points from the largest budget to the smallest.
    """
    import dataclasses

    import tflms_sft
    from tflms_sft._params.request import parse_request
    from tflms_sft._planner.curve_points import budgets_between, curve_points
    from tflms_sft._rewrite.rewrite import analysed
    from tflms_sft._trace.step_tracing import trace_step

    step, arguments = NETWORKS[network]()
    params = tflms_sft.AutoParams("1TiB", swap=swap)
    traced = analysed(*trace_step(step, arguments, {}), None, parse_request(params))
    rest = traced.plain.peak.peak_bytes - traced.fixed_bytes
    least = budgets_between(traced, params, 2)[0]
    budgets = [int(traced.fixed_bytes + fraction * rest) for fraction in FRACTIONS]
    points = []
    for point in curve_points(traced, params, [least, *(budget for budget in budgets if budget > least)]):
        fraction = (point.budget_bytes - traced.fixed_bytes) / rest
        points.insert(0, {**dataclasses.asdict(point), "fraction": fraction})
        emit({"network": network, **points[0]})
    return {"network": network, "swap": swap, "plain_bytes": traced.plain.peak.peak_bytes, "points": points}


# In the parent.


def cells(row: Row) -> list[str]:
    """Return the line of a network in the table."""
    *inner, least = row["points"]
    ratios = [f"{point['time_ratio']:.2f}" for point in inner]
    seconds = [point["planning_seconds"] for point in row["points"]]
    mode = "all" if row["swap"] else "tiles"
    last = f"{least['fraction']:.2f}: {least['time_ratio']:.1f}"
    missing = ["-"] * (len(FRACTIONS) - len(inner))
    return [row["network"], mode, *ratios, *missing, last, f"{statistics.median(seconds):.0f} ({max(seconds):.0f})"]


def table(rows: Sequence[Row]) -> str:
    """Return the times over that of the original step, and seconds of planning: median and maximum."""
    head = ["", "plans", *(f"{fraction:.2f}" for fraction in FRACTIONS), "least", "planning, s"]
    return _results.markdown([head, *map(cells, rows)])


def rises(row: Row) -> list[str]:
    """Return the budgets of a network within which a plan takes longer than within a smaller one."""
    return [
        f"{row['network']}: {smaller['time_ratio']:.3f} within {smaller['budget_bytes']} bytes, "
        f"{larger['time_ratio']:.3f} within {larger['budget_bytes']}"
        for larger, smaller in itertools.pairwise(row["points"])
        if larger["time_ratio"] > smaller["time_ratio"]
    ]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.pareto", __doc__)
    add = parser.add_argument
    add("--networks", nargs="+", choices=sorted(NETWORKS), default=list(NETWORKS), metavar="NAME")
    add("--tiles", action="store_true", help="plan with tiles alone, without files and swaps")
    add("--json", type=Path, metavar="PATH", help="file for all figures")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, print and write."""
    options = parse_arguments(arguments)
    rows = [
        _child.call_in_child(
            "benchmarks.pareto:planned", {"network": network, "swap": not options.tiles}, env=ENVIRONMENT
        )
        for network in options.networks
    ]
    printed = table(rows)
    print(printed)
    worse = [line for row in rows for line in rises(row)]
    print("\n".join(worse))
    if options.json:
        _results.write(
            options.json, {**_results.provenance("benchmarks.pareto", arguments), "rows": rows}, {"times": printed}
        )
    return 1 if worse else 0


if __name__ == "__main__":
    _child.leave_with(main)
