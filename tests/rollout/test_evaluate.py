"""What an evaluation counts, and that its controls change the feedback alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from helpers_toy import JUNK, ONE, ZERO, Xor, toy_config, toy_players

from megatron_binac.config import EvalConfig
from megatron_binac.rollout.evaluate import evaluate
from megatron_binac.rollout.scripted_engine import ScriptedEngine
from megatron_binac.types import Prompt, Sampling

CONFIG = toy_config(eval=EvalConfig(num_prompts=24))
Answer = tuple[list[int], list[float]]
LENGTH = {"attempt": 4, "feedback": 7, "revision": 10}
"""Ids of a context: markers, two bits, and the turns with their end tokens."""


@dataclass(frozen=True, kw_only=True)
class Oracle(Xor):
    """The toy task with right feedback to compare with."""

    def oracle_feedback(self, prompt: Prompt, attempt_text: str) -> str:
        return prompt.gold

    def supervised(self, role: str, index: int) -> tuple:
        return ()


def right(prompt: np.ndarray) -> int:
    return ONE if prompt[1] != prompt[2] else ZERO


def follower(prompt: np.ndarray, seed: int, sampling: Sampling) -> Answer:
    """Attempts 0; repeats what the feedback says, and junk where it says nothing."""
    if len(prompt) == LENGTH["attempt"]:
        return [ZERO], [0.0]
    said = int(prompt[-3])
    return [said if said in (ZERO, ONE) else JUNK], [0.0]


def knower(prompt: np.ndarray, seed: int, sampling: Sampling) -> Answer:
    return [right(prompt)], [0.0]


def golds(num: int) -> list[str]:
    return [Xor().prompt("eval", i).gold for i in range(num)]


def test_a_right_critic_and_a_following_actor() -> None:
    values = evaluate(toy_players(follower, knower, task=Oracle()), CONFIG)
    zeros = golds(24).count("0") / 24
    assert 0.2 < zeros < 0.8
    for mode in ("sampled", "greedy"):
        got = {k.removeprefix(f"{mode}/"): v for k, v in values.items() if k.startswith(mode)}
        assert got["acc_t1"] == pytest.approx(zeros)
        assert got["acc_t2"] == 1.0
        assert got["acc_t1_lo"] < got["acc_t1"] < got["acc_t1_hi"]
        assert got["delta"] == pytest.approx(1.0 - zeros)
        assert (got["fix"], got["break"]) == (1.0, 0.0)
        assert got["oracle_gate"] == 1.0
        assert got["acc_t2_oracle"] == got["feedback_matches_oracle"] == 1.0
        assert got["acc_t2_none"] == 0.0  # junk
        assert got["uplift_over_none"] == 1.0
        # Feedback on another problem is right where the two share their answer.
        order = golds(24)
        shift = next(
            n for n in range(1, 24)
            if got["acc_t2_shuffled"] == pytest.approx(
                np.mean([a == b for a, b in zip(order, order[n:] + order[:n], strict=True)])
            )
        )  # fmt: skip
        assert 0 < shift < 24
        assert got["num_failed"] == 0.0
        assert got["leak"] == pytest.approx(1.0 - zeros)


def test_the_mode_reaches_the_engine_and_seeds_are_those_of_evaluation() -> None:
    players = toy_players(follower, knower)
    evaluate(players, CONFIG)
    assert isinstance(players.actor, ScriptedEngine)
    modes = [sampling.greedy for _, _, sampling in players.actor.asked]
    assert modes == [False] * 4 + [True] * 4  # attempts, revisions, shuffled, none
    seeds = [asked for _, asked, _ in players.actor.asked]
    assert seeds[1] != seeds[0]
    again = toy_players(follower, knower)
    evaluate(again, CONFIG)
    assert isinstance(again.actor, ScriptedEngine)
    assert [asked for _, asked, _ in again.actor.asked] == seeds


def test_sampling_limits_of_the_rollout_do_not_reach_evaluation() -> None:
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, top_k=2, top_p=0.5))
    players = toy_players(follower, knower)
    evaluate(players, config)
    assert isinstance(players.actor, ScriptedEngine)
    assert {(s.top_k, s.top_p) for _, _, s in players.actor.asked} == {(0, 1.0)}


def test_failures_leave_the_accuracy() -> None:
    def some_fail(prompt: np.ndarray, seed: int, sampling: Sampling) -> Answer | None:
        return None if prompt[1] == ONE else knower(prompt, seed, sampling)

    values = evaluate(toy_players(some_fail, knower), CONFIG)
    ones = sum(Xor().prompt("eval", i).text[0] == "1" for i in range(24))
    assert values["sampled/num_failed"] == ones > 0
    assert values["sampled/acc_t1"] == values["sampled/acc_t2"] == 1.0
    nothing = evaluate(toy_players(lambda *_: None, knower), CONFIG)
    assert np.isnan(nothing["greedy/acc_t1"])
    assert (nothing["greedy/acc_t1_lo"], nothing["greedy/acc_t1_hi"]) == (0.0, 1.0)


def test_without_a_critic_there_is_one_turn() -> None:
    config = toy_config(critic=None, rollout=replace(CONFIG.rollout, criticised=0))
    values = evaluate(toy_players(follower, None), config, num_prompts=6)
    assert {k.split("/")[1] for k in values} == {"acc_t1", "acc_t1_lo", "acc_t1_hi", "num_failed"}


def test_several_samples_of_a_prompt_are_one_cluster() -> None:
    """Sampled attempts differ by sample; greedy ones are taken once."""

    def coin(prompt: np.ndarray, seed: int, sampling: Sampling) -> Answer:
        return [right(prompt) if sampling.greedy or seed % 2 else JUNK], [0.0]

    config = replace(CONFIG, eval=EvalConfig(num_prompts=10, samples=8))
    players = toy_players(coin, knower)
    values = evaluate(players, config)
    assert isinstance(players.actor, ScriptedEngine)
    assert [len(asked) for _, asked, _ in players.actor.asked] == [80] * 4 + [10] * 4
    assert len(set(players.actor.asked[0][1])) == 80
    assert 0.3 < values["sampled/acc_t1"] < 0.7
    assert values["greedy/acc_t1"] == 1.0
