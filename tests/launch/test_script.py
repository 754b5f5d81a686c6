"""The shell text of a job, run by bash with stand-ins for Slurm's tools."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_binac.launch import script, stages
from megatron_binac.launch.script import IDLE_LIVES
from megatron_binac.launch.site import Site
from megatron_binac.launch.stages import Experiment, Stage

# scontrol: hosts of a list as Slurm expands them, the state of the job, and a note of requeues.
SCONTROL = r"""#!/bin/bash
case "$*" in
  "show hostnames n[09-11]") printf '%s\n' n09 n10 n11 ;;
  *"show job"*) echo "JobId=$SLURM_JOB_ID JobName=x JobState=${STATE:-RUNNING} Reason=None" ;;
  requeue*) echo "$*" >>"$NOTES" ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture
def train(tmp_path: Path) -> Stage:
    found = stages.variants(["quickstart"], [[]], [], [])
    held = Experiment(name="e", folder=tmp_path / "e", variants=found)
    (tmp_path / "e" / stages.STATE).mkdir(parents=True)
    return stages.build(held, ["train"])[0]


def life(
    tmp_path: Path, stage: Stage, body: str, *, restart: int = 0, state: str = "RUNNING"
) -> tuple[int, str, list[str]]:
    """One life of the batch script with `body` in place of srun: code, words, requeues."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "scontrol").write_text(SCONTROL)
    (tools / "scontrol").chmod(0o755)
    hook = script.of_batch(stage, Site(retries=1), tmp_path / "e")
    # NeMo-Run echoes, and turns -e on again before it leaves with the code of srun.
    text = f"set -evx\nset +e\n{hook}\n{body}\ncode=$?\nset -e\nexit $code\n"
    notes = tmp_path / "notes"
    notes.write_text("")
    env = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_RESTART_COUNT": str(restart),
        "SLURM_JOB_NODELIST": "n[09-11]",
        "NOTES": str(notes),
        "STATE": state,
        "RANK": "7",
    }
    env.pop("SLURM_ARRAY_TASK_ID", None)
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, notes.read_text().splitlines()


def says(code: int, message: str = "") -> str:
    """What the ranks do when they leave in order."""
    row = json.dumps({"code": code, "message": message})
    return f"echo '{row}' >$BINAC_EXIT_FILE; (exit {0 if code in (130, 138, 143) else code})"


def checkpoint(tmp_path: Path, step: int) -> None:
    (tmp_path / "e" / "quickstart" / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)


def test_success_leaves_the_mark_and_a_second_life_has_nothing_to_do(
    tmp_path: Path, train: Stage
) -> None:
    code, words, requeued = life(tmp_path, train, says(0))
    assert (code, requeued) == (0, [])
    mark = Path(f"{train.record(tmp_path / 'e', 0)}.done")
    assert mark.read_text().strip() == train.tasks[0].fingerprint
    code, words, _ = life(tmp_path, train, "echo never >&2; false", restart=1)
    assert (code, "never\n" in words.replace("echo never", "")) == (0, False)
    assert "done already" in words


@pytest.mark.parametrize("body", [says(143), says(138), "(exit 143)"])
def test_a_stop_goes_back_into_the_queue_as_often_as_it_moves_on(
    tmp_path: Path, train: Stage, body: str
) -> None:
    for restart in range(IDLE_LIVES + 3):
        checkpoint(tmp_path, restart)
        code, words, requeued = life(tmp_path, train, body, restart=restart)
        assert code in (138, 143)
        assert requeued == ["requeue 4711"]
        assert f"stopped with step_{restart:06d}" in words


def test_a_crash_is_no_stop_though_srun_ends_the_other_ranks(tmp_path: Path, train: Stage) -> None:
    """The code of srun is the highest: 143 of those that it has ended."""
    row = json.dumps({"code": 1, "message": "RuntimeError: out of luck"})
    body = f"echo '{row}' >$BINAC_EXIT_FILE; (exit 143)"
    code, words, requeued = life(tmp_path, train, body)
    assert (code, requeued) == (143, ["requeue 4711"])
    assert "out of luck" in words
    assert "a rank has failed, and srun has ended the others" in words
    assert "failure 1 of at most 2" in words
    stack = tmp_path / "e" / "quickstart" / "pulse" / "rank_00001.stack"
    stack.parent.mkdir(parents=True)
    stack.write_text("where it stood")
    _, words, requeued = life(tmp_path, train, body, restart=1)
    assert "hung: no phase began for" in words
    assert "failure" not in words.partition("hung")[2]
    assert requeued == []


def test_stops_without_progress_come_to_an_end(tmp_path: Path, train: Stage) -> None:
    checkpoint(tmp_path, 2)
    requeues = [
        len(life(tmp_path, train, says(143), restart=n)[2]) for n in range(IDLE_LIVES + 1)
    ]
    assert requeues == [1] * IDLE_LIVES + [0]
    assert "without a new checkpoint" in life(tmp_path, train, says(143), restart=9)[1]


def test_a_failure_is_tried_again_as_often_as_the_site_says(tmp_path: Path, train: Stage) -> None:
    code, words, requeued = life(tmp_path, train, "(exit 137)")
    assert (code, len(requeued)) == (137, 1)
    assert "a rank was killed" in words
    # A stop in between is no failure, and does not use one up.
    assert len(life(tmp_path, train, says(143), restart=1)[2]) == 1
    code, words, requeued = life(tmp_path, train, "(exit 142)", restart=2)
    assert (code, requeued) == (142, [])
    assert "hung: no phase began for 1800 s" in words


@pytest.mark.parametrize(
    ("body", "state", "said"),
    [
        (says(2, "num_steps is 0"), "RUNNING", "num_steps is 0"),
        (says(3), "RUNNING", "ended early"),
        (says(143), "CANCELLED", "calls the job CANCELLED"),
        (says(143), "PREEMPTED", "calls the job PREEMPTED"),
    ],
)
def test_what_is_left_as_it_is(
    tmp_path: Path, train: Stage, body: str, state: str, said: str
) -> None:
    code, words, requeued = life(tmp_path, train, body, state=state)
    assert (code != 0, requeued) == (True, [])
    assert said in words


def test_a_held_job_is_not_requeued(tmp_path: Path, train: Stage) -> None:
    (tmp_path / "e" / stages.STATE / script.HOLD).touch()
    code, words, requeued = life(tmp_path, train, says(143))
    assert (code, requeued) == (143, [])
    assert "go on with binac resume" in words


def test_a_draft_becomes_the_output_only_when_all_went_well(tmp_path: Path) -> None:
    found = stages.variants(["quickstart"], [[]], [], [])
    held = Experiment(name="e", folder=tmp_path / "e", variants=found)
    (tmp_path / "e" / stages.STATE).mkdir(parents=True)
    (report,) = stages.build(held, ["report"])
    makes = report.tasks[0].makes
    makes.parent.mkdir()
    draft = stages.draft_of(makes)
    draft.write_text("of a life before")
    life(tmp_path, report, f"[[ ! -e {draft} ]] && echo half >{draft}; (exit 1)")
    assert (draft.exists(), makes.exists()) == (True, False)
    life(tmp_path, report, f"echo whole >{draft}", restart=1)
    assert (draft.exists(), makes.read_text()) == (False, "whole\n")


def test_host_port_and_a_clean_environment(tmp_path: Path, train: Stage) -> None:
    """cases: n[09-11] meets at n09, at a port that the job's number and restart give."""
    show = "env | grep -E '^(MASTER|BINAC|RANK)' | sort; (exit 9)"
    _, words, _ = life(tmp_path, train, show)
    first = dict(line.split("=", 1) for line in words.splitlines() if "=" in line)
    assert first["MASTER_ADDR"] == "n09"
    assert "RANK" not in first
    assert "ip-address" not in script.of_batch(train, Site(), tmp_path)
    _, words, _ = life(tmp_path, train, show, restart=1)
    again = dict(line.split("=", 1) for line in words.splitlines() if "=" in line)
    assert 15000 <= int(first["BINAC_PORT"]) < 30000
    assert first["BINAC_PORT"] != again["BINAC_PORT"]


@pytest.mark.parametrize("name", ["TERM", "USR1", "INT", "HUP"])
def test_a_signal_to_the_batch_script_does_not_make_a_stage_done(
    tmp_path: Path, train: Stage, name: str
) -> None:
    """Slurm ends the script of a job that has lost a node by TERM, while srun is on its way out."""
    body = f"(kill -{name} $$; sleep 0.2; exit 137)"
    code, words, requeues = life(tmp_path, train, body, state="NODE_FAIL")
    assert code == 137
    assert "Slurm calls the job NODE_FAIL: left as it is" in words
    assert not Path(f"{train.record(tmp_path / 'e', 0)}.done").exists()
    assert requeues == []


def rank_script(
    tmp_path: Path, stage: Stage, site: Site, **env: str
) -> subprocess.CompletedProcess[str]:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "<%s>" "$@"\nenv | grep -E "^(A|b)_"\n')
    python.chmod(0o755)
    site = replace(site, python=str(python), workdir=str(tmp_path))
    base = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    return subprocess.run(
        ["bash", "-xc", script.of_rank(stage, site)], env=base | env, capture_output=True, text=True
    )


def test_values_stay_as_they_are_and_secrets_are_not_in_the_log(
    tmp_path: Path, train: Stage
) -> None:
    site = Site(env={"A_WORD": "a  b", "b_lower": "$HOME;`x`'\""}, secrets=("A_SECRET",))
    done = rank_script(tmp_path, train, site, A_SECRET="swordfish")
    assert "A_WORD=a  b\n" in done.stdout
    assert "b_lower=$HOME;`x`'\"\n" in done.stdout
    assert "A_SECRET=swordfish" in done.stdout  # the rank has it
    assert "swordfish" not in script.of_rank(train, site)
    assert "swordfish" not in done.stderr  # although bash was told to echo (set -x)
    done = rank_script(tmp_path, train, site)
    assert done.returncode != 0
    assert "A_SECRET is not in the environment" in done.stderr


def test_an_array_task_takes_its_own_command(tmp_path: Path) -> None:
    found = stages.variants(["quickstart"], [["task.options.seed=7"]], [1, 2], [])
    held = Experiment(name="e", folder=tmp_path / "a b", variants=found)
    (train,) = stages.build(held, ["train"])
    done = rank_script(tmp_path, train, Site(), SLURM_ARRAY_TASK_ID="1")
    words = done.stdout.split(">")[0:]
    assert f"<{tmp_path}/a b/quickstart-seed2" in words
    assert "<seed=2" in words
    assert script.array(train, [0, 1]) == "0,1"


def test_a_task_on_this_machine_marks_itself(tmp_path: Path) -> None:
    found = stages.variants(["quickstart"], [[]], [], [])
    held = Experiment(name="e", folder=tmp_path / "e", variants=found)
    (report,) = stages.build(held, ["report"])
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s " "$@"\nexit ${FAIL:-0}\n')
    python.chmod(0o755)
    site = Site(python=str(python), workdir=str(tmp_path))
    text = script.of_task(report, 0, site, tmp_path / "e", 4)
    for fail in (1, 0):
        done = subprocess.run(["bash", "-c", text], env=os.environ | {"FAIL": str(fail)})
        assert done.returncode == fail
        assert report.finished(tmp_path / "e", 0) == (fail == 0)
    assert "--nproc" not in report.tasks[0].makes.read_text()  # one process
    (train,) = stages.build(held, ["train"])
    assert '"$@" --nproc 4' in script.of_task(train, 0, site, tmp_path / "e", 4)
