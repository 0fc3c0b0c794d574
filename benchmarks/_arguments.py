"""What command lines of benchmarks and demo have in common."""

import argparse
import re


def parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m program`, whose help shows a module's text as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m {program}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def positive(text: str) -> int:
    """An argument that is an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {number}")
    return number


def parse_size(text: str) -> int:
    """Returns the bytes of a text such as "1.5GiB" or "900MiB".

    Raises:
        ValueError: The text is no such size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i)?B?", text.strip())
    if not found:
        raise ValueError(f'expected a size such as "1.5GiB". Received: {text!r}')
    return int(float(found.group(1)) * 1024 ** " KMGT".index((found.group(2) or " ")[0]))


def size(text: str) -> int:
    """An argument that is a size of at least one byte."""
    try:
        number = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least one byte. Received: {text!r}")
    return number


def part(text: str) -> float:
    """An argument that is a number from 0 to below 1."""
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to below 1. Received: {number}")
    return number
