"""Megatron-Core's `torch_dist` format, written and read one tensor at a time, with no ranks.

Megatron-Core itself writes what is in memory. Here a tensor is made when it is about to be written
and dropped behind it, through the planners of torch's distributed checkpointing, which is what the
format is made of.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_binac.models import pickles

ABOUT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What Megatron-Core reads first in a checkpoint (`metadata.json`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A part of a stacked tensor: `place` on the leading axes, all of the others."""

    key: str
    stack: tuple[int, ...]
    place: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def full(self) -> torch.Size:
        return torch.Size([*self.stack, *self.shape])

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(
            offsets=torch.Size([*self.place, *(0 for _ in self.shape)]),
            sizes=torch.Size([*(1 for _ in self.place), *self.shape]),
        )


def write(
    folder: Path, boxes: Sequence[Box], states: Iterable[str], make: Callable[[int], Tensor]
) -> None:
    """Write a checkpoint of `boxes` to `folder`; `make(i)` is asked for the tensor of box i, in
    order.

    `states` are the names of empty states. Raises ValueError where a tensor is not of its box.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Files(folder, thread_count=1, per_thread_copy_ahead=0)
    planner = _Writes(boxes, list(states), make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process, and torch says so
        dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(ABOUT), encoding="utf-8")


class _Files(dcp.FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        # Neither the path nor a random id: the same weights give the same bytes.
        return StorageMeta()


class _Writes(SavePlanner):
    def __init__(
        self, boxes: Sequence[Box], states: list[str], make: Callable[[int], Tensor]
    ) -> None:
        self.boxes, self.states, self.make = boxes, states, make
        self.numbers = {(box.key, box.chunk.offsets): i for i, box in enumerate(boxes)}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, *args: Any, **kw: Any):
        """There is nothing in memory to plan for."""

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(box.key, box.chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=box.chunk, properties=TensorProperties(dtype=box.dtype), size=box.full
                ),
            )
            for box in self.boxes
        ]
        empty = [
            WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO) for name in self.states
        ]
        return SavePlan([*items, *empty])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        found: dict[str, Any] = {}
        for box in self.boxes:
            entry = found.setdefault(
                box.key,
                TensorStorageMetadata(
                    properties=TensorProperties(dtype=box.dtype), size=box.full, chunks=[]
                ),
            )
            entry.chunks.append(box.chunk)
        found |= {name: BytesStorageMetadata() for name in self.states}
        return all_plans, Metadata(found)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save([None], data)
            return data
        number = self.numbers[write_item.index.fqn, write_item.index.offset]
        box, tensor = self.boxes[number], self.make(number)
        if tuple(tensor.shape) != box.shape or tensor.dtype != box.dtype:
            raise ValueError(
                f"{box.key} {box.place}: got {tuple(tensor.shape)} {tensor.dtype}, expected "
                f"{box.shape} {box.dtype}"
            )
        return tensor[(None,) * len(box.place)].contiguous()


@dataclass(kw_only=True, slots=True)
class Reader:
    """Reads boxes of a checkpoint whose index does not run programs (`pickles.check`)."""

    folder: Path
    metadata: Metadata = field(init=False)
    _storage: dcp.FileSystemReader = field(init=False)

    def __post_init__(self) -> None:
        if not (self.folder / ".metadata").is_file():
            raise FileNotFoundError(f"{self.folder} holds no torch_dist checkpoint (no .metadata)")
        pickles.check(self.folder)
        self._storage = dcp.FileSystemReader(self.folder)
        self.metadata = self._storage.read_metadata()
        self._storage.set_up_storage_reader(self.metadata, is_coordinator=True)

    def size(self, key: str) -> tuple[int, ...]:
        """Shape of a stacked tensor; ValueError where there is none of that name."""
        return tuple(self._entry(key).size)

    def dtype(self, key: str) -> torch.dtype:
        """Of a stacked tensor."""
        return self._entry(key).properties.dtype

    def read(self, box: Box) -> Tensor:
        """The tensor of one box; ValueError where the checkpoint holds another shape."""
        entry = self._entry(box.key)
        if entry.size != box.full:
            raise ValueError(
                f"{self.folder} holds {box.key} as {tuple(entry.size)}, expected {tuple(box.full)}"
            )
        target = torch.empty(tuple(box.chunk.sizes), dtype=box.dtype)
        items = create_read_items_for_chunk_list(box.key, entry, [box.chunk])
        covered = sum(item.lengths.numel() for item in items)
        if covered < target.numel():
            raise ValueError(
                f"{self.folder} holds {covered} of {target.numel()} numbers of {box.key}"
            )
        self._storage.read_data(LoadPlan(items), _Reads(target)).wait()
        return target.view(box.shape)

    def _entry(self, key: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{self.folder} has no tensor {key}; is it of another model?")
        return entry


class _Reads(LoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """The plan is made already."""

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError("the plan is made already")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self.target
        for axis, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(axis, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It was read in place."""
