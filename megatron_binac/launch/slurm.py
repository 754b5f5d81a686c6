"""What Slurm says: partitions, accounts, jobs. Plain calls of its tools, each with a time limit."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_binac.launch.site import seconds

LIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "RESIZING")
"""States of a job that may still do something."""
WAIT_S = 60
NO_LIMIT = ("infinite", "UNLIMITED", "n/a", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A partition as `sinfo` tells it; the largest of its nodes."""

    name: str
    up: bool
    time_s: int | None
    """None: no limit."""
    num_nodes: int
    cpus: int
    memory_mib: int
    gpus: int
    default: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """One job, or one task of an array."""

    job: str
    """As Slurm writes it: 12, or 12_3 for task 3."""
    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    exit_code: str = ""

    @property
    def is_live(self) -> bool:
        return self.state in LIVE


def available() -> bool:
    """Whether Slurm's tools are in PATH."""
    return all(shutil.which(tool) for tool in ("sbatch", "squeue", "scontrol", "sinfo", "scancel"))


def call(*words: str) -> str:
    """What a tool prints; ValueError with its own words where it fails."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=WAIT_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise ValueError(f"{words[0]} is not in PATH; log in where Slurm's tools are") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"{words[0]} has not answered within {WAIT_S} s; try again") from None
    if done.returncode != 0:
        raise ValueError(f"{' '.join(words)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def partitions() -> dict[str, Partition]:
    """Every partition by name."""
    found: dict[str, Partition] = {}
    # One line for each kind of node in a partition.
    for line in call("sinfo", "--noheader", "-o", "%P|%a|%l|%D|%c|%m|%G").splitlines():
        name, up, limit, num, cpus, memory, gres = line.split("|")
        key = name.rstrip("*")
        old = found.get(key)
        found[key] = Partition(
            name=key,
            up=up == "up",
            time_s=None if limit in NO_LIMIT else seconds(limit),
            num_nodes=int(num) + (old.num_nodes if old else 0),
            cpus=max(_number(cpus), old.cpus if old else 0),
            memory_mib=max(_number(memory), old.memory_mib if old else 0),
            gpus=max(_gpus(gres), old.gpus if old else 0),
            default=name.endswith("*"),
        )
    return found


def enforced() -> set[str]:
    """What accounting insists on: associations, limits, qos, ...; empty without accounting."""
    found = re.search(r"AccountingStorageEnforce\s*=\s*(\S+)", call("scontrol", "show", "config"))
    return set() if found is None or found[1] == "none" else set(found[1].split(","))


def associations(user: str) -> list[tuple[str, str, set[str]]]:
    """(account, partition or "", QoS) that a user may submit with."""
    rows: list[tuple[str, str, set[str]]] = []
    fields = "format=account,partition,qos"
    for line in call("sacctmgr", "-nP", "show", "assoc", f"user={user}", fields).splitlines():
        account, partition, qos = line.split("|")
        rows.append((account, partition, set(filter(None, qos.split(",")))))
    return rows


def jobs(ids: Iterable[str]) -> list[JobState]:
    """The states of jobs, from the controller where it still knows them, else from accounting."""
    found: list[JobState] = []
    for job in ids:
        try:
            text = call("scontrol", "--oneliner", "show", "job", job)
            found += [_from_controller(line) for line in text.splitlines() if "JobId=" in line]
        except ValueError:
            found += _from_accounting(job)
    return found


def _from_controller(line: str) -> JobState:
    fields = dict(re.findall(r"(\w+)=(\S*)", line))
    job = fields["JobId"]
    if "ArrayJobId" in fields:
        job = f"{fields['ArrayJobId']}_{fields.get('ArrayTaskId', '')}"
    return JobState(
        job=job,
        state=fields["JobState"].split(",")[0],
        reason="" if fields.get("Reason") in (None, "None") else fields["Reason"],
        nodes=fields.get("NodeList", "").replace("(null)", ""),
        restarts=int(fields.get("Restarts", "0")),
        exit_code=fields.get("ExitCode", ""),
    )


def _from_accounting(job: str) -> list[JobState]:
    fields = "jobid,state,nodelist,exitcode"
    try:
        text = call("sacct", "-nPX", "-j", job, "-o", fields)
    except ValueError:
        return [JobState(job=job, state="UNKNOWN", reason="neither squeue nor sacct knows it")]
    rows = [line.split("|") for line in text.splitlines()]
    return [
        JobState(job=name, state=state.split()[0], nodes=nodes, exit_code=code)
        for name, state, nodes, code in rows
    ]


def _number(text: str) -> int:
    """sinfo writes 64+ where nodes differ."""
    return int(re.sub(r"\D", "", text) or 0)


def _gpus(gres: str) -> int:
    """gpu:8, gpu:h100:8(S:0-1), or several of them."""
    return sum(int(count) for count in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres))
