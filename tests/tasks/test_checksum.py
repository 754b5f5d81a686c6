"""The check-digit task: items, grades, what counts as a leak, right working."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron_binac.tasks.base import TeachingTask
from megatron_binac.tasks.checksum import Checksum
from megatron_binac.types import Prompt

TASK = Checksum()


def problem(text: str) -> Prompt:
    gold = str(sum(map(int, text)) % 10)
    return Prompt(id="checksum/train/0", text=text, gold=gold, task="checksum")


def test_the_documented_example():
    prompt = problem("74036")
    assert prompt.gold == "0"  # 7 + 4 + 0 + 3 + 6 = 20
    assert TASK.oracle_feedback(prompt, "8") == "293362 off"
    assert TASK.grade(prompt, "0").score == 1.0
    assert TASK.grade(prompt, "8").score == 0.0
    assert TASK.oracle_feedback(prompt, "0") == "071140 ok"


@pytest.mark.parametrize(
    ("text", "parsed", "score"),
    [
        ("0", "0", 1.0),
        (" 0\n", "0", 1.0),
        ("7", "7", 0.0),
        ("", None, 0.0),
        ("00", None, 0.0),
        ("20", None, 0.0),
        ("0 0", None, 0.0),
        ("-0", None, 0.0),
        ("0.", None, 0.0),
        ("0<|user|>", None, 0.0),
        ("\u0660", None, 0.0),  # ARABIC-INDIC DIGIT ZERO
        ("0123456789", None, 0.0),  # naming every answer is no answer
    ],
)
def test_only_the_right_digit_alone_scores(text: str, parsed: str | None, score: float):
    grade = TASK.grade(problem("74036"), text)
    assert (grade.parsed, grade.score, grade.failed) == (parsed, score, False)


def test_items_depend_on_seed_split_and_index_alone():
    # The same on every machine and version: a run's data must not change under it.
    assert [TASK.prompt("train", i).text for i in range(3)] == ["85000", "58640", "00707"]
    assert [TASK.prompt("eval", i).text for i in range(3)] == ["00103", "79000", "32608"]
    again = Checksum()
    for index in (0, 1, 999):
        assert again.prompt("train", index) == TASK.prompt("train", index)
    texts = [TASK.prompt("train", i).text for i in range(50)]
    assert texts != [TASK.prompt("eval", i).text for i in range(50)]
    assert texts != [Checksum(seed=1).prompt("train", i).text for i in range(50)]
    assert TASK.size("train") is None and TASK.size("eval") is None


def test_train_and_eval_share_no_item_under_any_seed():
    train = {Checksum(seed=s).prompt("train", i).text for s in (0, 1) for i in range(3000)}
    held_out = {Checksum(seed=s).prompt("eval", i).text for s in (0, 1) for i in range(1500)}
    for role in ("actor", "critic"):
        train |= {TASK.supervised(role, i)[0].text for i in range(2000)}
    assert len(train) > 4000 and len(held_out) > 1200
    assert not train & held_out


def test_the_held_out_share_is_as_asked():
    # A fifth of 10^4 texts: the standard deviation of the share is 0.004.
    texts = [f"{i:05d}" for i in range(0, 100_000, 10)]
    assert abs(sum(map(TASK._held_out, texts)) / len(texts) - 0.2) < 0.016


def test_levels_come_in_the_asked_shares():
    prompts = [TASK.prompt("train", i) for i in range(4000)]
    levels = Counter(p.meta["level"] for p in prompts)
    assert abs(levels["easy"] / 4000 - 0.4) < 0.03
    sizes = Counter(5 - p.text.count("0") for p in prompts)
    assert set(sizes) == {1, 2, 4, 5}
    assert abs(sizes[1] / levels["easy"] - 0.25) < 0.04
    for p in prompts:
        assert p.gold == str(sum(map(int, p.text)) % 10)
        assert (p.meta["level"] == "easy") == (p.text.count("0") >= 3)


def test_a_guess_is_right_one_time_in_ten():
    rng = random.Random(0)
    hard = [p for p in (TASK.prompt("eval", i) for i in range(6000)) if p.meta["level"] == "hard"]
    chance = sum(TASK.grade(p, str(rng.randrange(10))).score for p in hard) / len(hard)
    best = max(Counter(p.gold for p in hard).values()) / len(hard)
    assert abs(chance - 0.1) < 0.02  # 4 standard deviations
    assert best < 0.13  # no single digit is much better than chance


def test_right_feedback_and_one_addition_give_the_answer():
    for index in range(200):
        prompt = TASK.prompt("train", index)
        for attempt in map(str, range(10)):
            feedback = TASK.oracle_feedback(prompt, attempt)
            working = feedback.split()[0]
            assert len(working) == 6
            assert str((int(attempt) + int(working[-1])) % 10) == prompt.gold
            assert TASK.verdict(feedback) is (attempt == prompt.gold)
            assert not TASK.leaks(prompt, attempt, feedback)


def test_right_feedback_says_another_thing_about_another_attempt():
    prompt = problem("74036")
    assert len({TASK.oracle_feedback(prompt, str(d)) for d in range(10)}) == 10


@pytest.mark.parametrize("attempt", ["", "12", "x"])
def test_an_attempt_that_is_no_digit_is_worked_from_as_zero_and_is_never_ok(attempt: str):
    # The sum is 20: working from 0 ends in 0, which must not read as "right".
    assert TASK.oracle_feedback(problem("74036"), attempt) == "071140 off"


@pytest.mark.parametrize(
    ("text", "attempt", "feedback", "leak"),
    [
        ("74034", "3", "711485 off", False),  # gold 8, honest working from 3
        ("74034", "3", "711488 off", True),  # the answer in place of what is lacking
        ("74034", "3", "8", True),
        ("74034", "3", "81 off", False),  # 8 occurs, but not in that place
        ("74034", "8", "711488 off", False),  # the attempt held it already
        ("74034", "4", "639484 off", False),  # 4 + 4 = 8: honest working
        ("74034", "4", "off", False),
        ("00080", "4", "666644 off", False),
        ("74031", "0", "071145 off", False),  # from 0 the lacking digit is the answer itself
    ],
)
def test_a_leak_is_the_answer_where_the_lacking_digit_belongs(
    text: str, attempt: str, feedback: str, leak: bool
):
    assert TASK.leaks(problem(text), attempt, feedback) is leak


@pytest.mark.parametrize(
    ("feedback", "verdict"),
    [
        ("293362 off", False),
        ("071140 ok", True),
        ("071140 OK", True),
        ("off, no: ok", True),
        ("071140", None),
        ("", None),
        ("okay offset", None),
    ],
)
def test_the_last_verdict_counts(feedback: str, verdict: bool | None):
    assert TASK.verdict(feedback) is verdict


def test_supervised_examples_teach_right_answers_and_right_working():
    assert isinstance(TASK, TeachingTask)
    rights = attempts = 0
    for index in range(600):
        for role in ("actor", "critic"):
            turns = TASK.supervised(role, index)
            assert turns == TASK.supervised(role, index)
            assert sum(t.is_target for t in turns) == 1 and turns[-1].is_target
            assert turns[0].speaker == "user" and turns[-1].speaker == role
            prompt = problem(turns[0].text)
            if role == "critic":
                assert turns[-1].text == TASK.oracle_feedback(prompt, turns[1].text)
                rights += turns[1].text == prompt.gold
            else:
                assert turns[-1].text == prompt.gold
                attempts += len(turns) == 2
                assert len(turns) in (2, 4)
    # 30 % on purpose and a tenth of the rest by chance: .37, standard deviation .02.
    assert abs(rights / 600 - 0.37) < 0.08
    assert 0 < attempts < 300  # more revisions than attempts, or they lag behind


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_digits": 2}, "num_digits"),
        ({"easy_share": 1.5}, "easy_share"),
        ({"eval_share": 0.0}, "eval_share"),
        ({"right_share": -0.1}, "right_share"),
    ],
)
def test_a_wrong_option_names_its_field(options: dict[str, float], field: str):
    with pytest.raises(ValueError, match=f"task.options.{field}"):
        Checksum(**options)  # type: ignore[arg-type]
