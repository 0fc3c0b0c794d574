"""What a user asks of swapping, checked when it is written down."""

from __future__ import annotations

import dataclasses
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

_ON_DISK = "/var/tmp"
"""For large temporary files, by the Filesystem Hierarchy Standard."""


@dataclasses.dataclass(frozen=True)
class SwapParams:
    """Large model support by swapping (Le et al., "TFLMS", 2018, Table 2); public as `LMSParams`.

    Args:
        optimizer_scopes: Name scopes of operations that belong to the backward phase. They are found from the
            graph; given, they count as well.
        starting_scope: Tensors reachable from the operations in this scope are swapped. Defaults to `None`: from
            the arguments of the step.
        starting_op_names: The same by names of operations.
        excl_scopes: Scopes whose tensors are not swapped, even if they are included otherwise.
        incl_scopes: Scopes whose tensors are swapped; if these or types are given, no others are.
        excl_types: Operation types whose tensors are not swapped.
        incl_types: Operation types whose tensors are swapped.
        n_tensors: Most tensors to swap, counted from the start. Defaults to -1, all.
        lb: How long before it is read a tensor is fetched, at least: with `"direct_order"` in γ before its reader,
            with `"chain_rule"` in forward operations after its producer. Larger hides more of the transfer and
            holds more on the device. Defaults to 1.
        ub: The same, at most. Defaults to 10000.
        ctrld_strategy: How the operation is found that triggers a swap-in: `"chain_rule"` (Algorithm 2, the
            default) or `"direct_order"` (Algorithm 1). Readers in the forward phase use the latter always.
        fuse_swapins: Whether readers of a tensor that are close share one swap-in. Defaults to `False`.
        swap_branches: Whether tensors that a much later forward operation reads are swapped too.
        branch_threshold: Distance in γ above which a forward operation is much later. Defaults to 0.
        tier: Where tensors go: `"host"` memory beside an accelerator, `"disk"`, or `"auto"`: host if there is an
            accelerator, else disk.
        spill_dir: Directory for the disk tier. Defaults to the system's directory for temporary files, or to
            `/var/tmp` where that is in memory.
        page_cache: Whether what is written to disk may stay in memory that the operating system can take back;
            `False` makes every write wait for the disk. Defaults to `True`.
        min_bytes: Smaller tensors stay: an int, or a string such as `"1MiB"`. Defaults to 1 MiB.
        fuse_distance: Distance in γ up to which readers are close. Defaults to 10.
        max_in_flight: Swap-outs that may be under way at a time. Defaults to 2.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a wrong value, and a directory that cannot be written to.
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
    max_in_flight: int = 2

    def __post_init__(self) -> None:
        """Check everything that can be checked without a graph."""
        for argument in ("optimizer_scopes", "excl_scopes", "incl_scopes", "excl_types", "incl_types"):
            self._set(argument, _names(getattr(self, argument), argument))
        self._set("starting_op_names", _names(self.starting_op_names or (), "starting_op_names"))
        if self.starting_scope is not None and (not isinstance(self.starting_scope, str) or not self.starting_scope):
            raise TypeError(f"`starting_scope` must be the name of a scope. Received: {self.starting_scope!r}.")
        least = {"n_tensors": -1, "lb": 0, "ub": 1, "branch_threshold": 0, "fuse_distance": 0, "max_in_flight": 1}
        for argument, smallest in least.items():
            self._set(argument, _integer(getattr(self, argument), argument, smallest))
        if self.n_tensors == 0:
            raise ValueError("`n_tensors` is 0, which swaps nothing. Use -1 for all tensors. Received: n_tensors=0.")
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
        smallest_tensor = 0 if self.min_bytes == 0 else parse_bytes(self.min_bytes, "min_bytes")
        self._set("min_bytes", smallest_tensor)
        if self.spill_dir is not None:
            self._set("spill_dir", _directory(self.spill_dir))

    def _set(self, argument: str, value: Any) -> None:
        object.__setattr__(self, argument, value)

    @property
    def directory(self) -> str:
        """Where the disk tier writes."""
        usual = tempfile.gettempdir()
        if self.spill_dir or not is_in_memory(usual):
            return self.spill_dir or usual
        return _ON_DISK if os.access(_ON_DISK, os.W_OK) and not is_in_memory(_ON_DISK) else usual

    def options(self) -> SwapOptions:
        """What the compiler needs to know."""
        names = {field.name for field in dataclasses.fields(SwapOptions)}
        return SwapOptions(**{name: getattr(self, name) for name in names})


def _names(value: Any, argument: str) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    collection = isinstance(names, (Sequence, set, frozenset)) and not isinstance(names, bytes)
    if not collection or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"`{argument}` must be a name or several names. Received: {argument}={value!r}.")
    return tuple(sorted(names) if isinstance(names, (set, frozenset)) else names)


def _integer(value: Any, argument: str, smallest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{argument}` must be an integer. Received: {argument}={value!r}.")
    if value < smallest:
        raise ValueError(f"`{argument}` must be at least {smallest}. Received: {argument}={value!r}.")
    return int(value)


def _directory(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"`spill_dir` must be a path. Received: spill_dir={value!r}.")
    path = os.path.abspath(os.fspath(value))
    if not os.path.isdir(path):
        raise ValueError(f"`spill_dir` must be a directory that exists. Received: spill_dir={value!r}.")
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"`spill_dir` must be a directory that can be written to: {error.strerror}. Received: spill_dir={value!r}."
        ) from None
    return path
