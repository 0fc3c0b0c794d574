"""Which batches and images a planned step takes: it is checked in the step, and told without a page of TensorFlow's."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.errors import RewriteError
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._planner.budget_search import limit_of
from tflms_sft._planner.traced_step import TracedStep, collector_paused, predict
from tflms_sft._report.plan import Plan


def is_image(shape: tf.TensorShape) -> bool:
    """Whether a shape has a batch, one to three spatial axes, and channels."""
    return shape.rank in (3, 4, 5)


def of_size(tensor: Any, shape: Any) -> Any:
    """The tensor with its planned shape; images of another size are an error that names both."""
    if tensor.shape.is_compatible_with(shape) and not tensor.shape.is_fully_defined() and is_image(shape):
        sizes = shape.as_list()[1:-1]
        text = (
            f"The step is planned for images of {'x'.join(map(str, sizes))}, the size of the first batch or of "
            "`batch_shape`. Train on images of one size, or resize or pad them."
        )
        found = tf.shape(tensor)[1:-1]
        tensor = checked(tensor, tf.reduce_all(found == sizes), text, found)
    return tf.ensure_shape(tensor, shape)


def checked(tensor: Any, good: Any, text: str, sizes: Any) -> Any:
    """The tensor; a step in which it is not good ends with an error that `refusal_of` knows by this text."""
    with tf.control_dependencies([tf.debugging.Assert(good, [text, sizes])]):
        return tf.identity(tensor)


_ASSERTED = re.compile(r"assertion failed: \[(The (?:plan holds|step is planned) for .*?)\] \[([\d ]+)\]", re.DOTALL)


def refusal_of(error: BaseException) -> RewriteError | None:
    """What an assertion of `checked` said, without what TensorFlow says around it; `None` for other errors."""
    found = _ASSERTED.search(str(error)) if isinstance(error, tf.errors.InvalidArgumentError) else None
    if found is None:
        return None
    text, sizes = found.groups()
    return RewriteError(f"{text} Received: {'x'.join(sizes.split())}.")


class BatchLimit:
    """Which batches a plan for a budget holds for.

    Smaller ones than it was made for need less. Where a step is left as it is, a larger one is predicted when it comes,
    once for each size: what is alive grows no faster than the batch, but not the pieces of an allocator's memory that
    it lies in. Where tiles or swaps were found, a larger one needs others.

    Args:
        plan: The plan.
        traced: The step.
        params: The budget, in bytes.
    """

    def __init__(self, plan: Plan, traced: TracedStep, params: AutoParams) -> None:
        self._batch = plan.batch
        self._traced = None if plan.changed else traced
        self._limit = limit_of(traced, params)
        self._known: dict[int, bool] = {}

    def checked(self, tensor: Any) -> Any:
        """What goes into a step that does not know how large its batches are; too large a batch ends it."""
        number = tf.shape(tensor)[0]
        good = number <= self._batch
        what, remedy = "sample(s)", "Let the first batch be the largest."
        if is_image(tensor.shape):
            what, remedy = "images", "Give the largest batch as `batch_shape=`."
        if self._traced is None:
            return checked(tensor, good, f"The plan holds for batches of up to {self._batch} {what}. {remedy}", number)

        def ask() -> Any:
            found = tf.numpy_function(self._holds_for, [number], tf.bool, stateful=False)
            return tf.ensure_shape(found, ())

        text = (
            f"The plan holds for batches of {self._batch} {what}, and of more where they are predicted to keep to the "
            f"budget. {remedy}"
        )
        return checked(tensor, tf.cond(good, lambda: True, ask), text, number)

    def _holds_for(self, number: Any) -> Any:
        """Whether the step as it is keeps to the budget with so many samples."""
        size = int(number)
        if size not in self._known:
            assert self._traced is not None
            with collector_paused():
                peak, _ = predict(dataclasses.replace(self._traced, batch=size), [])
            self._known[size] = peak.peak_bytes <= self._limit
        return np.bool_(self._known[size])
