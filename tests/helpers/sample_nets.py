"""The network of Seal et al., section 3, without padding; a helper, no test."""

import keras
import tensorflow as tf
from keras import layers


class Beside(layers.Layer):
    """Concatenates the upsampled tensor with the centre crop of the skip tensor, for any sizes."""

    def call(self, pair):
        wide, up = pair
        offsets = [(tf.shape(wide)[dim] - tf.shape(up)[dim]) // 2 for dim in (1, 2)]
        rows = [slice(offset, offset + tf.shape(up)[dim]) for dim, offset in zip((1, 2), offsets, strict=True)]
        return tf.concat([wide[:, rows[0], rows[1]], up], -1)


def described(architecture, size, filters=1, crop="layers"):
    """The network of section 3; `size` is `None` for images of any size."""
    image = keras.Input((size, size, 1))
    x, skips, lost = image, [], (architecture.kernel - 1) * architecture.convolutions
    for level in range(architecture.levels):
        for _ in range(architecture.convolutions):
            x = layers.Conv2D(filters * 2**level, architecture.kernel, activation="relu")(x)
        if level < architecture.levels - 1:
            skips.append(x)
            x = layers.MaxPool2D(2)(x)
    for up, skip in enumerate(reversed(skips), 1):
        level = architecture.levels - 1 - up
        x = layers.Conv2DTranspose(filters * 2**level, 2, strides=2)(x)
        if crop == "layers":
            x = layers.Concatenate()([layers.Cropping2D((3 * 2 ** (up - 1) - 2) * lost)(skip), x])
        else:
            x = Beside()([skip, x])
        for _ in range(architecture.convolutions):
            x = layers.Conv2D(filters * 2**level, architecture.kernel, activation="relu")(x)
    return keras.Model(image, layers.Conv2D(1, 1)(x))
