"""Rates of this machine: measured once, stored in a file, and read by later processes.

On a CPU a child process measures, so that its memory does not count as memory of this process. On an accelerator this
process measures, because it may hold all of the memory. Rates that were measured while other processes worked are
measured again 10 minutes later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from rewriters.device.cards import nearest_card
from rewriters.estimates.op_cost import NOMINAL, MachineRates
from rewriters.ir.device_detection import planned_device, proc_fields
from tflms_sft._machine.card_rates import card_rates
from tflms_sft._machine.cpu_load import OtherProcesses, num_cores
from tflms_sft._machine.rate_benchmarks import measured_rates
from tflms_sft._util.files import write_json

VARIABLE = "TFLMS_SFT_RATES"
"""Environment variable: `nominal`, or a file of rates to read, and to write if there is none."""

VERSION = 10
"""Version of the file format. Files of other versions are replaced."""

MEASURING_TIMEOUT_SECONDS = 120
"""Time limit of the child process that measures."""

MAX_BUSY_FRACTION = 0.2
"""Fraction of all cores that other processes may use during a measurement."""

BUSY_RATES_SECONDS = 600
"""Time after which rates that were measured on a busy machine are measured again."""


class Calibration:
    """Rates of this machine by file, as one process knows them.

    Args:
        measure_in_child: Measures in a child process; returns `None` if the child fails.
        measure_here: Measures in this process.
        other_processes: Starts to measure the load by other processes.
    """

    def __init__(
        self,
        measure_in_child: Callable[[], MachineRates | None],
        measure_here: Callable[[], MachineRates] = measured_rates,
        other_processes: Callable[[], OtherProcesses] = OtherProcesses,
    ) -> None:
        self._measure_in_child = measure_in_child
        self._measure_here = measure_here
        self._other_processes = other_processes
        self._rates: dict[Path, MachineRates] = {}

    def machine_rates(self, tell: Callable[[str], None] | None = None) -> MachineRates:
        """Return the rates of the planned device; measure those of this machine if there are none, and tell so.

        Raises:
            ValueError: If the environment names a file without rates.
        """
        path = rates_path()
        if path is None:
            return _rates_without_file()
        if path not in self._rates:
            self._rates[path] = _stored(path) or self._measure(path, tell)
        return self._rates[path]

    def stored_rates(self) -> MachineRates:
        """Return the rates of the planned device without measuring: stored rates, otherwise nominal rates.

        For times that are printed and decide nothing.
        """
        path = rates_path()
        stored = path and (self._rates.get(path) or _stored(path, accept_busy=True))
        return stored or _rates_without_file()

    def _measure(self, path: Path, tell: Callable[[str], None] | None) -> MachineRates:
        """Measure the rates, and store them for later processes."""
        if tell is not None:
            tell(f"tflms-sft: measuring the speed of this machine once; the result is stored in {path}")
        others = self._other_processes()
        rates = None if planned_device().is_gpu else self._measure_in_child()
        try:
            rates = rates or self._measure_here()
        except (tf.errors.OpError, MemoryError):  # Not enough memory for a measurement.
            return _rates_without_file()
        busy = others.busy_fraction()
        if busy > MAX_BUSY_FRACTION and tell is not None:
            tell(
                f"tflms-sft: other processes used {busy:.0%} of the machine during the measurement, so predicted times "
                f"may be wrong. The first plan after {BUSY_RATES_SECONDS // 60} minutes measures again"
            )
        with contextlib.suppress(OSError):  # The next process measures again.
            _write(path, rates, busy)
        return rates


def _rates_without_file() -> MachineRates:
    """Return rates without a measurement: those of a card, on a GPU those of the nearest card, or of a small CPU."""
    device = planned_device()
    if device.card is not None:
        return card_rates(device.card)
    return card_rates(nearest_card(device.compute_capability)) if device.compute_capability else NOMINAL


def rates_path() -> Path | None:
    """Return the file of the rates; `None` for nominal rates, and for those of a planned card."""
    named = os.environ.get(VARIABLE, "")
    if named == "nominal" or planned_device().card is not None:
        return None
    return Path(named) if named else cache_directory() / f"rates-{_key()}.json"


def _stored(path: Path, accept_busy: bool = False) -> MachineRates | None:
    """Return the rates in a file; `None` if there are none, or if rates of a busy machine have expired.

    A file that the environment names never expires and must hold rates.
    """
    named = os.environ.get(VARIABLE, "")
    if path.exists():
        try:
            rates, busy = _read(path)
            is_recent = time.time() < path.stat().st_mtime + BUSY_RATES_SECONDS
            return rates if named or accept_busy or busy <= MAX_BUSY_FRACTION or is_recent else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            if named:
                raise ValueError(
                    f"{VARIABLE} must name a file with rates of this version: {error}. Received: {named!r}. Remove the "
                    f"file to measure again, or set {VARIABLE}=nominal."
                ) from error
    return None


def measure_in_child(
    threads: tuple[int, int] | None = None, run: Callable[..., object] = subprocess.run
) -> MachineRates | None:
    """Measure in a child process with the same environment; return `None` if it fails.

    It has as many intra-op and inter-op threads as this process, unless other numbers are given.
    """
    if not sys.executable:
        return None
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rates.json"
        command = [sys.executable, "-m", __name__, str(path), *map(str, threads or _threads())]
        # `sys.path` may have been changed in this process, which may also hide its accelerators.
        paths = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "-1"}
        run(
            command,
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env=environment,
            timeout=MEASURING_TIMEOUT_SECONDS,
        )
        return _read(path)[0]
    return None


def cache_directory() -> Path:
    """Return the directory for files that later processes read."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "tflms-sft"


def _key() -> str:
    """Return a hash of everything that rates depend on."""
    processor = proc_fields("/proc/cpuinfo").get("model name") or platform.processor() or platform.machine()
    gpus = tf.config.get_visible_devices("GPU") if planned_device().is_gpu else []
    chip = str(tf.config.experimental.get_device_details(gpus[0]).get("device_name")) if gpus else processor
    parts: tuple[object, ...] = (
        VERSION,
        tf.__version__,
        chip,
        _threads(),
        num_cores(),
        planned_device().has_allocator_stats,
    )
    if gpus:
        parts += (tf.config.experimental.tensor_float_32_execution_enabled(),)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _threads() -> tuple[int, int]:
    """Return the numbers of intra-op and inter-op threads; 0 is TensorFlow's default."""
    threading = tf.config.threading
    return threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads()


def busy_when_measured(path: Path) -> float:
    """Return the fraction of all cores that other processes used when a file of rates was written; 0 without a file."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        return _read(path)[1]
    return 0.0


def _read(path: Path) -> tuple[MachineRates, float]:
    """Return the rates in a file, and the fraction of all cores that other processes used during the measurement."""
    values = json.loads(path.read_text(encoding="utf-8"))
    version = values.pop("version")
    if version != VERSION:
        raise ValueError(f"its version is {version!r} instead of {VERSION}")
    values["first_touch"] = values["first_touch"] or math.inf
    busy = float(values.pop("busy", 0.0))
    rates = MachineRates(**values)
    numbers = [rates.weights, rates.first_touch, rates.copied, rates.disk_write, rates.disk_read, rates.long_row_bytes]
    for rates_by_op in (rates.flops, rates.touched, rates.unfolded):
        numbers += rates_by_op.values()
    if "" not in rates.flops or "" not in rates.touched or not all(number > 0 for number in numbers):
        raise ValueError("a rate is missing or not above zero")
    return rates, busy


def _write(path: Path, rates: MachineRates, busy: float = 0.0) -> None:
    """Write a file of rates atomically, because other processes may write it concurrently."""
    values = {"version": VERSION, "busy": round(busy, 2), **dataclasses.asdict(rates)}
    values["first_touch"] = None if math.isinf(rates.first_touch) else rates.first_touch
    write_json(path, values)


def _measure_for_parent(path: str, intra_op_threads: str, inter_op_threads: str) -> None:
    """Measure with the thread counts of the parent process, and write the rates to a file."""
    tf.config.threading.set_intra_op_parallelism_threads(int(intra_op_threads))
    tf.config.threading.set_inter_op_parallelism_threads(int(inter_op_threads))
    _write(Path(path), measured_rates())


_CALIBRATION = Calibration(measure_in_child)
machine_rates, stored_rates = _CALIBRATION.machine_rates, _CALIBRATION.stored_rates

if __name__ == "__main__":
    _measure_for_parent(*sys.argv[1:])
