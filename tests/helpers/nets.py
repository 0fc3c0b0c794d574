"""Small networks that between them have every border case of a convolutional one; a helper, no test."""

import keras
import tensorflow as tf
from keras import layers

# Without sums over the image --------------------------------------------------------------------------------


def conv(filters, kernel=3, **options):
    return layers.Conv2D(filters, kernel, **{"padding": "same", "activation": "relu", **options})


def vgg(x):
    for filters in (3, 4):
        x = conv(filters)(x)
        x = conv(filters, name=f"conv{filters}")(x)
        x = layers.MaxPool2D(2, name=f"pool{filters}")(x)
    return conv(5, name="out")(x)


def residual(x):
    x = conv(4, 7, strides=2)(x)
    x = layers.MaxPool2D(3, 2, padding="same", name="stem")(x)
    for strides in (1, 2):
        shortcut = conv(5, 1, strides=strides, activation=None)(x)
        y = conv(5, strides=strides)(x)
        y = conv(5, activation=None)(y)
        x = layers.Activation("relu", name=f"block{strides}")(layers.Add()([shortcut, y]))
    y = conv(5, activation=None)(conv(5)(x))
    return layers.Activation("relu", name="out")(layers.Add()([x, y]))


def separable(x):
    x = conv(4, strides=2, activation="silu")(x)
    x = layers.DepthwiseConv2D(5, padding="same", activation="gelu")(x)
    x = layers.ZeroPadding2D(((0, 1), (1, 2)))(x)
    x = layers.DepthwiseConv2D(3, strides=2, activation="silu", depth_multiplier=2)(x)
    x = layers.SeparableConv2D(4, 3, padding="same", activation="silu")(x)
    return layers.AveragePooling2D(3, 2, padding="same", name="out")(x)


def unet(x):
    wide = conv(3)(x)
    deep = layers.ZeroPadding2D(((0, wide.shape[1] % 2), (0, wide.shape[2] % 2)))(wide)
    deep = conv(4)(layers.MaxPool2D(2)(deep))
    up = layers.Conv2DTranspose(3, 2, strides=2, activation="relu")(deep)
    up = layers.Conv2DTranspose(3, 3, padding="same")(up)
    wide = layers.ZeroPadding2D(((0, up.shape[1] - wide.shape[1]), (0, up.shape[2] - wide.shape[2])))(wide)
    return conv(3, name="out")(layers.Concatenate()([wide, up]))


def dense_block(x):
    x = conv(3, activation=None)(x)
    for _ in range(3):
        x = layers.Concatenate()([x, conv(2)(x)])
    return layers.AveragePooling2D(2, name="out")(x)


def frozen_norm(x):
    for number in range(2):
        norm = layers.BatchNormalization(
            beta_initializer="random_normal", gamma_initializer="random_normal", moving_mean_initializer="random_normal"
        )
        norm.trainable = False
        x = layers.Activation("relu", name=f"relu{number}")(norm(conv(4, activation=None)(x)))
    return conv(3, name="out")(x)


def cell(x):
    """A tensor that a pool and a convolution read, which pad it in two ways."""
    x = conv(4, activation=None)(conv(3)(x))
    x = layers.Add()([layers.MaxPool2D(3, 1, padding="same")(x), conv(4)(x)])
    return layers.AveragePooling2D(2, name="out")(x)


def halves(x):
    """A tensor in two parts, one with a distant consumer, the other without a later consumer."""
    kept, x = keras.ops.split(conv(4)(conv(3)(x)), 2, axis=-1)
    x = conv(2, 5)(conv(2)(x))
    return conv(3, name="out")(layers.Concatenate()([kept, x]))


def masked(x):
    """Values that are no floating point numbers are read far apart."""
    x = conv(4, activation=None)(conv(3)(x))
    mask, steps = x > 0.1, keras.ops.cast(3 * x, "int32")
    x = x * keras.ops.cast(steps, x.dtype)
    x = conv(4)(conv(4)(x * keras.ops.cast(mask, x.dtype)))
    return conv(3, name="out")(keras.ops.where(mask, x, x * keras.ops.cast(steps, x.dtype)))


def dilated(x):
    for rate in (2, 3, 2):
        x = conv(4, dilation_rate=rate)(x)
    return conv(3, name="out")(x)


def enlarged(x):
    """An image of few rows and columns is read by position. TensorFlow resizes in float32."""
    deep = conv(4)(layers.MaxPool2D(16, padding="same")(conv(3)(x)))
    deep = layers.UpSampling2D(2, interpolation="bilinear")(deep)
    return conv(3, name="out")(layers.UpSampling2D(2)(conv(3)(deep)))


PLAIN = [vgg, residual, separable, unet, dense_block, frozen_norm, cell, halves]

# With BatchNorm in training mode, and other sums that a forward pass waits for ------------------------------


def conv_norm(x, filters, kernel=3, **options):
    """A convolution with BatchNorm in training mode."""
    x = layers.Conv2D(filters, kernel, padding="same", **options)(x)
    return layers.BatchNormalization(momentum=0.9)(x)


def chain(x):
    for filters, strides in ((3, 1), (4, 2), (5, 1)):
        x = layers.ReLU()(conv_norm(x, filters, strides=strides))
    return x


def bottlenecks(x):
    x = layers.MaxPooling2D(3, 2, padding="same")(layers.ReLU()(conv_norm(x, 4, 5, strides=2, use_bias=False)))
    for filters, strides in ((6, 1), (8, 2), (8, 1)):
        y = layers.ReLU()(conv_norm(x, 3, 1, strides=strides))
        y = conv_norm(layers.ReLU()(conv_norm(y, 3)), filters, 1)
        if strides > 1 or x.shape[-1] != filters:
            x = conv_norm(x, filters, 1, strides=strides)
        x = layers.ReLU()(layers.Add()([x, y]))
    return x


def squeeze_and_excite(x):
    x = layers.Activation("silu")(conv_norm(x, 6))
    means = layers.GlobalAveragePooling2D(keepdims=True)(x)
    gates = layers.Conv2D(6, 1, activation="sigmoid")(layers.Conv2D(3, 1, activation="silu")(means))
    x = layers.Multiply()([x, gates])
    x = layers.AveragePooling2D(3, 2, padding="same")(x)
    x = layers.LayerNormalization()(layers.DepthwiseConv2D(3, padding="same")(x))
    return layers.Activation("gelu")(layers.LayerNormalization(axis=(1, 2, 3))(x))


def u_net(x):
    skip = layers.ReLU()(conv_norm(x, 4))
    y = layers.ReLU()(conv_norm(layers.MaxPooling2D(2, padding="same")(skip), 5))
    y = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(y)
    y = layers.Cropping2D(((0, skip.shape[1] % 2), (0, skip.shape[2] % 2)))(y)
    return layers.ReLU()(conv_norm(layers.Concatenate()([skip, y]), 4))


def extremes(x):
    x = layers.ReLU()(conv_norm(x, 4))
    highest = layers.GlobalMaxPooling2D(keepdims=True)(x)
    return layers.Activation("tanh")(conv_norm(layers.Multiply()([x, highest]), 3))


NORMALISED = [chain, bottlenecks, squeeze_and_excite, u_net, extremes]


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


class Compiled(layers.Layer):
    """A function that the user lets XLA compile."""

    def call(self, x):
        return tf.function(lambda x: tf.tanh(2 * x), jit_compile=True)(x)
