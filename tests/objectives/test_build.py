"""Which rule and which terms a config asks for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import get_args

import pytest
from helpers_toy import toy_config
from helpers_trees import situation, tree

from megatron_binac.config import BilevelConfig, Config, override
from megatron_binac.method_config import (
    CreditConfig,
    CreditKind,
    SelfDistillConfig,
    StageConfig,
    ValueHeadConfig,
)
from megatron_binac.objectives.build import CREDITS, EXTRAS, follow_terms, lead_terms


def test_every_kind_of_credit_has_a_rule_and_every_block_is_a_field() -> None:
    assert set(CREDITS) == set(get_args(CreditKind))
    assert set(EXTRAS) <= {f.name for f in fields(Config)}


def test_terms_are_added_only_where_the_config_holds_their_block() -> None:
    trees = [tree([1, 0], {0: [[1, 0]], 1: [[1, 1]]})]
    (main,), _ = follow_terms(situation(trees))
    assert main.name == ""
    terms, _ = follow_terms(situation(trees, self_distill=SelfDistillConfig()))
    assert [t.name for t in terms] == ["", "sd"]


def test_held_attempts_leave_the_main_term() -> None:
    trees = [tree([1, 0], {0: [[1, 0]], 1: [[0, 1]]})]
    main, held = follow_terms(
        situation(trees, credit=CreditConfig(kind="progress", attempt_kl_coef=0.1))
    )[0]
    assert (len(main.rows), len(held.rows)) == (4, 2)
    assert (held.name, held.loss.kl_coef) == ("attempt", 0.1)


def test_discrimination_alone_pays_for_the_verdict() -> None:
    """value_weight 0: what the revision made of the words is not in the critic's utility."""

    class Verdict:
        name = "xor"

        def verdict(self, text: str) -> bool:
            return text == "1"

        def leaks(self, *texts: object) -> bool:
            return False

    grown = tree([0], {0: [[1], [0]]})
    grown.feedbacks[0][1].text = "1"
    config = BilevelConfig(lam=0.0, value_weight=0.0, discrimination_coef=1.0)
    at = situation([grown], bilevel=config, task=Verdict())
    (term,), log = lead_terms(at)
    # The attempt is wrong: "?" says so and is right, "1" is not.
    assert [r.advantage for r in term.rows] == [1.0, -1.0]
    assert log["acc_dis"] == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"credit": CreditConfig(kind="two_turn")}, "set the two equal"),
        ({"credit": CreditConfig(kind="spans")}, "set both or neither"),
        ({"credit": CreditConfig(kind="union")}, "set both or neither"),
        ({"credit": CreditConfig(kind="value")}, "value_head is null"),
        (
            {
                "bilevel": BilevelConfig(adaptation="value"),
                "value_head": ValueHeadConfig(),
            },
            "nothing fits the value head",
        ),
        ({"stages": (StageConfig(set=("rollout.temperature=2",)),)}, "read once"),
        ({"stages": (StageConfig(set=("num_steps=2",)),)}, "stages.set holds"),
        ({"stages": (StageConfig(start=0.5),)}, "expected 0 first"),
        ({"credit": CreditConfig(kind="regenerated")}, "failed_groups go together"),
        (
            {
                "rollout": replace(toy_config().rollout, criticised=0),
                "self_distill": SelfDistillConfig(),
            },
            "it learns from feedback",
        ),
    ],
)
def test_a_block_without_what_it_works_on_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy_config(**changes)


def test_a_setting_that_nothing_reads_is_refused() -> None:
    """Case 22."""
    with pytest.raises(ValueError, match=r"credit\.momentum is set but credit\.kind 'group'"):
        CreditConfig(kind="group", momentum=0.5)
    with pytest.raises(ValueError, match=r"credit\.scale is set but credit\.kind 'tree'"):
        CreditConfig(scale="std")


def test_a_stage_puts_its_settings_in_and_lets_roles_rest() -> None:
    config = toy_config(
        stages=(
            StageConfig(train=("critic",), set=("bilevel.value_weight=0",)),
            StageConfig(start=0.5, set=("actor.loss.kl_coef=0.5",)),
        )
    )
    first, second = config.at(0.49), config.at(0.5)
    assert (first.actor.train, first.critic.train, first.bilevel.value_weight) == (False, True, 0)
    assert (second.actor.train, second.bilevel.value_weight) == (True, 1.0)
    assert second.actor.loss.kl_coef == 0.5
    assert toy_config().at(0.7) == toy_config()


def test_a_block_is_turned_on_by_a_setting_and_changed_by_the_next() -> None:
    got = override(toy_config(), ["self_distill={}", "self_distill.coef=0.05"])
    assert got.self_distill == SelfDistillConfig(coef=0.05)
    with pytest.raises(ValueError, match=r"self_distill is null .* --set self_distill=\{\}"):
        override(toy_config(), ["self_distill.coef=0.05"])
