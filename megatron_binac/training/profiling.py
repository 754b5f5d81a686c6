"""Where the time of a run goes, on request: `track.trace`, `track.profile_steps`, `track.nvtx`.

Files lie in `trace/from_step_N` of the run folder, N the step that this start of the run began
with, and open at ui.perfetto.dev.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_binac.config import TrackConfig
from megatron_binac.timeline import Timeline

SKIPPED = 2
"""Steps before the profiled ones: the first of a start are slower than the rest."""


class Profiling:
    """What one rank writes down about its phases; `phase` goes around each of them.

    Raises ValueError for NVTX ranges without a CUDA device, where nothing could read them.
    """

    def __init__(self, track: TrackConfig, run_dir: Path, rank: int) -> None:
        if track.nvtx and not torch.cuda.is_available():
            raise ValueError(
                "track.nvtx is true, but torch sees no CUDA device; leave it out, or take "
                "track.trace=true, which needs none"
            )
        self._track, self._rank = track, rank
        self._parent = run_dir / "trace"
        self.begin(0)
        self._timeline = Timeline(rank) if track.trace else None
        self._torch: profile | None = None

    def begin(self, first_step: int) -> None:
        """The step that this start of the run goes on with."""
        self._folder = self._parent / f"from_step_{first_step}"
        self._first_step, self._steps = first_step, 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Keep the time inside the `with` under `name`; a step begins with `play`."""
        if name == "play":
            self._steps += 1
            if self._track.profile_steps:
                self._turn_torch()
        if self._track.nvtx:
            torch.cuda.nvtx.range_push(name)
        try:
            if self._timeline is None:
                yield
            else:
                with self._timeline.phase(name, step=self._first_step + self._steps - 1):
                    yield
        finally:
            if self._track.nvtx:
                torch.cuda.nvtx.range_pop()
        if name == "save" and self._timeline is not None:
            self._timeline.write(self._folder)  # a run that is killed later keeps it up to here

    def close(self) -> None:
        """Write what is there."""
        if self._torch is not None:
            self._export()
        if self._timeline is not None:
            self._timeline.write(self._folder)

    def _turn_torch(self) -> None:
        if self._steps == SKIPPED + 1:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._torch = profile(activities=activities)
            self._torch.start()
        elif self._torch is not None and self._steps == SKIPPED + 1 + self._track.profile_steps:
            self._export()

    def _export(self) -> None:
        assert self._torch is not None
        self._torch.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._torch.export_chrome_trace(str(self._folder / f"torch_rank{self._rank}.json"))
        self._torch = None
