"""Published steps of other systems against the model: fitted shares, and the error that is left.

`data/published.json` holds each row with its source. Five shares are fitted to the logarithm of the
step times; beside the error of the fit each row gets the one of a fit that has not seen it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from megatron_binac.config import ParallelConfig
from megatron_binac.planner import flops, hardware, shapes
from megatron_binac.planner.speed import Answers, Layout, Phases, Shares, grpo_step

FITTED = ("dense", "experts", "memory", "layer_seconds", "fixed_seconds")
BOUNDS = {
    "dense": (0.15, 0.7),
    "experts": (0.03, 0.5),
    "memory": (0.3, 0.9),
    "layer_seconds": (5e-6, 3e-4),
    "fixed_seconds": (1.0, 60.0),
}


@cache
def table() -> dict[str, Any]:
    """The data file: rows, and where they come from."""
    text = resources.files(__package__).joinpath("data/published.json").read_text(encoding="utf-8")
    return json.loads(text)


def modelled() -> list[dict[str, Any]]:
    """The rows that the model can say something about, in the order of the file."""
    return [row for row in table()["rows"] if row["model"] is not None]


def predict(row: dict[str, Any], shares: Shares) -> Phases:
    """The model's step for a row."""
    shape, gpu = shapes.named(row["model"]), hardware.gpu(row["gpu"])
    answer = row["answer"] if row["answer"] is not None else _inferred_answer(row, shares)
    answers = Answers(
        samples=row["samples"],
        prompts=row["prompts"],
        prompt=row["prompt"],
        answer=answer,
        longest=row["longest"],
    )
    layout = Layout(
        gpus=row["gpus"] - row["gen_gpus"],
        parallel=ParallelConfig(
            tp=row["tp"],
            pp=row["pp"],
            sequence_parallel=row["tp"] > 1,
            recompute="full" if row["recompute"] else "none",
        ),
        engine_tp=row["gen_tp"],
        engine_gpus=row["gen_gpus"],
        cp=row["cp"],
        expert_ranks=row["ep"],
    )
    return grpo_step(
        shape,
        answers,
        gpu,
        shares,
        layout,
        updates=row["updates"],
        reference=row.get("reference", True),
        off_policy=row["gen_gpus"] > 0,
    )


def _inferred_answer(row: dict[str, Any], shares: Shares) -> float:
    """Mean answer of a row that does not state it, from how long its like scored it once.

    A forward pass over all sequences took `old_log_prob` seconds on the first row of the source;
    the length is the one whose FLOPs take that long at the fitted share of the peak.
    """
    first = next(r for r in table()["rows"] if r["source"] == row["source"])
    shape, gpu = shapes.named(first["model"]), hardware.gpu(first["gpu"])
    budget = first["old_log_prob"] * first["gpus"] * gpu.flops * shares.dense
    low, high = 1.0, float(first["longest"])
    for _ in range(50):
        mean = (low + high) / 2
        n = first["prompt"] + mean
        work = flops.Work(
            tokens=round(first["samples"] * n),
            pairs=round(first["samples"] * n * (n + 1) / 2),
            scored=round(first["samples"] * mean),
        )
        low, high = (mean, high) if flops.forward_flops(shape, work) < budget else (low, mean)
    return (low + high) / 2


def fit(rows: Sequence[dict[str, Any]], start: Shares | None = None) -> Shares:
    """Shares that make the sum of squared logarithmic errors over `rows` small.

    A search along one share at a time with shrinking steps: the same rows give the same shares. A
    weak pull to the start keeps shares that no row speaks about where they are.
    """
    shares = origin = start or Shares()

    def cost(candidate: Shares) -> float:
        errors = [math.log(predict(row, candidate).step / row["step"]) for row in rows]
        pull = sum(
            math.log(getattr(candidate, name) / getattr(origin, name)) ** 2 for name in FITTED
        )
        return sum(e * e for e in errors) + 0.002 * pull

    return _descend(cost, shares)


def _descend(cost: Callable[[Shares], float], shares: Shares) -> Shares:
    best, step = cost(shares), 0.3
    while step > 0.02:
        moved = False
        for name in FITTED:
            for factor in (1 + step, 1 / (1 + step)):
                low, high = BOUNDS[name]
                value = min(high, max(low, getattr(shares, name) * factor))
                candidate = replace(shares, **{name: value})
                found = cost(candidate)
                if found < best - 1e-9:
                    shares, best, moved = candidate, found, True
        if not moved:
            step /= 2
    return shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A row with the model's step and its error, and the error of a fit without the row."""

    name: str
    source: str
    step: float
    predicted: float
    error: float
    held_out: float
    inferred: bool
    """The row's mean length is inferred from a phase of this row: no prediction."""


def check(*, held_out: bool = True) -> tuple[Shares, list[Checked]]:
    """Fit all rows, then predict each; `held_out` also fits without each row in turn."""
    rows = modelled()
    shares = fit(rows)
    out = []
    for row in rows:
        predicted = predict(row, shares).step
        unseen = predicted
        if held_out:
            rest = [other for other in rows if other is not row]
            unseen = predict(row, fit(rest, shares)).step
        out.append(
            Checked(
                name=row["name"],
                source=row["source"],
                step=row["step"],
                predicted=predicted,
                error=predicted / row["step"] - 1,
                held_out=unseen / row["step"] - 1,
                inferred="old_log_prob" in row,
            )
        )
    return shares, out
