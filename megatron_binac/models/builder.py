"""One role's model, gradient buffers, optimizer and learning-rate schedule.

Shapes: V padded vocabulary, H hidden, F feed-forward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_binac.config import ModelConfig, OptimizerConfig, RoleConfig
from megatron_binac.models import cpu, precision, te
from megatron_binac.models.attention import RotaryByPosition
from megatron_binac.models.parallel import Groups
from megatron_binac.models.rope import inverse_frequencies
from megatron_binac.models.spec import block_spec, padded_vocab_size, transformer_config
from megatron_binac.seeds import name_seed


class PolicyModel(GPTModel):
    """A GPT stage whose last stage hands out the final hidden states: log-probs are taken from
    them fused."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor:
        """This rank's rows [V/tp, H] of the output layer; only on the last stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_model(role: RoleConfig, groups: Groups, vocab_size: int, seed: int) -> list[PolicyModel]:
    """This rank's stages of one policy (`vpp` of them), with weights that depend on seed and name
    alone."""
    groups.activate()
    layers, why = precision.choose_layers(role)
    precision.log_choice(groups.role, layers, why)
    config = transformer_config(role)
    spec = te.block_spec if layers == "te" else block_spec
    num_chunks, pp = role.parallel.vpp, role.parallel.pp
    layers_here = role.model.num_layers // (pp * num_chunks)
    chunks = []
    with cpu.region():
        for chunk in range(num_chunks):
            first = groups.pp_rank == 0 and chunk == 0
            last = groups.is_last_stage and chunk == num_chunks - 1
            model = PolicyModel(
                config,
                spec(layers_here, role.model),
                vocab_size=padded_vocab_size(vocab_size),
                max_sequence_length=role.model.max_sequence_length,
                pre_process=first,
                post_process=last,
                parallel_output=True,
                share_embeddings_and_output_weights=role.model.tied_head,
                position_embedding_type="rope",
                rotary_base=int(role.model.rope_theta),
                pg_collection=groups.collection,
                vp_stage=chunk if num_chunks > 1 else None,
            )
            if role.model.rope_scaling is not None:
                model.rotary_pos_emb.inv_freq = inverse_frequencies(role.model)
            if first and role.model.scale_embedding:
                model.embedding.register_forward_hook(_scale_output)
            model.rotary_pos_emb = RotaryByPosition(
                model.rotary_pos_emb,
                role.model.max_sequence_length,
                config.params_dtype,
                in_core=layers == "local",
            )
            model.to(cpu.device())
            initialize(model, role.model, groups, seed)
            if config.fp8:
                te.hide_padding(
                    model, groups.tp_rank, sequence_parallel=role.parallel.sequence_parallel
                )
            chunks.append(model)
    return chunks


def initialize(model: PolicyModel, config: ModelConfig, groups: Groups, seed: int) -> None:
    """Fill a stage with fresh weights: each full matrix comes from a seed of its own global name.

    Every tensor-parallel rank draws the full matrix and keeps its slice, so that no layout changes
    a weight.
    """
    with torch.no_grad():
        for name, param in model.named_parameters():
            key = _global_name(name, model, groups, config)
            if param.dim() == 1:
                is_zero = config.zero_centered_norm or key.endswith("bias")
                param.fill_(0.0 if is_zero else 1.0)
                continue
            std = config.init_std
            if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
                std /= math.sqrt(2.0 * config.num_layers)
            dim = param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
            is_expert = ".experts." in key
            tp = 1
            if dim is not None:
                tp = groups.config.tp // groups.config.ep if is_expert else groups.config.tp
            shape = list(param.shape)
            if dim is not None:
                shape[dim] *= tp
            generator = torch.Generator().manual_seed(name_seed(seed, key))
            full = torch.empty(shape).normal_(0.0, std, generator=generator)
            param.copy_(_slice(full, dim, tp, groups.tp_rank % tp, gated="linear_fc1" in key))


def _slice(full: Tensor, dim: int | None, tp: int, rank: int, *, gated: bool) -> Tensor:
    if dim is None:
        return full
    if not gated:
        return full.chunk(tp, dim)[rank]
    # A rank of the gated unit holds its part of the gate above its part of the up projection.
    return torch.cat([half.chunk(tp, dim)[rank] for half in full.chunk(2, dim)], dim)


def _scale_output(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * torch.tensor(output.shape[-1] ** 0.5, dtype=output.dtype)


def _global_name(name: str, model: PolicyModel, groups: Groups, config: ModelConfig) -> str:
    """The parameter's name with the numbers that layer and expert have in the whole model."""
    parts = name.split(".")
    if "layers" in parts:
        at = parts.index("layers") + 1
        parts[at] = str(model.decoder.layers[int(parts[at])].layer_number - 1)
    if "local_experts" in parts:
        assert config.moe is not None
        at = parts.index("local_experts") + 1
        experts_here = config.moe.num_experts // groups.config.ep
        first = groups.tp_rank // (groups.config.tp // groups.config.ep) * experts_here
        parts[at] = str(first + int(parts[at]))
    key = ".".join(parts)
    # A tied head on another stage than the embedding starts from the same numbers.
    tied = model.share_embeddings_and_output_weights
    return "embedding.word_embeddings.weight" if tied and key == "output_layer.weight" else key


def wrap(
    role: RoleConfig, groups: Groups, chunks: list[PolicyModel]
) -> list[DistributedDataParallel]:
    """Megatron's gradient buffers and data-parallel reduction around each stage."""
    groups.activate()
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=role.optimizer.distributed,
        overlap_grad_reduce=False,
    )
    with cpu.region():
        wrapped = [
            DistributedDataParallel(
                chunk.config, ddp_config, chunk, pg_collection=groups.collection
            )
            for chunk in chunks
        ]

    def finalize(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        # The loss is divided by the global number of tokens already: nothing is left to scale.
        with cpu.region():
            finalize_model_grads(model, None, pg_collection=groups.collection)

    chunks[0].config.finalize_model_grads_func = finalize
    return wrapped


def build_optimizer(
    role: RoleConfig, groups: Groups, model: list[DistributedDataParallel], num_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam (sharded over data-parallel ranks where asked for) and its schedule over `num_steps`
    optimizer steps."""
    groups.activate()
    config: OptimizerConfig = role.optimizer
    with cpu.region():
        optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=chunk_dtype(model) == torch.bfloat16,
                params_dtype=chunk_dtype(model),
                use_distributed_optimizer=config.distributed,
            ),
            model,
            use_gloo_process_groups=False,
            pg_collection=groups.collection,
        )
    chunks_config = model[0].module.config
    chunks_config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr if config.schedule != "constant" else 0.0,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(num_steps, config.warmup_steps + 1),
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def chunk_dtype(model: list[DistributedDataParallel]) -> torch.dtype:
    return model[0].module.config.params_dtype
