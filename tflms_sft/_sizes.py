"""Which batches and images a planned step takes: it is checked in the step, and told without a page of TensorFlow's."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from rewriters.errors import RewriteError
from tflms_sft._plan import Plan


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


def most_images(plan: Plan, headroom: float, correction: float) -> int:
    """Size of the largest batch that a plan for a budget holds for.

    A step that is left as it is needs, beside weights and optimizer slots, at most twice as much for twice as many
    images: at each moment a part of what is alive grows with their number, and the rest does not grow.

    Args:
        plan: It holds for batches of `plan.batch` images at least.
        headroom: Part of the budget that a prediction leaves free.
        correction: What an earlier plan was measured to take, over what was predicted.
    """
    fixed = plan.predicted.fixed_bytes
    grows = plan.predicted.peak_bytes - fixed
    if plan.changed or plan.memory_budget is None or grows <= 0:
        return plan.batch
    room = plan.memory_budget * (1 - headroom) / correction - fixed
    return max(int(plan.batch * room / grows), plan.batch)
