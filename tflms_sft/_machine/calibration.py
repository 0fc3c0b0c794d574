"""What this machine does in a second: measured once, kept in a file, read by every later process.

On a CPU another process measures, so that the memory that it takes is not this one's; an accelerator's memory may be
all in this one's hands. What is measured while other processes work is doubted, and measured again some time later.
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

from rewriters.device import properties
from rewriters.estimates.op_cost import NOMINAL, MachineRates
from tflms_sft._machine.cpu_load import OtherProcesses
from tflms_sft._machine.rate_benchmarks import measured_rates, num_cores

VARIABLE = "TFLMS_SFT_RATES"
"""Environment variable: `nominal`, or a file of rates to read, and to write if there is none."""

VERSION = 6
"""Of the file: others are measured anew."""

PATIENCE = 120
"""Seconds after which another process that measures is given up."""

BUSY = 0.2
"""Part of all cores that other processes may keep busy while rates are measured."""

DOUBTED = 600
"""Seconds after which rates that were measured while the machine was busier are measured again."""

_known: dict[str, MachineRates] = {}


def machine_rates(tell: Callable[[str], None] | None = None) -> MachineRates:
    """The rates of this machine and device.

    Args:
        tell: Is given a line of text before they are measured.

    Raises:
        ValueError: If the environment names a file that holds something else.
    """
    path = rates_path()
    if path is None:
        return NOMINAL
    if str(path) not in _known:
        _known[str(path)] = _kept(path, os.environ.get(VARIABLE, "")) or _found(path, tell)
    return _known[str(path)]


def kept_rates() -> MachineRates:
    """The rates of this machine if they have been measured, for what nothing is chosen by; otherwise nominal ones."""
    path = rates_path()
    if path is None:
        return NOMINAL
    return _known.get(str(path)) or _kept(path, os.environ.get(VARIABLE, ""), doubted=True) or NOMINAL


def rates_path() -> Path | None:
    """The file that rates are kept in; `None` for those of no machine in particular."""
    named = os.environ.get(VARIABLE, "")
    if named == "nominal":
        return None
    return Path(named) if named else _cache_directory() / f"rates-{_key()}.json"


def _kept(path: Path, named: str, doubted: bool = False) -> MachineRates | None:
    """What is in a file; `None` if there is none, or nothing of use, and if it is time to measure doubted rates again.

    Args:
        path: The file.
        named: How a user has named it, if so: then it is taken as it is, and has to be one of rates.
        doubted: Whether rates will do that were measured on a busy machine some time ago.
    """
    if path.exists():
        try:
            rates, busy = _read(path)
            good = named or doubted or busy <= BUSY or time.time() < path.stat().st_mtime + DOUBTED
            return rates if good else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            if named:
                raise ValueError(
                    f"The file that {VARIABLE} names holds no rates of this version: {error}. Received: {named!r}. "
                    f"Remove it to have them measured, or set {VARIABLE}=nominal."
                ) from error
    return None


def _found(path: Path, tell: Callable[[str], None] | None) -> MachineRates:
    """Measured, and kept for the next process."""
    if tell is not None:
        tell(f"tflms-sft: measuring how fast this machine is, once; kept in {path}")
    others = OtherProcesses()
    rates = None if properties.name().startswith("GPU") else _measured_apart()
    try:
        rates = rates or measured_rates()
    except (tf.errors.OpError, MemoryError):  # No memory to measure in.
        return NOMINAL
    busy = others.part()
    if busy > BUSY and tell is not None:
        tell(
            f"tflms-sft: other processes kept {busy:.0%} of the machine busy meanwhile: predicted times may be wrong. "
            f"The first plan made more than {DOUBTED // 60} minutes from now measures again"
        )
    with contextlib.suppress(OSError):  # They are measured again next time.
        _write(path, rates, busy)
    return rates


def _measured_apart() -> MachineRates | None:
    """Measured by another process with the same environment; `None` if there cannot be one."""
    if not sys.executable:
        return None
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rates.json"
        command = [sys.executable, "-m", __name__, str(path), *map(str, _threads())]
        # Where this package is may be known to this process alone; and an accelerator that it hides is not to be used.
        paths = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "-1"}
        subprocess.run(
            command, check=True, capture_output=True, stdin=subprocess.DEVNULL, env=environment, timeout=PATIENCE
        )
        return _read(path)[0]
    return None


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "tflms-sft"


def _key() -> str:
    """What rates depend on."""
    gpus = tf.config.get_visible_devices("GPU") if properties.name().startswith("GPU") else []
    chip = str(tf.config.experimental.get_device_details(gpus[0]).get("device_name")) if gpus else _processor()
    parts = (VERSION, tf.__version__, chip, _threads(), num_cores(), properties.has_allocator_stats())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _threads() -> tuple[int, int]:
    """Within an operation, and for several; 0 is what TensorFlow takes by itself."""
    threading = tf.config.threading
    return threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads()


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def busy_when_measured(path: Path) -> float:
    """Part of all cores that other processes kept busy when the rates in a file were measured; 0 if it holds none."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        return _read(path)[1]
    return 0.0


def _read(path: Path) -> tuple[MachineRates, float]:
    """Rates, and what part of all cores others kept busy when they were measured."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.pop("version") != VERSION:
        raise ValueError("they are of another version")
    found["first_touch"] = found["first_touch"] or math.inf
    busy = float(found.pop("busy", 0.0))
    rates = MachineRates(**found)
    numbers = [rates.weights, rates.first_touch, rates.copied, rates.disk_write, rates.disk_read]
    for own in (rates.flops, rates.touched, rates.unfolded):
        numbers += own.values()
    if "" not in rates.flops or "" not in rates.touched or not all(number > 0 for number in numbers):
        raise ValueError("some are missing, or not above zero")
    return rates, busy


def _write(path: Path, rates: MachineRates, busy: float = 0.0) -> None:
    """All of it or nothing: other processes may write at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"version": VERSION, "busy": round(busy, 2), **dataclasses.asdict(rates)}
    values["first_touch"] = None if math.isinf(rates.first_touch) else rates.first_touch
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        try:
            json.dump(values, file, indent=2)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


def _measure_for_another(path: str, within: str, among: str) -> None:
    """What the other process does: takes the threads that the first one has, measures, and writes."""
    tf.config.threading.set_intra_op_parallelism_threads(int(within))
    tf.config.threading.set_inter_op_parallelism_threads(int(among))
    _write(Path(path), measured_rates())


if __name__ == "__main__":
    _measure_for_another(*sys.argv[1:])
