"""The loop with tiny learners: who is asked what and when, what is written, and a golden curve."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_toy import ZERO, Toy, Xor, toy_config, toy_run

from megatron_binac.config import BilevelConfig, Config, EvalConfig
from megatron_binac.method_config import CollapseConfig
from megatron_binac.planner.shapes import Shape
from megatron_binac.rollout.scripted_engine import Script, ScriptedEngine
from megatron_binac.training.loop import CriticCollapse, train
from megatron_binac.types import Grade, Prompt, Sampling

GOLDEN = Path(__file__).parents[1] / "golden" / "loop_toy.json"
CURVES = (
    "play/acc_t1", "play/acc_t2", "play/reward", "play/generated_tokens", "actor/follow/grad_norm",
    "actor/follow/num_tokens", "critic/lead/grad_norm", "critic/lead/value", "critic/lead/gap",
    "eval/sampled/acc_t2", "eval/greedy/acc_t2",
)  # fmt: skip
LENGTHS = {4: "attempt", 7: "feedback", 10: "revision"}
"""Ids of a context of the toy task, where every turn is one character."""


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(run_dir)]


def small(**changes: Any) -> Config:
    """A few steps, evaluated on two problems."""
    return toy_config(**{"num_steps": 4, "eval": EvalConfig(num_prompts=2), **changes})


def bilevel(k: int = 1, lam: float = 0.1) -> BilevelConfig:
    return BilevelConfig(lam=lam, actor_steps_per_critic_step=k)


def test_the_golden_curve(tmp_path: Path) -> None:
    """20 steps by number; BINAC_WRITE_GOLDEN=1 writes them anew, for a change on purpose."""
    config = toy_config(bilevel=bilevel(k=2), eval=EvalConfig(every=5, num_prompts=16))
    assert train(toy_run(tmp_path, config).run)
    found = [{key: row[key] for key in ("step", *CURVES) if key in row} for row in rows(tmp_path)]
    if os.environ.get("BINAC_WRITE_GOLDEN"):
        GOLDEN.write_text("\n".join(map(json.dumps, found)) + "\n")
    want = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    assert [r["step"] for r in found] == [r["step"] for r in want] == list(range(-1, 20))
    for got, expected in zip(found, want, strict=True):
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-9), f"step {got['step']}"


def test_the_actor_learns_to_follow_and_the_critic_to_lead(tmp_path: Path) -> None:
    """What feedback gains goes up, though the actor alone can't do better than chance."""
    toy = toy_run(tmp_path, toy_config(num_steps=30, eval=EvalConfig(num_prompts=32)))
    train(toy.run)
    found = rows(tmp_path)
    early, late = found[1:6], found[-5:]
    gain = {
        name: np.mean([r["play/acc_t2"] - r["play/acc_t1"] for r in part])
        for name, part in (("early", early), ("late", late))
    }
    assert gain["late"] > gain["early"] + 0.2
    assert found[-1]["eval/greedy/acc_t2"] == 1.0
    assert found[-1]["eval/greedy/acc_t1"] < 0.8
    assert found[-1]["eval/greedy/uplift_over_shuffled"] > 0.3


TINY = Shape(num_layers=1, hidden=4, ffn=6, heads=2, kv_heads=2, head_dim=2, vocab=8)


def flops(row: dict[str, Any]) -> dict[str, int]:
    return {key: value for key, value in row.items() if key.endswith("/flops")}


def test_flops_of_a_step_by_role_and_phase_by_hand(tmp_path: Path) -> None:
    """One prompt, one answer to everything: three prompts are read, of 4, 7 and 10 ids."""
    config = small(num_steps=2, bilevel=bilevel(k=2))
    config = replace(config, rollout=replace(config.rollout, prompts_per_step=1))
    toy = toy_run(
        tmp_path,
        config,
        actor_script=lambda own: lambda prompt, seed, sampling: ([ZERO], [-1.0]),
        critic_script=lambda own: lambda prompt, seed, sampling: ([ZERO], [-1.0]),
    )
    toy.actor.shape = toy.critic.shape = TINY
    train(toy.run)
    # A token meets 4 * 16 + 3 * 24 = 136 weights, a pair costs 16, a scored token 2 * 8 * 4.
    # Prompts of n ids have n (n + 1) / 2 pairs; an answer of one token is not read.
    attempt, feedback, revision = (2 * n * 136 + 16 * n * (n + 1) // 2 + 64 for n in (4, 7, 10))
    start, first, second = untimed(tmp_path)
    assert flops(start) == {}
    # Where all answers are one, there is nothing to learn. What an evaluation scored before the
    # first step (the toy counts 1000 a time) is nowhere.
    play = {"actor/play/flops": attempt + revision, "critic/play/flops": feedback}
    assert flops(first) == play
    assert flops(second) == {**play, "actor/probe/flops": revision}


def test_flops_of_learning_are_the_learners_own(tmp_path: Path) -> None:
    toy = toy_run(tmp_path, small(bilevel=bilevel(k=2)))
    toy.actor.shape = toy.critic.shape = TINY
    train(toy.run)
    for row in untimed(tmp_path)[1:]:
        assert row["actor/follow/flops"] == 1_000_000
        assert row.get("critic/lead/flops", 0) == 1_000_000 * (row["step"] % 2)


def test_two_runs_are_equal_and_another_seed_is_not(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(toy_run(tmp_path / name, small(seed=seed)).run)
    a, b, c = (untimed(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c


def calls(toy: Toy) -> list[tuple[str, str, int]]:
    """(who, which turn, how many) of every request to an engine, the evaluations left out."""
    out: list[tuple[str, str, int]] = []
    players = toy.run.players
    for who, engine in (("actor", players.actor), ("critic", players.critic)):
        assert isinstance(engine, ScriptedEngine)
        out += [(who, LENGTHS[len(prompts[0])], len(prompts)) for prompts, _, _ in engine.asked]
    return out


def no_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_binac.training.loop.evaluate", lambda players, config, score: {})


def test_a_step_is_play_follow_probe_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_eval(monkeypatch)
    toy = toy_run(tmp_path, small(num_steps=2))
    train(toy.run)
    # 4 prompts, 4 attempts, 2 criticised, 3 feedbacks, 2 revisions; the probe asks for 48 again.
    step = [("actor", "attempt", 16), ("actor", "revision", 48), ("actor", "revision", 48)]
    assert calls(toy) == [*step, *step, ("critic", "feedback", 24), ("critic", "feedback", 24)]
    assert (toy.actor.num_updates, toy.critic.num_updates) == (2, 2)
    assert [r.get("play/generated_tokens") for r in rows(tmp_path)] == [None, 136, 136]


def test_a_block_of_k_steps_probes_its_first_feedback_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_eval(monkeypatch)
    toy = toy_run(tmp_path, small(num_steps=5, bilevel=bilevel(k=2)))
    train(toy.run)
    assert (toy.actor.num_updates, toy.critic.num_updates) == (5, 2)
    led = [r["step"] for r in rows(tmp_path) if "critic/lead/grad_norm" in r]
    assert led == [1, 3]
    engine = toy.run.players.actor
    assert isinstance(engine, ScriptedEngine)
    revisions = [(p, s) for p, s, _ in engine.asked if len(p[0]) == 10]
    # Steps 0, 1, probe of 0, 2, 3, probe of 2, 4.
    assert len(revisions) == 7
    for first, probe in ((0, 2), (3, 5)):
        assert revisions[probe][1] == revisions[first][1]
        for a, b in zip(revisions[probe][0], revisions[first][0], strict=True):
            np.testing.assert_array_equal(a, b)


def test_versions_are_the_numbers_of_updates(tmp_path: Path) -> None:
    toy = toy_run(tmp_path, small(num_steps=3, bilevel=bilevel(k=2), save_every=1))
    train(toy.run)
    assert toy.run.players.actor.version == 3
    assert toy.run.players.critic is not None
    assert toy.run.players.critic.version == 1
    (tree, *_) = toy.saved[3]["block"]  # step 2 opens a block and was played after two updates
    assert {t.version for t in tree.attempts + tree.turns("revision")} == {2}
    assert {t.version for t in tree.turns("feedback")} == {1}


def test_lambda_zero_needs_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_eval(monkeypatch)
    toy = toy_run(tmp_path, small(num_steps=1, bilevel=bilevel(lam=0.0)))
    train(toy.run)
    assert [c for c in calls(toy) if c[1] == "revision"] == [("actor", "revision", 48)]
    assert toy.critic.num_updates == 1
    assert rows(tmp_path)[1]["critic/lead/gap"] == 0.0


def test_a_frozen_role_is_not_updated(tmp_path: Path) -> None:
    base = small()
    assert base.critic is not None
    for role in ("actor", "critic"):
        frozen = replace(base, **{role: replace(getattr(base, role), train=False)})
        toy = toy_run(tmp_path / role, frozen)
        start = getattr(toy, role).weights.clone()
        train(toy.run)
        assert torch.equal(getattr(toy, role).weights, start)
        assert getattr(toy, role).num_updates == 0
        other = toy.critic if role == "actor" else toy.actor
        assert other.num_updates == 4


def test_plain_rl_never_asks_the_critic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_eval(monkeypatch)
    config = small(rollout=replace(toy_config().rollout, criticised=0))
    toy = toy_run(tmp_path, config)
    train(toy.run)
    assert calls(toy) == [("actor", "attempt", 16)] * 4
    assert toy.critic.num_updates == 0
    assert "play/acc_t2" not in rows(tmp_path)[-1]


def failing_now_and_then(script: Script) -> Script:
    def wrapped(prompt: np.ndarray, seed: int, sampling: Sampling) -> tuple[Any, Any] | None:
        return None if seed % 4 == 0 else script(prompt, seed, sampling)

    return wrapped


def test_failures_do_not_sink_a_step(tmp_path: Path) -> None:
    toy = toy_run(
        tmp_path,
        small(),
        actor_script=failing_now_and_then,
        critic_script=failing_now_and_then,
        task=Xor(breaks_on="?"),
    )
    assert train(toy.run)
    for row in rows(tmp_path)[1:]:
        assert row["actor/follow/num_failed"] > 0
        assert 0 <= row["play/acc_t1"] <= 1
        assert row["actor/follow/num_tokens"] > 0


@pytest.mark.parametrize("what", ["nothing comes back", "all alike", "the verifier is down"])
def test_a_step_without_a_signal_moves_nothing(what: str, tmp_path: Path) -> None:
    wrap: Callable[[Script], Script] = {
        "nothing comes back": lambda script: lambda *_: None,
        "all alike": lambda script: lambda *_: ([7], [-0.1]),
        "the verifier is down": lambda script: script,
    }[what]

    class Down(Xor):
        def grade(self, prompt: Prompt, text: str) -> Grade:
            raise RuntimeError("no verifier")

    task = Down() if what == "the verifier is down" else Xor()
    toy = toy_run(tmp_path, small(), actor_script=wrap, task=task)
    start = toy.actor.weights.clone(), toy.critic.weights.clone()
    assert train(toy.run)
    assert torch.equal(toy.actor.weights, start[0])
    assert torch.equal(toy.critic.weights, start[1])
    assert (toy.actor.num_updates, toy.critic.num_updates) == (0, 0)
    for row in rows(tmp_path)[1:]:
        assert row["actor/follow/num_tokens"] == 0.0
        assert (row["actor/follow/num_failed"] > 0) == (what != "all alike")
        assert (row["play/acc_t1"] is None) == (what != "all alike")


def test_what_is_not_finite_ends_the_run_before_a_checkpoint(tmp_path: Path) -> None:
    toy = toy_run(tmp_path, small(save_every=1))

    def poison(step: int) -> None:
        toy.saved[step] = {}
        toy.actor.weights[2 * 8 + ZERO] = float("nan")  # feedback "0" is before the last two ids

    toy.run.save = poison
    with pytest.raises(FloatingPointError, match="update 2: "):
        train(toy.run)
    assert list(toy.saved) == [1]
    assert [r["step"] for r in rows(tmp_path)] == [-1, 0]


def test_rows_checkpoints_and_evaluations_come_when_due(tmp_path: Path) -> None:
    toy = toy_run(
        tmp_path, small(num_steps=5, save_every=2, eval=EvalConfig(every=3, num_prompts=2))
    )
    seen: list[tuple[int, int]] = []
    save = toy.run.save

    def noting(step: int) -> None:
        seen.append((step, rows(tmp_path)[-1]["step"]))
        save(step)

    toy.run.save = noting
    assert train(toy.run)
    # A checkpoint from which step n comes next is written after the row of step n - 1.
    assert seen == [(2, 1), (4, 3), (5, 4)]
    evaluated = [r["step"] for r in rows(tmp_path) if "eval/greedy/acc_t1" in r]
    assert evaluated == [-1, 2, 4]
    assert toy.saved[5]["generated_tokens"] == 5 * 136
    assert toy.saved[5]["cursor"]["position"] == 20


def test_a_stop_saves_once_and_says_so(tmp_path: Path) -> None:
    asked = iter([False, True])
    toy = toy_run(tmp_path, small(), stop=lambda: next(asked))
    assert train(toy.run) is False
    assert list(toy.saved) == [2]
    assert [r["step"] for r in rows(tmp_path)] == [-1, 0, 1]


def test_a_stop_in_the_last_step_is_the_end(tmp_path: Path) -> None:
    toy = toy_run(tmp_path, small(num_steps=1), stop=lambda: True)
    assert train(toy.run) is True
    assert list(toy.saved) == [1]


def test_the_budget_of_tokens_ends_the_run_and_stays_spent(tmp_path: Path) -> None:
    config = small(max_generated_tokens=137)
    toy = toy_run(tmp_path, config)
    assert train(toy.run) is True
    assert list(toy.saved) == [2]
    assert [r["step"] for r in rows(tmp_path)] == [-1, 0, 1]
    assert "eval/greedy/acc_t1" in rows(tmp_path)[-1]
    again = toy_run(tmp_path, config, first_step=2)
    again.run.generated_tokens = toy.run.generated_tokens
    assert train(again.run) is True
    assert again.saved == {}
    assert [r["step"] for r in rows(tmp_path)] == [-1, 0, 1]


def test_transcripts_hold_trees_with_their_credit(tmp_path: Path) -> None:
    train(toy_run(tmp_path, small(num_steps=1)).run)
    (line,) = (tmp_path / "transcripts.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["step"] == 0
    tree = record["tree"]
    assert len(tree["attempts"]) == 4
    assert len(tree["feedbacks"]) == 6
    for feedback in tree["feedbacks"]:
        assert len(feedback["revisions"]) == len(feedback["probes"]) == 2
    assert {a["reward"] for a in tree["attempts"]} == {0.0, 1.0}
    assert sum(a["advantage"] for a in tree["attempts"]) == pytest.approx(0.0, abs=1e-5)


def test_phases_of_a_step_are_timed(tmp_path: Path) -> None:
    train(toy_run(tmp_path, small(num_steps=1, save_every=1)).run)
    start, step = rows(tmp_path)
    assert {"time/eval", "time/step", "time/other"} <= start.keys()
    names = ("play", "follow", "probe", "lead", "eval", "other")
    total = sum(step[f"time/{name}"] for name in names)
    assert step["time/step"] == pytest.approx(total + step.get("time/save", 0.0))
    assert all(step[f"time/{name}"] > 0 for name in names)


def worthless(uplift: float) -> Callable[..., dict[str, float]]:
    """An evaluation that finds the feedback to be worth `uplift`."""
    return lambda *args, **kwargs: {"sampled/uplift_over_shuffled": uplift}


def collapsing(**rule: float) -> Config:
    changes = {"patience": 2, "max_entropy": 99.0, **rule}
    return small(num_steps=6, eval=EvalConfig(every=1), collapse=CollapseConfig(**changes))


def test_a_critic_that_says_nothing_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two evaluations in a row, then it is saved and ended with what to try."""
    monkeypatch.setattr("megatron_binac.training.loop.evaluate", worthless(0.0))
    toy = toy_run(tmp_path, collapsing())
    with pytest.raises(CriticCollapse, match=r"step 2: in 2 evaluations .*critic\.optimizer\.lr"):
        train(toy.run)
    assert list(toy.saved) == [2]
    assert [row["step"] for row in rows(tmp_path)] == [-1, 0, 1]


@pytest.mark.parametrize(
    ("uplift", "rule"), [(0.2, {}), (0.0, {"min_uplift": -0.1}), (0.0, {"max_entropy": 0.0})]
)
def test_a_critic_that_is_of_use_or_still_unsure_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uplift: float, rule: dict[str, float]
) -> None:
    monkeypatch.setattr("megatron_binac.training.loop.evaluate", worthless(uplift))
    toy = toy_run(tmp_path, collapsing(**rule))
    toy.run.memory["critic_entropy"] = 0.5  # what a learner that measures it would leave there
    assert train(toy.run)


def test_one_good_evaluation_starts_the_count_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([0.0, 0.0, 0.3, 0.0, 0.3, 0.0, 0.3])
    monkeypatch.setattr(
        "megatron_binac.training.loop.evaluate",
        lambda *args, **kwargs: {"sampled/uplift_over_shuffled": next(found)},
    )
    assert train(toy_run(tmp_path, collapsing()).run)
