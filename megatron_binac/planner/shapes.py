"""The shape of a decoder: parameters by matrix, whole and on one rank.

Suffixes: L layers, H hidden, N query heads, K key-value heads, D head width, F feed-forward, E
experts, V vocabulary.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from megatron_binac.config import ModelConfig

VOCAB_MULTIPLE = 128
"""Rows of the embedding are padded to this (`models.spec.VOCAB_MULTIPLE`, checked by a test)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A Llama-shaped decoder, dense or with routed experts in every layer."""

    num_layers: int
    hidden: int
    ffn: int
    """Width of the dense gated unit; unused where there are experts."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    """Real columns; the padding behind them is stored and never computed."""
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0

    @staticmethod
    def of(model: ModelConfig, vocab: int) -> Shape:
        """The shape of a role's model with a vocabulary of `vocab` real columns."""
        moe = model.moe
        return Shape(
            num_layers=model.num_layers,
            hidden=model.hidden_size,
            ffn=model.ffn_hidden_size,
            heads=model.num_attention_heads,
            kv_heads=model.num_query_groups,
            head_dim=model.head_width,
            vocab=model.vocab_size or vocab,
            tied=model.tied_head,
            qk_norm=model.qk_norm,
            qkv_bias=model.qkv_bias,
            num_experts=moe.num_experts if moe else 0,
            experts_per_token=moe.top_k if moe else 0,
            expert_ffn=moe.ffn_hidden_size if moe else 0,
        )

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the keys, and of the values, of one token."""
        return self.kv_heads * self.head_dim

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's four projections: H (N D) twice, H (K D) twice."""
        return 2 * self.hidden * (self.query_width + self.kv_width)

    @property
    def mlp_weights(self) -> int:
        """Weights of one layer's feed-forward matrices that are stored."""
        if self.num_experts:
            return self.num_experts * (3 * self.hidden * self.expert_ffn + self.hidden)
        return 3 * self.hidden * self.ffn

    @property
    def active_mlp_weights(self) -> int:
        """Weights of them that one token is multiplied with; the router in full."""
        if self.num_experts:
            routed = self.experts_per_token * 3 * self.hidden * self.expert_ffn
            return routed + self.num_experts * self.hidden
        return self.mlp_weights

    @property
    def layer_vectors(self) -> int:
        """One layer's parameters that are no matrix: two norms, those of q and k, biases."""
        biases = self.query_width + 2 * self.kv_width if self.qkv_bias else 0
        return 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0) + biases

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model without padding of the vocabulary."""
        layer = self.attention_weights + self.mlp_weights + self.layer_vectors
        tables = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.num_layers * layer + self.hidden + tables

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: no input embedding, routed experts only."""
        layer = self.attention_weights + self.active_mlp_weights
        return self.num_layers * layer + self.vocab * self.hidden

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache keeps for one token over all layers."""
        return 2 * self.num_layers * self.kv_width

    def parameters_by_tensor(self, *, tp: int, pp: int, stage: int, ep: int = 1) -> list[int]:
        """Sizes of the tensors that a rank of a pipeline stage holds, in the model's order.

        Projections are cut by `tp`; of the experts whole ones lie on tp / ep ranks each. A rank's
        norms are whole. A tied head on a stage without the embedding is stored a second time.
        """
        tensors: list[int] = []
        table = self.padded_vocab * self.hidden // tp
        first, last = stage == 0, stage == pp - 1
        if first:
            tensors.append(table)
        for _ in range(self.num_layers // pp):
            tensors += [self.hidden, self.query_width * self.hidden // tp]
            tensors.append((self.query_width + 2 * self.kv_width) * self.hidden // tp)
            if self.qkv_bias:
                tensors.append((self.query_width + 2 * self.kv_width) // tp)
            if self.qk_norm:
                tensors += [self.head_dim, self.head_dim]
            tensors.append(self.hidden)
            if self.num_experts:
                tensors.append(self.num_experts * self.hidden)
                one = self.expert_ffn * self.hidden // (tp // ep)
                tensors += [2 * one, one] * (self.num_experts // ep)
            else:
                tensors += [2 * self.ffn * self.hidden // tp, self.ffn * self.hidden // tp]
        if last:
            tensors.append(self.hidden)
            if not (self.tied and first):
                tensors.append(table)
        return tensors


@cache
def _models() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("data/models.json").read_text(encoding="utf-8")
    return json.loads(text)["models"]


def known() -> dict[str, float]:
    """FAMILY:SIZE of every model in the data file, with the parameters its card states."""
    return {name: entry["published"] for name, entry in _models().items()}


def named(name: str) -> Shape:
    """The shape of FAMILY:SIZE; ValueError naming the closest where there is none."""
    models = _models()
    if name not in models:
        close = difflib.get_close_matches(name, models, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown model {name!r}; the closest is {close!r}, known are {', '.join(models)}, and "
            "files and folders with a config.json of Hugging Face's"
        )
    known_fields = {item.name for item in fields(Shape)}
    return Shape(**{key: value for key, value in models[name].items() if key in known_fields})
