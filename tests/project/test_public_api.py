"""Public names and docstrings, imports, and the absence of network names in the code."""

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

import keras
import pytest

import tflms_sft

ROOT = Path(__file__).parents[2]
FILES = sorted(p for folder in ("tflms_sft", "rewriters") for p in (ROOT / folder).rglob("*.py"))
NETWORKS = re.compile(r"(?<![a-z])(vgg|resnet|unet|u_net|densenet|mobilenet|xception|inception|darknet|efficientnet)")


@functools.cache
def imported(path):
    """Names of all modules that a file imports, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def files_that_import(prefix):
    return {
        str(path.relative_to(ROOT))
        for path in FILES
        if any(name == prefix or name.startswith(prefix + ".") for name in imported(path))
    }


def test_all_equals_public_names():
    public = {name for name in dir(tflms_sft) if not inspect.ismodule(getattr(tflms_sft, name))}
    assert sorted(tflms_sft.__all__) == sorted({name for name in public if name[0] != "_"} | {"__version__"})


def test_lazy_names_equal_those_of_type_checkers():
    (for_checkers,) = (n for n in ast.parse((ROOT / "tflms_sft/__init__.py").read_text()).body if isinstance(n, ast.If))
    read = {alias.name: node.module for node in for_checkers.body for alias in node.names}
    assert read == tflms_sft._HOME_OF
    assert {*read, "__version__"} == set(tflms_sft.__all__)
    for name, module in read.items():
        assert getattr(tflms_sft, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="module 'tflms_sft' has no attribute 'MemoryBugdet'"):
        tflms_sft.MemoryBugdet  # noqa: B018


@pytest.mark.parametrize("name", [name for name in tflms_sft.__all__ if name != "__version__"])
def test_public_names_and_members_have_docstrings(name):
    public = getattr(tflms_sft, name)
    assert public.__doc__
    assert not public.__doc__.startswith(f"{name}("), "dataclasses write a docstring that says nothing"
    if inspect.isclass(public):
        members = {key: value for key, value in vars(public).items() if not key.startswith("_")}
        callables = {key: value for key, value in members.items() if callable(value) or isinstance(value, property)}
        assert not [key for key, value in callables.items() if not value.__doc__]


SUBMODULES = ("gems", "unets")


@pytest.mark.parametrize("module", SUBMODULES)
def test_public_submodules_have_all_and_docstrings(module):
    module = importlib.import_module(f"tflms_sft.{module}")
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    assert {name for name in own if name[0] != "_"} <= set(module.__all__) == {n for n in module.__all__ if n[0] != "_"}
    for name in module.__all__:
        if callable(getattr(module, name)):
            documents_every_parameter(getattr(module, name))


def test_private_modules_have_empty_all():
    public = {"rewriters/errors.py", "tflms_sft/__init__.py", *(f"tflms_sft/{name}.py" for name in SUBMODULES)}
    paths = {str(path.relative_to(ROOT)): path for path in FILES}
    modules = {name: path for name, path in paths.items() if not any(part[0] == "_" for part in name.split("/"))}
    assert not [
        name for name in modules.keys() - public if "\n__all__: list[str] = []\n" not in modules[name].read_text()
    ]


@pytest.mark.parametrize("name", [name for name in tflms_sft.__all__ if name != "__version__"])
def test_docstrings_list_every_parameter(name):
    documents_every_parameter(getattr(tflms_sft, name))


def documents_every_parameter(public):
    """Parameters are in `Args`, or in `Attributes` for results, which users do not construct; some with their types."""
    members = vars(public) if inspect.isclass(public) else {}
    methods = [getattr(public, key) for key in members if key[0] != "_" and inspect.isroutine(getattr(public, key))]
    for function in (public, *methods):
        if inspect.isclass(function) and issubclass(function, Exception):
            continue
        text = inspect.getdoc(function)
        assert text, function
        if inspect.isclass(function):
            text += f"\n{inspect.getdoc(function.__init__)}"
        names = [name for name in inspect.signature(function).parameters if name not in ("self", "args", "kwargs")]
        pattern = r"^ *(\*\*?)?{}( \([^()]+\))?: "
        assert not [name for name in names if not re.search(pattern.format(name), text, flags=re.MULTILINE)]


def test_callbacks_have_arguments_of_parameter_classes():
    for callback, params in ((tflms_sft.SFT, tflms_sft.SFTParams), (tflms_sft.MemoryBudget, tflms_sft.AutoParams)):
        wanted = inspect.signature(params).parameters
        given = inspect.signature(callback).parameters
        assert [*given][: len(wanted)] == [*wanted]
        assert {n: given[n].default for n in wanted} == {n: wanted[n].default for n in wanted}
        assert [*given][len(wanted) :] == ["batch_shape", "verbose", "log_dir"]


def test_errors_can_be_raised_again_by_autograph():
    for error in (tflms_sft.SegmentError, tflms_sft.BudgetError):
        assert issubclass(error, tflms_sft.RewriteError)
    assert issubclass(tflms_sft.RewriteError, Exception)
    assert not issubclass(tflms_sft.RewriteError, ValueError)
    for error in (tflms_sft.RewriteError, tflms_sft.SegmentError, tflms_sft.BudgetError):
        assert error.__init__ is Exception.__init__


def test_compiler_never_imports_tflms_sft():
    assert files_that_import("rewriters") >= {"tflms_sft/_search/traced_step.py", "tflms_sft/_rewrite/rewrite.py"}
    assert {path for path in files_that_import("tflms_sft") if path.startswith("rewriters/")} == set()


def test_private_tensorflow_imports_are_in_one_module():
    assert files_that_import("tensorflow.python") == {"rewriters/ir/tf_internals.py"}
    assert files_that_import("keras.src") == set()


def definitions_and_reads(path):
    """Return the names that a file defines, and those that it reads, each with whether an object reads its own."""
    defined, read = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            defined.add(ast.unparse(node.target).removeprefix("self."))
        elif isinstance(node, ast.Constant):
            read.add((node.value, False))
        elif isinstance(node, ast.Attribute):
            is_own = ast.unparse(node.value) in ("self", "cls", "super()")
            defined |= {node.attr} if is_own and isinstance(node.ctx, ast.Store) else set()
            read.add((node.attr, is_own))
    return defined, read


def test_private_keras_attributes_are_in_one_module():
    """A private name that Keras uses belongs to the project in files that define it, and in their subclasses."""
    sources = [p for p in Path(keras.__file__).parent.joinpath("src").rglob("*.py") if "_test" not in p.name]
    private = set(re.findall(r"(?<=[.\"'])_[a-z]\w*|(?<=def )_[a-z]\w*", "".join(p.read_text() for p in sources)))
    private.remove("_fields")  # Of a named tuple of Python.
    names = {str(path.relative_to(ROOT)): definitions_and_reads(path) for path in FILES}
    every = set.union(*(defined for defined, _ in names.values()))
    users = {
        (path, name)
        for path, (defined, read) in names.items()
        for name, is_own in read
        if name in private and name not in (every if is_own else defined)
    }
    assert ("tflms_sft/_util/keras_internals.py", "_flatten_layers") in users
    assert {path for path, _ in users} == {"tflms_sft/_util/keras_internals.py"}


def test_imports_are_installed_requirements():
    allowed = {"tflms_sft", "rewriters", "tensorflow", "keras", "numpy", "matplotlib"}
    roots = {name.partition(".")[0] for path in FILES for name in imported(path)}
    standard = {"__future__", *__import__("sys").stdlib_module_names}
    formats = {"h5py", "nibabel", "openslide", "tifffile", "zarr"}  # Each is imported when a file is opened.
    assert roots - standard <= allowed | formats
    homes = {"tflms_sft/_sources/formats.py", "tflms_sft/_sources/image_writer.py"}
    assert all(files_that_import(name) <= homes for name in formats)
    assert files_that_import("matplotlib") == {"tflms_sft/_report/schedule_chart.py"}


def test_code_names_no_network():
    assert NETWORKS.search("x == 'vgg16'") and NETWORKS.search("is_resnet")
    found = {str(p.relative_to(ROOT)): NETWORKS.findall(p.read_text().lower()) for p in FILES}
    assert {path: names for path, names in found.items() if names} == {}
