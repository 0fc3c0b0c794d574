"""Rewrites the step of a dump again, and compares the graphs after each pass with those of the dump."""

from __future__ import annotations

import difflib
import tempfile
from pathlib import Path

from rewriters.ir.device_model import planning_for
from rewriters.ir.graph_pass import dumping_to
from rewriters.ir.text import graph_text
from tflms_sft._report.pass_dump import file_name
from tflms_sft._rewrite.plan_recipe import plan_from
from tflms_sft._rewrite.rewrite import carry_out
from tflms_sft._rewrite.saved_step import load_device, load_step

MAX_LINES = 40
"""Lines of a difference that are printed."""


def reproduce(folder: Path, number: int | None = None) -> bool:
    """Rewrite the step of a dump again with the present code, and print the first difference between the graphs.

    Args:
        folder: The dump.
        number: The only pass to compare; by default all passes are compared.

    Returns:
        Whether the compared graphs are equal, and none is missing.
    """
    texts = _rewritten(folder)
    names = sorted({*texts, *(path.name for path in folder.glob("[0-9]*.txt"))}, key=lambda name: int(name[:2]))
    chosen = [name for name in names if number in (None, int(name[:2]))]
    for name in chosen:
        path = folder / name
        lines = _difference(path.read_text(encoding="utf-8") if path.exists() else "", texts.get(name, ""))
        print(f"{name}: {'differs' if lines else 'equal'}", *lines, sep="\n")
        if lines:
            return False
    return bool(chosen)


def _rewritten(folder: Path) -> dict[str, str]:
    """Rewrite the step of a dump by the plan of the dump; return the texts of its graphs by file name."""
    with tempfile.TemporaryDirectory() as directory, dumping_to(directory):
        device = load_device(folder)
        with planning_for(lambda _: device):
            traced, recipe = load_step(folder)
            choice = plan_from(traced, recipe)
            if choice is None:
                print("The step, or the version of tflms_sft, is not that of the dump: only canonicalization runs.")
                states = traced.analysis.graph.history
            else:
                states = carry_out(traced, choice, recipe["memory_budget"])[0].graph.history
    return {file_name(number, state): graph_text(state.graph) for number, state in enumerate(states)}


def _difference(before: str, after: str) -> list[str]:
    """Return the first differing lines of two texts."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "dump", "present", n=1, lineterm="")
    return [line for line, _ in zip(lines, range(MAX_LINES), strict=False)]
