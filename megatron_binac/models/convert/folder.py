"""What `binac convert` writes: weights under any layout, a description, and the model's small
files.

    model.json      the shape, the family, which file held which tensor
    weights/        Megatron-Core's torch_dist
    hugging_face/   config, generation config, tokenizer, chat template, licence: as they were
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_binac import config as configs
from megatron_binac.config import ModelConfig

DESCRIPTION = "model.json"
WEIGHTS = "weights"
BESIDE = "hugging_face"
FORMAT = 1
FREE = ("max_sequence_length", "init_std", "weights")
"""Fields of a model that weights do not decide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What is known of a converted model beside its weights."""

    family: str
    model: ModelConfig
    files: dict[str, list[str]]
    """Tensors of each safetensors file it came from, in order."""
    metadata: dict[str, str]
    """What those files said of themselves."""
    totals: dict[str, Any]
    """What their index said of all of them."""

    def write(self, folder: Path) -> None:
        """As JSON."""
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2)
        (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def is_converted(folder: Path) -> bool:
    """Whether a folder is one that `binac convert` wrote."""
    return (folder / DESCRIPTION).is_file() and (folder / WEIGHTS).is_dir()


def describe(folder: Path) -> Description:
    """Read the description; ValueError where it is of another format."""
    tree: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    if tree.pop("format", None) != FORMAT:
        raise ValueError(f"{folder / DESCRIPTION} is of another format; convert the model again")
    tree["model"] = configs.model_from_json(json.dumps(tree["model"]))
    return Description(**tree)


def copy_small_files(source: Path, target: Path) -> None:
    """Everything but the weights, for a run that starts from them."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / DESCRIPTION, target / DESCRIPTION)
    shutil.copytree(source / BESIDE, target / BESIDE, dirs_exist_ok=True)


def check_shape(role: str, wanted: ModelConfig, source: str, found: ModelConfig) -> None:
    """Raise ValueError, with the settings that fit, where weights are of another shape."""
    names = [f.name for f in dataclasses.fields(ModelConfig) if f.name not in FREE]
    wrong = [n for n in names if _value(wanted, n) != _value(found, n)]
    if wrong:
        asked = ", ".join(f"{n} {getattr(wanted, n)}" for n in wrong)
        fits = " ".join(
            f"--set {role}.model.{n}={json.dumps(configs.plain(getattr(found, n)))}" for n in wrong
        )
        raise ValueError(
            f"{role}.model has {asked}, but the weights of {source} are of another shape; use "
            f"{fits}"
        )
    if wanted.max_sequence_length > found.max_sequence_length:
        raise ValueError(
            f"{role}.model.max_sequence_length is {wanted.max_sequence_length}, expected at most "
            f"{found.max_sequence_length}: {source} was made for no longer texts; lower it"
        )


def _value(model: ModelConfig, name: str) -> Any:
    return model.head_width if name == "head_dim" else getattr(model, name)
