"""Grades of answers, found while others are still sampled: equal answers are judged once, and ranks
share the work out.

What a verifier finds may depend on the clock: ranks must not each find their own. An answer that
two ranks have judged has the grade that the lower one found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_binac.tasks.base import Task
from megatron_binac.tasks.grading import grade_all, judge
from megatron_binac.types import Grade, Prompt

Pair = tuple[Prompt, str]
Item = TypeVar("Item")
Found = TypeVar("Found")


class Judging:
    """Answers that are being judged; leave it as a context, and no thread is left.

    A task that judges in processes of its own says in how many: `workers`. It begins with each
    answer that is handed in; threads only wait for it. Any other task judges in `finish`.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        workers: int | None = getattr(task, "workers", None)
        self._threads = None if workers is None else ThreadPoolExecutor(max(1, workers))
        self._found: dict[tuple[str, str], Future[Grade]] = {}

    def __enter__(self) -> Judging:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    @property
    def runs_apart(self) -> bool:
        """Whether an answer is worth handing in early."""
        return self._threads is not None

    def hand_in(self, prompt: Prompt, text: str) -> None:
        """Begin with an answer, on this rank."""
        key = (prompt.id, text)
        if self._threads is not None and key not in self._found:
            self._found[key] = self._threads.submit(judge, self._task, prompt, text)

    def share_out(self, pairs: Sequence[Pair]) -> None:
        """Begin with this rank's share of answers that every rank has."""
        rank, world = _place()
        for pair in _distinct(pairs)[rank::world]:
            self.hand_in(*pair)

    def finish(self, pairs: Sequence[Pair]) -> list[Grade]:
        """The grade of each answer, in order, whoever judged it. Collective: every rank has the
        same answers here, and gets the same grades."""
        mine = {key: future.result() for key, future in self._found.items()}
        found = mine
        if self.runs_apart and _place()[1] > 1:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, mine)
            found = {key: grade for part in parts[::-1] for key, grade in part.items()}
        missing = [(p, text) for p, text in _distinct(pairs) if (p.id, text) not in found]
        grades = shared_out(lambda share: grade_all(self._task, share), missing)
        found |= {(p.id, text): g for (p, text), g in zip(missing, grades, strict=True)}
        return [found[p.id, text] for p, text in pairs]


def _place() -> tuple[int, int]:
    """(rank, world); a process alone is a world of one."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _distinct(pairs: Sequence[Pair]) -> list[Pair]:
    first: dict[tuple[str, str], Pair] = {}
    for prompt, text in pairs:
        first.setdefault((prompt.id, text), (prompt, text))
    return list(first.values())


def shared_out(work: Callable[[list[Item]], list[Found]], items: list[Item]) -> list[Found]:
    """`work` on a share of the items by each rank; all results in order, on every rank."""
    rank, world = _place()
    if world == 1:
        return work(items)
    parts: list[list[Found]] = [[] for _ in range(world)]
    dist.all_gather_object(parts, work(items[rank::world]))
    return [parts[i % world][i // world] for i in range(len(items))]
