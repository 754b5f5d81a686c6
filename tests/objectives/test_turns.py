"""RLTF's two-turn returns, by hand."""

from __future__ import annotations

import pytest
from helpers_trees import credits, situation, tree

from megatron_binac.config import BilevelConfig
from megatron_binac.method_config import CreditConfig
from megatron_binac.objectives.turns import progress_credit, two_turn_credit

CREDIT = CreditConfig(kind="two_turn", next_weight=0.5)


def test_each_turn_is_compared_with_its_own_kind() -> None:
    """Returns of the attempts 1 (stopped), .5 and 0; of the revisions 1 and 0."""
    trees = [tree([1, 0, 0], {1: [[1]], 2: [[0]]})]
    here = situation(trees, credit=CREDIT, rollout=_all(3))
    turns, log = two_turn_credit(here)
    assert credits(turns, "attempt") == pytest.approx([0.5, 0.0, -0.5])
    assert credits(turns, "revision") == pytest.approx([0.5, -0.5])
    assert log == {"num_failed": 0.0, "num_second_turns": 2.0}


def test_revisions_of_two_prompts_are_two_groups() -> None:
    trees = [tree([0, 0], {0: [[1]], 1: [[1]]}), tree([0, 0], {0: [[0]], 1: [[0]]}, prompt_id="b")]
    turns, _ = two_turn_credit(situation(trees, credit=CREDIT, rollout=_all(2)))
    assert credits(turns, "revision") == [0.0] * 4
    assert not any(t.trainable for t in turns)


def test_an_attempt_whose_second_turn_is_not_known_leaves_its_group() -> None:
    trees = [tree([0, 0, 1], {0: [[None]], 1: [[1]]})]
    turns, log = two_turn_credit(situation(trees, credit=CREDIT, rollout=_all(3)))
    # .5 and 1 are left: the mean is .75.
    assert credits(turns, "attempt") == pytest.approx([0.0, -0.25, 0.25])
    assert [t.trainable for t in turns if t.kind == "attempt"] == [False, True, True]
    assert log["num_failed"] == 2.0


def test_no_second_turn_at_all() -> None:
    turns, log = two_turn_credit(situation([tree([1, 1])], credit=CREDIT, rollout=_all(2)))
    assert credits(turns, "revision") == []
    assert log["num_second_turns"] == 0.0


def test_progress_is_paid_in_the_second_stage_only() -> None:
    """Stage I: R(y1) alone, about its mean over the prompt. Stage II: 1 + 10 (1 - 0) = 11 for the
    repaired, 1 for the kept, 0 for the lost and still wrong ones less 10 for the lost."""
    trees = [tree([0, 1, 1, 0], {0: [[1]], 1: [[1]], 2: [[0]], 3: [[0]]})]
    kind = CreditConfig(kind="progress")
    one = BilevelConfig(lam=0.1, attempt_weight=0.0)
    turns, _ = progress_credit(situation(trees, credit=kind, bilevel=one))
    assert credits(turns, "attempt") == [0.0] * 4
    assert credits(turns, "revision") == [0.5, 0.5, -0.5, -0.5]
    two = BilevelConfig(lam=0.1, improvement_weight=10.0)
    turns, _ = progress_credit(situation(trees, credit=kind, bilevel=two))
    assert credits(turns, "attempt") == [-0.5, 0.5, 0.5, -0.5]
    # 11, 1, -10 and 0 about their mean of 1/2.
    assert credits(turns, "revision") == [10.5, 0.5, -10.5, -0.5]


def _all(num: int):
    from dataclasses import replace

    from helpers_toy import toy_config

    return replace(toy_config().rollout, attempts=num, criticised=num, feedbacks=1, revisions=1)
