"""Installs a rewritten step in a Keras model, and restores the original.

Keras looks up `train_step` when it builds its train function, and the train function at every step. The installer
replaces both. It restores them

- when its owner says so: at the end of training, and after an error in a step, because Keras calls no callback then,
- at the start of the next training, if another callback has raised an error: the installer also replaces
  `make_train_function`, which Keras calls first in every training.

Evaluation and prediction work alike with another `StepKind`. Their function is not built again in the end: the one that
the model had before is restored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rewriters.errors import RewriteError
from tflms_sft._keras.messages import rewritten_twice_error
from tflms_sft._keras.model_checks import check_model
from tflms_sft._keras.replicas import StrategyProxy, num_replicas
from tflms_sft._util.keras_internals import ABSENT, DISTRIBUTE_STRATEGY, TRAINING, StepKind, override, overriding


def _slot(kind: StepKind) -> str:
    """Return the name of the attribute that holds the installer of a step in a model."""
    return f"_tflms_sft_{kind.step}"


@dataclasses.dataclass(eq=False)
class StepInstaller:
    """The replaced attributes of a model.

    Attributes:
        kind: The step that is replaced.
        step: Replaces the method for one batch.
        run: Replaces the compiled function.
        strategy: Replaces the strategy of the model; `None` keeps it.
        trace_again: Called when the step must be traced; it calls `make_function`.
        on_restore: Called when the model is restored.
        owner: Name of the callback or function that rewrites the step, for errors.
        training: Identifies the `fit` of a callback; `None` for a `with` block.
        original_step: The method for one batch that is replaced.
        has_disabled_jit: Whether the model is compiled with `jit_compile`, which is off while the step is installed.
    """

    model: Any
    kind: StepKind
    step: Callable[[Any], Any]
    run: Callable[[Any], Any]
    strategy: StrategyProxy | None
    trace_again: Callable[[], None]
    on_restore: Callable[[], None]
    owner: str
    training: object
    original_step: Any = dataclasses.field(init=False, default=None)
    has_disabled_jit: bool = dataclasses.field(init=False, default=False)
    _make_original: Any = dataclasses.field(init=False, default=None)
    _former_function: Any = dataclasses.field(init=False, default=None)
    _former_attributes: dict[str, Any] = dataclasses.field(init=False, default_factory=dict)

    @property
    def is_installed(self) -> bool:
        """Tell whether the model has the rewritten step."""
        return overriding(self.model, _slot(self.kind)) is self

    def install(self) -> None:
        """Replace the step, and have it traced."""
        self._insert()
        self.trace_again()

    def resume(self) -> None:
        """Replace the step again after a call inside this training restored the model.

        A `train_on_batch` in a callback is such a call: it builds a train function as a new training does, and runs
        the original step.
        """
        if overriding(self.model, _slot(self.kind)) is ABSENT:
            self._insert()

    def _insert(self) -> None:
        model, kind = self.model, self.kind
        self.original_step, self._make_original = getattr(model, kind.step), getattr(model, kind.make)
        self._former_function, self.has_disabled_jit = getattr(model, kind.function), bool(model.jit_compile)
        replacements = {_slot(kind): self, kind.step: self.step}
        replacements |= {} if self.strategy is None else {DISTRIBUTE_STRATEGY: self.strategy}
        replacements |= {} if self.training is None else {kind.make: self._make}
        self._former_attributes = {name: overriding(model, name) for name in replacements}
        for name, value in replacements.items():
            override(model, name, value)
        model.jit_compile = False
        setattr(model, kind.function, self.run)

    def make_function(self) -> Any:
        """Have Keras build the compiled function of the rewritten step, and return it."""
        try:
            self._make_original(force=True)
            function = getattr(self.model, self.kind.function)
            setattr(self.model, self.kind.function, self.run)
        except BaseException:  # A model may define `make_train_function` itself, and Keras calls no callback then.
            self.restore()
            raise
        return function

    def _make(self, force: bool = False) -> None:
        """Trace the step of this training again (`force`), or restore the model because a new training begins."""
        if force:
            self.trace_again()
        else:
            self.restore()
            getattr(self.model, self.kind.make)()

    def restore(self) -> None:
        """Restore the model; does nothing the second time."""
        if not self.is_installed:
            return
        model, kind = self.model, self.kind
        for name, saved in self._former_attributes.items():
            override(model, name, saved)
        self.on_restore()
        has_function = getattr(model, kind.function) is self.run
        if has_function:  # Else `compile` has set `jit_compile` since.
            model.jit_compile = self.has_disabled_jit
        if kind is TRAINING:
            setattr(model, kind.function, None)
            getattr(model, kind.make)()
        elif has_function:
            setattr(model, kind.function, self._former_function)


def remove_leftover(model: Any, kind: StepKind, owner: str, training: object) -> None:
    """Restore a model that a failed training has left with a rewritten step, before a training of `owner` begins.

    Raises:
        ValueError: If the step is rewritten in the same training, or in a `with` block.
    """
    previous = overriding(model, _slot(kind))
    if previous is ABSENT:
        return
    if previous.training is not None:  # A `with` block restores the model itself.
        previous.restore()
    if previous.training is None or previous.training is training:
        raise rewritten_twice_error(kind.step, model.name, previous.owner, owner)


def check_not_patched(model: Any) -> None:
    """Refuse a model whose original step cannot run now: it is replaced, or trains on several replicas.

    Raises:
        RewriteError: With the remedy.
    """
    check_model(model)
    installer = overriding(model, _slot(TRAINING))
    if installer is not ABSENT:
        raise RewriteError(
            f"The step of model {model.name!r} is currently rewritten by {installer.owner}. Call this function "
            "before or after that training."
        )
    replicas = num_replicas(model.distribute_strategy)
    if replicas > 1:
        raise RewriteError(
            f"Model {model.name!r} trains on {replicas} replicas; only a step on one replica can be compared. Create "
            "the model outside of the strategy's scope."
        )
