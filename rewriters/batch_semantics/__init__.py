"""Proof that a step in micro-batches computes what the step for the batch computes.

Abstract interpretation of how each tensor relates to the samples of the batch. Its result is
the `EquivalenceReport`, which `tflms_sft._pipeline` alone reads. Modules here may import every package of `rewriters`.
"""

from rewriters.batch_semantics.equivalence import SUM_OR_MEAN, EquivalenceReport
from rewriters.batch_semantics.trace_comparison import TraceComparison

__all__ = ["SUM_OR_MEAN", "EquivalenceReport", "TraceComparison"]
