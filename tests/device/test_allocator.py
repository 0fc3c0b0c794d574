"""Models of TensorFlow's allocator: splitting and coalescing by hand, invariants for random sequences."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewriters.device.allocator import MIB, BestFitAllocator, ExactAllocator


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
