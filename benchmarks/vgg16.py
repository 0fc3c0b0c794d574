"""Memory and time of plain training and of rewritten training: a classifier of large images.

    python -m benchmarks.vgg16 --image-size 2048 --memory-budget 1200MiB 800MiB
    python -m benchmarks.vgg16 --image-size 4096 --skip-plain --segments pool3,pool5 --num-tiles 8x8,4x4

The exit code is 1 if a rewritten variant fails. `docs/benchmarks/index.md` defines the figures.
"""

import argparse
import re
import sys
from collections.abc import Sequence

from benchmarks import _arguments, _child, _compare, _compare_report, _nets

MODELS = ("darknet19", "resnet50", "vgg16", "vgg19")

Pair = tuple[int, int]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; `options.rewritten` holds the rewritten variants."""
    parser = _arguments.parser("benchmarks.vgg16", __doc__)
    add = parser.add_argument
    add("--image-size", type=_arguments.positive, required=True, metavar="N")
    add("--num-tiles", type=_tiles, metavar="HxW,...", help="numbers of tiles of each segment")
    add("--backward-num-tiles", type=_tiles, metavar="HxW,...", help="default: as --num-tiles")
    add("--halo", choices=("recompute", "carry"), help="how tiles get the rows that they share; default: recompute")
    add("--segments", metavar="EXIT,...", help="layers that end the segments")
    budgets = 'budgets for tiles alone: sizes such as "1.2GiB", or fractions of the original step\'s predicted peak'
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
    """Measure, print and write the figures."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse_arguments(arguments)
    spec = _compare_report.spec_of(options.model, options)
    return _compare_report.measure_and_report("benchmarks.vgg16", arguments, spec, options.rewritten, options)


if __name__ == "__main__":
    _child.leave_with(main)
