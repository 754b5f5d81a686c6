"""What is reported about two-turn answering, with intervals.

Shapes: N pairs (attempt, revision) of a flat batch, T tokens, S turns.

A share without a single case is nan, never 0: "no wrong attempt" is not "none was fixed".
``valid_N`` is False where a turn or its verifier failed; such pairs leave every number.
An answer is solved when its reward reaches ``threshold``; for verified 0/1 rewards accuracies and
mean rewards coincide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate with its interval.

    Example: ``Interval(value=0.25, low=0.12, high=0.45, level=0.95)``
    """

    value: float
    low: float
    high: float
    level: float
    """Nominal coverage, such as 0.95."""


def turn_metrics(
    reward0_N: Tensor, reward1_N: Tensor, valid_N: Tensor, threshold: float = 1.0
) -> dict[str, float]:
    """Both accuracies, and where the difference comes from.

    Args: rewards [N] of attempts and of their revisions, valid [N] bool. Returns
      acc_t1, acc_t2, delta = acc_t2 - acc_t1 = d_ic - d_ci; d_ic share wrong then right, d_ci share
      right then wrong; fix = d_ic / P(wrong), break = d_ci / P(right); num_pairs, num_wrong,
      num_right.
    Source: SCoRe, arXiv 2409.12917, section 3.
    """
    _check_rows(valid_N, reward0_N, reward1_N)
    first_N = (reward0_N >= threshold)[valid_N]
    second_N = (reward1_N >= threshold)[valid_N]
    num, num_right = first_N.numel(), int(first_N.sum())
    num_wrong = num - num_right
    num_fixed = int((~first_N & second_N).sum())
    num_broken = int((first_N & ~second_N).sum())
    return {
        "acc_t1": _share(num_right, num),
        "acc_t2": _share(int(second_N.sum()), num),
        "delta": _share(num_fixed - num_broken, num),
        "d_ic": _share(num_fixed, num),
        "d_ci": _share(num_broken, num),
        "fix": _share(num_fixed, num_wrong),
        "break": _share(num_broken, num_right),
        "num_pairs": float(num),
        "num_wrong": float(num_wrong),
        "num_right": float(num_right),
    }


def uplift(
    reward0_N: Tensor,
    with_N: Tensor,
    without_N: Tensor,
    valid_N: Tensor,
    threshold: float = 1.0,
) -> dict[str, float]:
    """Gain of revisions with feedback over revisions without it, in all and by kind of attempt.

    Args: rewards [N] of the attempts, of the revisions under the critic's feedback, and of those
    under the control (no feedback, or feedback of another problem), valid [N] where all three are.
    Returns uplift, uplift_wrong (on wrong attempts), uplift_right. Plain revision gains count a
    second try as help; the control takes that out.
    """
    _check_rows(valid_N, reward0_N, with_N, without_N)
    gain_N = with_N.double() - without_N.double()
    right_N = reward0_N >= threshold
    return {
        "uplift": _mean(gain_N[valid_N]),
        "uplift_wrong": _mean(gain_N[valid_N & ~right_N]),
        "uplift_right": _mean(gain_N[valid_N & right_N]),
    }


def oracle_gate(
    reward0_N: Tensor, reward1_N: Tensor, valid_N: Tensor, threshold: float = 1.0
) -> float:
    """Accuracy when the verifier decides whether to revise: an UPPER BOUND, it sees the truth."""
    _check_rows(valid_N, reward0_N, reward1_N)
    solved_N = (reward0_N >= threshold) | (reward1_N >= threshold)
    return _share(int(solved_N[valid_N].sum()), int(valid_N.sum()))


def learned_gate(
    accept_N: Tensor,
    reward0_N: Tensor,
    reward1_N: Tensor,
    valid_N: Tensor,
    threshold: float = 1.0,
) -> float:
    """Accuracy when the critic's own verdict decides: accepted attempts stand, others are revised.

    Args: accept [N] bool, True where the verdict calls the attempt right.
    """
    _check_rows(valid_N, reward0_N, reward1_N, accept_N)
    solved_N = torch.where(accept_N, reward0_N >= threshold, reward1_N >= threshold)
    return _share(int(solved_N[valid_N].sum()), int(valid_N.sum()))


def discrimination(verdict_N: Tensor, reward0_N: Tensor, threshold: float = 1.0) -> Tensor:
    """r_dis: 1 where the critic's verdict on the attempt agrees with the verifier, else 0, [N].

    Args: verdict [N] int, 1 for right, 0 for wrong, -1 for none given, which never agrees.
    Source: Critique-RL, arXiv 2510.24320, stage I.
    """
    return (verdict_N == (reward0_N >= threshold).to(verdict_N.dtype)).to(torch.float32)


def rate(event_N: Tensor, valid_N: Tensor) -> float:
    """Share of valid rows with the event (leak, agreement, truncation), nan of none."""
    _check_rows(valid_N, event_N)
    return _share(int(event_N.bool()[valid_N].sum()), int(valid_N.sum()))


def collapse_share(num_groups: int, num_singleton: int, num_collapsed: int) -> float:
    """Share without variance among the groups that could have any, nan if none could."""
    return _share(num_collapsed, num_groups - num_singleton)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k is right) from n samples: 1 - C(n-c, k) / C(n, k).

    Raises: ValueError unless 1 <= k <= num_samples and 0 <= num_correct <= num_samples.
    Source: Codex, arXiv 2107.03374, eq. 1.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"got k {k}, {num_correct} right of {num_samples}; expected 1 <= k <= samples and "
            "right <= samples: draw at least k samples for each problem"
        )
    if num_samples - num_correct < k:
        return 1.0
    index = np.arange(num_samples - num_correct + 1, num_samples + 1)
    return float(1.0 - np.prod(1.0 - k / index))


def wilson_interval(num_success: int, num: int, level: float = 0.95) -> Interval:
    """Wilson score interval of a share of INDEPENDENT cases; [0, 1] around nan for none.

    Several samples of one problem are not independent: use `cluster_bootstrap` for them.
    Raises: ValueError unless 0 <= num_success <= num and 0 < level < 1.
    Source: Wilson 1927.
    """
    if not 0 <= num_success <= num or not 0.0 < level < 1.0:
        raise ValueError(
            f"got {num_success} of {num} at level {level}; expected 0 <= successes <= cases and a "
            "level between 0 and 1"
        )
    if num == 0:
        return Interval(value=float("nan"), low=0.0, high=1.0, level=level)
    z = float(torch.special.ndtri(torch.tensor(0.5 + level / 2, dtype=torch.float64)))
    share = num_success / num
    center = (share + z * z / (2 * num)) / (1 + z * z / num)
    half = z / (1 + z * z / num) * (share * (1 - share) / num + z * z / (4 * num * num)) ** 0.5
    return Interval(
        value=share, low=max(0.0, center - half), high=min(1.0, center + half), level=level
    )


def cluster_bootstrap(
    value_N: Sequence[float] | np.ndarray,
    cluster_N: Sequence[str] | Sequence[int] | np.ndarray,
    *,
    seed: int,
    num_resamples: int = 10_000,
    level: float = 0.95,
) -> Interval:
    """Percentile bootstrap of a mean, drawing whole clusters (all samples of a prompt) again.

    Args: value [N], cluster id [N]. The same input and seed give the same interval.
    Raises: ValueError on no rows, other shapes, or a value that is not finite.
    Source: Efron and Tibshirani 1993, chapters 8 and 13.
    """
    value = np.asarray(value_N, dtype=np.float64)
    if value.ndim != 1 or value.size == 0 or value.size != len(cluster_N):
        raise ValueError(
            f"got {value.shape} values and {len(cluster_N)} cluster ids; expected one id a value "
            "and at least one value"
        )
    if not np.isfinite(value).all():
        raise ValueError("got a value that is not finite; expected failed rows to be left out")
    _, index = np.unique(np.asarray(cluster_N), return_inverse=True)
    sum_K = np.bincount(index, weights=value)
    count_K = np.bincount(index).astype(np.float64)
    rng = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    chunk = max(1, 4_000_000 // sum_K.size)  # caps the index table at 32 MB
    for start in range(0, num_resamples, chunk):
        stop = min(start + chunk, num_resamples)
        drawn = rng.integers(0, sum_K.size, size=(stop - start, sum_K.size))
        means[start:stop] = sum_K[drawn].sum(1) / count_K[drawn].sum(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value=float(value.mean()), low=float(low), high=float(high), level=level)


def paired_bootstrap(
    a_N: Sequence[float] | np.ndarray,
    b_N: Sequence[float] | np.ndarray,
    cluster_N: Sequence[str] | Sequence[int] | np.ndarray,
    *,
    seed: int,
    num_resamples: int = 10_000,
    level: float = 0.95,
) -> Interval:
    """Interval of mean(a - b) where row i of both is the same case, resampled by prompt.

    Raises: ValueError on other shapes, no rows, or a value that is not finite.
    Source: as `cluster_bootstrap`; pairing takes the difficulty of the prompts out of the interval.
    """
    a, b = np.asarray(a_N, dtype=np.float64), np.asarray(b_N, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"got {a.shape} and {b.shape}; expected the same cases on both sides")
    return cluster_bootstrap(a - b, cluster_N, seed=seed, num_resamples=num_resamples, level=level)


def engine_mismatch(
    engine_logprob_T: Tensor, trainer_logprob_T: Tensor, mask_T: Tensor
) -> dict[str, float]:
    """Distance of the engine's log-probs from the trainer's: mean, 99th percentile and maximum.

    Args: log-probs [T] of the same sampled ids, mask [T] bool. Returns mean, p99, max of the
    absolute difference over finite pairs, and num_not_finite. A mean alone hides the few tokens
    that break a ratio.
    """
    _check_rows(mask_T, engine_logprob_T, trainer_logprob_T)
    difference = (engine_logprob_T.double() - trainer_logprob_T.double())[mask_T].abs()
    finite = difference[torch.isfinite(difference)]
    result = {"mean": float("nan"), "p99": float("nan"), "max": float("nan")}
    if finite.numel():
        # Not torch.quantile, which refuses more than 16M values.
        rank = min(finite.numel(), int(np.ceil(0.99 * finite.numel())))
        result = {
            "mean": float(finite.mean()),
            "p99": float(finite.kthvalue(rank).values),
            "max": float(finite.max()),
        }
    return result | {"num_not_finite": float(difference.numel() - finite.numel())}


def reliance(
    with_logprob_T: Tensor, without_logprob_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """log pi(y1 | x, y0, z) - log pi(y1 | x, y0): how much each revision owes to z, [S].

    Args: log-probs [T] of the revision's own ids under both prompts, mask [T] bool, cu_seqlens
    [S+1]. Near 0 means that the actor has learned to ignore the critic.
    """
    _check_rows(mask_T, with_logprob_T, without_logprob_T)
    owed_T = torch.where(mask_T, with_logprob_T.double() - without_logprob_T.double(), 0.0)
    index_S = torch.arange(cu_seqlens.numel() - 1, device=owed_T.device)
    sequence_T = torch.repeat_interleave(index_S, cu_seqlens.diff())
    return owed_T.new_zeros(cu_seqlens.numel() - 1).index_add_(0, sequence_T, owed_T)


def _check_rows(valid_N: Tensor, *tensors: Tensor) -> None:
    shapes = [tuple(x.shape) for x in (valid_N, *tensors)]
    if len(set(shapes)) > 1 or valid_N.dim() != 1 or valid_N.dtype != torch.bool:
        raise ValueError(
            f"got shapes {shapes} and a mask of {valid_N.dtype}; expected flat tensors of one "
            "length and a torch.bool mask"
        )


def _share(part: int, whole: int) -> float:
    return part / whole if whole > 0 else float("nan")


def _mean(x: Tensor) -> float:
    return float(x.mean()) if x.numel() else float("nan")
