"""Where the time of a rank went, as a Chrome trace: open the file at ui.perfetto.dev or
chrome://tracing. No torch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Timeline:
    """Phases of one rank, each with its begin and end; one file a rank, shown as one process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._events: list[dict[str, Any]] = []
        # Wall-clock time at the origin puts the ranks of several machines beside each other.
        self._origin_ns = time.time_ns() - time.perf_counter_ns()

    @contextmanager
    def phase(self, name: str, **about: Any) -> Iterator[None]:
        """Keep the time inside the `with` as a block called `name`; phases may lie in phases."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, start_ns, time.perf_counter_ns(), **about)

    def add(self, name: str, start_ns: int, end_ns: int, **about: Any) -> None:
        """Keep a block by its readings of `time.perf_counter_ns`."""
        event = {"name": name, "ph": "X", "pid": self.rank, "tid": 0}
        event |= {"ts": (self._origin_ns + start_ns) / 1e3, "dur": (end_ns - start_ns) / 1e3}
        self._events.append(event | ({"args": about} if about else {}))

    def write(self, folder: Path) -> Path:
        """Write trace_rankN.json into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"trace_rank{self.rank}.json"
        name = {"name": "process_name", "ph": "M", "pid": self.rank, "tid": 0}
        name["args"] = {"name": f"rank {self.rank}"}  # type: ignore[assignment]
        body = {"traceEvents": [name, *self._events], "displayTimeUnit": "ms"}
        path.write_text(json.dumps(body), encoding="utf-8")
        return path
