"""Parse and format sizes in bytes, such as `"8GiB"`."""

from __future__ import annotations

import math
import numbers
import re

_UNITS = {
    **{"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
}
_MAX_BYTES = 2**63
"""Exclusive limit, because TensorFlow counts bytes in signed 64-bit integers."""

_PATTERN = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*$")


def parse_bytes(value: object, argument: str) -> int:
    """Return the bytes of a whole number, such as `8e9`, or of a string, such as `"8GiB"` or `"1.5 GB"`.

    Raises:
        TypeError: For other types, `bool` and fractions of a byte included.
        ValueError: For a string without a known unit, for less than one byte, and for 2^63 bytes or more.
    """
    if not isinstance(value, str):
        amount = _whole_number(value, argument)
    else:
        match = _PATTERN.match(value)
        if match is None or match.group(2) not in _UNITS:
            raise ValueError(
                f'`{argument}` must be a positive number followed by one of {", ".join(_UNITS)}, such as "8GiB". '
                f"Received: {argument}={value!r}.{_unit_hint(value)}"
            )
        amount = int(min(float(match.group(1)) * _UNITS[match.group(2)], float(_MAX_BYTES)))
    if amount >= _MAX_BYTES:
        raise ValueError(f"`{argument}` must be less than 2^63 bytes. Received: {argument}={str(value):.40}.")
    if amount < 1:
        raise ValueError(f"`{argument}` must be at least one byte. Received: {argument}={value!r}.")
    return amount


def _whole_number(value: object, argument: str) -> int:
    """Return an int, or a float without a fraction, as an int."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and int(value) == value:  # type: ignore[call-overload]
        return int(value)  # type: ignore[call-overload]
    raise TypeError(
        f'`{argument}` must be a whole number of bytes, such as 8e9, or a string with a unit, such as "8GiB". '
        f"Received: {argument}={value!r} of type {type(value).__name__}."
    )


def _unit_hint(text: str) -> str:
    """Return a sentence with the sizes that a text such as `"8G"` may mean; empty if the number cannot be read."""
    match = re.match(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?b?)\s*$", text, re.IGNORECASE)
    if match is None:
        return ""
    prefix = match.group(2).upper() or "G"
    sizes = [f'"{match.group(1)}{unit}"' for unit in reversed(_UNITS) if unit.upper().startswith(prefix)]
    return f" Write {' or '.join(sizes)}." if sizes else ""


def format_bytes(amount: float) -> str:
    """Return a size as text, such as `"3.4 GiB"`, `"512 MiB"` or `"17 B"`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(amount) >= _UNITS[unit]:
            number = amount / _UNITS[unit]
            return f"{number:.2f} {unit}" if number < 10 else f"{number:.0f} {unit}"
    return f"{amount:.0f} B"


def enough_bytes(amount: int) -> str:
    """Return a size of at least `amount` bytes as an argument, such as `"52MiB"`; at most a tenth above it."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if amount >= 10 * _UNITS[unit]), "B")
    return f"{-(-amount // _UNITS[unit])}{unit}"


def format_excess(amount: int, limit: int) -> tuple[str, str]:
    """Return a size and the limit that it exceeds as texts; in bytes if it does so by less than a hundredth."""
    if amount < 1.01 * limit:
        return f"{amount:,} B", f"{limit:,} B"
    return format_bytes(amount), format_bytes(limit)
