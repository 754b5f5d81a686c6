"""Role config -> Megatron-Core's `TransformerConfig` and layer spec."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.nn import functional as F

from megatron_binac.config import ModelConfig, RoleConfig
from megatron_binac.models import precision
from megatron_binac.models.attention import PackedAttention
from megatron_binac.models.rope import attention_scale

VOCAB_MULTIPLE = 128
"""Rows of the embedding are padded to this, whatever the layout, so that a checkpoint fits every
layout."""

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


class RMSNorm(torch.nn.RMSNorm):
    """Megatron-Core's own wrapper refuses sequence parallelism; all it needs is the mark on the
    weight."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ZeroCenteredRMSNorm(RMSNorm):
    """Multiplies by 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        # Rounded once, after the product, as Gemma has it.
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).type_as(x)


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the embedding and of the head; the rows behind `vocab_size` are never read or
    sampled."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def transformer_config(role: RoleConfig) -> TransformerConfig:
    """The settings of Megatron-Core for one role.

    Gradients are summed over data-parallel ranks and micro-batches, never averaged: the loss comes
    in divided by the number of tokens of the whole global batch.
    """
    model, parallel = role.model, role.parallel
    return TransformerConfig(
        **_mixture(role),
        **precision.options(role),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_width,
        softmax_scale=attention_scale(model),
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        layernorm_zero_centered_gamma=model.zero_centered_norm,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[model.activation],
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        sequence_parallel=parallel.sequence_parallel,
        recompute_granularity="full" if parallel.recompute == "full" else None,
        recompute_method="uniform" if parallel.recompute == "full" else None,
        recompute_num_layers=1 if parallel.recompute == "full" else None,
        calculate_per_token_loss=True,
        perform_initialization=True,  # also marks sharded weights; builder.initialize comes after
        use_cpu_initialization=not torch.cuda.is_available(),
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=False,
        batch_p2p_comm=False,
    )


def _mixture(role: RoleConfig) -> dict[str, Any]:
    """What Megatron-Core is told of the experts; nothing for a dense model."""
    moe = role.model.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        # A softmax over the chosen experts is one over all of them that is normalised again.
        "moe_router_pre_softmax": not moe.renormalize,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # The other one copies its counts from the GPU to the host, and only from there.
        "moe_token_dispatcher_type": "alltoall" if torch.cuda.is_available() else "allgather",
        "expert_model_parallel_size": role.parallel.ep,
        "expert_tensor_parallel_size": role.parallel.tp // role.parallel.ep,
    }


def block_spec(num_layers_here: int, model: ModelConfig) -> TransformerBlockSubmodules:
    """The decoder of one pipeline stage: local layers with packed attention and RMSNorm."""
    layer = get_gpt_layer_local_spec(
        num_experts=None if model.moe is None else model.moe.num_experts,
        qk_layernorm=model.qk_norm,
        normalization="RMSNorm",
    )
    norm = ZeroCenteredRMSNorm if model.zero_centered_norm else RMSNorm
    layer.submodules.input_layernorm = norm
    layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers_here, layer_norm=norm)
