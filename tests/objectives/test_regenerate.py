"""MulFeRL: groups of their own, and the contrast of a solved round with the failed one before."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from helpers_toy import toy_config
from helpers_trees import FixedScorer, credits, situation, tree

from megatron_binac.method_config import ContrastConfig, CreditConfig
from megatron_binac.objectives.regenerate import contrast, regenerated_credit

SETTINGS = {
    "credit": CreditConfig(kind="regenerated"),
    "rollout": replace(toy_config().rollout, select="failed_groups"),
    "contrast": ContrastConfig(coef=0.01, tau=0.5),
}


def test_answers_are_compared_within_their_round() -> None:
    first = tree([0, 0], {0: [[1]], 1: [[0]]})
    again = tree([0, 0], {0: [[0]], 1: [[0]]}, number=1)
    turns, log = regenerated_credit(situation([first, again], **SETTINGS))
    assert credits(turns, "revision") == [0.5, -0.5, 0.0, 0.0]
    # The second round's attempts are the first one's revisions and are not paid again.
    assert credits(turns, "attempt") == [0.0, 0.0]
    assert log == {"num_failed": 0.0, "num_regenerated": 4.0}


def test_a_solved_round_against_the_failed_answers() -> None:
    """Equal scores: tau sigmoid(0) = 1/4 up for the right answer and down for the wrong one."""
    scorer = FixedScorer()
    here = situation([tree([0, 0], {0: [[1]], 1: [[1]]})], scorer=scorer, **SETTINGS)
    (term,), log = contrast(here)
    assert [r.advantage for r in term.rows] == [0.25, -0.25, 0.25, -0.25]
    assert [r.ids.tolist()[-2] for r in term.rows] == [6, 5, 6, 5]
    assert all(r.ids.tolist()[:4] == [1, 5, 6, 2] for r in term.rows)
    assert (term.denominator, term.coef) == (2.0, 0.01)
    assert log == {"contrast/num_pairs": 2.0, "contrast/wins": 0.0}


def test_a_pair_that_is_told_apart_already_counts_less() -> None:
    class Knows(FixedScorer):
        def logprobs(self, sequences, *, reference=False):  # type: ignore[no-untyped-def]
            return [s.mask * (-0.5 if s.ids[-2] == 6 else -1.5) for s in sequences]

    here = situation([tree([0], {0: [[1]]})], scorer=Knows(), **SETTINGS)
    (term,), log = contrast(here)
    want = 0.5 / (1 + math.exp(0.5 * 2.0))
    assert [r.advantage for r in term.rows] == pytest.approx([want, -want])
    assert log["contrast/wins"] == 1.0


@pytest.mark.parametrize("answers", [[1, 0], [0, 0], [1, None]])
def test_a_round_that_was_not_wholly_solved_has_no_contrast(answers: list[float | None]) -> None:
    here = situation([tree([0, 0], {g: [[r]] for g, r in enumerate(answers)})], **SETTINGS)
    assert contrast(here) == ([], {"contrast/num_pairs": 0.0})
