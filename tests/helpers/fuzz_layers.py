"""Random networks, drawn line by line: what a line may be depends on the shapes so far."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

LARGEST = 20
"""Rows along an axis, so that a case takes a second or two."""


@dataclasses.dataclass
class Drawing:
    """A network as far as it is drawn."""

    draw: Callable[[Any], Any]
    rank: int
    space: dict[str, Any]
    lines: list[str]
    above: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    """What each tensor depends on."""
    names: list[str] = dataclasses.field(default_factory=list)
    """Of tensors that are what a layer makes."""

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def choice(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def counts(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.number(low, high) for _ in range(self.rank))

    @property
    def ends(self) -> list[str]:
        """Tensors that nothing reads."""
        used = set().union(*self.above.values())
        return [name for name in self.tensors if name not in used]

    @property
    def tensors(self) -> list[str]:
        return [name for name in self.space if name[0] == "x"]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.space[name].shape[1:])

    def source(self) -> str:
        """The last tensor, mostly."""
        return self.choice(self.tensors[-1], self.tensors[-1], self.choice(*self.tensors))

    def like(self, name: str, channels: bool = True) -> str | None:
        """Another tensor of the same size."""
        end = None if channels else -1
        same = [other for other in self.tensors if self.shape(other)[:end] == self.shape(name)[:end]]
        return self.choice(*same)

    def add(self, text: str) -> bool:
        """Add a line if Keras takes it and what comes out is of a size to work with."""
        name = f"x{len(self.tensors)}"
        end = text.rfind(")(")
        if text.startswith("layers.") and end > 0 and "(" not in text[end + 2 :]:
            text = f"{text[:end]}, name={name!r}{text[end:]}".replace("(, ", "(")
            self.names.append(name)
        try:
            exec(f"{name} = {text}", self.space)
        except (ValueError, TypeError, ZeroDivisionError):
            self.space.pop(name, None)
            self.names = [other for other in self.names if other != name]
            return False
        shape = self.shape(name)
        if len(shape) != self.rank + 1 or not all(1 <= rows <= LARGEST for rows in shape) or shape[-1] > 8:
            del self.space[name]
            self.names = [other for other in self.names if other != name]
            return False
        self.lines.append(f"{name} = {text}")
        reads = set(re.findall(r"\bx\d+\b(?!')", text))
        self.above[name] = reads.union(*(self.above[other] for other in reads))
        return True


def _conv(d: Drawing, x: str) -> str:
    dilated = d.choice(False, False, True)
    size = f"strides={d.counts(1, 1) if dilated else d.counts(1, 2)}, dilation_rate={d.counts(1, 3) if dilated else 1}"
    padding = d.choice("same", "valid")
    penalty = d.choice(*[""] * 7, ", activity_regularizer='l2'")
    return f"layers.Conv{d.rank}D({d.number(1, 4)}, {d.counts(1, 3)}, {size}, padding={padding!r}{penalty})({x})"


def _shared(d: Drawing, x: str) -> str:
    """A layer that is called twice."""
    channels, other = d.shape(x)[-1], d.like(x)
    kinds = [f"layers.Conv{d.rank}D({channels}, 3, padding='same', bias_initializer='normal')"]
    kinds += ["layers.BatchNormalization()", "layers.BatchNormalization(trainable=False)"]
    sign = d.choice("+", "*", "-" if other != x else "+")  # Nothing but zeros can be normalised to anything.
    return f"(lambda f: f({x}) {sign} f({other}))({d.choice(*kinds)})"


def _stopped(d: Drawing, x: str) -> str:
    return f"{x} {d.choice('+', '*')} keras.ops.stop_gradient({d.like(x)})"


def _grouped(d: Drawing, x: str) -> str:
    groups = d.choice(*(n for n in range(1, 9) if d.shape(x)[-1] % n == 0))
    return f"layers.Conv{d.rank}D({groups * d.number(1, 2)}, {d.counts(1, 3)}, groups={groups}, padding='same')({x})"


def _dense(d: Drawing, x: str) -> str:
    return f"layers.Dense({d.number(1, 4)}, activation={d.choice(None, 'relu', 'tanh')!r})({x})"


def _depthwise(d: Drawing, x: str) -> str | None:
    if d.rank == 3:
        return None
    kind = d.choice("DepthwiseConv{}D({}", "SeparableConv{}D(3, {}").format(d.rank, d.number(1, 3))
    return f"layers.{kind}, strides={d.number(1, 2)}, padding={d.choice('same', 'valid')!r})({x})"


def _transposed(d: Drawing, x: str) -> str:
    padding = d.choice("same", "valid")
    return f"layers.Conv{d.rank}DTranspose(3, {d.counts(1, 3)}, strides={d.counts(1, 2)}, padding={padding!r})({x})"


def _pool(d: Drawing, x: str) -> str | None:
    if d.rank == 3:
        return None  # TensorFlow pools no volumes in float64.
    size = f"{d.counts(1, 3)}, strides={d.counts(1, 2)}".replace("(1,)", "1").replace("(2,)", "2").replace("(3,)", "3")
    return f"layers.{d.choice('Max', 'Average')}Pooling{d.rank}D({size}, padding={d.choice('same', 'valid')!r})({x})"


def _up(d: Drawing, x: str) -> str:
    return f"layers.UpSampling{d.rank}D({d.number(1, 3) if d.rank == 1 else d.counts(1, 2)})({x})"


def _resized(d: Drawing, x: str) -> str | None:
    size = f"{d.number(2, 12)}, {d.number(2, 12)}"
    return f"layers.Resizing({size}, interpolation='nearest')({x})" if d.rank == 2 else None


def _padded(d: Drawing, x: str) -> str:
    sides = tuple((d.number(0, 2), d.number(0, 2)) for _ in range(d.rank))
    return f"layers.{d.choice('ZeroPadding', 'Cropping')}{d.rank}D({sides[0] if d.rank == 1 else sides})({x})"


def _norm(d: Drawing, x: str) -> str:
    """Of several numbers: one alone becomes zero but for rounding, or its sign, and what follows has no gradient."""
    *pixels, channels = d.shape(x)
    kinds = ["BatchNormalization()", "BatchNormalization()"]
    if channels > 1:
        kinds += ["LayerNormalization()", "RMSNormalization()"]
    if math.prod(pixels) > 1:
        kinds += ["GroupNormalization(-1)", f"LayerNormalization(axis={tuple(range(1, d.rank + 2))})"]
    return f"layers.{d.choice(*kinds)}({x})"


def _active(d: Drawing, x: str) -> str:
    return f"layers.Activation({d.choice('relu', 'silu', 'tanh', 'gelu', 'softplus', 'leaky_relu')!r})({x})"


def _sloped(d: Drawing, x: str) -> str:
    axes = tuple(axis for axis in range(1, d.rank + 1) if d.choice(True, False))
    return f"layers.PReLU('random_normal', shared_axes={axes or None})({x})"


def _excited(d: Drawing, x: str) -> str:
    pool = d.choice("Average", "Max")
    channels = d.shape(x)[-1]
    return f"{x} * layers.Dense({channels}, 'sigmoid')(layers.Global{pool}Pooling{d.rank}D(keepdims=True)({x}))"


def _joined(d: Drawing, x: str) -> str:
    other, kind = d.like(x, channels=False), d.choice("Concatenate", "Add", "Multiply", "Maximum")
    return f"layers.{kind}()([{x}, {other}])"


def _masked(d: Drawing, x: str) -> str:
    """Values that are no floating point numbers; no comparison with zero, which other sums may miss by a bit."""
    mask = f"{d.like(x)} > 0.123"
    return d.choice(f"{x} * keras.ops.cast({mask}, {x}.dtype)", f"keras.ops.where({mask}, {x}, {d.like(x)})")


def _dropped(d: Drawing, x: str) -> str:
    kind = d.choice("Dropout(0.3", f"SpatialDropout{d.rank}D(0.3", "GaussianNoise(0.1")
    return f"layers.{kind}, seed={d.number(0, 99)})({x})"


def _attention(d: Drawing, x: str) -> str:
    """Attention along all axes of an image; of a sequence, also of other kinds and with other or fewer keys."""
    axes, channels = tuple(range(1, d.rank + 1)), d.shape(x)[-1]
    memory = d.choice(x, x, d.like(x))
    if d.rank > 1:
        return f"layers.MultiHeadAttention({d.number(1, 2)}, 2, attention_axes={axes})({x}, {memory})"
    causal = f", use_causal_mask={d.choice(True, False)}" if memory == x else ""
    kind = d.choice("heads", "heads", "groups", "dot", "additive", "fewer keys", "mask")
    if kind == "groups":
        return f"layers.GroupQueryAttention(2, {d.number(1, 2) * 2}, {d.number(1, 2)})({x}, {memory}{causal})"
    if kind in ("dot", "additive"):
        name = "Attention" if kind == "dot" else "AdditiveAttention"
        return f"layers.{name}()([{x}, {memory}]{causal})"
    dropout = d.choice("", "", f", dropout=0.2, seed={d.number(0, 99)}")
    if kind == "fewer keys":
        memory, causal = f"layers.Conv1D({channels}, 2, 2, padding='same')({x})", ""
    if kind == "mask" and memory == x:
        causal += f", attention_mask={x}[:, None, :, 0] < 0.789"
    return f"layers.MultiHeadAttention({d.number(1, 2)}, {d.number(1, 3)}{dropout})({x}, {memory}{causal})"


def _transformer(d: Drawing, x: str) -> str:
    """A layer of a transformer: attention and a multilayer perceptron around normalised tokens."""
    channels = d.shape(x)[-1]
    attention = (
        f"layers.MultiHeadAttention(2, 2{'' if d.rank == 1 else f', attention_axes={tuple(range(1, d.rank + 1))}'})"
    )
    attended = f"(lambda x: x + (lambda y: {attention}(y, y))(layers.LayerNormalization()(x)))({x})"
    perceptron = f"layers.Dense({channels})(layers.Dense(6, 'gelu')(x))"
    return f"(lambda x: x + {perceptron})({attended})"


def _windows(d: Drawing, x: str) -> str | None:
    """Attention in windows, which may be shifted."""
    *sizes, channels = d.shape(x)
    if d.rank != 2 or any(size % 2 for size in sizes):
        return None
    counts = [size // 2 for size in sizes]
    shift = d.number(0, 1)
    windows = f"keras.ops.reshape(x, (-1, {counts[0]}, 2, {counts[1]}, 2, {channels}))"
    windows = f"keras.ops.reshape(keras.ops.transpose({windows}, (0, 1, 3, 2, 4, 5)), (-1, 4, {channels}))"
    attention = "layers.MultiHeadAttention(2, 2)"
    image = f"keras.ops.reshape(x, (-1, {counts[0]}, {counts[1]}, 2, 2, {channels}))"
    image = (
        f"keras.ops.reshape(keras.ops.transpose({image}, (0, 1, 3, 2, 4, 5)), (-1, {sizes[0]}, {sizes[1]}, {channels}))"
    )
    back, forth = d.choice(("1, 1", "-1, 1"), ("(1, 1), (1, 2)", "(-1, -1), (1, 2)")) if shift else ("", "")
    shifted = f"keras.ops.roll({x}, {forth})" if shift else x
    made = f"(lambda x: {image})((lambda x: {attention}(x, x))((lambda x: {windows})({shifted})))"
    return f"{x} + keras.ops.roll({made}, {back})" if shift else f"{x} + {made}"


def _sliced(d: Drawing, x: str) -> str:
    cuts = [f"slice({d.number(0, 2)}, {d.choice(None, -1)}, {d.number(1, 2)})" for _ in range(d.rank)]
    return f"{x}[slice(None), {', '.join(cuts)}]"


LAYERS = {
    _conv: 6,
    _grouped: 1,
    _dense: 1,
    _depthwise: 1,
    _transposed: 1,
    _pool: 2,
    _up: 1,
    _resized: 1,
    _padded: 1,
    _norm: 4,
    _active: 4,
    _sloped: 1,
    _excited: 1,
    _shared: 1,
    _stopped: 1,
    _joined: 2,
    _masked: 1,
    _attention: 2,
    _transformer: 1,
    _windows: 2,
    _dropped: 1,
    _sliced: 1,
}
"""What is drawn, and how often."""

ATTENTION = (_attention, _transformer, _windows)
"""Layers in which every pixel may depend on all others."""
