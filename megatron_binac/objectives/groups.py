"""Attempts alone: among their siblings (GRPO and its kin), or against a moving average.

N attempts over all trees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_binac.algo import advantages, metrics
from megatron_binac.objectives.situation import Situation
from megatron_binac.rollout.batch import give
from megatron_binac.types import Turn

SCALES = {
    "mean": advantages.mean_centered,
    "leave_one_out": advantages.leave_one_out,
    "std": advantages.std_normalized,
    "mean_normalized": advantages.mean_normalized,
}


def read_attempts(situation: Situation) -> tuple[list[Turn], Tensor, Tensor, Tensor]:
    """Attempts of the first round; reward (overlong ones punished), group, validity [N]."""
    trees = [tree for tree in situation.trees if tree.round == 0]
    attempts = [t for tree in trees for t in tree.attempts]
    reward_N = torch.tensor([t.reward for t in attempts], dtype=torch.float64)
    rollout = situation.config.rollout
    if rollout.overlong_buffer:
        length_N = torch.tensor([len(t.ids) for t in attempts])
        reward_N = reward_N + advantages.overlong_penalty(
            length_N, rollout.max_attempt_tokens, rollout.overlong_buffer
        )
    group_N = torch.repeat_interleave(
        torch.arange(len(trees)), torch.tensor([len(tree.attempts) for tree in trees])
    )
    valid_N = torch.tensor([not t.failed for t in attempts])
    return attempts, reward_N, group_N, valid_N


def group_credit(situation: Situation) -> tuple[list[Turn], dict[str, float]]:
    """Attempts compared with the attempts of their prompt.

    Source: GRPO, arXiv 2402.03300; Dr. GRPO, 2503.20783; RLOO, 2402.14740; MaxRL, 2602.02710.
    """
    attempts, reward_N, group_N, valid_N = read_attempts(situation)
    credit_N, trainable_N = SCALES[situation.config.credit.scale](reward_N, group_N, valid_N)
    give(attempts, credit_N, trainable_N)
    stats = advantages.group_stats(reward_N, group_N, valid_N)
    return attempts, {
        "collapsed_groups": metrics.collapse_share(
            stats.num_groups, stats.num_singleton, stats.num_collapsed
        ),
        "num_failed": float(stats.num_failed),
    }


def running_credit(situation: Situation) -> tuple[list[Turn], dict[str, float]]:
    """Attempts against the moving average of earlier steps.

    Source: Williams 1992, reinforcement comparison.
    """
    attempts, reward_N, _, valid_N = read_attempts(situation)
    credit_N, trainable_N, log = against_average(situation, "attempt", reward_N, valid_N)
    give(attempts, credit_N, trainable_N)
    return attempts, {**log, "num_failed": float((~valid_N).sum())}


def against_average(
    situation: Situation, name: str, value_N: Tensor, valid_N: Tensor
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """`algo.advantages.running_baseline` with the average kept in the run's memory, from 0 on."""
    key = f"baseline/{name}"
    old = float(situation.memory.get(key, 0.0))
    credit_N, trainable_N, new = advantages.running_baseline(
        value_N, valid_N, old, situation.config.credit.momentum
    )
    situation.memory[key] = new
    return credit_N, trainable_N, {f"baseline_{name}": old}
