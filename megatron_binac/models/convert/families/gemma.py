"""Gemma, the first: norms of 1 + weight, scaled embeddings, GELU, a tied head.

Gemma 2 and 3 have parts that the layers here do not (`families.REASONS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_binac.config import ModelConfig
from megatron_binac.models.convert.families.family import Family, read_decoder, require

HEAD_DIM = 256
"""What a config without a word on it means."""


def _read(config: Mapping[str, Any]) -> ModelConfig:
    require(config, "attention_bias", False)
    require(config, "use_bidirectional_attention", None, False)
    config = {"head_dim": HEAD_DIM, **config}
    if config.get("hidden_activation") is None and config.get("hidden_act") in (None, "gelu"):
        # The first configs said "gelu" and meant the approximation that the models were trained by.
        config["hidden_act"] = "gelu_pytorch_tanh"
    return read_decoder(config, tied=True, zero_centered_norm=True, scale_embedding=True)


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh"}


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    read=_read,
    write=_write,
    parts={
        "activation": "gelu_tanh",
        "zero_centered_norm": True,
        "scale_embedding": True,
    },
)
