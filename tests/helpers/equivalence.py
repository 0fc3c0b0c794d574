"""Run a step and its rewritten twin on the same numbers, and compare all results; a helper, no test."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.emission import tile_pass
from rewriters.ir.graph import Graph, Tensor
from rewriters.step_importer import StepImporter
from rewriters.tiling.segment import Segment, build_segment, forward_ops
from rewriters.tiling.tile_planner import Grid, Halo
from tflms_sft._verify.differences import difference as error

TOLERANCE = 1e-10
"""For float64."""


@dataclasses.dataclass
class Step:
    """A traced step with what it works on.

    Attributes:
        concrete_fn: The plain step.
        variables: All that it reads or writes.
        batches: Arguments of each step.
        function: What was traced, if it may be traced again.
        specs: With what.
    """

    concrete_fn: Any
    variables: Sequence[Any]
    batches: Sequence[Sequence[Any]]
    function: Any = None
    specs: Sequence[Any] = ()

    def __post_init__(self) -> None:
        self._start = [np.array(v) for v in self.variables]

    def run(self, function: Callable[..., Any]) -> dict[str, np.ndarray]:
        """Results of every step, and every variable after the last, from the same start each time."""
        for variable, value in zip(self.variables, self._start, strict=True):
            variable.assign(value)
        found = {}
        for number, batch in enumerate(self.batches):
            for path, value in keras.tree.flatten_with_path(function(*map(tf.constant, batch))):
                found[f"step {number}: {'/'.join(map(str, path))}"] = np.array(value)
        for number, variable in enumerate(self.variables):
            found[f"variable {number}: {getattr(variable, 'path', variable.name)}"] = np.array(variable)
        return found


@dataclasses.dataclass(frozen=True)
class Cut:
    """A segment, by the names that `find` takes, with its grids."""

    entry: str | tuple[str, ...] = "input"
    exit: str | tuple[str, ...] = "out"
    grid: tuple[int, int] = (2, 3)
    batch: int = 1
    backward_grid: tuple[int, int] | None = None
    stored: tuple[str, ...] = ()
    halo: str = "recompute"


@dataclasses.dataclass
class Rewritten:
    """A rewritten step with the plan behind it."""

    function: Any
    graph: Graph
    segments: list[Segment]
    num_arguments: int


def names(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def find(analysis: GraphAnalysis, name: str) -> Tensor:
    """The last forward image of an op or scope of this name; `input` is the first image argument."""
    if name == "input":
        return next(t for t in analysis.graph.inputs if t.shape is not None and len(t.shape) == 4)
    for pattern in (rf"(^|/){name}(/|$)", rf"(^|/){name}_\d+(/|$)"):
        found = [n for n in analysis.order if re.search(pattern, n.name) and n not in analysis.backward]
        images = [n.out() for n in found if n.outputs and n.outputs[0][1] and len(n.outputs[0][1]) == 4]
        images = [t for t in images if t.node in analysis.data]
        if images:
            return images[-1]
    raise LookupError(name)


def plan(analysis: GraphAnalysis, cuts: Sequence[Cut]) -> list[tile_pass.SegmentPlan]:
    """Segments that share no op, planned."""
    taken: set[Any] = set()
    plans = []
    for number, cut in enumerate(cuts):
        entries, exits = ([find(analysis, n) for n in names(side)] for side in (cut.entry, cut.exit))
        stored = frozenset(find(analysis, n) for n in cut.stored)
        ops = forward_ops(analysis, entries, exits)
        segment = build_segment(analysis, f"segment{number}", ops, taken, stored)
        taken.update(segment.backward)
        backward = Grid(cut.batch, cut.backward_grid) if cut.backward_grid else None
        plans.append(tile_pass.plan_segment(analysis, segment, Grid(cut.batch, cut.grid), backward, Halo(cut.halo)))
    return plans


def rewrite(concrete_fn: Any, *cuts: Cut) -> Rewritten:
    """The step with the cuts as tile loops."""
    return rewrite_as(concrete_fn, lambda analysis: plan(analysis, cuts))


def rewrite_as(concrete_fn: Any, planned: Callable[[GraphAnalysis], list[tile_pass.SegmentPlan]]) -> Rewritten:
    """The step with the planned segments as tile loops."""
    analysis = GraphAnalysis(canonicalize.read_canonical(concrete_fn))
    plans = planned(analysis)
    graph = tile_pass.tile_segments(analysis, plans)
    importer = StepImporter(graph, concrete_fn)
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in concrete_fn.inputs[: importer.num_arguments]]
    function = tf.function(lambda *args: importer(args), input_signature=specs).get_concrete_function()
    return Rewritten(function, graph, [p.segment for p in plans], importer.num_arguments)


def differing(step: Step, *cuts: Cut, tolerance: float = TOLERANCE, needs_backward: bool = True) -> dict[str, float]:
    """Return the results that differ in the rewritten step, with their errors."""
    rewritten = rewrite(step.concrete_fn, *cuts)
    for segment in rewritten.segments:
        if needs_backward and not segment.backward:
            raise AssertionError(f"{segment.name} has no backward loop, so that a comparison would show little")
    return differences(step, rewritten, tolerance)


def differences(step: Step, rewritten: Rewritten, tolerance: float = TOLERANCE) -> dict[str, float]:
    """Return the results that differ in a rewritten step, with their errors."""
    want, got = step.run(step.concrete_fn), step.run(rewritten.function)
    if list(want) != list(got):
        return {name: float("inf") for name in set(want) ^ set(got)}
    errors = {name: error(got[name], want[name]) for name in want}
    return {name: value for name, value in errors.items() if not value <= tolerance}


# Keras models -----------------------------------------------------------------------------------------------


def batches_of(sizes: Sequence[int], shape: Sequence[int], classes: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random images with labels, one pair per step."""
    random = np.random.default_rng(0)
    dtype = keras.config.floatx()
    return [
        (random.normal(size=(size, *shape)).astype(dtype), np.arange(size, dtype="int32") % classes) for size in sizes
    ]


def keras_step(
    net: Callable[[Any], Any],
    size: tuple[int, int] = (37, 40),
    batch: int | Sequence[int] = 2,
    known_batch: bool = True,
    optimizer: Any = None,
    floatx: str = "float64",
    steps: int = 2,
    compile_args: dict[str, Any] | None = None,
) -> Step:
    """Keras's own `train_step` of a classifier on top of `net`; it returns the logs and all gradients."""
    keras.config.set_floatx(floatx)
    sizes = [batch] * steps if isinstance(batch, int) else list(batch)
    image = keras.Input((*size, 3), batch_size=sizes[0] if known_batch else None)
    pooled = keras.layers.GlobalAveragePooling2D()(net(image))
    model = keras.Model(image, keras.layers.Dense(3, dtype=floatx)(pooled))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    arguments = {"optimizer": optimizer or keras.optimizers.SGD(0.1), "loss": loss, **(compile_args or {})}
    return model_step(model, batches_of(sizes, (*size, 3)), known_batch, arguments)


def noise_step(
    model: Any, classes: int, batch: int, steps: int, known_batch: bool = True, is_real: bool = False
) -> Step:
    """Return training steps of a network on noise, with a class for each position of the output, or with numbers.

    Args:
        model: A network that returns scores of classes, or numbers.
        classes: Number of classes, and of tokens.
        batch: Images of a step.
        steps: Number of steps.
        known_batch: Whether the batch size is known when the step is traced.
        is_real: Whether the network returns numbers.
    """
    random = np.random.default_rng(0)
    shape = (batch, *model.output.shape[1:])

    def drawn(tensor: Any) -> np.ndarray:
        size = (batch, *tensor.shape[1:])
        return (
            random.integers(classes, size=size).astype("int32") if tensor.dtype == "int32" else random.normal(size=size)
        )

    def target() -> np.ndarray:
        return random.normal(size=shape) if is_real else random.integers(classes, size=shape[:-1]).astype("int32")

    batches = [(*map(drawn, model.inputs), target()) for _ in range(steps)]
    loss = "mse" if is_real else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    arguments = {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": loss, "jit_compile": False}
    return model_step(model, batches, known_batch, arguments)


def model_step(model: Any, batches: Any, known_batch: bool, compile_args: dict[str, Any], updates: int = 1) -> Step:
    """`train_step` of a compiled model, traced once. A batch has the model's inputs, then a target for each output.

    With several `updates`, a step is like that of a generative adversarial network: before each update the largest
    kernel is scaled to a norm of one or less, as in spectral normalization; after the last one the moving averages of
    all weights are assigned, and the network runs once more.
    """

    def packed(data: Any) -> Any:
        number, end = len(model.inputs), len(model.inputs) + len(model.outputs)
        inputs = data[0] if number == 1 else list(data[:number])
        targets = data[number:end] if end == number + 1 else (list(data[number:end]),)
        return (inputs, *targets, *data[end:])

    model.compile(**compile_args)
    model.optimizer.build(model.trainable_variables)
    specs = [tf.TensorSpec(a.shape if known_batch else (None, *a.shape[1:]), a.dtype) for a in batches[0]]
    model._symbolic_build(data_batch=packed(batches[0]))  # Metrics make their variables when they are first used.
    apply = model.optimizer.apply
    gradients = []
    averages = [tf.Variable(v, trainable=False) for v in model.trainable_variables] if updates > 1 else []
    kernel = max(model.trainable_variables, key=lambda v: len(v.shape), default=None)

    def recording(grads: Any, variables: Any = None) -> None:
        gradients.extend(tf.convert_to_tensor(g) for g in grads if g is not None)
        apply(grads, variables)

    def traced(*data: Any) -> Any:
        gradients.clear()
        if updates == 1:
            return {"logs": model.train_step(packed(data)), "gradients": list(gradients)}
        for _ in range(updates):
            if kernel is not None:
                kernel.assign(kernel / keras.ops.sqrt(1 + keras.ops.sum(keras.ops.square(kernel))))
            logs = model.train_step(packed(data))
        for average, variable in zip(averages, model.trainable_variables, strict=True):
            average.assign(0.9 * average + 0.1 * variable)
        after = model(packed(data)[0], training=True)
        return {"logs": logs, "gradients": list(gradients), "after": after}

    def function(*data: Any) -> Any:
        model.optimizer.apply = recording
        try:
            return traced(*data)
        finally:
            del model.optimizer.apply

    step = tf.function(function, autograph=False)
    concrete_fn = step.get_concrete_function(*specs)
    variables = {id(v): v for v in [*model.variables, *model.optimizer.variables, *model.metrics_variables, *averages]}
    return Step(concrete_fn, list(variables.values()), batches, tf.function(function, autograph=False), specs)
