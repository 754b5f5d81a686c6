"""Signs of life of ranks: what is written, who is late, and how a hung rank ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_binac import pulse

ROOT = Path(__file__).resolve().parents[1]


def test_without_the_variable_nothing_is_watched(tmp_path: Path) -> None:
    assert pulse.of_rank(tmp_path, 0, {}) is None
    assert not list(tmp_path.iterdir())
    for text in ("0", "-1", "soon", "nan"):
        with pytest.raises(ValueError, match="expected seconds above 0"):
            pulse.of_rank(tmp_path, 0, {pulse.HANG_SECONDS: text})


def test_a_rank_tells_where_it_is(tmp_path: Path) -> None:
    clock = iter(range(100))
    beats = pulse.Pulse(tmp_path / "pulse", 3, 1000.0, now=lambda: float(next(clock)))
    try:
        beats.beat("play")
        beats.beat("follow")
        (life,) = pulse.read(tmp_path, now=13.0)
        assert (life.rank, life.phase, life.silent_s, life.late_s) == (3, "follow", 10.0, 0.0)
        assert life.stack == ""
        os.kill(os.getpid(), signal.SIGUSR2)
        assert "test_pulse.py" in pulse.read(tmp_path, now=13.0)[0].stack
    finally:
        beats.close()
    assert pulse.read(tmp_path, now=13.0)[0].phase == "over"
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_new_life_keeps_the_stacks_of_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "pulse"
    folder.mkdir()
    (folder / "rank_00000.stack").write_text("where it hung")
    beats = pulse.Pulse(folder, 0, 1000.0)
    try:
        beats.beat("play")
        assert pulse.read(tmp_path, time.time())[0].stack == "where it hung"
    finally:
        beats.close()


def test_the_straggler_leads_the_list() -> None:
    """Over the borders that all have passed: 3 and 4."""
    entries = [{2: 0.0, 3: 10.0, 4: 20.0}, {3: 10.5, 4: 20.1}, {3: 11.0, 4: 23.0, 5: 30.0}]
    assert pulse.lateness(entries) == pytest.approx([0.0, 0.3, 2.0])
    assert pulse.lateness([{1: 0.0}, {2: 0.0}]) == [0.0, 0.0]
    assert pulse.lateness([]) == []


def test_a_hung_rank_leaves_its_stacks_and_is_gone(tmp_path: Path) -> None:
    """Stuck in C, with a second thread: both stacks are written, and SIGALRM ends it."""
    code = (
        "import sys, threading, time\n"
        "from pathlib import Path\n"
        "from megatron_binac import pulse\n"
        "pulse.GRACE = 0.5\n"
        "def beside(): time.sleep(1000)\n"
        "threading.Thread(target=beside, daemon=True).start()\n"
        "beats = pulse.Pulse(Path(sys.argv[1]), 0, 0.5)\n"
        "beats.beat('play')\n"
        "def stuck(): threading.Lock().acquire(), sum(range(10 ** 12))\n"
        "stuck()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "pulse")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == -signal.SIGALRM
    text = (tmp_path / "pulse" / "rank_00000.stack").read_text()
    assert "in stuck" in text
    assert "in beside" in text
    assert json.loads((tmp_path / "pulse" / "rank_00000.json").read_text())["phase"] == "play"
