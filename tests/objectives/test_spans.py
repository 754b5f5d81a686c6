"""Text2Grad: quotes to token rewards, the outcome at the end, GAE over the head's values."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_toy import ToyTokenizer
from helpers_trees import FixedScorer, FixedValues, situation, tree, turn

from megatron_binac.method_config import CreditConfig, SpanConfig, ValueHeadConfig
from megatron_binac.objectives import spans
from megatron_binac.objectives.spans import span_credit
from megatron_binac.types import Tree


def quoted(text: str, words: str) -> Tree:
    out = tree([0], {0: [[]]})
    out.attempts[0] = turn("attempt", 0.0, text)
    out.feedbacks[0] = [turn("feedback")]
    out.feedbacks[0][0].text = words
    return out


def here(trees: list[Tree], **settings: float):
    return situation(
        trees,
        credit=CreditConfig(kind="spans"),
        spans=SpanConfig(**{"gamma": 1.0, "gae_lam": 1.0, **settings}),
        value_head=ValueHeadConfig(),
        values=FixedValues(now=0.25),
        scorer=FixedScorer(reference=-1.5),
    )


@pytest.fixture(autouse=True)
def offsets_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """One character a token, the end token without any."""
    monkeypatch.setattr(
        ToyTokenizer,
        "offsets",
        lambda self, ids: [(i, i + (t != 4)) for i, t in enumerate(ids)],
    )


def test_rewards_of_tokens_become_advantages() -> None:
    """Text 101: -"0" and +"1" (the first). Rewards 1, -1, 0 and 0 at the end; with gamma = lam = 1
    the returns are 0, -1, 0, 0, less the value 1/4."""
    at = here([quoted("101", '+"1" but -"0"')])
    (attempt,), log = span_credit(at)
    assert attempt.token_advantages.tolist() == pytest.approx([-0.25, -1.25, -0.25, -0.25])
    assert log["span_quotes"] == 2.0
    assert log["span_signed"] == 2.0
    ((rows, targets, bounded),) = at.values.taught
    assert not bounded
    assert targets[0][rows[0].mask].tolist() == pytest.approx([0.0, -1.0, 0.0, 0.0])


def test_the_outcome_comes_at_the_last_token() -> None:
    at = here([tree([1, 0])], outcome_weight=2.0, gae_lam=0.0)
    right, wrong = span_credit(at)[0]
    # Lambda 0: r + V' - V; the last token has no V'.
    assert right.token_advantages.tolist() == pytest.approx([0.0, 2.0 - 0.25])
    assert wrong.token_advantages.tolist() == pytest.approx([0.0, -0.25])


def test_a_quote_that_is_not_there_is_dropped_and_counted() -> None:
    (attempt,), log = span_credit(here([quoted("10", '-"11" and +"0"')]))
    assert (log["span_dropped"], log["span_quotes"]) == (1.0, 2.0)
    assert attempt.token_advantages.tolist() == pytest.approx([0.75, 0.75, -0.25])
    _, log = span_credit(here([quoted("10", "no quotes")]))
    assert log["span_unquoted"] == 1.0


def test_the_kl_is_taken_off_each_token() -> None:
    """Engine -.5 and -.25, reference -1.5: the KL estimates are 1 and 1.25."""
    at = here([tree([0])], kl_coef=0.1, gae_lam=0.0)
    (attempt,), log = span_credit(at)
    assert attempt.token_advantages.tolist() == pytest.approx([-0.1, -0.125 - 0.25])
    assert log["kl_reward"] == pytest.approx(1.125)


def test_a_failed_attempt_and_failed_feedback() -> None:
    broken = quoted("10", '-"1"')
    broken.feedbacks[0][0].finish = "failed"
    turns, log = span_credit(here([tree([None]), broken]))
    assert len(turns) == 1
    assert log["span_quotes"] == 0.0
    assert np.all(turns[0].token_advantages == pytest.approx(-0.25))


def test_a_task_may_read_spans_itself() -> None:
    class Told:
        def spans(self, text: str) -> list[tuple[str, int]]:
            return [(text, -1)]

    at = here([quoted("10", "1")])
    assert spans._read(at, "1") == []
    at.players = type("P", (), {"task": Told(), "tokenizer": at.players.tokenizer})()
    assert spans._read(at, "1") == [("1", -1)]
