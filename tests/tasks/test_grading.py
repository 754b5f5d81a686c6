"""Many answers at once, and files of completions."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from megatron_binac import cli
from megatron_binac.tasks.checksum import Checksum
from megatron_binac.tasks.data import DataTask
from megatron_binac.tasks.grading import build_for_grading, grade_all, grade_file, judge
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
    ('{"id": ["u0"], "completion": "x"}', r'c.jsonl:1 is .* expected \{"id": "..." or NUMBER'),
    ('{"id": true, "completion": "x"}', "expected"),
    ("", r"c.jsonl is empty, expected rows"),
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


def test_the_command_grades_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiz = [{"id": "q1", "question": "Two?", "choices": ["1", "2"], "answer": "2"}]
    data = _write(tmp_path / "quiz.jsonl", list(quiz))
    said = _write(tmp_path / "said.jsonl", [{"id": "q1", "completion": "Answer: A"}] * 2)
    command = ["grade", str(said), "--task", "choice", "--data", str(data)]
    assert cli.main([*command, "--set", "shuffle=false", "--json"]) == 0
    first, second, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {**second, "seconds": first["seconds"]}
    assert (first["id"], first["score"], first["reason"]) == ("q1", 0.0, "gold is B")
    assert (summary["accuracy"], summary["chosen_share"]["A"]) == (0.0, 1.0)
    assert cli.main([*command, "--set", "shuffle=false"]) == 0
    assert capsys.readouterr().out.startswith("0.0\tq1\tgold is B\n")


WRONG_USE = [
    (["--task", "choises"], "did you mean 'choice'"),
    (["--task", "choice", "--set", "shufle=1"], "did you mean 'shuffle'"),
    (["--task", "choice", "--set", "shuffle"], "expected KEY=VALUE"),
    (["--task", "checksum", "--data", "x"], "makes its own problems"),
    (["--task", "choice", "--data", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_USE)
def test_wrong_use_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    said = _write(tmp_path / "said.jsonl", [{"id": "q1", "completion": "A"}])
    assert cli.main(["grade", str(said), *options]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_id_does_not_end_in_a_download(tmp_path: Path) -> None:
    row = {"id": "a", "question": "Two?", "choices": ["1", "2"], "answer": "2"}
    data = _write(tmp_path / "eval.jsonl", [row])
    task = build_for_grading("arc", str(data), {"train_data": str(tmp_path / "nowhere.jsonl")})
    with pytest.raises(ValueError, match=r"no problem '7'; it has .* \(its train problems cannot"):
        list(grade_file(task, _write(tmp_path / "c.jsonl", [{"id": 7, "completion": "2"}])))
