"""Compares the plain training step of a large-image classifier with the rewritten one.

Run by `python -m benchmarks.vgg16 --image-size N`; README.md beside this file says what the figures mean.
"""

import argparse
import re
import sys
from collections.abc import Sequence

from benchmarks import _arguments, _child, _compare, _compare_report, _nets

MODELS = ("darknet19", "resnet50", "vgg16", "vgg19")

Pair = tuple[int, int]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; `options.rewritten` are the variants beside the plain one."""
    parser = _arguments.parser("benchmarks.vgg16", __doc__)
    add = parser.add_argument
    add("--image-size", type=_arguments.positive, required=True, metavar="N")
    add("--num-tiles", type=_tiles, metavar="HxW,...", help="tiles of each segment")
    add("--backward-num-tiles", type=_tiles, metavar="HxW,...", help="default: as --num-tiles")
    add("--halo", choices=("recompute", "carry"), help="where tiles have shared rows from; default: recompute")
    add("--segments", metavar="EXIT,...", help="layers whose outputs end the segments")
    budgets = 'have MemoryBudget plan, e.g. "1.2GiB", once for each, without swaps'
    add("--memory-budget", type=_arguments.budget, nargs="+", metavar="BUDGET", help=budgets)
    add("--model", choices=MODELS, default="vgg16")
    add("--batch", type=_arguments.positive, default=1)
    _compare_report.add_options(parser)
    options = parser.parse_args(arguments)
    if options.memory_budget:
        if options.num_tiles or options.backward_num_tiles or options.segments or options.halo:
            parser.error("--memory-budget plans segments and tiles itself")
        options.rewritten = [
            _compare.Variant(f"budget {budget}", budget=budget, swap=False, slug=f"budget{budget}")
            for budget in dict.fromkeys(options.memory_budget)
        ]
        return options
    if options.model not in _nets.DEFAULT_SEGMENTS and not options.segments:
        parser.error(f"--model {options.model} has no default segments. Give a --memory-budget, or --segments")
    exits, tiles = _nets.DEFAULT_SEGMENTS.get(options.model, ((), ()))
    exits = tuple(options.segments.split(",")) if options.segments else exits
    forward = options.num_tiles or tiles
    backward = options.backward_num_tiles or forward
    for flag, grids in (("num", forward), ("backward-num", backward)):
        if len(grids) != len(exits):
            parser.error(f"one --{flag}-tiles per segment. Received: {len(grids)} for {len(exits)}")
    options.rewritten = [_segments(exits, forward, backward, options.halo or "recompute")]
    return options


def _segments(exits: Sequence[str], forward: Sequence[Pair], backward: Sequence[Pair], halo: str) -> _compare.Variant:
    fields, names = [], []
    for entry, exit_, grid, other in zip((_nets.INPUT_NAME, *exits), exits, forward, backward, strict=False):
        counts = {"num_tiles": grid, "backward_num_tiles": other}
        fields.append({"entry": entry, "exit": exit_, "halo": halo, **counts})
        grids = (grid,) if grid == other else (grid, other)
        names.append("-".join([exit_, *(f"{height}x{width}" for height, width in grids)]))
    names += ["carry"] if halo == "carry" else []
    return _compare.Variant("rewritten", segments=tuple(fields), slug="_".join(names))


def _tiles(text: str) -> tuple[Pair, ...]:
    if not re.fullmatch(r"\d+x\d+(,\d+x\d+)*", text):
        raise argparse.ArgumentTypeError(f"expected HxW, as in 4x4,2x2. Received: {text}")
    return tuple((int(h), int(w)) for h, w in (part.split("x") for part in text.split(",")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the figures."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse_arguments(arguments)
    spec = _compare_report.spec_of(options.model, options)
    return _compare_report.measure_and_report("benchmarks.vgg16", arguments, spec, options.rewritten, options)


if __name__ == "__main__":
    _child.leave_with(main)
