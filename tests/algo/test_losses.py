"""Policy loss, KL estimators and reductions: values, gradients and signs by hand."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_binac.algo.losses import (
    PolicyLossConfig,
    finalize_stats,
    merge_stats,
    nll_loss,
    policy_loss,
    sequence_mean_weights,
)

PLAIN = PolicyLossConfig(kl_coef=0.0)
INF = float("inf")


def leaf(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def fixed(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def all_true(count):
    return torch.ones(count, dtype=torch.bool)


def test_first_step_ratio_is_one_and_gradient_is_the_policy_gradient():
    logprob = leaf([-0.142932, -2.142932, -4.142932])
    advantage = fixed([1.0, -0.5, 0.25])
    loss, stats = policy_loss(logprob, logprob.detach(), advantage, all_true(3), PLAIN)
    loss.backward()
    assert stats["ratio_sum"].item() == 3.0 and stats["ratio_max"].item() == 1.0
    assert loss.item() == pytest.approx(-0.75)
    torch.testing.assert_close(logprob.grad, -advantage)


def test_temperature_belongs_inside_the_softmax():
    logits = fixed([2.0, 1.0, 0.0])
    inside = torch.log_softmax(logits / 0.5, dim=-1)
    torch.testing.assert_close(inside, fixed([-0.142932, -2.142932, -4.142932]), atol=1e-6, rtol=0)
    outside = torch.log_softmax(logits, dim=-1) / 0.5
    assert outside[0].item() == pytest.approx(-0.815212, abs=1e-6)
    # Scoring with one and sampling with the other is not a first-step ratio of one.
    _, stats = policy_loss(inside, outside, torch.zeros(3), all_true(3), PLAIN)
    assert (stats["ratio_sum"] / 3 - 1).abs() > 0.1


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "low", "high"),
    [
        (1.1, 2.0, -2.2, -2.2, 0, 0),  # inside: -A r, gradient -A r
        (1.5, 2.0, -2.4, 0.0, 0, 1),  # good and too likely already: cut at 1.2
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # good and unlikely: not cut
        (1.5, -2.0, 3.0, 3.0, 0, 0),  # poor and likely: not cut
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # poor and unlikely already: cut at 0.8
    ],
)
def test_clip_in_every_quadrant(ratio, advantage, loss, grad, low, high):
    logprob = leaf([-1.0])
    old = fixed([-1.0 - math.log(ratio)])
    value, stats = policy_loss(logprob, old, fixed([advantage]), all_true(1), PLAIN)
    value.backward()
    assert value.item() == pytest.approx(loss)
    assert logprob.grad.item() == pytest.approx(grad)
    assert (stats["clip_low_count"].item(), stats["clip_high_count"].item()) == (low, high)
    assert stats["ratio_max"].item() == pytest.approx(ratio)


def test_clip_higher_moves_only_the_upper_bound():
    cfg = PolicyLossConfig(kl_coef=0.0, clip_low=0.2, clip_high=0.28)
    logprob = leaf([-1.0, -1.0])
    old = fixed([-1.0 - math.log(1.25), -1.0 - math.log(0.75)])
    loss, stats = policy_loss(logprob, old, fixed([1.0, -1.0]), all_true(2), cfg)
    loss.backward()
    assert loss.item() == pytest.approx(-1.25 + 0.8)
    torch.testing.assert_close(logprob.grad, fixed([-1.25, 0.0]))
    assert stats["clip_high_count"] == 0 and stats["clip_low_count"] == 1


def test_dual_clip_bounds_a_poor_token_that_became_likely():
    cfg = PolicyLossConfig(kl_coef=0.0, dual_clip=3.0)
    logprob = leaf([-1.0, -1.0, -1.0])
    old = fixed([-1.0 - math.log(5.0), -1.0 - math.log(2.0), -1.0])
    loss, stats = policy_loss(logprob, old, fixed([-1.0, -1.0, 1.0]), all_true(3), cfg)
    loss.backward()
    assert loss.item() == pytest.approx(3.0 + 2.0 - 1.0)  # a good token is none of its business
    torch.testing.assert_close(logprob.grad, fixed([0.0, 2.0, -1.0]))
    assert stats["dual_clip_count"] == 1


def test_reinforce_has_no_ratio():
    cfg = PolicyLossConfig(kl_coef=0.0, ratio="none")
    logprob = leaf([-1.0, -2.0])
    loss, stats = policy_loss(logprob, fixed([-9.0, -0.1]), fixed([2.0, -1.0]), all_true(2), cfg)
    loss.backward()
    assert loss.item() == pytest.approx(2.0 - 2.0)
    torch.testing.assert_close(logprob.grad, fixed([-2.0, 1.0]))
    assert "clip_low_count" not in stats


def test_sequence_ratio_is_the_geometric_mean_over_trained_tokens():
    cfg = PolicyLossConfig(kl_coef=0.0, ratio="sequence", clip_low=0.9, clip_high=9.0)
    logprob = leaf([-1.0, -1.0, -7.0, -2.0])
    old = fixed([-1.2, -1.4, -1.0, -1.5])
    mask = torch.tensor([True, True, False, True])
    loss, stats = policy_loss(
        logprob,
        old,
        fixed([1.0, 1.0, 1.0, 2.0]),
        mask,
        cfg,
        cu_seqlens=torch.tensor([0, 3, 4], dtype=torch.int32),
    )
    loss.backward()
    first, second = math.exp((0.2 + 0.4) / 2), math.exp(-0.5)
    assert loss.item() == pytest.approx(-(2 * first + 2 * second))
    torch.testing.assert_close(logprob.grad, fixed([-first, -first, 0.0, -2 * second]))
    assert stats["ratio_sum"].item() == pytest.approx(2 * first + second)


def test_sequence_clip_cuts_every_token_of_the_sequence():
    cfg = PolicyLossConfig(kl_coef=0.0, ratio="sequence", clip_low=3e-4, clip_high=4e-4)
    logprob = leaf([-1.0, -1.0])
    loss, stats = policy_loss(
        logprob, fixed([-1.5, -0.9]), fixed([1.0, 1.0]), all_true(2), cfg,
        cu_seqlens=torch.tensor([0, 2]),
    )  # fmt: skip
    loss.backward()
    assert stats["clip_high_count"] == 2  # token ratios are 1.6 and 0.9, the sequence's is 1.2
    assert logprob.grad.tolist() == [0.0, 0.0]
    assert loss.item() == pytest.approx(-2 * 1.0004)


def test_gradients_by_finite_differences():
    generator = torch.Generator().manual_seed(0)
    logprob = (-3.0 * torch.rand(7, generator=generator, dtype=torch.float64)).requires_grad_()
    old = logprob.detach() + 0.3 * torch.randn(7, generator=generator, dtype=torch.float64)
    # Constant inside a sequence: there the token gradient IS the derivative of the sequence loss.
    advantage = fixed([1.0, 1.0, 1.0, -0.7, -0.7, -0.7, -0.7])
    extra = {
        "ref_logprob_T": logprob.detach() + 0.5,
        "engine_logprob_T": old + 0.1,
        "cu_seqlens": torch.tensor([0, 3, 7]),
    }
    entropy = torch.rand(7, generator=generator, dtype=torch.float64, requires_grad=True)
    configs = [
        PolicyLossConfig(kl_coef=0.3, kl_estimator=estimator, ratio=ratio, engine_is_cap=1.05,
                         entropy_coef=0.2)
        for estimator in ("k2", "k3")
        for ratio in ("token", "sequence", "none")
    ]  # fmt: skip
    for cfg in configs:

        def loss(x, h, cfg=cfg):
            return policy_loss(x, old, advantage, all_true(7), cfg, entropy_T=h, **extra)[0]

        assert torch.autograd.gradcheck(loss, (logprob, entropy), eps=1e-6, atol=1e-7)


def test_masked_infinity_gives_zero_loss_and_gradient():
    cfg = PolicyLossConfig(engine_is_cap=2.0, entropy_coef=0.1)
    for engine in (-91.0, -INF, float("nan")):
        logprob = leaf([-2.0, -2.0])
        bad = fixed([-2.0, engine])
        loss, stats = policy_loss(
            logprob, bad, fixed([0.0, INF]), torch.tensor([True, False]), cfg,
            ref_logprob_T=bad, engine_logprob_T=bad, entropy_T=fixed([0.0, engine]),
        )  # fmt: skip
        loss.backward()
        assert loss.item() == 0.0
        assert logprob.grad.tolist() == [0.0, 0.0]
        assert stats["num_tokens"] == 1 and stats["num_dropped"] == 0
        assert stats["mismatch_max"] == 0.0


def test_engine_logprob_that_is_not_finite_drops_the_token_and_is_counted():
    logprob = leaf([-1.0, -1.0, -1.0])
    engine = fixed([-1.0, -INF, float("nan")])
    loss, stats = policy_loss(
        logprob, logprob.detach(), fixed([1.0, 1.0, 1.0]), all_true(3), PLAIN,
        engine_logprob_T=engine,
    )  # fmt: skip
    loss.backward()
    assert logprob.grad.tolist() == [-1.0, 0.0, 0.0]
    assert stats["num_dropped"] == 2 and stats["num_tokens"] == 1


def test_large_ratios_stay_finite():
    logprob = leaf([-1.0, -900.0], dtype=torch.float32)
    old = fixed([-900.0, -1.0], dtype=torch.float32)
    loss, stats = policy_loss(
        logprob, old, fixed([-1.0, 1.0]), all_true(2), PolicyLossConfig(kl_coef=1.0),
        ref_logprob_T=old,
    )  # fmt: skip
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logprob.grad).all()
    assert stats["ratio_max"].item() == pytest.approx(math.exp(20.0), rel=1e-5)


def test_engine_weight_is_truncated_detached_and_measured():
    cfg = PolicyLossConfig(kl_coef=0.0, engine_is_cap=2.0)
    logprob = leaf([-1.0, -1.0])
    engine = fixed([-1.0 - math.log(1.5), -1.0 - math.log(8.0)])  # weights 1.5, and 8 cut to 2
    loss, stats = policy_loss(
        logprob, logprob.detach(), fixed([1.0, 1.0]), all_true(2), cfg, engine_logprob_T=engine
    )
    loss.backward()
    assert loss.item() == pytest.approx(-3.5)
    torch.testing.assert_close(logprob.grad, fixed([-1.5, -2.0]))
    assert stats["engine_cap_count"] == 1
    assert stats["mismatch_sum"].item() == pytest.approx(math.log(1.5) + math.log(8.0))
    assert stats["mismatch_max"].item() == pytest.approx(math.log(8.0))
    k3 = (0.5 - math.log(1.5)) + (7.0 - math.log(8.0))
    assert stats["engine_kl_sum"].item() == pytest.approx(k3)


def test_entropy_bonus_is_of_the_whole_distribution():
    logits = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(logits, dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    cfg = PolicyLossConfig(kl_coef=0.0, entropy_coef=0.1)
    loss, stats = policy_loss(
        logp[:, 0], logp[:, 0].detach(), torch.zeros(1), all_true(1), cfg, entropy_T=entropy
    )
    assert stats["entropy_sum"].item() == pytest.approx(1.386294, abs=1e-6)
    assert loss.item() == pytest.approx(-0.1386294, abs=1e-6)


def test_coefficient_without_input_is_refused():
    x, mask = leaf([-1.0]), all_true(1)
    cases = [
        (PolicyLossConfig(kl_coef=0.1), "kl_coef"),
        (PolicyLossConfig(kl_coef=0.0, engine_is_cap=2.0), "engine_is_cap"),
        (PolicyLossConfig(kl_coef=0.0, entropy_coef=0.1), "entropy_coef"),
        (PolicyLossConfig(kl_coef=0.0, ratio="sequence"), "cu_seqlens"),
    ]
    for cfg, name in cases:
        with pytest.raises(ValueError, match=name):
            policy_loss(x, x.detach(), x.detach(), mask, cfg)


@pytest.mark.parametrize(
    "field",
    [
        {"clip_low": 1.0},
        {"clip_high": 0.0},
        {"dual_clip": 0.9},
        {"dual_clip": 3.0, "ratio": "none"},
        {"kl_estimator": "k1"},
        {"kl_coef": -0.1},
        {"entropy_coef": -0.1},
        {"engine_is_cap": 0.0},
        {"ratio": "word"},
    ],
)
def test_config_out_of_range_is_refused(field):
    with pytest.raises(ValueError, match=r"got .*expected"):
        PolicyLossConfig(**field)


def test_shapes_and_mask_type_are_checked():
    x = leaf([-1.0, -1.0])
    with pytest.raises(ValueError, match="one flat"):
        policy_loss(x, fixed([-1.0]), x.detach(), all_true(2), PLAIN)
    with pytest.raises(ValueError, match=r"torch\.bool"):
        policy_loss(x, x.detach(), x.detach(), torch.ones(2), PLAIN)


@pytest.mark.parametrize("count", [0, 3])
def test_batch_without_signal_keeps_the_graph(count):
    logprob = torch.full((count,), -1.0, requires_grad=True)
    mask = torch.zeros(count, dtype=torch.bool)
    cfg = PolicyLossConfig(engine_is_cap=2.0)
    loss, stats = policy_loss(
        logprob, logprob.detach(), torch.ones(count), mask, cfg,
        ref_logprob_T=logprob.detach(), engine_logprob_T=logprob.detach(),
    )  # fmt: skip
    loss.backward()
    assert loss.item() == 0.0
    assert logprob.grad is not None and logprob.grad.abs().sum() == 0
    assert finalize_stats(stats)["ratio"] == 0.0 and stats["ratio_max"] == 0.0
    nll, _ = nll_loss(torch.full((count,), -1.0, requires_grad=True), mask)
    nll.backward()
    assert nll.item() == 0.0


def random_batch(num_seqs, generator):
    lengths = torch.randint(1, 6, (num_seqs,), generator=generator)
    total = int(lengths.sum())
    draw = torch.randn(5, total, generator=generator, dtype=torch.float64)
    return lengths, {
        "logprob": -draw[0].abs(),
        "old": -draw[0].abs() + 0.3 * draw[1],
        "advantage": draw[2],
        "ref": -draw[0].abs() + 0.2 * draw[3],
        "engine": -draw[0].abs() + 0.3 * draw[1] + 0.05 * draw[4],
        "mask": torch.rand(total, generator=generator) < 0.8,
    }


@pytest.mark.parametrize("ratio", ["token", "sequence", "none"])
@pytest.mark.parametrize("per_micro_batch", [1, 2, 4])
def test_micro_batches_change_nothing(ratio, per_micro_batch):
    cfg = PolicyLossConfig(
        ratio=ratio, kl_coef=0.1, engine_is_cap=1.1,
        dual_clip=None if ratio == "none" else 3.0,
    )  # fmt: skip
    lengths, data = random_batch(8, torch.Generator().manual_seed(4))

    def run(pieces):
        logprob = data["logprob"].clone().requires_grad_()
        num_tokens = data["mask"].sum()
        total, parts = 0.0, []
        starts = [0, *lengths.cumsum(0).tolist()]
        for first, last in pieces:
            cut = slice(starts[first], starts[last])
            borders = torch.tensor(starts[first : last + 1]) - starts[first]
            loss, stats = policy_loss(
                logprob[cut], data["old"][cut], data["advantage"][cut], data["mask"][cut], cfg,
                ref_logprob_T=data["ref"][cut], engine_logprob_T=data["engine"][cut],
                cu_seqlens=borders,
            )  # fmt: skip
            (loss / num_tokens).backward()
            total += loss.item() / num_tokens.item()
            parts.append(stats)
        return total, logprob.grad, finalize_stats(merge_stats(*parts))

    whole = run([(0, 8)])
    split = run([(i, i + per_micro_batch) for i in range(0, 8, per_micro_batch)])
    assert split[0] == pytest.approx(whole[0], abs=1e-12)
    torch.testing.assert_close(split[1], whole[1], atol=1e-12, rtol=0)
    assert split[2] == pytest.approx(whole[2], abs=1e-12)
    assert whole[2]["mismatch_max"] > whole[2]["mismatch"] > 0


def test_mean_over_tokens_is_not_a_mean_of_means():
    rank_a, rank_b = leaf([-1.0] * 4), leaf([-3.0])
    (sum_a, stats_a), (sum_b, stats_b) = (
        nll_loss(x, all_true(x.numel())) for x in (rank_a, rank_b)
    )
    merged = merge_stats(stats_a, stats_b)
    ((sum_a + sum_b) / merged["num_tokens"]).backward()
    assert (sum_a + sum_b).item() / 5 == pytest.approx(1.4)
    assert finalize_stats(merged)["nll"] == pytest.approx(1.4)
    assert rank_a.grad.tolist() == pytest.approx([-0.2] * 4) and rank_b.grad.item() == -0.2


def test_nll_ignores_masked_infinities_and_takes_weights():
    logprob = leaf([-1.0, -INF, -2.0])
    mask = torch.tensor([True, False, True])
    loss, stats = nll_loss(logprob, mask, weight_T=fixed([0.5, INF, 2.0]))
    loss.backward()
    assert loss.item() == pytest.approx(0.5 + 4.0)
    assert logprob.grad.tolist() == [-0.5, 0.0, -2.0]
    assert stats["nll_sum"].item() == 3.0 and stats["num_tokens"] == 2


def test_sequence_mean_weights_turn_a_token_sum_into_a_sum_of_means():
    mask = torch.tensor([True, True, False, True, False])
    borders = torch.tensor([0, 3, 4, 5])  # the last sequence has no trained token
    weight = sequence_mean_weights(mask, borders)
    assert weight.tolist() == [0.5, 0.5, 0.0, 1.0, 0.0]
    logprob = leaf([-1.0, -3.0, -9.0, -5.0, -9.0])
    loss, _ = policy_loss(
        logprob, logprob.detach(), -torch.ones(5), mask,
        PolicyLossConfig(kl_coef=0.0, ratio="none"), weight_T=weight,
    )  # fmt: skip
    assert loss.item() == pytest.approx(-2.0 + -5.0)
    with pytest.raises(ValueError, match="cu_seqlens"):
        sequence_mean_weights(mask, torch.tensor([0, 4]))


def test_low_precision_inputs_are_raised_to_float32():
    logprob = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    loss, _ = policy_loss(logprob, logprob.detach(), torch.ones(2), all_true(2), PLAIN)
    assert loss.dtype == torch.float32 and loss.item() == -2.0


def test_statistics_name_their_reduction():
    one, three = torch.tensor(1.0), torch.tensor(3.0)
    merged = merge_stats({"a_sum": one, "b_max": one}, {"a_sum": three, "b_max": three})
    assert merged["a_sum"] == 4.0 and merged["b_max"] == 3.0
    with pytest.raises(ValueError, match="same names"):
        merge_stats({"a_sum": one}, {"b_sum": one})
    sums = {"num_tokens": torch.tensor(4), "a_sum": one, "b_count": three, "c_max": three}
    assert finalize_stats(sums) == {"num_tokens": 4.0, "a": 0.25, "b_share": 0.75, "c_max": 3.0}
    with pytest.raises(ValueError, match="rename"):
        finalize_stats({"num_tokens": one, "loss": one})
    assert merge_stats() == {}
