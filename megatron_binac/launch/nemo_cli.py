"""Our tasks for users of NeMo-Run: partials, factories of executors, entry points of `nemo`.

`train_task`, `eval_task`, `report_task` give a `run.Partial` for an experiment of your own;
`binac_local`, `binac_torchrun`, `binac_slurm` give executors, by name on the command line as well:

    nemo binac train recipe=quickstart folder=/shared/runs/a --yes

Without `from __future__ import annotations`: NeMo-Run evaluates annotations that are text in a
namespace of its own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nemo_run as run

from megatron_binac.launch import site, tasks


def train_task(recipe: str, folder: str, settings: Sequence[str] = ()) -> Any:
    """`binac train` as a `run.Partial`, for `Experiment.add` with an executor of your own."""
    return run.Partial(tasks.train, recipe=recipe, folder=folder, settings=list(settings))


def eval_task(folder: str, output: str) -> Any:
    """`binac eval` as a `run.Partial`."""
    return run.Partial(tasks.evaluate, folder=folder, output=output)


def report_task(folders: Sequence[str], out: str) -> Any:
    """`binac report` as a `run.Partial`; give it one process."""
    return run.Partial(tasks.report, folders=list(folders), out=out)


@run.cli.factory
def binac_local() -> run.Config[run.LocalExecutor]:
    """One process on this machine."""
    return run.Config(run.LocalExecutor)


@run.cli.factory
def binac_torchrun(ranks: int = 2) -> run.Config[run.LocalExecutor]:
    """`ranks` processes on this machine."""
    return run.Config(run.LocalExecutor, ntasks_per_node=ranks, launcher="torchrun")


@run.cli.factory
def binac_slurm(profile: str, nodes: int = 1) -> run.Config[run.SlurmExecutor]:
    """Ranks that srun starts, on the site of a profile (a path)."""
    where = site.load(Path(profile))
    return run.Config(
        run.SlurmExecutor,
        account=where.account,
        partition=where.partition or None,
        qos=where.qos or None,
        time=where.time,
        nodes=nodes,
        ntasks_per_node=where.ranks_per_node,
        gpus_per_node=where.gpus_per_node or None,
        signal=f"{where.signal}@{where.stop_before_s}",
        container_image=where.container_image or None,
        container_mounts=list(where.container_mounts),
        srun_args=list(where.srun_args) or None,
        tunnel=run.Config(run.LocalTunnel, job_dir=""),
        packager=run.Config(run.Packager),
        poll_estimated_start_time=False,
    )


train = run.cli.entrypoint(tasks.train, name="train", namespace="binac")
evaluate = run.cli.entrypoint(tasks.evaluate, name="evaluate", namespace="binac")
