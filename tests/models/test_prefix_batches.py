"""Shared prefixes in training: the same losses, gradients and log-probs from fewer tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers_ranks import Job

from megatron_binac import packing
from megatron_binac.config import ModelConfig, ParallelConfig, RoleConfig
from megatron_binac.models.forward import trees_of
from megatron_binac.models.prefix_attention import PrefixBlocks, prefix_attention
from megatron_binac.models.prefix_batches import PrefixBatches, SharedRow
from megatron_binac.types import TrainSequence


def rows(num_prompts: int = 5, seed: int = 0) -> list[TrainSequence]:
    """Turns of small trees: attempts on a prompt, and revisions behind attempt and feedback."""
    rng = np.random.default_rng(seed)
    out = []

    def turn(context: list[int], length: int) -> list[int]:
        answer = rng.integers(0, 300, length).tolist()
        ids = np.asarray(context + answer, np.int32)
        out.append(
            TrainSequence(
                ids=ids,
                mask=np.arange(len(ids)) >= len(context),
                advantage=float(rng.normal()),
                logprobs=np.full(len(ids), -1.0, np.float32),
            )
        )
        return context + answer

    for _ in range(num_prompts):
        prompt = [1, *rng.integers(0, 300, rng.integers(3, 9)).tolist()]
        for _ in range(3):
            attempt = turn(prompt, int(rng.integers(1, 4)))
            feedback = attempt + rng.integers(0, 300, 4).tolist()
            for _ in range(2):
                turn(feedback, int(rng.integers(1, 4)))
    order = rng.permutation(len(out))
    return [out[i] for i in order]


def long_rows(seed: int = 0) -> list[np.ndarray]:
    """Trunks of up to 300 tokens that branch at a few places, and many short turns behind one."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, 300, 300)
    rows = [np.concatenate([trunk[:at], rng.integers(0, 300, 150)]) for at in (0, 5, 70, 290)]
    rows += [np.concatenate([trunk[:40], rng.integers(0, 300, 2)]) for _ in range(60)]
    return [row.astype(np.int32) for row in rows]


@pytest.mark.parametrize("ids", [[s.ids for s in rows()], long_rows()])
def test_batches_are_the_segments_one_by_one(ids: list[np.ndarray]) -> None:
    torch.manual_seed(0)
    packed = packing.gather(packing.Ragged.from_rows(ids, np.int32), np.arange(len(ids)))
    layout = packing.share_prefixes(packed, alignment=packing.Alignment(pack_multiple=16))
    assert layout.saved > 0.4
    tensors = [
        torch.randn(len(layout.tokens_D), heads, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    one = prefix_attention(*tensors, PrefixBlocks.of(layout))
    batches = PrefixBatches.of(layout)
    assert len(batches.batches) <= 6
    all_at_once = batches.attend(*tensors, None)
    assert torch.allclose(one, all_at_once, atol=1e-12)
    weight = torch.randn_like(one)
    for a, b in zip(
        torch.autograd.grad((one * weight).sum(), tensors),
        torch.autograd.grad((all_at_once * weight).sum(), tensors),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)


def test_what_predicts_no_target_is_not_computed() -> None:
    ids = [[1, 2, 7, 8], [1, 2, 7, 9], [1, 2, 5, 6, 4]]
    masks = [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1, 0]]
    packed = packing.gather(
        packing.Ragged.from_rows([np.asarray(row, np.int32) for row in ids], np.int32),
        np.arange(3, dtype=np.int32),
        loss_mask=packing.Ragged.from_rows([np.asarray(m, np.bool_) for m in masks], np.bool_),
    )
    row = SharedRow.of(packed)
    # Sorted: [1, 2, 5] before [1, 2, 7]; the 8, the 9 and what comes after the 5 are read by none.
    assert row.ids_D.tolist() == [1, 2, 5, 7]
    assert row.predict_N.tolist() == [1, 3, 1, 3, 1, 2]


def test_a_row_of_another_length_is_refused() -> None:
    ids = packing.Ragged.from_rows([np.asarray([1, 2, 3], np.int32)], np.int32)
    layout = packing.share_prefixes(packing.gather(ids, np.zeros(1, np.int32)))
    with pytest.raises(ValueError, match="expected 3"):
        PrefixBatches.of(layout).attend(*(torch.zeros(4, 1, 2) for _ in range(3)), None)


def test_a_tree_is_what_begins_with_its_prompt() -> None:
    def one(context: list[int]) -> TrainSequence:
        ids = np.asarray([*context, 9], np.int32)
        return TrainSequence(ids=ids, mask=np.arange(len(ids)) >= len(context))

    found = trees_of([one([1, 2]), one([5, 1]), one([1, 2, 7, 7]), one([1, 3]), one([1, 2, 8])])
    assert found.tolist() == [0, 2, 0, 1, 0]


def test_layouts_that_cannot_share_are_refused() -> None:
    for bad in ({"pp": 2}, {"tp": 2, "sequence_parallel": True}):
        with pytest.raises(ValueError, match="share_prefixes"):
            RoleConfig(
                model=ModelConfig(),
                parallel=ParallelConfig(**bad),  # type: ignore[arg-type]
                share_prefixes=True,
            )


def test_none_shares_wherever_it_can() -> None:
    def shares(local_layers: bool = True, **layout: Any) -> bool:
        role = RoleConfig(parallel=ParallelConfig(**layout), share_prefixes=None)
        return role.shares_prefixes(local_layers=local_layers)

    assert shares()
    assert shares(tp=2)
    assert not shares(pp=2)
    assert not shares(tp=2, sequence_parallel=True)
    assert not shares(local_layers=False)
    assert not RoleConfig().shares_prefixes(local_layers=True)
    assert RoleConfig(share_prefixes=True).shares_prefixes(local_layers=True)


def learn(layout: dict[str, Any], share: bool) -> dict[str, Any]:
    """One rank: log-probs, two updates, and the weights after them."""
    from megatron_binac.config import LossConfig, OptimizerConfig
    from megatron_binac.models.learner import MegatronLearner
    from megatron_binac.models.parallel import build_groups, start_distributed

    start_distributed()
    parallel = ParallelConfig(**layout)
    config = RoleConfig(
        model=ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=48, max_sequence_length=64),
        parallel=parallel,
        optimizer=OptimizerConfig(lr=1e-2),
        max_tokens_per_micro_batch=96,
        share_prefixes=share,
    )
    groups = build_groups("actor", parallel, 1)
    learner = MegatronLearner(
        "actor", config, groups, vocab_size=300, seed=1, num_steps=9, temperature=1.0
    )
    learner.hold_reference()
    sequences = rows()
    stored = sum(
        len(b.ids_T if b.shared is None else b.shared.ids_D) for b in learner.plan(sequences)
    )
    before = learner.logprobs(sequences)
    stats = [learner.update(sequences, LossConfig(kl_coef=0.1)) for _ in range(2)]
    return {
        "stored": stored,
        "logprobs": np.concatenate(before),
        "loss": [s["loss"] for s in stats],
        "grad_norm": [s["grad_norm"] for s in stats],
        "weights": [p.detach().numpy() for p in learner.parameters()],
    }


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "world"), [({}, 1), ({}, 2), ({"tp": 2}, 2)])
def test_learning_is_the_same_from_fewer_tokens(layout: dict[str, Any], world: int) -> None:
    plain = Job(world, learn, layout, False).wait(200.0)
    shared = Job(world, learn, layout, True).wait(200.0)
    for one, other in zip(plain, shared, strict=True):
        assert other["stored"] < 0.6 * one["stored"]
        np.testing.assert_allclose(other["logprobs"], one["logprobs"], atol=2e-6)
        np.testing.assert_allclose(other["loss"], one["loss"], rtol=1e-5)
        np.testing.assert_allclose(other["grad_norm"], one["grad_norm"], rtol=1e-4)
        for a, b in zip(one["weights"], other["weights"], strict=True):
            # Adam divides by a gradient's own size: where that is rounding, so is the step.
            np.testing.assert_allclose(b, a, atol=2e-4)
