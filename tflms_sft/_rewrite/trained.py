"""`Trained`: the request and the plan that a callback trained a model with, to repeat them in `verify`."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from rewriters.errors import RewriteError
from tflms_sft._params.request import RewriteRequest
from tflms_sft._report.plan import Plan
from tflms_sft._trace.step_tracing import batch_of
from tflms_sft._util.text import shortened

_MAX_NAMES = 4


@dataclasses.dataclass(frozen=True)
class Trained:
    """The rewriting of a model's training by a callback.

    Attributes:
        request: Tiles, swaps or a pipeline, with a budget in bytes.
        plan: Plan of the training.
        excess_bytes: Measured peak less predicted peak of an earlier plan; 0 without one.
    """

    request: RewriteRequest
    plan: Plan
    excess_bytes: int = 0

    def specs(self, data: Any) -> Any:
        """Return specs of a batch of any size; the batch itself if the plan is fixed to its size."""
        if self.plan.batch_is_fixed and batch_of(data) == self.plan.batch:
            return data
        return tf.nest.map_structure(lambda t: t if t is None else tf.TensorSpec([None, *t.shape[1:]], t.dtype), data)

    def require_even(self, data: Any) -> None:
        """Refuse a batch that is no multiple of the micro-batches of a pipeline for one batch size.

        Raises:
            ValueError: With both numbers.
        """
        batch = batch_of(data)
        count = 1 if self.plan.pipeline is None else self.plan.pipeline.micro_batches
        if self.plan.batch_is_fixed and batch is not None and batch % count:
            raise ValueError(
                f"`batch` must be a multiple of the number of micro-batches of the trained pipeline, {count}. "
                f"Received: a batch of {batch}."
            )

    def check(self, plan: Plan) -> None:
        """Refuse a plan that differs from the trained one.

        Raises:
            RewriteError: With both plans and their differences.
        """
        trained, actual = _decisions(self.plan), _decisions(plan)
        different = [name for name in {**trained, **actual} if trained.get(name) != actual.get(name)]
        if different:
            raise RewriteError(
                f"This batch yields another plan than the training; they differ in {shortened(different, _MAX_NAMES)}. "
                f"Trained: {self.plan.headline()}. Received: {plan.headline()}. Give images of the trained size in a "
                f"batch of {self.plan.batch}, and the unchanged model. Or pass a smaller budget in its place."
            )


def _decisions(plan: Plan) -> dict[str, Any]:
    """Return the decisions of a plan, without its predictions, by the names of a report."""
    decisions: dict[str, Any] = {
        f"segment {s.name!r}": (
            *(s.entries, s.exits, s.stored, s.kept),
            *(s.num_tiles, s.backward_num_tiles, s.halo, s.num_loops),
        )
        for s in plan.segments
    }
    for swap in plan.swaps:  # Tensors without a layer may have a name in common.
        decisions.setdefault(f"swap of {swap.tensor!r}", []).append((swap.readers, swap.controls))
    decisions["the swap tier"] = plan.swap_tier
    if plan.pipeline is not None:
        pipeline = plan.pipeline
        decisions["the schedule"] = (
            *(pipeline.schedule, pipeline.micro_batches, pipeline.data_replicas, pipeline.slots),
        )
        decisions["the devices"] = pipeline.devices
        for s in pipeline.stages:
            decisions[f"stage {s.number}"] = s.devices, s.entries, s.exit, s.segments
    return decisions
