#!/usr/bin/env python3
"""Pool runs that differ by seed: a markdown table with 95 % intervals over seeds, and a plot of
both turns.

    python tools/pool_seeds.py runs/seeds [--out docs/experiments/quickstart]

Reads DIR/RECIPE-SEED/metrics.jsonl as tools/seeds.sh writes them. The interval of a mean over
seeds is Student's t; differences between recipes are paired by seed, whose runs share problems and
first weights.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
SHOWN = ("acc_t1", "acc_t2", "acc_t2_shuffled", "acc_t2_oracle")


def read(run: Path) -> list[dict]:
    """Rows with an evaluation, with tokens and seconds spent up to there."""
    rows, tokens, seconds = [], 0, 0.0
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        tokens += row.get("play/generated_tokens") or 0
        seconds += sum(row.get(f"time/{p}") or 0.0 for p in ("play", "follow", "probe", "lead"))
        if "eval/sampled/acc_t1" in row:
            rows.append({**row, "tokens": tokens, "seconds": seconds})
    if not rows:
        raise SystemExit(f"{run}/metrics.jsonl holds no evaluation; let the run finish first")
    return rows


def interval(values: list[float]) -> str:
    """Mean and half-width of its 95 % interval over seeds."""
    if len(values) < 2:
        return f"{mean(values):.3f}"
    half = T95.get(len(values) - 1, 1.96) * stdev(values) / math.sqrt(len(values))
    return f"{mean(values):.3f} +- {half:.3f}"


def table(runs: dict[str, dict[int, list[dict]]]) -> str:
    """Before and after of every recipe, and paired differences of the first one to the others."""
    lines = []
    for mode in ("sampled", "greedy"):
        lines += ["", f"{mode}, mean over seeds +- 95 %:", ""]
        lines += ["| recipe | seeds | " + " | ".join(SHOWN) + " | tokens | steps | seconds |"]
        lines += ["|---|---|" + "---|" * (len(SHOWN) + 3)]
        for recipe, seeds in runs.items():
            cells = []
            for name in SHOWN:
                first = [rows[0][f"eval/{mode}/{name}"] for rows in seeds.values()]
                last = [rows[-1][f"eval/{mode}/{name}"] for rows in seeds.values()]
                cells.append(f"{mean(first):.3f} -> {interval(last)}")
            ends = [rows[-1] for rows in seeds.values()]
            spent = [
                f"{mean(r['tokens'] for r in ends):.0f}",
                f"{mean(r['step'] + 1 for r in ends):.0f}",
                f"{mean(r['seconds'] for r in ends):.0f}",
            ]
            lines.append(f"| {recipe} | {len(seeds)} | " + " | ".join(cells + spent) + " |")
    names = list(runs)
    lines += [
        "",
        f"final sampled acc_t2 of {names[0]} less that of another recipe, paired by seed:",
        "",
    ]
    lines += ["| less | difference | seeds above 0 |", "|---|---|---|"]
    for other in names[1:]:
        both = sorted(runs[names[0]].keys() & runs[other].keys())
        last = "eval/sampled/acc_t2"
        gaps = [runs[names[0]][s][-1][last] - runs[other][s][-1][last] for s in both]
        lines.append(f"| {other} | {interval(gaps)} | {sum(g > 0 for g in gaps)} of {len(gaps)} |")
    return "\n".join(lines).strip() + "\n"


def plot(runs: dict[str, dict[int, list[dict]]], path: Path) -> None:
    """Both turns by sampled tokens: every seed thin, the mean over seeds thick."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, name in zip(axes, ("acc_t1", "acc_t2"), strict=True):
        for color, (recipe, seeds) in enumerate(runs.items()):
            for rows in seeds.values():
                x = [r["tokens"] / 1e3 for r in rows]
                y = [r[f"eval/sampled/{name}"] for r in rows]
                axis.plot(x, y, color=f"C{color}", alpha=0.25, linewidth=0.8)
            length = min(len(rows) for rows in seeds.values())
            at = range(length)
            x = [mean(rows[i]["tokens"] for rows in seeds.values()) / 1e3 for i in at]
            y = [mean(rows[i][f"eval/sampled/{name}"] for rows in seeds.values()) for i in at]
            axis.plot(x, y, color=f"C{color}", linewidth=2.2, label=recipe)
        axis.set_title({"acc_t1": "first answer", "acc_t2": "answer after feedback"}[name])
        axis.set_xlabel("sampled tokens / 1000")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out accuracy, sampled at temperature 1")
    axes[1].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--out", type=Path, help="write OUT.md and OUT.png (default: FOLDER/pooled)"
    )
    args = parser.parse_args()
    runs: dict[str, dict[int, list[dict]]] = defaultdict(dict)
    for path in sorted(args.folder.glob("*-*/metrics.jsonl")):
        recipe, seed = path.parent.name.rsplit("-", 1)
        if not seed.isdigit():
            continue
        if not (args.folder / f"{path.parent.name}.done").exists():
            print(f"not finished, left out: {path.parent}")
            continue
        runs[recipe][int(seed)] = read(path.parent)
    if not runs:
        raise SystemExit(
            f"{args.folder} holds no finished RECIPE-SEED runs; make some with tools/seeds.sh"
        )
    out = args.out or args.folder / "pooled"
    text = table(dict(sorted(runs.items(), key=lambda item: item[0] != "quickstart")))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(text)
    plot(runs, out.with_suffix(".png"))
    print(text)
    print(f"{out}.md {out}.png")


if __name__ == "__main__":
    main()
