"""Looking at an experiment and stopping it, from any process on any day: no NeMo-Run, no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_binac import pulse
from megatron_binac.launch import slurm
from megatron_binac.launch.records import Request, job_ids
from megatron_binac.launch.script import HOLD
from megatron_binac.launch.stages import STATE, Stage

LAST_ROWS = 5
"""Steps over which the rates of the table are means."""
STACKS_WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One task of one stage, as the table shows it."""

    stage: str
    task: str
    state: str
    job: str = ""
    nodes: str = ""
    restarts: int = 0
    note: str = ""
    step: str = ""
    tokens_per_s: float | None = None
    reward: float | None = None


def lines(request: Request) -> list[Line]:
    """Every task of every stage with its job, newest first asked of Slurm."""
    stages = request.build()
    ids = job_ids(request)
    on_slurm = request.executor == "slurm"
    found: list[Line] = []
    for stage in stages:
        known = slurm.jobs(ids.get(stage.name, [])) if on_slurm else []
        for index in range(len(stage.tasks)):
            found.append(_line(request, stage, index, _job_of(known, stage, index)))
    return found


def _line(request: Request, stage: Stage, index: int, job: slurm.JobState | None) -> Line:
    folder = Path(request.folder)
    task = stage.tasks[index]
    finished = stage.finished(folder, index)
    if finished:
        state = "done"
    elif job is None:
        state = "not submitted" if request.executor == "slurm" else "not done"
    else:
        # Done but for its record means that somebody has taken the output away.
        state = "output is gone" if job.state == "COMPLETED" else job.state.lower()
    note = "" if finished or job is None else job.reason
    if not finished:
        words = _last_words(stage.record(folder, index))
        alive = words and job is not None and job.is_live
        note = f"its last life ended with: {words}" if alive else words or note
    progress = _progress(task.makes, request, index) if stage.name.startswith("train") else {}
    return Line(
        stage=stage.name,
        task=task.makes.name.removesuffix(".json"),
        state=state,
        job=job.job if job is not None else "",
        nodes=job.nodes if job is not None else "",
        restarts=job.restarts if job is not None else 0,
        note=note,
        **progress,
    )


def _job_of(known: list[slurm.JobState], stage: Stage, index: int) -> slurm.JobState | None:
    """The newest job that ran this task of a stage."""
    if len(stage.tasks) == 1:
        return known[-1] if known else None
    mine = [job for job in known if index in _indices(job.job)]
    return mine[-1] if mine else None


def _indices(job: str) -> set[int]:
    """Tasks that an array's id covers: 12_3 is one, 12_[0,2-4%2] those that have not started."""
    _, sign, text = job.partition("_")
    if not sign:
        return set()
    found: set[int] = set()
    for part in text.strip("[]").partition("%")[0].split(","):
        first, dash, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last if dash else first) + 1))
    return found


def _last_words(record: Path) -> str:
    """What the ranks of the newest life of a task left behind."""
    files = [*record.parent.glob(f"{record.name}.exit-*.json")]
    if not files:
        return ""
    newest = max(files, key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text(encoding="utf-8"))["message"]


def _progress(run_dir: Path, request: Request, index: int) -> dict[str, Any]:
    """Step, sampled tokens a second, and reward from the newest rows of a run's metrics."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return {}
    whole = path.read_text(encoding="utf-8").split("\n")[:-1]
    rows = [row for row in map(json.loads, whole[-LAST_ROWS:]) if row["step"] >= 0]
    if not rows:
        return {}
    spent_s = sum(row.get("time/step") or 0.0 for row in rows)
    tokens = sum(row.get("play/generated_tokens") or 0 for row in rows)
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    return {
        "step": f"{rows[-1]['step'] + 1}/{config['num_steps']}",
        "tokens_per_s": tokens / spent_s if spent_s else None,
        "reward": rows[-1].get("play/reward"),
    }


def table(found: list[Line]) -> str:
    """The lines in columns."""
    head = ["stage", "task", "state", "job", "nodes", "restarts", "step", "tokens/s", "reward"]
    rows = [head]
    for line in found:
        rows.append(
            [
                line.stage,
                line.task,
                line.state,
                line.job,
                line.nodes,
                str(line.restarts or ""),
                line.step,
                "" if line.tokens_per_s is None else f"{line.tokens_per_s:,.0f}",
                "" if line.reward is None else f"{line.reward:.3f}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    notes = [f"{line.stage} {line.task}: {line.note}" for line in found if line.note]
    return "\n".join([*text, *([""] if notes else []), *notes])


def ranks(request: Request) -> str:
    """The ranks of the runs that are not over: who is silent, who comes last to each phase."""
    parts: list[str] = []
    for variant in request.experiment().variants:
        lives = pulse.read(Path(request.folder) / variant.name, time.time())
        alive = [life for life in lives if life.phase != "over"]
        if not alive:
            continue
        silent = max(alive, key=lambda life: life.silent_s)
        late = max(alive, key=lambda life: life.late_s)
        parts.append(
            f"{variant.name}: {len(alive)} ranks; longest without a sign: rank {silent.rank} on "
            f"{silent.host}, {silent.silent_s:.0f} s in {silent.phase}; last to enter phases: rank "
            f"{late.rank} on {late.host}, {1000 * late.late_s:.1f} ms after the first on average"
        )
    return "\n".join(parts)


def stacks(request: Request) -> str:
    """The stacks of every rank: asked of running jobs by SIGUSR2, else those of the last hang."""
    runs = [Path(request.folder) / v.name for v in request.experiment().variants]

    def sizes() -> list[int]:
        return [p.stat().st_size for run_dir in runs for p in run_dir.glob("pulse/*.stack")]

    before = sizes()
    running = [job for job in _live_jobs(request) if slurm.jobs([job])[0].state == "RUNNING"]
    for job in running:
        slurm.call("scancel", "--signal=USR2", job)
    until = time.monotonic() + STACKS_WAIT_S
    while running and time.monotonic() < until:
        if all(now > old for now, old in zip(sizes(), before, strict=False)):
            break
        time.sleep(0.5)
    parts: list[str] = []
    for run_dir in runs:
        for life in pulse.read(run_dir, time.time()):
            parts.append(f"{run_dir.name} rank {life.rank} on {life.host}, in {life.phase}:")
            parts.append(life.stack or "(none was written)")
    return "\n".join(parts)


def logs(request: Request, stage: str | None) -> Iterator[str]:
    """The text of each log of a stage's jobs (all stages where None), oldest first."""
    names = [one.name for one in request.build()]
    if stage is not None and stage not in names:
        raise ValueError(f"there is no stage {stage!r}, expected one of {', '.join(names)}")
    for submission in request.submissions:
        for name, place in submission["jobs"].items():
            # On this machine a task has a job of its own: train-0.
            if stage not in (None, name, name.rpartition("-")[0]):
                continue
            files = [p for p in Path(place).glob("*.out") if p.is_file()]
            for path in sorted(files, key=lambda p: p.stat().st_mtime):
                yield f"== {name}: {path}\n{path.read_text(encoding='utf-8', errors='replace')}"
    for path in sorted(Path(request.folder).glob(f"{STATE}/{stage or '*'}-*.servers-*.out")):
        name = path.name.partition("-")[0]
        yield f"== servers of {name}: {path}\n{path.read_text(encoding='utf-8', errors='replace')}"


def cancel(request: Request, *, now: bool) -> list[str]:
    """Stop every job: running ones save first (unless `now`), none is requeued. Returns their ids.

    `binac resume` goes on from there.
    """
    if request.executor != "slurm":
        raise ValueError("this experiment runs in the shell that launched it; press Ctrl-C there")
    (Path(request.folder) / STATE / HOLD).touch()
    stopped: list[str] = []
    # What waits for others first, so that nothing starts in between.
    for job in reversed(_live_jobs(request)):
        state = slurm.jobs([job])[0].state
        if state == "RUNNING" and not now:
            slurm.call("scancel", "--signal=TERM", job)
        else:
            slurm.call("scancel", job)
        stopped.append(job)
    return stopped


def release(request: Request) -> None:
    """Take back the hold of `cancel`; ValueError while a job of the experiment is alive."""
    alive = _live_jobs(request) if request.executor == "slurm" else []
    if alive:
        raise ValueError(
            f"job {', '.join(alive)} of {request.name} is still there; wait for it, or binac cancel"
        )
    state = Path(request.folder) / STATE
    (state / HOLD).unlink(missing_ok=True)
    # Somebody has looked at it: failures and idle lives count from here.
    for name in ("failures", "lives"):
        for path in state.glob(f"*.{name}"):
            path.unlink()


def _live_jobs(request: Request) -> list[str]:
    """Ids of jobs that may still run, in the order of the stages."""
    ids = [number for numbers in job_ids(request).values() for number in numbers]
    return list(dict.fromkeys(job.job.partition("_")[0] if "[" in job.job else job.job
                              for job in slurm.jobs(ids) if job.is_live))
