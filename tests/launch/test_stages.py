"""The experiment as stages: variants, order, and when something is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_binac import run_folder
from megatron_binac.launch import stages
from megatron_binac.launch.stages import CHAIN, Experiment


def experiment(folder: Path, *, chained: int = 1, seeds: tuple[int, ...] = ()) -> Experiment:
    found = stages.variants(["quickstart"], [["num_steps=4"]], seeds, [])
    return Experiment(name="e", folder=folder, variants=found, chained_jobs=chained)


def test_variants_are_every_recipe_with_every_value(tmp_path: Path) -> None:
    found = stages.variants(
        ["quickstart", "quickstart_joint"],
        [["num_steps=4"], ["num_steps=5"]],
        [1, 2],
        ["actor.optimizer.lr=1e-4,2e-4"],
    )
    assert len(found) == 8
    assert found[0].name == "quickstart-lr1e-4-seed1"
    last = found[-1]
    assert (last.name, last.config.num_steps) == ("quickstart_joint-lr2e-4-seed2", 5)
    assert (last.config.seed, last.config.actor.optimizer.lr) == (2, 2e-4)


def test_variants_refuse_what_comes_twice_and_what_is_no_sweep() -> None:
    with pytest.raises(ValueError, match="quickstart comes twice"):
        stages.variants(["quickstart", "quickstart"], [[], []], [], [])
    with pytest.raises(ValueError, match="expected KEY=VALUE,VALUE"):
        stages.variants(["quickstart"], [[]], [], ["seed"])
    with pytest.raises(ValueError, match=r"parallel\.tp 3 does not divide"):
        stages.variants(["quickstart"], [["actor.parallel.tp=3"]], [], [])


def test_the_chain_says_what_waits_for_what(tmp_path: Path) -> None:
    found = {s.name: s for s in stages.build(experiment(tmp_path, seeds=(1, 2)), list(CHAIN))}
    assert list(found) == list(CHAIN)
    waits = {name: (stage.when, stage.after) for name, stage in found.items() if stage.after}
    assert waits == {
        "train": ("afterok", ("warm_actor", "warm_critic")),
        "export": ("afterok", ("train",)),
        "eval": ("afterok", ("train",)),
        # A report shows what there is, also where a run has failed.
        "report": ("afterany", ("train", "eval")),
        "compare": ("afterok", ("train",)),
    }
    # Both seeds share one warm start.
    assert [len(stage.tasks) for stage in found.values()] == [1, 1, 2, 2, 2, 1, 1, 1]
    assert [name for name, stage in found.items() if not stage.all_ranks] == [
        "export", "bench", "report", "compare",
    ]  # fmt: skip


def test_a_stage_waits_for_those_that_are_there(tmp_path: Path) -> None:
    train, report = stages.build(experiment(tmp_path), ["report", "train"])
    assert (train.name, train.after) == ("train", ())
    assert report.after == ("train",)
    assert {*CHAIN} - {*stages.chain()} <= {"export"}
    with pytest.raises(ValueError, match="there is no stage 'trian'"):
        stages.build(experiment(tmp_path), ["trian"])


def test_chained_jobs_share_records_and_follow_whatever_happened(tmp_path: Path) -> None:
    found = stages.build(experiment(tmp_path, chained=3), ["train", "eval"])
    assert [(s.name, s.when, s.after) for s in found] == [
        ("train", "afterok", ()),
        ("train_2", "afterany", ("train",)),
        ("train_3", "afterany", ("train_2",)),
        ("eval", "afterok", ("train_3",)),
    ]
    assert len({stage.record(tmp_path, 0) for stage in found[:3]}) == 1


def test_done_means_made_by_this_very_command_and_still_there(tmp_path: Path) -> None:
    held = experiment(tmp_path)
    train, evaluate = stages.build(held, ["train", "eval"])
    run_dir, record = held.run_dir(held.variants[0]), Path(f"{train.record(tmp_path, 0)}.done")
    assert not train.finished(tmp_path, 0)
    run_folder.claim(run_dir, held.variants[0].config, fresh=True)
    (run_dir / "metrics.jsonl").touch()
    (run_dir / "checkpoints" / "step_000004").mkdir(parents=True)
    record.parent.mkdir()
    record.write_text(train.tasks[0].fingerprint + "\n")
    assert train.finished(tmp_path, 0)
    (run_dir / "checkpoints" / "step_000004").rmdir()
    assert not train.finished(tmp_path, 0)

    file = evaluate.tasks[0].makes
    file.parent.mkdir()
    Path(f"{evaluate.record(tmp_path, 0)}.done").write_text(evaluate.tasks[0].fingerprint)
    for text, good in (("", False), ('{"step"', False), (json.dumps({"step": 4}), True)):
        file.write_text(text)
        assert evaluate.finished(tmp_path, 0) == good
    # Another setting is another command.
    other = stages.variants(["quickstart"], [["num_steps=5"]], [], [])
    changed = Experiment(name="e", folder=tmp_path, variants=other)
    assert not stages.build(changed, ["eval"])[0].finished(tmp_path, 0)
