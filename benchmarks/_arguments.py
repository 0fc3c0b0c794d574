"""Command line options that the benchmarks and the demo share."""

import argparse
import re
from fractions import Fraction

from tflms_sft._util.byte_sizes import parse_bytes


def parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for `python -m program` whose help shows the module's docstring verbatim."""
    return argparse.ArgumentParser(
        prog=f"python -m {program}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {number}")
    return number


def parse_size(text: str) -> int:
    """Return the bytes of a text such as "1.5GiB", "900 MB" or "1048576".

    Raises:
        ValueError: If the text is not a size.
    """
    text = text.strip()
    return parse_bytes(int(text) if text.isdecimal() else text, "size")


def size(text: str) -> int:
    """Parse a size of at least one byte."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def budget(text: str) -> str:
    """Check a budget and return it as given: a size, or a fraction of the original step's peak such as "1/3"."""
    if not is_part(text):
        size(text)
    elif not 0 < _fraction(text) < 1:
        raise argparse.ArgumentTypeError(f"must be more than 0 and less than 1. Received: {text!r}")
    return text


def budget_bytes(text: str, plain_bytes: int) -> int:
    """Return the bytes of a budget.

    Args:
        text: The budget.
        plain_bytes: Predicted peak of the original step; not used for a size.
    """
    return int(_fraction(text) * plain_bytes) if is_part(text) else parse_size(text)


def is_part(text: str) -> bool:
    """Return whether a budget is a fraction of the original step's peak."""
    return "/" in text


def _fraction(text: str) -> Fraction:
    if not re.fullmatch(r"\d+/0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f'expected a part such as "1/3". Received: {text!r}')
    return Fraction(text)


def part(text: str) -> float:
    """Parse a fraction from 0 to below 1."""
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to below 1. Received: {number}")
    return number
