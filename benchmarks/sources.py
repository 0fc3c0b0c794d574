"""Memory and time of training steps that read their image from a file, by tiles.

    python -m benchmarks.sources [--lines NAME ...] [--folder DIR] [--results FILE]

- `1GB`, `4GB`, `16GB`: one step on an image of this size as float32, within one budget. A step passes if the memory
  beyond that of the idle process is at most the budget and two tiles.
- `normalised 0.2GB`, `normalised 0.8GB`, `normalised 3GB`: one step of a residual network with batch normalisation and
  a class for each slide. Tensors between its tile loops lie in files. The criterion is the same.
- `resnet50 8192`: two steps of ResNet-50, 768 MiB for 67 million pixels, which is 12 GiB for an image of 32,768 px.
  Tensors between its tile loops lie in files. The criterion is the same.
- `vgg16 2048` to `vgg16 20480`: one step of VGG-16 within 10 GiB, or within a quarter of the memory that the original
  step needs. The criterion is the same. Up to 10,240 px, a pixel takes at most 1.1 times its time at 2,048 px. The
  speed of a shared machine varies: every two minutes the process of the step is stopped, and another process runs a
  step at 2,048 px.
- `time`: steps on an image in a file and on the same image in memory, within one budget. They run alternately in one
  process, and the ratio is the median over pairs. It passes at 1.1x or less.

The network of the first lines and of the last one is a U-Net with two levels, 8 filters, an accuracy and 4 classes per
pixel. Images and masks are zarr arrays in chunks of 512 pixels a side. Each line is stored when it ends. The exit code
is 1 if a line failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _alternation, _arguments, _child, _results

Figures = dict[str, Any]

MIB, GIB = 2**20, 2**30
BUDGETS = {"unet": 256 * MIB, "residual": 128 * MIB, "resnet50": 768 * MIB, "vgg16": 10 * GIB}
"""Largest budget of each network."""
SIZES = {
    "unet": {"1GB": 9216, "4GB": 18432, "16GB": 36864},
    "residual": {"normalised 0.2GB": 4096, "normalised 0.8GB": 8192, "normalised 3GB": 16384},
    "resnet50": {"resnet50 8192": 8192},
    "vgg16": {f"vgg16 {size}": size for size in (2048, 4096, 10240, 20480)},
}
"""Lines of each network: height and width of the images. `1GB` is the size of an image as float32."""
NETS = {name: net for net, sizes in SIZES.items() for name in sizes}
"""Network of each line."""
FLAT_UP_TO = 10240
"""Image size up to which the time per pixel is compared with that of the smallest image."""
SMALLEST_VGG = 2048
TIMED_SIZE = 4096
MAX_RATIO = 1.1
LINES = (*NETS, "time")


def measured(function: str, env: Mapping[str, str] = _child.TRUE_RSS_ENV, **kwargs: Any) -> Any:
    """Return the result of a measurement in a child process whose RSS by default follows the tensors in use."""
    options = {"on_event": kwargs.pop("on_event", None), "env": {**env, "TFLMS_SFT_PLAN_CACHE": "off"}}
    return _child.call_in_child(f"benchmarks._source_steps:{function}", kwargs, **options)


def memory_line(name: str, folder: str) -> Figures:
    """Measure one step on a large image. VGG-16 runs with TensorFlow's default allocator."""
    net = NETS[name]
    size = SIZES[net][name]
    env = {} if net == "vgg16" else _child.TRUE_RSS_ENV
    long = functools.partial(measured, "memory", env, folder=folder, size=size, net=net, budget=BUDGETS[net])
    if net == "vgg16" and SMALLEST_VGG < size <= FLAT_UP_TO:
        return {"size": size, **compared_with_small(long, size, folder)}
    figures = long()
    figures["seconds"] = figures.pop("ended") - figures.pop("began")
    return {"size": size, **figures, "criteria": memory_criterion(figures)}


def compared_with_small(long: Callable[..., Figures], size: int, folder: str) -> Figures:
    """Measure a step of VGG-16 alternately with one on the smallest image; compare their time per pixel.

    The mean speed of the small steps counts, because the long step advances with the speed of each moment.
    """
    with image(folder, SMALLEST_VGG) as small:
        arguments = {"folder": small, "size": SMALLEST_VGG, "net": "vgg16", "budget": BUDGETS["vgg16"]}
        figures = _alternation.alternate(
            lambda event: long(on_event=event),
            lambda event: measured("repeat", {}, on_event=event, **arguments),
            small,
        )
    ratio = figures["seconds"] / size**2 / (statistics.harmonic_mean(figures["small_seconds"]) / SMALLEST_VGG**2)
    criteria = {**memory_criterion(figures), f"at most {MAX_RATIO:g}x the time per pixel": ratio <= MAX_RATIO}
    return {**figures, "criteria": criteria, "time_ratio": ratio}


def memory_criterion(figures: Figures) -> dict[str, bool]:
    """Return whether a step stays within its budget and two tiles."""
    limit = figures["budget"] + 2 * figures["tile_bytes"]
    return {"memory within the budget and two tiles": figures["rss_bytes"] <= limit}


def time_line(folder: str, runs: int) -> Figures:
    """Compare an image in a file with the same image in memory."""
    figures = measured("times", folder=folder, size=TIMED_SIZE, budget=BUDGETS["unet"], runs=runs)
    first, other = figures["losses"].values()
    criteria = {
        f"at most {MAX_RATIO:g}x the time": figures["ratio"] <= MAX_RATIO,
        "equal losses": all(abs(a - b) <= 1e-5 * abs(a) for a, b in zip(first, other, strict=True)),
    }
    return {"size": TIMED_SIZE, **figures, "criteria": criteria}


@contextlib.contextmanager
def image(parent: str | None, size: int) -> Iterator[str]:
    """Write an image and its mask to a folder; delete it afterwards."""
    folder = tempfile.mkdtemp(dir=parent, prefix="tflms-sft-images-")
    try:
        measured("write", folder=folder, size=size)
        yield folder
    finally:
        shutil.rmtree(folder)


def line(name: str, parent: str | None, runs: int) -> Figures:
    """Write the image of a line, measure, and remove the image."""
    with image(parent, SIZES[NETS[name]][name] if name in NETS else TIMED_SIZE) as folder:
        return time_line(folder, runs) if name == "time" else memory_line(name, folder)


def status(figures: Figures) -> str:
    """Return "passed", or "FAILED" if a criterion does not hold."""
    return "passed" if all(figures["criteria"].values()) else "FAILED"


def memory_table(stored: Figures, net: str = "unet") -> str:
    """Return the Markdown table of the memory of a network's steps on large images."""
    title = ["image", "as float32", "budget", "tiles", "plain peak, predicted", "in files", "peak, predicted"]
    ratio = ["over 2,048 px"] if net == "vgg16" else []
    rows = [[*title, "memory, measured", "time per million pixels", *ratio, "passed"]]
    for name in SIZES[net]:
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
                *([f"{figures['time_ratio']:.2f}x" if "time_ratio" in figures else "-"] if ratio else []),
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
    "normalised": functools.partial(memory_table, net="residual"),
    "resnet50": functools.partial(memory_table, net="resnet50"),
    "vgg16": functools.partial(memory_table, net="vgg16"),
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
        lines[name] = line(name, options.folder, options.runs)
        _results.write(path, stored, {table: text(stored) for table, text in TABLES.items()})
        shown = {key: value for key, value in lines[name].items() if key not in ("losses", "seconds", "criteria")}
        failed = [criterion for criterion, holds in lines[name]["criteria"].items() if not holds]
        print(f"{status(lines[name]):8}  {name}: {shown} {failed or ''}", flush=True)
    return 1 if any(status(lines[name]) == "FAILED" for name in chosen) else 0


if __name__ == "__main__":
    _child.leave_with(main)
