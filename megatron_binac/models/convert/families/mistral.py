"""Mistral: Llama with a window of attention, read for sequences that fit the window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_binac.config import ModelConfig
from megatron_binac.models.convert.families.family import Family, read_decoder, within_window


def _read(config: Mapping[str, Any]) -> ModelConfig:
    # transformers means 4096 where the config has no word on it, and no window by null.
    return within_window(read_decoder(config), config.get("sliding_window", 4096))


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": None}


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read=_read,
    write=_write,
    parts={},
)
