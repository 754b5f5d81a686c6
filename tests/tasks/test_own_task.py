"""The example of a task of one's own does what the registry, the cursor and the graders ask for."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from megatron_binac import cli, tasks
from megatron_binac.tasks.base import Cursor, Task
from megatron_binac.tasks.grading import grade_all

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_task.py"


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    found = EntryPoint("doubling", "own_task:Doubling", tasks.ENTRY_POINT_GROUP)
    monkeypatch.setattr(tasks, "entry_points", lambda **asked: [found])
    assert "doubling" in tasks.task_names()
    with pytest.raises(ValueError, match="no option 'limits'; did you mean 'limit'"):
        tasks.build_task("doubling", limits=10)
    return tasks.build_task("doubling", limit=100)


def test_the_task_of_the_readme_is_graded_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its block as it stands, in a package that offers it by a real entry point."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = readme.partition("## A task of your own")[2].partition("```python\n")[2]
    code = block.partition("```")[0]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 20
    (tmp_path / "readme_task.py").write_text(code)
    installed = tmp_path / "readme_task-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: readme-task\nVersion: 1.0\n")
    point = f"[{tasks.ENTRY_POINT_GROUP}]\ndoubling = readme_task:Doubling\n"
    (installed / "entry_points.txt").write_text(point)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "doubling" in tasks.task_names()
    task = tasks.build_task("doubling")
    train = {task.prompt("train", i).text for i in range(400)}
    assert len(train) == 400
    assert not train & {task.prompt("eval", i).text for i in range(100)}
    rows = [("doubling/eval/3", " 30 "), ("doubling/train/0", "3"), ("doubling/train/0", "2")]
    file = tmp_path / "said.jsonl"
    file.write_text("".join(json.dumps({"id": i, "completion": c}) + "\n" for i, c in rows))
    assert cli.main(["grade", str(file), "--task", "doubling", "--json"]) == 0
    *graded, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(g["id"], g["score"]) for g in graded] == [
        ("doubling/eval/3", 1.0), ("doubling/train/0", 0.0), ("doubling/train/0", 1.0),
    ]  # fmt: skip
    assert summary["accuracy"] == pytest.approx(2 / 3)
    run = ["train", "quickstart", "--run-dir", str(tmp_path / "run"), "--set"]
    assert cli.main([*run, "task.name=doubling"]) == 2
    assert "has no option 'easy_share'; " in (said := capsys.readouterr().err)
    assert "--set 'task.options={}' drops them" in said
    assert cli.main([*run, "task.name=doubling", "--set", "task.options={}"]) == 2
    assert (
        "quickstart warm-starts the actor and the critic, but task doubling offers no supervised "
        "examples; --set warm_start.actor.steps=0 --set warm_start.critic.steps=0"
    ) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert task.verdict("2 * 2 is no 3") is False
    assert task.leaks(task.prompt("eval", 3), "7", "it is 30")


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
