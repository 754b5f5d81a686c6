"""Plain-torch truth of the vocabulary kernels: what each rank computes on its own shard.

Shapes: T tokens, N rows that are scored (T without the masked ones), H hidden, V columns of this
rank's vocabulary shard, W = ceil(V / 32) words of a support bitmask, C rows and B columns of a
tile, K hits. The Triton twins of ``linear_*`` and ``logits_*`` (same signatures) are in
``triton_logprob.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_COLUMNS = 2048
TILE_ELEMENTS = 2**20

# Schedule of the Triton backward, here because the roofline is drawn without Triton: 1536 rows are
# the fewest for which an H100 multiplies longer than it reads and writes a float32 main_grad.
BACKWARD_ROWS = 1536
BACKWARD_COLUMNS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The slice of the vocabulary that one rank holds, and the temperature of its logits.

    Example: ``Shard(first_column=64, num_columns=37, inv_temperature=1.0)``: global ids 64 .. 100.
    """

    first_column: int
    """Global id of the shard's column 0."""
    num_columns: int
    """Real columns; what lies behind them in the tensor is padding and is never read."""
    inv_temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Per-row partial softmax of one shard; ``combine`` (vocab_parallel.py) joins shards.

    With z the logits over the temperature: ``max`` = max z, ``sum_exp`` = sum e^(z - max),
    ``sum_shifted`` = sum e^(z - max) (z - max), ``target`` = z of the label, 0 where it is not
    held.
    """

    max_N: Tensor
    sum_exp_N: Tensor
    sum_shifted_N: Tensor
    target_N: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Cotangent:
    """What a backward needs per row: the softmax's normaliser and the gradients that arrive."""

    log_sum_exp_N: Tensor
    entropy_N: Tensor
    grad_logprob_N: Tensor
    grad_entropy_N: Tensor | None


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """float64 stays, everything else is accumulated in float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


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
    """Partial softmax of ``hidden @ weight.T`` that never holds more than one tile of it.

    ``rows_N`` are the rows of ``hidden_TH`` that are scored (None: all of them).
    """
    stats = _empty_stats(hidden_TH, labels_N.numel())
    for chunk in _spans(labels_N.numel(), _tile_rows(shard.num_columns, chunk_size)):
        hidden_CH = _take(hidden_TH, rows_N, chunk)
        for block in _spans(shard.num_columns, TILE_COLUMNS):
            logits_CB = _tile(hidden_CH, weight_VH, block, shard)
            _fold(stats, logits_CB, labels_N, chunk, block, shard, support_NW, with_entropy)
    return stats


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
    """Write ``grad_hidden_TH`` (zero-filled by the caller) and add to ``grad_weight_VH``.

    Both are summed in float32 (float64 for float64 inputs) and rounded once. Where the weight's
    buffer is itself that precise, tokens are the outer loop and only one chunk of float32 hidden
    gradient lives; otherwise columns are, and its float32 sum (4 N H bytes) is extra memory.
    """
    dtype = compute_dtype(hidden_TH)
    num_rows = labels_N.numel()
    chunks = list(_spans(num_rows, _tile_rows(shard.num_columns, chunk_size)))
    blocks = list(_spans(shard.num_columns, TILE_COLUMNS))

    def dlogits(hidden_CH: Tensor, chunk: slice, block: slice) -> Tensor:
        logits_CB = _tile(hidden_CH, weight_VH, block, shard)
        return _dlogits(logits_CB, labels_N, chunk, block, shard, cotangent, support_NW)

    if grad_weight_VH is None or grad_weight_VH.dtype == dtype:
        for chunk in chunks:
            hidden_CH = _take(hidden_TH, rows_N, chunk)
            grad_hidden_CH = torch.zeros_like(hidden_CH)
            for block in blocks:
                dlogits_CB = dlogits(hidden_CH, chunk, block)
                if grad_weight_VH is not None:
                    grad_weight_VH[block].addmm_(dlogits_CB.T, hidden_CH)
                if grad_hidden_TH is not None:
                    grad_hidden_CH.addmm_(dlogits_CB, weight_VH[block].to(dtype))
            if grad_hidden_TH is not None:
                _put(grad_hidden_TH, rows_N, chunk, grad_hidden_CH)
        return

    grad_hidden_NH = hidden_TH.new_zeros((num_rows, hidden_TH.shape[1]), dtype=dtype)
    for block in blocks:
        weight_BH = weight_VH[block].to(dtype)
        grad_weight_BH = torch.zeros_like(weight_BH)
        for chunk in chunks:
            hidden_CH = _take(hidden_TH, rows_N, chunk)
            dlogits_CB = dlogits(hidden_CH, chunk, block)
            grad_weight_BH.addmm_(dlogits_CB.T, hidden_CH)
            if grad_hidden_TH is not None:
                grad_hidden_NH[chunk].addmm_(dlogits_CB, weight_BH)
        grad_weight_VH[block] += grad_weight_BH
    if grad_hidden_TH is not None:
        _put(grad_hidden_TH, rows_N, slice(0, num_rows), grad_hidden_NH)


def logits_stats(
    logits_TV: Tensor,
    labels_N: Tensor,
    rows_N: Tensor | None,
    shard: Shard,
    *,
    support_NW: Tensor | None,
    with_entropy: bool,
) -> Stats:
    """Partial softmax of logits that are already there (``linear_stats`` without the product)."""
    stats = _empty_stats(logits_TV, labels_N.numel())
    for chunk in _spans(labels_N.numel(), _tile_rows(shard.num_columns, None)):
        for block in _spans(shard.num_columns, TILE_COLUMNS):
            logits_CB = _take(logits_TV[:, block], rows_N, chunk) * shard.inv_temperature
            _fold(stats, logits_CB, labels_N, chunk, block, shard, support_NW, with_entropy)
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
    """Write the gradient of given logits into ``grad_logits_TV`` (zero-filled by the caller)."""
    for chunk in _spans(labels_N.numel(), _tile_rows(shard.num_columns, None)):
        for block in _spans(shard.num_columns, TILE_COLUMNS):
            logits_CB = _take(logits_TV[:, block], rows_N, chunk) * shard.inv_temperature
            dlogits_CB = _dlogits(logits_CB, labels_N, chunk, block, shard, cotangent, support_NW)
            _put(grad_logits_TV[:, block], rows_N, chunk, dlogits_CB)


def bucket_divergence(
    student_NB: Tensor, teacher_NB: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:
    """Divergence [N] of softmax(teacher) and softmax(student); its gradient by the student [N, B].

    alpha 0: KL(teacher || student); 1: KL(student || teacher); between: alpha KL(teacher || mix) +
    (1 - alpha) KL(student || mix) with mix = (1 - alpha) student + alpha teacher.
    """
    logq_NB, logp_NB = student_NB.log_softmax(-1), teacher_NB.log_softmax(-1)
    q_NB, p_NB = logq_NB.exp(), logp_NB.exp()

    def expect(weight_NB: Tensor, log_NB: Tensor, other_NB: Tensor) -> Tensor:
        # An empty bucket has weight 0, and 0 * inf is nan.
        return torch.where(weight_NB > 0, weight_NB * (log_NB - other_NB), 0.0)

    if alpha == 0.0:
        return expect(p_NB, logp_NB, logq_NB).sum(-1), q_NB - p_NB
    if alpha == 1.0:
        terms_NB = expect(q_NB, logq_NB, logp_NB)
        divergence_N = terms_NB.sum(-1)
        return divergence_N, terms_NB - q_NB * divergence_N[:, None]
    logm_NB = ((1.0 - alpha) * q_NB + alpha * p_NB).log()
    terms_NB = expect(q_NB, logq_NB, logm_NB)
    to_student_N = terms_NB.sum(-1)
    to_teacher_N = expect(p_NB, logp_NB, logm_NB).sum(-1)
    grad_NB = (1.0 - alpha) * (terms_NB - q_NB * to_student_N[:, None])
    return alpha * to_teacher_N + (1.0 - alpha) * to_student_N, grad_NB


def _empty_stats(like: Tensor, num_rows: int) -> Stats:
    dtype = compute_dtype(like)
    zero = [torch.zeros(num_rows, dtype=dtype, device=like.device) for _ in range(3)]
    return Stats(
        max_N=torch.full_like(zero[0], -torch.inf),
        sum_exp_N=zero[0],
        sum_shifted_N=zero[1],
        target_N=zero[2],
    )


def _spans(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _tile_rows(num_columns: int, chunk_size: int | None) -> int:
    """Rows of a tile: at most 2^20 elements, so that a tile is 4 MiB whatever T and V are."""
    return chunk_size or max(1, TILE_ELEMENTS // max(1, min(num_columns, TILE_COLUMNS)))


def _take(tensor_TX: Tensor, rows_N: Tensor | None, chunk: slice) -> Tensor:
    part = tensor_TX[chunk] if rows_N is None else tensor_TX.index_select(0, rows_N[chunk])
    return part.to(compute_dtype(tensor_TX))


def _put(out_TX: Tensor, rows_N: Tensor | None, chunk: slice, values_CX: Tensor) -> None:
    if rows_N is None:
        out_TX[chunk] = values_CX
    else:
        out_TX[rows_N[chunk]] = values_CX.to(out_TX.dtype)


def _tile(hidden_CH: Tensor, weight_VH: Tensor, block: slice, shard: Shard) -> Tensor:
    return (hidden_CH @ weight_VH[block].to(hidden_CH.dtype).T).mul_(shard.inv_temperature)


def _hits(labels_N: Tensor, chunk: slice, block: slice, shard: Shard) -> tuple[Tensor, Tensor]:
    """Rows of a tile whose label lies in its columns, and the column it is."""
    column_C = labels_N[chunk] - (shard.first_column + block.start)
    row_K = ((column_C >= 0) & (column_C < block.stop - block.start)).nonzero().squeeze(1)
    return row_K, column_C[row_K]


def _restrict(
    logits_CB: Tensor,
    support_NW: Tensor | None,
    chunk: slice,
    block: slice,
    row_K: Tensor,
    column_K: Tensor,
) -> None:
    """Columns off the support become -inf, but for the label: it was sampled, so it was on it."""
    if support_NW is None:
        return
    bit_B = torch.arange(block.start, block.stop, device=logits_CB.device)
    word_CB = support_NW[chunk][:, bit_B // 32]
    keep_CB = (word_CB >> (bit_B % 32).to(word_CB.dtype)) & 1 != 0
    keep_CB[row_K, column_K] = True
    logits_CB.masked_fill_(~keep_CB, -torch.inf)


def _fold(
    stats: Stats,
    logits_CB: Tensor,
    labels_N: Tensor,
    chunk: slice,
    block: slice,
    shard: Shard,
    support_NW: Tensor | None,
    with_entropy: bool,
) -> None:
    """Take one tile into the running statistics (overwrites ``logits_CB``)."""
    row_K, column_K = _hits(labels_N, chunk, block, shard)
    _restrict(logits_CB, support_NW, chunk, block, row_K, column_K)
    stats.target_N[chunk][row_K] = logits_CB[row_K, column_K]

    old_max_C = stats.max_N[chunk].clone()
    new_max_C = torch.maximum(old_max_C, logits_CB.amax(dim=1))
    # A row that has seen only -inf has no maximum to shift by, and -inf - -inf is nan.
    shift_C = torch.where(new_max_C == -torch.inf, 0.0, new_max_C)
    shifted_CB = logits_CB.sub_(shift_C[:, None])
    exp_CB = shifted_CB.exp()
    decay_C = (old_max_C - shift_C).exp()
    if with_entropy:
        moved_C = torch.where(old_max_C == -torch.inf, 0.0, old_max_C - shift_C)
        carried_C = (stats.sum_shifted_N[chunk] + stats.sum_exp_N[chunk] * moved_C) * decay_C
        shifted_CB.masked_fill_(shifted_CB == -torch.inf, 0.0)
        stats.sum_shifted_N[chunk] = carried_C + torch.einsum("cb,cb->c", exp_CB, shifted_CB)
    stats.sum_exp_N[chunk] = stats.sum_exp_N[chunk] * decay_C + exp_CB.sum(dim=1)
    stats.max_N[chunk] = new_max_C


def _dlogits(
    logits_CB: Tensor,
    labels_N: Tensor,
    chunk: slice,
    block: slice,
    shard: Shard,
    cotangent: Cotangent,
    support_NW: Tensor | None,
) -> Tensor:
    """Gradient by the raw logits of a tile (overwrites ``logits_CB``).

    d logp_y / d z_j = [j = y] - p_j and d H / d z_j = -p_j (log p_j + H).
    """
    row_K, column_K = _hits(labels_N, chunk, block, shard)
    _restrict(logits_CB, support_NW, chunk, block, row_K, column_K)
    grad_C = cotangent.grad_logprob_N[chunk]
    logp_CB = logits_CB.sub_(cotangent.log_sum_exp_N[chunk][:, None])
    p_CB = logp_CB.exp()
    if cotangent.grad_entropy_N is None:
        dz_CB = p_CB.mul_(-grad_C[:, None])
    else:
        # p log p -> 0 as p -> 0; the product of the two limits is nan.
        logp_CB.masked_fill_(logp_CB == -torch.inf, 0.0)
        logp_CB.add_(cotangent.entropy_N[chunk][:, None])
        logp_CB.mul_(cotangent.grad_entropy_N[chunk][:, None]).add_(grad_C[:, None]).neg_()
        dz_CB = p_CB.mul_(logp_CB)
    dz_CB[row_K, column_K] += grad_C[row_K]
    return dz_CB.mul_(shard.inv_temperature)
