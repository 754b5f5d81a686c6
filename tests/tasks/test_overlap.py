"""Shared runs of words between training and held-out texts, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_binac.tasks import build_task
from megatron_binac.tasks.overlap import Overlap, overlaps, task_overlaps, words


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


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="got n 0"):
        overlaps([], [], n=0)


def test_gsm8k_splits_share_little(data_dir: Path) -> None:
    task = build_task(
        "gsm8k",
        eval_data=str(data_dir / "gsm8k_test.jsonl"),
        train_data=str(data_dir / "gsm8k_train.jsonl"),
        instruction="",
    )
    found = task_overlaps(task, n=13, at_least=0.5)
    assert 0 < len(found) < 20
    assert all(0.5 <= o.share <= 1.0 for o in found)
