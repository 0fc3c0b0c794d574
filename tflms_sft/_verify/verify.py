"""`verify`: runs a step and its rewritten version from the same state, and compares their results.

The original step itself determines the differences that rounding explains:

- The original runs once more with weights perturbed by one rounding each. The change of a tensor is its noise.
- A sum of equal terms, such as the gradient of a bias behind a maximum, is rounded in one direction in every addition.
  Gradients are therefore also computed from a loss scaled by 4/3, and divided by it.
- A bias before a normalisation has a gradient of zero up to rounding, which Adam turns into an update of full size.
  Variables are therefore compared with the update of the original step from the gradients of the rewritten step, and
  with the original step itself only where that update differs.
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
from rewriters.ir.graph import Graph, Tensor
from rewriters.ir.graph_reader import from_concrete_function
from rewriters.step_importer import StepImporter
from tflms_sft._keras.model_checks import build_optimizer, is_trainer
from tflms_sft._keras.rewriting_callback import trained_by
from tflms_sft._keras.step_installer import check_not_patched
from tflms_sft._params.request import parse_request
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._pipeline.build import build_pipeline
from tflms_sft._rewrite.rewrite import rewrite, rewrite_concrete
from tflms_sft._rewrite.rewritten_step import RewrittenStep
from tflms_sft._search.traced_step import collector_paused
from tflms_sft._trace.layer_names import lookup
from tflms_sft._trace.step_tracing import batch_of, keras_function, trace_step
from tflms_sft._verify.differences import (
    ABSOLUTE_FLOOR,
    GRADIENT,
    OUTPUT,
    ROUNDING_LIMITS,
    VARIABLE,
    Difference,
    Verification,
    badness,
    difference,
)

GRADIENT_FLOOR_RATIO = 1e-4
"""Magnitude below which differences of gradients are absolute, as a fraction of the largest of all gradients."""

ROUNDING_UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative distance of a floating-point number from the next, for each dtype."""

SUM_ERROR_FACTOR = 4
"""Limit of the error of a sum in roundings, over the root of the number of terms: tiles change the order of sums."""

NOISE_FACTOR = 10
"""Limit of a difference over its noise: one sample of the noise gives its order of magnitude."""

LOSS_SCALE = 4 / 3
"""Not a power of two, so that the scaled gradients are rounded differently."""


def verify(step_or_model: Any, batch: Any, params: Any = None, *, steps: int = 1) -> Verification:
    """Run the original and the rewritten step on one batch from the same state, and compare all results.

    Results, gradients and variables are compared. The original step must fit in memory, so give a small batch. All
    variables are restored afterwards, also after an error: weights, optimizer slots, metrics, seeds.

    Args:
        step_or_model (keras.Model | tf.function | ConcreteFunction | RewrittenStep): A compiled model, or a step.
        batch: For a model `(x, y)` or `(x, y, sample_weight)`, as for `train_on_batch`, or `x` alone if its step needs
            no targets. For a step the tuple of its arguments, or its only argument.
        params: The rewriting: parameter objects as for `rewrite`, or a memory budget such as `"300MiB"` or an int. For
            a model also a callback that has trained it; then the plan of that training is compared, on a batch of any
            size. Required, except for a result of `rewrite`, which has its own.
        steps: Number of steps to compare, all on this batch, each from the state of the original step. More steps
            reveal slow drift, and moving statistics that a later step reads.

    Returns:
        A `Verification`, true if the results are equal up to rounding. It is false also where `verify` cannot tell,
        because rounding is as large as a wrong result could be; `verdict` says which. `print(result.summary())` shows
        the largest difference of each kind.

    Raises:
        RewriteError: If the step cannot be rewritten, the model has no loss, or the plan of a callback differs from
            the plan for this batch.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or the batch has no targets but the model's step needs them.

    Examples:
        >>> result = tflms_sft.verify(model, (images, labels), tflms_sft.SFTParams(num_tiles=(4, 4)))
        >>> print(result.summary())
        >>> assert result
    """
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"`steps` must be an integer. Received: steps={steps!r}.")
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1. Received: steps={steps!r}.")
    if is_trainer(step_or_model):
        return _verify_model(step_or_model, batch, params, steps)
    arguments = batch if isinstance(batch, tuple) else (batch,)
    if isinstance(step_or_model, RewrittenStep):
        if params is not None:
            raise TypeError(f"`params` must be omitted for a rewritten step. Received: params={params!r}.")
        return _compare(step_or_model, arguments, steps)
    params = _with_budget(params)
    examples = () if hasattr(step_or_model, "captured_inputs") else tf.nest.map_structure(_tensor, arguments)
    return _compare(rewrite(step_or_model, params, *examples), arguments, steps)


def _with_budget(params: Any) -> Any:
    """Return `AutoParams` for a budget, and any other value unchanged; refuse `None`."""
    if params is None:
        raise TypeError(
            "`params` must be `SFTParams(...)`, `AutoParams(...)`, `LMSParams(...)` or `PipelineParams(...)`, a list "
            'of them, or a budget such as "300MiB". Received: params=None.'
        )
    return AutoParams(params) if isinstance(params, (str, int, np.integer)) else params


def _verify_model(model: Any, batch: Any, params: Any, steps: int) -> Verification:
    """Compare a model's `train_step`, as `train_on_batch` runs it."""
    trained = trained_by(params, model)
    request = parse_request(_with_budget(params)) if trained is None else trained.request
    check_not_patched(model)
    data = tf.nest.map_structure(_as_keras_does, _data(batch))
    if trained is not None:
        trained.require_even(data)
    build_optimizer(model)
    step = keras_function(model.train_step)
    examples = (data if trained is None else trained.specs(data),)
    with _missing_targets_explained(model, data):
        traced = trace_step(step, examples, {}, image_args=(data,))
    with _restored([(v.value.handle, v.value.dtype) for v in model.metrics_variables]):  # The step may use only some.
        model.reset_metrics()  # Accumulated means would hide differences.
        size = batch_of(data) if trained is None else trained.plan.batch
        if request.pipeline is not None:  # `build_pipeline` traces the step for a micro-batch too.
            batch_size = batch_of(data)
            if batch_size and not batch_size % request.pipeline.total_micro_batches:
                size = batch_size  # A batch of another size than planned would run as one micro-batch.
            with collector_paused():
                rewritten = RewrittenStep(*build_pipeline(step, request, examples, {}, size))
        else:
            rewritten = rewrite_concrete(*traced, size, request, 0 if trained is None else trained.excess_bytes)
        if trained is not None:
            trained.check(rewritten.plan)
        return _compare(rewritten, (data,), steps)


@contextmanager
def _missing_targets_explained(model: Any, data: tuple[Any, ...]) -> Iterator[None]:
    """Replace an error of tracing by one about missing targets or a missing loss, if that may be the cause.

    Neither is an error in general: layers may add losses, and an overridden `train_step` may need no targets.
    """
    try:
        yield
    except RewriteError:
        raise
    except Exception as error:
        if _has_no_loss(model):
            raise RewriteError(
                f"Model {model.name!r} is compiled without a loss, and none of its layers adds one, so that there is "
                f"nothing to train. Compile it with `loss=`. Keras's error: {error}"
            ) from error
        if len(data) > 1 and data[1] is not None:
            raise
        raise ValueError(
            "`batch` must be (images, targets), or (images, targets, sample_weight), as for `train_on_batch`, because "
            f"the step of model {model.name!r} cannot be traced without targets. Pass several inputs as one tuple, "
            f"list or dict in the place of the images. Received: images alone, which raised {type(error).__name__}: "
            f"{error}"
        ) from error


def _has_no_loss(model: Any) -> bool:
    """Tell whether Keras's own `train_step` has no loss to minimise."""
    methods = ("train_step", "compute_loss")
    is_default = all(getattr(type(model), name) is getattr(keras.Model, name) for name in methods)
    return is_default and getattr(model, "loss", None) is None and not model.losses


def _data(batch: Any) -> Any:
    """Return a batch as `(x,)`, `(x, y)` or `(x, y, sample_weight)`."""
    if isinstance(batch, list):
        batch = tuple(batch)
    data = batch if isinstance(batch, tuple) else (batch,)
    if not 1 <= len(data) <= 3:
        raise ValueError(
            "`batch` must be (x, y) or (x, y, sample_weight), as for `train_on_batch`, or x alone. "
            f"Received: a tuple of {len(data)}."
        )
    return data


def _as_keras_does(value: Any) -> Any:
    """Convert an array as `fit` does: floats become `keras.config.floatx()`."""
    if value is None or tf.is_tensor(value):
        return value
    if not hasattr(value, "shape"):
        raise TypeError(
            "`batch` must contain arrays or tensors, as for `train_on_batch`. Received: a value of type "
            f"{type(value).__name__} in it. Convert it: `np.asarray(...)`."
        )
    array = np.asarray(value)
    return tf.convert_to_tensor(array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array)


def _tensor(value: Any) -> Any:
    """Return an example argument; Python numbers remain constants of the trace."""
    return tf.convert_to_tensor(value) if hasattr(value, "shape") else value


# Running -----------------------------------------------------------------------------------------------------------


State = Sequence[Any]
"""The values of all variables of a step."""


@contextmanager
def _restored(variables: Sequence[tuple[Any, Any]]) -> Iterator[State]:
    """Yield the values of variables, given as (handle, dtype), and restore them at the end."""
    saved = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype) for handle, dtype in variables]
    try:
        yield saved
    finally:
        _assign([handle for handle, _ in variables], saved)


def _assign(handles: Sequence[Any], values: State) -> None:
    for handle, value in zip(handles, values, strict=True):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _compare(step: RewrittenStep, arguments: tuple[Any, ...], steps: int) -> Verification:
    """Run a rewritten step and its original, and compare their results."""
    original, flat = step._original, step._flat(arguments, {})
    analysis = GraphAnalysis(read_canonical(original))
    dtype = _coarsest(analysis)
    expected = _expected(dtype, flat)
    importer = step._importer.for_batch(flat)
    runs = _Runs(
        step, importer, arguments=arguments, flat=flat, shared=_shared_gradients(original, analysis, importer.graph)
    )
    worst: dict[tuple[str, str], Difference] = {}
    with _restored(runs.handles) as state:
        for _ in range(steps):
            want = runs.original(state)
            for item in runs.differences(state, want, expected):
                key = item.kind, item.name
                worst[key] = max(item, worst.get(key, item), key=badness)
            state = want.state
    return Verification(tuple(worst.values()), dtype, steps, step.plan, runs.shared.not_shared, _random_ops(analysis))


Values = dict[str, Any]
"""Arrays by name."""


class _Run(NamedTuple):
    """Results, shared gradients, and variables by name and as tensors, after a run of either step."""

    results: Values
    gradients: Values
    variables: Values
    state: State


class _Runs:
    """Runs the original and the rewritten step from given states.

    Attributes:
        handles: (resource, dtype) of each variable.
        shared: Gradients that are tensors of both graphs.
    """

    def __init__(
        self,
        step: RewrittenStep,
        rewritten: StepImporter,
        *,
        arguments: Sequence[Any],
        flat: Sequence[Any],
        shared: _Shared,
    ) -> None:
        original = step._original
        self.handles = tf_internals.captured_variables(original)
        self.shared = shared
        self._flat, self._structured = flat, functools.partial(step, *arguments)
        names = {id(variable.handle): variable.name.removesuffix(":0") for variable in original.variables}
        self._names = _distinct([names.get(id(handle), "unnamed variable") for handle, _ in self.handles])
        importer = StepImporter(shared.graph, original)
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in original.inputs[: importer.num_arguments]]
        number = len(shared.graph.outputs)

        def run_original(*flat: Any) -> Any:
            values = importer.values(flat, [*shared.graph.outputs, *shared.original])
            return tf_internals.pack_outputs(original, values[:number]), values[number:]

        def run_rewritten(*flat: Any) -> Any:
            return None, rewritten.values(flat, shared.rewritten)

        def run_original_update(*flat_and_gradients: Any) -> Any:
            flat, gradients = flat_and_gradients[: len(specs)], flat_and_gradients[len(specs) :]
            importer.values(flat, [], dict(zip(shared.original, gradients, strict=True)))
            return None, []

        def run_original_scaled(*flat: Any) -> Any:
            scaled = {tensor: tf.fill(tensor.shape, tf.cast(LOSS_SCALE, tensor.dtype)) for tensor in shared.seeds}
            return None, importer.values(flat, shared.original, scaled)

        gradient_specs = [tf.TensorSpec(t.shape, t.dtype) for t in shared.original]
        self._original, self._rewritten, self._original_scaled, self._original_update = (
            tf.function(function, input_signature=signature, autograph=False)
            for function, signature in (
                (run_original, specs),
                (run_rewritten, specs),
                (run_original_scaled, specs),
                (run_original_update, [*specs, *gradient_specs]),
            )
        )

    def original(self, state: State) -> _Run:
        """Run the original step."""
        return self._run(lambda: self._original(*self._flat), state)

    def differences(self, state: State, want: _Run, expected: float) -> Iterator[Difference]:
        """Yield the differences of the rewritten step, run from `state`, from the run `want` of the original."""
        got = self._run(lambda: (self._structured(), []), state)
        perturbed_state = _perturbed(state)
        perturbed = self.original(perturbed_state)
        yield from _differences(OUTPUT, got.results, want.results, [perturbed.results], expected)
        if not self.shared.names:
            yield from _differences(VARIABLE, got.variables, want.variables, [perturbed.variables], expected)
            return
        gradients = self._run(lambda: self._rewritten(*self._flat), state).gradients
        largest = max(float(np.max(np.abs(value), initial=0)) for value in want.gradients.values())
        floor = GRADIENT_FLOOR_RATIO * largest or ABSOLUTE_FLOOR
        noisy_gradients = [perturbed.gradients, *self._scaled(state, want.gradients, floor, expected)]
        yield from _differences(GRADIENT, gradients, want.gradients, noisy_gradients, expected, floor)
        # An update may amplify rounding: that of Adam is as large for a tiny gradient as for a large one.
        update = functools.partial(self._original_update, *self._flat, *gradients.values())
        updated, noisy_updated = (self._run(update, start).variables for start in (state, perturbed_state))
        by_update = _differences(VARIABLE, got.variables, updated, [noisy_updated], expected)
        by_step = _differences(VARIABLE, got.variables, want.variables, [perturbed.variables, updated], expected)
        for strict, loose in zip(by_update, by_step, strict=True):
            yield strict if strict.ok else loose

    def _scaled(self, state: State, want: Values, floor: float, expected: float) -> Iterator[Values]:
        """Yield gradients of a scaled loss divided by the scale; unscaled ones where they are not proportional."""
        if not self.shared.seeds:
            return
        scaled = self._run(lambda: self._original_scaled(*self._flat), state).gradients
        gradients = {name: (value / LOSS_SCALE).astype(value.dtype) for name, value in scaled.items()}
        limit = NOISE_FACTOR * expected
        yield {
            name: value if difference(value, want[name], floor) <= limit else want[name]
            for name, value in gradients.items()
        }

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
    """Return the names with a number appended to repeated ones."""
    counts = collections.Counter[str]()
    result = []
    for name in names:
        counts[name] += 1
        result.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return result


def _named(results: Any) -> Values:
    """Return the arrays of a nest by their paths in it."""
    arrays: Values = {}
    for path, value in keras.tree.flatten_with_path(results):
        if value is not None:
            arrays["/".join(map(str, path)) or "result"] = tf.convert_to_tensor(value).numpy()  # Densifies slices.
    return arrays


def _perturbed(state: State) -> list[Any]:
    """Return the state with each weight changed by about one rounding; scalars and integers are unchanged."""
    random = np.random.default_rng(0)
    perturbed = []
    for value in state:
        rounding = ROUNDING_UNITS.get(value.dtype.name)
        if rounding is not None and value.shape.rank:
            signs = tf.constant(random.choice([-rounding, rounding], value.shape), tf.float64)
            value = tf.cast(tf.cast(value, tf.float64) * (1 + signs), value.dtype)
        perturbed.append(value)
    return perturbed


def _differences(
    kind: str, got: Values, want: Values, noisy: Sequence[Values], expected: float, floor: float = ABSOLUTE_FLOOR
) -> Iterator[Difference]:
    """Yield the differences between `got` and `want`, with limits from the `noisy` runs of the original."""
    for name, value in want.items():
        noise = max(difference(values[name], value, floor) for values in noisy)
        limit = max(expected, NOISE_FACTOR * noise) if math.isfinite(noise) else expected
        yield Difference(kind, name, difference(got[name], value, floor), noise, limit)


# Gradients ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Shared:
    """Gradients that are tensors of both graphs.

    Attributes:
        graph: Graph of the original step.
        seeds: Constants that its gradients start from.
        names: Names of the variables of the gradients.
        original: Tensors of the original graph.
        rewritten: Tensors of the rewritten graph.
        not_shared: (name, reason) of gradients that are not a tensor of both graphs.
    """

    graph: Graph
    seeds: list[Tensor] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    original: list[Tensor] = dataclasses.field(default_factory=list)
    rewritten: list[Tensor] = dataclasses.field(default_factory=list)
    not_shared: tuple[tuple[str, str], ...] = ()


def _shared_gradients(original: Any, analysis: GraphAnalysis, rewritten: Graph) -> _Shared:
    """Return the gradients that are tensors of both graphs.

    They are located in the canonical graph. Its names are those of the traced graph, except for inlined and bypassed
    ops. The rewritten graph maps its names to their replacements.
    """
    graph = from_concrete_function(original)
    shared = _Shared(graph, gradient_seed_constants(graph))
    tensors = gradients(analysis.graph, analysis.order, analysis.backward)
    names = _distinct([_updated_weight(tensor, analysis, original) or tensor.name for tensor in tensors])
    bypassed: dict[Tensor, list[str]] = {}
    for old, new in analysis.graph.aliases.items():
        bypassed.setdefault(new, []).append(old)
    for name, tensor in zip(names, tensors, strict=True):
        candidates = (lookup(shared.graph, alias) for alias in (tensor.name, *bypassed.get(tensor, ())))
        original_tensor = next(filter(None, candidates), None)
        rewritten_tensor = lookup(rewritten, tensor.name)
        if original_tensor is None:
            shared.not_shared += ((name, "the original step computes it inside a called function"),)
        elif rewritten_tensor is None:
            shared.not_shared += ((name, "the rewritten step computes it only inside a loop"),)
        else:
            shared.names.append(name)
            shared.original.append(original_tensor)
            shared.rewritten.append(rewritten_tensor)
    return shared


def _updated_weight(gradient: Tensor, analysis: GraphAnalysis, original: Any) -> str | None:
    """Return the name of the nearest weight of the gradient's shape downstream; `None` if there is none."""
    weights = {id(v.handle): (v.name.removesuffix(":0"), tuple(v.shape)) for v in original.trainable_variables}
    captured = zip(reversed(analysis.graph.inputs), reversed(original.captured_inputs), strict=False)
    held = {tensor: weights[id(handle)] for tensor, handle in captured if id(handle) in weights}
    seen, queue = {gradient.node}, collections.deque([gradient])
    while queue:
        for consumer, _ in analysis.consumers.get(queue.popleft(), ()):
            if consumer in seen:
                continue
            seen.add(consumer)
            reached = (held[resource] for resource in consumer.inputs if resource in held)
            name = next((name for name, shape in reached if shape == gradient.shape), None)
            if name is not None:
                return name
            queue.extend(consumer.out(index) for index in range(len(consumer.outputs)))
            queue.extend(t for t in consumer.inputs if t.dtype == tf.resource)  # Slots are assigned, then read.
    return None


# Dtypes and random ops ---------------------------------------------------------------------------------------------


def _coarsest(analysis: GraphAnalysis) -> str:
    """Return the floating dtype with the fewest digits among computed images, or among all tensors without images."""
    dtypes: dict[bool, set[str]] = {True: set(), False: set()}
    for node in analysis.order:
        for dtype, shape in node.outputs if node in analysis.data and node.op != "Placeholder" else ():
            if dtype.name in ROUNDING_LIMITS:
                dtypes[shape is not None and len(shape) > 2].add(dtype.name)
    return max(dtypes[True] or dtypes[False] or {"float32"}, key=ROUNDING_LIMITS.__getitem__)


def _expected(dtype: str, flat: Sequence[Any]) -> float:
    """Return the difference that rounding explains for arguments of this size; float16 is summed in float32."""
    terms = max((int(tf.size(value)) for value in flat), default=1)
    unit = min(ROUNDING_UNITS[dtype], ROUNDING_UNITS["float32"])
    return max(ROUNDING_LIMITS[dtype], SUM_ERROR_FACTOR * unit * math.sqrt(terms))


def _random_ops(analysis: GraphAnalysis) -> tuple[str, ...]:
    """Return the names of random ops without a seed in a variable, whose numbers cannot be reproduced."""
    return tuple(node.name for node in analysis.order if node.stateful and is_random(node))
