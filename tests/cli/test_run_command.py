"""`tflms-sft run`: scripts whose `fit` runs within a budget."""

import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from command_line import process

SCRIPT = """
import sys
import keras, numpy as np
import zoo, tflms_sft

class Told(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        print("trains as", type(self.model).__name__, "rewritten" if "train_step" in vars(self.model) else "plain")

def main(way):
    model = zoo.build(64, compiled=True)
    x, y = np.zeros((2, 64, 64, 3), "float32"), np.zeros((2, 5), "float32")
    last = {
        "none": None, "list": [Told()], "single": Told(), "own": [tflms_sft.SFT((2, 2), verbose=0)],
        "container": keras.callbacks.CallbackList([Told()], add_history=True, model=model),
    }[way]
    if way == "single":
        model.fit(x, y, 1, 1, 0, last)  # By position.
    else:
        model.fit(x, y, batch_size=1, verbose=0, callbacks=last)

if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ("raise", "exit", "text", "stop"):
        if sys.argv[1] == "raise":
            raise ValueError("of the script's own")
        if sys.argv[1] == "stop":
            raise KeyboardInterrupt
        sys.exit(7 if sys.argv[1] == "exit" else "this went wrong")
    for way in sys.argv[1:]:
        main(way)
    print(__name__, *sys.argv, sys.path[0], __file__)
"""


UNBUILT = """
import sys
import keras, numpy as np, tensorflow as tf
import zoo

keras.utils.set_random_seed(3)
x, y = np.random.rand(2, 24, 24, 3), np.random.rand(2, 22, 22, 2)
data = tf.data.Dataset.from_tensor_slices((x.astype("float32"), y)).batch(1)
for given in ({"x": x, "y": y, "batch_size": 1, "shuffle": False}, {"x": data, "shuffle": False}):
    model = zoo.Subclassed()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    print("loss", model.fit(**given, epochs=2, verbose=0).history["loss"])
"""


@pytest.fixture
def script(directory):
    path = directory / "scripts" / "train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    shutil.copy("zoo.py", path.parent)
    return path


def test_run_script_puts_every_fit_under_budget(cli, script):
    ways = ("none", "list", "single", "container", "own")
    before = keras.Model.fit, list(sys.argv), list(sys.path)
    given = os.path.relpath(script)  # As `python` has it in `sys.argv`.
    code, out, err = cli("run", "--budget", "2MiB", "--report", "plans.json", given, *ways)
    assert code == 0, err
    assert (keras.Model.fit, sys.argv, sys.path) == before and "fit" not in vars(keras.Model)
    assert out.endswith(f"__main__ {given} {' '.join(ways)} {script.parent} {script}\n")
    assert out.count("tiles, predicted peak") == 4 and out.count("budget 2.00 MiB") == 4
    assert out.count("trains as Functional") == 3
    report = json.loads(Path("plans.json").read_text())
    assert report["exit_code"] == 0 and len(report["fits"]) == 4
    assert all(plan["changed"] and plan["memory_budget"] == 2 * 2**20 for plan in report["fits"])


def test_run_unbuilt_model_trains_as_plain(cli, capsys, directory):
    def losses(text):
        return [float(number) for line in re.findall("^loss (.*)", text, re.MULTILINE) for number in json.loads(line)]

    (directory / "unbuilt.py").write_text(UNBUILT)
    sys.path.insert(0, str(directory))
    runpy.run_path("unbuilt.py")
    plain = losses(capsys.readouterr().out)
    assert len(plain) == 4 and plain[1] < plain[0]
    code, out, err = cli("run", "--budget", "60KiB", "unbuilt.py")
    assert code == 0, err
    assert out.count("predicted peak") == 2 and "nothing rewritten" not in out
    np.testing.assert_allclose(losses(out), plain, rtol=1e-5)


def test_run_module_sets_main_and_arguments(cli, directory):
    package = directory / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])")
    code, out, err = cli("run", "--budget", "2MiB", "-m", "package.train", "--budget", "x")
    assert (code, out) == (0, "__main__ package ['--budget', 'x']\n")
    assert err == "tflms-sft run: no `fit` of a Keras model ran under the budget\n"


def test_run_script_keeps_evaluated_annotations(cli, directory):
    """`run` must not pass its own `from __future__ import annotations` on to the script."""
    text = "import dataclasses\n@dataclasses.dataclass\nclass C:\n    a: int\nprint(dataclasses.fields(C)[0].type)"
    (directory / "annotated.py").write_text(text)
    assert cli("run", "--budget", "2MiB", "annotated.py")[:2] == (0, "<class 'int'>\n")


EXITS = [("exit", 7, ""), ("text", 1, "this went wrong"), ("stop", 130, "KeyboardInterrupt")]


@pytest.mark.parametrize(("how", "code", "text"), EXITS)
def test_run_returns_exit_code_of_script(cli, script, how, code, text):
    found = cli("run", "--budget", "3MiB", "--quiet", script, how)
    assert found[0] == code and text in found[2]


def test_run_prints_traceback_of_script_alone(cli, script):
    code, _, err = cli("run", "--budget", "3MiB", "--quiet", script, "raise")
    assert code == 1 and "fit" not in vars(keras.Model)
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "ValueError: of the script's own"
    number = SCRIPT.split("\n").index('            raise ValueError("of the script\'s own")') + 1
    assert [line for line in lines if "File" in line] == [f'  File "{script}", line {number}, in <module>']
    script.write_text("def broken(:\n")
    code, _, err = cli("run", "--budget", "3MiB", script)
    assert code == 1 and err.startswith(f'  File "{script}", line 1') and "SyntaxError" in err


def test_run_script_sets_variables_before_tensorflow_import(directory):
    first = """
import importlib.util, os, sys
assert importlib.util.find_spec("keras")  # As libraries do that support several frameworks.
assert not {"tensorflow", "keras"} & set(sys.modules)
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
import keras
assert keras.__spec__.loader is keras.__loader__
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(2)  # Only before the first operation.
"""
    (directory / "train.py").write_text(first + SCRIPT)
    done = process("-m", "tflms_sft", "run", "--budget", "24MiB", "train.py", "list")
    assert done.returncode == 0, done.stderr
    assert "budget 24 MiB" in done.stdout and done.stdout.endswith(
        f"__main__ train.py list {directory} {directory / 'train.py'}\n"
    )
