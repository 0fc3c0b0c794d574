"""Benchmarks of single ops, memory and disk, at sizes at which the time to start an op does not matter.

They take a few seconds, and run outside of any graph that is being traced.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.device.kernel_scratch import KernelShape, unfolded_at_once
from rewriters.estimates.op_cost import DIRECT, NOMINAL, MachineRates
from rewriters.ir.device_detection import planned_device
from rewriters.swapping.spill_store import SpillStore, reason_unsupported

__all__: list[str] = []

RUNS = 3
"""Runs of each op. The fastest counts, because other load only makes runs slower."""

PASSES = 2
"""Passes over all ops: the state of the heap and other load differ between passes."""

MIN_RUN_SECONDS = 2e-3
"""Minimum duration of a run. Faster devices get more images."""

MAX_IMAGES, MAX_VOLUMES = 64, 64

ACCELERATOR_MAX_IMAGES, ACCELERATOR_BYTES = 2048, 2**28
"""Maximum number of images, and bytes of a tensor, on an accelerator: it handles smaller ones in less time than the
host takes to start an op."""

HEAP_BYTES, MAPPED_BYTES = 2**24, 6 * 2**24
"""Size of a result that the C library takes from its heap, and of one that it maps newly: more than the 64 MiB that its
heap may keep free."""

TRANSFER_BYTES = 2**25, 2**28
"""Bytes of two tensors that are copied to host memory and back."""

DISK_BYTES = 3 * 2**24
"""Bytes that are written to a disk and read again."""

MAX_HEAP_BLOCK_BYTES = 31 * 2**20
"""The largest block that the GNU C library takes from its heap."""

MIN_FIRST_TOUCH_RATIO = 1.2
"""Time of a mapped result over that of heap blocks of the same total size, from which page faults are counted."""

DIRECT_SLOWDOWN = 3
"""Assumed time ratio of a volume gradient without unfolding to one with unfolding, where it cannot be measured."""


def measured_rates() -> MachineRates:
    """Measure all rates of the device, outside of any graph that is being traced."""
    with tf.init_scope(), tf.device(f"/{planned_device().name}"):
        tf.fill([MAX_HEAP_BLOCK_BYTES // 4], 1.0)  # Freeing it makes the C library keep blocks of that size.
        touched: dict[str, float] = {}
        for _ in range(PASSES):
            for op, size, seconds in _memory_bound():
                touched[op] = max(touched.get(op, 0.0), size / seconds)
        fresh = _fresh()
        flops, unfolded, weights = _arithmetic(touched, fresh)
        write, read = _disk()
        call = _call()
        return MachineRates(
            flops=flops,
            touched=touched,
            weights=weights,
            unfolded=unfolded,
            first_touch=fresh,
            call=call,
            kernel_call={} if planned_device().is_gpu else _kernel_calls(flops, call),
            host_call=_host_call(),
            copied=_host() if planned_device().is_gpu else min(_cache(), touched[""]),
            overlapped=planned_device().is_gpu,
            disk_write=write,
            disk_read=read,
            long_row_bytes=planned_device().second_level_cache_bytes or NOMINAL.long_row_bytes,
            long_row_slowdown=_long_row_slowdown(touched[""]),
        )


def _seconds(run: Callable[[], Any], runs: int = RUNS) -> float:
    """Return the seconds of the fastest run, after a warm-up run."""
    best = math.inf
    for number in range(runs + 1):
        start = time.perf_counter()
        result = run()
        tf.test.experimental.sync_devices()
        seconds = time.perf_counter() - start
        del result
        best = min(best, seconds) if number else best
    return best


def _num_bytes(tensors: Sequence[Any]) -> int:
    return sum(int(tf.size(t)) * t.dtype.size for t in tensors)


def _memory_bound() -> Iterator[tuple[str, int, float]]:
    """Yield (op type, bytes touched, seconds) of memory-bound ops; the type `""` stands for all others."""
    raw, tensor_bytes = tf.raw_ops, ACCELERATOR_BYTES if planned_device().is_gpu else HEAP_BYTES
    side = math.isqrt(tensor_bytes // 4 // 64)
    x, y = (tf.random.uniform((1, side, side, 64)) for _ in range(2))
    pool = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    bias, none = tf.ones(64), tf.zeros(0)
    most, mean = (raw.AvgPool(value=value, **pool) for value in (x, y))
    norm = functools.partial(raw.FusedBatchNormV3, x=x, scale=bias, offset=bias, mean=none, variance=none)
    saved = {f"reserve_space_{number}": value for number, value in enumerate(norm()[3:], 1)}
    cases: dict[str, tuple[Callable[[], Any], list[Any]]] = {
        "": (lambda: raw.AddV2(x=x, y=y), [x, y, x]),
        "Relu": (lambda: raw.Relu(features=x), [x, x]),
        "ReluGrad": (lambda: raw.ReluGrad(gradients=x, features=y), [x, y, x]),
        "Mul": (lambda: raw.Mul(x=x, y=bias), [x, x]),
        "SquaredDifference": (lambda: raw.SquaredDifference(x=x, y=bias), [x, x]),
        "BiasAdd": (lambda: raw.BiasAdd(value=x, bias=bias), [x, x]),
        "BiasAddGrad": (lambda: raw.BiasAddGrad(out_backprop=x), [x]),
        "Sum": (lambda: raw.Sum(input=x, axis=[0, 1, 2]), [x]),
        "Mean": (lambda: raw.Mean(input=x, axis=[0, 1, 2]), [x]),
        "Sigmoid": (lambda: raw.Sigmoid(x=x), [x, x]),
        "Tanh": (lambda: raw.Tanh(x=x), [x, x]),
        "Exp": (lambda: raw.Exp(x=x), [x, x]),
        "Softmax": (lambda: raw.Softmax(logits=x), [x, x]),
        "AvgPool": (lambda: raw.AvgPool(value=x, **pool), [x, mean]),
        "AvgPoolGrad": (lambda: raw.AvgPoolGrad(orig_input_shape=x.shape, grad=mean, **pool), [mean, x]),
        "FusedBatchNormV3": (norm, [x, x]),
        "FusedBatchNormGradV3": (lambda: raw.FusedBatchNormGradV3(y_backprop=y, x=x, scale=bias, **saved), [x, y, x]),
        "ConcatV2": (lambda: raw.ConcatV2(values=[most, mean], axis=3), [most, mean, most, mean]),
        "Slice": (lambda: raw.Slice(input=x, begin=[0, 0, 0, 32], size=[1, side, side, 32]), [most, most, mean, mean]),
        "Pad": (lambda: raw.Pad(input=x, paddings=[[0, 0], [1, 1], [1, 1], [0, 0]]), [x, x]),
        "Transpose": (lambda: raw.Transpose(x=x, perm=[0, 3, 1, 2]), [x, x]),
        "ResizeBilinear": (lambda: raw.ResizeBilinear(images=most, size=[side, side]), [most, x]),
    }
    for op, (run, tensors) in cases.items():
        yield op, _num_bytes(tensors), _seconds(run)
    side = round((tensor_bytes // 4 // 64) ** (1 / 3))
    yield from _max_pooling("MaxPool", x)
    yield from _max_pooling("MaxPool3D", tf.random.uniform((1, side, side, side, 64)))


def _max_pooling(op: str, x: Any) -> Iterator[tuple[str, int, float]]:
    """Yield (op type, bytes touched, seconds) of a max-pooling and its gradient.

    Both are in one graph, because oneDNN has a kernel for the gradient only then.
    """
    window = [1, *[2] * (x.shape.rank - 2), 1]
    pool: dict[str, Any] = {"ksize": window, "strides": window, "padding": "VALID"}
    forward, gradient = getattr(tf.raw_ops, op), getattr(tf.raw_ops, f"{op}Grad")
    most = forward(input=x, **pool)

    @tf.function(autograph=False)
    def alone() -> Any:
        return forward(input=x, **pool)

    @tf.function(autograph=False)
    def both() -> Any:
        return gradient(orig_input=x, orig_output=forward(input=x, **pool), grad=most, **pool)

    first, all_ = _seconds(alone), _seconds(both)
    yield op, _num_bytes([x, most]), first
    yield f"{op}Grad", _num_bytes([x, most, most, x]), max(all_ - first, 0.2 * all_)


@dataclasses.dataclass(frozen=True)
class _Contraction:
    """A convolution, one of its two gradients, or a matrix product, on a batch of images.

    Attributes:
        op: Key of its rate.
        run: Function that runs it once.
        flops: Floating-point operations.
        touched: Bytes of operands and result.
        windows: Bytes of unfolded windows.
        fresh: Bytes of newly mapped memory.
    """

    op: str
    run: Callable[[], Any]
    flops: float
    touched: int
    windows: int = 0
    fresh: int = 0


def _arithmetic(touched: dict[str, float], fresh: float) -> tuple[dict[str, float], dict[str, float], float]:
    """Return the rates of arithmetic by op, of unfolded windows by op, and of weights."""
    images = _enough_images()
    flops: dict[str, float] = {}
    unfolded: dict[str, float] = {}

    def without_memory(contraction: _Contraction, seconds: float) -> float:
        """Return the seconds of a contraction without the time to touch its operands and result."""
        return max(seconds - contraction.touched / touched[""] - contraction.fresh / fresh, 0.2 * seconds)

    for (thin, fast), (thick, slow) in _timed(list(_pairs(images))):
        fast, slow = without_memory(thin, fast), without_memory(thick, slow)
        if thin.op == DIRECT:  # The kernel copies windows of the other side, so its channels alone matter.
            unfolded[thin.op] = (thick.windows - thin.windows) / max(slow - fast, 0.2 * slow)
            continue
        # The copied bytes do not depend on the channels of the other side, so the difference is arithmetic.
        rate = (thick.flops - thin.flops) / max(slow - fast, 0.2 * slow)
        flops[thin.op] = rate
        copy_seconds = fast - thin.flops / rate
        if planned_device().unfolds_convolutions and copy_seconds > 0:
            unfolded[thin.op] = thin.windows / copy_seconds
        elif not thin.windows:
            flops[thin.op] = thick.flops / slow
    if planned_device().unfolds_convolutions:  # With small caches even such volumes are unfolded, one by one.
        unfolded.setdefault(DIRECT, unfolded.get("Conv3DBackpropFilterV2", touched[""]) / DIRECT_SLOWDOWN)
    for contraction in (*_depthwise(images), _product()):
        flops[contraction.op] = contraction.flops / without_memory(contraction, _seconds(contraction.run))
    small = _few_pixels()
    weight_seconds = _seconds(small.run) - small.flops / flops["Conv2D"]
    return flops, unfolded, small.touched / max(weight_seconds, small.touched / touched[""])


def _pairs(images: int) -> Iterator[tuple[_Contraction, _Contraction]]:
    """Yield convolutions and their gradients in pairs, with few and with many channels on one side."""
    yield from zip(_convolutions(images, 16), _convolutions(images, 256), strict=True)
    if not planned_device().unfolds_convolutions:
        yield from zip(_volumes(images, THIN), _volumes(images, THICK), strict=True)
        return
    for volumes in dict.fromkeys((_many_volumes(), 1)):
        for thin, thick in zip(_volumes(volumes, THIN), _volumes(volumes, THICK), strict=True):
            # Input gradients unfold one volume at a time, so their time needs one volume only.
            if thin.op == thick.op and (volumes == 1 or "Filter" in thin.op):
                yield thin, thick


def _timed(
    pairs: Sequence[tuple[_Contraction, _Contraction]],
) -> list[tuple[tuple[_Contraction, float], tuple[_Contraction, float]]]:
    """Return each contraction with its seconds, the fastest of some passes.

    Several passes, because rates follow from differences of times, in which errors add up.
    """
    best = [(math.inf, math.inf)] * len(pairs)
    for _ in range(PASSES):
        for number, (thin, thick) in enumerate(pairs):
            fast, slow = best[number]
            best[number] = min(fast, _seconds(thin.run)), min(slow, _seconds(thick.run))
    return [((thin, fast), (thick, slow)) for (thin, thick), (fast, slow) in zip(pairs, best, strict=True)]


def _enough_images() -> int:
    """Return a batch size with which a convolution takes long enough for timing."""
    images, most = 1, ACCELERATOR_MAX_IMAGES if planned_device().is_gpu else MAX_IMAGES
    while images < most and _seconds(_convolutions(images, 64)[0].run, 2) < MIN_RUN_SECONDS:
        images *= 2
    return images


def _convolutions(images: int, channels: int) -> list[_Contraction]:
    """Return a convolution of images with 64 channels, and its gradients. None unfolds enough to map new memory."""
    size, taps = 32, 9
    x, y = tf.random.uniform((images, size, size, 64)), tf.random.uniform((images, size, size, channels))
    runs = _runs("Conv2D", x, tf.random.uniform((3, 3, 64, channels)), y)
    flops = 2.0 * images * size * size * taps * 64 * channels
    windows = images * size * size * taps * 64 * 4
    unfolds = planned_device().unfolds_convolutions
    return [
        _Contraction(op, run, flops, _num_bytes([x, y]), windows if unfolds or op != "Conv2D" else 0)
        for op, run in runs.items()
    ]


def _runs(op: str, x: Any, filters: Any, y: Any) -> dict[str, Callable[[], Any]]:
    """Return functions that run a convolution of `x` with results as large as `y`, and its gradients, by op type."""
    raw, version = tf.raw_ops, "V2" if op == "Conv3D" else ""
    into, out = f"{op}BackpropInput{version}", f"{op}BackpropFilter{version}"
    options: dict[str, Any] = {"strides": [1] * x.shape.rank, "padding": "SAME"}
    return {
        op: lambda: getattr(raw, op)(input=x, filter=filters, **options),
        into: lambda: getattr(raw, into)(input_sizes=x.shape, filter=filters, out_backprop=y, **options),
        out: lambda: getattr(raw, out)(input=x, filter_sizes=filters.shape, out_backprop=y, **options),
    }


def _depthwise(images: int) -> list[_Contraction]:
    """Return a depthwise convolution and its gradients."""
    images = min(images, MAX_IMAGES)  # Each is as large as 16 images of the other convolutions.
    x = tf.random.uniform((images, 128, 128, 64))
    runs = _runs("DepthwiseConv2dNative", x, tf.random.uniform((3, 3, 64, 1)), x)
    return [_Contraction(op, run, 2.0 * 9 * float(tf.size(x)), _num_bytes([x, x])) for op, run in runs.items()]


SIDE, TAPS, VOLUME_CHANNELS = 16, 27, 8
"""Side of a volume in voxels, voxels of a window, and channels of the side that windows slide over."""

THIN, THICK = 16, 128
"""Channels of the other side."""


def _many_volumes() -> int:
    """Return a batch size for which the kernel of the filter gradient unfolds volumes."""
    volumes = 1
    while volumes < MAX_VOLUMES and _kernel("Conv3DBackpropFilterV2", volumes, THIN) == DIRECT:
        volumes *= 2
    return volumes


def _kernel(op: str, volumes: int, channels: int) -> str:
    """Return the key of the rate of a volume gradient."""
    return op if _unfolded(op, volumes, channels) else DIRECT


def _unfolded(op: str, volumes: int, channels: int) -> int:
    """Return the scratch memory in bytes of the kernel of a volume gradient."""
    call, sizes = KernelShape(volumes, SIDE**3, SIDE**3), (TAPS, VOLUME_CHANNELS, channels)
    return unfolded_at_once(op, tf.float32, call, sizes, planned_device()) * tf.float32.size


def _volumes(volumes: int, channels: int) -> list[_Contraction]:
    """Return a convolution of volumes and its gradients."""
    side = (volumes, SIDE, SIDE, SIDE)
    x, y = tf.random.uniform((*side, VOLUME_CHANNELS)), tf.random.uniform((*side, channels))
    cube = tf.random.uniform((3, 3, 3, VOLUME_CHANNELS, channels))
    flops, moved = 2.0 * TAPS * channels * float(tf.size(x)), _num_bytes([x, y])
    unfolds = planned_device().unfolds_convolutions
    contractions = []
    for op, run in _runs("Conv3D", x, cube, y).items():
        kernel = _kernel(op, volumes, channels) if unfolds and op != "Conv3D" else op
        windows = TAPS * _num_bytes([y if kernel == DIRECT else x])
        unfolded = _unfolded(op, volumes, channels)
        mapped = min(unfolded, windows) if unfolds and unfolded > MAX_HEAP_BLOCK_BYTES else 0
        copied = windows if unfolds or op != "Conv3D" else 0
        contractions.append(_Contraction(kernel, run, flops, moved, copied, mapped))
    return contractions


LONG_ROWS, SHORT_ROWS = 4, 0.5
"""Bytes of a row of the image and of the output gradient, over those of the second-level cache."""


def _long_row_slowdown(touched: float) -> float:
    """Return the time of the arithmetic of a filter gradient with long rows over that with short ones."""
    device = planned_device()
    if device.unfolds_convolutions or device.is_gpu or not device.second_level_cache_bytes:
        return 1.0
    best = {LONG_ROWS: math.inf, SHORT_ROWS: math.inf}
    for _ in range(PASSES):
        for length in best:
            x = _image_with_rows(round(length * planned_device().second_level_cache_bytes))
            seconds = _seconds(functools.partial(_filter_gradient, x))
            best[length] = min(best[length], max(seconds - 2 * _num_bytes([x]) / touched, 0.2 * seconds))
    return max(best[LONG_ROWS] / best[SHORT_ROWS], 1.0)


def _image_with_rows(row_bytes: int) -> Any:
    """Return an image of which two rows have some bytes, and which is as large as one with eight long rows."""
    channels = 64
    width = max(row_bytes // (2 * channels * tf.float32.size), 1)
    height = 8 * LONG_ROWS * planned_device().second_level_cache_bytes // row_bytes
    return tf.random.uniform((1, height, width, channels))


def _filter_gradient(x: Any) -> Any:
    """Run the filter gradient of a convolution with equal input and output gradient."""
    filters = tf.TensorSpec((3, 3, x.shape[-1], x.shape[-1]))
    return _runs("Conv2D", x, filters, x)["Conv2DBackpropFilter"]()


def _product() -> _Contraction:
    """Return a matrix product, whose rate stands for dense layers and all ops without a rate."""
    side = 8192 if planned_device().is_gpu else 1024
    a = tf.random.uniform((side, side))
    return _Contraction("", lambda: tf.raw_ops.MatMul(a=a, b=a), 2.0 * side**3, _num_bytes([a, a, a]))


def _few_pixels() -> _Contraction:
    """Return a convolution of so few pixels that its weights dominate the time; `touched` is their size."""
    x, filters = tf.random.uniform((1, 4, 4, 512)), tf.random.uniform((3, 3, 512, 512))
    flops = 2.0 * 16 * float(tf.size(filters))
    return _Contraction("Conv2D", _runs("Conv2D", x, filters, x)["Conv2D"], flops, _num_bytes([filters]))


def _fresh() -> float:
    """Return the rate of first touches of newly mapped memory in bytes/s; infinite if the allocator keeps memory."""
    heap = mapped = math.inf
    for _ in range(RUNS):  # The heap may have been trimmed, and needs some runs to grow again.
        tf.fill([MAX_HEAP_BLOCK_BYTES // 4], 1.0)  # Freeing it makes the C library keep blocks of that size.
        heap = min(heap, _seconds(functools.partial(tf.fill, [HEAP_BYTES // 4], 1.0)))
        mapped = min(mapped, _seconds(functools.partial(tf.fill, [MAPPED_BYTES // 4], 1.0)))
    expected = heap * MAPPED_BYTES / HEAP_BYTES
    return MAPPED_BYTES / (mapped - expected) if mapped > MIN_FIRST_TOUCH_RATIO * expected else math.inf


def _call() -> float:
    """Return the seconds to start an op of a graph, measured on a chain of small ops."""
    return _seconds_of_link(lambda x: tf.raw_ops.Softsign(features=x), tf.ones(16))


def _kernel_calls(flops: dict[str, float], call: float) -> dict[str, float]:
    """Return the seconds to start a convolution and its gradients, measured on chains of small ones.

    Args:
        flops: Rates of arithmetic by op.
        call: Seconds to start any op; a link starts a reshape, too.
    """
    image, sizes = (1, 12, 12, 16), (3, 3, 16, 16)
    x, filters = tf.random.uniform(image), 0.01 * tf.random.uniform(sizes)
    assert math.prod(image) == math.prod(sizes), "the gradient of a filter is the next image"
    arithmetic, calls = 2.0 * math.prod(image) * math.prod(sizes[:2]) * sizes[-1], dict[str, float]()
    for op in _runs("Conv2D", x, filters, x):
        seconds = _seconds_of_link(functools.partial(_link, op, filters), x)
        seconds -= 2 * call + arithmetic / flops[op]
        for name in (op, op.replace("Conv2D", "Conv3D") + ("V2" if "Backprop" in op else "")):
            calls[name] = max(seconds, 0.0)
    return calls


def _link(op: str, filters: Any, x: Any) -> Any:
    """Return the result of a convolution or of one of its gradients, as the operand of the next one."""
    return tf.reshape(_runs("Conv2D", x, filters, x)[op](), x.shape)


def _host_call() -> float:
    """Return the seconds to run an op on integers, which TensorFlow does in host memory on every device."""
    return _seconds_of_link(lambda x: tf.raw_ops.FloorMod(x=x, y=7), tf.ones([], tf.int32))


def _seconds_of_link(link: Callable[[Any], Any], x: Any) -> float:
    """Return the seconds of an op in a long chain. No optimizer may merge two links."""
    number = 300

    @tf.function(autograph=False)
    def chain(x: Any) -> Any:
        for _ in range(number):
            x = link(x)
        return x

    return _seconds(lambda: chain(x)) / number


def _host() -> float:
    """Return the rate of transfers between an accelerator and host memory in bytes/s.

    As in swaps, TensorFlow copies from and to memory of its host allocator. Copies of other memory take longer. The
    difference of two sizes leaves out the start of a step.
    """
    few, many = TRANSFER_BYTES
    fast, slow = (_seconds(out_and_back(size)) for size in TRANSFER_BYTES)
    return 2 * (many - few) / max(slow - fast, 0.2 * slow)


def out_and_back(num_bytes: int) -> Any:
    """Return a function that copies a tensor of the device to the host and back.

    The copies are variables, because Grappler drops identities.
    """
    with tf.device(f"/{planned_device().name}"):
        on_device = tf.Variable(tf.fill([num_bytes // 4], 1.0))
    with tf.device("/device:CPU:0"):
        on_host = tf.Variable(on_device)

    @tf.function(autograph=False)
    def copy() -> None:
        on_host.assign(on_device)
        on_device.assign(on_host)

    return copy


def _disk() -> tuple[float, float]:
    """Return the rates of disk writes and disk reads in bytes/s."""
    size, data = DISK_BYTES, os.urandom(2**20)
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            start = time.perf_counter()
            for _ in range(size // len(data)):
                file.write(data)
            os.fsync(file.fileno())
            write_seconds = time.perf_counter() - start
            file.seek(0)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            while file.read(len(data)):
                pass
            read_seconds = time.perf_counter() - start
    except OSError:  # Without a place for temporary files nothing is swapped to disk.
        return NOMINAL.disk_write, NOMINAL.disk_read
    return size / write_seconds, size / read_seconds


def _cache() -> float:
    """Return the rate of swaps to and from the page cache of a disk in bytes/s.

    Swaps reuse the files of the previous step, as in every step but the first; new files take several times as long.
    """
    if reason_unsupported():
        return NOMINAL.copied
    array = np.frombuffer(os.urandom(MAPPED_BYTES), np.uint8)
    try:
        store = SpillStore(tempfile.gettempdir())  # The store deletes its files.
        return 2 * MAPPED_BYTES / _seconds(functools.partial(_swap, store, array))
    except OSError:  # Without a place for temporary files nothing is swapped to disk.
        return NOMINAL.copied


def _swap(store: SpillStore, array: np.ndarray) -> None:
    pages = store.read(store.write(array, 1, "rates"))
    pages.view(np.int64).max()  # Reading maps the pages, and finds none in a CPU cache, as the consumer of a tensor.
