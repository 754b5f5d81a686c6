"""Code tasks: formats, which words are the program, grades, and the reference solutions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_binac.tasks import build_task
from megatron_binac.tasks.base import for_critic
from megatron_binac.tasks.code import (
    CodeTask,
    build_code,
    build_humaneval,
    build_mbpp,
    build_mbpp_plus,
    defines,
    extract_code,
    problem,
)
from megatron_binac.tasks.data import read_rows
from megatron_binac.tasks.grading import grade_all
from megatron_binac.tasks.sandbox import Limits, Sandbox

MBPP = {
    "task_id": 11,
    "text": "Write a function to square a number.",
    "code": "import math\r\ndef square(n):\r\n  return math.prod([n, n])",
    "test_setup_code": "",
    "test_list": ["assert square(3) == 9", "assert square(-2) == 4"],
    "challenge_test_list": [],
}
SANITIZED = {
    "task_id": 12,
    "prompt": "Write a function to find the root.",
    "code": "def root(n):\n  return n ** 0.5",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(root(2), 1.4142135, rel_tol=1e-6)"],
}
PLUS = {
    "task_id": 13,
    "prompt": "Write a function to double a list.",
    "code": "def double(a):\n  return [2 * x for x in a]",
    "test_list": ["assert double([1]) == [2]"],
    "test": (
        "import numpy as np\ninputs = [[[1, 2]], [[]]]\nresults = [[2, 4], []]\n"
        "for inp, exp in zip(inputs, results):\n    out = double(*inp)\n"
        "    assert out == exp or np.allclose(out, exp)\n"
    ),
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": (
        "from typing import List\n\n\ndef half(n: int) -> int:\n    return n // 2\n\n\n"
        'def halves(a: List[int]) -> List[int]:\n    """Half of each."""\n'
    ),
    "entry_point": "halves",
    "canonical_solution": "    return [half(x) for x in a]\n",
    "test": "def check(candidate):\n    assert candidate([4, 6]) == [half(4), 3]\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    train = {**MBPP, "task_id": 601, "text": "Write a function to square a number again."}
    rows = {"mbpp": [MBPP, {**train}], "plus": [PLUS], "humaneval": [HUMANEVAL]}
    for name, lines in rows.items():
        (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def task(folder: Path) -> Iterator[CodeTask]:
    built = build_mbpp(data=str(folder / "mbpp.jsonl"), workers=1, cpu_seconds=1.0)
    yield built
    built.close()


PROGRAMS = [
    ("```python\ndef f(x): return 1\n```", "def f(x): return 1\n"),
    ("Text.\n```\ndef f(x): return 1\n```\nMore.", "def f(x): return 1\n"),
    (
        "```python\ndef f(x): return 1\n```\nor\n```python\ndef f(x): return 2\n```",
        "def f(x): return 2\n",
    ),
    (
        "```python\ndef f(x): return 1\n```\nUse it:\n```python\nprint(f(1))\n```",
        "def f(x): return 1\n",
    ),
    ("```python\ndef f(x):\n    return 1", "def f(x):\n    return 1"),
    ("```py\nclass f: pass\n```", "class f: pass\n"),
    ("```python\nf = lambda x: 1\n```", "f = lambda x: 1\n"),
    ("def f(x): return 1", "def f(x): return 1"),
    ("[BEGIN]\ndef f(x): return 1\n[DONE]\nmore words", "\ndef f(x): return 1\n"),
    ("```python\ndef f(x: return 1\n```", "def f(x: return 1\n"),
    ("<think>```python\ndef f(x): return 1\n```</think>def f(x): return 2", "def f(x): return 2"),
    ("```python\ndef g(x): return 1\n```", None),
    ("I would use a loop.", None),
    ("def g(x): return 1", None),
    ("", None),
    ("def f(x): return 1\nThat is all.", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "program"), PROGRAMS)
def test_the_program_of_a_completion(text: str, program: str | None) -> None:
    assert extract_code(text, ["f"]) == program


def test_programs_too_deep_to_parse_define_nothing() -> None:
    for text in ("def f(x): return " + "-" * 100_000 + "1", "(" * 100_000, "f = 1\x00"):
        assert not defines(text, ["f"])


def test_formats() -> None:
    p = problem(MBPP)
    assert (p.names, p.setup.strip()) == (["square"], "import math")
    assert p.tests.strip() == "assert square(3) == 9\nassert square(-2) == 4"
    assert "assert square(-2) == 4" in p.text and "prod" not in p.text
    assert "assert" not in problem(MBPP, show_tests=0).text
    assert problem(SANITIZED).setup.strip() == "import math"
    assert problem(PLUS).names == ["double"]
    own = {"text": "Add.", "tests": ["x = 1", "assert add(x, len('a')) == 2"]}
    assert problem(own).names == ["add"]
    with pytest.raises(ValueError, match="no column 'tests'"):
        problem({"text": "Add."})


def test_splits_by_task_id(folder: Path, task: CodeTask) -> None:
    assert [p.id for p in task.prompts("eval")] == ["mbpp/eval/11"]
    assert [p.id for p in task.prompts("train")] == ["mbpp/train/601"]
    assert task.find("601").id == "mbpp/train/601"
    with pytest.raises(ValueError, match="no training split 'test'"):
        build_mbpp(data=str(folder / "mbpp.jsonl"), train_splits=["test"])


def test_grades(task: CodeTask) -> None:
    prompt = task.prompt("eval", 0)
    right = task.grade(prompt, "```python\ndef square(n):\n    return n * n\n```")
    assert (right.score, right.reason) == (1.0, "")
    wrong = task.grade(prompt, "def square(n): return n + n")
    assert wrong.score == 0.0
    assert wrong.reason == "failed: AssertionError  in assert square(3) == 9"
    assert task.grade(prompt, "def square(n:").score == 0.0
    assert task.grade(prompt, "no idea").reason == "defines no square"
    assert task.grade(prompt, "def square(n): return 9\n" + "#" * 200_000).score == 0.0
    assert not any(g.failed for g in (right, wrong))


def test_partial_credit(folder: Path) -> None:
    task = build_mbpp(data=str(folder / "mbpp.jsonl"), workers=1, partial=True)
    assert task.grade(task.prompt("eval", 0), "def square(n): return 9").score == 0.5
    task.close()


def test_humaneval_takes_whole_programs_and_continuations(folder: Path) -> None:
    task = build_humaneval(data=str(folder / "humaneval.jsonl"), workers=1)
    prompt = task.prompt("eval", 0)
    assert task.size("train") == 0
    goes_on = HUMANEVAL["canonical_solution"]
    whole = "```python\ndef halves(a: List[int]):\n    return [x // 2 for x in a]\n```"
    helper = "def halves(a):\n    return [half(x) for x in a]"
    wrong = "    return a\n"
    grades = grade_all(task, [(prompt, str(t)) for t in (goes_on, whole, helper, wrong)])
    assert [g.score for g in grades] == [1.0, 1.0, 1.0, 0.0]
    task.close()


def test_humaneval_takes_a_signature_alone(tmp_path: Path) -> None:
    row = {
        **HUMANEVAL,
        "prompt": "def halves(a):\n",
        "test": "def check(f):\n  assert f([4]) == [2]",
    }
    (tmp_path / "bare.jsonl").write_text(json.dumps(row))
    task = build_humaneval(data=str(tmp_path / "bare.jsonl"), workers=1)
    prompt = task.prompt("eval", 0)
    right, wrong = "    return [x // 2 for x in a]\n", "    return a\n"
    assert [task.grade(prompt, text).score for text in (right, wrong)] == [1.0, 0.0]
    task.close()
    (tmp_path / "bad.jsonl").write_text(json.dumps({**row, "entry_point": "thirds"}))
    with pytest.raises(ValueError, match="its prompt holds no function 'thirds'"):
        build_humaneval(data=str(tmp_path / "bad.jsonl")).size("eval")


def test_task_ids_of_mbpp(tmp_path: Path) -> None:
    path = tmp_path / "mbpp.jsonl"
    path.write_text(json.dumps({**MBPP, "task_id": "Mbpp/11"}))
    assert build_mbpp(data=str(path)).prompt("eval", 0).id == "mbpp/eval/Mbpp/11"
    path.write_text(json.dumps({**MBPP, "task_id": "eleven"}))
    with pytest.raises(ValueError, match=r"row 1 has the task_id 'eleven', expected a number"):
        build_mbpp(data=str(path)).size("eval")


def test_mbpp_plus_runs_its_harness(folder: Path) -> None:
    task = build_mbpp_plus(
        data=str(folder / "plus.jsonl"), train_data=str(folder / "mbpp.jsonl"), workers=1
    )
    prompt = task.prompt("eval", 0)
    assert task.grade(prompt, PLUS["code"]).score == 1.0
    assert task.grade(prompt, "def double(a): return a").score == 0.0
    assert task.grade(prompt, "import sys\ndef double(a): sys.exit(0)").score == 0.0
    assert [p.id for p in task.prompts("train")] == ["mbpp_plus/train/601"]
    task.close()


def test_leaks(task: CodeTask) -> None:
    prompt = task.prompt("eval", 0)
    program = "```python\ndef square(n):\n    return n * n\n```"
    assert task.leaks(prompt, "def square(n): return n", f"Write this:\n{program}")
    assert not task.leaks(prompt, program, f"Right:\n{program}")
    assert not task.leaks(prompt, "def square(n): return n", "Multiply n by itself.")


HIDDEN = {**MBPP, "test_list": ["assert square(3) == 9", "assert square(-2) == 4321"]}


def test_the_critic_is_shown_an_execution_in_its_own_setting_only(tmp_path: Path) -> None:
    path = tmp_path / "mbpp.jsonl"
    path.write_text(json.dumps(HIDDEN))
    options = {"data": str(path), "workers": 1, "show_tests": 1}
    plain, seeing = build_mbpp(**options), build_mbpp(critic_sees="execution", **options)
    prompt = plain.prompt("eval", 0)
    assert prompt == seeing.prompt("eval", 0)
    broken = "```python\ndef square(n): return n + undefined\n```"
    assert for_critic(plain, prompt, broken) == prompt
    shown = for_critic(seeing, prompt, broken)
    assert shown.text.startswith(prompt.text + "\n\nThe program below was run, and ended in error")
    assert "undefined" in shown.text and "square(3) == 9" in shown.text
    # Right on the test that is shown and wrong on the one that is not: nothing of it is told.
    partly = "```python\ndef square(n): return n * n\n```"
    assert seeing.grade(prompt, partly).score == 0.0
    told = for_critic(seeing, prompt, partly).text
    assert told.endswith("The program below was run, and passed these tests.")
    assert "4321" not in told
    assert "holds no program" in for_critic(seeing, prompt, "I do not know.").text
    for task in (plain, seeing):
        task.close()
    with pytest.raises(ValueError, match="expected 'text' or 'execution'"):
        build_mbpp(data=str(path), critic_sees="tests")


def test_without_tests_in_the_prompt_only_loading_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "mbpp.jsonl"
    path.write_text(json.dumps(HIDDEN))
    task = build_mbpp(data=str(path), workers=1, show_tests=0, critic_sees="execution")
    prompt = task.prompt("eval", 0)
    assert "assert" not in prompt.text
    wrong = for_critic(task, prompt, "```python\ndef square(n): return 0\n```").text
    assert wrong.endswith("ran without an error.")
    slip = for_critic(task, prompt, "```python\ndef square(n: return 0\n```").text
    assert "ended in syntax" in slip
    task.close()


def test_data_of_ones_own(folder: Path) -> None:
    path = folder / "own.jsonl"
    path.write_text(json.dumps({"id": "a", "text": "Add.", "tests": "assert add(1, 2) == 3"}))
    task = build_code(eval_data=str(path), workers=1)
    assert task.grade(task.prompt("eval", 0), "def add(a, b): return a + b").score == 1.0
    task.close()
    with pytest.raises(ValueError, match="needs data"):
        build_task("code")


@pytest.mark.slow
def test_reference_solutions_of_mbpp(data_dir: Path) -> None:
    """Every eighth task; tools/check_tasks.py runs all of them."""
    sandbox = Sandbox(workers=1, limits=Limits(cpu_seconds=20.0, wall_seconds=200.0))
    for name in ("mbpp.jsonl", "sanitized-mbpp.json"):
        for row in read_rows(data_dir / name)[::8]:
            p = problem(row)
            verdict = sandbox.run(str(row["code"]), p.tests, names=p.names, setup=p.setup)
            assert verdict.status == "passed", f"{name} {row['task_id']}: {verdict}"
    sandbox.close()


def test_every_task_of_mbpp_names_what_it_tests(data_dir: Path) -> None:
    for name, count in (("mbpp.jsonl", 974), ("sanitized-mbpp.json", 427)):
        rows = read_rows(data_dir / name)
        assert len(rows) == count
        assert all(problem(row).names for row in rows)
    task = build_mbpp(data=str(data_dir / "mbpp.jsonl"), workers=1)
    assert (task.size("eval"), task.size("train"), task.num_dropped) == (500, 371, 3)


MBPP_ROW = {"task_id": 11, "text": "Add.", "code": "def f(a):\n    return a", "test_list": []}
BROKEN = [
    ({"test_list": ["assert f(1) == 1", "assert f(("]}, r"was never closed in line 3 of <tests>"),
    ({"code": "def f(:"}, r"invalid syntax in line 1 of <answer>: 'def f\(:'"),
    ({"test_setup_code": "import ("}, r"line 1 of <tests>: 'import \('"),
    ({"test_list": ["assert g(1) == 1"]}, "its tests use no function"),
    ({"code": None}, "no column 'code'"),
    ({"text": None}, "no column 'text' or 'prompt'"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_data_that_is_broken_is_named(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    good = MBPP_ROW | {"test_list": ["assert f(1) == 1"]}
    path = tmp_path / "mbpp.jsonl"
    path.write_text("\n".join(map(json.dumps, [good, good | {"task_id": 12} | change])))
    with pytest.raises(
        ValueError, match=r"task mbpp: row 2 \(id 12\) of split 'eval' .*" + message
    ):
        build_task("mbpp", data=str(path)).size("eval")
