"""Checkpoints of both roles by Megatron's distributed checkpointing, under any layout, put in
place in one move.

A checkpoint is written to a folder with another name, which is renamed when all of it is there:
what is called `step_000010` is complete. `state.json` holds what is not a tensor. There is no
random state to keep: every random number of a run comes from a seed, a step and a name
(`megatron_binac.seeds`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_binac.models import cpu
from megatron_binac.models.learner import MegatronLearner

FIRST = "step_000000"
"""The weights before the first step: the frozen reference, kept for the whole run."""


def step_name(step: int) -> str:
    """Folder name of the checkpoint from which `step` comes next."""
    return f"step_{step:06d}"


def save(
    folder: Path,
    step: int,
    learners: Mapping[str, MegatronLearner],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `step` under `folder` and drop all but the newest `keep`; collective.

    Raises OSError on every rank where the disk failed; what was there before is untouched.
    """
    target = folder / step_name(step)
    draft = folder / f".{target.name}.draft"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(draft, ignore_errors=True)
    _together(lambda: draft.mkdir(parents=True) if first else None, target)

    def write() -> None:
        for role, learner in learners.items():
            save_learner(draft / role, learner)

    try:
        _together(write, target)
        if first:
            meta = {
                **state,
                "step": step,
                "learners": {role: _light_state(learner) for role, learner in learners.items()},
            }
        _together(lambda: _seal(draft, target, meta) if first else None, target)
    except OSError:
        if first:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    if first:
        _prune(folder, keep)
    return target


def load(path: Path, learners: Mapping[str, MegatronLearner]) -> dict[str, Any]:
    """Put weights, optimizers and schedules back; returns the state that was saved beside them.
    Collective."""
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    for role, learner in learners.items():
        load_learner(path / role, learner)
        learner.num_updates = state["learners"][role]["num_updates"]
        if learner.scheduler is not None:
            learner.scheduler.load_state_dict(state["learners"][role]["scheduler"])
    return state


def save_learner(path: Path, learner: MegatronLearner, *, with_optimizer: bool = True) -> None:
    """Write one role's weights (and optimizer, where it has one) to the new folder `path`;
    collective."""
    learner.groups.activate()
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    with cpu.region():
        dist_checkpointing.save(
            _sharded(learner, with_optimizer=with_optimizer, loading=False), str(path)
        )


def load_learner(path: Path, learner: MegatronLearner, *, weights_only: bool = False) -> None:
    """Read one role's weights (and optimizer) from `path`, saved under any layout; collective."""
    learner.groups.activate()
    with_optimizer = learner.optimizer is not None and not weights_only
    with cpu.region():
        template = _sharded(learner, with_optimizer=with_optimizer, loading=True)
        loaded = dist_checkpointing.load(template, str(path))
        for i, chunk in enumerate(learner.chunks):
            chunk.load_state_dict(loaded[f"model{i}"])
        if with_optimizer:
            learner.optimizer.load_state_dict(loaded["optimizer"])
        elif learner.optimizer is not None:
            learner.optimizer.reload_model_params()


def _sharded(learner: MegatronLearner, *, with_optimizer: bool, loading: bool) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": learner.groups.collection.dp_cp,
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }
    state: dict[str, Any] = {
        f"model{i}": chunk.sharded_state_dict(metadata=metadata)
        for i, chunk in enumerate(learner.chunks)
    }
    if with_optimizer and learner.optimizer is not None:
        _fill_moments(learner.optimizer)
        state["optimizer"] = learner.optimizer.sharded_state_dict(
            state, is_loading=loading, metadata=metadata
        )
    return state


def _fill_moments(optimizer: Any) -> None:
    """Give an Adam that has not stepped yet the zeros that it would start from: empty state has no
    shape."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                if not inner.state.get(p):
                    inner.state[p] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }


def _light_state(learner: MegatronLearner) -> dict[str, Any]:
    scheduler = None if learner.scheduler is None else learner.scheduler.state_dict()
    return {"num_updates": learner.num_updates, "scheduler": scheduler}


def _seal(draft: Path, target: Path, meta: Mapping[str, Any]) -> None:
    (draft / "state.json").write_text(json.dumps(meta), encoding="utf-8")
    if target.exists():  # a resumed run comes by a step that it saved before it was killed
        shutil.rmtree(target)
    os.replace(draft, target)


def _prune(folder: Path, keep: int) -> None:
    steps = sorted(p for p in folder.glob("step_*") if p.name != FIRST)
    for old in steps[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def _together(action: Any, target: Path) -> None:
    """Run `action` on this rank; OSError on all ranks where it failed on any, so that none waits
    for ever."""
    problem = ""
    try:
        action()
    except OSError as error:
        problem = f"{error.strerror or error} ({error.filename or target})"
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):
        reason = next(p for p in problems if p)
        raise OSError(
            f"checkpoint {target} could not be written: {reason}; free some space or pass another "
            f"--run-dir, then "
            "continue with --resume: the checkpoints before this one are whole"
        )
