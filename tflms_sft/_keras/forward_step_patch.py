"""Evaluation and prediction in forward loops, under `evaluate`, `predict`, and for the validation of a `fit`.

`train_step_patch.py` does the same for training, with these differences: the function that a model had is kept and put
back; what was rewritten is kept, too, because a `fit` validates after every epoch; and a model need not be compiled to
predict.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from rewriters.errors import BudgetError, RewriteError
from tflms_sft._keras.model_checks import check_keras, check_runs
from tflms_sft._keras.replicas import number_of
from tflms_sft._keras.train_step_patch import StepKind, StepPatch
from tflms_sft._params.request import RewriteRequest

EVALUATION = StepKind("test_step", "test_function", "make_test_function", "_tflms_sft_evaluation")
PREDICTION = StepKind("predict_step", "predict_function", "make_predict_function", "_tflms_sft_prediction")

CALLED = {EVALUATION: "evaluate", PREDICTION: "predict"}
VALIDATION = "validation"


class ForwardInstallation(StepPatch):
    """A rewritten step without gradients in a model.

    Args:
        kind: Which step it is.
        within_fit: Whether it is the validation of a `fit`, which runs plain if it cannot be rewritten.
        on_failure: Is called when a step has raised something, after all is put back.
        tell: Is given lines.
        *args: As for `StepPatch`.
        **kwargs: As for `StepPatch`.
    """

    def __init__(
        self,
        kind: StepKind,
        within_fit: bool,
        on_failure: Callable[[], None],
        tell: Callable[[str], None],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.kind = kind
        self.called = VALIDATION if within_fit else CALLED[kind]
        self._within_fit = within_fit
        self._on_failure = on_failure
        self._tell_user = tell
        self._runs_plain = False
        self._function: Any = None

    def begin(self) -> None:
        """Install; from the second time on what was rewritten the first time."""
        if self._installed is None:
            self.install()
        else:
            self.resume()

    def _check(self) -> None:
        check_keras(self.model)
        check_runs(self.model)

    def _place(self) -> None:
        self._function = getattr(self.model, self.kind.function)
        super()._place()

    def _make_plain_again(self) -> None:
        """Put the function back that the model had, unless it was given another one meanwhile."""
        if getattr(self.model, self.kind.function) is self._installed:
            setattr(self.model, self.kind.function, self._function)

    def run(self, iterator: Any) -> Any:
        """The model's function."""
        if self.kind is PREDICTION and not self._first_batch:
            self._note(iterator[0])  # Keras hands over a list of batches.
        try:
            return super().run(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except BaseException:
            self._on_failure()
            raise

    @tf.autograph.experimental.do_not_convert
    def step(self, data: Any) -> Any:
        """What Keras traces. A validation that cannot be rewritten does not end a training: it runs plain."""
        if self._runs_plain:
            return self._original(data)
        try:
            return super().step(data)
        except BudgetError:
            raise
        except RewriteError as error:
            if not self._within_fit:
                raise
            self._runs_plain = True
            text = f"tflms-sft: {self.called} runs plain, which the budget is not held for: {error}"
            if self._say is None:
                warnings.warn(text, stacklevel=2)
            self._tell_user(text)
            return self._original(data)

    def _spec(self, tensor: Any, position: int) -> Any:
        """For predictions any number of images: the last batch, which is smaller, needs no plan of its own."""
        spec = super()._spec(tensor, position)
        if self.kind is not PREDICTION or spec is None or not spec.shape.rank:
            return spec
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)

    def _beside(self, traced: Any) -> list[int]:
        """Optimizer slots and other variables that training leaves on the device."""
        touched = {id(tensor) for tensor in traced.captured_inputs}
        optimizer = getattr(self.model, "optimizer", None)
        variables = [*self.model.variables, *(optimizer.variables if optimizer is not None else [])]
        values = {id(variable.value): variable.value for variable in variables}
        return [
            math.prod(value.shape) * value.dtype.size
            for value in values.values()
            if isinstance(value, tf.Variable) and id(value.handle) not in touched
        ]


def tiles_alone(params: RewriteRequest) -> RewriteRequest | None:
    """What of the parameters goes for a step without gradients; `None` if nothing does."""
    return None if params.tiles is None else RewriteRequest(params.tiles)


def why_plain(model: Any, params: RewriteRequest) -> str:
    """Why a step without gradients is left as it is, whatever it computes; empty if it is not."""
    replicas = number_of(getattr(model, "distribute_strategy", None))
    if params.pipeline is not None:
        return "a pipeline is for training"
    if params.tiles is None:
        return "nothing waits for a swap without a backward phase"
    if replicas > 1:
        return f"on {replicas} replicas only training is rewritten"
    return ""
