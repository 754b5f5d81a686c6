"""Runs at equal cost, from made-up run folders with numbers that were worked out by hand."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from megatron_binac import cli
from megatron_binac.benchmark import compare_show
from megatron_binac.benchmark.compare import Comparison, Row, compare, estimate
from megatron_binac.config import Config, override, to_json

SEEDS = Path(__file__).resolve().parents[2] / "tools" / "seeds.sh"
PNG = b"\x89PNG\r\n\x1a\n"


def write_run(
    run_dir: Path,
    *,
    recipe: str = "a",
    seed: int = 1,
    steps: int = 4,
    every: int = 1,
    tokens: int = 100,
    seconds: float = 2.0,
    first: float = 0.25,
    gain: float = 0.1,
    settings: tuple[str, ...] = (),
    critic: bool = True,
    flops: dict[str, int] | None = None,
) -> Path:
    """A finished run with acc_t1 = first all the time and acc_t2 = first + gain * steps."""
    run_dir.mkdir(parents=True)
    config = Config(recipe=recipe, num_steps=steps, seed=seed)
    (run_dir / "config.json").write_text(to_json(override(config, list(settings))))
    rows: list[dict[str, Any]] = []
    for step in range(-1, steps):
        done = step + 1
        row: dict[str, Any] = {"step": step, "time/step": seconds}
        if step >= 0:
            row["play/generated_tokens"] = tokens
            row |= flops or {}
        if done % every == 0:
            row |= {"time/step": seconds + 1.0, "time/eval": 1.0}
            for decoding, bonus in (("sampled", 0.0), ("greedy", 0.125)):
                row[f"eval/{decoding}/acc_t1"] = first + bonus
                if critic:
                    row[f"eval/{decoding}/acc_t2"] = first + gain * done + bonus
                    row[f"eval/{decoding}/fix"] = gain
        rows.append(row)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def rows_of(found: Comparison) -> dict[str, Row]:
    return {row.name: row for row in found.rows}


def acc_t2(row: Row) -> float:
    value = row.values["acc_t2"]
    assert value is not None
    return value.value


def read_steps(found: Comparison) -> dict[str, int]:
    """Where each run was read, by folder name."""
    return {Path(r.run_dir).name: r.curve[-1].steps for row in found.rows for r in row.runs}


def test_equal_tokens_are_read_at_what_all_have_reached(tmp_path: Path) -> None:
    # 4 steps of 100 tokens, and 8 of 60: 400 tokens are in step 7 of the second, which begins at
    # 360. Its evaluation after step 7 counts, that after step 8 does not.
    runs = [
        str(write_run(tmp_path / "few", recipe="few", steps=4, tokens=100)),
        str(write_run(tmp_path / "many", recipe="many", steps=8, tokens=60)),
    ]
    found = compare(runs)
    assert (found.by, found.budget, found.baseline) == ("tokens", 400, "few")
    assert read_steps(found) == {"few": 4, "many": 7}
    assert acc_t2(rows_of(found)["few"]) == pytest.approx(0.25 + 0.4)
    assert acc_t2(rows_of(found)["many"]) == pytest.approx(0.25 + 0.7)
    (note,) = found.warnings
    assert note.startswith("budgets differ: the runs end between 400 and 480 generated tokens")


def test_equal_steps_and_equal_time_have_budgets_of_their_own(tmp_path: Path) -> None:
    runs = [
        str(write_run(tmp_path / "slow", recipe="slow", steps=4, seconds=10.0)),
        str(write_run(tmp_path / "fast", recipe="fast", steps=8, seconds=4.0)),
    ]
    by_steps = compare(runs, by="steps")
    assert by_steps.budget == 4
    assert read_steps(by_steps) == {"slow": 4, "fast": 4}
    # Evaluation is not counted: fast ends at 32 s. Slow's step 4 begins at 30 s.
    by_time = compare(runs, by="time")
    assert by_time.budget == 32
    assert read_steps(by_time) == {"slow": 4, "fast": 8}
    assert [r.curve[-1].seconds for row in by_time.rows for r in row.runs] == [40.0, 32.0]


def test_equal_flops_are_those_of_both_roles_and_all_phases(tmp_path: Path) -> None:
    # 4 steps of 1000 + 500 + 3000 = 4500, and 8 of 4000: 18,000 of the second are in its step 5,
    # which begins at 16,000.
    three = {"actor/play/flops": 1000, "critic/play/flops": 500, "actor/follow/flops": 3000}
    runs = [
        str(write_run(tmp_path / "both", recipe="both", steps=4, flops=three)),
        str(
            write_run(
                tmp_path / "one", recipe="one", steps=8, tokens=10, flops={"actor/play/flops": 4000}
            )
        ),
    ]
    found = compare(runs, by="flops")
    assert (found.by, found.budget) == ("flops", 18_000)
    assert read_steps(found) == {"both": 4, "one": 5}
    assert [r.curve[-1].flops for row in found.rows for r in row.runs] == [18_000, 20_000]
    told = compare_show.table(found)
    assert "at 1.8e+04 model FLOPs" in told
    assert told.splitlines()[4].split()[-4:] == ["tokens", "FLOPs", "steps", "seconds"]
    # By tokens the second would have been read to its end.
    assert read_steps(compare(runs)) == {"both": 1, "one": 8}


def test_a_run_that_did_not_count_every_step_has_no_flops(tmp_path: Path) -> None:
    counted = write_run(tmp_path / "new", recipe="new", flops={"actor/play/flops": 7})
    older = write_run(tmp_path / "old", recipe="old", flops={"actor/play/flops": 7})
    lines = (older / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[1])
    del first["actor/play/flops"]
    lines[1] = json.dumps(first)
    (older / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"old has steps without FLOPs"):
        compare([str(counted), str(older)], by="flops")
    assert "FLOPs" not in compare_show.table(compare([str(counted), str(older)]))


def test_a_smaller_budget_may_be_asked_for(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / "a", steps=6)), str(write_run(tmp_path / "b", recipe="b"))]
    assert read_steps(compare(runs, at=250)) == {"a": 3, "b": 3}
    # A step that begins at the budget is beyond it.
    assert read_steps(compare(runs, at=200)) == {"a": 2, "b": 2}
    assert read_steps(compare(runs, at=0)) == {"a": 0, "b": 0}
    for wrong in (401.0, -1.0):
        with pytest.raises(ValueError, match=r"b is only evaluated up to 400 generated tokens"):
            compare(runs, at=wrong)


def test_the_last_evaluation_before_the_budget_counts_and_is_named(tmp_path: Path) -> None:
    runs = [
        str(write_run(tmp_path / "dense", recipe="dense", steps=4)),
        str(write_run(tmp_path / "sparse", recipe="sparse", steps=9, every=3)),
    ]
    found = compare(runs, by="steps")
    assert read_steps(found) == {"dense": 4, "sparse": 3}
    assert any("sparse is read at 3 (see eval.every)" in note for note in found.warnings)
    # 1,000 tokens of step 10 began below, so that nothing is missed at 1,000 of 1,030 tokens.
    near = [
        str(write_run(tmp_path / "x", recipe="x", steps=10, every=10, tokens=100)),
        str(write_run(tmp_path / "y", recipe="y", steps=10, every=10, tokens=103)),
    ]
    found = compare(near)
    assert (read_steps(found), found.budget) == ({"x": 10, "y": 10}, 1000)
    assert found.warnings == []


def test_seeds_are_pooled_and_differences_paired(tmp_path: Path) -> None:
    # acc_t2 after 4 steps, by seed:  a .65 .45 .55   b .75 .65 .45   so b - a = .10 .20 -.10
    for recipe, gains in (("a", (0.1, 0.05, 0.075)), ("b", (0.125, 0.1, 0.05))):
        for seed, gain in enumerate(gains, start=1):
            write_run(tmp_path / f"{recipe}-{seed}", recipe=recipe, seed=seed, gain=gain)
    found = compare([str(tmp_path / "*")])
    rows = rows_of(found)
    assert list(rows) == ["a", "b"]
    value = rows["a"].values["acc_t2"]
    assert value is not None
    # Of three seeds the percentiles are the least and the largest: all three draws fall on one of
    # them in 1 of 27 cases, more than 2.5 %.
    assert (value.value, value.low, value.high) == pytest.approx((0.55, 0.45, 0.65))
    assert value.num == 3
    assert rows["a"].before == pytest.approx({"acc_t1": 0.25, "acc_t2": 0.25})
    gap = rows["b"].differences["acc_t2"]
    assert gap is not None
    assert gap.estimate.value == pytest.approx(0.2 / 3)
    assert (gap.estimate.low, gap.estimate.high) == pytest.approx((-0.1, 0.2))
    assert (gap.num_above, gap.estimate.num) == (2, 3)
    assert set(rows["a"].differences.values()) == {None}
    # The other way round every sign turns.
    turned = rows_of(compare([str(tmp_path / "*")], baseline="b"))["a"].differences["acc_t2"]
    assert turned is not None
    assert turned.estimate.value == pytest.approx(-0.2 / 3)
    assert turned.num_above == 1


def test_only_seeds_that_both_have_make_a_difference(tmp_path: Path) -> None:
    for recipe, seeds in (("a", (1, 2)), ("b", (2, 3)), ("c", (4,))):
        for seed in seeds:
            gain = 0.1 if recipe == "a" else 0.15
            write_run(tmp_path / f"{recipe}-{seed}", recipe=recipe, seed=seed, gain=gain)
    found = compare([str(tmp_path / "*")])
    gap = rows_of(found)["b"].differences["acc_t2"]
    assert gap is not None
    assert gap.estimate.value == pytest.approx(0.2)
    assert (gap.estimate.num, gap.estimate.low) == (1, None)
    assert rows_of(found)["c"].differences["acc_t2"] is None
    assert found.warnings == ["c and a have no seed in common: no paired difference"]


def test_runs_with_other_problems_are_no_pair(tmp_path: Path) -> None:
    write_run(tmp_path / "a", recipe="a", settings=("task.options.seed=1",))
    write_run(tmp_path / "b", recipe="b", settings=("task.options.seed=2",))
    found = compare([str(tmp_path / "*")])
    assert rows_of(found)["b"].differences["acc_t2"] is None


def test_what_was_set_differently_is_not_pooled(tmp_path: Path) -> None:
    write_run(tmp_path / "1", seed=1)
    write_run(tmp_path / "2", seed=2, settings=("actor.optimizer.lr=0.01",))
    write_run(tmp_path / "3", seed=3, settings=("eval.every=7", "save_every=3"))
    found = compare([str(tmp_path / "*")])
    assert {row.name: [r.seed for r in row.runs] for row in found.rows} == {
        "a (actor.optimizer.lr=0.001)": [1, 3],
        "a (actor.optimizer.lr=0.01)": [2],
    }


def test_one_seed_twice_is_an_error(tmp_path: Path) -> None:
    write_run(tmp_path / "x")
    write_run(tmp_path / "y")
    with pytest.raises(ValueError, match=r"got seed 1 of a twice, .*x and .*y; leave one out"):
        compare([str(tmp_path / "*")])
    # The same folder named twice is one run.
    again = compare([str(tmp_path / "x"), f"{tmp_path}/x/../x", str(tmp_path / "x*")])
    assert len(again.rows[0].runs) == 1


def test_the_bootstrap_is_that_of_all_draws() -> None:
    values = [0.1, 0.3, 0.35, 0.9]
    means = sorted(mean(draw) for draw in itertools.product(values, repeat=4))
    found = estimate(values)
    # 256 draws, all equally likely: the quantile 2.5 % is the 7th least, 97.5 % the 250th.
    assert found.low == pytest.approx(means[6])
    assert found.high == pytest.approx(means[249])
    assert found.value == pytest.approx(0.4125)
    assert estimate(values) == found
    lone = estimate([0.5])
    assert (lone.value, lone.low, lone.high, lone.num) == (0.5, None, None, 1)
    same = estimate([0.5] * 5)
    assert (same.low, same.high) == (0.5, 0.5)


def test_students_t_is_wider() -> None:
    # mean 2, s 1, n 3: 2 +- 4.303 / sqrt(3).
    found = estimate([1.0, 2.0, 3.0], "t")
    assert (found.low, found.high) == pytest.approx((2 - 2.4843, 2 + 2.4843), abs=1e-4)
    many = estimate([0.0, 1.0] * 50, "t")
    assert many.high is not None
    # s = sqrt(25 / 99), n = 100, and the normal quantile.
    assert many.high - 0.5 == pytest.approx(1.95996 * (25 / 99) ** 0.5 / 10, abs=1e-6)


def test_a_recipe_without_feedback_has_no_second_answer(tmp_path: Path) -> None:
    runs = [
        str(write_run(tmp_path / "grpo", recipe="grpo", critic=False)),
        str(write_run(tmp_path / "binac", recipe="binac")),
    ]
    found = compare(runs)
    assert rows_of(found)["grpo"].values["acc_t2"] is None
    assert rows_of(found)["binac"].differences["acc_t2"] is None
    gap = rows_of(found)["binac"].differences["acc_t1"]
    assert gap is not None
    assert gap.estimate.value == 0.0
    text = compare_show.table(found)
    assert "- -> -" in text
    compare_show.plot(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_greedy_and_other_metrics(tmp_path: Path) -> None:
    write_run(tmp_path / "x")
    found = compare([str(tmp_path / "x")], decoding="greedy", metrics=["fix", "acc_t1"])
    assert list(found.rows[0].values) == ["fix", "acc_t1"]
    value = found.rows[0].values["acc_t1"]
    assert value is not None
    assert value.value == 0.375
    with pytest.raises(ValueError, match="no metric 'fixx' among the runs; the closest is 'fix'"):
        compare([str(tmp_path / "x")], metrics=["fixx"])
    with pytest.raises(ValueError, match="no baseline 'b' among the runs; the closest is 'a'"):
        compare([str(tmp_path / "x")], baseline="b")


def test_unfinished_runs_are_said_or_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "whole", recipe="whole", steps=4)
    half = write_run(tmp_path / "half", recipe="half", steps=4)
    lines = (half / "metrics.jsonl").read_text().splitlines(keepends=True)
    (half / "metrics.jsonl").write_text("".join(lines[:3]) + '{"step": 2, "ev')
    found = compare([str(tmp_path / "*")])
    assert found.budget == 200
    assert f"not finished, counted as far as they are: {half} (2 of 4 steps)" in found.warnings
    found = compare([str(tmp_path / "*")], finished_only=True)
    assert [row.name for row in found.rows] == ["whole"]
    assert found.warnings == [f"not finished, left out: {half} (2 of 4 steps)"]
    with pytest.raises(ValueError, match="none of the runs is finished"):
        compare([str(half)], finished_only=True)
    # A run that has spent its tokens is finished, however many steps are left.
    spent = ("num_steps=50", "max_generated_tokens=400")
    write_run(tmp_path / "spent", recipe="spent", settings=spent)
    assert compare([str(tmp_path / "spent")], finished_only=True).warnings == []


def test_what_is_no_run_is_refused_and_a_pattern_passes_it_over(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "x")
    (runs / "x.done").touch()
    (runs / "cache").mkdir()
    for path, why in (
        (tmp_path / "absent", "it does not exist"),
        (runs / "x.done", "it is a file; quote a pattern"),
        (runs / "cache", "it has no config.json"),
        (runs, "but it holds some; pass"),
    ):
        with pytest.raises(ValueError, match=rf"{path.name} is not a run folder: {why}"):
            compare([str(path)])
    found = compare([str(runs / "*")])
    assert found.warnings == [f"left out, not runs: {runs / 'cache'}"]
    with pytest.raises(ValueError, match="matches no run folder"):
        compare([str(runs / "c*")])
    (runs / "x" / "metrics.jsonl").write_text("{}\n{\n")
    with pytest.raises(ValueError, match=r"x/metrics\.jsonl:2 cannot be read as a run's"):
        compare([str(runs / "x")])


def test_a_run_without_evaluation_is_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x")
    (run / "metrics.jsonl").write_text('{"step": 0, "time/step": 1.0}\n')
    with pytest.raises(ValueError, match="x holds no sampled evaluation yet"):
        compare([str(run)])


def test_several_tasks_are_an_error_and_other_problems_a_warning(tmp_path: Path) -> None:
    write_run(tmp_path / "x", recipe="x")
    write_run(tmp_path / "y", recipe="y", settings=("task.name=math",))
    with pytest.raises(ValueError, match=r"got runs of 2 tasks .*expected one task"):
        compare([str(tmp_path / "*")])
    write_run(tmp_path / "z", recipe="z", settings=("eval.num_prompts=8",))
    found = compare([str(tmp_path / "x"), str(tmp_path / "z")])
    assert found.warnings == ["eval.num_prompts differs (256, 8): the runs are not measured alike"]


def test_a_config_of_another_version_is_still_read(tmp_path: Path) -> None:
    write_run(tmp_path / "x", seed=1)
    old = write_run(tmp_path / "y", seed=2)
    held = json.loads((old / "config.json").read_text())
    del held["save_every"]
    (old / "config.json").write_text(json.dumps(held))
    assert [r.seed for r in compare([str(tmp_path / "*")]).rows[0].runs] == [1, 2]
    (old / "config.json").write_text(json.dumps(held | {"gone": 1}))
    found = compare([str(tmp_path / "*")])
    assert {row.name for row in found.rows} == {"a (gone=null)", "a (gone=1)"}


def test_the_command_prints_a_table_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for recipe, gain in (("a", 0.1), ("b", 0.125)):
        for seed in (1, 2):
            write_run(tmp_path / f"{recipe}-{seed}", recipe=recipe, seed=seed, gain=gain)
    markdown, plot = tmp_path / "out" / "t.md", tmp_path / "out" / "p.png"
    code = cli.main(
        ["compare", str(tmp_path / "*-*"), "--markdown", str(markdown), "--plot", str(plot)]
    )
    assert code == 0
    text = capsys.readouterr().out
    assert "at 400 generated tokens" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("b ")]
    values = "b 2 0.250 -> 0.250 [0.250, 0.250] 0.250 -> 0.750 [0.750, 0.750] 400 4 8"
    assert lines[0] == values.split()
    difference = "b +0.000 [+0.000, +0.000] (0 of 2) +0.100 [+0.100, +0.100] (2 of 2)"
    assert lines[1] == difference.split()
    assert "| b      | 2     | 0.250 -> 0.250 [0.250, 0.250] |" in markdown.read_text()
    assert plot.read_bytes().startswith(PNG)


def test_json_holds_every_runs_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "x", steps=4, every=2)
    assert cli.main(["compare", str(tmp_path / "x"), "--json", "--by", "steps"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["by"], told["budget"], told["baseline"]) == ("steps", 4, "a")
    (row,) = told["rows"]
    (run,) = row["runs"]
    assert [(m["steps"], m["tokens"], m["seconds"]) for m in run["curve"]] == [
        (0, 0, 0.0),
        (2, 200, 4.0),
        (4, 400, 8.0),
    ]
    assert [m["values"]["acc_t2"] for m in run["curve"]] == pytest.approx([0.25, 0.45, 0.65])
    assert row["values"]["acc_t2"]["value"] == pytest.approx(0.65)


@pytest.mark.parametrize(
    ("flag", "name"), [("--markdown", "config.json"), ("--plot", "metrics.jsonl")]
)
def test_a_file_of_another_kind_is_not_written_over(
    flag: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "x")
    before = (run / name).read_bytes()
    assert cli.main(["compare", str(run), flag, str(run / name)]) == 2
    assert f"{flag} is {run / name}, expected a name that ends in" in capsys.readouterr().err
    assert (run / name).read_bytes() == before


@pytest.mark.parametrize("fails", ["", "b-2"])
def test_the_seeds_script_compares_what_it_has_trained(fails: str, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    # A stand-in that notes its arguments; the run that FAILS names ends with an error.
    python.write_text(
        '#!/bin/bash\necho "$*" >>"$NOTED"\n[[ -z $FAILS || "$*" != *"/$FAILS --set"* ]]\n'
    )
    python.chmod(0o755)
    noted, out = tmp_path / "noted", tmp_path / "out"
    env = {"PATH": f"{python.parent}:{os.environ['PATH']}", "NOTED": str(noted), "FAILS": fails}
    command = ["bash", str(SEEDS), "--seeds", "2", "--out", str(out), "--recipes", "a b"]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    lines = noted.read_text().splitlines()
    assert sum(" train " in line for line in lines) == 4
    compared = [line for line in lines if " compare " in line]
    if fails:
        assert done.returncode == 1
        assert f"seeds.sh: {out}/b-2 failed; see {out}/b-2.txt" in done.stderr
        assert compared == []
        return
    assert done.returncode == 0, done.stderr
    runs = " ".join(f"{out}/{name}" for name in ("a-1", "a-2", "b-1", "b-2"))
    assert compared == [
        f"-m megatron_binac compare {runs} --markdown {out}/pooled.md --plot {out}/pooled.png"
    ]
    # The second time nothing is trained again.
    subprocess.run(command, env=env, capture_output=True, check=True, timeout=300)
    assert sum(" train " in line for line in noted.read_text().splitlines()) == 4
