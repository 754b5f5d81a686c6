"""The kernel bench: floors by hand, and no speed without parity."""

from __future__ import annotations

import json
import math

import pytest
import torch

from megatron_binac import kernels
from megatron_binac.benchmark import kernels as bench

SMALL = ["--tokens", "64", "--hidden", "16", "--vocab", "300", "--repeats", "1"]


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BINAC_KERNELS", "reference")


def test_floor_by_hand() -> None:
    floors = {
        f.kernel: f for f in bench.roofline(bench.Size(num_tokens=8192, hidden=4096, vocab=131072))
    }
    forward = floors["linear log-prob: forward"]
    assert forward.flops == 2 * 8192 * 4096 * 131072
    assert forward.num_bytes == 2 * (8192 * 4096 + 131072 * 4096) + 16 * 8192
    # 8.8 TFLOP at 989.4 TFLOP/s; a gigabyte of weights takes 0.34 ms and hides behind it.
    assert forward.floor_us["H100 SXM"] == pytest.approx(8890.5, abs=0.5)
    assert forward.floor_us["H200 SXM"] == forward.floor_us["H100 SXM"]
    # Reading 2 GiB of logits: 641 us at 3.35 TB/s, 447 us at 4.8 TB/s.
    given = floors["log-prob of given logits: forward"]
    assert given.floor_us["H100 SXM"] == pytest.approx(641.0, abs=0.5)
    assert given.floor_us["H200 SXM"] == pytest.approx(447.4, abs=0.5)


def test_speeds_after_parity(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--device", "cpu", "--json", *SMALL]) == 0
    result = json.loads(capsys.readouterr().out)
    assert all(check["passed"] for check in result["parity"])
    assert {row["task"] for row in result["rows"]} >= {
        "linear log-prob, forward + backward",
        "policy loss, forward + backward",
        "GAE",
        "group advantage",
    }
    assert all(row["milliseconds"] > 0 for row in result["rows"])


@pytest.mark.parametrize("as_json", [False, True])
def test_no_speed_without_parity(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = kernels.token_logprob

    def wrong(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprob, entropy = right(*args, **kwargs)  # type: ignore[arg-type]
        return logprob * 1.001, entropy

    monkeypatch.setattr(kernels, "token_logprob", wrong)
    monkeypatch.setattr(bench, "measure_all", lambda *a: pytest.fail("measured after a failure"))
    assert bench.main(["--device", "cpu", *SMALL, *(["--json"] if as_json else [])]) == 1
    out = capsys.readouterr().out
    if as_json:
        result = json.loads(out)
        assert "rows" not in result
        assert [c["check"] for c in result["parity"] if not c["passed"]]
    else:
        assert "FAILED" in out and "no speed" in out and "TFLOP/s" not in out


def test_nan_is_not_parity() -> None:
    assert not bench.Parity(check="x", error=math.nan, tolerance=1.0).passed


def test_without_a_gpu_the_floor_is_printed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 0
    out = capsys.readouterr().out
    assert "H100 SXM us" in out and "nothing was measured" in out
    assert bench.main(["--device", "cuda"]) == 2
