"""Swapping to disk: memory, time and bytes moved over the parameters of TFLMS.

    python -m benchmarks.lms [--image-size 512] [--batch 2] [--runs 1]

Trains ResNet-50 plain and with swaps, as the paper's Figures 6 to 8 vary them: tensors, lower bound, strategy, fused
swap-ins; and what the disk tier adds: the page cache, and one inter-op thread. Every cell is a process of its own, one
for the time and one for the memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import _child, _meter

SEED = 1
LEARNING_RATE = 1e-6
"""An untrained ResNet amplifies roundings, by which even plain runs differ, within a few steps."""

ONE_THREAD = {"TF_NUM_INTEROP_THREADS": "1"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One configuration.

    Attributes:
        name: For the table.
        params: Of `LMSParams`; `None` trains plain.
        env: Environment on top.
        base: Name of the plain cell that it is compared with.
    """

    name: str
    params: dict[str, Any] | None
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    base: str = "plain"


CELLS = (
    Cell("plain", None),
    Cell("all, lb=1", {}),
    Cell("all, lb=5", {"lb": 5}),
    Cell("all, lb=20", {"lb": 20}),
    Cell("all, direct_order, lb=1", {"ctrld_strategy": "direct_order"}),
    Cell("all, direct_order, lb=20", {"ctrld_strategy": "direct_order", "lb": 20}),
    Cell("30 tensors, lb=1", {"n_tensors": 30}),
    Cell("all, lb=1, fused", {"fuse_swapins": True}),
    Cell("all, lb=1, no page cache", {"page_cache": False}),
    Cell("plain, one inter-op thread", None, ONE_THREAD),
    Cell("all, lb=1, one inter-op thread", {}, ONE_THREAD, "plain, one inter-op thread"),
)


def measure(
    *, what: str, params: dict[str, Any] | None, size: int, batch: int, warmup: int, steps: int, emit: _child.Emit
) -> dict[str, Any]:
    """Trains in a child and returns its figures: times, or RSS, as the parent's environment allows."""
    import keras
    import numpy as np

    import tflms_sft

    keras.utils.set_random_seed(SEED)
    model = keras.applications.ResNet50(weights=None, input_shape=(size, size, 3), classes=10)
    optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    optimizer.build(model.trainable_variables)
    images = np.random.default_rng(SEED).normal(size=(batch, size, size, 3)).astype("float32")
    swap = None if params is None else tflms_sft.LMS(**{"tier": "disk", "verbose": 0, **params})
    meter = _meter.StepMeter(warmup, "cpu", emit)
    hooks = keras.callbacks.LambdaCallback(on_train_batch_begin=meter.begin, on_train_batch_end=meter.end)
    meter.start()
    model.fit(
        images,
        np.arange(batch) % 10,
        batch_size=batch,
        epochs=warmup + steps,
        callbacks=[*filter(None, [swap]), hooks],
        shuffle=False,
        verbose=0,
    )
    figures: dict[str, Any] = {"losses": meter.losses}
    if what == "memory":
        figures["net_rss_bytes"] = max(meter.net_rss)
    else:
        figures["step_seconds"] = meter.seconds
    if swap is not None:
        figures["tensors"] = len(swap.plan.swaps)
        figures["swapped_bytes"] = swap.plan.swapped_bytes
        figures["read_bytes"] = sum(s.num_bytes * len(s.controls) for s in swap.plan.swaps)
        figures["predicted_peak_bytes"] = swap.plan.predicted.peak_bytes
    return figures


def disk_bandwidth(directory: str, nbytes: int = 2**29) -> float:
    """Bytes per second that a file takes which is written through to the disk."""
    block = os.urandom(2**24)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        began = time.perf_counter()
        for _ in range(nbytes // len(block)):
            file.write(block)
        os.fdatasync(file.fileno())
        return nbytes / (time.perf_counter() - began)


def run(cells: Sequence[Cell], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures by cell; of several runs all times, and the largest memory."""
    results: dict[str, dict[str, Any]] = {}
    for index in range(options.runs):
        for cell in cells:
            for what in ("time", "memory"):
                kwargs = {"what": what, "params": cell.params, "size": options.image_size, "batch": options.batch}
                kwargs |= {"warmup": options.warmup, "steps": options.steps}
                env = {**cell.env, **(_child.TRUE_RSS_ENV if what == "memory" else {})}
                figures = _child.call_in_child("benchmarks.lms:measure", kwargs, env=env)
                merged = results.setdefault(cell.name, {})
                merged["step_seconds"] = merged.get("step_seconds", []) + figures.pop("step_seconds", [])
                merged["net_rss_bytes"] = max(merged.get("net_rss_bytes", 0), figures.pop("net_rss_bytes", 0))
                merged |= figures
                print(f"{index + 1}/{options.runs} {cell.name}: {what} done", flush=True)
    return results


def table(cells: Sequence[Cell], results: dict[str, dict[str, Any]]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| ResNet-50 | tensors | out | in | net RSS | of plain | step | of plain | loss differs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        found, base = results[cell.name], results[cell.base]
        seconds = statistics.median(found["step_seconds"])
        differs = max(abs(a - b) for a, b in zip(found["losses"], base["losses"], strict=True))
        moved = [f"{found.get(key, 0) / 2**20:.0f} MiB" for key in ("swapped_bytes", "read_bytes")]
        cells_of_row = [
            cell.name,
            str(found.get("tensors", 0)),
            *moved,
            f"{found['net_rss_bytes'] / 2**20:.0f} MiB",
            f"{found['net_rss_bytes'] / base['net_rss_bytes']:.2f}",
            f"{seconds:.2f} s",
            f"{seconds / statistics.median(base['step_seconds']):.2f}",
            f"{differs:.1e}",
        ]
        lines.append(f"| {' | '.join(cells_of_row)} |")
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image-size", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cells", nargs="*", help="names of cells, with their plain ones; all by default")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    wanted = options.cells or [cell.name for cell in CELLS]
    unknown = sorted(set(wanted) - {cell.name for cell in CELLS})
    if unknown:
        parser.error(f"--cells names {unknown}; known are {[cell.name for cell in CELLS]}")
    named = {*wanted, *(cell.base for cell in CELLS if cell.name in wanted)}
    cells = [cell for cell in CELLS if cell.name in named]
    bandwidth = disk_bandwidth(tempfile.gettempdir())
    results = run(cells, options)
    size = f"{options.image_size} px, batch {options.batch}"
    print(f"\n{size}, disk writes {bandwidth / 2**20:.0f} MiB/s in {tempfile.gettempdir()}\n")
    print(table(cells, results))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"bandwidth": bandwidth, "options": vars(options), "cells": results}, file, indent=1)


if __name__ == "__main__":
    main()
