"""A step traced for a batch and for a part of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from rewriters.errors import PipelineError, RewriteError
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.pipelining.step_partition import EffectHints
from rewriters.step_importer import specialise_shapes
from tflms_sft._params.pipeline_params import PipelineParams
from tflms_sft._trace.effect_recorder import watched_effects
from tflms_sft._trace.layer_names import LayerRecord
from tflms_sft._trace.step_tracing import batch_of, is_concrete, spec_of, trace_step

_PRIME_PARTS = 509
"""Parts of a large batch, by which numbers are seen that go with the size of small ones in another way: a prime, so
that no quotient of sizes comes out even by chance."""

_EVEN_PARTS = 510
"""The same, even, for what asks whether the number of samples is odd."""

_SIZES = ops_with(Trait.SHAPE_QUERY) - {"Rank"}
_TURNS = ops_with(Trait.THRESHOLD)

_LARGEST, _MOST_NUMBERS = 1 << 20, 4
"""Numbers that a step compares sizes with: below which it is traced for them, and for how many."""


@dataclasses.dataclass
class BatchTraces:
    """A step as it is and as it is for one micro-batch.

    Attributes:
        whole: The step.
        micro: The same for a micro-batch; the step itself if there is one only, or if its batch is unknown.
        record: Layers of `micro`.
        hints: What is known of its counters.
        batched: Positions of the arguments that have the batch axis.
        batch: Samples of a batch, if that is known.
        sizes: Leading sizes that an open step was given, by position: of batches, and of what else is open.
        known: The same for a batch of a known size, if that of the step is open: of `batch` if that is known. Their
            operations have the same names.
        others: The same for batches of `_PRIME_PARTS` and `_EVEN_PARTS`, if the size is open and not known.
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
    others: tuple[BatchTraces, ...] = ()
    count: int = 1

    @property
    def is_open(self) -> bool:
        """Whether there are several micro-batches, and batches that they do not cut evenly may come too."""
        return self.count > 1 and self.micro is self.whole


def trace(step: Any, params: PipelineParams, args: Any, kwargs: Any, batch: int | None = None) -> BatchTraces:
    """Trace a step for the whole batch, and for a micro-batch.

    Args:
        step: As for `rewrite`.
        params: What is to be done with it.
        args: Example arguments.
        kwargs: The same by keyword.
        batch: Samples of a batch, where the arguments leave it open.

    Raises:
        PipelineError: If there is no batch to cut.
        ValueError: If it cannot be cut evenly.
    """
    count = params.total_micro_batches
    with watched_effects() as hints:
        whole, record = trace_step(step, args, kwargs)
    arguments = _arguments(whole)
    leading = [t.shape[0] if t.shape.rank else 0 for t in arguments]
    told = None if params.batched is None else _positions(params.batched, arguments)
    unknown = [p for p, size in enumerate(leading) if size is None and (told is None or p in told)]
    if count == 1:
        size = batch_of((args, kwargs)) or max((found for found in leading if found is not None), default=0)
        batched = unknown or [p for p, found in enumerate(leading) if found == size] or list(range(len(arguments)))
        return BatchTraces(whole, whole, record, hints.of(whole.graph), batched, batch_of((args, kwargs)))
    if unknown:
        open_step = BatchTraces(whole, whole, record, hints.of(whole.graph), unknown, count=count)
        examples = _leading(whole, args, kwargs)
        open_step.batch = batch = batch or _given(examples, unknown)
        if batch is not None:
            require_even(params, batch)
        samples = batch // count if batch is not None else _some_samples(count, leading)
        beside = _given_beside(examples, leading, unknown)
        known = _of_known_batch(open_step, samples, beside)
        others = _of_other_batches(open_step, samples, beside) if batch is None else ()
        return dataclasses.replace(open_step, known=known, others=others)
    if is_concrete(step) or getattr(step, "input_signature", None) is not None:
        raise PipelineError(
            f"`step` is traced for a fixed batch, and {count} micro-batches need it traced for a part of one. Pass the "
            "`tf.function` with example arguments and no `input_signature`, or trace it with a batch of `None`."
        )
    specs = tf.nest.map_structure(spec_of, (args, kwargs))
    batch = batch_of(specs) if told is None else _size_of(told, leading)
    if batch is None:
        raise PipelineError("No argument of the step has a batch axis, so there are no micro-batches. Use 1.")
    require_even(params, batch)
    return _with_part(step, whole, params, _of_size(whole, specs, batch, batch // count, told), told, batch)


def require_even(params: PipelineParams, batch: int) -> None:
    """Refuse a batch that micro-batches do not cut evenly where it is the one that a plan is made for.

    Raises:
        ValueError: With both numbers.
    """
    count = params.total_micro_batches
    if batch % count:
        raise ValueError(
            f"`micro_batches` must cut the batch evenly: {batch} samples do not make {count} micro-batches. "
            f"Received: micro_batches={params.micro_batches}, data_replicas={params.data_replicas}. Use batches whose "
            f"size is a multiple of {count}; under `fit` a `batch_size` that is one, and no larger than the number of "
            "samples. Only a later batch may have another size, if the step is traced for any (`None`), as by `fit`."
        )


def _arguments(concrete_fn: Any) -> Any:
    """What it is called with."""
    return concrete_fn.inputs[: len(concrete_fn.inputs) - len(concrete_fn.captured_inputs)]


def _of_size(concrete_fn: Any, specs: Any, batch: int | None, size: int, told: Sequence[int] | None) -> Any:
    """Specifications with another size in the place of that of the batch, or of an open one, of arguments that have it.

    With `told` it is that of those alone.
    """
    positions = itertools.count()

    def of_size(spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec):
            return spec
        position = next(positions)
        if spec.shape.rank and spec.shape[0] == batch and (told is None or position in told):
            return tf.TensorSpec((size, *spec.shape[1:]), spec.dtype, spec.name)
        return spec

    args, kwargs = specs
    args = tf.nest.map_structure(of_size, args)
    return args, {name: tf.nest.map_structure(of_size, kwargs[name]) for name in _in_order(concrete_fn, kwargs)}


def _given(examples: Sequence[int | None], positions: Sequence[int]) -> int | None:
    """The size of the batch of example arguments for a step that takes any, if they have one."""
    sizes = {examples[p] if p < len(examples) else None for p in positions}
    return sizes.pop() if len(sizes) == 1 else None


def _given_beside(examples: Sequence[int | None], leading: Sequence[Any], batched: Sequence[int]) -> dict[int, int]:
    """The sizes of example arguments that are open and no batches, such as tables."""
    pairs = enumerate(zip(leading, examples, strict=False))
    return {p: size for p, (traced, size) in pairs if traced is None and p not in batched and size is not None}


def _leading(concrete_fn: Any, args: Any, kwargs: Any) -> list[int | None]:
    """The leading sizes of example arguments, in the order in which it takes them; `None` of what has none."""
    named = [kwargs[name] for name in _in_order(concrete_fn, kwargs)]
    shapes = [tf.TensorShape(leaf.shape) for leaf in tf.nest.flatten((args, named)) if hasattr(leaf, "shape")]
    return [shape[0] if shape.rank else None for shape in shapes]


def _in_order(concrete_fn: Any, kwargs: Any) -> list[str]:
    """Names of arguments in the order in which a function takes them."""
    order = [name for name in concrete_fn.function_type.parameters if name in kwargs]
    return [*order, *sorted(kwargs.keys() - order)]


def _some_samples(count: int, leading: Sequence[Any]) -> int:
    """Samples of a micro-batch of a size that no other argument has, nor the batch: what they tell goes for any."""
    return next(size for size in itertools.count(2) if size not in leading and size * count not in leading)


def _of_known_batch(traces: BatchTraces, samples: int, beside: Mapping[int, int]) -> BatchTraces:
    """An open step for so many samples in a micro-batch.

    It is not traced again: where Python code knows the size of the batch it may do something else, as Keras weighs the
    losses of several outputs by it.

    Args:
        traces: The open step.
        samples: Samples of a micro-batch.
        beside: Sizes of what is open and no batch; what has none there is taken to be as long as the batch.
    """
    leading = [t.shape[0] if t.shape.rank else 0 for t in _arguments(traces.whole)]
    whole = {p: samples * traces.count for p, size in enumerate(leading) if size is None} | dict(beside)
    micro = {**whole, **dict.fromkeys(traces.batched, samples)}
    made = []
    arguments = _arguments(traces.whole)
    for sizes, number in ((whole, samples * traces.count), (micro, samples)):
        with _told_if_for_another(number):
            made.append(
                specialise_shapes(traces.whole, {p: (size, *arguments[p].shape[1:]) for p, size in sizes.items()})
            )
    return dataclasses.replace(traces, whole=made[0], micro=made[1], batch=samples * traces.count, sizes=whole)


def _of_other_batches(traces: BatchTraces, samples: int, beside: Mapping[int, int]) -> tuple[BatchTraces, ...]:
    """The step for batches by which numbers are told that go with the size of others in another way.

    A large one, and one of single samples and of numbers that the step itself compares sizes with, if it is a step for
    such: what squeezes axes of size 1 may be none for these.

    Args:
        traces: The open step.
        samples: Samples of a micro-batch that it is traced for.
        beside: As for `_of_known_batch`.
    """
    prime_to_it = next(size for size in itertools.count(samples + 1) if math.gcd(size, samples) == 1)
    leading = [t.shape[0] if t.shape.rank else 0 for t in _arguments(traces.whole)]
    tables = [p for p, size in enumerate(leading) if size is None and p not in {*traces.batched, *beside}]

    def of_batch(count: int, size: int) -> BatchTraces:
        """With tables that are longer than a micro-batch and not as long as the batch."""
        between = dict.fromkeys(tables, size + 2) | dict(beside)
        return _of_known_batch(dataclasses.replace(traces, count=count), size, between)

    found = [of_batch(_PRIME_PARTS, prime_to_it)]
    named = _named_numbers(traces.whole.graph)
    pairs = [(_EVEN_PARTS, 1), *((_PRIME_PARTS, n) for n in named), *((_EVEN_PARTS, n // 2) for n in named)]
    for count, size in pairs:
        with contextlib.suppress(PipelineError):
            found.append(of_batch(count, size))
    return tuple(found)


def settled(traces: BatchTraces, least: int = 24) -> BatchTraces:
    """A step with a size for each axis that is open beside that of the batch, to know what is computed with it.

    Args:
        traces: The step; it is returned as it is, if it is none for these sizes.
        least: The least of them; by default one that several poolings halve.
    """
    arguments = [t for t in _arguments(traces.micro) if t.shape.rank]
    if not any(None in t.shape[1:] for t in arguments):
        return traces
    of_batch = {t.shape[0] for t in (*arguments, *_arguments(traces.whole)) if t.shape.rank}
    lengths = (size for size in itertools.count(least, 8) if size not in of_batch)
    sizes = list(itertools.islice(lengths, max(t.shape.rank for t in arguments)))
    made = []
    for function in (traces.whole, traces.micro):
        shapes = {}
        for position, tensor in enumerate(_arguments(function)):
            if tensor.shape.rank:
                pairs = zip(tensor.shape[1:], sizes, strict=False)
                shapes[position] = [tensor.shape[0], *(own or size for own, size in pairs)]
        with contextlib.suppress(ValueError, TypeError, tf.errors.InvalidArgumentError):
            made.append(specialise_shapes(function, shapes))
    return dataclasses.replace(traces, whole=made[0], micro=made[1]) if len(made) == 2 else traces


def _named_numbers(graph: Any) -> list[int]:
    """Whole numbers that a graph compares sizes with, or divides them by, the least ones first."""
    sizes: set[str] = set()
    found: set[int] = set()
    for operation in graph.get_operations():
        of_sizes = [t for t in operation.inputs if t.name in sizes]
        constants = [t for t in operation.inputs if t.op.type == "Const"]
        if operation.type in _SIZES or (of_sizes and len(of_sizes) + len(constants) == len(operation.inputs)):
            sizes.update(t.name for t in operation.outputs)
            numbers = map(tf.get_static_value, constants if operation.type in _TURNS else ())
            single = (value for value in numbers if value is not None and value.ndim == 0 and value.dtype.kind in "iuf")
            found.update(int(value) for value in single if 2 <= value < _LARGEST and value == int(value))
    return sorted(found)[:_MOST_NUMBERS]


@contextlib.contextmanager
def _told_if_for_another(samples: int) -> Iterator[None]:
    """Say what it is if a step is for another number of samples only.

    Raises:
        PipelineError: If it cannot be traced for these.
    """
    try:
        yield
    except RewriteError:
        raise
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise PipelineError(
            f"To see what goes with the size of the batch, the step is traced for {samples} samples as well, and that "
            "fails. If it reads a tensor from outside that is as long as the batch, pass that as an argument, so that "
            f"it is cut too; or use `micro_batches=1`. TensorFlow says: {error}"
        ) from error


def _traced_again(step: Any, specs: Any, samples: int) -> Any:
    """The step for so many samples, with its layers.

    Raises:
        PipelineError: If it is for another number only.
    """
    with _told_if_for_another(samples):
        return trace_step(step, *specs)


def _with_part(
    step: Any, whole: Any, params: PipelineParams, part: Any, told: Sequence[int] | None, batch: int
) -> BatchTraces:
    """With the step as traced for a micro-batch, of which `part` are the specifications."""
    count = params.total_micro_batches
    with watched_effects() as hints:
        micro, record = _traced_again(step, part, batch // count)
    pairs = zip(_arguments(whole), _arguments(micro), strict=True)
    batched = [p for p, (a, b) in enumerate(pairs) if b.shape.rank and a.shape[0] != b.shape[0]]
    if told is not None and batched != list(told):
        raise PipelineError(
            "`batched` goes with arguments in the order in which the step takes them: pass no keywords to `rewrite`. "
            f"Received: batched={params.batched!r}."
        )
    return BatchTraces(whole, micro, record, hints.of(micro.graph), batched, batch, count=count)


def _positions(batched: Sequence[Any], inputs: Sequence[Any]) -> list[int]:
    """Positions of the arguments that a user names.

    Raises:
        ValueError: If there is no such argument, or it has no axes.
    """
    names = [t.op.name for t in inputs]
    found = {names.index(item) if item in names else item for item in batched}
    for item in found:
        if not isinstance(item, int) or not 0 <= item < len(names) or not inputs[item].shape.rank:
            raise ValueError(
                f"`batched` names {item!r}, which is no argument of the step that has axes. Received: "
                f"batched={list(batched)!r}. Its arguments are {names}, at the positions 0 to {len(names) - 1}."
            )
    return sorted(found)


def _size_of(positions: Sequence[int], leading: Sequence[Any]) -> Any:
    """The batch of arguments of which it is known which have one.

    Raises:
        ValueError: If their sizes differ.
    """
    sizes = {position: leading[position] for position in positions}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"`batched` names arguments of different leading sizes. Received, by position: {sizes}.")
    return next(iter(sizes.values()))
