"""Run the tests of some packages: `make test-for PKG="rules tiling"`.

`tests/packages.txt` has a line for each package: its name, then folders and files, of which the fast tests run, and
single tests, which run even if they are marked slow.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def package_tests():
    """Return the folders, files and tests of each package, relative to `tests`."""
    lines = (ROOT / "tests" / "packages.txt").read_text(encoding="utf-8").splitlines()
    return {name: tests for name, *tests in map(str.split, lines)}


def main(names):
    """Run the tests of some packages; return the exit code."""
    known = package_tests()
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        received = f"Received: {' '.join(unknown)}. " if unknown else ""
        print(f"test-for: PKG names packages. {received}Known: {' '.join(known)}", file=sys.stderr)
        return 2
    tests = dict.fromkeys(f"tests/{test}" for name in names for test in known[name])
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    command += ["-m", "not slow or named", *tests]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
