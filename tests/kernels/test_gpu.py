"""The same kernel tests once more, with compiled kernels on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["test_logprob", "test_policy_loss", "test_segment", "test_topk"])
def test_triton_compiled(name: str, run_python: Callable[..., str]) -> None:
    output = run_python(
        *("-m", "pytest", str(HERE / f"{name}.py"), "-q", "-x"),
        BINAC_KERNELS="triton",
        BINAC_TEST_DEVICE="cuda",
    )
    assert " passed" in output


@pytest.mark.gpu
def test_bench_finds_parity_and_prints_speeds(run_python: Callable[..., str]) -> None:
    output = run_python(
        *("-m", "megatron_binac", "bench", "kernels", "--device", "cuda", "--json"),
        *("--tokens", "2048", "--hidden", "1024", "--vocab", "32000"),
    )
    result = json.loads(output.strip().splitlines()[-1])
    assert result["backend"] == "triton"
    assert all(check["passed"] for check in result["parity"])
    assert {row["implementation"] for row in result["rows"]} >= {"megatron_binac", "eager"}
