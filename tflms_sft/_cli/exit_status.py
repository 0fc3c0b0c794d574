"""Results of a command: exit codes, the text for stdout, and progress lines for stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__: list[str] = []

OK, NOT_MET, WRONG_ARGUMENTS, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143

EXIT_CODES = {
    OK: "ok",
    NOT_MET: "no plan meets the budget, the step cannot be rewritten, a check failed, or a worker cannot serve",
    WRONG_ARGUMENTS: "wrong arguments",
    INTERRUPTED: "stopped with Ctrl-C; max-input, max-batch and curve print what they found until then",
    TERMINATED: "max-input, max-batch or curve was stopped with SIGTERM, and has printed what it found until then",
}
"""Meanings of the exit codes. `run` ends with the exit code of the script instead."""


MIN_REPORTED_SECONDS = 2
"""Duration above which `Progress.doing` prints it."""


class UsageError(Exception):
    """Raised for wrong arguments; the message states the expected value."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a command.

    Attributes:
        text: Text for people.
        data: Data for programs (`--json`).
        code: Exit code.
        then: Function to call after printing, which does not return; `None` to exit.
    """

    text: str
    data: dict[str, Any]
    code: int = OK
    then: Callable[[], None] | None = None


class Progress:
    """Prints progress lines on stderr, unless it is quiet."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet

    def say(self, text: str) -> None:
        """Print one line."""
        if not self._quiet:
            print(f"tflms-sft: {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Print an activity, and afterwards its duration if it took more than 2 seconds."""
        self.say(f"{activity} ...")
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        if seconds > MIN_REPORTED_SECONDS:
            self.say(f"{activity} took {seconds:.0f} s")
