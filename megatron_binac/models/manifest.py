"""What a checkpoint consists of, and whether all of it is still what was written.

`manifest.json` names every other file of the folder with its size and SHA-256, and ends with the
hash of its own body, so that a byte flipped in any file, this one included, is found before
anything is read into a model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NAME = "manifest.json"
BLOCK = 4 << 20
"""Bytes that are read at a time."""

Digest = tuple[int, str]
"""(bytes, SHA-256 in hex) of a file."""


def digest(path: Path, *, flush: bool = False) -> Digest:
    """Size and hash of a file; with `flush` it is on the disk afterwards and not only on its
    way."""
    found, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            found.update(block)
            size += len(block)
        if flush:
            os.fsync(file.fileno())
    return size, found.hexdigest()


def files(folder: Path) -> list[str]:
    """Every file below `folder` but the manifest, by its relative name, sorted."""
    paths = (p for p in folder.rglob("*") if p.is_file())
    return sorted(name for p in paths if (name := p.relative_to(folder).as_posix()) != NAME)


def write(folder: Path, digests: Mapping[str, Digest], facts: Mapping[str, Any]) -> None:
    """Write the manifest of `folder`, flushed to the disk, and flush the folders themselves."""
    listed = {name: list(digests[name]) for name in files(folder)}
    body = {"facts": dict(facts), "files": listed}
    with open(folder / NAME, "w", encoding="ascii") as file:
        file.write(_text(body))
        file.flush()
        os.fsync(file.fileno())
    for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        flush_folder(path)


def flush_folder(path: Path) -> None:
    """Put the names in a folder on the disk: a rename that is not survives no power cut."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read(folder: Path) -> dict[str, Any]:
    """{"facts": ..., "files": {name: [bytes, SHA-256]}}; ValueError, in one line, where it is
    missing or not whole."""
    path = folder / NAME
    try:
        text = path.read_bytes().decode("ascii")
        body = json.loads(text)["body"]
        whole = text == _text(body) and all(len(d) == 2 for d in body["files"].values())
    except FileNotFoundError:
        raise ValueError(f"{NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{NAME} is not what was written")
    return body


def damage(folder: Path, names: Iterable[str], listed: Mapping[str, Any]) -> str | None:
    """The first of these files that is not what was written, in one line; None where all are."""
    for name in names:
        size, found = listed[name]
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if digest(path)[1] != found:
            return f"{name} has other bytes than were written (SHA-256 differs)"
    return None


def _text(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True)
    own = hashlib.sha256(text.encode("ascii")).hexdigest()
    return json.dumps({"body": body, "sha256": own}, sort_keys=True) + "\n"
