"""One HTML page of one or several runs: no script, no network, good on a phone and on paper.

Curves group the runs by recipe: the mean over seeds with the range of them, and every seed faintly
behind. Transcripts fold open by run and step; a token has the colour of its advantage.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_binac.report_charts import COLORS, Line, bars, line_chart

Split = Callable[[Mapping[str, Any]], list[str]]
"""A turn's record to the texts of its tokens."""
TREES_PER_RUN = 8
_SMOOTH = 5

CHARTS: tuple[tuple[str, str, bool], ...] = (
    ("first answer, held out", "eval/sampled/acc_t1", True),
    ("after feedback, held out", "eval/sampled/acc_t2", True),
    ("first answer, greedy", "eval/greedy/acc_t1", True),
    ("after feedback, greedy", "eval/greedy/acc_t2", True),
    ("gap V* - V: what only the adapted actor can use", "critic/lead/gap", False),
    ("leak: feedback that holds the answer", "critic/lead/leak", False),
    ("verdicts that agree with the verifier", "critic/lead/acc_dis", True),
    ("reward in training", "play/reward", True),
    ("entropy of the actor, nats", "actor/follow/entropy", False),
    ("entropy of the critic, nats", "critic/lead/entropy", False),
    ("KL of the actor to its reference", "actor/follow/kl", False),
)
"""Title, key of the metrics, whether it is a share."""


def page(
    runs: Sequence[Any],
    names: Sequence[str],
    split: Mapping[Path, Split],
    comparison: Sequence[list[str]] = (),
) -> str:
    """The page of these runs (`report.RunData`); `comparison` is a table, its head first.

    `split` gives the tokens of a run's turns where its tokenizer is known; a turn without one is
    coloured as a whole.
    """
    recipes = list(dict.fromkeys(run.config["recipe"] for run in runs))
    colors = {recipe: COLORS[i % len(COLORS)] for i, recipe in enumerate(recipes)}
    title = _title(runs, recipes)
    charts = [_curve(heading, key, unit, runs, colors) for heading, key, unit in CHARTS]
    charts.append(_throughput(runs, colors))
    body = [
        f"<header><h1>{html.escape(title)}</h1>{_facts(runs, recipes)}</header>",
        _cards(runs, colors),
        "<h2>Learning</h2>",
        _legend(colors),
        f'<div class="charts">{"".join(charts)}</div>',
        "<p class=note>Thick: mean over seeds, shaded: their range, thin: each seed. Held-out "
        "points are measured; what happens in play is a mean of five steps.</p>",
        *_comparison(comparison),
        "<h2>Held-out numbers</h2>",
        *(
            _eval_table(run, name, closed=len(runs) > 1)
            for run, name in zip(runs, names, strict=True)
        ),
        "<h2>Where the time went</h2>",
        _phase_bars(runs),
        *(
            _phase_table(run, name, closed=len(runs) > 1)
            for run, name in zip(runs, names, strict=True)
        ),
        "<h2>Transcripts</h2>",
        '<p class=note>A token is <span class=tok style="background:#bfe3d0">green</span> where '
        'its advantage is above 0 and <span class=tok style="background:#f6c9b3">red</span> below; '
        "the stronger, the further from 0. The number is the credit of the turn.</p>",
        *(
            _transcripts(run, name, split.get(run.run_dir), opened=i == 0)
            for i, (run, name) in enumerate(zip(runs, names, strict=True))
        ),
        "<h2>Settings</h2>",
        *_settings(runs, names),
    ]
    shell = resources.files(__package__).joinpath("report_page.html").read_text(encoding="utf-8")
    return shell.replace("@TITLE@", html.escape(title)).replace("@BODY@", "\n".join(body))


def _title(runs: Sequence[Any], recipes: list[str]) -> str:
    if len(runs) == 1:
        return f"{recipes[0]} (seed {runs[0].config['seed']})"
    seeds = len({run.config["seed"] for run in runs})
    return f"{len(runs)} runs: {len(recipes)} recipe(s), {seeds} seed(s)"


def _facts(runs: Sequence[Any], recipes: list[str]) -> str:
    steps = sum(run.last.steps for run in runs)
    tokens = sum(run.last.tokens for run in runs)
    seconds = sum(run.last.seconds for run in runs)
    where = str(runs[0].run_dir) if len(runs) == 1 else ", ".join(recipes)
    return (
        f"<p>{html.escape(where)}: {steps:,} steps, {tokens:,} generated tokens, "
        f"{seconds:,.0f} s of training</p>"
    )


def _groups(runs: Sequence[Any]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for run in runs:
        groups.setdefault(run.config["recipe"], []).append(run)
    return groups


def _cards(runs: Sequence[Any], colors: dict[str, str]) -> str:
    """First and last held-out accuracies of each recipe, mean over its seeds."""
    cards = []
    for recipe, members in _groups(runs).items():
        rows = []
        for turn, label in (("acc_t1", "first answer"), ("acc_t2", "after feedback")):
            key = f"eval/sampled/{turn}"
            first = [r.evals[0].value(key) for r in members if r.evals]
            last = [r.evals[-1].value(key) for r in members if r.evals]
            good = [value for value in last if value is not None]
            if good and None not in first:
                begin, end = sum(first) / len(first), sum(good) / len(good)
                spread = f" <i>{min(good):.3f} to {max(good):.3f}</i>" if len(good) > 1 else ""
                rows.append(f"<p>{label}<br>{begin:.3f} &rarr; <b>{end:.3f}</b>{spread}</p>")
        if rows:
            cards.append(
                f'<div class="card" style="border-color:{colors[recipe]}">'
                f"<h3>{html.escape(recipe)}</h3>{''.join(rows)}</div>"
            )
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _legend(colors: dict[str, str]) -> str:
    items = (
        f'<li><span style="background:{color}"></span>{html.escape(name)}</li>'
        for name, color in colors.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


# Curves


def _series(run: Any, key: str) -> list[tuple[float, float]]:
    """(tokens, value) of a metric; what is measured in play is a mean of five steps."""
    found = [(float(p.tokens), float(p.row[key])) for p in run.points if p.value(key) is not None]
    if key.startswith("eval/"):
        return found
    return [
        (x, sum(y for _, y in found[max(0, i + 1 - _SMOOTH) : i + 1]) / min(i + 1, _SMOOTH))
        for i, (x, _) in enumerate(found)
    ]


def _curve(title: str, key: str, unit: bool, runs: Sequence[Any], colors: dict[str, str]) -> str:
    lines = []
    for recipe, members in _groups(runs).items():
        series = {str(run.config["seed"]): _series(run, key) for run in members}
        lines += group_lines(recipe, series, colors[recipe], dots=key.startswith("eval/"))
    return line_chart(title, lines, x_label="generated tokens", unit=unit)


def group_lines(
    name: str, series: Mapping[str, list[tuple[float, float]]], color: str, *, dots: bool
) -> list[Line]:
    """The curves of one recipe: its seeds, and their mean where there are several.

    Seeds stop at different places; the mean is taken where all of them are known, each read off its
    own curve by straight lines.
    """
    known = {seed: points for seed, points in series.items() if points}
    if len(known) < 2:
        return [Line(name=name, color=color, points=p, dots=dots) for p in known.values()]
    lines = [
        Line(name=f"{name}, seed {seed}", color=color, points=p, faint=True)
        for seed, p in known.items()
    ]
    start = max(p[0][0] for p in known.values())
    end = min(p[-1][0] for p in known.values())
    longest = max(known.values(), key=len)
    grid = [x for x, _ in longest if start <= x <= end]
    if not grid:
        return lines
    values = [[_read(p, x) for p in known.values()] for x in grid]
    mean = Line(
        name=f"{name}, mean of {len(known)} seeds",
        color=color,
        points=[(x, sum(v) / len(v)) for x, v in zip(grid, values, strict=True)],
        low=[min(v) for v in values],
        high=[max(v) for v in values],
        dots=dots,
    )
    return [*lines, mean]


def _read(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value of a curve at x, between its points on a straight line."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1] if x >= points[-1][0] else points[0][1]


def _throughput(runs: Sequence[Any], colors: dict[str, str]) -> str:
    lines = []
    for recipe, members in _groups(runs).items():
        series = {}
        for run in members:
            rates = [
                (float(p.tokens), tokens / (seconds - (p.value("time/eval") or 0.0)))
                for p in run.points
                if (tokens := p.value("play/generated_tokens"))
                and (seconds := p.value("time/step"))
                and seconds > (p.value("time/eval") or 0.0)
            ]
            smooth = [
                (x, sum(y for _, y in rates[max(0, i - 9) : i + 1]) / min(i + 1, 10))
                for i, (x, _) in enumerate(rates)
            ]
            series[str(run.config["seed"])] = smooth
        lines += group_lines(recipe, series, colors[recipe], dots=False)
    return line_chart("sampled tokens a second of training", lines, x_label="generated tokens")


# Tables


def _comparison(rows: Sequence[list[str]]) -> list[str]:
    if not rows:
        return []
    return [
        "<h2>At equal amounts</h2>",
        _table(rows[0], rows[1:]),
        "<p class=note>First answer / after feedback, held out and sampled, @ the step of that "
        "evaluation; ~ where none was near: training prompts.</p>",
    ]


def _eval_table(run: Any, name: str, *, closed: bool) -> str:
    if not run.evals:
        return f"<p>{html.escape(name)}: no evaluation yet.</p>"
    first, last = run.evals[0], run.evals[-1]
    keys = [key for key in last.row if key.startswith("eval/") and not key.endswith(("_lo", "_hi"))]
    rows = [[key, _interval(first, key), _interval(last, key)] for key in keys]
    table = _table(["metric", f"after {first.steps} steps", f"after {last.steps} steps"], rows)
    return _fold(name, table, closed)


def _phases(run: Any) -> tuple[Counter[str], float, int]:
    """Seconds of each phase over the run, of all, and the steps that were made."""
    total: Counter[str] = Counter()
    for point in run.points:
        for key, value in point.row.items():
            if key.startswith("time/") and value is not None:
                total[key.removeprefix("time/")] += value
    whole = total.pop("step", 0.0)
    return total, whole, max(1, sum(p.steps > 0 for p in run.points))


def _phase_bars(runs: Sequence[Any]) -> str:
    rows = []
    for recipe, members in _groups(runs).items():
        seconds: Counter[str] = Counter()
        steps = 0
        for run in members:
            total, _, made = _phases(run)
            seconds.update(total)
            steps += made
        order = ["play", "follow", "probe", "lead", "refit", "save", "eval", "other"]
        order += sorted(set(seconds) - set(order))
        rows.append((recipe, [(n, seconds[n] / steps) for n in order if seconds[n] > 0]))
    return bars("seconds a step by phase", rows, "s")


def _phase_table(run: Any, name: str, *, closed: bool) -> str:
    total, whole, steps = _phases(run)
    rows = [
        [phase, f"{s:,.2f}", f"{s / steps:.4f}", f"{s / whole:.1%}" if whole else "-"]
        for phase, s in [*total.most_common(), ("all", whole)]
    ]
    return _fold(name, _table(["phase", "seconds", "seconds a step", "share"], rows), closed)


def _fold(name: str, inner: str, closed: bool) -> str:
    if not closed:
        return inner
    return f"<details><summary>{html.escape(name)}</summary>{inner}</details>"


def _table(head: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    inner = f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
    return f'<div class="scroll">{inner}</div>'


def _interval(point: Any, key: str) -> str:
    value = point.value(key)
    low, high = point.value(key + "_lo"), point.value(key + "_hi")
    shown = "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
    return shown if low is None or high is None else f"{shown} [{low:.2f}, {high:.2f}]"


def _settings(runs: Sequence[Any], names: Sequence[str]) -> list[str]:
    """What the runs differ in, then each config."""
    flat = [_flat(run.config) for run in runs]
    keys = sorted({key for one in flat for key in one})
    differing = [k for k in keys if len({json.dumps(one.get(k)) for one in flat}) > 1]
    out = []
    if differing:
        rows = [[key, *(json.dumps(one.get(key)) for one in flat)] for key in differing]
        out.append(_table(["what differs", *names], rows))
    for run, name in zip(runs, names, strict=True):
        text = html.escape(json.dumps(run.config, indent=2, sort_keys=True))
        out.append(_fold(f"config of {name}", f"<pre>{text}</pre>", closed=True))
    return out


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


# Transcripts


def _transcripts(run: Any, name: str, split: Split | None, *, opened: bool) -> str:
    trees = run.trees
    if len(trees) > TREES_PER_RUN:
        last = len(trees) - 1
        trees = [trees[round(i * last / (TREES_PER_RUN - 1))] for i in range(TREES_PER_RUN)]
    if not trees:
        return ""
    scale = max((abs(a) for entry in trees for a in _advantages(entry["tree"])), default=0.0) or 1.0
    # Unfolded is the tree in which most turns were told apart.
    told = [len(set(_advantages(entry["tree"]))) for entry in trees]
    inner = "".join(
        _tree(entry, split, scale, opened=opened and i == told.index(max(told)))
        for i, entry in enumerate(trees)
    )
    state = " open" if opened else ""
    return f"<details{state}><summary>{html.escape(name)}</summary>{inner}</details>"


def _is_tree(tree: Any) -> bool:
    return isinstance(tree, dict) and {"prompt", "attempts", "feedbacks"} <= tree.keys()


def _turns(tree: Any) -> list[dict[str, Any]]:
    turns = list(tree["attempts"])
    for feedback in tree["feedbacks"]:
        turns += [feedback, *feedback.get("revisions", []), *feedback.get("probes", [])]
    return turns


def _advantages(tree: Any) -> list[float]:
    if not _is_tree(tree):
        return []
    return [float(turn.get("advantage", 0.0)) for turn in _turns(tree)]


def _tree(entry: dict[str, Any], split: Split | None, scale: float, *, opened: bool) -> str:
    """One tree; whatever is not a `tree_record` is shown as JSON."""
    tree, step = entry["tree"], entry["step"]
    if not _is_tree(tree):
        return f"<h3>Step {step}</h3><pre>{html.escape(json.dumps(tree, indent=2))}</pre>"
    attempts, revisions = (
        tree["attempts"],
        [turn for z in tree["feedbacks"] for turn in z.get("revisions", [])],
    )
    parts = []
    for index, attempt in enumerate(attempts):
        told = [z for z in tree["feedbacks"] if z["attempt"] == index]
        answers = "".join(
            f'<div class="told">{_turn("feedback", z, split, scale)}'
            f'<div class="answers">{_spoken(z, split, scale)}</div></div>'
            for z in told
        )
        parts.append(
            f'<div class="attempt">{_turn("attempt", attempt, split, scale)}{answers}</div>'
        )
    heads = f"first {_right(attempts)}"
    heads += f", after feedback {_right(revisions)}" if revisions else ""
    gold = html.escape(str(tree.get("gold", "")))
    state = " open" if opened else ""
    return (
        f'<details class="tree"{state}><summary>Step {step}: {html.escape(str(tree["prompt"]))} '
        f"<small>{heads}</small></summary><p>verified answer: {gold}</p>{''.join(parts)}</details>"
    )


def _right(turns: Sequence[Mapping[str, Any]]) -> str:
    right = sum(turn.get("reward", 0.0) >= 1.0 for turn in turns)
    return f"{right} of {len(turns)} right"


def _spoken(feedback: Mapping[str, Any], split: Split | None, scale: float) -> str:
    return "".join(
        _turn(kind, turn, split, scale)
        for kind, key in (("revision", "revisions"), ("probe", "probes"))
        for turn in feedback.get(key, [])
    )


def _turn(kind: str, turn: Mapping[str, Any], split: Split | None, scale: float) -> str:
    advantage = float(turn.get("advantage", 0.0))
    pieces = split(turn) if split is not None else [str(turn["text"])]
    own = turn.get("token_advantages") or []
    # The end token has an advantage and no text; where tokens are not told apart one colour is all.
    each = own[: len(pieces)] if len(own) >= len(pieces) > 1 else [advantage] * len(pieces)
    tokens = "".join(
        f"<span class=tok{_style(value / scale)}>{html.escape(piece)}</span>"
        for piece, value in zip(pieces, each, strict=True)
    )
    grade = ""
    if "reward" in turn:
        right = turn["reward"] >= 1.0
        kind_of, mark = ("right", "&#10003;") if right else ("wrong", "&#10007;")
        grade = f'<b class="{kind_of}" title="reward {turn["reward"]:g}">{mark}</b>'
    credit = f"<small>{advantage:+.3g}</small>" if "advantage" in turn else ""
    return (
        f'<span class="turn {kind}"><em>{kind}</em> <code>{tokens}</code> {grade} {credit}</span>'
    )


def _style(strength: float) -> str:
    """Background of an advantage in -1..1, as an attribute; nothing at 0."""
    if abs(strength) < 1e-3:
        return ""
    base = (0, 158, 115) if strength > 0 else (213, 94, 0)
    weight = 0.12 + 0.5 * min(abs(strength), 1.0)
    color = "".join(f"{round(255 + (c - 255) * weight):02x}" for c in base)
    return f' style="background:#{color}"'
