"""Fused ops of the training step, each with a plain-torch twin, behind one dispatch rule.

``BINAC_KERNELS`` = ``auto`` (default) | ``reference`` | ``triton``. ``auto`` takes Triton for CUDA
tensors where it is installed, and the reference everywhere else: Triton's interpreter is for tests,
not for training. float64 tensors always take the reference. The choice is logged once for each kind
of device.

Shapes: T tokens, H hidden, V columns of this rank's vocabulary shard, W = ceil(V / 32) mask words.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_binac.algo import advantages, losses
from megatron_binac.algo.checks import check_gae, check_group, check_kinds, check_spread
from megatron_binac.algo.losses import PolicyLossConfig
from megatron_binac.kernels import credit, reference, topk, vocab_parallel
from megatron_binac.kernels.credit import CreditWeights, TreeCredit, TreeRewards
from megatron_binac.kernels.policy import histogram_quantile, policy_diagnostics
from megatron_binac.kernels.support import (
    pack_support,
    sampling_support,
    support_from_ids,
    unpack_support,
)

__all__ = [
    "CreditWeights",
    "TreeCredit",
    "TreeRewards",
    "choose_backend",
    "gae",
    "group_advantage",
    "histogram_quantile",
    "logprob_from_logits",
    "pack_support",
    "policy_loss",
    "sampling_support",
    "spread_to_tokens",
    "support_from_ids",
    "token_logprob",
    "topk_divergence",
    "tree_credit",
    "unpack_support",
]

logger = logging.getLogger(__name__)

Backend = Literal["reference", "triton"]
AdvantageKind = Literal["mean_centered", "leave_one_out", "std_normalized", "mean_normalized"]


def choose_backend(device_type: str) -> Backend:
    """The one dispatch rule, by the environment and the kind of device.

    Raises ValueError for an unknown ``BINAC_KERNELS``, for ``triton`` where it is not installed,
    and for ``triton`` on CPU tensors without the interpreter.
    """
    interpret = os.environ.get("TRITON_INTERPRET") == "1"
    return _choose(os.environ.get("BINAC_KERNELS", "auto"), device_type, interpret)


@functools.cache
def _choose(setting: str, device_type: str, interpret: bool) -> Backend:
    if setting not in ("auto", "reference", "triton"):
        raise ValueError(f"BINAC_KERNELS must be auto, reference or triton, got {setting!r}")
    installed = importlib.util.find_spec("triton") is not None
    if setting == "triton" and not installed:
        raise ValueError(
            "BINAC_KERNELS=triton needs Triton: pip install 'megatron-binac[kernels]', "
            "or BINAC_KERNELS=auto"
        )
    if setting == "triton" and device_type == "cpu" and not interpret:
        raise ValueError(
            "BINAC_KERNELS=triton with CPU tensors needs TRITON_INTERPRET=1 in the environment "
            "before the start (slow, for tests), or BINAC_KERNELS=auto"
        )
    on_gpu = setting == "auto" and installed and device_type == "cuda"
    backend: Backend = "triton" if setting == "triton" or on_gpu else "reference"
    logger.info("kernels: %s on %s (BINAC_KERNELS=%s)", backend, device_type, setting)
    return backend


def _uses_triton(tensor: Tensor) -> bool:
    return tensor.dtype != torch.float64 and choose_backend(tensor.device.type) == "triton"


def _vocab_backend(tensor: Tensor) -> vocab_parallel.VocabBackend:
    if _uses_triton(tensor):
        from megatron_binac.kernels import triton_logprob

        return triton_logprob
    return reference


def token_logprob(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    num_real_columns: int | None = None,
    first_column: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    mask_T: Tensor | None = None,
    support_TW: Tensor | None = None,
    with_entropy: bool = False,
    accumulate_into_main_grad: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each label, and the entropy, of softmax(hidden @ weight.T / temperature).

    The logits are never held: they are made tile by tile, once forward and once backward.

    hidden [T, H] ([T/tp, H] of this rank under ``sequence_parallel``), weight [V, H] (this rank's
    rows of the vocabulary), labels [T] (global ids) -> (log-prob [T], entropy [T] or None),
    float32 (float64 for float64). Differentiable by hidden and weight through both outputs.

    ``num_real_columns``: the global vocabulary without padding; columns behind it are never read.
    ``first_column``: global id of the weight's row 0 (default rank * V: equal contiguous shards).
    ``mask_T``: False rows are not computed; outputs and gradients 0, label and hidden not looked
    at. ``support_TW``: int32 bitmask of this shard's columns; the softmax runs over its bits and
    the label. ``accumulate_into_main_grad``: the weight's gradient is added to
    ``weight.main_grad``, as in Megatron's fused linear. ``chunk_size``: tokens of a tile (None:
    chosen so that a tile is 4 MiB).

    Under a ``tp_group`` the outputs are the same on every rank, so each rank computes the same
    loss and the same gradient comes back. The gradient of hidden is complete: summed over the
    group, or reduce-scattered to the rank's rows under ``sequence_parallel``; hidden must not
    also pass a copy-to-tensor-parallel-region.

    Raises ValueError for bad shapes, a temperature <= 0, and labels outside the real columns on the
    CPU (NaN on a GPU, which would have to wait for the check).
    """
    _check_linear(hidden_TH, weight_VH, accumulate_into_main_grad)
    check_kinds("float", hidden=hidden_TH)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, expected 1 token or more, or None")
    call = vocab_parallel.make_call(
        _vocab_backend(hidden_TH),
        labels_T,
        num_shard_columns=weight_VH.shape[0],
        temperature=temperature,
        num_real_columns=num_real_columns,
        first_column=first_column,
        tp_group=tp_group,
        mask_T=mask_T,
        support_TW=support_TW,
        with_entropy=with_entropy,
        sequence_parallel=sequence_parallel,
        accumulate_into_main_grad=accumulate_into_main_grad,
        chunk_size=chunk_size,
    )
    return vocab_parallel.LinearLogprob.apply(hidden_TH, weight_VH, call)  # type: ignore


def logprob_from_logits(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    num_real_columns: int | None = None,
    first_column: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    mask_T: Tensor | None = None,
    support_TW: Tensor | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``token_logprob`` for logits [T, V] (this rank's columns) that are already there."""
    if logits_TV.dim() != 2 or logits_TV.shape[0] != labels_T.numel():
        raise ValueError(
            f"logits must be [T, V], T = {labels_T.numel()} labels, got {tuple(logits_TV.shape)}: "
            "flatten the batch"
        )
    call = vocab_parallel.make_call(
        _vocab_backend(logits_TV),
        labels_T,
        num_shard_columns=logits_TV.shape[1],
        temperature=temperature,
        num_real_columns=num_real_columns,
        first_column=first_column,
        tp_group=tp_group,
        mask_T=mask_T,
        support_TW=support_TW,
        with_entropy=with_entropy,
    )
    return vocab_parallel.LogitsLogprob.apply(logits_TV, call)  # type: ignore[return-value]


def topk_divergence(
    student_logits_TV: Tensor,
    teacher_logits_TV: Tensor,
    *,
    top_k: int,
    alpha: float,
    temperature: float = 1.0,
    num_real_columns: int | None = None,
    first_column: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    mask_T: Tensor | None = None,
) -> Tensor:
    """``algo.distill.topk_divergence`` from two prompts' logits over a split vocabulary, [T].

    Logits [T, V] are of this rank's columns, row t of both for the same token. The ids are the
    student's global top k, the rest of the vocabulary is one bucket. alpha 0: KL(teacher ||
    student); 1: KL(student || teacher); between: Jensen-Shannon. Differentiable by the student;
    False rows of ``mask_T`` are not looked at. Under a ``tp_group`` the result is the same on
    every rank.

    Raises ValueError for shapes that disagree, top_k < 1, alpha outside [0, 1].
    """
    if student_logits_TV.dim() != 2 or student_logits_TV.shape != teacher_logits_TV.shape:
        raise ValueError(
            f"student and teacher must both be [T, V], got {tuple(student_logits_TV.shape)} and "
            f"{tuple(teacher_logits_TV.shape)}: take the rows of the same tokens"
        )
    if top_k < 1 or not 0.0 <= alpha <= 1.0:
        raise ValueError(f"top_k must be >= 1 and alpha in [0, 1], got {top_k} and {alpha}")
    check_kinds("float", student_logits=student_logits_TV, teacher_logits=teacher_logits_TV)
    ranks = 1 if tp_group is None else dist.get_world_size(tp_group)
    top_k = min(top_k, student_logits_TV.shape[1] * ranks)
    backend = _vocab_backend(student_logits_TV)
    call = vocab_parallel.make_call(
        backend,
        torch.zeros(student_logits_TV.shape[0], dtype=torch.int64, device=student_logits_TV.device),
        num_shard_columns=student_logits_TV.shape[1],
        temperature=temperature,
        num_real_columns=num_real_columns,
        first_column=first_column,
        tp_group=tp_group,
        mask_T=mask_T,
        support_TW=None,
        with_entropy=False,
    )
    return topk.TopkDivergence.apply(
        student_logits_TV,
        teacher_logits_TV.detach(),
        call,
        backend.bucket_divergence,
        top_k,
        alpha,
    )  # type: ignore[return-value]


def policy_loss(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
    cfg: PolicyLossConfig,
    *,
    ref_logprob_T: Tensor | None = None,
    engine_logprob_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    weight_T: Tensor | None = None,
    diagnostics: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``algo.losses.policy_loss``, fused: the same arguments, the same sum, the same statistics.

    With ``diagnostics`` also the sums ``kl_k1_sum``, ``kl_k2_sum``, ``kl_k3_sum`` (given a
    reference)
    and, given the engine's log-probs, ``mismatch_histogram`` [64] for ``histogram_quantile``: it
    adds up over micro-batches and ranks as a p99 does not. Take it out before ``finalize_stats``.
    Raises ValueError when a coefficient cannot act or shapes differ.
    """
    if not _uses_triton(logprob_T):
        loss, stats = losses.policy_loss(
            logprob_T,
            old_logprob_T,
            advantage_T,
            mask_T,
            cfg,
            ref_logprob_T=ref_logprob_T,
            engine_logprob_T=engine_logprob_T,
            entropy_T=entropy_T,
            cu_seqlens=cu_seqlens,
            weight_T=weight_T,
        )
        if diagnostics:
            stats |= policy_diagnostics(
                logprob_T, old_logprob_T, mask_T, ref_logprob_T, engine_logprob_T
            )
        return loss, stats
    from megatron_binac.kernels import triton_policy_loss

    losses.check_policy_inputs(
        cfg,
        cu_seqlens,
        logprob=logprob_T,
        old_logprob=old_logprob_T,
        advantage=advantage_T,
        mask=mask_T,
        ref_logprob=ref_logprob_T,
        engine_logprob=engine_logprob_T,
        entropy=entropy_T,
        weight=weight_T,
    )
    return triton_policy_loss.policy_loss(
        logprob_T,
        old_logprob_T,
        advantage_T,
        mask_T,
        cfg,
        ref_logprob_T=ref_logprob_T,
        engine_logprob_T=engine_logprob_T,
        entropy_T=entropy_T,
        cu_seqlens=cu_seqlens,
        weight_T=weight_T,
        diagnostics=diagnostics,
    )


def group_advantage(
    reward_N: Tensor, group_N: Tensor, valid_N: Tensor, kind: AdvantageKind
) -> tuple[Tensor, Tensor]:
    """``algo.advantages`` by name, in one launch: (advantage [N], trainable [N]).

    reward [N] float, group [N] integer ids in any order, valid [N] bool. Raises ValueError for an
    unknown kind or other shapes, and on the CPU for a valid reward that is not finite (on a GPU it
    makes its group's advantages NaN: looking would wait for the device).
    """
    kinds = AdvantageKind.__args__  # type: ignore[attr-defined]
    if kind not in kinds:
        raise ValueError(f"kind must be one of {', '.join(kinds)}, got {kind!r}")
    if not _uses_triton(reward_N):
        return credit.group_advantage(reward_N, group_N, valid_N, kind)
    check_group(reward_N, group_N, valid_N)
    if reward_N.device.type == "cpu" and not reward_N[valid_N].isfinite().all():
        raise ValueError("a valid reward is not finite: mark rows whose verifier failed as invalid")
    from megatron_binac.kernels import triton_segment

    return triton_segment.group_advantage(reward_N, group_N, valid_N, kind)


def tree_credit(trees: TreeRewards, weights: CreditWeights) -> TreeCredit:
    """Credit of every attempt, feedback and revision of a batch of trees, in one launch.

    ``algo.bilevel`` over all levels: attempts by reward and follow-up, feedbacks by (1 + lam) V -
    lam V* against their siblings, revisions against those of their attempt. Failed turns are in
    no mean. Raises ValueError where a coefficient has nothing to act on.
    """
    credit.check_coefficients(trees, weights)
    if not _uses_triton(trees.reward_PG):
        return credit.tree_credit(trees, weights)
    from megatron_binac.kernels import triton_segment

    return triton_segment.tree_credit(trees, weights)


def spread_to_tokens(value_S: Tensor, cu_seqlens: Tensor, mask_T: Tensor) -> Tensor:
    """Each sequence's value [S] on its masked-in tokens, 0 elsewhere, [T]; no wait for the
    borders.

    Raises ValueError for shapes or dtypes that do not fit, and on the CPU for borders that do not
    rise from 0 to T.
    """
    check_spread(value_S, cu_seqlens, mask_T)
    if not _uses_triton(value_S):
        return credit.spread_to_tokens(value_S, cu_seqlens, mask_T)
    from megatron_binac.kernels import triton_segment

    return triton_segment.spread_to_tokens(value_S, cu_seqlens, mask_T)


def gae(
    reward_T: Tensor,
    value_T: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """``algo.advantages.gae`` as one reverse scan a sequence: (advantage [T], return [T]).

    Raises ValueError for shapes or dtypes that do not fit, and on the CPU for borders that do not
    rise from 0 to T, or for gamma or lam outside of 0 to 1.
    """
    if not _uses_triton(reward_T):
        return advantages.gae(reward_T, value_T, cu_seqlens, gamma, lam, mask)
    check_gae(reward_T, value_T, cu_seqlens, mask, gamma, lam)
    from megatron_binac.kernels import triton_segment

    return triton_segment.gae(reward_T, value_T, cu_seqlens, gamma, lam, mask)


def _check_linear(hidden_TH: Tensor, weight_VH: Tensor, accumulate_into_main_grad: bool) -> None:
    if hidden_TH.dim() != 2 or weight_VH.dim() != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden must be [T, H] and weight [V, H], got {tuple(hidden_TH.shape)} and "
            f"{tuple(weight_VH.shape)}: flatten the batch, pass the output layer's own weight"
        )
    if hidden_TH.dtype != weight_VH.dtype:
        raise ValueError(
            f"hidden and weight must have one dtype, got {hidden_TH.dtype} and {weight_VH.dtype}"
        )
    needs_main_grad = accumulate_into_main_grad and weight_VH.requires_grad
    if needs_main_grad and not hasattr(weight_VH, "main_grad"):
        raise ValueError(
            "accumulate_into_main_grad needs weight.main_grad (Megatron's DDP sets it): "
            "wrap the model first, or turn it off"
        )
