"""The plans of one training for batches of different sizes.

Images, in files too, and sequences of one training may differ in size, in all axes but the first. A rewritten step
holds for one size: its tiles, and the peak that was predicted. Each size therefore has a step and a plan of its own.

The first axes of a batch may have different sizes, such as the nodes, edges and graphs of a batch of graphs. A step
holds for batches of which no leading size exceeds that of the planned batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from rewriters.step_importer import StepImporter
from tflms_sft._batches.batch_limits import BatchLimit, is_image
from tflms_sft._batches.first_batches import PeekedBatches
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import Measurement
from tflms_sft._util.progress import Stopwatch
from tflms_sft._util.text import shortened

EXTENSION = 2
"""Factor by which leading sizes that grow are predicted ahead, so that growing batches need few predictions."""

MARGIN = 1.25
"""Factor by which leading sizes are planned ahead once a training has had many sizes."""

MAX_SHAPES = 6
"""Shapes of a batch that a line names."""

Shapes = Sequence[tuple[int, ...]]


@dataclasses.dataclass
class PlannedStep:
    """The step for batches of one size.

    Attributes:
        shapes: Shapes of the tensors of its first batch, components of ragged and sparse tensors included, `()` for a
            `None` in the batch; empty before these are known.
        limits: Largest leading sizes of these tensors that it is planned for; empty for those of `shapes`.
        largest: Largest leading sizes of the batches that it has been extended to.
        has_margin: Whether it is planned for leading sizes that are larger than those of its first batch by `MARGIN`.
        arguments: Positions in `shapes` of the arguments of the traced step.
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
    limits: Sequence[int] = ()
    largest: Sequence[int] = ()
    has_margin: bool = False
    arguments: Sequence[int] = ()
    function: Any = None
    importers: dict[Any, tuple[StepImporter, Any]] = dataclasses.field(default_factory=dict)
    is_open: bool = False
    plan: Plan | None = None
    planning: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    batch_limit: BatchLimit | None = None
    variable_bytes: Sequence[int] = ()
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

    @property
    def leading_limits(self) -> Sequence[int]:
        """Largest leading size of each tensor that the step is planned for; 0 for scalars."""
        factor = MARGIN if self.has_margin else 1
        return self.limits or [math.ceil(_leading_size(shape) * factor) for shape in self.shapes]

    @property
    def largest_shape(self) -> tuple[int, ...] | None:
        """Shape of the highest rank that the step is planned for; `None` before shapes are known."""
        limits = [*self.leading_limits, *map(_leading_size, self.image_shapes)]
        shapes = [(limit, *shape[1:]) if shape else () for limit, shape in zip(limits, self.all_shapes, strict=True)]
        return max(shapes, key=len, default=None)

    def drop_margin(self) -> bool:
        """Plan for the leading sizes of the first batch; return whether larger ones were planned for before."""
        had_margin, self.has_margin, self.limits = self.has_margin, False, ()
        return had_margin

    def set_arguments(self, specs: Any) -> None:
        """Set the specs of a batch of which each leaf but `None` is an argument of the traced step."""
        leaves = tf.nest.flatten(specs, expand_composites=True)
        is_known = len(leaves) == len(self.shapes)
        self.arguments = [position for position, leaf in enumerate(leaves) if leaf is not None] if is_known else []

    def argument_sizes(self, limits: Sequence[int] | None = None) -> dict[int, int]:
        """Return leading sizes by the position of an argument of the traced step, by default the planned ones."""
        limits = self.leading_limits if limits is None else limits
        known = [(limits[position], self.shapes[position]) for position in self.arguments]
        return {number: limit for number, (limit, shape) in enumerate(known) if shape}

    def use_limit(self, batch: int) -> None:
        """Plan for a larger batch: raise the leading sizes that equal the batch size of the first batch."""
        first = _leading_size(_largest(self.shapes))
        leading = list(map(_leading_size, self.shapes))
        limits = zip(leading, self.leading_limits, strict=True)
        self.limits = [max(batch, limit) if size == first else limit for size, limit in limits]

    def holds_for(self, shapes: Shapes, image_shapes: Shapes = ()) -> bool:
        """Return whether this step can train a batch.

        With a budget, no leading size may exceed the planned one. A rewritten step needs equal sizes of images, and
        equal leading sizes where it assumes them. A step that is not rewritten keeps the budget with smaller images,
        too.

        Args:
            shapes: Shapes of the tensors of the batch.
            image_shapes: Shapes of the images in files that the batch names.
        """
        return self._has_inner_sizes(shapes, image_shapes) and (self.batch_limit is None or self._is_within(shapes))

    def extend(self, shapes: Shapes, image_shapes: Shapes = ()) -> bool:
        """Hold for the leading sizes of a larger batch from now on; return whether that is possible.

        It is for a step that is not rewritten and is predicted to keep the budget with these sizes.
        """
        plan, limit = self.plan, self.batch_limit
        if plan is None or plan.changed or limit is None or not self._has_inner_sizes(shapes, image_shapes):
            return False
        sizes = [max(_leading_size(shape), old) for shape, old in zip(shapes, self.leading_limits, strict=True)]
        for factor in (EXTENSION, 1):
            limits = [new * factor if new > old else old for new, old in zip(sizes, self.leading_limits, strict=True)]
            if limit.fits(self.argument_sizes(limits)):
                self.limits, self.largest = limits, sizes
                return True
        return False

    def _has_inner_sizes(self, shapes: Shapes, image_shapes: Shapes) -> bool:
        """Return whether the step accepts the sizes of a batch except for the largest leading ones."""
        every = [*shapes, *image_shapes]
        if [len(shape) for shape in every] != [len(shape) for shape in self.all_shapes]:
            return False
        pairs = [pair for a, b in zip(every, self.all_shapes, strict=True) for pair in zip(a[1:], b[1:], strict=True)]
        if self.is_open:
            return all(size <= planned for size, planned in pairs)
        sizes = self.argument_sizes([_leading_size(shape) for shape in shapes])
        is_same = all(
            sizes.get(one) == sizes.get(other)
            for importer, _ in self.importers.values()
            for one, other in importer.graph.same_size
        )
        return is_same and all(size == planned for size, planned in pairs)

    def _is_within(self, shapes: Shapes) -> bool:
        """Return whether no leading size of a batch exceeds the planned one."""
        pairs = zip(shapes, self.leading_limits, strict=True)
        return self.plan is None or all(not shape or shape[0] <= limit for shape, limit in pairs)

    def shape_text(self) -> str:
        """Return the shape of the tensor of the highest rank, such as `4x24x24x3`.

        If leading sizes differ, return the shapes of all tensors.
        """
        shapes = [shape for shape in self.all_shapes if shape]
        if len({shape[0] for shape in shapes}) <= 1:
            return _text(_largest(shapes))
        return shortened(list(dict.fromkeys(map(_text, shapes))), MAX_SHAPES)

    def use_static_shapes(self, specs: Sequence[Any]) -> None:
        """Take the shapes of the specs of a batch, if none are known yet and all are dense and of known sizes."""
        if not self.shapes and all(s is None or isinstance(s, tf.TensorSpec) for s in specs):
            shapes = [tf.TensorShape(()) if s is None else s.shape for s in specs]
            self.shapes = [tuple(s) for s in shapes] if all(s.is_fully_defined() for s in shapes) else ()

    def settle(self, plan: Plan, planning: Stopwatch, variable_bytes: Sequence[int]) -> None:
        """Set the plan of the first signature, the time that it took, and the bytes of each variable."""
        self.plan, self.planning, self.variable_bytes = plan, planning, variable_bytes

    def discard(self) -> None:
        """Forget the plan, so that the next step is planned again."""
        self.abandon()
        self.importers.clear()
        self.plan = self.excess = None
        self.limits = self.largest
        self.is_open = self.is_measured = self.has_peeked = False

    def abandon(self) -> None:
        """Release everything that a failed step has left in swap tiers and files."""
        for importer, _ in self.importers.values():
            importer.abandon()


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _leading_size(shape: Sequence[int]) -> int:
    """Return the leading size of a tensor; 0 for a scalar."""
    return next(iter(shape), 0)


def _largest(shapes: Shapes) -> tuple[int, ...]:
    """Return the shape of the highest rank."""
    largest: tuple[int, ...] = max(shapes, key=len, default=())
    return largest


def shapes_of(batch: Any) -> Shapes:
    """Return the shapes of the tensors or arrays of a batch, components of ragged and sparse ones included.

    The shape is `()` for a leaf whose size is not known.
    """
    leaves = tf.nest.flatten(batch, expand_composites=True)
    shapes = (tf.TensorShape(getattr(leaf, "shape", ())) for leaf in leaves)
    return [tuple(shape) if shape.is_fully_defined() else () for shape in shapes]


def positions_of(leaves: Sequence[Any]) -> Iterator[int]:
    """Return the position of the first component of each leaf of a batch, in the order of `shapes_of`."""
    counts = [len(tf.nest.flatten(leaf, expand_composites=True)) for leaf in leaves]
    return itertools.accumulate(counts[:-1], initial=0)


def step_for(steps: Sequence[PlannedStep], shapes: Shapes, image_shapes: Shapes) -> PlannedStep | None:
    """Return the first step that holds for a batch, or else that can be extended to it; `None` without one."""
    fitting = (step for step in steps if step.holds_for(shapes, image_shapes))
    extended = (step for step in steps if step.extend(shapes, image_shapes))
    return next(fitting, None) or next(extended, None)


def spec_with_sizes(spec: Any, shape: tuple[int, ...], *, images_only: bool) -> Any:
    """Return a spec with the sizes of `shape` where its own are unknown, the leading size aside.

    Args:
        spec: A spec, or `None`; specs of ragged and sparse tensors are returned unchanged.
        shape: The sizes; of another rank if they are not known.
        images_only: Whether text of any length keeps its unknown length, because no other length could get a plan.
    """
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank or len(shape) != spec.shape.rank:
        return spec
    if images_only and not is_image(spec.shape):
        return spec
    sizes = [planned if size is None else size for size, planned in zip(spec.shape[1:], shape[1:], strict=True)]
    return tf.TensorSpec([spec.shape[0], *sizes], spec.dtype)
