"""Trains VGG-16 on a full-size fundus photograph in less memory than its plain training step needs.

Run by `python -m examples.demo`. The network learns which of the eight turns and flips was applied to the
photograph, which no crop or downscaling would ask for. Each part runs in a process of its own:

1. the plain step under a memory cap, which has to end in an out-of-memory error,
2. the plain step without the cap, to see what it needs,
3. the same training with one callback more, `tflms_sft.MemoryBudget`, under the cap of part 1,
4. plain and rewritten training of a smaller image, whose losses and weights have to agree.

The exit code is 0 only if parts 1, 3 and 4 came out as said.
"""

import argparse
import dataclasses
import math
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child
from examples._memory_picture import memory_axes

VIEWS = 8
SAMPLE_SECONDS = 0.05
GIB = 2**30
# Names of the runs, as the table and the picture show them.
PLAIN_CAPPED, PLAIN_FREE, REWRITTEN = "plain, capped", "plain, no cap", "rewritten, capped"
# Largest relative differences of (losses, weights, updates) that part 4 accepts, per type. Sums over tiles
# add the same terms in another order, and this rounding is all they leave room for: in float32 a single plain
# step of this network already differs by tenths of a percent from the same step in float64.
TOLERANCES = {"float32": (1e-4, 1e-2, 1e-2), "float64": (1e-10, 1e-10, 1e-10)}


# ----------------------------------------------------------------------------------------------------------
# In the child.


def train(
    *,
    image: str | None,
    image_size: int | None,
    steps: int,
    rewriter: str | None,
    budget: int | None,
    cap: int | str | None,
    save: str | None,
    dtype: str,
    emit: _child.Emit,
) -> None:
    """Trains for some steps and emits what the parent prints and compares.

    Args:
        image: Path of the photograph; None takes the one of scikit-image.
        image_size: Height and width to scale to; None keeps the photograph's.
        steps: Steps to train.
        rewriter: None for the plain step, "budget" for MemoryBudget, "tiles" for SFT with given tiles.
        budget: Bytes for MemoryBudget; None takes `default_budget`.
        cap: Limit on the process's data in bytes, "default" for `default_cap`, or None.
        save: Where to write the weights before and after, as .npz; these runs are the ones to compare.
        dtype: "float32" or "float64", for weights and image.
        emit: Sends a dict to the parent.
    """
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    keras.config.set_floatx(dtype)
    photograph = load_photograph(image, image_size).astype(dtype)
    model = build_vgg16(photograph.shape[0])
    # Adam divides gradients by their size, rounding included, which would hide what part 4 looks for.
    optimizer = keras.optimizers.SGD(1e-4, momentum=0.9) if save else keras.optimizers.Adam(1e-5)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = model.get_weights() if save else []
    budget, cap = _apply_limits(model, budget, cap, emit)
    callback = _rewriter(rewriter, budget)
    report = keras.callbacks.LambdaCallback(on_epoch_end=_Progress(emit).tell)
    # One step per epoch: within an epoch Keras logs the running mean of the loss.
    model.fit(
        view_batches(photograph),
        epochs=steps,
        steps_per_epoch=1,
        callbacks=[*filter(None, [callback]), report],
        shuffle=False,
        verbose=0,
    )
    emit({"peak_rss": _child.status_bytes("VmHWM")})
    if callback is not None:
        emit({"plan": callback.plan.summary()})
    if save:
        arrays = {f"before_{i}": value for i, value in enumerate(before)}
        arrays |= {f"after_{i}": value for i, value in enumerate(model.get_weights())}
        np.savez(save, **arrays)


def load_photograph(path: str | None, size: int | None) -> Any:
    """Returns the photograph as float32, square, with mean 0 and deviation 1 per channel."""
    import numpy as np
    from skimage import color, data, io, transform

    pixels = data.retina() if path is None else io.imread(path)
    pixels = (color.gray2rgb(pixels) if pixels.ndim == 2 else pixels)[..., :3]
    side = min(pixels.shape[:2])  # quarter turns keep the shape of a square only
    top, left = ((extent - side) // 2 for extent in pixels.shape[:2])
    pixels = pixels[top : top + side, left : left + side].astype(np.float32)
    if size is not None and size != side:
        pixels = transform.resize(pixels, (size, size), anti_aliasing=size < side)
    mean, deviation = pixels.mean((0, 1)), pixels.std((0, 1))
    return ((pixels - mean) / np.maximum(deviation, 1e-6)).astype(np.float32)


def view_batches(photograph: Any) -> Any:
    """Returns an endless dataset of (view, which view), all eight in a new order each time."""
    import numpy as np
    import tensorflow as tf

    def views() -> Any:
        order = np.random.default_rng(0)
        while True:
            for view in order.permutation(VIEWS):
                flipped = photograph[:, ::-1] if view >= 4 else photograph
                yield np.rot90(flipped, view % 4)[None], np.array([view], np.int32)

    signature = (
        tf.TensorSpec((1, *photograph.shape), photograph.dtype),
        tf.TensorSpec((1,), tf.int32),
    )
    options = tf.data.Options()
    options.autotune.enabled = False  # its thread may take as long to end as a step of training
    return tf.data.Dataset.from_generator(views, output_signature=signature).with_options(options)


def build_vgg16(image_size: int) -> Any:
    """Returns the 13 convolutions and 5 pools of VGG-16, global average pooling, and 8 logits."""
    from keras import Input, Model, layers

    x = image = Input((image_size, image_size, 3), name="image")
    for block, (depth, filters) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)], 1):
        for _ in range(depth):
            convolution = layers.Conv2D(filters, 3, padding="same", activation="relu", kernel_initializer="he_normal")
            x = convolution(x)
        x = layers.MaxPooling2D(name=f"pool{block}")(x)
    return Model(image, layers.Dense(VIEWS)(layers.GlobalAveragePooling2D()(x)))


def default_budget(fixed: int, gradients: int, activations: int) -> int:
    """Returns a budget that the plain step is far from meeting.

    Args:
        fixed: Bytes of the weights and the optimizer's slots, of which no rewriting saves any.
        gradients: Bytes of the gradients of the weights, likewise.
        activations: Bytes of what the plain step keeps from the forward to the backward pass.
    """
    return fixed + gradients + activations // 3


def default_cap(idle: int, budget: int, unfolds: bool) -> int:
    """Returns a limit on the process's data that leaves room around the budget.

    Args:
        idle: Bytes of the process's data before training; libraries and one stack per thread, so that it
            depends on the machine.
        budget: Bytes that the training step may take.
        unfolds: Whether convolutions unfold the image, as they do without oneDNN: in the forward pass they reserve
            memory for it and leave it untouched. The cap counts what is reserved.
    """
    reserved = budget if unfolds else 0
    return idle + budget + reserved + int(0.15 * GIB)  # beside the tensors: traced graphs, scratch, fragments


def _apply_limits(model: Any, budget: int | None, cap: int | str | None, emit: _child.Emit) -> tuple[int, int | None]:
    """Fills in the defaults, tells the parent, and sets the cap."""
    from rewriters.ir.device_detection import planned_device

    fixed = 4 * sum(math.prod(v.shape) for v in [*model.weights, *model.optimizer.variables])
    activations = 4 * sum(math.prod(layer.output.shape[1:]) for layer in model.layers)
    idle = _child.status_bytes("VmData")
    if budget is None:
        gradients = 4 * sum(math.prod(weight.shape) for weight in model.trainable_weights)
        budget = default_budget(fixed, gradients, activations)
    if cap == "default":
        cap = default_cap(idle, budget, planned_device().unfolds_convolutions)
    if cap is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(cap), int(cap)))
    emit({"budget": budget, "cap": cap, "idle": idle, "idle_rss": _child.status_bytes("VmRSS")})
    return budget, None if cap is None else int(cap)


def _rewriter(kind: str | None, budget: int) -> Any:
    if kind is None:
        return None
    import tflms_sft

    if kind == "budget":
        return tflms_sft.MemoryBudget(budget)
    return tflms_sft.SFT(
        segments=[
            tflms_sft.SegmentSpec("image", "pool3", num_tiles=(4, 4)),
            tflms_sft.SegmentSpec("pool3", "pool5", num_tiles=(2, 2)),
        ]
    )


class _Progress:
    """Emits step, loss and seconds after each epoch of one step."""

    def __init__(self, emit: _child.Emit) -> None:
        self._emit = emit
        self._last = time.perf_counter()

    def tell(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        now = time.perf_counter()
        self._emit({"step": epoch + 1, "loss": float((logs or {})["loss"]), "seconds": now - self._last})
        self._last = now


# ----------------------------------------------------------------------------------------------------------
# In the parent.


@dataclasses.dataclass
class Run:
    """A child process, with its exit status and its output.

    Attributes:
        title: For the table and the picture.
        outcome: How it ended, with its memory over time.
        steps: Dicts with "loss" and "seconds".
        facts: All other keys that it emitted.
    """

    title: str
    outcome: _child.Outcome
    steps: list[dict[str, Any]]
    facts: dict[str, Any]

    @property
    def peak_rss(self) -> int:
        """Largest RSS known: a child that died cannot tell its own, so the samples count too."""
        return max([self.facts.get("peak_rss", 0), *(sample.rss for sample in self.outcome.samples)])

    def step_seconds(self) -> float | None:
        """Mean time of the steps after the first, which traces."""
        later = [step["seconds"] for step in self.steps[1:]]
        return sum(later) / len(later) if later else None


def run_part(title: str, options: argparse.Namespace, **kwargs: Any) -> Run:
    """Trains in a child and prints its steps as they come.

    Args:
        title: Name of the run.
        options: The command line.
        **kwargs: Arguments of `train` that differ from its usual ones.

    Returns:
        The run, also where it failed.
    """
    steps: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    settings = {
        "image": str(options.image.resolve()) if options.image else None,
        "image_size": options.image_size,
        "steps": options.steps,
        "rewriter": None,
        "budget": None,
        "cap": None,
        "save": None,
        "dtype": "float32",
        **kwargs,
    }

    def take(event: _child.Event) -> None:
        if "step" in event:
            steps.append(event)
            note = "  (with tracing)" if len(steps) == 1 else ""
            count = f"step {len(steps)}/{settings['steps']}"
            print(f"  {count}  loss {event['loss']:.4f}  {event['seconds']:5.1f} s{note}", flush=True)
        else:
            facts.update(event)
            if event.get("cap"):
                print(f"  cap {size(event['cap'])}, idle process {size(event['idle'])}", flush=True)

    outcome = _child.run_child(
        "examples.demo:train",
        settings,
        env=_child.TRUE_RSS_ENV,
        on_event=take,
        sample_seconds=SAMPLE_SECONDS,
    )
    return Run(title, outcome, steps, facts)


def differences(plain: Path, rewritten: Path) -> tuple[float, float]:
    """Compares the weights that two children saved.

    Args:
        plain: The .npz of the plain child.
        rewritten: That of the rewritten one.

    Returns:
        The largest difference of a weight, relative to the largest weight of its variable; and the largest
        difference of a variable's update (weights after minus weights before), relative to that update's
        L2 norm. The second is the sharper one: weights agree already where training barely moves them.
    """
    import numpy as np

    with np.load(plain) as a, np.load(rewritten) as b:
        weights, updates = 0.0, 0.0
        for name in (name for name in a.files if name.startswith("after_")):
            start = name.replace("after", "before")
            if not np.array_equal(a[start], b[start]):
                raise ValueError(f"The children began with different weights. Received: {start}")
            gap = a[name].astype(np.float64) - b[name]
            update = a[name].astype(np.float64) - a[start]
            weights = max(weights, np.abs(gap).max() / np.abs(a[name]).max())
            updates = max(updates, np.linalg.norm(gap) / np.linalg.norm(update))
    return float(weights), float(updates)


class Claims:
    """Claims of the demo, and whether they hold."""

    def __init__(self) -> None:
        self.all_held = True

    def check(self, held: bool, claim: str, detail: str) -> None:
        """Prints one claim with its outcome."""
        self.all_held = self.all_held and held
        print(f"  {'ok' if held else 'FAILED'}: {claim}: {detail}", flush=True)

    def check_run(self, run: Run, claim: str) -> None:
        """Prints whether a child trained, and where it did not, what it printed."""
        if run.outcome.ok:
            self.check(True, claim, f"{len(run.steps)} steps")
            return
        self.check(False, claim, _child.out_of_memory(run.outcome) or run.outcome.how_it_ended())
        if not run.outcome.error or run.outcome.error["type"] != "BudgetError":  # which says it all
            print(run.outcome.log_tail(), file=sys.stderr)


def agreement(options: argparse.Namespace, claims: Claims, dtype: str) -> None:
    """Trains a smaller image plain and rewritten and compares losses and weights."""
    shared = {"image_size": options.small_size, "steps": options.small_steps, "dtype": dtype}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{name}.npz" for name in ("plain", "rewritten")]
        runs = []
        for title, rewriter, path in zip(("plain", "rewritten"), (None, "tiles"), files, strict=True):
            print(f" {title}, {dtype}", flush=True)
            runs.append(run_part(title, options, **shared, rewriter=rewriter, save=str(path)))
            if not runs[-1].outcome.ok:
                claims.check_run(runs[-1], f"the {title} step trains")
                return
        weights, updates = differences(*files)
    pairs = zip(*(run.steps for run in runs), strict=True)
    losses = max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in pairs)
    found = {"losses": losses, "weights": weights, "updates": updates}
    for (name, difference), limit in zip(found.items(), TOLERANCES[dtype], strict=True):
        detail = f"largest relative difference {difference:.1e}, tolerance {limit:.0e}"
        claims.check(difference <= limit, f"{name} agree in {dtype}", detail)


def size(nbytes: int | None) -> str:
    """Returns a size in GiB."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes else "-"


def table(runs: Sequence[Run]) -> str:
    """Returns one line per run."""
    lines = [["", "ended", "steps", "first step", "step", "peak RSS", "without the idle process"]]
    for run in runs:
        seconds = run.step_seconds()
        lines.append(
            [
                run.title,
                "trained" if run.outcome.ok else "out of memory" if _child.out_of_memory(run.outcome) else "failed",
                str(len(run.steps)),
                f"{run.steps[0]['seconds']:.1f} s" if run.steps else "-",
                f"{seconds:.1f} s" if seconds else "-",
                size(run.peak_rss),
                size(run.peak_rss - run.facts.get("idle_rss", 0)),
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)


def draw(runs: Sequence[Run], cap: int, path: Path) -> None:
    """Draws the memory of the runs over time.

    The lines are anonymous RSS: the cap limits private writable memory, of which the RSS of code and
    libraries is no part.
    """
    with memory_axes(path, "anonymous RSS", "upper right") as axes:
        colors = {PLAIN_CAPPED: "tab:red", PLAIN_FREE: "tab:gray", REWRITTEN: "tab:blue"}
        for run in runs:
            samples = run.outcome.samples
            if not samples:
                continue
            times = [sample.seconds for sample in samples]
            heights = [sample.anonymous / GIB for sample in samples]
            axes.plot(times, heights, color=colors[run.title], linewidth=1.2, label=run.title)
            if not run.outcome.ok:
                end = max(zip(heights, times, strict=True))[::-1]  # the highest point: dying gives memory back
                axes.plot(*end, "x", color=colors[run.title], markersize=11, markeredgewidth=3)
                words = "out of memory" if _child.out_of_memory(run.outcome) else "failed"
                axes.annotate(words, end, (10, -4), textcoords="offset points")
        axes.axhline(cap / GIB, color="black", linestyle="--", linewidth=1, label=f"cap, {size(cap)}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = _arguments.parser("examples.demo", __doc__)
    add = parser.add_argument
    add("--image", type=Path, help="a photograph instead of scikit-image's retina")
    add("--image-size", type=int, metavar="N", help="scale it to N x N; from 704 up the default limits fit")
    add("--steps", type=int, default=5, help="steps under the cap (default: %(default)s)")
    add("--budget", metavar="SIZE", help="for MemoryBudget (default: from the sizes of the network)")
    add("--cap", metavar="SIZE", help="limit on the data of a process (default: from the budget)")
    add("--small-size", type=int, default=256, metavar="N", help="size in part 4 (default: %(default)s)")
    add("--small-steps", type=int, default=3, help="steps of part 4 (default: %(default)s)")
    add("--no-uncapped", action="store_true", help="leave out part 2")
    add("--out", type=Path, default=Path("demo-output"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in ("budget", "cap"):
        text = getattr(options, name)
        try:
            setattr(options, name, _arguments.parse_size(text) if text else None)
        except ValueError as error:
            parser.error(f"--{name}: {error}")
    if options.image and not options.image.is_file():
        parser.error(f"--image: no such file. Received: {options.image}")
    return options


def plain_under_cap(options: argparse.Namespace, claims: Claims) -> Run:
    """Part 1."""
    print("1. The plain step under a memory cap", flush=True)
    run = run_part(PLAIN_CAPPED, options, budget=options.budget, cap=options.cap or "default")
    evidence = _child.out_of_memory(run.outcome)
    if evidence is None and not run.outcome.ok:
        raise _child.ChildError(f"{run.outcome.how_it_ended()}\n{run.outcome.log_tail()}")
    claims.check(evidence is not None, "it runs out of memory", evidence or "it trained")
    return run


def plain_without_cap(options: argparse.Namespace) -> Run:
    """Part 2, of which nothing is claimed: this machine may lack the memory."""
    print("2. The plain step without the cap", flush=True)
    run = run_part(PLAIN_FREE, options, steps=min(2, options.steps))
    if not run.outcome.ok:
        print(f"  {run.outcome.how_it_ended()}", flush=True)
    return run


def rewritten_under_cap(options: argparse.Namespace, claims: Claims, limits: dict[str, int]) -> Run:
    """Part 3."""
    print(f"3. MemoryBudget of {size(limits['budget'])} under the same cap", flush=True)
    run = run_part(REWRITTEN, options, rewriter="budget", budget=limits["budget"], cap=limits["cap"])
    claims.check_run(run, "it trains")
    print(run.facts.get("plan", ""), flush=True)
    return run


def say_how_losses_agree(plain: Run, rewritten: Run) -> None:
    """Prints how far apart the losses of the steps are that both runs took at full size."""
    pairs = list(zip(plain.steps, rewritten.steps, strict=False))
    if pairs:
        gap = max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in pairs)
        print(f"  its first {len(pairs)} losses and those of part 2 differ by {gap:.1e} (relative)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts, prints the table, draws the picture."""
    options = parse_arguments(arguments)
    began = time.monotonic()
    claims = Claims()
    runs = [plain_under_cap(options, claims)]
    limits = runs[0].facts
    if not options.no_uncapped:
        runs.append(plain_without_cap(options))
    runs.append(rewritten_under_cap(options, claims, limits))
    if not options.no_uncapped:
        say_how_losses_agree(*runs[1:])
    print(f"4. Plain and rewritten at {options.small_size} x {options.small_size}", flush=True)
    for dtype in TOLERANCES:
        agreement(options, claims, dtype)

    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "memory.png"
    draw(runs, limits["cap"], picture)
    print(f"\n{table(runs)}\n\nPicture: {picture} ({time.monotonic() - began:.0f} s in all)")
    return 0 if claims.all_held else 1


if __name__ == "__main__":
    _child.leave_with(main)
