"""A step traced for a batch and for a part of it, and what the two tell of each other."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.analysis import Analysis
from rewriters.combining import Growth
from rewriters.coupling import Samples, samples, unfit
from rewriters.errors import PipelineError
from rewriters.graph import LOOPS, Node, Tensor, ancestors
from rewriters.known import Known
from rewriters.micro import Hints, split_step
from rewriters.normalise import read
from rewriters.roles import is_seed
from rewriters.samples import Sizes
from rewriters.sizes import Size
from rewriters.values import Evaluator
from tflms_sft._compile import analyse
from tflms_sft._names import LayerRecord
from tflms_sft._pipeline_params import PipelineParams
from tflms_sft._text import shortened
from tflms_sft._watch import watched_effects

_MOST_NAMES = 4


@dataclasses.dataclass
class Traces:
    """A step as it is and as it is for one micro-batch.

    Attributes:
        whole: The step.
        micro: The same for a micro-batch; the step itself if there is one only, or if its batch is unknown.
        record: Layers of `micro`.
        hints: What is known of its counters.
        batched: Positions of the arguments that have the batch axis.
        batch: Samples of a batch, if that is known.
        known: The same for a batch of some known size, if that of the step is open.
        count: Number of micro-batches.
    """

    whole: Any
    micro: Any
    record: LayerRecord
    hints: Hints
    batched: list[int]
    batch: int | None = None
    known: Traces | None = None
    count: int = 1


def trace(step: Any, params: PipelineParams, args: Any, kwargs: Any) -> Traces:
    """Trace a step for the whole batch, and for a micro-batch.

    Raises:
        PipelineError: If there is no batch to cut.
        ValueError: If it cannot be cut evenly.
    """
    from tflms_sft._rewrite import batch_of, is_concrete, spec_of, traced_once

    count = params.total_micro_batches
    with watched_effects() as hints:
        whole, record = traced_once(step, args, kwargs)
    num_arguments = len(whole.inputs) - len(whole.captured_inputs)
    shapes = [t.shape for t in whole.inputs[:num_arguments]]
    leading = [shape[0] if shape.rank else 0 for shape in shapes]
    told = None if params.batched is None else _positions(params.batched, whole.inputs[:num_arguments])
    unknown = [p for p, size in enumerate(leading) if size is None and (told is None or p in told)]
    if count == 1:
        size = batch_of((args, kwargs)) or max((found for found in leading if found is not None), default=0)
        batched = unknown or [p for p, found in enumerate(leading) if found == size] or list(range(num_arguments))
        return Traces(whole, whole, record, hints.of(whole.graph), batched, batch_of((args, kwargs)))
    if unknown:
        found = Traces(whole, whole, record, hints.of(whole.graph), unknown, count=count)
        if not is_concrete(step):
            args, kwargs = tf.nest.map_structure(lambda value: _known(spec_of(value), count), (args, kwargs))
            known = params if told is None else dataclasses.replace(params, batched=unknown)
            found.known = trace(step, known, args, kwargs)
        return found
    if is_concrete(step):
        raise PipelineError(
            f"`step` is traced for a fixed batch, and {count} micro-batches need it traced for a part of one. Pass the "
            "`tf.function` with example arguments, or trace it with a batch of `None`."
        )
    flat = tf.nest.map_structure(spec_of, (args, kwargs))
    batch = batch_of(flat) if told is None else _size_of(told, leading)
    if batch is None:
        raise PipelineError("No argument of the step has a batch axis, so there are no micro-batches. Use 1.")
    if batch % count:
        raise ValueError(
            f"`micro_batches` must cut the batch evenly: {batch} samples do not make {count} micro-batches. "
            f"Received: micro_batches={params.micro_batches}, data_replicas={params.data_replicas}. Use batches whose "
            f"size is a multiple of {count}; leave out a last smaller one (`drop_remainder=True`)."
        )

    positions = itertools.count()

    def cut(spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec):
            return spec
        position = next(positions)
        if spec.shape.rank and spec.shape[0] == batch and (told is None or position in told):
            return tf.TensorSpec((batch // count, *spec.shape[1:]), spec.dtype, spec.name)
        return spec

    args, kwargs = tf.nest.map_structure(cut, flat)
    with watched_effects() as hints:
        micro, record = traced_once(step, args, kwargs)
    batched = [p for p, t in enumerate(micro.inputs[:num_arguments]) if t.shape.rank and t.shape[0] != leading[p]]
    if told is not None and batched != told:
        raise PipelineError(
            "`batched` goes with arguments in the order in which the step takes them: pass no keywords to `rewrite`. "
            f"Received: batched={params.batched!r}."
        )
    return Traces(whole, micro, record, hints.of(micro.graph), batched, batch, count=count)


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


def _known(spec: Any, count: int) -> Any:
    """A specification with some batch in the place of an open one: what two of them tell is the same for any."""
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] is None:
        return tf.TensorSpec((2 * count, *spec.shape[1:]), spec.dtype, spec.name)
    return spec


class BatchSizes:
    """Whether a tensor's size goes with that of the batch.

    Two traces of one function name what they make alike, so that sizes can be compared.
    """

    def __init__(self, traces: Traces, analysis: Analysis, for_tiles: bool = False) -> None:
        self._traces = traces
        self._sizes = analysis.evaluate.sizes
        self._whole: dict[str, Node] = {}
        self._evaluate = self._evaluate_whole = analysis.evaluate
        self._known = self._known_whole = Known(analysis.graph)
        if traces.micro is not traces.whole:
            graph = read(traces.whole, for_tiles)
            self._whole = graph.nodes
            self._evaluate_whole = Evaluator(graph)
            self._known_whole = Known(graph)
        self._outputs = _by_result(analysis, traces.whole)
        self._compared = analysis.graph.nodes, self._whole
        self._compared_outputs = _by_result(analysis, traces.micro), self._outputs
        if traces.known is not None:
            pair = traces.known.micro, traces.known.whole
            self._compared = tuple(read(one, for_tiles).nodes for one in pair)  # type: ignore[assignment]
            self._compared_outputs = tuple(_by_result(analysis, one) for one in pair)  # type: ignore[assignment]
        inputs = (traces.known or traces).micro.inputs
        self._samples = next((inputs[p].shape[0] for p in traces.batched if inputs[p].shape.rank), None)

    def counterpart(self, node: Node) -> Node | None:
        """The operation of that name in the step for the batch; a captured constant has a number for a name."""
        if not self._whole:
            return node
        if node.op == "Const" and node.name.isdigit() and node.name not in self._whole:
            captured = (n for n in self._whole.values() if n.op == "Const" and n.name.isdigit())
            return next((n for n in captured if n.attrs["value"] == node.attrs["value"]), None)
        return self._whole.get(node.name)

    def values(self, tensor: Tensor) -> tuple[Any, Any]:
        """The value of a tensor that is computed from constants and sizes, here and there."""
        whole = self.counterpart(tensor.node)
        here = _value(tensor, self._known, self._evaluate)
        if whole is None or tensor.index >= len(whole.outputs):
            return here, None
        return here, _value(whole.out(tensor.index), self._known_whole, self._evaluate_whole)

    def whole_shape(self, tensor: Tensor) -> Any:
        """The shape of a tensor in that trace."""
        other = self._whole.get(tensor.node.name)
        if tensor in self._outputs:
            return self._outputs[tensor]
        return tensor.shape if other is None or tensor.index >= len(other.outputs) else other.outputs[tensor.index][1]

    def has_axis(self, tensor: Tensor) -> bool:
        """Whether the first one is."""
        if not tensor.shape:
            return False
        whole = self.whole_shape(tensor)
        return tensor.shape[0] is None or (bool(whole) and tensor.shape[0] != whole[0])

    def growth(self, tensor: Tensor) -> Growth | None:
        """How much larger it is there; `None` if not just longer along some axes by the number of micro-batches."""
        if not self._compared[1]:
            return self._open_growth(tensor)
        here, whole = self._shapes(tensor)
        if here is None or whole is None or len(here) != len(whole):
            return None
        axes = []
        for axis, (size, of_batch) in enumerate(zip(here, whole, strict=True)):
            if size is None or of_batch is None or of_batch not in (size, size * self._traces.count):
                return None
            if of_batch != size:
                axes.append(axis)
        whole_rows = axes[:1] == [0] and self._samples and here[0] % self._samples == 0
        return Growth(tuple(axes), here[0] // self._samples if whole_rows else 0)

    def _shapes(self, tensor: Tensor) -> tuple[Any, Any]:
        """Its shapes in two traces for known sizes; results are the same one by their place."""
        if tensor in self._outputs:
            return tuple(outputs[tensor] for outputs in self._compared_outputs)
        here, whole = (nodes.get(tensor.node.name) for nodes in self._compared)
        if here is None or whole is None or max(tensor.index + 1, len(here.outputs)) > len(whole.outputs):
            return None, None
        return here.outputs[tensor.index][1], whole.outputs[tensor.index][1]

    def _open_growth(self, tensor: Tensor) -> Growth | None:
        """The same of a step that there is one trace of."""
        if tensor.shape is None or None in tensor.shape[1:]:
            return None
        if None not in tensor.shape:
            return Growth(())
        size = self._sizes.of(tensor)
        of_batch = isinstance(size, Size) and not size.arguments.isdisjoint(self._traces.batched)
        return Growth((0,), 1) if of_batch else None


def _by_result(analysis: Analysis, concrete_fn: Any) -> dict[Tensor, Any]:
    """Shapes of the results of a trace, by what they are in the analysis."""
    results = zip(analysis.graph.outputs, concrete_fn.outputs, strict=True)
    return {own: tuple(t.shape) if t.shape.rank is not None else None for own, t in results}


def _value(tensor: Tensor, known: Known, evaluate: Evaluator) -> Any:
    """The numbers that a tensor holds, or the size that it is."""
    found = known(tensor)
    if found is not None:
        return found
    while tensor.node.op in ("Cast", "Identity"):
        tensor = tensor.node.inputs[0]
    return evaluate(tensor)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """How micro-batches come together.

    Attributes:
        notes: What a plan says of it.
        is_mean: Which values are means; `None` of one of which that is not known.
        factors: By what a micro-batch multiplies what it adds to a variable, by operation and operand.
        places: Names of what is as long as the batch, not made of its data, and another one for each sample.
    """

    notes: tuple[str, ...]
    is_mean: Callable[[Tensor], bool | None]
    factors: Mapping[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    places: frozenset[str] = frozenset()


def judged(traces: Traces, params: PipelineParams, results: Sequence[Tensor] = ()) -> Judgement:
    """Find out how micro-batches come together.

    Args:
        traces: The step.
        params: What to do.
        results: What it returns, by another analysis that values are asked of.

    Raises:
        PipelineError: If they cannot be put together as the parameters say.
    """
    mean = params.loss_reduction == "mean"
    if params.total_micro_batches == 1:
        return Judgement((), lambda tensor: mean)
    traces = traces.known or traces
    analysis = analyse(traces.micro, traces.record, None, for_tiles=False).analysis
    _refuse_loops(analysis, traces)
    parts = split_step(analysis, traces.batched, traces.hints)
    sizes = BatchSizes(traces, analysis)
    batch = traces.batch // params.total_micro_batches if traces.batch else None
    told = Sizes(sizes.whole_shape, sizes.values, sizes.growth, params.total_micro_batches, batch)
    found = samples(analysis, parts, told, traces.hints.repeated)
    judge = _Judge(traces, analysis, params, found, analysis.sorted(set(parts.update)))
    notes = judge.joined()
    judge.refuse_sizes(sizes)
    judge.refuse_gradients([t for t in parts.gradients if t.node in parts.direct])
    judge.refuse_results(analysis)
    by_name = {tensor.name: value for tensor, value in found.is_mean.items()}
    # With `batch_norm="micro"` what follows a joined value is that of a loop that accumulates, as it was asked for.
    # Of a step that there is one trace of, for any batch, it cannot be told, and is what the parameters say.
    unknown = mean if found.joined or traces.micro is traces.whole else None
    outputs = analysis.graph.outputs
    of_results = {own: found.is_mean.get(t, unknown) for own, t in zip(results or outputs, outputs, strict=True)}
    factors = {(node.name, position): value for (node, position), value in found.factors.items()}

    def is_mean(tensor: Tensor) -> bool | None:
        return of_results[tensor] if tensor in of_results else by_name.get(tensor.name, unknown)

    return Judgement(notes + judge.unknown(), is_mean, factors, frozenset(t.name for t in found.places))


def _refuse_loops(analysis: Analysis, traces: Traces) -> None:
    """Refuse a forward loop that gradients go through: it fills lists that autodiff has made for its own loop.

    Raises:
        PipelineError: With its layer.
    """
    node = next((n for n in analysis.order if n.op in LOOPS and not is_seed(n) and n in analysis.backward), None)
    if node is not None:
        raise PipelineError(
            f"Gradients go through a loop, {_Names(traces, analysis).of(node)}: a pipeline cannot tell its forward "
            "phase from the backward one yet. Unroll it (`unroll=True` of a recurrent layer), or use `micro_batches=1`."
        )


class _Names:
    """What a user knows operations and variables by."""

    def __init__(self, traces: Traces, analysis: Analysis) -> None:
        self._record = traces.record
        concrete_fn = traces.micro
        count = len(concrete_fn.inputs) - len(concrete_fn.captured_inputs)
        by_handle = {id(v.handle): v.name for v in concrete_fn.graph.variables}
        captured = zip(analysis.graph.inputs[count:], concrete_fn.captured_inputs, strict=True)
        self._variables = {handle: by_handle.get(id(tensor), handle.node.name) for handle, tensor in captured}

    def of(self, what: Node | Tensor) -> str:
        """The layer of an operation, or else its name; of a handle the name of the variable."""
        if isinstance(what, Tensor):
            return f"variable {self._variables.get(what, what.node.name)!r}"
        call = self._record.layer_of_op.get(what.name)
        return f"layer {call.layer!r} ({call.kind})" if call else f"`{what.name}` ({what.op})"

    def has_layer(self, node: Node) -> bool:
        """Whether an operation belongs to a layer."""
        return node.name in self._record.layer_of_op

    def all(self, several: Iterable[Node | Tensor]) -> str:
        """Of several, each once."""
        return shortened(list(dict.fromkeys(map(self.of, several))), _MOST_NAMES)


class _Judge:
    """What is made of what was found out: refusals and notes."""

    def __init__(
        self, traces: Traces, analysis: Analysis, params: PipelineParams, found: Samples, update: Sequence[Node]
    ) -> None:
        self.names = _Names(traces, analysis)
        self.params = params
        self.found = found
        self.update = update

    def joined(self) -> tuple[str, ...]:
        """What a plan says of operations that join samples.

        Raises:
            PipelineError: If they are to be refused.
        """
        written = [node if self.names.has_layer(node) else handle for handle, node in self.found.written]
        joined: list[Node | Tensor] = [*self.found.joined, *written]
        notes: tuple[str, ...] = ()
        if joined:
            shown = self.names.all(joined)
            if self.params.batch_norm == "refuse":
                raise PipelineError(
                    f"With several micro-batches these would compute something else, because they join samples of a "
                    f"batch: {shown}. Let them work on micro-batches (`batch_norm=\"micro\"`), as a loop does that "
                    "accumulates gradients, or use `micro_batches=1`."
                )
            notes += (
                "join samples of a micro-batch, not of the batch, so that the step is one that accumulates gradients: "
                f"{shown}",
            )
        if self.found.in_metrics:
            shown = self.names.all(self.found.in_metrics)
            notes += (f"a metric may come out otherwise, because it does not add up over micro-batches: {shown}",)
        return notes

    def refuse_sizes(self, sizes: BatchSizes) -> None:
        """Refuse numbers that go with the size of the batch, and by no power of it.

        Raises:
            PipelineError: With one of them.
        """
        for node, number in self.found.odd.items():
            here, whole = (np.unique(value) for value in sizes.values(number))
            shown = f" ({here[0]:.6g} for a micro-batch, {whole[0]:.6g} for the batch)" if here.size == 1 else ""
            raise PipelineError(
                f"{self.names.of(node)} computes with `{number.name}`{shown}, which goes with the size of the batch, "
                "and by no power of it: what micro-batches make with theirs is another step. Make it of a size that is "
                "given, such as that of the batch as an argument without axes, or use `micro_batches=1`."
            )

    def refuse_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Refuse gradients that are no sums over samples, or others than the parameters say.

        Raises:
            PipelineError: With the operation, and what to do.
        """
        found, mean = self.found, self.params.loss_reduction == "mean"
        if found.turned:
            tensor = found.turned[0]
            reader = next(n for n in self.update if tensor in n.inputs)
            raise PipelineError(
                f"`{reader.name}` ({reader.op}) seems to be a part of the update and reads samples of `{tensor.name}`, "
                "which do not lie in its first dimension. Is it the gradient of a first layer, written by hand "
                "(`tf.custom_gradient`)? Let TensorFlow derive that, or use `micro_batches=1`."
            )
        if found.scaled:
            raise PipelineError(
                f"{self.names.all(found.scaled)} reads what goes with the size of the batch, as gradients of a mean do "
                "on their way, and its result does not: in a micro-batch it is another one. Change the gradients of "
                "weights instead, before the update, or use `micro_batches=1`."
            )
        if found.mixed:
            raise PipelineError(
                "Some gradients are sums over the batch and some are means, so that micro-batches cannot be put "
                f"together: {self.names.all(found.mixed)} adds both. Let all losses of the step be means, or all sums."
            )
        odd = [] if found.joined else unfit(found.powers)
        if odd:
            raise PipelineError(
                f"`{odd[0].name}` is neither a sum nor a mean over the batch, but goes with its size to the power of "
                f"{found.powers[odd[0]] + 1}: micro-batches added up do not make it. "  # type: ignore[operator]
                "Let the loss be a mean, or a sum."
            )
        known = {found.is_mean[t] for t in gradients if t in found.is_mean}
        if known == {not mean}:
            other = "sum" if mean else "mean"
            raise PipelineError(
                f"Gradients are a {other} over the batch, as the step was traced for a batch and for a part of it: "
                f'pass `loss_reduction="{other}"`. Received: loss_reduction={self.params.loss_reduction!r}.'
            )
        if len(known) > 1:
            raise PipelineError(
                "Some gradients are sums over the batch and some are means, so that micro-batches cannot be put "
                "together. Let all losses of the step be means, or all sums."
            )
        if not mean and found.unlike:
            raise _unlike(found.unlike[0])

    def refuse_results(self, analysis: Analysis) -> None:
        """Refuse results that add to a sum over samples what is not of the batch.

        Gradients may: where they are means, those of a penalty are the same for a part of the batch.

        Raises:
            PipelineError: With the operation.
        """
        made = ancestors(t.node for t in analysis.graph.outputs) if self.found.unlike else set()
        for node in self.found.unlike:
            if node in made and node not in analysis.backward and node.out().dtype.is_floating:
                raise _unlike(node)

    def unknown(self) -> tuple[str, ...]:
        """What a plan says of what is not known."""
        notes: tuple[str, ...] = ()
        if self.found.unknown:
            shown = self.names.all(self.found.unknown)
            notes += (f"taken to keep samples apart, though it is not known what they do to them: {shown}",)
        lost = [t for t, power in self.found.powers.items() if power is None]
        if lost:
            shown = shortened([f"`{t.name}`" for t in lost], _MOST_NAMES)
            reduction = self.params.loss_reduction
            notes += (f"taken to be a {reduction} over the batch, as `loss_reduction` says: {shown}",)
        return notes


def _unlike(node: Node) -> PipelineError:
    return PipelineError(
        f"`{node.name}` ({node.op}) adds what is not of the batch, such as a penalty on weights, to a sum over "
        "the batch: micro-batches added up would have it several times. Let the loss be a mean over the batch."
    )
