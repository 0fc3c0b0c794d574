"""The plans of one training for batches of different sizes.

Images, in files too, and sequences of one training may differ in size, in all axes but that of the batch. A rewritten
step holds for one size: its tiles, and the peak that was predicted. Each size therefore has a step and a plan of its
own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rewriters.step_importer import StepImporter
from tflms_sft._batches.batch_limits import BatchLimit
from tflms_sft._batches.first_batches import PeekedBatches
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import Measurement
from tflms_sft._util.progress import Stopwatch

Shapes = Sequence[tuple[int, ...]]


@dataclasses.dataclass
class PlannedStep:
    """The step for batches of one size.

    Attributes:
        shapes: Shapes of the tensors of its first batch; empty before these are known.
        image_shapes: Shapes of the images in files that its first batch names, for each reader of unknown sizes; empty
            before the first trace.
        function: The model's compiled function that runs the step on the batches of an iterator.
        importers: Rewritten steps by signature, each with the specs that it holds for.
        is_open: Whether the step is not rewritten, and traced for any size.
        plan: Plan of the first signature; `None` before its first step.
        planning: Stopwatch with the time that planning took.
        batch_limit: Batch sizes that the plan holds for; `None` without a budget.
        variable_bytes: Bytes of each variable.
        is_measured: Whether the peak of its first step has been measured.
        has_peeked: Whether a batch has been fetched for that measurement.
        is_replanned: Whether the plan is corrected by the measured peak of an earlier one.
        excess: Peak of a later step that exceeded the budget.
        excess_bytes: Measured peak less the predicted peak of the previous plan; `None` before there is one.
        excess_before: That of the plan that was discarded because a later step exceeded the budget.
        keeps_plan: Whether no corrected plan fits, so that this one stays.
    """

    shapes: Shapes = ()
    image_shapes: Shapes = ()
    function: Any = None
    importers: dict[Any, tuple[StepImporter, Any]] = dataclasses.field(default_factory=dict)
    is_open: bool = False
    plan: Plan | None = None
    planning: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    batch_limit: BatchLimit | None = None
    variable_bytes: list[int] = dataclasses.field(default_factory=list)
    is_measured: bool = False
    has_peeked: bool = False
    is_replanned: bool = False
    excess: Measurement | None = None
    excess_bytes: int | None = None
    excess_before: int | None = None
    keeps_plan: bool = False
    _on_batch: Any = dataclasses.field(init=False, default=None, repr=False)

    def run(self, batches: Any) -> Any:
        """Run the compiled function on the batches of an iterator, or on one batch of a data set of open sizes.

        Creating a data set for each batch would take ten milliseconds. The batch is passed to a function that is traced
        for the open sizes of its data set instead.
        """
        if not isinstance(batches, PeekedBatches):
            return self.function(batches)
        if self._on_batch is None:
            spec, function = batches.spec, self.function

            def on_batch(*flat: Any) -> Any:
                return function(iter([tf.nest.pack_sequence_as(spec, flat)]))

            traced = tf.function(on_batch, input_signature=tf.nest.flatten(spec), autograph=False)
            self._on_batch = traced.get_concrete_function()  # Calls do not count as retracing of one function.
        return self._on_batch(*tf.nest.flatten(batches.first))

    def use(self, function: Any) -> None:
        """Run another compiled function from now on."""
        self.function, self._on_batch = function, None

    @property
    def all_shapes(self) -> Shapes:
        """Shapes of the tensors of its first batch, and of the images in files that it names."""
        return [*self.shapes, *self.image_shapes]

    def holds_for(self, shapes: Shapes, image_shapes: Shapes = ()) -> bool:
        """Return whether this step can train a batch.

        With a budget, the batch must not have more samples than planned. A rewritten step needs equal sizes of images.
        A step that is not rewritten keeps the budget with smaller images, too.

        Args:
            shapes: Shapes of the tensors of the batch.
            image_shapes: Shapes of the images in files that the batch names.
        """
        shapes = [*shapes, *image_shapes]
        if [len(shape) for shape in shapes] != [len(shape) for shape in self.all_shapes]:
            return False
        if self.plan is not None and self.batch_limit is not None and _num_samples(shapes) > self.plan.batch:
            return False
        pairs = [pair for a, b in zip(shapes, self.all_shapes, strict=True) for pair in zip(a[1:], b[1:], strict=True)]
        if self.is_open:
            return all(size <= planned for size, planned in pairs)
        return all(size == planned for size, planned in pairs)

    def shape_text(self) -> str:
        """Return the shape of the tensor of the highest rank, such as `4x24x24x3`."""
        return "x".join(map(str, _largest(self.all_shapes)))

    def discard(self) -> None:
        """Forget the plan, so that the next step is planned again."""
        self.abandon()
        self.importers.clear()
        self.plan = self.excess = None
        self.is_open = self.is_measured = self.has_peeked = False

    def abandon(self) -> None:
        """Release everything that a failed step has left in the swap tiers."""
        for importer, _ in self.importers.values():
            importer.abandon()


def _num_samples(shapes: Shapes) -> int:
    """Return the leading size of the tensor of the highest rank; 0 for scalars."""
    return next(iter(_largest(shapes)), 0)


def _largest(shapes: Shapes) -> tuple[int, ...]:
    """Return the shape of the highest rank."""
    largest: tuple[int, ...] = max(shapes, key=len, default=())
    return largest


def shapes_of(batch: Any) -> Shapes:
    """Return the shapes of the tensors or arrays of a batch; `()` for one whose size is not known."""
    shapes = (tf.TensorShape(getattr(leaf, "shape", ())) for leaf in tf.nest.flatten(batch))
    return [tuple(shape) if shape.is_fully_defined() else () for shape in shapes]


def with_sizes(spec: tf.TensorSpec, shape: tuple[int, ...]) -> tf.TensorSpec:
    """Return a spec with the sizes of `shape` where its own are unknown, the batch size aside."""
    sizes = [planned if size is None else size for size, planned in zip(spec.shape[1:], shape[1:], strict=True)]
    return tf.TensorSpec([spec.shape[0], *sizes], spec.dtype)
