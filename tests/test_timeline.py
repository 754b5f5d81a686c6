"""Phases of a rank in a file that trace viewers read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_binac.timeline import Timeline


def test_blocks_have_their_begin_and_length_in_microseconds(tmp_path: Path) -> None:
    timeline = Timeline(3)
    timeline.add("play", 5_000, 12_000, step=7)
    timeline.add("follow", 12_000, 13_500)
    path = timeline.write(tmp_path / "trace")
    assert path.name == "trace_rank3.json"
    name, play, follow = json.loads(path.read_text())["traceEvents"]
    assert name == {
        "name": "process_name", "ph": "M", "pid": 3, "tid": 0, "args": {"name": "rank 3"}
    }  # fmt: skip
    assert (play["name"], play["ph"], play["pid"], play["dur"]) == ("play", "X", 3, 7.0)
    assert play["args"] == {"step": 7}
    assert follow["dur"] == 1.5
    # Microseconds since 1970: a double holds them to a quarter of one.
    assert follow["ts"] - play["ts"] == pytest.approx(7.0, abs=0.5)


def test_a_phase_in_a_phase_lies_inside_it(tmp_path: Path) -> None:
    timeline = Timeline(0)
    with pytest.raises(RuntimeError), timeline.phase("outer"), timeline.phase("inner"):
        raise RuntimeError("a phase that fails is kept too")
    _, inner, outer = json.loads(timeline.write(tmp_path).read_text())["traceEvents"]
    assert (inner["name"], outer["name"]) == ("inner", "outer")
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
