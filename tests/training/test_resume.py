"""A run that was stopped and goes on is the run that was not stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers_ranks import Job
from helpers_runs import (
    arguments,
    assert_same_checkpoint,
    checkpoints,
    rows,
    run,
    start,
    state,
    transcripts,
)
from helpers_toy import Toy, toy_config, toy_run

from megatron_binac.config import BilevelConfig, Config, EvalConfig
from megatron_binac.training.loop import train
from megatron_binac.training.trees import trees_from_json, trees_to_json


def toy(**changes: object) -> Config:
    """K = 3: a stop after steps 9 and 10 (from 0) comes in the middle of a block."""
    return toy_config(
        num_steps=14,
        bilevel=BilevelConfig(lam=0.2, actor_steps_per_critic_step=3),
        eval=EvalConfig(every=4, num_prompts=4),
        **changes,
    )


def resumed(run_dir: Path, config: Config, stopped: Toy, step: int) -> Toy:
    """A new run that is given what the stopped one saved, the block by way of JSON."""
    saved = stopped.saved[step]
    again = toy_run(run_dir, config, first_step=step)
    again.actor.weights, again.actor.num_updates = saved["actor"]
    again.critic.weights, again.critic.num_updates = saved["critic"]
    again.run.cursor.restore(json.loads(json.dumps(saved["cursor"])))
    again.run.generated_tokens = saved["generated_tokens"]
    again.run.block = trees_from_json(json.loads(json.dumps(trees_to_json(saved["block"]))))
    again.run.players.actor.publish(again.actor.num_updates)
    assert again.run.players.critic is not None
    again.run.players.critic.publish(again.critic.num_updates)
    return again


@pytest.mark.parametrize("step", [9, 10, 11])
def test_tiny_learners_go_on_as_if_nothing_was(tmp_path: Path, step: int) -> None:
    straight = toy_run(tmp_path / "straight", toy())
    train(straight.run)
    asked = iter([False] * (step - 1) + [True])
    stopped = toy_run(tmp_path / "stopped", toy(), stop=lambda: next(asked))
    assert train(stopped.run) is False
    again = resumed(tmp_path / "stopped", toy(), stopped, step)
    assert train(again.run) is True
    assert rows(tmp_path / "stopped") == rows(tmp_path / "straight")
    assert transcripts(tmp_path / "stopped") == transcripts(tmp_path / "straight")
    for role in ("actor", "critic"):
        one, other = getattr(again, role), getattr(straight, role)
        assert torch.equal(one.weights, other.weights)
        assert one.num_updates == other.num_updates


# With Megatron-Core, by the command line.

SETS = ("bilevel.actor_steps_per_critic_step=4", "bilevel.lam=0.3")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm starts that the runs of this file share."""
    return tmp_path_factory.mktemp("warm")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Callable[[int], Path]:
    """The run that nobody stopped, by its number of ranks; made once."""
    made: dict[int, Path] = {}

    def folder(world: int) -> Path:
        if world not in made:
            made[world] = tmp_path_factory.mktemp("straight") / "run"
            run(world, arguments(made[world], cache, *SETS))
        return made[world]

    return folder


def until_row(job: Job, run_dir: Path, step: int) -> None:
    """Wait until the row of `step` is written."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and job.is_alive:
        path = run_dir / "metrics.jsonl"
        if path.exists() and any(row["step"] >= step for row in rows(run_dir)):
            return
        time.sleep(0.02)
    raise AssertionError(f"no row of step {step}: {job.wait(1)}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "number", "code"), [(1, signal.SIGINT, 130), (2, signal.SIGTERM, 143)]
)
def test_a_signal_saves_and_a_resume_is_exact(
    world: int,
    number: int,
    code: int,
    tmp_path: Path,
    cache: Path,
    straight: Callable[[int], Path],
) -> None:
    stopped = tmp_path / "stopped"
    job = start(world, arguments(stopped, cache, *SETS))
    until_row(job, stopped, 0)
    for process in job.ranks:
        assert process.pid is not None
        os.kill(process.pid, number)
    assert job.wait(600) == [code] * world
    assert f"binac train --resume {stopped}" in (stopped / "log.txt").read_text()
    last = rows(stopped)[-1]["step"] + 1
    assert 0 < last < 6
    assert checkpoints(stopped)[-1] == f"step_{last:06d}"
    if last % 4:
        assert len(state(stopped, last)["block"]) == 6  # the trees that the probe will need
    run(world, ["train", "--resume", str(stopped)])
    assert rows(stopped) == rows(straight(world))
    assert transcripts(stopped) == transcripts(straight(world))
    assert_same_checkpoint(stopped, straight(world), 6)


@pytest.mark.slow
def test_a_resume_can_be_longer_cleans_up_and_can_come_again(
    tmp_path: Path, cache: Path, straight: Callable[[int], Path]
) -> None:
    """A second save after a resume, and a resume from that one (case 24)."""
    longer = tmp_path / "longer"
    run(1, arguments(longer, cache, *SETS, "num_steps=3"))
    (longer / "checkpoints" / ".step_000007.draft" / "actor").mkdir(parents=True)
    (longer / "checkpoints" / ".step_000001.old.draft").mkdir()
    for _ in range(2):
        run(1, ["train", "--resume", str(longer), "--set", "num_steps=6"])
        assert rows(longer) == rows(straight(1))
        assert checkpoints(longer) == checkpoints(straight(1))
    assert checkpoints(longer) == ["step_000000", "step_000004", "step_000006"]
    assert_same_checkpoint(longer, straight(1), 6)


@pytest.mark.slow
def test_a_resume_needs_no_warm_start(
    tmp_path: Path, cache: Path, straight: Callable[[int], Path]
) -> None:
    """The cache may be gone: weights and reference are the run's own."""
    want, stopped, own = straight(1), tmp_path / "stopped", tmp_path / "own"
    shutil.copytree(cache, own)
    run(1, arguments(stopped, own, *SETS, "num_steps=2"))
    shutil.rmtree(own)
    run(1, ["train", "--resume", str(stopped), "--set", "num_steps=6"])
    assert not own.exists()
    assert rows(stopped)[-1]["actor/follow/kl"] == rows(want)[-1]["actor/follow/kl"] > 0
    assert_same_checkpoint(stopped, want, 6)
