"""The numbers of an evaluation, from items that can be counted by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_binac.algo.metrics import wilson_interval
from megatron_binac.rollout.standings import answer_kinds, standings, table

FAILED = "!"


def item(name: str, sample: int, answers: str, verdicts: str = "") -> dict[str, Any]:
    """`answers`: r is right, ! failed, other letters are wrong answers; `verdicts`: y, n or ?."""
    return {
        "id": name,
        "sample": sample,
        "gold": "r",
        "shortened": 1,
        "answers": [
            {
                "text": a,
                "parsed": None if a in "!-" else a,
                "score": float(a == "r"),
                "failed": a == FAILED,
                "reason": "",
                "tokens": 2,
                "finish": "length" if a == "-" else "stop",
            }
            for a in answers
        ],
        "feedbacks": [
            {
                "text": v,
                "verdict": {"y": True, "n": False, "?": None}[v],
                "leak": v == "?",
                "tokens": 3,
                "finish": "stop",
            }
            for v in verdicts
        ],
    }


def found(items: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    return standings(items, same_answer=lambda a, b: a == b, seed=0, **options)


def test_rounds_and_gates_by_hand() -> None:
    items = [
        item("p", 0, "wr", "n"),  # fixed
        item("q", 0, "rw", "y"),  # broken, but the verdict would have kept it
        item("s", 0, "ww", "y"),  # kept by a wrong verdict
        item("t", 0, "rr", "?"),
    ]
    first, second = found(items)["rounds"]
    assert {gate: first[gate]["value"] for gate in ("always", "learned", "oracle")} == {
        "always": 0.5, "learned": 0.5, "oracle": 0.5,
    }  # fmt: skip
    assert second["always"]["value"] == 0.5
    assert second["learned"]["value"] == 0.75
    assert second["oracle"]["value"] == 0.75
    assert (second["fix"], second["break"]) == (0.5, 0.5)
    feedback = found(items)["feedback"]
    # p: said wrong and was; q: said right and was; s: said right and was not.
    assert feedback["verdict_share"] == 0.75
    assert feedback["verdict_right"] == pytest.approx(2 / 3)
    assert feedback["says_right_share"] == pytest.approx(2 / 3)
    assert feedback["leak"] == 0.25


def test_one_sample_has_wilsons_interval_over_problems() -> None:
    items = [item(str(n), 0, "r" if n < 3 else "w") for n in range(10)]
    got, want = found(items)["rounds"][0]["always"], wilson_interval(3, 10)
    assert got == {"value": 0.3, "low": want.low, "high": want.high}
    # All wrong is not certainly 0.
    assert found([item(str(n), 0, "w") for n in range(10)])["rounds"][0]["always"]["high"] > 0.2


def test_samples_of_a_problem_are_no_further_problems() -> None:
    """Ten problems solved half of the time, a hundred samples each: the interval is of ten."""
    items = [item(str(n), s, "r" if (n + s) % 2 else "w") for n in range(10) for s in range(100)]
    even = found(items)["rounds"][0]["always"]
    assert even == {"value": 0.5, "low": 0.5, "high": 0.5}
    items = [item(str(n), s, "r" if n < 5 else "w") for n in range(10) for s in range(100)]
    split = found(items)["rounds"][0]["always"]
    assert split["value"] == 0.5
    assert split["high"] - split["low"] > 0.4


def test_pass_and_majority_at_k() -> None:
    items = [item("p", s, a) for s, a in enumerate("rrww")]
    items += [item("q", s, a) for s, a in enumerate("wwxr")]
    result = found(items)
    assert set(result["pass_at_k"]) == {"first"}
    passed = {k: e["value"] for k, e in result["pass_at_k"]["first"].items()}
    # p: 2 of 4, q: 1 of 4; of two: 1 - 1/6 and 1 - 3/6.
    assert passed == pytest.approx({"1": 0.375, "2": (5 / 6 + 1 / 2) / 2, "4": 1.0})
    voted = {k: e["value"] for k, e in result["maj_at_k"]["first"].items()}
    # Of four: p is a tie of r and w (1/2), q is w (0).
    assert voted["1"] == pytest.approx(0.375)
    assert voted["4"] == pytest.approx(0.25)


def test_three_samples_are_counted_up_to_three() -> None:
    items = [item("p", s, "r") for s in range(3)]
    assert list(found(items)["pass_at_k"]["first"]) == ["1", "2", "3"]


def test_a_task_without_votes_has_none() -> None:
    items = [item("p", s, "rr", "y") for s in range(2)]
    result = standings(items, same_answer=None, seed=0)
    assert result["maj_at_k"] == {}
    assert set(result["pass_at_k"]) == {"first", "last"}


def test_failed_chains_leave_every_number_and_are_counted() -> None:
    items = [item("p", 0, "r!", "y"), item("q", 0, "wr", "n"), item("s", 0, "!w", "y")]
    result = found(items)
    assert (result["num_problems"], result["num_chains"], result["num_failed"]) == (3, 3, 2)
    assert [r["always"]["value"] for r in result["rounds"]] == [0.0, 1.0]
    assert result["feedback"]["verdict_right"] == 1.0
    nothing = found([item("p", 0, "!")])
    assert math.isnan(nothing["rounds"][0]["always"]["value"])
    assert nothing["pass_at_k"]["first"] == {}


def test_tokens_and_cuts_are_counted() -> None:
    result = found([item("p", 0, "r-", "y"), item("q", 0, "ww", "n")])
    assert result["tokens"] == {"answers": 8, "feedbacks": 6}
    assert result["cut_answers_share"] == 0.25
    assert result["num_shortened_prompts"] == 2


def test_answers_are_told_apart_by_the_task() -> None:
    calls: list[tuple[str, str]] = []

    def same(one: str, other: str) -> bool:
        calls.append((one, other))
        return one.lower() == other.lower()

    kinds = answer_kinds(["a", "A", None, "b", "1", "1.0"], [False] * 4 + [True] * 2, same)
    assert kinds == [0, 0, None, 1, 2, 2]
    # Right answers are equal to the gold one; nobody has to be asked.
    assert all("1" not in pair for pair in calls)


def test_the_tasks_own_summary_gets_first_and_last_answers() -> None:
    from megatron_binac.types import Prompt

    prompt = Prompt(id="p", text="?", gold="r", task="t")
    items = [item("p", 0, "wr", "n")]
    result = found(
        items,
        prompts={"p": prompt},
        summarise=lambda pairs: {"said": [(p.gold, g.parsed) for p, g in pairs]},
    )
    assert result["first_answers"] == {"said": [("r", "w")]}
    assert result["last_answers"] == {"said": [("r", "r")]}


def test_the_table_says_what_was_found() -> None:
    items = [item(n, s, "wr", "n") for n in "pq" for s in range(2)]
    result = {
        "settings": {"task": "toy", "samples": 2},
        "actor": "a, 10 parameters",
        "critic": "b, 20 parameters",
        "standings": found(items),
    }
    text = table(result)
    assert "toy: 2 problems, 2 samples, 0 chains failed" in text
    assert "actor a, 10 parameters, critic b, 20 parameters" in text
    (line,) = [line for line in text.splitlines() if line.startswith("round 1")]
    assert line.count("100.0 [34.2, 100.0]") == 3
    assert "pass@k, last answers   1: 100.0" in text
    assert "oracle gate (bound)" in text
