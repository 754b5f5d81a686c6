"""Inside the sandbox: a warm interpreter that forks one program and one judge for each job.

    host ---- job ----> judge <---- calls and values ----> program
      ^                   |
      +----- verdict -----+        the runner watches both, and kills what is left

The program never sees its tests. It gets calls with arguments and gives values back; the judge,
another process, runs the tests on what arrives, and only plain data arrives: numbers, text,
containers. So there is nothing to patch, no expected value to find, and no exit code or printed
line that means success: success is a message with the job's secret word from a process that the
program cannot reach.

Started by `sandbox.py` as a script of its own: standard library only.
"""

from __future__ import annotations

import ast
import builtins
import collections
import datetime
import decimal
import fcntl
import fractions
import gc
import importlib
import importlib.util
import io
import json
import operator
import os
import random
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM_NAME = "solution"
"""What a program's __name__ is: not __main__, so that a block for scripts does not run."""
MAX_FRAME = 16 << 20
"""Longest message between program and judge, bytes."""
NO_MEMORY = 3
"""Exit code of a judge that ran out of memory."""
TAIL = 2000
"""Bytes of a program's output that are kept."""


class ProgramEnded(BaseException):
    """The program is gone or broke the protocol; no `except Exception` of a test swallows it."""


class ProgramError(Exception):
    """An exception of a class that only the program knows."""


# Values between the two


class Remote:
    """An object that stays in the program. Its own `__eq__` is not asked: it equals itself only."""

    def __init__(self, wire: Wire, place: int) -> None:
        object.__setattr__(self, "_wire", wire)
        object.__setattr__(self, "_place", place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wire.ask("call", self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._wire.ask("getattr", self, (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self._wire.ask("setattr", self, (name, value))

    def __iter__(self) -> Any:
        return self._wire.ask("iter", self)

    def __next__(self) -> Any:
        return self._wire.ask("next", self)

    def __len__(self) -> int:
        return self._wire.ask("len", self)

    def __getitem__(self, key: Any) -> Any:
        return self._wire.ask("getitem", self, (key,))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._wire.ask("setitem", self, (key, value))

    def __contains__(self, item: Any) -> bool:
        return self._wire.ask("contains", self, (item,))

    def __bool__(self) -> bool:
        return self._wire.ask("bool", self)

    def __str__(self) -> str:
        return self._wire.ask("str", self)

    def __repr__(self) -> str:
        return "<an object of the program>"


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "iter": iter,
    "next": next,
    "len": len,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "contains": operator.contains,
    "bool": bool,
    "str": str,
}
SEQUENCES: dict[str, type] = {
    kind.__name__: kind for kind in (tuple, set, frozenset, collections.deque)
}
MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
    "defaultdict": lambda pairs: collections.defaultdict(None, pairs),
}
TEXTS: dict[str, Callable[[str], Any]] = {
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "date": datetime.date.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "time": datetime.time.fromisoformat,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "int": lambda text: int(text, 16),
}


SHARED_BUILTINS = frozenset({
    "abs", "all", "any", "ascii", "bin", "bool", "bytearray", "bytes", "chr", "complex", "dict",
    "divmod", "enumerate", "filter", "float", "frozenset", "hex", "int", "iter", "len", "list",
    "map", "max", "min", "next", "oct", "ord", "pow", "range", "repr", "reversed", "round", "set",
    "slice", "sorted", "str", "sum", "tuple", "zip",
})  # fmt: skip
"""Functions of the language that go over the wire by name. None of them, called in the judge with
whatever a program likes, runs code or reaches into an object: eval, type and getattr do."""


class Wire:
    """Calls in both directions over two pipes; plain values are copied, other objects stay."""

    def __init__(
        self, read_from: int, write_to: int, *, serves: set[str], is_judge: bool = False
    ) -> None:
        """`is_judge`: the other side is not trusted; it may call what it was given and no more."""
        self.read_from, self.write_to, self.serves = read_from, write_to, serves
        self.is_judge = is_judge
        self.held: list[Any] = []
        """Objects that the other side knows by their place here."""
        self.places: dict[int, int] = {}
        """id() of such an object -> its place."""

    def send(self, message: Any) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        view = memoryview(struct.pack(">I", len(data)) + data)
        try:
            while view:
                view = view[os.write(self.write_to, view) :]
        except BrokenPipeError as error:
            raise ProgramEnded("closing its ears") from error

    def receive(self) -> Any:
        """The next message; ProgramEnded where there is none to come."""
        (size,) = struct.unpack(">I", self._read(4))
        if size > MAX_FRAME:
            raise ValueError(f"a message of {size} bytes is longer than {MAX_FRAME}")
        return json.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = os.read(self.read_from, min(size - len(parts), 1 << 20))
            if not part:
                raise ProgramEnded("falling silent")
            parts += part
        return bytes(parts)

    def ask(self, name: str, on: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Have the other side do something, serving its calls meanwhile; exceptions come back."""
        sent = [self.encode(value) for value in args]
        named = {key: self.encode(value) for key, value in (kwargs or {}).items()}
        self.send({"do": name, "on": self.encode(on), "args": sent, "kwargs": named})
        while True:
            reply = self.receive()
            if "do" in reply:
                self.serve(reply)
                continue
            # What the call did to its arguments shows on this side too.
            for place, changed in reply.get("changed", ()):
                _overwrite(args[place], self.decode(changed))
            if "ended" in reply:
                raise ProgramEnded(str(reply["ended"]))
            if "error" in reply:
                kind, text = reply["error"]
                raise _exception(kind)(text)
            return self.decode(reply["value"])

    def serve(self, message: Any) -> None:
        """Do what the other side asks for, and answer."""
        try:
            if message["do"] not in self.serves:
                raise PermissionError(f"{message['do']} is not served here")
            if self.is_judge and set(message["on"]) != {"yours"}:
                raise PermissionError("only what the tests have passed can be called here")
            args = [self.decode(value) for value in message["args"]]
            kwargs = {key: self.decode(value) for key, value in message["kwargs"].items()}
            value = OPERATIONS[message["do"]](self.decode(message["on"]), *args, **kwargs)
            reply: dict[str, Any] = {"value": self.encode(value)}
            changed = [
                [place, now]
                for place, (before, arg) in enumerate(zip(message["args"], args, strict=True))
                if type(arg) in (list, dict, set, bytearray) and (now := self.encode(arg)) != before
            ]
            if changed:
                reply["changed"] = changed
        except Exception as error:
            reply = {"error": [type(error).__name__, _text(error)]}
        except ProgramEnded:
            raise
        except BaseException as error:
            reply = {"ended": type(error).__name__}
        self.send(reply)

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -(1 << 62) < value < 1 << 62 else {"int": hex(value)}
        if kind is list:
            return [self.encode(item) for item in value]
        if kind.__name__ in SEQUENCES and kind is SEQUENCES[kind.__name__]:
            return {kind.__name__: [self.encode(item) for item in value]}
        if kind in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
            pairs = [[self.encode(key), self.encode(item)] for key, item in dict.items(value)]
            return {kind.__name__: pairs}
        if kind in (bytes, bytearray):
            return {kind.__name__: value.hex()}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is range:
            return {"range": [self.encode(n) for n in (value.start, value.stop, value.step)]}
        if kind in (decimal.Decimal, fractions.Fraction):
            return {kind.__name__: str(value)}
        if kind in (datetime.date, datetime.datetime, datetime.time):
            return {kind.__name__: value.isoformat()}
        if kind is datetime.timedelta:
            return {"timedelta": [value.days, value.seconds, value.microseconds]}
        if kind is Remote and value._wire is self:
            return {"yours": value._place}
        return self._encode_other(value)

    def _encode_other(self, value: Any) -> Any:
        if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            return self.encode(value.item())
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            if _is_shared(name):
                return {"builtin": name}
            if self.is_judge:
                raise TypeError(f"{name} of the tests is not handed to a program")
        bases: tuple[Any, ...] = (str, int, float, list, tuple, dict, set, frozenset, bytes)
        for base in bases:
            if isinstance(value, base):
                return self.encode(base(value))
        place = self.places.setdefault(id(value), len(self.held))
        if place == len(self.held):
            self.held.append(value)
        return {"mine": place}

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((tag, content),) = value.items()
        if tag in SEQUENCES:
            return SEQUENCES[tag](self.decode(item) for item in content)
        if tag in MAPPINGS:
            return MAPPINGS[tag]([(self.decode(key), self.decode(item)) for key, item in content])
        if tag in TEXTS:
            return TEXTS[tag](content)
        if tag == "complex":
            return complex(*content)
        if tag == "range":
            return range(*(self.decode(n) for n in content))
        if tag == "timedelta":
            return datetime.timedelta(*content)
        if tag == "builtin" and _is_shared(content):
            return getattr(builtins, content)
        if tag == "yours":
            return self.held[content]
        if tag == "mine":
            return Remote(self, content)
        raise ValueError(f"unknown tag {tag!r}")


def _is_shared(name: str) -> bool:
    if name in SHARED_BUILTINS:
        return True
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, Exception)


def _overwrite(target: Any, value: Any) -> None:
    if type(target) in (list, bytearray):
        target[:] = value
    elif type(target) in (dict, set):
        target.clear()
        target.update(value)


def _exception(kind: Any) -> type[Exception]:
    found: Any = getattr(builtins, str(kind), None)
    is_one = isinstance(found, type) and issubclass(found, Exception)
    # Some exceptions of the standard library want more than a message.
    return (
        found if is_one and not issubclass(found, UnicodeError | ExceptionGroup) else ProgramError
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except Exception:
        return "an exception without text"


# The program's side


def run_program(wire: Wire) -> None:
    """Load the program that the judge sends, then serve its calls until the pipe ends."""
    module = types.ModuleType(PROGRAM_NAME)
    sys.modules[PROGRAM_NAME] = module

    def load(_: Any, code: str) -> None:
        exec(compile(code, f"<{PROGRAM_NAME}>", "exec"), module.__dict__)

    # A name is looked up in the module, where the program may have put anything.
    OPERATIONS.update(load=load, name=lambda _, name: getattr(module, name))
    wire.send("ready")
    while True:
        wire.serve(wire.receive())


# The judge's side


def judge(wire: Wire, job: dict[str, Any]) -> dict[str, Any]:
    """Run the tests of a job against the program behind `wire`; status as in `sandbox.Verdict`."""
    lines = ast.parse(job["tests"]).body
    total = sum(isinstance(line, ast.Assert) for line in lines)
    verdict = {"nonce": job["nonce"], "status": "broken", "passed": 0, "total": total, "detail": ""}
    space: dict[str, Any] = {"__name__": "tests"}
    exec(compile(job["setup"], "<setup>", "exec"), space)
    try:
        if wire.receive() != "ready":
            return verdict
    except (ProgramEnded, ValueError):
        return {**verdict, "detail": "the program's process could not be confined"}
    try:
        wire.ask("load", None, (job["program"],))
        space.update((name, wire.ask("name", None, (name,))) for name in job["names"])
        return _run_tests(lines, space, verdict, stop=not job["partial"])
    except ProgramEnded as error:
        return {**verdict, "status": "ended", "detail": f"the program ended by {error}"}
    except SyntaxError as error:
        return {**verdict, "status": "syntax", "detail": _text(error)}
    except Exception as error:
        return {**verdict, "status": "error", "detail": f"{type(error).__name__}: {_text(error)}"}


def _run_tests(
    lines: list[ast.stmt], space: dict[str, Any], verdict: dict[str, Any], *, stop: bool
) -> dict[str, Any]:
    """Statement by statement: an assert that fails costs itself, any other failure ends it all."""
    verdict["status"] = "passed"
    for line in lines:
        try:
            exec(compile(ast.Module([line], []), "<tests>", "exec"), space)
            verdict["passed"] += isinstance(line, ast.Assert)
        except (Exception, ProgramEnded) as error:
            source = ast.unparse(line).partition("\n")[0][:300]
            verdict["status"] = "ended" if isinstance(error, ProgramEnded) else "error"
            if isinstance(error, AssertionError):
                verdict["status"] = "failed"
            verdict["detail"] = f"{type(error).__name__} {_text(error)} in {source}"
            if stop or verdict["status"] == "ended" or not isinstance(line, ast.Assert):
                break
    return verdict


# The runner


class Runner:
    """Serves jobs one after the other until the host hangs up."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.confine: Any = _load_beside("confine")
        self.limits: dict[str, Any] = options["limits"]
        self.control = socket.socket(fileno=options["control"])
        self.apart = options["isolation"] == "namespaces"
        self.readable: list[str] = options["paths"]
        self.own_namespace = -1
        self.drops_user = False
        self.num_others = 0
        """Tasks of the programs' user that are not ours; without a namespace they count too."""
        os.environ.clear()
        sys.path.extend(options["site"])
        for name in options["preload"]:
            importlib.import_module(name)
        with open("/proc/self/statm", encoding="ascii") as file:
            own = int(file.read().split()[0]) * resource.getpagesize()
        self.memory = own + self.limits["memory_bytes"]
        self.holds = ["rlimits"]

    def start(self) -> None:
        """Confine this process; returns in the one that serves."""
        confine = self.confine
        if self.apart:
            proc = confine.enter_private_root(self.readable)
            init = os.fork()
            if init:
                self.control.close()
                os.waitpid(init, 0)
                os._exit(0)
            confine.die_with_parent()
            self.own_namespace = confine.own_process_namespace(proc)
            self.holds.append("namespaces")
        else:
            confine.call("prctl", confine.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            # What runs here as the same user must not read this process's memory.
            confine.call("prctl", confine.PR_SET_DUMPABLE, 0, 0, 0, 0)
            self.drops_user = os.geteuid() == 0 and self._nobody_can_import()
            user = confine.NOBODY if self.drops_user else os.geteuid()
            if user == 0 and self.limits["processes"] > 1:
                raise OSError("no limit on processes binds root here; set processes to 1")
            self.num_others = _num_tasks(user)
            self.holds += ["user nobody"] * self.drops_user
            self.holds += ["landlock"] * confine.has_landlock()
        self.holds += ["seccomp"] * confine.has_seccomp()
        gc.collect()
        gc.freeze()

    def _nobody_can_import(self) -> bool:
        child = os.fork()
        if child == 0:
            try:
                os.setresuid(*[self.confine.NOBODY] * 3)
                os._exit(0 if os.access(os.__file__, os.R_OK) else 1)
            finally:
                os._exit(1)
        return os.waitpid(child, 0)[1] == 0

    def serve(self) -> None:
        self.control.send(json.dumps({"holds": self.holds}).encode())
        while True:
            message, files, _, _ = socket.recv_fds(self.control, 4096, 1)
            if not message:
                return
            header = json.loads(message)
            status = self._run(files[0], header["wall_seconds"], header["cpu_seconds"])
            if status["ended"] == "hung up":
                return
            self.control.send(json.dumps(status).encode())

    def _run(self, job: int, wall_seconds: float, cpu_seconds: float) -> dict[str, Any]:
        folder = "/tmp"
        if self.apart:
            self.confine.mount_tmp(self.limits["file_bytes"])
        else:
            folder = tempfile.mkdtemp(prefix="binac-sandbox-")
        if self.drops_user:
            os.chown(folder, self.confine.NOBODY, self.confine.NOBODY)
        asked, answered, printed = os.pipe(), os.pipe(), os.pipe()
        # Forked before anybody in here has read the job: its memory holds nothing of the tests.
        program = self.confine.fork_apart(self.own_namespace) if self.apart else os.fork()
        if program == 0:
            files = asked[0], answered[1], printed[1]
            _leave(lambda: self._be_program(*files, folder, cpu_seconds))
        judge = os.fork()
        if judge == 0:
            _leave(lambda: self._be_judge(job, answered[0], asked[1], cpu_seconds))
        for file in (job, *asked, *answered, printed[1]):
            os.close(file)
        status = self._watch(judge, program, printed[0], wall_seconds, cpu_seconds)
        os.close(printed[0])
        self._reap(judge, program, status)
        if self.apart:
            self.confine.unmount_tmp()
        else:
            shutil.rmtree(folder, ignore_errors=True)
        return status

    def _watch(
        self, judge: int, program: int, printed: int, wall_seconds: float, cpu_seconds: float
    ) -> dict[str, Any]:
        """Wait until the judge is done or a limit is reached; how it ended and what was printed."""
        start = time.monotonic()
        # The processor time of another process, as the kernel numbers such clocks.
        clock = (~program << 3) | 2
        watched = os.pidfd_open(judge)
        poll = select.poll()
        for file in (watched, printed, self.control.fileno()):
            poll.register(file, select.POLLIN)
        tail, num_printed, ended = b"", 0, ""
        while not ended:
            left = start + wall_seconds - time.monotonic()
            for file, _ in poll.poll(max(0.0, min(left, 0.05)) * 1000):
                if file == watched:
                    ended = ended or "done"
                elif file == printed:
                    part = os.read(printed, 1 << 16)
                    num_printed += len(part)
                    tail = (tail + part)[-TAIL:]
                    if not part:
                        poll.unregister(printed)
                    if num_printed > self.limits["output_bytes"]:
                        ended = "output"
                else:
                    ended = "hung up"
            if not ended and left <= 0:
                ended = "wall"
            if not ended and _clock(clock) > cpu_seconds:
                ended = "cpu"
        os.close(watched)
        wall = time.monotonic() - start
        return {"ended": ended, "wall_seconds": wall, "printed": tail.decode(errors="replace")}

    def _reap(self, judge: int, program: int, status: dict[str, Any]) -> None:
        if not self.apart:
            _kill(-program)
        for child in (program, judge):
            _kill(child)
        usage = os.wait4(program, 0)[2]
        status["cpu_seconds"] = usage.ru_utime + usage.ru_stime
        status["judge_exit"] = os.waitstatus_to_exitcode(os.waitpid(judge, 0)[1])
        while not self.apart:
            # Children of the program that left its group are ours now.
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    for line in Path("/proc/self/task").glob("*/children"):
                        for child in line.read_text(encoding="ascii").split():
                            _kill(int(child))
                    time.sleep(0.001)
            except ChildProcessError:
                return

    def _be_program(
        self, read_from: int, write_to: int, printed: int, folder: str, cpu_seconds: float
    ) -> None:
        _take_files(read_from, write_to, printed)
        # By lines, so that what a killed program said before is there.
        raw = io.BufferedWriter(io.FileIO(1, "w"))
        sys.stdout = io.TextIOWrapper(raw, encoding="utf-8", errors="replace", line_buffering=True)
        os.chdir(folder)
        tempfile.tempdir = folder
        # A program's draws are the same in every run; a fork seeds anew by itself.
        random.seed(0)
        sys.argv = [PROGRAM_NAME]
        may_fork = self.limits["processes"] > 1
        self._confine(folder, cpu_seconds, may_fork=may_fork, apart=self.apart)
        run_program(Wire(3, 4, serves=set(OPERATIONS) | {"load", "name"}))

    def _be_judge(self, job: int, read_from: int, write_to: int, cpu_seconds: float) -> None:
        null = os.open("/dev/null", os.O_WRONLY)
        _take_files(read_from, write_to, null, job)
        self._confine(None, cpu_seconds, may_fork=False, apart=False)
        parts = []
        while part := os.read(5, 1 << 20):
            parts.append(part)
        wire = Wire(3, 4, serves={"call"}, is_judge=True)
        verdict = judge(wire, json.loads(b"".join(parts)))
        socket.socket(fileno=5).sendall(json.dumps(verdict).encode())

    def _confine(
        self, folder: str | None, cpu_seconds: float, *, may_fork: bool, apart: bool
    ) -> None:
        confine, limits = self.confine, self.limits
        if self.drops_user:
            os.setgroups([])
            os.setresgid(*[confine.NOBODY] * 3)
            os.setresuid(*[confine.NOBODY] * 3)
        confine.drop_rights()
        if "landlock" in self.holds:
            confine.restrict_files(self.readable, folder)
        confine.set_limits(
            memory=self.memory,
            # Behind the runner's own clock, which is finer.
            cpu_seconds=int(cpu_seconds) + 2,
            file_bytes=limits["file_bytes"],
            open_files=limits["open_files"],
            # Runner and judge are two of them.
            tasks=self.num_others + limits["processes"] + limits["threads"] + 4,
        )
        confine.die_with_parent()
        if "seccomp" in self.holds:
            confine.apply_filter(confine.build_filter(may_fork=may_fork, apart=apart))


def _num_tasks(user: int) -> int:
    """Processes and threads of a user on this machine."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == user:
                total += sum(1 for _ in (folder / "task").iterdir())
        except OSError:
            continue
    return total


def _take_files(*files: int) -> None:
    """Keep `files` alone: two as 3 and 4, the third as output, a fourth as 5; no input."""
    os.setpgid(0, 0)
    null = os.open("/dev/null", os.O_RDONLY)
    # First out of the way of the numbers that they are to have.
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 20) for file in (null, *files)]
    places = [0, 3, 4, 1, 5][: len(high)]
    for file, place in zip(high, places, strict=True):
        os.dup2(file, place)
    os.dup2(1, 2)
    os.closerange(max(places) + 1, 1 << 16)


def _leave(action: Callable[[], None]) -> None:
    """Do `action` as the whole life of this process."""
    code = 1
    try:
        action()
        code = 0
    except ProgramEnded:
        code = 0
    except MemoryError:
        # A program's values can be too much even for the words about it.
        code = NO_MEMORY
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {_text(error)}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def _clock(clock: int) -> float:
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def _load_beside(name: str) -> types.ModuleType:
    """A module from this folder, by path: the folder itself must not be on sys.path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    options = json.loads(sys.argv[1])
    try:
        runner = Runner(options)
        runner.start()
    except OSError as error:
        control = socket.socket(fileno=options["control"])
        control.send(json.dumps({"error": str(error)}).encode())
        return
    runner.serve()


if __name__ == "__main__":
    main()
