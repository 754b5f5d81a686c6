"""KL estimators: value and gradient are two questions, and k1 answers only one of them."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_binac.algo.losses import PolicyLossConfig, kl_estimate, policy_loss


def leaf(values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def fixed(values):
    return torch.tensor(values, dtype=torch.float64)


def test_kl_values_at_a_point():
    p, ref = fixed([math.log(0.5)]), fixed([math.log(0.25)])
    expected = {"k1": 0.693147, "k2": 0.240227, "k3": 0.193147, "k1_score": 0.693147}
    for estimator, value in expected.items():
        assert kl_estimate(p, ref, estimator).item() == pytest.approx(value, abs=1e-6)
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(p, ref, "k4")


def test_kl_gradients_in_expectation():
    ref = fixed([0.75, 0.25]).log()
    exact_logits = leaf([0.0, 0.0])
    logp = torch.log_softmax(exact_logits, dim=-1)
    (logp.exp() * (logp - ref)).sum().backward()
    assert exact_logits.grad[0].item() == pytest.approx(-0.274653, abs=1e-6)
    expected = {"k1": 0.0, "k2": -0.274653, "k3": -0.25, "k1_score": -0.274653}
    for estimator, gradient in expected.items():
        logits = leaf([0.0, 0.0])
        logp = torch.log_softmax(logits, dim=-1)
        # Both outcomes have chance 1/2, which the sampler fixes: no gradient through it.
        (0.5 * kl_estimate(logp, ref, estimator)).sum().backward()
        assert logits.grad[0].item() == pytest.approx(gradient, abs=1e-6)


def test_k3_value_is_unbiased_and_k2_is_not():
    p, ref = fixed([0.9, 0.1]), fixed([0.4, 0.6])
    exact = (p * (p / ref).log()).sum().item()
    for estimator, equal in (("k1", True), ("k3", True), ("k1_score", True), ("k2", False)):
        mean = (p * kl_estimate(p.log(), ref.log(), estimator)).sum().item()
        assert (abs(mean - exact) < 1e-12) == equal


@pytest.mark.parametrize("estimator", ["k2", "k3", "k1_score"])
def test_kl_with_zero_advantage_has_a_gradient_that_points_to_the_reference(estimator):
    cfg = PolicyLossConfig(kl_coef=0.5, kl_estimator=estimator)
    logprob = leaf([-1.0, -1.0])
    ref = fixed([-2.0, -0.5])
    loss, stats = policy_loss(
        logprob, logprob.detach(), torch.zeros(2), torch.ones(2).bool(), cfg, ref_logprob_T=ref
    )
    loss.backward()
    assert logprob.grad[0] > 0 > logprob.grad[1]  # a step down the gradient moves toward ref
    unweighted = kl_estimate(logprob.detach(), ref, estimator).sum()
    assert loss.item() == pytest.approx(0.5 * unweighted.item())
    assert stats["kl_sum"].item() == pytest.approx(unweighted.item())
