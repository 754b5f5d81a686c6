"""A learner's weights as whole Hugging Face tensors, streamed out of any layout.

What an engine that samples with weights of its own is refitted from: one tensor is whole at a time,
gathered from the tensor-parallel ranks that hold it and handed from its pipeline stage to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_binac.models import cpu
from megatron_binac.models.convert import mapping
from megatron_binac.models.learner import MegatronLearner

ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Checkpoints name a layer's norms as Transformer Engine's fused layers do; local layers apart."""


@torch.no_grad()
def hugging_face(learner: MegatronLearner) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every weight, in the order of the layers, without padded vocabulary
    rows. Collective over the ranks of a replica: each must take all of them in turn."""
    model = replace(learner.config.model, vocab_size=learner.vocab_size)
    groups = learner.groups
    held = _held(learner)
    pp = groups.config.pp
    for piece in mapping.pieces(model):
        ranks, place = range(groups.config.tp), piece.place
        if len(place) == 2:
            ranks, place = _expert(learner, place)
        mine = held.get((piece.key, place))
        gated = piece.kind == "gate_up"
        whole = None if mine is None else _gather(learner, mine, ranks, gated=gated)
        if pp > 1:
            owners: list[bool] = [False] * pp
            dist.all_gather_object(owners, mine is not None, group=groups.collection.pp)
            if whole is None:
                shape = mapping.box(piece, model)
                whole = torch.empty(shape, dtype=_dtype(learner), device=cpu.device())
            source = dist.get_global_rank(groups.collection.pp, owners.index(True))
            dist.broadcast(whole, source, group=groups.collection.pp)
        assert whole is not None, f"no parameter holds {piece.key} {piece.place}"
        yield from zip(piece.names, mapping.split(piece, whole, model), strict=True)


def _expert(learner: MegatronLearner, place: tuple[int, ...]) -> tuple[range, tuple[int, ...]]:
    """Tensor-parallel ranks that hold an expert, and its layer and number on them."""
    layer, expert = place
    moe, parallel = learner.config.model.moe, learner.groups.config
    assert moe is not None
    experts_here, width = moe.num_experts // parallel.ep, parallel.tp // parallel.ep
    first = expert // experts_here * width
    return range(first, first + width), (layer, expert % experts_here)


def _held(learner: MegatronLearner) -> dict[tuple[str, tuple[int, ...]], Tensor]:
    """This rank's parameters by the name and place that a checkpoint gives them."""
    found = {}
    for chunk in learner.chunks:
        for name, param in chunk.named_parameters():
            parts = name.split(".")
            place: tuple[int, ...] = ()
            if parts[:2] == ["decoder", "layers"]:
                place = (chunk.decoder.layers[int(parts[2])].layer_number - 1,)
                rest = parts[3:]
                if "local_experts" in rest:
                    at = rest.index("local_experts")
                    place = (*place, int(rest[at + 1]))  # among the experts of this rank
                    rest[at : at + 2] = ["experts"]
                key = ".".join(rest)
                alias = next((a for a, own in ALIASES.items() if own == key), key)
                name = f"decoder.layers.{alias}"
            found[name, place] = param
    return found


def _gather(learner: MegatronLearner, param: Tensor, ranks: range, *, gated: bool) -> Tensor:
    """The whole of a parameter, of which these tensor-parallel ranks hold a part or all."""
    tp = learner.groups.config.tp
    split = len(ranks) > 1 and getattr(param, "tensor_model_parallel", False)
    mine = param.detach().contiguous()
    if not split and len(ranks) == tp:
        return mine
    shards = [torch.empty_like(mine) for _ in range(tp)]
    dist.all_gather(shards, mine, group=learner.groups.collection.tp)
    shards = [shards[rank] for rank in ranks]
    if not split:
        return shards[0]
    dim = getattr(param, "partition_dim", 0)
    if not gated:
        return torch.cat(shards, dim)
    # A rank holds its part of the gate above its part of the up projection.
    halves = [shard.chunk(2, dim) for shard in shards]
    return torch.cat([half[i] for i in range(2) for half in halves], dim)


def _dtype(learner: MegatronLearner) -> torch.dtype:
    return learner.chunks[0].config.params_dtype


def metadata(learner: MegatronLearner) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """(name, dtype, shape) of what `hugging_face` gives, in its order, without moving a byte."""
    model = replace(learner.config.model, vocab_size=learner.vocab_size)
    return [
        (name, _dtype(learner), shape)
        for piece in mapping.pieces(model)
        for name, shape in zip(piece.names, mapping.shapes(piece, model), strict=True)
    ]
