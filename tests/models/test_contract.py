"""Distances of engine and learner: counted by hand, summed over parts, said aloud if too large."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch

from megatron_binac.algo.losses import finalize_stats, merge_stats
from megatron_binac.config import EngineConfig, LossConfig, ModelConfig, ParallelConfig, RoleConfig
from megatron_binac.models import contract
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.types import TrainSequence

NAN = float("nan")


def logged(distances: list[float], mask: list[bool] | None = None) -> dict[str, float]:
    engine = torch.tensor(distances)
    mask_T = torch.tensor(mask or [True] * len(distances))
    stats = contract.counts(torch.zeros(len(distances)), engine, mask_T)
    stats["num_tokens"] = mask_T.sum()
    stats["mismatch_max"] = torch.where(engine.isfinite() & mask_T, engine.abs(), 0.0).max()
    return contract.summarize(finalize_stats(stats))


def test_a_histogram_by_hand() -> None:
    # Signs do not count; nan is no engine's token; the masked 0.7 is not looked at.
    values = logged([0.0, 0.002, -0.02, 0.05, 5.0, NAN, 0.7], [True] * 6 + [False])
    share = {k.rsplit("/", 1)[1]: v for k, v in values.items() if "hist/" in k and v}
    want = {"below_1e-07": 1, "below_0.003": 1, "below_0.03": 1, "below_0.1": 1, "above_1": 1}
    assert share == pytest.approx({k: v / 5 for k, v in want.items()})
    assert values["mismatch_p99"] == 5.0
    assert not any("bin" in name for name in values)


def test_the_99th_percentile_is_bounded_by_its_bin_and_by_the_largest() -> None:
    assert logged([0.002] * 99 + [0.9])["mismatch_p99"] == 0.003
    assert logged([0.002] * 98 + [0.9] * 2)["mismatch_p99"] == pytest.approx(0.9)
    assert logged([0.0] * 7)["mismatch_p99"] == 0.0
    assert logged([NAN] * 3)["mismatch_p99"] == 0.0


def test_parts_add_up_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    engine = torch.randn(50, generator=generator).abs() * 0.1
    mask = torch.rand(50, generator=generator) < 0.7
    whole = contract.counts(torch.zeros(50), engine, mask)
    parts = [
        contract.counts(torch.zeros(b - a), engine[a:b], mask[a:b])
        for a, b in ((0, 13), (13, 13), (13, 50))
    ]
    assert merge_stats(*parts) == whole
    assert sum(int(v) for v in whole.values()) == int(mask.sum())


def test_an_alarm_names_the_role_and_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    values = logged([0.002] * 90 + [0.9] * 10)
    with caplog.at_level(logging.WARNING, "megatron_binac"):
        assert contract.alarm("critic", values, 0.3)
        assert not contract.alarm("critic", values, 0.95)
        assert not contract.alarm("critic", values, 0.0)  # off
        assert not contract.alarm("critic", {"loss": 1.0}, 0.3)  # a term without an engine
    (line,) = [r.getMessage() for r in caplog.records]
    assert "critic: " in line
    assert "0.9 nats" in line
    assert "critic.mismatch_alarm 0.3" in line


def test_a_learner_reports_what_its_engine_was_off_by(caplog: pytest.LogCaptureFixture) -> None:
    start_distributed()
    config = RoleConfig(model=ModelConfig(num_layers=1, hidden_size=32, ffn_hidden_size=48))
    groups = build_groups("actor", ParallelConfig(), 1)
    made = MegatronLearner(
        "actor", config, groups, vocab_size=50, seed=1, num_steps=9, temperature=1.0
    )
    rng = np.random.default_rng(1)
    plain = [
        TrainSequence(
            ids=rng.integers(0, 50, 20).astype(np.int32),
            mask=np.arange(20) >= 5,
            advantage=1.0,
            logprobs=np.full(20, np.nan, np.float32),
        )
        for _ in range(4)
    ]
    own = made.logprobs(plain)

    def off_by(distance: float) -> list[TrainSequence]:
        return [
            TrainSequence(
                ids=row.ids,
                mask=row.mask,
                advantage=row.advantage,
                logprobs=np.where(row.mask, logprob - distance, np.nan).astype(np.float32),
            )
            for row, logprob in zip(plain, own, strict=True)
        ]

    frozen = LossConfig(kl_coef=0.0)
    with caplog.at_level(logging.WARNING, "megatron_binac"):
        values = made.update(off_by(0.0), frozen)
        assert values["mismatch_p99"] <= 1e-5
        # Megatron-Core has warnings of its own.
        assert not [r for r in caplog.records if r.name.startswith("megatron_binac")]
        own = made.logprobs(plain)
        values = made.update(off_by(0.5), frozen)
    assert values["mismatch_hist/below_1"] == 1.0
    assert values["mismatch_p99"] == pytest.approx(0.5, abs=1e-5)
    assert values["mismatch_max"] == pytest.approx(0.5, abs=1e-5)
    assert len([r for r in caplog.records if "actor.mismatch_alarm" in r.getMessage()]) == 1


def test_engines_with_numerics_of_their_own_are_weighed_by_default() -> None:
    vllm = EngineConfig(kind="vllm")
    assert RoleConfig().loss.engine_is_cap is None  # samples by the learner's own layers
    assert RoleConfig(engine=vllm).loss.engine_is_cap == 2.0
    own = RoleConfig(engine=vllm, loss=LossConfig(engine_is_cap=1.3))
    assert own.loss.engine_is_cap == 1.3
    off = RoleConfig(engine=EngineConfig(kind="vllm", correct=False))
    assert off.loss.engine_is_cap is None
    assert math.isclose(RoleConfig().mismatch_alarm, 0.3)
