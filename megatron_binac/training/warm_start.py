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
import math
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
from megatron_binac.first_rank import on_first
from megatron_binac.models.checkpoint import load_learner, save_learner
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import Groups
from megatron_binac.seeds import name_seed
from megatron_binac.tasks.base import TeachingTask
from megatron_binac.tokenizer import Tokenizer
from megatron_binac.types import Role, TrainSequence

logger = logging.getLogger(__name__)

TRIES = 4
"""Starts from other weights and examples, where one after another stays above its `stop_loss`."""
PLATEAU = 3.0
"""A start that stands above so many times its `stop_loss` late in its steps is given up: some sit
on a plateau for good. Measured on the quickstart's actor (600 steps, 0.08): the slowest start that
got there was at 0.156 by step 450 and done at step 477; one that did not was at 0.377 by then and
at 0.380 by step 600."""
PATIENCE = (0.75, 0.5)
"""Share of its steps that the first try, and each later one, may use before that is asked."""


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
    """Teach learners of the same shape and layout, one after another, until one gets to its loss,
    and put the best one's weights into the cache."""
    schedule: RoleWarmStart = getattr(config.warm_start, role)
    best: tuple[float, MegatronLearner] | None = None
    for number in range(TRIES):
        teacher = _fresh(config, role, learner, groups, number)
        loss = _teach(config, teacher, task, template, number)
        if best is None or loss < best[0]:
            best = loss, teacher
        if schedule.stop_loss == 0 or loss < schedule.stop_loss:
            break
    else:
        assert best is not None
        _say(
            f"warm start of the {role}: none of {TRIES} tries came to loss {schedule.stop_loss}; "
            f"the best stands at {best[0]:.3f} and is taken, but training may not get far from "
            f"there. Raise warm_start.{role}.steps (now {schedule.steps}) or "
            f"warm_start.{role}.stop_loss, or set another warm_start.seed",
            logging.WARNING,
        )
    assert best is not None
    draft = path.with_name(f".{path.name}.draft")
    if dist.get_rank() == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    dist.barrier()
    save_learner(draft / role, best[1], with_optimizer=False)
    dist.barrier()
    if dist.get_rank() == 0:
        draft.rename(path)
    dist.barrier()


def _fresh(
    config: Config, role: Role, learner: MegatronLearner, groups: Groups, number: int
) -> MegatronLearner:
    """The learner of a try, with weights of its own."""
    schedule: RoleWarmStart = getattr(config.warm_start, role)
    optimizer = OptimizerConfig(lr=schedule.lr, warmup_steps=schedule.warmup_steps)
    again = ("try", number) if number else ()
    return MegatronLearner(
        role,
        replace(learner.config, optimizer=optimizer, train=True),
        groups,
        vocab_size=learner.vocab_size,
        seed=name_seed(config.warm_start.seed, role, "weights", *again),
        num_steps=schedule.steps,
        temperature=1.0,
    )


def _teach(
    config: Config,
    teacher: MegatronLearner,
    task: TeachingTask,
    template: Template,
    number: int,
) -> float:
    """Supervised steps on examples of the try's own, to the loss of the schedule, to its last step,
    or until the try is given up; the mean loss of the last steps."""
    role = teacher.role
    schedule: RoleWarmStart = getattr(config.warm_start, role)
    patience = PATIENCE[0] if number == 0 else PATIENCE[1]
    recent: deque[float] = deque(maxlen=5)
    mean = math.inf
    for step in range(schedule.steps):
        start = (number * schedule.steps + step) * schedule.batch
        batch = range(start, start + schedule.batch)
        rows = [_sequence(_taught(config, role, i), i, task, template) for i in batch]
        recent.append(teacher.supervise(rows)["loss"])
        mean = sum(recent) / len(recent)
        full = len(recent) == recent.maxlen
        enough = full and mean < schedule.stop_loss
        if enough or (step + 1) % 50 == 0:
            _say(f"warm start of the {role}: step {step + 1}/{schedule.steps}, loss {mean:.3f}")
        if enough:
            break
        stuck = full and mean > PLATEAU * schedule.stop_loss > 0
        if (stuck and step + 1 >= patience * schedule.steps) or step + 1 == schedule.steps:
            if schedule.stop_loss:
                _say(
                    f"warm start of the {role}: try {number + 1} of {TRIES} is given up at step "
                    f"{step + 1}/{schedule.steps}, loss {mean:.3f}, above stop_loss "
                    f"{schedule.stop_loss}"
                )
            break
    return mean


def _say(text: str, level: int = logging.INFO) -> None:
    if dist.get_rank() == 0:
        logger.log(level, text)


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
    return on_first(lambda: not path.is_dir())


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
