"""`binac bench refit`: what it counts is what was moved, and stale weights are no measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers_ranks import run_ranks

from megatron_binac.benchmark import refit, workload
from megatron_binac.models.parallel import start_distributed

SETS = [
    "actor.model.num_layers=2", "actor.model.hidden_size=32", "actor.model.ffn_hidden_size=48",
    "actor.model.num_attention_heads=4", "actor.model.num_query_groups=2",
    "actor.model.vocab_size=100",
]  # fmt: skip
NUM_WEIGHTS = 2 * 100 * 32 + 32 + 2 * (2 * 32 + 32 * 32 * 3 + 3 * 32 * 48)
"""Embedding and head without padded rows; two layers of norms, attention of 4 heads of 8 and 2 keys
and values, and feed-forward."""


def run(layout: str, folder: Path) -> Any:
    """One rank of a benchmark of a tiny model."""
    start_distributed()
    config = workload.workload_config("quickstart", [*SETS, f"actor.parallel.{layout}"])
    result = refit.measure(config, folder, 2)
    dist.barrier()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "tp=1"])
def test_bytes_versions_and_checksums_of_every_layout(layout: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, run, layout, tmp_path)
    assert first["num_bytes"] == 4 * NUM_WEIGHTS
    assert first["num_tensors"] == 3 + 2 * 9
    assert len(set(first["checksums"])) == 3  # weights move before every refit
    assert first["checksums"] == second["checksums"]
    assert {"plain copy", "whole tensors alone", "refit in memory"} <= set(first["rows"])
    assert first["rows"]["plain copy"]["times_a_plain_copy"] == 1.0
    assert all(row["seconds"] > 0 for row in first["rows"].values())
    json.dumps(first)


def test_a_replica_that_took_other_weights_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = refit.Replica.load

    def forgetful(self: refit.Replica, pairs: Any) -> None:
        load(self, list(pairs)[1:])

    monkeypatch.setattr(refit.Replica, "load", forgetful)
    start_distributed()
    with pytest.raises(RuntimeError, match="do not hold what was sent"):
        refit.measure(workload.workload_config("quickstart", SETS), tmp_path, 1)
