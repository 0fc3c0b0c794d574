"""How a command ends: exit codes, what goes to stdout, and what to stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__: list[str] = []

OK, NOT_MET, WRONG_ARGUMENTS, INTERRUPTED = 0, 1, 2, 130

EXIT_CODES = """exit codes:
  0    ok
  1    the budget cannot be met, the step cannot be rewritten as asked, a check failed, or a
       worker cannot serve
  2    wrong arguments
  130  stopped with Ctrl-C
"""


SHORT_SECONDS = 2
"""What takes no longer needs no second line."""


class UsageError(Exception):
    """Something in the arguments is wrong; the message says what was expected."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command found.

    Attributes:
        text: For people.
        data: For programs (`--json`).
        code: Exit code.
        then: What goes on after this was printed, without end; `None` if nothing does.
    """

    text: str
    data: dict[str, Any]
    code: int = OK
    then: Callable[[], None] | None = None


class Progress:
    """Lines on stderr about what takes seconds.

    Args:
        quiet: Whether to say nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet

    def say(self, text: str) -> None:
        """One line."""
        if not self._quiet:
            print(f"tflms-sft: {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Say what is going on, and how long it took if that was long."""
        self.say(f"{what} ...")
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        if seconds > SHORT_SECONDS:
            self.say(f"{what} took {seconds:.0f} s")


def table(rows: list[list[str]]) -> str:
    """Columns side by side, without what would trail at the end of a line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
