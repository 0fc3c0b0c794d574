"""Whether a step in micro-batches is the same step: what is refused, what a plan says, and how values come together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from rewriters.analysis.autodiff_roles import is_seed
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.batch_semantics.domain import Sizes
from rewriters.batch_semantics.equivalence import EquivalenceReport, analyse_equivalence, unfit
from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.errors import PipelineError
from rewriters.ir.graph import LOOPS, Node, Tensor, ancestors
from rewriters.ir.inlining import is_xla_call
from rewriters.ir.static_values import is_inexact
from rewriters.pipelining.step_partition import MicroBatchUse, split_step
from tflms_sft._params.pipeline_params import PipelineParams
from tflms_sft._pipeline.batch_scaling import BatchScaling
from tflms_sft._planner.traced_step import analyse_step
from tflms_sft._trace.batch_traces import BatchTraces, settled
from tflms_sft._trace.layer_names import part_name, variable_names
from tflms_sft._util.text import shortened

_MOST_NAMES = 4
_OWN_ATTRIBUTES = frozenset(("container", "shared_name", "token"))
"""Those that each trace has of its own."""

_EXAMPLES = " Or give the step example arguments, whose size it is judged by then."


@dataclasses.dataclass(frozen=True)
class MicroBatchContract:
    """How micro-batches come together.

    Attributes:
        notes: What a plan says of it.
        is_mean: Which values are means; `None` of one of which that is not known.
        factors: By what a micro-batch multiplies what it adds to a variable, by operation and operand.
        use: Returns how micro-batches read a value that does not depend on data.
    """

    notes: tuple[str, ...]
    is_mean: Callable[[Tensor], bool | None]
    factors: Mapping[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    use: Callable[[Tensor], MicroBatchUse] = dataclasses.field(default=lambda tensor: MicroBatchUse.SAME)


def check_micro_batches(
    traces: BatchTraces, params: PipelineParams, like: GraphAnalysis | None = None
) -> MicroBatchContract:
    """Find out how micro-batches come together.

    Args:
        traces: The step.
        params: What to do.
        like: Another analysis, which values are asked of: of the step for any batch, or of one with images of pixels.

    Raises:
        PipelineError: If they cannot be put together as the parameters say.
    """
    mean = params.loss_reduction == "mean"
    if params.total_micro_batches == 1:
        return MicroBatchContract((), lambda tensor: mean)
    others, is_open, unsettled = traces.others, traces.known is not None, traces.known or traces
    traces = settled(unsettled)
    analysis = analyse_step(traces.micro, traces.record, None, CanonicalMode.BATCH_ANALYSIS).analysis
    _refuse_bodies(analysis, traces)
    parts = split_step(analysis, traces.batched, traces.hints)
    sizes = BatchScaling(traces, analysis)
    batch = traces.batch // params.total_micro_batches if traces.batch else None
    told = Sizes(sizes.whole_shape, sizes.values, sizes.growth, params.total_micro_batches, batch)
    found = analyse_equivalence(analysis, parts, told, traces.hints.per_micro_batch)
    judge = RefusalReporter(traces, analysis, params, found, analysis.sorted(set(parts.update)))
    notes = judge.joined()
    judge.refuse_sizes(sizes)
    judge.refuse_gradients([t for t in parts.gradients if t.node in parts.batch_dependent])
    judge.refuse_results(analysis)
    judge.refuse_attributes(analysis, sizes)
    for other in others:
        _refuse_turns(settled(other), params, "Batches of any size are compared", _EXAMPLES)
    between = traces.batch // traces.count + 1 if traces.batch else 0
    if traces is not unsettled and not others and between < (traces.batch or 0):
        _refuse_turns(settled(unsettled, between), params, f"An axis of {between}, which is open, is compared", "")
    # With `batch_norm="micro"` what follows a joined value is that of a loop that accumulates, as it was asked for.
    # Of a step that there is one trace of, for any batch, it cannot be told, and is what the parameters say.
    unknown = mean if found.joined or traces.micro is traces.whole else None
    values = _Told(analysis, found, like or analysis, unknown, is_open)
    return MicroBatchContract(notes + judge.unknown(), values.is_mean, values.factors(), values.use)


def _refuse_turns(other: BatchTraces, params: PipelineParams, compared: str, remedy: str) -> None:
    """Refuse numbers that go with other sizes otherwise than with those of the step that is judged by.

    Args:
        other: The step for these sizes.
        params: What to do.
        compared: How an error begins.
        remedy: How it ends.

    Raises:
        PipelineError: With one of them.
    """
    analysis = analyse_step(other.micro, other.record, None, CanonicalMode.BATCH_ANALYSIS).analysis
    parts = split_step(analysis, other.batched, other.hints)
    sizes = BatchScaling(other, analysis)
    assert other.batch is not None
    part = other.batch // other.count
    told = Sizes(sizes.whole_shape, sizes.values, sizes.growth, other.count, part)
    judge = RefusalReporter(
        other, analysis, params, analyse_equivalence(analysis, parts, told, other.hints.per_micro_batch), []
    )
    try:
        judge.refuse_sizes(sizes)
    except PipelineError as error:
        raise PipelineError(f"{compared} by {part} and {other.batch} samples. {error}{remedy}") from None


class _Told:
    """Tells of tensors of one analysis of a step what was found out by another one.

    Raises:
        PipelineError: By each method, if the step for any batch has something that the one for a known batch has not.
    """

    def __init__(
        self,
        analysis: GraphAnalysis,
        found: EquivalenceReport,
        like: GraphAnalysis,
        unknown: bool | None,
        is_open: bool,
    ) -> None:
        self._nodes = analysis.graph.nodes
        self._like = like.graph.nodes
        self._found = found
        self._by_name = {tensor.name: value for tensor, value in found.is_mean.items()}
        lost = {tensor for tensor, power in found.powers.items() if power is None}
        self._open = {tensor.name for tensor in lost | found.zero}
        self._unknown = unknown
        results = zip(like.graph.outputs, analysis.graph.outputs, strict=True)
        self._of_results = {own: found.is_mean.get(t, unknown) for own, t in results}
        self._is_open = is_open

    def is_mean(self, tensor: Tensor) -> bool | None:
        """Whether a value is a mean over the batch rather than a sum, `None` if that is not known or the same."""
        if tensor in self._of_results:
            return self._of_results[tensor]
        found = self._by_name.get(tensor.name, self._unknown)
        if found is None and tensor.name not in self._open:
            self._refuse(tensor.node)
        self._require(tensor.node, self._nodes)
        return found

    def use(self, tensor: Tensor) -> MicroBatchUse:
        """Return how micro-batches read a value that does not depend on data."""
        self._require(tensor.node, self._nodes)
        node = self._nodes.get(tensor.node.name)
        if node is None or tensor.index >= len(node.outputs):
            return MicroBatchUse.SAME
        return self._found.use(node.out(tensor.index))

    def factors(self) -> dict[tuple[str, int], float]:
        """By what operands are multiplied."""
        for node, _ in self._found.factors:
            self._require(node, self._like)
        return {(node.name, position): value for (node, position), value in self._found.factors.items()}

    def _require(self, node: Node, nodes: Mapping[str, Node]) -> None:
        """Require that an operation is in both."""
        other = nodes.get(node.name)
        if other is None or other.op != node.op:
            self._refuse(node)

    def _refuse(self, node: Node) -> None:
        if self._is_open:
            raise PipelineError(
                f"`{node.name}` ({node.op}) of the step for batches of any size is not found in the same way "
                "in the step for a known one, so that it cannot be told how micro-batches make it. Give the step "
                "example arguments, or specifications, of a known batch, or use `micro_batches=1`."
            )


def _refuse_bodies(analysis: GraphAnalysis, traces: BatchTraces) -> None:
    """Refuse a forward loop that gradients go through, which fills lists that autodiff has made for its own loop.

    And what XLA compiles, which cannot be looked into.

    Raises:
        PipelineError: With its layer.
    """
    node = next((n for n in analysis.order if n.op in LOOPS and not is_seed(n) and n in analysis.backward), None)
    if node is not None:
        raise PipelineError(
            f"Gradients go through a loop, {_Names(traces, analysis).of(node)}: a pipeline cannot tell its forward "
            "phase from the backward one yet. Unroll it (`unroll=True` of a recurrent layer), or use `micro_batches=1`."
        )
    node = next((n for n in analysis.order if is_xla_call(n)), None)
    if node is not None:
        raise PipelineError(
            f"{_Names(traces, analysis).of(node)} runs in a function that XLA compiles, as what has no other kernel on "
            "a CPU does too, such as convolutions in groups in half precision: what it does to samples cannot be seen. "
            "Leave out `jit_compile=True` if it is yours, or use `micro_batches=1`."
        )


class _Names:
    """What a user knows operations and variables by."""

    def __init__(self, traces: BatchTraces, analysis: GraphAnalysis) -> None:
        self._record = traces.record
        self._variables = variable_names(traces.micro, analysis.graph)

    def of(self, what: Node | Tensor) -> str:
        """The layer or loss of an operation, or else its name; of a handle the name of the variable."""
        if isinstance(what, Tensor):
            return f"variable {self._variables.get(what, what.node.name)!r}"
        return part_name(self._record, what.name) or f"`{what.name}` ({what.op})"

    def has_layer(self, node: Node) -> bool:
        """Whether an operation belongs to a layer."""
        return node.name in self._record.layer_of_op

    def all(self, several: Iterable[Node | Tensor]) -> str:
        """Of several, each once."""
        return shortened(list(dict.fromkeys(map(self.of, several))), _MOST_NAMES)


class RefusalReporter:
    """What is made of what was found out: refusals and notes."""

    def __init__(
        self,
        traces: BatchTraces,
        analysis: GraphAnalysis,
        params: PipelineParams,
        found: EquivalenceReport,
        update: Sequence[Node],
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
                    f'batch: {shown}. Let them work on micro-batches (`batch_norm="micro"`), as a loop does that '
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

    def refuse_sizes(self, sizes: BatchScaling) -> None:
        """Refuse numbers that go with the size of the batch, and by no power of it.

        Raises:
            PipelineError: With one of them.
        """
        for node, number in self.found.odd.items():
            here, whole = (np.asarray(value).ravel() for value in sizes.values(number))
            single = here.size == whole.size == 1 and here.dtype.kind in "biuf"
            shown = f" ({here[0]:.6g} for a micro-batch, {whole[0]:.6g} for the batch)" if single else ""
            raise PipelineError(
                f"{self.names.of(node)} computes with `{number.name}`{shown}, which goes with the size of the batch, "
                "and what comes of that by no power of it: what micro-batches make is another step. Make it of a size "
                "that is given, such as that of the batch as an argument without axes, or use `micro_batches=1`."
            )

    def refuse_attributes(self, analysis: GraphAnalysis, sizes: BatchScaling) -> None:
        """Refuse operations that Python code has made others for a part of the batch.

        Raises:
            PipelineError: With one of them.
        """
        for node in analysis.order:
            other = sizes.counterpart(node)
            if other is None or other.op != node.op:
                continue
            for name in node.attrs.keys() & other.attrs.keys():
                mine, whole = node.attrs[name], other.attrs[name]
                own = name.startswith("_") or name in _OWN_ATTRIBUTES
                if mine != whole and mine.WhichOneof("value") in ("b", "f", "s") and not own:
                    raise PipelineError(
                        f"{self.names.of(node)} has another `{name}` for a micro-batch than for the batch, so that it "
                        "computes something else. Make it of what does not go with the size of the batch, or use "
                        "`micro_batches=1`."
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
        # Rows are put together by what each is, those of sparse gradients and of penalties on gradients.
        known = {found.is_mean[t] for t in gradients if t in found.is_mean and t in found.sums}
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

    def refuse_results(self, analysis: GraphAnalysis) -> None:
        """Refuse results that add to a sum over samples what is not of the batch, or read of it what is half done.

        Gradients may: where they are means, those of a penalty are the same for a part of the batch.

        Raises:
            PipelineError: With the operation.
        """
        if self.found.half:
            raise PipelineError(
                f"`{self.found.half[0].name}` is made of a variable that micro-batches write, and of the size of the "
                "batch, of which each of them has its own. Return both, or write the size to a variable too, or use "
                "`micro_batches=1`."
            )
        made = ancestors(t.node for t in analysis.graph.outputs) if self.found.unlike else set()
        for node in self.found.unlike:
            if node in made and node not in analysis.backward and is_inexact(node.out().dtype):
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
