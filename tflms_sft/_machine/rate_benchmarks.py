"""How fast single operations run, and memory and disk are, at a size at which their time is not that of starting them.

A few seconds of them, whatever graph is being traced.
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

from rewriters.device import properties
from rewriters.device.kernel_scratch import KernelShape, unfolded_at_once
from rewriters.estimates.op_cost import DIRECT, NOMINAL, MachineRates
from rewriters.swapping.spill_store import SpillStore

__all__: list[str] = []

RUNS = 3
"""Runs of each operation, of which the fastest counts: whatever else the machine does makes others slower."""

PASSES = 2
"""Times that all of them are run: the heap and other processes differ from one to the other."""

LEAST = 2e-3
"""Seconds that a run should take at least; a device that is faster gets more images."""

MOST_IMAGES = 64

MOST_VOLUMES = 64

MEDIUM, LARGE = 2**24, 6 * 2**24
"""Bytes of a result that a C library takes from its heap, and of one that it asks the system for: more than the 64 MiB
that its heap may keep free."""

WRITTEN = 3 * 2**24
"""Bytes that are written to a disk and read again."""

SETTLING = 31 * 2**20
"""The largest piece that the GNU C library takes from its heap."""

MARKED = 1.2
"""How much longer than a part of it a large result has to take for its memory to count as new."""

SLOWER = 3
"""How many times as long a gradient for volumes takes without unfolding, where that cannot be measured."""


def measured_rates() -> MachineRates:
    """Measure, whatever graph is being traced."""
    with tf.init_scope(), tf.device(f"/{properties.name()}"):
        tf.fill([SETTLING // 4], 1.0)  # When it is given back, a C library's heap keeps pieces of that size.
        touched: dict[str, float] = {}
        for _ in range(PASSES):
            for op, size, seconds in _memory_bound():
                touched[op] = max(touched.get(op, 0.0), size / seconds)
        fresh = _fresh()
        flops, unfolded, weights = _arithmetic(touched, fresh)
        write, read = _disk()
        return MachineRates(
            flops=flops,
            touched=touched,
            weights=weights,
            unfolded=unfolded,
            first_touch=fresh,
            call=_call(),
            copied=_host() if properties.name().startswith("GPU") else min(_cache(), touched[""]),
            overlapped=properties.name().startswith("GPU"),
            disk_write=write,
            disk_read=read,
        )


def _seconds(run: Callable[[], Any], runs: int = RUNS) -> float:
    """The fastest of some runs, after one that is not counted."""
    best = math.inf
    for number in range(runs + 1):
        begun = time.perf_counter()
        result = run()
        tf.test.experimental.sync_devices()
        taken = time.perf_counter() - begun
        del result
        best = min(best, taken) if number else best
    return best


def _num_bytes(tensors: Sequence[Any]) -> int:
    return sum(int(tf.size(t)) * t.dtype.size for t in tensors)


def _memory_bound() -> Iterator[tuple[str, int, float]]:
    """(op type, bytes touched, seconds) of operations whose time is that of moving memory; `""` is for all others."""
    raw = tf.raw_ops
    side = math.isqrt(MEDIUM // 4 // 64)
    x, y = (tf.random.uniform((1, side, side, 64)) for _ in range(2))
    pool = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    bias, none = tf.ones(64), tf.zeros(0)
    most, mean = (raw.AvgPool(value=value, **pool) for value in (x, y))
    norm = raw.FusedBatchNormV3(x=x, scale=bias, offset=bias, mean=none, variance=none)
    saved = {"reserve_space_1": norm[3], "reserve_space_2": norm[4], "reserve_space_3": norm[5]}
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
        "FusedBatchNormV3": (
            lambda: raw.FusedBatchNormV3(x=x, scale=bias, offset=bias, mean=none, variance=none),
            [x, x],
        ),
        "FusedBatchNormGradV3": (lambda: raw.FusedBatchNormGradV3(y_backprop=y, x=x, scale=bias, **saved), [x, y, x]),
        "ConcatV2": (lambda: raw.ConcatV2(values=[most, mean], axis=3), [most, mean, most, mean]),
        "Slice": (lambda: raw.Slice(input=x, begin=[0, 0, 0, 32], size=[1, side, side, 32]), [most, most, mean, mean]),
        "Pad": (lambda: raw.Pad(input=x, paddings=[[0, 0], [1, 1], [1, 1], [0, 0]]), [x, x]),
        "Transpose": (lambda: raw.Transpose(x=x, perm=[0, 3, 1, 2]), [x, x]),
        "ResizeBilinear": (lambda: raw.ResizeBilinear(images=most, size=[side, side]), [most, x]),
    }
    for op, (run, tensors) in cases.items():
        yield op, _num_bytes(tensors), _seconds(run)
    side = round((MEDIUM // 4 // 64) ** (1 / 3))
    yield from _maxima("MaxPool", x)
    yield from _maxima("MaxPool3D", tf.random.uniform((1, side, side, side, 64)))


def _maxima(op: str, x: Any) -> Iterator[tuple[str, int, float]]:
    """The same of a pooling and its gradient, which oneDNN has a kernel for where both are in one graph."""
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
    """One convolution, one of its two gradients, or a product, on some images."""

    op: str
    run: Callable[[], Any]
    flops: float
    touched: int
    windows: int = 0
    fresh: int = 0


def _arithmetic(touched: dict[str, float], fresh: float) -> tuple[dict[str, float], dict[str, float], float]:
    """Rates of arithmetic, of windows that convolutions copy, and of weights."""
    images = _enough_images()
    flops: dict[str, float] = {}
    unfolded: dict[str, float] = {}

    def beside(found: _Contraction, taken: float) -> float:
        """Seconds of a contraction without those of its operands and result."""
        return max(taken - found.touched / touched[""] - found.fresh / fresh, 0.2 * taken)

    for (thin, fast), (thick, slow) in _timed(list(_pairs(images))):
        fast, slow = beside(thin, fast), beside(thick, slow)
        if thin.op == DIRECT:  # Its windows are those of the other side, whose channels are all that counts.
            unfolded[thin.op] = (thick.windows - thin.windows) / max(slow - fast, 0.2 * slow)
            continue
        # What is copied does not depend on the other side's channels.
        rate = (thick.flops - thin.flops) / max(slow - fast, 0.2 * slow)
        flops[thin.op] = rate
        rest = fast - thin.flops / rate
        if properties.unfolds_convolutions() and rest > 0:
            unfolded[thin.op] = thin.windows / rest
        elif not thin.windows:
            flops[thin.op] = thick.flops / slow
    if properties.unfolds_convolutions():  # Where caches are small, those volumes are unfolded one by one.
        unfolded.setdefault(DIRECT, unfolded.get("Conv3DBackpropFilterV2", touched[""]) / SLOWER)
    for found in (*_depthwise(images), _product()):
        flops[found.op] = found.flops / beside(found, _seconds(found.run))
    few = _few_pixels()
    left = _seconds(few.run) - few.flops / flops["Conv2D"]
    return flops, unfolded, few.touched / max(left, few.touched / touched[""])


def _pairs(images: int) -> Iterator[tuple[_Contraction, _Contraction]]:
    """Convolutions and their gradients, each with few channels on one side, and with many."""
    yield from zip(_convolutions(images, 16), _convolutions(images, 256), strict=True)
    if not properties.unfolds_convolutions():
        yield from zip(_volumes(images, THIN), _volumes(images, THICK), strict=True)
        return
    for volumes in dict.fromkeys((_many_volumes(), 1)):
        for thin, thick in zip(_volumes(volumes, THIN), _volumes(volumes, THICK), strict=True):
            # Gradients of inputs unfold one volume, however many there are.
            if thin.op == thick.op and (volumes == 1 or "Filter" in thin.op):
                yield thin, thick


def _timed(
    pairs: Sequence[tuple[_Contraction, _Contraction]],
) -> list[tuple[tuple[_Contraction, float], tuple[_Contraction, float]]]:
    """Each of them with its seconds, the fastest of some passes: differences are taken, which doubles all errors."""
    best = [(math.inf, math.inf)] * len(pairs)
    for _ in range(PASSES):
        for number, (thin, thick) in enumerate(pairs):
            fast, slow = best[number]
            best[number] = min(fast, _seconds(thin.run)), min(slow, _seconds(thick.run))
    return [((thin, fast), (thick, slow)) for (thin, thick), (fast, slow) in zip(pairs, best, strict=True)]


def _enough_images() -> int:
    """Images with which an operation takes long enough to be timed."""
    images = 1
    while images < MOST_IMAGES and _seconds(_convolutions(images, 64)[0].run, 2) < LEAST:
        images *= 2
    return images


def _convolutions(images: int, channels: int) -> list[_Contraction]:
    """A convolution of images from 64 channels, and its gradients, which unfold less than would be new memory."""
    raw, size, taps = tf.raw_ops, 32, 9
    x, y = tf.random.uniform((images, size, size, 64)), tf.random.uniform((images, size, size, channels))
    filters = tf.random.uniform((3, 3, 64, channels))
    options = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    flops = 2.0 * images * size * size * taps * 64 * channels
    windows = images * size * size * taps * 64 * 4
    moved = _num_bytes([x, y])
    return [
        _Contraction(
            "Conv2D",
            lambda: raw.Conv2D(input=x, filter=filters, **options),
            flops,
            moved,
            windows if properties.unfolds_convolutions() else 0,
        ),
        _Contraction(
            "Conv2DBackpropInput",
            lambda: raw.Conv2DBackpropInput(input_sizes=x.shape, filter=filters, out_backprop=y, **options),
            flops,
            moved,
            windows,
        ),
        _Contraction(
            "Conv2DBackpropFilter",
            lambda: raw.Conv2DBackpropFilter(input=x, filter_sizes=filters.shape, out_backprop=y, **options),
            flops,
            moved,
            windows,
        ),
    ]


def _depthwise(images: int) -> Iterator[_Contraction]:
    """A depthwise convolution and its gradients."""
    raw = tf.raw_ops
    x, filters = tf.random.uniform((images, 128, 128, 64)), tf.random.uniform((3, 3, 64, 1))
    options: dict[str, Any] = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    flops, moved, name = 2.0 * 9 * float(tf.size(x)), _num_bytes([x, x]), "DepthwiseConv2dNative"
    sizes = {"input_sizes": x.shape, "filter": filters}
    yield _Contraction(name, lambda: raw.DepthwiseConv2dNative(input=x, filter=filters, **options), flops, moved)
    yield _Contraction(
        f"{name}BackpropInput",
        lambda: raw.DepthwiseConv2dNativeBackpropInput(**sizes, out_backprop=x, **options),
        flops,
        moved,
    )
    yield _Contraction(
        f"{name}BackpropFilter",
        lambda: raw.DepthwiseConv2dNativeBackpropFilter(input=x, filter_sizes=filters.shape, out_backprop=x, **options),
        flops,
        moved,
    )


SIDE, TAPS, VOLUME_CHANNELS = 16, 27, 8
"""Voxels along each side of a volume, of a window, and channels that windows slide over."""

THIN, THICK = 16, 128
"""Channels on the other side."""


def _many_volumes() -> int:
    """Volumes in a batch of which the kernel for the gradient of a filter unfolds them."""
    found = 1
    while found < MOST_VOLUMES and _kernel("Conv3DBackpropFilterV2", found, THIN) == DIRECT:
        found *= 2
    return found


def _kernel(op: str, volumes: int, channels: int) -> str:
    """The name that rates of a volume's gradient go by."""
    return op if _unfolded(op, volumes, channels) else DIRECT


def _unfolded(op: str, volumes: int, channels: int) -> int:
    """Bytes of its own memory that the kernel of a volume's gradient takes."""
    call, sizes = KernelShape(volumes, SIDE**3, SIDE**3), (TAPS, VOLUME_CHANNELS, channels)
    return unfolded_at_once(op, tf.float32, call, sizes) * tf.float32.size


def _volumes(volumes: int, channels: int) -> list[_Contraction]:
    """A convolution of volumes and its gradients."""
    raw, side = tf.raw_ops, (volumes, SIDE, SIDE, SIDE)
    x, y = tf.random.uniform((*side, VOLUME_CHANNELS)), tf.random.uniform((*side, channels))
    cube = tf.random.uniform((3, 3, 3, VOLUME_CHANNELS, channels))
    options: dict[str, Any] = {"strides": [1, 1, 1, 1, 1], "padding": "SAME"}
    flops, moved = 2.0 * TAPS * channels * float(tf.size(x)), _num_bytes([x, y])
    into, out = "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"
    runs: dict[str, Callable[[], Any]] = {
        "Conv3D": lambda: raw.Conv3D(input=x, filter=cube, **options),
        into: lambda: raw.Conv3DBackpropInputV2(input_sizes=x.shape, filter=cube, out_backprop=y, **options),
        out: lambda: raw.Conv3DBackpropFilterV2(input=x, filter_sizes=cube.shape, out_backprop=y, **options),
    }
    own = properties.unfolds_convolutions()
    found = []
    for op, run in runs.items():
        kernel = _kernel(op, volumes, channels) if own and op != "Conv3D" else op
        windows = TAPS * _num_bytes([y if kernel == DIRECT else x])
        unfolded = _unfolded(op, volumes, channels)
        new = min(unfolded, windows) if own and unfolded > SETTLING else 0
        found.append(_Contraction(kernel, run, flops, moved, windows if own or op != "Conv3D" else 0, new))
    return found


def _product() -> _Contraction:
    """A product of matrices, for which dense layers and everything without a rate of its own stand."""
    a = tf.random.uniform((1024, 1024))
    return _Contraction("", lambda: tf.raw_ops.MatMul(a=a, b=a), 2.0 * 1024**3, _num_bytes([a, a, a]))


def _few_pixels() -> _Contraction:
    """A convolution of so few pixels that its time is that of its weights, which `touched` tells here."""
    x, filters = tf.random.uniform((1, 4, 4, 512)), tf.random.uniform((3, 3, 512, 512))
    options = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    flops = 2.0 * 16 * float(tf.size(filters))
    run = functools.partial(tf.raw_ops.Conv2D, input=x, filter=filters, **options)
    return _Contraction("Conv2D", run, flops, _num_bytes([filters]))


def _fresh() -> float:
    """Bytes a second of new memory that are touched for the first time; infinite where memory is kept."""
    medium = large = math.inf
    for _ in range(RUNS):  # The heap may give back what it kept: then it takes a while to keep that again.
        tf.fill([SETTLING // 4], 1.0)  # When it is given back, a C library's heap keeps pieces of that size.
        medium = min(medium, _seconds(functools.partial(tf.fill, [MEDIUM // 4], 1.0)))
        large = min(large, _seconds(functools.partial(tf.fill, [LARGE // 4], 1.0)))
    expected = medium * LARGE / MEDIUM
    return LARGE / (large - expected) if large > MARKED * expected else math.inf


def _call() -> float:
    """Seconds to start an operation of a graph: a chain of small ones."""
    number = 300

    @tf.function(autograph=False)
    def chain(x: Any) -> Any:
        for _ in range(number):
            x = tf.raw_ops.Softsign(features=x)
        return x

    x = tf.ones(16)
    return _seconds(lambda: chain(x)) / number


def _host() -> float:
    """Bytes a second between an accelerator and host memory."""
    x = tf.ones(MEDIUM // 4)
    return MEDIUM / _seconds(x.numpy)


def _disk() -> tuple[float, float]:
    """Bytes a second that a disk writes and reads."""
    size, data = WRITTEN, os.urandom(2**20)
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            begun = time.perf_counter()
            for _ in range(size // len(data)):
                file.write(data)
            os.fsync(file.fileno())
            written = time.perf_counter() - begun
            file.seek(0)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begun = time.perf_counter()
            while file.read(len(data)):
                pass
            read = time.perf_counter() - begun
    except OSError:  # No place for temporary files: nothing will be swapped there.
        return NOMINAL.disk_write, NOMINAL.disk_read
    return size / written, size / read


def _cache() -> float:
    """Bytes a second that are swapped to a disk's cache, or back: into files of the step before, as all but the first.

    To make new ones takes several times as long.
    """
    array = np.frombuffer(os.urandom(LARGE), np.uint8)
    try:
        store = SpillStore(tempfile.gettempdir())  # Its files go with it.
        return 2 * LARGE / _seconds(functools.partial(_swap, store, array))
    except OSError:  # As for a disk.
        return NOMINAL.copied


def _swap(store: SpillStore, array: np.ndarray) -> None:
    pages = store.read(store.write(array, 1, "rates"))
    pages.view(np.int64).max()  # Whoever reads the tensor has the system map its pages, and finds none in a cache.


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
