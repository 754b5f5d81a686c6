"""What ``policy_loss`` adds to ``algo.losses.policy_loss``, in plain torch: the diagnostics.

Shapes: T packed tokens, B bins of the histogram.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_binac.algo import losses

# Bin 0 holds |mismatch| < 2^-12, then four bins an octave, the last all from 2^3.5 on.
HISTOGRAM_BINS = 64
_OCTAVES_BELOW_ONE = 12
_BINS_PER_OCTAVE = 4


def policy_diagnostics(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    mask_T: Tensor,
    ref_logprob_T: Tensor | None,
    engine_logprob_T: Tensor | None,
) -> dict[str, Tensor]:
    """Sums of all three KL estimates, and the histogram of |log pi_old - log pi_engine| [B]."""
    keep_T, stats = mask_T, {}
    if engine_logprob_T is not None:
        keep_T = mask_T & torch.isfinite(engine_logprob_T)
        mismatch_K = (old_logprob_T.float() - engine_logprob_T.float()).detach()[keep_T].abs()
        octave_K = mismatch_K.clamp(min=1e-30).log2() + _OCTAVES_BELOW_ONE
        bin_K = (octave_K * _BINS_PER_OCTAVE).floor().long() + 1
        counts_B = torch.zeros(HISTOGRAM_BINS, dtype=torch.int32, device=mismatch_K.device)
        ones_K = torch.ones_like(bin_K, dtype=torch.int32)
        counts_B.index_add_(0, bin_K.clamp(0, HISTOGRAM_BINS - 1), ones_K)
        stats["mismatch_histogram"] = counts_B
    if ref_logprob_T is not None:
        logprob_K, ref_K = (
            logprob_T.detach()[keep_T].float(),
            ref_logprob_T.detach()[keep_T].float(),
        )
        for estimator in ("k1", "k2", "k3"):
            kl_K = losses.kl_estimate(logprob_K, ref_K, estimator)
            stats[f"kl_{estimator}_sum"] = kl_K.sum()
    return stats


def histogram_quantile(counts_B: Tensor, q: float) -> float:
    """Upper edge of the bin that holds the q-quantile: at most 19 % above it; inf for the last bin.

    0.0 where nothing was counted. Raises ValueError for q outside [0, 1].
    """
    if not 0 <= q <= 1:
        raise ValueError(f"q must be in [0, 1], got {q}")
    total = int(counts_B.sum())
    if total == 0:
        return 0.0
    reached_B = counts_B.long().cumsum(0) >= max(1.0, q * total)
    index = int(reached_B.to(torch.uint8).argmax())
    if index == HISTOGRAM_BINS - 1:
        return float("inf")
    return 2.0 ** (index / _BINS_PER_OCTAVE - _OCTAVES_BELOW_ONE)
