"""One role that learns: what an update checks, what it moves, and that packing changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_ranks import run_ranks

from megatron_binac.config import (
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RoleConfig,
)
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.rollout.megatron_engine import MegatronEngine
from megatron_binac.terms import Distill, Term
from megatron_binac.types import Sampling, TrainSequence

VOCAB = 50
PLAIN = LossConfig(kl_coef=0.0)
ROLE = RoleConfig(
    model=ModelConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        max_sequence_length=32,
        init_std=0.15,
    ),
    optimizer=OptimizerConfig(lr=1e-2, clip_grad=0.0),
)


def make(
    *, seed: int = 1, temperature: float = 0.7, role: RoleConfig = ROLE, name: str = "actor"
) -> MegatronLearner:
    start_distributed()
    groups = build_groups(name, role.parallel, 1)
    return MegatronLearner(
        name,
        role,
        groups,
        vocab_size=VOCAB,
        seed=seed,
        num_steps=10,
        temperature=temperature,
    )


def batch(lengths: list[int], *, advantage: float | None = None) -> list[TrainSequence]:
    rng = np.random.default_rng(len(lengths))
    out = []
    for length in lengths:
        mask = np.arange(length) >= 2
        drawn = float(rng.normal())
        out.append(
            TrainSequence(
                ids=rng.integers(0, VOCAB, length).astype(np.int32),
                mask=mask,
                advantage=drawn if advantage is None else advantage,
                logprobs=np.where(mask, -4.0, np.nan).astype(np.float32),
            )
        )
    return out


ROWS = batch([5, 11, 30, 3, 17, 8])


def weights(learner: MegatronLearner) -> list[np.ndarray]:
    return [p.detach().numpy().copy() for p in learner.parameters()]


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("broken", ["advantage", "weight"])
def test_what_is_not_finite_raises_before_anything_moves(broken: str) -> None:
    learner, twin = make(name="critic"), make(name="critic")
    for one in (learner, twin):
        one.update(ROWS, PLAIN)
    rows, kept = ROWS, weights(learner)
    first = learner.parameters()[0]
    if broken == "advantage":
        rows = [replace(ROWS[0], advantage=math.inf), *ROWS[1:]]
    else:
        with torch.no_grad():
            value = first[0, 0].clone()
            first[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"critic update 2: loss .*no weight was moved"):
        learner.update([replace(r, ids=np.zeros_like(r.ids)) for r in rows], PLAIN)
    if broken == "weight":
        with torch.no_grad():
            first[0] = torch.from_numpy(kept[0][0])
        assert value == kept[0][0, 0]
    assert equal(weights(learner), kept)
    assert learner.num_updates == 1
    # Moments and schedule did not move either: the next step is the one that would have been.
    assert learner.update(ROWS, PLAIN) == twin.update(ROWS, PLAIN)
    assert equal(weights(learner), weights(twin))


def test_flops_are_counted_by_pass_by_hand() -> None:
    learner = make()
    # Layer: q and o 32 x 32, k and v 32 x 16: 3072; gated unit 3 * 32 * 48: 4608; two layers.
    # 74 tokens; pairs 15 + 66 + 465 + 6 + 153 + 36 = 741; 62 targets over 50 columns.
    trunk = 2 * 74 * 2 * (3072 + 4608) + 4 * 741 * 32 * 2
    head = 2 * 62 * 50 * 32
    learner.logprobs(ROWS)
    assert learner.take_flops() == trunk + head
    assert learner.take_flops() == 0
    learner.target_states(ROWS)  # what a value head reads: no vocabulary
    assert learner.take_flops() == trunk
    learner.update(ROWS, PLAIN)
    assert learner.take_flops() == 3 * (trunk + head)
    # The reference and the policy before the first of two steps, then twice three passes.
    learner.hold_reference()
    learner.update(ROWS, LossConfig(kl_coef=0.1, updates_per_batch=2))
    assert learner.take_flops() == (1 + 1 + 2 * 3) * (trunk + head)
    learner.update([], PLAIN)
    assert learner.take_flops() == 0
    # Two rows in the teacher's longer context: 7 and 13 tokens, 28 and 91 pairs, the same targets.
    rows = ROWS[:2]
    longer = [
        replace(
            row,
            ids=np.concatenate([np.ones(2, np.int32), row.ids]),
            mask=np.concatenate([np.zeros(2, bool), row.mask]),
            logprobs=np.concatenate([np.full(2, np.nan, np.float32), row.logprobs]),
        )
        for row in rows
    ]
    learner.learn([Term(rows=rows, loss=Distill(trust_region=0.5), teacher=longer)])
    weights_a_token = 2 * 2 * (3072 + 4608)
    scored = 2 * (3 + 9) * 50 * 32
    student = 16 * weights_a_token + 4 * (15 + 66) * 32 * 2 + scored
    teacher = 20 * weights_a_token + 4 * (28 + 91) * 32 * 2 + scored
    assert learner.take_flops() == 3 * student + 2 * teacher


def test_a_batch_without_a_target_moves_nothing() -> None:
    learner, twin = make(), make()
    learner.update(ROWS, PLAIN)
    twin.update(ROWS, PLAIN)
    kept = weights(learner)
    assert learner.update([], PLAIN) == {"num_tokens": 0.0}
    masked = [replace(r, mask=np.zeros_like(r.mask)) for r in ROWS]
    assert learner.update(masked, PLAIN) == {"num_tokens": 0.0}
    assert equal(weights(learner), kept)
    assert learner.num_updates == 1
    assert learner.update(ROWS, PLAIN) == twin.update(ROWS, PLAIN)


def test_a_frozen_role_answers_and_refuses_to_learn() -> None:
    learner, twin = make(role=replace(ROLE, train=False)), make()
    for one, other in zip(learner.logprobs(ROWS), twin.logprobs(ROWS), strict=True):
        np.testing.assert_array_equal(one, other)
    for learn in (lambda: learner.update(ROWS, PLAIN), lambda: learner.supervise(ROWS)):
        with pytest.raises(ValueError, match=r"actor is frozen \(train is False\)"):
            learn()
    assert equal(weights(learner), weights(twin))


def test_a_sequence_scores_the_same_alone_and_packed() -> None:
    learner = make()
    together = learner.logprobs(ROWS)
    narrow = make(role=replace(ROLE, max_tokens_per_micro_batch=32))
    assert len(narrow.plan(ROWS)) > len(learner.plan(ROWS)) == 1
    split = narrow.logprobs(ROWS)
    for i, row in enumerate(ROWS):
        (alone,) = learner.logprobs([row])
        assert alone.shape == row.ids.shape
        np.testing.assert_allclose(together[i], alone, rtol=0, atol=1e-5)
        np.testing.assert_allclose(split[i], alone, rtol=0, atol=1e-5)
        assert (alone[~row.mask] == 0).all()
        assert (alone[row.mask] < 0).all()


def test_other_sequences_of_a_row_do_not_leak_in() -> None:
    learner = make()
    other = [ROWS[0], replace(ROWS[1], ids=(ROWS[1].ids + 7) % VOCAB), *ROWS[2:]]
    before, after = learner.logprobs(ROWS), learner.logprobs(other)
    for i in (0, 2, 3, 4, 5):
        np.testing.assert_array_equal(before[i], after[i])
    assert not np.allclose(before[1], after[1])


def test_later_tokens_do_not_change_earlier_scores() -> None:
    learner = make()
    row = ROWS[2]
    changed = replace(row, ids=np.concatenate([row.ids[:20], (row.ids[20:] + 1) % VOCAB]))
    (a,), (b,) = learner.logprobs([row]), learner.logprobs([changed])
    np.testing.assert_allclose(a[:20], b[:20], rtol=0, atol=1e-6)
    assert not np.allclose(a[20:], b[20:])


def test_the_temperature_divides_the_logits() -> None:
    """Scores at 0.5 are those at 1 squared and renormalised, over the whole vocabulary."""
    row = ROWS[1]
    every = [
        TrainSequence(ids=np.asarray([*row.ids[:6], v], np.int32), mask=np.arange(7) == 6)
        for v in range(VOCAB)
    ]
    at_one = np.asarray([x[-1] for x in make(temperature=1.0).logprobs(every)], np.float64)
    at_half = np.asarray([x[-1] for x in make(temperature=0.5).logprobs(every)], np.float64)
    squared = 2 * at_one - np.log(np.exp(2 * at_one).sum())
    np.testing.assert_allclose(at_half, squared, rtol=0, atol=1e-5)
    assert np.exp(at_one).sum() == pytest.approx(1.0, abs=1e-5)


def test_the_first_ratio_is_one_and_the_engine_agrees() -> None:
    """What was sampled is learned from at once: the rows carry the engine's own log-probs."""
    learner = make()
    engine = MegatronEngine(learner, max_sequences=7)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, int(rng.integers(1, 12))).astype(np.int32) for _ in range(20)]
    sampling = Sampling(max_tokens=16, stop_id=7, temperature=0.7)
    rows = []
    for p, c in zip(prompts, engine.generate(prompts, list(range(20)), sampling), strict=True):
        nothing = np.full(len(p), np.nan, np.float32)
        rows.append(
            TrainSequence(
                ids=np.concatenate([p, c.ids]),
                mask=np.arange(len(p) + len(c.ids)) >= len(p),
                advantage=float(rng.normal()),
                logprobs=np.concatenate([nothing, c.logprobs]),
            )
        )
    stats = learner.update(rows, PLAIN)
    assert stats["ratio"] == stats["ratio_max"] == 1.0
    assert stats["num_dropped"] == 0
    assert stats["mismatch_max"] < 1e-4
    # And the step had an effect: the engine's log-probs are now those of an older policy.
    assert learner.update(rows, PLAIN)["mismatch_max"] > 1e-2


def test_several_steps_on_a_batch_keep_the_old_logprobs() -> None:
    learner, twin = make(), make()
    stats = learner.update(ROWS, replace(PLAIN, updates_per_batch=2))
    assert learner.num_updates == 2
    twin.update(ROWS, PLAIN)
    before = learner_scores(make())
    moved = np.exp(learner_scores(twin) - before)
    assert stats["ratio"] == pytest.approx(moved.mean(), abs=1e-5)
    assert stats["ratio_max"] == pytest.approx(moved.max(), abs=1e-5)
    assert stats["ratio_max"] > 1.01


def learner_scores(learner: MegatronLearner) -> np.ndarray:
    return np.concatenate([x[r.mask] for x, r in zip(learner.logprobs(ROWS), ROWS, strict=True)])


def moved_from_reference() -> MegatronLearner:
    learner = make()
    learner.hold_reference()
    with torch.no_grad():
        for p in learner.parameters():
            p.mul_(1.1)
    return learner


def test_the_kl_coefficient_changes_the_gradient() -> None:
    """Also where no turn earned anything: a KL without a gradient is a number, no leash."""
    norms = {}
    for coef in (0.0, 0.1, 0.2):
        stats = moved_from_reference().update(
            batch([9, 20], advantage=0.0), LossConfig(kl_coef=coef)
        )
        norms[coef] = stats["grad_norm"]
        assert ("kl" in stats) == (coef > 0)
    assert norms[0.0] == 0.0
    assert norms[0.1] > 1e-3
    assert norms[0.2] == pytest.approx(2 * norms[0.1], rel=1e-5)
    mixed = [moved_from_reference().update(ROWS, LossConfig(kl_coef=c)) for c in (0.0, 0.1)]
    assert mixed[0]["policy"] == mixed[1]["policy"]
    assert abs(mixed[0]["grad_norm"] - mixed[1]["grad_norm"]) > 1e-3
    with pytest.raises(ValueError, match=r"actor holds no reference but loss.kl_coef is 0\.1"):
        make().update(ROWS, LossConfig(kl_coef=0.1))


def test_the_kl_is_measured_against_the_reference_that_is_held() -> None:
    """k3 by hand from the two sets of log-probs, and the live weights come back untouched."""
    learner = moved_from_reference()
    kept = weights(learner)
    live, held = learner.logprobs(ROWS), learner.logprobs(ROWS, reference=True)
    assert equal(weights(learner), kept)
    d = np.concatenate([(a - b)[r.mask] for a, b, r in zip(live, held, ROWS, strict=True)])
    stats = learner.update(ROWS, LossConfig(kl_coef=0.1))
    assert stats["kl"] == pytest.approx(float(np.mean(np.expm1(-d) + d)), rel=1e-4)
    assert stats["loss"] == pytest.approx(stats["policy"] + 0.1 * stats["kl"], abs=1e-6)
    again = learner.logprobs(ROWS, reference=True)
    for a, b in zip(held, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_entropy_bonus_raises_the_entropy() -> None:
    entropies = {}
    for coef in (0.0, 1.0):
        learner = make()
        loss = replace(PLAIN, entropy_coef=coef)
        for _ in range(5):
            stats = learner.update(ROWS, loss)
        entropies[coef] = stats["entropy"]
    assert entropies[1.0] > entropies[0.0] + 0.1


def test_the_gradient_of_the_head_is_summed_in_float32() -> None:
    """In bfloat16 the head adds to Megatron's buffer directly: nothing was rounded on the way."""
    learner = make(role=replace(ROLE, precision="bf16"))
    assert len(learner.plan(ROWS)) == 1
    learner.update(ROWS, PLAIN)
    head = learner.chunks[-1].head_weight()
    layer = learner.chunks[-1].decoder.layers[0].mlp.linear_fc2.weight
    rounded = {}
    for name, weight in (("head", head), ("layer", layer)):
        assert (weight.dtype, weight.main_grad.dtype) == (torch.bfloat16, torch.float32)
        assert weight.grad is None
        main = weight.main_grad[:VOCAB]
        assert main.abs().max() > 1e-4
        rounded[name] = (main == main.bfloat16().float()).float().mean().item()
    # A layer's gradient of one micro-batch came in bfloat16; of the head's one value in 256 fits.
    assert rounded["layer"] == 1.0
    assert rounded["head"] < 0.1
    assert head.grad_added_to_main_grad is True


def test_an_update_makes_what_earned_more_likely() -> None:
    learner = make()
    good, bad = ROWS[2], ROWS[4]
    rows = [replace(good, advantage=1.0), replace(bad, advantage=-1.0)]
    before = [float(x.sum()) for x in learner.logprobs(rows)]
    for _ in range(3):
        learner.update(rows, PLAIN)
    after = [float(x.sum()) for x in learner.logprobs(rows)]
    assert after[0] > before[0] + 1.0
    assert after[1] < before[1] - 1.0


def lopsided(role: RoleConfig) -> list[dict[str, Any]]:
    """Batches that do not divide evenly, one with less rows than ranks; then none at all."""
    learner = make(role=role)
    out = []
    for lengths in ([10], [10, 10, 10], [30, 3, 3]):
        rows = batch(lengths)
        out.append({"batches": len(learner.plan(rows)), **learner.update(rows, PLAIN)})
    before = weights(learner)
    out.append({**learner.update([], PLAIN), "moved": not equal(before, weights(learner))})
    return out


@pytest.mark.slow
def test_ranks_agree_on_their_micro_batches_and_on_the_gradient() -> None:
    """One row of 10, three of 10, 30 against 6, at a capacity of 32: no rank hangs without rows."""
    narrow = replace(
        ROLE,
        max_tokens_per_micro_batch=32,
        # No blowing up of rounding, so that later steps can be compared.
        optimizer=replace(ROLE.optimizer, eps=1e-2),
    )
    (alone,) = run_ranks(1, lopsided, narrow)
    for rank in run_ranks(2, lopsided, narrow, timeout=60):
        for got, want in zip(rank[:-1], alone[:-1], strict=True):
            assert got["batches"] >= 1
            for name in ("loss", "grad_norm", "num_tokens", "entropy"):
                assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-6), name
        assert rank[-1] == {"num_tokens": 0.0, "moved": False}
    assert [b["batches"] for b in alone[:-1]] == [1, 1, 2]


def alone_and_packed(parallel: ParallelConfig) -> tuple[list[np.ndarray], list[np.ndarray]]:
    learner = make(role=replace(ROLE, parallel=parallel))
    return [learner.logprobs([row])[0] for row in ROWS], learner.logprobs(ROWS)


@pytest.mark.slow
def test_packing_under_a_pipeline_scores_as_one_process_does() -> None:
    ((want, _),) = run_ranks(1, alone_and_packed, ParallelConfig())
    for alone, packed in run_ranks(2, alone_and_packed, ParallelConfig(pp=2)):
        for a, b, c in zip(alone, packed, want, strict=True):
            np.testing.assert_allclose(a, c, rtol=0, atol=1e-5)
            np.testing.assert_allclose(b, c, rtol=0, atol=1e-5)
