"""Records of a plan: predictions, measurements, segments, swaps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tflms_sft._report.pipeline_plan import PlannedPipeline


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted memory and time of one step.

    Attributes:
        peak_bytes: Bytes alive on the device at the peak, weights and optimizer slots included.
        fixed_bytes: Bytes of weights, optimizer slots and other variables.
        time_ratio: Time over that of the original step; from arithmetic and memory traffic at the machine's rates.
        largest: (name, bytes) of the largest tensors alive at the peak. The name is the layer that returns the tensor,
            `layer (op)` for other tensors, or `layer (op, backward)` for gradients. On a GPU that is nearly full, also
            the free chunks between tensors (fragmentation).
        timeline: (op, bytes alive while it runs), in predicted order. A tile loop is one op,
            `sft/<segment>/<loop>/while`.
        progress: Start of each of these ops, as a fraction of the time of the original step.
        seconds: Time of the step in seconds, at the machine's rates.
        own: (description, bytes) of memory that is in use at the peak only while an op runs: an iteration of a loop, or
            the scratch of a kernel. If there are both, the second is a part of the first.
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
    """Measured bytes alive on a device over one run of a step.

    Attributes:
        device: Name of the device, such as `"GPU:0"`.
        peak_bytes: Maximum of the bytes alive, variables and arguments included.
        largest: (op that allocated it, bytes) of the largest tensors alive at the peak.
        points: (seconds, bytes alive), one per change.
        loops: (`<segment>/<loop>`, start, end) of each tile loop in seconds; of a pipeline for each micro-batch.
    """

    device: str
    peak_bytes: int
    largest: tuple[tuple[str, int], ...]
    points: tuple[tuple[float, int], ...] = dataclasses.field(repr=False)
    loops: tuple[tuple[str, float, float], ...] = dataclasses.field(repr=False, default=())


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Measured memory of one step.

    Attributes:
        peak_bytes: Bytes alive on the device at the peak, weights and optimizer slots included.
        source: Source of the peak: allocator statistics, or allocation records of one traced step.
        timelines: Bytes alive over time on each device, the measured device first; empty unless requested.
    """

    peak_bytes: int
    source: str
    timelines: tuple[Timeline, ...] = ()


@dataclasses.dataclass(frozen=True)
class PlannedSegment:
    """A segment of the rewritten step.

    Attributes:
        name: Name of the segment; its name scope is `sft/<name>`.
        entries: Names of the tensors that the segment reads; valid in a `SegmentSpec`.
        exits: Names of the tensors that the segment computes; valid in a `SegmentSpec`.
        num_tiles: Number of tiles along the batch and each axis in the forward loop; empty without a forward loop.
        backward_num_tiles: Number of tiles in the backward loop; empty without a backward loop.
        stored: Names of inner tensors that are checkpointed instead of recomputed.
        forward_ops: Number of forward ops.
        backward_ops: Number of backward ops.
        tile_bytes: Predicted peak of one iteration of each loop, in bytes.
        tile_rows: Size along each axis of the largest tile of the exit, or of the incoming gradient without a forward
            loop; and of the entry with its halo.
        notes: Remarks for the user.
        num_loops: Number of tile loops. Between barriers, such as the moments of BatchNorm, there are several; then
            `num_tiles`, `tile_bytes` and `tile_rows` are those of the loops with the most tiles.
        one_loop: Whether one loop runs the forward and the backward ops, so that nothing but halos is recomputed. Both
            numbers of tiles are those of this loop.
        kept: Between barriers, names of the tensors that are saved for the backward pass; the others that it reads are
            recomputed from them.
        halo: Source of the halo rows, `"recompute"` or `"carry"`, as in `SFTParams`.
        saved_bytes: Bytes of carried rows that are saved for the backward loop, with `halo="carry"`.
        overlapped_bytes: Bytes that the loops compute repeatedly because tiles overlap, without the recomputation for
            the backward pass.
        most_rows: Approximate number of strips above which more strips need more memory (`halo="carry"`) or double the
            work (`halo="recompute"`). It is no limit. `None` if the exit has fewer rows, or tiles are not strips.
        waiting_bytes: Bytes of its forward tensors that are saved for the backward pass, in the original and the
            rewritten step.
        time_share: Predicted time of its ops over that of the original step, in the original and the rewritten step.
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
    one_loop: bool = False
    kept: tuple[str, ...] = ()
    halo: str = "recompute"
    saved_bytes: int = 0
    overlapped_bytes: int = 0
    most_rows: int | None = None
    waiting_bytes: tuple[int, int] = (0, 0)
    time_share: tuple[float, float] = (0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class PlannedSwap:
    """A tensor that is swapped out and in again.

    Attributes:
        tensor: Layer that returns the tensor, or layer and op type.
        num_bytes: Size in bytes.
        readers: Names of the ops that consume the tensor after each swap-in.
        controls: Name of the op that triggers each swap-in.
    """

    tensor: str
    num_bytes: int
    readers: tuple[tuple[str, ...], ...]
    controls: tuple[str, ...]


@dataclasses.dataclass(eq=False, repr=False, frozen=True)
class PlanRecord:
    """Data of a plan. `Plan` documents the attributes."""

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
    file_bytes: int = 0
    rest_waiting_bytes: tuple[int, int] = (0, 0)
    rest_time_share: tuple[float, float] = (0.0, 0.0)
    pipeline: PlannedPipeline | None = None
    recipe: Mapping[str, Any] | None = None

    @property
    def swapped_bytes(self) -> int:
        """Bytes of all tensors that are swapped out in a step."""
        return sum(swap.num_bytes for swap in self.swaps)
