"""Composition root of `binac eval MODEL --task NAME`: run folders and Hugging Face models become
seats, a task is built, and the rounds are played and counted."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_binac import run_folder
from megatron_binac.algo.chat_prompts import ChatTemplate, plain_render
from megatron_binac.models import cpu
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import start_distributed
from megatron_binac.rollout.hf_engine import (
    HuggingFaceEngine,
    TransformersTokenizer,
    is_hugging_face,
)
from megatron_binac.rollout.rounds import RoundSettings, Seat, load_settings, run_rounds
from megatron_binac.rollout.standings import standings, table
from megatron_binac.tasks import build_task
from megatron_binac.tasks.base import Task, wording_of
from megatron_binac.training.setup import build_players, load_weights
from megatron_binac.types import Role

RESULT = "result.json"


def run_evaluation(folder: Path, *, as_json: bool) -> int:
    """Play what is missing of the evaluation that `folder` was claimed for, and print its numbers.

    They are written to `result.json` beside the items as well.
    """
    settings = load_settings(folder)
    start_distributed()
    task: Any = build_task(settings.task, **settings.task_options)
    try:
        actor, critic = _seats(settings, task)
        is_first = dist.get_rank() == 0
        items = run_rounds(actor, critic, task, settings, folder, _progress if is_first else _quiet)
        if is_first:
            _report(folder, settings, task, items, actor, critic, as_json=as_json)
    finally:
        getattr(task, "close", lambda: None)()
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _report(
    folder: Path,
    settings: RoundSettings,
    task: Any,
    items: list[dict[str, Any]],
    actor: Seat,
    critic: Seat | None,
    *,
    as_json: bool,
) -> None:
    found = standings(
        items,
        same_answer=getattr(task, "same_answer", lambda one, other: one.strip() == other.strip()),
        seed=settings.seed,
        summarise=getattr(task, "summarise", None),
        prompts={p.id: p for p in (task.prompt("eval", i) for i in range(_num_prompts(items)))},
    )
    result = {
        "settings": json.loads((folder / "settings.json").read_text(encoding="utf-8")),
        "actor": f"{actor.name}, {actor.num_parameters:,} parameters",
        "critic": critic and f"{critic.name}, {critic.num_parameters:,} parameters",
        "standings": found,
    }
    text = json.dumps(_finite(result), indent=2)
    draft = folder / f".{RESULT}"
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(folder / RESULT)
    print(text if as_json else f"{table(result)}\nitems and numbers are in {folder}")


def _num_prompts(items: list[dict[str, Any]]) -> int:
    return len({item["id"] for item in items})


def _finite(value: Any) -> Any:
    """A share of nothing is nan, for which JSON has no word: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _progress(done: int, total: int) -> None:
    print(f"binac: {done} of {total} chains", file=sys.stderr, flush=True)


def _quiet(done: int, total: int) -> None:
    return


# Seats


def _seats(settings: RoundSettings, task: Task) -> tuple[Seat, Seat | None]:
    """Actor and critic; the critic of a model without one of its own is the model itself."""
    own = _read_model(settings.model, settings.stamps[0], settings, task)
    if settings.rounds == 0:
        return own["actor"], None
    if settings.critic is None:
        critic = own.get("critic")
        if critic is None:
            raise ValueError(
                f"{settings.model} has no critic; give one by --critic, or --rounds 0 for answers "
                "alone"
            )
        return own["actor"], critic
    other = _read_model(settings.critic, settings.stamps[1], settings, task)
    return own["actor"], other.get("critic", other["actor"])


def _read_model(model: str, stamp: str, settings: RoundSettings, task: Task) -> dict[Role, Seat]:
    if is_hugging_face(model):
        seat = _hugging_face_seat(model, settings, task)
        return {"actor": seat, "critic": seat}
    return _run_seats(Path(model), stamp)


def _run_seats(run_dir: Path, step: str) -> dict[Role, Seat]:
    """Both roles of a run at one of its checkpoints."""
    config = run_folder.load_config(run_dir)
    config.check_world(dist.get_world_size())
    path = run_dir / "checkpoints" / step
    if not path.is_dir():
        raise ValueError(
            f"the checkpoint {path} is gone, and the items here are of its weights; pass another "
            "--out to evaluate the newest one"
        )
    learners, players = build_players(config, run_dir, fresh_weights=True)
    state = load_weights(path, learners, players)
    engines: dict[Role, Any] = {"actor": players.actor}
    if players.critic is not None:
        engines["critic"] = players.critic
    return {
        role: Seat(
            name=f"{role} of {run_dir} at step {state['step']}",
            engine=engine,
            tokenizer=players.tokenizer,
            template=players.template,
            end_ids=frozenset([players.tokenizer.end_id]),
            num_parameters=_num_parameters(learners.get(role, learners["actor"])),
        )
        for role, engine in engines.items()
    }


def _num_parameters(learner: MegatronLearner) -> int:
    """Of the whole model: what is split counts on each rank, what is copied once."""
    groups = learner.groups
    own = sum(
        p.numel()
        for p in learner.parameters()
        if groups.tp_rank == 0 or getattr(p, "tensor_model_parallel", False)
    )
    total = torch.tensor(own, dtype=torch.long, device=cpu.device())
    for group in (groups.collection.tp, groups.collection.pp):
        dist.all_reduce(total, group=group)
    return int(total)


def _hugging_face_seat(model: str, settings: RoundSettings, task: Task) -> Seat:
    tokenizer = TransformersTokenizer(model)
    engine = HuggingFaceEngine(model, tokenizer, precision=settings.precision)
    room = engine.max_tokens
    new = max(settings.max_tokens, settings.max_feedback_tokens)
    if room is not None and room <= new:
        raise ValueError(
            f"{model} has a context of {room} tokens and {new} new ones were asked for; lower "
            "--max-tokens or --max-feedback-tokens"
        )
    template = ChatTemplate(
        tokenizer,
        tokenizer.render if tokenizer.has_chat_template else plain_render,
        tokenizer.encode_markup,
        wording_of(task),
        max_prompt_tokens=None if room is None else room - new,
    )
    return Seat(
        name=model,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        end_ids=engine.end_ids,
        num_parameters=engine.num_parameters,
    )
