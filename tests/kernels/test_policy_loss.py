"""policy_loss of the kernels against algo.losses in float64: sum, gradients, statistics.

The truth is run in float64, so that parity is with the formula and not with float32 rounding.
Counts are exact; sums agree to 2e-6 a token.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_binac.algo import losses
from megatron_binac.algo.losses import PolicyLossConfig
from megatron_binac.kernels import histogram_quantile, policy_loss

INPUTS = ("ref_logprob_T", "engine_logprob_T", "entropy_T", "weight_T")


def make_batch(num_tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Tokens of every kind: masked ones hold poison, some engine log-probs are missing."""
    logprob = -torch.rand(num_tokens) * 3
    batch = {
        "logprob_T": logprob,
        "old_logprob_T": logprob + 0.4 * torch.randn(num_tokens),
        "advantage_T": torch.randn(num_tokens),
        "ref_logprob_T": logprob + 0.5 * torch.randn(num_tokens),
        "engine_logprob_T": logprob + 0.4 * torch.randn(num_tokens),
        "entropy_T": torch.rand(num_tokens),
        "weight_T": torch.rand(num_tokens),
    }
    mask = torch.rand(num_tokens) < 0.7
    for value in batch.values():
        value[~mask] = torch.nan
    batch["advantage_T"][mask & (torch.rand(num_tokens) < 0.1)] = 0.0
    batch["engine_logprob_T"][torch.rand(num_tokens) < 0.05] = -torch.inf
    batch["mask_T"] = mask
    return {name: value.to(device) for name, value in batch.items()}


def run(
    loss_function: Any,
    batch: dict[str, Tensor],
    cfg: PolicyLossConfig,
    dtype: torch.dtype,
    **more: Any,
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor]]:
    batch = {
        name: value.detach().clone().to(dtype) if value.is_floating_point() else value
        for name, value in batch.items()
    }
    logprob = batch.pop("logprob_T").requires_grad_()
    entropy = batch.get("entropy_T")
    if entropy is not None:
        entropy.requires_grad_()
    loss, stats = loss_function(
        logprob,
        batch.pop("old_logprob_T"),
        batch.pop("advantage_T"),
        batch.pop("mask_T"),
        cfg,
        **batch,
        **more,
    )
    (3.0 * loss).backward()
    return loss.detach(), logprob.grad, None if entropy is None else entropy.grad, stats


def assert_same(
    batch: dict[str, Tensor], cfg: PolicyLossConfig, num_tokens: int, **more: Any
) -> dict[str, Tensor]:
    loss, grad, grad_entropy, stats = run(policy_loss, batch, cfg, torch.float32, **more)
    cpu = {name: value.cpu() for name, value in batch.items()}
    more = {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in more.items()
    }
    more.pop("diagnostics", None)
    want, want_grad, want_entropy, want_stats = run(
        losses.policy_loss, cpu, cfg, torch.float64, **more
    )
    scale = 1.0 + num_tokens
    assert abs(loss.item() - want.item()) <= 2e-6 * scale
    torch.testing.assert_close(grad.cpu().double(), want_grad, rtol=3e-6, atol=1e-6)
    if want_entropy is None:
        assert grad_entropy is None or not grad_entropy.any()
    else:
        torch.testing.assert_close(grad_entropy.cpu().double(), want_entropy, rtol=1e-6, atol=1e-7)
    assert set(want_stats) <= set(stats)
    for name, value in want_stats.items():
        if name.startswith("num_") or name.endswith("_count"):
            assert stats[name].item() == value.item(), name
            assert not stats[name].is_floating_point(), name
        elif name.endswith("_max"):
            assert stats[name].item() == pytest.approx(value.item(), rel=2e-6), name
        else:
            assert abs(stats[name].item() - value.item()) <= 2e-6 * scale, name
    return stats


CONFIGS = {
    "ppo": PolicyLossConfig(kl_coef=0.0),
    "grpo": PolicyLossConfig(kl_coef=1e-1, kl_estimator="k3"),
    "dapo": PolicyLossConfig(kl_coef=0.0, clip_low=0.2, clip_high=0.28),
    "dual": PolicyLossConfig(kl_coef=0.0, dual_clip=1.3),
    "gspo": PolicyLossConfig(kl_coef=0.0, ratio="sequence", clip_low=3e-2, clip_high=4e-2),
    "reinforce": PolicyLossConfig(kl_coef=0.0, ratio="none"),
    "k2": PolicyLossConfig(kl_coef=0.5, kl_estimator="k2"),
    "k1_score": PolicyLossConfig(kl_coef=0.5, kl_estimator="k1_score", ratio="none"),
    "truncated": PolicyLossConfig(kl_coef=0.1, engine_is_cap=1.2, entropy_coef=0.01),
    "all": PolicyLossConfig(
        ratio="sequence", kl_coef=0.3, engine_is_cap=1.5, entropy_coef=0.2, dual_clip=1.1
    ),
}


@pytest.mark.parametrize("num_tokens", [1, 63, 1000])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_loss_gradient_and_statistics(name: str, num_tokens: int, device: torch.device) -> None:
    cfg = CONFIGS[name]
    batch = make_batch(num_tokens, device)
    more: dict[str, Any] = {}
    if cfg.ratio == "sequence":
        # With an empty sequence, one of one token, and one longer than a block.
        bounds = [0, 0, 1, num_tokens // 8 + 1, num_tokens // 8 + 1, num_tokens]
        more["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=device)
    if name in ("ppo", "dapo", "dual", "gspo", "reinforce"):
        batch = {key: value for key, value in batch.items() if key not in INPUTS}
    assert_same(batch, cfg, num_tokens, **more)


def test_statistics_are_given_where_they_are_not_trained(device: torch.device) -> None:
    stats = assert_same(make_batch(200, device), PolicyLossConfig(kl_coef=0.0), 200)
    assert {"kl_sum", "entropy_sum", "mismatch_max", "engine_kl_sum"} <= set(stats)


def test_no_infinity_reaches_a_masked_token(device: torch.device) -> None:
    # trainer -2, engine -91, masked: loss 0, gradient 0.
    logprob = torch.tensor([-2.0, -2.0], device=device, requires_grad=True)
    engine = torch.tensor([-91.0, -torch.inf], device=device)
    loss, stats = policy_loss(
        logprob,
        logprob.detach(),
        torch.tensor([torch.inf, torch.nan], device=device),
        torch.tensor([False, False], device=device),
        PolicyLossConfig(kl_coef=0.0, engine_is_cap=2.0),
        engine_logprob_T=engine,
    )
    loss.backward()
    assert loss.item() == 0.0
    assert logprob.grad.tolist() == [0.0, 0.0]
    assert stats["num_tokens"].item() == 0


def test_a_wild_but_finite_mismatch_is_capped(device: torch.device) -> None:
    logprob = torch.tensor([-2.0], device=device, requires_grad=True)
    loss, stats = policy_loss(
        logprob,
        logprob.detach(),
        torch.tensor([1.0], device=device),
        torch.tensor([True], device=device),
        PolicyLossConfig(kl_coef=0.0, engine_is_cap=2.0),
        engine_logprob_T=torch.tensor([-91.0], device=device),
    )
    loss.backward()
    assert loss.item() == pytest.approx(-2.0, abs=1e-6)
    assert logprob.grad.item() == pytest.approx(-2.0, abs=1e-6)
    assert stats["engine_cap_count"].item() == 1
    assert stats["mismatch_max"].item() == pytest.approx(89.0)


@pytest.mark.parametrize("bad", ["logprob_T", "old_logprob_T", "advantage_T", "ref_logprob_T"])
def test_nan_in_a_trained_token_is_not_lost(bad: str, device: torch.device) -> None:
    batch = make_batch(40, device)
    batch["mask_T"][:] = True
    for name, value in batch.items():
        if value.is_floating_point():
            batch[name] = torch.nan_to_num(value, nan=-1.0, neginf=-1.0)
    batch[bad][7] = torch.nan
    loss, *_ = run(policy_loss, batch, CONFIGS["grpo"], torch.float32)
    assert math.isnan(loss.item())


@pytest.mark.parametrize(
    ("p", "ref", "k1", "k2", "k3"), [(0.5, 0.25, 0.693147, 0.240227, 0.193147)]
)
def test_kl_estimates_pointwise(
    p: float, ref: float, k1: float, k2: float, k3: float, device: torch.device
) -> None:
    logprob = torch.tensor([math.log(p)], device=device)
    _, stats = policy_loss(
        logprob,
        logprob,
        torch.zeros(1, device=device),
        torch.tensor([True], device=device),
        PolicyLossConfig(),
        ref_logprob_T=torch.tensor([math.log(ref)], device=device),
        diagnostics=True,
    )
    got = [stats[f"kl_{name}_sum"].item() for name in ("k1", "k2", "k3")]
    assert got == pytest.approx([k1, k2, k3], abs=1e-6)


@pytest.mark.parametrize("d", [1e-4, -1e-4, 0.03, 0.49, 0.51, -0.49, -0.51, 5.0, -5.0, 30.0, -30.0])
def test_k3_keeps_its_digits_where_terms_cancel(
    d: float, device: torch.device, uses_triton: bool
) -> None:
    ref = torch.tensor([-40.0], device=device)
    logprob = (ref + d).requires_grad_()
    exact = min(max(float(logprob.detach().double() - ref.double()), -20.0), 20.0)
    loss, _ = policy_loss(
        logprob,
        logprob.detach(),
        torch.zeros(1, device=device),
        torch.tensor([True], device=device),
        PolicyLossConfig(kl_coef=1.0),
        ref_logprob_T=ref,
    )
    loss.backward()
    # Autograd of expm1(-d) + d subtracts two numbers near 1; the kernel's d - k3 does not.
    slack = 0.0 if uses_triton else 1e-7
    assert loss.item() == pytest.approx(math.expm1(-exact) + exact, rel=2e-6)
    want = -math.expm1(-exact) if abs(d) < 20 else 0.0
    assert logprob.grad.item() == pytest.approx(want, rel=2e-6, abs=slack)


def test_kl_without_advantage_has_a_gradient(device: torch.device) -> None:
    logprob = torch.tensor([-1.0], device=device, requires_grad=True)
    loss, _ = policy_loss(
        logprob,
        logprob.detach(),
        torch.zeros(1, device=device),
        torch.tensor([True], device=device),
        PolicyLossConfig(kl_coef=0.5),
        ref_logprob_T=torch.tensor([-2.0], device=device),
    )
    loss.backward()
    assert logprob.grad.item() == pytest.approx(0.5 * (1 - math.exp(-1)), rel=1e-6)


def test_histogram_gives_a_quantile(device: torch.device) -> None:
    mismatch = torch.cat([torch.full((990,), 0.01), torch.full((10,), 1.0)]).to(device)
    old = torch.full((1000,), -1.0, device=device)
    _, stats = policy_loss(
        old,
        old,
        torch.zeros(1000, device=device),
        torch.ones(1000, dtype=torch.bool, device=device),
        PolicyLossConfig(kl_coef=0.0),
        engine_logprob_T=old + mismatch,
        diagnostics=True,
    )
    counts = stats["mismatch_histogram"]
    assert counts.sum().item() == 1000
    assert 0.01 <= histogram_quantile(counts, 0.98) <= 0.01 * 2**0.25
    assert 1.0 <= histogram_quantile(counts, 0.995) <= 2**0.25
    twice = losses.merge_stats({"mismatch_histogram": counts}, {"mismatch_histogram": counts})
    assert twice["mismatch_histogram"].sum().item() == 2000


def test_histogram_of_extremes_and_of_nothing() -> None:
    counts = torch.zeros(64, dtype=torch.int32)
    assert histogram_quantile(counts, 0.99) == 0.0
    counts[0], counts[63] = 98, 2
    assert histogram_quantile(counts, 0.5) == 2.0**-12
    assert histogram_quantile(counts, 0.99) == math.inf
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        histogram_quantile(counts, 1.5)


def test_empty_batch_keeps_the_graph(device: torch.device) -> None:
    empty = torch.zeros(0, device=device, requires_grad=True)
    loss, stats = policy_loss(
        empty, empty.detach(), empty.detach(), empty.detach().bool(), PolicyLossConfig(kl_coef=0.0)
    )
    loss.backward()
    assert loss.item() == 0.0 and empty.grad.shape == (0,)
    assert stats["num_tokens"].item() == 0 and stats["ratio_max"].item() == 0.0


def test_bfloat16_inputs_are_computed_in_float32(device: torch.device) -> None:
    batch = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in make_batch(300, device).items()
    }
    cfg = CONFIGS["truncated"]
    loss, grad, _, _ = run(policy_loss, batch, cfg, torch.bfloat16)
    want, want_grad, _, _ = run(losses.policy_loss, batch, cfg, torch.float64)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.double(), want_grad, rtol=2**-7, atol=1e-6)


def test_idle_settings_are_refused(device: torch.device) -> None:
    x = torch.zeros(3, device=device)
    mask = torch.ones(3, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="kl_coef"):
        policy_loss(x, x, x, mask, PolicyLossConfig(kl_coef=0.1))
    with pytest.raises(ValueError, match="cu_seqlens"):
        policy_loss(x, x, x, mask, PolicyLossConfig(kl_coef=0.0, ratio="sequence"))
    with pytest.raises(ValueError, match="shapes"):
        policy_loss(x, x[:2], x, mask, PolicyLossConfig(kl_coef=0.0))
    if device.type == "cpu":
        with pytest.raises(ValueError, match="0 to"):
            policy_loss(
                x, x, x, mask, PolicyLossConfig(kl_coef=0.0, ratio="sequence"),
                cu_seqlens=torch.tensor([0, 2]),
            )  # fmt: skip
