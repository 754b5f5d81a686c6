"""A Slurm cluster for the session; where there can be none, tests that need one are skipped and say
why. BINAC_REQUIRE_SLURM=1 makes that a failure; a cluster that does not start always is one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_cluster import PACED, ROOT, SCRIPT, STANDIN, Cluster

NODES = 4
CANNOT_BE_HAD = 3
"""Exit code of tools/local_slurm.sh on a machine where there can be no cluster."""
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NEMORUN_HOME")


def _unavailable(reason: str) -> None:
    if os.environ.get("BINAC_REQUIRE_SLURM"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that is there until the session ends, however it ends."""
    if importlib.util.find_spec("nemo_run") is None:
        _unavailable("needs NeMo-Run: pip install -c constraints.txt -e '.[launch]'")
    work = tmp_path_factory.mktemp("launch")
    root = tmp_path_factory.mktemp("slurm")
    started = subprocess.run(
        [SCRIPT, "start", "--root", root, "--nodes", str(NODES), "--watch", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    try:
        if started.returncode == CANNOT_BE_HAD:
            _unavailable(f"needs a Slurm cluster: {started.stderr.strip().splitlines()[-1]}")
        assert started.returncode == 0, started.stderr
        package = work / "tasks"
        facts = package / "paced-1.0.dist-info"
        facts.mkdir(parents=True)
        (package / "paced.py").write_text(PACED)
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: paced\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text("[megatron_binac.tasks]\npaced = paced:Paced\n")
        env = {k: v for k, v in os.environ.items() if k not in FOREIGN}
        env |= {
            "SLURM_CONF": str(root / "etc" / "slurm.conf"),
            "PYTHONPATH": f"{package}:{ROOT}",
            "A_SECRET": "swordfish",
        }
        yield Cluster(root=root, work=work, env=env)
    finally:
        subprocess.run([SCRIPT, "remove", "--root", root], check=False, timeout=300)


@pytest.fixture(scope="session")
def chain(cluster: Cluster) -> Path:
    """The whole experiment, undisturbed, on two ranks of two nodes that share each layer (TP 2).

    What happens to other jobs is measured by it.
    """
    place = cluster.launch(cluster.site("chain"), "chain", "--tp", "2", "--chain")
    cluster.wait_done(place)
    return place


@pytest.fixture(scope="session")
def standin(cluster: Cluster) -> str:
    """In a profile in place of python: runs without torch, in seconds."""
    path = cluster.work / "standin"
    path.write_text(STANDIN.format(python=sys.executable, root=str(ROOT)))
    path.chmod(0o755)
    return str(path)
