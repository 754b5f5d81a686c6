"""From a config to what a role learns from: its credit rule, and the terms added to it."""

from __future__ import annotations

from dataclasses import replace

from megatron_binac.objectives import chain, first_prompt, groups, regenerate, spans, turns, values
from megatron_binac.objectives.situation import Credit, Extra, Situation
from megatron_binac.rollout.batch import actor_turns, critic_turns, sequences
from megatron_binac.terms import Term
from megatron_binac.types import Turn


def tree_credit(situation: Situation) -> tuple[list[Turn], dict[str, float]]:
    """Bi-NAC's credit of attempts and revisions (eq. 3), see `rollout.batch.actor_turns`."""
    return actor_turns(situation.trees, situation.config.bilevel)


def no_credit(situation: Situation) -> tuple[list[Turn], dict[str, float]]:
    """No policy gradient: what is added is all there is."""
    return [], {}


CREDITS: dict[str, Credit] = {
    "tree": tree_credit,
    "group": groups.group_credit,
    "running": groups.running_credit,
    "chain": chain.follower_credit,
    "two_turn": turns.two_turn_credit,
    "progress": turns.progress_credit,
    "union": first_prompt.union_credit,
    "regenerated": regenerate.regenerated_credit,
    "spans": spans.span_credit,
    "value": values.value_credit,
    "none": no_credit,
}
EXTRAS: dict[str, Extra] = {
    "self_distill": first_prompt.self_distill,
    "feedback_model": first_prompt.feedback_model,
    "teacher": first_prompt.teacher,
    "shaped": first_prompt.shaped,
    "contrast": regenerate.contrast,
}
"""By the name of the config's block; a block that is None adds nothing."""


def follow_terms(situation: Situation) -> tuple[list[Term], dict[str, float]]:
    """What the actor learns from in this step, and what is logged about its credit."""
    config = situation.config
    learned, log = CREDITS[config.credit.kind](situation)
    apart: list[Term] = []
    if config.credit.attempt_kl_coef is not None:
        apart, _ = first_prompt.kl_on_attempts(situation)
        learned = [turn for turn in learned if turn.kind != "attempt"]
    terms = [Term(rows=sequences(learned), loss=config.actor.loss), *apart]
    for name, extra in EXTRAS.items():
        if getattr(config, name) is not None:
            more, found = extra(situation)
            terms, log = terms + more, log | found
    if config.credit.kind == "union":
        # Attempts and revisions are one group of the paper, with one mean over all their tokens.
        total = float(sum(term.num_targets for term in terms))
        terms = [replace(term, denominator=total) for term in terms]
    return terms, log


def lead_terms(situation: Situation) -> tuple[list[Term], dict[str, float]]:
    """What the critic learns from at the end of a block."""
    config = situation.config
    if config.credit.kind == "chain":
        learned, log = chain.leader_credit(situation)
    elif config.bilevel.adaptation == "value":
        ahead = values.leader_values(situation)
        learned, log = critic_turns(
            situation.trees, config.bilevel, situation.players.task, heads=ahead
        )
    else:
        learned, log = critic_turns(situation.trees, config.bilevel, situation.players.task)
    return [Term(rows=sequences(learned), loss=config.critic_loss)], log
