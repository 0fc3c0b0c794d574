"""Random Keras networks, rewritten in random ways: the same numbers to 1e-10, or a refusal that says why.

A case is a script. It is drawn line by line, so that what a line may be depends on the shapes so far, and what runs
is what is printed if it fails.

    python tests/helpers/fuzz.py 1000          # so many cases, from a seed that is printed
    python tests/helpers/fuzz.py 1000 42       # from that seed
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis
import keras
import numpy as np
from equivalence import TOLERANCE, Step, error, model_step
from hypothesis import strategies as st

import tflms_sft
from benchmarks._longest_segments import longest_segments
from tflms_sft import AutoParams, SegmentSpec, SFTParams

LARGEST = 20
"""Rows along an axis, so that a case takes a second or two."""

SAY_EVERY = 50
"""Cases after which a long run says how far it is."""

REFUSALS = {
    tflms_sft.SegmentError: (
        "values leave the segment and come back",
        "no path of forward ops leads",
        "no op outside of it reads its results",
        "cannot be tiled",
        "must name tensors that the segment computes",
        "run in tiles",
    ),
    tflms_sft.BudgetError: ("is too small for this step",),
    # Without a convolution or a pool nothing tells how many axes there are.
    ValueError: ("num_tiles` must be at most", "but the tiled tensor has"),
}
"""What may be refused, and the words for it."""

# Layers ---------------------------------------------------------------------------------------------------------


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

# The gradient of a bias before BatchNorm is zero but for rounding, and divided by its own size it would not stay small:
# epsilon is what it is divided by.
OPTIMIZERS = (
    "SGD(0.1)",
    "SGD(0.1, momentum=0.9, nesterov=True)",
    "Adam(0.01, epsilon=0.1, global_clipnorm=1.0)",
    "RMSprop(0.01, epsilon=0.1, clipvalue=0.5)",
    "SGD(0.1, gradient_accumulation_steps=2)",
)

ZERO = 1e-3
"""Part of the largest gradient below which one may be zero but for rounding."""

# Cases ----------------------------------------------------------------------------------------------------------

HEAD = """import keras
from keras import layers

from fuzz import AutoParams, SegmentSpec, SFTParams, compare

keras.config.set_floatx("float64")
keras.utils.set_random_seed(0)
"""


@st.composite
def cases(draw: Any) -> str:
    """The script of a case."""
    keras.backend.clear_session(free_memory=False)
    keras.config.set_floatx("float64")
    rank = draw(st.sampled_from((1, 2, 2, 2, 2, 3)))
    space: dict[str, Any] = {"keras": keras, "layers": keras.layers}
    d = Drawing(draw, rank, space, [], names=["x0"])
    known = draw(st.booleans())
    size = (*d.counts(4, 7 if rank == 3 else 13), d.number(1, 3))
    inputs = draw(st.sampled_from(("x0", "x0", "x0", "x0", "[x0, x1]")))
    for number in range(inputs.count("x")):
        assert d.add(f"keras.Input({size}, batch_size={3 if known else None}, name='x{number}')")
    kinds = [kind for kind, often in LAYERS.items() for _ in range(often)]
    for _ in range(d.number(2, 8)):
        source = d.source()
        text = draw(st.sampled_from(kinds))(d, source)
        if text is not None:
            d.add(text)
    lines = [*d.lines, *_head(d)]
    params = _params(d, known)
    optimizer = f"keras.optimizers.{draw(st.sampled_from(OPTIMIZERS))}"
    if not known and not lines[-1].startswith("y = layers.Activation"):
        # Of a known batch TensorFlow's plain step is not to be compared with: see docs/develop/decisions.md.
        params += draw(st.sampled_from(("", "", "", ", linear=True")))
    call = f"compare(keras.Model({inputs}, y), {optimizer}, {params}, known_batch={known})"
    return "\n".join([HEAD, *lines, call, ""])


def _head(d: Drawing) -> list[str]:
    """Feed unused tensors into the classifier, or the last of them into a loss over pixels."""
    last = d.tensors[-1]
    ends = [name for name in d.ends if name != last] or [last]
    kind = d.choice("classes", "probabilities", "logits")
    size = 3 if kind == "logits" else 2
    pools = [f"layers.Dense({size})(layers.GlobalAveragePooling{d.rank}D()({name}))" for name in ends]
    if kind != "classes":
        gate = f"layers.Reshape({(1,) * d.rank + (size,)})({' + '.join(pools)})"
        pixels = f"layers.Conv{d.rank}D({size}, 1)({last}) + {gate}"
        return [f"y = layers.Activation('sigmoid')({pixels})" if kind == "probabilities" else f"y = {pixels}"]
    return [f"y = {' + '.join([*pools, f'layers.Dense(2)(layers.GlobalMaxPooling{d.rank}D()({last}))'])}"]


def _params(d: Drawing, known: bool) -> str:
    halo = d.choice("recompute", "carry")

    def tiles() -> str:
        counts = d.choice(d.counts(1, 2), d.counts(1, 3), d.counts(1, 5))
        if halo == "carry":  # Rows.
            counts = (d.choice(counts[0], d.number(1, 8)), *([1] * (d.rank - 1)))
        return str((d.number(1, 3), *counts) if d.choice(True, False) else counts)

    kind = d.choice("tiles", "tiles", "tiles", "named", "capacity", "budget")
    if kind in ("budget", "capacity") and not known:
        kind = "tiles"
    if kind == "budget":
        return f"AutoParams(1, swap=False), part={d.choice(0.5, 0.7, 0.9)}"
    if kind == "capacity":
        return f"SFTParams(memory_capacity={d.number(1, 64) * 64}, halo={halo!r})"
    backward = d.choice("None", tiles())
    if kind == "tiles":
        return f"SFTParams(num_tiles={tiles()}, backward_num_tiles={backward}, halo={halo!r})"
    pairs = [(entry, exit_) for exit_ in d.names for entry in d.names if entry in d.above[exit_]]
    entry, exit_ = d.choice(*pairs) if pairs else ("x0", "x0")
    between = [name for name in d.names if name in d.above[exit_] and entry in d.above[name]]
    stored = d.draw(st.lists(st.sampled_from(between), max_size=2, unique=True)) if between else ()
    counts = f"num_tiles={tiles()}, backward_num_tiles={backward}, stored={tuple(stored)}, halo={halo!r}"
    return f"SFTParams(segments=[SegmentSpec({entry!r}, {exit_!r}, {counts})])"


def compare(
    model: Any, optimizer: Any, params: Any, *, known_batch: bool, part: float | None = None, linear: bool = False
) -> str:
    """Train for two steps, plain and rewritten.

    Args:
        model: With two classes as output; or images, of probabilities or, with three channels, of logits.
        optimizer: For it.
        params: How it is rewritten.
        known_batch: Whether the step is traced for 3 images, or for any number.
        part: Of the plain step's peak, which is the budget then.
        linear: Whether the loss is linear in the output, as that of a critic.

    Returns:
        `"exact"`, or the reason why it was refused.

    Raises:
        AssertionError: If anything differs, or if a plan of ours needs more memory than the plain step.
    """
    step = step_for(model, optimizer, known_batch, linear)
    try:
        if part is not None:
            plain = tflms_sft.rewrite(step.concrete_fn, AutoParams("1GiB")).plan.original.peak_bytes
            params = dataclasses.replace(params, memory_budget=int(part * plain / 0.9))
        rewritten = [tflms_sft.rewrite(step.function, params, *step.specs)]
        if part is not None or params.segments == "auto":
            check_saves(rewritten[0].plan)
        if part is None and params.segments == "auto":
            with longest_segments():  # Networks so small are left as they are otherwise.
                rewritten.append(tflms_sft.rewrite(step.function, params, *step.specs))
    except tuple(REFUSALS) as refused:
        reasons = [reason for kind, words in REFUSALS.items() if isinstance(refused, kind) for reason in words]
        found = [reason for reason in reasons if reason in str(refused)]
        assert found, f"{type(refused).__name__}: {refused}"
        return found[0]
    changed = [fast for fast in rewritten if fast.plan.segments]
    want = step.run(step.concrete_fn) if changed else {}
    for fast in changed:
        got = step.run(fast.concrete_function)
        assert list(want) == list(got)
        errors = {name: _off(name, got, want) for name in want}
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < TOLERANCE, f"{worst} differs by {errors[worst]:.1e}\n{fast.plan.summary()}"
    return "exact" if changed else "left as it was"


def check_saves(plan: tflms_sft.Plan) -> None:
    """Refuse a plan that is predicted to need as much as the plain step, or more, if anything is rewritten.

    Raises:
        AssertionError: For such a plan.
    """
    peaks = plan.predicted.peak_bytes, plan.original.peak_bytes
    assert peaks[0] < peaks[1] if plan.segments or plan.swaps else peaks[0] == peaks[1], plan.summary()


def step_for(model: Any, optimizer: Any, known_batch: bool, linear: bool = False) -> Step:
    """A step of training with two batches; arguments as for `compare`."""
    numbers = np.random.default_rng(0)
    shape, batches = model.output.shape[1:], []
    logits = len(shape) > 1 and shape[-1] == 3
    for size in (3, 3 if known_batch else 2):
        target = numbers.integers(0, 3, size=(size, *shape[:-1])) if logits else numbers.integers(0, 2, (size, *shape))
        kind = "int64" if logits else "float64"
        images = [numbers.normal(size=(size, *image.shape[1:])) for image in model.inputs]
        batches.append((*images, target.astype(kind)))
    if linear:
        loss = _critic
    elif logits:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    else:
        loss = keras.losses.Dice() if len(shape) > 1 else keras.losses.BinaryCrossentropy(from_logits=True)
    return model_step(model, batches, known_batch, {"optimizer": optimizer, "loss": loss})


def _off(name: str, got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> float:
    """Return the relative error of a result; gradients that are zero but for rounding are scaled by the largest one.

    An example is the gradient of a bias before BatchNorm.
    """
    off = error(got[name], want[name])
    step, _, kind = name.partition(": ")
    if not kind.startswith("gradients/") or not np.isfinite(off):
        return off
    largest = max(np.max(np.abs(want[other])) for other in want if other.startswith(f"{step}: gradients/"))
    return min(off, float(np.max(np.abs(got[name] - want[name])) / (ZERO * largest))) if largest else off


def _critic(target: Any, score: Any) -> Any:
    """Return a step of a Wasserstein critic: the gradients of a loss linear in the scores read no image."""
    sign = keras.ops.cast(target, score.dtype) - 0.5
    return keras.ops.mean(score * (sign[..., None] if len(target.shape) < len(score.shape) else sign))


def run(
    number: int,
    seed: int | None,
    outcomes: collections.Counter[str],
    shrink: bool = True,
    say: Callable[[str], None] = lambda _: None,
    check: Callable[..., str] = compare,
) -> None:
    """Run so many cases; the first that fails is made as short as can be, and printed.

    Args:
        number: Of cases.
        seed: Where they begin; the same every time if it is not given.
        outcomes: Is added to.
        shrink: Whether a case that fails is made shorter.
        say: Is told from time to time how many have run.
        check: Looks at a case, in the place of `compare`, and returns what came out.
    """
    phases = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])]

    @hypothesis.settings(
        max_examples=number,
        deadline=None,
        derandomize=seed is None,
        database=None,
        phases=phases,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases())
    def each(script: str) -> None:
        outcomes[execute(script, check)] += 1
        if outcomes.total() % SAY_EVERY == 0:
            say(f"{outcomes.total()} of {number}: {outcomes['exact']} exact")

    with warnings.catch_warnings():  # Layers that are drawn take their seeds from `random`.
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisDeprecationWarning)
        warnings.filterwarnings("ignore", "Gradients do not exist", UserWarning)  # Where all of them are stopped.
        (each if seed is None else hypothesis.seed(seed)(each))()


def execute(script: str, check: Callable[..., str] = compare) -> str:
    """Run a case; one that fails prints its script. `check` takes the place of `compare`."""
    found: list[str] = []
    keras.backend.clear_session(free_memory=False)
    body = script.replace("from fuzz import AutoParams, SegmentSpec, SFTParams, compare\n", "")
    space: dict[str, Any] = {"AutoParams": AutoParams, "SegmentSpec": SegmentSpec, "SFTParams": SFTParams}
    space["compare"] = lambda *args, **options: found.append(check(*args, **options))
    try:
        exec(compile(body, "<case>", "exec"), space)
    except BaseException:
        print(f"\n# A case that fails. PYTHONPATH=tests:. TF_ENABLE_ONEDNN_OPTS=0 python case.py\n{script}", flush=True)
        raise
    return found[0]


def main() -> int:
    """The command line."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(2**32)
    print(f"{number} cases from seed {seed}", flush=True)
    outcomes: collections.Counter[str] = collections.Counter()
    run(number, seed, outcomes, say=functools.partial(print, flush=True))
    for outcome, times in outcomes.most_common():
        print(f"{times:6} {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
