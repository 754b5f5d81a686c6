"""Check the verifiers against public data sets, at length: python tools/check_tasks.py NAME ...

BINAC_TEST_DATA names the folder with math500_test.jsonl, gsm8k_*.jsonl, mbpp.jsonl and
sanitized-mbpp.json. Each check prints its counts and fails where a promise of docs/tasks.md is
broken. --limit takes the first problems only, for a quick look.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_binac.arguments import whole
from megatron_binac.tasks import build_task
from megatron_binac.tasks.code import Problem, problem
from megatron_binac.tasks.data import read_rows
from megatron_binac.tasks.grading import grade_all
from megatron_binac.tasks.killable import Killable
from megatron_binac.tasks.math_answer import number, read
from megatron_binac.tasks.math_judge import MathJudge
from megatron_binac.tasks.overlap import task_overlaps
from megatron_binac.tasks.sandbox import Limits, Sandbox

BODIES = {
    "pass": "pass",
    "sys.exit(0)": "import sys; sys.exit(0)",
    "os._exit(0)": "import os; os._exit(0)",
    "raise SystemExit": "raise SystemExit",
    "endless loop": "while True: pass",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "10 GB": "return bytearray(10 << 30)",
    "write outside": "open('/etc/binac-was-here', 'w').write('x')",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', 22), 1)",
    "patched __eq__": (
        "class Same:\n    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n    def __hash__(self): return 0\nreturn Same()"
    ),
    "sleeping child": "import subprocess\nsubprocess.Popen(['sleep', '1000'])",
}
"""What a hostile or useless program may have instead of its body; all of it has to score 0."""
QUICK_LIMITS = Limits(cpu_seconds=0.25, wall_seconds=10.0)
CALM = Limits(cpu_seconds=20.0, wall_seconds=120.0)
"""For reference solutions: some are slow, and a busy machine is slower."""


def data(name: str) -> str:
    folder = os.environ.get("BINAC_TEST_DATA")
    if not folder:
        raise SystemExit("set BINAC_TEST_DATA to the folder of the data sets")
    return str(Path(folder) / name)


def descendants() -> list[int]:
    """Processes that this one and its children have started and that still live."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found, news = set(), {os.getpid()}
    while news:
        news = {p for p, parent in parents.items() if parent in news} - found
        found |= news
    return sorted(found)


def settled(expected: int) -> bool:
    """Whether the number of descendants comes back to `expected` within a moment."""
    for _ in range(100):
        if len(descendants()) <= expected:
            return True
        time.sleep(0.02)
    return False


# Code


def check_references(args: argparse.Namespace) -> bool:
    """Every reference solution scores 1."""
    good = True
    sandbox = Sandbox(workers=1)
    for name in ("mbpp.jsonl", "sanitized-mbpp.json"):
        rows = read_rows(data(name))[: args.limit]
        counts: collections.Counter[str] = collections.Counter()
        for row in rows:
            p = problem(row)
            v = sandbox.run(str(row["code"]), p.tests, names=p.names, setup=p.setup, limits=CALM)
            counts[v.status] += 1
            if v.status != "passed":
                print(f"  {name} task {row['task_id']}: {v.status} {v.detail}")
        right = counts["passed"]
        print(f"{name}: {right} of {len(rows)} reference solutions score 1; {dict(counts)}")
        good &= right == len(rows)
    sandbox.close()
    return good


def with_body(code: str, names: list[str], body: str) -> str:
    """A program whose functions of these names (and methods of such classes) have another body."""
    tree = ast.parse(code)
    new = ast.parse("def f():\n" + "\n".join(f"    {line}" for line in body.splitlines())).body[0]
    assert isinstance(new, ast.FunctionDef)
    for node in tree.body:
        inside = [node] if isinstance(node, ast.FunctionDef) else list(ast.walk(node))
        if getattr(node, "name", None) in names:
            for item in inside:
                if isinstance(item, ast.FunctionDef):
                    item.body = new.body
    return ast.unparse(tree)


def check_hostile(args: argparse.Namespace) -> bool:
    """Bodies that must not score, and what they leave behind."""
    good = True
    sandbox = Sandbox(workers=1)
    sandbox.run("def f(): return 1", "assert f() == 1", names=["f"])
    baseline, folder = len(descendants()), set(os.listdir(tempfile.gettempdir()))
    print(f"in force: {', '.join(sandbox.holds)}")
    for name in ("mbpp.jsonl", "sanitized-mbpp.json"):
        rows = read_rows(data(name))[: args.limit]
        for kind, body in BODIES.items():
            statuses: collections.Counter[str] = collections.Counter()
            start = time.monotonic()
            for row in rows:
                p = problem(row)
                code = with_body(str(row["code"]), p.names, body)
                v = sandbox.run(code, p.tests, names=p.names, setup=p.setup, limits=QUICK_LIMITS)
                statuses[v.status] += 1
                if v.status == "passed":
                    print(f"  {name} task {row['task_id']} scores 1 with {kind}: {p.tests!r}")
            left = not settled(baseline)
            good &= not left and statuses["passed"] == 0
            seconds = time.monotonic() - start
            print(
                f"{name} {kind:16} score 1: {statuses['passed']:3} of {len(rows)}  "
                f"left behind: {'YES' if left else 'nothing'}  {seconds:6.1f} s  {dict(statuses)}",
                flush=True,
            )
    sandbox.close()
    good &= settled(0) and not os.path.exists("/etc/binac-was-here")
    new_files = {
        n for n in set(os.listdir(tempfile.gettempdir())) - folder if n.startswith("binac-sandbox-")
    }
    print(f"processes left after close: {descendants()}; files left in tmp: {sorted(new_files)}")
    return good and not new_files


def check_steady(args: argparse.Namespace) -> bool:
    """4,000 programs, counting processes on the way."""
    rows = [r for r in read_rows(data("mbpp.jsonl")) if r["task_id"] != 123]
    problems = [(str(r["code"]), problem(r)) for r in rows]
    total = min(4000, args.limit or 4000)
    sandbox = Sandbox(workers=args.workers)

    def run(place: int) -> str:
        code, p = problems[place % len(problems)]
        return sandbox.run(code, p.tests, names=p.names, setup=p.setup, limits=CALM).status

    counts, seen, start = collections.Counter[str](), [], time.monotonic()
    with ThreadPoolExecutor(args.workers) as threads:
        for place, status in enumerate(threads.map(run, range(total)), start=1):
            counts[status] += 1
            if place % 250 == 0:
                seen.append(len(descendants()))
    seconds = time.monotonic() - start
    idle = len(descendants())
    sandbox.close()
    print(
        f"{total} programs, {args.workers} at a time: {seconds:.1f} s, {total / seconds:.0f} a "
        f"second, {dict(counts)}; processes at every 250th: {seen}, idle {idle}, "
        f"after close {len(descendants())}"
    )
    # A worker is a runner and its parent; a program and a judge are there while one runs.
    return counts["passed"] == total and max(seen, default=0) <= 4 * args.workers and settled(0)


def check_speed(args: argparse.Namespace) -> bool:
    """Grades a second, against a new interpreter for each."""
    num = min(args.limit or 300, 300)
    rows = [r for r in read_rows(data("mbpp.jsonl")) if r["task_id"] != 123][:num]
    problems = [(str(r["code"]), problem(r)) for r in rows]
    sandbox = Sandbox(workers=args.workers)
    sandbox.run("def f(): return 1", "assert f() == 1", names=["f"])

    def ours(item: tuple[str, Problem]) -> bool:
        code, p = item
        verdict = sandbox.run(code, p.tests, names=p.names, setup=p.setup, limits=CALM)
        return verdict.status == "passed"

    def naive(item: tuple[str, Problem]) -> bool:
        code, p = item
        command = [sys.executable, "-c", f"{p.setup}\n{code}\n{p.tests}"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    print(f"code, {num} MBPP reference solutions, {args.workers} at a time:")
    for name, way in (("sandbox (isolated)", ours), ("subprocess (nothing is isolated)", naive)):
        with ThreadPoolExecutor(args.workers) as threads:
            start, used = time.monotonic(), _cpu()
            right = sum(threads.map(way, problems))
            wall = time.monotonic() - start
        if way is ours:
            sandbox.close()
        used = _cpu() - used
        print(
            f"  {name:34} {num / wall:7.1f} a second, {1e3 * used / num:6.2f} ms of processor time "
            f"each, {right} right"
        )
    pairs = _equivalent_pairs()[: min(args.limit or 300, 300)]
    judge = MathJudge(workers=args.workers)
    judge.equal(r"\sqrt{2}", r"2^{1/2}")
    print(f"math, {len(pairs)} pairs of MATH-500 that are equal and written differently:")
    with ThreadPoolExecutor(args.workers) as threads:
        start = time.monotonic()
        found = list(threads.map(lambda pair: judge.equal(*pair), pairs))
        wall = time.monotonic() - start
    by_algebra = sum(f.how == "algebra" for f in found)
    judge.close()
    print(f"  {'judge':34} {len(pairs) / wall:7.1f} a second ({by_algebra} by algebra)")
    few = pairs[:10]
    start = time.monotonic()
    for gold, answer in few:
        code = (
            "import sys; from math_verify import parse, verify; "
            "verify(parse(sys.argv[1]), parse(sys.argv[2]))"
        )
        command = [sys.executable, "-c", code, f"${gold}$", f"${answer}$"]
        subprocess.run(command, capture_output=True, check=False)
    wall = time.monotonic() - start
    name = "math-verify in a subprocess each"
    print(f"  {name:34} {len(few) / wall:7.1f} a second ({len(few)} pairs)")
    return True


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


# Mathematics


def verify_alone(pair: list[str]) -> bool:
    """math-verify by itself, as its documentation shows it: for `Killable`."""
    from math_verify import parse, verify

    texts = f"${pair[0]}$", f"$\\boxed{{{pair[1]}}}$"
    gold, answer = (parse(text, parsing_timeout=None) for text in texts)  # type: ignore[arg-type]
    return bool(verify(gold, answer, timeout_seconds=None))


def warm_up() -> None:
    import logging

    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    math_verify.parse("$1$", parsing_timeout=None)


def wrong_answers(gold: str) -> Iterator[tuple[str, str]]:
    """(kind, answer) of changed golds that are not equal to it any more."""
    numbers = list(re.finditer(r"(?<![\d.])\d+(?![\d.]|,\\?!?\s*\d{3})", gold))
    if numbers:
        last = numbers[-1]
        yield "value + 1", f"{gold[: last.start()]}{int(last[0]) + 1}{gold[last.end() :]}"
    shape = read(gold)
    if shape.kind == "value" and shape.text != "0" and r"\pm" not in gold:
        bare = gold.removeprefix("-").removeprefix(r"\$")
        simple = not re.search(r"(?<=.)[+-]", bare)
        if simple:
            yield "sign", bare if gold.startswith("-") else f"-{bare}"
        else:
            yield "sign", f"-({gold})"
    terms = re.split(r"(?<=[\w)}])\s*(?=[+-](?![^(]*\)))", gold)
    if shape.kind == "value" and len(terms) > 1 and r"\pm" not in gold and "{" not in terms[-1][:1]:
        kept = " ".join(terms[:-1])
        if kept.count("{") == kept.count("}"):
            yield "dropped term", kept
    if shape.kind in ("list", "tuple") and len(shape.parts) > 1 and "," in gold:
        head, _, tail = gold.rpartition(",")
        closing = "".join(re.findall(r"(?:\\right)?\s*(?:\\\}|[)\]])\s*$", tail))
        yield "dropped item", f"{head}{closing}"
    if shape.kind == "tuple" and len(set(map(str, shape.parts))) > 1:
        inside = gold.strip().removeprefix(r"\left").strip("() ").removesuffix(r"\right").strip()
        yield "order of a tuple", f"({', '.join(reversed(inside.split(',')))})"
    if shape.kind == "interval" and shape.marks:
        place = max(gold.rfind(")"), gold.rfind("]"))
        turned = {")": "]", "]": ")"}[gold[place]]
        yield "brackets of an interval", gold[:place] + turned + gold[place + 1 :]
    value = number(shape.text) if shape.kind == "value" else None
    if value:
        yield "ten times", f"{gold}0" if re.fullmatch(r"\d+", gold) else rf"10 \cdot {gold}"
        if value.denominator == 1 and value > 1:
            yield "nearly", f"{value.numerator}.001"
    if re.fullmatch(r"\d{2,}", gold):
        yield "digits apart", r"\,".join(gold)
    if shape.kind == "text" and shape.text:
        yield "another word", "C" if shape.text != "c" else "D"
    yield "and another", f"{gold} and 987654"


def equal_answers(gold: str) -> Iterator[tuple[str, str]]:
    """(kind, answer) of golds that are written in another way."""
    shape = read(gold)
    value = number(shape.text) if shape.kind == "value" else None
    sized = gold.replace(r"\frac", r"\dfrac").replace("+", " + ")
    sized = re.sub(r"(?<!\\left)\(", r"\\left(", sized)
    yield "sizes and spaces", re.sub(r"(?<!\\right)\)", r"\\right)", sized)
    yield "a full stop", f"{gold}."
    if value is not None and not shape.unit:
        if value.denominator > 1:
            yield "a/b", f"{value.numerator}/{value.denominator}"
            if re.fullmatch(r"[25]*", "".join(map(str, _primes(value.denominator)))):
                yield "a decimal", str(value.numerator / value.denominator)
        elif abs(value) >= 1000:
            yield "thousands", f"{value.numerator:,}"
            yield "thousands in LaTeX", f"{value.numerator:,}".replace(",", "{,}")
        if value.denominator == 1 and not shape.name:
            yield "a name before it", f"n = {value.numerator}"
            yield "a decimal", f"{value.numerator}.0"
            yield "a unit behind it", rf"{value.numerator}\text{{ units}}"
    if shape.kind == "value" and shape.unit and value is not None:
        yield "no unit", shape.text
    if shape.kind == "list" and r"\pm" not in gold and "," in gold:
        inside = gold.replace(r"\{", "").replace(r"\}", "")
        yield "order of a list", ", ".join(reversed(inside.split(",")))
        yield "a set", rf"\{{{inside}\}}"
    if r"\pm" in gold and "," not in gold:
        one, other = (gold.replace(r"\pm", sign) for sign in "+-")
        yield "both signs written out", f"{one}, {other}"
    root = re.fullmatch(r"(\d+)\s*\\sqrt\{?(\d+)\}?", gold)
    if root:
        yield "under the root", rf"\sqrt{{{int(root[1]) ** 2 * int(root[2])}}}"
        yield "typed", f"{root[1]}*sqrt({root[2]})"
    if "pmatrix" in gold:
        yield "square brackets", gold.replace("pmatrix", "bmatrix")
    if shape.kind == "text" and shape.text:
        yield "a bare word", re.sub(r"\\text\{(.*)\}", r"\1", gold)
    if shape.kind == "interval" and not shape.name and r"\cup" not in gold:
        low, high = (part.text for part in shape.parts)
        left, right = ("<" if mark in "()" else r"\le" for mark in shape.marks)
        below = "" if r"\infty" in low else f"{low} {left} "
        above = "" if r"\infty" in high else f" {right} {high}"
        yield "an inequality", f"{below}x{above}"
    if shape.kind == "value" and gold.count("+") == 1 and not re.search(r"[-({^=]", gold):
        one, _, other = gold.partition("+")
        yield "order of a sum", f"{other.strip()} + {one.strip()}"


def _primes(value: int) -> list[int]:
    out, prime = [], 2
    while value > 1:
        while value % prime == 0:
            out.append(prime)
            value //= prime
        prime += 1
    return out


def _equivalent_pairs() -> list[tuple[str, str]]:
    golds = [str(row["answer"]) for row in read_rows(data("math500_test.jsonl"))]
    return [(gold, answer) for gold in golds for _, answer in equal_answers(gold) if answer != gold]


def check_math(args: argparse.Namespace) -> bool:
    """MATH-500: golds, reference solutions, and changed answers by three judges."""
    rows = read_rows(data("math500_test.jsonl"))[: args.limit]
    source, options = data("math500_test.jsonl"), {"workers": args.workers, "seconds": 10.0}
    task: Any = build_task("math500", eval_data=source, **options)
    prompts = [task.prompt("eval", i) for i in range(len(rows))]
    for kind, texts in (
        ("gold in a box", [rf"\boxed{{{row['answer']}}}" for row in rows]),
        ("reference solution", [str(row["solution"]) for row in rows]),
    ):
        grades = grade_all(task, list(zip(prompts, texts, strict=True)))
        print(f"MATH-500 {kind}: {sum(g.score for g in grades):.0f} of {len(rows)}")
    golds = [str(row["answer"]) for row in rows]
    ours, alone = task.judge, Killable("check_tasks:verify_alone", **options)
    judges: dict[str, Callable[[tuple[str, str]], bool]] = {
        "ours": lambda pair: ours.equal(*pair).equal,
        "string match": lambda pair: pair[0].strip() == pair[1].strip(),
        "math-verify alone": lambda pair: alone.call(list(pair)).value is True,
    }
    good = True
    for right, make in ((True, equal_answers), (False, wrong_answers)):
        cases = [(k, (g, a)) for g in golds for k, a in make(g)]
        verdicts: dict[str, list[bool]] = {}
        with ThreadPoolExecutor(args.workers) as threads:
            for name, judge in judges.items():
                verdicts[name] = list(threads.map(judge, [pair for _, pair in cases]))
        wrong = (
            "negatives: equal, judged different" if right else "positives: different, judged equal"
        )
        print(f"\nfalse {wrong}")
        print(f"{'kind':26}{'cases':>7}" + "".join(f"{name:>20}" for name in judges))
        for kind in [*dict.fromkeys(k for k, _ in cases), "all"]:
            mine = [i for i, (k, _) in enumerate(cases) if kind in (k, "all")]
            bad = {name: sum(found[i] != right for i in mine) for name, found in verdicts.items()}
            shares = "".join(f"{n:12} {n / len(mine):7.2%}" for n in bad.values())
            print(f"{kind:26}{len(mine):7}{shares}")
        for i, (kind, pair) in enumerate(cases):
            if verdicts["ours"][i] != right:
                good = False
                print(f"  ours is wrong: {kind}: gold {pair[0]!r}, answer {pair[1]!r}")
    task.close()
    alone.close()
    return good


def check_gsm8k(args: argparse.Namespace) -> bool:
    """Every gold answer, as the data has it and in a box."""
    task: Any = build_task(
        "gsm8k",
        eval_data=data("gsm8k_test.jsonl"),
        train_data=data("gsm8k_train.jsonl"),
        workers=args.workers,
    )
    good = True
    for split, name in (("train", "gsm8k_train.jsonl"), ("eval", "gsm8k_test.jsonl")):
        rows = read_rows(data(name))[: args.limit]
        for kind in ("solution", "box"):
            right = 0
            for place, row in enumerate(rows):
                p = task.prompt(split, place)
                text = str(row["answer"]) if kind == "solution" else rf"\boxed{{{p.gold}}}"
                right += task.grade(p, text).score == 1.0
            print(f"GSM8K {split} {kind}: {right} of {len(rows)} gold answers score 1")
            good &= right == len(rows)
    task.close()
    return good


# All of them


def mutated(text: str, rng: random.Random) -> str:
    """A text with a few cuts, doublings, swaps and strange characters."""
    odd = [
        "\\boxed{", "}", "{", "$", "\\frac", "^", "9^{9^{9}}", "!", "\\sqrt", "\x00", "\u202e",
        "\ud83d\ude00", "(" * 50, "\\begin{pmatrix}", "&", "\\\\", "```", "\n\n", "Answer: ", "(A)",
        "or", ",", "\t",
        "0" * 40, "\\text{", "def ", ":", "    ", "import os", "'''", "=", "<think>", "\\left[",
        "\\infty", "\u0661",
    ]  # fmt: skip
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(text) + 1)
        end = min(len(text), place + rng.randint(0, 30))
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:place] + text[end:]
        elif kind == 1:
            text = text[:end] + text[place:]
        elif kind == 2:
            text = text[:place] + rng.choice(odd) + text[place:]
        elif kind == 3 and text:
            text = text[:place] + text[place:end][::-1] + text[end:]
        else:
            text = text[:place]
    return text


def check_fuzz(args: argparse.Namespace) -> bool:
    """10,000 mutated answers: none may crash a verifier, hang it, or leave a process."""
    rng = random.Random(args.seed)
    total = min(10_000, args.limit or 10_000)
    folder = tempfile.mkdtemp()
    quiz = Path(folder) / "quiz.jsonl"
    options = ["a base", "an acid", "a salt", "water"]
    row = {"id": "q", "question": "What is it?", "options": options, "answer": "B"}
    quiz.write_text(json.dumps(row))
    workers = args.workers
    source = data("math500_test.jsonl")
    math: Any = build_task("math500", eval_data=source, workers=workers, seconds=0.5)
    limits = {"cpu_seconds": 0.25, "wall_seconds": 60.0}
    code: Any = build_task("mbpp", data=data("mbpp.jsonl"), workers=workers, **limits)
    choice: Any = build_task("choice", eval_data=str(quiz))
    solutions = [str(row["solution"]) for row in read_rows(data("math500_test.jsonl"))]
    golds = [rf"\boxed{{{row['answer']}}}" for row in read_rows(data("math500_test.jsonl"))]
    programs = {str(row["task_id"]): str(row["code"]) for row in read_rows(data("mbpp.jsonl"))}
    cases: list[tuple[Any, Any, str]] = []
    for n in range(total):
        kind = n % 10
        if kind < 5:
            place = rng.randrange(500)
            text = (golds if kind else solutions)[place]
            cases.append((math, math.prompt("eval", place), mutated(text, rng)))
        elif kind < 9:
            p = code.prompt("eval", rng.randrange(500))
            text = f"```python\n{programs[p.id.rpartition('/')[2]]}\n```"
            cases.append((code, p, mutated(text, rng)))
        else:
            said = ["Answer: B", "The answer is (B).", r"\boxed{B}", "I think A. Answer: C", "B"]
            cases.append((choice, choice.prompt("eval", 0), mutated(rng.choice(said), rng)))
    counts: collections.Counter[str] = collections.Counter()
    slowest, start, seen = 0.0, time.monotonic(), []
    for task in (math, code, choice):
        own = [(p, text) for t, p, text in cases if t is task]
        for begin in range(0, len(own), 250):
            for grade in grade_all(task, own[begin : begin + 250]):
                verdict = "failed" if grade.failed else "right" if grade.score == 1.0 else "wrong"
                counts[f"{task.name} {verdict}"] += 1
                slowest = max(slowest, grade.seconds)
                if grade.failed:
                    print(f"  {task.name} failed: {grade.reason[:300]}")
            seen.append(len(descendants()))
    for task in (math, code):
        task.close()
    print(
        f"{total} mutated answers in {time.monotonic() - start:.0f} s, slowest {slowest:.1f} s: "
        f"{dict(counts)}; processes seen {min(seen)} to {max(seen)}, left {descendants()}"
    )
    return not any("failed" in name for name in counts) and settled(0)


def check_contamination(args: argparse.Namespace) -> bool:
    """N-grams that held-out problems share with training problems."""
    sources: dict[str, dict[str, Any]] = {
        "gsm8k": {
            "eval_data": data("gsm8k_test.jsonl"),
            "train_data": data("gsm8k_train.jsonl"),
        },
        "mbpp": {"data": data("mbpp.jsonl")},
        "mbpp_sanitized": {"data": data("sanitized-mbpp.json")},
    }
    for name, options in sources.items():
        task: Any = build_task(name, **options)
        task.size("train")
        for n, share in ((8, 0.5), (13, 0.5)):
            found = task_overlaps(task, n=n, at_least=share)
            print(
                f"{name}: {len(found)} of {task.size('eval')} held-out problems have {share:.0%} "
                f"or more of their {n}-grams in the {task.size('train')} training problems "
                f"({task.num_dropped} equal ones were dropped)"
            )
            for o in found[:2]:
                one = task.prompt("eval", o.held_out).text
                other = task.prompt("train", o.train).text
                print(f"    {o.share:.0%}: {one[:90]!r} ~ {other[:90]!r}")
    return True


def check_gym(args: argparse.Namespace) -> bool:
    """Every task of reasoning-gym: its gold answers score 1, and the two splits never meet."""
    from megatron_binac.tasks.reasoning_gym import ReasoningGym

    names = [n for n in ReasoningGym.task_names() if n != "composite"][: args.limit]
    odd, without = [], []
    for name in names:
        try:
            task = ReasoningGym(name, workers=1, seconds=20.0)
            held_out, train = ([task.prompt(s, i) for i in range(3)] for s in ("eval", "train"))
            grades = [task.grade(p, f"<answer>{p.gold}</answer>") for p in held_out]
        except Exception as error:
            odd.append(f"{name} ({str(error)[:120]})")
            continue
        finally:
            task.close()
        if {p.text for p in held_out} & {p.text for p in train}:
            odd.append(f"{name} (a problem is in both splits)")
        elif not all(p.gold for p in held_out):
            without.append(name)
        elif any(grade.score < 1 for grade in grades):
            odd.append(f"{name} ({next(g.reason[:80] for g in grades if g.score < 1)})")
    good = len(names) - len(odd) - len(without)
    print(f"{good} of {len(names)} tasks of reasoning-gym score their own gold 1")
    print(f"  give none, only a score: {', '.join(without) or '-'}")
    for line in odd:
        print(f"  not: {line}")
    return not odd


CHECKS: dict[str, Callable[[argparse.Namespace], bool]] = {
    "gsm8k": check_gsm8k,
    "math": check_math,
    "references": check_references,
    "hostile": check_hostile,
    "steady": check_steady,
    "speed": check_speed,
    "fuzz": check_fuzz,
    "contamination": check_contamination,
    "gym": check_gym,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="+", choices=[*CHECKS, "all"])
    parser.add_argument("--limit", type=whole(1), help="take this many problems only")
    parser.add_argument("--workers", type=whole(1), default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    failed = []
    for name in CHECKS if "all" in args.names else args.names:
        print(f"== {name}: {(CHECKS[name].__doc__ or '').strip().splitlines()[0]}", flush=True)
        if not CHECKS[name](args):
            failed.append(name)
    print(f"failed: {failed}" if failed else "all promises hold")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
