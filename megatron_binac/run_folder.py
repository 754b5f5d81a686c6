"""The folder of one run: which recipe and config it belongs to, and whether it may be written.

```
config.json      the resolved config; decides whose folder this is
metrics.jsonl    one object a step          transcripts.jsonl  some trees of each step
checkpoints/     step_000010/ ...           tokenizer/ tensorboard/ log.txt report.html curves.png
```
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_binac import config as configs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_binac.config import Config

CHANGEABLE = ("num_steps", "save_every", "eval.", "track.", "actor.parallel.", "critic.parallel.")
"""Keys that a resumed run may change: none of them touches what was already computed. Another
layout goes on within rounding; all else goes on to the last bit."""


ORPHAN_SECONDS = 10.0
"""How long the lock of a run whose process is gone is waited for."""


def load_config(run_dir: Path) -> Config:
    """The config that `run_dir` was started with; ValueError where it holds none."""
    path = run_dir / "config.json"
    if not path.is_file():
        holder = "it does not exist" if not run_dir.exists() else "it has no config.json"
        raise ValueError(f"{run_dir} is not a run folder ({holder}); expected one that train made")
    try:
        return configs.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint, None where there is none."""
    folder = run_dir / "checkpoints"
    steps = [p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return max(steps, key=lambda p: int(p.name[5:]), default=None)


def claim(run_dir: Path, config: Config, *, fresh: bool, first_rank: bool = True) -> bool:
    """Make `run_dir` the folder of `config`, or check that it already is; True where it was.

    Never overwrites: raises ValueError where the folder holds another recipe, another config,
    anything that is no run, or (with `fresh`) any run. A start that failed before its first
    checkpoint has computed nothing: its folder is taken over. Only the first rank writes, others
    check.
    """
    if (run_dir / "config.json").exists():
        held = load_config(run_dir)
        if held != config and not has_begun(run_dir):
            if first_rank:
                with locked(run_dir):
                    shutil.rmtree(run_dir / "tokenizer", ignore_errors=True)
                    write_config(run_dir, config)
            return False
        if held.recipe != config.recipe:
            raise ValueError(
                f"{run_dir} holds a run of recipe {held.recipe!r}, got {config.recipe!r}; "
                "pass another --run-dir"
            )
        if held != config:
            raise ValueError(
                f"{run_dir} holds a run with another config: {_difference(held, config)}; "
                f"pass another --run-dir, or go on with its own config by --resume {run_dir}"
            )
        if fresh and first_rank:
            raise ValueError(f"--fresh, but {run_dir} already holds a run; pass another --run-dir")
        return True
    if first_rank:
        if run_dir.is_dir() and any(not _is_draft(path) for path in run_dir.iterdir()):
            raise ValueError(
                f"{run_dir} is not empty and holds no run (no config.json); pass a new folder"
            )
        if run_dir.exists() and not run_dir.is_dir():
            raise ValueError(f"{run_dir} is a file, expected a folder; pass another --run-dir")
        run_dir.mkdir(parents=True, exist_ok=True)
        for path in filter(_is_draft, run_dir.iterdir()):
            path.unlink()
        write_config(run_dir, config)
    return False


def has_begun(run_dir: Path) -> bool:
    """Whether a run has left anything in `run_dir` that would be missed."""
    return (run_dir / "metrics.jsonl").exists() or (run_dir / "checkpoints").exists()


def _is_draft(path: Path) -> bool:
    """Left by a start that was killed while it wrote its config."""
    return re.fullmatch(r"config\.json\.\d+", path.name) is not None


def write_config(run_dir: Path, config: Config) -> None:
    """Write config.json in one move: a reader sees the old or the new one, never half of one."""
    target, draft = run_dir / "config.json", run_dir / f"config.json.{os.getpid()}"
    try:
        draft.write_text(configs.to_json(config) + "\n", encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise disk_error(error, target) from error


def resumed(run_dir: Path, assignments: list[str]) -> Config:
    """The config of `run_dir` with the few changes that a resumed run may make."""
    for assignment in assignments:
        key = assignment.partition("=")[0]
        if not any(key == k or (k.endswith(".") and key.startswith(k)) for k in CHANGEABLE):
            raise ValueError(
                f"{key} cannot change in a resumed run, expected one of "
                f"{', '.join(k + '*' if k.endswith('.') else k for k in CHANGEABLE)}; "
                "leave it out, or start a new run"
            )
    return configs.override(load_config(run_dir), assignments)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the folder for one writer; ValueError where another process is training in it.

    The lock goes with the process, so that a killed run leaves nothing to clean up; what such a
    run has forked may take a moment to end.
    """
    deadline = time.monotonic() + ORPHAN_SECONDS
    with open(run_dir / ".lock", "a+", encoding="ascii") as file:
        while not _try_lock(file):
            file.seek(0)
            holder = file.read().strip()
            if not holder or Path(f"/proc/{holder}").exists() or time.monotonic() > deadline:
                raise ValueError(
                    f"{run_dir} is in use by process {holder or '(unknown)'}; "
                    "wait for it, stop it, or pass another --run-dir"
                )
            time.sleep(0.05)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def disk_error(error: OSError, path: Path) -> OSError:
    """`error` with what can be done about it where the disk or a quota is full, else unchanged."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return OSError(
        error.errno,
        f"the disk is full: {path} could not be written; free some space and go on with "
        "`binac train --resume`, which continues from the newest checkpoint",
    )


def _difference(held: Config, got: Config) -> str:
    """The first keys in which two configs differ, in words."""
    old, new = _flat(asdict(held)), _flat(asdict(got))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    shown = [
        f"{key} is {json.dumps(old.get(key))}, got {json.dumps(new.get(key))}"
        for key in changed[:3]
    ]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return "; ".join(shown) + more


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= _flat(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves
