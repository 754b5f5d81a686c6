"""Checkpoints: the next step after a load is the step that would have come, under any layout."""

from __future__ import annotations

import errno
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers_ranks import run_ranks

from megatron_binac.config import (
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RoleConfig,
)
from megatron_binac.models import checkpoint
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.types import TrainSequence

VOCAB = 50
LAYOUTS = {
    "dp": ParallelConfig(),
    "tp": ParallelConfig(tp=2),
    "sp": ParallelConfig(tp=2, sequence_parallel=True),
    "pp": ParallelConfig(pp=2),
    "vpp": ParallelConfig(pp=2, vpp=2),
}
ACROSS = [
    *(("one", target) for target in LAYOUTS),
    *(("dp", "tp"), ("tp", "pp"), ("pp", "dp"), ("sp", "vpp"), ("vpp", "sp")),
]
"""(saved under, loaded under)."""


def make(
    parallel: ParallelConfig,
    *,
    seed: int = 1,
    role: str = "actor",
    distributed: bool = True,
    train: bool = True,
    tied_head: bool = False,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> MegatronLearner:
    config = RoleConfig(
        model=ModelConfig(
            num_layers=4,
            hidden_size=32,
            ffn_hidden_size=48,
            max_sequence_length=32,
            tied_head=tied_head,
            init_std=0.15,
        ),
        parallel=parallel,
        # A large eps keeps Adam from blowing rounding up, so that layouts can be compared.
        optimizer=OptimizerConfig(
            lr=1e-2, eps=1e-2, warmup_steps=8, weight_decay=0.1, distributed=distributed
        ),
        train=train,
        precision=precision,
    )
    groups = build_groups(role, parallel, 1)
    return MegatronLearner(
        role, config, groups, vocab_size=VOCAB, seed=seed, num_steps=10, temperature=1.0
    )


def batch(number: int) -> list[TrainSequence]:
    rng = np.random.default_rng(number)
    out = []
    for _ in range(9):
        length = int(rng.integers(4, 30))
        mask = np.arange(length) >= 2
        out.append(
            TrainSequence(
                ids=rng.integers(0, VOCAB, length).astype(np.int32),
                mask=mask,
                advantage=float(rng.normal()),
                logprobs=np.where(mask, -4.0, np.nan).astype(np.float32),
            )
        )
    return out


def steps(learner: MegatronLearner, first: int, num: int) -> list[dict[str, float]]:
    return [learner.update(batch(first + i), LossConfig(kl_coef=0.0)) for i in range(num)]


def weights(learner: MegatronLearner) -> list[np.ndarray]:
    return [p.detach().float().numpy().copy() for p in learner.parameters()]


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def save_and_go_on(folder: Path, name: str, parallel: ParallelConfig, **options: Any) -> dict:
    """Two steps, a save, and two steps more; the state beside the weights says how they went."""
    learner = make(parallel, **options)
    steps(learner, 0, 2)
    path = checkpoint.save(folder / name, 2, {"actor": learner}, {"note": name}, keep=1)
    return {"path": path, "steps": steps(learner, 2, 2), "weights": weights(learner)}


def load_and_go_on(path: Path, parallel: ParallelConfig, **options: Any) -> dict:
    """The same two steps from the checkpoint, by a learner that began with other weights."""
    learner = make(parallel, seed=99, **options)
    state = checkpoint.load(path, {"actor": learner})
    assert learner.num_updates == 2
    return {"state": state, "steps": steps(learner, 2, 2), "weights": weights(learner)}


def in_one(folder: Path, saved_by_two: list[Path] | None) -> dict[str, Any]:
    """One process: save, load what it saved, and load what two processes saved."""
    start_distributed()
    if saved_by_two is None:
        return {"saved": save_and_go_on(folder, "one", ParallelConfig())}
    paths = [folder / "one" / "step_000002", *saved_by_two]
    return {path.parent.name: load_and_go_on(path, ParallelConfig()) for path in paths}


def in_two(folder: Path) -> dict[str, Any]:
    """Two processes: save under each layout, and load under each what any layout saved."""
    start_distributed()
    saved = {name: save_and_go_on(folder, name, layout) for name, layout in LAYOUTS.items()}
    loaded = {
        (source, target): load_and_go_on(folder / source / "step_000002", LAYOUTS[target])
        for source, target in (*ACROSS, *((name, name) for name in LAYOUTS))
    }
    whole = make(ParallelConfig(), distributed=False)
    steps(whole, 0, 2)
    path = checkpoint.save(folder / "whole", 2, {"actor": whole}, {}, keep=1)
    want = steps(whole, 2, 2)
    assert load_and_go_on(path, ParallelConfig(), distributed=False)["steps"] == want
    return {"saved": saved, "loaded": loaded}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved_alone(folder: Path) -> dict[str, Any]:
    return run_ranks(1, in_one, folder, None)[0]["saved"]


@pytest.fixture(scope="module")
def ranks(folder: Path, saved_alone: dict[str, Any]) -> list[dict[str, Any]]:
    return run_ranks(2, in_two, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_next_step_is_bit_equal_under_the_same_layout(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        want, got = rank["saved"][name], rank["loaded"][name, name]
        assert got["steps"] == want["steps"]
        assert equal(got["weights"], want["weights"])
        assert got["state"]["note"] == name
        assert got["state"]["step"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), ACROSS)
def test_the_next_steps_agree_across_layouts(
    source: str, target: str, saved_alone: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    """Weights, optimizer and schedule, read under another TP x PP x DP (case 25)."""
    got = [rank["loaded"][source, target]["steps"] for rank in ranks]
    assert got[0] == got[1]
    same_steps(got[0], saved_alone["steps"])


def same_steps(got: list[dict[str, float]], want: list[dict[str, float]]) -> None:
    for a, b in zip(got, want, strict=True):
        for key in ("loss", "grad_norm", "entropy", "mismatch"):
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), key
        assert a["lr"] == b["lr"]


@pytest.mark.slow
def test_one_process_goes_on_from_any_layout(
    folder: Path, saved_alone: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    paths = [rank["path"] for rank in ranks[0]["saved"].values()]
    loaded = run_ranks(1, in_one, folder, paths)[0]
    assert set(loaded) == {"one", *LAYOUTS}
    for got in loaded.values():
        same_steps(got["steps"], saved_alone["steps"])
    assert loaded["one"]["steps"] == saved_alone["steps"]
    assert equal(loaded["one"]["weights"], saved_alone["weights"])


# The rest in this process, and disks that fill up.


def names(folder: Path) -> list[str]:
    """Everything beside the file that names the newest."""
    return sorted(p.name for p in folder.iterdir() if p.name != checkpoint.LATEST)


def test_the_newest_checkpoints_and_the_first_are_kept(tmp_path: Path) -> None:
    start_distributed()
    learner = make(ParallelConfig(), train=False)
    for step in (0, 1, 2, 3):
        checkpoint.save(tmp_path, step, {"actor": learner}, {}, keep=2)
    assert names(tmp_path) == ["step_000000", "step_000002", "step_000003"]


def test_a_role_is_saved_twice_and_the_later_one_counts(tmp_path: Path) -> None:
    start_distributed()
    learner = make(ParallelConfig(), train=False)
    checkpoint.save(tmp_path, 1, {"actor": learner}, {"mark": "old"}, keep=2)
    with torch.no_grad():
        for p in learner.parameters():
            p.add_(1.0)
    path = checkpoint.save(tmp_path, 1, {"actor": learner}, {"mark": "new"}, keep=2)
    assert names(tmp_path) == ["step_000001"]
    other = make(ParallelConfig(), seed=99, train=False)
    assert checkpoint.load(path, {"actor": other})["mark"] == "new"
    assert equal(weights(other), weights(learner))


def test_both_roles_come_back_each_with_its_own(tmp_path: Path) -> None:
    start_distributed()
    actor, critic = make(ParallelConfig()), make(ParallelConfig(), seed=2, role="critic")
    steps(actor, 0, 2)
    steps(critic, 5, 1)
    path = checkpoint.save(tmp_path, 3, {"actor": actor, "critic": critic}, {}, keep=1)
    again = {
        "actor": make(ParallelConfig(), seed=98),
        "critic": make(ParallelConfig(), seed=99, role="critic"),
    }
    checkpoint.load(path, again)
    assert (again["actor"].num_updates, again["critic"].num_updates) == (2, 1)
    assert equal(weights(again["actor"]), weights(actor))
    assert equal(weights(again["critic"]), weights(critic))
    assert steps(again["actor"], 2, 1) == steps(actor, 2, 1)
    assert steps(again["critic"], 6, 1) == steps(critic, 6, 1)


@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [True, False])
def test_every_optimizer_comes_back_also_before_its_first_step(
    tmp_path: Path, distributed: bool, precision: Literal["fp32", "bf16"], done: int
) -> None:
    start_distributed()
    learner = make(ParallelConfig(), distributed=distributed, precision=precision)
    steps(learner, 0, done)
    path = checkpoint.save(tmp_path, done, {"actor": learner}, {}, keep=1)
    again = make(ParallelConfig(), seed=99, distributed=distributed, precision=precision)
    steps(again, 7, 1)  # moments and a schedule of its own, which must go
    checkpoint.load(path, {"actor": again})
    assert steps(again, done, 2) == steps(learner, done, 2)
    assert equal(weights(again), weights(learner))


def test_weights_alone_leave_the_optimizer_as_it_was(tmp_path: Path) -> None:
    start_distributed()
    source = make(ParallelConfig(), seed=5, tied_head=True)
    checkpoint.save_learner(tmp_path / "weights", source, with_optimizer=False)
    learner, fresh = (make(ParallelConfig(), seed=s, tied_head=True) for s in (6, 5))
    checkpoint.load_learner(tmp_path / "weights", learner, weights_only=True)
    assert equal(weights(learner), weights(source))
    assert steps(learner, 0, 2) == steps(fresh, 0, 2)


def test_a_kill_amid_deleting_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_distributed()
    learner = make(ParallelConfig(), train=False)
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"actor": learner}, {}, keep=2)

    def killed(path: Path, **kwargs: Any) -> None:
        if path.exists():
            (path / "state.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoint.shutil, "rmtree", killed)
        checkpoint.save(tmp_path, 3, {"actor": learner}, {}, keep=2)
    assert names(tmp_path) == [".step_000001.old.draft", "step_000002", "step_000003"]
    assert all((tmp_path / n / "state.json").exists() for n in names(tmp_path)[1:])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MiB: one checkpoint of these tests and a half."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fill_the_disk(folder: Path, free_bytes: int | None) -> list[dict[str, Any]]:
    """Save, leave so little room (None: as it is), and save again; what the second save says."""
    start_distributed()
    learner = make(ParallelConfig())
    steps(learner, 0, 1)
    checkpoint.save(folder, 1, {"actor": learner}, {}, keep=5)
    if free_bytes is not None:
        # Behind the back of the first check, as another program would.
        checkpoint._num_bytes = lambda learners: 0
        if dist.get_rank() == 0:
            free = checkpoint.shutil.disk_usage(folder).free
            (folder / "ballast").write_bytes(b"x" * max(0, free - free_bytes))
        dist.barrier()
    out: dict[str, Any] = {}
    try:
        checkpoint.save(folder, 2, {"actor": learner}, {}, keep=5)
    except OSError as error:
        out = {"errno": error.errno, "says": error.strerror}
    except RuntimeError as error:  # the other rank has gone
        out = {"errno": None, "says": str(error)}
    if out["errno"] is None:
        return out
    left = names(folder)
    if dist.get_world_size() == 1:
        again = make(ParallelConfig(), seed=99)
        checkpoint.load(folder / "step_000001", {"actor": again})
        out["whole"] = equal(weights(again), weights(learner))
    return {**out, "left": left}


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_disk_without_room_is_seen_before_anything_is_written(
    small_disk: Path, world: int
) -> None:
    for got in run_ranks(world, fill_the_disk, small_disk, None, timeout=300):
        assert got["errno"] == errno.ENOSPC
        assert "step_000002 could not be written" in got["says"]
        assert "MiB are free, about" in got["says"]
        assert "binac train --resume" in got["says"]
        assert got["left"] == ["step_000001"]
        assert got.get("whole", True)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("free_kib", [0, 30, 200])
def test_a_disk_that_fills_up_amid_a_save_leaves_the_last_checkpoint_whole(
    small_disk: Path, world: int, free_kib: int
) -> None:
    """At the folder, at the small files of one rank, and at the tensors of all."""
    answers = run_ranks(world, fill_the_disk, small_disk, free_kib * 1024, timeout=300)
    got = answers[0]
    assert got["errno"] == errno.ENOSPC
    assert "step_000002 could not be written: " in got["says"]
    assert "the disk is full" in got["says"]
    assert got["left"] == ["ballast", "step_000001"]
    assert got.get("whole", True)


FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")
UNNAMED = RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")


def one_rank_fails(
    folder: Path, failing: int, error: Exception
) -> tuple[int | None, str, list[str]]:
    """The writer of one rank meets an error of the disk; afterwards the disk is well again."""
    start_distributed()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    learner = make(ParallelConfig(tp=2))  # so that both have something to write
    steps(learner, 0, 1)
    checkpoint.save(folder, 1, {"actor": learner}, {}, keep=5)

    def fail(*args: Any) -> None:
        raise error

    if dist.get_rank() == failing:
        filesystem_async.open = fail
    caught = None
    try:
        checkpoint.save(folder, 2, {"actor": learner}, {}, keep=5)
    except OSError as error:
        caught = error
    assert caught is not None
    dist.barrier()
    left = names(folder)
    if dist.get_rank() == failing:
        del filesystem_async.open
    dist.barrier()
    checkpoint.save(folder, 2, {"actor": learner}, {}, keep=5)
    return caught.errno, str(caught.strerror), left


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [FULL, BROKEN, UNNAMED], ids=["full", "broken", "unnamed"])
def test_every_rank_hears_of_the_writer_that_failed_and_why(
    tmp_path: Path, failing: int, error: Exception
) -> None:
    """A failure that names no reason is none of room where the disk has some."""
    for number, says, left in run_ranks(2, one_rank_fails, tmp_path, failing, error, timeout=300):
        assert number == (errno.ENOSPC if error is FULL else errno.EIO)
        assert str(error) in says
        assert ("the disk is full" in says) == (error is FULL)
        assert ("free some space and go on" in says) == (error is FULL)
        assert left == ["step_000001"]
    assert names(tmp_path) == ["step_000001", "step_000002"]
    assert json.loads((tmp_path / "step_000002" / "state.json").read_text())["step"] == 2
