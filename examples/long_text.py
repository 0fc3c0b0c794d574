"""Trains adapters (LoRA) of a small language model on long texts, plain, within a memory budget, or with swaps.

    pip install keras-hub
    python -m examples.long_text --memory-budget 40MiB --compare
    python -m examples.long_text --text book.txt --length 8192 --rank 0 --memory-budget 2GiB

The model is a Gemma of KerasHub with random weights, and a token is a byte, so that nothing is downloaded. Keras's own
`enable_lora` adds the adapters; with --rank 0 all weights are trained. Without a text it reads the language reference
that comes with Python.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from examples import _training

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

LEARNING_RATE = 1e-3
BYTES = 256
WIDTH, LAYERS, QUERY_HEADS, KEY_HEADS = 64, 2, 4, 1


def build_model(rank: int) -> keras.Model:
    """Returns a decoder that scores the next byte, compiled.

    Raises:
        _training.UserError: KerasHub is not installed.
    """
    import keras

    try:
        from keras_hub.models import GemmaBackbone
    except ImportError as error:
        raise _training.UserError(f"this example needs KerasHub: pip install keras-hub ({error})") from None
    backbone = GemmaBackbone(
        vocabulary_size=BYTES,
        num_layers=LAYERS,
        num_query_heads=QUERY_HEADS,
        num_key_value_heads=KEY_HEADS,
        hidden_dim=WIDTH,
        intermediate_dim=4 * WIDTH,
        head_dim=WIDTH // QUERY_HEADS,
    )
    if rank:
        backbone.enable_lora(rank)
    scores = backbone.token_embedding(backbone.output, reverse=True)
    model = keras.Model(backbone.input, scores, name="long_text")
    model.compile(
        keras.optimizers.Adam(LEARNING_RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # XLA would fuse the plain step's operations, which changes roundings; rewritten steps run without it.
        jit_compile=False,
    )
    return model


def read_bytes(path: Path | None) -> np.ndarray:
    """Returns a text as bytes."""
    import numpy as np

    if path is not None:
        return np.frombuffer(path.read_bytes(), np.uint8)
    from pydoc_data.topics import topics

    return np.frombuffer("\n".join(topics.values()).encode(), np.uint8)


def cut_passages(text: np.ndarray, options: argparse.Namespace) -> tf.data.Dataset:
    """Returns batches of (bytes, the bytes that follow them), for all epochs."""
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(options.seed)
    count = options.epochs * options.steps * options.batch_size
    begins = random.integers(0, len(text) - options.length, size=count)
    passages = tf.constant(text)
    mask = tf.ones([options.length], tf.int32)

    def cut(begin: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        passage = tf.cast(tf.slice(passages, begin[None], [options.length + 1]), tf.int32)
        return {"token_ids": passage[:-1], "padding_mask": mask}, passage[1:]

    return tf.data.Dataset.from_tensor_slices(begins).map(cut).batch(options.batch_size, drop_remainder=True)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = _training.new_parser("long_text", __doc__)
    add = parser.add_argument_group("text").add_argument
    add("--text", type=Path, metavar="FILE", help="any text (default: the reference of the Python language)")
    add("--length", type=_training.whole_number(2), default=1024, metavar="N", help="bytes (default: %(default)s)")
    help_text = "rank of the adapters; 0 trains all weights (default: %(default)s)"
    add("--rank", type=_training.whole_number(0), default=4, metavar="N", help=help_text)
    _training.add_options(parser, batch_size=1, epochs=3, steps=4)
    options = parser.parse_args(arguments)
    _training.check_options(parser, options)
    if options.text and not options.text.is_file():
        parser.error(f"--text: no such file. Received: {options.text}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains on the text of the command line, or on Python's reference."""
    options = parse_arguments(arguments)
    text = read_bytes(options.text)
    if len(text) <= options.length:
        raise _training.UserError(f"--length must be less than the {len(text)} bytes of the text")
    print(f"Text of {len(text):,} bytes, passages of {options.length:,}", flush=True)
    build = functools.partial(build_model, options.rank)
    _training.train(build, functools.partial(cut_passages, text, options), options)


if __name__ == "__main__":
    sys.exit(_training.command(main))
