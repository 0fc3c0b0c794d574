"""`make test-versions`: its pairs, its list of tests, its search for interpreters, and its table."""

import re
import sys

import pytest
import version_pairs
from import_graph import ROOT
from version_pairs import Problem

OLDEST, NEWEST = version_pairs.pairs()


def test_pairs_are_the_ends_of_the_supported_versions():
    assert (OLDEST.pythons[0], NEWEST.pythons[0]) == version_pairs.VERSIONS["PYTHON_RELEASES"] == ((3, 10), (3, 13))
    assert OLDEST.packages == ("tensorflow==2.18.*", "keras==3.8.*")
    assert NEWEST.packages == ("tensorflow==2.21.*", "keras==3.15.*")


def test_makefile_and_ruff_name_the_supported_pythons():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (first, last), (oldest, newest) = version_pairs.VERSIONS["PYTHON_RELEASES"], [OLDEST.pythons[0], NEWEST.pythons[0]]
    assert re.findall(r"\((\d, \d+)\) <= v <= \((\d, \d+)\)", text) == [
        ("{}, {}".format(*first), "{}, {}".format(*last))
    ]
    assert "tflms-sft needs CPython {}.{} to {}.{}".format(*oldest, *newest) in text
    assert 'target-version = "py{}{}"'.format(*oldest) in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_core_list_names_tests_that_exist():
    for line in version_pairs.CORE.read_text(encoding="utf-8").splitlines():
        path, _, name = line.partition("::")
        assert f"def {name or 'test_'}" in (ROOT / path).read_text(encoding="utf-8"), line


def test_missing_interpreter_is_named_with_the_remedy():
    with pytest.raises(Problem) as error:
        version_pairs.interpreter(OLDEST, None, False, lambda release: ["nonesuch"])
    assert str(error.value) == (
        "The oldest pair (tensorflow==2.18.*, keras==3.8.*) is tested with CPython 3.10, and neither the path nor "
        "pyenv has a python3.10 that runs. Install it, or name another (3.11, 3.12): make test-versions "
        "OLDEST_PYTHON=python3.11"
    )
    with pytest.raises(Problem, match="make test-versions NEWEST_PYTHON=python3.12$"):
        version_pairs.interpreter(NEWEST, None, True, lambda release: ["nonesuch"])


def test_interpreter_falls_back_only_if_any_is_allowed():
    releases = {"shim": None, "b": (3, 12)}
    commands = lambda release: ["shim", "b"], releases.get
    for pair in (NEWEST, OLDEST):
        assert version_pairs.interpreter(pair, None, True, *commands) == "b"
    with pytest.raises(Problem, match="is tested with CPython 3.13"):
        version_pairs.interpreter(NEWEST, None, False, *commands)
    releases["shim"] = (3, 13)
    assert version_pairs.interpreter(NEWEST, None, True, *commands) == "shim"


@pytest.mark.parametrize(
    ("release", "received"), [(None, "which does not run as CPython"), ((3, 13), "which is CPython 3.13")]
)
def test_named_interpreter_of_unsupported_release_is_refused(release, received):
    releases = {"own": release, "good": (3, 12)}
    with pytest.raises(Problem, match=rf"needs CPython 3.10, 3.11, 3.12. Received: OLDEST_PYTHON=own, {received}\.$"):
        version_pairs.interpreter(OLDEST, "own", True, release_of=releases.get)
    assert version_pairs.interpreter(OLDEST, "good", False, release_of=releases.get) == "good"


def test_release_of_runs_the_command(tmp_path):
    assert version_pairs.release_of(sys.executable) == sys.version_info[:2]
    shim = tmp_path / "python3.10"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.10: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    assert version_pairs.release_of(str(shim)) is None and version_pairs.release_of("nonesuch") is None


@pytest.mark.parametrize(
    ("body", "text", "is_ok"),
    [
        ("def test_a(): pass\ndef test_b(): pass\n", "2 passed", True),
        ("def test_a(): pass\ndef test_b(): assert 0\n", "1 passed, 1 failed", False),
        ("import pytest\ndef test_a(): pytest.skip('no')\n", "0 passed, 1 skipped", False),
        ("", "0 passed", False),
    ],
    ids=["passed", "failed", "skipped", "empty"],
)
def test_run_core_counts_tests(tmp_path, body, text, is_ok):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(body)
    (tmp_path / "tests" / "core.txt").write_text("tests/test_some.py\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    assert version_pairs.run_core(sys.executable, tmp_path) == (text, is_ok)


def versions(python):
    return f"CPython of {python}"


def test_main_reports_problem_and_fails(capsys):
    assert version_pairs.main([], lambda *arguments: version_pairs.interpreter(*arguments, lambda release: [])) == 1
    assert capsys.readouterr().err.startswith("test-versions: The oldest pair (tensorflow==2.18.*, keras==3.8.*) is")


def test_main_prints_a_line_per_pair_and_fails_if_one_does(capsys):
    results = {"mine": ("3 passed", True), "newest": ("2 passed, 1 failed", False)}

    def main(*arguments):
        interpreter = lambda pair, named, is_any: named or pair.name  # noqa: E731
        return version_pairs.main(arguments, interpreter, lambda pair, command: command, versions, results.get)

    assert main("--oldest-python", "mine") == 1
    table = ["CPython of mine  3 passed", "CPython of newest  2 passed, 1 failed"]
    assert capsys.readouterr().out.splitlines()[-2:] == table
    assert main("--oldest-python", "mine", "--only", "oldest") == 0


def test_main_reports_the_pair_that_pip_cannot_install_and_runs_the_other(capsys, tmp_path):
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\nseq 100\necho 'ERROR: No matching distribution' >&2\nexit 1\n")
    pip.chmod(0o755)
    (tmp_path / "setup.py").write_text("")

    def installed(pair, python):
        return python if pair == NEWEST else version_pairs.installed(pair, str(pip), tmp_path)

    passed = "2 passed", True
    assert version_pairs.main([], lambda pair, *_: pair.name, installed, versions, lambda python: passed) == 1
    out, err = capsys.readouterr()
    table = ["oldest pair: tensorflow==2.18.* keras==3.8.*  not installed", "CPython of newest  2 passed"]
    assert out.splitlines()[-2:] == table
    command, *last_lines = err.splitlines()
    assert command.startswith(f"test-versions: This command failed: {pip} -m venv ")
    assert len(last_lines) == version_pairs.MAX_OUTPUT_LINES
    assert last_lines[-2:] == ["100", "ERROR: No matching distribution"]
