"""Patches the train step of a Keras model with a rewritten step, and restores the original.

Keras looks up `train_step` when it builds its train function, and the train function at every step. The patch replaces
`train_step` by a method that rewrites, and has the train function built again. It restores both

- at the end of training,
- after an error in a step, because Keras calls no callback then,
- at the start of the next training, if another callback has raised an error: the patch also replaces
  `make_train_function`, which Keras calls first in every training.

Evaluation and prediction work alike with another `StepKind`; see `forward_step_patch.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Generator
from typing import Any

import tensorflow as tf

from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.device import properties
from rewriters.device.gpu_kernels import without_gpu_optimizers
from rewriters.errors import BudgetError, RewriteError
from rewriters.estimates.op_cost import MachineRates
from rewriters.ir import tf_internals
from rewriters.ir.graph import from_concrete_function
from rewriters.step_importer import StepImporter
from rewriters.swapping.tiers import Tier
from tflms_sft._batches.batch_limits import (
    BatchLimit,
    check_batch_shape,
    planned_size_error,
    require_batch_size,
    with_planned_sizes,
)
from tflms_sft._batches.first_batches import PeekedBatches, can_peek, varies_in_size
from tflms_sft._batches.planned_step import PlannedStep, Shapes, positions_of, shapes_of, spec_with_sizes, step_for
from tflms_sft._cluster.worker_watch import workers_watched
from tflms_sft._keras import messages
from tflms_sft._keras.model_checks import build_optimizer, check_model
from tflms_sft._keras.peak_watch import PeakWatch
from tflms_sft._keras.replicas import Replicas, StrategyProxy, merges_replicas, num_replicas
from tflms_sft._keras.slow_steps import SlowSteps
from tflms_sft._keras.step_kinds import TRAINING, Excesses
from tflms_sft._machine.calibration import machine_rates, stored_rates
from tflms_sft._params.request import RewriteRequest
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._pipeline.build import build_pipeline
from tflms_sft._planner.traced_step import TracedStep, analyse_step, collector_paused
from tflms_sft._report.plan import Plan, amend_plan
from tflms_sft._report.plan_records import Measurement
from tflms_sft._rewrite.peak_statistics import watch_tier
from tflms_sft._rewrite.rewrite import rewrite_traced
from tflms_sft._sources.open_shapes import UnknownSizes, has_unknown_sizes
from tflms_sft._sources.region_reads import read_errors
from tflms_sft._trace.layer_names import LayerRecord
from tflms_sft._trace.step_tracing import keras_function, trace_keras_step
from tflms_sft._util.progress import Stopwatch, told_if_slow


class StepPatch:
    """A rewritten step in a model.

    Args:
        model: The model.
        params: The request: tiles, swaps or a pipeline.
        batch_shape: Shape of the largest batch of images; `None` for that of the first batch.
        on_plan: Called with every new plan.
        on_measured: Called with a plan after its first step; if no peak can be measured, only with the first plan.
        owner: Name of the callback or function that patches, for errors.
        training: Identifies the `fit` of a callback; `None` for a `with` block.
        say: Called with lines about operations that take long; `None` prints none.
        excesses: Measured peak less predicted peak of earlier plans, which this patch extends; `None` for none.

    Attributes:
        model: The model.
        kind: The model's step that is patched.
        watch: Measured peaks of the steps.
    """

    kind = TRAINING

    def __init__(
        self,
        model: Any,
        params: RewriteRequest,
        *,
        batch_shape: tuple[int, ...] | None,
        on_plan: Callable[[Plan], None],
        on_measured: Callable[[Plan], None],
        owner: str,
        training: object = None,
        say: Callable[[str], None] | None = None,
        excesses: Excesses | None = None,
    ) -> None:
        self.model = model
        self._say = say
        self._tell = functools.partial(messages.tell, say)
        self._owner = owner
        self._training = training
        self._params = params
        self._batch_shape = batch_shape
        self._on_plan = on_plan
        self._on_measured = on_measured
        self._now = PlannedStep()
        self._planned = [self._now]
        self._selects_size = False
        self._unknown_sizes = UnknownSizes()
        self._saved_attributes: dict[str, Any] = {}
        self._jit_compile: Any = None
        self._patched_function: Any = None
        self._num_replicas = 1
        self._replicas: Replicas | None = None
        self._excesses = Excesses() if excesses is None else excesses
        self.watch = PeakWatch()

    @property
    def plan(self) -> Plan | None:
        """Plan of the latest step; `None` before the first one."""
        return self._now.plan

    @property
    def planning(self) -> Stopwatch:
        """Stopwatch with the time that this plan took."""
        return self._now.planning

    @property
    def is_replanned(self) -> bool:
        """Tell whether this plan is corrected by the measured peak of an earlier one."""
        return self._now.is_replanned

    def install(self) -> None:
        """Replace the step, after removing the patch that a failed training left behind.

        Raises:
            RewriteError: If the model cannot be rewritten.
            ValueError: If something else rewrites the same training.
        """
        self._check()
        model = self.model
        previous = model.__dict__.get(self.kind.slot)
        if previous is not None:
            same_fit = previous._training is self._training
            if previous._training is not None:  # A `with` block removes its own patch.
                previous.restore()
            if previous._training is None or same_fit:
                raise messages.rewritten_twice_error(self.kind.step, model.name, previous._owner, self._owner)
        self._insert()
        self._replace_function_with_patch()

    def _check(self) -> None:
        """Refuse a model whose step cannot be rewritten; build its optimizer where Keras's own step does."""
        check_model(self.model)
        build_optimizer(self.model)

    def resume(self) -> None:
        """Install the patch again after a call inside this training removed it.

        A `train_on_batch` in a callback is such a call: it builds a train function as a new training does, and runs
        the original step.
        """
        if self.kind.slot not in self.model.__dict__:
            self._insert()
            setattr(self.model, self.kind.function, self._patched_function)

    def _insert(self) -> None:
        model, kind = self.model, self.kind
        self._slow_steps = SlowSteps(self._params, model.steps_per_execution, self._tell)
        strategy = model.distribute_strategy
        self._original = getattr(model, kind.step)
        if merges_replicas(strategy):
            if self._params.pipeline is not None:
                raise RewriteError(
                    f"Model {model.name!r} trains under a `tf.distribute` strategy, which assigns devices itself. "
                    "Create the model outside of the strategy's scope. For data parallelism, pass `data_replicas=`."
                )
            self._replicas = self._replicas or Replicas(strategy, self._original)
            self._original = self._replicas.step
            self._num_replicas = num_replicas(strategy)
            self.watch.devices = self._replicas.devices
        self._make_original_function = getattr(model, kind.make)
        names = (kind.step, kind.make, *(["_distribute_strategy"] if self._replicas else []))
        self._saved_attributes = {name: model.__dict__.get(name) for name in names}
        self._jit_compile = model.jit_compile
        object.__setattr__(model, kind.slot, self)
        model.jit_compile = False
        object.__setattr__(model, kind.step, self.step)
        if self._replicas is not None:
            proxy = StrategyProxy(strategy, self._is_step, self._run_replicas)
            object.__setattr__(model, "_distribute_strategy", proxy)
        if self._training is not None:
            object.__setattr__(model, kind.make, self._replace_function)

    def _replace_function_with_patch(self) -> None:
        """Have the step traced again, for one size."""
        self._planned = [self._now]
        self._now.importers.clear()
        self._patched_function = self.run  # Bound once, so that `is` recognises it.
        setattr(self.model, self.kind.function, self._patched_function)
        try:
            self._make_function()
        except BaseException:  # A model may define `make_train_function` itself, and Keras calls no callback then.
            self.restore()
            raise

    def _make_function(self) -> None:
        """Have Keras build the compiled function of the present size, and put the patch in its place."""
        self._make_original_function(force=True)
        self._now.use(getattr(self.model, self.kind.function))
        setattr(self.model, self.kind.function, self._patched_function)

    def _replace_function(self, force: bool = False) -> None:
        """Trace the step of this training again (`force`), or remove the patch because a new training begins."""
        if force:
            self._replace_function_with_patch()
        else:
            self.restore()
            getattr(self.model, self.kind.make)()

    def restore(self) -> None:
        """Restore the model; does nothing the second time."""
        model = self.model
        if not self.is_installed:
            return
        object.__delattr__(model, self.kind.slot)
        for planned in self._planned:
            planned.abandon()
        for name, saved in self._saved_attributes.items():
            if saved is not None:
                object.__setattr__(model, name, saved)
            elif name in model.__dict__:
                object.__delattr__(model, name)
        if getattr(model, self.kind.function) is self._patched_function:  # Else `compile` has set `jit_compile` since.
            model.jit_compile = self._jit_compile
        self._restore_function()

    def _restore_function(self) -> None:
        setattr(self.model, self.kind.function, None)
        getattr(self.model, self.kind.make)()

    @property
    def is_installed(self) -> bool:
        """Tell whether the patch is in the model."""
        return getattr(self.model, "__dict__", {}).get(self.kind.slot) is self

    @property
    def has_disabled_jit(self) -> bool:
        """Tell whether the model is compiled with `jit_compile`, which the patch turns off."""
        return bool(self._jit_compile)

    def run(self, iterator: Any) -> Any:
        """Run the steps of one execution: the model's function while the patch is installed.

        Raises:
            RewriteError: If a batch has another size than the plan allows.
        """
        try:
            peeked = self._peek(iterator)
            if peeked is not None:
                iterator = peeked if self._has_open_sizes(iterator) else peeked.replay()
            elif isinstance(iterator, Generator):  # Of `train_on_batch`.
                batches = list(itertools.islice(iterator, self.model.steps_per_execution))
                self._select_size(batches[0])
                iterator = iter(batches)
            with workers_watched(), read_errors(), without_gpu_optimizers():
                return self._run_measured(iterator, peeked)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise  # The normal end of an epoch.
        except BaseException as error:
            self.restore()
            size_error = planned_size_error(error)
            if size_error is None:
                raise
            raise size_error from None

    def _run_measured(self, batches: Any, peeked: PeekedBatches | None) -> Any:
        """Run the steps, and report the measured peak of the first execution of a plan."""
        now = self._now
        first = not now.is_measured
        self.watch.note_earlier_work()
        if first:
            self._rates()  # A calibration would allocate memory during the step.
        # The statistics are those of one device, or of one GPU per replica.
        has_statistics = self._params.pipeline is None and self.watch.start(self._tiers)
        if first and has_statistics and peeked is not None:
            peeked.wait_until_prefetched()
            self.watch.start(self._tiers)
        result = self._slow_steps.run(now.plan, functools.partial(now.run, batches))
        if now.plan is None:
            return result
        step_bytes = [*now.variable_bytes, *(peeked.bytes_on_device() if peeked is not None else ())]
        if first:
            now.is_measured = True
            tf.nest.map_structure(lambda value: value.numpy() if hasattr(value, "numpy") else value, result)
            measured = self.watch.stop(step_bytes, self._tiers)
            if measured is not None:
                now.plan = amend_plan(now.plan, measured=measured)
            if measured is not None or sum(planned.is_measured for planned in self._planned) == 1:
                self._on_measured(now.plan)
            self._enforce_budget(now.plan)
        else:
            self._report_excess(now.plan, self.watch.stop(step_bytes, self._tiers))
        return result

    def _rates(self) -> MachineRates:
        return machine_rates(self._say) if self._params.has_budget else stored_rates()

    def _enforce_budget(self, plan: Plan) -> None:
        """Discard a plan whose step exceeded the budget, so that the next step is planned with a corrected model.

        Raises:
            BudgetError: If the plan was corrected before.
        """
        if not messages.exceeds_budget(plan) or self._now.keeps_plan:
            return
        if self._now.is_replanned:
            raise messages.over_budget_error(plan, is_used=bool(self.watch.has_earlier_work))
        assert plan.measured is not None
        if self._say is None:  # Otherwise `on_measured` has printed a line.
            warnings.warn(messages.over_budget_warning(plan), stacklevel=2)
        self._now.is_replanned = True
        self._correct(plan.measured.peak_bytes - plan.predicted.peak_bytes)
        self._now.discard()
        self._make_function()

    def _report_excess(self, plan: Plan, measured: Measurement | None) -> None:
        """Say once for each plan that a later step exceeded the budget; the next epoch, if any, is planned again."""
        is_done = self._now.excess is not None or self._now.keeps_plan
        if measured is None or is_done or not messages.exceeds_budget(plan, measured):
            return
        self._now.excess = measured
        has_epochs = self.kind is TRAINING and self._training is not None
        self._tell(messages.later_excess_line(plan, measured, has_epochs=has_epochs))

    def plan_again_after_excess(self) -> None:
        """Discard the plans that a later step exceeded the budget with, so that the next step is planned again.

        The peak of that step corrects the memory model. If no corrected plan fits, the present one stays.
        """
        for planned in self._planned:
            if planned.excess is None or planned.plan is None or planned.keeps_plan:
                continue
            self._now = planned
            planned.excess_before = self._excess_bytes
            self._correct(planned.excess.peak_bytes - planned.plan.predicted.peak_bytes)
            self._now.discard()
            self._make_function()

    @property
    def _excess_bytes(self) -> int:
        """Measured peak less predicted peak of an earlier plan: of this size, else of the latest one of the model."""
        of_size = self._now.excess_bytes
        return self._excesses.of(self.model, self.kind) if of_size is None else of_size

    def _correct(self, excess_bytes: int) -> None:
        """Correct the next plan of this size, and the first plans of other sizes and trainings."""
        self._now.excess_bytes = excess_bytes
        self._excesses.set(self.model, self.kind, excess_bytes)

    def _peek(self, iterator: Any) -> PeekedBatches | None:
        """Fetch the batches of an execution, to measure it or to learn their shapes; `None` if not needed.

        The step may be traced with unknown sizes, but the planner needs static ones.
        """
        if not can_peek(iterator):
            return None
        selects = self._has_open_sizes(iterator)
        now = self._now
        is_shape_known = bool(self._batch_shape or now.shapes) or now.plan is not None
        if not selects:
            if now.is_measured or now.has_peeked:
                return None
            if is_shape_known and (self._params.pipeline is not None or not properties.has_allocator_stats()):
                return None
        try:
            peeked = PeekedBatches(iterator, self.model.steps_per_execution)
        except StopIteration:
            if not selects or now.function is None:
                raise
            return None  # The step itself finds the end: ops that need no batch run once more, as in plain training.
        if selects:
            self._select_size(peeked.first)
        elif not is_shape_known:
            self._remember_shapes(peeked.first)
        self._now.has_peeked = True
        return peeked

    @property
    def _can_select_size(self) -> bool:
        """Tell whether each execution has batches of one size, and can have a plan of its own."""
        return self.model.steps_per_execution == 1 and self._params.pipeline is None and self._replicas is None

    def _has_open_sizes(self, iterator: Any) -> bool:
        """Tell whether each batch of a data set is looked at, since it may have a size and a plan of its own."""
        varies = varies_in_size(iterator, leading=self._params.has_budget)
        return self._can_select_size and (varies or has_unknown_sizes(self.model))

    def _select_size(self, batch: Any) -> None:
        """Continue with the step for the size of a batch. It is planned when it runs for the first time."""
        if not self._can_select_size:
            return
        self._unknown_sizes.set_arguments(batch)
        shapes, image_shapes = shapes_of(batch), self._unknown_sizes.shapes()
        self._selects_size = True
        if not self._now.shapes:
            self._now.shapes = shapes
        if self._now.holds_for(shapes, image_shapes):
            return
        self._now = step_for(self._planned, shapes, image_shapes) or self._for_new_size(shapes, image_shapes)

    def _for_new_size(self, shapes: Shapes, image_shapes: Shapes) -> PlannedStep:
        """Return a step for another size."""
        self._now = PlannedStep(shapes, image_shapes, has_margin=len(self._planned) + 1 >= messages.MANY_SIZES)
        self._planned.append(self._now)
        if len(self._planned) == messages.MANY_SIZES:
            self._tell(messages.many_sizes_line(len(self._planned)))
        self._make_function()
        return self._now

    @property
    def _tiers(self) -> list[Tier]:
        return [tier for importer, _ in self._now.importers.values() for tier in importer.tiers]

    def _remember_shapes(self, data: Any) -> None:
        self._now.shapes = shapes_of(data if self._replicas is None else self._replicas.split(data))

    @property
    def _image_batch_shape(self) -> tuple[int, ...] | None:
        """Shape of the largest batch of images of one replica: as given, or that of the first batch if it is larger."""
        shape = self._now.largest_shape
        if self._batch_shape is None:
            return shape
        batch = -(-self._batch_shape[0] // self._num_replicas)
        return (max(batch, *shape[:1]) if shape else batch, *self._batch_shape[1:])

    @tf.autograph.experimental.do_not_convert
    def step(self, data: Any) -> Any:
        """Run the rewritten step; Keras traces this method in the place of the original step.

        The original is traced and rewritten once for each signature. Run eagerly, the original itself runs.
        """
        if tf.executing_eagerly():
            return self._original(data)
        now = self._now
        leaves = tf.nest.flatten(data)
        specs = tf.nest.pack_sequence_as(data, list(map(self._spec, leaves, positions_of(leaves))))
        key = tuple(tf.nest.flatten(specs))
        now.use_static_shapes(key)
        if key not in now.importers:
            # Not under `tf.init_scope`, which would pause the gradient tapes of the step.
            now.importers[key] = self._rewrite(specs, tf.nest.map_structure(self._open_spec, data))
            if not now.is_measured and properties.has_allocator_stats():
                for tier in now.importers[key][0].tiers:
                    watch_tier(tier)
        importer, planned = now.importers[key]
        arguments = with_planned_sizes(leaves, tf.nest.flatten(planned))
        # A step that is not rewritten also runs larger batches, for which `PlannedStep.extend` has predicted the peak.
        if now.batch_limit is not None and now.plan is not None and (now.plan.changed or not self._selects_size):
            arguments = now.batch_limit.check_batch(arguments)
        return importer(arguments)

    @tf.autograph.experimental.do_not_convert
    def _run_replicas(self, data: Any) -> Any:
        """Run the one rewritten step of all replicas, where Keras calls `strategy.run`."""
        assert self._replicas is not None
        return self._replicas.pack_results(self.step(self._replicas.split(data)))

    def _is_step(self, function: Any) -> bool:
        """Tell whether a function that is passed to `strategy.run` is the step that Keras traces."""
        return bool(function == self.step)

    def _open_spec(self, tensor: Any) -> Any:
        """Return the spec of one input as the data set gives it; `None` for `None`."""
        if tensor is None:
            return None
        if not isinstance(tensor, tf.Tensor):
            return tf.type_spec_from_value(tensor)
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    def _spec(self, tensor: Any, position: int) -> Any:
        """Return the spec of one input, with the sizes of the first batch where those of the data set are unknown."""
        shapes = self._now.shapes
        known = (shapes[position] if position < len(shapes) else None) or self._batch_shape or ()
        return spec_with_sizes(self._open_spec(tensor), known, images_only=not self._selects_size)

    def _rewrite(self, specs: Any, open_specs: Any) -> tuple[StepImporter, Any]:
        """Trace and rewrite the step for `specs`; trace it for `open_specs`, of any size, if nothing is rewritten.

        Returns:
            The step, and the specs that it holds for.
        """
        if self._params.pipeline is not None:
            return self._rewrite_pipeline(specs), specs
        now = self._now
        with told_if_slow("tflms-sft: tracing the step ...", self._say):
            traced, record = trace_keras_step(self._original, specs, self._unknown_sizes)
        now.image_shapes = now.image_shapes or self._unknown_sizes.shapes()
        now.set_arguments(specs)
        shape = self._image_batch_shape
        check_batch_shape(open_specs, self._batch_shape, self.model.name)
        if shape is None and self._params.has_budget:
            require_batch_size(traced)
        aim = self._params.aim(again=now.is_replanned or now.excess_before is not None)
        with collector_paused(), told_if_slow(f"tflms-sft: {aim} ...", self._say) as stopwatch:
            analysed, importer, plan = self._plan(traced, record, stopwatch)
        if len(self._planned) > 1 and shape is not None:
            plan = amend_plan(plan, f"for batches of {now.shape_text()}; each size has its own plan")
        if now.plan is None:
            now.settle(plan, stopwatch, analysed.variables)
            if isinstance(self._params.tiles, AutoParams):
                now.batch_limit = BatchLimit(plan, analysed, self._params.tiles, tell=self._tell)
            self._on_plan(plan)
        if self._selects_size and not plan.changed and (specs != open_specs or now.image_shapes):
            now.is_open = True
            traced = keras_function(self._original).get_concrete_function(open_specs)
            return StepImporter(from_concrete_function(traced), traced), open_specs
        return importer, specs

    def _plan(self, traced: Any, record: LayerRecord, stopwatch: Stopwatch) -> tuple[TracedStep, StepImporter, Plan]:
        """Analyse and rewrite the step for the sizes that it is planned for."""
        shape = self._image_batch_shape
        if shape is not None and self._batch_shape is not None:
            self._now.use_limit(shape[0])
        mode = CanonicalMode.EXACT if self._params.tiles is None else CanonicalMode.TILING
        sizes = self._now.argument_sizes()
        analysed = analyse_step(traced, record, shape[0] if shape else None, mode, sizes=sizes)
        analysed = dataclasses.replace(
            analysed,
            rates=self._rates(),
            excess_bytes=self._excess_bytes,
            found=stopwatch.found,
            devices=self.watch.devices,
            in_used_process=bool(self.watch.has_earlier_work),
            variables=(*analysed.variables, *self._untouched_variable_bytes(traced)),
        )
        try:
            return analysed, *self._rewrite_analysed(analysed)
        except BudgetError:
            if not self._now.drop_margin():
                raise
        return self._plan(traced, record, stopwatch)

    @property
    def _size_params(self) -> RewriteRequest:
        """The request; a saved plan is for the first size alone."""
        return self._params if self._now is self._planned[0] else self._params.without_plan()

    def _rewrite_analysed(self, analysed: TracedStep) -> tuple[StepImporter, Plan]:
        """Rewrite the step; after an excess of a later step by the plan before, if no corrected one fits.

        Raises:
            BudgetError: If no plan fits; it names the size if batches of other sizes have been trained.
        """
        try:
            return self._rewrite_with_fallback(analysed)
        except BudgetError as error:
            if len(self._planned) > 1:
                error.args = (
                    f"{error} This batch of {self._now.shape_text()} follows batches of other sizes: let the largest "
                    "batch be the first.",
                )
            raise

    def _rewrite_with_fallback(self, analysed: TracedStep) -> tuple[StepImporter, Plan]:
        before, self._now.excess_before = self._now.excess_before, None
        try:
            return rewrite_traced(analysed, self._size_params)
        except BudgetError:
            if before is None:
                raise
        self._now.keeps_plan = True
        self._tell(messages.NO_SMALLER_PLAN)
        self._correct(before)
        return rewrite_traced(dataclasses.replace(analysed, excess_bytes=before), self._size_params)

    def _rewrite_pipeline(self, specs: Any) -> StepImporter:
        shape, function = self._image_batch_shape, keras_function(self._original)
        function.get_concrete_function(specs)  # Creates variables, so that all traces that are compared find them.
        with collector_paused(), told_if_slow(f"tflms-sft: {self._params.aim()} ...", self._say) as stopwatch:
            traced, importer, plan = build_pipeline(function, self._params, (specs,), {}, shape[0] if shape else None)
        now = self._now
        if now.plan is None:
            now.settle(plan, stopwatch, tf_internals.variable_sizes(traced))
            self._on_plan(plan)
        return importer

    def _untouched_variable_bytes(self, traced: Any) -> list[int]:
        """Return the bytes of each variable that is in memory while the step runs but that it does not use."""
        return []
