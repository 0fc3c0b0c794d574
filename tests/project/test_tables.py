"""Tables and figures in the documentation are those of the files of results."""

import json

import pytest

from benchmarks import _child, _results, tables

PAGES = sorted(tables.pages())
NAMED = {
    name
    for page in PAGES
    for pattern, group in ((tables.TABLE, 2), (tables.FIGURE, 4))
    for match in pattern.finditer(page.read_text(encoding="utf-8"))
    if (name := match[group]) != "-"
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(_child.ROOT).as_posix())
def test_page_shows_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert tables.updated(text, tables.TABLES) == text, "run `python -m benchmarks.tables`"


def test_pages_show_tables_and_figures_of_results():
    assert {name for _, name, _ in tables.HEADLINES} <= {path.name for path in _results.RESULTS.glob("*.json")}
    assert "vgg16_2048.json" in NAMED


@pytest.mark.parametrize("name", sorted(NAMED | {name for _, name, _ in tables.HEADLINES}))
def test_shown_results_have_their_provenance(name):
    found = tables.results(name)
    assert found["command"].startswith("python -m benchmarks.")
    assert {"cpu", "cores", "memory_bytes"} <= set(found["hardware"])
    assert {"tensorflow", "keras", "commit"} <= set(found["versions"])
    assert not found["versions"]["commit"].endswith("-dirty")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A file of results of its own."""
    found = {"tables": {"steps": "| a |\n|---|\n| 1 |"}, "peaks": [{"a/b": 3 * 2**20}, 2**20], "fraction": 0.125}
    (tmp_path / "found.json").write_text(json.dumps(found))
    monkeypatch.setattr(_results, "RESULTS", tmp_path)
    tables.results.cache_clear()
    yield
    tables.results.cache_clear()


@pytest.mark.parametrize(
    ("path", "shown", "expected"),
    [
        ("peaks / 0 / a/b", "7 MiB", "3 MiB"),
        ("peaks / 0 / a/b", "3 MiB", "3 MiB"),
        ("peaks / 0 / a/b over peaks / 1", "1.0x", "3.0x"),
        ("fraction", "13 %", "12 %"),
        ("peaks / 1", "1,000,000", "1,048,576"),
    ],
)
def test_figure_gets_the_value_of_its_path(results, path, shown, expected):
    comment = f"<!-- found.json: {path} -->"
    assert tables.updated(f"7 and {shown}{comment}, 8", {}) == f"7 and {expected}{comment}, 8"


def test_table_gets_the_lines_of_the_results(results):
    page = "before\n<!-- table: found.json steps -->\nold\n<!-- end -->\nafter"
    expected = "before\n<!-- table: found.json steps -->\n\n| a |\n|---|\n| 1 |\n\n<!-- end -->\nafter"
    assert tables.updated(page, {}) == tables.updated(expected, {}) == expected


def test_path_without_a_value_is_an_error(results):
    with pytest.raises(KeyError, match="none"):
        tables.updated("1<!-- found.json: none -->", {})


def test_check_reports_pages_that_differ(results, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("2.00<!-- found.json: fraction -->")
    monkeypatch.setattr(tables, "pages", lambda: [page])
    monkeypatch.setattr(_child, "ROOT", tmp_path)
    assert tables.main(["--check"]) == 1 and page.read_text().startswith("2.00")
    assert "page.md: differs" in capsys.readouterr().out
    assert tables.main([]) == 0 and page.read_text().startswith("0.12")
    assert tables.main(["--check"]) == 0
