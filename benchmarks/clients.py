"""Memory, time and weights of unmodified models of other packages within a budget, and Keras's own trainer tests.

    python -m benchmarks.clients [--clients NAME ...] [--fraction 0.6] [--steps 3] [--results FILE]

Each model trains plain, plain with initial weights perturbed by 1e-7 of their size, and with a budget of `--fraction`
of the plain peak. Weights are *equal* if they differ from plain training by at most three times the effect of the
perturbation. Keras's trainer tests run plain and with `MemoryBudget("1GiB")` in every `fit` without a `CallbackList`.
Missing packages are skipped. Failures appear in the table alone; the exit code is 0.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _results
from benchmarks._client_models import CLIENTS

MIB = 2**20
PERTURBATION = 1e-7
"""Change of the initial weights, relative to each weight."""

MAX_DIFFERENCE_RATIO = 3.0
"""Largest difference of equal weights, over that caused by the perturbation."""

MIN_SCALE = 1e-4
"""Smallest number that differences are divided by: a bias whose true gradient is zero holds rounding noise."""

TITLES = ("client", "version", "plain peak", "budget", "measured", "time", "equal")


def train(
    *, client: str, steps: int, budget: int | None, perturbed: bool, weights: str, emit: _child.Emit
) -> dict[str, Any]:
    """Train a model on one batch, plain or within a budget in bytes; return its peak, step time, plan and loss."""
    del emit
    import keras
    import numpy as np

    import tflms_sft
    from benchmarks._client_peaks import PeakOfSteps

    keras.utils.set_random_seed(0)
    model, inputs, targets = CLIENTS[client].build()
    if perturbed:
        for variable in model.trainable_variables:
            variable.assign(variable * (1 + PERTURBATION))
    callback = None if budget is None else tflms_sft.MemoryBudget(budget, verbose=0)
    peaks = PeakOfSteps(callback)
    batch = len(keras.tree.flatten(inputs)[0])
    callbacks = [peaks] if callback is None else [callback, peaks]
    model.fit(inputs, targets, batch_size=batch, epochs=steps, shuffle=False, verbose=0, callbacks=callbacks)
    np.savez(weights, *(np.array(v) for v in model.trainable_variables))
    plan = None if callback is None or callback.plan is None else callback.plan.headline()
    return {"peak": peaks.peak_bytes, "seconds": peaks.step_seconds, "plan": plan, "loss": peaks.loss}


def difference(first: Path, second: Path) -> float:
    """Return the largest difference of two files of weights, relative to the largest number of each weight."""
    import numpy as np

    with np.load(first) as a, np.load(second) as b:
        pairs = [(a[name], b[name]) for name in a.files]
    return max(float(np.abs(x - y).max() / max(np.abs(x).max(), MIN_SCALE)) for x, y in pairs)


def client_row(name: str, fraction: float, steps: int) -> dict[str, Any]:
    """Measure one model; return the figures of its line in the table."""
    try:
        version = importlib.metadata.version(CLIENTS[name].package)
    except importlib.metadata.PackageNotFoundError:
        return {"client": name, "skipped": f"{CLIENTS[name].package} is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder) / f"{kind}.npz" for kind in ("plain", "perturbed", "budget")}

        def run(kind: str, budget: int | None) -> _child.Outcome:
            options = {"client": name, "steps": steps, "budget": budget, "perturbed": kind == "perturbed"}
            return _child.run_child("benchmarks.clients:train", {**options, "weights": str(files[kind])})

        plain = run("plain", None)
        if not plain.ok:
            return {"client": name, "version": version, "skipped": f"plain training fails: {plain.how_it_ended()}"}
        run("perturbed", None)
        budget = int(fraction * plain.result["peak"])
        row = {"client": name, "version": version, "plain": plain.result, "budget_bytes": budget}
        rewritten = run("budget", budget)
        if not rewritten.ok:
            return {**row, "refused": rewritten.how_it_ended()}
        return {
            **row,
            "budget": rewritten.result,
            "difference": difference(files["plain"], files["budget"]),
            "shaken": difference(files["plain"], files["perturbed"]),
        }


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a line of the table."""
    if "skipped" in row:
        return [row["client"], row.get("version", ""), "skipped: " + row["skipped"], "", "", "", ""]
    plain, budget = row["plain"], f"{row['budget_bytes'] / MIB:.0f} MiB"
    first = [row["client"], row["version"], f"{plain['peak'] / MIB:.0f} MiB", budget]
    if "refused" in row:
        return [*first, row["refused"], "", ""]
    rewritten = row["budget"]
    is_equal = row["difference"] <= MAX_DIFFERENCE_RATIO * max(row["shaken"], PERTURBATION)
    equal = f"{'yes' if is_equal else 'NO'} ({row['difference']:.0e}, perturbed {row['shaken']:.0e})"
    time = f"{rewritten['seconds'] / plain['seconds']:.2f}x"
    return [*first, f"{rewritten['peak'] / MIB:.0f} MiB ({rewritten['peak'] / plain['peak']:.2f})", time, equal]


def keras_trainer_tests() -> dict[str, Any]:
    """Run Keras's own tests of `Trainer`, plain and with a budget in every `fit`; return how many pass."""
    import keras

    source = Path(keras.__file__).parent / "src" / "trainers" / "trainer_test.py"
    if not source.exists():
        return {"client": "Keras's trainer tests", "skipped": "this distribution of Keras has no tests"}
    passed = {}
    for kind in ("plain", "budget"):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(source, folder)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA"]
            command += ["-p", "benchmarks._client_keras_tests", source.name]
            env = {**_child.child_env(), "CLIENT_BUDGET": "1GiB" if kind == "budget" else ""}
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        passed[kind] = sorted(set(re.findall(r"^PASSED \S+::(\S+)", done.stdout, re.MULTILINE)))
    missing = sorted(set(passed["plain"]) - set(passed["budget"]))
    return {
        "client": "Keras's trainer tests",
        "version": keras.__version__,
        "plain": len(passed["plain"]),
        "budget": len(passed["budget"]),
        "missing": missing,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the figures."""
    parser = _arguments.parser("benchmarks.clients", __doc__)
    parser.add_argument("--clients", nargs="*", choices=[*CLIENTS, "keras"], default=[*CLIENTS, "keras"])
    parser.add_argument("--fraction", type=_arguments.part, default=0.6)
    parser.add_argument("--steps", type=_arguments.positive, default=3)
    parser.add_argument("--results", type=Path)
    options: argparse.Namespace = parser.parse_args(arguments)
    report = _results.provenance("benchmarks.clients", arguments)
    rows, lines = [], [[*TITLES]]
    print(" | ".join(TITLES), flush=True)
    for name in options.clients:
        if name == "keras":
            row = keras_trainer_tests()
            passed = row.get("skipped") or f"{row['budget']} of {row['plain']} tests that pass in plain"
            line = [row["client"], row.get("version", ""), "", "1 GiB", passed, "", str(row.get("missing") or "")]
            print(" | ".join(line), flush=True)
        else:
            row = client_row(name, options.fraction, options.steps)
            line = cells(row)
            print(" | ".join(line), flush=True)
        rows.append(row)
        lines.append(line)
    if options.results:
        _results.write(options.results, {**report, "rows": rows}, {"clients": _results.markdown(lines)})
    return 0


if __name__ == "__main__":
    _child.leave_with(main)
