"""Pytest plugin that adds `MemoryBudget` to every `fit` in Keras's own tests.

The environment variable `CLIENT_BUDGET` is the budget. Without it, the plugin adds nothing. Keras's tests import JAX.
If JAX is missing, the plugin puts an empty module in its place. Tests that need JAX then fail with and without budget.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

import keras
import keras.src.testing.test_case  # noqa: F401 (looks for JAX itself)

if "jax" not in sys.modules:
    try:
        import jax  # noqa: F401
    except ImportError:
        sys.modules["jax"] = types.ModuleType("jax")


def pytest_configure(config: Any) -> None:
    """Add the callback to `fit` of all trainers."""
    del config
    budget = os.environ.get("CLIENT_BUDGET")
    if not budget:
        return
    import tflms_sft

    trainer = keras.Model.__mro__[1]
    fit = trainer.fit

    @functools.wraps(fit)
    def fit_with_budget(self: Any, *args: Any, **kwargs: Any) -> Any:
        callbacks = kwargs.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            kwargs["callbacks"] = [*keras.tree.flatten(callbacks or []), tflms_sft.MemoryBudget(budget)]
        return fit(self, *args, **kwargs)

    trainer.fit = fit_with_budget
