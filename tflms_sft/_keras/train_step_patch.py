"""A rewritten step in a Keras model: connects the objects that install, select, plan and measure it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from rewriters.device import properties
from rewriters.device.gpu_kernels import without_gpu_optimizers
from rewriters.errors import RewriteError
from tflms_sft._batches.batch_limits import planned_size_error
from tflms_sft._batches.size_selector import SizeSelector
from tflms_sft._cluster.worker_watch import workers_watched
from tflms_sft._keras import messages
from tflms_sft._keras.measured_run import MeasuredRun, PeakWatch
from tflms_sft._keras.model_checks import build_optimizer, check_model
from tflms_sft._keras.replicas import Replicas, StrategyProxy, merges_replicas, num_replicas
from tflms_sft._keras.slow_steps import SlowSteps
from tflms_sft._keras.step_installer import StepInstaller, remove_leftover
from tflms_sft._keras.step_planner import Excesses, Replanner, StepPlanner
from tflms_sft._params.request import RewriteRequest
from tflms_sft._report.plan import Plan
from tflms_sft._rewrite.peak_statistics import watch_tier
from tflms_sft._sources.region_reads import read_errors
from tflms_sft._util.keras_internals import PREDICTION, TRAINING, StepKind
from tflms_sft._util.progress import Stopwatch


class StepPatch:
    """A rewritten step in a model.

    Args:
        model: The model.
        params: The request: tiles, swaps or a pipeline.
        kind: The model's step that is rewritten.
        batch_shape: Shape of the largest batch of images; `None` for that of the first batch.
        on_plan: Called with every new plan.
        on_measured: Called with a plan after its first step; if no peak can be measured, only with the first plan.
        on_failure: Called after a step has raised an error and the model has been restored.
        owner: Name of the callback or function that patches, for errors.
        training: Identifies the `fit` of a callback; `None` for a `with` block.
        say: Called with lines about operations that take long; `None` prints none.
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
        on_plan: Callable[[Plan], None],
        on_measured: Callable[[Plan], None],
        on_failure: Callable[[], None] = lambda: None,
        owner: str,
        training: object = None,
        say: Callable[[str], None] | None = None,
        excesses: Excesses | None = None,
    ) -> None:
        self._check(model)
        self._on_failure, self._is_running = on_failure, False
        remove_leftover(model, kind, owner, training)
        strategy, tell = model.distribute_strategy, functools.partial(messages.tell, say)
        self._replicas = Replicas(strategy, getattr(model, kind.step)) if merges_replicas(strategy) else None
        if self._replicas is not None and params.pipeline is not None:
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
        self.replanner = Replanner(
            model,
            kind,
            Excesses() if excesses is None else excesses,
            has_epochs=kind is TRAINING and training is not None,
            is_used=lambda: bool(self.watch.has_earlier_work),
            say=say,
        )
        self._planner = StepPlanner(
            model, kind, params, batch_shape, self.sizes, self.replanner, self.watch.devices, on_plan, say
        )
        self._measured_run = MeasuredRun(
            is_pipeline=params.pipeline is not None,
            watch=self.watch,
            slow_steps=SlowSteps(params, model.steps_per_execution, tell),
            replanner=self.replanner,
            prepare=self._planner.rates,
            on_measured=on_measured,
        )

    def _check(self, model: Any) -> None:
        """Refuse a model whose step cannot be rewritten; build its optimizer where Keras's own step does."""
        check_model(model)
        build_optimizer(model)

    @property
    def plan(self) -> Plan | None:
        """Plan of the latest step; `None` before the first one."""
        return self.sizes.current.plan

    @property
    def planning(self) -> Stopwatch:
        """Stopwatch with the time that this plan took."""
        return self.sizes.current.planning

    @property
    def is_replanned(self) -> bool:
        """Tell whether this plan is corrected by the measured peak of an earlier one."""
        return self.replanner.is_replanned(self.sizes.current)

    def plan_again_after_excess(self) -> None:
        """Discard the plans that a later step exceeded the budget with, so that the next step is planned again."""
        self.installer.resume()
        self.replanner.plan_again(self.sizes.steps)

    def run(self, iterator: Any) -> Any:
        """Run the steps of one execution: the model's function while the patch is installed.

        Raises:
            RewriteError: If a batch has another size than the plan allows.
        """
        self._is_running = True
        try:
            batches, peeked = self.sizes.take(iterator)
            with workers_watched(), read_errors(), without_gpu_optimizers():
                return self._measured_run.run(self.sizes.current, batches, peeked)
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
            step.add(key, importer, planned, is_open=planned is open_specs)
            if not step.has_run and properties.has_allocator_stats():
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
