"""Credit of every turn by hand, and the turns as rows to learn from."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers_toy import Xor

from megatron_binac.config import BilevelConfig
from megatron_binac.rollout.batch import actor_turns, critic_turns, sequences
from megatron_binac.types import Finish, Grade, Prompt, Tree, Turn, TurnKind

PLAIN = BilevelConfig(lam=0.0, attempt_value_weight=0.0)


def turn(kind: TurnKind, reward: float | None, *, text: str = "1", failed: bool = False) -> Turn:
    finish: Finish = "failed" if failed and kind == "feedback" else "stop"
    graded = None if reward is None else Grade(score=reward, parsed=text, failed=failed)
    return Turn(
        kind=kind,
        prompt_ids=np.asarray([1, 5, 2], np.int32),
        ids=np.asarray([6, 4], np.int32),
        logprobs=np.asarray([-0.5, -0.25], np.float32),
        finish=finish,
        version=0,
        text=text,
        grade=graded,
    )


def tree(
    attempts: list[float],
    revisions: dict[int, list[list[float]]],
    probes: dict[int, list[list[float]]] | None = None,
    *,
    prompt_id: str = "a",
    weights: list[float] | None = None,
    words: list[str] | None = None,
) -> Tree:
    """Rewards of the attempts, and by criticised attempt those of the revisions [F][M]."""
    criticised = sorted(revisions)
    grown = {
        name: [[[turn("revision", r) for r in ys] for ys in rewards[g]] for g in criticised]
        for name, rewards in (("revisions", revisions), ("probes", probes or {}))
        if rewards
    }
    return Tree(
        prompt=Prompt(id=prompt_id, text="01", gold="1", task="xor"),
        attempts=[turn("attempt", r, text="1" if r else "0") for r in attempts],
        criticised=criticised,
        weights=weights or [1.0] * len(criticised),
        feedbacks=[
            [turn("feedback", None, text=(words or ["0"] * 9)[f]) for f in range(len(revisions[g]))]
            for g in criticised
        ],
        **grown,
    )


def credits(turns: list[Turn], kind: TurnKind) -> list[float]:
    return [t.advantage for t in turns if t.kind == kind]


def test_attempts_are_compared_within_their_prompt() -> None:
    """Two trees of one text: groups go by tree, so that neither has any variance (case 18)."""
    alike = [tree([1, 1], {}, prompt_id="a"), tree([0, 0], {}, prompt_id="b")]
    turns, log = actor_turns(alike, PLAIN)
    assert credits(turns, "attempt") == [0.0] * 4
    assert not any(t.trainable for t in turns)
    assert log["collapsed_groups"] == 1.0
    mixed = [tree([1, 0, 0, 0], {}, prompt_id="a"), tree([0, 0], {}, prompt_id="b")]
    turns, log = actor_turns(mixed, PLAIN)
    assert credits(turns, "attempt") == pytest.approx([0.75, -0.25, -0.25, -0.25, 0, 0])
    assert [t.trainable for t in turns] == [True] * 4 + [False] * 2
    assert log["collapsed_groups"] == 0.5


def test_revisions_are_compared_within_their_attempt() -> None:
    """Over all feedbacks of it: what a good feedback gains shows against the bad one."""
    found = [tree([0, 1], {0: [[1, 1], [0, 0]], 1: [[1, 1], [1, 0]]})]
    turns, _ = actor_turns(found, PLAIN)
    assert credits(turns, "revision") == pytest.approx(
        [0.5, 0.5, -0.5, -0.5, 0.25, 0.25, 0.25, -0.75]
    )


def test_an_attempt_earns_a_share_of_what_the_feedback_on_it_was_worth() -> None:
    config = replace(PLAIN, attempt_value_weight=0.1)
    # Values of the feedbacks: 1 and 0 on the first attempt, 0 and 0 on the second.
    turns, _ = actor_turns([tree([0, 0, 1], {0: [[1, 1], [0, 0]], 1: [[0, 0], [0, 0]]})], config)
    # Follow-ups 0.1 * 0.5 and 0 are centred among the two; the third attempt has none.
    third = 1 / 3
    assert credits(turns, "attempt") == pytest.approx([-third + 0.025, -third - 0.025, 2 * third])


def test_weights_bring_the_criticised_back_to_the_natural_mix() -> None:
    found = [tree([0, 1], {0: [[1], [0]], 1: [[1], [0]]}, weights=[0.5, 2.0])]
    turns, _ = actor_turns(found, PLAIN)
    assert credits(turns, "revision") == pytest.approx([0.25, -0.25, 1.0, -1.0])
    turns, _ = critic_turns(found, PLAIN, Xor())
    assert [t.advantage for t in turns] == pytest.approx([0.5, -0.5, 2.0, -2.0])


def test_a_feedback_is_worth_what_it_gained_over_its_siblings() -> None:
    """Values 1, 0.5 and 0: leave one out, each against the mean of the other two."""
    turns, log = critic_turns([tree([0], {0: [[1, 1], [1, 0], [0, 0]]})], PLAIN, Xor())
    assert [t.advantage for t in turns] == pytest.approx([0.75, 0.0, -0.75])
    assert log["value"] == pytest.approx(0.5)
    assert log["value_wrong"] == pytest.approx(0.5)
    assert math.isnan(log["value_right"])
    assert log["trainable"] == 1.0


def test_credit_moves_with_the_rewards_when_siblings_are_shuffled() -> None:
    rewards, after = [[1, 1], [1, 0], [0, 0]], [[0, 1], [1, 1], [1, 0]]
    config = replace(PLAIN, lam=0.3)
    turns, _ = critic_turns([tree([0], {0: rewards}, {0: after})], config, Xor())
    want = [t.advantage for t in turns]
    assert len(set(want)) == 3
    for order in itertools.permutations(range(3)):
        shuffled = tree([0], {0: [rewards[i] for i in order]}, {0: [after[i] for i in order]})
        turns, _ = critic_turns([shuffled], config, Xor())
        assert [t.advantage for t in turns] == pytest.approx([want[i] for i in order])


def test_what_only_the_adapted_actor_gains_lowers_the_credit() -> None:
    """Equal values now; the second pays off after the update, and is marked down."""
    now, after = [[1, 0], [1, 0]], [[1, 0], [1, 1]]
    found = tree([0], {0: now}, {0: after})
    turns, log = critic_turns([found], replace(PLAIN, lam=0.2), Xor())
    assert [t.advantage for t in turns] == pytest.approx([0.1, -0.1])
    assert log["gap"] == pytest.approx(0.25)
    turns, log = critic_turns([found], PLAIN, Xor())
    assert [t.advantage for t in turns] == [0.0, 0.0]
    assert log["gap"] == 0.0


def test_an_unmoved_actor_costs_exactly_nothing() -> None:
    rewards = [[1.0, 0.3], [0.7, 0.1], [0.2, 0.9]]
    plain, _ = critic_turns([tree([0], {0: rewards})], PLAIN, Xor())
    for lam in (0.1, 0.37, 2.0):
        config = replace(PLAIN, lam=lam)
        turns, log = critic_turns([tree([0], {0: rewards}, {0: rewards})], config, Xor())
        assert [t.advantage for t in turns] == [t.advantage for t in plain]  # to the last bit
        assert log["gap"] == 0.0


def test_a_leak_and_a_verdict_are_paid_for() -> None:
    found = tree([0], {0: [[1], [1]]}, words=["1", "0"])  # the first says the answer
    turns, log = critic_turns([found], replace(PLAIN, leak_coef=0.5), Xor())
    assert [t.advantage for t in turns] == pytest.approx([-0.5, 0.5])
    assert log["leak"] == 0.5

    class Judging(Xor):
        def verdict(self, feedback_text: str) -> bool | None:
            return {"1": True, "0": False}[feedback_text]

    turns, log = critic_turns([found], replace(PLAIN, discrimination_coef=0.5), Judging())
    assert [t.advantage for t in turns] == pytest.approx([-0.5, 0.5])  # the attempt is wrong
    assert log["acc_dis"] == 0.5


def test_failed_revisions_leave_the_value_and_the_mean() -> None:
    found = tree([0], {0: [[1, 0], [0, 0]]})
    found.revisions[0][1][0] = turn("revision", 0.0, failed=True)
    found.revisions[0][1][1] = turn("revision", 0.0, failed=True)
    turns, log = critic_turns([found], PLAIN, Xor())
    assert [t.trainable for t in turns] == [False, False]  # one sibling is left: no baseline
    assert log["value"] == 0.5
    turns, log = actor_turns([found], PLAIN)
    revisions = [t for t in turns if t.kind == "revision"]
    assert [t.trainable for t in revisions] == [True, True, False, False]
    assert credits(turns, "revision") == pytest.approx([0.5, -0.5, 0.0, 0.0])
    assert log["num_failed"] == 2.0


def test_a_failed_feedback_is_not_a_bad_one() -> None:
    found = tree([0], {0: [[1], [0], [0]]})
    found.feedbacks[0][1] = turn("feedback", None, failed=True)
    turns, _ = critic_turns([found], PLAIN, Xor())
    assert [t.trainable for t in turns] == [True, False, True]
    assert [t.advantage for t in turns] == pytest.approx([1.0, 0.0, -1.0])


def test_a_failed_probe_takes_its_feedback_out() -> None:
    found = tree([0], {0: [[1], [0], [0]]}, {0: [[1], [1], [0]]})
    found.probes[0][0][0] = turn("revision", 0.0, failed=True)
    turns, _ = critic_turns([found], replace(PLAIN, lam=0.5), Xor())
    assert [t.trainable for t in turns] == [False, True, True]
    assert [t.advantage for t in turns] == pytest.approx([0.0, -0.5, 0.5])


def test_no_feedback_is_no_critic_turn() -> None:
    assert critic_turns([tree([1, 0], {})], replace(PLAIN, lam=0.1), Xor()) == ([], {})
    assert critic_turns([], PLAIN, Xor()) == ([], {})


def test_rows_hold_the_sampled_ids_and_mask_exactly_those() -> None:
    turns, _ = actor_turns([tree([1, 0], {0: [[1], [0]]})], PLAIN)
    rows = sequences(turns)
    assert len(rows) == 4
    for row, source in zip(rows, turns, strict=True):
        assert row.ids.tolist() == [1, 5, 2, 6, 4]
        assert row.ids.dtype == np.int32
        assert row.mask.tolist() == [False, False, False, True, True]
        assert row.advantage == source.advantage
        assert row.logprobs is not None
        assert np.isnan(row.logprobs[:3]).all()
        assert row.logprobs[3:].tolist() == [-0.5, -0.25]
        assert row.num_targets == 2


def test_rows_leave_out_what_teaches_nothing() -> None:
    turns, _ = actor_turns([tree([1, 0, 1], {})], PLAIN)
    turns[0].trainable = False
    turns[1].ids = np.zeros(0, np.int32)
    turns[1].logprobs = np.zeros(0, np.float32)
    assert [r.advantage for r in sequences(turns)] == [turns[2].advantage]
    assert sequences(turns, keep=lambda t: t.reward == 0.0) == []
    assert sequences([]) == []
