"""`tflms-sft run`: runs an unchanged training script, with every `fit` within a budget.

The script may set variables that TensorFlow reads at its import, and options that TensorFlow accepts only before its
first operation. So this module imports neither Keras nor TensorFlow, and replaces `keras.Model.fit` when the script
imports Keras.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, TracebackType
from typing import Any

from tflms_sft._cli.exit_status import INTERRUPTED, NOT_MET, OK, WRONG_ARGUMENTS
from tflms_sft._cli.parser import budget_options

__all__: list[str] = []

_PREFIX = "tflms-sft run:"

_BINARY_SUFFIXES = (".pyc", ".pyz", ".zip")
"""Suffixes of programs that are not source text."""


def execute(options: argparse.Namespace) -> int:
    """Run a script, and return its exit code; 2 for a script or report file that cannot be used."""
    problem = _problem(options)
    if problem:
        print(f"{_PREFIX} error: {problem}", file=sys.stderr)
        return WRONG_ARGUMENTS
    budget = Budget(options.budget, verbose=int(not options.quiet), **budget_options(options))
    with budget.in_force(), _arguments(options):
        code = _run(options)
    if options.report:
        with open(options.report, "w", encoding="utf-8") as file:
            json.dump({"command": "run", "exit_code": code, "fits": budget.fits()}, file, indent=2)
    if not budget.callbacks and not options.quiet:
        reason = f"; {budget.num_skipped} had a callback of tflms_sft already" if budget.num_skipped else ""
        print(f"{_PREFIX} no `fit` of a Keras model ran under the budget{reason}", file=sys.stderr)
    return code


def _problem(options: argparse.Namespace) -> str:
    if not options.module and not os.path.isfile(options.script):
        hint = " Options come before the script." if options.script.startswith("-") else ""
        return f"SCRIPT must be a file that exists. Received: {options.script!r}.{hint}"
    if options.report and not os.path.isdir(os.path.dirname(os.path.abspath(options.report))):
        return f"--report must be a file in a directory that exists. Received: {options.report!r}."
    return ""


class Budget:
    """Adds a `MemoryBudget` callback, with given arguments, to every `fit` of a Keras model.

    Attributes:
        callbacks: The added callbacks, in the order of the `fit` calls.
        num_skipped: Number of `fit` calls that had a callback of tflms_sft already.
    """

    def __init__(self, memory_budget: Any, **options: Any) -> None:
        self._budget = memory_budget
        self._options = options
        self.callbacks: list[Any] = []
        self.num_skipped = 0
        self._replaced: tuple[Any, Any] | None = None

    def fits(self) -> list[Any]:
        """Return the JSON object of each plan; `None` for a `fit` that ended before its first step."""
        return [None if callback.plan is None else json.loads(callback.plan.to_json()) for callback in self.callbacks]

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Replace `keras.Model.fit`, now or when Keras is imported, and restore it at the end."""
        finder = _WhenKerasImported(self._patch)
        if "keras" in sys.modules:
            self._patch(sys.modules["keras"])
        else:
            sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
            self._restore()

    def _patch(self, keras: ModuleType) -> None:
        plain = keras.Model.fit
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def fit(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            with self._with_budget(args[0], bound.arguments.get("callbacks")) as callbacks:
                bound.arguments["callbacks"] = callbacks
                return plain(*bound.args, **bound.kwargs)

        self._replaced = keras.Model, vars(keras.Model).get("fit")  # None if inherited.
        keras.Model.fit = fit

    def _restore(self) -> None:
        if self._replaced is None:
            return
        model, fit = self._replaced
        if fit is None:
            del model.fit
        else:
            model.fit = fit

    @contextlib.contextmanager
    def _with_budget(self, model: Any, callbacks: Any) -> Iterator[Any]:
        """Yield the callbacks of a `fit` and a `MemoryBudget`, which is removed from a container afterwards."""
        import keras

        from tflms_sft._keras.callbacks import MemoryBudget
        from tflms_sft._keras.rewriting_callback import RewritingCallback

        container = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
        users = list(container.callbacks if container is not None else keras.tree.flatten(callbacks))
        if any(isinstance(callback, RewritingCallback) for callback in users):
            self.num_skipped += 1
            yield callbacks
            return
        budget = MemoryBudget(self._budget, **self._options)
        self.callbacks.append(budget)
        if container is None:
            yield [*(callback for callback in users if callback is not None), budget]
            return
        container.callbacks.append(budget)
        budget.set_model(model)  # A container does this for its callbacks at construction only.
        budget.set_params(container.params)
        try:
            yield container
        finally:
            container.callbacks.remove(budget)


class _WhenKerasImported(importlib.abc.MetaPathFinder):
    """Import hook that calls a function with Keras when it has been imported."""

    def __init__(self, callback: Callable[[ModuleType], None]) -> None:
        self._callback = callback

    def find_spec(  # noqa: D102
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "keras":
            return None
        # The hook stays until Keras is executed: libraries only look whether there is a Keras.
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader

        def exec_module(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            del loader.exec_module  # That of its class is in force again.
            loader.exec_module(module)
            self._callback(module)

        loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def _arguments(options: argparse.Namespace) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as `python` sets them for the script."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [options.script, *options.arguments]
    sys.path[:0] = [os.getcwd() if options.module else os.path.dirname(os.path.abspath(options.script))]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _run(options: argparse.Namespace) -> int:
    try:
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        elif options.script.endswith(_BINARY_SUFFIXES):
            runpy.run_path(os.path.abspath(options.script), run_name="__main__")
        else:
            _run_file(options.script)
    except SystemExit as stop:
        return _exit_code(stop.code)
    except BaseException as error:
        error.__traceback__ = _script_traceback(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else NOT_MET
    return OK


def _run_file(script: str) -> None:
    """Run a source file as `python` does. `runpy` would set `sys.argv[0]` to the absolute path."""
    path = os.path.abspath(script)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __cached__=None, __builtins__=builtins)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        with open(path, "rb") as file:
            # The script must not inherit the `__future__` imports of this module.
            exec(compile(file.read(), path, "exec", dont_inherit=True), main.__dict__)
    finally:
        sys.modules["__main__"] = before


def _exit_code(code: Any) -> int:
    """Return the exit code of a `SystemExit`, and print a text that it carries, as Python does."""
    if code is None or isinstance(code, int):
        return OK if code is None else int(code)
    print(code, file=sys.stderr)
    return NOT_MET


def _script_traceback(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames above the script; `None` for a script with a syntax error."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__") != "__main__":
        frames = frames.tb_next
    return frames
