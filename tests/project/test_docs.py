"""The documentation: its snippets run, its links lead somewhere, its lists are whole."""

import ast
import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from documents import PAGES, ROOT, blocks, names_of
from import_graph import FILES
from PIL import Image

import tflms_sft

SLOW = {"README.md", "command-line.md", "custom-training-loop.md", "images-in-files.md", "parts-of-an-image.md"}
MARKS = {"python": ("", "fragment"), "text": ("", "prints"), "console": ("",)}

LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", flags=re.MULTILINE | re.DOTALL)
with_generated_parts = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))["with_generated_parts"]
RUNNABLE = [page for page in PAGES if any(block.runs for block in blocks(page))]


def called(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=called(p), marks=[pytest.mark.slow] * (p.name in SLOW)) for p in RUNNABLE]
)
def test_page_snippets_run_in_order(page, tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "documents.py"), str(page), str(tmp_path)]
    environment = {**os.environ, "TFLMS_SFT_RATES": "nominal", "MPLBACKEND": "agg"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_page_marks_are_known_and_fragments_cannot_run(page):
    """A snippet that could run has to: what needs nothing but the page is no fragment."""
    found = list(blocks(page))
    made = set().union(*(names_of(block.text)[1] for block in found if block.language == "python" and block.runs))
    for block in found:
        where = f"{called(page)}:{block.line}"
        known = MARKS.get(block.language, ("",))
        assert block.mark in known or block.file, f"{where}: `{block.mark}` is none of {known}"
        if (block.language, block.mark) == ("python", "fragment"):
            missing = names_of(block.text)[0] - made
            assert missing, f"{where}: all that this needs is on the page, so it can run: leave out `fragment`"


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_page_calls_match_public_signatures(page):
    """Public names exist and accept the arguments on the page, also in fragments."""
    for block in blocks(page):
        if block.language == "python":
            for node in ast.walk(ast.parse(block.text)):
                path = _path(node.func) if isinstance(node, ast.Call) else ""
                if path.startswith("tflms_sft."):
                    where = f"{called(page)}:{block.line + node.lineno - 1}"
                    _check_call(where, path, node)


def _path(node):
    """`"tflms_sft.LMSParams.tuned"` of such an expression."""
    if isinstance(node, ast.Attribute):
        return f"{_path(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _check_call(where, path, node):
    _, name, *members = path.split(".")
    assert name in tflms_sft.__all__, f"{where}: {path}"
    function = getattr(tflms_sft, name)
    for member in members:
        function = getattr(function, member)
    if any(isinstance(arg, ast.Starred) or getattr(arg, "value", None) is ... for arg in node.args):
        return
    given = {keyword.arg: None for keyword in node.keywords if keyword.arg}
    inspect.signature(function).bind(*node.args, **given)


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_page_links_have_targets(page):
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    for path, anchor in LINK.findall(text):
        target = page if not path else page.parent / path
        assert target.exists(), f"{called(page)}: {path}"
        if anchor:
            assert anchor[1:] in _anchors(target), f"{called(page)}: {path}{anchor}"


def _anchors(page: Path):
    """Return the anchors that GitHub and mkdocs derive from headings, and those of generated parts."""
    text = with_generated_parts(page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return anchors | set(re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE))


PATH = re.compile(r"(?:rewriters|tflms_sft|tests|docs|benchmarks|examples)/[\w./-]*\w")
NAME = re.compile(r"(?<![\w./])(\w+)\.([A-Za-z_]\w*)")


def code_spans(page):
    """Return the backticked texts of a page that lie outside fenced blocks."""
    return [match[1:-1] for match in CODE.findall(page.read_text(encoding="utf-8")) if not match.startswith("```")]


def definitions(path):
    """Return the names that a file defines or imports at its top level."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return names.union(*(names_of(ast.unparse(node))[1] for node in nodes if not isinstance(node, ast.ClassDef)))


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_code_spans_name_files_and_folders_that_exist(page):
    paths = {path for span in code_spans(page) for path in PATH.findall(span)}
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_code_spans_name_functions_and_classes_that_exist(page):
    """`module.name` by the last part of the module's name; `plan.` is an attribute of results."""
    modules = {name.rpartition(".")[2]: path for name, path in FILES.items() if path.name != "__init__.py"}
    del modules["plan"]
    names = [match for span in code_spans(page) for match in NAME.findall(span)]
    inner = [(module, name) for module, name in names if module in modules and name != "py"]
    assert [f"{module}.{name}" for module, name in inner if name not in definitions(modules[module])] == []
    public = {name for module, name in names if module == "tflms_sft"}
    assert public - {*tflms_sft.__all__, *vars(tflms_sft)} <= {name.rpartition(".")[2] for name in FILES}


def test_architecture_page_lists_every_package():
    spans = code_spans(ROOT / "docs" / "develop" / "architecture.md")
    folders = {f"{name.replace('.', '/')}" for name, path in FILES.items() if path.name == "__init__.py"}
    assert {folder for folder in folders if "/" in folder} <= set(spans)


def test_architecture_picture_shows_the_imports():
    """The picture carries its arrows as text."""
    names = runpy.run_path(str(ROOT / "docs" / "pictures" / "architecture.py"))
    drawn = Image.open(ROOT / "docs" / "pictures" / "architecture.png").text["Description"]
    assert drawn == names["arrows_text"](names["shown_imports"]()), "run `python docs/pictures/architecture.py`"


PICTURES = sorted(path for path in (ROOT / "docs" / "pictures").iterdir() if path.suffix in (".png", ".gif"))
OF_OTHER_PROGRAMS = {path.name for path in PICTURES if path.name.startswith(("benchmark-", "compare_", "slide-"))}
"""Pictures that the programs in `benchmarks` and `examples` draw."""


@pytest.mark.parametrize("picture", PICTURES, ids=called)
def test_pictures_are_small_and_referenced(picture):
    assert picture.stat().st_size < (2**20 if picture.suffix == ".gif" else 100_000)
    shown = [page for page in PAGES if picture.name in page.read_text(encoding="utf-8")]
    assert shown


def test_animation_is_a_loop_of_seconds_that_fits_a_page():
    with Image.open(ROOT / "docs" / "pictures" / "tiles.gif") as picture:
        assert picture.width == 800 and picture.info["loop"] == 0, "endless"
        durations = []
        for number in range(picture.n_frames):
            picture.seek(number)
            durations.append(picture.info["duration"])
    assert 8_000 < sum(durations) < 16_000 and max(durations) == durations[-1], "the last frame is held"


@pytest.mark.slow
def test_pictures_program_draws_every_picture(tmp_path):
    command = [sys.executable, str(ROOT / "docs" / "pictures" / "make.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in PICTURES} - OF_OTHER_PROGRAMS


# Reference ----------------------------------------------------------------------------------------------------------

PUBLIC = sorted({*tflms_sft.__all__} - {"__version__"})
ENTRY = re.compile(r"^    \*{0,2}(\w+)(?: \([^()]+\))?: *(.*)$", flags=re.MULTILINE)


def test_api_page_has_every_public_name():
    text = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: tflms_sft\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted(shown) == sorted([*PUBLIC, "gems", "unets"])
    assert "`tflms_sft.__version__`" in text


def described(public, *sections):
    """Return the names in some sections of a docstring, each with the first line of its description."""
    text = inspect.getdoc(public)
    bodies = (re.search(rf"^{name}:\n((?:    .*\n?|\n)*)", text, flags=re.MULTILINE) for name in sections)
    return dict(entry for body in bodies if body for entry in ENTRY.findall(body[1]))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_parameters_are_described(name):
    """Parameters of results, which users do not construct, are attributes."""
    public = getattr(tflms_sft, name)
    if not (inspect.isclass(public) and issubclass(public, Exception)) and name != "RewrittenStep":
        found = described(public, "Args", "Attributes")
        assert all(found.get(parameter) for parameter in inspect.signature(public).parameters)
    if inspect.isclass(public):
        for member in vars(public).values():
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function) and not function.__name__.startswith("_"):
                names = [*inspect.signature(function).parameters][1:]
                assert all(described(function, "Args").get(parameter) for parameter in names)


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isclass(getattr(tflms_sft, name))])
def test_public_attributes_are_described(name):
    """Fields, and attributes that `__init__` sets, are in `Attributes`; arguments of the same name need no entry."""
    public = getattr(tflms_sft, name)
    bases = [base for base in public.__mro__ if base.__module__.startswith(("tflms_sft", "rewriters"))]
    found = {key for base in bases for key in base.__dict__.get("__annotations__", ())}
    found |= set(re.findall(r"^        self\.(\w+)(?:: [^=]+)? = ", inspect.getsource(public), flags=re.MULTILINE))
    properties = {key: value for base in bases for key, value in vars(base).items() if isinstance(value, property)}
    assert all(value.__doc__ for key, value in properties.items() if key[0] != "_")
    shown = described(public, "Args", "Attributes")
    assert all(shown.get(key) for key in found if key[0] != "_")
    assert all(hasattr(public, key) or key in found for key in described(public, "Attributes")), "some are gone"


def test_environment_page_has_all_variables():
    text = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    used = set()
    for folder in ("tflms_sft", "rewriters"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            used |= set(re.findall(r'environ\.\w+\(\s*"(\w+)"', source))
            if re.search(r"environ\.\w+\(\s*VARIABLE", source):
                used |= set(re.findall(r'^VARIABLE = "(\w+)"', source, flags=re.MULTILINE))
    assert {"TFLMS_SFT_RATES", "XDG_CACHE_HOME"} <= used
    assert not {name for name in used if f"| `{name}` |" not in text}
