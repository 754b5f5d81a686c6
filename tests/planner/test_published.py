"""The model against published steps, and the command that prints it, on a machine without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_binac import cli
from megatron_binac.planner import command, published
from megatron_binac.planner.layouts import Job, Planned, Search
from megatron_binac.planner.speed import Phases

ROOT = Path(__file__).resolve().parents[2]


def test_every_row_has_a_source_and_a_step() -> None:
    table = published.table()
    for row in table["rows"]:
        assert row["source"] in table["sources"]
        assert row["step"] > 0
        assert row["model"] is not None or row["why"]


def test_rates_of_the_page_follow_from_its_own_columns() -> None:
    """Tokens/s/GPU that the page prints beside the step: the reading of its columns is right."""
    printed = {
        "Llama 3.1 8B": 1562,
        "Llama 3.1 8B, 1 step off": 2161,
        "Qwen3 235B-A22B": 45.7,
        "Qwen3 30B-A3B": 925,
        "Qwen3 32B": 540,
        "Qwen3 32B, 1 step off": 494,
        "Llama 3.1 70B": 124,
    }
    rows = {row["name"]: row for row in published.modelled()}
    for name, rate in printed.items():
        row = rows[name]
        tokens = row["samples"] * (row["prompt"] + row["answer"])
        assert tokens / row["step"] / row["gpus"] == pytest.approx(rate, rel=0.02), name


def test_two_thirds_of_the_rows_are_within_a_quarter() -> None:
    _, rows = published.check()
    judged = [row for row in rows if not row.inferred]
    total = len(published.table()["rows"]) - (len(rows) - len(judged))
    assert 3 * sum(abs(row.error) <= 0.25 for row in judged) >= 2 * total
    assert 3 * sum(abs(row.held_out) <= 0.25 for row in judged) >= 2 * len(judged)


def test_a_fit_depends_on_its_rows_alone() -> None:
    rows = published.modelled()[:4]
    assert published.fit(rows) == published.fit(rows)


def test_the_plan_runs_without_torch(tmp_path: Path) -> None:
    """A torch that cannot be imported stands in for a login node that has none."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "megatron_binac", "plan", "quickstart", "--gpus", "8", "--json",
         "--model", "llama3:1b", "--price", "2"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads(done.stdout)
    best = plan["best"][0]
    assert best["cost"] == pytest.approx(2 * best["gpu_hours"])
    assert {"weights", "gradients", "optimizer", "reference"} <= best["bytes"].keys()
    assert sum(best["bytes"].values()) == best["memory_bytes"]
    assert best["step_seconds"] == pytest.approx(sum(best["phases"].values()))


def test_wrong_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "quickstart"]) == 2
    assert cli.main(["plan", "quickstart", "--gpus", "many"]) == 2
    assert cli.main(["plan", "quickstart", "--gpus", "8", "--model", "llama3:9b"]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_scaling_stops_where_twice_the_gpus_is_worth_too_little() -> None:
    def found(gpus: int, step: float) -> tuple[Job, Search]:
        plan = Planned(
            candidate=None,  # type: ignore[arg-type]
            bytes_by_kind={},
            memory=0,
            phases=Phases(seconds={"play": step}),
        )
        job = Job(
            config=None, shapes={}, gpu=None, gpus=gpus, prompt_tokens=1, mean_share=1.0,  # type: ignore
            precision="bf16",
        )  # fmt: skip
        return job, Search(best=[plan], lost=[], tried=1)

    assert command.stops_at([found(8, 100.0), found(16, 55.0), found(32, 45.0)]) == 16
    assert command.stops_at([found(8, 100.0), found(16, 55.0), found(32, 30.0)]) is None
    # Four times the GPUs are two doublings: 100 / 52 is below 1.4 twice.
    assert command.stops_at([found(8, 100.0), found(32, 52.0)]) == 8
