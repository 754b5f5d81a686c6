"""What feedback brought, learned as answers to the problem alone, and the feedback itself.

J attempts, N revisions of a flat batch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from megatron_binac.algo.advantages import mean_centered
from megatron_binac.algo.distill import linear_ramp, rltf_sd_advantage
from megatron_binac.objectives.groups import read_attempts
from megatron_binac.objectives.situation import Situation
from megatron_binac.rollout.batch import give, row, sequences
from megatron_binac.terms import CrossEntropy, Distill, FirstPrompt, Shaped, Term
from megatron_binac.types import TrainSequence, Turn


def self_distill(situation: Situation) -> tuple[list[Term], dict[str, float]]:
    """RLTF-SD: revisions under the first prompt, paid by R(y1) less the mean reward of attempts.

    Source: arXiv 2602.02482, section 4.1.
    """
    config = situation.config.self_distill
    assert config is not None
    _, reward0_J, group0_J, valid0_J = read_attempts(situation)
    revisions, group1, rows = _under_first_prompt(situation)
    if not rows:
        return [], {}
    advantage_N, trainable_N = rltf_sd_advantage(
        torch.tensor([y.reward for y in revisions], dtype=torch.float64),
        torch.tensor(group1),
        torch.tensor([not y.failed for y in revisions]),
        reward0_J,
        group0_J,
        valid0_J,
    )
    kept = [
        row(at, y.ids, advantage=float(a))
        for at, y, a, use in zip(rows, revisions, advantage_N, trainable_N, strict=True)
        if use and len(y.ids)
    ]
    coef = config.coef
    if config.ramp_steps:
        coef = linear_ramp(situation.step, config.ramp_steps, config.coef)
    term = Term(name="sd", rows=kept, loss=FirstPrompt(floor=config.floor), coef=coef)
    return [term], {"sd/coef": coef, "sd/num_rows": float(len(kept))}


def union_credit(situation: Situation) -> tuple[list[Turn], dict[str, float]]:
    """Critique-GRPO: R less the mean of attempts and revisions of the prompt together.

    The revisions get their credit here and are learned from by `shaped`; the attempts come back.
    Source: arXiv 2506.03106, eq. 5.
    """
    attempts, reward0_J, group0_J, valid0_J = read_attempts(situation)
    revisions, group1, _ = _under_first_prompt(situation)
    reward1 = torch.tensor([y.reward for y in revisions], dtype=torch.float64)
    valid1 = torch.tensor([not y.failed for y in revisions], dtype=torch.bool)
    credit, trainable = mean_centered(
        torch.cat([reward0_J, reward1]),
        torch.cat([group0_J, torch.tensor(group1, dtype=group0_J.dtype)]),
        torch.cat([valid0_J, valid1]),
    )
    give([*attempts, *revisions], credit, trainable)
    return attempts, {"num_failed": float((~valid0_J).sum() + (~valid1).sum())}


def shaped(situation: Situation) -> tuple[list[Term], dict[str, float]]:
    """Critique-GRPO's revisions as answers to the problem alone, weighted p / (p + gamma)."""
    config = situation.config.shaped
    assert config is not None
    revisions, _, rows = _under_first_prompt(situation)
    kept = [
        row(at, y.ids, advantage=y.advantage)
        for at, y in zip(rows, revisions, strict=True)
        if y.trainable and len(y.ids)
    ]
    term = Term(name="shaped", rows=kept, loss=Shaped(gamma=config.gamma))
    return [term], {"shaped/num_rows": float(len(kept))}


def feedback_model(situation: Situation) -> tuple[list[Term], dict[str, float]]:
    """RLTF-FM: cross entropy of the feedback given problem and attempt, in the actor.

    Source: arXiv 2602.02482, section 4.2.
    """
    config = situation.config.feedback_model
    assert config is not None
    feedbacks = [z for tree in situation.trees for z in tree.turns("feedback")]
    rows = [row(z.prompt_ids, z.ids) for z in feedbacks if not z.failed and len(z.ids)]
    return [Term(name="fm", rows=rows, loss=CrossEntropy(), coef=config.coef)], {}


def teacher(situation: Situation) -> tuple[list[Term], dict[str, float]]:
    """SDPO: each token of an attempt is pulled towards what the policy says of it after feedback.

    The teacher reads problem, attempt and feedback, and then the same attempt token by token.
    Source: arXiv 2601.20802.
    """
    config = situation.config.teacher
    assert config is not None
    students: list[TrainSequence] = []
    teachers: list[TrainSequence] = []
    players = situation.players
    for tree in situation.trees:
        for c, g in enumerate(tree.criticised):
            attempt = tree.attempts[g]
            for feedback in tree.feedbacks[c]:
                if attempt.failed or feedback.failed or not len(attempt.ids):
                    continue
                context = players.template.revision_ids(
                    tree.prompt, players.spoken(attempt.ids), players.spoken(feedback.ids)
                )
                students.append(row(attempt.prompt_ids, attempt.ids, turn=attempt))
                teachers.append(row(np.asarray(context, np.int32), attempt.ids))
    loss = Distill(
        alpha=config.alpha,
        top_k=config.top_k,
        ratio_clip=config.ratio_clip,
        trust_region=config.trust_region,
    )
    term = Term(name="teacher", rows=students, loss=loss, coef=config.coef, teacher=teachers)
    return [term], {"teacher/num_rows": float(len(students))}


def kl_on_attempts(situation: Situation) -> tuple[list[Term], dict[str, float]]:
    """SCoRe: attempts in a term of their own, whose KL to the reference may be heavier.

    Every attempt that did not fail is held, also one without credit. Source: arXiv 2409.12917,
    eqs. 3 and 4.
    """
    config = situation.config
    assert config.credit.attempt_kl_coef is not None
    attempts = [t for tree in situation.trees for t in tree.attempts if not t.failed]
    for attempt in attempts:
        if not attempt.trainable:
            attempt.advantage, attempt.trainable = 0.0, True
    rows = sequences(attempts)
    loss = dataclasses.replace(config.actor.loss, kl_coef=config.credit.attempt_kl_coef)
    return [Term(name="attempt", rows=rows, loss=loss)], {}


def _under_first_prompt(
    situation: Situation,
) -> tuple[list[Turn], list[int], list[np.ndarray]]:
    """Every revision, the number of its tree, and the prompt of an answer to its problem alone."""
    revisions: list[Turn] = []
    group: list[int] = []
    prompts: list[np.ndarray] = []
    for number, tree in enumerate(situation.trees):
        answers = tree.turns("revision")
        first = situation.first_prompt(tree) if answers else None
        for answer in answers:
            assert first is not None
            revisions.append(answer)
            group.append(number)
            prompts.append(first)
    return revisions, group, prompts
