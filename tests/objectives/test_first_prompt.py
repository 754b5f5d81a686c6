"""Revisions as answers to the problem alone, the feedback as text, and the teacher's rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers_toy import toy_config
from helpers_trees import credits, situation, tree

from megatron_binac.method_config import (
    CreditConfig,
    FeedbackModelConfig,
    SelfDistillConfig,
    ShapedConfig,
    TeacherConfig,
)
from megatron_binac.objectives import build, first_prompt
from megatron_binac.terms import CrossEntropy, Distill, FirstPrompt, Shaped

ALONE = [1, 5, 6, 2]
"""<|user|> 0 1 <|actor|>"""
AFTER = [*ALONE, 5, 4, 3, 7, 4, 2]
"""... 0 <|end|> <|critic|> ? <|end|> <|actor|>"""


def test_a_revision_is_paid_by_what_it_beats_the_attempts_by() -> None:
    """Attempts have a mean of 1/4: right revisions get 3/4, wrong ones -1/4, under x alone."""
    here = situation(
        [tree([1, 0, 0, 0], {1: [[1, 0]], 2: [[None, 1]]})],
        self_distill=SelfDistillConfig(coef=0.2),
    )
    (term,), log = first_prompt.self_distill(here)
    assert (term.name, term.coef, term.loss) == ("sd", 0.2, FirstPrompt(floor=-5.0))
    assert [r.advantage for r in term.rows] == pytest.approx([0.75, -0.25, 0.75])
    for row in term.rows:
        assert row.ids.tolist()[:4] == ALONE
        assert row.mask.tolist() == [False] * 4 + [True] * 2
        assert row.logprobs is None
    assert log["sd/num_rows"] == 3.0


def test_the_coefficient_rises() -> None:
    config = SelfDistillConfig(coef=0.1, ramp_steps=10)
    trees = [tree([1, 0], {1: [[1]]})]
    for step, coef in ((0, 0.0), (5, 0.05), (10, 0.1), (99, 0.1)):
        (term,), log = first_prompt.self_distill(situation(trees, step, self_distill=config))
        assert term.coef == pytest.approx(coef)
        assert log["sd/coef"] == term.coef


def test_attempts_and_revisions_of_a_prompt_are_one_group() -> None:
    """Critique-GRPO: rewards 1, 0, 0 and the revision's 1 have a mean of 1/2."""
    here = situation(
        [tree([1, 0, 0], {1: [[1]]})], credit=CreditConfig(kind="union"), shaped=ShapedConfig()
    )
    turns, _ = first_prompt.union_credit(here)
    assert credits(turns, "attempt") == [0.5, -0.5, -0.5]
    assert credits(turns, "revision") == []
    (term,), _ = first_prompt.shaped(here)
    (row,) = term.rows
    assert (row.advantage, row.ids.tolist()) == (0.5, [*ALONE, 6, 4])
    assert term.loss == Shaped(gamma=0.1)
    # One mean over the two tokens of the revision and the six of the attempts.
    main, again = build.follow_terms(here)[0]
    assert (main.num_targets, again.num_targets) == (6, 2)
    assert main.denominator == again.denominator == 8.0


def test_feedback_is_modelled_under_the_prompt_that_it_was_written_to() -> None:
    here = situation([tree([0], {0: [[1], [0]]})], feedback_model=FeedbackModelConfig(coef=0.3))
    here.trees[0].feedbacks[0][1].finish = "failed"
    (term,), _ = first_prompt.feedback_model(here)
    assert (term.coef, term.loss) == (0.3, CrossEntropy())
    (row,) = term.rows
    assert row.ids.tolist() == [1, 5, 2, 7, 4]
    assert row.mask.tolist() == [False] * 3 + [True] * 2


def test_the_teacher_reads_the_same_attempt_after_the_feedback() -> None:
    here = situation(
        [tree([0, 1], {0: [[]]})],
        credit=CreditConfig(kind="none"),
        teacher=TeacherConfig(alpha=0.0, trust_region=0.3),
    )
    (term,), _ = first_prompt.teacher(here)
    assert term.loss == Distill(alpha=0.0, trust_region=0.3)
    (student,), (teacher,) = term.rows, term.teacher
    assert student.ids.tolist() == [1, 5, 2, 5, 4]
    assert student.logprobs[student.mask].tolist() == [-0.5, -0.25]
    assert teacher.ids.tolist() == [*AFTER, 5, 4]
    assert np.array_equal(teacher.ids[teacher.mask], student.ids[student.mask])


def test_the_held_attempts_are_all_there() -> None:
    """SCoRe's first stage: attempts without credit are in the loss, for their KL."""
    credit = CreditConfig(kind="progress", attempt_kl_coef=0.25)
    here = situation([tree([0, 1, None])], credit=credit)
    for attempt in here.trees[0].attempts:
        attempt.trainable, attempt.advantage = False, 9.0
    (term,), _ = first_prompt.kl_on_attempts(here)
    assert [r.advantage for r in term.rows] == [0.0, 0.0]
    assert term.loss == replace(toy_config().actor.loss, kl_coef=0.25)
