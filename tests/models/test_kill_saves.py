"""kill -9 at random moments of a save: a whole checkpoint is there, not older than reported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUM_KILLS = 6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_kill_amid_a_save_leaves_a_whole_checkpoint() -> None:
    """The tool kills, checks every file, and reads the numbers back; 50 kills: docs/engines.md."""
    done = subprocess.run(
        [sys.executable, "tools/kill_saves.py", "--kills", str(NUM_KILLS), "--seed", "3"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"{NUM_KILLS} kills" in done.stdout
    kinds = {kind: int(n) for n, kind in re.findall(r"^ +(\d+) (.+)$", done.stdout, re.MULTILINE)}
    assert sum(kinds.values()) == NUM_KILLS
    # Every second writer saves in the background, and kills do come amid a save.
    assert sum(n for kind, n in kinds.items() if "in the background" in kind) == NUM_KILLS // 2
    assert any("amid a draft" in kind for kind in kinds)
