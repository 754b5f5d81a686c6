"""Records that cross floors: what is sampled, how it was graded, and the tree it belongs to.

Torch-free on purpose: tasks, engines, rollout and telemetry all speak in these. Token ids are kept
from the engine to the loss and are never made again from text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Split = Literal["train", "eval"]
Role = Literal["actor", "critic"]
TurnKind = Literal["attempt", "feedback", "revision"]
Finish = Literal["stop", "length", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem of a task.

    Example: ``Prompt(id="checksum/train/17", text="7+4+9+3+6", gold="9", task="checksum")``
    """

    id: str
    """Unique over the run and stable over restarts; groups are keyed by it, never by the text."""
    text: str
    """What the actor is asked."""
    gold: str
    """The verified answer (or the verifier's program). Only graders read it; no prompt may hold
    it."""
    task: str
    """Name of the task that grades it."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Task-specific facts, JSON-able (level, subject, options, ...)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """A verifier's verdict on one answer.

    Example: ``Grade(score=0.0, parsed="7", reason="gold is 9")``
    """

    score: float
    """Verified reward in [0, 1]; 0 where ``failed``."""
    parsed: str | None
    """The answer that was read from the text, None where there was none."""
    reason: str = ""
    """Why, in a few words."""
    failed: bool = False
    """The verifier itself broke (crash, timeout): not a wrong answer, and out of every
    statistic."""
    seconds: float = 0.0
    """Wall-clock time of the check."""


@dataclass(kw_only=True, slots=True)
class Turn:
    """One sampled text with the exact ids that were fed and sampled.

    Example: ``Turn(kind="attempt", prompt_ids=[5, 21, 6], ids=[30, 4], logprobs=[-1.2, -0.1],
    finish="stop", version=3, text="9")``
    """

    kind: TurnKind
    prompt_ids: np.ndarray
    """int32 [num_prompt_tokens]: everything the model saw."""
    ids: np.ndarray
    """int32 [num_tokens]: what it sampled, with the end token where it stopped by itself."""
    logprobs: np.ndarray
    """float32 [num_tokens]: log-prob of each sampled id at the sampling temperature, by the
    engine."""
    finish: Finish
    version: int
    """Number of published updates of the policy that sampled it."""
    text: str
    grade: Grade | None = None
    """Set for attempts and revisions."""
    advantage: float = 0.0
    """Credit of the whole turn, broadcast over its tokens."""
    token_advantages: np.ndarray | None = None
    """float32 [num_tokens] where the tokens of the turn have a credit of their own."""
    trainable: bool = True
    """False where the turn failed or its group has no variance: it adds nothing to the loss."""

    @property
    def reward(self) -> float:
        return 0.0 if self.grade is None else self.grade.score

    @property
    def failed(self) -> bool:
        return self.finish == "failed" or (self.grade is not None and self.grade.failed)


@dataclass(kw_only=True, slots=True)
class Tree:
    """All turns of one prompt: G attempts, F feedbacks for C of them, M revisions for each
    feedback.

    ``criticised[c]`` is the index of the attempt that ``feedbacks[c]`` speaks about and
    ``weights[c]`` its weight back to the natural mix (1 where attempts were not preferred by
    kind). ``revisions[c][f]`` are the M answers to ``feedbacks[c][f]``; ``probes`` has the same
    shape and holds what the adapted actor answered to the same text (V*), empty until the probe
    has run.
    """

    prompt: Prompt
    attempts: list[Turn]
    criticised: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    feedbacks: list[list[Turn]] = field(default_factory=list)
    revisions: list[list[list[Turn]]] = field(default_factory=list)
    probes: list[list[list[Turn]]] = field(default_factory=list)
    round: int = 0
    """0 for a tree that grew from the problem; n where its attempts are the revisions of round
    n - 1, and belong to that tree."""

    def turns(self, kind: TurnKind) -> list[Turn]:
        """All turns of one kind in tree order (attempt, then feedback, then revision)."""
        if kind == "attempt":
            return list(self.attempts)
        if kind == "feedback":
            return [z for zs in self.feedbacks for z in zs]
        return [y for ys_F in self.revisions for ys in ys_F for y in ys]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSequence:
    """One token sequence to learn from: context and sampled tokens in one row.

    Example: ``TrainSequence(ids=[5, 21, 6, 30, 4], mask=[0, 0, 0, 1, 1], advantage=0.4,
    logprobs=[nan, nan, nan, -1.2, -0.1])``
    """

    ids: np.ndarray
    """int32 [L]."""
    mask: np.ndarray
    """bool [L]: True on the tokens that are learned from. The first is always False: nothing
    scores it."""
    advantage: float | np.ndarray = 1.0
    """Credit of every masked token, or float32 [L] where each token has its own."""
    logprobs: np.ndarray | None = None
    """float32 [L]: the engine's log-prob of each id, nan where it sampled none; None for
    supervised text."""
    weight: float = 1.0
    """Factor of the row's whole loss."""

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.mask))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How an engine picks tokens.

    Example: ``Sampling(max_tokens=16, stop_id=4)``
    """

    max_tokens: int
    """Longest answer in tokens, the end token included."""
    stop_id: int
    """Sampling stops after this id."""
    temperature: float = 1.0
    """Of the distribution that is sampled, and of the log-probs that come back."""
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    """Take the likeliest token; the lowest id where several are."""
    continued: bool = False
    """Later prompts will begin with these prompts and answers: an engine may hold on to what it
    computed of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine answered to one prompt.

    Example: ``Completion(ids=[30, 4], logprobs=[-1.2, -0.1], finish="stop", version=3)``
    """

    ids: np.ndarray
    """int32 [num_tokens]."""
    logprobs: np.ndarray
    """float32 [num_tokens]: of the full distribution at the sampling temperature, before top-k and
    top-p."""
    finish: Finish
    version: int
