"""Tables and picture of `benchmarks.lms`."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

MIB = 2**20
MAX_TRANSFER_RATIO = 1.2
"""Time of swaps past the page cache, at most, over their time at the disk's measured speed."""

Results = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One configuration of training.

    Attributes:
        params: Arguments of `LMSParams`; `None` for plain training.
        one_thread: Whether TensorFlow runs one op at a time.
    """

    params: dict[str, Any] | None
    one_thread: bool = False

    @property
    def series(self) -> str:
        """Name without the lower bound; cells of one series form a line in a plot."""
        return ", ".join(self._parts(bound=False))

    @property
    def name(self) -> str:
        """Return the name of the cell in the table and for `--cells`."""
        return ", ".join(self._parts(bound=True))

    @property
    def base(self) -> str:
        """Name of the cell of plain training that it is compared with."""
        return Cell(None, self.one_thread).name

    @property
    def lb(self) -> int:
        """Lower bound of TFLMS."""
        return (self.params or {}).get("lb", 1)

    @property
    def past_cache(self) -> bool:
        """Whether swaps bypass the page cache."""
        return self.params is not None and not self.params.get("page_cache", True)

    def _parts(self, bound: bool) -> Iterable[str]:
        params = self.params
        if params is None:
            yield "plain"
        else:
            count = params.get("n_tensors", -1)
            yield "all" if count < 0 else f"{count} tensors"
            if "ctrld_strategy" in params:
                yield params["ctrld_strategy"]
            if bound:
                yield f"lb={self.lb}"
            if params.get("fuse_swapins"):
                yield "fused"
            if params.get("swap_branches"):
                yield f"branches > {params.get('branch_threshold', 0)}"
            if self.past_cache:
                yield "no page cache"
        if self.one_thread:
            yield "one inter-op thread"


def speeds(disks: Sequence[tuple[float, float]]) -> str:
    """Return the bandwidths of the disk as text, in the order of their measurement."""
    write, read = (", ".join(f"{speed / MIB:.0f}" for speed in column) for column in zip(*disks, strict=True))
    return f"writes {write} MiB/s, reads {read} MiB/s"


def seconds(figures: dict[str, Any]) -> float | None:
    """Return the median time of a step; `None` if the cell failed."""
    return statistics.median(figures["step_seconds"]) if figures.get("step_seconds") else None


def net_rss(figures: dict[str, Any]) -> float | None:
    """Return the median over the runs of the largest growth of RSS in a step; `None` if the cell failed."""
    return statistics.median(figures["net_rss_bytes"]) if figures.get("net_rss_bytes") else None


def relative(figure: Callable[[dict[str, Any]], float | None], cell: Cell, results: Results) -> float | None:
    """Return a figure of a cell over that of plain training; `None` if one of the cells failed."""
    value, plain = figure(results[cell.name]), figure(results[cell.base])
    return None if value is None or plain is None else value / plain


def table(title: str, cells: Sequence[Cell], results: Results) -> str:
    """Return the figures as a Markdown table, followed by the failed cells with their reasons."""
    lines = [
        f"| {title} | tensors | out | in | net RSS | of plain | step | of plain | loss differs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        figures = results[cell.name]
        columns = [
            cell.name,
            str(figures.get("tensors", 0)),
            *(f"{figures.get(key, 0) / MIB:.0f} MiB" for key in ("swapped_bytes", "read_bytes")),
            _shown(net_rss(figures), "{:.0f} MiB", MIB),
            _shown(relative(net_rss, cell, results), "{:.2f}"),
            _shown(seconds(figures), "{:.2f} s"),
            _shown(relative(seconds, cell, results), "{:.2f}"),
            _shown(_loss_gap(figures, results[cell.base]), "{:.1e}"),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    failed = [f"{cell.name} failed: {why}" for cell in cells if (why := results[cell.name].get("failed"))]
    return "\n".join([*lines, *failed])


def _shown(value: float | None, form: str, unit: int = 1) -> str:
    return "-" if value is None else form.format(value / unit)


def _loss_gap(figures: dict[str, Any], plain: dict[str, Any]) -> float | None:
    if "losses" not in figures or "losses" not in plain:
        return None
    return max(abs(a - b) for a, b in zip(figures["losses"], plain["losses"], strict=True))


def bound(plain_seconds: float, figures: dict[str, Any], write: float, read: float) -> float:
    """Return the upper bound of a step's time in seconds: plain training, then all transfers.

    Args:
        plain_seconds: Time of a step of plain training.
        figures: Figures of the cell.
        write: Bytes per second that the disk writes.
        read: Bytes per second that the disk reads.
    """
    return plain_seconds + MAX_TRANSFER_RATIO * (figures["swapped_bytes"] / write + figures["read_bytes"] / read)


def bounds(cells: Sequence[Cell], results: Results, write: float, read: float) -> str:
    """Return a line for each cell past the page cache: its time, the bound, and whether the bound holds."""
    lines = []
    for cell in (cell for cell in cells if cell.past_cache):
        figures = results[cell.name]
        step, plain = seconds(figures), seconds(results[cell.base])
        if step is None or plain is None:
            continue
        limit = bound(plain, figures, write, read)
        lines.append(
            f"{cell.name}: {step:.2f} s per step; {'within' if step <= limit else 'NOT within'} {limit:.2f} s = "
            f"{plain:.2f} + {MAX_TRANSFER_RATIO} x ({figures['swapped_bytes'] / MIB:.0f} MiB at "
            f"{write / MIB:.0f} MiB/s + {figures['read_bytes'] / MIB:.0f} MiB at {read / MIB:.0f} MiB/s)"
        )
    return "\n".join(["", *lines]) if lines else ""


Points = dict[str, list[tuple[float, float]]]


def draw(title: str, cells: Sequence[Cell], results: Results, path: Path) -> None:
    """Draw memory over time for all cells, and both over the lower bound and over the number of tensors.

    Values are relative to plain training. A line joins cells that differ in one parameter.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [cell for cell in cells if relative(net_rss, cell, results) and relative(seconds, cell, results)]
    swapped = [cell for cell in shown if cell.params is not None]
    some = [cell for cell in swapped if _only_tensors_and_bound(cell)]
    styles = _styles(cell.series for cell in swapped)
    rows = [
        (
            name,
            _long(points(swapped, results, lambda cell: cell.lb, value)),
            _long(points(some, results, lambda cell: results[cell.name]["tensors"], value, lambda c: f"lb={c.lb}")),
        )
        for value, name in ((net_rss, "net RSS, of plain"), (seconds, "step time, of plain"))
    ]
    columns = 1 + any(row[1] for row in rows) + any(row[2] for row in rows)
    figure, axes = pyplot.subplots(2, columns, figsize=(5.5 * columns, 8.5), layout="constrained", squeeze=False)
    both = points(swapped, results, lambda cell: relative(seconds, cell, results), net_rss)
    _lines(axes[0, 0], both, styles, "step time, of plain", "net RSS, of plain")
    axes[0, 0].plot(1, 1, "*", color="black", markersize=12, label="plain")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[1, 0].axis("off")  # The legend has a panel of its own, so that it covers no point.
    axes[1, 0].legend(handles, labels, loc="upper center", fontsize=9, ncols=1 if len(labels) <= 12 else 2)
    for (name, over_lb, over_count), places in zip(rows, axes[:, 1:], strict=True):
        free = iter(places)
        if over_lb:
            _over_lb(next(free), over_lb, styles, name)
        if over_count:
            last = next(free)
            _lines(last, over_count, _styles(over_count), "tensors swapped", name)
            last.legend(fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _over_lb(axes: Any, lines: Points, styles: dict[str, dict[str, Any]], up: str) -> None:
    _lines(axes, lines, styles, "lower bound, lb (colours as on the left)", up)
    shown = sorted({x for line in lines.values() for x, _ in line})
    axes.set_xscale("log")
    axes.set_xticks(shown, [f"{x:.0f}" for x in shown])
    axes.minorticks_off()


def points(
    cells: Sequence[Cell],
    results: Results,
    across: Callable[[Cell], float | None],
    figure: Callable[[dict[str, Any]], float | None],
    series: Callable[[Cell], str] = lambda cell: cell.series,
) -> Points:
    """Return the points (x, figure over that of plain training) of each series, in the order of its parameter."""
    lines: Points = {series(cell): [] for cell in cells}
    for cell in sorted(cells, key=lambda cell: (cell.lb, results[cell.name]["tensors"])):
        x, y = across(cell), relative(figure, cell, results)
        if x is not None and y is not None:
            lines[series(cell)].append((x, y))
    return lines


def _only_tensors_and_bound(cell: Cell) -> bool:
    return not cell.one_thread and set(cell.params or {}) <= {"n_tensors", "lb"}


def _long(lines: Points) -> Points:
    """Return the lines of at least two points."""
    return {series: line for series, line in lines.items() if len(line) > 1}


def _styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a colour and a marker for each name."""
    from matplotlib import colormaps

    colors = itertools.cycle([*colormaps["tab10"].colors, *colormaps["Dark2"].colors])
    looks = zip(dict.fromkeys(names), colors, itertools.cycle("osD^vP>X<pdh"), strict=False)
    return {name: {"color": color, "marker": marker, "linewidth": 1, "alpha": 0.8} for name, color, marker in looks}


def _lines(axes: Any, lines: Points, styles: dict[str, dict[str, Any]], across: str, up: str) -> None:
    if not lines:
        axes.axis("off")
        return
    for series, line in lines.items():
        axes.plot(*zip(*line, strict=True), label=series, **styles[series])
    axes.set(xlabel=across, ylabel=up)
    axes.grid(alpha=0.3)
