"""Composition root: a `Config` becomes a `Run`. The only file that knows every concrete class.

The functions here run on every rank of a job that is already there (torchrun, srun or a single
process).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_binac import packing, pulse
from megatron_binac.algo.prompts import Template
from megatron_binac.config import Config, RoleConfig, RoleWarmStart
from megatron_binac.kernels import choose_backend
from megatron_binac.models import checkpoint, cpu
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.offload import Offload, TakesTurns
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.models.scratch import scratch
from megatron_binac.models.value_head import ValueHead
from megatron_binac.rollout import http_critic
from megatron_binac.rollout.critics import ConstantCritic, RuleCritic, TextCritic
from megatron_binac.rollout.evaluate import evaluate
from megatron_binac.rollout.play import Players
from megatron_binac.seeds import name_seed
from megatron_binac.tasks import build_task
from megatron_binac.tasks.base import Cursor, Task, TeachingTask, corpus
from megatron_binac.terms import Term
from megatron_binac.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer
from megatron_binac.training import pretrained
from megatron_binac.training.engines import build_engine, prepare_engine
from megatron_binac.training.loop import CriticCollapse, Run, publish, train
from megatron_binac.training.profiling import Profiling
from megatron_binac.training.telemetry import Clock, Telemetry
from megatron_binac.training.trees import trees_from_json, trees_to_json
from megatron_binac.training.warm_start import warm_start
from megatron_binac.types import Role

logger = logging.getLogger(__name__)

COLLAPSED = 3
"""Exit code of a run that `collapse` ended."""
CORPUS_PROMPTS = 2000
"""Problems of the train split whose text the tokenizer is trained on."""


def run_training(config: Config, run_dir: Path, *, resume: bool) -> int:
    """Train to the end; the exit code: 0 finished, 3 ended because the critic had collapsed, 130,
    138 or 143 stopped after a signal; saved in each case."""
    start_distributed()
    _log_to(run_dir)
    config.check_world(dist.get_world_size())
    stop = _Stop()
    learners, players = build_players(config, run_dir, fresh_weights=resume)
    beats = pulse.of_rank(run_dir, dist.get_rank(), os.environ)
    profiling = Profiling(config.track, run_dir, dist.get_rank())
    run = _build_run(config, run_dir, learners, players, stop, beats, profiling, resume=resume)
    collapsed = False
    try:
        try:
            finished = train(run)
        except CriticCollapse as error:  # the same on every rank
            run.telemetry.note(str(error))
            finished = collapsed = True
        run.settle(wait=True)
        if not finished:
            run.telemetry.note(
                f"stopped by {signal.Signals(stop.received or signal.SIGTERM).name} after saving; "
                f"go on with: "
                f"binac train --resume {run_dir}"
            )
    finally:
        if beats is not None:
            beats.close()
        profiling.close()
        run.telemetry.close()
        players.actor.close()
        for critic in (players.critic, players.text_critic):
            if critic is not None:
                critic.close()
    dist.barrier()
    dist.destroy_process_group()
    if collapsed:
        return COLLAPSED
    return 0 if finished else 128 + (stop.received or signal.SIGTERM)


def run_warm_start(config: Config, run_dir: Path, role: Role) -> int:
    """Put the warm start of one role into the cache, from which every run of it then starts."""
    start_distributed()
    _log_to(run_dir)
    other = {"actor": "critic", "critic": "actor"}[role]
    alone = replace(config.warm_start, **{other: RoleWarmStart()})
    build_players(replace(config, warm_start=alone), run_dir)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def run_eval(config: Config, run_dir: Path, *, num_prompts: int | None, output: Path | None) -> int:
    """Evaluate the newest checkpoint of a run on held-out problems; prints JSON, or writes it to
    `output`."""
    start_distributed()
    config.check_world(dist.get_world_size())
    path = checkpoint.newest_good(run_dir / "checkpoints", set_aside=False)
    if path is None:
        raise ValueError(
            f"{run_dir} holds no checkpoint that is whole; train it first: binac train --resume "
            f"{run_dir}"
        )
    learners, players = build_players(config, run_dir, fresh_weights=True)
    state = load_weights(path, learners, players)
    values = evaluate(players, config, num_prompts, learners["actor"].logprobs)
    if dist.get_rank() == 0:
        text = json.dumps({"run": str(run_dir), "step": state["step"], **values}, indent=2)
        if output is None:
            print(text)
        else:
            output.write_text(text + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def load_weights(
    path: Path, learners: dict[str, MegatronLearner], players: Players
) -> dict[str, Any]:
    """The weights of a checkpoint, for the learners and for the engines that have copies of their
    own; its state."""
    state = checkpoint.load(path, learners)
    publish(players, learners["actor"], learners.get("critic", learners["actor"]))
    return state


def _log_to(run_dir: Path) -> None:
    """Show what the package logs on the first rank's screen and keep it in log.txt; others only
    warn."""
    root = logging.getLogger("megatron_binac")
    if dist.get_rank() != 0:
        root.setLevel(logging.WARNING)
        return
    root.setLevel(logging.INFO)
    form = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
    for handler in (logging.StreamHandler(sys.stdout), logging.FileHandler(run_dir / "log.txt")):
        handler.setFormatter(form)
        root.addHandler(handler)


def build_players(
    config: Config, run_dir: Path, *, fresh_weights: bool = False
) -> tuple[dict[str, MegatronLearner], Players]:
    """Both roles with their engines, the task and the tokenizer; warm-started unless
    `fresh_weights`."""
    task = build_task(config.task.name, **config.task.options)
    # A run that goes on has its small files already and takes its weights from a checkpoint.
    starts = {} if fresh_weights else pretrained.prepare_weights(config, run_dir)
    tokenizer = _tokenizer(config, task, run_dir)
    template = pretrained.build_template(tokenizer, task, _prompt_room(config))
    roles: dict[Role, RoleConfig] = {"actor": config.actor}
    if config.critic is not None:
        roles["critic"] = config.critic
    learners = {}
    for role, role_config in roles.items():
        groups = build_groups(role, role_config.parallel, name_seed(config.seed, role) % 2**31)
        learners[role] = MegatronLearner(
            role,
            role_config,
            groups,
            vocab_size=pretrained.embedding_rows(role, role_config, tokenizer),
            seed=name_seed(config.warm_start.seed, role, "weights"),
            num_steps=_num_updates(config, role),
            temperature=config.rollout.temperature,
        )
        if role in starts:
            pretrained.load_weights(starts[role], learners[role])
        if getattr(config.warm_start, role).steps and not fresh_weights:
            if not isinstance(template, Template):
                raise ValueError(
                    f"warm_start.{role}.steps is {getattr(config.warm_start, role).steps}, but the "
                    f"{role} comes with a chat template and knows how to answer; set it to 0"
                )
            if not isinstance(task, TeachingTask):
                raise ValueError(
                    f"warm_start.{role}.steps is {getattr(config.warm_start, role).steps} but "
                    f"task {task.name} "
                    f"offers no supervised examples; set warm_start.{role}.steps=0"
                )
            warm_start(config, role, learners[role], groups, task, template)
    if dist.get_rank() == 0:
        backend = choose_backend(cpu.device().type)
        logger.info(
            "chosen: device %s, kernels %s, packing %s", cpu.device(), backend, packing.backend()
        )
    sampled = {**learners, **({"critic": learners["actor"]} if config.shared_policy else {})}
    for role, learner in sampled.items():
        prepare_engine(role, learner, run_dir)
    engines = {
        role: build_engine(config, role, learner, run_dir) for role, learner in sampled.items()
    }
    players = Players(
        actor=engines["actor"],
        critic=engines.get("critic"),
        text_critic=_text_critic(config, task),
        task=task,
        template=template,
        tokenizer=tokenizer,
        seed=config.seed,
    )
    return {str(role): learner for role, learner in learners.items()}, players


def _text_critic(config: Config, task: Task) -> TextCritic | None:
    """The critic that is no policy of this run, where the config names one."""
    source = config.text_critic
    if source is None:
        return None
    if source.kind == "rule":
        return RuleCritic(task)
    if source.kind == "constant":
        return ConstantCritic(source.text)
    return http_critic.HttpCritic(
        base_url=source.base_url,
        model=source.model,
        api_key_env=source.api_key_env or None,
        system=http_critic.SYSTEM if source.system is None else source.system,
        template=http_critic.TEMPLATE if source.template is None else source.template,
        options=source.options,
        max_tokens=config.rollout.max_feedback_tokens,
        temperature=source.temperature,
        timeout_s=source.timeout,
        max_retries=source.max_retries,
        max_parallel=source.max_parallel,
        cache_dir=Path(source.cache_dir),
    )


def _prompt_room(config: Config) -> int:
    """Tokens that the longest prompt of either role may take, so that an answer still fits behind
    it."""
    rollout = config.rollout
    room = config.actor.model.max_sequence_length - max(
        rollout.max_attempt_tokens, rollout.max_revision_tokens
    )
    if config.critic is not None:
        room = min(room, config.critic.model.max_sequence_length - rollout.max_feedback_tokens)
    return room


def _num_updates(config: Config, role: Role) -> int:
    """Optimizer steps that a role will take in a whole run: what its schedule decays over."""
    if role == "actor":
        steps = config.num_steps
        if config.shared_policy:
            steps += config.num_steps // config.bilevel.actor_steps_per_critic_step
        return steps * config.actor.loss.updates_per_batch
    assert config.critic is not None
    blocks = config.num_steps // config.bilevel.actor_steps_per_critic_step
    return max(1, blocks * config.critic.loss.updates_per_batch)


def _tokenizer(config: Config, task: Task, run_dir: Path) -> Tokenizer:
    """The tokenizer that the config names, or one trained from the task's own text and kept with
    the run."""
    if config.task.tokenizer is not None:
        return load_tokenizer(Path(config.task.tokenizer))
    own = pretrained.own_tokenizer(config, run_dir)
    if own is not None:
        return own
    path = run_dir / "tokenizer" / "tokenizer.model"
    if dist.get_rank() == 0 and not path.exists():
        SentencePieceTokenizer.train(
            corpus(task, CORPUS_PROMPTS), path, vocab_size=config.task.vocab_size
        )
    dist.barrier()
    return load_tokenizer(path)


def _build_run(
    config: Config,
    run_dir: Path,
    learners: dict[str, MegatronLearner],
    players: Players,
    stop: _Stop,
    beats: pulse.Pulse | None,
    profiling: Profiling,
    *,
    resume: bool,
) -> Run:
    folder = run_dir / "checkpoints"
    cursor = Cursor(players.task, "train", seed=config.seed)
    path = checkpoint.newest_good(folder, set_aside=True) if resume else None
    if resume and path is None:
        raise ValueError(
            f"no checkpoint of {run_dir} is whole; those that are damaged are called "
            "step_N.damaged now. Put a copy of one back, or start a new run"
        )
    first_step = 0 if path is None else int(path.name.removeprefix("step_"))
    profiling.begin(first_step)
    is_writer = dist.get_rank() == 0
    run = Run(
        config=config,
        players=players,
        cursor=cursor,
        actor=learners["actor"],
        critic=learners["actor"] if config.shared_policy else learners.get("critic"),
        telemetry=Telemetry(run_dir, config, is_writer=is_writer, first_step=first_step),
        clock=Clock(
            torch.cuda.synchronize if torch.cuda.is_available() else None,
            entered=None if beats is None else beats.beat,
            around=profiling.phase,
        ),
        save=lambda step: None,
        stop_asked=stop.asked,
        first_step=first_step,
    )

    head = None
    if config.value_head is not None:
        head = run.values = ValueHead(learners["actor"], config.value_head)
    if config.bilevel.adaptation == "lookahead":
        run.ahead = partial(_look_ahead, run, learners["actor"])
    background = checkpoint.Background() if config.save_async else None

    def save(step: int) -> None:
        opened = step % config.bilevel.actor_steps_per_critic_step
        state = {
            "cursor": run.cursor.state(),
            "generated_tokens": run.generated_tokens,
            "block": trees_to_json(run.block) if opened else [],
            "memory": run.memory,
            "value_head": None if head is None else head.state(),
        }
        checkpoint.save(
            folder,
            step,
            learners,
            state,
            config.keep_checkpoints,
            keep_best=config.keep_best,
            score=run.measured.get("sampled/acc_t2", run.measured.get("sampled/acc_t1")),
            background=background,
        )

    run.save = save
    if background is not None:
        run.settle = background.settle
    if is_writer:
        checkpoint.drop_old(folder, config.keep_checkpoints, config.keep_best)
    if path is None:
        save(0)
    else:
        # The reference is the policy before the first step, whatever the newest checkpoint holds.
        _load_reference(folder / checkpoint.FIRST, config, learners)
    for learner in learners.values():
        if _needs_reference(config, learner):
            learner.hold_reference()
    if path is not None:
        state = checkpoint.load(path, learners)
        run.cursor.restore(state["cursor"])
        run.generated_tokens = state["generated_tokens"]
        run.block = trees_from_json(state["block"])
        run.memory.update(state["memory"])
        if head is not None:
            head.restore(state["value_head"])
        run.telemetry.note(f"resumed from {path}: step {first_step} comes next")
    if config.offload_idle:
        _take_turns(run, learners)
    publish(run.players, run.actor, run.critic)
    return run


def _take_turns(run: Run, learners: dict[str, MegatronLearner]) -> None:
    """Keep what is not needed in host memory from here on."""
    engines = [e for e in (run.players.actor, run.players.critic) if hasattr(e, "rest")]
    offload = Offload(learners, engines)
    turns = {role: TakesTurns(learner, offload) for role, learner in learners.items()}
    run.actor = turns["actor"]
    run.critic = run.actor if run.config.shared_policy else turns.get("critic")
    save = run.save

    def save_whole(step: int) -> None:
        with offload.whole():
            save(step)

    run.save = save_whole


@contextmanager
def _look_ahead(run: Run, actor: MegatronLearner, terms: Sequence[Term]) -> Iterator[None]:
    """Let the actor take further steps on its last batch, answer, and take them back."""
    with scratch(actor):
        for _ in range(run.config.bilevel.lookahead_steps):
            actor.learn(terms)
        publish(run.players, run.actor, run.critic)
        yield
    publish(run.players, run.actor, run.critic)


def _needs_reference(config: Config, learner: MegatronLearner) -> bool:
    """Whether any stage measures this role against the policy before the first step."""
    if not learner.config.train:
        return False
    for part in (config, *(config.at(stage.start) for stage in config.stages)):
        loss = part.critic_loss if learner.role == "critic" else part.actor.loss
        held = [loss.kl_coef]
        if learner.role == "actor":
            held += [
                part.credit.attempt_kl_coef or 0.0,
                part.teacher.trust_region if part.teacher else 0.0,
                part.spans.kl_coef if part.spans else 0.0,
            ]
        if any(held):
            return True
    return False


def _load_reference(first: Path, config: Config, learners: dict[str, MegatronLearner]) -> None:
    """Put the weights before the first step into the roles that will hold them. Raises ValueError
    where they are damaged: there is no other copy."""
    needing = {
        role: learner for role, learner in learners.items() if _needs_reference(config, learner)
    }
    if not needing:
        return
    reason = checkpoint.damage(first)
    if reason is not None:
        raise ValueError(
            f"{first} is damaged: {reason}; it holds the reference of the KL. Put a copy back, or "
            f"start a new run from these weights"
        )
    for role, learner in needing.items():
        checkpoint.load_learner(first / role, learner, weights_only=True)


class _Stop:
    """Remembers that this rank was asked to stop; ranks agree on it once a step."""

    def __init__(self) -> None:
        self.received: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: Any) -> None:
        self.received = number

    def asked(self) -> bool:
        flag = torch.tensor(self.received or 0, device=cpu.device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self.received = int(flag) or None
        return self.received is not None
