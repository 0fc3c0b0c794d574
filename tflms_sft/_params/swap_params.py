"""`SwapParams`: the parameters of swapping, checked at construction."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import tempfile
from collections.abc import Sequence
from typing import Any

from rewriters.swapping.spill_store import is_in_memory
from rewriters.swapping.swap_pass import SwapOptions
from tflms_sft._util.byte_sizes import parse_bytes

STRATEGIES = ("chain_rule", "direct_order")
TIERS = ("auto", "host", "disk")

_DISK_DIRECTORY = "/var/tmp"
"""Directory for large temporary files, by the Filesystem Hierarchy Standard."""


@dataclasses.dataclass(frozen=True)
class SwapParams:
    """Parameters of swapping, checked at construction.

    The public subclass `LMSParams` documents the arguments, and adds `tuned`, which needs the planner.
    """

    optimizer_scopes: Any = ()
    starting_scope: str | None = None
    starting_op_names: Any = None
    excl_scopes: Any = ()
    incl_scopes: Any = ()
    excl_types: Any = ()
    incl_types: Any = ()
    n_tensors: int = -1
    lb: int = 1
    ub: int = 10000
    ctrld_strategy: str = "chain_rule"
    fuse_swapins: bool = False
    swap_branches: bool = False
    branch_threshold: int = 0
    tier: str = "auto"
    spill_dir: Any = None
    page_cache: bool = True
    min_bytes: Any = "1MiB"
    fuse_distance: int = 10
    max_in_flight: int | None = None
    lead: float | None = None

    def __post_init__(self) -> None:
        """Check every argument as far as possible without a graph."""
        for argument in ("optimizer_scopes", "excl_scopes", "incl_scopes", "excl_types", "incl_types"):
            self._set(argument, _names(getattr(self, argument), argument))
        self._set("starting_op_names", _names(self.starting_op_names or (), "starting_op_names"))
        if self.starting_scope is not None and (not isinstance(self.starting_scope, str) or not self.starting_scope):
            raise TypeError(f"`starting_scope` must be the name of a scope. Received: {self.starting_scope!r}.")
        minimums = {"n_tensors": -1, "lb": 0, "ub": 1, "branch_threshold": 0, "fuse_distance": 0}
        if self.max_in_flight is not None:
            minimums["max_in_flight"] = 1
        for argument, minimum in minimums.items():
            self._set(argument, _integer(getattr(self, argument), argument, minimum))
        if self.lead is not None:
            self._set("lead", _non_negative(self.lead, "lead"))
        if self.n_tensors == 0:
            raise ValueError("`n_tensors` must be at least 1, or -1 for all tensors. Received: n_tensors=0.")
        if self.lb > self.ub:
            raise ValueError(f"`lb` must not be above `ub`. Received: lb={self.lb}, ub={self.ub}.")
        for argument, choices in (("ctrld_strategy", STRATEGIES), ("tier", TIERS)):
            value = getattr(self, argument)
            if value not in choices:
                shown = " or ".join(f'"{choice}"' for choice in choices)
                raise ValueError(f"`{argument}` must be {shown}. Received: {argument}={value!r}.")
        for argument in ("fuse_swapins", "swap_branches", "page_cache"):
            if not isinstance(getattr(self, argument), bool):
                raise TypeError(f"`{argument}` must be a bool. Received: {argument}={getattr(self, argument)!r}.")
        self._set("min_bytes", 0 if self.min_bytes == 0 else parse_bytes(self.min_bytes, "min_bytes"))
        if self.spill_dir is not None:
            self._set("spill_dir", _directory(self.spill_dir))

    def _set(self, argument: str, value: Any) -> None:
        object.__setattr__(self, argument, value)

    @property
    def directory(self) -> str:
        """Directory of the disk tier."""
        temporary = tempfile.gettempdir()
        if self.spill_dir or not is_in_memory(temporary):
            return self.spill_dir or temporary
        has_disk = os.access(_DISK_DIRECTORY, os.W_OK) and not is_in_memory(_DISK_DIRECTORY)
        return _DISK_DIRECTORY if has_disk else temporary

    def options(self) -> SwapOptions:
        """Return the options of the compiler pass."""
        names = {field.name for field in dataclasses.fields(SwapOptions)}
        return SwapOptions(**{name: getattr(self, name) for name in names})


def _names(value: Any, argument: str) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    collection = isinstance(names, (Sequence, set, frozenset)) and not isinstance(names, bytes)
    if not collection or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"`{argument}` must be a name or several names. Received: {argument}={value!r}.")
    return tuple(sorted(names) if isinstance(names, (set, frozenset)) else names)


def _integer(value: Any, argument: str, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{argument}` must be an integer. Received: {argument}={value!r}.")
    if value < minimum:
        raise ValueError(f"`{argument}` must be at least {minimum}. Received: {argument}={value!r}.")
    return int(value)


def _non_negative(value: Any, argument: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{argument}` must be a number. Received: {argument}={value!r}.")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"`{argument}` must be finite and at least 0. Received: {argument}={value!r}.")
    return float(value)


def _directory(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"`spill_dir` must be a path. Received: spill_dir={value!r}.")
    path = os.path.abspath(os.fspath(value))
    if not os.path.isdir(path):
        raise ValueError(f"`spill_dir` must be an existing directory. Received: spill_dir={value!r}.")
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"`spill_dir` must be a writable directory: {error.strerror}. Received: spill_dir={value!r}."
        ) from None
    return path
