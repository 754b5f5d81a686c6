"""What one update learns from: terms, each with its own rows and its own loss. No torch.

An update adds its terms up: sum over terms of coef * (loss summed over the term's rows) /
denominator. A plain recipe has one term; RLTF, SDPO, Critique-GRPO and MulFeRL add one each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_binac.config import LossConfig
from megatron_binac.types import TrainSequence


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossEntropy:
    """Minus the log-prob of each target: warm start, feedback modelling (RLTF-FM)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstPrompt:
    """Policy gradient on revisions under the first prompt, without a ratio (RLTF-SD)."""

    floor: float = -5.0
    """Tokens with a log-prob below are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaped:
    """Policy gradient through p / (p + gamma) in the place of the ratio (Critique-GRPO)."""

    gamma: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Distill:
    """Divergence from the same policy with more in its context (SDPO); needs the term's
    `teacher`."""

    alpha: float = 0.5
    """0: KL(teacher || student); 1: KL(student || teacher); between: Jensen-Shannon."""
    top_k: int = 20
    """Ids that are told apart; the rest of the vocabulary is one bucket."""
    ratio_clip: float | None = 2.0
    """Cap of the weight pi(y_t) / pi_engine(y_t) of a token; None for no weight."""
    trust_region: float = 0.0
    """How far the teacher is held to the reference: policy^(1-w) * reference^w."""


TermLoss = LossConfig | CrossEntropy | FirstPrompt | Shaped | Distill


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """Rows and what is computed on them.

    Example: ``Term(name="sd", rows=rows, loss=FirstPrompt(), coef=0.1)``
    """

    rows: Sequence[TrainSequence]
    loss: TermLoss
    name: str = ""
    """Put before the term's statistics, `name/loss`; the main term has none."""
    coef: float = 1.0
    denominator: float | None = None
    """What the loss sum is divided by; None for what the loss says (its tokens, or its rows)."""
    teacher: Sequence[TrainSequence] | None = None
    """Twins of `rows` with another context before the same targets, for `Distill`."""

    @property
    def num_targets(self) -> int:
        return sum(row.num_targets for row in self.rows)

    @property
    def num_rows(self) -> int:
        """Rows that have something to learn from."""
        return sum(row.num_targets > 0 for row in self.rows)
