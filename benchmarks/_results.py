"""Results of a benchmark: provenance, figures, and the Markdown tables that the documentation shows.

A file in `results/` holds command, date, hardware and versions of a run, all figures, and the printed tables under
`"tables"`. `benchmarks.tables` copies tables to the pages, and a test compares the pages with the files.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _child

RESULTS = Path(__file__).resolve().parent / "results"


def provenance(program: str, arguments: Sequence[str] | None, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return the command, the date, the hardware and the versions of a run.

    Args:
        program: Name of the module, such as `"benchmarks.vgg16"`.
        arguments: Its command line; `None` for that of the process.
        packages: Further packages whose versions are recorded.
    """
    given = sys.argv[1:] if arguments is None else arguments
    return {
        "command": shlex.join(["python", "-m", program, *given]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(packages),
    }


def write(path: Path, report: Mapping[str, Any], tables: Mapping[str, str]) -> None:
    """Write the results of a run.

    Args:
        path: The file.
        report: Provenance and figures; the load after the run is added.
        tables: Printed Markdown tables by name.
    """
    report = {**report, "load_average_after": os.getloadavg()[0]}
    report["tables"] = {name: table.strip() for name, table in tables.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"Written: {path}", flush=True)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of equally long lines, of which the first is the header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def hardware() -> dict[str, Any]:
    """Return the facts that times depend on, with the load before the measurements."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    meminfo = Path("/proc/meminfo").read_text()
    model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    total = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    return {
        "cpu": model.group(1) if model else platform.machine(),
        "has_avx512": bool(re.search(r"^flags\s*:.*\bavx512f\b", cpuinfo, re.MULTILINE)),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(total.group(1)) * 1024 if total else None,
        "system": f"{platform.system()} {platform.release()}",
        "load_average_before": os.getloadavg()[0],
    }


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions of Python and of packages, and the commit if git knows it."""
    found = {"python": platform.python_version()}
    for package in ("tensorflow", "keras", "numpy", "tflms-sft", *packages):
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
