"""Grades on their way: what begins when, each answer once, and the same on every rank."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from helpers_ranks import run_ranks

from megatron_binac.rollout.judging import Judging
from megatron_binac.types import Grade, Prompt

PROMPTS = [Prompt(id=f"p{i}", text=str(i), gold=str(i), task="slow") for i in range(3)]
PAIRS = [(PROMPTS[i % 3], str(i % 4)) for i in range(24)]
WAIT = 60.0


class Inline:
    """A task that judges where it is called."""

    name = "inline"

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.threads: set[int] = set()
        self.lock = threading.Lock()

    def grade(self, prompt: Prompt, text: str) -> Grade:
        with self.lock:
            self.asked.append((prompt.id, text))
            self.threads.add(threading.get_ident())
        if text == "3":
            raise RuntimeError("the verifier broke")
        return Grade(score=float(text == prompt.gold), parsed=text)


class Apart(Inline):
    """A task that judges in processes of its own, so it says."""

    workers = 2


class Held(Apart):
    """One whose verdicts wait until the test lets them go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def grade(self, prompt: Prompt, text: str) -> Grade:
        self.begun.release()
        assert self.go.wait(WAIT)
        return super().grade(prompt, text)


def expected() -> list[float]:
    return [float(text == p.gold and text != "3") for p, text in PAIRS]


@pytest.mark.parametrize("task", [Inline(), Apart()], ids=["inline", "apart"])
def test_grades_are_in_order_and_equal_answers_are_judged_once(task: Inline) -> None:
    with Judging(task) as judging:  # type: ignore[arg-type]
        for prompt, text in PAIRS[5:11]:
            judging.hand_in(prompt, text)
        judging.share_out(PAIRS[9:20])
        grades = judging.finish(PAIRS)
    assert [g.score for g in grades] == expected()
    assert [g.failed for g in grades] == [text == "3" for _, text in PAIRS]
    assert "the verifier broke" in grades[3].reason
    assert sorted(task.asked) == sorted({(p.id, text) for p, text in PAIRS})


def test_only_who_judges_apart_begins_early() -> None:
    inline, held = Inline(), Held()
    with Judging(inline) as judging:  # type: ignore[arg-type]
        judging.hand_in(*PAIRS[0])
        judging.share_out(PAIRS)
        assert inline.asked == []
        judging.finish(PAIRS)
    assert inline.threads == {threading.get_ident()}
    with Judging(held) as judging:  # type: ignore[arg-type]
        judging.hand_in(*PAIRS[0])
        judging.hand_in(*PAIRS[1])
        # Both have begun, and nobody has asked for a grade.
        assert all(held.begun.acquire(timeout=WAIT) for _ in range(2))
        held.go.set()
        assert [g.score for g in judging.finish(PAIRS[:2])] == expected()[:2]
    assert threading.get_ident() not in held.threads


def test_an_error_beside_it_leaves_no_answer_to_judge() -> None:
    task = Held()
    with pytest.raises(ValueError, match="the engine broke"), Judging(task) as judging:  # type: ignore[arg-type]
        judging.share_out(PAIRS)
        assert all(task.begun.acquire(timeout=WAIT) for _ in range(2))
        task.go.set()
        raise ValueError("the engine broke")
    assert len(task.asked) <= 4  # those that had begun; of 12 the others never do


def judge_here() -> dict[str, Any]:
    """One of two ranks, which has heard of other answers than its neighbour, and of one of its."""
    import torch.distributed as dist

    from megatron_binac.models.parallel import start_distributed

    start_distributed()
    rank = dist.get_rank()

    class Own(Apart):
        def grade(self, prompt: Prompt, text: str) -> Grade:
            super().grade(prompt, "")
            return Grade(score=0.0, parsed=f"{text} by {rank}")

    task = Own()
    with Judging(task) as judging:  # type: ignore[arg-type]
        for at in (0, 1) if rank == 0 else (1, 2):
            judging.hand_in(*PAIRS[at])
        grades = judging.finish(PAIRS[:5])
    return {"parsed": [g.parsed for g in grades], "asked": len(task.asked)}


@pytest.mark.slow
def test_ranks_agree_on_who_judged_what() -> None:
    first, second = run_ranks(2, judge_here)
    # Rank 1 alone heard of the third; nobody of the last two, which are shared out.
    assert first["parsed"] == ["0 by 0", "1 by 0", "2 by 1", "3 by 0", "0 by 1"]
    assert second["parsed"] == first["parsed"]
    assert (first["asked"], second["asked"]) == (3, 3)
