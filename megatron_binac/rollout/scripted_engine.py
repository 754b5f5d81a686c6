"""An engine that answers by a function: for tests of what uses engines. No run is made with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_binac.types import Completion, Sampling

Script = Callable[[np.ndarray, int, Sampling], tuple[Sequence[int], Sequence[float]] | None]
"""(prompt ids, seed, sampling) -> (ids, log-probs) of the answer, or None where this one fails."""


class ScriptedEngine:
    """Answers each prompt by `script`, on every rank alike, and keeps what it was asked.

    Example: ``ScriptedEngine(lambda prompt, seed, sampling: ([int(prompt[-1]), 4], [-0.5, -0.1]))``
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.version = 0
        self.is_closed = False
        self.asked: list[tuple[list[np.ndarray], list[int], Sampling]] = []
        """The arguments of every call of `generate`, in order."""

    def generate(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """See `Engine.generate`. Raises ValueError where an answer is longer than allowed."""
        self.asked.append((list(prompts), list(seeds), sampling))
        return [
            self._answer(prompt, seed, sampling)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def publish(self, version: int) -> None:
        self.version = version

    def close(self) -> None:
        self.is_closed = True

    def _answer(self, prompt: np.ndarray, seed: int, sampling: Sampling) -> Completion:
        said = self.script(prompt, seed, sampling)
        ids, logprobs = ([], []) if said is None else said
        if len(ids) > sampling.max_tokens or len(ids) != len(logprobs):
            raise ValueError(
                f"the script gave {len(ids)} ids and {len(logprobs)} log-probs, expected at most "
                f"{sampling.max_tokens} and as many log-probs; change the script or max_tokens"
            )
        stopped = len(ids) > 0 and int(ids[-1]) == sampling.stop_id
        return Completion(
            ids=np.asarray(ids, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            finish="failed" if said is None else "stop" if stopped else "length",
            version=self.version,
        )
