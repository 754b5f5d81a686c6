"""Function calls in processes that can be killed: for libraries that may hang, explode or run what
they read.

A helper process imports the function's module once and forks a child that makes the calls. Where
one takes too long the child is killed, and the next call gets a new child in milliseconds: no alarm
signal, so it works from any thread, and no call can hold up another. A child may neither fork, nor
open a socket, nor write a file.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron_binac.tasks import confine
from megatron_binac.tasks.workers import Pool, Worker, WorkerLost, default_size, isolated_python

CALLS_PER_CHILD = 2000
"""Then a new child: caches grow."""
MEMORY = 2 << 30
"""Address space of a child beyond what its imports take, bytes."""
MAX_REPLY = 60_000
"""Bytes; what a pipe takes in one piece."""
PATIENCE = 60
"""Seconds on the clock for each of processor time: a busy machine must not decide a verdict."""

End = Literal["done", "time", "memory", "crash"]


class HelperError(RuntimeError):
    """No helper could do the call; nothing is known about its outcome."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a call.

    Example: ``Outcome(end="done", value=True)``
    """

    end: End
    """crash: the function raised, or its process died."""
    value: Any = None


class Killable:
    """A pool of processes that call one function of one JSON-able argument. Safe to use from many
    threads.

    Example: ``Killable("package.module:function", seconds=5.0).call(["x", 3])``
    """

    def __init__(self, function: str, *, seconds: float, workers: int | None = None) -> None:
        """`function` is "module:name"; `seconds` is the processor time that one call may take.

        A function `warm_up` of the same module is called once in each helper; an ImportError that
        it raises is passed on.
        """
        if not 0 < seconds < float("inf"):
            raise ValueError(f"got {seconds} seconds for one call, expected above 0, finite")
        self.function, self.seconds = function, seconds
        self._pool = Pool(default_size() if workers is None else workers, self._start)

    @property
    def workers(self) -> int:
        """Calls that are made at the same time."""
        return self._pool.size

    def call(self, argument: Any, *, fresh: bool = False) -> Outcome:
        """Make one call, in a child of its own if `fresh`. HelperError where there is no helper."""
        try:
            with self._pool.worker() as worker:
                # The helper kills; if it does not, it is lost itself.
                patience = 2 * PATIENCE * self.seconds + 60.0
                return Outcome(**worker.ask({"argument": argument, "fresh": fresh}, patience))
        except WorkerLost as error:
            raise HelperError(str(error)) from error

    def close(self) -> None:
        """End the helpers; a later call starts new ones."""
        self._pool.close()

    def _start(self) -> Worker:
        path = [entry for entry in sys.path if entry]
        options = {"function": self.function, "seconds": self.seconds}
        code = (
            "import json, sys; path, options = json.loads(sys.argv[1]); sys.path[:] = path;"
            f"from {__name__} import Helper; Helper(**options).serve()"
        )

        def command(control: int) -> list[str]:
            return isolated_python("-c", code, json.dumps([path, {**options, "control": control}]))

        worker = Worker(command, {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"})
        if "error" in worker.hello:
            worker.kill()
            raise HelperError(worker.hello["error"])
        return worker


class Helper:
    """The process that forks the child and kills it."""

    def __init__(self, *, function: str, seconds: float, control: int) -> None:
        self.function, self.seconds = function, seconds
        self.control = socket.socket(fileno=control)
        self.child = 0
        self.num_calls = 0

    def serve(self) -> None:
        """Answer calls until the host hangs up."""
        module_name, _, name = self.function.partition(":")
        try:
            module = importlib.import_module(module_name)
            getattr(module, "warm_up", lambda: None)()
        except ImportError as error:
            self.control.send(json.dumps({"error": str(error)}).encode())
            return
        function = getattr(module, name)
        self.control.send(json.dumps({"ready": True}).encode())
        while message := self.control.recv(1 << 20):
            request = json.loads(message)
            if request["fresh"] or self.num_calls >= CALLS_PER_CHILD:
                self._end_child()
            if not self.child:
                self._start_child(function)
            reply = self._call(json.dumps(request["argument"]).encode())
            if request["fresh"]:
                self._end_child()
            self.control.send(json.dumps(reply).encode())
        self._end_child()

    def _call(self, argument: bytes) -> dict[str, Any]:
        self.num_calls += 1
        # The processor time of another process, as the kernel numbers such clocks.
        clock = (~self.child << 3) | 2
        start, used = time.monotonic(), time.clock_gettime(clock)
        os.write(self.to_child, struct.pack(">I", len(argument)) + argument)
        poll = select.poll()
        poll.register(self.from_child, select.POLLIN)
        poll.register(self.control.fileno(), select.POLLIN)
        while True:
            ready = [file for file, _ in poll.poll(50)]
            if self.from_child in ready:
                reply = os.read(self.from_child, 1 << 20)
                if reply:
                    return json.loads(reply)
                self._end_child()
                return {"end": "crash"}
            # The host hung up: nobody waits for this call any more.
            late = self.control.fileno() in ready
            late |= time.clock_gettime(clock) - used > self.seconds
            if late or time.monotonic() - start > PATIENCE * self.seconds:
                self._end_child()
                return {"end": "time"}

    def _start_child(self, function: Callable[[Any], Any]) -> None:
        asked, answered = os.pipe(), os.pipe()
        self.num_calls = 0
        self.child = os.fork()
        if self.child == 0:
            try:
                self.control.close()
                os.close(asked[1])
                os.close(answered[0])
                _confine()
                _call_for_ever(function, asked[0], answered[1])
            finally:
                os._exit(1)
        os.close(asked[0])
        os.close(answered[1])
        self.to_child, self.from_child = asked[1], answered[0]

    def _end_child(self) -> None:
        if self.child:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
            os.close(self.to_child)
            os.close(self.from_child)
            self.child = 0


def _confine() -> None:
    confine.die_with_parent()
    confine.drop_rights()
    with open("/proc/self/statm", encoding="ascii") as file:
        own = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    confine.set_limits(
        memory=own + MEMORY, cpu_seconds=1 << 20, file_bytes=0, open_files=64, tasks=None
    )
    if confine.has_landlock():
        confine.restrict_files(["/"], None)
    if confine.has_seccomp():
        confine.apply_filter(confine.build_filter(may_fork=False, apart=False))


def _call_for_ever(function: Callable[[Any], Any], read_from: int, write_to: int) -> None:
    while True:
        (size,) = struct.unpack(">I", _read(read_from, 4))
        argument = json.loads(_read(read_from, size))
        try:
            reply: dict[str, Any] = {"end": "done", "value": function(argument)}
        except MemoryError:
            reply = {"end": "memory"}
        except (
            Exception
        ) as error:  # the boundary to model text, which may provoke anything in a library
            reply = {"end": "crash", "value": f"{type(error).__name__}: {error}"[:500]}
        data = json.dumps(reply).encode()
        if len(data) > MAX_REPLY:
            data = json.dumps({"end": "crash", "value": f"a reply of {len(data)} bytes"}).encode()
        os.write(write_to, data)


def _read(file: int, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = os.read(file, size - len(parts))
        if not part:
            os._exit(0)
        parts += part
    return parts
