"""Tests of the HTML page: completeness, no external resources, escaped names."""

import builtins
import dataclasses
import html.parser
import re

import pytest
from sample_plans import a_pipeline, a_plan

from tflms_sft import Measurement, Timeline
from tflms_sft._report.html_page import MAX_SVG_POINTS


class _Reader(html.parser.HTMLParser):
    """Collects table cells, unclosed tags and external resources."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.open, self.asked, self.scripts = [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.asked += [value for name, value in attrs if name.split(":")[-1] in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def test_html_page_is_complete_and_self_contained(tmp_path):
    pytest.importorskip("matplotlib")
    largest = (("sft/s/backward/while/body/_3/while/Conv<2D>", 40 * 2**20),)
    timeline = Timeline("CPU:0", 2**26, largest, ((0.0, 1), (1.0, 2**26)))
    before, after = Measurement(2**28 - 5, "a test"), Measurement(2**26, "records", (timeline,))
    path = tmp_path / "plan.html"
    text = a_plan().to_html(path, before, after)
    assert path.read_text(encoding="utf-8") == text
    page = _Reader(text)
    assert not page.open and not page.scripts
    assert all(value.startswith("#") for value in page.asked) and "url(http" not in text and "@import" not in text
    peaks, segments, swaps, left_out, largest, measured, alone = page.tables
    assert peaks[1][:4] == ["original", "256 MiB", "256 MiB", "1.00"]
    assert peaks[2] == ["rewritten", "64 MiB", "64 MiB", "1.00", "1.00 MiB", "records"]
    assert segments[1] == [
        "segment1",
        "image -> pool & co",
        "tiles, recompute, 1 saved",
        "4 rows x 4 columns",
        "64 MiB",
        "4.00 MiB",
        "90 -> 120 %",
    ]
    assert [row[0] for row in segments] == ["segment", "segment1", "-", "-", "step"]
    assert swaps[1] == ["a/tensor:0", "8.00 MiB", "1", "control<op>"] and left_out[1] == ["other:0", "too small"]
    assert largest[1:] == [
        ["conv<1>", "32 MiB", "50 %"],
        ["weights and optimizer slots", "1.00 MiB", "2 %"],
        ["everything else", "31 MiB", "48 %"],
    ]
    assert measured[1] == ["Conv<2D> (in the backward loop of s)", "40 MiB", "62 %"]
    assert alone[1] == ["layer 'mean' <b>", "it reduces & waits"]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and text.count("<svg") == 1
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text and "@media print" in text


def test_html_page_peak_over_budget_is_marked():
    over, within = (a_plan(measured=Measurement(peak, "a test")).to_html() for peak in (2**27 + 1, 2**27))
    assert "<b class=bad>128 MiB</b>" in over and "2.00 times the prediction" in over
    assert "class=bad>" not in within and "100 % in use at the peak" in within


def test_html_page_of_pipeline_has_tables():
    pytest.importorskip("matplotlib")
    text = a_pipeline().to_html()
    page = _Reader(text)
    assert not page.open and "<pre>" not in text and text.count("<svg") == 1
    stages, peaks, transfers, segments, alone = page.tables
    assert stages[0][-1] == "tiled" and [row[2] for row in stages[1:]] == ["pool & co", "the loss"]
    assert peaks[1:] == [["/device:GPU:0", "16 MiB"], ["/device:GPU:1", "32 MiB"]]
    assert transfers[1:] == [["pool & co", "0 -> 1", "256 KiB"]], "gradients come back"
    assert segments[1][0] == "segment1" and len(alone) == 2
    assert "<b>20 ms</b>" in text and "<b>25 %</b>" in text and "Identity:0: value after the last one" in text


def test_html_page_without_rewriting_or_measurement():
    plan = a_plan(changed=False, segments=(), swaps=(), not_swapped=(), left_alone=(), notes=(), memory_budget=None)
    text = plan.to_html()
    assert "Nothing rewritten, predicted peak 64 MiB" in text
    assert text.count("not measured") == 3 and "<h2>Not rewritten" not in text and "<h2>Swapped" not in text


def test_html_page_many_points_embed_png():
    pytest.importorskip("matplotlib")
    points = tuple((number * 1e-3, number) for number in range(MAX_SVG_POINTS + 1))
    after = Measurement(2**26, "records", (Timeline("CPU:0", 2**26, (), points),))
    text = a_plan().to_html(after=after)
    assert "<svg" not in text and re.search('src="data:image/png;base64,iVBOR', text)


def test_html_page_without_matplotlib_has_notice(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    text = a_plan().to_html()
    assert "No chart: `plan.plot()` needs matplotlib: pip install &quot;tflms-sft[plot]&quot;" in text
    assert len(_Reader(text).tables) == 6


@pytest.mark.parametrize("argument", ["before", "after"])
def test_to_html_other_objects_are_refused(argument):
    with pytest.raises(TypeError, match=f"`{argument}` must be a `Measurement`, .* Received: {argument}=3 of"):
        a_plan().to_html(**{argument: 3})


def test_html_page_many_swaps_are_truncated():
    (swap,) = a_plan().swaps
    plan = a_plan(swaps=tuple(dataclasses.replace(swap, tensor=f"t{number}:0") for number in range(50)))
    rows = _Reader(plan.to_html()).tables[2]
    assert len(rows) == 42 and rows[-1][:2] == ["10 more", "80 MiB"]
