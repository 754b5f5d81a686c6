"""The bilevel loop: the critic leads, the actor follows. One step reads play, follow, and every K
steps probe, lead.

Suffixes: P prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_binac.algo.bilevel import due, opens_block
from megatron_binac.config import Config, LossConfig
from megatron_binac.rollout.batch import actor_turns, critic_turns, sequences
from megatron_binac.rollout.evaluate import evaluate
from megatron_binac.rollout.play import Players, generated_tokens, play, replay
from megatron_binac.tasks.base import Cursor
from megatron_binac.training.telemetry import Clock, Telemetry, tree_record
from megatron_binac.types import TrainSequence, Tree, Turn


class Learner(Protocol):
    """The trainable copy of one role."""

    num_updates: int

    def update(self, sequences: Sequence[TrainSequence], loss: LossConfig) -> dict[str, float]:
        """One batch of policy-gradient steps; what is logged, the same on every rank."""
        ...


def _nothing_to_settle(*, wait: bool = False) -> None:
    """Every save was complete when it returned."""


@dataclass(kw_only=True, slots=True)
class Run:
    """Everything the loop drives, and the state that a checkpoint must hold beside the weights."""

    config: Config
    players: Players
    cursor: Cursor
    actor: Learner
    critic: Learner | None
    telemetry: Telemetry
    clock: Clock
    save: Callable[[int], None]
    """Writes a checkpoint from which the given step comes next; collective."""
    stop_asked: Callable[[], bool]
    """True on every rank once any rank was asked to stop; collective."""
    first_step: int = 0
    generated_tokens: int = 0
    """Tokens sampled for training so far, over all ranks."""
    block: list[Tree] = field(default_factory=list)
    """Trees of the open block's first step, which its probe will answer again."""
    settle: Callable[..., None] = _nothing_to_settle
    """Puts a checkpoint in place that was written beside the training, once it is there (or waits
    for it: wait=True); collective."""
    measured: dict[str, float] = field(default_factory=dict)
    """The held-out evaluation of the policies as they stand; empty where they moved since."""


def train(run: Run) -> bool:
    """Train to the end of the run; False where it was asked to stop and saved first."""
    cfg, k = run.config, run.config.bilevel.actor_steps_per_critic_step
    if run.first_step == 0:
        measure(run, step=-1)
        run.telemetry.flush(-1, run.clock)
    if spent(run):  # resumed after its end
        return True
    for step in range(run.first_step, cfg.num_steps):
        with run.clock.phase("play"):  # attempts -> feedbacks -> revisions, graded at both ends
            prompts_P = run.cursor.take(cfg.rollout.prompts_per_step)
            trees_P = play(run.players, prompts_P, cfg.rollout, step)
            run.block = trees_P if opens_block(step, k) else run.block
            sampled = generated_tokens(trees_P)

        if cfg.actor.train:
            with run.clock.phase("follow"):  # the actor's inner problem, the critic held fixed
                turns, log = actor_turns(trees_P, cfg.bilevel)
                log |= run.actor.update(sequences(turns), cfg.actor.loss)
                run.players.actor.publish(run.actor.num_updates)
                run.telemetry.log(step, "actor/follow", log)

        if run.critic is not None and cfg.critic.train and cfg.rollout.criticised and due(step, k):
            if cfg.bilevel.lam != 0.0:
                with run.clock.phase("probe"):  # the adapted actor answers the same feedback: V*
                    run.block = replay(run.players, run.block, cfg.rollout, opened(step, k))
                    sampled += generated_tokens(run.block, probes=True)
            with run.clock.phase(
                "lead"
            ):  # the critic's outer problem: paid for what its words changed
                turns, log = critic_turns(run.block, cfg.bilevel, run.players.task)
                log |= run.critic.update(sequences(turns), cfg.critic.loss)
                run.players.critic.publish(run.critic.num_updates)
                run.telemetry.log(step, "critic/lead", log)

        run.generated_tokens += sampled
        run.telemetry.log(step, "play", {**summary(trees_P), "generated_tokens": sampled})
        run.telemetry.transcript(
            step, [tree_record(t) for t in trees_P[: cfg.track.transcripts_per_step]]
        )
        if finish_step(run, step):
            return step + 1 == cfg.num_steps or spent(run)
    return True


def finish_step(run: Run, step: int) -> bool:
    """Evaluate and save where due, write the step's row; True where the run ends here."""
    cfg = run.config
    run.measured = {}
    run.settle()
    stopping = run.stop_asked()
    last = step + 1 == cfg.num_steps or spent(run)
    if last or due(step, cfg.eval.every):
        measure(run, step)
    run.telemetry.flush(step, run.clock)
    if last or stopping or due(step, cfg.save_every):
        with run.clock.phase(
            "save"
        ):  # after the row: a checkpoint never knows of a step that has none
            run.save(step + 1)
    return last or stopping


def measure(run: Run, step: int) -> None:
    """Log the held-out evaluation of the policies as they stand."""
    with run.clock.phase("eval"):
        run.measured = evaluate(run.players, run.config)
        run.telemetry.log(step, "eval", run.measured)


def spent(run: Run) -> bool:
    """Whether the budget of sampled tokens is used up."""
    limit = run.config.max_generated_tokens
    return 0 < limit <= run.generated_tokens


def opened(step: int, k: int) -> int:
    """First step of the block that `step` belongs to."""
    return step - step % k


def summary(trees: Sequence[Tree]) -> dict[str, float]:
    """Training rewards of a step's trees: shares over the turns that could be judged."""

    def mean(turns: list[Turn]) -> float:
        good = [t.reward for t in turns if not t.failed]
        return sum(good) / len(good) if good else float("nan")

    attempts = [t for tree in trees for t in tree.attempts]
    revisions = [t for tree in trees for t in tree.turns("revision")]
    cut = sum(t.finish == "length" for tree in trees for t in tree.attempts)
    values = {"acc_t1": mean(attempts), "reward": mean(attempts + revisions)}
    if revisions:
        criticised = [tree.attempts[g] for tree in trees for g in tree.criticised]
        values |= {"acc_t2": mean(revisions), "acc_t1_criticised": mean(criticised)}
    return {**values, "cut_short": cut / max(len(attempts), 1)}
