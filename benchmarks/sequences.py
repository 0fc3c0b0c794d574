"""Peaks and times of networks with a loss per pixel or token, and of networks with attention, within a budget.

    python -m benchmarks.sequences [--lines NAME ...] [--runs N] [--results FILE]

- `unet`: a U-Net in one tile loop for forward and backward ops, beside a plan with two loops.
- `head`: a dense layer to a large vocabulary, with cross-entropy.
- `attention`: one causal attention layer.
- `language-model`: the longest sequence within the peak of the original step at 128 tokens.
- All others: networks of convolutions and attention at 0.35 of the original peak.

Peaks are measured in a child process of their own, and times are those of original and rewritten steps that run
alternately in one child. Peaks and ratios of times are medians, of five runs by default. Plans have tiles and no swaps.
Each line is stored when it ends: a run that was interrupted continues with the lines that are missing. A line prints
whether it passed, and the criteria that it failed. The exit code is 1 if a line failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _results

Figures = dict[str, Any]

MIB, GIB = 2**20, 2**30
BUDGET_FRACTION = 0.35
"""Budget of the networks without a line of their own, as a fraction of the original step's predicted peak."""
HEADROOM = 0.1
"""Default of `tflms_sft.AutoParams`."""
BASE_TOKENS = 128
"""Length at which the original language model defines the budget."""
MAX_PLAIN_BYTES = 8 * GIB
"""Predicted peak above which an original step is not run."""
MAX_STEP_SECONDS = 60.0
"""Predicted time above which a rewritten step is planned and not run."""
MIN_LONGER, MAX_TOKEN_TIME_RATIO = 12, 1.2
"""Required ratio of lengths of the language model, and of its times per token at this length."""
SHORT_ATTENTION = 8192
"""Length at which the attention layer is compared with the original step."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A network within a budget.

    Attributes:
        size: Height and width of an image, or tokens of a sequence.
        fraction: Budget as a fraction of the original step's predicted peak.
        of_measured: Whether it is a fraction of the measured peak instead, which the plan may use without headroom.
        max_ratio: Largest ratio of times that passes, or `None`.
        max_saved_fraction: Largest fraction of the bytes saved for the backward pass that passes, or `None`.
        two_loops: Whether a plan with two loops is measured too, and has to be slower.
    """

    size: int
    fraction: float = BUDGET_FRACTION
    of_measured: bool = False
    max_ratio: float | None = None
    max_saved_fraction: float | None = None
    two_loops: bool = False


LINES = {
    "unet": Line(512, 1 / 4, of_measured=True, max_ratio=1.15, two_loops=True),
    "head": Line(4096, 1 / 4, max_ratio=1.05, max_saved_fraction=1 / 10),
    "attention": Line(16384, 1 / 32, max_saved_fraction=1 / 32),
    "language-model": Line(BASE_TOKENS),
    "vision-transformer": Line(256),
    "class-token": Line(256),
    "transformer-unet": Line(192),
    "reduced-attention": Line(256),
    "convolutions-of-tokens": Line(2000),
    "tower-and-attention": Line(8192),
    "captioner": Line(1024),
    "decoder": Line(2048),
    "window-attention": Line(256),
}
"""Lines by the name of the network."""


def measured(function: str, env: dict[str, str], **kwargs: Any) -> Any:
    """Return the result of a measurement in a child process."""
    return _child.call_in_child(f"benchmarks._sequence_steps:{function}", kwargs, env=env)


def peak_figures(runs: int, env: dict[str, str], **case: Any) -> Figures:
    """Measure peaks of a step; return their median, and all of them."""
    peaks = measured("peaks", env, **case, runs=runs)
    return {"peak_bytes": int(statistics.median(peaks)), "peaks": peaks}


def compared(case: Figures, runs: int, env: dict[str, str], base: int | None = None) -> Figures:
    """Plan a step within a budget and measure it; the original step beside it unless it is too large.

    Args:
        case: Name of the network, its size, the budget and its headroom.
        runs: Counted runs.
        env: Environment of the child processes.
        base: Tokens of a shorter sequence whose time per token is compared; `None` for none.
    """
    figures: Figures = {"size": case["size"], **measured("planned", env, **case)}
    if "error" in figures:
        return figures
    plain = figures["original_bytes"] <= MAX_PLAIN_BYTES
    if figures["predicted_seconds"] > MAX_STEP_SECONDS:
        return figures
    if plain:
        figures["plain_peak_bytes"] = peak_figures(runs, env, **{**case, "budget": None})["peak_bytes"]
    figures |= peak_figures(runs, env, **case)
    figures["times"] = measured("times", env, **case, runs=runs, plain=plain, base=base)
    return figures


def within_budget(figures: Figures) -> dict[str, bool]:
    """Return the criteria of a plan and its measured peak."""
    has_plan = "error" not in figures
    criteria = {"has a plan": has_plan}
    if has_plan:
        key, name = ("peak_bytes", "measured") if "peak_bytes" in figures else ("predicted_bytes", "predicted")
        criteria[f"{name} peak within the budget"] = figures[key] <= figures["budget_bytes"]
    return criteria


def network(name: str, runs: int, env: dict[str, str]) -> Figures:
    """Measure a network within its budget."""
    line = LINES[name]
    case: Figures = {"net": name, "size": line.size, "budget": line.fraction, "headroom": HEADROOM}
    if line.of_measured:
        plain = peak_figures(runs, env, **{**case, "budget": None})["peak_bytes"]
        case |= {"budget": int(line.fraction * plain), "headroom": 0.0}
    figures = compared(case, runs, env)
    criteria = within_budget(figures)
    figures["criteria"] = criteria
    if "error" in figures:
        return figures
    if line.two_loops:
        uncached = {**env, "TFLMS_SFT_PLAN_CACHE": "off"}
        figures["two_loops"] = measured("planned", uncached, **case, two_loops=True)
        figures["two_loops"] |= peak_figures(runs, uncached, **case, two_loops=True)
        figures["times"] = measured("times", uncached, **case, runs=runs, two_loops=True)
        ratios = figures["times"]["ratios"]
        criteria["faster than two loops"] = ratios["rewritten"] < ratios["two loops"]
    if line.max_saved_fraction is not None:
        before, after = figures["saved_bytes"]
        criteria[f"saves at most 1/{1 / line.max_saved_fraction:.0f} of the bytes"] = (
            after <= line.max_saved_fraction * before
        )
    if line.max_ratio is not None:
        criteria[f"at most {line.max_ratio:g}x the time"] = figures["times"]["ratios"]["rewritten"] <= line.max_ratio
    if name == "attention":
        figures["shorter"] = compared({**case, "size": SHORT_ATTENTION}, runs, env)
    return figures


def language_model(name: str, runs: int, env: dict[str, str]) -> Figures:
    """Lengthen a sequence until no plan keeps the peak of the original step at `BASE_TOKENS` tokens.

    Lengths double, and the required one is among them.
    """
    case = {"net": name, "headroom": HEADROOM}
    base = peak_figures(runs, env, **case, size=BASE_TOKENS, budget=None)
    lengths: list[Figures] = []
    factors = heapq.merge((2**exponent for exponent in itertools.count(1)), (MIN_LONGER,))
    while not lengths or lengths[-1]["fits"]:
        case |= {"size": next(factors) * BASE_TOKENS, "budget": base["peak_bytes"]}
        figures = compared(case, runs, env, base=BASE_TOKENS)
        figures["fits"] = all(within_budget(figures).values())
        lengths.append(figures)
        print(f"{name}, {figures['size']} tokens: {summary(figures)}", flush=True)
    fitting = {figures["size"]: figures for figures in lengths if figures["fits"]}
    required = fitting.get(MIN_LONGER * BASE_TOKENS, {})
    criteria = {
        f"{MIN_LONGER}x longer": bool(required),
        f"at most {MAX_TOKEN_TIME_RATIO}x the time per token": token_time_ratio(required) <= MAX_TOKEN_TIME_RATIO,
    }
    size = max(fitting, default=BASE_TOKENS)
    return {"size": size, "budget_bytes": base["peak_bytes"], "base": base, "lengths": lengths, "criteria": criteria}


def token_time_ratio(figures: Figures) -> float:
    """Return the time per token relative to the shorter sequence; infinity if it was not measured."""
    return float(figures.get("times", {}).get("base_ratio", math.inf))


def status(figures: Figures) -> str:
    """Return "passed", or "FAILED" if a criterion does not hold."""
    return "passed" if all(figures["criteria"].values()) else "FAILED"


def summary(figures: Figures) -> str:
    """Return the figures of a line as text."""
    parts = [f"NOT {criterion}" for criterion, holds in figures.get("criteria", {}).items() if not holds]
    parts += [
        f"{key.replace('_', ' ')} {mib(figures[key])}"
        for key in figures
        if key.endswith("bytes") and key != "saved_bytes"
    ]
    parts += [f"{name} {ratio:.2f}x" for name, ratio in figures.get("times", {}).get("ratios", {}).items()]
    if token_time_ratio(figures) < math.inf:
        parts.append(f"per token {token_time_ratio(figures):.2f}x")
    parts += [figures[key] for key in ("headline", "error") if key in figures]
    return ", ".join(parts)


# Tables -----------------------------------------------------------------------------------------------------


def mib(num_bytes: float) -> str:
    """Return a size in MiB as text."""
    return f"{num_bytes / MIB:,.0f} MiB"


def network_table(stored: Figures) -> str:
    """Return the Markdown table of networks within a budget."""
    title = ["network", "size", "budget", "plain peak, predicted", "measured", "peak, predicted", "measured"]
    rows = [[*title, "saved for backward", "time", "passed"]]
    for name, figures in lines_of(stored):
        if "lengths" in figures:
            continue
        rows.append([name, *row(figures), "yes" if status(figures) == "passed" else "no"])
        if "two_loops" in figures:
            ratios = {"rewritten": figures["times"]["ratios"]["two loops"]}
            rows.append(
                [f"{name}, two loops", *row({**figures, **figures["two_loops"], "times": {"ratios": ratios}}), ""]
            )
        if "shorter" in figures:
            rows.append([name, *row(figures["shorter"]), ""])
    return _results.markdown(rows)


def row(figures: Figures) -> list[str]:
    """Return the cells of a network within a budget, without its name and its status."""
    saved, ratios = figures.get("saved_bytes"), figures.get("times", {}).get("ratios", {})
    sizes = ("budget_bytes", "original_bytes", "plain_peak_bytes", "predicted_bytes", "peak_bytes")
    return [
        f"{figures['size']:,}",
        *(mib(figures[key]) if key in figures else "-" for key in sizes),
        f"{saved[0] / MIB:,.0f} to {saved[1] / MIB:,.3g} MiB" if saved else "no plan",
        f"{ratios['rewritten']:.2f}x" if "rewritten" in ratios else "-",
    ]


def length_table(stored: Figures) -> str:
    """Return the Markdown table of lengths of the language model within the budget."""
    title = ["tokens", "plain peak, predicted", "peak, predicted", "measured", "tiles and predicted time"]
    rows = [[*title, "time per token", "time over plain of this length"]]
    for figures in stored.get("lines", {}).get("language-model", {}).get("lengths", ()):
        sizes = ("original_bytes", "predicted_bytes", "peak_bytes")
        ratio = figures.get("times", {}).get("ratios", {}).get("rewritten")
        tiles = figures.get("headline", "no plan").split(" in ")[-1].split(",")[0]
        predicted = f", {figures['predicted_ratio']:.2f}x" if "predicted_ratio" in figures else ""
        rows.append(
            [
                f"{figures['size']:,}",
                *(mib(figures[key]) if key in figures else "-" for key in sizes),
                f"{tiles}{predicted}",
                f"{token_time_ratio(figures):.2f}x" if token_time_ratio(figures) < math.inf else "-",
                "-" if ratio is None else f"{ratio:.2f}x",
            ]
        )
    return _results.markdown(rows)


def lines_of(stored: Figures) -> list[tuple[str, Figures]]:
    """Return the stored lines in the order of `LINES`."""
    return [(name, stored["lines"][name]) for name in LINES if name in stored.get("lines", {})]


TABLES: dict[str, Callable[[Figures], str]] = {"networks": network_table, "lengths": length_table}
"""Functions of the stored results that return a Markdown table, by its name on the page."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.sequences", __doc__)
    add = parser.add_argument
    add("--lines", nargs="+", choices=list(LINES), metavar="NAME", help="measure these again; default: what is missing")
    add("--runs", type=_arguments.positive, default=5, help="counted runs of each step; default: %(default)s")
    add("--results", type=Path, metavar="FILE", default=_results.RESULTS / "sequences.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, store and print; return 1 if a line failed."""
    options = parse_arguments(arguments)
    path: Path = options.results
    stored: Figures = json.loads(path.read_text()) if path.exists() else {}
    lines: dict[str, Figures] = stored.setdefault("lines", {})
    stored |= _results.provenance("benchmarks.sequences", arguments)
    chosen = options.lines or list(LINES)
    for name in chosen:
        if not options.lines and name in lines:
            continue
        with tempfile.TemporaryDirectory() as plans:
            function = language_model if name == "language-model" else network
            lines[name] = function(name, options.runs, {"TFLMS_SFT_PLAN_CACHE": plans})
        _results.write(path, stored, {table: text(stored) for table, text in TABLES.items()})
        print(f"{status(lines[name]):8}  {name}: {summary(lines[name])}", flush=True)
    failed = [name for name in chosen if status(lines[name]) == "FAILED"]
    print(f"{len(chosen)} lines, failed: {', '.join(failed) or 'none'}; {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    _child.leave_with(main)
