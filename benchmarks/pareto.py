"""Predicted peak and time of plans for ten budgets, as a table and a picture.

    python -m benchmarks.pareto --image-size 2048 --measured benchmarks/results/vgg16_2048.json --plot front.png

`--measured` adds points from the results of other benchmarks; this one runs no step. Budgets are for tiles alone; the
first one that no plan meets ends the search.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _compare, _nets, _results

BUDGET_FRACTIONS = (0.8, 0.6, 0.45, 0.35, 0.27, 0.21, 0.17, 0.15, 0.135, 0.12)
"""Budgets, over the predicted peak of the original step."""

GIB = 2**30

Point = dict[str, Any]


# In the child.


def front(*, spec: dict[str, Any], fractions: Sequence[float], emit: _child.Emit) -> dict[str, Any]:
    """Plan for every budget, without running a step.

    Args:
        spec: Fields of a `_compare.Spec`.
        fractions: Budgets, over the predicted peak of the original step.
        emit: Called with each point.

    Returns:
        The predicted peak of the original step, and a point for each budget that a plan meets.
    """
    import tensorflow as tf

    import tflms_sft

    chosen = _compare.Spec(**spec)
    task = _nets.TASKS[chosen.net]
    model = task.compiled(chosen.image_size)
    batch = task.noise(chosen.image_size, chosen.batch)
    step = tf.function(lambda images, labels: model.train_step((images, labels)), autograph=False)
    plain = tflms_sft.rewrite(step, tflms_sft.AutoParams("1TiB"), *batch).plan.original.peak_bytes
    points = []
    for fraction in fractions:
        try:
            plan = tflms_sft.rewrite(step, tflms_sft.AutoParams(int(fraction * plain), swap=False), *batch).plan
        except tflms_sft.BudgetError as error:
            emit({"fraction": fraction, "smallest_bytes": error.smallest_bytes})
            break
        halos = sorted({segment.halo for segment in plan.segments})
        point = {
            "budget_bytes": int(fraction * plain),
            "peak_bytes": plan.predicted.peak_bytes,
            "time_ratio": plan.predicted.time_ratio,
            "halos": halos,
            "plan": plan.headline(),
        }
        points.append(point)
        emit(point)
    return {"plain_bytes": plain, "points": points}


# In the parent.


def measured_points(paths: Sequence[Path], spec: _compare.Spec) -> list[Point]:
    """Return memory and time from results of programs such as `vgg16`, with times relative to plain training.

    Titles begin with the names of the files, without the prefix that all of them have.

    Raises:
        ValueError: If a file belongs to another network, image size or batch size.
    """
    points = []
    common = os.path.commonprefix([path.stem for path in paths]) if len(paths) > 1 else ""
    common = common[: common.rfind("_") + 1]
    wanted = {"net": spec.net, "image_size": spec.image_size, "batch": spec.batch}
    for path in paths:
        report = json.loads(path.read_text())
        other = {name: report["spec"][name] for name in wanted}
        if other != wanted:
            raise ValueError(f"`--measured` has other figures than {wanted}. Received: {path} with {other}.")
        for title, ratios in report["ratios"].items():
            if not {"peak_bytes", "step_seconds_median", "cpu_seconds_median"} <= ratios.keys():
                continue
            figures = report["results"][title]
            points.append(
                {
                    "title": f"{path.stem.removeprefix(common)}: {title}",
                    "peak_bytes": figures["peak_bytes"],
                    "time_ratio": 1 / ratios["step_seconds_median"],
                    "cpu_ratio": 1 / ratios["cpu_seconds_median"],
                    "net_ratio": ratios.get("net_rss_bytes"),
                }
            )
    return points


def table(plain_bytes: int, points: Sequence[Point], measured: Sequence[Point]) -> str:
    """Return predicted and measured points as a Markdown table."""
    lines = [["", "budget", "peak_bytes", "plain/", "time", "processor time", "net RSS"]]
    for point in points:
        size, ratio = _compare.shown_size(point["peak_bytes"]), plain_bytes / point["peak_bytes"]
        budget = _compare.shown_size(point["budget_bytes"])
        kind = ", ".join(point["halos"]) or "plain"
        lines.append([f"predicted ({kind})", budget, size, f"{ratio:.2f}", f"{point['time_ratio']:.2f}x", "", ""])
    for point in measured:
        net = f"1/{point['net_ratio']:.2f}" if point["net_ratio"] else ""
        times = [f"{point[key]:.2f}x" for key in ("time_ratio", "cpu_ratio")]
        size, ratio = _compare.shown_size(point["peak_bytes"]), plain_bytes / point["peak_bytes"]
        lines.append([f"measured ({point['title']})", "", size, f"{ratio:.2f}", *times, net])
    return _results.markdown(lines)


def draw(path: Path, title: str, plain_bytes: int, points: Sequence[Point], measured: Sequence[Point]) -> None:
    """Draw the predicted front as a line, and the measured points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    line = [(plain_bytes, 1.0), *((p["peak_bytes"], p["time_ratio"]) for p in points)]
    line.sort(reverse=True)
    axes.plot([size / GIB for size, _ in line], [ratio for _, ratio in line], "-", color="0.6", label="predicted")
    kinds = {(): ("plain", "s"), ("recompute",): ("tiles", "^"), ("carry",): ("rows", "o")}
    for halos in dict.fromkeys(tuple(p["halos"]) for p in points):
        name, marker = kinds.get(halos, ("rows and tiles", "D"))
        shown = [p for p in points if tuple(p["halos"]) == halos]
        xs, ys = [p["peak_bytes"] / GIB for p in shown], [p["time_ratio"] for p in shown]
        axes.plot(xs, ys, marker, color="0.45", label=f"predicted: {name}")
    if measured:
        xs = [p["peak_bytes"] / GIB for p in measured]
        axes.plot(xs, [p["time_ratio"] for p in measured], "x", color="C3", ms=9, mew=2, label="measured")
        axes.plot(xs, [p["cpu_ratio"] for p in measured], "+", color="C0", ms=11, mew=2, label="measured, processor")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("peak_bytes in GiB")
    axes.set_ylabel("time of a step, over plain")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.pareto", __doc__)
    add = parser.add_argument
    add("--image-size", type=_arguments.positive, required=True, metavar="N")
    add("--model", choices=sorted(_nets.TASKS), default="vgg16")
    add("--batch", type=_arguments.positive, default=1)
    measured_help = "results of programs such as `vgg16` for the same network, image size and batch size"
    add("--measured", type=Path, nargs="+", default=[], metavar="FILE.json", help=measured_help)
    add("--plot", type=Path, metavar="FILE.png", help="picture of memory and time; needs matplotlib")
    add("--json", type=Path, metavar="PATH", help="file for all figures")
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    missing = [str(path) for path in options.measured if not path.is_file()]
    if missing:
        parser.error(f"--measured: no such file: {', '.join(missing)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, print, write and draw."""
    options = parse_arguments(arguments)
    spec = _compare.Spec(options.model, options.image_size, options.batch, 1, 1, "cpu")
    try:
        measured = measured_points(options.measured, spec)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    kwargs = {"spec": dataclasses.asdict(spec), "fractions": list(BUDGET_FRACTIONS)}
    predicted = _child.call_in_child("benchmarks.pareto:front", kwargs)
    printed = table(predicted["plain_bytes"], predicted["points"], measured)
    print(printed)
    if options.json:
        report = {**_results.provenance("benchmarks.pareto", arguments), **predicted, "measured": measured}
        _results.write(options.json, report, {"front": printed})
    if options.plot:
        title = f"{options.model}, {options.image_size} px, batch {options.batch}"
        draw(options.plot, title, predicted["plain_bytes"], predicted["points"], measured)
        print(f"Drawn: {options.plot}")
    return 0


if __name__ == "__main__":
    _child.leave_with(main)
