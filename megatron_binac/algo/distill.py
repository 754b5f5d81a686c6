"""Terms that move what feedback brought into the single-turn policy; token credit from spans.

Shapes: T packed tokens, S packed sequences, N revisions and J attempts of a flat batch, P pairs of
answers, K candidate ids of a token, V vocabulary.

RLTF-FM needs nothing of its own: it is `losses.nll_loss` on the critique's tokens given (x, y) and
a "write a critique" prompt, with coefficient 0.1. Losses return sums with statistics as in
`losses`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_LOG_RATIO = 20.0
# exp(-60) is 1e-26: below, a probability is 0 for any divergence, and 0 * inf has to be kept out.
_MIN_LOGPROB = -60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SdpoConfig:
    """Which divergence `sdpo_loss` takes.

    Example: ``SdpoConfig(alpha=0.5, ratio_clip=2.0)``
    """

    alpha: float = 0.5
    """0: KL(teacher || student); 1: KL(student || teacher); between: Jensen-Shannon."""
    ratio_clip: float | None = 2.0
    """Cap of the weight pi(y_t) / pi_old(y_t) of a token; None for no weight."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"got alpha {self.alpha}; expected a number from 0 to 1")
        if self.ratio_clip is not None and self.ratio_clip <= 0.0:
            raise ValueError(f"got ratio_clip {self.ratio_clip}; expected above 0, or None")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanAlignment:
    """Where a critic's quotes lie in an answer.

    Example: ``SpanAlignment(delta=[0, 1, 1, -1], num_aligned=2, num_dropped=1, num_repeated=0,
    num_conflicts=0)``
    """

    delta: list[int]
    """One of +1, -1, 0 for each token of the answer."""
    num_aligned: int
    """Quotes found in the answer and covering at least one token."""
    num_dropped: int
    """Quotes that are empty or not an exact substring of the answer."""
    num_repeated: int
    """Aligned quotes that occur more than once; the first occurrence was taken."""
    num_conflicts: int
    """Tokens quoted as good and as poor; they get 0."""


def linear_ramp(step: int, num_steps: int, end: float, start: float = 0.0) -> float:
    """Coefficient that goes from start to end over num_steps and stays there.

    Raises: ValueError for num_steps < 1.
    Source: RLTF, arXiv 2602.02482: coefficient of SD 0 -> 0.1.
    """
    if num_steps < 1:
        raise ValueError(f"got num_steps {num_steps}; expected at least 1")
    return start + (end - start) * min(max(step / num_steps, 0.0), 1.0)


def rltf_sd_advantage(
    reward1_N: Tensor,
    group1_N: Tensor,
    valid1_N: Tensor,
    reward0_J: Tensor,
    group0_J: Tensor,
    valid0_J: Tensor,
) -> tuple[Tensor, Tensor]:
    """Advantage of a revision as an answer to x alone: R(y1) minus the mean reward of ATTEMPTS.

    Args: rewards, group ids (one per prompt), validity of revisions [N] and of attempts [J].
    Returns advantage [N], trainable [N]: 0 and False where the revision failed or no attempt is
    valid, and where the advantage is 0. The first-turn baseline is the point: a revision is worth
    imitating by as much as it beats what the policy does without feedback.
    Source: RLTF-SD, arXiv 2602.02482: A0(y1) = R(x0, y1) - mean_j R(x0, y0_j).
    """
    _, index = torch.unique(torch.cat([group0_J, group1_N]), return_inverse=True)
    index_J, index_N = index[: group0_J.numel()], index[group0_J.numel() :]
    num = int(index.max()) + 1 if index.numel() else 0
    first_J = torch.where(valid0_J, reward0_J.detach().double(), 0.0)
    sum_K = first_J.new_zeros(num).index_add_(0, index_J, first_J)
    count_K = first_J.new_zeros(num).index_add_(0, index_J, valid0_J.double())
    baseline_N = (sum_K / count_K.clamp(min=1))[index_N]
    usable_N = valid1_N & (count_K[index_N] > 0)
    advantage_N = torch.where(usable_N, reward1_N.detach().double() - baseline_N, 0.0)
    return advantage_N.to(reward1_N.dtype), usable_N & (advantage_N != 0.0)


def rltf_sd_loss(
    logprob_T: Tensor, advantage_T: Tensor, mask_T: Tensor, floor: float = -5.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient on revisions under the FIRST prompt, without an importance ratio, summed.

    Args: log pi(y1_t | x0, y1_<t) [T], advantage [T], mask [T] bool. Tokens with a log-prob below
    the floor are left out: y1 was sampled under another prompt, and what the first prompt finds
    all but impossible would dominate the gradient.
    Returns the sum and sd_sum, sd_floor_count, num_tokens (those under the mask).
    Source: RLTF-SD, arXiv 2602.02482; floor -5, coefficient 0.1 or a ramp to it.
    """
    keep_T = mask_T & (logprob_T.detach() >= floor)
    loss_T = -torch.where(keep_T, advantage_T.detach(), 0.0) * torch.where(keep_T, logprob_T, 0.0)
    stats = {
        "num_tokens": mask_T.sum(),
        "sd_sum": loss_T.detach().sum(),
        "sd_floor_count": (mask_T & ~keep_T).sum(),
    }
    return loss_T.sum(), stats


def topk_divergence(student_TK: Tensor, teacher_TK: Tensor, alpha: float) -> Tensor:
    """Divergence per token of student and teacher on K candidate ids and one bucket for the rest.

    Args: log-probs [T, K] of the SAME ids under both, normalised over the whole vocabulary; the
    ids are the student's top K. The teacher carries no gradient. Returns [T], with the gradient of
    the student through the tail as well. With K = V the bucket is empty and the value exact.
    Source: SDPO, arXiv 2601.20802; generalised Jensen-Shannon: GKD, arXiv 2306.13649, eq. 1.
    """
    student_TK, teacher_TK = _with_tail(student_TK), _with_tail(teacher_TK.detach())
    student_prob_TK, teacher_prob_TK = student_TK.exp(), teacher_TK.exp()
    if alpha == 0.0:
        return (teacher_prob_TK * (teacher_TK - student_TK)).sum(-1)
    if alpha == 1.0:
        return (student_prob_TK * (student_TK - teacher_TK)).sum(-1)
    mixture_TK = ((1.0 - alpha) * student_prob_TK + alpha * teacher_prob_TK).log()
    to_teacher_T = (teacher_prob_TK * (teacher_TK - mixture_TK)).sum(-1)
    to_student_T = (student_prob_TK * (student_TK - mixture_TK)).sum(-1)
    return alpha * to_teacher_T + (1.0 - alpha) * to_student_T


def sdpo_loss(
    student_TK: Tensor,
    teacher_TK: Tensor,
    mask_T: Tensor,
    cfg: SdpoConfig,
    *,
    logprob_T: Tensor | None = None,
    old_logprob_T: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Distil the policy that has read the feedback into the one that has not, summed over tokens.

    Args: log-probs [T, K] as in `topk_divergence`, student given x, teacher given x and feedback,
    both along the student's own sample; mask [T] bool; log-probs [T] of the sampled id now and at
    sampling time, needed for ratio_clip.
    Returns the sum and divergence_sum, distill_clip_count, num_tokens.
    Raises: ValueError when ratio_clip has no log-probs to act on.
    Source: SDPO, arXiv 2601.20802.
    """
    rows_T1 = mask_T.unsqueeze(-1)
    student_TK = torch.where(rows_T1, student_TK, _MIN_LOGPROB)
    teacher_TK = torch.where(rows_T1, teacher_TK, _MIN_LOGPROB)
    divergence_T = topk_divergence(student_TK, teacher_TK, cfg.alpha)
    return weigh_divergence(
        torch.where(mask_T, divergence_T, 0.0), mask_T, cfg.ratio_clip, logprob_T, old_logprob_T
    )


def weigh_divergence(
    divergence_T: Tensor,
    mask_T: Tensor,
    ratio_clip: float | None,
    logprob_T: Tensor | None = None,
    old_logprob_T: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of token divergences, each by its capped importance weight.

    Args: divergence [T], 0 where masked, with gradient; the rest as in `sdpo_loss`.
    Raises: ValueError when ratio_clip has no log-probs to act on.
    """
    stats = {"num_tokens": mask_T.sum(), "divergence_sum": divergence_T.detach().sum()}
    if ratio_clip is None:
        return divergence_T.sum(), stats
    if logprob_T is None or old_logprob_T is None:
        raise ValueError(
            f"got ratio_clip {ratio_clip} and no log-probs; expected logprob_T and "
            "old_logprob_T of the sampled ids: pass them, or set ratio_clip=None"
        )
    log_ratio_T = torch.where(mask_T, logprob_T.detach() - old_logprob_T.detach(), 0.0)
    ratio_T = log_ratio_T.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    stats["distill_clip_count"] = (mask_T & (ratio_T > ratio_clip)).sum()
    return (ratio_T.clamp(max=ratio_clip) * divergence_T).sum(), stats


def trust_region_logprob(teacher_TV: Tensor, anchor_TV: Tensor, mix: float) -> Tensor:
    """Teacher held near an anchor: proportional to teacher^(1-mix) * anchor^mix, as log-probs.

    Args: log-probs [T, V] over the whole vocabulary, mix from 0 (teacher) to 1 (anchor).
    Raises: ValueError for a mix outside [0, 1].
    Source: SDPO, arXiv 2601.20802, trust-region teacher; the other choice there is an EMA.
    """
    if not 0.0 <= mix <= 1.0:
        raise ValueError(f"got mix {mix}; expected a number from 0 to 1")
    return torch.log_softmax((1.0 - mix) * teacher_TV + mix * anchor_TV, dim=-1)


def critique_grpo_loss(
    logprob_T: Tensor, advantage_T: Tensor, mask_T: Tensor, gamma: float = 0.1
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient on revisions as answers to x alone, shaped by f(p) = p / (p + gamma), summed.

    Args: log p of the revision's tokens given x [T], advantage [T] (reward minus the mean of the
    union of attempts and revisions: `advantages.mean_centered` with one group for both), mask [T].
    f stands in the place of the importance ratio and carries the gradient, which is
    f'(p) p = gamma p / (p + gamma)^2: largest at p = gamma, so unfamiliar tokens count most.
    Returns the sum and shaping_sum, policy_sum, num_tokens.
    Source: Critique-GRPO, arXiv 2506.03106, policy shaping; gamma 0.1.
    """
    prob_T = torch.where(mask_T, logprob_T, 0.0).exp()
    shaping_T = prob_T / (prob_T + gamma)
    loss_T = -torch.where(mask_T, advantage_T.detach(), 0.0) * shaping_T
    stats = {
        "num_tokens": mask_T.sum(),
        "policy_sum": loss_T.detach().sum(),
        "shaping_sum": torch.where(mask_T, shaping_T.detach(), 0.0).sum(),
    }
    return loss_T.sum(), stats


def contrast_loss(
    solved_P: Tensor, failed_P: Tensor, valid_P: Tensor, tau: float = 0.005, margin: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Prefer answers of a turn that feedback solved to those of the failed turn before it, summed.

    Args: log pi(y | x) of whole answers [P] in pairs, relative to a frozen reference where the
    caller has subtracted one; valid [P] bool. Pairs come from a group that failed as a whole and
    whose regeneration was solved as a whole; mixed groups are for `advantages.mean_centered`.
    Returns the sum over pairs of -log sigmoid(tau (solved - failed) - margin) and contrast_sum,
    contrast_win_count, num_pairs.
    Source: MulFeRL, arXiv 2601.22900, cross-turn term; weight 0.01 and tau 0.005 of its public
    settings. Whether a reference is subtracted is left open there.
    """
    gap_P = torch.where(valid_P, tau * (solved_P - failed_P) - margin, 0.0)
    loss_P = torch.where(valid_P, -F.logsigmoid(gap_P), 0.0)
    stats = {
        "num_pairs": valid_P.sum(),
        "contrast_sum": loss_P.detach().sum(),
        "contrast_win_count": (valid_P & (gap_P > 0)).sum(),
    }
    return loss_P.sum(), stats


def contrast_advantage(
    solved_P: Tensor, failed_P: Tensor, valid_P: Tensor, tau: float = 0.005, margin: float = 0.0
) -> Tensor:
    """Advantage [P] with which plain policy gradient on single answers follows `contrast_loss`.

    A pair may lie in two micro-batches, which a loss over pairs does not allow. Its gradient is
    tau * sigmoid(margin - tau (solved - failed)) on every token of the solved answer, and minus
    that on the failed one: computed once from sampling-time log-probs, it needs no pairs later.
    Source: derivative of `contrast_loss`.
    """
    gap_P = torch.where(valid_P, tau * (solved_P - failed_P) - margin, 0.0).detach()
    return torch.where(valid_P, tau * torch.sigmoid(-gap_P), 0.0)


def align_spans(
    answer: str, quotes: Sequence[tuple[str, int]], offsets: Sequence[tuple[int, int]]
) -> SpanAlignment:
    """Put signs on the tokens that a critic has quoted.

    Args: the answer's text; quotes with +1 (good) or -1 (poor); [start, end) character offsets of
    each token in the answer, empty for special tokens. A quote must be an exact substring, else it
    is dropped and counted, for guessing where it was meant would reward the wrong tokens. A token
    belongs to a quote when they share a character.
    Raises: ValueError for a sign other than +1 or -1.
    Source: Text2Grad, arXiv 2505.22338, token-level pseudo-reward.
    """
    good, poor = [False] * len(offsets), [False] * len(offsets)
    num_aligned = num_dropped = num_repeated = 0
    for quote, sign in quotes:
        if sign not in (1, -1):
            raise ValueError(f"got sign {sign} for quote {quote!r}; expected +1 or -1")
        start = answer.find(quote) if quote else -1
        stop = start + len(quote)
        covered = [i for i, (a, b) in enumerate(offsets) if start >= 0 and a < stop and start < b]
        covered = [i for i in covered if offsets[i][0] < offsets[i][1]]
        if not covered:
            num_dropped += 1
            continue
        num_aligned += 1
        num_repeated += int(answer.find(quote, start + 1) >= 0)
        marked = good if sign > 0 else poor
        for i in covered:
            marked[i] = True
    return SpanAlignment(
        delta=[int(up) - int(down) for up, down in zip(good, poor, strict=True)],
        num_aligned=num_aligned,
        num_dropped=num_dropped,
        num_repeated=num_repeated,
        num_conflicts=sum(up and down for up, down in zip(good, poor, strict=True)),
    )


def span_rewards(
    delta_T: Tensor,
    kl_T: Tensor | None,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    outcome_S: Tensor,
    *,
    kl_coef: float,
    outcome_weight: float = 1.0,
) -> Tensor:
    """Token rewards r_t = delta_t - kl_coef * KL_t, with the verifier's outcome at the last token.

    Args: delta [T] of `align_spans`, KL estimate [T], mask [T] bool of the answers' tokens,
    cu_seqlens [S+1], outcome [S] of the verifier. Returns [T] without gradient, 0 outside the mask;
    `advantages.gae` turns it into advantages.
    Raises: ValueError when kl_coef has no KL to act on.
    Source: Text2Grad, arXiv 2505.22338, reward of the span-level policy optimisation.
    """
    if kl_coef != 0.0 and kl_T is None:
        raise ValueError(
            f"got kl_coef {kl_coef} and no kl_T; expected the KL of every token: pass it, or set "
            "kl_coef=0"
        )
    reward_T = torch.where(mask_T, delta_T.detach().to(outcome_S.dtype), 0.0)
    if kl_T is not None:
        reward_T = reward_T - kl_coef * torch.where(mask_T, kl_T.detach(), 0.0)
    for row in range(cu_seqlens.numel() - 1):
        start, stop = int(cu_seqlens[row]), int(cu_seqlens[row + 1])
        trained = torch.nonzero(mask_T[start:stop])
        if trained.numel():
            last = start + int(trained[-1])
            reward_T[last] = reward_T[last] + outcome_weight * outcome_S[row].detach()
    return reward_T


def _with_tail(logprob_TK: Tensor) -> Tensor:
    """Append log(1 - sum of the K probabilities), [T, K+1]."""
    logprob_TK = logprob_TK.clamp(min=_MIN_LOGPROB)
    # Rounding may push the sum past 1; the clamp keeps the tail a number, of 1e-7.
    log_mass_T1 = torch.logsumexp(logprob_TK, dim=-1, keepdim=True).clamp(max=-1e-7)
    tail_T1 = torch.log(-torch.expm1(log_mass_T1))
    return torch.cat([logprob_TK, tail_T1], dim=-1)
