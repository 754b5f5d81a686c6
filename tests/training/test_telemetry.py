"""Metrics rows, truncation at resume, exact phase times, the full disk, the progress line."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_binac.config import Config, TrackConfig
from megatron_binac.training import telemetry as telemetry_module
from megatron_binac.training.telemetry import Clock, Telemetry, tree_record
from megatron_binac.types import Grade, Prompt, Tree, Turn

QUIET = Config(recipe="toy", num_steps=6, track=TrackConfig(tensorboard=False))


class FakeTime:
    """Nanoseconds that only move when told."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_steps(run_dir: Path, first: int, last: int, *, evaluate: bool = False) -> None:
    """Steps first..last-1 of a deterministic run, written as the loop writes them."""
    telemetry = Telemetry(run_dir, QUIET, is_writer=True, first_step=first)
    clock = Clock()
    if evaluate:
        telemetry.log(-1, "eval", {"sampled/acc_t1": 0.25})
        telemetry.flush(-1, clock)
    for step in range(first, last):
        telemetry.log(step, "play", {"acc_t1": step / 7, "generated_tokens": 10 + step})
        telemetry.log(step, "actor/follow", {"loss": 1 / (step + 3), "skipped": step % 2 == 0})
        telemetry.transcript(step, [{"prompt": f"p{step}"}, {"prompt": f"q{step}"}])
        telemetry.flush(step, clock)
    telemetry.close()


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read(path)]


def test_clock_charges_every_nanosecond_to_one_phase() -> None:
    now = FakeTime()
    clock = Clock(now_ns=now)
    now.now_ns += 5
    with clock.phase("play"):
        now.now_ns += 70
        with clock.phase("grade"):
            now.now_ns += 11
        now.now_ns += 2
    with clock.phase("follow"):
        now.now_ns += 300
    with clock.phase("play"):
        now.now_ns += 1
    now.now_ns += 4
    expected_ns = {"other": 9, "play": 73, "grade": 11, "follow": 300, "step": 393}
    assert clock.take() == {name: ns / 1e9 for name, ns in expected_ns.items()}
    now.now_ns += 8
    assert clock.take() == {"other": 8 / 1e9, "step": 8 / 1e9}


def test_clock_charges_a_phase_that_raises_and_waits_for_the_device() -> None:
    now, waits = FakeTime(), []

    def sync() -> None:
        # Work that the device still had to do when the phase ended.
        waits.append(now.now_ns)
        now.now_ns += 10 if len(waits) == 2 else 0

    clock = Clock(sync=sync, now_ns=now)
    with pytest.raises(KeyError), clock.phase("play"):
        now.now_ns += 7
        raise KeyError("x")
    now.now_ns += 3
    assert clock.take() == {"other": 3 / 1e9, "play": 17 / 1e9, "step": 20 / 1e9}


def test_real_times_sum_to_the_step() -> None:
    clock = Clock()
    for name in ("play", "follow", "probe", "lead"):
        with clock.phase(name):
            sum(range(20_000))
    times = clock.take()
    step = times.pop("step")
    assert set(times) == {"other", "play", "follow", "probe", "lead"}
    assert math.fsum(times.values()) == pytest.approx(step, rel=1e-9)
    assert step > 0


def test_one_object_a_step_with_prefixed_names(tmp_path: Path) -> None:
    run_steps(tmp_path, 0, 2, evaluate=True)
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [-1, 0, 1]
    assert rows[0]["eval/sampled/acc_t1"] == 0.25
    assert rows[2]["play/acc_t1"] == 1 / 7
    assert rows[2]["play/generated_tokens"] == 11
    assert rows[2]["actor/follow/loss"] == 0.25
    assert rows[1]["actor/follow/skipped"] == 1
    assert rows[2]["time/step"] == pytest.approx(rows[2]["time/other"])
    assert read(tmp_path / "transcripts.jsonl")[3] == {"step": 1, "tree": {"prompt": "q1"}}


def test_scalars_of_arrays_pass_and_keep_their_value(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, QUIET, is_writer=True)
    telemetry.log(0, "a", {"x": np.float32(0.1), "n": np.int64(3), "zero_dim": np.array(2.5)})
    telemetry.flush(0, Clock())
    (row,) = read(tmp_path / "metrics.jsonl")
    assert row["a/x"] == float(np.float32(0.1))
    assert (row["a/n"], row["a/zero_dim"]) == (3, 2.5)


def test_non_finite_is_null_and_named_once(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, QUIET, is_writer=True)
    for step, value in enumerate((math.nan, math.inf, 2.0)):
        telemetry.log(step, "actor/follow", {"loss": value})
        telemetry.flush(step, Clock())
    telemetry.close()
    assert [r["actor/follow/loss"] for r in read(tmp_path / "metrics.jsonl")] == [None, None, 2.0]
    assert (tmp_path / "log.txt").read_text().count("actor/follow/loss is nan") == 1


def test_resumed_file_equals_the_unbroken_one(tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    unbroken.mkdir()
    broken.mkdir()
    run_steps(unbroken, 0, 6, evaluate=True)
    run_steps(broken, 0, 5, evaluate=True)
    # Killed in the middle of a write; the newest checkpoint is after 3 steps.
    with open(broken / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "play/ac')
    run_steps(broken, 3, 6)
    assert without_times(broken / "metrics.jsonl") == without_times(unbroken / "metrics.jsonl")
    transcripts = [folder / "transcripts.jsonl" for folder in (broken, unbroken)]
    assert transcripts[0].read_bytes() == transcripts[1].read_bytes()


def test_start_from_zero_drops_everything(tmp_path: Path) -> None:
    run_steps(tmp_path, 0, 4, evaluate=True)
    run_steps(tmp_path, 0, 2, evaluate=True)
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [-1, 0, 1]


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = Telemetry(tmp_path, QUIET, is_writer=False)
    telemetry.log(0, "a", {"x": 1.0})
    telemetry.transcript(0, [{}])
    telemetry.note("hello")
    telemetry.flush(0, Clock())
    telemetry.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_a_step_is_flushed_before_the_next_is_logged(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, QUIET, is_writer=True)
    telemetry.log(0, "a", {"x": 1.0})
    with pytest.raises(AssertionError, match="step 1 is logged before 0"):
        telemetry.log(1, "a", {"x": 1.0})


def test_full_disk_says_what_to_do_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_steps(tmp_path, 0, 2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    telemetry = Telemetry(tmp_path, QUIET, is_writer=True, first_step=2)
    telemetry.log(2, "a", {"x": 1.0})
    real_write, calls = os.write, []

    def nearly_full(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real_write(fd, data[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", nearly_full)
    with pytest.raises(OSError, match=r"the disk is full: .*metrics\.jsonl .*--resume") as caught:
        telemetry.flush(2, Clock())
    assert caught.value.errno == errno.ENOSPC
    assert calls[1] == calls[0] - 9
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_plain_progress_is_one_line_every_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([100.0, 101.0, 104.9, 105.0, 105.1, 105.2])
    monkeypatch.setattr(telemetry_module.time, "monotonic", lambda: next(seconds))
    telemetry = Telemetry(tmp_path, QUIET, is_writer=True)
    now = FakeTime()
    clock = Clock(now_ns=now)
    for step in range(6):
        now.now_ns += 2 * 10**9
        values = {"acc_t1": 0.5, "acc_t2": 0.75, "reward": 0.6, "generated_tokens": 100}
        telemetry.log(step, "play", values)
        telemetry.flush(step, clock)
    lines = capsys.readouterr().out.splitlines()
    # At 100 and 105 seconds, and the last step whenever it comes.
    assert [line.split()[1] for line in lines] == ["1/6", "4/6", "6/6"]
    assert lines[1] == (
        "step 4/6  acc_t1 0.500  acc_t2 0.750  reward 0.600  50 tokens/s  left 0m04s"
    )
    assert (tmp_path / "log.txt").read_text().count("tokens/s") == 3


def test_an_evaluation_is_shown_at_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(telemetry_module.time, "monotonic", lambda: 100.0)
    telemetry = Telemetry(tmp_path, QUIET, is_writer=True)
    for step, values in enumerate(({}, {"acc_t1": 0.5, "acc_t2": 0.625}, {}, {}, {}, {})):
        telemetry.log(step, "eval/sampled", values)
        telemetry.flush(step, Clock())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/6", "2/6", "6/6"]
    assert "held out" not in lines[0]
    assert lines[1].endswith("held out 0.500 / 0.625")
    assert lines[2].endswith("held out 0.500 / 0.625")


def test_time_left_minds_the_token_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(
        recipe="toy",
        num_steps=1000,
        max_generated_tokens=100,
        track=TrackConfig(tensorboard=False),
    )
    now = FakeTime()
    for first in (0, 1):  # the second start knows what the first has sampled
        telemetry = Telemetry(tmp_path, config, is_writer=True, first_step=first)
        clock = Clock(now_ns=now)
        now.now_ns += 60 * 10**9
        telemetry.log(first, "play", {"generated_tokens": 20})
        telemetry.flush(first, clock)
        telemetry.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("left ")[1] for line in lines] == ["4m00s", "3m00s"]
    assert "acc_t2 -" in lines[0]


def test_live_display_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    telemetry = Telemetry(tmp_path, QUIET, is_writer=True)
    for step in range(6):
        telemetry.log(step, "play", {"acc_t1": 0.5, "acc_t2": 0.75})
        telemetry.flush(step, Clock())
    telemetry.note("a [bold] word")
    telemetry.close()
    shown = capsys.readouterr().out
    assert "step 6/6" in shown
    assert "a [bold] word" in shown


def test_tensorboard_holds_the_numbers_and_purges_a_repeated_step(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    config = Config(recipe="toy", num_steps=4)
    for first, offset in ((0, 0.0), (2, 0.5)):
        telemetry = Telemetry(tmp_path, config, is_writer=True, first_step=first)
        for step in range(first, first + 3):
            telemetry.log(step, "play", {"acc_t1": step / 8 + offset, "odd": math.nan})
            telemetry.flush(step, Clock())
        telemetry.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = {e.step: e.value for e in events.Scalars("play/acc_t1")}
    assert values == {0: 0.0, 1: 0.125, 2: 0.75, 3: 0.875, 4: 1.0}
    assert "play/odd" not in events.Tags()["scalars"]


def test_wandb_is_told_everything_and_its_absence_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(recipe="toy", track=TrackConfig(tensorboard=False, wandb_project="feedback"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"megatron_binac\[track\]"):
        Telemetry(tmp_path, config, is_writer=True)

    logged: list[Any] = []
    run = types.SimpleNamespace(log=logged.append, finish=lambda: logged.append("finished"))
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **kwargs: logged.append(kwargs) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    telemetry = Telemetry(tmp_path, config, is_writer=True)
    telemetry.log(0, "a", {"x": 1.0, "y": math.inf})
    telemetry.flush(0, Clock())
    telemetry.close()
    assert logged[0]["project"] == "feedback"
    assert logged[0]["config"]["recipe"] == "toy"
    assert (logged[1]["a/x"], logged[1]["step"], "a/y" in logged[1]) == (1.0, 0, False)
    assert logged[2] == "finished"


def turn(kind: Any, text: str, advantage: float, score: float | None) -> Turn:
    return Turn(
        kind=kind,
        prompt_ids=np.array([1], np.int32),
        ids=np.array([2], np.int32),
        logprobs=np.array([-0.5], np.float32),
        finish="stop",
        version=0,
        text=text,
        advantage=advantage,
        grade=None if score is None else Grade(score=score, parsed=text),
    )


def test_tree_record_keeps_who_said_what_to_whom() -> None:
    tree = Tree(
        prompt=Prompt(id="t/1", text="2+2", gold="4", task="toy"),
        attempts=[turn("attempt", "4", 0.5, 1.0), turn("attempt", "5", -0.5, 0.0)],
        criticised=[1],
        feedbacks=[[turn("feedback", "too big", 0.25, None), turn("feedback", "ok", -0.25, None)]],
        revisions=[[[turn("revision", "4", 1.0, 1.0)], [turn("revision", "5", -1.0, 0.0)]]],
    )
    record = json.loads(json.dumps(tree_record(tree)))
    assert record["prompt"] == "2+2"
    assert [a["reward"] for a in record["attempts"]] == [1.0, 0.0]
    assert [(f["attempt"], f["text"]) for f in record["feedbacks"]] == [(1, "too big"), (1, "ok")]
    assert record["feedbacks"][1]["revisions"] == [
        {"text": "5", "advantage": -1.0, "finish": "stop", "reward": 0.0, "ids": [2]}
    ]
    assert "reward" not in record["feedbacks"][0]
    assert record["feedbacks"][0]["probes"] == []
    tree.probes = [[[turn("revision", "4", 0.0, 1.0)], [turn("revision", "4", 0.0, 1.0)]]]
    assert tree_record(tree)["feedbacks"][1]["probes"][0]["text"] == "4"
