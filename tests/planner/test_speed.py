"""The time model: limits worked out by hand, and what must grow when something grows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_binac.config import ParallelConfig
from megatron_binac.planner import hardware, shapes, speed
from megatron_binac.planner.shapes import Shape
from megatron_binac.planner.speed import Answers, Layout, Shares

GPU = hardware.Gpu(
    name="toy",
    memory=100,
    flops=1e6,
    hbm=1e4,
    nvlink=1e3,
    network=1e2,
    per_node=2,
    source="made up",
)
FULL = Shares(dense=1.0, experts=1.0, memory=1.0, layer_seconds=0.0, links=1.0, fixed_seconds=0.0)
SHAPE = Shape(num_layers=2, hidden=8, ffn=12, heads=4, kv_heads=2, head_dim=2, vocab=16)


def answers(**changes: float) -> Answers:
    base = {"samples": 4, "prompts": 2, "prompt": 3, "answer": 5, "longest": 5}
    return Answers(**{**base, **changes})  # type: ignore[arg-type]


def layout(gpus: int = 1, **parallel: object) -> Layout:
    return Layout(gpus=gpus, parallel=ParallelConfig(**parallel), engine_tp=1)  # type: ignore


def test_survival_has_the_mean_that_was_asked_for() -> None:
    alive = speed.survival(100.0, 400)
    assert sum(alive) / len(alive) * 400 == pytest.approx(100.0, rel=1e-3)
    assert list(alive) == sorted(alive, reverse=True)
    assert min(speed.survival(400.0, 400)) > 0.99  # all as long as they may be


def test_sampling_is_the_time_to_read_weights_and_cache() -> None:
    # One answer of 48 tokens after a prompt of none: each token reads all weights and its context.
    one = answers(samples=1, prompts=1, prompt=0, answer=48, longest=48)
    found = speed.sampling_seconds(SHAPE, one, GPU, FULL, gpus=1, tp=1, room=1e9)
    # A layer: 2 * 8 * (8 + 4) = 192 and 3 * 8 * 12 = 288; two layers and the head of 128.
    weights = 2 * (192 + 288) + 128
    # Numbers of a token's cache: 2 layers, keys and values, width 4. Context of token i: i + 0.5.
    cache = 16 * 2 * sum(i + 0.5 for i in range(48))
    # The prompt's one scored row is a product of its own: 2 * 16 * 8.
    assert found == pytest.approx((48 * weights * 2 + cache) / 1e4 + 256 / 1e6)


def test_a_layer_floor_is_paid_for_every_token() -> None:
    one = answers(samples=1, prompts=1, prompt=0, answer=48, longest=48)
    slow = replace(FULL, layer_seconds=0.01)
    plain = speed.sampling_seconds(SHAPE, one, GPU, FULL, gpus=1, tp=1, room=1e9)
    floor = speed.sampling_seconds(SHAPE, one, GPU, slow, gpus=1, tp=1, room=1e9)
    assert floor - plain == pytest.approx(48 * 2 * 0.01)


def test_a_small_cache_makes_answers_wait() -> None:
    many = answers(samples=64)
    wide = speed.sampling_seconds(SHAPE, many, GPU, FULL, gpus=1, tp=1, room=1e9)
    narrow = speed.sampling_seconds(SHAPE, many, GPU, FULL, gpus=1, tp=1, room=32 * 8 * 8)
    assert narrow > 2 * wide


def test_experts_are_read_as_they_are_hit() -> None:
    moe = shapes.named("qwen3:30b-a3b")
    one, many = speed.touched_weights(moe, 1), speed.touched_weights(moe, 1e6)
    assert one == pytest.approx(moe.active_parameters, rel=0.01)
    assert many == pytest.approx(moe.num_parameters - moe.vocab * moe.hidden, rel=0.01)


def test_one_gpu_learns_at_its_share_of_the_peak() -> None:
    found = speed.pass_seconds(SHAPE, answers(), GPU, FULL, layout(), forward_only=False)
    # 4 sequences of 8: 32 tokens, 144 pairs, 20 scored.
    forward = 2 * 32 * 2 * 480 + 4 * 144 * 8 * 2 + 2 * 20 * 16 * 8
    assert found.compute == pytest.approx((3 * forward + 2 * 20 * 16 * 8) / 1e6)
    assert found.total == found.compute


def test_stages_pay_a_bubble_and_tensor_ranks_their_collectives() -> None:
    staged = speed.pass_seconds(SHAPE, answers(), GPU, FULL, layout(2, pp=2), forward_only=True)
    assert staged.bubble == pytest.approx(staged.compute)  # one micro-batch on two stages
    split = speed.pass_seconds(SHAPE, answers(), GPU, FULL, layout(2, tp=2), forward_only=True)
    # Two all-reduces a layer of 32 x 8 bf16 numbers, each moved twice times half.
    assert split.tensor == pytest.approx(2 * 2 * 32 * 8 * 2 * 2 * 0.5 / 1e3)


def test_data_ranks_reduce_once_an_update_over_the_slower_link() -> None:
    inside = speed.pass_seconds(SHAPE, answers(), GPU, FULL, layout(2), forward_only=False)
    outside = speed.pass_seconds(
        SHAPE, answers(), GPU, FULL, layout(4), forward_only=False, updates=2
    )
    n = SHAPE.num_parameters
    assert inside.data == pytest.approx(n * 6 * 0.5 / 1e3)
    assert outside.data == pytest.approx(2 * n * 6 * 0.75 / 1e2)


def test_an_overlapped_step_hides_the_shorter_half() -> None:
    parts = {"play": 5.0, "follow": 3.0, "fixed": 1.0}
    assert speed.Phases(seconds=parts).step == 9.0
    assert speed.Phases(seconds=parts, overlapped=True).step == 6.0


def test_a_device_name_finds_its_figures() -> None:
    found = hardware.match("NVIDIA H100 80GB HBM3")
    assert found is not None
    assert found.flops == 9.89e14
    assert hardware.match("GeForce 9000") is None
    with pytest.raises(ValueError, match="h100-80"):
        hardware.gpu("h100")
