"""Sampling by vLLM servers on other nodes, refitted every step.

The first rank of the job talks to every server over HTTP and hands the answers to the others.
Servers are started by hand or by `binac launch` (docs/engines.md); several are replicas that share
the prompts out. New weights go by files on a disk that both sides see, over CUDA IPC, or over NCCL.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch.distributed as dist

from megatron_binac.first_rank import on_first
from megatron_binac.models import cpu
from megatron_binac.rollout.refit import BUCKET_BYTES, Checksum, Folder, Report, log_first
from megatron_binac.rollout.vllm_engine import (
    Weights,
    check_request,
    completion,
    gpu_sender,
    ipc_json,
    sampling_fields,
    write_once,
)
from megatron_binac.types import Completion, Sampling

logger = logging.getLogger(__name__)

WAIT_STEP_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Where the servers of one role are and how they get its weights."""

    urls: tuple[str, ...]
    max_model_len: int
    transport: Literal["file", "ipc", "nccl"] = "file"
    refit_dir: Path | None = None
    """Folder on a disk that this job and the servers see, for the transport `file`."""
    bucket_bytes: int = BUCKET_BYTES
    temperature: float = 1.0
    """Of the run: log-probs are taken at it."""
    timeout_s: float = 600.0
    max_parallel: int = 64
    """Requests at once to one server."""
    address: str = "127.0.0.1"
    port: int = 29600
    workers_per_server: int = 1
    """For NCCL: where the servers' workers meet this job's first rank, and how many they are."""
    wait_s: float = 900.0
    """Seconds in which every server must answer for the first time."""

    def __post_init__(self) -> None:
        if not self.urls or not all(u.startswith(("http://", "https://")) for u in self.urls):
            raise ValueError(f"engine.urls is {self.urls}, expected addresses as http://host:8000")
        if self.transport == "file" and self.refit_dir is None:
            raise ValueError("engine.transport is 'file' without a folder; set engine.refit_dir")


class VllmServerEngine:
    """One role's engine over vLLM servers. See `Engine`."""

    def __init__(self, weights: Weights, settings: ServerSettings) -> None:
        self.weights, self.settings = weights, settings
        self.version = -1
        self.last: Report | None = None
        """What the last refit moved."""
        self._next = -1
        self._raw = settings.temperature == 1.0
        self._folder = Folder(settings.refit_dir) if settings.refit_dir is not None else None
        self._pool = ThreadPoolExecutor(settings.max_parallel * len(settings.urls))
        self._sender: Any = None
        on_first(self._await_servers)
        if settings.transport != "file":
            self._sender = gpu_sender(
                settings.transport,
                self,
                weights,
                address=settings.address,
                port=settings.port,
                num_workers=len(settings.urls) * settings.workers_per_server,
                bucket_bytes=settings.bucket_bytes,
            )
        else:
            on_first(lambda: self.init_weight_transfer_engine({}))

    def _await_servers(self) -> None:
        """Wait until all servers answer; OSError that names those that never did."""
        until = time.monotonic() + self.settings.wait_s
        missing = list(self.settings.urls)
        told = False
        while missing := [url for url in missing if not self._is_up(url)]:
            if time.monotonic() > until:
                raise OSError(
                    f"no answer from {', '.join(missing)} within {self.settings.wait_s:g} s; see "
                    "the servers' logs, mend engine.urls, or raise engine.wait_s"
                )
            if not told:
                logger.info("waiting for servers: %s", ", ".join(missing))
                told = True
            time.sleep(WAIT_STEP_S)

    def _is_up(self, url: str) -> bool:
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=10.0) as response:
                return response.status == 200
        except (OSError, ValueError):
            return False

    def generate(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """See `Engine.generate`. Raises ValueError where prompt and answer do not fit the model,
        OSError where a server is gone: what it was asked would be missing from the batch."""
        limit = self.settings.max_model_len
        check_request("the servers have", self.version, prompts, seeds, sampling, limit)
        num, urls = len(prompts), self.settings.urls

        def ask_all() -> list[Completion]:
            bodies = [
                {
                    "token_ids": [int(i) for i in p],
                    "sampling_params": sampling_fields(sampling, seed, raw=self._raw),
                }
                for p, seed in zip(prompts, seeds, strict=True)
            ]
            # Neighbours share prompts, and a server caches prefixes: runs, not every n-th.
            places = [urls[i * len(urls) // max(num, 1)] for i in range(num)]
            found = list(self._pool.map(lambda u, b: self._ask(u, b, sampling), places, bodies))
            doubtful = {u for u, c in zip(places, found, strict=True) if c.finish == "failed"}
            if gone := sorted(url for url in doubtful if not self._is_up(url)):
                raise OSError(f"{', '.join(gone)} no longer answers; see the server's log")
            return found

        return on_first(ask_all)

    def _ask(self, url: str, body: dict[str, Any], sampling: Sampling) -> Completion:
        """One answer; `failed` where the server gave none, or one of other weights."""
        try:
            choice = self._post(url, "inference/v1/generate", body)["choices"][0]
            logprobs = [place["logprob"] for place in choice["logprobs"]["content"]]
            versions = {span["version"] for span in choice.get("weight_versions") or ()}
            good = choice["finish_reason"] in ("stop", "length")
            if good and versions <= {str(self.version)}:
                return completion(choice["token_ids"], logprobs, sampling, self.version)
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            pass  # the boundary to a server: one prompt that fails must not end the step
        return completion((), (), sampling, self.version)

    def publish(self, version: int) -> None:
        """Refit all servers: pause, load, drop what was cached, resume; then all must say the same.

        Raises RuntimeError where a server has other weights than were sent, OSError where one
        cannot be reached.
        """
        if version == self.version:
            return
        self.version, self._next = -1, version
        on_first(lambda: self._each("pause?mode=wait"))
        start = time.perf_counter()
        if self._sender is not None:
            report = self._send_by_gpu(version)
        else:
            report = self._send_by_file(version)
        report = replace(report, seconds=time.perf_counter() - start)
        on_first(lambda: self._check(report))
        if self.last is None and dist.get_rank() == 0:
            log_first(report, cpu.device())
        self.version, self.last = version, report

    def _send_by_file(self, version: int) -> Report:
        assert self._folder is not None
        report = write_once(self._folder, self.weights, version, self.settings.bucket_bytes)
        path = str(self._folder.path(version).resolve())

        def load() -> None:
            self.start_weight_update()
            self.update_weights({"path": path})
            self.finish_weight_update()

        on_first(load)
        return report

    def _send_by_gpu(self, version: int) -> Report:
        """vLLM's sender moves the bytes; what they are is counted in a pass of its own."""
        checksum, num_bytes = Checksum(), 0
        for name, tensor in self.weights.stream():
            checksum.add(name, tensor)
            num_bytes += tensor.numel() * tensor.element_size()
        self._sender.send_weights()
        return Report(
            version=version,
            checksum=checksum.hex(),
            num_tensors=checksum.num_tensors,
            num_bytes=num_bytes,
            seconds=0.0,
        )

    def _check(self, report: Report) -> None:
        want = (str(report.version), report.checksum, str(report.num_tensors))
        self._each("reset_prefix_cache")
        for url in self.settings.urls:
            version = self._get(url, "weight_info")["weight_version"]
            answer = self._post(url, "collective_rpc", {"method": "binac_received"})
            for received in answer["results"]:
                found = (version, *map(str, received))
                if found != want:
                    raise RuntimeError(
                        f"after a refit {url} has version, checksum, tensors {found}, expected "
                        f"{want}; it answers with other weights and is not to be used"
                    )
        self._each("resume")

    def rest(self) -> None:
        """Servers have memory of their own."""

    def close(self) -> None:
        """Let the servers go; they run on."""
        self._pool.shutdown()

    # ---- vLLM's four calls of a weight update, to all servers -----------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """For NCCL every server's workers come after those of the servers before it."""
        num = self.settings.workers_per_server

        def start(number: int) -> None:
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += number * num
            url = self.settings.urls[number]
            self._post(url, "init_weight_transfer_engine", {"init_info": info})

        list(self._pool.map(start, range(len(self.settings.urls))))

    def start_weight_update(self) -> None:
        self._each("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        if self.settings.transport == "ipc":
            update_info = ipc_json(update_info)
        self._each("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each("finish_weight_update", {"weight_version": weight_version or str(self._next)})

    # ---- HTTP ----------------------------------------------------------------------------------

    def _each(self, path: str, body: dict[str, Any] | None = None) -> None:
        """The same request to all servers at once."""
        list(self._pool.map(lambda url: self._post(url, path, body or {}), self.settings.urls))

    def _post(self, url: str, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{url.rstrip('/')}/{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return self._read(request)

    def _get(self, url: str, path: str) -> Any:
        return self._read(urllib.request.Request(f"{url.rstrip('/')}/{path}"))

    def _read(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=self.settings.timeout_s) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            reason = error.read(400).decode(errors="replace")
            raise OSError(f"{request.full_url} answered {error.code}: {reason}") from error
        return json.loads(text) if text else None
