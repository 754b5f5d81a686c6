"""What a task is: prompts in, grades out, and the cursor that walks over its prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from megatron_binac.seeds import name_seed
from megatron_binac.types import Grade, Prompt, Role, Split

Speaker = Literal["user", "actor", "critic"]


class Task(Protocol):
    """A source of problems with a verifier. No item of the split "train" is one of "eval"."""

    name: str

    def prompt(self, split: Split, index: int) -> Prompt:
        """Item `index` of a split, always the same; IndexError past the end of a finite split."""
        ...

    def size(self, split: Split) -> int | None:
        """Number of items, None where prompts are made on demand without end."""
        ...

    def grade(self, prompt: Prompt, text: str) -> Grade:
        """Verify one answer; raises only where the verifier itself breaks, not for a wrong one."""
        ...

    def leaks(self, prompt: Prompt, attempt_text: str, feedback_text: str) -> bool:
        """Whether the feedback holds the verified answer when the attempt did not."""
        ...

    def verdict(self, feedback_text: str) -> bool | None:
        """What the feedback says of the attempt: right, wrong, or None for no verdict."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """What one speaker says in a supervised example, and whether it is to be learned.

    Example: ``Segment(speaker="actor", text="8", is_target=False)``
    """

    speaker: Speaker
    text: str
    is_target: bool


Example = tuple[Segment, ...]
"""The turns of one conversation in order; the end token of a target turn is a target too."""


@runtime_checkable
class TeachingTask(Task, Protocol):
    """A task that can make right feedback and supervised conversations by itself."""

    def oracle_feedback(self, prompt: Prompt, attempt_text: str) -> str:
        """Right feedback: for the warm start, and as an upper bound in evaluation only."""
        ...

    def supervised(self, role: Role, index: int) -> Example:
        """Warm-start example `index` of one role, always the same, from the train split only."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """What a task says to models that were tuned to chat; others learn the turns by their markers.

    Example: ``Wording(revise="Answer again with one digit.")``
    """

    criticise: str = (
        "Say step by step what is right and what is wrong in this answer, and how to mend it. Do "
        'not write a new answer. End with a line "Verdict: correct" or "Verdict: incorrect".'
    )
    """Behind the problem and an answer to it; the verdict in words that `Task.verdict` reads."""
    revise: str = "Answer the problem again, in the form that was asked for."
    """Behind the feedback on one's own answer."""


def wording_of(task: Task) -> Wording:
    """The task's attribute `wording`, or words that suit any task."""
    return getattr(task, "wording", None) or Wording()


def for_critic(task: Task, prompt: Prompt, attempt_text: str) -> Prompt:
    """The problem as the critic is shown it.

    That is the problem alone, unless the task has been set to show more (`critic_sees` of code
    tasks) and has a method `observe(prompt, attempt_text)` that says what.
    """
    observe = getattr(task, "observe", None)
    seen = None if observe is None else observe(prompt, attempt_text)
    return prompt if not seen else replace(prompt, text=f"{prompt.text}\n\n{seen}")


def corpus(task: Task, num_prompts: int) -> Iterator[str]:
    """Text of the train split on which a tokenizer can be trained: problems, answers, feedback."""
    size = task.size("train")
    for index in range(num_prompts if size is None else min(size, num_prompts)):
        yield task.prompt("train", index).text
        if isinstance(task, TeachingTask):
            for example in (task.supervised("actor", index), task.supervised("critic", index)):
                yield from (segment.text for segment in example if segment.text)


def parse_verdict(text: str, right: Sequence[str], wrong: Sequence[str]) -> bool | None:
    """The last verdict word of a text, as a whole word in any case; None where there is none."""
    words = {w.lower(): True for w in right} | {w.lower(): False for w in wrong}
    longest_first = sorted(words, key=len, reverse=True)
    pattern = r"(?<!\w)(?:" + "|".join(map(re.escape, longest_first)) + r")(?!\w)"
    found = re.findall(pattern, text.lower())
    return words[found[-1]] if found else None


class Cursor:
    """Hands out the prompts of a split in a seeded order that a resume continues.

    A finite split is shuffled anew for each epoch and a batch runs on over the border of an epoch.
    From the second epoch on the id says so ("gsm8k/train/17@1"), so that two groups of one batch
    never share an id. An endless split is taken in its own order.

    Example: ``Cursor(task, "train", seed=1).take(32)``
    """

    def __init__(self, task: Task, split: Split, *, seed: int) -> None:
        self.task, self.seed = task, seed
        self.split: Split = split
        self.size = task.size(split)
        if self.size == 0:
            raise ValueError(
                f"task {task.name} has no items in its split {split!r}; check the task's options"
            )
        self.epoch = 0
        self.position = 0
        """Prompts of this epoch that were handed out."""
        self._order = self._shuffled()

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts."""
        return [self._next() for _ in range(num_prompts)]

    def _next(self) -> Prompt:
        if self.size is not None and self.position == self.size:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._shuffled()
        index = self.position if self._order is None else int(self._order[self.position])
        self.position += 1
        prompt = self.task.prompt(self.split, index)
        return replace(prompt, id=f"{prompt.id}@{self.epoch}") if self.epoch else prompt

    def _shuffled(self) -> np.ndarray | None:
        if self.size is None:
            return None
        seed = name_seed(self.seed, self.task.name, self.split, self.epoch)
        return np.random.default_rng(seed).permutation(self.size)

    def state(self) -> dict[str, Any]:
        """Where the cursor stands, JSON-able."""
        place = {"task": self.task.name, "split": self.split, "seed": self.seed, "size": self.size}
        return {**place, "epoch": self.epoch, "position": self.position}

    def restore(self, state: dict[str, Any]) -> None:
        """Go where `state` was taken; ValueError where it belongs to other data or another seed."""
        here = self.state()
        for key in ("task", "split", "seed", "size"):
            if state[key] != here[key]:
                raise ValueError(
                    f"the saved cursor has {key} {state[key]!r}, this run has {here[key]!r}; "
                    "resume with the task, the data and the seed that the run began with"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._shuffled()
