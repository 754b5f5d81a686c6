"""Number formats: what each asks for, what is refused here and why, and that padding is hidden."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_binac.config import ModelConfig, MoEConfig, ParallelConfig, RoleConfig
from megatron_binac.models import precision, te
from megatron_binac.models.attention import PackedParams
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.models.spec import transformer_config
from megatron_binac.types import TrainSequence

no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="says what a machine without GPUs is told"
)
MODEL = ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=96, max_sequence_length=64)
FAKES = ("apex", "fused_weight_gradient_mlp_cuda")
FP8 = ("fp8_tensorwise", "fp8_blockwise", "mxfp8")


def role(**changes: Any) -> RoleConfig:
    return RoleConfig(model=MODEL, **changes)


@pytest.mark.parametrize(
    ("name", "form", "recipe", "multiple"),
    [
        ("fp8_tensorwise", "hybrid", "tensorwise", 16),
        ("fp8_blockwise", "e4m3", "blockwise", 128),
        ("mxfp8", "e4m3", "mxfp8", 32),
    ],
)
def test_the_fields_of_megatron_core(name: str, form: str, recipe: str, multiple: int) -> None:
    config = transformer_config(role(precision=name, bf16_edge_layers=1))
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == (form, recipe, False)
    assert config.bf16
    assert config.params_dtype == torch.bfloat16
    assert config.first_last_layers_bf16
    assert (config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16) == (1, 1)
    assert precision.token_multiple(role(precision=name)) == multiple
    assert not transformer_config(role(precision=name)).first_last_layers_bf16
    plain = transformer_config(role())
    assert (plain.fp8, plain.bf16, plain.params_dtype) == (None, False, torch.float32)


def test_experts_pad_their_tokens_under_fp8() -> None:
    moe = replace(MODEL, moe=MoEConfig(num_experts=4, ffn_hidden_size=32))
    # Megatron-Core makes a whole config of it only where Transformer Engine is installed.
    assert precision.options(RoleConfig(model=moe, precision="mxfp8"))[
        "moe_router_padding_for_quantization"
    ]
    assert not precision.options(role(precision="mxfp8"))["moe_router_padding_for_quantization"]


@pytest.mark.parametrize(
    ("total", "tp", "name", "stored"),
    [
        (4092, 2, "fp8_tensorwise", 4096),
        (1905, 1, "fp8_tensorwise", 1920),  # not 1912: 16, not 8
        (1905, 2, "fp8_blockwise", 2048),
        (1905, 2, "mxfp8", 1920),
    ],
)
def test_every_rank_holds_a_multiple_after_the_split(
    total: int, tp: int, name: str, stored: int
) -> None:
    """FP8: the multiple holds of each rank's tokens, not of the row's (case 6)."""
    from megatron_binac.packing import Alignment

    multiple = precision.RECIPES[name].token_multiple
    alignment = Alignment.for_layout(
        tensor=tp, sequence_parallel=tp > 1, token_multiple=multiple
    )
    assert alignment.stored(total) == stored
    assert alignment.stored(total) // tp % multiple == 0


def test_the_packing_plan_of_a_role_knows_its_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_distributed()
    made = learner(role())
    assert made.plan(rows())[0].ids_T.numel() == 35
    monkeypatch.setattr(
        "megatron_binac.models.learner.token_multiple", lambda config: 16
    )
    assert learner(role()).plan(rows())[0].ids_T.numel() == 48


@no_gpu
def test_what_cannot_run_here_is_refused_with_the_way_out() -> None:
    for name in FP8:
        with pytest.raises(ValueError, match=f"precision is '{name}', but .*use precision=bf16"):
            precision.choose_layers(role(precision=name))
        assert precision.why_not(name)
    with pytest.raises(ValueError, match=r"require_te is on, but .* set require_te=false"):
        precision.choose_layers(role(require_te=True))
    layers, why = precision.choose_layers(role(precision="bf16"))
    assert layers == "local"
    assert "Transformer Engine" in why
    assert precision.why_not("bf16") is None


@pytest.mark.parametrize(
    ("name", "fits", "fails"),
    [
        ("fp8_tensorwise", [(8, 9), (9, 0), (10, 0), (12, 0)], [(8, 0), (7, 5)]),
        ("fp8_blockwise", [(9, 0)], [(8, 9), (10, 0)]),
        ("mxfp8", [(10, 0), (10, 3)], [(9, 0), (8, 9)]),
    ],
)
def test_which_gpus_have_which_format(name: str, fits: list[Any], fails: list[Any]) -> None:
    for capability in fits:
        assert precision.why_not_on(name, capability) is None
    for capability in fails:
        assert f"sm_{capability[0]}{capability[1]}" in str(precision.why_not_on(name, capability))


def test_layers_are_chosen_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "why_no_te", lambda: None)
    monkeypatch.setattr(precision, "te_version", lambda: (2, 2))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert precision.choose_layers(role(precision="bf16"))[0] == "te"
    assert precision.choose_layers(role(precision="fp8_tensorwise", require_te=True))[0] == "te"
    assert precision.choose_layers(role())[0] == "local"  # no fused attention in fp32
    with pytest.raises(ValueError, match=r"needs Transformer Engine 2\.3, 2\.2 is installed"):
        precision.choose_layers(role(precision="fp8_blockwise"))
    with pytest.raises(ValueError, match="it needs sm_100 or newer, this GPU is sm_90"):
        precision.choose_layers(role(precision="mxfp8"))


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "megatron_binac"):
        for _ in range(3):
            precision.log_choice("a role of this test", "local", "why")
    assert [r.getMessage() for r in caplog.records] == ["a role of this test: local layers (why)"]


def make_apex(root: Path, *folders: str) -> None:
    for folder in ("", *folders):
        (root / "apex" / folder).mkdir(parents=True, exist_ok=True)
        (root / "apex" / folder / "__init__.py").touch()


def test_the_apex_of_the_index_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_apex(tmp_path, "lib", "models")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert precision.apex_kind() == "other"
    with pytest.raises(ImportError, match=r"`apex` is not NVIDIA's.*pip uninstall apex"):
        precision.refuse_wrong_apex()
    assert not any(precision.apex_parts().values())


def test_nvidias_apex_is_asked_for_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_apex(tmp_path, "multi_tensor_apply", "optimizers")
    (tmp_path / "fused_weight_gradient_mlp_cuda.py").write_text("wgrad_gemm_accum_fp32 = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert precision.apex_kind() == "nvidia"
    precision.refuse_wrong_apex()
    try:
        parts = precision.apex_parts()
        fused = transformer_config(role()).gradient_accumulation_fusion
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] in FAKES]:
            del sys.modules[name]
    assert parts["main_grad_fusion"]
    assert fused
    assert not parts["fused_adam"]  # it was built without


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bf16_edge_layers": 1}, "bf16_edge_layers is 1 with precision 'fp32'"),
        ({"precision": "mxfp8", "bf16_edge_layers": 3}, "at most the layers of a stage"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        role(**changes)


def test_sizes_that_fp8_cannot_multiply() -> None:
    with pytest.raises(ValueError, match="ffn_hidden_size / tp is 100, expected a multiple of 16"):
        RoleConfig(model=replace(MODEL, ffn_hidden_size=100), precision="fp8_tensorwise")
    with pytest.raises(ValueError, match=r"ffn_hidden_size / tp is 24"):
        RoleConfig(
            model=replace(MODEL, ffn_hidden_size=48),
            precision="mxfp8",
            parallel=ParallelConfig(tp=2),
        )


# ---- padding -----------------------------------------------------------------------------------


def learner(config: RoleConfig) -> MegatronLearner:
    groups = build_groups("actor", config.parallel, 1)
    return MegatronLearner(
        "actor", config, groups, vocab_size=50, seed=1, num_steps=10, temperature=1.0
    )


def rows() -> list[TrainSequence]:
    rng = np.random.default_rng(1)
    return [
        TrainSequence(
            ids=rng.integers(0, 50, length).astype(np.int32),
            mask=np.arange(length) >= 2,
            advantage=1.0,
            logprobs=None,
        )
        for length in (9, 12, 14)
    ]


def test_padding_is_zero_in_every_linear_layer_and_changes_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_distributed()
    monkeypatch.setattr("megatron_binac.models.learner.token_multiple", lambda config: 16)
    plain, hidden = learner(role()), learner(role())
    te.hide_padding(hidden.chunks[0], 0, sequence_parallel=False)
    seen: dict[str, list[torch.Tensor]] = {"plain": [], "hidden": []}
    for name, made in (("plain", plain), ("hidden", hidden)):
        for layer in made.chunks[0].decoder.layers:
            for linear in (
                layer.self_attention.linear_qkv,
                layer.self_attention.linear_proj,
                layer.mlp.linear_fc1,
                layer.mlp.linear_fc2,
            ):
                linear.register_forward_hook(
                    lambda m, args, out, name=name: seen[name].append(args[0].detach().clone())
                )
    want, got = plain.logprobs(rows()), hidden.logprobs(rows())
    for a, b in zip(want, got, strict=True):
        assert np.array_equal(a, b)
    assert len(seen["hidden"]) == len(seen["plain"]) == 8
    for a, b in zip(seen["plain"], seen["hidden"], strict=True):
        assert len(b) == 48
        assert torch.equal(a[:35], b[:35])
        assert not b[35:].any()
        assert a[35:].any()  # so that it is the hook that does it


class _Embedded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Identity()

    def forward(self, x: torch.Tensor, packed_seq_params: PackedParams) -> torch.Tensor:
        return self.embedding(x)


def test_each_rank_hides_its_own_part_of_the_padding() -> None:
    for rank, kept in ((0, 4), (1, 2)):
        model = _Embedded()
        te.hide_padding(model, rank, sequence_parallel=True)
        packed = PackedParams.of(torch.arange(8), [0, 6, 7, 8], num_real=6)
        out = model(torch.ones(4, 1, 3), packed_seq_params=packed)
        assert out[:, 0, 0].tolist() == [1.0] * kept + [0.0] * (4 - kept)


def test_transformer_engine_gets_the_true_borders() -> None:
    packed = PackedParams.of(torch.arange(10), [0, 4, 9, 10])
    found = te.thd(packed, torch.device("cpu"))
    assert found.qkv_format == "thd"
    assert found.cu_seqlens_q.tolist() == found.cu_seqlens_kv.tolist() == [0, 4, 9, 10]
    assert found.cu_seqlens_q.dtype == torch.int32
    assert (found.max_seqlen_q, found.max_seqlen_kv) == (5, 5)
