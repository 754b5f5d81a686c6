"""Critics that answer with text instead of ids, behind one face: rules, one text, an endpoint.

The learned and the frozen critic are engines (`rollout/engine.py`), whose own ids are trained on.
What is here only speaks: its words are encoded for the actor, and there is nothing to learn from.
No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_binac.tasks.base import Task
from megatron_binac.types import Prompt


class TextCritic(Protocol):
    """Anything that writes feedback on an attempt in words.

    `say` is not collective: in a job of several ranks one rank asks and gives the texts to the
    others, so that an endpoint is asked once and all ranks hold the same tree.
    """

    def say(
        self, prompts: Sequence[Prompt], attempts: Sequence[str], seeds: Sequence[int]
    ) -> list[str | None]:
        """One feedback per (problem, attempt text), in order, None where this one failed."""
        ...

    def close(self) -> None:
        """Give back what the critic holds; it is not used again."""
        ...


class RuleCritic:
    """The task's own right feedback: rules that see the verified answer, as an upper bound.

    Example: ``RuleCritic(Checksum()).say([prompt], ["8"], [0]) == ["293362 off"]``
    """

    def __init__(self, task: Task) -> None:
        """ValueError where the task can write no feedback by itself."""
        feedback = getattr(task, "oracle_feedback", None)
        if feedback is None:
            raise ValueError(
                f"task {task.name} has no rules for feedback (no oracle_feedback); expected a task "
                "that has them: use another critic, or give the task an oracle_feedback"
            )
        self._feedback: Callable[[Prompt, str], str] = feedback

    def say(
        self, prompts: Sequence[Prompt], attempts: Sequence[str], seeds: Sequence[int]
    ) -> list[str | None]:
        """The same feedback on the same attempt under every seed."""
        asked = zip(prompts, attempts, seeds, strict=True)
        return [self._feedback(prompt, attempt) for prompt, attempt, _ in asked]

    def close(self) -> None:
        """Nothing is held."""


class ConstantCritic:
    """The same words about every attempt: a second try without feedback on the first.

    Source: the fixed instruction of SCoRe's second turn, arXiv 2409.12917.

    Example: ``ConstantCritic("there may be an error; try again").say([prompt], ["8"], [0])``
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def say(
        self, prompts: Sequence[Prompt], attempts: Sequence[str], seeds: Sequence[int]
    ) -> list[str | None]:
        """The text, once for each attempt."""
        return [self.text for _ in zip(prompts, attempts, seeds, strict=True)]

    def close(self) -> None:
        """Nothing is held."""
