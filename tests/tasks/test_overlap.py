"""Shared runs of words between training and held-out texts, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_binac.tasks.data import DataTask, read_rows
from megatron_binac.tasks.overlap import Overlap, overlaps, task_overlaps, words
from megatron_binac.types import Prompt, Split


def test_words() -> None:
    assert words("Half of $12$, it's 6.5!") == ["half", "of", "12", "it", "s", "6", "5"]


def test_shares_by_hand() -> None:
    train = ["a b c d", "x y z", "b c d e f"]
    held_out = ["a b c d e", "p q r s", "c d"]
    # Trigrams of the first: abc, bcd (0), bcd, cde (2): three of three. The third is one gram.
    assert overlaps(train, held_out, n=3) == [
        Overlap(held_out=0, share=1.0, train=0),
        Overlap(held_out=2, share=1.0, train=0),
    ]
    assert (
        overlaps(train[:1], held_out, n=3, at_least=0.6)
        == [
            Overlap(held_out=0, share=2 / 3, train=0),
            Overlap(held_out=2, share=1.0, train=0),
        ][::-1]
    )
    assert overlaps(train[:1], held_out[:2], n=3, at_least=0.7) == []
    assert overlaps([], held_out, n=3) == overlaps(train, [], n=3) == overlaps(train, [""]) == []


def test_statements_of_a_task_are_compared() -> None:
    words_of = {"train": ["a b c d"], "eval": ["x y z", "a b c"]}

    def read(split: Split) -> list[Prompt]:
        return [
            Prompt(id=f"{split}{i}", text=f"Please: {t}", gold="", task="t", meta={"statement": t})
            for i, t in enumerate(words_of[split])
        ]

    assert task_overlaps(DataTask("t", read), n=3) == [Overlap(held_out=1, share=1.0, train=0)]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="got n 0"):
        overlaps([], [], n=0)


def test_gsm8k_splits_share_little(data_dir: Path) -> None:
    train, held_out = (
        [str(row["question"]) for row in read_rows(data_dir / f"gsm8k_{split}.jsonl")]
        for split in ("train", "test")
    )
    found = overlaps(train, held_out, n=13, at_least=0.5)
    assert [(o.held_out, o.train, round(o.share, 3)) for o in found] == [(602, 1314, 0.538)]
    assert held_out[602].startswith("A plane travels 1200 miles in 3 hours. At the same rate")
    assert train[1314].startswith("A train travels 270 miles in 3 hours. At the same rate")
