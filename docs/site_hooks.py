"""Hooks of mkdocs: generated parts of pages, marks of fenced blocks, and links that lead out of `docs/`.

- A page asks for generated text with a comment, `<!-- generated: command-line -->`.
- Marks behind the language of a block tell tests what to do with it (`tests/helpers/documents.py`). Markdown for the
  site would not recognise the block.
- Notebooks come with a script that would fetch Mermaid from the internet.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
LINK_OUT = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)((?:#[^)]*)?)\)")
MARK = re.compile(r"^(```\w+) (\S+)$", flags=re.MULTILINE)
MERMAID = re.compile(r'<script type="module">(?:(?!</script>).)*?mermaid.*?</script>', flags=re.DOTALL)
NOTEBOOK_LINK = re.compile(r'(href="(?!https?:)[^"#]*)\.md\b')
COMMENT = "<!-- generated: command-line -->"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in generated parts, drop marks of blocks, and replace links to files outside of the site by their paths."""
    text = MARK.sub(_without_mark, with_generated_parts(markdown))
    return LINK_OUT.sub(lambda link: _inside(link, page.file.src_uri), text)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Let links of notebooks lead to pages of the site; those of Markdown pages are changed by mkdocs."""
    return NOTEBOOK_LINK.sub(r"\1.html", html) if page.file.src_uri.endswith(".ipynb") else html


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Remove the script that draws diagrams of notebooks."""
    return MERMAID.sub("", output)


def with_generated_parts(markdown: str) -> str:
    """Return the text of a page with its generated parts."""
    if COMMENT not in markdown:
        return markdown
    sys.path[:0] = [str(DOCS.parent), str(DOCS)]
    try:
        from command_line_page import command_line_page
    finally:
        del sys.path[:2]
    return markdown.replace(COMMENT, command_line_page())


def _inside(link: re.Match[str], page: str) -> str:
    """Return a link unchanged if it stays in the site, and else its text and path."""
    target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link[2]))
    return link[0] if target.startswith("docs/") else f"{link[1]} (`{target}`)"


def _without_mark(fence: re.Match[str]) -> str:
    """Return the first line of a block, with the name of its file as a title if it has one."""
    return f'{fence[1]} title="{fence[2]}"' if fence[2].endswith(".py") else fence[1]
