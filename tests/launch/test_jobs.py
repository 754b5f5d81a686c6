"""The whole experiment on a real Slurm cluster: real ranks, one on each of two nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers_cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS = 8
RUN = "quickstart"
TP = ("--tp", "2")
STAGES = "warm_actor,warm_critic,train,eval,bench,report"
"""All that need no further package."""


@pytest.fixture(scope="module")
def chain(cluster: Cluster) -> Path:
    """The whole experiment on two ranks of two nodes, undisturbed."""
    place = cluster.launch(cluster.site("chain"), "chain", *TP, "--stages", STAGES)
    cluster.wait_done(place)
    return place


def times(cluster: Cluster, place: Path, stage: str) -> tuple[str, str]:
    """Start and end of a stage's job."""
    job = cluster.line(place, stage)["job"]
    start, end = cluster.slurm("sacct", "-nPX", "-j", job, "-o", "start,end").strip().split("|")
    return start, end


def test_the_chain_runs_each_stage_after_what_it_needs(cluster: Cluster, chain: Path) -> None:
    lines = {line["stage"]: line for line in cluster.status(chain)}
    assert list(lines) == ["warm_actor", "warm_critic", "train", "eval", "bench", "report"]
    assert {line["state"] for line in lines.values()} == {"done"}
    assert lines["train"]["step"] == f"{STEPS}/{STEPS}"
    assert lines["train"]["tokens_per_s"] > 0
    begin, end = times(cluster, chain, "train")
    assert max(times(cluster, chain, s)[1] for s in ("warm_actor", "warm_critic")) <= begin
    assert end <= times(cluster, chain, "eval")[0]
    cached = {p.name.partition("-")[0] for p in (cluster.work / "runs/warm_start").iterdir()}
    assert {"actor", "critic"} <= cached
    assert json.loads((chain / "eval" / f"{RUN}.json").read_text())["step"] == STEPS
    assert "quickstart" in (chain / "report" / "table.md").read_text()
    assert json.loads((chain / "bench" / "packing.json").read_text())


def test_what_is_done_is_not_done_again(cluster: Cluster, chain: Path) -> None:
    again = cluster.binac("resume", chain)
    assert again.count("done already") == 6
    assert "nothing is left to do" in again
    # An output that was taken away is made again, by a job for that stage alone.
    (chain / "report" / "table.md").unlink()
    assert cluster.line(chain, "report")["state"] == "output is gone"
    said = cluster.binac("resume", chain, "--dry-run")
    assert "report_sbatch.sh" in said
    assert "train_sbatch.sh" not in said
