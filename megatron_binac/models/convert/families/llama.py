"""Llama 2 and 3.x, SmolLM2, and whatever else says model_type "llama"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_binac.config import ModelConfig
from megatron_binac.models.convert.families.family import Family, read_decoder, require


def _read(config: Mapping[str, Any]) -> ModelConfig:
    require(config, "attention_bias", False)
    require(config, "mlp_bias", False)
    return read_decoder(config)


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": False, "mlp_bias": False}


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=_read,
    write=_write,
    parts={},
)
