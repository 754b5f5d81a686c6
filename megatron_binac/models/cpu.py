"""The one place that lets Megatron-Core run without CUDA, over gloo.

Megatron-Core asks for the current CUDA device, streams and RNG states in many places and has no
switch for a machine without them. `enable()` answers those questions for the CPU; `region()`
redirects the few calls that name "cuda" as a string (optimizer, gradient clipping, distributed
checkpointing) while it is entered, so that the model's own forward and backward pay nothing. Both
do nothing where CUDA exists. Tried with the Megatron-Core releases in `SUPPORTED`; any other is
refused, not guessed at.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SUPPORTED = ((0, 16), (0, 20))
"""Oldest Megatron-Core release that works, and the first that was not tried."""

_CPU = torch.device("cpu")
_enabled = False


def megatron_version() -> tuple[int, int, int]:
    """Version of the installed Megatron-Core; ImportError with the fix where there is none."""
    try:
        import megatron.core
    except ImportError as error:
        raise ImportError("megatron-core is not installed; `pip install megatron-core`") from error
    major, minor, patch = megatron.core.__version__.split(".")[:3]
    return int(major), int(minor), int("".join(c for c in patch if c.isdigit()) or 0)


def check_version() -> None:
    """Raise ImportError unless the installed Megatron-Core is one of the releases in
    `SUPPORTED`."""
    version = megatron_version()
    if not SUPPORTED[0] <= version[:2] < SUPPORTED[1]:
        low, high = (".".join(map(str, v)) for v in SUPPORTED)
        raise ImportError(
            f"megatron-core {'.'.join(map(str, version))} is installed, expected >={low},<{high}; "
            f"`pip install 'megatron-core>={low},<{high}'`"
        )


def device() -> torch.device:
    """Where tensors of this process live: its current GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


class _NoStream:
    """Stands in for a CUDA stream or event: every method is there and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _NoStream()

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def _is_cuda(where: object) -> bool:
    if isinstance(where, str):
        return where.startswith("cuda")
    return isinstance(where, torch.device) and where.type == "cuda"


class _CudaToCpu(TorchFunctionMode):
    """Sends tensors that are asked for on "cuda" to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace(
                "torch.", "torch.cuda."
            )  # gradient clipping asserts this name
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(a) else a for a in args)
        return func(*args, **kwargs)


# Distributed checkpointing passes through the mode above with torch's older sharded tensors.
warnings.filterwarnings("ignore", category=FutureWarning, module=__name__.replace(".", r"\."))


def region() -> contextlib.AbstractContextManager[Any]:
    """Redirects "cuda" to the CPU while entered; nothing where CUDA exists."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaToCpu()


def outside_region() -> contextlib.AbstractContextManager[Any]:
    """Suspends `region()` while entered, for what asks for no "cuda" and calls many small
    operators: each of them would pass through Python."""
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    return torch._C.DisableTorchFunction()


def enable() -> None:
    """Make this process able to run Megatron-Core on the CPU; nothing where CUDA exists.
    Idempotent."""
    global _enabled
    check_version()
    if _enabled:
        return
    _enabled = True
    _name_what_is_absent()
    _pass_on_write_errors()
    if torch.cuda.is_available():
        return
    # One function object per name: torch's compiler refuses one object under two names.
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.set_device = lambda *args, **kwargs: None
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None
    cuda.Stream = _NoStream
    cuda.Event = _NoStream
    cuda.current_stream = lambda *args, **kwargs: _NoStream()
    cuda.default_stream = lambda *args, **kwargs: _NoStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False

    import megatron.core.tensor_parallel.random as megatron_random

    def _get_state(
        device: Any = "cuda", clone: bool = False, graph_safe: bool = False
    ) -> torch.Tensor:
        return torch.get_rng_state()

    def _set_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    megatron_random._get_cuda_rng_state = _get_state
    megatron_random._set_cuda_rng_state = _set_state

    # A save that nobody runs in the background hands its results over within this process.
    # Megatron-Core starts a server process for them all the same, which imports torch again:
    # seconds for every first save.
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.SimpleQueue()
    _load_torch_adam()


def _name_what_is_absent() -> None:
    """The router of Megatron-Core asks whether a function of Transformer Engine is None, and does
    not say so where Transformer Engine is not installed."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _pass_on_write_errors() -> None:
    """Let a save that failed say why. Megatron-Core 0.19 asserts that its writer returned a list,
    and where that returned an OSError no more than the name of that class reaches anybody; what
    the writer raises is passed on in full."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write = FileSystemWriterAsync.write_preloaded_data

    @functools.wraps(write)  # its parameters are counted
    def write_or_raise(*args: Any, **kwargs: Any) -> Any:
        returned = write(*args, **kwargs)  # older releases return nothing, and pass on the error
        if returned is not None and isinstance(returned[1], Exception):
            raise returned[1]
        return returned

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write_or_raise)


def _load_torch_adam() -> None:
    """Let the distributed optimizer read back PyTorch's Adam, which stands in for the fused ones
    on the CPU.

    PyTorch keeps a step count beside each parameter's moments. Megatron-Core saves one step for
    all and puts it back as one tensor that all parameters share, so that every one of them would
    advance it; and it looks for the step among the saved tensors of every parameter, where it is
    not.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def put_with_step(
        self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        put(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = put_with_step


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with `count` intra-op threads and put the old number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
