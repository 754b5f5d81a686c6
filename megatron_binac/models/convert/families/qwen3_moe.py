"""Qwen3 with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_binac.config import ModelConfig, MoEConfig
from megatron_binac.models.convert.families.family import Family, require
from megatron_binac.models.convert.families.qwen3 import read_qwen3


def _read(config: Mapping[str, Any]) -> ModelConfig:
    require(config, "decoder_sparse_step", 1)
    require(config, "mlp_only_layers", [], None)
    moe = MoEConfig(
        num_experts=config.get("num_experts", config.get("num_local_experts", 128)),
        top_k=config.get("num_experts_per_tok", 8),
        ffn_hidden_size=config.get("moe_intermediate_size", 768),
        renormalize=config.get("norm_topk_prob", False),
    )
    return read_qwen3(config, moe=moe)


def _write(model: ModelConfig) -> dict[str, Any]:
    assert model.moe is not None
    return {
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "moe_intermediate_size": model.moe.ffn_hidden_size,
        "norm_topk_prob": model.moe.renormalize,
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    write=_write,
    parts={"qk_norm": True, "moe": "any"},
)
