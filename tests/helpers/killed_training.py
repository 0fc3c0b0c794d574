"""A training with images and tensors in files, which goes on where it was killed; a helper, no test."""

import os
from pathlib import Path
from typing import Any

SHAPE = (512, 384, 3)
BUDGET = 32_000_000


def build(shape: tuple[int, ...]) -> Any:
    """Return a network with batch normalisation that reads its image and its mask from zarr arrays."""
    import keras

    import tflms_sft

    layers = keras.layers
    keras.utils.set_random_seed(0)
    paths = keras.Input((), dtype="string")
    x = layers.Rescaling(1 / 255)(tflms_sft.ImageReader("zarr", shape)(paths))
    for filters in (4, 4, 4, 6):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(x)))
    masks = tflms_sft.ImageReader("zarr", shape[:2])
    model = tflms_sft.ReadingModel(paths, layers.Conv2D(3, 1)(x), labels=masks)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def train(folder: str, steps: int, connection: Any = None) -> None:
    """Train until the model has taken some steps, and save its weights after each one.

    Args:
        folder: Folder of `image.zarr` and `mask.zarr`, of the subfolder `spill`, and of the weights.
        steps: Number of steps, those of earlier processes included.
        connection: Receives the number of steps when each one begins.
    """
    import keras
    import tensorflow as tf

    import tflms_sft
    from rewriters.emission import file_buffers

    file_buffers.MIN_FILE_BYTES = 2**14
    os.environ["TFLMS_SFT_PLAN_CACHE"] = str(Path(folder).parent / "plans")
    model, weights, unfinished = build(SHAPE), Path(folder, "saved.weights.h5"), Path(folder, "new.weights.h5")
    if weights.exists():
        model.load_weights(weights)

    class Saving(keras.callbacks.Callback):
        """Tells the parent of each step, and saves weights so that a kill leaves the old or the new ones."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if connection is not None:
                connection.send(epoch)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            model.save_weights(unfinished)
            os.replace(unfinished, weights)

    swap = tflms_sft.LMSParams(tier="disk", spill_dir=Path(folder, "spill"), min_bytes=0)
    budget = tflms_sft.MemoryBudget(BUDGET, swap=swap, verbose=0)
    paths = [str(Path(folder, name)) for name in ("image.zarr", "mask.zarr")]
    data = tf.data.Dataset.from_tensor_slices(([paths[0]], [paths[1]])).batch(1, drop_remainder=True)
    begin = int(model.optimizer.iterations)
    model.fit(data, initial_epoch=begin, epochs=steps, verbose=0, callbacks=[budget, Saving()])
    assert begin == steps or budget.plan.file_bytes, budget.plan
