"""Memory, time and transferred bytes of swaps to disk, over the parameters of TFLMS.

    python -m benchmarks.lms [--net resnet50|unet3d] [--runs 1] [--plot lms.png] [--json lms.json]
    python -m benchmarks.lms --grid

Cells are configurations of training ResNet-50 or a 3-D U-Net. They vary number of tensors, lower bound, strategy,
fused swap-ins, branches, page cache and inter-op threads. `--grid` measures each number of tensors with each lower
bound. For cells without page cache, the program prints whether a step takes at most the plain time plus 1.2 times the
transfer time at the disk's measured speed. The exit code is 1 if the training of a cell fails.

Source: Figures 6 to 9 of Le et al., "TFLMS: Large Model Support in TensorFlow by Graph Rewriting" (2018).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _lms_report, _meter, _nets, _results
from benchmarks._lms_report import Cell

ONE_THREAD = {"TF_NUM_INTEROP_THREADS": "1"}
GRID_BOUNDS = (1, 5, 20)


@dataclasses.dataclass(frozen=True)
class Variation:
    """Values of parameters that suit a network.

    Attributes:
        some: Number of tensors of the cell that swaps some of them.
        enough: Number of tensors that, with the strategy of least memory, reduce memory to about a third.
        thresholds: Values of `branch_threshold`. In a BatchNorm in training mode, the last consumer of a tensor comes
            up to 10 levels γ after the tensor, so that 0 also swaps tensors that are needed soon. The shortcuts of
            ResNet-50 span 31 and 45 levels, the skip connections of the U-Net 30, 86 and 142.
        grid: Numbers of tensors in the grid; -1 for all.
    """

    some: int
    enough: int
    thresholds: tuple[int, ...]
    grid: tuple[int, ...]


VARIATIONS = {
    "resnet50": Variation(30, 60, (20,), (15, 30, 60, -1)),
    "unet3d": Variation(10, 20, (0, 20, 100), (5, 10, 20, -1)),
}


def usual_cells(net: str) -> list[Cell]:
    """Return the cells that are measured by default."""
    variation = VARIATIONS[net]
    enough = {"n_tensors": variation.enough, "ctrld_strategy": "direct_order", "fuse_swapins": True}
    return [
        Cell(None),
        Cell({}),
        Cell({"lb": 5}),
        Cell({"lb": 20}),
        Cell({"ctrld_strategy": "direct_order"}),
        Cell({"ctrld_strategy": "direct_order", "lb": 20}),
        Cell({"n_tensors": variation.some}),
        Cell({"fuse_swapins": True}),
        Cell(enough),
        *(Cell({"swap_branches": True, "branch_threshold": least}) for least in variation.thresholds),
        Cell({"page_cache": False}),
        Cell(None, one_thread=True),
        Cell({}, one_thread=True),
        Cell(enough, one_thread=True),
    ]


def grid_cells(net: str) -> list[Cell]:
    """Return the cells of Figures 6 and 7 of the paper: each number of tensors with each lower bound."""
    return [
        Cell(None),
        *(Cell({"n_tensors": count, "lb": lb}) for count in VARIATIONS[net].grid for lb in GRID_BOUNDS),
    ]


def chosen_cells(net: str, names: Sequence[str], grid: bool) -> list[Cell]:
    """Return the cells of a command line, with the plain cells that they are compared with.

    Raises:
        ValueError: If a name belongs to no cell.
    """
    known = {cell.name: cell for cell in (*usual_cells(net), *grid_cells(net))}
    unknown = sorted(set(names) - known.keys())
    if unknown:
        raise ValueError(f"--cells names {unknown}; known are {list(known)}")
    if not names and not grid:
        return usual_cells(net)
    wanted = {*names, *(cell.name for cell in grid_cells(net) if grid)}
    wanted |= {known[name].base for name in wanted}
    return [cell for name, cell in known.items() if name in wanted]


# ----------------------------------------------------------------------------------------------------------
# In the child.


def measure(
    *,
    what: str,
    net: str,
    params: dict[str, Any] | None,
    size: int,
    batch: int,
    warmup: int,
    steps: int,
    emit: _child.Emit,
) -> dict[str, Any]:
    """Train; return step times for "time", the growth of RSS for "memory", and figures of the swaps."""
    import keras

    import tflms_sft

    task = _nets.TASKS[net]
    model = task.compiled(size)
    images, labels = task.noise(size, batch)
    swap = None if params is None else tflms_sft.LMS(**{"tier": "disk", "verbose": 0, **params})
    meter = _meter.StepMeter(warmup, "cpu", emit)
    hooks = keras.callbacks.LambdaCallback(on_train_batch_begin=meter.begin, on_train_batch_end=meter.end)
    meter.start()
    model.fit(
        images,
        labels,
        batch_size=batch,
        epochs=warmup + steps,
        callbacks=[*filter(None, [swap]), hooks],
        shuffle=False,
        verbose=0,
    )
    figures: dict[str, Any] = {"losses": meter.losses}
    if what == "memory":
        figures["net_rss_bytes"] = [max(meter.net_rss)]
    else:
        figures["step_seconds"] = meter.seconds
    if swap is not None:
        figures["tensors"] = len(swap.plan.swaps)
        figures["swapped_bytes"] = swap.plan.swapped_bytes
        figures["read_bytes"] = sum(s.num_bytes * len(s.controls) for s in swap.plan.swaps)
        figures["predicted_peak_bytes"] = swap.plan.predicted.peak_bytes
    return figures


# ----------------------------------------------------------------------------------------------------------
# In the parent.


def disk_bandwidth(directory: str, nbytes: int = 2**29) -> tuple[float, float]:
    """Return the bytes per second that the disk writes and reads sequentially, past the page cache."""
    block = bytearray(os.urandom(2**24))
    starts = range(0, nbytes, len(block))
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        descriptor = file.fileno()
        began = time.perf_counter()
        for start in starts:
            os.pwrite(descriptor, block, start)
        os.fdatasync(descriptor)
        written = time.perf_counter() - began
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # Otherwise reads come from the page cache.
        began = time.perf_counter()
        for start in starts:
            os.preadv(descriptor, [block], start)
        return nbytes / written, nbytes / (time.perf_counter() - began)


def run(cells: Sequence[Cell], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the figures of each cell, joined over all runs; a failed cell has the reason, and is not run again."""
    results: dict[str, dict[str, Any]] = {cell.name: {} for cell in cells}
    for index in range(options.runs):
        for cell in cells:
            for what in ("time", "memory"):
                figures = results[cell.name]
                if "failed" in figures:
                    continue
                outcome = _measured(cell, what, options)
                progress = "done" if outcome.ok else outcome.how_it_ended()
                print(f"{index + 1}/{options.runs} {cell.name}: {what} {progress}", flush=True)
                if outcome.ok:
                    join(figures, outcome.result)
                else:
                    figures["failed"] = outcome.how_it_ended()
                    print(outcome.log_tail(), file=sys.stderr, flush=True)
    return results


def _measured(cell: Cell, what: str, options: argparse.Namespace) -> _child.Outcome:
    kwargs = {"what": what, "net": options.net, "params": cell.params, "size": options.image_size}
    kwargs |= {"batch": options.batch, "warmup": options.warmup, "steps": options.steps}
    env = {**(ONE_THREAD if cell.one_thread else {}), **(_child.TRUE_RSS_ENV if what == "memory" else {})}
    return _child.run_child("benchmarks.lms:measure", kwargs, env=env)


def join(figures: dict[str, Any], result: dict[str, Any]) -> None:
    """Add the result of one child to the figures of a cell: collect times and sizes, and set all other figures."""
    for key in ("step_seconds", "net_rss_bytes"):
        figures[key] = figures.get(key, []) + result.pop(key, [])
    figures |= result


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; `options.chosen` holds the cells."""
    parser = _arguments.parser("benchmarks.lms", __doc__)
    add, positive = parser.add_argument, _arguments.positive
    add("--net", choices=_nets.SWAPPED, default="resnet50")
    add("--image-size", type=positive, metavar="N", help="height, width and depth; default: that of the network")
    add("--batch", type=positive, help="batch size; default: that of the network")
    runs_help = "child processes per cell and kind of measurement; default: %(default)s"
    add("--runs", type=positive, default=1, help=runs_help)
    add("--warmup", type=positive, default=1, help="steps before the counted ones; default: %(default)s")
    add("--steps", type=positive, default=3, help="counted steps of each child; default: %(default)s")
    add("--cells", nargs="+", default=[], metavar="NAME", help="names of cells, whose plain cells are added")
    add("--grid", action="store_true", help="cells of the grid instead of the default cells")
    add("--plot", type=Path, metavar="FILE.png", help="picture of memory and time; needs matplotlib")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    options = parser.parse_args(arguments)
    task = _nets.TASKS[options.net]
    options.image_size = options.image_size or task.image_size
    options.batch = options.batch or task.batch
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    try:
        options.chosen = chosen_cells(options.net, options.cells, options.grid)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the figures."""
    options = parse_arguments(arguments)
    cells, directory = options.chosen, tempfile.gettempdir()
    before = disk_bandwidth(directory)
    results = run(cells, options)
    disks = [before, disk_bandwidth(directory)]
    write, read = (statistics.mean(speeds) for speeds in zip(*disks, strict=True))
    title = _nets.TASKS[options.net].title
    print(f"\n{title}, {options.image_size} px, batch {options.batch}; medians of {options.steps} step(s) ", end="")
    print(f"in each of {options.runs} run(s)")
    print(f"disk of {directory}, before and after, past the page cache: {_lms_report.speeds(disks)}\n")
    printed = _lms_report.table(title, cells, results)
    print(printed)
    print(_lms_report.bounds(cells, results, write, read))
    if options.json:
        settings = {name: getattr(options, name) for name in ("net", "image_size", "batch", "runs", "warmup", "steps")}
        report = {**_results.provenance("benchmarks.lms", arguments), "options": settings, "disk": disks}
        _results.write(options.json, {**report, "cells": results}, {"cells": printed})
    if options.plot:
        _lms_report.draw(f"{title}, {options.image_size} px, batch {options.batch}", cells, results, options.plot)
    return 1 if any("failed" in figures for figures in results.values()) else 0


if __name__ == "__main__":
    _child.leave_with(main)
