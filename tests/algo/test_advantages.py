"""Group advantages and GAE against numbers worked out by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_binac.algo.advantages import (
    gae,
    group_stats,
    leave_one_out,
    mean_centered,
    mean_normalized,
    overlong_penalty,
    running_baseline,
    std_normalized,
    turn_returns,
)

ALL = [mean_centered, leave_one_out, std_normalized, mean_normalized]


def rows(rewards, groups=None, valid=None):
    reward = torch.tensor(rewards, dtype=torch.float32)
    group = torch.tensor(groups if groups is not None else [0] * len(rewards))
    ok = torch.tensor(valid if valid is not None else [True] * len(rewards))
    return reward, group, ok


def test_values_of_one_group_by_hand():
    batch = rows([1.0, 0.0, 0.0, 0.0])  # mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4
    expected = {
        mean_centered: [0.75, -0.25, -0.25, -0.25],
        leave_one_out: [1.0, -1 / 3, -1 / 3, -1 / 3],
        std_normalized: [1.5, -0.5, -0.5, -0.5],
        mean_normalized: [3.0, -1.0, -1.0, -1.0],
    }
    for function, values in expected.items():
        advantage, trainable = function(*batch)
        torch.testing.assert_close(advantage, torch.tensor(values), atol=1e-5, rtol=0)
        assert trainable.all()


def test_nearly_collapsed_group_stays_small_without_std():
    batch = rows([0.35] * 7 + [1.0])
    loo, _ = leave_one_out(*batch)
    assert loo[-1].item() == pytest.approx(0.65, abs=1e-6)
    assert loo[0].item() == pytest.approx(-0.65 / 7, abs=1e-6)
    # The sample std of the whole group bounds any row by (n-1)/sqrt(n).
    assert std_normalized(*batch)[0].abs().max().item() == pytest.approx(7 / 8**0.5, abs=1e-4)


@pytest.mark.parametrize("function", ALL)
def test_group_without_variance_is_exactly_zero_and_not_trainable(function):
    for value in (0.0, 0.1, 0.35, 1.0):
        advantage, trainable = function(*rows([value] * 7))
        assert advantage.tolist() == [0.0] * 7
        assert not trainable.any()


@pytest.mark.parametrize("function", ALL)
def test_rounding_residue_of_means_is_no_variance(function):
    thirds = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)  # 0.30000000000000004, 0.3
    assert thirds[0] != thirds[1]
    advantage, trainable = function(thirds, torch.zeros(3).long(), torch.ones(3).bool())
    assert advantage.tolist() == [0.0] * 3 and not trainable.any()


@pytest.mark.parametrize("function", ALL)
def test_groups_are_keyed_by_id_in_any_order(function):
    # The same prompt text twice is two groups, each of them without variance.
    reward, group, valid = rows([1.0] * 16 + [0.0] * 16, [7] * 16 + [-2] * 16)
    shuffle = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    advantage, trainable = function(reward[shuffle], group[shuffle], valid)
    assert advantage.abs().max() == 0.0 and not trainable.any()
    merged, _ = function(reward, torch.zeros_like(group), valid)
    assert merged.abs().min() > 0.0  # what keying by the text would have given


@pytest.mark.parametrize("function", ALL)
def test_interleaved_groups_equal_separate_ones(function):
    generator = torch.Generator().manual_seed(1)
    reward = torch.rand(12, generator=generator)
    group = torch.tensor([5, -1, 9] * 4)
    advantage, _ = function(reward, group, torch.ones(12).bool())
    for key in (5, -1, 9):
        pick = group == key
        alone, _ = function(reward[pick], torch.zeros(4).long(), torch.ones(4).bool())
        torch.testing.assert_close(advantage[pick], alone)


def test_failed_row_leaves_the_statistics():
    for failed_value in (0.0, 1.0, float("nan"), float("inf")):
        batch = rows([1.0, 0.0, failed_value], valid=[True, True, False])
        advantage, trainable = mean_centered(*batch)
        assert advantage.tolist() == [0.5, -0.5, 0.0]
        assert trainable.tolist() == [True, True, False]
        assert leave_one_out(*batch)[0].tolist() == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("function", ALL)
def test_group_of_one_is_zero_also_after_a_failure(function):
    advantage, trainable = function(*rows([1.0, 0.0, 1.0], [0, 1, 1], [True, True, False]))
    assert advantage.tolist() == [0.0] * 3 and not trainable.any()


def test_invariances():
    generator = torch.Generator().manual_seed(2)
    reward = torch.rand(20, generator=generator, dtype=torch.float64)
    group = torch.randint(0, 4, (20,), generator=generator)
    valid = torch.rand(20, generator=generator) < 0.8
    order = torch.randperm(20, generator=generator)
    for function in ALL:
        base, _ = function(reward, group, valid)
        permuted, _ = function(reward[order], group[order], valid[order])
        torch.testing.assert_close(permuted, base[order])
        relabelled, _ = function(reward, 1000 - 3 * group, valid)
        torch.testing.assert_close(relabelled, base)
    for function in (mean_centered, leave_one_out, std_normalized):
        shifted, _ = function(reward + 5.0, group, valid)
        torch.testing.assert_close(shifted, function(reward, group, valid)[0])
    doubled, _ = mean_normalized(2.0 * reward, group, valid)
    torch.testing.assert_close(doubled, mean_normalized(reward, group, valid)[0])
    for function in ALL:  # every group sums to zero over its valid rows
        advantage, _ = function(reward, group, valid)
        for key in range(4):
            assert advantage[group == key].sum().abs() < 1e-12


def test_two_pass_variance_survives_a_large_offset():
    reward = torch.tensor([1e8, 1e8 + 400.0], dtype=torch.float64)  # E r^2 - (E r)^2 loses this
    advantage, _ = std_normalized(reward, torch.zeros(2).long(), torch.ones(2).bool())
    torch.testing.assert_close(
        advantage, torch.tensor([-(0.5**0.5), 0.5**0.5], dtype=torch.float64)
    )


@pytest.mark.parametrize("n", [2, 3, 5])
def test_maxrl_gradient_is_the_truncated_log_pass_rate(n):
    # Bernoulli(p) answers: d log p / dp = 1/p = sum_{k>=0} (1-p)^k. A group of n gives the first
    # n-1 terms of it: (1/K) sum over successes gives n, and the mean in A takes the last one off,
    # because groups without a success are skipped. All 2^n outcomes are enumerated.
    p = 0.3
    score = (-1 / (1 - p), 1 / p)  # d log pi(outcome) / dp
    total = 0.0
    for outcome in itertools.product((0, 1), repeat=n):
        chance = p ** sum(outcome) * (1 - p) ** (n - sum(outcome))
        advantage, _ = mean_normalized(*rows([float(bit) for bit in outcome]))
        each = [a * score[bit] for a, bit in zip(advantage.tolist(), outcome, strict=True)]
        total += chance * sum(each) / n
    assert total == pytest.approx(sum((1 - p) ** k for k in range(n - 1)), abs=1e-6)


def test_negative_reward_is_refused_where_the_mean_divides():
    with pytest.raises(ValueError, match="below 0"):
        mean_normalized(*rows([-1.0, 1.0]))


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        mean_centered(*rows([float("nan"), 1.0]))
    with pytest.raises(ValueError, match=r"torch\.bool"):
        mean_centered(torch.ones(2), torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match="flat"):
        mean_centered(torch.ones(2, 2), torch.zeros(2, 2), torch.ones(2, 2).bool())


def test_empty_batch():
    advantage, trainable = mean_centered(torch.zeros(0), torch.zeros(0).long(), torch.zeros(0) > 0)
    assert advantage.numel() == 0 and trainable.numel() == 0


def test_group_stats_by_hand():
    reward, group, valid = rows(
        [1.0, 1.0, 0.0, 1.0, 0.5, 0.0, 0.0],
        [1, 1, 2, 2, 3, 4, 4],
        [True, True, True, True, True, True, False],
    )
    stats = group_stats(reward, group, valid)  # 1 collapsed, 2 with signal, 3 and 4 alone
    assert (stats.num_groups, stats.num_singleton, stats.num_collapsed) == (4, 2, 1)
    assert stats.num_failed == 1


def test_running_baseline_compares_with_the_past_only():
    reward, _, valid = rows([1.0, 0.0, 9.0], valid=[True, True, False])
    advantage, trainable, baseline = running_baseline(reward, valid, 0.2, momentum=0.9)
    torch.testing.assert_close(advantage, torch.tensor([0.8, -0.2, 0.0]))
    assert trainable.tolist() == [True, True, False]
    assert baseline == pytest.approx(0.9 * 0.2 + 0.1 * 0.5)
    none_valid = torch.zeros(3).bool()
    assert running_baseline(reward, none_valid, 0.2)[2] == 0.2


def test_turn_returns():
    first, second = turn_returns(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(first, torch.tensor([0.1, 1.1]))
    assert second.tolist() == [1.0, 1.0]


def test_overlong_penalty_is_a_ramp():
    penalty = overlong_penalty(torch.tensor([50, 80, 90, 100, 120]), max_length=100, buffer=20)
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(torch.tensor([1]), max_length=10, buffer=0)


def test_gae_by_hand():
    reward = torch.tensor([0.0, 1.0, 2.0])
    value = torch.tensor([0.5, 0.25, 1.0])
    gamma, lam = 0.9, 0.8
    delta = [0.9 * 0.25 - 0.5, 1.0 + 0.9 * 1.0 - 0.25, 2.0 - 1.0]
    last = delta[2]
    middle = delta[1] + gamma * lam * last
    first = delta[0] + gamma * lam * middle
    advantage, returns = gae(reward, value, torch.tensor([0, 3]), gamma, lam, torch.ones(3).bool())
    torch.testing.assert_close(advantage, torch.tensor([first, middle, last]))
    torch.testing.assert_close(returns, advantage + value)


def test_gae_limits():
    generator = torch.Generator().manual_seed(3)
    reward, value = torch.rand(6, generator=generator), torch.rand(6, generator=generator)
    borders, mask = torch.tensor([0, 4, 6]), torch.ones(6).bool()
    monte_carlo, _ = gae(reward, value, borders, 1.0, 1.0, mask)  # sum of rewards to go - value
    to_go = torch.cat([reward[:4].flip(0).cumsum(0).flip(0), reward[4:].flip(0).cumsum(0).flip(0)])
    torch.testing.assert_close(monte_carlo, to_go - value)
    one_step, _ = gae(reward, value, borders, 0.9, 0.0, mask)
    following = torch.tensor([*value[1:4], 0.0, value[5], 0.0])
    torch.testing.assert_close(one_step, reward + 0.9 * following - value)


def test_gae_carries_over_masked_tokens_and_reads_nothing_there():
    mask = torch.tensor([False, True, False, False, True, False, True])
    nan = float("nan")
    reward = torch.tensor([nan, 0.5, nan, nan, 1.0, nan, 2.0])
    value = torch.tensor([nan, 0.1, nan, nan, 0.2, nan, 0.3])
    borders = torch.tensor([0, 6, 7])
    advantage, returns = gae(reward, value, borders, 0.9, 0.8, mask)
    dense, _ = gae(
        torch.tensor([0.5, 1.0, 2.0]),
        torch.tensor([0.1, 0.2, 0.3]),
        torch.tensor([0, 2, 3]),
        0.9,
        0.8,
        torch.ones(3).bool(),
    )
    torch.testing.assert_close(advantage[mask], dense)
    assert advantage[~mask].tolist() == [0.0] * 4 and returns[~mask].tolist() == [0.0] * 4
    narrow, _ = gae(reward, value, borders.int(), 0.9, 0.8, mask)  # what packing hands over
    assert torch.equal(narrow, advantage)


def test_gae_with_nothing_to_train_and_with_wrong_borders():
    zeros = torch.zeros(3)
    advantage, returns = gae(zeros, zeros, torch.tensor([0, 3]), 1.0, 1.0, zeros > 0)
    assert advantage.tolist() == [0.0] * 3 and returns.tolist() == [0.0] * 3
    with pytest.raises(ValueError, match="cu_seqlens"):
        gae(zeros, zeros, torch.tensor([0, 2]), 1.0, 1.0, zeros > 0)
