"""Glossary: messages of the code, and all pages, use one term per thing.

A pattern matches a word in the one meaning that the glossary replaces: `turn` of a loop, and not `turn off`.
"""

import ast
import json
import re

import pytest
from documents import ROOT

DETERMINER = r"(?:an?|the|each|every|one|per|its|this|that|first|last|next|same|single|several|many|more|fewer|\d+)"
OBJECT = r"(?: (?:it|them|rows|halos|tensors|values|its \w+|their \w+|the \w+))?"

GLOSSARY = {
    "iteration": (
        rf"\b{DETERMINER} turns?\b(?! (?:on|off|out|into|to))|\bturns? of (?:a|the|each|its) loops?\b",
        ["memory of one turn", "in each turn", "the last turns of a loop", "12 turns"],
        ["turn XLA off", "in turn", "a step that turns into another", "returns"],
    ),
    "tensors saved for the backward pass": (
        r"\bwhat waits\b|\bwait(?:s|ing)? for (?:the|its) backward\b",
        ["what waits for it", "tensors that wait for the backward phase"],
        ["a job that waits for the machine", "an update waits for its gradients"],
    ),
    "recomputed": (
        r"\b(?:made|make|makes|making|computed|compute|computes|computing|calculated?)"
        r"(?: (?:it|them|these|those|both|all))? (?:again|anew)\b",
        ["made again", "computed again", "computes them again", "makes it anew"],
        ["planned again", "computed in float32, and read again"],
    ),
    "checkpointed, saved": (
        r"\b(?:kept|stored|keeps?|stores?) (?:for|until) (?:the|its) (?:backward|gradient)"
        r"|\b(?:kept|stored) (?:tensors?|activations?)\b|\b(?:tensors?|activations?) (?:(?:that )?(?:are|is) )?"
        r"(?:kept|stored)\b(?! (?:on|in|at|as) )",
        [
            "stored for the backward pass",
            "kept tensors",
            "activations that are kept",
            "tensors stored between segments",
        ],
        ["the result is stored in a file", "checkpoints are kept", "tensors are stored on disk"],
    ),
    "carried": (
        rf"\bhand(?:s|ed|ing)?{OBJECT} on\b|\bpass(?:es|ed|ing)?{OBJECT} on\b(?! (?:an?|the|this|each) )",
        ["handed on", "hands them on", "rows that are passed on", "passes halos on"],
        ["passed on the command line", "on the other hand", "the suite passes on a CPU"],
    ),
    "original step": (
        r"\bplain steps?\b|\bsteps? as (?:it|they) (?:was|were|is|are)\b",
        ["the plain step", "the step as it was", "runs the step as it is"],
        ["plain training", "plain text"],
    ),
    "fraction": (
        r"\bparts? \(?(?:of )?(?:it )?\(?0?\.\d|\b0\.\d+ parts?\b|\ba part of the (?:time|budget)\b",
        ["in part (0.35 of it)", "a part of the budget"],
        ["a part of the image", "part 2"],
    ),
    "explicit, as given": (r"\bas (?:it is |they are )?told\b", ["tiles as told"], ["the summary told it"]),
    "not rewritten": (
        r"\b(?:left|leave|leaves|leaving)(?: \S+)? alone\b",
        ["left alone", "leaves it alone"],
        ["plan.left_alone", "tiles alone"],
    ),
    "fragmented": (r"\bin pieces\b", ["memory in pieces"], ["two pieces"]),
    "concurrently": (
        r"\bat once\b|\b(?:run|runs|ran|running|execute[sd]?|alive) together\b",
        ["two ops at once", "run together"],
        ["planned once", "tiles together with swaps"],
    ),
    "scales with the batch size": (
        r"\b(?:go|goes|going|grows?|growing) with (?:the |its |a )?(?:size of (?:the|a) )?batch\b",
        ["goes with the batch", "a loss that goes with the size of the batch"],
        ["it goes with the first release", "scales with the batch size"],
    ),
    "reduces over the image": (
        r"\b(?:one|a single) (?:value|number|result) (?:for|of) all (?:the |its )?pixels\b",
        ["makes one value for all pixels"],
        ["a value for each pixel"],
    ),
    "runs untiled": (
        r"\b(?:run|runs|ran|running|stay|stays) whole\b",
        ["what runs whole", "the head runs whole"],
        ["the whole image"],
    ),
    "strip": (
        r"\bfull-width rows?\b|\brows? of full width\b|\brows? (?:or|and|instead of) tiles\b|\btiles or rows\b",
        ["rows of full width", "tiles or rows"],
        ["rows of pixels", "tiles and their rows"],
    ),
    "newly mapped memory": (
        r"\bhand(?:s|ed|ing)? (?:out|over) anew\b|\bmemory (?:that is )?given out anew\b",
        ["memory that the system hands out anew"],
        ["planned anew"],
    ),
}
"""(pattern of the words to avoid, sentences with them, sentences without) by the term to use instead."""

FILES = sorted(path for folder in ("tflms_sft", "rewriters") for path in (ROOT / folder).rglob("*.py"))
TEXTS = sorted(
    path
    for folder, names in ((".", "*.md"), ("benchmarks", "*.md"), ("docs", "**/*.md"), ("docs", "**/*.ipynb"))
    for path in (ROOT / folder).glob(names)
)

CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", flags=re.MULTILINE | re.DOTALL)
"""Blocks of code, names, comments and addresses of links."""


PATTERNS = {term: re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE) for term, (pattern, _, _) in GLOSSARY.items()}


def faults(text, line):
    """Return a text, with its line, for each word that the glossary replaces; `line` is the first line of the text."""
    found = [(match, term) for term, pattern in PATTERNS.items() for match in pattern.finditer(text)]
    return [
        f"{line + text.count(chr(10), 0, match.start())}: `{' '.join(match[0].split())}`: write `{term}`"
        for match, term in sorted(found, key=lambda pair: pair[0].start())
    ]


def messages(source):
    """Yield (line, text) of the string literals of a module, without docstrings; `{}` stands for values."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | parts:
            yield node.lineno, node.value


def in_code(source):
    return [fault for line, text in messages(source) for fault in faults(text, line)]


def in_page(page):
    """Return the faults of a page, or of the Markdown cells of a notebook, outside of code."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return faults(CODE.sub(lambda match: "`" + "\n" * match[0].count("\n"), text), 1)


def test_messages_use_the_glossary():
    found = [f"{path.relative_to(ROOT)}:{fault}" for path in FILES for fault in in_code(path.read_text("utf-8"))]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_uses_the_glossary(page):
    found = [f"{page.relative_to(ROOT)}:{fault}" for fault in in_page(page)]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("term", GLOSSARY)
def test_glossary_patterns_find_the_meaning_alone(term):
    _, wrong, right = GLOSSARY[term]
    assert [text for text in wrong if not PATTERNS[term].search(text)] == []
    assert [text for text in right if PATTERNS[term].search(text)] == []


def test_bad_message_and_bad_page_are_found(tmp_path):
    source = (
        '"""Runs at once."""\nraise ValueError(f"{op} is "\n    f"left {op!r} alone: the plain step is made again")\n'
    )
    assert in_code(source) == [
        "2: `left {} alone`: write `not rewritten`",
        "2: `plain step`: write `original step`",
        "2: `made again`: write `recomputed`",
    ]
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nA `plain step`.\n\n```python\nplain_step = 'as told'\n```\n\nTwo ops run at\nonce.\n")
    assert in_page(page) == ["9: `at once`: write `concurrently`"]
    page = tmp_path / "page.ipynb"
    cells = [{"cell_type": kind, "source": ["As told\n", "twice."]} for kind in ("code", "markdown")]
    page.write_text(json.dumps({"cells": cells}))
    assert in_page(page) == ["1: `As told`: write `explicit, as given`"]
