"""Sets `MemoryBudget` beside what one would pick instead: memory, time, and whether the same training comes out.

    python -m benchmarks.compare [--net vgg16|resnet50] [--image-size N] [--budgets 1/2 1/4] [--picture FILE.png]

Keras as it is, `MemoryBudget`, `tf.recompute_grad` around every block, Keras' `RematScope` in three modes, PyTorch as
it is, and its `checkpoint_sequential` by blocks. PyTorch is in the extra `compare`; without it its rows are skipped.

Every run is a process of its own, and the ways take turns. Memory is what a step adds to the process as the operating
system sees it (`net_rss_bytes`, see README.md beside this file), since that is the same measure for both frameworks.
Ratios are to the plain run of the same framework, and so is what came out: losses, gradients as momentum has summed
them up, and what has become of BatchNorm's moving statistics, each by the norm of the difference, relative to plain.
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

GIVEN = "MemoryBudget"


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        title: In table and picture.
        key: Of `_others.WAYS`.
        framework: "TensorFlow" or "PyTorch"; its first way is the plain one.
        budget: A size, or a part of what the plain step is predicted to need.
    """

    title: str
    key: str
    framework: str = "TensorFlow"
    budget: str = ""


def ways(budgets: Sequence[str]) -> list[Way]:
    """Return all training methods; the plain method of each framework comes first."""
    return [
        Way("Keras, plain", "plain"),
        *(Way(f"{GIVEN}, {budget}", "budget", budget=budget) for budget in budgets),
        Way("tf.recompute_grad", "recompute_grad"),
        *(Way(f"RematScope {mode}", f"remat {mode}") for mode in ("full", "activations", "larger_than")),
        Way("PyTorch, plain", "torch", "PyTorch"),
        Way("checkpoint_sequential", "torch checkpoint", "PyTorch"),
    ]


Figures = dict[str, Any]
"""What is known of a way; with `failed` nothing else."""


def measured(spec: _compare.Spec, chosen: Sequence[Way], runs: int, folder: Path) -> dict[str, Figures]:
    """Runs every way in turns; the first run of each also saves what came of it."""
    needed = 0
    if any(_arguments.is_part(way.budget) for way in chosen):
        kwargs = {"spec": dataclasses.asdict(spec)}
        needed = _child.call_in_child("benchmarks._compare:plain_peak", kwargs)
    found: dict[str, list[Figures]] = {way.title: [] for way in chosen}
    failed: dict[str, str] = {}
    torch = importlib.util.find_spec("torch") is not None
    for what in ("memory", "time"):
        for number in range(runs):
            for way in chosen:
                if way.framework == "PyTorch" and not torch:
                    failed[way.title] = 'skipped: PyTorch is not installed (pip install -e ".[compare]")'
                if way.title in failed:
                    continue
                kwargs = {
                    "spec": dataclasses.asdict(spec),
                    "way": way.key,
                    "budget_bytes": _arguments.budget_bytes(way.budget, needed) if way.budget else 0,
                    "save": str(folder / f"{chosen.index(way)}.npz") if (what, number) == ("memory", 0) else "",
                }
                env = _child.TRUE_RSS_ENV if what == "memory" else {}
                outcome = _child.run_child("benchmarks._others:train", kwargs, env=env)
                if not outcome.ok:
                    failed[way.title] = why(outcome)
                else:
                    found[way.title].append({**outcome.result, "what": what, "saved": kwargs["save"]})
                print(f"{what} {number + 1}/{runs} {way.title}: {_told(what, outcome)}", flush=True)
    return {title: {"failed": failed[title]} if title in failed else _merged(own) for title, own in found.items()}


def why(outcome: _child.Outcome) -> str:
    """Why a way failed, in a line. Keras puts the reason of an error in a layer behind the name of the layer."""
    message = re.sub(r"\x1b\[\d*m", "", outcome.error["message"] if outcome.error else "")
    lines = map(str.strip, message.splitlines())
    inner = [line for line in lines if line and not line.startswith("Exception encountered when calling")]
    return f"{outcome.error['type']}: {inner[0]}" if outcome.error and inner else outcome.how_it_ended()


def _told(what: str, outcome: _child.Outcome) -> str:
    if not outcome.ok:
        return why(outcome)
    if what == "memory":
        return f"net RSS {_compare.shown_size(outcome.result['net_rss_bytes'])}"
    return f"{statistics.median(outcome.result['step_seconds']):.2f} s a step"


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


def compared(chosen: Sequence[Way], found: dict[str, Figures]) -> None:
    """Adds to every way what it is to the plain one of its framework."""
    for way in chosen:
        plain = found[next(other.title for other in chosen if other.framework == way.framework)]
        own = found[way.title]
        if "failed" in own or "failed" in plain:
            continue
        own["memory_ratio"] = own["net_rss_bytes"] / plain["net_rss_bytes"]
        own["time_ratio"] = own["seconds"] / plain["seconds"]
        pairs = zip(own["losses"], plain["losses"], strict=True)
        own["differences"] = {"loss": max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)}
        with np.load(own["saved"]) as arrays, np.load(plain["saved"]) as others:
            own["differences"] |= differences(dict(arrays), dict(others))


def differences(arrays: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the relative differences, by norm, of all gradients and of all statistics if there are any.

    Raises:
        ValueError: If they are not those of the same network.
    """
    found = {}
    for kind in ("gradient", "statistic"):
        names = [name for name in others if name.startswith(f"{kind}/")]
        if names != [name for name in arrays if name.startswith(f"{kind}/")]:
            raise ValueError(f"A way to train has other {kind}s than plain training, so that they cannot be compared.")
        if names:
            off, whole = (
                float(np.sqrt(sum(np.sum(np.square(a, dtype=np.float64)) for a in parts)))
                for parts in ([arrays[name] - others[name] for name in names], [others[name] for name in names])
            )
            found[kind] = off / max(whole, 1e-30)
    return found


def table(chosen: Sequence[Way], found: dict[str, Figures]) -> str:
    """All ways, as a Markdown table; below it why some failed."""
    heads = ["", "memory of a step", "of plain", "time of a step", "of plain", "loss off by", "gradients", "statistics"]
    lines, notes = [heads], list[str]()
    for way in chosen:
        own = found[way.title]
        if "failed" in own:
            notes.append(f"{way.title}: {own['failed']}")
            lines.append([way.title, "failed", *[""] * (len(heads) - 2)])
            continue
        ratios = [f"{own[key]:.2f}" if key in own else "-" for key in ("memory_ratio", "time_ratio")]
        off = own.get("differences", {})
        lines.append(
            [
                way.title,
                f"{own['net_rss_bytes'] / 2**20:.0f} MiB",
                ratios[0],
                f"{own['seconds']:.2f} s",
                ratios[1],
                *(f"{off[kind]:.0e}" if kind in off else "-" for kind in ("loss", "gradient", "statistic")),
            ]
        )
    return "\n\n".join([_results.markdown(lines), *notes])


def draw(path: Path, title: str, chosen: Sequence[Way], found: dict[str, Figures]) -> None:
    """Memory against time, both over those of the plain run; what failed is named below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    colours = {"TensorFlow": "0.35", "PyTorch": "C1"}
    labels: dict[tuple[float, float], tuple[str, str]] = {}
    for way in chosen:
        own = found[way.title]
        if "memory_ratio" not in own:
            continue
        ours = way.key == "budget"
        colour = "C0" if ours else colours[way.framework]
        point = own["memory_ratio"], own["time_ratio"]
        axes.plot(*point, "o" if ours else "s", color=colour, ms=9 if ours else 7)
        labels[point] = (f"{labels[point][0]}; {way.title}", "0.35") if point in labels else (way.title, colour)
    axes.axhline(1, color="0.8", lw=1, zorder=0)
    axes.axvline(1, color="0.8", lw=1, zorder=0)
    axes.set_xlim(left=0)
    axes.margins(x=0.2, y=0.15)
    axes.set_xlabel("memory of a step, over plain training in the same framework")
    axes.set_ylabel("time of a step, over plain")
    axes.set_title(title)
    failed = [f"{way.title}: {found[way.title]['failed']}" for way in chosen if "failed" in found[way.title]]
    if failed:
        text = "\n".join(line if len(line) < 110 else line[:107] + "..." for line in failed)
        figure.supxlabel(text, fontsize=8, color="0.35", x=0.02, ha="left")
    _label(axes, labels)
    figure.savefig(path, dpi=110)


def _label(axes: Any, labels: dict[tuple[float, float], tuple[str, str]]) -> None:
    """Puts the name of each point (text, colour) beside it, where it is in nobody's way."""
    figure = axes.figure
    figure.draw_without_rendering()
    taken = [axes.transData.transform(point) for point in labels]
    boxes: list[Any] = []
    for point, (text, colour) in labels.items():
        for x, y in ((9, 6), (-9, 6), (9, -14), (-9, -14)):
            options = {"color": colour, "fontsize": 9, "ha": "left" if x > 0 else "right"}
            note = axes.annotate(text, point, xytext=(x, y), textcoords="offset points", **options)
            box = note.get_window_extent(figure.canvas.get_renderer())
            free = not any(box.overlaps(other) for other in boxes) and not any(box.contains(*at) for at in taken)
            if free and axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1:
                break
            if (x, y) != (-9, -14):
                note.remove()
        boxes.append(box)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = _arguments.parser("benchmarks.compare", __doc__)
    add = parser.add_argument
    add("--net", choices=sorted(SIZES), default="vgg16")
    add("--image-size", type=_arguments.positive, metavar="N", help=f"height and width; default: {SIZES} by network")
    add("--batch", type=_arguments.positive, metavar="N", help="images of a step")
    add("--budgets", nargs="+", type=_arguments.budget, default=["1/2", "1/4"], metavar="BUDGET")
    add("--runs", type=_arguments.positive, default=2, help="processes for each figure; default: %(default)s")
    add("--steps", type=_arguments.positive, default=3, help="counted steps of each; default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    add("--picture", type=Path, metavar="FILE", help="memory against time; needs matplotlib")
    options = parser.parse_args(arguments)
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")
    size, batch = SIZES[options.net]
    options.image_size, options.batch = options.image_size or size, options.batch or batch
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes and draws; returns 1 if `MemoryBudget` failed."""
    options = parse_arguments(arguments)
    spec = _compare.Spec(options.net, options.image_size, options.batch, 1, options.steps, "cpu")
    chosen = ways(options.budgets)
    report = _results.provenance("benchmarks.compare", arguments, ["torch"])
    print("\n".join(f"{name}: {value}" for name, value in report.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(spec, chosen, options.runs, Path(folder))
        compared(chosen, found)
    printed = table(chosen, found)
    print(f"\n{printed}")
    title = f"{options.net}, {options.image_size} x {options.image_size}, batch {options.batch}"
    if options.json:
        report |= {"spec": dataclasses.asdict(spec), "runs": options.runs, "found": found}
        _results.write(options.json, report, {"ways": printed})
    if options.picture:
        draw(options.picture, title, chosen, found)
        print(f"Drawn: {options.picture}")
    return int(any("failed" in found[way.title] for way in chosen if way.key == "budget"))


if __name__ == "__main__":
    _child.leave_with(main)
