"""Logits and a seed to a token: the one place where an engine of ours draws.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_binac.types import Sampling


def pick(logits_BV: Tensor, uniform_B: np.ndarray, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling: ids [B] and their log-probs [B] under the full distribution at the
    temperature.

    One uniform number decides a token, so that a sample does not depend on its batch. top-k and
    top-p restrict what can be drawn, not the log-prob that is reported: the learner scores the
    full distribution.
    """
    logprob_BV = torch.log_softmax(logits_BV / sampling.temperature, dim=-1)
    if sampling.greedy:
        token_B = logprob_BV.argmax(-1)
    else:
        p_BV = _support(logprob_BV.double().exp(), sampling)
        cdf_BV = p_BV.cumsum(-1)
        target_B = torch.as_tensor(uniform_B, device=cdf_BV.device) * cdf_BV[:, -1]
        token_B = (cdf_BV <= target_B[:, None]).sum(-1)
    return token_B, logprob_BV.gather(1, token_B[:, None]).squeeze(1)


def _support(p_BV: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities with what top-k and top-p exclude set to 0 (not normalised again)."""
    if sampling.top_k:
        kth_B1 = p_BV.topk(min(sampling.top_k, p_BV.shape[1]), dim=-1).values[:, -1:]
        p_BV = torch.where(p_BV >= kth_B1, p_BV, 0.0)
    if sampling.top_p < 1.0:
        sorted_BV, order_BV = p_BV.sort(dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        keep_BV = before_BV < sampling.top_p * sorted_BV.sum(-1, keepdim=True)
        p_BV = torch.zeros_like(p_BV).scatter(1, order_BV, torch.where(keep_BV, sorted_BV, 0.0))
    return p_BV
