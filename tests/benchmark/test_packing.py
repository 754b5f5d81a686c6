"""The packing benchmark: its baseline by hand, its laws, and that it prints nothing unmeasured."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_binac.benchmark import packing as bench

SMALL = ["--dp", "1", "4", "--capacity", "4096", "8192", "--law", "bimodal", "heavy-tail"]


def test_first_fit_by_hand() -> None:
    """Descending 7 5 4 3 3 2 into bins of 8: 7 | 5 3 | 4 3 | 2 fits in none of the three."""
    lengths = np.array([3, 7, 4, 2, 5, 3])
    assert bench.first_fit(lengths, 8).tolist() == [1, 0, 2, 3, 1, 2]


@pytest.mark.parametrize("law", bench.LAWS)
def test_laws_are_seeded_and_stay_within_the_capacity(law: str) -> None:
    lengths = bench.draw_lengths(law, 2000, 4096)
    assert np.array_equal(lengths, bench.draw_lengths(law, 2000, 4096))
    assert not np.array_equal(lengths, bench.draw_lengths(law, 2000, 4096, seed=1))
    assert 1 <= lengths.min() < 400
    assert 3000 < lengths.max() <= 4096


def test_every_cell_is_measured_and_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--num-sequences", "50", "200", *SMALL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["rows"]
    assert len(rows) == 16
    for row in rows:
        lengths = bench.draw_lengths(row["law"], row["num_sequences"], row["capacity"])
        assert row["lower_bound"] >= -(-lengths.sum() // row["capacity"])
        assert row["lower_bound"] <= row["num_bins"] <= row["first_fit_bins"] + row["dp_size"]
        assert row["num_microbatches"] % row["dp_size"] == 0
        assert row["fill"] + row["padding"] == pytest.approx(1.0)
        assert row["rank_balance"] >= 1.0
        assert row["reference_cpu_seconds"] > row["cpu_seconds"] > 0
        assert row["sequences_per_second"] == row["num_sequences"] / row["cpu_seconds"]
    assert len(report["growth"]) == 8
    assert all((g["from"], g["to"]) == (50, 200) for g in report["growth"])


def test_what_was_not_measured_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--num-sequences", "50", "60", *SMALL, "--baseline-limit", "50"]
    assert bench.main([*argv, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    measured = [
        (r["law"], r["capacity"], r["dp_size"])
        for r in rows
        if r["num_sequences"] == 60 and r["reference_speedup"] is not None
    ]
    assert measured == [("bimodal", 8192, 4)]
    assert all(r["reference_speedup"] for r in rows if r["num_sequences"] == 50)
    assert bench.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.count("n/m") == 6 for line in lines) == 7
    assert any("n/m: not measured" in line for line in lines)
