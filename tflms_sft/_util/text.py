"""Short lists of names and tables for errors and reports."""

from __future__ import annotations

import difflib
from collections.abc import Container, Sequence

_MAX_SUGGESTIONS = 4


def nearest(name: str, known: Sequence[str], otherwise: Sequence[str] = ()) -> str:
    """Return the known names that are most similar to an unknown name, as the last sentence of an error.

    Args:
        name: The unknown name.
        known: Likely names. The first names of it are suggested if no name is similar.
        otherwise: Less likely names, used if no name of `known` is similar.
    """
    suggestions = alike(name, known) or alike(name, otherwise) or list(known or otherwise)[:_MAX_SUGGESTIONS]
    return f"Nearest: {', '.join(map(repr, suggestions))}."


def alike(name: str, known: Sequence[str], cutoff: float = 0.4) -> list[str]:
    """Return up to four known names whose similarity to a name, from 0 to 1, is at least `cutoff`."""
    return difflib.get_close_matches(name, known, n=_MAX_SUGGESTIONS, cutoff=cutoff)


def shortened(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return a list of names as `"a, b, c"`, or `"a, b and 3 more"`."""
    num_omitted = len(names) - most
    return separator.join(names[:most]) + (f" and {num_omitted} more" if num_omitted > 0 else "")


def table(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return the lines of a table with a rule below the first row; `right` are indices of right-aligned columns."""
    rule = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"  {line}" for line in aligned([rows[0], rule, *rows[1:]], right)]


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return rows as lines with aligned columns, without trailing spaces."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (c.rjust(w) if n in right else c.ljust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return lines
