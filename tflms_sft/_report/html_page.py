"""The report of a plan as one self-contained HTML page with tables and the chart, for browsers and printers."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterable, Iterator, Sequence

from tflms_sft._report import summary
from tflms_sft._report.memory_chart import draw, memory_at_peak, percentage
from tflms_sft._report.op_names import short_op_names
from tflms_sft._report.pipeline_plan import PlannedPipeline, sent_forward
from tflms_sft._report.plan_records import Measurement, PlanRecord
from tflms_sft._report.schedule_chart import time_unit
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._version import __version__

MAX_SWAPS = 40
"""Number of swaps after which the table is truncated."""

MAX_AT_PEAK = 10
"""Number of tensors and ops that the tables of a peak name."""

MAX_SVG_POINTS = 4000
"""Number of points of all curves above which the chart is a PNG; an SVG would take megabytes."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2329; --soft: #667080; --line: #dfe3e8; --page: #f6f7f9; --card: #fff;
  --accent: #1d5fd1; --bad: #c62828; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa4b2; --line: #333a45; --page: #14171c;
  --card: #1d2128; --accent: #7fb0ff; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.6rem; margin: 0 0 4px; }
h2 { font-size: 1.1rem; margin: 32px 0 8px; }
p { margin: 4px 0; }
.soft, footer { color: var(--soft); font-size: .9rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin: 20px 0; }
.card, figure, .scroll { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.card { padding: 12px 14px; }
.card b { display: block; font-size: 1.35rem; line-height: 1.3; }
.bad { color: var(--bad); }
figure { margin: 12px 0; padding: 12px; background: #fff; overflow-x: auto; }
figure svg, figure img { display: block; width: 100%; min-width: 640px; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: 7px 12px; border-bottom: 1px solid var(--line); vertical-align: top;
  min-width: 6em; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.name { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .85rem;
  overflow-wrap: anywhere; min-width: 11em; }
tr.sum td { font-weight: 600; }
ul { margin: 6px 0; padding-left: 1.2em; }
li { overflow-wrap: anywhere; }
@media print { body { background: #fff; font-size: 11pt; } main { max-width: none; padding: 0; }
  .scroll, figure { overflow: visible; } figure svg, figure img { min-width: 0; }
  h2 { break-after: avoid; } tr, figure, .card { break-inside: avoid; } }
"""

Cells = Sequence[str]


def page(plan: PlanRecord, before: Measurement | None, after: Measurement | None) -> str:
    """Return the HTML page of a plan, with measurements of the original and of the rewritten step, if there are any."""
    if plan.pipeline is not None:
        return _pipeline_page(plan, plan.pipeline, before, after)
    parts = [
        _cards(plan, before, after),
        "<h2>Memory over a step</h2>",
        _chart(plan, before, after),
        "<h2>Peaks, predicted and measured</h2>",
        _peaks(plan, before, after),
        "<h2>Segments</h2>",
        *_segments(plan),
        *_swaps(plan),
        "<h2>In use at the peak</h2>",
        *_in_use_at_peak(plan, after),
        *_not_rewritten(plan),
        *_section("Notes", plan.notes),
    ]
    return _framed("Memory plan", plan, parts)


def _segments(plan: PlanRecord) -> Iterator[str]:
    """Yield the table of segments and their details."""
    yield _table(summary.HEADINGS, summary.rows(plan), summary.RIGHT, names=(1,), sum_last=bool(plan.changed))
    yield (
        "<p class=soft>Saved for backward: tensors that the forward pass computes and the backward pass reads, in the "
        "original step; after: in the rewritten step. Time: predicted, relative to the original step.</p>"
    )
    yield from (_details(list(summary.segment_lines(segment))) for segment in plan.segments)


def _pipeline_page(
    plan: PlanRecord, pipeline: PlannedPipeline, before: Measurement | None, after: Measurement | None
) -> str:
    """Return the HTML page of a pipeline."""
    headings, rows = pipeline.stage_rows()
    peaks = [(name, format_bytes(size)) for name, size in zip(pipeline.devices, pipeline.peak_bytes, strict=True)]
    unit, unit_seconds = time_unit(pipeline.seconds)
    cards = [
        ("largest predicted peak", format_bytes(max(pipeline.peak_bytes)), "of a device", False),
        ("predicted time", f"{pipeline.seconds / unit_seconds:.3g} {unit}", "of a step, without the update", False),
        ("idle", f"{100 * pipeline.idle:.0f} %", "of the time of all devices", False),
    ]
    parts = [
        _card_grid(cards),
        "<h2>Devices over a step</h2>",
        _chart(plan, before, after),
        "<h2>Stages</h2>",
        _table(headings, rows, (3, 4, 5, 6), names=(2,)),
        "<p class=soft>Weights: with optimizer slots. Saved: for the backward pass, for one micro-batch. Forward, "
        "backward: predicted time of one micro-batch.</p>",
        "<h2>Peaks</h2>",
        _table(("device", "predicted peak"), peaks, (1,)),
        "<h2>Sent forward</h2>",
        _table(("tensor", "stages", "size for one micro-batch"), sent_forward(pipeline), (2,), names=(0,)),
        *_section("Results of the step", [f"{name}: {combination}" for name, combination in pipeline.results]),
        *_inside_stages(plan),
        *_section("Notes", plan.notes),
    ]
    return _framed("Pipeline", plan, parts)


def _inside_stages(plan: PlanRecord) -> Iterator[str]:
    """Yield the tables of tiles and swaps inside the stages of a pipeline; nothing without any."""
    if plan.segments or plan.swaps:
        yield "<h2>Segments inside the stages, for one micro-batch</h2>"
        yield from _segments(plan)
        yield from _swaps(plan)
    yield from _not_rewritten(plan)


def _framed(subject: str, plan: PlanRecord, parts: Sequence[str]) -> str:
    title, headline = f"{subject} for {summary.batch_text(plan)}", summary.headline(plan)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{_text(title)}</h1>\n<p>{_text(headline[:1].upper() + headline[1:])}.</p>\n"
        + "\n".join(parts)
        + f"\n<footer><p>tflms-sft {_text(__version__)}</p></footer>\n</main>\n</body>\n</html>\n"
    )


def _text(value: str) -> str:
    return html.escape(value)


def _cards(plan: PlanRecord, before: Measurement | None, after: Measurement | None) -> str:
    """Return the key figures: peaks, budget, time, swaps."""
    predicted = plan.predicted.peak_bytes
    cards = [("predicted peak", format_bytes(predicted), f"instead of {format_bytes(plan.original.peak_bytes)}", False)]
    if after is not None:
        original = "" if before is None else f"instead of {format_bytes(before.peak_bytes)}, "
        ratio = f"{original}{after.peak_bytes / max(predicted, 1):.2f} times the prediction"
        over = plan.memory_budget is not None and after.peak_bytes > plan.memory_budget
        cards.append(("measured peak", format_bytes(after.peak_bytes), ratio, over))
    else:
        cards.append(("measured peak", "-", "not measured", False))
    if plan.memory_budget is not None:
        peak = predicted if after is None else after.peak_bytes
        used = f"{100 * peak / plan.memory_budget:.0f} % in use at the peak"
        cards.append(("budget", format_bytes(plan.memory_budget), used, peak > plan.memory_budget))
    cards.append(("predicted time", *_time(plan), False))
    if plan.swaps:
        cards.append(("swapped", format_bytes(plan.swapped_bytes), f"to {plan.swap_tier} in every step", False))
    return _card_grid(cards)


def _card_grid(cards: Iterable[tuple[str, str, str, bool]]) -> str:
    """Return key figures as (label, value, comment, whether the value is bad)."""
    shown = (
        f"<div class=card><span class=soft>{_text(label)}</span><b{' class=bad' if bad else ''}>{_text(value)}</b>"
        f"<span class=soft>{_text(comment)}</span></div>"
        for label, value, comment, bad in cards
    )
    return f"<div class=cards>{''.join(shown)}</div>"


def _time(plan: PlanRecord) -> tuple[str, str]:
    """Return the predicted time, and what it is relative to."""
    ratio = f"{plan.predicted.time_ratio:.2f}x"
    return ("same", "as the original step") if ratio == "1.00x" else (ratio, "the time of the original step")


def _chart(plan: PlanRecord, before: Measurement | None, after: Measurement | None) -> str:
    """Return the chart as SVG, or as PNG if it has many points; without matplotlib a line of text."""
    try:
        figure = draw(plan, None, before, after, bars=False)
    except ImportError as error:
        return f"<p class=soft>No chart: {_text(str(error))}</p>"
    timelines = [m.timelines[0].points for m in (before, after) if m is not None and m.timelines]
    points = sum(map(len, [plan.original.timeline, plan.predicted.timeline, *timelines]))
    name = "Bytes alive over one training step, original and rewritten"
    if plan.pipeline is not None:
        name = "Work of each device over one training step"
    if points > MAX_SVG_POINTS:
        pixels = io.BytesIO()
        figure.savefig(pixels, format="png", dpi=150)
        data = base64.b64encode(pixels.getvalue()).decode()
        return f'<figure><img alt="{name}" src="data:image/png;base64,{data}"></figure>'
    lines = io.StringIO()
    figure.savefig(lines, format="svg")
    drawing = lines.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)  # Removes links and the creation time.
    size = re.compile(r'(<svg[^>]*?) (?:height|width)="[^"]*"')
    drawing = size.sub(r"\1", size.sub(r"\1", drawing, count=1), count=1)
    label = f'<svg role="img" aria-label="{name}"'
    return f"<figure>{drawing.replace('<svg', label, 1)}</figure>"


def _peaks(plan: PlanRecord, before: Measurement | None, after: Measurement | None) -> str:
    rows = []
    for name, prediction, measurement in (("original", plan.original, before), ("rewritten", plan.predicted, after)):
        predicted, fixed = format_bytes(prediction.peak_bytes), format_bytes(prediction.fixed_bytes)
        measured, ratio, source = "not measured", "", ""
        if measurement is not None:
            measured, source = format_bytes(measurement.peak_bytes), measurement.source
            ratio = f"{measurement.peak_bytes / max(prediction.peak_bytes, 1):.2f}"
        rows.append((name, predicted, measured, ratio, fixed, source))
    headings = ("step", "predicted", "measured", "measured / predicted", "weights and optimizer slots", "source")
    return _table(headings, rows, (1, 2, 3, 4))


def _swaps(plan: PlanRecord) -> Iterator[str]:
    """Yield the tables of swapped tensors and of tensors that could not be swapped."""
    if plan.swaps:
        largest = sorted(plan.swaps, key=lambda swap: -swap.num_bytes)
        text_of = short_op_names(control for swap in largest[:MAX_SWAPS] for control in swap.controls)
        rows = []
        for swap in largest[:MAX_SWAPS]:
            triggers = ", ".join(dict.fromkeys(text_of[control] for control in swap.controls))
            rows.append((swap.tensor, format_bytes(swap.num_bytes), str(len(swap.controls)), triggers))
        if len(largest) > MAX_SWAPS:
            remaining = sum(swap.num_bytes for swap in largest[MAX_SWAPS:])
            rows.append((f"{len(largest) - MAX_SWAPS} more", format_bytes(remaining), "", ""))
        yield f"<h2>Swapped to {_text(plan.swap_tier)}</h2>"
        yield _table(("tensor", "size", "swap-ins", "swapped in after"), rows, (1, 2), names=(0, 3))
    if plan.not_swapped:
        yield "<h2>Not swapped</h2>"
        yield _table(("tensor", "reason"), plan.not_swapped, names=(0,))


def _in_use_at_peak(plan: PlanRecord, after: Measurement | None) -> Iterator[str]:
    """Yield the tables of the memory in use at the predicted and at the measured peak."""
    fixed, peak = plan.predicted.fixed_bytes, plan.predicted.peak_bytes
    items = memory_at_peak(summary.largest_at_peak(plan.predicted), fixed, peak, MAX_AT_PEAK)
    yield _shares("tensor or running op (predicted)", items, peak)
    if after is not None and after.timelines:
        timeline = after.timelines[0]
        text_of = short_op_names(name for name, _ in timeline.largest)
        named = [(text_of[name], size) for name, size in timeline.largest]
        items = memory_at_peak(named, fixed, timeline.peak_bytes, MAX_AT_PEAK)
        yield "<p class=soft>Measured:</p>"
        yield _shares("allocating op (measured)", items, timeline.peak_bytes)


def _shares(heading: str, items: Iterable[tuple[str, int]], peak_bytes: int) -> str:
    """Return a table of the memory in use at a peak."""
    rows = [(name, format_bytes(size), percentage(size, peak_bytes)) for name, size in items]
    return _table((heading, "size", "of the peak"), rows, (1, 2), names=(0,))


def _not_rewritten(plan: PlanRecord) -> Iterator[str]:
    if plan.left_alone:
        yield "<h2>Not rewritten</h2>"
        yield _table(("layer or op", "reason"), plan.left_alone, names=(0,))


def _section(title: str, items: Sequence[str]) -> Iterator[str]:
    if items:
        yield f"<h2>{_text(title)}</h2>"
        yield _list(items)


def _details(lines: Sequence[str]) -> str:
    """Return the details of a segment: its first line as a paragraph, the others as a list."""
    first, *others = lines
    return f"<p>{_text(first)}</p>{_list(others) if others else ''}"


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(item.strip())}</li>' for item in items)}</ul>"


def _table(
    headings: Cells,
    rows: Iterable[Cells],
    right: Sequence[int] = (),
    names: Sequence[int] = (),
    sum_last: bool = False,
) -> str:
    """Return a table that scrolls on a narrow screen.

    `right` are the indices of right-aligned columns, `names` those of columns of names, which may break anywhere. The
    last row may be a sum.
    """

    def css_class(column: int) -> str:
        return " class=n" if column in right else " class=name" if column in names else ""

    head = "".join(
        f"<th{' class=n' if column in right else ''}>{_text(cell)}</th>" for column, cell in enumerate(headings)
    )
    rows = list(rows)
    body = []
    for number, row in enumerate(rows):
        last = " class=sum" if sum_last and number == len(rows) - 1 else ""
        cells = "".join(f"<td{css_class(column)}>{_text(cell)}</td>" for column, cell in enumerate(row))
        body.append(f"<tr{last}>{cells}</tr>")
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
