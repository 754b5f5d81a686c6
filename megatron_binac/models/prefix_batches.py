"""The prefix-shared layout of a packed row, computed in a few batched products.

The same attention as `prefix_attention`, which goes segment by segment. Slots lie in depth-first
order, so that any run of them looks at nothing but the ancestors of its first slot and itself: the
row is cut into runs, and runs with about as many keys lie in one padded batch. A row of thousands
of short turns then costs a handful of calls, and siblings share one copy of their ancestors. What
comes after the last target of a sequence, and that target itself, predicts nothing that is scored
and is not computed. The gradient of a shared token is the sum over the turns that share it.

Shapes: D distinct tokens, S runs of one batch, n queries, m keys, N query heads (of a row:
targets), K key-value heads, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_binac.packing import Packed, PrefixLayout, share_prefixes

SHORTEST_RUN = 32
"""Slots of a run with few ancestors; one with many has half as many slots as ancestors, so that
keys are copied three times at most and a quarter of the products at most is masked for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Runs whose numbers of keys round up to the same power of two."""

    queries_Sn: Tensor
    """int64: slot of each query; a run's last one again in the padding."""
    keys_Sm: Tensor
    """int64: slots of ancestors, root first, then the run's own; its last again in the padding."""
    bias_S1nm: Tensor
    """float32: 0 where a query may look, -inf elsewhere; in its padding as at its last one."""
    real: Tensor | None
    """int64: flat places in [S, n] that are no padding; None where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixBatches:
    """Index tensors of a row, made once and shared by all layers."""

    batches: list[_Batch]
    places_D: Tensor
    """int64: where each slot lies among the batches' queries, end to end without padding."""

    @classmethod
    def of(cls, layout: PrefixLayout, device: torch.device | None = None) -> PrefixBatches:
        """The batches of a layout."""
        groups: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        for start, end in pairwise(_cuts(layout)):
            own = np.arange(start, end)
            keys = np.concatenate([_ancestors(layout, start), own])
            groups.setdefault((len(keys) - 1).bit_length(), []).append((own, keys))
        order = np.concatenate([own for runs in groups.values() for own, _ in runs])
        places_D = np.empty(len(order), np.int64)
        places_D[order] = np.arange(len(order))
        ends_D = layout.subtree_ends_D
        return cls(
            batches=[_batch(runs, ends_D, device) for runs in groups.values()],
            places_D=torch.as_tensor(places_D, device=device),
        )

    @property
    def num_pairs(self) -> int:
        """Query-key pairs that are computed, the masked ones and the padding among them."""
        return sum(batch.bias_S1nm.numel() for batch in self.batches)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """query [D, N, H], key and value [D, K, H] -> [D, N * H]; rotary embeddings are in.

        Raises:
            ValueError: the row is not the one that the batches were made for.
        """
        if len(query) != len(self.places_D):
            raise ValueError(
                f"query: got {len(query)} tokens, expected {len(self.places_D)}, as in the layout"
            )
        parts = []
        for batch in self.batches:
            mixed = F.scaled_dot_product_attention(
                _take(query, batch.queries_Sn),
                _take(key, batch.keys_Sm),
                _take(value, batch.keys_Sm),
                attn_mask=batch.bias_S1nm.to(query.dtype),
                scale=scale,
                enable_gqa=True,
            )
            rows = mixed.transpose(1, 2).flatten(0, 1).flatten(1)
            parts.append(rows if batch.real is None else rows.index_select(0, batch.real))
        return torch.cat(parts).index_select(0, self.places_D)


def _take(tokens: Tensor, slots_Sn: Tensor) -> Tensor:
    """[D, heads, H] -> [S, heads, n, H]; `index_select`, whose gradient is one plain addition."""
    rows = tokens.index_select(0, slots_Sn.flatten())
    return rows.unflatten(0, slots_Sn.shape).transpose(1, 2)


def _cuts(layout: PrefixLayout) -> list[int]:
    """Where runs begin, and the end of the row: at the segment with the fewest ancestors in the
    second half of the longest run that is allowed, inside a segment where none begins there."""
    starts_N, depth_D = layout.segment_starts_N, layout.position_ids_D
    cuts, total = [0], len(depth_D)
    while total - cuts[-1] > (longest := max(SHORTEST_RUN, int(depth_D[cuts[-1]]) // 2)):
        last = cuts[-1] + longest
        low, high = np.searchsorted(starts_N, [last - longest // 2, last], side="right")
        here = starts_N[low:high][::-1]
        cuts.append(int(here[depth_D[here].argmin()]) if len(here) else last)
    return [*cuts, total]


def _ancestors(layout: PrefixLayout, slot: int) -> np.ndarray:
    """Slots before this one on its way from the root."""
    starts_N, parents_N = layout.segment_starts_N, layout.segment_parents_N
    segment = int(np.searchsorted(starts_N, slot, side="right")) - 1
    parts = [np.arange(starts_N[segment], slot)]
    while (segment := int(parents_N[segment])) >= 0:
        start = starts_N[segment]
        parts.append(np.arange(start, start + layout.segment_lengths_N[segment]))
    return np.concatenate(parts[::-1])


def _batch(
    runs: list[tuple[np.ndarray, np.ndarray]], ends_D: np.ndarray, device: torch.device | None
) -> _Batch:
    lengths_S = np.asarray([len(own) for own, _ in runs])
    sizes_S = np.asarray([len(keys) for _, keys in runs])
    n, m = int(lengths_S.max()), int(sizes_S.max())
    queries_Sn = np.asarray([np.pad(own, (0, n - len(own)), "edge") for own, _ in runs])
    keys_Sm = np.asarray([np.pad(keys, (0, m - len(keys)), "edge") for _, keys in runs])
    query_Sn1, key_S1m = queries_Sn[:, :, None], keys_Sm[:, None]
    seen_Snm = (key_S1m <= query_Sn1) & (query_Sn1 < ends_D[key_S1m])
    seen_Snm &= (np.arange(m) < sizes_S[:, None])[:, None]
    bias_S1nm = np.where(seen_Snm, np.float32(0), np.float32(-np.inf))[:, None]
    real = np.flatnonzero(np.arange(n) < lengths_S[:, None])
    put = lambda array: torch.as_tensor(array, device=device)  # noqa: E731
    return _Batch(
        queries_Sn=put(queries_Sn),
        keys_Sm=put(keys_Sm),
        bias_S1nm=put(bias_S1nm),
        real=None if len(real) == queries_Sn.size else put(real),
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
