"""Signs of life of each rank of a job, and the end of one that hangs. No torch.

`binac launch` sets BINAC_HANG_SECONDS; without it nothing here runs. Each rank keeps
`pulse/rank_00003.json` in its run folder: where it runs, the phase it is in and when it entered its
last phases. A rank that enters no phase for that long writes the stack of every thread to
`pulse/rank_00003.stack`, and `GRACE` seconds later it is gone: the ranks that wait for each other
in a collective all tell where they stand before the job ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HANG_SECONDS = "BINAC_HANG_SECONDS"
"""Variable with the longest time that a phase may take."""
GRACE = 20.0
"""Seconds between the stacks of a hung rank and its end, in which the other ranks write theirs."""
KEPT = 64
"""Borders between phases that a rank's file remembers."""


class Pulse:
    """The beats of one rank: call `beat` whenever it enters a phase."""

    def __init__(
        self, folder: Path, rank: int, hang_s: float, now: Callable[[], float] = time.time
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._hang_s, self._now = folder / f"rank_{rank:05d}.json", hang_s, now
        stack = self._path.with_suffix(".stack")
        if stack.exists() and stack.stat().st_size:
            # What a life before this one has left is the reason why this one began.
            stack.replace(stack.with_name(f"{stack.name}.{int(stack.stat().st_mtime)}"))
        self._stack: IO[str] = open(stack, "w")  # noqa: SIM115
        self._count = 0
        self._borders: deque[tuple[int, str, float]] = deque(maxlen=KEPT)
        self._facts = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        # `binac status --stacks` asks every rank for its stacks by this signal.
        faulthandler.register(signal.SIGUSR2, file=self._stack, all_threads=True)

    def beat(self, phase: str) -> None:
        """Note that `phase` begins, and start to watch it."""
        self._count += 1
        self._borders.append((self._count, phase, self._now()))
        # In C, on a thread and a timer of their own: both work where the interpreter is stuck.
        faulthandler.dump_traceback_later(self._hang_s, file=self._stack)
        signal.setitimer(signal.ITIMER_REAL, self._hang_s + GRACE)
        self._write(phase)

    def close(self) -> None:
        """Stop watching: the run is over."""
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.unregister(signal.SIGUSR2)
        self._write("over")
        self._stack.close()

    def _write(self, phase: str) -> None:
        row = self._facts | {"phase": phase, "time": self._now(), "borders": list(self._borders)}
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(row), encoding="ascii")
        draft.replace(self._path)


def of_rank(run_dir: Path, rank: int, env: Mapping[str, str]) -> Pulse | None:
    """The pulse of this rank, None where BINAC_HANG_SECONDS is not set.

    Raises ValueError where it is no positive number.
    """
    text = env.get(HANG_SECONDS)
    if text is None:
        return None
    try:
        hang_s = float(text)
    except ValueError:
        hang_s = 0.0
    if not hang_s > 0:
        raise ValueError(f"{HANG_SECONDS} is {text!r}, expected seconds above 0; mend or unset it")
    return Pulse(run_dir / "pulse", rank, hang_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLife:
    """What the file of one rank says."""

    rank: int
    host: str
    phase: str
    silent_s: float
    """Since it last entered a phase."""
    late_s: float
    """Mean time by which it enters a phase after the first rank that does; the straggler leads."""
    stack: str
    """The stacks of its threads, of this life or an earlier one; "" where none were written."""


def read(run_dir: Path, now: float) -> list[RankLife]:
    """All ranks that have left a sign of life in `run_dir`, by rank."""
    rows: list[dict[str, Any]] = []
    for path in sorted((run_dir / "pulse").glob("rank_*.json")):
        row = json.loads(path.read_text(encoding="ascii"))
        current = path.with_suffix(".stack")
        texts = [p.read_text() for p in [*sorted(path.parent.glob(f"{current.name}.*")), current]]
        rows.append(row | {"stack": next((text for text in reversed(texts) if text), "")})
    late_s = lateness([{c: t for c, _, t in row["borders"]} for row in rows])
    return [
        RankLife(
            rank=row["rank"],
            host=row["host"],
            phase=row["phase"],
            silent_s=max(0.0, now - row["time"]),
            late_s=late,
            stack=row["stack"],
        )
        for row, late in zip(rows, late_s, strict=True)
    ]


def lateness(entries: list[dict[int, float]]) -> list[float]:
    """Mean seconds behind the first rank, over the borders that all ranks have passed; 0 for none.

    One dict a rank: number of the border -> time at which it was passed.
    """
    shared = set.intersection(*(set(entry) for entry in entries)) if entries else set()
    if not shared:
        return [0.0] * len(entries)
    first = {count: min(entry[count] for entry in entries) for count in shared}
    return [sum(e[c] - first[c] for c in shared) / len(shared) for e in entries]
