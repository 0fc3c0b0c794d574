"""Networks of the benchmarks, for any image size.

Classifiers have global average pooling and one dense layer instead of their fully connected head. The image size is
thus free, and the weights are small compared with the activations. Functions import Keras themselves, because the
parent process of a benchmark needs only the tables.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

INPUT_NAME = "image"
CLASSES = 8

_VGG_FILTERS = (64, 128, 256, 512, 512)
# (filters, kernel size) of the convolutions between the pools.
_DARKNET19 = (
    ((32, 3),),
    ((64, 3),),
    ((128, 3), (64, 1), (128, 3)),
    ((256, 3), (128, 1), (256, 3)),
    ((512, 3), (256, 1), (512, 3), (256, 1), (512, 3)),
    ((1024, 3), (512, 1), (1024, 3), (512, 1), (1024, 3)),
)
_UNET_FILTERS = (32, 64, 128, 256)
_SLIM_UNET_FILTERS = (16, 32, 64, 128)

SEED = 1
LEARNING_RATE = 1e-6
"""Small, because an untrained ResNet amplifies rounding within a few steps: even two plain runs differ."""


def vgg16(image_size: int) -> keras.Model:
    """Build the 13 convolutions and 5 pools of VGG-16."""
    return _vgg("vgg16", (2, 2, 3, 3, 3), image_size)


def small_vgg(image_size: int) -> keras.Model:
    """Build 4 convolutions with BatchNormalization and 2 pools."""
    import keras

    x = image = _image(image_size)
    for depth, filters in ((2, 32), (2, 64)):
        for _ in range(depth):
            x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        x = keras.layers.MaxPooling2D(2)(x)
    return _classifier("small_vgg", image, x)


def vgg19(image_size: int) -> keras.Model:
    """Build the 16 convolutions and 5 pools of VGG-19."""
    return _vgg("vgg19", (2, 2, 4, 4, 4), image_size)


def darknet19(image_size: int) -> keras.Model:
    """Build the 18 convolutions and 5 pools of Darknet-19 before its classifier.

    BatchNormalization is frozen, as in fine-tuning on single large images, whose statistics are not those of the data.
    """
    import keras

    x = image = _image(image_size)
    for block, convolutions in enumerate(_DARKNET19, 1):
        for index, (filters, size) in enumerate(convolutions, 1):
            name = f"{block}_{index}"
            x = keras.layers.Conv2D(
                filters,
                size,
                padding="same",
                use_bias=False,
                kernel_initializer="he_normal",
                name=f"conv{name}",
            )(x)
            x = keras.layers.BatchNormalization(trainable=False, name=f"bn{name}")(x)
            x = keras.layers.LeakyReLU(negative_slope=0.1, name=f"relu{name}")(x)
        if block < len(_DARKNET19):
            x = keras.layers.MaxPooling2D(2, name=f"pool{block}")(x)
    return _classifier("darknet19", image, x)


def resnet50(image_size: int) -> keras.Model:
    """Build ResNet-50 of Keras with logits as outputs."""
    import keras

    shape = (image_size, image_size, 3)
    return keras.applications.ResNet50(
        weights=None, input_shape=shape, classes=CLASSES, classifier_activation=None, name="resnet50"
    )


def application(name: str, size: int) -> keras.Model:
    """Build a network of `keras.applications` for images of 3 channels, with logits as outputs and without dropout."""
    import keras

    keras.utils.set_random_seed(0)
    base = getattr(keras.applications, name)(
        weights=None, include_top=False, input_shape=(size, size, 3), pooling="avg"
    )
    model = keras.Model(base.input, keras.layers.Dense(CLASSES)(base.output))
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    return model


def unet3d(image_size: int, filters: Sequence[int] = _UNET_FILTERS) -> keras.Model:
    """Build a 3-D U-Net with a level for each number of filters, skip connections, and logits per voxel."""
    import keras

    x = image = keras.Input((image_size, image_size, image_size, 1), name=INPUT_NAME)
    skips = []
    for count in filters[:-1]:
        skips.append(_volume_block(x, count))
        x = keras.layers.MaxPooling3D(2)(skips[-1])
    x = _volume_block(x, filters[-1])
    for count, skip in zip(filters[-2::-1], reversed(skips), strict=True):
        x = keras.layers.Conv3DTranspose(count, 2, strides=2)(x)
        x = _volume_block(keras.layers.Concatenate()([skip, x]), count)
    return keras.Model(image, keras.layers.Conv3D(CLASSES, 1, name="logits")(x), name="unet3d")


def _volume_block(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    import keras

    for _ in range(2):
        x = keras.layers.Conv3D(filters, 3, padding="same", use_bias=False)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    return x


def _class_per_label() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _dice_and_cross_entropy() -> Any:
    """Return the sum of soft Dice loss and cross-entropy, both per volume.

    Keras flattens volumes for a cross-entropy of logits. This loss keeps the axes of the volume.
    """
    from keras import ops

    volume = (1, 2, 3)

    def loss(labels: Any, logits: Any) -> Any:
        parts = ops.softmax(logits)
        common = ops.sum(labels * parts, volume)
        both = ops.sum(labels, volume) + ops.sum(parts, volume)
        dice = 1 - ops.mean((2 * common + 1) / (both + 1), axis=-1)
        return dice - ops.mean(ops.sum(labels * ops.log_softmax(logits), axis=-1), volume)

    return loss


@dataclasses.dataclass(frozen=True)
class Task:
    """A network and its training data.

    Attributes:
        title: Name in tables.
        build: Builds the network for an image size.
        dimensions: Spatial axes of an image.
        channels: Channels of an image.
        per_pixel: Whether each pixel has a label, instead of each image.
        image_size: Default height, width and depth.
        batch: Default batch size.
        loss: Returns the loss function of labels and logits.
        one_hot: Whether labels are one-hot vectors, instead of class numbers.
    """

    title: str
    build: Callable[[int], keras.Model]
    dimensions: int
    channels: int
    per_pixel: bool
    image_size: int
    batch: int
    loss: Callable[[], Any] = _class_per_label
    one_hot: bool = False

    def shapes(self, image_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of one image and of its labels."""
        space = (image_size,) * self.dimensions
        return (*space, self.channels), space if self.per_pixel else ()

    def pixels(self, image_size: int, batch: int) -> int:
        """Return the number of pixels, or voxels, of a batch."""
        return batch * image_size**self.dimensions

    def compiled(self, image_size: int) -> keras.Model:
        """Build and compile the network: float32, and SGD with momentum, which has one slot for each weight."""
        import keras

        keras.utils.set_random_seed(SEED)
        model = self.build(image_size)
        self.compile(model)
        return model

    def compile(self, model: keras.Model) -> None:
        """Compile a model that has its weights."""
        import keras

        optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=0.9)
        model.compile(optimizer, self.loss(), jit_compile=False)
        optimizer.build(model.trainable_variables)

    def step(self, image_size: int, batch: int) -> Any:
        """Return the training step of a compiled network for a batch size: a `tf.function` with attribute `model`."""
        import tensorflow as tf

        model = self.compiled(image_size)
        image, label = self.shapes(image_size)
        shape, dtype = ((batch, *label, CLASSES), tf.float32) if self.one_hot else ((batch, *label), tf.int32)
        specs = (tf.TensorSpec((batch, *image), tf.float32), tf.TensorSpec(shape, dtype))

        @tf.function(input_signature=specs, autograph=False)
        def step(images: Any, labels: Any) -> Any:
            return model.train_step((images, labels))["loss"]

        step.model = model
        return step

    def noise(self, image_size: int, batch: int) -> tuple[Any, Any]:
        """Return a batch of random images and labels, equal in all processes."""
        import numpy as np

        generator = np.random.default_rng(SEED)
        image, label = self.shapes(image_size)
        images = generator.standard_normal((batch, *image), dtype=np.float32)
        labels = generator.integers(CLASSES, size=(batch, *label), dtype=np.int32)
        return images, np.eye(CLASSES, dtype=np.float32)[labels] if self.one_hot else labels


LEAST_MEMORY = {"ctrld_strategy": "direct_order", "lb": 1, "max_in_flight": 1, "fuse_swapins": True}
"""Fields of `LMSParams` that need the least memory: late swap-ins, and one swap-out at a time."""

TASKS = {
    "vgg16": Task("VGG-16", vgg16, 2, 3, False, image_size=768, batch=1),
    "vgg19": Task("VGG-19", vgg19, 2, 3, False, image_size=768, batch=1),
    "darknet19": Task("Darknet-19", darknet19, 2, 3, False, image_size=768, batch=1),
    "resnet50": Task("ResNet-50", resnet50, 2, 3, False, image_size=512, batch=2),
    "unet3d": Task("3-D U-Net", unet3d, 3, 1, True, image_size=88, batch=1),
    "unet3d-dice": Task(
        "3-D U-Net, slim",
        functools.partial(unet3d, filters=_SLIM_UNET_FILTERS),
        *(3, 1, True),
        image_size=96,
        batch=1,
        loss=_dice_and_cross_entropy,
        one_hot=True,
    ),
}

SMALL_TASKS = {
    "small-vgg": Task("VGG, 4 convolutions", small_vgg, 2, 3, False, image_size=128, batch=2),
    "small-unet3d": dataclasses.replace(
        TASKS["unet3d-dice"],
        title="3-D U-Net, 2 levels",
        build=functools.partial(unet3d, filters=(8, 16)),
        image_size=32,
    ),
}
"""Networks that a CPU plans and trains in seconds, for tests of the benchmarks themselves."""

SWAPPED = ("resnet50", "unet3d")
"""Tasks that are trained with swaps alone; both have BatchNorm in training mode, and one has volumes."""

# Exits of segments, and their tiles, if the command line names none.
DEFAULT_SEGMENTS = {
    "vgg16": (("pool3", "pool5"), ((4, 4), (2, 2))),
    "vgg19": (("pool3", "pool5"), ((4, 4), (2, 2))),
    "darknet19": (("pool3", "pool5"), ((4, 4), (2, 2))),
}


def _vgg(name: str, depths: tuple[int, ...], image_size: int) -> keras.Model:
    import keras

    x = image = _image(image_size)
    for block, (depth, filters) in enumerate(zip(depths, _VGG_FILTERS, strict=True), 1):
        for index in range(1, depth + 1):
            x = keras.layers.Conv2D(
                filters,
                3,
                padding="same",
                activation="relu",
                kernel_initializer="he_normal",
                name=f"conv{block}_{index}",
            )(x)
        x = keras.layers.MaxPooling2D(2, name=f"pool{block}")(x)
    return _classifier(name, image, x)


def _image(image_size: int) -> keras.KerasTensor:
    import keras

    return keras.Input((image_size, image_size, 3), name=INPUT_NAME)


def _classifier(name: str, image: keras.KerasTensor, features: keras.KerasTensor) -> keras.Model:
    import keras

    pooled = keras.layers.GlobalAveragePooling2D(name="mean")(features)
    return keras.Model(image, keras.layers.Dense(CLASSES, name="logits")(pooled), name=name)
