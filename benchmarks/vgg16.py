"""Compares the plain training step of a large-image network with the rewritten one.

Run by `python -m benchmarks.vgg16 --image-size N`; README.md beside this file says what the figures mean.
This process starts the measurements, one child process each, and imports no TensorFlow itself.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _meter, _nets

RESULTS = Path(__file__).resolve().parent / "results"
VARIANTS = ("plain", "rewritten")
SEED = 0
# Small enough that a few steps on noise stay finite; the figures do not depend on it.
LEARNING_RATE = 1e-5

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a child has to build and run.

    Attributes:
        model: Key of `_nets.NETS`.
        image_size: Height and width of the images in pixels.
        batch: Images per step.
        segments: Names of the layers whose outputs end the segments, in order.
        num_tiles: Tiles per segment.
        backward_num_tiles: Those of the backward loops.
        memory_budget: Where given, MemoryBudget plans and the two above are not used.
        warmup: Steps before the counted ones; the first of them traces.
        steps: Counted steps.
        device: "cpu" or "gpu".
    """

    model: str
    image_size: int
    batch: int
    segments: tuple[str, ...]
    num_tiles: tuple[Pair, ...]
    backward_num_tiles: tuple[Pair, ...]
    memory_budget: str | None
    warmup: int
    steps: int
    device: str

    @property
    def name(self) -> str:
        """File name of the results, without its ending."""
        parts = [self.model, str(self.image_size), f"b{self.batch}"]
        if self.memory_budget:
            parts.append(f"budget{self.memory_budget}")
        else:
            grids = zip(self.segments, self.num_tiles, self.backward_num_tiles, strict=True)
            for exit_, forward, backward in grids:
                different = () if forward == backward else (backward,)
                parts.append("-".join([exit_, *(f"{h}x{w}" for h, w in (forward, *different))]))
        if self.device != "cpu":
            parts.append(self.device)
        return re.sub(r"[^\w.-]", "_", "_".join(parts))


# ----------------------------------------------------------------------------------------------------------
# In the child.


def measure(*, what: str, variant: str, spec: dict[str, Any], emit: _child.Emit) -> dict[str, Any]:
    """Trains for the warm-up and the counted steps and returns the figures of one child.

    Args:
        what: "time" returns step times and peak_bytes, "memory" the RSS figures; which of them a process
            can give depends on the environment that the parent set.
        variant: "plain" or "rewritten".
        spec: Fields of a `Spec`.
        emit: Gets one dict per step.

    Returns:
        The figures, JSON-able.
    """
    import keras

    chosen = _spec_of(spec)
    keras.utils.set_random_seed(SEED)
    model = _nets.NETS[chosen.model](chosen.image_size)
    optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=0.9)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    optimizer.build(model.trainable_variables)
    data = _batches(chosen)
    rewriter = _rewriter(chosen) if variant == "rewritten" else None
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
    figures["fixed_bytes"] = sum(_nbytes(v) for v in [*model.weights, *optimizer.variables])
    if rewriter is not None:
        figures["plan"] = _without_timelines(json.loads(rewriter.plan.to_json()))
        figures["plan_summary"] = rewriter.plan.summary()
        figures["predicted_peak_bytes"] = rewriter.plan.predicted.peak_bytes
    return figures


def _without_timelines(plan: dict[str, Any]) -> dict[str, Any]:
    """Drops what makes up most of a plan's JSON and can be had again from the plan's settings."""
    return {
        name: _without_timelines(value) if isinstance(value, dict) else value
        for name, value in plan.items()
        if name != "timeline"
    }


def _spec_of(fields: dict[str, Any]) -> Spec:
    """Undoes what JSON does to tuples."""
    tiles = {
        key: tuple((height, width) for height, width in fields[key]) for key in ("num_tiles", "backward_num_tiles")
    }
    return Spec(**{**fields, "segments": tuple(fields["segments"]), **tiles})


def _batches(spec: Spec) -> Any:
    """Returns an endless dataset of one batch of noise: the same tensor in each step, no copies."""
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(SEED)
    shape = (spec.batch, spec.image_size, spec.image_size, 3)
    images = generator.standard_normal(shape, dtype=np.float32)
    labels = generator.integers(_nets.CLASSES, size=spec.batch, dtype=np.int32)
    options = tf.data.Options()
    options.autotune.enabled = False  # its thread may take as long to end as a step of training
    return tf.data.Dataset.from_tensors((images, labels)).repeat().with_options(options)


def _rewriter(spec: Spec) -> Any:
    """Returns the callback under test."""
    import tflms_sft

    if spec.memory_budget:
        return tflms_sft.MemoryBudget(spec.memory_budget)
    entries = (_nets.INPUT_NAME, *spec.segments[:-1])
    pieces = zip(entries, spec.segments, spec.num_tiles, spec.backward_num_tiles, strict=True)
    return tflms_sft.SFT(
        segments=[
            tflms_sft.SegmentSpec(entry, exit_, num_tiles=forward, backward_num_tiles=backward)
            for entry, exit_, forward, backward in pieces
        ]
    )


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


def run(spec: Spec, runs: int, variants: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Runs all children, the variants in turns, so that a drift of the machine meets them alike.

    Args:
        spec: What to measure.
        runs: Children per variant and kind of measurement.
        variants: Which of `VARIANTS`.
        say: Prints progress.

    Returns:
        Per variant the merged figures, or {"failed": why} for a plain step that did not fit.
    """
    parts: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    failed: dict[str, str] = {}
    kinds = ["time"] if spec.device == "gpu" else ["time", "memory"]  # RSS tells nothing of a GPU
    for what in kinds:
        for index in range(runs):
            for variant in variants:
                if variant in failed:
                    continue
                began = time.monotonic()
                outcome = _measure_in_child(what, variant, spec)
                if outcome.ok:
                    parts[variant].append(outcome.result)
                elif variant == "plain":
                    failed[variant] = outcome.how_it_ended()
                else:
                    raise _child.ChildError(_why_failed(outcome))
                told = _told(outcome)
                say(f"{what} {index + 1}/{runs} {variant}: {told} ({time.monotonic() - began:.0f} s)")
    return {name: {"failed": failed[name]} if name in failed else _merge(parts[name]) for name in variants}


def _measure_in_child(what: str, variant: str, spec: Spec) -> _child.Outcome:
    kwargs = {"what": what, "variant": variant, "spec": dataclasses.asdict(spec)}
    env = dict(_child.TRUE_RSS_ENV) if what == "memory" else {}
    if spec.device == "gpu":
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return _child.run_child("benchmarks.vgg16:measure", kwargs, env=env)


def _why_failed(outcome: _child.Outcome) -> str:
    """Returns the reason, with the end of the log unless the command line asked for what cannot be."""
    if outcome.error and outcome.error["type"] in ("BudgetError", "SegmentError"):
        return outcome.how_it_ended()
    return f"{outcome.how_it_ended()}\n{outcome.log_tail(40)}"


def _told(outcome: _child.Outcome) -> str:
    """One line on how a child went, for the progress."""
    if not outcome.ok:
        return outcome.how_it_ended()
    figures = outcome.result
    if "step_seconds" in figures:
        median = statistics.median(figures["step_seconds"])
        return f"{median:.2f} s a step, peak_bytes {_size(figures['peak_bytes'])}"
    return f"net RSS {_size(figures['net_rss_bytes'])}"


def _merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the figures of a variant's children: all times, and of each size the largest."""
    times = [second for part in parts for second in part.get("step_seconds", [])]
    cpu_times = [second for part in parts for second in part.get("step_cpu_seconds", [])]
    merged: dict[str, Any] = {
        "step_seconds": times,
        "step_seconds_median": statistics.median(times),
        "step_seconds_min": min(times),
        "step_seconds_max": max(times),
        "cpu_seconds_median": statistics.median(cpu_times),
        "cold_seconds": statistics.median(part["cold_seconds"] for part in parts if "cold_seconds" in part),
        "losses": next(part["losses"] for part in parts if "losses" in part),
    }
    sizes = ("peak_bytes", "fixed_bytes", "predicted_peak_bytes", "net_rss_bytes", "net_rss_bytes_cold")
    for name in sizes:
        merged[name] = max((part[name] for part in parts if part.get(name)), default=None)
    for name in ("plan", "plan_summary"):
        merged[name] = parts[0].get(name)
    return merged


def compare(spec: Spec, results: dict[str, Any]) -> dict[str, Any]:
    """Adds the time per pixel to each variant and returns the ratios plain/rewritten."""
    pixels = spec.batch * spec.image_size**2
    whole = {name: figures for name, figures in results.items() if "failed" not in figures}
    for figures in whole.values():
        figures["microseconds_per_pixel"] = figures["step_seconds_median"] / pixels * 1e6
    if len(whole) < 2:
        return {}
    plain, rewritten = (whole[name] for name in VARIANTS)
    sizes = ("peak_bytes", "net_rss_bytes", "net_rss_bytes_cold")
    names = (*sizes, "step_seconds_median", "cpu_seconds_median", "cold_seconds")
    ratios = {n: plain[n] / rewritten[n] for n in names if plain.get(n) and rewritten.get(n)}
    pairs = zip(plain["losses"], rewritten["losses"], strict=True)
    ratios["loss_difference"] = max(abs(a - b) / max(abs(a), 1e-30) for a, b in pairs)
    return ratios


def table(results: dict[str, Any], ratios: dict[str, Any]) -> str:
    """Returns the figures as a Markdown table."""
    rows: list[tuple[str, str | None, Callable[[dict[str, Any]], str]]] = [
        ("peak_bytes", "peak_bytes", lambda f: _size(f["peak_bytes"])),
        ("predicted peak_bytes", None, lambda f: _size(f["predicted_peak_bytes"])),
        ("fixed_bytes", None, lambda f: _size(f["fixed_bytes"])),
        ("net_rss_bytes, warm", "net_rss_bytes", lambda f: _size(f["net_rss_bytes"])),
        ("net_rss_bytes, cold", "net_rss_bytes_cold", lambda f: _size(f["net_rss_bytes_cold"])),
        ("step, median", "step_seconds_median", lambda f: f"{f['step_seconds_median']:.2f} s"),
        ("step, min-max", None, lambda f: f"{f['step_seconds_min']:.2f}-{f['step_seconds_max']:.2f} s"),
        ("step, CPU time", "cpu_seconds_median", lambda f: f"{f['cpu_seconds_median']:.2f} s"),
        ("first step", "cold_seconds", lambda f: f"{f['cold_seconds']:.1f} s"),
        ("per pixel", None, lambda f: f"{f['microseconds_per_pixel']:.3f} µs"),
    ]
    lines = [["", *results, "plain/rewritten"]]
    for title, ratio, cell in rows:
        cells = ["failed" if "failed" in figures else cell(figures) for figures in results.values()]
        known = ratios.get(ratio) if ratio else None
        lines.append([title, *cells, f"{known:.2f}" if known else ""])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**30:.3f} GiB"


def hardware() -> dict[str, Any]:
    """Returns what the times depend on; the load is the one before the measurements."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    meminfo = Path("/proc/meminfo").read_text()
    model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    total = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    return {
        "cpu": model.group(1) if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(total.group(1)) * 1024 if total else None,
        "system": f"{platform.system()} {platform.release()}",
        "load_average_before": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Returns the versions of what runs, and the commit where git knows it."""
    found = {"python": platform.python_version()}
    for package in ("tensorflow", "keras", "numpy", "tflms-sft"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    found["onednn"] = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "TensorFlow's default")
    command = ["git", "-C", str(_child.ROOT), "describe", "--always", "--dirty"]
    try:
        found["commit"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return found


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vgg16", description=__doc__)
    parser.add_argument("--image-size", type=_arguments.positive, required=True, metavar="N")
    parser.add_argument("--num-tiles", type=_tiles, metavar="HxW,...", help="tiles of each segment")
    parser.add_argument("--backward-num-tiles", type=_tiles, metavar="HxW,...", help="default: as --num-tiles")
    parser.add_argument("--segments", metavar="EXIT,...", help="layers whose outputs end the segments")
    parser.add_argument("--memory-budget", metavar="SIZE", help="have MemoryBudget plan, e.g. 1.2GiB")
    parser.add_argument("--model", choices=sorted(_nets.NETS), default="vgg16")
    parser.add_argument("--batch", type=_arguments.positive, default=1)
    parser.add_argument("--steps", type=_arguments.positive, default=3, help="counted steps of each child")
    parser.add_argument("--warmup", type=_arguments.positive, default=1, help="steps before the counted ones")
    parser.add_argument("--runs", type=_arguments.positive, default=3, help="children of each variant and kind")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--skip-plain", action="store_true", help="measure only the rewritten step")
    parser.add_argument("--json", type=Path, metavar="PATH", help="default: a file in benchmarks/results/")
    options = parser.parse_args(arguments)
    if options.memory_budget and (options.num_tiles or options.backward_num_tiles or options.segments):
        parser.error("--memory-budget plans segments and tiles itself")
    if options.model not in _nets.DEFAULT_SEGMENTS and not (options.memory_budget or options.segments):
        parser.error(f"--model {options.model} has no default segments. Give a --memory-budget, or --segments")
    exits, tiles = _nets.DEFAULT_SEGMENTS.get(options.model, ((), ()))
    options.segments = tuple(options.segments.split(",")) if options.segments else exits
    options.num_tiles = options.num_tiles or tiles
    options.backward_num_tiles = options.backward_num_tiles or options.num_tiles
    for flag, grids in (("num", options.num_tiles), ("backward-num", options.backward_num_tiles)):
        if len(grids) != len(options.segments):
            parser.error(f"one --{flag}-tiles per segment. Received: {len(grids)} for {len(options.segments)}")
    return options


def _tiles(text: str) -> tuple[Pair, ...]:
    if not re.fullmatch(r"\d+x\d+(,\d+x\d+)*", text):
        raise argparse.ArgumentTypeError(f"expected HxW, as in 4x4,2x2. Received: {text}")
    return tuple((int(h), int(w)) for h, w in (part.split("x") for part in text.split(",")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the figures."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse_arguments(arguments)
    names = [field.name for field in dataclasses.fields(Spec)]
    spec = Spec(**{name: getattr(options, name) for name in names})
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.vgg16", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "spec": dataclasses.asdict(spec),
        "runs": options.runs,
    }
    for name in ("command", "hardware", "versions"):
        print(f"{name}: {report[name] if name == 'command' else json.dumps(report[name])}", flush=True)
    variants = VARIANTS[1:] if options.skip_plain else VARIANTS
    try:
        results = run(spec, options.runs, variants, lambda line: print(line, flush=True))
    except _child.ChildError as error:
        print(f"the rewritten step failed: {error}", file=sys.stderr)
        return 1
    ratios = compare(spec, results)
    report |= {"results": results, "ratios": ratios}
    path = options.json or RESULTS / f"{spec.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    _print_report(results, ratios, path)
    return 0


def _print_report(results: dict[str, Any], ratios: dict[str, Any], path: Path) -> None:
    summary = results["rewritten"].get("plan_summary")
    if summary:
        print(f"\n{summary}")
    print(f"\n{table(results, ratios)}")
    for name, figures in results.items():
        if "failed" in figures:
            print(f"{name} failed: {figures['failed']}")
    if "loss_difference" in ratios:
        print(f"Largest relative difference of the losses: {ratios['loss_difference']:.1e}")
    print(f"Written: {path}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
