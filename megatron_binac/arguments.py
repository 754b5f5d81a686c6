"""Command lines: wrong use is one line; a number out of range is refused by its option."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a ValueError of one line instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Type of an argument: an integer in [low, high].

    Raises argparse.ArgumentTypeError, which argparse prints with the option's name.

    Example: ``parser.add_argument("--repeats", type=whole(1), default=5)``
    """
    span = f"of {low:,} or more" if high is None else f"from {low:,} to {high:,}"

    def parse(text: str) -> int:
        try:
            value = int(text.replace("_", ""))
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer {span}")
        return value

    return parse


def positive(text: str) -> float:
    """Type of an argument: a finite number above zero.

    Raises argparse.ArgumentTypeError, which argparse prints with the option's name.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return value
