"""Versions of TensorFlow and Keras: too old is refused with the remedy, newer than tested is announced once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tflms_sft
from rewriters.errors import RewriteError
from tflms_sft._util import requirements

ROOT = Path(__file__).resolve().parents[2]
REMEDY = 'Install supported versions with: pip install --upgrade "tensorflow>=2.18,<3" "keras>=3.8,<4"'
OLD = f"tflms-sft needs TensorFlow 2.18 to 2.21 and Keras 3.8 to 3.15. Found: TensorFlow 2.15.1. {REMEDY}"


@pytest.fixture
def found(monkeypatch):
    """Return a function that checks given versions."""

    def check(tensorflow, keras):
        versions = {"tensorflow": tensorflow, "keras": keras}
        monkeypatch.setattr(requirements, "installed_version", versions.get)
        requirements.check_versions()

    requirements.pending_notices.cache_clear()
    yield check
    requirements.pending_notices.cache_clear()


@pytest.mark.parametrize(
    ("tensorflow", "keras", "old"),
    [
        ("2.15.1", "3.8.0", "TensorFlow 2.15.1"),
        ("2.18.0", "2.15.0", "Keras 2.15.0"),
        ("1.15.5", "3.7.0.dev2024", "TensorFlow 1.15.5 and Keras 3.7.0.dev2024"),
    ],
)
def test_old_versions_are_refused_each_time(found, tensorflow, keras, old):
    for _ in range(2):
        with pytest.raises(RewriteError) as error:
            found(tensorflow, keras)
        assert str(error.value) == OLD.replace("TensorFlow 2.15.1", old)
    assert not isinstance(error.value, ImportError)


@pytest.mark.parametrize(
    "versions", [("2.18.0", "3.8.0"), ("2.21.0", "3.15.1"), ("2.18.0rc1", "3.9"), (None, None), ("unknown", "3.10.0")]
)
def test_supported_and_unknown_versions_print_nothing(found, versions, capsys):
    found(*versions)
    assert capsys.readouterr() == ("", "")


def test_newer_versions_are_announced_once(found, capsys):
    found("2.22.0", "4.0.0")
    found("2.22.0", "4.0.0")
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [
        "tflms-sft: TensorFlow 2.22.0 is newer than the tested versions (2.18 to 2.21). Check it with `tflms-sft "
        'doctor`, or install a tested version with: pip install "tensorflow<2.22"',
        "tflms-sft: Keras 4.0.0 is newer than the tested versions (3.8 to 3.15). Check it with `tflms-sft doctor`, or "
        'install a tested version with: pip install "keras<3.16"',
    ]


def test_missing_package_is_refused(found, monkeypatch):
    monkeypatch.setattr(requirements, "is_installed", lambda package: package != "tensorflow")
    with pytest.raises(RewriteError) as error:
        found(None, "3.10.0")
    assert str(error.value) == OLD.replace("TensorFlow 2.15.1", "no TensorFlow")


@pytest.mark.parametrize(
    ("named", "in_file", "backend"),
    [
        ("", None, "tensorflow"),
        ("jax", "torch", "jax"),
        ("", "torch", "torch"),
        ("", "", "tensorflow"),
        ("tensorflow", "jax", "tensorflow"),
    ],
)
def test_backend_is_that_of_the_environment_else_of_the_settings_file(named, in_file, backend, monkeypatch, tmp_path):
    assert requirements.keras_backend() == "tensorflow"  # That of the imported Keras.
    monkeypatch.setitem(sys.modules, "keras", None)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", named)
    if in_file is not None:
        (tmp_path / "keras.json").write_text(f'{{"backend": "{in_file}"}}')
    assert requirements.keras_backend() == backend


def test_installed_version_is_that_of_the_imported_module(monkeypatch):
    monkeypatch.setattr(sys.modules["tensorflow"], "__version__", "2.19.7")
    assert requirements.installed_version("tensorflow") == "2.19.7"
    assert requirements.installed_version("nonesuch") is None


# As processes, with packages that are only metadata ---------------------------------------------------------------


@pytest.fixture
def python(tmp_path):
    """Return a function that runs Python in a folder where packages of given versions seem to be installed."""

    def run(*arguments, **versions):
        for name, version in versions.items():
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run


NAMES = ("from tflms_sft import SFT", "from tflms_sft import RewriteError", "import tflms_sft.unets")


@pytest.mark.parametrize("program", NAMES)
def test_first_use_with_old_tensorflow_is_refused_before_its_import(python, program):
    code, _, err = python("-c", program, tensorflow="2.15.1")
    assert code == 1 and err.splitlines()[-1] == f"rewriters.errors.RewriteError: {OLD}"


BACKEND = (
    "tflms-sft rewrites TensorFlow graphs, and the backend of Keras is 'jax'. Set the environment variable "
    'KERAS_BACKEND="tensorflow", before Keras is imported.'
)


@pytest.mark.parametrize("program", [NAMES[0], NAMES[2]])
def test_first_use_with_another_backend_is_refused_before_its_import(python, program, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    code, _, err = python("-c", program)
    assert code == 1 and err.splitlines()[-1] == f"rewriters.errors.RewriteError: {BACKEND}"


def test_command_with_another_backend_prints_one_error(python, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    code, out, err = python("-m", "tflms_sft", "plan", "zoo:build", "--budget", "1GiB")
    assert (code, out, err) == (1, "", f"tflms-sft plan: error: {BACKEND}\n")


def test_version_and_help_work_with_old_tensorflow(python):
    assert python("-c", "import tflms_sft; print(tflms_sft.__version__)", tensorflow="2.15.1")[:2] == (
        0,
        f"{tflms_sft.__version__}\n",
    )
    assert python("-m", "tflms_sft", "plan", "--help")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [("plan", "zoo:build", "--budget", "1GiB"), ("run", "--budget", "1GiB", "train.py")],
    ids=["plan", "run"],
)
def test_command_with_old_tensorflow_prints_one_error(python, tmp_path, arguments):
    (tmp_path / "train.py").write_text("print('trained')\n")
    code, out, err = python("-m", "tflms_sft", *arguments, tensorflow="2.15.1")
    assert (code, out) == (1, "")
    assert err.endswith(f"error: {OLD}\n") and len(err.splitlines()) == 1


def test_first_use_with_newer_keras_prints_one_line(python):
    code, _, err = python("-c", "import tflms_sft as t; t.RewriteError, t.BudgetError", keras="3.99.0")
    assert code == 0 and len(err.splitlines()) == 1
    assert err.startswith("tflms-sft: Keras 3.99.0 is newer than the tested versions (3.8 to 3.15).")


@pytest.mark.parametrize("options", [(), ("--quiet",)], ids=["", "quiet"])
def test_run_with_newer_keras_prints_one_line_unless_quiet(python, tmp_path, options):
    (tmp_path / "train.py").write_text("import tflms_sft\nprint(tflms_sft.RewriteError.__name__)\n")
    arguments = ("-m", "tflms_sft", "run", "--budget", "1GiB", *options, "train.py")
    code, out, err = python(*arguments, keras="3.99.0")
    assert (code, out) == (0, "RewriteError\n")
    assert err.count("is newer than the tested versions") == (0 if options else 1) and bool(err) != bool(options)
