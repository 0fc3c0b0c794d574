"""Selects the planned step for the size of each batch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator
from typing import Any

import tensorflow as tf

from rewriters.ir.device_detection import planned_device
from tflms_sft._batches.first_batches import PeekedBatches, can_peek, varies_in_size
from tflms_sft._batches.planned_step import BatchSizes, PlannedStep, Shapes, positions_of, shapes_of, spec_with_sizes
from tflms_sft._params.request import RewriteRequest
from tflms_sft._sources.open_shapes import UnknownSizes, has_unknown_sizes

MANY_SIZES = 5
"""Number of sizes of batches from which on steps are planned for larger leading sizes, and a line tells about them."""


@dataclasses.dataclass(eq=False)
class SizeSelector:
    """The planned steps of one training, and the selection of one of them for each batch.

    Attributes:
        make_function: Builds the compiled function of a step.
        batch_shape: Shape of the largest batch of images of one replica; `None` for that of the first batch.
        split: Returns the shares of a batch on several replicas; `None` for one replica.
        is_any_batch: Whether a step accepts any number of samples, so that the last batch needs no plan.
        tell: Called with the line about batches of many sizes.
        steps: The steps, that of the first size first.
        current: The step of the latest batch.
        unknown_sizes: Readers of images of unknown sizes.
        is_selecting: Whether steps have been selected by the size of a batch.
    """

    model: Any
    request: RewriteRequest
    make_function: Callable[[], Any]
    batch_shape: tuple[int, ...] | None = None
    split: Callable[[Any], Any] | None = None
    is_any_batch: bool = False
    tell: Callable[[str], None] = print
    unknown_sizes: UnknownSizes = dataclasses.field(init=False, default_factory=UnknownSizes)
    is_selecting: bool = dataclasses.field(init=False, default=False)
    _serves_all: bool = dataclasses.field(init=False, default=False)

    def __post_init__(self) -> None:
        """Begin with a step for the first batch, whatever its size."""
        self.current = PlannedStep(self.make_function)
        self.steps = [self.current]

    def trace_again(self) -> None:
        """Have the step of the latest batch traced again, and forget those of other sizes."""
        self.steps = [self.current]
        self.current.trace_again()

    def abandon(self) -> None:
        """Release everything that a failed step has left in swap tiers and files."""
        for step in self.steps:
            step.abandon()

    def stop_selecting(self) -> None:
        """Run all batches by the present step from now on, since it is for any size."""
        self._serves_all = True

    def take(self, iterator: Any) -> tuple[Any, PeekedBatches | None]:
        """Fetch the batches of one execution as far as their sizes or a measurement require, and select their step.

        Args:
            iterator: What Keras passes to the compiled function; see `StepKind`.

        Returns:
            The argument of `PlannedStep.run`, and the batches that have been fetched from a data set, or `None`.
        """
        peeked = self._peek(iterator)
        if peeked is not None:
            return peeked if self._has_open_sizes(iterator) else peeked.replay(), peeked
        if isinstance(iterator, Generator):
            iterator = list(itertools.islice(iterator, self.model.steps_per_execution))
            self._select(iterator[0])
            return iter(iterator), None
        if isinstance(iterator, list):
            self._remember(iterator[0])
            self._select(iterator[0])
        return iterator, None

    def _peek(self, iterator: Any) -> PeekedBatches | None:
        """Fetch the batches of an execution, to measure it or to learn their shapes; `None` if not needed.

        The step may be traced with unknown sizes, but the planner needs static ones.
        """
        if not can_peek(iterator):
            return None
        selects, step = self._has_open_sizes(iterator), self.current
        is_shape_known = bool(self.batch_shape or step.sizes.shapes) or step.plan is not None
        if not selects:
            if step.has_run:
                return None
            if is_shape_known and (self.request.pipeline is not None or not planned_device().has_allocator_stats):
                return None
        try:
            peeked = PeekedBatches(iterator, self.model.steps_per_execution)
        except StopIteration:
            if not selects:
                raise
            return None  # The step itself finds the end: ops that need no batch run once more, as in plain training.
        if selects:
            self._select(peeked.first)
        elif not is_shape_known:
            self._remember(peeked.first)
        return peeked

    @property
    def _can_select(self) -> bool:
        """Tell whether each execution has batches of one size, and can have a plan of its own."""
        is_whole = self.request.pipeline is None and self.split is None
        return is_whole and not self._serves_all and self.model.steps_per_execution == 1

    def _has_open_sizes(self, iterator: Any) -> bool:
        """Tell whether each batch of a data set is looked at, since it may have a size and a plan of its own."""
        varies = varies_in_size(iterator, leading=self.request.budget is not None)
        return self._can_select and (varies or has_unknown_sizes(self.model))

    def _remember(self, batch: Any) -> None:
        self.current.sizes.set_shapes(shapes_of(batch if self.split is None else self.split(batch)))

    def _select(self, batch: Any) -> None:
        """Continue with the step for the size of a batch. It is planned when it runs for the first time."""
        if not self._can_select:
            return
        self.unknown_sizes.set_arguments(batch)
        shapes, image_shapes = shapes_of(batch), self.unknown_sizes.shapes()
        self.is_selecting = True
        self.current.sizes.set_shapes(shapes)
        if not self.current.holds_for(shapes, image_shapes):
            fitting = (step for step in self.steps if step.holds_for(shapes, image_shapes))
            extended = (step for step in self.steps if step.extend(shapes, image_shapes))
            self.current = next(fitting, None) or next(extended, None) or self._new_step(shapes, image_shapes)

    def _new_step(self, shapes: Shapes, image_shapes: Shapes) -> PlannedStep:
        count = len(self.steps) + 1
        step = PlannedStep(self.make_function, BatchSizes(shapes, image_shapes, has_margin=count >= MANY_SIZES))
        self.steps.append(step)
        if count == MANY_SIZES:
            self.tell(
                f"tflms-sft: batches of {count} sizes so far; each size is traced and planned separately, which takes "
                "time. Resize or pad batches to fewer sizes, or let the largest batch be the first."
            )
        step.trace_again()
        return step

    @property
    def image_batch_shape(self) -> tuple[int, ...] | None:
        """Shape of the largest batch of images of one replica: as given, or that of the first batch if it is larger."""
        shape = self.current.sizes.largest_shape
        if self.batch_shape is None:
            return shape
        return (max(self.batch_shape[0], *shape[:1]) if shape else self.batch_shape[0], *self.batch_shape[1:])

    def specs_of(self, batch: Any) -> tuple[Any, Any]:
        """Return the specs of a batch, with planned sizes where those of the data set are unknown, and without them."""
        leaves = tf.nest.flatten(batch)
        open_specs = list(map(self._open_spec, leaves))
        shapes = self.current.sizes.shapes
        specs = [
            spec_with_sizes(
                spec,
                (shapes[position] if position < len(shapes) else None) or self.batch_shape or (),
                images_only=not self.is_selecting,
            )
            for spec, position in zip(open_specs, positions_of(leaves), strict=True)
        ]
        return tf.nest.pack_sequence_as(batch, specs), tf.nest.pack_sequence_as(batch, open_specs)

    def _open_spec(self, tensor: Any) -> Any:
        """Return the spec of one input as the data set gives it; `None` for `None`."""
        if tensor is None:
            return None
        if not isinstance(tensor, tf.Tensor):
            return tf.type_spec_from_value(tensor)
        is_any = self.is_any_batch and tensor.shape.rank
        return tf.TensorSpec([None, *tensor.shape[1:]] if is_any else tensor.shape, tensor.dtype)
