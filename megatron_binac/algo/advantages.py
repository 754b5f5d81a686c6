"""Credit of a sampled turn relative to its group, and of a token by GAE.

Shapes: N turns of a flat batch, S packed sequences, T packed tokens, L longest trained sequence.

``group_N`` holds any integers, in any order: turns with the same id are compared with one another.
Two groups that share a prompt text stay two groups. ``valid_N`` is False where the engine or the
verifier failed: such a row is not a wrong answer, it leaves every mean and gets no credit.
Every group function returns ``(advantage_N, trainable_N)``; rows that are invalid, alone in their
group, or in a group without variance get exactly 0 and False.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_binac.algo.checks import check_gae, check_group

# Relative spread below which a group counts as constant. Means of equal rewards over different
# numbers of samples differ in the last bits, and dividing such a residue by its own std makes
# advantages of order one out of nothing.
_RESIDUE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStats:
    """How much signal the groups of a batch hold.

    Example: ``GroupStats(num_groups=8, num_singleton=1, num_collapsed=3, num_failed=2)``
    """

    num_groups: int
    """Groups with at least one valid row."""
    num_singleton: int
    """Groups with exactly one valid row: nothing to compare with."""
    num_collapsed: int
    """Groups of two or more valid rows with one and the same reward."""
    num_failed: int
    """Rows that left the statistics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Groups:
    """Valid rows keyed by a dense group index; all statistics in float64."""

    index_N: Tensor
    reward_N: Tensor  # 0 where invalid
    valid_N: Tensor
    count_N: Tensor  # valid rows in the row's group
    mean_N: Tensor  # mean of the valid rows in the row's group
    usable_N: Tensor  # valid, not alone, and the group has variance
    collapsed_N: Tensor  # group of two or more without variance
    num_indices: int

    def total(self, x_N: Tensor) -> Tensor:
        """Sum over the row's group, handed back to every row, [N]."""
        total_K = x_N.new_zeros(self.num_indices).index_add_(0, self.index_N, x_N)
        return total_K[self.index_N]

    def finish(self, advantage_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        zero_N = torch.zeros_like(advantage_N)
        return torch.where(self.usable_N, advantage_N, zero_N).to(dtype), self.usable_N


def _read_groups(reward_N: Tensor, group_N: Tensor, valid_N: Tensor) -> _Groups:
    check_group(reward_N, group_N, valid_N)
    reward_N = torch.where(valid_N, reward_N.detach().double(), 0.0)
    if not bool(torch.isfinite(reward_N).all()):
        raise ValueError(
            "got a reward that is not finite in a valid row; expected finite numbers: mark the row "
            "as invalid where its verifier failed"
        )
    ids_K, index_N = torch.unique(group_N, return_inverse=True)
    num = ids_K.numel()
    count_K = reward_N.new_zeros(num).index_add_(0, index_N, valid_N.double())
    sum_K = reward_N.new_zeros(num).index_add_(0, index_N, reward_N)
    inf = float("inf")
    low_K = reward_N.new_full((num,), inf).scatter_reduce_(
        0, index_N, torch.where(valid_N, reward_N, inf), "amin"
    )
    high_K = reward_N.new_full((num,), -inf).scatter_reduce_(
        0, index_N, torch.where(valid_N, reward_N, -inf), "amax"
    )
    scale_K = torch.maximum(low_K.abs(), high_K.abs())
    flat_K = high_K - low_K <= _RESIDUE * scale_K
    count_N = count_K[index_N]
    collapsed_N = valid_N & flat_K[index_N] & (count_N >= 2)
    return _Groups(
        index_N=index_N,
        reward_N=reward_N,
        valid_N=valid_N,
        count_N=count_N,
        mean_N=(sum_K / count_K.clamp(min=1))[index_N],
        usable_N=valid_N & (count_N >= 2) & ~collapsed_N,
        collapsed_N=collapsed_N,
        num_indices=num,
    )


def mean_centered(reward_N: Tensor, group_N: Tensor, valid_N: Tensor) -> tuple[Tensor, Tensor]:
    """Reward minus the mean of its group, the row itself included.

    Args: reward [N] float, group [N] int, valid [N] bool. Returns advantage [N], trainable [N].
    The row's own part in the mean scales the policy gradient by (n-1)/n and does not bias it.
    Raises: ValueError on other shapes or a valid reward that is not finite.
    Source: Dr. GRPO, arXiv 2503.20783, section 3.2 (GRPO's eq. 3 without the division by std).
    """
    groups = _read_groups(reward_N, group_N, valid_N)
    return groups.finish(groups.reward_N - groups.mean_N, reward_N.dtype)


def leave_one_out(reward_N: Tensor, group_N: Tensor, valid_N: Tensor) -> tuple[Tensor, Tensor]:
    """Reward minus the mean of the OTHER rows of its group.

    Args: reward [N] float, group [N] int, valid [N] bool. Returns advantage [N], trainable [N].
    Raises: ValueError on other shapes or a valid reward that is not finite.
    Source: RLOO, arXiv 2402.14740, eq. 7.
    """
    groups = _read_groups(reward_N, group_N, valid_N)
    # r_i - (S - r_i)/(n-1) = (r_i - S/n) * n/(n-1)
    factor_N = groups.count_N / (groups.count_N - 1).clamp(min=1)
    return groups.finish((groups.reward_N - groups.mean_N) * factor_N, reward_N.dtype)


def std_normalized(
    reward_N: Tensor, group_N: Tensor, valid_N: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Reward minus the group's mean, over the group's sample standard deviation (n-1) plus eps.

    Args: reward [N] float, group [N] int, valid [N] bool. Returns advantage [N], trainable [N].
    The paper leaves n or n-1 open; n-1 is what public trainers take. The variance is the mean
    square of the centred rewards, since E r^2 - (E r)^2 cancels.
    Raises: ValueError on other shapes or a valid reward that is not finite.
    Source: GRPO, arXiv 2402.03300, section 4.1.2.
    """
    groups = _read_groups(reward_N, group_N, valid_N)
    centered_N = torch.where(groups.valid_N, groups.reward_N - groups.mean_N, 0.0)
    var_N = groups.total(centered_N.square()) / (groups.count_N - 1).clamp(min=1)
    return groups.finish(centered_N / (var_N.sqrt() + eps), reward_N.dtype)


def mean_normalized(reward_N: Tensor, group_N: Tensor, valid_N: Tensor) -> tuple[Tensor, Tensor]:
    """Reward minus the group's mean, over that mean: rare successes weigh more.

    Args: reward [N] float and not negative, group [N] int, valid [N] bool.
    Returns advantage [N], trainable [N].
    Raises: ValueError on other shapes, or a valid reward that is negative or not finite.
    Source: MaxRL, arXiv 2602.02710. For binary rewards and a group of n the mean of A grad log pi
    estimates the gradient of sum_{k<n} -(1-p)^k / k, the log pass rate truncated at n-1 terms.
    """
    groups = _read_groups(reward_N, group_N, valid_N)
    if bool((groups.reward_N < 0).any()):
        raise ValueError(
            f"got a reward of {float(groups.reward_N.min())}; expected none below 0, since the "
            "group's mean divides: shift the rewards, or use mean_centered"
        )
    # A usable group has a reward above 0, hence a mean above 0; the clamp is for the other rows.
    mean_N = torch.where(groups.usable_N, groups.mean_N, 1.0)
    return groups.finish((groups.reward_N - groups.mean_N) / mean_N, reward_N.dtype)


def group_stats(reward_N: Tensor, group_N: Tensor, valid_N: Tensor) -> GroupStats:
    """Count the groups with, without and beyond signal.

    Args: reward [N] float, group [N] int, valid [N] bool.
    Raises: ValueError on other shapes or a valid reward that is not finite.
    """
    groups = _read_groups(reward_N, group_N, valid_N)

    def count(rows_N: Tensor) -> int:
        return int(torch.unique(groups.index_N[rows_N]).numel())

    return GroupStats(
        num_groups=count(valid_N),
        num_singleton=count(valid_N & (groups.count_N == 1)),
        num_collapsed=count(groups.collapsed_N),
        num_failed=int((~valid_N).sum()),
    )


def running_baseline(
    reward_N: Tensor, valid_N: Tensor, baseline: float, momentum: float = 0.9
) -> tuple[Tensor, Tensor, float]:
    """Reward minus a moving average of past batches, for REINFORCE without siblings.

    Args: reward [N] float, valid [N] bool, the average before this batch.
    Returns advantage [N], trainable [N] and the average for the next batch. The batch is compared
    with the OLD average, so that no row is part of its own baseline.
    Source: Williams 1992, reinforcement comparison.
    """
    if not bool(valid_N.any()):
        return torch.zeros_like(reward_N), valid_N, baseline
    mean = float(reward_N.detach().double()[valid_N].mean())
    advantage_N = torch.where(valid_N, reward_N.detach() - baseline, 0.0)
    return advantage_N, valid_N, momentum * baseline + (1.0 - momentum) * mean


def turn_returns(
    reward0_N: Tensor, reward1_N: Tensor, next_weight: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Returns of a two-turn chain: G0 = r0 + next_weight * r1 and G1 = r1.

    Args: rewards [N] of the attempts and of their revisions. Each turn index is then centred among
    its own kind, by `mean_centered` with one group id per (prompt, turn index).
    Source: RLTF, arXiv 2602.02482, the two-turn baseline.
    """
    return reward0_N + next_weight * reward1_N, reward1_N


def overlong_penalty(length_N: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft punishment for answers near the limit: 0, then linear to -1 over the last tokens.

    Args: length [N], limit and width of the ramp, all in tokens. Returns [N] in [-1, 0].
    Raises: ValueError if the buffer is not within the limit.
    Source: DAPO, arXiv 2503.14476, eq. 13.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"got buffer {buffer} for a limit of {max_length} tokens; expected 0 < buffer <= limit"
        )
    excess_N = length_N.double() - (max_length - buffer)
    return -(excess_N / buffer).clamp(min=0.0, max=1.0).to(torch.float32)


def gae(
    reward_T: Tensor,
    value_T: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over packed sequences, carried across masked tokens.

    Args: reward, value [T] float, cu_seqlens [S+1] int, mask [T] bool. Returns advantage [T] and
    return [T] (advantage plus value), both 0 where masked. A masked token (prompt, feedback, pad)
    is no time step: the next trained token follows directly, with no discount for the gap, and a
    reward or value that lies on it is not read. After the last trained token the value is 0.
    Raises: ValueError on lengths that do not fit, on gamma or lam outside of 0 to 1.
    Source: GAE, arXiv 1506.02438, eq. 16.
    """
    check_gae(reward_T, value_T, cu_seqlens, mask, gamma, lam)
    num_tokens = reward_T.numel()
    at_U = torch.nonzero(mask, as_tuple=True)[0]  # trained tokens only, U of them
    advantage_T = torch.zeros(num_tokens, dtype=torch.float64, device=reward_T.device)
    if at_U.numel() > 0:
        lengths_S = cu_seqlens.diff().long()  # packed batches carry int32 borders
        num_seqs = lengths_S.numel()
        seq_T = torch.repeat_interleave(torch.arange(num_seqs, device=mask.device), lengths_S)
        seq_U = seq_T[at_U]
        trained_S = torch.zeros_like(lengths_S).index_add_(0, seq_U, torch.ones_like(seq_U))
        first_S = trained_S.cumsum(0) - trained_S
        step_U = torch.arange(at_U.numel(), device=mask.device) - first_S[seq_U]
        # Right-aligned [S, L]: column L-1 is every sequence's last trained token.
        longest = int(trained_S.max())
        column_U = longest - trained_S[seq_U] + step_U
        reward_SL = advantage_T.new_zeros(num_seqs, longest)
        value_SL = advantage_T.new_zeros(num_seqs, longest + 1)
        reward_SL[seq_U, column_U] = reward_T.detach().double()[at_U]
        value_SL[seq_U, column_U] = value_T.detach().double()[at_U]
        advantage_SL = torch.zeros_like(reward_SL)
        carry_S = advantage_T.new_zeros(num_seqs)
        for column in range(longest - 1, -1, -1):
            delta_S = reward_SL[:, column] + gamma * value_SL[:, column + 1] - value_SL[:, column]
            carry_S = delta_S + gamma * lam * carry_S
            advantage_SL[:, column] = carry_S
        advantage_T[at_U] = advantage_SL[seq_U, column_U]
    return_T = torch.where(mask, advantage_T + value_T.detach().double(), 0.0)
    return advantage_T.to(reward_T.dtype), return_T.to(value_T.dtype)
