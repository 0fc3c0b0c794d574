"""Accuracy of predicted peaks for plain, tiled and swapped steps of three networks.

    python -m benchmarks.accuracy [--runs 5] [--cases NAME ...] [--json accuracy.json]

Predictions are those of plans; `tflms_sft.measure` measures the peaks. The exit code is 1 if a prediction differs from
the median of the measurements by more than `--within` of the median.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _nets, _results

MIB = 2**20

NETS = {name: _nets.TASKS[name] for name in ("vgg16", *_nets.SWAPPED)}
TILES = {"segments": [["image", "pool3", [4, 4]], ["pool3", "pool5", [2, 2]]]}
STRIPS = {"segments": [["image", "pool3", [12, 1]], ["pool3", "pool5", [6, 1]]], "halo": "carry"}
STRIPS_WITH_CHECKPOINTS = {**STRIPS, "stored": [["conv1_2", "conv2_2"], []]}


@dataclasses.dataclass(frozen=True)
class Case:
    """A network, and the rewriting of its training step.

    Attributes:
        net: Key of `NETS`.
        how: Name of the rewriting.
        tiles: `"segments"`, each with entry, exit and numbers of tiles, and optionally `"halo"` and the checkpointed
            tensors of each segment, `"stored"`. `None` for an untiled step.
        swaps: Fields of `LMSParams` besides `tier`; `None` for no swaps.
    """

    net: str
    how: str
    tiles: dict[str, Any] | None = None
    swaps: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """Return the name of the case in the table and on the command line."""
        return f"{self.net}, {self.how}"


CASES = [
    Case("vgg16", "plain"),
    Case("vgg16", "tiled", tiles=TILES),
    Case("vgg16", "in rows", tiles=STRIPS),
    Case("vgg16", "in rows, some stored", tiles=STRIPS_WITH_CHECKPOINTS),
    Case("vgg16", "swapped", swaps=_nets.LEAST_MEMORY),
    Case("vgg16", "tiled and swapped", tiles=TILES, swaps=_nets.LEAST_MEMORY),
    Case("resnet50", "plain"),
    Case("resnet50", "swapped", swaps=_nets.LEAST_MEMORY),
    Case("resnet50", "swapped, defaults", swaps={}),
    Case("unet3d", "plain"),
    Case("unet3d", "swapped", swaps=_nets.LEAST_MEMORY),
    Case("unet3d", "swapped, defaults", swaps={}),
]


# ----------------------------------------------------------------------------------------------------------
# In the child.


def examine(
    *,
    net: str,
    tiles: dict[str, Any] | None,
    swaps: dict[str, Any] | None,
    image_size: int | None,
    emit: _child.Emit,
) -> dict[str, Any]:
    """Rewrite a step, run it, and return the predicted and the measured peak."""
    del emit
    import tensorflow as tf

    import tflms_sft

    task = NETS[net]
    size = image_size or task.image_size
    model = task.compiled(size)
    images, labels = map(tf.constant, task.noise(size, task.batch))
    step = tf.function(lambda images, labels: model.train_step((images, labels))["loss"], autograph=False)
    params: list[Any] = []
    if tiles is not None:
        stored = tiles.get("stored", [[] for _ in tiles["segments"]])
        specs = [
            tflms_sft.SegmentSpec(entry, exit_, tuple(count), stored=tuple(names))
            for (entry, exit_, count), names in zip(tiles["segments"], stored, strict=True)
        ]
        params.append(tflms_sft.SFTParams(segments=specs, halo=tiles.get("halo", "recompute")))
    if swaps is not None:
        params.append(tflms_sft.LMSParams(tier="disk", **swaps))
    rewritten = tflms_sft.rewrite(step, params or tflms_sft.AutoParams("1TiB"), images, labels)
    peak = tflms_sft.measure(rewritten if params else step, images, labels)
    return {"predicted": rewritten.plan.predicted.peak_bytes, "measured": peak.peak_bytes, "source": peak.source}


# ----------------------------------------------------------------------------------------------------------
# In the parent.


def row(case: Case, runs: list[dict[str, Any]], within: float) -> tuple[list[str], bool]:
    """Return a line of the table, and whether the prediction is accurate."""
    predicted = runs[0]["predicted"]
    measured = [run["measured"] for run in runs]
    median = statistics.median(measured)
    near = abs(predicted - median) <= within * median
    cells = (predicted, median, min(measured), max(measured))
    return [
        f"{NETS[case.net].title}, {case.how}",
        *(f"{value / MIB:.0f} MiB" for value in cells),
        f"{predicted / median - 1:+.1%}" + ("" if near else " (too far)"),
    ], near


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.accuracy", __doc__)
    add = parser.add_argument
    names = [case.name for case in CASES]
    add("--cases", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}; default: all")
    add("--image-size", type=_arguments.positive, metavar="N", help="size of all images; default: that of each network")
    add("--runs", type=_arguments.positive, default=5, help="processes per case; default: %(default)s")
    within_help = "largest error of a prediction, as a fraction of the median; default: %(default)s"
    add("--within", type=_arguments.part, default=0.15, help=within_help)
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if a prediction is too far from the measurements."""
    options = parse_arguments(arguments)
    header = _results.provenance("benchmarks.accuracy", arguments)
    title = f"Peak of a step, median of {options.runs}"
    lines = [[title, "predicted", "measured", "lowest", "highest", "predicted / measured"], ["---"] * 6]
    are_near, report = True, {}
    for case in (case for case in CASES if case.name in options.cases):
        kwargs = {"net": case.net, "tiles": case.tiles, "swaps": case.swaps, "image_size": options.image_size}
        runs = [_child.call_in_child("benchmarks.accuracy:examine", kwargs) for _ in range(options.runs)]
        line, is_near = row(case, runs, options.within)
        print(", ".join(line), flush=True)
        lines.append(line)
        are_near, report[case.name] = are_near and is_near, runs
    printed = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    print(f"\n{printed}")
    if options.json:
        _results.write(options.json, {**header, "cases": report}, {"cases": printed})
    return 0 if are_near else 1


if __name__ == "__main__":
    _child.leave_with(main)
