"""Sampling by vLLM, beside the learner: one `LLM` in every process of the job, refitted every step.

The processes are those of the learner (vLLM's external launcher: the same program on every rank,
`tp` neighbours hold one replica), and the new weights are handed over within the process, or in
files. vLLM is imported here alone, inside functions; its workers import this module as well, for
`WorkerExtension` and for the transports that `register` makes known.

Weights of another job, on other nodes: `vllm_server`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_binac.first_rank import on_first
from megatron_binac.models import cpu
from megatron_binac.rollout.refit import (
    BUCKET_BYTES,
    Bucket,
    Checksum,
    Folder,
    Report,
    log_first,
    read_folder,
    send,
)
from megatron_binac.types import Completion, Sampling

EXTENSION = "megatron_binac.rollout.vllm_engine.WorkerExtension"
BACKEND = "binac"
"""Our transport, by memory or files; `binac_ipc` and `binac_nccl` are vLLM's own, counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What an engine is refitted from. Both are collective and give the same order."""

    stream: Callable[[], Iterator[tuple[str, Tensor]]]
    """(Hugging Face name, whole tensor)."""
    metadata: Callable[[], list[tuple[str, torch.dtype, tuple[int, ...]]]]
    """(name, dtype, shape) without moving a byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSettings:
    """How vLLM runs for one role."""

    tp: int = 1
    """Neighbouring ranks that hold one replica."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_model_len: int
    """Tokens of prompt and answer together."""
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.4
    """Share of a GPU's memory; the learner has the rest."""
    transport: Literal["memory", "file"] = "memory"
    refit_dir: Path | None = None
    """Folder on a disk that all ranks see, for the transport `file`."""
    bucket_bytes: int = BUCKET_BYTES
    sleep: bool = False
    """Give weights and KV cache up between two rollouts; on GPUs only."""
    temperature: float = 1.0
    """Of the run: log-probs are taken at it."""

    def __post_init__(self) -> None:
        if self.sleep and not torch.cuda.is_available():
            raise ValueError(
                "engine.sleep is on, but vLLM can only sleep on a GPU; set engine.sleep=false"
            )
        if self.transport == "file" and self.refit_dir is None:
            raise ValueError("engine.transport is 'file' without a folder; set engine.refit_dir")


def sampling_fields(sampling: Sampling, seed: int, *, raw: bool) -> dict[str, Any]:
    """vLLM's SamplingParams for one answer, as keywords.

    `raw` says that the engine reports log-probs of the plain model, which are those at temperature
    1; else it reports what it sampled from. Raises ValueError where neither is what the learner
    scores: the full distribution at the training temperature.
    """
    restricted = sampling.top_k > 0 or sampling.top_p < 1.0
    if not sampling.greedy and restricted and sampling.temperature != 1.0:
        raise ValueError(
            f"rollout.temperature is {sampling.temperature} with top_k or top_p: vLLM reports "
            "log-probs either before the temperature or after top-k and top-p, and the learner "
            "scores neither; set the temperature to 1, or top_k=0 and top_p=1, or use the engine "
            "megatron"
        )
    if not sampling.greedy and restricted and not raw:
        raise ValueError("top_k and top_p need an engine that reports raw log-probs")
    return {
        "n": 1,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": [sampling.stop_id],
        "ignore_eos": True,  # what ends a turn is the stop id and nothing of the model's config
        "seed": int(seed) % (1 << 62),
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }


def completion(ids: Sequence[int], logprobs: Any, sampling: Sampling, version: int) -> Completion:
    """An answer as the loop wants it; `failed` where ids and log-probs do not belong together."""
    array = np.asarray(ids, np.int32)
    values = np.asarray(logprobs, np.float32)
    if len(array) == 0 or values.shape != array.shape or not np.isfinite(values).all():
        return Completion(
            ids=array[:0], logprobs=values.reshape(-1)[:0], finish="failed", version=version
        )
    stopped = int(array[-1]) == sampling.stop_id
    return Completion(
        ids=array, logprobs=values, finish="stop" if stopped else "length", version=version
    )


def check_request(
    who: str,
    version: int,
    prompts: Sequence[np.ndarray],
    seeds: Sequence[int],
    sampling: Sampling,
    max_model_len: int,
) -> None:
    """ValueError where there is not a seed for each prompt, nothing was published yet, or a prompt
    leaves no room. `who` begins the sentence, as in "the engine has"."""
    if len(prompts) != len(seeds):
        raise ValueError(f"got {len(seeds)} seeds for {len(prompts)} prompts, expected one each")
    if version < 0:
        raise ValueError(f"{who} no weights yet; call publish first")
    longest = max((len(p) for p in prompts), default=0)
    if longest + sampling.max_tokens > max_model_len:
        raise ValueError(
            f"a prompt of {longest} tokens and {sampling.max_tokens} new ones do not fit "
            f"max_model_len {max_model_len}; raise model.max_sequence_length or "
            "lower rollout.max_*_tokens"
        )


class VllmEngine:
    """One role's engine over vLLM's offline `LLM`. See `Engine`."""

    def __init__(self, weights: Weights, folder: Path, settings: VllmSettings) -> None:
        """`folder` holds a Hugging Face config.json; weights come from the first `publish`.

        Raises ImportError, naming the extra, where vLLM is missing; ValueError where `tp` does not
        divide the ranks.
        """
        world = dist.get_world_size()
        if world % settings.tp:
            raise ValueError(
                f"engine.tp is {settings.tp}, which does not divide the {world} ranks of the job"
            )
        self.weights, self.settings = weights, settings
        self.version = -1
        self.last: Report | None = None
        """What the last refit moved."""
        self._asleep = False
        self._raw = settings.temperature == 1.0
        by_file = settings.transport == "file" and settings.refit_dir is not None
        self._folder = Folder(settings.refit_dir) if by_file else None
        # The engine must live in this process: weights are handed to it, not sent.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        llm = _vllm().LLM
        _check_neighbour(settings.tp)
        register()
        with _caller_settings(), _shared_memory():
            self._llm = llm(
                model=str(folder),
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype=settings.dtype,
                tensor_parallel_size=settings.tp,
                distributed_executor_backend="external_launcher" if world > 1 else "uni",
                enforce_eager=not torch.cuda.is_available(),
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_num_seqs,
                seed=0,
                enable_prefix_caching=True,
                enable_sleep_mode=settings.sleep,
                gpu_memory_utilization=settings.gpu_memory_utilization,
                logprobs_mode="raw_logprobs" if self._raw else "processed_logprobs",
                worker_extension_cls=EXTENSION,
                weight_transfer_config={"backend": BACKEND},
                disable_log_stats=True,
            )
        # At its end, also at that of the process, it would destroy the process groups of this job,
        # which are not its own; `close` ends what is.
        self._llm.llm_engine.engine_core._finalizer.detach()
        self._llm.init_weight_transfer_engine({"init_info": {}})

    def generate(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """See `Engine.generate`. Raises ValueError where prompt and answer do not fit the model."""
        limit = self.settings.max_model_len
        check_request("the engine has", self.version, prompts, seeds, sampling, limit)
        self._wake("weights", "kv_cache")
        rank, count = dist.get_rank(), dist.get_world_size() // self.settings.tp
        replica = rank // self.settings.tp
        first, last = (len(prompts) * r // count for r in (replica, replica + 1))
        params = _vllm().SamplingParams
        asked = [
            params(**sampling_fields(sampling, seed, raw=self._raw)) for seed in seeds[first:last]
        ]
        texts = [{"prompt_token_ids": [int(i) for i in p]} for p in prompts[first:last]]
        with _caller_settings():
            outputs = self._llm.generate(texts, asked, use_tqdm=False) if texts else []
        mine = [self._completion(output, sampling) for output in outputs]
        if dist.get_world_size() == 1:
            return mine
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine if rank % self.settings.tp == 0 else [])
        return [answer for part in parts for answer in part]

    def _completion(self, output: Any, sampling: Sampling) -> Completion:
        answer = output.outputs[0]
        ids = list(answer.token_ids)
        scored = answer.logprobs or []
        logprobs = [place[token].logprob for token, place in zip(ids, scored, strict=False)]
        if answer.finish_reason not in ("stop", "length"):  # aborted, or an error of its own
            ids, logprobs = [], []
        return completion(ids, logprobs, sampling, self.version)

    def publish(self, version: int) -> None:
        """Refit: wake the weights, load the learner's, wake the KV cache, drop what was cached.

        Raises RuntimeError where a replica has other weights than were sent. A refit that failed
        half-way leaves an engine that is not to be used again.
        """
        if version == self.version:
            return
        self.version, start = -1, time.perf_counter()
        self._wake("weights")
        self._llm.start_weight_update()
        report = self._send(version)
        self._llm.finish_weight_update(str(version))
        self._wake("kv_cache")
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache over new weights; it has open requests")
        found = [
            (self._llm.get_weight_version(), *state)
            for state in self._llm.collective_rpc("binac_received")
        ]
        check_replicas(found, report)
        report = replace(report, seconds=time.perf_counter() - start)
        if self.last is None and dist.get_rank() == 0:
            log_first(report, cpu.device())
        self.version, self.last = version, report

    def _send(self, version: int) -> Report:
        settings = self.settings

        def hand_over(bucket: Bucket) -> None:
            self._llm.update_weights({"update_info": {"tensors": list(bucket.tensors())}})

        if self._folder is None:
            return send(
                self.weights.stream(),
                hand_over,
                version=version,
                bucket_bytes=settings.bucket_bytes,
            )
        # Everybody takes part in the stream; one writes it down.
        report = write_once(self._folder, self.weights, version, settings.bucket_bytes)
        self._llm.update_weights({"update_info": {"path": str(self._folder.path(version))}})
        return report

    def rest(self) -> None:
        """Give up the memory of weights and KV cache until the next use; nothing where `sleep` is
        off."""
        if self.settings.sleep and not self._asleep:
            self._llm.sleep(level=2)  # the weights come anew with the next publish
            self._asleep, self.version = True, -1

    def _wake(self, *tags: str) -> None:
        if self._asleep:
            self._llm.wake_up(tags=list(tags))
            self._asleep = "kv_cache" not in tags

    def close(self) -> None:
        """End vLLM's workers and scheduler."""
        core = self._llm.llm_engine.engine_core.engine_core
        core.model_executor.shutdown()
        core.scheduler.shutdown()


def _check_neighbour(tp: int) -> None:
    """ValueError where an engine of the other role, in the same process, is split otherwise: vLLM
    knows one layout a process."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return
    held = parallel_state.get_tensor_model_parallel_world_size()
    if held != tp:
        raise ValueError(
            f"engine.tp is {tp} for one role and {held} for the other, but vLLM knows one layout a "
            "process; give both roles the same engine.tp, or one of them engine.kind=vllm_server "
            "or megatron"
        )


def write_once(folder: Folder, weights: Weights, version: int, bucket_bytes: int) -> Report:
    """The first rank writes a version down while all take part in the stream; the report on
    all."""
    report: Any = None
    if dist.get_rank() == 0:
        report = folder.write(weights.stream(), version=version, bucket_bytes=bucket_bytes)
    else:
        for _ in weights.stream():
            pass
    return on_first(lambda: report)


def check_replicas(found: Sequence[tuple[str, str, int]], report: Report) -> None:
    """Raise RuntimeError, on all ranks, unless every worker of every replica has what was sent.

    `found` holds (version, checksum, number of tensors) of this rank's workers.
    """
    parts: list[Any] = [list(found)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, list(found))
    want = (str(report.version), report.checksum, report.num_tensors)
    wrong = [
        (rank, state) for rank, part in enumerate(parts) for state in part if tuple(state) != want
    ]
    if wrong:
        rank, state = wrong[0]
        raise RuntimeError(
            f"after a refit {len(wrong)} workers do not hold what was sent: rank {rank} has "
            f"version, checksum, tensors {tuple(state)}, expected {want}; the engine is not to be "
            "used again"
        )


# ---- inside vLLM's workers ---------------------------------------------------------------------


class WorkerExtension:
    """Mixed into vLLM's worker class."""

    weight_transfer_engine: Any

    def binac_received(self) -> list[Any]:
        """Checksum and number of the tensors that the last update brought to this worker."""
        received = self.weight_transfer_engine.received
        return [received.hex(), received.num_tensors]


class _Counting:
    """A model whose `load_weights` adds what it is given to a checksum first."""

    def __init__(self, model: Any, received: Checksum) -> None:
        self._model, self._received = model, received

    def load_weights(self, weights: Any) -> Any:
        pairs = list(weights)
        for name, tensor in pairs:
            self._received.add(name, tensor)
        return self._model.load_weights(iter(pairs))


@contextlib.contextmanager
def _counted(engine: Any) -> Iterator[None]:
    model = engine.model
    engine.model = _Counting(model, engine.received)
    try:
        yield
    finally:
        engine.model = model


def prepare_reload(model: Any, device: Any) -> None:
    """Let the CPU's experts be packed again after a reload.

    vLLM (0.32, 0.33) packs them only where a layer has no kernel yet, which it has after the first
    load; without this the kernel reads the new weights in the wrong order.
    """
    if torch.device(device).type == "cpu":
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None


def register() -> None:
    """Make vLLM know our transports; once per process."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    known: Any = WeightTransferEngineFactory
    if BACKEND in known._registry:
        return

    @dataclass
    class Start(WeightTransferInitInfo):
        """Nothing is agreed on beforehand."""

    @dataclass
    class Update(WeightTransferUpdateInfo):
        """One bucket, or the folder of a whole version."""

        tensors: list[Any] | None = None
        path: str | None = None

    class Direct(WeightTransferEngine):
        """Takes tensors of this process, or files."""

        init_info_cls = Start
        update_info_cls = Update

        def init_transfer_engine(self, init_info: Any) -> None:
            self.received = Checksum()

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            self.received = Checksum()
            prepare_reload(self.model, self.device)
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Any) -> None:
            pairs = update_info.tensors
            if pairs is None:
                pairs = read_folder(Path(update_info.path))
            with _counted(self):
                for pair in pairs:  # one at a time: a file is never whole in memory
                    self.model.load_weights([pair])

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """Nothing is held."""

    def counted(module: str, name: str) -> Callable[[], Any]:
        def load() -> Any:
            import importlib

            base = getattr(importlib.import_module(module), name)

            class Counted(base):
                def start_weight_update(self) -> None:
                    self.received = Checksum()
                    prepare_reload(self.model, self.device)
                    super().start_weight_update()

                def receive_weights(self, update_info: Any) -> None:
                    with _counted(self):
                        super().receive_weights(update_info)

            return Counted

        return load

    known.register_engine(BACKEND, Direct)
    package = "vllm.distributed.weight_transfer"
    known._registry["binac_ipc"] = counted(f"{package}.ipc_engine", "IPCWeightTransferEngine")
    known._registry["binac_nccl"] = counted(f"{package}.nccl_engine", "NCCLWeightTransferEngine")


# ---- the sender's side of GPU transports -------------------------------------------------------


def gpu_sender(
    transport: Literal["ipc", "nccl"],
    client: Any,
    weights: Weights,
    *,
    address: str = "127.0.0.1",
    port: int = 0,
    num_workers: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
) -> Any:
    """vLLM's own sender over CUDA IPC (same node) or NCCL (any); its `send_weights()` is a whole
    refit and collective, the first rank sends.

    `client` has vLLM's four calls of an update (`VLLMWeightSyncClient`). For NCCL `num_workers`
    ranks of the engines meet the first rank of the learner at `address`:`port`.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            f"engine.transport is {transport!r}, which moves memory of GPUs, and there is none; "
            "set engine.transport=file"
        )
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, dtype, shape) for name, dtype, shape in weights.metadata()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return weights.stream()

    rank = dist.get_rank()
    if transport == "ipc":
        from vllm.distributed.weight_transfer import ipc_engine

        info = ipc_engine.IPCTrainerInitInfo(
            packed=True, packed_buffer_size_bytes=bucket_bytes, rank=rank
        )
        sender = ipc_engine.IPCTrainerWeightTransferEngine
    else:
        from vllm.distributed.weight_transfer import nccl_engine

        info = nccl_engine.NCCLTrainerInitInfo(
            master_address=address,
            master_port=port,
            world_size=1 + num_workers,
            packed=True,
            packed_buffer_size_bytes=bucket_bytes,
            rank=rank,
        )
        sender = nccl_engine.NCCLTrainerWeightTransferEngine
    return sender.trainer_init(info, client=client, source=Source())


def ipc_json(update_info: Any) -> Any:
    """Handles of CUDA IPC in a form that JSON can carry, as vLLM's own client makes it."""
    from vllm.distributed.weight_transfer import clients

    return clients._json_safe_update_payload(update_info)


@contextlib.contextmanager
def _caller_settings() -> Iterator[None]:
    """vLLM changes the threads and the default dtype of the process, and on the CPU takes away the
    function that sets the former; ours come back."""
    threads, dtype, set_threads = (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.set_num_threads,
    )
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def _shared_memory() -> Iterator[None]:
    """On CPUs the ranks of a replica meet in shared memory, under external launchers by a name that
    is the same for every job: of two on a node, or one that was killed and the next, the second
    fails. What is made inside has a name of its own, and none once all have found it."""
    if torch.cuda.is_available():
        yield
        return
    from vllm.distributed.device_communicators import cpu_communicator

    name = f"binac-{on_first(lambda: secrets.token_hex(8))}"
    shared = cpu_communicator._CPUSHMDistributed
    theirs = shared.make_group_name
    shared.make_group_name = staticmethod(lambda c: f"{name}{theirs(c).replace('/', '')}")
    try:
        yield
        dist.barrier()
    finally:
        shared.make_group_name = staticmethod(theirs)
        for path in Path("/dev/shm").glob(f"{name}*"):
            path.unlink(missing_ok=True)


def _vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            f"engine.kind is vllm, but vLLM cannot be imported ({error}); pip install "
            "'megatron_binac[vllm]', or set engine.kind=megatron"
        ) from error
    return vllm


if "vllm" in sys.modules:  # a worker of vLLM, which imports this module for the extension
    register()
