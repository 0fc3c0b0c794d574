"""Options, table and results file of the programs that use `_compare`."""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _compare, _nets, _results


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that these programs share."""
    add, positive = parser.add_argument, _arguments.positive
    add("--steps", type=positive, default=3, help="counted steps of each child; default: %(default)s")
    add("--warmup", type=positive, default=1, help="steps before the counted ones; default: %(default)s")
    runs_help = "child processes per variant and kind of measurement; default: %(default)s"
    add("--runs", type=positive, default=3, help=runs_help)
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--skip-plain", action="store_true", help="measure only the rewritten steps")
    add("--json", type=Path, metavar="PATH", help="file for all figures; default: a file in benchmarks/results/")


def spec_of(net: str, options: argparse.Namespace) -> _compare.Spec:
    """Return the spec for a key of `_nets.TASKS` and parsed options."""
    names = [field.name for field in dataclasses.fields(_compare.Spec)]
    return _compare.Spec(net, **{name: getattr(options, name) for name in names if name != "net"})


def compare_budgets(program: str, description: str | None, net: str, arguments: Sequence[str] | None) -> int:
    """Run a program that compares budgets for one network.

    Args:
        program: Name of the module, as in `python -m program`.
        description: Text of its help.
        net: Key of `_nets.TASKS`.
        arguments: Command line; `None` for that of the process.

    Returns:
        The exit code: 1 if a rewritten variant fails.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse_budgets(program, description, net, arguments)
    return measure_and_report(program, arguments, spec_of(net, options), options.rewritten, options)


def parse_budgets(
    program: str, description: str | None, net: str, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the command line of such a program; `options.rewritten` holds the rewritten variants."""
    task = _nets.TASKS[net]
    parser = _arguments.parser(program, description)
    add, positive, budget = parser.add_argument, _arguments.positive, _arguments.budget
    add("--image-size", type=positive, default=task.image_size, metavar="N", help="default: %(default)s")
    add("--batch", type=positive, default=task.batch, help="default: %(default)s")
    kind = 'sizes such as "980MiB", or fractions of the original step\'s predicted peak such as "1/3"'
    add("--tile-budget", type=budget, nargs="+", default=[], metavar="BUDGET", help=f"budgets for tiles alone: {kind}")
    add("--swap-budget", type=budget, nargs="+", default=[], metavar="BUDGET", help="budgets that allow swaps")
    add_options(parser)
    options = parser.parse_args(arguments)
    if not options.tile_budget and not options.swap_budget:
        parser.error("nothing to compare: give a --tile-budget or a --swap-budget")
    pairs = {(f"tiles {text}", text, False): None for text in options.tile_budget}
    pairs |= {(f"swaps {text}", text, True): None for text in options.swap_budget}
    options.rewritten = [_compare.Variant(title, budget=text, swap=swap) for title, text, swap in pairs]
    return options


def measure_and_report(
    program: str,
    arguments: Sequence[str],
    spec: _compare.Spec,
    rewritten: Sequence[_compare.Variant],
    options: argparse.Namespace,
) -> int:
    """Measure, print and write the figures.

    Args:
        program: Name of the module, as in `python -m program`.
        arguments: Its command line.
        spec: Network, data and steps.
        rewritten: The rewritten variants.
        options: Parsed options of `add_options`.

    Returns:
        The exit code: 1 if a rewritten variant fails.
    """
    report: dict[str, Any] = _results.provenance(program, arguments)
    report |= {"spec": dataclasses.asdict(spec), "runs": options.runs}
    for name in ("command", "hardware", "versions"):
        print(f"{name}: {report[name] if name == 'command' else json.dumps(report[name])}", flush=True)
    variants = [*([] if options.skip_plain else [_compare.PLAIN]), *rewritten]
    try:
        variants = _compare.with_bytes(spec, variants, _say)
        results = _compare.run(spec, options.runs, variants, _say)
    except _child.ChildError as error:
        print(f"No rewritten step can be measured: {error}", file=sys.stderr)
        return 1
    ratios = _compare.compare(spec, results)
    report["variants"] = [dataclasses.asdict(variant) for variant in variants]
    report |= {"results": results, "ratios": ratios}
    for title, figures in results.items():
        if figures.get("plan_summary"):
            print(f"\n{title}: {figures['plan_summary']}")
    printed = table(variants, results, ratios)
    print(f"\n{printed}")
    for title, figures in results.items():
        if "failed" in figures:
            print(f"{title} failed: {figures['failed']}")
    _results.write(options.json or _results.RESULTS / f"{file_name(spec, rewritten)}.json", report, {"steps": printed})
    return 1 if any("failed" in results[variant.title] for variant in rewritten) else 0


def _say(line: str) -> None:
    print(line, flush=True)


def file_name(spec: _compare.Spec, rewritten: Sequence[_compare.Variant]) -> str:
    """Return the name of the results file without its suffix."""
    parts = [spec.net, str(spec.image_size), f"b{spec.batch}", *(v.slug or v.title for v in rewritten)]
    if spec.device != "cpu":
        parts.append(spec.device)
    return re.sub(r"[^\w.-]", "_", "_".join(parts))


HEADINGS = [
    *("training", "budget", "predicted peak", "peak, first step", "largest peak, later steps", "of plain"),
    *("growth of RSS", "of plain", "step, median (range)", "of plain", "CPU time, of plain"),
    *("predicted time, of plain", "first step", "losses differ by"),
]


def table(variants: Sequence[_compare.Variant], results: _compare.Results, ratios: _compare.Results) -> str:
    """Return the figures as a Markdown table with a line for each variant."""
    lines = [HEADINGS]
    for variant in variants:
        figures, compared = results[variant.title], ratios.get(variant.title, {})
        if "failed" in figures:
            lines.append([variant.title, "failed", *[""] * (len(HEADINGS) - 2)])
            continue

        def over_plain(name: str, ratios: dict[str, Any] = compared) -> str:
            return f"{1 / ratios[name]:.2f}" if ratios.get(name) else "-"

        is_plain = variant.title == _compare.PLAIN.title
        ratio, median = figures["predicted_time_ratio"], figures["step_seconds_median"]
        lines.append(
            [
                variant.title,
                _mib(variant.budget_bytes) if variant.budget else "-",
                _mib(figures["predicted_peak_bytes"]),
                _mib(figures["first_peak_bytes"]),
                _mib(figures["peak_bytes"]),
                "1.00" if is_plain else over_plain("peak_bytes"),
                _mib(figures["net_rss_bytes"]),
                "1.00" if is_plain else over_plain("net_rss_bytes"),
                f"{median:.2f} s ({figures['step_seconds_min']:.2f} to {figures['step_seconds_max']:.2f})",
                "1.00" if is_plain else over_plain("step_seconds_median"),
                "1.00" if is_plain else over_plain("cpu_seconds_median"),
                "-" if ratio is None else f"{ratio:.2f}",
                f"{figures['cold_seconds']:.0f} s",
                f"{compared['loss_difference']:.0e}" if compared else "-",
            ]
        )
    return _results.markdown(lines)


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**20:,.0f} MiB"
