"""The prefix-shared layout of a packed row, computed in a few batched products.

The same attention as `prefix_attention`, which goes segment by segment. Slots lie in depth-first
order, so that any run of them looks at nothing but the ancestors of its first slot and itself: the
row is cut into runs, and runs with about as many keys lie in one padded batch. A row of thousands
of short turns then costs a handful of calls, and siblings share one copy of their ancestors. What
comes after the last target of a sequence, and that target itself, predicts nothing that is scored
and is not computed. The gradient of a shared token is the sum over the turns that share it.

Shapes: D distinct tokens, U of them with queries, S runs of one batch, n queries, m keys, N query
heads (of a row: targets), K key-value heads, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_binac.packing import Packed, PrefixLayout, share_prefixes

SHORTEST_RUN = 32
"""Slots of a run with few ancestors; one with many has half as many slots as ancestors, so that
keys are copied three times at most and a quarter of the products at most is masked for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Slots that are computed together."""

    own: np.ndarray
    """The slots whose output is wanted."""
    queries: np.ndarray
    """The slots that look: `own`, in a causal run `keys`."""
    keys: np.ndarray
    """Slots of ancestors, root first, and of the run."""
    is_causal: bool
    """One line of ancestors and own slots, of which each looks at all before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Runs whose numbers of keys round up to the same power of two."""

    queries_Sn: Tensor
    """int64: row of each query; a run's last one again in the padding."""
    keys_Sm: Tensor
    """int64: slot of each key; a run's last one again in the padding."""
    bias_S1nm: Tensor | None
    """float32: 0 where a query may look, -inf elsewhere; in its padding as at its last one. None:
    the plain causal mask."""
    real: Tensor
    """int64: flat places in [S, n] whose output is wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixBatches:
    """Index tensors of a row, made once and shared by all layers."""

    batches: list[_Batch]
    places_U: Tensor
    """int64: where the output of each row lies among the batches' wanted ones, end to end."""

    @classmethod
    def of(
        cls,
        layout: PrefixLayout,
        device: torch.device | None = None,
        *,
        fresh_U: np.ndarray | None = None,
    ) -> PrefixBatches:
        """The batches of a layout. `fresh_U`: the only slots that have queries, in order; the
        others have keys and values alone, which are held from before."""
        groups: dict[tuple[bool, int], list[_Run]] = {}
        runs = _runs(layout)
        row_D = np.arange(len(layout.tokens_D))
        if fresh_U is not None:
            row_D = np.full(len(row_D), -1)
            row_D[fresh_U] = np.arange(len(fresh_U))
            runs = [cut for run in runs if (cut := _fresh(run, row_D)) is not None]
        for run in runs:
            groups.setdefault((run.is_causal, (len(run.keys) - 1).bit_length()), []).append(run)
        order = np.concatenate([row_D[run.own] for group in groups.values() for run in group])
        places_U = np.empty(len(order), np.int64)
        places_U[order] = np.arange(len(order))
        ends_D = layout.subtree_ends_D
        return cls(
            batches=[_batch(group, row_D, ends_D, device) for group in groups.values()],
            places_U=torch.as_tensor(places_U, device=device),
        )

    @property
    def num_pairs(self) -> int:
        """Query-key pairs that are computed, the masked ones and the padding among them."""
        return sum(b.queries_Sn.numel() * b.keys_Sm.shape[1] for b in self.batches)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """query [U, N, H], key and value [D, K, H] -> [U, N * H]; rotary embeddings are in.

        Raises:
            ValueError: the row is not the one that the batches were made for.
        """
        if len(query) != len(self.places_U):
            raise ValueError(
                f"query: got {len(query)} tokens, expected {len(self.places_U)}, as in the layout"
            )
        parts = []
        for batch in self.batches:
            bias = batch.bias_S1nm
            mixed = F.scaled_dot_product_attention(
                take_rows(query, batch.queries_Sn).transpose(1, 2),
                take_rows(key, batch.keys_Sm).transpose(1, 2),
                take_rows(value, batch.keys_Sm).transpose(1, 2),
                attn_mask=None if bias is None else bias.to(query.dtype),
                is_causal=bias is None,
                scale=scale,
                enable_gqa=True,
            )
            rows = mixed.transpose(1, 2).flatten(0, 1).flatten(1)
            parts.append(rows.index_select(0, batch.real))
        return torch.cat(parts).index_select(0, self.places_U)


def take_rows(tokens: Tensor, rows_Sn: Tensor) -> Tensor:
    """[T, heads, H] -> [S, n, heads, H] by `index_select`: a plain copy of rows, and its gradient a
    plain addition."""
    return tokens.index_select(0, rows_Sn.flatten()).unflatten(0, rows_Sn.shape)


def _runs(layout: PrefixLayout) -> list[_Run]:
    """The row, cut: at the segment with the fewest ancestors in the second half of the longest run
    that is allowed, inside a segment where none begins there. A long segment with few ancestors is
    a causal run, and they are computed again with it."""
    starts_N, depth_D = layout.segment_starts_N, layout.position_ids_D
    runs: list[_Run] = []
    cut, total = 0, len(depth_D)
    while cut < total:
        segment = int(np.searchsorted(starts_N, cut, side="right")) - 1
        ancestors = _ancestors(layout, segment, cut)
        num = len(ancestors)
        longest = max(SHORTEST_RUN, num // 2)
        end = int(starts_N[segment] + layout.segment_lengths_N[segment])
        is_causal = end - cut > max(longest, 2 * num)
        if not is_causal and total - cut > longest:
            end = cut + longest
            low, high = np.searchsorted(starts_N, [end - longest // 2, end], side="right")
            here = starts_N[low:high][::-1]
            end = int(here[depth_D[here].argmin()]) if len(here) else end
        elif not is_causal:
            end = total
        own = np.arange(cut, end)
        keys = np.concatenate([ancestors, own])
        queries = keys if is_causal else own
        runs.append(_Run(own=own, queries=queries, keys=keys, is_causal=is_causal))
        cut = end
    return runs


def _ancestors(layout: PrefixLayout, segment: int, slot: int) -> np.ndarray:
    """Slots before this one of the segment on its way from the root."""
    starts_N, parents_N = layout.segment_starts_N, layout.segment_parents_N
    parts = [np.arange(starts_N[segment], slot)]
    while (segment := int(parents_N[segment])) >= 0:
        start = starts_N[segment]
        parts.append(np.arange(start, start + layout.segment_lengths_N[segment]))
    return np.concatenate(parts[::-1])


def _fresh(run: _Run, row_D: np.ndarray) -> _Run | None:
    """The run with the queries that exist; None where none does."""
    own = run.own[row_D[run.own] >= 0]
    if len(own) == 0:
        return None
    if run.is_causal and (row_D[run.queries] >= 0).all():
        return run
    return _Run(own=own, queries=own, keys=run.keys, is_causal=False)


def _batch(
    runs: list[_Run], row_D: np.ndarray, ends_D: np.ndarray, device: torch.device | None
) -> _Batch:
    query_Sn, real_Sn = _padded([run.queries for run in runs])
    key_Sm, is_key_Sm = _padded([run.keys for run in runs])
    put = lambda array: torch.as_tensor(array, device=device)  # noqa: E731
    bias = None
    if runs[0].is_causal:
        real_Sn &= np.arange(real_Sn.shape[1]) >= [[len(r.keys) - len(r.own)] for r in runs]
    else:
        query_Sn1, key_S1m = query_Sn[:, :, None], key_Sm[:, None]
        seen_Snm = (key_S1m <= query_Sn1) & (query_Sn1 < ends_D[key_S1m]) & is_key_Sm[:, None]
        bias = put(np.where(seen_Snm, np.float32(0), np.float32(-np.inf))[:, None])
    return _Batch(
        queries_Sn=put(row_D[query_Sn]),
        keys_Sm=put(key_Sm),
        bias_S1nm=bias,
        real=put(np.flatnonzero(real_Sn)),
    )


def _padded(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows as a rectangle, the last number of each again behind it; and where it is none."""
    length = max(map(len, rows))
    padded = np.empty((len(rows), length), np.int64)
    for out, row in zip(padded, rows, strict=True):
        out[: len(row)], out[len(row) :] = row, row[-1]
    return padded, np.arange(length) < np.asarray([[len(row)] for row in rows])


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
