"""Token losses: clipped policy gradient, KL estimators, supervised cross entropy.

Shapes: T packed tokens of a micro-batch, S sequences in it. Log-probs are those of the sampled
ids at the sampling temperature.

Every loss is a SUM over tokens. The caller divides by the number of trained tokens of the whole
global batch, which makes the result independent of micro-batches and ranks. Statistics are named by
how they reduce, see `merge_stats` and `finalize_stats`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_binac.algo.checks import check_borders, check_kinds

KlEstimator = Literal["k1", "k2", "k3", "k1_score"]

# exp(20) = 4.9e8 still squares in float32; no ratio beyond it means anything.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossConfig:
    """What `policy_loss` computes.

    Example: ``PolicyLossConfig(clip_high=0.28, kl_coef=0.0)`` for DAPO.
    """

    ratio: Literal["token", "sequence", "none"] = "token"
    """Token (PPO), sequence (GSPO: geometric mean over the answer) or none (REINFORCE)."""
    clip_low: float = 0.2
    """Ratio is clipped at 1 - clip_low; not used where ratio is none."""
    clip_high: float = 0.2
    """Ratio is clipped at 1 + clip_high; not used where ratio is none."""
    dual_clip: float | None = None
    """For negative advantages the loss per token is at most dual_clip * |advantage|; above 1."""
    kl_coef: float = 1e-3
    """Weight of the KL to the reference policy, per token."""
    kl_estimator: KlEstimator = "k3"
    """How the KL is estimated from the sampled token."""
    engine_is_cap: float | None = None
    """Cap of the weight pi_old(trainer) / pi(engine), that corrects for the engine's numerics."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, per token."""

    def __post_init__(self) -> None:
        if self.ratio not in ("token", "sequence", "none"):
            raise ValueError(f"got ratio {self.ratio!r}; expected 'token', 'sequence' or 'none'")
        if not 0.0 < self.clip_low < 1.0 or not 0.0 < self.clip_high < math.inf:
            raise ValueError(
                f"got clip_low {self.clip_low}, clip_high {self.clip_high}; expected 0 < clip_low "
                "< 1 and clip_high > 0: set ratio='none' for no clipping at all"
            )
        if self.dual_clip is not None and (
            not 1.0 < self.dual_clip < math.inf or self.ratio == "none"
        ):
            raise ValueError(
                f"got dual_clip {self.dual_clip} with ratio {self.ratio!r}; expected a number "
                "above 1 together with a ratio: set dual_clip=None"
            )
        if self.kl_estimator not in ("k2", "k3", "k1_score"):
            raise ValueError(
                f"got kl_estimator {self.kl_estimator!r}; expected 'k3', 'k2' or 'k1_score' (the "
                "gradient of k1 itself is 0 in expectation: it measures and does not hold)"
            )
        if not 0.0 <= self.kl_coef < math.inf or not 0.0 <= self.entropy_coef < math.inf:
            raise ValueError(
                f"got kl_coef {self.kl_coef}, entropy_coef {self.entropy_coef}; expected finite "
                "numbers, neither below 0: the signs are in the loss already"
            )
        if self.engine_is_cap is not None and not 0.0 < self.engine_is_cap < math.inf:
            raise ValueError(
                f"got engine_is_cap {self.engine_is_cap}; expected a number above 0, or None"
            )


def kl_estimate(logprob_T: Tensor, ref_logprob_T: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(pi || ref) from a token sampled by pi, with its gradient.

    Args: log-probs [T] of the sampled ids. Returns [T]. With d = log pi - log ref:
      k1        d                value unbiased; gradient 0 in expectation
      k2        d^2 / 2          value biased; gradient exact in expectation
      k3        exp(-d) - 1 + d  value unbiased, never negative; gradient that of KL(ref || pi)
      k1_score  d                value unbiased; gradient d * grad log pi, exact in expectation
    The expectation is over pi: on stale samples all four lack the importance ratio.
    Source: Schulman 2020, "Approximating KL divergence"; gradients: arXiv 2506.09477.
    """
    d_T = (logprob_T - ref_logprob_T).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if estimator == "k1":
        return d_T
    if estimator == "k2":
        return 0.5 * d_T.square()
    if estimator == "k3":
        return torch.expm1(-d_T) + d_T
    if estimator == "k1_score":
        return d_T.detach() * (1.0 + logprob_T - logprob_T.detach())
    raise ValueError(f"got KL estimator {estimator!r}; expected k1, k2, k3 or k1_score")


def policy_loss(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
    cfg: PolicyLossConfig,
    *,
    ref_logprob_T: Tensor | None = None,
    engine_logprob_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    weight_T: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy gradient with KL and entropy terms, summed over the trained tokens.

    Args:
      logprob_T, old_logprob_T, advantage_T: [T]; only logprob_T carries a gradient.
      mask_T: [T] bool, True on sampled tokens that are trained. Nothing is read where False.
      ref_logprob_T: [T] frozen reference; needed when kl_coef > 0, measured when given.
      engine_logprob_T: [T] as sampled; needed for engine_is_cap, measured when given. Where it is
        not finite the token leaves the loss and is counted in num_dropped.
      entropy_T: [T] of the full distribution; needed when entropy_coef > 0, measured when given.
      cu_seqlens: [S+1]; needed for ratio='sequence'. A sequence must lie in one micro-batch whole.
      weight_T: [T] factor of the token's whole loss, such as 1/length for a mean by sequence.
    Returns the loss sum (0-d, on the graph even when no token is trained) and detached sums:
      num_tokens, num_dropped; policy_sum, ratio_sum, abs_log_ratio_sum, kl_sum, entropy_sum,
      mismatch_sum, engine_kl_sum; clip_low_count, clip_high_count, dual_clip_count,
      engine_cap_count; ratio_max, mismatch_max. Clip counts are of tokens whose gradient it cut.
    Raises: ValueError when a coefficient cannot act or shapes differ.
    Source: PPO, arXiv 1707.06347, eq. 7; two-sided clip: DAPO, arXiv 2503.14476, eq. 8; dual clip:
      arXiv 1912.09729, eq. 5; sequence ratio: GSPO, arXiv 2507.18071, eqs. 7 and 13; truncated
      engine weight: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy".
    """
    check_policy_inputs(
        cfg,
        cu_seqlens,
        logprob=logprob_T,
        old_logprob=old_logprob_T,
        advantage=advantage_T,
        mask=mask_T,
        ref_logprob=ref_logprob_T,
        engine_logprob=engine_logprob_T,
        entropy=entropy_T,
        weight=weight_T,
    )
    logprob_T = _at_least_fp32(logprob_T)
    old_logprob_T = _at_least_fp32(old_logprob_T.detach())
    advantage_T = advantage_T.detach().to(logprob_T.dtype)
    keep_T = mask_T
    if engine_logprob_T is not None:
        engine_logprob_T = _at_least_fp32(engine_logprob_T.detach())
        keep_T = mask_T & torch.isfinite(engine_logprob_T)
    # Whatever lies outside may be inf or nan, so it goes before anything is computed from it.
    logprob_T = torch.where(keep_T, logprob_T, 0.0)
    old_logprob_T = torch.where(keep_T, old_logprob_T, 0.0)
    advantage_T = torch.where(keep_T, advantage_T, 0.0)

    log_ratio_T = logprob_T - old_logprob_T
    if cfg.ratio == "sequence":
        assert cu_seqlens is not None
        mean_T = _sequence_mean(log_ratio_T.detach(), keep_T, cu_seqlens)
        # Value of the sequence's ratio, gradient of the token's log-prob (GSPO-token).
        log_ratio_T = torch.where(keep_T, mean_T + logprob_T - logprob_T.detach(), 0.0)
    ratio_T = log_ratio_T.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    stats: dict[str, Tensor] = {}
    if cfg.ratio == "none":
        policy_T = -advantage_T * logprob_T
    else:
        policy_T = _clipped_surrogate(ratio_T, advantage_T, cfg, stats)
    if engine_logprob_T is not None:
        mismatch_T = torch.where(keep_T, old_logprob_T - engine_logprob_T, 0.0)
        policy_T = _engine_weighted(policy_T, mismatch_T, cfg.engine_is_cap, keep_T, stats)

    loss_T = policy_T
    if ref_logprob_T is not None:
        ref_T = torch.where(keep_T, _at_least_fp32(ref_logprob_T.detach()), 0.0)
        kl_T = kl_estimate(logprob_T, ref_T, cfg.kl_estimator)
        stats["kl_sum"] = kl_T.detach().sum()
        if cfg.kl_coef > 0.0:
            loss_T = loss_T + cfg.kl_coef * kl_T
    if entropy_T is not None:
        entropy_T = torch.where(keep_T, _at_least_fp32(entropy_T), 0.0)
        stats["entropy_sum"] = entropy_T.detach().sum()
        if cfg.entropy_coef > 0.0:
            loss_T = loss_T - cfg.entropy_coef * entropy_T
    if weight_T is not None:
        loss_T = torch.where(keep_T, weight_T.detach().to(loss_T.dtype), 0.0) * loss_T

    ratio_T = torch.where(keep_T, ratio_T.detach(), 0.0)
    stats |= {
        "num_tokens": keep_T.sum(),
        "num_dropped": (mask_T & ~keep_T).sum(),
        "policy_sum": policy_T.detach().sum(),
        "ratio_sum": ratio_T.sum(),
        "ratio_max": _max(ratio_T),
        "abs_log_ratio_sum": (logprob_T.detach() - old_logprob_T).abs().sum(),
    }
    return loss_T.sum(), stats


def check_policy_inputs(
    cfg: PolicyLossConfig, cu_seqlens: Tensor | None, **tensors: Tensor | None
) -> None:
    """The checks of `policy_loss`, for it and for its fused twin.

    Args: the [T] arguments by name, without `_T`. Raises: ValueError as `policy_loss` says.
    """
    _same_shape(**tensors)
    if cu_seqlens is not None and tensors["mask"] is not None:
        check_borders(cu_seqlens, tensors["mask"].numel())
    _refuse_idle_settings(
        cfg, tensors["ref_logprob"], tensors["engine_logprob"], tensors["entropy"], cu_seqlens
    )


def nll_loss(
    logprob_T: Tensor, mask_T: Tensor, weight_T: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy of given tokens, summed: supervised warm start and feedback modelling.

    Args: logprob [T] of the target ids, mask [T] bool, optional factor [T].
    Returns the loss sum and nll_sum (not weighted), num_tokens.
    Raises: ValueError when shapes differ.
    """
    _same_shape(logprob=logprob_T, mask=mask_T, weight=weight_T)
    nll_T = -torch.where(mask_T, _at_least_fp32(logprob_T), 0.0)
    stats = {"nll_sum": nll_T.detach().sum(), "num_tokens": mask_T.sum()}
    if weight_T is not None:
        nll_T = torch.where(mask_T, weight_T.detach().to(nll_T.dtype), 0.0) * nll_T
    return nll_T.sum(), stats


def sequence_mean_weights(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Weight 1 / (trained tokens of the sequence) on every trained token, 0 elsewhere, [T].

    With it the loss sum is a sum of sequence means, to be divided by the number of sequences.
    Source: GRPO, arXiv 2402.03300, eq. 3, whose inner mean is over one answer.
    """
    check_borders(cu_seqlens, mask_T.numel())
    sequence_T = _sequence_of_token(cu_seqlens, mask_T)
    ones_T = mask_T.to(torch.float32)
    count_S = ones_T.new_zeros(cu_seqlens.numel() - 1).index_add_(0, sequence_T, ones_T)
    return torch.where(mask_T, 1.0 / count_S[sequence_T].clamp(min=1.0), 0.0)


def merge_stats(*parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put the statistics of micro-batches or ranks together: names on _max by max, others by sum.

    Raises: ValueError when the parts do not hold the same names.
    """
    for part in parts:
        if part.keys() != parts[0].keys():
            raise ValueError(
                f"got statistics {sorted(part)} and {sorted(parts[0])}; expected the same names in "
                "every part: give every micro-batch the same inputs"
            )
    merged: dict[str, Tensor] = {}
    for name in parts[0] if parts else ():
        stacked = torch.stack([part[name] for part in parts])
        merged[name] = stacked.amax(0) if name.endswith("_max") else stacked.sum(0)
    return merged


def finalize_stats(sums: Mapping[str, Tensor], per: str = "num_tokens") -> dict[str, float]:
    """Turn reduced sums into what is logged.

    x_sum becomes x, the mean over ``per``; x_count becomes x_share, likewise; x_max and num_x stay.
    With nothing to divide by, means and shares are 0.
    Raises: ValueError on a name that does not say how it reduces.
    """
    num = max(float(sums[per]), 1.0)
    values: dict[str, float] = {}
    for name, value in sums.items():
        if name.startswith("num_") or name.endswith("_max"):
            values[name] = float(value)
        elif name.endswith("_sum"):
            values[name.removesuffix("_sum")] = float(value) / num
        elif name.endswith("_count"):
            values[name.removesuffix("_count") + "_share"] = float(value) / num
        else:
            raise ValueError(
                f"got statistic {name!r}; expected num_*, *_sum, *_count or *_max: rename it"
            )
    return values


def _clipped_surrogate(
    ratio_T: Tensor, advantage_T: Tensor, cfg: PolicyLossConfig, stats: dict[str, Tensor]
) -> Tensor:
    clipped_T = ratio_T.clamp(1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
    surrogate_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    low_T = (ratio_T < 1.0 - cfg.clip_low) & (advantage_T < 0)
    high_T = (ratio_T > 1.0 + cfg.clip_high) & (advantage_T > 0)
    stats["clip_low_count"] = low_T.sum()
    stats["clip_high_count"] = high_T.sum()
    if cfg.dual_clip is not None:
        floor_T = cfg.dual_clip * advantage_T
        cut_T = (advantage_T < 0) & (surrogate_T < floor_T)
        surrogate_T = torch.where(cut_T, floor_T, surrogate_T)
        stats["dual_clip_count"] = cut_T.sum()
    return -surrogate_T


def _engine_weighted(
    policy_T: Tensor,
    mismatch_T: Tensor,
    cap: float | None,
    keep_T: Tensor,
    stats: dict[str, Tensor],
) -> Tensor:
    """Measure log pi_old(trainer) - log pi(engine) and, with a cap, correct for it."""
    clamped_T = mismatch_T.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    stats["mismatch_sum"] = mismatch_T.abs().sum()
    stats["mismatch_max"] = _max(mismatch_T.abs())
    stats["engine_kl_sum"] = (torch.expm1(clamped_T) - clamped_T).sum()  # k3 of KL(engine || old)
    if cap is None:
        return policy_T
    weight_T = clamped_T.exp()
    stats["engine_cap_count"] = (keep_T & (weight_T > cap)).sum()
    return weight_T.clamp(max=cap) * policy_T


def _sequence_of_token(cu_seqlens: Tensor, like_T: Tensor) -> Tensor:
    index_S = torch.arange(cu_seqlens.numel() - 1, device=like_T.device)
    return torch.repeat_interleave(index_S, cu_seqlens.diff().to(like_T.device))


def _sequence_mean(x_T: Tensor, keep_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean over the kept tokens of the sequence, on every token of it; x is 0 where not kept."""
    sequence_T = _sequence_of_token(cu_seqlens, x_T)
    num_seqs = cu_seqlens.numel() - 1
    sum_S = x_T.new_zeros(num_seqs).index_add_(0, sequence_T, x_T)
    count_S = x_T.new_zeros(num_seqs).index_add_(0, sequence_T, keep_T.to(x_T.dtype))
    return (sum_S / count_S.clamp(min=1.0))[sequence_T]


def _max(x_T: Tensor) -> Tensor:
    """Maximum of numbers that are not negative; 0 of none."""
    return torch.cat([x_T.new_zeros(1), x_T]).amax()


def _at_least_fp32(x_T: Tensor) -> Tensor:
    return x_T if x_T.dtype == torch.float64 else x_T.float()


def _same_shape(**tensors: Tensor | None) -> None:
    shapes = {name: tuple(x.shape) for name, x in tensors.items() if x is not None}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"got shapes {shapes}; expected one flat [T] for all of them")
    mask = tensors["mask"]
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"got a mask of {mask.dtype}; expected torch.bool: use mask.bool()")
    check_kinds("float", **{n: x for n, x in tensors.items() if n != "mask" and x is not None})


def _refuse_idle_settings(
    cfg: PolicyLossConfig,
    ref_logprob_T: Tensor | None,
    engine_logprob_T: Tensor | None,
    entropy_T: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """A coefficient that cannot act is a mistake of the caller, not a zero."""
    if cfg.kl_coef > 0.0 and ref_logprob_T is None:
        raise ValueError(
            f"got kl_coef {cfg.kl_coef} and no ref_logprob_T; expected reference log-probs: pass "
            "them, or set kl_coef=0"
        )
    if cfg.engine_is_cap is not None and engine_logprob_T is None:
        raise ValueError(
            f"got engine_is_cap {cfg.engine_is_cap} and no engine_logprob_T; expected the engine's "
            "log-probs: pass them, or set engine_is_cap=None"
        )
    if cfg.entropy_coef > 0.0 and entropy_T is None:
        raise ValueError(
            f"got entropy_coef {cfg.entropy_coef} and no entropy_T; expected the entropy of every "
            "token: pass it, or set entropy_coef=0"
        )
    if cfg.ratio == "sequence" and cu_seqlens is None:
        raise ValueError(
            "got ratio 'sequence' and no cu_seqlens; expected the borders of the sequences: pass "
            "them, or set ratio='token'"
        )
