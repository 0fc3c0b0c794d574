"""Draws the pictures of docs/explanation/how-it-works.md, docs/reference/reports.md, docs/how-to/several-devices.md and CONTRIBUTING.md.

    python docs/pictures/make.py [FOLDER]

The pictures show real graphs and plans at nominal rates. They come out the same on every CPU with the same kernels
(with or without oneDNN), except the measurements in plan.png.
"""

from __future__ import annotations

import os
import sys

os.environ["TFLMS_SFT_RATES"] = "nominal"

from pathlib import Path
from typing import Any

import architecture
import keras
import tensorflow as tf
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

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
from tflms_sft._report.schedule_chart import draw_schedule

FOLDER = Path(*sys.argv[1:] or [__file__, ".."]).resolve()
FORWARD, BACKWARD, WAITS, PLAIN = "#1d5fd1", "#b35fb5", "#c62828", "#8b909a"
LOOPS = ("#e8effb", "#f6eaf6")


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
        (1.02, 2.06, LOOPS[1], (2.1, floor), "backward loop, which\ncomputes the forward\npart again, by tiles"),
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
                arrow(axes, image, boxes[node], FORWARD if forward else WAITS, not forward, 0 if forward else -0.08)
            elif tensor.node in at:
                across = at[tensor.node][0] == 0 and not forward
                color = WAITS if across else FORWARD if forward else BACKWARD
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
        (WAITS, "--", "waits for the backward pass: this is the memory"),
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
                text = f"[{lo[0]},{hi[0]})"
        axes.text(6, -0.5, f"{name}\n{height}x{width}, rows {text}", ha="center", va="bottom", fontsize=9.5)
        axes.set_xlim(-0.15, 12.15)
        axes.set_ylim(12.15, -1.9)
        axes.set_aspect("equal")
        axes.axis("off")
    figure.supxlabel(
        "Grey lines: 3x3 tiles without halos. Yellow and blue: what the first tile and the one in the middle read of "
        "the image, and compute.\nWhere both lie, both compute it.",
        fontsize=9,
    )
    save(figure, "tiles.png")


# Memory -------------------------------------------------------------------------------------------------------------


def draw_memory() -> None:
    """Draw the memory of a network of six convolutions, plain and within a budget."""
    image = x = keras.Input((768, 768, 3), batch_size=1, name="image")
    for block, filters in enumerate((32, 64, 128), 1):
        for part in "ab":
            x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu", name=f"conv{block}{part}")(x)
        x = keras.layers.MaxPool2D(name=f"pool{block}")(x)
    x = keras.layers.GlobalAveragePooling2D(name="mean")(x)
    model = keras.Model(image, keras.layers.Dense(8, name="classes")(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    specs = tf.TensorSpec((1, 768, 768, 3)), tf.TensorSpec((1,), tf.int32)
    plan = tflms_sft.rewrite(step, tflms_sft.AutoParams("300MiB"), *specs).plan
    print(plan.headline())
    save(plan.plot(), "memory.png")


def draw_measured() -> None:
    """Draw predicted and measured memory of six convolutions on an image of 256 x 256 pixels."""
    layers: list[Any] = [keras.Input((256, 256, 3), batch_size=1)]
    for number, filters in enumerate((16, 16, 32, 32, 64, 64)):
        name = f"conv{number // 2 + 1}{'ab'[number % 2]}"
        layers.append(keras.layers.Conv2D(filters, 3, padding="same", activation="relu", name=name))
        if number % 2:
            layers.append(keras.layers.MaxPool2D(2, name=f"pool{number // 2 + 1}"))
    model = keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    batch = tf.random.stateless_normal((1, 256, 256, 3), (1, 2)), tf.zeros(1, tf.int32)
    step = tf.function(lambda images, labels: model.train_step((images, labels))["loss"], autograph=False)
    original = tflms_sft.rewrite(step, tflms_sft.AutoParams("1TiB"), *batch).plan.original
    budget = f"{0.85 * original.peak_bytes / 2**20:.0f}MiB"  # Kernels without oneDNN need more.
    rewritten = tflms_sft.rewrite(step, tflms_sft.AutoParams(budget), *batch)
    print(rewritten.plan.headline())
    before, after = (tflms_sft.measure(function, *batch, timelines=True) for function in (step, rewritten))
    save(rewritten.plan.plot(None, before, after), "plan.png", dpi=80)


# Schedules ----------------------------------------------------------------------------------------------------------

SCHEDULES = (("basic", 2), ("gpipe", 4), ("1f1b", 4), ("mast", 2), ("master", 4))
"""With numbers of micro-batches."""


def draw_schedules() -> None:
    """Draw schedules of four equal stages: backward takes twice as long as forward, a micro-batch holds 1 GiB."""
    for name, micro_batches in SCHEDULES:
        times = [0.04] * 4, [0.08] * 4
        simulation = simulate(make(name, 4, micro_batches), *times, activations=[2**30] * 4)
        save(draw_schedule(simulation), f"schedule-{name}.png")


def save(figure: Any, name: str, dpi: int = 110) -> None:
    """Write a picture that is small enough for a page."""
    figure.savefig(FOLDER / name, dpi=dpi, pil_kwargs={"optimize": True})
    print(name, os.path.getsize(FOLDER / name) // 1000, "kB")


if __name__ == "__main__":
    small = traced_small()
    draw_graph(*small)
    draw_tiles(*small)
    draw_memory()
    draw_measured()
    draw_schedules()
    print(architecture.draw(FOLDER).name)
