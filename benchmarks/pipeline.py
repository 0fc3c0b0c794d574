"""Pipelines: whether schedules take what the simulator says, what devices hold, what the papers' networks would take.

    python -m benchmarks.pipeline [schedules] [memory] [models] [--json FILE] [--picture FILE.png]

`schedules`: a step whose stages sleep, 40 ms forward and 80 ms backward, is rewritten for logical CPU devices and
timed. Sleeping needs no core, so that devices work beside each other although they share the machine. Three promises:
every median is within 10 % of what the simulator says; MAST with four micro-batches on four devices is at least 1.3
times as fast as the basic schedule with as many; MASTER with η = 4 on four devices 1.2 times. MAST with two cannot be
that fast: equation 6 of GEMS leaves it 8/7 on four devices whose backwards take twice as long as their forwards.

`memory`: a small network of four even stages; what each device holds at most, as the plan says and by the allocation
records of a run. The promise: MAST trains twice the samples of basic with no more than 1.25 times the bytes.

`models`: ResNet-110-v2 of GEMS and the U-Nets of Seal et al., traced and not run: stages, bytes of each device, how
much faster each schedule is, and GEMS-Hybrid up to 1,024 devices by formula. Nothing is promised there.

Every figure is of a process of its own. The exit code is 1 if a promise is broken.
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

NEAR = 0.10
"""How far a median may be from what the simulator says."""

FASTER = (("mast", 4, 4, 1.3), ("master", 4, 4, 1.2))
"""(schedule, stages, micro-batches, times as fast as basic with as many micro-batches, at least)."""

TWICE_IN = 1.25
"""Bytes of MAST's fullest device, over those of basic with half the samples, at most."""

MEMORY_STAGES = 4
MEMORY_VARIANTS = (("basic", 1), ("basic", 2), ("mast", 2), ("gpipe", 4), ("1f1b", 4), ("master", 4))
"""(schedule, micro-batches) on four devices; micro-batches are all of one size."""

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Promise:
    """An expectation that the measurements must meet.

    Attributes:
        text: What it is, and what was found.
        kept: Whether it holds; `None` if nothing was measured that could tell.
    """

    text: str
    kept: bool | None

    def line(self) -> str:
        """Return the expectation as a line of text."""
        return f"{'not measured' if self.kept is None else 'kept' if self.kept else 'BROKEN'}: {self.text}"


# Schedules ----------------------------------------------------------------------------------------------------------


def timed(options: argparse.Namespace) -> list[Figures]:
    """Runs every schedule that was asked for."""
    found = []
    for stages in options.stages:
        for micro_batches in options.micro_batches:
            for name in options.schedules:
                if name == "mast" and micro_batches % 2:
                    continue
                asked = {"schedule": name, "stages": stages, "micro_batches": micro_batches}
                lengths = {"forward": options.forward_ms / 1000, "backward": options.backward_ms / 1000}
                kwargs = {**asked, **lengths, "steps": options.steps}
                own = _child.call_in_child("benchmarks._staged:time_sleeping", kwargs)
                simulation = simulate(
                    make(name, stages, micro_batches), [lengths["forward"]] * stages, [lengths["backward"]] * stages
                )
                found.append({**asked, "simulated": simulation.seconds, "idle": simulation.bubble, **own})
                print(
                    f"{name}, {stages} stages, {micro_batches} micro-batches: {own['median']:.3f} s, "
                    f"simulated {simulation.seconds:.3f} s",
                    flush=True,
                )
    return found


def over_basic(found: Sequence[Figures], name: str, stages: int, micro_batches: int, key: str) -> float | None:
    """Return the speedup of a schedule over the basic schedule with as many micro-batches; `None` if not run."""
    by_name = {(own["schedule"], own["stages"], own["micro_batches"]): own for own in found}
    basic, other = (by_name.get((which, stages, micro_batches)) for which in ("basic", name))
    return basic[key] / other[key] if basic and other else None


def schedules_table(found: Sequence[Figures]) -> str:
    """Measured against simulated, as a Markdown table."""
    heads = ["stages", "micro-batches", "schedule", "measured", "simulated", "off by", "idle"]
    lines = [[*heads, "over basic", "simulated"]]
    for own in found:
        key = own["schedule"], own["stages"], own["micro_batches"]
        ratios = [over_basic(found, *key, which) for which in ("median", "simulated")]
        off = own["median"] / own["simulated"] - 1
        lines.append(
            [
                str(own["stages"]),
                str(own["micro_batches"]),
                own["schedule"],
                f"{own['median']:.3f} s",
                f"{own['simulated']:.3f} s",
                f"{off:+.1%}" + ("" if abs(off) <= NEAR else " FAR"),
                f"{own['idle']:.0%}",
                *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    return _results.markdown(lines)


def schedule_promises(found: Sequence[Figures]) -> list[Promise]:
    """Return the expectations about times and about the results of the steps."""
    far = [own for own in found if abs(own["median"] / own["simulated"] - 1) > NEAR]
    worst = max((abs(own["median"] / own["simulated"] - 1) for own in found), default=0.0)
    near = f"{len(found) - len(far)} of {len(found)}"
    text = f"within {NEAR:.0%} of the simulator: {near}, the farthest off by {worst:.1%}"
    promises = [Promise(text, not far if found else None)]
    for name, stages, micro_batches, least in FASTER:
        ratio = over_basic(found, name, stages, micro_batches, "median")
        text = f"{name} with {micro_batches} micro-batches on {stages} devices at least {least} times as fast as basic"
        shown = "" if ratio is None else f": {ratio:.2f}"
        promises.append(Promise(text + shown, None if ratio is None else ratio >= least))
    off = max((own["off_by"] for own in found), default=0.0)
    text = f"losses and weights are those of the plain step: off by {off:.0e} at most, in float32"
    return [*promises, Promise(text, off < 1e-5 if found else None)]


# Memory -------------------------------------------------------------------------------------------------------------


def held(options: argparse.Namespace) -> list[Figures]:
    """Measures every device under each schedule."""
    found = []
    for name, micro_batches in MEMORY_VARIANTS:
        kwargs = {"schedule": name, "stages": MEMORY_STAGES, "micro_batches": micro_batches}
        kwargs |= {"samples": options.samples, "image_size": options.image_size}
        own = _child.call_in_child("benchmarks._staged:device_memory", kwargs)
        found.append({"schedule": name, "micro_batches": micro_batches, **own})
        print(f"{name}, {micro_batches} micro-batches: {_sizes(own['measured_bytes'])}", flush=True)
    return found


def _sizes(amounts: Sequence[float]) -> str:
    return ", ".join(f"{amount / 2**20:.1f}" for amount in amounts) + " MiB"


def memory_table(found: Sequence[Figures]) -> str:
    """Predicted and measured peaks of all devices, as a Markdown table."""
    lines = [["schedule", "micro-batches", "samples", "predicted, device by device", "measured", "fullest, off by"]]
    for own in found:
        off = max(own["predicted_bytes"]) / max(own["measured_bytes"]) - 1
        lines.append(
            [
                own["schedule"],
                str(own["micro_batches"]),
                str(own["samples"]),
                *(_sizes(own[key]) for key in ("predicted_bytes", "measured_bytes")),
                f"{off:+.1%}",
            ]
        )
    return _results.markdown(lines)


def memory_promises(found: Sequence[Figures]) -> list[Promise]:
    """Return the expectations about memory."""
    peaks = {(own["schedule"], own["micro_batches"]): max(own["measured_bytes"]) for own in found}
    basic, mast = peaks.get(("basic", 1)), peaks.get(("mast", 2))
    text = f"MAST holds twice the samples of basic in at most {TWICE_IN} times the bytes of its fullest device"
    if basic is None or mast is None:
        return [Promise(text, None)]
    return [Promise(f"{text}: {mast / basic:.2f}", mast <= TWICE_IN * basic)]


# Models -------------------------------------------------------------------------------------------------------------


def models(options: argparse.Namespace) -> Figures:
    """Traces the networks and predicts."""
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
    """The stages of one image."""
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
    """Schedules of each network: how much faster than basic, and what the fullest device holds."""
    lines = [["schedule", "micro-batches", *nets]]
    for name, micro_batches in _pipeline_models.SCHEDULES:
        cells = []
        for stages in nets.values():
            found = _pipeline_models.predicted(stages, name, micro_batches)
            cells.append(f"{found.speedup:.2f} x, {max(found.peak_bytes) / _pipeline_models.GIB:.1f} GiB")
        lines.append([name, str(micro_batches), *cells])
    return _results.markdown(lines)


def scaling_tables(found: Figures) -> str:
    """GEMS-Hybrid by formula, beside what the paper has measured."""
    counts = _pipeline_models.PATHOLOGY_STAGES, _pipeline_models.LARGEST_STAGES
    four, eight = (found["resnet"][str(count)]["stages"] for count in counts)
    seconds = 1 / _pipeline_models.PATHOLOGY["basic"]
    eta = _pipeline_models.PATHOLOGY_ETA
    lines = [["GPUs", "GEMS", "images a second, by formula", "measured in the paper"]]
    for name, own, count in (("basic", 1, 1), ("mast", 2, 1), ("master", eta, 1)):
        rate = _pipeline_models.images_per_second(four, seconds, own, count)
        lines.append([str(4 * count), f"{name}, η = {own}", f"{rate:.2f}", f"{_pipeline_models.PATHOLOGY[name]:.2f}"])
    for count, measured in _pipeline_models.PATHOLOGY_HYBRID.items():
        rate = _pipeline_models.images_per_second(four, seconds, eta, count)
        lines.append([str(4 * count), f"hybrid, η = {eta}", f"{rate:.2f}", f"{measured:.2f}"])
    replicas = _pipeline_models.LARGEST_REPLICAS
    more = [["GPUs", "replicas", *(f"η = {own}" for own in (1, 2, 64))]]
    for count in (1, 2, 4, 8, 16, 32, 64, replicas):
        ratios = (_pipeline_models.speedup(eight, seconds, own, count) for own in (1, 2, 64))
        more.append([str(_pipeline_models.LARGEST_STAGES * count), str(count), *(f"{ratio:.2f} x" for ratio in ratios)])
    return f"{_results.markdown(lines)}\n\n{_results.markdown(more)}"


def assumptions() -> str:
    """Return the assumptions of the prediction for many devices."""
    return (
        f"Assumed: an image takes as long as {_pipeline_models.PATHOLOGY['basic']} images a second by the basic "
        "schedule say, shared out among stages as the plan does; links between nodes of "
        f"{_pipeline_models.LINK_BYTES_PER_SECOND / 1e9:g} GB/s and {_pipeline_models.LINK_LATENCY * 1e6:g} µs; ring "
        "all-reduces that no traffic disturbs; devices all alike, none waits for data or for a slower one."
    )


def models_text(found: Figures) -> str:
    """All tables of this part."""
    name = f"ResNet-{9 * found['blocks'] + 2}-v2"
    parts = []
    nets: dict[str, Sequence[Figures]] = {}
    for count, own in found["resnet"].items():
        size = f"{found['image_size']} x {found['image_size']}"
        peak = f"{own['plain_peak_bytes'] / _pipeline_models.GIB:.1f} GiB on one device"
        parts.append(f"{name}, {size}, {own['parameters']:,} parameters, {count} stages; {peak}:")
        parts.append(stage_table(own["stages"]))
        nets[f"{name}, {count} stages"] = own["stages"]
    for title, own in found["unets"].items():
        peak = f"{own['plain_peak_bytes'] / _pipeline_models.GIB:.1f} GiB on one device"
        parts.append(f"U-Net {title}, {own['rows']} x {own['rows']}, {own['parameters']:,} parameters; {peak}:")
        parts.append(stage_table(own["stages"]))
        nets[f"U-Net {title}, {len(own['stages'])} stages"] = own["stages"]
    parts += ["Times as fast as basic, image by image, and bytes of the fullest device:", predictions_table(nets)]
    return "\n\n".join([*parts, assumptions(), scaling_tables(found)])


# ------------------------------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = _arguments.parser("benchmarks.pipeline", __doc__)
    add, positive = parser.add_argument, _arguments.positive
    known = [architecture.name for architecture in unets.TABLE_1]
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    add("--stages", type=positive, nargs="+", default=[2, 4], metavar="N", help="default: 2 4")
    add("--micro-batches", type=positive, nargs="+", default=[2, 4, 8], metavar="M", help="η of MASTER; default: 2 4 8")
    add("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES), metavar="NAME")
    add("--forward-ms", type=positive, default=40, metavar="MS", help="of each stage; default: %(default)s")
    add("--backward-ms", type=positive, default=80, metavar="MS", help="of each stage; default: %(default)s")
    add("--steps", type=positive, default=5, help="timed steps of each; default: %(default)s")
    add("--samples", type=positive, default=2, help="of a micro-batch, for memory; default: %(default)s")
    add("--image-size", type=positive, default=128, metavar="N", help="for memory; default: %(default)s")
    add("--pathology-size", type=positive, default=_pipeline_models.PATHOLOGY_SIZE, metavar="N", help="of the ResNet")
    add("--blocks", type=positive, default=12, help="of each group of the ResNet: 9 N + 2 layers; default: %(default)s")
    add("--tile", type=positive, default=_pipeline_models.SUMMIT_TILE, metavar="N", help="of the U-Nets, at most")
    add("--unets", nargs="*", choices=known, default=known, metavar="NAME", help=f"of {known}; default: all")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    add("--picture", type=Path, metavar="FILE", help="all parts that were run; needs matplotlib")
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"parts must be among {list(PARTS)}. Received: {unknown}")
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")
    options.parts = options.parts or list(PARTS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes and draws; returns 1 if a promise is broken."""
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
        report["memory"] = held(options)
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
