"""`tflms-sft doctor`: checks this machine and its TensorFlow, and runs a small rewritten step.

The command also works where TensorFlow or Keras cannot be imported, and reports that.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rewriters.errors import RewriteError
from tflms_sft._cli.exit_status import NOT_MET, OK, Outcome, Progress
from tflms_sft._cli.kernel_check import KernelReport, check_kernels
from tflms_sft._util import requirements
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.open_files import open_file_limits
from tflms_sft._util.text import aligned
from tflms_sft._version import PYTHON_RELEASES, __version__

__all__: list[str] = []

FINE, NOTE, FAILED = "ok", "note", "FAILED"

BACKEND = "Keras backend"
"""Name of the line about Keras's backend."""

MIN_OPEN_FILES = 1024
"""Limit of open files below which a step with many swapped tensors may fail."""

MAX_RELATIVE_ERROR = 1e-4
"""Tolerance of the small step, in float32."""

_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one check, with the status `ok`, `note` for a possible problem, or `FAILED`."""

    status: str
    name: str
    text: str


def execute(options: argparse.Namespace) -> Outcome:
    """Run all checks; an exception becomes a `FAILED` line."""
    progress = Progress(options.quiet)
    lines = [*_guarded("Python", _python), *_guarded("machine", _machine)]
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("TensorFlow", _tensorflow),
        ("budgets", _budget),
        ("Keras", _keras),
        ("spill directory", lambda: _spill(options.spill_dir)),
    ]
    is_supported = not any(
        line.name in (*requirements.SUPPORTED_RELEASES, BACKEND) and line.status == FAILED for line in lines
    )
    if is_supported:
        progress.say("checking TensorFlow ...")
        for name, check in checks:
            lines.extend(_guarded(name, check))
        progress.say("running a small step ...")
        for name, trial in (("tiles", _try_tiles), ("swaps", lambda: _try_swaps(options.spill_dir))):
            lines.extend(_guarded(f"small step, {name}", trial))
    reports: list[KernelReport] = []
    if is_supported and options.kernels:
        progress.say("checking GPU kernels ...")
        lines.extend(_guarded("GPU kernels", lambda: _kernels(reports)))
    failed = sum(line.status == FAILED for line in lines)
    verdict = f"{failed} of {len(lines)} FAILED" if failed else "all requirements are met"
    if not is_supported:
        verdict += "; other checks need supported versions of TensorFlow and Keras, and TensorFlow as its backend"
    text = "\n".join(aligned([[line.status, line.name, line.text] for line in lines]))
    data = {"command": "doctor", "ok": not failed, "lines": [dataclasses.asdict(line) for line in lines]}
    for report in reports:
        text, data["kernels"] = f"{text}\n\n{report.text()}\n", report.data()
    return Outcome(f"{text}\n{verdict}", data, NOT_MET if failed else OK)


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:
        yield Finding(FAILED, name, f"{type(error).__name__}: {error}")


def _python() -> Iterator[Finding]:
    yield Finding(FINE, "tflms-sft", __version__)
    oldest, newest = PYTHON_RELEASES
    text = f"{platform.python_implementation()} {platform.python_version()}"
    tested = "{}.{} to {}.{}".format(*oldest, *newest)
    if sys.version_info[:2] < oldest:
        yield Finding(FAILED, "Python", f"{text}; supported: {tested}")
    elif sys.version_info[:2] > newest:
        yield Finding(NOTE, "Python", f"{text}; newer than the tested versions, {tested}")
    else:
        yield Finding(FINE, "Python", text)
    for package in (*requirements.SUPPORTED_RELEASES, "numpy"):
        yield _version(package)
    backend = requirements.keras_backend()
    is_tensorflow = backend == requirements.TENSORFLOW
    remedy = "" if is_tensorflow else f"; only TensorFlow graphs can be rewritten. {requirements.BACKEND_REMEDY}"
    yield Finding(FINE if is_tensorflow else FAILED, BACKEND, f"{backend}{remedy}")
    plots = importlib.util.find_spec("matplotlib") is not None
    missing = 'not installed; charts of plans need it (pip install "tflms-sft[plot]")'
    yield Finding(FINE if plots else NOTE, "matplotlib", importlib.metadata.version("matplotlib") if plots else missing)


def _version(package: str) -> Finding:
    version = requirements.installed_version(package)
    if version is None:
        if importlib.util.find_spec(package) is None:
            return Finding(FAILED, package, f"not installed; install it with: {requirements.pip_command()}")
        version = str(getattr(importlib.import_module(package), "__version__", "of unknown version"))
    if package in requirements.SUPPORTED_RELEASES and requirements.is_too_old(package, version):
        supported, command = requirements.supported_range(package), requirements.pip_command()
        return Finding(FAILED, package, f"{version}; supported: {supported}; install with: {command}")
    if package in requirements.SUPPORTED_RELEASES and requirements.is_untested(package, version):
        tested = requirements.supported_range(package)
        return Finding(NOTE, package, f"{version}; newer than the tested versions, {tested}")
    return Finding(FINE, package, version)


def _machine() -> Iterator[Finding]:
    from rewriters.ir.device_detection import proc_fields
    from tflms_sft._machine.cpu_load import num_cores

    info = proc_fields("/proc/cpuinfo")
    flags = set(info.get("flags", info.get("Features", "")).split())
    extensions = [flag for flag in _CPU_FLAGS if flag in flags]
    parts = (info.get("model name", platform.machine()), f"{num_cores()} core(s)", " ".join(extensions))
    yield Finding(FINE, "CPU", ", ".join(part for part in parts if part))
    memory = proc_fields("/proc/meminfo")
    if "MemTotal" in memory and "MemAvailable" in memory:
        total, free = (int(memory[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        yield Finding(FINE, "memory", f"{format_bytes(total)}, {format_bytes(free)} available")
    else:
        yield Finding(NOTE, "memory", "unknown on this system")


def _tensorflow() -> Iterator[Finding]:
    import tensorflow as tf

    from rewriters.ir.device_detection import planned_device

    gpus = tf.config.list_physical_devices("GPU")
    devices = ", ".join(d.name.removeprefix("/physical_device:") for d in tf.config.list_physical_devices())
    device = planned_device()
    yield Finding(FINE, "devices", f"{devices}; plans are for {device.name}")
    if gpus:
        yield from _gpu_memory()
    statistics = device.has_allocator_stats
    effect = "none; `fit` does not measure peaks, `tflms_sft.measure` does"
    effect = "available; peaks are measured" if statistics else effect
    yield Finding(FINE if statistics else NOTE, "statistics", f"allocator statistics of {device.name}: {effect}")
    if not gpus:
        setting = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "not set")
        yield Finding(FINE, "oneDNN", f"{'on' if statistics else 'off'} (TF_ENABLE_ONEDNN_OPTS: {setting})")
    jit = tf.config.optimizer.get_jit() or "off"
    flags = os.environ.get("TF_XLA_FLAGS")
    yield Finding(
        FINE, "XLA", f"global jit {jit}{f', TF_XLA_FLAGS={flags}' if flags else ''}; off in rewritten training"
    )
    eager = tf.config.functions_run_eagerly()
    yield Finding(
        FAILED if eager else FINE,
        "functions",
        "run eagerly; only graphs can be rewritten" if eager else "run as graphs",
    )


def _budget() -> Iterator[Finding]:
    from rewriters.ir.device_detection import planned_device
    from tflms_sft._machine.calibration import MAX_BUSY_FRACTION, busy_when_measured, rates_path
    from tflms_sft._machine.memory_info import free_device_memory
    from tflms_sft._params.tile_params import AUTO_BUDGET_FRACTION

    fraction = AUTO_BUDGET_FRACTION
    try:
        free, name = format_bytes(fraction * free_device_memory()), planned_device().name
        yield Finding(FINE, 'budget "auto"', f"{free} now, {fraction:.0%} of the free memory of {name}")
    except RewriteError as error:
        yield Finding(NOTE, 'budget "auto"', str(error))
    path = rates_path()
    if path is None:
        yield Finding(NOTE, "rates", "nominal rates instead of measured rates (TFLMS_SFT_RATES=nominal)")
    elif (busy := busy_when_measured(path)) > MAX_BUSY_FRACTION:
        text = f"in {path}; measured while other processes used {busy:.0%} of the machine: delete it to measure again"
        yield Finding(NOTE, "rates", text)
    else:
        yield Finding(FINE, "rates", f"in {path}" if path.exists() else f"to be measured for the first plan, in {path}")


def _gpu_memory() -> Iterator[Finding]:
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(NOTE, "GPU memory", f"unknown: nvidia-smi failed ({type(error).__name__})")
        return
    for line in done.stdout.splitlines():
        index, name, total, free = (field.strip() for field in line.split(","))
        sizes = [format_bytes(int(mib) * 2**20) if mib.isdecimal() else "unknown" for mib in (total, free)]
        yield Finding(FINE, f"GPU {index}", f"{name}, {sizes[0]}, {sizes[1]} free")


def _keras() -> Iterator[Finding]:
    import keras

    policy = keras.config.dtype_policy().name
    yield Finding(FINE, "Keras types", f"policy {policy}, {keras.config.image_data_format()}")


def _spill(directory: str | None) -> Iterator[Finding]:
    from rewriters.swapping.spill_store import is_in_memory, reason_unsupported
    from tflms_sft._params.swap_params import SwapParams

    where = SwapParams(spill_dir=directory).directory
    reason = reason_unsupported()
    if reason:
        yield Finding(NOTE, "spill directory", f"this system cannot swap to disk: {reason}")
        return
    free = format_bytes(shutil.disk_usage(where).free)
    if is_in_memory(where):
        text = f"{where} is in memory, so swapping to it saves no memory. Name a directory on disk with `spill_dir=`"
        yield Finding(NOTE, "spill directory", text)
    else:
        yield Finding(FINE, "spill directory", f"{where} on disk, {free} free")
    soft, hard = open_file_limits()
    limits = ["unlimited" if limit == math.inf else str(limit) for limit in (soft, hard)]
    is_low = soft < MIN_OPEN_FILES
    remedy = "; each swapped tensor is an open file: raise the limit with `ulimit -n`" if is_low else ""
    yield Finding(NOTE if is_low else FINE, "open files", "limits: soft {}, hard {}".format(*limits) + remedy)


def _try_tiles() -> Iterator[Finding]:
    from tflms_sft._params.tile_params import SegmentSpec, SFTParams

    # By name, because tiles of so small a step save less memory than kernel scratch takes, so "auto" selects none.
    segment = SegmentSpec("image", "pool", num_tiles=(2, 2))
    yield _compare_small_step("tiles", SFTParams(segments=[segment]))


def _try_swaps(directory: str | None) -> Iterator[Finding]:
    from rewriters.ir.device_detection import planned_device
    from tflms_sft._params.swap_params import SwapParams
    from tflms_sft._planner.swap_planner import reason_without_tier

    params = SwapParams(spill_dir=directory, min_bytes=1)
    reason = reason_without_tier(params, planned_device())
    if reason:
        yield Finding(NOTE, "small step, swaps", reason)
    else:
        yield _compare_small_step("swaps", params)


def _kernels(reports: list[KernelReport]) -> Iterator[Finding]:
    """Check the GPU kernels of small steps, and add the report to `reports`."""
    report = check_kernels()
    reports.append(report)
    number = f"{len(report.rows)} ops of {len(report.networks)} small steps in tiles"
    yield Finding(
        FAILED if report.missing else FINE,
        "GPU kernels",
        f"{number}; without a GPU kernel: {', '.join(report.missing) or 'none'}",
    )
    copies = ", ".join(report.copies) or "none"
    text = f"tensors that tile loops copy between host and GPU: {copies}"
    yield Finding(FAILED if report.copies else FINE, "GPU copies", text)


def _compare_small_step(name: str, params: object) -> Finding:
    """Run a small step with and without rewriting, and compare loss and gradients."""
    import keras
    import tensorflow as tf

    from tflms_sft._rewrite.rewrite import rewrite

    image = x = keras.Input((24, 24, 3), dtype="float32", name="image")
    for _ in range(2):
        x = keras.layers.Conv2D(4, 3, padding="same", activation="relu", dtype="float32")(x)
    x = keras.layers.GlobalAveragePooling2D(dtype="float32")(keras.layers.MaxPool2D(dtype="float32", name="pool")(x))
    model = keras.Model(image, keras.layers.Dense(2, dtype="float32")(x))

    def step(images: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(images, training=True) - labels))
        return [loss, *tape.gradient(loss, [weight.value for weight in model.trainable_weights])]

    random = tf.random.Generator.from_seed(1)
    batch = random.normal((2, 24, 24, 3)), random.normal((2, 2))
    with _full_float32(tf):
        plain = tf.function(step, autograph=False)
        rewritten = rewrite(plain, params, *batch)
        pairs = list(zip(rewritten(*batch), plain(*batch), strict=True))
    errors = [float(tf.reduce_max(tf.abs(a - b)) / tf.maximum(tf.reduce_max(tf.abs(b)), 1e-6)) for a, b in pairs]
    segments, swaps = len(rewritten.plan.segments), len(rewritten.plan.swaps)
    parts = f"{segments} segment(s)" if segments else f"{swaps} tensor(s)"
    text = f"{parts}; loss and gradients differ from those of the original step by {max(errors):.0e}"
    is_equal = segments + swaps > 0 and all(error <= MAX_RELATIVE_ERROR for error in errors)
    if not is_equal:
        text += f", expected at most {MAX_RELATIVE_ERROR:.0e}; please report it"
    if not segments + swaps:
        text = "the step was not rewritten; please report it"
    return Finding(FINE if is_equal else FAILED, f"small step, {name}", text)


@contextlib.contextmanager
def _full_float32(tf: Any) -> Iterator[None]:
    """Turn off TF32, whose mantissa of 10 bits is too short for a comparison."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
