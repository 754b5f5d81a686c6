"""Hostile and clumsy programs score 0 and leave nothing behind; honest ones score 1."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from megatron_binac.tasks.sandbox import Isolation, Limits, Sandbox, SandboxError

LIMITS = Limits(cpu_seconds=0.5, wall_seconds=20.0)
TESTS = "assert f(2) == 4\nassert f(3) == 9"


def _build(isolation: Isolation) -> Sandbox:
    sandbox = Sandbox(limits=LIMITS, workers=1, isolation=isolation)
    try:
        sandbox.run("def f(x): return x", "assert f(1) == 1", names=["f"])
    except SandboxError as error:
        if isolation == "namespaces":
            pytest.skip(f"needs user namespaces: {error}")
        raise
    return sandbox


@pytest.fixture(scope="module", params=["namespaces", "limits"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    built = _build(request.param)
    yield built
    built.close()


@pytest.fixture(scope="module")
def apart() -> Iterator[Sandbox]:
    built = _build("namespaces")
    yield built
    built.close()


def children() -> int:
    """Living processes that this one has started, directly or not."""
    count = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            count += process.status() != psutil.STATUS_ZOMBIE
    return count


STEAL = """
import json, os, sys
f = sys._getframe()
while f is not None:
    job = f.f_locals.get('job')
    if isinstance(job, dict) and 'nonce' in job:
        verdict = {'nonce': job['nonce'], 'status': 'passed', 'passed': 2, 'total': 2, 'detail': ''}
        os.write(5, json.dumps(verdict).encode())
        os._exit(0)
    f = f.f_back
"""
"""What would forge a verdict, could a program have the judge run it."""


def message(on: str, *args: str) -> str:
    """A program that asks the judge to call something before it answers."""
    return (
        "import os, struct, json\ndef f(x):\n"
        f"    d = {{'do': 'call', 'on': {on}, 'args': [{', '.join(args)}], 'kwargs': {{}}}}\n"
        "    d = json.dumps(d).encode()\n"
        "    os.write(4, struct.pack('>I', len(d)) + d)\n    return 0"
    )


HOSTILE = {
    # exit codes
    "sys.exit(0) when loaded": "import sys; sys.exit(0)\ndef f(x): return 0",
    "sys.exit(0) when called": "import sys\ndef f(x): sys.exit(0)",
    "os._exit(0) when loaded": "import os; os._exit(0)",
    "os._exit(0) when called": "import os\ndef f(x): os._exit(0)",
    "raise SystemExit": "raise SystemExit",
    "raise KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "exit in a destructor": "import os\nclass D:\n    def __del__(s): os._exit(0)\ndef f(x): D()",
    "abort": "import os\ndef f(x): os.abort()",
    "a segmentation fault": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "atexit that exits": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    # equality and builtins
    "an object equal to all": "class E:\n    def __eq__(s, o): return True\ndef f(x): return E()",
    "an int equal to all": "class E(int):\n    def __eq__(s, o): return True\ndef f(x): return E()",
    "a list of such objects": "class E:\n    __eq__ = lambda s, o: True\ndef f(x): return [E()]",
    "a class that says int": (
        "class E:\n    __class__ = property(lambda s: int)\n    __eq__ = lambda s, o: True\n"
        "def f(x): return E()"
    ),
    "a false numpy scalar": (
        "class E:\n    __module__ = 'numpy'\n    ndim = 0\n    __eq__ = lambda s, o: True\n"
        "    def item(s): return s\ndef f(x): return E()"
    ),
    "a value that is no number": "def f(x): return float('nan')",
    "patched builtins": "import builtins\nbuiltins.AssertionError = Exception\ndef f(x): return 0",
    "a hook for comparisons": "import sys\nsys.settrace(lambda *a: None)\ndef f(x): return 0",
    # forged messages and looking around
    "a printed success": "print('passed OK 1.0 ' * 9)\ndef f(x): return 0",
    "forged answers": (
        "import os, struct, json\nd = json.dumps({'value': 4}).encode()\n"
        "for _ in range(9): os.write(4, struct.pack('>I', len(d)) + d)\ndef f(x): return 0"
    ),
    "garbage on the line": "import os\nos.write(4, b'\\xff' * 100)\ndef f(x): return 0",
    "a closed line": "import os\nos.close(4)\ndef f(x): return 0",
    "frames of the caller": (
        "import sys\ndef f(x):\n    g = sys._getframe()\n    while g:\n"
        "        if 'expected' in g.f_locals: return g.f_locals['expected']\n        g = g.f_back"
    ),
    "everything in memory": (
        "import gc\ndef f(x):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, str) and 'assert f(' in o: return 4"
    ),
    "the judge's own exec": message("{'builtin': 'exec'}", repr(STEAL)),
    "the judge's own getattr": message("{'builtin': 'getattr'}", "{'builtin': 'exec'}", "'x'"),
    "the judge's own int": message("{'builtin': 'int'}", "'4'"),
    "an object that the tests did not pass": message("{'yours': 0}", "'4'"),
    "an operation that is not served": message("{'yours': 0}").replace("'call'", "'getattr'"),
    "another message instead of an answer": (
        'import os, struct\ndef f(x):\n    d = b\'{"ended": 7, "value": 4}\'\n'
        "    os.write(4, struct.pack('>I', len(d)) + d)\n    return 0"
    ),
    "an answer with another tag": (
        'import os, struct\ndef f(x):\n    d = b\'{"value": {"object": 4}}\'\n'
        "    os.write(4, struct.pack('>I', len(d)) + d)\n    return 0"
    ),
    "changes to arguments that are not there": (
        'import os, struct\ndef f(x):\n    d = b\'{"value": 0, "changed": [[7, [4]]]}\'\n'
        "    os.write(4, struct.pack('>I', len(d)) + d)\n    return 0"
    ),
    # never ending
    "an endless loop when loaded": "while True: pass",
    "an endless loop when called": "def f(x):\n    while True: pass",
    "a loop that swallows": (
        "def f(x):\n    while True:\n        try: 1 / 0\n        except BaseException: pass"
    ),
    "endless recursion": "def f(x): return f(x)",
    "endless output": "def f(x):\n    while True: print('x' * 10000)",
    "an endless value": "def f(x):\n    return iter(int, 1)",
    "reading the input": "def f(x): return int(input())",
    # memory
    "10 GB at once": "def f(x): return bytearray(10 << 30)",
    "memory bit by bit": "def f(x):\n    a = []\n    while True: a.append(bytearray(1 << 24))",
    "a long string": "def f(x): return 'a' * (1 << 33)",
    "a big power": "def f(x): return str(9 ** 9 ** 9)",
    "a value without bottom": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "a large value": "def f(x): return [[]] * (1 << 23)",
    "many large values": "def f(x):\n    while True: yield 'x' * (1 << 22)",
    "a deep value": "def f(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
    # files
    "a file outside": "open('/etc/binac-was-here', 'w')",
    "a file in the home": "import os\nopen(os.path.expanduser('~/binac-was-here'), 'w')",
    "a file in the library": "open(__import__('os').__file__, 'a')",
    "a full disk": "def f(x):\n    with open('big', 'wb') as h: h.write(bytes(100 << 20))",
    "the machine's users": "def f(x): return open('/etc/shadow').read()",
    "a device": "import os\nos.mknod('/tmp/d', 0o600 | 0o060000, os.makedev(8, 0))",
    # network
    "a socket": "import socket\ndef f(x): socket.socket()",
    "a web page": "import urllib.request\ndef f(x): urllib.request.urlopen('http://127.0.0.1')",
    # processes
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "a sleeping child": "import subprocess\ndef f(x): subprocess.Popen(['sleep', '1000'])",
    "a shell": "import os\ndef f(x): return os.system('echo hello') or 1 / 0",
    "another program instead": "import os\nos.execv('/bin/true', ['true'])",
    "threads without end": (
        "import threading, time\ndef f(x):\n"
        "    while True: threading.Thread(target=time.sleep, args=(1000,)).start()"
    ),
    "a signal to everybody": "import os\ndef f(x): os.kill(-1, 9)",
    "a signal to the parent": "import os\ndef f(x): os.kill(os.getppid() or -1, 9)",
    # the kernel
    "new namespaces": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): 1 / 0",
    "a mount": "import ctypes\nif ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, 0): 1 / 0",
    "root again": "import os\nos.setuid(0)\nos.chroot('/tmp')",
    # clumsy
    "no program": "def f(:",
    "no function": "def g(x): return x * x",
    "no value": "def f(x): pass",
    "another number of arguments": "def f(): return 4",
    "a null character": "def f(x): return 4\x00",
    "a strange exception": (
        "class E(Exception):\n    def __str__(self): raise self\ndef f(x): raise E"
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_program_scores_nothing_and_leaves_nothing(sandbox: Sandbox, kind: str) -> None:
    before = children()
    verdict = sandbox.run(HOSTILE[kind], TESTS, names=["f"])
    assert verdict.status != "passed"
    assert children() <= before
    assert not os.path.exists("/etc/binac-was-here")
    assert not os.path.exists(os.path.expanduser("~/binac-was-here"))
    assert sandbox.run("def f(x): return x * x", TESTS, names=["f"]).status == "passed"


def test_the_status_says_what_happened(apart: Sandbox) -> None:
    expected = {
        "sys.exit(0) when loaded": "ended",
        "os._exit(0) when called": "ended",
        "an object equal to all": "failed",
        "an endless loop when called": "cpu",
        "endless output": "output",
        "endless recursion": "error",
        "10 GB at once": "error",
        "no program": "syntax",
        "no function": "error",
        "no value": "failed",
    }
    found = {k: apart.run(HOSTILE[k], TESTS, names=["f"]).status for k in expected}
    assert found == expected


def test_sleeping_ends_at_the_wall_limit(apart: Sandbox) -> None:
    limits = Limits(cpu_seconds=5.0, wall_seconds=1.0)
    program = "import time\ndef f(x): time.sleep(1000)"
    verdict = apart.run(program, TESTS, names=["f"], limits=limits)
    assert verdict.status == "wall"
    assert 1.0 <= verdict.wall_seconds < 15.0
    assert verdict.cpu_seconds < 1.0


@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
def test_many_processes_end_with_their_program(isolation: Isolation) -> None:
    limits = Limits(cpu_seconds=2.0, wall_seconds=10.0, processes=8)
    sandbox = Sandbox(limits=limits, workers=1, isolation=isolation)
    try:
        sandbox.run("def f(x): return x", "assert f(1) == 1", names=["f"])
    except SandboxError as error:
        pytest.skip(f"cannot bound processes here: {error}")
    before = children()
    daemon = (
        "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork() == 0:\n            time.sleep(1000)\n        os._exit(0)\n"
        "    return x * x"
    )
    assert sandbox.run(daemon, TESTS, names=["f"]).status == "passed"
    assert children() == before
    bomb = "import os\ndef f(x):\n    while True: os.fork()"
    assert sandbox.run(bomb, TESTS, names=["f"]).status != "passed"
    assert children() == before
    sandbox.close()


def test_programs_see_no_host(apart: Sandbox) -> None:
    program = (
        "import os\ndef f(x):\n"
        "    return [dict(os.environ), os.path.exists('/proc'), os.path.exists('/etc/passwd'),\n"
        "            os.listdir('.'), os.getcwd(), os.getuid() != 0]"
    )
    tests = "assert f(0) == [{}, False, False, [], '/tmp', True]"
    assert apart.run(program, tests, names=["f"]).status == "passed"


def test_a_file_is_gone_for_the_next_program(sandbox: Sandbox) -> None:
    write = "def f(x):\n    open('left', 'w').write('x')\n    return open('left').read()"
    assert sandbox.run(write, "assert f(0) == 'x'", names=["f"]).status == "passed"
    read = "import os\ndef f(x): return os.path.exists('left')"
    assert sandbox.run(read, "assert f(0) is False", names=["f"]).status == "passed"


def test_memory_holds_no_word_of_the_tests(apart: Sandbox) -> None:
    # The word is made when the program runs, so that its own constants do not hold it.
    program = (
        "import gc\ndef f(x):\n    word = ''.join(reversed('TERCES'))\n"
        "    return any(isinstance(o, (str, bytes)) and len(o) > 6 and word in str(o)\n"
        "        for c in gc.get_objects() for o in gc.get_referents(c))"
    )
    tests = "secret = 'SECRET-WORD-OF-THE-TESTS'\nassert f(0) is False"
    assert apart.run(program, tests, names=["f"]).status == "passed"


VALUES = [
    "None", "True", "False", "0", "-3", "2**100", "-(2**64)", "1.5", "-0.0", "1e300",
    "float('inf')", "3 + 4j", "'text'", "'\\ud800'", "''", "b'\\x00\\xff'", "bytearray(b'ab')",
    "[]",
    "[1, [2, 'x']]",
    "(1, 2)", "((),)", "{1: 'a', (2, 3): [4]}", "{1, 2}", "frozenset({1})", "range(2, 9, 3)",
    "collections.Counter('aab')", "collections.OrderedDict([(2, 1), (1, 2)])",
    "collections.deque([1, 2])", "decimal.Decimal('0.10')", "fractions.Fraction(1, 3)",
    "datetime.date(2024, 2, 29)", "datetime.timedelta(days=1, seconds=2)", "int", "len",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_values_go_there_and_back(apart: Sandbox, value: str) -> None:
    setup = "import collections, datetime, decimal, fractions"
    tests = (
        f"v = {value}\nassert f(v) == v\nassert type(f(v)) is type(v)\nassert repr(f(v)) == repr(v)"
    )
    verdict = apart.run("def f(x): return x", tests, names=["f"], setup=setup)
    assert verdict.status == "passed", verdict.detail


CONVERSATIONS = {
    "an object with attributes": (
        "class Node:\n    def __init__(s, v): s.v, s.left = v, None\n"
        "def depth(n): return 0 if n is None else 1 + depth(n.left)",
        "r = Node(1)\nr.left = Node(2)\nassert depth(r) == 2\nassert r.left.v == 2\nassert r == r",
        ["Node", "depth"],
    ),
    "a generator": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]", ["f"]),
    "a function as argument": (
        "def f(g, x): return g(g(x))",
        "assert f(lambda a: a + 1, 1) == 3\nassert f(abs, -2) == 2",
        ["f"],
    ),
    "an argument changed in place": (
        "def f(a): a.sort()\ndef g(d): d['k'] = 1",
        "a = [3, 1]\nf(a)\nassert a == [1, 3]\nd = {}\ng(d)\nassert d == {'k': 1}",
        ["f", "g"],
    ),
    "an exception": (
        "def f(x): raise KeyError(x)",
        "try:\n    f('k')\nexcept KeyError:\n    ok = True\nassert ok",
        ["f"],
    ),
    "a constant": ("LIMIT = (1, 2)\ndef f(): return LIMIT", "assert f() == LIMIT", ["f", "LIMIT"]),
    "keyword arguments": ("def f(a, *, b=2): return a - b", "assert f(a=5, b=1) == 4", ["f"]),
    "an object that is long, full and printed": (
        "class C:\n    def __len__(s): return 3\n    def __contains__(s, x): return x == 1\n"
        "    def __getitem__(s, i): return i * 2\n    def __str__(s): return 'C!'\n"
        "def f(): return C()",
        "c = f()\nassert len(c) == 3 and 1 in c and 2 not in c\n"
        "assert c[4] == 8 and str(c) == 'C!' and c",
        ["f"],
    ),
    "a name of the language": ("def sum(a, b): return a * b", "assert sum(2, 5) == 10", ["sum"]),
}


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_what_tests_may_do_with_a_program(apart: Sandbox, kind: str) -> None:
    program, tests, names = CONVERSATIONS[kind]
    verdict = apart.run(program, tests, names=names)
    assert verdict.status == "passed", verdict.detail


def test_a_program_cannot_reach_into_what_the_tests_pass(apart: Sandbox) -> None:
    program = "def f(g): return g.__globals__"
    tests = "expected = 7\nassert f(lambda: 0) is not None"
    verdict = apart.run(program, tests, names=["f"])
    assert verdict.status == "error"


@pytest.mark.parametrize("name", ["exec", "eval", "getattr", "type", "__import__", "open"])
def test_a_program_cannot_hand_the_tests_a_function_that_runs_code(
    apart: Sandbox, name: str
) -> None:
    """The tests' own function calls what it is given, and the judge is where it runs."""
    program = (
        "import os, struct, json\ndef f(g):\n"
        f"    d = {{'do': 'call', 'on': {{'yours': 0}}, 'args': [{{'builtin': {name!r}}}, "
        f"{STEAL!r}], 'kwargs': {{}}}}\n"
        "    d = json.dumps(d).encode()\n"
        "    os.write(4, struct.pack('>I', len(d)) + d)\n    return 0"
    )
    tests = "assert f(lambda g, x: g(x)) == 4\nassert False"
    verdict = apart.run(program, tests, names=["f"])
    assert (verdict.status, verdict.passed) == ("failed", 0)


def test_functions_of_the_language_go_over_by_name(apart: Sandbox) -> None:
    program = "def f(g, *a): return g(*a)\ndef key(): return len"
    tests = (
        "assert f(max, 1, 3) == 3\nassert f(sorted, 'ba') == ['a', 'b']\n"
        "assert sorted(['aa', 'b'], key=key()) == ['b', 'aa']\n"
        "try:\n    f(ValueError)\nexcept ValueError: pass\nassert key() is len"
    )
    verdict = apart.run(program, tests, names=["f", "key"])
    assert verdict.status == "passed", verdict.detail
    assert apart.run(program, "f(exec, '1')", names=["f"]).status == "error"


def test_partial_credit_counts_asserts(apart: Sandbox) -> None:
    program = "def f(x):\n    if x == 3: 1 / 0\n    return x * x"
    verdict = apart.run(program, f"{TESTS}\nassert f(4) == 16", names=["f"], partial=True)
    assert (verdict.status, verdict.passed, verdict.total) == ("error", 2, 3)
    verdict = apart.run(program, f"{TESTS}\nassert f(4) == 16", names=["f"])
    assert verdict.passed == 1


def test_what_was_printed_is_kept(apart: Sandbox) -> None:
    verdict = apart.run("print('hello')\ndef f(x): 1 / 0", TESTS, names=["f"])
    assert verdict.printed == "hello\n"
    assert "ZeroDivisionError" in verdict.detail


def test_numbers_drawn_and_order_of_sets_are_the_same_every_time(apart: Sandbox) -> None:
    program = "import random\ndef f(): return [random.random(), list({'a', 'b', 'c', 'd', 'e'})]"
    first = apart.run(f"{program}\nprint(f())", "assert f()", names=["f"]).printed
    other = Sandbox(limits=LIMITS, workers=1, isolation="namespaces")
    second = other.run(f"{program}\nprint(f())", "assert f()", names=["f"]).printed
    other.close()
    assert first == second != ""


def test_a_broken_test_is_no_fault_of_the_program(apart: Sandbox) -> None:
    with pytest.raises(SandboxError, match="no verdict"):
        apart.run("def f(x): return x", "assert f(", names=["f"])


def test_many_at_once_with_a_bounded_number_of_processes() -> None:
    sandbox = Sandbox(limits=LIMITS, workers=2)
    baseline = children()
    counts: list[int] = []

    def run(place: int) -> str:
        counts.append(children() - baseline)
        program = "def f(x): return x * x" if place % 2 else "import os; os._exit(0)"
        return sandbox.run(program, TESTS, names=["f"]).status

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(run, range(24)))
    assert found == ["ended", "passed"] * 12
    # Two runners and their parents, and for each a program and a judge.
    assert max(counts) <= 8
    sandbox.close()
    assert children() == baseline


def test_a_lost_runner_is_an_error_and_the_next_one_works() -> None:
    sandbox = Sandbox(limits=LIMITS, workers=1)
    assert sandbox.run("def f(x): return x * x", TESTS, names=["f"]).status == "passed"
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(
            sandbox.run, "import time\ndef f(x): time.sleep(1000)", TESTS, names=["f"]
        )
        time.sleep(0.5)
        for process in psutil.Process().children():
            process.kill()
        with pytest.raises(SandboxError):
            running.result()
    assert sandbox.run("def f(x): return x * x", TESTS, names=["f"]).status == "passed"
    sandbox.close()
    assert children() == 0


def test_values_that_break_the_judge_are_wrong_and_not_failed(apart: Sandbox) -> None:
    program = "def f():\n    while True: yield 'x' * (1 << 20)"
    limits = Limits(cpu_seconds=3.0, wall_seconds=60.0)
    verdict = apart.run(program, "assert list(f()) == []", names=["f"], limits=limits)
    assert verdict.status in ("error", "cpu")


def test_an_interrupted_run_does_not_mix_up_verdicts(apart: Sandbox) -> None:
    sandbox = Sandbox(limits=LIMITS, workers=1, isolation="namespaces")
    with pytest.raises(RuntimeError, match="interrupted"), sandbox._pool.worker() as worker:
        sandbox_line = worker.line
        raise RuntimeError("interrupted")
    assert sandbox_line.fileno() == -1
    assert sandbox.run("def f(x): return x * x", TESTS, names=["f"]).status == "passed"
    sandbox.close()


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="memory_mb is 0, expected above 0"):
        Limits(memory_mb=0)
    with pytest.raises(ValueError, match="got 0 workers"):
        Sandbox(workers=0)
