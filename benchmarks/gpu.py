"""Acceptance of the package on a GPU: results, peaks and times against what was predicted.

    python -m benchmarks.gpu [--device cpu] [--small] [--checks PREFIX ...] [--workers 4] [--results FILE]

Every check is a process of its own, whose result is stored at once: a run that was interrupted goes on with the checks
that are missing. `--workers` checks plan concurrently; a lock gives the device to one check at a time.

- `equal`: 10 networks in float64, within 1e-10 or three times the change caused by perturbing the input by 1e-15, and
  12 in float32 with TF32 off: tiles, and swaps to host memory.
- `peak`: predicted peaks of the original step and of a plan for half of it, within 15 % of the allocator's statistics,
  as TensorFlow is by default; the same without TF32, without TensorFlow's layout optimizer, and with limited workspaces
  of cuDNN.
- `workspace`: bytes that convolutions and their gradients allocate beside their results; always passed.
- `tiles`: times of 4, 16 and 64 tiles, within 25 % of the predicted ones.
- `overlap`: at least half of the time of swaps is hidden behind computation.
- `memory`: running out of memory inside of a loop raises `ResourceExhaustedError`.
- `large`: VGG-16 on a device limited to 11 and 40 GiB, beside the original step's time per pixel.
- `batch`: ResNet-50's largest batch on a device limited to 16 GiB.
- `xla`: the original step's time with XLA, for comparison; always passed.

The exit code is 0 if all checks that ran have passed. `--small` takes sizes for a machine without a GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _gpu_device, _results

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


WORKSPACE_VARIABLE = "TF_CUDNN_WORKSPACE_LIMIT_IN_MB"
WORKSPACE_LIMITS_MIB = (16, 64, 256, 1024)
LARGE_RESERVED_MIB = 512
"""Memory that the budgets of large images leave to fragmentation."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A measurement.

    Attributes:
        name: `<kind>/<subject>`, such as `peak/vgg16`.
        function: `module:function` of its measurement.
        kwargs: Its arguments, without the device.
        workspace_mib: Limit of cuDNN's workspace in MiB; 0 is TensorFlow's default.
    """

    name: str
    function: str
    kwargs: Mapping[str, Any]
    workspace_mib: int = 0


def checks(small: bool) -> list[Check]:
    """Return the checks, the most important first."""
    networks = SMALL_NETWORKS if small else NETWORKS
    return [
        Check("device", "_gpu_device:device_facts", {}),
        *_large(small),
        *_devices(small),
        *_peaks(networks),
        *(
            Check(f"tiles/vgg16-{tiles}x{tiles}", "_gpu_checks:tiled", {**_sized(networks, "vgg16"), "tiles": tiles})
            for tiles in (2, 4, 8)
        ),
        Check("overlap/vgg16", "_gpu_checks:overlap", _sized(networks, "vgg16")),
        *_equal(networks, small),
    ]


def _sized(networks: Mapping[str, tuple[int, int]], net: str) -> dict[str, Any]:
    size, batch = networks[net]
    return {"net": net, "image_size": size, "batch": batch}


def _peaks(networks: Mapping[str, tuple[int, int]]) -> Iterator[Check]:
    """Yield the checks of peaks: all networks as TensorFlow is by default, two of them otherwise too."""
    function = "_gpu_checks:peaks"
    for number, net in enumerate(networks):
        kwargs = {**_sized(networks, net), "runs": 5, "layout": True, "tf32": True}
        yield Check(f"peak/{net}", function, kwargs)
        if number >= 2:
            continue
        yield Check(f"peak/{net}-tf32-off", function, {**kwargs, "tf32": False})
        yield Check(f"peak/{net}-layout-off", function, {**kwargs, "layout": False})
        yield Check(f"peak/{net}-tf32-off-layout-off", function, {**kwargs, "tf32": False, "layout": False})
        for limit in WORKSPACE_LIMITS_MIB:
            yield Check(f"peak/{net}-workspace-{limit}MiB", function, kwargs, workspace_mib=limit)


def _large(small: bool) -> Iterator[Check]:
    """Yield the checks of large images and batches within a limit of the device's memory."""
    common = {"net": "vgg16", "batch": 1}
    sizes = ((128, 200 * MIB),) if small else ((2048, 11 * GIB), (4096, 11 * GIB), (10240, 11 * GIB), (20480, 40 * GIB))
    first = sizes[0][0]
    plain = {**common, "image_size": first, "steps": 3}
    yield Check(f"large/plain-{first}", "_gpu_checks:plain_times", {**plain, "xla": False})
    for size, memory in sizes:
        reserved = 0 if small else LARGE_RESERVED_MIB * MIB
        kwargs = {**common, "image_size": size, "memory": memory, "reserved": reserved, "steps": 2}
        yield Check(f"large/{size}", "_gpu_checks:limited", kwargs)
    net, size, memory = ("unet3d-dice", 32, 40 * MIB) if small else ("resnet50", 224, 16 * GIB)
    kwargs = {"net": net, "image_size": size, "memory": memory, "steps": 3}
    yield Check(f"batch/{net}", "_gpu_checks:largest_batch", kwargs)
    yield Check(f"xla/vgg16-{first}", "_gpu_checks:plain_times", {**plain, "xla": True})


def _devices(small: bool) -> Iterator[Check]:
    """Yield the checks of the device alone."""
    yield Check("memory/loop", "_gpu_device:out_of_memory", {})
    for tf32 in (True, False):
        for limit in (0, 64):
            name = f"workspace/{'tf32' if tf32 else 'float32'}-{f'{limit}MiB' if limit else 'default'}"
            kwargs = {"tf32": tf32, "batch": 1 if small else 4, "scale": 16 if small else 1}
            yield Check(name, "_gpu_device:workspaces", kwargs, workspace_mib=limit)


def _equal(networks: Mapping[str, tuple[int, int]], small: bool) -> Iterator[Check]:
    """Yield the comparisons of original and rewritten steps."""
    for floatx in ("float64", "float32"):
        for net in networks:
            if floatx == "float64" and net in TILED_SIZES:
                continue  # On a GPU TensorFlow has no float64 kernels of 3-D pools.
            size = networks[net][0] if small else TILED_SIZES.get(net, 96)
            kwargs = {"net": net, "image_size": size, "batch": 2, "steps": 2, "floatx": floatx}
            yield Check(f"equal/{floatx}/{net}", "_gpu_checks:equality", kwargs)


def run(check: Check, device: str, lock: str) -> dict[str, Any]:
    """Run a check in a child process and return its figures, or why it failed."""
    began = time.perf_counter()
    env = {
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "CUDA_VISIBLE_DEVICES": "0" if device == "gpu" else "-1",
        _gpu_device.LOCK_VARIABLE: lock,
    }
    if check.workspace_mib:
        env[WORKSPACE_VARIABLE] = str(check.workspace_mib)
    outcome = _child.run_child(f"benchmarks.{check.function}", {**check.kwargs, "device": device}, env=env)
    figures = outcome.result if outcome.ok else {"passed": False, "failed": outcome.how_it_ended()}
    if not outcome.ok:
        figures["log"] = outcome.log_tail()
    return {**figures, "process_seconds": round(time.perf_counter() - began, 1)}


def line(name: str, figures: Mapping[str, Any]) -> str:
    """Return the line of the report on a check."""
    shown = []
    for key, value in figures.items():
        if key in ("passed", "log", "rates", "convolutions"):
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


def peak_table(stored: Mapping[str, Any]) -> str:
    """Return the Markdown table of peaks and times.

    Budgets are fractions of the plain peak; time ratios are those of the rewritten to the plain step.
    """
    title = [
        "check",
        "budget",
        "plain peak, predicted",
        "plain, measured",
        "rewritten, predicted",
        "rewritten, measured",
    ]
    lines = [[*title, "time ratio, predicted", "time ratio, measured", "passed"]]
    for name, figures in stored.items():
        if not name.startswith("peak/") or "measured_bytes" not in figures:
            continue
        sizes = zip(figures["predicted_bytes"], figures["measured_bytes"], strict=True)
        times = figures["predicted_ratio"], figures["seconds"][1] / figures["seconds"][0]
        lines.append(
            [
                name.removeprefix("peak/"),
                f"{figures['budget_fraction']:g}",
                *(f"{number / MIB:,.0f} MiB" for pair in sizes for number in pair),
                *(f"{ratio:.2f}" for ratio in times),
                "yes" if figures["passed"] else "no",
            ]
        )
    return _results.markdown(lines)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.gpu", __doc__)
    add = parser.add_argument
    add("--device", choices=("gpu", "cpu"), default="gpu", help="default: %(default)s")
    add("--small", action="store_true", help="small networks and images")
    add("--checks", nargs="+", metavar="PREFIX", help="only checks whose names begin so, such as equal or peak/vgg16")
    add("--workers", type=_arguments.positive, default=1, help="checks that plan concurrently; default: %(default)s")
    add("--minutes", type=float, default=30.0, help="no check begins later; default: %(default)s")
    add("--results", type=Path, metavar="FILE", help="default: benchmarks/results/gpu_<card>.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, store and print; return 1 if a check failed."""
    options = parse_arguments(arguments)
    ends = time.monotonic() + 60 * options.minutes
    first, *others = checks(options.small)
    chosen = [one for one in others if not options.checks or one.name.startswith(tuple(options.checks))]
    with tempfile.NamedTemporaryFile() as lock:
        facts = run(first, options.device, lock.name)
        print(line(first.name, facts), flush=True)
        if not facts["passed"]:
            print(facts.get("log", ""))
            return 1
        card = re.sub(r"\W+", "_", facts["name"]).strip("_").lower()
        path = options.results or _results.RESULTS / f"gpu_{card}{'_small' if options.small else ''}.json"
        stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        commit, now = stored.get("versions", {}).get("commit"), _results.versions().get("commit")
        if stored and commit != now:
            print(f"{path} is of commit {commit}, this is {now}. Name another file with --results.")
            return 2
        stored |= {**_results.provenance("benchmarks.gpu", arguments), first.name: facts}
        missing = [one for one in chosen if one.name not in stored]
        writing = threading.Lock()

        def take(check: Check) -> None:
            if time.monotonic() > ends:
                return
            figures = run(check, options.device, lock.name)
            with writing:
                stored[check.name] = figures
                stored["tables"] = {"peaks": peak_table(stored)}
                path.write_text(json.dumps(stored, indent=1) + "\n")
                print(line(check.name, figures), flush=True)
                if "log" in figures:
                    print(figures["log"], flush=True)

        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(take, missing))
    ran = [stored[one.name] for one in chosen if one.name in stored]
    passed = sum(bool(figures["passed"]) for figures in ran)
    print(f"{passed} of {len(ran)} checks passed, {len(chosen) - len(ran)} not run; {path}")
    return 0 if passed == len(ran) else 1


if __name__ == "__main__":
    _child.leave_with(main)
