"""Votes among samples and gates over rounds, by hand."""

from __future__ import annotations

import itertools

import pytest

from megatron_binac.algo.metrics import pass_at_k
from megatron_binac.algo.votes import MAX_SUBSETS, gates, majority_at_k


def test_a_vote_by_hand() -> None:
    # Three say 0 (right), two say 1 (wrong).
    answers, right = [0, 0, 0, 1, 1], [True, True, True, False, False]
    assert majority_at_k(answers, right, 1) == pytest.approx(3 / 5)
    # Two of five: 3 pairs agree on 0, 1 pair on 1, 6 pairs are split and count one half.
    assert majority_at_k(answers, right, 2) == pytest.approx((3 + 6 / 2) / 10)
    assert majority_at_k(answers, right, 5) == 1.0


def test_a_frequent_wrong_answer_wins() -> None:
    assert majority_at_k([0, 1, 1], [True, False, False], 3) == 0.0
    assert majority_at_k([0, 1, 2], [True, False, False], 3) == pytest.approx(1 / 3)


def test_no_answer_does_not_vote() -> None:
    assert majority_at_k([None, None, 4], [False, False, True], 3) == 1.0
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    assert majority_at_k([None, 4], [False, True], 1) == 0.5


def test_of_one_sample_it_is_the_accuracy_and_never_above_pass_at_k() -> None:
    answers, right = [0, 1, 0, 2, 2, 2], [True, False, True, False, False, False]
    assert majority_at_k(answers, right, 1) == pytest.approx(pass_at_k(6, 2, 1))
    for k in range(1, 7):
        assert majority_at_k(answers, right, k) <= pass_at_k(6, 2, k) + 1e-12


def test_many_subsets_are_drawn_with_a_seed() -> None:
    answers = [i % 3 for i in range(24)]
    right = [a == 0 for a in answers]
    assert sum(1 for _ in itertools.combinations(range(24), 8)) > MAX_SUBSETS
    first = majority_at_k(answers, right, 8, seed=1)
    assert first == majority_at_k(answers, right, 8, seed=1)
    # Three answers that are equally frequent: one third, to the error of 2,000 draws.
    assert first == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.parametrize(("k", "num_right"), [(0, 2), (3, 2), (1, 1)])
def test_wrong_numbers_are_refused(k: int, num_right: int) -> None:
    with pytest.raises(ValueError, match="at least k samples"):
        majority_at_k([0, 1], [True] * num_right, k)


def test_gates_by_hand() -> None:
    # Wrong, called wrong; right, called right; wrong again.
    found = gates([False, True, False], [False, True])
    assert found == {
        "always": [False, True, False],
        "learned": [False, True, True],
        "oracle": [False, True, True],
    }


def test_the_learned_gate_believes_a_wrong_verdict() -> None:
    found = gates([False, True, True], [True, None])
    assert found["learned"] == [False, False, False]
    assert found["oracle"] == [False, True, True]
    # Without a verdict it goes on.
    assert gates([True, False], [None])["learned"] == [True, False]


def test_without_rounds_every_gate_is_the_first_answer() -> None:
    assert gates([True], []) == {"always": [True], "learned": [True], "oracle": [True]}
    with pytest.raises(ValueError, match="got 2 answers and 0 verdicts"):
        gates([True, False], [])
