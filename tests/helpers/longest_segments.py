"""Automatic segments as long as possible: equivalence is tested on networks too small to save memory; a helper."""

from contextlib import contextmanager
from unittest import mock

from tflms_sft._planner import requested_tiles


@contextmanager
def longest_segments():
    """Rewrite all that can run in tiles, whatever it saves, while the context is open."""

    def automatic(traced, params, request):
        segments, left = requested_tiles._longest_segments(traced, params, {}, None)
        plan = requested_tiles._planner_of(traced, request, params.memory_capacity)
        return requested_tiles._candidate(traced, segments, plan).plans, left

    with mock.patch.object(requested_tiles, "_automatic", automatic):
        yield
