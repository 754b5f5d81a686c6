"""Checkpoints of both roles by Megatron's distributed checkpointing, under any layout, put in
place in one move.

A checkpoint is written to a folder with another name, which is renamed when all of it is there:
what is called `step_000010` is complete. `state.json` holds what is not a tensor. There is no
random state to keep: every random number of a run comes from a seed, a step and a name
(`megatron_binac.seeds`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import CheckpointException

from megatron_binac.models import cpu
from megatron_binac.models.learner import MegatronLearner

FIRST = "step_000000"
"""The weights before the first step: the frozen reference, kept for the whole run."""

HEADERS = 8192
"""Bytes on the disk beside the numbers of one parameter and its optimizer state."""

WRITE_ERRORS = ("PytorchStreamWriter", "inline_container", "iostream error")
"""Signs of a torch.save that could not write; it does not say that a disk is full."""


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

    Raises OSError where the disk failed, on every rank that can be told; what was there before is
    untouched.
    """
    target = folder / step_name(step)
    draft = folder / f".{target.name}.draft"
    first = dist.get_rank() == 0
    num_bytes = _num_bytes(learners)
    _together(lambda: _begin(draft, num_bytes) if first else None, target)
    try:
        _write(draft, learners, target)
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
            learner.scheduler.num_steps = 0  # it adds what it loads to where it stands
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
            if not learner.config.optimizer.distributed:
                _restore_zero_step(loaded["optimizer"])
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


def _restore_zero_step(state: dict[str, Any]) -> None:
    """Put back a step count of 0: Megatron-Core leaves it out of what it saves, and misses it."""
    adam = state.get("optimizer", state)  # a bf16 optimizer has its Adam inside
    adam["state"].setdefault("common_step", torch.zeros((), dtype=torch.float32))


def _light_state(learner: MegatronLearner) -> dict[str, Any]:
    scheduler = None if learner.scheduler is None else learner.scheduler.state_dict()
    return {"num_updates": learner.num_updates, "scheduler": scheduler}


def _num_bytes(learners: Mapping[str, MegatronLearner]) -> int:
    """About what a checkpoint takes on the disk."""
    num = 0
    for learner in learners.values():
        of_optimizer = 12 if learner.optimizer is not None else 0  # fp32 weight and two moments
        size = sum(
            p.numel() * (p.element_size() + of_optimizer) + HEADERS for p in learner.parameters()
        )
        num += size // learner.groups.dp_size
    total = torch.tensor(num, device=cpu.device())
    dist.all_reduce(total)
    return int(total)


def _begin(draft: Path, num_bytes: int) -> None:
    """Make the draft's folder where the disk has room for it: later only this rank may notice."""
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    free = shutil.disk_usage(draft).free
    if free < num_bytes:
        draft.rmdir()
        reason = f"{free / 2**20:.1f} MiB are free, about {num_bytes / 2**20:.1f} MiB are needed"
        raise OSError(errno.ENOSPC, reason)


def _write(draft: Path, learners: Mapping[str, MegatronLearner], target: Path) -> None:
    """Let Megatron-Core write every role. Raises OSError where the disk failed."""
    reason = None
    try:
        for role, learner in learners.items():
            save_learner(draft / role, learner)
    except (OSError, RuntimeError) as error:
        # Small files are written by one rank amid the collectives of all. The others cannot be
        # told: they end as this one does, when its connections close.
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in WRITE_ERRORS):
            raise
        number = error.errno if isinstance(error, OSError) else errno.ENOSPC
        raise _failure(target, OSError(number, str(error))) from error
    except CheckpointException as error:  # on all ranks at once; one of them knows the reasons
        text = "; ".join(str(exception) for exception, _ in error.failures.values())
        found = re.search(r"\[Errno (\d+)\]", text)
        unknown = errno.ENOSPC if any(sign in text for sign in WRITE_ERRORS) else errno.EIO
        reason = OSError(int(found[1]) if found else unknown, text)
    _raise_together(reason, target)


def _seal(draft: Path, target: Path, meta: Mapping[str, Any]) -> None:
    (draft / "state.json").write_text(json.dumps(meta), encoding="utf-8")
    if target.exists():
        _discard(target)
    os.replace(draft, target)


def _prune(folder: Path, keep: int) -> None:
    steps = sorted(p for p in folder.glob("step_*") if p.name != FIRST)
    for old in steps[:-keep]:
        _discard(old)


def _discard(path: Path) -> None:
    """Delete a checkpoint; a kill amid it leaves a draft behind and no half of a checkpoint."""
    doomed = path.with_name(f".{path.name}.old.draft")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _together(action: Callable[[], None], target: Path) -> None:
    """Run `action`, which calls no other rank; OSError on all ranks where it failed on any."""
    problem = None
    try:
        action()
    except OSError as error:
        problem = error
    _raise_together(problem, target)


def _raise_together(problem: OSError | None, target: Path) -> None:
    facts = None if problem is None else (problem.errno, problem.strerror or str(problem))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, facts)
    told = [facts for facts in found if facts is not None]
    if told:
        # The one that names its reason, where several ranks failed.
        raise _failure(target, OSError(*max(told, key=lambda facts: len(facts[1]))))


def _failure(target: Path, error: OSError) -> OSError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason = f"the disk is full ({reason})"
    return OSError(
        error.errno,
        f"checkpoint {target} could not be written: {reason}; free some space and go on with "
        f"binac train --resume {target.parent.parent}: older checkpoints are whole",
    )
