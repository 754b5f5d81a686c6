"""MLMT-RL: a value head stands for the actor, now and after it adapts.

C criticised attempts, F feedbacks, M revisions.
Source: OpenReview u1RjV99DPu.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_binac.algo.bilevel import feedback_value
from megatron_binac.algo.values import mlmt_revision_advantage
from megatron_binac.objectives.situation import Situation
from megatron_binac.rollout.batch import actor_turns, give, rewards
from megatron_binac.types import TrainSequence, Turn


def value_credit(situation: Situation) -> tuple[list[Turn], dict[str, float]]:
    """Revisions by R(y1) - V(x, y0, z); attempts among their siblings, as Bi-NAC's weights say.

    The head is read before it takes its steps on this batch.
    """
    assert situation.values is not None
    turns, log = actor_turns(situation.trees, situation.config.bilevel)
    revised = [ys for tree in situation.trees for ys in tree.revisions]
    reward_CFM, valid_CFM = rewards(revised)
    rows, targets, has_CF = _regression(situation, reward_CFM, valid_CFM)
    value_CF = _spread(situation.values.read(rows, bounded=True), has_CF)
    credit, trainable = mlmt_revision_advantage(
        reward_CFM, valid_CFM & has_CF[..., None], value_CF
    )
    give([t for zs in revised for ys in zs for t in ys], credit, trainable)
    head = situation.values.fit(rows, targets, bounded=True)
    return turns, log | {f"head/{name}": value for name, value in head.items()}


def leader_values(situation: Situation) -> tuple[Tensor, Tensor]:
    """V and V^k [C, F] of the feedbacks: of the head, and of a copy k regression steps ahead."""
    assert situation.values is not None
    reward_CFM, valid_CFM = rewards([ys for tree in situation.trees for ys in tree.revisions])
    rows, targets, has_CF = _regression(situation, reward_CFM, valid_CFM)
    now = situation.values.read(rows, bounded=True)
    ahead = situation.values.ahead(rows, targets, bounded=True)
    return _spread(now, has_CF), _spread(ahead, has_CF)


def _regression(
    situation: Situation, reward_CFM: Tensor, valid_CFM: Tensor
) -> tuple[list[TrainSequence], list[np.ndarray], Tensor]:
    """A row per feedback that has a value, the place where the head is read (before the revision
    begins) and its Monte-Carlo target there; which feedbacks those are, [C, F]."""
    has_CF = valid_CFM.any(-1)
    value_CF = feedback_value(reward_CFM, valid_CFM)
    rows: list[TrainSequence] = []
    targets: list[np.ndarray] = []
    revised = [ys for tree in situation.trees for ys in tree.revisions]
    for c, zs in enumerate(revised):
        for f, answers in enumerate(zs):
            if not has_CF[c, f]:
                continue
            ids = answers[0].prompt_ids
            # The state before the marker of the second answer: the feedback's own end.
            mask = np.arange(len(ids)) == len(ids) - 1
            rows.append(TrainSequence(ids=ids, mask=mask))
            targets.append(np.where(mask, np.float32(value_CF[c, f]), np.float32(0)))
    return rows, targets, has_CF


def _spread(values: list[np.ndarray], has_CF: Tensor) -> Tensor:
    """Values of the rows back in their places [C, F], 0 where there is none."""
    out = torch.zeros(has_CF.shape, dtype=torch.float64)
    out[has_CF] = torch.tensor([float(v[-1]) for v in values], dtype=torch.float64)
    return out
