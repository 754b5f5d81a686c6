"""How far the engine's log-probs are from the learner's, token by token: what both promise each
other.

The distances of a batch are counted in bins that add up over micro-batches and ranks; the share of
each bin and a bound of the 99th percentile are logged at every update, and a distance above the
role's threshold is said aloud.

Shapes: T tokens of a packed row.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

EDGES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""Upper edges of the bins, nats; the last bin has none."""

_NAME = "mismatch_bin{:02d}"


def counts(
    learner_logprob_T: Tensor, engine_logprob_T: Tensor, mask_T: Tensor
) -> dict[str, Tensor]:
    """Number of masked tokens in each bin of |engine - learner|, as statistics that are summed.

    Tokens that no engine sampled (nan) are in no bin.
    """
    known_T = mask_T & torch.isfinite(engine_logprob_T)
    distance_T = (learner_logprob_T.detach() - engine_logprob_T).abs()
    edges = torch.tensor(EDGES, device=distance_T.device, dtype=distance_T.dtype)
    bin_T = torch.bucketize(distance_T, edges)
    num = torch.bincount(torch.where(known_T, bin_T, len(EDGES) + 1), minlength=len(EDGES) + 2)
    return {f"{_NAME.format(i)}_count": num[i] for i in range(len(EDGES) + 1)}


def summarize(values: dict[str, float]) -> dict[str, float]:
    """Replace the shares of bins by a histogram under readable names and the 99th percentile.

    `mismatch_p99` is the upper edge of the bin that holds it, or the largest distance in the bin
    without one. Values of terms that have no bins stay as they are.
    """
    out = dict(values)
    for first in [name for name in values if name.endswith(_NAME.format(0) + "_share")]:
        prefix = first.removesuffix(_NAME.format(0) + "_share")
        shares = [
            out.pop(f"{prefix}{_NAME.format(i)}_share") for i in range(len(EDGES) + 1)
        ]
        total, below = sum(shares), 0.0
        p99 = 0.0
        for i, share in enumerate(shares):
            edge = f"below_{EDGES[i]:g}" if i < len(EDGES) else f"above_{EDGES[-1]:g}"
            out[f"{prefix}mismatch_hist/{edge}"] = share / total if total else 0.0
            if p99 == 0.0 and total:
                below += share
                if below >= 0.99 * total * (1 - 1e-9):
                    p99 = EDGES[i] if i < len(EDGES) else out[f"{prefix}mismatch_max"]
        out[f"{prefix}mismatch_p99"] = min(p99, out.get(f"{prefix}mismatch_max", p99))
    return out


def alarm(role: str, values: dict[str, float], threshold: float) -> bool:
    """Say aloud where the 99th percentile is above `threshold` (0: never); whether it was."""
    p99 = values.get("mismatch_p99", 0.0)
    if not threshold or p99 <= threshold:
        return False
    logger.warning(
        f"{role}: the engine's log-probs are {p99:g} nats from the learner's at the 99th "
        f"percentile (largest {values.get('mismatch_max', float('nan')):g}), above "
        f"{role}.mismatch_alarm {threshold:g}: other numerics, or stale weights"
    )
    return True
