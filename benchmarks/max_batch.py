"""Largest batch that trains under a memory cap, plain and with swaps to disk.

    python -m benchmarks.max_batch [--image-size 224] [--memory 2GiB] [--search measured] [--json max_batch.json]

The plan's `peak_bytes` predicts the largest batch for `--memory`. A trial trains with it under the cap, and another
trial with a tenth more images. `--search measured` also finds the largest batch by trials alone. The exit code is 1 if
a predicted batch does not fit.

The cap, RLIMIT_DATA, stands for a device's memory. It covers all tensors, swapped-in ones included, and the scratch
memory of kernels. It excludes the page cache, libraries, the traced graph and threads. A trial runs one step without a
cap, which needs somewhat more than `--memory`. It then sets RLIMIT_DATA to its private writable memory (VmData), minus
weights, slots and images, plus `--memory`, and trains on.

Source: Le et al., "TFLMS: Large Model Support in TensorFlow by Graph Rewriting" (2018), which reports 4.7 times the
plain batch for ResNet-50.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _bisection, _child, _nets, _results

MIB = 2**20
SAMPLE_SECONDS = 0.01
VARIANTS: dict[str, dict[str, Any] | None] = {"plain": None, "swapped": _nets.LEAST_MEMORY}

Trial = dict[str, Any]


# ----------------------------------------------------------------------------------------------------------
# In the child.


def _step(net: str, image_size: int, batch: int, params: dict[str, Any] | None) -> tuple[Any, Any]:
    """Return the model and its training step for a batch size, with swaps if there are `params`."""
    import tflms_sft

    step = _nets.TASKS[net].step(image_size, batch)
    if params is None:
        return step.model, step
    return step.model, tflms_sft.rewrite(step, tflms_sft.LMSParams(**{"tier": "disk", **params}))


def predict(
    *, net: str, image_size: int, memory: int, params: dict[str, Any] | None, emit: _child.Emit
) -> dict[str, Any]:
    """Find the largest batch whose predicted peak is within `memory`.

    Returns:
        "batch" and its "peak_bytes"; if no batch fits, 0 and the peak of one image.
    """
    import keras

    peaks: dict[int, int] = {}

    def peak(batch: int) -> int:
        if batch not in peaks:
            keras.backend.clear_session()
            _, rewritten = _step(net, image_size, batch, _nets.LEAST_MEMORY if params is None else params)
            plan = rewritten.plan  # Predicts the original step, too.
            peaks[batch] = (plan.original if params is None else plan.predicted).peak_bytes
            emit({"batch": batch, "peak_bytes": peaks[batch]})
        return peaks[batch]

    guess = _bisection.extrapolated(peak, memory, 2, 8)
    batch = _bisection.largest(lambda batch: peak(batch) <= memory, guess)
    return {"batch": batch, "peak_bytes": peak(max(batch, 1))}


def train(
    *,
    net: str,
    image_size: int,
    batch: int,
    memory: int | None,
    params: dict[str, Any] | None,
    steps: int,
    emit: _child.Emit,
) -> None:
    """Train under the cap, or without one if `memory` is `None`."""
    import tensorflow as tf

    task = _nets.TASKS[net]
    model, step = _step(net, image_size, batch, params)
    images, labels = map(tf.constant, task.noise(image_size, batch))
    float(step(images, labels))
    fixed = 4 * sum(math.prod(v.shape) for v in [*model.weights, *model.optimizer.variables])
    ctypes.CDLL(None).malloc_trim(0)  # Free memory of the heap would be exempt from the cap.
    counted = fixed + sum(int(tf.size(t)) * t.dtype.size for t in (images, labels))
    idle = _child.status_bytes("VmData") - counted
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (idle + memory, idle + memory))
    emit({"idle_bytes": idle})
    for _ in range(steps):
        began = time.perf_counter()
        loss = float(step(images, labels))
        emit({"seconds": time.perf_counter() - began, "loss": loss})


# ----------------------------------------------------------------------------------------------------------
# In the parent.


def attempt(options: argparse.Namespace, variant: str, batch: int, memory: int | None) -> Trial:
    """Train in a child process; return whether it fits, and the largest sample of its memory.

    Raises:
        ChildError: If the child fails for another reason than memory.
    """
    capped: dict[str, float] = {}
    seconds: list[float] = []
    began = time.monotonic()

    def take(event: _child.Event) -> None:
        if "seconds" in event:
            seconds.append(event["seconds"])
        else:
            capped.update(event, at=time.monotonic() - began)

    kwargs = {"net": options.net, "image_size": options.image_size, "batch": batch, "memory": memory}
    outcome = _child.run_child(
        "benchmarks.max_batch:train",
        {**kwargs, "params": VARIANTS[variant], "steps": options.steps},
        env=_child.TRUE_RSS_ENV,
        on_event=take,
        sample_seconds=SAMPLE_SECONDS,
    )
    why = reason(outcome, bool(capped))
    highest = max((sample.data for sample in outcome.samples if sample.seconds > capped["at"]), default=0)
    taken_bytes = int(highest - capped["idle_bytes"])
    trial = {"batch": batch, "fits": why is None, "why": why, "taken_bytes": taken_bytes, "step_seconds": seconds}
    print(f"{variant}, batch {batch}: {_progress(trial)}", flush=True)
    return trial


def reason(outcome: _child.Outcome, capped: bool) -> str | None:
    """Return why a trial did not fit; `None` if it fitted.

    Kernels may crash on a failed allocation before TensorFlow reports it. A crash under the cap thus counts as out of
    memory.

    Args:
        outcome: Outcome of the child.
        capped: Whether the child had set the cap.

    Raises:
        ChildError: If the child failed for another reason than memory.
    """
    if outcome.ok:
        return None
    words = _child.out_of_memory(outcome)
    if capped and (words or outcome.returncode < 0):
        return words or outcome.how_it_ended()
    raise _child.ChildError(f"{outcome.how_it_ended()}\n{outcome.log_tail()}".rstrip())


def _progress(trial: Trial) -> str:
    """Return the text of a progress line on a trial."""
    if not trial["fits"]:
        return f"out of memory ({trial['why']})"
    seconds = statistics.median(trial["step_seconds"])
    return f"fits, took {trial['taken_bytes'] / MIB:.0f} MiB, {seconds:.2f} s per step"


def examine(options: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Predict the largest batch of a variant, try it and a tenth more, and on request find the largest by trials."""
    kwargs = {"net": options.net, "image_size": options.image_size, "params": VARIANTS[variant]}
    kwargs["memory"] = int(options.memory * (1 - options.headroom))

    def tell(event: _child.Event) -> None:
        print(f"{variant}, batch {event['batch']}: predicted {event['peak_bytes'] / MIB:.0f} MiB", flush=True)

    figures = _child.call_in_child("benchmarks.max_batch:predict", kwargs, env=_child.TRUE_RSS_ENV, on_event=tell)
    predicted = figures["batch"]
    trials: dict[int, Trial] = {}

    def trial(batch: int) -> Trial:
        if batch not in trials:
            trials[batch] = attempt(options, variant, batch, options.memory)
        return trials[batch]

    if predicted:
        figures["tried"], figures["above"] = trial(predicted), trial(math.ceil(1.1 * predicted))
    if options.search == "measured":
        # Memory varies with the order in which ops run, so that a precision below 2 % has no meaning.
        figures["measured"] = _bisection.largest(lambda batch: trial(batch)["fits"], max(predicted, 1), 0.02)
    return {**figures, "trials": list(trials.values())}


def table(title: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the figures as a Markdown table, with the ratios of swapped to plain training."""
    rows: dict[str, Callable[[dict[str, Any]], Any]] = {
        "largest batch, predicted": lambda figures: figures["batch"],
        "its predicted peak": lambda figures: f"{figures['peak_bytes'] / MIB:.0f} MiB",
        "tried": lambda figures: _verdict(figures.get("tried")),
        "10 % more": lambda figures: _verdict(figures.get("above")),
        "largest batch, by trials": lambda figures: figures.get("measured", "-"),
        "step at the largest predicted": lambda figures: _time(figures.get("tried")),
        "the same, per image": lambda figures: _time(figures.get("tried"), figures["batch"]),
    }
    lines = [[title, *results, "of plain"], ["---"] * (len(results) + 2)]
    for name, cell in rows.items():
        lines.append([name, *(str(cell(figures)) for figures in results.values()), ""])
    for line, key in ((2, "batch"), (6, "measured")):
        plain, swapped = (results[variant].get(key) for variant in VARIANTS)
        lines[line][-1] = f"{swapped / plain:.2f}" if plain and swapped else "-"
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _verdict(trial: Trial | None) -> str:
    if trial is None:
        return "-"
    took = f"fits, took {trial['taken_bytes'] / MIB:.0f} MiB" if trial["fits"] else "out of memory"
    return f"{trial['batch']}: {took}"


def _time(trial: Trial | None, images: int = 1) -> str:
    if trial is None or not trial["fits"]:
        return "-"
    return f"{statistics.median(trial['step_seconds']) / images:.2f} s"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.max_batch", __doc__)
    add = parser.add_argument
    add("--net", choices=_nets.SWAPPED, default="resnet50")
    add("--image-size", type=_arguments.positive, default=224, metavar="N", help="default: %(default)s")
    add("--memory", type=_arguments.size, default="2GiB", metavar="SIZE", help="the cap; default: %(default)s")
    headroom_help = "fraction of the cap that predictions leave free; default: %(default)s"
    add("--headroom", type=_arguments.part, default=0.0, help=headroom_help)
    add("--steps", type=_arguments.positive, default=2, help="steps of a trial under the cap; default: %(default)s")
    search_help = "measured: also find the largest batch by trials alone; default: %(default)s"
    add("--search", choices=("predicted", "measured"), default="predicted", help=search_help)
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, try and print; return 1 if a predicted batch does not fit."""
    options = parse_arguments(arguments)
    results = {variant: examine(options, variant) for variant in VARIANTS}
    title = f"{_nets.TASKS[options.net].title}, {options.image_size} px, {options.memory / MIB:.0f} MiB"
    printed = table(title, results)
    print(f"\n{printed}")
    if options.json:
        names = ("net", "image_size", "memory", "headroom", "steps", "search")
        settings = {name: getattr(options, name) for name in names}
        report = {**_results.provenance("benchmarks.max_batch", arguments), "options": settings}
        report |= {"params": _nets.LEAST_MEMORY, "results": results}
        _results.write(options.json, report, {"batches": printed})
    return 0 if all(figures.get("tried", {}).get("fits") for figures in results.values()) else 1


if __name__ == "__main__":
    _child.leave_with(main)
