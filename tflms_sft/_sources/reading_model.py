"""A model whose labels lie in files."""

from __future__ import annotations

from typing import Any

import keras

from tflms_sft._sources.image_reader import ImageReader

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
        labels: A reader, or a structure of readers with the same structure as the labels. `None` where labels are
            arrays.
        sample_weights: Readers of the sample weights, likewise.
        name: Name of the model.

    `keras.models.clone_model` returns a plain model without the readers.

    Attributes:
        label_readers: Readers of the labels.
        weight_readers: Readers of the sample weights.
    """

    def __init__(
        self, inputs: Any, outputs: Any, *, labels: Any = None, sample_weights: Any = None, name: str | None = None
    ) -> None:
        super().__init__(inputs=inputs, outputs=outputs, name=name)
        for argument, readers in (("labels", labels), ("sample_weights", sample_weights)):
            for reader in keras.tree.flatten(readers):
                if reader is not None and not isinstance(reader, ImageReader):
                    raise TypeError(f"`{argument}` must be readers. Received: {argument}={readers!r}.")
        self.label_readers = labels
        self.weight_readers = sample_weights
        self._latest: tuple[Any, ...] | None = None

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
        keys = (y, sample_weight)
        y, sample_weight = self._images(*keys, training)
        self._latest = (keys, (y, sample_weight))
        return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Update and return the metrics of predictions for labels in files.

        Args:
            x: Inputs.
            y: As for `compute_loss`.
            y_pred: Predictions.
            sample_weight: As for `compute_loss`.
        """
        latest, self._latest = self._latest, None
        if latest is not None and latest[0][0] is y and latest[0][1] is sample_weight:  # Read once for both.
            y, sample_weight = latest[1]
        else:
            y, sample_weight = self._images(y, sample_weight, False)
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def _images(self, y: Any, sample_weight: Any, training: bool) -> tuple[Any, Any]:
        """Return the images of labels and sample weights in files."""
        return _images(self.label_readers, y, training), _images(self.weight_readers, sample_weight, training)

    def get_config(self) -> dict[str, Any]:
        """Return the layers and the readers."""
        layers = keras.Model(self.input, self.output, name=self.name)
        parts = {"layers": layers, "labels": self.label_readers, "sample_weights": self.weight_readers}
        return {key: keras.saving.serialize_keras_object(part) for key, part in parts.items()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> ReadingModel:
        """Return a model of the layers and readers of `get_config`.

        Args:
            config: The layers and the readers.
            custom_objects: Classes by name that the layers need.
        """
        parts = {
            key: keras.saving.deserialize_keras_object(part, custom_objects=custom_objects)
            for key, part in config.items()
        }
        layers = parts.pop("layers")
        return cls(layers.input, layers.output, name=layers.name, **parts)


def _images(readers: Any, keys: Any, training: bool) -> Any:
    """Return a structure in which images replace the keys that have a reader."""
    if readers is None or keys is None:
        return keys
    if isinstance(readers, dict):
        return {name: _images(readers.get(name), part, training) for name, part in keys.items()}
    if isinstance(readers, (list, tuple)) and not isinstance(keys, (list, tuple)):
        (readers,) = readers
    if isinstance(readers, (list, tuple)):
        return type(keys)(_images(reader, part, training) for reader, part in zip(readers, keys, strict=True))
    return readers(keys, training=training)
