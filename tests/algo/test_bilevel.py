"""Credit in the rollout tree: values and signs by hand, invariances, selection weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_binac.algo.bilevel import (
    attempt_credit,
    choose_attempts,
    due,
    exploitability_gap,
    feedback_value,
    leader_credit,
    leader_utility,
    opens_block,
    revision_credit,
)


def yes(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def test_schedule_of_one_critic_step_in_k():
    assert [due(step, 5) for step in range(10)] == [False] * 4 + [True] + [False] * 4 + [True]
    assert all(due(step, 1) and opens_block(step, 1) for step in range(3))
    assert [opens_block(step, 3) for step in range(6)] == [True, False, False] * 2
    assert not any(due(step, 0) for step in range(20))
    with pytest.raises(ValueError, match="k = -1"):
        due(0, -1)
    with pytest.raises(ValueError, match="k = 0"):
        opens_block(0, 0)


def test_feedback_value_is_the_mean_of_valid_revisions():
    reward = torch.tensor([[[1.0, 0.0], [1.0, 9.0], [7.0, 7.0]]])
    valid = torch.tensor([[[True, True], [True, False], [False, False]]])
    value = feedback_value(reward, valid)
    assert value[0, :2].tolist() == [0.5, 1.0]
    assert torch.isnan(value[0, 2])  # no revision is not a wrong revision


def test_a_feedback_without_value_cannot_slip_into_the_credit():
    value = feedback_value(torch.zeros(1, 2, 1), torch.tensor([[[True], [False]]]))
    with pytest.raises(ValueError, match="not finite"):
        leader_credit(value, yes(1, 2))


def test_utility_by_hand():
    value, star = torch.tensor([[0.5, 0.25]]), torch.tensor([[0.75, 0.25]])
    dis, leak = torch.tensor([[1.0, 0.0]]), torch.tensor([[True, False]])
    utility = leader_utility(value, star, 0.1, dis, leak, b_dis=0.2, b_leak=0.5)
    # 1.1 * 0.5 - 0.1 * 0.75 + 0.2 - 0.5, and 1.1 * 0.25 - 0.1 * 0.25
    torch.testing.assert_close(utility, torch.tensor([[0.175, 0.25]]))


def test_a_larger_value_of_the_adapted_actor_lowers_the_credit_for_positive_lam():
    value = torch.tensor([[0.5, 0.5]])
    star = torch.tensor([[0.9, 0.5]])
    for lam, sign in ((0.1, -1), (0.7, -1), (-0.1, 1)):
        credit, trainable = leader_credit(leader_utility(value, star, lam), yes(1, 2))
        assert torch.sign(credit).tolist() == [[sign, -sign]] and trainable.all()
        assert credit[0, 0].item() == pytest.approx(-lam * 0.4, abs=1e-6)


def test_penalty_turns_the_gradient_away_from_feedback_only_a_better_actor_can_use():
    # The actor follows feedback 0 but not yet feedback 1; the adapted one follows both, and then
    # feedback 1 is the better of the two.
    plain, adapted = torch.tensor([[0.6, 0.5]]), torch.tensor([[0.6, 0.9]])
    pushes = []
    for lam in (0.0, 0.1, 0.7):
        credit, _ = leader_credit(leader_utility(plain, adapted, lam), yes(1, 2))
        pushes.append(credit[0, 1].item())
    assert pushes[0] > pushes[1] > pushes[2]
    bold, _ = leader_credit(leader_utility(plain, adapted, -0.7), yes(1, 2))
    assert bold[0, 1] > 0 > pushes[0]


def test_unmoved_actor_and_lam_zero_give_the_plain_value_exactly():
    value = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    for lam in (0.1, 0.3, 0.7):
        assert torch.equal(leader_utility(value, value.clone(), lam), value)
    star = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(leader_utility(value, star, 0.0), value)
    assert torch.equal(leader_utility(value, None, 0.0), value)


def test_attempt_ratio_weighs_the_adapted_value_only():
    value, star = torch.tensor([[0.5, 0.2]]), torch.tensor([[0.6, 0.4]])
    weighed = leader_utility(value, star, 0.5, star_weight=torch.tensor([[2.0]]))
    torch.testing.assert_close(weighed, torch.tensor([[0.75 - 0.6, 0.3 - 0.4]]))


@pytest.mark.parametrize("name", ["lam", "b_dis", "b_leak"])
def test_coefficient_without_input_is_refused(name):
    coefs = {"lam": 0.0, name: 0.1}
    with pytest.raises(ValueError, match=name):
        leader_utility(torch.zeros(1, 2), None, **coefs)


def test_leader_credit_by_hand():
    utility = torch.tensor([[1.0, 0.0, 0.5, 0.0], [0.3, 0.3, 0.3, 0.3]])
    credit, trainable = leader_credit(utility, yes(2, 4))
    torch.testing.assert_close(credit[0], torch.tensor([1 - 0.5 / 3, -0.5, 0.5 - 1 / 3, -0.5]))
    assert credit[1].tolist() == [0.0] * 4
    assert trainable.tolist() == [[True] * 4, [False] * 4]


def test_failed_feedback_leaves_its_siblings_statistics():
    utility = torch.tensor([[1.0, 0.0, float("nan")]])
    valid = torch.tensor([[True, True, False]])
    credit, trainable = leader_credit(utility, valid)
    assert credit.tolist() == [[1.0, -1.0, 0.0]] and trainable.tolist() == valid.tolist()
    alone, none = leader_credit(utility, torch.tensor([[True, False, False]]))
    assert alone.tolist() == [[0.0] * 3] and not none.any()


def test_shuffling_feedback_among_siblings_moves_the_credit_with_it():
    generator = torch.Generator().manual_seed(2)
    reward = (torch.rand(5, 4, 2, generator=generator) < 0.5).float()
    probe = (torch.rand(5, 4, 2, generator=generator) < 0.6).float()

    def credit_of(order):
        value = feedback_value(reward[:, order], yes(5, 4, 2))
        star = feedback_value(probe[:, order], yes(5, 4, 2))
        return leader_credit(leader_utility(value, star, 0.1), yes(5, 4))[0]

    order = torch.tensor([2, 0, 3, 1])
    base = credit_of(torch.arange(4))
    torch.testing.assert_close(credit_of(order), base[:, order])
    assert (credit_of(order) - base).abs().max() > 0.1


def test_credit_of_an_attempt_is_blind_to_other_attempts():
    generator = torch.Generator().manual_seed(3)
    utility = torch.rand(4, 3, generator=generator)
    together, _ = leader_credit(utility, yes(4, 3))
    for row in range(4):
        alone, _ = leader_credit(utility[row : row + 1], yes(1, 3))
        torch.testing.assert_close(together[row], alone[0])
    shifted, _ = leader_credit(utility + torch.rand(4, 1, generator=generator), yes(4, 3))
    torch.testing.assert_close(shifted, together, atol=1e-6, rtol=0)


def test_leader_credit_takes_more_dimensions_and_weights():
    utility = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(4))
    credit, trainable = leader_credit(utility, yes(2, 3, 4))
    flat, _ = leader_credit(utility.view(6, 4), yes(6, 4))
    assert torch.equal(credit.view(6, 4), flat) and trainable.shape == (2, 3, 4)
    weight = torch.tensor([[1.5, 0.5, 1.0], [0.0, 2.0, 1.0]])
    weighed, _ = leader_credit(utility, yes(2, 3, 4), weight)
    assert torch.equal(weighed, credit * weight[..., None])


def test_revision_credit_by_hand():
    reward = torch.tensor([[[1.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    credit, trainable = revision_credit(reward, yes(2, 2, 2), torch.tensor([0.0, 1.0]), yes(2))
    assert credit[0].tolist() == [[0.25, -0.75], [0.25, 0.25]]
    assert credit[1].abs().max() == 0 and trainable.tolist() == [
        [[True] * 2] * 2,
        [[False] * 2] * 2,
    ]


def test_progress_acts_in_a_group_without_variance():
    reward = torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]]])
    attempt = torch.tensor([1.0, 1.0])
    credit, trainable = revision_credit(reward, yes(2, 1, 2), attempt, yes(2), alpha=10.0)
    assert credit.tolist() == [[[-10.0, -10.0]], [[0.0, 0.0]]]
    assert trainable.tolist() == [[[True, True]], [[False, False]]]
    unknown, _ = revision_credit(reward, yes(2, 1, 2), attempt, ~yes(2), alpha=10.0)
    assert unknown.abs().max() == 0  # the attempt's verifier failed: no progress to speak of


def test_failed_revision_leaves_the_statistics():
    reward = torch.tensor([[[1.0, 0.0, float("nan")]]])
    valid = torch.tensor([[[True, True, False]]])
    credit, trainable = revision_credit(reward, valid, torch.zeros(1), yes(1), alpha=1.0)
    assert credit.tolist() == [[[1.5, -0.5, 0.0]]] and torch.equal(trainable, valid)


def attempts(reward, followup, followed, **kwargs):
    count = len(reward)
    return attempt_credit(
        torch.tensor(reward),
        torch.zeros(count).long(),
        kwargs.pop("valid", yes(count)),
        torch.tensor(followup),
        torch.tensor(followed),
        **kwargs,
    )


def test_attempt_credit_by_hand():
    nan = float("nan")
    credit, trainable = attempts(
        [1.0, 0.0, 0.0, 0.0], [nan, 0.8, 0.4, nan], [False, True, True, False]
    )
    # R is centred over four; g * V over the two criticised: 0.1 * (0.8 - 0.6)
    torch.testing.assert_close(credit, torch.tensor([0.75, -0.25 + 0.02, -0.25 - 0.02, -0.25]))
    assert trainable.all()


def test_being_criticised_neither_helps_nor_hurts():
    # High values everywhere: what a pooled mean would hand to the criticised ones as such.
    chosen, _ = attempts([0.0, 0.0, 0.0, 1.0], [0.9, 0.9, 0.0, 0.0], [True, True, False, False])
    torch.testing.assert_close(chosen, torch.tensor([-0.25, -0.25, -0.25, 0.75]))
    lone, _ = attempts([0.0, 0.0, 1.0], [0.9, 0.0, 0.0], [True, False, False])
    torch.testing.assert_close(lone, torch.tensor([-1 / 3, -1 / 3, 2 / 3]))


def test_attempt_that_helps_its_critic_gets_more():
    better, _ = attempts([0.0, 0.0], [0.9, 0.1], [True, True])
    assert better[0] > 0 > better[1]
    off, trainable = attempts([0.0, 0.0], [0.9, 0.1], [True, True], g=0.0)
    assert off.tolist() == [0.0, 0.0] and not trainable.any()
    alone, _ = attempts([1.0, 0.0], [0.9, 0.1], [True, True], w0=0.0, g=1.0)
    torch.testing.assert_close(alone, torch.tensor([0.4, -0.4]))


def test_failed_attempt_leaves_both_terms():
    valid = torch.tensor([True, True, False])
    credit, trainable = attempts(
        [1.0, 0.0, float("nan")], [0.2, 0.4, 9.0], [True, True, True], valid=valid
    )
    torch.testing.assert_close(credit, torch.tensor([0.5 - 0.01, -0.5 + 0.01, 0.0]))
    assert torch.equal(trainable, valid)


def test_attempt_weights_move_the_mean_and_the_credit():
    credit, _ = attempts(
        [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [True, True, True], g=1.0,
        weight_N=torch.tensor([2.0, 1.0, 1.0]),
    )  # fmt: skip
    # Weighted mean 2/4; the one with weight 2 gets 2 * (1 - 1/2).
    torch.testing.assert_close(credit, torch.tensor([1.0, -0.5, -0.5]))
    ones, _ = attempts(
        [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [True, True, True], g=1.0, weight_N=torch.ones(3)
    )
    plain, _ = attempts([0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [True, True, True], g=1.0)
    torch.testing.assert_close(ones, plain)


def test_gap_is_a_sum_and_a_count():
    gap, count = exploitability_gap(
        torch.tensor([[0.5, 0.2, float("nan")]]),
        torch.tensor([[0.7, 0.1, 0.9]]),
        torch.tensor([[True, True, False]]),
    )
    assert gap.item() == pytest.approx(0.1) and count.item() == 2


def test_natural_choice_is_uniform_with_weight_one():
    rng = np.random.default_rng(0)
    counts = np.zeros(6)
    for _ in range(3000):
        chosen, weights = choose_attempts([0, 1, 0, 1, 1, 1], 2, "natural", rng)
        assert len(set(chosen)) == 2 and chosen == sorted(chosen) and weights == [1.0, 1.0]
        counts[chosen] += 1
    assert np.abs(counts / 3000 - 1 / 3).max() < 0.03  # s.e. 0.0086


@pytest.mark.parametrize(
    ("rewards", "num", "share"),
    [
        ([1, 1, 1, 1, 1, 1, 0, 0], 4, 0.75),
        ([1, 1, 1, 1, 1, 1, 1, 0], 4, 0.75),  # fewer wrong ones than places for them
        ([1, 0, 0, 0, 0, 0, 0, 0], 4, 0.75),  # more of them in nature than asked for
        ([1, 1, 0, 0, 0, 0, 0, 0], 7, 0.5),  # fewer right ones than places for them
        ([1, 1, 1, 0], 1, 0.75),
        ([0.5, 1, 1, 0.25], 2, 0.6),
    ],
)
def test_weights_bring_selected_attempts_back_to_the_natural_mix(rewards, num, share):
    rng = np.random.default_rng(1)
    quantity = np.arange(1.0, len(rewards) + 1)  # anything that differs from attempt to attempt
    draws = 8000
    totals, wrong_places = np.zeros(draws), 0
    for draw in range(draws):
        chosen, weights = choose_attempts(rewards, num, "prefer_wrong", rng, wrong_share=share)
        assert len(chosen) == num and chosen == sorted(set(chosen))
        totals[draw] = np.dot(weights, quantity[chosen]) / num
        wrong_places += sum(rewards[i] < 1 for i in chosen)
    error = totals.std() / draws**0.5
    assert abs(totals.mean() - quantity.mean()) < 4 * error + 1e-9
    natural = np.mean(np.array(rewards) < 1)
    assert wrong_places / (draws * num) >= natural - 0.02


def test_prefer_wrong_prefers_wrong_and_keeps_right_ones():
    rng = np.random.default_rng(2)
    chosen, weights = choose_attempts([1, 1, 1, 0, 1, 1, 0, 0], 4, "prefer_wrong", rng)
    assert sum(i in (3, 6, 7) for i in chosen) == 3
    # wrong: natural chance 4/8, actual 3/3; right: 4/8 against 1/5
    assert sorted(weights) == pytest.approx([0.5, 0.5, 0.5, 2.5])


def test_choice_leaves_failed_attempts_out_and_handles_edges():
    rng = np.random.default_rng(3)
    valid = [True, False, True, False]
    for mode in ("natural", "prefer_wrong"):
        for _ in range(20):
            chosen, _ = choose_attempts([0, 0, 1, 1], 4, mode, rng, valid_G=valid)
            assert chosen == [0, 2]
    assert choose_attempts([0, 1], 0, "natural", rng) == ([], [])
    assert choose_attempts([], 3, "prefer_wrong", rng) == ([], [])
    assert choose_attempts([0, 0], 2, "prefer_wrong", rng) == ([0, 1], [1.0, 1.0])
    with pytest.raises(ValueError, match="wrong_share"):
        choose_attempts([0, 1], 1, "prefer_wrong", rng, wrong_share=1.0)
    with pytest.raises(ValueError, match="mode"):
        choose_attempts([0, 1], 1, "wrong_first", rng)


def test_choice_repeats_with_its_seed():
    draws = [
        [choose_attempts([1, 0, 1, 0, 1], 3, "prefer_wrong", rng) for _ in range(5)]
        for rng in (np.random.default_rng(7), np.random.default_rng(7))
    ]
    assert draws[0] == draws[1]
