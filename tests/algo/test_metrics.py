"""Reported numbers against hand counts and independent references."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from megatron_binac.algo.metrics import (
    cluster_bootstrap,
    collapse_share,
    discrimination,
    engine_mismatch,
    learned_gate,
    oracle_gate,
    paired_bootstrap,
    pass_at_k,
    rate,
    reliance,
    turn_metrics,
    uplift,
    wilson_interval,
)

# right-right, right-wrong, wrong-right twice, wrong-wrong, and one that failed
FIRST = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
SECOND = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, float("nan")])
VALID = torch.tensor([True, True, True, True, True, False])


def test_turn_metrics_by_hand():
    result = turn_metrics(FIRST, SECOND, VALID)
    assert result == {
        "acc_t1": 2 / 5, "acc_t2": 3 / 5, "delta": 1 / 5, "d_ic": 2 / 5, "d_ci": 1 / 5,
        "fix": 2 / 3, "break": 1 / 2, "num_pairs": 5.0, "num_wrong": 3.0, "num_right": 2.0,
    }  # fmt: skip
    assert result["delta"] == pytest.approx(result["acc_t2"] - result["acc_t1"])
    assert result["delta"] == pytest.approx(result["d_ic"] - result["d_ci"])


def test_a_share_of_no_case_is_nan_and_not_zero():
    ones = torch.ones(2)
    result = turn_metrics(ones, ones, ones.bool())
    assert math.isnan(result["fix"]) and result["break"] == 0.0
    assert math.isnan(turn_metrics(ones, ones, ~ones.bool())["acc_t1"])


def test_partial_credit_is_not_solved_but_the_threshold_can_say_so():
    first, second = torch.tensor([0.5, 1.0]), torch.tensor([1.0, 1.0])
    assert turn_metrics(first, second, torch.ones(2).bool())["acc_t1"] == 0.5
    assert turn_metrics(first, second, torch.ones(2).bool(), threshold=0.5)["acc_t1"] == 1.0


def test_uplift_in_all_and_by_kind_of_attempt():
    first = torch.tensor([0.0, 0.0, 1.0, 1.0])
    with_feedback = torch.tensor([1.0, 1.0, 1.0, 0.0])
    without = torch.tensor([0.0, 1.0, 1.0, 1.0])
    result = uplift(first, with_feedback, without, torch.ones(4).bool())
    assert result == {"uplift": 0.0, "uplift_wrong": 0.5, "uplift_right": -0.5}
    none_right = uplift(first * 0, with_feedback, without, torch.ones(4).bool())
    assert math.isnan(none_right["uplift_right"])


def test_gates():
    assert oracle_gate(FIRST, SECOND, VALID) == 4 / 5
    perfect = FIRST > 0
    assert learned_gate(perfect, FIRST, SECOND, VALID) == oracle_gate(FIRST, SECOND, VALID)
    everything, nothing = torch.ones(6).bool(), torch.zeros(6).bool()
    assert learned_gate(everything, FIRST, SECOND, VALID) == 2 / 5  # acc_t1
    assert learned_gate(nothing, FIRST, SECOND, VALID) == 3 / 5  # acc_t2
    assert learned_gate(~perfect, FIRST, SECOND, VALID) == 1 / 5  # what a bad verdict costs


def test_discrimination_needs_a_verdict():
    verdict = torch.tensor([1, 0, 1, 0, -1, -1])
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    agree = discrimination(verdict, reward)
    assert agree.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert rate(agree, torch.tensor([True] * 4 + [False] * 2)) == 0.5
    assert math.isnan(rate(agree, torch.zeros(6).bool()))


def test_collapse_share_leaves_groups_of_one_out():
    assert collapse_share(10, 2, 4) == 0.5
    assert math.isnan(collapse_share(3, 3, 0))


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 2), (6, 1, 3), (4, 4, 2), (4, 0, 2)])
def test_pass_at_k_equals_counting_all_subsets(n, c, k):
    hits = [any(i < c for i in subset) for subset in itertools.combinations(range(n), k)]
    assert pass_at_k(n, c, k) == pytest.approx(sum(hits) / len(hits))


def test_pass_at_k_is_unbiased_and_refuses_too_few_samples():
    p, n, k = 0.3, 6, 3
    mean = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert mean == pytest.approx(1 - (1 - p) ** k)
    with pytest.raises(ValueError, match="samples"):
        pass_at_k(4, 1, 5)


def test_wilson_interval_by_published_values():
    # 81 of 263 at 95 %: 0.2553 to 0.3662 (Newcombe 1998, table I, method 3).
    interval = wilson_interval(81, 263)
    assert (interval.low, interval.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20).low == 0.0
    assert wilson_interval(0, 20).high == pytest.approx(0.1611, abs=5e-5)  # same table, 0 of 20
    assert wilson_interval(20, 20).high == pytest.approx(1.0)
    empty = wilson_interval(0, 0)
    assert math.isnan(empty.value) and (empty.low, empty.high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(3, 2)


def test_wilson_interval_covers_on_average():
    n, covered = 40, []
    for p in np.linspace(0.05, 0.95, 181):  # coverage saws up and down with p; its mean is nominal
        total = 0.0
        for c in range(n + 1):
            interval = wilson_interval(c, n, level=0.9)
            if interval.low <= p <= interval.high:
                total += math.comb(n, c) * p**c * (1 - p) ** (n - c)
        covered.append(total)
    assert np.mean(covered) == pytest.approx(0.9, abs=0.01)


def test_bootstrap_repeats_and_has_the_width_of_the_standard_error():
    rng = np.random.default_rng(0)
    values = rng.normal(1.0, 2.0, size=400)
    interval = cluster_bootstrap(values, np.arange(400), seed=3, num_resamples=4000)
    assert interval == cluster_bootstrap(values, np.arange(400), seed=3, num_resamples=4000)
    assert interval != cluster_bootstrap(values, np.arange(400), seed=4, num_resamples=4000)
    half = 1.96 * values.std() / 20
    assert interval.value == pytest.approx(values.mean())
    assert (interval.high - interval.low) / 2 == pytest.approx(half, rel=0.05)


def test_clusters_widen_the_interval_of_repeated_samples():
    rng = np.random.default_rng(1)
    once = rng.random(50)
    prompts = [f"p{i}" for i in range(50)]
    single = cluster_bootstrap(once, prompts, seed=0, num_resamples=2000)
    # Eight identical samples a prompt say nothing new; as independent rows they would.
    clustered = cluster_bootstrap(np.repeat(once, 8), np.repeat(prompts, 8), seed=0,
                                  num_resamples=2000)  # fmt: skip
    naive = cluster_bootstrap(np.repeat(once, 8), np.arange(400), seed=0, num_resamples=2000)
    assert (clustered.low, clustered.high) == pytest.approx((single.low, single.high))
    assert (naive.high - naive.low) < 0.5 * (clustered.high - clustered.low)


def test_pairing_takes_the_difficulty_out():
    rng = np.random.default_rng(2)
    hard = rng.random(200)
    a, b = hard + 0.05, hard
    interval = paired_bootstrap(a, b, np.arange(200), seed=0, num_resamples=500)
    assert interval.low == pytest.approx(0.05) and interval.high == pytest.approx(0.05)
    with pytest.raises(ValueError, match="same cases"):
        paired_bootstrap(a, b[:-1], np.arange(200), seed=0)
    with pytest.raises(ValueError, match="not finite"):
        cluster_bootstrap([float("nan")], [0], seed=0)
    with pytest.raises(ValueError, match="at least one"):
        cluster_bootstrap([], [], seed=0)


def test_engine_mismatch_shows_the_tail_that_a_mean_hides():
    trainer = torch.full((1000,), -1.0)
    engine = trainer.clone()
    engine[:15] -= 2.0
    engine[0] -= 5.0
    engine[-1], engine[-2] = float("-inf"), float("nan")
    mask = torch.ones(1000).bool()
    mask[-1] = False
    result = engine_mismatch(engine, trainer, mask)
    assert result["num_not_finite"] == 1.0
    assert result["mean"] == pytest.approx((14 * 2 + 7) / 998)
    assert result["p99"] == 2.0 and result["max"] == 7.0
    empty = engine_mismatch(engine, trainer, torch.zeros(1000).bool())
    assert math.isnan(empty["max"]) and empty["num_not_finite"] == 0.0


def test_reliance_is_a_log_ratio_of_whole_revisions():
    with_feedback = torch.tensor([-1.0, -1.0, float("-inf"), -0.5])
    without = torch.tensor([-2.0, -1.5, -1.0, -0.5])
    mask = torch.tensor([True, True, False, True])
    assert reliance(with_feedback, without, mask, torch.tensor([0, 3, 4])).tolist() == [1.5, 0.0]


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="one length"):
        turn_metrics(FIRST, SECOND[:-1], VALID)
    with pytest.raises(ValueError, match=r"torch\.bool"):
        oracle_gate(FIRST, SECOND, VALID.float())
