"""Traces the step of a model for one signature, and rewrites it by a new plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.errors import BudgetError
from rewriters.estimates.op_cost import MachineRates
from rewriters.ir import tf_internals
from rewriters.ir.graph import from_concrete_function
from rewriters.step_importer import StepImporter
from tflms_sft._batches.batch_limits import BatchLimit, check_batch_shape, require_batch_size
from tflms_sft._batches.size_selector import SizeSelector
from tflms_sft._keras import messages
from tflms_sft._keras.measured_run import PeakWatch
from tflms_sft._keras.model_checks import variable_bytes
from tflms_sft._keras.replanner import Replanner
from tflms_sft._machine.calibration import machine_rates, stored_rates
from tflms_sft._params.request import RewriteRequest
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._pipeline.build import build_pipeline
from tflms_sft._planner.traced_step import TracedStep, analyse_step, collector_paused
from tflms_sft._report.plan import Plan, amend_plan
from tflms_sft._trace.layer_names import LayerRecord
from tflms_sft._trace.step_tracing import keras_function, trace_keras_step
from tflms_sft._util.keras_internals import TRAINING, StepKind
from tflms_sft._util.progress import Stopwatch, told_if_slow


@dataclasses.dataclass(eq=False)
class StepPlanner:
    """Plans the steps of a model.

    Attributes:
        batch_shape: Shape of the largest batch of images; `None` for that of the first batch.
        on_plan: Called with every new plan.
        say: Called with lines about operations that take long; `None` prints none.
    """

    model: Any
    kind: StepKind
    request: RewriteRequest
    batch_shape: tuple[int, ...] | None
    sizes: SizeSelector
    watch: PeakWatch
    replanner: Replanner
    on_plan: Callable[[Plan], None]
    say: Callable[[str], None] | None

    def rates(self) -> MachineRates:
        """Return the measured rates of the machine; without a budget, those of an earlier measurement."""
        return machine_rates(self.say) if self.request.has_budget else stored_rates()

    def rewrite(self, method: Callable[[Any], Any], specs: Any, open_specs: Any) -> tuple[StepImporter, Any]:
        """Trace and rewrite a step for `specs`; trace it for `open_specs`, of any size, if nothing is rewritten.

        Returns:
            The step, and the specs that it holds for.
        """
        if self.request.pipeline is not None:
            return self._rewrite_pipeline(method, specs), specs
        step, unknown_sizes = self.sizes.current, self.sizes.unknown_sizes
        with told_if_slow("tflms-sft: tracing the step ...", self.say):
            traced, record = trace_keras_step(method, specs, unknown_sizes)
        step.sizes.set_shapes(image_shapes=unknown_sizes.shapes())
        step.sizes.set_arguments(specs)
        shape = self.sizes.image_batch_shape
        check_batch_shape(open_specs, self.batch_shape, self.model.name)
        if shape is None and self.request.has_budget:
            require_batch_size(traced)
        aim = self.request.aim(again=self.replanner.is_corrected(step))
        with collector_paused(), told_if_slow(f"tflms-sft: {aim} ...", self.say) as stopwatch:
            analysed, importer, plan = self._plan(traced, record, stopwatch)
        if len(self.sizes.steps) > 1 and shape is not None:
            plan = amend_plan(plan, f"for batches of {step.sizes.text()}; each size has its own plan")
        if step.plan is None:
            tiles, limit = self.request.tiles, None
            if isinstance(tiles, AutoParams):
                limit = BatchLimit(plan, analysed, tiles, tell=lambda text: messages.tell(self.say, text))
            step.settle(plan, stopwatch, analysed.variables, limit)
            self.on_plan(plan)
        if self.sizes.is_selecting and not plan.changed and (specs != open_specs or step.sizes.image_shapes):
            traced = keras_function(method).get_concrete_function(open_specs)
            return StepImporter(from_concrete_function(traced), traced), open_specs
        return importer, specs

    def _plan(self, traced: Any, record: LayerRecord, stopwatch: Stopwatch) -> tuple[TracedStep, StepImporter, Plan]:
        """Analyse and rewrite the step for the sizes that it is planned for.

        Raises:
            BudgetError: If no plan fits; it names the size if batches of other sizes have been trained.
        """
        step, shape = self.sizes.current, self.sizes.image_batch_shape
        if shape is not None and self.batch_shape is not None:
            step.sizes.raise_batch(shape[0])
        mode = CanonicalMode.EXACT if self.request.tiles is None else CanonicalMode.TILING
        sizes = step.sizes.argument_sizes()
        analysed = analyse_step(traced, record, shape[0] if shape else None, mode, sizes=sizes)
        analysed.use_rates(self.rates())
        analysed.found = stopwatch.found
        analysed.devices = self.watch.devices
        analysed.in_used_process = bool(self.watch.has_earlier_work)
        if self.kind is not TRAINING:  # Training leaves optimizer slots and other variables on the device.
            analysed.variables += variable_bytes(self.model, {id(tensor) for tensor in traced.captured_inputs})
        is_first = step is self.sizes.steps[0]  # A saved plan is for the first size alone.
        request = self.request if is_first else self.request.without_plan()
        try:
            return analysed, *self.replanner.rewrite(step, analysed, request)
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
