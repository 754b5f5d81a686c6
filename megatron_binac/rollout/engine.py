"""What the loop needs of anything that samples: ids in, ids and log-probs out, a version on every answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_binac.types import Completion, Sampling


class Engine(Protocol):
    """The sampling copy of one role.

    `generate` is collective: every rank of the job calls it with the same lists and gets the same complete
    list back, in order. A sample depends on its prompt, its seed and the weights, not on what it is batched
    with. One prompt that fails gives a completion with finish "failed", never an exception for all.
    """

    version: int
    """Number of published updates of the policy whose weights answer now."""

    def generate(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """One completion per prompt (int32 ids [num_prompt_tokens]) and 63-bit seed."""
        ...

    def publish(self, version: int) -> None:
        """From here on answer with the learner's weights as they stand, and call them `version`."""
        ...

    def close(self) -> None:
        """Give back what the engine holds; it is not used again."""
        ...


def uniforms(seeds_B: np.ndarray, step: int) -> np.ndarray:
    """One number in [0, 1) for each (seed, step): float64 [B], the same in any batch and on any machine.

    SplitMix64 of Steele, Lea and Flood (OOPSLA 2014), as a counter-based generator.
    """
    with np.errstate(over="ignore"):
        x = seeds_B.astype(np.uint64) + np.uint64(step + 1) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
