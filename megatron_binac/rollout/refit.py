"""New weights for an engine that has its own copy: whole tensors, joined into flat buckets, counted
and hashed on the way.

The sender packs a stream of (Hugging Face name, tensor) into buckets of about equal size; a
receiver takes them apart again without a copy. Both sides add up a checksum of names and bytes, so
that a replica that missed or mixed up anything is found before it answers. What carries a bucket is
the engine's business: a call in the same process, a file, or a GPU's memory.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20
"""Default size of a bucket: large enough that starting a transfer costs nothing."""

ALIGNMENT = 256
"""Bytes; each tensor of a bucket begins at a multiple, as a GPU likes it."""

BLOCK = 1 << 15
"""Words of 64 bits that a checksum adds up at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One tensor of a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """In bytes."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors end to end in one piece of memory."""

    items: tuple[Item, ...]
    flat: Tensor
    """uint8 [bytes]; what lies between two tensors is 0."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) views into the bucket, in order."""
        for item in self.items:
            part = self.flat[item.offset : item.offset + item.num_bytes]
            yield item.name, part.view(getattr(torch, item.dtype)).view(item.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one refit moved."""

    version: int
    checksum: str
    num_tensors: int
    num_bytes: int
    seconds: float

    def row(self) -> dict[str, float]:
        """For the log."""
        return {
            "version": float(self.version),
            "num_bytes": float(self.num_bytes),
            "seconds": self.seconds,
            "gib_per_second": self.num_bytes / 2**30 / max(self.seconds, 1e-9),
        }


class Checksum:
    """A hash of names, shapes and bytes of tensors, whatever their order; the same on every device.

    The bytes of a tensor are summed as 64-bit words with weights that depend on their place, in
    integers that wrap around: exact in any order of addition. It finds accidents, not forgeries.
    """

    def __init__(self) -> None:
        self.num_tensors = 0
        self._sum = 0

    def add(self, name: str, tensor: Tensor) -> None:
        text = f"{name} {tensor.dtype} {tuple(tensor.shape)} {words(tensor)}"
        self._sum += int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")
        self.num_tensors += 1

    def hex(self) -> str:
        return f"{self._sum % (1 << 128):032x}"


def words(tensor: Tensor, *, blocks_at_once: int | None = None) -> int:
    """The weighted sum of a tensor's bytes; see `Checksum`.

    Word i of block b counts W_i * (2 b + 1), modulo 2^64. All weights are odd, so that no change of
    a single word is lost. How many blocks are added at once changes nothing: by default one on a
    CPU, where it stays in the cache, and 256 elsewhere.
    """
    if tensor.numel() == 0:
        return 0
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = len(data) // 8 * 8
    weight = _weights(data.device)
    found, number = torch.zeros((), dtype=torch.int64, device=data.device), 0
    at_once = blocks_at_once or (1 if data.device.type == "cpu" else 256)
    for part in data[:whole].view(torch.int64).split(at_once * BLOCK):
        full = len(part) // BLOCK
        blocks = [part[: full * BLOCK].view(full, BLOCK)] if full else []
        blocks += [part[full * BLOCK :][None]] if len(part) % BLOCK else []
        for rows in blocks:
            sums = (rows * weight[: rows.shape[1]]).sum(1)
            place = torch.arange(number, number + len(rows), device=data.device)
            found += (sums * (2 * place + 1)).sum()
            number += len(rows)
    rest = data[whole:]
    last = int.from_bytes(rest.cpu().numpy().tobytes(), "little") * (2 * number + 1)
    return (int(found) + last * 0x9E3779B97F4A7C15) % (1 << 64)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """W, int64 [BLOCK]."""
    place = torch.arange(BLOCK, device=device, dtype=torch.int64)
    return (place * 0x5851F42D4C957F2D + 0x14057B7EF767814F) | 1


def pack(
    stream: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Join a stream of tensors into buckets of at most `bucket_bytes` (or one tensor that is
    larger)."""
    waiting: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in stream:
        num = -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        if waiting and size + num > bucket_bytes:
            yield _join(waiting, size)
            waiting, size = [], 0
        waiting.append((name, tensor))
        size += num
    if waiting:
        yield _join(waiting, size)


def _join(tensors: Sequence[tuple[str, Tensor]], size: int) -> Bucket:
    flat = torch.zeros(size, dtype=torch.uint8, device=tensors[0][1].device)
    items, offset = [], 0
    for name, tensor in tensors:
        item = Item(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=offset,
        )
        part = flat[offset : offset + item.num_bytes]
        part.copy_(tensor.detach().contiguous().flatten().view(torch.uint8))
        items.append(item)
        offset += -(-item.num_bytes // ALIGNMENT) * ALIGNMENT
    return Bucket(items=tuple(items), flat=flat)


def send(
    stream: Iterable[tuple[str, Tensor]],
    deliver: Callable[[Bucket], None],
    *,
    version: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> Report:
    """Pack a stream and hand over each bucket; what was moved and how long it took."""
    start = time.perf_counter()
    checksum, num_bytes = Checksum(), 0
    for bucket in pack(stream, bucket_bytes):
        for name, tensor in bucket.tensors():
            checksum.add(name, tensor)
        num_bytes += sum(item.num_bytes for item in bucket.items)
        deliver(bucket)
    return Report(
        version=version,
        checksum=checksum.hex(),
        num_tensors=checksum.num_tensors,
        num_bytes=num_bytes,
        seconds=time.perf_counter() - start,
    )


def log_first(report: Report, device: torch.device) -> None:
    """Say what a refit moves, beside a plain copy of the same bytes; for an engine's first one."""
    plain = copy_seconds(report.num_bytes, device)
    logger.info(
        f"refit: {report.num_tensors} tensors, {report.num_bytes / 2**20:.1f} MiB in "
        f"{report.seconds:.3f} s ({report.num_bytes / 2**30 / max(report.seconds, 1e-9):.2f} "
        f"GiB/s); a plain copy of as many bytes takes {plain:.3f} s"
    )


def copy_seconds(num_bytes: int, device: torch.device) -> float:
    """Seconds that a plain copy of so many bytes takes on a device: what a refit is measured
    against."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # the first touch of fresh memory is not what is asked for
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    target.copy_(source)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


# ---- by files, which every machine and every engine can read -----------------------------------


class Folder:
    """Buckets as safetensors files on a disk that sender and receivers see.

    A version is written to a folder with another name, which is renamed when all of it is there;
    the ones before it are dropped then.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(
        self,
        stream: Iterable[tuple[str, Tensor]],
        *,
        version: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> Report:
        """Write one version; ImportError names the extra where safetensors is missing."""
        save_file = _safetensors().save_file
        target = self.path(version)
        draft = target.with_name(f".{target.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        names: list[str] = []

        def deliver(bucket: Bucket) -> None:
            names.append(f"bucket_{len(names):05d}.safetensors")
            save_file(
                {name: tensor.cpu().clone() for name, tensor in bucket.tensors()},
                str(draft / names[-1]),
            )

        report = send(stream, deliver, version=version, bucket_bytes=bucket_bytes)
        facts = {"version": version, "checksum": report.checksum, "files": names}
        (draft / "refit.json").write_text(json.dumps(facts), encoding="ascii")
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        for old in self.root.glob("version_*"):
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
        return report

    def path(self, version: int) -> Path:
        return self.root / f"version_{version:08d}"


def read_folder(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of one version, file by file."""
    load_file = _safetensors().load_file
    facts = json.loads((path / "refit.json").read_text(encoding="ascii"))
    for name in facts["files"]:
        yield from load_file(str(path / name)).items()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "weights are handed to an engine in files of the package safetensors, which is not "
            "installed; pip install 'megatron_binac[vllm]'"
        ) from error
    return safetensors.torch
