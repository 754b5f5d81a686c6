"""MulFeRL: only prompts without a right answer are criticised and answered again.

N attempts, R regenerated answers of a flat batch, P pairs.
"""

from __future__ import annotations

import torch

from megatron_binac.algo.advantages import mean_centered
from megatron_binac.algo.distill import contrast_advantage
from megatron_binac.objectives.groups import read_attempts
from megatron_binac.objectives.situation import Situation
from megatron_binac.rollout.batch import give, row
from megatron_binac.terms import FirstPrompt, Term
from megatron_binac.types import TrainSequence, Turn

NO_FLOOR = -1e9


def regenerated_credit(situation: Situation) -> tuple[list[Turn], dict[str, float]]:
    """Attempts among the attempts of their prompt, regenerated answers among those of their round.

    A group that was wholly solved or wholly failed has no credit here; see `contrast`.
    Source: arXiv 2601.22900.
    """
    attempts, reward_N, group_N, valid_N = read_attempts(situation)
    give(attempts, *mean_centered(reward_N, group_N, valid_N))
    answers = [(i, y) for i, t in enumerate(situation.trees) for y in t.turns("revision")]
    again = [y for _, y in answers]
    if again:
        reward_R = torch.tensor([y.reward for y in again], dtype=torch.float64)
        valid_R = torch.tensor([not y.failed for y in again])
        give(again, *mean_centered(reward_R, torch.tensor([i for i, _ in answers]), valid_R))
    failed = float(sum(t.failed for t in attempts + again))
    log = {"num_failed": failed, "num_regenerated": float(len(again))}
    return attempts + again, log


def contrast(situation: Situation) -> tuple[list[Term], dict[str, float]]:
    """Wholly solved rounds against the wholly failed answers before them, both given x alone.

    The pair's gradient is put on its two answers as an advantage, so that they may lie in different
    micro-batches (`algo.distill.contrast_advantage`).
    """
    config = situation.config.contrast
    assert config is not None
    pairs: list[tuple[TrainSequence, TrainSequence]] = []
    for tree in situation.trees:
        answers = tree.turns("revision")
        if not answers or any(y.failed or y.reward < 1.0 for y in answers):
            continue
        first = situation.first_prompt(tree)
        for c, g in enumerate(tree.criticised):
            wrong = tree.attempts[g]
            pairs += [
                (row(first, y.ids), row(first, wrong.ids))
                for ys in tree.revisions[c]
                for y in ys
                if len(y.ids) and len(wrong.ids) and not wrong.failed
            ]
    if not pairs:
        return [], {"contrast/num_pairs": 0.0}
    both = [side for pair in pairs for side in pair]
    score = torch.tensor([float(v.sum()) for v in situation.actor.logprobs(both)])
    solved_P, failed_P = score[0::2].double(), score[1::2].double()
    valid_P = torch.ones_like(solved_P, dtype=torch.bool)
    credit_P = contrast_advantage(solved_P, failed_P, valid_P, config.tau, config.margin)
    rows = [
        TrainSequence(ids=side.ids, mask=side.mask, advantage=sign * float(credit))
        for pair, credit in zip(pairs, credit_P, strict=True)
        for side, sign in zip(pair, (1.0, -1.0), strict=True)
    ]
    term = Term(
        name="contrast",
        rows=rows,
        loss=FirstPrompt(floor=NO_FLOOR),
        coef=config.coef,
        denominator=float(len(pairs)),
    )
    wins = float((solved_P > failed_P).double().mean())
    return [term], {"contrast/num_pairs": float(len(pairs)), "contrast/wins": wins}
