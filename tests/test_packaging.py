"""The wheel holds the two packages whole, and nothing else."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tflms_sft", "rewriters")
SHIPPED = ("setup.py", "pyproject.toml", "LICENSE", "README.md", *PACKAGES)
NOT_SHIPPED = ("tests", "benchmarks", "examples", "docs")


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy, so that the build leaves nothing in the working tree and finds no old build in it."""
    copy = tmp_path_factory.mktemp("packaging") / "tree"
    copy.mkdir()
    for name in (*SHIPPED, *NOT_SHIPPED):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree) -> zipfile.ZipFile:
    # No index and no isolation: the build asks for nothing from the network.
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(tree.parent), str(tree)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tree.parent.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_packages_are_whole_and_alone(tree, wheel):
    expected = {
        path.relative_to(tree).as_posix()
        for package in PACKAGES
        for path in (tree / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert {"tflms_sft/py.typed", "rewriters/py.typed"} <= expected
    assert any(name.startswith("rewriters/rules/") for name in expected)

    packed = {name for name in wheel.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    assert packed == expected


def test_top_level_is_the_two_packages(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert not tops & set(NOT_SHIPPED)


def test_licence_is_in_the_wheel(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/LICENSE"))
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def test_name_and_version(metadata):
    text = (ROOT / "tflms_sft" / "_version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, flags=re.MULTILINE)
    assert (metadata["Name"], metadata["Version"]) == ("tflms-sft", version)
    assert metadata["Requires-Python"] == ">=3.11"


def test_requirements_and_extras(metadata):
    # setuptools releases differ in spaces, quotes and the order of bounds.
    requires = {
        extra: {_tidy(line) for line in metadata.get_all("Requires-Dist") if _extra(line) == extra}
        for extra in (None, *metadata.get_all("Provides-Extra"))
    }
    assert set(requires) == {None, "gpu", "plot", "examples", "test"}
    assert requires[None] == {("tensorflow", "<2.22,>=2.21"), ("keras", "<3.16,>=3.15"), ("numpy", "")}
    assert requires["gpu"] == {("tensorflow[and-cuda]", "<2.22,>=2.21")}
    assert requires["plot"] == {("matplotlib", "")}
    assert {"pytest", "setuptools", "wheel"} <= {name for name, _ in requires["test"]}


def _extra(line: str) -> str | None:
    match = re.search(r"extra == ['\"](.+?)['\"]", line)
    return match.group(1) if match else None


def _tidy(line: str) -> tuple[str, str]:
    """Name and bounds of a `Requires-Dist` line."""
    name, bounds = re.fullmatch(r"([\w.\[\]-]+)(.*)", line.split(";")[0].replace(" ", "")).groups()
    return name, ",".join(sorted(bounds.strip("()").split(",")))
