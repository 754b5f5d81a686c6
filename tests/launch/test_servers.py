"""Servers beside the ranks: what is asked for, the shell text run by bash, and deaf processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_binac import config as configs
from megatron_binac import recipes
from megatron_binac.launch import preflight, script, servers, stages
from megatron_binac.launch.site import Site
from megatron_binac.launch.stages import Experiment, Stage

BOTH = {"actor": 2, "critic": 1}


def test_nodes_by_role() -> None:
    assert servers.parse(None) == {}
    assert servers.parse("actor=2,critic=1") == BOTH
    for text in ("", "actor", "actor=0", "actor=x", "actor=1,actor=2", "judge=1", "actor=-1"):
        with pytest.raises(ValueError, match="--servers got"):
            servers.parse(text)


def experiment(folder: Path, *settings: str, nodes: dict[str, int] | None = None) -> Experiment:
    nodes = BOTH if nodes is None else nodes
    found = stages.variants(["quickstart"], [[*servers.settings(nodes), *settings]], [1, 2], [])
    return Experiment(name="e", folder=folder, variants=found, servers=nodes)


def train(folder: Path, *settings: str) -> Stage:
    (folder / stages.STATE).mkdir(parents=True, exist_ok=True)
    return stages.build(experiment(folder, *settings), ["train"])[0]


def test_the_config_names_variables_and_not_hosts(tmp_path: Path) -> None:
    (first, _) = experiment(tmp_path).variants
    engine = first.config.actor.engine
    assert (engine.kind, engine.urls, engine.address) == (
        "vllm_server", ["$BINAC_SERVERS_ACTOR"], "$MASTER_ADDR"
    )  # fmt: skip
    assert first.config.critic is not None
    assert first.config.critic.engine.urls == ["$BINAC_SERVERS_CRITIC"]
    assert experiment(tmp_path, nodes={"critic": 1}).variants[0].config.actor.engine.kind == (
        "megatron"
    )


def test_what_a_server_is_started_with(tmp_path: Path) -> None:
    def words(*settings: str) -> str:
        config = configs.override(recipes.get("quickstart"), [*servers.settings(BOTH), *settings])
        return " ".join(servers.command(config, "actor", tmp_path / "run"))

    plain = words()
    assert f"--model {tmp_path}/run/engines/actor/model " in plain
    for part in ("--dtype float32", "--logprobs-mode raw_logprobs", '{"backend": "binac"}'):
        assert part in plain
    other = words(
        "actor.engine.transport=nccl", "actor.engine.tp=4", "actor.precision=bf16",
        "rollout.temperature=0.7", "actor.model.max_sequence_length=512",
    )  # fmt: skip
    for part in (
        "--dtype bfloat16", "--logprobs-mode processed_logprobs", '{"backend": "binac_nccl"}',
        "--tensor-parallel-size 4", "--max-model-len 512",
    ):  # fmt: skip
        assert part in other


def test_stages_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    found = stages.variants(["quickstart"], [servers.settings(BOTH)], [], ["actor.engine.tp=1,2"])
    held = Experiment(name="e", folder=tmp_path, variants=found, servers=BOTH)
    with pytest.raises(ValueError, match=r"actor\.engine\.tp is \[1, 2\] over the variants"):
        stages.build(held, ["train"])
    alone = stages.variants(["quickstart_grpo"], [["critic=null"]], [], [])
    held = Experiment(name="e", folder=tmp_path, variants=alone, servers={"critic": 1})
    with pytest.raises(ValueError, match="quickstart_grpo has no critic that is a model"):
        stages.build(held, ["train"])
    # Stages without engines have no servers.
    held = experiment(tmp_path)
    served = [s.name for s in stages.build(held, stages.CHAIN) if s.servers]
    assert served == ["train", "eval"]


TOOLS = {
    "scontrol": "case $1 in show) [[ $2 == hostnames ]] && printf 'n%s\\n' 1 2 3 4 5 || "
    "echo JobState=RUNNING ;; requeue) ;; esac",
    "srun": 'echo "$(printf "<%s>" "$@")" >>$NOTES; exec sleep 9 >&- 2>&-',
    "squeue": "printf '%s\\n' '7.0 extern' '7.1 binac_servers_actor' '7.2 train'",
    "scancel": 'echo "scancel $*" >>$NOTES',
}


def run_batch(tmp_path: Path, stage: Stage, site: Site, body: str) -> tuple[str, list[str]]:
    """One life of the batch script with stand-ins for Slurm's tools: words, calls."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in TOOLS.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    text = f"set +e\n{script.of_batch(stage, site, tmp_path, nodes=2)}\n{body}\n"
    env = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}", "NOTES": str(tmp_path / "notes"),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-5]", "SLURM_ARRAY_TASK_ID": "1",
    }  # fmt: skip
    env.pop("SLURM_RESTART_COUNT", None)
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)
    return done.stdout + done.stderr, (tmp_path / "notes").read_text().splitlines()


def test_servers_come_behind_the_ranks_each_with_a_port(tmp_path: Path) -> None:
    site = Site(workdir=str(tmp_path), gpus_per_node=4, ranks_per_node=4)
    stage = train(tmp_path, "critic.engine.tp=2")
    show = 'echo "$BINAC_SERVERS_ACTOR $BINAC_SERVERS_CRITIC"'
    words, calls = run_batch(tmp_path, stage, site, f"{show}; sleep 1")
    port = 30000 + 7 * 16
    # The actor has two nodes of four servers, the critic one of two.
    actor = [f"http://n{3 + i // 4}:{port + i}" for i in range(8)]
    critic = [f"http://n5:{port + 8 + i}" for i in range(2)]
    assert f"{','.join(actor)} {','.join(critic)}" in words
    steps = [call for call in calls if call.startswith("<--overlap>")]
    flags = [
        ("--nodelist=n3,n4", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4"),
        ("--nodelist=n5", "--nodes=1", "--ntasks=2", "--ntasks-per-node=2"),
    ]
    for step, wanted in zip(sorted(steps), flags, strict=True):
        assert all(f"<{flag}>" in step for flag in wanted)
        assert f"{tmp_path}/.launch/train-1.servers-" in step
    assert "scancel --signal=KILL 7.1" in calls
    assert not [call for call in calls if "7.0" in call or "7.2" in call]
    assert "so do the ranks" not in words


def test_without_their_servers_the_ranks_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(TOOLS, "srun", 'echo "$(printf "<%s>" "$@")" >>$NOTES; exit 9')
    words, calls = run_batch(tmp_path, train(tmp_path), Site(workdir=str(tmp_path)), "sleep 3")
    for role in BOTH:
        assert f"binac: the servers of the {role} ended with 9, and so do the ranks" in words
    assert "scancel --signal=KILL 7.2" in calls
    assert "scancel --signal=KILL 7.0" not in calls


def test_a_stage_without_servers_has_none_of_it(tmp_path: Path) -> None:
    (plain,) = stages.build(experiment(tmp_path, nodes={}), ["train"])
    text = script.of_batch(plain, Site(), tmp_path)
    assert "SERVE" not in text
    assert "squeue" not in text
    assert "@" not in text.replace("$@", "")


def run_server(tmp_path: Path, site: Site, role: str, **env: str) -> str:
    """One server's script with a stand-in for Python; what it would have become."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "<%s>" "$@"; echo "gpus=$CUDA_VISIBLE_DEVICES"\n')
    python.chmod(0o755)
    stage = train(tmp_path, "critic.engine.tp=2", "actor.engine.tp=2")
    for seed in (1, 2):
        place = servers.folder(tmp_path / f"quickstart-seed{seed}", role)
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
    text = script.of_servers(stage, site)[role]
    base = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "CUDA"))}
    done = subprocess.run(
        ["bash", "-c", text], env=base | env, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_each_server_takes_its_gpus_its_port_and_its_run(tmp_path: Path) -> None:
    site = Site(
        workdir=str(tmp_path), python="/none", servers_python=str(tmp_path / "python"),
        gpus_per_node=4, servers_args=("--max-num-seqs", "1 6"),
    )  # fmt: skip
    said = run_server(
        tmp_path, site, "critic", SLURM_PROCID="1", SLURM_LOCALID="1", BINAC_SERVE_PORT="30000",
        SLURM_ARRAY_TASK_ID="1",
    )  # fmt: skip
    # Behind the actor's two nodes of two servers.
    assert "<--port><30005><--max-num-seqs><1 6>gpus=2,3" in said
    assert f"<-m><{servers.SHIELD}><-m><vllm.entrypoints.openai.api_server>" in said
    assert f"<{tmp_path}/quickstart-seed2/engines/critic/model>" in said


def test_in_a_container_and_with_code_that_travels(tmp_path: Path) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"code": "git"}, "--chdir=/nemo_run/code"),
        (
            {"container_image": "/i.sqsh", "container_mounts": ("/data",)},
            f"--container-image=/i.sqsh --container-mounts=/data,{tmp_path}:{tmp_path}",
        ),
        ({"container_image": "/i.sqsh", "code": "git"}, "--container-workdir=/nemo_run/code"),
    ]
    for keys, said in changes:
        site = Site(workdir=str(tmp_path), **keys)
        assert said in script.of_batch(train(tmp_path), site, tmp_path, nodes=2)


def test_violations(tmp_path: Path) -> None:
    site = Site(gpus_per_node=4, servers_python=sys.executable, container_image="x")
    assert not list(preflight.serving(site, experiment(tmp_path)))
    (found,) = preflight.serving(site, experiment(tmp_path, "actor.engine.tp=8"))
    assert "lower actor.engine.tp" in str(found)
    (found,) = preflight.serving(site, experiment(tmp_path, 'actor.engine.urls=["http://a:1"]'))
    assert "leave out --set actor.engine.urls, or --servers" in str(found)
    (found,) = preflight.serving(Site(python="/no/python"), experiment(tmp_path))
    assert "mend servers_python" in str(found)


def test_a_shielded_process_hears_nothing_but_kill() -> None:
    asked = "import signal, sys; signal.signal(15, lambda *a: sys.exit(3)); print(1, flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-m", servers.SHIELD, "-c", f"{asked}; sys.stdin.read(); print(2)"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "1\n"
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(number)
        process.stdin.close()
        assert process.stdout.readline() == "2\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
