"""Contamination: which held-out problems share runs of words with the training problems."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_binac.tasks.data import DataTask

_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """A held-out text that training texts share words with.

    Example: ``Overlap(held_out=3, share=1.0, train=17)``
    """

    held_out: int
    """Place of the held-out text."""
    share: float
    """Part of its n-grams that occur in the training texts, all of them together."""
    train: int
    """Place of the training text that holds most of them, the first where several do."""


def words(text: str) -> list[str]:
    """Words and numbers in small letters: what is left of a text when its layout is taken away."""
    return _WORD.findall(text.lower())


def overlaps(
    train: Iterable[str], held_out: Sequence[str], *, n: int = 13, at_least: float = 0.5
) -> list[Overlap]:
    """Held-out texts of whose n-grams of words at least this share occurs in training texts, most
    first.

    A text of fewer than `n` words counts as one gram, which a training text holds where it contains
    it whole. Only the held-out side is kept in memory.
    """
    if n < 1 or not 0 < at_least <= 1:
        raise ValueError(
            f"got n {n} and share {at_least}, expected n of 1 or more and a share above 0"
        )
    owners: dict[tuple[str, ...], list[int]] = {}
    sizes: list[int] = []
    for place, text in enumerate(held_out):
        found = set(_grams(words(text), n))
        sizes.append(len(found))
        for gram in found:
            owners.setdefault(gram, []).append(place)
    lengths = {len(gram) for gram in owners}
    shared: list[set[tuple[str, ...]]] = [set() for _ in held_out]
    best: list[tuple[int, int]] = [(0, -1)] * len(held_out)
    for place, text in enumerate(train):
        spoken = words(text)
        here: Counter[int] = Counter()
        for length in lengths:
            for gram in set(_grams(spoken, length)):
                for owner in owners.get(gram, ()):
                    here[owner] += 1
                    shared[owner].add(gram)
        for owner, count in here.items():
            best[owner] = max(best[owner], (count, -place))
    out = [
        Overlap(held_out=i, share=len(shared[i]) / sizes[i], train=-best[i][1])
        for i in range(len(held_out))
        if sizes[i] and len(shared[i]) / sizes[i] >= at_least
    ]
    return sorted(out, key=lambda o: (-o.share, o.held_out))


def task_overlaps(task: DataTask, *, n: int = 13, at_least: float = 0.5) -> list[Overlap]:
    """`overlaps` between the statements of a task's two splits."""
    train, held_out = (
        [task.statement(p) for p in task.prompts(split)] for split in ("train", "eval")
    )
    return overlaps(train, held_out, n=n, at_least=at_least)


def _grams(spoken: list[str], n: int) -> list[tuple[str, ...]]:
    if not spoken:
        return []
    if len(spoken) < n:
        return [tuple(spoken)]
    return [tuple(spoken[i : i + n]) for i in range(len(spoken) - n + 1)]
