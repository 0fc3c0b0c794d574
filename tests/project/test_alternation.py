"""Alternation of a long and a short step in child processes."""

import functools
import os
from concurrent import futures

import pytest

from benchmarks import _alternation, _child

STEPS = """
import os
import time

from benchmarks import _alternation


def long(folder, iterations, fails, emit):
    emit({"pid": os.getpid()})
    emit({"ready": True})
    began, moments = time.perf_counter(), []
    for _ in range(iterations):
        moments.append(time.perf_counter())
        time.sleep(0.01)
    if fails:
        raise ValueError("The long step failed.")
    open(folder + "/long", "w").close()
    return {"began": began, "ended": time.perf_counter(), "moments": moments}


def short(folder, fails, emit):
    emit({"pid": os.getpid()})
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
MANY_ITERATIONS = 100_000
"""Iterations that take longer than any test."""


@pytest.fixture
def alternate(tmp_path, monkeypatch):
    """Run alternation in pieces of 0.2 s; return its figures and the intervals of the short steps."""
    (tmp_path / "steps.py").write_text(STEPS)
    monkeypatch.setattr(_alternation, "PIECE_SECONDS", 0.2)
    path = os.pathsep.join([str(_child.ROOT), str(tmp_path)])
    call = functools.partial(_child.call_in_child, env={"PYTHONPATH": path})
    intervals = []

    def run(iterations=120, fails=""):
        def short(on_event):
            kwargs = {"folder": str(tmp_path), "fails": fails == "short"}
            intervals.extend(call("steps:short", kwargs, on_event=on_event))

        def long(on_event):
            kwargs = {"folder": str(tmp_path), "iterations": iterations, "fails": fails == "long"}
            return call("steps:long", kwargs, on_event=on_event)

        return _alternation.alternate(long, short, str(tmp_path)), intervals

    return run


def test_long_step_is_stopped_during_short_steps(alternate):
    figures, intervals = alternate()
    _, *between, after = intervals  # The first one warms up.
    assert len(figures["small_seconds"]) == len(intervals) - 1 and figures["small_first_seconds"] > 0.2
    moments = figures["moments"]
    assert moments[-1] < after[0]
    assert not [moment for moment in moments for begin, end in between if begin < moment < end]
    inside = [end - begin for begin, end in between if moments[0] < begin and end < moments[-1]]
    assert inside
    # A sleep may end while its process is stopped.
    assert 0.9 * (120 - len(between)) * 0.01 < figures["seconds"] < moments[-1] - moments[0] - sum(inside) + 0.3


@pytest.mark.parametrize("step", ["long", "short"])
def test_failed_step_ends_both_processes(alternate, step, tmp_path):
    with pytest.raises(_child.ChildError, match=f"The {step} step failed"):
        alternate(iterations=1 if step == "long" else MANY_ITERATIONS, fails=step)
    assert not (tmp_path / "long").exists()


def test_interruption_ends_both_processes(alternate, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(futures, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        alternate(iterations=MANY_ITERATIONS)
    assert not (tmp_path / "long").exists()
