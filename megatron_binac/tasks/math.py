r"""Mathematics with a short final answer: MATH, MATH-500, GSM8K, AIME, and data of one's own by
columns.

`math_answer.py` says which words are the answer, `math_equal.py` when two are the same,
`math_judge.py` keeps the algebra in processes that can be killed. The policy is written down in
`docs/tasks.md`.
"""

from __future__ import annotations

import importlib.util
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from megatron_binac.tasks.base import Wording
from megatron_binac.tasks.data import DataTask, Row, prompts_of, read_rows, text_of, unique_ids
from megatron_binac.tasks.math_answer import extract, number, read, squeeze
from megatron_binac.tasks.math_judge import MathJudge
from megatron_binac.types import Grade, Prompt, Split

INSTRUCTION = r"Reason step by step and put the final answer in \boxed{}."
COLUMNS: dict[str, tuple[str, ...]] = {
    "text": ("problem", "question", "prompt", "Problem", "Question"),
    "gold": ("answer", "expected_answer", "final_answer", "Answer", "solution"),
    "id": ("unique_id", "id", "ID", "url"),
}
META = ("level", "subject", "type", "year")
"""Columns that are kept with the problem."""


class MathTask(DataTask):
    """Problems that are graded on their final answer. Build it by one of the functions below."""

    wording = Wording(
        criticise=(
            "Go through this solution line by line and say where the first mistake is, if there is "
            "one, and how to mend it. Do not state the final answer. End with a line "
            '"Verdict: correct" or "Verdict: incorrect".'
        ),
        revise=(
            r"Solve the problem again from the start and put the final answer in \boxed{}. Do not "
            "mention the feedback."
        ),
    )

    def __init__(
        self,
        name: str,
        *,
        train_data: str | None,
        eval_data: str | None,
        columns: Mapping[str, str] | None = None,
        instruction: str = INSTRUCTION,
        workers: int | None = None,
        seconds: float = 5.0,
        numeric: bool = False,
    ) -> None:
        """`numeric` refuses data in which an answer is no number."""
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError(
                f"task {name} needs the package math-verify; pip install 'megatron_binac[tasks]'"
            )
        names = _columns(name, columns)
        sources: dict[Split, str | None] = {"train": train_data, "eval": eval_data}
        super().__init__(
            name, lambda split: _prompts(name, split, sources[split], names, instruction, numeric)
        )
        self.judge = MathJudge(workers=workers, seconds=seconds)

    @property
    def workers(self) -> int:
        """Answers that are judged at the same time."""
        return self.judge.workers

    def grade(self, prompt: Prompt, text: str) -> Grade:
        """1 where the final answer is the gold one; no answer and one that takes too long are 0."""
        start = time.perf_counter()
        answer, how = extract(text)
        if answer is None:
            return Grade(score=0.0, parsed=None, reason=how, seconds=time.perf_counter() - start)
        if _repeats(answer, prompt):
            reason = f"gold is {prompt.gold}; the answer repeats the problem"
            seconds = time.perf_counter() - start
            return Grade(score=0.0, parsed=answer, reason=reason, seconds=seconds)
        found = self.judge.equal(prompt.gold, answer)
        reason = "" if found.equal else f"gold is {prompt.gold}"
        if found.how in ("time", "memory", "crash"):
            reason = f"{reason}; the comparison ended by {found.how}"
        seconds = time.perf_counter() - start
        return Grade(score=float(found.equal), parsed=answer, reason=reason, seconds=seconds)

    def same_answer(self, one: str, other: str) -> bool:
        """Whether two parsed answers are one in a vote."""
        return self.judge.equal(one, other).equal

    def leaks(self, prompt: Prompt, attempt_text: str, feedback_text: str) -> bool:
        """Whether the feedback states the gold answer and the attempt does not.

        A number of one or two digits, or one letter, occurs by chance in any working: it counts
        only where the feedback marks it as the answer. Longer answers count wherever they stand.
        """
        gold = squeeze(prompt.gold)
        if _states(attempt_text, gold):
            return False
        return _states(feedback_text, gold)

    def close(self) -> None:
        """End the judges."""
        self.judge.close()


def _repeats(answer: str, prompt: Prompt) -> bool:
    """Whether an answer stands in the problem as it is, and not as the gold answer does.

    To expand, factor or simplify something means to write it in another way. A number may well
    stand in the problem, and be the answer.
    """
    said = squeeze(answer)
    if said == squeeze(prompt.gold) or len(said) < 4:
        return False
    if re.fullmatch(r"[\w.,]+", said) or not re.search(r"[0-9a-zA-Z]", said):
        return False
    if number(said) is not None and _lowest_terms(said):
        return False
    statement = prompt.meta.get("statement", prompt.text)
    # Formulas, and words for those that were typed plainly.
    pieces = [*re.split(r"\$|\\[()\[\]]", statement), *statement.split()]
    stands = re.compile(rf"(?<![\w.\\]){re.escape(said)}(?![\w^!]|\.\d)")
    return any(stands.search(squeeze(piece)) for piece in pieces)


def _lowest_terms(numeral: str) -> bool:
    digits = re.findall(r"[0-9]+", numeral)
    return len(digits) != 2 or math.gcd(int(digits[0]), int(digits[1])) == 1


def _states(text: str, gold: str) -> bool:
    marked = extract(text)[0]
    if marked is not None and squeeze(marked) == gold:
        return True
    said = re.findall(
        r"(?:answer|result|value|solution)\s+(?:is|should\s+be|must\s+be|would\s+be|equals)\s+(\S+)",
        text,
        re.IGNORECASE,
    )
    if any(squeeze(words) == gold for words in said):
        return True
    if len(gold) < 3:
        return False
    return re.search(rf"(?<![\w.]){re.escape(gold)}(?![\w]|\.\w)", squeeze(text)) is not None


def _columns(name: str, columns: Mapping[str, str] | None) -> dict[str, tuple[str, ...]]:
    for key in columns or {}:
        if key not in COLUMNS:
            raise ValueError(
                f"task {name} got columns for {key!r}, expected {' or '.join(COLUMNS)}"
            )
    return {key: (columns[key],) if columns and key in columns else COLUMNS[key] for key in COLUMNS}


def _prompts(
    name: str,
    split: Split,
    source: str | None,
    names: Mapping[str, tuple[str, ...]],
    instruction: str,
    numeric: bool,
) -> list[Prompt]:
    rows: list[Row] = [] if source is None else read_rows(source)

    def make(row_id: str, row: Row) -> Prompt:
        given = text_of(row, names["gold"])
        gold = gold_answer(given)
        if not gold or (numeric and number(read(gold).text) is None):
            what = "number" if numeric else "answer"
            raise ValueError(f"the answer {given[-60:]!r} ends in no {what}")
        text = text_of(row, names["text"])
        meta: dict[str, Any] = {key: row[key] for key in META if key in row}
        return Prompt(
            id=f"{name}/{split}/{row_id}",
            text=f"{text}\n\n{instruction}" if instruction else text,
            gold=gold,
            task=name,
            meta={**meta, "statement": text},
        )

    try:
        return prompts_of(rows, unique_ids(rows, names["id"]), make, task=name, split=split)
    except ValueError as error:
        hint = "; the task's option `columns` names others" if "no column" in str(error) else ""
        raise ValueError(f"{source}: {error}{hint}") from error


def gold_answer(text: str) -> str:
    """The answer in a column that may hold a solution: behind ####, in the last box, or all."""
    if "####" in text:
        return text.rpartition("####")[2].strip()
    if "\\boxed" in text or "\\fbox" in text:
        return extract(text)[0] or ""
    return text.strip()


def build_math(
    train_data: str | None = None, eval_data: str | None = None, **options: Any
) -> MathTask:
    """Problems of one's own, or MATH: each split a file or a name on the hub."""
    if train_data is None and eval_data is None:
        raise ValueError(
            "task math needs data: set task.options.train_data and task.options.eval_data"
        )
    return MathTask("math", train_data=train_data, eval_data=eval_data, **options)


def build_math500(
    eval_data: str = "HuggingFaceH4/MATH-500@test", train_data: str | None = None, **options: Any
) -> MathTask:
    """MATH-500, for testing only: training problems are MATH's own, given as `train_data`."""
    return MathTask("math500", train_data=train_data, eval_data=eval_data, **options)


def build_gsm8k(
    eval_data: str = "openai/gsm8k:main@test",
    train_data: str | None = "openai/gsm8k:main@train",
    **options: Any,
) -> MathTask:
    """GSM8K in its own two splits."""
    options = {"numeric": True, **options}
    return MathTask("gsm8k", train_data=train_data, eval_data=eval_data, **options)


def build_aime(
    eval_data: str = "HuggingFaceH4/aime_2024@train", train_data: str | None = None, **options: Any
) -> MathTask:
    """AIME of a year, for testing only."""
    return MathTask("aime", train_data=train_data, eval_data=eval_data, **options)
