"""The mathematics tasks: data in its formats, grades, leaks, a judge that nothing holds up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_binac.tasks import build_task
from megatron_binac.tasks.grading import grade_all
from megatron_binac.tasks.math import MathTask, build_math, gold_answer
from megatron_binac.tasks.math_judge import MathJudge

pytest.importorskip("math_verify", reason="needs math-verify (the extra tasks)")

ROWS = [
    {"problem": "Half of one?", "answer": r"\frac{1}{2}", "unique_id": "a", "level": 1},
    {"problem": "Who?", "answer": r"\text{Evelyn}", "unique_id": "b", "level": 2},
    {"problem": "Two?", "solution": r"It is $\boxed{2}$.", "answer": "2", "unique_id": "c"},
]


@pytest.fixture(scope="module")
def judge() -> Iterator[MathJudge]:
    built = MathJudge(workers=1, seconds=0.5)
    yield built
    built.close()


@pytest.fixture(scope="module")
def task(judge: MathJudge, tmp_path_factory: pytest.TempPathFactory) -> MathTask:
    path = tmp_path_factory.mktemp("data") / "eval.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    built = build_math(eval_data=str(path), workers=1)
    # One helper for all tests: it takes seconds to import sympy.
    built.judge = judge
    return built


BOMBS = {
    "a power tower": "9^{9^{9^9}}",
    "a factorial of a power": "10^{10^{10}}!",
    "a large factorial": "99999999!",
    "a long sum": r"\sum_{k=1}^{10^{12}} \sin(k)",
    "a large binomial": r"\binom{10^9}{5\cdot 10^8}",
    "many brackets": "(" * 2000 + "5" + ")" * 2000,
    "an integral": r"\int_0^{\infty} e^{-x^{x^x}} dx",
    "python": "__import__('os').system('touch /tmp/binac-was-here')",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_wrong_and_the_next_answer_is_judged(judge: MathJudge, kind: str) -> None:
    assert judge.equal(r"\sqrt{5}", BOMBS[kind]).equal is False
    found = judge.equal(r"\frac{\sqrt{2}}{2}", "sqrt(2)/2")
    assert (found.equal, found.how) == (True, "algebra")
    assert not Path("/tmp/binac-was-here").exists()


def test_a_tower_is_stopped_by_the_limit(judge: MathJudge) -> None:
    found = judge.equal(r"\sqrt{5}", "9^{9^{9^9}}")
    assert (found.equal, found.how) == (False, "time")


def test_it_works_in_threads(judge: MathJudge) -> None:
    found: list[bool] = []

    def work() -> None:
        found.append(judge.equal(r"\frac12", "0.5").equal)
        found.append(judge.equal(r"\sqrt{2}", r"\frac{2}{\sqrt{2}}").equal)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


def test_grades(task: MathTask) -> None:
    half, who, _ = (task.prompt("eval", i) for i in range(3))
    assert task.grade(half, r"\boxed{0.5}").score == 1.0
    assert task.grade(half, "The answer is 1/2").score == 1.0
    assert task.grade(who, r"\boxed{evelyn}").score == 1.0
    wrong = task.grade(half, r"\boxed{0.6}")
    assert (wrong.score, wrong.parsed, wrong.failed) == (0.0, "0.6", False)
    assert wrong.reason == r"gold is \frac{1}{2}"
    cut = task.grade(half, r"\boxed{0.5} or \boxed{0.")
    assert (cut.score, cut.parsed, cut.reason) == (0.0, None, "the last box is not closed")
    root = replace(half, gold=r"\sqrt{5}")
    bomb = task.grade(root, r"\boxed{9^{9^{9^9}}}")
    assert (bomb.score, bomb.failed) == (0.0, False)
    assert bomb.reason.endswith("the comparison ended by time")


REPEATS = [
    (r"Expand $(x+1)^2$.", "x^2+2x+1", r"(x+1)^2", 0.0),
    (r"Expand $(x+1)^2$.", "x^2+2x+1", r"x^2+2x+1", 1.0),
    (r"Expand $(x+1)^2$.", "x^2+2x+1", r"1+2x+x^2", 1.0),
    (r"Factor $x^2-1$.", "(x-1)(x+1)", r"x^{2} - 1", 0.0),
    (r"Simplify $\frac{6}{8}$.", r"\frac{3}{4}", r"\frac{6}{8}", 0.0),
    (r"Simplify $\frac{6}{8}$.", r"\frac{3}{4}", "0.75", 1.0),
    (r"Compute $\dbinom{8}{4}$.", "70", r"\binom{8}{4}", 0.0),
    (r"Compute $\cos 60^\circ$.", r"\frac{1}{2}", r"\cos 60^\circ", 0.0),
    (r"Compute $\cos 60^\circ$.", r"\frac{1}{2}", r"\sin 30^\circ", 0.0),
    (r"What is $36+64$?", "100", "36+64", 0.0),
    (r"What is $36+64$?", "100", "64 + 36", 0.0),
    # A number may stand in the problem, and so may the gold answer.
    ("Of 1200 apples he eats none. How many are left?", "1200", "1,200", 1.0),
    ("He eats 1/2 of 5/4. How much is that?", "0.625", "5/8", 1.0),
    ("Half of it is 1/2 a mile. How far is half?", "0.5", "1/2", 1.0),
    (r"Is $x^2$ or $x^3$ the answer?", "x^3", "x^3", 1.0),
]


@pytest.mark.parametrize(("text", "gold", "answer", "score"), REPEATS)
def test_an_answer_that_repeats_the_problem_is_none(
    task: MathTask, text: str, gold: str, answer: str, score: float
) -> None:
    prompt = replace(task.prompt("eval", 0), text=text, gold=gold, meta={"statement": text})
    assert task.grade(prompt, rf"\boxed{{{answer}}}").score == score


def test_prompts_hold_the_problem_and_not_the_answer(task: MathTask) -> None:
    prompt = task.prompt("eval", 0)
    assert prompt.id == "math/eval/a"
    assert prompt.text.startswith("Half of one?\n\nReason step by step")
    assert "frac" not in prompt.text
    assert prompt.meta == {"level": 1, "statement": "Half of one?"}
    assert task.size("train") == 0


def test_grading_many_keeps_their_order(task: MathTask) -> None:
    half = task.prompt("eval", 0)
    texts = [r"\boxed{0.5}", r"\boxed{3}", "nothing\nhere", r"\boxed{\frac{2}{4}}"]
    assert [g.score for g in grade_all(task, [(half, t) for t in texts])] == [1.0, 0.0, 0.0, 1.0]


LEAKS = [
    ("It is 3.", r"You slipped; the answer is \frac{1}{2}.", True),
    ("It is 3.", r"No: \boxed{\frac12}", True),
    ("It is 3.", "Check how you divide.", False),
    (r"\boxed{\frac{1}{2}}", r"Yes, \boxed{\frac{1}{2}} is right.", False),
]


@pytest.mark.parametrize(("attempt", "feedback", "leaked"), LEAKS)
def test_leaks(task: MathTask, attempt: str, feedback: str, leaked: bool) -> None:
    assert task.leaks(task.prompt("eval", 0), attempt, feedback) is leaked


def test_a_short_answer_leaks_only_where_it_is_marked(task: MathTask) -> None:
    two = task.prompt("eval", 2)
    assert not task.leaks(two, "5", "In step 2 you added 2 twice.")
    assert task.leaks(two, "5", "The result should be 2.")


def test_votes_count_equal_answers_as_one(task: MathTask) -> None:
    assert task.same_answer("0.5", r"\frac{1}{2}")
    assert not task.same_answer("0.5", "0.6")


def test_verdicts(task: MathTask) -> None:
    assert task.verdict("This is correct.") is True
    assert task.verdict("That is not correct") is False
    assert task.verdict("Right idea, yet incorrect.") is False
    assert task.verdict("Hm.") is None


def test_gold_of_a_solution() -> None:
    assert gold_answer("48/2 = 24\n#### 1,072") == "1,072"
    assert gold_answer(r"so $\boxed{\frac{1}{2}}$") == r"\frac{1}{2}"
    assert gold_answer(" 7 ") == "7"


def test_columns_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("frage,loesung\nWhat is 1+1?,2\n")
    task = build_math(eval_data=str(path), columns={"text": "frage", "gold": "loesung"})
    assert task.prompt("eval", 0).gold == "2"
    with pytest.raises(
        ValueError,
        match=r"own.csv: .*row 1 .*no column 'answer' or .*\['frage', 'loesung'\]; .* `columns`",
    ):
        build_math(eval_data=str(path)).size("eval")
    with pytest.raises(ValueError, match="got columns for 'question'"):
        build_math(eval_data=str(path), columns={"question": "frage"})


def test_an_answer_of_gsm8k_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    answers = ["6 * 7 = 42\n#### 42", "#### $1,072", "nobody knows"]
    path.write_text("\n".join(json.dumps({"question": a, "answer": a}) for a in answers))
    with pytest.raises(
        ValueError, match=r"g.jsonl: .*row 3 \(id 2\).*'nobody knows' ends in no number"
    ):
        build_task("gsm8k", eval_data=str(path)).size("eval")
    path.write_text(path.read_text().rpartition("\n")[0])
    task = build_task("gsm8k", eval_data=str(path))
    assert [task.prompt("eval", i).gold for i in range(2)] == ["42", "$1,072"]


def test_gsm8k(data_dir: Path) -> None:
    task = build_task(
        "gsm8k",
        eval_data=str(data_dir / "gsm8k_test.jsonl"),
        train_data=str(data_dir / "gsm8k_train.jsonl"),
    )
    rows = [json.loads(line) for line in (data_dir / "gsm8k_train.jsonl").open()]
    assert (task.size("train"), task.size("eval")) == (7473, 1319)
    right = sum(task.grade(task.prompt("train", i), r["answer"]).score for i, r in enumerate(rows))
    assert right == 7473


def test_math500_golds_equal_themselves(data_dir: Path) -> None:
    path = data_dir / "math500_test.jsonl"
    task = build_task("math500", eval_data=str(path), workers=1)
    rows = [json.loads(line) for line in path.open()]
    pairs = [(task.prompt("eval", i), rf"\boxed{{{r['answer']}}}") for i, r in enumerate(rows)]
    pairs += [(task.prompt("eval", i), r["solution"]) for i, r in enumerate(rows)]
    assert sum(g.score for g in grade_all(task, pairs)) == 1000
