"""Compile every kernel for a GPU that is not here, and read what the assembler says.

The host code runs on meta tensors with the kernels replaced by recorders, so what is compiled are
the real launches: their block sizes, their absent arguments, their divisibility by 16. Needs Triton
(whose wheel bundles ``ptxas``) and neither a GPU nor a driver. It must run in a process without
``TRITON_INTERPRET``: an interpreted kernel is not a kernel.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

ARCHES = ("sm_80", "sm_90", "sm_100")
MATRIX_INSTRUCTION = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma"}
OPTIONS = ("num_warps", "num_stages")

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
    torch.uint8: "u8",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One kernel as it was launched, with what Triton would specialise on."""

    kernel: Any
    types: tuple[tuple[str, str], ...]
    """(argument, Triton type) in order; ``constexpr`` for constants."""
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]
    """Multiples of 16; pointers always, since allocators align to 16 bytes and more."""
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """Kernel, input dtype, and what was specialised: options that are on, strides of 1."""
        first = next(kind for _, kind in self.types if kind.startswith("*"))
        on = [name.lower() for name, value in self.constants if value is True]
        unit = [f"{name}=1" for name, value in self.constants if value is not True and value == 1]
        base = self.kernel.__name__.strip("_").removesuffix("_kernel")
        return " ".join([base, first[1:], *on, *(name for name in unit if name.startswith("s"))])

    @property
    def blocks(self) -> dict[str, int]:
        return {
            name: value
            for name, value in self.constants
            if name.startswith("B") and isinstance(value, int)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What came out: resources by ptxas, and which matrix instruction the PTX holds."""

    name: str
    arch: str
    registers: int
    shared_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    num_warps: int
    num_stages: int
    matrix_instruction: str | None
    blocks: dict[str, int]
    seconds: float


@contextlib.contextmanager
def recording(*modules: ModuleType) -> Iterator[list[Launch]]:
    """Inside, launches of the modules' kernels are written down, each kind once, and not run."""
    launches: list[Launch] = []
    kernels = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction)
    ]
    for module, name, kernel in kernels:
        setattr(module, name, _Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def record(*args: Any, **kwargs: Any) -> None:
            launch = describe(self.kernel, args, kwargs)
            if launch not in self.launches:
                self.launches.append(launch)

        return record


def describe(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """Apply Triton's specialisation rule to a launch's arguments.

    None and the integer 1 become constants, integers that divide by 16 and all pointers are marked.
    """
    options = tuple((name, kwargs[name]) for name in OPTIONS if name in kwargs)
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        name: value for name, value in kwargs.items() if name not in OPTIONS
    }
    types, constants, divisible = [], [], []
    for param in kernel.params:
        value = values.pop(param.name)
        constant = param.is_constexpr or value is None
        if isinstance(value, Tensor):
            kind = f"*{_TYPES[value.dtype]}"
        elif isinstance(value, int):
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            constant = constant or value == 1
        else:
            kind = "fp32"
        types.append((param.name, "constexpr" if constant else kind))
        if constant:
            constants.append((param.name, value))
        elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            divisible.append(param.name)
    assert not values, (kernel, values)
    return Launch(
        kernel=kernel,
        types=tuple(types),
        constants=tuple(constants),
        divisible=tuple(divisible),
        options=options,
    )


def compile_launch(launch: Launch, arch: str) -> Compiled:
    """Compile one launch for an architecture such as ``sm_90`` and let ptxas report on it.

    Raises RuntimeError in an interpreted process, and where ptxas reports nothing.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("offline compile needs a process without TRITON_INTERPRET=1")
    capability = int(arch.removeprefix("sm_"))
    names = [name for name, _ in launch.types]
    source = ASTSource(
        fn=launch.kernel,
        signature=dict(launch.types),
        constexprs=dict(launch.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible},
    )
    start = time.perf_counter()
    kernel = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options)
    )
    seconds = time.perf_counter() - start
    ptx = kernel.asm["ptx"]
    registers, stores, loads = _ask_ptxas(ptx, capability)
    found = [name for name in MATRIX_INSTRUCTION.values() if name in ptx]
    return Compiled(
        name=launch.name,
        arch=arch,
        registers=registers,
        shared_bytes=kernel.metadata.shared,
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        matrix_instruction=found[-1] if found else None,
        blocks=launch.blocks,
        seconds=seconds,
    )


def _ask_ptxas(ptx: str, capability: int) -> tuple[int, int, int]:
    """(registers, spill store bytes, spill load bytes) by ``ptxas -v``."""
    target = re.search(r"^\.target (\w+)", ptx, flags=re.MULTILINE)
    assert target is not None, ptx[:200]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "w", encoding="utf-8") as file:
            file.write(ptx)
        done = subprocess.run(
            [get_ptxas(capability).path, "-v", f"--gpu-name={target[1]}", path, "-o", os.devnull],
            capture_output=True,
            text=True,
        )
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    used = re.search(r"Used (\d+) registers", done.stderr)
    if done.returncode != 0 or spills is None or used is None:
        raise RuntimeError(f"ptxas {target[1]} said: {done.stderr.strip()[-500:]}")
    return int(used[1]), int(spills[1]), int(spills[2])
