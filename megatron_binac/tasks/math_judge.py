"""Pairs of mathematical answers, judged where they can do no harm.

What a pair provokes (a power tower, a factorial of a factorial) ends with its process and counts as
not equal; only a judge that cannot work at all is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_binac.tasks.killable import Killable
from megatron_binac.tasks.math_equal import quick

How = Literal["quick", "algebra", "time", "memory", "crash"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Equality:
    """Whether two answers are equal, and how that was found.

    Example: ``Equality(equal=False, how="time")``
    """

    equal: bool
    how: How
    """quick: as strings or numerals; algebra: by math-verify; else what the algebra died of."""


class MathJudge:
    """A pool of judges. Safe to use from many threads.

    Example: ``MathJudge().equal("1/2", "0.5").equal``
    """

    def __init__(self, *, workers: int | None = None, seconds: float = 5.0) -> None:
        """`seconds` is the processor time that one pair may take."""
        self._calls = Killable(
            "megatron_binac.tasks.math_equal:equal_pair", seconds=seconds, workers=workers
        )

    @property
    def workers(self) -> int:
        """Pairs that are judged at the same time."""
        return self._calls.workers

    def equal(self, gold: str, answer: str) -> Equality:
        """Compare two answers; HelperError where no judge could be had."""
        verdict = quick(gold, answer)
        if verdict is not None:
            return Equality(equal=verdict, how="quick")
        found = self._calls.call([gold, answer])
        if found.end == "done":
            return Equality(equal=bool(found.value), how="algebra")
        return Equality(equal=False, how=found.end)

    def close(self) -> None:
        """End the judges."""
        self._calls.close()
