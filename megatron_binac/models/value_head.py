"""A scalar head on a policy's hidden states: a baseline and a predictor, not the critic.

The trunk gets no gradient from it, so that reading and fitting it is a forward pass and a few small
sums, and a copy that learns further costs nothing. Every rank holds the same head; gradients are
added up over all ranks, so that no layout changes it beyond rounding.

Shapes: N masked tokens of this rank, H hidden, L tokens of a sequence.
Sources: MLMT-RL, OpenReview u1RjV99DPu; Text2Grad, arXiv 2505.22338.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_binac.algo.values import bce_value_loss, clipped_value_loss
from megatron_binac.method_config import ValueHeadConfig
from megatron_binac.models import cpu
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.types import TrainSequence


class ValueHead:
    """Linear in the state that predicts a token; starts at 0, so that no seed is needed."""

    def __init__(self, learner: MegatronLearner, config: ValueHeadConfig) -> None:
        self.learner, self.config = learner, config
        hidden = learner.config.model.hidden_size
        self.weight = torch.zeros(hidden + 1, device=cpu.device(), requires_grad=True)
        """float32 [H + 1]: the last one is the bias."""
        self.optimizer = torch.optim.Adam([self.weight], lr=config.lr)

    def read(self, rows: Sequence[TrainSequence], *, bounded: bool) -> list[np.ndarray]:
        """float32 [L] per row: the value at every masked token, 0 elsewhere; the same on every
        rank. `bounded` puts it through a sigmoid."""
        return self._spread(rows, *self._states(rows), bounded=bounded)

    def fit(
        self, rows: Sequence[TrainSequence], targets: Sequence[np.ndarray], *, bounded: bool
    ) -> dict[str, float]:
        """`config.steps` Adam steps on the mean error (cross entropy where bounded, half the
        square else) against float32 targets [L] at the masked tokens; the first step's figures."""
        if not rows:
            return {}
        _, states, target_N = self._data(rows, targets)
        logs = [
            self._step(states, target_N, rows, bounded=bounded) for _ in range(self.config.steps)
        ]
        return logs[0]

    def ahead(
        self, rows: Sequence[TrainSequence], targets: Sequence[np.ndarray], *, bounded: bool
    ) -> list[np.ndarray]:
        """What a copy of the head reads after `config.ahead_steps` further steps on these rows."""
        if not rows:
            return []
        batches, states, target_N = self._data(rows, targets)
        kept = (self.weight.detach().clone(), copy.deepcopy(self.optimizer.state_dict()))
        for _ in range(self.config.ahead_steps):
            self._step(states, target_N, rows, bounded=bounded)
        out = self._spread(rows, batches, states, bounded=bounded)
        with torch.no_grad():
            self.weight.copy_(kept[0])
        self.optimizer.load_state_dict(kept[1])
        return out

    def state(self) -> dict[str, Any]:
        """Everything that a resume needs, JSON-able; float32 survives the decimal text."""
        moments = self.optimizer.state.get(self.weight, {})
        return {
            "weight": self.weight.detach().cpu().tolist(),
            **{name: torch.as_tensor(value).cpu().tolist() for name, value in moments.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`. Raises ValueError where it is of a head of another width."""
        weight = torch.tensor(state["weight"], device=cpu.device())
        if weight.shape != self.weight.shape:
            raise ValueError(
                f"the saved value head has {weight.numel() - 1} inputs, expected "
                f"{self.weight.numel() - 1}; resume with the model that the run began with"
            )
        with torch.no_grad():
            self.weight.copy_(weight)
        self.optimizer.state[self.weight] = {
            name: torch.tensor(value, device=None if name == "step" else cpu.device())
            for name, value in state.items()
            if name != "weight"
        }

    def _states(self, rows: Sequence[TrainSequence]) -> tuple[list[Any], list[Tensor]]:
        if not rows:
            return [], []
        batches, states = self.learner.target_states(rows)
        return batches, [state.float() for state in states]

    def _data(
        self, rows: Sequence[TrainSequence], targets: Sequence[np.ndarray]
    ) -> tuple[list[Any], list[Tensor], Tensor]:
        """Rows, their states, and the targets of this rank's masked tokens, end to end [N]."""
        batches, states = self._states(rows)
        parts = [
            targets[int(at)][rows[int(at)].mask] for batch in batches for at in batch.indices
        ]
        here = parts if states else []
        flat = np.concatenate(here).astype(np.float32) if here else np.zeros(0, np.float32)
        return batches, states, torch.from_numpy(flat).to(cpu.device())

    def _values(self, states: Sequence[Tensor]) -> Tensor:
        """Unbounded values [N]."""
        if not states:
            return self.weight.sum() * torch.zeros(0, device=self.weight.device)
        return torch.cat(list(states)) @ self.weight[:-1] + self.weight[-1]

    def _step(
        self,
        states: list[Tensor],
        target_N: Tensor,
        rows: Sequence[TrainSequence],
        *,
        bounded: bool,
    ) -> dict[str, float]:
        value_N = self._values(states)
        ones_N = torch.ones_like(target_N, dtype=torch.bool)
        if bounded:
            loss, stats = bce_value_loss(value_N, target_N, ones_N)
        else:
            loss, stats = clipped_value_loss(
                value_N, value_N.detach(), target_N, ones_N, clip=None
            )
        (gradient,) = torch.autograd.grad(loss, self.weight)
        gradient = gradient.contiguous()  # of a rank without tokens it is one number, expanded
        names = ("value_sum", "target_sum", "squared_error_sum")
        sums = torch.stack([stats[name].double() for name in names])
        dist.all_reduce(gradient)
        dist.all_reduce(sums)
        num = max(sum(row.num_targets for row in rows), 1)
        self.weight.grad = gradient / num
        self.optimizer.step()
        self.weight.grad = None
        return {
            name.removesuffix("_sum"): float(value) / num
            for name, value in zip(names, sums, strict=True)
        }

    def _spread(
        self,
        rows: Sequence[TrainSequence],
        batches: list[Any],
        states: list[Tensor],
        *,
        bounded: bool,
    ) -> list[np.ndarray]:
        """Values back in the places of their tokens, complete on every rank."""
        out = [np.zeros(len(row.ids), np.float32) for row in rows]
        mine: list[tuple[int, np.ndarray]] = []
        with torch.no_grad():
            for batch, state in zip(batches, states, strict=False):
                value_N = self._values([state])
                values = (value_N.sigmoid() if bounded else value_N).cpu().numpy()
                start = 0
                for at in batch.indices:
                    count = rows[int(at)].num_targets
                    mine.append((int(at), values[start : start + count]))
                    start += count
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        for part in gathered:
            for at, values in part:
                out[at][rows[at].mask] = values
        return out
