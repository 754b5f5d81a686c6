"""`binac plan` as it is called: models by file, layouts that are kept to, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_binac import cli, recipes
from megatron_binac.planner import shapes

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "num_hidden_layers": 32, "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "rope_theta": 5e5,
}  # fmt: skip


def plan(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert cli.main(["plan", "quickstart", *argv]) == code
    streams = capsys.readouterr()
    return streams.out + streams.err


def test_a_model_by_file_is_the_model_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    by_name = plan(capsys, "--gpus", "16", "--model", "llama3:8b")
    for path in (tmp_path, tmp_path / "config.json"):
        assert plan(capsys, "--gpus", "16", "--model", str(path)) == by_name
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "mamba"}))
    said = plan(capsys, "--gpus", "16", "--model", str(tmp_path), code=2)
    assert "is no config of a model that is known: model_type is 'mamba'" in said


def test_only_the_layouts_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--gpus", "16", "--model", "llama3:8b", "--json", "--layout", "actor tp4 pp2 ")
    (found,) = json.loads(plan(capsys, *asked, "--layout", "colocated"))
    assert found["best"]
    names: list[str] = [row["layout"] for row in found["best"]]
    assert all("actor tp4 pp2 " in name and "colocated" in name for name in names)
    (free,) = json.loads(plan(capsys, *asked[:5]))
    assert found["tried"] < free["tried"]
    assert free["best"][0]["step_seconds"] <= found["best"][0]["step_seconds"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--layout", "actor tp9"), "no layout has 'actor tp9' in its name"),
        (("--set", "actor.parallel.tp=2"), "keep to some layouts with --layout"),
        (("--model", "nosuch"), "files and folders with a config.json"),
        (("--set", "actor.precision=fp32"), "counts in bf16"),
        (("--prompt-tokens", "9999"), "the answers leave"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], argv: Any, said: str) -> None:
    assert said in plan(capsys, "--gpus", "8", *argv, code=2)


def test_every_recipe_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    for name in recipes.RECIPES:
        assert cli.main(["plan", name, "--gpus", "8,4,8"]) == 0, name
        said = capsys.readouterr().out
        assert [line.split()[0] for line in said.splitlines()[1:3]] == ["4", "8"], name


def test_what_does_not_fit_gets_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, "--gpus", "8,16", "--model", "llama3:70b", code=1)
    assert said.count("no layout fits") == 2
    assert "twice the GPUs" not in said


def test_a_micro_batch_holds_a_whole_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    long = [f"{role}.model.max_sequence_length=10000" for role in ("actor", "critic")]
    flags = [part for text in long for part in ("--set", text)]
    (found,) = json.loads(plan(capsys, "--gpus", "8", "--model", "llama3:1b", "--json", *flags))
    sizes = {row["layout"].rpartition(" ")[2] for row in found["best"]}
    assert sizes <= {"10,000", "16,384"}


def test_a_critic_that_is_only_evaluated_takes_memory(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "quickstart_grpo", "--gpus", "8", "--model", "llama3:8b", "--json"]
    asked += ["--layout", "actor tp2 pp2 engine tp2"]
    found = []
    for critic in ("llama3:8b", "llama3:1b"):
        assert cli.main([*asked, "--critic-model", critic]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        found.append(row["best"][0]["bytes"]["weights"])
    big, small = (shapes.named(name).num_parameters for name in ("llama3:8b", "llama3:1b"))
    assert found[0] - found[1] == big * 2 // 4 - small * 2 // 4
