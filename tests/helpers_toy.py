"""A toy for tests of the loop, without Megatron-Core: a task of two bits and tiny policies.

The answer is a xor b. The actor's logits are a sum over single tokens, so that it cannot work the
answer out; the critic's know the pair (a, b), and can. What the actor can learn is to follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_binac.algo.losses import PolicyLossConfig, finalize_stats, policy_loss
from megatron_binac.algo.prompts import Template
from megatron_binac.config import (
    BilevelConfig,
    Config,
    EvalConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RoleConfig,
    RolloutConfig,
    TaskConfig,
    TrackConfig,
)
from megatron_binac.planner.shapes import Shape
from megatron_binac.rollout.play import Players
from megatron_binac.rollout.scripted_engine import Script, ScriptedEngine
from megatron_binac.seeds import uniforms
from megatron_binac.tasks.base import Cursor
from megatron_binac.terms import Term
from megatron_binac.tokenizer import ACTOR, CRITIC, END, PAD, USER
from megatron_binac.training.loop import Run
from megatron_binac.training.telemetry import Clock, Telemetry
from megatron_binac.types import Grade, Prompt, Sampling, Split, TrainSequence

PIECES = (PAD, USER, ACTOR, CRITIC, END, "0", "1", "?")
END_ID, ZERO, ONE, JUNK = 4, 5, 6, 7


class ToyTokenizer:
    """One id a character, and the markers."""

    vocab_size = len(PIECES)
    end_id = END_ID
    pad_id = 0

    def encode(self, text: str) -> list[int]:
        return [PIECES.index(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(PIECES[i] for i in ids)

    def token_id(self, piece: str) -> int:
        return PIECES.index(piece)

    def offsets(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        return [(i, i + 1) for i in range(len(ids))]


@dataclass(frozen=True, kw_only=True)
class Xor:
    """Two bits; right is the one character that is their sum modulo 2."""

    name: str = "xor"
    breaks_on: str | None = None
    """An answer on which the verifier itself breaks."""

    def prompt(self, split: Split, index: int) -> Prompt:
        rng = np.random.default_rng([index, split == "eval"])
        a, b = rng.integers(0, 2, 2)
        return Prompt(
            id=f"xor/{split}/{index}", text=f"{a}{b}", gold=str(int(a != b)), task=self.name
        )

    def size(self, split: Split) -> int | None:
        return None

    def grade(self, prompt: Prompt, text: str) -> Grade:
        if text == self.breaks_on:
            raise RuntimeError("the verifier broke")
        return Grade(score=float(text == prompt.gold), parsed=text or None)

    def leaks(self, prompt: Prompt, attempt_text: str, feedback_text: str) -> bool:
        return attempt_text != prompt.gold and feedback_text == prompt.gold

    def verdict(self, feedback_text: str) -> bool | None:
        return None


class TinyLearner:
    """A log-linear policy: the logits of the next id are a sum over the last six ids.

    With `knows_pair` a table over the two first characters of the problem is added. `warmth` is the
    logit with which that table starts at the right answer.
    """

    def __init__(self, *, knows_pair: bool, lr: float, warmth: float = 0.0) -> None:
        vocab = len(PIECES)
        self.knows_pair, self.lr = knows_pair, lr
        self.weights = torch.zeros(6 * vocab + vocab * vocab, vocab, dtype=torch.float64)
        self.bias = torch.zeros(vocab, dtype=torch.float64)
        self.bias[[ZERO, ONE]] = 3.0
        for a in (ZERO, ONE):
            for b in (ZERO, ONE):
                self.weights[6 * vocab + a * vocab + b, ONE if a != b else ZERO] = warmth
        self.num_updates = 0
        self.shape: Shape | None = None
        self._flops = 0

    def take_flops(self) -> int:
        """A million for an update and a thousand for scoring, so that a test knows them again."""
        taken, self._flops = self._flops, 0
        return taken

    def _logprobs(self, weights: Tensor, prefix: np.ndarray, temperature: float) -> Tensor:
        vocab = len(PIECES)
        rows = [d * vocab + int(i) for d, i in enumerate(prefix[::-1][:6])]
        if self.knows_pair:
            rows.append(6 * vocab + int(prefix[1]) * vocab + int(prefix[2]))
        return ((weights[rows].sum(0) + self.bias) / temperature).log_softmax(-1)

    def learn(self, terms: Sequence[Term]) -> dict[str, float]:
        (term,) = terms
        sequences, loss = term.rows, term.loss
        assert isinstance(loss, LossConfig)
        num_tokens = sum(s.num_targets for s in sequences)
        if num_tokens == 0:
            return {"num_tokens": 0.0}
        weights = self.weights.clone().requires_grad_()
        places = [(s, t) for s in sequences for t in np.flatnonzero(s.mask)]
        logprob_T = torch.stack(
            [self._logprobs(weights, s.ids[:t], 1.0)[int(s.ids[t])] for s, t in places]
        )
        engine_T = torch.tensor([float(s.logprobs[t]) for s, t in places], dtype=torch.float64)
        loss_sum, stats = policy_loss(
            logprob_T,
            logprob_T.detach(),
            torch.tensor([s.advantage for s, _ in places], dtype=torch.float64),
            torch.ones(len(places), dtype=torch.bool),
            PolicyLossConfig(kl_coef=loss.kl_coef),
            engine_logprob_T=engine_T,
        )
        mean = loss_sum / num_tokens
        (gradient,) = torch.autograd.grad(mean, weights)
        norm = float(gradient.norm())
        if not (math.isfinite(float(mean)) and math.isfinite(norm)):
            raise FloatingPointError(f"update {self.num_updates + 1}: {float(mean)}, {norm}")
        self.weights = self.weights - self.lr * gradient
        self.num_updates += 1
        self._flops += 1_000_000
        return {**finalize_stats({**stats, "loss_sum": loss_sum.detach()}), "grad_norm": norm}

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, reference: bool = False
    ) -> list[np.ndarray]:
        assert not reference
        self._flops += 1000
        out = []
        for s in sequences:
            row = np.zeros(len(s.ids), np.float32)
            for t in np.flatnonzero(s.mask):
                row[t] = float(self._logprobs(self.weights, s.ids[:t], 1.0)[int(s.ids[t])])
            out.append(row)
        return out

    def answer(
        self, prompt: np.ndarray, seed: int, sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        """A script for `ScriptedEngine`: samples from the weights as they stand."""
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < sampling.max_tokens and ids[-1:] != [sampling.stop_id]:
            row = self._logprobs(
                self.weights, np.asarray([*prompt, *ids]), sampling.temperature
            ).numpy()
            draw = uniforms(np.asarray([seed], np.uint64), len(ids))[0]
            cumulative = np.exp(row).cumsum()
            token = int((cumulative <= draw * cumulative[-1]).sum())
            token = int(row.argmax()) if sampling.greedy else token
            ids.append(token)
            logprobs.append(float(row[token]))
        return ids, logprobs


def toy_config(**changes: Any) -> Config:
    """A run of one-character turns on the toy task."""
    role = RoleConfig(
        model=ModelConfig(max_sequence_length=32),
        optimizer=OptimizerConfig(),
        loss=LossConfig(kl_coef=0.0),
    )
    base = Config(
        recipe="toy",
        num_steps=20,
        actor=role,
        critic=role,
        rollout=RolloutConfig(
            prompts_per_step=4,
            attempts=4,
            criticised=2,
            feedbacks=3,
            revisions=2,
            max_attempt_tokens=1,
            max_feedback_tokens=1,
            max_revision_tokens=1,
        ),
        bilevel=BilevelConfig(lam=0.1),
        task=TaskConfig(name="xor"),
        eval=EvalConfig(every=0, num_prompts=8),
        track=TrackConfig(tensorboard=False),
    )
    return replace(base, **changes)


def toy_players(
    actor: Script, critic: Script | None, *, task: Xor | None = None, seed: int = 1
) -> Players:
    tokenizer = ToyTokenizer()
    return Players(
        actor=ScriptedEngine(actor),
        critic=None if critic is None else ScriptedEngine(critic),
        task=task or Xor(),
        template=Template(tokenizer),
        tokenizer=tokenizer,
        seed=seed,
    )


@dataclass(kw_only=True)
class Toy:
    """A run of the loop with its parts at hand."""

    run: Run
    actor: TinyLearner
    critic: TinyLearner
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What `run.save` was given, by step."""


def toy_run(
    run_dir: Path,
    config: Config,
    *,
    first_step: int = 0,
    stop: Callable[[], bool] = lambda: False,
    task: Xor | None = None,
    actor_script: Callable[[Script], Script] = lambda script: script,
    critic_script: Callable[[Script], Script] = lambda script: script,
) -> Toy:
    """A run with tiny learners; the scripts may be wrapped, to make some answers fail."""
    run_dir.mkdir(parents=True, exist_ok=True)
    actor = TinyLearner(knows_pair=False, lr=2.0)
    critic = TinyLearner(knows_pair=True, lr=2.0, warmth=1.0)
    players = toy_players(
        actor_script(actor.answer), critic_script(critic.answer), task=task, seed=config.seed
    )
    run = Run(
        config=config,
        players=players,
        cursor=Cursor(players.task, "train", seed=config.seed),
        actor=actor,
        critic=critic,
        telemetry=Telemetry(run_dir, config, is_writer=True, first_step=first_step),
        clock=Clock(),
        save=lambda step: None,
        stop_asked=stop,
        first_step=first_step,
    )
    toy = Toy(run=run, actor=actor, critic=critic)

    def save(step: int) -> None:
        toy.saved[step] = {
            "actor": (actor.weights, actor.num_updates),
            "critic": (critic.weights, critic.num_updates),
            "cursor": run.cursor.state(),
            "generated_tokens": run.generated_tokens,
            "block": list(run.block),
        }

    run.save = save
    return toy
