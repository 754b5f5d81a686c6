"""A Hugging Face model folder: config, safetensors files with their index, and what lies beside
them.

One file is open at a time, and its pages are given back when the next one is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")
"""What is carried along: tokenizer, generation config, chat template, vocabulary, licence."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def open_file(path: Path) -> Any:
    """A safetensors file; ImportError that names the extra where the package is missing."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "Hugging Face weights need the package safetensors; pip install 'megatron_binac[hf]'"
        ) from error
    return safe_open(str(path), framework="pt")


@dataclass(kw_only=True, slots=True)
class HuggingFaceFolder:
    """A source of named tensors. Raises ValueError where the folder holds no safetensors."""

    folder: Path
    config: dict[str, Any] = field(init=False)
    files: dict[str, list[str]] = field(init=False)
    """Tensors of each file, in the order in which they lie there."""
    metadata: dict[str, str] = field(init=False)
    """What the files say of themselves."""
    totals: dict[str, Any] = field(init=False)
    """What the index says of all files together."""
    _dtypes: dict[str, torch.dtype] = field(init=False, default_factory=dict)
    _shapes: dict[str, tuple[int, ...]] = field(init=False, default_factory=dict)
    _open: tuple[str, Any] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not (self.folder / CONFIG).is_file():
            raise FileNotFoundError(f"{self.folder} has no {CONFIG}; expected a model folder")
        self.config = json.loads((self.folder / CONFIG).read_text(encoding="utf-8"))
        self.files, self.metadata, self.totals = {}, {}, {}
        for name in self._file_names():
            path = self.folder / name
            if not path.is_file():
                raise FileNotFoundError(f"{self.folder / INDEX} names {name}, which is not there")
            header = _header(path)
            self.metadata |= header.pop("__metadata__", {})
            order = sorted(header, key=lambda n: header[n]["data_offsets"][0])
            self.files[name] = order
            for tensor, entry in header.items():
                if entry["dtype"] not in DTYPES:
                    raise ValueError(
                        f"{path} holds {tensor} as {entry['dtype']}, expected one of "
                        f"{', '.join(DTYPES)}: quantised weights cannot be trained; give the "
                        "folder of the model before it was quantised"
                    )
                self._dtypes[tensor] = DTYPES[entry["dtype"]]
                self._shapes[tensor] = tuple(entry["shape"])

    def _file_names(self) -> list[str]:
        if (self.folder / INDEX).is_file():
            index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
            self.totals = dict(index.get("metadata") or {})
            names = sorted(set(index["weight_map"].values()))
            bad = [name for name in names if Path(name).name != name]
            if bad:
                raise ValueError(f"{self.folder / INDEX} names files elsewhere: {bad}")
            return names
        if (self.folder / SINGLE).is_file():
            return [SINGLE]
        pickled = sorted(p.name for p in self.folder.glob("*.bin"))
        if pickled:
            raise ValueError(
                f"{self.folder} holds {pickled[0]}, a pickle, which could run any program; save "
                "the model as safetensors first"
            )
        raise FileNotFoundError(f"{self.folder} holds neither {SINGLE} nor {INDEX}")

    def names(self) -> set[str]:
        """Every tensor."""
        return set(self._dtypes)

    def dtype(self, name: str) -> torch.dtype:
        """As it is stored."""
        return self._dtypes[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """As it is stored."""
        return self._shapes[name]

    def file_of(self, name: str) -> str:
        """The file that holds a tensor."""
        return next(file for file, tensors in self.files.items() if name in tensors)

    def read(self, name: str) -> Tensor:
        """One tensor; the file is kept open for the next one."""
        file = self.file_of(name)
        if self._open is None or self._open[0] != file:
            self._open = None  # its pages go before others come
            self._open = (file, open_file(self.folder / file))
        return self._open[1].get_tensor(name)

    def beside(self) -> Iterator[tuple[str, bytes]]:
        """Files that are carried along, by name; never weights, links or folders."""
        found = {p for pattern in BESIDE for p in self.folder.glob(pattern)}
        for path in sorted(found):
            if path.name != INDEX and path.is_file():
                yield path.name, path.read_bytes()

    def close(self) -> None:
        """Let go of the open file."""
        self._open = None


def _header(path: Path) -> dict[str, Any]:
    """The table of a safetensors file: 8 bytes of length, then JSON."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(path.stat().st_size, 100_000_000):
            raise ValueError(f"{path} is not a safetensors file (a header of {length} bytes)")
        try:
            return json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error


def save_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write one safetensors file."""
    try:
        from safetensors.torch import save_file as save
    except ImportError as error:
        raise ImportError(
            "Hugging Face weights need the package safetensors; pip install 'megatron_binac[hf]'"
        ) from error
    save(dict(tensors), str(path), metadata=dict(metadata))
    path.chmod(0o644)  # the library lets nobody else read it


def write_index(
    folder: Path, files: Mapping[str, Sequence[str]], totals: Mapping[str, Any]
) -> None:
    """The table of which file holds which tensor; none for a single file of the usual name."""
    if list(files) == [SINGLE]:
        return
    where = {name: file for file, names in files.items() for name in names}
    index = {"metadata": dict(totals), "weight_map": where}
    text = json.dumps(index, indent=2, sort_keys=True)
    (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def shard(sizes: Sequence[tuple[str, int]], limit: int) -> dict[str, list[str]]:
    """Files for tensors of these bytes, in order, none above `limit` unless one tensor is."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes:
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    total = len(groups)
    return {f"model-{i:05d}-of-{total:05d}.safetensors": g for i, g in enumerate(groups, 1)}
