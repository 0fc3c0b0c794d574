"""Commands and options. Imports no TensorFlow, so that `--help` and wrong arguments are answered at once."""

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
  package.module:function    a function that returns a Keras model, compiled or not; the current directory is on the
                             import path; pass keyword arguments as --arg name=value
  path/to/script.py:function a function in a file; the file is imported, not run as a program
"""

_CLUSTER_FORMS = """CLUSTER is one of
  10.0.0.2:2222,10.0.0.3:2222   HOST:PORT of each worker, in the order of their tasks
  cluster.json                  a file with {"worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}; "chief" is optional

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
    """Return a size in bytes, or `"auto"`, which the planner resolves."""
    if text == "auto":
        return text
    if text.isdecimal():  # A bare 5 more often means 5 GiB than 5 bytes.
        raise argparse.ArgumentTypeError(
            f"a size needs a unit, such as --budget 5GiB or --budget 900MB (bytes: --budget {text}B). "
            f"Received: {text!r}"
        )
    try:
        return parse_bytes(text, "--budget")
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole(text: str) -> int:
    """Return a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1. Received: {text!r}")
    return int(text)


def task(text: str) -> int:
    """Return an integer that is not negative."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0. Received: {text!r}")
    return int(text)


def fraction(text: str) -> float:
    """Return a number from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a fraction from 0 to below 1. Received: {text!r}")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """Return the integers of `2048,2048,3` or `2048x2048x3`."""
    parts = text.replace("x", ",").split(",")
    if not all(number.strip().isdecimal() and int(number) >= 1 for number in parts):
        raise argparse.ArgumentTypeError(
            f"expected integers of at least 1, separated by commas, such as 2048,2048,3. Received: {text!r}"
        )
    return tuple(map(int, parts))


def input_shape(text: str) -> tuple[str | None, tuple[int, ...]]:
    """Return the name of an input, or `None`, and the shape of one example."""
    name, equals, shape = text.rpartition("=")
    if equals and not name:
        raise argparse.ArgumentTypeError(f"expected a name before `=`. Received: {text!r}")
    return name or None, sizes(shape)


def target_shape(text: str) -> tuple[int, ...]:
    """Return a shape; `scalar` stands for one number per example."""
    return () if text == "scalar" else sizes(text)


def tiles(text: str) -> Any:
    """Return `num_tiles` of `SFTParams` from `4,4`, `height=4,width=4` or `auto`."""
    if text == "auto":
        return text
    if "=" not in text:
        return sizes(text)
    pairs = [pair.partition("=") for pair in text.split(",")]
    return {name.strip(): whole(count.strip()) for name, _, count in pairs}


def keyword(text: str) -> tuple[str, Any]:
    """Return name and value of `name=value`; a value that is no Python literal is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected name=value. Received: {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def make() -> _Parser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="tflms-sft",
        description=_filled(
            "Trains Keras networks whose training step does not fit in memory, with equal results up to rounding. The "
            "commands predict what fits before training, and run an unchanged training script within a budget."
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
    """Argument parser that keeps line breaks in its epilog and accepts no abbreviated options.

    Attributes:
        commands: The parser of each command.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_formatter, **options)
        self.commands: Mapping[str, argparse.ArgumentParser] = {}
        # No option begins like a number, so such an argument is a value, and its own check refuses it.
        self._negative_number_matcher = re.compile(r"-\.?\d")


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=_WIDTH)


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH)


def _command(commands: Any, name: str, summary: str, details: str = "", notes: str = "") -> argparse.ArgumentParser:
    description = _filled(f"{summary[0].upper()}{summary[1:]}. {details}".strip())
    return commands.add_parser(name, help=summary, description=description, epilog=f"{notes}{EXIT_CODES}")


def _add_plan(commands: Any) -> None:
    parser = _command(
        commands,
        "plan",
        "print the plan for training a model, without training it",
        "Builds the model with its weights, and traces and plans its training step for one batch. It runs no step and "
        "creates no batch.",
        f"{MODEL_FORMS}\nexample:\n  tflms-sft plan nets.py:build --input-shape 2048,2048,3 --budget 8GiB\n\n",
    )
    _add_model(parser)
    _add_input_shape(parser)
    parser.add_argument("--batch", type=whole, metavar="N", help="examples of a step; default: 1, or the model's own")
    modes = parser.add_mutually_exclusive_group(required=True)
    _add_budget(modes)
    modes.add_argument(
        "--num-tiles", type=tiles, metavar="H,W", help="tiles per segment: 4,4, or height=4,width=4, or auto"
    )
    parser.add_argument("--halo", choices=("recompute", "carry"), help="with --num-tiles: as in `SFTParams`")
    _add_planning(parser)
    parser.add_argument("--plot", metavar="FILE", help="write a chart of memory over the step (needs matplotlib)")
    parser.add_argument("--html", metavar="FILE", help="write a page with the plan and its chart")
    _add_common(parser)


def _add_max_input(commands: Any) -> None:
    parser = _command(
        commands,
        "max-input",
        "find the largest square (cubic) image that trains within a budget, plain and rewritten",
        "The result is a prediction; no step runs. A model with a fixed image size is rebuilt for other sizes.",
        f"{MODEL_FORMS}\nexample:\n  tflms-sft max-input nets.py:build --budget 8GiB --batch 1\n\n",
    )
    _add_model(parser)
    _add_input_shape(parser, "only for models without declared channels: any image, such as 64,64,3")
    parser.add_argument("--batch", type=whole, metavar="N", help="examples of a step; default: 1, or the model's own")
    _add_budget(parser, required=True)
    _add_planning(parser)
    _add_candidates(parser, "sizes", 32)
    _add_common(parser)


def _add_max_batch(commands: Any) -> None:
    parser = _command(
        commands,
        "max-batch",
        "find the largest batch that trains within a budget, plain and rewritten",
        "The result is a prediction; no step runs.",
        f"{MODEL_FORMS}\nexample:\n  tflms-sft max-batch network.keras --input-shape 512,512,3 --budget 8GiB\n\n",
    )
    _add_model(parser)
    _add_input_shape(parser)
    _add_budget(parser, required=True)
    _add_planning(parser)
    _add_candidates(parser, "batch sizes", 1)
    _add_common(parser)


def _add_run(commands: Any) -> None:
    parser = _command(
        commands,
        "run",
        "run an unchanged training script, with every `fit` within a budget",
        "Adds the callback `MemoryBudget` to each `fit` of a Keras model in the script, unless it has a callback of "
        "tflms_sft already. The exit code is that of the script.",
        "example:\n  tflms-sft run --budget 8GiB train.py --epochs 3\n\n",
    )
    parser.usage = "tflms-sft run --budget SIZE [options] [-m] SCRIPT [arguments of the script]"
    _add_budget(parser)
    _add_planning(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("--report", metavar="FILE", help="write the plans of all `fit` calls as JSON")
    parser.add_argument("--quiet", action="store_true", help="print only the output of the script")
    parser.add_argument("script", metavar="SCRIPT", help="script to run; arguments after SCRIPT belong to it")
    arguments = parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments.required = False


def _add_worker(commands: Any) -> None:
    parser = _command(
        commands,
        "worker",
        "serve the devices of this machine to a program that trains with stages on several machines",
        "Serves one training after another until it is stopped, and prints one line when it starts. The program "
        "connects to the same addresses with `tflms_sft.connect(...)`. Anybody who can reach the port can run any code "
        "on this machine: use a private network.",
        _CLUSTER_FORMS,
    )
    add = parser.add_argument
    add(
        "--cluster",
        required=True,
        metavar="CLUSTER",
        help="addresses of all workers, or a file with the addresses; see below",
    )
    add("--task", type=task, required=True, metavar="K", help="position of this worker in CLUSTER, counted from 0")
    _add_common(parser)


def _add_doctor(commands: Any) -> None:
    parser = _command(
        commands,
        "doctor",
        "check this machine and its TensorFlow, and run a small rewritten step",
        "Each line begins with ok, note or FAILED. The exit code is 1 if a check failed.",
    )
    parser.add_argument("--spill-dir", metavar="DIR", help="directory for swapped tensors")
    _add_common(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a file or module:function; see below")
    add(
        "--arg",
        type=keyword,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="keyword argument of the function",
    )
    add("--import", dest="imports", action="append", default=[], metavar="MODULE", help="module to import first")
    add("--optimizer", metavar="NAME", help='default: the model\'s own, or "adam"')
    add("--loss", metavar="NAME", help="default: the model's own, or one that fits its output")
    add("--target-shape", type=target_shape, metavar="SHAPE", help="shape of one target: 512,512, or scalar")
    add("--target-dtype", metavar="TYPE", help="dtype of the targets, such as int32; default: one that fits the loss")


def _add_input_shape(parser: argparse.ArgumentParser, text: str = "") -> None:
    parser.add_argument(
        "--input-shape",
        type=input_shape,
        action="append",
        default=[],
        metavar="[NAME=]H,W,C",
        help=text or "shape of one example, without the batch; repeat for each input; default: that of the model",
    )


def _add_budget(parser: Any, required: bool = False) -> None:
    options = {"required": True} if required else {}
    text = "memory limit of a step: a number with a unit, such as 8GiB or 900MB, or auto"
    parser.add_argument("--budget", type=size, metavar="SIZE", help=text, **options)


def _add_planning(parser: argparse.ArgumentParser) -> None:
    text = "fraction of the budget that the prediction leaves free; default: 0.1"
    parser.add_argument("--headroom", type=fraction, metavar="FRACTION", help=text)
    parser.add_argument("--no-swap", action="store_true", help="use tiles only; swap nothing to host memory or disk")


def _add_candidates(parser: argparse.ArgumentParser, candidates: str, multiple: int) -> None:
    """Add the options of a search over sizes."""
    add = parser.add_argument
    text = f"try multiples of N as {candidates}; default: %(default)s"
    add("--multiple-of", type=whole, default=multiple, metavar="N", help=text)
    add("--max-size", type=whole, default=65536, metavar="N", help=f"limit of {candidates}; default: %(default)s")
    text = "relative precision: the result may be this fraction below the largest; default: %(default)s"
    add("--within", type=fraction, default=0.02, metavar="FRACTION", help=text)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--quiet", action="store_true", help="print no progress on stderr")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, with all checks that need no model."""
    whole = make()
    options, unknown = whole.parse_known_args(arguments)
    parser = whole.commands[options.command]
    if unknown:
        hint = " (--report FILE writes the plans as JSON)" if options.command == "run" and "--json" in unknown else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if options.command == "run" and options.budget is None:
        parser.error("run needs --budget SIZE in front of SCRIPT; arguments after SCRIPT belong to it")
    if options.command == "plan":
        if options.halo and options.num_tiles is None:
            parser.error("--halo needs --num-tiles; with --budget the planner chooses the halo mode")
        if options.num_tiles is not None and (options.headroom is not None or options.no_swap):
            parser.error("--headroom and --no-swap need --budget; they have no effect with --num-tiles")
    if getattr(options, "max_size", None) is not None and options.max_size < options.multiple_of:
        parser.error(f"--max-size must be at least --multiple-of, {options.multiple_of}. Received: {options.max_size}")
    return options
