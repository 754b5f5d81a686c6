"""An update on several terms: what is added up, what each is divided by, and no layout shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_ranks import run_ranks

from megatron_binac.algo.distill import SdpoConfig, sdpo_loss
from megatron_binac.config import (
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RoleConfig,
)
from megatron_binac.method_config import ValueHeadConfig
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.objective import denominator
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.models.scratch import scratch
from megatron_binac.models.value_head import ValueHead
from megatron_binac.terms import CrossEntropy, Distill, FirstPrompt, Shaped, Term
from megatron_binac.types import TrainSequence

VOCAB = 50
PLAIN = LossConfig(kl_coef=0.0)
ROLE = RoleConfig(
    model=ModelConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=48, max_sequence_length=32, init_std=0.15
    ),
    optimizer=OptimizerConfig(lr=1e-2, clip_grad=0.0),
    max_tokens_per_micro_batch=48,
)


def make(parallel: ParallelConfig | None = None, **changes: Any) -> MegatronLearner:
    start_distributed()
    parallel = parallel or ParallelConfig()
    role = replace(ROLE, parallel=parallel, **changes)
    return MegatronLearner(
        "actor",
        role,
        build_groups("actor", parallel, 1),
        vocab_size=VOCAB,
        seed=1,
        num_steps=10,
        temperature=0.7,
    )


def batch(lengths: list[int], seed: int) -> list[TrainSequence]:
    rng = np.random.default_rng(seed)
    out = []
    for length in lengths:
        mask = np.arange(length) >= 2
        out.append(
            TrainSequence(
                ids=rng.integers(0, VOCAB, length).astype(np.int32),
                mask=mask,
                advantage=float(rng.normal()),
                logprobs=np.where(mask, -4.0, np.nan).astype(np.float32),
            )
        )
    return out


ROWS, OTHERS = batch([5, 11, 30, 3, 17, 8], 0), batch([9, 4, 21], 1)


def longer(row: TrainSequence) -> TrainSequence:
    """The same targets after three more tokens of context."""
    return TrainSequence(
        ids=np.concatenate([np.asarray([7, 8, 9], np.int32), row.ids]),
        mask=np.concatenate([np.zeros(3, bool), row.mask]),
    )


STUDENTS = batch([6, 12, 20], 2)
DISTILL = Term(
    name="teacher",
    rows=STUDENTS,
    loss=Distill(alpha=0.5, top_k=5),
    teacher=[longer(r) for r in STUDENTS],
)
TERMS = [
    Term(rows=ROWS, loss=PLAIN),
    Term(name="sd", rows=OTHERS, loss=FirstPrompt(floor=-4.5), coef=0.1),
    Term(name="fm", rows=OTHERS, loss=CrossEntropy(), coef=0.2),
    Term(name="shaped", rows=ROWS[:2], loss=Shaped(), coef=0.5, denominator=40.0),
    replace(DISTILL, coef=0.3),
]


def gradient(learner: MegatronLearner, terms: list[Term]) -> torch.Tensor:
    """What an update would move along: Megatron's float32 buffers, before Adam."""
    learner.learn(terms)
    return torch.cat([p.main_grad.flatten().clone() for p in learner.parameters()])


def test_the_gradient_of_a_sum_is_the_sum_of_gradients() -> None:
    whole = gradient(make(), TERMS)
    parts = sum(gradient(make(), [term]) for term in TERMS)
    assert torch.allclose(whole, parts, atol=1e-6)
    assert all(float(gradient(make(), [term]).norm()) > 1e-3 for term in TERMS)


def test_a_coefficient_scales_its_term_and_zero_leaves_it_out() -> None:
    one = gradient(make(), [TERMS[0]])
    assert torch.allclose(gradient(make(), [replace(TERMS[0], coef=3.0)]), 3 * one, atol=1e-6)
    learner, twin = make(), make()
    assert learner.learn([TERMS[0], replace(TERMS[2], coef=0.0)]) == twin.learn([TERMS[0]])
    assert learner.learn([replace(TERMS[0], coef=0.0)]) == {"num_tokens": 0.0}


def test_what_a_loss_is_divided_by() -> None:
    tokens, rows = sum(r.num_targets for r in ROWS), len(ROWS)
    for aggregate, want in (
        ("token_mean", tokens), ("sequence_mean", rows), ("sequence_sum", rows),
    ):  # fmt: skip
        loss = replace(PLAIN, aggregate=aggregate)
        assert denominator(Term(rows=ROWS, loss=loss)) == want
    constant = replace(PLAIN, aggregate="constant", constant_length=30)
    assert denominator(Term(rows=ROWS, loss=constant)) == rows * 30
    assert denominator(TERMS[3]) == 40.0


def test_aggregates_weigh_tokens_as_they_say() -> None:
    """With a constant advantage the gradient of sequence_mean is the mean of each row's own."""
    rows = [replace(r, advantage=1.0) for r in ROWS]
    alone = [gradient(make(), [Term(rows=[r], loss=PLAIN)]) for r in rows]
    by_rows = replace(PLAIN, aggregate="sequence_mean")
    assert torch.allclose(
        gradient(make(), [Term(rows=rows, loss=by_rows)]), sum(alone) / len(rows), atol=1e-6
    )
    summed = sum(g * r.num_targets for g, r in zip(alone, rows, strict=True)) / len(rows)
    total = replace(PLAIN, aggregate="sequence_sum")
    assert torch.allclose(gradient(make(), [Term(rows=rows, loss=total)]), summed, atol=1e-5)
    constant = replace(PLAIN, aggregate="constant", constant_length=10)
    got = gradient(make(), [Term(rows=rows, loss=constant)])
    assert torch.allclose(got, summed / 10, atol=1e-6)


def test_tokens_may_have_advantages_of_their_own() -> None:
    """Advantage 1 on one token and 0 elsewhere is that token alone, at the same denominator."""
    row = ROWS[1]
    spread = np.zeros(len(row.ids), np.float32)
    spread[7] = 1.0
    got = gradient(make(), [Term(rows=[replace(row, advantage=spread)], loss=PLAIN)])
    alone = replace(row, mask=np.arange(len(row.ids)) == 7, advantage=1.0)
    want = gradient(make(), [Term(rows=[alone], loss=PLAIN, denominator=float(row.num_targets))])
    assert torch.allclose(got, want, atol=1e-7)
    assert float(want.norm()) > 1e-3


def test_a_sequence_ratio_is_one_in_the_first_step() -> None:
    loss = replace(PLAIN, ratio="sequence", aggregate="sequence_mean", updates_per_batch=2)
    first = make().learn([Term(rows=ROWS, loss=replace(loss, updates_per_batch=1))])
    assert (first["ratio"], first["ratio_max"]) == (pytest.approx(1.0), 1.0)
    assert make().learn([Term(rows=ROWS, loss=loss)])["ratio_max"] > 1.001


def test_the_teacher_is_the_policy_itself_after_a_longer_context() -> None:
    """Against `algo.distill.sdpo_loss` on full distributions: K is the whole vocabulary."""
    learner = make()
    student = full_logprobs(learner, STUDENTS)
    teacher = full_logprobs(learner, DISTILL.teacher)
    sampled = torch.cat([torch.from_numpy(r.ids[r.mask].astype(np.int64)) for r in STUDENTS])
    chosen = student.gather(1, sampled[:, None])[:, 0]
    cfg = SdpoConfig(alpha=0.5, ratio_clip=2.0)
    every = torch.ones(len(sampled), dtype=torch.bool)
    want, stats = sdpo_loss(
        student[:, :-1], teacher[:, :-1], every, cfg,
        logprob_T=chosen, old_logprob_T=torch.full_like(chosen, -4.0),
    )  # fmt: skip
    full = replace(DISTILL, loss=Distill(alpha=0.5, top_k=VOCAB - 1))
    got = learner.learn([full])
    assert got["teacher/loss"] == pytest.approx(float(want) / len(sampled), rel=1e-4)
    share = float(stats["distill_clip_count"]) / len(sampled)
    assert got["teacher/distill_clip_share"] == pytest.approx(share)


def full_logprobs(learner: MegatronLearner, rows: list[TrainSequence]) -> torch.Tensor:
    """Log-probs [N, V] of every masked token's distribution, in the order of the rows."""
    out: dict[int, torch.Tensor] = {}
    batches = learner.plan(rows)
    found = learner._score(batches, read=learner.scorer.target_logits)
    for one, logits in zip(batches, found, strict=True):
        start = 0
        for at in one.indices:
            stop = start + rows[int(at)].num_targets
            out[int(at)] = (logits[start:stop, :VOCAB] / 0.7).log_softmax(-1)
            start = stop
    return torch.cat([out[i] for i in range(len(rows))]).float()


def test_a_teacher_held_to_the_reference_is_between_the_two() -> None:
    learner = make()
    learner.hold_reference()
    for _ in range(3):
        learner.learn([TERMS[0]])
    held = {}
    for mix in (0.0, 0.5, 1.0):
        loss = Distill(alpha=0.0, top_k=5, trust_region=mix)
        with scratch(learner):
            held[mix] = learner.learn([replace(DISTILL, loss=loss)])["teacher/loss"]
    assert len(set(held.values())) == 3
    bare = make()
    with pytest.raises(ValueError, match="holds no reference"):
        bare.learn([replace(DISTILL, loss=Distill(trust_region=0.5))])


def test_scratch_takes_every_step_back() -> None:
    """Weights, moments, schedule and count: the next update is the one that would have been."""
    learner, twin = make(), make()
    for warm in (0, 1):  # before the first step there is no optimizer state yet
        before = learner.snapshot()
        with scratch(learner):
            for _ in range(3):
                learner.learn(TERMS)
            moved = learner.snapshot()
        assert not all(torch.equal(a, b) for a, b in zip(before, moved, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(before, learner.snapshot(), strict=True))
        assert learner.learn(TERMS[:1]) == twin.learn(TERMS[:1]), warm
    assert all(torch.equal(a, b) for a, b in zip(learner.snapshot(), twin.snapshot(), strict=True))
    assert learner.num_updates == twin.num_updates == 2


def test_scratch_takes_back_what_ended_in_an_error() -> None:
    learner = make()
    before = learner.snapshot()
    with pytest.raises(RuntimeError, match="probe"), scratch(learner):
        learner.learn(TERMS[:1])
        raise RuntimeError("probe")
    assert all(torch.equal(a, b) for a, b in zip(before, learner.snapshot(), strict=True))


def targets(rows: list[TrainSequence]) -> list[np.ndarray]:
    """0.9 after an even token, 0.2 after an odd one."""
    out = []
    for row in rows:
        seen = np.concatenate([[0], row.ids[:-1]]) % 2
        out.append(np.where(row.mask, np.where(seen, 0.2, 0.9), 0.0).astype(np.float32))
    return out


@pytest.mark.parametrize("bounded", [True, False])
def test_a_value_head_learns_what_the_state_shows(bounded: bool) -> None:
    learner = make()
    head = ValueHead(learner, ValueHeadConfig(lr=0.05, steps=400))
    rows = batch([20] * 8, 5)
    before = head.read(rows, bounded=bounded)
    assert {float(v) for r, row in zip(before, rows, strict=True) for v in r[row.mask]} == {
        0.5 if bounded else 0.0
    }
    weights = learner.snapshot()
    log = head.fit(rows, targets(rows), bounded=bounded)
    assert log["target"] == pytest.approx(
        np.mean([t[r.mask].mean() for t, r in zip(targets(rows), rows, strict=True)]), rel=1e-5
    )
    after = head.read(rows, bounded=bounded)
    told = np.concatenate([v[r.mask] for v, r in zip(after, rows, strict=True)])
    truth = np.concatenate([t[r.mask] for t, r in zip(targets(rows), rows, strict=True)])
    error = float(np.square(told - truth).mean())
    # What any head can do at best: least squares on the same states.
    batches, states = learner.target_states(rows)
    order = [int(at) for batch in batches for at in batch.indices]
    wanted = np.concatenate([targets(rows)[at][rows[at].mask] for at in order])
    inputs = np.column_stack([torch.cat(states).float().numpy(), np.ones(len(wanted))])
    found, *_ = np.linalg.lstsq(inputs, wanted, rcond=None)
    best = float(np.square(inputs @ found - wanted).mean())
    assert best < 0.6 * truth.var()
    assert error < (1.3 if bounded else 1.02) * best
    assert all(np.all(v[~r.mask] == 0) for v, r in zip(after, rows, strict=True))
    # The trunk gets no gradient from it.
    assert all(torch.equal(a, b) for a, b in zip(weights, learner.snapshot(), strict=True))


def test_looking_ahead_moves_nothing_and_goes_towards_the_targets() -> None:
    head = ValueHead(make(), ValueHeadConfig(lr=0.01, ahead_steps=20))
    rows = batch([20] * 4, 5)
    head.fit(rows, targets(rows), bounded=True)
    before, kept = head.read(rows, bounded=True), head.state()
    later = head.ahead(rows, targets(rows), bounded=True)
    assert head.state() == kept
    again = head.read(rows, bounded=True)
    assert all(np.array_equal(a, b) for a, b in zip(before, again, strict=True))

    def miss(values: list[np.ndarray]) -> float:
        parts = zip(values, targets(rows), rows, strict=True)
        return float(np.mean([np.square(v - t)[r.mask].mean() for v, t, r in parts]))

    assert miss(later) < miss(before)
    assert head.ahead([], [], bounded=True) == []


def test_a_head_goes_on_from_its_saved_state() -> None:
    import json

    learner, rows = make(), batch([20] * 4, 5)
    one, two = (ValueHead(learner, ValueHeadConfig()) for _ in range(2))
    two.restore(json.loads(json.dumps(one.state())))  # before any step
    one.fit(rows, targets(rows), bounded=True)
    two.restore(json.loads(json.dumps(one.state())))
    for head in (one, two):
        head.fit(rows, targets(rows), bounded=True)
    assert one.state() == two.state()
    wide = {"weight": [0.0] * 3}
    with pytest.raises(ValueError, match="has 2 inputs, expected 32"):
        two.restore(wide)


def in_layout(parallel: ParallelConfig) -> dict[str, Any]:
    """Two updates on every kind of term, and a value head's read, fit and look ahead."""
    learner = make(parallel)
    learner.hold_reference()
    held = replace(DISTILL, loss=replace(DISTILL.loss, trust_region=0.25))
    logs = [learner.learn(TERMS), learner.learn([*TERMS[:4], held])]
    head = ValueHead(learner, ValueHeadConfig(lr=0.05, steps=3))
    fit = head.fit(ROWS, targets(ROWS), bounded=True)
    later = head.ahead(ROWS, targets(ROWS), bounded=True)
    with scratch(learner):
        learner.learn(TERMS)
    again = learner.learn(TERMS[:1])
    read = [v.tolist() for v in (*head.read(ROWS, bounded=False), *later)]
    return {"logs": logs, "fit": fit, "read": read, "again": again}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, ParallelConfig()),
        (2, ParallelConfig(tp=2)),
        (2, ParallelConfig(tp=2, sequence_parallel=True)),
        (2, ParallelConfig(pp=2)),
    ],
    ids=["dp", "tp", "sp", "pp"],
)
def test_no_layout_shows(world: int, parallel: ParallelConfig) -> None:
    alone = run_ranks(1, in_layout, ParallelConfig())[0]
    for found in run_ranks(world, in_layout, parallel):
        for got, want in zip(found["logs"] + [found["again"]], alone["logs"] + [alone["again"]],
                             strict=True):  # fmt: skip
            assert got == pytest.approx(want, rel=2e-4, abs=2e-5)
        assert found["fit"] == pytest.approx(alone["fit"], rel=1e-4)
        for got, want in zip(found["read"], alone["read"], strict=True):
            # Adam divides by the gradient's own size: rounding grows where that is next to nothing.
            assert got == pytest.approx(want, abs=5e-4)
