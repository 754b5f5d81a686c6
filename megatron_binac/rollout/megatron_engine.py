"""Generation inside Megatron: the learner's own weights and layers, a KV cache, any TP, PP,
virtual PP and DP.

Prompts are read as a tree (each distinct token once), then all sequences take one token a step.
Where answers are to be continued, their keys and values are held until the weights change, and a
later prompt that begins with them is read from where they end. Data-parallel replicas share the
prompts out; every rank ends with the complete list.

Shapes: P distinct prompts, U tokens of them that are read, C longest sequence, B sequences, T
tokens of a pass, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_binac.models import cpu
from megatron_binac.models.attention import PackedParams
from megatron_binac.models.kv_cache import HeldRows, KVCache, PromptTree
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.prefix_batches import PrefixBatches
from megatron_binac.planner import flops
from megatron_binac.planner.flops import Work
from megatron_binac.rollout.sampling import pick
from megatron_binac.seeds import uniforms
from megatron_binac.types import Completion, Sampling


class MegatronEngine:
    """Samples from a `MegatronLearner` in place: no weight is copied, so none can be stale."""

    tells_endings = True

    def __init__(self, learner: MegatronLearner, *, max_sequences: int) -> None:
        self.learner, self.max_sequences = learner, max_sequences
        self.version = 0
        self._held: HeldRows | None = None
        self._held_under: tuple[int, int] | None = None
        self._spared = Work(tokens=0, pairs=0, scored=0)

    def take_spared(self) -> Work:
        """What this rank did not compute since the last take, of distinct prompts read whole."""
        taken, self._spared = self._spared, Work(tokens=0, pairs=0, scored=0)
        return taken

    def publish(self, version: int) -> None:
        self.version = version
        self.forget()

    def close(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop what is held of answers that are to be continued."""
        self._held = None

    def _weights_mark(self) -> tuple[int, int]:
        """Changes with every update and every other write to the weights."""
        writes = sum(p._version for p in self.learner.parameters())
        return self.learner.num_updates, writes

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[np.ndarray],
        seeds: Sequence[int],
        sampling: Sampling,
        ended: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """See `Engine.generate`. Raises ValueError where prompt and answer do not fit the model."""
        if len(prompts) != len(seeds):
            raise ValueError(
                f"got {len(seeds)} seeds for {len(prompts)} prompts, expected one each"
            )
        longest = max((len(p) for p in prompts), default=0)
        room = self.learner.config.model.max_sequence_length
        if longest + sampling.max_tokens > room:
            raise ValueError(
                f"{self.learner.role}: a prompt of {longest} tokens and {sampling.max_tokens} new "
                f"ones do not fit "
                f"max_sequence_length {room}; raise {self.learner.role}.model.max_sequence_length "
                f"or lower "
                "rollout.max_*_tokens"
            )
        groups = self.learner.groups
        groups.activate()
        for chunk in self.learner.chunks:
            chunk.eval()
        first, last = (
            len(prompts) * r // groups.dp_size for r in (groups.dp_rank, groups.dp_rank + 1)
        )
        if self._held_under != self._weights_mark() or sampling.continued:
            self._held, self._held_under = None, self._weights_mark()
        mine: list[tuple[np.ndarray, np.ndarray]] = []
        for start in range(first, last, self.max_sequences):
            stop = min(start + self.max_sequences, last)


            def tell(i: int, ids: np.ndarray, logprobs: np.ndarray, start: int = start) -> None:
                if ended is not None and i % groups.replica_size == groups.replica_rank:
                    ended(start + i, self._completion(ids, logprobs, sampling))

            mine += self._sample(
                prompts[start:stop], np.asarray(seeds[start:stop], np.uint64), sampling, tell
            )
        rows = _share(mine, len(prompts), sampling.max_tokens, groups.collection.dp)
        return [self._completion(ids, logprobs, sampling) for ids, logprobs in rows]

    def _completion(self, ids: np.ndarray, logprobs: np.ndarray, sampling: Sampling) -> Completion:
        stopped = len(ids) > 0 and int(ids[-1]) == sampling.stop_id
        return Completion(
            ids=ids, logprobs=logprobs, finish="stop" if stopped else "length", version=self.version
        )

    def _sample(
        self,
        prompts: Sequence[np.ndarray],
        seeds_B: np.ndarray,
        sampling: Sampling,
        tell: Callable[[int, np.ndarray, np.ndarray], None],
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids, log-probs) of each prompt of this replica, which `tell` gets as they end."""
        device = cpu.device()
        index: dict[bytes, int] = {}
        which = np.asarray([index.setdefault(p.tobytes(), len(index)) for p in prompts])
        distinct = [np.frombuffer(key, prompts[0].dtype) for key in index]
        lengths_P = np.asarray([len(p) for p in distinct])
        tree = PromptTree.of(distinct, self._held, multiple=self._multiple, device=device)
        cache = tree.cache
        whole = flops.causal(lengths_P.tolist(), 0)
        self._spared += Work(
            tokens=whole.tokens - len(tree.ids_U),
            pairs=whole.pairs - tree.batches.num_pairs,
            scored=0,
        )
        hidden = self._forward(tree.ids_U, tree.positions_U, cache, tree.batches)
        logits_BV = self._logits(hidden, tree.last_P)
        if logits_BV is not None:
            logits_BV = logits_BV[torch.as_tensor(which, device=device)]
        # The cache is bounded by one batch; so is what is held.
        held = None
        if sampling.continued and self._held is None:
            held = self._held = HeldRows(cache.layers)
        slots_PC = np.zeros((len(distinct), int(lengths_P.max()) + sampling.max_tokens), np.int64)
        for row, slots in zip(slots_PC, tree.slots, strict=True):
            row[: len(slots)] = slots
        cache.lay_out(torch.as_tensor(slots_PC[self._padded(which, fill=0)], device=device))

        num = len(prompts)
        ids = np.zeros((num, sampling.max_tokens), np.int32)
        logprobs = np.zeros((num, sampling.max_tokens), np.float32)
        taken = np.zeros(num, int)
        live = np.arange(num)  # the prompt of each row that is still decoded
        going = np.ones(num, bool)  # False: the row has stopped and rides along until enough have

        def hold(rows: np.ndarray) -> None:
            """Keep what these rows of the cache have read."""
            if held is not None:
                each = live[rows]
                read = [np.concatenate([prompts[i], ids[i, : taken[i] - 1]]) for i in each]
                held.add(cache, rows, read, [tree.slots[which[i]] for i in each])

        for step in range(sampling.max_tokens):
            token_B, logprob_B = self._choose(logits_BV, seeds_B[live], step, sampling)
            rows = live[going]
            ids[rows, step], logprobs[rows, step] = token_B[going], logprob_B[going]
            taken[rows] = step + 1
            goes_on = (token_B != sampling.stop_id) & (step + 1 < sampling.max_tokens)
            for i in live[going & ~goes_on].tolist():
                tell(i, ids[i, : taken[i]], logprobs[i, : taken[i]])
            going &= token_B != sampling.stop_id
            if step + 1 == sampling.max_tokens or not going.any():
                break
            if going.sum() <= 0.75 * len(live):
                keep = np.flatnonzero(going)
                hold(np.flatnonzero(~going))
                cache.select(torch.as_tensor(self._padded(keep, fill=int(keep[0])), device=device))
                live, token_B, going = live[keep], token_B[keep], going[keep]
            position_B = lengths_P[which[live]] + step
            hidden = self._forward(
                self._padded(token_B, fill=0), self._padded(position_B, fill=0), cache
            )
            logits_BV = self._logits(hidden, np.arange(len(live)))
        hold(np.arange(len(live)))
        return [(ids[i, : taken[i]], logprobs[i, : taken[i]]) for i in range(num)]

    @property
    def _multiple(self) -> int:
        """Rows of a forward pass must divide over the tensor ranks under sequence parallelism."""
        parallel = self.learner.config.parallel
        return parallel.tp if parallel.sequence_parallel else 1

    def _padded(self, values_B: np.ndarray, *, fill: int) -> np.ndarray:
        spare = -len(values_B) % self._multiple
        return (
            np.concatenate([values_B, np.full(spare, fill, values_B.dtype)]) if spare else values_B
        )

    def _forward(
        self,
        ids_T: np.ndarray,
        positions_T: np.ndarray,
        cache: KVCache,
        prefix: PrefixBatches | None = None,
    ) -> Tensor | None:
        """Prompts' tokens, as `prefix` lays them out, or one token a sequence through all stages in
        turn; final hidden states [T, H] on the last stage, None elsewhere."""
        device = cpu.device()
        groups, config = self.learner.groups, self.learner.config
        ids = torch.as_tensor(ids_T, dtype=torch.long, device=device)[None]
        positions = torch.as_tensor(positions_T, dtype=torch.long, device=device)
        packed = PackedParams.of(positions, [], cache=cache, prefix=prefix)
        pp, pp_group = config.parallel.pp, groups.collection.pp
        stage = groups.pp_rank
        before, after = (dist.get_global_rank(pp_group, (stage + d) % pp) for d in (-1, 1))
        tokens_here = len(ids_T) // self._multiple
        hidden: Tensor | None = None
        for number, chunk in enumerate(self.learner.chunks):
            if stage or number:
                if pp > 1:
                    hidden = torch.empty(
                        (tokens_here, 1, config.model.hidden_size),
                        dtype=chunk.config.params_dtype,
                        device=device,
                    )
                    dist.recv(hidden, before, group=pp_group)
                chunk.set_input_tensor(hidden)
            hidden = chunk(ids, positions[None], None, packed_seq_params=packed)
            if pp > 1 and not (groups.is_last_stage and number == len(self.learner.chunks) - 1):
                dist.send(hidden.contiguous(), after, group=pp_group)
        if not groups.is_last_stage:
            return None
        assert hidden is not None
        if config.parallel.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=groups.collection.tp)
        return hidden.squeeze(1)

    def _logits(self, hidden: Tensor | None, rows_B: np.ndarray) -> Tensor | None:
        """float32 logits [B, V] of the real columns at these rows; None away from the last
        stage."""
        if hidden is None:
            return None
        groups = self.learner.groups
        picked = hidden[torch.as_tensor(rows_B, device=hidden.device)]
        part = (picked @ self.learner.chunks[-1].head_weight().T).float()
        if groups.config.tp > 1:
            parts = [torch.empty_like(part) for _ in range(groups.config.tp)]
            dist.all_gather(parts, part.contiguous(), group=groups.collection.tp)
            part = torch.cat(parts, dim=1)
        return part[:, : self.learner.vocab_size]

    def _choose(
        self, logits_BV: Tensor | None, seeds_B: np.ndarray, step: int, sampling: Sampling
    ) -> tuple[np.ndarray, np.ndarray]:
        """Next id and its log-prob per row, the same on all ranks of the replica."""
        if logits_BV is not None:
            token_B, logprob_B = pick(logits_BV, uniforms(seeds_B, step), sampling)
            both = torch.stack([token_B.double(), logprob_B.double()])
        else:
            both = torch.empty(2, len(seeds_B), dtype=torch.double, device=cpu.device())
        groups = self.learner.groups
        if groups.config.pp > 1:
            source = dist.get_global_rank(groups.collection.pp, groups.config.pp - 1)
            dist.broadcast(both, source, group=groups.collection.pp)
        if groups.config.tp > 1:  # rounding may differ between ranks; one of them decides
            dist.broadcast(
                both, dist.get_global_rank(groups.collection.tp, 0), group=groups.collection.tp
            )
        token, logprob = both.cpu().numpy()
        return token.astype(np.int32), logprob.astype(np.float32)


def _share(
    mine: list[tuple[np.ndarray, np.ndarray]], total: int, max_tokens: int, group: dist.ProcessGroup
) -> list[tuple[np.ndarray, np.ndarray]]:
    """All replicas' answers in prompt order, on every rank."""
    size = group.size()
    if size == 1:
        return mine
    counts = [total * (r + 1) // size - total * r // size for r in range(size)]
    # One row: length, ids, log-probs. Doubles hold all three exactly.
    block = np.zeros((max(counts), 1 + 2 * max_tokens))
    own_ids, own_logprobs = block[:, 1 : 1 + max_tokens], block[:, 1 + max_tokens :]
    if mine:
        block[: len(mine), 0] = [len(ids) for ids, _ in mine]
        filled = np.arange(max_tokens) < block[:, :1]
        own_ids[filled] = np.concatenate([ids for ids, _ in mine])
        own_logprobs[filled] = np.concatenate([logprobs for _, logprobs in mine])
    here = torch.as_tensor(block, device=cpu.device())
    blocks = [torch.empty_like(here) for _ in range(size)]
    dist.all_gather(blocks, here, group=group)
    out = []
    for count, part in zip(counts, blocks, strict=True):
        rows = part[:count].cpu().numpy()
        ids = rows[:, 1 : 1 + max_tokens].astype(np.int32)
        logprobs = rows[:, 1 + max_tokens :].astype(np.float32)
        lengths = rows[:, 0].astype(int).tolist()
        out += [(ids[i, :n], logprobs[i, :n]) for i, n in enumerate(lengths)]
    return out
