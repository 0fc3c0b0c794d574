"""What can be asked for. Nothing here needs TensorFlow, so that help and mistakes are answered at once."""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tflms_sft._cli.exit_status import EXIT_CODES
from tflms_sft._util.byte_sizes import parse_bytes
from tflms_sft._version import __version__

__all__: list[str] = []

_WIDTH = 112
"""Columns of the help."""

MODEL_FORMS = """MODEL is one of
  network.keras              a file that `model.save` wrote
  package.module:function    a function that returns a Keras model, compiled or not; modules in the current
                             directory are found, and keyword arguments are given as --arg name=value
  path/to/script.py:function the same in a file, which is imported, not run as a program
"""

_CLUSTER_FORMS = """CLUSTER is one of
  10.0.0.2:2222,10.0.0.3:2222   HOST:PORT of each worker, in the order of their tasks
  cluster.json                  a file with {"worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}, and a "chief" maybe

example:
  tflms-sft worker --cluster cluster.json --task 1

"""

_EXAMPLES = """examples:
  tflms-sft plan network.keras --input-shape 2048,2048,3 --budget 8GiB
  tflms-sft plan keras.applications:ConvNeXtTiny --arg weights=None --input-shape 224,224,3 --batch 32 --budget 4GiB
  tflms-sft max-input nets.py:build --arg classes=5 --budget 8GiB
  tflms-sft max-batch network.keras --input-shape 512,512,3 --budget 8GiB --json
  tflms-sft run --budget 8GiB train.py --epochs 3
  tflms-sft worker --cluster 10.0.0.2:2222,10.0.0.3:2222 --task 0
  tflms-sft doctor
"""


def size(text: str) -> int | str:
    """Bytes, or `"auto"`, which whoever plans resolves."""
    if text == "auto":
        return text
    if text.isdecimal():  # Five gibibytes are meant by more people than five bytes.
        raise argparse.ArgumentTypeError(
            f"a size needs a unit, such as --budget 5GiB or --budget 900MB (bytes: --budget {text}B). "
            f"Received: {text!r}"
        )
    try:
        return parse_bytes(text, "--budget")
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up. Received: {text!r}")
    return int(text)


def task(text: str) -> int:
    """A whole number from 0 up."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 up. Received: {text!r}")
    return int(text)


def part(text: str) -> float:
    """A number from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to below 1. Received: {text!r}")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """`2048,2048,3`, or `2048x2048x3`."""
    parts = text.replace("x", ",").split(",")
    if not all(number.strip().isdecimal() and int(number) >= 1 for number in parts):
        raise argparse.ArgumentTypeError(
            f"expected whole numbers from 1 up with commas between them, such as 2048,2048,3. Received: {text!r}"
        )
    return tuple(map(int, parts))


def input_shape(text: str) -> tuple[str | None, tuple[int, ...]]:
    """Name of an input, if there is one, and the shape of one of its examples."""
    name, equals, shape = text.rpartition("=")
    if equals and not name:
        raise argparse.ArgumentTypeError(f"expected a name before `=`. Received: {text!r}")
    return name or None, sizes(shape)


def target_shape(text: str) -> tuple[int, ...]:
    """A shape, or `scalar` for one number an example."""
    return () if text == "scalar" else sizes(text)


def tiles(text: str) -> Any:
    """`4,4`, `height=4,width=4` or `auto`, as in `SFTParams`."""
    if text == "auto":
        return text
    if "=" not in text:
        return sizes(text)
    pairs = [pair.partition("=") for pair in text.split(",")]
    return {name.strip(): whole(count.strip()) for name, _, count in pairs}


def keyword(text: str) -> tuple[str, Any]:
    """`name=value`; what is no Python literal is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected name=value. Received: {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def make() -> _Parser:
    """The whole command line."""
    parser = _Parser(
        prog="tflms-sft",
        description=_filled(
            "Trains Keras networks whose training step does not fit in memory, with the same results to rounding. The "
            "commands tell beforehand what fits, and train a script as it is within a budget."
        ),
        epilog=f"{_EXAMPLES}\n{EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"tflms-sft {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for add in (_add_plan, _add_max_input, _add_max_batch, _add_run, _add_worker, _add_doctor):
        add(commands)
    parser.commands = commands.choices
    return parser


class _Parser(argparse.ArgumentParser):
    """Keeps line breaks in what follows the options, and abbreviates nothing.

    Attributes:
        commands: The parser of each command.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_formatter, **options)
        self.commands: Mapping[str, argparse.ArgumentParser] = {}
        # What begins like a number is a value, so that it is refused as one: no option does.
        self._negative_number_matcher = re.compile(r"-\.?\d")


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=_WIDTH)


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH)


def _command(commands: Any, name: str, summary: str, more: str = "", notes: str = "") -> argparse.ArgumentParser:
    description = _filled(f"{summary[0].upper()}{summary[1:]}. {more}".strip())
    return commands.add_parser(name, help=summary, description=description, epilog=f"{notes}{EXIT_CODES}")


def _add_plan(commands: Any) -> None:
    parser = _command(
        commands,
        "plan",
        "print how a model would be trained, without training it",
        "The model is built with its weights, its training step is traced for one batch and planned; no step is run "
        "and no batch is made.",
        f"{MODEL_FORMS}\nexample:\n  tflms-sft plan nets.py:build --input-shape 2048,2048,3 --budget 8GiB\n\n",
    )
    _add_model(parser)
    _add_input_shape(parser)
    parser.add_argument("--batch", type=whole, metavar="N", help="examples of a step; default: 1, or the model's own")
    ways = parser.add_mutually_exclusive_group(required=True)
    _add_budget(ways)
    ways.add_argument(
        "--num-tiles", type=tiles, metavar="H,W", help="tiles of a segment instead: 4,4, or height=4,width=4, or auto"
    )
    parser.add_argument("--halo", choices=("recompute", "carry"), help="with --num-tiles: as in `SFTParams`")
    _add_planning(parser)
    parser.add_argument("--plot", metavar="FILE", help="picture of memory over the step (needs matplotlib)")
    parser.add_argument("--html", metavar="FILE", help="page with the plan and its picture")
    _add_common(parser)


def _add_max_input(commands: Any) -> None:
    parser = _command(
        commands,
        "max-input",
        "find the largest square (cubic) image that trains within a budget, plain and rewritten",
        "By prediction: no step is run. A model with fixed sizes is built again for others.",
        f"{MODEL_FORMS}\nexample:\n  tflms-sft max-input nets.py:build --budget 8GiB --batch 1\n\n",
    )
    _add_model(parser)
    _add_input_shape(parser, "only for models that do not tell their channels: any image, such as 64,64,3")
    parser.add_argument("--batch", type=whole, metavar="N", help="examples of a step; default: 1, or the model's own")
    _add_budget(parser, required=True)
    _add_planning(parser)
    parser.add_argument("--multiple-of", type=whole, default=32, metavar="N", help="of sizes; default: %(default)s")
    parser.add_argument("--max-size", type=whole, default=65536, metavar="N", help="default: %(default)s")
    _add_within(parser)
    _add_common(parser)


def _add_max_batch(commands: Any) -> None:
    parser = _command(
        commands,
        "max-batch",
        "find the largest batch that trains within a budget, plain and rewritten",
        "By prediction: no step is run.",
        f"{MODEL_FORMS}\nexample:\n  tflms-sft max-batch network.keras --input-shape 512,512,3 --budget 8GiB\n\n",
    )
    _add_model(parser)
    _add_input_shape(parser)
    _add_budget(parser, required=True)
    _add_planning(parser)
    parser.add_argument("--multiple-of", type=whole, default=1, metavar="N", help="of batches; default: %(default)s")
    parser.add_argument("--max-size", type=whole, default=65536, metavar="N", help="default: %(default)s")
    _add_within(parser)
    _add_common(parser)


def _add_run(commands: Any) -> None:
    parser = _command(
        commands,
        "run",
        "run a training script as it is, every `fit` within a budget",
        "Each `fit` of a Keras model in the script is given the callback `MemoryBudget`, unless it has one of "
        "tflms_sft's already. The exit code is that of the script.",
        "example:\n  tflms-sft run --budget 8GiB train.py --epochs 3\n\n",
    )
    parser.usage = "tflms-sft run --budget SIZE [options] [-m] SCRIPT [arguments of the script]"
    _add_budget(parser)
    _add_planning(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("--report", metavar="FILE", help="file for the plans of all `fit`s, as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing but what the script prints")
    parser.add_argument("script", metavar="SCRIPT", help="what comes after it belongs to it")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False


def _add_worker(commands: Any) -> None:
    parser = _command(
        commands,
        "worker",
        "serve the devices of this machine to a program that trains with stages on several",
        "It serves until it is stopped, one training after another, and prints one line when it begins. The program "
        "connects with `tflms_sft.connect(...)`, to the same addresses. Whoever reaches the port can run anything "
        "here: use a network of your own.",
        _CLUSTER_FORMS,
    )
    add = parser.add_argument
    add("--cluster", required=True, metavar="CLUSTER", help="addresses of all workers, or a file with them, see below")
    add("--task", type=task, required=True, metavar="K", help="which of the workers this is, counted from 0")
    _add_common(parser)


def _add_doctor(commands: Any) -> None:
    parser = _command(
        commands,
        "doctor",
        "tell what this machine and its TensorFlow are like, and try a small step",
        "Each line begins with ok, note, or FAILED; the exit code is 1 if one failed.",
    )
    parser.add_argument("--spill-dir", metavar="DIR", help="directory that would be swapped to")
    _add_common(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a file or module:function, see below")
    add("--arg", type=keyword, action="append", default=[], metavar="NAME=VALUE", help="argument of the function")
    add("--import", dest="imports", action="append", default=[], metavar="MODULE", help="imported first")
    add("--optimizer", metavar="NAME", help='default: the model\'s own, or "adam"')
    add("--loss", metavar="NAME", help="default: the model's own, or one that fits its output")
    add("--target-shape", type=target_shape, metavar="SHAPE", help="of one target: 512,512, or scalar; default: found")
    add("--target-dtype", metavar="TYPE", help="of targets, such as int32; default: what fits the loss")


def _add_input_shape(parser: argparse.ArgumentParser, text: str = "") -> None:
    parser.add_argument(
        "--input-shape",
        type=input_shape,
        action="append",
        default=[],
        metavar="[NAME=]H,W,C",
        help=text or "of one example, without the batch; again for each input; default: that of the model",
    )


def _add_budget(parser: Any, required: bool = False) -> None:
    more = {"required": True} if required else {}
    text = "most memory of a step: a number with a unit, as 8GiB or 900MB, or auto"
    parser.add_argument("--budget", type=size, metavar="SIZE", help=text, **more)


def _add_planning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--headroom", type=part, metavar="PART", help="of the budget that the prediction leaves free; default: 0.1"
    )
    parser.add_argument("--no-swap", action="store_true", help="tiles alone, nothing goes to host memory or disk")


def _add_within(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--within",
        type=part,
        default=0.02,
        metavar="PART",
        help="what is found may be too small by this part of it; default: %(default)s",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked as far as can be without the model."""
    whole = make()
    options, unknown = whole.parse_known_args(arguments)
    parser = whole.commands[options.command]
    if unknown:
        hint = " (--report FILE writes the plans as JSON)" if options.command == "run" and "--json" in unknown else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if options.command == "run" and options.budget is None:
        parser.error("run needs --budget SIZE in front of SCRIPT; what comes after SCRIPT belongs to it")
    if options.command == "plan":
        if options.halo and options.num_tiles is None:
            parser.error("--halo goes with --num-tiles; a budget chooses it")
        if options.num_tiles is not None and (options.headroom is not None or options.no_swap):
            parser.error("--headroom and --no-swap go with --budget, not with --num-tiles")
    if getattr(options, "max_size", None) is not None and options.max_size < options.multiple_of:
        parser.error(f"--max-size must be at least --multiple-of, {options.multiple_of}. Received: {options.max_size}")
    return options
