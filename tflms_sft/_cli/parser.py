"""Commands and options. Imports no TensorFlow, so that `--help` and wrong arguments are answered at once.

The texts are also the page docs/reference/command-line.md, which docs/command_line_page.py generates from the parser.
"""

from __future__ import annotations

import argparse
import ast
import functools
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rewriters.device.cards import CARDS
from tflms_sft._cli.exit_status import EXIT_CODES
from tflms_sft._util.byte_sizes import parse_bytes
from tflms_sft._version import __version__

__all__: list[str] = []

_WIDTH = 112
"""Columns of the help."""

_MODEL_FORMS = """MODEL is one of
  network.keras              a file that `model.save` wrote
  package.module:function    a function that returns a Keras model, compiled or not, such as
                             keras.applications:ConvNeXtTiny; the current directory is on the import path
  path/to/script.py:function a function in a file; the file is imported, not run as a program
"""

_CLUSTER_FORMS = """CLUSTER is one of
  10.0.0.2:2222,10.0.0.3:2222   HOST:PORT of each worker, in the order of their tasks
  cluster.json                  a file with {"worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}; "chief" is optional
"""

_EXAMPLES = """examples:
  tflms-sft plan network.keras --input-shape 2048,2048,3 --budget 8GiB
  tflms-sft plan keras.applications:ConvNeXtTiny --arg weights=None --input-shape 224,224,3 --batch 32 --budget 4GiB
  tflms-sft plan nets.py:build --input-shape 4096,4096,3 --budget auto --device-model rtx2080ti
  tflms-sft curve nets.py:build --input-shape 2048,2048,3 --plot curve.png
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
    if re.fullmatch(r"\d+|\d+(\.\d+)?e\d{1,2}", text, re.IGNORECASE):  # A bare 5 more often means 5 GiB than 5 bytes.
        raise argparse.ArgumentTypeError(
            f"a size needs a unit, such as --budget 5GiB or --budget 900MB (bytes: --budget {float(text):.0f}B). "
            f"Received: {text!r}"
        )
    try:
        return parse_bytes(text, "--budget")
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def budgets(text: str) -> int | list[int]:
    """Return a number of budgets, or the bytes of several sizes."""
    if text.isdecimal():
        return whole(text)
    chosen = [size(one.strip()) for one in text.split(",")]
    if "auto" in chosen:
        raise argparse.ArgumentTypeError(f"expected sizes with units, such as 4GiB,8GiB. Received: {text!r}")
    return [int(one) for one in chosen]


def card_name(text: str) -> str:
    """Return the name of a card that can be planned for."""
    if text.lower() not in CARDS:
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(CARDS)}. Received: {text!r}. For another card, name the one of the nearest "
            "generation and pass its memory as --budget"
        )
    return text.lower()


def whole(text: str) -> int:
    """Return a positive integer."""
    return _integer(text, 1)


def task(text: str) -> int:
    """Return an integer that is not negative."""
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}. Received: {text!r}")
    return int(text)


def fraction(text: str) -> float:
    """Return a number from 0 to below 1."""
    return _number(text, 0.0, 1.0, "a fraction from 0 to below 1")


def at_least_one(text: str) -> float:
    """Return a number of at least 1."""
    return _number(text, 1.0, math.inf, "a number of at least 1")


def seconds(text: str) -> float:
    """Return a number of seconds above 0."""
    return _number(text, 1e-3, math.inf, "a number of seconds above 0")


def _number(text: str, least: float, end: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < end:
        raise argparse.ArgumentTypeError(f"expected {expected}. Received: {text!r}")
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
            "commands predict what fits before training, and run an unchanged training script within a budget. Results "
            "go to stdout; progress, errors, TensorFlow's messages and the output of the model's own code to stderr."
        ),
        epilog=f"{_EXAMPLES}\n{_exit_codes()}",
    )
    parser.add_argument("--version", action="version", version=f"tflms-sft {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for add in (_add_plan, _add_curve, _add_max_input, _add_max_batch, _add_run, _add_worker, _add_doctor):
        add(commands)
    parser.commands = commands.choices
    return parser


class _Parser(argparse.ArgumentParser):
    """Argument parser that keeps line breaks in its epilog and accepts no abbreviated options.

    Attributes:
        commands: The parser of each command.
        forms: Forms of an argument, as text; empty if a command needs no such text.
        example: A command line.
    """

    def __init__(self, **options: Any) -> None:
        formatter = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=28, width=_WIDTH)
        super().__init__(allow_abbrev=False, formatter_class=formatter, **options)
        self.commands: Mapping[str, _Parser] = {}
        self.forms = self.example = ""
        # No option begins like a number, so such an argument is a value, and its own check refuses it.
        self._negative_number_matcher = re.compile(r"-\.?\d")


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH)


def _exit_codes() -> str:
    lines = (f"  {code:<3}  {meaning}" for code, meaning in EXIT_CODES.items())
    return "\n".join(["exit codes:", *lines])


def _command(commands: Any, name: str, summary: str, *details: str, forms: str = "", example: str = "") -> _Parser:
    first, *others = details
    description = "\n\n".join(map(_filled, (f"{summary[0].upper()}{summary[1:]}. {first}", *others)))
    shown = f"example:\n  {example}\n" if example else ""
    epilog = "\n".join(filter(None, (forms, shown, _exit_codes())))
    parser: _Parser = commands.add_parser(name, help=summary, description=description, epilog=epilog)
    parser.forms, parser.example = forms, example
    return parser


def _add_plan(commands: Any) -> None:
    parser = _command(
        commands,
        "plan",
        "print the plan for training a model, without training it",
        "Builds the model with its weights and traces its training step for shapes alone. It runs no step and creates "
        "no batch, so a machine can plan a step that does not fit in its memory. A `fit` of the same model with the "
        "same batch on the same machine has the same plan.",
        "The output is `Plan.summary()`. The JSON object has `assumed` (model, inputs, targets, optimizer, loss, "
        "device) and `plan`, which is `Plan.to_json()`.",
        forms=_MODEL_FORMS,
        example="tflms-sft plan nets.py:build --input-shape 2048,2048,3 --budget 8GiB",
    )
    _add_model(parser)
    _add_input_shape(parser)
    _add_batch(parser)
    modes = parser.add_mutually_exclusive_group(required=True)
    _add_budget(modes)
    modes.add_argument(
        "--num-tiles", type=tiles, metavar="H,W", help="tiles per segment: 4,4, or height=4,width=4, or auto"
    )
    parser.add_argument(
        "--halo",
        choices=("recompute", "carry"),
        help="with --num-tiles: compute halo rows in every tile, or carry them from strip to strip; default: recompute",
    )
    _add_planning(parser)
    _add_device_model(parser)
    parser.add_argument("--plot", metavar="FILE", help="write a chart of memory over the step (needs matplotlib)")
    parser.add_argument("--html", metavar="FILE", help="write a page with the plan and its chart")
    parser.add_argument(
        "--dump-passes",
        metavar="DIR",
        default="",
        help="write the graph after each pass, what each pass changed, and a script that runs the passes again",
    )
    _add_common(parser)


def _add_curve(commands: Any) -> None:
    parser = _command(
        commands,
        "curve",
        "print the time of a training step against the memory budget, without training",
        "Plans the step within several budgets, from the smallest one that a plan meets to that of the original step. "
        "It shows which budget is worth its memory before you choose one. No step runs. `time` is relative to the "
        "original step.",
        "Each budget is printed on stderr when it has been planned, the smallest first. Ctrl-C, SIGTERM and "
        "--time-limit end the search; the budgets planned until then are printed. The JSON object has `assumed` and "
        "`curve`, which is `BudgetCurve.to_json()`.",
        forms=_MODEL_FORMS,
        example="tflms-sft curve nets.py:build --input-shape 2048,2048,3 --plot curve.png",
    )
    _add_model(parser)
    _add_input_shape(parser)
    _add_batch(parser)
    text = "number of budgets, or sizes with units, such as 2GiB,4GiB,8GiB; default: %(default)s"
    parser.add_argument("--budgets", type=budgets, default=8, metavar="N|SIZE,...", help=text)
    parser.set_defaults(budget="1TiB", max_slowdown=None)
    _add_headroom_and_swaps(parser)
    _add_device_model(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw the curve (needs matplotlib)")
    text = "stop after this time, and print the budgets planned until then; default: no limit"
    parser.add_argument("--time-limit", type=seconds, metavar="SECONDS", help=text)
    _add_common(parser)


def _add_max_input(commands: Any) -> None:
    parser = _command(
        commands,
        "max-input",
        "find the largest square (cubic) image, or the longest sequence, that trains within a budget",
        "The result is a prediction; no step runs. `worst-case peak` is the peak in the worst state in which earlier "
        "steps may leave the allocator; a fresh process may need a fifth less. `time` is relative to the original step "
        "of the same size.",
        "Each size is printed on stderr when it has been tried. Ctrl-C, SIGTERM and --time-limit end the search; the "
        "largest size found until then is printed.",
        "A model with one input of fixed size is rebuilt for other sizes from the configurations of its layers, with "
        "new weights. A weight whose shape would change, as that of a dense layer after `Flatten`, is an error.",
        forms=_MODEL_FORMS,
        example="tflms-sft max-input nets.py:build --budget 8GiB --batch 1",
    )
    _add_model(parser)
    _add_input_shape(parser, "only for models without declared channels: any image, such as 64,64,3")
    _add_batch(parser)
    _add_search(parser, "sizes", 32)


def _add_max_batch(commands: Any) -> None:
    parser = _command(
        commands,
        "max-batch",
        "find the largest batch that trains within a budget, by the original and the rewritten step",
        "The result is a prediction; no step runs. Columns, and the ways to end a search, are those of `max-input`.",
        forms=_MODEL_FORMS,
        example="tflms-sft max-batch network.keras --input-shape 512,512,3 --budget 8GiB",
    )
    _add_model(parser)
    _add_input_shape(parser)
    _add_search(parser, "batch sizes", 1)


def _add_run(commands: Any) -> None:
    parser = _command(
        commands,
        "run",
        "run an unchanged training script, with every `fit` within a budget",
        "Adds the callback `MemoryBudget` to each `fit` of a Keras model in the script, unless it has a callback of "
        "tflms_sft already. `evaluate`, `predict`, `train_on_batch`, hand-written loops and child processes are not "
        "rewritten. If no `fit` ran under the budget, the last line on stderr says so.",
        "The script runs as `__main__` with its own arguments and import path. TensorFlow is imported when the script "
        "imports it, so settings that the script makes first still apply. Errors such as `BudgetError` are raised in "
        "the script, and the exit code is that of the script.",
        example="tflms-sft run --budget 8GiB train.py --epochs 3",
    )
    parser.usage = "tflms-sft run --budget SIZE [options] [-m] SCRIPT [arguments of the script]"
    _add_budget(parser)
    _add_planning(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    text = "write the plans of all `fit` calls as JSON; null for a `fit` that ended before its first step"
    parser.add_argument("--report", metavar="FILE", help=text)
    parser.add_argument("--quiet", action="store_true", help="print only the output of the script")
    parser.set_defaults(json=False, traceback=False)
    parser.add_argument("script", metavar="SCRIPT", help="script to run; arguments after SCRIPT belong to it")
    arguments = parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments.required = False


def _add_worker(commands: Any) -> None:
    parser = _command(
        commands,
        "worker",
        "serve the devices of this machine to a program that trains with stages on several machines",
        "Serves one training after another until it is stopped, and prints one line when it accepts connections. The "
        "program connects to the same addresses with `tflms_sft.connect(...)`. Anybody who can reach the port can run "
        "any code on this machine: use a private network.",
        "The address must be one of this machine, with a free port. The JSON object has `task`, `tasks`, `address` and "
        "`gpus`.",
        forms=_CLUSTER_FORMS,
        example="tflms-sft worker --cluster cluster.json --task 1",
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
        "Each line begins with `ok`, with `note` for a possible problem, such as a spill directory in memory, or with "
        "`FAILED` for a missing requirement. On a machine with NVIDIA GPUs there is a line for each GPU.",
        "Requirements are: supported versions of Python, TensorFlow and Keras; the TensorFlow backend of Keras; "
        "functions that run as graphs; a writable spill directory; and two small steps, tiled and swapped, whose "
        "results equal those of the original step.",
    )
    text = "directory for swapped tensors; default: that of `LMSParams`"
    parser.add_argument("--spill-dir", metavar="DIR", help=text)
    text = "also check that all ops of small steps in tiles have GPU kernels, with or without a GPU, and print them"
    parser.add_argument("--kernels", action="store_true", help=text)
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
        help="keyword argument of the function; a VALUE that is no Python literal is a string",
    )
    text = "module to import first, such as one that registers the custom layers of a file"
    add("--import", dest="imports", action="append", default=[], metavar="MODULE", help=text)
    text = "optimizer; Adam has two slots per weight, SGD with momentum one; default: the model's own, or adam"
    add("--optimizer", metavar="NAME", help=text)
    text = (
        "loss; default: the model's own, or by its output: sparse_categorical_crossentropy after a softmax, "
        "binary_crossentropy after a sigmoid, mean_squared_error otherwise"
    )
    add("--loss", metavar="NAME", help=text)
    text = "shape of one target, such as 512,512, or scalar for one number; default: by outputs and loss"
    add("--target-shape", type=target_shape, metavar="SHAPE", help=text)
    add("--target-dtype", metavar="TYPE", help="dtype of the targets, such as int32; default: by outputs and loss")


def _add_input_shape(parser: argparse.ArgumentParser, text: str = "") -> None:
    text = text or (
        "shape of one example, without the batch; repeat with NAME for each of several inputs; a model with one input "
        "is rebuilt for another size; default: that of the model"
    )
    add = parser.add_argument
    add("--input-shape", type=input_shape, action="append", default=[], metavar="[NAME=]H,W,C", help=text)


def _add_budget(parser: Any, required: bool = False) -> None:
    options = {"required": True} if required else {}
    text = "memory limit of a step: a number with a unit, such as 8GiB, 900MB or 123456789B, or auto"
    parser.add_argument("--budget", "--memory-budget", type=size, metavar="SIZE", help=text, **options)


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=whole, metavar="N", help="examples of a step; default: 1, or the model's own")


def _add_planning(parser: argparse.ArgumentParser) -> None:
    _add_headroom_and_swaps(parser)
    text = "largest predicted time of a step, over that of the original step; default: 10"
    parser.add_argument("--max-slowdown", type=at_least_one, metavar="X", help=text)


def _add_headroom_and_swaps(parser: argparse.ArgumentParser) -> None:
    text = "fraction of the budget that the prediction leaves free; default: 0.1"
    parser.add_argument("--headroom", type=fraction, metavar="FRACTION", help=text)
    parser.add_argument("--no-swap", action="store_true", help="use tiles only; swap no tensors to host memory or disk")


def _add_device_model(parser: argparse.ArgumentParser) -> None:
    text = (
        "plan for a graphics card that need not be in this machine, with the rates of its data sheet: "
        f"{', '.join(CARDS)}. For another card, name the one of the nearest generation and pass its memory as "
        "--budget. Default: the first GPU, otherwise the CPU"
    )
    parser.add_argument("--device-model", type=card_name, metavar="CARD", help=text)


def _add_search(parser: argparse.ArgumentParser, candidates: str, multiple: int) -> None:
    """Add the options of a command that searches over sizes."""
    _add_budget(parser, required=True)
    _add_planning(parser)
    _add_device_model(parser)
    add = parser.add_argument
    text = f"try multiples of N as {candidates}; default: %(default)s"
    add("--multiple-of", type=whole, default=multiple, metavar="N", help=text)
    text = f"limit of {candidates}; the table marks a result that equals it; default: %(default)s"
    add("--max-size", type=whole, default=65536, metavar="N", help=text)
    text = (
        "relative precision: the result may be this fraction below the largest; 0 finds the exact maximum in more "
        "trials; default: %(default)s"
    )
    add("--within", type=fraction, default=0.1, metavar="FRACTION", help=text)
    text = f"stop after this time, and print the largest of the {candidates} found until then; default: no limit"
    add("--time-limit", type=seconds, metavar="SECONDS", help=text)
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    text = "print one JSON object instead of text; after a failure it has `error`, with the smallest feasible budget"
    parser.add_argument("--json", action="store_true", help=text)
    parser.add_argument("--quiet", action="store_true", help="print neither progress nor notices on stderr")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")


def budget_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `AutoParams` and `MemoryBudget` that a command line gives, without the budget itself."""
    given = {"headroom": options.headroom, "max_slowdown": options.max_slowdown}
    return {"swap": not options.no_swap, **{name: value for name, value in given.items() if value is not None}}


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
        if options.num_tiles is not None and (
            options.headroom is not None or options.no_swap or options.max_slowdown is not None
        ):
            parser.error("--headroom, --max-slowdown and --no-swap need --budget; they have no effect with --num-tiles")
    if getattr(options, "max_size", None) is not None and options.max_size < options.multiple_of:
        parser.error(f"--max-size must be at least --multiple-of, {options.multiple_of}. Received: {options.max_size}")
    return options
