"""Records and the table: jobs found over NeMo-Run's store, without NeMo-Run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_binac.launch import records, site, slurm, watch
from megatron_binac.launch.records import Request
from megatron_binac.launch.slurm import JobState

ROOT = Path(__file__).resolve().parents[2]


def request(tmp_path: Path, **changes: Any) -> Request:
    """An experiment of two seeds with one submission of NeMo-Run behind it."""
    home = tmp_path / "home"
    place = home / "experiments" / "quickstart" / "quickstart_17"
    place.mkdir(parents=True, exist_ok=True)
    keys: dict[str, Any] = {
        "name": "quickstart",
        "folder": str(tmp_path / "e"),
        "executor": "slurm",
        "nodes": 1,
        "recipes": ["quickstart"],
        "settings": [[]],
        "seeds": [1, 2],
        "sweep": [],
        "stages": ["train", "report"],
        "chained_jobs": 1,
        "site": site.to_dict(site.Site(workdir=str(tmp_path))),
        "submissions": [
            {
                "id": "quickstart_17",
                "place": str(place),
                "home": str(home),
                "jobs": {name: str(place / name) for name in ("train", "report")},
            }
        ],
    }
    made = Request(**(keys | changes))
    made.save()
    records.point(place, Path(made.folder))
    rows = [
        f"{number} = {place}/{name}/log*,{place / name},LocalTunnel,{{}}"
        for number, name in ((40, "train"), (41, "report"), (50, "train"))
    ]
    rows.append(f"60 = /x/log*,{place}/train_2,LocalTunnel,{{}}")
    (home / ".slurm_jobs").write_text("\n".join(rows) + "\n")
    return made


def test_an_experiment_is_found_by_folder_id_title_or_as_the_newest(tmp_path: Path) -> None:
    made = request(tmp_path)
    homes = [tmp_path / "home"]
    for what in (made.folder, "quickstart_17", "quickstart", None):
        assert records.find(what, homes) == made
    with pytest.raises(ValueError, match=r"no experiment other in .* known are quickstart"):
        records.find("other", homes)
    with pytest.raises(ValueError, match="holds no experiment"):
        records.load(tmp_path)


def test_jobs_are_those_of_each_stage_oldest_first(tmp_path: Path) -> None:
    assert records.job_ids(request(tmp_path)) == {"train": ["40", "50"], "report": ["41"]}


def test_the_table_joins_jobs_marks_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = request(tmp_path)
    states = {
        "40": [JobState(job="40_0", state="CANCELLED"), JobState(job="40_1", state="CANCELLED")],
        "50": [
            JobState(job="50_1", state="PENDING", reason="Priority"),
            JobState(job="50_0", state="RUNNING", nodes="n1", restarts=2),
        ],
        "41": [JobState(job="41", state="PENDING", reason="Dependency")],
    }
    monkeypatch.setattr(slurm, "jobs", lambda ids: [one for i in ids for one in states[i]])
    run_dir = tmp_path / "e" / "quickstart-seed1"
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text('{"num_steps": 400}')
    rows = [
        {"step": step, "time/step": 2.0, "play/generated_tokens": 100, "play/reward": 0.25}
        for step in range(-1, 3)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"st')
    state = tmp_path / "e" / ".launch"
    (state / "train-1.exit-50-0.json").write_text('{"code": 2, "message": "no such task"}')
    first, second, report = watch.lines(made)
    assert (first.task, first.state, first.job, first.nodes, first.restarts) == (
        "quickstart-seed1", "running", "50_0", "n1", 2,
    )  # fmt: skip
    assert (first.step, first.tokens_per_s, first.reward) == ("3/400", 50.0, 0.25)
    assert second.state == "pending"
    assert second.note == "its last life ended with: no such task"
    assert (report.state, report.note) == ("pending", "Dependency")
    text = watch.table([first, second, report])
    assert "quickstart-seed1" in text.splitlines()[1]
    assert text.splitlines()[-1] == "report table.md: Dependency"


def test_tasks_of_an_array_that_has_not_started() -> None:
    assert watch._indices("12_3") == {3}
    assert watch._indices("12_[0,2-4%2]") == {0, 2, 3, 4}
    assert watch._indices("12") == set()


def test_looking_at_jobs_needs_neither_torch_nor_nemo_run(tmp_path: Path) -> None:
    made = request(tmp_path, executor="local")
    code = (
        "import sys\n"
        "from megatron_binac.cli import main\n"
        f"code = main(['status', {made.folder!r}])\n"
        "bad = {'torch', 'nemo_run'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "quickstart-seed2" in done.stdout
    assert "not done" in done.stdout
