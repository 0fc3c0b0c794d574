"""The tutorial notebook runs, prints the output that it stores, and keeps its budget.

`python tests/project/test_notebook.py` runs the notebook and stores its output again.
"""

import json
import math
import os
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "getting-started" / "first_budget.ipynb"

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TFLMS_SFT_PLAN_CACHE": "off",
    "TFLMS_SFT_RATES": "nominal",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
"""Variables that make the output equal on all machines, up to rounding."""

MAX_BYTES = 150_000
MAX_NUMBER_DIFFERENCE = 0.1
"""Relative difference of printed numbers: peaks and times depend on the number of cores."""

VALUES = """
import json
json.dumps({
    "budget": budget,
    "needed": needed,
    "predicted": callback.plan.predicted.peak_bytes,
    "measured": peaks,
    "original loss": original.history["loss"],
    "tiled loss": tiled.history["loss"],
    "segments": len(callback.plan.segments),
    "verified": bool(result),
})
"""

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def run_notebook(notebook, folder):
    """Run all cells in a folder, in a new process."""
    environment = {**os.environ, **ENVIRONMENT}
    environment.pop("MPLBACKEND", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)


def printed(cell):
    """Return the lines that a cell prints, without those that appear only if planning is slow."""
    streams = [output["text"] for output in cell.outputs if output.get("name") == "stdout"]
    lines = re.sub(r"; planned in \d+ s", "", "".join(streams)).splitlines()
    return [line.rstrip() for line in lines if not line.startswith("tflms-sft: planning for")]


def differences(stored, found, *, compares_numbers):
    """Return the pairs of lines whose words, or numbers, differ."""
    if len(stored) != len(found):
        return [("\n".join(stored), "\n".join(found))]
    pairs = []
    for old, new in zip(stored, found, strict=True):
        numbers = [list(map(float, NUMBER.findall(line))) for line in (old, new)]
        is_same = " ".join(NUMBER.sub("#", old).split()) == " ".join(NUMBER.sub("#", new).split())
        if is_same and compares_numbers:
            is_same = all(math.isclose(a, b, rel_tol=MAX_NUMBER_DIFFERENCE) for a, b in zip(*numbers, strict=True))
        pairs += [] if is_same else [(old, new)]
    return pairs


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def stored():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook after a run, with a last cell that shows the values."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in code_cells(notebook):
        cell.outputs = []
    notebook.cells.append(nbformat.v4.new_code_cell(VALUES))
    run_notebook(notebook, tmp_path_factory.mktemp("notebook"))
    return notebook


@pytest.fixture(scope="module")
def values(executed):
    return json.loads(executed.cells[-1].outputs[0]["data"]["text/plain"].strip("'"))


def test_notebook_prints_its_stored_output(stored, executed):
    """Cells with the tag `varies` print roundings or plans, of which only the words are compared."""
    wrong = []
    for old, new in zip(code_cells(stored), code_cells(executed)[:-1], strict=True):
        varies = "varies" in old.metadata.get("tags", [])
        wrong += differences(printed(old), printed(new), compares_numbers=not varies)
    assert wrong == []


def test_notebook_keeps_its_budget(values):
    assert values["segments"] > 0
    assert values["budget"] < 0.25 * values["needed"]
    assert values["predicted"] <= 0.9 * values["budget"]
    original, rewritten = values["measured"]
    assert rewritten <= values["budget"] < original


def test_notebook_trains_with_equal_losses(values):
    assert values["tiled loss"] == pytest.approx(values["original loss"], rel=1e-4)
    assert values["verified"]


def test_stored_notebook_is_small_and_has_no_traces_of_a_machine(stored):
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < MAX_BYTES
    assert str(ROOT) not in text and "/tmp/" not in text
    cells = code_cells(stored)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(not {"execution"} & cell.metadata.keys() for cell in cells)
    assert all(output.get("name") != "stderr" for cell in cells for output in cell.outputs)


def store():
    """Run the notebook, and write it with its output, without what depends on the machine."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        run_notebook(notebook, folder)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        if any(output.output_type == "stream" for output in cell.outputs):
            text = "".join(f"{line}\n" for line in printed(cell))
            others = [output for output in cell.outputs if output.output_type != "stream"]
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text), *others]
    nbformat.validate(notebook)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    store()
