"""Credit for every turn of the trees, and the turns as token sequences to learn from.

Sampled ids go into the batch as they are: nothing is made again from text. Shapes: N attempts over
all trees, C criticised attempts over all trees, F feedbacks of each, M revisions of each feedback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_binac.algo import bilevel, metrics
from megatron_binac.algo.advantages import group_stats
from megatron_binac.config import BilevelConfig
from megatron_binac.tasks.base import Task
from megatron_binac.types import TrainSequence, Tree, Turn


def rewards(turns_CFM: list[list[list[Turn]]]) -> tuple[Tensor, Tensor]:
    """Rewards and validity [C, F, M]."""
    reward = [[[t.reward for t in ys] for ys in zs] for zs in turns_CFM]
    valid = [[[not t.failed for t in ys] for ys in zs] for zs in turns_CFM]
    return torch.tensor(reward, dtype=torch.float64), torch.tensor(valid, dtype=torch.bool)


def give(turns: Sequence[Turn], credit: Tensor, trainable: Tensor) -> None:
    """Put each turn's credit, and whether it is learned from, where the loss finds it."""
    values, uses = credit.flatten().tolist(), trainable.flatten().tolist()
    for turn, value, use in zip(turns, values, uses, strict=True):
        turn.advantage, turn.trainable = value, use


def _criticised(trees: Sequence[Tree]) -> tuple[list[Turn], Tensor]:
    """The criticised attempts over all trees, and their weights [C] back to the natural mix."""
    attempts = [tree.attempts[g] for tree in trees for g in tree.criticised]
    return attempts, torch.tensor([w for tree in trees for w in tree.weights], dtype=torch.float64)


def actor_turns(
    trees: Sequence[Tree], config: BilevelConfig
) -> tuple[list[Turn], dict[str, float]]:
    """Attempts and revisions with their credit (Bi-NAC eq. 3), and what is logged about it.

    A revision is compared with all revisions of its attempt, an attempt with the attempts of its
    prompt.
    """
    attempts = [t for tree in trees for t in tree.attempts]
    group_N = torch.repeat_interleave(
        torch.arange(len(trees)), torch.tensor([len(tree.attempts) for tree in trees])
    )
    reward_N = torch.tensor([t.reward for t in attempts], dtype=torch.float64)
    valid_N = torch.tensor([not t.failed for t in attempts])
    value_N = torch.zeros(len(attempts), dtype=torch.float64)
    followed_N = torch.zeros(len(attempts), dtype=torch.bool)
    weight_N = torch.ones(len(attempts), dtype=torch.float64)
    revised = [ys for tree in trees for ys in tree.revisions]
    revisions: list[Turn] = []
    if revised:
        reward_CFM, valid_CFM = rewards(revised)
        heads, weight_C = _criticised(trees)
        start = np.cumsum([0, *(len(tree.attempts) for tree in trees)])
        at_C = torch.tensor(
            [int(start[i]) + g for i, tree in enumerate(trees) for g in tree.criticised]
        )
        value_CF = bilevel.feedback_value(reward_CFM, valid_CFM)
        has_CF = valid_CFM.any(-1)
        mean_C = torch.where(has_CF, value_CF, 0.0).sum(-1) / has_CF.sum(-1).clamp(min=1)
        value_N[at_C], followed_N[at_C], weight_N[at_C] = mean_C, has_CF.any(-1), weight_C
        credit, trainable = bilevel.revision_credit(
            reward_CFM,
            valid_CFM,
            torch.tensor([t.reward for t in heads], dtype=torch.float64),
            torch.tensor([not t.failed for t in heads]),
            config.improvement_weight,
        )
        revisions = [t for zs in revised for ys in zs for t in ys]
        give(revisions, credit * weight_C[:, None, None], trainable)
    credit, trainable = bilevel.attempt_credit(
        reward_N,
        group_N,
        valid_N,
        value_N,
        followed_N,
        w0=config.attempt_weight,
        g=config.attempt_value_weight if revised else 0.0,
        weight_N=weight_N,
    )
    give(attempts, credit, trainable)
    stats = group_stats(reward_N, group_N, valid_N)
    log = {
        "collapsed_groups": metrics.collapse_share(
            stats.num_groups, stats.num_singleton, stats.num_collapsed
        ),
        "num_failed": float(sum(t.failed for t in attempts + revisions)),
    }
    return attempts + revisions, log


def critic_turns(
    trees: Sequence[Tree],
    config: BilevelConfig,
    task: Task,
    *,
    heads: tuple[Tensor, Tensor] | None = None,
) -> tuple[list[Turn], dict[str, float]]:
    """Feedbacks with their credit (Bi-NAC eq. 4), leave-one-out over siblings, and what is logged.

    U = (1 + lam) V - lam V* + b_dis r_dis - b_leak leak, V over the revisions, V* over the probes.
    With `heads`, V and V^k [C, F] of a value head, U = V + lam (V_head - V^k) + ... (MLMT-RL).
    """
    attempts, weight_C = _criticised(trees)
    feedbacks_CF = [zs for tree in trees for zs in tree.feedbacks]
    turns = [z for zs in feedbacks_CF for z in zs]
    if not turns:
        return [], {}
    reward_CFM, valid_CFM = rewards([ys for tree in trees for ys in tree.revisions])
    V_CF = bilevel.feedback_value(reward_CFM, valid_CFM)
    ok_CF = valid_CFM.any(-1) & torch.tensor([[not z.failed for z in zs] for zs in feedbacks_CF])
    V_star_CF = None
    if config.lam != 0.0 and heads is not None:
        V_star_CF = V_CF - heads[0] + heads[1]
    elif config.lam != 0.0:
        probe_CFM, probe_valid_CFM = rewards([ys for tree in trees for ys in tree.probes])
        V_star_CF = bilevel.feedback_value(probe_CFM, probe_valid_CFM)
        ok_CF &= probe_valid_CFM.any(-1)
    right_C = torch.tensor([t.reward for t in attempts], dtype=torch.float64)
    verdict_CF, leak_CF = _judge_words(trees, task)
    agrees_CF = metrics.discrimination(verdict_CF, right_C[:, None].expand_as(V_CF)).double()
    weight = config.value_weight
    utility_CF = bilevel.leader_utility(
        weight * V_CF,
        None if V_star_CF is None else weight * V_star_CF,
        config.lam,
        agrees_CF,
        leak_CF.double(),
        config.discrimination_coef,
        config.leak_coef,
    )
    credit, trainable = bilevel.leader_credit(utility_CF, ok_CF, weight_C)
    give(turns, credit, trainable)
    return turns, {
        "acc_dis": metrics.rate(agrees_CF.flatten(), ok_CF.flatten()),
        "leak": metrics.rate(leak_CF.flatten(), ok_CF.flatten()),
        "value": _mean(V_CF, ok_CF),
        "value_wrong": _mean(V_CF, ok_CF & (right_C < 1.0)[:, None]),
        "value_right": _mean(V_CF, ok_CF & (right_C >= 1.0)[:, None]),
        "gap": 0.0 if V_star_CF is None else _mean(V_star_CF - V_CF, ok_CF),
        "trainable": _mean(trainable.double(), ok_CF),
        "accepts": _mean((verdict_CF == 1).double(), ok_CF),
    }


def _judge_words(trees: Sequence[Tree], task: Task) -> tuple[Tensor, Tensor]:
    """What each feedback says of its attempt (1 right, 0 wrong, -1 nothing) and whether it leaks,
    [C, F]."""
    said = {None: -1, False: 0, True: 1}
    verdict, leak = [], []
    for tree in trees:
        for c, g in enumerate(tree.criticised):
            verdict.append([said[task.verdict(z.text)] for z in tree.feedbacks[c]])
            leak.append(
                [task.leaks(tree.prompt, tree.attempts[g].text, z.text) for z in tree.feedbacks[c]]
            )
    return torch.tensor(verdict), torch.tensor(leak, dtype=torch.bool)


def _mean(value: Tensor, mask: Tensor) -> float:
    return float(value[mask].double().mean()) if mask.any() else float("nan")


def sequences(
    turns: Sequence[Turn], keep: Callable[[Turn], bool] | None = None
) -> list[TrainSequence]:
    """The trainable turns as rows of context and sampled ids; the mask covers exactly what was
    sampled."""
    return [
        row(turn.prompt_ids, turn.ids, turn=turn)
        for turn in turns
        if turn.trainable and len(turn.ids) and (keep is None or keep(turn))
    ]


def row(
    prompt_ids: np.ndarray,
    ids: np.ndarray,
    *,
    turn: Turn | None = None,
    advantage: float | None = None,
    with_logprobs: bool = True,
) -> TrainSequence:
    """Sampled ids after a context, which may be another than the one they were sampled under.

    With `turn` the row gets its credit, and the engine's log-probs unless the context differs
    (`with_logprobs` False).
    """
    start = len(prompt_ids)
    tokens = np.concatenate([prompt_ids, ids], dtype=np.int32, casting="same_kind")
    mask = np.zeros(len(tokens), np.bool_)
    mask[start:] = True
    logprobs = None
    credit: float | np.ndarray = 1.0
    if turn is not None:
        credit = turn.advantage
        if turn.token_advantages is not None:
            credit = np.zeros(len(tokens), np.float32)
            credit[start:] = turn.token_advantages
        if with_logprobs:
            logprobs = np.empty(len(tokens), np.float32)
            logprobs[:start], logprobs[start:] = np.nan, turn.logprobs
    return TrainSequence(
        ids=tokens,
        mask=mask,
        advantage=credit if advantage is None else advantage,
        logprobs=logprobs,
    )
