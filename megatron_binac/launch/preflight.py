"""Everything that can be known to be wrong before a job waits in a queue, in one list.

Runs on a login node: no torch, no NeMo-Run. Each check gives violations, and each violation says
what was found, what was expected, and how to mend it.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_binac import run_folder
from megatron_binac.config import Config, ParallelConfig, RoleConfig
from megatron_binac.launch import servers, slurm
from megatron_binac.launch.servers import RESERVED
from megatron_binac.launch.site import SECRET_NAME, Site, seconds
from megatron_binac.launch.stages import Experiment
from megatron_binac.planner import hardware
from megatron_binac.planner import memory as memory_of
from megatron_binac.planner.shapes import Shape

SAVED_BYTES = 4 + 4 + 8
"""Of a parameter in a checkpoint: its weight, its fp32 copy, two moments of Adam."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """One reason why the job would fail."""

    what: str
    """The thing that is wrong, in a word: partition, mount, layout, ..."""
    found: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.found}; {self.fix}"


def check(
    experiment: Experiment,
    site: Site,
    *,
    executor: str,
    nodes: int,
    env: Mapping[str, str],
    allow_dirty: bool = False,
) -> list[Violation]:
    """All violations of a submission, none where it may go."""
    ranks = nodes * site.ranks_per_node
    found = [
        *layout(experiment, ranks),
        *folders(experiment, site),
        *inputs(experiment),
        *environment(site, env),
        *paths(experiment, site),
    ]
    if executor == "slurm":
        found += [*limits(site), *container(site), *code(site, Path.cwd(), allow_dirty)]
        found += [*serving(site, experiment), *cluster(site, nodes, experiment)]
    else:
        found += this_machine(site, experiment, ranks)
    return found


# Of the recipe


def layout(experiment: Experiment, ranks: int) -> Iterator[Violation]:
    """Whether each role of each variant can be split over the ranks of the job."""
    seen: set[str] = set()
    for variant in experiment.variants:
        for role in ("actor", "critic"):
            config: RoleConfig | None = getattr(variant.config, role)
            if config is None:
                continue
            try:
                config.data_parallel(ranks, role)
            except ValueError as error:
                if str(error) not in seen:
                    seen.add(str(error))
                    yield Violation(
                        what="layout", found=str(error), fix="or change --nodes, ranks_per_node"
                    )


def inputs(experiment: Experiment) -> Iterator[Violation]:
    """Tokenizers and data that the recipe names."""
    named: dict[str, str] = {}
    for variant in experiment.variants:
        task = variant.config.task
        if task.tokenizer is not None:
            named["task.tokenizer"] = task.tokenizer
        for key, value in task.options.items():
            if isinstance(value, str) and ("/" in value or key in ("data", "path", "file")):
                named[f"task.options.{key}"] = value
    for key, path in named.items():
        if not Path(path).exists():
            yield Violation(
                what="data",
                found=f"{key} is {path}, which is not there",
                fix=f"put it there, or --set {key}=PATH",
            )


def folders(experiment: Experiment, site: Site) -> Iterator[Violation]:
    """The place of the runs: there, writable, with room, and holding nothing else."""
    place = Path(site.workdir)
    if not place.is_dir():
        yield Violation(
            what="workdir",
            found=f"{place} is not there",
            fix="make it, on a disk that all nodes see, or mend workdir in the profile",
        )
        return
    if not os.access(place, os.W_OK):
        yield Violation(
            what="workdir", found=f"{place} cannot be written", fix="mend workdir in the profile"
        )
    for variant in experiment.variants:
        run_dir = experiment.run_dir(variant)
        if run_dir.exists():
            try:
                run_folder.claim(run_dir, variant.config, fresh=False, first_rank=False)
            except ValueError as error:
                yield Violation(what="run folder", found=str(error), fix="or another --dir")
    there = experiment.folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    needed = sum(checkpoint_bytes(v.config) for v in experiment.variants)
    if free < needed:
        yield Violation(
            what="disk",
            found=f"{free / GIB:.1f} GiB are free in {there}, the checkpoints of this experiment "
            f"take about {needed / GIB:.1f} GiB",
            fix="make room, lower keep_checkpoints, or use another --dir",
        )


def environment(site: Site, env: Mapping[str, str]) -> Iterator[Violation]:
    """Variables: secrets are there and in no file, names are names."""
    for name in site.secrets:
        if not env.get(name):
            yield Violation(
                what="secret",
                found=f"{name} is not set in this shell",
                fix=f"export {name}=... before binac launch",
            )
    for name in site.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Violation(
                what="env",
                found=f"{name!r} is no name of a variable",
                fix="mend env in the profile",
            )
        elif SECRET_NAME.search(name):
            yield Violation(
                what="secret",
                found=f"the profile holds the value of {name}",
                fix=f'take it out of env, add "{name}" to secrets, and export it in your shell',
            )


def paths(experiment: Experiment, site: Site) -> Iterator[Violation]:
    """Names that would not survive NeMo-Run's templates."""
    named = {"--dir": str(experiment.folder), "workdir": site.workdir, "python": site.python}
    for key, path in named.items():
        if RESERVED in path:
            yield Violation(
                what="path",
                found=f"{key} is {path}, and NeMo-Run replaces {RESERVED} in scripts",
                fix="use a path without it",
            )
        if re.search(r"[\s,:]", path):
            yield Violation(
                what="path",
                found=f"{key} is {path!r}, with a blank, a comma or a colon",
                fix="use a path without them",
            )


# Of the job


def limits(site: Site) -> Iterator[Violation]:
    """Whether the job has time to do something and time to save."""
    if seconds(site.time) <= site.stop_before_s:
        yield Violation(
            what="time",
            found=f"time is {site.time}, and the job is told to stop {site.stop_before_s} s before",
            fix="raise time (--time), or lower stop_before_s in the profile",
        )


def container(site: Site) -> Iterator[Violation]:
    """Image and mounts, as far as this node can see them; the interpreter without a container."""
    image = site.container_image
    if image.startswith(("/", "./")) and not Path(image).is_file():
        yield Violation(
            what="image",
            found=f"container_image {image} is not there",
            fix="import it (enroot import -o FILE docker://...), or mend the profile",
        )
    for mount in site.container_mounts:
        source, _, rest = mount.partition(":")
        if not source.startswith("/") or (rest and not rest.startswith("/")):
            yield Violation(
                what="mount",
                found=f"container_mounts has {mount!r}",
                fix="write /from:/to, or /from:/to:ro",
            )
        elif not Path(source).exists():
            yield Violation(
                what="mount",
                found=f"{source} is not there",
                fix="make it, or mend container_mounts",
            )
    if image:
        return
    if site.container_mounts:
        yield Violation(
            what="mount",
            found="container_mounts without a container_image",
            fix="name an image, or leave the mounts out",
        )
    elif shutil.which(site.python) is None:
        yield Violation(
            what="python",
            found=f"{site.python} is no program here",
            fix="set python to the interpreter of the environment that has megatron_binac",
        )


def code(site: Site, checkout: Path, allow_dirty: bool) -> Iterator[Violation]:
    """With code = "git" only what is committed travels."""
    if site.code != "git":
        return
    done = subprocess.run(
        ["git", "status", "--porcelain"], cwd=checkout, capture_output=True, text=True
    )
    if done.returncode != 0:
        yield Violation(
            what="code",
            found=f"code is git, and {checkout} is no checkout",
            fix='start binac launch inside one, or set code = "installed"',
        )
        return
    dirty = [line[3:] for line in done.stdout.splitlines()]
    if dirty and not allow_dirty:
        more = f" and {len(dirty) - 8} more" if len(dirty) > 8 else ""
        yield Violation(
            what="code",
            found=f"not committed, so they would not travel: {', '.join(dirty[:8])}{more}",
            fix="commit them, or pass --allow-dirty to run the last commit",
        )


def serving(site: Site, experiment: Experiment) -> Iterator[Violation]:
    """Whether the servers of `--servers` fit on their nodes, and can be started."""
    for role in experiment.servers:
        for variant in experiment.variants:
            own: RoleConfig | None = getattr(variant.config, role)
            if own is None:
                continue
            if own.engine.urls != [f"${servers.variable(role)}"]:
                yield Violation(
                    what="servers",
                    found=f"{role}.engine.urls is {own.engine.urls}, and --servers starts others",
                    fix=f"leave out --set {role}.engine.urls, or --servers",
                )
            elif own.engine.tp > max(1, site.gpus_per_node):
                yield Violation(
                    what="servers",
                    found=f"{role}.engine.tp is {own.engine.tp}, and a node has "
                    f"{site.gpus_per_node} GPUs",
                    fix=f"lower {role}.engine.tp: a server is on one node",
                )
            else:
                continue
            break
    python = site.servers_python or site.python
    if not experiment.servers or site.container_image:
        return
    asked = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    try:
        done = subprocess.run(
            [python, "-c", asked], env=os.environ | site.env, capture_output=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Violation(what="servers", found=f"{python}: {error}", fix="mend servers_python")
        return
    if done.returncode and not site.setup:
        yield Violation(
            what="servers",
            found=f"{python} has no vLLM",
            fix="pip install 'megatron_binac[vllm]' there, or set servers_python to one that has",
        )


def cluster(site: Site, nodes: int, experiment: Experiment) -> list[Violation]:
    """Partition, time, nodes, GPUs, memory, account and QoS, as Slurm knows them."""
    if not slurm.available():
        return [
            Violation(
                what="slurm",
                found="sbatch and its like are not in PATH",
                fix="log in to a node that has them, or use --executor torchrun",
            )
        ]
    try:
        known = slurm.partitions()
        further = sum(experiment.servers.values())
        found = list(partition(site, nodes, known, further))
        found += memory(site, nodes, experiment, known)
        if site.container_image and "--container-image" not in slurm.call("srun", "--help"):
            found.append(
                Violation(
                    what="image",
                    found="container_image is set, and this Slurm has no pyxis (srun --help)",
                    fix="leave container_image out and set python, or ask for pyxis",
                )
            )
        if "associations" in slurm.enforced():
            found += account(site, slurm.associations(getpass.getuser()))
    except ValueError as error:
        return [Violation(what="slurm", found=str(error), fix="see whether the cluster is up")]
    return found


def partition(
    site: Site, nodes: int, known: Mapping[str, slurm.Partition], further: int = 0
) -> Iterator[Violation]:
    """Whether a partition of that name can hold the job; `further` nodes are for servers."""
    wanted = {name for name in (site.partition, site.one_rank_partition) if name}
    for name in sorted(wanted - known.keys()):
        yield Violation(
            what="partition",
            found=f"there is no partition {name!r}",
            fix=f"use one of {', '.join(sorted(known))}",
        )
    one = _partition(site, known)
    if one is None:
        if not site.partition:
            yield Violation(
                what="partition",
                found="the profile names none, and the cluster has no default",
                fix=f"set partition to one of {', '.join(sorted(known))}",
            )
        return
    if not one.up:
        yield Violation(what="partition", found=f"{one.name} is down", fix="use another one")
    if one.time_s is not None and seconds(site.time) > one.time_s:
        yield Violation(
            what="time",
            found=f"time is {site.time}, and {one.name} ends jobs after {one.time_s // 60} minutes",
            fix="lower it (--time): a job is requeued and goes on; or use another partition",
        )
    if nodes + further > one.num_nodes:
        asked = f"--nodes {nodes}" + (f" and {further} for --servers" if further else "")
        yield Violation(
            what="nodes",
            found=f"{asked}, and {one.name} has {one.num_nodes}",
            fix=f"lower --nodes{' or --servers' if further else ''}, or use another partition",
        )
    if site.gpus_per_node > one.gpus:
        yield Violation(
            what="gpus",
            found=f"gpus_per_node is {site.gpus_per_node}, and nodes of {one.name} have {one.gpus}",
            fix="lower gpus_per_node and ranks_per_node, or use another partition",
        )
    cpus = site.ranks_per_node * max(1, site.cpus_per_rank)
    if cpus > one.cpus:
        yield Violation(
            what="cpus",
            found=f"{site.ranks_per_node} ranks on a node take {cpus} CPUs, and nodes of "
            f"{one.name} have {one.cpus}",
            fix="lower ranks_per_node or cpus_per_rank",
        )


def memory(
    site: Site, nodes: int, experiment: Experiment, known: Mapping[str, slurm.Partition]
) -> Iterator[Violation]:
    """Whether weights, gradients and optimizers of both roles fit: into a GPU where the profile
    says which one, into the node's memory where there is none."""
    one = _partition(site, known)
    if one is None:
        return
    mib = _mib(site.memory) or one.memory_mib
    if mib > one.memory_mib:
        yield Violation(
            what="memory",
            found=f"memory is {site.memory}, and nodes of {one.name} have {one.memory_mib} MiB",
            fix="lower memory in the profile, or use another partition",
        )
        return
    if site.gpus_per_node and not site.gpu:
        return
    share = site.gpus_per_node / site.ranks_per_node if site.gpus_per_node else None
    room = hardware.gpu(site.gpu).memory * share if share else mib * 2**20 / site.ranks_per_node
    for variant in experiment.variants:
        needed = rank_bytes(variant.config, nodes * site.ranks_per_node)
        if needed > room:
            yield Violation(
                what="memory",
                found=f"{variant.name} takes at least {needed / GIB:.1f} GiB a rank, and has "
                f"{room / GIB:.1f} GiB",
                fix="raise memory, tp or pp, use more nodes, or a smaller model; see binac plan",
            )


def account(site: Site, held: Sequence[tuple[str, str, set[str]]]) -> Iterator[Violation]:
    """Where accounting is enforced: whether this user may use account, partition and QoS."""
    names = sorted({name for name, _, _ in held})
    if site.account not in names:
        yield Violation(
            what="account",
            found=f"you have no account {site.account!r}",
            fix=f"set account to one of {', '.join(names) or '(none: ask for one)'}",
        )
        return
    own = [(where, qos) for name, where, qos in held if name == site.account]
    limited = [where for where, _ in own if where]
    if limited and site.partition not in limited:
        yield Violation(
            what="account",
            found=f"{site.account} may not use partition {site.partition!r}",
            fix=f"use one of {', '.join(sorted(limited))}",
        )
    allowed = set[str]().union(*(qos for _, qos in own))
    if site.qos and site.qos not in allowed:
        yield Violation(
            what="qos",
            found=f"{site.account} may not use qos {site.qos!r}",
            fix=f"use one of {', '.join(sorted(allowed)) or '(none)'}",
        )


def this_machine(site: Site, experiment: Experiment, ranks: int) -> Iterator[Violation]:
    """For ranks on this machine: memory, interpreter, and the port if one is asked for."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes
    for variant in experiment.variants:
        needed = ranks * rank_bytes(variant.config, ranks)
        if needed > total and not site.gpus_per_node:
            yield Violation(
                what="memory",
                found=f"{variant.name} takes at least {needed / GIB:.1f} GiB, this machine has "
                f"{total / GIB:.1f} GiB",
                fix="use a smaller model, or more machines",
            )
    if shutil.which(site.python) is None:
        yield Violation(
            what="python",
            found=f"{site.python} is no program here",
            fix="set python to the interpreter of the environment that has megatron_binac",
        )
    if site.port and _taken(site.port):
        yield Violation(
            what="port",
            found=f"port {site.port} is taken on this machine",
            fix="leave --port out, and a free one is found; or end what holds it",
        )


# Figures


def rank_bytes(config: Config, ranks: int) -> int:
    """The least that the fullest rank holds of both roles, by the planner: weights, gradients,
    optimizer and reference, without activations and caches."""
    total = 0
    for role in _roles(config):
        total += max(
            memory_of.static_bytes(
                Shape.of(role.model, config.task.vocab_size),
                role.parallel,
                dp=max(1, ranks // (role.parallel.tp * role.parallel.pp)),
                stage=stage,
                train=role.train,
                reference=role.loss.kl_coef > 0,
                precision=role.precision,
                distributed=role.optimizer.distributed,
            ).total
            for stage in range(role.parallel.pp)
        )
    return total


def checkpoint_bytes(config: Config) -> int:
    """What the checkpoints of one run take: the newest ones, the first, and one being written."""
    whole = ParallelConfig()
    num = 0
    for role in _roles(config):
        shape = Shape.of(role.model, config.task.vocab_size)
        num += sum(shape.parameters_by_tensor(tp=whole.tp, pp=whole.pp, stage=0))
    return (config.keep_checkpoints + 2) * num * SAVED_BYTES


def _roles(config: Config) -> list[RoleConfig]:
    return [role for role in (config.actor, config.critic) if role is not None]


def _partition(site: Site, known: Mapping[str, slurm.Partition]) -> slurm.Partition | None:
    if site.partition:
        return known.get(site.partition)
    return next((one for one in known.values() if one.default), None)


def _mib(text: str) -> int:
    """Slurm's sizes: megabytes without a letter."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        return 0
    factor = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[found[2].upper()]
    return int(int(found[1]) * factor)


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        # As torch's store binds: a port in TIME_WAIT is free to it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
