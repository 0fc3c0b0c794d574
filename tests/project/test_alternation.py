"""Alternation of a long and a short step in child processes."""

import functools
import os

import pytest

from benchmarks import _alternation, _child

STEPS = """
import os
import time

from benchmarks import _alternation


def long(iterations, fails, emit):
    emit({"pid": os.getpid()})
    began, moments = time.perf_counter(), []
    for _ in range(iterations):
        moments.append(time.perf_counter())
        time.sleep(0.01)
    if fails:
        raise ValueError("The long step failed.")
    return {"began": began, "ended": time.perf_counter(), "moments": moments}


def short(folder, fails, emit):
    intervals = []

    def run():
        began = time.perf_counter()
        time.sleep(0.3)
        intervals.append((began, time.perf_counter()))
        if fails and len(intervals) > 2:
            raise ValueError("The short step failed.")

    _alternation.repeat(run, folder, emit)
    return intervals
"""


@pytest.fixture
def alternate(tmp_path, monkeypatch):
    """Run alternation in pieces of 0.2 s; return its results and those of the short step's process."""
    (tmp_path / "steps.py").write_text(STEPS)
    monkeypatch.setattr(_alternation, "PIECE_SECONDS", 0.2)
    call = functools.partial(
        _child.call_in_child, env={"PYTHONPATH": os.pathsep.join([str(_child.ROOT), str(tmp_path)])}
    )
    intervals = []

    def run(iterations=120, fails=""):
        def short(on_event):
            kwargs = {"folder": str(tmp_path), "fails": fails == "short"}
            intervals.extend(call("steps:short", kwargs, on_event=on_event))

        def long(on_event):
            return call("steps:long", {"iterations": iterations, "fails": fails == "long"}, on_event=on_event)

        return (*_alternation.alternate(long, short, str(tmp_path)), intervals)

    return run


def test_long_step_is_stopped_during_short_steps(alternate):
    figures, seconds, intervals = alternate()
    _, before, *between, after = intervals  # The first one warms up.
    assert len(seconds) == len(intervals) - 1 and between
    moments = figures["moments"]
    assert before[1] < moments[0] and moments[-1] < after[0]
    assert not [moment for moment in moments for begin, end in between if begin < moment < end]
    short_seconds = sum(end - begin for begin, end in between)
    assert 120 * 0.01 < figures["seconds"] <= moments[-1] - moments[0] - short_seconds + 0.3


def test_long_step_that_is_not_stopped_keeps_its_time(alternate):
    figures, seconds, _ = alternate(iterations=1)
    assert len(seconds) == 2 and figures["seconds"] > 0.01


@pytest.mark.parametrize("step", ["long", "short"])
def test_failed_step_ends_both_processes(alternate, step):
    with pytest.raises(_child.ChildError, match=f"The {step} step failed"):
        alternate(fails=step)
