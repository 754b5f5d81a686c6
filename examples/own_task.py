"""A task of your own, graded and walked over: what `megatron_binac` needs to train on it.

    python examples/own_task.py

To train, register it as an entry point of the group `megatron_binac.tasks` in your package and set
`task.name`; `docs/tasks.md` says how.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_binac.tasks.base import Cursor, parse_verdict
from megatron_binac.types import Grade, Prompt, Split


@dataclass(frozen=True, kw_only=True)
class Doubling:
    """Double a number; every fifth one is held out."""

    name: str = "doubling"
    limit: int = 1000

    def size(self, split: Split) -> int:
        return self.limit // 5 if split == "eval" else self.limit - self.limit // 5

    def prompt(self, split: Split, index: int) -> Prompt:
        if not 0 <= index < self.size(split):
            raise IndexError(index)
        number = 5 * index if split == "eval" else index + index // 4 + 1
        place = f"{self.name}/{split}/{index}"
        return Prompt(id=place, text=f"2 * {number} =", gold=str(2 * number), task=self.name)

    def grade(self, prompt: Prompt, text: str) -> Grade:
        said = text.strip()
        return Grade(score=float(said == prompt.gold), parsed=said or None)

    def leaks(self, prompt: Prompt, attempt_text: str, feedback_text: str) -> bool:
        return prompt.gold in feedback_text.split() and prompt.gold not in attempt_text.split()

    def verdict(self, feedback_text: str) -> bool | None:
        return parse_verdict(feedback_text, right=["yes"], wrong=["no"])


if __name__ == "__main__":
    task = Doubling()
    for prompt in Cursor(task, "train", seed=0).take(3):
        right, wrong = task.grade(prompt, prompt.gold), task.grade(prompt, "7")
        print(f"{prompt.id:20} {prompt.text:12} {prompt.gold:>5}: {right.score}, 7: {wrong.score}")
