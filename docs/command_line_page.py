"""Generates the tables of docs/reference/command-line.md from the parser of `tflms-sft`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence

from tflms_sft._cli.exit_status import EXIT_CODES
from tflms_sft._cli.parser import make

USAGE_WIDTH = 80
"""Columns of the usage of a command, so that it fits on the page."""

_DEFAULT = re.compile(r"(?:^|; )default: (.*)$")
_OPTION = re.compile(r"(?<![`\w])--[\w-]+")


def command_line_page() -> str:
    """Return the commands, the forms of their arguments and the exit codes as Markdown."""
    parser = make()
    summaries = {action.dest: action.help or "" for action in _choices(parser)}
    rows = [(f"[`{name}`](#{name})", summaries[name]) for name in parser.commands]
    parts = [parser.description or "", _table(("command", "use"), rows)]
    forms: dict[str, str] = {}
    for name, command in parser.commands.items():
        parts += [f"## {name}", command.description or "", _fence(_usage(command))]
        parts.append(_table(("argument", "meaning", "default"), map(_row, _shown(command))))
        if command.example:
            parts += ["Example:", _fence(command.example)]
        if command.forms:
            forms[command.forms.split()[0]] = command.forms
    for name, text in forms.items():
        parts += [f"## {name}", _fence(text)]
    codes = [(str(code), meaning) for code, meaning in EXIT_CODES.items()]
    parts += ["## Exit codes", _table(("code", "meaning"), codes), "`run` ends with the exit code of the script."]
    return "\n\n".join(parts)


def _choices(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return list(commands._choices_actions)


def _shown(command: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    actions = (action for action in command._actions if action.help not in (None, argparse.SUPPRESS))
    return (action for action in actions if not isinstance(action, argparse._HelpAction))


def _row(action: argparse.Action) -> tuple[str, str, str]:
    """Return an argument with its value, its meaning and its default."""
    names = ", ".join(action.option_strings) or str(action.metavar)
    value = "" if action.nargs == 0 or not action.option_strings else f" {_value(action)}"
    text = (action.help or "") % {"default": action.default, "prog": "tflms-sft"}
    default = _DEFAULT.search(text)
    meaning = _OPTION.sub(r"`\g<0>`", _DEFAULT.sub("", text))
    meaning = meaning.replace("see below", f"see [{action.metavar}](#{str(action.metavar).lower()})")
    return f"`{names}{value}`", meaning, default[1] if default else "required" if action.required else ""


def _usage(command: argparse.ArgumentParser) -> str:
    formatter = argparse.HelpFormatter(command.prog, width=USAGE_WIDTH)
    formatter.add_usage(command.usage, command._actions, command._mutually_exclusive_groups)
    return formatter.format_help()


def _value(action: argparse.Action) -> str:
    return str(action.metavar) if action.choices is None else "{" + ",".join(map(str, action.choices)) + "}"


def _fence(text: str) -> str:
    return f"```\n{text.strip()}\n```"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
