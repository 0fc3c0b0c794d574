"""Random Keras networks, rewritten in random ways: the same numbers to 1e-10, or a refusal that says why.

A case is a script. It is drawn line by line, so that what a line may be depends on the shapes so far, and what runs
is what is printed if it fails.

    python tests/helpers/fuzz.py 1000          # so many cases, from a seed that is printed
    python tests/helpers/fuzz.py 1000 42       # from that seed
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import os
import random
import subprocess
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
from devices import ONEDNN, planning_with
from equivalence import TOLERANCE, Step, error, model_step
from fuzz_layers import ATTENTION, LAYERS, Drawing
from hypothesis import strategies as st

import tflms_sft
from benchmarks._longest_segments import longest_segments
from rewriters.device.merged_kernels import cycle_of_merged
from rewriters.ir.graph_reader import from_concrete_function
from tflms_sft import AutoParams, LMSParams, SegmentSpec, SFTParams

PART = 25
"""Cases that share a process."""

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
    tflms_sft.SwapError: ("No tensor can be swapped",),
    # Without a convolution or a pool nothing tells how many axes there are.
    ValueError: ("num_tiles` must be at most", "but the tiled tensor has", "carries rows along the width"),
}
"""What may be refused, and the words for it."""

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

from fuzz import AutoParams, LMSParams, SegmentSpec, SFTParams, compare

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
        source, kind = d.source(), draw(st.sampled_from(kinds))
        if kind in ATTENTION and any("UpSampling" in line or "Resizing" in line for line in d.lines):
            continue  # It makes copies of a pixel differ by rounding, and a maximum then selects any of them.
        text = kind(d, source)
        if text is not None:
            d.add(text)
    lines = [*d.lines, *_head(d)]
    params = _params(d, known)
    optimizer = f"keras.optimizers.{draw(st.sampled_from(OPTIMIZERS))}"
    if not known and not lines[-1].startswith("y = layers.Activation"):
        # Of a known batch TensorFlow's plain step is not to be compared with: see docs/develop/decisions.md.
        params += draw(st.sampled_from(("", "", "", ", linear=True")))
    if "SegmentSpec" not in params:  # Its tensors are those of one forward pass.
        params += draw(st.sampled_from(("", "", ", updates=2")))
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

    kind = d.choice("tiles", "tiles", "tiles", "named", "capacity", "budget", "swaps")
    if kind in ("budget", "capacity") and not known:
        kind = "tiles"
    if kind == "budget":
        swap, part = d.choice(False, True), d.choice(0.35, 0.5, 0.7, 0.9)
        return f"AutoParams(1, swap={swap}, max_slowdown=1e9), part={part}"
    if kind == "swaps":
        order = d.choice("chain_rule", "direct_order")
        lines = f"tier='disk', page_cache=True, min_bytes=1, lb={d.number(1, 6)}, ctrld_strategy={order!r}"
        return f"LMSParams({lines}, fuse_swapins={d.choice(False, True)}, swap_branches={d.choice(False, True)})"
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
    model: Any,
    optimizer: Any,
    params: Any,
    *,
    known_batch: bool,
    part: float | None = None,
    linear: bool = False,
    updates: int = 1,
) -> str:
    """Train for two steps, plain and rewritten.

    Args:
        model: With two classes as output; or images, of probabilities or, with three channels, of logits.
        optimizer: For it.
        params: How it is rewritten.
        known_batch: Whether the step is traced for 3 images, or for any number.
        part: Of the plain step's peak, which is the budget then.
        linear: Whether the loss is linear in the output, as that of a critic.
        updates: Number of updates of a step; see `equivalence.model_step`.

    Returns:
        `"exact"`, `"diverges"` if the plain step does, or the reason why it was refused.

    Raises:
        AssertionError: If anything differs, or if a plan of ours needs more memory than the plain step.
    """
    step = step_for(model, optimizer, known_batch, linear, updates)
    try:
        with planning_with(**ONEDNN):  # TensorFlow merges the gradients of a filter and of a bias.
            rewritten = _rewritten(step, params, part)
            changed = [fast for fast in rewritten if fast.plan.changed]
            check_merges(step.concrete_fn, *(fast.concrete_function for fast in changed))
    except tuple(REFUSALS) as refused:
        reasons = [reason for kind, words in REFUSALS.items() if isinstance(refused, kind) for reason in words]
        found = [reason for reason in reasons if reason in str(refused)]
        assert found, f"{type(refused).__name__}: {refused}"
        return found[0]
    want = step.run(step.concrete_fn) if changed else {}
    if not all(np.isfinite(value).all() for value in want.values()):
        return "diverges"
    for fast in changed:
        got = step.run(fast.concrete_function)
        assert list(want) == list(got)
        errors = {name: _off(name, got, want) for name in want}
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < TOLERANCE, f"{worst} differs by {errors[worst]:.1e}\n{fast.plan.summary()}"
    return "exact" if changed else "left as it was"


def _rewritten(step: Step, params: Any, part: float | None) -> list[Any]:
    """Return rewritten steps, with tiles that the planner selects also of segments as long as can be."""
    if part is not None:
        plain = tflms_sft.rewrite(step.concrete_fn, AutoParams("1GiB")).plan.original.peak_bytes
        params = dataclasses.replace(params, memory_budget=int(part * plain / 0.9))
    selects = isinstance(params, SFTParams) and params.segments == "auto"
    rewritten = [tflms_sft.rewrite(step.function, params, *step.specs)]
    if part is not None or selects:
        check_saves(rewritten[0].plan)
    if selects:
        with longest_segments():  # Networks so small are left as they are otherwise.
            rewritten.append(tflms_sft.rewrite(step.function, params, *step.specs))
    return rewritten


def check_saves(plan: tflms_sft.Plan) -> None:
    """Refuse a plan that is predicted to need as much as the plain step, or more, if anything is rewritten.

    Raises:
        AssertionError: For such a plan.
    """
    peaks = plan.predicted.peak_bytes, plan.original.peak_bytes
    assert peaks[0] < peaks[1] if plan.segments or plan.swaps else peaks[0] == peaks[1], plan.summary()


def check_merges(plain: Any, *rewritten: Any) -> None:
    """Refuse rewritten steps in which TensorFlow's merged ops would close a cycle.

    Raises:
        AssertionError: If one has such a cycle and the plain step has none.
    """
    cycles = [cycle_of_merged(from_concrete_function(concrete_fn)) for concrete_fn in (plain, *rewritten)]
    assert cycles[0] or not any(cycles), cycles


def step_for(model: Any, optimizer: Any, known_batch: bool, linear: bool = False, updates: int = 1) -> Step:
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
    return model_step(model, batches, known_batch, {"optimizer": optimizer, "loss": loss}, updates)


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
    check: Callable[..., str] = compare,
) -> None:
    """Run so many cases; the first that fails is made as short as can be, and printed.

    Args:
        number: Of cases.
        seed: Where they begin; the same every time if it is not given.
        outcomes: Is added to.
        shrink: Whether a case that fails is made shorter.
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

    with warnings.catch_warnings():  # Layers that are drawn take their seeds from `random`.
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisDeprecationWarning)
        warnings.filterwarnings("ignore", "Gradients do not exist", UserWarning)  # Where all of them are stopped.
        (each if seed is None else hypothesis.seed(seed)(each))()


def execute(script: str, check: Callable[..., str] = compare) -> str:
    """Run a case; one that fails prints its script. `check` takes the place of `compare`."""
    found: list[str] = []
    keras.backend.clear_session(free_memory=False)
    body = script.replace("from fuzz import AutoParams, LMSParams, SegmentSpec, SFTParams, compare\n", "")
    space: dict[str, Any] = {kind.__name__: kind for kind in (AutoParams, LMSParams, SegmentSpec, SFTParams)}
    space["compare"] = lambda *args, **options: found.append(check(*args, **options))
    try:
        exec(compile(body, "<case>", "exec"), space)
    except BaseException:
        print(f"\n# A case that fails. PYTHONPATH=tests:. TF_ENABLE_ONEDNN_OPTS=0 python case.py\n{script}", flush=True)
        raise
    return found[0]


def main() -> int:
    """The command line; parts of the cases run in processes of their own, because TensorFlow keeps traced graphs."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(2**32)
    print(f"{number} cases from seed {seed}", flush=True)
    outcomes: collections.Counter[str] = collections.Counter()
    if number <= PART:
        run(number, seed, outcomes)
        print(json.dumps(outcomes))
        return 0
    parts, failures = [(min(PART, number - begin), seed + begin) for begin in range(0, number, PART)], 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for part in concurrent.futures.as_completed([pool.submit(_in_process, *part) for part in parts]):
            child = part.result()
            if child.returncode == 0:
                outcomes.update(json.loads(child.stdout.splitlines()[-1]))
            else:
                failures += 1
                print(child.stdout, child.stderr, f"# exit status {child.returncode}", sep="\n")
            print(f"{outcomes.total()} of {number}: {outcomes['exact']} exact, {failures} failures", flush=True)
    for outcome, times in outcomes.most_common():
        print(f"{times:6} {outcome}")
    return int(failures > 0)


def _in_process(number: int, seed: int) -> subprocess.CompletedProcess[str]:
    """Run so many cases from a seed in a process of their own."""
    command = [sys.executable, __file__, str(number), str(seed)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
