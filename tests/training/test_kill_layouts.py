"""Ten steps are five, kill -9, a resume and five: to the last bit, under every kind of layout."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_runs import (
    arguments,
    assert_same_checkpoint,
    rows,
    run,
    start,
    tensors,
    transcripts,
)

LAYOUTS = {
    "dp": ("parallel.tp=1", "parallel.pp=1"),
    "tp": ("parallel.tp=2", "parallel.pp=1"),
    "pp": ("parallel.tp=1", "parallel.pp=2"),
}
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


def _split(layout: str) -> list[str]:
    return [f"{role}.{item}" for role in ("actor", "critic") for item in LAYOUTS[layout]]


def _kill_after_five(run_dir: Path, argv: list[str]) -> None:
    """Start two ranks and end them by SIGKILL once the checkpoint of step 5 is there."""
    job = start(2, argv)
    deadline = time.monotonic() + 600
    try:
        while not (run_dir / "checkpoints" / "step_000005").exists():
            assert job.is_alive, job.wait(1)
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        job.kill()


def _distance(got: Any, want: Any) -> float:
    """Of two numbers, relative where they are large; infinite where only one is a number."""
    if not isinstance(want, float) or math.isnan(want):
        return 0.0 if got == want or (got != got and want != want) else math.inf
    return math.inf if math.isnan(got) else abs(got - want) / max(1.0, abs(want))


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
    """Weights, optimizers, schedules, cursor, phase and answers, bit for bit (case 23)."""
    if beside and layout != "dp":
        pytest.skip("a save beside the training is one for all layouts")
    sets = (*SETS, *_split(layout), f"save_async={str(beside).lower()}")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    run(2, arguments(straight, cache, *sets), timeout=600)
    _kill_after_five(killed, arguments(killed, cache, *sets))
    run(2, ["train", "--resume", str(killed)], timeout=600)
    assert rows(killed) == rows(straight)
    assert transcripts(killed) == transcripts(straight)
    assert_same_checkpoint(killed, straight, 10)


ACROSS = (("dp", "tp"), ("tp", "pp"), ("pp", "dp"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("before", "after"), ACROSS)
def test_five_steps_a_kill_and_five_in_another_layout(
    before: str, after: str, tmp_path: Path, cache: Path
) -> None:
    """The same tokens, and every number and weight to 1e-6 (case 25)."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    # A large eps keeps Adam from blowing rounding up: a gradient of 1e-9 is none.
    eps = [f"{role}.optimizer.eps=1e-2" for role in ("actor", "critic")]
    sets = (*SETS, *eps, *_split(before))
    run(2, arguments(straight, cache, *sets), timeout=600)
    _kill_after_five(killed, arguments(killed, cache, *sets))
    flags = [part for item in _split(after) for part in ("--set", item)]
    run(2, ["train", "--resume", str(killed), *flags], timeout=600)
    assert transcripts(killed) == transcripts(straight)
    worst: dict[str, float] = {}
    for got, want in zip(rows(killed), rows(straight), strict=True):
        assert got.keys() == want.keys()
        for key in want:
            if "mismatch" not in key:  # that is the rounding itself
                worst[key] = max(worst.get(key, 0.0), _distance(got[key], want[key]))
    print(f"{before} to {after}: {sorted(worst.items(), key=lambda pair: -pair[1])[:3]}")
    # A norm adds the rounding of every weight's gradient up.
    limit = {key: 3e-6 if key.endswith("grad_norm") else 1e-6 for key in worst}
    assert {key: x for key, x in worst.items() if x >= limit[key]} == {}
    for role in ("actor", "critic"):
        left, right = tensors(killed, 10, role), tensors(straight, 10, role)
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_allclose(left[name], right[name], rtol=0, atol=1e-6, err_msg=name)
