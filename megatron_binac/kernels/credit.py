"""Credit over whole batches of rollout trees: what goes in, what comes out, and the torch twin.

Shapes: P prompts, G attempts of each, C slots for criticised attempts, F feedbacks of each, M
revisions of each feedback, S packed sequences, T packed tokens, N rows of a flat batch. Trees that
are smaller have invalid entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_binac.algo import advantages, bilevel


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeRewards:
    """Graded trees as tensors.

    Example: one prompt, two attempts, the second criticised once: ``reward_PG`` [[1, 0]],
    ``criticised_PC`` [[1]], ``reward_PCFM`` [[[[1, 0]]]].
    """

    reward_PG: Tensor
    valid_PG: Tensor
    criticised_PC: Tensor
    """Index of the attempt that slot c speaks about; -1 where the slot is empty."""
    reward_PCFM: Tensor
    valid_PCFM: Tensor
    probe_PCFM: Tensor | None = None
    """Rewards of the adapted actor's answers to the same feedback; needed where lam is not 0."""
    probe_valid_PCFM: Tensor | None = None
    feedback_valid_PCF: Tensor | None = None
    """False where the critic's turn itself failed."""
    weight_PC: Tensor | None = None
    """Weight of a criticised attempt back to the natural mix."""
    agrees_PCF: Tensor | None = None
    """1 where the critic's verdict is right."""
    leaks_PCF: Tensor | None = None
    """1 where the feedback gives the answer away."""

    def __post_init__(self) -> None:
        P, C, F, M = self.reward_PCFM.shape
        G = self.reward_PG.shape[1]
        wanted = {
            "reward_PG": (P, G),
            "valid_PG": (P, G),
            "criticised_PC": (P, C),
            "valid_PCFM": (P, C, F, M),
            "probe_PCFM": (P, C, F, M),
            "probe_valid_PCFM": (P, C, F, M),
            "feedback_valid_PCF": (P, C, F),
            "weight_PC": (P, C),
            "agrees_PCF": (P, C, F),
            "leaks_PCF": (P, C, F),
        }
        for name, shape in wanted.items():
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise ValueError(
                    f"{name} must be {list(shape)} by the shapes of reward_PG and reward_PCFM, "
                    f"got {list(value.shape)}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditWeights:
    """Coefficients of the credit, named as in ``algo.bilevel``.

    Example: ``CreditWeights(lam=0.1)``
    """

    lam: float = 0.1
    """Weight of the penalty V* - V."""
    attempt_weight: float = 1.0
    attempt_value_weight: float = 0.1
    improvement_weight: float = 0.0
    discrimination_coef: float = 0.0
    leak_coef: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeCredit:
    """Credit of every turn; 0, not trainable where it failed or has nothing to compare with."""

    attempt_PG: Tensor
    attempt_trainable_PG: Tensor
    feedback_PCF: Tensor
    feedback_trainable_PCF: Tensor
    revision_PCFM: Tensor
    revision_trainable_PCFM: Tensor
    value_PCF: Tensor
    """V; 0 where no revision is valid."""
    star_value_PCF: Tensor
    """V*; 0 where no probe is valid."""


def check_coefficients(trees: TreeRewards, weights: CreditWeights) -> None:
    """Raises ValueError where a coefficient has nothing to act on."""
    for name, coefficient, tensor in (
        ("lam", weights.lam, trees.probe_PCFM),
        ("discrimination_coef", weights.discrimination_coef, trees.agrees_PCF),
        ("leak_coef", weights.leak_coef, trees.leaks_PCF),
    ):
        if coefficient != 0.0 and tensor is None:
            raise ValueError(
                f"{name} is {coefficient} but the trees hold no tensor for it to weigh: "
                f"pass it, or set {name}=0"
            )
    if (trees.probe_PCFM is None) != (trees.probe_valid_PCFM is None):
        raise ValueError("probe_PCFM and probe_valid_PCFM go together, got only one of them")


def tree_credit(trees: TreeRewards, weights: CreditWeights) -> TreeCredit:
    """The functions of ``algo.bilevel``, put together as the training loop does."""
    P, G = trees.reward_PG.shape
    dtype = trees.reward_PCFM.dtype
    used_PC = trees.criticised_PC >= 0
    valid_PCFM = trees.valid_PCFM & used_PC[:, :, None, None]
    value_PCF = bilevel.feedback_value(trees.reward_PCFM.double(), valid_PCFM)
    has_PCF = valid_PCFM.any(-1)
    weight_PC = torch.ones_like(used_PC, dtype=torch.float64)
    if trees.weight_PC is not None:
        weight_PC = torch.where(used_PC, trees.weight_PC.double(), 1.0)

    ok_PCF = has_PCF
    if trees.feedback_valid_PCF is not None:
        ok_PCF = ok_PCF & trees.feedback_valid_PCF
    star_PCF = None
    if trees.probe_PCFM is not None and trees.probe_valid_PCFM is not None:
        probe_valid_PCFM = trees.probe_valid_PCFM & used_PC[:, :, None, None]
        star_PCF = bilevel.feedback_value(trees.probe_PCFM.double(), probe_valid_PCFM)
        if weights.lam != 0.0:
            ok_PCF = ok_PCF & probe_valid_PCFM.any(-1)
    utility_PCF = bilevel.leader_utility(
        value_PCF,
        star_PCF,
        weights.lam,
        None if trees.agrees_PCF is None else trees.agrees_PCF.double(),
        None if trees.leaks_PCF is None else trees.leaks_PCF.double(),
        weights.discrimination_coef,
        weights.leak_coef,
    )
    feedback_PCF, feedback_trainable_PCF = bilevel.leader_credit(utility_PCF, ok_PCF, weight_PC)

    at_PC = trees.criticised_PC.clamp(min=0).long()
    revision_PCFM, revision_trainable_PCFM = bilevel.revision_credit(
        trees.reward_PCFM.double(),
        valid_PCFM,
        trees.reward_PG.double().gather(1, at_PC),
        trees.valid_PG.gather(1, at_PC) & used_PC,
        weights.improvement_weight,
    )

    sum_PC = torch.where(has_PCF, value_PCF, 0.0).sum(-1)
    mean_PC = sum_PC / has_PCF.sum(-1).clamp(min=1)
    followup_PG = torch.zeros((P, G), dtype=torch.float64, device=at_PC.device)
    followed_PG = torch.zeros((P, G), dtype=torch.bool, device=at_PC.device)
    weight_PG = torch.ones_like(followup_PG)
    p_N, c_N = used_PC.nonzero(as_tuple=True)
    g_N = at_PC[p_N, c_N]
    followup_PG[p_N, g_N] = mean_PC[p_N, c_N]
    followed_PG[p_N, g_N] = has_PCF.any(-1)[p_N, c_N]
    weight_PG[p_N, g_N] = weight_PC[p_N, c_N]
    attempt_N, attempt_trainable_N = bilevel.attempt_credit(
        trees.reward_PG.double().flatten(),
        torch.arange(P, device=at_PC.device).repeat_interleave(G),
        trees.valid_PG.flatten(),
        followup_PG.flatten(),
        followed_PG.flatten(),
        w0=weights.attempt_weight,
        g=weights.attempt_value_weight,
        weight_N=weight_PG.flatten(),
    )
    return TreeCredit(
        attempt_PG=attempt_N.view(P, G).to(dtype),
        attempt_trainable_PG=attempt_trainable_N.view(P, G),
        feedback_PCF=feedback_PCF.to(dtype),
        feedback_trainable_PCF=feedback_trainable_PCF,
        revision_PCFM=(revision_PCFM * weight_PC[:, :, None, None]).to(dtype),
        revision_trainable_PCFM=revision_trainable_PCFM,
        value_PCF=torch.nan_to_num(value_PCF).to(dtype),
        star_value_PCF=(
            torch.zeros_like(value_PCF) if star_PCF is None else torch.nan_to_num(star_PCF)
        ).to(dtype),
    )


def group_advantage(
    reward_N: Tensor, group_N: Tensor, valid_N: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    """The function of ``algo.advantages`` of that name."""
    return getattr(advantages, kind)(reward_N, group_N, valid_N)


def spread_to_tokens(value_S: Tensor, cu_seqlens: Tensor, mask_T: Tensor) -> Tensor:
    """Each sequence's value on its masked-in tokens, 0 elsewhere, [T]."""
    lengths_S = cu_seqlens.diff().to(torch.int64)
    out_T = value_S.new_zeros(mask_T.numel())
    covered = int(cu_seqlens[-1])
    spread_T = torch.repeat_interleave(value_S, lengths_S)
    out_T[int(cu_seqlens[0]) : covered] = spread_T
    return torch.where(mask_T, out_T, 0.0)
