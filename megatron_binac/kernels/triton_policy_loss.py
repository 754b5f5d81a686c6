"""Triton twin of ``algo.losses.policy_loss``: loss, gradient and statistics in one pass.

Shapes: T packed tokens, S sequences, R programs. A program takes one block of tokens, or one whole
sequence where the ratio is that of the sequence (it then reads the sequence twice). Sums are kept
in float32 by program and added up in float64: the order of the programs changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_binac.algo.losses import PolicyLossConfig
from megatron_binac.kernels.policy import HISTOGRAM_BINS
from megatron_binac.kernels.tile import Tile

POLICY = Tile(blocks={"BLOCK": 512}, num_warps=4)

# Columns of the table of partial results, one row a program.
SUMS = (
    "loss_sum",
    "num_tokens",
    "num_dropped",
    "policy_sum",
    "ratio_sum",
    "abs_log_ratio_sum",
    "clip_low_count",
    "clip_high_count",
    "dual_clip_count",
    "mismatch_sum",
    "engine_kl_sum",
    "engine_cap_count",
    "kl_sum",
    "kl_k1_sum",
    "kl_k2_sum",
    "kl_k3_sum",
    "entropy_sum",
)
MAXIMA = ("ratio_max", "mismatch_max")
NUM_COLUMNS = 32

_MAX = tl.constexpr(20.0)  # of a log ratio, as in the reference
_COLUMNS = tl.constexpr(NUM_COLUMNS)
_BINS = tl.constexpr(HISTOGRAM_BINS)


@triton.jit
def _clamp(x):
    """To +-20, with nan staying nan."""
    return tl.where(x > _MAX, _MAX, tl.where(x < -_MAX, -_MAX, x))


@triton.jit
def _inside(x):
    """Where the clamp passes the gradient on; nan counts as inside, so that it is not lost."""
    return ((x <= _MAX) & (x >= -_MAX)) | (x != x)


@triton.jit
def _k3(d):
    """exp(-d) - 1 + d; by its series where terms of order one would cancel."""
    series = 1.0 / 5040.0 - d * (1.0 / 40320.0)
    series = 1.0 / 720.0 - d * series
    series = 1.0 / 120.0 - d * series
    series = 1.0 / 24.0 - d * series
    series = 1.0 / 6.0 - d * series
    series = (0.5 - d * series) * d * d
    return tl.where(tl.abs(d) < 0.5, series, tl.exp(-d) - 1.0 + d)


@triton.jit
def _load(ptr, at, keep):
    """Float32, 0 where not kept: what lies there may be anything."""
    return tl.load(ptr + at, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _policy_loss_kernel(
    logprob_ptr,  # [T] and so all inputs
    old_ptr,
    advantage_ptr,
    mask_ptr,
    ref_ptr,
    engine_ptr,
    entropy_ptr,
    weight_ptr,
    cu_seqlens_ptr,  # [S + 1]
    grad_ptr,  # [T]
    grad_entropy_ptr,  # [T]
    table_ptr,  # [R, NUM_COLUMNS]
    histogram_ptr,  # [HISTOGRAM_BINS] int32
    T,
    clip_low,
    clip_high,
    dual_clip,
    kl_coef,
    engine_cap,
    entropy_coef,
    BLOCK: tl.constexpr,
    SEQUENCE_RATIO: tl.constexpr,
    NO_RATIO: tl.constexpr,
    DUAL_CLIP: tl.constexpr,
    HAS_REF: tl.constexpr,
    KL_K2: tl.constexpr,
    KL_K3: tl.constexpr,
    HAS_ENGINE: tl.constexpr,
    ENGINE_CAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    ENTROPY_GRADIENT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HISTOGRAM: tl.constexpr,
):
    pid = tl.program_id(0)
    if SEQUENCE_RATIO:
        lo = tl.load(cu_seqlens_ptr + pid).to(tl.int32)
        hi = tl.load(cu_seqlens_ptr + pid + 1).to(tl.int32)
    else:
        lo = pid * BLOCK
        hi = tl.minimum(lo + BLOCK, T)

    mean = 0.0
    if SEQUENCE_RATIO:
        total = tl.zeros((BLOCK,), tl.float32)
        count = tl.zeros((BLOCK,), tl.float32)
        for start in range(lo, hi, BLOCK):
            at = start + tl.arange(0, BLOCK)
            keep = tl.load(mask_ptr + at, mask=at < hi, other=0) != 0
            if HAS_ENGINE:
                engine = tl.load(engine_ptr + at, mask=keep, other=0.0).to(tl.float32)
                keep = keep & (tl.abs(engine) < float("inf"))
            total += _load(logprob_ptr, at, keep) - _load(old_ptr, at, keep)
            count += tl.where(keep, 1.0, 0.0)
        mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1.0)

    zeros = tl.zeros((BLOCK,), tl.float32)
    loss_sum = zeros
    num_tokens = zeros
    num_dropped = zeros
    policy_sum = zeros
    ratio_sum = zeros
    ratio_max = zeros
    abs_log_ratio_sum = zeros
    clip_low_count = zeros
    clip_high_count = zeros
    dual_clip_count = zeros
    mismatch_sum = zeros
    mismatch_max = zeros
    engine_kl_sum = zeros
    engine_cap_count = zeros
    kl_sum = zeros
    kl_k1_sum = zeros
    kl_k2_sum = zeros
    kl_k3_sum = zeros
    entropy_sum = zeros
    for start in range(lo, hi, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < hi
        trained = tl.load(mask_ptr + at, mask=inside, other=0) != 0
        keep = trained
        if HAS_ENGINE:
            engine = tl.load(engine_ptr + at, mask=trained, other=0.0).to(tl.float32)
            keep = trained & (tl.abs(engine) < float("inf"))
        logprob = _load(logprob_ptr, at, keep)
        old = _load(old_ptr, at, keep)
        advantage = _load(advantage_ptr, at, keep)

        difference = logprob - old
        log_ratio = difference
        if SEQUENCE_RATIO:
            log_ratio = tl.where(keep, mean, 0.0)
        ratio = tl.exp(_clamp(log_ratio))
        if NO_RATIO:
            policy = -advantage * logprob
            grad = -advantage
        else:
            low = (ratio < 1.0 - clip_low) & (advantage < 0.0)
            high = (ratio > 1.0 + clip_high) & (advantage > 0.0)
            surrogate = tl.where(
                low,
                (1.0 - clip_low) * advantage,
                tl.where(high, (1.0 + clip_high) * advantage, ratio * advantage),
            )
            cut = low | high
            clip_low_count += tl.where(low, 1.0, 0.0)
            clip_high_count += tl.where(high, 1.0, 0.0)
            if DUAL_CLIP:
                floor = dual_clip * advantage
                below = (advantage < 0.0) & (surrogate < floor)
                surrogate = tl.where(below, floor, surrogate)
                dual_clip_count += tl.where(below, 1.0, 0.0)
                cut = cut | below
            policy = -surrogate
            grad = tl.where(cut | ~_inside(log_ratio), 0.0, -advantage * ratio)
        if HAS_ENGINE:
            mismatch = old - tl.where(keep, engine, 0.0)
            clamped = _clamp(mismatch)
            mismatch_sum += tl.abs(mismatch)
            mismatch_max = tl.maximum(mismatch_max, tl.abs(mismatch))
            engine_kl_sum += _k3(-clamped)
            if ENGINE_CAP:
                engine_weight = tl.exp(clamped)
                engine_cap_count += tl.where(keep & (engine_weight > engine_cap), 1.0, 0.0)
                engine_weight = tl.minimum(engine_weight, engine_cap)
                policy = policy * engine_weight
                grad = grad * engine_weight
            if HISTOGRAM:
                # Quarter octaves from 2^-12 on; the first and the last bin take what lies beyond.
                octave = tl.log2(tl.maximum(tl.abs(mismatch), 1e-30))
                bucket = tl.floor((octave + 12.0) * 4.0).to(tl.int32) + 1
                bucket = tl.minimum(tl.maximum(bucket, 0), _BINS - 1)
                counts = tl.histogram(bucket, _BINS, mask=keep)
                tl.atomic_add(histogram_ptr + tl.arange(0, _BINS), counts)
        loss = policy
        if HAS_REF:
            apart = logprob - _load(ref_ptr, at, keep)
            d = _clamp(apart)
            k3 = _k3(d)
            if KL_K3:
                kl = k3
                kl_grad = tl.where(_inside(apart), d - k3, 0.0)
            elif KL_K2:
                kl = 0.5 * d * d
                kl_grad = tl.where(_inside(apart), d, 0.0)
            else:
                kl = d
                kl_grad = d
            kl_sum += kl
            kl_k1_sum += d
            kl_k2_sum += 0.5 * d * d
            kl_k3_sum += k3
            loss += kl_coef * kl
            grad += kl_coef * kl_grad
        if HAS_ENTROPY:
            entropy = _load(entropy_ptr, at, keep)
            entropy_sum += entropy
            loss -= entropy_coef * entropy
        scale = tl.where(keep, 1.0, 0.0)
        if HAS_WEIGHT:
            scale = _load(weight_ptr, at, keep)
        loss_sum += loss * scale
        tl.store(grad_ptr + at, tl.where(keep, grad * scale, 0.0), mask=inside)
        if ENTROPY_GRADIENT:
            tl.store(grad_entropy_ptr + at, -entropy_coef * scale, mask=inside)
        ratio = tl.where(keep, ratio, 0.0)
        num_tokens += tl.where(keep, 1.0, 0.0)
        num_dropped += tl.where(trained & ~keep, 1.0, 0.0)
        policy_sum += policy
        ratio_sum += ratio
        ratio_max = tl.maximum(ratio_max, ratio)
        abs_log_ratio_sum += tl.abs(difference)

    row = table_ptr + pid * _COLUMNS
    tl.store(row + 0, tl.sum(loss_sum, 0))
    tl.store(row + 1, tl.sum(num_tokens, 0))
    tl.store(row + 2, tl.sum(num_dropped, 0))
    tl.store(row + 3, tl.sum(policy_sum, 0))
    tl.store(row + 4, tl.sum(ratio_sum, 0))
    tl.store(row + 5, tl.sum(abs_log_ratio_sum, 0))
    tl.store(row + 6, tl.sum(clip_low_count, 0))
    tl.store(row + 7, tl.sum(clip_high_count, 0))
    tl.store(row + 8, tl.sum(dual_clip_count, 0))
    tl.store(row + 9, tl.sum(mismatch_sum, 0))
    tl.store(row + 10, tl.sum(engine_kl_sum, 0))
    tl.store(row + 11, tl.sum(engine_cap_count, 0))
    tl.store(row + 12, tl.sum(kl_sum, 0))
    tl.store(row + 13, tl.sum(kl_k1_sum, 0))
    tl.store(row + 14, tl.sum(kl_k2_sum, 0))
    tl.store(row + 15, tl.sum(kl_k3_sum, 0))
    tl.store(row + 16, tl.sum(entropy_sum, 0))
    tl.store(row + 17, tl.max(ratio_max, 0))
    tl.store(row + 18, tl.max(mismatch_max, 0))


class PolicyLoss(torch.autograd.Function):
    """(log-prob, entropy) -> loss sum; the gradient is made forward and scaled backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logprob_T: Tensor,
        entropy_T: Tensor | None,
        others: tuple[Tensor | None, ...],
        cfg: PolicyLossConfig,
        histogram: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        old_T, advantage_T, mask_T, ref_T, engine_T, cu_seqlens, weight_T = others
        assert old_T is not None and advantage_T is not None and mask_T is not None
        device, num_tokens = logprob_T.device, logprob_T.numel()
        num_programs = triton.cdiv(num_tokens, POLICY.blocks["BLOCK"])
        if cfg.ratio == "sequence":
            assert cu_seqlens is not None
            num_programs = cu_seqlens.numel() - 1
        entropy_gradient = entropy_T is not None and cfg.entropy_coef > 0.0
        # Zeros, not empty: a token that belongs to no sequence has no gradient.
        grad_T = torch.zeros(num_tokens, dtype=torch.float32, device=device)
        grad_entropy_T = torch.zeros_like(grad_T) if entropy_gradient else None
        table = torch.zeros((max(1, num_programs), NUM_COLUMNS), dtype=torch.float32, device=device)
        counts = torch.zeros(HISTOGRAM_BINS, dtype=torch.int32, device=device)
        if num_programs:
            _policy_loss_kernel[(num_programs,)](
                logprob_T,
                old_T,
                advantage_T,
                mask_T,
                ref_T,
                engine_T,
                entropy_T,
                weight_T,
                cu_seqlens,
                grad_T,
                grad_entropy_T,
                table,
                counts,
                num_tokens,
                cfg.clip_low,
                cfg.clip_high,
                0.0 if cfg.dual_clip is None else cfg.dual_clip,
                cfg.kl_coef,
                0.0 if cfg.engine_is_cap is None else cfg.engine_is_cap,
                cfg.entropy_coef,
                **POLICY.blocks,
                SEQUENCE_RATIO=cfg.ratio == "sequence",
                NO_RATIO=cfg.ratio == "none",
                DUAL_CLIP=cfg.dual_clip is not None,
                HAS_REF=ref_T is not None,
                KL_K2=cfg.kl_estimator == "k2",
                KL_K3=cfg.kl_estimator == "k3",
                HAS_ENGINE=engine_T is not None,
                ENGINE_CAP=cfg.engine_is_cap is not None,
                HAS_ENTROPY=entropy_T is not None,
                ENTROPY_GRADIENT=entropy_gradient,
                HAS_WEIGHT=weight_T is not None,
                HISTOGRAM=histogram and engine_T is not None,
                num_warps=POLICY.num_warps,
                num_stages=POLICY.num_stages,
            )
        ctx.save_for_backward(grad_T, grad_entropy_T)
        ctx.dtypes = logprob_T.dtype, None if entropy_T is None else entropy_T.dtype
        sums = table[:, : len(SUMS)].double().sum(0)
        maxima = table[:, len(SUMS) : len(SUMS) + len(MAXIMA)].double().amax(0)
        numbers = torch.cat([sums, maxima])
        ctx.mark_non_differentiable(numbers, counts)
        return sums[0].float(), numbers, counts

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_loss: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_T, grad_entropy_T = ctx.saved_tensors
        logprob_dtype, entropy_dtype = ctx.dtypes
        grad_logprob = (grad_T * grad_loss).to(logprob_dtype)
        grad_entropy = None
        if grad_entropy_T is not None and ctx.needs_input_grad[1]:
            grad_entropy = (grad_entropy_T * grad_loss).to(entropy_dtype)
        return grad_logprob, grad_entropy, None, None, None


def policy_loss(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
    cfg: PolicyLossConfig,
    *,
    ref_logprob_T: Tensor | None,
    engine_logprob_T: Tensor | None,
    entropy_T: Tensor | None,
    cu_seqlens: Tensor | None,
    weight_T: Tensor | None,
    diagnostics: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """See ``policy_loss`` of the package; arguments are checked there."""
    if cfg.ratio == "sequence" and cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last != logprob_T.numel():
            raise ValueError(
                f"cu_seqlens must go from 0 to {logprob_T.numel()}, the number of tokens, "
                f"got {first} to {last}"
            )
    others = (
        old_logprob_T,
        advantage_T,
        mask_T,
        ref_logprob_T,
        engine_logprob_T,
        cu_seqlens if cfg.ratio == "sequence" else None,
        weight_T,
    )
    others = tuple(None if x is None else x.detach().contiguous() for x in others)
    loss, numbers, counts = PolicyLoss.apply(
        logprob_T.contiguous(),
        None if entropy_T is None else entropy_T.contiguous(),
        others,
        cfg,
        diagnostics,
    )  # type: ignore[misc]
    values = dict(zip((*SUMS, *MAXIMA), numbers.unbind(), strict=True))
    names = ["num_tokens", "num_dropped", "policy_sum", "ratio_sum", "ratio_max"]
    names.append("abs_log_ratio_sum")
    if cfg.ratio != "none":
        names += ["clip_low_count", "clip_high_count"]
        names += ["dual_clip_count"] if cfg.dual_clip is not None else []
    if engine_logprob_T is not None:
        names += ["mismatch_sum", "mismatch_max", "engine_kl_sum"]
        names += ["engine_cap_count"] if cfg.engine_is_cap is not None else []
    if ref_logprob_T is not None:
        names += ["kl_sum"]
        names += ["kl_k1_sum", "kl_k2_sum", "kl_k3_sum"] if diagnostics else []
    if entropy_T is not None:
        names += ["entropy_sum"]
    whole = ("num_tokens", "num_dropped")
    stats = {
        name: values[name].long()
        if name in whole or name.endswith("_count")
        else values[name].float()
        for name in names
    }
    if diagnostics and engine_logprob_T is not None:
        stats["mismatch_histogram"] = counts
    return loss, stats
