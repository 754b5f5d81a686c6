"""Runs of the quickstart on tiny models, by the command line, in ranks that a test starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers_ranks import Job

MODEL = ("num_layers=2", "hidden_size=32", "ffn_hidden_size=48")
TINY = (
    *(f"{role}.model.{size}" for role in ("actor", "critic") for size in MODEL),
    *(f"{role}.loss.kl_coef=0.01" for role in ("actor", "critic")),
    *(f"{role}.optimizer.lr=5e-3" for role in ("actor", "critic")),
    "num_steps=6",
    "save_every=2",
    "max_generated_tokens=0",
    "rollout.prompts_per_step=6",
    "rollout.attempts=4",
    "rollout.criticised=2",
    "rollout.feedbacks=2",
    "rollout.revisions=2",
    "bilevel.actor_steps_per_critic_step=1",
    "eval.every=3",
    "eval.num_prompts=6",
    "track.tensorboard=false",
    "task.options.easy_share=1.0",
    # Enough for digits where digits belong, so that some answers are right by chance.
    *(f"warm_start.{role}.stop_loss=0.0" for role in ("actor", "critic")),
    *(f"warm_start.{role}.steps=40" for role in ("actor", "critic")),
    *(f"warm_start.{role}.batch=16" for role in ("actor", "critic")),
    *(f"warm_start.{role}.lr=1e-2" for role in ("actor", "critic")),
)


def arguments(run_dir: Path, cache: Path, *sets: str, recipe: str = "quickstart") -> list[str]:
    """The command line of a tiny run; later settings win."""
    settings = [*TINY, f"warm_start.cache_dir={cache}", *sets]
    flags = [part for item in settings for part in ("--set", item)]
    return ["train", recipe, "--run-dir", str(run_dir), *flags]


def command(argv: list[str]) -> int:
    """One rank of `binac ARGV` under a launcher; the exit code."""
    from megatron_binac import cli

    return cli.main(argv)


def start(world: int, argv: list[str]) -> Job:
    return Job(world, command, argv)


def run(world: int, argv: list[str], *, timeout: float = 600.0) -> None:
    """Run a command to its end; every rank must exit with 0."""
    finish(start(world, argv), timeout)


def finish(job: Job, timeout: float = 600.0) -> None:
    """Wait for a job's end; every rank must exit with 0."""
    codes = job.wait(timeout)
    assert codes == [0] * len(codes), job.log.read()[-4000:]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the times."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in found]


def transcripts(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "transcripts.jsonl").read_text().splitlines()]


def checkpoints(run_dir: Path) -> list[str]:
    """Everything beside the file that names the newest."""
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir() if p.name != "latest")


def state(run_dir: Path, step: int) -> dict[str, Any]:
    """What a checkpoint holds beside the tensors."""
    path = run_dir / "checkpoints" / f"step_{step:06d}" / "state.json"
    return json.loads(path.read_text())


def tensors(run_dir: Path, step: int, role: str) -> dict[str, Any]:
    """Every tensor of a checkpoint by name, whatever layout wrote it."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    path = run_dir / "checkpoints" / f"step_{step:06d}" / role
    reader = FileSystemReader(path)
    _load_state_dict(found, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    flat: dict[str, Any] = {}

    def visit(node: Any, name: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                visit(value, f"{name}.{key}" if name else str(key))
        elif isinstance(node, torch.Tensor):
            flat[name] = node

    visit(found, "")
    return flat


def assert_same_checkpoint(
    a: Path, b: Path, step: int, *, roles: tuple[str, ...] = ("actor", "critic")
) -> None:
    """Weights, optimizers, schedules, cursor and open block are equal to the last bit."""
    import torch

    for role in roles:
        left, right = tensors(a, step, role), tensors(b, step, role)
        assert left.keys() == right.keys()
        assert len(left) > 5, sorted(left)
        for name in left:
            assert torch.equal(left[name], right[name]), f"{role} {name}"
    assert state(a, step) == state(b, step)
