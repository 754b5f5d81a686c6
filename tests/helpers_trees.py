"""Trees with rewards that a test chooses, and a situation around them, without any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from helpers_toy import ToyTokenizer, Xor, toy_config, toy_players

from megatron_binac.config import Config
from megatron_binac.objectives.situation import Situation
from megatron_binac.types import Finish, Grade, Prompt, TrainSequence, Tree, Turn, TurnKind


def turn(
    kind: TurnKind, reward: float | None = None, text: str = "1", *, failed: bool = False
) -> Turn:
    """One character and the end token; a reward of None is a turn that is not graded."""
    finish: Finish = "failed" if failed and reward is None else "stop"
    return Turn(
        kind=kind,
        prompt_ids=np.asarray([1, 5, 2], np.int32),
        ids=np.asarray([*ToyTokenizer().encode(text), 4], np.int32),
        logprobs=np.linspace(-0.5, -0.25, len(text) + 1).astype(np.float32),
        finish=finish,
        version=0,
        text=text,
        grade=None if reward is None else Grade(score=reward, parsed=text, failed=failed),
    )


def tree(
    attempts: Sequence[float | None],
    revisions: dict[int, list[list[float | None]]] | None = None,
    *,
    words: str = "?",
    prompt_id: str = "a",
    number: int = 0,
) -> Tree:
    """Rewards of the attempts, and by criticised attempt those of the revisions [F][M]; None is one
    whose verifier broke. The problem's text is 01, the attempts say 1 where right and 0 else."""

    def graded(kind: TurnKind, reward: float | None) -> Turn:
        text = "1" if reward else "0"
        return turn(kind, 0.0 if reward is None else reward, text, failed=reward is None)

    rewards = revisions or {}
    chosen = sorted(rewards)
    return Tree(
        prompt=Prompt(id=prompt_id, text="01", gold="1", task="xor"),
        attempts=[graded("attempt", r) for r in attempts],
        criticised=chosen,
        weights=[1.0] * len(chosen),
        feedbacks=[[turn("feedback", text=words) for _ in rewards[g]] for g in chosen],
        revisions=[[[graded("revision", r) for r in ys] for ys in rewards[g]] for g in chosen],
        round=number,
    )


class FixedScorer:
    """Says of every masked token the same log-prob, another one under the reference."""

    def __init__(self, live: float = -1.0, reference: float = -1.5) -> None:
        self.live, self.reference = live, reference
        self.asked: list[Sequence[TrainSequence]] = []

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, reference: bool = False
    ) -> list[np.ndarray]:
        self.asked.append(sequences)
        value = self.reference if reference else self.live
        return [np.where(s.mask, np.float32(value), np.float32(0)) for s in sequences]


class FixedValues:
    """A value head that reads one number, another one ahead, and remembers what it was taught."""

    def __init__(self, now: float = 0.25, later: float = 0.5) -> None:
        self.now, self.later = now, later
        self.taught: list[tuple[Sequence[TrainSequence], Sequence[np.ndarray], bool]] = []

    def read(self, rows: Sequence[TrainSequence], *, bounded: bool) -> list[np.ndarray]:
        return [np.where(r.mask, np.float32(self.now), np.float32(0)) for r in rows]

    def fit(
        self, rows: Sequence[TrainSequence], targets: Sequence[np.ndarray], *, bounded: bool
    ) -> dict[str, float]:
        self.taught.append((rows, targets, bounded))
        return {"value": self.now}

    def ahead(
        self, rows: Sequence[TrainSequence], targets: Sequence[np.ndarray], *, bounded: bool
    ) -> list[np.ndarray]:
        return [np.where(r.mask, np.float32(self.later), np.float32(0)) for r in rows]


def situation(trees: Sequence[Tree], step: int = 0, **changes: Any) -> Situation:
    """A step of the toy task; `changes` are fields of the config, or `task`, `scorer`, `values`."""
    parts = {name: changes.pop(name, None) for name in ("task", "scorer", "values")}
    base = toy_config()
    config: Config = replace(base, **changes)
    return Situation(
        trees=trees,
        config=config,
        step=step,
        players=toy_players(lambda *a: None, lambda *a: None, task=parts["task"] or Xor()),
        actor=parts["scorer"] or FixedScorer(),
        values=parts["values"],
    )


def credits(turns: Sequence[Turn], kind: TurnKind) -> list[float]:
    return [t.advantage for t in turns if t.kind == kind]
