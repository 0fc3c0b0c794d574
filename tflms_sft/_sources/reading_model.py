"""A model whose labels lie in files."""

from __future__ import annotations

from typing import Any

import keras

__all__ = ["ReadingModel"]


@keras.saving.register_keras_serializable("tflms_sft")
class ReadingModel(keras.Model):
    """A Keras model whose labels, sample weights or both are files, which its losses and metrics read by tiles.

    `fit` and `evaluate` receive paths or indices instead of arrays:

        masks = tflms_sft.ImageReader("zarr", shape=(65536, 65536), dtype="uint8")
        model = tflms_sft.ReadingModel(paths, logits, labels=masks)
        model.fit(tf.data.Dataset.from_tensor_slices((image_paths, mask_paths)).batch(1))

    Args:
        inputs: Inputs, as those of `keras.Model`.
        outputs: Outputs.
        labels: Reader of the labels, or a structure of readers like that of the labels, with `None` for labels that
            are no files.
        sample_weights: The same for sample weights.
        name: Name of the model.

    Attributes:
        label_readers: Readers of the labels.
        weight_readers: Readers of the sample weights.
    """

    def __init__(
        self, inputs: Any, outputs: Any, *, labels: Any = None, sample_weights: Any = None, name: str | None = None
    ) -> None:
        super().__init__(inputs=inputs, outputs=outputs, name=name)
        self.label_readers = labels
        self.weight_readers = sample_weights

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Return the loss of predictions for labels in files.

        Args:
            x: Inputs.
            y: Labels, or the keys of those that have a reader.
            y_pred: Predictions.
            sample_weight: Sample weights, or the keys of those that have a reader.
            training: Whether the model is trained.
        """
        y, sample_weight = self._read(y, sample_weight, training)
        return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Update and return the metrics of predictions for labels in files.

        Args:
            x: Inputs.
            y: As for `compute_loss`.
            y_pred: Predictions.
            sample_weight: As for `compute_loss`.
        """
        y, sample_weight = self._read(y, sample_weight)
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def _read(self, y: Any, sample_weight: Any, training: bool = False) -> tuple[Any, Any]:
        """Return the images of labels and sample weights in files."""
        readers = ((self.label_readers, y), (self.weight_readers, sample_weight))
        images, weights = (_images(reader, keys, training) for reader, keys in readers)
        return images, weights

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        readers = {"labels": self.label_readers, "sample_weights": self.weight_readers}
        return {**super().get_config(), **{key: keras.saving.serialize_keras_object(r) for key, r in readers.items()}}


def _images(readers: Any, keys: Any, training: bool) -> Any:
    """Return a structure in which images replace the keys that have a reader."""
    if readers is None or keys is None:
        return keys
    if isinstance(readers, dict):
        return {name: _images(readers.get(name), part, training) for name, part in keys.items()}
    if isinstance(readers, (list, tuple)):
        return type(keys)(_images(reader, part, training) for reader, part in zip(readers, keys, strict=True))
    return readers(keys, training=training)
