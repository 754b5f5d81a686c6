"""Credit in the rollout tree of the bilevel program, and who trains when.

Shapes: C criticised attempts, F feedbacks for each, M revisions for each feedback, G attempts of
one prompt, N attempts of a flat batch. C may run over all prompts of a batch: no function here
compares rows of different C.

The critic (leader) maximises L(ph, th) = J(ph, th) + lam * (J(ph, th) - J(ph, th*)), where J is the
expected reward of the revision and th* is the actor (follower) after adapting to the critic's
feedback (arXiv 2605.24547, value-function penalty; arXiv 2402.06886, section 3). Its gradient is
score-function only:
    grad_ph L = E_th[(1+lam) V_th grad log mu_ph(z)] - E_th*[lam V_th* grad log mu_ph(z)]
th* is frozen in it (Danskin), nothing flows through the text z, and no second derivative appears.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_binac.algo.advantages import leave_one_out, mean_centered

SelectMode = Literal["natural", "prefer_wrong", "wrong", "failed_groups"]


def due(step: int, k: int) -> bool:
    """Whether a thing done every k steps is due: (step + 1) % k == 0; never for k = 0.

    The actor trains in every step and the critic where due(step, K), at the end of a block of K.
    Raises: ValueError for a negative k.
    Source: K follower steps to one leader step, arXiv 2605.24547, algorithm 1.
    """
    if k < 0:
        raise ValueError(f"got k = {k}; expected a number of steps, or 0 for never")
    return k > 0 and (step + 1) % k == 0


def opens_block(step: int, k: int) -> bool:
    """Whether this step is the first of its block of k, whose feedback is probed at the end.

    Raises: ValueError for k < 1.
    """
    if k < 1:
        raise ValueError(f"got k = {k}; expected a block of at least 1 step")
    return step % k == 0


def feedback_value(reward_CFM: Tensor, valid_CFM: Tensor) -> Tensor:
    """Value of a feedback: mean reward of its valid revisions.

    Args: reward [..., F, M] of revisions (or of probes, which gives V*), valid likewise.
    Returns V [..., F], nan where no revision is valid: such a feedback has no value, not value 0.
    Its validity is ``valid_CFM.any(-1)``, and with probes the two of them together.
    Source: V_th(x, y0, z) = E[R(x, y1)], arXiv 2605.24547, by Monte Carlo.
    """
    count_CF = valid_CFM.sum(-1)
    sum_CF = torch.where(valid_CFM, reward_CFM, 0.0).sum(-1)
    return torch.where(count_CF > 0, sum_CF / count_CF.clamp(min=1), float("nan"))


def leader_utility(
    V: Tensor,
    V_star: Tensor | None,
    lam: float,
    dis: Tensor | None = None,
    leak: Tensor | None = None,
    b_dis: float = 0.0,
    b_leak: float = 0.0,
    *,
    star_weight: Tensor | None = None,
) -> Tensor:
    """Utility of a feedback for the critic, U = (1+lam) V - lam V* + b_dis dis - b_leak leak.

    Args:
      V, V_star: [..., F] value with the actor and with the adapted actor for the SAME (x, y0, z).
      lam: weight of the penalty; above 0, V* > V lowers U. Below 0 is the ablation that rewards
        feedback which is about to become usable.
      dis, leak: [..., F] 1 where the critic's verdict is right, 1 where it gives the answer away.
      star_weight: [..., 1] or [..., F] optional pi_th*(y0|x) / pi_th(y0|x). Attempts come from
        pi_th. Without the weight the penalty compares both actors on those attempts, which is what
        the gap of a feedback means; with it the mean is grad_ph L to the letter.
    Returns U [..., F]. Written as V + lam (V - V*): an actor that has not moved gives exactly V.
    Raises: ValueError when a coefficient has nothing to act on.
    Source: integrand of the leader's gradient, arXiv 2605.24547; see the top of this file.
    """
    for name, coef, tensor in (
        ("lam", lam, V_star),
        ("b_dis", b_dis, dis),
        ("b_leak", b_leak, leak),
    ):
        if coef != 0.0 and tensor is None:
            raise ValueError(
                f"got {name} = {coef} and no tensor for it to weigh; expected its input: pass it "
                f"(V_star, dis, leak), or set {name}=0"
            )
    utility = V
    if lam != 0.0 and V_star is not None:
        if star_weight is None:
            utility = V + lam * (V - V_star)
        else:
            utility = (1.0 + lam) * V - lam * star_weight * V_star
    if b_dis != 0.0 and dis is not None:
        utility = utility + b_dis * dis.to(utility.dtype)
    if b_leak != 0.0 and leak is not None:
        utility = utility - b_leak * leak.to(utility.dtype)
    return utility


def leader_credit(
    utility_CF: Tensor, valid_CF: Tensor, weight_C: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Credit of a feedback: its utility minus the mean of its siblings on the same attempt.

    Args: utility [..., F], valid [..., F] bool, optional weight [...] of the attempt, such as the
    one `choose_attempts` returns. Returns credit [..., F] and trainable [..., F]: 0 and False where
    invalid, without a valid sibling, or where all siblings are equal.
    Raises: ValueError on a utility that is not finite in a valid place.
    Source: leave-one-out baseline b(x, y0), arXiv 2402.14740, eq. 7. It does not depend on z, so it
    changes no expectation.
    """
    num_feedbacks = utility_CF.shape[-1]
    rows = utility_CF.numel() // max(num_feedbacks, 1)
    group = torch.arange(rows, device=utility_CF.device).repeat_interleave(num_feedbacks)
    credit, trainable = leave_one_out(utility_CF.reshape(-1), group, valid_CF.reshape(-1))
    credit_CF = credit.view_as(utility_CF)
    if weight_C is not None:
        credit_CF = credit_CF * weight_C.to(credit_CF.dtype).unsqueeze(-1)
    return credit_CF, trainable.view_as(valid_CF)


def revision_credit(
    reward_CFM: Tensor,
    valid_CFM: Tensor,
    reward0_C: Tensor,
    valid0_C: Tensor,
    alpha: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Credit of a revision: R(y1) minus the mean of all revisions of its attempt, plus progress.

    Args: reward, valid [..., F, M] of the revisions; reward0, valid0 [...] of their attempts;
    weight alpha of the progress R(y1) - R(y0). Returns credit and trainable [..., F, M]. The mean
    is over the F*M revisions of one (x, y0), itself included. An alpha term acts in groups without
    variance as well, and not where the attempt's verifier failed.
    Raises: ValueError on a reward that is not finite in a valid place.
    Source: A of the follower's gradient, arXiv 2605.24547; progress: SCoRe, arXiv 2409.12917,
    eq. 4.
    """
    siblings = reward_CFM.shape[-2] * reward_CFM.shape[-1]
    rows = reward_CFM.numel() // max(siblings, 1)
    group = torch.arange(rows, device=reward_CFM.device).repeat_interleave(siblings)
    credit, trainable = mean_centered(reward_CFM.reshape(-1), group, valid_CFM.reshape(-1))
    credit_CFM, trainable_CFM = credit.view_as(reward_CFM), trainable.view_as(valid_CFM)
    if alpha != 0.0:
        both_CFM = valid_CFM & valid0_C[..., None, None]
        progress_CFM = torch.where(both_CFM, alpha * (reward_CFM - reward0_C[..., None, None]), 0.0)
        credit_CFM = credit_CFM + progress_CFM
        trainable_CFM = trainable_CFM | (progress_CFM != 0.0)
    return credit_CFM, trainable_CFM


def attempt_credit(
    reward_N: Tensor,
    group_N: Tensor,
    valid_N: Tensor,
    followup_N: Tensor,
    followed_N: Tensor,
    *,
    w0: float = 1.0,
    g: float = 0.1,
    weight_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Credit of an attempt, from Q(y0) = w0 R(y0) + g mean_f V[c, f], with like compared to like.

    Args:
      reward, group, valid: [N] of all attempts; one group is the attempts of one prompt.
      followup_N: [N] mean_f V where the attempt was criticised; not read elsewhere.
      followed_N: [N] bool, criticised and with at least one valid revision.
      weight_N: [N] optional weight of a criticised attempt back to the natural mix.
    Returns advantage [N], trainable [N].
    Only some attempts are criticised, and an attempt must not win or lose by having been chosen. So
    each term is centred among those that have it: R over all valid attempts of the group, the
    follow-up over the criticised ones only (by weighted mean where weights are given). An attempt
    without follow-up gets the first term alone; one criticised attempt in a group too.
    In the follower's gradient y0 and y1 both carry the factor 1 + lam; a constant, it is left to
    the learning rate. w0 keeps single-turn skill: L alone never rewards y0.
    Raises: ValueError on a reward that is not finite in a valid place.
    Source: follower's gradient, arXiv 2605.24547; first term our choice, as in arXiv 2602.02482.
    """
    first_N, trainable_N = mean_centered(w0 * reward_N, group_N, valid_N)
    if g == 0.0:
        return first_N, trainable_N
    has_N = valid_N & followed_N
    followup_N = torch.where(has_N, g * followup_N, 0.0)
    second_N, followed_trainable_N = mean_centered(followup_N, group_N, has_N)
    if weight_N is not None:
        second_N = _weighted_centered(followup_N, group_N, followed_trainable_N, weight_N)
    return first_N + second_N, trainable_N | followed_trainable_N


def exploitability_gap(V: Tensor, V_star: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over valid feedbacks of V* - V, and their number: what only a better-adapted actor gains.

    Args: V, V_star, valid [..., F]. Returns two 0-d tensors, to be added over ranks and divided.
    Source: the penalty of the leader's objective, arXiv 2605.24547.
    """
    return torch.where(valid, V_star - V, 0.0).sum(), valid.sum()


def choose_attempts(
    rewards_G: Sequence[float],
    num: int,
    mode: SelectMode,
    rng: np.random.Generator,
    *,
    valid_G: Sequence[bool] | None = None,
    wrong_share: float = 0.75,
    threshold: float = 1.0,
) -> tuple[list[int], list[float]]:
    """Draw the attempts of one prompt that get feedback, with weights back to the natural mix.

    Args: rewards [G], how many, how, a generator; valid [G] False for failed attempts, which are
    never chosen; wrong_share of the places that go to wrong attempts (reward below threshold) under
    prefer_wrong. Returns ascending indices and weights, at most ``num``.
    natural draws without replacement, all weights 1. prefer_wrong fills wrong_share of the places
    with wrong attempts and the rest with right ones, as far as there are any of each, and never
    fewer wrong ones than the natural mix has. An attempt's weight is its natural chance to be drawn
    over its actual one, so weighted sums have the expectation that natural ones have. Both kinds
    keep a chance: a critic that only sees wrong attempts learns to call everything wrong.
    wrong draws among wrong attempts only (RLTF: a solved problem ends the episode), failed_groups
    draws where no valid attempt is right (MulFeRL); both have weights 1 and may draw none.
    Raises: ValueError for num < 0, an unknown mode, or a wrong_share outside (0, 1).
    Source: inverse-probability weighting, Horvitz and Thompson 1952.
    """
    if num < 0 or not 0.0 < wrong_share < 1.0:
        raise ValueError(
            f"got num {num}, wrong_share {wrong_share}; expected num >= 0 and 0 < wrong_share < 1: "
            "right attempts need a chance too, or no weight can bring them back"
        )
    if mode not in ("natural", "prefer_wrong", "wrong", "failed_groups"):
        raise ValueError(
            f"got mode {mode!r}; expected 'natural', 'prefer_wrong', 'wrong' or 'failed_groups'"
        )
    pool = [i for i in range(len(rewards_G)) if valid_G is None or valid_G[i]]
    wrong = [i for i in pool if rewards_G[i] < threshold]
    right = [i for i in pool if rewards_G[i] >= threshold]
    if mode == "wrong":
        pool, right = wrong, []
    if mode == "failed_groups" and right:
        pool = wrong = right = []
    num = min(num, len(pool))
    if mode == "natural" or not wrong or not right or num == 0:
        chosen = sorted(int(i) for i in rng.choice(pool, size=num, replace=False)) if num else []
        return chosen, [1.0] * num

    target = max(num * wrong_share, num * len(wrong) / len(pool))
    target = min(max(target, num - len(right)), len(wrong))  # bounds are whole, so rounding is safe
    num_wrong = math.floor(target) + int(rng.random() < target - math.floor(target))
    drawn = [
        *rng.choice(wrong, size=num_wrong, replace=False),
        *rng.choice(right, size=num - num_wrong, replace=False),
    ]
    natural_chance = num / len(pool)
    weight_wrong = natural_chance / (target / len(wrong))
    weight_right = natural_chance / ((num - target) / len(right))
    chosen = sorted(int(i) for i in drawn)
    return chosen, [weight_wrong if rewards_G[i] < threshold else weight_right for i in chosen]


def _weighted_centered(x_N: Tensor, group_N: Tensor, use_N: Tensor, weight_N: Tensor) -> Tensor:
    """w * (x - weighted mean of x in the group), 0 where not used."""
    _, index_N = torch.unique(group_N, return_inverse=True)
    weight_N = torch.where(use_N, weight_N.double(), 0.0)
    value_N = torch.where(use_N, x_N.double(), 0.0)
    num = int(index_N.max()) + 1 if index_N.numel() else 0
    total_K = weight_N.new_zeros(num).index_add_(0, index_N, weight_N)
    sum_K = weight_N.new_zeros(num).index_add_(0, index_N, weight_N * value_N)
    mean_N = (sum_K / total_K.clamp(min=1e-12))[index_N]
    return (weight_N * (value_N - mean_N)).to(x_N.dtype)
