"""The example of a task of one's own does what the registry, the cursor and the graders ask for."""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from megatron_binac import tasks
from megatron_binac.tasks.base import Cursor, Task
from megatron_binac.tasks.grading import grade_all

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_task.py"


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    found = EntryPoint("doubling", "own_task:Doubling", tasks.ENTRY_POINT_GROUP)
    monkeypatch.setattr(tasks, "entry_points", lambda **asked: [found])
    assert "doubling" in tasks.task_names()
    with pytest.raises(ValueError, match="no option 'limits'; did you mean 'limit'"):
        tasks.build_task("doubling", limits=10)
    return tasks.build_task("doubling", limit=100)


def test_it_is_a_task(doubling: Task) -> None:
    train, held_out = (
        [doubling.prompt(split, i) for i in range(doubling.size(split) or 0)]
        for split in ("train", "eval")
    )
    assert (len(train), len(held_out)) == (80, 20)
    assert not {p.text for p in train} & {p.text for p in held_out}
    assert {p.gold for p in train} | {p.gold for p in held_out} == {str(2 * n) for n in range(100)}
    assert sorted(p.id for p in Cursor(doubling, "train", seed=1).take(80)) == sorted(
        p.id for p in train
    )
    texts = [p.gold if i % 2 else "7" for i, p in enumerate(train)]
    grades = grade_all(doubling, list(zip(train, texts, strict=True)))
    assert [g.score for g in grades] == [0.0, 1.0] * 40
    assert doubling.leaks(train[0], "7", f"no, it is {train[0].gold}")
    assert doubling.verdict("7 is no good") is False


def test_it_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False,
        cwd=EXAMPLE.parents[1], env={"PYTHONPATH": str(EXAMPLE.parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1.0, 7: 0.0") == 3


def test_its_class_takes_less_than_thirty_lines() -> None:
    source = runpy.run_path(str(EXAMPLE))["Doubling"].grade.__code__.co_filename
    text = Path(source).read_text(encoding="utf-8")
    body = text.partition("@dataclass")[2].partition("if __name__")[0]
    assert sum(bool(line.strip()) for line in body.splitlines()) < 30
