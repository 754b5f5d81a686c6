"""The experiment as a list of stages: what each runs, after which others, and when it is done.

A stage is one job, an array of jobs where several variants (recipes, seeds, sweeps) run. Nothing
here knows Slurm or NeMo-Run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megatron_binac import config as configs
from megatron_binac import recipes, run_folder
from megatron_binac.config import Config
from megatron_binac.launch import servers

STATE = ".launch"
"""Folder of an experiment's own records, inside the experiment's folder."""
BENCH_SEQUENCES = "20000"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One training run of the experiment."""

    name: str
    recipe: str
    settings: tuple[str, ...]
    """Assignments as `--set` takes them."""
    config: Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One command of a stage."""

    argv: tuple[str, ...]
    """What comes after `binac`."""
    makes: Path
    """A run folder or a file; with it the task is done."""
    captures: bool = False
    """Whether `makes` is what the command prints."""
    drafted: bool = False
    """Whether the command writes `draft_of(makes)`, which becomes `makes` once it has succeeded."""
    key: str = ""
    """Whatever else decides the output, for the fingerprint."""
    serves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By role: what one of its servers runs."""
    engines: Path = Path()
    """The run whose roles the servers serve."""

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes what the task makes."""
        text = json.dumps([self.argv, str(self.makes), self.key])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One job of the experiment."""

    name: str
    tasks: tuple[Task, ...]
    """One a variant, or a single one."""
    after: tuple[str, ...] = ()
    """Stages that come before it."""
    when: Literal["afterok", "afterany"] = "afterok"
    """Whether those have to succeed, or only to end."""
    all_ranks: bool = True
    """Whether it runs on every rank of the job, or is one process."""
    state: str = ""
    """Name under which it keeps its records; chained jobs share one."""
    servers: Mapping[str, int] = field(default_factory=dict)
    """By role: nodes beside those of the ranks, for vLLM servers."""
    server_tp: Mapping[str, int] = field(default_factory=dict)
    """By role: GPUs of one server."""

    def record(self, folder: Path, index: int) -> Path:
        """What the records of task `index` start with."""
        return folder / STATE / f"{self.state or self.name}-{index}"

    def finished(self, folder: Path, index: int) -> bool:
        """Whether the output of task `index` is there, valid, and made by this very command."""
        task, done = self.tasks[index], Path(f"{self.record(folder, index)}.done")
        if not done.is_file() or done.read_text(encoding="ascii").strip() != task.fingerprint:
            return False
        return _valid(task.makes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """What `binac launch` was asked for."""

    name: str
    folder: Path
    variants: tuple[Variant, ...]
    servers: Mapping[str, int] = field(default_factory=dict)
    """Nodes for vLLM servers, by role."""
    chained_jobs: int = 1
    """Jobs that the training may take one after the other, beside requeues."""

    def run_dir(self, variant: Variant) -> Path:
        return self.folder / variant.name


def variants(
    names: Sequence[str], settings: Sequence[Sequence[str]], seeds: Sequence[int], sweep: list[str]
) -> tuple[Variant, ...]:
    """Every recipe with every seed and every combination of swept values.

    `settings[i]` are the assignments of recipe i; `sweep` has KEY=V1,V2 texts. Raises ValueError
    for what the config refuses.
    """
    axes: list[list[str]] = []
    for text in sweep:
        key, sign, values = text.partition("=")
        if not (sign and key and values):
            raise ValueError(f"--sweep got {text!r}, expected KEY=VALUE,VALUE")
        axes.append([f"{key}={value}" for value in values.split(",")])
    if seeds:
        axes.append([f"seed={seed}" for seed in seeds])
    found: list[Variant] = []
    for recipe, own in zip(names, settings, strict=True):
        for swept in itertools.product(*axes):
            assignments = (*own, *swept)
            config = configs.override(recipes.get(recipe), list(assignments))
            parts = [a.rpartition(".")[2].replace("=", "") for a in swept]
            found.append(
                Variant(
                    name="-".join([recipe, *parts]).replace("/", "_"),
                    recipe=recipe,
                    settings=assignments,
                    config=config,
                )
            )
    twice = {v.name for v in found if sum(w.name == v.name for w in found) > 1}
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))} comes twice; give each variant once")
    return tuple(found)


def draft_of(path: Path) -> Path:
    """Where a file is written before it is known to be whole."""
    return path.with_name(path.name + ".draft")


# The chain. Each builder gives a stage, or None where the experiment has no use for it.


def warm_actor(experiment: Experiment) -> Stage | None:
    """The actor's supervised start, made once for all variants that share it."""
    return _warm_start(experiment, "actor")


def warm_critic(experiment: Experiment) -> Stage | None:
    """The critic's, side by side with it."""
    return _warm_start(experiment, "critic")


def _warm_start(experiment: Experiment, role: str) -> Stage | None:
    distinct: dict[str, Variant] = {}
    for variant in experiment.variants:
        config = variant.config
        own = getattr(config, role)
        if own is None or not getattr(config.warm_start, role).steps:
            continue
        facts = [
            asdict(config.task),
            asdict(own.model),
            own.precision,
            asdict(getattr(config.warm_start, role)),
            config.warm_start.seed,
            config.warm_start.cache_dir,
        ]
        distinct.setdefault(json.dumps(facts, sort_keys=True), variant)
    if not distinct:
        return None
    tasks = []
    for variant in distinct.values():
        place = experiment.folder / f"warm_{role}" / variant.name
        argv = ("warm-start", variant.recipe, "--role", role, "--run-dir", str(place))
        tasks.append(
            Task(argv=(*argv, *_sets(variant)), makes=place, key=configs.to_json(variant.config))
        )
    return Stage(name=f"warm_{role}", tasks=tuple(tasks))


def train(experiment: Experiment) -> Stage:
    """The bilevel training itself."""
    tasks = []
    for variant in experiment.variants:
        place = experiment.run_dir(variant)
        argv = ("train", variant.recipe, "--run-dir", str(place), *_sets(variant))
        tasks.append(Task(argv=argv, makes=place, key=configs.to_json(variant.config)))
    after = ("warm_actor", "warm_critic")
    return _served(Stage(name="train", tasks=tuple(tasks), after=after), experiment)


def _served(stage: Stage, experiment: Experiment) -> Stage:
    """A stage of one task a variant, with the servers that its roles sample from."""
    server_tp = _server_tp(experiment)
    tasks = []
    for task, variant in zip(stage.tasks, experiment.variants, strict=True):
        place = experiment.run_dir(variant)
        serves = {role: servers.command(variant.config, role, place) for role in server_tp}
        tasks.append(replace(task, serves=serves, engines=place))
    return replace(stage, tasks=tuple(tasks), servers=experiment.servers, server_tp=server_tp)


def _server_tp(experiment: Experiment) -> dict[str, int]:
    """GPUs of a server by role; ValueError where variants differ, as one job script starts all."""
    found: dict[str, int] = {}
    for role in experiment.servers:
        missing = [v.name for v in experiment.variants if getattr(v.config, role) is None]
        if missing:
            raise ValueError(
                f"--servers asks for servers of the {role}, and {missing[0]} has no {role} that is "
                "a model; leave it out"
            )
        tps = {getattr(v.config, role).engine.tp for v in experiment.variants}
        if len(tps) > 1:
            raise ValueError(
                f"{role}.engine.tp is {sorted(tps)} over the variants, and --servers needs one; "
                "launch them as experiments of their own"
            )
        found[role] = tps.pop()
    return found


def export(experiment: Experiment) -> Stage:
    """The trained actors as Hugging Face folders, whole once the command has ended."""
    tasks = []
    for variant in experiment.variants:
        place = experiment.folder / "export" / variant.name
        argv = ("convert", str(experiment.run_dir(variant)), str(place), "--role", "actor")
        key = configs.to_json(variant.config)
        tasks.append(Task(argv=argv, makes=place / "config.json", key=key))
    return Stage(name="export", tasks=tuple(tasks), after=("train",), all_ranks=False)


def evaluate(experiment: Experiment) -> Stage:
    """Every run on its held-out problems."""
    tasks = []
    for variant in experiment.variants:
        file = experiment.folder / "eval" / f"{variant.name}.json"
        argv = ("eval", str(experiment.run_dir(variant)), "--output", str(draft_of(file)))
        key = configs.to_json(variant.config)
        tasks.append(Task(argv=argv, makes=file, drafted=True, key=key))
    return _served(Stage(name="eval", tasks=tuple(tasks), after=("train",)), experiment)


def bench(experiment: Experiment) -> Stage:
    """The planner of packed batches; it needs no weights and starts at once."""
    file = experiment.folder / "bench" / "packing.json"
    argv = ("bench", "packing", "--json", "--num-sequences", BENCH_SEQUENCES, "--dp", "8")
    task = Task(argv=argv, makes=file, captures=True, drafted=True)
    return Stage(name="bench", tasks=(task,), all_ranks=False)


def report(experiment: Experiment) -> Stage:
    """Curves and tables of whatever runs there are, also where some failed: afterany."""
    folders = [str(experiment.run_dir(variant)) for variant in experiment.variants]
    out = experiment.folder / "report"
    task = Task(
        argv=("report", *folders, "--out", str(out)),
        makes=out / "table.md",
        captures=True,
        drafted=True,
    )
    return Stage(
        name="report", tasks=(task,), after=("train", "eval"), when="afterany", all_ranks=False
    )


def compare(experiment: Experiment) -> Stage | None:
    """Runs at equal cost, seeds pooled, where there are several; of those that have ended well."""
    if len(experiment.variants) < 2:
        return None
    folders = [str(experiment.run_dir(variant)) for variant in experiment.variants]
    task = Task(
        argv=("compare", *folders, "--json"),
        makes=experiment.folder / "report" / "compare.json",
        captures=True,
        drafted=True,
    )
    return Stage(name="compare", tasks=(task,), after=("train",), all_ranks=False)


CHAIN: dict[str, Callable[[Experiment], Stage | None]] = {
    "warm_actor": warm_actor,
    "warm_critic": warm_critic,
    "train": train,
    "export": export,
    "eval": evaluate,
    "bench": bench,
    "report": report,
    "compare": compare,
}
"""Every stage by name, in the order in which they are submitted."""


NEEDED = {"export": "safetensors"}
"""Packages without which a stage is left out of `--chain`."""


def chain() -> list[str]:
    """The stages of `--chain`: all that can run here."""
    return [name for name in CHAIN if name not in NEEDED or find_spec(NEEDED[name]) is not None]


def build(experiment: Experiment, wanted: Collection[str]) -> tuple[Stage, ...]:
    """The stages of `wanted` (names) in order, each after those before it that are there too.

    Raises ValueError where a name is no stage.
    """
    unknown = sorted(set(wanted) - set(CHAIN))
    if unknown:
        raise ValueError(f"there is no stage {unknown[0]!r}, expected some of {', '.join(CHAIN)}")
    found = [maker(experiment) for name, maker in CHAIN.items() if name in wanted]
    kept = [stage for stage in found if stage is not None]
    chained: list[Stage] = []
    last: dict[str, str] = {}
    for stage in kept:
        after = tuple(last[name] for name in stage.after if name in last)
        chained.append(replace(stage, after=after))
        last[stage.name] = stage.name
        if stage.name != "train":
            continue
        for number in range(2, experiment.chained_jobs + 1):
            name = f"{stage.name}_{number}"
            chained.append(
                replace(
                    stage, name=name, after=(last["train"],), when="afterany", state=stage.name
                )
            )
            last["train"] = name
    return tuple(chained)


def _sets(variant: Variant) -> tuple[str, ...]:
    return tuple(part for text in variant.settings for part in ("--set", text))


def _valid(path: Path) -> bool:
    """Whether an output is more than a name: a run with a checkpoint, a file that can be read."""
    if path.is_dir():
        try:
            run_folder.load_config(path)
        except ValueError:
            return False
        trained = (path / "metrics.jsonl").exists()
        return not trained or run_folder.latest_checkpoint(path) is not None
    if path.suffix == ".json":
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return True
    return path.is_file() and path.stat().st_size > 0
