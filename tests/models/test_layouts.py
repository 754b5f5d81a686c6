"""Layouts change nothing: TP, SP, PP, virtual PP, DP, micro-batches, recomputation; fp32, gloo.

Every case is compared with one process and one micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers_ranks import run_ranks

from megatron_binac.config import (
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RoleConfig,
)
from megatron_binac.models import checkpoint
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.rollout.megatron_engine import MegatronEngine
from megatron_binac.types import Sampling, TrainSequence

VOCAB = 50
STOP = 7
TEMPERATURE = 0.7
NUM_STEPS = 3
LOSS = LossConfig(kl_coef=0.1, entropy_coef=0.01)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run the same computation."""

    name: str
    hidden_size: int = 32
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tied_head: bool = False
    capacity: int = 4096
    distributed: bool = True
    """The optimizer's state is sharded over data-parallel ranks; its gradients then are as well."""
    num_micro_batches: int | None = None
    """What the capacity leads to on each replica, as a check of the case itself."""

    @property
    def reference(self) -> str:
        """Name of the case that does the same in one process and one micro-batch."""
        if self.tied_head:
            return tied(PLAIN).name
        return PLAIN.name if self.hidden_size == PLAIN.hidden_size else OTHER.name

    def role(self) -> RoleConfig:
        return RoleConfig(
            model=ModelConfig(
                num_layers=4,
                hidden_size=self.hidden_size,
                ffn_hidden_size=48,
                num_attention_heads=4,
                num_query_groups=2,
                max_sequence_length=48,
                tied_head=self.tied_head,
                init_std=0.15,  # large weights: differences would show
            ),
            parallel=self.parallel,
            # A large eps: else Adam's first step is the sign of the gradient, rounding included.
            optimizer=OptimizerConfig(
                lr=1e-2, eps=1e-2, clip_grad=0.0, distributed=self.distributed
            ),
            max_tokens_per_micro_batch=self.capacity,
        )


def tied(case: Case) -> Case:
    return dataclasses.replace(case, name=f"{case.name}, tied", tied_head=True)


PLAIN = Case(name="plain", num_micro_batches=1)
OTHER = Case(name="other size", hidden_size=48)
RECOMPUTE = ParallelConfig(recompute="full")
TP = ParallelConfig(tp=2)
SP = ParallelConfig(tp=2, sequence_parallel=True)
PP = ParallelConfig(pp=2)
VPP = ParallelConfig(pp=2, vpp=2)

ALONE = [
    Case(name="2 micro-batches", capacity=220, num_micro_batches=2),
    Case(name="4 micro-batches", capacity=110, num_micro_batches=4),
    Case(name="recompute", parallel=RECOMPUTE),
    Case(name="optimizer not distributed", distributed=False),
]
PAIRED = [
    Case(name="dp", num_micro_batches=1),
    Case(name="dp, all gradients everywhere", distributed=False),
    Case(name="dp, 2 micro-batches", capacity=110, num_micro_batches=2),
    Case(name="dp, 4 micro-batches", capacity=55, num_micro_batches=4),
    Case(name="tp", parallel=TP),
    Case(name="tp, 2 micro-batches", parallel=TP, capacity=220, num_micro_batches=2),
    Case(name="sp", parallel=SP),
    Case(name="sp, 4 micro-batches", parallel=SP, capacity=112, num_micro_batches=4),
    Case(name="sp, recompute", parallel=dataclasses.replace(SP, recompute="full")),
    Case(name="pp", parallel=PP),
    Case(name="pp, 4 micro-batches", parallel=PP, capacity=110, num_micro_batches=4),
    Case(name="pp, recompute", parallel=dataclasses.replace(PP, recompute="full")),
    Case(name="vpp", parallel=VPP),
    Case(name="vpp, 4 micro-batches", parallel=VPP, capacity=110, num_micro_batches=4),
    tied(Case(name="dp")),
    tied(Case(name="tp", parallel=TP)),
    tied(Case(name="sp", parallel=SP)),
    tied(Case(name="pp", parallel=PP)),
    tied(Case(name="pp, 2 micro-batches", parallel=PP, capacity=220, num_micro_batches=2)),
    tied(Case(name="vpp", parallel=VPP)),
]
MIXED_ACTOR = Case(name="actor tp beside critic dp", parallel=TP)
MIXED_CRITIC = Case(name="critic dp beside actor tp", hidden_size=OTHER.hidden_size)


def batch() -> list[TrainSequence]:
    """Sequences of odd lengths with 3 tokens of context each, and an engine that was a bit off."""
    rng = np.random.default_rng(0)
    out = []
    for _ in range(17):
        length = int(rng.integers(5, 40))
        mask = np.arange(length) >= 3
        engine = np.where(mask, -4.0 - rng.random(length), np.nan).astype(np.float32)
        out.append(
            TrainSequence(
                ids=rng.integers(0, VOCAB, length).astype(np.int32),
                mask=mask,
                advantage=float(rng.normal()),
                logprobs=engine,
            )
        )
    return out


def rule(start: int, length: int) -> np.ndarray:
    """Ids that a model can learn to continue with confidence: the next is 3 id + 1 from 8 up."""
    ids = [start]
    while len(ids) < length:
        ids.append(8 + (3 * ids[-1] + 1) % (VOCAB - 8))
    return np.asarray(ids, np.int32)


def prompts() -> list[np.ndarray]:
    """Some of them twice, so that prefill shares them."""
    rng = np.random.default_rng(1)
    few = [rule(int(rng.integers(8, VOCAB)), int(rng.integers(1, 9))) for _ in range(9)]
    return few + few[:4]


def lesson() -> list[TrainSequence]:
    rng = np.random.default_rng(2)
    rows = [rule(int(rng.integers(8, VOCAB)), 20) for _ in range(64)]
    return [TrainSequence(ids=ids, mask=np.arange(20) >= 1) for ids in rows]


def _global_name(chunk: torch.nn.Module, name: str) -> str:
    """The name with the layer's number in the whole model; both ends of a tied head share one."""
    parts = name.split(".")
    if "layers" in parts:
        at = parts.index("layers") + 1
        parts[at] = str(chunk.decoder.layers[int(parts[at])].layer_number - 1)
    if chunk.share_embeddings_and_output_weights and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    return ".".join(parts)


def _trained_path(folder: Path, case: Case) -> Path:
    return folder / case.reference


def learner_of(case: Case, role: str = "actor") -> MegatronLearner:
    groups = build_groups(role, case.parallel, 1)
    return MegatronLearner(
        role, case.role(), groups, vocab_size=VOCAB, seed=1, num_steps=10, temperature=TEMPERATURE
    )


def full_gradients(learner: MegatronLearner) -> dict[str, np.ndarray]:
    """Gradients of this rank's stages by global name, put together over the TP ranks."""
    groups, out = learner.groups, {}
    for chunk in learner.chunks:
        for name, param in chunk.named_parameters():
            full = param.main_grad.clone()
            if getattr(param, "tensor_model_parallel", False) and groups.config.tp > 1:
                parts = [torch.empty_like(full) for _ in range(groups.config.tp)]
                dist.all_gather(parts, full.contiguous(), group=groups.collection.tp)
                if "linear_fc1" in name:  # the gate is above the up projection on every rank
                    halves = [part.chunk(2, 0) for part in parts]
                    parts = [gate for gate, _ in halves] + [up for _, up in halves]
                full = torch.cat(parts, param.partition_dim)
            out[_global_name(chunk, name)] = full.numpy().copy()
    return out


Phases = Generator[None, None, dict[str, Any]]


def phases(case: Case, trained: Path, role: str) -> Phases:
    """Log-probs, three updates with the gradients of the first, and what two policies generate.

    Stops between the phases, where another role may have its turn.
    """
    learner = learner_of(case, role)
    out: dict[str, Any] = {"num_micro_batches": len(learner.plan(batch())), "steps": []}
    yield
    out["logprobs"] = np.concatenate(learner.logprobs(batch()))
    out["fresh"] = generated(learner, greedy=False)
    yield
    learner.hold_reference()
    with torch.no_grad():
        for p in learner.parameters():
            p.mul_(1.1)  # a policy that has left its reference, in the same way under every layout
    for number in range(NUM_STEPS):
        yield
        out["steps"].append(learner.update(batch(), LOSS))
        # A distributed optimizer leaves each replica with the sum of its own shard alone.
        if number == 0 and (learner.groups.dp_size == 1 or not case.distributed):
            out["gradients"] = full_gradients(learner)
    yield
    checkpoint.load_learner(_trained_path(trained, case), learner, weights_only=True)
    out["greedy"] = generated(learner, greedy=True)
    yield
    out["sampled"] = generated(learner, greedy=False)
    return out


def by_turns(*running: Phases) -> list[dict[str, Any]]:
    """Drive several roles through their phases, one phase each in turn."""
    out: dict[int, dict[str, Any]] = {}
    while len(out) < len(running):
        for i, role in enumerate(running):
            try:
                next(role)
            except StopIteration as end:
                out[i] = end.value
    return [out[i] for i in range(len(running))]


def generated(learner: MegatronLearner, *, greedy: bool) -> dict[str, Any]:
    """Answers, and how far the learner's own log-probs of them are from the engine's."""
    engine = MegatronEngine(learner, max_sequences=5)
    sampling = Sampling(
        max_tokens=12, stop_id=STOP, temperature=TEMPERATURE, greedy=greedy, continued=True
    )
    asked = prompts()
    told: list[tuple[int, list[int]]] = []
    answers = engine.generate(
        asked, list(range(len(asked))), sampling, lambda i, a: told.append((i, a.ids.tolist()))
    )
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, told)
    # Each answer is told once, on one of the ranks that sampled it.
    assert sorted(pair for part in every for pair in part) == [
        (i, a.ids.tolist()) for i, a in enumerate(answers)
    ]
    # Prompts that go on from there, some of them from what the engine still holds.
    later = [np.concatenate([p, a.ids[:3], p[:2]]) for p, a in zip(asked, answers, strict=True)]
    further = engine.generate(
        later, list(range(len(later))), replace(sampling, max_tokens=6, continued=False)
    )
    asked, answers = [*asked, *later], [*answers, *further]
    rows = [
        TrainSequence(ids=np.concatenate([p, a.ids]), mask=np.arange(len(p) + len(a.ids)) >= len(p))
        for p, a in zip(asked, answers, strict=True)
    ]
    gaps = [
        np.abs(scored[len(p) :] - a.logprobs).max()
        for scored, p, a in zip(learner.logprobs(rows), asked, answers, strict=True)
    ]
    return {"ids": [a.ids.tolist() for a in answers], "gap": float(max(gaps))}


def run_alone(folder: Path) -> dict[str, dict[str, Any]]:
    """One process: teach the models that answer greedily, then measure references and `ALONE`."""
    start_distributed()
    plain = (PLAIN, tied(PLAIN), OTHER)
    for case in plain:
        learner = learner_of(case)
        for _ in range(80):
            stats = learner.supervise(lesson())
        assert stats["nll"] < 0.1, stats
        checkpoint.save_learner(_trained_path(folder, case), learner, with_optimizer=False)
    return {c.name: by_turns(phases(c, folder, "actor"))[0] for c in (*plain, *ALONE)}


def run_paired(folder: Path) -> dict[str, dict[str, Any]]:
    """Two processes: every case of `PAIRED`, and two roles with layouts of their own."""
    start_distributed()
    out = {c.name: by_turns(phases(c, folder, "actor"))[0] for c in PAIRED}
    actor, critic = phases(MIXED_ACTOR, folder, "actor"), phases(MIXED_CRITIC, folder, "critic")
    out[MIXED_ACTOR.name], out[MIXED_CRITIC.name] = by_turns(actor, critic)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    return run_ranks(1, run_alone, folder)[0]


@pytest.fixture(scope="module")
def paired(folder: Path, alone: dict[str, dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, run_paired, folder)


def assert_same(case: Case, got: dict[str, Any], reference: dict[str, dict[str, Any]]) -> None:
    want = reference[case.reference]
    if case.num_micro_batches is not None:
        assert got["num_micro_batches"] == case.num_micro_batches
    np.testing.assert_allclose(got["logprobs"], want["logprobs"], rtol=0, atol=1e-5)
    for step, expected in zip(got["steps"], want["steps"], strict=True):
        assert step.keys() == expected.keys()
        for name in step:
            assert step[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
    for name, gradient in got.get("gradients", {}).items():
        full = want["gradients"][name]
        np.testing.assert_allclose(gradient, full, rtol=0, atol=1e-5 * np.abs(full).max())
    for kind in ("fresh", "greedy", "sampled"):
        assert got[kind]["ids"] == want[kind]["ids"], kind


def assert_sound(got: dict[str, Any]) -> None:
    for step in got["steps"]:
        assert step["ratio"] == pytest.approx(1.0, abs=1e-6)
        assert step["ratio_max"] == pytest.approx(1.0, abs=1e-6)
    for kind in ("fresh", "greedy", "sampled"):
        assert got[kind]["gap"] < 1e-4, kind


@pytest.mark.slow
def test_the_reference_is_worth_comparing_with(alone: dict[str, dict[str, Any]]) -> None:
    for case in (PLAIN, tied(PLAIN), OTHER):
        got = alone[case.name]
        assert_sound(got)
        assert len(got["gradients"]) == (26 if case.tied_head else 27)
        assert all(np.abs(g).max() > 1e-6 for g in got["gradients"].values())
        losses = [step["loss"] for step in got["steps"]]
        assert all(abs(a - b) > 1e-3 for a, b in pairwise(losses))  # the updates do something
        assert got["steps"][0]["kl"] > 0.1
        for prompt, ids in zip(prompts(), got["greedy"]["ids"], strict=False):
            assert ids == rule(prompt[-1], 13).tolist()[1:]
        flat = [i for ids in got["fresh"]["ids"] for i in ids]
        assert len(set(flat)) > 20
        assert max(flat) < VOCAB


@pytest.mark.slow
@pytest.mark.parametrize("case", ALONE, ids=lambda c: c.name)
def test_one_process(case: Case, alone: dict[str, dict[str, Any]]) -> None:
    assert_same(case, alone[case.name], alone)
    assert_sound(alone[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", [*PAIRED, MIXED_ACTOR, MIXED_CRITIC], ids=lambda c: c.name)
def test_two_processes(
    case: Case, alone: dict[str, dict[str, Any]], paired: list[dict[str, dict[str, Any]]]
) -> None:
    first, second = (rank[case.name] for rank in paired)
    for got in (first, second):
        assert_same(case, got, alone)
        assert_sound(got)
    assert first["steps"] == second["steps"]  # what is logged is the same on every rank
    if case.parallel.tp * case.parallel.pp > 1 or not case.distributed:
        names = first["gradients"].keys() | second["gradients"].keys()
        assert names == alone[case.reference]["gradients"].keys()  # every stage was looked at
