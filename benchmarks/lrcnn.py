"""The experiments of LR-CNN: the largest batches and images with rows, and their time.

    python -m benchmarks.lrcnn largest --net vgg16 --vary batch --memory 1GiB      its Figures 6 and 8
    python -m benchmarks.lrcnn largest --net vgg16 --vary image --memory 1GiB      its Figure 7
    python -m benchmarks.lrcnn rows --net vgg16 --image-size 1024                  its Figures 9 and 10
    python -m benchmarks.lrcnn sharing --net vgg16                                 its section V-D
    python -m benchmarks.lrcnn scale --net vgg16 --image-size 2048 --memory 1GiB   time per pixel of larger images
    python -m benchmarks.lrcnn where --net vgg16 --memory 500MiB                   what the time goes into

After Z. Wang et al., "LR-CNN: Lightweight Row-centric Convolutional Neural Network Training for Memory Reduction"
(2024). `largest` looks for the largest batch or image whose predicted peak is within `--memory`, for the plain step,
checkpoints, offloading, rows (overlapping, and handed on), the same between checkpoints, and the budget search. Then it
trains each largest one in a process of its own, and reports the peak that was measured and the time. README.md beside
this file says what the figures mean.
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
"""Numbers of rows that `rows` tries; the paper goes to 14."""

Found = dict[str, Any]


def largest(options: argparse.Namespace) -> Found:
    """The largest batch or image of each way to train."""
    results = {}
    for way in options.ways:
        kwargs = {"net": options.net, "vary": options.vary, "way": way, "memory": options.memory}
        kwargs |= {"image_size": options.image_size, "batch": options.batch, "rows": options.numbers or _lrcnn.ROWS}
        found = _child.call_in_child("benchmarks._lrcnn:predict", kwargs, on_event=_teller(way))
        if found["size"]:
            found |= _trained(options, found, found["option"])
        print(f"{way}: {json.dumps(found)}", flush=True)
        results[way] = found
    return results


def rows(options: argparse.Namespace) -> Found:
    """Time and memory over the number of rows between checkpoints, beside as many tiles that split both sides."""
    ways: dict[str, dict[str, Any]] = {"plain": {}}
    for number in options.numbers or NUMBERS:
        for way in ("OverL-H", "2PS-H"):
            ways[f"{way} {number}"] = _lrcnn.options(way, options.net, options.image_size, rows=[number])[0]
        if tiles := _lrcnn.tiles(options.net, options.image_size, number):
            ways[f"tiles {number}"] = tiles
    runs: dict[str, list[Found]] = {way: [] for way in ways}
    for _ in range(options.runs):
        for way, option in ways.items():  # In turns, so that what else the machine does meets all of them.
            runs[way].append(_trained(options, vars(options), option))
            print(f"{way}: {json.dumps(runs[way][-1])}", flush=True)
    return {way: {**middle(found, lambda run: run["seconds"]), "runs": found} for way, found in runs.items()}


def scale(options: argparse.Namespace) -> Found:
    """Time per pixel of one size and of twice as much a side, with a budget for each pixel; the smaller one twice."""
    results = {}
    for name, factor in (("before", 1), ("twice", 2), ("after", 1)):
        size = {"image_size": factor * options.image_size, "batch": options.batch}
        found = _trained(options, size, {"budget": factor**2 * options.memory})
        found["per_megapixel"] = found["seconds"] / (size["batch"] * size["image_size"] ** 2 / 1e6)
        results[name] = {**size, **found}
        print(f"{size['image_size']} px: {json.dumps(found)}", flush=True)
    return results


def where(options: argparse.Namespace) -> Found:
    """Measure a step's time by kind of work, plain and within a budget, in the child with the median time."""
    kwargs = {"net": options.net, "image_size": options.image_size, "batch": options.batch, "steps": options.steps}
    ways = {"plain": {}, "rewritten": {"budget": options.memory}}
    target = "benchmarks._lrcnn:where_time_goes"
    runs: dict[str, list[Found]] = {way: [] for way in ways}
    for _ in range(options.runs):
        for way, option in ways.items():
            runs[way].append(_child.call_in_child(target, {**kwargs, "option": option}))
            print(f"{way}: {json.dumps(runs[way][-1])}", flush=True)
    return {
        way: {"seconds": middle(found, lambda run: sum(run.values())), "runs": found} for way, found in runs.items()
    }


def middle(runs: Sequence[Found], seconds: Callable[[Found], float]) -> Found:
    """Returns the one with the median time; of an even number the faster one of two."""
    return sorted(runs, key=seconds)[(len(runs) - 1) // 2]


def sharing(options: argparse.Namespace) -> Found:
    """Gradients of rows that share nothing."""
    kwargs = {"net": options.net, "image_size": options.image_size, "batch": options.batch}
    found = _child.call_in_child("benchmarks._lrcnn:gradient_errors", {**kwargs, "rows": [2, 3, 4, 8, 16]})
    return {str(one["rows"]): one for one in found}


def _trained(options: argparse.Namespace, size: Found, option: dict[str, Any]) -> Found:
    kwargs = {"net": options.net, "image_size": size["image_size"], "batch": size["batch"], "option": option}
    return _child.call_in_child("benchmarks._lrcnn:train", {**kwargs, "steps": options.steps})


def _teller(way: str) -> Callable[[_child.Event], None]:
    return lambda event: print(f"{way}, {event['size']}: {'fits' if event['fits'] else 'too large'}", flush=True)


def table_of_largest(title: str, results: Found) -> str:
    """A line for each way to train."""
    plain = results.get("plain", {}).get("size")
    lines = [[title, "largest", "of plain", "predicted peak", "measured peak", "step", "per megapixel", "how"]]
    for way, found in results.items():
        if not found["size"]:
            lines.append([way, "none", *[""] * 6])
            continue
        pixels = found["batch"] * found["image_size"] ** 2 / 1e6
        lines.append(
            [
                way,
                str(found["size"]),
                f"{found['size'] / plain:.2f}" if plain else "",
                *(f"{found[name] / MIB:.0f} MiB" for name in ("predicted", "measured")),
                f"{found['seconds']:.2f} s",
                f"{found['seconds'] / pixels:.2f} s",
                _shown(found["option"]),
            ]
        )
    return _results.markdown(lines)


def _shown(option: dict[str, Any]) -> str:
    """An option in few words."""
    if "segments" not in option:
        return ""
    return ", ".join(f"{end}: {number}" for _, end, number in option["segments"])


def table_of_rows(title: str, results: Found) -> str:
    """A line for each number of rows."""
    plain = results["plain"]
    lines = [[title, "peak", "of plain", "predicted", "step", "of plain", "shared", "overlapped", "rows that pay"]]
    for name, found in results.items():
        lines.append(
            [
                name,
                f"{found['measured'] / MIB:.0f} MiB",
                f"{found['measured'] / plain['measured']:.2f}",
                f"{found['predicted'] / MIB:.0f} MiB",
                f"{found['seconds']:.2f} s",
                f"{found['seconds'] / plain['seconds']:.2f}",
                *(f"{found[key] / MIB:.1f} MiB" for key in ("shared_bytes", "overlapped_bytes")),
                ", ".join("-" if most is None else str(most) for most in found["most_rows"]),
            ]
        )
    return _results.markdown(lines)


def table_of_scale(title: str, results: Found) -> str:
    """A line for each run."""
    once = sum(results[name]["per_megapixel"] for name in ("before", "after")) / 2
    lines = [[title, "measured peak", "step", "per megapixel", "over the mean of the smaller"]]
    for found in results.values():
        lines.append(
            [
                f"{found['image_size']} px",
                f"{found['measured'] / MIB:.0f} MiB",
                f"{found['seconds']:.2f} s",
                f"{found['per_megapixel']:.2f} s",
                f"{found['per_megapixel'] / once - 1:+.1%}",
            ]
        )
    return _results.markdown(lines)


def table_of_where(title: str, results: Found) -> str:
    """A line for each kind of work."""
    plain, changed = results["plain"]["seconds"], results["rewritten"]["seconds"]
    total = sum(plain.values())
    lines = [[title, "plain", "rewritten", "more, of the plain step"]]
    for group in (*sorted({*plain, *changed}), "all"):
        before, after = (sum(found.values()) if group == "all" else found.get(group, 0.0) for found in (plain, changed))
        lines.append([group, f"{before:.2f} s", f"{after:.2f} s", f"{(after - before) / total:+.1%}"])
    return _results.markdown(lines)


def table_of_sharing(title: str, results: Found) -> str:
    """A line for each number of rows."""
    lines = [[title, "error with sharing", "error without"]]
    lines += [[f"{n} rows", f"{one['with']:.1e}", f"{one['without']:.1e}"] for n, one in results.items()]
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
    """Parses the command line."""
    parser = _arguments.parser("benchmarks.lrcnn", __doc__)
    add = parser.add_argument
    add("experiment", choices=EXPERIMENTS)
    add("--net", choices=_lrcnn.LAYOUTS, default="vgg16", help="default: %(default)s")
    add("--vary", choices=("batch", "image"), default="batch", help="of `largest`; default: %(default)s")
    add("--ways", nargs="+", choices=_lrcnn.WAYS, default=_lrcnn.WAYS, metavar="WAY", help=f"of {_lrcnn.WAYS}")
    memory_help = "of `largest`, `scale` and `where`; default: %(default)s"
    add("--memory", type=_arguments.size, default="1GiB", metavar="SIZE", help=memory_help)
    add("--image-size", type=_arguments.positive, metavar="N", help=f"a multiple of 32; defaults: {SIZES}")
    add("--batch", type=_arguments.positive, default=1, help="where it does not vary; default: %(default)s")
    numbers_help = f"numbers of rows that are tried; defaults: {_lrcnn.ROWS} for `largest`, {NUMBERS} for `rows`"
    add("--numbers", nargs="+", type=_arguments.positive, metavar="ROWS", help=numbers_help)
    add("--steps", type=_arguments.positive, default=3, help="steps that are timed; default: %(default)s")
    runs_help = "processes for each way of `rows` and `where`, of which that with the median time is told; default: 1"
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
    """Runs one experiment and prints its table."""
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
        asked = {name: value for name, value in vars(options).items() if name != "json"}
        report = {**_results.provenance("benchmarks.lrcnn", arguments), "options": asked, "results": results}
        _results.write(options.json, report, {options.experiment: printed})
    return 0


if __name__ == "__main__":
    _child.leave_with(main)
