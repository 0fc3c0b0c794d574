"""Computations and refusals of the benchmarks, without their measurements."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import (
    _arguments,
    _child,
    _compare,
    _compare_report,
    _lms_report,
    _lrcnn,
    _nets,
    _profile,
    accuracy,
    lms,
    lrcnn,
    max_batch,
    pareto,
    planner,
    vgg16,
)

parse_resnet50 = functools.partial(_compare_report.parse_budgets, "benchmarks.resnet50", "", "resnet50")


def outcome(returncode=0, error=None, log=""):
    return _child.Outcome(returncode, None, error, log, [], 0.0)


# Arguments.


def test_sizes_have_the_units_of_the_library_or_none():
    assert _arguments.parse_size("1.5GiB") == 3 * 2**29
    assert _arguments.parse_size(" 900 MiB") == 900 * 2**20
    assert _arguments.parse_size("0.65GB") == 650_000_000
    assert _arguments.parse_size("1024") == 1024
    with pytest.raises(
        ValueError, match="`size` must be a positive number followed by one of .* Received: size='much'"
    ):
        _arguments.parse_size("much")


@pytest.mark.parametrize(
    ("parse", "arguments", "message"),
    [
        (lms.parse_arguments, ["--net", "alexnet"], "--net: invalid choice"),
        (lms.parse_arguments, ["--runs", "0"], "--runs: must be at least 1. Received: 0"),
        (lms.parse_arguments, ["--cells", "all, lb=3"], "--cells names ['all, lb=3']; known are ['plain',"),
        (
            max_batch.parse_arguments,
            ["--memory", "2 bananas"],
            "--memory: `size` must be a positive number followed by",
        ),
        (max_batch.parse_arguments, ["--memory", "0GiB"], "--memory: `size` must be at least one byte"),
        (max_batch.parse_arguments, ["--search", "guess"], "--search: invalid choice"),
        (accuracy.parse_arguments, ["--cases", "vgg16"], "--cases: invalid choice: 'vgg16'"),
        (accuracy.parse_arguments, ["--within", "2"], "--within: must be from 0 to below 1. Received: 2"),
        (vgg16.parse_arguments, [], "required: --image-size"),
        (pareto.parse_arguments, ["--networks", "vgg"], "--networks: invalid choice: 'vgg'"),
        (vgg16.parse_arguments, ["--image-size", "64", "--num-tiles", "4"], "expected HxW, as in 4x4,2x2. Received: 4"),
        (
            vgg16.parse_arguments,
            ["--image-size", "64", "--segments", "pool5"],
            "one --num-tiles per segment. Received: 2 for 1",
        ),
        (
            vgg16.parse_arguments,
            ["--image-size", "64", "--memory-budget", "1GiB", "--segments", "pool5"],
            "--memory-budget plans segments and tiles itself",
        ),
        (vgg16.parse_arguments, ["--image-size", "64", "--model", "resnet50"], "resnet50 has no default segments"),
        (parse_resnet50, [], "nothing to compare: give a --tile-budget or a --swap-budget"),
        (parse_resnet50, ["--tile-budget", "4/3"], "--tile-budget: must be more than 0 and less than 1"),
        (parse_resnet50, ["--tile-budget", "0/3"], "must be more than 0 and less than 1. Received: '0/3'"),
        (parse_resnet50, ["--swap-budget", "1/0"], "--swap-budget: expected a part such as \"1/3\". Received: '1/0'"),
        (parse_resnet50, ["--swap-budget", "much"], "--swap-budget: `size` must be a positive number"),
    ],
)
def test_wrong_arguments_are_refused(parse, arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err


# What `_compare` measures, from the command line of its programs.


def test_budgets_are_one_variant_each():
    options = parse_resnet50(["--tile-budget", "1/3", "980MiB", "1/3", "--swap-budget", "1/5"])
    assert [(v.title, v.budget, v.swap) for v in options.rewritten] == [
        ("tiles 1/3", "1/3", False),
        ("tiles 980MiB", "980MiB", False),
        ("swaps 1/5", "1/5", True),
    ]
    spec = _compare_report.spec_of("resnet50", options)
    assert (spec.image_size, spec.batch, spec.steps) == (512, 2, 3)
    assert _compare_report.file_name(spec, options.rewritten) == "resnet50_512_b2_tiles_1_3_tiles_980MiB_swaps_1_5"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--num-tiles", "4x4,2x2"], "vgg16_2048_b1_pool3-4x4_pool5-2x2"),
        (
            ["--num-tiles", "4x4,2x2", "--backward-num-tiles", "8x8,2x2", "--device", "gpu"],
            "vgg16_2048_b1_pool3-4x4-8x8_pool5-2x2_gpu",
        ),
        (["--model", "resnet50", "--memory-budget", "980MiB", "--batch", "2"], "resnet50_2048_b2_budget980MiB"),
        (["--memory-budget", "1/3"], "vgg16_2048_b1_budget1_3"),
    ],
)
def test_result_files_are_named_by_network_size_and_plan(arguments, name):
    options = vgg16.parse_arguments(["--image-size", "2048", *arguments])
    spec = _compare_report.spec_of(options.model, options)
    assert _compare_report.file_name(spec, options.rewritten) == name


def test_pareto_table_has_times_by_budget_and_finds_those_that_rise():
    ratios = [1.0] * len(pareto.FRACTIONS) + [7.0]
    points = [
        {"budget_bytes": 100 - number, "time_ratio": ratio, "fraction": 0.07, "planning_seconds": float(number)}
        for number, ratio in enumerate(ratios)
    ]
    row = {"network": "unet", "swap": False, "points": points}
    text = pareto.table([row])
    assert "| unet | tiles | 1.00" in text and "| 0.07: 7.0 | 6 (11)" in text and not pareto.rises(row)
    assert "| -    | -" in pareto.table([{**row, "points": points[2:]}]).replace("     |", "    |")
    points[3]["time_ratio"] = 1.5
    assert pareto.rises(row) == ["unet: 1.000 within 96 bytes, 1.500 within 97"]


def test_dice_loss_and_cross_entropy_are_per_volume():
    _, labels = _nets.TASKS["unet3d-dice"].noise(8, 2)
    loss = _nets.TASKS["unet3d-dice"].loss()
    assert np.abs(loss(labels, 100 * labels)).max() < 1e-6
    voxels, classes = 8**3, _nets.CLASSES
    counts = labels.sum((1, 2, 3))
    dice = 1 - np.mean((2 * counts / classes + 1) / (counts + voxels / classes + 1), axis=-1)
    np.testing.assert_allclose(loss(labels, np.zeros_like(labels)), dice + np.log(classes), rtol=1e-5)


# How `_compare` runs children and joins what they found.

SPEC = _compare.Spec("resnet50", 64, 2, warmup=1, steps=2, device="cpu")
THIRD = _compare.Variant("tiles 1/3", budget="1/3", swap=False)
FIXED = _compare.Variant("swaps 1GiB", budget="1GiB")


def step_figures(seconds, mib, loss=2.0):
    times = {"step_seconds": [seconds, seconds + 2], "step_cpu_seconds": [seconds], "cold_seconds": 10 * seconds}
    return times | {"peak_bytes": mib * 2**20, "losses": [loss, 1.0], "fixed_bytes": 2**20}


def rss_figures(mib):
    return {"net_rss_bytes": mib * 2**20, "net_rss_bytes_cold": 2 * mib * 2**20}


def test_fractions_of_the_plain_peak_are_planned_once(monkeypatch):
    asked = []
    monkeypatch.setattr(_child, "call_in_child", lambda target, kwargs, env: asked.append(target) or 3 * 2**30)
    found = _compare.with_bytes(SPEC, [_compare.PLAIN, THIRD, FIXED], print)
    assert [variant.budget_bytes for variant in found] == [0, 2**30, 2**30]
    assert asked == ["benchmarks._compare:plain_peak"]
    _compare.with_bytes(SPEC, [_compare.PLAIN, FIXED], print)
    assert len(asked) == 1


def with_children(monkeypatch, found):
    """Has children find what `found` says by title, an error's type or (time figures, memory figures)."""
    ran = []

    def measured(what, spec, variant):
        ran.append((what, variant.title))
        if isinstance(found[variant.title], str):
            return outcome(1, {"type": found[variant.title], "message": "why"}, log="the log")
        done = outcome()
        done.result = found[variant.title][what == "memory"]
        return done

    monkeypatch.setattr(_compare, "_measured", measured)
    return ran


def test_variants_alternate_and_continue_after_a_failure(monkeypatch):
    plain = step_figures(1.0, 100), rss_figures(90)
    ran = with_children(monkeypatch, {"plain": plain, "tiles 1/3": "BudgetError", "swaps 1GiB": plain})
    found = _compare.run(SPEC, 2, [_compare.PLAIN, THIRD, FIXED], lambda line: None)
    assert ran[:5] == [("time", title) for title in ("plain", "tiles 1/3", "swaps 1GiB", "plain", "swaps 1GiB")]
    assert found["tiles 1/3"] == {"failed": "BudgetError: why"}
    assert found["plain"]["step_seconds"] == [1.0, 3.0] * 2 and found["plain"]["net_rss_bytes"] == 90 * 2**20


def test_runs_end_once_all_rewritten_variants_failed(monkeypatch):
    ran = with_children(monkeypatch, {"plain": (step_figures(1.0, 100),), "tiles 1/3": "TypeError"})
    with pytest.raises(_child.ChildError, match="TypeError: why\nthe log"):
        _compare.run(SPEC, 3, [_compare.PLAIN, THIRD], lambda line: None)
    assert len(ran) == 2


def three_variants(monkeypatch):
    planned = {"predicted_time_ratio": 1.25, "predicted_peak_bytes": 2**28}
    planned["plan"] = {"original": {"peak_bytes": 3 * 2**28}}
    found = {
        "plain": (step_figures(1.0, 1024), rss_figures(900)),
        "tiles 1/3": (step_figures(2.0, 256, loss=2.2) | planned, rss_figures(300)),
        "swaps 1GiB": (step_figures(4.0, 128), rss_figures(100)),
    }
    with_children(monkeypatch, found)
    variants = [_compare.PLAIN, dataclasses.replace(THIRD, budget_bytes=2**29), FIXED]
    results = _compare.run(SPEC, 1, variants, lambda line: None)
    return variants, results


def table_rows(variants, results, ratios):
    lines = _compare_report.table(variants, results, ratios).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return cells[0], {line[0]: line[1:] for line in cells[2:]}


def test_table_compares_each_variant_with_plain(monkeypatch):
    variants, results = three_variants(monkeypatch)
    headings, rows = table_rows(variants, results, _compare.compare(SPEC, results))
    assert headings == _compare_report.HEADINGS
    columns = {name: [row[headings.index(name) - 1] for row in rows.values()] for name in set(headings) - {"training"}}
    assert columns["budget"] == ["-", "512 MiB", "0 MiB"]
    assert columns["predicted peak"] == ["768 MiB", "256 MiB", "-"]
    assert columns["largest peak, later steps"] == ["1,024 MiB", "256 MiB", "128 MiB"]
    assert columns["growth of RSS"] == ["900 MiB", "300 MiB", "100 MiB"]
    assert columns["step, median (range)"] == [f"{n + 1:.2f} s ({n:.2f} to {n + 2:.2f})" for n in (1, 2, 4)]
    assert [row[4] for row in rows.values()] == ["1.00", "0.25", "0.12"]
    assert [row[6] for row in rows.values()] == ["1.00", "0.33", "0.11"]
    assert [row[8] for row in rows.values()] == ["1.00", "1.50", "2.50"]
    assert columns["predicted time, of plain"] == ["-", "1.25", "-"]
    assert columns["losses differ by"] == ["-", "1e-01", "0e+00"]


def test_table_without_plain_has_no_ratios(monkeypatch):
    variants, results = three_variants(monkeypatch)
    results["plain"] = {"failed": "killed by SIGKILL"}
    assert _compare.compare(SPEC, results) == {}
    _, rows = table_rows(variants, results, {})
    assert rows["plain"][0] == "failed" and not any(rows["plain"][1:])
    assert [row[4] for row in rows.values()] == ["", "-", "-"]


def test_report_is_written_and_lists_failures(monkeypatch, tmp_path, capsys):
    found = {"plain": (step_figures(1.0, 8), rss_figures(4)), "swaps 1GiB": (step_figures(2.0, 4), rss_figures(2))}
    with_children(monkeypatch, found | {"tiles 1MiB": "BudgetError"})
    arguments = ["--tile-budget", "1MiB", "--swap-budget", "1GiB", "--runs", "1", "--json", str(tmp_path / "r.json")]
    assert _compare_report.compare_budgets("benchmarks.resnet50", "", "resnet50", arguments) == 1
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["command"].startswith("python -m benchmarks.resnet50 --tile-budget 1MiB")
    assert report["ratios"]["swaps 1GiB"]["net_rss_bytes"] == 2.0
    assert [variant["budget_bytes"] for variant in report["variants"]] == [0, 2**20, 2**30]
    assert "tiles 1MiB failed: BudgetError: why" in capsys.readouterr().out


# Cells of `lms`.


def names(wanted):
    return [cell.name for cell in lms.chosen_cells("resnet50", wanted, False)]


def test_named_cell_adds_its_plain_cell():
    assert names(["all, lb=5"]) == ["plain", "all, lb=5"]
    alone = "all, lb=1, one inter-op thread"
    assert names([alone]) == ["plain, one inter-op thread", alone]


# Tables.

PLAIN = lms.Cell(None)
PAST_CACHE = lms.Cell({"page_cache": False})


def figures(seconds, mib, **more):
    return {"step_seconds": seconds, "net_rss_bytes": [mib * 2**20], "losses": [2.0, 1.0], **more}


def results(seconds):
    moved = {"tensors": 3, "swapped_bytes": 100 * 2**20, "read_bytes": 200 * 2**20}
    return {"plain": figures([1.0, 9.0, 2.0], 100), PAST_CACHE.name: figures(seconds, 50, **moved)}


@pytest.mark.parametrize(("seconds", "verdict"), [(5.5, "; within 5.60 s"), (5.7, "; NOT within 5.60 s")])
def test_disk_bound_is_judged(seconds, verdict):
    told = _lms_report.bounds([PLAIN, PAST_CACHE], results([seconds]), write=50 * 2**20, read=200 * 2**20)
    assert verdict in told  # 2 + 1.2 * (100 / 50 + 200 / 200)


def test_failed_cell_leaves_the_others():
    found = results([4.0])
    found["plain"] = {"failed": "ValueError: why"}
    told = _lms_report.table("Net", [PLAIN, PAST_CACHE], found).splitlines()
    assert told[2] == "| plain | 0 | 0 MiB | 0 MiB | - | - | - | - | - |"
    assert "| 50 MiB | - | 4.00 s | - | - |" in told[3]
    assert told[4] == "plain failed: ValueError: why"
    assert _lms_report.bounds([PLAIN, PAST_CACHE], found, 1.0, 1.0) == ""


def test_runs_continue_after_a_failed_cell(monkeypatch, capsys):
    def measured(cell, what, options):
        if cell.params is None:
            return outcome(1, {"type": "ValueError", "message": "why"}, log="the log")
        done = outcome()
        done.result = {"step_seconds": [1.0]} if what == "time" else {"net_rss_bytes": [7]}
        return done

    monkeypatch.setattr(lms, "_measured", measured)
    options = lms.parse_arguments(["--cells", PAST_CACHE.name, "--runs", "2"])
    found = lms.run(options.chosen, options)
    assert found["plain"] == {"failed": "ValueError: why"}
    assert found[PAST_CACHE.name] == {"step_seconds": [1.0, 1.0], "net_rss_bytes": [7, 7]}
    assert "the log" in capsys.readouterr().err


# The largest batch.


def test_out_of_memory_is_distinguished_from_errors():
    assert max_batch.reason(outcome(), True) is None
    failed = outcome(1, {"type": "ResourceExhaustedError", "message": "OOM when allocating tensor with shape[2,3] and"})
    failed.log = "OOM when allocating tensor with shape[2,3] and type float"
    assert "shape[2,3]" in max_batch.reason(failed, True)
    assert max_batch.reason(outcome(-11), True) == "killed by SIGSEGV"
    for mistake, capped in ((outcome(-11), False), (outcome(1, {"type": "TypeError", "message": "why"}), True)):
        with pytest.raises(_child.ChildError):
            max_batch.reason(mistake, capped)


# Rows.


def test_compared_methods_are_listed():
    (checkpoint,) = _lrcnn.options("checkpoint", "vgg16", 224)
    ends = [end for _, end, _ in checkpoint["segments"]]
    assert len(ends) == 4 and ends[-1] == "pool5"
    assert [entry for entry, _, _ in checkpoint["segments"]] == ["image", *ends[:-1]]
    basic = [option["segments"] for option in _lrcnn.options("2PS", "resnet50", 224)]
    assert [["input_layer", "conv5_block3_out", 6]] in basic and [["input_layer", "pool1_pool", 48]] in basic
    assert not any(end == "conv5_block3_out" and rows > 7 for ((_, end, rows),) in basic), "no more than it has"
    hybrid = _lrcnn.options("OverL-H", "vgg16", 64)
    assert hybrid[-1] == {
        "halo": "recompute",
        "segments": [[*pair, n] for pair, n in zip(PAIRS, (32, 16, 8, 4, 2), strict=True)],
    }
    assert len(hybrid) == len({json.dumps(option) for option in hybrid})
    assert _lrcnn.options("MemoryBudget", "vgg16", 64, 2**30) == [{"budget": 2**30}]
    assert _lrcnn.tiles("vgg16", 64, 1) is None and _lrcnn.tiles("vgg16", 64, 7) is None, "rows"
    tiles = _lrcnn.tiles("vgg16", 64, 8)
    assert [grid for _, _, grid in tiles["segments"]] == [[4, 2], [4, 2], [4, 2], [4, 2], [2, 2]]
    assert [spec.num_tiles for spec in _lrcnn.params_of(tiles).segments] == [(4, 2), (4, 2), (4, 2), (4, 2), (2, 2)]


def test_step_time_is_split_by_activity():
    weights, image = tf.ones((3, 3, 8, 8)), tf.ones((1, 64, 64, 8))
    step = tf.function(lambda x: tf.nn.max_pool2d(tf.nn.conv2d(x, weights, 1, "SAME"), 2, 2, "SAME"))
    step(image)
    found = _profile.seconds_by_group(lambda: step(image), 3)
    assert set(found) >= {"convolutions", "pools and their gradients", _profile.WAITING}
    assert found["convolutions"] > found["pools and their gradients"] > 0
    assert "gradients of convolutions" not in found
    with pytest.raises(RuntimeError, match="names no operation"):
        _profile.seconds_by_group(lambda: None, 1)
    for where, group in (("forward2", "convolutions"), ("backward2", "convolutions computed again")):
        assert _profile.group_of(f"sft/segment1/{where}/while/body/_1/while/conv", "_FusedConv2D") == group
    assert _profile.group_of("loss/mean", "Mean") == "others"


def test_processes_option_needs_a_repeated_experiment(capsys):
    with pytest.raises(SystemExit):
        lrcnn.parse_arguments(["scale", "--runs", "3"])
    assert "--runs is for `rows` and `where`" in capsys.readouterr().err
    assert lrcnn.parse_arguments(["rows"]).runs == 1


def test_options_that_cannot_fit_are_skipped():
    options = [{"rows": n} for n in range(5)]
    tried = _lrcnn.Tried()
    assert tried.worth_trying(options, 100, 50) == [options[i] for i in (2, 1, 3, 0, 4)]
    for option, peak in zip(options[:3], (60, 90, 120), strict=True):
        tried.add(option, 100, peak)
    assert tried.worth_trying(options, 50, 50) == [options[i] for i in (0, 1, 3, 4)], "120 is 60 at the least"
    assert tried.worth_trying(options, 200, 60) == [options[i] for i in (0, 3, 4)], "no less than it was"


PAIRS = [("image", "pool1"), ("pool1", "pool2"), ("pool2", "pool3"), ("pool3", "pool4"), ("pool4", "pool5")]


# Predictions.


NEAR = [((100, 90, 300), True), ((100, 130, 130), False), ((84, 84, 84), False)]


@pytest.mark.parametrize(("measured", "near"), NEAR)
def test_prediction_is_compared_with_the_median(measured, near):
    found = [{"predicted": 100 * 2**20, "measured": value * 2**20} for value in measured]
    cells, is_near = accuracy.row(accuracy.Case("vgg16", "plain"), found, 0.15)
    assert is_near is near and cells[0] == "VGG-16, plain" and cells[1] == "100 MiB"
    assert cells[3:5] == [f"{min(measured)} MiB", f"{max(measured)} MiB"]
    assert cells[5].endswith("(too far)") is not near


# Planner ------------------------------------------------------------------------------------------------------


def run_of(peak, seconds=1.0, predicted=100 * 2**20, ratio=1.2):
    return {
        "peaks": [peak * 2**20],
        "seconds": [(1.0, seconds)],
        "predicted_bytes": predicted,
        "predicted_ratio": ratio,
        "planned_seconds": 2.0,
    }


@pytest.mark.parametrize(
    ("peaks", "seconds", "verdict"),
    [
        ((95, 105, 109), 1.2, (True, True, True)),
        ((95, 105, 111), 1.2, (False, True, True)),
        ((88, 89, 95), 1.2, (True, False, True)),
        ((95, 105, 109), 1.5, (True, True, False)),
        ((95, 105, 109), 1.0, (True, True, False)),
    ],
)
def test_plan_is_judged_by_peak_and_time(peaks, seconds, verdict):
    found = [run_of(peak, seconds) for peak in peaks]
    cells, kept = planner.row("net", 110 * 2**20, found)
    assert dataclasses.astuple(kept) == verdict
    assert cells[:3] == ["net", "110 MiB", "100 MiB"] and len(cells) == len(planner.HEADINGS)
    assert ("OVER" in cells[4], "far" in cells[3], "far" in cells[6]) == tuple(not good for good in verdict)


def test_verdict_needs_enough_kept_promises():
    good, far = planner.Verdict(True, True, True), planner.Verdict(True, False, False)
    assert planner.totals([good] * 22 + [far] * 2)[1]
    assert not planner.totals([good] * 21 + [far] * 3)[1]
    text, enough = planner.totals([good] * 23 + [planner.Verdict(False, True, True)])
    assert not enough and text.startswith("24 plans: largest peak within the budget in 23,")
