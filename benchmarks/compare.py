"""Memory, time and results of `MemoryBudget` and of other methods to save memory.

    python -m benchmarks.compare [--net vgg16|resnet50] [--image-size N] [--budgets 1/2 1/4] [--picture FILE.png]

The other methods are `tf.recompute_grad` around every block, Keras's `RematScope` in three modes, and PyTorch's
`checkpoint_sequential` by blocks. PyTorch is in the extra `compare`; without it, its methods are skipped.

Memory is the growth of RSS in a step. Ratios and differences are relative to plain training in the same framework:
the largest difference of losses, and the norms of the differences of gradients, accumulated by momentum, and of
BatchNorm's moving statistics. The exit code is 1 if `MemoryBudget` fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _arguments, _child, _compare, _results

SIZES = {"vgg16": (512, 1), "resnet50": (384, 2)}
"""Default image size and batch of each network."""

BUDGET_TITLE = "MemoryBudget"


@dataclasses.dataclass(frozen=True)
class Way:
    """One training method.

    Attributes:
        title: Name in table and picture.
        key: Key of `_others.WAYS`.
        framework: "TensorFlow" or "PyTorch"; its first method is plain training.
        budget: A size, or a fraction of the original step's predicted peak.
    """

    title: str
    key: str
    framework: str = "TensorFlow"
    budget: str = ""


def ways(budgets: Sequence[str]) -> list[Way]:
    """Return all training methods; in each framework, plain training comes first."""
    return [
        Way("Keras, plain", "plain"),
        *(Way(f"{BUDGET_TITLE}, {budget}", "budget", budget=budget) for budget in budgets),
        Way("tf.recompute_grad", "recompute_grad"),
        *(Way(f"RematScope {mode}", f"remat {mode}") for mode in ("full", "activations", "larger_than")),
        Way("PyTorch, plain", "torch", "PyTorch"),
        Way("checkpoint_sequential", "torch checkpoint", "PyTorch"),
    ]


Figures = dict[str, Any]
"""Figures of a method; `failed` alone if it failed."""


def measured(spec: _compare.Spec, chosen: Sequence[Way], runs: int, folder: Path) -> dict[str, Figures]:
    """Run all methods in turns; the first run of each also saves its arrays."""
    original_bytes = 0
    if any(_arguments.is_part(way.budget) for way in chosen):
        kwargs = {"spec": dataclasses.asdict(spec)}
        original_bytes = _child.call_in_child("benchmarks._compare:plain_peak", kwargs)
    results: dict[str, list[Figures]] = {way.title: [] for way in chosen}
    failed: dict[str, str] = {}
    has_torch = importlib.util.find_spec("torch") is not None
    for what in ("memory", "time"):
        for number in range(runs):
            for way in chosen:
                if way.framework == "PyTorch" and not has_torch:
                    failed[way.title] = 'skipped: PyTorch is not installed (pip install -e ".[compare]")'
                if way.title in failed:
                    continue
                kwargs = {
                    "spec": dataclasses.asdict(spec),
                    "way": way.key,
                    "budget_bytes": _arguments.budget_bytes(way.budget, original_bytes) if way.budget else 0,
                    "save": str(folder / f"{chosen.index(way)}.npz") if (what, number) == ("memory", 0) else "",
                }
                env = _child.TRUE_RSS_ENV if what == "memory" else {}
                outcome = _child.run_child("benchmarks._others:train", kwargs, env=env)
                if not outcome.ok:
                    failed[way.title] = why(outcome)
                else:
                    results[way.title].append({**outcome.result, "what": what, "saved": kwargs["save"]})
                print(f"{what} {number + 1}/{runs} {way.title}: {_progress(what, outcome)}", flush=True)
    return {title: {"failed": failed[title]} if title in failed else _merged(parts) for title, parts in results.items()}


def why(outcome: _child.Outcome) -> str:
    """Return why a method failed, in one line.

    Keras puts the reason of an error in a layer after the name of the layer.
    """
    message = re.sub(r"\x1b\[\d*m", "", outcome.error["message"] if outcome.error else "")
    lines = map(str.strip, message.splitlines())
    inner = [line for line in lines if line and not line.startswith("Exception encountered when calling")]
    return f"{outcome.error['type']}: {inner[0]}" if outcome.error and inner else outcome.how_it_ended()


def _progress(what: str, outcome: _child.Outcome) -> str:
    """Return the text of a progress line on a finished child."""
    if not outcome.ok:
        return why(outcome)
    if what == "memory":
        return f"growth of RSS {_compare.shown_size(outcome.result['net_rss_bytes'])}"
    return f"{statistics.median(outcome.result['step_seconds']):.2f} s per step"


def _merged(parts: Sequence[Figures]) -> Figures:
    """Return the largest memory and the median time of all runs of a method."""
    memory = [part for part in parts if part["what"] == "memory"]
    seconds = [second for part in parts if part["what"] == "time" for second in part["step_seconds"]]
    return {
        "net_rss_bytes": max(part["net_rss_bytes"] for part in memory),
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "losses": memory[0]["losses"],
        "saved": memory[0]["saved"],
        **{key: memory[0][key] for key in ("plan", "predicted_time_ratio") if key in memory[0]},
    }


def compared(chosen: Sequence[Way], results: dict[str, Figures]) -> None:
    """Add to the figures of each method its ratios to, and differences from, plain training in its framework."""
    for way in chosen:
        plain = results[next(other.title for other in chosen if other.framework == way.framework)]
        figures = results[way.title]
        if "failed" in figures or "failed" in plain:
            continue
        figures["memory_ratio"] = figures["net_rss_bytes"] / plain["net_rss_bytes"]
        figures["time_ratio"] = figures["seconds"] / plain["seconds"]
        pairs = zip(figures["losses"], plain["losses"], strict=True)
        figures["differences"] = {"loss": max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)}
        with np.load(figures["saved"]) as arrays, np.load(plain["saved"]) as others:
            figures["differences"] |= differences(dict(arrays), dict(others))


def differences(arrays: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the relative differences, by norm, of all gradients and of all statistics if there are any.

    Raises:
        ValueError: If the arrays belong to different networks.
    """
    results = {}
    for kind in ("gradient", "statistic"):
        names = [name for name in others if name.startswith(f"{kind}/")]
        if names != [name for name in arrays if name.startswith(f"{kind}/")]:
            raise ValueError(f"A method has other {kind}s than plain training, so that they cannot be compared.")
        if names:
            off, whole = (
                float(np.sqrt(sum(np.sum(np.square(a, dtype=np.float64)) for a in parts)))
                for parts in ([arrays[name] - others[name] for name in names], [others[name] for name in names])
            )
            results[kind] = off / max(whole, 1e-30)
    return results


def table(chosen: Sequence[Way], results: dict[str, Figures]) -> str:
    """Return all methods as a Markdown table, followed by the reasons of failures."""
    heads = ["", "memory of a step", "of plain", "time of a step", "of plain", "loss off by", "gradients", "statistics"]
    lines, notes = [heads], list[str]()
    for way in chosen:
        figures = results[way.title]
        if "failed" in figures:
            notes.append(f"{way.title}: {figures['failed']}")
            lines.append([way.title, "failed", *[""] * (len(heads) - 2)])
            continue
        ratios = [f"{figures[key]:.2f}" if key in figures else "-" for key in ("memory_ratio", "time_ratio")]
        off = figures.get("differences", {})
        lines.append(
            [
                way.title,
                f"{figures['net_rss_bytes'] / 2**20:.0f} MiB",
                ratios[0],
                f"{figures['seconds']:.2f} s",
                ratios[1],
                *(f"{off[kind]:.0e}" if kind in off else "-" for kind in ("loss", "gradient", "statistic")),
            ]
        )
    return "\n\n".join([_results.markdown(lines), *notes])


def draw(path: Path, title: str, chosen: Sequence[Way], results: dict[str, Figures]) -> None:
    """Draw memory and time of each method, relative to plain training; failed methods are listed below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    colours = {"TensorFlow": "0.35", "PyTorch": "C1"}
    labels: dict[tuple[float, float], tuple[str, str]] = {}
    for way in chosen:
        figures = results[way.title]
        if "memory_ratio" not in figures:
            continue
        is_budget = way.key == "budget"
        colour = "C0" if is_budget else colours[way.framework]
        point = figures["memory_ratio"], figures["time_ratio"]
        axes.plot(*point, "o" if is_budget else "s", color=colour, ms=9 if is_budget else 7)
        labels[point] = (f"{labels[point][0]}; {way.title}", "0.35") if point in labels else (way.title, colour)
    axes.axhline(1, color="0.8", lw=1, zorder=0)
    axes.axvline(1, color="0.8", lw=1, zorder=0)
    axes.set_xlim(left=0)
    axes.margins(x=0.2, y=0.15)
    axes.set_xlabel("memory of a step, over plain training in the same framework")
    axes.set_ylabel("time of a step, over plain")
    axes.set_title(title)
    failed = [f"{way.title}: {results[way.title]['failed']}" for way in chosen if "failed" in results[way.title]]
    if failed:
        text = "\n".join(line if len(line) < 110 else line[:107] + "..." for line in failed)
        figure.supxlabel(text, fontsize=8, color="0.35", x=0.02, ha="left")
    _label(axes, labels)
    figure.savefig(path, dpi=110)


def _label(axes: Any, labels: dict[tuple[float, float], tuple[str, str]]) -> None:
    """Write the name of each point (text, colour) beside it, where it covers no other point or name."""
    figure = axes.figure
    figure.draw_without_rendering()
    places = [axes.transData.transform(point) for point in labels]
    boxes: list[Any] = []
    for point, (text, colour) in labels.items():
        for x, y in ((9, 6), (-9, 6), (9, -14), (-9, -14)):
            options = {"color": colour, "fontsize": 9, "ha": "left" if x > 0 else "right"}
            note = axes.annotate(text, point, xytext=(x, y), textcoords="offset points", **options)
            box = note.get_window_extent(figure.canvas.get_renderer())
            is_free = not any(box.overlaps(other) for other in boxes) and not any(box.contains(*at) for at in places)
            if is_free and axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1:
                break
            if (x, y) != (-9, -14):
                note.remove()
        boxes.append(box)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.compare", __doc__)
    add = parser.add_argument
    add("--net", choices=sorted(SIZES), default="vgg16")
    defaults = ", ".join(f"{size} for {net}" for net, (size, _) in SIZES.items())
    add("--image-size", type=_arguments.positive, metavar="N", help=f"height and width; default: {defaults}")
    defaults = ", ".join(f"{batch} for {net}" for net, (_, batch) in SIZES.items())
    add("--batch", type=_arguments.positive, metavar="N", help=f"batch size; default: {defaults}")
    budgets = "sizes, or fractions of the original step's predicted peak; default: 1/2 1/4"
    add("--budgets", nargs="+", type=_arguments.budget, default=["1/2", "1/4"], metavar="BUDGET", help=budgets)
    add("--runs", type=_arguments.positive, default=2, help="processes for each figure; default: %(default)s")
    add("--steps", type=_arguments.positive, default=3, help="counted steps of each process; default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    add("--picture", type=Path, metavar="FILE", help="picture of memory and time; needs matplotlib")
    options = parser.parse_args(arguments)
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")
    size, batch = SIZES[options.net]
    options.image_size, options.batch = options.image_size or size, options.batch or batch
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write and draw; return 1 if `MemoryBudget` fails."""
    options = parse_arguments(arguments)
    spec = _compare.Spec(options.net, options.image_size, options.batch, 1, options.steps, "cpu")
    chosen = ways(options.budgets)
    report = _results.provenance("benchmarks.compare", arguments, ["torch"])
    print("\n".join(f"{name}: {value}" for name, value in report.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = measured(spec, chosen, options.runs, Path(folder))
        compared(chosen, results)
    printed = table(chosen, results)
    print(f"\n{printed}")
    title = f"{options.net}, {options.image_size} x {options.image_size}, batch {options.batch}"
    if options.json:
        report |= {"spec": dataclasses.asdict(spec), "runs": options.runs, "found": results}
        _results.write(options.json, report, {"ways": printed})
    if options.picture:
        draw(options.picture, title, chosen, results)
        print(f"Drawn: {options.picture}")
    return int(any("failed" in results[way.title] for way in chosen if way.key == "budget"))


if __name__ == "__main__":
    _child.leave_with(main)
