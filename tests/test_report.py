"""The results table, the curves and the page, from run folders with known numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_binac import cli, report
from megatron_binac.config import Config, to_json

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(
    run_dir: Path,
    *,
    recipe: str = "toy",
    seed: int = 1,
    steps: int = 10,
    tokens: int = 100,
    seconds: float = 2.0,
    eval_every: int = 5,
    gain: float = 0.04,
    trees: list[Any] | None = None,
) -> Path:
    """A run whose sampled acc_t1 is 0.2 + gain/2 a step and acc_t2 0.3 + gain a step."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text(to_json(Config(recipe=recipe, seed=seed)))
    rows: list[dict[str, Any]] = []
    for step in range(-1, steps):
        done = step + 1
        row: dict[str, Any] = {"step": step, "time/step": seconds, "time/play": 0.75 * seconds}
        row["time/other"] = 0.25 * seconds
        if step >= 0:
            row["play/generated_tokens"] = tokens
            row |= {"play/acc_t1": 0.1 * step, "play/acc_t2": 0.1 * step + 0.05}
        if step == -1 or done % eval_every == 0:
            row["time/eval"] = 1.0
            row["time/step"] += 1.0
            for decoding, bonus in (("sampled", 0.0), ("greedy", 0.1)):
                for turn, value in (
                    ("acc_t1", 0.2 + gain / 2 * done),
                    ("acc_t2", 0.3 + gain * done),
                ):
                    key = f"eval/{decoding}/{turn}"
                    row |= {
                        key: value + bonus,
                        key + "_lo": value - 0.02,
                        key + "_hi": value + 0.03,
                    }
                row[f"eval/{decoding}/acc_t2_shuffled"] = 0.25
                row[f"eval/{decoding}/acc_t2_oracle"] = 0.875
        rows.append(row)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entries = [{"step": 9, "tree": tree} for tree in trees or []]
    (run_dir / "transcripts.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    return run_dir


def cells(table: str, recipe: str) -> list[list[str]]:
    rows = [line.strip("| ").split("|") for line in table.splitlines() if line.startswith("|")]
    return [[c.strip() for c in row[1:]] for row in rows if row[0].strip() == recipe]


def test_steps_tokens_and_seconds_add_up(tmp_path: Path) -> None:
    run = report.read_run(write_run(tmp_path / "a"))
    assert [p.steps for p in run.evals] == [0, 5, 10]
    assert [p.tokens for p in run.evals] == [0, 500, 1000]
    # Two seconds a step; the evaluation's second does not count, nor anything before the start.
    assert [p.seconds for p in run.evals] == pytest.approx([0.0, 10.0, 20.0])


def test_table_has_before_after_and_controls(tmp_path: Path) -> None:
    table = report.results_table([write_run(tmp_path / "a")])
    sampled, greedy = cells(table, "toy")
    assert sampled == [
        "sampled",
        "0.200 [0.18, 0.23] -> 0.400 [0.38, 0.43]",
        "0.300 [0.28, 0.33] -> 0.700 [0.68, 0.73]",
        "0.250",
        "-",
        "0.875",
    ]
    assert greedy[:2] == ["greedy", "0.300 [0.18, 0.23] -> 0.500 [0.38, 0.43]"]
    assert "equal amounts" not in table


def test_equal_amounts_take_the_least_of_all(tmp_path: Path) -> None:
    long = write_run(tmp_path / "a", recipe="long", steps=20, tokens=50, seconds=1.0, gain=0.02)
    short = write_run(tmp_path / "b", recipe="short", steps=10, tokens=200, seconds=4.0)
    table = report.results_table([long, short])
    assert "at 10 steps" in table
    assert "at 1,000 generated tokens" in table
    assert "at 20 seconds of training" in table
    # long: 10 steps; 1000 tokens are 20 steps; 20 seconds are 20 steps.
    assert cells(table, "long")[2] == [
        "0.300 / 0.500 @10",
        "0.400 / 0.700 @20",
        "0.400 / 0.700 @20",
    ]
    # short: 10 steps; 1000 tokens are 5 steps; 20 seconds are 5 steps.
    assert cells(table, "short")[2] == ["0.400 / 0.700 @10", "0.300 / 0.500 @5", "0.300 / 0.500 @5"]


def test_play_stands_in_where_no_evaluation_is_near(tmp_path: Path) -> None:
    sparse = write_run(tmp_path / "a", recipe="sparse", steps=10, tokens=100, eval_every=10)
    half = write_run(tmp_path / "b", recipe="half", steps=5, tokens=100)
    # After 5 of 10 steps sparse has only its first evaluation: mean play of steps 0..4.
    row = cells(report.results_table([sparse, half]), "sparse")[2]
    assert row[0] == "~0.200 / 0.250"


def test_runs_without_feedback_have_dashes(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", recipe="grpo")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if "acc_t2" not in k} for row in rows]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cells(report.results_table([run_dir]), "grpo")[0][2:] == ["- -> -", "-", "-", "-"]
    for path in report.write_report([run_dir], None):
        assert path.stat().st_size > 1000


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    dirs = [
        write_run(tmp_path / "a", recipe="x", seed=1),
        write_run(tmp_path / "b", recipe="x", seed=2),
        write_run(tmp_path / "c", recipe="y", seed=1),
        write_run(tmp_path / "d", recipe="z", seed=1),
        write_run(tmp_path / "e", recipe="z", seed=1),
    ]
    names = re.findall(r"^\| (\S.*?) +\| sampled", report.results_table(dirs), flags=re.MULTILINE)
    assert names == ["x (seed 1)", "x (seed 2)", "y", "z (seed 1) d", "z (seed 1) e"]


def test_page_is_self_contained_and_escapes_what_models_say(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script> & more"
    tree = {
        "prompt": "2 < 3?",
        "gold": "<yes>",
        "attempts": [{"text": evil, "reward": 0.0, "advantage": -0.5, "finish": "stop"}],
        "feedbacks": [
            {
                "attempt": 0,
                "text": "<b>look again</b>",
                "advantage": 0.25,
                "revisions": [{"text": "yes", "reward": 1.0, "advantage": 0.5}],
                "probes": [{"text": "maybe</li>", "reward": 0.0, "advantage": 0.0}],
            }
        ],
    }
    run_dir = write_run(tmp_path / "a", trees=[tree, ["another <kind>"]])
    curves, page = report.write_report([run_dir], None)
    assert curves == run_dir / "curves.png"
    assert curves.read_bytes().startswith(PNG)
    text = page.read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "url(" not in text
    assert "@import" not in text
    assert "<script" not in text
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; more" in text
    assert "&lt;b&gt;look again&lt;/b&gt;" in text
    assert "another &lt;kind&gt;" in text
    assert "maybe&lt;/li&gt;" in text
    # Phases: 11 rows (one before the start) of 1.5 s play and 0.5 s other, evaluation thrice 1 s.
    assert "<td>play</td><td>16.50</td><td>1.6500</td>" in text
    assert "<td>all</td><td>25.00</td><td>2.5000</td><td>100.0%</td>" in text
    assert "0.700 [0.68, 0.73]" in text


def test_comparison_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dirs = [write_run(tmp_path / "runs" / name, recipe=name) for name in ("a", "b")]
    assert cli.main(["report", *map(str, dirs)]) == 0
    out = capsys.readouterr().out
    for path in (tmp_path / "runs" / name for name in ("curves.png", "results.md", "report.html")):
        assert f"{path}\n" in out
        assert path.is_file()
    assert (tmp_path / "runs" / "results.md").read_text().strip() in out
    lone = write_run(tmp_path / "elsewhere" / "c", recipe="c")
    assert cli.main(["report", str(dirs[0]), str(lone)]) == 2
    assert "pass --out" in capsys.readouterr().err
    assert cli.main(["report", str(lone), "--out", str(tmp_path / "alone")]) == 0
    assert {p.name for p in (tmp_path / "alone").iterdir()} == {
        "curves.png", "results.md", "report.html",
    }  # fmt: skip


def test_a_running_run_can_be_read(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a")
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 10, "play/acc')
    assert report.read_run(run_dir).last.steps == 10
    (run_dir / "metrics.jsonl").write_text('{"step"')
    with pytest.raises(ValueError, match="no rows yet"):
        report.read_run(run_dir)
