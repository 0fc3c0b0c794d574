"""`RewrittenStep`: a rewritten step that is called like the original."""

from __future__ import annotations

import textwrap
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.device.gpu_kernels import without_gpu_optimizers
from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from rewriters.step_importer import StepImporter
from rewriters.swapping.tiers import Tier
from tflms_sft._batches.batch_limits import BatchLimit, planned_size_error
from tflms_sft._cluster.worker_watch import workers_watched
from tflms_sft._report.plan import Plan, amend_plan
from tflms_sft._report.summary import excess_remedy
from tflms_sft._rewrite import peak_statistics
from tflms_sft._sources.region_reads import read_errors
from tflms_sft._trace.step_tracing import spec_of
from tflms_sft._util.byte_sizes import format_bytes, format_excess

_MAX_CHARACTERS = 600
"""Longest text of arguments in an error: a list may contain a whole image."""


class RewrittenStep:
    """A rewritten training step for one signature, the result of `rewrite`.

    Call it like the original step. It keeps the variables of the original alive and may be called inside a
    `tf.function`. It cannot be differentiated, because its gradients are inside, and cannot be pickled.

    The first call of a step with a budget, outside of a `tf.function`, is measured where the device keeps memory
    statistics. A peak above the budget is a warning.

    Attributes:
        plan: The `Plan`: segments, swaps, predictions, and the measurement once there is one.
        concrete_function: The rewritten step as a `ConcreteFunction` over flat tensors.
        tiers: Destinations of swaps; empty without swaps.
    """

    def __init__(
        self, original: Any, importer: StepImporter, plan: Plan, batch_limit: BatchLimit | None = None
    ) -> None:
        """Trace the rewritten step.

        Args:
            original: The original step as a `ConcreteFunction`.
            importer: Imports the rewritten graph into a trace.
            plan: Plan of the rewriting.
            batch_limit: Check of batches whose size the signature leaves open; `None` checks nothing.
        """
        self.plan = plan
        self._is_measured = plan.memory_budget is None  # Only a budget is compared.
        self._original = original
        self._variables = tf_internals.living_variables(original)  # The trace holds handles only; `verify` retraces.
        self._importer = importer
        self._signature = original.structured_input_signature
        flat = tf.nest.flatten(self._signature)
        self._specs = [spec for spec in flat if isinstance(spec, tf.TypeSpec)]
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in original.inputs[: importer.num_arguments]]

        def run(*arguments: Any) -> Any:
            return importer(arguments if batch_limit is None else batch_limit.check_batch(arguments))

        # In a `tf.function` of the user, `without_gpu_optimizers` holds for a call that TensorFlow does not inline.
        attributes = {"_noinline": True} if importer.graph.device.is_gpu else None
        self._function = tf.function(run, input_signature=specs, autograph=False, experimental_attributes=attributes)
        self.concrete_function = self._function.get_concrete_function()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step, and return what the original step returns.

        Args:
            *args: Arguments as for the original step: tensors, arrays or numbers. NumPy arrays are cast to the dtype
                of the signature within their kind, such as float64 to float32.
            **kwargs: Keyword arguments, likewise.

        Raises:
            RewriteError: If the step is called inside a gradient tape that watches its inputs, or with a larger batch
                than its budget was planned for. (Called in a `tf.function`, the latter is TensorFlow's
                `InvalidArgumentError` with the same text.)
            WorkerError: If a worker that the step runs on is lost.
            ImageReadError: If an image cannot be read from its file. No variable has changed.
            TypeError: If an argument has another structure, shape or dtype than the signature.
        """
        flat = self._flat(args, kwargs)
        try:
            with workers_watched(), read_errors(), without_gpu_optimizers():
                return self._run(flat)
        except BaseException as error:
            self._importer.abandon()
            size_error = planned_size_error(error)
            if size_error is not None:
                raise size_error from None
            if type(error) is LookupError:  # Raised by TensorFlow's gradient registry, which a tape queries here.
                raise RewriteError(
                    "A rewritten step cannot be differentiated, and it was called in a gradient tape that watches its "
                    "inputs. Call it outside of the tape, or in `with tape.stop_recording():`. TensorFlow's error: "
                    f"{error}"
                ) from error
            raise

    @tf.autograph.experimental.do_not_convert
    def _run(self, flat: list[Any]) -> Any:
        """Run the step; measure the first call under a budget, and warn if it exceeds the budget."""
        if self._is_measured or not tf.executing_eagerly():
            return self._function(*flat)
        self._is_measured = True
        in_use = peak_statistics.reset_peak(self.tiers)
        result = self._function(*flat)
        if in_use is None:
            return result
        tf.nest.map_structure(lambda value: value.numpy() if hasattr(value, "numpy") else value, result)
        arguments = (int(tf.size(tensor)) * tensor.dtype.size for tensor in flat)
        step_bytes = [*tf_internals.variable_sizes(self.concrete_function), *arguments]
        self.plan = amend_plan(self.plan, measured=peak_statistics.read_peak(in_use, step_bytes, self.tiers))
        excess = excess_text(self.plan)
        if excess:
            warnings.warn(excess, stacklevel=3)
        return result

    @property
    def tiers(self) -> list[Tier]:
        """Destinations of swaps; empty without swaps."""
        return self._importer.tiers

    def __reduce__(self) -> Any:
        """Refuse pickling.

        Raises:
            TypeError: Always.
        """
        raise TypeError("A rewritten step cannot be pickled. Rewrite the step again where it is needed.")

    def _flat(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the tensors of the arguments in the order of the signature.

        Raises:
            TypeError: If they do not match the signature.
        """
        values = tf.nest.flatten(self._bound(args, kwargs))
        tensors = []
        for value, spec in zip(values, tf.nest.flatten(self._signature), strict=True):
            if not isinstance(spec, tf.TypeSpec):
                if isinstance(value, type(spec)) and value == spec or value is spec:
                    continue
                raise self._signature_error(args, kwargs)
            if isinstance(value, np.ndarray) and np.can_cast(value.dtype, spec.dtype.as_numpy_dtype, "same_kind"):
                value = value.astype(spec.dtype.as_numpy_dtype, copy=False)  # float64 to float32, not 0.5 to 0.
            try:
                tensor = tf.convert_to_tensor(value, dtype_hint=None if hasattr(value, "dtype") else spec.dtype)
            except (TypeError, ValueError):
                raise self._signature_error(args, kwargs) from None
            if tensor.dtype != spec.dtype or not spec.shape.is_compatible_with(tensor.shape):
                raise self._signature_error(args, kwargs)
            tensors.append(tensor)
        return tensors

    def _bound(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments in the structure of the signature.

        Positional arguments may be given by keyword. An argument without a tensor is a constant of the trace and may
        be omitted.
        """
        positional, keywords = self._signature
        names = self._original.function_type.parameters if hasattr(self._original, "function_type") else {}
        args, kwargs = list(args), dict(kwargs)
        for name, spec in list(zip(names, positional, strict=False))[len(args) :]:
            if name in kwargs:
                args.append(kwargs.pop(name))
            elif _is_fixed(spec):
                args.append(spec)
        kwargs.update({name: spec for name, spec in keywords.items() if name not in kwargs and _is_fixed(spec)})
        try:
            tf.nest.assert_same_structure((positional, keywords), (tuple(args), kwargs), check_types=False)
        except (TypeError, ValueError):
            raise self._signature_error(args, kwargs) from None
        return tuple(args), kwargs

    def _signature_error(self, args: Any, kwargs: Any) -> TypeError:
        """Return the error for arguments that do not match the signature."""
        received = textwrap.shorten(str(tf.nest.map_structure(spec_of, (tuple(args), kwargs))), _MAX_CHARACTERS)
        return TypeError(
            f"This step was rewritten for one signature. Expected: {self._signature}. Received: {received}. "
            "Rewrite the step for these arguments too."
        )


def excess_text(plan: Plan) -> str:
    """Return the warning for a measured peak above the budget of a plan; empty if it is not above."""
    measured, budget = plan.measured, plan.memory_budget
    if measured is None or budget is None or measured.peak_bytes <= budget:
        return ""
    used, limit = format_excess(measured.peak_bytes, budget)
    remedy = excess_remedy(measured.peak_bytes - plan.predicted.peak_bytes, budget, is_used=False)
    return (
        f"tflms-sft: the first call used {used}, predicted {format_bytes(plan.predicted.peak_bytes)}, more than its "
        f"budget of {limit}. {remedy}"
    )


def _is_fixed(spec: Any) -> bool:
    """Tell whether an argument of a signature contains no tensor."""
    return not any(isinstance(leaf, tf.TypeSpec) for leaf in tf.nest.flatten(spec))
