"""Attempts alone: every scale by hand, failed ones apart, the overlong ones punished."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from helpers_toy import toy_config
from helpers_trees import credits, situation, tree, turn

from megatron_binac.method_config import CreditConfig
from megatron_binac.objectives.groups import group_credit, running_credit

PLAIN = replace(toy_config().rollout, criticised=0)


@pytest.mark.parametrize(
    ("scale", "right", "wrong"),
    [
        ("mean", 0.75, -0.25),
        ("leave_one_out", 1.0, -1 / 3),
        ("std", 1.5, -0.5),  # sample deviation of 1, 0, 0, 0 is 1/2
        ("mean_normalized", 3.0, -1.0),
    ],
)
def test_every_scale(scale: str, right: float, wrong: float) -> None:
    credit = CreditConfig(kind="group", scale=scale)
    here = situation([tree([1, 0, 0, 0]), tree([1, 1])], rollout=PLAIN, credit=credit)
    turns, log = group_credit(here)
    assert credits(turns, "attempt") == pytest.approx([right, *[wrong] * 3, 0, 0], rel=1e-5)
    assert [t.trainable for t in turns] == [True] * 4 + [False] * 2
    assert log == {"collapsed_groups": 0.5, "num_failed": 0.0}


def test_a_failed_attempt_is_not_a_wrong_one() -> None:
    """Case 19: [1, 0, 0*] is [.5, -.5, 0]."""
    here = situation([tree([1, 0, None])], rollout=PLAIN, credit=CreditConfig(kind="group"))
    turns, log = group_credit(here)
    assert credits(turns, "attempt") == [0.5, -0.5, 0.0]
    assert [t.trainable for t in turns] == [True, True, False]
    assert log["num_failed"] == 1.0


def test_an_attempt_near_the_limit_is_worth_less() -> None:
    """Limit 4, ramp of 2: 3 tokens cost a half, 2 nothing. Rewards 1 and .5 differ then."""
    rollout = replace(PLAIN, max_attempt_tokens=4, overlong_buffer=2)
    long = tree([1, 1])
    long.attempts[1] = turn("attempt", 1.0, "11")
    turns, _ = group_credit(situation([long], rollout=rollout, credit=CreditConfig(kind="group")))
    assert credits(turns, "attempt") == pytest.approx([0.25, -0.25])
    turns, _ = group_credit(situation([long], rollout=PLAIN, credit=CreditConfig(kind="group")))
    assert credits(turns, "attempt") == [0.0, 0.0]


def test_the_moving_average_is_of_earlier_steps() -> None:
    credit = CreditConfig(kind="running", momentum=0.75)
    here = situation([tree([1, 0])], rollout=PLAIN, credit=credit)
    turns, log = running_credit(here)
    assert (credits(turns, "attempt"), log["baseline_attempt"]) == ([1.0, 0.0], 0.0)
    assert here.memory == {"baseline/attempt": 0.125}
    turns, log = running_credit(here)
    assert credits(turns, "attempt") == pytest.approx([0.875, -0.125])
    assert here.memory["baseline/attempt"] == pytest.approx(0.75 * 0.125 + 0.25 * 0.5)
    # Nobody could be judged: nothing is learned, and the average stands.
    here.trees = [tree([None, None])]
    turns, _ = running_credit(here)
    assert not any(t.trainable for t in turns)
    assert math.isclose(here.memory["baseline/attempt"], 0.21875)
