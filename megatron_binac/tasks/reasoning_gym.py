"""Procedural problems of the reasoning-gym library: any of its tasks, or a weighted mix of them.

The library runs in helper processes only (`killable.py`). Some of its scorers evaluate the answer
as Python, in a scope that holds the right one: there an answer that could be more than a value is
refused unread, and each answer is scored in a process of its own, so that none can reach the next.
Its scores below 1 are not taken for right: it pays part of 1 for an answer that merely contains the
gold one.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import io
import json
import logging
import re
import time
import tokenize
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from megatron_binac.seeds import name_seed
from megatron_binac.tasks.base import parse_verdict
from megatron_binac.tasks.killable import Killable
from megatron_binac.types import Grade, Prompt, Split

logger = logging.getLogger(__name__)

TRIES = 256
"""Candidates for one problem, of which the first that belongs to the split is taken."""
PLACES = 1 << 30
"""Bound on the places of a task; the library seeds an item by seed + place, below 2**32."""
INSTRUCTION = "Give the answer alone between <answer> and </answer>."
_EVALUATES = re.compile(r"\beval\(|\bexec\(|parse_expr\(|sympify\(")


class ReasoningGym:
    """Endless problems of one reasoning-gym task or of several; what is held out is decided by
    content.

    Example: ``ReasoningGym(dataset="spell_backward").prompt("train", 0)``
    """

    def __init__(
        self,
        dataset: str | Sequence[Mapping[str, Any]],
        *,
        config: Mapping[str, Any] | None = None,
        seed: int = 0,
        eval_share: float = 0.2,
        partial: bool = False,
        instruction: str = INSTRUCTION,
        last_number: bool = False,
        name: str = "reasoning_gym",
        workers: int | None = None,
        seconds: float = 5.0,
    ) -> None:
        """`dataset` is a name with its `config`, or a list of {"name": ..., "weight": ...,
        "config": ...}.

        `partial` pays the library's own scores between 0 and 1; otherwise only its 1 counts, since
        it also pays something for an answer that merely contains the right one. With `last_number`
        an answer without tags is its last number, for models too small to follow a form.
        """
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ImportError(
                f"task {name} needs the package reasoning-gym; pip install 'megatron_binac[tasks]'"
            )
        if not 0 < eval_share < 1:
            raise ValueError(f"{name} eval_share is {eval_share}, expected between 0 and 1")
        if not isinstance(dataset, str) and config is not None:
            raise ValueError(
                f"{name} got a mix and `config`; each entry of a mix has its own config"
            )
        self.name, self.seed, self.eval_share, self.partial = name, seed, eval_share, partial
        self.instruction, self.last_number = instruction, last_number
        self._spec = {"name": dataset, "config": dict(config or {})}
        if not isinstance(dataset, str):
            mix = [{"weight": 1.0, "config": {}, **entry} for entry in dataset]
            self._spec = {"name": "composite", "config": {"datasets": mix}}
        self._calls = Killable(f"{__name__}:answer_request", seconds=seconds, workers=workers)
        known: list[str] = self._ask({"do": "names"})
        for wanted in [dataset] if isinstance(dataset, str) else [e["name"] for e in mix]:
            if wanted not in known:
                raise ValueError(f"reasoning-gym has no task {wanted!r}; it has {', '.join(known)}")
        self._evaluates: bool = self._find_how()

    def _find_how(self) -> bool:
        """Whether a scorer evaluates answers; notes in the spec how the problems are to be had."""
        request = {"do": "evaluates", "spec": self._spec, "seed": 0}
        outcome = self._calls.call(request)
        if outcome.end == "done":
            return outcome.value
        # Some tasks lay out all of their places when they are made.
        self._spec["block"] = True
        found: bool = self._ask(request)
        logger.info("%s: %s lays out its problems: %d at a time", self.name, self._spec, TRIES)
        return found

    @staticmethod
    def task_names() -> list[str]:
        """Every task of the library."""
        calls = Killable(f"{__name__}:answer_request", seconds=60.0, workers=1)
        try:
            return calls.call({"do": "names"}).value
        finally:
            calls.close()

    @property
    def workers(self) -> int:
        """Answers that are scored at the same time."""
        return self._calls.workers

    def size(self, split: Split) -> int | None:
        """None: problems are made on demand."""
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        """Problem `index`; a hash of the question decides which split a candidate belongs to."""
        request = {"do": "item", "spec": self._spec, "seed": self._seed(split)}
        request |= {"start": index * TRIES, "held_out": split == "eval", "share": self.eval_share}
        item = self._ask(request)
        if item is None:
            raise ValueError(
                f"{self.name}: among {TRIES} problems none belongs to {split!r}; the task makes "
                "too few different problems to hold some out: make its config harder"
            )
        text = item["question"]
        return Prompt(
            id=f"{self.name}/{split}/{index}",
            text=f"{text}\n\n{self.instruction}" if self.instruction else text,
            gold=item["answer"],
            task=self.name,
            meta={"place": item["place"], "split": split, "source": item["source"]},
        )

    def grade(self, prompt: Prompt, text: str) -> Grade:
        """The library's score of the answer; 1 or 0 unless `partial`."""
        start = time.perf_counter()
        answer = find_answer(text, last_number=self.last_number)
        request = {"do": "score", "spec": self._spec, "answer": answer}
        request |= {"seed": self._seed(prompt.meta["split"]), "place": prompt.meta["place"]}
        # An answer that gets past the refusals below must still not change how the next one is
        # scored.
        outcome = self._calls.call(request, fresh=self._evaluates)
        seconds = time.perf_counter() - start
        if outcome.end != "done":
            # A scorer that an answer breaks has not found it right.
            reason = f"the score ended by {outcome.end}: {outcome.value or 'no detail'}"
            return Grade(score=0.0, parsed=answer, reason=reason, seconds=seconds)
        score, refused = outcome.value
        if refused:
            return Grade(score=0.0, parsed=answer, reason=refused, seconds=seconds)
        right = score >= 1.0
        paid = min(1.0, max(0.0, score)) if self.partial else float(right)
        reason = "" if right else f"score {score:.3g}, gold is {prompt.gold}"
        return Grade(score=paid, parsed=answer, reason=reason, seconds=seconds)

    def leaks(self, prompt: Prompt, attempt_text: str, feedback_text: str) -> bool:
        """Whether the feedback holds the gold answer as whole words and the attempt does not.

        Golds of fewer than three characters occur by chance: they count in answer tags only.
        """
        gold = prompt.gold.strip()
        if not gold:
            return False
        if len(gold) < 3:
            return f"<answer>{gold}</answer>" in re.sub(r"\s", "", feedback_text)
        stands = re.compile(rf"(?<!\w){re.escape(gold)}(?!\w)")
        return bool(stands.search(feedback_text)) and not stands.search(attempt_text)

    def verdict(self, feedback_text: str) -> bool | None:
        """The last "correct" or "incorrect" of the feedback."""
        return parse_verdict(
            feedback_text,
            right=("correct", "right"),
            wrong=("incorrect", "wrong", "not correct", "not right"),
        )

    def close(self) -> None:
        """End the helpers."""
        self._calls.close()

    def _seed(self, split: Split) -> int:
        return name_seed("reasoning-gym", self.seed, split) % (2**32 - PLACES)

    def _ask(self, request: dict[str, Any]) -> Any:
        outcome = self._calls.call(request)
        if outcome.end == "done":
            return outcome.value
        raise ValueError(
            f"{self.name}: reasoning-gym failed at {request['do']}: {outcome.value or outcome.end}"
        )


def find_answer(text: str, *, last_number: bool = False) -> str:
    """What stands in the last answer tags, or all of the text where there are none; of it the last
    number where that is asked for."""
    said = text.rpartition("</think>")[2]
    found = re.findall(r"<answer>(.*?)</answer>", said, re.DOTALL)
    if last_number and not found:
        # A minus behind a digit subtracts.
        found = re.findall(r"(?<![\d.])-?\d+(?:\.\d+)?|\d+", said) or [""]
    return (found[-1] if found else said).strip()


# In the helper process


def warm_up() -> None:
    """Import the library; ImportError that names the extra where it is missing."""
    try:
        importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ImportError(
            f"this task needs the package reasoning-gym ({error}); "
            "pip install 'megatron_binac[tasks]'"
        ) from error


def answer_request(request: dict[str, Any]) -> Any:
    """What `ReasoningGym` asks of the library: names, an item, a score."""
    if request["do"] == "names":
        return sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    # Candidates of one problem are one block, so that the seed of an item is the same either way.
    spec, place = request["spec"], request.get("place", request.get("start", 0))
    begin = place // TRIES * TRIES if spec.get("block") else 0
    size = TRIES if spec.get("block") else PLACES
    dataset = _dataset(json.dumps(spec), request["seed"] + begin, size)
    if request["do"] == "item":
        return _item(dataset, request, begin)
    if request["do"] == "evaluates":
        parts = getattr(dataset, "datasets", None)
        return any(
            _evaluates(type(p)) for p in (parts.values() if isinstance(parts, dict) else [dataset])
        )
    entry = dataset[place - begin]
    scorer = _scorer(dataset, entry)
    refused = _refusal(scorer, request["answer"])
    if refused:
        return 0.0, refused
    return float(dataset.score_answer(request["answer"], entry)), ""


@lru_cache(maxsize=8)
def _dataset(spec: str, seed: int, size: int) -> Any:
    library = importlib.import_module("reasoning_gym")
    described = json.loads(spec)
    config = dict(described["config"])
    if described["name"] == "composite":
        kind = importlib.import_module("reasoning_gym.composite").DatasetSpec
        config["datasets"] = [kind(**entry) for entry in config["datasets"]]
    return library.create_dataset(described["name"], seed=seed, size=size, **config)


def _item(dataset: Any, request: dict[str, Any], begin: int) -> dict[str, Any] | None:
    for place in range(request["start"], request["start"] + TRIES):
        entry = dataset[place - begin]
        question = str(entry["question"])
        held_out = name_seed("reasoning-gym split", question) % 10_000 < request["share"] * 10_000
        if held_out == request["held_out"]:
            gold = entry["answer"]
            source = str(entry["metadata"].get("source_dataset", ""))
            return {
                "question": question,
                "answer": "" if gold is None else str(gold),
                "place": place,
                "source": source,
            }
    return None


def _scorer(dataset: Any, entry: Mapping[str, Any]) -> Any:
    """The data set whose score_answer reads the answer: of a mix, the part that made the entry."""
    parts = getattr(dataset, "datasets", None)
    return parts[entry["metadata"]["source_dataset"]] if isinstance(parts, dict) else dataset


def _refusal(scorer: Any, answer: str) -> str:
    """Why an answer is kept from a scorer that evaluates it: it names or reaches for something."""
    if not _evaluates(type(scorer)):
        return ""
    if _is_literal(answer):
        return ""
    code = type(scorer).score_answer.__code__
    forbidden = {*dir(builtins), *code.co_varnames, *code.co_names, *code.co_cellvars}
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(answer).readline))
    except (tokenize.TokenError, SyntaxError):
        tokens = []
    names = {t.string for t in tokens if t.type == tokenize.NAME} | set(
        re.findall(r"[^\W\d]\w+", answer)
    )
    bad = sorted(n for n in names if "__" in n or (len(n) > 1 and n in forbidden))
    if bad:
        return f"refused: this task's scorer evaluates the answer, which names {bad[0]}"
    if re.search(r"[\w)\]\"']\s*\.\s*[^\W\d]|:=|\blambda\b|\bfor\b", answer):
        return "refused: this task's scorer evaluates the answer, which is more than a value"
    return ""


def _is_literal(answer: str) -> bool:
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


@lru_cache(maxsize=256)
def _evaluates(kind: type) -> bool:
    """By the source of its module, since the call may stand in a function beside the class."""
    return _EVALUATES.search(inspect.getsource(inspect.getmodule(kind))) is not None  # type: ignore[arg-type]
