"""Bytes by kind on one rank: what the training copy of a role holds, and what its sampling holds.

The counts are those of this package's own layers (Megatron-Core's local spec with packed
attention, Megatron's gradient buffers, its optimizer, the fused log-prob), measured on the CPU by
`tests/planner/test_memory_measured.py`. Letters as in `shapes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_binac.config import ParallelConfig
from megatron_binac.planner.shapes import Shape

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp8_tensorwise": 2, "fp8_blockwise": 2, "mxfp8": 2}
"""Of a weight and of an activation between layers: FP8 casts inside a layer, from bf16 weights."""
PARAM_ALIGN = 64
"""Megatron starts every parameter of a sharded buffer at a multiple of this many elements."""
BUCKET_ALIGN = 128
"""A sharded buffer ends at a common multiple of this and the data-parallel size."""
TILE_BYTES = 4 << 20
"""The fused log-prob makes its logits in tiles of this size (`kernels.token_logprob`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """Bytes of one role on one rank that are there through the whole run."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    """The frozen copy that the KL is measured against."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference


def buffer_elements(tensors: Iterable[int], *, dp: int, distributed: bool) -> int:
    """Elements of Megatron's contiguous buffer for these parameters, alignment included."""
    if not distributed:
        return sum(tensors)
    end = 0
    for size in tensors:
        end = math.ceil(end / PARAM_ALIGN) * PARAM_ALIGN + size
    multiple = math.lcm(BUCKET_ALIGN, dp)
    return math.ceil(end / multiple) * multiple


def static_bytes(
    shape: Shape,
    parallel: ParallelConfig,
    *,
    dp: int,
    stage: int,
    train: bool,
    reference: bool,
    precision: str,
    distributed: bool,
) -> Static:
    """What one rank of pipeline stage `stage` holds between steps.

    Gradients are summed in fp32. Adam keeps two fp32 moments, and in bf16 a fp32 copy of the
    weights; with the distributed optimizer the data-parallel ranks share these out.
    """
    tensors = shape.parameters_by_tensor(
        tp=parallel.tp, pp=parallel.pp, stage=stage, ep=parallel.ep
    )
    width = DTYPE_BYTES[precision]
    own = sum(tensors)
    if not train:
        return Static(weights=own * width, gradients=0, optimizer=0, reference=0)
    buffer = buffer_elements(tensors, dp=dp, distributed=distributed)
    state = buffer * (8 if precision == "fp32" else 12)
    return Static(
        weights=(buffer if distributed else own) * width,
        gradients=buffer * 4,
        optimizer=round(state / dp) if distributed else state,
        reference=own * width if reference else 0,
    )


def bucket_padding(lengths: Sequence[int]) -> float:
    """Slots over tokens where attention lays a row out by powers of two of its lengths.

    The longest sequence of each power of two decides the width of its group.
    """
    groups: dict[int, list[int]] = {}
    for length in lengths:
        groups.setdefault(max(8, 1 << (length - 1).bit_length()), []).append(length)
    slots = sum(max(group) * len(group) for group in groups.values())
    return slots / sum(lengths)


def layer_activations(
    shape: Shape, parallel: ParallelConfig, *, precision: str, padding: float
) -> float:
    """Bytes that one layer keeps for the backward pass, for each token on this rank.

    The two norms keep their input and its scaled copy in fp32, and hand on a third: these widths of
    H are cut over the tensor ranks under sequence parallelism alone. What lies between the two
    halves of a split product is always cut.
    """
    tp, width = parallel.tp, DTYPE_BYTES[precision]
    stream = shape.hidden * (4 * 4 + 2 * width) / (tp if parallel.sequence_parallel else 1)
    rotary = 4 * shape.head_dim * width + 16
    mixed = (2 * shape.query_width + 2 * shape.kv_width) * padding + 2 * shape.query_width
    if shape.num_experts:
        # Each token is copied to its experts and back, and the gated units run there.
        wide = shape.experts_per_token * (5 * shape.expert_ffn + 2 * shape.hidden)
    else:
        wide = 5 * shape.ffn
    return stream + rotary + ((mixed + wide) * width + 4 * shape.heads) / tp


def activation_bytes(
    shape: Shape,
    parallel: ParallelConfig,
    *,
    tokens: int,
    stage: int,
    num_micro_batches: int,
    precision: str,
    padding: float = 1.0,
) -> int:
    """Most bytes that autograd holds on one rank while a batch of micro-batches passes.

    `tokens` of one micro-batch. Under 1F1B stage s holds pp - s micro-batches; with virtual stages
    Megatron's interleaved schedule holds (vpp - 1) pp + 2 (pp - s) - 1 chunks of a rank, at most
    all of them.
    """
    width = DTYPE_BYTES[precision]
    pp, vpp, tp = parallel.pp, parallel.vpp, parallel.tp
    layer = layer_activations(shape, parallel, precision=precision, padding=padding) * tokens
    layers_in_chunk = shape.num_layers // (pp * vpp)
    stream = shape.hidden * tokens / (tp if parallel.sequence_parallel else 1)
    # The final norm's two sides in fp32 and what the log-prob keeps of the hidden states.
    head = stream * (2 * 4 + width) + 44 * tokens if stage == pp - 1 else 0.0
    if vpp > 1:
        in_flight = min((vpp - 1) * pp + 2 * (pp - stage) - 1, vpp * num_micro_batches)
    else:
        in_flight = min(pp - stage, num_micro_batches)
    if parallel.recompute == "full":
        # The head's part is gone before the first layer is made again; its input is kept anyway.
        kept = in_flight * layers_in_chunk * stream * width
        return round(kept + max(layer - stream * width, head))
    return round(in_flight * layers_in_chunk * layer + head + (24 * tokens if stage == 0 else 0))


def kv_bytes(shape: Shape, *, tp: int, pp: int, sequences: int, tokens: int, precision: str) -> int:
    """The KV cache of one rank for `sequences` of `tokens` each."""
    width = DTYPE_BYTES[precision]
    return shape.kv_values_per_token * sequences * tokens * width // (tp * pp)
