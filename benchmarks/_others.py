"""Training methods of `benchmarks.compare`, each in a child process.

Each method is used as its documentation says. Blocks are the layers between pools or residual sums. `RematScope` is
open while the network is built. XLA is off, as in plain training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks import _child, _compare, _meter, _nets, _torch_nets

if TYPE_CHECKING:
    import keras

BLOCK_ENDS = {"vgg16": ("pool",), "vgg19": ("pool",), "darknet19": ("pool",), "resnet50": ("_out", "pool1_pool")}
"""Texts in the names of layers that end a block."""

MIN_REMAT_ELEMENTS = 2**20
"""Elements of an output for which `RematScope("larger_than")` recomputes the activations of a layer."""


def train(*, spec: dict[str, Any], way: str, budget_bytes: int, save: str, emit: _child.Emit) -> dict[str, Any]:
    """Train for the warm-up and the counted steps; return the figures, and save the arrays to compare.

    Args:
        spec: Fields of a `_compare.Spec`.
        way: Training method, a key of `WAYS`.
        budget_bytes: Budget of the only method that has one.
        save: NumPy file for gradients, accumulated by momentum, and moving statistics; empty for none.
        emit: Called with a dict for each step.
    """
    import numpy as np

    chosen = _compare.Spec(**spec)
    meter, arrays, figures = WAYS[way](chosen, budget_bytes, emit)
    if save:
        np.savez(save, **arrays)
    return {
        "net_rss_bytes": max(meter.net_rss),
        "step_seconds": meter.seconds,
        "losses": meter.losses,
        **figures,
    }


Trained = tuple[_meter.StepMeter, dict[str, Any], dict[str, Any]]
"""Measurements, arrays to compare with those of plain training, and further figures."""


# With Keras ---------------------------------------------------------------------------------------------------


def _fit(spec: _compare.Spec, model: keras.Model, emit: _child.Emit, callbacks: list[Any] | None = None) -> Trained:
    """Train a compiled model with `fit`."""
    import keras

    meter = _meter.StepMeter(spec.warmup, spec.device, emit)
    before = {name: v.numpy() for name, v in _statistics(model)}
    hooks = keras.callbacks.LambdaCallback(on_train_batch_begin=meter.begin, on_train_batch_end=meter.end)
    meter.start()
    model.fit(
        _compare.batches(_nets.TASKS[spec.net].noise(spec.image_size, spec.batch)),
        epochs=spec.warmup + spec.steps,
        steps_per_epoch=1,
        callbacks=[*(callbacks or []), hooks],
        shuffle=False,
        verbose=0,
    )
    slots = [v for v in model.optimizer.variables if "momentum" in v.path]
    arrays = {f"gradient/{number}": v.numpy() for number, v in enumerate(slots)}
    arrays |= {f"statistic/{name}": v.numpy() - before[name] for name, v in _statistics(model)}
    return meter, arrays, {}


def _statistics(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Yield moving means and variances with their numbers."""
    for number, v in enumerate(v for v in model.non_trainable_variables if "moving_" in v.path):
        yield str(number), v


def _plain(spec: _compare.Spec, budget_bytes: int, emit: _child.Emit) -> Trained:
    del budget_bytes
    return _fit(spec, _nets.TASKS[spec.net].compiled(spec.image_size), emit)


def _budget(spec: _compare.Spec, budget_bytes: int, emit: _child.Emit) -> Trained:
    import tflms_sft

    callback = tflms_sft.MemoryBudget(budget_bytes, verbose=0)
    meter, arrays, _ = _fit(spec, _nets.TASKS[spec.net].compiled(spec.image_size), emit, [callback])
    plan = callback.plan
    return meter, arrays, {"plan": plan.headline(), "predicted_time_ratio": plan.predicted.time_ratio}


def _recompute_grad(spec: _compare.Spec, budget_bytes: int, emit: _child.Emit) -> Trained:
    """Train a model with `tf.recompute_grad` around each block."""
    del budget_bytes
    import keras
    import tensorflow as tf

    task = _nets.TASKS[spec.net]
    parts = _blocks(task.compiled(spec.image_size), BLOCK_ENDS[spec.net])

    class Recomputing(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = parts[:-1], parts[-1]

        def call(self, images: Any, training: bool = False) -> Any:
            x = images
            for block in self.blocks:
                x = tf.recompute_grad(functools.partial(block, training=training))(x)
            return self.head(x, training=training)

    model = Recomputing()
    task.compile(model)
    return _fit(spec, model, emit)


def _blocks(model: keras.Model, ends: tuple[str, ...]) -> list[keras.Model]:
    """Return the network as one model per block, and one for the layers after the last block."""
    import keras

    cuts = [layer.output for layer in model.layers if any(end in layer.name for end in ends)]
    edges = [model.input, *cuts, model.output]
    return [keras.Model(begin, end) for begin, end in zip(edges, edges[1:], strict=False)]


def _remat(mode: str, spec: _compare.Spec, budget_bytes: int, emit: _child.Emit) -> Trained:
    """Train with Keras's `RematScope`, in which layers are built that recompute their activations."""
    del budget_bytes
    import keras

    with keras.RematScope(mode=mode, output_size_threshold=MIN_REMAT_ELEMENTS):
        model = _nets.TASKS[spec.net].compiled(spec.image_size)
        return _fit(spec, model, emit)


# With PyTorch -------------------------------------------------------------------------------------------------


class _TorchMeter(_meter.StepMeter):
    """Meter without the statistics of TensorFlow's allocator."""

    def _reset_allocator_peak(self) -> None:
        pass

    def _allocator_peak(self) -> int:
        return 0


def _torch(checkpointed: bool, spec: _compare.Spec, budget_bytes: int, emit: _child.Emit) -> Trained:
    """Train with PyTorch, plain or with `checkpoint_sequential` and a segment for each block."""
    del budget_bytes
    import torch
    from torch.utils.checkpoint import checkpoint_sequential

    torch.manual_seed(_nets.SEED)
    blocks, head = _torch_nets.NETS[spec.net]()
    images, labels = _nets.TASKS[spec.net].noise(spec.image_size, spec.batch)
    x, y = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels).long()
    parameters = [*blocks.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=_nets.LEARNING_RATE, momentum=0.9)
    before = {name: value.clone() for name, value in blocks.named_buffers() if "running_" in name}
    meter = _TorchMeter(spec.warmup, spec.device, emit)
    meter.start()
    for number in range(spec.warmup + spec.steps):
        meter.begin(number)
        optimizer.zero_grad()
        features = checkpoint_sequential(blocks, len(blocks), x, use_reentrant=False) if checkpointed else blocks(x)
        loss = torch.nn.functional.cross_entropy(head(features), y)
        loss.backward()
        optimizer.step()
        meter.end(number, {"loss": loss.item()})
        del features, loss
    slots = [optimizer.state[p]["momentum_buffer"] for p in parameters]
    arrays = {f"gradient/{number}": slot.numpy() for number, slot in enumerate(slots)}
    after = {name: value for name, value in blocks.named_buffers() if name in before}
    arrays |= {f"statistic/{name}": (value - before[name]).numpy() for name, value in after.items()}
    return meter, arrays, {}


WAYS: dict[str, Callable[[_compare.Spec, int, _child.Emit], Trained]] = {
    "plain": _plain,
    "budget": _budget,
    "recompute_grad": _recompute_grad,
    "remat full": functools.partial(_remat, "full"),
    "remat activations": functools.partial(_remat, "activations"),
    "remat larger_than": functools.partial(_remat, "larger_than"),
    "torch": functools.partial(_torch, False),
    "torch checkpoint": functools.partial(_torch, True),
}
