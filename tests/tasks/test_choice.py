"""Multiple choice: which letter a text ends with, the order of options, the bias for positions."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_binac.tasks.choice import (
    LETTERS,
    build_arc,
    build_choice,
    build_gpqa,
    build_mmlu_pro,
    final_letter,
    position_bias,
    question_of,
    shuffled_order,
)
from megatron_binac.types import Grade, Prompt

OPTIONS = ["alpha acid", "strong base", "a salt", "water"]
TEXTS = [
    # statements, the last of which counts
    ("Answer: C", "C"),
    ("Answer: (C)", "C"),
    ("Answer: A? No, wait.\nAnswer: C", "C"),
    ("The answer depends on pH. Therefore (B).", "B"),
    ("Option A looks tempting but is wrong. The correct answer is C.", "C"),
    ("Answer: C\n\nWait, actually the answer is D.", "D"),
    ("Answer: C. (A) is wrong because of the salt.", "C"),
    ("The answer isn't A. Answer: B", "B"),
    ("A is wrong. So B", "B"),
    ("I choose B.", "B"),
    ("Option B is correct.", "B"),
    ("The correct option is (D), since it is neutral", "D"),
    ("Thus, the answer is C) a salt", "C"),
    ("Hence, A.", "A"),
    # ways to write it
    ("**Answer: D**", "D"),
    ("The answer is **B**.", "B"),
    ("ANSWER: C", "C"),
    ("Answer:C", "C"),
    ("Answer: [C]", "C"),
    ("Answer: $C$", "C"),
    ('The answer is "C"', "C"),
    ("answer = B", "B"),
    ("Answer is option C", "C"),
    ("Answer:\nD", "D"),
    ("Answer: c", "C"),
    (r"\boxed{C}", "C"),
    (r"\boxed{\text{C}}", "C"),
    (r"so it is $\boxed{\textbf{(B)}}$", "B"),
    (r"Answer: \boxed{B}", "B"),
    # nothing but the answer
    ("B", "B"),
    ("b", "B"),
    ("(B)", "B"),
    ("**B**", "B"),
    ("Some thoughts.\nB", "B"),
    ("strong base", "B"),
    ("B) strong base", "B"),
    # an article is no letter
    ("The answer is A strong acid", None),
    ("The answer is A because it is sour", "A"),
    # more than one, or none
    ("Answer: A or B", None),
    ("Answer: A and C", None),
    ("Answer: AB", None),
    ("Answer: E", None),
    ("The answer is not A but B", "B"),
    ("I think A. Hmm, B. Or C?", None),
    ("Is the answer A? Is it B?", None),
    ("A\nB\nC\nD", None),
    ("The answer is none of these", None),
    ("So a salt is it", None),
    ("", None),
    # thoughts
    ("<think>Answer: A</think>Answer: B", "B"),
    ("<think>Answer: A", None),
]


@pytest.mark.parametrize(("text", "letter"), TEXTS)
def test_the_final_letter(text: str, letter: str | None) -> None:
    assert final_letter(text, OPTIONS) == letter


def _gpqa(path: Path, num: int) -> Path:
    with path.open("w", newline="") as file:
        columns = ["Record ID", "Question", "Correct Answer", "Subdomain"]
        writer = csv.DictWriter(file, [*columns, *(f"Incorrect Answer {i}" for i in (1, 2, 3))])
        writer.writeheader()
        for n in range(num):
            wrong = {f"Incorrect Answer {i}": f"wrong {i}, {n}" for i in (1, 2, 3)}
            right = {"Correct Answer": f"right {n}", "Subdomain": "Optics"}
            writer.writerow(
                {"Record ID": f"rec{n}", "Question": f"Which is {n}?", **right, **wrong}
            )
    return path


def test_gold_letters_are_even_and_stay(tmp_path: Path) -> None:
    path = _gpqa(tmp_path / "gpqa.csv", 400)
    task = build_gpqa(eval_data=str(path))
    prompts = task.prompts("eval")
    counts = Counter(p.gold for p in prompts)
    assert all(0.18 <= counts[a] / 400 <= 0.32 for a in "ABCD"), counts
    for p in prompts[:20]:
        assert p.meta["options"][LETTERS.index(p.gold)].startswith("right")
        assert f"{p.gold}) right {p.id.rpartition('rec')[2]}" in p.text
    again = build_gpqa(eval_data=str(path)).prompts("eval")
    assert [p.text for p in again] == [p.text for p in prompts]
    other = build_gpqa(eval_data=str(path), seed=1).prompts("eval")
    assert [p.gold for p in other] != [p.gold for p in prompts]
    plain = build_gpqa(eval_data=str(path), shuffle=False).prompts("eval")
    assert {p.gold for p in plain} == {"A"}


def test_the_order_of_a_question_depends_on_no_other(tmp_path: Path) -> None:
    few = build_gpqa(eval_data=str(_gpqa(tmp_path / "few.csv", 10))).prompts("eval")
    many = build_gpqa(eval_data=str(_gpqa(tmp_path / "many.csv", 40))).prompts("eval")
    assert [p.text for p in few] == [p.text for p in many[:10]]


def test_grades_and_leaks(tmp_path: Path) -> None:
    task = build_gpqa(eval_data=str(_gpqa(tmp_path / "gpqa.csv", 1)))
    prompt = task.prompt("eval", 0)
    wrong = next(a for a in "ABCD" if a != prompt.gold)
    assert task.grade(prompt, f"Answer: {prompt.gold}").score == 1.0
    bad = task.grade(prompt, f"Answer: {wrong}")
    assert (bad.score, bad.parsed, bad.reason) == (0.0, wrong, f"gold is {prompt.gold}")
    assert task.grade(prompt, "hm").reason == "no single letter was given as the answer"
    assert task.leaks(prompt, f"Answer: {wrong}", f"No, the answer is {prompt.gold}.")
    assert task.leaks(prompt, f"Answer: {wrong}", "It is right 0, look again.")
    assert not task.leaks(prompt, f"Answer: {wrong}", "Look again at the optics.")
    assert not task.leaks(prompt, f"Answer: {prompt.gold}", f"Yes, the answer is {prompt.gold}.")


FORMATS = [
    (
        {"question": "Q", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"},
        ["a", "b"],
        1,
    ),
    (
        {"question": "Q", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": 1},
        ["a", "b"],
        0,
    ),
    ({"question": "Q", "options": [3, 0.5], "answer": "B"}, ["3", "0.5"], 1),
    ({"question": "Q", "options": ["a", "b", "N/A"], "answer": "B"}, ["a", "b"], 1),
    ({"question": "Q", "options": ["a", "b"], "answer": "B", "answer_index": 0}, ["a", "b"], 0),
    ({"question": "Q", "choices": ["a", "b", "c"], "answer": 2}, ["a", "b", "c"], 2),
    ({"question": "Q", "choices": ["a", "b"], "answer": "a"}, ["a", "b"], 0),
    ({"text": "Q", "options": [{"text": "a", "label": "A"}], "answer": "A"}, ["a"], 0),
]  # fmt: skip


@pytest.mark.parametrize(("row", "options", "gold"), FORMATS)
def test_formats(row: dict, options: list[str], gold: int) -> None:
    assert question_of(row) == ("Q", options, gold)


def test_arc_and_mmlu_pro_in_their_splits(tmp_path: Path) -> None:
    choices = {"text": ["a", "b"], "label": ["A", "B"]}
    arc = {"id": "x", "question": "Q?", "choices": choices, "answerKey": "B"}
    pro = {"question_id": 70, "question": "Q?", "options": ["a", "b", "c"], "answer_index": 0}
    for name, row in (("arc", arc), ("pro", pro)):
        for split, extra in (("train", "Another? "), ("eval", "")):
            text = json.dumps({**row, "question": extra + row["question"]})
            (tmp_path / f"{name}_{split}.jsonl").write_text(text)
    for name, build in (("arc", build_arc), ("pro", build_mmlu_pro)):
        data = {f"{s}_data": str(tmp_path / f"{name}_{s}.jsonl") for s in ("train", "eval")}
        task = build(**data)
        assert (task.size("train"), task.size("eval")) == (1, 1)
        # The same question with its options in another order is the same question.
        same = json.loads((tmp_path / f"{name}_eval.jsonl").read_text())
        if name == "pro":
            same["options"], same["answer_index"] = ["c", "b", "a"], 2
            (tmp_path / "same.jsonl").write_text(json.dumps({**same, "question_id": 99}))
            again = build(**data | {"train_data": str(tmp_path / "same.jsonl")})
            assert (again.size("train"), again.num_dropped) == (0, 1)
        prompt = task.prompt("eval", 0)
        assert task.grade(prompt, f"Answer: {prompt.gold}").score == 1.0


def test_options_that_name_others_stay_in_place() -> None:
    for seed in range(20):
        assert shuffled_order(["x", "y", "Both A and B", "z"], seed) == [0, 1, 2, 3]
        assert shuffled_order(["x", "None of the above", "y"], seed)[-1] == 1
    assert any(shuffled_order(["x", "y", "z"], seed) != [0, 1, 2] for seed in range(5))


def test_an_answer_that_is_no_option_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"question": "Q", "choices": ["a", "b"], "answer": "c"}))
    with pytest.raises(ValueError, match="2 options and the answer at -1"):
        build_choice(eval_data=str(path)).size("eval")


BAD_ROWS = [
    ({"question": ["Q"], "options": ["a", "b"], "answer": 0}, r"column 'question' is \['Q'\]"),
    ({"question": "Q", "options": "a, b", "answer": 0}, "among the options is 'a, b', expected"),
    ({"question": "Q", "options": ["a", None], "answer": 0}, "among the options is None"),
    ({"question": "Q", "options": ["a", "b"], "answer": {"x": 1}}, "column 'answer' is {'x': 1}"),
    ({"question": "Q", "options": ["a", "b"], "answer": True}, "the answer is True, expected"),
    ({"question": "Q", "choices": {"text": ["a", "b"]}, "answer": 0}, "no column 'label', only"),
    (
        {"question": "Q", "choices": {"text": ["a", "b"], "label": ["A"]}, "answer": "A"},
        "2 options and 1 labels",
    ),
    ({"question": "Q", "choices": [{"text": "a"}], "answer": 0}, "no column 'label', only"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_rows_of_wrong_kinds_are_refused_by_name(tmp_path: Path, row: dict, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"row 1 \(id 0\) of split 'eval' .*" + message):
        build_choice(eval_data=str(path)).size("eval")


def _graded(gold: str, chosen: str | None, failed: bool = False) -> tuple[Prompt, Grade]:
    prompt = Prompt(id="x", text="", gold=gold, task="choice")
    return prompt, Grade(score=float(gold == chosen), parsed=chosen, failed=failed)


def test_position_bias() -> None:
    always_a = [_graded(gold, "A") for gold in "ABCD"]
    found = position_bias(always_a)
    assert found["chosen_share"] == {"A": 1.0, "B": 0.0, "C": 0.0, "D": 0.0}
    assert found["recall"] == {"A": 1.0, "B": 0.0, "C": 0.0, "D": 0.0}
    # Mean 1/4: sqrt(((3/4)^2 + 3 (1/4)^2) / 4) = sqrt(3) / 4.
    assert found["recall_std"] == pytest.approx(3**0.5 / 4)
    fair = [_graded(a, a) for a in "ABCD"] + [_graded("A", None), _graded("B", "C", failed=True)]
    found = position_bias(fair)
    assert found["no_answer_share"] == pytest.approx(0.2)
    assert found["recall"] == {"A": 0.5, "B": 1.0, "C": 1.0, "D": 1.0}
    assert position_bias([])["recall_std"] == 0.0
