"""The ranks of a job: taken over from torchrun or srun where they exist, else started by torchrun.

Torch-free: a layout is refused, and a job is submitted, before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from types import FrameType

EXIT_FILE = "BINAC_EXIT_FILE"
"""Variable that names the file in which a rank leaves its exit code and last words for `start`."""
STOPPED = (130, 138, 143)
"""Exit codes of a run that saved and stopped on SIGINT, SIGUSR1 or SIGTERM: no failures."""
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def existing(env: MutableMapping[str, str]) -> int | None:
    """The world size where this process already is one rank of a job, else None.

    Under srun without torchrun it fills in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    MASTER_PORT from Slurm's variables. Raises ValueError where the environment contradicts itself.
    """
    have = [name for name in ("RANK", "WORLD_SIZE") if name in env]
    if len(have) == 1:
        raise ValueError(
            f"the environment has {have[0]} alone, expected RANK and WORLD_SIZE or neither; "
            f"start with torchrun or srun, or unset {have[0]}"
        )
    if not have:
        # A batch script has SLURM_NTASKS and SLURM_PROCID as well; only a step has several tasks.
        tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
        if tasks == 1 or "SLURM_PROCID" not in env:
            return None
        env["RANK"] = env["SLURM_PROCID"]
        env["WORLD_SIZE"] = str(tasks)
        env.setdefault("LOCAL_RANK", env.get("SLURM_LOCALID", "0"))
        if "MASTER_ADDR" not in env:
            env["MASTER_ADDR"] = _first_host(env)
        env.setdefault("MASTER_PORT", str(_port(env)))
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    if not 0 <= rank < world:
        raise ValueError(
            f"the environment has RANK {rank} of WORLD_SIZE {world}; unset or mend both"
        )
    return world


def _first_host(env: MutableMapping[str, str]) -> str:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    if shutil.which("scontrol") and nodes:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False
        )
        if listed.returncode == 0 and listed.stdout.strip():
            return listed.stdout.split()[0]
    if nodes and not re.search(r"[\[\]]", nodes):
        return nodes.split(",")[0]
    raise ValueError(
        f"the first host of Slurm's node list {nodes!r} cannot be told without scontrol; "
        "set MASTER_ADDR"
    )


def _port(env: MutableMapping[str, str]) -> int:
    """One port for all ranks, another one for each step and each restart of a job, below the range
    that systems hand out."""
    job, step = int(env.get("SLURM_JOB_ID", "0")), int(env.get("SLURM_STEP_ID", "0"))
    restart = int(env.get("SLURM_RESTART_COUNT", "0"))
    return 15000 + (job * 17 + restart * 5 + step) % 15000


def set_defaults(env: MutableMapping[str, str], ranks_here: int) -> None:
    """Settings that each rank wants before torch is imported; what the user has set stays."""
    cores = len(os.sched_getaffinity(0))
    if ranks_here > 1:
        # Thread pools that together exceed the cores slow each other down by a factor.
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks_here)))
    # Megatron orders tensor-parallel communication before computation by it.
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def become_single(env: MutableMapping[str, str]) -> None:
    """Make this process the only rank of a job; port 0 lets the store pick a free one."""
    set_defaults(env, 1)
    env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def start(nproc: int, worker_args: list[str]) -> int:
    """Run `binac worker ARGS` on `nproc` ranks of this machine by torchrun; returns the exit code.

    SIGINT, SIGTERM and SIGUSR1 go to the ranks, which save and stop; a second one goes to torchrun,
    which kills what is left after its grace time. Torchrun has a process group of its own, so that
    Ctrl-C reaches the ranks once, and dies with this process.
    """
    with tempfile.TemporaryDirectory(prefix="binac-") as folder:
        exit_file = Path(folder) / "exit.json"
        env = dict(os.environ) | {EXIT_FILE: str(exit_file)}
        set_defaults(env, nproc)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(nproc), "-m", "megatron_binac", "worker", *worker_args]
        job = subprocess.Popen(command, env=env, process_group=0, preexec_fn=die_with_parent)
        signals = 0

        def forward(number: int, frame: FrameType | None) -> None:
            nonlocal signals
            signals += 1
            ranks = _rank_pids(job.pid) if signals == 1 else []
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if not ranks:
                job.terminate()

        previous = {number: signal.signal(number, forward) for number in FORWARDED}
        try:
            code = job.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        note = json.loads(exit_file.read_text()) if exit_file.exists() else {}
    if note.get("message"):
        print(note["message"], file=sys.stderr)
    if note.get("code"):
        return note["code"]
    return 128 - code if code < 0 else code


def leave(code: int, message: str) -> int:
    """What a rank returns as exit code, after leaving code and message for `start` where it waits.

    The first rank that speaks is heard. Without a `start` above it the message goes to stderr.
    """
    path, rank = os.environ.get(EXIT_FILE), os.environ.get("RANK", "0")
    if message and rank != "0":
        message = f"[rank {rank}] {message}"
    if path is None:
        if message:
            print(message, file=sys.stderr)
        return code
    try:
        with open(path, "x", encoding="utf-8") as file:
            json.dump({"code": code, "message": message}, file)
    except FileExistsError:
        pass
    return 0 if code in STOPPED else code


def crashed(error: BaseException) -> None:
    """Leave word of a bug, which keeps its traceback, for the batch script of a job.

    Srun ends the other ranks by SIGTERM and hands on the highest code, which then looks like a
    stop. Under torchrun nothing is left: it may start the ranks again.
    """
    if EXIT_FILE in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        words = str(error).strip().partition("\n")[0]
        leave(1, f"{type(error).__name__}: {words}" if words else type(error).__name__)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, however it dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def children_die_too() -> None:
    """Ask Linux to kill whatever this process forks from now on when this process dies.

    Megatron-Core's checkpoint writers are forked; of a killed rank they would wait for ever, with
    the lock of the run folder in their hands.
    """
    parent = 0

    def before() -> None:
        nonlocal parent
        parent = os.getpid()

    def in_child() -> None:
        die_with_parent()
        if os.getppid() != parent:  # it died before it could be watched
            os._exit(1)

    os.register_at_fork(before=before, after_in_child=in_child)


def _rank_pids(torchrun_pid: int) -> list[int]:
    pids: list[int] = []
    for children in Path(f"/proc/{torchrun_pid}/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(OSError):  # it may end while this reads
                if b"megatron_binac\0worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    pids.append(int(child))
    return pids
