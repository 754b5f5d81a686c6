"""The cursor over a task's prompts, the tokenizer's corpus, and verdict words."""

from __future__ import annotations

import json

import pytest

from megatron_binac.tasks.base import Cursor, corpus, parse_verdict
from megatron_binac.tasks.checksum import Checksum
from megatron_binac.types import Grade, Prompt, Split


class Finite:
    """A task of `num` items whose text is their index."""

    name = "finite"

    def __init__(self, num: int) -> None:
        self.num = num

    def size(self, split: Split) -> int | None:
        return self.num

    def prompt(self, split: Split, index: int) -> Prompt:
        if not 0 <= index < self.num:
            raise IndexError(index)
        return Prompt(id=f"finite/{split}/{index}", text=str(index), gold="", task=self.name)

    def grade(self, prompt: Prompt, text: str) -> Grade:
        return Grade(score=0.0, parsed=None)

    def leaks(self, prompt: Prompt, attempt_text: str, feedback_text: str) -> bool:
        return False

    def verdict(self, feedback_text: str) -> bool | None:
        return None


def texts(prompts: list[Prompt]) -> list[str]:
    return [p.text for p in prompts]


@pytest.mark.parametrize("task", [Finite(10), Checksum()])
@pytest.mark.parametrize("taken", [0, 1, 9, 10, 11, 25])
def test_a_resume_goes_on_where_the_cursor_stood(task: Finite | Checksum, taken: int):
    """At the border of an epoch as well: the next batch, not nothing (case 24)."""
    straight = Cursor(task, "train", seed=3)
    straight.take(taken)
    state = json.loads(json.dumps(straight.state()))
    resumed = Cursor(task, "train", seed=3)
    resumed.take(4)  # wherever it stood before
    resumed.restore(state)
    assert resumed.take(17) == straight.take(17)
    # A second save after a resume.
    again = Cursor(task, "train", seed=3)
    again.restore(resumed.state())
    assert again.take(5) == straight.take(5)


def test_each_epoch_holds_every_item_once_in_another_order():
    cursor = Cursor(Finite(20), "train", seed=1)
    epochs = [texts(cursor.take(20)) for _ in range(3)]
    for epoch in epochs:
        assert sorted(map(int, epoch)) == list(range(20))
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != [str(i) for i in range(20)]
    assert epochs[0] == texts(Cursor(Finite(20), "train", seed=1).take(20))
    assert epochs[0] != texts(Cursor(Finite(20), "train", seed=2).take(20))


def test_a_batch_over_the_border_of_an_epoch_is_full_and_its_ids_differ():
    cursor = Cursor(Finite(3), "train", seed=1)
    batch = cursor.take(8)
    assert len(batch) == 8
    assert len({p.id for p in batch}) == 8
    assert [p.id.partition("@")[2] for p in batch] == ["", "", "", "1", "1", "1", "2", "2"]


def test_an_endless_task_is_taken_in_its_own_order():
    task = Checksum()
    assert Cursor(task, "train", seed=9).take(5) == [task.prompt("train", i) for i in range(5)]


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (Cursor(Finite(11), "train", seed=3), "size"),
        (Cursor(Finite(10), "train", seed=4), "seed"),
        (Cursor(Finite(10), "eval", seed=3), "split"),
        (Cursor(Checksum(), "train", seed=3), "task"),
    ],
)
def test_a_state_of_other_data_is_refused(other: Cursor, word: str):
    state = Cursor(Finite(10), "train", seed=3).state()
    with pytest.raises(ValueError, match=f"the saved cursor has {word}"):
        other.restore(state)


def test_an_empty_split_is_refused():
    with pytest.raises(ValueError, match="no items in its split 'train'"):
        Cursor(Finite(0), "train", seed=1)


def test_the_corpus_holds_problems_and_what_the_speakers_say():
    lines = list(corpus(Checksum(), 30))
    assert any(line.endswith(" ok") for line in lines)
    assert any(line.endswith(" off") for line in lines)
    assert Checksum().prompt("train", 29).text in lines
    assert list(corpus(Finite(4), 30)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Verdict: correct", True),
        ("This is incorrect.", False),
        ("not correct", False),
        ("INCORRECT at first sight, but correct", True),
        ("correctly set up", None),
        ("", None),
    ],
)
def test_verdict_words_are_whole_and_the_last_one_counts(text: str, expected: bool | None):
    assert parse_verdict(text, ["correct"], ["incorrect", "not correct"]) is expected
