"""Whether a rewritten step computes what the original computes: both run from the same state, and are compared.

Rounding is told apart from mistakes by the original itself: it runs once more with its weights off by one rounding,
and how far that takes each tensor is its noise. A sum of terms that are all the same, as the gradient of a bias behind
a maximum is, is rounded the same way then, in each addition up or in each down. So gradients are also computed from a
loss that is a third larger, and divided by as much. A bias before a normalisation has a gradient that is zero but for
rounding, which Adam turns into an update as large as any other. So how far an update may take a variable is found by
giving the gradients of the rewritten step to the original's update.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from rewriters.analysis.autodiff_roles import gradient_seed_constants, gradients, is_random
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import read_canonical
from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from rewriters.ir.graph import Graph, Tensor, from_concrete_function
from rewriters.step_importer import StepImporter
from tflms_sft._keras.rewriting_callback import trained_by
from tflms_sft._keras.train_step_patch import check_not_patched
from tflms_sft._params.request import parse_request
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._pipeline.build import build_pipeline
from tflms_sft._planner.traced_step import collector_paused
from tflms_sft._rewrite.rewrite import rewrite, rewrite_concrete
from tflms_sft._rewrite.rewritten_step import RewrittenStep
from tflms_sft._trace.layer_names import lookup
from tflms_sft._trace.step_tracing import batch_of, trace_step
from tflms_sft._verify.differences import (
    EXPECTED,
    FLOOR,
    GRADIENT,
    OUTPUT,
    VARIABLE,
    Difference,
    Verification,
    badness,
    difference,
)

GRADIENT_FLOOR = 1e-4
"""The same for gradients, whose scale is the loss's: a part of the largest of them all."""

ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative distance of a number from the next."""

SUMMED = 4
"""Roundings that a sum may be off, times the root of the number of its terms: tiles add in another order."""

NOISES = 10
"""How many times its noise a tensor may be off: one sample tells the order of magnitude."""

SCALE = 4 / 3
"""No power of two, so that gradients that are so many times larger are rounded otherwise."""


def verify(step_or_model: Any, batch: Any, params: Any = None, *, steps: int = 1) -> Verification:
    """Run a training step as it was and rewritten, on the same batch from the same state, and compare.

    All variables are put back afterwards, also after an error: weights, optimizer slots, metrics, seeds. The original
    has to fit in memory, so give a small batch.

    Args:
        step_or_model: A compiled Keras model; a `tf.function` or `ConcreteFunction`; or what `rewrite` returned.
        batch: For a model `(x, y)` or `(x, y, sample_weight)`, as `train_on_batch` takes them, or `x` alone if its
            step needs no targets. For a step a tuple of its arguments, or its only argument.
        params: How to rewrite: `SFTParams`, `AutoParams` or `LMSParams`, a list of them as for `rewrite`, or a memory
            budget such as `"300MiB"` or an int. For a model also a callback that it was trained with: its plan is
            compared, on a batch of any size. Leave it out for what `rewrite` returned.
        steps: Steps to compare, all on this batch, each from where the original has come. Defaults to 1.

    Returns:
        The largest relative differences of results, gradients and variables, with their tensors; true if rounding
        explains all of them. `print(result.summary())` shows them.

    Raises:
        RewriteError: If the step cannot be rewritten; its subclasses say more. Also for a model without a loss, and if
            a callback's plan is not found again.
        TypeError: For arguments of the wrong type.
        ValueError: For wrong values, and for a batch without the targets that the model's step needs.

    Example:
    >>> result = tflms_sft.verify(model, (images, labels), tflms_sft.SFTParams(num_tiles=(4, 4)))
    >>> print(result.summary())
    >>> assert result
    """
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"`steps` must be an integer. Received: steps={steps!r}.")
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1. Received: steps={steps!r}.")
    if isinstance(step_or_model, keras.Model):
        return _of_model(step_or_model, batch, params, steps)
    arguments = batch if isinstance(batch, tuple) else (batch,)
    if isinstance(step_or_model, RewrittenStep):
        if params is not None:
            raise TypeError(f"`params` is for steps that are not rewritten yet. Received: params={params!r}.")
        return _compared(step_or_model, arguments, steps)
    chosen = _chosen(params)
    examples = () if hasattr(step_or_model, "captured_inputs") else tf.nest.map_structure(_tensor, arguments)
    return _compared(rewrite(step_or_model, chosen, *examples), arguments, steps)


def _chosen(params: Any) -> Any:
    """A budget as `AutoParams`; anything else as it is."""
    if params is None:
        raise TypeError(
            "`params` must say how to rewrite: `SFTParams(...)`, `AutoParams(...)`, `LMSParams(...)`, a list of them, "
            'or a budget such as "300MiB". Received: params=None.'
        )
    return AutoParams(params) if isinstance(params, (str, int, np.integer)) else params


def _of_model(model: Any, batch: Any, params: Any, steps: int) -> Verification:
    """Of a model's `train_step`, as `train_on_batch` runs it."""
    trained = trained_by(params, model)
    chosen = parse_request(_chosen(params)) if trained is None else trained.request
    check_not_patched(model)
    data = tf.nest.map_structure(_as_keras_does, _data(batch))
    if trained is not None:
        trained.require_even(data)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda data: model.train_step(data), autograph=False)
    examples = (data if trained is None else trained.specs(data),)
    with _told_what_lacks(model, data):
        model._symbolic_build(data_batch=data)  # As `train_on_batch` does: metrics make their variables.
        traced = trace_step(step, examples, {})
    with _put_back([(v.value.handle, v.value.dtype) for v in model.metrics_variables]):  # The step may not use all.
        model.reset_metrics()  # Their running means would hide differences.
        size = batch_of(data) if trained is None else trained.plan.batch
        if chosen.pipeline is not None:  # It is traced for a part of the batch as well.
            given = batch_of(data)
            if given and not given % chosen.pipeline.total_micro_batches:
                size = given  # Else it would go the way of all batches of other sizes.
            with collector_paused():
                found = RewrittenStep(*build_pipeline(step, chosen, examples, {}, size))
        else:
            found = rewrite_concrete(*traced, size, chosen, 1.0 if trained is None else trained.correction)
        if trained is not None:
            trained.check(found.plan)
        return _compared(found, (data,), steps)


@contextmanager
def _told_what_lacks(model: Any, data: tuple[Any, ...]) -> Iterator[None]:
    """Where a step cannot be traced, say that targets or a loss are missing if that may be why.

    Neither is wrong in itself: layers may add losses, and a step of the model's own need not have targets.
    """
    try:
        yield
    except RewriteError:
        raise
    except Exception as error:
        if _has_no_loss(model):
            raise RewriteError(
                f"Model {model.name!r} is compiled without a loss, and none of its layers adds one, so that there is "
                f"nothing to train. Compile it with `loss=`. Keras says: {error}"
            ) from error
        if len(data) > 1 and data[1] is not None:
            raise
        raise ValueError(
            "`batch` must be (images, targets), or (images, targets, sample_weight), as `train_on_batch` takes them: "
            f"the step of model {model.name!r} cannot be traced without targets. Several inputs are one tuple, list "
            f"or dict in the place of the images. Received: images alone, which raised {type(error).__name__}: {error}"
        ) from error


def _has_no_loss(model: Any) -> bool:
    """Whether Keras's own step, which has been tried, has nothing to descend."""
    own = all(getattr(type(model), name) is getattr(keras.Model, name) for name in ("train_step", "compute_loss"))
    return own and getattr(model, "loss", None) is None and not model.losses


def _data(batch: Any) -> Any:
    """`(x,)`, `(x, y)` or `(x, y, sample_weight)`."""
    if isinstance(batch, list):
        batch = tuple(batch)
    data = batch if isinstance(batch, tuple) else (batch,)
    if not 1 <= len(data) <= 3:
        raise ValueError(
            "`batch` must be (x, y) or (x, y, sample_weight), as `train_on_batch` takes them, or x alone. "
            f"Received: a tuple of {len(data)}."
        )
    return data


def _as_keras_does(value: Any) -> Any:
    """A tensor of the type that `fit` would make of an array: floats become `keras.config.floatx()`."""
    if value is None or tf.is_tensor(value):
        return value
    if not hasattr(value, "shape"):
        raise TypeError(
            "`batch` must hold arrays or tensors, as `train_on_batch` takes them. Received: a value of type "
            f"{type(value).__name__} in it. Make an array of it: `np.asarray(...)`."
        )
    array = np.asarray(value)
    return tf.convert_to_tensor(array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array)


def _tensor(value: Any) -> Any:
    """An example argument; numbers stay constants of the trace."""
    return tf.convert_to_tensor(value) if hasattr(value, "shape") else value


# Running -----------------------------------------------------------------------------------------------------------


State = Sequence[Any]
"""Values of all variables of a step."""


@contextmanager
def _put_back(variables: Sequence[tuple[Any, Any]]) -> Iterator[State]:
    """The values of (handle, dtype), which are assigned again at the end."""
    saved = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype) for handle, dtype in variables]
    try:
        yield saved
    finally:
        _assign([handle for handle, _ in variables], saved)


def _assign(handles: Sequence[Any], values: State) -> None:
    for handle, value in zip(handles, values, strict=True):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _compared(step: RewrittenStep, arguments: tuple[Any, ...], steps: int) -> Verification:
    """Run a step and its original, and compare."""
    original, flat = step._original, step._flat(arguments, {})
    analysis = GraphAnalysis(read_canonical(original))
    dtype = _coarsest(analysis)
    expected = _expected(dtype, flat)
    importer = step._importer.for_batch(flat)
    runs = _Runs(step, importer, arguments, flat, _shared_gradients(original, analysis, importer.graph))
    rows: dict[tuple[str, str], Difference] = {}
    with _put_back(runs.handles) as state:
        for _ in range(steps):
            want = runs.plain(state)
            for row in runs.differences(state, want, expected):
                rows[row.kind, row.name] = max(row, rows.get((row.kind, row.name), row), key=badness)
            state = want.state
    return Verification(tuple(rows.values()), dtype, steps, step.plan, runs.shared.left, _random_ops(analysis))


Values = dict[str, Any]
"""Arrays by name."""


class _Run(NamedTuple):
    """What a run gave.

    Attributes:
        results: What the step returns.
        gradients: Those that both graphs have.
        variables: Their values afterwards.
        state: The same as tensors, to begin with.
    """

    results: Values
    gradients: Values
    variables: Values
    state: State


class _Runs:
    """Runs of a step, rewritten and not, each from a given state.

    Attributes:
        handles: (resource, dtype) of each variable.
        shared: Gradients that both graphs have.
    """

    def __init__(
        self,
        step: RewrittenStep,
        rewritten: StepImporter,
        arguments: Sequence[Any],
        flat: Sequence[Any],
        shared: _Shared,
    ) -> None:
        original = step._original
        self.handles = tf_internals.captured_variables(original)
        self.shared = shared
        self._flat, self._structured = flat, functools.partial(step, *arguments)
        known = {id(variable.handle): variable.name.removesuffix(":0") for variable in original.variables}
        self._names = _distinct([known.get(id(handle), "a variable without a name") for handle, _ in self.handles])
        plain = StepImporter(shared.graph, original)
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in original.inputs[: plain.num_arguments]]
        number = len(shared.graph.outputs)

        def run_plain(*flat: Any) -> Any:
            found = plain.values(flat, [*shared.graph.outputs, *shared.plain])
            return tf_internals.pack_outputs(original, found[:number]), found[number:]

        def run_rewritten(*flat: Any) -> Any:
            return None, rewritten.values(flat, shared.rewritten)

        def run_plain_given(*flat_and_gradients: Any) -> Any:
            flat, given = flat_and_gradients[: len(specs)], flat_and_gradients[len(specs) :]
            plain.values(flat, [], dict(zip(shared.plain, given, strict=True)))
            return None, []

        def run_plain_scaled(*flat: Any) -> Any:
            scaled = {tensor: tf.fill(tensor.shape, tf.cast(SCALE, tensor.dtype)) for tensor in shared.ones}
            return None, plain.values(flat, shared.plain, scaled)

        gradients = [tf.TensorSpec(t.shape, t.dtype) for t in shared.plain]
        self._plain, self._rewritten, self._plain_scaled, self._plain_given = (
            tf.function(function, input_signature=signature, autograph=False)
            for function, signature in (
                (run_plain, specs),
                (run_rewritten, specs),
                (run_plain_scaled, specs),
                (run_plain_given, [*specs, *gradients]),
            )
        )

    def plain(self, state: State) -> _Run:
        """The original."""
        return self._run(lambda: self._plain(*self._flat), state)

    def differences(self, state: State, want: _Run, expected: float) -> Iterator[Difference]:
        """Of the rewritten step from what the original gave, from the same state."""
        got = self._run(lambda: (self._structured(), []), state)
        off = self.plain(_off_by_one_rounding(state))
        yield from _differences(OUTPUT, got.results, want.results, [off.results], expected)
        noisy = [off.variables]
        if self.shared.names:
            gradients = self._run(lambda: self._rewritten(*self._flat), state).gradients
            largest = max(float(np.max(np.abs(value), initial=0)) for value in want.gradients.values())
            floor = GRADIENT_FLOOR * largest or FLOOR
            off_gradients = [off.gradients, *self._scaled(state, want.gradients, floor, expected)]
            yield from _differences(GRADIENT, gradients, want.gradients, off_gradients, expected, floor)
            # An update may make much of little: Adam goes as far for a tiny gradient as for a large one.
            noisy.append(self._run(lambda: self._plain_given(*self._flat, *gradients.values()), state).variables)
        yield from _differences(VARIABLE, got.variables, want.variables, noisy, expected)

    def _scaled(self, state: State, want: Values, floor: float, expected: float) -> Iterator[Values]:
        """Gradients of a loss times `SCALE`, divided by it; those that do not go with the loss as they were."""
        if not self.shared.ones:
            return
        found = self._run(lambda: self._plain_scaled(*self._flat), state).gradients
        back = {name: (value / SCALE).astype(value.dtype) for name, value in found.items()}
        goes = {name: difference(value, want[name], floor) <= NOISES * expected for name, value in back.items()}
        yield {name: value if goes[name] else want[name] for name, value in back.items()}

    def _run(self, function: Callable[[], Any], state: State) -> _Run:
        _assign([handle for handle, _ in self.handles], state)
        results, gradients = function()
        after = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype) for handle, dtype in self.handles]
        return _Run(
            _named(results),
            {name: value.numpy() for name, value in zip(self.shared.names, gradients, strict=False)},
            {name: value.numpy() for name, value in zip(self._names, after, strict=True)},
            after,
        )


def _distinct(names: Sequence[str]) -> list[str]:
    """The same, those that come again with a number."""
    seen = collections.Counter[str]()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return result


def _named(results: Any) -> Values:
    """Arrays of a nest, by their path in it."""
    found: Values = {}
    for path, value in keras.tree.flatten_with_path(results):
        if value is not None:
            found["/".join(map(str, path)) or "result"] = tf.convert_to_tensor(value).numpy()  # Of `tf.IndexedSlices`.
    return found


def _off_by_one_rounding(state: State) -> list[Any]:
    """Weights, each moved up or down by about the distance to the next number; scalars and integers stay."""
    random = np.random.default_rng(0)
    moved = []
    for value in state:
        rounding = ROUNDING.get(value.dtype.name)
        if rounding is not None and value.shape.rank:
            signs = tf.constant(random.choice([-rounding, rounding], value.shape), tf.float64)
            value = tf.cast(tf.cast(value, tf.float64) * (1 + signs), value.dtype)
        moved.append(value)
    return moved


def _differences(
    kind: str, got: Values, want: Values, noisy: Sequence[Values], expected: float, floor: float = FLOOR
) -> Iterator[Difference]:
    """Of what the rewritten step gave from what the original gave, and gives where little is changed."""
    for name, value in want.items():
        noise = max(difference(values[name], value, floor) for values in noisy)
        limit = max(expected, NOISES * noise) if math.isfinite(noise) else expected
        yield Difference(kind, name, difference(got[name], value, floor), noise, limit)


# Gradients ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Shared:
    """Gradients that are tensors of both graphs.

    Attributes:
        graph: The original as it was traced.
        ones: What its gradients begin with.
        names: What they are gradients for.
        plain: Tensors of the original.
        rewritten: Tensors of the rewritten graph.
        left: (name, why) of those that are not in both.
    """

    graph: Graph
    ones: list[Tensor] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    plain: list[Tensor] = dataclasses.field(default_factory=list)
    rewritten: list[Tensor] = dataclasses.field(default_factory=list)
    left: tuple[tuple[str, str], ...] = ()


def _shared_gradients(original: Any, analysis: GraphAnalysis, rewritten: Graph) -> _Shared:
    """Gradients of both graphs.

    They are found in the normalised graph, whose names are those of the traced one but for what was inlined or
    bypassed, and whose tensors the rewritten one knows where they were replaced.
    """
    graph = from_concrete_function(original)
    shared = _Shared(graph, gradient_seed_constants(graph))
    found = gradients(analysis.graph, analysis.order, analysis.backward)
    names = _distinct([_updated(tensor, analysis, original) or tensor.name for tensor in found])
    bypassed: dict[Tensor, list[str]] = {}
    for old, new in analysis.graph.aliases.items():
        bypassed.setdefault(new, []).append(old)
    for name, tensor in zip(names, found, strict=True):
        candidates = (lookup(shared.graph, known) for known in (tensor.name, *bypassed.get(tensor, ())))
        plain = next(filter(None, candidates), None)
        now = lookup(rewritten, tensor.name)
        if plain is None:
            shared.left += ((name, "in the traced step it is inside of a function that is called"),)
        elif now is None:
            shared.left += ((name, "the rewritten step has it only inside of a loop"),)
        else:
            shared.names.append(name)
            shared.plain.append(plain)
            shared.rewritten.append(now)
    return shared


def _updated(gradient: Tensor, analysis: GraphAnalysis, original: Any) -> str | None:
    """Name of the weight of the gradient's shape that its update reaches first."""
    weights = {id(v.handle): (v.name.removesuffix(":0"), tuple(v.shape)) for v in original.trainable_variables}
    captured = zip(reversed(analysis.graph.inputs), reversed(original.captured_inputs), strict=False)
    held = {tensor: weights[id(handle)] for tensor, handle in captured if id(handle) in weights}
    seen, queue = {gradient.node}, collections.deque([gradient])
    while queue:
        for reader, _ in analysis.consumers.get(queue.popleft(), ()):
            if reader in seen:
                continue
            seen.add(reader)
            reached = (held[resource] for resource in reader.inputs if resource in held)
            name = next((name for name, shape in reached if shape == gradient.shape), None)
            if name is not None:
                return name
            queue.extend(reader.out(index) for index in range(len(reader.outputs)))
            queue.extend(t for t in reader.inputs if t.dtype == tf.resource)  # Slots are assigned and read again.
    return None


# Roles -------------------------------------------------------------------------------------------------------------


def _coarsest(analysis: GraphAnalysis) -> str:
    """The floating type with the fewest digits that images, or if there are none anything else, are computed in."""
    types: dict[bool, set[str]] = {True: set(), False: set()}
    for node in analysis.order:
        for dtype, shape in node.outputs if node in analysis.data and node.op != "Placeholder" else ():
            if dtype.name in EXPECTED:
                types[shape is not None and len(shape) > 2].add(dtype.name)
    return max(types[True] or types[False] or {"float32"}, key=EXPECTED.__getitem__)


def _expected(dtype: str, flat: Sequence[Any]) -> float:
    """What rounding explains in a step on arguments of this size; half precision is summed in float32."""
    terms = max((int(tf.size(value)) for value in flat), default=1)
    return max(EXPECTED[dtype], SUMMED * min(ROUNDING[dtype], ROUNDING["float32"]) * math.sqrt(terms))


def _random_ops(analysis: GraphAnalysis) -> tuple[str, ...]:
    """Operations whose numbers no variable tells: they cannot be drawn again."""
    found = (node for node in analysis.order if node.stateful and is_random(node))
    return tuple(node.name for node in found)
