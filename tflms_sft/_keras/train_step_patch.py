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
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.device import properties
from rewriters.errors import BudgetError, RewriteError
from rewriters.estimates.op_cost import MachineRates
from rewriters.ir import tf_internals
from rewriters.step_importer import StepImporter
from rewriters.swapping.tiers import Tier
from tflms_sft._cluster.worker_watch import workers_watched
from tflms_sft._keras.batch_limits import BatchLimit, ensure_planned_size, is_image, planned_size_error
from tflms_sft._keras.first_batches import PeekedBatches, can_peek
from tflms_sft._keras.messages import exceeds_budget, later_excess_line, over_budget_error, over_budget_warning
from tflms_sft._keras.model_checks import build_optimizer, check_model
from tflms_sft._keras.peak_watch import PeakWatch
from tflms_sft._keras.replicas import Replicas, StrategyProxy, merges_replicas, num_replicas
from tflms_sft._machine.calibration import machine_rates, stored_rates
from tflms_sft._params.request import RewriteRequest
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._pipeline.build import build_pipeline
from tflms_sft._planner.traced_step import TracedStep, analyse_step, collector_paused
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import Measurement
from tflms_sft._rewrite.measure import watch_tier
from tflms_sft._rewrite.rewrite import rewrite_traced
from tflms_sft._trace.layer_names import recorded_layers
from tflms_sft._trace.step_tracing import check_image_sizes, keras_function
from tflms_sft._util.progress import Stopwatch, told_if_slow

_SLOT = "_tflms_sft_patch"


@dataclasses.dataclass(frozen=True)
class StepKind:
    """The attributes of a Keras model that define one of its steps.

    Attributes:
        step: Name of the method for one batch, such as `"train_step"`.
        function: Name of the compiled function that runs one or several steps.
        make: Name of the method that builds this function.
        slot: Name of the attribute that holds the installed patch.
    """

    step: str
    function: str
    make: str
    slot: str


TRAINING = StepKind("train_step", "train_function", "make_train_function", _SLOT)


class StepPatch:
    """A rewritten step in a model.

    Args:
        model: The model.
        params: The request: tiles, swaps or a pipeline.
        batch_shape: Shape of the largest batch of images; `None` for that of the first batch.
        on_plan: Called with every new plan.
        on_measured: Called with the plan after its first step was measured.
        owner: Name of the callback or function that patches, for errors.
        training: Identifies the `fit` of a callback; `None` for a `with` block.
        say: Called with lines about operations that take long; `None` prints none.
        corrections: Measured peak over predicted peak of earlier plans, by model and kind of step; is extended.

    Attributes:
        model: The model.
        plan: Plan of the first traced signature; `None` before.
        planning: Stopwatch with the time that planning took.
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
        corrections: dict[Any, float] | None = None,
    ) -> None:
        self.model = model
        self._say = say
        self.planning = Stopwatch()
        self._owner = owner
        self._training = training
        self.plan: Plan | None = None
        self._params = params
        self._batch_shape = batch_shape
        self._first_batch: list[tuple[int, ...]] = []
        self._on_plan = on_plan
        self._on_measured = on_measured
        self._steps: dict[Any, StepImporter] = {}
        self._saved_attributes: dict[str, Any] = {}
        self._jit_compile: Any = None
        self._patched_function: Any = None
        self._is_measured = False
        self._has_peeked = False
        self._batch_limit: BatchLimit | None = None
        self._variable_bytes: list[int] = []
        self._num_replicas = 1
        self._replicas: Replicas | None = None
        self._corrections = {} if corrections is None else corrections
        self._is_replanned = False
        self.watch = PeakWatch()
        self._excess: Measurement | None = None
        self._correction_before: float | None = None
        self._has_smallest_plan = False

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
                step = self.kind.step.replace("_", " ")
                raise ValueError(
                    f"The {step} of model {model.name!r} is rewritten twice: by {previous._owner} and by "
                    f"{self._owner}. Use one of them: `MemoryBudget` and `budget` choose segments and swaps "
                    "(`swap=LMSParams(...)` restricts the swaps), `SFT` accepts several segments in `segments=`, and "
                    "`LMS(tiles=SFTParams(...))` tiles first."
                )
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
        self._steps.clear()
        self._make_original_function(force=True)
        self._compiled_function = getattr(self.model, self.kind.function)
        self._patched_function = self.run  # Bound once, so that `is` recognises it.
        setattr(self.model, self.kind.function, self._patched_function)

    def _replace_function(self, force: bool = False) -> None:
        """Replace `make_train_function`.

        With `force`, a callback requests that the step of this training is traced again. Without, a new training
        begins, and the patch of the previous one is removed.
        """
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
        for importer in self._steps.values():
            importer.abandon()
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
        return self.model.__dict__.get(self.kind.slot) is self

    @property
    def has_disabled_jit(self) -> bool:
        """Tell whether the model is compiled with `jit_compile`, which the patch turns off."""
        return bool(self._jit_compile)

    def run(self, iterator: Any) -> Any:
        """Run the steps of one execution: the model's function while the patch is installed.

        Raises:
            RewriteError: If a batch or an image has another size than the plan allows.
        """
        try:
            peeked = self._peek(iterator)
            with workers_watched():
                return self._run_measured(iterator if peeked is None else peeked.replay(), peeked)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise  # The normal end of an epoch.
        except BaseException as error:
            self.restore()
            size_error = planned_size_error(error)
            if size_error is None:
                raise
            raise size_error from None

    def _run_measured(self, iterator: Any, peeked: PeekedBatches | None) -> Any:
        """Run the steps, and report the measured peak of the first execution."""
        first = not self._is_measured
        if first:
            self._rates()  # A calibration would allocate memory during the step.
        # The statistics are those of one device.
        has_statistics = self._params.pipeline is None and self.watch.start(self._tiers)
        if first and has_statistics and peeked is not None:
            peeked.wait_until_prefetched()
            self.watch.start(self._tiers)
        result = self._compiled_function(iterator)
        if self.plan is None:
            return result
        if first:
            self._is_measured = True
            tf.nest.map_structure(lambda value: value.numpy() if hasattr(value, "numpy") else value, result)
            step_bytes = [*self._variable_bytes, *(peeked.bytes_on_device() if peeked is not None else ())]
            self.plan.measured = self.watch.stop(step_bytes, self._tiers)
            self._on_measured(self.plan)
            self._enforce_budget(self.plan)
        else:
            self._report_excess(self.plan, self.watch.stop(self._variable_bytes, self._tiers))
        return result

    def _rates(self) -> MachineRates:
        return machine_rates(self._say) if self._params.has_budget else stored_rates()

    def _enforce_budget(self, plan: Plan) -> None:
        """Discard a plan whose step exceeded the budget, so that the next step is planned with a corrected model.

        Raises:
            BudgetError: If the plan was corrected before.
        """
        if not exceeds_budget(plan) or self._has_smallest_plan:
            return
        if self.is_replanned:
            raise over_budget_error(plan)
        assert plan.measured is not None
        if self._say is None:  # Otherwise `on_measured` has printed a line.
            warnings.warn(over_budget_warning(plan), stacklevel=2)
        self._is_replanned = True
        self._corrections[self._correction_key] = plan.measured.peak_bytes / plan.predicted.peak_bytes
        self._discard_plan()

    def _report_excess(self, plan: Plan, measured: Measurement | None) -> None:
        """Say once for each plan that a later step exceeded the budget, and have the next epoch planned again."""
        if measured is None or self._excess is not None or not exceeds_budget(plan, measured):
            return
        self._excess = measured
        text = later_excess_line(plan, measured)
        if self._say is None:
            warnings.warn(text, stacklevel=2)
        else:
            self._say(text)

    def plan_again_after_excess(self) -> None:
        """Discard a plan that a later step exceeded the budget with, so that the next step is planned again.

        The peak of that step corrects the memory model. If no corrected plan fits, the present one stays.
        """
        if self._excess is None or self.plan is None or self._has_smallest_plan:
            return
        self._correction_before = self._corrections.get(self._correction_key, 1.0)
        self._corrections[self._correction_key] = self._excess.peak_bytes / self.plan.predicted.peak_bytes
        self._discard_plan()

    def _discard_plan(self) -> None:
        self.plan = self._excess = None
        self._is_measured = self._has_peeked = False
        for importer in self._steps.values():
            importer.abandon()
        self._replace_function_with_patch()

    @property
    def is_replanned(self) -> bool:
        """Tell whether the plan is corrected by the measured peak of an earlier one."""
        return self._is_replanned

    @property
    def _correction_key(self) -> Any:
        """Key of this model and step in `corrections`."""
        return (id(self.model), self.kind.slot)

    def _peek(self, iterator: Any) -> PeekedBatches | None:
        """Fetch the batches of the first execution, to measure it or to learn their shapes; `None` if not needed.

        The step may be traced with unknown sizes, but the planner needs static ones.
        """
        if self._is_measured or self._has_peeked or not can_peek(iterator):
            return None
        is_shape_known = bool(self._batch_shape or self._first_batch) or self.plan is not None
        if is_shape_known and (self._params.pipeline is not None or not properties.has_allocator_stats()):
            return None
        self._has_peeked = True
        peeked = PeekedBatches(iterator, self.model.steps_per_execution)
        if not is_shape_known:
            self._remember_shapes(peeked.first)
        return peeked

    @property
    def _tiers(self) -> list[Tier]:
        return [tier for importer in self._steps.values() for tier in importer.tiers]

    def _remember_shapes(self, data: Any) -> None:
        data = data if self._replicas is None else self._replicas.split(data)
        self._first_batch = [tuple(tensor.shape) for tensor in tf.nest.flatten(data)]

    @property
    def _image_batch_shape(self) -> tuple[int, ...] | None:
        """Shape of the largest batch of images of one replica: as given, or that of the first batch."""
        if self._batch_shape is None:
            return max(self._first_batch, key=len, default=None)
        return (-(-self._batch_shape[0] // self._num_replicas), *self._batch_shape[1:])

    @tf.autograph.experimental.do_not_convert
    def step(self, data: Any) -> Any:
        """Run the rewritten step; Keras traces this method in the place of the original step.

        The original is traced and rewritten once for each signature. Run eagerly, the original itself runs.
        """
        if tf.executing_eagerly():
            return self._original(data)
        specs = tf.nest.pack_sequence_as(data, list(map(self._spec, tf.nest.flatten(data), itertools.count())))
        key = tuple(tf.nest.flatten(specs))
        if not self._first_batch and all(s is None or s.shape.is_fully_defined() for s in key):
            self._first_batch = [() if s is None else tuple(s.shape) for s in key]
        if key not in self._steps:
            # Not under `tf.init_scope`, which would pause the gradient tapes of the step.
            self._steps[key] = self._rewrite(specs)
            if not self._is_measured and properties.has_allocator_stats():
                for tier in self._steps[key].tiers:
                    watch_tier(tier)
        flat = self._check_batch_size([t for t in tf.nest.flatten(data) if t is not None])
        pairs = zip(flat, [s for s in key if s is not None], strict=True)
        checked = [ensure_planned_size(t, s.shape) if isinstance(s, tf.TensorSpec) else t for t, s in pairs]
        return self._steps[key](tf.nest.flatten(checked, expand_composites=True))

    @tf.autograph.experimental.do_not_convert
    def _run_replicas(self, data: Any) -> Any:
        """Run the one rewritten step of all replicas, where Keras calls `strategy.run`."""
        assert self._replicas is not None
        return self._replicas.pack_results(self.step(self._replicas.split(data)))

    def _is_step(self, function: Any) -> bool:
        """Tell whether a function that is passed to `strategy.run` is the step that Keras traces."""
        return bool(function == self.step)

    def _check_batch_size(self, flat: list[Any]) -> list[Any]:
        """Return the tensors of a batch with a run-time check that the plan holds for its size."""
        if self._batch_limit is None:
            return flat
        max_rank = max((t.shape.rank or 0 for t in flat), default=0)
        has_batch = [is_image(t.shape) or max_rank > 0 and t.shape.rank == max_rank for t in flat]
        return [
            self._batch_limit.check(t) if batched and t.shape[0] is None and isinstance(t, tf.Tensor) else t
            for t, batched in zip(flat, has_batch, strict=True)
        ]

    def _spec(self, tensor: Any, position: int) -> Any:
        """Return the spec of one input, with the image size of the first batch where the data set's is unknown."""
        if tensor is None:
            return None
        if not isinstance(tensor, tf.Tensor):
            return tf.type_spec_from_value(tensor)
        shape = tensor.shape.as_list() if tensor.shape.rank is not None else None
        first = self._first_batch[position] if position < len(self._first_batch) else None
        known = first or self._batch_shape
        if shape is not None and known is not None and len(shape) == len(known) and is_image(tensor.shape):
            shape[1:-1] = [k if s is None else s for s, k in zip(shape[1:-1], known[1:-1], strict=True)]
        return tf.TensorSpec(shape, tensor.dtype)

    def _rewrite(self, specs: Any) -> StepImporter:
        if self._params.pipeline is not None:
            return self._rewrite_pipeline(specs)
        with recorded_layers() as record:
            traced = keras_function(self._original).get_concrete_function(specs)
        record.finish(traced.graph)
        check_image_sizes(traced)
        self._check_batch_shape(traced)
        shape = self._image_batch_shape
        self._require_batch_size(traced, shape)
        with collector_paused(), told_if_slow(f"tflms-sft: {self._params.aim()} ...", self._say) as stopwatch:
            mode = CanonicalMode.EXACT if self._params.tiles is None else CanonicalMode.TILING
            analysed = analyse_step(traced, record, shape[0] if shape else None, mode)
            analysed.use_rates(self._rates())
            analysed.correction = self._corrections.get(self._correction_key, 1.0)
            analysed.variables += self._untouched_variable_bytes(traced)
            importer, plan = self._planned(analysed)
        if self.plan is None:
            self.plan, self.planning = plan, stopwatch
            self._variable_bytes = analysed.variables
            if isinstance(self._params.tiles, AutoParams):
                budget = dataclasses.replace(self._params.tiles, memory_budget=plan.memory_budget)
                self._batch_limit = BatchLimit(plan, analysed, budget)
            self._on_plan(plan)
        return importer

    def _planned(self, analysed: TracedStep) -> tuple[StepImporter, Plan]:
        """Rewrite the step; after an excess of a later step by the plan before, if no corrected one fits."""
        before, self._correction_before = self._correction_before, None
        try:
            return rewrite_traced(analysed, self._params)
        except BudgetError:
            if before is None:
                raise
        self._has_smallest_plan = True
        self._corrections[self._correction_key] = analysed.correction = before
        return rewrite_traced(analysed, self._params)

    def _rewrite_pipeline(self, specs: Any) -> StepImporter:
        shape, function = self._image_batch_shape, keras_function(self._original)
        function.get_concrete_function(specs)  # Creates variables, so that all traces that are compared find them.
        with collector_paused(), told_if_slow(f"tflms-sft: {self._params.aim()} ...", self._say) as stopwatch:
            traced, importer, plan = build_pipeline(function, self._params, (specs,), {}, shape[0] if shape else None)
        if self.plan is None:
            self.plan, self.planning = plan, stopwatch
            self._variable_bytes = tf_internals.variable_sizes(traced)
            self._on_plan(plan)
        return importer

    def _untouched_variable_bytes(self, traced: Any) -> list[int]:
        """Return the bytes of each variable that is in memory while the step runs but that it does not use."""
        del traced
        return []

    def _check_batch_shape(self, traced: Any) -> None:
        """Refuse a `batch_shape` that none of the step's images can have."""
        given = self._batch_shape
        images = [t.shape for t in _arguments(traced) if given and t.shape.rank == len(given)]
        if given and images and not any(shape[1:].is_compatible_with(given[1:]) for shape in images):
            raise ValueError(
                f"`batch_shape` must be the shape of an input of model {self.model.name!r}: "
                f"{' or '.join(str(tuple(shape)) for shape in images)}. Received: batch_shape={given}."
            )

    def _require_batch_size(self, traced: Any, shape: Any) -> None:
        if shape or not self._params.has_budget:
            return
        for tensor in _arguments(traced):
            if is_image(tensor.shape) and tensor.shape[0] is None:
                raise RewriteError(
                    f"The batch size of `{tensor.name}` is unknown: {tensor.shape}, and a budget needs one. "
                    "Pass `batch_shape=`, the shape of the largest batch of images."
                )


def _arguments(traced: Any) -> list[Any]:
    """Return the inputs of a traced step without its captured tensors."""
    return traced.inputs[: len(traced.inputs) - len(traced.captured_inputs)]


def check_not_patched(model: Any) -> None:
    """Refuse a model whose original step cannot run now: it is patched, or trains on several replicas.

    Raises:
        RewriteError: With the remedy.
    """
    check_model(model)
    patch = model.__dict__.get(_SLOT)
    if patch is not None:
        raise RewriteError(
            f"The step of model {model.name!r} is currently rewritten by {patch._owner}. Call this before or after "
            "that training."
        )
    replicas = num_replicas(model.distribute_strategy)
    if replicas > 1:
        raise RewriteError(
            f"Model {model.name!r} trains on {replicas} replicas; only a step on one replica can be compared. Create "
            "the model outside of the strategy's scope."
        )
