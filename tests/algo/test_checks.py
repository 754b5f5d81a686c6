"""Wrong tensors are refused by name, by both backends alike, before a number comes of them."""

from __future__ import annotations

import pytest
import torch

from megatron_binac import kernels
from megatron_binac.algo.advantages import gae, mean_centered
from megatron_binac.algo.checks import check_borders, check_kinds
from megatron_binac.algo.losses import PolicyLossConfig, policy_loss


def test_kinds_say_what_to_pass() -> None:
    check_kinds("float", reward=torch.zeros(2))
    with pytest.raises(
        ValueError, match=r"torch\.int64, expected float.*reward\.float\(\)"
    ):
        check_kinds("float", reward=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"valid is torch\.float32, expected bool"):
        check_kinds("bool", valid=torch.ones(2))
    with pytest.raises(ValueError, match=r"group is torch\.bool, expected integer"):
        check_kinds("integer", group=torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("borders", "words"),
    [
        ([0, 4, 2, 5], "falls from 4 to 2 at border 2"),
        ([0, 4], "from 0 to 4; expected 0 to 5"),
        ([1, 5], "from 1 to 5"),
        ([], r"the shape \(0,\)"),
    ],
)
def test_borders_rise_from_zero_to_the_end(borders: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_borders(torch.tensor(borders, dtype=torch.int32), 5)
    check_borders(torch.tensor([0, 3, 3, 5]), 5)


def test_rewards_of_integers_are_not_cut_off() -> None:
    with pytest.raises(ValueError, match=r"reward is torch\.int64"):
        kernels.group_advantage(
            torch.tensor([1, 0, 1]), torch.zeros(3).long(), torch.ones(3).bool(), "mean_centered"
        )


@pytest.mark.parametrize("scan", [gae, kernels.gae])
def test_a_scan_needs_a_value_for_each_reward(scan: object) -> None:
    mask = torch.ones(5, dtype=torch.bool)
    with pytest.raises(ValueError, match="must be flat and of one length"):
        scan(torch.zeros(5), torch.zeros(3), torch.tensor([0, 5]), 1.0, 1.0, mask)  # type: ignore[operator]


@pytest.mark.parametrize("size", [0, -1])
def test_a_tile_has_a_token(size: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_size is {size}, expected 1 token or more"):
        kernels.token_logprob(
            torch.zeros(2, 4), torch.zeros(7, 4), torch.zeros(2).long(), chunk_size=size
        )


def test_a_top_k_above_the_vocabulary_is_all_of_it() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 7)
    whole = kernels.topk_divergence(student, teacher, top_k=7, alpha=0.5)
    assert torch.equal(kernels.topk_divergence(student, teacher, top_k=2**40, alpha=0.5), whole)


def test_the_plain_functions_refuse_integers_as_the_kernels_do() -> None:
    with pytest.raises(ValueError, match=r"reward is torch\.int64"):
        mean_centered(torch.tensor([1, 0, 1]), torch.zeros(3).long(), torch.ones(3).bool())


@pytest.mark.parametrize("scan", [gae, kernels.gae])
@pytest.mark.parametrize(("gamma", "lam"), [(float("nan"), 1.0), (1.0, 2.0), (-0.1, 1.0)])
def test_a_scan_has_its_factors_in_range(scan: object, gamma: float, lam: float) -> None:
    ones = torch.ones(5)
    with pytest.raises(ValueError, match=r"got gamma .*; expected both from 0 to 1"):
        scan(ones, ones, torch.tensor([0, 5]), gamma, lam, ones.bool())  # type: ignore[operator]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    ("value", "borders", "words"),
    [
        ([1.0, 2.0], [0, 2, 4], "from 0 to 4; expected 0 to 5"),
        ([1.0, 2.0], [0, 6, 5], "falls from 6 to 5"),
        ([1.0], [0, 2, 5], r"value has the shape \(1,\), expected \[2\]"),
        ([1, 2], [0, 2, 5], r"value is torch\.int64, expected float"),
    ],
)
def test_what_is_spread_fits_its_borders(
    monkeypatch: pytest.MonkeyPatch, backend: str, value: list, borders: list[int], words: str
) -> None:
    monkeypatch.setattr(kernels, "_uses_triton", lambda tensor: backend == "triton")
    with pytest.raises(ValueError, match=words):
        kernels.spread_to_tokens(
            torch.tensor(value), torch.tensor(borders), torch.ones(5, dtype=torch.bool)
        )


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["clip_low", "clip_high", "dual_clip", "kl_coef", "entropy_coef", "engine_is_cap"]
)
def test_a_coefficient_is_finite(name: str, number: float) -> None:
    with pytest.raises(ValueError, match=name):
        PolicyLossConfig(**{name: number})


def test_log_probs_are_no_integers() -> None:
    zeros, mask = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"advantage is torch\.int64, expected float"):
        policy_loss(zeros, zeros, torch.ones(3).long(), mask, PolicyLossConfig(kl_coef=0.0))
