"""Triton twins of the group, tree and scan operations: one launch each, no host synchronisation.

Shapes: N rows with group ids, P prompts, G attempts, C criticised, F feedbacks, M revisions, S
packed sequences, T packed tokens. Tensors here are small: what costs is a hundred launches and the
waits for counts that sorting needs, so groups are found by comparing ids pairwise (N^2 integers).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_binac.kernels.credit import CreditWeights, TreeCredit, TreeRewards
from megatron_binac.kernels.tile import INTERPRET, Tile

GROUP = Tile(blocks={"BI": 32, "BJ": 128}, num_warps=4)
TREE = Tile(blocks={}, num_warps=2)
SPREAD = Tile(blocks={"BLOCK": 1024}, num_warps=4)
GAE = Tile(blocks={"BLOCK": 1024}, num_warps=4)
if INTERPRET:
    GROUP = Tile(blocks={"BI": 512, "BJ": 1024}, num_warps=1)

# Relative spread below which a group is constant, as in algo.advantages.
_RESIDUE = tl.constexpr(1e-6)


@triton.jit
def _not_flat(low, high):
    return high - low > tl.maximum(tl.abs(low), tl.abs(high)) * _RESIDUE


@triton.jit
def _group_kernel(
    reward_ptr,  # [N]
    group_ptr,  # [N]
    valid_ptr,  # [N]
    advantage_ptr,  # [N]
    trainable_ptr,  # [N]
    N,
    eps,
    BI: tl.constexpr,
    BJ: tl.constexpr,
    LEAVE_ONE_OUT: tl.constexpr,
    BY_STD: tl.constexpr,
    BY_MEAN: tl.constexpr,
):
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    i_ok = i < N
    group_i = tl.load(group_ptr + i, mask=i_ok, other=0)
    valid_i = tl.load(valid_ptr + i, mask=i_ok, other=0) != 0
    reward_i = tl.load(reward_ptr + i, mask=valid_i, other=0.0).to(tl.float32)
    count = tl.zeros((BI,), tl.float32)
    total = tl.zeros((BI,), tl.float32)
    low = tl.full((BI,), float("inf"), tl.float32)
    high = tl.full((BI,), float("-inf"), tl.float32)
    for j0 in range(0, N, BJ):
        j = j0 + tl.arange(0, BJ)
        group_j = tl.load(group_ptr + j, mask=j < N, other=0)
        valid_j = tl.load(valid_ptr + j, mask=j < N, other=0) != 0
        reward_j = tl.load(reward_ptr + j, mask=valid_j, other=0.0).to(tl.float32)
        same = (group_i[:, None] == group_j[None, :]) & valid_j[None, :]
        count += tl.sum(tl.where(same, 1.0, 0.0), 1)
        total += tl.sum(tl.where(same, reward_j[None, :], 0.0), 1)
        low = tl.minimum(low, tl.min(tl.where(same, reward_j[None, :], float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(same, reward_j[None, :], float("-inf")), 1))
    mean = total / tl.maximum(count, 1.0)
    usable = valid_i & (count >= 2.0) & (_not_flat(low, high) | (total != total))
    advantage = reward_i - mean
    if LEAVE_ONE_OUT:
        # r_i - (S - r_i) / (n - 1) = (r_i - S / n) n / (n - 1)
        advantage = advantage * (count / tl.maximum(count - 1.0, 1.0))
    if BY_STD:
        # A second pass over centred rewards: E r^2 - (E r)^2 cancels.
        squares = tl.zeros((BI,), tl.float32)
        for j0 in range(0, N, BJ):
            j = j0 + tl.arange(0, BJ)
            group_j = tl.load(group_ptr + j, mask=j < N, other=0)
            valid_j = tl.load(valid_ptr + j, mask=j < N, other=0) != 0
            reward_j = tl.load(reward_ptr + j, mask=valid_j, other=0.0).to(tl.float32)
            same = (group_i[:, None] == group_j[None, :]) & valid_j[None, :]
            centred = tl.where(same, reward_j[None, :] - mean[:, None], 0.0)
            squares += tl.sum(centred * centred, 1)
        advantage = advantage / (tl.sqrt(squares / tl.maximum(count - 1.0, 1.0)) + eps)
    if BY_MEAN:
        advantage = advantage / tl.where(usable, mean, 1.0)
    tl.store(advantage_ptr + i, tl.where(usable, advantage, 0.0), mask=i_ok)
    tl.store(trainable_ptr + i, usable, mask=i_ok)


@triton.jit
def _mean_value(reward, valid):
    """Mean over the last axis of what is valid, and whether anything is."""
    count = tl.sum(tl.where(valid, 1.0, 0.0), 2)
    total = tl.sum(tl.where(valid, reward, 0.0), 2)
    return total / tl.maximum(count, 1.0), count > 0.0


@triton.jit
def _tree_kernel(
    reward0_ptr,  # [P, G]
    valid0_ptr,
    criticised_ptr,  # [P, C]
    reward_ptr,  # [P, C, F, M]
    valid_ptr,
    probe_ptr,  # [P, C, F, M] or None
    probe_valid_ptr,
    feedback_valid_ptr,  # [P, C, F] or None
    weight_ptr,  # [P, C] or None
    agrees_ptr,  # [P, C, F] or None
    leaks_ptr,
    attempt_ptr,  # [P, G]
    attempt_trainable_ptr,
    feedback_ptr,  # [P, C, F]
    feedback_trainable_ptr,
    revision_ptr,  # [P, C, F, M]
    revision_trainable_ptr,
    value_ptr,  # [P, C, F]
    star_ptr,
    lam,
    attempt_weight,
    attempt_value_weight,
    improvement_weight,
    discrimination_coef,
    leak_coef,
    G: tl.constexpr,
    C: tl.constexpr,
    F: tl.constexpr,
    M: tl.constexpr,
    BG: tl.constexpr,
    BC: tl.constexpr,
    BF: tl.constexpr,
    BM: tl.constexpr,
    HAS_PROBE: tl.constexpr,
    NEEDS_PROBE: tl.constexpr,
    HAS_FEEDBACK_VALID: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_AGREES: tl.constexpr,
    HAS_LEAKS: tl.constexpr,
    FOLLOWUP: tl.constexpr,
    IMPROVEMENT: tl.constexpr,
):
    """One program takes one prompt's tree; axes are padded to powers of two."""
    prompt = tl.program_id(0)
    g = tl.arange(0, BG)
    c = tl.arange(0, BC)
    f = tl.arange(0, BF)
    m = tl.arange(0, BM)
    at_g = prompt * G + g
    at_c = prompt * C + c
    at_cf = at_c[:, None] * F + f[None, :]
    at_cfm = at_cf[:, :, None] * M + m[None, None, :]
    in_cf = (c < C)[:, None] & (f < F)[None, :]
    in_cfm = in_cf[:, :, None] & (m < M)[None, None, :]

    criticised = tl.load(criticised_ptr + at_c, mask=c < C, other=-1).to(tl.int32)
    used = (criticised >= 0) & (c < C)
    used_cf = used[:, None] & in_cf
    valid = (tl.load(valid_ptr + at_cfm, mask=in_cfm, other=0) != 0) & used[:, None, None]
    reward = tl.load(reward_ptr + at_cfm, mask=valid, other=0.0).to(tl.float32)
    value, has = _mean_value(reward, valid)
    tl.store(value_ptr + at_cf, value, mask=in_cf)
    ok = has
    if HAS_FEEDBACK_VALID:
        ok = ok & (tl.load(feedback_valid_ptr + at_cf, mask=used_cf, other=0) != 0)
    utility = value
    star = tl.zeros((BC, BF), tl.float32)
    if HAS_PROBE:
        probe_valid = tl.load(probe_valid_ptr + at_cfm, mask=in_cfm, other=0) != 0
        probe_valid = probe_valid & used[:, None, None]
        probe = tl.load(probe_ptr + at_cfm, mask=probe_valid, other=0.0).to(tl.float32)
        star, probed = _mean_value(probe, probe_valid)
        if NEEDS_PROBE:
            ok = ok & probed
            utility = value + lam * (value - star)
    tl.store(star_ptr + at_cf, star, mask=in_cf)
    if HAS_AGREES:
        agrees = tl.load(agrees_ptr + at_cf, mask=used_cf, other=0.0).to(tl.float32)
        utility += discrimination_coef * agrees
    if HAS_LEAKS:
        utility -= leak_coef * tl.load(leaks_ptr + at_cf, mask=used_cf, other=0.0).to(tl.float32)
    weight = tl.full((BC,), 1.0, tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + at_c, mask=used, other=1.0).to(tl.float32)

    # Feedback: against the other feedbacks of the same attempt.
    count = tl.sum(tl.where(ok, 1.0, 0.0), 1)
    mean = tl.sum(tl.where(ok, utility, 0.0), 1) / tl.maximum(count, 1.0)
    low = tl.min(tl.where(ok, utility, float("inf")), 1)
    high = tl.max(tl.where(ok, utility, float("-inf")), 1)
    usable = ok & ((count >= 2.0) & _not_flat(low, high))[:, None]
    factor = weight * (count / tl.maximum(count - 1.0, 1.0))
    credit = tl.where(usable, (utility - mean[:, None]) * factor[:, None], 0.0)
    tl.store(feedback_ptr + at_cf, credit, mask=in_cf)
    tl.store(feedback_trainable_ptr + at_cf, usable, mask=in_cf)

    # Attempts, and what slot c needs of its own.
    attempt_valid = (tl.load(valid0_ptr + at_g, mask=g < G, other=0) != 0) & (g < G)
    reward0 = tl.load(reward0_ptr + at_g, mask=attempt_valid, other=0.0).to(tl.float32)
    is_c = (g[:, None] == criticised[None, :]) & used[None, :]  # [BG, BC]

    # Revision: against all revisions of the same attempt, plus progress over it.
    num = tl.sum(tl.sum(tl.where(valid, 1.0, 0.0), 2), 1)
    centre = tl.sum(tl.sum(tl.where(valid, reward, 0.0), 2), 1) / tl.maximum(num, 1.0)
    low = tl.min(tl.min(tl.where(valid, reward, float("inf")), 2), 1)
    high = tl.max(tl.max(tl.where(valid, reward, float("-inf")), 2), 1)
    usable3 = valid & ((num >= 2.0) & _not_flat(low, high))[:, None, None]
    revision = tl.where(usable3, reward - centre[:, None, None], 0.0)
    if IMPROVEMENT:
        before = tl.sum(tl.where(is_c, reward0[:, None], 0.0), 0)
        before_valid = tl.sum(tl.where(is_c & attempt_valid[:, None], 1.0, 0.0), 0) > 0.0
        both = valid & before_valid[:, None, None]
        progress = tl.where(both, improvement_weight * (reward - before[:, None, None]), 0.0)
        revision += progress
        usable3 = usable3 | (progress != 0.0)
    tl.store(revision_ptr + at_cfm, revision * weight[:, None, None], mask=in_cfm)
    tl.store(revision_trainable_ptr + at_cfm, usable3, mask=in_cfm)

    # Attempt: reward among all of the prompt's, follow-up among the criticised ones.
    # Reduced numbers are spread over the row again: the interpreter has no logic on scalars.
    row = tl.zeros((BG,), tl.float32)
    own = attempt_weight * reward0
    count0 = row + tl.sum(tl.where(attempt_valid, 1.0, 0.0), 0)
    mean0 = tl.sum(tl.where(attempt_valid, own, 0.0), 0) / tl.maximum(count0, 1.0)
    low0 = row + tl.min(tl.where(attempt_valid, own, float("inf")), 0)
    high0 = row + tl.max(tl.where(attempt_valid, own, float("-inf")), 0)
    usable0 = attempt_valid & (count0 >= 2.0) & _not_flat(low0, high0)
    attempt = tl.where(usable0, own - mean0, 0.0)
    if FOLLOWUP:
        num_values = tl.sum(tl.where(has, 1.0, 0.0), 1)
        followup_c = tl.sum(tl.where(has, value, 0.0), 1) / tl.maximum(num_values, 1.0)
        followed_c = is_c & (num_values > 0.0)[None, :]
        follow = attempt_value_weight * tl.sum(tl.where(followed_c, followup_c[None, :], 0.0), 1)
        followed = attempt_valid & (tl.sum(tl.where(followed_c, 1.0, 0.0), 1) > 0.0)
        weight_g = tl.sum(tl.where(is_c, weight[None, :], 0.0), 1)
        count1 = row + tl.sum(tl.where(followed, 1.0, 0.0), 0)
        low1 = row + tl.min(tl.where(followed, follow, float("inf")), 0)
        high1 = row + tl.max(tl.where(followed, follow, float("-inf")), 0)
        usable1 = followed & (count1 >= 2.0) & _not_flat(low1, high1)
        weight_g = tl.where(usable1, weight_g, 0.0)
        mean1 = tl.sum(weight_g * follow, 0) / tl.maximum(tl.sum(weight_g, 0), 1e-12)
        attempt += tl.where(usable1, weight_g * (follow - mean1), 0.0)
        usable0 = usable0 | usable1
    tl.store(attempt_ptr + at_g, attempt, mask=g < G)
    tl.store(attempt_trainable_ptr + at_g, usable0, mask=g < G)


@triton.jit
def _spread_kernel(
    value_ptr,  # [S]
    cu_seqlens_ptr,  # [S + 1]
    mask_ptr,  # [T]
    out_ptr,  # [T]
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    lo = tl.load(cu_seqlens_ptr + sequence).to(tl.int32)
    hi = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int32)
    value = tl.load(value_ptr + sequence).to(tl.float32)
    for start in range(lo, hi, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keep = tl.load(mask_ptr + at, mask=at < hi, other=0) != 0
        out = tl.where(keep, value, 0.0)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=at < hi)


@triton.jit
def _then(a1, b1, c1, d1, e1, a2, b2, c2, d2, e2):
    """Affine steps (advantage, value) -> (a A + b v + c, d v + e), the first, then the second."""
    return a2 * a1, a2 * b1 + b2 * d1, a2 * c1 + b2 * e1 + c2, d2 * d1, d2 * e1 + e2


@triton.jit
def _gae_kernel(
    reward_ptr,  # [T]
    value_ptr,  # [T]
    mask_ptr,  # [T]
    cu_seqlens_ptr,  # [S + 1]
    advantage_ptr,  # [T]
    return_ptr,  # [T]
    gamma,
    lam,
    BLOCK: tl.constexpr,
):
    """Blocks from the right, with (advantage, value) of the next trained token carried over."""
    sequence = tl.program_id(0)
    lo = tl.load(cu_seqlens_ptr + sequence).to(tl.int32)
    hi = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int32)
    next_advantage = 0.0
    next_value = 0.0
    num_blocks = tl.cdiv(hi - lo, BLOCK)
    for i in range(num_blocks):
        at = lo + (num_blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        inside = at < hi
        keep = tl.load(mask_ptr + at, mask=inside, other=0) != 0
        reward = tl.load(reward_ptr + at, mask=keep, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + at, mask=keep, other=0.0).to(tl.float32)
        # A masked token is the identity: it is no time step, and its numbers are not read.
        a = tl.where(keep, gamma * lam, 1.0)
        b = tl.where(keep, gamma, 0.0)
        c = tl.where(keep, reward - value, 0.0)
        d = tl.where(keep, 0.0, 1.0)
        e = tl.where(keep, value, 0.0)
        a, b, c, d, e = tl.associative_scan((a, b, c, d, e), 0, _then, reverse=True)
        advantage = a * next_advantage + b * next_value + c
        carried = d * next_value + e
        out = tl.where(keep, advantage, 0.0)
        tl.store(advantage_ptr + at, out.to(advantage_ptr.dtype.element_ty), mask=inside)
        out = tl.where(keep, advantage + value, 0.0)
        tl.store(return_ptr + at, out.to(return_ptr.dtype.element_ty), mask=inside)
        first = tl.arange(0, BLOCK) == 0
        next_advantage = tl.sum(tl.where(first, advantage, 0.0), 0)
        next_value = tl.sum(tl.where(first, carried, 0.0), 0)


def group_advantage(
    reward_N: Tensor, group_N: Tensor, valid_N: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    """See ``group_advantage`` of the package; arguments are checked there."""
    num_rows = reward_N.numel()
    advantage_N = torch.empty(num_rows, dtype=torch.float32, device=reward_N.device)
    trainable_N = torch.empty(num_rows, dtype=torch.bool, device=reward_N.device)
    tile = GROUP.fit(BI=num_rows, BJ=num_rows)
    if num_rows:
        _group_kernel[(triton.cdiv(num_rows, tile.blocks["BI"]),)](
            reward_N.detach().contiguous(),
            group_N.contiguous(),
            valid_N.contiguous(),
            advantage_N,
            trainable_N,
            num_rows,
            1e-6,
            **tile.blocks,
            LEAVE_ONE_OUT=kind == "leave_one_out",
            BY_STD=kind == "std_normalized",
            BY_MEAN=kind == "mean_normalized",
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return advantage_N.to(reward_N.dtype), trainable_N


def tree_credit(trees: TreeRewards, weights: CreditWeights) -> TreeCredit:
    """See ``tree_credit`` of the package; arguments are checked there."""
    P, C, F, M = trees.reward_PCFM.shape
    G = trees.reward_PG.shape[1]

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=trees.reward_PG.device)

    out = TreeCredit(
        attempt_PG=new(P, G),
        attempt_trainable_PG=new(P, G, dtype=torch.bool),
        feedback_PCF=new(P, C, F),
        feedback_trainable_PCF=new(P, C, F, dtype=torch.bool),
        revision_PCFM=new(P, C, F, M),
        revision_trainable_PCFM=new(P, C, F, M, dtype=torch.bool),
        value_PCF=new(P, C, F),
        star_value_PCF=new(P, C, F),
    )
    inputs = (
        trees.reward_PG,
        trees.valid_PG,
        trees.criticised_PC,
        trees.reward_PCFM,
        trees.valid_PCFM,
        trees.probe_PCFM,
        trees.probe_valid_PCFM,
        trees.feedback_valid_PCF,
        trees.weight_PC,
        trees.agrees_PCF if weights.discrimination_coef != 0.0 else None,
        trees.leaks_PCF if weights.leak_coef != 0.0 else None,
    )
    if P:
        _tree_kernel[(P,)](
            *(None if x is None else x.contiguous() for x in inputs),
            out.attempt_PG,
            out.attempt_trainable_PG,
            out.feedback_PCF,
            out.feedback_trainable_PCF,
            out.revision_PCFM,
            out.revision_trainable_PCFM,
            out.value_PCF,
            out.star_value_PCF,
            weights.lam,
            weights.attempt_weight,
            weights.attempt_value_weight,
            weights.improvement_weight,
            weights.discrimination_coef,
            weights.leak_coef,
            G=G,
            C=C,
            F=F,
            M=M,
            BG=triton.next_power_of_2(max(1, G)),
            BC=triton.next_power_of_2(max(1, C)),
            BF=triton.next_power_of_2(max(1, F)),
            BM=triton.next_power_of_2(max(1, M)),
            HAS_PROBE=trees.probe_PCFM is not None,
            NEEDS_PROBE=weights.lam != 0.0,
            HAS_FEEDBACK_VALID=trees.feedback_valid_PCF is not None,
            HAS_WEIGHT=trees.weight_PC is not None,
            HAS_AGREES=weights.discrimination_coef != 0.0,
            HAS_LEAKS=weights.leak_coef != 0.0,
            FOLLOWUP=weights.attempt_value_weight != 0.0,
            IMPROVEMENT=weights.improvement_weight != 0.0,
            num_warps=TREE.num_warps,
            num_stages=TREE.num_stages,
        )
    return out


def spread_to_tokens(value_S: Tensor, cu_seqlens: Tensor, mask_T: Tensor) -> Tensor:
    """See ``spread_to_tokens`` of the package."""
    # Zeros, not empty: a token outside every sequence is 0.
    out_T = torch.zeros(mask_T.numel(), dtype=value_S.dtype, device=mask_T.device)
    if value_S.numel():
        _spread_kernel[(value_S.numel(),)](
            value_S.contiguous(),
            cu_seqlens.contiguous(),
            mask_T.contiguous(),
            out_T,
            **SPREAD.blocks,
            num_warps=SPREAD.num_warps,
            num_stages=SPREAD.num_stages,
        )
    return out_T


def gae(
    reward_T: Tensor,
    value_T: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """See ``gae`` of the package."""
    advantage_T = torch.zeros(reward_T.shape, dtype=reward_T.dtype, device=reward_T.device)
    return_T = torch.zeros(value_T.shape, dtype=value_T.dtype, device=value_T.device)
    if cu_seqlens.numel() > 1:
        _gae_kernel[(cu_seqlens.numel() - 1,)](
            reward_T.detach().contiguous(),
            value_T.detach().contiguous(),
            mask.contiguous(),
            cu_seqlens.contiguous(),
            advantage_T,
            return_T,
            gamma,
            lam,
            **GAE.blocks,
            num_warps=GAE.num_warps,
            num_stages=GAE.num_stages,
        )
    return advantage_T, return_T
