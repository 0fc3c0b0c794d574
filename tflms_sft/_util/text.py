"""Short lists of names and tables for errors and reports."""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Sequence

_MAX_SUGGESTIONS = 4

_IN_TILE_LOOP = re.compile(r"(?:micro_\d+/)?sft/([^/]+)/([^/]+)/while(?:/body/[^/]+/while/(.+))?")
"""Names of a tile loop, or of an op in its iterations: segment, loop and op."""


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


def shortened(names: Sequence[str], most: int) -> str:
    """Return a list of names as `"a, b, c"`, or `"a, b and 3 more"`."""
    num_omitted = len(names) - most
    return ", ".join(names[:most]) + (f" and {num_omitted} more" if num_omitted > 0 else "")


def loop_text(segment: str, loop: str) -> str:
    """Return the name of a tile loop for users, such as `"backward loop 2 of segment1"`.

    Args:
        segment: Name of the segment.
        loop: `"forward"` or `"backward"`, with a number if a segment has several such loops.
    """
    direction = loop.rstrip("0123456789")
    number = loop[len(direction) :]
    return f"{direction} loop {number} of {segment}" if number else f"{direction} loop of {segment}"


def readable(op: str) -> str:
    """Return the name of an op for users: tile loops in words, and ops in them without the scopes of the runtime."""
    match = _IN_TILE_LOOP.fullmatch(op)
    if match is None:
        return op
    loop = f"the {loop_text(match[1], match[2])}"
    return f"{match[3]} (in {loop})" if match[3] else loop


def table(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return the lines of a table with a rule below its headings.

    Args:
        rows: Cells of each row, headings first.
        right: Indices of right-aligned columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        fitted = (c.rjust(w) if n in right else c.ljust(w) for n, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return ("  " + "  ".join(fitted)).rstrip()

    headings, *lines = map(line, rows)
    return [headings, "  " + "  ".join("-" * width for width in widths), *lines]
