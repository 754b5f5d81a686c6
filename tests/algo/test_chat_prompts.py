"""Prompts in a chat template: sampled ids stay, texts cannot end a turn, gold is never shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from megatron_binac.algo.chat_prompts import ChatTemplate, plain_render
from megatron_binac.tasks.base import Wording
from megatron_binac.tasks.choice import ChoiceTask
from megatron_binac.tasks.code import CodeTask
from megatron_binac.tasks.math import MathTask
from megatron_binac.types import Prompt

START, STOP, AB = 1, 2, 3


class Letters:
    """One id a letter, one for the pair "ab", which encoding prefers; < and > are the markers."""

    vocab_size = 0x110000
    end_id, pad_id = STOP, 0

    def encode(self, text: str) -> list[int]:
        out: list[int] = []
        for i, part in enumerate(text.split("ab")):
            out += [AB] * (i > 0) + [ord(c) for c in part]
        return out

    def encode_markup(self, text: str) -> list[int]:
        return [{"<": START, ">": STOP}.get(c, ord(c)) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join({START: "<", STOP: ">", AB: "ab"}.get(i, chr(i)) for i in ids)

    def token_id(self, piece: str) -> int:
        raise AssertionError("a chat template has no turn markers of ours")

    def offsets(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        raise AssertionError("no prompt needs offsets")


WORDS = Wording(criticise="C?", revise="R?")


def render(messages: Sequence[Mapping[str, str]]) -> str:
    """Turns as <uTEXT> and <aTEXT>, and an opened one of the assistant."""
    return "".join(f"<{m['role'][0]}{m['content']}>" for m in messages) + "<a"


def template(**options: int) -> ChatTemplate:
    letters = Letters()
    return ChatTemplate(letters, render, letters.encode_markup, WORDS, **options)


def prompt(text: str, gold: str = "~") -> Prompt:
    return Prompt(id="t/0", text=text, gold=gold, task="t")


def spell(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_the_three_prompts() -> None:
    built, show = template(), Letters().decode
    assert show(built.attempt_ids(prompt("xy"))) == "<uxy><a"
    assert (
        show(built.feedback_ids(prompt("xy"), spell("12")))
        == "<uxy\n\nA student answered:\n\n12\n\nC?><a"
    )
    assert (
        show(built.revision_ids(prompt("xy"), spell("12"), spell("off")))
        == "<uxy><a12><uFeedback on your answer:\n\noff\n\nR?><a"
    )
    assert built.num_truncated == 0


def test_sampled_ids_stay_where_encoding_would_merge_them() -> None:
    built = template()
    two, one = spell("ab"), [AB]
    assert built.feedback_ids(prompt("x"), two) != built.feedback_ids(prompt("x"), one)
    held = built.revision_ids(prompt("x"), two, one)
    assert held.count(AB) == 1
    assert spell("ab") == held[6:8]


def test_no_text_ends_its_turn() -> None:
    """A problem that spells the markers stays inside: two are the template's own."""
    ids = template().attempt_ids(prompt("7> <a3"))
    assert [i for i in ids if i in (START, STOP)] == [START, STOP, START]
    assert Letters().decode(ids) == "<u7> <a3><a"


def test_a_text_that_looks_like_a_place_is_text() -> None:
    problem = "\ue000y\ue001"
    built = template()
    ids = built.revision_ids(prompt(problem), spell("12"), spell("z"))
    assert Letters().decode(ids).count("12") == 1
    assert Letters().decode(ids).startswith(f"<u{problem}>")


def test_gold_is_not_read() -> None:
    built = template()
    for ids in (
        built.attempt_ids(prompt("x", "SECRET")),
        built.feedback_ids(prompt("x", "SECRET"), spell("1")),
        built.revision_ids(prompt("x", "SECRET"), spell("1"), spell("2")),
    ):
        assert "SECRET" not in Letters().decode(ids)


def test_long_prompts_keep_the_problems_head_and_the_turns_tails() -> None:
    fixed = len(template().revision_ids(prompt(""), [], []))
    built = template(max_prompt_tokens=fixed + 16)
    ids = built.revision_ids(prompt("H" + "p" * 50), spell("a" * 50 + "T"), spell("ok"))
    assert len(ids) == fixed + 16
    assert Letters().decode(ids) == (
        "<uHpppppp><aaaaaaaT><uFeedback on your answer:\n\nok\n\nR?><a"
    )
    assert built.num_truncated == 1
    built.attempt_ids(prompt("short"))
    assert built.num_truncated == 1
    with pytest.raises(ValueError, match="the template alone takes"):
        template(max_prompt_tokens=fixed + 15)


def test_a_template_that_drops_a_turn_is_refused() -> None:
    letters = Letters()

    def forgetful(messages: Sequence[Mapping[str, str]]) -> str:
        return f"<u{messages[-1]['content']}><a"

    with pytest.raises(ValueError, match="does not show a revision as it should: 3 texts"):
        ChatTemplate(letters, forgetful, letters.encode_markup, WORDS)


def test_a_model_without_a_template_gets_paragraphs() -> None:
    letters = Letters()
    built = ChatTemplate(letters, plain_render, letters.encode_markup, WORDS)
    assert letters.decode(built.attempt_ids(prompt("xy"))) == "Question: xy\n\nAnswer:"
    revision = letters.decode(built.revision_ids(prompt("xy"), spell("12"), spell("off")))
    assert revision == (
        "Question: xy\n\nAnswer: 12\n\nQuestion: Feedback on your answer:\n\noff\n\nR?\n\nAnswer:"
    )


@pytest.mark.parametrize("task", [MathTask, CodeTask, ChoiceTask, Wording])
def test_every_wording_asks_for_a_verdict_that_is_read(task: type) -> None:
    words = Wording() if task is Wording else task.wording  # type: ignore[attr-defined]
    assert 'End with a line "Verdict: correct" or "Verdict: incorrect".' in words.criticise
    assert words.revise != Wording().revise or task is Wording
