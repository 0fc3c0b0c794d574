"""The measurements of networks for `benchmarks.gpu`, each in a child process of its own.

Every function returns JSON-able figures and `passed`. `device` is "gpu" or "cpu": the same checks run on both, so that
the benchmark can be tried without a GPU.
"""

from __future__ import annotations

import bisect
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks import _child, _nets
from benchmarks._gpu_device import Figures, alone_on_device, limit_memory

MAX_FLOAT64_DIFFERENCE = 1e-10
MAX_DIFFERENCE_OF_KERNELS = 1e-3
"""Between float32 kernels for images and for tiles of the same convolution, such as Winograd's and a matrix product."""
LEARNING_RATE, GRADIENT_FLOOR = 1e-3, 1e-6
"""Smaller numbers are compared absolutely: the true gradient of a bias before a normalisation is zero."""
MAX_PEAK_ERROR_FRACTION, MAX_TIME_ERROR_FRACTION = 0.15, 0.25
INPUT_PERTURBATION = {"float64": 1e-15, "float32": 1e-7}
BUDGET_FRACTIONS = (0.5, 0.75)
MIN_HIDDEN_FRACTION = 0.5


def equality(
    *, net: str, image_size: int, batch: int, steps: int, floatx: str, device: str, emit: _child.Emit
) -> Figures:
    """Compare original and rewritten steps: losses, weights, statistics and momenta after some steps.

    One rewriting has 2 tiles along each axis, the other swaps. Differences are held against those of a perturbed input.
    """
    del emit
    import keras
    import tensorflow as tf

    import tflms_sft

    if device == "gpu":
        tf.config.experimental.enable_tensor_float_32_execution(False)
    keras.config.set_floatx(floatx)
    task = network_task(net)
    step = training_step(task, image_size, batch, floatx)
    images, labels = (tf.constant(part) for part in task.noise(image_size, batch))
    images = tf.cast(images, floatx)
    labels = tf.cast(labels, floatx) if labels.dtype.is_floating else labels
    rewritings = {
        "tiles": tflms_sft.SFTParams(num_tiles=(2,) * task.dimensions),
        "swaps": tflms_sft.LMSParams(tier="host" if device == "gpu" else "disk", n_tensors=8, min_bytes=1),
    }
    results = _Results(step, steps)
    plain = results.of(step, images, labels)
    noise = tf.random.stateless_uniform(images.shape, (0, 1), -1, 1, images.dtype)
    perturbed = results.differences(plain, results.of(step, images * (1 + INPUT_PERTURBATION[floatx] * noise), labels))
    least = MAX_FLOAT64_DIFFERENCE if floatx == "float64" else MAX_DIFFERENCE_OF_KERNELS
    figures: Figures = {"perturbed": max(perturbed), "passed": True}
    for name, params in rewritings.items():
        try:
            fast = tflms_sft.rewrite(step, params, images, labels)
        except tflms_sft.RewriteError as error:
            figures[name], figures["passed"] = _child.first_line(str(error)), False
            continue
        differences = results.differences(plain, results.of(fast, images, labels))
        figures[name] = max(differences)
        figures["passed"] &= max(differences) <= max(least, 3 * max(perturbed))
    return figures


def peaks(
    *, net: str, image_size: int, batch: int, runs: int, layout: bool, tf32: bool, device: str, emit: _child.Emit
) -> Figures:
    """Compare predicted and measured peaks and times of the original step and of a plan for half of its memory.

    Args:
        net: The network.
        image_size: Height and width.
        batch: Images.
        runs: Timed steps of each.
        layout: Whether TensorFlow may change the layout of tensors to channels first.
        tf32: Whether convolutions may round their operands to 10 bits.
        device: "gpu" or "cpu".
        emit: Not used.
    """
    del emit
    import tensorflow as tf

    import tflms_sft
    from rewriters.device import gpu_kernels

    if device == "gpu":
        tf.config.experimental.enable_tensor_float_32_execution(tf32)
    tf.config.optimizer.set_experimental_options({"layout_optimizer": layout})
    task = network_task(net)
    step = training_step(task, image_size, batch, "float32")
    data = tuple(tf.constant(part) for part in task.noise(image_size, batch))
    began = time.perf_counter()
    fast, fraction = _within(step, *data)
    planned = time.perf_counter() - began
    plan = fast.plan
    with alone_on_device():
        firsts = [_seconds(run, data) for run in (step, fast)]
        plain, rewritten = (tflms_sft.measure(run, *data).peak_bytes for run in (step, fast))
        pairs = [(_seconds(step, data), _seconds(fast, data)) for _ in range(runs)]
        transposes = [_transposes(step, data)] if layout else []
        with gpu_kernels.without_gpu_optimizers():
            transposes += [_transposes(fast, data)] if layout else []
    predicted = (plan.original.peak_bytes, plan.predicted.peak_bytes)
    times = [statistics.median(column) for column in zip(*pairs, strict=True)]
    return {
        "transposes": transposes,
        "budget_fraction": fraction,
        "predicted_bytes": predicted,
        "measured_bytes": (plain, rewritten),
        "first_seconds": firsts,
        "seconds": times,
        "ratio": times[1] / times[0],
        "predicted_ratio": plan.predicted.time_ratio,
        "planned_seconds": planned,
        "headline": plan.headline(),
        "passed": all(
            abs(got / want - 1) <= MAX_PEAK_ERROR_FRACTION
            for got, want in zip((plain, rewritten), predicted, strict=True)
        )
        and rewritten < plain,
    }


def _transposes(run: Any, data: Sequence[Any]) -> int:
    """Return how many transpositions of TensorFlow's layout optimizer a step runs, in loops one per iteration."""
    from rewriters.ir import tf_internals

    function = run.concrete_function if hasattr(run, "concrete_function") else run.get_concrete_function()
    names = [name for name, _, _ in tf_internals.runs(tf_internals.step_stats(function, list(data)))]
    return sum("LayoutOptimizer" in name for name in names)


def limited(
    *, net: str, image_size: int, batch: int, memory: int, reserved: int, steps: int, device: str, emit: _child.Emit
) -> Figures:
    """Train within a budget, on a GPU whose memory TensorFlow is limited to; time per step and per pixel.

    Args:
        net: The network.
        image_size: Height and width.
        batch: Images.
        memory: Bytes that TensorFlow may allocate.
        reserved: Bytes of them that the budget does not use.
        steps: Timed steps.
        device: "gpu" or "cpu".
        emit: Not used.
    """
    del emit
    import tensorflow as tf

    import tflms_sft

    limit_memory(device, memory)
    task = network_task(net)
    step = training_step(task, image_size, batch, "float32")
    data = tuple(tf.constant(part) for part in task.noise(image_size, batch))
    began = time.perf_counter()
    fast = tflms_sft.rewrite(step, tflms_sft.AutoParams(memory - reserved), *data)
    planned = time.perf_counter() - began
    with alone_on_device():
        first = _seconds(fast, data)
        seconds = [_seconds(fast, data) for _ in range(steps)]
        peak = tflms_sft.measure(fast, *data).peak_bytes
    return {
        "headline": fast.plan.headline(),
        "planned_seconds": planned,
        "predicted_bytes": fast.plan.predicted.peak_bytes,
        "predicted_seconds": fast.plan.predicted.seconds,
        "predicted_ratio": fast.plan.predicted.time_ratio,
        "measured_bytes": peak,
        "first_seconds": first,
        "seconds": statistics.median(seconds),
        "microseconds_per_pixel": 1e6 * statistics.median(seconds) / task.pixels(image_size, batch),
        "passed": peak <= memory - reserved,
    }


def plain_times(
    *, net: str, image_size: int, batch: int, steps: int, xla: bool, device: str, emit: _child.Emit
) -> Figures:
    """Time the original step, with or without XLA."""
    del emit, device
    import tensorflow as tf

    import tflms_sft

    task = network_task(net)
    step = training_step(task, image_size, batch, "float32")
    data = tuple(tf.constant(part) for part in task.noise(image_size, batch))
    run = tf.function(step.python_function, jit_compile=True, autograph=False) if xla else step
    with alone_on_device():
        first = _seconds(run, data)
        seconds = statistics.median([_seconds(run, data) for _ in range(steps)])
        peak = None if xla else tflms_sft.measure(step, *data).peak_bytes
    return {
        "first_seconds": first,
        "seconds": seconds,
        "microseconds_per_pixel": 1e6 * seconds / task.pixels(image_size, batch),
        "measured_bytes": peak,
        "passed": True,
    }


def overlap(*, net: str, image_size: int, batch: int, device: str, emit: _child.Emit) -> Figures:
    """Measure the fraction of the time of swaps that passes beside computation."""
    del emit
    import tensorflow as tf

    import tflms_sft
    from rewriters.device import gpu_kernels
    from rewriters.ir import tf_internals

    task = network_task(net)
    step = training_step(task, image_size, batch, "float32")
    data = tuple(tf.constant(part) for part in task.noise(image_size, batch))
    params = tflms_sft.LMSParams(tier="host" if device == "gpu" else "disk")
    fast = tflms_sft.rewrite(step, params, *data)
    with alone_on_device():
        seconds = [(_seconds(step, data), _seconds(fast, data)) for _ in range(4)][1:]
        peak = tflms_sft.measure(fast, *data).peak_bytes
        with gpu_kernels.without_gpu_optimizers():
            stats = tf_internals.step_stats(fast.concrete_function, list(data))
    copies, kernels = set(), set()  # A GPU's copies and kernels are listed for every stream that has them.
    for device_stats in stats.dev_stats:
        if device == "gpu" and "stream" not in device_stats.device:
            continue
        for node in device_stats.node_stats:
            text = f"{device_stats.device} {node.node_name} {node.timeline_label}".lower()
            period = node.all_start_micros, node.all_start_micros + node.op_end_rel_micros
            if ("htod" in text or "dtoh" in text) if device == "gpu" else "swap" in text:
                copies.add(period)
            elif "memcpy" not in text:
                kernels.add(period)
    hidden = hidden_fraction(copies, kernels)
    return {
        "swaps": len(fast.plan.swaps),
        "swapped_bytes": fast.plan.swapped_bytes,
        "copies": len(copies),
        "copied_microseconds": sum(end - begin for begin, end in copies),
        "hidden": hidden,
        "time_ratio": statistics.median(fast_one / plain for plain, fast_one in seconds),
        "predicted_ratio": fast.plan.predicted.time_ratio,
        "predicted_bytes": fast.plan.predicted.peak_bytes,
        "measured_bytes": peak,
        "passed": bool(copies) and (device == "cpu" or hidden >= MIN_HIDDEN_FRACTION),
    }


def hidden_fraction(copies: Iterable[tuple[int, int]], kernels: Iterable[tuple[int, int]]) -> float:
    """Return the fraction of the time of `copies` in which one of `kernels` runs; 1 without copies.

    Args:
        copies: Begin and end of each, in microseconds.
        kernels: The same of computation.
    """
    union: list[list[int]] = []
    for begin, end in sorted(kernels):
        if union and begin <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([begin, end])
    ends = [end for _, end in union]
    total = hidden = 0
    for begin, end in copies:
        total += end - begin
        for start, stop in union[bisect.bisect_right(ends, begin) :]:
            if start >= end:
                break
            hidden += min(end, stop) - max(begin, start)
    return hidden / total if total else 1.0


def largest_batch(*, net: str, image_size: int, memory: int, steps: int, device: str, emit: _child.Emit) -> Figures:
    """Train with the largest batch that the planner accepts: 2, 4, ..., 64 times the one that fits unrewritten."""
    import tensorflow as tf

    import tflms_sft

    limit_memory(device, memory)
    task = network_task(net)
    needs = []
    for batch in (1, 2):
        step = training_step(task, image_size, batch, "float32")
        needs.append(tflms_sft.rewrite(step, tflms_sft.AutoParams("1TiB")).plan.original.peak_bytes)
    plain = max(1, 2 + (memory - needs[1]) // (needs[1] - needs[0]))
    best: Any = None
    for factor in (2, 4, 8, 16, 32, 64):
        step = training_step(task, image_size, plain * factor, "float32")
        try:
            best = factor, tflms_sft.rewrite(step, tflms_sft.AutoParams(memory))
        except tflms_sft.BudgetError:
            break
        emit({"batch": plain * factor})
    if best is None:
        return {"plain_batch": plain, "batch": plain, "passed": False}
    factor, fast = best
    data = tuple(tf.constant(part) for part in task.noise(image_size, plain * factor))
    with alone_on_device():
        _seconds(fast, data)
        seconds = statistics.median([_seconds(fast, data) for _ in range(steps)])
        peak = tflms_sft.measure(fast, *data).peak_bytes
    return {
        "plain_batch": plain,
        "batch": plain * factor,
        "headline": fast.plan.headline(),
        "predicted_ratio": fast.plan.predicted.time_ratio,
        "predicted_bytes": fast.plan.predicted.peak_bytes,
        "measured_bytes": peak,
        "seconds": seconds,
        "seconds_per_image": seconds / (plain * factor),
        "passed": peak <= memory,
    }


def tiled(*, net: str, image_size: int, batch: int, tiles: int, device: str, emit: _child.Emit) -> Figures:
    """Compare predicted and measured times with a given number of tiles along each axis: launches cost time."""
    del device, emit
    import tensorflow as tf

    import tflms_sft

    task = network_task(net)
    step = training_step(task, image_size, batch, "float32")
    data = tuple(tf.constant(part) for part in task.noise(image_size, batch))
    fast = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=(tiles,) * task.dimensions), *data)
    with alone_on_device():
        seconds = [(_seconds(step, data), _seconds(fast, data)) for _ in range(6)][1:]
        plain, rewritten = (tflms_sft.measure(run, *data).peak_bytes for run in (step, fast))
    times = [statistics.median(column) for column in zip(*seconds, strict=True)]
    ratio = times[1] / times[0]
    return {
        "seconds": times,
        "ratio": ratio,
        "predicted_seconds": [fast.plan.original.seconds, fast.plan.predicted.seconds],
        "predicted_ratio": fast.plan.predicted.time_ratio,
        "predicted_bytes": (fast.plan.original.peak_bytes, fast.plan.predicted.peak_bytes),
        "measured_bytes": (plain, rewritten),
        "passed": abs(ratio / fast.plan.predicted.time_ratio - 1) <= MAX_TIME_ERROR_FRACTION,
    }


class _Results:
    """Runs steps from the same start."""

    def __init__(self, step: Any, steps: int) -> None:
        model = step.model
        self._variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
        self._start = [variable.numpy() for variable in self._variables]
        self._steps = steps

    def of(self, run: Callable[..., Any], *data: Any) -> list[Any]:
        """Return losses and variables after the steps."""
        for variable, value in zip(self._variables, self._start, strict=True):
            variable.assign(value)
        with alone_on_device():
            losses = [run(*data).numpy() for _ in range(self._steps)]
        return [*losses, *(variable.numpy() for variable in self._variables)]

    @staticmethod
    def differences(want: Sequence[Any], got: Sequence[Any]) -> list[float]:
        """Return the largest difference of each, relative to its largest number."""
        from tflms_sft._verify.differences import difference

        return [difference(one, other, GRADIENT_FLOOR) for one, other in zip(got, want, strict=True)]


def _within(step: Any, *data: Any) -> tuple[Any, float]:
    """Return the step within the smallest of `BUDGET_FRACTIONS` that can be met, and that fraction."""
    import tflms_sft

    needed = tflms_sft.rewrite(step, tflms_sft.AutoParams("1TiB"), *data).plan.original.peak_bytes
    for fraction in BUDGET_FRACTIONS:
        try:
            return tflms_sft.rewrite(step, tflms_sft.AutoParams(int(fraction * needed)), *data), fraction
        except tflms_sft.BudgetError as error:
            refused = error
    raise refused


def _seconds(run: Callable[..., Any], data: Sequence[Any]) -> float:
    began = time.perf_counter()
    run(*data).numpy()
    return time.perf_counter() - began


def network_task(net: str) -> _nets.Task:
    if net in _nets.TASKS:
        return _nets.TASKS[net]
    return _nets.Task(net, functools.partial(_nets.application, net), 2, 3, False, image_size=224, batch=2)


def training_step(task: _nets.Task, image_size: int, batch: int, floatx: str) -> Any:
    """Return the training step of a network with the optimizer that moves its weights visibly."""
    import tensorflow as tf

    model = task.compiled(image_size)
    model.optimizer.learning_rate.assign(LEARNING_RATE)
    image, label = task.shapes(image_size)
    labels = (
        tf.TensorSpec((batch, *label, _nets.CLASSES), floatx)
        if task.one_hot
        else tf.TensorSpec((batch, *label), tf.int32)
    )

    @tf.function(input_signature=(tf.TensorSpec((batch, *image), floatx), labels), autograph=False)
    def step(images: Any, classes: Any) -> Any:
        return model.train_step((images, classes))["loss"]

    step.model = model
    return step
