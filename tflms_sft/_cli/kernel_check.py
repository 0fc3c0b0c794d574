"""`tflms-sft doctor --kernels`: GPU kernels of the ops of small rewritten steps, with or without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tflms_sft._util.text import aligned

__all__: list[str] = []

CARD = "h200"
"""Card that the steps are planned for on a machine without a GPU. All cards have the same kernels."""

IMAGE_SIZE, VOLUME_SIZE, BATCH, CLASSES = 48, 16, 2, 4

TITLE = ["op", "type", "GPU kernel", "host arguments", "where"]


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """Result of the check.

    Attributes:
        networks: Names of the networks.
        rows: Cells of the table, ops without a kernel first.
        missing: Op types without a GPU kernel, with their type.
        copies: Descriptions of tensors that the iterations of tile loops copy between host and GPU.
    """

    networks: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    missing: tuple[str, ...]
    copies: tuple[str, ...]

    def text(self) -> str:
        """Return the table."""
        return "\n".join(aligned([TITLE, *self.rows]))

    def data(self) -> list[dict[str, str]]:
        """Return the table for programs."""
        return [dict(zip(TITLE, row, strict=True)) for row in self.rows]


def check_kernels() -> KernelReport:
    """Rewrite small training steps in tiles for a GPU, and check the kernels of their ops.

    Raises:
        RewriteError: If TensorFlow is a build without GPU kernels.
    """
    import tensorflow as tf

    from rewriters.device.cards import CARDS
    from rewriters.device.kernel_audit import audit_kernels, check_build
    from rewriters.ir.device_model import planning_for
    from tflms_sft._params.tile_params import SFTParams
    from tflms_sft._rewrite.rewrite import rewrite

    check_build()
    has_gpu = bool(tf.config.list_logical_devices("GPU"))
    wheres: dict[tuple[str, str, str, str], set[str]] = {}
    missing, copies = set[str](), list[str]()
    networks = example_networks()
    for name, (dimensions, policy, build) in networks.items():
        with contextlib.nullcontext() if has_gpu else planning_for(CARDS[CARD].device_model), _policy(policy):
            rewritten = rewrite(_step(build()), SFTParams(num_tiles=(2,) * dimensions, memory_capacity=1))
        audit = audit_kernels(rewritten.concrete_function)
        for op in audit.ops:
            row = (op.op, op.dtype, "yes" if op.has_kernel else "no", " ".join(op.host_arguments))
            wheres.setdefault(row, set()).add(f"{name}{' (loop)' if op.in_loop else ''}")
        missing.update(f"{one.op} {one.dtype}" for one in audit.missing)
        copies += [f"{tensor.name} ({tensor.dtype}) of {name}" for loop in audit.loops for tensor in loop.tensors]
    rows = sorted((*row, ", ".join(sorted(where))) for row, where in wheres.items())
    return KernelReport(
        tuple(networks), tuple(sorted(rows, key=lambda row: row[2])), tuple(sorted(missing)), tuple(copies)
    )


@contextlib.contextmanager
def _policy(name: str) -> Iterator[None]:
    """Build layers with a dtype policy of Keras."""
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def example_networks() -> dict[str, tuple[int, str, Callable[[], Any]]]:
    """Return the axes of the tiles, the policy and the function that builds each network, by name."""
    return {
        "images": (2, "float32", _images),
        "mixed precision": (2, "mixed_float16", _images),
        "segmentation": (2, "float32", _segmentation),
        "volumes": (3, "float32", _volumes),
        "attention": (2, "float32", _attention),
    }


def _images() -> Any:
    import keras
    from keras import layers

    x = image = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, strides=2, padding="same")(x)))
    x = layers.Activation("silu")(layers.BatchNormalization()(layers.DepthwiseConv2D(3, padding="same")(x)))
    x = layers.AveragePooling2D(2)(layers.MaxPooling2D(3, 1, padding="same")(x))
    x = layers.LeakyReLU()(layers.SeparableConv2D(8, 3, padding="same")(x))
    return keras.Model(image, layers.Dense(CLASSES, dtype="float32")(layers.GlobalAveragePooling2D()(x)))


def _segmentation() -> Any:
    import keras
    from keras import layers

    image = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    skip = layers.Conv2D(8, 3, padding="same", activation="gelu")(image)
    x = layers.Conv2D(8, 3, padding="same", dilation_rate=2)(layers.MaxPooling2D()(skip))
    x = layers.Concatenate()([layers.UpSampling2D()(x), layers.Conv2DTranspose(8, 2, strides=2)(x), skip])
    x = layers.LayerNormalization()(layers.UpSampling2D(interpolation="bilinear")(layers.MaxPooling2D()(x)))
    return keras.Model(image, layers.Conv2D(CLASSES, 1)(x))


def _volumes() -> Any:
    import keras
    from keras import layers

    x = image = keras.Input((VOLUME_SIZE, VOLUME_SIZE, VOLUME_SIZE, 1))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv3D(4, 3, padding="same")(x)))
    x = layers.Conv3D(4, 3, padding="same")(layers.MaxPooling3D()(x))
    x = layers.Concatenate()([layers.UpSampling3D()(x), layers.Conv3DTranspose(4, 2, strides=2)(x)])
    return keras.Model(image, layers.Conv3D(CLASSES, 1)(x))


def _attention() -> Any:
    import keras
    from keras import layers

    image, words = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3)), keras.Input((8,), dtype="int32")
    x = layers.MaxPooling2D(4)(layers.Conv2D(8, 3, padding="same", activation="relu")(image))
    x = layers.Reshape((-1, 8))(x)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, layers.Embedding(16, 8)(words)))
    return keras.Model([image, words], layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


def _step(model: Any) -> Any:
    """Return a training step of a network with class numbers as labels, for a batch of a fixed size."""
    import keras
    import tensorflow as tf

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    inputs = tf.nest.map_structure(lambda one: tf.TensorSpec((BATCH, *one.shape[1:]), one.dtype), model.input)
    labels = tf.TensorSpec((BATCH, *model.output.shape[1:-1]), tf.int32)

    def step(inputs: Any, labels: Any) -> Any:
        return model.train_step((inputs, labels))["loss"]

    return tf.function(step, input_signature=(inputs, labels), autograph=False)
