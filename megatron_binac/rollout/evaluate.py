"""Held-out measurement, the same in the loop and in `binac eval`: both turns, and what the
feedback is worth.

N cases: the held-out prompts, each `samples` times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_binac.algo import metrics
from megatron_binac.config import Config
from megatron_binac.rollout.batch import row
from megatron_binac.rollout.judging import Judging
from megatron_binac.rollout.play import Players, Seed, seeds_of
from megatron_binac.types import Prompt, Sampling, TrainSequence, Turn, TurnKind

EVAL_STEP = -1
"""Evaluation draws from seeds of a step of its own: the same ones every time, so that runs
compare."""


Score = Callable[[Sequence[TrainSequence]], list[np.ndarray]]
"""Rows to the actor's log-prob of every masked token, float32 [L] each (`Learner.logprobs`)."""


def evaluate(
    players: Players, config: Config, num_prompts: int | None = None, score: Score | None = None
) -> dict[str, float]:
    """acc_t1 and acc_t2, sampled and greedy, with intervals, and acc_t2 under other feedback.

    Keys are `sampled/NAME` and `greedy/NAME`. Names: acc_t1, acc_t2 (with `_lo`, `_hi`: 95 %),
    delta, fix, break, oracle_gate (an upper bound: the verifier decides), learned_gate,
    acc_t2_shuffled (the critic's feedback on another problem), acc_t2_oracle (the task's own right
    feedback, where it has one), acc_t2_none (a second try on empty feedback), uplift_*, acc_dis,
    leak, num_failed; with `score`, of sampled answers, reliance: mean log pi(y1 | x, y0, z) - log
    pi(y1 | x, y0) in nats per answer, what the words themselves changed.
    """
    num = config.eval.num_prompts if num_prompts is None else num_prompts
    prompts_P = [players.task.prompt("eval", i) for i in range(num)]
    values: dict[str, float] = {}
    for mode in ("sampled", "greedy"):
        samples = config.eval.samples if mode == "sampled" else 1
        greedy = mode == "greedy"
        case = _Cases(players, config, prompts_P, samples, greedy=greedy)
        case.score = None if greedy else score
        values.update({f"{mode}/{name}": value for name, value in case.measure().items()})
    return values


class _Cases:
    """One pass over the held-out prompts in one mode."""

    def __init__(
        self,
        players: Players,
        config: Config,
        prompts_P: Sequence[Prompt],
        samples: int,
        *,
        greedy: bool,
    ) -> None:
        self.players, self.config, self.samples, self.greedy = players, config, samples, greedy
        self.prompts = [p for p in prompts_P for _ in range(samples)]
        self.seed: Seed = seeds_of(config.seed, EVAL_STEP)
        self.score: Score | None = None
        self._stack = ExitStack()
        self._judged: list[tuple[Judging, list[Turn]]] = []

    def _speak(self, kind: TurnKind, contexts: list[list[int]], tag: str) -> list[Turn]:
        """Turns whose grades come with `_grade`."""
        judging = self._stack.enter_context(Judging(self.players.task))
        seeds, sampling = self._seeds(kind, tag), self._sampling(kind)
        turns = self.players.answers(judging, kind, self.prompts, contexts, seeds, sampling)
        self._judged.append((judging, turns))
        return turns

    def _grade(self) -> None:
        for judging, turns in self._judged:
            self.players.grade(judging, self.prompts, turns)
        self._judged.clear()

    def _criticise(self, attempts: list[Turn]) -> list[Turn]:
        return self.players.feedback(
            self.prompts, attempts, self._seeds("feedback", ""), self._sampling("feedback")
        )

    def _seeds(self, kind: TurnKind, tag: str) -> list[int]:
        return [self.seed(p, kind, tag, i % self.samples) for i, p in enumerate(self.prompts)]

    def _sampling(self, kind: TurnKind) -> Sampling:
        rollout = replace(self.config.rollout, top_k=0, top_p=1.0)
        continued = kind == "attempt" and self.players.has_critic
        return self.players.sampling(rollout, kind, greedy=self.greedy, continued=continued)

    def _revise(self, attempts: list[Turn], feedback_ids: list[list[int]], tag: str) -> list[Turn]:
        template, spoken = self.players.template, self.players.spoken
        contexts = [
            template.revision_ids(p, spoken(y.ids), z)
            for p, y, z in zip(self.prompts, attempts, feedback_ids, strict=True)
        ]
        return self._speak("revision", contexts, tag)

    def measure(self) -> dict[str, float]:
        with self._stack:
            self._stack.callback(self.players.forget)
            return self._measure()

    def _measure(self) -> dict[str, float]:
        players = self.players
        attempts = self._speak(
            "attempt", [players.template.attempt_ids(p) for p in self.prompts], ""
        )
        if not players.has_critic:
            self._grade()
            return self._first(attempts)
        feedbacks = self._criticise(attempts)
        words = [players.spoken(z.ids) for z in feedbacks]
        # The same seeds for every kind of feedback: what differs is the feedback alone.
        revisions = self._revise(attempts, words, "")
        shift = self.samples * (1 + len(self.prompts) // self.samples // 2)
        shuffled = self._revise(attempts, words[shift:] + words[:shift], "")
        none = self._revise(attempts, [[] for _ in words], "")
        oracle_feedback = getattr(players.task, "oracle_feedback", None)
        if oracle_feedback is not None:
            texts = [
                oracle_feedback(p, y.text) for p, y in zip(self.prompts, attempts, strict=True)
            ]
            oracle = self._revise(attempts, [players.tokenizer.encode(t) for t in texts], "")
        self._grade()
        out = self._first(attempts)
        out |= self._accuracy("acc_t2", revisions)
        out |= self._accuracy("acc_t2_shuffled", shuffled)
        out["acc_t2_none"] = _mean(none)
        if oracle_feedback is not None:
            out["acc_t2_oracle"] = _mean(oracle)
            out["feedback_matches_oracle"] = sum(
                z.text == t for z, t in zip(feedbacks, texts, strict=True)
            ) / len(texts)
        first, second, valid = _scores(attempts), _scores(revisions), _valid(attempts, revisions)
        pairs = metrics.turn_metrics(first, second, valid)
        out |= {name: pairs[name] for name in ("delta", "fix", "break")}
        out["oracle_gate"] = metrics.oracle_gate(first, second, valid)
        verdicts = [players.task.verdict(z.text) for z in feedbacks]
        accept = torch.tensor([v is True for v in verdicts])
        out["learned_gate"] = metrics.learned_gate(accept, first, second, valid)
        for name, control in (("shuffled", shuffled), ("none", none)):
            both = valid & _valid(control, control)
            gains = metrics.uplift(first, second, _scores(control), both)
            out |= {f"{key}_over_{name}": value for key, value in gains.items()}
        said = torch.tensor([-1 if v is None else int(v) for v in verdicts])
        out["acc_dis"] = metrics.rate(metrics.discrimination(said, first), valid)
        leaks = [
            players.task.leaks(p, y.text, z.text)
            for p, y, z in zip(self.prompts, attempts, feedbacks, strict=True)
        ]
        out["leak"] = metrics.rate(torch.tensor(leaks), valid)
        if self.score is not None:
            out["reliance"] = self._reliance(self.score, attempts, revisions)
        return out

    def _first(self, attempts: list[Turn]) -> dict[str, float]:
        """What the attempts alone say."""
        failed = float(sum(t.failed for t in attempts))
        return self._accuracy("acc_t1", attempts) | {"num_failed": failed}

    def _reliance(self, score: Score, attempts: list[Turn], revisions: list[Turn]) -> float:
        """Log-prob of the revisions with the feedback in sight less that without it, a mean."""
        template, spoken = self.players.template, self.players.spoken
        without = [
            template.revision_ids(p, spoken(y0.ids), [])
            for p, y0 in zip(self.prompts, attempts, strict=True)
        ]
        pairs = [
            (row(y.prompt_ids, y.ids), row(np.asarray(c, np.int32), y.ids))
            for y, c in zip(revisions, without, strict=True)
            if not y.failed and len(y.ids)
        ]
        if not pairs:
            return float("nan")
        seen, unseen = (score(rows) for rows in zip(*pairs, strict=True))
        gain = sum(float(a.sum()) - float(b.sum()) for a, b in zip(seen, unseen, strict=True))
        return gain / len(pairs)

    def _accuracy(self, name: str, turns: list[Turn]) -> dict[str, float]:
        """Share of right answers among those that could be judged, with its 95 % interval by
        prompt."""
        rows = [
            (float(t.reward >= 1.0), p.id)
            for t, p in zip(turns, self.prompts, strict=True)
            if not t.failed
        ]
        if not rows:
            return {name: float("nan"), f"{name}_lo": 0.0, f"{name}_hi": 1.0}
        right, ids = zip(*rows, strict=True)
        if self.samples == 1:
            interval = metrics.wilson_interval(int(sum(right)), len(right))
        else:
            interval = metrics.cluster_bootstrap(
                right, ids, seed=self.config.seed, num_resamples=2000
            )
        return {name: interval.value, f"{name}_lo": interval.low, f"{name}_hi": interval.high}


def _scores(turns: Sequence[Turn]) -> Tensor:
    return torch.tensor([t.reward for t in turns], dtype=torch.float64)


def _valid(a: Sequence[Turn], b: Sequence[Turn]) -> Tensor:
    return torch.tensor([not (x.failed or y.failed) for x, y in zip(a, b, strict=True)])


def _mean(turns: Sequence[Turn]) -> float:
    good = [float(t.reward >= 1.0) for t in turns if not t.failed]
    return sum(good) / len(good) if good else float("nan")
