"""Triton twins of the vocabulary ops of ``reference.py``: same signatures, same numbers.

Shapes: T tokens, N scored rows, H hidden, V columns of this rank's shard, W words of a support
bitmask, S splits of the columns. Tiles: BT rows, BV columns, BH of the hidden dimension.

The logits of a tile live in registers only. The forward folds them into an online softmax; the
backward makes them again, turns them into their gradient in the epilogue, and spends one small
[rows, columns] buffer (bfloat16 for bfloat16 inputs) on the two products that need it.

Every load is upcast and every store downcast here: the interpreter computes on the bit patterns of
bfloat16 otherwise, and silently so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_binac.kernels.reference import (
    BACKWARD_COLUMNS,
    BACKWARD_ROWS,
    Cotangent,
    Shard,
    Stats,
)
from megatron_binac.kernels.tile import INTERPRET, Tile

# By the bytes of an element: float32 has no exact matrix instruction, so its tiles are sized for
# plain multiply-adds. Chosen by the offline compile (zero spills on sm_80, sm_90 and sm_100) and to
# stay within 96 KiB of shared memory, which every card since sm_80 has.
LINEAR = {
    2: Tile(blocks={"BT": 128, "BV": 128, "BH": 64}, num_warps=8, num_stages=3),
    4: Tile(blocks={"BT": 64, "BV": 128, "BH": 16}, num_warps=8, num_stages=2),
}
ACCUMULATE = {
    2: Tile(blocks={"BM": 128, "BN": 128, "BK": 64}, num_warps=8, num_stages=3),
    4: Tile(blocks={"BM": 64, "BN": 64, "BK": 32}, num_warps=8, num_stages=2),
}
LOGITS = Tile(blocks={"BT": 1, "BV": 2048}, num_warps=4)
MERGE = Tile(blocks={"BT": 128}, num_warps=4)
BUCKET_ELEMENTS = 1024

if INTERPRET:
    # The interpreter pays for each program and each element: tiles are large, and `fit` trims them.
    LINEAR = dict.fromkeys((2, 4), Tile(blocks={"BT": 128, "BV": 4096, "BH": 64}, num_warps=1))
    ACCUMULATE = dict.fromkeys((2, 4), Tile(blocks={"BM": 2048, "BN": 64, "BK": 512}, num_warps=1))
    LOGITS = Tile(blocks={"BT": 64, "BV": 4096}, num_warps=1)

GROUP_T = 16
MAX_SPLITS = 16


@triton.jit
def _tile_place(pid, num_t, num_v, GROUP: tl.constexpr):
    """Program -> (row block, column block), GROUP row blocks at a time, so that both operands of
    the programs that run together stay in L2."""
    per_group = GROUP * num_v
    group = pid // per_group
    size = tl.minimum(num_t - group * GROUP, GROUP)
    within = pid - group * per_group
    return group * GROUP + within % size, within // size


@triton.jit
def _row_of(rows_ptr, n, ok, HAS_ROWS: tl.constexpr):
    """Row of the full tensor that scored row n is."""
    if HAS_ROWS:
        return tl.load(rows_ptr + n, mask=ok, other=0)
    else:
        return n


@triton.jit
def _logits_tile(
    hidden_ptr,  # [T, H]
    weight_ptr,  # [V, H]
    row,  # [BT] rows of hidden
    row_ok,
    col,  # [BV] columns of the shard
    col_ok,
    H,
    stride_hidden,
    stride_weight,
    BT: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    EVEN_H: tl.constexpr,
):
    offs_h = tl.arange(0, BH)
    hidden_at = hidden_ptr + row.to(tl.int64)[:, None] * stride_hidden + offs_h[None, :]
    weight_at = weight_ptr + col.to(tl.int64)[:, None] * stride_weight + offs_h[None, :]
    acc = tl.zeros((BT, BV), tl.float32)
    for h0 in range(0, H, BH):
        if EVEN_H:
            h = tl.load(hidden_at, mask=row_ok[:, None], other=0.0)
            w = tl.load(weight_at, mask=col_ok[:, None], other=0.0)
        else:
            h_ok = (h0 + offs_h)[None, :] < H
            h = tl.load(hidden_at, mask=row_ok[:, None] & h_ok, other=0.0)
            w = tl.load(weight_at, mask=col_ok[:, None] & h_ok, other=0.0)
        if INTERPRET:
            h = h.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(h, tl.trans(w), acc, input_precision="ieee")
        hidden_at += BH
        weight_at += BH
    return acc


@triton.jit
def _restrict(
    z,
    support_ptr,  # [N, W] int32
    n,
    row_ok,
    v0,  # first column of the tile, a multiple of 32
    V,
    col,
    col_ok,
    label,
    stride_support,
    BT: tl.constexpr,
    BV: tl.constexpr,
    HAS_SUPPORT: tl.constexpr,
):
    """Padding and columns off the support become -inf; the label was sampled, so it stays."""
    keep = col_ok[None, :]
    if HAS_SUPPORT:
        word_at = v0 // 32 + tl.arange(0, BV // 32)
        at = support_ptr + n.to(tl.int64)[:, None] * stride_support + word_at[None, :]
        word = tl.load(at, mask=row_ok[:, None] & (word_at * 32 < V)[None, :], other=0)
        bit = (word[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        on = tl.reshape(bit, (BT, BV)) != 0
        keep = keep & (on | (col[None, :] == label[:, None]))
    return tl.where(keep, z, float("-inf"))


@triton.jit
def _linear_stats_kernel(
    hidden_ptr,  # [T, H]
    weight_ptr,  # [V, H]
    labels_ptr,  # [N] global ids
    rows_ptr,  # [N] rows of hidden, read if HAS_ROWS
    support_ptr,  # [N, W] read if HAS_SUPPORT
    max_ptr,  # [S, N] and so the next three
    sum_exp_ptr,
    sum_shifted_ptr,
    target_ptr,
    N,
    V,
    H,
    stride_hidden,
    stride_weight,
    stride_support,
    first_column,
    inv_temperature,
    split_columns,
    BT: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_H: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_SUPPORT: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
):
    num_t = tl.cdiv(N, BT)
    pid_t, pid_s = _tile_place(tl.program_id(0), num_t, tl.cdiv(V, split_columns), GROUP)
    n = pid_t * BT + tl.arange(0, BT)
    row_ok = n < N
    row = _row_of(rows_ptr, n, row_ok, HAS_ROWS)
    label = (tl.load(labels_ptr + n, mask=row_ok, other=-1) - first_column).to(tl.int32)

    m = tl.full((BT,), float("-inf"), tl.float32)
    s = tl.zeros((BT,), tl.float32)
    sx = tl.zeros((BT,), tl.float32)
    target = tl.zeros((BT,), tl.float32)
    lo = pid_s * split_columns
    hi = tl.minimum(lo + split_columns, V)
    for v0 in range(lo, hi, BV):
        col = v0 + tl.arange(0, BV)
        col_ok = col < hi
        z = _logits_tile(
            hidden_ptr, weight_ptr, row, row_ok, col, col_ok, H, stride_hidden, stride_weight,
            BT, BV, BH, EVEN_H,
        )  # fmt: skip
        z = z * inv_temperature
        hit = (col[None, :] == label[:, None]) & col_ok[None, :]
        target += tl.sum(tl.where(hit, z, 0.0), 1)
        z = _restrict(
            z, support_ptr, n, row_ok, v0, V, col, col_ok, label, stride_support,
            BT, BV, HAS_SUPPORT,
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(z, 1))
        # Nothing finite so far: shift by 0, as -inf - -inf is nan.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        x = z - shift[:, None]
        p = tl.exp(x)
        decay = tl.exp(m - shift)
        if WITH_ENTROPY:
            moved = tl.where(m == float("-inf"), 0.0, m - shift)
            px = p * tl.where(x == float("-inf"), 0.0, x)
            sx = (sx + s * moved) * decay + tl.sum(px, 1)
        s = s * decay + tl.sum(p, 1)
        m = m_new

    at = pid_s * N + n
    tl.store(max_ptr + at, m, mask=row_ok)
    tl.store(sum_exp_ptr + at, s, mask=row_ok)
    tl.store(sum_shifted_ptr + at, sx, mask=row_ok)
    tl.store(target_ptr + at, target, mask=row_ok)


@triton.jit
def _merge_kernel(
    max_ptr,  # [S, N] and so the next three
    sum_exp_ptr,
    sum_shifted_ptr,
    target_ptr,
    out_max_ptr,  # [N] and so the next three
    out_sum_exp_ptr,
    out_sum_shifted_ptr,
    out_target_ptr,
    N,
    num_splits,
    BT: tl.constexpr,
):
    n = tl.program_id(0) * BT + tl.arange(0, BT)
    ok = n < N
    m = tl.full((BT,), float("-inf"), tl.float32)
    for i in range(num_splits):
        m = tl.maximum(m, tl.load(max_ptr + i * N + n, mask=ok, other=float("-inf")))
    shift = tl.where(m == float("-inf"), 0.0, m)
    s = tl.zeros((BT,), tl.float32)
    sx = tl.zeros((BT,), tl.float32)
    target = tl.zeros((BT,), tl.float32)
    for i in range(num_splits):
        at = i * N + n
        part_m = tl.load(max_ptr + at, mask=ok, other=float("-inf"))
        part_s = tl.load(sum_exp_ptr + at, mask=ok, other=0.0)
        part_sx = tl.load(sum_shifted_ptr + at, mask=ok, other=0.0)
        decay = tl.exp(part_m - shift)
        moved = tl.where(part_m == float("-inf"), 0.0, part_m - shift)
        s += part_s * decay
        sx += (part_sx + part_s * moved) * decay
        target += tl.load(target_ptr + at, mask=ok, other=0.0)
    tl.store(out_max_ptr + n, m, mask=ok)
    tl.store(out_sum_exp_ptr + n, s, mask=ok)
    tl.store(out_sum_shifted_ptr + n, sx, mask=ok)
    tl.store(out_target_ptr + n, target, mask=ok)


@triton.jit
def _dz(
    z, lse, entropy, grad_logprob, grad_entropy, hit, inv_temperature, WITH_ENTROPY: tl.constexpr
):
    """Gradient by the raw logits: d logp_y/dz_j = [j = y] - p_j, d H/dz_j = -p_j (log p_j + H)."""
    logp = z - lse[:, None]
    p = tl.exp(logp)
    weight = grad_logprob[:, None]
    if WITH_ENTROPY:
        # p log p -> 0 as p -> 0; the product of the two limits is nan.
        finite = tl.where(logp == float("-inf"), 0.0, logp)
        weight = weight + grad_entropy[:, None] * (finite + entropy[:, None])
    dz = tl.where(hit, grad_logprob[:, None], 0.0) - p * weight
    return dz * inv_temperature


@triton.jit
def _linear_dlogits_kernel(
    hidden_ptr,  # [T, H]
    weight_ptr,  # [V, H]
    labels_ptr,  # [N]
    rows_ptr,  # [N] read if HAS_ROWS
    support_ptr,  # [N, W] read if HAS_SUPPORT
    lse_ptr,  # [N] and so the next three
    entropy_ptr,
    grad_logprob_ptr,
    grad_entropy_ptr,
    out_ptr,  # [n1 - n0, v1 - v0]
    n0,
    n1,
    v0,
    v1,
    H,
    stride_hidden,
    stride_weight,
    stride_support,
    stride_out,
    first_column,
    inv_temperature,
    BT: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_H: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_SUPPORT: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
):
    pid_t, pid_v = _tile_place(tl.program_id(0), tl.cdiv(n1 - n0, BT), tl.cdiv(v1 - v0, BV), GROUP)
    n = n0 + pid_t * BT + tl.arange(0, BT)
    row_ok = n < n1
    col = v0 + pid_v * BV + tl.arange(0, BV)
    col_ok = col < v1
    row = _row_of(rows_ptr, n, row_ok, HAS_ROWS)
    z = _logits_tile(
        hidden_ptr, weight_ptr, row, row_ok, col, col_ok, H, stride_hidden, stride_weight,
        BT, BV, BH, EVEN_H,
    )  # fmt: skip
    label = (tl.load(labels_ptr + n, mask=row_ok, other=-1) - first_column).to(tl.int32)
    z = _restrict(
        z * inv_temperature, support_ptr, n, row_ok, v0 + pid_v * BV, v1, col, col_ok, label,
        stride_support, BT, BV, HAS_SUPPORT,
    )  # fmt: skip
    hit = col[None, :] == label[:, None]
    lse = tl.load(lse_ptr + n, mask=row_ok, other=0.0)
    grad_logprob = tl.load(grad_logprob_ptr + n, mask=row_ok, other=0.0)
    if WITH_ENTROPY:
        entropy = tl.load(entropy_ptr + n, mask=row_ok, other=0.0)
        grad_entropy = tl.load(grad_entropy_ptr + n, mask=row_ok, other=0.0)
    else:
        entropy = lse
        grad_entropy = lse
    dz = _dz(z, lse, entropy, grad_logprob, grad_entropy, hit, inv_temperature, WITH_ENTROPY)
    at = out_ptr + (n - n0).to(tl.int64)[:, None] * stride_out + (col - v0)[None, :]
    tl.store(at, dz.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


@triton.jit
def _accumulate_kernel(
    a_ptr,  # [M, K] by strides
    b_ptr,  # [K, N] by strides; its K index goes through b_rows_ptr if HAS_ROWS
    b_rows_ptr,  # [K]
    out_ptr,  # [M, N], N contiguous
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_out,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """out = a @ b, or out += a @ b with ADD; one float32 sum, one rounding."""
    pid_m, pid_n = _tile_place(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    offs_m = pid_m * BM + tl.arange(0, BM)
    offs_n = pid_n * BN + tl.arange(0, BN)
    m_ok = offs_m < M
    n_ok = offs_n < N
    acc = tl.zeros((BM, BN), tl.float32)
    a_at = a_ptr + offs_m.to(tl.int64)[:, None] * stride_am
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        k_ok = k < K
        a = tl.load(
            a_at + k.to(tl.int64)[None, :] * stride_ak, mask=m_ok[:, None] & k_ok, other=0.0
        )
        row = _row_of(b_rows_ptr, k, k_ok, HAS_ROWS)
        b_at = b_ptr + row.to(tl.int64)[:, None] * stride_bk + offs_n[None, :]
        b = tl.load(b_at, mask=k_ok[:, None] & n_ok[None, :], other=0.0)
        if INTERPRET:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    ok = m_ok[:, None] & n_ok[None, :]
    out_at = out_ptr + offs_m.to(tl.int64)[:, None] * stride_out + offs_n[None, :]
    if ADD:
        acc += tl.load(out_at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _logits_stats_kernel(
    logits_ptr,  # [T, V]
    labels_ptr,  # [N]
    rows_ptr,  # [N] read if HAS_ROWS
    support_ptr,  # [N, W] read if HAS_SUPPORT
    max_ptr,  # [N] and so the next three
    sum_exp_ptr,
    sum_shifted_ptr,
    target_ptr,
    N,
    V,
    stride_logits,
    stride_support,
    first_column,
    inv_temperature,
    BT: tl.constexpr,
    BV: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_SUPPORT: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
):
    n = tl.program_id(0) * BT + tl.arange(0, BT)
    row_ok = n < N
    row = _row_of(rows_ptr, n, row_ok, HAS_ROWS)
    base = logits_ptr + row.to(tl.int64)[:, None] * stride_logits
    label = (tl.load(labels_ptr + n, mask=row_ok, other=-1) - first_column).to(tl.int32)

    # Each lane keeps a softmax of its own; lanes meet once, after the loop.
    m = tl.full((BT, BV), float("-inf"), tl.float32)
    s = tl.zeros((BT, BV), tl.float32)
    sx = tl.zeros((BT, BV), tl.float32)
    for v0 in range(0, V, BV):
        col = v0 + tl.arange(0, BV)
        col_ok = col < V
        ok = row_ok[:, None] & col_ok[None, :]
        z = tl.load(base + col[None, :], mask=ok, other=float("-inf")).to(tl.float32)
        z = _restrict(
            z * inv_temperature, support_ptr, n, row_ok, v0, V, col, col_ok, label, stride_support,
            BT, BV, HAS_SUPPORT,
        )  # fmt: skip
        m_new = tl.maximum(m, z)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        x = z - shift
        p = tl.exp(x)
        decay = tl.exp(m - shift)
        if WITH_ENTROPY:
            moved = tl.where(m == float("-inf"), 0.0, m - shift)
            px = p * tl.where(x == float("-inf"), 0.0, x)
            sx = (sx + s * moved) * decay + px
        s = s * decay + p
        m = m_new

    top = tl.max(m, 1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    decay = tl.exp(m - shift[:, None])
    if WITH_ENTROPY:
        moved = tl.where(m == float("-inf"), 0.0, m - shift[:, None])
        tl.store(sum_shifted_ptr + n, tl.sum((sx + s * moved) * decay, 1), mask=row_ok)
    tl.store(max_ptr + n, top, mask=row_ok)
    tl.store(sum_exp_ptr + n, tl.sum(s * decay, 1), mask=row_ok)
    here = row_ok & (label >= 0) & (label < V)
    label_at = logits_ptr + row.to(tl.int64) * stride_logits + tl.where(here, label, 0)
    target = tl.load(label_at, mask=here, other=0.0).to(tl.float32) * inv_temperature
    tl.store(target_ptr + n, target, mask=row_ok)


@triton.jit
def _logits_grad_kernel(
    logits_ptr,  # [T, V]
    labels_ptr,  # [N]
    rows_ptr,  # [N] read if HAS_ROWS
    support_ptr,  # [N, W] read if HAS_SUPPORT
    lse_ptr,  # [N] and so the next three
    entropy_ptr,
    grad_logprob_ptr,
    grad_entropy_ptr,
    out_ptr,  # [T, V]
    N,
    V,
    stride_logits,
    stride_support,
    stride_out,
    first_column,
    inv_temperature,
    BT: tl.constexpr,
    BV: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_SUPPORT: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
):
    n = tl.program_id(0) * BT + tl.arange(0, BT)
    row_ok = n < N
    col = tl.program_id(1) * BV + tl.arange(0, BV)
    col_ok = col < V
    ok = row_ok[:, None] & col_ok[None, :]
    row = _row_of(rows_ptr, n, row_ok, HAS_ROWS)
    row = row.to(tl.int64)
    label = (tl.load(labels_ptr + n, mask=row_ok, other=-1) - first_column).to(tl.int32)
    z_at = logits_ptr + row[:, None] * stride_logits + col[None, :]
    z = tl.load(z_at, mask=ok, other=float("-inf")).to(tl.float32)
    z = _restrict(
        z * inv_temperature, support_ptr, n, row_ok, tl.program_id(1) * BV, V, col, col_ok, label,
        stride_support, BT, BV, HAS_SUPPORT,
    )  # fmt: skip
    hit = col[None, :] == label[:, None]
    lse = tl.load(lse_ptr + n, mask=row_ok, other=0.0)
    grad_logprob = tl.load(grad_logprob_ptr + n, mask=row_ok, other=0.0)
    if WITH_ENTROPY:
        entropy = tl.load(entropy_ptr + n, mask=row_ok, other=0.0)
        grad_entropy = tl.load(grad_entropy_ptr + n, mask=row_ok, other=0.0)
    else:
        entropy = lse
        grad_entropy = lse
    dz = _dz(z, lse, entropy, grad_logprob, grad_entropy, hit, inv_temperature, WITH_ENTROPY)
    out_at = out_ptr + row[:, None] * stride_out + col[None, :]
    tl.store(out_at, dz.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _bucket_divergence_kernel(
    student_ptr,  # [N, B]
    teacher_ptr,  # [N, B]
    divergence_ptr,  # [N]
    grad_ptr,  # [N, B]
    N,
    num_buckets,
    alpha,
    BT: tl.constexpr,
    BB: tl.constexpr,
    FORWARD: tl.constexpr,
    REVERSE: tl.constexpr,
):
    n = tl.program_id(0) * BT + tl.arange(0, BT)
    b = tl.arange(0, BB)
    ok = (n < N)[:, None] & (b < num_buckets)[None, :]
    at = n.to(tl.int64)[:, None] * num_buckets + b[None, :]
    # Rows past the end are made of zeros, so that their softmax is a number.
    rest = tl.where((n < N)[:, None] & (b >= num_buckets)[None, :], float("-inf"), 0.0)
    u = tl.where(ok, tl.load(student_ptr + at, mask=ok, other=0.0).to(tl.float32), rest)
    v = tl.where(ok, tl.load(teacher_ptr + at, mask=ok, other=0.0).to(tl.float32), rest)
    u = u - tl.max(u, 1)[:, None]
    v = v - tl.max(v, 1)[:, None]
    logq = u - tl.log(tl.sum(tl.exp(u), 1))[:, None]
    logp = v - tl.log(tl.sum(tl.exp(v), 1))[:, None]
    q = tl.exp(logq)
    p = tl.exp(logp)
    # An empty bucket has weight 0, and 0 * inf is nan.
    if FORWARD:
        divergence = tl.sum(tl.where(p == 0.0, 0.0, p * (logp - logq)), 1)
        grad = q - p
    elif REVERSE:
        terms = tl.where(q == 0.0, 0.0, q * (logq - logp))
        divergence = tl.sum(terms, 1)
        grad = terms - q * divergence[:, None]
    else:
        logm = tl.log((1.0 - alpha) * q + alpha * p)
        terms = tl.where(q == 0.0, 0.0, q * (logq - logm))
        to_student = tl.sum(terms, 1)
        to_teacher = tl.sum(tl.where(p == 0.0, 0.0, p * (logp - logm)), 1)
        divergence = alpha * to_teacher + (1.0 - alpha) * to_student
        grad = (1.0 - alpha) * (terms - q * to_student[:, None])
    tl.store(divergence_ptr + n, divergence, mask=n < N)
    tl.store(grad_ptr + at, grad, mask=ok)


def linear_stats(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    rows_N: Tensor | None,
    shard: Shard,
    *,
    support_NW: Tensor | None,
    with_entropy: bool,
    chunk_size: int | None,
) -> Stats:
    """See ``reference.linear_stats``; tiles live in registers, ``chunk_size`` changes nothing."""
    hidden_TH, weight_VH = _unit_columns(hidden_TH), _unit_columns(weight_VH)
    num_rows, num_columns = labels_N.numel(), shard.num_columns
    if num_rows == 0 or num_columns == 0:
        return _stats_of_nothing(hidden_TH, num_rows)
    tile = LINEAR[hidden_TH.element_size()].fit(BT=num_rows, BV=num_columns, BH=hidden_TH.shape[1])
    blocks_t = triton.cdiv(num_rows, tile.blocks["BT"])
    blocks_v = triton.cdiv(num_columns, tile.blocks["BV"])
    split_columns = triton.cdiv(blocks_v, min(MAX_SPLITS, blocks_v)) * tile.blocks["BV"]
    num_splits = triton.cdiv(num_columns, split_columns)
    parts = [
        torch.empty((num_splits, num_rows), dtype=torch.float32, device=hidden_TH.device)
        for _ in range(4)
    ]
    _linear_stats_kernel[(blocks_t * num_splits,)](
        hidden_TH,
        weight_VH,
        labels_N,
        rows_N,
        support_NW,
        *parts,
        num_rows,
        num_columns,
        hidden_TH.shape[1],
        hidden_TH.stride(0),
        weight_VH.stride(0),
        0 if support_NW is None else support_NW.stride(0),
        shard.first_column,
        shard.inv_temperature,
        split_columns,
        **tile.blocks,
        GROUP=GROUP_T,
        EVEN_H=hidden_TH.shape[1] % tile.blocks["BH"] == 0,
        HAS_ROWS=rows_N is not None,
        HAS_SUPPORT=support_NW is not None,
        WITH_ENTROPY=with_entropy,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits == 1:
        return _stats(*(part[0] for part in parts))
    merged = [torch.empty_like(parts[0][0]) for _ in range(4)]
    _merge_kernel[(triton.cdiv(num_rows, MERGE.blocks["BT"]),)](
        *parts, *merged, num_rows, num_splits, **MERGE.blocks, num_warps=MERGE.num_warps
    )
    return _stats(*merged)


def linear_grads(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    rows_N: Tensor | None,
    shard: Shard,
    cotangent: Cotangent,
    *,
    support_NW: Tensor | None,
    chunk_size: int | None,
    grad_hidden_TH: Tensor | None,
    grad_weight_VH: Tensor | None,
) -> None:
    """See ``reference.linear_grads``: the same two loop orders, by the weight buffer's dtype.

    Extra memory: one [rows, columns] block of logit gradients in the input's dtype, and the float32
    hidden gradient of one row chunk (of all rows where the weight's buffer is not float32).
    """
    hidden_TH, weight_VH = _unit_columns(hidden_TH), _unit_columns(weight_VH)
    num_rows, num_columns, width = labels_N.numel(), shard.num_columns, hidden_TH.shape[1]
    if num_rows == 0 or num_columns == 0:
        return
    sums_in_place = grad_weight_VH is None or grad_weight_VH.dtype == torch.float32
    size_n, size_v = backward_block(num_rows, num_columns, chunk_size, sums_in_place)
    dlogits_NV = hidden_TH.new_empty((size_n, size_v))
    for n0 in range(0, num_rows, size_n):
        n1 = min(n0 + size_n, num_rows)
        grad_hidden_NH = None
        if grad_hidden_TH is not None:
            grad_hidden_NH = hidden_TH.new_empty((n1 - n0, width), dtype=torch.float32)
        for v0 in range(0, num_columns, size_v):
            v1 = min(v0 + size_v, num_columns)
            block_NV = dlogits_NV[: n1 - n0, : v1 - v0]
            _linear_dlogits(
                hidden_TH,
                weight_VH,
                labels_N,
                rows_N,
                shard,
                cotangent,
                support_NW,
                block_NV,
                n0,
                v0,
            )
            if grad_weight_VH is not None:
                hidden_rows = rows_N[n0:n1] if rows_N is not None else None
                source = hidden_TH if rows_N is not None else hidden_TH[n0:n1]
                _accumulate(block_NV.T, source, hidden_rows, grad_weight_VH[v0:v1], add=True)
            if grad_hidden_NH is not None:
                _accumulate(block_NV, weight_VH[v0:v1], None, grad_hidden_NH, add=v0 > 0)
        if grad_hidden_TH is not None and grad_hidden_NH is not None:
            if rows_N is None:
                grad_hidden_TH[n0:n1] = grad_hidden_NH
            else:
                grad_hidden_TH[rows_N[n0:n1]] = grad_hidden_NH.to(grad_hidden_TH.dtype)


def backward_block(
    num_rows: int, num_columns: int, chunk_size: int | None, sums_in_place: bool
) -> tuple[int, int]:
    """Rows and columns of the logit-gradient buffer of the backward.

    1536 x 4096 by default (12 MiB of bfloat16), in row chunks of equal size. A weight buffer that
    is not float32 is written once for each column block, so there the block holds all rows.
    """
    if sums_in_place:
        chunks = triton.cdiv(num_rows, chunk_size or BACKWARD_ROWS)
        rows = triton.cdiv(triton.cdiv(num_rows, chunks), 128) * 128
        return min(num_rows, chunk_size or rows), min(num_columns, BACKWARD_COLUMNS)
    columns = BACKWARD_ROWS * BACKWARD_COLUMNS // num_rows // 128 * 128
    return num_rows, min(num_columns, max(128, columns))


def _linear_dlogits(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    rows_N: Tensor | None,
    shard: Shard,
    cotangent: Cotangent,
    support_NW: Tensor | None,
    out_NV: Tensor,
    n0: int,
    v0: int,
) -> None:
    sizes = {"BT": out_NV.shape[0], "BV": out_NV.shape[1], "BH": hidden_TH.shape[1]}
    tile = LINEAR[hidden_TH.element_size()].fit(**sizes)
    grid = triton.cdiv(out_NV.shape[0], tile.blocks["BT"]) * triton.cdiv(
        out_NV.shape[1], tile.blocks["BV"]
    )
    _linear_dlogits_kernel[(grid,)](
        hidden_TH,
        weight_VH,
        labels_N,
        rows_N,
        support_NW,
        cotangent.log_sum_exp_N,
        cotangent.entropy_N,
        cotangent.grad_logprob_N,
        cotangent.grad_entropy_N,
        out_NV,
        n0,
        n0 + out_NV.shape[0],
        v0,
        v0 + out_NV.shape[1],
        hidden_TH.shape[1],
        hidden_TH.stride(0),
        weight_VH.stride(0),
        0 if support_NW is None else support_NW.stride(0),
        out_NV.stride(0),
        shard.first_column,
        shard.inv_temperature,
        **tile.blocks,
        GROUP=GROUP_T,
        EVEN_H=hidden_TH.shape[1] % tile.blocks["BH"] == 0,
        HAS_ROWS=rows_N is not None,
        HAS_SUPPORT=support_NW is not None,
        WITH_ENTROPY=cotangent.grad_entropy_N is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _accumulate(
    a_MK: Tensor, b_KN: Tensor, b_rows_K: Tensor | None, out_MN: Tensor, *, add: bool
) -> None:
    """``out (+)= a @ b``; with ``b_rows_K``, row k of b is row ``b_rows_K[k]`` of ``b_KN``."""
    (num_m, num_k), num_n = a_MK.shape, b_KN.shape[1]
    tile = ACCUMULATE[b_KN.element_size()].fit(BM=num_m, BN=num_n, BK=num_k)
    _accumulate_kernel[
        (triton.cdiv(num_m, tile.blocks["BM"]) * triton.cdiv(num_n, tile.blocks["BN"]),)
    ](
        a_MK,
        b_KN,
        b_rows_K,
        out_MN,
        num_m,
        num_n,
        num_k,
        a_MK.stride(0),
        a_MK.stride(1),
        b_KN.stride(0),
        out_MN.stride(0),
        **tile.blocks,
        GROUP=GROUP_T,
        HAS_ROWS=b_rows_K is not None,
        ADD=add,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def logits_stats(
    logits_TV: Tensor,
    labels_N: Tensor,
    rows_N: Tensor | None,
    shard: Shard,
    *,
    support_NW: Tensor | None,
    with_entropy: bool,
) -> Stats:
    """See ``reference.logits_stats``."""
    logits_TV = _unit_columns(logits_TV)
    num_rows = labels_N.numel()
    stats = _stats_of_nothing(logits_TV, num_rows)
    if num_rows == 0 or shard.num_columns == 0:
        return stats
    tile = LOGITS.fit(BT=num_rows, BV=shard.num_columns)
    _logits_stats_kernel[(triton.cdiv(num_rows, tile.blocks["BT"]),)](
        logits_TV,
        labels_N,
        rows_N,
        support_NW,
        stats.max_N,
        stats.sum_exp_N,
        stats.sum_shifted_N,
        stats.target_N,
        num_rows,
        shard.num_columns,
        logits_TV.stride(0),
        0 if support_NW is None else support_NW.stride(0),
        shard.first_column,
        shard.inv_temperature,
        **tile.blocks,
        HAS_ROWS=rows_N is not None,
        HAS_SUPPORT=support_NW is not None,
        WITH_ENTROPY=with_entropy,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return stats


def logits_grad(
    logits_TV: Tensor,
    labels_N: Tensor,
    rows_N: Tensor | None,
    shard: Shard,
    cotangent: Cotangent,
    *,
    support_NW: Tensor | None,
    grad_logits_TV: Tensor,
) -> None:
    """See ``reference.logits_grad``."""
    logits_TV = _unit_columns(logits_TV)
    num_rows = labels_N.numel()
    if num_rows == 0 or shard.num_columns == 0:
        return
    tile = LOGITS.fit(BT=num_rows, BV=shard.num_columns)
    grid = (
        triton.cdiv(num_rows, tile.blocks["BT"]),
        triton.cdiv(shard.num_columns, tile.blocks["BV"]),
    )
    _logits_grad_kernel[grid](
        logits_TV,
        labels_N,
        rows_N,
        support_NW,
        cotangent.log_sum_exp_N,
        cotangent.entropy_N,
        cotangent.grad_logprob_N,
        cotangent.grad_entropy_N,
        grad_logits_TV,
        num_rows,
        shard.num_columns,
        logits_TV.stride(0),
        0 if support_NW is None else support_NW.stride(0),
        grad_logits_TV.stride(0),
        shard.first_column,
        shard.inv_temperature,
        **tile.blocks,
        HAS_ROWS=rows_N is not None,
        HAS_SUPPORT=support_NW is not None,
        WITH_ENTROPY=cotangent.grad_entropy_N is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def bucket_divergence(
    student_NB: Tensor, teacher_NB: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:
    """See ``reference.bucket_divergence``; one row of buckets is one tile."""
    num_rows, num_buckets = student_NB.shape
    width = triton.next_power_of_2(num_buckets)
    blocks = {"BT": max(1, BUCKET_ELEMENTS // width), "BB": width}
    divergence_N = torch.empty(num_rows, dtype=torch.float32, device=student_NB.device)
    grad_NB = torch.empty((num_rows, num_buckets), dtype=torch.float32, device=student_NB.device)
    if num_rows:
        _bucket_divergence_kernel[(triton.cdiv(num_rows, blocks["BT"]),)](
            student_NB.contiguous(),
            teacher_NB.contiguous(),
            divergence_N,
            grad_NB,
            num_rows,
            num_buckets,
            alpha,
            **blocks,
            FORWARD=alpha == 0.0,
            REVERSE=alpha == 1.0,
            num_warps=4,
        )
    return divergence_N, grad_NB


def _unit_columns(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def _stats_of_nothing(like: Tensor, num_rows: int) -> Stats:
    zero = [torch.zeros(num_rows, dtype=torch.float32, device=like.device) for _ in range(3)]
    return _stats(torch.full_like(zero[0], -torch.inf), *zero)


def _stats(max_N: Tensor, sum_exp_N: Tensor, sum_shifted_N: Tensor, target_N: Tensor) -> Stats:
    return Stats(max_N=max_N, sum_exp_N=sum_exp_N, sum_shifted_N=sum_shifted_N, target_N=target_N)
