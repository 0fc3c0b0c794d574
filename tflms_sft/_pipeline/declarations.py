"""Facts that a user declares about a step (`per_sample`, `reductions`), and the run that confirms them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import PipelineError
from rewriters.ir import tf_internals
from rewriters.ir.graph import Node
from rewriters.pipelining.micro_batch_reduction import MicroBatchReduction
from rewriters.step_importer import StepImporter
from tflms_sft._trace.layer_names import LayerRecord
from tflms_sft._util.text import nearest

_REDUCTIONS = {
    "mean": MicroBatchReduction.MEAN,
    "sum": MicroBatchReduction.SUM,
    "rows": MicroBatchReduction.CONCAT,
}
_TOLERANCES = {2: 5e-2, 4: 1e-4, 8: 1e-9}
"""Relative error that rounding may explain, by the bytes of a real number."""

_OPEN_AXIS_SIZE = 24
"""Entries of an open axis in the checked step that is no batch axis; several poolings halve it."""


def declared_ops(analysis: GraphAnalysis, record: LayerRecord, names: Sequence[str]) -> set[Node]:
    """Return the ops of layers, or the ops, that the user declares to keep samples apart, with their gradient ops.

    Raises:
        PipelineError: For a name without an op.
    """
    ops: set[Node] = set()
    for name in names:
        group = {
            node
            for node in analysis.order
            if node.name == name or ((call := record.call_of(node.name)) is not None and call.layer == name)
        }
        if not group:
            known = list(dict.fromkeys(call.layer for call in record.calls))
            raise PipelineError(
                f"`per_sample` must name layers or ops of the step. Received: per_sample={names!r}, of which {name!r} "
                f"is unknown. {nearest(name, known, [node.name for node in analysis.order])}"
            )
        ops |= group
    return ops


def declared_reductions(concrete_fn: Any, reductions: Mapping[str, str]) -> dict[int, MicroBatchReduction]:
    """Return the reductions that the user declares, by output position.

    Raises:
        PipelineError: For a name without an output.
    """
    names = list(_output_names(concrete_fn.structured_outputs)) if reductions else []
    unknown = [name for name in reductions if name not in names]
    if unknown or (reductions and len(names) != len(concrete_fn.outputs)):
        raise PipelineError(
            f"`reductions` must name outputs of the step: {names}. Received: reductions={dict(reductions)!r}, of which "
            f"{unknown or list(reductions)} cannot be found."
        )
    return {names.index(name): _REDUCTIONS[how] for name, how in reductions.items()}


def _output_names(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the keys and positions of the tensors in a structure, joined by slashes, in the order of `tf.nest`."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _output_names(value[key], (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from _output_names(item, (*path, str(position)))
    elif value is not None:
        yield "/".join(path) or "0"


def check_declarations(original: Any, importer: StepImporter, sizes: Mapping[int, int]) -> None:
    """Run the original step and the pipeline once on random data, and compare outputs and variables.

    All variables are put back. `sizes` are the leading sizes of arguments whose first axis is open, by position.

    Raises:
        PipelineError: If the results differ by more than rounding explains, or if they cannot be compared: the original
            step gives other results in a second run, or results that are not finite.
    """
    with tf.init_scope():
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in original.inputs[: importer.num_arguments]]
        pipeline = tf.function(lambda *tensors: importer(tensors), input_signature=specs, autograph=False)

        def original_run() -> Any:
            return _call_flat(original, data)

        data = [_random_data(spec, sizes.get(position)) for position, spec in enumerate(specs)]
        variables = list(tf_internals.living_variables(original))
        before = [np.array(variable) for variable in variables]
        runs = []
        for run in (original_run, original_run, lambda: pipeline(*data)):
            try:
                runs.append(_flat_outputs(run()) + [np.array(variable) for variable in variables])
            finally:
                for variable, value in zip(variables, before, strict=True):
                    variable.assign(value)
    start: list[Any] = [None] * (len(runs[0]) - len(before)) + before
    if not all(np.all(np.isfinite(value)) for value in runs[0] if value.dtype.kind in "fc"):
        raise PipelineError(_incomparable("gives NaN or infinity on random data between 0 and 1"))
    if _largest_difference(runs[0], runs[1], start) is not None:
        raise PipelineError(_incomparable("gives other results in a second run, as with random numbers"))
    difference = _largest_difference(runs[0], runs[2], start)
    if difference is not None:
        position, error = difference
        outputs_count = len(runs[0]) - len(before)
        is_output = position < outputs_count
        what = f"output {position}" if is_output else f"variable {variables[position - outputs_count].name!r}"
        raise PipelineError(
            f"With micro-batches the step has other results: on random data {what} differs by {error:.2g} of its "
            "largest value. Correct `per_sample` or `reductions`, or use `micro_batches=1`."
        )


def _incomparable(reason: str) -> str:
    return (
        f"`per_sample` and `reductions` cannot be confirmed, because the original step {reason}. Leave them out, or "
        "use `micro_batches=1`."
    )


def _call_flat(concrete_fn: Any, data: Sequence[tf.Tensor]) -> Any:
    """Call a concrete function with the tensors of its arguments in order."""
    tensors = iter(data)
    args, kwargs = concrete_fn.structured_input_signature

    def fill(structure: Any) -> Any:
        return tf.nest.map_structure(lambda leaf: next(tensors) if isinstance(leaf, tf.TensorSpec) else leaf, structure)

    args = fill(args)
    return concrete_fn(*args, **{n: fill(kwargs[n]) for n in concrete_fn.function_type.parameters if n in kwargs})


def _flat_outputs(outputs: Any) -> list[Any]:
    return [np.array(t) for t in tf.nest.flatten(outputs, expand_composites=True) if t is not None]


def _random_data(spec: tf.TensorSpec, leading: int | None) -> tf.Tensor:
    """Return numbers between 0 and 1, of which few steps make NaN; zeros and ones for types that are not real."""
    shape = [_OPEN_AXIS_SIZE if size is None else size for size in spec.shape]
    shape[:1] = [leading] if leading is not None else shape[:1]
    generator = np.random.default_rng(0)
    if spec.dtype.is_floating or spec.dtype.is_complex:
        return tf.cast(generator.uniform(size=shape), spec.dtype)
    if spec.dtype.is_integer or spec.dtype.is_bool:
        return tf.cast(generator.integers(0, 2, size=shape), spec.dtype)
    raise PipelineError(
        f"`per_sample` and `reductions` are checked on random numbers. Received: an argument of dtype "
        f"{spec.dtype.name}. Pass numbers, or leave out `per_sample` and `reductions`."
    )


def _largest_difference(
    expected: Sequence[Any], actual: Sequence[Any], start: Sequence[Any]
) -> tuple[int, float] | None:
    """Return the position and relative error of the largest difference that rounding does not explain.

    A variable is compared by its change, relative to the largest change.
    """
    worst: tuple[int, float] | None = None
    for position, (want, got, initial) in enumerate(zip(expected, actual, start, strict=True)):
        if want.dtype.kind not in "fciub" and want.dtype.name != "bfloat16":
            continue
        if want.shape != got.shape:
            return position, float("inf")
        kind = complex if want.dtype.kind == "c" else float
        origin = np.zeros(want.shape) if initial is None else initial.astype(kind)
        deltas = want.astype(kind) - origin, got.astype(kind) - origin
        scale = float(np.max(np.abs(deltas[0]), initial=0.0))
        rounding = float(np.max(np.abs(want.astype(kind)), initial=0.0)) * 1e-6 if initial is not None else 0.0
        real_bytes = want.dtype.itemsize // (2 if want.dtype.kind == "c" else 1)
        allowed = _TOLERANCES.get(real_bytes, 0.0) if want.dtype.kind not in "iub" else 0.0
        error = float(np.max(np.abs(deltas[0] - deltas[1]), initial=0.0))
        if want.dtype == np.float64:
            rounding *= 1e-8
        relative = error / scale if scale else error
        if not error <= allowed * scale + rounding and (worst is None or relative > worst[1]):
            worst = position, relative
    return worst
