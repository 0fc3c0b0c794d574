"""The list of long tests: what it names is slow, and what it names in vain is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from pathlib import Path
from long_tests import mark_long

def pytest_collection_modifyitems(session, items):
    mark_long(session, items, Path(__file__).with_name("long.txt"))
"""
TWO = "def test_short(): pass\ndef test_long(): pass\n"


@pytest.fixture
def run(tmp_path):
    """Runs some tests of two files, of one of which the list has a test that is there and one that is gone."""
    folder = tmp_path / "tests"
    folder.mkdir()
    for name, text in (("conftest.py", CONFTEST), ("test_one.py", TWO), ("test_two.py", TWO)):
        (folder / name).write_text(text)
    (folder / "long.txt").write_text("tests/test_one.py::test_long\ntests/test_one.py::test_gone\n")
    (tmp_path / "pytest.ini").write_text(
        '[pytest]\ntestpaths = tests\nmarkers =\n    slow\n    named\naddopts = -m "not slow"\n'
    )

    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "helpers")}
        done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["one process", "several"])
def test_long_list_with_unknown_test_fails_whole_suite(run, arguments):
    code, out = run(*arguments)
    assert code != 0 and "These lines name no test; remove or rename them:\n  tests/test_one.py::test_gone\n" in out
    assert "test_one.py::test_long" not in out


@pytest.mark.parametrize("argument", ["tests/test_one.py", "tests/test_two.py", "--ignore=tests/test_one.py"])
def test_long_tests_are_left_out_of_partial_suite(run, argument):
    code, out = run(argument)
    passed = "2 passed" if "two" in argument or "=" in argument else "1 passed, 1 deselected"
    assert code == 0 and passed in out


def test_long_test_that_is_named_runs(run):
    code, out = run("tests/test_one.py::test_long", "-m", "not slow or named")
    assert code == 0 and "1 passed" in out
