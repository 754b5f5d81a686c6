"""The search: what is refused and why, what fits, what wins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_binac import config as configs
from megatron_binac import recipes
from megatron_binac.config import ParallelConfig
from megatron_binac.planner import hardware, layouts, shapes
from megatron_binac.planner.layouts import Candidate, Job
from megatron_binac.planner.speed import Shares

SETTINGS = [
    "rollout.max_attempt_tokens=2048",
    "rollout.max_feedback_tokens=512",
    "rollout.max_revision_tokens=2048",
    "actor.model.max_sequence_length=8192",
    "critic.model.max_sequence_length=8192",
    "rollout.prompts_per_step=64",
]


def job(model: str = "llama3:8b", gpus: int = 8, gpu: str = "h100-80", *sets: str) -> Job:
    config = configs.override(recipes.get("quickstart"), [*SETTINGS, *sets])
    return Job(
        config=config,
        shapes=dict.fromkeys(("actor", "critic"), shapes.named(model)),
        gpu=hardware.gpu(gpu),
        gpus=gpus,
        prompt_tokens=200,
        mean_share=0.5,
        precision="bf16",
    )


def candidate(engine_gpus: int = 0, engine_tp: int = 1, **parallel: int) -> Candidate:
    both = dict.fromkeys(("actor", "critic"), ParallelConfig(**parallel))  # type: ignore[arg-type]
    return Candidate(
        parallel=both,
        engine_tp=dict.fromkeys(both, engine_tp),
        engine_gpus=engine_gpus,
        micro_batch=4096,
    )


def test_turns_are_those_of_the_recipe() -> None:
    # 64 prompts x 8 attempts; 2 of them criticised by 4 feedbacks; 4 revisions of each.
    plan = job()
    attempt, feedback, revision = (plan.answers(k) for k in ("attempt", "feedback", "revision"))
    assert (attempt.samples, attempt.prompts, attempt.prompt) == (512, 64, 200)
    assert (feedback.samples, feedback.prompts, feedback.prompt) == (512, 128, 200 + 1024)
    assert (revision.samples, revision.prompts) == (2048, 512)
    assert revision.prompt == 200 + 1024 + 256
    assert (attempt.answer, feedback.answer) == (1024, 256)


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        ({"tp": 4, "pp": 4}, "does not divide 8 GPUs"),
        ({"pp": 3}, "does not divide 8 GPUs"),
    ],
)
def test_an_illegal_layout_says_why(parallel: dict[str, int], reason: str) -> None:
    why = layouts.illegal(job(), candidate(**parallel))
    assert why is not None
    assert reason in why


def test_heads_layers_and_nodes_are_checked() -> None:
    wide = job(gpus=64)
    assert "leaves a node" in (layouts.illegal(wide, candidate(tp=16)) or "")
    assert "layers" in (layouts.illegal(job("llama3:3b", 64), candidate(pp=16)) or "")
    assert "key-value heads" in (layouts.illegal(job("qwen2.5:7b", 64), candidate(tp=8)) or "")
    assert layouts.illegal(wide, candidate(tp=2, pp=2)) is None


def test_two_models_of_8b_do_not_fit_one_gpu_each_but_fit_eight() -> None:
    # On one GPU: 2 x 8.03e9 parameters x (2 weights + 4 gradients + 12 optimizer + 2 reference).
    alone = replace(job(gpus=1))
    kinds, room = layouts.bytes_by_kind(alone, candidate())
    assert sum(kinds[k] for k in ("weights", "gradients", "optimizer", "reference")) == (
        pytest.approx(2 * 8.03e9 * 20, rel=0.01)
    )
    assert room < 0
    found = layouts.search(job(gpus=8), Shares())
    assert found.best
    assert found.best[0].memory <= hardware.gpu("h100-80").memory
    assert sum(found.reasons().values()) + len(found.best) == found.tried


def test_each_best_layout_is_smaller_than_the_faster_ones() -> None:
    best = layouts.search(job(gpus=16), Shares()).best
    assert [p.step for p in best] == sorted(p.step for p in best)
    assert [p.needed for p in best] == sorted((p.needed for p in best), reverse=True)


def test_a_layout_that_does_not_fit_says_by_how_much() -> None:
    found = layouts.search(job("llama3:70b", 8), Shares())
    assert not found.best
    memory = [x for x in found.lost if x.kind == "memory"]
    assert memory
    assert "over by" in memory[0].why
    assert "GiB" in memory[0].why


def test_more_memory_never_makes_the_best_slower() -> None:
    small = layouts.search(job(gpus=8), Shares()).best[0]
    large = layouts.search(job(gpus=8, gpu="h200"), Shares()).best[0]
    assert large.step <= small.step


def test_a_probe_every_fourth_step_costs_a_quarter() -> None:
    one, four = (
        layouts.predict(
            job("llama3:8b", 8, "h100-80", f"bilevel.actor_steps_per_critic_step={k}"),
            candidate(tp=8, engine_tp=8),
            Shares(),
            2e10,
        ).seconds
        for k in (1, 4)
    )
    assert four["probe"] == pytest.approx(one["probe"] / 4)
    assert four["lead"] == pytest.approx(one["lead"] / 4)
    assert four["follow"] == one["follow"]
