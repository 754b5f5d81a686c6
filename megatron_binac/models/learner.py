"""One role that learns: log-probs, updates, snapshots and saved state behind one object.

Every rank of the job holds the same list of sequences and calls the same methods in the same
order. The packing plan is a pure function of that list, so that all ranks of a replica agree on it
without talking.

Shapes: T tokens of a packed row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_binac import packing
from megatron_binac.algo.losses import (
    PolicyLossConfig,
    finalize_stats,
    merge_stats,
    nll_loss,
)
from megatron_binac.config import LossConfig, RoleConfig
from megatron_binac.kernels import policy_loss
from megatron_binac.models import cpu
from megatron_binac.models.builder import build_model, build_optimizer, wrap
from megatron_binac.models.forward import MicroBatch, Scorer, pack, run_schedule
from megatron_binac.models.parallel import Groups
from megatron_binac.types import TrainSequence


class MegatronLearner:
    """A policy on Megatron-Core; without an optimizer where the role is frozen."""

    def __init__(
        self,
        role: str,
        config: RoleConfig,
        groups: Groups,
        *,
        vocab_size: int,
        seed: int,
        num_steps: int,
        temperature: float,
    ) -> None:
        self.role, self.config, self.groups = role, config, groups
        self.vocab_size, self.num_steps = vocab_size, num_steps
        self.chunks = build_model(config, groups, vocab_size, seed)
        self.scorer = Scorer(
            model=self.chunks[-1], groups=groups, vocab_size=vocab_size, temperature=temperature
        )
        self.model: list[Any] = list(self.chunks)
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.num_updates = 0
        self._reference: list[Tensor] | None = None
        self._costs = packing.CostModel.from_shape(
            num_layers=config.model.num_layers,
            hidden=config.model.hidden_size,
            ffn=config.model.ffn_hidden_size,
            heads=config.model.num_attention_heads,
            kv_heads=config.model.num_query_groups,
            vocab=vocab_size,
        )
        self._alignment = packing.Alignment.for_layout(
            tensor=config.parallel.tp, sequence_parallel=config.parallel.sequence_parallel
        )
        if config.train:
            self.model = wrap(config, groups, self.chunks)
            self.optimizer, self.scheduler = build_optimizer(config, groups, self.model, num_steps)

    def parameters(self) -> list[Tensor]:
        """This rank's weights, in a fixed order."""
        return [p for chunk in self.chunks for p in chunk.parameters()]

    # ---- the reference policy and snapshots ----------------------------------------------------

    def snapshot(self) -> list[Tensor]:
        """A copy of this rank's weights."""
        return [p.detach().clone() for p in self.parameters()]

    def hold_reference(self) -> None:
        """The weights as they stand become the frozen reference that the KL is measured against."""
        self._reference = self.snapshot()

    def _swap(self, weights: list[Tensor]) -> None:
        """Exchange the live weights with `weights`, in place on both sides."""
        with torch.no_grad():
            for p, other in zip(self.parameters(), weights, strict=True):
                keep = p.detach().clone()
                p.copy_(other)
                other.copy_(keep)

    # ---- scoring and learning ------------------------------------------------------------------

    def plan(self, sequences: Sequence[TrainSequence]) -> list[MicroBatch]:
        """This rank's packed rows of the global batch; the same number of rows on every rank."""
        parallel = self.config.parallel
        plan = packing.plan(
            np.asarray([len(s.ids) for s in sequences], np.int64),
            capacity=self.config.max_tokens_per_micro_batch,
            dp_size=self.groups.dp_size,
            costs=self._costs,
            alignment=self._alignment,
            microbatch_multiple=parallel.pp if parallel.vpp > 1 else 1,
        )
        # A pipeline exchanges rows of one length.
        return pack(sequences, plan, self.groups.dp_rank, equal_length=parallel.pp > 1)

    def _score(
        self, batches: list[MicroBatch], weights: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Log-prob [T] of each row under the live or the given weights; on the last stage only."""
        if weights is not None:
            self._swap(weights)
        self._train_mode(False)
        try:
            return run_schedule(
                self.groups,
                self.model,
                batches,
                None,
                lambda hidden, batch: self.scorer(hidden, batch, with_entropy=False)[0],
            )
        finally:
            if weights is not None:
                self._swap(weights)

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, reference: bool = False
    ) -> list[np.ndarray]:
        """float32 [L] per sequence: log-prob of every masked token, 0 elsewhere; complete on every
        rank."""
        if reference and self._reference is None:
            raise ValueError(f"{self.role} holds no reference; call hold_reference first")
        batches = self.plan(sequences)
        rows = self._score(batches, self._reference if reference else None)
        out = [np.zeros(len(s.ids), np.float32) for s in sequences]
        mine: list[tuple[int, np.ndarray]] = []
        if self.groups.reports:
            for batch, row in zip(batches, rows, strict=True):
                values = row.float().cpu().numpy()
                for at, start in zip(batch.indices, batch.bounds, strict=False):
                    mine.append((int(at), values[start : start + len(out[at])]))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        for part in gathered:
            for at, values in part:
                out[at] = values
        return out

    def update(self, sequences: Sequence[TrainSequence], loss: LossConfig) -> dict[str, float]:
        """One batch of policy-gradient steps; returns what is logged, the same on every rank.

        The loss is a token mean over the global batch. Raises FloatingPointError, before any weight
        moves, where the loss or the gradient norm is not finite.
        """
        self._require_trainable()
        num_tokens = sum(s.num_targets for s in sequences)
        if num_tokens == 0:
            return {"num_tokens": 0.0}
        policy = PolicyLossConfig(
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            dual_clip=loss.dual_clip,
            kl_coef=loss.kl_coef,
            engine_is_cap=loss.engine_is_cap,
            entropy_coef=loss.entropy_coef,
        )
        batches = self.plan(sequences)
        if loss.kl_coef > 0 and self._reference is None:
            raise ValueError(f"{self.role} holds no reference but loss.kl_coef is {loss.kl_coef}")
        reference = self._score(batches, self._reference) if loss.kl_coef > 0 else None
        # With one step a batch the log-probs of the same forward pass are the old ones: ratio 1
        # exactly.
        old = self._score(batches) if loss.updates_per_batch > 1 else None

        def policy_term(
            hidden: Tensor, batch: MicroBatch, number: int
        ) -> tuple[Tensor, dict[str, Tensor]]:
            logprob_T, entropy_T = self.scorer(hidden, batch, with_entropy=True)
            return policy_loss(
                logprob_T,
                logprob_T.detach() if old is None else old[number],
                batch.advantage_T,
                batch.mask_T,
                policy,
                ref_logprob_T=None if reference is None else reference[number],
                engine_logprob_T=batch.engine_logprob_T,
                entropy_T=entropy_T,
            )

        for _ in range(loss.updates_per_batch):
            values = self._step(batches, policy_term, num_tokens, _policy_names(policy))
        return values

    def supervise(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """One step of cross entropy on the masked tokens (token mean over the global batch)."""
        self._require_trainable()

        def nll_term(
            hidden: Tensor, batch: MicroBatch, number: int
        ) -> tuple[Tensor, dict[str, Tensor]]:
            logprob_T, _ = self.scorer(hidden, batch, with_entropy=False)
            return nll_loss(logprob_T, batch.mask_T)

        num_tokens = sum(s.num_targets for s in sequences)
        empty = torch.zeros(0, device=cpu.device())
        names = sorted(nll_loss(empty, empty.bool())[1])
        return self._step(self.plan(sequences), nll_term, num_tokens, names)

    def _require_trainable(self) -> None:
        if self.optimizer is None:
            raise ValueError(f"{self.role} is frozen (train is False) and cannot be updated")

    def _train_mode(self, on: bool) -> None:
        for chunk in self.model:
            chunk.train(on)

    def _step(
        self,
        batches: list[MicroBatch],
        term: Callable[[Tensor, MicroBatch, int], tuple[Tensor, dict[str, Tensor]]],
        num_tokens: int,
        names: list[str],
    ) -> dict[str, float]:
        """Gradient of the summed terms over `num_tokens`, checked, clipped, applied."""
        self.groups.activate()
        self._train_mode(True)
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss_function(
            hidden: Tensor, batch: MicroBatch, number: int
        ) -> tuple[Tensor, dict[str, Tensor]]:
            loss_sum, stats = term(hidden, batch, number)
            return loss_sum / num_tokens, {**stats, "loss_sum": loss_sum.detach()}

        parts = run_schedule(self.groups, self.model, batches, loss_function)
        values = finalize_stats(self._reduce(parts, [*names, "loss_sum"]))
        with cpu.region():
            self.optimizer.prepare_grads()
            grad_norm = float(self.optimizer.get_grad_norm())
            if not (math.isfinite(values["loss"]) and math.isfinite(grad_norm)):
                raise FloatingPointError(
                    f"{self.role} update {self.num_updates + 1}: loss {values['loss']}, gradient "
                    f"norm {grad_norm}, "
                    "expected finite numbers; no weight was moved. Lower the learning rate or "
                    "look at the last "
                    "transcripts"
                )
            self.scheduler.step(
                1
            )  # before the optimizer: the first step already has a learning rate
            self.optimizer.step()
        self.num_updates += 1
        return {**values, "grad_norm": grad_norm, "lr": float(self.optimizer.param_groups[0]["lr"])}

    def _reduce(self, parts: list[dict[str, Tensor]], names: list[str]) -> dict[str, Tensor]:
        """Add up statistics over micro-batches and ranks; names on _max by max. The same on every
        rank."""
        device = cpu.device()
        merged = merge_stats(*parts) if parts and self.groups.reports else {}
        zero = torch.zeros((), device=device)
        sums = torch.stack([merged.get(n, zero).double() for n in names if not n.endswith("_max")])
        tops = torch.stack(
            [merged.get(n, zero).double() for n in names if n.endswith("_max")] or [zero.double()]
        )
        dist.all_reduce(sums)
        dist.all_reduce(tops, op=dist.ReduceOp.MAX)
        sum_names = [n for n in names if not n.endswith("_max")]
        top_names = [n for n in names if n.endswith("_max")]
        return {
            **dict(zip(sum_names, sums, strict=True)),
            **dict(zip(top_names, tops, strict=False)),
        }


def _policy_names(policy: PolicyLossConfig) -> list[str]:
    """Names of the statistics, for ranks that compute none: what the loss says of an empty row."""
    empty = torch.zeros(0, device=cpu.device())
    needs_reference = policy.kl_coef > 0
    _, stats = policy_loss(
        empty,
        empty,
        empty,
        empty.bool(),
        policy,
        ref_logprob_T=empty if needs_reference else None,
        engine_logprob_T=empty,
        entropy_T=empty,
    )
    return sorted(stats)
