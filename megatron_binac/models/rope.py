"""Rotary frequencies of models that were stretched to longer sequences, and what that does to
attention.

Shapes: D head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_binac.config import ModelConfig, RopeScaling


def inverse_frequencies(model: ModelConfig) -> Tensor:
    """Radians that each pair of a head turns by from one position to the next: float32 [D/2]."""
    dim = model.head_width
    pairs = torch.arange(0, dim, 2, dtype=torch.float32)
    plain = 1.0 / (model.rope_theta ** (pairs / dim))
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, scaling, dim, model.rope_theta)


def attention_scale(model: ModelConfig) -> float | None:
    """Factor on query-key products; None is the usual 1 / sqrt(D).

    YaRN (arXiv 2309.00071, section 3.4) multiplies queries and keys by a temperature each.
    """
    scaling = model.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return None
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0
    return factor**2 / math.sqrt(model.head_width)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Short waves stay, long ones are stretched, those between are blended by how often they turn
    within the first training's length."""
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * plain + (1 - keep) * plain / scaling.factor


def _yarn(plain: Tensor, scaling: RopeScaling, dim: int, theta: float) -> Tensor:
    """Blended along the pairs, between those that turn `beta_fast` and `beta_slow` times."""

    def pair_of(turns: float) -> float:
        wave = scaling.original_max_positions / (turns * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(theta))

    first = max(math.floor(pair_of(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_of(scaling.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / max(last - first, 1e-3)
    stretched = ramp.clamp(0.0, 1.0)
    return (1 - stretched) * plain + stretched * plain / scaling.factor
