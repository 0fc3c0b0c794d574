"""Short names for the ops of a measured step, which have the names of the graph."""

from __future__ import annotations

import re

from tflms_sft._util.text import loop_text

_MICRO_BATCH = re.compile(r"^micro_\d+/")
_IN_ITERATION = re.compile(r"sft/([^/]+)/([^/]+)/while/body/[^/]+/while/(.+)")
_OF_LOOP = re.compile(r"sft/([^/]+)/([^/]+)/(.+)")
_SWAPPED_IN = re.compile(r"lms/(.+)/swap_in_\d+")
_KERAS_LOOP = re.compile(r"(.+)/while/body/[^/]+/\1/while/(.+)")
_GRADIENT = "gradient_tape/"


def short_op_name(name: str) -> str:
    """Return the name of an op without scopes of the runtime, of the model and of autodiff.

    Examples:
        - `gradient_tape/functional_1/conv_1/convolution/Conv2DBackpropInput`:
          `conv_1/convolution/Conv2DBackpropInput (backward)`
        - `sft/segment1/forward/while/body/_3/while/functional_1/conv_1/Relu`:
          `conv_1/Relu (in the forward loop of segment1)`
        - `sft/segment1/forward/Empty`: `result of the forward loop of segment1 (Empty)`
        - `lms/functional_1/conv_1/Relu/swap_in_0`: `conv_1/Relu, swapped in`
    """
    name = _MICRO_BATCH.sub("", name)
    match = _IN_ITERATION.fullmatch(name)
    if match:
        return f"{_without_model(match[3].removeprefix(_GRADIENT))} (in the {loop_text(match[1], match[2])})"
    match = _OF_LOOP.fullmatch(name)
    if match:
        loop = loop_text(match[1], match[2])
        return f"the {loop}" if match[3] == "while" else f"result of the {loop} ({match[3]})"
    match = _SWAPPED_IN.fullmatch(name)
    if match:
        return f"{_without_model(match[1])}, swapped in"
    inner = name.removeprefix(_GRADIENT)
    match = _KERAS_LOOP.fullmatch(inner)
    text = _without_model(f"{match[1]}/{match[2]}" if match else inner)
    return text if inner == name else f"{text} (backward)"


def _without_model(name: str) -> str:
    """Return the name of an op of a layer without the scope of the model around the layer."""
    model, _, inner = name.partition("/")
    return inner if "/" in inner and model != "compile_loss" else name
