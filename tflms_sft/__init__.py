"""Train Keras networks that do not fit in memory, with the same results to rounding."""

from rewriters.errors import BudgetError, RewriteError, SegmentError
from tflms_sft._callbacks import SFT, MemoryBudget, budget
from tflms_sft._measure import measure
from tflms_sft._params import AutoParams, SegmentSpec, SFTParams
from tflms_sft._plan import Measurement, Plan, PlannedSegment, Prediction
from tflms_sft._rewrite import RewrittenStep, rewrite
from tflms_sft._version import __version__

__all__ = [
    "SFT",
    "AutoParams",
    "BudgetError",
    "Measurement",
    "MemoryBudget",
    "Plan",
    "PlannedSegment",
    "Prediction",
    "RewriteError",
    "RewrittenStep",
    "SFTParams",
    "SegmentError",
    "SegmentSpec",
    "__version__",
    "budget",
    "measure",
    "rewrite",
]
