"""Runs the snippets of a page of the documentation, in order and in one process.

    python tests/helpers/documents.py docs/how-to/swap.md [FOLDER]

What stands behind the language of a block says what it is for:

    ```python            runs
    ```python fragment   shows one thing and needs names that the reader has; it is checked, not run
    ```python nets.py    is written to that file, in the folder that the page runs in
    ```text prints       is, line for line, what the block of Python before it has printed
    ```console           lines that begin with `$ ` are run

Blocks without a language, and those in others, are only read.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import difflib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(r"```(\S*) ?(.*)")
_COMMANDS = {"tflms-sft": [sys.executable, "-m", "tflms_sft"], "python": [sys.executable]}


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
        line: Number of the first of them.
        language: Such as `"python"`, empty without one.
        mark: What stands behind the language.
        text: The lines.
    """

    line: int
    language: str
    mark: str
    text: str

    @property
    def runs(self) -> bool:
        """Return whether running the page executes the block."""
        return (self.language, self.mark) == ("python", "") or self.language == "console" or bool(self.file)

    @property
    def file(self) -> str:
        """Return the name of the file that the block is written to, or an empty string."""
        return self.mark if self.language == "python" and self.mark.endswith(".py") else ""


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    inside: Block | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.fullmatch(line)
        if inside is None and fence:
            inside, lines = Block(number + 1, *fence.groups(), ""), []
        elif inside is not None and line == "```":
            yield inside._replace(text="\n".join(lines) + "\n")
            inside = None
        elif inside is not None:
            lines.append(line)
    assert inside is None, f"{page.name}:{inside.line}: this block does not end"


def names_of(text: str) -> tuple[set[str], set[str]]:
    """Return the names that code reads but never sets, and the names that it sets."""
    nodes = list(ast.walk(ast.parse(text)))
    found = [node for node in nodes if isinstance(node, ast.Name)]
    makers = (ast.FunctionDef, ast.ClassDef)
    made = {node.id for node in found if isinstance(node.ctx, ast.Store)}
    made |= {node.name for node in nodes if isinstance(node, makers)} | {n.arg for n in nodes if isinstance(n, ast.arg)}
    imports = [alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    made |= {(alias.asname or alias.name).partition(".")[0] for alias in imports}
    return {node.id for node in found} - made - set(dir(builtins)), made


def run(page: Path, folder: Path) -> None:
    """Run a page in a folder; an error of a snippet has the page's line numbers."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            for line in block.text.splitlines():
                if line.startswith("$ "):
                    command, *arguments = shlex.split(line[2:])
                    done = subprocess.run([*_COMMANDS[command], *arguments], cwd=folder, check=False)
                    assert done.returncode == 0, f"{where}: `{line}` ended with {done.returncode}"
        elif block.runs:
            code = compile("\n" * (block.line - 1) + block.text, page, "exec")
            output = io.StringIO()
            try:
                with contextlib.redirect_stdout(output):
                    exec(code, names)
            finally:
                printed = output.getvalue()
                print(printed, end="", flush=True)
        elif block.mark == "prints":
            texts = ([line.rstrip() for line in text.splitlines()] for text in (block.text, printed))
            differing = "\n".join(difflib.unified_diff(*texts, "on the page", "printed", lineterm=""))
            assert not differing, f"{where}: this is not what the block before it prints\n{differing}"


def main() -> None:
    """Run the page that the command line names."""
    page, folder = Path(sys.argv[1]).resolve(), Path(*sys.argv[2:] or ".").resolve()
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, str(ROOT))
    os.chdir(folder)
    run(page, folder)


if __name__ == "__main__":
    main()
