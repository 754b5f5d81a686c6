"""Builds our models on Transformer Engine's layers in a process without a GPU, and prints what they
are made of as JSON. Started by test_te.py, with the plain Python part of Transformer Engine on the
path.

The compiled extension is replaced by a module of empty names and no kernel runs: what can be seen
is which layers there are, their parameters, and the keys of a checkpoint.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock


class _Name(type):
    """A class any attribute of which is the number 0: enums of the extension, by name."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class _Extension(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Name(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made


def _members(path: str, name: str) -> list[str]:
    """Names in an enum of Transformer Engine's Python, which asserts that its extension has them
    too."""
    import ast

    tree = ast.parse(open(path, encoding="utf-8").read())  # noqa: SIM115
    (found,) = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    targets = [s.targets[0] for s in found.body if isinstance(s, ast.Assign)]
    return [t.id for t in targets if isinstance(t, ast.Name)]


def install(folder: str) -> None:
    """Make `import transformer_engine.pytorch` work."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # no library is opened
    root = os.path.join(folder, "transformer_engine", "pytorch")
    extension = _Extension("transformer_engine_torch")
    kinds = [m for m in _members(f"{root}/constants.py", "DType") if m.startswith("k")]
    extension.DType = enum.IntEnum("DType", {k: i for i, k in enumerate(kinds)})
    backends = _members(f"{root}/cpp_extensions/fused_attn.py", "FusedAttnBackend")
    extension.NVTE_Fused_Attn_Backend = enum.IntEnum(
        "NVTE_Fused_Attn_Backend", {f"NVTE_{k}": i for i, k in enumerate(backends)}
    )
    sys.modules["transformer_engine_torch"] = extension
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch  # noqa: F401


@contextlib.contextmanager
def constructing() -> Any:
    """Its layers ask for a GPU when they are made, and Megatron-Core for its random state."""
    from megatron.core.tensor_parallel import random

    random.initialize_rng_tracker()
    tracker = type(random.get_cuda_rng_tracker())
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch.object(tracker, "fork", lambda self, name="": contextlib.nullcontext()),
    ):
        yield


def write_as_converted(path: Path, learner: Any) -> None:
    """The checkpoint that `binac convert` would make of the learner's weights."""
    from dataclasses import replace

    import torch

    from megatron_binac.models import export
    from megatron_binac.models.convert import mapping, torch_dist

    model = replace(learner.config.model, vocab_size=learner.vocab_size)
    table = list(mapping.pieces(model))
    theirs = dict(export.hugging_face(learner))
    boxes = [
        torch_dist.Box(
            key=piece.key,
            stack=piece.stack,
            place=piece.place,
            shape=mapping.box(piece, model),
            dtype=torch.bfloat16,
        )
        for piece in table
    ]

    def make(number: int) -> Any:
        piece = table[number]
        return mapping.join(piece, [theirs[name] for name in piece.names], model)

    torch_dist.write(path, boxes, mapping.states(model), make)


def main() -> None:
    warnings.simplefilter("ignore")
    install(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        look(scratch)


def look(scratch: str) -> None:
    from dataclasses import replace

    import torch

    from megatron_binac.config import ModelConfig, MoEConfig, ParallelConfig, RoleConfig
    from megatron_binac.models import builder, checkpoint, cpu, export, precision, te
    from megatron_binac.models.parallel import build_groups, start_distributed
    from megatron_binac.models.spec import block_spec, padded_vocab_size, transformer_config

    start_distributed()
    dense = ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=96, qk_norm=True)
    shapes = {
        "dense": dense,
        "biased": replace(dense, qk_norm=False, qkv_bias=True),
        "experts": replace(dense, moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=32)),
    }
    out: dict[str, Any] = {}
    for name, shape in shapes.items():
        groups = build_groups("actor", ParallelConfig(), 1)
        for layers, spec in (("local", block_spec), ("te", te.block_spec)):
            role = RoleConfig(model=shape, precision="bf16")
            with constructing() if layers == "te" else contextlib.nullcontext(), cpu.region():
                model = builder.PolicyModel(
                    transformer_config(role),
                    spec(2, shape),
                    vocab_size=padded_vocab_size(50),
                    max_sequence_length=64,
                    position_embedding_type="rope",
                    share_embeddings_and_output_weights=False,
                    pg_collection=groups.collection,
                )
            builder.initialize(model, shape, groups, 7)
            learner = types.SimpleNamespace(
                chunks=[model],
                groups=groups,
                optimizer=None,
                config=role,
                vocab_size=50,
            )
            weights = {n: float(t.double().sum()) for n, t in export.hugging_face(learner)}
            if layers == "local":
                write_as_converted(Path(scratch) / name, learner)
            # Every weight turned into something else, so that what comes back was read.
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(0.25)
            with constructing() if layers == "te" else contextlib.nullcontext():
                checkpoint.load_learner(Path(scratch) / name, learner, weights_only=True)
            loaded = {n: float(t.double().sum()) for n, t in export.hugging_face(learner)}
            attention = model.decoder.layers[0].self_attention
            out[f"{name} {layers}"] = {
                "hugging_face": weights,
                "loaded": loaded,
                "keys": sorted(
                    {v.key for k, v in model.sharded_state_dict().items() if "_extra" not in k}
                ),
                "linear": type(attention.linear_qkv).__name__,
                "attention": [k.__name__ for k in type(attention.core_attention).__mro__],
                "parameters": sum(p.numel() for p in model.parameters()),
                "metadata": [n for n, _, _ in export.metadata(learner)],
            }
    recipes = {}
    from megatron.core.fp8_utils import get_fp8_recipe

    for name, recipe in precision.RECIPES.items():
        if recipe.fp8_recipe:
            config = transformer_config(RoleConfig(model=dense, precision=name))
            with mock.patch("torch.cuda.get_device_capability", return_value=(10, 0)):
                recipes[name] = type(get_fp8_recipe(config)).__name__
    print(json.dumps({"models": out, "recipes": recipes, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
