"""The rewritten step for batches of one size, and the sizes that it is planned for.

Images, in files too, and sequences of one training may differ in size, in all axes but the first. A rewritten step
holds for one size: its tiles, and the peak that was predicted. Each size therefore has a step and a plan of its own.

The first axes of a batch may have different sizes, such as the nodes, edges and graphs of a batch of graphs. A step
holds for batches of which no leading size exceeds that of the planned batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from rewriters.step_importer import StepImporter
from rewriters.swapping.tiers import Tier
from tflms_sft._batches.batch_limits import BatchLimit, is_image, with_planned_sizes
from tflms_sft._batches.first_batches import PeekedBatches
from tflms_sft._report.plan import Plan, amend_plan
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
class BatchSizes:
    """The sizes that a step is planned for: those of its first batch, and larger leading ones.

    Attributes:
        shapes: Shapes of the tensors of its first batch, components of ragged and sparse tensors included, `()` for a
            `None` in the batch; empty before these are known.
        image_shapes: Shapes of the images in files that its first batch names, for each reader of unknown sizes; empty
            before the first trace.
        has_margin: Whether it is planned for leading sizes that are larger than those of its first batch by `MARGIN`.
        arguments: Positions in `shapes` of the arguments of the traced step.
    """

    shapes: Shapes = ()
    image_shapes: Shapes = ()
    has_margin: bool = False
    arguments: Sequence[int] = ()
    _limits: Sequence[int] = dataclasses.field(init=False, default=())
    _largest: Sequence[int] = dataclasses.field(init=False, default=())

    @property
    def all_shapes(self) -> Shapes:
        """Shapes of the tensors of the first batch, and of the images in files that it names."""
        return [*self.shapes, *self.image_shapes]

    @property
    def leading_limits(self) -> Sequence[int]:
        """Largest leading size of each tensor that the step is planned for; 0 for scalars."""
        factor = MARGIN if self.has_margin else 1
        return self._limits or [math.ceil(_leading_size(shape) * factor) for shape in self.shapes]

    @property
    def largest_shape(self) -> tuple[int, ...] | None:
        """Shape of the highest rank that the step is planned for; `None` before shapes are known."""
        limits = [*self.leading_limits, *map(_leading_size, self.image_shapes)]
        shapes = [(limit, *shape[1:]) if shape else () for limit, shape in zip(limits, self.all_shapes, strict=True)]
        return max(shapes, key=len, default=None)

    def set_shapes(self, shapes: Shapes = (), image_shapes: Shapes = ()) -> None:
        """Set the shapes of the first batch, and of the images that it names, where they are not known yet."""
        self.shapes, self.image_shapes = self.shapes or shapes, self.image_shapes or image_shapes

    def set_static_shapes(self, specs: Sequence[Any]) -> None:
        """Set the shapes of the specs of a batch, if none are known yet and all are dense and of known sizes."""
        if all(s is None or isinstance(s, tf.TensorSpec) for s in specs):
            shapes = [tf.TensorShape(()) if s is None else s.shape for s in specs]
            self.set_shapes([tuple(s) for s in shapes] if all(s.is_fully_defined() for s in shapes) else ())

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

    def raise_batch(self, batch: int) -> None:
        """Plan for a larger batch: raise the leading sizes that equal the batch size of the first batch."""
        first = _leading_size(_largest(self.shapes))
        leading = list(map(_leading_size, self.shapes))
        limits = zip(leading, self.leading_limits, strict=True)
        self._limits = [max(batch, limit) if size == first else limit for size, limit in limits]

    def drop_margin(self) -> bool:
        """Plan for the leading sizes of the first batch; return whether larger ones were planned for before."""
        had_margin, self.has_margin, self._limits = self.has_margin, False, ()
        return had_margin

    def extend(self, shapes: Shapes, fits: Callable[[Mapping[int, int]], bool]) -> bool:
        """Hold for the leading sizes of a larger batch, if leading sizes by argument fit; return whether they do."""
        sizes = [max(_leading_size(shape), old) for shape, old in zip(shapes, self.leading_limits, strict=True)]
        for factor in (EXTENSION, 1):
            limits = [new * factor if new > old else old for new, old in zip(sizes, self.leading_limits, strict=True)]
            if fits(self.argument_sizes(limits)):
                self._limits, self._largest = limits, sizes
                return True
        return False

    def drop_extension(self) -> None:
        """Hold for the largest leading sizes of the batches so far; an extended step holds for more."""
        self._limits = self._largest

    def holds_for(self, shapes: Shapes) -> bool:
        """Return whether no leading size of a batch exceeds the planned one."""
        pairs = zip(shapes, self.leading_limits, strict=True)
        return all(not shape or shape[0] <= limit for shape, limit in pairs)

    def has_inner_sizes(self, shapes: Shapes, *, or_smaller: bool) -> bool:
        """Return whether the sizes of all shapes of a batch but the leading ones are those planned, or smaller ones."""
        if [len(shape) for shape in shapes] != [len(shape) for shape in self.all_shapes]:
            return False
        pairs = [pair for a, b in zip(shapes, self.all_shapes, strict=True) for pair in zip(a[1:], b[1:], strict=True)]
        return all(size == planned or (or_smaller and size < planned) for size, planned in pairs)

    def text(self) -> str:
        """Return the shape of the tensor of the highest rank, such as `4x24x24x3`.

        If leading sizes differ, return the shapes of all tensors.
        """
        shapes = [shape for shape in self.all_shapes if shape]
        if len({shape[0] for shape in shapes}) <= 1:
            return _text(_largest(shapes))
        return shortened(list(dict.fromkeys(map(_text, shapes))), MAX_SHAPES)


@dataclasses.dataclass
class Correction:
    """The measured peaks of one planned step.

    Attributes:
        excess_bytes: Measured peak less the predicted peak of the previous plan; `None` before there is one.
        excess_before: `excess_bytes` of the plan that was discarded because a later step exceeded the budget.
        later_peak: Peak of a later step of the present plan that exceeded the budget.
        is_replanned: Whether the plan is corrected by the measured peak of an earlier one.
        keeps_plan: Whether no corrected plan fits, so that the present one stays.
    """

    excess_bytes: int | None = None
    excess_before: int | None = None
    later_peak: Measurement | None = None
    is_replanned: bool = False
    keeps_plan: bool = False


@dataclasses.dataclass(eq=False)
class PlannedStep:
    """The step for batches of one size.

    Attributes:
        make_function: Builds the model's compiled function, which runs the step on the batches of an iterator.
        importers: Rewritten steps by signature, each with the specs that it holds for.
        is_open: Whether the step is not rewritten, and traced for any size.
        plan: Plan of the first signature; `None` before its first step.
        planning: Stopwatch with the time that planning took.
        batch_limit: Batch sizes that the plan holds for; `None` without a budget.
        variable_bytes: Bytes of each variable.
        has_run: Whether its first step has run, whose peak is measured.
        num_traces: Number of calls of `trace_again`, after which an earlier trace is out of date.
        correction: Measured peaks by which the next plan is corrected.
    """

    make_function: Callable[[], Any]
    sizes: BatchSizes = dataclasses.field(default_factory=BatchSizes)
    importers: dict[Any, tuple[StepImporter, Any]] = dataclasses.field(default_factory=dict)
    is_open: bool = False
    plan: Plan | None = None
    planning: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    batch_limit: BatchLimit | None = None
    variable_bytes: Sequence[int] = ()
    has_run: bool = False
    num_traces: int = 0
    correction: Correction = dataclasses.field(default_factory=Correction)
    _function: Any = dataclasses.field(init=False, default=None, repr=False)
    _on_batch: Any = dataclasses.field(init=False, default=None, repr=False)

    def run(self, batches: Any) -> Any:
        """Run the compiled function on the batches of an iterator, or on one batch of a data set of open sizes.

        Creating a data set for each batch would take ten milliseconds. The batch is passed to a function that is traced
        for the open sizes of its data set instead.
        """
        if not isinstance(batches, PeekedBatches):
            return self._function(batches)
        if self._on_batch is None:
            spec, function = batches.spec, self._function

            def on_batch(*flat: Any) -> Any:
                return function(iter([tf.nest.pack_sequence_as(spec, flat)]))

            traced = tf.function(on_batch, input_signature=tf.nest.flatten(spec), autograph=False)
            self._on_batch = traced.get_concrete_function()  # Calls do not count as retracing of one function.
        return self._on_batch(*tf.nest.flatten(batches.first))

    def call(self, key: Any, leaves: Sequence[Any], *, is_selected: bool) -> Any:
        """Run the rewritten step of a signature on the leaves of a batch, in the function that Keras traces."""
        importer, planned = self.importers[key]
        arguments = with_planned_sizes(leaves, tf.nest.flatten(planned))
        # A selected step that is not rewritten runs larger batches, too, for which `extend` has predicted the peak.
        if self.batch_limit is not None and self.plan is not None and (self.plan.changed or not is_selected):
            arguments = self.batch_limit.check_batch(arguments)
        return importer(arguments)

    @property
    def tiers(self) -> list[Tier]:
        """Swap tiers of all signatures."""
        return [tier for importer, _ in self.importers.values() for tier in importer.tiers]

    def holds_for(self, shapes: Shapes, image_shapes: Shapes = ()) -> bool:
        """Return whether this step can train a batch of tensors, and of images in files that it names.

        With a budget, no leading size may exceed the planned one. A rewritten step needs equal sizes of images, and
        equal leading sizes where it assumes them. A step that is not rewritten keeps the budget with smaller images,
        too.
        """
        is_limited = self.batch_limit is not None and self.plan is not None
        return self._has_inner_sizes(shapes, image_shapes) and not (is_limited and not self.sizes.holds_for(shapes))

    def extend(self, shapes: Shapes, image_shapes: Shapes = ()) -> bool:
        """Hold for the leading sizes of a larger batch from now on; return whether that is possible.

        It is for a step that is not rewritten and is predicted to keep the budget with these sizes.
        """
        plan, limit = self.plan, self.batch_limit
        if plan is None or plan.changed or limit is None or not self._has_inner_sizes(shapes, image_shapes):
            return False
        return self.sizes.extend(shapes, limit.fits)

    def _has_inner_sizes(self, shapes: Shapes, image_shapes: Shapes) -> bool:
        """Return whether the step accepts the sizes of a batch except for the largest leading ones."""
        if not self.sizes.has_inner_sizes([*shapes, *image_shapes], or_smaller=self.is_open):
            return False
        sizes = self.sizes.argument_sizes(list(map(_leading_size, shapes)))
        pairs = (pair for importer, _ in self.importers.values() for pair in importer.graph.same_size)
        return self.is_open or all(sizes.get(one) == sizes.get(other) for one, other in pairs)

    def settle(
        self, plan: Plan, planning: Stopwatch, variable_bytes: Sequence[int], batch_limit: BatchLimit | None = None
    ) -> None:
        """Set the plan of the first signature, the time that it took, the bytes of variables, and the batch sizes."""
        self.plan, self.planning = plan, planning
        self.variable_bytes, self.batch_limit = variable_bytes, batch_limit

    def note_first_run(self, measured: Measurement | None) -> None:
        """Add the measured peak of the first step, if there is one, to the plan."""
        self.has_run = True
        if self.plan is not None and measured is not None:
            self.plan = amend_plan(self.plan, measured=measured)

    def trace_again(self) -> None:
        """Have Keras build the compiled function, which traces the step, and rewrite the new traces; keep the plan."""
        self.num_traces += 1
        self._rebuild()

    def _rebuild(self) -> None:
        self.importers.clear()
        self._function, self._on_batch = self.make_function(), None

    def plan_again(self) -> None:
        """Forget the plan, so that the next step is planned again, from its present trace."""
        self.abandon()
        self.plan = None
        self.sizes.drop_extension()
        self.is_open = self.has_run = False
        self._rebuild()

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
