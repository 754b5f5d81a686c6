"""Run untrusted programs against tests, many at once, at a bounded load.

`Sandbox.run` is the whole of it. How a program is held is in `confine.py`, how it is judged in
`sandbox_runner.py`; this file is the host's side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import secrets
import socket
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_binac.tasks.workers import Pool, Worker, WorkerLost, default_size, isolated_python

logger = logging.getLogger(__name__)

Isolation = Literal["auto", "namespaces", "limits"]
Status = Literal["passed", "failed", "error", "syntax", "ended", "wall", "cpu", "output"]
NO_MEMORY = 3
"""Exit code of a judge that ran out of memory, as `sandbox_runner.py` has it."""
RUNNER = Path(__file__).with_name("sandbox_runner.py")
PRELOAD = (
    "math", "cmath", "random", "re", "string", "collections", "itertools", "functools", "operator",
    "heapq", "bisect", "copy", "typing", "statistics", "dataclasses", "enum", "time", "calendar",
)  # fmt: skip
"""Imported once in the warm interpreter; other modules are read when a program asks for them."""
SYSTEM_PATHS = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
)


class SandboxError(RuntimeError):
    """The sandbox itself broke; nothing is known about the program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one program may use.

    Example: ``Limits(cpu_seconds=2.0)``
    """

    cpu_seconds: float = 3.0
    """Processor time; what an endless loop costs."""
    wall_seconds: float = 15.0
    """Time on the clock; far above `cpu_seconds`: a busy machine must not turn right into wrong."""
    memory_mb: int = 512
    """Address space beyond the bare interpreter, for each process."""
    file_mb: int = 16
    """Size of its private /tmp, and of one file."""
    open_files: int = 64
    processes: int = 1
    """1 refuses fork and exec altogether."""
    threads: int = 16
    output_kb: int = 1024
    """Printed text before it is killed."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ValueError(f"sandbox {field.name} is {value}, expected above 0, finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of one program.

    Example: ``Verdict(status="failed", passed=1, total=3, detail="AssertionError in assert f(2) ==
    4", ...)``
    """

    status: Status
    """passed: every test; failed: a test did not hold; error: an exception; syntax: it did not
    compile; ended: it left (sys.exit, a crash, out of memory); wall, cpu, output: the limit that it
    ran into."""
    passed: int
    total: int
    """Top-level asserts of the tests."""
    detail: str
    printed: str
    """The end of what the program printed."""
    cpu_seconds: float
    wall_seconds: float


class Sandbox:
    """A pool of warm interpreters that run programs against tests. Safe to use from many threads.

    Example: ``Sandbox().run("def f(x): return x", "assert f(3) == 3", names=["f"]).status ==
    "passed"``
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        workers: int | None = None,
        isolation: Isolation = "auto",
        packages: Sequence[str] = (),
    ) -> None:
        """`packages` of the site folder are imported beforehand and make that folder readable
        inside.

        `isolation` "auto" takes namespaces where the kernel allows them and warns where it does
        not; "namespaces" raises instead; "limits" goes without.
        """
        self.limits = limits or Limits()
        self.isolation: Isolation = isolation
        self.packages = tuple(packages)
        self.holds: tuple[str, ...] = ()
        """What is in force, known after the first start: namespaces, seccomp, landlock, ..."""
        self._pool = Pool(default_size() if workers is None else workers, self._start)

    @property
    def workers(self) -> int:
        """Programs that run at the same time."""
        return self._pool.size

    def run(
        self,
        program: str,
        tests: str,
        *,
        names: Sequence[str],
        setup: str = "",
        partial: bool = False,
        limits: Limits | None = None,
    ) -> Verdict:
        """Run `tests` against the functions `names` of `program`.

        `setup` and `tests` are trusted code and run apart from the program: `setup` before the
        program is loaded. Unless `partial`, the first test that fails ends the run. `limits` may
        set other times than the sandbox's own. SandboxError where no verdict could be had.
        """
        times = limits or self.limits
        job = {"program": program, "tests": tests, "names": list(names), "setup": setup}
        job |= {"partial": partial, "nonce": secrets.token_hex(16)}
        header = {"wall_seconds": times.wall_seconds, "cpu_seconds": times.cpu_seconds}
        try:
            with self._pool.worker() as worker:
                status, verdict = _exchange(worker, header, json.dumps(job).encode())
        except WorkerLost as error:
            raise SandboxError(str(error)) from error
        return _read(status, verdict, job["nonce"])

    def close(self) -> None:
        """End the warm interpreters and whatever runs in them."""
        self._pool.close()

    def _start(self) -> Worker:
        if self.isolation != "auto":
            return self._start_one(self.isolation)
        try:
            return self._start_one("namespaces")
        except SandboxError as error:
            self.isolation = "limits"
            logger.warning(
                "THE SANDBOX IS WEAK: %s. Programs run with resource limits and without namespaces "
                "of their own; run untrusted code where user namespaces are allowed",
                error,
            )
            return self._start_one("limits")

    def _start_one(self, isolation: Isolation) -> Worker:
        limits = self.limits
        site = sorted({sysconfig.get_path(kind) for kind in ("purelib", "platlib")})
        options: dict[str, Any] = {
            "isolation": isolation,
            "paths": readable_paths() + (site if self.packages else []),
            "site": site if self.packages else [],
            "preload": [*PRELOAD, *self.packages],
            "limits": {
                "memory_bytes": limits.memory_mb << 20,
                "cpu_seconds": limits.cpu_seconds,
                "file_bytes": limits.file_mb << 20,
                "open_files": limits.open_files,
                "processes": limits.processes,
                "threads": limits.threads,
                "output_bytes": limits.output_kb << 10,
            },
        }

        def command(control: int) -> list[str]:
            return isolated_python("-S", str(RUNNER), json.dumps({**options, "control": control}))

        # One seed for all hashes: the order of a set must not decide a verdict by chance.
        env = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        try:
            worker = Worker(command, {**env, "OPENBLAS_NUM_THREADS": "1"})
        except WorkerLost as error:
            raise SandboxError(f"the sandbox did not start: {error}") from error
        if "error" in worker.hello:
            worker.kill()
            raise SandboxError(f"no {isolation} can be had here ({worker.hello['error']})")
        self.holds = tuple(worker.hello["holds"])
        return worker


def readable_paths() -> list[str]:
    """What a program may read: the standard library and the system's shared libraries."""
    prefixes = (sys.base_prefix, sys.base_exec_prefix)
    library = {sysconfig.get_path("stdlib"), *(f"{prefix}/lib" for prefix in prefixes)}
    return sorted({*SYSTEM_PATHS, *library})


def _exchange(worker: Worker, header: dict[str, Any], job: bytes) -> tuple[dict[str, Any], bytes]:
    """Hand over one job; how it ended, and what the judge wrote."""
    ours, theirs = socket.socketpair()
    # The runner kills at `wall_seconds`; far more than that is trouble of its own.
    patience = 4 * header["wall_seconds"] + 120.0
    with ours:
        with theirs:
            worker.send(header, [theirs.fileno()])
        ours.settimeout(patience)
        with contextlib.suppress(OSError):
            # A judge that was killed before it read everything is seen in the status.
            ours.sendall(job)
            ours.shutdown(socket.SHUT_WR)
        status = worker.receive(patience)
        parts = []
        with contextlib.suppress(OSError):
            while part := ours.recv(1 << 20):
                parts.append(part)
    return status, b"".join(parts)


def _read(status: dict[str, Any], written: bytes, nonce: str) -> Verdict:
    times = {key: status[key] for key in ("cpu_seconds", "wall_seconds")}
    if status["ended"] != "done":
        limit = status["ended"]
        return Verdict(
            status=limit,
            passed=0,
            total=0,
            detail=f"{limit} limit",
            printed=status["printed"],
            **times,
        )
    if not written and (status["judge_exit"] < 0 or status["judge_exit"] == NO_MEMORY):
        # At a limit, or out of memory: the tests are trusted, so it was the program's values.
        detail = "its values were too much for the tests"
        return Verdict(
            status="error", passed=0, total=0, detail=detail, printed=status["printed"], **times
        )
    if not written:
        raise SandboxError(f"the judge gave no verdict (the program printed {status['printed']!r})")
    verdict = json.loads(written)
    if verdict.pop("nonce") != nonce:
        raise SandboxError("the verdict belongs to another job")
    if verdict["status"] == "broken":
        raise SandboxError(f"{verdict['detail']}: {status['printed'] or 'no reason given'}")
    return Verdict(printed=status["printed"], **verdict, **times)
