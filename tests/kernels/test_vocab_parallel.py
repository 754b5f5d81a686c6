"""The vocabulary split over 1, 2 and 4 gloo processes, against float64 over the whole of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
WORLD_SIZE = 4


def run_ranks(script: Path, rendezvous: Path, *, timeout: float) -> list[str]:
    """Start all ranks, wait for them, and leave none behind: one that fails ends the others."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    files = [open(rendezvous.parent / f"rank{i}.txt", "w+") for i in range(WORLD_SIZE)]  # noqa: SIM115
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(WORLD_SIZE), str(rendezvous)],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        for rank, file in enumerate(files)
    ]
    end = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in ranks) and time.monotonic() < end:
            if any(process.poll() not in (None, 0) for process in ranks):
                break
            time.sleep(0.2)
    finally:
        codes = [process.poll() for process in ranks]
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        outputs = []
        for file in files:
            file.seek(0)
            outputs.append(file.read())
            file.close()
    if codes != [0] * WORLD_SIZE:
        said = "\n".join(f"--- rank {i}\n{text[-3000:]}" for i, text in enumerate(outputs))
        pytest.fail(f"exit codes {codes} (None: ended after {timeout} s)\n{said}")
    return outputs


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_shards_of_1_2_and_4_processes(tmp_path: Path) -> None:
    outputs = run_ranks(HERE / "vocab_parallel_worker.py", tmp_path / "rendezvous", timeout=900.0)
    for rank, output in enumerate(outputs):
        for size in (1, 2, 4):
            assert f"rank {rank}: tp {size} ok" in output
