"""GPU figures from `data/gpus.json`, each with its source."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One kind of GPU in its usual node; bytes, FLOP/s and bytes/s one way for one GPU."""

    name: str
    memory: int
    flops: float
    """Dense bf16."""
    hbm: float
    nvlink: float
    network: float
    per_node: int
    source: str
    match: tuple[str, ...] = ()
    """Lower-case words of a device name that mean this kind."""


@cache
def all_gpus() -> dict[str, Gpu]:
    """Every GPU of the data file by its short name."""
    text = resources.files(__package__).joinpath("data/gpus.json").read_text(encoding="utf-8")
    return {
        key: Gpu(**{**entry, "match": tuple(entry["match"])})
        for key, entry in json.loads(text)["gpus"].items()
    }


def gpu(name: str) -> Gpu:
    """A GPU by its short name; ValueError naming the closest where there is none."""
    known = all_gpus()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown GPU {name!r}; the closest is {close!r}, known: {', '.join(known)}"
        )
    return known[name]


def match(device_name: str) -> Gpu | None:
    """The GPU that a driver's device name means, None where it is not in the file."""
    words = device_name.lower().replace("-", " ").split()
    return next((g for g in all_gpus().values() if set(g.match) & set(words)), None)
