"""Divergence of two policies on the student's top-k ids and one bucket for the rest.

Shapes: T tokens, N rows that are scored, V columns of this rank's vocabulary shard, K ids, B = K
+ 1 buckets (the last is the tail), W words of a bitmask.

Over buckets both distributions are a softmax of K logits and the tail's log-sum-exp, so nothing
is ever subtracted from 1, and a tail of 1e-12 keeps its digits. Between ranks move [N, K]
candidates and [N] sums. The heavy work (two passes over logits that are there) is that of
``logprob_from_logits``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_binac.kernels.reference import Cotangent, compute_dtype
from megatron_binac.kernels.support import support_from_ids
from megatron_binac.kernels.vocab_parallel import Call, combine


class TopkDivergence(torch.autograd.Function):
    """Student's logits of this rank's columns -> divergence [T]; the teacher has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        student_TV: Tensor,
        teacher_TV: Tensor,
        call: Call,
        bucket_divergence: Any,
        top_k: int,
        alpha: float,
    ) -> Tensor:
        ids_NK = _top_ids(student_TV, call, top_k)
        shard = call.shard
        chosen_NW = support_from_ids(
            ids_NK, num_shard_columns=student_TV.shape[1], first_column=shard.first_column
        )
        student_NB = _buckets(student_TV, ids_NK, ~chosen_NW, call)
        teacher_NB = _buckets(teacher_TV, ids_NK, ~chosen_NW, call)
        divergence_N, grad_NB = bucket_divergence(student_NB, teacher_NB, alpha)
        ctx.save_for_backward(student_TV, ids_NK, ~chosen_NW, student_NB[:, -1], grad_NB)
        ctx.call = call
        return _to_tokens(divergence_N, call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        call: Call = ctx.call
        student_TV, ids_NK, tail_NW, tail_N, grad_NB = ctx.saved_tensors
        grad_N = grad_T if call.rows_N is None else grad_T[call.rows_N]
        grad_NB = grad_NB * grad_N[:, None]
        grad_TV = torch.zeros_like(student_TV)
        # d tail / d z_j = e^(z_j - tail) for a column of the tail: minus what log p of no label
        # has.
        call.backend.logits_grad(
            student_TV,
            torch.full_like(ids_NK[:, 0], -1),
            call.rows_N,
            call.shard,
            Cotangent(
                log_sum_exp_N=tail_N.contiguous(),
                entropy_N=tail_N.contiguous(),
                grad_logprob_N=-grad_NB[:, -1].contiguous(),
                grad_entropy_N=None,
            ),
            support_NW=tail_NW,
            grad_logits_TV=grad_TV,
        )
        row_J, at_J, column_J = _own(ids_NK, call)
        values_J = grad_NB[row_J, at_J] * call.shard.inv_temperature
        rows_J = row_J if call.rows_N is None else call.rows_N[row_J]
        grad_TV[rows_J, column_J] = values_J.to(grad_TV.dtype)
        return grad_TV, None, None, None, None, None


def _top_ids(logits_TV: Tensor, call: Call, top_k: int) -> Tensor:
    """Global ids of the k largest logits over all ranks, [N, K]; -1 where columns run out."""
    shard, labels_N = call.shard, call.labels_N
    value_NK = torch.full(
        (labels_N.numel(), top_k), -torch.inf, dtype=torch.float32, device=logits_TV.device
    )
    ids_NK = torch.full_like(value_NK, -1, dtype=torch.int64)
    here = min(top_k, shard.num_columns)
    if here and labels_N.numel():
        real_TV = logits_TV[:, : shard.num_columns]
        rows = 1 + 2**22 // shard.num_columns
        for start in range(0, labels_N.numel(), rows):
            part = slice(start, start + rows)
            chunk = real_TV[part] if call.rows_N is None else real_TV[call.rows_N[part]]
            top = chunk.topk(here, dim=1)
            value_NK[part, :here] = top.values.float()
            ids_NK[part, :here] = top.indices + shard.first_column
    if call.tp_group is None or call.tp_group.size() == 1:
        return ids_NK
    values = [torch.empty_like(value_NK) for _ in range(call.tp_group.size())]
    ids = [torch.empty_like(ids_NK) for _ in range(call.tp_group.size())]
    dist.all_gather(values, value_NK, group=call.tp_group)
    dist.all_gather(ids, ids_NK, group=call.tp_group)
    best_NK = torch.cat(values, dim=1).topk(top_k, dim=1).indices
    return torch.cat(ids, dim=1).gather(1, best_NK)


def _own(ids_NK: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(row, place in the list, column of this shard) of the ids that this rank holds."""
    column_NK = ids_NK - call.shard.first_column
    here_NK = (ids_NK >= 0) & (column_NK >= 0) & (column_NK < call.shard.num_columns)
    row_J, at_J = here_NK.nonzero(as_tuple=True)
    return row_J, at_J, column_NK[row_J, at_J]


def _buckets(logits_TV: Tensor, ids_NK: Tensor, tail_NW: Tensor, call: Call) -> Tensor:
    """K logits over the temperature, then the log-sum-exp of all other columns, [N, B]."""
    row_J, at_J, column_J = _own(ids_NK, call)
    rows_J = row_J if call.rows_N is None else call.rows_N[row_J]
    dtype = compute_dtype(logits_TV)
    picked_NK = torch.zeros(ids_NK.shape, dtype=dtype, device=logits_TV.device)
    picked_NK[row_J, at_J] = logits_TV[rows_J, column_J].to(dtype) * call.shard.inv_temperature
    if call.tp_group is not None and call.tp_group.size() > 1:
        dist.all_reduce(picked_NK, group=call.tp_group)
    picked_NK = torch.where(ids_NK < 0, -torch.inf, picked_NK)
    stats = call.backend.logits_stats(
        logits_TV,
        torch.full_like(ids_NK[:, 0], -1),
        call.rows_N,
        call.shard,
        support_NW=tail_NW,
        with_entropy=False,
    )
    tail_N, _, _ = combine(stats, call)
    return torch.cat([picked_NK, tail_N[:, None]], dim=1)


def _to_tokens(values_N: Tensor, call: Call) -> Tensor:
    if call.rows_N is None:
        return values_N
    out_T = values_N.new_zeros(call.labels_T.numel())
    out_T[call.rows_N] = values_N
    return out_T
