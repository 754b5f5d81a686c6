"""Whether the pickles inside a distributed checkpoint are harmless, found out without running them.

`torch_dist` keeps its index (`.metadata`) as a pickle and reads it, and the small objects beside
the tensors, with an unrestricted unpickler: a checkpoint from a stranger could run any program.
Here the index is read first by an unpickler that knows the few classes an index is made of and no
others, and the objects by torch's own `weights_only` reader. Only what passes is given to
Megatron-Core. Tensors are always read by `weights_only`.
"""

from __future__ import annotations

import enum
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

CLASSES: dict[str, frozenset[str]] = {
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.distributed.checkpoint.planner": frozenset(
        {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}
    ),
    "megatron.core.dist_checkpointing.strategies.torch": frozenset(
        {"MCoreMetadata", "MCoreSavePlan"}
    ),
    "collections": frozenset({"OrderedDict"}),
}
"""What an index may be made of, beside plain containers, numbers, strings and dtypes."""


def _member(kind: Any, name: Any) -> enum.Enum:
    """What `getattr` may do here: Python 3.11.0 to 3.11.3 pickle an enum's member by it."""
    if isinstance(kind, enum.EnumMeta) and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it would call builtins.getattr({kind!r}, {name!r})")


class _IndexReader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member
        if global_name in CLASSES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        kind = getattr(torch, global_name, None) if module_name == "torch" else None
        if isinstance(kind, torch.dtype):
            return kind
        raise pickle.UnpicklingError(f"it would call {module_name}.{global_name}")


def check(folder: Path) -> None:
    """Raise ValueError where reading the torch_dist checkpoint in `folder` could run a program.

    Source of the format: torch.distributed.checkpoint, FileSystemReader and DefaultLoadPlanner.
    """
    try:
        index = _IndexReader(io.BytesIO((folder / ".metadata").read_bytes())).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"its index is a {type(index).__name__}")
        for name, stored in index.state_dict_metadata.items():
            if isinstance(stored, BytesStorageMetadata):
                _check_object(folder, name, index)
        common = folder / "common.pt"  # Megatron-Core before 0.18
        if common.exists():
            torch.load(common, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, AttributeError, EOFError, IndexError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        reason = next((line.strip() for line in lines if "unsupported" in line.lower()), lines[0])
        raise ValueError(
            f"{folder} is refused: it is no plain checkpoint of tensors ({reason}). Nothing of it "
            "was run; take a checkpoint that a training run of this project wrote"
        ) from error


def _check_object(folder: Path, name: str, index: Metadata) -> None:
    """Read one small object as `weights_only` allows. Raises UnpicklingError where it does not."""
    for place, info in (index.storage_data or {}).items():
        if place.fqn != name:
            continue
        if Path(info.relative_path).name != info.relative_path:
            raise pickle.UnpicklingError(f"{name} points out of the folder: {info.relative_path}")
        if getattr(info, "transform_descriptors", None):
            raise pickle.UnpicklingError(f"{name} is transformed")
        with open(folder / info.relative_path, "rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
