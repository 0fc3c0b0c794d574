"""Rewrites the step of a dump again, and compares the graphs after each pass with those of the dump."""

from __future__ import annotations

import difflib
import tempfile
from pathlib import Path

from rewriters.ir.graph import GraphState
from rewriters.ir.graph_pass import dumping_to
from rewriters.ir.text import graph_text
from tflms_sft._report.pass_dump import file_name
from tflms_sft._rewrite.plan_recipe import plan_from
from tflms_sft._rewrite.rewrite import carry_out
from tflms_sft._rewrite.saved_step import load_step

MAX_LINES = 40
"""Lines of a difference that are printed."""


def reproduce(folder: Path, number: int | None = None) -> bool:
    """Rewrite the step of a dump again with the present code, and print the first difference between the graphs.

    Args:
        folder: The dump.
        number: The only pass to compare; by default all passes are compared.

    Returns:
        Whether the graphs are equal.
    """
    is_equal = True
    for current, state in enumerate(_rewritten(folder)):
        if number not in (None, current) or not is_equal:
            continue
        path = folder / file_name(current, state)
        lines = _difference(path.read_text(encoding="utf-8") if path.exists() else "", graph_text(state.graph))
        is_equal = not lines
        print(f"{path.name}: {'equal' if is_equal else 'differs'}", *lines, sep="\n")
    return is_equal


def _rewritten(folder: Path) -> tuple[GraphState, ...]:
    """Return the graphs after each pass of the step of a dump, which is rewritten by the plan of the dump."""
    with tempfile.TemporaryDirectory() as directory, dumping_to(directory):
        traced, recipe = load_step(folder)
        choice = plan_from(traced, recipe)
        if choice is None:
            print("The canonical graph is not that of the dump, so that the plan of the dump does not fit it.")
            return traced.analysis.graph.history
        return carry_out(traced, choice, recipe["memory_budget"])[0].graph.history


def _difference(before: str, after: str) -> list[str]:
    """Return the first differing lines of two texts."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "dump", "present", n=1, lineterm="")
    return [line for line, _ in zip(lines, range(MAX_LINES), strict=False)]
