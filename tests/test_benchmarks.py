"""What the benchmarks compute and refuse themselves; what they measure is not tested."""

import itertools

import pytest

from benchmarks import _arguments, _child, _lms_report, accuracy, lms, max_batch


def outcome(returncode=0, error=None, log=""):
    return _child.Outcome(returncode, None, error, log, [], 0.0)


# Arguments.


def test_sizes():
    assert _arguments.parse_size("1.5GiB") == 3 * 2**29
    assert _arguments.parse_size(" 900 MiB") == 900 * 2**20
    with pytest.raises(ValueError, match=r'expected a size such as "1.5GiB". Received: \'much\''):
        _arguments.parse_size("much")


@pytest.mark.parametrize(
    ("parse", "arguments", "message"),
    [
        (lms.parse_arguments, ["--net", "alexnet"], "--net: invalid choice"),
        (lms.parse_arguments, ["--runs", "0"], "--runs: must be at least 1. Received: 0"),
        (lms.parse_arguments, ["--cells", "all, lb=3"], "--cells names ['all, lb=3']; known are ['plain',"),
        (max_batch.parse_arguments, ["--memory", "2 bananas"], "--memory: expected a size"),
        (max_batch.parse_arguments, ["--memory", "0GiB"], "--memory: must be at least one byte"),
        (max_batch.parse_arguments, ["--search", "guess"], "--search: invalid choice"),
        (accuracy.parse_arguments, ["--cases", "vgg16"], "--cases: invalid choice: 'vgg16'"),
        (accuracy.parse_arguments, ["--within", "2"], "--within: must be from 0 to below 1. Received: 2"),
    ],
)
def test_wrong_arguments_are_refused(parse, arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err


def test_defaults_are_those_of_the_network():
    options = lms.parse_arguments(["--net", "unet3d"])
    assert (options.image_size, options.batch) == (88, 1)
    assert max_batch.parse_arguments([]).memory == 2 * 2**30


# Cells of `lms`.


def names(net="resnet50", wanted=(), grid=False):
    return [cell.name for cell in lms.chosen_cells(net, wanted, grid)]


def test_names_tell_cells_apart():
    for net in lms.VARIATIONS:
        for cells in (lms.usual_cells(net), lms.grid_cells(net)):
            assert len({cell.name for cell in cells}) == len(cells)


def test_a_named_cell_brings_its_plain_one():
    assert names(wanted=["all, lb=5"]) == ["plain", "all, lb=5"]
    alone = "all, lb=1, one inter-op thread"
    assert names(wanted=[alone]) == ["plain, one inter-op thread", alone]


def test_the_grid_has_all_pairs_once():
    found = names(grid=True)
    counts = ("15 tensors", "30 tensors", "60 tensors", "all")
    pairs = {f"{count}, lb={lb}" for count, lb in itertools.product(counts, (1, 5, 20))}
    assert sorted(found) == sorted({"plain", *pairs})


def test_branches_are_cells():
    assert "all, lb=1, branches > 100" in names("unet3d")


# Tables.

PLAIN = lms.Cell(None)
PAST_CACHE = lms.Cell({"page_cache": False})


def figures(seconds, mib, **more):
    return {"step_seconds": seconds, "net_rss_bytes": [mib * 2**20], "losses": [2.0, 1.0], **more}


def results(seconds):
    moved = {"tensors": 3, "swapped_bytes": 100 * 2**20, "read_bytes": 200 * 2**20}
    return {"plain": figures([1.0, 9.0, 2.0], 100), PAST_CACHE.name: figures(seconds, 50, **moved)}


def test_medians_and_ratios():
    row = _lms_report.table("Net", [PLAIN, PAST_CACHE], results([4.0])).splitlines()[-1]
    moved = "3 | 100 MiB | 200 MiB"
    assert row == f"| all, lb=1, no page cache | {moved} | 50 MiB | 0.50 | 4.00 s | 2.00 | 0.0e+00 |"


@pytest.mark.parametrize(("seconds", "verdict"), [(5.5, "; within 5.60 s"), (5.7, "; NOT within 5.60 s")])
def test_bound_of_the_disk(seconds, verdict):
    told = _lms_report.bounds([PLAIN, PAST_CACHE], results([seconds]), write=50 * 2**20, read=200 * 2**20)
    assert verdict in told  # 2 + 1.2 * (100 / 50 + 200 / 200)


def test_a_cell_that_failed_leaves_the_others():
    found = results([4.0])
    found["plain"] = {"failed": "ValueError: why"}
    told = _lms_report.table("Net", [PLAIN, PAST_CACHE], found).splitlines()
    assert told[2] == "| plain | 0 | 0 MiB | 0 MiB | - | - | - | - | - |"
    assert "| 50 MiB | - | 4.00 s | - | - |" in told[3]
    assert told[4] == "plain failed: ValueError: why"
    assert _lms_report.bounds([PLAIN, PAST_CACHE], found, 1.0, 1.0) == ""


def test_runs_go_on_after_a_cell_failed(monkeypatch, capsys):
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


def test_points_follow_the_parameter_that_varies():
    cells = [PLAIN, lms.Cell({"lb": 20}), lms.Cell({})]
    found = {cell.name: figures([1.0], 100, tensors=1) for cell in cells}
    lines = _lms_report.points(cells[1:], found, lambda cell: cell.lb, _lms_report.net_rss)
    assert lines == {"all": [(1, 1.0), (20, 1.0)]}


# The largest batch.


@pytest.mark.parametrize("guess", [1, 2, 7, 30, 500])
def test_the_largest_is_found_by_asking_for_each_number_once(guess):
    for answer in range(60):
        asked = []

        def fits(number, answer=answer, asked=asked):
            asked.append(number)
            return number <= answer

        assert max_batch.largest(fits, guess) == answer
        assert len(asked) == len(set(asked))
        assert min(asked) >= 1


def test_guesses_follow_the_peak():
    assert max_batch.extrapolated(lambda batch: 10 + 3 * batch, 100, 2, 8) == 30
    assert max_batch.extrapolated(lambda batch: 100 + max(0, batch - 10), 150, 2, 8) in range(50, 70)
    assert max_batch.extrapolated(lambda batch: 1000 * batch, 500, 2, 8) == 1
    assert max_batch.extrapolated(lambda batch: 7, 500, 2, 8) > 8  # a flat start is not followed for ever


def test_the_largest_may_be_rough():
    asked = []
    found = max_batch.largest(lambda n: asked.append(n) or n <= 970, 1000, part=0.05)
    assert 0.95 * 970 <= found <= 970
    assert len(asked) <= 4


def test_no_room_is_told_from_mistakes():
    assert max_batch.reason(outcome(), True) is None
    failed = outcome(1, {"type": "ResourceExhaustedError", "message": "OOM when allocating tensor with shape[2,3] and"})
    failed.log = "OOM when allocating tensor with shape[2,3] and type float"
    assert "shape[2,3]" in max_batch.reason(failed, True)
    assert max_batch.reason(outcome(-11), True) == "killed by SIGSEGV"
    for mistake, capped in ((outcome(-11), False), (outcome(1, {"type": "TypeError", "message": "why"}), True)):
        with pytest.raises(_child.ChildError):
            max_batch.reason(mistake, capped)


def test_the_table_compares_with_plain():
    def found(batch, measured):
        trial = {"batch": batch, "fits": True, "taken_bytes": 2**30, "step_seconds": [batch / 10]}
        above = {"batch": batch + 1, "fits": False, "why": "OOM"}
        return {"batch": batch, "peak_bytes": 2**30, "tried": trial, "above": above, "measured": measured}

    rows = max_batch.table("Net", {"plain": found(10, 11), "swapped": found(47, 44)}).splitlines()
    assert rows[2] == "| largest batch, predicted | 10 | 47 | 4.70 |"
    assert rows[4] == "| tried | 10: fits, took 1024 MiB | 47: fits, took 1024 MiB |  |"
    assert rows[5] == "| 10 % more | 11: out of memory | 48: out of memory |  |"
    assert rows[6] == "| largest batch, by trials | 11 | 44 | 4.00 |"
    assert rows[8] == "| the same, per image | 0.10 s | 0.10 s |  |"


# Predictions.


NEAR = [((100, 90, 300), True), ((100, 130, 130), False), ((84, 84, 84), False)]


@pytest.mark.parametrize(("measured", "near"), NEAR)
def test_a_prediction_is_held_against_the_median(measured, near):
    found = [{"predicted": 100 * 2**20, "measured": value * 2**20} for value in measured]
    cells, is_near = accuracy.row(accuracy.Case("vgg16", "plain"), found, 0.15)
    assert is_near is near and cells[0] == "VGG-16, plain" and cells[1] == "100 MiB"
    assert cells[3:5] == [f"{min(measured)} MiB", f"{max(measured)} MiB"]
    assert cells[5].endswith("(too far)") is not near


def test_every_network_is_predicted_plain_and_rewritten():
    for net in accuracy.NETS:
        how = [case.tiles is not None or case.swaps is not None for case in accuracy.CASES if case.net == net]
        assert True in how and False in how
    assert len({case.name for case in accuracy.CASES}) == len(accuracy.CASES) >= 6
