"""`tflms-sft curve`: the time of a step against its budget."""

import json

ZOO = ("curve", "zoo:build", "--arg", "size=64")


def test_curve_lists_budgets_from_original_step_to_smallest(cli, tmp_path):
    code, out, err = cli(*ZOO, "--budgets", 3, "--no-swap", "--plot", tmp_path / "curve.png")
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("Model 'small'") and (tmp_path / "curve.png").exists()
    assert lines[2].split() == ["budget", "peak", "of", "original", "time", "plan"]
    assert lines[4].endswith("1.00x  original step") and lines[6].endswith("tiles")
    assert err.count("x the time") == 3


def test_curve_json_has_all_points(cli):
    code, out, _ = cli(*ZOO, "--budgets", "1KiB,1GiB", "--json", "--quiet")
    found = json.loads(out)
    assert code == 0 and found["assumed"]["model"] == "small" and found["curve"]["headroom"] == 0.1
    points = found["curve"]["points"]
    assert [(point["budget_bytes"], point["kind"]) for point in points] == [(2**30, "original step"), (1024, "no plan")]


def test_curve_without_any_plan_has_exit_code_1(cli):
    code, out, _ = cli(*ZOO, "--budgets", "1KiB")
    assert code == 1 and out.splitlines()[-1].endswith("no plan")


def test_curve_refuses_budgets_without_unit(cli):
    code, _, err = cli(*ZOO, "--budgets", "5,auto")
    assert code == 2 and "a size needs a unit" in err
    code, _, err = cli(*ZOO, "--budgets", "5GiB,auto")
    assert code == 2 and "expected sizes with units" in err
