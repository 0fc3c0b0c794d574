"""The data that a plan consists of: predictions, measurements, segments, swaps."""

from __future__ import annotations

import dataclasses

from tflms_sft._report.pipeline_plan import PlannedPipeline


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the model says of one step.

    Attributes:
        peak_bytes: Everything alive on the device at the worst moment, weights and optimizer slots included.
        fixed_bytes: Weights, optimizer slots and other variables.
        time_ratio: Time over that of the original step: arithmetic and memory traffic, the weights of every turn
            included, at the machine's rates.
        largest: (name, bytes) of the largest tensors alive at the worst moment: the layer that returns it, or
            `layer (operation)` for what else was made there, or for its gradient.
        timeline: (op, bytes alive while it runs), in predicted order. A tile loop is one op,
            `sft/<segment>/<loop>/while`.
        progress: Work done when each of these ops begins, over that of the whole original step.
        seconds: Time of the step, by the machine's rates.
        own: (what, bytes) that is taken at the worst moment only while something runs: a turn of a loop, or kernels'
            own memory; if both, the second is a part of the first.
    """

    peak_bytes: int
    fixed_bytes: int
    time_ratio: float
    largest: tuple[tuple[str, int], ...]
    timeline: tuple[tuple[str, int], ...] = dataclasses.field(repr=False, default=())
    progress: tuple[float, ...] = dataclasses.field(repr=False, default=())
    seconds: float = 0.0
    own: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What was alive on a device while a step ran.

    Attributes:
        device: Such as `"GPU:0"`.
        peak_bytes: The most at a time, variables and arguments included.
        largest: (operation that made it, bytes) of the largest things alive then.
        points: (seconds, bytes alive), one for each change.
        loops: (`<segment>/<loop>`, seconds at its begin, at its end) of each tile loop, in a pipeline for each
            micro-batch.
    """

    device: str
    peak_bytes: int
    largest: tuple[tuple[str, int], ...]
    points: tuple[tuple[float, int], ...] = dataclasses.field(repr=False)
    loops: tuple[tuple[str, float, float], ...] = dataclasses.field(repr=False, default=())


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a run of one step took.

    Attributes:
        peak_bytes: As in `Prediction`.
        source: Where the number comes from.
        timelines: What was alive when, on each device, the one whose memory counts first; if they were asked for.
    """

    peak_bytes: int
    source: str
    timelines: tuple[Timeline, ...] = ()


@dataclasses.dataclass(frozen=True)
class PlannedSegment:
    """One segment as it runs.

    Attributes:
        name: Its name scope is `sft/<name>`.
        entries: Names of what goes in; they can be pasted into a `SegmentSpec`.
        exits: Names of what comes out.
        num_tiles: Tiles along the batch and each axis in the forward loop; empty if nothing waits for one.
        backward_num_tiles: The same in the backward loop; empty if there is none.
        stored: Names of inner tensors that are kept instead of recomputed.
        forward_ops: Number of forward ops.
        backward_ops: Number of backward ops.
        tile_bytes: Predicted peak of one turn of each loop.
        tile_rows: Rows along each axis of the largest tile of the exit (of the incoming gradient, if there is none),
            and of the entry with its halo.
        notes: What a reader should know.
        num_loops: Tile loops. Between barriers, such as the moments of BatchNorm, each has its own; `num_tiles`,
            `tile_bytes` and `tile_rows` are those with the most tiles then.
        kept: Between barriers, names of the tensors that wait whole for the backward phase; what else it needs is
            computed from them again.
        halo: Where tiles have the rows from that they share, as for `SFTParams`.
        saved_bytes: Rows that are saved for the backward loop, with `halo="carry"`.
        overlapped_bytes: What the loops make more than once, because several tiles need it, recomputation for the
            backward pass not counted.
        most_rows: About the number of row tiles above which more of them need more memory (`halo="carry"`) or double
            the work (`halo="recompute"`); that does not limit them. `None` if there are not as many rows, and
            where tiles are not rows alone.
        waiting_bytes: Of what its forward ops make, what waits for the backward phase: before, and after.
        time_share: Predicted time of its ops, over that of the whole step before: once, and in its loops.
    """

    name: str
    entries: tuple[str, ...]
    exits: tuple[str, ...]
    num_tiles: tuple[int, ...]
    backward_num_tiles: tuple[int, ...]
    stored: tuple[str, ...]
    forward_ops: int
    backward_ops: int
    tile_bytes: tuple[int, ...]
    tile_rows: tuple[tuple[int, ...], tuple[int, ...]]
    notes: tuple[str, ...] = ()
    num_loops: int = 2
    kept: tuple[str, ...] = ()
    halo: str = "recompute"
    saved_bytes: int = 0
    overlapped_bytes: int = 0
    most_rows: int | None = None
    waiting_bytes: tuple[int, int] = (0, 0)
    time_share: tuple[float, float] = (0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class PlannedSwap:
    """A tensor that leaves the device and comes back.

    Attributes:
        tensor: Its name.
        num_bytes: Its size.
        readers: Names of the operations that read it after it came back, per swap-in.
        controls: Name of the operation after which each swap-in starts.
    """

    tensor: str
    num_bytes: int
    readers: tuple[tuple[str, ...], ...]
    controls: tuple[str, ...]


@dataclasses.dataclass(eq=False, repr=False)
class PlanRecord:
    """The data of a plan: how a step was rewritten.

    Attributes:
        changed: Whether anything was rewritten.
        batch: Batch size that the bytes hold for. Smaller ones run too; larger ones if there is no budget, or nothing
            was rewritten and they are predicted to keep to it.
        batch_is_fixed: Whether the step was traced for this batch alone.
        segments: What runs tile by tile.
        left_alone: (name, reason) of image ops that stay as they were.
        original: Prediction for the step as it was.
        predicted: Prediction for the step as it is.
        measured: Peak of a real step, once there was one.
        memory_budget: Bytes, if there was a budget.
        notes: Remarks.
        swaps: Tensors that leave the device in every step.
        swap_tier: Where they go: `"host"` or `"disk"`; empty if there are none.
        not_swapped: (tensor, why it stays) of those that could not be swapped.
        rest_waiting_bytes: As in `PlannedSegment`, of what is in no segment; what is swapped is counted.
        rest_time_share: The same for time.
        pipeline: Stages on several devices, if that is what was done.
    """

    changed: bool
    batch: int
    batch_is_fixed: bool
    segments: tuple[PlannedSegment, ...]
    left_alone: tuple[tuple[str, str], ...]
    original: Prediction
    predicted: Prediction
    measured: Measurement | None = None
    memory_budget: int | None = None
    notes: tuple[str, ...] = ()
    swaps: tuple[PlannedSwap, ...] = ()
    swap_tier: str = ""
    not_swapped: tuple[tuple[str, str], ...] = ()
    rest_waiting_bytes: tuple[int, int] = (0, 0)
    rest_time_share: tuple[float, float] = (0.0, 0.0)
    pipeline: PlannedPipeline | None = None

    @property
    def swapped_bytes(self) -> int:
        """Bytes that are swapped out in a step."""
        return sum(swap.num_bytes for swap in self.swaps)
