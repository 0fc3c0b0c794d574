"""Reads the command line, runs the command, and turns errors into one paragraph and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Sequence

from rewriters.errors import BudgetError, RewriteError
from tflms_sft._cli import parser
from tflms_sft._cli.exit_status import INTERRUPTED, NOT_MET, WRONG_ARGUMENTS, Outcome, UsageError

__all__: list[str] = []

_MODULES = {"max-input": "max_size", "max-batch": "max_size"}
"""Modules of commands that are not called like them. They import TensorFlow, so they are imported when needed."""

_MOST_CHARACTERS = 2000
"""Of an error."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Defaults to those of the process.

    Returns:
        The exit code: 0 ok, 1 what was asked for cannot be met or a check failed, 2 wrong arguments, 130 Ctrl-C;
        of `run` that of the script.

    Raises:
        SystemExit: For `--help`, `--version`, and arguments that cannot be read.
    """
    options = parser.parse(arguments)
    if options.command == "run":
        return importlib.import_module("tflms_sft._cli.run").execute(options)
    # TensorFlow reads it when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        # What a model's own code prints is not the answer.
        with contextlib.redirect_stdout(sys.stderr):
            command = importlib.import_module(f"tflms_sft._cli.{_MODULES.get(options.command, options.command)}")
            outcome = command.execute(options)
        code = _printed(outcome, options.json)
        if outcome.then is not None:
            outcome.then()
        return code
    except KeyboardInterrupt:
        print("tflms-sft: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _failed(error, options)


def _printed(outcome: Outcome, as_json: bool) -> int:
    try:
        print(json.dumps(outcome.data, indent=2) if as_json else outcome.text, flush=True)
    except BrokenPipeError:  # `| head` has seen enough; the interpreter must not flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return outcome.code


def _failed(error: Exception, options: argparse.Namespace) -> int:
    """Says what went wrong."""
    if options.traceback:
        traceback.print_exception(error)
    known = isinstance(error, (UsageError, RewriteError))
    text = str(error) if known else f"{type(error).__name__}: {error}"
    text = text.replace("`memory_budget`", "--budget").replace("memory_budget=", "--budget ")
    text = textwrap.shorten(text, _MOST_CHARACTERS, placeholder=" ...")
    hint = "" if known or options.traceback else " (--traceback shows where this was raised)"
    print(f"tflms-sft {options.command}: error: {text}{hint}", file=sys.stderr)
    code = WRONG_ARGUMENTS if isinstance(error, UsageError) else NOT_MET
    if options.json:
        about: dict[str, object] = {"type": type(error).__name__, "message": text}
        if isinstance(error, BudgetError) and getattr(error, "smallest_bytes", None) is not None:
            about["smallest_bytes"] = error.smallest_bytes
        _printed(Outcome("", {"command": options.command, "error": about}), True)
    return code
