"""No pickle of a checkpoint from a stranger is run: what it would have done has not happened."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_binac.config import ModelConfig, ParallelConfig, RoleConfig
from megatron_binac.models import checkpoint, pickles
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups, start_distributed


class Hostile:
    """Makes a folder where it is unpickled without care."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def learner() -> MegatronLearner:
    config = RoleConfig(model=ModelConfig(num_layers=1, hidden_size=32, ffn_hidden_size=48))
    groups = build_groups("actor", ParallelConfig(), 1)
    return MegatronLearner(
        "actor", config, groups, vocab_size=50, seed=1, num_steps=1, temperature=1.0
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    start_distributed()
    path = tmp_path_factory.mktemp("saved") / "role"
    checkpoint.save_learner(path, learner())
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "role")
    return tmp_path / "role"


def refused(folder: Path, mark: Path, reason: str) -> None:
    with pytest.raises(ValueError, match="is refused") as caught:
        checkpoint.load_learner(folder, learner())
    assert reason in str(caught.value)
    assert not mark.exists()


def test_the_mark_is_left_by_a_careless_reader(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Hostile(tmp_path / "mark")))
    assert (tmp_path / "mark").is_dir()


def test_our_own_checkpoints_pass(folder: Path) -> None:
    pickles.check(folder)
    checkpoint.load_learner(folder, learner())


@pytest.mark.parametrize("inside", [False, True])
def test_an_index_that_calls_something_is_refused(
    folder: Path, tmp_path: Path, inside: bool
) -> None:
    mark = tmp_path / "mark"
    payload: Any = Hostile(mark)
    if inside:  # deep in a real one
        index = pickle.loads((folder / ".metadata").read_bytes())
        index.planner_data = [payload]
        payload = index
    (folder / ".metadata").write_bytes(pickle.dumps(payload))
    refused(folder, mark, "it would call posix.mkdir")


class ByName:
    """Pickled as the call of `getattr` with these two arguments."""

    def __init__(self, kind: Any, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> Any:
        return getattr, (self.kind, self.name)


def test_members_of_enums_may_be_looked_up_by_name(folder: Path) -> None:
    """As Python 3.11.0 to 3.11.3 write them."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    plain = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    index.planner_data = [ByName(plain, "TORCH_CONTIGUOUS_FORMAT")]
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    pickles.check(folder)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(torch.Size, "mro"), (pickles.Metadata, "__init__"), (pickles.BytesStorageMetadata, "x")],
)
def test_no_other_attribute_may_be_looked_up(
    folder: Path, tmp_path: Path, kind: Any, name: str
) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.planner_data = [ByName(kind, name)]
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    refused(folder, tmp_path / "mark", "it would call builtins.getattr(")


def test_an_enum_has_no_other_attribute_either(folder: Path, tmp_path: Path) -> None:
    plain = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.planner_data = [ByName(plain, "__class__")]
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    refused(folder, tmp_path / "mark", "it would call builtins.getattr(")


def test_an_index_that_is_none_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"harmless": 1}))
    refused(folder, tmp_path / "mark", "its index is a dict")


def test_a_small_object_that_calls_something_is_refused(folder: Path, tmp_path: Path) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    name = next(
        n for n, m in index.state_dict_metadata.items() if isinstance(m, BytesStorageMetadata)
    )
    (place,) = (p for p in index.storage_data if p.fqn == name)
    info = index.storage_data[place]
    blob = io.BytesIO()
    torch.save(Hostile(tmp_path / "mark"), blob)
    with open(folder / info.relative_path, "ab") as file:
        info.offset, info.length = file.tell(), len(blob.getvalue())
        file.write(blob.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    refused(folder, tmp_path / "mark", "mkdir")


def test_a_small_object_outside_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    for place, info in index.storage_data.items():
        if isinstance(index.state_dict_metadata[place.fqn], BytesStorageMetadata):
            info.relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    refused(folder, tmp_path / "mark", "points out of the folder: ../elsewhere")


def test_common_state_that_calls_something_is_refused(folder: Path, tmp_path: Path) -> None:
    torch.save({"lr": Hostile(tmp_path / "mark")}, folder / "common.pt")
    refused(folder, tmp_path / "mark", "mkdir")
