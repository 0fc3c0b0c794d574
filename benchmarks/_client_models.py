"""Models of other packages, unmodified and with random weights, each with a batch of training data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

PIXEL_LOSS = "sparse_categorical_crossentropy"


class Client(NamedTuple):
    """A model of another package.

    Attributes:
        package: Name of the distribution on the package index.
        build: Returns a compiled model, and one batch of inputs and targets.
    """

    package: str
    build: Callable[[], tuple[Any, Any, Any]]


def _images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, dtype="float32")


def _labels(shape: tuple[int, ...], classes: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, classes, shape)


def _compiled(model: Any, loss: Any, rate: float = 1e-3) -> Any:
    import keras

    model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, jit_compile=False)
    return model


def hub_resnet() -> tuple[Any, Any, Any]:
    """ResNet-18 of KerasHub as a classifier."""
    import keras
    import keras_hub

    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 128, 256, 512],
        stackwise_num_blocks=[2, 2, 2, 2],
        stackwise_num_strides=[1, 2, 2, 2],
        block_type="basic_block",
        image_shape=(256, 256, 3),
    )
    model = keras_hub.models.ResNetImageClassifier(backbone=backbone, num_classes=10, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return _compiled(model, loss), _images(4, 256, 256, 3), _labels((4,), 10)


def hub_vgg() -> tuple[Any, Any, Any]:
    """VGG of KerasHub as a classifier."""
    import keras
    import keras_hub

    backbone = keras_hub.models.VGGBackbone(
        stackwise_num_repeats=[2, 2, 3], stackwise_num_filters=[32, 64, 128], image_shape=(256, 256, 3)
    )
    model = keras_hub.models.VGGImageClassifier(
        backbone=backbone, num_classes=10, preprocessor=None, pooling="avg", activation=None, dropout=0.0
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return _compiled(model, loss), _images(2, 256, 256, 3), _labels((2,), 10)


def hub_gpt2() -> tuple[Any, Any, Any]:
    """A small GPT-2 of KerasHub as a causal language model."""
    import keras
    import keras_hub

    length, words = 256, 2000
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=words,
        num_layers=4,
        num_heads=4,
        hidden_dim=128,
        intermediate_dim=512,
        max_sequence_length=length,
        dropout=0.0,
    )
    model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    tokens = _labels((8, length + 1), words).astype("int32")
    inputs = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((8, length), "int32")}
    return _compiled(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True)), inputs, tokens[:, 1:]


def medicai_unet() -> tuple[Any, Any, Any]:
    """A 3-D U-Net of medicai with a DenseNet encoder."""
    from medicai.models import UNet

    model = UNet(input_shape=(64, 64, 64, 1), encoder_name="densenet121", num_classes=3)
    return _compiled(model, PIXEL_LOSS), _images(1, 64, 64, 64, 1), _labels((1, 64, 64, 64), 3)


def unet_collection() -> tuple[Any, Any, Any]:
    """A 2-D U-Net of keras-unet-collection with BatchNormalization."""
    from keras_unet_collection import models

    model = models.unet_2d(
        (256, 256, 3),
        [16, 32, 64, 128],
        2,
        stack_num_down=2,
        stack_num_up=2,
        activation="ReLU",
        output_activation="Softmax",
        batch_norm=True,
        pool="max",
        unpool="nearest",
    )
    return _compiled(model, PIXEL_LOSS), _images(2, 256, 256, 3), _labels((2, 256, 256), 2)


def segmentation_3d() -> tuple[Any, Any, Any]:
    """A 3-D U-Net of segmentation-models-3D with a ResNet-18 encoder."""
    import segmentation_models_3D

    model = segmentation_models_3D.Unet(
        "resnet18", input_shape=(64, 64, 64, 3), encoder_weights=None, classes=2, activation="softmax"
    )
    return _compiled(model, PIXEL_LOSS), _images(1, 64, 64, 64, 3), _labels((1, 64, 64, 64), 2)


def care() -> tuple[Any, Any, Any]:
    """CARE, the restoration network of CSBDeep, with the package's loss."""
    from csbdeep.models import CARE, Config

    network = CARE(Config("YX", 1, 1, unet_n_depth=2, unet_n_first=32), None, basedir=None)
    network.prepare_for_training()
    return network.keras_model, _images(4, 256, 256, 1), _images(4, 256, 256, 1)


def stardist_3d() -> tuple[Any, Any, Any]:
    """StarDist in 3-D, with the package's losses."""
    from stardist.models import Config3D, StarDist3D

    rays, grid, size = 32, (1, 2, 2), (32, 96, 96)
    config = Config3D(rays=rays, n_channel_in=1, grid=grid, train_patch_size=size, train_batch_size=1)
    network = StarDist3D(config, None, basedir=None)
    network.prepare_for_training()
    coarse = tuple(length // step for length, step in zip(size, grid, strict=True))
    inside = (_images(1, *coarse, 1) > 0.5).astype("float32")
    distances = np.concatenate([5 * _images(1, *coarse, rays), inside], axis=-1)
    return network.keras_model, _images(1, *size, 1), [inside, distances]


CLIENTS: dict[str, Client] = {
    "KerasHub ResNet-18": Client("keras-hub", hub_resnet),
    "KerasHub VGG": Client("keras-hub", hub_vgg),
    "KerasHub GPT-2, causal": Client("keras-hub", hub_gpt2),
    "medicai U-Net 3-D, DenseNet-121": Client("medicai", medicai_unet),
    "keras-unet-collection U-Net": Client("keras-unet-collection", unet_collection),
    "segmentation-models-3D U-Net": Client("segmentation-models-3D", segmentation_3d),
    "CSBDeep CARE": Client("csbdeep", care),
    "StarDist 3-D": Client("stardist", stardist_3d),
}
