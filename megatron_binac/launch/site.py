"""What a cluster is like: one TOML file a site, read into one frozen dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|_KEY$)", re.IGNORECASE)
"""Names of variables whose values belong in no file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A cluster, or this machine: every field is a key of the profile."""

    name: str = "here"
    workdir: str = ""
    """Folder for runs, logs and NeMo-Run's records, at one path on every node; "" is the current
    one."""

    # What is asked of Slurm
    account: str = ""
    partition: str = ""
    """"" is the cluster's default."""
    one_rank_partition: str = ""
    """Where stages of one process go (report, bench); "" is `partition`."""
    qos: str = ""
    time: str = "01:00:00"
    """Limit of one job, in Slurm's words ([days-]hours:minutes:seconds, or minutes)."""
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    gpu: str = ""
    """What `binac plan --gpu` calls them; with it their memory is checked."""
    cpus_per_rank: int = 0
    """0 is what Slurm gives."""
    memory: str = ""
    """Of a node, such as "200G"; "" is what Slurm gives, "0" all of it."""
    exclusive: bool = False
    constraint: str = ""
    exclude: str = ""
    reservation: str = ""
    sbatch: dict[str, str] = field(default_factory=dict)
    """Further options of sbatch, by their long names."""
    srun_args: tuple[str, ...] = ()
    """Further options of srun, one word each."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """srun starts every rank; or one torchrun a node does."""
    port: int = 0
    """Meeting point of the ranks; 0 takes one from the job's id."""

    # What keeps a job alive
    signal: Literal["TERM", "USR1"] = "TERM"
    stop_before_s: int = 300
    """The signal comes this long before the time limit; a checkpoint must fit in."""
    retries: int = 2
    """Failures (not stops) after which a job is put back into the queue."""
    hang_s: float = 1800.0
    """Longest time that a phase of a step may take before the job is taken for hung."""

    # What runs there
    python: str = "python"
    """Interpreter that has megatron_binac."""
    setup: tuple[str, ...] = ()
    """Shell lines before it starts: module load ..., source ..."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of every rank, NCCL's among them; names keep their case."""
    secrets: tuple[str, ...] = ()
    """Names of variables that go with the job from the shell that submits it, never written."""
    container_image: str = ""
    """For pyxis: a .sqsh file or a registry's name; "" is bare metal."""
    container_mounts: tuple[str, ...] = ()
    """from:to, or from:to:flags."""
    servers_python: str = ""
    """Interpreter that has vLLM, for `--servers`; "" is `python`."""
    servers_args: tuple[str, ...] = ()
    """Further arguments of `vllm serve`, one word each."""
    code: Literal["installed", "git"] = "installed"
    """`git` sends the last commit of the current checkout along with each job."""

    def __post_init__(self) -> None:
        positive = ("ranks_per_node", "stop_before_s", "hang_s")
        for name in (*positive, "gpus_per_node", "cpus_per_rank", "retries", "port"):
            least = 1 if name in positive else 0
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {least} or more")
        seconds(self.time)

    @property
    def mounts(self) -> list[str]:
        """What is mounted into the container, `workdir` among it; empty without a container."""
        if not self.container_image:
            return []
        own = f"{self.workdir}:{self.workdir}"
        covered = any(_covers(mount, self.workdir) for mount in self.container_mounts)
        return [*self.container_mounts, *([] if covered else [own])]


def _covers(mount: str, path: str) -> bool:
    """Whether a mount makes `path` visible at the same place."""
    source, _, rest = mount.partition(":")
    target = rest.partition(":")[0] or source
    return source == target and Path(path).is_relative_to(source)


def load(path: Path) -> Site:
    """The site that a TOML file describes; ValueError names the file, the key and the mend."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no profile {path}; examples/ has some to start from") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None
    try:
        return from_dict({"name": path.stem} | tree)
    except ValueError as error:
        raise ValueError(f"profile {path}: {error}") from None


def from_dict(tree: dict[str, Any]) -> Site:
    """A site from plain values; ValueError for an unknown key or a value of the wrong kind."""
    hints = typing.get_type_hints(Site)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in hints:
            closest = difflib.get_close_matches(key, hints, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown key {key!r}; the closest is {closest!r}")
        values[key] = _typed(key, hints[key], value)
    return Site(**values)


def to_dict(site: Site) -> dict[str, Any]:
    """Plain values that `from_dict` takes back."""
    plain = dataclasses.asdict(site)
    return {key: list(v) if isinstance(v, tuple) else v for key, v in plain.items()}


def seconds(text: str) -> int:
    """A time limit of Slurm in seconds.

    It takes minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]];
    ValueError otherwise.
    """
    days, dash, rest = text.partition("-") if "-" in text else ("0", "", text)
    parts = rest.split(":")
    if not days.isdigit() or not all(p.isdigit() for p in parts) or len(parts) > 3:
        raise ValueError(f"time is {text!r}, expected Slurm's [days-]hours:minutes:seconds")
    numbers = [int(p) for p in parts]
    if dash:
        hours, minutes, secs = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, secs = numbers
    else:
        hours, (minutes, secs) = 0, (*numbers, 0)[:2]
    return ((int(days) * 24 + hours) * 60 + minutes) * 60 + secs


def _typed(key: str, hint: Any, value: Any) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        good = value in inner
        expected = " or ".join(map(repr, inner))
    elif origin is tuple:
        good = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
        value, expected = tuple(value) if good else value, "a list of strings"
    elif origin is dict:
        good = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
        expected = "a table of strings (quote the numbers)"
    else:
        assert not isinstance(hint, types.UnionType), hint
        value = float(value) if hint is float and type(value) is int else value
        good, expected = type(value) is hint, hint.__name__
    if not good:
        raise ValueError(f"{key} is {value!r}, expected {expected}")
    return value
