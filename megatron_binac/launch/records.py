"""What an experiment remembers: the request it was made from, and its jobs, over NeMo-Run's store.

`FOLDER/.launch/launch.json` holds the request and where NeMo-Run keeps each of its experiments;
`NEMORUN_HOME/experiments/TITLE/ID/binac.json` points back. The numbers of the jobs are NeMo-Run's
own (`NEMORUN_HOME/.slurm_jobs`), read as text: looking at jobs needs no NeMo-Run and no torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_binac.launch import site as sites
from megatron_binac.launch import stages
from megatron_binac.launch.site import Site
from megatron_binac.launch.stages import STATE, Experiment, Stage

POINTER = "binac.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Everything that `binac launch` was asked for, resolved: enough to ask for it again."""

    name: str
    folder: str
    executor: str
    nodes: int
    recipes: list[str]
    settings: list[list[str]]
    seeds: list[int]
    sweep: list[str]
    stages: list[str]
    chained_jobs: int
    site: dict[str, Any]
    servers: dict[str, int] = field(default_factory=dict)
    """Nodes for vLLM servers, by role."""
    submissions: list[dict[str, Any]] = field(default_factory=list)
    """One an experiment of NeMo-Run: id, folder, home, and the folder of each stage's job."""

    @property
    def where(self) -> Site:
        return sites.from_dict(self.site)

    def experiment(self) -> Experiment:
        """The experiment with its variants; ValueError where the recipes have changed."""
        found = stages.variants(self.recipes, self.settings, self.seeds, self.sweep)
        return Experiment(
            name=self.name,
            folder=Path(self.folder),
            variants=found,
            servers=self.servers,
            chained_jobs=self.chained_jobs,
        )

    def build(self) -> tuple[Stage, ...]:
        """Its stages."""
        return stages.build(self.experiment(), self.stages)

    def save(self) -> None:
        """Write launch.json in one move."""
        target = Path(self.folder) / STATE / "launch.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        draft.replace(target)


def load(folder: Path) -> Request:
    """The request of an experiment's folder; ValueError where it holds none."""
    path = folder / STATE / "launch.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no experiment of binac launch (no {path})")
    return Request(**json.loads(path.read_text(encoding="utf-8")))


def home(site: Site) -> Path:
    """NEMORUN_HOME: the environment's, else a folder of the site. All nodes must see it."""
    return Path(os.environ.get("NEMORUN_HOME") or Path(site.workdir) / ".nemorun")


def find(what: str | None, homes: list[Path]) -> Request:
    """An experiment by its folder, by NeMo-Run's id or title, or the newest one; ValueError."""
    if what is not None and (Path(what) / STATE).is_dir():
        return load(Path(what))
    pointers = [
        path for place in homes for path in place.glob(f"experiments/*/*/{POINTER}")
    ]
    named = [p for p in pointers if what in (None, p.parent.name, p.parent.parent.name)]
    if not named:
        looked = ", ".join(str(place) for place in homes)
        known = sorted({p.parent.parent.name for p in pointers})
        raise ValueError(
            f"there is no experiment {what or ''} in {looked}; "
            + (f"known are {', '.join(known)}; " if known else "")
            + "give the folder of one, or set NEMORUN_HOME"
        )
    newest = max(named, key=lambda path: path.stat().st_mtime)
    return load(Path(json.loads(newest.read_text(encoding="utf-8"))["folder"]))


def point(place: Path, folder: Path) -> None:
    """Leave the way to an experiment's folder beside NeMo-Run's own records."""
    (place / POINTER).write_text(json.dumps({"folder": str(folder)}), encoding="utf-8")


def job_ids(request: Request) -> dict[str, list[str]]:
    """Slurm's numbers of each stage's jobs, oldest first."""
    found: dict[str, list[str]] = {}
    for submission in request.submissions:
        listing = Path(submission["home"]) / ".slurm_jobs"
        rows = listing.read_text(encoding="utf-8").splitlines() if listing.exists() else []
        for stage, place in submission["jobs"].items():
            for row in rows:
                number, _, rest = row.partition(" = ")
                if place in rest.split(","):
                    found.setdefault(stage, []).append(number)
    return found
