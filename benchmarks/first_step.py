"""Duration of the first step of a `fit`, and of its parts.

    python -m benchmarks.first_step [--cases NAME ...] [--part 0.5]

Each network trains for four steps: plain, with a budget and an empty plan cache, and with the same budget and the
cached plan. The first step of plain training is all *rest*, tracing included. The parts of the others are:

- *trace*: Keras's step is traced.
- *analyse*: The graph is canonicalised and analysed.
- *search*: The planner chooses tiles and swaps.
- *emit*: Loops and swaps are emitted as a graph.
- *rest*: Keras's function imports this graph, TensorFlow optimises it, and the step runs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _results, planner

STEPS = 4
PARTS = ("trace", "analyse", "search", "emit")
DEFAULT_CASES = ("vgg16", "resnet50", "DenseNet121")


# ----------------------------------------------------------------------------------------------------------
# In the child.


def train(*, case: str, budget: int | None, emit: _child.Emit) -> dict[str, Any]:
    """Train; return the seconds of each step, and of the parts of the first step.

    Args:
        case: Name of a network of `benchmarks.planner`.
        budget: Bytes; `None` for plain training.
        emit: Not used.
    """
    del emit
    import keras
    import tensorflow as tf

    import tflms_sft

    parts = _timed_parts()
    network = planner.CASES[case]
    model = network.task.compiled(network.image_size)
    batch = tuple(map(tf.constant, network.task.noise(network.image_size, network.batch)))
    began, steps = [0.0], list[float]()
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda *_, **__: began.append(time.perf_counter()),
        on_train_batch_end=lambda *_, **__: steps.append(time.perf_counter() - began[-1]),
    )
    budgets = [] if budget is None else [tflms_sft.MemoryBudget(budget, verbose=0)]
    model.fit(tf.data.Dataset.from_tensors(batch).repeat(STEPS), verbose=0, callbacks=[*budgets, clock])
    return {"steps": steps, **parts}


def _timed_parts() -> dict[str, float]:
    """Time the parts of the first step, except the rest; return the dict that receives their seconds."""
    from tflms_sft._keras import step_planner
    from tflms_sft._rewrite import rewrite

    parts = dict.fromkeys(PARTS, 0.0)

    def replace(owner: Any, name: str, caller_part: str, part: str) -> None:
        """Add the seconds of a function to `part`, and subtract them from the part of its caller."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - begin
                parts[part] += seconds
                if caller_part:
                    parts[caller_part] -= seconds

        setattr(owner, name, timed)

    replace(step_planner.StepPlanner, "rewrite", "", "trace")
    replace(step_planner, "analyse_step", "trace", "analyse")
    replace(step_planner, "rewrite_traced", "trace", "search")
    replace(rewrite, "carry_out", "search", "emit")
    return parts


# ----------------------------------------------------------------------------------------------------------
# In the parent.


def row(name: str, kind: str, measured: dict[str, Any]) -> str:
    """Return a row of the table: the parts of the first step, and the median of the later ones."""
    first, *later = measured["steps"]
    rest = first - sum(measured[part] for part in PARTS)
    seconds = [first, *(measured[part] for part in PARTS), rest, statistics.median(later)]
    return f"| {name} | {kind} | {' | '.join(f'{value:.1f} s' for value in seconds)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = _arguments.parser("benchmarks.first_step", __doc__)
    parser.add_argument("--cases", nargs="+", choices=list(planner.CASES), default=DEFAULT_CASES)
    part_help = "budget as a fraction of the original step's predicted peak; default: %(default)s"
    parser.add_argument("--part", type=_arguments.part, default=0.5, help=part_help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all figures")
    options: argparse.Namespace = parser.parse_args(arguments)
    report, networks = _results.provenance("benchmarks.first_step", arguments), {}
    lines = [f"| network | training | first step | {' | '.join(PARTS)} | rest | later step |"]
    lines.append("| --- " * (len(PARTS) + 5) + "|")
    print("\n".join(lines), flush=True)
    for case in options.cases:
        plain = _child.call_in_child("benchmarks.planner:plain_peak", {"case": case})
        budget = int(options.part * plain)
        with tempfile.TemporaryDirectory() as cache:
            env = {"TFLMS_SFT_PLAN_CACHE": cache}
            for kind, limit in (("plain", None), ("new plan", budget), ("cached plan", budget)):
                measured = _child.call_in_child("benchmarks.first_step:train", {"case": case, "budget": limit}, env=env)
                networks[f"{case}, {kind}"] = measured
                lines.append(row(case, kind, measured))
                print(lines[-1], flush=True)
    if options.json:
        _results.write(options.json, {**report, "networks": networks}, {"parts": "\n".join(lines)})
    return 0


if __name__ == "__main__":
    _child.leave_with(main)
