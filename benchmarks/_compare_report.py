"""The programs around `_compare`: their common options, the table, and what is written beside it."""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _compare, _nets

RESULTS = Path(__file__).resolve().parent / "results"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that all programs have."""
    add, positive = parser.add_argument, _arguments.positive
    add("--steps", type=positive, default=3, help="counted steps of each child; default: %(default)s")
    add("--warmup", type=positive, default=1, help="steps before the counted ones; default: %(default)s")
    add("--runs", type=positive, default=3, help="children of each variant and kind; default: %(default)s")
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--skip-plain", action="store_true", help="measure only what is rewritten")
    add("--json", type=Path, metavar="PATH", help="default: a file in benchmarks/results/")


def spec_of(net: str, options: argparse.Namespace) -> _compare.Spec:
    """The spec for a key of `_nets.TASKS` and the parsed options."""
    names = [field.name for field in dataclasses.fields(_compare.Spec)]
    return _compare.Spec(net, **{name: getattr(options, name) for name in names if name != "net"})


def compare_budgets(program: str, description: str | None, net: str, arguments: Sequence[str] | None) -> int:
    """The whole of a program that compares budgets for one network.

    Args:
        program: As in `python -m program`.
        description: For its help.
        net: Key of `_nets.TASKS`.
        arguments: The command line; None takes that of the process.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse_budgets(program, description, net, arguments)
    return measure_and_report(program, arguments, spec_of(net, options), options.rewritten, options)


def parse_budgets(
    program: str, description: str | None, net: str, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parses the command line of such a program; `options.rewritten` are the variants beside the plain one."""
    task = _nets.TASKS[net]
    parser = _arguments.parser(program, description)
    add, positive, budget = parser.add_argument, _arguments.positive, _arguments.budget
    add("--image-size", type=positive, default=task.image_size, metavar="N", help="default: %(default)s")
    add("--batch", type=positive, default=task.batch, help="default: %(default)s")
    kind = 'such as "980MiB", or a part of the predicted plain peak such as "1/3"'
    add("--tile-budget", type=budget, nargs="+", default=[], metavar="BUDGET", help=f"all on the device; {kind}")
    add("--swap-budget", type=budget, nargs="+", default=[], metavar="BUDGET", help="with swapping where it helps")
    add_options(parser)
    options = parser.parse_args(arguments)
    if not options.tile_budget and not options.swap_budget:
        parser.error("nothing to compare: give a --tile-budget or a --swap-budget")
    pairs = {(f"tiles {text}", text, False): None for text in options.tile_budget}
    pairs |= {(f"swaps {text}", text, True): None for text in options.swap_budget}
    options.rewritten = [_compare.Variant(title, budget=text, swap=swap) for title, text, swap in pairs]
    return options


def measure_and_report(
    program: str,
    arguments: Sequence[str],
    spec: _compare.Spec,
    rewritten: Sequence[_compare.Variant],
    options: argparse.Namespace,
) -> int:
    """Measures, prints and writes the figures.

    Args:
        program: As in `python -m program`.
        arguments: Its command line.
        spec: What to measure.
        rewritten: The variants beside the plain one.
        options: Those of `add_options`.

    Returns:
        The exit code: 1 if something rewritten failed.
    """
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", program, *arguments]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "spec": dataclasses.asdict(spec),
        "runs": options.runs,
    }
    for name in ("command", "hardware", "versions"):
        print(f"{name}: {report[name] if name == 'command' else json.dumps(report[name])}", flush=True)
    variants = [*([] if options.skip_plain else [_compare.PLAIN]), *rewritten]
    try:
        variants = _compare.with_bytes(spec, variants, _say)
        results = _compare.run(spec, options.runs, variants, _say)
    except _child.ChildError as error:
        print(f"the rewritten step failed: {error}", file=sys.stderr)
        return 1
    ratios = _compare.compare(spec, results)
    report["variants"] = [dataclasses.asdict(variant) for variant in variants]
    report |= {"results": results, "ratios": ratios}
    path = options.json or RESULTS / f"{file_name(spec, rewritten)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    for title, figures in results.items():
        if figures.get("plan_summary"):
            print(f"\n{title}: {figures['plan_summary']}")
    print(f"\n{table(variants, results, ratios)}")
    for title, figures in results.items():
        if "failed" in figures:
            print(f"{title} failed: {figures['failed']}")
    print(f"Written: {path}")
    return 1 if any("failed" in results[variant.title] for variant in rewritten) else 0


def _say(line: str) -> None:
    print(line, flush=True)


def file_name(spec: _compare.Spec, rewritten: Sequence[_compare.Variant]) -> str:
    """File name of the results, without its ending."""
    parts = [spec.net, str(spec.image_size), f"b{spec.batch}", *(v.slug or v.title for v in rewritten)]
    if spec.device != "cpu":
        parts.append(spec.device)
    return re.sub(r"[^\w.-]", "_", "_".join(parts))


def table(variants: Sequence[_compare.Variant], results: _compare.Results, ratios: _compare.Results) -> str:
    """Returns the figures as a Markdown table; beside each variant how plain compares with it."""
    size = _compare.shown_size
    rows: list[tuple[str, str, Callable[[dict[str, Any]], str]]] = [
        ("peak_bytes", "peak_bytes", lambda f: size(f["peak_bytes"])),
        ("peak of first step", "", lambda f: size(f["first_peak_bytes"])),
        ("predicted peak_bytes", "predicted_peak_bytes", lambda f: size(f["predicted_peak_bytes"])),
        ("fixed_bytes", "", lambda f: size(f["fixed_bytes"])),
        ("net_rss_bytes, warm", "net_rss_bytes", lambda f: size(f["net_rss_bytes"])),
        ("net_rss_bytes, cold", "net_rss_bytes_cold", lambda f: size(f["net_rss_bytes_cold"])),
        ("step, median", "step_seconds_median", lambda f: f"{f['step_seconds_median']:.2f} s"),
        ("step, min-max", "", lambda f: f"{f['step_seconds_min']:.2f}-{f['step_seconds_max']:.2f} s"),
        ("step, CPU time", "cpu_seconds_median", lambda f: f"{f['cpu_seconds_median']:.2f} s"),
        ("predicted time", "", lambda f: _work(f["predicted_time_ratio"])),
        ("first step", "cold_seconds", lambda f: f"{f['cold_seconds']:.1f} s"),
        ("per pixel", "", lambda f: f"{f['microseconds_per_pixel']:.3f} µs"),
    ]
    header, budgets, losses = [""], ["budget"], ["losses differ"]
    lines = [[title] for title, _, _ in rows]
    for variant in variants:
        figures, compared = results[variant.title], ratios.get(variant.title)
        header.append(variant.title)
        budgets.append(size(variant.budget_bytes) if variant.budget else "-")
        losses.append(f"{compared['loss_difference']:.1e}" if compared else "-")
        for line, (_, _, cell) in zip(lines, rows, strict=True):
            line.append("failed" if "failed" in figures else cell(figures))
        if compared:
            header.append(f"plain/{variant.title}")
            budgets.append("")
            losses.append("")
            for line, (_, ratio, _) in zip(lines, rows, strict=True):
                line.append(f"{compared[ratio]:.2f}" if compared.get(ratio) else "")
    return markdown([header, *([budgets] if any(v.budget for v in variants) else []), *lines, losses])


def _work(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} x"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table of equally long lines, the first its header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


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


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Returns the versions of what runs, of `more` packages too, and the commit where git knows it."""
    found = {"python": platform.python_version()}
    for package in ("tensorflow", "keras", "numpy", "tflms-sft", *more):
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
