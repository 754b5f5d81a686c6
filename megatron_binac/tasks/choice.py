"""Multiple choice: GPQA, ARC, MMLU-Pro, and data of one's own in these formats.

The options of a question are shuffled by a seed from its id, so that no letter is right more often
than others, and the answer that a text ends with is read, not the first letter that it mentions.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from megatron_binac.seeds import name_seed
from megatron_binac.tasks.base import Wording
from megatron_binac.tasks.data import (
    DataTask,
    Row,
    prompts_of,
    read_rows,
    take,
    text_of,
    unique_ids,
)
from megatron_binac.types import Grade, Prompt, Split

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
INSTRUCTION = (
    'Think it through and end with a line "Answer: X", where X is the letter of one option.'
)


class ChoiceTask(DataTask):
    """Questions with one right option. Build it by one of the functions below."""

    wording = Wording(
        criticise=(
            "Check the reasoning of this answer against each option and say what is wrong in it, "
            "if anything. Do not name the right option. End with a line "
            '"Verdict: correct" or "Verdict: incorrect".'
        ),
        revise='Think the question through again and end with a line "Answer: X".',
    )

    def __init__(
        self,
        name: str,
        read: Callable[[Split], list[Row]],
        *,
        shuffle: bool = True,
        seed: int = 0,
        instruction: str = INSTRUCTION,
    ) -> None:
        """`seed` of the order of options; one question's order depends on no other's."""

        def prompts(split: Split) -> list[Prompt]:
            rows = read(split)
            ids = unique_ids(rows, ("Record ID", "id", "question_id"))
            # A place in the file may change: without ids the question names itself.
            has_ids = ids != [str(place) for place in range(len(rows))]
            return prompts_of(
                rows,
                ids,
                lambda row_id, row: _prompt(
                    name, split, row_id, row, seed if shuffle else None, instruction, has_ids
                ),
                task=name,
                split=split,
            )

        super().__init__(name, prompts)

    def grade(self, prompt: Prompt, text: str) -> Grade:
        """1 for the letter of the right option; no letter, or several at once, is 0."""
        start = time.perf_counter()
        letter = final_letter(text, prompt.meta["options"])
        reason = "" if letter == prompt.gold else f"gold is {prompt.gold}"
        if letter is None:
            reason = "no single letter was given as the answer"
        return Grade(
            score=float(letter == prompt.gold),
            parsed=letter,
            reason=reason,
            seconds=time.perf_counter() - start,
        )

    def leaks(self, prompt: Prompt, attempt_text: str, feedback_text: str) -> bool:
        """Whether the feedback gives the right letter or option, when the attempt did not."""
        options = prompt.meta["options"]
        if final_letter(attempt_text, options) == prompt.gold:
            return False
        if final_letter(feedback_text, options) == prompt.gold:
            return True
        spelled = _flat(options[LETTERS.index(prompt.gold)])
        # A number such as 5 is in any feedback by chance.
        return (
            len(spelled) > 5
            and spelled in _flat(feedback_text)
            and spelled not in _flat(attempt_text)
        )

    def summarise(self, graded: Iterable[tuple[Prompt, Grade]]) -> dict[str, Any]:
        """What is printed beside the accuracy: the bias for positions."""
        return position_bias(graded)


def position_bias(graded: Iterable[tuple[Prompt, Grade]]) -> dict[str, Any]:
    """How often each letter was chosen and was right, and how well questions went whose answer
    stood there.

    `recall_std` is the standard deviation of the accuracy over the gold letters: 0 where the place
    of the answer does not matter (RStd of Zheng et al., ICLR 2024). Failed grades are left out.
    """
    pairs = [(p.gold, g.parsed, g.score >= 1.0) for p, g in graded if not g.failed]
    chosen, gold = Counter(c for _, c, _ in pairs if c is not None), Counter(g for g, _, _ in pairs)
    letters = sorted({*chosen, *gold})
    recall = {
        a: sum(right for g, _, right in pairs if g == a) / gold[a] for a in letters if gold[a]
    }
    return {
        "chosen_share": {a: chosen[a] / max(1, len(pairs)) for a in letters},
        "gold_share": {a: gold[a] / max(1, len(pairs)) for a in letters},
        "recall": recall,
        "recall_std": float(np.std(list(recall.values()))) if recall else 0.0,
        "no_answer_share": sum(c is None for _, c, _ in pairs) / max(1, len(pairs)),
    }


# Reading the answer

_LETTER = (
    r"[*_`\"'$\[({\\\s]*(?:text\s*\{|textbf\s*\{|mathrm\s*\{|boxed\s*\{)?[*_`\"'\[({\s]*"
    r"(?:option\s+|choice\s+)?[$*_(\[]*([A-Z])(?![A-Za-z0-9])"
)
_STATED = re.compile(
    r"(?:"
    r"\\boxed\s*\{|\\fbox\s*\{"
    r"|(?i:\banswers?\b(?:\s+choice|\s+option|\s+letter)?(?:\s+(?:here|to\s+this\s+question))?[*_\s]*(?:is|are|:|=|\u2192|would\s+be|must\s+be|should\s+be)[*_]*\s*:?\s*(?:definitely\s+|clearly\s+|therefore\s+|thus\s+|indeed\s+)?(?:option\s+|choice\s+|letter\s+)?)"
    r"|(?i:\b(?:correct|right|best)\s+(?:option|choice|one|letter)\s*(?:is|:|=|would\s+be|must\s+be)[*_]*\s*:?\s*)"
    r"|(?i:\b(?:therefore|thus|hence|so|consequently|conclude|choose|pick|select|go\s+with)\b[,:]?\s+(?:that\s+)?(?:i\s+(?:choose|pick|select)\s+)?(?:it\s+is\s+|it's\s+|it\s+must\s+be\s+|we\s+have\s+)?(?:option\s+|choice\s+)?(?=[*_(\[{]|[A-Z](?![a-zA-Z])))"
    r"|(?i:\bnot\s+\(?[A-Z]\)?,?\s+but\s+(?:rather\s+)?(?:option\s+)?)"
    r")" + _LETTER
)
_VERDICT_AFTER = re.compile(
    r"\b(?i:option|choice|answer)\s*[*_(\[]*([A-Z])[*_)\]]*\s+(?:is|must\s+be|has\s+to\s+be|would\s+be)\s+(?:the\s+)?"
    r"(?:correct|right|best|answer)(?!\s*\?)"
)
_SECOND = re.compile(r"[*_)\]}.\s]*(?:,|/|&|\bor\b|\band\b)\s*[*_(\[{]*([A-Z])(?![A-Za-z0-9])")
_ALONE = re.compile(r"[*_`(\[{\s]*([A-Za-z])[*_`)\]}\s]*[.:)]?[*_\s]*")


def final_letter(text: str, options: Sequence[str]) -> str | None:
    r"""The letter that a text ends up with, None where there is none or more than one.

    The last statement counts: a \boxed letter, "answer: X", "the correct option is X", "therefore
    (X)", "option X is correct". A letter with a question mark behind it is a thought. Without any
    statement, a last line that is a letter alone, or the text of one option, counts.
    """
    if text.rfind("<think>") > text.rfind("</think>"):
        return None
    said = text.rpartition("</think>")[2]
    allowed = LETTERS[: len(options)]
    found: list[tuple[int, str | None]] = []
    for match in [*_STATED.finditer(said), *_VERDICT_AFTER.finditer(said)]:
        rest, letter = said[match.end() :], match[1]
        if letter not in allowed or _is_thought(said, match, rest, options[allowed.index(letter)]):
            continue
        second = _SECOND.match(rest)
        is_double = second is not None and second[1] in allowed and second[1] != letter
        found.append((match.start(1), None if is_double else letter))
    if found:
        return max(found)[1] if len({place for place, _ in found}) == len(found) else _last(found)
    lines = [line for line in said.strip().splitlines() if line.strip()]
    if not lines:
        return None
    return _from_last_line(lines, options, allowed)


def _last(found: list[tuple[int, str | None]]) -> str | None:
    place = max(place for place, _ in found)
    letters = {letter for where, letter in found if where == place}
    return letters.pop() if len(letters) == 1 else None


def _is_thought(said: str, match: re.Match[str], rest: str, option: str) -> bool:
    """Whether a letter is not meant as the answer: `A?`, or `A` in `it is A strong acid`."""
    if re.match(r"[*_)\]}\s]*\?", rest):
        return True
    if re.search(
        r"(?i)\b(?:not|never|isn't|n't)\s+[*_(\[]*$", said[match.start() : match.start(1)]
    ):
        return "but" not in match[0]
    article = match[1] == "A" and re.match(r" [a-z]+", rest)
    if not article or _flat(rest).startswith(_flat(option)[:12]):
        return False
    word = re.match(r" ([a-z]+)", rest)
    return word is not None and word[1] not in (
        "because", "since", "as", "for", "due", "and", "or", "but", "which", "is", "based", "given",
        "with",
    )  # fmt: skip


def _from_last_line(lines: list[str], options: Sequence[str], allowed: str) -> str | None:
    last = lines[-1].strip()
    alone = {m[1].upper() for line in lines if (m := _ALONE.fullmatch(line.strip()))}
    if _ALONE.fullmatch(last) and len(alone) == 1 and alone <= set(allowed):
        return alone.pop()
    if len(lines) == 1:
        led = re.match(r"[*_(\[]*([A-Z])[*_]*[).:\]]+[*_]*\s*(.*)$", last)
        if led and led[1] in allowed and _flat(led[2]) == _flat(options[allowed.index(led[1])]):
            return led[1]
        same = [
            a for a, option in zip(allowed, options, strict=True) if _flat(option) == _flat(last)
        ]
        if len(same) == 1:
            return same[0]
    lower = re.search(r"(?i)\banswer\s*(?:is|:)\s*[*_(\[]*([a-z])[*_)\].\s]*$", last)
    if lower and lower[1].upper() in allowed:
        return lower[1].upper()
    return None


def _flat(text: str) -> str:
    return re.sub(r"[\s.*_`$]+", " ", text).strip().lower()


# Questions and options


def _prompt(
    name: str,
    split: Split,
    row_id: str,
    row: Row,
    seed: int | None,
    instruction: str,
    has_ids: bool,
) -> Prompt:
    question, options, gold = question_of(row)
    if not 2 <= len(options) <= len(LETTERS) or not 0 <= gold < len(options):
        raise ValueError(
            f"got {len(options)} options and the answer at {gold}, expected 2 to {len(LETTERS)} "
            "options and the answer among them"
        )
    order = list(range(len(options)))
    if seed is not None:
        key = row_id if has_ids else question
        order = shuffled_order(options, name_seed("order of options", seed, key))
    shown = [options[place] for place in order]
    listed = "\n".join(f"{a}) {option}" for a, option in zip(LETTERS, shown, strict=False))
    text = f"{question.strip()}\n\n{listed}"
    known = {"Subdomain", "High-level domain", "category", "src", "subject"}
    meta = {key: row[key] for key in sorted(known & set(row))}
    return Prompt(
        id=f"{name}/{split}/{row_id}",
        text=f"{text}\n\n{instruction}" if instruction else text,
        gold=LETTERS[order.index(gold)],
        task=name,
        meta={**meta, "options": shown, "statement": "\n".join([question, *sorted(options)])},
    )


_REFERS = re.compile(
    r"\b(?:both\s+)?\(?[A-J]\)?\s*(?:and|or|&|,)\s*\(?[A-J]\)?(?![a-zA-Z])|\boptions?\s+[A-J]\b"
)
_OF_THE_ABOVE = re.compile(
    r"\b(?:all|none|any|both|neither|two)\b.{0,12}\b(?:of\s+)?(?:the\s+)?above\b", re.IGNORECASE
)


def shuffled_order(options: Sequence[str], seed: int) -> list[int]:
    """A seeded order; "none of the above" stays last, options that name letters stay in place."""
    if any(_REFERS.search(option) for option in options):
        return list(range(len(options)))
    last = [i for i, option in enumerate(options) if _OF_THE_ABOVE.search(option)]
    free = [i for i in range(len(options)) if i not in last]
    return [*np.random.default_rng(seed).permutation(free).tolist(), *last]


def question_of(row: Row) -> tuple[str, list[str], int]:
    """Question, options and the place of the right one, of a row in any known format."""
    if "Correct Answer" in row:
        names = ("Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
        options = [text_of(row, (name,)).strip() for name in names]
        if not all(options):
            raise ValueError(f"column {names[options.index('')]!r} is empty, expected an option")
        return text_of(row, ("Question",)), options, 0
    question = text_of(row, ("question", "Question", "text"))
    # ARC has {"text": [...], "label": [...]}, others a list of {"text", "label"}, or of texts.
    listed = take(row, ("options", "choices"))
    labels: list[str] = []
    if isinstance(listed, dict):
        listed, labels = take(listed, ("text",)), _texts(take(listed, ("label",)), "labels")
    elif isinstance(listed, list) and listed and all(isinstance(o, dict) for o in listed):
        labels = [text_of(option, ("label",)) for option in listed]
        listed = [text_of(option, ("text",)) for option in listed]
    # MMLU-Pro pads short lists.
    options = _texts(listed, "options")
    if labels and len(labels) != len(options):
        raise ValueError(f"got {len(options)} options and {len(labels)} labels, expected as many")
    column = ("answer_index", "answerKey", "answer", "label")
    gold = take(row, column)
    place = _place(gold if isinstance(gold, int) else text_of(row, column), options, labels)
    kept = [i for i, option in enumerate(options) if option not in ("N/A", "") or i == place]
    return question, [options[i] for i in kept], kept.index(place) if place in kept else -1


def _texts(values: Any, what: str) -> list[str]:
    bad = (
        [v for v in values if isinstance(v, bool) or not isinstance(v, str | int | float)]
        if (isinstance(values, list | tuple))
        else [values]
    )
    if bad:
        raise ValueError(f"among the {what} is {bad[0]!r}, expected a list of texts")
    return [str(value).strip() for value in values]


def _place(gold: int | str, options: list[str], labels: list[str]) -> int:
    if isinstance(gold, bool):
        raise ValueError(f"the answer is {gold}, expected a letter, a place or an option")
    text = str(gold).strip()
    if text in labels:
        return labels.index(text)
    if isinstance(gold, int):
        return gold
    if len(text) == 1 and text in LETTERS[: len(options)]:
        return LETTERS.index(text)
    if text in options:
        return options.index(text)
    return int(text) if text.isdigit() else -1


# Builders


def _reader(train_data: str | None, eval_data: str | None) -> Callable[[Split], list[Row]]:
    sources: dict[Split, str | None] = {"train": train_data, "eval": eval_data}

    def read(split: Split) -> list[Row]:
        source = sources[split]
        return [] if source is None else read_rows(source)

    return read


def build_choice(
    train_data: str | None = None, eval_data: str | None = None, **options: Any
) -> ChoiceTask:
    """Questions of one's own, each split a file or a name on the hub, as `question_of` reads it."""
    if train_data is None and eval_data is None:
        raise ValueError(
            "task choice needs data: set task.options.train_data and task.options.eval_data"
        )
    return ChoiceTask("choice", _reader(train_data, eval_data), **options)


def build_gpqa(
    eval_data: str = "Idavidrein/gpqa:gpqa_diamond@train",
    train_data: str | None = None,
    **options: Any,
) -> ChoiceTask:
    """GPQA, for testing: the diamond set, from the hub or as its authors' CSV."""
    return ChoiceTask("gpqa", _reader(train_data, eval_data), **options)


def build_arc(
    eval_data: str = "allenai/ai2_arc:ARC-Challenge@test",
    train_data: str | None = "allenai/ai2_arc:ARC-Challenge@train",
    **options: Any,
) -> ChoiceTask:
    """ARC in its own splits."""
    return ChoiceTask("arc", _reader(train_data, eval_data), **options)


def build_mmlu_pro(
    eval_data: str = "TIGER-Lab/MMLU-Pro@test",
    train_data: str | None = "TIGER-Lab/MMLU-Pro@validation",
    **options: Any,
) -> ChoiceTask:
    """MMLU-Pro: its test split, and for training the 70 questions that it has for prompts."""
    return ChoiceTask("mmlu_pro", _reader(train_data, eval_data), **options)
