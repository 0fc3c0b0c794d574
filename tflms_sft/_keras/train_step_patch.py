"""A rewritten step in a Keras model: connects the objects that install, select, plan and measure it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from rewriters.device.gpu_kernels import without_gpu_optimizers
from rewriters.errors import RewriteError
from rewriters.ir.device_detection import planned_device
from tflms_sft._batches.batch_limits import planned_size_error
from tflms_sft._batches.first_batches import PeekedBatches
from tflms_sft._batches.planned_step import PlannedStep
from tflms_sft._batches.size_selector import SizeSelector
from tflms_sft._cluster.worker_watch import workers_watched
from tflms_sft._keras import messages
from tflms_sft._keras.model_checks import build_optimizer, check_model
from tflms_sft._keras.peak_watch import PeakWatch
from tflms_sft._keras.replicas import Replicas, StrategyProxy, merges_replicas, num_replicas
from tflms_sft._keras.slow_steps import SlowSteps
from tflms_sft._keras.step_installer import StepInstaller, remove_leftover
from tflms_sft._keras.step_planner import Excesses, StepPlanner
from tflms_sft._params.request import RewriteRequest
from tflms_sft._report.plan import Plan
from tflms_sft._rewrite.peak_statistics import watch_tier
from tflms_sft._sources.region_reads import read_errors
from tflms_sft._util.keras_internals import PREDICTION, TRAINING, StepKind


class StepPatch:
    """A rewritten step in a model.

    Args:
        model: The model.
        params: The request: tiles, swaps or a pipeline.
        kind: The model's step that is rewritten.
        batch_shape: Shape of the largest batch of images; `None` for that of the first batch.
        on_plan: Called with every new plan, and after its first step with the plan that has the measured peak.
        on_failure: Called after a step has raised an error and the model has been restored.
        owner: Name of the callback or function that patches, for errors.
        training: Identifies the `fit` of a callback; `None` for a `with` block.
        say: Called with lines about plans, peaks, and operations that take long; `None` prints none.
        excesses: Measured peak less predicted peak of earlier plans, which this patch extends; `None` for none.

    Raises:
        RewriteError: If the model cannot be rewritten.
        ValueError: If something else rewrites the same training.
    """

    def __init__(
        self,
        model: Any,
        params: RewriteRequest,
        kind: StepKind = TRAINING,
        *,
        batch_shape: tuple[int, ...] | None,
        on_plan: Callable[[Plan], None] = lambda plan: None,
        on_failure: Callable[[], None] = lambda: None,
        owner: str,
        training: object = None,
        say: Callable[[str], None] | None = None,
        excesses: Excesses | None = None,
    ) -> None:
        self._check(model)
        self._is_pipeline = params.pipeline is not None
        self._on_plan, self._on_failure, self._say = on_plan, on_failure, say
        self._is_running = self._has_reported_peak = False
        remove_leftover(model, kind, owner, training)
        strategy, tell = model.distribute_strategy, functools.partial(messages.tell, say)
        self._replicas = Replicas(strategy, getattr(model, kind.step)) if merges_replicas(strategy) else None
        if self._replicas is not None and self._is_pipeline:
            raise RewriteError(
                f"Model {model.name!r} trains under a `tf.distribute` strategy, which assigns devices itself. "
                "Create the model outside of the strategy's scope. For data parallelism, pass `data_replicas=`."
            )
        self.installer = StepInstaller(
            model,
            kind,
            step=self.step,
            run=self.run,
            strategy=StrategyProxy(strategy, self._is_step, self._run_replicas) if self._replicas else None,
            trace_again=lambda: self.sizes.trace_again(),
            on_restore=lambda: self.sizes.abandon(),
            owner=owner,
            training=training,
        )
        self.sizes = SizeSelector(
            model,
            params,
            self.installer.make_function,
            batch_shape and (-(-batch_shape[0] // num_replicas(strategy)), *batch_shape[1:]),
            split=self._replicas.split if self._replicas else None,
            is_any_batch=kind is PREDICTION,
            tell=tell,
        )
        self.watch = PeakWatch(self._replicas.devices if self._replicas else ())
        self._planner = StepPlanner(
            model,
            kind,
            params,
            batch_shape,
            self.sizes,
            self.watch,
            excesses=Excesses() if excesses is None else excesses,
            has_epochs=kind is TRAINING and training is not None,
            on_plan=self._report_plan,
            say=say,
        )
        self._slow_steps = SlowSteps(params, model.steps_per_execution, tell)

    def _check(self, model: Any) -> None:
        """Refuse a model whose step cannot be rewritten; build its optimizer where Keras's own step does."""
        check_model(model)
        build_optimizer(model)

    @property
    def plan(self) -> Plan | None:
        """Plan of the latest step; `None` before the first one."""
        return self.sizes.current.plan

    def _report_plan(self, plan: Plan) -> None:
        self._on_plan(plan)
        self._print(self._plan_line(plan))

    def _report_peak(self, plan: Plan) -> None:
        self._on_plan(plan)
        self._print(self._peak_line(plan))

    def _print(self, text: str) -> None:
        if self._say is not None and text:
            self._say(text)

    def _plan_line(self, plan: Plan) -> str:
        is_jit_off, planning_time = self.installer.has_disabled_jit, self.sizes.current.planning.text()
        return messages.plan_line(plan, is_jit_off=is_jit_off, planning_time=planning_time)

    def _peak_line(self, plan: Plan) -> str:
        return messages.peak_line(plan, is_replanned=self.sizes.current.correction.is_replanned)

    def begin_epoch(self) -> None:
        """Start the measurement of an epoch.

        Plans that a step of the previous epoch exceeded the budget with are discarded, so that the next step is planned
        again.
        """
        self.installer.resume()
        self._planner.plan_again()
        self.watch.highest = None

    def run(self, iterator: Any) -> Any:
        """Run the steps of one execution: the model's function while the patch is installed.

        Raises:
            BudgetError: If the plan exceeds the budget and has been corrected before.
            RewriteError: If a batch has another size than the plan allows.
        """
        self._is_running = True
        try:
            batches, peeked = self.sizes.take(iterator)
            with workers_watched(), read_errors(), without_gpu_optimizers():
                return self._run_measured(self.sizes.current, batches, peeked)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise  # The normal end of an epoch.
        except BaseException as error:
            self.installer.restore()
            self._on_failure()
            size_error = planned_size_error(error)
            if size_error is None:
                raise
            raise size_error from None
        finally:
            self._is_running = False

    def _run_measured(self, step: PlannedStep, batches: Any, peeked: PeekedBatches | None) -> Any:
        """Run the steps of one execution, and compare their peak with the budget.

        The peak is reported after the first execution of a plan; if none can be measured, for the first plan only.
        """
        is_first = not step.has_run
        self.watch.note_earlier_work()
        if is_first:
            self._planner.rates()  # A measurement of rates would allocate memory during the step.
        # The statistics are those of one device, or of one GPU per replica.
        has_statistics = not self._is_pipeline and self.watch.start(step.tiers)
        if is_first and has_statistics and peeked is not None:
            peeked.wait_until_prefetched()
            self.watch.start(step.tiers)
        result = self._slow_steps.run(step.plan, functools.partial(step.run, batches))
        if is_first:  # Reading the result waits for a GPU.
            tf.nest.map_structure(lambda value: value.numpy() if hasattr(value, "numpy") else value, result)
        step_bytes = [*step.variable_bytes, *(peeked.bytes_on_device() if peeked is not None else ())]
        measured = self.watch.stop(step_bytes, step.tiers) if step.plan is not None else None
        if is_first:
            step.note_first_run(measured)
        if step.plan is None:
            return result
        if not is_first:
            self._planner.check_later_run(step, step.plan, measured)
            return result
        if measured is not None or not self._has_reported_peak:
            self._has_reported_peak = True
            self._report_peak(step.plan)
        self._planner.check_first_run(step, step.plan)
        return result

    @tf.autograph.experimental.do_not_convert
    def step(self, data: Any) -> Any:
        """Run the rewritten step; Keras traces this method in the place of the original step.

        The original is traced and rewritten once for each signature. Run eagerly, the original itself runs.
        """
        if tf.executing_eagerly():
            return self._original_step(data)
        step = self.sizes.current
        specs, open_specs = self.sizes.specs_of(data)
        key = tuple(tf.nest.flatten(specs))
        step.sizes.set_static_shapes(key)
        if key not in step.importers:
            # Not under `tf.init_scope`, which would pause the gradient tapes of the step.
            importer, planned = self._planner.rewrite(self._original_step, specs, open_specs)
            step.importers[key] = importer, planned
            step.is_open |= planned is open_specs
            if not step.has_run and planned_device().has_allocator_stats:
                for tier in importer.tiers:
                    watch_tier(tier)
        return step.call(key, tf.nest.flatten(data), is_selected=self.sizes.is_selecting)

    @property
    def _original_step(self) -> Callable[[Any], Any]:
        """Return the original step, of all replicas together if there are several."""
        return self._replicas.step if self._replicas is not None else self.installer.original_step

    @tf.autograph.experimental.do_not_convert
    def _run_replicas(self, data: Any) -> Any:
        """Run the one rewritten step of all replicas, where Keras calls `strategy.run`."""
        assert self._replicas is not None
        return self._replicas.pack_results(self.step(self._replicas.split(data)))

    def _is_step(self, function: Any) -> bool:
        """Tell whether a function that is passed to `strategy.run` is the step that Keras traces."""
        return bool(function == self.step)
