"""Supervised steps before reinforcement learning: the formats of the three turns, cached by
content.

The key of the cache is a hash of everything that decides the weights (task, tokenizer, shape,
schedule, seed), not of the layout or the machine: runs with other recipes, seeds or layouts share
one warm start.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_binac import __version__
from megatron_binac.algo.prompts import Template
from megatron_binac.config import Config, OptimizerConfig, RoleConfig, RoleWarmStart
from megatron_binac.models.checkpoint import load_learner, save_learner
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import Groups
from megatron_binac.seeds import name_seed
from megatron_binac.tasks.base import TeachingTask
from megatron_binac.tokenizer import Tokenizer
from megatron_binac.types import Role, TrainSequence

logger = logging.getLogger(__name__)


def warm_start(
    config: Config,
    role: Role,
    learner: MegatronLearner,
    groups: Groups,
    task: TeachingTask,
    template: Template,
) -> None:
    """Give `learner` the warm-started weights of its role, from the cache or by making them;
    collective."""
    schedule: RoleWarmStart = getattr(config.warm_start, role)
    if schedule.steps == 0:
        return
    path = Path(config.warm_start.cache_dir) / cache_key(
        config, role, learner.config, template.tokenizer
    )
    with _one_maker(path):
        if _missing(path):
            _say(f"warm start of the {role}: at most {schedule.steps} supervised steps, once")
            _make(config, role, learner, groups, task, template, path)
        else:
            _say(f"warm start of the {role}: taken from {path}")
    load_learner(path / role, learner, weights_only=True)


def cache_key(config: Config, role: Role, role_config: RoleConfig, tokenizer: Tokenizer) -> str:
    """Folder name of a warm start: the role and a hash of all that decides its weights."""
    pieces = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    facts = {
        "version": __version__,
        "role": role,
        "task": asdict(config.task),
        "tokenizer": pieces,
        "model": asdict(role_config.model),
        "precision": role_config.precision,
        "schedule": asdict(getattr(config.warm_start, role)),
        "seed": config.warm_start.seed,
    }
    if config.shared_policy:
        facts["shared"] = True
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"{role}-{digest[:16]}"


def _make(
    config: Config,
    role: Role,
    learner: MegatronLearner,
    groups: Groups,
    task: TeachingTask,
    template: Template,
    path: Path,
) -> None:
    """Train a learner of the same shape and layout from fresh weights and put its weights into the
    cache."""
    schedule: RoleWarmStart = getattr(config.warm_start, role)
    optimizer = OptimizerConfig(lr=schedule.lr, warmup_steps=schedule.warmup_steps)
    teacher = MegatronLearner(
        role,
        replace(learner.config, optimizer=optimizer, train=True),
        groups,
        vocab_size=learner.vocab_size,
        seed=name_seed(config.warm_start.seed, role, "weights"),
        num_steps=schedule.steps,
        temperature=1.0,
    )
    recent: deque[float] = deque(maxlen=5)
    for step in range(schedule.steps):
        batch = range(step * schedule.batch, (step + 1) * schedule.batch)
        recent.append(
            teacher.supervise(
                [_sequence(_taught(config, role, i), i, task, template) for i in batch]
            )["loss"]
        )
        mean = sum(recent) / len(recent)
        enough = len(recent) == recent.maxlen and mean < schedule.stop_loss
        if enough or (step + 1) % 50 == 0:
            _say(f"warm start of the {role}: step {step + 1}/{schedule.steps}, loss {mean:.3f}")
        if enough:
            break
    else:
        if schedule.stop_loss and dist.get_rank() == 0:
            logger.warning(
                f"warm start of the {role} took all {schedule.steps} steps and stands at loss "
                f"{mean:.3f}, "
                f"above stop_loss {schedule.stop_loss}: some starts do not learn in time. Set "
                f"another "
                f"warm_start.seed or more warm_start.{role}.steps"
            )
    draft = path.with_name(f".{path.name}.draft")
    if dist.get_rank() == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    dist.barrier()
    save_learner(draft / role, teacher, with_optimizer=False)
    dist.barrier()
    if dist.get_rank() == 0:
        draft.rename(path)
    dist.barrier()


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        logger.info(text)


def _taught(config: Config, role: Role, index: int) -> Role:
    """Whose example this is: a policy that plays both roles learns both, in turn."""
    return "critic" if config.shared_policy and index % 2 else role


def _sequence(role: Role, index: int, task: TeachingTask, template: Template) -> TrainSequence:
    """Warm-start example `index` of a role as one row; only what the role itself says is
    learned."""
    ids, mask = template.example_ids(task.supervised(role, index))
    return TrainSequence(ids=np.asarray(ids, np.int32), mask=np.asarray(mask, bool))


def _missing(path: Path) -> bool:
    """Whether rank 0 sees no finished warm start; the same answer on every rank."""
    answer = [not path.is_dir()]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


@contextmanager
def _one_maker(path: Path) -> Iterator[None]:
    """Let one job at a time make this warm start; another waits and finds it done."""
    if dist.get_rank() != 0:
        dist.barrier()
        yield
        dist.barrier()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f".{path.name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        yield
        dist.barrier()
