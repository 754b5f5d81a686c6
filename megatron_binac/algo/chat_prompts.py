"""What each turn is asked of a model that was tuned to chat, in its own template.

    attempt    user: x
    feedback   user: x, y0 and what is wanted of a critic
    revision   user: x; assistant: y0; user: z and what is wanted of a second answer

A model family differs in its template, a task in its words. As in `prompts.py` a sampled turn is
spliced in as the ids that were sampled where both roles share a tokenizer; and what a problem or a
model says is text, whatever it spells: it cannot end a turn or begin one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from megatron_binac.algo.prompts import shares
from megatron_binac.types import Prompt

if TYPE_CHECKING:
    from megatron_binac.tokenizer import Tokenizer

Message = Mapping[str, str]
Render = Callable[[Sequence[Message]], str]
"""Messages {"role": ..., "content": ...} to the text that ends where the answer begins."""
PROBLEM, ANSWER, FEEDBACK = "\ue000x\ue001", "\ue000y\ue001", "\ue000z\ue001"
"""Stand for the three texts while a template is filled in; no text of a template holds them."""
_PLACES = re.compile("(" + "|".join((PROBLEM, ANSWER, FEEDBACK)) + ")")


class Words(Protocol):
    """What a task says to the two roles (`tasks.base.Wording`)."""

    @property
    def criticise(self) -> str: ...

    @property
    def revise(self) -> str: ...


def plain_render(messages: Sequence[Message]) -> str:
    """For a model without a chat template: speakers by name, paragraphs between them."""
    names = {"user": "Question", "assistant": "Answer"}
    said = [f"{names[m['role']]}: {m['content']}" for m in messages]
    return "\n\n".join([*said, "Answer:"])


class ChatTemplate:
    """Builds the prompt of every turn in a chat format. Turns come without their end token.

    Where a prompt would pass `max_prompt_tokens`, the problem keeps its head, answer and feedback
    their tails; such prompts are counted in `num_truncated`. `prompt.gold` is not read.

    Example: ``ChatTemplate(tokenizer, tokenizer.render, task.wording).attempt_ids(prompt)``
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        render: Render,
        encode_markup: Callable[[str], list[int]],
        words: Words,
        *,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """`encode_markup` reads the markers of the template as such, `tokenizer.encode` does not.

        ValueError where the template drops what it is given, or leaves no room for the texts.
        """
        asked = f"{PROBLEM}\n\nA student answered:\n\n{ANSWER}\n\n{words.criticise}"
        again = f"Feedback on your answer:\n\n{FEEDBACK}\n\n{words.revise}"
        question = {"role": "user", "content": PROBLEM}
        conversations: dict[str, list[Message]] = {
            "attempt": [question],
            "feedback": [{"role": "user", "content": asked}],
            "revision": [
                question,
                {"role": "assistant", "content": ANSWER},
                {"role": "user", "content": again},
            ],
        }
        self.tokenizer = tokenizer
        self.max_prompt_tokens = max_prompt_tokens
        self.num_truncated = 0
        """Prompts that were cut so far."""
        self._parts = {
            kind: _parts(kind, render(messages), messages, encode_markup)
            for kind, messages in conversations.items()
        }
        longest = max(sum(len(p) for p in ps if isinstance(p, list)) for ps in self._parts.values())
        if max_prompt_tokens is not None and max_prompt_tokens < longest + 16:
            raise ValueError(
                f"max_prompt_tokens is {max_prompt_tokens}, but the template alone takes "
                f"{longest}; use a model with a longer context or fewer new tokens"
            )

    def attempt_ids(self, prompt: Prompt) -> list[int]:
        """Prompt of an attempt."""
        return self._fill("attempt", prompt, {})

    def feedback_ids(self, prompt: Prompt, attempt_ids: Sequence[int]) -> list[int]:
        """Prompt of the critic's feedback on one attempt."""
        return self._fill("feedback", prompt, {ANSWER: attempt_ids})

    def revision_ids(
        self, prompt: Prompt, attempt_ids: Sequence[int], feedback_ids: Sequence[int]
    ) -> list[int]:
        """Prompt of the actor's second answer."""
        return self._fill("revision", prompt, {ANSWER: attempt_ids, FEEDBACK: feedback_ids})

    def _fill(self, kind: str, prompt: Prompt, said: Mapping[str, Sequence[int]]) -> list[int]:
        bodies = {PROBLEM: self.tokenizer.encode(prompt.text)}
        bodies |= {place: [int(i) for i in ids] for place, ids in said.items()}
        parts = self._parts[kind]
        places = [p for p in parts if isinstance(p, str)]
        lengths = [len(bodies[p]) for p in places]
        room = sum(lengths)
        if self.max_prompt_tokens is not None:
            room = self.max_prompt_tokens - sum(len(p) for p in parts if isinstance(p, list))
        keep = shares(lengths, room)
        self.num_truncated += keep != lengths
        ids: list[int] = []
        kept = iter(keep)
        for part in parts:
            if isinstance(part, list):
                ids += part
                continue
            body, num = bodies[part], next(kept)
            ids += body[:num] if part == PROBLEM else body[len(body) - num :]
        return ids


def _parts(
    kind: str, text: str, messages: Sequence[Message], encode_markup: Callable[[str], list[int]]
) -> list[list[int] | str]:
    """The template as ids, with the places of the texts between them."""
    wanted = [place for m in messages for place in _PLACES.findall(m["content"])]
    pieces = _PLACES.split(text)
    if pieces[1::2] != wanted:
        raise ValueError(
            f"the chat template does not show a {kind} as it should: {len(wanted)} texts were "
            f"expected and {len(pieces[1::2])} are in {text[:200]!r}; give a model with a template "
            "of user and assistant turns"
        )
    return [
        piece if place % 2 else encode_markup(piece)
        for place, piece in enumerate(pieces)
        if place % 2 or piece
    ]
