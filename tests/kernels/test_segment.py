"""Group, tree and scan operations against algo in float64, and by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from megatron_binac.algo import advantages
from megatron_binac.kernels import (
    CreditWeights,
    TreeCredit,
    TreeRewards,
    gae,
    group_advantage,
    spread_to_tokens,
    tree_credit,
)
from megatron_binac.kernels import credit as reference

KINDS = ("mean_centered", "leave_one_out", "std_normalized", "mean_normalized")


@pytest.mark.parametrize("num_rows", [1, 63, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_group_advantage(kind: str, num_rows: int, device: torch.device) -> None:
    reward = torch.rand(num_rows)
    group = torch.randint(-3, max(1, num_rows // 5), (num_rows,)) * 10**12  # ids, not indices
    valid = torch.rand(num_rows) < 0.8
    reward[group == group[0]] = 0.25  # one group without variance
    reward[~valid] = torch.nan
    want, want_trainable = getattr(advantages, kind)(reward.double(), group, valid)
    got, trainable = group_advantage(reward.to(device), group.to(device), valid.to(device), kind)
    torch.testing.assert_close(got.cpu().double(), want, rtol=2e-5, atol=1e-6)
    assert torch.equal(trainable.cpu(), want_trainable)


def group_of(values: list[float], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    reward = torch.tensor(values, device=device)
    return reward, torch.zeros_like(reward, dtype=torch.long), torch.ones_like(reward).bool()


def test_a_residue_of_rounding_is_not_blown_up(device: torch.device) -> None:
    reward, group, valid = group_of([0.35] * 7 + [1.0], device)
    got, _ = group_advantage(reward, group, valid, "leave_one_out")
    assert got[-1].item() == pytest.approx(0.65, abs=1e-6)
    flat, group, valid = group_of([0.1 + 0.2, 0.3, 0.3], device)
    got, trainable = group_advantage(flat, group, valid, "std_normalized")
    assert got.tolist() == [0.0] * 3 and not trainable.any()


def test_groups_are_ids_and_failed_rows_leave(device: torch.device) -> None:
    reward = torch.tensor([1.0] * 16 + [0.0] * 16, device=device)
    group = torch.tensor([7] * 16 + [8] * 16, device=device)
    got, trainable = group_advantage(reward, group, torch.ones_like(group).bool(), "mean_centered")
    assert got.abs().max().item() == 0.0 and not trainable.any()
    reward, group, valid = group_of([1.0, 0.0, 0.0], device)
    valid[2] = False
    got, trainable = group_advantage(reward, group, valid, "mean_centered")
    assert got.tolist() == [0.5, -0.5, 0.0]
    assert trainable.tolist() == [True, True, False]


def test_variance_takes_a_second_pass(device: torch.device) -> None:
    # Around 1000 the one-pass E r^2 - (E r)^2 in float32 has lost the spread of 0.01 altogether.
    reward, group, valid = group_of([1000.0, 1000.01, 1000.02, 1000.03], device)
    got, _ = group_advantage(reward, group, valid, "std_normalized")
    want, _ = advantages.std_normalized(reward.double().cpu(), group.cpu(), valid.cpu())
    torch.testing.assert_close(got.cpu().double(), want, rtol=5e-2, atol=0.0)


def test_group_arguments_are_checked() -> None:
    one = torch.ones(2)
    with pytest.raises(ValueError, match="kind must be one of"):
        group_advantage(one, one.long(), one.bool(), "median")
    with pytest.raises(ValueError, match="one length"):
        group_advantage(one, one[:1].long(), one.bool(), "mean_centered")
    with pytest.raises(ValueError, match="not finite"):
        group_advantage(one * torch.inf, one.long(), one.bool(), "mean_centered")


def make_trees(
    num_prompts: int, G: int, C: int, F: int, M: int, device: torch.device
) -> TreeRewards:
    """Trees with failures on every level, empty slots, and rewards that are often equal."""

    def rewards(*shape: int) -> Tensor:
        return torch.randint(0, 3, shape) / 2

    criticised = torch.stack([torch.randperm(G)[:C] for _ in range(num_prompts)])
    criticised[torch.rand(num_prompts, C) < 0.2] = -1
    trees = {
        "reward_PG": rewards(num_prompts, G),
        "valid_PG": torch.rand(num_prompts, G) < 0.9,
        "criticised_PC": criticised,
        "reward_PCFM": rewards(num_prompts, C, F, M),
        "valid_PCFM": torch.rand(num_prompts, C, F, M) < 0.85,
        "probe_PCFM": rewards(num_prompts, C, F, M),
        "probe_valid_PCFM": torch.rand(num_prompts, C, F, M) < 0.85,
        "feedback_valid_PCF": torch.rand(num_prompts, C, F) < 0.9,
        "weight_PC": 0.5 + torch.rand(num_prompts, C),
        "agrees_PCF": (torch.rand(num_prompts, C, F) < 0.5).float(),
        "leaks_PCF": (torch.rand(num_prompts, C, F) < 0.2).float(),
    }
    trees["reward_PG"][~trees["valid_PG"]] = torch.nan
    trees["reward_PCFM"][~trees["valid_PCFM"]] = torch.nan
    trees["probe_PCFM"][~trees["probe_valid_PCFM"]] = torch.nan
    return TreeRewards(**{name: value.to(device) for name, value in trees.items()})


def truth(trees: TreeRewards, weights: CreditWeights) -> TreeCredit:
    values = {f.name: getattr(trees, f.name) for f in fields(trees)}
    return reference.tree_credit(
        TreeRewards(
            **{
                name: value.cpu().double() if value.is_floating_point() else value.cpu()
                for name, value in values.items()
                if value is not None
            }
        ),
        weights,
    )


def assert_same_credit(got: TreeCredit, want: TreeCredit) -> None:
    for field in fields(want):
        one, other = getattr(got, field.name).cpu(), getattr(want, field.name)
        if other.dtype == torch.bool:
            assert torch.equal(one, other), field.name
        else:
            torch.testing.assert_close(
                one.double(), other, rtol=1e-5, atol=1e-6, msg=lambda m, f=field.name: f"{f}: {m}"
            )


FULL = CreditWeights(
    lam=0.3,
    attempt_weight=0.7,
    attempt_value_weight=0.4,
    improvement_weight=0.25,
    discrimination_coef=0.2,
    leak_coef=0.5,
)


@pytest.mark.parametrize(
    ("num_prompts", "G", "C", "F", "M"), [(1, 1, 1, 1, 1), (9, 8, 4, 4, 2), (5, 5, 3, 3, 3)]
)
@pytest.mark.parametrize("weights", [FULL, CreditWeights()], ids=["all terms", "default"])
def test_tree_credit(
    weights: CreditWeights, num_prompts: int, G: int, C: int, F: int, M: int, device: torch.device
) -> None:
    trees = make_trees(num_prompts, G, C, F, M, device)
    assert_same_credit(tree_credit(trees, weights), truth(trees, weights))


def test_tree_credit_without_the_optional_tensors(device: torch.device) -> None:
    trees = make_trees(6, 4, 2, 3, 2, device)
    bare = TreeRewards(
        reward_PG=trees.reward_PG,
        valid_PG=trees.valid_PG,
        criticised_PC=trees.criticised_PC,
        reward_PCFM=trees.reward_PCFM,
        valid_PCFM=trees.valid_PCFM,
    )
    weights = CreditWeights(lam=0.0, attempt_value_weight=0.0)
    assert_same_credit(tree_credit(bare, weights), truth(bare, weights))


def test_tree_credit_by_hand(device: torch.device) -> None:
    # One attempt of two is criticised, twice, with two revisions each: V = 1, 0.5; V* = 1, 1.
    trees = TreeRewards(
        reward_PG=torch.tensor([[1.0, 0.0]], device=device),
        valid_PG=torch.ones((1, 2), dtype=torch.bool, device=device),
        criticised_PC=torch.tensor([[1]], device=device),
        reward_PCFM=torch.tensor([[[[1.0, 1.0], [1.0, 0.0]]]], device=device),
        valid_PCFM=torch.ones((1, 1, 2, 2), dtype=torch.bool, device=device),
        probe_PCFM=torch.ones((1, 1, 2, 2), device=device),
        probe_valid_PCFM=torch.ones((1, 1, 2, 2), dtype=torch.bool, device=device),
    )
    got = tree_credit(trees, CreditWeights(lam=0.1))
    assert got.value_PCF.tolist() == [[[1.0, 0.5]]]
    assert got.star_value_PCF.tolist() == [[[1.0, 1.0]]]
    # U = 1.1 V - 0.1 V* = 1.0, 0.45, and each against the other.
    assert got.feedback_PCF[0, 0].tolist() == pytest.approx([0.55, -0.55], abs=1e-6)
    assert got.revision_PCFM[0, 0].flatten().tolist() == [0.25, 0.25, 0.25, -0.75]
    # One follow-up has nothing to be compared with: the reward's term alone.
    assert got.attempt_PG.tolist() == [[0.5, -0.5]]
    # A better adapted actor lowers a feedback's credit.
    worse = replace(trees, probe_PCFM=torch.tensor([[[[0.0, 1.0], [1.0, 1.0]]]], device=device))
    assert tree_credit(worse, CreditWeights(lam=0.1)).feedback_PCF[0, 0, 1].item() < -0.55


def test_tree_arguments_are_checked(device: torch.device) -> None:
    trees = make_trees(2, 3, 2, 2, 2, device)
    with pytest.raises(ValueError, match=r"lam is 0\.1"):
        tree_credit(replace(trees, probe_PCFM=None, probe_valid_PCFM=None), CreditWeights(lam=0.1))
    with pytest.raises(ValueError, match="go together"):
        tree_credit(replace(trees, probe_valid_PCFM=None), CreditWeights())
    with pytest.raises(ValueError, match=r"weight_PC must be \[2, 2\]"):
        replace(trees, weight_PC=torch.ones(2, 3))


def test_spread_to_tokens(device: torch.device) -> None:
    value = torch.tensor([0.5, -2.0, 7.0], device=device)
    bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=device)
    mask = torch.tensor([False, True, True, False, True], device=device)
    assert spread_to_tokens(value, bounds, mask).tolist() == [0.0, 0.5, 7.0, 0.0, 7.0]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
@pytest.mark.parametrize(
    "lengths", [[1], [63], [0, 5, 0, 1, 40], [1500, 300]], ids=["1", "63", "empty", "blocks"]
)
def test_gae(lengths: list[int], gamma: float, lam: float, device: torch.device) -> None:
    num_tokens = sum(lengths)
    reward, value = torch.randn(2, num_tokens)
    mask = torch.rand(num_tokens) < 0.6
    reward[~mask], value[~mask] = torch.nan, torch.inf
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    want, want_return = advantages.gae(reward.double(), value.double(), bounds, gamma, lam, mask)
    got, got_return = gae(
        reward.to(device), value.to(device), bounds.to(device), gamma, lam, mask.to(device)
    )
    scale = 1e-6 * (1 + want.abs().max().item())
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=scale)
    torch.testing.assert_close(got_return.cpu().double(), want_return, rtol=1e-5, atol=scale)


def test_gae_by_hand(device: torch.device) -> None:
    # Two trained tokens with a masked one between: A1 = 1 - 0.5, A0 = 0.5 * 0.5 - 0.2 + 0.25 A1.
    reward = torch.tensor([0.0, 9.0, 1.0], device=device)
    value = torch.tensor([0.2, 9.0, 0.5], device=device)
    mask = torch.tensor([True, False, True], device=device)
    bounds = torch.tensor([0, 3], device=device)
    got, returns = gae(reward, value, bounds, 0.5, 0.5, mask)
    assert got.tolist() == pytest.approx([0.25 - 0.2 + 0.125, 0.0, 0.5])
    assert returns.tolist() == pytest.approx([0.375, 0.0, 1.0])
    if device.type == "cpu":
        with pytest.raises(ValueError, match="number of tokens"):
            gae(reward, value, torch.tensor([0, 2]), 0.5, 0.5, mask)
