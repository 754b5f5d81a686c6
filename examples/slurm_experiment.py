"""Our tasks in an experiment of your own: NeMo-Run, a Slurm site, two recipes, one report.

    python examples/slurm_experiment.py examples/slurm_local.toml /tmp/mine          # only shows it
    python examples/slurm_experiment.py examples/slurm_local.toml /tmp/mine --submit

`binac launch` does more (checks before, requeues, skips what is done); this is for a graph that it
does not know.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(profile: str, folder: str, submit: bool) -> None:
    os.environ.setdefault("NEMORUN_HOME", f"{folder}/nemo")  # read once, by the import
    import nemo_run as run
    from fiddle import build

    from megatron_binac.launch import nemo_cli

    executor = build(nemo_cli.binac_slurm(profile, nodes=2))
    with run.Experiment("mine", skip_status_at_exit=True) as experiment:
        runs = [f"{folder}/{name}" for name in ("quickstart", "quickstart_joint")]
        trained = [
            experiment.add(
                nemo_cli.train_task(Path(run_dir).name, run_dir, ["num_steps=20"]),
                executor=executor,
                name=Path(run_dir).name,
            )
            for run_dir in runs
        ]
        single = executor.clone()
        single.nodes = single.ntasks_per_node = 1
        single.dependency_type = "afterany"
        report = nemo_cli.report_task(runs, f"{folder}/report")
        experiment.add(report, executor=single, name="report", dependencies=trained)
        if submit:
            experiment.run(detach=True)
        else:
            experiment.dryrun()


if __name__ == "__main__":  # NeMo-Run runs this file again on every rank
    main(sys.argv[1], sys.argv[2], "--submit" in sys.argv)
