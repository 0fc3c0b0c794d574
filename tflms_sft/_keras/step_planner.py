"""Plans the step of a model, and corrects plans by measured peaks."""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.errors import BudgetError
from rewriters.estimates.op_cost import MachineRates
from rewriters.ir import tf_internals
from rewriters.ir.graph_reader import from_concrete_function
from rewriters.step_importer import StepImporter
from tflms_sft._batches.batch_limits import BatchLimit, check_batch_shape, require_batch_size
from tflms_sft._batches.planned_step import PlannedStep
from tflms_sft._batches.size_selector import SizeSelector
from tflms_sft._keras import messages
from tflms_sft._keras.model_checks import variable_bytes
from tflms_sft._keras.peak_watch import PeakWatch
from tflms_sft._machine.calibration import machine_rates, stored_rates
from tflms_sft._params.request import RewriteRequest
from tflms_sft._pipeline.build import build_pipeline
from tflms_sft._report.plan import Plan, amend_plan
from tflms_sft._report.plan_records import Measurement
from tflms_sft._rewrite.rewrite import rewrite_traced
from tflms_sft._search.traced_step import TracedStep, analyse_step, collector_paused
from tflms_sft._trace.layer_names import LayerRecord
from tflms_sft._trace.step_tracing import keras_function, trace_keras_step
from tflms_sft._util.keras_internals import TRAINING, StepKind
from tflms_sft._util.progress import Stopwatch, told_if_slow


class Excesses:
    """Bytes by which measured peaks exceed predicted ones of earlier plans, by model and kind of step.

    Models are weak keys: Python may give the address of a deleted model to the next one. A copy starts empty.
    """

    def __init__(self) -> None:
        self._by_model: weakref.WeakKeyDictionary[Any, dict[StepKind, int]] = weakref.WeakKeyDictionary()

    def of(self, model: Any, kind: StepKind) -> int:
        """Return the excess of the latest plan of a step; 0 without one."""
        return self._by_model.get(model, {}).get(kind, 0)

    def set(self, model: Any, kind: StepKind, excess_bytes: int) -> None:
        """Set the excess that the next plans of a step expect."""
        self._by_model.setdefault(model, {})[kind] = excess_bytes

    def __reduce__(self) -> Any:
        """Copy and pickle as an empty object: weak keys can be neither."""
        return Excesses, ()


@dataclasses.dataclass(eq=False)
class StepPlanner:
    """Plans the steps of a model.

    A step that exceeded its budget is planned again, with a memory model that accounts for the measured peak.

    Attributes:
        batch_shape: Shape of the largest batch of images; `None` for that of the first batch.
        watch: Measures the steps, on the GPUs of several replicas or on the planned device.
        excesses: Measured less predicted peaks of earlier plans, which this object extends.
        has_epochs: Whether `plan_again` is called for each epoch.
        on_plan: Called with every new plan.
        say: Called with lines about peaks, and operations that take long; `None` warns about peaks.
    """

    model: Any
    kind: StepKind
    request: RewriteRequest
    batch_shape: tuple[int, ...] | None
    sizes: SizeSelector
    watch: PeakWatch
    excesses: Excesses
    has_epochs: bool
    on_plan: Callable[[Plan], None]
    say: Callable[[str], None] | None
    _trace: tuple[Hashable, Any, LayerRecord] | None = dataclasses.field(init=False, default=None)
    _analysis: tuple[Hashable, TracedStep] | None = dataclasses.field(init=False, default=None)

    def rates(self) -> MachineRates:
        """Return the measured rates of the machine; without a budget, those of an earlier measurement."""
        return stored_rates() if self.request.budget is None else machine_rates(self.say)

    def rewrite(self, method: Callable[[Any], Any], specs: Any, open_specs: Any) -> tuple[StepImporter, Any]:
        """Trace and rewrite a step for `specs`; trace it for `open_specs`, of any size, if nothing is rewritten.

        Returns:
            The step, and the specs that it holds for.
        """
        if self.request.pipeline is not None:
            return self._rewrite_pipeline(method, specs), specs
        step, unknown_sizes = self.sizes.current, self.sizes.unknown_sizes
        traced, record = self._traced(method, specs)
        step.sizes.set_shapes(image_shapes=unknown_sizes.shapes())
        step.sizes.set_arguments(specs)
        shape = self.sizes.image_batch_shape
        check_batch_shape(open_specs, self.batch_shape, self.model.name)
        if shape is None and self.request.budget is not None:
            require_batch_size(traced)
        is_corrected = step.correction.is_replanned or step.correction.excess_before is not None
        aim = self.request.aim(again=is_corrected)
        with collector_paused(), told_if_slow(f"tflms-sft: {aim} ...", self.say) as stopwatch:
            analysed, importer, plan = self._plan(traced, record, stopwatch)
        if self.request.budget is None:  # Nothing is planned again.
            self._trace = self._analysis = None
        if len(self.sizes.steps) > 1 and shape is not None:
            plan = amend_plan(plan, f"for batches of {step.sizes.text()}; each size has its own plan")
        if step.plan is None:
            limit = None
            if self.request.budget is not None:
                tell = functools.partial(messages.tell, self.say)
                limit = BatchLimit(plan, analysed, self.request.budget, tell=tell)
            step.settle(plan, stopwatch, analysed.variables, limit)
            self.on_plan(plan)
        if self.sizes.is_selecting and not plan.changed and (specs != open_specs or step.sizes.image_shapes):
            traced = keras_function(method).get_concrete_function(open_specs)
            return StepImporter(from_concrete_function(traced), traced), open_specs
        return importer, specs

    def _traced(self, method: Callable[[Any], Any], specs: Any) -> tuple[Any, LayerRecord]:
        """Trace a step for `specs`, or return its latest trace if the step is planned again."""
        step = self.sizes.current
        key = (step, step.num_traces, *tf.nest.flatten(specs))
        if self._trace is None or self._trace[0] != key:
            with told_if_slow("tflms-sft: tracing the step ...", self.say):
                self._trace = (key, *trace_keras_step(method, specs, self.sizes.unknown_sizes))
            self._analysis = None
        return self._trace[1:]

    def _analysed(self, traced: Any, record: LayerRecord, batch: int | None) -> TracedStep:
        """Analyse the latest trace for the sizes that it is planned for, and remember the analysis and its models."""
        mode = CanonicalMode.EXACT if self.request.tiles is None else CanonicalMode.TILING
        sizes = self.sizes.current.sizes.argument_sizes()
        key = (batch, *sizes.items())
        if self._analysis is None or self._analysis[0] != key:
            variables: Sequence[int] = ()
            if self.kind is not TRAINING:  # Training leaves optimizer slots and other variables on the device.
                variables = variable_bytes(self.model, {id(tensor) for tensor in traced.captured_inputs})
            analysed = analyse_step(traced, record, batch, mode, sizes=sizes)
            variables = (*analysed.variables, *variables)
            self._analysis = key, dataclasses.replace(analysed, variables=variables, devices=self.watch.devices)
        # A copy with equal rates shares the models.
        self._analysis = key, dataclasses.replace(self._analysis[1], rates=self.rates())
        return self._analysis[1]

    def _plan(self, traced: Any, record: LayerRecord, stopwatch: Stopwatch) -> tuple[TracedStep, StepImporter, Plan]:
        """Analyse and rewrite the step for the sizes that it is planned for.

        Raises:
            BudgetError: If no plan fits; it names the size if batches of other sizes have been trained.
        """
        step, shape = self.sizes.current, self.sizes.image_batch_shape
        if shape is not None and self.batch_shape is not None:
            step.sizes.raise_batch(shape[0])
        analysed = self._analysed(traced, record, shape[0] if shape else None)
        is_used = bool(self.watch.has_earlier_work)
        analysed = dataclasses.replace(analysed, found=stopwatch.found, in_used_process=is_used)
        is_first = step is self.sizes.steps[0]  # A saved plan is for the first size alone.
        request = self.request if is_first else self.request.without_plan()
        try:
            return analysed, *self._rewrite_corrected(step, analysed, request)
        except BudgetError as error:
            if not step.sizes.drop_margin():
                if len(self.sizes.steps) > 1:
                    error.args = (
                        f"{error} This batch of {step.sizes.text()} follows batches of other sizes: let the largest "
                        "batch be the first.",
                    )
                raise
        return self._plan(traced, record, stopwatch)

    def _rewrite_pipeline(self, method: Callable[[Any], Any], specs: Any) -> StepImporter:
        step, shape, function = self.sizes.current, self.sizes.image_batch_shape, keras_function(method)
        function.get_concrete_function(specs)  # Creates variables, so that all traces that are compared find them.
        with collector_paused(), told_if_slow(f"tflms-sft: {self.request.aim()} ...", self.say) as stopwatch:
            traced, importer, plan = build_pipeline(function, self.request, (specs,), {}, shape[0] if shape else None)
        if step.plan is None:
            step.settle(plan, stopwatch, tf_internals.variable_sizes(traced))
            self.on_plan(plan)
        return importer

    def excess_bytes(self, step: PlannedStep) -> int:
        """Return measured less predicted peak of an earlier plan: of this step, else of the latest one of the model."""
        of_step = step.correction.excess_bytes
        return self.excesses.of(self.model, self.kind) if of_step is None else of_step

    def _correct(self, step: PlannedStep, excess_bytes: int) -> None:
        """Correct the next plan of this step, and the first plans of other sizes and trainings."""
        step.correction.excess_bytes = excess_bytes
        self.excesses.set(self.model, self.kind, excess_bytes)

    def check_first_run(self, step: PlannedStep, plan: Plan) -> None:
        """Discard a plan whose first step exceeded the budget, so that the next step is planned with a corrected model.

        Raises:
            BudgetError: If the plan was corrected before.
        """
        correction = step.correction
        if plan.measured is None or not messages.exceeds_budget(plan) or correction.keeps_plan:
            return
        if correction.is_replanned:
            raise messages.over_budget_error(plan, is_used=bool(self.watch.has_earlier_work))
        if self.say is None:  # Otherwise the line with the measured peak says so.
            warnings.warn(messages.over_budget_warning(plan), stacklevel=2)
        correction.is_replanned = True
        self._correct(step, plan.measured.peak_bytes - plan.predicted.peak_bytes)
        step.plan_again()

    def check_later_run(self, step: PlannedStep, plan: Plan, measured: Measurement | None) -> None:
        """Say once for each plan that a later step exceeded the budget; the next epoch, if any, is planned again."""
        correction = step.correction
        is_done = correction.later_peak is not None or correction.keeps_plan
        if measured is None or is_done or not messages.exceeds_budget(plan, measured):
            return
        correction.later_peak = measured
        messages.tell(self.say, messages.later_excess_line(plan, measured, has_epochs=self.has_epochs))

    def plan_again(self) -> None:
        """Discard the plans that a later step exceeded the budget with, so that the next step is planned again.

        The peak of that step corrects the memory model. If no corrected plan fits, the present one stays.
        """
        for step in self.sizes.steps:
            correction = step.correction
            peak, correction.later_peak = correction.later_peak, None
            if peak is not None and step.plan is not None:
                correction.excess_before = self.excess_bytes(step)
                self._correct(step, peak.peak_bytes - step.plan.predicted.peak_bytes)
                step.plan_again()

    def _rewrite_corrected(
        self, step: PlannedStep, traced: TracedStep, request: RewriteRequest
    ) -> tuple[StepImporter, Plan]:
        """Rewrite a step with the corrected model; if no plan fits after a later peak, as before that peak.

        Raises:
            BudgetError: If no plan fits.
        """
        correction = step.correction
        traced = dataclasses.replace(traced, excess_bytes=self.excess_bytes(step))
        before, correction.excess_before = correction.excess_before, None
        try:
            return rewrite_traced(traced, request)
        except BudgetError:
            if before is None:
                raise
        correction.keeps_plan = True
        messages.tell(self.say, messages.NO_SMALLER_PLAN)
        self._correct(step, before)
        return rewrite_traced(dataclasses.replace(traced, excess_bytes=before), request)
