"""Two-turn policy gradients: each turn's return against the mean of its own turn index.

N attempts, R revisions of a flat batch.
"""

from __future__ import annotations

import torch

from megatron_binac.algo.advantages import mean_centered, turn_returns
from megatron_binac.objectives.groups import read_attempts
from megatron_binac.objectives.situation import Situation
from megatron_binac.rollout.batch import give
from megatron_binac.types import Turn


def two_turn_credit(situation: Situation) -> tuple[list[Turn], dict[str, float]]:
    """G0 = r0 + next_weight * r1 and G1 = r1, less the mean of that turn over the prompt's group.

    r1 of an attempt is the mean over its revisions. A chain that stopped because its attempt was
    right has no second turn and r1 = 0. Source: RLTF, arXiv 2602.02482, section 3.
    """
    attempts, reward0_N, group_N, valid_N = read_attempts(situation)
    reward1_N = torch.zeros_like(reward0_N)
    start = 0
    revisions: list[Turn] = []
    owner: list[int] = []
    for number, tree in enumerate(situation.trees):
        for c, g in enumerate(tree.criticised):
            answers = [y for ys in tree.revisions[c] for y in ys]
            judged = [y.reward for y in answers if not y.failed]
            if judged:
                reward1_N[start + g] = sum(judged) / len(judged)
            else:
                valid_N[start + g] = False  # its return is not known
            revisions += answers
            owner += [number] * len(answers)
        start += len(tree.attempts)
    return0_N, _ = turn_returns(reward0_N, reward1_N, situation.config.credit.next_weight)
    give(attempts, *mean_centered(return0_N, group_N, valid_N))
    return1_R = torch.tensor([y.reward for y in revisions], dtype=torch.float64)
    valid_R = torch.tensor([not y.failed for y in revisions], dtype=torch.bool)
    if revisions:
        give(revisions, *mean_centered(return1_R, torch.tensor(owner), valid_R))
    failed = float((~valid_N).sum() + (~valid_R).sum())
    return attempts + revisions, {"num_failed": failed, "num_second_turns": float(len(revisions))}


def progress_credit(situation: Situation) -> tuple[list[Turn], dict[str, float]]:
    """SCoRe: w0 R(y0) for the attempt, R(y1) + alpha (R(y1) - R(y0)) for the revision.

    Both less the mean of their own kind over the prompt's group; w0 and alpha are
    `bilevel.attempt_weight` and `bilevel.improvement_weight` (stage I: both 0; stage II: 1 and 10).
    A revision of a failed attempt has no progress and leaves its group where alpha counts.
    Source: arXiv 2409.12917, eqs. 3 and 4, with a group mean in the place of its baseline.
    """
    config = situation.config.bilevel
    attempts, reward0_N, group_N, valid_N = read_attempts(situation)
    give(attempts, *mean_centered(config.attempt_weight * reward0_N, group_N, valid_N))
    revisions: list[Turn] = []
    returns: list[float] = []
    valid: list[bool] = []
    owner: list[int] = []
    alpha = config.improvement_weight
    for number, tree in enumerate(situation.trees):
        for c, g in enumerate(tree.criticised):
            first = tree.attempts[g]
            for answer in (y for ys in tree.revisions[c] for y in ys):
                revisions.append(answer)
                returns.append(answer.reward + alpha * (answer.reward - first.reward))
                valid.append(not answer.failed and not (alpha and first.failed))
                owner.append(number)
    if revisions:
        return_R = torch.tensor(returns, dtype=torch.float64)
        give(revisions, *mean_centered(return_R, torch.tensor(owner), torch.tensor(valid)))
    failed = float(sum(y.failed for y in [*attempts, *revisions]))
    return attempts + revisions, {"num_failed": failed}
