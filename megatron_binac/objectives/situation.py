"""What an objective may look at when it turns trees into terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megatron_binac.config import Config
from megatron_binac.rollout.play import Players
from megatron_binac.terms import Term
from megatron_binac.types import TrainSequence, Tree, Turn


class Scorer(Protocol):
    """The actor's learner, as far as an objective asks it."""

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, reference: bool = False
    ) -> list[np.ndarray]:
        """float32 [L] per row: log-prob of every masked token, 0 elsewhere."""
        ...


class ValueModel(Protocol):
    """A value head on the actor's hidden states. The value of a masked token is read from the state
    that predicts it, so that it never sees the token."""

    def read(self, rows: Sequence[TrainSequence], *, bounded: bool) -> list[np.ndarray]:
        """float32 [L] per row, 0 where masked; `bounded` puts values in (0, 1)."""
        ...

    def fit(
        self, rows: Sequence[TrainSequence], targets: Sequence[np.ndarray], *, bounded: bool
    ) -> dict[str, float]:
        """Regression steps on targets [L] at the masked tokens; what is logged."""
        ...

    def ahead(
        self, rows: Sequence[TrainSequence], targets: Sequence[np.ndarray], *, bounded: bool
    ) -> list[np.ndarray]:
        """What a copy reads after further steps on the same rows; the head itself stays."""
        ...


@dataclass(kw_only=True, slots=True)
class Situation:
    """A step's trees, and what is at hand to judge them with."""

    trees: Sequence[Tree]
    config: Config
    """As the step's stage has it."""
    step: int
    players: Players
    actor: Scorer
    memory: dict[str, Any] = field(default_factory=dict)
    """JSON-able numbers that a method keeps from step to step; saved with the run."""
    values: ValueModel | None = None

    def first_prompt(self, tree: Tree) -> np.ndarray:
        """Prompt of an answer to the problem alone, int32."""
        return np.asarray(self.players.template.attempt_ids(tree.prompt), np.int32)


Credit = Callable[[Situation], tuple[list[Turn], dict[str, float]]]
"""Gives every turn of a role its advantage; returns the turns to learn from, and what is logged."""
Extra = Callable[[Situation], tuple[list[Term], dict[str, float]]]
"""Terms beside the policy gradient."""
