"""Runs side by side at equal tokens, FLOPs, steps or time, seeds pooled, with intervals. No torch.

Each run is read at one budget B, by default the most that all of them have reached: by its last
evaluation after a step that BEGAN below B. That is the rule by which a run with
max_generated_tokens = B would have stopped, so no run is read more than one step late.
`compare_show.py` prints what comes out.
"""

from __future__ import annotations

import difflib
import glob
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, mean, stdev
from typing import Any

import numpy as np

from megatron_binac import config as configs
from megatron_binac.report import Point, RunData, read_run

AXES = {
    "tokens": "generated tokens",
    "flops": "model FLOPs",
    "steps": "steps",
    "time": "seconds of training",
}
"""What runs can be equal in; FLOPs and seconds are without evaluation."""
INTERVALS = ("bootstrap", "t")
METRICS = ("acc_t1", "acc_t2", "acc_t2_shuffled", "acc_t2_oracle")
SEEDS = ("seed", "task.options.seed", "warm_start.seed")
_FREE = (
    *SEEDS, "warm_start.cache_dir", "text_critic.cache_dir", "num_steps", "max_generated_tokens",
    "save_every", "keep_checkpoints", "eval.every", "rollout.max_sequences_per_batch",
)  # fmt: skip
"""Settings that may differ between runs that are pooled: seeds, budgets, what changes no result."""
_NUM_RESAMPLES = 10_000
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over seeds. Example: ``Estimate(value=0.5, low=0.4, high=0.6, num=5)``"""

    value: float
    low: float | None
    """None, as `high`, for one seed alone."""
    high: float | None
    num: int
    """Seeds, or pairs of runs with the same seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Of a recipe to the baseline, paired by seed."""

    estimate: Estimate
    num_above: int
    """Pairs in which the recipe is above the baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One evaluation of a run, and what was spent up to it."""

    steps: int
    tokens: int
    flops: int
    """0 where the run did not count them."""
    seconds: float
    values: dict[str, float | None]
    """By metric; None where there was nothing to measure."""

    def spent(self, by: str) -> float:
        return _amount(self, by)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One run up to the budget."""

    run_dir: str
    seed: int
    curve: list[Mark]
    """Its evaluations; the last one is the one that counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One recipe."""

    name: str
    runs: list[Reading]
    before: dict[str, float | None]
    values: dict[str, Estimate | None]
    """None where not every run has the metric."""
    differences: dict[str, Difference | None]
    """None for the baseline itself, and where no seed is in both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What `binac compare` prints; `asdict` of it is the JSON."""

    by: str
    budget: float
    decoding: str
    interval: str
    baseline: str
    rows: list[Row]
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One run and what decides with which others it is pooled."""

    data: RunData
    settings: dict[str, Any]
    """Every setting by its dotted key."""

    @property
    def draw(self) -> tuple[Any, ...]:
        """What has to agree for two runs to be a pair."""
        return tuple(self.settings.get(key) for key in SEEDS)

    def evals(self, decoding: str, by: str) -> list[tuple[Point, float]]:
        """Evaluations, and what had been spent when the step of each began (-1: before all)."""
        points = self.data.points
        began = [-1.0, *(_amount(point, by) for point in points[:-1])]
        key = f"eval/{decoding}/acc_t1"
        return [
            (p, start) for p, start in zip(points, began, strict=True) if p.value(key) is not None
        ]


def _amount(point: Point | Mark, by: str) -> float:
    return float(getattr(point, "seconds" if by == "time" else by))


def compare(
    patterns: Sequence[str],
    *,
    by: str = "tokens",
    at: float | None = None,
    baseline: str | None = None,
    decoding: str = "sampled",
    metrics: Sequence[str] = (),
    interval: str = "bootstrap",
    finished_only: bool = False,
) -> Comparison:
    """Read runs (folders or globs) and compare them; see the module for the rule.

    Raises ValueError for a folder that is no run, a run without an evaluation, runs of several
    tasks, the same seed twice in one recipe, an `at` that not all reach, and names that no run has.
    What is merely to be known (unfinished, unequal budgets, sparse evaluations) is in `warnings`.
    """
    warnings: list[str] = []
    runs = [_read(path) for path in _folders(patterns, warnings)]
    runs = _finished(runs, warnings, leave_out=finished_only)
    _check_same_problems(runs, warnings)
    for run in runs:
        if not run.evals(decoding, by):
            raise ValueError(
                f"{run.data.run_dir} holds no {decoding} evaluation yet; wait for one, or leave it "
                "out"
            )
        if by == "flops" and not run.data.last.flops:
            raise ValueError(
                f"{run.data.run_dir} has steps without FLOPs (ROLE/PHASE/flops in its metrics), "
                "made by an older version; compare by tokens, or leave it out"
            )
    groups = _groups(runs)
    base = _named(baseline, list(groups), "baseline") if baseline else next(iter(groups))
    budget = _budget(runs, by, at, decoding, warnings)
    shown = _metrics(runs, metrics, decoding)
    readings = {
        name: {run.draw: _reading(run, by, budget, decoding, shown) for run in members}
        for name, members in groups.items()
    }
    _check_density([r for found in readings.values() for r in found.values()], by, budget, warnings)
    rows = [
        _row(name, found, None if name == base else readings[base], shown, interval)
        for name, found in readings.items()
    ]
    for row in rows:
        if row.name != base and not readings[row.name].keys() & readings[base].keys():
            warnings.append(f"{row.name} and {base} have no seed in common: no paired difference")
    return Comparison(
        by=by, budget=budget, decoding=decoding, interval=interval, baseline=base, rows=rows,
        warnings=warnings,
    )  # fmt: skip


# Reading


def _folders(patterns: Sequence[str], warnings: list[str]) -> list[Path]:
    """The run folders that are meant, each once, in the order in which they were named."""
    found: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.exists() or not glob.has_magic(pattern):
            _check_run(path)
            found.setdefault(path.resolve(), path)
            continue
        folders = [Path(match) for match in sorted(glob.glob(pattern)) if Path(match).is_dir()]
        chosen = [folder for folder in folders if _is_run(folder)]
        if not chosen:
            raise ValueError(f"{pattern} matches no run folder; expected one that train made")
        left_out = [str(folder) for folder in folders if not _is_run(folder)]
        if left_out:
            warnings.append(f"left out, not runs: {', '.join(left_out)}")
        for folder in chosen:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _is_run(path: Path) -> bool:
    return (path / "config.json").is_file() and (path / "metrics.jsonl").is_file()


def _check_run(path: Path) -> None:
    if _is_run(path):
        return
    if not path.exists():
        why = "it does not exist"
    elif not path.is_dir():
        why = f"it is a file; quote a pattern, '{path.parent}/*', and only runs are taken"
    elif any(_is_run(inner) for inner in path.iterdir()):
        why = f"but it holds some; pass '{path}/*'"
    else:
        missing = "config.json" if not (path / "config.json").is_file() else "metrics.jsonl"
        why = f"it has no {missing}"
    raise ValueError(f"{path} is not a run folder: {why}")


def _read(path: Path) -> _Run:
    try:
        data = read_run(path)
        settings = _flat(data.config)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a run: {error!r}") from error
    try:
        # With the defaults of settings that an older run did not have yet.
        text = (path / "config.json").read_text(encoding="utf-8")
        settings = _flat(json.loads(configs.to_json(configs.from_json(text))))
    except ValueError:
        pass  # of another version: compared by the settings that it has
    return _Run(data=data, settings=settings)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= _flat(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves


def _finished(runs: list[_Run], warnings: list[str], *, leave_out: bool) -> list[_Run]:
    """The runs that count, with a word on those that have not come to their end."""
    kept: list[_Run] = []
    open_ones: list[str] = []
    for run in runs:
        last, steps = run.data.last, run.settings.get("num_steps") or 0
        tokens = run.settings.get("max_generated_tokens") or 0
        if last.steps >= steps or 0 < tokens <= last.tokens:
            kept.append(run)
            continue
        done = f"{last.steps:,} of {steps:,} steps"
        done += f", {last.tokens:,} of {tokens:,} tokens" if tokens else ""
        open_ones.append(f"{run.data.run_dir} ({done})")
        if not leave_out:
            kept.append(run)
    if open_ones:
        what = "left out" if leave_out else "counted as far as they are"
        warnings.append(f"not finished, {what}: {'; '.join(open_ones)}")
    if not kept:
        raise ValueError("none of the runs is finished; wait for one, or drop --finished-only")
    return kept


def _check_same_problems(runs: list[_Run], warnings: list[str]) -> None:
    by_task: dict[Any, list[str]] = {}
    for run in runs:
        by_task.setdefault(run.settings.get("task.name"), []).append(str(run.data.run_dir))
    if len(by_task) > 1:
        told = "; ".join(f"{name}: {dirs[0]}" for name, dirs in by_task.items())
        raise ValueError(f"got runs of {len(by_task)} tasks ({told}), expected one task; drop some")
    keys = sorted({key for run in runs for key in run.settings})
    for key in keys:
        decides = key.startswith("task.") or key in ("eval.num_prompts", "eval.samples")
        values = {json.dumps(run.settings.get(key)) for run in runs}
        if decides and key not in SEEDS and len(values) > 1:
            told = ", ".join(sorted(values))
            warnings.append(f"{key} differs ({told}): the runs are not measured alike")


def _groups(runs: list[_Run]) -> dict[str, list[_Run]]:
    """Runs by recipe, and by what else was set differently within a recipe; seeds pooled."""
    by_recipe: dict[str, list[_Run]] = {}
    for run in runs:
        by_recipe.setdefault(str(run.settings.get("recipe")), []).append(run)
    groups: dict[str, list[_Run]] = {}
    for recipe, members in by_recipe.items():
        keys = sorted({key for run in members for key in run.settings if not _is_free(key)})
        told = {key: [json.dumps(run.settings.get(key)) for run in members] for key in keys}
        differing = [key for key in keys if len(set(told[key])) > 1]
        for i, run in enumerate(members):
            extra = ", ".join(f"{key}={told[key][i]}" for key in differing)
            groups.setdefault(f"{recipe} ({extra})" if extra else recipe, []).append(run)
    for name, members in groups.items():
        first: dict[tuple[Any, ...], _Run] = {}
        for run in members:
            twin = first.setdefault(run.draw, run)
            if twin is not run:
                raise ValueError(
                    f"got seed {run.settings.get('seed')} of {name} twice, {twin.data.run_dir} and "
                    f"{run.data.run_dir}; leave one out"
                )
    return groups


def _is_free(key: str) -> bool:
    parts = key.split(".")
    layout = "parallel" in parts or parts[-1] == "max_tokens_per_micro_batch"
    return key in _FREE or parts[0] == "track" or layout


def _named(name: str, known: Sequence[str], what: str) -> str:
    if name in known:
        return name
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ValueError(f"no {what} {name!r} among the runs; the closest is {close[0]!r}")


def _budget(
    runs: list[_Run], by: str, at: float | None, decoding: str, warnings: list[str]
) -> float:
    """The most that every run has an evaluation for, or less where that is asked for."""
    ends = [_amount(run.evals(decoding, by)[-1][0], by) for run in runs]
    common = min(ends)
    if at is not None:
        if not 0 <= at <= common:
            short = runs[ends.index(common)].data.run_dir
            raise ValueError(
                f"--at is {at:,.0f}, but {short} is only evaluated up to {common:,.0f} {AXES[by]}; "
                "pass a number from 0 to that, or leave that run out"
            )
        return float(at)
    if max(ends) > 1.1 * common:
        warnings.append(
            f"budgets differ: the runs end between {common:,.0f} and {max(ends):,.0f} {AXES[by]}; "
            f"nothing after {common:,.0f} is shown"
        )
    return common


def _metrics(runs: list[_Run], asked: Sequence[str], decoding: str) -> list[str]:
    prefix = f"eval/{decoding}/"
    keys = {key for run in runs for point, _ in run.evals(decoding, "steps") for key in point.row}
    known = sorted(key.removeprefix(prefix) for key in keys if key.startswith(prefix))
    return [_named(name, known, "metric") for name in asked or METRICS if asked or name in known]


def _reading(run: _Run, by: str, budget: float, decoding: str, metrics: Sequence[str]) -> Reading:
    # What was evaluated before the first step counts at any budget, 0 included.
    evals = [point for point, began in run.evals(decoding, by) if began < budget]
    if not evals:
        raise ValueError(
            f"{run.data.run_dir} has no evaluation up to {budget:,.0f} {AXES[by]}, which is all "
            "that another run has; leave one of the two out"
        )
    return Reading(
        run_dir=str(run.data.run_dir),
        seed=run.settings.get("seed", 0),
        curve=[
            Mark(
                steps=point.steps,
                tokens=point.tokens,
                flops=point.flops,
                seconds=point.seconds,
                values={name: point.value(f"eval/{decoding}/{name}") for name in metrics},
            )
            for point in evals
        ],
    )


def _check_density(readings: list[Reading], by: str, budget: float, warnings: list[str]) -> None:
    early = [r for r in readings if r.curve[-1].spent(by) < 0.9 * budget]
    if early:
        worst = min(early, key=lambda r: r.curve[-1].spent(by))
        warnings.append(
            f"{len(early)} of {len(readings)} runs have no evaluation near the budget; "
            f"{worst.run_dir} is read at {worst.curve[-1].spent(by):,.0f} (see eval.every)"
        )


# Pooling


def _row(
    name: str,
    found: dict[tuple[Any, ...], Reading],
    base: dict[tuple[Any, ...], Reading] | None,
    metrics: Sequence[str],
    interval: str,
) -> Row:
    runs = list(found.values())
    differences: dict[str, Difference | None] = dict.fromkeys(metrics)
    for metric in metrics if base is not None else ():
        assert base is not None
        pairs = [(found[draw], base[draw]) for draw in found if draw in base]
        gaps = _all([_less(_read_at(a, metric), _read_at(b, metric)) for a, b in pairs])
        if gaps:
            differences[metric] = Difference(
                estimate=estimate(gaps, interval), num_above=sum(gap > 0 for gap in gaps)
            )
    values = {metric: _all([_read_at(run, metric) for run in runs]) for metric in metrics}
    before = {metric: _all([run.curve[0].values[metric] for run in runs]) for metric in metrics}
    return Row(
        name=name,
        runs=runs,
        before={metric: mean(known) if known else None for metric, known in before.items()},
        values={m: estimate(known, interval) if known else None for m, known in values.items()},
        differences=differences,
    )


def _read_at(run: Reading, metric: str) -> float | None:
    return run.curve[-1].values[metric]


def _all(values: list[float | None]) -> list[float]:
    """The values where every run has one, else none: no mean over those that happen to have it."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _less(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def estimate(values: Sequence[float], interval: str = "bootstrap") -> Estimate:
    """Mean of the values of several seeds with its 95 % interval: none for one seed.

    "bootstrap" draws whole seeds again, the same draws every time, and takes percentiles (Efron and
    Tibshirani 1993, chapter 13); "t" is the mean +- t s / sqrt(n).
    """
    value, num = mean(values), len(values)
    if num < 2:
        return Estimate(value=value, low=None, high=None, num=num)
    if interval == "t":
        quantile = _T95[num - 2] if num - 2 < len(_T95) else NormalDist().inv_cdf(0.975)
        half = quantile * stdev(values) / math.sqrt(num)
        return Estimate(value=value, low=value - half, high=value + half, num=num)
    drawn = np.random.default_rng(0).integers(0, num, (_NUM_RESAMPLES, num))
    means = np.asarray(values, np.float64)[drawn].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975), method="inverted_cdf")
    return Estimate(value=value, low=float(low), high=float(high), num=num)
