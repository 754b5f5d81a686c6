"""What a benchmark has to know of the machine: its name, its peak, memory peaks, shares of time."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_binac.planner import hardware

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Peak rate that utilisation is a share of, of one rank."""

    flops: float
    how: str

    def as_dict(self) -> dict[str, float | str]:
        return asdict(self)


def describe() -> str:
    """The device, or the processor, in a few words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def measured_peak_flops(precision: str) -> Peak | None:
    """The datasheet's dense bf16 peak of a known GPU; on a CPU, what its own product reaches.

    None for a GPU that is not in the data file: a share of a guess is no measurement.
    """
    if torch.cuda.is_available():
        gpu = hardware.match(torch.cuda.get_device_name())
        return None if gpu is None else Peak(flops=gpu.flops, how=f"bf16 peak of {gpu.name}")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    size = 1024
    a = torch.randn(size, size).to(dtype)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return Peak(
        flops=2 * size**3 / best,
        how=f"a {size} x {size} product in {precision} on {torch.get_num_threads()} thread(s), "
        f"best of 8, {2 * size**3 / best / 1e9:.0f} GFLOP/s",
    )


class PeakMemory:
    """Most bytes of a phase: of the allocator on a GPU, resident ones of the process on Linux."""

    def reset(self) -> None:
        """Start a phase."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            _CLEAR.write_text("5")  # sets the peak back to what is resident now
            self._known = True
        except OSError:
            self._known = False

    def read(self) -> int | None:
        """Bytes since the reset, None where the system does not tell."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        if not self._known:
            return None
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None


POWERCAP = Path("/sys/class/powercap")


def energy_joules(powercap: Path = POWERCAP) -> float | None:
    """Counter of the energy that this rank's GPU has used, by NVML, or on a CPU the packages of the
    machine, by RAPL; None where the driver does not tell."""
    if torch.cuda.is_available():
        try:
            import pynvml
        except ImportError:
            return None
        pynvml.nvmlInit()
        bus = torch.cuda.get_device_properties(torch.cuda.current_device()).pci_bus_id
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if pynvml.nvmlDeviceGetPciInfo(handle).bus == bus:
                try:
                    return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
                except pynvml.NVMLError:
                    return None
        return None
    try:
        packages = [path / "energy_uj" for path in powercap.glob("intel-rapl:?")]
        found = [int(path.read_text(encoding="ascii")) for path in packages]
    except OSError:  # since 2020 only root may read them
        return None
    return sum(found) / 1e6 if found else None


_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_scaled_dot_product")
_COLLECTIVES = ("gloo:", "nccl:", "c10d::")


def profiled_shares(action: Callable[[], object]) -> dict[str, float]:
    """Shares of one run of `action` on this rank's CPU thread, by torch's profiler.

    Matrix products and attention; collectives and waiting for them; other operators; and what no
    operator covers, which is Python and the frameworks. The profiler itself slows small operators.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        start = time.perf_counter()
        action()
        whole = time.perf_counter() - start
    shares = {"matrix products and attention": 0.0, "collectives": 0.0, "other operators": 0.0}
    for event in found.key_averages():
        seconds = event.self_cpu_time_total / 1e6
        if event.key.startswith(_PRODUCTS):
            shares["matrix products and attention"] += seconds / whole
        elif event.key.startswith(_COLLECTIVES):
            shares["collectives"] += seconds / whole
        elif event.key.startswith("aten::"):
            shares["other operators"] += seconds / whole
    shares["outside operators"] = max(0.0, 1.0 - sum(shares.values()))
    return shares
