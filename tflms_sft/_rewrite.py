"""`rewrite`: any traced training step, rewritten."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters import _tf_private
from rewriters.build import Importer
from rewriters.errors import RewriteError
from rewriters.tiers import HostTier, Tier
from tflms_sft._calibration import kept_rates, machine_rates
from tflms_sft._choose import NO_SWAPS, Choice, choices
from tflms_sft._compile import Traced, analyse, collector_paused, finish, predict, prediction
from tflms_sft._lms_params import LMSParams
from tflms_sft._lost import workers_watched
from tflms_sft._names import LayerRecord, display_names, recorded_layers
from tflms_sft._params import AUTO, AutoParams, SFTParams
from tflms_sft._pipeline_params import PipelineParams
from tflms_sft._plan import Plan
from tflms_sft._swap import NothingToSwapError, described, notes, swap, swapped_seconds
from tflms_sft._tiling import plan_sft
from tflms_sft._units import format_bytes

_MOST_CHARACTERS = 600
"""Of the arguments that an error repeats: a list may hold a whole image."""


def is_concrete(step: Any) -> bool:
    """Whether `step` is traced already."""
    return hasattr(step, "structured_input_signature") and hasattr(step, "captured_inputs")


def spec_of(value: Any) -> Any:
    """The `TensorSpec` of a tensor, array or variable; anything else as it is."""
    composite = isinstance(value, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices))
    if composite or (isinstance(value, tf.TypeSpec) and not isinstance(value, tf.TensorSpec)):
        raise RewriteError(
            f"Arguments of a rewritten step have to be dense tensors. Received: a {type(value).__name__}. Pass its "
            "parts as arguments and put them together inside of the step."
        )
    if isinstance(value, tf.TypeSpec) or value is None:
        return value
    if tf.is_tensor(value) or hasattr(value, "__array_interface__") or isinstance(value, tf.Variable):
        return tf.TensorSpec(value.shape, value.dtype)
    return value


def check_graphs_run() -> None:
    """Refuse while TensorFlow runs functions eagerly: there is no graph to rewrite.

    Raises:
        RewriteError: With the remedy.
    """
    if tf.config.functions_run_eagerly():
        raise RewriteError(
            "`tf.config.run_functions_eagerly(True)` is on, so there is no graph to rewrite. "
            "Call `tf.config.run_functions_eagerly(False)`."
        )


def check_image_sizes(concrete_fn: Any) -> None:
    """Refuse images of unknown height or width: intervals are planned for known sizes.

    Raises:
        RewriteError: With the argument and the remedy.
    """
    for tensor in concrete_fn.inputs[: len(concrete_fn.inputs) - len(concrete_fn.captured_inputs)]:
        shape = tensor.shape
        if shape.rank in (4, 5) and None in shape.as_list()[1:-1]:
            raise RewriteError(
                f"The image size of argument `{tensor.name}` is unknown: {shape}. Tiles are planned for known sizes. "
                "Trace with a `tf.TensorSpec` that gives height and width; under `fit`, pass `batch_shape=`."
            )


class RewrittenStep:
    """A rewritten training step for one signature, as `rewrite` makes it.

    Call it as the original. It keeps the original's variables alive, may be called inside
    a `tf.function`, and cannot be differentiated or pickled.

    Args:
        original: The step as a `ConcreteFunction`.
        importer: What puts the rewritten graph into a trace.
        plan: What was done.

    Attributes:
        plan: What was done.
        concrete_function: The rewritten step as a `ConcreteFunction` over flat tensors.
    """

    def __init__(self, original: Any, importer: Importer, plan: Plan) -> None:
        self.plan = plan
        self._original = original
        self._variables = _tf_private.living_variables(original)  # Handles are kept anyway; `verify` traces anew.
        self._importer = importer
        self._signature = original.structured_input_signature
        flat = tf.nest.flatten(self._signature)
        self._specs = [spec for spec in flat if isinstance(spec, tf.TypeSpec)]
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in original.inputs[: importer.num_arguments]]

        def run(*arguments: Any) -> Any:
            return importer(arguments)

        self._function = tf.function(run, input_signature=specs, autograph=False)
        self.concrete_function = self._function.get_concrete_function()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step.

        Raises:
            RewriteError: If it is called in a gradient tape that watches what it reads.
            WorkerError: If a machine that it runs on is lost.
            TypeError: For arguments of another structure, shape or dtype than the step was rewritten for.
        """
        flat = self._flat(args, kwargs)
        try:
            with workers_watched():
                return self._function(*flat)
        except BaseException as error:
            self._importer.abandon()
            if type(error) is LookupError:  # From TensorFlow's registry of gradients, which it asks at the call.
                raise RewriteError(
                    "A rewritten step has its gradients inside and cannot be differentiated again, and it was called "
                    "in a gradient tape that watches what it reads. Call it outside of the tape, or in "
                    f"`with tape.stop_recording():`. TensorFlow says: {error}"
                ) from error
            raise

    @property
    def tiers(self) -> list[Tier]:
        """Where the step swaps to."""
        return self._importer.tiers

    def __reduce__(self) -> Any:
        """Refuse to be pickled."""
        raise TypeError("a rewritten step cannot be pickled: rewrite the step again where it is needed")

    def _flat(self, args: Any, kwargs: Any) -> list[Any]:
        signature = self._bound(args, kwargs)
        expected = tf.nest.flatten(self._signature)
        given = tf.nest.flatten(signature)
        result = []
        for value, spec in zip(given, expected, strict=True):
            if not isinstance(spec, tf.TypeSpec):
                if isinstance(value, type(spec)) and value == spec or value is spec:
                    continue
                raise self._refusal(args, kwargs)
            if isinstance(value, np.ndarray) and np.can_cast(value.dtype, spec.dtype.as_numpy_dtype, "same_kind"):
                value = value.astype(spec.dtype.as_numpy_dtype, copy=False)  # float64 to float32, not 0.5 to 0.
            try:
                tensor = tf.convert_to_tensor(value, dtype_hint=None if hasattr(value, "dtype") else spec.dtype)
            except (TypeError, ValueError):
                raise self._refusal(args, kwargs) from None
            if tensor.dtype != spec.dtype or not spec.shape.is_compatible_with(tensor.shape):
                raise self._refusal(args, kwargs)
            result.append(tensor)
        return result

    def _bound(self, args: Any, kwargs: Any) -> Any:
        """Arguments in the structure of the signature.

        Positional ones may be given by keyword, and what is not a tensor may be left out: it is fixed.
        """
        positional, keywords = self._signature
        names = self._original.function_type.parameters if hasattr(self._original, "function_type") else {}
        args, kwargs = list(args), dict(kwargs)
        for name, spec in list(zip(names, positional, strict=False))[len(args) :]:
            if name in kwargs:
                args.append(kwargs.pop(name))
            elif _is_fixed(spec):
                args.append(spec)
        kwargs.update({name: spec for name, spec in keywords.items() if name not in kwargs and _is_fixed(spec)})
        try:
            tf.nest.assert_same_structure((positional, keywords), (tuple(args), kwargs), check_types=False)
        except (TypeError, ValueError):
            raise self._refusal(args, kwargs) from None
        return tuple(args), kwargs

    def _refusal(self, args: Any, kwargs: Any) -> TypeError:
        given = textwrap.shorten(str(tf.nest.map_structure(spec_of, (tuple(args), kwargs))), _MOST_CHARACTERS)
        return TypeError(
            f"This step was rewritten for one signature. Expected: {self._signature}. Received: {given}. "
            "Rewrite the step for these arguments too."
        )


def _is_fixed(spec: Any) -> bool:
    """Whether an argument of a signature has no tensor in it."""
    return not any(isinstance(leaf, tf.TypeSpec) for leaf in tf.nest.flatten(spec))


def rewrite(step: Any, params: Any, *example_args: Any, **example_kwargs: Any) -> RewrittenStep:
    """Rewrite a step so that it needs less memory and computes the same.

    Args:
        step: A `tf.function` that computes gradients (and updates), or a `ConcreteFunction` of one. One that computes
            no gradients, such as a call of a model, can be tiled too, in forward loops only.
        params: `SFTParams`, `AutoParams` or `LMSParams`, or a list: `SFTParams` and `LMSParams` tile first, then
            swap what is left between the segments; with `AutoParams`, `LMSParams` say what may be swapped. Or
            `PipelineParams`, alone or in a list with `SFTParams`, `LMSParams` or both, which then work inside of
            stages; where in the list it is does not matter.
        *example_args: For a `tf.function`: arguments of a step, or `tf.TensorSpec`s of them.
        **example_kwargs: The same by keyword.

    Returns:
        A callable for that one signature, with `.plan` and `.concrete_function`.

    Raises:
        RewriteError: If the graph cannot be rewritten; its subclasses say more.
        TypeError: For arguments of the wrong type.

    Example:
    >>> step = tf.function(train_step)
    >>> fast_enough = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=(4, 4)), images, labels)
    >>> loss = fast_enough(images, labels)
    """
    chosen = chosen_of(params)
    if chosen.pipeline is not None:
        from tflms_sft._pipeline import pipelined  # It traces steps with what is here.

        with collector_paused():
            return RewrittenStep(*pipelined(step, chosen, example_args, example_kwargs))
    concrete_fn, record = traced_once(step, example_args, example_kwargs)
    return compiled(concrete_fn, record, batch_of((example_args, example_kwargs)), chosen)


def traced_once(step: Any, example_args: Any, example_kwargs: Any) -> tuple[Any, LayerRecord]:
    """The step for one signature, with the Keras layers seen while it was traced.

    Raises:
        RewriteError: For arguments that cannot be rewritten.
        TypeError: If it is no function of TensorFlow, and for arguments of one that is traced already.
    """
    check_graphs_run()
    record = LayerRecord()
    if is_concrete(step):
        if example_args or example_kwargs:
            raise TypeError("`step` is traced already, so example arguments have no effect. Leave them out.")
        concrete_fn = step
        tf.nest.map_structure(spec_of, step.structured_input_signature)
    elif hasattr(step, "get_concrete_function"):
        args, kwargs = tf.nest.map_structure(spec_of, (example_args, example_kwargs))
        with recorded_layers() as record:
            concrete_fn = _tf_private.untraced(step).get_concrete_function(*args, **kwargs)
        record.finish(concrete_fn.graph)
    else:
        raise TypeError(
            "`step` must be a `tf.function` or a `ConcreteFunction`. "
            f"Received: step={step!r} of type {type(step).__name__}. Wrap it: `tf.function(step)`."
        )
    check_image_sizes(concrete_fn)
    return concrete_fn, record


def rewrite_traced(traced: Traced, chosen: Chosen, advise: bool = True) -> tuple[Importer, Plan]:
    """Rewrite a step: tiles first, then swaps of what is left between the segments.

    Args:
        traced: The step.
        chosen: What to do with it.
        advise: Whether a plan that is slow says what larger budgets would give, which takes its time.

    Raises:
        SegmentError: For a segment given by name that cannot be tiled.
        BudgetError: For a budget that no plan meets.
        SwapError: If nothing can be swapped as asked for.
    """
    if isinstance(chosen.tiles, AutoParams):
        return _within_budget(traced, chosen.tiles.resolved(traced.fixed_bytes), advise)
    choice = Choice([], [], chosen.swaps)
    if chosen.tiles is not None:
        choice = Choice(*plan_sft(traced, chosen.tiles), chosen.swaps)
        if choice.swaps is not None and not traced.analysis.backward:
            choice = Choice(choice.plans, choice.left, why=NO_SWAPS)
    return _carried_out(traced, choice, None)


def _within_budget(traced: Traced, params: AutoParams, advise: bool) -> tuple[Importer, Plan]:
    """The fastest way to keep to a budget that can be carried out."""
    found = choices(traced, params, advise)
    while True:
        choice = next(found)  # It ends with a `BudgetError`.
        with contextlib.suppress(NothingToSwapError):
            return _carried_out(traced, choice, params.memory_budget)


def _carried_out(traced: Traced, choice: Choice, budget: int | None) -> tuple[Importer, Plan]:
    """The rewritten step and its plan."""
    graph, plan = finish(traced, choice.plans, choice.left, budget)
    plan.notes += tuple(filter(None, (choice.why, choice.more)))
    if choice.swaps is None:
        return Importer(graph, traced.concrete_fn), plan
    swapped = swap(traced, graph, choice.swaps)
    # A budget has to be kept in every state of the device's memory, as the search saw to.
    limit = 0 if budget is None else None
    peak, ratio = predict(traced, choice.plans, limit, swapped.graph, swapped.away, swapped.outs)
    ratio = swapped_seconds(traced, swapped.graph, swapped.swaps, choice.swaps, ratio * traced.seconds) / traced.seconds
    names = display_names(traced.analysis.graph, traced.record)
    plan = dataclasses.replace(
        plan,
        changed=True,
        predicted=prediction(traced, choice.plans, swapped.graph, names, (peak, ratio)),
        swaps=described(swapped.swaps, traced.batch, display_names(graph, traced.record)),
        swap_tier="host" if isinstance(swapped.tier, HostTier) else "disk",
        not_swapped=tuple(swapped.left),
        notes=(*plan.notes, *notes(swapped.tier)),
    )
    return Importer(swapped.graph, traced.concrete_fn, swapped.tier), plan


def compiled(
    concrete_fn: Any, record: LayerRecord, batch: int | None, chosen: Chosen, correction: float = 1.0
) -> RewrittenStep:
    """Analyse, plan and emit what `traced_once` gave, for batches of that size where it leaves the size open.

    `correction` is what an earlier plan was measured to take, over what was predicted.
    """
    with collector_paused():
        return _compiled(concrete_fn, record, batch, chosen, correction)


def _compiled(
    concrete_fn: Any, record: LayerRecord, batch: int | None, chosen: Chosen, correction: float
) -> RewrittenStep:
    traced = analyse(concrete_fn, record, batch, chosen.tiles is not None)
    traced.correction = correction
    traced.go_by(machine_rates(_say) if chosen.has_budget else kept_rates())
    if chosen.has_budget:
        require_batch(traced, batch)
    importer, plan = rewrite_traced(traced, chosen)
    if _tf_private.must_compile(concrete_fn):
        plan.notes += ("the step was compiled by XLA (`jit_compile`); rewritten it runs without",)
    return RewrittenStep(concrete_fn, importer, plan)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def require_batch(traced: Traced, batch: int | None) -> None:
    """Refuse a step of which nobody says how large its batches are.

    Raises:
        RewriteError: With the remedy.
    """
    if batch is None and not traced.batch_is_fixed:
        raise RewriteError(
            "The batch size is unknown, and a budget needs one. Trace with a `tf.TensorSpec` that gives it, "
            "or pass example arguments of the largest batch."
        )


def batch_of(example_args: Any) -> int | None:
    """Leading size of the argument with the most axes, the first of several: images before labels."""
    shapes = [tf.TensorShape(getattr(value, "shape", None)) for value in tf.nest.flatten(example_args)]
    known = [shape for shape in shapes if shape.rank and shape[0] is not None]
    return int(max(known, key=lambda shape: shape.rank)[0]) if known else None


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What to do with a step: tiles before swaps, both inside of the stages of a pipeline."""

    tiles: SFTParams | AutoParams | None = None
    swaps: LMSParams | None = None
    pipeline: PipelineParams | None = None

    @property
    def has_budget(self) -> bool:
        """Whether the plan holds for one size of the batch."""
        return isinstance(self.tiles, AutoParams)

    def aim(self) -> str:
        """What is going on while a plan is made."""
        if isinstance(self.tiles, AutoParams):
            budget = self.tiles.memory_budget
            return f"planning for a budget of {'what is free' if budget == AUTO else format_bytes(budget)}"
        if self.pipeline is not None:
            return "planning a pipeline"
        return "planning swaps" if self.tiles is None else "planning tiles"

    def without_swaps(self, why: str) -> Chosen:
        """The same with tiles alone.

        Raises:
            RewriteError: If swaps are asked for.
        """
        auto = isinstance(self.tiles, AutoParams)
        if self.swaps is not None or (auto and isinstance(self.tiles.swap, LMSParams)):  # type: ignore[union-attr]
            raise RewriteError(f"{why}, between which nothing can be swapped yet. Ask for tiles alone: `SFT`.")
        return Chosen(dataclasses.replace(self.tiles, swap=False)) if auto else self  # type: ignore[type-var]


def chosen_of(params: Any) -> Chosen:
    """The parameter objects of a list.

    Raises:
        TypeError: For anything else.
        ValueError: For an order that makes no sense.
    """
    items: Sequence[Any] = params if isinstance(params, (list, tuple)) else [params]
    tiles = [item for item in items if isinstance(item, (SFTParams, AutoParams))]
    swaps = [item for item in items if isinstance(item, LMSParams)]
    pipelines = [item for item in items if isinstance(item, PipelineParams)]
    known = len(tiles) + len(swaps) + len(pipelines)
    if not items or known < len(items) or max(len(tiles), len(swaps), len(pipelines)) > 1:
        budgets = [item for item in items if isinstance(item, (str, int))]
        hint = f" For a budget: `AutoParams({budgets[0]!r})`." if budgets else ""
        raise TypeError(
            "`params` must be `SFTParams(...)`, `AutoParams(...)`, `LMSParams(...)` or `PipelineParams(...)`, or a "
            "list of one of the first two, `LMSParams(...)` and `PipelineParams(...)`, each at most once. "
            f"Received: params={params!r}.{hint}"
        )
    if pipelines and tiles and isinstance(tiles[0], AutoParams):
        raise ValueError(
            "`params` has a budget and a pipeline: what each device may hold is not searched for yet. Say which tiles "
            "the stages run in (`SFTParams`), and what they swap (`LMSParams`), until the plan's `peak_bytes` fit. "
            f"Received: params={params!r}."
        )
    if tiles and swaps and items.index(swaps[0]) < items.index(tiles[0]):
        raise ValueError(
            "`params` tiles first and then swaps what is left between the segments; swapped tensors cannot be tiled. "
            f"Give `LMSParams` last. Received: params={params!r}."
        )
    if tiles and swaps and isinstance(tiles[0], AutoParams):
        if tiles[0].swap is not True:
            raise ValueError(f"`params` tells twice what may be swapped: leave out `swap=`. Received: {params!r}.")
        return Chosen(dataclasses.replace(tiles[0], swap=swaps[0]))
    return Chosen(
        tiles[0] if tiles else None, swaps[0] if swaps else None, pipelines[0] if pipelines else None
    )
