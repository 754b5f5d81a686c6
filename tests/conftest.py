"""What all tests share: one thread a process, markers that skip with a reason, the data folder."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_http import Server

# Read when torch is imported, which is after this file.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _num_gpus() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needed = {"gpu": 1, "multi_gpu": 2}
    marked = [item for item in items if any(item.get_closest_marker(name) for name in needed)]
    found = _num_gpus() if marked else 0
    for item in marked:
        wanted = max(count for name, count in needed.items() if item.get_closest_marker(name))
        if found < wanted:
            item.add_marker(
                pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), found {found}")
            )
    for item in items:
        if item.get_closest_marker("network") and not os.environ.get("BINAC_TEST_NETWORK"):
            item.add_marker(pytest.mark.skip(reason="needs a connection; set BINAC_TEST_NETWORK=1"))


@pytest.fixture
def server() -> Iterator[Server]:
    """An endpoint that speaks OpenAI's chat completions, for one test."""
    made = Server()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the public data sets that some tests read, from BINAC_TEST_DATA."""
    value = os.environ.get("BINAC_TEST_DATA")
    if not value:
        pytest.skip("needs the data sets; set BINAC_TEST_DATA to their folder")
    path = Path(value)
    if not path.is_dir():
        pytest.fail(f"BINAC_TEST_DATA is {value!r}, which is no folder")
    return path
