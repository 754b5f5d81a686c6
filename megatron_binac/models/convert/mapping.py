"""Which tensors of a Hugging Face model become which tensors of a checkpoint, and how.

One table for all families: they share their names, and what a model has follows from its
`ModelConfig`.

Shapes: N query heads, K key-value heads, D head, H hidden, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_binac.config import ModelConfig
from megatron_binac.models.spec import padded_vocab_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One box of one tensor of the checkpoint, and what it is made of."""

    key: str
    """Name in the checkpoint; layers (and experts) are stacked along its first axes."""
    names: tuple[str, ...]
    """Hugging Face tensors, in the order in which they are joined."""
    kind: Literal["same", "vocab", "qkv", "gate_up"] = "same"
    stack: tuple[int, ...] = ()
    """Sizes of the leading axes: layers, experts."""
    place: tuple[int, ...] = ()
    """Where on those axes this piece is."""


HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def pieces(model: ModelConfig) -> Iterator[Piece]:
    """Every tensor of a model, in the order of its layers."""
    yield Piece(key="embedding.word_embeddings.weight", names=(EMBEDDING,), kind="vocab")
    for layer in range(model.num_layers):
        yield from _layer(model, layer)
    yield Piece(key="decoder.final_layernorm.weight", names=("model.norm.weight",))
    if not model.tied_head:
        yield Piece(key="output_layer.weight", names=(HEAD,), kind="vocab")


def _layer(model: ModelConfig, layer: int) -> Iterator[Piece]:
    theirs, ours = f"model.layers.{layer}.", "decoder.layers."
    at = {"stack": (model.num_layers,), "place": (layer,)}
    qkv = [f"{theirs}self_attn.{x}_proj" for x in "qkv"]
    attention = f"{ours}self_attention."
    yield Piece(
        key=f"{attention}linear_qkv.layer_norm_weight",
        names=(f"{theirs}input_layernorm.weight",),
        **at,
    )
    for what in ("weight", "bias") if model.qkv_bias else ("weight",):
        names = tuple(f"{name}.{what}" for name in qkv)
        yield Piece(key=f"{attention}linear_qkv.{what}", names=names, kind="qkv", **at)
    for x in "qk" if model.qk_norm else "":
        names = (f"{theirs}self_attn.{x}_norm.weight",)
        yield Piece(key=f"{attention}{x}_layernorm.weight", names=names, **at)
    names = (f"{theirs}self_attn.o_proj.weight",)
    yield Piece(key=f"{attention}linear_proj.weight", names=names, **at)
    names = (f"{theirs}post_attention_layernorm.weight",)
    yield Piece(key=f"{ours}mlp.linear_fc1.layer_norm_weight", names=names, **at)
    if model.moe is None:
        yield from _feed_forward(f"{theirs}mlp.", f"{ours}mlp.", (model.num_layers,), (layer,))
        return
    names = (f"{theirs}mlp.gate.weight",)
    yield Piece(key=f"{ours}mlp.router.weight", names=names, **at)
    for expert in range(model.moe.num_experts):
        yield from _feed_forward(
            f"{theirs}mlp.experts.{expert}.",
            f"{ours}mlp.experts.experts.",
            (model.num_layers, model.moe.num_experts),
            (layer, expert),
        )


def _feed_forward(
    theirs: str, ours: str, stack: tuple[int, ...], place: tuple[int, ...]
) -> Iterator[Piece]:
    gate_up = (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
    key = f"{ours}linear_fc1.weight"
    yield Piece(key=key, names=gate_up, kind="gate_up", stack=stack, place=place)
    down = (f"{theirs}down_proj.weight",)
    yield Piece(key=f"{ours}linear_fc2.weight", names=down, stack=stack, place=place)


def states(model: ModelConfig) -> Iterator[str]:
    """Names of the empty states that Megatron-Core keeps beside linear layers and reads back."""
    ours, num = "decoder.layers.", model.num_layers
    linear = ["self_attention.linear_proj", "self_attention.linear_qkv"]
    if model.moe is None:
        linear += ["mlp.linear_fc1", "mlp.linear_fc2"]
    for layer in range(num):
        for name in linear:
            yield f"{ours}{name}._extra_state/shard_{layer}_{num}"
        for expert in range(0 if model.moe is None else model.moe.num_experts):
            assert model.moe is not None
            for name in ("linear_fc1", "linear_fc2"):
                where = f"{layer}.{expert}_{num}.{model.moe.num_experts}"
                yield f"{ours}mlp.experts.experts.{name}._extra_state/shard_{where}"


def shapes(piece: Piece, model: ModelConfig) -> list[tuple[int, ...]]:
    """Shape of each Hugging Face tensor of a piece; ValueError where the table has no rule for
    it."""
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.num_query_groups
    width, ffn = model.head_width, model.ffn_hidden_size
    if model.moe is not None and len(piece.stack) == 2:
        ffn = model.moe.ffn_hidden_size
    if piece.kind == "vocab":
        assert model.vocab_size is not None
        return [(model.vocab_size, hidden)]
    if piece.kind == "gate_up":
        return [(ffn, hidden)] * 2
    if piece.kind == "qkv":
        rows = [heads * width, groups * width, groups * width]
        return [(n,) if piece.key.endswith("bias") else (n, hidden) for n in rows]
    if piece.key.endswith("linear_proj.weight"):
        return [(hidden, heads * width)]
    if piece.key.endswith("linear_fc2.weight"):
        return [(hidden, ffn)]
    if piece.key.endswith("router.weight"):
        assert model.moe is not None
        return [(model.moe.num_experts, hidden)]
    if piece.key.endswith(("q_layernorm.weight", "k_layernorm.weight")):
        return [(width,)]
    return [(hidden,)]


def box(piece: Piece, model: ModelConfig) -> tuple[int, ...]:
    """Shape of the joined tensor."""
    each = shapes(piece, model)
    rows = sum(shape[0] for shape in each)
    return (padded_vocab_size(rows) if piece.kind == "vocab" else rows, *each[0][1:])


def join(piece: Piece, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """The checkpoint's tensor from Hugging Face's."""
    if piece.kind == "same":
        return parts[0]
    if piece.kind == "gate_up":
        return torch.cat(list(parts))
    if piece.kind == "vocab":
        rows = parts[0]
        spare = padded_vocab_size(len(rows)) - len(rows)
        # Zeros: these columns are never read, but what is written must be decided by something.
        return torch.cat([rows, rows.new_zeros(spare, *rows.shape[1:])]) if spare else rows
    # Megatron-Core keeps the heads that share a key together: queries, their key, their value.
    groups = model.num_query_groups
    split = [part.view(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(split, dim=1).flatten(0, 1)


def split(piece: Piece, whole: Tensor, model: ModelConfig) -> list[Tensor]:
    """Hugging Face's tensors from the checkpoint's; `join` backwards, padding dropped."""
    if piece.kind == "same":
        return [whole]
    if piece.kind == "gate_up":
        return list(whole.chunk(2))
    if piece.kind == "vocab":
        assert model.vocab_size is not None
        return [whole[: model.vocab_size]]
    groups, width = model.num_query_groups, model.head_width
    queries = model.num_attention_heads // groups * width
    grouped = whole.view(groups, -1, *whole.shape[1:])
    return [part.flatten(0, 1) for part in grouped.split([queries, width, width], dim=1)]
