"""`binac bench refit`: new weights from a learner under any layout to an engine with its own copy.

Measured beside a plain copy of as many bytes: gathering whole tensors alone, handing them over in
memory, and by files (where safetensors is installed). With `--set actor.engine.kind=vllm` the
engine is vLLM; else every rank holds a second copy of all weights, which is what each replica of an
engine has. Weights move before every refit: version and checksum must be new, and the same on every
rank, or the call fails.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_binac.arguments import Parser, whole
from megatron_binac.benchmark.machine import describe
from megatron_binac.benchmark.under_ranks import under_ranks
from megatron_binac.benchmark.workload import WORKLOADS
from megatron_binac.config import Config
from megatron_binac.models import cpu, export
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups
from megatron_binac.rollout.refit import (
    Checksum,
    Folder,
    Report,
    copy_seconds,
    read_folder,
    send,
)
from megatron_binac.rollout.vllm_engine import Weights, check_replicas, write_once
from megatron_binac.training.engines import build_engine, prepare_engine

DEFAULT_VOCAB = 320
"""Rows of the embedding where the workload's model names none."""


class Replica:
    """A second copy of all weights, and the checksum of what it has taken."""

    def __init__(self, learner: MegatronLearner) -> None:
        self.weights = {
            name: torch.empty(shape, dtype=dtype, device=cpu.device())
            for name, dtype, shape in export.metadata(learner)
        }
        self.received = Checksum()

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in pairs:
            self.received.add(name, self.weights[name].copy_(tensor))


class Refits:
    """Refits of one engine, one after the other."""

    def __init__(self, config: Config, learner: MegatronLearner, folder: Path) -> None:
        self.learner, self.version = learner, 0
        self.reports: dict[str, list[Report]] = {}
        self.seconds: dict[str, list[float]] = {}
        self.bucket_bytes = learner.config.engine.bucket_mib << 20
        self.weights = Weights(
            stream=lambda: export.hugging_face(learner), metadata=lambda: export.metadata(learner)
        )
        self.ways: dict[str, Callable[[int], Report]] = {}
        self._engine: Any = None
        if learner.config.engine.kind == "megatron":
            self.replica, self.folder = Replica(learner), Folder(folder / "refit")
            self.ways = {"refit in memory": self._in_memory}
            if importlib.util.find_spec("safetensors") is not None:
                self.ways["refit by files"] = self._by_files
        else:
            prepare_engine("actor", learner, folder)
            self._engine = build_engine(config, "actor", learner, folder)
            self.ways = {f"refit of {learner.config.engine.kind}": self._publish}

    def _in_memory(self, version: int) -> Report:
        self.replica.received = Checksum()
        report = send(
            self.weights.stream(),
            lambda bucket: self.replica.load(bucket.tensors()),
            version=version,
            bucket_bytes=self.bucket_bytes,
        )
        return self._checked(report)

    def _by_files(self, version: int) -> Report:
        report = write_once(self.folder, self.weights, version, self.bucket_bytes)
        self.replica.received = Checksum()
        self.replica.load(read_folder(self.folder.path(version)))
        dist.barrier()  # the next version drops this one
        return self._checked(report)

    def _checked(self, report: Report) -> Report:
        held = self.replica.received
        check_replicas([(str(report.version), held.hex(), held.num_tensors)], report)
        return report

    def _publish(self, version: int) -> Report:
        self._engine.publish(version)
        return self._engine.last

    def once(self) -> None:
        """Move the weights, gather them once, and refit in every way."""
        with torch.no_grad():
            for p in self.learner.parameters():
                p.mul_(1.0 + 2.0**-9)
        self._timed("whole tensors alone", lambda: sum(1 for _ in self.weights.stream()))
        for name, way in self.ways.items():
            self.version += 1
            report = self._timed(name, lambda w=way: w(self.version))
            self.reports.setdefault(name, []).append(report)
        num_bytes = next(iter(self.reports.values()))[-1].num_bytes
        self.seconds.setdefault("plain copy", []).append(copy_seconds(num_bytes, cpu.device()))

    def _timed(self, name: str, action: Callable[[], Any]) -> Any:
        """Seconds until the slowest rank is done."""
        dist.barrier()
        start = time.perf_counter()
        result = action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def measure(config: Config, folder: Path, repeats: int) -> dict[str, Any]:
    """What `repeats` refits after a first one moved and took; collective."""
    role = config.actor
    groups = build_groups("actor", role.parallel, 1)
    learner = MegatronLearner(
        "actor",
        role,
        groups,
        vocab_size=role.model.vocab_size or DEFAULT_VOCAB,
        seed=1,
        num_steps=1,
        temperature=config.rollout.temperature,
    )
    refits = Refits(config, learner, folder)
    try:
        for _ in range(1 + repeats):
            refits.once()
    finally:
        refits.close()
    first = next(iter(refits.reports.values()))
    checksums = [report.checksum for report in first]
    if len(set(checksums)) != len(checksums):
        raise RuntimeError(f"weights moved, but a checksum came twice: {checksums}")
    plain = statistics.median(refits.seconds["plain copy"][1:])
    rows = {}
    for name, values in refits.seconds.items():
        found = sorted(values[1:])
        middle = statistics.median(found)
        rows[name] = {
            "seconds": middle,
            "fastest": found[0],
            "slowest": found[-1],
            "gib_per_second": first[0].num_bytes / 2**30 / middle,
            "times_a_plain_copy": middle / plain,
        }
    parallel = role.parallel
    return {
        "benchmark": "refit",
        "machine": describe(),
        "ranks": dist.get_world_size(),
        "layout": {"tp": parallel.tp, "pp": parallel.pp, "dp": groups.dp_size},
        "repeats": repeats,
        "num_bytes": first[0].num_bytes,
        "num_tensors": first[0].num_tensors,
        "bucket_mib": role.engine.bucket_mib,
        "versions": [r.version for r in first],
        "checksums": checksums,
        "rows": rows,
    }


def print_table(result: dict[str, Any]) -> None:
    """The result for people."""
    layout = ", ".join(f"{k.upper()} {n}" for k, n in result["layout"].items())
    print(
        f"{result['num_tensors']} tensors, {result['num_bytes'] / 2**20:.1f} MiB a replica, "
        f"{result['ranks']} rank(s), {layout}: {result['machine']}"
    )
    print(f"{'':22}{'ms':>10}{'fastest - slowest':>20}{'GiB/s':>8}{'x a plain copy':>16}")
    for name, row in sorted(result["rows"].items(), key=lambda pair: pair[1]["seconds"]):
        span = f"{1e3 * row['fastest']:.1f} - {1e3 * row['slowest']:.1f}"
        print(
            f"{name:22}{1e3 * row['seconds']:10.1f}{span:>20}{row['gib_per_second']:8.2f}"
            f"{row['times_a_plain_copy']:16.1f}"
        )
    versions = ", ".join(map(str, result["versions"]))
    print(f"versions {versions}: every checksum is new, and the same on all ranks")


def main(argv: Sequence[str]) -> int:
    """Refit some times and print what it took; the exit code."""
    parser = Parser(prog="binac bench refit", description=__doc__)
    parser.add_argument("--workload", choices=tuple(WORKLOADS), default="quickstart")
    parser.add_argument("--repeats", type=whole(1), default=5, metavar="N")
    parser.add_argument("--nproc", type=whole(1), metavar="N", help="ranks on this machine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    return under_ranks(
        args,
        ["refit", *argv],
        lambda config, folder: measure(config, folder, args.repeats),
        print_table,
    )
