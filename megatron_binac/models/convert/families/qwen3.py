"""Qwen3, dense: queries and keys normalised by head, a head width of its own, no bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_binac.config import ModelConfig
from megatron_binac.models.convert.families.family import (
    Family,
    read_decoder,
    require,
    within_window,
)

HEAD_DIM = 128
"""What a config without a word on it means."""


def read_qwen3(config: Mapping[str, Any], **parts: Any) -> ModelConfig:
    """The settings that the dense and the mixture models share."""
    require(config, "attention_bias", False)
    config = {"head_dim": HEAD_DIM, **config}
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return within_window(read_decoder(config, qk_norm=True, **parts), window)


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": False, "use_sliding_window": False}


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=read_qwen3,
    write=_write,
    parts={"qk_norm": True},
)
