"""Transformer Engine's layers around the packed path: fused norm-linear, attention over `thd` rows,
FP8 that sees no padding.

Megatron-Core's wrappers import Transformer Engine; here they are imported inside functions, where
`precision.choose_layers` has said that it can be used.

Shapes: T tokens of a packed row (of this rank's part under sequence parallelism), H hidden, N query
heads, K key-value heads, D head.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_binac.config import ModelConfig
from megatron_binac.models.attention import PackedAttention, PackedParams


def block_spec(num_layers_here: int, model: ModelConfig) -> TransformerBlockSubmodules:
    """The decoder of one pipeline stage on Transformer Engine's layers."""
    from megatron.core.extensions.transformer_engine import TENorm

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=None if model.moe is None else model.moe.num_experts,
        moe_grouped_gemm=False,  # its weights have other names than those of local layers
        qk_layernorm=model.qk_norm,
    )
    layer.submodules.self_attention.submodules.core_attention = _attention()
    if model.moe is not None:
        # The norm before experts stands alone. Local layers, and so checkpoints and converted
        # weights, call it as the fused norm of a dense layer is called.
        names = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
        layer.submodules.sharded_state_dict_keys_map = names
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers_here, layer_norm=TENorm)


def _attention() -> type[torch.nn.Module]:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class TransformerEngineAttention(TEDotProductAttention):
        """Training rows by Transformer Engine's fused kernels; rows with a KV cache or shared
        prefixes, which those do not know, as the local layers have them."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            self.packed = PackedAttention(config, *args, **kwargs)

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: Any,
            attention_bias: Tensor | None = None,
            packed_seq_params: PackedParams | None = None,
            **kwargs: Any,
        ) -> Tensor:
            """query [T, N, D], key and value [T, K, D] -> [T, N * D]."""
            packed = packed_seq_params
            if packed is None or packed.cache is not None or packed.prefix is not None:
                return self.packed(query, key, value, packed_seq_params=packed)
            return super().forward(
                query,
                key,
                value,
                None,
                attn_mask_type,
                packed_seq_params=thd(packed, query.device),
                **kwargs,
            )

    return TransformerEngineAttention


def thd(packed: PackedParams, device: torch.device) -> PackedSeqParams:
    """The row with its true borders: what Transformer Engine's attention reads."""
    assert packed.bounds is not None
    bounds = packed.bounds
    ends = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = max(b - a for a, b in pairwise(bounds))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def hide_padding(model: Any, tp_rank: int, *, sequence_parallel: bool) -> None:
    """Let rows of padding enter the layers as zeros, and so leave every linear layer as zeros: the
    largest value of a tensor, from which FP8 takes its scale, is then one of a real token.

    Exact for real tokens, which never look at padding. Layers with biases (`qkv_bias`) are not
    zero on padding after the first attention, but bounded by the bias.
    """
    held: dict[str, int | None] = {"num_real": None}

    def remember(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        packed = kwargs.get("packed_seq_params")
        held["num_real"] = None if packed is None else packed.num_real

    def zero(module: Any, args: Any, output: Tensor) -> Tensor:
        num_real = held["num_real"]
        if num_real is None:
            return output
        first = tp_rank * len(output) if sequence_parallel else 0
        place_T = torch.arange(first, first + len(output), device=output.device)
        return torch.where((place_T < num_real)[:, None, None], output, 0.0)

    model.register_forward_pre_hook(remember, with_kwargs=True)
    if getattr(model, "embedding", None) is not None:
        model.embedding.register_forward_hook(zero)
