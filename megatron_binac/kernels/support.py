"""Which columns an engine sampled from, as a bitmask: log-probs are then taken on the same set.

Shapes: T tokens, V columns of this rank's vocabulary shard, W = ceil(V / 32) words of 32 columns,
K ids of an engine's list, C rows of a chunk. Bit ``j % 32`` of word ``j // 32`` is column j.

The mask belongs to the policy that SAMPLED: it is made once and kept while the policy moves. Made
again from the new policy, it would give old and new log-prob two different sets, and their ratio
would compare distributions that are not over the same thing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

# Cumulative probabilities are rounded: a set whose mass is top_p but for 1e-6 is full.
_MASS_SLACK = 1e-6
_CHUNK_ELEMENTS = 2**21
_KEY_OF_MINUS_INF = -0x7F800000


def pack_support(keep_TV: Tensor) -> Tensor:
    """Bool [T, V] -> int32 [T, W]."""
    num_rows, num_columns = keep_TV.shape
    words = (num_columns + 31) // 32
    padded_TV = torch.nn.functional.pad(keep_TV, (0, words * 32 - num_columns))
    bit_B = torch.arange(32, dtype=torch.int64, device=keep_TV.device)
    word_TW = (padded_TV.view(num_rows, words, 32).long() << bit_B).sum(dim=2)
    return torch.where(word_TW >= 2**31, word_TW - 2**32, word_TW).to(torch.int32)


def unpack_support(support_TW: Tensor, num_columns: int) -> Tensor:
    """int32 [T, W] -> bool [T, V]."""
    bit_B = torch.arange(32, dtype=torch.int32, device=support_TW.device)
    keep_TWB = (support_TW[:, :, None] >> bit_B) & 1 != 0
    return keep_TWB.flatten(1)[:, :num_columns]


def support_from_ids(ids_TK: Tensor, *, num_shard_columns: int, first_column: int = 0) -> Tensor:
    """Support from the engine's own list of candidates: global ids [T, K], negative = no id."""
    column_TK = ids_TK - first_column
    here_TK = (ids_TK >= 0) & (column_TK >= 0) & (column_TK < num_shard_columns)
    # One column more than there are takes the ids that are not here, and is cut off again.
    at_TK = torch.where(here_TK, column_TK, num_shard_columns).long()
    num_rows, words = ids_TK.shape[0], (num_shard_columns + 31) // 32
    support_TW = torch.zeros((num_rows, words), dtype=torch.int32, device=ids_TK.device)
    rows = max(1, _CHUNK_ELEMENTS // (num_shard_columns + 1))
    for start in range(0, num_rows, rows):
        at_CK = at_TK[start : start + rows]
        keep_CV = torch.zeros(
            (at_CK.shape[0], num_shard_columns + 1), dtype=torch.bool, device=ids_TK.device
        ).scatter_(1, at_CK, True)
        support_TW[start : start + rows] = pack_support(keep_CV[:, :num_shard_columns])
    return support_TW


@torch.no_grad()
def sampling_support(
    logits_TV: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_real_columns: int | None = None,
    first_column: int = 0,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Support of top-k, then top-p sampling from logits [T, V] of this rank's columns.

    Top-k keeps every column that ties with the k-th; top-p keeps, among those, the likeliest
    columns until their renormalised mass reaches ``top_p``, ties together. Exact over a vocabulary
    split by ``tp_group``: k values and sums of mass are exchanged, never logits.

    Raises ValueError for top_k < 1, top_p outside (0, 1] and a temperature <= 0.
    """
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be >= 1, got {top_k}: use None for the whole vocabulary")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}: use None for the whole vocabulary")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    num_rows, num_columns = logits_TV.shape
    real = num_columns
    if num_real_columns is not None:
        real = max(0, min(num_columns, num_real_columns - first_column))
    words = (num_columns + 31) // 32
    support_TW = torch.zeros((num_rows, words), dtype=torch.int32, device=logits_TV.device)
    rows = max(1, _CHUNK_ELEMENTS // max(1, num_columns))
    for start in range(0, num_rows, rows):
        z_CV = logits_TV[start : start + rows].float() / temperature
        z_CV[:, real:] = -torch.inf
        floor_C = z_CV.new_full((z_CV.shape[0],), -torch.inf)
        if top_k is not None:
            floor_C = _kth_largest(z_CV, top_k, tp_group)
        if top_p is not None:
            floor_C = _mass_floor(z_CV, floor_C, top_p, tp_group)
        keep_CV = (z_CV >= floor_C[:, None]) & (z_CV > -torch.inf)
        support_TW[start : start + rows] = pack_support(keep_CV)
    return support_TW


def _kth_largest(z_CV: Tensor, top_k: int, tp_group: dist.ProcessGroup | None) -> Tensor:
    size = 1 if tp_group is None else tp_group.size()
    top_CK = z_CV.new_full((z_CV.shape[0], top_k), -torch.inf)
    here = min(top_k, z_CV.shape[1])
    top_CK[:, :here] = z_CV.topk(here, dim=1).values
    if size > 1:
        parts = [torch.empty_like(top_CK) for _ in range(size)]
        dist.all_gather(parts, top_CK, group=tp_group)
        top_CK = torch.cat(parts, dim=1).topk(top_k, dim=1).values
    return top_CK[:, -1]


def _mass_floor(
    z_CV: Tensor, floor_C: Tensor, top_p: float, tp_group: dist.ProcessGroup | None
) -> Tensor:
    """Largest value that the columns at or above it still carry ``top_p`` of the mass above floor.

    Bisection over the ordered bit patterns of float32: it ends on an exact logit after 32 steps,
    and each step moves one number a row between ranks instead of a sorted vocabulary.
    """
    z_CV = z_CV.masked_fill(z_CV < floor_C[:, None], -torch.inf)
    max_C = z_CV.amax(dim=1) if z_CV.shape[1] else torch.full_like(floor_C, -torch.inf)
    if tp_group is not None and tp_group.size() > 1:
        dist.all_reduce(max_C, op=dist.ReduceOp.MAX, group=tp_group)
    p_CV = (z_CV - max_C[:, None]).exp()
    key_CV = _ordered_bits(z_CV)

    def mass(least_C: Tensor) -> Tensor:
        sum_C = torch.where(key_CV >= least_C[:, None], p_CV, 0.0).double().sum(dim=1)
        if tp_group is not None and tp_group.size() > 1:
            dist.all_reduce(sum_C, group=tp_group)
        return sum_C

    low_C = torch.full_like(floor_C, _KEY_OF_MINUS_INF, dtype=torch.int64)
    high_C = _ordered_bits(max_C)
    enough_C = mass(low_C) * (top_p - _MASS_SLACK)
    for _ in range(32):
        middle_C = low_C + (high_C - low_C + 1) // 2
        reached_C = mass(middle_C) >= enough_C
        low_C = torch.where(reached_C, middle_C, low_C)
        high_C = torch.where(reached_C, high_C, middle_C - 1)
    magnitude_C = low_C.abs().to(torch.int32).view(torch.float32)
    return torch.where(low_C < 0, -magnitude_C, magnitude_C)


def _ordered_bits(z: Tensor) -> Tensor:
    """Float32 -> int64 of the same order: the bits of the magnitude, signed as the number."""
    bits = z.contiguous().view(torch.int32).long()
    return torch.where(bits >= 0, bits, -(bits + 2**31))
