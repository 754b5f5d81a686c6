"""Bi-NAC's equations 3 and 4 with moving baselines, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers_toy import toy_config
from helpers_trees import credits, situation, tree, turn

from megatron_binac.config import BilevelConfig
from megatron_binac.method_config import CreditConfig
from megatron_binac.objectives.chain import follower_credit, leader_credit
from megatron_binac.types import Tree

ONES = replace(toy_config().rollout, attempts=1, criticised=1, feedbacks=1, revisions=1)


def probed(answer: float, probe: float) -> Tree:
    out = tree([0], {0: [[answer]]})
    out.probes = [[[turn("revision", probe)]]]
    return out


def here(trees: list[Tree], lam: float):
    return situation(
        trees, rollout=ONES, credit=CreditConfig(kind="chain"), bilevel=BilevelConfig(lam=lam)
    )


def test_both_answers_of_a_chain_are_paid_for_the_second() -> None:
    """(1 + lam) (R(y1) - b), for the attempt as for the revision; b is 0, then moves by a tenth."""
    at = here([tree([0], {0: [[1]]}), tree([1], {0: [[0]]}, prompt_id="b")], lam=0.5)
    turns, log = follower_credit(at)
    assert credits(turns, "attempt") == credits(turns, "revision") == [1.5, 0.0]
    assert at.memory["baseline/follower"] == pytest.approx(0.05)
    turns, log = follower_credit(at)
    assert credits(turns, "attempt") == pytest.approx([1.5 * 0.95, -1.5 * 0.05])
    assert log["baseline_follower"] == pytest.approx(0.05)


def test_a_broken_verifier_pays_nobody() -> None:
    turns, log = follower_credit(here([tree([0], {0: [[None]]})], lam=0.1))
    assert not any(t.trainable for t in turns)
    assert log["num_failed"] == 1.0


def test_a_better_adapted_actor_lowers_the_credit_of_the_words() -> None:
    """(1 + lam)(V - b) - lam (V* - b*): lam 1/2, V 1 and V* 1 or 0."""
    turns, log = leader_credit(here([probed(1, 1), probed(1, 0), probed(0, 1)], lam=0.5))
    assert credits(turns, "feedback") == [1.0, 1.5, -0.5]
    assert log["gap"] == pytest.approx(0.0)
    turns, log = leader_credit(here([probed(0, 1)], lam=0.0))
    assert (credits(turns, "feedback"), log["gap"]) == ([0.0], 0.0)


def test_each_actor_has_a_baseline_of_its_own() -> None:
    at = here([probed(1, 0), probed(0, 0)], lam=0.5)
    leader_credit(at)
    assert at.memory["baseline/leader"] == pytest.approx(0.05)
    assert at.memory["baseline/leader_star"] == 0.0
    turns, _ = leader_credit(at)
    assert credits(turns, "feedback") == pytest.approx([1.5 * 0.95, -1.5 * 0.05])
