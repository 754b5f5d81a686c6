"""Packing: sequences to micro-batches of every rank, one gather into buffers, and the way back.

The work is done by `megatron_binac._C` (csrc/), or by `packing_reference`, its plain Python twin,
where the extension was not built; the twins give the same result bit for bit. NumPy in and out, no
torch.

Conventions: `logprob[i]` scores `ids[i]`, so a sequence of L tokens has L values, of which the
first is 0 and masked. `labels[t]` is what the model's output at t predicts; it never crosses a
border. A sequence is its prompt followed by its ids; per-token fields belong to the ids.

Suffixes: S sequences, s sequences of one micro-batch, B micro-batches, T stored tokens of one
micro-batch, D distinct tokens, N segments of a prefix forest.

Example:
    plan = packing.plan(lengths, capacity=32768, dp_size=8, costs=CostModel(a=6e9, b=3e5))
    for indices in plan.microbatches(rank):
        packed = packing.gather(ids, indices, fields={"advantages": advantages})
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType
from typing import Any, Literal, overload

import numpy as np

from megatron_binac import packing_reference

logger = logging.getLogger(__name__)

MAX_TOKENS = 2**31 - 1
"""Tokens of one sequence or one micro-batch: cu_seqlens is int32."""
MAX_ROOM = 2**24
"""Multiples of `seq_multiple` in one micro-batch: the planner keeps one list head for each."""
MAX_BINS = 2**26
"""Micro-batches over all ranks."""


def _load_core() -> tuple[ModuleType, str]:
    """The twin to use; BINAC_PACKING=auto|cpp|reference overrides."""
    wish = os.environ.get("BINAC_PACKING", "auto")
    if wish not in ("auto", "cpp", "reference"):
        raise ValueError(f"BINAC_PACKING: got {wish!r}, expected auto, cpp or reference")
    if wish == "reference":
        return packing_reference, "reference"
    try:
        from megatron_binac import _C  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        if wish == "cpp":
            raise
        logger.warning(
            "packing runs on the plain Python reference, 50 to 100 times slower: the C++ "
            "extension megatron_binac._C could not be loaded (%s). Install a C++17 compiler and "
            "run pip install again with -v to see why it was not built.",
            error,
        )
        return packing_reference, "reference"
    return _C, "cpp"


_core, _backend = _load_core()


def backend() -> str:
    """Which twin does the work: "cpp" or "reference"."""
    return _backend


# ---- arguments -------------------------------------------------------------


def _integer(name: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name}: got {value!r}, expected an integer in [{low}, {high}]")
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value}, expected an integer in [{low}, {high}]")
    return int(value)


def _vector(name: str, value: Any, dtypes: Sequence[type], size: int | None = None) -> np.ndarray:
    """`value` as a contiguous vector of one of `dtypes`; a list is converted to the first."""
    if not isinstance(value, np.ndarray):
        value = np.asarray(value)
        if value.size == 0 or _holds(dtypes[0], value):
            value = value.astype(dtypes[0])
    wanted = " or ".join(np.dtype(d).name for d in dtypes)
    if value.dtype not in [np.dtype(d) for d in dtypes]:
        raise ValueError(
            f"{name}: got dtype {value.dtype}, expected {wanted}; convert it with "
            f".astype(np.{np.dtype(dtypes[0]).name})"
        )
    if value.ndim != 1:
        raise ValueError(f"{name}: got {value.ndim} dimensions, expected 1")
    if not value.flags.c_contiguous:
        raise ValueError(
            f"{name}: got a strided array, expected a contiguous one; use np.ascontiguousarray"
        )
    if size is not None and len(value) != size:
        raise ValueError(f"{name}: got {len(value)} values, expected {size}, one for each sequence")
    return value


def _holds(dtype: type, values: np.ndarray) -> bool:
    """Whether numbers of a list keep what they are in this dtype."""
    if np.issubdtype(dtype, np.integer):
        unsigned = values.dtype.kind == "u" and values.max() <= np.iinfo(dtype).max
        return values.dtype.kind == "i" or bool(unsigned)
    return np.can_cast(values.dtype, dtype, casting="same_kind")


# ---- what goes in ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """Padding as three explicit numbers of tokens; nothing is ever padded more than they require.

    Example: ``Alignment.for_layout(tensor=2, sequence_parallel=True, token_multiple=16)`` is
    ``Alignment(seq_multiple=1, pack_multiple=32)``.
    """

    seq_multiple: int = 1
    """Every sequence is padded to a multiple of it (context parallelism cuts each sequence)."""
    pack_multiple: int = 1
    """The tokens of a micro-batch are padded to a multiple of it (sequence parallelism, FP8)."""
    fixed_length: int | None = None
    """Every micro-batch has exactly this many tokens (pipelines without variable shapes)."""

    def __post_init__(self) -> None:
        _integer("seq_multiple", self.seq_multiple, 1, MAX_TOKENS)
        _integer("pack_multiple", self.pack_multiple, 1, MAX_TOKENS)
        if self.total_multiple > MAX_TOKENS:
            raise ValueError(
                f"pack_multiple: the common multiple of seq_multiple={self.seq_multiple} and "
                f"pack_multiple={self.pack_multiple} is {self.total_multiple}, over {MAX_TOKENS}"
            )
        if self.fixed_length is not None:
            _integer("fixed_length", self.fixed_length, 1, MAX_TOKENS)
            if self.fixed_length % self.total_multiple:
                raise ValueError(
                    f"fixed_length: got {self.fixed_length}, expected a multiple of "
                    f"{self.total_multiple} (seq_multiple={self.seq_multiple}, "
                    f"pack_multiple={self.pack_multiple})"
                )

    @property
    def total_multiple(self) -> int:
        """Both at once, as the tail of a micro-batch belongs to its last sequence."""
        return math.lcm(self.seq_multiple, self.pack_multiple)

    @classmethod
    def for_layout(
        cls,
        *,
        tensor: int = 1,
        context: int = 1,
        sequence_parallel: bool = False,
        token_multiple: int = 1,
        fixed_length: int | None = None,
    ) -> Alignment:
        """The least alignment that a parallel split and a number format need.

        Args:
            tensor, context: sizes of the tensor- and context-parallel groups.
            token_multiple: tokens that a rank must hold a multiple of after the split: 16 for FP8,
                32 for MXFP8, 128 for blockwise FP8.

        Under context parallelism every sequence is cut into 2 * context chunks (one early and one
        late chunk a rank), and each rank's part is cut again by tensor under sequence parallelism.
        """
        _integer("tensor", tensor, 1, 2**16)
        _integer("context", context, 1, 2**16)
        _integer("token_multiple", token_multiple, 1, 2**16)
        split = tensor if sequence_parallel else 1
        return cls(
            seq_multiple=context * math.lcm(2, split) if context > 1 else 1,
            pack_multiple=context * split * token_multiple,
            fixed_length=fixed_length,
        )

    def stored(self, tokens: int) -> int:
        """Stored tokens of a micro-batch whose sequences, each padded, have `tokens`."""
        if self.fixed_length is not None:
            return self.fixed_length
        return -(-max(tokens, 1) // self.total_multiple) * self.total_multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Cost of a sequence of s tokens: a * s + b * s**2.

    Example: ``CostModel.from_shape(num_layers=24, hidden=2048, ffn=8192, heads=16, vocab=128000)``
    """

    a: float
    """FLOPs a token (matrices)."""
    b: float
    """FLOPs a pair of tokens, causal (attention)."""

    def __post_init__(self) -> None:
        for name, value in (("a", self.a), ("b", self.b)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: got {value}, expected a finite number of at least 0")

    @classmethod
    def from_shape(
        cls,
        *,
        num_layers: int,
        hidden: int,
        ffn: int,
        heads: int,
        vocab: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        gated: bool = True,
        active_experts: int = 1,
    ) -> CostModel:
        """Forward and backward FLOPs of a GPT of this shape (2 a multiply-add, backward twice).

        The output head counts once, the input embedding not; `ffn` is the width of one expert, of
        which `active_experts` see each token.
        """
        kv = heads if kv_heads is None else kv_heads
        dim = hidden // heads if head_dim is None else head_dim
        projections = hidden * dim * (2 * heads + 2 * kv)
        mlp = (3 if gated else 2) * hidden * ffn * active_experts
        # Scores and weighted values: two products of s * s / 2 pairs, each pair heads * dim deep.
        return cls(
            a=6.0 * (num_layers * (projections + mlp) + hidden * vocab),
            b=6.0 * num_layers * heads * dim,
        )

    def __call__(self, lengths_S: np.ndarray, prefix_S: np.ndarray | None = None) -> np.ndarray:
        """Cost of each sequence, or of each segment that follows `prefix_S` earlier tokens."""
        length = lengths_S.astype(np.float64)
        if prefix_S is None:
            return self.a * length + self.b * (length * length)
        before = prefix_S.astype(np.float64)
        return self.a * length + self.b * (length * (length + 2.0 * before))


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of uneven lengths in one buffer.

    Example: ``Ragged.from_rows([np.array([1, 2], np.int32), np.array([3], np.int32)])``
    """

    values: np.ndarray
    """[sum of lengths]"""
    offsets: np.ndarray
    """int64 [rows + 1]"""

    def __post_init__(self) -> None:
        _vector("offsets", self.offsets, [np.int64])
        if self.values.ndim != 1 or not self.values.flags.c_contiguous:
            raise ValueError("values: expected one contiguous vector")
        offsets = self.offsets
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(self.values):
            raise ValueError(f"offsets: expected to run from 0 to {len(self.values)}")
        if len(offsets) > 1 and (np.diff(offsets) < 0).any():
            raise ValueError("offsets: expected ascending values")

    @classmethod
    def from_rows(cls, rows: Sequence[np.ndarray], dtype: Any = None) -> Ragged:
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        values = np.concatenate(rows) if len(rows) else np.zeros(0)
        return cls(np.ascontiguousarray(values, dtype=dtype), offsets)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index = index % len(self)
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))


Rows = Ragged | Sequence[np.ndarray]
"""Rows of one dtype: one buffer with offsets, or a list of arrays."""


# ---- the planner -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStats:
    """What a plan costs, against what no plan can beat."""

    num_sequences: int
    num_bins: int
    """Micro-batches needed before the counts of the ranks were made equal."""
    lower_bound: int
    """No packing needs fewer bins (bound L2; summed over ranks where they are given)."""
    num_microbatches: int
    """Of all ranks together."""
    num_dummies: int
    """Micro-batches without a sequence."""
    real_tokens: int
    stored_tokens: int
    """Real tokens and padding, as they lie in the buffers."""
    num_truncated: int
    truncated_tokens: int
    occupancy: float
    """Real tokens / (num_bins * usable capacity): how full the bins of the packing are."""
    rank_balance: float
    """Largest / mean cost over ranks; 1 is perfect."""
    microbatch_balance: float
    """Largest / mean cost over all micro-batches."""

    @property
    def fill(self) -> float:
        """Real tokens / stored tokens."""
        return self.real_tokens / self.stored_tokens

    @property
    def padding(self) -> float:
        """Share of stored tokens that are padding."""
        return 1.0 - self.fill


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which sequences form which micro-batch of which rank; as many on every rank."""

    dp_size: int
    num_microbatches: int
    """Of each rank."""
    indices_S: np.ndarray
    """int32: all sequences in storage order, rank after rank, micro-batch after micro-batch."""
    bounds: np.ndarray
    """int64 [dp_size * num_microbatches + 1]: where each micro-batch begins in `indices_S`."""
    stored: np.ndarray
    """int64 [dp_size * num_microbatches]: tokens that each micro-batch stores."""
    lengths_S: np.ndarray
    """int64: tokens kept of each sequence, fewer than given only where truncation was asked for."""
    alignment: Alignment
    stats: PlanStats

    def microbatches(self, rank: int) -> list[np.ndarray]:
        """Sequence indices of each micro-batch of `rank`, costliest first; empty for a dummy."""
        _integer("rank", rank, 0, self.dp_size - 1)
        first = rank * self.num_microbatches
        cuts = self.bounds[first : first + self.num_microbatches + 1].tolist()
        return [self.indices_S[a:b] for a, b in pairwise(cuts)]


def plan(
    lengths: np.ndarray | Sequence[int],
    *,
    capacity: int,
    dp_size: int = 1,
    costs: CostModel | np.ndarray | Sequence[float] | None = None,
    groups: np.ndarray | Sequence[int] | None = None,
    parents: np.ndarray | Sequence[int] | None = None,
    ranks: np.ndarray | Sequence[int] | None = None,
    alignment: Alignment | None = None,
    microbatch_multiple: int = 1,
    oversize: Literal["error", "truncate"] = "error",
) -> Plan:
    """Pack sequences into micro-batches of at most `capacity` stored tokens, balanced over ranks.

    Args:
        lengths: int64 or int32 [S], tokens of each sequence, at least 1. No sequence at all is
            legal: every rank then gets dummies, so that nobody waits.
        capacity: largest number of stored tokens of one micro-batch.
        costs: a model, or float64 [S]; None counts tokens.
        groups: int64 [S] labels; the sequences of a label share a micro-batch.
        parents: int64 [S]; the sequence that precedes this one in its tree, -1 for a root, always
            an earlier index. `lengths` are then the tokens of each segment alone, a tree shares a
            micro-batch, and attention to the ancestors is part of the cost.
        ranks: int32 [S]; the rank that holds each sequence already. None: the planner is free.
        alignment: padding rules; none by default.
        microbatch_multiple: every rank's count is a multiple of it (the pipeline's size under an
            interleaved schedule).
        oversize: what to do with a sequence longer than a micro-batch: name it, or cut and count
            it.

    Returns:
        The plan; it depends on the arguments only, not on the twin or the machine.

    Raises:
        ValueError: naming the argument, and the sequence where one is at fault.
    """
    align = Alignment() if alignment is None else alignment
    _integer("capacity", capacity, 1, MAX_TOKENS)
    _integer("dp_size", dp_size, 1, 2**20)
    _integer("microbatch_multiple", microbatch_multiple, 1, 2**20)
    if dp_size * microbatch_multiple > MAX_BINS:
        raise ValueError(
            f"microbatch_multiple: {microbatch_multiple} on each of dp_size={dp_size} ranks makes "
            f"over {MAX_BINS} micro-batches"
        )
    if not isinstance(oversize, str) or oversize not in ("error", "truncate"):
        raise ValueError(f"oversize: got {oversize!r}, expected 'error' or 'truncate'")
    lengths_S = _vector("lengths", lengths, [np.int64, np.int32]).astype(np.int64, copy=False)
    num = len(lengths_S)
    if num > MAX_TOKENS:
        raise ValueError(f"lengths: got {num} sequences, expected at most {MAX_TOKENS}")
    if num and int(lengths_S.min()) < 1:
        at = int(lengths_S.argmin())
        raise ValueError(f"lengths: sequence {at} has {lengths_S[at]} tokens, expected at least 1")
    limit = _usable(capacity, align)
    lengths_S, num_cut, tokens_cut = _fit(lengths_S, limit, capacity, align, oversize)

    ranks_S = None
    if ranks is not None:
        ranks_S = _vector("ranks", ranks, [np.int32, np.int64], num).astype(np.int32, copy=False)
        if num and (int(ranks_S.min()) < 0 or int(ranks_S.max()) >= dp_size):
            raise ValueError(f"ranks: expected values in [0, {dp_size - 1}]")
    prefix_S = None
    units_S = None
    if groups is not None:
        units_S = _vector("groups", groups, [np.int64, np.int32], num).astype(np.int64, copy=False)
    if parents is not None:
        if align.seq_multiple != 1 or num_cut:
            raise ValueError(
                "parents: a prefix-shared layout has no padding inside a tree and no truncation; "
                "use seq_multiple=1 (no context parallelism) and oversize='error'"
            )
        parents_S = _vector("parents", parents, [np.int64, np.int32], num).astype(
            np.int64, copy=False
        )
        roots_S, prefix_S = _trees(lengths_S, parents_S)
        if units_S is None:
            units_S = roots_S
        elif (units_S != units_S[roots_S]).any():
            at = int(np.flatnonzero(units_S != units_S[roots_S])[0])
            raise ValueError(f"groups: sequence {at} has another group than the root of its tree")
    if units_S is not None:
        _check_units(lengths_S, units_S, ranks_S, limit, align)

    costs_S = _costs(lengths_S, costs, prefix_S)
    indices_S, bounds, tokens_B, costs_B, num_bins, bound = _core.plan(
        lengths_S,
        costs_S,
        units_S,
        ranks_S,
        limit,
        dp_size,
        align.seq_multiple,
        microbatch_multiple,
    )
    if align.fixed_length is None:
        stored = -(-np.maximum(tokens_B, 1) // align.total_multiple) * align.total_multiple
    else:
        stored = np.full(len(tokens_B), align.fixed_length, dtype=np.int64)
    return Plan(
        dp_size=dp_size,
        num_microbatches=(len(bounds) - 1) // dp_size,
        indices_S=indices_S,
        bounds=bounds,
        stored=stored,
        lengths_S=lengths_S,
        alignment=align,
        stats=PlanStats(
            num_sequences=num,
            num_bins=num_bins,
            lower_bound=bound,
            num_microbatches=len(bounds) - 1,
            num_dummies=int((bounds[1:] == bounds[:-1]).sum()),
            real_tokens=int(lengths_S.sum()),
            stored_tokens=int(stored.sum()),
            num_truncated=num_cut,
            truncated_tokens=tokens_cut,
            occupancy=int(lengths_S.sum()) / (max(num_bins, 1) * limit),
            rank_balance=_largest_over_mean(
                costs_B.reshape(dp_size, -1).sum(axis=1, dtype=np.float64)
            ),
            microbatch_balance=_largest_over_mean(costs_B),
        ),
    )


def _usable(capacity: int, align: Alignment) -> int:
    """The tokens that the sequences of a micro-batch, each padded, may have together."""
    if align.fixed_length is not None:
        if align.fixed_length > capacity:
            raise ValueError(
                f"fixed_length: got {align.fixed_length}, expected at most capacity={capacity}"
            )
        return _room(align.fixed_length, align)
    limit = capacity // align.total_multiple * align.total_multiple
    if limit == 0:
        raise ValueError(
            f"capacity: got {capacity}, expected at least {align.total_multiple}, the common "
            f"multiple of seq_multiple={align.seq_multiple} and pack_multiple={align.pack_multiple}"
        )
    return _room(limit, align)


def _room(limit: int, align: Alignment) -> int:
    if limit // align.seq_multiple > MAX_ROOM:
        raise ValueError(
            f"capacity: got {limit} tokens, expected at most {MAX_ROOM} * seq_multiple="
            f"{align.seq_multiple} in one micro-batch"
        )
    return limit


def _fit(
    lengths_S: np.ndarray, limit: int, capacity: int, align: Alignment, oversize: str
) -> tuple[np.ndarray, int, int]:
    """Lengths that fit, how many were cut, and by how many tokens in all.

    `limit` is a multiple of `seq_multiple`: a length fits exactly when its padded length does.
    """
    over = lengths_S > limit
    num_cut = int(over.sum())
    if num_cut == 0:
        return lengths_S, 0, 0
    if oversize == "error":
        at = int(over.argmax())
        others = f", and so have {num_cut - 1} more" if num_cut > 1 else ""
        raise ValueError(
            f"lengths: sequence {at} has {lengths_S[at]} tokens, expected at most {limit} "
            f"(capacity={capacity}, seq_multiple={align.seq_multiple}, pack_multiple="
            f"{align.pack_multiple}){others}; "
            "raise capacity or pass oversize='truncate'"
        )
    kept = np.minimum(lengths_S, limit)
    return kept, num_cut, int((lengths_S - kept).sum())


def _trees(lengths_S: np.ndarray, parents_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Root of every segment and the tokens before it."""
    own = np.arange(len(parents_S))
    if ((parents_S < -1) | (parents_S >= own)).any():
        at = int(np.flatnonzero((parents_S < -1) | (parents_S >= own))[0])
        raise ValueError(
            f"parents: sequence {at} has parent {parents_S[at]}, expected -1 or an earlier sequence"
        )
    # Pointer doubling: after k rounds `link` is the 2**k-th ancestor, so depth costs a logarithm.
    link = np.where(parents_S < 0, own, parents_S)
    before = np.where(parents_S < 0, 0, lengths_S[link])
    while True:
        further = link[link]
        if (further == link).all():
            return link, before
        before = before + before[link]
        link = further


def _check_units(
    lengths_S: np.ndarray,
    units_S: np.ndarray,
    ranks_S: np.ndarray | None,
    limit: int,
    align: Alignment,
) -> None:
    _, first, inverse = np.unique(units_S, return_index=True, return_inverse=True)
    weights = np.zeros(len(first), dtype=np.int64)
    np.add.at(weights, inverse, -(-lengths_S // align.seq_multiple) * align.seq_multiple)
    if len(weights) and int(weights.max()) > limit:
        at = int(first[weights.argmax()])
        raise ValueError(
            f"groups: the group (or tree) of sequence {at} has {weights.max()} tokens, expected at "
            f"most {limit}; it shares one micro-batch, so raise capacity or split it"
        )
    if ranks_S is not None and (ranks_S != ranks_S[first][inverse]).any():
        at = int(np.flatnonzero(ranks_S != ranks_S[first][inverse])[0])
        raise ValueError(f"ranks: sequence {at} is on another rank than the rest of its group")


def _costs(lengths_S: np.ndarray, costs: Any, prefix_S: np.ndarray | None) -> np.ndarray:
    if costs is None:
        return lengths_S.astype(np.float64)
    if isinstance(costs, CostModel):
        return costs(lengths_S, prefix_S)
    costs_S = _vector("costs", costs, [np.float64], len(lengths_S))
    bad = ~(np.isfinite(costs_S) & (costs_S >= 0))
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(f"costs: sequence {at} costs {costs_S[at]}, expected a finite number >= 0")
    if costs_S.max(initial=0.0) > np.finfo(np.float64).max / max(len(costs_S), 1):
        raise ValueError("costs: expected numbers whose sum is finite")
    return costs_S


def _largest_over_mean(costs: np.ndarray) -> float:
    mean = float(costs.mean())
    return float(costs.max()) / mean if mean > 0 else 1.0


# ---- into the buffers and back ---------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """One micro-batch in its buffers.

    Padding and dummies have a false `loss_mask_T` and -1 in `sample_ids_T`.
    """

    tokens_T: np.ndarray
    """int64"""
    labels_T: np.ndarray
    """int64: the token that follows in the sequence; `ignore_id` at its last one and on padding."""
    position_ids_T: np.ndarray
    """int64: from 0 in every sequence, 0 on padding (never beyond a model's table)."""
    loss_mask_T: np.ndarray
    """bool: True where `logprob[t]`, the score of `tokens_T[t]` itself, may be trained on."""
    sample_ids_T: np.ndarray
    """int32: index of the sequence that the token belongs to, -1 on padding."""
    fields: dict[str, np.ndarray]
    """float32 [T] each: advantages, old log-probs, ...; 0 on prompts and padding."""
    cu_seqlens: np.ndarray
    """int32 [s + 1]: sums of real lengths."""
    cu_seqlens_padded: np.ndarray
    """int32 [s + 1]: where each sequence begins in the buffers; the last one owns the tail."""
    max_seqlen: int
    """Longest padded sequence."""
    indices_s: np.ndarray
    """int32: the sequences, as given; empty for a dummy."""
    own_starts: np.ndarray
    """int64 [s]: where the ids of each sequence, after its prompt, begin in the buffers."""
    own_lengths: np.ndarray
    """int64 [s]: and how many they are, after truncation."""

    @property
    def num_tokens(self) -> int:
        """Stored tokens."""
        return len(self.tokens_T)


def gather(
    ids: Rows,
    indices: np.ndarray,
    *,
    prompts: Rows | None = None,
    loss_mask: Rows | None = None,
    fields: Mapping[str, Rows | np.ndarray] | None = None,
    lengths: np.ndarray | None = None,
    alignment: Alignment | None = None,
    pad_id: int = 0,
    ignore_id: int = -100,
    empty: Callable[[int, Any], np.ndarray] = np.empty,
    num_threads: int = 0,
) -> Packed:
    """Copy the sequences of one micro-batch into its buffers, in one pass.

    Args:
        ids: int32 rows, all sequences; only those in `indices` are read.
        indices: int32 [s], e.g. one of `Plan.microbatches`, each once. Empty: a dummy of padding
            only.
        prompts: int32 rows that precede `ids`; their tokens are seen, not trained on.
        loss_mask: bool rows as long as `ids`. None: every id is trained on. The first token of a
            sequence never is.
        fields: float32 rows as long as `ids`, or one float32 value a sequence, [S].
        lengths: int64 [S], tokens kept of each sequence (`Plan.lengths_S` after a truncation).
        alignment: padding rules, those of the plan.
        empty: allocates a buffer from (size, dtype); pass one that returns views of pinned memory.
        num_threads: 0 lets the size decide.

    Raises:
        ValueError: naming the argument and the row.
    """
    align = Alignment() if alignment is None else alignment
    indices_s = _vector("indices", indices, [np.int32, np.int64]).astype(np.int32, copy=False)
    num = len(ids)
    if len(indices_s) and (int(indices_s.min()) < 0 or int(indices_s.max()) >= num):
        raise ValueError(f"indices: expected values in [0, {num - 1}], the rows of ids")
    seen = np.zeros(num, dtype=bool)
    seen[indices_s] = True
    if np.count_nonzero(seen) < len(indices_s):
        double = int(np.bincount(indices_s).argmax())
        raise ValueError(f"indices: sequence {double} is there twice, expected each once")
    named: dict[str, Any] = dict(fields or {})
    for name, rows in [("prompts", prompts), ("loss_mask", loss_mask), *named.items()]:
        if rows is not None and len(rows) != num:
            raise ValueError(f"{name}: got {len(rows)} rows, expected {num}, as many as ids")
    for name, rows in named.items():
        if isinstance(rows, np.ndarray):
            _vector(name, rows, [np.float32], num)
    _integer("num_threads", num_threads, 0, 1024)

    own = _row_lengths(ids, indices_s)
    before = np.zeros_like(own) if prompts is None else _row_lengths(prompts, indices_s)
    kept = own + before
    if lengths is not None:
        kept = np.minimum(kept, _vector("lengths", lengths, [np.int64], num)[indices_s])
    if len(kept) and int(kept.min()) < 1:
        raise ValueError(f"ids: sequence {indices_s[kept.argmin()]} has no tokens")
    padded = -(-kept // align.seq_multiple) * align.seq_multiple
    total = align.stored(int(padded.sum()))
    if total > MAX_TOKENS or int(padded.sum()) > total:
        raise ValueError(
            f"indices: these sequences have {padded.sum()} tokens, expected at most "
            f"{min(total, MAX_TOKENS)}"
        )
    starts = np.zeros(len(kept) + 1, dtype=np.int64)
    np.cumsum(padded, out=starts[1:])

    buffers = {name: _buffer(empty, name, total, dtype) for name, dtype in _BUFFERS.items()}
    fields_T = {name: _buffer(empty, name, total, np.float32) for name in named}
    if len(kept) == 0:
        # One sequence of padding, so that attention over it is defined.
        kept = np.array([total], dtype=np.int64)
        starts = np.array([0, total], dtype=np.int64)
        buffers["tokens"][:] = pad_id
        buffers["labels"][:] = ignore_id
        buffers["position_ids"][:] = 0
        buffers["loss_mask"][:] = False
        buffers["sample_ids"][:] = -1
        for field_T in fields_T.values():
            field_T[:] = 0
        own_starts = own_lengths = np.zeros(0, dtype=np.int64)
    else:
        starts[-1] = total
        _core.gather(
            prompts, ids, loss_mask, list(named.values()), list(named), indices_s, kept, starts,
            pad_id, ignore_id, *buffers.values(), list(fields_T.values()), num_threads,
        )  # fmt: skip
        skipped = np.minimum(before, kept)
        own_starts, own_lengths = starts[:-1] + skipped, kept - skipped
    cu_seqlens = np.zeros(len(kept) + 1, dtype=np.int32)
    np.cumsum(kept, out=cu_seqlens[1:])
    return Packed(
        tokens_T=buffers["tokens"],
        labels_T=buffers["labels"],
        position_ids_T=buffers["position_ids"],
        loss_mask_T=buffers["loss_mask"],
        sample_ids_T=buffers["sample_ids"],
        fields=fields_T,
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=starts.astype(np.int32),
        max_seqlen=int(np.diff(starts).max()),
        indices_s=indices_s,
        own_starts=own_starts,
        own_lengths=own_lengths,
    )


_BUFFERS: dict[str, type] = {
    "tokens": np.int64,
    "labels": np.int64,
    "position_ids": np.int64,
    "loss_mask": np.bool_,
    "sample_ids": np.int32,
}


def _buffer(empty: Callable[[int, Any], np.ndarray], name: str, size: int, dtype: Any) -> Any:
    made = empty(size, dtype)
    good = isinstance(made, np.ndarray) and made.shape == (size,) and made.dtype == dtype
    if not good or not made.flags.c_contiguous or not made.flags.writeable:
        got = f"{made.dtype} {made.shape}" if isinstance(made, np.ndarray) else type(made).__name__
        raise ValueError(
            f"empty: made {got} for {name}, expected a writeable contiguous {np.dtype(dtype).name} "
            f"({size},)"
        )
    return made


def _row_lengths(rows: Rows, indices_s: np.ndarray) -> np.ndarray:
    if isinstance(rows, Ragged):
        return rows.offsets[indices_s + 1] - rows.offsets[indices_s]
    return np.fromiter((len(rows[i]) for i in indices_s.tolist()), np.int64, len(indices_s))


def scatter(
    values: Sequence[np.ndarray],
    packs: Sequence[Packed],
    lengths: np.ndarray,
    *,
    missing: float = 0.0,
    num_threads: int = 0,
) -> Ragged:
    """Bring per-token results of micro-batches back to sequences in the original order.

    The inverse of `gather`: what comes back covers the ids of each sequence, not its prompt.

    Args:
        values: [T] of each micro-batch, one dtype, already in the token's own place (`logprob[t]`
            scores `tokens_T[t]`).
        packs: the micro-batches, in any order, each sequence in at most one of them.
        lengths: int64 [S], ids of each sequence. Tokens that were cut off get `missing`, and so
            do sequences that are in no micro-batch.
    """
    lengths_S = _vector("lengths", lengths, [np.int64, np.int32]).astype(np.int64, copy=False)
    if len(values) != len(packs):
        raise ValueError(f"values: got {len(values)}, expected {len(packs)}, one for each of packs")
    if len(values) == 0:
        raise ValueError("values: got none, expected one for each micro-batch")
    if len(lengths_S) and int(lengths_S.min()) < 0:
        raise ValueError(f"lengths: sequence {lengths_S.argmin()} has {lengths_S.min()} tokens")
    offsets = np.zeros(len(lengths_S) + 1, dtype=np.int64)
    np.cumsum(lengths_S, out=offsets[1:])
    out = np.full(int(offsets[-1]), missing, dtype=values[0].dtype)
    seen = np.zeros(len(lengths_S), dtype=bool)
    for number, (values_T, packed) in enumerate(zip(values, packs, strict=True)):
        _vector(f"values[{number}]", values_T, [out.dtype.type])
        if len(values_T) != packed.num_tokens:
            raise ValueError(
                f"values[{number}]: got {len(values_T)} tokens, expected {packed.num_tokens}"
            )
        indices_s = packed.indices_s
        if len(indices_s) == 0:
            continue
        if int(indices_s.max()) >= len(lengths_S):
            raise ValueError(
                f"lengths: got {len(lengths_S)} values, one for each sequence, but packs hold "
                f"sequence {indices_s.max()}"
            )
        if (packed.own_lengths > lengths_S[indices_s]).any():
            at = indices_s[int((packed.own_lengths > lengths_S[indices_s]).argmax())]
            raise ValueError(f"lengths: sequence {at} has more ids in packs than {lengths_S[at]}")
        if seen[indices_s].any() or len(np.unique(indices_s)) != len(indices_s):
            raise ValueError(f"packs: micro-batch {number} holds a sequence for the second time")
        seen[indices_s] = True
        _core.scatter(
            values_T, packed.own_starts, packed.own_lengths, out, offsets[indices_s], num_threads
        )
    return Ragged(out, offsets)


def true_lengths(
    ids_BT: np.ndarray, eos_id: int, *, prompt_lengths: np.ndarray | None = None
) -> np.ndarray:
    """Tokens of each right-padded row up to and with its first end token, also where pad equals it.

    Args:
        ids_BT: integer [rows, tokens].
        prompt_lengths: [rows]; end tokens inside the prompt don't count.

    Returns:
        int64 [rows]; the whole width where no end token came.
    """
    if ids_BT.ndim != 2 or ids_BT.dtype.kind != "i":
        raise ValueError(
            f"ids_BT: expected integers [rows, tokens], got {ids_BT.dtype} {ids_BT.shape}"
        )
    ends = ids_BT == eos_id
    if prompt_lengths is not None:
        ends &= np.arange(ids_BT.shape[1]) >= prompt_lengths[:, None]
    width = ids_BT.shape[1]
    return np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, width).astype(np.int64)


# ---- parallel splits -------------------------------------------------------


def context_slots(cu_seqlens_padded: np.ndarray, *, size: int, rank: int) -> np.ndarray:
    """Positions of the buffers that a context-parallel rank holds, in its order.

    Each padded sequence is cut into 2 * size chunks and rank r holds chunks r and 2 * size - 1 - r,
    so that causal attention costs every rank the same (the layout of Transformer Engine's thd
    format).

    Returns:
        int64 [T / size].

    Raises:
        ValueError: naming the sequence that `Alignment.seq_multiple` did not pad enough.
    """
    _integer("size", size, 1, 2**16)
    _integer("rank", rank, 0, size - 1)
    starts = _vector("cu_seqlens_padded", cu_seqlens_padded, [np.int32, np.int64]).astype(np.int64)
    if size == 1:
        return np.arange(starts[-1])
    lengths = np.diff(starts)
    if (lengths % (2 * size)).any():
        at = int((lengths % (2 * size) != 0).argmax())
        raise ValueError(
            f"cu_seqlens_padded: sequence {at} has {lengths[at]} padded tokens, expected a "
            f"multiple of {2 * size}; pad by Alignment.for_layout(context={size}) before the split"
        )
    chunks = lengths // (2 * size)
    parts = []
    for start, chunk in zip(starts[:-1].tolist(), chunks.tolist(), strict=True):
        early, late = start + rank * chunk, start + (2 * size - 1 - rank) * chunk
        parts += [np.arange(early, early + chunk), np.arange(late, late + chunk)]
    return np.concatenate(parts)


# ---- shared prefixes -------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixLayout:
    """Every distinct token of a micro-batch's trees once, in depth-first order.

    A segment is a run of tokens without a branch. Depth-first order makes the tokens below a
    segment
    one contiguous run, so the ancestor mask is one number a segment: token k is seen by
    token q exactly when k <= q < subtree_end[segment of k].

    Example: rows [1, 2, 3] and [1, 2, 4] are stored as tokens_D = [1, 2, 3, 4] in segments [1, 2],
    [3], [4].
    """

    tokens_D: np.ndarray
    """int64, padded at the end to `pack_multiple` (or `fixed_length`)."""
    position_ids_D: np.ndarray
    """int64: depth in the tree."""
    parents_D: np.ndarray
    """int64: slot of the token before, whose output scores this one; -1 at a root."""
    segment_starts_N: np.ndarray
    """int64: first slot. Padding is one more segment, without a parent."""
    segment_lengths_N: np.ndarray
    """int64"""
    segment_parents_N: np.ndarray
    """int64: segment before, -1 at a root."""
    subtree_ends_N: np.ndarray
    """int64: one past the last slot of the segment and of all that descend from it."""
    slots_T: np.ndarray
    """int64 [T of the packed micro-batch]: slot of each of its tokens; 0 on padding and on what
    is not stored."""
    num_distinct: int
    """Slots that hold a token."""
    num_real: int
    """Tokens that the plain layout would compute."""

    @property
    def saved(self) -> float:
        """Share of the real tokens that need not be computed."""
        return 1.0 - self.num_distinct / self.num_real if self.num_real else 0.0

    @property
    def subtree_ends_D(self) -> np.ndarray:
        """int64: `subtree_ends_N` for every slot, as a column-wise attention mask wants it."""
        return np.repeat(self.subtree_ends_N, self.segment_lengths_N)


def share_prefixes(
    packed: Packed,
    *,
    alignment: Alignment | None = None,
    pad_id: int = 0,
    lengths: np.ndarray | None = None,
) -> PrefixLayout:
    """The prefix-shared layout of a packed micro-batch; sharing is found in the ids themselves.

    A per-token result on slots, [D], is brought to the micro-batch by `result_D[slots_T]`; the sum
    of gradients over the sequences that share a token follows from that. `lengths` [s], 1 or more:
    so many tokens of each sequence are stored, the first ones; None stores all of them.
    """
    align = Alignment() if alignment is None else alignment
    if align.seq_multiple != 1:
        raise ValueError(
            f"seq_multiple: got {align.seq_multiple}, expected 1: a tree can't be cut for context "
            "parallelism; use the plain layout there"
        )
    starts = packed.cu_seqlens_padded[:-1].astype(np.int64)
    whole = np.diff(packed.cu_seqlens).astype(np.int64)
    kept = whole if lengths is None else _vector("lengths", lengths, [np.int64], len(whole))
    if len(kept) and not (int(kept.min()) >= 1 and (kept <= whole).all()):
        raise ValueError(
            f"lengths: got {kept.min()} to {kept.max()}, expected 1 to the length of each sequence"
        )
    order, shared = _core.sort_by_prefix(
        packed.tokens_T, starts, kept, np.zeros(len(starts), dtype=np.int64)
    )
    num_distinct = int(kept.sum() - shared.sum())
    stored = align.stored(num_distinct)
    if stored < num_distinct:
        raise ValueError(
            f"fixed_length: got {stored}, but {num_distinct} distinct tokens are needed"
        )
    slots_T = np.zeros(packed.num_tokens, dtype=np.int64)
    parents_D = np.arange(-1, stored - 1)
    previous = slots_T[:0]
    used = 0
    stored_T = np.zeros(packed.num_tokens, dtype=np.bool_)
    for at, common in zip(order.tolist(), shared.tolist(), strict=True):
        start, length = int(starts[at]), int(kept[at])
        stored_T[start : start + length] = True
        row = slots_T[start : start + length]
        row[:common] = previous[:common]
        row[common:] = np.arange(used, used + length - common)
        if common < length:
            parents_D[used] = previous[common - 1] if common else -1
        used += length - common
        previous = row
    if stored > used:
        parents_D[used] = -1

    tokens_D = np.full(stored, pad_id, dtype=np.int64)
    position_ids_D = np.zeros(stored, dtype=np.int64)
    tokens_D[slots_T[stored_T]] = packed.tokens_T[stored_T]
    position_ids_D[slots_T[stored_T]] = packed.position_ids_T[stored_T]

    own = np.arange(stored)
    children = np.bincount(parents_D[parents_D >= 0], minlength=stored)
    begins = (parents_D != own - 1) | (parents_D < 0)
    begins[1:] |= children[:-1] > 1
    segment_starts_N = np.flatnonzero(begins)
    ends_N = np.append(segment_starts_N[1:], stored)
    segment_of_D = np.cumsum(begins) - 1
    before_N = parents_D[segment_starts_N]
    segment_parents_N = np.where(before_N < 0, -1, segment_of_D[before_N])
    subtree_ends_N = ends_N.copy()
    for n in range(len(ends_N) - 1, -1, -1):  # children come after their parent
        parent = segment_parents_N[n]
        if parent >= 0:
            subtree_ends_N[parent] = max(subtree_ends_N[parent], subtree_ends_N[n])
    return PrefixLayout(
        tokens_D=tokens_D,
        position_ids_D=position_ids_D,
        parents_D=parents_D,
        segment_starts_N=segment_starts_N,
        segment_lengths_N=ends_N - segment_starts_N,
        segment_parents_N=segment_parents_N,
        subtree_ends_N=subtree_ends_N,
        slots_T=slots_T,
        num_distinct=used if len(packed.indices_s) else 0,
        num_real=int(whole.sum()) if len(packed.indices_s) else 0,
    )


def match_prefixes(
    rows: Sequence[np.ndarray], others: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """For each row, the one of `others` that begins with the most of its ids, and how many these
    are: int64 [rows] each. Rows hold one id or more; there is one of `others` at least."""
    ids = Ragged.from_rows([*rows, *others], np.int64)
    order, shared = _core.sort_by_prefix(
        ids.values, ids.offsets[:-1], ids.lengths, np.zeros(len(ids), dtype=np.int64)
    )
    best, length = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    # In this order the longest prefix is shared with the next of `others` before or behind.
    common_after = [*shared.tolist()[1:], 0]
    for indices, commons in (
        (order.tolist(), shared.tolist()),
        (order.tolist()[::-1], common_after[::-1]),
    ):
        nearest, common = 0, 0
        for index, step in zip(indices, commons, strict=True):
            common = min(common, step)
            if index >= len(rows):
                nearest, common = index - len(rows), int(ids.lengths[index])
            elif common > length[index]:
                best[index], length[index] = nearest, common
    return best, length


def plan_shared(
    ids: Rows,
    *,
    groups: np.ndarray | Sequence[int],
    capacity: int,
    prompts: Rows | None = None,
    dp_size: int = 1,
    costs: CostModel | None = None,
    alignment: Alignment | None = None,
    microbatch_multiple: int = 1,
) -> Plan:
    """A plan for the prefix-shared layout: trees, by distinct tokens, to micro-batches.

    A tree that is larger than a micro-batch is cut in depth-first order, and each part holds its
    own copy of the trunk; every sequence is still in exactly one micro-batch. In the plan's
    statistics a token is a distinct token of a part.

    Args:
        groups: int64 [S], the tree that each sequence belongs to (its prompt's number).
        The rest as in `plan` and `gather`.
    """
    align = Alignment() if alignment is None else alignment
    everything = gather(ids, np.arange(len(ids), dtype=np.int32), prompts=prompts)
    groups_S = _vector("groups", groups, [np.int64, np.int32], len(ids)).astype(
        np.int64, copy=False
    )
    lengths_S = np.diff(everything.cu_seqlens).astype(np.int64)[: len(ids)]
    limit = _usable(capacity, align)
    _fit(lengths_S, limit, capacity, align, "error")
    order, shared = _core.sort_by_prefix(
        everything.tokens_T,
        everything.cu_seqlens_padded[: len(ids)].astype(np.int64),
        lengths_S,
        groups_S,
    )
    parts: list[list[int]] = []
    new_S = np.zeros(len(ids), dtype=np.int64)
    prefix_S = np.zeros(len(ids), dtype=np.int64)
    part_S = np.zeros(len(ids), dtype=np.int64)
    room, group = 0, None
    for index, common in zip(order.tolist(), shared.tolist(), strict=True):
        length = int(lengths_S[index])
        if groups_S[index] != group or length - common > room:
            parts.append([])
            room, group, common = limit, groups_S[index], 0
        parts[-1].append(index)
        room -= length - common
        new_S[index], prefix_S[index], part_S[index] = length - common, common, len(parts) - 1
    tokens_P = np.bincount(part_S, weights=new_S, minlength=len(parts)).astype(np.int64)
    model = CostModel(a=1.0, b=0.0) if costs is None else costs
    costs_P = np.bincount(part_S, weights=model(new_S, prefix_S), minlength=len(parts))
    of_parts = plan(
        tokens_P,
        capacity=capacity,
        dp_size=dp_size,
        costs=costs_P,
        alignment=align,
        microbatch_multiple=microbatch_multiple,
    )
    indices: list[int] = []
    bounds = [0]
    for first, last in zip(
        of_parts.bounds[:-1].tolist(), of_parts.bounds[1:].tolist(), strict=True
    ):
        indices += sorted(
            i for part in of_parts.indices_S[first:last].tolist() for i in parts[part]
        )
        bounds.append(len(indices))
    return replace(
        of_parts,
        indices_S=np.asarray(indices, dtype=np.int32),
        bounds=np.asarray(bounds, dtype=np.int64),
        lengths_S=lengths_S,
        stats=replace(of_parts.stats, num_sequences=len(ids)),
    )
