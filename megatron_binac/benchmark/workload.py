"""Fixed work for `binac bench`: a recipe's own models and loop, answers of recorded lengths.

Weights, problems and seeds are fixed, and an answer ends where a recorded one ended, so that two
measurements did the same work whatever the weights have learned. Sampling itself is real: every
token is drawn, and only then replaced where the record says that the answer ends, or does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_binac import config as configs
from megatron_binac import recipes
from megatron_binac.config import Config
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.rollout.megatron_engine import MegatronEngine
from megatron_binac.rollout.play import Players
from megatron_binac.tasks.base import Cursor
from megatron_binac.training.setup import build_players
from megatron_binac.types import Completion, Sampling, TurnKind

WORKLOADS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "quickstart": ("quickstart", "quickstart", ()),
    "quickstart_grpo": ("quickstart_grpo", "quickstart", ()),
    "long": (
        "quickstart_grpo",
        "gsm8k",
        (
            "rollout.prompts_per_step=8",
            "rollout.attempts=8",
            "rollout.max_attempt_tokens=256",
            "actor.model.max_sequence_length=288",
            "critic.model.max_sequence_length=288",
        ),
    ),
}
"""Name -> recipe, recorded lengths, settings."""


def workload_config(name: str, settings: Sequence[str] = ()) -> Config:
    """The config of a workload: no warm start, nothing tracked; ValueError for an unknown name."""
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}, expected one of {', '.join(WORKLOADS)}")
    recipe, _, own = WORKLOADS[name]
    plain = (
        "warm_start.actor.steps=0",
        "warm_start.critic.steps=0",
        "track.tensorboard=false",
        # Recorded tokens are not what the engine drew, so that its log-probs are others'.
        "actor.mismatch_alarm=0",
        "critic.mismatch_alarm=0",
    )
    return configs.override(recipes.get(recipe), [*plain, *own, *settings])


def recorded_lengths(name: str) -> dict[str, list[int]]:
    """Tokens of the recorded answers of a workload, by kind of turn."""
    file = resources.files("megatron_binac.benchmark").joinpath("data/rollout_lengths.json")
    entry: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))[WORKLOADS[name][1]]
    return {kind: value for kind, value in entry.items() if kind != "source"}


class RecordedEngine(MegatronEngine):
    """Samples as its parent does; the record decides where an answer ends."""

    def __init__(
        self, learner: MegatronLearner, *, max_sequences: int, lengths: dict[str, list[int]]
    ) -> None:
        super().__init__(learner, max_sequences=max_sequences)
        self.lengths = lengths
        self.kind: TurnKind = "attempt"
        """Of the turns that come next; `RecordedPlayers` sets it."""
        self._ends: dict[int, int] = {}

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        seeds: Sequence[int],
        sampling: Sampling,
        ended: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        pool = self.lengths.get(self.kind, [sampling.max_tokens])
        self._ends = {
            int(seed): min(pool[i % len(pool)], sampling.max_tokens) for i, seed in enumerate(seeds)
        }
        return super().generate(prompts, seeds, sampling, ended)

    def _choose(
        self, logits_BV: Tensor | None, seeds_B: np.ndarray, step: int, sampling: Sampling
    ) -> tuple[np.ndarray, np.ndarray]:
        token_B, logprob_B = super()._choose(logits_BV, seeds_B, step, sampling)
        ends_B = np.asarray([self._ends[int(seed)] for seed in seeds_B]) == step + 1
        other = 0 if sampling.stop_id else 1
        token_B = np.where(token_B == sampling.stop_id, other, token_B)
        return np.where(ends_B, sampling.stop_id, token_B).astype(np.int32), logprob_B


class RecordedPlayers(Players):
    """Tells the engine which kind of turn it is asked for."""

    def speak(self, engine: Any, kind: TurnKind, *args: Any, **kwargs: Any) -> Any:
        engine.kind = kind
        return super().speak(engine, kind, *args, **kwargs)


@dataclass(kw_only=True, slots=True)
class Workload:
    """What the phases of a step need."""

    name: str
    config: Config
    learners: dict[str, MegatronLearner]
    players: RecordedPlayers
    cursor: Cursor


def build(name: str, config: Config, folder: Path) -> Workload:
    """Learners with fresh weights and their reference, engines that follow the record."""
    learners, players = build_players(config, folder, fresh_weights=True)
    engines = {}
    for role, learner in learners.items():
        learner.hold_reference()
        engines[role] = RecordedEngine(
            learner,
            max_sequences=config.rollout.max_sequences_per_batch,
            lengths=recorded_lengths(name),
        )
    fields = {key: getattr(players, key) for key in Players.__dataclass_fields__}
    fields |= {"actor": engines["actor"], "critic": engines.get("critic")}
    return Workload(
        name=name,
        config=config,
        learners=learners,
        players=RecordedPlayers(**fields),
        cursor=Cursor(players.task, "train", seed=config.seed),
    )
