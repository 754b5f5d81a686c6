"""Many answers at once, and files of completions."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from megatron_binac.tasks.checksum import Checksum
from megatron_binac.tasks.data import DataTask
from megatron_binac.tasks.grading import grade_all, grade_file, judge
from megatron_binac.types import Grade, Prompt, Split


class Echo(DataTask):
    """The answer is the id; "break" breaks the verifier."""

    workers = 3

    def __init__(self) -> None:
        def read(split: Split) -> list[Prompt]:
            return [
                Prompt(id=f"echo/{split}/{i}", text=f"{split} {i}", gold=str(i), task="echo")
                for i in range(20)
            ]

        super().__init__("echo", read)
        self.threads: set[int] = set()

    def grade(self, prompt: Prompt, text: str) -> Grade:
        self.threads.add(threading.get_ident())
        if text == "break":
            raise RuntimeError("no verifier")
        return Grade(score=float(text == prompt.gold), parsed=text)


def test_a_broken_verifier_is_not_a_wrong_answer() -> None:
    task = Echo()
    grade = judge(task, task.prompt("eval", 0), "break")
    assert (grade.score, grade.failed, grade.reason) == (0.0, True, "RuntimeError: no verifier")


def test_many_in_order_on_several_threads() -> None:
    task = Echo()
    pairs = [(task.prompt("eval", i), str(i if i % 2 else 99)) for i in range(20)]
    assert [g.score for g in grade_all(task, pairs)] == [0.0, 1.0] * 10
    assert threading.get_ident() not in task.threads
    assert grade_all(task, []) == []
    own = Checksum()
    prompt = own.prompt("eval", 0)
    assert grade_all(own, [(prompt, prompt.gold)])[0].score == 1.0


def _write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_file_of_completions(tmp_path: Path) -> None:
    rows = [("3", "3"), ("echo/train/4", "5"), ("3", "break"), ("echo/eval/0", "0")]
    path = _write(tmp_path / "c.jsonl", [{"id": i, "completion": c} for i, c in rows])
    *graded, summary = grade_file(Echo(), path)
    assert [g["id"] for g in graded] == ["3", "echo/train/4", "3", "echo/eval/0"]
    assert [g["score"] for g in graded] == [1.0, 0.0, 0.0, 1.0]
    assert [g["failed"] for g in graded] == [False, False, True, False]
    assert summary == {
        "summary": "echo", "num": 4, "num_right": 2, "num_failed": 1, "accuracy": 2 / 3
    }  # fmt: skip


def test_procedural_problems_by_their_number(tmp_path: Path) -> None:
    task = Checksum()
    golds = [task.prompt("eval", i).gold for i in range(3)]
    rows = [{"id": f"checksum/eval/{i}", "completion": g} for i, g in enumerate(golds)]
    assert list(grade_file(task, _write(tmp_path / "c.jsonl", rows)))[-1]["accuracy"] == 1.0
    with pytest.raises(ValueError, match="is no checksum/eval/NUMBER"):
        list(grade_file(task, _write(tmp_path / "d.jsonl", [{"id": 3, "completion": ""}])))


BAD = [
    ('{"id": 1}', r"c.jsonl:1 is .* expected \{"),
    ('{"id": 1, "completion": 5}', "expected"),
    ("[]", "expected"),
    ("{", "is no JSON"),
    ('{"id": "nowhere", "completion": ""}', "no problem 'nowhere'"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_rows_are_refused_before_any_is_graded(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(line)
    task = Echo()
    with pytest.raises(ValueError, match=message):
        list(grade_file(task, path))
    assert not task.threads
