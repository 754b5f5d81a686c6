"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_binac.config import ModelConfig
from megatron_binac.models.convert.families.family import Family, read_decoder, within_window


def _read(config: Mapping[str, Any]) -> ModelConfig:
    model = read_decoder(config, qkv_bias=True)
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return within_window(model, window)


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"use_sliding_window": False}


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=_read,
    write=_write,
    parts={"qkv_bias": True},
)
