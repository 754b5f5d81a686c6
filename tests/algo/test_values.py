"""Value heads: where they are read, what they are trained on, what credit they give."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_binac.algo.advantages import gae
from megatron_binac.algo.losses import finalize_stats
from megatron_binac.algo.values import (
    bce_value_loss,
    clipped_value_loss,
    last_token_index,
    mlmt_attempt_advantage,
    mlmt_revision_advantage,
    mlmt_utility,
)


def test_head_is_read_at_the_last_feedback_token():
    # prompt, feedback, feedback, revision | prompt, feedback | prompt only
    mask = torch.tensor([False, True, True, False, False, True, False])
    index, found = last_token_index(mask, torch.tensor([0, 4, 6, 7], dtype=torch.int32))
    assert index.tolist() == [2, 5, 6] and found.tolist() == [True, True, False]


def test_bce_value_and_gradient_by_hand():
    logit = torch.tensor([0.0, math.log(3.0), 50.0], requires_grad=True)  # values 1/2, 3/4
    target = torch.tensor([1.0, 0.5, float("nan")])
    valid = torch.tensor([True, True, False])
    loss, stats = bce_value_loss(logit, target, valid)
    loss.backward()
    expected = math.log(2.0) - 0.5 * (math.log(0.75) + math.log(0.25))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(logit.grad, torch.tensor([-0.5, 0.25, 0.0]))
    report = finalize_stats(stats, per="num_values")
    assert report["value"] == pytest.approx(0.625) and report["target"] == pytest.approx(0.75)
    assert report["squared_error"] == pytest.approx((0.25 + 0.0625) / 2)


def test_mean_reward_and_single_rewards_give_one_gradient():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0])
    mean_logit = torch.tensor([0.3], requires_grad=True)
    bce_value_loss(mean_logit, rewards.mean()[None], torch.ones(1).bool())[0].backward()
    each_logit = torch.tensor([0.3], requires_grad=True)
    (bce_value_loss(each_logit.expand(5), rewards, torch.ones(5).bool())[0] / 5).backward()
    torch.testing.assert_close(mean_logit.grad, each_logit.grad)


def test_regression_finds_the_mean_reward():
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0])
    logit = torch.zeros(1, requires_grad=True)
    for _ in range(200):
        loss, _ = bce_value_loss(logit.expand(4), rewards, torch.ones(4).bool())
        (gradient,) = torch.autograd.grad(loss / 4, logit)
        logit = (logit - 4.0 * gradient).detach().requires_grad_()
    assert torch.sigmoid(logit).item() == pytest.approx(0.75, abs=1e-4)


def test_targets_outside_the_unit_interval_are_refused():
    logit = torch.zeros(2)
    with pytest.raises(ValueError, match="clipped_value_loss"):
        bce_value_loss(logit, torch.tensor([0.0, 1.5]), torch.ones(2).bool())


def test_no_valid_value_keeps_the_graph():
    logit = torch.zeros(2, requires_grad=True)
    loss, _ = bce_value_loss(logit, torch.ones(2), torch.zeros(2).bool())
    loss.backward()
    assert loss.item() == 0.0 and logit.grad.tolist() == [0.0, 0.0]


def test_clipped_value_loss_by_hand():
    value = torch.tensor([1.0, 1.0, 1.0, 7.0], requires_grad=True)
    old = torch.tensor([0.9, 0.5, 0.5, float("nan")])
    returns = torch.tensor([2.0, 2.0, 0.0, float("nan")])
    mask = torch.tensor([True, True, True, False])
    loss, stats = clipped_value_loss(value, old, returns, mask, clip=0.2)
    loss.backward()
    # near: 1; moved from .5 to .7 at most: (.7 - 2)^2 is worse, no gradient; (.7)^2 < 1, gradient
    assert loss.item() == pytest.approx(0.5 * (1.0 + 1.69 + 1.0), rel=1e-6)
    torch.testing.assert_close(value.grad, torch.tensor([-1.0, 0.0, 1.0, 0.0]))
    assert stats["value_clip_count"] == 1 and stats["num_values"] == 3
    free, _ = clipped_value_loss(value, old, returns, mask, clip=None)
    assert free.item() == pytest.approx(1.5)


def test_values_trained_on_gae_returns_leave_no_advantage():
    # lam = 1: the return is the reward to go, whatever the values are.
    reward, borders = torch.tensor([0.0, 1.0, -0.5]), torch.tensor([0, 3])
    mask = torch.ones(3).bool()
    value = torch.zeros(3)
    for _ in range(100):
        _, returns = gae(reward, value, borders, 1.0, 1.0, mask)
        head = value.clone().requires_grad_()
        loss, _ = clipped_value_loss(head, value, returns, mask, clip=0.2)
        loss.backward()
        value = (head - 0.5 * head.grad).detach()
    torch.testing.assert_close(value, torch.tensor([0.5, 0.5, -0.5]), atol=1e-4, rtol=0)
    advantage, _ = gae(reward, value, borders, 1.0, 1.0, mask)
    assert advantage.abs().max() < 1e-4


def test_mlmt_utility_sign_and_stop_gradient():
    value = torch.tensor([0.5, 0.5], requires_grad=True)
    ahead = torch.tensor([0.8, 0.5], requires_grad=True)
    utility = mlmt_utility(torch.tensor([1.0, 1.0]), value, ahead, lam=0.5)
    torch.testing.assert_close(utility, torch.tensor([0.85, 1.0]))
    assert not utility.requires_grad


def test_mlmt_advantages_by_hand():
    reward = torch.tensor([[[1.0, 0.0], [1.0, float("nan")]]])
    valid = torch.tensor([[[True, True], [True, False]]])
    revision, trainable = mlmt_revision_advantage(reward, valid, torch.tensor([[0.5, 0.25]]))
    assert revision.tolist() == [[[0.5, -0.5], [0.75, 0.0]]] and torch.equal(trainable, valid)
    attempt, usable = mlmt_attempt_advantage(reward, valid, torch.tensor([0.5]))
    assert attempt.item() == pytest.approx(2 / 3 - 0.5) and usable.tolist() == [True]
    failed, usable = mlmt_attempt_advantage(reward, ~torch.ones(1, 2, 2).bool(), torch.ones(1))
    assert failed.tolist() == [0.0] and usable.tolist() == [False]
