"""The documentation as a site: it builds without warnings, and opens without a server and without the internet."""

import html
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import tflms_sft

ROOT = Path(__file__).parents[2]
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
"""Attributes whose address a browser fetches to show a page; `link` depends on its relation."""
FETCHED_LINKS = {"stylesheet", "icon", "shortcut icon", "preload", "prefetch", "modulepreload", "preconnect"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site. Its build fails at a warning; with `--quiet`, mkdocs would not count warnings."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # The theme prints a notice about another project.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout[-4000:] + done.stderr[-4000:]
    return folder


class Page(HTMLParser):
    """Collects the addresses that a browser fetches to show a page, its anchors and its inline scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.scripts = ""
        self._in_script = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        self._in_script = tag == "script" and "src" not in values
        if FETCHED.get(tag) in values:
            self.fetched.append(values[FETCHED[tag]])
        if tag == "link" and values.get("rel") in FETCHED_LINKS:
            self.fetched.append(values["href"])

    def handle_endtag(self, tag):
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data):
        if self._in_script:
            self.scripts += data


def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_pages_fetch_nothing_from_other_hosts(site):
    found = pages(site)
    assert len(found) > 20
    for path, page in found.items():
        assert page.fetched
        outside = [address for address in page.fetched if re.match(r"(https?:)?//", address)]
        assert not outside, f"{path.name}: {outside}"
        assert not re.search(r"\bimport\b.*https?://|(?:src|href) *= *[\"']https?://", page.scripts), path.name


def test_styles_fetch_nothing_from_other_hosts(site):
    styles = list(site.rglob("*.css"))
    assert styles
    for path in styles:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", text), path.name


def test_fetched_files_exist(site):
    """Addresses are relative, so that the pages open from a folder; those of the error page begin at the root."""
    for path, page in pages(site).items():
        for address in page.fetched:
            if not address.startswith("data:"):
                target = address.partition("?")[0].partition("#")[0]
                start = site if target.startswith("/") else path.parent
                assert (start / target.lstrip("/")).exists(), f"{path.name}: {address}"


def test_every_page_of_docs_is_in_the_site(site):
    sources = [
        path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb")
    ]
    assert sources and not [path for path in sources if not (site / path.with_suffix(".html")).exists()]


def test_search_index_contains_known_pages(site):
    """The index is a script as well, which a page that was opened from a folder may load."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = {entry["location"]: entry["title"] for entry in index["docs"]}
    assert titles["reference/glossary.html"] == "Glossary"
    assert "reference/command-line.html#max-input" in titles
    assert any(location.startswith("reference/api.html#tflms_sft.MemoryBudget") for location in titles)
    assert "reference/glossary.html" in (site / "search" / "search_index.js").read_text(encoding="utf-8")


def test_api_page_shows_public_names_and_methods_of_results(site):
    """Methods of callbacks are Keras's, and those of parameters are the planner's, except `LMSParams.tuned`."""
    path = site / "reference" / "api.html"
    shown, text = Page(path).ids, html.unescape(path.read_text(encoding="utf-8"))
    names = {f"tflms_sft.{name}": getattr(tflms_sft, name) for name in tflms_sft.__all__ if name != "__version__"}
    for name in ("gems", "unets"):
        module = importlib.import_module(f"tflms_sft.{name}")
        names.update({f"tflms_sft.{name}.{key}": getattr(module, key) for key in module.__all__})
    assert not names.keys() - shown
    results = [name for name in names if re.search(r"Plan|Verification|Tiling|Architecture", name)]
    members = {name: inspect.getmembers(names[name], inspect.isfunction) for name in results}
    methods = {f"{name}.{key}" for name, found in members.items() for key, _ in found if key[0] != "_"}
    assert len(methods) > 20 and not (methods | {"tflms_sft.LMSParams.tuned"}) - shown
    assert not re.search(r"SwapParams|tflms_sft\._[a-z]", re.sub(r"<[^>]*>", "", text)), "private names"
