"""The largest batch that trains under a memory cap, plain and with swaps to disk.

    python -m benchmarks.max_batch [--image-size 224] [--memory 2GiB] [--search measured] [--json max_batch.json]

The cap stands for a device's memory: weights, optimizer slots, the batch and everything that a step makes have to find
room in `--memory`; libraries, the traced graph and the threads of the process do not count, as they would not on a
device. Each trial is a process of its own. It builds the network, traces the step for the batch that it tries and
takes one step without a cap, after which it owns what any step needs. Then it sets RLIMIT_DATA to the data that it has
now (VmData), less the weights, slots and images that are in it, plus `--memory`, and trains on. For that first step the
machine has to have somewhat more memory than `--memory`.

RLIMIT_DATA counts private writable mappings: tensors, and the scratch memory of kernels, and swapped-in tensors, which
are private mappings of their files. The page cache is not in it: what was swapped out may stay in memory that the
operating system takes back when somebody needs it. Tensors come from the C library's `malloc`, each large one a mapping
that ends with it; TensorFlow's own pool would keep and round up what it once had.

The largest batch is first predicted, by the plan's `peak_bytes`, without a step being run; a trial with it has to end
well, one with a tenth more has not to. `MemoryBudget` leaves headroom, as a process that trained something else before
has its memory in pieces; here there is none, and none is left unless `--headroom` says so. `--search measured` also
looks for the largest batch by trials alone.
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

from benchmarks import _arguments, _child, _nets, _results
from tflms_sft._util import bisection

MIB = 2**20
SAMPLE_SECONDS = 0.01
VARIANTS: dict[str, dict[str, Any] | None] = {"plain": None, "swapped": _nets.LEAST_MEMORY}

Trial = dict[str, Any]


# ----------------------------------------------------------------------------------------------------------
# In the child.


def _step(net: str, image_size: int, batch: int, params: dict[str, Any] | None) -> tuple[Any, Any]:
    """Returns the model and its training step for a batch, swapped if there are `params`."""
    import tflms_sft

    step = _nets.TASKS[net].step(image_size, batch)
    if params is None:
        return step.model, step
    return step.model, tflms_sft.rewrite(step, tflms_sft.LMSParams(**{"tier": "disk", **params}))


def predict(
    *, net: str, image_size: int, memory: int, params: dict[str, Any] | None, emit: _child.Emit
) -> dict[str, Any]:
    """Finds the largest batch whose predicted peak is within `memory`.

    Returns:
        "batch" and its "peak_bytes"; with a batch of 0 there is none, and the peak is that of one image.
    """
    import keras

    peaks: dict[int, int] = {}

    def peak(batch: int) -> int:
        if batch not in peaks:
            keras.backend.clear_session()
            _, rewritten = _step(net, image_size, batch, _nets.LEAST_MEMORY if params is None else params)
            plan = rewritten.plan  # which tells of the plain step too
            peaks[batch] = (plan.original if params is None else plan.predicted).peak_bytes
            emit({"batch": batch, "peak_bytes": peaks[batch]})
        return peaks[batch]

    guess = bisection.extrapolated(peak, memory, 2, 8)
    batch = bisection.largest(lambda batch: peak(batch) <= memory, guess)
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
    """Trains under the cap, or without one to see what a step needs."""
    import tensorflow as tf

    task = _nets.TASKS[net]
    model, step = _step(net, image_size, batch, params)
    images, labels = map(tf.constant, task.noise(image_size, batch))
    float(step(images, labels))
    fixed = 4 * sum(math.prod(v.shape) for v in [*model.weights, *model.optimizer.variables])
    ctypes.CDLL(None).malloc_trim(0)  # free pieces of the heap would be room that the cap does not know of
    own = fixed + sum(int(tf.size(t)) * t.dtype.size for t in (images, labels))
    idle = _child.status_bytes("VmData") - own
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
    """Trains in a child and tells whether it had room, and the memory that it took, at its samples' highest.

    Raises:
        ChildError: It failed for another reason than its memory.
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
    taken = int(highest - capped["idle_bytes"])
    trial = {"batch": batch, "fits": why is None, "why": why, "taken_bytes": taken, "step_seconds": seconds}
    print(f"{variant}, batch {batch}: {told(trial)}", flush=True)
    return trial


def reason(outcome: _child.Outcome, capped: bool) -> str | None:
    """Returns why a trial had no room, None where it had.

    Kernels may crash on memory that they did not get before anybody says so; the step without a cap went well.

    Args:
        outcome: How the child ended.
        capped: Whether it had come as far as to set the cap.

    Raises:
        ChildError: It failed for another reason than its memory.
    """
    if outcome.ok:
        return None
    words = _child.out_of_memory(outcome)
    if capped and (words or outcome.returncode < 0):
        return words or outcome.how_it_ended()
    raise _child.ChildError(f"{outcome.how_it_ended()}\n{outcome.log_tail()}".rstrip())


def told(trial: Trial) -> str:
    """Return a trial as text."""
    if not trial["fits"]:
        return f"out of memory ({trial['why']})"
    return f"fits, took {trial['taken_bytes'] / MIB:.0f} MiB, {statistics.median(trial['step_seconds']):.2f} s a step"


def examine(options: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Predicts the largest batch of a variant, tries it and a tenth more, and searches by trials if asked to."""
    kwargs = {"net": options.net, "image_size": options.image_size, "params": VARIANTS[variant]}
    kwargs["memory"] = int(options.memory * (1 - options.headroom))

    def tell(event: _child.Event) -> None:
        print(f"{variant}, batch {event['batch']}: predicted {event['peak_bytes'] / MIB:.0f} MiB", flush=True)

    found = _child.call_in_child("benchmarks.max_batch:predict", kwargs, env=_child.TRUE_RSS_ENV, on_event=tell)
    predicted = found["batch"]
    trials: dict[int, Trial] = {}

    def trial(batch: int) -> Trial:
        if batch not in trials:
            trials[batch] = attempt(options, variant, batch, options.memory)
        return trials[batch]

    if predicted:
        found["tried"], found["above"] = trial(predicted), trial(math.ceil(1.1 * predicted))
    if options.search == "measured":
        # The order in which operations run varies, and what they take with it: a fiftieth is nothing to search for.
        found["measured"] = bisection.largest(lambda batch: trial(batch)["fits"], max(predicted, 1), 0.02)
    return {**found, "trials": list(trials.values())}


def table(title: str, results: dict[str, dict[str, Any]]) -> str:
    """The figures as a Markdown table, with what swapping makes of each."""
    rows: dict[str, Callable[[dict[str, Any]], Any]] = {
        "largest batch, predicted": lambda found: found["batch"],
        "its predicted peak": lambda found: f"{found['peak_bytes'] / MIB:.0f} MiB",
        "tried": lambda found: _verdict(found.get("tried")),
        "10 % more": lambda found: _verdict(found.get("above")),
        "largest batch, by trials": lambda found: found.get("measured", "-"),
        "step at the largest predicted": lambda found: _time(found.get("tried")),
        "the same, per image": lambda found: _time(found.get("tried"), found["batch"]),
    }
    lines = [[title, *results, "of plain"], ["---"] * (len(results) + 2)]
    for name, cell in rows.items():
        lines.append([name, *(str(cell(found)) for found in results.values()), ""])
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
    """Parses the command line."""
    parser = _arguments.parser("benchmarks.max_batch", __doc__)
    add = parser.add_argument
    add("--net", choices=_nets.SWAPPED, default="resnet50")
    add("--image-size", type=_arguments.positive, default=224, metavar="N", help="default: %(default)s")
    add("--memory", type=_arguments.size, default="2GiB", metavar="SIZE", help="the cap; default: %(default)s")
    add("--headroom", type=_arguments.part, default=0.0, help="of a prediction; default: %(default)s")
    add("--steps", type=_arguments.positive, default=2, help="steps of a trial; default: %(default)s")
    add("--search", choices=("predicted", "measured"), default="predicted", help="measured: also by trials alone")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Predicts, tries, prints; returns 1 if a predicted batch did not fit."""
    options = parse_arguments(arguments)
    results = {variant: examine(options, variant) for variant in VARIANTS}
    title = f"{_nets.TASKS[options.net].title}, {options.image_size} px, {options.memory / MIB:.0f} MiB"
    printed = table(title, results)
    print(f"\n{printed}")
    if options.json:
        names = ("net", "image_size", "memory", "headroom", "steps", "search")
        asked = {name: getattr(options, name) for name in names}
        report = {**_results.provenance("benchmarks.max_batch", arguments), "options": asked}
        report |= {"params": _nets.LEAST_MEMORY, "results": results}
        _results.write(options.json, report, {"batches": printed})
    return 0 if all(found.get("tried", {}).get("fits") for found in results.values()) else 1


if __name__ == "__main__":
    _child.leave_with(main)
