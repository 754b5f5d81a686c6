"""The families whose weights are read and written: which config is whose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_binac.config import ModelConfig
from megatron_binac.models.convert.families.family import Family
from megatron_binac.models.convert.families.gemma import GEMMA
from megatron_binac.models.convert.families.llama import LLAMA
from megatron_binac.models.convert.families.mistral import MISTRAL
from megatron_binac.models.convert.families.qwen2 import QWEN2
from megatron_binac.models.convert.families.qwen3 import QWEN3
from megatron_binac.models.convert.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA)
}
REASONS = {
    "gemma2": "norms behind attention and feed-forward, soft caps on logits, windows of attention",
    "gemma3": "norms behind attention and feed-forward, two rotary bases, windows of attention",
    "gemma3_text": "norms behind attention and feed-forward, two rotary bases, windows of "
    "attention",
    "qwen2_moe": "a shared expert beside the routed ones",
    "mixtral": "experts under other names",
    "phi3": "joined projections under other names",
}
"""What a known family has that the layers here do not."""


def of_config(config: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face config; ValueError that says why there is none."""
    kind = config.get("model_type")
    if kind in FAMILIES:
        return FAMILIES[kind]
    why = f" (it has {REASONS[kind]})" if kind in REASONS else ""
    raise ValueError(
        f"model_type is {kind!r}{why}, expected one of {', '.join(FAMILIES)}; SmolLM2 and other "
        "models of Llama's shape say 'llama'"
    )


def of_model(model: ModelConfig) -> Family:
    """The plainest family that has all of a model's parts; ValueError where none has."""
    for family in FAMILIES.values():
        if family.holds(model):
            return family
    raise ValueError(
        "no family has all of this model's parts at once (qkv_bias, qk_norm, moe, activation, "
        "zero_centered_norm, scale_embedding); export a model of one family's shape"
    )
