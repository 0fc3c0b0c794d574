"""Shared code of the training examples: options, the run and its comparison, errors as one line."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

    import tflms_sft

# TensorFlow reads it when it is imported, which is why these examples import it (and Keras) inside of functions.
# That also keeps --help and most errors from waiting for it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

TIERS = ("auto", "host", "disk")
MAX_SEED = 2**32 - 1  # Limit of NumPy.


class UserError(Exception):
    """Something that the user can put right; shown as one line, without a traceback."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """Result of one training.

    Attributes:
        losses: Of each epoch.
        weights: After the last step.
        plan: What was done to the step; None where it ran as it was.
        measured: Peak of a step; None where it is not known.
    """

    losses: list[float]
    weights: list[np.ndarray]
    plan: tflms_sft.Plan | None
    measured: tflms_sft.Measurement | None


# ----------------------------------------------------------------------------------------------------------
# The command line.


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Returns a `type` for argparse: whole numbers from `least` to `most`."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}. Received: {text}")
        return number

    return parse


def new_parser(example: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of an example; its description is printed as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m examples.{example}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_options(parser: argparse.ArgumentParser, *, batch_size: int, epochs: int, steps: int | None) -> None:
    """Adds the options that all examples have.

    Args:
        parser: Where they go.
        batch_size: Default.
        epochs: Default.
        steps: Default; None trains on all of the data in each epoch.
    """
    positive = whole_number(1)
    all_data = "all of the data" if steps is None else "%(default)s"
    training = parser.add_argument_group("training").add_argument
    training("--batch-size", type=positive, default=batch_size, metavar="N", help="default: %(default)s")
    training("--epochs", type=positive, default=epochs, metavar="N", help="default: %(default)s")
    training("--steps", type=positive, default=steps, metavar="N", help=f"steps of an epoch (default: {all_data})")
    training("--seed", type=whole_number(0, MAX_SEED), default=0, metavar="N", help="default: %(default)s")
    memory = parser.add_argument_group("memory, without which the step runs as it is").add_argument
    memory("--memory-budget", metavar="BYTES", help='train within this, such as "2GiB", by tiles or swaps')
    memory("--lms", action="store_true", help="swap all activations out of memory until they are read (LMS)")
    memory("--tier", choices=TIERS, help="where they go (default: host beside a GPU, else disk)")
    memory("--spill-dir", metavar="DIR", help="where the disk tier writes (default: the directory for temporary files)")
    memory("--compare", action="store_true", help="train plain as well, and compare losses and weights")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program where options do not go together."""
    for name in ("tier", "spill_dir"):
        if getattr(options, name) and rewriting_name(options) is None:
            parser.error(f"--{name.replace('_', '-')} says where to swap to: give --lms or --memory-budget as well")
    if options.tier == "host" and options.spill_dir:
        parser.error("--spill-dir is for the disk tier: leave out --tier host")
    if options.spill_dir and not os.path.isdir(options.spill_dir):
        parser.error(f"--spill-dir: no such directory. Received: {options.spill_dir}")
    if options.compare and rewriting_name(options) is None:
        parser.error("--compare compares with plain training: give --lms or --memory-budget as well")


def rewriting_name(options: argparse.Namespace) -> str | None:
    """Returns what the memory options ask for, None where they ask for nothing."""
    if options.memory_budget:
        return "the budget"
    return "swapping" if options.lms else None


def rewriting_callback(options: argparse.Namespace) -> keras.callbacks.Callback | None:
    """Returns the callback for the memory options, None where they ask for nothing.

    Raises:
        UserError: For a value that it refuses.
    """
    import tflms_sft

    try:
        # What needs least memory; how many tensors, and how early, a budget finds out by itself.
        swaps = {"tier": options.tier or "auto", "spill_dir": options.spill_dir, "ctrld_strategy": "direct_order"}
        swaps |= {"fuse_swapins": True, "max_in_flight": 1}
        if options.memory_budget:
            text = options.memory_budget
            budget = int(text) if text.isdecimal() else text
            return tflms_sft.MemoryBudget(budget, swap=tflms_sft.LMSParams(**swaps))
        if options.lms:
            return tflms_sft.LMS(**swaps)
    except ValueError as error:
        raise UserError(str(error)) from None
    return None


# ----------------------------------------------------------------------------------------------------------
# Training.


def train(
    build: Callable[[], keras.Model], batches: Callable[[], tf.data.Dataset], options: argparse.Namespace
) -> None:
    """Trains as the options say, and prints the losses and what the step took.

    Args:
        build: Makes the compiled model.
        batches: Makes the data, in the same order each time that the seed is set.
        options: The command line.

    Raises:
        UserError: The memory options cannot be met, or there is too little memory or disk.
    """
    callback = rewriting_callback(options)
    # Plain training comes last: a process in which something else was trained has more fragmented memory.
    chosen = _fit(build, batches, options, callback)
    plain = chosen if callback is None else None
    if options.compare:
        print("The same steps plain:", flush=True)
        plain = _fit(build, batches, options, None)
        print(difference_line(chosen, plain))
    print(memory_line(None if callback is None else chosen, plain, rewriting_name(options)))


def _fit(
    build: Callable[[], keras.Model],
    batches: Callable[[], tf.data.Dataset],
    options: argparse.Namespace,
    callback: Any,
) -> Trained:
    """Trains a new model."""
    import keras
    import tensorflow as tf

    import tflms_sft

    keras.backend.clear_session()
    keras.utils.set_random_seed(options.seed)
    model, data = build(), batches()
    try:
        history = model.fit(
            data,
            epochs=options.epochs,
            steps_per_epoch=options.steps,
            callbacks=[callback] if callback else [],
            shuffle=False,  # the data sets come shuffled
            verbose=2,
        )
        weights = model.get_weights()
        if callback is not None:
            plan, measured = callback.plan, callback.plan.measured
        else:
            # The callback measures its own first step. For a plain one `measure` runs another, and undoes it.
            plan, measured = None, tflms_sft.measure(tf.function(model.train_step), next(iter(data)))
    except (tflms_sft.RewriteError, tf.errors.OpError, MemoryError) as error:
        line = explained(error)
        if line is None:
            raise
        raise UserError(line) from error
    return Trained(history.history["loss"], weights, plan, measured)


def explained(error: BaseException) -> str | None:
    """Returns what the user has to know of an error in a training step, None where this is not known."""
    import tensorflow as tf

    import tflms_sft

    if isinstance(error, tflms_sft.RewriteError):
        return str(error)
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)):
        return "out of memory. Try --lms, or --memory-budget with less than the step just found, or smaller batches."
    spilled = re.search(r"SpillError: (.+)", str(error))  # raised inside of the step, in TensorFlow's words
    return spilled.group(1) if spilled else None


# ----------------------------------------------------------------------------------------------------------
# What is printed at the end.


def difference_line(chosen: Trained, plain: Trained) -> str:
    """Says how far two trainings are apart."""
    import numpy as np

    losses = max(abs(a - b) for a, b in zip(chosen.losses, plain.losses, strict=True))
    pairs = zip(chosen.weights, plain.weights, strict=True)
    weights = max(float(np.abs(a - b).max(initial=0)) for a, b in pairs)
    same = " (the same bits)" if losses == weights == 0 else ""
    return f"Largest difference from plain training: losses {losses:.2g}, weights {weights:.2g}{same}"


def memory_line(chosen: Trained | None, plain: Trained | None, name: str | None) -> str:
    """Says what a step takes.

    Args:
        chosen: The training with a memory option; None if there was none.
        plain: The plain training; None if there was none.
        name: What the memory option is called.
    """
    predicted = chosen.plan.original.peak_bytes if chosen and chosen.plan else None
    parts = [f"plain {_peaks(predicted, plain)}"]
    if chosen and chosen.plan:
        parts.append(f"with {name} {_peaks(chosen.plan.predicted.peak_bytes, chosen)}")
    return f"Peak memory of a training step: {'; '.join(parts)}"


def _peaks(predicted: int | None, run: Trained | None) -> str:
    """Says the peaks that are known: predicted, and measured if there was a run."""
    words = [] if predicted is None else [f"{mebibytes(predicted)} predicted"]
    if run is not None:
        words.append(f"{mebibytes(run.measured.peak_bytes)} measured" if run.measured else "not measured")
    return ", ".join(words)


def mebibytes(nbytes: int) -> str:
    """Returns a size in MiB."""
    return f"{nbytes / 2**20:,.0f} MiB"


# ----------------------------------------------------------------------------------------------------------
# Beginning and end of the program.


def command(main: Callable[[], None]) -> int:
    """Runs a program.

    Returns:
        Its exit code: 2 after an error that the user can put right, 130 after Ctrl-C.
    """
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    return 0
