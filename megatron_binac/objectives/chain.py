"""Bi-NAC to the letter: one attempt, one feedback, one revision, against moving averages.

C criticised attempts, F feedbacks, M revisions; the chain of the paper has one of each.
Source: arXiv 2605.24547, eqs. 3 and 4.
"""

from __future__ import annotations

import torch

from megatron_binac.algo.bilevel import feedback_value
from megatron_binac.objectives.groups import against_average
from megatron_binac.objectives.situation import Situation
from megatron_binac.rollout.batch import give, rewards
from megatron_binac.types import Turn


def follower_credit(situation: Situation) -> tuple[list[Turn], dict[str, float]]:
    """grad_th L = (1+lam) E[A (grad log pi(y0|x) + grad log pi(y1|x,y0,z))], A = V - baseline."""
    trees = situation.trees
    heads = [tree.attempts[g] for tree in trees for g in tree.criticised]
    revisions = [t for tree in trees for t in tree.turns("revision")]
    reward_CFM, valid_CFM = rewards([ys for tree in trees for ys in tree.revisions])
    value_C = torch.where(valid_CFM, reward_CFM, 0.0).sum((-2, -1))
    value_C = value_C / valid_CFM.sum((-2, -1)).clamp(min=1)
    has_C = valid_CFM.any(-1).any(-1)
    factor = 1.0 + situation.config.bilevel.lam
    old = float(situation.memory.get("baseline/follower", 0.0))
    credit_C, trainable_C, log = against_average(situation, "follower", value_C, has_C)
    credit_CFM = torch.where(valid_CFM, reward_CFM - old, 0.0)
    failed_C = torch.tensor([t.failed for t in heads], dtype=torch.bool)
    give(heads, factor * credit_C, trainable_C & ~failed_C)
    give(revisions, factor * credit_CFM, valid_CFM)
    num_failed = float(failed_C.sum() + (~valid_CFM).sum())
    return heads + revisions, {**log, "num_failed": num_failed}


def leader_credit(situation: Situation) -> tuple[list[Turn], dict[str, float]]:
    """grad_ph L = E[(1+lam) A grad log mu] - E*[lam A* grad log mu], a baseline for each actor."""
    trees = situation.trees
    turns = [z for tree in trees for zs in tree.feedbacks for z in zs]
    lam = situation.config.bilevel.lam
    V_CF, valid_CF = _value([ys for tree in trees for ys in tree.revisions])
    valid_CF &= torch.tensor([not z.failed for z in turns], dtype=torch.bool).view_as(valid_CF)
    gap = 0.0
    star_CF = None
    if lam != 0.0:
        star_CF, star_valid_CF = _value([ys for tree in trees for ys in tree.probes])
        valid_CF &= star_valid_CF
        gap = float((star_CF - V_CF)[valid_CF].mean()) if valid_CF.any() else float("nan")
    flat = valid_CF.flatten()
    credit, trainable, log = against_average(situation, "leader", V_CF.flatten(), flat)
    credit = (1.0 + lam) * credit
    if star_CF is not None:
        star, _, more = against_average(situation, "leader_star", star_CF.flatten(), flat)
        credit, log = credit - lam * star, log | more
    give(turns, credit, trainable)
    value = float(V_CF[valid_CF].mean()) if valid_CF.any() else float("nan")
    return turns, {**log, "value": value, "gap": gap}


def _value(turns_CFM: list[list[list[Turn]]]) -> tuple[torch.Tensor, torch.Tensor]:
    reward_CFM, valid_CFM = rewards(turns_CFM)
    V_CF = feedback_value(reward_CFM, valid_CFM)
    valid_CF = valid_CFM.any(-1)
    return torch.where(valid_CF, V_CF, 0.0), valid_CF
