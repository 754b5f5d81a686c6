"""The cached supervised start: made once, keyed by what decides it, apart from the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_ranks import Job
from helpers_toy import Xor

from megatron_binac import recipes
from megatron_binac.config import (
    Config,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RoleConfig,
    RoleWarmStart,
    WarmStartConfig,
    override,
)
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import start_distributed
from megatron_binac.seeds import name_seed
from megatron_binac.tasks import build_task
from megatron_binac.training import setup
from megatron_binac.training.warm_start import _sequence, cache_key

MODEL = ModelConfig(num_layers=1, hidden_size=32, ffn_hidden_size=48, max_sequence_length=40)
SCHEDULE = RoleWarmStart(steps=6, batch=8, lr=1e-2, warmup_steps=2, stop_loss=0.0)


def tiny(cache: Path, **warm: Any) -> Config:
    base = recipes.get("quickstart")
    role = RoleConfig(model=MODEL, loss=LossConfig(kl_coef=0.0))
    settings = {"actor": SCHEDULE, "critic": RoleWarmStart(steps=0), **warm}
    return replace(
        base,
        actor=role,
        critic=role,
        warm_start=WarmStartConfig(cache_dir=str(cache), **settings),
    )


def build(config: Config, run_dir: Path) -> MegatronLearner:
    start_distributed()
    learners, _ = setup.build_players(config, run_dir)
    return learners["actor"]


def weights(learner: MegatronLearner) -> list[np.ndarray]:
    return [p.detach().numpy().copy() for p in learner.parameters()]


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of supervised steps so far, one entry a learner."""
    counts: dict[int, int] = {}
    kept: list[MegatronLearner] = []  # so that no id comes again
    supervise = MegatronLearner.supervise
    seen: list[int] = []

    def counting(self: MegatronLearner, sequences: list) -> dict[str, float]:
        counts[id(self)] = counts.get(id(self), 0) + 1
        kept.append(self)
        seen[:] = counts.values()
        return supervise(self, sequences)

    monkeypatch.setattr(MegatronLearner, "supervise", counting)
    yield seen


def test_it_is_made_once_and_then_read(tmp_path: Path, taught: list[int]) -> None:
    config = tiny(tmp_path / "cache")
    first = build(config, tmp_path / "a")
    assert taught == [6]
    second = build(replace(config, seed=5, num_steps=3), tmp_path / "b")
    assert taught == [6]
    assert equal(weights(first), weights(second))
    (name,) = (p.name for p in (tmp_path / "cache").iterdir() if not p.name.startswith("."))
    assert name.startswith("actor-")


def test_the_same_start_is_made_again_bit_for_bit(tmp_path: Path) -> None:
    a = build(tiny(tmp_path / "one"), tmp_path / "a")
    b = build(tiny(tmp_path / "two"), tmp_path / "b")
    assert equal(weights(a), weights(b))


def test_it_teaches_and_leaves_the_runs_optimizer_new(tmp_path: Path) -> None:
    cold = tiny(tmp_path / "cache", actor=RoleWarmStart(steps=0))
    fresh, warm = build(cold, tmp_path / "a"), build(tiny(tmp_path / "cache"), tmp_path / "b")
    assert not equal(weights(fresh), weights(warm))
    task = build_task("checksum", **cold.task.options)
    _, players = setup.build_players(cold, tmp_path / "a")
    rows = [_sequence("actor", i, task, players.template) for i in range(1000, 1016)]
    scores = [
        np.mean(np.concatenate([x[r.mask] for x, r in zip(one.logprobs(rows), rows, strict=True)]))
        for one in (fresh, warm)
    ]
    assert scores[1] > scores[0] + 1.0
    assert warm.num_updates == 0
    # A first update from the same weights is the same, whether they were warmed up or put there.
    before = warm.snapshot()
    first = warm.supervise(rows)
    again = build(cold, tmp_path / "c")
    again._swap(before)
    again.optimizer.reload_model_params()
    assert again.supervise(rows) == first


def test_only_what_the_role_says_is_learned(tmp_path: Path) -> None:
    _, players = setup.build_players(tiny(tmp_path / "cache", actor=RoleWarmStart()), tmp_path)
    task = build_task("checksum")
    for role in ("actor", "critic"):
        for index in range(8):
            row = _sequence(role, index, task, players.template)
            said = players.tokenizer.decode([int(i) for i in row.ids[row.mask]])
            targets = [s.text for s in task.supervised(role, index) if s.is_target]
            assert said == "".join(f"{text}<|end|>" for text in targets)
            assert not row.mask[0]


def test_it_stops_at_its_loss(tmp_path: Path, taught: list[int]) -> None:
    build(tiny(tmp_path / "cache", actor=replace(SCHEDULE, stop_loss=100.0)), tmp_path / "a")
    assert taught == [5]  # the mean of five steps is below


Script = Callable[[Callable[[int, int], float]], tuple[dict[int, list[int]], list[MegatronLearner]]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """`script(loss)` lets weights be taught, but losses come from `loss(try, step)`. It gives what
    each try was taught, a hash of each batch's second row, and the learners that were taught."""

    def install(
        loss: Callable[[int, int], float],
    ) -> tuple[dict[int, list[int]], list[MegatronLearner]]:
        taught: dict[int, list[int]] = {}
        learners: list[MegatronLearner] = []  # kept, so that no id comes again
        supervise = MegatronLearner.supervise

        def scripted(self: MegatronLearner, rows: list) -> dict[str, float]:
            if id(self) not in taught:
                taught[id(self)] = []
                learners.append(self)
            taught[id(self)].append(hash(tuple(rows[1].ids.tolist())))
            supervise(self, rows)
            return {"loss": loss(list(taught).index(id(self)), len(taught[id(self)]))}

        monkeypatch.setattr(MegatronLearner, "supervise", scripted)
        return taught, learners

    return install


PATIENT = replace(SCHEDULE, steps=20, batch=2, stop_loss=0.1)


def own(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What this package said: Megatron-Core has warnings of its own."""
    return [r for r in caplog.records if r.name.startswith("megatron_binac")]


def test_a_start_on_a_plateau_is_given_up_for_another(
    tmp_path: Path, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """Tries 1 and 2 stay at 0.5; the third one learns. Mean of five steps, stop_loss 0.1."""
    tries, learners = script(lambda number, step: 0.5 if number < 2 or step < 4 else 0.01)
    with caplog.at_level(logging.INFO, "megatron_binac"):
        got = build(tiny(tmp_path / "cache", actor=PATIENT), tmp_path / "a")
    # 3/4 of 20 steps, then half of them; then the first mean of (.5, .01 x 4) or less: step 8.
    assert [len(steps) for steps in tries.values()] == [15, 10, 8]
    taught = list(tries.values())
    assert len({*taught[0], *taught[1], *taught[2]}) > 25  # each try has examples of its own
    starts = [weights(learner) for learner in learners]
    assert equal(weights(got), starts[2])
    assert not equal(starts[0], starts[1])
    said = [r.getMessage() for r in own(caplog)]
    assert sum("given up" in text for text in said) == 2
    assert "try 1 of 4 is given up at step 15/20, loss 0.500" in " ".join(said)
    assert not [r for r in own(caplog) if r.levelno >= logging.WARNING]
    again = build(tiny(tmp_path / "cache", actor=PATIENT), tmp_path / "b")
    assert equal(weights(again), starts[2])


def test_where_no_start_gets_there_the_best_one_is_taken_with_a_warning(
    tmp_path: Path, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    tries, learners = script(lambda number, step: (0.7, 0.5, 0.6, 0.8)[number])
    with caplog.at_level(logging.WARNING, "megatron_binac"):
        got = build(tiny(tmp_path / "cache", actor=PATIENT), tmp_path / "a")
    assert [len(steps) for steps in tries.values()] == [15, 10, 10, 10]
    assert equal(weights(got), weights(learners[1]))
    (warning,) = [r.getMessage() for r in own(caplog)]
    assert "none of 4 tries came to loss 0.1; the best stands at 0.500" in warning
    assert "warm_start.actor.steps (now 20)" in warning


def test_a_slow_start_that_is_near_its_loss_may_use_all_steps(
    tmp_path: Path, script: Script
) -> None:
    """From 0.5 to under three times stop_loss at step 15: it is let go on, to step 19."""
    tries, _ = script(lambda number, step: 0.5 if step < 10 else 0.25 if step < 15 else 0.05)
    build(tiny(tmp_path / "cache", actor=PATIENT), tmp_path / "a")
    assert [len(steps) for steps in tries.values()] == [18]


def test_the_first_try_is_the_start_of_the_seed(tmp_path: Path) -> None:
    """The start that gets to its loss at once, against one that is taught here, step by step."""
    config = tiny(tmp_path / "cache", actor=replace(SCHEDULE, stop_loss=100.0))
    got = build(config, tmp_path / "a")
    _, players = setup.build_players(tiny(tmp_path, actor=RoleWarmStart(steps=0)), tmp_path / "b")
    task = build_task("checksum", **config.task.options)
    by_hand = MegatronLearner(
        "actor",
        replace(config.actor, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2)),
        got.groups,
        vocab_size=players.tokenizer.vocab_size,
        seed=name_seed(config.warm_start.seed, "actor", "weights"),
        num_steps=6,
        temperature=1.0,
    )
    for step in range(5):
        batch = range(8 * step, 8 * step + 8)
        by_hand.supervise([_sequence("actor", i, task, players.template) for i in batch])
    assert equal(weights(got), weights(by_hand))


def test_no_steps_leave_fresh_weights_and_no_cache(tmp_path: Path, taught: list[int]) -> None:
    build(tiny(tmp_path / "cache", actor=RoleWarmStart(steps=0)), tmp_path / "a")
    assert taught == []
    assert not (tmp_path / "cache").exists()


def test_what_a_kill_left_is_made_anew(tmp_path: Path, taught: list[int]) -> None:
    config = tiny(tmp_path / "cache")
    first = build(config, tmp_path / "a")
    (made,) = (p for p in (tmp_path / "cache").iterdir() if not p.name.startswith("."))
    draft = made.with_name(f".{made.name}.draft")
    made.rename(draft)
    next((draft / "actor").iterdir()).unlink()
    second = build(config, tmp_path / "b")
    assert taught == [6, 6]
    assert equal(weights(first), weights(second))
    assert not draft.exists()


def test_the_key_is_of_what_decides_the_weights(tmp_path: Path) -> None:
    base = tiny(tmp_path)
    _, players = setup.build_players(tiny(tmp_path, actor=RoleWarmStart(steps=0)), tmp_path / "run")

    def key(config: Config) -> str:
        return cache_key(config, "actor", config.actor, players.tokenizer)

    other = [
        "warm_start.actor.steps=7", "warm_start.actor.batch=9", "warm_start.actor.lr=0.02",
        "warm_start.actor.warmup_steps=3", "warm_start.seed=2", "actor.model.num_layers=2",
        "actor.model.tied_head=true", "actor.precision=bf16", "task.options.num_digits=4",
        "task.vocab_size=400",
    ]  # fmt: skip
    alike = [
        "seed=2", "num_steps=7", "actor.optimizer.lr=0.1", "actor.loss.kl_coef=0.2",
        "actor.parallel.tp=2", "actor.train=false", "rollout.attempts=9", "bilevel.lam=0.5",
        "warm_start.critic.steps=9", "critic.model.num_layers=2",
        "actor.max_tokens_per_micro_batch=64",
    ]  # fmt: skip
    keys = {change: key(override(base, [change])) for change in other + alike}
    assert len({key(base), *(keys[c] for c in other)}) == len(other) + 1
    assert {keys[c] for c in alike} == {key(base)}
    critic = cache_key(base, "critic", base.actor, players.tokenizer)
    assert critic.startswith("critic-")


def test_a_task_that_teaches_nothing_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_distributed()
    monkeypatch.setattr(setup, "build_task", lambda name, **options: Xor())
    monkeypatch.setattr(setup, "corpus", lambda task, num: ["0 1"])
    with pytest.raises(ValueError, match=r"task xor offers no .*set warm_start.actor.steps=0"):
        setup.build_players(tiny(tmp_path / "cache"), tmp_path / "run")


def warm_rank(cache: Path, run_dir: Path, parallel: ParallelConfig) -> tuple[int, float]:
    """Steps that this job made, and a sum over the weights it ends with."""
    made = []
    supervise = MegatronLearner.supervise
    MegatronLearner.supervise = lambda *a: made.append(1) or supervise(*a)
    config = tiny(cache)
    config = replace(config, actor=replace(config.actor, parallel=parallel))
    start_distributed()
    learners, _ = setup.build_players(config, run_dir)
    total = learners["actor"].logprobs([_probe()])[0].sum()
    return len(made), float(total)


def _probe() -> Any:
    from megatron_binac.types import TrainSequence

    return TrainSequence(ids=np.arange(10, dtype=np.int32), mask=np.arange(10) > 0)


@pytest.mark.slow
def test_two_jobs_at_once_make_it_once_and_layouts_share_it(tmp_path: Path) -> None:
    jobs = [
        Job(1, warm_rank, tmp_path / "cache", tmp_path / name, ParallelConfig()) for name in "ab"
    ]
    first, second = (job.wait(200)[0] for job in jobs)
    assert sorted([first[0], second[0]]) == [0, 6]
    assert first[1] == second[1]
    split = Job(2, warm_rank, tmp_path / "cache", tmp_path / "c", ParallelConfig(tp=2)).wait(200)
    for made, total in split:
        assert made == 0
        assert total == pytest.approx(first[1], abs=1e-4)
