"""`tflms-sft curve`: predicts the time of a training step within several memory budgets."""

from __future__ import annotations

import argparse
import dataclasses
import json

from tflms_sft._cli import step_options
from tflms_sft._cli.exit_status import NOT_MET, OK, Outcome, Progress, UsageError
from tflms_sft._cli.stop_signals import stoppable
from tflms_sft._report.budget_curve import BudgetCurve, CurvePoint
from tflms_sft._util.byte_sizes import format_bytes

__all__: list[str] = []


def execute(options: argparse.Namespace) -> Outcome:
    """Plan one training step within several budgets, without running it.

    Raises:
        RewriteError: If the step cannot be rewritten.
        UsageError: For wrong arguments.
    """
    step_options.check_output_files({"--plot": options.plot})
    params = step_options.budget_params(options)
    progress = Progress(options.quiet)
    with progress.doing(f"building {options.model}"):
        model, why = step_options.load(options)
        model = step_options.of_given_size(model, options.input_shape)
    images = step_options.input_specs(model, options.input_shape, options.batch)
    with progress.doing("tracing the training step"):
        step = step_options.trace(model, why, images, options)
    points: list[CurvePoint] = []
    with stoppable(options.time_limit) as stop, progress.doing("planning"):
        for point in step.curve(params, options.budgets, progress):
            points.insert(0, point)
            shown = "no plan" if point.time_ratio is None else f"{point.time_ratio:.2f}x the time"
            progress.say(f"{format_bytes(point.budget_bytes)}: {shown}")
    if stop.reason:
        progress.say(stop.reason)
    curve = BudgetCurve(step.plain_bytes, params.headroom, points)
    if not points:
        raise UsageError("no budget was planned before the search was stopped. Raise --time-limit.")
    text = f"{step.assumed.text()}\n{curve.table()}"
    if options.plot:
        curve.plot(options.plot)
        text += f"\nWritten: {options.plot}"
    data = {"command": "curve", "assumed": dataclasses.asdict(step.assumed), "stopped": stop.reason}
    code = OK if any(point.time_ratio is not None for point in points) else NOT_MET
    return Outcome(text, {**data, "curve": json.loads(curve.to_json())}, code if stop.code is None else stop.code)
