"""Automatic segments of the greatest length, for networks in which tiles save no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tflms_sft._planner import requested_tiles


@contextmanager
def longest_segments() -> Iterator[None]:
    """Tile all ops that can run in tiles, even if they save no memory, while the context is open."""

    def automatic(traced: Any, params: Any, request: Any) -> Any:
        plan = requested_tiles._planner_of(traced, request, params.memory_capacity)
        segments, left = requested_tiles._longest_segments(traced, params, plan, names={})
        return requested_tiles._candidate(traced, segments, plan).plans, left

    with mock.patch.object(requested_tiles, "_automatic", automatic):
        yield
