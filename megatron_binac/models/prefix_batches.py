"""The prefix-shared layout of a packed row, computed in a few batched products.

The same attention as `prefix_attention`, which goes segment by segment: here segments of like size
lie in one padded batch, so that a row of thousands of short turns costs a handful of calls. What
comes after the last target of a sequence, and that target itself, predicts nothing that is scored
and is not computed. The gradient of a shared token is the sum over the turns that share it.

Shapes: D distinct tokens, S segments of one batch, n queries, m keys, N query heads (of a row:
targets), K key-value heads, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_binac.packing import Packed, PrefixLayout, share_prefixes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Segments whose lengths round up to the same powers of two."""

    queries_Sn: Tensor
    """int64: slot of each query; a segment's last one again in the padding."""
    keys_Sm: Tensor
    """int64: slots of ancestors, root first, then the segment's own; the first again in the
    padding."""
    seen_Snm: Tensor
    """bool: what a query may look at; in a query's padding what its last one may."""
    real: Tensor
    """int64: flat places in [S, n] that are no padding."""
    slots: Tensor
    """int64: slot of each of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixBatches:
    """Index tensors of a row, made once and shared by all layers."""

    batches: list[_Batch]
    num_slots: int

    @classmethod
    def of(cls, layout: PrefixLayout, device: torch.device | None = None) -> PrefixBatches:
        """The batches of a layout."""
        chains: list[np.ndarray] = []
        groups: dict[tuple[int, int], list[int]] = {}
        starts, lengths = layout.segment_starts_N.tolist(), layout.segment_lengths_N.tolist()
        for number, (start, length, parent) in enumerate(
            zip(starts, lengths, layout.segment_parents_N.tolist(), strict=True)
        ):
            own = np.arange(start, start + length)
            chains.append(own if parent < 0 else np.concatenate([chains[parent], own]))
            size = (_ceiling(length), _ceiling(len(chains[-1])))
            groups.setdefault(size, []).append(number)
        return cls(
            batches=[
                _batch([chains[i] for i in members], [lengths[i] for i in members], device)
                for members in groups.values()
            ],
            num_slots=len(layout.tokens_D),
        )

    @property
    def num_pairs(self) -> int:
        """Query-key pairs that are computed, the masked ones and the padding among them."""
        return sum(batch.seen_Snm.numel() for batch in self.batches)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """query [D, N, H], key and value [D, K, H] -> [D, N * H]; rotary embeddings are in.

        Raises:
            ValueError: the row is not the one that the batches were made for.
        """
        if len(query) != self.num_slots:
            raise ValueError(
                f"query: got {len(query)} tokens, expected {self.num_slots}, as in the layout"
            )
        out = query.new_zeros(query.shape)
        for batch in self.batches:
            q = query[batch.queries_Sn].transpose(1, 2)
            k, v = (x[batch.keys_Sm].transpose(1, 2) for x in (key, value))
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=batch.seen_Snm[:, None], scale=scale, enable_gqa=True
            )
            rows = mixed.transpose(1, 2).flatten(0, 1)[batch.real]
            out = out.index_copy(0, batch.slots, rows)
        return out.flatten(1)


def _ceiling(length: int) -> int:
    return 1 << max(length - 1, 0).bit_length()


def _batch(chains: list[np.ndarray], lengths: list[int], device: torch.device | None) -> _Batch:
    n, m = max(lengths), max(map(len, chains))
    queries_Sn = np.zeros((len(chains), n), np.int64)
    keys_Sm = np.zeros((len(chains), m), np.int64)
    sizes_S, lengths_S = np.asarray([len(c) for c in chains]), np.asarray(lengths)
    for row, (chain, length) in enumerate(zip(chains, lengths, strict=True)):
        keys_Sm[row, : len(chain)], keys_Sm[row, len(chain) :] = chain, chain[0]
        queries_Sn[row, :length], queries_Sn[row, length:] = chain[-length:], chain[-1]
    at_Sn = np.minimum(np.arange(n)[None], lengths_S[:, None] - 1)
    last_Sn = (sizes_S - lengths_S)[:, None] + at_Sn
    real = np.flatnonzero(np.arange(n)[None] < lengths_S[:, None])
    put = lambda array: torch.as_tensor(array, device=device)  # noqa: E731
    return _Batch(
        queries_Sn=put(queries_Sn),
        keys_Sm=put(keys_Sm),
        seen_Snm=put(np.arange(m)[None, None] <= last_Sn[:, :, None]),
        real=put(real),
        slots=put(queries_Sn.reshape(-1)[real]),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRow:
    """What a model computes of a row whose sequences share prefixes."""

    ids_D: Tensor
    positions_D: Tensor
    predict_N: Tensor
    """int64: slot of the token before each target of the plain row, in row order."""
    batches: PrefixBatches

    @classmethod
    def of(cls, packed: Packed, device: torch.device | None = None) -> SharedRow:
        """The tensors of a packed row."""
        targets_N = np.flatnonzero(packed.loss_mask_T)
        starts, ends = packed.cu_seqlens_padded[:-1], packed.cu_seqlens_padded[1:]
        before = np.searchsorted(targets_N, ends)  # targets up to the end of each sequence
        last = np.append(-1, targets_N)[before]
        layout = share_prefixes(packed, lengths=np.maximum(last - starts, 1))
        return cls(
            ids_D=torch.as_tensor(layout.tokens_D, device=device),
            positions_D=torch.as_tensor(layout.position_ids_D, device=device),
            predict_N=torch.as_tensor(layout.slots_T[targets_N - 1], device=device),
            batches=PrefixBatches.of(layout, device),
        )
