"""Train Keras networks that do not fit in memory, with the same results to rounding.

TensorFlow is imported when one of the names is used for the first time, so that the command line answers at once.
"""

import importlib
import typing

from tflms_sft._version import __version__

if typing.TYPE_CHECKING:
    from rewriters.errors import BudgetError, PipelineError, RewriteError, SegmentError, SwapError, WorkerError
    from tflms_sft._cluster.connect import connect
    from tflms_sft._keras.budget_context import budget
    from tflms_sft._keras.callbacks import LMS, SFT, MemoryBudget, Pipeline
    from tflms_sft._params.pipeline_params import PipelineParams
    from tflms_sft._params.tile_params import AutoParams, SegmentSpec, SFTParams
    from tflms_sft._pipeline.stage_devices import stage_devices
    from tflms_sft._report.budget_curve import BudgetCurve, CurvePoint
    from tflms_sft._report.pipeline_plan import PlannedPipeline, PlannedStage
    from tflms_sft._report.plan import Plan
    from tflms_sft._report.plan_records import Measurement, PlannedSegment, PlannedSwap, Prediction, Timeline
    from tflms_sft._rewrite.curve import curve
    from tflms_sft._rewrite.measure import measure
    from tflms_sft._rewrite.rewrite import rewrite
    from tflms_sft._rewrite.rewritten_step import RewrittenStep
    from tflms_sft._rewrite.swap_tuning import LMSParams
    from tflms_sft._sources.image_reader import ImageReader
    from tflms_sft._sources.image_writer import ImageWriter
    from tflms_sft._sources.random_view import RandomView
    from tflms_sft._sources.reading_model import ReadingModel
    from tflms_sft._sources.source import ImageReadError, ImageWriteError
    from tflms_sft._verify.differences import Difference, Verification
    from tflms_sft._verify.verify import verify
else:
    _HOMES = {
        "rewriters.errors": (
            "BudgetError",
            "PipelineError",
            "RewriteError",
            "SegmentError",
            "SwapError",
            "WorkerError",
        ),
        "tflms_sft._keras.budget_context": ("budget",),
        "tflms_sft._keras.callbacks": ("LMS", "SFT", "MemoryBudget", "Pipeline"),
        "tflms_sft._cluster.connect": ("connect",),
        "tflms_sft._verify.differences": ("Difference", "Verification"),
        "tflms_sft._rewrite.curve": ("curve",),
        "tflms_sft._rewrite.measure": ("measure",),
        "tflms_sft._params.tile_params": ("AutoParams", "SFTParams", "SegmentSpec"),
        "tflms_sft._params.pipeline_params": ("PipelineParams",),
        "tflms_sft._report.budget_curve": ("BudgetCurve", "CurvePoint"),
        "tflms_sft._report.pipeline_plan": ("PlannedPipeline", "PlannedStage"),
        "tflms_sft._report.plan": ("Plan",),
        "tflms_sft._report.plan_records": ("Measurement", "PlannedSegment", "PlannedSwap", "Prediction", "Timeline"),
        "tflms_sft._rewrite.rewrite": ("rewrite",),
        "tflms_sft._rewrite.rewritten_step": ("RewrittenStep",),
        "tflms_sft._pipeline.stage_devices": ("stage_devices",),
        "tflms_sft._rewrite.swap_tuning": ("LMSParams",),
        "tflms_sft._sources.image_reader": ("ImageReader",),
        "tflms_sft._sources.random_view": ("RandomView",),
        "tflms_sft._sources.reading_model": ("ReadingModel",),
        "tflms_sft._sources.image_writer": ("ImageWriter",),
        "tflms_sft._sources.source": ("ImageReadError", "ImageWriteError"),
        "tflms_sft._verify.verify": ("verify",),
    }
    _HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

    def __getattr__(name: str) -> typing.Any:
        """Import a public name when it is asked for."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tflms_sft._util.requirements import check_backend, check_versions

        check_versions()
        check_backend()
        value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
        return value

    def __dir__() -> list[str]:
        """All public names, imported or not."""
        return sorted({*globals(), *__all__})


__all__ = [
    "LMS",
    "SFT",
    "AutoParams",
    "BudgetCurve",
    "BudgetError",
    "CurvePoint",
    "Difference",
    "ImageReadError",
    "ImageReader",
    "ImageWriteError",
    "ImageWriter",
    "LMSParams",
    "Measurement",
    "MemoryBudget",
    "Pipeline",
    "PipelineError",
    "PipelineParams",
    "Plan",
    "PlannedPipeline",
    "PlannedSegment",
    "PlannedStage",
    "PlannedSwap",
    "Prediction",
    "RandomView",
    "ReadingModel",
    "RewriteError",
    "RewrittenStep",
    "SFTParams",
    "SegmentError",
    "SegmentSpec",
    "SwapError",
    "Timeline",
    "Verification",
    "WorkerError",
    "__version__",
    "budget",
    "connect",
    "curve",
    "measure",
    "rewrite",
    "stage_devices",
    "verify",
]
