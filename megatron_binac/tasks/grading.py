"""Grading many answers at once, and files of completions that somebody else has sampled."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_binac.tasks import build_task, task_options
from megatron_binac.tasks.base import Task
from megatron_binac.tasks.data import DataTask
from megatron_binac.types import Grade, Prompt, Split


def judge(task: Task, prompt: Prompt, text: str) -> Grade:
    """The task's verdict; a verifier that breaks is "failed", which is counted, not "wrong"."""
    start = time.perf_counter()
    try:
        return task.grade(prompt, text)
    except (
        Exception
    ) as error:  # the boundary to model text: whatever it provokes must not end the run
        reason = f"{type(error).__name__}: {error}"
        return Grade(
            score=0.0, parsed=None, reason=reason, failed=True, seconds=time.perf_counter() - start
        )


def grade_all(task: Task, pairs: Sequence[tuple[Prompt, str]]) -> list[Grade]:
    """Grades in order, as many at the same time as the task's `workers` says (1 by default)."""
    workers = min(getattr(task, "workers", 1), len(pairs))
    if workers <= 1:
        return [judge(task, prompt, text) for prompt, text in pairs]
    # Threads only wait: the work is done in the task's own processes.
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(lambda pair: judge(task, *pair), pairs))


def grade_file(task: Task, path: Path) -> Iterator[dict[str, Any]]:
    """One graded row for each row {"id": ..., "completion": ...} of a JSONL file, in order, then a
    summary.

    ValueError for a file without rows, a row that is none or an id that the task does not know,
    before anything is graded.
    """
    rows = _read_completions(path)
    graded: list[Grade] = []
    pairs = [(_find(task, row["id"]), row["completion"]) for row in rows]
    num_right = num_failed = 0
    batch = 16 * getattr(task, "workers", 1)
    for start in range(0, len(pairs), batch):
        grades = grade_all(task, pairs[start : start + batch])
        for row, grade in zip(rows[start : start + batch], grades, strict=True):
            num_right += grade.score >= 1.0
            num_failed += grade.failed
            yield {"id": row["id"], **asdict(grade)}
        graded += grades
    judged = len(pairs) - num_failed
    more = getattr(task, "summarise", lambda graded: {})
    yield {
        "summary": task.name,
        "num": len(pairs),
        "num_right": num_right,
        "num_failed": num_failed,
        "accuracy": num_right / judged if judged else None,
        **more([(prompt, grade) for (prompt, _), grade in zip(pairs, graded, strict=True)]),
    }


def build_for_grading(name: str, data: str | None, options: Mapping[str, Any]) -> Task:
    """A task whose held-out problems come from `data`, whatever the task calls that option."""
    return build_task(name, **task_options_with_data(name, data, options))


def task_options_with_data(
    name: str, data: str | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Options of a task, with `data` under the name that the task has for its held-out problems."""
    if data is None:
        return dict(options)
    known = task_options(name) or ["eval_data"]
    place = next((option for option in ("data", "eval_data") if option in known), None)
    if place is None:
        raise ValueError(f"task {name} makes its own problems; leave the data out")
    if place in options and options[place] != data:
        raise ValueError(
            f"got --data {data} and {place} = {options[place]!r}; leave out one of the two"
        )
    return {place: data, **options}


def _read_completions(path: Path) -> list[dict[str, Any]]:
    rows = []
    with open(path, "rb") as file:
        for number, data in enumerate(file, start=1):
            try:
                line = data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number} is no UTF-8: {error}") from error
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number} is no JSON: {error}") from error
            if (
                not isinstance(row, dict)
                or not _is_id(row.get("id"))
                or not isinstance(row.get("completion"), str)
            ):
                raise ValueError(
                    f"{path}:{number} is {line.strip()[:80]}, "
                    'expected {"id": "..." or NUMBER, "completion": "..."}'
                )
            rows.append(row)
    if not rows:
        raise ValueError(f'{path} is empty, expected rows {{"id": ..., "completion": "..."}}')
    return rows


def _is_id(name: object) -> bool:
    return isinstance(name, str | int) and not isinstance(name, bool)


def _find(task: Task, name: object) -> Prompt:
    if isinstance(task, DataTask):
        return task.find(str(name))
    split, _, index = str(name).removeprefix(f"{task.name}/").partition("/")
    splits: dict[str, Split] = {"train": "train", "eval": "eval"}
    if split not in splits or not index.isdigit():
        raise ValueError(
            f"the id {name!r} is no {task.name}/eval/NUMBER or {task.name}/train/NUMBER"
        )
    return task.prompt(splits[split], int(index))
