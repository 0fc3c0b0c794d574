"""Acceptance of the package on a GPU: results, peaks and times against what was predicted.

    python -m benchmarks.gpu [--device cpu] [--small] [--checks PREFIX ...] [--workers 4] [--results FILE]

Every check is a process of its own, whose result is stored at once: a run that was interrupted goes on with the checks
that are missing. Checks whose times matter run alone, the others with `--workers` at a time.

- `equal`: 10 networks in float64, within 1e-10 or three times the change caused by perturbing the input by 1e-15, and
  12 in float32 with TF32 off: tiles, and swaps to host memory.
- `peak`: predicted peaks of the original step and of a plan for half of it, within 15 % of the allocator's statistics;
  the same without TensorFlow's layout optimizer, with a small cuDNN workspace besides, and with TF32.
- `memory`: running out of memory inside of a loop raises `ResourceExhaustedError`.
- `overlap`: at least half of the time of swaps is hidden behind computation.
- `large`: VGG-16 on a device limited to 11 GiB, beside the original step's time per pixel.
- `batch`: ResNet-50's largest batch on a device limited to 16 GiB.
- `xla`: the original step's time with XLA, for comparison.

The exit code is 0 if all checks that ran have passed. `--small` takes sizes for a machine without a GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _results

MIB, GIB = 2**20, 2**30
NETWORKS = {
    "vgg16": (512, 4),
    "resnet50": (256, 16),
    "unet3d-dice": (96, 1),
    "darknet19": (512, 4),
    "unet3d": (96, 1),
    "MobileNetV2": (224, 32),
    "DenseNet121": (224, 16),
    "Xception": (256, 16),
    "ConvNeXtTiny": (224, 8),
    "EfficientNetB0": (224, 32),
    "InceptionV3": (224, 32),
    "NASNetMobile": (224, 16),
}
"""Image size and batch of the measured peaks."""
SMALL_NETWORKS = {"vgg16": (64, 1), "unet3d-dice": (32, 1)}
TILED_SIZES = {"unet3d": 32, "unet3d-dice": 32}
"""Image sizes of the comparisons of volumes; of images it is 96."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A measurement.

    Attributes:
        name: `<kind>/<subject>`, such as `peak/vgg16`.
        function: Name of the function of `_gpu_checks`.
        kwargs: Its arguments, without the device.
        alone: Whether nothing else may run beside it.
        env: Environment variables of its process.
    """

    name: str
    function: str
    kwargs: Mapping[str, Any]
    alone: bool = True
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


def checks(small: bool) -> list[Check]:
    """Return the checks, the most important first."""
    networks = SMALL_NETWORKS if small else NETWORKS
    result = [Check("device", "device_facts", {})]
    large = {"net": "vgg16", "batch": 1, "steps": 3}
    sizes, memory = ((128,), 200 * MIB) if small else ((2048, 4096, 10240), 11 * GIB)
    for floatx in ("float64", "float32"):
        for net in networks:
            if floatx == "float64" and net in TILED_SIZES:
                continue  # On a GPU TensorFlow has no float64 kernels of 3-D pools.
            size = networks[net][0] if small else TILED_SIZES.get(net, 96)
            kwargs = {"net": net, "image_size": size, "batch": 2, "steps": 2, "floatx": floatx}
            result.append(Check(f"equal/{floatx}/{net}", "equality", kwargs, alone=False))
    result.append(Check("memory/loop", "out_of_memory", {}, alone=False))
    result.append(Check(f"large/plain-{sizes[0]}", "plain_times", {**large, "image_size": sizes[0], "xla": False}))
    result.append(Check(f"large/{sizes[0]}", "limited", {**large, "image_size": sizes[0], "memory": memory}))
    for net, (size, batch) in networks.items():
        kwargs = {"net": net, "image_size": size, "batch": batch, "runs": 5, "layout": True, "tf32": False}
        result.append(Check(f"peak/{net}", "peaks", kwargs))
    for net in list(networks)[:2]:
        size, batch = networks[net]
        kwargs = {"net": net, "image_size": size, "batch": batch, "runs": 5, "layout": False, "tf32": False}
        result.append(Check(f"peak/{net}-layout-off", "peaks", kwargs))
        result.append(
            Check(f"peak/{net}-workspace-16MiB", "peaks", kwargs, env={"TF_CUDNN_WORKSPACE_LIMIT_IN_MB": "16"})
        )
        result.append(Check(f"peak/{net}-tf32", "peaks", {**kwargs, "layout": True, "tf32": True}))
    size, batch = networks["vgg16"]
    result.append(Check("overlap/vgg16", "overlap", {"net": "vgg16", "image_size": size, "batch": batch}))
    result += [
        Check(f"large/{one}", "limited", {**large, "image_size": one, "memory": memory, "steps": 1})
        for one in sizes[1:]
    ]
    net, size, memory = ("unet3d-dice", 32, 40 * MIB) if small else ("resnet50", 224, 16 * GIB)
    kwargs = {"net": net, "image_size": size, "memory": memory, "steps": 3}
    result.append(Check(f"batch/{net}", "largest_batch", kwargs))
    result.append(Check(f"xla/vgg16-{sizes[0]}", "plain_times", {**large, "image_size": sizes[0], "xla": True}))
    return result


def run(check: Check, device: str) -> dict[str, Any]:
    """Run a check in a child process and return its figures, or why it failed."""
    began = time.perf_counter()
    env = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "CUDA_VISIBLE_DEVICES": "0" if device == "gpu" else "-1"}
    kwargs = {**check.kwargs, "device": device}
    outcome = _child.run_child(f"benchmarks._gpu_checks:{check.function}", kwargs, env={**env, **check.env})
    figures = outcome.result if outcome.ok else {"passed": False, "failed": outcome.how_it_ended()}
    if not outcome.ok:
        figures["log"] = outcome.log_tail()
    return {**figures, "process_seconds": round(time.perf_counter() - began, 1)}


def line(name: str, figures: Mapping[str, Any]) -> str:
    """Return the line of the report on a check."""
    shown = []
    for key, value in figures.items():
        if key in ("passed", "log", "rates"):
            continue
        if key.endswith("bytes") and value is not None:
            parts = value if isinstance(value, (list, tuple)) else [value]
            value = "/".join(f"{part / MIB:.0f}" for part in parts) + " MiB"
        elif isinstance(value, float):
            value = f"{value:.3g}"
        elif isinstance(value, (list, tuple)):
            value = "/".join(f"{part:.3g}" if isinstance(part, float) else str(part) for part in value)
        shown.append(f"{key.replace('_', ' ')} {value}")
    return f"{'passed' if figures['passed'] else 'FAILED'}  {name}: {', '.join(shown)}"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.gpu", __doc__)
    add = parser.add_argument
    add("--device", choices=("gpu", "cpu"), default="gpu", help="default: %(default)s")
    add("--small", action="store_true", help="small networks and images")
    add("--checks", nargs="+", metavar="PREFIX", help="only checks whose names begin so, such as equal or peak/vgg16")
    add("--workers", type=_arguments.positive, default=1, help="checks at a time that measure no times; default: 1")
    add("--together", action="store_true", help="run all checks with --workers; their times are then unreliable")
    add("--minutes", type=float, default=30.0, help="no check begins later; default: %(default)s")
    add("--results", type=Path, metavar="FILE", help="default: benchmarks/results/gpu_<card>.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, store and print; return 1 if a check failed."""
    options = parse_arguments(arguments)
    ends = time.monotonic() + 60 * options.minutes
    chosen = [one for one in checks(options.small) if not options.checks or one.name.startswith(tuple(options.checks))]
    first = Check("device", "device_facts", {})
    facts = run(first, options.device)
    print(line("device", facts), flush=True)
    if not facts["passed"]:
        print(facts.get("log", ""))
        return 1
    card = re.sub(r"\W+", "_", facts["name"]).strip("_").lower()
    path = options.results or _results.RESULTS / f"gpu_{card}{'_small' if options.small else ''}.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    stored["device"] = facts
    missing = [one for one in chosen if one.name not in stored]
    lock = threading.Lock()

    def take(check: Check) -> None:
        if time.monotonic() > ends:
            return
        figures = run(check, options.device)
        with lock:
            stored[check.name] = figures
            path.write_text(json.dumps(stored, indent=1) + "\n")
            print(line(check.name, figures), flush=True)
            if "log" in figures:
                print(figures["log"], flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(take, [one for one in missing if options.together or not one.alone]))
    for check in missing:
        if check.alone and not options.together:
            take(check)
    ran = [stored[one.name] for one in chosen if one.name in stored]
    passed = sum(bool(figures["passed"]) for figures in ran)
    print(f"{passed} of {len(ran)} checks passed, {len(chosen) - len(ran)} not run; {path}")
    return 0 if passed == len(ran) else 1


if __name__ == "__main__":
    _child.leave_with(main)
