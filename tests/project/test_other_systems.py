"""The project on simulated systems other than Linux: all modules can be imported, tiles run, and refusals are clear."""

import pytest
from children import printed
from import_graph import FILES

SYSTEMS = ("darwin", "win32")
NO_DISK = "it needs `os.pwrite` and `os.pread` (Linux or macOS)"


@pytest.fixture(scope="module", params=SYSTEMS)
def system(request):
    """Name of a system, and the output of a child process on it."""
    return request.param, printed("other_systems.py", request.param)


def test_other_system_imports_all_modules(system):
    _, found = system
    assert found["imported"] == len(FILES)


def test_other_system_tiles_equal_plain(system):
    _, found = system
    plain, tiled = found["tiles"]
    assert tiled == pytest.approx(plain, rel=1e-5) and plain[1] < plain[0]


def test_other_system_doctor_reports_no_failure(system):
    name, found = system
    code, lines = found["doctor"]
    status = {line["name"]: line["status"] for line in lines}
    assert code == 0 and "FAILED" not in status.values()
    assert status["small step, tiles"] == "ok" and status["memory"] == status['budget "auto"'] == "note"
    assert status["small step, swaps"] == ("ok" if name == "darwin" else "note")


def test_other_system_swaps_or_names_what_it_lacks(system):
    name, found = system
    if name == "darwin":
        assert found["swaps"] is None
        kind, text = found["no page cache"]
        assert kind == "SwapError" and "`os.fdatasync` and `os.posix_fadvise` (Linux). Use `page_cache=True`." in text
        return
    for case in ("swaps", "no page cache"):
        kind, text = found[case]
        assert kind == "SwapError" and text.startswith(f"This system cannot swap to disk: {NO_DISK}. Use tiles alone")


def test_other_system_budget_auto_asks_for_number(system):
    _, found = system
    kind, text = found["auto"]
    assert kind == "RewriteError" and text.endswith('`memory_budget="4GiB"`, on the command line `--budget 4GiB`.')


def test_other_system_budget_uses_what_is_there(system):
    name, found = system
    plain, trained, segments, swaps, notes = found["budget"]
    assert trained == pytest.approx(plain, rel=1e-5) and segments + swaps > 0
    if name == "win32":
        assert swaps == 0 and "swap=True" not in found["too small"]
        assert f"nothing is swapped, because this system cannot swap to disk: {NO_DISK}" in notes
