"""Run the core tests on the oldest and on the newest supported versions, each in an environment of its own.

    python tests/helpers/version_pairs.py [--oldest-python NAME] [--newest-python NAME] [--any-python] [--only PAIR]

`tests/core.txt` lists the tests. The last lines are a table with one line per pair, also if a test or pip failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "tests" / "core.txt"
VERSIONS = runpy.run_path(str(ROOT / "tflms_sft" / "_version.py"))
OLDEST, NEWEST = 0, 1

MAX_OUTPUT_LINES = 15
"""Number of last lines that are printed of the output of a command that failed."""

Release = tuple[int, int]


class Problem(Exception):
    """A missing interpreter, or an environment that cannot be installed."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Versions that are tested together.

    Attributes:
        name: `"oldest"` or `"newest"`.
        pythons: Releases of CPython that its TensorFlow and its Keras support, the tested one first.
        packages: Requirements that pip installs beside the project.
    """

    name: str
    pythons: tuple[Release, ...]
    packages: tuple[str, ...]

    @property
    def variable(self) -> str:
        """Variable of the Makefile that names the interpreter."""
        return f"{self.name.upper()}_PYTHON"


def pairs() -> tuple[Pair, Pair]:
    """Return the oldest and the newest pair."""
    names = VERSIONS["SUPPORTED_RELEASES"]
    oldest, newest = (
        tuple(f"{name}=={dotted(names[name][end])}.*" for name in ("tensorflow", "keras")) for end in (OLDEST, NEWEST)
    )
    first, last = VERSIONS["PYTHON_RELEASES"]
    releases = [(first[0], minor) for minor in range(first[1], last[1] + 1)]
    # TensorFlow 2.18 has no wheels for CPython 3.13, and Keras 3.15 needs CPython 3.11.
    return Pair("oldest", tuple(releases[:-1]), oldest), Pair("newest", tuple(releases[:0:-1]), newest)


def dotted(release: Sequence[int]) -> str:
    """Return `"3.10"` for `(3, 10)`."""
    return ".".join(map(str, release))


def release_of(command: str) -> Release | None:
    """Return the release of a CPython that runs; `None` for any other command."""
    program = "import json, sys; print(json.dumps([sys.implementation.name, *sys.version_info[:2]]))"
    try:
        done = subprocess.run([command, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        name, *release = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return (release[0], release[1]) if name == "cpython" else None


def candidates(release: Release) -> Iterator[str]:
    """Yield commands that may run a release: this interpreter, one on the path, those of pyenv."""
    yield sys.executable
    # On the path may be a shim of pyenv that runs nothing, because pyenv's current version is another.
    yield from filter(None, [shutil.which(f"python{dotted(release)}")])
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(root.glob(f"versions/{dotted(release)}.*/bin/python"), reverse=True))


def interpreter(
    pair: Pair,
    named: str | None,
    is_any_allowed: bool,
    candidates: Callable[[Release], Iterable[str]] = candidates,
    release_of: Callable[[str], Release | None] = release_of,
) -> str:
    """Return the command of the interpreter of a pair.

    Args:
        pair: The pair.
        named: The command that the user named, or `None`.
        is_any_allowed: Whether to fall back to another release that supports the packages.
        candidates: Returns commands that may run a release.
        release_of: Returns the release that a command runs.

    Raises:
        Problem: If there is none.
    """
    if named:
        release = release_of(named)
        if release in pair.pythons:
            return named
        received = "which does not run as CPython" if release is None else f"which is CPython {dotted(release)}"
        supported = ", ".join(map(dotted, sorted(pair.pythons)))
        raise Problem(
            f"The {pair.name} pair ({', '.join(pair.packages)}) needs CPython {supported}. Received: {pair.variable}="
            f"{named}, {received}."
        )
    for release in pair.pythons if is_any_allowed else pair.pythons[:1]:
        for command in candidates(release):
            if release_of(command) == release:
                return command
    wanted, *others = map(dotted, pair.pythons)
    raise Problem(
        f"The {pair.name} pair ({', '.join(pair.packages)}) is tested with CPython {wanted}, and neither the path nor "
        f"pyenv has a python{wanted} that runs. Install it, or name another ({', '.join(others)}): "
        f"make test-versions {pair.variable}=python{others[0]}"
    )


def installed(pair: Pair, python: str, root: Path = ROOT) -> Path:
    """Return the interpreter of the pair's environment, which is created if it is missing or out of date.

    Raises:
        Problem: If pip cannot install the packages.
    """
    folder = root / f".venv-{pair.name}"
    own = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    stamp = folder / ".installed"
    key = hashlib.sha256(repr((python, pair.packages, (root / "setup.py").read_text(encoding="utf-8"))).encode())
    if own.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == key.hexdigest():
        return own
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([python, "-m", "venv", str(folder)], [*pip, "-e", ".[test]", *pair.packages]):
        done = subprocess.run(
            command, cwd=root, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode:
            last_lines = "\n".join(done.stdout.splitlines()[-MAX_OUTPUT_LINES:])
            raise Problem(f"This command failed: {' '.join(command)}\n{last_lines}")
    stamp.write_text(key.hexdigest(), encoding="utf-8")
    return own


def versions(python: Path) -> str:
    """Return the versions of an environment, as the line of the table begins."""
    program = (
        "import platform; from importlib.metadata import version; "
        "print('CPython', platform.python_version(), '', 'TensorFlow', version('tensorflow'), '', "
        "'Keras', version('keras'), '', 'NumPy', version('numpy'))"
    )
    return subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def run_core(python: Path, root: Path = ROOT) -> tuple[str, bool]:
    """Run the core tests; return their counts as text, and whether some ran and all passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
        command += [f"--junit-xml={report}", "@tests/core.txt"]
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        code = subprocess.run(command, cwd=root, env=environment, check=False).returncode
        if not report.exists():
            return "no test ran", False
        (suite,) = xml.etree.ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return counts_text(**counts), code == 0 and counts["tests"] > counts["skipped"]


def counts_text(tests: int, failures: int, errors: int, skipped: int) -> str:
    """Return a text such as `"410 passed, 2 skipped"`."""
    counts = {"passed": tests - failures - errors - skipped, "failed": failures, "errors": errors, "skipped": skipped}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "passed")


def main(
    arguments: Sequence[str] | None = None,
    interpreter: Callable[[Pair, str | None, bool], str] = interpreter,
    installed: Callable[[Pair, str], Path] = installed,
    versions: Callable[[Path], str] = versions,
    run_core: Callable[[Path], tuple[str, bool]] = run_core,
) -> int:
    """Run the pairs and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--oldest-python", metavar="NAME", help="interpreter of the oldest pair")
    parser.add_argument("--newest-python", metavar="NAME", help="interpreter of the newest pair")
    parser.add_argument("--any-python", action="store_true", help="fall back to other releases of CPython")
    parser.add_argument("--only", choices=("oldest", "newest"), help="run this pair alone")
    options = parser.parse_args(arguments)
    chosen = [pair for pair in pairs() if options.only in (None, pair.name)]
    lines, problems, is_ok = [], [], True
    try:
        # Both interpreters are looked for first: the tests of a pair take minutes.
        named = [(pair, getattr(options, pair.variable.lower())) for pair in chosen]
        commands = [interpreter(pair, name, options.any_python) for pair, name in named]
    except Problem as problem:
        print(f"test-versions: {problem}", file=sys.stderr)
        return 1
    for pair, command in zip(chosen, commands):  # noqa: B905 - Python 3.9 has no `strict`.
        print(f"{pair.name} pair: {' '.join(pair.packages)} with {command}", flush=True)
        try:
            python = installed(pair, command)
        except Problem as problem:
            lines.append(f"{pair.name} pair: {' '.join(pair.packages)}  not installed")
            problems.append(problem)
            continue
        text, has_passed = run_core(python)
        lines.append(f"{versions(python)}  {text}")
        is_ok = is_ok and has_passed
    print("\n".join(lines), flush=True)
    for problem in problems:
        print(f"test-versions: {problem}", file=sys.stderr)
    return 0 if is_ok and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
