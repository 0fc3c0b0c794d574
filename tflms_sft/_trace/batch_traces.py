"""Traces of a step for a batch and for a micro-batch."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from rewriters.errors import PipelineError, RewriteError
from rewriters.pipelining.step_partition import EffectHints
from rewriters.step_importer import specialise_shapes
from tflms_sft._params.pipeline_params import PipelineParams
from tflms_sft._trace.effect_recorder import watched_effects
from tflms_sft._trace.layer_names import LayerRecord
from tflms_sft._trace.step_tracing import arguments_of, batch_of, is_concrete, spec_of, trace_step

_OPEN_BATCH = (
    "The batch size of the step is unknown, but {} micro-batches need a known one. Pass the `tf.function` with example "
    "arguments to `rewrite`, or use `micro_batches=1`."
)


@dataclasses.dataclass
class BatchTraces:
    """Traces of a step for the batch and for one micro-batch.

    Attributes:
        whole: Trace for the batch.
        micro: Trace for a micro-batch; `whole` if there is one micro-batch, or if the batch size is open.
        record: Layers of `micro`.
        hints: Owners of its counters.
        batched: Positions of the arguments that have the batch axis.
        batch: Samples of the batch, if known.
        sizes: Leading sizes of the open arguments of a specialised step, by position.
        known: Traces for the batch that the plan is made for, where there are several micro-batches and later batches
            may have another size; else `None`. Ops keep their names.
        count: Number of micro-batches.
    """

    whole: Any
    micro: Any
    record: LayerRecord
    hints: EffectHints
    batched: list[int]
    batch: int | None = None
    sizes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    known: BatchTraces | None = None
    count: int = 1


def trace(step: Any, params: PipelineParams, args: Any, kwargs: Any, batch: int | None = None) -> BatchTraces:
    """Trace a step for the batch, which has `batch` samples where the arguments leave that open, and for a micro-batch.

    Raises:
        PipelineError: If no argument has a batch axis.
        ValueError: If the number of micro-batches does not divide the batch size.
    """
    count = params.total_micro_batches
    with watched_effects() as hints:
        whole, record = trace_step(step, args, kwargs)
    arguments = arguments_of(whole)
    leading = [t.shape[0] if t.shape.rank else 0 for t in arguments]
    declared = None if params.batched is None else _positions(params.batched, arguments)
    unknown = [p for p, size in enumerate(leading) if size is None and (declared is None or p in declared)]
    if count == 1:
        size = batch_of((args, kwargs)) or max((size for size in leading if size is not None), default=0)
        batched = unknown or [p for p, leading_size in enumerate(leading) if leading_size == size]
        batched = batched or list(range(len(arguments)))
        return BatchTraces(whole, whole, record, hints.of(whole.graph), batched, batch_of((args, kwargs)))
    if unknown:
        examples = _leading(whole, args, kwargs)
        batch = batch or _given(examples, unknown)
        if batch is None:
            raise PipelineError(_OPEN_BATCH.format(count))
        require_even(params, batch)
        open_step = BatchTraces(whole, whole, record, hints.of(whole.graph), unknown, batch, count=count)
        known = _of_known_batch(open_step, _given_beside(examples, leading, unknown))
        return dataclasses.replace(open_step, known=known)
    if is_concrete(step) or getattr(step, "input_signature", None) is not None:
        raise PipelineError(
            f"`step` is traced for a fixed batch size, but {count} micro-batches need a trace for a micro-batch. Pass "
            "the `tf.function` with example arguments and no `input_signature`, or trace it with a batch of `None`."
        )
    specs = tf.nest.map_structure(spec_of, (args, kwargs))
    batch = batch_of(specs) if declared is None else _size_of(declared, leading)
    if batch is None:
        raise PipelineError("Micro-batches need an argument of the step with a batch axis. Use `micro_batches=1`.")
    require_even(params, batch)
    return _with_part(step, whole, params, _of_size(whole, specs, batch, batch // count, declared), declared, batch)


def require_even(params: PipelineParams, batch: int) -> None:
    """Refuse a batch size, of the batch that the plan is made for, that the number of micro-batches does not divide.

    Raises:
        ValueError: With both numbers.
    """
    count = params.total_micro_batches
    if batch % count:
        raise ValueError(
            f"`micro_batches` times `data_replicas` must divide the batch size. Received: a batch of {batch}, "
            f"micro_batches={params.micro_batches}, data_replicas={params.data_replicas}. Use batches whose size is a "
            f"multiple of {count}; only later batches of a step that is traced for any size (`None`), as by `fit`, may "
            "have another size."
        )


def _of_size(concrete_fn: Any, specs: Any, batch: int | None, size: int, declared: Sequence[int] | None) -> Any:
    """Return specifications in which the first axis of batches, by default all that are as long, has another size."""
    positions = itertools.count()

    def of_size(spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec):
            return spec
        position = next(positions)
        if spec.shape.rank and spec.shape[0] == batch and (declared is None or position in declared):
            return tf.TensorSpec((size, *spec.shape[1:]), spec.dtype, spec.name)
        return spec

    args, kwargs = specs
    args = tf.nest.map_structure(of_size, args)
    return args, {name: tf.nest.map_structure(of_size, kwargs[name]) for name in _in_order(concrete_fn, kwargs)}


def _given(examples: Sequence[int | None], positions: Sequence[int]) -> int | None:
    """Return the batch size of example arguments for a step of any batch size, `None` if they disagree."""
    sizes = {examples[p] if p < len(examples) else None for p in positions}
    return sizes.pop() if len(sizes) == 1 else None


def _given_beside(examples: Sequence[int | None], leading: Sequence[Any], batched: Sequence[int]) -> dict[int, int]:
    """Return the leading sizes of example arguments, by position, that are open and no batches, such as tables."""
    pairs = enumerate(zip(leading, examples, strict=False))
    return {p: size for p, (traced, size) in pairs if traced is None and p not in batched and size is not None}


def _leading(concrete_fn: Any, args: Any, kwargs: Any) -> list[int | None]:
    """Return the leading sizes of example arguments in the order of the step's parameters; `None` for scalars."""
    named = [kwargs[name] for name in _in_order(concrete_fn, kwargs)]
    shapes = [tf.TensorShape(leaf.shape) for leaf in tf.nest.flatten((args, named)) if hasattr(leaf, "shape")]
    return [shape[0] if shape.rank else None for shape in shapes]


def _in_order(concrete_fn: Any, kwargs: Any) -> list[str]:
    """Return the names of keyword arguments in the order of the function's parameters."""
    order = [name for name in concrete_fn.function_type.parameters if name in kwargs]
    return [*order, *sorted(kwargs.keys() - order)]


def _of_known_batch(traces: BatchTraces, beside: Mapping[int, int]) -> BatchTraces:
    """Specialise an open step to the batch that the plan is made for.

    It is not traced again, because Python code may do something else for a known batch size: Keras weighs the losses of
    several outputs by it. Open arguments without a batch axis get the leading sizes in `beside`.
    """
    assert traces.batch is not None
    arguments, samples = arguments_of(traces.whole), traces.batch // traces.count
    whole = {p: traces.batch for p, t in enumerate(arguments) if t.shape.rank and t.shape[0] is None} | dict(beside)
    micro = {**whole, **dict.fromkeys(traces.batched, samples)}
    specialised = []
    for sizes, number in ((whole, traces.batch), (micro, samples)):
        with _explain_retrace_errors(number):
            specialised.append(
                specialise_shapes(traces.whole, {p: (size, *arguments[p].shape[1:]) for p, size in sizes.items()})
            )
    return dataclasses.replace(traces, whole=specialised[0], micro=specialised[1], sizes=whole)


def settled(traces: BatchTraces, least: int = 24) -> BatchTraces:
    """Specialise the open axes of a step, except the batch axis, so that numbers computed from them are known.

    Args:
        traces: Traces of the step; returned unchanged if the step is invalid for these sizes.
        least: Least of these sizes; the default can be halved by several poolings.
    """
    arguments = [t for t in arguments_of(traces.micro) if t.shape.rank]
    if not any(None in t.shape[1:] for t in arguments):
        return traces
    of_batch = {t.shape[0] for t in (*arguments, *arguments_of(traces.whole)) if t.shape.rank}
    lengths = (size for size in itertools.count(least, 8) if size not in of_batch)
    sizes = list(itertools.islice(lengths, max(t.shape.rank for t in arguments)))
    specialised = []
    for function in (traces.whole, traces.micro):
        shapes = {}
        for position, tensor in enumerate(arguments_of(function)):
            if tensor.shape.rank:
                pairs = zip(tensor.shape[1:], sizes, strict=False)
                shapes[position] = [tensor.shape[0], *(known or size for known, size in pairs)]
        with contextlib.suppress(ValueError, TypeError, tf.errors.InvalidArgumentError):
            specialised.append(specialise_shapes(function, shapes))
    return dataclasses.replace(traces, whole=specialised[0], micro=specialised[1]) if len(specialised) == 2 else traces


@contextlib.contextmanager
def _explain_retrace_errors(samples: int) -> Iterator[None]:
    """Explain errors of a step that cannot be traced for another number of samples.

    Raises:
        PipelineError: If tracing fails.
    """
    try:
        yield
    except RewriteError:
        raise
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise PipelineError(
            f"The step cannot be traced for {samples} samples, which shows the values that depend on the batch size. "
            "Pass tensors of the length of the batch as arguments of the step, or use `micro_batches=1`. "
            f"TensorFlow's error: {error}"
        ) from error


def _with_part(
    step: Any, whole: Any, params: PipelineParams, part: Any, declared: Sequence[int] | None, batch: int
) -> BatchTraces:
    """Return traces for the batch and, by the specifications `part`, for a micro-batch."""
    count = params.total_micro_batches
    with watched_effects() as hints, _explain_retrace_errors(batch // count):
        micro, record = trace_step(step, *part)
    other_op = _first_other_op(micro, whole)
    if other_op is not None:
        raise PipelineError(
            f"Op `{other_op}` of the step differs for a micro-batch, so Python code of the step depends on the batch "
            "size. Make it independent of the batch size, or use `micro_batches=1`."
        )
    pairs = zip(arguments_of(whole), arguments_of(micro), strict=True)
    batched = [p for p, (a, b) in enumerate(pairs) if b.shape.rank and a.shape[0] != b.shape[0]]
    if declared is not None and batched != list(declared):
        raise PipelineError(
            "`batched` needs example arguments in the order of the step's signature. Received: "
            f"batched={params.batched!r}. Pass the arguments to `rewrite` without keywords."
        )
    return BatchTraces(whole, micro, record, hints.of(micro.graph), batched, batch, count=count)


def _positions(batched: Sequence[Any], inputs: Sequence[Any]) -> list[int]:
    """Return the positions of the arguments that the user names.

    Raises:
        ValueError: If there is no such argument, or it has no axes.
    """
    names = [t.op.name for t in inputs]
    positions = {names.index(item) if item in names else item for item in batched}
    for item in positions:
        if not isinstance(item, int) or not 0 <= item < len(names) or not inputs[item].shape.rank:
            raise ValueError(
                "`batched` must name arguments of the step that have axes, or their positions. Received: "
                f"batched={list(batched)!r}, of which {item!r} is unknown or has no axes. The arguments are {names}, "
                f"at positions 0 to {len(names) - 1}."
            )
    return sorted(positions)


def _size_of(positions: Sequence[int], leading: Sequence[Any]) -> Any:
    """Return the batch size of the arguments at some positions.

    Raises:
        ValueError: If their sizes differ.
    """
    sizes = {position: leading[position] for position in positions}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "`batched` must name arguments of one leading size, that of the batch. Received, by position: leading "
            f"sizes {sizes}."
        )
    return next(iter(sizes.values()))


def _first_other_op(one: Any, other: Any) -> str | None:
    """Return the name of an op before the gradients that traces for two numbers of samples do not share, or `None`."""
    first, second = _forward_ops(one), _forward_ops(other)
    different = (name for name in (*first, *second) if first.get(name) != second.get(name))
    return next(different, None)


def _forward_ops(concrete_fn: Any) -> dict[str, tuple[Any, ...]]:
    """Return type and operands of each op that depends on arguments or reads a variable, but no gradient, by name.

    Captured tensors are told apart by identity. Other ops are left out: the type of zeros depends on their size.
    """
    captured = {inner.name: id(outer) for outer, inner in concrete_fn.graph.captures}
    of_arguments = {tensor.op.name for tensor in arguments_of(concrete_fn)}
    of_gradients: set[str] = set()
    ops: dict[str, tuple[Any, ...]] = {}
    for operation in concrete_fn.graph.get_operations():
        operands = {tensor.op.name for tensor in operation.inputs}
        if "gradient_tape/" in operation.name or not operands.isdisjoint(of_gradients):
            of_gradients.add(operation.name)
            continue
        if not operands.isdisjoint(of_arguments):
            of_arguments.add(operation.name)
        if operation.name in of_arguments or any(tensor.name in captured for tensor in operation.inputs):
            ops[operation.name] = operation.type, tuple(captured.get(t.name, t.name) for t in operation.inputs)
    return ops
