"""Reading and writing model folders piece by piece: what is refused, what is padded, what it costs.

No `transformers` here: folders are made by hand.
"""

from __future__ import annotations

import dataclasses
import json
import math
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_ranks import run_ranks

from megatron_binac import recipes, run_folder
from megatron_binac.config import ModelConfig, MoEConfig, RopeScaling
from megatron_binac.models.convert import command, families, folder, hugging_face, mapping
from megatron_binac.models.convert import torch_dist as dist_format
from megatron_binac.models.rope import attention_scale, inverse_frequencies

pytest.importorskip("safetensors", reason="needs the extra `hf`")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 130,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
PLAIN = ModelConfig(
    num_layers=2, hidden_size=16, ffn_hidden_size=24, vocab_size=130, max_sequence_length=2048
)
SHAPES = {
    "dense": PLAIN,
    "biases and norms": dataclasses.replace(PLAIN, qkv_bias=True, qk_norm=True, head_dim=6),
    "tied": dataclasses.replace(PLAIN, tied_head=True),
    "experts": dataclasses.replace(PLAIN, moe=MoEConfig(num_experts=3, top_k=2, ffn_hidden_size=8)),
}


def random_tensors(model: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for piece in mapping.pieces(model)
        for name, shape in zip(piece.names, mapping.shapes(piece, model), strict=True)
    }


def make_folder(
    path: Path, config: dict[str, Any], tensors: dict[str, Any], num_files: int = 1
) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    size = math.ceil(len(names) / num_files)
    parts = [names[i : i + size] for i in range(0, len(names), size)]
    files = {f"model-{i}.safetensors": part for i, part in enumerate(parts)}
    if num_files == 1:
        files = {hugging_face.SINGLE: names}
    for file, part in files.items():
        hugging_face.save_file(path / file, {n: tensors[n] for n in part}, {"format": "pt"})
    hugging_face.write_index(path, files, {})
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_join_and_split_are_each_others_inverse(name: str) -> None:
    model = SHAPES[name]
    tensors = random_tensors(model)
    for piece in mapping.pieces(model):
        parts = [tensors[n] for n in piece.names]
        whole = mapping.join(piece, parts, model)
        assert tuple(whole.shape) == mapping.box(piece, model)
        for back, part in zip(mapping.split(piece, whole, model), parts, strict=True):
            assert torch.equal(back, part), piece


def test_heads_that_share_a_key_lie_together() -> None:
    # 4 queries and 2 keys of width 1: q0 q1 k0 v0, q2 q3 k1 v1.
    model = ModelConfig(hidden_size=4, num_attention_heads=4, head_dim=2, vocab_size=8)
    piece = next(p for p in mapping.pieces(model) if p.kind == "qkv")
    q, k, v = torch.arange(8.0)[:, None], torch.arange(10.0, 14)[:, None], torch.arange(20.0, 24)
    joined = mapping.join(piece, [q, k, v[:, None]], model).flatten().tolist()
    assert joined == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]


def test_the_vocabulary_is_padded_with_zeros_and_stripped(tmp_path: Path) -> None:
    """What goes out has the real rows alone (case 32)."""
    tensors = random_tensors(PLAIN, torch.bfloat16)
    source = make_folder(tmp_path / "a", LLAMA, tensors)
    command.convert(str(source), tmp_path / "b")
    reader = dist_format.Reader(folder=tmp_path / "b" / folder.WEIGHTS)
    box = dist_format.Box(
        key="output_layer.weight", stack=(), place=(), shape=(256, 16), dtype=torch.bfloat16
    )
    rows = reader.read(box)
    assert torch.equal(rows[:130], tensors["lm_head.weight"])
    assert not rows[130:].any()
    command.convert(str(tmp_path / "b"), tmp_path / "c", dtype="fp32")
    back = hugging_face.HuggingFaceFolder(folder=tmp_path / "c")
    assert back.names() == set(tensors)
    assert torch.equal(back.read("lm_head.weight"), tensors["lm_head.weight"].float())
    assert back.config["torch_dtype"] == "float32"


def test_the_same_weights_give_the_same_bytes(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "a", LLAMA, random_tensors(PLAIN), num_files=3)
    for name in ("b", "c"):
        command.convert(str(source), tmp_path / name)
    for path in sorted((tmp_path / "b" / folder.WEIGHTS).iterdir()):
        twin = tmp_path / "c" / folder.WEIGHTS / path.name
        assert path.read_bytes() == twin.read_bytes(), path.name


def test_a_run_is_exported_by_role(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints" / "step_000004").mkdir(parents=True)
    base = recipes.get("quickstart")
    assert base.critic is not None
    critic = dataclasses.replace(
        base.critic, model=dataclasses.replace(PLAIN, max_sequence_length=40)
    )
    run_folder.write_config(run_dir, dataclasses.replace(base, critic=critic))
    tensors = random_tensors(critic.model)
    table = list(mapping.pieces(critic.model))
    boxes = [
        dist_format.Box(
            key=p.key,
            stack=p.stack,
            place=p.place,
            shape=mapping.box(p, critic.model),
            dtype=torch.float32,
        )
        for p in table
    ]
    checkpoint = run_dir / "checkpoints" / "step_000004"
    dist_format.write(
        checkpoint / "critic",
        boxes,
        mapping.states(critic.model),
        lambda i: mapping.join(table[i], [tensors[n] for n in table[i].names], critic.model),
    )
    (checkpoint / "state.json").write_text("{}")
    for source, target in ((run_dir, tmp_path / "a"), (checkpoint, tmp_path / "b")):
        command.convert(str(source), target, role="critic", shard_bytes=4000)
        back = hugging_face.HuggingFaceFolder(folder=target)
        assert len(back.files) > 2
        assert back.names() == set(tensors)
        assert all(torch.equal(back.read(n), tensors[n]) for n in tensors)
        assert families.of_config(back.config).read(back.config) == dataclasses.replace(
            critic.model, weights=None
        )


def convert_and_measure(source: Path, target: Path) -> int:
    """Bytes by which the peak of this process's memory grew over both directions."""
    torch.set_num_threads(1)
    command.convert(
        str(make_folder(source.with_name("tiny"), LLAMA, random_tensors(PLAIN))), target
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    command.convert(str(source), target.with_name("ours"))
    command.convert(str(target.with_name("ours")), target.with_name("back"))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.slow
def test_memory_holds_about_one_file(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 24}
    config = {**LLAMA, **sizes, "vocab_size": 1000}
    model = families.of_config(config).read(config)
    source = make_folder(tmp_path / "large", config, random_tensors(model), num_files=16)
    files = [p.stat().st_size for p in source.glob("*.safetensors")]
    assert sum(files) > 200e6
    grown = run_ranks(1, convert_and_measure, source, tmp_path / "target")[0]
    # One file mapped and one written, of 16; the whole model would be sixteen.
    assert grown < 4 * max(files), (grown, files)
    for path in source.glob("*.safetensors"):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "model_type is 'gemma2' .*soft caps.*expected one of llama"),
        ({"model_type": "bert"}, "model_type is 'bert', expected one of"),
        ({"attention_bias": True}, "attention_bias True, expected False"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "relu"}, "hidden_act 'relu', expected one of silu"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE scaling 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
            r"mlp_only_layers \[0\], expected \[\] or None",
        ),
        ({"model_type": "gemma", "hidden_activation": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_the_layers_do_not_have_is_refused(change: dict[str, Any], message: str) -> None:
    config = {**LLAMA, **change}
    with pytest.raises(ValueError, match=message):
        families.of_config(config).read(config)


def test_configs_of_old_and_new_spelling_read_alike() -> None:
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {
        **LLAMA,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
    }
    models = [families.of_config(c).read(c) for c in (old, new)]
    assert models[0] == models[1]
    assert models[0].rope_theta == 5e5
    assert models[0].rope_scaling is not None and models[0].rope_scaling.factor == 4.0


def test_windows_bound_the_sequences() -> None:
    long = {**LLAMA, "max_position_embeddings": 32768}
    lengths = {
        (kind, *given.values()): families.of_config(c).read(c).max_sequence_length
        for kind, given in (
            ("mistral", {"sliding_window": 4096}),
            ("mistral", {"sliding_window": None}),
            ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}),
            ("qwen2", {"sliding_window": 4096, "use_sliding_window": True}),
        )
        if (c := {**long, "model_type": kind, **given})
    }
    assert list(lengths.values()) == [4096, 32768, 32768, 4096]


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_config_that_is_written_reads_back(name: str) -> None:
    family = families.FAMILIES[name]
    parts = {k: v for k, v in family.parts.items() if v != "any"}
    if family.parts.get("moe") == "any":
        parts["moe"] = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8, renormalize=True)
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_positions=512)
    model = dataclasses.replace(PLAIN, rope_scaling=scaling, **parts)
    assert family.holds(model)
    assert family.read(json.loads(json.dumps(family.config(model, "bfloat16")))) == model
    if name != "mistral":  # it has the same parts as Llama, which comes first
        assert families.of_model(model) is family


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN)
    some = {n: t for n, t in tensors.items() if "q_proj" not in n}
    cases = [
        (some, r"missing .*layers.0.self_attn.q_proj.weight.* \(2 in all\)"),
        ({**tensors, "model.extra": torch.zeros(2)}, r"unknown \['model.extra'\]"),
        ({**tensors, "model.norm.weight": torch.zeros(17)}, r"\(17,\), expected \(16,\)"),
        (
            {**tensors, "model.norm.weight": torch.zeros(16, dtype=torch.int8)},
            "as I8, expected one of .*quantised weights cannot be trained",
        ),
    ]
    for number, (given, message) in enumerate(cases):
        source = make_folder(tmp_path / str(number), LLAMA, given)
        with pytest.raises(ValueError, match=message):
            command.convert(str(source), tmp_path / "target")
    # Old folders hold the rotary frequencies, and some hold a tied head twice.
    given = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    source = make_folder(tmp_path / "old", {**LLAMA, "tie_word_embeddings": True}, given)
    command.convert(str(source), tmp_path / "target")
    assert sorted(p.name for p in (tmp_path / "target").iterdir()) == [
        "hugging_face",
        "model.json",
        "weights",
    ]
    with pytest.raises(FileExistsError, match="is there already"):
        command.convert(str(source), tmp_path / "target")


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no .*absent.*nothing is fetched"):
        command.convert(str(tmp_path / "absent"), tmp_path / "t")
    with pytest.raises(ValueError, match="package no_such_package is not installed; pip install"):
        command.convert("package:no_such_package", tmp_path / "t")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        command.convert(str(tmp_path / "empty"), tmp_path / "t")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="a pickle, which could run any program"):
        command.convert(str(tmp_path / "empty"), tmp_path / "t")
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        command.convert(str(tmp_path / "empty"), tmp_path / "t")
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (tmp_path / "empty" / hugging_face.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names files elsewhere"):
        command.convert(str(tmp_path / "empty"), tmp_path / "t")
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]


def test_a_run_of_another_shape_is_told_what_fits() -> None:
    found = dataclasses.replace(PLAIN, qkv_bias=True, rope_theta=1e6)
    with pytest.raises(ValueError, match=r"--set actor.model.rope_theta=1000000.0 .*qkv_bias=true"):
        folder.check_shape("actor", PLAIN, "qwen", found)
    short = dataclasses.replace(PLAIN, max_sequence_length=4096)
    with pytest.raises(ValueError, match="max_sequence_length is 4096, expected at most 2048"):
        folder.check_shape("actor", short, "qwen", PLAIN)
    folder.check_shape("actor", dataclasses.replace(PLAIN, head_dim=4, init_std=1.0), "x", PLAIN)


def test_rope_scaling_by_hand() -> None:
    model = ModelConfig(hidden_size=16, num_attention_heads=4, num_query_groups=2)
    plain = [1.0, 0.01]  # theta 10000, width 4
    assert inverse_frequencies(model).tolist() == pytest.approx(plain)
    linear = dataclasses.replace(model, rope_scaling=RopeScaling(kind="linear", factor=4.0))
    assert inverse_frequencies(linear).tolist() == pytest.approx([0.25, 0.0025])
    # Within 16 positions the pairs turn 2.546 and 0.0255 times: between 1 and 4, and below 1.
    llama3 = RopeScaling(kind="llama3", factor=4.0, original_max_positions=16)
    keep = (16 / (2 * math.pi) - 1) / 3
    want = [keep + (1 - keep) / 4, 0.0025]
    found = inverse_frequencies(dataclasses.replace(model, rope_scaling=llama3))
    assert found.tolist() == pytest.approx(want)
    yarn = dataclasses.replace(model, rope_scaling=RopeScaling(kind="yarn", factor=math.e))
    assert attention_scale(yarn) == pytest.approx(1.1**2 / 2)
    assert attention_scale(llama := dataclasses.replace(model, rope_scaling=llama3)) is None
    assert llama.head_width == 4
