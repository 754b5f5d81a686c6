"""Prompts of the turns: sampled ids are spliced and never spelled again, gold is never shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_binac.algo.prompts import Template
from megatron_binac.tasks.checksum import Checksum
from megatron_binac.types import Prompt


class Letters:
    """One id per letter, and one for the pair "ab", which encoding always prefers."""

    vocab_size = 128
    user, actor, critic, end_id, pad_id, ab = 1, 2, 3, 4, 0, 5

    def encode(self, text: str) -> list[int]:
        parts = text.split("ab")
        ids = [ord(c) for c in parts[0]]
        for part in parts[1:]:
            ids += [self.ab, *(ord(c) for c in part)]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("ab" if i == self.ab else chr(i) for i in ids)

    def token_id(self, piece: str) -> int:
        names = {"<|user|>": self.user, "<|actor|>": self.actor, "<|critic|>": self.critic}
        return {**names, "<|end|>": self.end_id}[piece]

    def offsets(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        raise AssertionError("no prompt needs offsets")


U, A, C, END, AB = Letters.user, Letters.actor, Letters.critic, Letters.end_id, Letters.ab
SEP = {U, A, C, END}


def prompt(text: str, gold: str = "~") -> Prompt:
    return Prompt(id="t/0", text=text, gold=gold, task="t")


def spell(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_the_layout_of_the_three_prompts():
    template = Template(Letters())
    x, y, z = prompt("xab"), spell("12"), spell("off")
    assert template.attempt_ids(x) == [U, ord("x"), AB, A]
    assert template.feedback_ids(x, y) == [U, ord("x"), AB, A, *y, END, C]
    assert template.revision_ids(x, y, z) == [U, ord("x"), AB, A, *y, END, C, *z, END, A]


def test_sampled_ids_stay_as_they_were_where_encoding_would_merge_them():
    template = Template(Letters())
    two, one = spell("ab"), [AB]
    assert template.tokenizer.decode(two) == template.tokenizer.decode(one)
    for ids in (two, one):
        assert template.feedback_ids(prompt("x"), ids)[3:-2] == ids
        assert template.revision_ids(prompt("x"), [ord("1")], ids)[6:-2] == ids


def test_a_turn_with_its_end_token_and_one_cut_short_make_the_same_context():
    template = Template(Letters())
    y, z = spell("12"), spell("off")
    whole = template.revision_ids(prompt("x"), [*y, END], [*z, END])
    assert whole == template.revision_ids(prompt("x"), y, z)
    assert whole.count(END) == 2


def test_only_the_last_end_token_is_taken_for_the_end():
    ids = Template(Letters()).feedback_ids(prompt("x"), [END, ord("1"), END, END])
    assert ids == [U, ord("x"), A, END, ord("1"), END, END, C]


def test_empty_turns_keep_their_places():
    assert Template(Letters()).revision_ids(prompt("x"), [], []) == [U, ord("x"), A, END, C, END, A]


def test_no_prompt_holds_gold():
    template = Template(Letters())
    x = prompt("xyz", gold="~~~")
    for ids in (
        template.attempt_ids(x),
        template.feedback_ids(x, spell("1")),
        template.revision_ids(x, spell("1"), spell("2")),
    ):
        assert ord("~") not in ids
        changed = Prompt(id=x.id, text=x.text, gold="other", task=x.task, meta={"gold": "~"})
        assert ids in (
            template.attempt_ids(changed),
            template.feedback_ids(changed, spell("1")),
            template.revision_ids(changed, spell("1"), spell("2")),
        )


def test_a_budget_keeps_the_head_of_the_problem_and_the_tails_of_turns():
    template = Template(Letters(), max_prompt_tokens=20)
    x, y, z = prompt("pqrstuvw"), spell("12345678"), spell("off")
    ids = template.revision_ids(x, y, z)
    # 6 ids are fixed, the short feedback stays whole, and 11 are left for two long parts.
    assert ids == [U, *spell("pqrst"), A, *spell("345678"), END, C, *z, END, A]
    assert len(ids) == 20
    assert template.num_truncated == 1


def test_prompts_that_fit_are_not_counted():
    template = Template(Letters(), max_prompt_tokens=16)
    template.revision_ids(prompt("x" * 4), spell("1234"), spell("12"))  # 16 exactly
    assert template.num_truncated == 0
    template.revision_ids(prompt("x" * 4), spell("1234"), spell("123"))
    template.attempt_ids(prompt("x" * 15))
    assert template.num_truncated == 2
    assert Template(Letters()).attempt_ids(prompt("x" * 1000)) == [U, *spell("x" * 1000), A]


@pytest.mark.parametrize("lengths", [(0, 0, 0), (3, 50, 3), (50, 3, 3), (50, 50, 50), (1, 20, 60)])
def test_a_budget_is_used_up_and_never_passed(lengths: tuple[int, int, int]):
    template = Template(Letters(), max_prompt_tokens=30)
    x, y, z = ("x" * lengths[0], spell("y" * lengths[1]), spell("z" * lengths[2]))
    ids = template.revision_ids(prompt(x), y, z)
    assert len(ids) == min(30, sum(lengths) + 6)
    assert [i for i in ids if i in SEP] == [U, A, END, C, END, A]


def test_a_budget_too_small_for_any_prompt_is_refused():
    with pytest.raises(ValueError, match="max_prompt_tokens is 15, expected 16 or more"):
        Template(Letters(), max_prompt_tokens=15)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_supervised_conversation_reads_as_the_prompts_do(role: str):
    template, task = Template(Letters()), Checksum()
    for index in range(30):
        example = task.supervised(role, index)  # type: ignore[arg-type]
        ids, is_target = template.example_ids(example)
        x, spoken = prompt(example[0].text), [spell(s.text) for s in example[1:]]
        context = {
            1: lambda x=x: template.attempt_ids(x),
            2: lambda x=x, s=spoken: template.feedback_ids(x, s[0]),
            3: lambda x=x, s=spoken: template.revision_ids(x, s[0], s[1]),
        }[len(spoken)]()
        assert ids == [*context, *spoken[-1], END]
        # Of the last turn every token is a target, the end token too, and nothing before it.
        assert is_target == [False] * len(context) + [True] * (len(spoken[-1]) + 1)
