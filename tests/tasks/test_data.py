"""Reading data sets, and tasks on them."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from megatron_binac.tasks.base import Cursor
from megatron_binac.tasks.data import DataTask, read_rows, take, text_of, texts_of, unique_ids
from megatron_binac.types import Prompt, Split

ROWS = [{"a": 1, "b": "x"}, {"a": 2, "b": "y\nz"}]


def test_files_of_every_kind(tmp_path: Path) -> None:
    lines = "\n".join(map(json.dumps, ROWS)) + "\n\n"
    (tmp_path / "d.jsonl").write_text(lines)
    (tmp_path / "d.json").write_text(json.dumps(ROWS))
    (tmp_path / "d.csv").write_text('a,b\n1,x\n2,"y\nz"\n')
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write(lines)
    for name in ("d.jsonl", "d.json", "d.jsonl.gz"):
        assert read_rows(tmp_path / name) == ROWS
    assert read_rows(tmp_path / "d.csv") == [{"a": "1", "b": "x"}, {"a": "2", "b": "y\nz"}]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra tasks)")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    assert read_rows(tmp_path / "d.parquet") == ROWS


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.parquet").write_bytes(b"")
    for name in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pyarrow; pip install 'megatron_binac\[tasks\]'"):
        read_rows(tmp_path / "d.parquet")
    with pytest.raises(ImportError, match=r"datasets; pip install 'megatron_binac\[tasks\]'"):
        read_rows("owner/name:main@test")


BAD = [
    ("d.jsonl", "{'a': 1}", "is no jsonl"),
    ("d.json", '{"a": 1}', "must hold a list of objects"),
    ("d.jsonl", "1", "must hold a list of objects"),
    ("d.jsonl", '{"a": 1}\n{"a": \n', r"d\.jsonl is no jsonl: line 2, column \d+: Expecting value"),
    ("d.jsonl", '{"a": 1}\n' + "[" * 100_000, "d.jsonl is no jsonl: line 2: nested too deeply"),
    ("d.json", "[" * 100_000, "d.json is no json: "),
    ("d.jsonl", '{"a": 1}\n[2]\n', r"one a problem; row 2 is \[2\]"),
    ("d.csv", "a,b\n1,2\n3,4,5\n", "d.csv is no csv: row 2 has more fields than there are columns"),
    ("d.csv", 'a,b\n1,"2\n', "d.csv is no csv: unexpected end of data"),
    ("d.jsonl.gz", '{"a": 1}\n', "d.jsonl.gz is no jsonl: Not a gzipped file"),
    ("d.txt", "", "ends in '.txt'"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_bad_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / name)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"a": "x"}\n{"a": "\xff"}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl is no jsonl: line 2 is no UTF-8"):
        read_rows(tmp_path / "d.jsonl")
    whole = gzip.compress(b'{"a": "x"}\n' * 99)
    for name, data in (("cut", whole[:-20]), ("odd", whole[:12] + b"\0\0\0" + whole[15:])):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name}\.jsonl\.gz is no jsonl: "):
            read_rows(tmp_path / f"{name}.jsonl.gz")


def test_a_mark_of_byte_order_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes(b"\xef\xbb\xbfa,b\r\n1,x\r\n")
    assert read_rows(tmp_path / "d.csv") == [{"a": "1", "b": "x"}]


def test_texts() -> None:
    row = {"a": "x", "n": 2, "f": 0.5, "l": ["x", "y"], "o": {"k": 1}, "b": True, "m": [1]}
    assert [text_of(row, (name,)) for name in "anf"] == ["x", "2", "0.5"]
    assert texts_of(row, ("none", "l")) == ["x", "y"]
    for name in "lob":
        with pytest.raises(ValueError, match=f"column '{name}' is .*, expected text"):
            text_of(row, (name,))
    for name in "anom":
        with pytest.raises(ValueError, match=f"column '{name}' is .*, expected a list of texts"):
            texts_of(row, ("none", name))


def test_a_missing_file_is_no_name_on_the_hub() -> None:
    for name in ("nowhere.jsonl", "folder/nowhere.jsonl", "/a/b/c.json"):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            read_rows(name)


def test_columns() -> None:
    assert take({"x": None, "y": 2}, ("x", "y")) == 2
    with pytest.raises(ValueError, match=r"there is no column 'p' or 'q', only \['x'\]"):
        take({"x": 1}, ("p", "q"))


def test_ids() -> None:
    assert unique_ids([{"id": 7}, {"id": 8}], ("key", "id")) == ["7", "8"]
    assert unique_ids([{"id": 7}, {"id": 7}], ("id",)) == ["0", "1"]
    assert unique_ids([{"id": 7}, {}], ("id",)) == ["0", "1"]
    for odd in (["u0"], True, 1.5):
        with pytest.raises(ValueError, match=r"row 2 has the id .* expected text or an integer"):
            unique_ids([{"id": "u"}, {"id": odd}], ("id",))


class Words(DataTask):
    """Say the gold."""

    def __init__(self, train: list[str], held_out: list[str]) -> None:
        texts: dict[Split, list[str]] = {"train": train, "eval": held_out}

        def read(split: Split) -> list[Prompt]:
            return [
                Prompt(id=f"words/{split}/{i}", text=t, gold=t, task="words")
                for i, t in enumerate(texts[split])
            ]

        super().__init__("words", read)


def test_train_problems_that_are_held_out_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    task = Words(["one", "T wo\n", "three", "two - 1"], ["two", "four", "two + 1"])
    assert [p.text for p in task.prompts("train")] == ["one", "three", "two - 1"]
    assert task.num_dropped == 1
    assert "1 of 4 train problems are eval problems" in caplog.text


def test_problems_that_repeat_another_one_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert Words([], ["one", "two", "O ne", "one"]).size("eval") == 4
    assert "2 of 4 problems in split 'eval' repeat another one" in caplog.text


def test_prompts_by_place_and_by_id() -> None:
    task = Words(["a", "b"], ["c"])
    assert (task.size("train"), task.size("eval")) == (2, 1)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"has 2 problems in 'train', got {index}"):
            task.prompt("train", index)
    assert task.find("0").text == "c"
    assert task.find("1").text == task.find("words/train/1").text == "b"
    with pytest.raises(ValueError, match=r"no problem '9'; it has \['words/eval/0'"):
        task.find("9")


def test_a_task_without_problems_says_so() -> None:
    with pytest.raises(ValueError, match="task words holds no problem at all"):
        Words([], []).find("9")


def test_double_ids_are_refused() -> None:
    prompt = Prompt(id="x", text="", gold="", task="words")
    with pytest.raises(ValueError, match="has the id 'x' twice in its split 'eval'"):
        DataTask("words", lambda split: [prompt, prompt]).size("eval")


def test_a_cursor_walks_over_it() -> None:
    task = Words(["a", "b", "c"], [])
    cursor = Cursor(task, "train", seed=0)
    first = [p.id for p in cursor.take(3)]
    assert sorted(first) == ["words/train/0", "words/train/1", "words/train/2"]
    assert all(p.id.endswith("@1") for p in cursor.take(3))
    with pytest.raises(ValueError, match="no items in its split 'eval'"):
        Cursor(task, "eval", seed=0)
