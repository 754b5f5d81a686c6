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

from megatron_binac.algo.losses import PolicyLossConfig
from megatron_binac.kernels import triton_logprob, triton_policy_loss, triton_segment
from megatron_binac.kernels.credit import CreditWeights, TreeRewards
from megatron_binac.kernels.reference import Cotangent, Shard

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
        written = dict(self.types).get("out_ptr")
        to = [f"to {written[1:]}"] if written is not None else []
        on = [name.lower() for name, value in self.constants if value is True]
        unit = [f"{name}=1" for name, value in self.constants if value is not True and value == 1]
        base = self.kernel.__name__.strip("_").removesuffix("_kernel")
        strides = [name for name in unit if name.startswith("stride")]
        return " ".join([base, first[1:], *to, *on, *strides])

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


def default_launches(
    *, num_tokens: int = 8192, num_columns: int = 128_256, width: int = 4096
) -> list[Launch]:
    """Every kernel as training launches it, on meta tensors: bfloat16 and float32, masked rows or
    none, with and without entropy, one launch of every other kernel with all its options on."""
    with recording(triton_logprob, triton_policy_loss, triton_segment) as launches:
        for dtype in (torch.bfloat16, torch.float32):
            for masked in (False, True):
                for with_entropy in (False, True):
                    _launch_logprob(num_tokens, num_columns, width, dtype, masked, with_entropy)
        _launch_logprob(
            num_tokens, num_columns, width, torch.bfloat16, True, True, with_support=True
        )
        _launch_logprob(num_tokens, 32_003, width + 16, torch.bfloat16, True, True)
        _launch_policy_loss(num_tokens)
        _launch_segments(num_tokens)
    return launches


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _launch_logprob(
    num_tokens: int,
    num_columns: int,
    width: int,
    dtype: torch.dtype,
    masked: bool,
    with_entropy: bool,
    with_support: bool = False,
) -> None:
    hidden_TH, weight_VH = (
        _meta(num_tokens, width, dtype=dtype),
        _meta(num_columns, width, dtype=dtype),
    )
    labels_N = _meta(num_tokens, dtype=torch.int64)
    rows_N = _meta(num_tokens, dtype=torch.int64) if masked else None
    words = (num_columns + 31) // 32
    support_NW = _meta(num_tokens, words, dtype=torch.int32) if with_support else None
    logits_TV = _meta(num_tokens, num_columns, dtype=dtype)
    shard = Shard(first_column=0, num_columns=num_columns, inv_temperature=0.7)
    cotangent = Cotangent(
        log_sum_exp_N=_meta(num_tokens),
        entropy_N=_meta(num_tokens),
        grad_logprob_N=_meta(num_tokens),
        grad_entropy_N=_meta(num_tokens) if with_entropy else None,
    )
    on_support = {"support_NW": support_NW}
    triton_logprob.linear_stats(
        hidden_TH, weight_VH, labels_N, rows_N, shard,
        with_entropy=with_entropy, chunk_size=None, **on_support,
    )  # fmt: skip
    # Into a float32 main_grad, and into a gradient of the weight's own dtype.
    for grad_dtype in {torch.float32, dtype}:
        triton_logprob.linear_grads(
            hidden_TH, weight_VH, labels_N, rows_N, shard, cotangent, chunk_size=None,
            grad_hidden_TH=torch.empty_like(hidden_TH),
            grad_weight_VH=torch.empty_like(weight_VH, dtype=grad_dtype), **on_support,
        )  # fmt: skip
    triton_logprob.logits_stats(
        logits_TV, labels_N, rows_N, shard, with_entropy=with_entropy, **on_support
    )
    triton_logprob.logits_grad(
        logits_TV, labels_N, rows_N, shard, cotangent,
        grad_logits_TV=torch.empty_like(logits_TV), **on_support,
    )  # fmt: skip


def _launch_policy_loss(num_tokens: int) -> None:
    token = _meta(num_tokens)
    options: list[dict[str, Any]] = [
        {},
        {"dual_clip": 3.0, "engine_is_cap": 2.0, "entropy_coef": 0.01},
        {"ratio": "sequence", "dual_clip": 3.0, "engine_is_cap": 2.0, "entropy_coef": 0.01},
        {"ratio": "none", "kl_estimator": "k2"},
        {"ratio": "none", "kl_estimator": "k1_score"},
    ]
    for index, option in enumerate(options):
        everything = index in (1, 2)
        triton_policy_loss.policy_loss(
            token,
            token,
            token,
            token.bool(),
            PolicyLossConfig(**option),
            ref_logprob_T=token,
            engine_logprob_T=token if everything else None,
            entropy_T=token if everything else None,
            cu_seqlens=_meta(17, dtype=torch.int32),
            weight_T=token if everything else None,
            diagnostics=everything,
        )


def _launch_segments(num_tokens: int) -> None:
    P, G, C, F, M = 64, 8, 4, 4, 2
    for kind in ("mean_centered", "leave_one_out", "std_normalized", "mean_normalized"):
        rows = _meta(P * G)
        triton_segment.group_advantage(rows, rows.long(), rows.bool(), kind)
    trees = TreeRewards(
        reward_PG=_meta(P, G),
        valid_PG=_meta(P, G, dtype=torch.bool),
        criticised_PC=_meta(P, C, dtype=torch.int64),
        reward_PCFM=_meta(P, C, F, M),
        valid_PCFM=_meta(P, C, F, M, dtype=torch.bool),
        probe_PCFM=_meta(P, C, F, M),
        probe_valid_PCFM=_meta(P, C, F, M, dtype=torch.bool),
        feedback_valid_PCF=_meta(P, C, F, dtype=torch.bool),
        weight_PC=_meta(P, C),
        agrees_PCF=_meta(P, C, F),
        leaks_PCF=_meta(P, C, F),
    )
    everything = CreditWeights(improvement_weight=0.1, discrimination_coef=0.1, leak_coef=0.1)
    for weights in (CreditWeights(), everything):
        triton_segment.tree_credit(trees, weights)
    bounds, token = _meta(17, dtype=torch.int32), _meta(num_tokens)
    triton_segment.spread_to_tokens(_meta(16), bounds, token.bool())
    triton_segment.gae(token, token, bounds, 0.99, 0.95, token.bool())
    for alpha in (0.0, 0.5, 1.0):
        triton_logprob.bucket_divergence(_meta(num_tokens, 101), _meta(num_tokens, 101), alpha)
