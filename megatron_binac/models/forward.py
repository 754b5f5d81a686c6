"""Packed forward and backward of one role through Megatron-Core's pipeline schedules.

A micro-batch is one row of T tokens, several sequences end to end. `logprob_T[i]` scores
`ids_T[i]`: the hidden state before a token predicts it, and the first token of a sequence is never
scored.

Shapes: T tokens of a row, N masked ones, D distinct ones, H hidden, V vocabulary shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_binac import packing
from megatron_binac.kernels import token_logprob
from megatron_binac.models import cpu
from megatron_binac.models.attention import PackedParams
from megatron_binac.models.builder import PolicyModel
from megatron_binac.models.parallel import Groups
from megatron_binac.models.prefix_batches import SharedRow
from megatron_binac.types import TrainSequence

PAD_ID = 0
"""Fills a row up to the length that the layout needs; masked everywhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One packed row on this rank, in row order."""

    ids_T: Tensor
    positions_T: Tensor
    bounds: list[int]
    mask_T: Tensor
    """bool: tokens that are learned from or scored."""
    advantage_T: Tensor
    engine_logprob_T: Tensor
    """nan where no engine sampled the token."""
    weight_T: Tensor | None
    """Factor of each token's loss; None where all are 1."""
    indices: np.ndarray
    """Which of the global batch's sequences these are, in row order."""
    shared: SharedRow | None = None
    """Every distinct token once, where the model computes the row so; all else is as without."""

    def spread(self, values_N: Tensor) -> Tensor:
        """Values of the masked tokens in their places [T], 0 elsewhere."""
        zeros_T = values_N.new_zeros(len(self.mask_T))
        return zeros_T.masked_scatter(self.mask_T, values_N)

    def cu_seqlens(self) -> Tensor:
        """int32 [S+1]: borders of the sequences, the padding's one-token ones included."""
        return torch.tensor(self.bounds, dtype=torch.int32, device=self.ids_T.device)


def pack(
    sequences: Sequence[TrainSequence],
    plan: packing.Plan,
    rank: int,
    *,
    length: int | None = None,
    by_sequence: bool = False,
    share: bool = False,
) -> list[MicroBatch]:
    """The rows of one data-parallel rank; with `share` each distinct token is computed once.

    `length` pads every row to so many tokens, which a pipeline needs; `by_sequence` divides each
    token's weight by the number of targets of its sequence.
    """
    alignment = plan.alignment if length is None else replace(plan.alignment, fixed_length=length)
    ids = packing.Ragged.from_rows([s.ids for s in sequences], np.int32)
    mask = packing.Ragged.from_rows([s.mask for s in sequences], np.bool_)
    engine = packing.Ragged.from_rows([_engine_logprobs(s) for s in sequences], np.float32)
    fields: dict[str, packing.Ragged | np.ndarray] = {
        "engine": engine,
        "advantage": _advantages(sequences),
    }
    weight_S = [s.weight / (max(s.num_targets, 1) if by_sequence else 1) for s in sequences]
    if any(w != 1.0 for w in weight_S):
        fields["weight"] = np.asarray(weight_S, np.float32)
    return [
        _micro_batch(
            packing.gather(
                ids,
                indices,
                loss_mask=mask,
                fields=fields,
                alignment=alignment,
                pad_id=PAD_ID,
            ),
            share,
        )
        for indices in plan.microbatches(rank)
    ]


def trees_of(sequences: Sequence[TrainSequence]) -> np.ndarray:
    """int64 [S]: which sequences grow from one prompt, found in the ids.

    A sequence belongs to the tree whose root, the shortest context (ids before the first target),
    its own context begins with. Only what shares a prefix is worth laying side by side; a wrong
    guess costs speed, not correctness.
    """
    contexts = [s.ids[: int(s.mask.argmax())].astype(">i4").tobytes() for s in sequences]
    tree_of: dict[bytes, int] = {}
    root, tree = b"", -1
    for context in sorted(set(contexts)):
        if tree < 0 or not context.startswith(root):
            root, tree = context, tree + 1
        tree_of[context] = tree
    return np.asarray([tree_of[context] for context in contexts], np.int64)


def _engine_logprobs(sequence: TrainSequence) -> np.ndarray:
    if sequence.logprobs is None:
        return np.full(len(sequence.ids), np.nan, np.float32)
    return sequence.logprobs


def _advantages(sequences: Sequence[TrainSequence]) -> packing.Ragged | np.ndarray:
    """One number a sequence, or one a token where any sequence has it so."""
    if not any(isinstance(s.advantage, np.ndarray) for s in sequences):
        return np.asarray([s.advantage for s in sequences], np.float32)
    rows = [np.broadcast_to(np.asarray(s.advantage, np.float32), s.ids.shape) for s in sequences]
    return packing.Ragged.from_rows(rows, np.float32)


def _micro_batch(packed: packing.Packed, share: bool) -> MicroBatch:
    total = packed.num_tokens
    real = int(packed.cu_seqlens[-1]) if len(packed.indices_s) else 0
    # Padding is cut into one-token sequences: it costs no attention.
    bounds = [*packed.cu_seqlens.tolist()[: len(packed.indices_s)], *range(real, total + 1)]
    put = partial(torch.as_tensor, device=cpu.device())
    return MicroBatch(
        ids_T=put(packed.tokens_T),
        positions_T=put(packed.position_ids_T),
        bounds=bounds,
        mask_T=put(packed.loss_mask_T),
        advantage_T=put(packed.fields["advantage"]),
        engine_logprob_T=put(packed.fields["engine"]),
        weight_T=put(packed.fields["weight"]) if "weight" in packed.fields else None,
        indices=packed.indices_s,
        shared=SharedRow.of(packed, cpu.device()) if share else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """Takes log-probs (and the entropy) from the last stage's hidden states."""

    model: PolicyModel
    groups: Groups
    vocab_size: int
    temperature: float

    def __call__(
        self, hidden: Tensor, batch: MicroBatch, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [T, 1, H] ([T/tp, 1, H] under sequence parallelism, [D, 1, H] of a row that shares
        prefixes) -> log-prob [T], entropy [T] or None.

        Both are in row order (`[i]` belongs to `ids_T[i]`) and 0 where the mask is False.
        """
        weight = self.model.head_weight()
        score = partial(
            token_logprob,
            temperature=self.temperature,
            num_real_columns=self.vocab_size,
            tp_group=self.groups.collection.tp,
            with_entropy=with_entropy,
            # Megatron's float32 buffer: a gradient in the weight's own dtype would be rounded once
            # a micro-batch. A policy without an optimizer has none.
            accumulate_into_main_grad=hasattr(weight, "main_grad"),
        )
        if batch.shared is not None:
            states_NH = hidden.squeeze(1).index_select(0, batch.shared.predict_N)
            logprob_N, entropy_N = score(states_NH, weight, batch.ids_T[batch.mask_T])
            return batch.spread(logprob_N), None if entropy_N is None else batch.spread(entropy_N)
        logprob_T, entropy_T = score(
            hidden.squeeze(1),
            weight,
            batch.ids_T.roll(-1),
            # The first token of a row is never masked in, so none wraps around.
            mask_T=batch.mask_T.roll(-1),
            sequence_parallel=self.groups.config.sequence_parallel,
        )
        return logprob_T.roll(1), None if entropy_T is None else entropy_T.roll(1)

    def target_states(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        """Hidden states [N, H] that predict the masked tokens of the row, in order; whole under
        SP."""
        if self.groups.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, group=self.groups.collection.tp
            )
        elif self.groups.config.tp > 1:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(
                hidden, group=self.groups.collection.tp
            )
        if batch.shared is not None:
            return hidden.squeeze(1).index_select(0, batch.shared.predict_N)
        return hidden.squeeze(1)[batch.mask_T.roll(-1)]

    def target_logits(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        """Logits [N, V] of this rank's columns for the masked tokens of the row, in order."""
        return _HeadLogits.apply(self.target_states(hidden, batch), self.model.head_weight())


class _HeadLogits(torch.autograd.Function):
    """states [N, H], head [V, H] -> logits [N, V]; the head's gradient goes to `main_grad` where
    there is one, since Megatron skips a gradient of a weight that was added there before."""

    @staticmethod
    def forward(ctx: Any, states_NH: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(states_NH, weight_VH)
        ctx.main_grad = getattr(weight_VH, "main_grad", None)
        return (states_NH @ weight_VH.t()).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor, Tensor]:
        states_NH, weight_VH = ctx.saved_tensors
        grad_states_NH = grad_NV.to(weight_VH.dtype) @ weight_VH
        if ctx.main_grad is None:
            return grad_states_NH, (grad_NV.t() @ states_NH.float()).to(weight_VH.dtype)
        ctx.main_grad.addmm_(grad_NV.t(), states_NH.float())
        weight_VH.grad_added_to_main_grad = True
        return grad_states_NH, torch.zeros_like(weight_VH)


LossFunction = Callable[[Tensor, MicroBatch, int], tuple[Tensor, dict[str, Tensor]]]
"""(hidden, micro-batch, its number) -> (loss, statistics), on the last stage."""


def run_schedule(
    groups: Groups,
    model: list[Any],
    batches: list[MicroBatch],
    loss_function: LossFunction | None,
    score_function: Callable[[Tensor, MicroBatch], Tensor] | None = None,
) -> list[Any]:
    """Drive all micro-batches of this rank through the pipeline: collective over the role's ranks.

    With `loss_function`: forward and backward, gradients reduced; returns the statistics of each
    micro-batch. With `score_function`: forward only; returns its result for each micro-batch. Both
    lists are empty on ranks that are not on the last stage. Every rank needs the same number of
    rows, of equal length under PP.
    """
    groups.activate()
    pp, vpp = groups.config.pp, groups.config.vpp
    config = _config(model[0])
    numbered = list(enumerate(batches))

    def forward_step(
        iterator: Iterator[tuple[int, MicroBatch]], chunk: Any, *_: Any
    ) -> tuple[Tensor, Any]:
        number, batch = next(iterator)
        shared = batch.shared
        if shared is None:
            ids, positions = batch.ids_T, batch.positions_T
            num_real = batch.bounds[len(batch.indices)]
            packed = PackedParams.of(positions, batch.bounds, num_real=num_real)
        else:
            ids, positions = shared.ids_D, shared.positions_D
            packed = PackedParams.of(positions, [], prefix=shared.batches)
        with cpu.outside_region():
            hidden = chunk(ids[None], positions[None], None, packed_seq_params=packed)

        def finish(output: Tensor, non_loss_data: bool = False) -> Any:
            with cpu.outside_region():
                if non_loss_data:
                    assert score_function is not None
                    return score_function(output, batch)
                assert loss_function is not None
                loss, stats = loss_function(output, batch, number)
                return loss, batch.mask_T.sum().to(torch.int), stats

        return hidden, finish

    extra: dict[str, Any] = {"pg_collection": groups.collection}
    if pp > 1:
        extra["p2p_communicator"] = P2PCommunicator(pp_group=groups.collection.pp, config=config)
    schedule = get_forward_backward_func(pp_size=pp, vp_size=vpp if vpp > 1 else None)
    forward_only = loss_function is None
    with torch.no_grad() if forward_only else torch.enable_grad(), cpu.region():
        return schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(numbered) for _ in range(vpp)] if vpp > 1 else iter(numbered),
            model=model,
            num_microbatches=len(batches),
            seq_length=len(batches[0].ids_T),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            **extra,
        )


def _config(model: Any) -> Any:
    while not hasattr(model, "config"):
        model = model.module
    return model.config
