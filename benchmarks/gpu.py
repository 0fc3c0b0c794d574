"""Acceptance of the package on a GPU: results, peaks and times against what was predicted.

    python -m benchmarks.gpu [--device cpu] [--small] [--checks PREFIX ...] [--workers N] [--results FILE]

Every check is a process of its own, whose result is stored at once: a run that was interrupted goes on with the checks
that are missing. Checks plan concurrently; a lock gives the device to one check at a time.

- `large`: VGG-16 on a device limited to 11 and 40 GiB, beside the original step's time per pixel (`large/plain`).
- `batch`: ResNet-50's largest batch on a device limited to 16 GiB.
- `tiles`: times and peaks of 4, 16 and 64 tiles, within 25 % and 15 % of the predicted ones.
- `overlap`: at least half of the time of swaps that computation can hide is hidden. Computation can hide copies
  that last as long as itself.
- `equal`: 12 networks in float32 with TF32 off, and within a wider tolerance with TF32 on; 10 networks in float64:
  tiles, and swaps to host memory. A difference may be three times that caused by rounding the input, or by repeating
  the original step: a GPU adds in another order in each run.
- `peak`: predicted peaks of the original step and of a plan for half of it, within 15 % of the median of five runs,
  as TensorFlow is by default; the same without TF32, without TensorFlow's layout optimizer, and with limited workspaces
  of cuDNN.
- `memory`: running out of memory inside of a loop raises `ResourceExhaustedError`.
- `xla`: the original step's time with XLA, for comparison.
- `workspace`: bytes that convolutions and their gradients allocate beside their results.

Each check prints whether it passed, and which of its criteria failed. Checks without criteria are "measured": they only
record figures. On a CPU, times and overlap are no criteria. The exit code is 0 if all checks ran and none failed, 1 if
one failed, and 3 if the time was over before all of them ran. `--small` takes networks and sizes for a CPU.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
SMALL_NETWORKS = {"small-vgg": (96, 2), "small-unet3d": (24, 1)}
EQUAL_SIZES = {"unet3d": 32, "unet3d-dice": 32, "small-unet3d": 16, "darknet19": 192}
"""Image sizes of comparisons other than 96. Filters of darknet19 take so much memory that small images stay untiled."""
VOLUMES = ("unet3d", "unet3d-dice", "small-unet3d")
LARGE_SIZES = ((2048, 11 * GIB), (4096, 11 * GIB), (10240, 11 * GIB), (20480, 40 * GIB))
"""Image sizes, and the memory of the GPU for each."""
SMALL_LARGE_SIZES = ((64, 6 * MIB), (128, 12 * MIB), (192, 24 * MIB), (256, 40 * MIB))

WORKSPACE_VARIABLE = "TF_CUDNN_WORKSPACE_LIMIT_IN_MB"
WORKSPACE_LIMITS_MIB = (16, 64, 256, 1024)
LARGE_RESERVED_MIB = 512
"""Memory that the budgets of large images leave to fragmentation."""
MAX_WORKERS = 10
PRELOADED = (
    "keras",
    "benchmarks._gpu_checks",
    "tflms_sft._rewrite.measure",
    "tflms_sft._rewrite.rewrite",
    "tflms_sft._rewrite.swap_tuning",
    "tflms_sft._verify.differences",
)
"""Modules that checks share. None of them uses a device when it is imported."""


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
    first, *_ = networks
    default_peaks, *other_peaks = _peaks(networks, 1 if small else 2)
    return [
        Check("device", "_gpu_device:device_facts", {}),
        *_large(small),
        *(
            Check(f"tiles/{first}-{tiles}x{tiles}", "_gpu_checks:tiled", {**_sized(networks, first), "tiles": tiles})
            for tiles in (2, 4, 8)
        ),
        Check(f"overlap/{first}", "_gpu_checks:overlap", _sized(networks, first)),
        Check("memory/loop", "_gpu_device:out_of_memory", {}),
        *_equal(networks, small, "float32"),
        *_equal(networks, small, "tf32"),
        *default_peaks,
        *_equal(networks, small, "float64"),
        *_plain(first, 128 if small else LARGE_SIZES[0][0]),
        *(check for others in other_peaks for check in others),
        *_workspaces(small),
    ]


def _sized(networks: Mapping[str, tuple[int, int]], net: str) -> dict[str, Any]:
    size, batch = networks[net]
    return {"net": net, "image_size": size, "batch": batch}


def _peaks(networks: Mapping[str, tuple[int, int]], variants: int) -> Iterator[list[Check]]:
    """Yield the checks of all peaks as TensorFlow is by default, then those of the first networks otherwise.

    Args:
        networks: Image size and batch of each network.
        variants: Networks that are checked with other settings too.
    """
    function = "_gpu_checks:peaks"
    defaults = {net: {**_sized(networks, net), "runs": 5, "layout": True, "tf32": True} for net in networks}
    yield [Check(f"peak/{net}", function, kwargs) for net, kwargs in defaults.items()]
    for net, kwargs in itertools.islice(defaults.items(), variants):
        yield [
            Check(f"peak/{net}-tf32-off", function, {**kwargs, "tf32": False}),
            Check(f"peak/{net}-layout-off", function, {**kwargs, "layout": False}),
            Check(f"peak/{net}-tf32-off-layout-off", function, {**kwargs, "tf32": False, "layout": False}),
            *(
                Check(f"peak/{net}-workspace-{limit}MiB", function, kwargs, workspace_mib=limit)
                for limit in WORKSPACE_LIMITS_MIB
            ),
        ]


def _large(small: bool) -> Iterator[Check]:
    """Yield the checks of large images and batches within a limit of the device's memory."""
    common = {"net": "small-vgg" if small else "vgg16", "batch": 1, "steps": 2}
    for size, memory in SMALL_LARGE_SIZES if small else LARGE_SIZES:
        reserved = MIB if small else LARGE_RESERVED_MIB * MIB
        kwargs = {**common, "image_size": size, "memory": memory, "reserved": reserved}
        yield Check(f"large/{size}", "_gpu_checks:limited", kwargs)
    net, size, memory = ("small-vgg", 64, 12 * MIB) if small else ("resnet50", 224, 16 * GIB)
    kwargs = {"net": net, "image_size": size, "memory": memory, "steps": 3}
    yield Check(f"batch/{net}", "_gpu_checks:largest_batch", kwargs)


def _plain(net: str, size: int) -> Iterator[Check]:
    """Yield the measurements of the original step."""
    kwargs = {"net": net, "image_size": size, "batch": 1, "steps": 3}
    yield Check(f"large/plain-{net}-{size}", "_gpu_checks:plain_times", {**kwargs, "xla": False})
    yield Check(f"xla/{net}-{size}", "_gpu_checks:plain_times", {**kwargs, "xla": True})


def _workspaces(small: bool) -> Iterator[Check]:
    """Yield the measurements of convolutions alone."""
    for tf32 in (True, False):
        for limit in (0, 64):
            name = f"workspace/{'tf32' if tf32 else 'float32'}-{f'{limit}MiB' if limit else 'default'}"
            kwargs = {"tf32": tf32, "batch": 1 if small else 4, "scale": 16 if small else 1}
            yield Check(name, "_gpu_device:workspaces", kwargs, workspace_mib=limit)


def _equal(networks: Mapping[str, tuple[int, int]], small: bool, precision: str) -> Iterator[Check]:
    """Yield the comparisons of original and rewritten steps."""
    for net in networks:
        if precision == "float64" and net in VOLUMES:
            continue  # On a GPU TensorFlow has no float64 kernels of 3-D pools.
        size = EQUAL_SIZES.get(net, 32 if small else 96)
        # Rounding to TF32 changes the second step too much for a comparison.
        steps = 1 if precision == "tf32" else 2
        kwargs = {"net": net, "image_size": size, "batch": 2, "steps": steps, "precision": precision}
        yield Check(f"equal/{precision}/{net}", "_gpu_checks:equality", kwargs)


def environment(device: str, small: bool, folder: Path) -> dict[str, str]:
    """Return the environment variables of all checks.

    Args:
        device: "gpu" or "cpu".
        small: Whether plans are equal on all machines, and made once for all checks that have the same.
        folder: Folder for files that the checks share.
    """
    env = {
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "CUDA_VISIBLE_DEVICES": "0" if device == "gpu" else "-1",
        _gpu_device.LOCK_VARIABLE: str(folder / "lock"),
    }
    if small:
        env |= {"TFLMS_SFT_RATES": "nominal", "TFLMS_SFT_PLAN_CACHE": str(folder / "plans")}
    return env


def run(check: Check, device: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Run a check in a child process and return its figures, or why it failed."""
    began = time.perf_counter()
    if check.workspace_mib:
        env = {**env, WORKSPACE_VARIABLE: str(check.workspace_mib)}
    outcome = _child.run_forked(f"benchmarks.{check.function}", {**check.kwargs, "device": device}, env=env)
    figures = outcome.result if outcome.ok else {"failed": outcome.how_it_ended(), "log": outcome.log_tail()}
    seconds = round(time.perf_counter() - began, 1)
    return {"status": status(figures), **figures, "process_seconds": seconds}


def status(figures: Mapping[str, Any]) -> str:
    """Return "FAILED" if a criterion does not hold, "passed" if all do, and "measured" if there is none."""
    if "failed" in figures or not all(figures["criteria"].values()):
        return "FAILED"
    return "passed" if figures["criteria"] else "measured"


def line(name: str, figures: Mapping[str, Any]) -> str:
    """Return the line of the report on a check."""
    shown = []
    for key, value in figures.items():
        if key in ("status", "log", "rates", "convolutions"):
            continue
        if key == "criteria":
            failed = [criterion for criterion, holds in value.items() if not holds]
            shown += [f"NOT {criterion}" for criterion in failed]
            continue
        if key.endswith("bytes") and value is not None:
            parts = value if isinstance(value, (list, tuple)) else [value]
            value = "/".join(f"{part / MIB:.0f}" for part in parts) + " MiB"
        elif isinstance(value, float):
            value = f"{value:.3g}"
        elif isinstance(value, (list, tuple)):
            value = "/".join(f"{part:.3g}" if isinstance(part, float) else str(part) for part in value)
        shown.append(f"{key.replace('_', ' ')} {value}")
    return f"{figures['status']:8}  {name}: {', '.join(shown)}"


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
                *(_mib(number) for pair in sizes for number in pair),
                *(f"{ratio:.2f}" for ratio in times),
                _passed(figures),
            ]
        )
    return _results.markdown(lines)


def large_table(stored: Mapping[str, Any]) -> str:
    """Return the Markdown table of large images on a device with limited memory."""
    limits = {check.name: check.kwargs["memory"] for small in (False, True) for check in _large(small)}
    title = ["check", "plan", "limit", "peak, predicted", "measured", "seconds, predicted", "measured"]
    lines = [[*title, "microseconds per pixel", "passed"]]
    for name, figures in stored.items():
        if not name.startswith("large/") or "headline" not in figures:
            continue
        lines.append(
            [
                name.removeprefix("large/"),
                figures["headline"].partition(", predicted peak")[0],
                *(_mib(size) for size in (limits[name], figures["predicted_bytes"], figures["measured_bytes"])),
                *(f"{seconds:.3g}" for seconds in (figures["predicted_seconds"], figures["seconds"])),
                f"{figures['microseconds_per_pixel']:.3g}",
                _passed(figures),
            ]
        )
    return _results.markdown(lines)


def tile_table(stored: Mapping[str, Any]) -> str:
    """Return the Markdown table of peaks and times with given numbers of tiles; time ratios are as for peaks."""
    lines = [["tiles", "peak, predicted", "measured", "time ratio, predicted", "measured", "passed"]]
    for name, figures in stored.items():
        if not name.startswith("tiles/") or "measured_bytes" not in figures:
            continue
        lines.append(
            [
                name.removeprefix("tiles/"),
                *(_mib(figures[key][1]) for key in ("predicted_bytes", "measured_bytes")),
                *(f"{figures[key]:.2f}" for key in ("predicted_ratio", "ratio")),
                _passed(figures),
            ]
        )
    return _results.markdown(lines)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.0f} MiB"


def _passed(figures: Mapping[str, Any]) -> str:
    return "yes" if figures["status"] == "passed" else "no"


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "peaks": peak_table,
    "large": large_table,
    "tiles": tile_table,
}
"""Functions of the stored results that return a Markdown table, by its name on the pages."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.gpu", __doc__)
    add = parser.add_argument
    add("--device", choices=("gpu", "cpu"), default="gpu", help="default: %(default)s")
    add("--small", action="store_true", help="small networks and images")
    add("--checks", nargs="+", metavar="PREFIX", help="only checks whose names begin so, such as equal or peak/vgg16")
    workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    add("--workers", type=_arguments.positive, default=workers, help="concurrent checks; default: %(default)s")
    add("--minutes", type=float, default=30.0, help="no check begins later; default: %(default)s")
    add("--results", type=Path, metavar="FILE", help="default: benchmarks/results/gpu_<card>.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, store and print; return 1 if a check failed, and 3 if one did not run."""
    options = parse_arguments(arguments)
    ends = time.monotonic() + 60 * options.minutes
    first, *others = checks(options.small)
    chosen = [one for one in others if not options.checks or one.name.startswith(tuple(options.checks))]
    _child.start_fork_server(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        env = environment(options.device, options.small, Path(folder))
        facts = run(first, options.device, env)
        print(line(first.name, facts), flush=True)
        if facts["status"] != "passed":
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
            figures = run(check, options.device, env)
            with writing:
                stored[check.name] = figures
                stored["tables"] = {name: table(stored) for name, table in TABLES.items()}
                path.write_text(json.dumps(stored, indent=1) + "\n")
                print(line(check.name, figures), flush=True)
                if "log" in figures:
                    print(figures["log"], flush=True)

        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(take, missing))
    counts = collections.Counter(stored[one.name]["status"] for one in chosen if one.name in stored)
    not_run = len(chosen) - counts.total()
    counted = ", ".join(f"{number} {name}" for name, number in [*sorted(counts.items()), ("not run", not_run)])
    print(f"{len(chosen)} checks: {counted}; {path}")
    if counts["FAILED"]:
        return 1
    return 3 if not_run else 0


if __name__ == "__main__":
    _child.leave_with(main)
