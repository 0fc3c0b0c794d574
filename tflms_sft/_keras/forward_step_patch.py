"""Patches for steps without gradients: `evaluate`, `predict`, and the validation of a `fit`.

They differ from the training patch in `train_step_patch.py` in three points:

- The function that the model had before is saved and restored.
- The rewritten step is kept, because a `fit` validates after every epoch.
- A model need not be compiled to predict.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from rewriters.errors import BudgetError, RewriteError
from rewriters.step_importer import StepImporter
from tflms_sft._keras.model_checks import check_runs_graph, check_trainer, reason_runs_eagerly, variable_bytes
from tflms_sft._keras.train_step_patch import StepPatch
from tflms_sft._params.request import RewriteRequest
from tflms_sft._planner.traced_step import TracedStep
from tflms_sft._report.plan import Plan
from tflms_sft._util.keras_internals import EVALUATION, PREDICTION, StepKind

CALLED = {EVALUATION: "evaluate", PREDICTION: "predict"}
VALIDATION = "validation"


class ForwardStepPatch(StepPatch):
    """A rewritten step without gradients in a model.

    Args:
        model: As for `StepPatch`.
        params: As for `StepPatch`.
        kind: The step: `EVALUATION` or `PREDICTION`.
        within_fit: Whether it is the validation of a `fit`, which keeps its original step if it cannot be rewritten.
        on_failure: Called after a step has raised an error and the model has been restored.
        print_line: Called with lines for the user.
        **options: Keyword arguments of `StepPatch`.

    Attributes:
        called: Name of the call in messages: "evaluate", "predict" or "validation".
    """

    def __init__(
        self,
        model: Any,
        params: RewriteRequest,
        *,
        kind: StepKind,
        within_fit: bool,
        on_failure: Callable[[], None],
        print_line: Callable[[str], None],
        **options: Any,
    ) -> None:
        super().__init__(model, params, **options)
        self.kind = kind
        self.called = VALIDATION if within_fit else CALLED[kind]
        self._within_fit = within_fit
        self._on_failure = on_failure
        self._print = print_line
        self._runs_original = False
        self._is_running = False
        self._original_function: Any = None

    def begin(self) -> None:
        """Install the patch; from the second time on, install the step that was rewritten before."""
        if self._patched_function is None:
            self.install()
        else:
            self.resume()

    def _check(self) -> None:
        check_trainer(self.model)
        check_runs_graph(self.model)

    def _insert(self) -> None:
        self._original_function = getattr(self.model, self.kind.function)
        super()._insert()

    def _rewrite_analysed(self, analysed: TracedStep) -> tuple[StepImporter, Plan]:
        """Rewrite the step; see `StepPatch._rewrite_analysed`.

        Raises:
            BudgetError: If no plan fits. In a `fit` the training may fit, and its first epoch is over.
        """
        try:
            return super()._rewrite_analysed(analysed)
        except BudgetError as error:
            smaller = "`validation_batch_size=`" if self._within_fit else "a smaller `batch_size=`"
            error.args = (f"{self.called}: {error} Or pass {smaller}.",)
            raise

    def _restore_function(self) -> None:
        """Restore the function that the model had, unless it has received another one since."""
        if getattr(self.model, self.kind.function) is self._patched_function:
            setattr(self.model, self.kind.function, self._original_function)

    def run(self, iterator: Any) -> Any:
        """Run the model's function in a patched model; see `StepPatch.run`."""
        self._is_running = True
        try:
            if self.kind is PREDICTION:  # Keras passes a list of batches.
                if not self._now.shapes:
                    self._remember_shapes(iterator[0])
                self._select_size(iterator[0])
            return super().run(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except BaseException:
            self._on_failure()
            raise
        finally:
            self._is_running = False

    def _is_step(self, function: Any) -> bool:
        """Tell whether a function is the step; Keras wraps that of `predict`, and passes nothing else to a strategy."""
        return self._is_running if self.kind is PREDICTION else super()._is_step(function)

    @property
    def _can_select_size(self) -> bool:
        """Tell whether each size may have a plan of its own: the original step of a validation is for any size."""
        return not self._runs_original and super()._can_select_size

    @tf.autograph.experimental.do_not_convert
    def step(self, data: Any) -> Any:
        """Run the rewritten step; a validation that cannot be rewritten runs its original step instead of failing."""
        if self._runs_original:
            return self._original(data)
        try:
            return super().step(data)
        except BudgetError:
            raise
        except RewriteError as error:
            if not self._within_fit:
                raise
            self._runs_original = True
            text = f"tflms-sft: {self.called} is not rewritten, and the budget does not hold for it: {error}"
            if self._say is None:
                warnings.warn(text, stacklevel=2)
            self._print(text)
            return self._original(data)

    def _open_spec(self, tensor: Any) -> Any:
        """Return the spec of an input; a prediction accepts any batch size, so that its last batch needs no plan."""
        spec = super()._open_spec(tensor)
        if self.kind is not PREDICTION or not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            return spec
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)

    def _untouched_variable_bytes(self, traced: Any) -> list[int]:
        """Return the bytes of optimizer slots and other variables that training leaves on the device."""
        return variable_bytes(self.model, {id(tensor) for tensor in traced.captured_inputs})


def forward_request(params: RewriteRequest) -> RewriteRequest | None:
    """Return the part of a request that applies to a step without gradients: its tiles; `None` if it has none."""
    tiles = params.without_plan().tiles  # A saved plan is that of the training.
    return None if tiles is None else RewriteRequest(tiles)


def reason_not_rewritten(model: Any, params: RewriteRequest) -> str:
    """Return why steps without gradients of this model are not rewritten; empty if they are."""
    if params.pipeline is not None:
        return "pipelines are for training only"
    if params.has_budget and reason_runs_eagerly(model):
        return reason_runs_eagerly(model)
    if params.tiles is None:
        return "without a backward pass there are no saved tensors to swap"
    return ""
