"""What a callback trained a model with, so that the same can be done to the step again."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from rewriters.errors import RewriteError
from tflms_sft._params.request import RewriteRequest
from tflms_sft._report.plan import Plan
from tflms_sft._trace.step_tracing import batch_of
from tflms_sft._util.text import shortened

_MOST_NAMES = 4


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a model was trained with.

    Attributes:
        chosen: What was to be done with its step.
        plan: What was done.
        correction: What an earlier plan was measured to take, over what was predicted.
    """

    chosen: RewriteRequest
    plan: Plan
    correction: float = 1.0

    def specs(self, data: Any) -> Any:
        """A batch of any size, unless the plan is for one size and this batch has it."""
        if self.plan.batch_is_fixed and batch_of(data) == self.plan.batch:
            return data
        return tf.nest.map_structure(lambda t: t if t is None else tf.TensorSpec([None, *t.shape[1:]], t.dtype), data)

    def require_even(self, data: Any) -> None:
        """Refuse a batch that a pipeline for batches of one size does not cut evenly into its micro-batches.

        Raises:
            ValueError: With both numbers.
        """
        batch = batch_of(data)
        count = 1 if self.plan.pipeline is None else self.plan.pipeline.micro_batches
        if self.plan.batch_is_fixed and batch is not None and batch % count:
            raise ValueError(
                f"`batch` must be cut evenly by the micro-batches of the pipeline that was trained, {count}. Received: "
                f"a batch of {batch}. Give a multiple of {count} samples."
            )

    def check(self, found: Plan) -> None:
        """Refuse another plan than the one that was trained.

        Raises:
            RewriteError: With both, and what differs.
        """
        wanted, done = _done(self.plan), _done(found)
        different = [what for what in {**wanted, **done} if wanted.get(what) != done.get(what)]
        if different:
            raise RewriteError(
                f"The plan that was trained is not found again. They differ in {shortened(different, _MOST_NAMES)}. "
                f"Trained: {self.plan.headline()}. Found for this batch: {found.headline()}. Give images of the size "
                f"that was trained, in a batch of {self.plan.batch} if there is the memory, and the model as it was."
            )


def _done(plan: Plan) -> dict[str, Any]:
    """What a plan does to a step, by the names of a report, without what is predicted of it."""
    found: dict[str, Any] = {
        f"segment {s.name!r}": (
            *(s.entries, s.exits, s.stored, s.kept),
            *(s.num_tiles, s.backward_num_tiles, s.halo, s.num_loops),
        )
        for s in plan.segments
    }
    for swap in plan.swaps:  # Those without a layer may have a name in common.
        found.setdefault(f"swap of {swap.tensor!r}", []).append((swap.readers, swap.controls))
    found["where swaps go"] = plan.swap_tier
    if plan.pipeline is not None:
        pipeline = plan.pipeline
        found["the schedule"] = pipeline.schedule, pipeline.micro_batches, pipeline.data_replicas, pipeline.slots
        found["the devices"] = pipeline.devices
        for s in pipeline.stages:
            found[f"stage {s.number}"] = s.devices, s.entries, s.exit, s.segments
    return found
