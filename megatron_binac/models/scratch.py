"""A learner that takes steps and takes them back: weights, optimizer and schedule, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_binac.models.learner import MegatronLearner


@contextmanager
def scratch(learner: MegatronLearner) -> Iterator[MegatronLearner]:
    """Inside, `learner` may be updated; afterwards it is what it was, to the last bit.

    Costs one more copy of this rank's weights and optimizer state while it lasts.
    """
    weights = learner.snapshot()
    kept = [_take(inner) for inner in _torch_optimizers(learner.optimizer)]
    schedule = dict(learner.scheduler.state_dict())
    num_updates = learner.num_updates
    try:
        yield learner
    finally:
        with torch.no_grad():
            for live, old in zip(learner.parameters(), weights, strict=True):
                live.copy_(old)
        for inner, old in zip(_torch_optimizers(learner.optimizer), kept, strict=True):
            _put_back(inner, old)
        learner.scheduler.num_steps = 0  # it adds what it loads to where it stands
        learner.scheduler.load_state_dict(schedule)
        learner.num_updates = num_updates


def _torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers inside Megatron's, which may be chained."""
    parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    return [part.optimizer for part in parts]


Kept = tuple[list[dict[str, Any]], list[Tensor], list[dict[str, Any] | None]]


def _take(optimizer: torch.optim.Optimizer) -> Kept:
    """Settings of the groups, main weights, and the state of each weight (None before its first
    step)."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    params = [p for g in optimizer.param_groups for p in g["params"]]
    return (
        [{k: v.clone() if isinstance(v, Tensor) else v for k, v in g.items()} for g in groups],
        [p.detach().clone() for p in params],
        [
            {
                k: v.clone() if isinstance(v, Tensor) else v
                for k, v in optimizer.state[p].items()
            }
            if p in optimizer.state
            else None
            for p in params
        ],
    )


def _put_back(optimizer: torch.optim.Optimizer, kept: Kept) -> None:
    groups, weights, states = kept
    for group, old in zip(optimizer.param_groups, groups, strict=True):
        group.update(old)
    params = [p for g in optimizer.param_groups for p in g["params"]]
    with torch.no_grad():
        for param, weight, state in zip(params, weights, states, strict=True):
            param.copy_(weight)
            if state is None:
                optimizer.state.pop(param, None)
                continue
            for name, value in state.items():
                live = optimizer.state[param].get(name)
                if isinstance(value, Tensor) and isinstance(live, Tensor):
                    live.copy_(value)  # in place: Megatron holds views of it
                else:
                    optimizer.state[param][name] = value
