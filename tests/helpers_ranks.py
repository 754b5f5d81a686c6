"""Ranks of a gloo job for tests: forked from a server that has imported Megatron-Core once.

The import takes most of a rank's start; from the server a rank is there in a tenth of a second.
A rank runs one function of a test file, and what it returns comes back.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["megatron_binac.training.setup"])
GRACE = 3.0
"""Seconds that the other ranks have once one of them has failed."""


class Job:
    """Ranks that run `function(*args)`, each with the environment that torchrun would give it."""

    def __init__(self, world: int, function: Callable[..., Any], *args: Any) -> None:
        # The store is here, as it is in torchrun's agent: a port that is looked for first and bound
        # later may be somebody else's by then.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.log = tempfile.NamedTemporaryFile("r", suffix=".log")  # noqa: SIM115
        self.pipes, self.ranks = [], []
        for rank in range(world):
            receive, send = CONTEXT.Pipe(duplex=False)
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            }
            place = (inspect.getfile(function), function.__qualname__)
            process = CONTEXT.Process(target=_rank, args=(env, place, args, self.log.name, send))
            process.start()
            send.close()
            self.pipes.append(receive)
            self.ranks.append(process)

    def wait(self, timeout: float) -> list[Any]:
        """The results by rank; AssertionError where a rank raised, died or took too long."""
        answers: dict[int, Any] = {}
        problems: list[str] = []
        deadline = time.monotonic() + timeout
        try:
            while len(answers) < len(self.ranks):
                open_pipes = [p for i, p in enumerate(self.pipes) if i not in answers]
                ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
                if not ready:
                    problems.append("not all ranks have ended in time")
                    break
                for pipe in ready:
                    rank = self.pipes.index(pipe)
                    try:
                        good, value = pipe.recv()
                    except EOFError:
                        self.ranks[rank].join()
                        good, value = False, f"it ended with code {self.ranks[rank].exitcode}"
                    answers[rank] = value
                    if not good:
                        problems.append(f"rank {rank}: {value}")
                        deadline = min(deadline, time.monotonic() + GRACE)
        finally:
            self.kill()
        if problems:
            output = self.log.read()[-4000:]
            raise AssertionError("\n".join([*problems, "output of the ranks:", output]))
        return [answers[rank] for rank in range(len(self.ranks))]

    def kill(self) -> None:
        """End every rank as `kill -9` does, what it has forked included."""
        for process in self.ranks:
            if process.is_alive():
                _kill_group(process.pid)
        for process in self.ranks:
            process.join()

    def kill_ranks(self) -> None:
        """`kill -9` to the ranks alone: a writer that one has forked lives on, as for a user."""
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.join()

    @property
    def is_alive(self) -> bool:
        return any(process.is_alive() for process in self.ranks)


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 600.0
) -> list[Any]:
    """Run a function of a test file on `world` ranks and return its results by rank."""
    return Job(world, function, *args).wait(timeout)


def _rank(
    env: dict[str, str], place: tuple[str, str], args: tuple[Any, ...], log: str, send: Any
) -> None:
    from megatron_binac.ranks import die_with_parent

    die_with_parent()
    os.setpgid(0, 0)
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(out, fd)
    os.environ.update(env)
    try:
        answer = (True, _load(*place)(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    send.send(answer)
    send.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo may be in the middle of something where another rank has failed


def _load(path: str, name: str) -> Callable[..., Any]:
    """A function of a test file, which is no module that could be imported by name."""
    spec = importlib.util.spec_from_file_location(f"in_rank_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _kill_group(pid: int | None) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have ended
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)  # it has not yet made its own group
