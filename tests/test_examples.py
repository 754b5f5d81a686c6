"""Every example runs, with settings that make it short."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHORT = [
    "num_steps=2", "save_every=0", "eval.every=0", "eval.num_prompts=8",
    "rollout.prompts_per_step=2", "warm_start.actor.steps=2", "warm_start.critic.steps=2",
]  # fmt: skip


@pytest.mark.slow
def test_train_from_python(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "train_from_python.py"), *SHORT]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(2):  # the second time there is nothing left to train
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "| quickstart | sampled" in done.stdout
    assert (tmp_path / "runs" / "train_from_python" / "report.html").is_file()


def test_own_task(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "own_task.py")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    outputs = [
        subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    # The order is the seed's: a second start prints the same problems.
    assert outputs[0].stdout == outputs[1].stdout
    lines = outputs[0].stdout.splitlines()
    assert len({line.split()[0] for line in lines}) == 3
    for line in lines:
        number, gold = line.split("2 *")[1].split(":")[0].split("=")
        assert int(gold) == 2 * int(number)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nemo_run") is None, reason="needs NeMo-Run: the extra `launch`")
def test_slurm_experiment(tmp_path: Path) -> None:
    """Only shown: what it would submit waits for both trainings, however they end."""
    example = ROOT / "examples" / "slurm_experiment.py"
    profile = ROOT / "examples" / "slurm_local.toml"
    done = subprocess.run(
        [sys.executable, str(example), str(profile), str(tmp_path / "mine")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("#SBATCH --account=project") == 3
    assert "nemo_run.core.runners.fdl_runner" in done.stdout


def test_every_example_is_tested_and_listed() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        assert f'"{path.name}"' in tests, f"no test runs {path.name}"
        assert f"`{path.name}`" in listed, f"examples/README.md does not list {path.name}"


@pytest.mark.parametrize(
    ("page", "made"),
    [("packing", {"plan", "packs", "rows"}), ("kernels", {"loss", "advantage", "stats"})],
)
def test_the_first_example_of_a_page_runs(page: str, made: set[str]) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    block = text.split("```python\n", 1)[1].split("```", 1)[0]
    names: dict[str, object] = {}
    exec(compile(block, f"docs/{page}.md", "exec"), names)
    assert made <= names.keys()
    if page == "packing":
        assert [len(row) for row in names["rows"]] == [300, 7, 120, 64]  # type: ignore[attr-defined]
    else:
        assert names["advantage"].tolist() == [1.0, -1.0, -1.0, 1.0]  # type: ignore[attr-defined]
