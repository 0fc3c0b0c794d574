"""Programs of this folder in processes of their own, where devices can be made before TensorFlow begins."""

import json
import os
import pathlib
import subprocess
import sys


def printed(program, *arguments):
    """Return the output of a child process as names and values, one pair a line."""
    path = pathlib.Path(__file__).parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), *sys.path]), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, str(path / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: value for name, value in map(json.loads, done.stdout.splitlines())}


def say(name, value):
    """A line of such a program."""
    print(json.dumps([name, value]), flush=True)
