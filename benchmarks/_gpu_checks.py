"""The measurements of networks for `benchmarks.gpu`, each in a child process of its own.

Every function returns JSON-able figures with `criteria`: what was required, and whether it holds. Without criteria the
figures are a measurement. `device` is "gpu" or "cpu": the same checks run on both, so that the benchmark can be tried
without a GPU. Times are criteria on a GPU alone.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import _child, _gpu_trace, _nets
from benchmarks._gpu_device import Figures, alone_on_device, limit_memory

PRECISIONS = {"float64": (1e-15, 1e-10), "float32": (1e-7, 1e-3), "tf32": (2.0**-11, 1e-2)}
"""Perturbation of the input, about one rounding, and the difference of results that is always allowed.

Kernels for images and for tiles of the same float32 convolution differ, such as Winograd's and a matrix product. TF32
rounds operands to 10 bits."""
PERTURBED_RUNS = 3
"""Runs with perturbed inputs, beside a repetition of the original step."""
MAX_DIFFERENCE = 0.3
"""Difference that fails, even if the perturbation has a larger effect."""
LEARNING_RATE, GRADIENT_FLOOR = 1e-3, 1e-6
"""Smaller numbers are compared absolutely: the true gradient of a bias before a normalisation is zero."""
MAX_PEAK_ERROR_FRACTION, MAX_TIME_ERROR_FRACTION = 0.15, 0.25
PEAK_RUNS = 5
BUDGET_FRACTIONS = (0.5, 0.75)
MIN_HIDDEN_FRACTION = 0.5
"""Smallest hidden time of copies that passes, as a fraction of the time that computation can hide."""


def equality(
    *, net: str, image_size: int, batch: int, steps: int, precision: str, device: str, emit: _child.Emit
) -> Figures:
    """Compare original and rewritten steps: losses, weights, statistics and momenta after some steps.

    One rewriting has 2 tiles along each axis, the other swaps. Differences are held against the largest one of
    perturbed inputs and of a repetition: a GPU adds in another order in each run, and where a rounding changes the sign
    of an activation, a gradient jumps. Where several steps amplify that too much for a comparison, there is one.
    """
    del emit
    import keras
    import tensorflow as tf

    import tflms_sft

    tf.config.experimental.enable_tensor_float_32_execution(precision == "tf32")
    floatx = "float64" if precision == "float64" else "float32"
    perturbation, allowed = PRECISIONS[precision]
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
    noises = [
        perturbation * tf.random.stateless_uniform(images.shape, (0, seed), -1, 1, images.dtype)
        for seed in range(PERTURBED_RUNS)
    ]
    for count in range(steps, 0, -1):
        results = _Results(step, count)
        plain = results.of(step, images, labels)
        repetitions = [results.of(step, images * (1 + noise), labels) for noise in (*noises, 0.0)]
        perturbed = max(max(results.differences(plain, other)) for other in repetitions)
        if 3 * perturbed <= MAX_DIFFERENCE:
            break
    tolerance = min(MAX_DIFFERENCE, max(allowed, 3 * perturbed))
    figures: Figures = {"steps": count, "perturbed": perturbed, "tolerance": tolerance, "criteria": {}}
    for name, params in rewritings.items():
        fast = tflms_sft.rewrite(step, params, images, labels)
        figures[name] = max(results.differences(plain, results.of(fast, images, labels)))
        rewritten = fast.plan.segments if name == "tiles" else fast.plan.swaps
        figures["criteria"] |= {f"{name} exist": bool(rewritten), f"{name} equal": figures[name] <= tolerance}
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
    del device, emit
    import tensorflow as tf

    from rewriters.device import gpu_kernels

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
        (plain, rewritten), largest = zip(*(_peaks(run, data) for run in (step, fast)), strict=True)
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
        "largest_bytes": largest,
        "first_seconds": firsts,
        "seconds": times,
        "ratio": times[1] / times[0],
        "predicted_ratio": plan.predicted.time_ratio,
        "planned_seconds": planned,
        "headline": plan.headline(),
        "criteria": {
            "original peak": is_near(plain, predicted[0], MAX_PEAK_ERROR_FRACTION),
            "rewritten peak": is_near(rewritten, predicted[1], MAX_PEAK_ERROR_FRACTION),
            "lower peak": rewritten < plain,
        },
    }


def is_near(measured: float, predicted: float, max_error_fraction: float) -> bool:
    """Return whether a measured number is within a fraction of the predicted one."""
    return abs(measured / predicted - 1) <= max_error_fraction


def _peaks(run: Any, data: Sequence[Any]) -> tuple[int, int]:
    """Return the median and the largest peak of some runs: TensorFlow starts independent ops in any order."""
    import tflms_sft

    found = sorted(tflms_sft.measure(run, *data).peak_bytes for _ in range(PEAK_RUNS))
    return statistics.median_low(found), found[-1]


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
        _, peak = _peaks(fast, data)
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
        "criteria": {"within the budget": peak <= memory - reserved},
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
        "criteria": {},
    }


def overlap(*, net: str, image_size: int, batch: int, device: str, emit: _child.Emit) -> Figures:
    """Measure the fraction of the time of swaps that passes beside computation.

    The trace of the device decides. A machine without CUPTI has none: there the fraction is that of the time of the
    copies alone that does not prolong the step. Copies that last longer than all kernels cannot all be hidden, so the
    criterion is a fraction of the time that computation can hide.
    """
    del emit
    import tensorflow as tf

    import tflms_sft
    from rewriters.device import gpu_kernels
    from rewriters.ir import tf_internals

    task = network_task(net)
    step = training_step(task, image_size, batch, "float32")
    data = tuple(tf.constant(part) for part in task.noise(image_size, batch))
    params = tflms_sft.LMSParams(tier="host" if device == "gpu" else "disk", min_bytes=1)
    fast = tflms_sft.rewrite(step, params, *data)
    sizes = [swap.num_bytes for swap in fast.plan.swaps]
    with alone_on_device():
        pairs = [(_seconds(step, data), _seconds(fast, data)) for _ in range(6)][1:]
        peak = tflms_sft.measure(fast, *data).peak_bytes
        with gpu_kernels.without_gpu_optimizers():
            stats = tf_internals.step_stats(fast.concrete_function, list(data))
        copying = _copy_seconds(sizes, f"{device.upper()}:0")
    activity = _gpu_trace.activity(stats, device)
    plain, swapped = (statistics.median(column) for column in zip(*pairs, strict=True))
    traced = _gpu_trace.hidden_fraction(activity.copies, activity.kernels)
    timed = _gpu_trace.hidden_fraction_by_times(plain, swapped, copying) if device == "gpu" else None
    hidden, hideable = traced, _gpu_trace.hideable_fraction(activity.copies, activity.kernels)
    if traced is None and timed is not None:
        hidden, hideable = timed, min(1.0, plain / copying)
    criteria = {"swaps exist": bool(sizes), "copies were seen": hidden is not None}
    if device == "gpu":
        criteria["hidden"] = bool(hidden and hideable and hidden >= MIN_HIDDEN_FRACTION * hideable)
    return {
        "swaps": len(sizes),
        "swapped_bytes": sum(sizes),
        "copies": len(activity.copies),
        "copied_microseconds": sum(end - begin for begin, end in activity.copies),
        "hidden_traced": traced,
        "hidden_by_times": timed,
        "hideable": hideable,
        "copying_alone_seconds": copying,
        "traced": [f"{number} of {name}" for name, number in activity.devices.items()],
        "time_ratio": swapped / plain,
        "predicted_ratio": fast.plan.predicted.time_ratio,
        "predicted_bytes": fast.plan.predicted.peak_bytes,
        "measured_bytes": peak,
        "criteria": criteria,
    }


def _copy_seconds(sizes: Sequence[int], place: str) -> float:
    """Return the seconds of copying tensors of these bytes from a device to the host and back, without computation."""
    import tensorflow as tf

    with tf.device(place):
        tensors = [tf.zeros([size // 4]) for size in sizes]

    def copy() -> float:
        tf.test.experimental.sync_devices()
        began = time.perf_counter()
        for tensor in tensors:
            with tf.device("CPU:0"):
                on_host = tf.identity(tensor)
            with tf.device(place):
                tf.identity(on_host)
        tf.test.experimental.sync_devices()
        return time.perf_counter() - began

    return statistics.median([copy() for _ in range(4)][1:])


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
        return {"plain_batch": plain, "batch": plain, "criteria": {"larger batch": False}}
    factor, fast = best
    data = tuple(tf.constant(part) for part in task.noise(image_size, plain * factor))
    with alone_on_device():
        _seconds(fast, data)
        seconds = statistics.median([_seconds(fast, data) for _ in range(steps)])
        _, peak = _peaks(fast, data)
    return {
        "plain_batch": plain,
        "batch": plain * factor,
        "headline": fast.plan.headline(),
        "predicted_ratio": fast.plan.predicted.time_ratio,
        "predicted_bytes": fast.plan.predicted.peak_bytes,
        "measured_bytes": peak,
        "seconds": seconds,
        "seconds_per_image": seconds / (plain * factor),
        "criteria": {"larger batch": factor > 1, "within the memory": peak <= memory},
    }


def tiled(*, net: str, image_size: int, batch: int, tiles: int, device: str, emit: _child.Emit) -> Figures:
    """Compare predicted and measured times with a given number of tiles along each axis: launches cost time."""
    del emit
    import tensorflow as tf

    import tflms_sft

    task = network_task(net)
    step = training_step(task, image_size, batch, "float32")
    data = tuple(tf.constant(part) for part in task.noise(image_size, batch))
    fast = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=(tiles,) * task.dimensions), *data)
    with alone_on_device():
        seconds = [(_seconds(step, data), _seconds(fast, data)) for _ in range(6)][1:]
        (plain, rewritten), largest = zip(*(_peaks(run, data) for run in (step, fast)), strict=True)
    times = [statistics.median(column) for column in zip(*seconds, strict=True)]
    ratio = times[1] / times[0]
    predicted = fast.plan.original.peak_bytes, fast.plan.predicted.peak_bytes
    criteria = {
        "tiles exist": bool(fast.plan.segments),
        "rewritten peak": is_near(rewritten, predicted[1], MAX_PEAK_ERROR_FRACTION),
    }
    if device == "gpu":
        criteria["time ratio"] = is_near(ratio, fast.plan.predicted.time_ratio, MAX_TIME_ERROR_FRACTION)
    return {
        "seconds": times,
        "ratio": ratio,
        "predicted_seconds": [fast.plan.original.seconds, fast.plan.predicted.seconds],
        "predicted_ratio": fast.plan.predicted.time_ratio,
        "predicted_bytes": predicted,
        "measured_bytes": (plain, rewritten),
        "largest_bytes": largest,
        "criteria": criteria,
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
    """Return a task by its name, or by that of a network of Keras."""
    known = {**_nets.TASKS, **_nets.SMALL_TASKS}
    if net in known:
        return known[net]
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
