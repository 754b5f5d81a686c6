"""What the loop needs of anything that samples: ids in, ids and log-probs out, a version on every
answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_binac.types import Completion, Sampling


class Engine(Protocol):
    """The sampling copy of one role.

    `generate` is collective: every rank of the job calls it with the same lists and gets the same
    complete list back, in order. A sample depends on its prompt, its seed and the weights, not on
    what it is batched with. One prompt that fails gives a completion with finish "failed", never
    an exception for all.

    An engine whose `tells_endings` is True takes `ended` as well, a function of a prompt's number
    and its completion, and calls it as soon as an answer is there: once for each answer, on a rank
    of the engine's choice. One that holds on to answers that are to be continued has `forget`,
    which is called when they have been.
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
