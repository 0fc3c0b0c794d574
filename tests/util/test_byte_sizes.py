"""Bytes as users write them, and as they are printed."""

import numpy as np
import pytest

from tflms_sft._util.byte_sizes import enough_bytes, format_bytes, format_excess, parse_bytes


@pytest.mark.parametrize(
    ("written", "amount"),
    [
        (1, 1),
        (8 * 2**30, 8 * 2**30),
        ("17B", 17),
        ("3kB", 3000),
        ("3MB", 3_000_000),
        ("3GB", 3_000_000_000),
        ("2TB", 2 * 10**12),
        ("2TiB", 2**41),
        (np.int64(5), 5),
        (8e9, 8_000_000_000),
        (np.float32(3), 3),
        ("3KiB", 3072),
        ("3MiB", 3 * 2**20),
        ("8GiB", 8 * 2**30),
        ("8 GiB", 8 * 2**30),
        (" 1.5 MiB ", 3 * 2**19),
        ("0.5kB", 500),
    ],
)
def test_parse_bytes_of_int_or_unit_string_returns_bytes(written, amount):
    assert parse_bytes(written, "memory_budget") == amount


@pytest.mark.parametrize("value", [True, 1.5, float("nan"), float("inf"), None, [1], b"8GiB", 8e9 + 0.5])
def test_parse_bytes_of_other_type_is_refused(value):
    with pytest.raises(TypeError) as error:
        parse_bytes(value, "memory_budget")
    assert str(error.value) == (
        '`memory_budget` must be a whole number of bytes, such as 8e9, or a string with a unit, such as "8GiB". '
        f"Received: memory_budget={value!r} of type {type(value).__name__}."
    )


@pytest.mark.parametrize(
    "value", ["8", "8 gib", "8Gib", "8GB/s", "-8GiB", "nan GiB", "inf GiB", "1e3 MB", "GiB", "", "1,5 GiB", "8PiB"]
)
def test_parse_bytes_of_wrong_string_is_refused(value):
    with pytest.raises(ValueError, match="followed by one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB") as error:
        parse_bytes(value, "memory_capacity")
    assert "`memory_capacity` must be a positive number" in str(error.value)
    assert f"memory_capacity={value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("8G", ' Write "8GiB" or "8GB".'),
        ("1.5 m", ' Write "1.5MiB" or "1.5MB".'),
        ("8Gi", ' Write "8GiB".'),
        ("8gb", ' Write "8GB".'),
        ("900K", ' Write "900KiB" or "900kB".'),
        ("8", ' Write "8GiB" or "8GB".'),
        ("8P", ""),
        ("8e9", ""),
    ],
)
def test_parse_bytes_of_ambiguous_unit_names_the_sizes_it_may_mean(value, remedy):
    with pytest.raises(ValueError) as error:
        parse_bytes(value, "memory_budget")
    assert str(error.value) == (
        "`memory_budget` must be a positive number followed by one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, such as "
        f'"8GiB". Received: memory_budget={value!r}.{remedy}'
    )


@pytest.mark.parametrize("value", [2**63, "9" * 400 + "GiB", "9000000 TiB"])
def test_parse_bytes_of_64_bit_overflow_is_refused(value):
    with pytest.raises(ValueError, match=r"`memory_budget` must be less than 2\^63 bytes. Received: memory_budget=9"):
        parse_bytes(value, "memory_budget")


@pytest.mark.parametrize("value", [0, -1, "0B", "0.0 GiB", "0.4B"])
def test_parse_bytes_below_one_is_refused(value):
    with pytest.raises(ValueError, match="`memory_budget` must be at least one byte. Received: memory_budget="):
        parse_bytes(value, "memory_budget")


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (512 * 2**20, "512 MiB"),
        (2**41, "2.00 TiB"),
        (3.4 * 2**30, "3.40 GiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_format_bytes_prints_three_digits(amount, text):
    assert format_bytes(amount) == text


@pytest.mark.parametrize("amount", [17, 2048, 3 * 2**20, 5 * 2**30])
def test_format_bytes_round_trips_through_parse_bytes(amount):
    assert parse_bytes(format_bytes(amount), "memory_budget") == amount


@pytest.mark.parametrize(
    ("amount", "limit", "texts"),
    [
        (15 * 2**20, 14 * 2**20, ("15 MiB", "14 MiB")),
        (14 * 2**20 + 1, 14 * 2**20, ("14,680,065 B", "14,680,064 B")),
        (2**30, 2**30 - 1000, ("1,073,741,824 B", "1,073,740,824 B")),
    ],
)
def test_format_excess_shows_that_sizes_differ(amount, limit, texts):
    assert format_excess(amount, limit) == texts


@pytest.mark.parametrize("amount", [1, 999, 10240, 113347, 53842205, 2**33 + 1, 2**33, 2**50])
def test_enough_bytes_is_a_budget_of_at_least_as_much(amount):
    text = enough_bytes(amount)
    assert amount <= parse_bytes(text, "memory_budget") < 1.1 * amount + 1 and " " not in text
