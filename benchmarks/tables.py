"""Copies tables and figures of `benchmarks/results/` into the documentation.

    python -m benchmarks.tables [--check]

A page names them in comments:

    <!-- table: vgg16_2048.json steps -->                 the table stands between this line and `<!-- end -->`
    1.24x<!-- vgg16_2048.json: path / to / value -->      the number before the comment is this value

A path consists of keys and indices. `over` divides two values of a file: `a / b over c / b`. A number keeps its
decimals and its unit: MiB and GiB for bytes, % for fractions, min for seconds. `--check` changes no page. Its exit code
is 1 if a page differs.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _results

UNIT_SCALES = {"MiB": 2.0**-20, "GiB": 2.0**-30, "%": 100.0, "min": 1 / 60}
TABLE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"(-?\d[\d,]*(?:\.\d+)?)(\s?(?:MiB|GiB|min|%|x|s)?)(<!-- (\S+\.json): (.+?) -->)")


@functools.cache
def results(name: str) -> dict[str, Any]:
    """Return a file of results."""
    return json.loads((_results.RESULTS / name).read_text(encoding="utf-8"))


def value(name: str, path: str) -> float:
    """Return the number at a path of a file of results, or the quotient of two.

    Raises:
        KeyError: If the file has no such value.
    """
    numbers = []
    for part in path.split(" over "):
        node: Any = results(name)
        for key in part.split(" / "):
            key = key.strip()
            node = node[int(key)] if isinstance(node, list) else node[key]
        numbers.append(float(node))
    return numbers[0] / numbers[1] if len(numbers) == 2 else numbers[0]


def updated(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """Return a page with the tables and figures of the results.

    Args:
        text: The page.
        tables: Functions that return tables from several files, by name; a page names them with `-` for the file.
    """

    def table(match: re.Match[str]) -> str:
        begin, name, key, end = match.groups()
        printed = tables[key]() if name == "-" else results(name)["tables"][key]
        return f"{begin}\n{printed}\n\n{end}"

    def figure(match: re.Match[str]) -> str:
        shown, unit, comment, name, path = match.groups()
        decimals = len(shown.partition(".")[2])
        comma = "," if "," in shown else ""
        number = value(name, path) * UNIT_SCALES.get(unit.strip(), 1.0)
        return f"{number:{comma}.{decimals}f}{unit}{comment}"

    return FIGURE.sub(figure, TABLE.sub(table, text))


def pages() -> Iterator[Path]:
    """Yield the pages that may show results."""
    yield _child.ROOT / "README.md"
    yield from sorted((_child.ROOT / "docs").rglob("*.md"))


HEADLINES = (
    ("VGG-16, 2048 px", "vgg16_2048.json", ("budget 800MiB", "budget 600MiB")),
    ("ResNet-50, 2048 px", "resnet50_2048.json", ("tiles 5/12", "swaps 2/9")),
    ("ResNet-50, 32 images of 224 px", "resnet50_224.json", ("tiles 2/5", "swaps 2/7")),
    ("3-D U-Net, 96 voxels a side", "unet3d_96.json", ("tiles 550MiB", "tiles 440MiB")),
)
"""Network, results file and variants of each group of lines in the README's table."""


def headline_table() -> str:
    """Return budget, peak and time of each network, compared with plain training."""
    lines = [["network, float32", "budget", "peak of plain", "peak", "added RSS", "time (range)", "CPU time"]]
    for network, name, titles in HEADLINES:
        report = results(name)
        plain = report["results"]["plain"]
        budgets = {variant["title"]: variant["budget_bytes"] for variant in report["variants"]}
        for title in titles:
            figures = report["results"][title]
            times = [seconds / plain["step_seconds_median"] for seconds in figures["step_seconds"]]
            median = figures["step_seconds_median"] / plain["step_seconds_median"]
            swapped = " (swaps)" if title.startswith("swaps") else ""
            lines.append(
                [
                    network,
                    f"{budgets[title] / 2**20:,.0f} MiB{swapped}",
                    f"{plain['peak_bytes'] / 2**20:,.0f} MiB",
                    f"{max(figures['peak_bytes'], figures['first_peak_bytes'] or 0) / 2**20:,.0f} MiB",
                    f"{figures['net_rss_bytes'] / plain['net_rss_bytes']:.2f}",
                    f"{median:.2f} ({min(times):.2f} to {max(times):.2f})",
                    f"{figures['cpu_seconds_median'] / plain['cpu_seconds_median']:.2f}",
                ]
            )
            network = ""
    return _results.markdown(lines)


TABLES: dict[str, Callable[[], str]] = {"headlines": headline_table}


def main(arguments: Sequence[str] | None = None) -> int:
    """Update the pages, or check them; return 1 if `--check` finds a difference."""
    parser = _arguments.parser("benchmarks.tables", __doc__)
    parser.add_argument("--check", action="store_true", help="change no page; exit with 1 if one differs")
    options: argparse.Namespace = parser.parse_args(arguments)
    differ = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = updated(text, TABLES)
        if new != text:
            differ.append(page.relative_to(_child.ROOT).as_posix())
            if not options.check:
                page.write_text(new, encoding="utf-8")
    for name in differ:
        print(f"{name}: {'differs from benchmarks/results' if options.check else 'updated'}")
    return int(bool(differ) and options.check)


if __name__ == "__main__":
    sys.exit(main())
