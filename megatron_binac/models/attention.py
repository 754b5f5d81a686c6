"""Causal attention over packed sequences, and over a KV cache, for Megatron-Core's local layer
spec.

Megatron-Core's own `DotProductAttention` has no packed (`thd`) path; Transformer Engine's has, on
GPUs. This one keeps the same contract on any device with PyTorch's scaled-dot-product attention,
so that the packed path is the only path. Generation keeps its keys and values here.

Shapes: T packed tokens, S sequences, L longest sequence of a bucket, N query heads, K key-value
heads, D head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megatron_binac.models.kv_cache import KVCache
from megatron_binac.models.prefix_attention import PrefixBlocks, prefix_attention
from megatron_binac.models.prefix_batches import PrefixBatches, take_rows


@dataclass
class PackedParams(PackedSeqParams):
    """What the layers need to know of one packed row of T tokens.

    Rotary embeddings are taken row by row from `positions_T`: to Megatron-Core the row is one
    sequence of T rows of frequencies (`cu_seqlens_q = [0, T]`), and the true borders are in
    `bounds`.
    """

    positions_T: Tensor | None = None
    """int64 [T]: place of each token in its own sequence."""
    bounds: list[int] | None = None
    """S + 1 offsets: the borders of the sequences in the row."""
    num_real: int | None = None
    """Tokens before the padding; None where nobody asks."""
    prefix: PrefixBlocks | PrefixBatches | None = None
    """Set where the row is a prefix-shared layout; `bounds` are then not read."""
    cache: KVCache | None = None
    """Where keys and values are kept while generating: of prompts, with `prefix`, or of one new
    token a cache row, which attends to the cache."""
    turns: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [T, 1, D] for `Turn`, where core attention applies them."""
    buckets: list[tuple[Tensor, Tensor]] | None = None
    """Made once per row, shared by all layers: gather indices [S, L] and, to scatter back, [n]."""

    @staticmethod
    def of(positions_T: Tensor, bounds: list[int], **kwargs: Any) -> PackedParams:
        total = positions_T.numel()
        ends = torch.tensor([0, total], dtype=torch.int32, device=positions_T.device)
        return PackedParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=total,
            max_seqlen_kv=total,
            positions_T=positions_T,
            bounds=bounds,
            **kwargs,
        )


def _buckets(bounds: list[int], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Group sequences by the power of two above their length and lay each group out as a padded
    batch.

    Returns per group: `take` [S, L], the row of each slot (the sequence's last token in padding
    slots), and `put` [n], the flat slots that are real, in row order of `take[mask]`.
    """
    by_size: dict[int, list[int]] = {}
    for i in range(len(bounds) - 1):
        length = bounds[i + 1] - bounds[i]
        if length:
            by_size.setdefault(max(8, 1 << (length - 1).bit_length()), []).append(i)
    out = []
    for members in by_size.values():
        starts = torch.tensor([bounds[i] for i in members], device=device)
        lengths = torch.tensor([bounds[i + 1] - bounds[i] for i in members], device=device)
        slots = torch.arange(int(lengths.max()), device=device)
        take = starts[:, None] + torch.minimum(slots[None], lengths[:, None] - 1)
        put = (slots[None] < lengths[:, None]).flatten().nonzero().squeeze(1)
        out.append((take, put))
    return out


class RotaryByPosition(torch.nn.Module):
    """Rotary embeddings of the positions that the packed row names; takes the place of
    Megatron-Core's module.

    `inner` is Megatron-Core's `RotaryEmbedding`, which knows the base and the scaling. `in_core`:
    core attention is ours and turns queries and keys itself, by cosines and sines that are looked
    up once for all layers; else Megatron-Core does, which computes them anew in each layer.
    """

    def __init__(
        self, inner: torch.nn.Module, max_positions: int, dtype: torch.dtype, *, in_core: bool
    ) -> None:
        super().__init__()
        self.in_core = in_core
        self.table = inner.get_emb(max_positions)  # [max_positions, 1, 1, D]
        half = self.table.squeeze(1).chunk(2, dim=-1)[0]
        self.cos = self.table.squeeze(1).cos().to(dtype)
        self.sin = torch.cat([-half.sin(), half.sin()], dim=-1).to(dtype)
        self._positions: Tensor | None = None

    def get_rotary_seq_len(
        self, context: Any, block: Any, hidden: Any, config: Any, packed: Any = None
    ) -> int:
        self._positions = packed.positions_T
        if self.in_core:
            packed.turns = self.cos[packed.positions_T], self.sin[packed.positions_T]
        return packed.max_seqlen_q

    def forward(self, seq_len: int, **kwargs: Any) -> Tensor | None:
        return None if self.in_core else self.table[self._positions]


class Turn(torch.autograd.Function):
    """Rotary embedding: vectors [T, heads, D] turned by angles whose cosines [T, 1, D] and sines
    [T, 1, D], the first half of them negated, are given."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1D, sin_T1D)
        return _turn(vectors, cos_T1D, sin_T1D, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _turn(gradient, *ctx.saved_tensors, -1.0), None, None


def _turn(vectors: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, direction: float) -> Tensor:
    swapped = vectors.roll(vectors.shape[-1] // 2, dims=-1)
    return (vectors * cos_T1D).addcmul_(swapped, sin_T1D, value=direction)


class PackedAttention(MegatronModule):
    """Core attention of the local spec: causal, grouped-query, over packed sequences or a KV
    cache."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError(
                f"attention_dropout is {config.attention_dropout}, expected 0 with packed attention"
            )
        self.layer_number = layer_number
        self.scale = softmax_scale  # None: 1 / sqrt(D)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """query [T, N, D], key and value [T, K, D] -> [T, N * D]; rotary embeddings are already in
        where `packed_seq_params.turns` is None."""
        if not isinstance(packed_seq_params, PackedParams):
            raise ValueError(
                f"packed attention got {type(packed_seq_params).__name__}, expected PackedParams"
            )
        packed = packed_seq_params
        if packed.turns is not None:
            query, key = Turn.apply(query, *packed.turns), Turn.apply(key, *packed.turns)
        if isinstance(packed.prefix, PrefixBatches):
            if packed.cache is not None:
                key, value = packed.cache.hold(self.layer_number, key, value)
            return packed.prefix.attend(query, key, value, self.scale)
        if packed.prefix is not None:
            return prefix_attention(query, key, value, packed.prefix, self.scale)
        if packed.cache is not None:
            return self._decode(query, key, value, packed)
        if packed.buckets is None:
            packed.buckets = _buckets(packed.bounds, query.device)
        out = query.new_zeros(query.shape)
        for take, put in packed.buckets:
            # [S, heads, L, D]
            q, k, v = (take_rows(x, take).transpose(1, 2) for x in (query, key, value))
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
            )
            rows = mixed.transpose(1, 2).flatten(0, 1).index_select(0, put)
            out = out.index_copy(0, take.flatten()[put], rows)
        return out.flatten(1)

    def _decode(
        self, query: Tensor, key_BKD: Tensor, value_BKD: Tensor, packed: PackedParams
    ) -> Tensor:
        """One query per cache row against everything up to its position; query [B, N, D] -> [B, N
        * D]."""
        rows_B = torch.arange(len(query), device=query.device)
        packed.cache.write(self.layer_number, rows_B, packed.positions_T, key_BKD, value_BKD)
        key, value = packed.cache.layers[self.layer_number]
        used = int(packed.positions_T.max()) + 1
        seen = torch.arange(used, device=query.device)[None] <= packed.positions_T[:, None]
        out = F.scaled_dot_product_attention(
            query.unsqueeze(2),
            key[:, :used].transpose(1, 2),
            value[:, :used].transpose(1, 2),
            attn_mask=seen[:, None, None],
            scale=self.scale,
            enable_gqa=True,
        )
        return out.squeeze(2).flatten(1)
