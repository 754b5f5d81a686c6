"""Ten steps are five, kill -9, a resume and five: to the last bit, under every kind of layout."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers_runs import arguments, assert_same_checkpoint, rows, run, start, transcripts

LAYOUTS = {"dp": (), "tp": ("parallel.tp=2",), "pp": ("parallel.pp=2",)}
SETS = (
    "num_steps=10",
    "save_every=5",
    "keep_checkpoints=1",
    "bilevel.actor_steps_per_critic_step=2",
    "bilevel.lam=0.3",
    "eval.every=0",
    "rollout.prompts_per_step=4",
)
"""Five steps end in the middle of a block of two."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm starts that all runs of this file share, whatever their layout."""
    return tmp_path_factory.mktemp("warm")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("beside", [False, True], ids=["at_once", "beside"])
def test_ten_steps_are_five_a_kill_and_five(
    layout: str, beside: bool, tmp_path: Path, cache: Path
) -> None:
    if beside and layout != "dp":
        pytest.skip("a save beside the training is one for all layouts")
    split = [f"{role}.{item}" for role in ("actor", "critic") for item in LAYOUTS[layout]]
    sets = (*SETS, *split, f"save_async={str(beside).lower()}")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    run(2, arguments(straight, cache, *sets), timeout=600)
    job = start(2, arguments(killed, cache, *sets))
    deadline = time.monotonic() + 600
    try:
        while not (killed / "checkpoints" / "step_000005").exists():
            assert job.is_alive, job.wait(1)
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        job.kill()
    run(2, ["train", "--resume", str(killed)], timeout=600)
    assert rows(killed) == rows(straight)
    assert transcripts(killed) == transcripts(straight)
    assert_same_checkpoint(killed, straight, 10)
