"""Draws the packages and the imports between them for CONTRIBUTING.md.

    python docs/pictures/architecture.py [FOLDER]

An arrow from a to b means that a imports b. Arrows that a longer path implies are left out. The picture carries its
arrows as text, so that a test can tell whether it is up to date.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.helpers.import_graph import package_imports, transitive_reduction  # noqa: E402

HIDDEN = {"rewriters", "rewriters.errors", "tflms_sft", "tflms_sft.gems"}
HIDDEN |= {f"tflms_sft.{name}" for name in ("__main__", "_util", "_version")}
"""Not drawn: lists of names, entry points, and modules without imports that any other may use."""

COLORS = {"rewriters": "#e8effb", "tflms_sft": "#f6eaf6"}
SWEEPS = 24

Graph = Mapping[str, set[str]]
Layers = list[list[str | tuple[str, str]]]
"""Boxes and bends from top to bottom. A bend is a pair of boxes: an arrow that passes through the layer."""


def shown_imports() -> dict[str, set[str]]:
    """Return the packages of the picture, each with the packages that an arrow leads to."""
    graph = {name: targets - HIDDEN for name, targets in package_imports().items() if name not in HIDDEN}
    return transitive_reduction(graph)


def arrows(graph: Graph) -> list[tuple[str, str]]:
    """Return the pairs of importing and imported package."""
    return sorted((name, target) for name, targets in graph.items() for target in targets)


def arrows_text(graph: Graph) -> str:
    """Return one line per arrow."""
    return "\n".join(f"{name} -> {target}" for name, target in arrows(graph))


def heights(graph: Graph) -> dict[str, int]:
    """Return the length of the longest path from each package to one that imports nothing."""
    lengths: dict[str, int] = {}

    def measure(name: str) -> int:
        if name not in lengths:
            lengths[name] = max((measure(target) + 1 for target in graph[name]), default=0)
        return lengths[name]

    for name in graph:
        measure(name)
    return lengths


def ordered_layers(graph: Graph) -> Layers:
    """Return the layers from the top, each ordered so that few arrows cross (barycentre heuristic)."""
    height = heights(graph)
    layers: Layers = [[] for _ in range(max(height.values()) + 1)]
    neighbours: dict[Any, list[Any]] = {}
    for name in graph:
        layers[height[name]].append(name)
    for name, target in arrows(graph):
        bends = [(name, target)] * (height[name] - height[target] - 1)
        for level, bend in enumerate(bends, height[target] + 1):
            layers[level].append(bend)
        path = [(height[target], target), *enumerate(bends, height[target] + 1), (height[name], name)]
        for lower, upper in itertools.pairwise(path):
            neighbours.setdefault(lower, []).append(upper)
            neighbours.setdefault(upper, []).append(lower)
    for sweep in range(SWEEPS):
        levels = range(len(layers)) if sweep % 2 else range(len(layers) - 1, -1, -1)
        for level in levels:
            places = {(at, item): place(layer, item) for at, layer in enumerate(layers) for item in layer}
            weights = {
                item: sum(places[n] for n in neighbours.get((level, item), [(level, item)]))
                / len(neighbours.get((level, item), [0]))
                for item in layers[level]
            }
            layers[level].sort(key=weights.__getitem__)
    return layers[::-1]


def place(layer: list[Any], item: Any) -> float:
    """Return the horizontal position of an item of a layer, whose middle is at 0."""
    return layer.index(item) - (len(layer) - 1) / 2


def draw(folder: Path) -> Path:
    """Draw the packages from the users' side at the top to the graph at the bottom, and return the file."""
    graph = shown_imports()
    layers = ordered_layers(graph)
    half_width = max(len(layer) for layer in layers) / 2
    figure = Figure(figsize=(3.1 * half_width, 0.52 * len(layers)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(-half_width, half_width)
    axes.set_ylim(0.6 - len(layers), 0.5)
    axes.axis("off")
    boxes = {}
    for row, layer in enumerate(layers):
        for item in layer:
            if isinstance(item, str):
                boxes[item] = draw_box(axes, (place(layer, item), -row), item)
    rows = {item: row for row, layer in enumerate(layers) for item in layer if isinstance(item, str)}
    for name, target in arrows(graph):
        between = range(rows[name] + 1, rows[target])
        bends = [(place(layers[row], (name, target)), -row) for row in between]
        draw_arrow(axes, boxes[name], boxes[target], bends)
    path = folder / "architecture.png"
    metadata = {"Description": arrows_text(graph)}
    figure.savefig(path, dpi=76, metadata=metadata, pil_kwargs={"optimize": True})
    return path


def draw_box(axes: Any, position: tuple[float, float], name: str) -> Any:
    """Draw the box of a package."""
    box = {"boxstyle": "round,pad=0.35", "fc": COLORS[name.partition(".")[0]], "ec": "#8b909a", "lw": 0.9}
    return axes.text(*position, name, ha="center", va="center", fontsize=8.5, bbox=box, zorder=3)


def draw_arrow(axes: Any, begin: Any, end: Any, bends: list[tuple[float, float]]) -> None:
    """Draw a line from one box through points to another box."""
    style = {"color": "#5a6270", "lw": 1.0}
    points = [begin.get_position(), *bends]
    axes.plot([x for x, _ in points], [y for _, y in points], zorder=1, **style)
    patches = {"patchB": end.get_bbox_patch(), "shrinkA": 0, "shrinkB": 1}
    axes.annotate("", end.get_position(), points[-1], arrowprops={**style, "arrowstyle": "-|>", **patches}, zorder=1)


if __name__ == "__main__":
    print(draw(Path(*sys.argv[1:] or [__file__, ".."]).resolve()))
