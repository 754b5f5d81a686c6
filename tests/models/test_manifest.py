"""Damage of any kind, in any file of a checkpoint, is found and named; the one before is used."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers_ranks import run_ranks

from megatron_binac.config import LossConfig, ModelConfig, ParallelConfig, RoleConfig
from megatron_binac.models import checkpoint, manifest
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.types import TrainSequence

FILES = (
    "actor/.metadata",
    "actor/__0_0.distcp",
    "actor/__0_1.distcp",
    "actor/common.pt",
    "actor/metadata.json",
    "manifest.json",
    "state.json",
)
"""Of one rank and one role; newer releases of Megatron-Core write no common.pt."""


def make(
    parallel: ParallelConfig | None = None, *, seed: int = 1, role: str = "actor"
) -> MegatronLearner:
    config = RoleConfig(
        model=ModelConfig(
            num_layers=2, hidden_size=32, ffn_hidden_size=48, max_sequence_length=32
        ),
        parallel=parallel or ParallelConfig(),
    )
    groups = build_groups(role, config.parallel, 1)
    return MegatronLearner(
        role, config, groups, vocab_size=50, seed=seed, num_steps=10, temperature=1.0
    )


def weights(learner: MegatronLearner) -> list[np.ndarray]:
    return [p.detach().numpy().copy() for p in learner.parameters()]


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one learner, the older with other weights; not to be changed."""
    start_distributed()
    folder = tmp_path_factory.mktemp("saved")
    for step, seed in ((1, 1), (2, 2)):
        checkpoint.save(folder, step, {"actor": make(seed=seed)}, {"note": step}, keep=5)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def flip(path: Path, seed: int) -> None:
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(seed)
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)


def cut(path: Path, seed: int) -> None:
    os.truncate(path, path.stat().st_size - 1 - seed)


def remove(path: Path, seed: int) -> None:
    path.unlink()


def test_these_are_the_files_of_a_checkpoint(saved: Path) -> None:
    found = {*manifest.files(saved / "step_000002"), manifest.NAME}
    # Which of them hold tensors, and how many they are, is up to the release of Megatron-Core.
    assert {n for n in FILES if not n.endswith((".distcp", ".pt"))} <= found
    assert "actor/__0_0.distcp" in found
    assert found == {p.relative_to(saved / "step_000002").as_posix() for p in _files(saved)}
    assert (saved / "latest").read_text() == "step_000002\n"
    assert checkpoint.damage(saved / "step_000002") is None
    assert manifest.read(saved / "step_000002")["facts"] == {"step": 2, "score": None}


def _files(saved: Path) -> list[Path]:
    return [p for p in (saved / "step_000002").rglob("*") if p.is_file()]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [flip, cut, remove])
def test_damage_is_named_and_the_one_before_is_used(
    folder: Path, name: str, harm: Callable[[Path, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "step_000002" / name
    if not path.exists():
        pytest.skip(f"this release of Megatron-Core writes no {name}")
    for seed in range(5 if harm is flip else 1):
        shutil.copy(path, folder / "copy")
        harm(path, seed)
        found = checkpoint.damage(folder / "step_000002")
        assert found is not None
        assert found.startswith(f"{name} ")
        assert "\n" not in found
        shutil.copy(folder / "copy", path)
    harm(path, 7)
    with caplog.at_level(logging.WARNING, "megatron_binac"):
        got = checkpoint.newest_good(folder, set_aside=True)
    assert got == folder / "step_000001"
    (line,) = [r.getMessage() for r in caplog.records if r.name.endswith("checkpoint")]
    assert name in line
    assert "step_000002 is damaged" in line
    assert (folder / "latest").read_text() == "step_000001\n"
    assert (folder / "step_000002.damaged").is_dir()  # nothing is thrown away
    learner = make(seed=9)
    assert checkpoint.load(got, {"actor": learner})["note"] == 1
    assert equal(weights(learner), weights(make(seed=1)))


def test_a_reader_leaves_a_damaged_checkpoint_where_it_is(folder: Path) -> None:
    remove(folder / "step_000002" / "state.json", 0)
    assert checkpoint.newest_good(folder, set_aside=False) == folder / "step_000001"
    assert (folder / "step_000002").is_dir()
    for name in ("step_000001", "step_000002"):
        (folder / name / manifest.NAME).unlink(missing_ok=True)
    assert checkpoint.newest_good(folder, set_aside=False) is None


def _updated(role: str, seed: int, parallel: ParallelConfig) -> MegatronLearner:
    """A learner that has taken a step, so that its optimizer and schedule hold something."""
    made = make(parallel, seed=seed, role=role)
    rng = np.random.default_rng(seed)
    rows = [
        TrainSequence(
            ids=rng.integers(0, 50, 12).astype(np.int32),
            mask=np.arange(12) >= 2,
            advantage=float(sign),
            logprobs=np.where(np.arange(12) >= 2, -4.0, np.nan).astype(np.float32),
        )
        for sign in (1, -1, 1, 1)
    ]
    made.update(rows, LossConfig(kl_coef=0.0))
    return made


def both_roles_on_two_ranks(folder: Path) -> dict[str, Any]:
    """Two checkpoints of a pair under different layouts; then each file of the newer one is harmed
    in each way, and what is found and used is noted."""
    start_distributed()
    layouts = {"actor": ParallelConfig(tp=2), "critic": ParallelConfig(pp=2)}
    for step in (1, 2):
        pair = {role: _updated(role, step, layout) for role, layout in layouts.items()}
        state = {"cursor": {"epoch": 0, "next": step}, "seed": 7, "phase": step % 2}
        checkpoint.save(folder, step, pair, state, keep=5)
        if step == 1:
            want = {role: weights(learner) for role, learner in pair.items()}
    first = dist.get_rank() == 0
    newer = folder / "step_000002"
    names = sorted(p.relative_to(newer).as_posix() for p in newer.rglob("*") if p.is_file())
    found = {}
    for name in names:
        for harm in (flip, cut, remove):
            path, good = newer / name, (newer / name).read_bytes()
            dist.barrier()
            if first:
                harm(path, 3)
            dist.barrier()
            reason = checkpoint.damage(newer)
            used = checkpoint.newest_good(folder, set_aside=False)
            dist.barrier()
            if first:
                path.write_bytes(good)
            dist.barrier()
            found[name, harm.__name__] = (reason, used and used.name)
    whole = checkpoint.newest_good(folder, set_aside=False)
    again = {role: make(layout, seed=9, role=role) for role, layout in layouts.items()}
    state = checkpoint.load(folder / "step_000001", again)
    return {
        "names": names,
        "found": found,
        "whole": whole and whole.name,
        "state": state,
        "equal": all(equal(weights(again[role]), want[role]) for role in want),
        "updates": [learner.num_updates for learner in again.values()],
    }


@pytest.mark.slow
def test_damage_in_any_file_of_both_roles_is_named_on_every_rank(tmp_path: Path) -> None:
    """Every file there is: weights and optimizer of each rank, index, metadata, and state.json with
    the cursor and the seed that all random numbers come from (case 23)."""
    ranks = run_ranks(2, both_roles_on_two_ranks, tmp_path)
    names = ranks[0]["names"]
    for role in ("actor", "critic"):
        for wanted in (".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp"):
            assert f"{role}/{wanted}" in names
    assert {"state.json", "manifest.json"} <= set(names)
    for rank in ranks:
        assert len(rank["found"]) == 3 * len(names)
        for (name, _), (reason, used) in rank["found"].items():
            assert reason is not None and reason.startswith(f"{name} "), reason
            assert used == "step_000001"
        assert rank["whole"] == "step_000002"  # put right again, it is used again
        assert rank["equal"]  # nothing of the one before was lost
        assert rank["updates"] == [1, 1]
        assert rank["state"]["cursor"] == {"epoch": 0, "next": 1}
        assert (rank["state"]["seed"], rank["state"]["phase"]) == (7, 1)


def test_the_checkpoints_with_the_best_scores_stay(tmp_path: Path) -> None:
    start_distributed()
    learner = make()
    scores = {1: 0.3, 2: 0.9, 3: None, 4: 0.5, 5: 0.9, 6: 0.1, 7: None}
    for step, score in scores.items():
        checkpoint.save(
            tmp_path, step, {"actor": learner}, {}, keep=2, keep_best=2, score=score
        )
    # 5 and 2 have the highest scores, 6 and 7 are the newest.
    left = sorted(p.name for p in tmp_path.glob("step_*"))
    assert left == ["step_000002", "step_000005", "step_000006", "step_000007"]


# ---- written beside the training ---------------------------------------------------------------


def save_beside(folder: Path, parallel: ParallelConfig) -> dict[str, Any]:
    """A save in the background while the weights move, and one of the same weights at once."""
    start_distributed()
    learner = make(parallel)
    before = weights(learner)
    checkpoint.save(folder / "at_once", 1, {"actor": learner}, {}, keep=1)
    background = checkpoint.Background()
    checkpoint.save(folder / "beside", 1, {"actor": learner}, {}, keep=1, background=background)
    with torch.no_grad():
        for p in learner.parameters():
            p.zero_()
    there_before_it_is_settled = (folder / "beside" / "step_000001").exists()
    background.settle(wait=True)
    again = make(parallel, seed=99)
    path = checkpoint.newest_good(folder / "beside", set_aside=False)
    assert path is not None
    checkpoint.load(path, {"actor": again})
    background.settle()  # nothing is left
    return {
        "early": there_before_it_is_settled,
        "equal": equal(weights(again), before),
        "latest": (folder / "beside" / "latest").read_text(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", [ParallelConfig(), ParallelConfig(tp=2)])
def test_a_save_beside_the_training_holds_the_weights_of_its_moment(
    tmp_path: Path, layout: ParallelConfig
) -> None:
    for got in run_ranks(2, save_beside, tmp_path, layout):
        assert got == {"early": False, "equal": True, "latest": "step_000001\n"}
    listed = [
        json.loads((tmp_path / kind / "step_000001" / manifest.NAME).read_text())["body"]["files"]
        for kind in ("at_once", "beside")
    ]
    assert listed[0].keys() == listed[1].keys()


def test_settle_returns_at_once_while_the_disk_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_distributed()
    learner, background, go_on = make(), checkpoint.Background(), threading.Event()
    hash_own = checkpoint.hash_own
    start = checkpoint._start

    def slow_start(job: Any, requests: list[Any]) -> Any:
        write = requests[0].async_fn
        slow = lambda *a, **k: (go_on.wait(60), write(*a, **k))  # noqa: E731
        return start(job, [requests[0]._replace(async_fn=slow)])

    monkeypatch.setattr(checkpoint, "_start", slow_start)
    checkpoint.save(tmp_path, 1, {"actor": learner}, {}, keep=1, background=background)
    background.settle()
    assert not (tmp_path / "step_000001").exists()
    assert checkpoint.newest_good(tmp_path, set_aside=True) is None
    go_on.set()
    background.settle(wait=True)
    assert checkpoint.newest_good(tmp_path, set_aside=True) == tmp_path / "step_000001"
    assert checkpoint.hash_own is hash_own


def test_a_disk_that_fails_beside_the_training_is_heard_of_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_distributed()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    learner, background = make(), checkpoint.Background()
    checkpoint.save(tmp_path, 1, {"actor": learner}, {}, keep=1)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(filesystem_async, "open", full, raising=False)
        checkpoint.save(tmp_path, 2, {"actor": learner}, {}, keep=1, background=background)
        with pytest.raises(OSError, match="the disk is full"):
            background.settle(wait=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000001"]
    checkpoint.save(tmp_path, 2, {"actor": learner}, {}, keep=1, background=background)
    background.settle(wait=True)
    assert checkpoint.newest_good(tmp_path, set_aside=True) == tmp_path / "step_000002"
