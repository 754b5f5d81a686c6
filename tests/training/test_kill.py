"""kill -9, at any moment: what goes on afterwards ends as if nothing had been."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_ranks import Job
from helpers_runs import (
    arguments,
    assert_same_checkpoint,
    checkpoints,
    command,
    finish,
    rows,
    run,
    start,
    transcripts,
)

NUM_KILLS, NUM_STEPS = 10, 4
SETS = (
    f"num_steps={NUM_STEPS}",
    "bilevel.actor_steps_per_critic_step=2",
    "bilevel.lam=0.3",
    "save_every=1",
)
"""Every second checkpoint has an open block; each step ends with a save."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm starts that all runs of this file share."""
    return tmp_path_factory.mktemp("warm")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Callable[[int], Path]:
    """The run that nobody killed, by its number of ranks; made once."""
    made: dict[int, Path] = {}

    def folder(world: int) -> Path:
        if world not in made:
            made[world] = tmp_path_factory.mktemp("straight") / "run"
            run(world, arguments(made[world], cache, *SETS))
        return made[world]

    return folder


def assert_same_run(got: Path, want: Path) -> None:
    assert rows(got) == rows(want)
    assert transcripts(got) == transcripts(want)
    assert checkpoints(got) == checkpoints(want)
    assert_same_checkpoint(got, want, NUM_STEPS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_is_killed_ten_times_is_the_run_that_never_was(
    world: int, tmp_path: Path, cache: Path, straight: Callable[[int], Path]
) -> None:
    """Each life is killed after a random share of a whole run's time; each run that gets to its end
    is compared, and the last one is let go on to its end."""
    want, again = straight(world), tmp_path / "again"
    began = time.monotonic()
    run(world, arguments(again, cache, *SETS))
    whole = time.monotonic() - began
    assert_same_run(again, want)  # two runs are bit-equal in the first place

    draw = random.Random(world)
    kills, finished, moments = 0, 0, []
    while kills < NUM_KILLS:
        killed = tmp_path / f"killed{finished}"
        argv = arguments(killed, cache, *SETS)
        while True:
            job = start(world, argv)
            if kills < NUM_KILLS:
                time.sleep(draw.uniform(0.05, 0.75) * whole)
            if kills == NUM_KILLS or not job.is_alive:
                finish(job)
                break
            job.kill_ranks()
            kills += 1
            moments.append(_where(killed))
            # The same command goes on with the folder that a kill has left behind.
        assert_same_run(killed, want)
        finished += 1
    print(f"{world} ranks, {finished} runs, killed at: {'; '.join(moments)}")
    assert len(moments) == NUM_KILLS


def _where(run_dir: Path) -> str:
    """What a kill has left: the newest row and the folders of checkpoints."""
    folder = run_dir / "checkpoints"
    found = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    return f"{_num_rows(run_dir)} rows, {' '.join(found) or 'no checkpoint'}"


def _num_rows(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def killed_at(argv: list[str], place: str, visits: int) -> int:
    """One rank that kills itself, as `kill -9` would, on its n-th visit of a place."""
    from megatron_binac.models import checkpoint
    from megatron_binac.training import telemetry

    left = visits

    def before(action: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return action(*args, **kwargs)

        return wrapped

    if place == "before a draft gets its name":
        checkpoint.os.replace = before(os.replace)
    elif place == "before an old checkpoint is dropped":
        checkpoint._prune = before(checkpoint._prune)
    elif place == "amid deleting an old checkpoint":
        checkpoint.shutil.rmtree = _half(shutil.rmtree, before)
    elif place == "before the row":
        telemetry._JsonLines.append = before(telemetry._JsonLines.append)
    else:
        assert place == "between the row and the checkpoint"
        checkpoint.save = before(checkpoint.save)
    return command(argv)


def _half(rmtree: Any, before: Any) -> Any:
    """rmtree that deletes one file before it goes on."""
    rest = before(rmtree)

    def wrapped(path: Path, **kwargs: Any) -> None:
        if path.exists():
            next(p for p in path.rglob("*") if p.is_file()).unlink()
            rest(path, **kwargs)

    return wrapped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "visits"),
    [
        ("before a draft gets its name", 3),
        ("before an old checkpoint is dropped", 4),
        ("before an old checkpoint is dropped", NUM_STEPS + 1),
        ("amid deleting an old checkpoint", 1),
        ("before the row", 4),
        ("between the row and the checkpoint", 1),
        ("between the row and the checkpoint", 4),
    ],
)
def test_a_kill_at_a_bad_moment(
    place: str, visits: int, tmp_path: Path, cache: Path, straight: Callable[[int], Path]
) -> None:
    killed = tmp_path / "killed"
    argv = arguments(killed, cache, *SETS)
    job = Job(1, killed_at, argv, place, visits)
    with pytest.raises(AssertionError, match="ended with code"):
        job.wait(600)
    assert _num_rows(killed) <= NUM_STEPS  # and one for the start, in a whole run
    run(1, argv)
    assert_same_run(killed, straight(1))


@pytest.mark.slow
def test_a_kill_of_the_command_ends_its_ranks_and_the_next_one_goes_on(
    tmp_path: Path, cache: Path, straight: Callable[[int], Path]
) -> None:
    """The whole way: `binac train --nproc 2`, torchrun, two ranks."""
    killed = tmp_path / "killed"
    line = [sys.executable, "-W", "ignore", "-m", "megatron_binac"]
    line += [*arguments(killed, cache, *SETS), "--nproc", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(line, env=env, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 600
            while not (killed / "checkpoints" / "step_000001").exists():
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
        while _processes_of(killed):
            assert time.monotonic() < deadline, _processes_of(killed)
            time.sleep(0.05)
        assert _num_rows(killed) <= NUM_STEPS
        done = subprocess.run(line, env=env, stdout=log, stderr=log, timeout=600, check=False)
    assert done.returncode == 0, (tmp_path / "log").read_text()
    assert "continuing quickstart" in (tmp_path / "log").read_text()
    assert_same_run(killed, straight(2))


def _processes_of(run_dir: Path) -> list[int]:
    """Processes with the run's folder among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(run_dir).encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found
