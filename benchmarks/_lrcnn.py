"""Child processes of `benchmarks.lrcnn`: training methods, predicted and measured.

An *option* is one setting of a method, as JSON:

- `{}`: the original step.
- `{"swaps": {...}}`: swaps, with these arguments of `LMSParams`.
- `{"budget": bytes}`: the plan that the budget search finds.
- `{"halo": ..., "segments": [[entry, exit, strips], ...]}`: segments with their numbers of strips. A pair
  `[down, across]` instead of a number stands for tiles.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import _bisection, _child, _nets, _profile

if TYPE_CHECKING:
    import tflms_sft

Option = dict[str, Any]

ROWS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Numbers of strips that are tried."""

IMAGE_STEP = 32
"""Divisor of all image sizes: the factor by which the networks shrink an image."""

WAYS = ("plain", "checkpoint", "offload", "OverL", "2PS", "OverL-H", "2PS-H", "MemoryBudget")
"""Training methods: Base, Ckp, OffLoad, OverL, 2PS, OverL-H and 2PS-H of the paper, and the budget search."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Positions at which a network can be cut.

    Attributes:
        entry: Layer of the images.
        joints: Layers through which all data flows, in order.
        stages: Joints at which hybrid methods put checkpoints, each with its stride: rows of the image for one row.
    """

    entry: str
    joints: tuple[str, ...]
    stages: dict[str, int]


def _vgg() -> Layout:
    blocks = ((2, 1), (2, 2), (3, 3), (3, 4), (3, 5))
    joints = [name for n, block in blocks for name in (*(f"conv{block}_{i + 1}" for i in range(n)), f"pool{block}")]
    return Layout(_nets.INPUT_NAME, tuple(joints), {f"pool{block}": 2**block for _, block in blocks})


def _resnet() -> Layout:
    counts = {2: 3, 3: 4, 4: 6, 5: 3}
    joints = ["pool1_pool", *(f"conv{stage}_block{n + 1}_out" for stage, last in counts.items() for n in range(last))]
    ends = {f"conv{stage}_block{last}_out": 2**stage for stage, last in counts.items()}
    return Layout("input_layer", tuple(joints), {"pool1_pool": 4, **ends})


LAYOUTS = {"vgg16": _vgg(), "resnet50": _resnet()}


def options(way: str, net: str, image_size: int, memory: int | None = None, rows: Sequence[int] = ROWS) -> list[Option]:
    """Return the options of a method that are tried for an image size."""
    layout = LAYOUTS[net]
    if way == "plain":
        return [{}]
    if way == "checkpoint":
        return [{"halo": "recompute", "segments": _checkpoints(layout)}]
    if way == "offload":
        return [{"swaps": _nets.LEAST_MEMORY}]
    if way == "MemoryBudget":
        return [{"budget": memory}]
    halo = "carry" if way.startswith("2PS") else "recompute"
    if way.endswith("-H"):
        tilings = [_hybrid(layout, image_size, number) for number in rows]
    else:
        tilings = [
            [[layout.entry, end, number]]
            for end, stride in reversed(layout.stages.items())
            for number in rows
            if number <= image_size // stride
        ]
    return [{"halo": halo, "segments": segments} for i, segments in enumerate(tilings) if segments not in tilings[:i]]


def _checkpoints(layout: Layout) -> list[list[Any]]:
    """Return √n segments of one tile each for n joints.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    """
    number = round(len(layout.joints) ** 0.5)
    ends = [layout.joints[len(layout.joints) * (i + 1) // number - 1] for i in range(number)]
    return [[entry, end, 1] for entry, end in zip((layout.entry, *ends), ends, strict=False)]


def tiles(net: str, image_size: int, number: int) -> Option | None:
    """Return the option with a segment for each stage in `number` tiles, which are as square as the number allows.

    Returns `None` for 1 and for primes, whose only tiles are strips.
    """
    shorter = max(n for n in range(1, int(number**0.5) + 1) if number % n == 0)
    if shorter == 1:
        return None
    pairs = [_hybrid(LAYOUTS[net], image_size, n) for n in (number // shorter, shorter)]
    segments = [[*down[:2], [down[2], across[2]]] for down, across in zip(*pairs, strict=True)]
    return {"halo": "recompute", "segments": segments}


def _hybrid(layout: Layout, image_size: int, rows: int) -> list[list[Any]]:
    """Return a segment for each stage, with `rows` strips, or with as many as the stage has rows."""
    ends = list(layout.stages)
    most = [image_size // stride for stride in layout.stages.values()]
    return [[entry, end, min(rows, here)] for entry, end, here in zip((layout.entry, *ends), ends, most, strict=False)]


def params_of(option: Option) -> Any:
    """Return the parameters of `rewrite` for an option that changes the step."""
    import tflms_sft

    if "swaps" in option:
        return tflms_sft.LMSParams(tier="disk", **option["swaps"])
    if "budget" in option:
        return tflms_sft.AutoParams(option["budget"], headroom=0.0, swap=False)
    grids = [(rows, 1) if isinstance(rows, int) else tuple(rows) for _, _, rows in option["segments"]]
    pairs = zip(option["segments"], grids, strict=True)
    specs = [tflms_sft.SegmentSpec(entry, end, grid) for (entry, end, _), grid in pairs]
    return tflms_sft.SFTParams(segments=specs, halo=option["halo"])


def rewritten(step: Any, option: Option) -> tflms_sft.RewrittenStep:
    """Return a step rewritten by an option; for the original step, with a plan that changes nothing."""
    import tflms_sft

    return tflms_sft.rewrite(step, params_of(option) if option else tflms_sft.AutoParams("1TiB"))


# ----------------------------------------------------------------------------------------------------------
# In the child.


def predict(
    *,
    net: str,
    vary: str,
    way: str,
    memory: int,
    image_size: int,
    batch: int,
    rows: Sequence[int] = ROWS,
    emit: _child.Emit,
) -> dict[str, Any]:
    """Find the largest batch or image whose predicted peak is within `memory`.

    Args:
        net: Key of `LAYOUTS`.
        vary: "batch" or "image".
        way: Training method, one of `WAYS`.
        memory: Bytes.
        image_size: Height and width if the batch size varies.
        batch: Batch size if the image size varies.
        rows: Numbers of strips that are tried.
        emit: Called with each size that is tried.

    Returns:
        "size" (0 if the smallest does not fit), "image_size", "batch", "option" and its "predicted" peak.
    """
    fitting: dict[int, tuple[Option, int] | None] = {}
    tried = Tried()

    def at(number: int) -> tuple[int, int]:
        return (image_size, number) if vary == "batch" else (number * IMAGE_STEP, batch)

    def fits(number: int) -> bool:
        side, images = at(number)
        pixels = images * side**2
        fitting[number] = None
        candidates = tried.worth_trying(options(way, net, side, memory, rows), pixels, memory)
        for option, peak in _peaks(net, side, images, candidates):
            tried.add(option, pixels, peak)
            if peak <= memory:
                fitting[number] = (option, peak)
                break
        emit({"size": images if vary == "batch" else side, "fits": fitting[number] is not None})
        return fitting[number] is not None

    number = _bisection.largest(fits, 16, 0.02)
    best = fitting[number] if number else None
    side, images = at(number)
    return {
        "size": images if vary == "batch" else side,
        "image_size": side,
        "batch": images,
        "option": best and best[0],
        "predicted": best and best[1],
    }


class Tried:
    """Peaks of options at the sizes tried so far, which bound other peaks without slow planning."""

    def __init__(self) -> None:
        self._peaks: dict[str, list[tuple[int, int]]] = {}

    def add(self, option: Option, pixels: int, peak: int) -> None:
        """Record the peak of an option for a batch of so many pixels."""
        self._peaks.setdefault(json.dumps(option), []).append((pixels, peak))

    def at_least(self, option: Option, pixels: int) -> float:
        """Return a lower bound of the peak, which grows with the pixels, at most in proportion to them."""
        peaks = self._peaks.get(json.dumps(option), [])
        return max((peak * min(1.0, pixels / tried_pixels) for tried_pixels, peak in peaks), default=0.0)

    def worth_trying(self, candidates: Sequence[Option], pixels: int, memory: int) -> list[Option]:
        """Return the options that may fit: first those with bounds, lowest first, then the others from the middle."""
        bounds = [self.at_least(option, pixels) for option in candidates]
        indices = [i for i, bound in enumerate(bounds) if bound <= memory]
        indices.sort(key=lambda i: (not bounds[i], bounds[i], abs(i - len(candidates) // 2)))
        return [candidates[i] for i in indices]


def _peaks(net: str, image_size: int, batch: int, tried: Sequence[Option]) -> Iterator[tuple[Option, int]]:
    """Yield the predicted peaks of options; skip options that cannot be planned."""
    import keras

    import tflms_sft

    keras.backend.clear_session()
    plain = _nets.TASKS[net].step(image_size, batch)
    for option in tried:
        try:
            plan = rewritten(plain, option).plan
        except tflms_sft.RewriteError:
            continue
        yield option, plan.predicted.peak_bytes


def train(*, net: str, image_size: int, batch: int, option: Option, steps: int, emit: _child.Emit) -> dict[str, Any]:
    """Train for some steps after a first one; return their times and peaks, and the predictions."""
    import tensorflow as tf

    from rewriters.ir.device_detection import planned_device

    plain = _nets.TASKS[net].step(image_size, batch)
    step = rewritten(plain, option)
    run = step if option else plain
    images, labels = map(tf.constant, _nets.TASKS[net].noise(image_size, batch))
    float(run(images, labels))
    seconds, peaks = [], []
    for _ in range(steps):
        tf.config.experimental.reset_memory_stats(planned_device().name)
        began = time.perf_counter()
        float(run(images, labels))
        seconds.append(time.perf_counter() - began)
        peaks.append(tf.config.experimental.get_memory_info(planned_device().name)["peak"])
        emit({"seconds": seconds[-1], "peak_bytes": peaks[-1]})
    plan = step.plan
    return {
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "measured": max(peaks),
        "predicted": (plan.predicted if option else plan.original).peak_bytes,
        "time_ratio": plan.predicted.time_ratio,
        "shared_bytes": sum(segment.saved_bytes for segment in plan.segments),
        "overlapped_bytes": sum(segment.overlapped_bytes for segment in plan.segments),
        "most_rows": [segment.most_rows for segment in plan.segments],
        "plan": plan.headline(),
    }


def where_time_goes(
    *, net: str, image_size: int, batch: int, option: Option, steps: int, emit: _child.Emit
) -> dict[str, float]:
    """Return the mean seconds of a step by kind of work; a first step is not counted."""
    import tensorflow as tf

    plain = _nets.TASKS[net].step(image_size, batch)
    run = rewritten(plain, option) if option else plain
    images, labels = map(tf.constant, _nets.TASKS[net].noise(image_size, batch))
    float(run(images, labels))
    seconds = _profile.seconds_by_group(lambda: float(run(images, labels)), steps)
    emit(seconds)
    return seconds


def gradient_errors(
    *, net: str, image_size: int, batch: int, rows: Sequence[int], emit: _child.Emit
) -> list[dict[str, Any]]:
    """Compare the gradients of strips, with and without carried rows, with those of the original step.

    Without carried rows, a strip reads zeros in their place, as if it were an image of its own. Section V-D of the
    LR-CNN paper trains such strips for comparison.

    Returns:
        For each number of strips, the relative L2 error of all gradients as one vector, "with" and "without" carried
        rows.
    """
    import keras
    import tensorflow as tf

    task, layout = _nets.TASKS[net], LAYOUTS[net]
    model = task.compiled(image_size)
    images, labels = map(tf.constant, task.noise(image_size, batch))

    specs = (tf.TensorSpec(images.shape, images.dtype), tf.TensorSpec(labels.shape, labels.dtype))

    @tf.function(input_signature=specs, autograph=False)
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(images, labels, model(images, training=True))
        return tape.gradient(loss, model.trainable_variables)

    plain = step(images, labels)
    end, stride = list(layout.stages.items())[-1]
    results = []
    for number in sorted({min(number, image_size // stride) for number in rows}):
        option = {"halo": "carry", "segments": [[layout.entry, end, number]]}
        errors = {}
        for name in ("with", "without"):
            with _carried_rows(name == "with"):
                errors[name] = _distance(plain, rewritten(step, option)(images, labels))
        results.append({"rows": number, **errors})
        emit(results[-1])
    keras.backend.clear_session()
    return results


def _distance(wanted: Sequence[Any], got: Sequence[Any]) -> float:
    """Return the relative L2 distance of two lists of tensors, each as one vector."""
    import numpy as np

    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(wanted, got, strict=True)]
    return float((sum(((a - b) ** 2).sum() for a, b in pairs) / sum((a**2).sum() for a, _ in pairs)) ** 0.5)


class _carried_rows:  # noqa: N801 - a context manager
    """Context in which rewritten steps read carried rows, or zeros in their place if `are_read` is false."""

    def __init__(self, are_read: bool) -> None:
        self._are_read = are_read

    def __enter__(self) -> None:
        import tensorflow as tf

        from rewriters.emission.loop_emitter import IterationEmitter

        self._rows_received = rows_received = IterationEmitter.rows_received

        def zeros(iteration: Any, receive: Any) -> Any:
            return tf.zeros_like(rows_received(iteration, receive))

        if not self._are_read:
            IterationEmitter.rows_received = zeros  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        from rewriters.emission.loop_emitter import IterationEmitter

        IterationEmitter.rows_received = self._rows_received  # type: ignore[method-assign]
