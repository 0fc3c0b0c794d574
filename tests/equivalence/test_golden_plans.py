"""Compare plans of known nets, number by number and name by name, with those stored in `golden/`.

After a change of plans that is meant, rewrite the files with `GOLDEN_WRITE=1` and look at their diff.
"""

import difflib
import json
import os

import golden_nets
import keras
import pytest
import tensorflow as tf

from tflms_sft._util.requirements import release_of
from tflms_sft._version import SUPPORTED_RELEASES

WRITE = os.environ.get("GOLDEN_WRITE") == "1"

HAS_OTHER_NAMES = release_of(keras.__version__) != SUPPORTED_RELEASES["keras"][1]
"""Whether Keras is not the version of the stored plans: a few ops of an optimizer lie in another scope then."""

MOST_LINES = 80
"""Lines of a diff that are shown."""

pytestmark = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU"))
    or os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0"
    or os.environ.get("TFLMS_SFT_RATES") != "nominal",
    reason="golden plans are those of a CPU without oneDNN, by nominal rates",
)


@pytest.mark.parametrize("case", golden_nets.CASES, ids=lambda case: case.name)
def test_plan_of_known_net_equals_golden(case):
    """Show a diff if one number or name of the plan differs."""
    value = json.loads(json.dumps(golden_nets.reduced(golden_nets.plan_of(case))))
    if WRITE:
        golden_nets.store(case, value)
    golden = golden_nets.stored(case.path).get(case.label)
    assert golden is not None, f"{case.path} has no {case.label!r}: run with GOLDEN_WRITE=1"
    if HAS_OTHER_NAMES:
        value, golden = without_hashes_of_names(value), without_hashes_of_names(golden)
    if value != golden:
        pytest.fail(diff_of(case, golden, value), pytrace=False)


def test_golden_files_of_all_nets_hold_every_case_and_no_other():
    """Refuse files and labels that no test compares with."""
    cases = sorted((case.path.name, case.label) for case in golden_nets.CASES)
    labels = sorted(
        (path.name, label) for path in golden_nets.FOLDER.glob("*.json") for label in golden_nets.stored(path)
    )
    assert labels == cases


def test_diff_of_changed_plan_names_the_number():
    """Show what was stored, and what is planned now."""
    case = golden_nets.CASES[0]
    golden = golden_nets.stored(case.path)[case.label]
    value = golden | {"batch": golden["batch"] + 1}
    lines = diff_of(case, golden, value).splitlines()
    assert f'- "batch": {golden["batch"]},' in [" ".join(line.split()) for line in lines]
    assert f'+ "batch": {value["batch"]},' in [" ".join(line.split()) for line in lines]


def without_hashes_of_names(value):
    """Return a reduced plan without the hashes of the names of all ops."""
    if isinstance(value, dict):
        return {key: without_hashes_of_names(inner) for key, inner in value.items() if key != "names"}
    return value


def diff_of(case, golden, value):
    """Return a unified diff of two reduced plans, cut short."""
    before, after = (golden_nets.text_of(plan).splitlines() for plan in (golden, value))
    lines = list(difflib.unified_diff(before, after, f"golden {case.name}", "plan now", n=2, lineterm=""))
    rest = len(lines) - MOST_LINES
    return "\n".join(lines[:MOST_LINES] + ([f"... and {rest} more lines"] if rest > 0 else []))
