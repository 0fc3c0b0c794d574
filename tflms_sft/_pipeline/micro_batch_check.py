"""Checks that a step in micro-batches computes the original step: refusals, notes for the plan, and reductions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from rewriters.analysis.autodiff_roles import is_seed
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.batch_semantics import SUM_OR_MEAN, EquivalenceReport, TraceComparison
from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.errors import PipelineError
from rewriters.ir.graph import LOOPS, Node, Tensor, ancestors
from rewriters.ir.graph_reader import is_xla_call
from rewriters.pipelining.micro_batch_reduction import MicroBatchReduction
from rewriters.pipelining.step_partition import StepPartition, split_step
from tflms_sft._params.pipeline_params import PipelineParams
from tflms_sft._pipeline.declarations import declared_ops, declared_reductions
from tflms_sft._search.traced_step import analyse_step
from tflms_sft._trace.batch_traces import BatchTraces, settled
from tflms_sft._trace.layer_names import part_name, variable_names
from tflms_sft._util.text import shortened

_MAX_NAMES = 4
_TRACE_ATTRIBUTES = frozenset(("container", "shared_name", "token"))
"""Attributes that differ between any two traces."""

_MIXED = (
    "Some gradients are sums over the batch and some are means, so that micro-batches cannot be combined{}. "
    "Let all losses of the step be means, or all sums."
)


@dataclasses.dataclass(frozen=True)
class MicroBatchContract:
    """Rules by which the values of micro-batches are combined.

    Attributes:
        notes: Notes for the plan.
        is_mean: Tells whether a value is a mean over the batch rather than a sum; `None` if unknown.
        factors: Factor of what a micro-batch adds to a variable, by op name and operand position.
        reductions: Reductions that the user declares, by output position.
    """

    notes: tuple[str, ...]
    is_mean: Callable[[Tensor], bool | None]
    factors: Mapping[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    reductions: Mapping[int, MicroBatchReduction] = dataclasses.field(default_factory=dict)


def check_micro_batches(
    traces: BatchTraces,
    params: PipelineParams,
    emitted: GraphAnalysis | None = None,
    sizes: TraceComparison | None = None,
) -> MicroBatchContract:
    """Return how the values of micro-batches are combined.

    Args:
        traces: Traces of the step.
        params: Parameters of the pipeline.
        emitted: Analysis whose tensors the contract is asked about: that of a step with open axes, or of one whose
            matrices are folded into images. Defaults to the analysis of the check.
        sizes: Comparison of the traces, if `emitted` was read in the mode of the check.

    Raises:
        PipelineError: If micro-batches cannot compute the step.
    """
    is_mean = params.loss_reduction == "mean"
    if params.total_micro_batches == 1:
        return MicroBatchContract((), lambda tensor: is_mean)
    checked = settled(traces)
    check = _Check(checked, params, (emitted, sizes) if emitted and sizes and checked is traces else None)
    notes = check.refuse()
    axis = (traces.batch or 0) // traces.count + 1
    if checked is not traces and axis < (traces.batch or 0):
        check.refuse_difference(settled(traces, axis), axis)
    # With `batch_norm="micro"` a value after an op that mixes samples is that of a loop that accumulates gradients.
    unknown = is_mean if check.report.cross_sample else None
    by_name = {tensor.name: is_mean for tensor, is_mean in check.report.is_mean.items()}
    results = zip((emitted or check.analysis).graph.outputs, check.analysis.graph.outputs, strict=True)
    of_result = {tensor: check.report.is_mean.get(checked, unknown) for tensor, checked in results}
    factors = {(node.name, position): value for (node, position), value in check.report.factors.items()}
    return MicroBatchContract(
        notes + check.unknown_notes(),
        lambda tensor: of_result[tensor] if tensor in of_result else by_name.get(tensor.name, unknown),
        factors,
        check.reductions,
    )


class _UserNames:
    """Names by which a user knows ops and variables."""

    def __init__(self, traces: BatchTraces, analysis: GraphAnalysis) -> None:
        self._record = traces.record
        self._variables = variable_names(traces.micro, analysis.graph)

    def of(self, what: Node | Tensor) -> str:
        """Return the layer or loss of an op, else its name; for a handle the name of its variable."""
        if isinstance(what, Tensor):
            return f"variable {self._variables.get(what, what.node.name)!r}"
        return part_name(self._record, what.name) or f"`{what.name}` ({what.op})"

    def has_layer(self, node: Node) -> bool:
        """Return whether an op belongs to a layer."""
        return node.name in self._record.layer_of_op

    def all(self, several: Iterable[Node | Tensor]) -> str:
        """Return a text with the distinct names of ops or variables, cut short after `_MAX_NAMES`."""
        return shortened(list(dict.fromkeys(map(self.of, several))), _MAX_NAMES)


def _analysed(traces: BatchTraces) -> tuple[GraphAnalysis, TraceComparison]:
    """Return the analysis of the step for a micro-batch, and the comparison of the traces."""
    mode = CanonicalMode.BATCH_ANALYSIS
    analysis = analyse_step(traces.micro, traces.record, None, mode, merge_constants=False).analysis
    batched, count = traces.batched, traces.count
    return analysis, TraceComparison(analysis, traces.micro, whole=traces.whole, batched=batched, count=count)


class _Check:
    """Analyses a step and turns findings into refusals and notes.

    `analysed` is the analysis of the step for a micro-batch, and the comparison of the traces, if there are any.
    """

    def __init__(
        self, traces: BatchTraces, params: PipelineParams, analysed: tuple[GraphAnalysis, TraceComparison] | None = None
    ) -> None:
        self.params = params
        self.analysis, self.sizes = analysed or _analysed(traces)
        self.names = _UserNames(traces, self.analysis)
        self._refuse_bodies()
        self.parts: StepPartition = split_step(self.analysis, traces.batched, traces.hints)
        self.reductions = declared_reductions(traces.micro, params.reductions or {})
        self.report = EquivalenceReport(
            self.analysis,
            self.parts,
            self.sizes,
            metrics=traces.hints.per_micro_batch,
            per_sample=declared_ops(self.analysis, traces.record, params.per_sample or ()),
            declared_outputs=self.reductions,
        )

    def _refuse_bodies(self) -> None:
        """Refuse forward loops that gradients go through, and functions that XLA compiles.

        Autodiff makes lists for its own loop, which the forward loop fills. The body of a compiled function is hidden.
        """
        order = self.analysis.order
        loops = (node for node in order if node.op in LOOPS and not is_seed(node))
        node = next(
            (n for n in loops if any(t.node.op == "EmptyTensorList" and is_seed(t.node) for t in n.inputs)), None
        )
        if node is not None:
            raise PipelineError(
                f"Gradients go through a loop, {self.names.of(node)}, whose forward pass a pipeline cannot separate "
                "from the backward pass. Unroll it (`unroll=True` of a recurrent layer), or use `micro_batches=1`."
            )
        node = next((n for n in order if is_xla_call(n)), None)
        if node is not None:
            raise PipelineError(
                f"{self.names.of(node)} runs in a function that XLA compiles, so that its ops cannot be checked. Leave "
                "out `jit_compile=True` (convolutions in groups in half precision have no other kernel on CPUs), or "
                "use `micro_batches=1`."
            )

    def refuse(self) -> tuple[str, ...]:
        """Refuse a step that micro-batches cannot compute; return notes about ops that mix samples.

        Raises:
            PipelineError: With the op or variable.
        """
        notes = self.refuse_cross_sample()
        self.refuse_indexed()
        self.refuse_sizes()
        self.refuse_gradients()
        self.refuse_results()
        self.refuse_attributes()
        return notes

    def refuse_difference(self, traces: BatchTraces, size: int) -> None:
        """Refuse a step that micro-batches cannot compute, or combine otherwise, if an open axis has another size.

        Raises:
            PipelineError: With the reason.
        """
        try:
            other = _Check(traces, self.params)
            other.refuse()
        except PipelineError as error:
            raise PipelineError(f"If a dimension of unknown size (`None`) is {size}: {error}") from None
        if self._reductions_by_position() != other._reductions_by_position():
            raise PipelineError(
                "Results of micro-batches are combined differently if a dimension of unknown size (`None`) is "
                f"{size} than if it is larger. Give the inputs static shapes, or use `micro_batches=1`."
            )

    def _reductions_by_position(self) -> list[Any]:
        leaving = (*self.analysis.graph.outputs, *self.parts.gradients)
        return [*(self.report.is_mean.get(tensor) for tensor in leaving), *self.report.factors.values()]

    def refuse_cross_sample(self) -> tuple[str, ...]:
        """Refuse ops that mix samples, or return notes about them."""
        report, names = self.report, self.names
        variables = [node if names.has_layer(node) else handle for handle, node in report.inexact_variables]
        mixing: list[Node | Tensor] = [*report.cross_sample, *variables]
        notes: tuple[str, ...] = ()
        if mixing and self.params.batch_norm == "refuse":
            raise PipelineError(
                "With several micro-batches some results would change, because they mix samples of the batch: "
                f'{names.all(mixing)}. Pass `batch_norm="micro"`, which computes them per micro-batch, as gradient '
                "accumulation does, or use `micro_batches=1`."
            )
        if mixing:
            shown = names.all(mixing)
            notes += (f"computed per micro-batch, as with gradient accumulation, because they mix samples: {shown}",)
        if report.inexact_metrics:
            metrics = names.all(report.inexact_metrics)
            notes += (f"a metric may differ, because it does not add up over micro-batches: {metrics}",)
        return notes

    def refuse_indexed(self) -> None:
        """Refuse values that do not depend on data and differ between samples, such as sample numbers."""
        for node, tensor in self.report.indexed.items():
            raise PipelineError(
                f"{self.names.of(node)} reads `{tensor.name}` ({tensor.node.op}), which has an entry for each sample "
                "that does not depend on the data, such as a sample number or noise of a fixed seed. Pass it as an "
                "argument of the step, or use `micro_batches=1`."
            )

    def refuse_sizes(self) -> None:
        """Refuse numbers that depend on the batch size by no power of it."""
        for node, number in self.report.irregular.items():
            here, whole = (np.asarray(value).ravel() for value in self.sizes.values(number))
            is_number = here.size == whole.size == 1 and here.dtype.kind in "biuf"
            shown = f" ({here[0]:.6g} for a micro-batch, {whole[0]:.6g} for the batch)" if is_number else ""
            raise PipelineError(
                f"{self.names.of(node)} computes with `{number.name}`{shown}, which depends on the batch size in a way "
                "that micro-batches cannot reproduce. Pass the size as a scalar argument, or use `micro_batches=1`."
            )

    def refuse_attributes(self) -> None:
        """Refuse ops whose attributes Python code sets by the batch size."""
        for node in self.analysis.order:
            other = self.sizes.counterpart(node)
            if other is None or other.op != node.op:
                continue
            for name in node.attrs.keys() & other.attrs.keys():
                here, whole = node.attrs[name], other.attrs[name]
                is_ignored = name.startswith("_") or name in _TRACE_ATTRIBUTES
                if here != whole and here.WhichOneof("value") in ("b", "f", "s") and not is_ignored:
                    raise PipelineError(
                        f"{self.names.of(node)} has another `{name}` for a micro-batch than for the batch. Make it "
                        "independent of the batch size, or use `micro_batches=1`."
                    )

    def refuse_gradients(self) -> None:
        """Refuse gradients that are no sums over samples, or have another reduction than the parameters say."""
        report, is_mean = self.report, self.params.loss_reduction == "mean"
        if report.transposed:
            tensor = report.transposed[0]
            consumer = next(n for n in self.analysis.order if n in self.parts.update and tensor in n.inputs)
            raise PipelineError(
                f"`{consumer.name}` ({consumer.op}) seems to be a part of the update and reads samples of "
                f"`{tensor.name}`, whose batch axis is not the first. If it is a hand-written gradient of the first "
                "layer (`tf.custom_gradient`), let TensorFlow derive it, or use `micro_batches=1`."
            )
        if report.nonlinear:
            raise PipelineError(
                f"{self.names.all(report.nonlinear)} is not linear and reads a value that scales with the batch "
                "size, such as the gradient of a mean, so that micro-batches get another result. Apply it to the "
                "gradients of the weights, before the update, or use `micro_batches=1`."
            )
        if report.mixed:
            raise PipelineError(_MIXED.format(f": {self.names.all(report.mixed)} adds both"))
        known = {t: e for t, e in report.exponents.items() if e is not None and e not in SUM_OR_MEAN}
        if known and not report.cross_sample:
            tensor, exponent = next(iter(known.items()))
            raise PipelineError(
                f"`{tensor.name}` is neither a sum nor a mean over the batch, but scales with its size to the power of "
                f"{exponent + 1}, so that micro-batches cannot be combined. Let the loss be a mean, or a sum."
            )
        self._refuse_reduction(is_mean)
        if not is_mean and report.adds_invariant:
            raise _adds_invariant(report.adds_invariant[0])

    def _refuse_reduction(self, is_mean: bool) -> None:
        """Refuse gradients that are all, or partly, of another reduction.

        Rows, as of sparse gradients and of penalties on gradients, are left out: each is combined by what it is.
        """
        reductions = self.report.gradient_reductions
        if len(reductions) > 1:
            raise PipelineError(_MIXED.format(""))
        if reductions == {not is_mean}:
            other = "sum" if is_mean else "mean"
            raise PipelineError(
                f"Gradients are a {other} over the batch, as traces for the batch and for a micro-batch show: pass "
                f'`loss_reduction="{other}"`. Received: loss_reduction={self.params.loss_reduction!r}.'
            )

    def refuse_results(self) -> None:
        """Refuse results that add a data-independent value to a sum over samples, or depend on variables and sizes.

        Gradients may do so: where they are means, those of a penalty are the same for a micro-batch.
        """
        report, graph = self.report, self.analysis.graph
        if report.size_dependent_state:
            raise PipelineError(
                f"`{report.size_dependent_state[0].name}` is computed from the batch size and from a variable that "
                "every micro-batch updates. Return variable and size separately, write the size to a variable too, or "
                "use `micro_batches=1`."
            )
        if report.scaled_rows:
            raise PipelineError(
                f"Rows of `{report.scaled_rows[0].name}` are multiplied by a power of the batch size, which differs "
                "for a micro-batch. Return them without this factor, or use `micro_batches=1`."
            )
        outputs = [t for position, t in enumerate(graph.outputs) if position not in self.reductions]
        before = ancestors(t.node for t in outputs) if report.adds_invariant else set()
        for node in report.adds_invariant:
            if node in before and node not in self.analysis.backward:
                raise _adds_invariant(node)

    def unknown_notes(self) -> tuple[str, ...]:
        """Return notes about ops and reductions that are unknown."""
        notes: tuple[str, ...] = ()
        if self.report.unknown:
            notes += (f"assumed to keep samples independent, without a rule: {self.names.all(self.report.unknown)}",)
        undecided = [t for t, exponent in self.report.exponents.items() if exponent is None]
        if undecided:
            shown = shortened([f"`{t.name}`" for t in undecided], _MAX_NAMES)
            reduction = self.params.loss_reduction
            notes += (f"assumed to be a {reduction} over the batch, as `loss_reduction` says: {shown}",)
        return notes


def _adds_invariant(node: Node) -> PipelineError:
    return PipelineError(
        f"`{node.name}` ({node.op}) adds a value that does not depend on the batch, such as a penalty on weights, to a "
        "sum over the batch, so that micro-batches would count it several times. Let the loss be a mean over the batch."
    )
