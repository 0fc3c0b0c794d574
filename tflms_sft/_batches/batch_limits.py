"""Run-time checks that a batch has the size that its step was planned for, with errors that users can read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.errors import RewriteError
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._planner.budget_search import limit_of
from tflms_sft._planner.traced_step import TracedStep, collector_paused, predict
from tflms_sft._report.plan import Plan


def is_image(shape: tf.TensorShape) -> bool:
    """Tell whether a shape has a batch axis, one to three spatial axes, and channels."""
    return shape.rank in (3, 4, 5)


def check_batch_shape(specs: Any, given: tuple[int, ...] | None, model: str) -> None:
    """Refuse a `batch_shape` that none of the images of a step can have.

    Args:
        specs: Specs of the step's inputs, as the data set gives them.
        given: The `batch_shape`, if there is one.
        model: Name of the model.

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
    for tensor in _arguments(traced):
        if is_image(tensor.shape) and tensor.shape[0] is None:
            raise RewriteError(
                f"A budget needs a known batch size. Received: argument `{tensor.name}` of shape {tensor.shape}. "
                "Pass `batch_shape=`, the shape of the largest batch of images."
            )


def _arguments(traced: Any) -> list[Any]:
    """Return the inputs of a traced step without its captured tensors."""
    return traced.inputs[: len(traced.inputs) - len(traced.captured_inputs)]


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
    """The batch sizes that a plan for a budget is valid for.

    A batch smaller than the planned one needs less memory. A larger batch needs other tiles or swaps, so a rewritten
    step refuses it. A step that is not rewritten may accept it. Its peak is then predicted once for each size, because
    live bytes grow at most linearly with the batch, but fragmentation does not.

    Args:
        plan: The plan.
        traced: The step.
        params: The budget, in bytes.
        remedy: Sentence of errors about a larger batch. `None`: the remedy for a Keras callback.
    """

    def __init__(self, plan: Plan, traced: TracedStep, params: AutoParams, remedy: str | None = None) -> None:
        self._batch = plan.batch
        self._traced = None if plan.changed else traced
        self._limit = limit_of(traced, params)
        self._remedy = remedy
        self._fits_by_batch_size: dict[int, bool] = {}

    def check_batch(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the tensors of a batch with a run-time check of those that have the batch axis and an open size."""
        max_rank = max((t.shape.rank or 0 for t in tensors), default=0)
        has_batch = [is_image(t.shape) or max_rank > 0 and t.shape.rank == max_rank for t in tensors]
        return [
            self.check(t) if batched and t.shape[0] is None and isinstance(t, tf.Tensor) else t
            for t, batched in zip(tensors, has_batch, strict=True)
        ]

    def check(self, tensor: Any) -> Any:
        """Return a tensor of unknown batch size with a run-time check that its batch is not too large."""
        batch_size = tf.shape(tensor)[0]
        fits = batch_size <= self._batch
        unit, remedy = "sample(s)", "Let the first batch be the largest."
        if is_image(tensor.shape):
            unit, remedy = "images", "Give the largest batch as `batch_shape=`."
        remedy = self._remedy or remedy
        if self._traced is None:
            text = f"The plan holds for batches of up to {self._batch} {unit}. {remedy}"
            return assert_in_step(tensor, fits, text, batch_size)

        def predict_fit() -> Any:
            return tf.ensure_shape(tf.numpy_function(self._fits, [batch_size], tf.bool, stateful=False), ())

        text = (
            f"The plan holds for batches of {self._batch} {unit}, and for larger ones whose predicted peak is within "
            f"the budget. {remedy}"
        )
        return assert_in_step(tensor, tf.cond(fits, lambda: True, predict_fit), text, batch_size)

    def _fits(self, batch_size: Any) -> Any:
        """Tell whether the original step is predicted to keep the budget with this batch size."""
        size = int(batch_size)
        if size not in self._fits_by_batch_size:
            assert self._traced is not None
            with collector_paused():
                peak, _ = predict(dataclasses.replace(self._traced, batch=size), [])
            self._fits_by_batch_size[size] = peak.peak_bytes <= self._limit
        return np.bool_(self._fits_by_batch_size[size])
