"""Entry point: reads the command line, runs the command, and turns errors into one paragraph and an exit code."""

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

from rewriters.device.cards import CARDS
from rewriters.errors import BudgetError, RewriteError
from rewriters.ir.device_model import planning_for
from tflms_sft._cli import parser
from tflms_sft._cli.exit_status import INTERRUPTED, NOT_MET, WRONG_ARGUMENTS, Outcome, UsageError
from tflms_sft._util.requirements import check_backend, check_versions

__all__: list[str] = []

_MODULES = {"max-input": "max_size", "max-batch": "max_size"}
"""Modules of the commands that share one. Modules of commands import TensorFlow, so `main` imports them late."""

_MAX_ERROR_CHARACTERS = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of the process.

    Returns:
        The exit code: 0 ok, 1 no such plan or a failed check, 2 wrong arguments, 130 Ctrl-C. `run` returns the exit
        code of the script.

    Raises:
        SystemExit: For `--help`, `--version`, and arguments that cannot be read.
    """
    options = parser.parse(arguments)
    if options.command != "doctor":  # It reports versions itself.
        try:
            check_versions(quiet=options.quiet)
            if options.command != "run":  # The script may set the backend.
                check_backend()
        except RewriteError as error:
            return _report_error(error, options)
    if options.command == "run":
        return importlib.import_module("tflms_sft._cli.run").execute(options)
    # TensorFlow reads this variable when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        # Output of the model's own code must not mix with the result.
        with contextlib.redirect_stdout(sys.stderr), _planning_device(options):
            command = importlib.import_module(f"tflms_sft._cli.{_MODULES.get(options.command, options.command)}")
            outcome = command.execute(options)
        code = _print_outcome(outcome, options.json)
        if outcome.then is not None:
            outcome.then()
        return code
    except KeyboardInterrupt:
        print("tflms-sft: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _report_error(error, options)


def _planning_device(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Return the context in which plans are made for the card of `--device-model`, if there is one."""
    name = getattr(options, "device_model", None)
    return planning_for(CARDS[name].device_model) if name else contextlib.nullcontext()


def _print_outcome(outcome: Outcome, as_json: bool) -> int:
    try:
        print(json.dumps(outcome.data, indent=2) if as_json else outcome.text, flush=True)
    except BrokenPipeError:  # The reader, such as `head`, has exited; the interpreter must not flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return outcome.code


_OPTIONS_OF = {
    "`memory_budget`": "--budget",
    "memory_budget=": "--budget ",
    "`headroom=": "`--headroom ",
    "max_slowdown=": "--max-slowdown ",
    "with `swap=True`": "without `--no-swap`",
}
"""Words of errors about arguments in Python, and those on the command line."""


def _report_error(error: Exception, options: argparse.Namespace) -> int:
    """Print an error as one paragraph, and return the exit code."""
    if options.traceback:
        traceback.print_exception(error)
    is_expected = isinstance(error, (UsageError, RewriteError))
    text = str(error) if is_expected else f"{type(error).__name__}: {error}"
    for argument, option in _OPTIONS_OF.items():
        text = text.replace(argument, option)
    text = textwrap.shorten(text, _MAX_ERROR_CHARACTERS, placeholder=" ...")
    hint = "" if is_expected or options.traceback else " (--traceback shows where this was raised)"
    print(f"tflms-sft {options.command}: error: {text}{hint}", file=sys.stderr)
    code = WRONG_ARGUMENTS if isinstance(error, UsageError) else NOT_MET
    if options.json:
        record: dict[str, object] = {"type": type(error).__name__, "message": text}
        if isinstance(error, BudgetError) and getattr(error, "smallest_bytes", None) is not None:
            record["smallest_bytes"] = error.smallest_bytes
        _print_outcome(Outcome("", {"command": options.command, "error": record}), True)
    return code
