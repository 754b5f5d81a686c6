"""Fixed work is fixed, and what is printed of it was measured or counted."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_ranks import Job

from megatron_binac import cli
from megatron_binac.benchmark import machine, speed, workload
from megatron_binac.benchmark.machine import PeakMemory

TINY = [
    "actor.model.hidden_size=32", "actor.model.ffn_hidden_size=48", "critic.model.hidden_size=32",
    "critic.model.ffn_hidden_size=48", "critic.model.num_layers=2", "rollout.prompts_per_step=4",
    "rollout.attempts=4",
]  # fmt: skip


def test_recorded_lengths_are_there_for_every_workload() -> None:
    for name, (_, _, _) in workload.WORKLOADS.items():
        lengths = workload.recorded_lengths(name)
        assert all(min(pool) >= 1 for pool in lengths.values())
        workload.workload_config(name)
    assert set(workload.recorded_lengths("quickstart")) == {"attempt", "feedback", "revision"}
    # 256 solutions of GSM8K: mean 152 tokens, the longest 419.
    long = workload.recorded_lengths("long")["attempt"]
    assert (len(long), max(long), sum(long)) == (256, 419, 38961)


def test_an_unknown_workload_lists_the_known() -> None:
    with pytest.raises(ValueError, match="quickstart_grpo"):
        workload.workload_config("quick")


def test_a_measured_peak_is_a_rate_that_a_core_can_have() -> None:
    peak = machine.measured_peak_flops("fp32")
    assert peak is not None
    assert 1e8 < peak.flops < 1e14
    assert "1024 x 1024" in peak.how


def test_the_peak_of_a_phase_is_its_own() -> None:
    probe = PeakMemory()
    probe.reset()
    before = probe.read()
    if before is None:
        pytest.skip("this system does not reset the peak of a process (/proc/self/clear_refs)")
    # Not by the allocator, which may have as much lying about from tests before this one.
    block = mmap.mmap(-1, 64 << 20)
    block.write(b"x" * len(block))
    probe.reset()
    while_held = probe.read()
    block.close()
    probe.reset()
    after = probe.read()
    assert while_held is not None
    assert after is not None
    assert while_held - after > 48 << 20


def run(what: str, folder: str, *more: str) -> Any:
    """One rank of a benchmark of a tiny step; what it would print."""
    import argparse

    import torch.distributed as dist

    from megatron_binac.models.parallel import start_distributed

    start_distributed()
    args = argparse.Namespace(
        what=what, workload="quickstart", warmup=0, repeats=2, set=[*TINY, *more], save=False,
        profile=what == "step", trace=Path(folder) / "trace",
    )  # fmt: skip
    config = workload.workload_config("quickstart", args.set)
    result = speed._measure(args, config, Path(folder))
    dist.barrier()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("share", [False, True], ids=["plain", "shared"])
def test_a_step_is_counted_phase_by_phase(tmp_path: Path, share: bool) -> None:
    more = [f"{role}.share_prefixes={str(share).lower()}" for role in ("actor", "critic")]
    (found,) = Job(1, run, "step", str(tmp_path), *more).wait(280.0)
    assert set(found["phases"]) == {"play", "follow", "probe", "lead", "refit"}
    # 4 prompts: 16 attempts of 2 tokens, 2 x 4 x 4 feedbacks as recorded, 128 revisions of 2, and
    # as many probes.
    feedbacks = sum(workload.recorded_lengths("quickstart")["feedback"][:32])
    assert found["tokens"]["generated"] == 16 * 2 + feedbacks + 2 * 128 * 2
    assert found["tokens"]["trained"] == 16 * 2 + 128 * 2 + feedbacks
    assert found["tokens"]["real"] <= found["tokens"]["stored"]
    # What is needed counts every turn and every prompt alone; sharing runs less than that.
    assert found["mfu"] > 0
    for name, phase in found["phases"].items():
        if name != "refit":
            assert (phase["hfu"] < phase["mfu"]) == (share or name in ("play", "probe")), name
    assert sum(found["profile"].values()) == pytest.approx(1.0, abs=0.02)
    json.dumps(found)
    names = {
        event["name"]
        for event in json.loads((tmp_path / "trace" / "trace_rank0.json").read_text())[
            "traceEvents"
        ]
    }
    assert {"play", "follow", "probe", "lead", "refit"} <= names


@pytest.mark.slow
def test_a_pipeline_waits(tmp_path: Path) -> None:
    """What a stage has to wait for is measured, and a phase that is not asked for is not."""
    stages = ["actor.parallel.pp=2", "critic.train=false"]
    for found in Job(2, run, "train", str(tmp_path), *stages).wait(280.0):
        assert found["ranks"] == 2
        assert 0.0 < found["phases"]["follow"]["idle_share"] < 1.0
        assert "play" not in found["phases"]


def test_wrong_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", "--repeats", "0"]) == 2
    assert "--repeats: got '0', expected an integer of 1 or more" in capsys.readouterr().err


def test_energy_is_what_the_packages_count_together(tmp_path: Path) -> None:
    assert machine.energy_joules(tmp_path) is None
    for name, micro in (("intel-rapl:0", 2_500_000), ("intel-rapl:1", 1_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{micro}\n")
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of package 0: not counted twice
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("999999999\n")
    if torch.cuda.is_available():
        pytest.skip("a GPU is asked for its own counter")
    assert machine.energy_joules(tmp_path) == 3.5
