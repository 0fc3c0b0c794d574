"""Swapping computes the same bits for whole networks: deep, residual, volumes, noise, half precision."""

import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from equivalence import keras_step, model_step
from keras import layers
from swapping import same_bits, swapped

from rewriters.swapping.spill_store import SpillStore
from rewriters.swapping.tiers import DiskTier, HostTier


@pytest.fixture(params=["host", "disk"])
def tier(request, tmp_path):
    return HostTier() if request.param == "host" else DiskTier(SpillStore(str(tmp_path)))


def conv(x, filters, kernel=3, **options):
    return layers.Conv2D(filters, kernel, padding="same", **options)(x)


def vgg(x):
    for filters, depth in ((4, 2), (6, 2), (8, 3)):
        for _ in range(depth):
            x = conv(x, filters, activation="relu")
        x = layers.MaxPooling2D(2)(x)
    return x


def bottlenecks(x):
    """Batch statistics in training mode, shortcuts that wait, strides."""
    x = layers.ReLU()(layers.BatchNormalization()(conv(x, 8, use_bias=False)))
    for filters, strides in ((4, 1), (6, 2)):
        y = layers.ReLU()(layers.BatchNormalization()(conv(x, filters, 1, strides=strides, use_bias=False)))
        y = layers.ReLU()(layers.BatchNormalization()(conv(y, filters, use_bias=False)))
        y = layers.BatchNormalization()(conv(y, 2 * filters, 1, use_bias=False))
        if y.shape != x.shape:
            x = layers.BatchNormalization()(conv(x, 2 * filters, 1, strides=strides, use_bias=False))
        x = layers.ReLU()(layers.Add()([x, y]))
    return x


def noisy(x):
    for filters in (4, 6):
        x = layers.ReLU()(layers.BatchNormalization()(conv(x, filters)))
        x = layers.Dropout(0.3, seed=filters)(x)
        x = layers.SpatialDropout2D(0.2, seed=filters)(x)
    return x


NETS = {"vgg": (vgg, 8), "bottlenecks": (bottlenecks, 20), "noisy": (noisy, 8)}
"""With the fewest tensors that have to be swapped, so that a comparison shows something."""


@pytest.mark.parametrize("net", [pytest.param(n, marks=pytest.mark.slow) if n == "bottlenecks" else n for n in NETS])
def test_images(net, tier):
    body, fewest = NETS[net]
    step = keras_step(body, (16, 24), 2, False, keras.optimizers.Adam(), steps=4)
    found = swapped(step, tier)
    assert len(found.plan.swaps) >= fewest
    assert same_bits(step, found.function)


def volumes(x):
    """A U-Net over volumes."""

    def block(x, filters):
        for _ in range(2):
            x = layers.Conv3D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        return x

    first = block(x, 3)
    second = block(layers.MaxPooling3D(2)(first), 4)
    low = block(layers.MaxPooling3D(2)(second), 6)
    second = layers.Concatenate()([second, layers.Conv3DTranspose(4, 2, strides=2)(low)])
    first = layers.Concatenate()([first, layers.Conv3DTranspose(3, 2, strides=2)(block(second, 4))])
    return layers.Conv3D(3, 1)(block(first, 3))


def test_volumes_with_long_branches(tier):
    """Every voxel has a label; what the first levels make is read by `Concatenate` much later.

    In float32: TensorFlow has no `MaxPool3D` of float64.
    """
    volume = keras.Input((8, 12, 8, 1))
    model = keras.Model(volume, volumes(volume))
    random = np.random.default_rng(0)
    shape = (2, 8, 12, 8)
    batches = [
        (random.normal(size=(*shape, 1)).astype("float32"), random.integers(0, 3, shape, "int32")) for _ in range(4)
    ]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = model_step(model, batches, False, {"optimizer": keras.optimizers.Adam(), "loss": loss})
    found = swapped(step, tier, swap_branches=True, branch_threshold=5)
    readers = {r.op for swap in found.plan.swaps for way in swap.swap_ins for r in way.readers}
    assert len(found.plan.swaps) >= 20 and {"ConcatV2", "Conv3DBackpropFilterV2"} <= readers
    assert same_bits(step, found.function)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision(policy, tier):
    """With float16 `Model.compile` puts a `LossScaleOptimizer` around the optimizer, whose update is a `cond`."""
    keras.config.set_dtype_policy(policy)

    def net(x):
        return layers.Dropout(0.3, seed=1)(layers.ReLU()(layers.BatchNormalization()(conv(vgg(x), 4))))

    step = keras_step(net, (16, 24), 2, False, keras.optimizers.Adam(), floatx="float32", steps=4)
    found = swapped(step, tier)
    types = [swap.tensor.dtype.name for swap in found.plan.swaps]
    assert types.count(policy.removeprefix("mixed_")) >= 8
    assert any("dynamic_scale" in variable.path for variable in step.variables) == (policy == "mixed_float16")
    assert all(np.isfinite(value).all() for value in step.run(step.concrete_fn).values()), "no update is skipped"
    assert same_bits(step, found.function)


ONEDNN = """
    import os, sys
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
    import keras, numpy as np, tensorflow as tf, tflms_sft
    from keras import layers

    def chain():
        for filters in (8, 8, 4):
            yield layers.Conv2D(filters, 3, activation="relu")
        yield layers.GlobalAveragePooling2D()

    def padded():
        yield layers.ZeroPadding2D(1)
        yield layers.Conv2D(8, 3, activation="relu")
        yield layers.BatchNormalization()
        yield layers.DepthwiseConv2D(3, activation="tanh")
        yield layers.ZeroPadding2D(1)
        yield layers.Conv2D(4, 3)
        yield layers.LeakyReLU()
        yield layers.Flatten()
        yield layers.Dense(8, activation="relu")

    def volume():
        yield layers.Reshape((12, 12, 3, 1))
        for _ in range(2):
            yield layers.Conv3D(4, 3, padding="same", activation="relu")
        yield layers.GlobalAveragePooling3D()

    def trained(net, policy, callbacks):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy(policy)
        image = x = keras.Input((12, 12, 3))
        for layer in net():
            x = layer(x)
        model = keras.Model(image, layers.Dense(2, dtype="float32")(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=False)
        images = np.random.default_rng(0).normal(size=(6, 12, 12, 3)).astype("float32")
        model.fit(images, np.arange(6) % 2, batch_size=2, shuffle=False, verbose=0, callbacks=callbacks)
        return [np.array(v, "float32") for v in model.variables]

    for net in (chain, padded, volume):
        for policy, far in (("float32", 1e-5), ("mixed_bfloat16", 2e-2)):
            swap = tflms_sft.LMS(tier="disk", spill_dir=sys.argv[1], min_bytes=0, verbose=0)
            pairs = zip(trained(net, policy, [swap]), trained(net, policy, []), strict=True)
            most = max(np.max(np.abs(got - want) / (1 + np.abs(want))) for got, want in pairs)
            print(net.__name__, policy, len(swap.plan.swaps) > 2, most < far, most, flush=True)
"""


def test_with_onednn(tmp_path):
    """oneDNN fuses ops in spite of control edges, which must not close a cycle. Other tests run without oneDNN."""
    code = textwrap.dedent(ONEDNN)
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=300)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 6 and all(line[2:4] == ["True", "True"] for line in lines), done.stdout + done.stderr[-2000:]
