"""`binac launch` as a user on a login node calls it, with a task that has a pace of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers_runs import TINY

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "local_slurm.sh"
PATIENCE_S = 1200.0
"""For what takes seconds on an idle machine."""

# Problems with gates, in grading, as prompts are also read before a run begins. A signal that asks
# the run to stop opens all that are shut; but for it the grading of step S waits
#   for the file GATE-S, where S is in GATES;
#   from step 2 on until it was stopped there, then from step 4 on, at last from step 2 STOPS; the
#   folder NOTES counts the lives of the job that were stopped so;
#   for ever, in step HANG_AT or later, on the rank that takes the file HANG away.
PACED = '''
import os, signal, time
from dataclasses import dataclass
from megatron_binac.tasks.checksum import Checksum

PER_STEP = 6

def asked_to_stop():
    stop = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return getattr(stop, "received", None) is not None

@dataclass(frozen=True, kw_only=True)
class Paced(Checksum):
    def grade(self, prompt, text):
        _, split, index = prompt.id.split("/")
        if split == "train":
            step = int(index) // PER_STEP
            gate = os.environ.get("GATE", "") + f"-{step}"
            shut = str(step) in os.environ.get("GATES", "").split(",")
            while shut and not os.path.exists(gate) and not asked_to_stop():
                time.sleep(0.05)
            if "NOTES" in os.environ:
                stops = len(os.listdir(os.environ["NOTES"]))
                if stops < int(os.environ["STOPS"]) and step >= 2 * (stops + 1):
                    while not asked_to_stop():
                        time.sleep(0.05)
                    life = os.environ.get("SLURM_RESTART_COUNT", "0")
                    open(os.path.join(os.environ["NOTES"], life), "w").close()
            if step >= int(os.environ.get("HANG_AT", "1000")):
                try:
                    os.rename(os.environ["HANG"], os.environ["HANG"] + ".taken")
                except FileNotFoundError:
                    pass
                else:
                    time.sleep(1e6)
        return super().grade(prompt, text)
'''

# A run without torch, for what Slurm does to jobs: a state that each step changes, checkpoints of
# it, a step that ends when all ranks have come, and the signs of life and exit codes of a real run.
# Step S of GATES waits for the file GATE-S, or for a signal.
STANDIN = '''#!{python}
import hashlib, json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from megatron_binac import config as configs, pulse, ranks, recipes, run_folder

argv = sys.argv[3:]
run_dir = Path(argv[argv.index("--run-dir") + 1])
sets = [argv[i + 1] for i, word in enumerate(argv) if word == "--set"]
config = configs.override(recipes.get(argv[1]), sets)
rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
os.environ["RANK"] = str(rank)
life = os.environ["SLURM_JOB_ID"] + "-" + os.environ.get("SLURM_RESTART_COUNT", "0")
heard = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: heard.append(number))

def meet(name):
    place = run_dir / "meet" / (life + "-" + name)
    place.mkdir(parents=True, exist_ok=True)
    draft = place / ("draft" + str(rank))
    draft.write_text(str(heard[0] if heard else 0))
    draft.rename(place / ("rank" + str(rank)))
    while len(found := list(place.glob("rank*"))) < world:
        time.sleep(0.05)
    return max(int(path.read_text()) for path in found)

if rank == 0:
    run_folder.claim(run_dir, config, fresh=False)
while not (run_dir / "config.json").exists():
    time.sleep(0.05)
newest = run_folder.latest_checkpoint(run_dir)
first = 0 if newest is None else int(newest.name[5:])
state = "" if newest is None else (newest / "state").read_text()
meet("start")
beats = pulse.of_rank(run_dir, rank, os.environ)
for step in range(first, config.num_steps):
    beats.beat("play")
    shut = str(step) in os.environ.get("GATES", "").split(",")
    while shut and not (heard or Path(os.environ["GATE"] + "-" + str(step)).exists()):
        time.sleep(0.05)
    state = hashlib.sha256((state + str(step) + str(config.seed)).encode()).hexdigest()
    beats.beat("save")
    asked = meet(str(step))
    if rank == 0:
        with open(run_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps({{"step": step}}) + "\\n")
        draft = run_dir / "checkpoints" / ".draft"
        draft.mkdir(parents=True, exist_ok=True)
        (draft / "state").write_text(state)
        draft.rename(draft.with_name("step_%06d" % (step + 1)))
    meet("saved" + str(step))
    if asked:
        break
beats.close()
sys.exit(ranks.leave(128 + asked if asked and step + 1 < config.num_steps else 0, ""))
'''

STEPS = 8
SETTINGS = (*TINY, f"num_steps={STEPS}", "eval.every=4", "task.name=paced")
"""Tiny models that learn a little in each step, with a checkpoint after every other one."""


@dataclass(kw_only=True)
class Cluster:
    """The running cluster, and a folder that its nodes see."""

    root: Path
    work: Path
    env: dict[str, str]
    cwd: Path | None = None
    """Where binac is called; None is `work`."""

    def site(self, name: str, *, env: dict[str, str] | None = None, **changes: Any) -> Path:
        """Write a profile of this cluster; `changes` replace its keys."""
        variables = {"PYTHONPATH": f"{self.work / 'tasks'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        keys: dict[str, Any] = {
            "account": "project",
            "partition": "main",
            "workdir": str(self.work),
            "python": sys.executable,
            "time": "00:20:00",
            "stop_before_s": 60,
            "hang_s": 300,
        } | changes
        lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        variables |= env or {}
        lines += ["[env]", *(f"{key} = {json.dumps(value)}" for key, value in variables.items())]
        path = self.work / f"{name}.toml"
        path.write_text("\n".join(lines) + "\n", encoding="ascii")
        return path

    def binac(self, *argv: str | Path, code: int = 0) -> str:
        """Call binac as a user on the login node does; what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "megatron_binac", *map(str, argv)],
            cwd=self.cwd or self.work,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, f"binac {' '.join(map(str, argv))}\n{said}"
        return said

    def launch(self, profile: Path, folder: str, *argv: str, nodes: int = 2) -> Path:
        """Launch the tiny recipe into `folder`; returns its path."""
        flags = [part for text in SETTINGS for part in ("--set", text)]
        place = self.work / folder
        self.binac(
            "launch", "quickstart", "--profile", profile, "--dir", place, "--nodes", str(nodes),
            *flags, *argv,
        )  # fmt: skip
        return place

    def status(self, place: Path) -> list[dict[str, Any]]:
        return json.loads(self.binac("status", place, "--json"))

    def line(self, place: Path, stage: str) -> dict[str, Any]:
        """One stage as `binac status` sees it."""
        return next(line for line in self.status(place) if line["stage"] == stage)

    def wait_done(self, place: Path) -> list[dict[str, Any]]:
        """Wait until every stage is done; fails at once where a job cannot get there any more."""

        def over() -> bool:
            states = [line["state"] for line in self.status(place)]
            bad = {"failed", "cancelled", "timeout", "output is gone"} & set(states)
            # A job that goes back into the queue looks failed for a moment.
            if bad:
                time.sleep(5)
                again = {line["state"] for line in self.status(place)}
                assert not bad & again, f"{again}\n{self.tail(place)}"
            return set(states) == {"done"}

        wait_for(over, f"all stages of {place.name} to be done", lambda: self.tail(place))
        return self.status(place)

    def tail(self, place: Path) -> str:
        return self.binac("status", place) + self.binac("logs", place, "--tail", "25")

    def slurm(self, *words: str) -> str:
        return subprocess.run(
            words, env=self.env, capture_output=True, text=True, check=True, timeout=120
        ).stdout

    def control(self, *words: str) -> None:
        """`tools/local_slurm.sh WORDS`: down NODE, up NODE."""
        subprocess.run([SCRIPT, *words, "--root", self.root], check=True, timeout=300)

    def gates(self, name: str, *steps: int) -> dict[str, str]:
        """Variables of a profile under which a run waits in these steps; `open` lets it go on."""
        return {"GATE": str(self.work / name), "GATES": ",".join(map(str, steps))}

    def open(self, name: str, step: int) -> None:
        (self.work / f"{name}-{step}").touch()

    def wait_step(self, place: Path, step: int, run: str = "quickstart") -> Path:
        """Wait until a run has made `step` steps; returns its folder."""
        run_dir = place / run
        wait_for(
            lambda: steps_made(run_dir) >= step, f"{step} steps", lambda: self.tail(place)
        )
        return run_dir

    def wait_restarts(self, place: Path, count: int, stage: str = "train") -> None:
        """Wait until the stage's job has been put back into the queue so often."""
        wait_for(
            lambda: self.line(place, stage)["restarts"] >= count,
            f"{count} restarts",
            lambda: self.tail(place),
        )

    def kill_rank(self, run_dir: Path, rank: int, number: int = signal.SIGKILL) -> None:
        """A signal to one rank, found by its run folder and its number, on whichever node."""
        # The parent before what it has forked.
        for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                env = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            numbers = {f"SLURM_PROCID={rank}".encode(), f"RANK={rank}".encode()}
            trains = {str(run_dir).encode(), b"megatron_binac"} <= {*words}
            if trains and b"torch.distributed.run" not in words and numbers & {*env}:
                os.kill(int(process.name), number)
                return
        raise AssertionError(f"no rank {rank} of {run_dir} is alive")


def wait_for(good: Callable[[], bool], what: str, facts: Callable[[], str] = str) -> None:
    """Ask again and again until it is so; AssertionError with the facts where it never is."""
    until = time.monotonic() + PATIENCE_S
    while not good():
        assert time.monotonic() < until, f"waited {PATIENCE_S:.0f} s for {what}\n{facts()}"
        time.sleep(1.0)


def steps_made(run_dir: Path) -> int:
    """Steps that a run has finished, by its metrics."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return sum('"step": -1' not in line for line in text.split("\n")[:-1])
