"""Coverage of Keras layers and of networks of `keras.applications`; writes `docs/reference/supported.md`.

    python -m benchmarks.coverage [--networks NAME ...] [--layers NAME ...] [--results FILE] [--output FILE]

Only the named layers and networks are examined, by default all; the results file keeps the others.

- **Layers.** Each layer stands between two convolutions in a network of its own. The network is rewritten with tiles
  and trains for two steps from the same start as the original one, in float64 if TensorFlow has kernels for it.
- **Networks.** One float64 step with normalisation in training mode is compared in the same way. Peaks of a float32
  step are measured, plain and with a budget for tiles alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _coverage_layers, _nets

MIB = 2**20
SIZES = {1: (23,), 2: (13, 12), 3: (9, 8, 7)}
GRIDS = {1: (4,), 2: (3, 2), 3: (2, 2, 2)}
NETWORKS = (
    "VGG16 VGG19 ResNet50 ResNet101 ResNet50V2 DenseNet121 MobileNet MobileNetV2 MobileNetV3Small MobileNetV3Large "
    "EfficientNetB0 EfficientNetV2B0 InceptionV3 InceptionResNetV2 Xception NASNetMobile ConvNeXtTiny"
).split()
COMPARED_SIZE, MEASURED_SIZE, MEASURED_BATCH = 96, 224, 4
BUDGET_FRACTIONS = (0.5, 0.6, 0.75)
MAX_LOOPS_WITHOUT_BARRIER = 2
"""Loops of a segment without barriers: forward and backward."""
REASONS_OF_OTHER_OPS = ("the backward pass reads no tensor inside of it", "a tiled segment would save as many bytes")
"""Reasons for which ops other than the layer's are not rewritten."""
TILED, WITH_BARRIER, NOT_REWRITTEN = "tiled", "tiled, with a barrier", "not rewritten: "
ENDS_SEGMENT = "ends a segment: a reduction over the image"

# ----------------------------------------------------------------------------------------------------------
# In the children.


def _difference(model: Any, batches: Sequence[Any], step: Callable[..., Any], fast: Callable[..., Any]) -> float:
    """Return the largest relative difference of losses and variables (weights, statistics, slots) after the steps."""
    import numpy as np

    from tflms_sft._verify.differences import difference

    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    start = [np.array(variable) for variable in variables]
    results = []
    for function in (step, fast):
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        losses = [np.array(function(*batch)) for batch in batches]
        results.append([*losses, *(np.array(variable) for variable in variables)])
    return max(difference(got, want) for want, got in zip(*results, strict=True))


def _step_of(model: Any) -> Any:
    import keras
    import tensorflow as tf

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return tf.function(lambda images, labels: model.train_step((images, labels))["loss"], autograph=False)


def examine_layer(*, layer: str, use: int, floatx: str, emit: _child.Emit) -> dict[str, Any]:
    """Rewrite the network around one layer; return numbers of loops and segments, reasons and the difference."""
    del emit
    import keras
    import numpy as np
    import tensorflow as tf

    import tflms_sft
    from benchmarks._longest_segments import longest_segments

    keras.config.set_floatx(floatx)
    keras.utils.set_random_seed(0)
    _, rank, function = _coverage_layers.uses()[layer][use]
    conv = getattr(keras.layers, f"Conv{rank}D")
    image = keras.Input((*SIZES[rank], 2), batch_size=3)
    before = keras.layers.ReLU(name="before")(conv(4, 3, padding="same")(image))
    after = function(before)
    x = after
    if len(x.shape) == rank + 2:
        x = keras.layers.ReLU()(conv(5, 3, padding="same", name="after")(x))
    classes = keras.layers.Dense(3, name="classes")(keras.layers.Flatten(name="flattened")(x))
    model = keras.Model(image, classes)
    step = _step_of(model)
    noise = np.random.RandomState(0)
    batches = [(noise.normal(size=(3, *SIZES[rank], 2)).astype(floatx), np.arange(3)) for _ in range(2)]
    with longest_segments():
        fast = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=GRIDS[rank]), *map(tf.constant, batches[0]))
    # The last layers of all these networks flatten the image, which ends the segment.
    reasons = [why for where, why in fast.plan.left_alone if "flattened" not in where and "'classes'" not in where]
    return {
        "loops": sum(segment.num_loops for segment in fast.plan.segments),
        "segments": len(fast.plan.segments),
        "reasons": reasons,
        "difference": _difference(model, batches, step, fast),
    }


def compare_network(*, network: str, emit: _child.Emit) -> dict[str, Any]:
    """Compare one float64 step in which all ops that can run in tiles do so."""
    del emit
    import keras
    import numpy as np
    import tensorflow as tf

    import tflms_sft

    keras.config.set_floatx("float64")
    model = _nets.application(network, COMPARED_SIZE)
    step = _step_of(model)
    images = np.random.RandomState(0).normal(size=(2, COMPARED_SIZE, COMPARED_SIZE, 3))
    batch = (tf.constant(images), tf.constant([1, 2]))
    fast = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=(3, 2)), *batch)
    return {
        "loops": sum(segment.num_loops for segment in fast.plan.segments),
        "segments": len(fast.plan.segments),
        "reasons": sorted({why for _, why in fast.plan.left_alone}),
        "difference": _difference(model, [batch], step, fast),
    }


def measure_network(*, network: str, fraction: float | None, emit: _child.Emit) -> dict[str, Any]:
    """Measure the peak of a float32 step without weights and momenta: plain, or within a fraction of the plain peak."""
    del emit
    import numpy as np
    import tensorflow as tf

    import tflms_sft

    model = _nets.application(network, MEASURED_SIZE)
    step = _step_of(model)
    shape = (MEASURED_BATCH, MEASURED_SIZE, MEASURED_SIZE, 3)
    batch = (
        tf.constant(np.random.RandomState(0).normal(size=shape), tf.float32),
        tf.constant(np.arange(MEASURED_BATCH)),
    )
    plain = tflms_sft.rewrite(step, tflms_sft.AutoParams("1TiB"), *batch).plan.original
    fixed = plain.fixed_bytes
    if fraction is None:
        peak, time_ratio = tflms_sft.measure(step, *batch), 1.0
    else:
        budget = int(fixed + fraction * (plain.peak_bytes - fixed))
        try:
            fast = tflms_sft.rewrite(step, tflms_sft.AutoParams(budget, swap=False), *batch)
        except tflms_sft.BudgetError as error:
            return {"refused": str(error)}
        peak, time_ratio = tflms_sft.measure(fast, *batch), fast.plan.predicted.time_ratio
    return {"peak": peak.peak_bytes - fixed, "source": peak.source, "cost": time_ratio}


def search_network(*, network: str, emit: _child.Emit) -> float:
    """Return the seconds of a search for a plan within half of the plain peak, or until it raises `BudgetError`."""
    del emit
    import tensorflow as tf

    import tflms_sft
    from tflms_sft._machine.calibration import machine_rates
    from tflms_sft._planner.budget_search import plans_within_budget
    from tflms_sft._search.traced_step import analyse_step, collector_paused

    step = _step_of(_nets.application(network, MEASURED_SIZE))
    shape = (MEASURED_BATCH, MEASURED_SIZE, MEASURED_SIZE, 3)
    concrete = step.get_concrete_function(tf.TensorSpec(shape), tf.TensorSpec(shape[:1], tf.int64))
    with collector_paused():
        traced = analyse_step(concrete)
        traced.use_rates(machine_rates())
        budget = traced.plain.peak.peak_bytes // 2
        begin = time.perf_counter()
        with contextlib.suppress(tflms_sft.BudgetError):
            next(plans_within_budget(traced, tflms_sft.AutoParams(budget)))
        return time.perf_counter() - begin


# ----------------------------------------------------------------------------------------------------------
# In the parent.


def outcome_of(figures: dict[str, Any]) -> str:
    """Return the outcome as text: tiled, with reductions over the image, or not rewritten, with the reason."""
    reasons = dict.fromkeys(figures["reasons"])
    reductions = [reason for reason in reasons if "everything after it waits" in reason]
    of_other_ops = [reason for reason in reasons if any(text in reason for text in REASONS_OF_OTHER_OPS)]
    of_layer = [reason for reason in reasons if reason not in reductions and reason not in of_other_ops]
    if of_layer:
        return NOT_REWRITTEN + "; ".join(of_layer)
    if reductions:
        return ENDS_SEGMENT
    if not figures["segments"]:
        return NOT_REWRITTEN + "; ".join(reasons)
    return TILED if figures["loops"] <= MAX_LOOPS_WITHOUT_BARRIER else f"{WITH_BARRIER} ({figures['loops']} loops)"


def layer_rows(name: str) -> list[list[str]]:
    """Return the lines of a layer in the table, one for each use."""
    lines = []
    for number, (use, rank, _) in enumerate(_coverage_layers.uses()[name]):
        title = f"`{name}`" + (f", {use}" if use else "")
        title += "" if name.endswith("D") or rank == 2 else f" ({rank}-D)"
        for floatx in ("float64", "float32"):
            outcome = _child.run_child(
                "benchmarks.coverage:examine_layer",
                {"layer": name, "use": number, "floatx": floatx},
                env={"TF_ENABLE_ONEDNN_OPTS": "0"},
            )
            if outcome.ok:
                break
        if outcome.ok:
            difference = f"{outcome.result['difference']:.0e}" + ("" if floatx == "float64" else " (float32)")
            lines.append([title, outcome_of(outcome.result), difference])
        else:
            lines.append([title, f"does not run: {outcome.how_it_ended()}", ""])
        print(" | ".join(lines[-1]), flush=True)
    return lines


def network_row(name: str) -> list[str]:
    """Return the line of a network in the table."""
    compared = _child.call_in_child(
        "benchmarks.coverage:compare_network", {"network": name}, env={"TF_ENABLE_ONEDNN_OPTS": "0"}
    )
    target = "benchmarks.coverage:measure_network"
    plain = _child.call_in_child(target, {"network": name, "fraction": None})
    memory = "no plan with tiles alone in " + f"{BUDGET_FRACTIONS[-1]:.0%} of it"
    for fraction in BUDGET_FRACTIONS:
        tiled = _child.call_in_child(target, {"network": name, "fraction": fraction})
        if "refused" not in tiled:
            memory = f"{tiled['peak'] / MIB:.0f} MiB, {tiled['peak'] / plain['peak']:.2f} of plain"
            memory += f", {tiled['cost']:.2f}x work"
            break
    reasons = "; ".join(reason for reason in compared["reasons"] if "everything after it waits" not in reason)
    tiles = f"{compared['loops']} loops in {compared['segments']} segment(s)"
    line = [f"`{name}`", tiles, reasons or "nothing", f"{compared['difference']:.0e}"]
    line += [f"{plain['peak'] / MIB:.0f} MiB", memory]
    line.append(f"{_child.call_in_child('benchmarks.coverage:search_network', {'network': name}):.0f} s")
    print(" | ".join(line), flush=True)
    return line


PAGE = """# Supported layers and networks

Written by `python -m benchmarks.coverage`, with Keras {keras} and TensorFlow {tensorflow} on a CPU. The compiler has a
rule for each op, and knows no layers and no networks.

## Networks

Networks of `keras.applications` with untrained weights and normalisation in training mode. Columns:

- **tiled**: one float64 step with two images of {compared} x {compared} pixels in 3 x 2 tiles. Loss, weights, moving
  statistics and momenta after it differ from those of plain training by at most {network_difference} of the largest
  number of each.
- **plain peak**, **peak with tiles**: measured, of a float32 step with {batch} images of {measured} x {measured},
  without weights and momenta. The budget for tiles alone is half of the plain peak, or 0.6 or 0.75 where no plan fits
  half.
- **search**: time on two cores until the planner finds tiles, swaps or both for half of the plain peak, weights and
  momenta included, or raises `BudgetError`.

{networks}

{not_rewritten}

## Layers

Each layer stands between two convolutions in a network that ends in `Flatten` and `Dense`, and trains for two steps on
three images of odd sizes. Differences from plain training are at most {difference_64} in float64, and {difference_32}
in float32 (resizing other than nearest, and layers without float64 kernels on a CPU).

{tiled}

{barriers}

{ends}

**Not rewritten**:

{untiled}

## Layers that are not for images

{others}
"""

IN_FLOAT32 = ("(float32)", "bilinear", "bicubic")
"""Texts in the lines of layers that compute in float32, although the images are float64."""


def page(networks: list[list[str]], layers: list[list[str]], versions: dict[str, str]) -> str:
    """Return the text of the page."""
    others = [
        _filled(f"- {why}: " + ", ".join(f"`{name}`" for name in names.split()), "  ")
        for why, names in _coverage_layers.NOT_FOR_IMAGES.items()
    ]
    in_float32 = [line for line in layers if any(part in " ".join(line) for part in IN_FLOAT32)]
    in_float64 = [line for line in layers if line not in in_float32]
    reasons = [reason for _, reason, _ in layers if reason.startswith(NOT_REWRITTEN)]
    return PAGE.format(
        **versions,
        compared=COMPARED_SIZE,
        measured=MEASURED_SIZE,
        batch=MEASURED_BATCH,
        network_difference=_largest(line[3] for line in networks),
        networks=_table(
            ["network", "tiled", "plain peak", "peak with tiles", "search"],
            [[*line[:2], *line[4:]] for line in networks],
        ),
        not_rewritten=_filled(
            "Ops after the last reduction over the image are not rewritten. " + _exceptions(networks)
        ),
        difference_64=_largest(line[2] for line in in_float64),
        difference_32=_largest(line[2] for line in in_float32),
        tiled=_filled(f"**Tiled**: {_names(layers, lambda outcome: outcome == TILED)}."),
        barriers=_filled(
            "**Tiled, with a [barrier](../explanation/barriers.md)**, a reduction over the image or attention between "
            "two loops: "
            f"{_names(layers, lambda outcome: outcome.startswith(WITH_BARRIER))}."
        ),
        ends=_filled(
            "**Ends a segment**, because it reduces over the image: "
            f"{_names(layers, lambda outcome: outcome == ENDS_SEGMENT)}."
        ),
        untiled=_table(
            ["layer", "reason"],
            [
                [_names(layers, lambda outcome, reason=reason: outcome == reason), reason.removeprefix(NOT_REWRITTEN)]
                for reason in dict.fromkeys(reasons)
            ],
        ),
        others="\n".join(others),
    )


def _largest(differences: Iterable[str]) -> str:
    return f"{max(float(text.split()[0]) for text in differences):.0e}"


def _exceptions(networks: list[list[str]]) -> str:
    """Return a sentence for each set of reasons for which further ops of networks are not rewritten."""
    names: dict[str, list[str]] = {}
    for name, _, reasons, *_ in networks:
        names.setdefault(reasons, []).append(name)
    return " ".join(f"Others in {' and '.join(names[why])}: {why}." for why in names if why != "nothing")


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _names(layers: list[list[str]], accepts: Callable[[str], bool]) -> str:
    """Return the layers whose outcome is accepted, each with its uses in brackets."""
    uses: dict[str, list[str]] = {}
    for title, outcome, _ in layers:
        if accepts(outcome):
            name, _, use = re.sub(r" \(\d-D\)$", "", title).partition(", ")
            uses.setdefault(name, []).append(use)
    return ", ".join(f"{name} ({'; '.join(texts)})" if any(texts) else name for name, texts in uses.items())


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, ["---"] * len(titles), *lines))


def versions(*, emit: _child.Emit) -> dict[str, str]:
    """Return the versions of the packages that the page was written with."""
    del emit
    import keras
    import tensorflow as tf

    return {"keras": keras.__version__, "tensorflow": tf.__version__}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.coverage", __doc__)
    layers = sorted(_coverage_layers.uses())
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=NETWORKS, metavar="NAME")
    parser.add_argument("--layers", nargs="*", choices=layers, default=layers, metavar="NAME")
    results = _child.ROOT / "benchmarks" / "results" / "coverage.json"
    parser.add_argument("--results", type=Path, default=results, metavar="FILE")
    parser.add_argument(
        "--output", type=Path, default=_child.ROOT / "docs" / "reference" / "supported.md", metavar="FILE"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine layers and networks, print, and write the page."""
    options = parse_arguments(arguments)
    results: dict[str, Any] = {"layers": {}, "networks": {}}
    if options.results.exists():
        results = json.loads(options.results.read_text())
    for kind, examine, names in (("layers", layer_rows, options.layers), ("networks", network_row, options.networks)):
        for name in names:
            results[kind][name] = examine(name)  # type: ignore[operator]
            options.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    page_versions = _child.call_in_child("benchmarks.coverage:versions", {})
    layers = [line for name in sorted(results["layers"]) for line in results["layers"][name]]
    networks = [results["networks"][name] for name in NETWORKS if name in results["networks"]]
    options.output.write_text(page(networks, layers, page_versions))
    return 0


if __name__ == "__main__":
    _child.leave_with(main)
