"""The bilevel loop: the critic leads, the actor follows. One step reads play, follow, and every K
steps probe, lead.

Suffixes: P prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megatron_binac.algo.bilevel import due, opens_block
from megatron_binac.config import Config
from megatron_binac.objectives.build import follow_terms, lead_terms
from megatron_binac.objectives.situation import Situation, ValueModel
from megatron_binac.planner.flops import Work, forward_flops
from megatron_binac.planner.shapes import Shape
from megatron_binac.rollout.evaluate import evaluate
from megatron_binac.rollout.play import Players, generated_tokens, play, play_telling, replay
from megatron_binac.rollout.work import sampling_work
from megatron_binac.tasks.base import Cursor
from megatron_binac.terms import Term
from megatron_binac.training.telemetry import Clock, Telemetry, tree_record
from megatron_binac.types import Role, TrainSequence, Tree, Turn


class Learner(Protocol):
    """The trainable copy of one role."""

    num_updates: int

    @property
    def shape(self) -> Shape | None:
        """What it multiplies; None: its FLOPs are not counted."""
        ...

    def take_flops(self) -> int:
        """Model FLOPs of what was scored and learned on all ranks since the last take."""
        ...

    def learn(self, terms: Sequence[Term]) -> dict[str, float]:
        """One batch of steps on the terms' sum; what is logged, the same on every rank."""
        ...

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, reference: bool = False
    ) -> list[np.ndarray]:
        """float32 [L] per sequence: log-prob of every masked token, 0 elsewhere."""
        ...


class CriticCollapse(RuntimeError):
    """The critic has nothing left to say; the run was saved before it was ended."""


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
    memory: dict[str, Any] = field(default_factory=dict)
    """JSON-able numbers that the method keeps from step to step; part of a checkpoint."""
    values: ValueModel | None = None
    """The value head, where the method has one."""
    ahead: Callable[[Sequence[Term]], AbstractContextManager[None]] = lambda terms: nullcontext()
    """Inside it the actor's engine answers as the best response th*, which the actor has come to by
    its own steps, or comes to by some more on these terms, taken back afterwards."""


def train(run: Run) -> bool:
    """Train to the end of the run; False where it was asked to stop and saved first."""
    k = run.config.bilevel.actor_steps_per_critic_step
    forget_flops(run)
    if run.first_step == 0:
        measure(run, step=-1)
        run.telemetry.flush(-1, run.clock)
    if spent(run):  # resumed after its end
        return True
    for step in range(run.first_step, run.config.num_steps):
        cfg = run.config.at(progress(run, step))
        terms: list[Term] = []
        with run.clock.phase("play"):  # attempts -> feedbacks -> revisions, graded at both ends
            trees_P, dropped = grow(run, cfg, step)
            sampled = generated_tokens([*trees_P, *dropped])
            count_flops(run, step, "play", sampling_work([*trees_P, *dropped]))
            run.block = trees_P if opens_block(step, k) else run.block

        if cfg.actor.train:
            with run.clock.phase("follow"):  # the actor's inner problem, the critic held fixed
                terms, log = follow_terms(situation(run, cfg, step, trees_P))
                log |= run.actor.learn(terms)
                publish(run.players, run.actor, run.critic)
                run.telemetry.log(step, "actor/follow", log)
                count_flops(run, step, "follow")

        if leads(run, cfg) and due(step, k):
            if cfg.bilevel.lam != 0.0 and cfg.bilevel.adaptation != "value":
                # The adapted actor answers the same feedback again: V*.
                with run.clock.phase("probe"), run.ahead(terms):
                    run.block = replay(run.players, run.block, cfg.rollout, opened(step, k))
                    sampled += generated_tokens(run.block, probes=True)
                    count_flops(run, step, "probe", sampling_work(run.block, probes=True))
            with run.clock.phase("lead"):  # the critic's outer problem: paid for what its words did
                terms, log = lead_terms(situation(run, cfg, step, run.block))
                log |= run.critic.learn(terms)
                publish(run.players, run.actor, run.critic)
                run.telemetry.log(step, "critic/lead", log)
                count_flops(run, step, "lead")
                if "entropy" in log:
                    run.memory["critic_entropy"] = log["entropy"]

        run.generated_tokens += sampled
        run.telemetry.log(step, "play", {**summary(trees_P), "generated_tokens": sampled})
        run.telemetry.transcript(
            step, [tree_record(t) for t in trees_P[: cfg.track.transcripts_per_step]]
        )
        if finish_step(run, step):
            return step + 1 == cfg.num_steps or spent(run)
    return True


def grow(run: Run, cfg: Config, step: int) -> tuple[list[Tree], list[Tree]]:
    """The step's trees, and those that were sampled and dropped."""
    if cfg.rollout.resample:
        return play_telling(run.players, run.cursor, cfg.rollout, step)
    prompts_P = run.cursor.take(cfg.rollout.prompts_per_step)
    return play(run.players, prompts_P, cfg.rollout, step), []


def count_flops(
    run: Run, step: int, phase: str, sampled: Mapping[Role, Work] | None = None
) -> None:
    """Log the model FLOPs of a phase by role: of what it sampled, scored and learned.

    Weights that both roles share count for the one whose phase it is. A critic that is no model of
    this run has no FLOPs here.
    """
    learners = {"actor": run.actor, "critic": run.critic}
    order: tuple[Role, ...] = ("critic", "actor") if phase == "lead" else ("actor", "critic")
    for role in order:
        learner = learners[role]
        if learner is None or learner.shape is None:
            continue
        spent = learner.take_flops()
        if sampled is not None:
            spent += forward_flops(learner.shape, sampled[role])
        if spent:
            run.telemetry.log(step, f"{role}/{phase}", {"flops": spent})


def forget_flops(run: Run) -> None:
    """What a warm start or an evaluation computes is no part of the training."""
    for learner in (run.actor, run.critic):
        if learner is not None:
            learner.take_flops()


def situation(run: Run, cfg: Config, step: int, trees: Sequence[Tree]) -> Situation:
    """What the objectives may look at."""
    return Situation(
        trees=trees,
        config=cfg,
        step=step,
        players=run.players,
        actor=run.actor,
        memory=run.memory,
        values=run.values,
    )


def publish(players: Players, actor: Learner, critic: Learner | None) -> None:
    """From here on the engines answer with the policies as they stand."""
    players.actor.publish(actor.num_updates)
    if critic is not None and players.critic is not None:
        players.critic.publish(critic.num_updates)


def leads(run: Run, cfg: Config) -> bool:
    """Whether a critic learns in this step's stage."""
    learns = cfg.actor.train if cfg.shared_policy else cfg.critic_learns
    return run.critic is not None and learns and cfg.rollout.criticised > 0


def progress(run: Run, step: int) -> float:
    """Share of the run that lies behind: of its steps or of its tokens, whichever is further."""
    limit = run.config.max_generated_tokens
    spent_share = run.generated_tokens / limit if limit else 0.0
    return max(step / run.config.num_steps, spent_share)


def finish_step(run: Run, step: int) -> bool:
    """Evaluate and save where due, write the step's row; True where the run ends here."""
    cfg = run.config
    run.measured = {}
    run.settle()
    stopping = run.stop_asked()
    last = step + 1 == cfg.num_steps or spent(run)
    collapsed = False
    if last or due(step, cfg.eval.every):
        measure(run, step)
        collapsed = has_collapsed(run)
    run.telemetry.flush(step, run.clock)
    if last or stopping or collapsed or due(step, cfg.save_every):
        with run.clock.phase(
            "save"
        ):  # after the row: a checkpoint never knows of a step that has none
            run.save(step + 1)
    if collapsed:
        raise CriticCollapse(
            f"step {step + 1}: in {run.memory['collapse']} evaluations in a row second answers "
            f"were no better under the critic's feedback than under another problem's (uplift "
            f"{run.measured['sampled/uplift_over_shuffled']:.3f}), at a critic's entropy of "
            f"{run.memory.get('critic_entropy', 'unknown')} nats per token. The run is "
            "saved. Try a smaller critic.optimizer.lr, a larger critic.loss.kl_coef, more "
            "rollout.revisions, or set collapse=null to go on"
        )
    return last or stopping


def has_collapsed(run: Run) -> bool:
    """Count evaluations in a row in which the critic's words were worth nothing."""
    rule = run.config.collapse
    if rule is None or "sampled/uplift_over_shuffled" not in run.measured:
        return False
    useless = run.measured["sampled/uplift_over_shuffled"] <= rule.min_uplift
    # Where no step said how sure the critic is, its worth decides alone.
    entropy = run.memory.get("critic_entropy", 0.0)
    count = run.memory.get("collapse", 0) + 1 if useless and entropy <= rule.max_entropy else 0
    run.memory["collapse"] = count
    return count >= rule.patience


def measure(run: Run, step: int) -> None:
    """Log the held-out evaluation of the policies as they stand."""
    with run.clock.phase("eval"):
        run.measured = evaluate(run.players, run.config, score=run.actor.logprobs)
        forget_flops(run)
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

    attempts = [t for tree in trees if tree.round == 0 for t in tree.attempts]
    revisions = [t for tree in trees for t in tree.turns("revision")]
    cut = sum(t.finish == "length" for t in attempts)
    values = {"acc_t1": mean(attempts), "reward": mean(attempts + revisions)}
    if revisions:
        criticised = [tree.attempts[g] for tree in trees for g in tree.criticised]
        values |= {"acc_t2": mean(revisions), "acc_t1_criticised": mean(criticised)}
    return {**values, "cut_short": cut / max(len(attempts), 1)}
