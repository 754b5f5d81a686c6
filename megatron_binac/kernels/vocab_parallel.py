"""Log-prob and entropy of labels over a vocabulary that is split over a tensor-parallel group.

Shapes: T tokens, N rows that are scored, H hidden, V columns of this rank's shard, W words of a
support bitmask. Collectives move [N] vectors of statistics and [T, H] hidden states, never logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_binac.kernels.reference import Cotangent, Shard, Stats


class VocabBackend(Protocol):
    """What a module offers to compute one shard: ``reference`` or ``triton_logprob``."""

    linear_stats: Any
    linear_grads: Any
    logits_stats: Any
    logits_grad: Any
    bucket_divergence: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Everything of one call that is not a tensor with a gradient."""

    backend: VocabBackend
    shard: Shard
    num_real_columns: int
    labels_T: Tensor
    rows_N: Tensor | None
    support_TW: Tensor | None
    with_entropy: bool
    tp_group: dist.ProcessGroup | None
    sequence_parallel: bool = False
    accumulate_into_main_grad: bool = False
    chunk_size: int | None = None

    @property
    def labels_N(self) -> Tensor:
        return self.labels_T if self.rows_N is None else self.labels_T[self.rows_N]

    @property
    def support_NW(self) -> Tensor | None:
        if self.support_TW is None or self.rows_N is None:
            return self.support_TW
        return self.support_TW[self.rows_N]


def make_call(
    backend: VocabBackend,
    labels_T: Tensor,
    *,
    num_shard_columns: int,
    temperature: float,
    num_real_columns: int | None,
    first_column: int | None,
    tp_group: dist.ProcessGroup | None,
    mask_T: Tensor | None,
    support_TW: Tensor | None,
    with_entropy: bool,
    sequence_parallel: bool = False,
    accumulate_into_main_grad: bool = False,
    chunk_size: int | None = None,
) -> Call:
    """Check the arguments and place the shard.

    Raises ValueError for a temperature that is not positive, shapes that disagree and, on the CPU,
    labels outside the real columns (a GPU would have to wait for that check: there they give NaN).
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}: score greedy text at 1.0")
    if labels_T.dim() != 1 or labels_T.is_floating_point():
        raise ValueError(
            f"labels must be a 1-d integer tensor, got {labels_T.dtype} {tuple(labels_T.shape)}"
        )
    size, rank = group_place(tp_group)
    first = rank * num_shard_columns if first_column is None else first_column
    total = size * num_shard_columns
    real = total if num_real_columns is None else num_real_columns
    if num_real_columns is None and first_column is not None:
        raise ValueError("first_column given without num_real_columns: pass the global number too")
    if real < 1 or (first_column is None and real > total):
        raise ValueError(
            f"num_real_columns must be in [1, {total}] ({size} shards of {num_shard_columns}), "
            f"got {real}"
        )
    if mask_T is not None and (mask_T.shape != labels_T.shape or mask_T.dtype != torch.bool):
        raise ValueError(
            f"mask must be bool {tuple(labels_T.shape)} like the labels, "
            f"got {mask_T.dtype} {tuple(mask_T.shape)}"
        )
    rows_N = None if mask_T is None else mask_T.nonzero().squeeze(1)
    words = (num_shard_columns + 31) // 32
    if support_TW is not None and (
        support_TW.dtype != torch.int32 or support_TW.shape != (labels_T.numel(), words)
    ):
        raise ValueError(
            f"support must be int32 [{labels_T.numel()}, {words}] (32 columns a word), "
            f"got {support_TW.dtype} {tuple(support_TW.shape)}"
        )
    call = Call(
        backend=backend,
        shard=Shard(
            first_column=first,
            num_columns=max(0, min(num_shard_columns, real - first)),
            inv_temperature=1.0 / temperature,
        ),
        num_real_columns=real,
        labels_T=labels_T,
        rows_N=rows_N,
        support_TW=support_TW,
        with_entropy=with_entropy,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel and size > 1,
        accumulate_into_main_grad=accumulate_into_main_grad,
        chunk_size=chunk_size,
    )
    if labels_T.device.type == "cpu":
        labels_N = call.labels_N
        bad_K = ((labels_N < 0) | (labels_N >= real)).nonzero().squeeze(1)
        if bad_K.numel():
            raise ValueError(
                f"labels must be in [0, {real}), got {int(labels_N[bad_K[0]])} at scored row "
                f"{int(bad_K[0])} ({bad_K.numel()} in all): mask such rows with mask_T"
            )
    return call


def group_place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(size, rank) of a group; None is a group of one."""
    return (1, 0) if group is None else (group.size(), group.rank())


def combine(stats: Stats, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Join the shards' partial softmaxes: (log-sum-exp, log-prob of the label, entropy), each [N].

    One MAX and one SUM all-reduce of [N] and [3, N]. A label that no column carries gives NaN.
    """
    shard_max_N = stats.max_N
    max_N = shard_max_N
    parts_3N = torch.stack((stats.sum_exp_N, stats.sum_shifted_N, stats.target_N))
    if call.tp_group is not None and call.tp_group.size() > 1:
        max_N = shard_max_N.clone()
        dist.all_reduce(max_N, op=dist.ReduceOp.MAX, group=call.tp_group)
        # A shard without a finite column has nothing to move; -inf - -inf would be nan.
        moved_N = torch.where(shard_max_N == -torch.inf, 0.0, shard_max_N - max_N)
        parts_3N[1] = (parts_3N[1] + parts_3N[0] * moved_N) * moved_N.exp()
        parts_3N[0] *= moved_N.exp()
        dist.all_reduce(parts_3N, op=dist.ReduceOp.SUM, group=call.tp_group)
    sum_exp_N, sum_shifted_N, target_N = parts_3N
    log_sum_N = sum_exp_N.log()
    labels_N = call.labels_N
    known_N = (labels_N >= 0) & (labels_N < call.num_real_columns)
    # (target - max) first: both are large where logits are, and their difference is exact.
    logprob_N = torch.where(known_N, (target_N - max_N) - log_sum_N, torch.nan)
    entropy_N = log_sum_N - sum_shifted_N / sum_exp_N
    return max_N + log_sum_N, logprob_N, entropy_N


def _scatter(values_N: Tensor, call: Call) -> Tensor:
    if call.rows_N is None:
        return values_N
    out_T = values_N.new_zeros(call.labels_T.numel())
    out_T[call.rows_N] = values_N
    return out_T


def _pick(values_T: Tensor | None, call: Call, like_N: Tensor) -> Tensor:
    if values_T is None:
        return torch.zeros_like(like_N)
    values_N = values_T if call.rows_N is None else values_T[call.rows_N]
    return values_N.to(like_N.dtype).contiguous()


def _gather_rows(hidden: Tensor, call: Call) -> Tensor:
    """[T / tp, H] of this rank -> [T, H]."""
    if not call.sequence_parallel:
        return hidden
    assert call.tp_group is not None
    full_TH = hidden.new_empty((hidden.shape[0] * call.tp_group.size(), hidden.shape[1]))
    dist.all_gather_into_tensor(full_TH, hidden.contiguous(), group=call.tp_group)
    return full_TH


def _cotangent(
    call: Call,
    lse_N: Tensor,
    entropy_N: Tensor,
    grad_logprob_T: Tensor | None,
    grad_entropy_T: Tensor | None,
) -> Cotangent:
    return Cotangent(
        log_sum_exp_N=lse_N,
        entropy_N=entropy_N,
        grad_logprob_N=_pick(grad_logprob_T, call, lse_N),
        grad_entropy_N=None if grad_entropy_T is None else _pick(grad_entropy_T, call, lse_N),
    )


class LinearLogprob(torch.autograd.Function):
    """(hidden, weight shard) -> (log-prob, entropy); the logits are made tile by tile, twice."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight_VH: Tensor, call: Call
    ) -> tuple[Tensor, Tensor | None]:
        hidden_TH = _gather_rows(hidden, call)
        if hidden_TH.shape[0] != call.labels_T.numel():
            raise ValueError(
                f"hidden has {hidden_TH.shape[0]} rows (over the group if sequence parallel), "
                f"labels {call.labels_T.numel()}: pad both to the same T"
            )
        stats = call.backend.linear_stats(
            hidden_TH,
            weight_VH,
            call.labels_N,
            call.rows_N,
            call.shard,
            support_NW=call.support_NW,
            with_entropy=call.with_entropy,
            chunk_size=call.chunk_size,
        )
        lse_N, logprob_N, entropy_N = combine(stats, call)
        ctx.save_for_backward(hidden, weight_VH, lse_N, entropy_N)
        ctx.call = call
        # Kept outside save_for_backward: it is written in place by every micro-batch.
        ctx.main_grad = (
            weight_VH.main_grad
            if call.accumulate_into_main_grad and weight_VH.requires_grad
            else None
        )
        ctx.set_materialize_grads(False)
        return _scatter(logprob_N, call), _scatter(entropy_N, call) if call.with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        call: Call = ctx.call
        hidden, weight_VH, lse_N, entropy_N = ctx.saved_tensors
        want_hidden, want_weight, _ = ctx.needs_input_grad
        hidden_TH = _gather_rows(hidden, call)
        grad_hidden_TH = torch.zeros_like(hidden_TH) if want_hidden else None
        grad_weight_VH = None
        if want_weight:
            grad_weight_VH = torch.zeros_like(weight_VH) if ctx.main_grad is None else ctx.main_grad
        call.backend.linear_grads(
            hidden_TH,
            weight_VH,
            call.labels_N,
            call.rows_N,
            call.shard,
            _cotangent(call, lse_N, entropy_N, grad_logprob_T, grad_entropy_T),
            support_NW=call.support_NW,
            chunk_size=call.chunk_size,
            grad_hidden_TH=grad_hidden_TH,
            grad_weight_VH=grad_weight_VH,
        )
        if ctx.main_grad is not None and grad_weight_VH is not None:
            grad_weight_VH = _hand_over_main_grad(weight_VH)
        return _reduce_rows(grad_hidden_TH, call), grad_weight_VH, None


class LogitsLogprob(torch.autograd.Function):
    """Logits of this rank's columns -> (log-prob, entropy)."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        stats = call.backend.logits_stats(
            logits_TV,
            call.labels_N,
            call.rows_N,
            call.shard,
            support_NW=call.support_NW,
            with_entropy=call.with_entropy,
        )
        lse_N, logprob_N, entropy_N = combine(stats, call)
        ctx.save_for_backward(logits_TV, lse_N, entropy_N)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return _scatter(logprob_N, call), _scatter(entropy_N, call) if call.with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor, None]:
        call: Call = ctx.call
        logits_TV, lse_N, entropy_N = ctx.saved_tensors
        grad_logits_TV = torch.zeros_like(logits_TV)
        call.backend.logits_grad(
            logits_TV,
            call.labels_N,
            call.rows_N,
            call.shard,
            _cotangent(call, lse_N, entropy_N, grad_logprob_T, grad_entropy_T),
            support_NW=call.support_NW,
            grad_logits_TV=grad_logits_TV,
        )
        return grad_logits_TV, None


def _reduce_rows(grad_hidden_TH: Tensor | None, call: Call) -> Tensor | None:
    """Sum the shards' hidden gradients; under sequence parallelism each rank keeps its own rows."""
    if grad_hidden_TH is None or call.tp_group is None or call.tp_group.size() == 1:
        return grad_hidden_TH
    if not call.sequence_parallel:
        dist.all_reduce(grad_hidden_TH, group=call.tp_group)
        return grad_hidden_TH
    num_rows, width = grad_hidden_TH.shape
    own = grad_hidden_TH.new_empty((num_rows // call.tp_group.size(), width))
    dist.reduce_scatter_tensor(own, grad_hidden_TH, group=call.tp_group)
    return own


def _hand_over_main_grad(weight_VH: Tensor) -> Tensor | None:
    """What autograd gets for a weight whose gradient is already in ``main_grad``.

    Megatron's DDP hook fires only if a gradient arrives and then looks at
    ``grad_added_to_main_grad``, so a parameter that has the flag gets an unread placeholder.
    """
    if not hasattr(weight_VH, "grad_added_to_main_grad"):
        return None
    weight_VH.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight_VH, "zero_out_wgrad", False):
        return torch.zeros_like(weight_VH)
    return torch.empty_like(weight_VH)
