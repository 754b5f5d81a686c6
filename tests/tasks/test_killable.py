"""Calls that hang, explode or run code end alone, and the next one works."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from megatron_binac.tasks.killable import HelperError, Killable

WAYS = """
import os, socket, time

def warm_up():
    if os.path.exists({missing!r}):
        raise ImportError("pip install 'megatron_binac[tasks]'")

def work(request):
    kind, value = request
    if kind == "echo":
        return value
    if kind == "loop":
        while True: pass
    if kind == "raise":
        raise ValueError(value)
    if kind == "memory":
        return len(bytearray(value))
    if kind == "die":
        os._exit(0)
    if kind == "write":
        open(value, "w").write("x")
    if kind == "remove":
        os.remove(value)
    if kind == "fork":
        return os.fork()
    if kind == "socket":
        return socket.socket().fileno()
    if kind == "long":
        return "x" * value
    if kind == "keep":
        globals()["kept"] = value
    if kind == "kept":
        return globals().get("kept")
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killable]:
    folder = tmp_path_factory.mktemp("module")
    (folder / "binac_ways.py").write_text(WAYS.replace("{missing!r}", "'/nowhere'"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        built = Killable("binac_ways:work", seconds=0.5, workers=1)
        yield built
        built.close()


ENDS = [
    ("echo", {"a": [1, None, "x"]}, "done"),
    ("loop", None, "time"),
    ("raise", "no", "crash"),
    ("memory", 10 << 30, "memory"),
    ("die", None, "crash"),
    ("fork", None, "crash"),
    ("socket", None, "crash"),
    ("long", 10_000_000, "crash"),
]


@pytest.mark.parametrize(("kind", "value", "end"), ENDS)
def test_how_a_call_ends(calls: Killable, kind: str, value: object, end: str) -> None:
    assert calls.call([kind, value]).end == end
    assert calls.call(["echo", 1]).value == 1


def test_it_writes_and_removes_nothing(calls: Killable, tmp_path: object) -> None:
    new, old = f"{tmp_path}/new", f"{tmp_path}/old"
    with open(old, "w", encoding="utf-8") as file:
        file.write("kept")
    assert calls.call(["write", new]).end == "crash"
    calls.call(["remove", old])
    with open(old, encoding="utf-8") as file:
        assert file.read() == "kept"


def test_a_fresh_call_shares_nothing(calls: Killable) -> None:
    calls.call(["keep", 5])
    assert calls.call(["kept", None]).value == 5
    assert calls.call(["kept", None], fresh=True).value is None
    assert calls.call(["keep", 6], fresh=True).end == "done"
    assert calls.call(["kept", None]).value is None


def test_a_missing_package_is_named(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(f"{tmp_path}/binac_missing.py", "w", encoding="utf-8") as file:
        file.write(WAYS.replace("{missing!r}", "'/'"))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(HelperError, match="pip install"):
        Killable("binac_missing:work", seconds=1.0, workers=1).call(["echo", 1])


def test_closing_leaves_no_process(calls: Killable) -> None:
    before = set(psutil.Process().children(recursive=True))
    other = Killable("binac_ways:work", seconds=1.0, workers=1)
    assert other.call(["echo", 1]).value == 1
    assert len(set(psutil.Process().children(recursive=True)) - before) == 2
    other.close()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_seconds_are_checked() -> None:
    with pytest.raises(ValueError, match="got 0 seconds"):
        Killable("binac_ways:work", seconds=0)
