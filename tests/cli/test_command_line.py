"""The command line as a process, and its documentation."""

import argparse
import json
import re
import runpy

import pytest
from command_line import ROOT, process

import tflms_sft
from tflms_sft._cli.parser import make, parse


def test_options_of_all_commands_are_documented():
    """The page is generated from the parser: every argument has a row with its meaning."""
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    page = hooks["with_generated_parts"]((ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8"))
    parts = dict(re.findall(r"^## (\S+)$(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL))
    commands = make().commands
    assert set(commands) == {"plan", "curve", "max-input", "max-batch", "run", "worker", "doctor"}
    for name, command in commands.items():
        rows = dict(re.findall(r"^\| `([^`\s,]+)[^`]*` \| ([^|]+) \|", parts[name], flags=re.MULTILINE))
        arguments = {(*action.option_strings, action.metavar)[0]: action.help for action in command._actions}
        hidden = {"-h", *(argument for argument, text in arguments.items() if text == argparse.SUPPRESS)}
        assert set(rows) == {*arguments} - hidden
        assert all(rows[key].replace("`", "")[:20] in arguments[key].replace("`", "") for key in rows)
        assert f"usage: tflms-sft {name} " in parts[name] and command.description.split(".")[0] in parts[name]
        assert f"tflms-sft {name}" in command.format_help() and "exit codes:" in command.format_help()
    assert "| 130 | stopped with Ctrl-C; max-input" in page and "network.keras  " in parts["MODEL"]
    plan = parts["plan"]
    assert "| fraction of the budget that the prediction leaves free | 0.1 |" in plan and "see [MODEL](#model)" in plan


def test_memory_budget_is_an_alias_of_budget_on_every_command_that_has_it():
    commands = {"plan": ["net.keras"], "max-input": ["net.keras"], "max-batch": ["net.keras"], "run": ["train.py"]}
    for name, command in make().commands.items():
        has_budget = any("--budget" in action.option_strings for action in command._actions)
        assert has_budget == (name in commands)
    for name, arguments in commands.items():
        assert parse([name, "--memory-budget", "2MiB", *arguments]).budget == 2 * 2**20


def test_help_imports_no_tensorflow(directory):
    program = "import sys, tflms_sft._cli.main as m\ntry:\n    m.main(sys.argv[1:])\nfinally:\n    " + (
        "print(sorted({'tensorflow', 'keras', 'numpy'} & set(sys.modules)))"
    )
    for arguments, code in ((["--help"], 0), (["plan", "--help"], 0), (["plan", "zoo:build"], 2)):
        done = process("-c", program, *arguments)
        assert done.returncode == code and done.stdout.endswith("[]\n")
    done = process("-m", "tflms_sft", "--version")
    assert (done.returncode, done.stdout) == (0, f"tflms-sft {tflms_sft.__version__}\n")


@pytest.mark.slow
def test_plan_process_prints_json_alone(directory):
    done = process("-m", "tflms_sft", "plan", "zoo.py:build", "--arg", "size=32", "--budget", "1GiB", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["command"] == "plan"
