"""vLLM servers with nodes of their own on a real Slurm cluster.

The servers are stand-ins that speak vLLM's routes; the ranks are real.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from helpers_cluster import ROOT, STEPS, Cluster, wait_for
from helpers_runs import assert_same_checkpoint, rows

from megatron_binac import pulse

pytest.importorskip("safetensors", reason="weights go to servers in files of safetensors")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
RUN = "quickstart"

# Answers with one of the prompt's own ids, chosen by a hash of prompt, seed and weights.
STANDIN = """
import argparse, hashlib, http.server, json, os, signal, socket, sys, time
from pathlib import Path
from megatron_binac.rollout.refit import Checksum, read_folder

parser = argparse.ArgumentParser()
for name in ("--model", "--host", "--port", "--weight-transfer-config", "--max-model-len"):
    parser.add_argument(name, required=True)
known, rest = parser.parse_known_args()
json.loads((Path(known.model) / "config.json").read_text())
assert json.loads(known.weight_transfer_config) == {"backend": "binac"}
# As uvicorn does; it must not come to that.
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(9))
version, received = "none", ["", 0]

def answer(path, body):
    global version, received
    if path == "/inference/v1/generate":
        ids, asked = body["token_ids"], body["sampling_params"]
        text = json.dumps([ids, asked["seed"], received])
        place = int(hashlib.sha256(text.encode()).hexdigest(), 16) % len(ids)
        out = [ids[place], asked["stop_token_ids"][0]]
        content = [{"token_id": i, "logprob": -0.5} for i in out]
        spans = [{"version": version, "start": 0, "end": 2}]
        choice = {"token_ids": out, "finish_reason": "stop", "weight_versions": spans}
        return {"choices": [{**choice, "logprobs": {"content": content}}]}
    if path == "/update_weights":
        checksum = Checksum()
        for name, tensor in read_folder(Path(body["update_info"]["path"])):
            checksum.add(name, tensor)
        received = [checksum.hex(), checksum.num_tensors]
    elif path == "/finish_weight_update":
        version = body["weight_version"]
    elif path == "/collective_rpc":
        return {"results": [received]}
    return {}

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(answer(self.path, json.loads(body)))

    def do_GET(self):
        self.reply({"weight_version": version})

    def reply(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer.request_queue_size = 256
server = http.server.ThreadingHTTPServer((known.host, int(known.port)), Handler)
print("standing in on", socket.gethostname(), flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def serving(cluster: Cluster) -> str:
    """An interpreter whose vLLM is the stand-in."""
    package = cluster.work / "serving" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(STANDIN)
    program = cluster.work / "serving" / "python"
    path = f"{cluster.work / 'serving'}:{ROOT}"
    program.write_text(f'#!/bin/bash\nPYTHONPATH={path} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture(scope="module")
def served(cluster: Cluster, serving: str) -> Path:
    """Two ranks on two nodes, one server for the actor and one for the critic, undisturbed."""
    site = cluster.site("served", servers_python=serving)
    place = cluster.launch(
        site, "served", "--tp", "2", "--servers", "actor=1,critic=1", "--stages", "train,eval"
    )
    cluster.wait_done(place)
    return place


def server_pids(place: Path) -> list[int]:
    """Servers of an experiment that are alive, on whichever node."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"vllm.entrypoints.openai.api_server" in words and any(
            word.startswith(str(place).encode()) for word in words
        ):
            found.append(int(process.name))
    return found


def test_ranks_and_servers_have_nodes_of_their_own(cluster: Cluster, served: Path) -> None:
    lives = pulse.read(served / RUN, time.time())
    assert {life.rank: life.host for life in lives} == {0: "node1", 1: "node2"}
    assert cluster.line(served, "train")["nodes"] == "node[1-4]"
    said = cluster.binac("logs", served, "--stage", "train")
    for role, host in (("actor", "node3"), ("critic", "node4")):
        assert re.search(rf"binac: servers of the {role}: http://{host}:3\d{{4}}\n", said)
        (log,) = (served / ".launch").glob(f"train-0.servers-{role}-0-*.out")
        assert f"standing in on {host}" in log.read_text()
        assert str(log) in said
    # The folder's config names variables, so that another life may have other hosts.
    config = json.loads((served / RUN / "config.json").read_text())
    assert config["actor"]["engine"]["urls"] == ["$BINAC_SERVERS_ACTOR"]
    assert [row["step"] for row in rows(served / RUN)] == list(range(-1, STEPS))
    assert json.loads((served / "eval" / f"{RUN}.json").read_text())["step"] == STEPS
    wait_for(lambda: not server_pids(served), "the servers to be gone")


def test_a_signal_lets_the_servers_answer_until_the_ranks_have_saved(
    cluster: Cluster, serving: str, served: Path
) -> None:
    site = cluster.site("told", servers_python=serving, env=cluster.gates("told", 3))
    place = cluster.launch(site, "told", "--tp", "2", "--servers", "actor=1,critic=1")
    cluster.wait_step(place, 3)
    cluster.slurm("scancel", "--signal=TERM", cluster.line(place, "train")["job"])
    (line,) = cluster.wait_done(place)
    assert line["restarts"] == 1
    said = cluster.binac("logs", place)
    assert "binac: stopped with step_000004; back into the queue" in said
    assert "failure" not in said
    assert rows(place / RUN) == rows(served / RUN)
    assert_same_checkpoint(place / RUN, served / RUN, STEPS)


def test_a_server_that_dies_costs_a_retry(cluster: Cluster, serving: str, served: Path) -> None:
    site = cluster.site("died", servers_python=serving, env=cluster.gates("died", 3))
    place = cluster.launch(site, "died", "--tp", "2", "--servers", "actor=1,critic=1")
    cluster.wait_step(place, 3)
    first = server_pids(place)
    assert len(first) == 2
    os.kill(first[0], signal.SIGKILL)
    cluster.open("died", 3)
    (line,) = cluster.wait_done(place)
    assert line["restarts"] == 1
    said = cluster.binac("logs", place, "--stage", "train")
    assert "binac: failure 1 of at most 3; back into the queue" in said
    assert rows(place / RUN) == rows(served / RUN)
    assert_same_checkpoint(place / RUN, served / RUN, STEPS)
    wait_for(lambda: not server_pids(place), "the servers to be gone")


def test_servers_that_cannot_be_had_are_refused(cluster: Cluster, serving: str) -> None:
    site = cluster.site("unserved", servers_python=serving)
    for flags, said in (
        (["--servers", "actor=3"], "--nodes 2 and 3 for --servers, and main has 4"),
        (["--servers", "judge=1"], "--servers got 'judge=1', expected nodes by role"),
        (
            ["--servers", "actor=1", "--set", "actor.engine.tp=2"],
            "actor.engine.tp is 2, and a node has 0 GPUs",
        ),
        (
            ["--servers", "actor=1", "--set", 'actor.engine.urls=["http://a:1"]'],
            "leave out --set actor.engine.urls, or --servers",
        ),
    ):
        argv = ("launch", RUN, "--profile", site, "--nodes", "2", *flags)
        assert said in cluster.binac(*argv, code=2), flags
    plain = cluster.site("no-vllm", servers_python=str(cluster.work / "serving" / "none"))
    argv = ("launch", RUN, "--profile", plain, "--servers", "actor=1")
    assert "mend servers_python" in cluster.binac(*argv, code=2)
