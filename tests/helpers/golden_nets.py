"""Build small nets, plan them in several ways, and reduce each plan to what must not change; a helper, no test.

Only public names of `tflms_sft` are imported here, so that no change of its modules touches this file. Golden files
are rewritten by `GOLDEN_WRITE=1 python -m pytest tests/equivalence/test_golden_plans.py`, without `-n`.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
from typing import Any

import keras
import tensorflow as tf
from keras import layers

import tflms_sft
from tflms_sft import AutoParams, LMSParams, PipelineParams, SegmentSpec, SFTParams

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "equivalence" / "golden"

BATCH = 4
CLASSES = 3

# Nets -------------------------------------------------------------------------------------------------------


def conv(x, filters, kernel=3, **options):
    """Apply a convolution with ReLU, for images or volumes."""
    kind = layers.Conv3D if len(x.shape) == 5 else layers.Conv2D
    return kind(filters, kernel, **{"padding": "same", "activation": "relu", **options})(x)


def conv_norm(x, filters, kernel=3, strides=1, activation="relu"):
    """Apply a convolution, BatchNormalization and an activation."""
    x = conv(x, filters, kernel, strides=strides, activation=None, use_bias=False)
    x = layers.BatchNormalization()(x)
    return layers.Activation(activation)(x) if activation else x


def classifier(image, x):
    """End a net in logits for each image."""
    return keras.Model(image, layers.Dense(CLASSES, name="head")(layers.GlobalAveragePooling2D(name="mean")(x)))


def vgg():
    """Build convolutions and pools in a row."""
    image = x = keras.Input((48, 48, 3), name="photo")
    for block, (filters, count) in enumerate([(8, 2), (12, 2)], 1):
        for number in range(1, count + 1):
            x = conv(x, filters, name=f"conv{block}_{number}")
        x = layers.MaxPooling2D(2, name=f"pool{block}")(x)
    return classifier(image, x)


def residual():
    """Build residual blocks with BatchNormalization."""
    image = keras.Input((48, 48, 3), name="photo")
    x = layers.MaxPooling2D(3, 2, padding="same")(conv_norm(image, 8, 5))
    for filters, strides in ((8, 1), (16, 2)):
        y = conv_norm(conv_norm(x, filters, strides=strides), filters, activation=None)
        if strides > 1:
            x = conv_norm(x, filters, 1, strides=strides, activation=None)
        x = layers.Activation("relu")(layers.Add()([x, y]))
    return classifier(image, x)


def unet(size, channels, filters, pool, transpose):
    """Build a U-Net that ends in logits for each pixel."""
    image = x = keras.Input((*size, channels), name="photo")
    skips = []
    for number in filters[:-1]:
        x = conv(conv(x, number), number)
        skips.append(x)
        x = pool(2)(x)
    x = conv(conv(x, filters[-1]), filters[-1])
    for number, skip in zip(filters[-2::-1], skips[::-1], strict=True):
        x = layers.Concatenate()([skip, transpose(number, 2, strides=2, padding="same")(x)])
        x = conv(x, number)
    return keras.Model(image, conv(x, CLASSES, 1, activation=None, name="head"))


def unet_2d():
    """Build a U-Net for images."""
    return unet((48, 48), 3, (6, 10), layers.MaxPooling2D, layers.Conv2DTranspose)


def unet_3d():
    """Build a U-Net for volumes."""
    return unet((16, 16, 16), 1, (4, 8), layers.MaxPooling3D, layers.Conv3DTranspose)


def densenet():
    """Build two dense blocks, in which each layer reads all before it, and a transition."""
    image = keras.Input((40, 40, 3), name="photo")
    x = conv(image, 8)
    for _ in range(2):
        x = layers.Concatenate()([x, conv(x, 4)])
    x = layers.AveragePooling2D(2)(conv(x, 10, 1))
    x = layers.Concatenate()([x, conv(x, 4)])
    return classifier(image, x)


def mobilenet():
    """Build an inverted residual with a depthwise convolution, squeeze-and-excite and hard swish."""
    image = keras.Input((40, 40, 3), name="photo")
    x = conv_norm(image, 8, strides=2, activation="hard_swish")
    y = conv_norm(x, 24, 1, activation="hard_swish")
    y = layers.DepthwiseConv2D(5, padding="same", use_bias=False)(y)
    y = layers.Activation("hard_swish")(layers.BatchNormalization()(y))
    gates = conv(layers.GlobalAveragePooling2D(keepdims=True)(y), 6, 1)
    gates = conv(gates, 24, 1, activation="hard_sigmoid")
    y = conv_norm(layers.Multiply()([y, gates]), 8, 1, activation=None)
    y = layers.DepthwiseConv2D(3, strides=2, padding="same")(layers.Add()([x, y]))
    return classifier(image, layers.Activation("hard_swish")(y))


def swapped():
    """Build a net with tensors of several sizes, some of which are read far away."""
    image = keras.Input((32, 32, 3), name="photo")
    skip = conv(image, 8, name="skip")
    x = layers.MaxPooling2D(2, name="pool")(conv(skip, 12, name="wide"))
    x = conv(conv(x, 16, name="deep1", activation="silu"), 16, name="deep2")
    x = layers.Concatenate(name="joined")([skip, layers.UpSampling2D(2, name="up")(x)])
    return classifier(image, conv(x, 8, name="last"))


def staged():
    """Build four stages with a connection from the first to the last; `CUTS` are their ends."""
    image = x = keras.Input((16, 16, 3), name="photo")
    first = None
    for number in range(4):
        x = conv(x, 6, name=f"inner{number}")
        if number == 3:
            x = layers.Concatenate(name="joined")([x, first])
        x = conv(x, 4, name=f"stage{number}", activation="tanh")
        first = x if number == 0 else first
    return classifier(image, x)


CUTS = ["stage0", "stage1", "stage2"]
HERE = ["CPU:0"] * 4
"""One device for all stages: others have to be configured before TensorFlow starts."""

# Steps ------------------------------------------------------------------------------------------------------


def train_step(model):
    """Return a step with a loss, its gradients, and an update with a slot for each weight."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, name="sgd")  # Before version 3.15 Keras's default is "SGD".
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def function(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return tf.function(function, autograph=False)


def predict_step(model):
    """Return a step without gradients."""

    def function(images):
        return model(images, training=False)

    return tf.function(function, autograph=False)


# Cases ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """Hold a net and one way to plan it.

    Attributes:
        net: Function that builds the net; the golden file has its name.
        label: Name of the parameters, the key in that file.
        params: Parameters of `tflms_sft.rewrite`.
        batch: Batch of the specs; `None` leaves it open.
        trains: Whether the step has gradients.
    """

    net: Any
    label: str
    params: Any
    batch: int | None = BATCH
    trains: bool = True

    @property
    def name(self):
        """Join net and parameters to one word, for ids of tests."""
        return f"{self.net.__name__}-{self.label}"

    @property
    def path(self):
        """Return the golden file."""
        return FOLDER / f"{self.net.__name__}.json"


def budget(num_bytes, swap=False):
    """Return parameters for a budget, by default without swaps."""
    return AutoParams(memory_budget=num_bytes, swap=swap)


NAMED = [
    SegmentSpec("photo", "pool1", num_tiles=(4, 2), backward_num_tiles=(2, 2), stored="conv1_1"),
    SegmentSpec("pool1", "conv2_2", num_tiles=(3, 1), halo="carry"),
]
DISK = LMSParams(tier="disk", min_bytes=16 * 2**10)
DIRECT = LMSParams(
    tier="disk",
    min_bytes=2**10,
    ctrld_strategy="direct_order",
    fuse_swapins=True,
    swap_branches=True,
    lb=2,
    n_tensors=6,
)
PIPELINE = PipelineParams(CUTS, "1f1b", 4, HERE)

CASES = [
    Case(vgg, "tiles", SFTParams(num_tiles=(2, 3))),
    Case(vgg, "tiles_by_default", SFTParams()),
    Case(vgg, "tiles_of_open_batch", SFTParams(num_tiles=(4, 4)), batch=None),
    Case(vgg, "rows_carry", SFTParams(num_tiles=(4, 1), halo="carry")),
    Case(vgg, "segments_by_name", SFTParams(num_tiles=(2, 2), segments=NAMED)),
    Case(vgg, "budget", budget(1_250_000)),
    Case(vgg, "budget_of_predict", budget(450_000), trains=False),
    Case(residual, "tiles", SFTParams(num_tiles=(3, 2))),
    Case(residual, "budget", budget(1_100_000)),
    Case(unet_2d, "tiles", SFTParams(num_tiles=(2, 2, 2))),
    Case(unet_2d, "budget", budget(2_150_000)),
    Case(unet_3d, "tiles", SFTParams(num_tiles=(2, 2, 1))),
    Case(unet_3d, "budget", budget(4_700_000)),
    Case(densenet, "tiles", SFTParams(num_tiles=(2, 2))),
    Case(densenet, "rows_carry", SFTParams(num_tiles=(5, 1), halo="carry")),
    Case(densenet, "tiles_by_capacity", SFTParams(memory_capacity=150_000)),
    Case(densenet, "budget", budget(1_400_000)),
    Case(mobilenet, "tiles", SFTParams(num_tiles=(2, 2))),
    Case(mobilenet, "budget", budget(1_200_000)),
    Case(swapped, "disk", DISK),
    Case(swapped, "disk_in_direct_order", DIRECT),
    Case(swapped, "tiles_and_disk", [SFTParams(num_tiles=(2, 2)), DISK]),
    Case(swapped, "budget_with_swap", budget(27_000_000, swap=True), batch=64),
    Case(staged, "pipeline_1f1b", PIPELINE),
    Case(staged, "pipeline_of_even_stages", PipelineParams(3, "gpipe", 2, HERE[:3])),
    Case(staged, "pipeline_with_tiles", [SFTParams(num_tiles=(2, 2)), PIPELINE]),
    Case(staged, "pipeline_with_swaps", [LMSParams(tier="disk", min_bytes=2**10), PIPELINE]),
]


def plan_of(case):
    """Plan a case in a Keras session of its own, so that no names depend on what ran before."""
    keras.backend.clear_session(free_memory=False)
    model = case.net()
    images = tf.TensorSpec((case.batch, *model.input_shape[1:]), name="images")
    if not case.trains:
        return tflms_sft.rewrite(predict_step(model), case.params, images).plan
    labels = tf.TensorSpec((case.batch, *model.output_shape[1:-1]), tf.int32, name="labels")
    return tflms_sft.rewrite(train_step(model), case.params, images, labels).plan


# Reduction --------------------------------------------------------------------------------------------------

DROPPED = {"notes", "measured", "chart"}
"""Prose, and what only a run tells."""

NAMES_ONLY = {"left_alone", "not_swapped", "results"}
"""Pairs of a name and a text."""

SIZES_ONLY = {"own"}
"""Pairs of a text and bytes."""

DIGITS = 6
"""Significant digits of times and ratios."""


def reduced(plan):
    """Reduce a plan to numbers and names, without prose."""
    return _reduced(json.loads(plan.to_json()))


def _reduced(value):
    if isinstance(value, dict):
        return {key: _field(key, item) for key, item in value.items() if key not in DROPPED}
    if isinstance(value, list):
        return [_reduced(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _field(key, value):
    """Reduce one field of a plan."""
    if key in NAMES_ONLY:
        return [_name(name) for name, _ in value]
    if key in SIZES_ONLY:
        return [size for _, size in value]
    if key == "largest":  # Such as `conv1 (Conv2DBackpropFilter, backward)`.
        return [[name.partition(" (")[0], size] for name, size in value]
    if key == "controls":  # A text where no operation is meant.
        return [name if " " not in name else "-" for name in value]
    if key == "timeline":
        return {"ops": len(value), "names": digest([name for name, _ in value]), "bytes": digest([b for _, b in value])}
    if key == "progress":
        return digest(_reduced(value))
    return _reduced(value)


def _name(text):
    """Take the names out of such a text as `layer 'mean' (GlobalAveragePooling2D)`; operations have no quotes."""
    return " ".join(re.findall(r"'([^']+)'", text)) or text


def digest(values):
    """Hash a list."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


# Golden files -----------------------------------------------------------------------------------------------

WIDTH = 110


def text_of(value, indent=0):
    """Write JSON with short lists and mappings in one line each, for readable diffs of small files."""
    line = json.dumps(value)
    if not value or not isinstance(value, (dict, list)) or len(line) + indent <= WIDTH:
        return line
    pairs = value.items() if isinstance(value, dict) else [(None, item) for item in value]
    parts = [("" if key is None else f"{json.dumps(key)}: ") + text_of(item, indent + 1) for key, item in pairs]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    pad = "\n" + " " * (indent + 1)
    return begin + pad + f",{pad}".join(parts) + "\n" + " " * indent + end


def stored(path):
    """Read a golden file: a reduced plan for each label; nothing if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def store(case, value):
    """Write the reduced plan of a case into the golden file of its net, and drop labels that no case has."""
    plans = stored(case.path) | {case.label: value}
    labels = [one.label for one in CASES if one.path == case.path]
    case.path.parent.mkdir(exist_ok=True)
    kept = {label: plans[label] for label in labels if label in plans}
    case.path.write_text(text_of(kept) + "\n", encoding="utf-8")
