"""Prefix-shared = unshared: log-probs of every turn and every gradient, on random trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_binac import packing
from megatron_binac.models.prefix_attention import (
    PrefixBlocks,
    prefix_attention,
    require_prefix_sharing,
)

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD = 31, 24, 4, 2, 6


class TinyDecoder(nn.Module):
    """Two layers of rotary grouped-query attention and an MLP in plain torch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "q": nn.Linear(WIDTH, HEADS * HEAD),
                    "k": nn.Linear(WIDTH, KV_HEADS * HEAD),
                    "v": nn.Linear(WIDTH, KV_HEADS * HEAD),
                    "o": nn.Linear(HEADS * HEAD, WIDTH),
                    "up": nn.Linear(WIDTH, 2 * WIDTH),
                    "down": nn.Linear(2 * WIDTH, WIDTH),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor, blocks: PrefixBlocks | None) -> Tensor:
        """[T] -> log-probs of every next token [T, V]; one plain causal row without `blocks`."""
        x = self.embed(tokens)
        for layer in self.layers:
            h = F.layer_norm(x, (WIDTH,))
            q, k, v = (layer[n](h).unflatten(-1, (-1, HEAD)) for n in "qkv")
            q, k = rotate(q, positions), rotate(k, positions)
            if blocks is not None:
                mixed = prefix_attention(q, k, v, blocks)
            else:
                scores = torch.einsum("qnh,knh->nqk", q, k.repeat_interleave(2, 1)) / HEAD**0.5
                future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
                weights = scores.masked_fill(future, float("-inf")).softmax(-1)
                mixed = torch.einsum("nqk,knh->qnh", weights, v.repeat_interleave(2, 1)).flatten(1)
            x = x + layer["o"](mixed)
            x = x + layer["down"](F.gelu(layer["up"](F.layer_norm(x, (WIDTH,)))))
        return self.head(F.layer_norm(x, (WIDTH,))).log_softmax(-1)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, None, None] * 100.0 ** -torch.linspace(0, 1, HEAD // 2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def random_tree(rng: np.random.Generator) -> list[np.ndarray]:
    """(x, y0), (x, y0, z), (x, y0, z, y1): attempts, feedbacks and revisions of a prompt or two."""

    def text() -> np.ndarray:
        return rng.integers(0, VOCAB, rng.integers(1, 7)).astype(np.int32)

    rows = []
    for _ in range(rng.integers(1, 3)):
        x = text()
        for _ in range(rng.integers(2, 4)):
            attempt = np.concatenate([x, text()])
            rows.append(attempt)
            for _ in range(rng.integers(0, 3)):
                feedback = np.concatenate([attempt, text()])
                rows.append(feedback)
                rows += [np.concatenate([feedback, text()]) for _ in range(rng.integers(0, 3))]
    return rows


def shared_logprobs(
    model: TinyDecoder, packed: packing.Packed, layout: packing.PrefixLayout
) -> Tensor:
    """Score of every token of the packed micro-batch, 0 for the first of a sequence."""
    tokens_D = torch.from_numpy(layout.tokens_D)
    parents_D = torch.from_numpy(layout.parents_D)
    all_D = model(tokens_D, torch.from_numpy(layout.position_ids_D), PrefixBlocks.of(layout))
    picked_D = all_D[parents_D.clamp(min=0)].gather(1, tokens_D[:, None]).squeeze(1)
    logprob_D = torch.where(parents_D >= 0, picked_D, 0.0)
    return logprob_D[torch.from_numpy(layout.slots_T)]


def loss_of(logprob_T: Tensor, weight_T: Tensor) -> Tensor:
    """Not linear in the log-probs: a shared token must take the sum of several gradients."""
    return (weight_T * torch.exp(logprob_T) * logprob_T).sum()


@pytest.mark.parametrize("seed", range(8))
def test_shared_equals_unshared(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = random_tree(rng)
    model = TinyDecoder(seed)
    weights = [torch.from_numpy(rng.standard_normal(len(row)).astype(np.float32)) for row in rows]

    loss, alone = torch.zeros(()), []
    for row, weight in zip(rows, weights, strict=True):
        ids = torch.from_numpy(row.astype(np.int64))
        scores = model(ids, torch.arange(len(ids)), None)[:-1].gather(1, ids[1:, None]).squeeze(1)
        alone.append(F.pad(scores, (1, 0)))
        loss = loss + loss_of(alone[-1], weight)
    loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    packed = packing.gather(rows, np.arange(len(rows), dtype=np.int32))
    layout = packing.share_prefixes(packed, alignment=packing.Alignment(pack_multiple=16))
    assert layout.num_distinct < layout.num_real
    shared = shared_logprobs(model, packed, layout)
    torch.testing.assert_close(shared, torch.cat(alone), rtol=1e-5, atol=1e-5)
    shared_loss = loss_of(shared, torch.cat(weights))
    torch.testing.assert_close(shared_loss, loss, rtol=1e-5, atol=1e-5)
    shared_loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-5, atol=1e-5, msg=name)


def test_padding_changes_nothing_and_gets_no_gradient() -> None:
    rows = [np.array(r, np.int32) for r in ([1, 2, 3], [1, 2, 4, 5])]
    model = TinyDecoder(0)
    packed = packing.gather(rows, np.arange(2, dtype=np.int32))
    grads = []
    for multiple in (1, 32):
        layout = packing.share_prefixes(
            packed, alignment=packing.Alignment(pack_multiple=multiple), pad_id=30
        )
        model.zero_grad()
        shared_logprobs(model, packed, layout).sum().backward()
        grads.append(model.embed.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-7)
    assert not grads[1][30].any()


def test_blocks_hold_visible_pairs_only() -> None:
    rows = [np.array(r, np.int32) for r in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6])]
    layout = packing.share_prefixes(packing.gather(rows, np.arange(3, dtype=np.int32)))
    blocks = PrefixBlocks.of(layout)
    # Segments [1, 2], [3], [4], [5], [6]: 2 * 2 + 1 * 3 + 1 * 3 + 1 * 4 + 1 * 4 pairs, not 6 * 6.
    assert blocks.num_pairs == 18
    assert [k.tolist() for k in blocks.keys] == [
        [0, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 1, 3, 4],
        [0, 1, 3, 5],
    ]


def test_a_row_of_another_layout_is_refused() -> None:
    layout = packing.share_prefixes(
        packing.gather([np.array([1, 2], np.int32)], np.zeros(1, np.int32))
    )
    x = torch.zeros(3, 2, 4)
    with pytest.raises(ValueError, match="query: got 3 tokens, expected 2"):
        prefix_attention(x, x, x, PrefixBlocks.of(layout))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"attention": "transformer_engine"}, "know causal masks between cu_seqlens and no tree"),
        ({"context_parallel": 2}, "a tree can't be cut"),
        ({"dropout": 0.1}, "the turns of a trunk would share"),
        ({"num_experts": 8}, "a shared trunk counts once"),
    ],
)
def test_where_it_cannot_be_used_it_is_refused_with_the_reason(changed: dict, reason: str) -> None:
    require_prefix_sharing(attention="local")
    with pytest.raises(ValueError, match=reason):
        require_prefix_sharing(**{"attention": "local", **changed})
