"""Measures the original training step of a network and rewritten ones in child processes, and compares them.

`_nets.TASKS` defines the networks. The parent process does not import TensorFlow.
"""

import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import _arguments, _child, _meter, _nets


@dataclasses.dataclass(frozen=True)
class Spec:
    """Network, data and steps of all child processes.

    Attributes:
        net: Key of `_nets.TASKS`.
        image_size: Height and width of the images in pixels, and depth of volumes.
        batch: Images per step.
        warmup: Steps before the counted ones; the first includes tracing.
        steps: Counted steps.
        device: "cpu" or "gpu".
    """

    net: str
    image_size: int
    batch: int
    warmup: int
    steps: int
    device: str


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run the step: the original step if there are neither a budget nor segments.

    Attributes:
        title: Name in the table.
        budget: Argument of `MemoryBudget`: a size, or a fraction of the original step's predicted peak.
        budget_bytes: The budget in bytes; 0 until `with_bytes` sets it.
        swap: Whether the budget allows swaps.
        segments: Fields of the `SegmentSpec`s of a variant without a budget.
        slug: Name in file names; the title if empty.
    """

    title: str
    budget: str = ""
    budget_bytes: int = 0
    swap: bool = True
    segments: tuple[Mapping[str, Any], ...] = ()
    slug: str = ""


PLAIN = Variant("plain")

Say = Callable[[str], None]
Results = dict[str, dict[str, Any]]


# ----------------------------------------------------------------------------------------------------------
# In the child.


def measure(*, what: str, spec: dict[str, Any], variant: dict[str, Any], emit: _child.Emit) -> dict[str, Any]:
    """Train for the warm-up and the counted steps; return the figures of one child.

    Args:
        what: "time" for step times and allocator peaks, "memory" for the growth of RSS. Each needs an environment of
            its own, which the parent sets.
        spec: Fields of a `Spec`.
        variant: Fields of a `Variant` with `budget_bytes`.
        emit: Called with a dict for each step.

    Returns:
        The figures, JSON-able.
    """
    import keras

    chosen = Spec(**spec)
    task = _nets.TASKS[chosen.net]
    model = task.compiled(chosen.image_size)
    data = batches(task.noise(chosen.image_size, chosen.batch))
    rewriter = _rewriter(Variant(**variant))
    meter = _meter.StepMeter(chosen.warmup, chosen.device, emit)
    hooks = keras.callbacks.LambdaCallback(on_train_batch_begin=meter.begin, on_train_batch_end=meter.end)
    meter.start()
    # One step per epoch: within an epoch Keras logs the running mean of the loss.
    model.fit(
        data,
        epochs=chosen.warmup + chosen.steps,
        steps_per_epoch=1,
        callbacks=[*filter(None, [rewriter]), hooks],
        shuffle=False,
        verbose=0,
    )
    figures = _figures(what, meter)
    figures["fixed_bytes"] = sum(_nbytes(v) for v in [*model.weights, *model.optimizer.variables])
    if rewriter is not None:
        figures["plan"] = _without_curves(json.loads(rewriter.plan.to_json()))
        figures["plan_summary"] = rewriter.plan.summary()
        figures["predicted_peak_bytes"] = rewriter.plan.predicted.peak_bytes
        measured = rewriter.plan.measured
        figures["first_peak_bytes"] = None if measured is None else measured.peak_bytes
        figures["predicted_time_ratio"] = rewriter.plan.predicted.time_ratio
    return figures


def plain_peak(*, spec: dict[str, Any], emit: _child.Emit) -> int:
    """Return the predicted peak of the original step, which is traced but not run."""
    del emit
    import tensorflow as tf

    import tflms_sft

    chosen = Spec(**spec)
    task = _nets.TASKS[chosen.net]
    model = task.compiled(chosen.image_size)
    batch = task.noise(chosen.image_size, chosen.batch)
    step = tf.function(lambda images, labels: model.train_step((images, labels)), autograph=False)
    return tflms_sft.rewrite(step, tflms_sft.AutoParams("1TiB"), *batch).plan.original.peak_bytes


def batches(batch: tuple[Any, Any]) -> Any:
    """Return an endless dataset of one batch, which repeats the same tensors without copies."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False  # Its thread may take as long to stop as a training step.
    return tf.data.Dataset.from_tensors(batch).repeat().with_options(options)


def _rewriter(variant: Variant) -> Any:
    """Return the callback to measure; `None` for the original step."""
    import tflms_sft

    if variant.budget:
        return tflms_sft.MemoryBudget(variant.budget_bytes, swap=variant.swap)
    if variant.segments:
        return tflms_sft.SFT(segments=[tflms_sft.SegmentSpec(**fields) for fields in variant.segments])
    return None


def _without_curves(plan: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's JSON without the curves of its predictions, which are large and follow from its settings."""
    return {
        name: _without_curves(value) if isinstance(value, dict) else value
        for name, value in plan.items()
        if name not in ("progress", "timeline")
    }


def _nbytes(variable: Any) -> int:
    import tensorflow as tf

    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def _figures(what: str, meter: _meter.StepMeter) -> dict[str, Any]:
    if what == "memory":
        return {"net_rss_bytes": max(meter.net_rss), "net_rss_bytes_cold": meter.cold_net_rss}
    return {
        "step_seconds": meter.seconds,
        "step_cpu_seconds": meter.cpu_seconds,
        "cold_seconds": meter.cold_seconds,
        "peak_bytes": max(meter.peaks, default=None),
        "losses": meter.losses,
    }


# ----------------------------------------------------------------------------------------------------------
# In the parent.


def with_bytes(spec: Spec, variants: Sequence[Variant], say: Say) -> list[Variant]:
    """Return the variants with their budgets in bytes.

    A separate child process predicts the original step's peak, so that no figure includes this planning.

    Raises:
        _child.ChildError: If the original step cannot be planned.
    """
    original_bytes = 0
    if any(_arguments.is_part(variant.budget) for variant in variants):
        kwargs = {"spec": dataclasses.asdict(spec)}
        original_bytes = _child.call_in_child("benchmarks._compare:plain_peak", kwargs, env=_environment(spec))
        say(f"plain: predicted peak {shown_size(original_bytes)}")
    return [
        dataclasses.replace(variant, budget_bytes=_arguments.budget_bytes(variant.budget, original_bytes))
        if variant.budget
        else variant
        for variant in variants
    ]


def run(spec: Spec, runs: int, variants: Sequence[Variant], say: Say) -> Results:
    """Run all children. The variants alternate, so that a change of the machine's speed affects all of them.

    Args:
        spec: Network, data and steps.
        runs: Children per variant and kind of measurement.
        variants: Ways to run the step, with budgets in bytes.
        say: Prints progress.

    Returns:
        Merged figures by title, or {"failed": reason}.

    Raises:
        _child.ChildError: If all rewritten variants fail.
    """
    parts: dict[str, list[dict[str, Any]]] = {variant.title: [] for variant in variants}
    failed: dict[str, str] = {}
    kinds = ["time"] if spec.device == "gpu" else ["time", "memory"]  # RSS does not include a GPU's memory.
    for what in kinds:
        for index in range(runs):
            for variant in variants:
                if variant.title in failed:
                    continue
                began = time.monotonic()
                outcome = _measured(what, spec, variant)
                if outcome.ok:
                    parts[variant.title].append(outcome.result)
                else:
                    failed[variant.title] = _why_failed(outcome)
                seconds = time.monotonic() - began
                say(f"{what} {index + 1}/{runs} {variant.title}: {_progress(outcome)} ({seconds:.0f} s)")
                if all(other.title in failed for other in variants if other != PLAIN):
                    raise _child.ChildError(failed[variant.title])
    return {name: {"failed": failed[name]} if name in failed else merged(figures) for name, figures in parts.items()}


def _measured(what: str, spec: Spec, variant: Variant) -> _child.Outcome:
    kwargs = {"what": what, "spec": dataclasses.asdict(spec), "variant": dataclasses.asdict(variant)}
    env = _environment(spec) | (_child.TRUE_RSS_ENV if what == "memory" else {})
    return _child.run_child("benchmarks._compare:measure", kwargs, env=env)


def _environment(spec: Spec) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")} if spec.device == "gpu" else {}


def _why_failed(outcome: _child.Outcome) -> str:
    """Return the reason of a failure, with the end of the log unless a budget, a segment or memory is the reason."""
    is_refused = outcome.error is not None and outcome.error["type"] in ("BudgetError", "SegmentError")
    if is_refused or _child.out_of_memory(outcome):
        return outcome.how_it_ended()
    return f"{outcome.how_it_ended()}\n{outcome.log_tail(40)}"


def _progress(outcome: _child.Outcome) -> str:
    """Return the text of a progress line on a finished child."""
    if not outcome.ok:
        return outcome.how_it_ended()
    figures = outcome.result
    if "step_seconds" in figures:
        median = statistics.median(figures["step_seconds"])
        return f"{median:.2f} s per step, peak {shown_size(figures['peak_bytes'])}"
    return f"growth of RSS {shown_size(figures['net_rss_bytes'])}"


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the figures of a variant's children: all times, and the largest value of each size."""
    times = [second for part in parts for second in part.get("step_seconds", [])]
    cpu_times = [second for part in parts for second in part.get("step_cpu_seconds", [])]
    joined: dict[str, Any] = {
        "step_seconds": times,
        "step_seconds_median": statistics.median(times),
        "step_seconds_min": min(times),
        "step_seconds_max": max(times),
        "cpu_seconds_median": statistics.median(cpu_times),
        "cold_seconds": statistics.median(part["cold_seconds"] for part in parts if "cold_seconds" in part),
        "losses": next(part["losses"] for part in parts if "losses" in part),
    }
    peaks = ("peak_bytes", "first_peak_bytes", "predicted_peak_bytes")
    for name in (*peaks, "fixed_bytes", "net_rss_bytes", "net_rss_bytes_cold"):
        joined[name] = max((part[name] for part in parts if part.get(name)), default=None)
    for name in ("predicted_time_ratio", "plan", "plan_summary"):
        joined[name] = parts[0].get(name)
    return joined


def compare(spec: Spec, results: Results) -> Results:
    """Return the ratios of the original step to each rewritten variant.

    Adds the time per pixel to the figures of each variant that did not fail. Adds the peak that the plans predict for
    the original step to its figures.
    """
    pixels = _nets.TASKS[spec.net].pixels(spec.image_size, spec.batch)
    complete = {title: figures for title, figures in results.items() if "failed" not in figures}
    for figures in complete.values():
        figures["microseconds_per_pixel"] = figures["step_seconds_median"] / pixels * 1e6
    plain = complete.pop(PLAIN.title, None)
    if plain is not None:
        plans = (figures["plan"] for figures in complete.values() if figures["plan"])
        plain["predicted_peak_bytes"] = next((plan["original"]["peak_bytes"] for plan in plans), None)
    return {} if plain is None else {title: _ratios(plain, figures) for title, figures in complete.items()}


def _ratios(plain: dict[str, Any], rewritten: dict[str, Any]) -> dict[str, Any]:
    sizes = ("peak_bytes", "predicted_peak_bytes", "net_rss_bytes", "net_rss_bytes_cold")
    names = (*sizes, "step_seconds_median", "cpu_seconds_median", "cold_seconds")
    ratios = {n: plain[n] / rewritten[n] for n in names if plain.get(n) and rewritten.get(n)}
    pairs = zip(plain["losses"], rewritten["losses"], strict=True)
    ratios["loss_difference"] = max(abs(a - b) / max(abs(a), 1e-30) for a, b in pairs)
    return ratios


def shown_size(nbytes: int | None) -> str:
    """Return a size in GiB, or a dash."""
    return "-" if nbytes is None else f"{nbytes / 2**30:.3f} GiB"
