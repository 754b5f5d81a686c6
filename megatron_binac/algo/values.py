"""Value heads: targets, losses, and the credit that is read from them.

Shapes: T packed tokens, S packed sequences, C criticised attempts, F feedbacks, M revisions.

A value head here is a scalar on the actor's trunk. It is a baseline and a predictor, not the
critic: the critic of this project writes text. Losses return sums, their statistics hold
``num_values``; see `losses.finalize_stats`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def last_token_index(mask_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Where the head of each sequence is read: its last token under the mask.

    Args: mask [T] bool (the feedback's own tokens for V(x, y0, z)), cu_seqlens [S+1].
    Returns index [S] into T, and found [S] bool; the index is the sequence's first where not found.
    Source: MLMT-RL, OpenReview u1RjV99DPu: the value is read before the revision, never after it.
    """
    lengths_S = cu_seqlens.diff()
    sequence_S = torch.arange(lengths_S.numel(), device=mask_T.device)
    sequence_T = torch.repeat_interleave(sequence_S, lengths_S)
    position_T = torch.arange(mask_T.numel(), device=mask_T.device)
    position_T = torch.where(mask_T, position_T, -1)
    last_S = torch.full_like(sequence_S, -1).scatter_reduce_(0, sequence_T, position_T, "amax")
    found_S = last_S >= 0
    return torch.where(found_S, last_S, cu_seqlens[:-1].to(last_S.dtype)), found_S


def bce_value_loss(
    logit_S: Tensor, target_S: Tensor, valid_S: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Binary cross entropy of sigmoid(logit) against a Monte-Carlo reward, summed.

    Args: logit, target in [0, 1], valid [S]. The target of V(x, y0, z) is the mean reward of the
    revisions under z; the mean and its single revisions give one and the same gradient.
    Returns the sum (on the graph also when nothing is valid) and value_sum, target_sum,
    squared_error_sum, num_values.
    Raises: ValueError on a valid target outside [0, 1].
    Source: MLMT-RL, OpenReview u1RjV99DPu, value regression by BCE.
    """
    target_S = torch.where(valid_S, target_S.detach().to(logit_S.dtype), 0.0)
    if bool(((target_S < 0) | (target_S > 1)).any()):
        raise ValueError(
            f"got value targets from {float(target_S.min())} to {float(target_S.max())}; expected "
            "rewards in [0, 1]: rescale them, or use clipped_value_loss"
        )
    logit_S = torch.where(valid_S, logit_S, 0.0)
    loss_S = F.binary_cross_entropy_with_logits(logit_S, target_S, reduction="none")
    value_S = torch.where(valid_S, logit_S.detach().sigmoid(), 0.0)
    stats = {
        "num_values": valid_S.sum(),
        "value_sum": value_S.sum(),
        "target_sum": target_S.sum(),
        "squared_error_sum": (value_S - target_S).square().sum(),
    }
    return torch.where(valid_S, loss_S, 0.0).sum(), stats


def clipped_value_loss(
    value_T: Tensor,
    old_value_T: Tensor,
    return_T: Tensor,
    mask_T: Tensor,
    clip: float | None = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of token values against GAE returns, pessimistically clipped, summed.

    Args: value (with gradient), old value at sampling time, return of `advantages.gae`, mask [T];
    clip is how far a value may move from the old one before its gradient stops, None for no limit.
    Returns the sum and value_sum, target_sum, squared_error_sum, value_clip_count, num_values.
    Source: PPO's value loss as in arXiv 2005.12729, section 3; used by Text2Grad, arXiv 2505.22338.
    """
    value_T = torch.where(mask_T, value_T, 0.0)
    old_T = torch.where(mask_T, old_value_T.detach().to(value_T.dtype), 0.0)
    return_T = torch.where(mask_T, return_T.detach().to(value_T.dtype), 0.0)
    error_T = (value_T - return_T).square()
    loss_T = error_T
    clipped_count = torch.zeros_like(mask_T).sum()
    if clip is not None:
        near_T = old_T + (value_T - old_T).clamp(-clip, clip)
        bounded_T = (near_T - return_T).square()
        clipped_count = ((value_T - old_T).abs() > clip).logical_and(bounded_T > error_T).sum()
        loss_T = torch.maximum(error_T, bounded_T)
    stats = {
        "num_values": mask_T.sum(),
        "value_sum": value_T.detach().sum(),
        "target_sum": return_T.sum(),
        "squared_error_sum": error_T.detach().sum(),
        "value_clip_count": clipped_count,
    }
    return 0.5 * loss_T.sum(), stats


def mlmt_utility(reward: Tensor, value: Tensor, ahead_value: Tensor, lam: float) -> Tensor:
    """Utility of a feedback by value heads: R(y1) + lam (V - V^k), all without gradient.

    Args: reward, V and V^k of any one shape; V^k is of a copy of the head that was trained k more
    regression steps on the newest batch, and stands for the actor after its next adaptation.
    For lam > 0, V^k > V lowers the utility. Returns that shape.
    Source: MLMT-RL, OpenReview u1RjV99DPu, reward of the high level.
    """
    return reward.detach() + lam * (value.detach() - ahead_value.detach())


def mlmt_revision_advantage(
    reward_CFM: Tensor, valid_CFM: Tensor, value_CF: Tensor
) -> tuple[Tensor, Tensor]:
    """Advantage of a revision: R(y1) - V(x, y0, z).

    Args: reward, valid [..., F, M], value [..., F]. Returns advantage and trainable [..., F, M].
    Source: MLMT-RL, OpenReview u1RjV99DPu, low-level advantage.
    """
    advantage_CFM = reward_CFM.detach() - value_CF.detach().unsqueeze(-1)
    return torch.where(valid_CFM, advantage_CFM, 0.0), valid_CFM


def mlmt_attempt_advantage(
    reward_CFM: Tensor, valid_CFM: Tensor, value_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Advantage of an attempt: mean reward of its revisions minus V(x).

    Args: reward, valid [..., F, M], value [...] of the prompt. Returns advantage, trainable [...].
    The group mean in place of V(x) is `bilevel.attempt_credit` with w0 = 0, g = 1.
    Source: MLMT-RL, OpenReview u1RjV99DPu, low-level advantage.
    """
    count_C = valid_CFM.sum((-2, -1))
    sum_C = torch.where(valid_CFM, reward_CFM.detach(), 0.0).sum((-2, -1))
    advantage_C = sum_C / count_C.clamp(min=1) - value_C.detach()
    return torch.where(count_C > 0, advantage_C, 0.0), count_C > 0
