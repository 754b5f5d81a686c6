"""Packing changes nothing: log-probs, loss and every gradient of a small Megatron-Core model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_binac import packing
from megatron_binac.config import ModelConfig, ParallelConfig, RoleConfig
from megatron_binac.models.attention import PackedParams
from megatron_binac.models.builder import PolicyModel, build_model
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.models.prefix_attention import PrefixBlocks
from megatron_binac.packing import Alignment

VOCAB = 50


@pytest.fixture(scope="module")
def model() -> PolicyModel:
    start_distributed()
    role = RoleConfig(
        model=ModelConfig(
            num_layers=2,
            hidden_size=32,
            ffn_hidden_size=48,
            num_attention_heads=4,
            num_query_groups=2,
            max_sequence_length=64,
            init_std=0.2,  # large weights: differences would show
        )
    )
    (built,) = build_model(role, build_groups("actor", ParallelConfig(), seed=1), VOCAB, seed=1)
    return built


def random_tree(rng: np.random.Generator) -> list[np.ndarray]:
    """(x, y0), (x, y0, z), (x, y0, z, y1) of two prompts."""

    def text() -> np.ndarray:
        return rng.integers(0, VOCAB, rng.integers(1, 9)).astype(np.int32)

    rows = []
    for _ in range(2):
        x = text()
        for _ in range(2):
            attempt = np.concatenate([x, text()])
            rows.append(attempt)
            for _ in range(rng.integers(0, 3)):
                feedback = np.concatenate([attempt, text()])
                rows += [feedback, np.concatenate([feedback, text()])]
    return rows


def logprobs(model: PolicyModel, packed: packing.Packed) -> Tensor:
    """[T] in the token's own place; 0 for the first of a sequence and on padding."""
    tokens_T = torch.from_numpy(packed.tokens_T)
    hidden = run(model, tokens_T, packed.position_ids_T, packed.cu_seqlens_padded.tolist())
    labels_T = torch.from_numpy(packed.labels_T)
    scores = hidden @ model.head_weight()[:VOCAB].T
    picked = scores.log_softmax(-1).gather(1, labels_T.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(labels_T >= 0, picked, 0.0).roll(1)


def shared_logprobs(model: PolicyModel, packed: packing.Packed, align: Alignment) -> Tensor:
    layout = packing.share_prefixes(packed, alignment=align)
    tokens_D = torch.from_numpy(layout.tokens_D)
    parents_D = torch.from_numpy(layout.parents_D)
    hidden = run(
        model, tokens_D, layout.position_ids_D, [0, len(tokens_D)], PrefixBlocks.of(layout)
    )
    scores = hidden[parents_D.clamp(min=0)] @ model.head_weight()[:VOCAB].T
    picked = scores.log_softmax(-1).gather(1, tokens_D[:, None]).squeeze(1)
    return torch.where(parents_D >= 0, picked, 0.0)[torch.from_numpy(layout.slots_T)]


def run(
    model: PolicyModel,
    tokens_T: Tensor,
    position_ids_T: np.ndarray,
    bounds: Sequence[int],
    prefix: PrefixBlocks | None = None,
) -> Tensor:
    positions_T = torch.from_numpy(position_ids_T)
    params = PackedParams.of(positions_T, list(bounds), prefix=prefix)
    return model(tokens_T[None], positions_T[None], None, packed_seq_params=params).squeeze(1)


def step(
    model: PolicyModel,
    rows: list[np.ndarray],
    weights: list[np.ndarray],
    batches: Sequence[np.ndarray],
    align: Alignment,
    *,
    shared: bool = False,
) -> tuple[list[np.ndarray], float, dict[str, Tensor]]:
    """Log-probs in the original order, the loss, and the gradient of every parameter."""
    model.zero_grad()
    total, packs, values = 0.0, [], []
    for indices in batches:
        packed = packing.gather(rows, indices, fields={"weight": weights}, alignment=align)
        scores_T = shared_logprobs(model, packed, align) if shared else logprobs(model, packed)
        weight_T = torch.from_numpy(packed.fields["weight"])
        mask_T = torch.from_numpy(packed.loss_mask_T)
        # Not linear, so that a shared token must take the sum of several gradients.
        loss = torch.where(mask_T, weight_T * scores_T.exp() * scores_T, 0.0).sum()
        loss.backward()
        total += loss.item()
        packs.append(packed)
        values.append(torch.where(mask_T, scores_T, 0.0).detach().numpy())
    back = packing.scatter(values, packs, np.array([len(row) for row in rows]))
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return list(back), total, grads


def assert_same(one: tuple, other: tuple) -> None:
    for a, b in zip(one[0], other[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert one[1] == pytest.approx(other[1], rel=1e-5, abs=1e-5)
    assert one[2].keys() == other[2].keys()
    for name, grad in one[2].items():
        scale = max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(other[2][name], grad, rtol=1e-5, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("seed", range(4))
def test_packed_padded_shared_and_alone_are_one(model: PolicyModel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = random_tree(rng)
    weights = [rng.standard_normal(len(row)).astype(np.float32) for row in rows]
    one_by_one = [np.array([i], np.int32) for i in range(len(rows))]
    alone = step(model, rows, weights, one_by_one, Alignment())
    assert all(grad.abs().max() > 0 for grad in alone[2].values())
    assert len(alone[2]) == len(list(model.named_parameters()))

    lengths = [len(row) for row in rows]
    layouts = {
        "packed": Alignment(),
        "padded sequences": Alignment.for_layout(tensor=2, context=2, sequence_parallel=True),
        "padded pack": Alignment.for_layout(tensor=2, sequence_parallel=True, token_multiple=16),
        "fixed length": Alignment(pack_multiple=16, fixed_length=96),
    }
    for align in layouts.values():
        plan = packing.plan(lengths, capacity=96, dp_size=2, alignment=align)
        batches = [m for rank in range(2) for m in plan.microbatches(rank)]
        assert_same(alone, step(model, rows, weights, batches, align))

    groups = [0 if np.array_equal(row[:1], rows[0][:1]) else 1 for row in rows]
    for align in (Alignment(), Alignment(pack_multiple=16)):
        plan = packing.plan_shared(rows, groups=groups, capacity=96, alignment=align)
        batches = plan.microbatches(0)
        assert plan.stats.real_tokens < sum(lengths)
        assert_same(alone, step(model, rows, weights, batches, align, shared=True))


def test_dummies_add_nothing(model: PolicyModel) -> None:
    rng = np.random.default_rng(5)
    rows = random_tree(rng)[:3]
    weights = [rng.standard_normal(len(row)).astype(np.float32) for row in rows]
    plan = packing.plan([len(r) for r in rows], capacity=64, dp_size=5)
    assert plan.stats.num_dummies == 2
    batches = [m for rank in range(5) for m in plan.microbatches(rank)]
    one_by_one = [np.array([i], np.int32) for i in range(3)]
    assert_same(
        step(model, rows, weights, one_by_one, Alignment()),
        step(model, rows, weights, batches, Alignment(pack_multiple=8)),
    )
