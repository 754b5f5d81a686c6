"""Experiments of NeMo-Run: what `binac launch` submits, or runs on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if importlib.util.find_spec("nemo_run") is None:
    raise ValueError(
        "NeMo-Run is not installed; pip install -c constraints.txt 'megatron_binac[launch]'"
    )

import nemo_run as run

from megatron_binac.launch import script
from megatron_binac.launch.site import Site
from megatron_binac.launch.stages import Stage


def executor_of(stage: Stage, where: Site, *, nodes: int, todo: Sequence[int], folder: Path) -> Any:
    """The SlurmExecutor of a stage; `todo` are the tasks of it that are still to be done."""
    whole = stage.all_ranks
    torchrun = whole and where.launcher == "torchrun"
    ranks = where.ranks_per_node if whole else 1
    partition = where.partition if whole else where.one_rank_partition or where.partition
    further: dict[str, Any] = {name.replace("-", "_"): v for name, v in where.sbatch.items()}
    further["kill_on_invalid_dep"] = "yes"
    if where.reservation:
        further["reservation"] = where.reservation
    cpus = where.cpus_per_rank * (ranks if torchrun else 1)
    srun_args = [*where.srun_args]
    total = nodes + sum(stage.servers.values())
    if stage.servers:
        # The ranks' own step, on the first nodes.
        num = nodes if torchrun else nodes * ranks
        srun_args += ["--relative=0", f"--nodes={nodes}", f"--ntasks={num}"]
    on_gpus = where.gpus_per_node and (whole or not where.one_rank_partition)
    return run.SlurmExecutor(
        account=where.account,
        partition=partition or None,
        qos=where.qos or None,
        time=where.time,
        nodes=total if whole else 1,
        ntasks_per_node=1 if torchrun else ranks,
        cpus_per_task=cpus or None,
        gpus_per_node=where.gpus_per_node if on_gpus else None,
        mem=where.memory or None,
        exclusive=where.exclusive or None,
        constraint=where.constraint or None,
        exclude=where.exclude or None,
        array=script.array(stage, todo),
        signal=f"{where.signal}@{where.stop_before_s}",
        job_name_prefix="binac.",
        container_image=where.container_image or None,
        container_mounts=where.mounts,
        srun_args=srun_args or None,
        setup_lines=script.of_batch(stage, where, folder, nodes=nodes),
        dependency_type=stage.when,
        additional_parameters=further,
        packager=_packager(where),
        tunnel=run.LocalTunnel(job_dir=""),
        poll_estimated_start_time=False,
        # Restarts are ours (`script`): NeMo-Run would count a stop before the time limit as one.
        retries=0,
    )


def submit(
    name: str,
    stages: Sequence[tuple[Stage, list[int]]],
    where: Site,
    *,
    nodes: int,
    folder: Path,
    dry: bool = False,
) -> tuple[str, Path, dict[str, Path]]:
    """Hand stages with their open tasks to Slurm as one experiment, and do not wait.

    Returns the experiment's id and folder, and the folder of each stage's job. With `dry` only the
    scripts are written. Raises ValueError with Slurm's words where it refuses.
    """
    there = {stage.name for stage, _ in stages}
    with _experiment(name) as experiment:
        for stage, todo in stages:
            experiment.add(
                run.Script(inline=script.of_rank(stage, where)),
                executor=executor_of(stage, where, nodes=nodes, todo=todo, folder=folder),
                name=stage.name,
                dependencies=[before for before in stage.after if before in there],
            )
        if dry:
            experiment.dryrun(log=False, delete_exp_dir=False)
        else:
            try:
                experiment.run(detach=True)
            except Exception as error:
                reason = getattr(getattr(error, "result", None), "stderr", "") or str(error)
                raise ValueError(f"Slurm refused the job: {reason.strip()}") from error
        place = Path(experiment._exp_dir)
        jobs = {job.id: Path(job.executor.job_dir) for job in experiment.jobs}
    return experiment._id, place, jobs


def run_here(
    name: str, stages: Sequence[tuple[Stage, list[int]]], where: Site, *, nproc: int, folder: Path
) -> tuple[str, Path, dict[str, Path]]:
    """Run stages on this machine, one after the other; returns when the last one has ended."""
    with _experiment(name) as experiment:
        members: dict[str, list[str]] = {}
        for stage, todo in stages:
            before = [name for b in stage.after for name in members.get(b, [])]
            members[stage.name] = []
            for index in todo:
                task = f"{stage.name}-{index}"
                experiment.add(
                    run.Script(inline=script.of_task(stage, index, where, folder, nproc)),
                    executor=run.LocalExecutor(packager=run.Packager()),
                    name=task,
                    dependencies=before,
                    tail_logs=True,
                )
                members[stage.name].append(task)
        experiment.run()
        place = Path(experiment._exp_dir)
        jobs = {job.id: Path(job.executor.job_dir) for job in experiment.jobs}
    return experiment._id, place, jobs


def _experiment(name: str) -> Any:
    return run.Experiment(
        name, enable_goodbye_message=False, skip_status_at_exit=True, clean_mode=True
    )


def _packager(where: Site) -> Any:
    if where.code == "git":
        return run.GitArchivePackager(check_uncommitted_changes=False)  # preflight has listed them
    return run.Packager()
