"""The axes of a picture of memory over time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def memory_axes(path: Path, kind: str, legend: str) -> Iterator[Any]:
    """Yield axes of seconds and GiB, and save the picture when the block ends.

    Args:
        path: File of the picture.
        kind: Kind of memory, for the label.
        legend: Place of the legend, as matplotlib names it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    yield axes
    axes.set(xlabel="seconds since the process began", ylabel=f"memory of the process ({kind}), GiB")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(loc=legend)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
