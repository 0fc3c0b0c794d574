"""The proof that a step over micro-batches computes what the step over the batch computes.

Abstract interpretation: how each tensor relates to the samples of the batch. Entered by `tflms_sft._pipeline` alone.
Imports every package of `rewriters`.
"""

__all__: list[str] = []
