"""Memory and time of training steps that read their image from a file, by tiles.

    python -m benchmarks.sources [--lines NAME ...] [--folder DIR] [--results FILE]

- `1GB`, `4GB`, `16GB`: one step on an image of this size as float32, within one budget. A step passes if the memory
  beyond that of the idle process is at most the budget and two tiles.
- `normalised 0.2GB`, `normalised 0.8GB`, `normalised 3GB`: one step of a residual network with batch normalisation and
  a class for each slide. Tensors between its tile loops lie in files. The criterion is the same.
- `vgg16 2048` to `vgg16 20480`: one step of VGG-16 within 10 GiB, or within a quarter of the memory that the original
  step needs. The criterion is the same. A pixel takes at most 1.1 times its time at 2,048 px, up to 10,240 px.
- `time`: steps on an image in a file and on the same image in memory, within one budget. They run alternately in one
  process, and the ratio is the median over pairs. It passes at 1.1x or less.

The network of the first lines and of the last one is a U-Net with two levels, 8 filters, an accuracy and 4 classes per
pixel. Images and masks are zarr arrays in chunks of 512 pixels a side. Each line is stored when it ends. The exit code
is 1 if a line failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _results

Figures = dict[str, Any]

MIB, GIB = 2**20, 2**30
BUDGETS = {"unet": 256 * MIB, "residual": 128 * MIB, "vgg16": 10 * GIB}
"""Largest budget of each network."""
SIZES = {"1GB": 9216, "4GB": 18432, "16GB": 36864}
"""Height and width of the images, by their bytes as float32."""
NORMALISED_SIZES = {"normalised 0.2GB": 4096, "normalised 0.8GB": 8192, "normalised 3GB": 16384}
VGG_SIZES = {f"vgg16 {size}": size for size in (2048, 4096, 10240, 20480)}
ALL_SIZES = {**SIZES, **NORMALISED_SIZES, **VGG_SIZES}
FLAT_UP_TO = 10240
"""Image size up to which the time per pixel is compared with that of the smallest image."""
TIMED_SIZE = 4096
MAX_RATIO = 1.1
LINES = (*ALL_SIZES, "time")


def measured(function: str, **kwargs: Any) -> Any:
    """Return the result of a measurement in a child process whose RSS follows the tensors in use."""
    environment = {**_child.TRUE_RSS_ENV, "TFLMS_SFT_PLAN_CACHE": "off"}
    return _child.call_in_child(f"benchmarks._source_steps:{function}", kwargs, env=environment)


def memory_line(name: str, folder: str, lines: Figures) -> Figures:
    """Measure one step on a large image, and compare its time with that of an earlier line."""
    size, net, smallest = ALL_SIZES[name], net_of(name), next(iter(VGG_SIZES))
    is_compared = net == "vgg16" and name != smallest and size <= FLAT_UP_TO
    if is_compared and smallest not in lines:
        raise SystemExit(f'Measure the line "{smallest}" first: "{name}" is compared with it.')
    figures = measured("memory", folder=folder, size=size, net=net, budget=BUDGETS[net])
    limit = figures["budget"] + 2 * figures["tile_bytes"]
    criteria = {"memory within the budget and two tiles": figures["rss_bytes"] <= limit}
    if is_compared:
        criteria[f"at most {MAX_RATIO:g}x the time per pixel"] = (
            figures["seconds"] / size**2 <= MAX_RATIO * lines[smallest]["seconds"] / ALL_SIZES[smallest] ** 2
        )
    return {"size": size, **figures, "criteria": criteria}


def net_of(name: str) -> str:
    """Return the network of a line."""
    return "vgg16" if name in VGG_SIZES else "residual" if name in NORMALISED_SIZES else "unet"


def time_line(folder: str, runs: int) -> Figures:
    """Compare an image in a file with the same image in memory."""
    figures = measured("times", folder=folder, size=TIMED_SIZE, budget=BUDGETS["unet"], runs=runs)
    first, other = figures["losses"].values()
    criteria = {
        f"at most {MAX_RATIO:g}x the time": figures["ratio"] <= MAX_RATIO,
        "equal losses": all(abs(a - b) <= 1e-5 * abs(a) for a, b in zip(first, other, strict=True)),
    }
    return {"size": TIMED_SIZE, **figures, "criteria": criteria}


def line(name: str, parent: str | None, runs: int, lines: Figures) -> Figures:
    """Write the image of a line, measure, and remove the image."""
    folder = tempfile.mkdtemp(dir=parent, prefix="tflms-sft-images-")
    try:
        measured("write", folder=folder, size=ALL_SIZES.get(name, TIMED_SIZE))
        return time_line(folder, runs) if name == "time" else memory_line(name, folder, lines)
    finally:
        shutil.rmtree(folder)


def status(figures: Figures) -> str:
    """Return "passed", or "FAILED" if a criterion does not hold."""
    return "passed" if all(figures["criteria"].values()) else "FAILED"


def memory_table(stored: Figures, names: Iterable[str] = SIZES) -> str:
    """Return the Markdown table of the memory of steps on large images."""
    title = ["image", "as float32", "budget", "tiles", "plain peak, predicted", "in files", "peak, predicted"]
    rows = [[*title, "memory, measured", "time per million pixels", "passed"]]
    for name in names:
        figures = stored.get("lines", {}).get(name)
        if figures is None:
            continue
        size = figures["size"]
        rows.append(
            [
                f"{size:,} px",
                f"{size * size * 12 / GIB:.1f} GiB",
                f"{figures['budget'] / MIB:,.0f} MiB",
                figures["headline"].split(" in ")[-1].split(", predicted")[0],
                f"{figures['original_bytes'] / GIB:,.0f} GiB",
                f"{figures.get('file_bytes', 0) / GIB:,.1f} GiB",
                *(f"{figures[key] / MIB:,.0f} MiB" for key in ("predicted_bytes", "rss_bytes")),
                f"{figures['seconds'] / size / size * 1e6:.2f} s",
                "yes" if status(figures) == "passed" else "no",
            ]
        )
    return _results.markdown(rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.sources", __doc__)
    add = parser.add_argument
    add("--lines", nargs="+", choices=LINES, metavar="NAME", help="measure these again; default: what is missing")
    add("--runs", type=_arguments.positive, default=5, help="counted pairs of runs; default: %(default)s")
    add(
        "--folder",
        metavar="DIR",
        help="folder for images and results of tile loops, 60 GB at most; default: that for temporary files",
    )
    add("--results", type=Path, metavar="FILE", default=_results.RESULTS / "sources.json")
    return parser.parse_args(arguments)


TABLES = {
    "memory": memory_table,
    "normalised": functools.partial(memory_table, names=NORMALISED_SIZES),
    "vgg16": functools.partial(memory_table, names=VGG_SIZES),
}
"""Functions of the stored results that return a Markdown table, by its name on the page."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, store and print; return 1 if a line failed."""
    options = parse_arguments(arguments)
    path: Path = options.results
    stored: Figures = json.loads(path.read_text()) if path.exists() else {}
    lines: dict[str, Figures] = stored.setdefault("lines", {})
    stored |= _results.provenance("benchmarks.sources", arguments)
    chosen = options.lines or [name for name in LINES if name not in lines]
    for name in chosen:
        lines[name] = line(name, options.folder, options.runs, lines)
        _results.write(path, stored, {table: text(stored) for table, text in TABLES.items()})
        shown = {key: value for key, value in lines[name].items() if key not in ("losses", "seconds", "criteria")}
        failed = [criterion for criterion, holds in lines[name]["criteria"].items() if not holds]
        print(f"{status(lines[name]):8}  {name}: {shown} {failed or ''}", flush=True)
    return 1 if any(status(lines[name]) == "FAILED" for name in chosen) else 0


if __name__ == "__main__":
    _child.leave_with(main)
