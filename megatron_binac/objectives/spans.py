"""Text2Grad: the critic's quotes become rewards of tokens.

T tokens of all attempts end to end, S attempts.
Source: arXiv 2505.22338.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_binac.algo import advantages, distill, losses
from megatron_binac.algo.prompts import parse_quotes
from megatron_binac.objectives.situation import Situation
from megatron_binac.rollout.batch import row
from megatron_binac.types import TrainSequence, Tree, Turn


def span_credit(situation: Situation) -> tuple[list[Turn], dict[str, float]]:
    """r_t = delta_t - b KL_t, the outcome at the last token, advantages by GAE over the value head.

    delta comes from the first feedback on the attempt; an attempt without feedback has the outcome
    alone. The head is read before it is fitted to this step's returns.
    """
    config = situation.config.spans
    assert config is not None and situation.values is not None
    attempts, delta, log = _deltas(situation)
    rows = [row(t.prompt_ids, t.ids, turn=t) for t in attempts]
    lengths = [len(t.ids) for t in attempts]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    kl_T = None
    if config.kl_coef:
        reference_T = _flat(situation.actor.logprobs(rows, reference=True), rows)
        engine_T = torch.from_numpy(np.concatenate([t.logprobs for t in attempts]))
        kl_T = losses.kl_estimate(engine_T, reference_T, "k1")
        log["kl_reward"] = float(kl_T.mean())
    mask_T = torch.ones(int(cu_seqlens[-1]), dtype=torch.bool)
    reward_T = distill.span_rewards(
        torch.tensor([d for ds in delta for d in ds], dtype=torch.float32),
        kl_T,
        mask_T,
        cu_seqlens,
        torch.tensor([t.reward for t in attempts], dtype=torch.float32),
        kl_coef=config.kl_coef,
        outcome_weight=config.outcome_weight,
    )
    value_T = _flat(situation.values.read(rows, bounded=False), rows)
    advantage_T, return_T = advantages.gae(
        reward_T, value_T, cu_seqlens, config.gamma, config.gae_lam, mask_T
    )
    targets = []
    for turn, start, stop in zip(attempts, cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        turn.token_advantages = advantage_T[start:stop].numpy()
        turn.trainable = True
        target = np.zeros(len(turn.prompt_ids) + len(turn.ids), np.float32)
        target[len(turn.prompt_ids) :] = return_T[start:stop].numpy()
        targets.append(target)
    log |= {f"head/{k}": v for k, v in situation.values.fit(rows, targets, bounded=False).items()}
    return attempts, log


def _deltas(situation: Situation) -> tuple[list[Turn], list[list[int]], dict[str, float]]:
    """Attempts that can be learned from, the sign of each of their tokens, and the counts."""
    attempts: list[Turn] = []
    deltas: list[list[int]] = []
    count = {"quotes": 0, "dropped": 0, "conflicts": 0, "unquoted": 0}
    for tree in situation.trees:
        for g, turn in enumerate(tree.attempts):
            if turn.failed or not len(turn.ids):
                continue
            text = _words_on(tree, g)
            quotes = [] if text is None else _read(situation, text)
            found = distill.align_spans(
                turn.text, quotes, situation.players.tokenizer.offsets([int(i) for i in turn.ids])
            )
            count["quotes"] += found.num_aligned + found.num_dropped
            count["dropped"] += found.num_dropped
            count["conflicts"] += found.num_conflicts
            count["unquoted"] += text is not None and not quotes
            attempts.append(turn)
            deltas.append(found.delta)
    log = {f"span_{name}": float(value) for name, value in count.items()}
    log["span_signed"] = float(sum(d != 0 for ds in deltas for d in ds))
    return attempts, deltas, log


def _words_on(tree: Tree, g: int) -> str | None:
    if g not in tree.criticised:
        return None
    feedback = tree.feedbacks[tree.criticised.index(g)][0]
    return None if feedback.failed else feedback.text


def _read(situation: Situation, text: str) -> list[tuple[str, int]]:
    """The task's own reading of a feedback where it has one, signed quotes else."""
    spans = getattr(situation.players.task, "spans", None)
    return parse_quotes(text) if spans is None else spans(text)


def _flat(values: list[np.ndarray], rows: list[TrainSequence]) -> torch.Tensor:
    """Values of the masked tokens of all rows, end to end, [T]."""
    parts = [v[r.mask] for v, r in zip(values, rows, strict=True)]
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))
