"""Lists of names in errors and reports, kept short."""

from __future__ import annotations

import difflib
from collections.abc import Container, Sequence

_MOST_NEAREST = 4


def nearest(name: str, known: Sequence[str], otherwise: Sequence[str] = ()) -> str:
    """The known names that are most like a name that is not known, as the end of an error.

    Args:
        name: What was written.
        known: What was most likely meant; the first of it is offered if nothing at all is like the name.
        otherwise: What else could have been meant: it is offered if nothing of `known` is like the name.
    """
    near = alike(name, known) or alike(name, otherwise) or list(known or otherwise)[:_MOST_NEAREST]
    return f"Nearest: {', '.join(map(repr, near))}."


def alike(name: str, known: Sequence[str], cutoff: float = 0.4) -> list[str]:
    """A few of the known names, those that are most like a name, from 0 (not at all) to 1 (the same)."""
    return difflib.get_close_matches(name, known, n=_MOST_NEAREST, cutoff=cutoff)


def shortened(names: Sequence[str], most: int) -> str:
    """`"a, b, c"`, or `"a, b and 3 more"`."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def table(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Lines of a table with a rule below its headings.

    Args:
        rows: Cells, the headings first.
        right: Columns that are flush right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        fitted = (c.rjust(w) if n in right else c.ljust(w) for n, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return ("  " + "  ".join(fitted)).rstrip()

    headings, *rest = map(line, rows)
    return [headings, "  " + "  ".join("-" * width for width in widths), *rest]
