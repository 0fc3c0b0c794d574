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

SLOW = {"README.md", "first-budget.md"}
MARKS = {"python": ("", "fragment"), "text": ("", "prints"), "console": ("",)}

LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", flags=re.MULTILINE | re.DOTALL)
RUNNABLE = [page for page in PAGES if any(block.runs for block in blocks(page))]


@pytest.fixture(autouse=True)
def fresh_keras():
    """Pages run in processes of their own, and resetting Keras takes longer than the other tests."""


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
    """Return the anchors that GitHub derives from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.png")), ids=called)
def test_pictures_are_small_and_referenced(picture):
    assert picture.stat().st_size < 100_000
    shown = [page for page in PAGES if picture.name in page.read_text(encoding="utf-8")]
    assert shown


@pytest.mark.slow
def test_pictures_program_draws_every_picture(tmp_path):
    command = [sys.executable, str(ROOT / "docs" / "pictures" / "make.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert {path.name for path in tmp_path.iterdir()} == {p.name for p in (ROOT / "docs" / "pictures").glob("*.png")}


# The page of parameters ---------------------------------------------------------------------------------------------

PARAMETERS = ROOT / "docs" / "reference" / "parameters.md"
ROW = re.compile(r"^\| (`.*?`) \|(.*)\|$")


def sections(page):
    """Text below each heading of the third level."""
    parts = re.split(r"^### (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = (re.split(r"^## ", text, flags=re.MULTILINE)[0] for text in parts[2::2])
    return dict(zip(parts[1::2], texts, strict=True))


def tables(text):
    """The rows of the tables of a section, each as its cells, per table."""
    found, table = [], []
    for line in [*text.splitlines(), ""]:
        row = ROW.match(line)
        if row:
            table.append([row[1], *(cell.strip() for cell in row[2].split(" | "))])
        elif table and not line.startswith("|"):
            found.append(table)
            table = []
    return found


def written(parameter):
    """Return the cells for a parameter and its default on the page."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    if stars:
        return [f"`{stars}{parameter.name}`", ""]
    if parameter.default is parameter.empty:
        return [f"`{parameter.name}`", "required"]
    default = f'"{parameter.default}"' if isinstance(parameter.default, str) else repr(parameter.default)
    return [f"`{parameter.name}`", f"`{default}`"]


CALLED_BY_USERS = ["MemoryBudget", "SFT", "LMS", "Pipeline", "budget", "rewrite", "measure", "verify", "stage_devices"]
CALLED_BY_USERS += ["connect", "AutoParams", "SFTParams", "SegmentSpec", "LMSParams", "PipelineParams"]


def test_parameters_page_has_every_public_name():
    assert set(sections(PARAMETERS)) == {*tflms_sft.__all__} - {"__version__"}
    assert "`__version__`" in PARAMETERS.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CALLED_BY_USERS)
def test_parameters_page_has_all_parameters_with_defaults(name):
    first, *others = tables(sections(PARAMETERS)[name])
    signature = inspect.signature(getattr(tflms_sft, name))
    assert [row[:2] for row in first] == [written(parameter) for parameter in signature.parameters.values()]
    assert all(len(row) == 3 and row[2] for row in first)
    methods = {key: value for key, value in vars(getattr(tflms_sft, name)).items() if isinstance(value, classmethod)}
    if isinstance(getattr(tflms_sft, name), type) and methods:
        assert list(methods) == ["tuned"]
        tuned = inspect.signature(tflms_sft.LMSParams.tuned).parameters.values()
        assert [[row[:2] for row in table] for table in others] == [[written(parameter) for parameter in tuned]]


@pytest.mark.parametrize("name", sorted({*tflms_sft.__all__} - {"__version__", *CALLED_BY_USERS}))
def test_parameters_page_has_all_members_of_results_and_errors(name):
    public, text = getattr(tflms_sft, name), sections(PARAMETERS)[name]
    bases = [base for base in public.__mro__ if base.__module__.startswith(("tflms_sft", "rewriters"))]
    members = {member for base in bases for member in (*base.__dict__.get("__annotations__", ()), *vars(base))}
    if name == "RewrittenStep":
        members |= {"plan", "concrete_function"}
    members = {member for member in members if not member.startswith("_")}
    shown = set(re.findall(r"`(\w+)(?:\([^`]*\))?`", text))
    assert members <= shown, members - shown
    rows = [row[0] for table in tables(text) for row in table]
    listed = {found for row in rows for found in re.findall(r"`(\w+)", row)}
    assert listed <= members, "these are gone"
    for found in re.findall(r"`(\w+)\((\w[^`]*)\)`", text):
        defaults = [p for p in list(inspect.signature(getattr(public, found[0])).parameters.values())[1:]]
        shown = (p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in defaults)
        assert found[1] == ", ".join(shown)


def test_parameters_page_has_all_environment_variables():
    text = PARAMETERS.read_text(encoding="utf-8")
    used = set()
    for folder in ("tflms_sft", "rewriters"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            used |= set(re.findall(r'environ\.\w+\(\s*"(\w+)"', source))
            if re.search(r"environ\.\w+\(\s*VARIABLE", source):
                used |= set(re.findall(r'^VARIABLE = "(\w+)"', source, flags=re.MULTILINE))
    assert {"TFLMS_SFT_RATES", "XDG_CACHE_HOME"} <= used
    assert not {name for name in used if f"| `{name}` |" not in text}
