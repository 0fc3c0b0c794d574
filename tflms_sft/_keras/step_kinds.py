"""The attribute that holds an installed patch, and the check that no step is patched now."""

from __future__ import annotations

import weakref
from typing import Any

from rewriters.errors import RewriteError
from tflms_sft._keras.model_checks import check_model
from tflms_sft._keras.replicas import num_replicas
from tflms_sft._util.keras_internals import ABSENT, TRAINING, StepKind, overriding


def slot_of(kind: StepKind) -> str:
    """Return the name of the attribute that holds the installed patch of a step."""
    return f"_tflms_sft_{kind.name}"


class Excesses:
    """Bytes by which measured peaks exceed predicted ones of earlier plans, by model and kind of step.

    Models are weak keys: Python may give the address of a deleted model to the next one. A copy starts empty.
    """

    def __init__(self) -> None:
        self._by_model: weakref.WeakKeyDictionary[Any, dict[StepKind, int]] = weakref.WeakKeyDictionary()

    def of(self, model: Any, kind: StepKind) -> int:
        """Return the excess of the latest plan of a step; 0 without one."""
        return self._by_model.get(model, {}).get(kind, 0)

    def set(self, model: Any, kind: StepKind, excess_bytes: int) -> None:
        """Set the excess that the next plans of a step expect."""
        self._by_model.setdefault(model, {})[kind] = excess_bytes

    def __reduce__(self) -> Any:
        """Copy and pickle as an empty object: weak keys can be neither."""
        return Excesses, ()


def check_not_patched(model: Any) -> None:
    """Refuse a model whose original step cannot run now: it is patched, or trains on several replicas.

    Raises:
        RewriteError: With the remedy.
    """
    check_model(model)
    patch = overriding(model, slot_of(TRAINING))
    if patch is not ABSENT:
        raise RewriteError(
            f"The step of model {model.name!r} is currently rewritten by {patch._owner}. Call this function "
            "before or after that training."
        )
    replicas = num_replicas(model.distribute_strategy)
    if replicas > 1:
        raise RewriteError(
            f"Model {model.name!r} trains on {replicas} replicas; only a step on one replica can be compared. Create "
            "the model outside of the strategy's scope."
        )
