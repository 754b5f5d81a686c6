"""One role that learns: log-probs, updates, snapshots and saved state behind one object.

Every rank of the job holds the same list of sequences and calls the same methods in the same
order. The packing plan is a pure function of that list, so that all ranks of a replica agree on it
without talking.

Shapes: T tokens of a packed row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_binac import packing
from megatron_binac.algo.losses import finalize_stats, merge_stats
from megatron_binac.config import LossConfig, RoleConfig
from megatron_binac.models import contract, cpu
from megatron_binac.models.builder import build_model, build_optimizer, wrap
from megatron_binac.models.forward import MicroBatch, Scorer, pack, run_schedule, trees_of
from megatron_binac.models.objective import Rows, by_sequence, compute, denominator, names
from megatron_binac.models.parallel import Groups
from megatron_binac.models.precision import choose_layers, say_once, token_multiple
from megatron_binac.models.prefix_attention import require_prefix_sharing
from megatron_binac.planner import flops
from megatron_binac.planner.flops import Work
from megatron_binac.planner.shapes import Shape
from megatron_binac.terms import CrossEntropy, Distill, Term
from megatron_binac.types import TrainSequence


def work_of(rows: Sequence[TrainSequence]) -> Work:
    """What a pass over these rows needs: neither layout nor padding, recomputation or shared
    prefixes change it."""
    return flops.causal((len(row.ids) for row in rows), sum(row.num_targets for row in rows))


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
        self.shape = Shape.of(config.model, vocab_size)
        self._flops = 0
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
            tensor=config.parallel.tp,
            sequence_parallel=config.parallel.sequence_parallel,
            token_multiple=token_multiple(config),
        )
        layers, _ = choose_layers(config)
        self.shares_prefixes = config.shares_prefixes(local_layers=layers == "local")
        if config.share_prefixes is None:
            say_once(f"{role}: share_prefixes is {'on' if self.shares_prefixes else 'off'} here")
        if self.shares_prefixes:
            require_prefix_sharing(attention="local" if layers == "local" else "transformer_engine")
        if config.train:
            self.model = wrap(config, groups, self.chunks)
            self.optimizer, self.scheduler = build_optimizer(config, groups, self.model, num_steps)

    def parameters(self) -> list[Tensor]:
        """This rank's weights, in a fixed order."""
        return [p for chunk in self.chunks for p in chunk.parameters()]

    def take_flops(self) -> int:
        """Model FLOPs of what was scored and learned on all ranks since the last take."""
        taken, self._flops = self._flops, 0
        return taken

    def _count(self, work: Work, *, training: bool = False) -> None:
        """One pass over rows of the global batch."""
        once = flops.training_flops if training else flops.forward_flops
        self._flops += once(self.shape, work)

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
        share = self.shares_prefixes
        plan = self._plan(sequences, share=share)
        length = self._row_length([plan])
        return pack(sequences, plan, self.groups.dp_rank, length=length, share=share)

    def _plan(self, sequences: Sequence[TrainSequence], *, share: bool) -> packing.Plan:
        parallel = self.config.parallel
        if share:
            return packing.plan_shared(
                packing.Ragged.from_rows([s.ids for s in sequences], np.int32),
                groups=trees_of(sequences),
                capacity=self.config.max_tokens_per_micro_batch,
                dp_size=self.groups.dp_size,
                costs=self._costs,
                alignment=self._alignment,
            )
        return packing.plan(
            np.asarray([len(s.ids) for s in sequences], np.int64),
            capacity=self.config.max_tokens_per_micro_batch,
            dp_size=self.groups.dp_size,
            costs=self._costs,
            alignment=self._alignment,
            microbatch_multiple=parallel.pp if parallel.vpp > 1 else 1,
        )

    def _row_length(self, plans: Sequence[packing.Plan]) -> int | None:
        """A pipeline exchanges rows of one length; None where rows may differ."""
        if self.config.parallel.pp == 1:
            return None
        return max(int(plan.stored.max()) for plan in plans)

    def _score(
        self,
        batches: list[MicroBatch],
        weights: list[Tensor] | None = None,
        read: Callable[[Tensor, MicroBatch], Tensor] | None = None,
    ) -> list[Tensor]:
        """Log-prob [T] of each row (or what `read` makes of its hidden states) under the live or
        the given weights; on the last stage only."""
        if weights is not None:
            self._swap(weights)
        self._train_mode(False)
        try:
            return run_schedule(
                self.groups,
                self.model,
                batches,
                None,
                read or (lambda hidden, batch: self.scorer(hidden, batch, with_entropy=False)[0]),
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
        self._count(work_of(sequences))
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
        """One batch of policy-gradient steps on one term; see `learn`."""
        return self.learn([Term(rows=sequences, loss=loss)])

    def supervise(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """One step of cross entropy on the masked tokens (token mean over the global batch)."""
        return self.learn([Term(rows=sequences, loss=CrossEntropy())])

    def learn(self, terms: Sequence[Term]) -> dict[str, float]:
        """One batch of steps on the sum of the terms; what is logged, the same on every rank.

        Each term's loss is a sum over the global batch divided by the term's own denominator, so
        that neither micro-batches nor ranks change it. Raises FloatingPointError, before any weight
        moves, where the loss or the gradient norm is not finite.
        """
        self._require_trainable()
        live = [term for term in terms if term.num_targets and term.coef]
        if not live:
            return {"num_tokens": 0.0}
        steps = max(_num_updates(term) for term in live)
        rows = self._rows(live, keep_old=steps > 1)
        for _ in range(steps):
            values = contract.summarize(self._step(rows))
            for row in rows:
                self._count(row.work, training=True)
        if dist.get_rank() == 0:
            contract.alarm(self.role, values, self.config.mismatch_alarm)
        return values

    def _rows(self, terms: Sequence[Term], *, keep_old: bool) -> list[Rows]:
        """Every term packed, with the log-probs that are fixed before the first step."""
        # A teacher's row is longer than its student's and lies in the same place of the plan.
        # Sharing would have to be the same for both, so that it is left out there.
        shares = [self.shares_prefixes and term.teacher is None for term in terms]
        plans = [
            self._plan(term.teacher or term.rows, share=share)
            for term, share in zip(terms, shares, strict=True)
        ]
        length = self._row_length(plans)
        out = []
        for term, plan, share in zip(terms, plans, shares, strict=True):
            loss = term.loss
            batches = pack(
                term.rows,
                plan,
                self.groups.dp_rank,
                length=length,
                by_sequence=by_sequence(loss),
                share=share,
            )
            rows = Rows(
                term=term,
                batches=batches,
                denominator=denominator(term),
                work=work_of(term.rows),
            )
            if isinstance(loss, LossConfig) and loss.kl_coef > 0:
                if self._reference is None:
                    raise ValueError(
                        f"{self.role} holds no reference but loss.kl_coef is {loss.kl_coef}"
                    )
                rows.reference = self._score(batches, self._reference)
                self._count(rows.work)
            if isinstance(loss, LossConfig) and keep_old:
                rows.old = self._score(batches)
                self._count(rows.work)
            if term.teacher is not None:
                twins = pack(term.teacher, plan, self.groups.dp_rank, length=length)
                assert isinstance(loss, Distill)
                rows.teacher = self._teach(twins, loss.trust_region)
                read = work_of(term.teacher)
                for _ in range(1 if loss.trust_region == 0.0 else 2):
                    self._count(read)
            out.append(rows)
        return out

    def _teach(self, twins: list[MicroBatch], trust_region: float) -> list[Tensor]:
        """Logits [N, V] of the targets after a longer context, on the last stage; mixed with the
        reference's, which is a product of powers once they are normalised (arXiv 2601.20802)."""
        live = self._score(twins, read=self.scorer.target_logits)
        if trust_region == 0.0:
            return live
        if self._reference is None:
            raise ValueError(f"{self.role} holds no reference but trust_region is {trust_region}")
        anchor = self._score(twins, self._reference, self.scorer.target_logits)
        return [
            (1.0 - trust_region) * one + trust_region * other
            for one, other in zip(live, anchor, strict=True)
        ]

    def target_states(
        self, sequences: Sequence[TrainSequence]
    ) -> tuple[list[MicroBatch], list[Tensor]]:
        """This rank's rows, and the hidden states [N, H] that predict the masked tokens of each; of
        ranks that do not report, no states."""
        batches = self.plan(sequences)
        states = self._score(batches, read=self.scorer.target_states)
        self._count(replace(work_of(sequences), scored=0))
        return batches, states if self.groups.reports else []

    def _require_trainable(self) -> None:
        if self.optimizer is None:
            raise ValueError(f"{self.role} is frozen (train is False) and cannot be updated")

    def _train_mode(self, on: bool) -> None:
        for chunk in self.model:
            chunk.train(on)

    def _step(self, rows: Sequence[Rows]) -> dict[str, float]:
        """Gradient of the terms' sum, checked, clipped, applied."""
        self.groups.activate()
        self._train_mode(True)
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [batch for part in rows for batch in part.batches]
        place = [(part, at) for part in rows for at in range(len(part.batches))]

        def loss_function(
            hidden: Tensor, batch: MicroBatch, number: int
        ) -> tuple[Tensor, dict[str, Tensor]]:
            part, at = place[number]
            loss_sum, stats = compute(self.scorer, part, hidden, at)
            loss = part.term.coef * loss_sum / part.denominator
            return loss, {**stats, "loss_sum": loss_sum.detach()}

        found = run_schedule(self.groups, self.model, batches, loss_function)
        values = self._reduce(rows, found)
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

    def _reduce(self, rows: Sequence[Rows], found: list[dict[str, Tensor]]) -> dict[str, float]:
        """Statistics of every term over micro-batches and ranks (names on _max by max), and the
        loss of all terms together; the same on every rank."""
        zero = torch.zeros((), device=cpu.device())
        sums: dict[tuple[int, str], Tensor] = {}
        start = 0
        for i, part in enumerate(rows):
            stop = start + len(part.batches)
            here = found[start:stop] if self.groups.reports else []
            merged = merge_stats(*here) if here else {}
            for name in [*names(part.term.loss, cpu.device()), "loss_sum"]:
                sums[i, name] = merged.get(name, zero).double()
            start = stop
        added = [key for key in sums if not key[1].endswith("_max")]
        top = [key for key in sums if key[1].endswith("_max")]
        total = torch.stack([sums[key] for key in added])
        highest = torch.stack([sums[key] for key in top] or [zero.double()])
        dist.all_reduce(total)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        sums |= dict(zip(added, total, strict=True)) | dict(zip(top, highest, strict=False))
        out: dict[str, float] = {}
        loss = 0.0
        for i, part in enumerate(rows):
            own = {name: value for (j, name), value in sums.items() if j == i}
            values = finalize_stats(own)
            values["loss"] = float(own["loss_sum"]) / part.denominator
            loss += part.term.coef * values["loss"]
            prefix = f"{part.term.name}/" if part.term.name else ""
            out |= {prefix + name: value for name, value in values.items()}
        return out | {"loss": loss}


def _num_updates(term: Term) -> int:
    return term.loss.updates_per_batch if isinstance(term.loss, LossConfig) else 1
