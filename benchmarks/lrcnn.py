"""Experiments of the LR-CNN paper: memory, largest batches and images, and time of training in strips.

    python -m benchmarks.lrcnn largest --net vgg16 --vary batch --memory 1GiB      Figures 6 and 8
    python -m benchmarks.lrcnn largest --net vgg16 --vary image --memory 1GiB      Figure 7
    python -m benchmarks.lrcnn rows --net vgg16 --image-size 1024                  Figures 9 and 10
    python -m benchmarks.lrcnn sharing --net vgg16                                 section V-D
    python -m benchmarks.lrcnn scale --net vgg16 --image-size 2048 --memory 1GiB   time per pixel of larger images
    python -m benchmarks.lrcnn where --net vgg16 --memory 500MiB                   time by kind of work

The methods are plain training, checkpoints, swaps, strips that recompute halos (OverL) or carry rows (2PS), both
between checkpoints (`-H`), and the budget search. `largest` finds the largest batch or image whose predicted peak is
within `--memory`, then trains with it, and reports the measured peak and the time.

Source: Z. Wang et al., "LR-CNN: Lightweight Row-centric Convolutional Neural Network Training for Memory Reduction"
(2024).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _lrcnn, _nets, _results

MIB = 2**20
NUMBERS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 20, 28)
"""Numbers of strips in `rows`; the paper has up to 14."""

Figures = dict[str, Any]


def largest(options: argparse.Namespace) -> Figures:
    """Find the largest batch or image of each method, and train with it."""
    results = {}
    for way in options.ways:
        kwargs = {"net": options.net, "vary": options.vary, "way": way, "memory": options.memory}
        kwargs |= {"image_size": options.image_size, "batch": options.batch, "rows": options.numbers or _lrcnn.ROWS}
        figures = _child.call_in_child("benchmarks._lrcnn:predict", kwargs, on_event=_teller(way))
        if figures["size"]:
            figures |= _trained(options, figures, figures["option"])
        print(f"{way}: {json.dumps(figures)}", flush=True)
        results[way] = figures
    return results


def rows(options: argparse.Namespace) -> Figures:
    """Measure time and memory over the number of strips between checkpoints, and of as many tiles."""
    ways: dict[str, dict[str, Any]] = {"plain": {}}
    for number in options.numbers or NUMBERS:
        for way in ("OverL-H", "2PS-H"):
            ways[f"{way} {number}"] = _lrcnn.options(way, options.net, options.image_size, rows=[number])[0]
        if tiles := _lrcnn.tiles(options.net, options.image_size, number):
            ways[f"tiles {number}"] = tiles
    runs: dict[str, list[Figures]] = {way: [] for way in ways}
    for _ in range(options.runs):
        for way, option in ways.items():  # In turns, so that other load on the machine affects all of them.
            runs[way].append(_trained(options, vars(options), option))
            print(f"{way}: {json.dumps(runs[way][-1])}", flush=True)
    return {way: {**middle(of_way, lambda run: run["seconds"]), "runs": of_way} for way, of_way in runs.items()}


def scale(options: argparse.Namespace) -> Figures:
    """Measure the time per pixel at one image size, at twice that size, and at the first size again.

    The budget is proportional to the number of pixels.
    """
    results = {}
    for name, factor in (("before", 1), ("twice", 2), ("after", 1)):
        size = {"image_size": factor * options.image_size, "batch": options.batch}
        figures = _trained(options, size, {"budget": factor**2 * options.memory})
        figures["per_megapixel"] = figures["seconds"] / (size["batch"] * size["image_size"] ** 2 / 1e6)
        results[name] = {**size, **figures}
        print(f"{size['image_size']} px: {json.dumps(figures)}", flush=True)
    return results


def where(options: argparse.Namespace) -> Figures:
    """Measure a step's time by kind of work, plain and within a budget, in the child with the median time."""
    kwargs = {"net": options.net, "image_size": options.image_size, "batch": options.batch, "steps": options.steps}
    ways = {"plain": {}, "rewritten": {"budget": options.memory}}
    target = "benchmarks._lrcnn:where_time_goes"
    runs: dict[str, list[Figures]] = {way: [] for way in ways}
    for _ in range(options.runs):
        for way, option in ways.items():
            runs[way].append(_child.call_in_child(target, {**kwargs, "option": option}))
            print(f"{way}: {json.dumps(runs[way][-1])}", flush=True)
    return {
        way: {"seconds": middle(of_way, lambda run: sum(run.values())), "runs": of_way} for way, of_way in runs.items()
    }


def middle(runs: Sequence[Figures], seconds: Callable[[Figures], float]) -> Figures:
    """Return the run with the median time; of an even number of runs, the faster of the two in the middle."""
    return sorted(runs, key=seconds)[(len(runs) - 1) // 2]


def sharing(options: argparse.Namespace) -> Figures:
    """Compare gradients of strips, with and without carried rows, with those of the original step."""
    kwargs = {"net": options.net, "image_size": options.image_size, "batch": options.batch}
    figures = _child.call_in_child("benchmarks._lrcnn:gradient_errors", {**kwargs, "rows": [2, 3, 4, 8, 16]})
    return {str(errors["rows"]): errors for errors in figures}


def _trained(options: argparse.Namespace, size: Figures, option: dict[str, Any]) -> Figures:
    kwargs = {"net": options.net, "image_size": size["image_size"], "batch": size["batch"], "option": option}
    return _child.call_in_child("benchmarks._lrcnn:train", {**kwargs, "steps": options.steps})


def _teller(way: str) -> Callable[[_child.Event], None]:
    return lambda event: print(f"{way}, {event['size']}: {'fits' if event['fits'] else 'too large'}", flush=True)


def table_of_largest(title: str, results: Figures) -> str:
    """Return a table with a line for each method."""
    plain = results.get("plain", {}).get("size")
    lines = [[title, "largest", "of plain", "predicted peak", "measured peak", "step", "per megapixel", "how"]]
    for way, figures in results.items():
        if not figures["size"]:
            lines.append([way, "none", *[""] * 6])
            continue
        pixels = figures["batch"] * figures["image_size"] ** 2 / 1e6
        lines.append(
            [
                way,
                str(figures["size"]),
                f"{figures['size'] / plain:.2f}" if plain else "",
                *(f"{figures[name] / MIB:.0f} MiB" for name in ("predicted", "measured")),
                f"{figures['seconds']:.2f} s",
                f"{figures['seconds'] / pixels:.2f} s",
                _shown(figures["option"]),
            ]
        )
    return _results.markdown(lines)


def _shown(option: dict[str, Any]) -> str:
    """Return the numbers of strips or tiles of an option as text."""
    if "segments" not in option:
        return ""
    return ", ".join(f"{end}: {number}" for _, end, number in option["segments"])


def table_of_rows(title: str, results: Figures) -> str:
    """Return a table with a line for each number of strips."""
    plain = results["plain"]
    lines = [[title, "peak", "of plain", "predicted", "step", "of plain", "shared", "overlapped", "rows that pay"]]
    for name, figures in results.items():
        lines.append(
            [
                name,
                f"{figures['measured'] / MIB:.0f} MiB",
                f"{figures['measured'] / plain['measured']:.2f}",
                f"{figures['predicted'] / MIB:.0f} MiB",
                f"{figures['seconds']:.2f} s",
                f"{figures['seconds'] / plain['seconds']:.2f}",
                *(f"{figures[key] / MIB:.1f} MiB" for key in ("shared_bytes", "overlapped_bytes")),
                ", ".join("-" if most is None else str(most) for most in figures["most_rows"]),
            ]
        )
    return _results.markdown(lines)


def table_of_scale(title: str, results: Figures) -> str:
    """Return a table with a line for each run."""
    once = sum(results[name]["per_megapixel"] for name in ("before", "after")) / 2
    lines = [[title, "measured peak", "step", "per megapixel", "over the mean of the smaller"]]
    for figures in results.values():
        lines.append(
            [
                f"{figures['image_size']} px",
                f"{figures['measured'] / MIB:.0f} MiB",
                f"{figures['seconds']:.2f} s",
                f"{figures['per_megapixel']:.2f} s",
                f"{figures['per_megapixel'] / once - 1:+.1%}",
            ]
        )
    return _results.markdown(lines)


def table_of_where(title: str, results: Figures) -> str:
    """Return a table with a line for each kind of work."""
    plain, changed = results["plain"]["seconds"], results["rewritten"]["seconds"]
    total = sum(plain.values())
    lines = [[title, "plain", "rewritten", "more, of the plain step"]]
    for group in (*sorted({*plain, *changed}), "all"):
        before, after = (sum(times.values()) if group == "all" else times.get(group, 0.0) for times in (plain, changed))
        lines.append([group, f"{before:.2f} s", f"{after:.2f} s", f"{(after - before) / total:+.1%}"])
    return _results.markdown(lines)


def table_of_sharing(title: str, results: Figures) -> str:
    """Return a table with a line for each number of strips."""
    lines = [[title, "error with sharing", "error without"]]
    lines += [[f"{n} rows", f"{errors['with']:.1e}", f"{errors['without']:.1e}"] for n, errors in results.items()]
    return _results.markdown(lines)


EXPERIMENTS = {
    "largest": (largest, table_of_largest),
    "rows": (rows, table_of_rows),
    "sharing": (sharing, table_of_sharing),
    "scale": (scale, table_of_scale),
    "where": (where, table_of_where),
}
SIZES = {"largest": 224, "rows": 1024, "sharing": 224, "scale": 2048, "where": 1024}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.lrcnn", __doc__)
    add = parser.add_argument
    add("experiment", choices=EXPERIMENTS)
    add("--net", choices=_lrcnn.LAYOUTS, default="vgg16", help="default: %(default)s")
    add("--vary", choices=("batch", "image"), default="batch", help="size that `largest` varies; default: %(default)s")
    ways_help = f"methods of `largest`, of {', '.join(_lrcnn.WAYS)}; default: all"
    add("--ways", nargs="+", choices=_lrcnn.WAYS, default=_lrcnn.WAYS, metavar="METHOD", help=ways_help)
    memory_help = "limit of `largest`, `scale` and `where`; default: %(default)s"
    add("--memory", type=_arguments.size, default="1GiB", metavar="SIZE", help=memory_help)
    add("--image-size", type=_arguments.positive, metavar="N", help=f"a multiple of 32; defaults: {SIZES}")
    add("--batch", type=_arguments.positive, default=1, help="batch size, unless it varies; default: %(default)s")
    numbers_help = f"numbers of strips; defaults: {_lrcnn.ROWS} for `largest`, {NUMBERS} for `rows`"
    add("--numbers", nargs="+", type=_arguments.positive, metavar="STRIPS", help=numbers_help)
    add("--steps", type=_arguments.positive, default=3, help="timed steps; default: %(default)s")
    runs_help = "processes per method of `rows` and `where`; the one with the median time is reported; default: 1"
    add("--runs", type=_arguments.positive, help=runs_help)
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    options = parser.parse_args(arguments)
    if options.runs and options.experiment not in ("rows", "where"):
        parser.error(f"--runs is for `rows` and `where`. Received: {options.experiment} --runs {options.runs}")
    options.runs = options.runs or 1
    options.image_size = options.image_size or SIZES[options.experiment]
    if options.image_size % _lrcnn.IMAGE_STEP:
        parser.error(f"--image-size must be a multiple of {_lrcnn.IMAGE_STEP}. Received: {options.image_size}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an experiment and print its table."""
    options = parse_arguments(arguments)
    run, table = EXPERIMENTS[options.experiment]
    results = run(options)
    size = f"{options.image_size} px, batch {options.batch}"
    if options.experiment == "largest":
        size = f"{options.image_size} px, batch" if options.vary == "batch" else f"batch {options.batch}, image"
        size = f"{options.memory / MIB:.0f} MiB, {size}"
    printed = table(f"{_nets.TASKS[options.net].title}, {size}", results)
    print(f"\n{printed}")
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        report = {**_results.provenance("benchmarks.lrcnn", arguments), "options": settings, "results": results}
        _results.write(options.json, report, {options.experiment: printed})
    return 0


if __name__ == "__main__":
    _child.leave_with(main)
