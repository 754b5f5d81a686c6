"""What each kind of term computes on one packed row: hidden states in, loss sum and statistics out.

Shapes: T tokens of a row, N masked tokens of it, V columns of this rank's vocabulary shard.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_binac.algo import distill
from megatron_binac.algo.losses import PolicyLossConfig, nll_loss
from megatron_binac.config import LossConfig
from megatron_binac.kernels import policy_loss, topk_divergence
from megatron_binac.models import contract
from megatron_binac.models.forward import MicroBatch, Scorer
from megatron_binac.planner.flops import Work
from megatron_binac.terms import CrossEntropy, Distill, FirstPrompt, Shaped, Term, TermLoss

Values = tuple[Tensor, dict[str, Tensor]]


@dataclass(kw_only=True, slots=True)
class Rows:
    """One term's rows on this rank, and what was scored on them before the first step."""

    term: Term
    batches: list[MicroBatch]
    denominator: float
    work: Work
    """What one pass over the term's rows needs, of the global batch."""
    old: list[Tensor] = field(default_factory=list)
    """Log-prob [T] of each row before the first step; empty where the step's own are the old."""
    reference: list[Tensor] = field(default_factory=list)
    teacher: list[Tensor] = field(default_factory=list)
    """The teacher's logits [N, V] of each row."""


def denominator(term: Term) -> float:
    """What the term's loss sum is divided by, over the global batch."""
    if term.denominator is not None:
        return term.denominator
    if isinstance(term.loss, LossConfig):
        if term.loss.aggregate in ("sequence_mean", "sequence_sum"):
            return float(term.num_rows)
        if term.loss.aggregate == "constant":
            return float(term.num_rows * term.loss.constant_length)
    return float(term.num_targets)


def by_sequence(loss: TermLoss) -> bool:
    """Whether a token counts by one over the targets of its sequence."""
    return isinstance(loss, LossConfig) and loss.aggregate == "sequence_mean"


def policy_config(loss: LossConfig) -> PolicyLossConfig:
    return PolicyLossConfig(
        ratio=loss.ratio,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        kl_coef=loss.kl_coef,
        kl_estimator=loss.kl_estimator,
        engine_is_cap=loss.engine_is_cap,
        entropy_coef=loss.entropy_coef,
    )


def compute(scorer: Scorer, rows: Rows, hidden: Tensor, number: int) -> Values:
    """Loss sum and statistics of row `number` of a term."""
    loss, batch = rows.term.loss, rows.batches[number]
    if isinstance(loss, Distill):
        return _distill(scorer, loss, hidden, batch, rows.teacher[number])
    logprob_T, entropy_T = scorer(hidden, batch, with_entropy=isinstance(loss, LossConfig))
    return _values(
        loss,
        logprob_T,
        entropy_T,
        batch.advantage_T,
        batch.mask_T,
        old_T=rows.old[number] if rows.old else None,
        reference_T=rows.reference[number] if rows.reference else None,
        engine_T=batch.engine_logprob_T,
        weight_T=batch.weight_T,
        cu_seqlens=batch.cu_seqlens() if _by_sequence_ratio(loss) else None,
    )


def names(loss: TermLoss, device: torch.device) -> list[str]:
    """Names of a term's statistics, for ranks that compute none: those of an empty row."""
    empty = torch.zeros(0, device=device)
    if isinstance(loss, Distill):
        return sorted(
            distill.weigh_divergence(empty, empty.bool(), loss.ratio_clip, empty, empty)[1]
        )
    needs_reference = isinstance(loss, LossConfig) and loss.kl_coef > 0
    _, stats = _values(
        loss,
        empty,
        empty,
        empty,
        empty.bool(),
        old_T=None,
        reference_T=empty if needs_reference else None,
        engine_T=empty,
        weight_T=None,
        cu_seqlens=torch.zeros(2, dtype=torch.int32, device=device)
        if _by_sequence_ratio(loss)
        else None,
    )
    return sorted(stats)


def _by_sequence_ratio(loss: TermLoss) -> bool:
    return isinstance(loss, LossConfig) and loss.ratio == "sequence"


def _values(
    loss: TermLoss,
    logprob_T: Tensor,
    entropy_T: Tensor | None,
    advantage_T: Tensor,
    mask_T: Tensor,
    *,
    old_T: Tensor | None,
    reference_T: Tensor | None,
    engine_T: Tensor,
    weight_T: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Values:
    if isinstance(loss, CrossEntropy):
        return nll_loss(logprob_T, mask_T, weight_T)
    if isinstance(loss, FirstPrompt):
        return distill.rltf_sd_loss(logprob_T, advantage_T, mask_T, loss.floor)
    if isinstance(loss, Shaped):
        return distill.critique_grpo_loss(logprob_T, advantage_T, mask_T, loss.gamma)
    assert isinstance(loss, LossConfig)
    # With one step a batch the log-probs of the same forward pass are the old ones: ratio 1.
    old_T = logprob_T.detach() if old_T is None else old_T
    loss_sum, stats = policy_loss(
        logprob_T,
        old_T,
        advantage_T,
        mask_T,
        policy_config(loss),
        ref_logprob_T=reference_T,
        engine_logprob_T=engine_T,
        entropy_T=entropy_T,
        cu_seqlens=cu_seqlens,
        weight_T=weight_T,
    )
    return loss_sum, {**stats, **contract.counts(old_T, engine_T, mask_T)}


def _distill(
    scorer: Scorer,
    loss: Distill,
    hidden: Tensor,
    batch: MicroBatch,
    teacher_NV: Tensor,
) -> Values:
    """SDPO over the split vocabulary: as `algo.distill.sdpo_loss`, from logits."""
    student_NV = scorer.target_logits(hidden, batch)
    divergence_N = topk_divergence(
        student_NV,
        teacher_NV,
        top_k=loss.top_k,
        alpha=loss.alpha,
        temperature=scorer.temperature,
        num_real_columns=scorer.vocab_size,
        tp_group=scorer.groups.collection.tp,
    )
    with torch.no_grad():
        logprob_T, _ = scorer(hidden, batch, with_entropy=False)
    return distill.weigh_divergence(
        divergence_N,
        torch.ones_like(divergence_N, dtype=torch.bool),
        loss.ratio_clip,
        logprob_T[batch.mask_T],
        batch.engine_logprob_T[batch.mask_T],
    )
