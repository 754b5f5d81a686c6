"""`binac launch`, `status`, `logs`, `cancel`, `resume`: arguments in, words and codes out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_binac import config as configs
from megatron_binac import recipes
from megatron_binac.config import Config
from megatron_binac.launch import preflight, records, script, servers, stages, watch
from megatron_binac.launch import site as sites
from megatron_binac.launch.preflight import Violation
from megatron_binac.launch.records import Request
from megatron_binac.launch.site import Site
from megatron_binac.launch.stages import STATE, Experiment, Stage

POLL_S = 5.0
Layout = Callable[[argparse.Namespace, Config], list[str]]
"""The layout flags of the command line as assignments for a config."""


def main(name: str, args: argparse.Namespace, layout: Layout) -> int:
    """Run one of the five commands; the exit code."""
    if name == "launch":
        return _launch(args, layout)
    request = records.find(args.experiment, _homes(args.profile))
    if name == "status":
        return _status(request, args)
    if name == "logs":
        for text in watch.logs(request, args.stage):
            head, _, body = text.partition("\n")
            rows = body.splitlines()
            print("\n".join([head, *(rows if args.tail is None else rows[-args.tail :])]))
        return 0
    if name == "cancel":
        stopped = watch.cancel(request, now=args.now)
        print(f"stopped {', '.join(stopped)}" if stopped else "no job was left to stop")
        print(f"go on with: binac resume {request.folder}")
        return 0
    return _resume(request, args)


def _launch(args: argparse.Namespace, layout: Layout) -> int:
    site = _site(args)
    executor = args.executor or _default_executor(args, site)
    nodes: int = args.nodes
    if executor != "slurm" and nodes > 1:
        raise ValueError(f"--nodes {nodes} needs --executor slurm; this machine is one node")
    if executor == "local" and site.ranks_per_node > 1:
        raise ValueError(
            f"--executor local is one rank, got {site.ranks_per_node}; use --executor torchrun"
        )
    served = servers.parse(args.servers)
    if served and executor != "slurm":
        raise ValueError(
            f"--servers needs --executor slurm, got {executor}; start servers by hand and name "
            "them in engine.urls (docs/engines.md)"
        )
    violations: list[Violation] = []
    settings: list[list[str]] = []
    for recipe in args.recipes:
        try:
            base = recipes.get(recipe)
            own = servers.settings(served)
            settings.append([*layout(args, base), *_anchored(base, site), *own, *args.set])
        except ValueError as error:
            violations.append(Violation(what="recipe", found=str(error), fix="mend the name"))
    name = args.name or "-".join(dict.fromkeys(args.recipes))
    folder = (args.dir or Path(site.workdir) / "runs" / name).absolute()
    request = Request(
        name=name,
        folder=str(folder),
        executor=executor,
        nodes=nodes,
        recipes=args.recipes,
        settings=settings,
        seeds=_seeds(args.seeds),
        sweep=args.sweep,
        stages=_wanted(args),
        chained_jobs=args.jobs,
        servers=served,
        site=sites.to_dict(site),
    )
    experiment = Experiment(name=name, folder=folder, variants=(), chained_jobs=args.jobs)
    if not violations:
        try:
            experiment = request.experiment()
            stages.build(experiment, request.stages)
        except ValueError as error:
            violations.append(Violation(what="config", found=str(error), fix="mend --set"))
    violations += preflight.check(
        experiment,
        site,
        executor=executor,
        nodes=nodes,
        env=os.environ,
        allow_dirty=args.allow_dirty,
    )
    if violations:
        raise ValueError(
            f"{len(violations)} thing(s) to mend, nothing was submitted:\n"
            + "\n".join(f"  {number}. {text}" for number, text in enumerate(violations, 1))
        )
    if (folder / STATE / "launch.json").exists():
        held = records.load(folder)
        if _without(held) != _without(request):
            raise ValueError(
                f"{folder} holds another experiment; pass another --dir, or go on with it by "
                f"binac resume {folder}"
            )
        watch.release(held)
        request = held
    return _submit(request, dry=args.dry_run, wait=args.wait)


def _submit(request: Request, *, dry: bool, wait: bool) -> int:
    """Submit the stages that are not done; the exit code."""
    site, folder = request.where, Path(request.folder)
    todo: list[tuple[Stage, list[int]]] = []
    for stage in request.build():
        left = [i for i in range(len(stage.tasks)) if not stage.finished(folder, i)]
        if left:
            todo.append((stage, left))
        else:
            print(f"{stage.name}: done already")
    if not todo:
        print(f"nothing is left to do in {folder}")
        return 0
    home = records.home(site)
    os.environ["NEMORUN_HOME"] = str(home)  # NeMo-Run reads it once, when it is imported
    from megatron_binac.launch import nemo

    if dry:
        return _write_only(nemo, request, todo)
    request.save()
    if request.executor != "slurm":
        nproc = site.ranks_per_node
        ident, place, jobs = nemo.run_here(
            request.name, todo, site, nproc=nproc, folder=folder
        )
    else:
        ident, place, jobs = nemo.submit(
            request.name, todo, site, nodes=request.nodes, folder=folder
        )
    submission = {
        "id": ident,
        "place": str(place),
        "home": str(home),
        "jobs": {name: str(path) for name, path in jobs.items()},
    }
    request = dataclasses.replace(request, submissions=[*request.submissions, submission])
    request.save()
    records.point(place, folder)
    numbers = records.job_ids(request)
    for stage, left in todo:
        array = f", tasks {','.join(map(str, left))}" if len(stage.tasks) > 1 else ""
        after = f" {stage.when} {', '.join(stage.after)}" if stage.after else ""
        job = f"job {numbers[stage.name][-1]}" if stage.name in numbers else "here"
        print(f"{stage.name}: {job}{array}{after}")
    print(f"experiment {ident} in {folder}; look at it with: binac status {folder}")
    if request.executor != "slurm":
        return _outcome(request)
    return _wait(request) if wait else 0


def _write_only(nemo: Any, request: Request, todo: list[tuple[Stage, list[int]]]) -> int:
    """--dry-run: the batch script of each stage, the script of its ranks, the resolved configs."""
    folder = Path(request.folder)
    out = folder / "dry-run"
    out.mkdir(parents=True, exist_ok=True)
    for variant in request.experiment().variants:
        (out / f"{variant.name}.json").write_text(configs.to_json(variant.config) + "\n")
    if request.executor == "slurm":
        _, place, _ = nemo.submit(
            request.name, todo, request.where, nodes=request.nodes, folder=folder, dry=True
        )
        for path in place.glob("*_sbatch.sh"):
            shutil.copy(path, out / path.name)
        for path in place.glob("*/scripts/*.sh"):
            shutil.copy(path, out / path.name)
        shutil.rmtree(place)
    else:
        where = request.where
        for stage, left in todo:
            for index in left:
                text = script.of_task(stage, index, where, folder, where.ranks_per_node)
                (out / f"{stage.name}-{index}.sh").write_text(text)
    for path in sorted(out.iterdir()):
        print(path)
    return 0


def _status(request: Request, args: argparse.Namespace) -> int:
    if args.stacks:
        print(watch.stacks(request))
        return 0
    while True:
        found = watch.lines(request)
        if args.json:
            print(json.dumps([dataclasses.asdict(line) for line in found], indent=2))
        else:
            if args.watch:
                print("\033[2J\033[H", end="")
            print(f"{request.name} in {request.folder}")
            print(watch.table(found))
            alive = watch.ranks(request)
            print(f"\n{alive}" if alive else "", end="\n" if alive else "")
        if not args.watch:
            return 0
        sys.stdout.flush()
        time.sleep(args.watch)


def _resume(request: Request, args: argparse.Namespace) -> int:
    if args.dry_run:
        return _submit(request, dry=True, wait=False)
    watch.release(request)
    return _submit(request, dry=False, wait=False)


def _wait(request: Request) -> int:
    """Wait until no job of the experiment can do anything any more; the exit code."""
    while any(line.job and line.state.upper() in watch.slurm.LIVE for line in watch.lines(request)):
        time.sleep(POLL_S)
    return _outcome(request)


def _outcome(request: Request) -> int:
    """0 where every stage is done, 1 with the table where one is not."""
    folder = Path(request.folder)
    if all(s.finished(folder, i) for s in request.build() for i in range(len(s.tasks))):
        return 0
    print(watch.table(watch.lines(request)), file=sys.stderr)
    return 1


# Reading the arguments


def _site(args: argparse.Namespace) -> Site:
    """The site of the profile with what the command line changes."""
    site = sites.load(args.profile) if args.profile is not None else Site(python=sys.executable)
    changes: dict[str, Any] = {
        "workdir": str(Path(site.workdir or ".").absolute()),
        "ranks_per_node": args.ranks_per_node,
        "time": args.time,
        "port": args.port,
    }
    return dataclasses.replace(site, **{k: v for k, v in changes.items() if v is not None})


def _default_executor(args: argparse.Namespace, site: Site) -> str:
    if args.profile is not None:
        return "slurm"
    return "torchrun" if site.ranks_per_node > 1 else "local"


def _anchored(config: Config, site: Site) -> list[str]:
    """The cache of warm starts at one place for all jobs, wherever they are started."""
    cache = Path(config.warm_start.cache_dir)
    return [] if cache.is_absolute() else [f"warm_start.cache_dir={Path(site.workdir) / cache}"]


def _wanted(args: argparse.Namespace) -> list[str]:
    if args.chain and args.stages:
        raise ValueError("got --chain and --stages; --chain is all of them, give one of the two")
    if args.chain:
        return stages.chain()
    return args.stages.split(",") if args.stages else ["train"]


def _seeds(text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ValueError(f"--seeds got {text!r}, expected numbers with commas: 1,2,3") from None


def _homes(profile: Path | None) -> list[Path]:
    site = sites.load(profile) if profile is not None else Site()
    return [records.home(site)]


def _without(request: Request) -> dict[str, Any]:
    """A request without what may change from one submission to the next."""
    row = dataclasses.asdict(request)
    return {k: v for k, v in row.items() if k not in ("submissions", "site", "nodes", "executor")}
