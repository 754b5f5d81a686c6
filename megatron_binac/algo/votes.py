"""Several samples and several rounds of one problem: what a vote says, and when to stop revising.

Shapes: S samples of one problem, T rounds of feedback, so T + 1 answers of a chain.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

MAX_SUBSETS = 2000
"""Subsets that are counted one by one; of more, this many are drawn."""


def majority_at_k(
    answer_S: Sequence[int | None], right_S: Sequence[bool], k: int, *, seed: int = 0
) -> float:
    """Chance that the most frequent answer among k of S samples is right.

    Args: `answer` [S] a number for each different answer, None where there was none, which does not
    vote; `right` [S]. Answers that share the first place are drawn among, so each counts its share.
    Without any answer it is 0. Where there are more than `MAX_SUBSETS` subsets the mean is over as
    many seeded ones. Raises ValueError unless 1 <= k <= S.
    Source: Wang et al. 2022, arXiv 2203.11171 (self-consistency), over subsets as in `pass_at_k`.
    """
    num = len(answer_S)
    if not 1 <= k <= num or len(right_S) != num:
        raise ValueError(
            f"got k {k}, {num} answers and {len(right_S)} verdicts; expected 1 <= k <= answers and "
            "one verdict each: draw at least k samples for each problem"
        )
    if math.comb(num, k) <= MAX_SUBSETS:
        subsets = list(itertools.combinations(range(num), k))
    else:
        rng = np.random.default_rng(seed)
        subsets = [tuple(rng.permutation(num)[:k].tolist()) for _ in range(MAX_SUBSETS)]
    return sum(_vote([(answer_S[i], right_S[i]) for i in s]) for s in subsets) / len(subsets)


def _vote(ballots: Sequence[tuple[int | None, bool]]) -> float:
    right_by_answer: dict[int, list[bool]] = {}
    for answer, right in ballots:
        if answer is not None:
            right_by_answer.setdefault(answer, []).append(right)
    most = max(map(len, right_by_answer.values()), default=0)
    first = [votes for votes in right_by_answer.values() if len(votes) == most]
    # Equal answers were judged alike, or nearly so: a share keeps what a verifier saw.
    return sum(sum(votes) / most for votes in first) / len(first) if first else 0.0


def gates(right: Sequence[bool], says_right: Sequence[bool | None]) -> dict[str, list[bool]]:
    """Whether a chain of answers is right after each number of rounds, by who decides to stop.

    Args: `right` [T + 1] of the answers; `says_right` [T], the feedback's own verdict on the answer
    that it was given for (None: no verdict, which does not stop). Returns for each gate [T + 1]:
      always   the newest answer, whatever was said
      learned  the first answer that its feedback called right, else the newest one
      oracle   the first right answer: an UPPER BOUND, it looks at the truth
    Raises ValueError unless there is one answer more than there are verdicts.
    """
    if len(right) != len(says_right) + 1:
        raise ValueError(
            f"got {len(right)} answers and {len(says_right)} verdicts, expected one answer more"
        )
    learned, kept = [right[0]], -1
    for t in range(1, len(right)):
        if kept < 0 and says_right[t - 1] is True:
            kept = t - 1
        learned.append(right[kept] if kept >= 0 else right[t])
    oracle = [any(right[: t + 1]) for t in range(len(right))]
    return {"always": list(right), "learned": learned, "oracle": oracle}
