"""Two real training steps with either backend: the same losses, norms and statistics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs the extra kernels")

OPTIONS = {
    "num_steps": 2,
    "rollout.prompts_per_step": 8,
    "rollout.attempts": 4,
    "rollout.criticised": 2,
    "rollout.feedbacks": 3,
    "rollout.revisions": 3,
    "warm_start.actor.steps": 100,
    "warm_start.critic.steps": 30,
    "warm_start.actor.stop_loss": 0.0,
    "warm_start.critic.stop_loss": 0.0,
    "eval.num_prompts": 1,
    "eval.every": 0,
}
COMPARED = ("loss", "grad_norm", "entropy", "kl", "policy", "ratio", "mismatch_max")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_steps_agree(run_python: Callable[..., str], tmp_path: Path) -> None:
    options = OPTIONS | {"warm_start.cache_dir": tmp_path / "cache"}
    settings = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    found = {}
    # The warm start is cached by the first run: both start from the same weights.
    for backend in ("reference", "triton"):
        run_dir = tmp_path / backend
        output = run_python(
            *("-m", "megatron_binac", "train", "quickstart", "--run-dir", str(run_dir), *settings),
            timeout=550,
            BINAC_KERNELS=backend,
            TRITON_INTERPRET="1" if backend == "triton" else "0",
        )
        assert f"kernels: {backend} on cpu" in output
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found[backend] = [
            {
                name: value
                for name, value in json.loads(line).items()
                if name.startswith(("actor/", "critic/")) and name.rsplit("/", 1)[1] in COMPARED
            }
            for line in lines
        ]
    steps = [step for step in found["reference"] if step]
    assert len(steps) == 2
    assert all(step["actor/follow/grad_norm"] > 0.1 for step in steps)
    assert any("critic/lead/loss" in step for step in steps)
    for one, other in zip(found["reference"], found["triton"], strict=True):
        assert one == pytest.approx(other, abs=1e-5, rel=1e-5)
