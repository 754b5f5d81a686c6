"""Kernels compiled for GPUs that are not here: registers, spills, matrix instructions, memory."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the extra kernels")

from megatron_binac import kernels  # noqa: E402
from megatron_binac.benchmark import kernels as bench  # noqa: E402

MATRIX_INSTRUCTION = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma"}
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
PRODUCTS = ("linear_stats bf16", "linear_dlogits bf16", "accumulate bf16")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "sm_100"])
def test_every_launch_compiles_without_spills(arch: str, run_python: Callable[..., str]) -> None:
    output = run_python(
        *("-m", "megatron_binac", "bench", "kernels", "--compile-only", "--arch", arch, "--json"),
        timeout=2900,
    )
    rows = json.loads(output.strip().splitlines()[-1])["rows"]
    bench.print_compiled(rows)
    names = [row["name"] for row in rows]
    for kernel in (*PRODUCTS, "merge", "logits_stats", "logits_grad", "bucket_divergence"):
        assert any(name.startswith(kernel) for name in names), kernel
    for kernel in ("policy_loss", "group", "tree", "spread", "gae"):
        assert any(name.startswith(kernel) for name in names), kernel
    for row in rows:
        assert row["arch"] == arch
        assert row["spill_store_bytes"] == row["spill_load_bytes"] == 0, row
        assert 16 <= row["registers"] <= 255, row
        assert row["shared_bytes"] <= SHARED_BYTES[arch], row
        is_product = row["name"].startswith(PRODUCTS)
        assert (row["matrix_instruction"] == MATRIX_INSTRUCTION[arch]) == is_product, row


def test_a_bad_tile_is_told_from_a_good_one(run_python: Callable[..., str]) -> None:
    # 256 x 256 accumulators do not fit in the registers of eight warps: the check must see it.
    output = run_python(
        "-c",
        "import torch; from megatron_binac.kernels import offline, triton_logprob as t;"
        "from megatron_binac.kernels.tile import Tile;"
        "t.LINEAR[2] = Tile(blocks={'BT': 256, 'BV': 256, 'BH': 32}, num_warps=8, num_stages=2);"
        "ctx = offline.recording(t); launches = ctx.__enter__();"
        "offline._launch_logprob(1024, 4096, 512, torch.bfloat16, False, True);"
        "ctx.__exit__(None, None, None);"
        "stats = next(x for x in launches if x.name.startswith('linear_stats'));"
        "print('spilled', offline.compile_launch(stats, 'sm_90').spill_store_bytes)",
    )
    assert int(output.split("spilled")[1]) > 0


def test_compile_needs_a_process_that_does_not_interpret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert bench.main(["--compile-only"]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_a_launch_is_specialised_as_triton_does() -> None:
    from megatron_binac.kernels import offline, triton_segment

    with offline.recording(triton_segment) as launches:
        for num_tokens in (64, 64, 63):
            token = torch.empty(num_tokens, device="meta")
            triton_segment.group_advantage(token, token.long(), token.bool(), "leave_one_out")
    assert len(launches) == 2  # the second is the same as the first
    even, odd = launches
    types = dict(even.types)
    assert types["reward_ptr"] == "*fp32" and types["group_ptr"] == "*i64"
    assert types["N"] == "i32" and types["BI"] == "constexpr"
    assert "N" in even.divisible and "N" not in odd.divisible
    assert even.name == "group fp32 leave_one_out"
    assert isinstance(triton_segment._group_kernel, triton.JITFunction)  # put back


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_memory_of_the_fused_path_by_count(
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    peak_extra_bytes: Callable[..., int],
) -> None:
    """All tensors that the GPU path makes at T = 8192, H = 4096, V = 128k, on meta tensors: at most
    2 % of the logits in the dtype of the inputs."""
    from megatron_binac.kernels import offline, triton_logprob

    monkeypatch.setenv("BINAC_KERNELS", "triton")
    num_tokens, num_columns, width = 8192, 131072, 4096
    hidden = torch.empty(num_tokens, width, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(num_columns, width, dtype=dtype, device="meta", requires_grad=True)
    weight.main_grad = torch.empty(num_columns, width, device="meta")
    labels = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    hidden_bytes = hidden.numel() * hidden.element_size()

    def step() -> None:
        logprob, _ = kernels.token_logprob(hidden, weight, labels, accumulate_into_main_grad=True)
        logprob.sum().backward()

    with offline.recording(triton_logprob):
        peak = peak_extra_bytes(step, hidden, weight, weight.main_grad, labels)
    extra = peak - hidden_bytes  # the gradient of hidden is a result
    logits = num_tokens * num_columns * hidden.element_size()
    print(f"extra {extra / 2**20:.1f} MiB, {extra / logits:.2%} of the logits")
    assert 0 < extra <= 0.02 * logits
