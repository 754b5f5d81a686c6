"""Other ways to start the same run: on this machine, by torchrun on each node, in NeMo-Run's words.

All of them with real ranks, and equal to the undisturbed chain.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_cluster import SETTINGS, STEPS, Cluster
from helpers_runs import assert_same_checkpoint, rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
RUN = "quickstart"
FLAGS = [part for text in SETTINGS for part in ("--set", text)]


def assert_as_undisturbed(run_dir: Path, chain: Path) -> None:
    assert rows(run_dir) == rows(chain / RUN)
    assert_same_checkpoint(run_dir, chain / RUN, STEPS)


def test_torchrun_on_the_nodes_with_a_killed_rank_and_a_signal(
    cluster: Cluster, chain: Path
) -> None:
    site = cluster.site("torchrun", launcher="torchrun", env=cluster.gates("torchrun", 3, 5))
    place = cluster.launch(site, "torchrun", "--tp", "2")
    run_dir = cluster.wait_step(place, 3)
    cluster.kill_rank(run_dir, 1)
    cluster.open("torchrun", 3)
    cluster.wait_step(place, 5)
    assert cluster.line(place, "train")["restarts"] == 1
    # And the ranks hear a signal, though torchrun would die of it.
    cluster.slurm("scancel", "--signal=USR1", cluster.line(place, "train")["job"])
    (line,) = cluster.wait_done(place)
    assert line["restarts"] == 2
    said = cluster.binac("logs", place, "--stage", "train")
    assert "binac: stopped with step_000006; back into the queue" in said
    assert said.count("binac: failure 1 of at most 3; back into the queue") == 1
    assert_as_undisturbed(run_dir, chain)


def test_torchrun_on_this_machine(cluster: Cluster, chain: Path) -> None:
    place = cluster.work / "here"
    words = ("--executor", "torchrun", "--ranks-per-node", "2", "--tp", "2", "--dir", place, *FLAGS)
    cluster.binac("launch", "quickstart", *words, "--stages", "train,report")
    assert [line["state"] for line in cluster.status(place)] == ["done", "done"]
    assert RUN in (place / "report" / "table.md").read_text()
    assert_as_undisturbed(place / RUN, chain)
    again = cluster.binac("resume", place)
    assert again.count("done already") == 2


def test_nemo_runs_own_command_line(cluster: Cluster, chain: Path) -> None:
    here = str(Path(sys.executable).parent)
    nemo = shutil.which("nemo", path=here)
    assert nemo is not None
    run_dir = cluster.work / "nemo-words"
    cache = cluster.work / "runs/warm_start"
    layout = [f"{role}.parallel.tp=2" for role in ("actor", "critic")]
    settings = [*layout, *SETTINGS, f"warm_start.cache_dir={cache}"]
    site = cluster.site("nemo")
    subprocess.run(
        [
            nemo, "binac", "train", "recipe=quickstart", f"folder={run_dir}",
            f"settings={json.dumps(settings)}", f"run.executor=binac_slurm('{site}', 2)", "--yes",
        ],
        cwd=cluster.work,
        env=cluster.env
        | {"NEMORUN_HOME": str(cluster.work / "nemo-home"), "PATH": f"{here}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=900,
    )  # fmt: skip
    assert_as_undisturbed(run_dir, chain)
