"""Models of TensorFlow's allocator: by hand, by invariants for random sequences, and against TensorFlow's own numbers.

`bfc_recorded.json` holds the numbers of TensorFlow's C++ class `GPUBFCAllocator` (wheel 2.21.0, default options of a
GPU), which a program outside of this repository ran on addresses that it never touched. Its sequences are random ones,
given by their seeds, and the allocations of the predicted peaks of four plans for an RTX 2080 Ti.
"""

import hashlib
import json
import pathlib
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewriters.device.allocator import MIB, BestFitAllocator, ExactAllocator

RECORDED = json.loads(pathlib.Path(__file__).with_name("bfc_recorded.json").read_text())


@pytest.fixture
def pool():
    """Return a pool with its first region allocated: 32 MiB free, in one chunk."""
    result = BestFitAllocator(growing=True)
    result.free(result.allocate(32 * MIB))
    assert result.in_use == 0
    return result


def test_exact_allocator_counts_requested_bytes():
    pool = ExactAllocator()
    first, _ = pool.allocate(5), pool.allocate(7)
    pool.free(first)
    assert pool.in_use == 7


def test_best_fit_splits_chunk_in_units(pool):
    pool.allocate(1000)
    assert pool.in_use == 1024
    pool.allocate(16 * MIB - 1024)
    assert pool.in_use == 16 * MIB


def test_best_fit_chunk_below_twice_size_is_not_split(pool):
    pool.allocate(16 * MIB + 1)
    assert pool.in_use == 32 * MIB


def test_best_fit_chunk_of_twice_size_is_split(pool):
    pool.allocate(16 * MIB)
    assert pool.in_use == 16 * MIB


def test_best_fit_chunk_with_large_remainder_is_split():
    pool = BestFitAllocator(growing=False)
    large = pool.allocate(500 * MIB)
    barrier = pool.allocate(256)
    pool.free(large)
    pool.allocate(400 * MIB)
    assert pool.in_use == 500 * MIB + 256, "100 MiB are not worth a chunk"
    assert barrier is not None
    other = BestFitAllocator(growing=False)
    large = other.allocate(500 * MIB)
    other.allocate(256)
    other.free(large)
    other.allocate(372 * MIB)
    assert other.in_use == 372 * MIB + 256, "128 MiB are"


def test_best_fit_free_coalesces_both_neighbours(pool):
    parts = [pool.allocate(8 * MIB) for _ in range(4)]
    for index in (0, 2, 1):  # The last one joins both.
        pool.free(parts[index])
    pool.allocate(24 * MIB)
    assert pool.in_use == 32 * MIB


def test_best_fit_uses_smallest_sufficient_chunk(pool):
    small, barrier, large = (pool.allocate(amount * MIB) for amount in (6, 1, 10))
    pool.free(small)
    pool.free(large)
    assert barrier is not None
    pool.allocate(5 * MIB)
    assert pool.in_use == (6 + 1) * MIB


def test_growing_pool_doubles_regions():
    pool = BestFitAllocator(growing=True)
    pool.allocate(2 * MIB)  # A region of 2 MiB.
    pool.allocate(3 * MIB)  # One of 4 MiB, handed out whole.
    assert pool.in_use == 6 * MIB
    pool.allocate(4 * MIB)  # One of 8 MiB, split.
    assert pool.in_use == 10 * MIB
    pool.allocate(33 * MIB)  # One of 64 MiB, handed out whole.
    assert pool.in_use == 74 * MIB


def test_pool_of_one_region_splits_always():
    pool = BestFitAllocator(growing=False)
    pool.allocate(33 * MIB)
    assert pool.in_use == 33 * MIB


def test_best_fit_zero_bytes_use_no_memory():
    pool = BestFitAllocator(growing=True)
    pool.free(pool.allocate(0))
    assert pool.in_use == 0


steps = st.lists(st.tuples(st.booleans(), st.integers(1, 40 * MIB)), max_size=60)


@settings(deadline=None)
@given(st.booleans(), steps)
def test_best_fit_in_use_is_at_most_twice_requested(growing, sequence):
    pool, held = BestFitAllocator(growing), []
    for release, amount in sequence:
        if release and held:
            pool.free(held.pop(amount % len(held))[0])
        else:
            held.append((pool.allocate(amount), amount))
        asked = sum(-(-amount // 256) * 256 for _, amount in held)
        most = sum(max(2 * amount, amount + 128 * MIB) + 256 for _, amount in held)
        assert asked <= pool.in_use <= most
        spans = sorted((chunk.address, chunk.address + chunk.size) for chunk, _ in held)
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False)), "no overlap"
    for chunk, _ in held:
        pool.free(chunk)
    assert pool.in_use == 0
    pieces = pool._free
    assert all(chunk.before is None and chunk.behind is None for _, _, chunk in pieces), "regions are whole again"


def test_best_fit_small_blocks_count_exactly():
    pool = BestFitAllocator(growing=True, least=1000)
    first, second = pool.allocate(999), pool.allocate(1000)
    assert pool.in_use == 999 + 1024
    pool.free(first)
    pool.free(second)
    assert pool.in_use == 0


def random_events(seed, count, log_size):
    """Return bytes of allocations, and frees as minus the number of the allocation, counted from 1."""
    numbers, held, events, allocated = Random(seed), [], [], 0
    for _ in range(count):
        if held and numbers.random() < 0.45:
            events.append(-held.pop(int(numbers.random() * len(held))))
        else:
            allocated += 1
            held.append(allocated)
            events.append(int(2 ** (log_size * numbers.random())))
    return events


def replayed(events, growing, limit):
    """Return the bytes in use after each event; -1 for an allocation that failed."""
    pool, held, in_use, allocated = BestFitAllocator(growing, limit=limit), {}, [], 0
    for event in events:
        try:
            if event > 0:
                allocated += 1
                held[allocated] = pool.allocate(event)
            elif -event in held:
                pool.free(held.pop(-event))
            in_use.append(pool.in_use)
        except MemoryError:
            in_use.append(-1)
    return in_use


def check(in_use, recorded, every):
    """Hold a replay against TensorFlow's."""
    wrong = [
        number * every
        for number, (got, want) in enumerate(zip(in_use[::every], recorded["sampled"], strict=True))
        if want != got != -1
    ]
    assert not wrong, f"bytes in use differ after events {wrong[:5]}"
    failed = [number for number, bytes_now in enumerate(in_use) if bytes_now == -1]
    assert (len(failed), failed[0] if failed else None) == (recorded["failures"], recorded["first_failure"])
    assert max(in_use) == recorded["peak"]
    assert hashlib.sha256(json.dumps(in_use).encode()).hexdigest()[:16] == recorded["digest"]


@pytest.mark.parametrize("recorded", RECORDED["random"], ids=lambda one: f"{one['seed']}-{one['log_size']}")
def test_random_sequence_equals_tensorflow(recorded):
    events = random_events(recorded["seed"], recorded["count"], recorded["log_size"])
    in_use = replayed(events, recorded["growing"], recorded["limit"])
    check(in_use, recorded, 2 * RECORDED["sampled_every"])


@pytest.mark.parametrize("plan", RECORDED["plans"], ids=lambda plan: plan["name"])
def test_allocations_of_a_plan_equal_tensorflow(plan):
    codes = [int(code) for code in plan["events"].split()]
    events = [plan["sizes"][code] if code >= 0 else code for code in codes]
    for recorded in plan["pools"]:
        check(replayed(events, recorded["growing"], recorded["limit"]), recorded, RECORDED["sampled_every"])
    fits, too_small = plan["pools"][2:4]
    assert (fits["failures"], too_small["failures"] > 0) == (0, True), "0.2 % less memory is not enough"


def test_recorded_pools_run_out_of_memory():
    assert sum(one["failures"] for one in RECORDED["random"]) > 50
    assert any(one["growing"] and one["failures"] for one in RECORDED["random"])
