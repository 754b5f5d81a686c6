"""MLMT-RL: revisions against the head, feedback by the head now and ahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_trees import FixedValues, credits, situation, tree

from megatron_binac.config import BilevelConfig
from megatron_binac.method_config import CreditConfig, ValueHeadConfig
from megatron_binac.objectives.build import lead_terms
from megatron_binac.objectives.values import leader_values, value_credit


def here(values: FixedValues, lam: float = 0.5):
    trees = [tree([0, 1], {0: [[1, 0], [1, 1]], 1: [[None, None], [0, 1]]})]
    return situation(
        trees,
        credit=CreditConfig(kind="value"),
        bilevel=BilevelConfig(
            lam=lam, adaptation="value", attempt_weight=0.0, attempt_value_weight=1.0
        ),
        value_head=ValueHeadConfig(),
        values=values,
    )


def test_a_revision_is_compared_with_the_heads_value() -> None:
    values = FixedValues(now=0.25)
    turns, log = value_credit(here(values))
    assert credits(turns, "revision") == pytest.approx(
        [0.75, -0.25, 0.75, 0.75, 0.0, 0.0, -0.25, 0.75]
    )
    assert [t.trainable for t in turns if t.kind == "revision"] == [True] * 4 + [False] * 2 + [
        True
    ] * 2
    # Attempts by the mean value of their feedback: 3/4 and 1/2 about 5/8.
    assert credits(turns, "attempt") == pytest.approx([0.125, -0.125])
    ((rows, targets, bounded),) = values.taught
    assert bounded
    assert [float(t[r.mask][0]) for r, t in zip(rows, targets, strict=True)] == [0.5, 1.0, 0.5]
    # The head is read at the feedback's end, before the second answer begins.
    assert all(r.mask.tolist() == [False, False, True] for r in rows)
    assert log["head/value"] == 0.25


def test_feedback_that_only_a_later_actor_could_use_is_worth_less() -> None:
    at = here(FixedValues(now=0.25, later=0.5))
    now, ahead = leader_values(at)
    assert torch.equal(now, torch.tensor([[0.25, 0.25], [0.0, 0.25]], dtype=torch.float64))
    assert torch.equal(ahead, torch.tensor([[0.5, 0.5], [0.0, 0.5]], dtype=torch.float64))
    (term,), log = lead_terms(at)
    assert log["gap"] == pytest.approx(0.25)
    # Both siblings lose the same, so what sets them apart is V alone: 1/2 against 1.
    assert [r.advantage for r in term.rows] == pytest.approx([-0.5, 0.5])


def test_the_sign_of_the_penalty() -> None:
    """U = V + lam (V_head - V^k) for lam 1/2: 1/2 + (0 - 1) / 2 against 1."""

    class Uneven(FixedValues):
        def read(self, rows, *, bounded):  # type: ignore[no-untyped-def]
            return [np.where(r.mask, 0.0, 0.0).astype(np.float32) for r in rows]

        def ahead(self, rows, targets, *, bounded):  # type: ignore[no-untyped-def]
            return [np.where(r.mask, 1.0 * (i == 0), 0.0) for i, r in enumerate(rows)]

    (term,), _ = lead_terms(here(Uneven()))
    assert [r.advantage for r in term.rows] == pytest.approx([-1.0, 1.0])
