"""What each turn is asked: prompts as token ids, with sampled turns spliced in as they are.

    attempt    <|user|> x <|actor|>
    feedback   <|user|> x <|actor|> y0 <|end|> <|critic|>
    revision   <|user|> x <|actor|> y0 <|end|> <|critic|> z <|end|> <|actor|>

Only the problem's text is ever encoded. A sampled turn is not, since other ids may spell the same
text and the log-probs belong to the sampled ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_binac.types import Prompt

if TYPE_CHECKING:
    from megatron_binac.tasks.base import Example
    from megatron_binac.tokenizer import Tokenizer

USER, ACTOR, CRITIC = "<|user|>", "<|actor|>", "<|critic|>"


class Template:
    """Builds the prompt of every turn. Turns may be given with their end token or without.

    Where a prompt would pass `max_prompt_tokens`, the problem keeps its head and each turn its
    tail; such prompts are counted in `num_truncated`. `prompt.gold` is not read.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_prompt_tokens: int | None = None) -> None:
        if max_prompt_tokens is not None and max_prompt_tokens < 16:
            raise ValueError(
                f"max_prompt_tokens is {max_prompt_tokens}, expected 16 or more; raise the model's "
                "max_sequence_length or lower rollout.max_*_tokens"
            )
        self.tokenizer = tokenizer
        self.max_prompt_tokens = max_prompt_tokens
        self.num_truncated = 0
        """Prompts that were cut so far."""
        self._user, self._actor, self._critic = (
            tokenizer.token_id(piece) for piece in (USER, ACTOR, CRITIC)
        )

    def attempt_ids(self, prompt: Prompt) -> list[int]:
        """Prompt of an attempt."""
        return self._join(prompt, [], self._actor)

    def feedback_ids(self, prompt: Prompt, attempt_ids: Sequence[int]) -> list[int]:
        """Prompt of the critic's feedback on one attempt."""
        return self._join(prompt, [(self._actor, attempt_ids)], self._critic)

    def revision_ids(
        self, prompt: Prompt, attempt_ids: Sequence[int], feedback_ids: Sequence[int]
    ) -> list[int]:
        """Prompt of the actor's second answer."""
        turns = [(self._actor, attempt_ids), (self._critic, feedback_ids)]
        return self._join(prompt, turns, self._actor)

    def example_ids(self, example: Example) -> tuple[list[int], list[bool]]:
        """Ids of a supervised conversation, and which of them are targets: [num_tokens] each."""
        markers = {"user": self._user, "actor": self._actor, "critic": self._critic}
        ids: list[int] = []
        is_target: list[bool] = []
        for segment in example:
            spoken = self.tokenizer.encode(segment.text)
            if segment.speaker != "user":
                spoken = [*spoken, self.tokenizer.end_id]
            ids += [markers[segment.speaker], *spoken]
            is_target += [False] + [segment.is_target] * len(spoken)
        return ids, is_target

    def _join(
        self, prompt: Prompt, turns: Sequence[tuple[int, Sequence[int]]], next_speaker: int
    ) -> list[int]:
        end = self.tokenizer.end_id
        problem = self.tokenizer.encode(prompt.text)
        bodies = [_without_end(ids, end) for _, ids in turns]
        lengths = [len(problem), *map(len, bodies)]
        room = sum(lengths)
        if self.max_prompt_tokens is not None:
            room = self.max_prompt_tokens - 2 - 2 * len(turns)
        keep = shares(lengths, room)
        self.num_truncated += keep != lengths
        ids = [self._user, *problem[: keep[0]]]
        for (marker, _), body, kept in zip(turns, bodies, keep[1:], strict=True):
            # In a context the end token also closes a turn that was cut by its length limit.
            ids += [marker, *body[len(body) - kept :], end]
        return [*ids, next_speaker]


_QUOTE = re.compile(r'([+-])"((?:[^"\\\\]|\\\\.)*)"')


def parse_quotes(text: str) -> list[tuple[str, int]]:
    r"""Signed quotes of a feedback: ``+"..."`` is good, ``-"..."`` poor; a backslash keeps a quote
    sign inside.

    Example: ``parse_quotes('fine: +"x = 2" but -"so x is odd"') == [("x = 2", 1), ("so x is odd",
    -1)]``
    """
    return [
        (re.sub(r"\\(.)", r"\1", quote), 1 if sign == "+" else -1)
        for sign, quote in _QUOTE.findall(text)
    ]


def _without_end(ids: Sequence[int], end: int) -> list[int]:
    out = [int(i) for i in ids]
    return out[:-1] if out and out[-1] == end else out


def shares(lengths: list[int], room: int) -> list[int]:
    """Tokens that each part keeps: short parts whole, long ones an equal share of the rest."""
    keep = list(lengths)
    waiting = sorted(range(len(lengths)), key=lambda i: lengths[i])
    while waiting:
        part = waiting.pop(0)
        keep[part] = min(lengths[part], room // (len(waiting) + 1))
        room -= keep[part]
    return keep
