"""What happens to jobs on a real Slurm cluster, and that they end as if it had not.

Runs with real ranks are measured by the undisturbed chain, metrics and weights to the last bit.
Where only Slurm's part is in question a stand-in without torch runs, whose state is a hash over its
steps. Both wait at gates until a test lets them go on, so nothing here depends on the pace.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from helpers_cluster import STEPS, Cluster, wait_for
from helpers_runs import assert_same_checkpoint, rows

from megatron_binac import recipes, run_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
RUN = "quickstart"
TP = ("--tp", "2")


def assert_as_undisturbed(place: Path, chain: Path) -> None:
    assert rows(place / RUN) == rows(chain / RUN)
    assert_same_checkpoint(place / RUN, chain / RUN, STEPS)


def job_of(cluster: Cluster, place: Path) -> str:
    return cluster.line(place, "train")["job"]


def said(cluster: Cluster, place: Path) -> str:
    return cluster.binac("logs", place, "--stage", "train")


# With real ranks


@pytest.fixture(scope="module")
def limited(cluster: Cluster, chain: Path) -> Path:
    """Stopped by its time limit in each of its first three lives.

    Submitted before the other jobs and looked at after them: it does nothing but wait for limits.
    """
    notes = cluster.work / "limit-notes"
    notes.mkdir()
    site = cluster.site(
        "limit", time="00:01:00", stop_before_s=10, env={"STOPS": "3", "NOTES": str(notes)},
        exclude="node[2-4]", ranks_per_node=2,  # away from the nodes that others lose
    )  # fmt: skip
    return cluster.launch(site, "limit", *TP, nodes=1)


def test_scancel_with_a_signal_saves_and_goes_on(
    cluster: Cluster, chain: Path, limited: Path
) -> None:
    site = cluster.site("signals", env=cluster.gates("signals", 3, 5))
    place = cluster.launch(site, "signals", *TP)
    for lives, (name, gate) in enumerate((("TERM", 3), ("USR1", 5))):
        cluster.wait_step(place, gate)
        cluster.wait_restarts(place, lives)
        cluster.slurm("scancel", f"--signal={name}", job_of(cluster, place))
        cluster.wait_restarts(place, lives + 1)
    (line,) = cluster.wait_done(place)
    assert line["restarts"] == 2
    log = (place / RUN / "log.txt").read_text()
    words = said(cluster, place)
    for name, step in (("TERM", 4), ("USR1", 6)):
        assert f"stopped by SIG{name} after saving" in log
        assert f"binac: stopped with step_{step:06d}; back into the queue" in words
    assert "failure" not in words
    assert_as_undisturbed(place, chain)


def test_a_lost_node_is_replaced(cluster: Cluster, chain: Path, limited: Path) -> None:
    site = cluster.site("lost", exclude="node1", env=cluster.gates("lost", 3))
    place = cluster.launch(site, "lost", *TP)
    cluster.wait_step(place, 3)
    beat = json.loads((place / RUN / "pulse" / "rank_00001.json").read_text())
    cluster.control("down", beat["host"])
    try:
        cluster.wait_restarts(place, 1)
        cluster.open("lost", 3)
        (line,) = cluster.wait_done(place)
        assert line["restarts"] == 1
        hosts = cluster.slurm("scontrol", "show", "hostnames", line["nodes"]).split()
        assert len(hosts) == 2
        assert beat["host"] not in hosts
    finally:
        cluster.control("up", beat["host"])
    assert_as_undisturbed(place, chain)


def test_a_hung_rank_is_ended_with_the_stacks_of_all(
    cluster: Cluster, chain: Path, limited: Path
) -> None:
    hang = cluster.work / "hang"
    hang.touch()
    site = cluster.site("hung", hang_s=20, env={"HANG": str(hang), "HANG_AT": "3"})
    place = cluster.launch(site, "hung", *TP)
    (line,) = cluster.wait_done(place)
    assert line["restarts"] == 1
    assert not hang.exists()
    assert "binac: hung: no phase began for 20 s" in said(cluster, place)
    stacks = cluster.binac("status", place, "--stacks")
    for rank in (0, 1):
        assert f"{RUN} rank {rank} on node" in stacks
        (stack,) = (place / RUN / "pulse").glob(f"rank_{rank:05d}.stack.*")
        assert "most recent call first" in stack.read_text()
        assert stack.read_text() in stacks
    assert "paced.py" in stacks  # where one of them hung
    assert_as_undisturbed(place, chain)


def test_a_run_that_its_time_limit_stops_three_times(
    cluster: Cluster, chain: Path, limited: Path
) -> None:
    (line,) = cluster.wait_done(limited)
    # On a slow machine a signal comes before the ranks can hear it, or before they are at the gate:
    # there are more then.
    assert line["restarts"] >= 3
    assert "TimeLimit=00:01:00" in cluster.slurm("scontrol", "show", "job", line["job"])
    words = said(cluster, limited)
    assert words.count("; back into the queue") == line["restarts"]
    assert "failure" not in words
    log = (limited / RUN / "log.txt").read_text()
    assert log.count("stopped by SIGTERM after saving") >= 3
    assert_as_undisturbed(limited, chain)


# With the stand-in


def state_after(steps: int) -> str:
    text = ""
    for step in range(steps):
        text = hashlib.sha256((text + str(step) + str(recipes.get(RUN).seed)).encode()).hexdigest()
    return text


def assert_state(place: Path, step: int = STEPS) -> None:
    newest = run_folder.latest_checkpoint(place / RUN)
    assert newest is not None
    assert newest.name == f"step_{step:06d}"
    assert (newest / "state").read_text() == state_after(step)


def test_the_loss_of_the_node_that_runs_the_batch_script(cluster: Cluster, standin: str) -> None:
    site = cluster.site("first", python=standin, exclude="node1", env=cluster.gates("first", 3))
    place = cluster.launch(site, "first")
    cluster.wait_step(place, 3)
    first = json.loads((place / RUN / "pulse" / "rank_00000.json").read_text())["host"]
    cluster.control("down", first)
    try:
        cluster.wait_restarts(place, 1)
        cluster.open("first", 3)
        (line,) = cluster.wait_done(place)
        assert first not in cluster.slurm("scontrol", "show", "hostnames", line["nodes"]).split()
    finally:
        cluster.control("up", first)
    assert_state(place)


def test_a_job_of_all_nodes_waits_until_the_lost_one_is_back(
    cluster: Cluster, standin: str
) -> None:
    site = cluster.site("all", python=standin, env=cluster.gates("all", 3))
    place = cluster.launch(site, "all", nodes=4)
    cluster.wait_step(place, 3)
    cluster.control("down", "node4")
    try:
        cluster.wait_restarts(place, 1)
        cluster.open("all", 3)
        wait_for(
            lambda: cluster.line(place, "train")["state"] == "pending",
            "the job to wait", lambda: cluster.tail(place),
        )  # fmt: skip
        assert_state(place, 3)
    finally:
        cluster.control("up", "node4")
    cluster.wait_done(place)
    assert_state(place)


def test_a_job_that_a_better_partition_takes_the_nodes_of(
    cluster: Cluster, standin: str
) -> None:
    site = cluster.site("low", partition="low", python=standin, env=cluster.gates("low", 3))
    place = cluster.launch(site, "low", nodes=4)
    cluster.wait_step(place, 3)
    cluster.slurm("sbatch", "-A", "project", "-p", "high", "-N4", "--exclusive", "--wrap", "true")
    cluster.wait_restarts(place, 1)
    cluster.open("low", 3)
    cluster.wait_done(place)
    # Not a failure of its own, so it does not count as one.
    assert not list((place / ".launch").glob("*.failures"))
    assert_state(place)


def test_out_of_retries_it_ends_with_a_reason_and_resume_goes_on(
    cluster: Cluster, standin: str
) -> None:
    site = cluster.site("retries", python=standin, retries=0, env=cluster.gates("retries", 3))
    place = cluster.launch(site, "retries")
    run_dir = cluster.wait_step(place, 3)
    cluster.kill_rank(run_dir, 1)
    wait_for(
        lambda: cluster.line(place, "train")["state"] == "failed",
        "the job to end", lambda: cluster.tail(place),
    )  # fmt: skip
    assert "binac: a rank was killed (kill -9, or out of memory)" in said(cluster, place)
    assert "back into the queue" not in said(cluster, place)
    assert_state(place, 3)
    cluster.open("retries", 3)
    cluster.binac("resume", place)
    cluster.wait_done(place)
    assert_state(place)


def test_cancel_saves_and_holds_and_resume_goes_on(cluster: Cluster, standin: str) -> None:
    site = cluster.site("cancel", python=standin, env=cluster.gates("cancel", 3))
    place = cluster.launch(site, "cancel")
    cluster.wait_step(place, 3)
    cluster.binac("cancel", place)
    wait_for(
        lambda: cluster.line(place, "train")["state"] == "failed",
        "the job to end", lambda: cluster.tail(place),
    )  # fmt: skip
    assert "held; go on with binac resume" in said(cluster, place)
    assert cluster.line(place, "train")["restarts"] == 0
    assert_state(place, 4)
    cluster.binac("resume", place)
    cluster.wait_done(place)
    assert_state(place)
