"""The wheel holds the two packages whole, and nothing else."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tflms_sft", "rewriters")
SHIPPED = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", *PACKAGES)
IN_ARCHIVE = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Makefile", "SECURITY.md", "mkdocs.yml")
NOT_SHIPPED = ("tests", "benchmarks", "examples", "docs")


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy, so that the build leaves nothing in the working tree and finds no old build in it."""
    copy = tmp_path_factory.mktemp("packaging") / "tree"
    copy.mkdir()
    for name in (*SHIPPED, *IN_ARCHIVE, *NOT_SHIPPED):
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


def test_wheel_contains_all_packages_and_nothing_else(tree, wheel):
    expected = {
        path.relative_to(tree).as_posix()
        for package in PACKAGES
        for path in (tree / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert {"tflms_sft/py.typed", "rewriters/py.typed", "tflms_sft/__main__.py", "tflms_sft/_cli/main.py"} <= expected
    assert any(name.startswith("rewriters/rules/") for name in expected)

    packed = {name for name in wheel.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    assert packed == expected


def test_wheel_top_level_is_two_packages(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert not tops & set(NOT_SHIPPED)


def test_wheel_contains_licence(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/LICENSE"))
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def version() -> str:
    text = (ROOT / "tflms_sft" / "_version.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, flags=re.MULTILINE)
    return found


def test_wheel_has_name_and_version(metadata):
    assert (metadata["Name"], metadata["Version"]) == ("tflms-sft", version())
    assert metadata["Requires-Python"] == ">=3.10"
    minors = {"3.10", "3.11", "3.12", "3.13"}
    classifiers = set(metadata.get_all("Classifier"))
    prefix = "Programming Language :: Python :: 3."
    assert {text for text in classifiers if text.startswith(prefix)} == {
        f"Programming Language :: Python :: {minor}" for minor in minors
    }


def test_description_has_no_links_into_the_repository(metadata):
    text = metadata.get_payload()
    assert "tflms_sft.MemoryBudget" in text and "CITATION.cff" in text
    assert not re.findall(r"\]\((?!https?:)[^)]*\)|<!--", text)


def test_source_archive_has_documentation_and_tests(tree):
    command = [sys.executable, "-c", "from setuptools.build_meta import build_sdist; build_sdist('dist')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tree)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {"README.md", "CITATION.cff", "SECURITY.md", "docs/index.md", "mkdocs.yml", "tests/conftest.py"}
    assert expected | {"tflms_sft/__init__.py", "benchmarks/results/coverage.json"} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_wheel_installs_command(wheel, tmp_path):
    """From the wheel alone, unpacked by pip, and run without TensorFlow being touched."""
    (path,) = (Path(wheel.filename),)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    script = tmp_path / "bin" / "tflms-sft"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for arguments, code, text in ((["--version"], 0, f"tflms-sft {version()}\n"), (["plan"], 2, "")):
        done = subprocess.run([script, *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (code, text), done.stderr


def test_import_loads_no_package_besides_tensorflow_and_keras():
    """Nothing that is slow to load: no matplotlib, and no SciPy but where Keras imports it itself."""
    program = """
import sys
import keras, tensorflow
before = set(sys.modules)
import tflms_sft
for name in tflms_sft.__all__:
    getattr(tflms_sft, name)
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert set(done.stdout.split()) - {*sys.stdlib_module_names, "tensorflow", "keras"} == {"tflms_sft", "rewriters"}


def test_wheel_has_requirements_and_extras(metadata):
    # setuptools releases differ in spaces, quotes and the order of bounds.
    requires = {
        extra: {_tidy(line) for line in metadata.get_all("Requires-Dist") if _extra(line) == extra}
        for extra in (None, *metadata.get_all("Provides-Extra"))
    }
    formats = {"hdf5", "nifti", "openslide", "tiff", "zarr"}
    assert set(requires) == {None, "gpu", "plot", "compare", "docs", "examples", "test"} | formats
    assert all(requires[name] <= requires["test"] for name in formats)
    assert requires[None] == {("tensorflow", "<3,>=2.18"), ("keras", "<4,>=3.8"), ("numpy", "")}
    assert requires["gpu"] == {("tensorflow[and-cuda]", "<3,>=2.18")}
    assert requires["plot"] == {("matplotlib", "")}
    assert requires["compare"] == {("matplotlib", ""), ("torch", "")}
    assert {"pytest", "setuptools", "wheel"} <= {name for name, _ in requires["test"]}


def _extra(line: str) -> str | None:
    match = re.search(r"extra == ['\"](.+?)['\"]", line)
    return match.group(1) if match else None


def _tidy(line: str) -> tuple[str, str]:
    """Name and bounds of a `Requires-Dist` line."""
    name, bounds = re.fullmatch(r"([\w.\[\]-]+)(.*)", line.split(";")[0].replace(" ", "")).groups()
    return name, ",".join(sorted(bounds.strip("()").split(",")))
