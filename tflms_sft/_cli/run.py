"""`tflms-sft run`: a training script as it is, every `fit` within a budget.

The script may set variables that TensorFlow reads when it is imported, and options that it takes only before its
first operation. So nothing is imported before the script asks for it, and `keras.Model.fit` is replaced when Keras is.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType, TracebackType
from typing import Any

from tflms_sft._cli.exit_status import INTERRUPTED, NOT_MET, OK, WRONG_ARGUMENTS

__all__: list[str] = []

_PREFIX = "tflms-sft run:"

_NO_TEXT = (".pyc", ".pyz", ".zip")
"""Ends of the names of programs that are no source."""


def execute(options: argparse.Namespace) -> int:
    """Run a script.

    Args:
        options: `script`, `module`, `arguments`; `budget`, `headroom`, `no_swap`; `report`, `quiet`.

    Returns:
        The exit code of the script; 2 if there is no such script.
    """
    problem = _problem(options)
    if problem:
        print(f"{_PREFIX} error: {problem}", file=sys.stderr)
        return WRONG_ARGUMENTS
    budget = Budget(options.budget, options.headroom, not options.no_swap, not options.quiet)
    with budget.in_force(), _arguments(options):
        code = _run(options)
    if options.report:
        with open(options.report, "w", encoding="utf-8") as file:
            json.dump({"command": "run", "exit_code": code, "fits": budget.fits()}, file, indent=2)
    if not budget.callbacks and not options.quiet:
        why = f"; {budget.others} had a callback of tflms_sft's already" if budget.others else ""
        print(f"{_PREFIX} no `fit` of a Keras model ran under the budget{why}", file=sys.stderr)
    return code


def _problem(options: argparse.Namespace) -> str:
    if not options.module and not os.path.isfile(options.script):
        hint = " Options come before the script." if options.script.startswith("-") else ""
        return f"SCRIPT must be a file that exists. Received: {options.script!r}.{hint}"
    if options.report and not os.path.isdir(os.path.dirname(os.path.abspath(options.report))):
        return f"--report must be a file in a directory that exists. Received: {options.report!r}."
    return ""


class Budget:
    """Gives every `fit` of a Keras model a callback.

    Attributes:
        callbacks: Those that were given, in order.
        others: Number of `fit`s that had one already.
    """

    def __init__(self, memory_budget: Any, headroom: float | None, swap: bool, verbose: bool) -> None:
        self._budget = memory_budget
        self._options: dict[str, Any] = {"swap": swap, "verbose": int(verbose)}
        if headroom is not None:
            self._options["headroom"] = headroom
        self.callbacks: list[Any] = []
        self.others = 0
        self._replaced: tuple[Any, Any] | None = None

    def fits(self) -> list[Any]:
        """The plan of each `fit`, as JSON has it; `None` for one that ended before its first step."""
        return [None if one.plan is None else json.loads(one.plan.to_json()) for one in self.callbacks]

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Replace `keras.Model.fit`, now or when Keras is imported, and put it back in the end."""
        finder = _WhenImported("keras", self._patch)
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
            _build(args[0], bound.arguments.get("x"))
            with self._given(args[0], bound.arguments.get("callbacks")) as callbacks:
                bound.arguments["callbacks"] = callbacks
                return plain(*bound.args, **bound.kwargs)

        self._replaced = keras.Model, vars(keras.Model).get("fit")  # None: it inherits it.
        keras.Model.fit = fit

    def _restore(self) -> None:
        if self._replaced is None:
            return
        model, own = self._replaced
        if own is None:
            del model.fit
        else:
            model.fit = own

    @contextlib.contextmanager
    def _given(self, model: Any, callbacks: Any) -> Iterator[Any]:
        """The callbacks of a `fit` with one more, while it lasts."""
        import keras

        from tflms_sft._keras.callbacks import MemoryBudget
        from tflms_sft._keras.rewriting_callback import RewritingCallback

        container = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
        own = list(container.callbacks if container is not None else keras.tree.flatten(callbacks))
        if any(isinstance(callback, RewritingCallback) for callback in own):
            self.others += 1
            yield callbacks
            return
        ours = MemoryBudget(self._budget, **self._options)
        self.callbacks.append(ours)
        if container is None:
            yield [*(callback for callback in own if callback is not None), ours]
            return
        container.callbacks.append(ours)
        ours.set_model(model)  # The container told the others when it was made.
        ours.set_params(container.params)
        try:
            yield container
        finally:
            container.callbacks.remove(ours)


def _build(model: Any, data: Any) -> None:
    """Make the weights of a model that Keras would make in its first step: a step is rewritten before it is run.

    They are the same, drawn in the same order. Where batches cannot be looked at without taking them, as those of a
    generator, nothing is done, and the callback says what is missing.
    """
    import keras

    if model.built and model.weights:
        return
    with contextlib.suppress(Exception):  # The model's own errors are raised by its `fit`.
        if hasattr(data, "element_spec"):
            data = data.element_spec
        elif isinstance(data, keras.utils.PyDataset):
            data = data[0]
        images = data[0] if isinstance(data, tuple) else data
        model(keras.tree.map_structure(_symbol, images))


def _symbol(array: Any) -> Any:
    """Stands for a batch of such arrays, as `fit` hands them to the model."""
    import keras

    dtype = getattr(array.dtype, "name", array.dtype)
    return keras.KerasTensor((None, *array.shape[1:]), keras.config.floatx() if "float" in dtype else dtype)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls back when a module has been imported."""

    def __init__(self, name: str, then: Any) -> None:
        self._name = name
        self._then = then

    def find_spec(  # noqa: D102
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Then(spec.loader, self._then)
        return spec


class _Then(importlib.abc.Loader):
    """A loader that calls back when it is done."""

    def __init__(self, loader: Any, then: Any) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:  # noqa: D102
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:  # noqa: D102
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # As if nobody had been between.
        self._loader.exec_module(module)
        self._then(module)


@contextlib.contextmanager
def _arguments(options: argparse.Namespace) -> Iterator[None]:
    """`sys.argv` and `sys.path` as the script expects them."""
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
        elif options.script.endswith(_NO_TEXT):
            runpy.run_path(os.path.abspath(options.script), run_name="__main__")
        else:
            _run_file(options.script)
    except SystemExit as stop:
        return _exit_code(stop.code)
    except BaseException as error:
        error.__traceback__ = _of_the_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else NOT_MET
    return OK


def _run_file(script: str) -> None:
    """As `python script` does: `runpy` would change the name in `sys.argv` to that of `__file__`."""
    path = os.path.abspath(script)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __cached__=None, __builtins__=builtins)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        with open(path, "rb") as file:
            # What this module imports from `__future__` is no business of the script's.
            exec(compile(file.read(), path, "exec", dont_inherit=True), main.__dict__)
    finally:
        sys.modules["__main__"] = before


def _exit_code(code: Any) -> int:
    """As Python has it."""
    if code is None or isinstance(code, int):
        return OK if code is None else int(code)
    print(code, file=sys.stderr)
    return NOT_MET


def _of_the_script(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without what is above the script; none for a script that could not be read."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__") != "__main__":
        frames = frames.tb_next
    return frames
