"""Pipelines: step times against the simulator, memory of each device, and predictions for the papers' networks.

    python -m benchmarks.pipeline [schedules] [memory] [models] [--json FILE] [--picture FILE.png]

- `schedules` times a step whose stages sleep, 40 ms forward and 80 ms backward, on logical CPU devices. Sleeping
  stages run concurrently although the devices share the cores. Promises: every median is within 10 % of the simulated
  time. With four micro-batches on four devices, MAST is at least 1.3 times and MASTER (η = 4) at least 1.2 times as
  fast as the basic schedule. Losses and weights equal those of the original step up to rounding.
- `memory` measures the peak of each device for a network of four equal stages, by allocation records. Promise: MAST
  trains twice the samples of basic in at most 1.25 times the memory of the fullest device.
- `models` plans ResNet-110-v2 of GEMS and the U-Nets of Seal et al., without running them: stages, memory of each
  device, speedup of each schedule, and GEMS-Hybrid on up to 1,024 devices by formula. It has no promises.

The exit code is 1 if a promise is broken.

Sources: Jain et al., "GEMS: GPU-Enabled Memory-Aware Model-Parallelism System for Distributed DNN Training" (2020),
Table II; Seal et al., "Toward Large-Scale Image Segmentation on Summit" (2020), Table 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _pipeline_models, _pipeline_picture, _results
from rewriters.pipelining.schedule_simulator import simulate
from rewriters.pipelining.schedules import SCHEDULES, make
from tflms_sft import unets

PARTS = ("schedules", "memory", "models")

MAX_TIME_ERROR = 0.10
"""Largest difference of a median time from the simulated time, over the simulated time."""

MIN_SPEEDUPS = (("mast", 4, 4, 1.3), ("master", 4, 4, 1.2))
"""(schedule, stages, micro-batches, smallest speedup over basic with as many micro-batches).

By equation 6 of GEMS, MAST with two micro-batches has a speedup of 8/7.
"""

MAX_MEMORY_RATIO = 1.25
"""Largest memory of MAST's fullest device, over that of basic with half the samples."""

MEMORY_STAGES = 4
MEMORY_VARIANTS = (("basic", 1), ("basic", 2), ("mast", 2), ("gpipe", 4), ("1f1b", 4), ("master", 4))
"""(schedule, micro-batches) on four devices; all micro-batches have one size."""

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Promise:
    """A promise that the measurements must meet.

    Attributes:
        text: The promise, and the measured value.
        kept: Whether it holds; `None` without the measurement.
    """

    text: str
    kept: bool | None

    def line(self) -> str:
        """Return the promise as a line of text."""
        return f"{'not measured' if self.kept is None else 'kept' if self.kept else 'BROKEN'}: {self.text}"


# Schedules ----------------------------------------------------------------------------------------------------------


def timed(options: argparse.Namespace) -> list[Figures]:
    """Time all requested schedules."""
    runs = []
    for stages in options.stages:
        for micro_batches in options.micro_batches:
            for name in options.schedules:
                if name == "mast" and micro_batches % 2:
                    continue
                setting = {"schedule": name, "stages": stages, "micro_batches": micro_batches}
                lengths = {"forward": options.forward_ms / 1000, "backward": options.backward_ms / 1000}
                kwargs = {**setting, **lengths, "steps": options.steps}
                run = _child.call_in_child("benchmarks._staged:time_sleeping", kwargs)
                simulation = simulate(
                    make(name, stages, micro_batches), [lengths["forward"]] * stages, [lengths["backward"]] * stages
                )
                runs.append({**setting, "simulated": simulation.seconds, "idle": simulation.bubble, **run})
                print(
                    f"{name}, {stages} stages, {micro_batches} micro-batches: {run['median']:.3f} s, "
                    f"simulated {simulation.seconds:.3f} s",
                    flush=True,
                )
    return runs


def over_basic(runs: Sequence[Figures], name: str, stages: int, micro_batches: int, key: str) -> float | None:
    """Return the speedup of a schedule over the basic schedule with as many micro-batches; `None` if not run."""
    by_name = {(run["schedule"], run["stages"], run["micro_batches"]): run for run in runs}
    basic, other = (by_name.get((which, stages, micro_batches)) for which in ("basic", name))
    return basic[key] / other[key] if basic and other else None


def schedules_table(runs: Sequence[Figures]) -> str:
    """Return measured and simulated times as a Markdown table."""
    heads = ["stages", "micro-batches", "schedule", "measured", "simulated", "off by", "idle"]
    lines = [[*heads, "over basic", "simulated"]]
    for run in runs:
        key = run["schedule"], run["stages"], run["micro_batches"]
        ratios = [over_basic(runs, *key, which) for which in ("median", "simulated")]
        off = run["median"] / run["simulated"] - 1
        lines.append(
            [
                str(run["stages"]),
                str(run["micro_batches"]),
                run["schedule"],
                f"{run['median']:.3f} s",
                f"{run['simulated']:.3f} s",
                f"{off:+.1%}" + ("" if abs(off) <= MAX_TIME_ERROR else " FAR"),
                f"{run['idle']:.0%}",
                *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    return _results.markdown(lines)


def schedule_promises(runs: Sequence[Figures]) -> list[Promise]:
    """Return the promises about times, and about the results of steps."""
    far = [run for run in runs if abs(run["median"] / run["simulated"] - 1) > MAX_TIME_ERROR]
    largest = max((abs(run["median"] / run["simulated"] - 1) for run in runs), default=0.0)
    near = f"{len(runs) - len(far)} of {len(runs)}"
    text = f"times within {MAX_TIME_ERROR:.0%} of the simulation: {near}, largest difference {largest:.1%}"
    promises = [Promise(text, not far if runs else None)]
    for name, stages, micro_batches, least in MIN_SPEEDUPS:
        ratio = over_basic(runs, name, stages, micro_batches, "median")
        text = f"{name} with {micro_batches} micro-batches on {stages} devices at least {least} times as fast as basic"
        shown = "" if ratio is None else f": {ratio:.2f}"
        promises.append(Promise(text + shown, None if ratio is None else ratio >= least))
    off = max((run["off_by"] for run in runs), default=0.0)
    text = f"losses and weights equal those of the original step: largest difference {off:.0e}, in float32"
    return [*promises, Promise(text, off < 1e-5 if runs else None)]


# Memory -------------------------------------------------------------------------------------------------------------


def device_peaks(options: argparse.Namespace) -> list[Figures]:
    """Measure the peak of every device under each schedule."""
    runs = []
    for name, micro_batches in MEMORY_VARIANTS:
        kwargs = {"schedule": name, "stages": MEMORY_STAGES, "micro_batches": micro_batches}
        kwargs |= {"samples": options.samples, "image_size": options.image_size}
        run = _child.call_in_child("benchmarks._staged:device_memory", kwargs)
        runs.append({"schedule": name, "micro_batches": micro_batches, **run})
        print(f"{name}, {micro_batches} micro-batches: {_sizes(run['measured_bytes'])}", flush=True)
    return runs


def _sizes(amounts: Sequence[float]) -> str:
    return ", ".join(f"{amount / 2**20:.1f}" for amount in amounts) + " MiB"


def memory_table(runs: Sequence[Figures]) -> str:
    """Return predicted and measured peaks of all devices as a Markdown table."""
    lines = [["schedule", "micro-batches", "samples", "predicted, device by device", "measured", "fullest, off by"]]
    for run in runs:
        off = max(run["predicted_bytes"]) / max(run["measured_bytes"]) - 1
        lines.append(
            [
                run["schedule"],
                str(run["micro_batches"]),
                str(run["samples"]),
                *(_sizes(run[key]) for key in ("predicted_bytes", "measured_bytes")),
                f"{off:+.1%}",
            ]
        )
    return _results.markdown(lines)


def memory_promises(runs: Sequence[Figures]) -> list[Promise]:
    """Return the promises about memory."""
    peaks = {(run["schedule"], run["micro_batches"]): max(run["measured_bytes"]) for run in runs}
    basic, mast = peaks.get(("basic", 1)), peaks.get(("mast", 2))
    text = f"MAST trains twice the samples of basic in at most {MAX_MEMORY_RATIO} times its memory (fullest device)"
    if basic is None or mast is None:
        return [Promise(text, None)]
    return [Promise(f"{text}: {mast / basic:.2f}", mast <= MAX_MEMORY_RATIO * basic)]


# Models -------------------------------------------------------------------------------------------------------------


def models(options: argparse.Namespace) -> Figures:
    """Plan the networks in stages."""
    size, blocks = options.pathology_size, options.blocks
    resnet = {}
    for stages in (_pipeline_models.PATHOLOGY_STAGES, _pipeline_models.LARGEST_STAGES):
        resnet[str(stages)] = _pipeline_models.pathology(image_size=size, blocks=blocks, stages=stages)
        print(f"ResNet-{9 * blocks + 2}-v2 in {stages} stages: planned", flush=True)
    nets = {}
    for architecture in unets.TABLE_1:
        if architecture.name in options.unets:
            tile, stages = options.tile, _pipeline_models.SUMMIT_STAGES
            nets[architecture.name] = _pipeline_models.segmentation(architecture, tile=tile, stages=stages)
            print(f"U-Net {architecture.name}: planned", flush=True)
    return {"resnet": resnet, "unets": nets, "image_size": size, "blocks": blocks}


def stage_table(stages: Sequence[Figures]) -> str:
    """Return the stages for one image as a Markdown table."""
    total = sum(stage["forward"] + stage["backward"] for stage in stages)
    lines = [["stage", "ends with", "weights", "waits", "forward", "backward", "of all work", "peak, one image"]]
    for number, stage in enumerate(stages):
        lines.append(
            [
                str(number),
                stage["exit"],
                f"{stage['weight_bytes'] / 2**20:.1f} MiB",
                f"{stage['waiting_bytes'] / _pipeline_models.GIB:.2f} GiB",
                *(f"{stage[key]:.2f} s" for key in ("forward", "backward")),
                f"{(stage['forward'] + stage['backward']) / total:.0%}",
                f"{stage['peak_bytes'] / _pipeline_models.GIB:.2f} GiB",
            ]
        )
    return _results.markdown(lines)


def predictions_table(nets: dict[str, Sequence[Figures]]) -> str:
    """Return the speedup over basic, and the peak of the fullest device, for each schedule and network."""
    lines = [["schedule", "micro-batches", *nets]]
    for name, micro_batches in _pipeline_models.SCHEDULES:
        cells = []
        for stages in nets.values():
            prediction = _pipeline_models.predicted(stages, name, micro_batches)
            cells.append(f"{prediction.speedup:.2f} x, {max(prediction.peak_bytes) / _pipeline_models.GIB:.1f} GiB")
        lines.append([name, str(micro_batches), *cells])
    return _results.markdown(lines)


def scaling_tables(results: Figures) -> str:
    """Return the throughput of GEMS-Hybrid by formula and as measured in the paper, and speedups of many replicas."""
    counts = _pipeline_models.PATHOLOGY_STAGES, _pipeline_models.LARGEST_STAGES
    four, eight = (results["resnet"][str(count)]["stages"] for count in counts)
    seconds = 1 / _pipeline_models.PATHOLOGY["basic"]
    eta = _pipeline_models.PATHOLOGY_ETA
    lines = [["GPUs", "GEMS", "images a second, by formula", "measured in the paper"]]
    for name, line_eta in (("basic", 1), ("mast", 2), ("master", eta)):
        rate = _pipeline_models.images_per_second(four, seconds, line_eta, 1)
        lines.append(["4", f"{name}, η = {line_eta}", f"{rate:.2f}", f"{_pipeline_models.PATHOLOGY[name]:.2f}"])
    for count, measured in _pipeline_models.PATHOLOGY_HYBRID.items():
        rate = _pipeline_models.images_per_second(four, seconds, eta, count)
        lines.append([str(4 * count), f"hybrid, η = {eta}", f"{rate:.2f}", f"{measured:.2f}"])
    replicas = _pipeline_models.LARGEST_REPLICAS
    etas = (1, 2, 64)
    speedups = [["GPUs", "replicas", *(f"η = {line_eta}" for line_eta in etas)]]
    for count in (1, 2, 4, 8, 16, 32, 64, replicas):
        ratios = [f"{_pipeline_models.speedup(eight, seconds, line_eta, count):.2f} x" for line_eta in etas]
        speedups.append([str(_pipeline_models.LARGEST_STAGES * count), str(count), *ratios])
    return f"{_results.markdown(lines)}\n\n{_results.markdown(speedups)}"


def assumptions() -> str:
    """Return the assumptions of the prediction for many devices."""
    return (
        f"Assumed: the basic schedule trains {_pipeline_models.PATHOLOGY['basic']} images per second, and stages share "
        "the time of an image as in the plan. Links between nodes have "
        f"{_pipeline_models.LINK_BYTES_PER_SECOND / 1e9:g} GB/s and {_pipeline_models.LINK_LATENCY * 1e6:g} µs. Ring "
        "all-reduces have no other traffic. Devices are equal, and none waits for data."
    )


def models_text(results: Figures) -> str:
    """Return all tables of `models`."""
    name = f"ResNet-{9 * results['blocks'] + 2}-v2"
    entries = [(name, results["image_size"], figures) for figures in results["resnet"].values()]
    entries += [(f"U-Net {title}", figures["rows"], figures) for title, figures in results["unets"].items()]
    parts = []
    nets: dict[str, Sequence[Figures]] = {}
    for title, rows, figures in entries:
        count = f"{len(figures['stages'])} stages"
        peak = f"{figures['plain_peak_bytes'] / _pipeline_models.GIB:.1f} GiB on one device"
        parts.append(f"{title}, {rows} x {rows}, {figures['parameters']:,} parameters, {count}; {peak}:")
        parts.append(stage_table(figures["stages"]))
        nets[f"{title}, {count}"] = figures["stages"]
    parts += ["Speedup over basic with as many images, and memory of the fullest device:", predictions_table(nets)]
    return "\n\n".join([*parts, assumptions(), scaling_tables(results)])


# ------------------------------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.pipeline", __doc__)
    add, positive = parser.add_argument, _arguments.positive
    known = [architecture.name for architecture in unets.TABLE_1]
    schedules = list(SCHEDULES)
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    add("--stages", type=positive, nargs="+", default=[2, 4], metavar="N", help="numbers of stages; default: 2 4")
    counts_help = "numbers of micro-batches; η of MASTER; default: 2 4 8"
    add("--micro-batches", type=positive, nargs="+", default=[2, 4, 8], metavar="M", help=counts_help)
    schedules_help = f"of {', '.join(schedules)}; default: all"
    add("--schedules", nargs="+", choices=schedules, default=schedules, metavar="NAME", help=schedules_help)
    time_help = "time of a sleeping stage; default: %(default)s"
    add("--forward-ms", type=positive, default=40, metavar="MS", help=time_help)
    add("--backward-ms", type=positive, default=80, metavar="MS", help=time_help)
    add("--steps", type=positive, default=5, help="timed steps of each process; default: %(default)s")
    add("--samples", type=positive, default=2, help="samples of a micro-batch in `memory`; default: %(default)s")
    add("--image-size", type=positive, default=128, metavar="N", help="image size in `memory`; default: %(default)s")
    size_help = "image size of the ResNet; default: %(default)s"
    add("--pathology-size", type=positive, default=_pipeline_models.PATHOLOGY_SIZE, metavar="N", help=size_help)
    blocks_help = "blocks in each group of the ResNet, which has 9 N + 2 layers; default: %(default)s"
    add("--blocks", type=positive, default=12, metavar="N", help=blocks_help)
    tile_help = "largest image size of the U-Nets; default: %(default)s"
    add("--tile", type=positive, default=_pipeline_models.SUMMIT_TILE, metavar="N", help=tile_help)
    add("--unets", nargs="*", choices=known, default=known, metavar="NAME", help=f"of {known}; default: all")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    add("--picture", type=Path, metavar="FILE", help="picture of the requested parts; needs matplotlib")
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"parts must be among {list(PARTS)}. Received: {unknown}")
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")
    options.parts = options.parts or list(PARTS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write and draw; return 1 if a promise is broken."""
    options = parse_arguments(arguments)
    report: dict[str, Any] = _results.provenance("benchmarks.pipeline", arguments)
    tables: dict[str, str] = {}
    print("\n".join(f"{key}: {value}" for key, value in report.items()), flush=True)
    promises: list[Promise] = []
    if "schedules" in options.parts:
        report["schedules"] = timed(options)
        tables["schedules"] = schedules_table(report["schedules"])
        print(f"\n{tables['schedules']}\n")
        promises += schedule_promises(report["schedules"])
    if "memory" in options.parts:
        report["memory"] = device_peaks(options)
        tables["memory"] = memory_table(report["memory"])
        print(f"\n{tables['memory']}\n")
        promises += memory_promises(report["memory"])
    if "models" in options.parts:
        report["models"] = models(options)
        print(f"\n{models_text(report['models'])}\n")
    report["promises"] = [dataclasses.asdict(promise) for promise in promises]
    print("\n".join(promise.line() for promise in promises))
    if options.json:
        _results.write(options.json, report, tables)
    if options.picture:
        _pipeline_picture.draw(options.picture, report)
        print(f"Drawn: {options.picture}")
    return int(any(promise.kept is False for promise in promises))


if __name__ == "__main__":
    _child.leave_with(main)
