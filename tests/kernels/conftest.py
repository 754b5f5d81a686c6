"""Kernel tests are written once and run three ways, told apart by the environment.

Plainly, they test the reference on the CPU. ``test_interpreted.py`` runs the same files again in
a process with ``BINAC_KERNELS=triton TRITON_INTERPRET=1``, ``test_gpu.py`` in one with
``BINAC_KERNELS=triton BINAC_TEST_DEVICE=cuda``. Processes of their own, since Triton reads the
variable when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


class PeakBytes(TorchDispatchMode):
    """Most bytes of storage that were alive at once, beyond those alive before."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.alive:
            return
        self.alive[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)

    def own(self, *tensors: Tensor) -> None:
        """Inputs and gradient buffers are not extra."""
        for tensor in tensors:
            self.alive[tensor.untyped_storage()._cdata] = 0


@pytest.fixture
def peak_extra_bytes() -> Callable[..., int]:
    """(step, *inputs) -> most bytes alive at once beyond the inputs while the step runs."""

    def count(step: Callable[[], None], *inputs: Tensor) -> int:
        counter = PeakBytes()
        counter.own(*inputs)
        with counter:
            step()
        return counter.peak

    return count


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(os.environ.get("BINAC_TEST_DEVICE", "cpu"))


@pytest.fixture(scope="session")
def uses_triton() -> bool:
    return os.environ.get("BINAC_KERNELS") == "triton"


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every torch.empty holds NaN, so an output that is not written everywhere shows."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Run a Python command in a clean environment, return its output, fail with it otherwise."""

    def run(*args: str, timeout: float = 280.0, **environment: str) -> str:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("BINAC_", "TRITON_")) or name == "BINAC_TEST_DATA"
        }
        done = subprocess.run(
            [sys.executable, *args],
            cwd=ROOT,
            env=inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        output = done.stdout + done.stderr
        if done.returncode != 0:
            pytest.fail(f"{' '.join(args)} ended with {done.returncode}:\n{output[-6000:]}")
        return output

    return run
