"""What a job finds in its environment: in the generated text, and on the running job."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers_cluster import ROOT, Cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SECRET = "swordfish"
WORDS = {"A_WORD": "a  b", "http_proxy": "not a proxy; $HOME `x` '\"", "Mixed_Case": "1"}

# In place of the interpreter: says what it sees, by the same code that real ranks meet by, and goes
# when the file GATE is there.
PROBE = '''#!{python}
import hashlib, json, os, socket, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from megatron_binac import ranks

world = ranks.existing(os.environ)
names = (*{names!r}, "MASTER_ADDR", "MASTER_PORT", "BINAC_PORT", "RANK", "SLURM_JOB_ID")
facts = {{name: os.environ.get(name) for name in names}}
facts["upper"] = [name for name in os.environ if name in ("HTTP_PROXY", "MIXED_CASE")]
facts["secret"] = hashlib.sha256(os.environ.get("A_SECRET", "").encode()).hexdigest()
facts |= {{"host": socket.gethostname(), "world": world, "argv": sys.argv[1:]}}
facts["files"] = sorted(os.listdir("."))
run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
run_dir.mkdir(parents=True, exist_ok=True)
(run_dir / ("draft" + facts["RANK"])).write_text(json.dumps(facts))
(run_dir / ("draft" + facts["RANK"])).rename(run_dir / ("facts" + facts["RANK"] + ".json"))
while not os.path.exists(os.environ["GATE"]):
    time.sleep(0.05)
'''


@pytest.fixture
def probe(cluster: Cluster) -> str:
    path = cluster.work / "probe"
    path.write_text(PROBE.format(python=sys.executable, root=str(ROOT), names=tuple(WORDS)))
    path.chmod(0o755)
    return str(path)


def facts(cluster: Cluster, place: Path, world: int) -> list[dict[str, Any]]:
    """What each rank has told, by rank."""
    found = [place / "quickstart" / f"facts{rank}.json" for rank in range(world)]
    wait_for(
        lambda: all(path.exists() for path in found), "every rank", lambda: cluster.tail(place)
    )
    return [json.loads(path.read_text()) for path in found]


def ended(cluster: Cluster, place: Path) -> dict[str, Any]:
    """The stage once its job is over; the probe has made no run, so it must not count as done."""
    wait_for(
        lambda: cluster.line(place, "train")["state"] == "output is gone",
        "the job to end", lambda: cluster.tail(place),
    )  # fmt: skip
    return cluster.line(place, "train")


def test_the_generated_text(cluster: Cluster, probe: str) -> None:
    site = cluster.site("text", python=probe, env=WORDS, secrets=["A_SECRET"])
    place = cluster.launch(site, "text", "--dry-run")
    texts = {path.name: path.read_text() for path in (place / "dry-run").iterdir()}
    assert sorted(texts) == ["quickstart.json", "train.sh", "train_sbatch.sh"]
    lines = texts["train.sh"].splitlines()
    for name, value in WORDS.items():
        assert f"export {name}={shlex.quote(value)}" in lines
    assert not any(SECRET in text for text in texts.values())
    batch = texts["train_sbatch.sh"]
    # Whoever echoes commands would print what they hold.
    assert batch.index("set +vx") < batch.index("MASTER_ADDR=")
    assert 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)' in batch
    assert "BINAC_PORT=$((15000 + (SLURM_JOB_ID * 17" in batch
    assert "#SBATCH --nodes=2" in batch
    # In the end of the job nothing may fail before -e is off, or it would not be requeued.
    body = batch[batch.index("binac_end() {"):].splitlines()[1:3]
    assert body == ['  local code=$? said="" draft newest idle failures state pulse', "  set +e"]


def test_values_secrets_hosts_and_ports_of_running_jobs(cluster: Cluster, probe: str) -> None:
    """Two jobs at once on the same two nodes, of which the first one leads."""
    gate = cluster.work / "probe-gate"
    keys: dict[str, Any] = {
        "env": WORDS | {"GATE": str(gate)}, "secrets": ["A_SECRET"], "exclude": "node[1-2]",
        "python": probe,
    }  # fmt: skip
    places = [cluster.launch(cluster.site(name, **keys), name) for name in ("probe1", "probe2")]
    both = [facts(cluster, place, 2) for place in places]
    gate.touch()
    for place, ranks in zip(places, both, strict=True):
        lead = ranks[0]
        job = int(lead["SLURM_JOB_ID"])
        assert [r["host"] for r in ranks] == ["node3", "node4"]
        for rank in ranks:
            assert {name: rank[name] for name in WORDS} == WORDS
            assert rank["upper"] == []
            assert rank["secret"] == hashlib.sha256(SECRET.encode()).hexdigest()
            assert (rank["world"], rank["MASTER_ADDR"]) == (2, "node3")
            assert rank["MASTER_PORT"] == lead["MASTER_PORT"]
            assert rank["BINAC_PORT"] == lead["BINAC_PORT"] == str(15000 + job * 17 % 15000)
        assert ended(cluster, place)["job"] == str(job)
    first, second = (ranks[0] for ranks in both)
    assert first["MASTER_PORT"] != second["MASTER_PORT"]
    assert first["BINAC_PORT"] != second["BINAC_PORT"]
    assert cluster.env["A_SECRET"] == SECRET
    # Scripts, logs, profiles, records: everything that launching and running has left.
    held = [path for path in cluster.work.rglob("*") if path.is_file()]
    assert any(path.name.startswith("sbatch_") for path in held)
    assert [path for path in held if SECRET.encode() in path.read_bytes()] == []


def test_code_from_git_is_the_last_commit(cluster: Cluster, probe: str, tmp_path: Path) -> None:
    def git(*words: str) -> None:
        name = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *name, *words], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "kept.py").touch()
    git("add", "kept.py")
    git("commit", "-qm", "one")
    (tmp_path / "forgotten.py").touch()
    gate = cluster.work / "git-gate"
    gate.touch()
    site = cluster.site("git", code="git", python=probe, env={"GATE": str(gate)})
    inside = Cluster(root=cluster.root, work=cluster.work, env=cluster.env, cwd=tmp_path)
    place = inside.launch(site, "git", "--allow-dirty", nodes=2)
    files = [rank["files"] for rank in facts(cluster, place, 2)]
    assert ["kept.py" in found for found in files] == [True, True]
    assert ["forgotten.py" in found for found in files] == [False, False]
    ended(cluster, place)
