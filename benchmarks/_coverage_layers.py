"""Uses of Keras layers between two convolutions, for `benchmarks.coverage`, and the layers that are not for images.

Functions import Keras themselves, as in all benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Use = tuple[str, int, Callable[[Any], Any]]
"""Name of a use, number of spatial axes, and a function from one tensor to another."""

NOT_FOR_IMAGES = {
    "recurrent, over sequences": "Bidirectional GRU GRUCell LSTM LSTMCell RNN SimpleRNN SimpleRNNCell StackedRNNCells",
    "for tokens, text and categories": (
        "CategoryEncoding Discretization Embedding HashedCrossing Hashing IntegerLookup Masking ReversibleEmbedding "
        "StringLookup TextVectorization"
    ),
    "for sound": "MelSpectrogram STFTSpectrogram",
    "a base class, or a wrapper of other frameworks": (
        "FlaxLayer InputLayer JaxLayer Lambda Layer Pipeline TFSMLayer TorchModuleWrapper Wrapper"
    ),
    "augmentation, which belongs into the input pipeline": (
        "AugMix AutoContrast ContrastLimitedAdaptiveHistogramEqualization CutMix Equalization MaxNumBoundingBoxes "
        "MixUp RandAugment RandomBrightness RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop "
        "RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale RandomHue RandomInvert "
        "RandomPerspective RandomPosterization RandomRotation RandomSaturation RandomSharpness RandomShear "
        "RandomTranslation RandomZoom Solarization"
    ),
}


def uses() -> dict[str, list[Use]]:
    """Return the uses of each layer by the name of its class."""
    from keras import layers

    by_name = _of_several(layers) | _normalising(layers) | _by_pixel(layers) | _moving(layers) | _over_frames(layers)
    for rank in (1, 2, 3):
        by_name |= _of_rank(layers, rank)
    return by_name


def _of_several(kl: Any) -> dict[str, list[Use]]:
    """Return the uses of layers that combine several images."""

    def halves(merge: Any) -> Callable[[Any], Any]:
        return lambda x: merge([x, kl.Conv2D(4, 1)(x)])

    return {
        "Add": [("", 2, halves(kl.Add()))],
        "AdditiveAttention": [("", 1, lambda x: kl.AdditiveAttention()([x, x]))],
        "Attention": [("", 1, lambda x: kl.Attention()([x, x]))],
        "Average": [("", 2, halves(kl.Average()))],
        "Concatenate": [("", 2, halves(kl.Concatenate()))],
        "Dot": [("over channels", 1, lambda x: kl.Dot(-1)([x, x]))],
        "GroupQueryAttention": [("", 1, lambda x: kl.GroupQueryAttention(3, 2, 1)(x, x))],
        "Maximum": [("", 2, halves(kl.Maximum()))],
        "Minimum": [("", 2, halves(kl.Minimum()))],
        "MultiHeadAttention": [("", 1, lambda x: kl.MultiHeadAttention(2, 3)(x, x))],
        "Multiply": [
            ("", 2, halves(kl.Multiply())),
            (
                "squeeze-and-excite",
                2,
                lambda x: x * kl.Dense(4, "sigmoid")(kl.GlobalAveragePooling2D(keepdims=True)(x)),
            ),
        ],
        "Subtract": [("", 2, halves(kl.Subtract()))],
    }


def _normalising(kl: Any) -> dict[str, list[Use]]:
    """Return the uses of layers that normalise."""
    return {
        "BatchNormalization": [
            ("training", 2, lambda x: kl.BatchNormalization()(x)),
            ("frozen", 2, lambda x: kl.BatchNormalization(trainable=False)(x)),
        ],
        "GroupNormalization": [
            ("groups", 2, lambda x: kl.GroupNormalization(2)(x)),
            ("instances", 2, lambda x: kl.GroupNormalization(-1)(x)),
        ],
        "LayerNormalization": [
            ("channels", 2, lambda x: kl.LayerNormalization()(x)),
            ("whole image", 2, lambda x: kl.LayerNormalization(axis=(1, 2, 3))(x)),
        ],
        "Normalization": [("", 2, lambda x: kl.Normalization(mean=0.1, variance=2.0)(x))],
        "RMSNormalization": [("", 2, lambda x: kl.RMSNormalization()(x))],
        "SpectralNormalization": [("", 2, lambda x: kl.SpectralNormalization(kl.Conv2D(4, 3))(x))],
        "UnitNormalization": [("", 2, lambda x: kl.UnitNormalization()(x))],
    }


def _by_pixel(kl: Any) -> dict[str, list[Use]]:
    """Return the uses of layers that compute each pixel from the same pixel alone."""
    return {
        "Activation": [("gelu", 2, lambda x: kl.Activation("gelu")(x)), ("silu", 2, kl.Activation("silu"))],
        "ActivityRegularization": [("", 2, lambda x: kl.ActivityRegularization(1e-3, 1e-3)(x))],
        "AlphaDropout": [("", 2, lambda x: kl.AlphaDropout(0.3, seed=1)(x))],
        "Dense": [("", 2, lambda x: kl.Dense(5, activation="relu")(x))],
        "Dropout": [("", 2, lambda x: kl.Dropout(0.3, seed=1)(x))],
        "EinsumDense": [("", 2, lambda x: kl.EinsumDense("...c,cd->...d", 5)(x))],
        "ELU": [("", 2, lambda x: kl.ELU()(x))],
        "GaussianDropout": [("", 2, lambda x: kl.GaussianDropout(0.3, seed=1)(x))],
        "GaussianNoise": [("", 2, lambda x: kl.GaussianNoise(0.3, seed=1)(x))],
        "Identity": [("", 2, lambda x: kl.Identity()(x))],
        "LeakyReLU": [("", 2, lambda x: kl.LeakyReLU()(x))],
        "PReLU": [
            ("shared over axes", 2, lambda x: kl.PReLU(shared_axes=[1, 2])(x)),
            ("a weight for each pixel", 2, lambda x: kl.PReLU()(x)),
        ],
        "ReLU": [("", 2, lambda x: kl.ReLU(6.0)(x))],
        "Rescaling": [("", 2, lambda x: kl.Rescaling(0.5, 1.0)(x))],
        "Softmax": [("channels", 2, lambda x: kl.Softmax()(x)), ("image", 2, lambda x: kl.Softmax(axis=(1, 2))(x))],
    }


def _moving(kl: Any) -> dict[str, list[Use]]:
    """Return the uses of layers that move pixels."""
    return {
        "CenterCrop": [("", 2, lambda x: kl.CenterCrop(9, 8)(x))],
        "Cropping1D": [("", 1, lambda x: kl.Cropping1D((1, 2))(x))],
        "Cropping2D": [("", 2, lambda x: kl.Cropping2D(((1, 2), (0, 1)))(x))],
        "Cropping3D": [("", 3, lambda x: kl.Cropping3D(1)(x))],
        "Flatten": [("", 2, lambda x: kl.Flatten()(x))],
        "Permute": [("", 2, lambda x: kl.Permute((2, 1, 3))(x))],
        "RepeatVector": [("", 2, lambda x: kl.RepeatVector(9)(kl.GlobalMaxPooling2D()(x)))],
        "Reshape": [("channels in groups", 2, lambda x: kl.Reshape((*x.shape[1:3], 2, 2))(x)[..., 0])],
        "Resizing": [
            (how, 2, lambda x, how=how: kl.Resizing(17, 9, interpolation=how)(x))
            for how in ("nearest", "bilinear", "bicubic")
        ],
    }


def _over_frames(kl: Any) -> dict[str, list[Use]]:
    """Return the uses of layers over sequences of images; here a sequence has two images."""
    from keras import ops

    def frames(layer: Any) -> Callable[[Any], Any]:
        return lambda x: layer(ops.stack([x, 0.5 * x], axis=1))

    def recurrent(rank: int) -> list[Use]:
        name, options = f"ConvLSTM{rank}D", {"filters": 4, "kernel_size": 3, "padding": "same"}
        return [
            (use, rank, lambda x, unroll=unroll: frames(getattr(kl, name)(unroll=unroll, **options))(x))
            for use, unroll in (("unrolled", True), ("a loop", False))
        ]

    distributed = ("", 2, lambda x: ops.sum(frames(kl.TimeDistributed(kl.Conv2D(4, 3)))(x), axis=1))
    return {"TimeDistributed": [distributed], **{f"ConvLSTM{rank}D": recurrent(rank) for rank in (1, 2, 3)}}


def _of_rank(kl: Any, rank: int) -> dict[str, list[Use]]:
    """Return the uses of layers that exist for one, two and three axes."""

    def layer(name: str, *args: Any, **options: Any) -> Callable[[Any], Any]:
        return lambda x: getattr(kl, name)(*args, **options)(x)

    conv = f"Conv{rank}D"
    by_name: dict[str, list[Use]] = {
        conv: [
            ("strides", rank, layer(conv, 4, 3, strides=2, padding="same")),
            ("dilated", rank, layer(conv, 4, 3, dilation_rate=2)),
            ("groups", rank, layer(conv, 6, 3, groups=2)),
        ],
        f"{conv}Transpose": [("", rank, layer(f"{conv}Transpose", 4, 3, strides=2, padding="same"))],
        f"UpSampling{rank}D": [("nearest", rank, layer(f"UpSampling{rank}D", 2))],
        f"ZeroPadding{rank}D": [("", rank, layer(f"ZeroPadding{rank}D", 1))],
        f"SpatialDropout{rank}D": [("", rank, layer(f"SpatialDropout{rank}D", 0.3, seed=1))],
    }
    if rank > 1:
        last = (1,) * (rank - 1) + (2,)
        by_name[conv].append(("dilated along one axis", rank, layer(conv, 4, 3, dilation_rate=last, padding="same")))
    if rank < 3:
        for name, options in ((f"DepthwiseConv{rank}D", {}), (f"SeparableConv{rank}D", {"filters": 5})):
            by_name[name] = [("", rank, layer(name, kernel_size=3, padding="same", **options))]
    if rank == 2:
        by_name["UpSampling2D"].append(("bilinear", 2, layer("UpSampling2D", 2, interpolation="bilinear")))
    for kind in ("Average", "Max"):
        name = f"{kind}Pooling{rank}D"
        by_name[name] = [("SAME", rank, layer(name, 3, 2, "same")), ("VALID", rank, layer(name, 2))]
        by_name[f"Global{name}"] = [("", rank, layer(f"Global{name}"))]
        by_name[f"Adaptive{name}"] = [("", rank, layer(f"Adaptive{name}", 4))]
    return by_name
