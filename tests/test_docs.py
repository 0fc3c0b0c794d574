"""The documentation: its snippets run, its links lead somewhere, its lists are whole."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import PAGES, ROOT, blocks, names_of

import tflms_sft

SLOW = {"README.md", "start-here.md"}
MARKS = {"python": ("", "fragment"), "text": ("", "prints"), "console": ("",)}

LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
RUNNABLE = [page for page in PAGES if any(block.runs for block in blocks(page))]


@pytest.fixture(autouse=True)
def fresh_keras():
    """Pages run in processes of their own, and resetting Keras takes longer than the other tests."""


def called(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=called(p), marks=[pytest.mark.slow] * (p.name in SLOW)) for p in RUNNABLE]
)
def test_the_snippets_of_a_page_run_in_order(page, tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "documents.py"), str(page), str(tmp_path)]
    environment = {**os.environ, "TFLMS_SFT_RATES": "nominal", "MPLBACKEND": "agg"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_marks_are_known_and_fragments_could_not_run(page):
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
def test_what_is_called_can_be_called_like_that(page):
    """Of fragments too: public names are there, and take the arguments that they are given."""
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
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        return
    given = {keyword.arg: None for keyword in node.keywords if keyword.arg}
    bind = inspect.signature(function).bind_partial if ... in _constants(node.args) else inspect.signature(function).bind
    bind(*node.args, **given)


def _constants(nodes):
    return [node.value for node in nodes if isinstance(node, ast.Constant)]


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_links_lead_somewhere(page):
    for path, anchor in LINK.findall(re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)):
        target = page if not path else page.parent / path
        assert target.exists(), f"{called(page)}: {path}"
        if anchor:
            assert anchor[1:] in _anchors(target), f"{called(page)}: {path}{anchor}"


def _anchors(page: Path):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
