"""The networks of the benchmarks: convolutional parts of known classifiers, for any image size.

The fully connected head is replaced by global average pooling and one dense layer, so that the image size
is free and the weights are small beside the activations. Keras is imported inside the functions: the
parent process of a benchmark needs only the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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


def vgg16(image_size: int) -> keras.Model:
    """Builds the 13 convolutions and 5 pools of VGG-16."""
    return _vgg("vgg16", (2, 2, 3, 3, 3), image_size)


def vgg19(image_size: int) -> keras.Model:
    """Builds the 16 convolutions and 5 pools of VGG-19."""
    return _vgg("vgg19", (2, 2, 4, 4, 4), image_size)


def darknet19(image_size: int) -> keras.Model:
    """Builds the 18 convolutions and 5 pools of Darknet-19 before its classifier.

    The batch normalisations are frozen, as they are where a network is trained further on single large
    images: statistics of one image would be no statistics of the data.
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


NETS: dict[str, Callable[[int], keras.Model]] = {"vgg16": vgg16, "vgg19": vgg19, "darknet19": darknet19}

# Exits of the segments and tiles of each where the command line names none.
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
