"""Draws `tiles.gif`: a training step of a small network, original and in tiles, with the memory in use over time.

Regions, live tensors, bytes and times are those of a planned step (`step_trace.py`). Both steps share the time axis.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from step_trace import Moment

FORWARD, RECOMPUTED, GRADIENT, EMPTY, GRID, TEXT, SOFT = (
    "#4f86e0", "#f2a33a", "#a857ab", "#eef0f3", "#b9bec7", "#1f2329", "#667080",
)  # fmt: skip
ORIGINAL, REWRITTEN = "#7a808b", "#1d5fd1"
WIDTH, HEIGHT = 800, 470
"""Size of a frame in pixels."""

MAP = 62
"""Side of the image in pixels."""

FIRST_MS, NEXT_MS, HEAD_MS, LAST_MS = 320, 75, 900, 2600
"""Milliseconds of a frame: of the first tile of a loop, of other tiles, between the loops, and of the last frame."""

BLENDS = 5
"""Shades of each colour towards white in the palette, for the edges of letters and lines."""

Region = tuple[int, int, int, int]
"""First row, end of rows, first column, end of columns."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer whose result is drawn.

    Attributes:
        name: Name of the layer.
        rows: Rows of its result, which is square.
    """

    name: str
    rows: int


@dataclasses.dataclass(frozen=True)
class Steps:
    """A training step, original and in tiles.

    Attributes:
        layers: The image, and the layers of the segment.
        grid: Tiles along each axis.
        original: Ops of the original step.
        tiled: Ops of the step in tiles.
        regions: Region of a tile by loop, tile, layer, and whether it is a region of the gradient.
        cells: Tile of the exit that an iteration writes.
    """

    layers: tuple[Layer, ...]
    grid: int
    original: Sequence[Moment]
    tiled: Sequence[Moment]
    regions: dict[tuple[str, tuple[int, ...], str, bool], Region]
    cells: dict[tuple[int, ...], Region]


Place = tuple[str, bool]
"""Layer, and whether the tensor is a gradient with respect to its result."""


def place_of(name: str, layers: Sequence[Layer]) -> Place | None:
    """Return the layer whose result a tensor is, or the gradient of whose result; `None` for other tensors."""
    names = [layer.name for layer in layers]
    match = re.search(rf"(gradient_tape/)?\w+/({'|'.join(names)}|mean)(?:_\d+)?(?:/|:|$)(.*)", name)
    if match is None:
        return None
    layer, op = match[2], match[3]
    if not match[1]:
        return None if layer == "mean" else (layer, False)
    if layer == "mean":
        return (names[-1], True) if re.search("Tile|truediv|RealDiv|BroadcastTo", op) else None
    if "ReluGrad" in op:
        return layer, True
    if "BackpropInput" in op or "MaxPoolGrad" in op:
        return names[names.index(layer) - 1], True
    return None


def group_of(moment: Moment, layers: Sequence[Layer]) -> tuple[Any, ...] | None:
    """Return what ops that share a frame have in common; `None` for ops without a layer."""
    match = re.match(rf"(gradient_tape/)?\w+/({'|'.join(layer.name for layer in layers)})(?:_\d+)?(?:/|$)", moment.op)
    if not moment.loop:
        return ("head",)
    return None if match is None else (moment.loop, moment.tile, match[2], bool(match[1]))


def frames(steps: Steps) -> Iterator[tuple[Moment, float, int]]:
    """Yield (last op of the frame, highest bytes so far, milliseconds) of each frame."""
    groups: list[list[Moment]] = []
    last = None
    for moment in steps.tiled:
        group = group_of(moment, steps.layers)
        if group is not None and group != last:
            groups.append([])
            last = group
        if groups:
            groups[-1].append(moment)
    for number, moments in enumerate(groups):
        # The op with most bytes shows all tensors of the group, the last op of the step what remains.
        is_last = number == len(groups) - 1
        shown = moments[-1] if is_last else max(moments, key=lambda moment: (moment.num_bytes, moment.begin))
        loop_begins = bool(shown.loop) and not any(shown.tile)
        length = LAST_MS if is_last else HEAD_MS if not shown.loop else FIRST_MS if loop_begins else NEXT_MS
        yield shown, moments[-1].end, length


class Drawing:
    """Draws frames on one figure.

    Args:
        steps: The steps.
    """

    def __init__(self, steps: Steps) -> None:
        """Prepare the figure."""
        self.steps = steps
        self.figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, facecolor="white")
        self.canvas = FigureCanvasAgg(self.figure)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, WIDTH)
        self.axes.set_ylim(0, HEIGHT)
        self.axes.axis("off")
        self.peaks = [max(moment.num_bytes for moment in run) for run in (steps.original, steps.tiled)]
        self.end = max(steps.original[-1].end, steps.tiled[-1].end)
        self.curves = [self._curve_axes(left) for left in (52, 452)]
        self.moving: list[Any] = []
        self._static()

    def _curve_axes(self, left: int) -> Any:
        axes = self.figure.add_axes((left / WIDTH, 94 / HEIGHT, 326 / WIDTH, 122 / HEIGHT))
        axes.set_xlim(0, 1.005 * self.end)
        axes.set_ylim(0, 1.22 * max(self.peaks) / 2**20)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, length=2, color=SOFT)
        axes.set_xlabel("predicted time (original step = 1)", fontsize=8.5, labelpad=1)
        axes.set_ylabel("MiB in use", fontsize=8.5)
        return axes

    def _static(self) -> None:
        text = self.axes.text
        text(24, 446, "Original training", fontsize=13, fontweight="bold", color=TEXT)
        grid = self.steps.grid
        text(424, 446, f"The same step in {grid} x {grid} tiles", fontsize=13, fontweight="bold", color=TEXT)
        for left in (0, 400):
            for number, layer in enumerate(self.steps.layers):
                x = self._left(left, number) + self._side(layer) / 2
                text(x, 402, layer.name, fontsize=8.5, color=SOFT, ha="center", va="bottom")
            text(left + 14, 368, "forward", fontsize=8.5, color=SOFT, rotation=90, ha="center", va="center")
            text(left + 14, 292, "gradients", fontsize=8.5, color=SOFT, rotation=90, ha="center", va="center")
        entries = (
            (FORWARD, "in memory"),
            (RECOMPUTED, "recomputed for the backward pass"),
            (GRADIENT, "gradient"),
            (EMPTY, "not in memory"),
        )
        x = 52.0
        for color, label in entries:
            self.axes.add_patch(Rectangle((x, 30), 12, 12, fc=color, ec=GRID if color == EMPTY else "none", lw=0.8))
            x += 45 + text(x + 17, 36, label, fontsize=9, color=TEXT, va="center").get_window_extent().width
        note = (
            "Thin lines: tiles without halos. Black frames: the regions that the running tile holds, with their halos."
        )
        text(52, 13, note, fontsize=9, color=TEXT, va="center")

    def _side(self, layer: Layer) -> float:
        return MAP * layer.rows / self.steps.layers[0].rows

    def _left(self, left: int, number: int) -> float:
        return left + 28 + number * (MAP + 10)

    def frame(self, moment: Moment, until: float) -> Image.Image:
        """Draw the state while an op of the step in tiles runs."""
        for artist in self.moving:
            artist.remove()
        self.moving = []
        original = next((run for run in self.steps.original if run.end >= until), None)
        self._maps(0, original)
        self._maps(400, moment)
        self._caption(0, self._original_caption(original))
        self._caption(400, self._tiled_caption(moment))
        runs = (self.steps.original, ORIGINAL), (self.steps.tiled, REWRITTEN)
        for axes, (run, color), peak in zip(self.curves, runs, self.peaks, strict=True):
            self._curve(axes, run, color, until, peak)
        buffer = io.BytesIO()
        self.canvas.print_png(buffer)
        return Image.open(buffer).convert("RGB")

    def _caption(self, left: int, caption: str) -> None:
        self.moving.append(self.axes.text(left + 24, 426, caption, fontsize=9.5, color=TEXT))

    def _original_caption(self, moment: Moment | None) -> str:
        if moment is None:
            return "finished"
        if moment.op.startswith("gradient_tape/"):
            return "backward: reads the saved feature maps, last layer first"
        return "forward: every feature map is saved for backward"

    def _tiled_caption(self, moment: Moment) -> str:
        grid = self.steps.grid
        if not moment.loop:
            if moment.begin > self.steps.tiled[-1].end / 2:
                return f"finished: {self.peaks[1] / self.peaks[0]:.2f} of the memory, {self.end:.1f} times as long"
            return "mean, dense layer, loss and their gradients run untiled"
        number = moment.tile[0] * grid + moment.tile[1] + 1
        if moment.loop.endswith("forward"):
            return f"forward, tile {number} of {grid * grid}: only its part of {self.steps.layers[-1].name} is saved"
        return f"backward, tile {number} of {grid * grid}: is recomputed, then its gradients"

    def _maps(self, left: int, moment: Moment | None) -> None:
        """Draw what is in memory of each feature map and gradient."""
        layers = self.steps.layers
        full: set[Place] = {(layers[0].name, False)}
        in_tile: dict[Place, Region] = {}
        written: list[Region] = []
        if moment is not None:
            full |= {place for name in moment.alive if (place := place_of(name, layers)) is not None}
            if moment.loop:
                places = {place for name in moment.in_tile if (place := place_of(name, layers)) is not None}
                keys = self.steps.regions
                in_tile = {p: keys[key] for p in places if (key := (moment.loop, moment.tile, *p)) in keys}
                if moment.loop.endswith("forward"):
                    written = [cell for tile, cell in self.steps.cells.items() if tile <= moment.tile]
                    if (layers[-1].name, False) not in in_tile:
                        written = written[:-1]
                    in_tile.pop((layers[-1].name, False), None)
            elif any(name.startswith("sft/") and "/forward/" in name for name in moment.alive):
                full.add((layers[-1].name, False))
        recomputes = moment is not None and moment.loop.endswith("backward")
        for (number, layer), is_gradient in itertools.product(enumerate(layers), (False, True)):
            if is_gradient and not number:
                continue
            side = self._side(layer)
            corner = (self._left(left, number), (261 if is_gradient else 337) + (MAP - side) / 2)
            place = layer.name, is_gradient
            color = GRADIENT if is_gradient else FORWARD
            self._add(corner, side, side, fc=color if place in full else EMPTY, ec=GRID, lw=0.8)
            if number == len(layers) - 1 and not is_gradient:
                for region in written:
                    self._tile(corner, side / layer.rows, layer.rows, region, FORWARD, lw=0)
            if left:
                for edge in (side * k / self.steps.grid for k in range(1, self.steps.grid)):
                    style = {"color": "white" if place in full else GRID, "lw": 0.7}
                    x, y = corner
                    self.moving += self.axes.plot([x + edge] * 2, [y, y + side], **style)
                    self.moving += self.axes.plot([x, x + side], [y + edge] * 2, **style)
            if place in in_tile:
                tile_color = RECOMPUTED if recomputes and not is_gradient and number else color
                self._tile(corner, side / layer.rows, layer.rows, in_tile[place], tile_color, lw=1.4)

    def _tile(
        self, corner: tuple[float, float], pixel: float, rows: int, region: Region, color: str, lw: float
    ) -> None:
        top, bottom, first, last = region
        place = (corner[0] + first * pixel, corner[1] + (rows - bottom) * pixel)
        self._add(place, (last - first) * pixel, (bottom - top) * pixel, fc=color, ec=TEXT if lw else "none", lw=lw)

    def _add(self, corner: tuple[float, float], width: float, height: float, **style: Any) -> None:
        self.moving.append(self.axes.add_patch(Rectangle(corner, width, height, **style)))

    def _curve(self, axes: Any, run: Sequence[Moment], color: str, until: float, peak: int) -> None:
        """Draw the bytes in use up to a time, and the peak once it has been reached."""
        shown = [moment for moment in run if moment.begin < until]
        if not shown:
            return
        places = [*(moment.begin for moment in shown), min(until, shown[-1].end)]
        values = [moment.num_bytes / 2**20 for moment in shown]
        values.append(values[-1])
        self.moving.append(axes.fill_between(places, values, step="post", color=color, alpha=0.25, lw=0))
        self.moving += axes.plot(places, values, drawstyle="steps-post", color=color, lw=1.3)
        worst = next((moment for moment in shown if moment.num_bytes == peak), None)
        if worst is None:
            return
        self.moving += axes.plot([worst.begin], [peak / 2**20], "o", color=color, ms=5)
        self.moving.append(axes.axhline(peak / 2**20, color=color, lw=0.9, ls=(0, (4, 3))))
        text = f"peak {peak / 2**20:.2f} MiB"
        weight = {"fontsize": 9.5, "fontweight": "bold", "color": color}
        self.moving.append(axes.text(self.end, 1.03 * peak / 2**20, text, ha="right", va="bottom", **weight))


def draw_animation(steps: Steps, path: Path) -> None:
    """Write the animation as a GIF with one palette for all frames."""
    drawing = Drawing(steps)
    shown = list(frames(steps))
    images = [drawing.frame(moment, until) for moment, until, _ in shown]
    quantized = [image.quantize(palette=_palette(), dither=Image.Dither.NONE) for image in images]
    first, *others = quantized
    first.save(path, save_all=True, append_images=others, duration=[ms for *_, ms in shown], loop=0, optimize=True)


def _palette() -> Image.Image:
    """Return an image with the palette: every colour in shades towards white."""
    colors = FORWARD, RECOMPUTED, GRADIENT, GRID, TEXT, SOFT, ORIGINAL, REWRITTEN
    pairs = [(EMPTY, 1.0), *itertools.product(colors, (blend / BLENDS for blend in range(1, BLENDS + 1)))]
    shades = [round(255 + (int(color[at : at + 2], 16) - 255) * part) for color, part in pairs for at in (1, 3, 5)]
    palette = Image.new("P", (1, 1))
    palette.putpalette([255, 255, 255, *shades])
    return palette
