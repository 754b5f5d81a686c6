"""The tree of a prompt: who is asked what, in which order, and what a failure leaves standing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from helpers_toy import END_ID, JUNK, ONE, PIECES, ZERO, ToyTokenizer, Xor, toy_config, toy_players

from megatron_binac.rollout.batch import actor_turns, sequences
from megatron_binac.rollout.play import Players, generated_tokens, play, replay
from megatron_binac.rollout.scripted_engine import ScriptedEngine
from megatron_binac.tasks.grading import judge
from megatron_binac.types import Grade, Prompt, Sampling, Tree

CONFIG = toy_config()
ROLLOUT = CONFIG.rollout
TOKENS = ToyTokenizer()


def text_of(ids: np.ndarray) -> str:
    return TOKENS.decode([int(i) for i in ids])


def varied(prompt: np.ndarray, seed: int, sampling: Sampling) -> tuple[list[int], list[float]]:
    """0, 1 or junk, by the seed alone."""
    return [(ZERO, ONE, JUNK)[seed % 3]], [-float(seed % 7)]


def grow(players: Players, num: int = 3, step: int = 5) -> list[Tree]:
    prompts = [players.task.prompt("train", i) for i in range(num)]
    return play(players, prompts, ROLLOUT, step)


def turns(trees: list[Tree]) -> list[tuple[str, str]]:
    kinds = ("attempt", "feedback", "revision")
    return [(k, t.text) for tree in trees for k in kinds for t in tree.turns(k)]


def test_a_tree_has_its_shape_and_every_turn_its_context() -> None:
    trees = grow(toy_players(varied, varied))
    for tree in trees:
        x = tree.prompt.text
        assert len(tree.attempts) == 4
        assert len(tree.criticised) == len(tree.feedbacks) == len(tree.revisions) == 2
        assert all(len(zs) == 3 for zs in tree.feedbacks)
        assert all(len(ys) == 2 for zs in tree.revisions for ys in zs)
        for y in tree.attempts:
            assert text_of(y.prompt_ids) == f"<|user|>{x}<|actor|>"
        for c, g in enumerate(tree.criticised):
            y0 = tree.attempts[g].text
            asked = f"<|user|>{x}<|actor|>{y0}<|end|><|critic|>"
            for f, z in enumerate(tree.feedbacks[c]):
                assert text_of(z.prompt_ids) == asked
                for y1 in tree.revisions[c][f]:
                    assert text_of(y1.prompt_ids) == f"{asked}{z.text}<|end|><|actor|>"
                    assert y1.kind == "revision"
    assert {t for _, t in turns(trees)} == {"0", "1", "?"}


def test_the_engine_is_asked_in_tree_order_with_seeds_of_the_place() -> None:
    """The answer to a place is the same however many prompts are played beside it."""
    players = toy_players(varied, varied)
    together = grow(players, num=3)
    (alone,) = play(players, [together[1].prompt], ROLLOUT, 5)
    assert turns([alone]) == turns([together[1]])
    other_step = play(players, [together[1].prompt], ROLLOUT, 6)
    assert turns(other_step) != turns([together[1]])
    assert isinstance(players.actor, ScriptedEngine)
    seeds = [seed for _, asked, _ in players.actor.asked[:2] for seed in asked]
    assert len(set(seeds)) == len(seeds) == 3 * 4 + 3 * 2 * 3 * 2


def test_attempts_and_revisions_are_graded_and_feedback_is_not() -> None:
    trees = grow(toy_players(varied, varied))
    for tree in trees:
        for y in tree.attempts + tree.turns("revision"):
            assert y.grade is not None
            assert y.reward == float(y.text == tree.prompt.gold)
        assert all(z.grade is None for z in tree.turns("feedback"))


def test_equal_answers_to_one_problem_are_judged_once() -> None:
    judged: list[tuple[str, str]] = []

    class Counting(Xor):
        def grade(self, prompt: Prompt, text: str) -> Grade:
            judged.append((prompt.id, text))
            return super().grade(prompt, text)

    grow(toy_players(varied, varied, task=Counting()))
    # Attempts and revisions are graded apart from each other, each kind without doubles.
    assert len(judged) <= 2 * 3 * 3
    assert len(judged) > 9


def failing(every: int) -> Callable[..., tuple[list[int], list[float]] | None]:
    def script(
        prompt: np.ndarray, seed: int, sampling: Sampling
    ) -> tuple[list[int], list[float]] | None:
        return None if seed % every == 0 else varied(prompt, seed, sampling)

    return script


def test_a_failed_completion_leaves_the_others_as_they_are() -> None:
    whole = grow(toy_players(varied, varied))
    players = toy_players(failing(5), varied)
    trees = play(players, [tree.prompt for tree in whole], ROLLOUT, 5)
    failed = 0
    for tree, good in zip(trees, whole, strict=True):
        for y, want in zip(tree.attempts, good.attempts, strict=True):
            if y.finish == "failed":
                failed += 1
                assert y.failed
                assert y.grade is not None
                assert (y.grade.failed, y.reward, len(y.ids)) == (True, 0.0, 0)
            else:
                assert y.text == want.text
                assert y.grade == want.grade
        # A failed attempt is nothing to speak about.
        assert all(not tree.attempts[g].failed for g in tree.criticised)
    assert failed > 0


def test_an_empty_answer_is_judged_also_behind_a_failed_one() -> None:
    said = iter([None, ([END_ID], [0.0]), None, ([END_ID], [0.0])])
    players = toy_players(lambda *_: next(said), None)
    (tree,) = play(players, [players.task.prompt("train", 0)], replace(ROLLOUT, criticised=0), 0)
    assert [y.text for y in tree.attempts] == [""] * 4
    assert [y.failed for y in tree.attempts] == [True, False, True, False]
    assert [y.grade.failed for y in tree.attempts if y.grade] == [True, False, True, False]


def test_all_attempts_of_a_prompt_may_fail() -> None:
    players = toy_players(failing(1), varied)
    trees = grow(players)
    assert all(tree.criticised == [] for tree in trees)
    assert all(tree.feedbacks == [] and tree.revisions == [] for tree in trees)
    assert generated_tokens(trees) == 0
    found, log = actor_turns(trees, CONFIG.bilevel)
    assert sequences(found) == []
    assert log["num_failed"] == 12


def test_failed_is_not_wrong() -> None:
    """A verifier that breaks takes its turn out of the group's mean; a wrong answer lowers it."""

    for breaks_on, credits, trainable in (
        ("?", [1 / 3, -2 / 3, 0.0, 1 / 3], [True, True, False, True]),
        (None, [0.5, -0.5, -0.5, 0.5], [True] * 4),
    ):
        said = iter([ONE, ZERO, JUNK, ONE])
        players = toy_players(
            lambda *_, said=said: ([next(said)], [0.0]), None, task=Xor(breaks_on=breaks_on)
        )
        prompt = Prompt(id="a", text="01", gold="1", task="xor")
        rollout = replace(ROLLOUT, criticised=0)
        found, log = actor_turns(play(players, [prompt], rollout, 0), CONFIG.bilevel)
        np.testing.assert_allclose([t.advantage for t in found], credits)
        assert [t.trainable for t in found] == trainable
        assert log["num_failed"] == float(breaks_on is not None)


def test_a_verifier_that_breaks_is_caught_with_its_reason() -> None:
    task = Xor(breaks_on="?")
    prompt = task.prompt("train", 0)
    grade = judge(task, prompt, "?")
    assert (grade.failed, grade.score) == (True, 0.0)
    assert grade.reason == "RuntimeError: the verifier broke"
    assert not judge(task, prompt, "0").failed


def test_the_probe_asks_for_the_same_places_again() -> None:
    """An actor that did not move says what it said: V* is V, exactly."""
    players = toy_players(varied, varied)
    trees = grow(players, step=5)
    probed = replay(players, trees, ROLLOUT, 5)
    for tree in probed:
        for c, zs in enumerate(tree.revisions):
            for f, ys in enumerate(zs):
                assert [p.text for p in tree.probes[c][f]] == [y.text for y in ys]
                assert [p.reward for p in tree.probes[c][f]] == [y.reward for y in ys]
    assert generated_tokens(probed, probes=True) == 3 * 2 * 3 * 2
    assert generated_tokens(probed) == 3 * (4 + 2 * 3 + 2 * 3 * 2)


def test_ids_are_kept_and_never_made_again_from_text() -> None:
    """Two ids whose text other ids could spell stay two, from the engine to the loss (case 30)."""

    def with_end(*_: object) -> tuple[list[int], list[float]]:
        return [ONE, END_ID], [-0.125, -0.5]

    rollout = replace(ROLLOUT, max_attempt_tokens=2, max_feedback_tokens=2, max_revision_tokens=2)
    players = toy_players(with_end, with_end)
    (tree,) = play(players, [players.task.prompt("train", 0)], rollout, 0)
    y1 = tree.revisions[0][0][0]
    assert y1.text == "1"
    assert y1.ids.tolist() == [ONE, END_ID]
    # In a context a turn has one end token, whether it was sampled with one or cut.
    assert text_of(y1.prompt_ids).count("<|end|>") == 2
    assert PIECES[y1.prompt_ids[-1]] == "<|actor|>"


def test_versions_are_those_of_the_engines() -> None:
    players = toy_players(varied, varied)
    players.actor.publish(3)
    assert players.critic is not None
    players.critic.publish(1)
    trees = grow(players)
    assert {t.version for tree in trees for t in tree.attempts + tree.turns("revision")} == {3}
    assert {t.version for tree in trees for t in tree.turns("feedback")} == {1}
