"""State that was put away comes back bit by bit, and a run that takes turns is the run without."""

from __future__ import annotations

from typing import Any, Literal

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
from megatron_binac.models.offload import Offload, TakesTurns, account, tensors
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.types import TrainSequence

VOCAB = 50
LOSS = LossConfig(kl_coef=0.01)


def make(
    role: str,
    *,
    distributed: bool = True,
    precision: Literal["fp32", "bf16"] = "fp32",
    parallel: ParallelConfig | None = None,
    train: bool = True,
) -> MegatronLearner:
    config = RoleConfig(
        model=ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=48),
        parallel=parallel or ParallelConfig(),
        optimizer=OptimizerConfig(lr=1e-2, distributed=distributed),
        precision=precision,
        train=train,
    )
    groups = build_groups(role, config.parallel, 1)
    made = MegatronLearner(
        role, config, groups, vocab_size=VOCAB, seed=len(role), num_steps=9, temperature=1.0
    )
    made.hold_reference()
    return made


def rows(number: int) -> list[TrainSequence]:
    rng = np.random.default_rng(number)
    return [
        TrainSequence(
            ids=rng.integers(0, VOCAB, 20).astype(np.int32),
            mask=np.arange(20) >= 5,
            advantage=float(rng.normal()),
            logprobs=np.full(20, -4.0, np.float32),
        )
        for _ in range(6)
    ]


def state(learner: MegatronLearner) -> list[torch.Tensor]:
    held = tensors(learner)
    return [t.clone() for part in ("weights", "optimizer", "reference") for t in held[part]]


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_comes_back_bit_by_bit(
    distributed: bool, precision: Literal["fp32", "bf16"]
) -> None:
    start_distributed()
    learners = {
        role: make(role, distributed=distributed, precision=precision)
        for role in ("actor", "critic")
    }
    for learner in learners.values():
        learner.update(rows(1), LOSS)
    before = {role: state(learner) for role, learner in learners.items()}
    sizes = {role: account(learner) for role, learner in learners.items()}
    offload = Offload(learners)
    for role, learner in learners.items():
        now = offload.on_device(role)
        assert now == {**dict.fromkeys(sizes[role], 0), "weights": sizes[role]["weights"]}
        assert learner.logprobs(rows(2))  # engines sample between two turns
    with offload.training("actor"):
        assert offload.on_device("actor") == sizes["actor"]
        assert not any(offload.on_device("critic").values())
        assert all(not t.untyped_storage().nbytes() for t in tensors(learners["critic"])["weights"])
    with offload.whole():
        for role, learner in learners.items():
            assert offload.on_device(role) == sizes[role]
            for got, want in zip(state(learner), before[role], strict=True):
                assert torch.equal(got, want)
    assert offload.bytes_moved > sum(sizes["actor"].values())


def test_what_a_role_holds_is_counted_once() -> None:
    start_distributed()
    learner = make("actor")
    learner.update(rows(1), LOSS)
    num = sum(p.numel() for p in learner.parameters())
    sizes = account(learner)
    # fp32: 4 bytes a weight, a gradient, two moments, a reference; buffers are padded a little.
    assert 4 * num <= sizes["weights"] < 4 * num + 4096
    assert 4 * num <= sizes["gradients"] < 4 * num + 4096
    assert 8 * num <= sizes["optimizer"] < 8 * num + 8192
    assert sizes["reference"] == 4 * num
    frozen = account(make("critic", train=False))
    assert frozen["gradients"] == frozen["optimizer"] == 0


def taking_turns(parallel: ParallelConfig, *, away: bool) -> list[Any]:
    """Three rounds of both roles; what was logged and where the weights ended."""
    start_distributed()
    learners: dict[str, Any] = {role: make(role, parallel=parallel) for role in ("actor", "critic")}
    runs = dict(learners)
    if away:
        offload = Offload(learners)
        runs = {role: TakesTurns(learner, offload) for role, learner in learners.items()}
    out: list[Any] = []
    for number in range(3):
        for learner in runs.values():
            out.append(learner.update(rows(number), LOSS))
            out.append([x.tolist() for x in learner.logprobs(rows(9))])
            out.append([x.tolist() for x in learner.logprobs(rows(9), reference=True)])
    out.append([[p.sum().item() for p in one.parameters()] for one in learners.values()])
    out.append([one.num_updates for one in runs.values()])
    return out


def in_turn(parallel: ParallelConfig) -> bool:
    return taking_turns(parallel, away=True) == taking_turns(parallel, away=False)


def test_roles_that_take_turns_learn_the_same() -> None:
    assert in_turn(ParallelConfig())


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(pp=2)]
)
def test_roles_on_several_ranks_that_take_turns_learn_the_same(parallel: ParallelConfig) -> None:
    assert run_ranks(2, in_turn, parallel) == [True, True]


class _Engine:
    def __init__(self) -> None:
        self.rests = 0

    def rest(self) -> None:
        self.rests += 1


def test_engines_rest_while_a_role_trains() -> None:
    start_distributed()
    engine, learner = _Engine(), make("actor")
    turns = TakesTurns(learner, Offload({"actor": learner}, [engine]))
    turns.update(rows(1), LOSS)
    turns.learn([])
    assert engine.rests == 2
    assert turns.num_updates == 1
