"""A bounded number of helper processes that answer one request at a time, and are replaced when
they are lost.

They are started by exec and not by a bare fork, so they share nothing with a process that holds an
accelerator, threads or locks. When this process ends, however it ends, their end of the line closes
and they go.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

START_SECONDS = 300.0
"""For a helper to import what it needs; a busy machine is slow."""


class WorkerLost(RuntimeError):
    """A helper did not answer in time or went away; it has been killed."""


class Worker:
    """One helper process and the line to it."""

    def __init__(self, command: Callable[[int], Sequence[str]], env: dict[str, str]) -> None:
        """`command` gets the number of the descriptor that the helper speaks on."""
        self.owner = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                command(theirs.fileno()),
                env=env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A terminal's interrupt is for the owner, who ends the helper in its own time.
                start_new_session=True,
            )
        self.line = ours
        self.hello = self.receive(START_SECONDS)

    def ask(self, message: Any, seconds: float, files: Sequence[int] = ()) -> Any:
        """Send a request and wait for its answer; WorkerLost after `seconds`."""
        self.send(message, files)
        return self.receive(seconds)

    def send(self, message: Any, files: Sequence[int] = ()) -> None:
        """Send a request with open files; WorkerLost where nobody takes it."""
        try:
            socket.send_fds(self.line, [json.dumps(message).encode()], files)
        except OSError as error:
            self.kill()
            raise WorkerLost(f"a helper process is gone: {error}") from error

    def receive(self, seconds: float) -> Any:
        """The next message; WorkerLost after `seconds`."""
        self.line.settimeout(seconds)
        try:
            data = self.line.recv(1 << 20)
        except TimeoutError as error:
            self.kill()
            raise WorkerLost(f"a helper process did not answer in {seconds:.0f} s") from error
        except OSError as error:
            self.kill()
            raise WorkerLost(f"a helper process is gone: {error}") from error
        if not data:
            self.kill()
            raise WorkerLost(f"a helper process ended with code {self.process.returncode}")
        return json.loads(data)

    def kill(self) -> None:
        """End the helper and what it started, and wait for it."""
        self.line.close()
        if self.owner != os.getpid() or self.process.returncode is not None:
            return
        try:
            # Its end of the line is closed: it cleans up and goes. Only a stuck one is killed.
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def is_alive(self) -> bool:
        """Whether this process may ask it something; false as well in a fork of its owner."""
        is_ours = self.owner == os.getpid() and self.line.fileno() >= 0
        return is_ours and self.process.poll() is None


class Pool:
    """At most `size` helpers, started when they are first needed; safe to use from many threads."""

    def __init__(self, size: int, start: Callable[[], Worker]) -> None:
        if size < 1:
            raise ValueError(f"got {size} workers, expected 1 or more; set workers")
        self.size = size
        self._start = start
        self._idle: queue.LifoQueue[list[Worker]] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put([])
        self._all: list[Worker] = []
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _kill_all, self._all)

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        """A helper for one request at a time; waits while all are busy."""
        place = self._idle.get()
        try:
            if not place or not place[0].is_alive:
                with self._lock:
                    self._all[:] = [w for w in self._all if w.is_alive]
                place[:] = [self._start()]
                with self._lock:
                    self._all.append(place[0])
            yield place[0]
        except BaseException:
            # An answer that nobody waited for must not be taken for the next one's.
            if place:
                place[0].kill()
            raise
        finally:
            self._idle.put(place)

    def close(self) -> None:
        """End all helpers; later requests start new ones."""
        with self._lock:
            _kill_all(self._all)


def _kill_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.line.close()
    for worker in workers:
        worker.kill()
    workers.clear()


def default_size() -> int:
    """Helpers for this rank: its share of the processors it may use, at most 16."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(16, len(os.sched_getaffinity(0)) // ranks))


def isolated_python(*arguments: str) -> list[str]:
    """This interpreter without user files and the working directory on its path."""
    return [sys.executable, "-P", "-s", *arguments]
