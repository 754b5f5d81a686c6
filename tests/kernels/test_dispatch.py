"""The one rule that chooses between the reference and Triton."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch

from megatron_binac import kernels


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("BINAC_KERNELS", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    kernels._choose.cache_clear()
    return monkeypatch


def hide_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "triton" else found(name, *a)
    )
    kernels._choose.cache_clear()


def test_auto_takes_the_reference_on_a_cpu_even_where_triton_is(
    environment: pytest.MonkeyPatch,
) -> None:
    assert kernels.choose_backend("cpu") == "reference"
    environment.setenv("TRITON_INTERPRET", "1")
    assert kernels.choose_backend("cpu") == "reference"


def test_auto_takes_triton_on_a_gpu_where_it_is_installed(environment: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs the extra kernels")
    assert kernels.choose_backend("cuda") == "triton"
    environment.setenv("BINAC_KERNELS", "reference")
    assert kernels.choose_backend("cuda") == "reference"


def test_auto_without_triton_is_the_reference(environment: pytest.MonkeyPatch) -> None:
    hide_triton(environment)
    assert kernels.choose_backend("cuda") == "reference"


def test_triton_that_is_not_installed_names_the_extra(environment: pytest.MonkeyPatch) -> None:
    hide_triton(environment)
    environment.setenv("BINAC_KERNELS", "triton")
    with pytest.raises(ValueError, match=r"megatron-binac\[kernels\]"):
        kernels.choose_backend("cuda")


def test_triton_on_a_cpu_is_for_the_interpreter_only(environment: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs the extra kernels")
    environment.setenv("BINAC_KERNELS", "triton")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        kernels.choose_backend("cpu")
    environment.setenv("TRITON_INTERPRET", "1")
    assert kernels.choose_backend("cpu") == "triton"


def test_unknown_setting_is_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("BINAC_KERNELS", "fast")
    with pytest.raises(ValueError, match="auto, reference or triton, got 'fast'"):
        kernels.choose_backend("cpu")


def test_the_choice_is_logged_once(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="megatron_binac.kernels"):
        for _ in range(3):
            kernels.token_logprob(torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1).long())
    assert [record.message for record in caplog.records] == [
        "kernels: reference on cpu (BINAC_KERNELS=auto)"
    ]


def test_float64_is_always_the_reference(environment: pytest.MonkeyPatch) -> None:
    # It is there to check with; this would raise (no interpreter) if Triton were taken.
    environment.setenv("BINAC_KERNELS", "triton")
    hidden = torch.zeros(1, 2, dtype=torch.float64)
    logprob, _ = kernels.token_logprob(
        hidden, torch.zeros(3, 2, dtype=torch.float64), torch.zeros(1).long()
    )
    assert logprob.dtype == torch.float64


def test_importing_the_kernels_imports_no_triton(run_python) -> None:
    run_python(
        "-c",
        "import sys, megatron_binac.kernels as k, torch;"
        "k.token_logprob(torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1).long());"
        "sys.exit('triton' in sys.modules)",
    )
