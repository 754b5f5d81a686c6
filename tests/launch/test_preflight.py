"""What is refused before anything is queued, and that all of it is said at once."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers_cluster import Cluster

from megatron_binac import run_folder
from megatron_binac.launch import preflight, slurm, stages
from megatron_binac.launch.preflight import Violation
from megatron_binac.launch.site import Site
from megatron_binac.launch.slurm import Partition
from megatron_binac.launch.stages import Experiment

KNOWN = {
    "main": Partition(
        name="main", up=True, time_s=7200, num_nodes=4, cpus=8, memory_mib=4096, gpus=8,
        default=True,
    ),
    "old": Partition(
        name="old", up=False, time_s=None, num_nodes=1, cpus=8, memory_mib=4096, gpus=0
    ),
}  # fmt: skip


def experiment(folder: Path, *settings: str) -> Experiment:
    found = stages.variants(["quickstart"], [list(settings)], [], [])
    return Experiment(name="e", folder=folder, variants=found)


def whats(found: Any) -> list[str]:
    return [violation.what for violation in found]


@pytest.mark.parametrize(
    ("changes", "nodes", "what", "fix"),
    [
        ({"partition": "mian"}, 1, "partition", "main, old"),
        ({"partition": "old"}, 1, "partition", "another one"),
        ({"time": "03:00:00"}, 1, "time", "--time"),
        ({}, 5, "nodes", "--nodes"),
        ({"gpus_per_node": 16}, 1, "gpus", "gpus_per_node"),
        ({"ranks_per_node": 4, "cpus_per_rank": 4}, 1, "cpus", "cpus_per_rank"),
        ({"one_rank_partition": "cpu"}, 1, "partition", "main, old"),
    ],
)
def test_a_partition_that_cannot_hold_the_job(
    changes: dict[str, Any], nodes: int, what: str, fix: str
) -> None:
    (found,) = preflight.partition(Site(**changes), nodes, KNOWN)
    assert found.what == what
    assert fix in found.fix
    assert not list(preflight.partition(Site(), 4, KNOWN))


def test_an_account_that_is_not_yours() -> None:
    held = [("a", "", {"normal"}), ("b", "gpu", {"normal", "long"})]
    assert not list(preflight.account(Site(account="a", partition="x", qos="normal"), held))
    assert not list(preflight.account(Site(account="b", partition="gpu", qos="long"), held))
    (found,) = preflight.account(Site(account="c"), held)
    assert "one of a, b" in found.fix
    found, other = preflight.account(Site(account="b", partition="cpu", qos="debug"), held)
    assert (found.what, other.what) == ("account", "qos")
    assert "long, normal" in other.fix


def test_a_layout_that_does_not_divide_the_ranks(tmp_path: Path) -> None:
    both = experiment(tmp_path, "actor.parallel.tp=2", "critic.parallel.pp=4")
    assert not list(preflight.layout(both, 4))
    (found,) = preflight.layout(both, 6)
    assert "critic.parallel.tp * pp = 4 does not divide the 6 ranks" in found.found


def test_memory_counts_both_roles_and_what_shards(tmp_path: Path) -> None:
    config = experiment(tmp_path).variants[0].config
    # By hand, layers of q, o (128 x 128), k, v (64 x 128), mlp (3 x ffn x 128) and 2 norms; a last
    # norm; 320 rows of embedding and of head, padded to 384.
    num = [
        layers * (2 * 128 * 128 + 2 * 64 * 128 + 3 * ffn * 128 + 2 * 128) + 128 + 2 * 384 * 128
        for layers, ffn in ((2, 336), (4, 352))
    ]
    # Weight, gradient, two moments, reference; 4 bytes each. A frozen role has its weight.
    assert preflight.rank_bytes(config, 1) == pytest.approx(20 * sum(num), rel=0.001)
    frozen = replace(config, critic=replace(config.critic, train=False))
    assert preflight.rank_bytes(frozen, 1) == pytest.approx(20 * num[0] + 4 * num[1], rel=0.001)
    assert preflight.rank_bytes(config, 4) == pytest.approx(14 * sum(num), rel=0.001)

    small = {"main": replace(KNOWN["main"], memory_mib=20)}
    (found,) = preflight.memory(Site(), 1, experiment(tmp_path), small)
    assert found.what == "memory"
    large = experiment(
        tmp_path, *(f"actor.model.{k}" for k in ("num_layers=64", "hidden_size=8192"))
    )
    on_gpu = Site(gpus_per_node=8, ranks_per_node=8, gpu="h100-80")
    (found,) = preflight.memory(on_gpu, 1, large, KNOWN)
    assert "see binac plan" in found.fix
    assert not list(preflight.memory(on_gpu, 1, experiment(tmp_path), KNOWN))
    assert not list(preflight.memory(Site(), 1, experiment(tmp_path), KNOWN))
    (found,) = preflight.memory(Site(memory="8G"), 1, experiment(tmp_path), KNOWN)
    assert "nodes of main have 4096 MiB" in found.found


def test_secrets_are_named_and_never_held() -> None:
    site = Site(env={"HF_TOKEN": "abc", "bad name": "x"}, secrets=("WANDB_API_KEY",))
    held, bad = preflight.environment(site, {"WANDB_API_KEY": "k"})
    assert "the profile holds the value of HF_TOKEN" in held.found
    assert "abc" not in str(held)
    assert bad.what == "env"
    (missing,) = preflight.environment(Site(secrets=("WANDB_API_KEY",)), {})
    assert "export WANDB_API_KEY" in missing.fix


def test_files_that_would_not_travel_are_listed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    site = Site(code="git")
    (found,) = preflight.code(site, tmp_path, False)
    assert "is no checkout" in found.found
    git("init", "-q")
    assert not list(preflight.code(site, tmp_path, False))
    (tmp_path / "new.py").touch()
    (found,) = preflight.code(site, tmp_path, False)
    assert "new.py" in found.found
    assert not list(preflight.code(site, tmp_path, True))
    assert not list(preflight.code(Site(), tmp_path, False))


def test_mounts_and_images(tmp_path: Path) -> None:
    site = Site(
        container_image=str(tmp_path / "no.sqsh"),
        container_mounts=("relative:/x", f"{tmp_path}/gone:/x", f"{tmp_path}:/data:ro"),
    )
    found = list(preflight.container(site))
    assert whats(found) == ["image", "mount", "mount"]
    assert "/from:/to" in found[1].fix
    assert "gone is not there" in found[2].found
    (found,) = preflight.container(Site(container_mounts=(f"{tmp_path}:/b",)))
    assert "without a container_image" in found.found


def test_paths_that_templates_would_break(tmp_path: Path) -> None:
    held = experiment(Path("/scratch/nemo_run/e"))
    first, second = preflight.paths(held, Site(workdir="/a b", python="python"))
    assert "/nemo_run" in first.found
    assert "blank" in second.found


def test_a_folder_that_holds_something_else(tmp_path: Path) -> None:
    held = experiment(tmp_path)
    site = Site(workdir=str(tmp_path))
    assert not list(preflight.folders(held, site))
    run_folder.claim(tmp_path / "quickstart", held.variants[0].config, fresh=True)
    assert not list(preflight.folders(held, site))
    # A start that never came to a checkpoint leaves its folder to the next.
    assert not list(preflight.folders(experiment(tmp_path, "num_steps=3"), site))
    (tmp_path / "quickstart" / "checkpoints" / "step_000000").mkdir(parents=True)
    assert not list(preflight.folders(held, site))
    (found,) = preflight.folders(experiment(tmp_path, "num_steps=3"), site)
    assert "num_steps is 400, got 3" in found.found
    (gone,) = preflight.folders(held, Site(workdir=str(tmp_path / "gone")))
    assert gone.what == "workdir"


def test_sizes_and_gpus_as_slurm_writes_them() -> None:
    assert [preflight._mib(text) for text in ("200G", "1T", "512", "2048K", "")] == [
        204800, 1048576, 512, 2, 0,
    ]  # fmt: skip
    gres = ("(null)", "gpu:8", "gpu:h100:8(S:0-1)", "gpu:a:2,gpu:b:1,nvme:3")
    assert [slurm._gpus(text) for text in gres] == [0, 8, 8, 3]


def test_a_violation_says_what_was_found_and_how_to_mend_it() -> None:
    text = str(Violation(what="port", found="port 1 is taken", fix="leave --port out"))
    assert text == "port: port 1 is taken; leave --port out"


# On the cluster: binac launch itself

BROKEN: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "partition": ({"partition": "gpu"}, [], "use one of high, low, main"),
    "account": ({"account": "nobody"}, [], "set account to one of"),
    "qos": ({"qos": "urgent"}, [], "project may not use qos 'urgent'; use one of normal"),
    "time": ({"time": "2-00:00:00"}, [], "ends jobs after 240 minutes; lower it"),
    "nodes": ({}, ["--nodes", "9"], "--nodes 9, and main has 4"),
    "gpus": ({"gpus_per_node": 8}, [], "lower gpus_per_node"),
    "memory": ({"memory": "64G"}, [], "nodes of main have 4096 MiB; lower memory"),
    "model": ({}, ["--set", "actor.model.hidden_size=8192"], "raise memory, tp or pp"),
    "mount": (
        {"container_image": "docker://x", "container_mounts": ["/no/such:/data"]},
        [],
        "/no/such is not there; make it, or mend container_mounts",
    ),
    "image": ({"container_image": "/images/no.sqsh"}, [], "import it (enroot import"),
    "heads": ({}, ["--set", "actor.parallel.tp=3"], "use a tp that does"),
    "ranks": ({"ranks_per_node": 3}, ["--tp", "2"], "does not divide the 3 ranks"),
    "secret": ({"secrets": ["NO_SUCH_SECRET"]}, [], "export NO_SUCH_SECRET=..."),
    "tokenizer": ({}, ["--set", "task.tokenizer=/no/such/tokenizer"], "put it there, or --set"),
    "python": ({"python": "/no/python"}, [], "set python to the interpreter"),
    "stop": ({"time": "1", "stop_before_s": 90}, [], "raise time (--time), or lower stop_before_s"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_submission_is_refused_and_nothing_is_queued(cluster: Cluster, name: str) -> None:
    changes, flags, said = BROKEN[name]
    site = cluster.site(f"broken-{name}", **changes)
    place = cluster.work / f"broken-{name}"
    before = cluster.slurm("squeue", "--noheader", "-o", "%i")
    text = cluster.binac(
        "launch", "quickstart", "--profile", site, "--dir", place, *flags, code=2
    )
    assert said in text
    assert "nothing was submitted" in text
    assert not place.exists()
    assert cluster.slurm("squeue", "--noheader", "-o", "%i") == before


def test_a_dirty_tree_is_refused_with_the_list(cluster: Cluster, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "forgotten.py").touch()
    site = cluster.site("broken-code", code="git")
    argv = ("launch", "quickstart", "--profile", site, "--dir", cluster.work / "broken-code")
    inside = Cluster(root=cluster.root, work=cluster.work, env=cluster.env, cwd=tmp_path)
    text = inside.binac(*argv, code=2)
    assert "not committed, so they would not travel: forgotten.py; commit them" in text


def test_a_port_that_is_taken_is_refused(cluster: Cluster) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        text = cluster.binac(
            "launch", "quickstart", "--executor", "torchrun", "--ranks-per-node", "2",
            "--port", str(port), code=2,
        )  # fmt: skip
    assert f"port {port} is taken on this machine; leave --port out" in text


def test_all_that_is_wrong_is_said_at_once(cluster: Cluster) -> None:
    site = cluster.site(
        "broken-all", partition="gpu", account="nobody", secrets=["NO_SUCH"], python="/no/python"
    )
    text = cluster.binac(
        "launch", "quickstart", "--profile", site, "--set", "actor.parallel.tp=3", code=2
    )
    assert "5 thing(s) to mend" in text
    for what in ("config", "secret", "python", "partition", "account"):
        assert f" {what}: " in text
