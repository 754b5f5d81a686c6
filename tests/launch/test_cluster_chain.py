"""Experiments on a real Slurm cluster with real ranks: layouts, stages, arrays, a killed rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers_cluster import SETTINGS, STEPS, Cluster, steps_made, wait_for
from helpers_runs import assert_same_checkpoint, rows, tensors

from megatron_binac.launch import stages

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
RUN = "quickstart"
CHAIN = [name for name in stages.chain() if name != "compare"]
"""What there is for a single variant; export where safetensors is installed, as it is in CI."""


def times(cluster: Cluster, place: Path, stage: str) -> tuple[str, str]:
    """Start and end of a stage's job."""
    job = cluster.line(place, stage)["job"]
    start, end = cluster.slurm("sacct", "-nPX", "-j", job, "-o", "start,end").strip().split("|")
    return start, end


def test_the_chain_runs_each_stage_after_what_it_needs(cluster: Cluster, chain: Path) -> None:
    lines = {line["stage"]: line for line in cluster.status(chain)}
    assert list(lines) == CHAIN
    assert {line["state"] for line in lines.values()} == {"done"}
    assert {line["restarts"] for line in lines.values()} == {0}
    assert lines["train"]["step"] == f"{STEPS}/{STEPS}"
    assert lines["train"]["tokens_per_s"] > 0
    begin, end = times(cluster, chain, "train")
    assert max(times(cluster, chain, s)[1] for s in ("warm_actor", "warm_critic")) <= begin
    for stage in {"export", "eval"} & {*CHAIN}:
        assert end <= times(cluster, chain, stage)[0]
    cached = {p.name.partition("-")[0] for p in (cluster.work / "runs/warm_start").iterdir()}
    assert {"actor", "critic"} <= cached
    assert json.loads((chain / "eval" / f"{RUN}.json").read_text())["step"] == STEPS
    assert RUN in (chain / "report" / "table.md").read_text()
    assert json.loads((chain / "bench" / "packing.json").read_text())
    # Comparisons with this run would be empty if it had learned nothing.
    for role in ("actor", "critic"):
        first, last = tensors(chain / RUN, 0, role), tensors(chain / RUN, STEPS, role)
        assert any((first[name] != last[name]).any() for name in first), role


def test_what_is_done_is_not_done_again(cluster: Cluster, chain: Path) -> None:
    again = cluster.binac("resume", chain)
    assert again.count("done already") == len(CHAIN)
    assert "nothing is left to do" in again
    # An output that was taken away is made again, by a job for that stage alone.
    table = chain / "report" / "table.md"
    kept = table.rename(table.with_suffix(".kept"))
    assert cluster.line(chain, "report")["state"] == "output is gone"
    said = cluster.binac("resume", chain, "--dry-run")
    assert "report_sbatch.sh" in said
    assert "train_sbatch.sh" not in said
    kept.rename(table)


def test_a_chain_whose_training_loses_a_rank_ends_like_the_undisturbed(
    cluster: Cluster, chain: Path
) -> None:
    site = cluster.site("killed", env=cluster.gates("killed", 3))
    place = cluster.launch(site, "killed", "--tp", "2", "--chain")
    run_dir = cluster.wait_step(place, 3)
    cluster.kill_rank(run_dir, 1)
    cluster.open("killed", 3)
    lines = {line["stage"]: line for line in cluster.wait_done(place)}
    assert {name: line["restarts"] for name, line in lines.items() if line["restarts"]} == {
        "train": 1
    }
    said = cluster.binac("logs", place, "--stage", "train")
    assert "task 1: Killed" in said
    assert "binac: failure 1 of at most 3; back into the queue" in said
    assert rows(run_dir) == rows(chain / RUN)
    assert_same_checkpoint(run_dir, chain / RUN, STEPS)
    measured = [json.loads((p / "eval" / f"{RUN}.json").read_text()) for p in (place, chain)]
    assert [one.pop("run") for one in measured] == [str(run_dir), str(chain / RUN)]
    assert measured[0] == measured[1]
    if "export" in CHAIN:
        weights = f"export/{RUN}/model.safetensors"
        assert (place / weights).read_bytes() == (chain / weights).read_bytes()


def test_tensor_parallel_groups_that_span_nodes_equal_local_torchrun(
    cluster: Cluster, chain: Path
) -> None:
    """Two nodes of two ranks. Megatron's TP groups are consecutive ranks, 0 1 and 2 3; dealt out
    over the nodes in turn, the ranks of each group are on two nodes."""
    site = cluster.site(
        "layout",
        ranks_per_node=2,
        srun_args=["--distribution=cyclic"],
        setup=['echo "rank $SLURM_PROCID on $SLURMD_NODENAME"'],
    )
    place = cluster.launch(site, "layout", "--tp", "2")
    local = cluster.work / "layout-local"
    cache = f"warm_start.cache_dir={cluster.work / 'runs/warm_start'}"
    flags = [part for text in (*SETTINGS, cache) for part in ("--set", text)]
    cluster.wait_done(place)
    words = ("--run-dir", str(local), "--nproc", "4", "--tp", "2", *flags)
    cluster.binac("train", "quickstart", *words)

    said = cluster.binac("logs", place, "--stage", "train")
    nodes = cluster.line(place, "train")["nodes"]
    first, second = cluster.slurm("scontrol", "show", "hostnames", nodes).split()
    where = dict(enumerate((first, second, first, second)))
    for rank, host in where.items():
        assert f"rank {rank} on {host}" in said
    beats = [json.loads(p.read_text()) for p in (place / RUN / "pulse").glob("rank_*.json")]
    assert {beat["rank"]: beat["host"] for beat in beats} == where
    for pair in ((0, 1), (2, 3)):
        assert {where[rank] for rank in pair} == {first, second}

    made = rows(place / RUN)
    assert [row["step"] for row in made] == list(range(-1, STEPS))
    assert made == rows(local)
    assert_same_checkpoint(place / RUN, local, STEPS)


def test_an_array_of_seeds_is_compared_and_loses_only_the_task_that_died(
    cluster: Cluster, chain: Path
) -> None:
    site = cluster.site("seeds", env=cluster.gates("seeds", 3))
    place = cluster.launch(
        site, "seeds", "--seeds", "1,2,3,4", "--stages", "train,compare", "--set", "num_steps=4",
        nodes=1,
    )  # fmt: skip
    runs = [place / f"quickstart-seed{seed}" for seed in (1, 2, 3, 4)]
    wait_for(
        lambda: min(map(steps_made, runs)) >= 3, "3 steps of each", lambda: cluster.tail(place)
    )
    cluster.kill_rank(runs[2], 0)
    cluster.open("seeds", 3)
    *tasks, compared = cluster.wait_done(place)
    array = tasks[0]["job"].partition("_")[0]
    assert [task["job"] for task in tasks] == [f"{array}_{index}" for index in range(4)]
    assert [task["restarts"] for task in tasks] == [0, 0, 1, 0]
    assert compared["stage"] == "compare"
    assert [[row["step"] for row in rows(run_dir)] for run_dir in runs] == [[-1, 0, 1, 2, 3]] * 4
    assert len({json.dumps(rows(run_dir)) for run_dir in runs}) == 4
    (row,) = json.loads((place / "report" / "compare.json").read_text())["rows"]
    assert (row["name"], [run["seed"] for run in row["runs"]]) == ("quickstart", [1, 2, 3, 4])
    table = cluster.binac("compare", *runs)
    (line,) = (text for text in table.splitlines() if text.startswith("quickstart "))
    assert line.split()[1] == "4"  # seeds
