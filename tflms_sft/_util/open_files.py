"""Open files of this process and their limit, as far as the system reports them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence

FOLDERS = ("/proc/self/fd", "/dev/fd")
"""Folders with a file for each open descriptor: that of Linux, and that of macOS and BSD."""


def open_file_limits() -> tuple[float, float]:
    """Return the soft and the hard limit of open files; infinity for no limit, and where the system reports none."""
    try:
        import resource
    except ImportError:  # Windows.
        return math.inf, math.inf
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard


def open_descriptors(folders: Sequence[str] = FOLDERS) -> list[int] | None:
    """Return the descriptors of all open files and connections; `None` where the system does not list them."""
    for folder in folders:
        with contextlib.suppress(OSError), open(os.devnull, "rb") as probe:
            descriptors = [int(name) for name in os.listdir(folder)]
            if probe.fileno() in descriptors:  # Without `fdescfs`, the folder of FreeBSD has the first three alone.
                return [descriptor for descriptor in descriptors if descriptor != probe.fileno()]
    return None
