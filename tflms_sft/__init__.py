"""Train Keras networks that do not fit in memory, with the same results to rounding."""

from rewriters.errors import BudgetError, RewriteError, SegmentError, SwapError
from tflms_sft._callbacks import LMS, SFT, MemoryBudget, budget
from tflms_sft._differences import Difference, Verification
from tflms_sft._lms_params import LMSParams
from tflms_sft._measure import measure
from tflms_sft._params import AutoParams, SegmentSpec, SFTParams
from tflms_sft._plan import Measurement, Plan, PlannedSegment, PlannedSwap, Prediction, Timeline
from tflms_sft._rewrite import RewrittenStep, rewrite
from tflms_sft._verify import verify
from tflms_sft._version import __version__

__all__ = [
    "LMS",
    "SFT",
    "AutoParams",
    "BudgetError",
    "Difference",
    "LMSParams",
    "Measurement",
    "MemoryBudget",
    "Plan",
    "PlannedSegment",
    "PlannedSwap",
    "Prediction",
    "RewriteError",
    "RewrittenStep",
    "SFTParams",
    "SegmentError",
    "SegmentSpec",
    "SwapError",
    "Timeline",
    "Verification",
    "__version__",
    "budget",
    "measure",
    "rewrite",
    "verify",
]
