"""Rounds of feedback: who sees what, what is written, and that a second call continues."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from helpers_toy import JUNK, ONE, ZERO, ToyTokenizer, Xor

from megatron_binac import run_folder
from megatron_binac.algo.prompts import Template
from megatron_binac.rollout.rounds import (
    ITEMS,
    SETTINGS,
    RoundSettings,
    Seat,
    claim,
    load_settings,
    read_items,
    run_rounds,
)
from megatron_binac.rollout.scripted_engine import Script, ScriptedEngine
from megatron_binac.types import Prompt, Sampling, Split

Answer = tuple[list[int], list[float]]
TWO_ROUNDS = RoundSettings(
    model="toy",
    task="xor",
    rounds=2,
    num_prompts=6,
    max_tokens=2,
    max_feedback_tokens=1,
    batch=4,
)
END, USER, ACTOR, CRITIC = 4, 1, 2, 3


def seat(script: Script, tokenizer: ToyTokenizer) -> Seat:
    return Seat(
        name="toy",
        engine=ScriptedEngine(script),
        tokenizer=tokenizer,
        template=Template(tokenizer),
        end_ids=frozenset([END]),
        num_parameters=0,
    )


def pair(actor: Script, critic: Script) -> tuple[Seat, Seat]:
    shared = ToyTokenizer()
    return seat(actor, shared), seat(critic, shared)


def follower(prompt: np.ndarray, seed: int, sampling: Sampling) -> Answer:
    """First 0; then what the feedback says."""
    said = ZERO if len(prompt) == 4 else int(prompt[-3])
    return [said, END], [0.0, 0.0]


def knower(prompt: np.ndarray, seed: int, sampling: Sampling) -> Answer:
    return [ONE if prompt[1] != prompt[2] else ZERO], [0.0]


def asked(seat: Seat) -> list[list[int]]:
    assert isinstance(seat.engine, ScriptedEngine)
    return [p.tolist() for prompts, _, _ in seat.engine.asked for p in prompts]


def seeds(seat: Seat) -> list[int]:
    assert isinstance(seat.engine, ScriptedEngine)
    return [s for _, found, _ in seat.engine.asked for s in found]


@dataclass(frozen=True, kw_only=True)
class Zeros(Xor):
    """The problem 00 every time; the gold answer may be anything."""

    gold: str = "0"

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(id=f"zeros/{index}", text="00", gold=self.gold, task="zeros")


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    with run_folder.locked(tmp_path), pytest.raises(ValueError, match="in use by process"):
        run_rounds(*pair(follower, knower), Xor(), TWO_ROUNDS, tmp_path)
    assert len(run_rounds(*pair(follower, knower), Xor(), TWO_ROUNDS, tmp_path)) == 6


def test_an_item_holds_all_rounds(tmp_path: Path) -> None:
    items = run_rounds(*pair(follower, knower), Xor(), TWO_ROUNDS, tmp_path)
    assert [i["id"] for i in items] == [f"xor/eval/{n}" for n in range(6)]
    for item in items:
        first, second, third = item["answers"]
        assert (first["text"], first["score"]) == ("0", float(item["gold"] == "0"))
        assert second["text"] == third["text"] == item["gold"]
        assert (second["score"], second["tokens"], second["finish"]) == (1.0, 2, "stop")
        assert [z["text"] for z in item["feedbacks"]] == [item["gold"]] * 2
        assert item["feedbacks"][0]["leak"] is (item["gold"] == "1")
        assert item["feedbacks"][0]["verdict"] is None
        assert item["shortened"] == 0
    assert {i["gold"] for i in items} == {"0", "1"}
    held = [json.loads(line) for line in (tmp_path / ITEMS).read_text().splitlines()]
    assert held == items


def test_a_round_sees_the_newest_answer_and_the_feedback_on_it(tmp_path: Path) -> None:
    def counting(prompt: np.ndarray, seed: int, sampling: Sampling) -> Answer:
        """0, then 1, then ?: one more than the answer that it is shown."""
        after = {ZERO: ONE, ONE: JUNK}
        return [ZERO if len(prompt) == 4 else after[int(prompt[4])], END], [0.0, 0.0]

    def repeating(prompt: np.ndarray, seed: int, sampling: Sampling) -> Answer:
        return [int(prompt[4])], [0.0]

    actor, critic = pair(counting, repeating)
    (item,) = run_rounds(actor, critic, Zeros(), replace(TWO_ROUNDS, num_prompts=1), tmp_path)
    assert [y["text"] for y in item["answers"]] == ["0", "1", "?"]
    assert [z["text"] for z in item["feedbacks"]] == ["0", "1"]
    problem = [USER, ZERO, ZERO, ACTOR]
    assert asked(critic) == [[*problem, y, END, CRITIC] for y in (ZERO, ONE)]
    revisions = [[*problem, y, END, CRITIC, y, END, ACTOR] for y in (ZERO, ONE)]
    assert asked(actor) == [problem, *revisions]


def test_what_is_asked_does_not_depend_on_the_gold_answer(tmp_path: Path) -> None:
    found = []
    for gold in ("0", "?"):
        folder = tmp_path / f"gold-{len(found)}"
        folder.mkdir()
        seats = pair(follower, knower)
        run_rounds(*seats, Zeros(gold=gold), TWO_ROUNDS, folder)
        found.append([(asked(s), seeds(s)) for s in seats])
    assert found[0] == found[1]


def test_samples_draw_with_seeds_of_their_own_whatever_the_batch(tmp_path: Path) -> None:
    by_batch = []
    for batch in (1, 5, 100):
        (tmp_path / str(batch)).mkdir()
        actor, critic = pair(follower, knower)
        settings = replace(TWO_ROUNDS, samples=3, batch=batch)
        items = run_rounds(actor, critic, Xor(), settings, tmp_path / str(batch))
        assert [(i["id"], i["sample"]) for i in items] == [
            (f"xor/eval/{n}", s) for n in range(6) for s in range(3)
        ]
        assert len(set(seeds(actor))) == 6 * 3 * 3
        by_batch.append((sorted(seeds(actor)), sorted(seeds(critic))))
    assert by_batch[0] == by_batch[1] == by_batch[2]
    (tmp_path / "other").mkdir()
    actor, critic = pair(follower, knower)
    run_rounds(actor, critic, Xor(), replace(TWO_ROUNDS, seed=2), tmp_path / "other")
    assert not set(seeds(actor)) & set(by_batch[0][0])


class Killed(BaseException):
    pass


@pytest.mark.parametrize("torn", [b"", b'{"id": "xor/eval/5", "sam'], ids=["whole", "torn"])
def test_a_second_call_continues(tmp_path: Path, torn: bytes) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    items = run_rounds(*pair(follower, knower), Xor(), TWO_ROUNDS, whole)
    num_calls = 0

    def dying(prompt: np.ndarray, seed: int, sampling: Sampling) -> Answer:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 14:
            raise Killed
        return follower(prompt, seed, sampling)

    with pytest.raises(Killed):
        run_rounds(*pair(dying, knower), Xor(), TWO_ROUNDS, broken)
    with open(broken / ITEMS, "ab") as file:
        file.write(torn)
    assert len(read_items(broken)) == 4
    actor, critic = pair(follower, knower)
    seen: list[tuple[int, int]] = []
    again = run_rounds(
        actor, critic, Xor(), TWO_ROUNDS, broken, lambda done, total: seen.append((done, total))
    )
    assert again == items
    assert (broken / ITEMS).read_bytes() == (whole / ITEMS).read_bytes()
    assert seen[-1] == (6, 6)
    # A third call asks nobody.
    actor, critic = pair(follower, knower)
    assert run_rounds(actor, critic, Xor(), TWO_ROUNDS, broken) == items
    assert asked(actor) == asked(critic) == []


def test_more_problems_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    run_rounds(*pair(follower, knower), Xor(), replace(TWO_ROUNDS, num_prompts=2), tmp_path)
    actor, critic = pair(follower, knower)
    items = run_rounds(actor, critic, Xor(), TWO_ROUNDS, tmp_path)
    assert len(items) == 6
    assert len(asked(actor)) == 4 * 3


def test_what_fails_is_said_and_does_not_end_the_others(tmp_path: Path) -> None:
    def some_fail(prompt: np.ndarray, seed: int, sampling: Sampling) -> Answer | None:
        return None if prompt[1] == ONE else follower(prompt, seed, sampling)

    task = Xor(breaks_on="1")
    items = run_rounds(*pair(some_fail, knower), task, TWO_ROUNDS, tmp_path)
    for n, item in enumerate(items):
        text = task.prompt("eval", n).text
        failed = [a["failed"] for a in item["answers"]]
        # The engine gives none for problems that begin with 1; the verifier breaks on the answer 1.
        assert failed == ([True] * 3 if text[0] == "1" else [False, text == "01", text == "01"])
    assert any(i["answers"][0]["failed"] for i in items)


def test_a_critic_with_another_vocabulary_reads_the_text(tmp_path: Path) -> None:
    class Shifted(ToyTokenizer):
        """The same texts by other ids."""

        def encode(self, text: str) -> list[int]:
            return [100 + i for i in super().encode(text)]

        def decode(self, ids: Sequence[int]) -> str:
            return super().decode([i - 100 for i in ids])

    def other(prompt: np.ndarray, seed: int, sampling: Sampling) -> Answer:
        return [100 + (ONE if prompt[1] != prompt[2] else ZERO)], [0.0]

    actor, critic = seat(follower, ToyTokenizer()), seat(other, Shifted())
    items = run_rounds(actor, critic, Xor(), TWO_ROUNDS, tmp_path)
    assert [i["answers"][1]["text"] for i in items] == [i["gold"] for i in items]
    assert {p[4] for p in asked(critic)} <= {100 + ZERO, 100 + ONE}
    assert {p[7] for p in asked(actor) if len(p) > 4} <= {ZERO, ONE}


def test_equal_answers_are_judged_once(tmp_path: Path) -> None:
    judged: list[tuple[str, str]] = []

    class Counting(Xor):
        def grade(self, prompt, text):  # type: ignore[no-untyped-def]
            judged.append((prompt.id, text))
            return super().grade(prompt, text)

    settings = replace(TWO_ROUNDS, samples=8, num_prompts=2, batch=100)
    run_rounds(*pair(follower, knower), Counting(), settings, tmp_path)
    assert len(judged) == 2 * 3


def test_the_critic_sees_more_only_where_the_task_says_so(tmp_path: Path) -> None:
    class Observed(Zeros):
        def observe(self, prompt, attempt_text):  # type: ignore[no-untyped-def]
            return attempt_text * 3

    class Encoder(ToyTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.replace("\n", ""))

    shared = Encoder()
    actor, critic = seat(follower, shared), seat(knower, shared)
    settings = replace(TWO_ROUNDS, num_prompts=1, rounds=1)
    run_rounds(actor, critic, Observed(), settings, tmp_path)
    assert asked(critic) == [[USER, ZERO, ZERO, *[ZERO] * 3, ACTOR, ZERO, END, CRITIC]]
    assert asked(actor)[1][:4] == [USER, ZERO, ZERO, ACTOR]


def test_a_folder_belongs_to_its_settings(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "eval"
    claim(folder, TWO_ROUNDS)
    claim(folder, replace(TWO_ROUNDS, batch=9))  # changes no number
    assert load_settings(folder) == TWO_ROUNDS
    with pytest.raises(ValueError, match=r"seed 1, not 2.*pass another --out"):
        claim(folder, replace(TWO_ROUNDS, seed=2))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="holds no evaluation"):
        claim(tmp_path, TWO_ROUNDS)
    with pytest.raises(ValueError, match="holds no evaluation"):
        claim(tmp_path / "file", TWO_ROUNDS)
    assert (tmp_path / "file").read_text() == "mine"
    (folder / SETTINGS).write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        claim(folder, TWO_ROUNDS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": -1}, "rounds is -1, expected 0 or more"),
        ({"samples": 0}, "samples is 0, expected 1 or more"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 0.0, "samples": 2}, "2 times the same answer"),
        ({"precision": "fp8"}, "expected auto, fp32 or bf16"),
    ],
)
def test_settings_are_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TWO_ROUNDS, **changes)


def test_how_many_problems_there_are(tmp_path: Path) -> None:
    class Few(Xor):
        def size(self, split: Split) -> int | None:
            return 3

    seats = pair(follower, knower)
    with pytest.raises(ValueError, match="say how many: --num-prompts"):
        run_rounds(*seats, Xor(), replace(TWO_ROUNDS, num_prompts=0), tmp_path)
    with pytest.raises(ValueError, match="holds out 3 problems"):
        run_rounds(*seats, Few(), TWO_ROUNDS, tmp_path)
    assert len(run_rounds(*seats, Few(), replace(TWO_ROUNDS, num_prompts=0), tmp_path)) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"broken": 1}', r"items\.jsonl:2 is damaged, it is no item.*KeyError"),
        ("not json", r"items\.jsonl:2 is damaged"),
        ("[1]", r"items\.jsonl:2 is damaged"),
        ('{"id": "a", "sample": 0}', r"items\.jsonl:2 is damaged, sample 0 of 'a' is there twice"),
    ],
)
def test_a_foreign_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "items.jsonl").write_text('{"id": "a", "sample": 0}\n' + line + "\n")
    with pytest.raises(ValueError, match=words):
        read_items(tmp_path)
