"""The measurements of a device alone for `benchmarks.gpu`: facts, and memory that kernels allocate.

Every function returns JSON-able figures with `criteria`, as those of `_gpu_checks`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import _child

LOCK_VARIABLE = "GPU_BENCHMARK_LOCK"
"""Environment variable with the path of the file that a check locks while it uses the device."""

CONVOLUTIONS = ((3, 1), (3, 2), (1, 1), (7, 2))
"""Filter size and stride of the convolutions whose workspace is measured."""
CONVOLVED = ((512, 64), (256, 128), (128, 256), (64, 512))
"""Image size and channels of their operands."""


Figures = dict[str, Any]


@contextlib.contextmanager
def alone_on_device() -> Iterator[None]:
    """Wait for the other checks, and keep them off the device: for measurements of time and memory."""
    path = os.environ.get(LOCK_VARIABLE)
    if path is None:
        yield
        return
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def device_facts(*, device: str, emit: _child.Emit) -> Figures:
    """Return name, versions and measured rates of the device, which has to multiply and to convolve."""
    del emit
    import tensorflow as tf

    from tflms_sft._machine.calibration import machine_rates

    place = f"{device.upper()}:0"
    physical = tf.config.list_physical_devices(device.upper())
    build = tf.sysconfig.get_build_info()
    facts = dict(tf.config.experimental.get_device_details(physical[0])) if physical and device == "gpu" else {}
    with tf.device(place):
        product = tf.matmul(tf.ones((512, 512)), tf.ones((512, 512)))
        image = tf.nn.conv2d(tf.ones((1, 64, 64, 8)), tf.ones((3, 3, 8, 8)), 1, "VALID")
    return {
        "name": str(facts.get("device_name", device)),
        "compute_capability": list(facts.get("compute_capability", ())),
        "tensorflow": tf.__version__,
        "built_for_cuda": str(build.get("cuda_version")),
        "devices": [one.name for one in tf.config.list_logical_devices()],
        "placed_on": product.device,
        "rates": dataclasses.asdict(machine_rates()),
        "criteria": {
            "product": bool(tf.reduce_all(product == 512)),
            "convolution": bool(tf.reduce_all(image == 72)),
            "placement": place in product.device,
        },
    }


def out_of_memory(*, device: str, emit: _child.Emit) -> Figures:
    """Allocate too much in the body of a loop: TensorFlow has to raise, and the device to work afterwards."""
    del emit
    import tensorflow as tf

    limit_memory(device, 2**30)

    @tf.function
    def loop(rows: Any) -> Any:
        def body(number: Any, total: Any) -> Any:
            return number + 1, total + tf.reduce_sum(tf.fill([rows, 2**20], total))

        return tf.while_loop(lambda number, _: number < 4, body, (0, 1.0))[1]

    with tf.device(f"{device.upper()}:0"):
        try:
            raised = f"nothing, but a result of {float(loop(2**24))}"  # After 10 s, in which the allocator waits.
        except tf.errors.ResourceExhaustedError as error:
            raised = type(error).__name__
        works = float(loop(1)) > 0
    criteria = {"raises": raised == "ResourceExhaustedError", "works after": works}
    return {"raised": raised, "criteria": criteria}


def workspaces(*, tf32: bool, batch: int, scale: int, device: str, emit: _child.Emit) -> Figures:
    """Measure the bytes that convolutions and their gradients allocate beside their results.

    Args:
        tf32: Whether convolutions may round their operands to 10 bits.
        batch: Images.
        scale: Divisor of the image sizes.
        device: "gpu" or "cpu".
        emit: Not used.
    """
    del emit
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(tf32)
    place = f"{device.upper()}:0"
    measured: dict[str, list[float]] = {}
    with alone_on_device(), tf.device(place):
        for size, channels in CONVOLVED:
            for taps, stride in CONVOLUTIONS:
                images = tf.ones((batch, size // scale, size // scale, channels))
                kernel = tf.ones((taps, taps, channels, channels))
                kwargs = {"strides": [1, stride, stride, 1], "padding": "SAME"}
                ops: dict[str, Callable[[], Any]] = {
                    "forward": functools.partial(tf.raw_ops.Conv2D, input=images, filter=kernel, **kwargs)
                }
                gradient = ops["forward"]()
                ops["input gradient"] = functools.partial(
                    tf.raw_ops.Conv2DBackpropInput,
                    input_sizes=images.shape,
                    filter=kernel,
                    out_backprop=gradient,
                    **kwargs,
                )
                ops["filter gradient"] = functools.partial(
                    tf.raw_ops.Conv2DBackpropFilter,
                    input=images,
                    filter_sizes=kernel.shape,
                    out_backprop=gradient,
                    **kwargs,
                )
                for kind, run in ops.items():
                    scratch, seconds = _scratch(place, run)
                    name = f"{taps}x{taps}/{stride}, {channels} channels, {size // scale} px, {kind}"
                    measured[name] = [scratch, seconds, *(int(tf.size(one)) * 4 for one in (images, gradient))]
    return {
        "largest_bytes": max(values[0] for values in measured.values()),
        "convolutions": measured,
        "criteria": {},
    }


def _scratch(place: str, run: Callable[[], Any]) -> tuple[float, float]:
    """Return the bytes that an op allocates beside its result, and its seconds, both after the choice of its kernel."""
    import tensorflow as tf

    for _ in range(2):
        run()
    tf.test.experimental.sync_devices()
    tf.config.experimental.reset_memory_stats(place)
    began = time.perf_counter()
    result = run()
    tf.test.experimental.sync_devices()
    seconds = time.perf_counter() - began
    after = tf.config.experimental.get_memory_info(place)
    del result
    return after["peak"] - after["current"], seconds


def limit_memory(device: str, memory: int) -> None:
    """Limit TensorFlow to `memory` bytes of the GPU; do nothing on a CPU."""
    import tensorflow as tf

    if device == "gpu":
        (first, *_) = tf.config.list_physical_devices("GPU")
        one = tf.config.LogicalDeviceConfiguration(memory_limit=memory // 2**20)
        tf.config.set_logical_device_configuration(first, [one])
