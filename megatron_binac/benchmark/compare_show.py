"""A comparison of runs as a table, as JSON and as learning curves. No torch."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from megatron_binac.benchmark.compare import AXES, Comparison, Difference, Estimate, Row, estimate

_WORDS = {
    "bootstrap": "95 % bootstrap over seeds (percentiles; narrow where seeds are few)",
    "t": "95 % of Student's t over seeds",
}
_HEADS = {"flops": "FLOPs", "time": "seconds"}
_TITLES = {"acc_t1": "first answer", "acc_t2": "answer after feedback"}
# Okabe and Ito's colours, which colour-blind readers tell apart.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def table(comparison: Comparison, *, markdown: bool = False) -> str:
    """What the runs come to at the budget, and their differences to the baseline."""
    rows, axis = comparison.rows, AXES[comparison.by]
    metrics = list(rows[0].values)
    spent = [run.curve[-1].spent(comparison.by) for row in rows for run in row.runs]
    budget, low, high = (
        _amount(comparison.by, value) for value in (comparison.budget, min(spent), max(spent))
    )
    told = (
        f"Held out, {comparison.decoding}, at {budget} {axis}: of each run the last evaluation "
        f"after a step that began below that (at {low} to {high}). First evaluation -> that one: "
        f"mean and {_WORDS[comparison.interval]}."
    )
    lines = [*textwrap.wrap(told, 96), ""]
    axes = [name for name in AXES if name != "flops" or _counted(rows)]
    head = ["recipe", "seeds", *metrics, *(_HEADS.get(name, name) for name in axes)]
    cells = [
        [row.name, str(len(row.runs))]
        + [f"{_number(row.before[m])} -> {_with_interval(row.values[m])}" for m in metrics]
        + [_amount(name, mean(run.curve[-1].spent(name) for run in row.runs)) for name in axes]
        for row in rows
    ]
    lines.append(_grid([head, *cells], markdown=markdown))
    others = [row for row in rows if row.name != comparison.baseline]
    if others:
        lines += ["", f"Less {comparison.baseline}, paired by seed (pairs above 0):", ""]
        cells = [[row.name, *(_gap(row.differences[m]) for m in metrics)] for row in others]
        lines.append(_grid([["recipe", *metrics], *cells], markdown=markdown))
    if comparison.warnings:
        lines += ["", *(f"{'- ' if markdown else 'note: '}{text}" for text in comparison.warnings)]
    return "\n".join(lines)


def as_json(comparison: Comparison) -> str:
    """All of it, with every run's own numbers."""
    return json.dumps(asdict(comparison), indent=2, allow_nan=False)


def _counted(rows: list[Row]) -> bool:
    """Whether every run counted its FLOPs: earlier versions did not."""
    return all(run.curve[-1].flops for row in rows for run in row.runs)


def _amount(axis: str, value: float) -> str:
    return f"{value:.4g}" if axis == "flops" else f"{value:,.0f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _with_interval(found: Estimate | None, sign: str = "") -> str:
    if found is None:
        return "-"
    if found.low is None:
        return f"{found.value:{sign}.3f}"
    return f"{found.value:{sign}.3f} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"


def _gap(found: Difference | None) -> str:
    if found is None:
        return "-"
    return f"{_with_interval(found.estimate, '+')} ({found.num_above} of {found.estimate.num})"


def _grid(rows: list[list[str]], *, markdown: bool) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [[f"{c:{w}}" for c, w in zip(row, widths, strict=True)] for row in rows]
    if not markdown:
        return "\n".join("  ".join(row).rstrip() for row in padded)
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def plot(comparison: Comparison, path: Path) -> None:
    """Learning curves up to the budget: each seed thin, the mean over seeds thick, its interval.

    Between evaluations lines are straight; a mean goes as far as all of its seeds do.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    metrics = list(comparison.rows[0].values)
    shown = [metric for metric in metrics if metric in _TITLES] or metrics
    figure = Figure(figsize=(5.5 * len(shown), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for panel, metric in zip(panels, shown, strict=True):
        for index, row in enumerate(comparison.rows):
            # A second round through the colours is dashed.
            style = "-" if index < len(_COLORS) else "--"
            _draw(panel, row, metric, comparison, _COLORS[index % len(_COLORS)], style)
        panel.axvline(comparison.budget, color="#888888", linewidth=0.8, linestyle=":")
        panel.set_title(_TITLES.get(metric, metric))
        panel.set_xlabel(AXES[comparison.by])
        panel.xaxis.set_major_locator(MaxNLocator(6))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))  # 400k, not 400000
        panel.grid(alpha=0.25)
    panels[0].set_ylabel(f"held-out accuracy, {comparison.decoding}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def _draw(
    panel: Any, row: Row, metric: str, comparison: Comparison, color: str, style: str
) -> None:
    curves: list[tuple[list[float], list[float]]] = []
    for run in row.runs:
        known = [(m.spent(comparison.by), m.values[metric]) for m in run.curve]
        points = [(x, y) for x, y in known if y is not None]
        if not points:  # a recipe without feedback has no second answer
            return
        curves.append(([x for x, _ in points], [y for _, y in points]))
        panel.plot(*curves[-1], color=color, alpha=0.25, linewidth=0.8, linestyle=style)
    end = min(xs[-1] for xs, _ in curves)
    grid = [x for x in sorted({x for xs, _ in curves for x in xs}) if x <= end]
    at = np.asarray([np.interp(grid, xs, ys) for xs, ys in curves])  # [seeds, grid]
    found = [estimate(column.tolist(), comparison.interval) for column in at.T]
    means = [one.value for one in found]
    panel.plot(grid, means, color=color, linewidth=2.2, linestyle=style, label=row.name)
    if len(curves) > 1:
        low, high = [one.low for one in found], [one.high for one in found]
        panel.fill_between(grid, low, high, color=color, alpha=0.15, linewidth=0)
