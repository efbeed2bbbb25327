"""Types of command-line options, which refuse bad values before any work is done."""

import math
from argparse import ArgumentTypeError
from pathlib import Path


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def counts(text: str) -> list[int]:
    """Return whole numbers of at least 1, with commas between."""
    return [count(part) for part in text.split(",")]


def size(text: str) -> float:
    """Return a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def new_file(text: str) -> Path:
    """Return the path of a file that can be written: its folder exists."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text!r} is a folder; name a file")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"there is no folder {str(path.parent)!r}; make it first")
    return path
