"""`RewrittenStep`: a rewritten step that is called as the original."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from rewriters.step_importer import StepImporter
from rewriters.swapping.tiers import Tier
from tflms_sft._cluster.worker_watch import workers_watched
from tflms_sft._report.plan import Plan
from tflms_sft._trace.step_tracing import spec_of

_MOST_CHARACTERS = 600
"""Of the arguments that an error repeats: a list may hold a whole image."""


class RewrittenStep:
    """A rewritten training step for one signature, as `rewrite` makes it.

    Call it as the original. It keeps the original's variables alive, may be called inside
    a `tf.function`, and cannot be differentiated or pickled.

    Args:
        original: The step as a `ConcreteFunction`.
        importer: What puts the rewritten graph into a trace.
        plan: What was done.

    Attributes:
        plan: What was done.
        concrete_function: The rewritten step as a `ConcreteFunction` over flat tensors.
    """

    def __init__(self, original: Any, importer: StepImporter, plan: Plan) -> None:
        self.plan = plan
        self._original = original
        self._variables = tf_internals.living_variables(original)  # Handles are kept anyway; `verify` traces anew.
        self._importer = importer
        self._signature = original.structured_input_signature
        flat = tf.nest.flatten(self._signature)
        self._specs = [spec for spec in flat if isinstance(spec, tf.TypeSpec)]
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in original.inputs[: importer.num_arguments]]

        def run(*arguments: Any) -> Any:
            return importer(arguments)

        self._function = tf.function(run, input_signature=specs, autograph=False)
        self.concrete_function = self._function.get_concrete_function()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step.

        Raises:
            RewriteError: If it is called in a gradient tape that watches what it reads.
            WorkerError: If a machine that it runs on is lost.
            TypeError: For arguments of another structure, shape or dtype than the step was rewritten for.
        """
        flat = self._flat(args, kwargs)
        try:
            with workers_watched():
                return self._function(*flat)
        except BaseException as error:
            self._importer.abandon()
            if type(error) is LookupError:  # From TensorFlow's registry of gradients, which it asks at the call.
                raise RewriteError(
                    "A rewritten step has its gradients inside and cannot be differentiated again, and it was called "
                    "in a gradient tape that watches what it reads. Call it outside of the tape, or in "
                    f"`with tape.stop_recording():`. TensorFlow says: {error}"
                ) from error
            raise

    @property
    def tiers(self) -> list[Tier]:
        """Where the step swaps to."""
        return self._importer.tiers

    def __reduce__(self) -> Any:
        """Refuse to be pickled."""
        raise TypeError("a rewritten step cannot be pickled: rewrite the step again where it is needed")

    def _flat(self, args: Any, kwargs: Any) -> list[Any]:
        signature = self._bound(args, kwargs)
        expected = tf.nest.flatten(self._signature)
        given = tf.nest.flatten(signature)
        result = []
        for value, spec in zip(given, expected, strict=True):
            if not isinstance(spec, tf.TypeSpec):
                if isinstance(value, type(spec)) and value == spec or value is spec:
                    continue
                raise self._refusal(args, kwargs)
            if isinstance(value, np.ndarray) and np.can_cast(value.dtype, spec.dtype.as_numpy_dtype, "same_kind"):
                value = value.astype(spec.dtype.as_numpy_dtype, copy=False)  # float64 to float32, not 0.5 to 0.
            try:
                tensor = tf.convert_to_tensor(value, dtype_hint=None if hasattr(value, "dtype") else spec.dtype)
            except (TypeError, ValueError):
                raise self._refusal(args, kwargs) from None
            if tensor.dtype != spec.dtype or not spec.shape.is_compatible_with(tensor.shape):
                raise self._refusal(args, kwargs)
            result.append(tensor)
        return result

    def _bound(self, args: Any, kwargs: Any) -> Any:
        """Arguments in the structure of the signature.

        Positional ones may be given by keyword, and what is not a tensor may be left out: it is fixed.
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
            raise self._refusal(args, kwargs) from None
        return tuple(args), kwargs

    def _refusal(self, args: Any, kwargs: Any) -> TypeError:
        given = textwrap.shorten(str(tf.nest.map_structure(spec_of, (tuple(args), kwargs))), _MOST_CHARACTERS)
        return TypeError(
            f"This step was rewritten for one signature. Expected: {self._signature}. Received: {given}. "
            "Rewrite the step for these arguments too."
        )


def _is_fixed(spec: Any) -> bool:
    """Whether an argument of a signature has no tensor in it."""
    return not any(isinstance(leaf, tf.TypeSpec) for leaf in tf.nest.flatten(spec))
