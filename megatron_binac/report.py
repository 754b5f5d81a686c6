"""What came out of one or several runs: a results table, curves, and one HTML page a run.

Reads the run folders alone (config.json, metrics.jsonl, transcripts.jsonl); imports matplotlib when
it draws, and nothing heavy before.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_binac.report_charts import COLORS
from megatron_binac.report_page import Split, page

AXES = {"steps": "steps", "tokens": "generated tokens", "seconds": "seconds of training"}
"""What runs are compared at equal amounts of; seconds are without evaluation."""
DECODINGS = ("sampled", "greedy")
CONTROLS = ("acc_t2_shuffled", "acc_t2_none", "acc_t2_oracle")
_SMOOTH = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The state of a run after one row of its metrics."""

    steps: int
    """Passes through the loop that are done."""
    tokens: int
    """Tokens sampled in play up to here, all ranks."""
    seconds: float
    """Training time up to here, without evaluation."""
    flops: int
    """Model FLOPs of sampling and learning up to here, all ranks; 0 where a step has no count."""
    row: dict[str, Any]

    def value(self, key: str) -> float | None:
        return self.row.get(key)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """One run, read from its folder."""

    run_dir: Path
    config: dict[str, Any]
    points: list[Point]
    trees: list[dict[str, Any]] = field(default_factory=list)

    @property
    def evals(self) -> list[Point]:
        return [p for p in self.points if any(key.startswith("eval/") for key in p.row)]

    @property
    def plays(self) -> list[Point]:
        return [p for p in self.points if p.value("play/acc_t1") is not None]

    @property
    def last(self) -> Point:
        return self.points[-1]


def read_run(run_dir: Path) -> RunData:
    """Read a run folder, without a half-written last line; ValueError where it has no rows yet."""
    points: list[Point] = []
    tokens, seconds, flops, uncounted = 0, 0.0, 0, False
    for row in _rows(run_dir / "metrics.jsonl"):
        if row["step"] >= 0:
            tokens += row.get("play/generated_tokens") or 0
            seconds += (row.get("time/step") or 0.0) - (row.get("time/eval") or 0.0)
            counts = [count for key, count in row.items() if key.endswith("/flops")]
            uncounted |= not counts  # by an older version, from which the run may have gone on
            flops = 0 if uncounted else flops + sum(counts)
        points.append(
            Point(steps=row["step"] + 1, tokens=tokens, seconds=seconds, flops=flops, row=row)
        )
    if not points:
        raise ValueError(
            f"{run_dir / 'metrics.jsonl'} has no rows yet; expected a run that has made a step"
        )
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    transcripts = run_dir / "transcripts.jsonl"
    trees = _rows(transcripts) if transcripts.exists() else []
    return RunData(run_dir=run_dir, config=config, points=points, trees=trees)


def results_table(run_dirs: list[Path]) -> str:
    """Two Markdown tables: before and after by decoding, and all at equal steps, tokens, time."""
    runs = [read_run(run_dir) for run_dir in run_dirs]
    names = _names(runs)
    rows = [
        ["recipe", "decoding", "acc_t1 before -> after", "acc_t2 before -> after"]
        + [key.removeprefix("acc_t2_") for key in CONTROLS]
    ]
    for name, run in zip(names, runs, strict=True):
        for decoding in DECODINGS:
            if run.evals:
                first, last = run.evals[0], run.evals[-1]
                prefix = f"eval/{decoding}/"
                rows.append(
                    [name, decoding]
                    + [
                        f"{_with_interval(first, prefix + turn)} -> "
                        f"{_with_interval(last, prefix + turn)}"
                        for turn in ("acc_t1", "acc_t2")
                    ]
                    + [_number(last.value(prefix + control)) for control in CONTROLS]
                )
    parts = []
    if len(rows) > 1:
        parts += [
            "Held-out accuracy with 95% intervals. shuffled, none, oracle: acc_t2 after training",
            "with the critic's feedback on another problem, with empty and with right feedback.",
            "",
            _markdown(rows),
        ]
    if len(runs) > 1:
        parts += ["", *_equal_amounts(runs, names)]
    return "\n".join(parts)


def _equal_rows(runs: list[RunData], names: list[str]) -> list[list[str]]:
    """Head and rows: both accuracies of each run at the least amount that any has used."""
    limits = {axis: min(getattr(run.last, axis) for run in runs) for axis in AXES}
    heads = [f"at {limits[axis]:,.0f} {label}" for axis, label in AXES.items()]
    rows = [["recipe", *heads]]
    for name, run in zip(names, runs, strict=True):
        rows.append([name, *(_at(run, axis, limits[axis]) for axis in AXES)])
    return rows


def _equal_amounts(runs: list[RunData], names: list[str]) -> list[str]:
    return [
        "acc_t1 / acc_t2 at equal amounts (the least that any of the runs has used): held out and",
        "sampled, @ the step of that evaluation; ~ where none was near: training prompts, mean of "
        f"{_SMOOTH} steps.",
        "",
        _markdown(_equal_rows(runs, names)),
    ]


def _at(run: RunData, axis: str, limit: float) -> str:
    """Both accuracies of the newest measurement that used no more than `limit`."""
    evals = [p for p in run.evals if getattr(p, axis) <= limit]
    if evals and getattr(evals[-1], axis) >= 0.9 * limit:
        last = evals[-1]
        pair = [_number(last.value(f"eval/sampled/{turn}")) for turn in ("acc_t1", "acc_t2")]
        return f"{pair[0]} / {pair[1]} @{last.steps}"
    plays = [p for p in run.plays if getattr(p, axis) <= limit][-_SMOOTH:]
    return "~" + " / ".join(
        _number(_mean([p.value(f"play/{turn}") for p in plays])) for turn in ("acc_t1", "acc_t2")
    )


def write_report(
    run_dirs: list[Path], out: Path | None, split: Mapping[Path, Split] | None = None
) -> list[Path]:
    """Write curves.png and report.html into each run folder, and of all together into `out`.

    `out` also gets the tables (results.md); None leaves it out. `split` knows the tokens of
    a run's turns, where its tokenizer is there. Returns the paths that were written.
    """
    runs = [read_run(run_dir) for run_dir in run_dirs]
    split = split or {}
    paths: list[Path] = []
    for run in runs:
        curves = _curves([run])
        paths += [run.run_dir / "curves.png", run.run_dir / "report.html"]
        paths[-2].write_bytes(curves)
        paths[-1].write_text(page([run], _names([run]), split), encoding="utf-8")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        paths += [out / "curves.png", out / "results.md", out / "report.html"]
        paths[-3].write_bytes(_curves(runs))
        paths[-2].write_text(results_table(run_dirs) + "\n", encoding="utf-8")
        names = _names(runs)
        text = page(runs, names, split, _equal_rows(runs, names))
        paths[-1].write_text(text, encoding="utf-8")
    return paths


# Curves


def _curves(runs: list[RunData]) -> bytes:
    """A PNG: acc_t1 and acc_t2 (rows) over steps, tokens and seconds (columns)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(AXES), sharey="row", squeeze=False)
    for row, turn in enumerate(("acc_t1", "acc_t2")):
        for column, (axis, label) in enumerate(AXES.items()):
            plot = grid[row][column]
            for index, (name, run) in enumerate(zip(_names(runs), runs, strict=True)):
                _draw(plot, run, axis, turn, name, COLORS[index % len(COLORS)])
            plot.grid(alpha=0.25)
            plot.set_ylim(0, 1)
            if row == 1:
                plot.set_xlabel(label)
            if column == 0:
                plot.set_ylabel(turn + (" (first answer)" if row == 0 else " (after feedback)"))
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _draw(plot: Any, run: RunData, axis: str, turn: str, name: str, color: str) -> None:
    """Held-out points with intervals, joined; behind them the play of each step, smoothed."""
    plays = [p for p in run.plays if p.value(f"play/{turn}") is not None]
    smooth = [
        _mean([p.value(f"play/{turn}") for p in plays[max(0, i + 1 - _SMOOTH) : i + 1]])
        for i in range(len(plays))
    ]
    plot.plot([getattr(p, axis) for p in plays], smooth, color=color, alpha=0.35, linewidth=1)
    key = f"eval/sampled/{turn}"
    evals = [p for p in run.evals if p.value(key) is not None]
    values = [p.row[key] for p in evals]
    low = [p.row.get(key + "_lo", v) for p, v in zip(evals, values, strict=True)]
    high = [p.row.get(key + "_hi", v) for p, v in zip(evals, values, strict=True)]
    margins = [
        [max(0.0, v - bound) for v, bound in zip(values, low, strict=True)],
        [max(0.0, bound - v) for v, bound in zip(values, high, strict=True)],
    ]
    xs = [getattr(p, axis) for p in evals]
    plot.errorbar(xs, values, margins, color=color, marker="o", markersize=3, capsize=2, label=name)


# Small parts


def _rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    # What follows the last newline is empty, or a line that is still being written.
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path}:{number} cannot be read as a run's metrics: {error}; take the line out, "
                "or the file from a copy"
            ) from error
    return rows


def _names(runs: list[RunData]) -> list[str]:
    """The recipe of each run, with its seed where that comes twice, with its folder if need be."""
    names = [run.config["recipe"] for run in runs]
    for extra in (lambda run: f" (seed {run.config['seed']})", lambda run: f" {run.run_dir.name}"):
        twice = {name for name, count in Counter(names).items() if count > 1}
        names = [
            name + extra(run) if name in twice else name
            for name, run in zip(names, runs, strict=True)
        ]
    return names


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"


def _with_interval(point: Point, key: str) -> str:
    low, high = point.value(key + "_lo"), point.value(key + "_hi")
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return _number(point.value(key)) + interval


def _markdown(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
