"""Attention over the prefix-shared layout: every distinct token of the rollout trees once.

A segment (a run without a branch) attends to its chain of ancestors in full and to itself causally.
A trunk's keys, values and hidden states are computed once, and its gradient is the sum over all
turns that continue it. This is the reference, on any device, by scaled-dot-product attention; its
cost is the sum of the visible pairs, never a [D, D] mask.

Shapes: D distinct tokens, n tokens of one segment, p tokens of its ancestors, N query heads,
K key-value heads, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_binac.packing import PrefixLayout


@dataclass(frozen=True, slots=True)
class PrefixBlocks:
    """The ancestor mask in block form, made once for a micro-batch and shared by all layers."""

    segments: list[tuple[int, int]]
    """Where each segment begins and ends; together they cover the row in order."""
    keys: list[Tensor]
    """int64 [p + n] for each segment: slots of its ancestors, root first, then its own."""
    masks: list[Tensor | None]
    """bool [n, p + n], True = seen; None at a root, where the plain causal mask is the same."""

    @classmethod
    def of(cls, layout: PrefixLayout, device: torch.device | None = None) -> PrefixBlocks:
        """The blocks of a layout; siblings share their ancestors' index tensors only in value."""
        starts, lengths = layout.segment_starts_N.tolist(), layout.segment_lengths_N.tolist()
        segments: list[tuple[int, int]] = []
        keys: list[Tensor] = []
        masks: list[Tensor | None] = []
        for start, length, parent in zip(
            starts, lengths, layout.segment_parents_N.tolist(), strict=True
        ):
            own = torch.arange(start, start + length, device=device)
            segments.append((start, start + length))
            if parent < 0:
                keys.append(own)
                masks.append(None)
                continue
            keys.append(torch.cat([keys[parent], own]))  # a parent comes before its children
            before = len(keys[parent])
            rows = torch.arange(length, device=device)[:, None] + before
            masks.append(torch.arange(before + length, device=device)[None] <= rows)
        return cls(segments, keys, masks)

    @property
    def num_pairs(self) -> int:
        """Query-key products that attention computes, a segment's own causal square in full."""
        pairs = zip(self.segments, self.keys, strict=True)
        return sum((end - start) * len(keys) for (start, end), keys in pairs)


def prefix_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: PrefixBlocks, scale: float | None = None
) -> Tensor:
    """query [D, N, H], key and value [D, K, H] -> [D, N * H]; rotary embeddings are already in.

    Position ids of the layout are depths in the tree, so rotary embeddings are those of the plain
    layout. `scale` None is 1 / sqrt(H).

    Raises:
        ValueError: the row is not the one that `blocks` were made for.
    """
    if blocks.segments[-1][1] != len(query):
        raise ValueError(
            f"query: got {len(query)} tokens, expected {blocks.segments[-1][1]}, as in the layout"
        )
    parts = []
    for (start, end), slots, mask in zip(blocks.segments, blocks.keys, blocks.masks, strict=True):
        q, k, v = (
            x.transpose(0, 1).unsqueeze(0) for x in (query[start:end], key[slots], value[slots])
        )
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        parts.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(parts).flatten(1)


def require_prefix_sharing(
    *,
    attention: Literal["local", "transformer_engine"],
    context_parallel: int = 1,
    dropout: float = 0.0,
    num_experts: int = 0,
) -> None:
    """Raise ValueError with the reason where the prefix-shared layout can't be used.

    Args:
        attention: whose core attention the model has.
        context_parallel: size of the context-parallel group.
        dropout: the larger of hidden and attention dropout.
        num_experts: experts of a mixture layer; 0 for a dense model.
    """
    if attention != "local":
        raise ValueError(
            f"prefix sharing: attention is {attention!r}, expected 'local': the thd kernels "
            "of Transformer Engine know causal masks between cu_seqlens and no tree; turn prefix "
            "sharing off or use the local spec"
        )
    if context_parallel > 1:
        raise ValueError(
            f"prefix sharing: context_parallel is {context_parallel}, expected 1: a tree can't be "
            "cut into the equal chunks of a ring; turn prefix sharing off"
        )
    if dropout > 0:
        raise ValueError(
            f"prefix sharing: dropout is {dropout}, expected 0: the turns of a trunk would share "
            "one draw; set dropout to 0 or turn prefix sharing off"
        )
    if num_experts > 0:
        raise ValueError(
            f"prefix sharing: num_experts is {num_experts}, expected 0: the router's balance loss "
            "and capacity count tokens, and a shared trunk counts once; turn prefix sharing off"
        )
