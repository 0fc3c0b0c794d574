"""Draws the pictures of the documentation.

    python docs/pictures/make.py [FOLDER]

The pictures show real graphs and plans at nominal rates. They come out the same on every CPU with the same kernels
(with or without oneDNN), except the measurements in plan.png.
"""

from __future__ import annotations

import io
import itertools
import os
import sys

os.environ["TFLMS_SFT_RATES"] = "nominal"

from pathlib import Path
from typing import Any

import architecture
import keras
import tensorflow as tf
import tiles_animation
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image
from step_trace import Moment, step_trace

import tflms_sft
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.emission import tile_pass
from rewriters.ir.graph import Node
from rewriters.pipelining.schedule_simulator import simulate
from rewriters.pipelining.schedules import make
from rewriters.rules.intervals import partition
from rewriters.tiling import ft_segments
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid
from tflms_sft._planner.budget_search import plans_within_budget
from tflms_sft._planner.curve_points import budgets_between, curve_points
from tflms_sft._planner.requested_tiles import plan_sft
from tflms_sft._report.budget_curve import BudgetCurve
from tflms_sft._search.traced_step import TracedStep, analyse_step
from tflms_sft._report.schedule_chart import draw_schedule
from tflms_sft._trace.step_tracing import trace_step
from tflms_sft._util.byte_sizes import parse_bytes

FOLDER = Path(*sys.argv[1:] or [__file__, ".."]).resolve()
FORWARD, BACKWARD, SAVED, ORIGINAL = "#1d5fd1", "#b35fb5", "#c62828", "#7a808b"
LOOPS = ("#e8effb", "#f6eaf6")
BUDGET = "300MiB"
CURVE_BUDGETS = 9


def traced_model(model: keras.Model, optimizer: str) -> TracedStep:
    """Return the traced training step of a classifier of images."""
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda images, labels: model.train_step((images, labels)), autograph=False)
    specs = tf.TensorSpec(model.inputs[0].shape), tf.TensorSpec((1,), tf.int32)
    return analyse_step(*trace_step(step, specs, {}), 1)


def traced_small() -> tuple[GraphAnalysis, Segment]:
    """Return the analysis of the page's network, and its segment."""
    image = keras.Input((12, 12, 3), batch_size=1, name="image")
    x = keras.layers.Conv2D(4, 3, padding="same", activation="relu", name="a")(image)
    x = keras.layers.Conv2D(4, 3, padding="same", activation="relu", name="b")(x)
    x = keras.layers.MaxPool2D(2, name="pool")(x)
    model = keras.Model(image, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling2D()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    specs = (tf.TensorSpec((1, 12, 12, 3)), tf.TensorSpec((1,), tf.int32))
    analysis = GraphAnalysis(canonicalize.read_canonical(tf.function(model.train_step).get_concrete_function(specs)))
    (segment,), _ = ft_segments.auto_segments(analysis, None, 1, {})
    return analysis, segment


# The graph ----------------------------------------------------------------------------------------------------------


def places(segment: Segment) -> dict[Node, tuple[float, float]]:
    """Return positions: forward ops from top to bottom, and each backward op beside the op that it differentiates."""
    found = {node: (0.0, -float(row)) for row, node in enumerate(segment.forward)}
    rows = {node.name.split("/", 1)[1]: place[1] for node, place in found.items()}
    for node in segment.backward:
        # `gradient_tape/model/layer/op/OpGrad` is beside `model/layer/op`; a ReluGrad has its layer's name alone.
        name = node.name.removeprefix("gradient_tape/").split("/", 1)[1]
        layer = name.split("/")[0]
        kind = {"ReluGrad": "Relu", "BiasAddGrad": "BiasAdd", "MaxPoolGrad": "MaxPool2d"}.get(node.op, "convolution")
        row = next(row for key, row in rows.items() if key.split("/")[0] == layer and key.split("/")[-1] == kind)
        found[node] = (2.6 if node.op.endswith(("Filter", "BiasAddGrad")) else 1.5, row)
    return found


def draw_graph(analysis: GraphAnalysis, segment: Segment) -> None:
    """Draw the forward and the backward part of the segment, and the tensors saved for the backward pass."""
    figure = Figure(figsize=(9.2, 6.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(-0.6, 3.7)
    axes.set_ylim(-len(segment.forward) - 1.75, 1.3)
    axes.axis("off")
    at = places(segment)
    (entry,), (leaving,) = segment.entries, segment.exits
    bottom = 0.75, -len(segment.forward) - 0.25
    floor = 0.45 - len(segment.forward)
    for x, width, color, begin, text in (
        (-0.45, 0.9, LOOPS[0], (-0.45, 0.62), "forward loop"),
        (1.02, 2.06, LOOPS[1], (2.1, floor), "backward loop, which first\nrecomputes the forward\npart of each tile"),
    ):
        box = (x, 0.4 - len(segment.forward)), width, len(segment.forward) + 0.15
        axes.add_patch(FancyBboxPatch(*box, boxstyle="round,pad=0.04", fc=color, ec="none", zorder=0))
        axes.text(*begin, text, ha="left", va="bottom", fontsize=8.5, color="#444")

    boxes = {}
    for node, place in at.items():
        shape = node.outputs[0][1]
        size = "" if place[0] > 2 or shape is None else "  " + "x".join(map(str, shape[1:]))
        name = node.op.replace("Conv2DBackprop", "Backprop")
        boxes[node] = label(axes, place, name + size, FORWARD if place[0] == 0 else BACKWARD)
    image = label(axes, (0.22, 1.05), "image  " + "x".join(map(str, entry.shape[1:])), "#222")
    head = label(axes, bottom, "mean, dense, loss, and their gradients", "#222")

    for node, (x, y) in at.items():
        forward = x == 0
        for tensor in dict.fromkeys(node.inputs):
            if tensor == entry:
                arrow(axes, image, boxes[node], FORWARD if forward else SAVED, not forward, 0 if forward else -0.08)
            elif tensor.node in at:
                across = at[tensor.node][0] == 0 and not forward
                color = SAVED if across else FORWARD if forward else BACKWARD
                arrow(axes, boxes[tensor.node], boxes[node], color, across)
            elif tensor in segment.grad_entries:
                arrow(axes, head, boxes[node], BACKWARD, False)
        if x > 2:
            what = {"BiasAddGrad": "db", "Conv2DBackpropFilter": "dW"}[node.op]
            text = axes.text(3.2, y, f"{what} of {node.name.split('/')[2].split('_')[0]}", va="center", fontsize=8.5)
            arrow(axes, boxes[node], text, "#222", False)
    arrow(axes, boxes[leaving.node], head, FORWARD, False)
    meanings = (
        (FORWARD, "-", "forward"),
        (BACKWARD, "-", "backward"),
        (SAVED, "--", "saved for the backward pass: most of the memory of training"),
    )
    for row, (color, dashes, text) in enumerate(meanings):
        y = bottom[1] - 0.6 - 0.36 * row
        axes.plot([-0.45, -0.2], [y, y], color=color, ls=dashes, lw=1.5)
        axes.text(-0.14, y, text, va="center", fontsize=8.5)
    save(figure, "graph.png")


def arrow(axes: Any, begin: Any, end: Any, color: str, dashed: bool, bend: float = 0) -> None:
    """Draw an arrow from one box to the border of another."""
    style = {"arrowstyle": "-|>", "color": color, "lw": 1.3, "ls": "--" if dashed else "-"}
    style |= {"patchA": begin.get_bbox_patch(), "patchB": end.get_bbox_patch(), "shrinkA": 1, "shrinkB": 2}
    axes.annotate(
        "", end.get_position(), begin.get_position(), arrowprops={**style, "connectionstyle": f"arc3,rad={bend}"}
    )


def label(axes: Any, place: tuple[float, float], text: str, color: str) -> Any:
    """Draw a box with the name of an op and the shape of its output."""
    box = {"boxstyle": "round,pad=0.3", "fc": "white", "ec": color, "lw": 1.2}
    return axes.text(*place, text, ha="center", va="center", fontsize=8.5, bbox=box, zorder=3)


# Tiles --------------------------------------------------------------------------------------------------------------


def draw_tiles(analysis: GraphAnalysis, segment: Segment) -> None:
    """Draw the region of every tensor that one tile of the exit needs."""
    grid = Grid(1, (3, 3))
    tile_loop = tile_pass.plan_segment(analysis, segment, grid).loops[0]
    (entry,), (leaving,) = segment.entries, segment.exits
    relus = [node.out() for node in segment.forward if node.op == "Relu"]
    shown = [(entry, "image (entry)"), *zip(relus, ("a", "b"), strict=True), (leaving, "pool (exit)")]
    figure = Figure(figsize=(10.4, 3.7), layout="constrained")
    for column, (tensor, name) in enumerate(shown):
        axes = figure.add_subplot(1, len(shown), column + 1)
        height, width = tensor.shape[1:3]
        scale = 12 / height
        own = [round(number * height / 3) for number in range(4)]
        for row in range(height + 1):
            axes.plot([0, width * scale], [row * scale] * 2, color="#e3e5e8", lw=0.6, zorder=0)
            axes.plot([row * scale] * 2, [0, height * scale], color="#e3e5e8", lw=0.6, zorder=0)
        for edge in own:
            axes.plot([0, width * scale], [edge * scale] * 2, color="#8b909a", lw=1.1, zorder=2)
            axes.plot([edge * scale] * 2, [0, height * scale], color="#8b909a", lw=1.1, zorder=2)
        for tile, color in ((0, "#f2b134"), (1, FORWARD)):
            cells = partition(height, 3), partition(width, 3)
            rows, columns = cells if tensor == leaving else tile_loop.regions[tensor]
            lo, hi = (int(rows.lo[tile]), int(columns.lo[tile])), (int(rows.hi[tile]), int(columns.hi[tile]))
            corner, size = (lo[1] * scale, lo[0] * scale), ((hi[1] - lo[1]) * scale, (hi[0] - lo[0]) * scale)
            axes.add_patch(Rectangle(corner, *size, fc=color, alpha=0.32, ec="none", zorder=1))
            axes.add_patch(Rectangle(corner, *size, fill=False, ec=color, lw=2, zorder=3))
            if tile:
                text = f"blue: rows {lo[0]} to {hi[0] - 1}"
        axes.text(6, -0.5, f"{name}, {height} x {width}\n{text}", ha="center", va="bottom", fontsize=9.5)
        axes.set_xlim(-0.15, 12.15)
        axes.set_ylim(12.15, -1.9)
        axes.set_aspect("equal")
        axes.axis("off")
    figure.supxlabel(
        "Grey lines: 3 x 3 tiles without halos. Yellow and blue: the regions of the first and of the middle tile. "
        "A loop reads the region of the image\nand computes the regions of the layers. The pixels where both regions "
        "lie, the halo, are computed twice.",
        fontsize=9,
    )
    save(figure, "tiles.png")


# Memory -------------------------------------------------------------------------------------------------------------


def draw_memory() -> None:
    """Draw the memory of a network of six convolutions over a step, original and within a budget."""
    image = x = keras.Input((768, 768, 3), batch_size=1, name="image")
    for block, filters in enumerate((32, 64, 128), 1):
        for part in "ab":
            x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu", name=f"conv{block}{part}")(x)
        x = keras.layers.MaxPool2D(name=f"pool{block}")(x)
    x = keras.layers.GlobalAveragePooling2D(name="mean")(x)
    traced = traced_model(keras.Model(image, keras.layers.Dense(8, name="classes")(x)), "adam")
    params = tflms_sft.AutoParams(BUDGET, swap=False)
    plans = next(plans_within_budget(traced, params.resolved(traced.fixed_bytes))).plans
    draw_before_after(step_trace(traced), step_trace(traced, plans))


def draw_before_after(original: list[Moment], rewritten: list[Moment]) -> None:
    """Draw the bytes in use over a step before and after rewriting, with the budget."""
    budget = parse_bytes(BUDGET, "budget") / 2**20
    figure = Figure(figsize=(8.2, 4.1), layout="constrained")
    axes = figure.add_subplot()
    peaks = []
    for moments, color in ((original, ORIGINAL), (rewritten, FORWARD)):
        places = [moment.begin for moment in moments] + [moments[-1].end]
        values = [moment.num_bytes / 2**20 for moment in moments]
        axes.fill_between(places, [*values, values[-1]], step="post", color=color, alpha=0.22, lw=0)
        axes.plot(places, [*values, values[-1]], drawstyle="steps-post", color=color, lw=1.3)
        peaks.append(max(values))
        axes.plot(places[values.index(peaks[-1])], peaks[-1], "o", color=color, ms=5)
    end = rewritten[-1].end
    axes.axhline(budget, color=SAVED, ls="--", lw=1.5)
    bold = {"fontweight": "bold", "fontsize": 11}
    right = end + 0.12  # Room for the label of the budget.
    axes.text(right, budget + 6, f"budget {budget:.0f} MiB", color=SAVED, ha="right", va="bottom", **bold)
    axes.text(0.44, peaks[0] + 8, f"original training: peak {peaks[0]:.0f} MiB", color="#555b66", ha="center", **bold)
    inside = {"fc": "white", "ec": "none", "alpha": 0.8, "pad": 2}
    text = f'MemoryBudget("{BUDGET}"): peak {peaks[1]:.0f} MiB, {end:.2f} times as long'
    axes.text(0.5 * end, 40, text, color=FORWARD, ha="center", bbox=inside, **bold)
    axes.set_title("Memory over one training step", loc="left", fontweight="bold")
    axes.set_xlabel("predicted time (original step = 1); each tooth of the blue line is a tile")
    axes.set_ylabel("memory in use (MiB)")
    axes.set_xlim(0, right)
    axes.set_ylim(0, 1.12 * peaks[0])
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "memory.png")


def draw_measured() -> None:
    """Draw predicted and measured memory of six convolutions on an image of 512 x 512 pixels."""
    layers: list[Any] = [keras.Input((512, 512, 3), batch_size=1, name="image")]
    for number, filters in enumerate((16, 16, 32, 32, 64, 64)):
        name = f"conv{number // 2 + 1}{'ab'[number % 2]}"
        layers.append(keras.layers.Conv2D(filters, 3, padding="same", activation="relu", name=name))
        if number % 2:
            layers.append(keras.layers.MaxPool2D(2, name=f"pool{number // 2 + 1}"))
    model = keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    batch = tf.random.stateless_normal((1, 512, 512, 3), (1, 2)), tf.zeros(1, tf.int32)
    step = tf.function(lambda images, labels: model.train_step((images, labels))["loss"], autograph=False)
    original = tflms_sft.rewrite(step, tflms_sft.AutoParams("1TiB"), *batch).plan.original
    budget = f"{0.65 * original.peak_bytes / 2**20:.0f}MiB"  # Kernels without oneDNN need more.
    rewritten = tflms_sft.rewrite(step, tflms_sft.AutoParams(budget), *batch)
    print(rewritten.plan.headline())
    before, after = (tflms_sft.measure(function, *batch, timelines=True) for function in (step, rewritten))
    most = max(after.peak_bytes, after.timelines[0].peak_bytes)
    assert most <= parse_bytes(budget, "budget"), f"measured peak {most} above the budget {budget}"
    save(rewritten.plan.plot(None, before, after), "plan.png")


# The animation ------------------------------------------------------------------------------------------------------

TILES, ROWS, FILTERS = 3, 72, 16
"""Tiles along each axis, rows and columns of the image, and filters of the animated network."""


def animated_steps() -> tiles_animation.Steps:
    """Return the training step of three convolutions and a pool, original and in tiles."""
    image = x = keras.Input((ROWS, ROWS, 3), batch_size=1, name="image")
    for name in ("conv1", "conv2", "conv3"):
        x = keras.layers.Conv2D(FILTERS, 3, padding="same", activation="relu", name=name)(x)
    x = keras.layers.GlobalAveragePooling2D(name="mean")(keras.layers.MaxPool2D(2, name="pool")(x))
    traced = traced_model(keras.Model(image, keras.layers.Dense(2, name="dense")(x)), "sgd")
    plans, _ = plan_sft(traced, tflms_sft.SFTParams((TILES, TILES)))
    (plan,) = plans
    layers = [tiles_animation.Layer(name, ROWS) for name in ("image", "conv1", "conv2", "conv3")]
    layers.append(tiles_animation.Layer("pool", ROWS // 2))
    regions: dict[tuple[str, tuple[int, ...], str, bool], tiles_animation.Region] = {}
    for tile_loop in plan.loops:
        for tensor, region in tile_loop.regions.items():
            is_image = tensor in plan.segment.entries
            place = ("image", False) if is_image else tiles_animation.place_of(tensor.name, layers)
            if place is not None:
                for tile in itertools.product(range(TILES), repeat=2):
                    key = (f"{plan.segment.name}/{tile_loop.name}", tile, *place)
                    regions[key] = hull(regions.get(key), region, tile)
    borders = [partition(ROWS // 2, TILES)] * 2
    cells = {tile: hull(None, borders, tile) for tile in itertools.product(range(TILES), repeat=2)}
    traces = step_trace(traced), step_trace(traced, plans)
    return tiles_animation.Steps(tuple(layers), TILES, *traces, regions, cells)


def hull(known: Any, region: Any, tile: tuple[int, ...]) -> tiles_animation.Region:
    """Return the smallest region that contains a known one and that of a tile."""
    rows, columns = ((int(axis.lo[index]), int(axis.hi[index])) for axis, index in zip(region, tile, strict=True))
    top, bottom, first, last = known or (*rows, *columns)
    return min(top, rows[0]), max(bottom, rows[1]), min(first, columns[0]), max(last, columns[1])


# Schedules ----------------------------------------------------------------------------------------------------------

SCHEDULES = (("basic", 2), ("gpipe", 4), ("1f1b", 4), ("mast", 2), ("master", 4))
"""With numbers of micro-batches."""


def draw_curve() -> None:
    """Draw the time of a step of ResNet-50 against its memory budget."""
    model = keras.applications.ResNet50(weights=None, include_top=False, pooling="avg", input_shape=(512, 512, 3))
    traced = traced_model(model, "sgd")
    params = tflms_sft.AutoParams("1TiB")
    points = [*curve_points(traced, params, budgets_between(traced, params, CURVE_BUDGETS))]
    save(BudgetCurve(traced.plain.peak.peak_bytes, params.headroom, points[::-1]).plot(), "curve.png")


def draw_schedules() -> None:
    """Draw schedules of four equal stages: backward takes twice as long as forward, a micro-batch holds 1 GiB."""
    for name, micro_batches in SCHEDULES:
        times = [0.04] * 4, [0.08] * 4
        simulation = simulate(make(name, 4, micro_batches), *times, activations=[2**30] * 4)
        save(draw_schedule(simulation), f"schedule-{name}.png")


def save(figure: Any, name: str, dpi: int = 110) -> None:
    """Write a picture with a palette of 256 colours, which is small enough for a page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    picture = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    picture.save(FOLDER / name, optimize=True)
    print(name, os.path.getsize(FOLDER / name) // 1000, "kB")


if __name__ == "__main__":
    small = traced_small()
    draw_graph(*small)
    draw_tiles(*small)
    draw_memory()
    draw_measured()
    draw_curve()
    draw_schedules()
    tiles_animation.draw_animation(animated_steps(), FOLDER / "tiles.gif")
    print(architecture.draw(FOLDER).name)
