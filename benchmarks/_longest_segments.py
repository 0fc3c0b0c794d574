"""Automatic segments as long as possible, for networks that are too small to save memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tflms_sft._planner import requested_tiles


@contextmanager
def longest_segments() -> Iterator[None]:
    """Rewrite all that can run in tiles, whatever it saves, while the context is open."""

    def automatic(traced: Any, params: Any, request: Any) -> Any:
        segments, left = requested_tiles._longest_segments(traced, params, {}, None)
        plan = requested_tiles._planner_of(traced, request, params.memory_capacity)
        return requested_tiles._candidate(traced, segments, plan).plans, left

    with mock.patch.object(requested_tiles, "_automatic", automatic):
        yield
