"""The list of tests that take long and whose code shorter ones run, too; a helper of `conftest.py`, no test."""

from pathlib import Path

import pytest

PARTIAL = ("ignore", "ignore_glob", "lf")
"""Options with which pytest leaves out files of a folder."""


def mark_long(session, items, path):
    """Marks the tests that a list names as slow, and those that the command names as named.

    Only `make test-all` runs slow tests, and `make test-for` those that it names.

    If the whole folder was collected, lines that name no test, as those of renamed ones, are an error of collection.

    Args:
        session: Of pytest.
        items: All tests that were collected.
        path: The list, a test in each line, in the folder of the tests.
    """
    folder = path.parent.name
    named = path.read_text(encoding="utf-8").splitlines()
    unknown = set(named)
    chosen = set(session.config.args)
    for item in items:
        name = f"{folder}/{item.nodeid.rpartition(f'{folder}/')[2]}"
        if name in unknown:
            item.add_marker("slow")
            unknown.discard(name)
        if chosen.intersection((item.nodeid, item.nodeid.partition("[")[0])):
            item.add_marker("named")
    if unknown and is_whole(session, path.parent):
        text = "\n  ".join(["These lines name no test; remove or rename them:", *(n for n in named if n in unknown)])
        # An exception would end only those processes of pytest-xdist that collect, not the one that tells.
        report = pytest.CollectReport(f"{folder}/{path.name}", "failed", longrepr=text, result=None)
        session.config.hook.pytest_collectreport(report=report)


def is_whole(session, folder):
    """Return whether all tests of a folder were collected, without deselected or unreadable files."""
    config = session.config
    if session.testsfailed or any(config.getoption(option, None) for option in PARTIAL):
        return False
    given = (Path(config.invocation_params.dir, argument).resolve() for argument in config.args)  # `a.py::b` is none.
    return any(folder.is_relative_to(path) for path in given)
