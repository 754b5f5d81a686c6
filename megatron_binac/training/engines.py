"""Which engine samples from a role, and what it is given: the config's `engine` to an object."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from megatron_binac.config import Config, RoleConfig
from megatron_binac.models import export
from megatron_binac.models.convert import families
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.rollout.engine import Engine
from megatron_binac.rollout.megatron_engine import MegatronEngine
from megatron_binac.rollout.vllm_engine import VllmEngine, VllmSettings, Weights
from megatron_binac.rollout.vllm_server import ServerSettings, VllmServerEngine


def prepare_engine(role: str, learner: MegatronLearner, run_dir: Path) -> None:
    """Write what a vLLM engine makes its model from: of all roles before the first engine is built,
    so that servers start side by side. Collective."""
    if learner.config.engine.kind != "megatron":
        write_model(run_dir / "engines" / role / "model", learner.config, learner.vocab_size)


def build_engine(config: Config, role: str, learner: MegatronLearner, run_dir: Path) -> Engine:
    """The engine that the role's config names, prepared before; collective."""
    settings = learner.config.engine
    if settings.kind == "megatron":
        return MegatronEngine(learner, max_sequences=config.rollout.max_sequences_per_batch)
    weights = Weights(
        stream=lambda: export.hugging_face(learner), metadata=lambda: export.metadata(learner)
    )
    folder = run_dir / "engines" / role
    own_dir = folder / "refit" if settings.refit_dir is None else Path(settings.refit_dir) / role
    room = learner.config.model.max_sequence_length
    if settings.kind == "vllm_server":
        transport = "file" if settings.transport == "auto" else settings.transport
        assert transport in ("file", "ipc", "nccl")
        return VllmServerEngine(
            weights,
            ServerSettings(
                urls=addresses(settings.urls, os.environ),
                max_model_len=room,
                transport=transport,
                refit_dir=own_dir if transport == "file" else None,
                bucket_bytes=settings.bucket_mib << 20,
                temperature=config.rollout.temperature,
                address=_resolved(settings.address, os.environ),
                port=settings.port,
                wait_s=settings.wait_s,
                workers_per_server=settings.workers_per_server,
            ),
        )
    by_file = settings.transport == "file"
    return VllmEngine(
        weights,
        folder / "model",
        VllmSettings(
            tp=settings.tp,
            dtype=_dtype(learner),
            max_model_len=room,
            max_num_seqs=config.rollout.max_sequences_per_batch,
            gpu_memory_utilization=settings.memory_share,
            transport="file" if by_file else "memory",
            refit_dir=own_dir if by_file else None,
            bucket_bytes=settings.bucket_mib << 20,
            sleep=settings.sleep,
            temperature=config.rollout.temperature,
        ),
    )


def addresses(urls: list[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """`engine.urls` with the variables that it names put in; ValueError where one is not set."""
    return tuple(url for entry in urls for url in _resolved(entry, env).split(","))


def _resolved(text: str, env: Mapping[str, str]) -> str:
    if not text.startswith("$"):
        return text
    if not env.get(text[1:]):
        raise ValueError(
            f"engine.urls or engine.address names the variable {text}, which is not set; "
            "`binac launch --servers` sets it in its jobs, elsewhere export it or give addresses"
        )
    return env[text[1:]]


def write_model(folder: Path, role: RoleConfig, vocab_size: int) -> None:
    """A Hugging Face folder without weights: what vLLM needs to make the model. Collective."""
    model = replace(role.model, vocab_size=vocab_size)
    if dist.get_rank() == 0:
        dtype = "float32" if role.precision == "fp32" else "bfloat16"
        facts = families.of_model(model).config(model, dtype)
        folder.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: servers wait for it.
        draft = folder / "config.draft"
        draft.write_text(json.dumps(facts, indent=2), encoding="utf-8")
        draft.replace(folder / "config.json")
    dist.barrier()


def _dtype(learner: MegatronLearner) -> Literal["float32", "bfloat16"]:
    return "float32" if learner.config.precision == "fp32" else "bfloat16"
