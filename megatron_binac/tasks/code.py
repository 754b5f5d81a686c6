"""Programs that have to pass tests: MBPP (full, sanitized, plus), HumanEval, and data of one's own
in these formats.

The tests run apart from the program (`sandbox_runner.py`), so what a test may do with the program's
values is a little less than in one process; `docs/tasks.md` says what.
"""

from __future__ import annotations

import ast
import builtins
import logging
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_binac.tasks.base import Wording
from megatron_binac.tasks.data import (
    DataTask,
    Row,
    prompts_of,
    read_rows,
    take,
    text_of,
    texts_of,
    unique_ids,
)
from megatron_binac.tasks.sandbox import Isolation, Limits, Sandbox, SandboxError, Verdict
from megatron_binac.types import Grade, Prompt, Split

logger = logging.getLogger(__name__)

INSTRUCTION = (
    "Write the solution in Python and answer with one ```python block that holds all of it."
)
CriticSees = Literal["text", "execution"]
MAX_PROGRAM = 100_000
"""Characters; a longer program is not run."""
MBPP_SPLITS: dict[str, range] = {
    "prompt": range(1, 11),
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}
"""Task ids of each split, as the authors of MBPP have it."""
ANSWER, TESTS, SETUP = "<answer>", "<tests>", "<setup>"
"""File names under which answers and data are parsed here."""
# A slip such as an invalid escape is the answer's business and not worth a line for each.
for _kind in (SyntaxWarning, DeprecationWarning):
    warnings.filterwarnings("ignore", category=_kind, module="<(?:answer|tests|setup)>")
FENCE = re.compile(
    r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What a row of any of the formats comes to.

    Example: ``Problem(text="Add two numbers.", tests="assert add(1, 2) == 3", names=["add"])``
    """

    text: str
    tests: str
    names: list[str]
    """Functions (and classes) that the program has to define and the tests use."""
    setup: str = ""
    """Trusted code that the tests need beforehand: imports, helper functions of the problem."""
    statement: str = ""
    """The text alone, without tests."""
    preamble: str = ""
    """Put before a program that is complete by itself: the problem's imports."""
    opening: str = ""
    """Put before a completion that only goes on: the problem's signature."""
    shown: str = ""
    """The tests that stand in the prompt."""


class CodeTask(DataTask):
    """Programs graded by their tests. Build it by one of the functions below."""

    wording = Wording(
        criticise=(
            "Read this program as a reviewer: say which inputs it gets wrong or where it fails, "
            "and what to change. Do not write the program. End with a line "
            '"Verdict: correct" or "Verdict: incorrect".'
        ),
        revise="Write the whole program again, in one ```python block.",
    )
    same_answer = None
    """Programs are not compared, so there is no vote among them."""

    def __init__(
        self,
        name: str,
        read: Callable[[Split], list[Row]],
        *,
        partial: bool = False,
        show_tests: int = 3,
        critic_sees: CriticSees = "text",
        instruction: str = INSTRUCTION,
        cpu_seconds: float = 3.0,
        wall_seconds: float = 15.0,
        memory_mb: int = 512,
        workers: int | None = None,
        isolation: Isolation = "auto",
        packages: Sequence[str] = (),
    ) -> None:
        """`partial` pays the share of asserts that hold; `show_tests` of them are in the prompt.

        `critic_sees` "execution" also shows the critic what running the program against the tests
        *of the prompt* printed: another setting than "text", and to be reported as such.
        """
        if critic_sees not in ("text", "execution"):
            raise ValueError(
                f"task {name} got critic_sees {critic_sees!r}, expected 'text' or 'execution'"
            )

        def prompts(split: Split) -> list[Prompt]:
            rows = read(split)
            return prompts_of(
                rows,
                unique_ids(rows, ("task_id", "id")),
                lambda row_id, row: _prompt(
                    name, split, row_id, problem(row, show_tests), instruction
                ),
                task=name,
                split=split,
            )

        super().__init__(name, prompts)
        self.partial, self.critic_sees = partial, critic_sees
        limits = Limits(cpu_seconds=cpu_seconds, wall_seconds=wall_seconds, memory_mb=memory_mb)
        self.sandbox = Sandbox(
            limits=limits, workers=workers, isolation=isolation, packages=packages
        )

    @property
    def workers(self) -> int:
        """Programs that run at the same time."""
        return self.sandbox.workers

    def grade(self, prompt: Prompt, text: str) -> Grade:
        """1 where every test holds (or the share that does); raises where the sandbox breaks."""
        start = time.perf_counter()
        names = prompt.meta["names"]
        code = extract_code(text, names)
        if code is None and prompt.meta["opening"]:
            # It goes on where the problem's signature ends.
            code = text
        if code is None or len(code) > MAX_PROGRAM:
            reason = f"defines no {' or '.join(names)}" if code is None else "too long a program"
            seconds = time.perf_counter() - start
            return Grade(score=0.0, parsed=None, reason=reason, seconds=seconds)
        verdict = self.run(prompt, code)
        score = float(verdict.status == "passed")
        if self.partial and verdict.total:
            score = verdict.passed / verdict.total
        reason = "" if verdict.status == "passed" else f"{verdict.status}: {verdict.detail}"
        seconds = time.perf_counter() - start
        return Grade(score=score, parsed=code, reason=reason, seconds=seconds)

    def run(self, prompt: Prompt, code: str, *, tests: str | None = None) -> Verdict:
        """The sandbox's verdict on a program, with what it printed and how it ended.

        `tests` instead of the problem's own.
        """
        meta, tests = prompt.meta, prompt.gold if tests is None else tests
        whole = defines(code, meta["names"])
        program = f"{meta['preamble']}\n{code}" if whole else f"{meta['opening']}{code}"
        return self.sandbox.run(
            program, tests, names=meta["names"], setup=meta["setup"], partial=self.partial
        )

    def observe(self, prompt: Prompt, attempt_text: str) -> str | None:
        """What running an attempt against the tests of its own prompt showed; None unless
        `critic_sees` is "execution". Tests that the prompt does not show are not run."""
        if self.critic_sees != "execution":
            return None
        code = extract_code(attempt_text, prompt.meta["names"])
        if code is None:
            return "The answer below holds no program that could be run."
        shown = prompt.meta["shown"]
        try:
            verdict = self.run(prompt, code, tests=f"{shown}\n" if shown else "pass")
        except SandboxError as error:
            logger.warning("%s was not run for the critic: %s", prompt.id, error)
            return None
        if verdict.status == "passed":
            said = "passed these tests" if shown else "ran without an error"
        else:
            said = f"ended in {verdict.status}: {verdict.detail}"
        return f"The program below was run, and {said}."

    def leaks(self, prompt: Prompt, attempt_text: str, feedback_text: str) -> bool:
        """Whether the feedback holds a program that passes the tests when the attempt does not."""
        code = extract_code(feedback_text, prompt.meta["names"])
        if code is None or not _works(self, prompt, code):
            return False
        own = extract_code(attempt_text, prompt.meta["names"])
        return own is None or not _works(self, prompt, own)

    def close(self) -> None:
        """End the sandbox."""
        self.sandbox.close()


def _works(task: CodeTask, prompt: Prompt, code: str) -> bool:
    try:
        return task.run(prompt, code).status == "passed"
    except SandboxError:
        return False


def _prompt(name: str, split: Split, row_id: str, found: Problem, instruction: str) -> Prompt:
    meta = {
        "statement": found.statement or found.text,
        "names": found.names,
        "setup": found.setup,
        "preamble": found.preamble,
        "opening": found.opening,
        "shown": found.shown,
    }
    text = f"{found.text}\n\n{instruction}" if instruction else found.text
    return Prompt(id=f"{name}/{split}/{row_id}", text=text, gold=found.tests, task=name, meta=meta)


# Reading programs


def extract_code(text: str, names: Sequence[str]) -> str | None:
    """The program of a completion: its last block that defines one of `names`, or all of it where
    it is a program.

    A block that was not closed goes to the end of the text. None where nothing defines a name.
    """
    said = text.rpartition("</think>")[2]
    for block in reversed([found[1] for found in FENCE.findall(said)]):
        if _may_define(block, names):
            return block
    bare = re.sub(r"^\s*\[BEGIN\]|\[DONE\].*", "", said, flags=re.DOTALL)
    bare = re.sub(r"^\s*```\w*\n|\n```\s*$", "", bare)
    return bare if defines(bare, names) else None


def _may_define(code: str, names: Sequence[str]) -> bool:
    """By the look of it, so that a program with a slip in it is judged, and judged wrong."""
    return any(
        re.search(rf"^(?:async\s+def|def|class)\s+{name}\b|^{name}\s*(?::.*)?=", code, re.MULTILINE)
        for name in names
    )


def defines(code: str, names: Sequence[str]) -> bool:
    """Whether a program that compiles gives one of the names a value at its top level."""
    try:
        return bool(set(names) & set(top_level_names(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def top_level_names(code: str) -> list[str]:
    """Names that a program defines at its top level, without imports. Raises SyntaxError."""
    out: list[str] = []
    for node in ast.parse(code, ANSWER).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            out.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            out += [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    return list(dict.fromkeys(out))


def imports(code: str) -> str:
    """The import statements at the top level of a program."""
    nodes = [n for n in ast.parse(code, ANSWER).body if isinstance(n, ast.Import | ast.ImportFrom)]
    return "\n".join(map(ast.unparse, nodes))


def used_names(code: str) -> set[str]:
    """Names that tests read anywhere."""
    return {
        n.id
        for n in ast.walk(ast.parse(code, TESTS))
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }


# Formats


def problem(row: Row, show_tests: int = 3) -> Problem:
    """A row as HumanEval (entry_point), MBPP (test_list), MBPP+ (test) or plain (tests) has it.

    ValueError where its tests or its code are no Python, or use nothing that can be defined.
    """
    try:
        found = _problem(row, show_tests)
        ast.parse(found.tests, TESTS)
        ast.parse(found.setup, SETUP)
    except SyntaxError as error:
        if error.lineno is None:
            raise ValueError(f"its code is no Python: {error.msg}") from error
        where = f"line {error.lineno} of {error.filename}: {(error.text or '').strip()[:80]!r}"
        raise ValueError(f"{error.msg} in {where}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("its code is nested too deeply") from error
    if not found.names:
        raise ValueError("its tests use no function that the program has to define")
    return found


def _problem(row: Row, show_tests: int) -> Problem:
    if "entry_point" in row:
        return _humaneval(row)
    if "test_list" in row and not row.get("test"):
        return _mbpp(row, show_tests)
    if "test" in row and "code" in row:
        return _mbpp_plus(row, show_tests)
    listed = isinstance(take(row, ("tests",)), list | tuple)
    tests = "\n".join(texts_of(row, ("tests",))) if listed else text_of(row, ("tests",))
    names = (
        texts_of(row, ("names",))
        if row.get("names")
        else sorted(used_names(tests) - set(dir(builtins)) - set(top_level_names(tests)))
    )
    return Problem(
        text=text_of(row, ("text", "prompt", "problem")),
        tests=tests,
        names=names,
        setup=text_of(row, ("setup",)) if row.get("setup") else "",
    )


def _mbpp(row: Row, show_tests: int) -> Problem:
    code, asserts = text_of(row, ("code",)), texts_of(row, ("test_list",))
    before = text_of(row, ("test_setup_code",)) if row.get("test_setup_code") else ""
    tests = "\n".join([before, *asserts])
    names = [n for n in top_level_names(code) if n in used_names(tests)]
    text = text_of(row, ("text", "prompt"))
    before_tests = texts_of(row, ("test_imports",)) if row.get("test_imports") else []
    return Problem(
        text=_with_tests(text, asserts, show_tests),
        statement=text,
        shown="\n".join([before, *asserts[:show_tests]]) if show_tests else "",
        tests=tests,
        names=names,
        # Some tests lean on what the reference solution imports.
        setup="\n".join([*before_tests, imports(code)]),
    )


def _mbpp_plus(row: Row, show_tests: int) -> Problem:
    code, tests = text_of(row, ("code",)), text_of(row, ("test",))
    names = [n for n in top_level_names(code) if n in used_names(tests)]
    asserts = texts_of(row, ("test_list",)) if row.get("test_list") else []
    text = text_of(row, ("prompt", "text"))
    shown = _with_tests(text, asserts, show_tests)
    return Problem(
        text=shown,
        statement=text,
        shown="\n".join(asserts[:show_tests]),
        tests=tests,
        names=names,
    )


def _humaneval(row: Row) -> Problem:
    prompt, entry = text_of(row, ("prompt",)), text_of(row, ("entry_point",))
    start = re.search(rf"^(?:async\s+)?def {re.escape(entry)}\b", prompt, re.MULTILINE)
    if start is None:
        raise ValueError(f"its prompt holds no function {entry!r}, which is its entry_point")
    return Problem(
        text=f"Complete this function:\n\n```python\n{prompt.rstrip()}\n```",
        tests=f"{text_of(row, ('test',))}\ncheck({entry})",
        names=[entry],
        setup=prompt if _parses(prompt) else f"{prompt.rstrip()}\n    pass\n",
        preamble=prompt[: start.start()],
        opening=prompt,
    )


def _parses(code: str) -> bool:
    """A signature without a docstring does not."""
    try:
        ast.parse(code, SETUP)
    except SyntaxError:
        return False
    return True


def _with_tests(text: str, asserts: Sequence[str], show_tests: int) -> str:
    shown = "\n".join(line.strip() for line in asserts[:show_tests])
    return (
        f"{text.strip()}\n\nIt has to pass tests such as these:\n\n```python\n{shown}\n```"
        if shown
        else text
    )


# Builders


def _mbpp_reader(data: str, train_splits: Sequence[str]) -> Callable[[Split], list[Row]]:
    for split in train_splits:
        if split not in MBPP_SPLITS or split == "test":
            raise ValueError(
                f"MBPP has no training split {split!r}, expected among prompt, validation, train"
            )

    def read(split: Split) -> list[Row]:
        wanted = ["test"] if split == "eval" else train_splits
        ids = {i for name in wanted for i in MBPP_SPLITS[name]}
        rows = read_rows(data)
        return [
            row
            for row, number in zip(rows, _task_numbers(data, rows), strict=True)
            if number in ids
        ]

    return read


def _task_numbers(data: str, rows: Sequence[Row]) -> list[int]:
    """MBPP's numbers of tasks, as 17 or "Mbpp/17"; ValueError that names the row without one."""
    numbers = []
    for number, row in enumerate(rows, start=1):
        found = re.fullmatch(r"(?:Mbpp/)?([0-9]+)", str(row.get("task_id")))
        if found is None:
            raise ValueError(
                f"{data}: row {number} has the task_id {row.get('task_id')!r}, expected a number "
                'or "Mbpp/NUMBER"; data of your own format is --task code'
            )
        numbers.append(int(found[1]))
    return numbers


def build_mbpp(
    data: str = "google-research-datasets/mbpp:full@prompt+test+validation+train",
    train_splits: Sequence[str] = ("train",),
    **options: Any,
) -> CodeTask:
    """MBPP in its authors' splits: tasks 11 to 510 for testing, 601 to 974 for training."""
    return CodeTask("mbpp", _mbpp_reader(data, train_splits), **options)


def build_mbpp_sanitized(
    data: str = "google-research-datasets/mbpp:sanitized@prompt+test+validation+train",
    train_splits: Sequence[str] = ("train",),
    **options: Any,
) -> CodeTask:
    """The 427 tasks of MBPP that its authors have verified, in the same splits."""
    return CodeTask("mbpp_sanitized", _mbpp_reader(data, train_splits), **options)


def build_mbpp_plus(
    data: str = "evalplus/mbppplus@test", train_data: str | None = None, **options: Any
) -> CodeTask:
    """MBPP+, all of it for testing; training on MBPP's own train split without these tasks."""

    def read(split: Split) -> list[Row]:
        held_out = read_rows(data)
        if split == "eval" or train_data is None:
            return held_out if split == "eval" else []
        taken = _task_numbers(data, held_out)
        rows = _mbpp_reader(train_data, ("train",))("train")
        numbers = _task_numbers(train_data, rows)
        return [row for row, number in zip(rows, numbers, strict=True) if number not in taken]

    return CodeTask("mbpp_plus", read, **{"packages": ("numpy",), **options})


def build_humaneval(data: str = "openai/openai_humaneval@test", **options: Any) -> CodeTask:
    """HumanEval, for testing only."""
    return CodeTask(
        "humaneval", lambda split: read_rows(data) if split == "eval" else [], **options
    )


def build_code(
    train_data: str | None = None, eval_data: str | None = None, **options: Any
) -> CodeTask:
    """Problems of one's own, each split a file or a name on the hub, as `problem` reads it."""
    if train_data is None and eval_data is None:
        raise ValueError(
            "task code needs data: set task.options.train_data and task.options.eval_data"
        )
    sources: dict[Split, str | None] = {"train": train_data, "eval": eval_data}

    def read(split: Split) -> list[Row]:
        source = sources[split]
        return [] if source is None else read_rows(source)

    return CodeTask("code", read, **options)
