"""Plans for graphics cards that are not in this machine, beside times that were published or measured on them.

    python -m benchmarks.cards [--results FILE]

Times are of a training step with one image. Published ones are those of Xu et al., "Training of Deep Learning Pipelines
on Memory-Constrained GPUs via Segmented Fused-Tiled Execution" (CC 2022), from the artifact's data files; whether its
convolutions used TF32 is not stated. Planned ones assume the rates of `tflms_sft/_machine/card_rates.py`, with TF32 and
without.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _results


@dataclasses.dataclass(frozen=True)
class Case:
    """A published time of a training step.

    Attributes:
        network: Name of a task.
        image_size: Height and width.
        card: Name of the card.
        seconds: Published seconds of the step.
    """

    network: str
    image_size: int
    card: str
    seconds: float


CASES = (
    Case("vgg16", 10240, "rtx2080ti", 43.8),
    Case("vgg16", 20480, "rtx2080ti", 176.5),
    Case("vgg16", 10240, "a100-40", 28.0),
    Case("vgg16", 20480, "a100-40", 105.9),
    Case("darknet19", 10240, "rtx2080ti", 18.1),
    Case("darknet19", 20480, "rtx2080ti", 73.8),
    Case("darknet19", 10240, "a100-40", 17.0),
    Case("darknet19", 20480, "a100-40", 65.2),
)


def planned(*, network: str, image_size: int, card: str, tf32: bool, emit: _child.Emit) -> dict[str, Any]:
    """Plan a step for all memory that TensorFlow allocates on a card.

    Args:
        network: Name of a task.
        image_size: Height and width.
        card: Name of the card.
        tf32: Whether convolutions may round their operands to 10 bits.
        emit: Not used.
    """
    del emit
    import tensorflow as tf

    import tflms_sft
    from benchmarks import _nets
    from rewriters.device.cards import CARDS
    from rewriters.ir.device_model import planning_for

    tf.config.experimental.enable_tensor_float_32_execution(tf32)
    step = _nets.TASKS[network].step(image_size, 1)
    with planning_for(CARDS[card].device_model):
        budget = tflms_sft.AutoParams(CARDS[card].memory_limit)
        try:
            plan = tflms_sft.rewrite(step, budget, *step.input_signature).plan
        except tflms_sft.BudgetError as error:
            return {"error": _child.first_line(str(error)), "smallest_bytes": error.smallest_bytes}
    return {
        "headline": plan.headline(),
        "budget_bytes": CARDS[card].memory_limit,
        "peak_bytes": plan.predicted.peak_bytes,
        "original_peak_bytes": plan.original.peak_bytes,
        "seconds": plan.predicted.seconds,
        "original_seconds": plan.original.seconds,
    }


def table(cases: Sequence[Case], plans: dict[str, dict[str, Any]]) -> str:
    """Return the Markdown table of planned and published times."""
    from rewriters.device.cards import CARDS

    title = ["network", "image", "card", "limit", "original peak", "planned peak"]
    lines = [[*title, "planned, with TF32", "planned, without", "published"]]
    for case in cases:
        with_tf32, without = (plans[_key(case, tf32)] for tf32 in (True, False))
        sizes = (without[name] for name in ("budget_bytes", "original_peak_bytes", "peak_bytes"))
        lines.append(
            [
                case.network,
                f"{case.image_size} px",
                case.card,
                *(f"{size / 2**30:.3g} GiB" for size in sizes),
                f"{with_tf32['seconds']:.1f} s" if CARDS[case.card].tf32 else "-",
                f"{without['seconds']:.1f} s",
                f"{case.seconds:.1f} s",
            ]
        )
    return _results.markdown(lines)


def _key(case: Case, tf32: bool) -> str:
    return f"{case.network} {case.image_size} {case.card} {'with' if tf32 else 'without'} TF32"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, store and print."""
    parser = _arguments.parser("benchmarks.cards", __doc__)
    parser.add_argument("--results", type=Path, metavar="FILE", default=_results.RESULTS / "cards.json")
    options: argparse.Namespace = parser.parse_args(arguments)
    report, plans = _results.provenance("benchmarks.cards", arguments), {}
    for case in CASES:
        for tf32 in (True, False):
            kwargs = {"network": case.network, "image_size": case.image_size, "card": case.card, "tf32": tf32}
            plans[_key(case, tf32)] = _child.call_in_child("benchmarks.cards:planned", kwargs)
            print(_key(case, tf32), plans[_key(case, tf32)], flush=True)
    text = table(CASES, plans)
    print(text)
    _results.write(options.results, {**report, "plans": plans}, {"times": text})
    return 0


if __name__ == "__main__":
    _child.leave_with(main)
