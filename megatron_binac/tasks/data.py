"""Reading problems: JSONL, JSON, CSV and Parquet files or a name on the Hugging Face hub, by
column.

A task on a fixed set of problems derives from `DataTask`, which holds both splits and keeps them
apart.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import logging
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_binac.tasks.base import parse_verdict
from megatron_binac.types import Prompt, Split

logger = logging.getLogger(__name__)

Row = dict[str, Any]
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?:@([\w.+-]+))?")
_FIND_IN: tuple[Split, ...] = ("eval", "train")
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def read_rows(source: str | Path) -> list[Row]:
    """The rows of a data set as dictionaries, in its own order.

    `source` is a file (.jsonl, .json with a list, .csv, .parquet; the first three also as .gz) or a
    name on the hub as `owner/name:config@split`, which the `datasets` library fetches.
    FileNotFoundError or ValueError where there is no such thing.
    """
    path = Path(source)
    if path.is_file():
        return _read_file(path)
    named = HUB_NAME.fullmatch(str(source))
    if named is None or any(suffix in path.suffixes for suffix in SUFFIXES):
        raise FileNotFoundError(
            f"there is no file {source}; give one that ends in {', '.join(SUFFIXES)}, or a name on "
            "the hub as owner/name:config@split"
        )
    return _read_hub(named[1], named[2], named[3] or "train")


def _read_file(path: Path) -> list[Row]:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix not in SUFFIXES:
        raise ValueError(f"{path} ends in {suffix!r}, expected one of {', '.join(SUFFIXES)}")
    try:
        rows = _READERS[suffix](path)
    except (ValueError, RecursionError, EOFError, OSError, zlib.error, csv.Error) as error:
        # gzip and pyarrow have an error of their own for each damage.
        if isinstance(error, PermissionError | FileNotFoundError):
            raise
        raise ValueError(f"{path} is no {suffix[1:]}: {error}") from error
    for number, row in enumerate(rows if isinstance(rows, list) else [], start=1):
        if not isinstance(row, dict):
            raise ValueError(
                f"{path} must hold a list of objects, one a problem; row {number} is "
                f"{json.dumps(row)[:80]}"
            )
    if not isinstance(rows, list):
        raise ValueError(f"{path} must hold a list of objects, one a problem; one a line is .jsonl")
    return rows


def _text(path: Path) -> str:
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    try:
        # Tables are saved with a byte order mark by some programs.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is no UTF-8 ({error.reason})") from error


def _jsonl(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
            except RecursionError as error:
                raise ValueError(f"line {number}: nested too deeply") from error
    return rows


def _csv(path: Path) -> list[Any]:
    csv.field_size_limit(1 << 27)
    rows = list(csv.DictReader(io.StringIO(_text(path), newline=""), strict=True))
    for number, row in enumerate(rows, start=1):
        if None in row:
            raise ValueError(f"row {number} has more fields than there are columns")
    return rows


_READERS: dict[str, Callable[[Path], Any]] = {
    ".jsonl": _jsonl,
    ".json": lambda path: json.loads(_text(path)),
    ".csv": _csv,
    ".parquet": lambda path: _parquet().read_table(path).to_pylist(),
}


def _parquet() -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(
            "a .parquet file needs the package pyarrow; pip install 'megatron_binac[tasks]'"
        ) from error


def _read_hub(name: str, config: str | None, split: str) -> list[Row]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f"{name} is no file here, and fetching it needs the package datasets; "
            "pip install 'megatron_binac[tasks]' or give a path"
        ) from error
    try:
        return [dict(row) for row in datasets.load_dataset(name, config, split=split)]
    except (OSError, ValueError, ConnectionError) as error:
        raise ValueError(
            f"{name} could not be fetched ({type(error).__name__}: {str(error)[:300]}); "
            "give the path of a file instead"
        ) from error


def take(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first of these columns that a row has; ValueError with the columns that there are."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(
        f"there is no column {' or '.join(map(repr, names))}, only {sorted(map(str, row))}"
    )


def text_of(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """`take` as text, numbers included; ValueError for anything else."""
    value = take(row, names)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{_which(row, names)} is {_short(value)}, expected text")
    return str(value)


def texts_of(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """`take` as a list of texts; ValueError for anything else."""
    value = take(row, names)
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{_which(row, names)} is {_short(value)}, expected a list of texts")
    return list(value)


def _which(row: Mapping[str, Any], names: Sequence[str]) -> str:
    return f"column {next(name for name in names if row.get(name) is not None)!r}"


def _short(value: Any) -> str:
    return repr(value)[:80]


def prompts_of(
    rows: Sequence[Row],
    ids: Sequence[str],
    make: Callable[[str, Row], Prompt],
    *,
    task: str,
    split: Split,
) -> list[Prompt]:
    """A problem for each row; ValueError that names the row where `make` cannot use it."""
    out = []
    for number, (row_id, row) in enumerate(zip(ids, rows, strict=True), start=1):
        try:
            out.append(make(row_id, row))
        except (ValueError, TypeError, LookupError) as error:
            said = str(error) if isinstance(error, ValueError) else repr(error)
            raise ValueError(
                f"task {task}: row {number} (id {row_id}) of split {split!r} is no problem: {said}"
            ) from error
    return out


class DataTask:
    """A task on two fixed lists of problems, of which no one is in both.

    A train problem whose statement is that of an eval problem is dropped and counted, since what is
    tested must not be trained on; `overlap.overlaps` finds the less exact copies.
    """

    right_words: Sequence[str] = ("correct", "right")
    wrong_words: Sequence[str] = (
        "incorrect", "wrong", "not correct", "not right", "isn't correct", "isn't right",
    )  # fmt: skip

    def __init__(self, name: str, read: Callable[[Split], list[Prompt]]) -> None:
        """`read` makes the problems of a split, when they are first asked for."""
        self.name = name
        self._read = read
        self._held: dict[Split, list[Prompt]] = {}
        self._places: dict[str, tuple[Split, int]] = {}
        self.num_dropped = 0
        """Train problems that were eval problems; known once they have been read."""

    def prompts(self, split: Split) -> list[Prompt]:
        """All problems of a split."""
        if split not in self._held:
            found = self._read(split)
            ids = [p.id for p in found]
            if len(set(ids)) < len(ids):
                double = next(i for i in ids if ids.count(i) > 1)
                raise ValueError(
                    f"task {self.name} has the id {double!r} twice in its split {split!r}"
                )
            alike = len(found) - len({_content(self.statement(p)) for p in found})
            if alike:
                logger.warning(
                    "task %s: %d of %d problems in split %r repeat another one; they are kept",
                    self.name,
                    alike,
                    len(found),
                    split,
                )
            self._held[split] = self._not_held_out(found) if split == "train" else found
            self._places |= {p.id: (split, i) for i, p in enumerate(self._held[split])}
        return self._held[split]

    def _not_held_out(self, offered: list[Prompt]) -> list[Prompt]:
        seen = {_content(self.statement(p)) for p in self.prompts("eval")}
        kept = [p for p in offered if _content(self.statement(p)) not in seen]
        self.num_dropped = len(offered) - len(kept)
        if self.num_dropped:
            logger.warning(
                "task %s: %d of %d train problems are eval problems and were dropped",
                self.name,
                self.num_dropped,
                len(offered),
            )
        return kept

    def statement(self, prompt: Prompt) -> str:
        """What makes a problem the same as another; tests and the order of options do not."""
        return prompt.meta.get("statement", prompt.text)

    def size(self, split: Split) -> int | None:
        """Number of problems."""
        return len(self.prompts(split))

    def prompt(self, split: Split, index: int) -> Prompt:
        """Problem `index` of a split; IndexError past its end."""
        found = self.prompts(split)
        if not 0 <= index < len(found):
            raise IndexError(
                f"task {self.name} has {len(found)} problems in {split!r}, got {index}"
            )
        return found[index]

    def find(self, name: str) -> Prompt:
        """A problem by its id, whole (`gsm8k/eval/17`) or as in the data (`17`)."""
        unread = ""
        for split in _FIND_IN:
            try:
                self.prompts(split)
            except (OSError, ValueError, ImportError) as error:
                # An id that the held-out problems lack must not end in a failed download.
                if split == "eval":
                    raise
                unread = f" (its train problems cannot be read: {error})"
                continue
            for known in (name, f"{self.name}/{split}/{name}"):
                if known in self._places:
                    where, place = self._places[known]
                    return self._held[where][place]
        some = [p.id for split in _FIND_IN for p in self._held.get(split, [])[:2]]
        if not some:
            raise ValueError(f"task {self.name} holds no problem at all{unread}")
        raise ValueError(f"task {self.name} has no problem {name!r}; it has {some} ...{unread}")

    def verdict(self, feedback_text: str) -> bool | None:
        """The last "correct" or "incorrect" of the feedback."""
        return parse_verdict(feedback_text, right=self.right_words, wrong=self.wrong_words)


def _content(text: str) -> str:
    return re.sub(r"\s+", "", text).lower()


def unique_ids(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """An id for each row: the first of these columns that tells all rows apart, else the place.

    ValueError where an id is neither text nor an integer.
    """
    for column in columns:
        values = [row.get(column) for row in rows]
        for number, value in enumerate(values, start=1):
            if isinstance(value, bool) or not isinstance(value, str | int | None):
                raise ValueError(
                    f"row {number} has the {column} {value!r}, expected text or an integer"
                )
        ids = ["" if value is None else str(value) for value in values]
        if rows and all(ids) and len(set(ids)) == len(ids):
            return ids
    return [str(place) for place in range(len(rows))]
