"""The same kernel tests once more, with the Triton kernels under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.importorskip("triton", reason="needs the extra kernels")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "name",
    ["test_logprob", "test_policy_loss", "test_segment", "test_topk", "test_vocab_parallel"],
)
def test_triton_interpreted(name: str, run_python: Callable[..., str]) -> None:
    output = run_python(
        *("-m", "pytest", str(HERE / f"{name}.py"), "-q", "-x", "-W", "ignore", "--timeout=2400"),
        timeout=2900,
        BINAC_KERNELS="triton",
        TRITON_INTERPRET="1",
    )
    print(output.strip().splitlines()[-1])
    assert " passed" in output


def test_the_interpreter_is_really_used(run_python: Callable[..., str]) -> None:
    output = run_python(
        "-c",
        "import torch, triton; from megatron_binac import kernels;"
        "from megatron_binac.kernels import triton_logprob as t;"
        "print(type(t._linear_stats_kernel).__name__);"
        "h, w, y = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([0, 6, 2]);"
        "got, _ = kernels.token_logprob(h, w, y);"
        "want = (h @ w.T).log_softmax(-1).gather(1, y[:, None])[:, 0];"
        "assert (got - want).abs().max() < 1e-5, (got, want)",
        BINAC_KERNELS="triton",
        TRITON_INTERPRET="1",
    )
    assert "InterpretedFunction" in output
