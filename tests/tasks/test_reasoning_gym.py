"""Procedural problems: splits that never meet, scores, and answers that are code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_binac.tasks.reasoning_gym import ReasoningGym, find_answer

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym (the extra tasks)")
pytestmark = pytest.mark.slow

MIX = [
    {"name": "chain_sum", "weight": 2.0, "config": {"max_terms": 3, "max_digits": 2}},
    {"name": "spiral_matrix"},
    {"name": "countdown"},
]


@pytest.fixture(scope="module")
def mix() -> Iterator[ReasoningGym]:
    built = ReasoningGym(MIX, workers=1, seconds=10.0)
    yield built
    built.close()


def test_the_last_answer_is_read() -> None:
    assert find_answer("<answer>1</answer> no, <answer> 2\n</answer>") == "2"
    assert find_answer(" 3 \n") == "3"
    assert find_answer("7 + 5 = 12.", last_number=True) == "12"
    assert find_answer("it is 3-8", last_number=True) == "8"
    assert find_answer("3 - 8 = -5", last_number=True) == "-5"
    assert find_answer("no idea", last_number=True) == ""
    assert find_answer("<answer>4</answer> of 9", last_number=True) == "4"
    assert find_answer("<think><answer>1</answer></think> 4") == "4"


def test_golds_score_and_near_misses_do_not(mix: ReasoningGym) -> None:
    prompts = [mix.prompt("eval", i) for i in range(12)]
    assert {p.meta["source"] for p in prompts} == {"chain_sum", "spiral_matrix", "countdown"}
    for p in prompts:
        assert mix.grade(p, f"So it is <answer>{p.gold}</answer>").score == 1.0
        # The library itself pays for an answer that merely contains the gold one.
        assert mix.grade(p, f"{p.gold} or {p.gold}1").score == 0.0
        assert mix.grade(p, "").score == 0.0


def test_problems_are_the_same_every_time_and_splits_never_meet(mix: ReasoningGym) -> None:
    train = [mix.prompt("train", i) for i in range(60)]
    held_out = [mix.prompt("eval", i) for i in range(30)]
    assert not {p.text for p in train} & {p.text for p in held_out}
    assert mix.prompt("train", 7) == train[7]
    assert len({p.id for p in train + held_out}) == 90


@pytest.mark.parametrize("dataset", ["list_functions", "word_ladder", "pool_matrix"])
def test_tasks_that_lay_out_their_problems_or_bound_their_seeds(dataset: str) -> None:
    task = ReasoningGym(dataset, workers=1, seconds=10.0)
    prompts = [task.prompt(split, i) for split in ("train", "eval") for i in (0, 1, 70_000)]
    assert len({p.text for p in prompts}) == 6
    assert task.prompt("eval", 1) == prompts[4]
    for prompt in prompts:
        assert task.grade(prompt, f"<answer>{prompt.gold}</answer>").score == 1.0
        assert task.grade(prompt, "<answer>?</answer>").score == 0.0
    task.close()


def test_laid_out_or_not_an_item_is_the_same() -> None:
    at_once = ReasoningGym("chain_sum", workers=1)
    in_blocks = ReasoningGym("chain_sum", workers=1)
    in_blocks._spec["block"] = True
    for split in ("train", "eval"):
        for index in (0, 3, 40_000):
            assert in_blocks.prompt(split, index) == at_once.prompt(split, index)
    at_once.close()
    in_blocks.close()


HACKS = [
    'entry["answer"].split()',
    "[entry['answer']]",
    "[str(x) for x in entry['answer'].split()]",
    "().__class__.__base__.__subclasses__()",
    "__import__('os').system('touch /tmp/binac-was-here')",
    "eval('1')",
    "open('/etc/passwd').read()",
    "(lambda: 1)()",
    "exec('import os')",
    "getattr(1, 'real')",
]


@pytest.mark.parametrize("answer", HACKS)
def test_answers_that_are_code_are_refused(mix: ReasoningGym, answer: str) -> None:
    seen = set()
    for index in range(40):
        prompt = mix.prompt("eval", index)
        if prompt.meta["source"] in seen or prompt.meta["source"] == "chain_sum":
            continue
        seen.add(prompt.meta["source"])
        grade = mix.grade(prompt, answer)
        assert grade.score == 0.0
        assert grade.reason.startswith("refused")
    assert seen == {"spiral_matrix", "countdown"}


def test_partial_scores_are_asked_for() -> None:
    task = ReasoningGym("spell_backward", workers=1, partial=True)
    prompt = task.prompt("train", 0)
    assert 0.0 < task.grade(prompt, f"{prompt.gold} and more").score < 1.0
    assert task.grade(prompt, prompt.gold).score == 1.0
    assert task.leaks(prompt, "x", f"You should have said {prompt.gold}.")
    assert not task.leaks(prompt, prompt.gold, f"You said {prompt.gold}.")
    task.close()


def test_a_task_without_enough_problems_is_refused() -> None:
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = ReasoningGym("chain_sum", workers=1, config=config, eval_share=0.0001)
    with pytest.raises(ValueError, match="none belongs to 'eval'"):
        task.prompt("eval", 0)
    task.close()


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="has no task 'chain_sums'"):
        ReasoningGym("chain_sums", workers=1)
    with pytest.raises(ValueError, match="eval_share is 0"):
        ReasoningGym("chain_sum", eval_share=0)
    with pytest.raises(ValueError, match="a mix and `config`"):
        ReasoningGym(MIX, config={"size": 3})
