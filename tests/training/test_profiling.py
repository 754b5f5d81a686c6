"""Traces of a training run, and that asking for them changes no number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers_runs import arguments, assert_same_checkpoint, rows, run

from megatron_binac.config import TrackConfig
from megatron_binac.training.profiling import Profiling
from megatron_binac.training.telemetry import Clock


def events(path: Path) -> list[dict]:
    return [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]


def test_phases_are_kept_with_their_steps(tmp_path: Path) -> None:
    profiling = Profiling(TrackConfig(trace=True), tmp_path, 3)
    profiling.begin(5)
    clock = Clock(around=profiling.phase)
    for _ in range(2):
        for name in ("play", "follow"):
            with clock.phase(name):
                pass
    profiling.close()
    found = events(tmp_path / "trace" / "from_step_5" / "trace_rank3.json")
    assert [(e["name"], e["args"]["step"]) for e in found] == [
        ("play", 5), ("follow", 5), ("play", 6), ("follow", 6)
    ]  # fmt: skip


def test_a_trace_is_there_after_each_save(tmp_path: Path) -> None:
    profiling = Profiling(TrackConfig(trace=True), tmp_path, 0)
    with profiling.phase("play"):
        pass
    with profiling.phase("save"):
        pass
    path = tmp_path / "trace" / "from_step_0" / "trace_rank0.json"
    assert [e["name"] for e in events(path)] == ["play", "save"]


def test_nothing_is_written_unasked(tmp_path: Path) -> None:
    profiling = Profiling(TrackConfig(), tmp_path, 0)
    with profiling.phase("play"):
        pass
    profiling.close()
    assert not (tmp_path / "trace").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_ranges_for_nsight_need_a_device(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"track\.nvtx is true.*no CUDA device.*track\.trace"):
        Profiling(TrackConfig(nvtx=True), tmp_path, 0)


def test_a_run_with_traces_has_the_same_numbers(tmp_path: Path) -> None:
    sets = ("num_steps=4", "save_every=4", "eval.every=4")
    for name, more in (
        ("plain", ()),
        ("traced", ("track.trace=true", "track.profile_steps=1")),
    ):
        argv = arguments(tmp_path / name, tmp_path / "cache", *sets, *more)
        run(1, argv)
    assert rows(tmp_path / "traced") == rows(tmp_path / "plain")
    assert_same_checkpoint(tmp_path / "traced", tmp_path / "plain", 4)
    folder = tmp_path / "traced" / "trace" / "from_step_0"
    phases = events(folder / "trace_rank0.json")
    assert {"play", "follow", "probe", "lead", "save", "eval"} <= {e["name"] for e in phases}
    assert {e["args"]["step"] for e in phases if e["name"] == "lead"} == {0, 1, 2, 3}
    names = {e["name"] for e in events(folder / "torch_rank0.json")}
    assert any(name.startswith("aten::") for name in names)
