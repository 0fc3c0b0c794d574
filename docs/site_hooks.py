"""Hooks of mkdocs: generated parts of pages, and links that lead out of `docs/`.

A page asks for generated text with a comment of its own, `<!-- generated: command-line -->`.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY_FILES = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)((?:#[^)]*)?)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in generated parts, and turn links to files outside of the site into their paths."""
    sys.path.insert(0, str(ROOT))
    try:
        if "<!-- generated: command-line -->" in markdown:
            from docs.command_line_page import command_line_page

            markdown = markdown.replace("<!-- generated: command-line -->", command_line_page())
    finally:
        sys.path.remove(str(ROOT))
    return REPOSITORY_FILES.sub(lambda link: _inside(link, page.file.src_uri), markdown)


def _inside(link: re.Match[str], page: str) -> str:
    """Return a link unchanged if it stays in the site, and else only its path, as code."""
    target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link[1]))
    return link[0] if target.startswith("docs/") else f"] (`{target}`)"
