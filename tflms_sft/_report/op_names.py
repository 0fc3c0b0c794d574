"""Short names for ops of a rewritten step, which have the names of the graph."""

from __future__ import annotations

import re
from collections.abc import Iterable

_MICRO_BATCH = re.compile(r"^micro_\d+/")
_TILE_LOOP = re.compile(r"sft/([^/]+)/([^/]+)/(while/body/[^/]+/while/)?(.+)")
_BUFFER = re.compile(r"Empty(?:_\d+)?")
_SWAPPED_IN = re.compile(r"lms/(.+)/swap_in_\d+")
_KERAS_LOOP = re.compile(r"(.+)/while/body/[^/]+/\1/while/(.+)")
_GRADIENT = "gradient_tape/"


def short_op_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names of ops without scopes of the runtime, of the model and of autodiff, by the full names.

    The scope of the model stays where ops of two models would have the same name.

    Examples:
        - `gradient_tape/functional_1/conv_1/convolution/Conv2DBackpropInput`:
          `conv_1/convolution/Conv2DBackpropInput (backward)`
        - `sft/segment1/forward/while/body/_3/while/functional_1/conv_1/Relu`:
          `conv_1/Relu (in the forward loop of segment1)`
        - `sft/segment1/forward/Empty`: `result of the forward loop of segment1 (Empty)`
        - `lms/functional_1/conv_1/Relu/swap_in_0`: `conv_1/Relu, swapped in`
    """
    texts = {name: (_text(name, with_model=False), _text(name, with_model=True)) for name in names}
    long_by_short: dict[str, set[str]] = {}
    for short, long in texts.values():
        long_by_short.setdefault(short, set()).add(long)
    return {name: short if len(long_by_short[short]) == 1 else long for name, (short, long) in texts.items()}


def loop_text(segment: str, loop: str) -> str:
    """Return the name of a tile loop for users, such as `"backward loop 2 of segment1"`.

    Args:
        segment: Name of the segment.
        loop: `"forward"` or `"backward"`, with a number if a segment has several such loops.
    """
    direction = loop.rstrip("0123456789")
    number = loop[len(direction) :]
    return f"{direction} loop {number} of {segment}" if number else f"{direction} loop of {segment}"


def _text(name: str, *, with_model: bool) -> str:
    name = _MICRO_BATCH.sub("", name)
    match = _TILE_LOOP.fullmatch(name)
    if match:
        loop, op = f"the {loop_text(match[1], match[2])}", match[4]
        if op == "while":
            return loop
        if _BUFFER.fullmatch(op):
            return f"result of {loop} ({op})"
        where = "in" if match[3] else "beside"
        return f"{_path(op.removeprefix(_GRADIENT), with_model)} ({where} {loop})"
    match = _SWAPPED_IN.fullmatch(name)
    if match:
        return f"{_path(match[1], with_model)}, swapped in"
    inner = name.removeprefix(_GRADIENT)
    match = _KERAS_LOOP.fullmatch(inner)
    text = _path(f"{match[1]}/{match[2]}" if match else inner, with_model)
    return text if inner == name else f"{text} (backward)"


def _path(name: str, with_model: bool) -> str:
    """Return the name of an op of a layer with or without the scope of the model around the layer."""
    model, _, inner = name.partition("/")
    return name if with_model or "/" not in inner or model == "compile_loss" else inner
