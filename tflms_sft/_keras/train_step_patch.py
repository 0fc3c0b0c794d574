"""Put a rewritten step into a Keras model, and take it out again.

What is said of training here holds for evaluation and prediction, whose `StepKind` differs (`forward_step_patch.py`).

Keras looks `train_step` up when it builds its train function, and the train function at
every step. So an object that rewrites is put in the place of the former, the latter is
built anew, and both are put back as they were: at the end of training, and at any
exception that a step raises, because Keras calls no callback then. What another callback
raises is seen by nobody; so the method by which Keras asks for a train function, first
thing in every training, is replaced as well, and takes out what an earlier one left.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.device import properties
from rewriters.errors import RewriteError
from rewriters.estimates.op_cost import MachineRates
from rewriters.ir import tf_internals
from rewriters.step_importer import StepImporter
from rewriters.swapping.tiers import Tier
from tflms_sft._cluster.worker_watch import workers_watched
from tflms_sft._keras.batch_limits import BatchLimit, is_image, of_size, refusal_of
from tflms_sft._keras.first_batches import PeekedBatches, can_be_taken
from tflms_sft._keras.messages import is_over, over_again, over_text
from tflms_sft._keras.model_checks import check_model
from tflms_sft._keras.replicas import Replicas, RunInstead, joins, number_of
from tflms_sft._machine.calibration import kept_rates, machine_rates
from tflms_sft._params.request import RewriteRequest
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._pipeline.build import build_pipeline
from tflms_sft._planner.traced_step import analyse_step, collector_paused
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import Measurement
from tflms_sft._rewrite.measure import read_peak, reset_peak, watch
from tflms_sft._rewrite.rewrite import rewrite_traced
from tflms_sft._trace.layer_names import recorded_layers
from tflms_sft._trace.step_tracing import check_image_sizes
from tflms_sft._util.progress import Stopwatch, told_if_slow

_SLOT = "_tflms_sft_installation"


@dataclasses.dataclass(frozen=True)
class StepKind:
    """What a model does with batches, by its attributes.

    Attributes:
        step: What is done with one batch.
        function: What runs one or several steps.
        make: What makes that.
        slot: Where the model holds what is installed.
    """

    step: str
    function: str
    make: str
    slot: str


TRAINING = StepKind("train_step", "train_function", "make_train_function", _SLOT)


class StepPatch:
    """A rewritten step in a model.

    Attributes:
        model: The model.
        plan: Of the first signature that was traced; `None` before.
        planning: How long it took to find.
        kind: Which of the model's steps it is.
    """

    kind = TRAINING

    def __init__(
        self,
        model: Any,
        params: RewriteRequest,
        batch_shape: tuple[int, ...] | None,
        on_plan: Callable[[Plan], None],
        on_measured: Callable[[Plan], None],
        owner: str,
        training: object = None,
        say: Callable[[str], None] | None = None,
        corrections: dict[Any, float] | None = None,
    ) -> None:
        """Prepare.

        Args:
            model: The model.
            params: What to do with its step.
            batch_shape: Shape of the largest batch of images, if it is told.
            on_plan: Is given every plan that is made.
            on_measured: Is given it again once a step was measured.
            owner: Who asks for it, for errors.
            training: The `fit` that `owner` is a callback of, `None` for a `with` block.
            say: Is given lines about what takes long.
            corrections: What earlier steps were measured to take over what was predicted, of each model and kind of
                step; it is added to.
        """
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
        self._saved: dict[str, Any] = {}
        self._jit_compile: Any = None
        self._installed: Any = None
        self._measured = False
        self._has_taken = False
        self._fitting: BatchLimit | None = None
        self._variables: list[int] = []
        self._num_replicas = 1
        self._corrections = {} if corrections is None else corrections
        self._planned_again = False

    def install(self) -> None:
        """Replace the step; what an earlier training left behind is taken out first.

        Raises:
            RewriteError: If the model cannot be rewritten at all.
            ValueError: If something else rewrites the same training.
        """
        self._check()
        model = self.model
        previous = model.__dict__.get(self.kind.slot)
        if previous is not None:
            same_fit = previous._training is self._training
            if previous._training is not None:  # A `with` block takes out its own.
                previous.restore()
            if previous._training is None or same_fit:
                step = self.kind.step.replace("_", " ")
                raise ValueError(
                    f"Two things rewrite the {step} of model {model.name!r} at once: {previous._owner} and "
                    f"{self._owner}. Use one: `MemoryBudget` and `budget` choose segments and swaps themselves "
                    "(`swap=LMSParams(...)` says which), `SFT` takes several in `segments=`, and "
                    "`LMS(tiles=SFTParams(...))` tiles first."
                )
        self._place()
        self._make()

    def _check(self) -> None:
        """Refuse models that the step cannot be rewritten for."""
        check_model(self.model)
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)

    def resume(self) -> None:
        """Put the step back that a call inside of this training took out, a `train_on_batch` in a callback.

        Such a call asks for a train function as a new training does, and runs the plain step.
        """
        if self.kind.slot not in self.model.__dict__:
            self._place()
            setattr(self.model, self.kind.function, self._installed)

    def _place(self) -> None:
        model, kind = self.model, self.kind
        strategy, replicas = model.distribute_strategy, None
        self._original = getattr(model, kind.step)
        if joins(strategy):
            if self._params.pipeline is not None:
                raise RewriteError(
                    f"Model {model.name!r} trains under a `tf.distribute` strategy, which has devices of its own. Make "
                    "the model outside of its scope; `data_replicas=` puts copies of a pipeline beside each other."
                )
            if number_of(strategy) > 1:
                why = f"Model {model.name!r} trains on {number_of(strategy)} replicas"
                self._params = self._params.without_swaps(why)
            replicas = Replicas(strategy, self._original)
            self._original = replicas.step
            self._num_replicas = number_of(strategy)
        self._make_plain = getattr(model, kind.make)
        names = (kind.step, kind.make, *(["_distribute_strategy"] if replicas else []))
        self._saved = {name: model.__dict__.get(name) for name in names}
        self._jit_compile = model.jit_compile
        object.__setattr__(model, kind.slot, self)
        model.jit_compile = False
        object.__setattr__(model, kind.step, self.step)
        if replicas is not None:
            instead = functools.partial(self._train_replicas, replicas)
            object.__setattr__(model, "_distribute_strategy", RunInstead(strategy, self.step, instead))
        if self._training is not None:
            object.__setattr__(model, kind.make, self._asked_again)

    def _make(self) -> None:
        self._steps.clear()
        self._make_plain(force=True)
        self._inner = getattr(self.model, self.kind.function)
        self._installed = self.run  # Bound once, to be recognised.
        setattr(self.model, self.kind.function, self._installed)

    def _asked_again(self, force: bool = False) -> None:
        """In the place of what makes the model's train function.

        With `force`, a callback wants the step of this training traced anew. Otherwise a new training begins.
        """
        if force:
            self._make()
        else:
            self.restore()
            getattr(self.model, self.kind.make)()

    def restore(self) -> None:
        """Put everything back; does nothing the second time."""
        model = self.model
        if not self.is_placed:
            return
        object.__delattr__(model, self.kind.slot)
        for importer in self._steps.values():
            importer.abandon()
        for name, saved in self._saved.items():
            if saved is not None:
                object.__setattr__(model, name, saved)
            elif name in model.__dict__:
                object.__delattr__(model, name)
        if getattr(model, self.kind.function) is self._installed:  # Otherwise it was compiled anew, XLA decided there.
            model.jit_compile = self._jit_compile
        self._make_plain_again()

    def _make_plain_again(self) -> None:
        setattr(self.model, self.kind.function, None)
        getattr(self.model, self.kind.make)()

    @property
    def is_placed(self) -> bool:
        """Whether it is in the model now."""
        return self.model.__dict__.get(self.kind.slot) is self

    @property
    def turned_off_jit(self) -> bool:
        """Whether the model asked for XLA, which is off while the step is rewritten."""
        return bool(self._jit_compile)

    def run(self, iterator: Any) -> Any:
        """The model's function: looks at the first batch, then hands on."""
        try:
            taken = self._taken(iterator)
            with workers_watched():
                return self._watched(iterator if taken is None else taken.again(), taken)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise  # The normal end of an epoch.
        except BaseException as error:
            self.restore()
            refusal = refusal_of(error)
            if refusal is None:
                raise
            raise refusal from None

    def _watched(self, iterator: Any, taken: PeekedBatches | None) -> Any:
        """Run, and report the measured peak of the first step, whose batches are taken out of the data set."""
        first = not self._measured
        if first:
            self._rates()  # They may be measured on the device, which is no part of the step's peak.
        # What is measured is one device's.
        in_use = reset_peak() if first and self._params.pipeline is None else None
        if in_use is not None and taken is not None:
            taken.wait_until_quiet()
            in_use = reset_peak()
        result = self._inner(iterator)
        if first and self.plan is not None:
            self._measured = True
            tf.nest.map_structure(lambda value: value.numpy() if hasattr(value, "numpy") else value, result)
            own = [*self._variables, *(taken.on_device() if taken is not None else ())]
            self.plan.measured = None if in_use is None else read_peak(in_use, own, self._tiers)
            self._on_measured(self.plan)
            self._hold_to_budget(self.plan)
        return result

    def _rates(self) -> MachineRates:
        return machine_rates(self._say) if self._params.has_budget else kept_rates()

    def _hold_to_budget(self, plan: Plan) -> None:
        """Have the step planned anew if the first one took more than the budget, by what was measured.

        Raises:
            BudgetError: If that was done already.
        """
        if not is_over(plan):
            return
        if self.planned_again:
            raise over_again(plan)
        assert plan.measured is not None
        if self._say is None:  # Otherwise a line has said so.
            warnings.warn(over_text(plan), stacklevel=2)
        self._planned_again = True
        self._corrections[self._corrected] = plan.measured.peak_bytes / plan.predicted.peak_bytes
        self.plan = None
        self._measured = self._has_taken = False
        for importer in self._steps.values():
            importer.abandon()
        self._make()

    @property
    def planned_again(self) -> bool:
        """Whether the plan goes by what an earlier one was measured to take."""
        return self._planned_again

    @property
    def _corrected(self) -> Any:
        """What a correction goes for."""
        return (id(self.model), self.kind.slot)

    def _taken(self, iterator: Any) -> PeekedBatches | None:
        """The batches of a step that is to be measured, or whose shapes are needed, if they can be taken out.

        The step may be traced for unknown sizes; plans are made for known ones.
        """
        if self._measured or self._has_taken or not can_be_taken(iterator):
            return None
        known = bool(self._batch_shape or self._first_batch) or self.plan is not None
        if known and (self._params.pipeline is not None or not properties.has_allocator_stats()):
            return None
        self._has_taken = True
        taken = PeekedBatches(iterator, self.model.steps_per_execution)
        if not known:
            self._note(taken.first)
        return taken

    def reset_peak(self) -> int | None:
        """Start to measure several steps; returns the bytes in use, or `None` where no statistics are kept."""
        return reset_peak(self._tiers)

    def peak_since(self, in_use: int | None) -> Measurement | None:
        """The peak since then, if there are statistics and a plan."""
        return None if in_use is None or self.plan is None else read_peak(in_use, self._variables, self._tiers)

    @property
    def _tiers(self) -> list[Tier]:
        return [tier for importer in self._steps.values() for tier in importer.tiers]

    def _note(self, data: Any) -> None:
        self._first_batch = [tuple(tensor.shape) for tensor in tf.nest.flatten(data)]

    @property
    def _images(self) -> tuple[int, ...] | None:
        """Shape of the largest batch of images of a replica: as given, or that of the first batch."""
        if self._batch_shape is None:
            return max(self._first_batch, key=len, default=None)
        return (-(-self._batch_shape[0] // self._num_replicas), *self._batch_shape[1:])

    @tf.autograph.experimental.do_not_convert
    def step(self, data: Any) -> Any:
        """What Keras traces: the original step, traced once per signature, rewritten and imported."""
        if tf.executing_eagerly():
            return self._original(data)
        self._require_tensors(data)
        specs = tf.nest.pack_sequence_as(data, list(map(self._spec, tf.nest.flatten(data), itertools.count())))
        key = tuple(tf.nest.flatten(specs))
        if not self._first_batch and all(s is None or s.shape.is_fully_defined() for s in key):
            self._first_batch = [() if s is None else tuple(s.shape) for s in key]
        if key not in self._steps:
            # Not under `tf.init_scope`: it pauses gradient tapes, those of the step too.
            self._steps[key] = self._rewritten(specs)
            if not self._measured and properties.has_allocator_stats():
                for tier in self._steps[key].tiers:
                    watch(tier)
        flat = self._within([t for t in tf.nest.flatten(data) if t is not None])
        pairs = zip(flat, [s for s in key if s is not None], strict=True)
        return self._steps[key]([of_size(t, s.shape) for t, s in pairs])

    @tf.autograph.experimental.do_not_convert
    def _train_replicas(self, replicas: Replicas, data: Any) -> Any:
        """The step of all replicas, in the place of `strategy.run`."""
        return replicas.results(self.step(replicas.apart(data)))

    def _require_tensors(self, data: Any) -> None:
        for value in tf.nest.flatten(data):
            if value is not None and not isinstance(value, tf.Tensor):
                raise RewriteError(
                    f"A batch of model {self.model.name!r} holds a {type(value).__name__}; only dense tensors can be "
                    "rewritten. Give the data set dense tensors, padded where they are ragged."
                )

    def _within(self, flat: list[Any]) -> list[Any]:
        """A batch that a budget's plan holds for; a larger one is an error that names both sizes."""
        if self._fitting is None:
            return flat
        most = max((t.shape.rank or 0 for t in flat), default=0)
        sizes = [is_image(t.shape) or most > 0 and t.shape.rank == most for t in flat]
        return [
            self._fitting.checked(t) if size and t.shape[0] is None else t for t, size in zip(flat, sizes, strict=True)
        ]

    def _spec(self, tensor: Any, position: int) -> Any:
        """Signature of one input: the batch as Keras has it, an unknown image size as first seen."""
        if tensor is None:
            return None
        shape = tensor.shape.as_list() if tensor.shape.rank is not None else None
        seen = self._first_batch[position] if position < len(self._first_batch) else None
        known = seen or self._batch_shape
        if shape is not None and known is not None and len(shape) == len(known) and is_image(tensor.shape):
            shape[1:-1] = [k if s is None else s for s, k in zip(shape[1:-1], known[1:-1], strict=True)]
        return tf.TensorSpec(shape, tensor.dtype)

    def _rewritten(self, specs: Any) -> StepImporter:
        original = self._original
        if self._params.pipeline is not None:
            return self._pipelined(specs)
        with recorded_layers() as record:
            traced = tf.function(lambda data: original(data), autograph=False).get_concrete_function(specs)
        record.finish(traced.graph)
        check_image_sizes(traced)
        self._check_batch_shape(traced)
        known = self._images
        self._require_batch(traced, known)
        with collector_paused(), told_if_slow(f"tflms-sft: {self._params.aim()} ...", self._say) as watch:
            mode = CanonicalMode.EXACT if self._params.tiles is None else CanonicalMode.TILING
            analysed = analyse_step(traced, record, known[0] if known else None, mode)
            analysed.go_by(self._rates())
            analysed.correction = self._corrections.get(self._corrected, 1.0)
            analysed.variables += self._beside(traced)
            importer, plan = rewrite_traced(analysed, self._params)
        if self.plan is None:
            self.plan, self.planning = plan, watch
            self._variables = analysed.variables
            if isinstance(self._params.tiles, AutoParams):
                budget = dataclasses.replace(self._params.tiles, memory_budget=plan.memory_budget)
                self._fitting = BatchLimit(plan, analysed, budget)
            self._on_plan(plan)
        return importer

    def _pipelined(self, specs: Any) -> StepImporter:
        original, known = self._original, self._images
        function = tf.function(lambda data: original(data), autograph=False)
        with collector_paused(), told_if_slow(f"tflms-sft: {self._params.aim()} ...", self._say) as watch:
            traced, importer, plan = build_pipeline(function, self._params, (specs,), {}, known[0] if known else None)
        if self.plan is None:
            self.plan, self.planning = plan, watch
            self._variables = tf_internals.variable_sizes(traced)
            self._on_plan(plan)
        return importer

    def _beside(self, traced: Any) -> list[int]:
        """Bytes of each variable that is there while the step runs and that it does not touch."""
        del traced
        return []

    def _check_batch_shape(self, traced: Any) -> None:
        """A shape that none of the images has that the step is given was meant for another model."""
        given = self._batch_shape
        images = [t.shape for t in _arguments(traced) if given and t.shape.rank == len(given)]
        if given and images and not any(shape[1:].is_compatible_with(given[1:]) for shape in images):
            raise ValueError(
                f"`batch_shape` must be the shape of the images that model {self.model.name!r} is given, "
                f"{' or '.join(str(tuple(shape)) for shape in images)}. Received: batch_shape={given}."
            )

    def _require_batch(self, traced: Any, known: Any) -> None:
        if known or not self._params.has_budget:
            return
        for tensor in _arguments(traced):
            if is_image(tensor.shape) and tensor.shape[0] is None:
                raise RewriteError(
                    f"The batch size of `{tensor.name}` is unknown: {tensor.shape}, and a budget needs one. "
                    "Pass `batch_shape=`, the shape of the largest batch of images."
                )


def _arguments(traced: Any) -> list[Any]:
    """What a traced step takes that it does not capture."""
    return traced.inputs[: len(traced.inputs) - len(traced.captured_inputs)]


def check_apart(model: Any) -> None:
    """Refuse models whose step cannot be run by itself now.

    Raises:
        RewriteError: With the remedy.
    """
    check_model(model)
    installed = model.__dict__.get(_SLOT)
    if installed is not None:
        raise RewriteError(
            f"The step of model {model.name!r} is rewritten at the moment, by {installed._owner}. Do this before or "
            "after that training."
        )
    replicas = number_of(model.distribute_strategy)
    if replicas > 1:
        raise RewriteError(
            f"Model {model.name!r} trains on {replicas} replicas, and one alone is compared. Make the model outside "
            "of the strategy's scope."
        )
