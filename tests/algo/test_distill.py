"""Distillation and span terms: values, gradients and signs by hand."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_binac.algo.advantages import gae, mean_centered
from megatron_binac.algo.distill import (
    SdpoConfig,
    align_spans,
    contrast_advantage,
    contrast_loss,
    critique_grpo_loss,
    linear_ramp,
    rltf_sd_advantage,
    rltf_sd_loss,
    sdpo_loss,
    span_rewards,
    topk_divergence,
    trust_region_logprob,
)

INF = float("inf")


def test_linear_ramp():
    assert [linear_ramp(step, 4, 0.1) for step in (0, 2, 4, 9)] == [0.0, 0.05, 0.1, 0.1]
    assert linear_ramp(1, 2, 0.0, start=1.0) == 0.5
    with pytest.raises(ValueError, match="num_steps"):
        linear_ramp(0, 0, 0.1)


def test_rltf_sd_baseline_is_the_first_turn():
    # Prompt 3: attempts 1/4 right, revisions all right. Among themselves revisions have no signal.
    advantage, trainable = rltf_sd_advantage(
        torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]),
        torch.tensor([3, 3, 8, 8, 5]),
        torch.tensor([True, False, True, True, True]),
        torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0, float("nan"), 1.0]),
        torch.tensor([3, 3, 3, 3, 8, 8, 8, 6]),
        torch.tensor([True] * 6 + [False, True]),
    )
    # prompt 8: the failed attempt is out, baseline 0; prompt 5 has no attempt to compare with
    assert advantage.tolist() == [0.75, 0.0, 0.0, 1.0, 0.0]
    assert trainable.tolist() == [True, False, False, True, False]


def test_rltf_sd_loss_has_no_ratio_and_a_floor():
    logprob = torch.tensor([-1.0, -6.0, -2.0, -INF], requires_grad=True)
    mask = torch.tensor([True, True, True, False])
    loss, stats = rltf_sd_loss(logprob, torch.tensor([0.5, 0.5, -1.0, INF]), mask)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 - 2.0)
    assert logprob.grad.tolist() == [-0.5, 0.0, 1.0, 0.0]
    assert stats["sd_floor_count"] == 1 and stats["num_tokens"] == 3


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_divergences_on_two_ids_and_a_tail(alpha):
    student, teacher = (0.5, 0.3, 0.2), (0.6, 0.1, 0.3)  # the last of each is the tail
    value = topk_divergence(
        torch.tensor([student[:2]], dtype=torch.float64).log(),
        torch.tensor([teacher[:2]], dtype=torch.float64).log(),
        alpha,
    )
    if alpha == 0.0:
        expected = kl(teacher, student)
    elif alpha == 1.0:
        expected = kl(student, teacher)
    else:
        mixture = [(1 - alpha) * s + alpha * t for s, t in zip(student, teacher, strict=True)]
        expected = alpha * kl(teacher, mixture) + (1 - alpha) * kl(student, mixture)
    assert value.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_divergence_gradients_through_logits(alpha):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 8, generator=generator, dtype=torch.float64).log_softmax(-1)
    top = logits.detach().topk(3, dim=-1).indices

    def loss(x):
        student = torch.log_softmax(x, dim=-1)
        return topk_divergence(student.gather(-1, top), teacher.gather(-1, top), alpha).sum()

    assert torch.autograd.gradcheck(loss, (logits,), eps=1e-6, atol=1e-6)


def test_forward_divergence_on_the_whole_vocabulary_is_p_minus_q():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(1, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    topk_divergence(logits.log_softmax(-1), teacher, 0.0).sum().backward()
    torch.testing.assert_close(
        logits.grad, logits.detach().softmax(-1) - teacher.exp(), atol=1e-6, rtol=0
    )


def test_divergence_is_zero_at_the_teacher_and_finite_at_the_edges():
    same = torch.tensor([[0.7, 0.2]]).log()
    for alpha in (0.0, 0.5, 1.0):
        assert topk_divergence(same, same, alpha).item() == pytest.approx(0.0, abs=1e-7)
        student = torch.tensor([[0.0, -INF]], requires_grad=True)  # all mass on one id
        value = topk_divergence(student, torch.tensor([[-INF, 0.0]]), alpha)
        value.sum().backward()
        assert torch.isfinite(value).all() and torch.isfinite(student.grad).all()


def test_sdpo_loss_masks_weighs_and_clips():
    student = torch.tensor([[0.5, 0.3], [0.5, 0.3], [float("nan"), INF]]).log().requires_grad_()
    teacher = torch.tensor([[0.6, 0.1], [0.6, 0.1], [float("nan"), 0.0]]).log()
    mask = torch.tensor([True, True, False])
    cfg = SdpoConfig(alpha=0.0, ratio_clip=2.0)
    old = torch.tensor([-1.0 - math.log(1.5), -1.0 - math.log(4.0), -INF])
    loss, stats = sdpo_loss(
        student, teacher, mask, cfg, logprob_T=torch.full((3,), -1.0), old_logprob_T=old
    )
    loss.backward()
    one = kl((0.6, 0.1, 0.3), (0.5, 0.3, 0.2))
    assert loss.item() == pytest.approx((1.5 + 2.0) * one, rel=1e-5)
    assert stats["divergence_sum"].item() == pytest.approx(2 * one, rel=1e-5)
    assert stats["distill_clip_count"] == 1
    assert torch.isfinite(student.grad).all() and student.grad[2].abs().max() == 0
    free, _ = sdpo_loss(student, teacher, mask, SdpoConfig(alpha=0.0, ratio_clip=None))
    assert free.item() == pytest.approx(2 * one, rel=1e-5)
    with pytest.raises(ValueError, match="ratio_clip"):
        sdpo_loss(student, teacher, mask, cfg)
    with pytest.raises(ValueError, match="alpha"):
        SdpoConfig(alpha=1.5)
    with pytest.raises(ValueError, match="ratio_clip"):
        SdpoConfig(ratio_clip=0.0)


def test_teacher_gets_no_gradient():
    student = torch.tensor([[0.5, 0.3]]).log().requires_grad_()
    teacher = torch.tensor([[0.6, 0.1]]).log().requires_grad_()
    for alpha in (0.0, 0.5, 1.0):
        loss, _ = sdpo_loss(
            student, teacher, torch.ones(1).bool(), SdpoConfig(alpha=alpha, ratio_clip=None)
        )
        (gradient,) = torch.autograd.grad(loss, teacher, allow_unused=True)
        assert gradient is None


def test_trust_region_teacher_is_a_geometric_mean():
    teacher, anchor = torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.2, 0.8]]).log()
    middle = trust_region_logprob(teacher, anchor, 0.5)
    torch.testing.assert_close(middle.exp(), torch.tensor([[0.5, 0.5]]))
    torch.testing.assert_close(trust_region_logprob(teacher, anchor, 0.0), teacher)
    with pytest.raises(ValueError, match="mix"):
        trust_region_logprob(teacher, anchor, -0.1)


def test_critique_grpo_shaping_value_gradient_and_peak():
    probs = torch.tensor([0.9, 0.1, 0.001], dtype=torch.float64)
    logprob = probs.log().requires_grad_()
    loss, stats = critique_grpo_loss(logprob, torch.ones(3), torch.ones(3).bool())
    loss.backward()
    torch.testing.assert_close(-loss.detach(), (probs / (probs + 0.1)).sum())
    torch.testing.assert_close(-logprob.grad, 0.1 * probs / (probs + 0.1) ** 2)
    assert logprob.grad.abs().argmax() == 1  # p = gamma
    assert stats["shaping_sum"].item() == pytest.approx(-loss.item())
    masked = torch.tensor([-1.0, -INF], requires_grad=True)
    loss, _ = critique_grpo_loss(masked, torch.tensor([1.0, INF]), torch.tensor([True, False]))
    loss.backward()
    assert torch.isfinite(loss) and masked.grad[1] == 0


def test_critique_grpo_union_baseline():
    # Seven attempts, all wrong, and one right revision in one group: 7/8 and -1/8, no std.
    reward = torch.tensor([0.0] * 7 + [1.0])
    advantage, _ = mean_centered(reward, torch.zeros(8).long(), torch.ones(8).bool())
    assert advantage.tolist() == [-0.125] * 7 + [0.875]


def test_contrast_by_hand_and_its_gradient_as_an_advantage():
    solved = torch.tensor([-10.0, -4.0, float("nan")], requires_grad=True)
    failed = torch.tensor([-6.0, -4.0, 0.0], requires_grad=True)
    valid = torch.tensor([True, True, False])
    loss, stats = contrast_loss(solved, failed, valid, tau=0.5)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(1 + math.exp(2.0)) + math.log(2.0), rel=1e-6)
    expected = contrast_advantage(solved.detach(), failed.detach(), valid, tau=0.5)
    torch.testing.assert_close(solved.grad, -expected)
    torch.testing.assert_close(failed.grad, expected)
    assert expected[0] > expected[1] > 0 == expected[2]  # the worse ordered pair pulls harder
    assert stats["num_pairs"] == 2 and stats["contrast_win_count"] == 0
    margin, _ = contrast_loss(torch.zeros(1), torch.zeros(1), torch.ones(1).bool(), margin=1.0)
    assert margin.item() == pytest.approx(math.log(1 + math.e), rel=1e-6)


ANSWER = "x = 3 + 4 so x = 8"
OFFSETS = [(0, 1), (1, 3), (3, 5), (5, 7), (7, 9), (9, 12), (12, 14), (14, 16), (16, 18), (18, 18)]


def test_spans_land_on_their_tokens():
    found = align_spans(ANSWER, [("3 + 4", 1), ("= 8", -1)], OFFSETS)
    assert found.delta == [0, 0, 1, 1, 1, 0, 0, -1, -1, 0]
    assert (found.num_aligned, found.num_dropped) == (2, 0)


def test_quotes_that_are_not_in_the_answer_are_dropped_and_counted():
    found = align_spans(ANSWER, [("x = 9", -1), ("", 1), ("X = 3", 1), ("so", 1)], OFFSETS)
    assert found.num_dropped == 3 and found.num_aligned == 1
    assert found.delta == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_repeated_and_conflicting_quotes():
    found = align_spans(ANSWER, [("x =", 1), ("= 3", -1)], OFFSETS)
    assert found.num_repeated == 1  # "x =" occurs twice, the first one counts
    assert found.delta == [1, 0, -1, 0, 0, 0, 0, 0, 0, 0]
    assert found.num_conflicts == 1
    with pytest.raises(ValueError, match="sign"):
        align_spans(ANSWER, [("x", 0)], OFFSETS)


def test_tokens_cut_off_by_truncation_take_their_quote_along():
    found = align_spans(ANSWER, [("8", -1)], OFFSETS[:5])
    assert found.num_dropped == 1 and found.delta == [0] * 5


def test_span_rewards_by_hand_and_into_gae():
    delta = torch.tensor([0, 1, -1, 9, 1])
    kl_T = torch.tensor([9.0, 0.5, -0.5, 9.0, 1.0])
    mask = torch.tensor([False, True, True, False, True])
    reward = span_rewards(
        delta, kl_T, mask, torch.tensor([0, 4, 5]), torch.tensor([1.0, 0.0]), kl_coef=0.1
    )
    torch.testing.assert_close(reward, torch.tensor([0.0, 0.95, -1 + 0.05 + 1.0, 0.0, 0.9]))
    advantage, _ = gae(reward, torch.zeros(5), torch.tensor([0, 4, 5]), 1.0, 0.0, mask)
    torch.testing.assert_close(advantage, reward)
    with pytest.raises(ValueError, match="kl_coef"):
        span_rewards(
            delta, None, mask, torch.tensor([0, 4, 5]), torch.tensor([1.0, 0.0]), kl_coef=0.1
        )


def test_span_rewards_without_a_trained_token():
    reward = span_rewards(
        torch.ones(2), None, torch.zeros(2).bool(), torch.tensor([0, 2]), torch.ones(1), kl_coef=0.0
    )
    assert reward.tolist() == [0.0, 0.0]
