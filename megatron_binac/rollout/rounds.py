"""Rounds of feedback on the held-out problems of any task, item by item into a file that a second
call continues.

    y0 -> z1 -> y1 -> z2 -> y2 ...        z_t speaks about y_{t-1}, y_t answers z_t

Each role sees the problem and the newest answer only, as in training. An item is one sample of one
problem with all its rounds; `standings.py` makes the numbers of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist

from megatron_binac import run_folder
from megatron_binac.first_rank import on_first
from megatron_binac.rollout.engine import Engine
from megatron_binac.rollout.judging import Judging
from megatron_binac.rollout.play import shown_to_critic
from megatron_binac.seeds import name_seed
from megatron_binac.tasks.base import Task
from megatron_binac.tokenizer import Tokenizer
from megatron_binac.types import Completion, Grade, Prompt, Sampling, Split

ITEMS, SETTINGS = "items.jsonl", "settings.json"
SPLIT: Split = "eval"

Item = dict[str, Any]
"""One line of the file: id, sample, gold, answers [T + 1], feedbacks [T], and how many of its
prompts were shortened to fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSettings:
    """What decides every number of an evaluation. Kept beside the items; others are refused.

    Example: ``RoundSettings(model="runs/a", task="math500", task_options={}, rounds=2, samples=8)``
    """

    model: str
    """A run folder, or a Hugging Face model as a folder or a name on the hub."""
    critic: str | None = None
    """Another one of these for the critic; None: the run's own, or the same model."""
    stamps: list[str] = field(default_factory=list)
    """Which weights the model has, then the critic: a run's checkpoint, the age of a folder."""
    task: str
    task_options: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    """T: feedbacks in a row; 0 only answers."""
    samples: int = 1
    """Chains of each problem, with seeds of their own."""
    num_prompts: int = 0
    """The first held-out problems; 0 takes all of a task that has an end."""
    seed: int = 1
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 1024
    """Longest answer, in tokens."""
    max_feedback_tokens: int = 512
    precision: str = "auto"
    """Of a Hugging Face model: auto takes what its weights are stored in."""
    batch: int = 64
    """Chains that are sampled together; changes no result but by rounding."""

    def __post_init__(self) -> None:
        for name, least in (
            ("rounds", 0), ("samples", 1), ("num_prompts", 0), ("temperature", 0.0), ("top_k", 0),
            ("max_tokens", 1), ("max_feedback_tokens", 1), ("batch", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name} is {value}, expected {least} or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, expected in (0, 1]")
        if self.precision not in ("auto", "fp32", "bf16"):
            raise ValueError(f"precision is {self.precision!r}, expected auto, fp32 or bf16")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"temperature 0 gives {self.samples} times the same answer; set samples to 1 or "
                "the temperature above 0"
            )


class TurnTemplate(Protocol):
    """Prompts of the three turns: `algo.prompts.Template` or `algo.chat_prompts.ChatTemplate`."""

    num_truncated: int

    def attempt_ids(self, prompt: Prompt) -> list[int]: ...

    def feedback_ids(self, prompt: Prompt, attempt_ids: Sequence[int]) -> list[int]: ...

    def revision_ids(
        self, prompt: Prompt, attempt_ids: Sequence[int], feedback_ids: Sequence[int]
    ) -> list[int]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Who speaks in one role, and how texts become its token ids."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    template: TurnTemplate
    end_ids: frozenset[int]
    """Ids that end a turn; a model may have several."""
    num_parameters: int

    def spoken(self, completion: Completion) -> list[int]:
        """The ids of an answer without what ended it."""
        ids = [int(i) for i in completion.ids]
        return ids[:-1] if ids and ids[-1] in self.end_ids else ids


# The file


def claim(folder: Path, settings: RoundSettings) -> None:
    """Make `folder` that of these settings, or check that it is.

    ValueError where it holds other settings or anything else: nothing is overwritten.
    """
    path = folder / SETTINGS
    if path.is_file():
        held = load_settings(folder)
        if held != settings:
            pairs = zip(asdict(held).items(), asdict(settings).values(), strict=True)
            other = [f"{k} {a!r}, not {b!r}" for (k, a), b in pairs if a != b and k != "batch"]
            if other:
                raise ValueError(
                    f"{folder} holds an evaluation with {'; '.join(other)}; pass another --out"
                )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty and holds no evaluation; pass a new --out")
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{SETTINGS}.{os.getpid()}"
    draft.write_text(json.dumps(asdict(settings), indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def load_settings(folder: Path) -> RoundSettings:
    """The settings that a folder was claimed with; ValueError where they cannot be read."""
    path = folder / SETTINGS
    try:
        return RoundSettings(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}; pass another --out") from error


def read_items(folder: Path) -> list[Item]:
    """The items that are there; a last line that was cut by a kill is dropped from the file."""
    path = folder / ITEMS
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    items: list[Item] = []
    seen: set[tuple[str, int]] = set()
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            item = json.loads(line)
            key = (item["id"], item["sample"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number} is damaged, it is no item of an evaluation ({error!r}); take the "
                "line out, or pass another --out"
            ) from error
        if key in seen:
            raise ValueError(
                f"{path}:{number} is damaged, sample {key[1]} of {key[0]!r} is there twice; take "
                "one out, or pass another --out"
            )
        seen.add(key)
        items.append(item)
    return items


# The rounds


def run_rounds(
    actor: Seat,
    critic: Seat | None,
    task: Task,
    settings: RoundSettings,
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Item]:
    """Sample what is missing of an evaluation; all items in the order of problems and samples.

    Collective: every rank calls it and gets the list. The first rank writes each batch to the file
    before the next one begins.
    """
    with ExitStack() as stack:
        # Two that write to one file would each sample what the other has.
        on_first(lambda: stack.enter_context(run_folder.locked(folder)))
        return _played(actor, critic, task, settings, folder, progress)


def _played(
    actor: Seat,
    critic: Seat | None,
    task: Task,
    settings: RoundSettings,
    folder: Path,
    progress: Callable[[int, int], None],
) -> list[Item]:
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    held = on_first(lambda: read_items(folder))
    found = {(item["id"], item["sample"]): item for item in held}
    prompts = list(_prompts(task, settings))
    wanted = [(p, s) for p in prompts for s in range(settings.samples)]
    missing = [(p, s) for p, s in wanted if (p.id, s) not in found]
    progress(len(wanted) - len(missing), len(wanted))
    for start in range(0, len(missing), settings.batch):
        items = play_chains(actor, critic, task, missing[start : start + settings.batch], settings)
        if is_writer:
            with open(folder / ITEMS, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(item) + "\n" for item in items))
                file.flush()
                os.fsync(file.fileno())
        found |= {(item["id"], item["sample"]): item for item in items}
        progress(len(wanted) - len(missing) + start + len(items), len(wanted))
    return [found[p.id, s] for p, s in wanted]


def _prompts(task: Task, settings: RoundSettings) -> Iterator[Prompt]:
    size = task.size(SPLIT)
    num = settings.num_prompts or size
    if num is None:
        raise ValueError(f"task {task.name} has problems without end; say how many: --num-prompts")
    if size is not None and num > size:
        raise ValueError(f"--num-prompts is {num}, but task {task.name} holds out {size} problems")
    if num == 0:
        raise ValueError(f"task {task.name} holds out no problems; check its data")
    for index in range(num):
        yield task.prompt(SPLIT, index)


def play_chains(
    actor: Seat,
    critic: Seat | None,
    task: Task,
    cases: Sequence[tuple[Prompt, int]],
    settings: RoundSettings,
) -> list[Item]:
    """All rounds of some (problem, sample) pairs, graded while the next round is sampled."""
    with ExitStack() as stack:
        return _play_chains(stack, actor, critic, task, cases, settings)


def _play_chains(
    stack: ExitStack,
    actor: Seat,
    critic: Seat | None,
    task: Task,
    cases: Sequence[tuple[Prompt, int]],
    settings: RoundSettings,
) -> list[Item]:
    prompts = [p for p, _ in cases]
    items: list[Item] = [
        {"id": p.id, "sample": s, "gold": p.gold, "answers": [], "feedbacks": [], "shortened": 0}
        for p, s in cases
    ]

    def ask(template: TurnTemplate, build: Callable[..., list[int]], rows: Any) -> list[list[int]]:
        """The prompt of each item, counting those that were cut."""
        out = []
        for item, row in zip(items, rows, strict=True):
            before = template.num_truncated
            out.append(build(*row))
            item["shortened"] += template.num_truncated - before
        return out

    judged: list[tuple[Judging, list[Completion]]] = []

    def answer_all(contexts: list[list[int]], t: int) -> list[Completion]:
        """Answers, noted and being judged."""
        judging = stack.enter_context(Judging(task))
        answers = _speak(actor, contexts, cases, settings, "answer", t)
        _note_answers(items, actor, answers)
        judging.share_out(_answered(items, prompts, answers, t))
        judged.append((judging, answers))
        return answers

    contexts = ask(actor.template, actor.template.attempt_ids, [(p,) for p in prompts])
    answers = answer_all(contexts, 0)
    for t in range(1, settings.rounds + 1):
        assert critic is not None
        said = [actor.spoken(c) for c in answers]
        texts = [item["answers"][-1]["text"] for item in items]
        shown = shown_to_critic(task, prompts, texts)
        heard = [_across(actor, critic, ids, y) for ids, y in zip(said, texts, strict=True)]
        rows = zip(shown, heard, strict=True)
        contexts = ask(critic.template, critic.template.feedback_ids, rows)
        feedbacks = _speak(critic, contexts, cases, settings, "feedback", t)
        for item, prompt, answer, feedback in zip(items, prompts, texts, feedbacks, strict=True):
            text = critic.tokenizer.decode(critic.spoken(feedback))
            verdict, leak = task.verdict(text), task.leaks(prompt, answer, text)
            item["feedbacks"].append(
                {"text": text, "verdict": verdict, "leak": leak, **_facts(feedback)}
            )
        heard = [
            _across(critic, actor, critic.spoken(z), item["feedbacks"][-1]["text"])
            for z, item in zip(feedbacks, items, strict=True)
        ]
        rows = zip(prompts, said, heard, strict=True)
        contexts = ask(actor.template, actor.template.revision_ids, rows)
        answers = answer_all(contexts, t)
    for t, (judging, answers) in enumerate(judged):
        _note_grades(items, answers, judging.finish(_answered(items, prompts, answers, t)), t)
    return items


def _speak(
    seat: Seat,
    contexts: Sequence[Sequence[int]],
    cases: Sequence[tuple[Prompt, int]],
    settings: RoundSettings,
    kind: str,
    t: int,
) -> list[Completion]:
    is_greedy = settings.temperature == 0
    limit = settings.max_feedback_tokens if kind == "feedback" else settings.max_tokens
    sampling = Sampling(
        max_tokens=limit,
        stop_id=seat.tokenizer.end_id,
        temperature=1.0 if is_greedy else settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        greedy=is_greedy,
        continued=kind == "answer" and t == 0 and settings.rounds > 0,
    )
    seeds = [name_seed(settings.seed, p.id, kind, t, s) for p, s in cases]
    return seat.engine.generate([np.asarray(ids, np.int32) for ids in contexts], seeds, sampling)


def _across(speaker: Seat, hearer: Seat, ids: list[int], text: str) -> list[int]:
    """The ids that were sampled, where the hearer reads the same ones; else its own of the text."""
    return ids if hearer.tokenizer is speaker.tokenizer else hearer.tokenizer.encode(text)


def _facts(completion: Completion) -> dict[str, Any]:
    return {"tokens": len(completion.ids), "finish": completion.finish}


def _note_answers(items: list[Item], actor: Seat, answers: Sequence[Completion]) -> None:
    blank = {"parsed": None, "score": 0.0, "failed": True, "reason": "the engine gave no answer"}
    for item, answer in zip(items, answers, strict=True):
        text = actor.tokenizer.decode(actor.spoken(answer))
        item["answers"].append({"text": text, **blank, **_facts(answer)})


def _answered(
    items: list[Item], prompts: Sequence[Prompt], answers: Sequence[Completion], t: int
) -> list[tuple[Prompt, str]]:
    """What there is to judge of round t."""
    return [
        (prompt, item["answers"][t]["text"])
        for item, prompt, answer in zip(items, prompts, answers, strict=True)
        if answer.finish != "failed"
    ]


def _note_grades(
    items: list[Item], answers: Sequence[Completion], grades: Sequence[Grade], t: int
) -> None:
    judged = [item for item, a in zip(items, answers, strict=True) if a.finish != "failed"]
    for item, grade in zip(judged, grades, strict=True):
        for name in ("parsed", "score", "failed", "reason"):
            item["answers"][t][name] = getattr(grade, name)
