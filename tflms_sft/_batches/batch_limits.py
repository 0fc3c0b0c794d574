"""Run-time checks that a batch has the size that its step was planned for, with errors that users can read."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.errors import RewriteError
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._planner.budget_search import limit_of
from tflms_sft._report.plan import Plan
from tflms_sft._search.traced_step import TracedStep, collector_paused, predicted_peak, with_sizes
from tflms_sft._trace.step_tracing import arguments_of
from tflms_sft._util.byte_sizes import format_bytes


def is_image(shape: tf.TensorShape) -> bool:
    """Tell whether a shape has a batch axis, one to three spatial axes, and channels."""
    return shape.rank in (3, 4, 5)


def check_batch_shape(specs: Any, given: tuple[int, ...] | None, model: str) -> None:
    """Refuse a `batch_shape` that none of the images among the inputs of a model's step can have.

    Raises:
        ValueError: With the shapes of the images.
    """
    if not given:
        return
    inputs = [spec.shape for spec in tf.nest.flatten(specs) if spec is not None]
    shapes = [shape for shape in inputs if shape.rank is not None]
    images = [shape for shape in shapes if shape.rank == len(given)]
    if len(shapes) < len(inputs) and not images:  # The images may be an input of unknown rank.
        return
    fits = any(shape[1:].is_compatible_with(given[1:]) for shape in images)
    # Layers may add the axis of a single channel to images without one.
    fits |= given[-1] == 1 and any(shape[1:].is_compatible_with(given[1:-1]) for shape in shapes)
    if not fits:
        # With another rank, the images are most likely the tensors of the highest rank.
        rank = len(given) if images else max(shape.rank for shape in shapes)
        expected = " or ".join(dict.fromkeys(str(tuple(shape)) for shape in shapes if shape.rank == rank))
        raise ValueError(
            f"`batch_shape` must be the shape of an input of model {model!r}: {expected}. Received: "
            f"batch_shape={given}."
        )


def require_batch_size(traced: Any) -> None:
    """Refuse a traced step that is planned for a budget and takes images of unknown batch size.

    Raises:
        RewriteError: With the remedy.
    """
    for tensor in arguments_of(traced):
        if is_image(tensor.shape) and tensor.shape[0] is None:
            raise RewriteError(
                f"A budget needs a known batch size. Received: argument `{tensor.name}` of shape {tensor.shape}. "
                "Pass `batch_shape=`, the shape of the largest batch of images."
            )


def with_planned_sizes(leaves: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
    """Return the arguments of a step, with their planned shapes, from the leaves of a batch and the planned specs."""
    pairs = ((t, spec) for t, spec in zip(leaves, specs, strict=True) if t is not None)
    checked = [ensure_planned_size(t, spec.shape) if isinstance(spec, tf.TensorSpec) else t for t, spec in pairs]
    flat: list[Any] = tf.nest.flatten(checked, expand_composites=True)
    return flat


def ensure_planned_size(tensor: Any, shape: Any) -> Any:
    """Return the tensor with its planned shape, checked at run time where the size of the data set is not static."""
    if not tensor.shape.is_compatible_with(shape) or not shape.rank:
        return tf.ensure_shape(tensor, shape)
    sizes = zip(tensor.shape, shape, strict=True)
    if any(size is None and planned is not None for size, planned in sizes) and is_image(shape):
        planned = shape.as_list()[1:-1]
        text = (
            f"The step is planned for images of {'x'.join(map(str, planned))}, the size of the first batch or of "
            "`batch_shape`. Resize or pad images to this size, or use dense batches with `steps_per_execution=1`, "
            "without replicas and stages."
        )
        size = tf.shape(tensor)[1:-1]
        tensor = assert_in_step(tensor, tf.reduce_all(size == planned), text, size)
    return tf.ensure_shape(tensor, shape)


def assert_in_step(tensor: Any, condition: Any, text: str, sizes: Any) -> Any:
    """Return the tensor; a step in which `condition` is false fails with an error for `planned_size_error`."""
    with tf.control_dependencies([tf.debugging.Assert(condition, [text, sizes])]):
        return tf.identity(tensor)


_ASSERTED = re.compile(r"assertion failed: \[(The (?:plan holds|step is planned) for .*?)\] \[([\d ]+)\]", re.DOTALL)


def planned_size_error(error: BaseException) -> RewriteError | None:
    """Return the text of a failed `assert_in_step` without TensorFlow's traceback; `None` for other errors."""
    match = _ASSERTED.search(str(error)) if isinstance(error, tf.errors.InvalidArgumentError) else None
    if match is None:
        return None
    text, sizes = match.groups()
    return RewriteError(f"{text} Received: {'x'.join(sizes.split())}.")


class BatchLimit:
    """The leading sizes of a batch that a plan for a budget is valid for.

    A smaller batch than the planned one needs less memory. A larger one needs other tiles or swaps, so a rewritten step
    refuses it. A step that is not rewritten runs it, and tells if its peak is predicted to exceed the budget. The peak
    is predicted for each size, because live bytes grow at most linearly with the batch, but fragmentation does not.

    Args:
        plan: The plan.
        traced: The step.
        params: The budget; that of the plan is in bytes.
        remedy: Sentence about a larger batch. `None`: the remedy for a Keras callback.
        tell: Called with a line about a batch that is predicted to exceed the budget; `None` warns.
    """

    def __init__(
        self,
        plan: Plan,
        traced: TracedStep,
        params: AutoParams,
        remedy: str | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._batch = plan.batch
        self._sizes = traced.analysis.graph.sizes
        self._arguments = arguments_of(traced.concrete_fn)
        self._traced = None if plan.changed else traced
        params = dataclasses.replace(params, memory_budget=plan.memory_budget)
        self._limit = limit_of(traced, params)
        self._budget = int(params.memory_budget)
        self._remedy = remedy
        self._tell = tell or (lambda text: warnings.warn(text, stacklevel=2))
        self._peaks: dict[tuple[tuple[int, int], ...], int] = {}
        self._has_told = False

    def check_batch(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the arguments of the step with a run-time check of those that have an open, limited leading size."""
        max_rank = max((t.shape.rank or 0 for t in tensors), default=0)
        limits = {
            position: self._sizes.get(position, self._batch)
            for position, t in enumerate(tensors)
            if isinstance(t, tf.Tensor) and t.shape.rank and t.shape[0] is None
            if position in self._sizes or not self._sizes and (is_image(t.shape) or t.shape.rank == max_rank)
        }
        check = self._refuse_larger if self._traced is None else self._tell_larger
        return check(list(tensors), limits) if limits else list(tensors)

    def _refuse_larger(self, tensors: list[Any], limits: Mapping[int, int]) -> list[Any]:
        """Return the arguments of a rewritten step, with assertions that fail for a larger batch."""
        for position, limit in limits.items():
            tensor, size = tensors[position], tf.shape(tensors[position])[0]
            unit, remedy = f"{limit} sample(s)", "Let the first batch be the largest."
            if self._sizes:
                unit = f"{limit} rows of argument `{self._arguments[position].op.name}`"
            if is_image(tensor.shape):
                unit, remedy = f"{limit} images", "Give the largest batch as `batch_shape=`."
            text = f"The plan holds for batches of up to {unit}. {self._remedy or remedy}"
            tensors[position] = assert_in_step(tensor, size <= limit, text, size)
        return tensors

    def _tell_larger(self, tensors: list[Any], limits: Mapping[int, int]) -> list[Any]:
        """Return the arguments of a step that is not rewritten, with a line if a larger batch exceeds the budget."""
        sizes = tf.stack([tf.shape(tensors[position])[0] for position in limits])

        def warn_if_over() -> Any:
            tell = functools.partial(self._tell_if_over, tuple(limits))
            return tf.ensure_shape(tf.numpy_function(tell, [sizes], tf.bool, stateful=False), ())

        fits = tf.reduce_all(sizes <= list(limits.values()))  # Nothing reads the results; the call has an effect.
        with tf.control_dependencies([tf.cond(fits, lambda: True, warn_if_over)]):
            return [tf.identity(t) if position in limits else t for position, t in enumerate(tensors)]

    def fits(self, sizes: Mapping[int, int]) -> bool:
        """Tell whether the original step is predicted to keep the budget with these leading sizes of its arguments.

        A step that was traced for one of the sizes alone is traced and planned again for another.
        """
        traced = {position: t.shape[0] for position, t in enumerate(self._arguments) if t.shape.rank}
        if any(traced.get(position) not in (None, size) for position, size in sizes.items()):
            return False
        return self._peak_bytes(sizes) <= self._limit

    def _peak_bytes(self, sizes: Mapping[int, int]) -> int:
        assert self._traced is not None
        key = tuple(sorted(sizes.items()))
        if key not in self._peaks:
            with collector_paused():
                self._peaks[key] = predicted_peak(with_sizes(self._traced, sizes), []).peak_bytes
        return self._peaks[key]

    def _tell_if_over(self, positions: Sequence[int], sizes: Any) -> Any:
        """Tell once that a batch is predicted to exceed the budget; return whether it is."""
        batch = dict(zip(positions, map(int, sizes), strict=True))
        peak = self._peak_bytes(batch)
        if peak > self._limit and not self._has_told:
            self._has_told = True
            planned = ", ".join(str(self._sizes.get(position, self._batch)) for position in positions)
            remedy = self._remedy or "Give the largest batch as `batch_shape=`, or let it be the first."
            self._tell(
                f"tflms-sft: a batch of {', '.join(map(str, batch.values()))} is predicted to need "
                f"{format_bytes(peak)}, more than the budget of {format_bytes(self._budget)} allows with its headroom. "
                f"The step was planned for {planned}, is not rewritten, and runs this batch, too. {remedy}"
            )
        return np.bool_(peak > self._limit)
