"""What must not move, and what must be equal: a baseline is the loop with something left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_ranks import run_ranks
from helpers_runs import arguments, assert_same_checkpoint, rows, run, tensors
from helpers_toy import JUNK, ONE, ZERO, Xor, toy_config, toy_players

from megatron_binac.config import (
    BilevelConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RoleConfig,
)
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.rollout.batch import critic_turns
from megatron_binac.rollout.play import play, revise, seeds_of
from megatron_binac.types import Sampling, TrainSequence, Tree

PROBING = ("bilevel.lam=0.5",)
SHORT = ("num_steps=3", "save_every=0", "eval.every=0", "eval.num_prompts=2")
LAYOUTS = {
    "alone": (1, ParallelConfig(), ParallelConfig()),
    "tp beside dp": (2, ParallelConfig(tp=2), ParallelConfig()),
    "dp beside pp": (2, ParallelConfig(), ParallelConfig(pp=2)),
}


def batch() -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    return [
        TrainSequence(
            ids=rng.integers(0, 100, 12).astype(np.int32),
            mask=np.arange(12) >= 3,
            advantage=float(rng.normal()),
            logprobs=np.full(12, -3.7, np.float32),
        )
        for _ in range(6)
    ]


def held(learner: MegatronLearner) -> list[torch.Tensor]:
    """Weights and moments."""
    adam = [
        part.optimizer.state[p][name]
        for part in learner.optimizer.chained_optimizers
        for group in part.optimizer.param_groups
        for p in group["params"]
        for name in ("exp_avg", "exp_avg_sq")
    ]
    return [t.detach().clone() for t in (*learner.parameters(), *adam)]


def steps_of_both(actor_layout: ParallelConfig, critic_layout: ParallelConfig) -> dict[str, Any]:
    """An update of each role in turn; which tensors of which role it changed."""
    start_distributed()
    learners = {}
    for role, parallel in (("actor", actor_layout), ("critic", critic_layout)):
        config = RoleConfig(
            model=ModelConfig(
                num_layers=2, hidden_size=32, ffn_hidden_size=48, max_sequence_length=32
            ),
            parallel=parallel,
            optimizer=OptimizerConfig(lr=1e-2),
        )
        learners[role] = MegatronLearner(
            role,
            config,
            build_groups(role, parallel, 1),
            vocab_size=100,  # so that both shards of the vocabulary hold some of it
            seed=1,
            num_steps=9,
            temperature=1.0,
        )
    out: dict[str, Any] = {}
    for learner in learners.values():
        learner.hold_reference()
        learner.update(batch(), LossConfig(kl_coef=0.1))
    for mover, still in (("actor", "critic"), ("critic", "actor")):
        before = {role: held(learner) for role, learner in learners.items()}
        learners[mover].update(batch(), LossConfig(kl_coef=0.1))
        learners[mover].logprobs(batch(), reference=True)
        after = {role: held(learner) for role, learner in learners.items()}
        moved = {
            role: [not torch.equal(a, b) for a, b in zip(before[role], after[role], strict=True)]
            for role in learners
        }
        out[mover] = {"itself": all(moved[mover]), "other": any(moved[still])}
    return out


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_one_role_moves_nothing_of_the_other(layout: str) -> None:
    world, actor, critic = LAYOUTS[layout]
    for rank in run_ranks(world, steps_of_both, actor, critic):
        for mover in ("actor", "critic"):
            assert rank[mover] == {"itself": True, "other": False}, mover


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run of three steps, by recipe and settings; each is made once."""
    made: dict[tuple[str, ...], Path] = {}
    folder = tmp_path_factory.mktemp("sentinels")

    def of(recipe: str, *sets: str) -> Path:
        key = (recipe, *sets)
        if key not in made:
            made[key] = folder / str(len(made))
            run(1, arguments(made[key], folder / "warm", *SHORT, *sets, recipe=recipe))
        return made[key]

    return of


def same_weights(a: Path, b: Path, role: str) -> bool:
    left, right = (
        {k: v for k, v in tensors(d, 3, role).items() if not k.startswith("optimizer")}
        for d in (a, b)
    )
    assert left.keys() == right.keys()
    assert len(left) == 9
    return all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.slow
def test_two_runs_are_bit_equal(played: Callable[..., Path]) -> None:
    one = played("quickstart", *PROBING)
    other = played("quickstart", *PROBING, *PROBING)  # said twice: the same config, another run
    assert one != other
    assert rows(one) == rows(other)
    assert_same_checkpoint(one, other, 3)


@pytest.mark.slow
def test_joint_is_binac_at_lambda_zero(played: Callable[..., Path]) -> None:
    joint, zero = played("quickstart_joint"), played("quickstart", "bilevel.lam=0.0")
    probing = played("quickstart", *PROBING)
    assert rows(joint) == rows(zero)
    assert_same_checkpoint(joint, zero, 3)
    assert any(row.get("critic/lead/gap") for row in rows(probing))
    assert not same_weights(joint, probing, "critic")


@pytest.mark.slow
def test_a_fixed_critic_is_a_critic_that_does_not_learn(played: Callable[..., Path]) -> None:
    """Frozen, or led with a learning rate of 0: the actor can't tell."""
    fixed, moving = played("quickstart_fixed_critic"), played("quickstart", *PROBING)
    still = played("quickstart", "critic.optimizer.lr=0.0")
    for role in ("actor", "critic"):
        assert same_weights(fixed, still, role)
    assert not same_weights(fixed, moving, "critic")
    assert not same_weights(fixed, moving, "actor")
    rewards = [[r["play/reward"] for r in rows(d)[1:]] for d in (fixed, still)]
    assert rewards[0] == rewards[1]
    # The first step is played and followed before the critic has moved.
    assert rows(fixed)[1]["actor/follow/grad_norm"] == rows(moving)[1]["actor/follow/grad_norm"]


@pytest.mark.slow
def test_the_penalty_of_an_unmoved_actor_is_exactly_nothing(played: Callable[..., Path]) -> None:
    """At a learning rate of 0 the adapted actor is the actor: any lambda trains the same critic."""
    probing = played("quickstart", "actor.optimizer.lr=0.0", "bilevel.lam=0.7")
    plain = played("quickstart", "actor.optimizer.lr=0.0", "bilevel.lam=0.0")
    for row, other in zip(rows(probing)[1:], rows(plain)[1:], strict=True):
        assert row["critic/lead/gap"] == 0.0
        assert row["critic/lead/grad_norm"] == other["critic/lead/grad_norm"]
        assert row["critic/lead/num_tokens"] > 0
    assert same_weights(probing, plain, "critic")
    assert same_weights(probing, plain, "actor")


def by_seed(prompt: np.ndarray, seed: int, sampling: Sampling) -> tuple[list[int], list[float]]:
    return [(ZERO, ONE, JUNK)[seed % 3]], [-1.0]


def told(prompt: np.ndarray, seed: int, sampling: Sampling) -> tuple[list[int], list[float]]:
    """A first answer by the seed, a revision by the word of feedback alone."""
    word = int(prompt[-3])
    return ([word], [-1.0]) if len(prompt) > 5 else by_seed(prompt, seed, sampling)


def adapted(prompt: np.ndarray, seed: int, sampling: Sampling) -> tuple[list[int], list[float]]:
    """An actor that has learned to read junk as 1."""
    ids, logprobs = told(prompt, seed, sampling)
    return [ONE if i == JUNK else i for i in ids], logprobs


def credit_of_words(trees: list[Tree]) -> list[list[float]]:
    """[C, F] over all trees, after the actor and the adapted actor have answered the words."""
    rollout, task = toy_config().rollout, Xor()
    revise(toy_players(told, by_seed), trees, rollout, seeds_of(1, 0))
    revise(toy_players(adapted, by_seed), trees, rollout, seeds_of(1, 0), probe=True)
    critic_turns(trees, BilevelConfig(lam=0.3), task)
    return [[z.advantage for z in zs] for tree in trees for zs in tree.feedbacks]


def test_feedback_that_is_shuffled_among_siblings_takes_its_credit_along() -> None:
    players = toy_players(told, by_seed)
    prompts = [players.task.prompt("train", i) for i in range(8)]
    trees = play(players, prompts, toy_config().rollout, 0)
    before = credit_of_words(trees)
    order = (1, 2, 0)
    shuffled = [replace(t, feedbacks=[[zs[f] for f in order] for zs in t.feedbacks]) for t in trees]
    after = credit_of_words(shuffled)
    for old, new in zip(before, after, strict=True):
        assert new == pytest.approx([old[f] for f in order], abs=1e-12)
    assert sum(old != new for old, new in zip(before, after, strict=True)) > 4
    # And by hand: right word +, wrong word -, junk (which only the adapted actor uses) in between.
    told_apart = 0
    for tree in trees:
        for zs in tree.feedbacks:
            kinds = {z.text: z.advantage for z in zs}
            if len(kinds) == 3:
                told_apart += 1
                right, wrong = tree.prompt.gold, str(1 - int(tree.prompt.gold))
                gain = 1.0 if right == "1" else 0.0  # V* of junk
                value = {right: 1.0, wrong: 0.0, "?": -0.3 * gain}
                mean = {k: (sum(value.values()) - v) / 2 for k, v in value.items()}
                assert kinds == pytest.approx({k: v - mean[k] for k, v in value.items()})
    assert told_apart > 1
