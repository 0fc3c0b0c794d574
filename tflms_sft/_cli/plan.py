"""`tflms-sft plan`: prints the plan for training a model, without training it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from rewriters.estimates.op_cost import NOMINAL
from rewriters.ir.device_detection import planned_device
from rewriters.ir.graph_pass import dump_directory, dumping_to
from tflms_sft._cli import step_options
from tflms_sft._cli.exit_status import Outcome, Progress, UsageError
from tflms_sft._machine.calibration import stored_rates
from tflms_sft._params.tile_params import SFTParams
from tflms_sft._report.plan import Plan
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.text import shortened

__all__: list[str] = []

MAX_NAMES = 3
"""Ops that a note names."""


def execute(options: argparse.Namespace) -> Outcome:
    """Plan one training step without running it.

    Raises:
        RewriteError: If no plan meets the parameters.
        UsageError: For wrong arguments.
    """
    params = _params(options)
    step_options.check_output_files({"--plot": options.plot, "--html": options.html})
    progress = Progress(options.quiet)
    with progress.doing(f"building {options.model}"):
        given, why = step_options.load(options)
        model = step_options.of_given_size(given, options.input_shape)
    images = step_options.input_specs(model, options.input_shape, options.batch)
    with dumping_to(options.dump_passes or dump_directory()):
        with progress.doing("tracing the training step"):
            step = step_options.trace(model, why, images, options)
        with progress.doing("planning"):
            plan = step.plan(params, progress)
    notes = _notes(given, step, plan)
    text = "\n".join([step.assumed.text(), plan.summary(), _times(plan), *(f"Note: {note}" for note in notes)])
    for path, write in ((options.plot, plan.plot), (options.html, plan.to_html)):
        if path:
            write(path)
            text += f"\nWritten: {path}"
    if options.dump_passes:
        text += f"\nWritten: {options.dump_passes}"
    assumed = dataclasses.asdict(step.assumed)
    data = {"command": "plan", "assumed": assumed, "plan": json.loads(plan.to_json()), "notes": notes}
    return Outcome(text, data)


def _times(plan: Plan) -> str:
    """Return the predicted times of a step, or why there are none."""
    if stored_rates() is NOMINAL:
        return "Seconds are not predicted: the rates of this machine are not measured"
    before, after = plan.original.seconds, plan.predicted.seconds
    return f"Predicted time of a step: {after:.3g} s, without rewriting {before:.3g} s"


def _notes(model: Any, step: step_options.PlannableStep, plan: Plan) -> list[str]:
    """Return notes on a plan: costs that the prediction lacks, and limits of the card."""
    notes = []
    if getattr(model, "jit_compile", False) is True:
        notes.append("the model has jit_compile=True: XLA is off in rewritten steps, and in the predicted times")
    calls = step.python_calls()
    if calls:
        notes.append(f"{shortened(calls, MAX_NAMES)} runs Python code, whose time and memory are not predicted")
    card = planned_device().card
    if card is None:
        return notes
    peak = plan.predicted.peak_bytes
    if peak > card.memory_limit:
        limit = format_bytes(card.memory_limit)
        notes.append(f"the plan needs {format_bytes(peak)}, and TensorFlow allocates {limit} on {card.title}")
    missing = [op for op in step.without_gpu_kernel() if op not in calls]
    if missing:
        notes.append(
            f"TensorFlow has no GPU kernel for {shortened(missing, MAX_NAMES)}, which runs on the host. The predicted "
            "time lacks the copies there and back"
        )
    return notes


def _params(options: argparse.Namespace) -> Any:
    if options.num_tiles is None:
        return step_options.budget_params(options)
    try:
        return SFTParams(options.num_tiles, halo=options.halo or "recompute")
    except (TypeError, ValueError) as error:
        raise UsageError(str(error).replace("`num_tiles`", "--num-tiles")) from None
