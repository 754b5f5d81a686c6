"""`binac convert`: a model of the outside becomes a checkpoint of ours, or the other way round.

Both directions read and write tensor by tensor in the order of the files, so that memory holds
about one file at a time. What is written goes to a draft beside the target, which is renamed when
all of it is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron_binac import run_folder
from megatron_binac.config import ModelConfig
from megatron_binac.models.convert import families, folder, gguf, hugging_face, mapping, torch_dist
from megatron_binac.models.convert.folder import Description
from megatron_binac.models.convert.hugging_face import HuggingFaceFolder
from megatron_binac.models.convert.mapping import Piece
from megatron_binac.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PACKAGE = "package:"
PRETRAINED = "pretrained"
"""Folder of a run that keeps the small files of the models that it started from, by role."""
DERIVED = "rotary_emb.inv_freq"
"""Ends the names of tensors that old folders hold and that follow from the config."""


class Source(Protocol):
    """Named tensors with a Hugging Face config."""

    config: dict[str, Any]
    files: dict[str, list[str]]
    metadata: dict[str, str]
    totals: dict[str, Any]

    def names(self) -> set[str]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def file_of(self, name: str) -> str: ...
    def read(self, name: str) -> Tensor: ...
    def beside(self) -> Any: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What was converted."""

    target: Path
    direction: Literal["to megatron", "to hugging face"]
    family: str
    num_tensors: int
    num_bytes: int
    seconds: float


def convert(
    source: str,
    target: Path,
    *,
    role: str = "actor",
    dtype: str | None = None,
    shard_bytes: int = 5_000_000_000,
) -> Summary:
    """Convert `source` to the new folder `target`; what `source` is decides the direction.

    A Hugging Face folder, a .gguf file and `package:NAME` become a folder of ours. Such a folder, a
    run (its newest checkpoint of `role`) and one checkpoint of a run become a Hugging Face folder.
    `dtype` None keeps what is stored. Raises ValueError for what cannot be read, FileExistsError
    where the target is there.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is there already; give a new folder")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    wanted = None if dtype is None else DTYPES[dtype]
    path = Path(source)
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    start = time.perf_counter()
    try:
        if folder.is_converted(path):
            weights, small = path / folder.WEIGHTS, path
            done = _to_hugging_face(
                weights, folder.describe(path), small, draft, wanted, shard_bytes
            )
        elif _run_of(path) is not None:
            weights, description, small = _trained(path, role)
            done = _to_hugging_face(weights, description, small, draft, wanted, shard_bytes)
        else:
            done = _to_megatron(open_source(source), draft, wanted)
        if target.exists():
            target.rmdir()
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return replace(done, target=target, seconds=time.perf_counter() - start)


def open_source(source: str) -> Source:
    """A Hugging Face folder, a .gguf file, or `package:NAME`."""
    path = Path(source)
    if source.startswith(PACKAGE):
        return gguf.GgufFile(path=gguf.in_package(source.removeprefix(PACKAGE)))
    if not path.exists():
        raise FileNotFoundError(
            f"there is no {source}; expected a folder with config.json and safetensors, a .gguf "
            f"file, or {PACKAGE}NAME of an installed package (nothing is fetched from a hub)"
        )
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{source} is a file, expected a model's folder or a .gguf file")
        return gguf.GgufFile(path=path)
    return HuggingFaceFolder(folder=path)


def prepare(source: str, cache: Path) -> Path:
    """The folder of ours for what a config calls `weights`, converted into `cache` once.

    Called by one rank; another job that wants the same waits. Raises as `convert` does.
    """
    path = Path(source)
    if folder.is_converted(path):
        return path
    opened = open_source(source)
    opened.close()
    where = gguf.in_package(source.removeprefix(PACKAGE)) if PACKAGE in source else path
    name = f"{where.stem}-{_fingerprint(where)}"
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / name
    with open(cache / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            logger.info("converting the weights of %s into %s, once", source, target)
            convert(source, target)
    return target


def _fingerprint(path: Path) -> str:
    """Changes with any file of a model: names, sizes and times, since weights are long."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    facts = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    text = json.dumps([str(path.resolve()), folder.FORMAT, facts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _to_megatron(source: Source, draft: Path, dtype: torch.dtype | None) -> Summary:
    family = families.of_config(source.config)
    model = family.read(source.config)
    table = list(mapping.pieces(model))
    _check_names(source, table, model)
    order = {name: i for names in source.files.values() for i, name in enumerate(names)}
    table.sort(key=lambda p: (source.file_of(p.names[0]), order[p.names[0]]))
    boxes = [_box(p, model, dtype or _one_dtype(source, p)) for p in table]

    def make(number: int) -> Tensor:
        piece = table[number]
        parts = [source.read(name).to(boxes[number].dtype) for name in piece.names]
        return mapping.join(piece, parts, model)

    torch_dist.write(draft / folder.WEIGHTS, boxes, mapping.states(model), make)
    (draft / folder.BESIDE).mkdir()
    for name, data in source.beside():
        (draft / folder.BESIDE / name).write_bytes(data)
    source.close()
    known = {name for piece in table for name in piece.names}
    files = {
        file: kept
        for file, names in source.files.items()
        if (kept := [n for n in names if n in known])
    }
    Description(
        family=family.model_type,
        model=model,
        files=files,
        metadata=source.metadata,
        totals=source.totals,
    ).write(draft)
    return _summary("to megatron", family.model_type, boxes)


def _to_hugging_face(
    weights: Path,
    description: Description,
    small: Path,
    draft: Path,
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> Summary:
    model = description.model
    reader = torch_dist.Reader(folder=weights)
    table = list(mapping.pieces(model))
    boxes = [_box(p, model, reader.dtype(p.key)) for p in table]
    where = {name: (i, j) for i, p in enumerate(table) for j, name in enumerate(p.names)}
    files = description.files
    if {name for names in files.values() for name in names} != set(where):
        sizes = [
            (name, torch.Size(shape).numel() * (dtype or box.dtype).itemsize)
            for p, box in zip(table, boxes, strict=True)
            for name, shape in zip(p.names, mapping.shapes(p, model), strict=True)
        ]
        files = hugging_face.shard(sizes, shard_bytes)
    total = 0
    stored: set[torch.dtype] = set()
    for file, names in files.items():
        tensors = _read_file(names, where, table, boxes, reader, model, dtype)
        total += sum(t.numel() * t.itemsize for t in tensors.values())
        stored |= {t.dtype for t in tensors.values()}
        metadata = description.metadata or {"format": "pt"}
        hugging_face.save_file(draft / file, tensors, metadata)
    hugging_face.write_index(draft, files, {**description.totals, "total_size": total})
    if (small / folder.BESIDE).is_dir():
        for path in sorted((small / folder.BESIDE).iterdir()):
            shutil.copy(path, draft / path.name)
    common = hugging_face.NAMES[max(stored, key=lambda d: d.itemsize)]
    _write_config(draft, description, common, changed=dtype is not None)
    done = _summary("to hugging face", description.family, boxes)
    return replace(done, num_tensors=len(where), num_bytes=total)


def _read_file(
    names: Sequence[str],
    where: Mapping[str, tuple[int, int]],
    table: Sequence[Piece],
    boxes: Sequence[torch_dist.Box],
    reader: torch_dist.Reader,
    model: ModelConfig,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """The tensors of one output file; a piece that makes several of them is read once."""
    tensors: dict[str, Tensor] = {}
    for number in dict.fromkeys(where[name][0] for name in names):
        parts = mapping.split(table[number], reader.read(boxes[number]), model)
        for name, part in zip(table[number].names, parts, strict=True):
            if name in names:
                # Memory of its own: parts of one tensor share theirs.
                tensors[name] = part.to(dtype or part.dtype).clone(
                    memory_format=torch.contiguous_format
                )
    return tensors


def _write_config(draft: Path, description: Description, dtype: str, *, changed: bool) -> None:
    """config.json: the one that was carried along, with the dtype that is stored now."""
    path = draft / hugging_face.CONFIG
    if not path.is_file():
        family = families.FAMILIES[description.family]
        config = family.config(description.model, dtype)
    else:
        config = json.loads(path.read_text(encoding="utf-8"))
        key = "dtype" if "dtype" in config else "torch_dtype"
        if config.get(key) == dtype or (key not in config and not changed):
            return
        config[key] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_names(source: Source, table: Sequence[Piece], model: ModelConfig) -> None:
    """Raise ValueError where tensors are missing, unknown, or of another shape."""
    wanted = {
        name: shape
        for piece in table
        for name, shape in zip(piece.names, mapping.shapes(piece, model), strict=True)
    }
    there = {name for name in source.names() if not name.endswith(DERIVED)}
    if model.tied_head:
        there.discard(mapping.HEAD)  # some folders hold the tied head twice
    missing, unknown = sorted(wanted.keys() - there), sorted(there - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"the weights do not fit config.json: missing {missing[:4]} ({len(missing)} in all), "
            f"unknown {unknown[:4]} ({len(unknown)} in all)"
        )
    for name, shape in wanted.items():
        if source.shape(name) != shape:
            raise ValueError(f"{name} is {source.shape(name)}, expected {shape} after config.json")


def _one_dtype(source: Source, piece: Piece) -> torch.dtype:
    found = {source.dtype(name) for name in piece.names}
    if len(found) > 1:
        raise ValueError(f"{piece.names} are stored as {sorted(map(str, found))}; give a dtype")
    return found.pop()


def _box(piece: Piece, model: ModelConfig, dtype: torch.dtype) -> torch_dist.Box:
    return torch_dist.Box(
        key=piece.key,
        stack=piece.stack,
        place=piece.place,
        shape=mapping.box(piece, model),
        dtype=dtype,
    )


def _summary(
    direction: Literal["to megatron", "to hugging face"], family: str, boxes: Sequence[Any]
) -> Summary:
    total = sum(torch.Size(b.shape).numel() * b.dtype.itemsize for b in boxes)
    return Summary(
        target=Path(),
        direction=direction,
        family=family,
        num_tensors=len(boxes),
        num_bytes=total,
        seconds=0.0,
    )


def _run_of(path: Path) -> Path | None:
    """The run folder that a path is or lies in as a checkpoint; None where it is neither."""
    if (path / "checkpoints").is_dir():
        return path
    return path.parent.parent if (path / "state.json").is_file() else None


def _trained(path: Path, role: str) -> tuple[Path, Description, Path]:
    """Weights, description and small files of one role of a run, or of one of its checkpoints."""
    run_dir = _run_of(path)
    assert run_dir is not None
    config = run_folder.load_config(run_dir)
    role_config = getattr(config, role, None)
    if role_config is None:
        raise ValueError(f"{run_dir} has no {role}")
    checkpoint = path if path != run_dir else run_folder.latest_checkpoint(run_dir)
    if checkpoint is None:
        raise ValueError(f"{run_dir} has no checkpoint yet")
    small = run_dir / PRETRAINED / role
    model = role_config.model
    if (small / folder.DESCRIPTION).is_file():
        description = folder.describe(small)
        description = replace(description, model=replace(model, weights=None))
    else:
        if model.vocab_size is None:
            tokenizer = load_tokenizer(run_dir / "tokenizer" / "tokenizer.model")
            model = replace(model, vocab_size=tokenizer.vocab_size)
        description = Description(
            family=families.of_model(model).model_type,
            model=model,
            files={},
            metadata={},
            totals={},
        )
    return checkpoint / role, description, small
