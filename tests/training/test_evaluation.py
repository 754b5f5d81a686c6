"""`binac eval MODEL --task NAME`, end to end: a run under two layouts, a Hugging Face model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers_runs import arguments, run

ROOT = Path(__file__).resolve().parents[2]
QUIZ = [
    {"id": f"q{n}", "question": f"What is {n} + 1?", "options": ["1", "2", "3", "4"], "answer": "B"}
    for n in range(5)
]


def binac(*argv: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_binac", *argv],
        cwd=ROOT,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == expect, done.stderr[-3000:]
    return done


def items(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("run")
    run(1, arguments(folder / "run", folder / "cache", "num_steps=1", "save_every=1"))
    return folder / "run"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_under_two_layouts_and_once_more(run_dir: Path, tmp_path: Path) -> None:
    flags = ["--task", "checksum", "--num-prompts", "8", "--rounds", "2", "--temperature", "0"]
    one, two = tmp_path / "one", tmp_path / "two"
    shown = binac("eval", str(run_dir), *flags, "--out", str(one))
    assert "checksum: 8 problems, 1 samples, 0 chains failed" in shown.stdout
    assert "round 2" in shown.stdout and "8 of 8 chains" in shown.stderr
    found = items(one)
    assert [len(i["answers"]) for i in found] == [3] * 8
    assert [len(i["feedbacks"]) for i in found] == [2] * 8
    result = json.loads((one / "result.json").read_text())
    assert result["settings"]["stamps"] == ["step_000001"]
    # The run's own lengths and task: the same problems as in training's evaluation.
    assert result["settings"]["task_options"]["easy_share"] == 1.0
    assert result["settings"]["max_tokens"] == 2
    right = sum(i["answers"][0]["score"] for i in found)
    assert result["standings"]["rounds"][0]["always"]["value"] == right / 8
    again = binac("eval", str(run_dir), *flags, "--out", str(one), "--json")
    assert json.loads(again.stdout) == result
    assert items(one) == found
    binac("eval", str(run_dir), *flags, "--out", str(two), "--nproc", "2")
    assert items(two) == found


@pytest.mark.slow
def test_a_folder_of_other_settings_is_refused(run_dir: Path, tmp_path: Path) -> None:
    flags = ["eval", str(run_dir), "--task", "checksum", "--num-prompts", "2", "--out"]
    binac(*flags, str(tmp_path / "a"))
    done = binac(*flags, str(tmp_path / "a"), "--seed", "2", expect=2)
    assert "holds an evaluation with seed 1, not 2; pass another --out" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hugging_face_pair(run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers (the extra hf)")
    model, quiz, out = tmp_path / "model", tmp_path / "quiz.jsonl", tmp_path / "out"
    quiz.write_text("\n".join(map(json.dumps, QUIZ)))
    code = f"import sys; sys.path[:0] = {[str(ROOT / 'tests' / 'rollout')]!r}\n"
    code += "from pathlib import Path; import test_hf_engine as t\n"
    code += f"t.save_model(Path({str(model)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    flags = ["--task", "choice", "--data", str(quiz), "--samples", "2", "--max-tokens", "6"]
    flags += ["--max-feedback-tokens", "6", "--batch", "4", "--out", str(out), "--json"]
    result = json.loads(binac("eval", str(model), *flags).stdout)
    assert result["standings"]["num_chains"] == 10
    assert result["standings"]["cut_answers_share"] > 0
    assert result["actor"] == result["critic"]
    assert set(result["standings"]["first_answers"]) >= {"chosen_share", "recall_std"}
    # A critic that is a run reads the other model's words in its own vocabulary.
    mixed = ["--critic", str(run_dir), *flags[:-2], str(tmp_path / "mixed"), "--json"]
    result = json.loads(binac("eval", str(model), *mixed).stdout)
    assert result["critic"].startswith(f"critic of {run_dir} at step 1, ")
