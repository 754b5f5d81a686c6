"""What a run writes down and shows: metrics, transcripts, phase times, progress. No torch.

`metrics.jsonl` has one object a flush, `{"step": n, "role/phase/name": number, ...}`. The row of
step n holds what was measured during and right after the n-th pass through the loop (from 0); what
was evaluated before the first pass is row -1. A resumed run first drops the rows that it is going
to make again, so that its file ends up equal to that of an unbroken run but for the `time/` keys.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from contextlib import contextmanager, nullcontext
from typing import IO, TYPE_CHECKING, Any

from megatron_binac.run_folder import disk_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from megatron_binac.config import Config
    from megatron_binac.types import Tree, Turn

PLAIN_EVERY = 5.0
"""Seconds between two progress lines where the output is no terminal."""


class Clock:
    """Exact times of the phases of a step: every nanosecond belongs to one phase or to `other`.

    A phase inside a phase stops the outer one. `sync` is called at each border, so that a device
    that runs behind (CUDA) is charged to the phase that gave it the work. `entered` is told the
    name of each phase that begins, and `around` makes a context that each of them runs in.
    """

    def __init__(
        self,
        sync: Callable[[], None] | None = None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        entered: Callable[[str], None] | None = None,
        around: Callable[[str], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._sync, self._now_ns, self._entered, self._around = sync, now_ns, entered, around
        self._open: list[str] = []
        self._spent_ns: dict[str, int] = {}
        self._mark_ns = now_ns()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside the `with` to `time/NAME`."""
        self._charge()
        self._open.append(name)
        if self._entered is not None:
            self._entered(name)
        try:
            with nullcontext() if self._around is None else self._around(name):
                yield
        finally:
            self._charge()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """Seconds of each phase, `other` and `step` since the last take; they sum to `step`."""
        self._charge()
        spent_ns = {"other": 0} | self._spent_ns
        spent_ns["step"] = sum(spent_ns.values())
        self._spent_ns = {}
        return {name: ns / 1e9 for name, ns in spent_ns.items()}

    def _charge(self) -> None:
        if self._sync is not None:
            self._sync()
        now_ns = self._now_ns()
        name = self._open[-1] if self._open else "other"
        self._spent_ns[name] = self._spent_ns.get(name, 0) + now_ns - self._mark_ns
        self._mark_ns = now_ns


class Telemetry:
    """The one writer of a run's measurements; on all ranks but the writer's it does nothing."""

    def __init__(
        self, run_dir: Path, config: Config, *, is_writer: bool, first_step: int = 0
    ) -> None:
        """`first_step` is the step that comes next; rows from there on are dropped from the files.

        A run that starts at step 0 drops row -1 as well: it evaluates again. Raises ValueError
        where W&B is asked for and not installed.
        """
        self.is_writer, self._run_dir = is_writer, run_dir
        self._step: int | None = None
        self._row: dict[str, float | int | None] = {}
        self._trees: list[Any] = []
        self._warned: set[str] = set()
        if not is_writer:
            return
        keep_below = first_step if first_step > 0 else -1
        self._metrics = _JsonLines(run_dir / "metrics.jsonl", keep_below)
        self._transcripts = _JsonLines(run_dir / "transcripts.jsonl", keep_below)
        self._log = open(run_dir / "log.txt", "a", encoding="utf-8")  # noqa: SIM115
        self._board = _tensorboard(run_dir, first_step) if config.track.tensorboard else None
        self._wandb = _wandb(run_dir, config) if config.track.wandb_project is not None else None
        self._progress = _progress(config, first_step, self._metrics.total("play/generated_tokens"))

    def log(self, step: int, prefix: str, values: Mapping[str, Any]) -> None:
        """Add `prefix/name` numbers to the row of `step`; 0-dim tensors and numpy scalars pass."""
        if not self.is_writer:
            return
        self._enter(step)
        for name, value in values.items():
            key = f"{prefix}/{name}"
            number = value if isinstance(value, int | float) else value.item()
            if not math.isfinite(number):
                if key not in self._warned:
                    self._warned.add(key)
                    self._write_log(f"step {step}: {key} is {number}; such values become null")
                number = None
            self._row[key] = int(number) if isinstance(number, bool) else number

    def transcript(self, step: int, trees: list[Any]) -> None:
        """Keep some JSON-able trees (`tree_record`) of `step`; written with the step's flush."""
        if self.is_writer:
            self._enter(step)
            self._trees += [{"step": step, "tree": tree} for tree in trees]

    def flush(self, step: int, clock: Clock) -> None:
        """Write the transcripts of `step`, then its row with the times as one line; show progress.

        Raises OSError that says what to do where the disk is full; the files keep whole lines.
        """
        times = clock.take()
        if not self.is_writer:
            return
        self.log(step, "time", times)
        row = {"step": step} | self._row
        self._transcripts.append(self._trees)
        # The metrics last: a step that has its row has everything.
        self._metrics.append([row])
        self._step, self._row, self._trees = None, {}, []
        if self._board is not None:
            for key, number in row.items():
                if key != "step" and number is not None:
                    self._board.add_scalar(key, number, step)
        if self._wandb is not None:
            self._wandb.log({key: number for key, number in row.items() if number is not None})
        line = self._progress.update(row)
        if line:
            self._write_log(line)

    def note(self, text: str) -> None:
        """Say something on the screen and in log.txt."""
        if self.is_writer:
            self._progress.say(text)
            self._write_log(text)

    def close(self) -> None:
        """Finish the display and hand everything to the disk."""
        if not self.is_writer:
            return
        self._progress.close()
        self._metrics.close()
        self._transcripts.close()
        self._log.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _enter(self, step: int) -> None:
        assert self._step in (None, step), f"step {step} is logged before {self._step} is flushed"
        self._step = step

    def _write_log(self, text: str) -> None:
        try:
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._log.flush()
        except OSError as error:
            raise disk_error(error, self._run_dir / "log.txt") from error


def tree_record(tree: Tree) -> dict[str, Any]:
    """A tree as JSON: the texts with their ids, rewards and credits, without log-probs."""
    return {
        "prompt": tree.prompt.text,
        "gold": tree.prompt.gold,
        "id": tree.prompt.id,
        "attempts": [_turn_record(turn) for turn in tree.attempts],
        "feedbacks": [
            _turn_record(feedback)
            | {
                "attempt": tree.criticised[c],
                "revisions": [_turn_record(turn) for turn in tree.revisions[c][f]],
                "probes": [_turn_record(t) for t in tree.probes[c][f]] if tree.probes else [],
            }
            for c, feedbacks in enumerate(tree.feedbacks)
            for f, feedback in enumerate(feedbacks)
        ],
    }


def _turn_record(turn: Turn) -> dict[str, Any]:
    advantage = round(float(turn.advantage), 6)
    record: dict[str, Any] = {"text": turn.text, "advantage": advantage, "finish": turn.finish}
    record["ids"] = [int(i) for i in turn.ids]
    if turn.token_advantages is not None:
        record["token_advantages"] = [round(float(a), 6) for a in turn.token_advantages]
    return record if turn.grade is None else record | {"reward": turn.reward}


class _JsonLines:
    """A file of JSON lines that keeps the rows below a step and then only grows by whole lines."""

    def __init__(self, path: Path, keep_below: int) -> None:
        self._path = path
        self._file: IO[bytes] = open(path, "ab+")  # noqa: SIM115
        self._file.seek(0)
        end = 0
        # Steps only rise, so that what is dropped is the end of the file, a half line included.
        for line in self._file:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= keep_below:
                break
            end += len(line)
        self._file.truncate(end)

    def total(self, key: str) -> int:
        """Sum of an integer over the rows that were kept."""
        self._file.seek(0)
        return sum(json.loads(line).get(key) or 0 for line in self._file)

    def append(self, rows: list[Any]) -> None:
        if not rows:
            return
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            # One write call: a kill before or after it leaves whole lines.
            written = os.write(self._file.fileno(), text)
            if written < len(text):  # the disk had room for a part; the next call says why
                os.write(self._file.fileno(), text[written:])
        except OSError as error:
            self._file.truncate(end)
            raise disk_error(error, self._path) from error

    def close(self) -> None:
        self._file.close()


class _Progress:
    """Numbers of the progress display; prints a line now and then (no terminal)."""

    def __init__(self, config: Config, first_step: int, tokens: int) -> None:
        self._total, self._max_tokens = config.num_steps, config.max_generated_tokens
        self._tokens, self._done = tokens, first_step
        self._tokens_per_step = 0.0
        self._seconds: list[float] = []
        self._printed_at = -math.inf
        self._shown: dict[str, float] = {}
        self._held_out: dict[str, str] = {}

    def update(self, row: Mapping[str, float | int | None]) -> str:
        """Take in a row; returns the line that was printed, '' where it was too early for one."""
        line = self._line(row)
        now = time.monotonic()
        if not self._is_due(row, now):
            return ""
        self._printed_at = now
        self.say(line)
        return line

    def _is_due(self, row: Mapping[str, float | int | None], now: float) -> bool:
        waited = now - self._printed_at >= PLAIN_EVERY
        return waited or self._done >= self._total or row.get("eval/sampled/acc_t1") is not None

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass

    def _line(self, row: Mapping[str, float | int | None]) -> str:
        step = int(row["step"] or 0)
        self._done = step + 1
        if step >= 0:
            self._seconds = [*self._seconds[-19:], float(row["time/step"] or 0.0)]
        # A display that only knows the last step flickers; half of the old value steadies it.
        for key in ("play/acc_t1", "play/acc_t2", "play/reward"):
            value = row.get(key)
            if value is not None:
                self._shown[key] = 0.5 * (self._shown.get(key, value) + value)
        tokens, seconds = row.get("play/generated_tokens") or 0, row.get("time/step") or 0.0
        self._tokens += int(tokens)
        self._tokens_per_step = tokens or self._tokens_per_step
        for turn in ("acc_t1", "acc_t2"):
            value = row.get(f"eval/sampled/{turn}")
            if value is not None:
                self._held_out[turn] = f"{value:.3f}"
        held_out = "  held out " + " / ".join(self._held_out.values()) if self._held_out else ""
        rate = f"{tokens / seconds:.0f}" if tokens and seconds else "-"
        return (
            f"step {self._done}/{self._total}  acc_t1 {self._value('play/acc_t1')}  "
            f"acc_t2 {self._value('play/acc_t2')}  reward {self._value('play/reward')}  "
            f"{rate} tokens/s  left {self._left()}{held_out}"
        )

    def _value(self, key: str) -> str:
        return f"{self._shown[key]:.3f}" if key in self._shown else "-"

    def _left(self) -> str:
        if not self._seconds:
            return "-"
        steps = float(self._total - self._done)
        if self._max_tokens and self._tokens_per_step:
            steps = min(steps, (self._max_tokens - self._tokens) / self._tokens_per_step)
        return _duration(max(0.0, steps) * sum(self._seconds) / len(self._seconds))


class _LiveProgress(_Progress):
    """The same on a terminal: one line that is redrawn, with a bar."""

    def __init__(self, config: Config, first_step: int, tokens: int) -> None:
        super().__init__(config, first_step, tokens)
        rich = importlib.import_module("rich.progress")
        self._bar = rich.Progress(
            rich.BarColumn(bar_width=24), rich.TextColumn("{task.description}"), transient=False
        )
        self._task = self._bar.add_task("starting", total=self._total, completed=first_step)
        self._bar.start()

    def update(self, row: Mapping[str, float | int | None]) -> str:
        line = self._line(row)
        self._bar.update(self._task, completed=self._done, description=line)
        now = time.monotonic()
        if not self._is_due(row, now):
            return ""
        self._printed_at = now
        return line

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def _progress(config: Config, first_step: int, tokens: int) -> _Progress:
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return (_LiveProgress if live else _Progress)(config, first_step, tokens)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{whole % 60:02d}s"


def _tensorboard(run_dir: Path, first_step: int) -> Any:
    tensorboard = importlib.import_module("torch.utils.tensorboard")
    # purge_step hides what an earlier try has written for the steps that come again.
    return tensorboard.SummaryWriter(run_dir / "tensorboard", purge_step=first_step or None)


def _wandb(run_dir: Path, config: Config) -> Any:
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise ValueError(
            f"track.wandb_project is {config.track.wandb_project!r} but wandb is not installed; "
            "pip install 'megatron_binac[track]', or --set track.wandb_project=null"
        ) from error
    configs = importlib.import_module("megatron_binac.config")
    return wandb.init(
        project=config.track.wandb_project,
        id=run_dir.resolve().name,
        name=run_dir.resolve().name,
        dir=str(run_dir),
        resume="allow",
        config=json.loads(configs.to_json(config)),
    )
