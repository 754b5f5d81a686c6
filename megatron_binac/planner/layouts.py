"""Layouts of both roles on a number of GPUs: which are legal, which fit, which are fast.

One layout gives each role its tensor and pipeline size, recomputation and the size of a
micro-batch, and says whether engines sample on the training GPUs (they wake when learning pauses)
or on GPUs of their own. Every combination is looked at; the best are those that no other beats in
both step time and memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_binac.config import Config, ParallelConfig, RoleConfig
from megatron_binac.planner import flops, memory
from megatron_binac.planner.hardware import Gpu
from megatron_binac.planner.shapes import Shape
from megatron_binac.planner.speed import (
    Answers,
    Layout,
    Phases,
    Shares,
    pass_seconds,
    refit_seconds,
    sampling_seconds,
)

ALLOWANCE = 4 << 30
"""Bytes of a GPU for CUDA's context, NCCL's buffers and the allocator's gaps: assumed, not
counted."""
MICRO_BATCHES = (4096, 16384)
"""Tokens of a micro-batch that are tried; one that holds no whole sequence is raised to do so."""
ENGINE_SHARES = (0.25, 0.5)
"""Shares of the GPUs that engines get for themselves where they live apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is asked: a recipe's loop with these shapes, lengths and GPUs."""

    config: Config
    shapes: dict[str, Shape]
    gpu: Gpu
    gpus: int
    prompt_tokens: int
    mean_share: float
    """Mean answer over the longest allowed."""
    precision: str
    only: tuple[str, ...] = ()
    """Layouts whose name lacks one of these texts are not looked at."""
    price: float | None = None
    """Of a GPU hour, in whatever currency; None: costs are GPU hours."""

    def answers(self, kind: str) -> Answers:
        """The answers of one kind that a step samples; a probe is sampled as revisions are."""
        r, mean = self.config.rollout, self.mean_share
        a, f = mean * r.max_attempt_tokens, mean * r.max_feedback_tokens
        criticised = r.prompts_per_step * r.criticised
        if kind == "attempt":
            samples, prompts, before, longest = (
                r.prompts_per_step * r.attempts, r.prompts_per_step, 0.0, r.max_attempt_tokens
            )  # fmt: skip
        elif kind == "feedback":
            samples, prompts, before, longest = (
                criticised * r.feedbacks, criticised, a, r.max_feedback_tokens
            )  # fmt: skip
        else:
            samples, prompts, before, longest = (
                criticised * r.feedbacks * r.revisions, criticised * r.feedbacks, a + f,
                r.max_revision_tokens,
            )  # fmt: skip
        return Answers(
            samples=samples,
            prompts=prompts,
            prompt=self.prompt_tokens + before,
            answer=mean * longest,
            longest=longest,
        )

    @property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """Kinds of turns that each role speaks."""
        if not self.config.rollout.criticised:
            return {"actor": ("attempt",)}
        if self.config.critic is None:
            # One policy for both, or a critic that is no model of this job.
            shared = ("feedback",) if self.config.shared_policy else ()
            return {"actor": ("attempt", *shared, "revision")}
        return {"actor": ("attempt", "revision"), "critic": ("feedback",)}

    def role(self, name: str) -> RoleConfig:
        found = self.config.actor if name == "actor" else self.config.critic
        assert found is not None
        return found

    @property
    def has_probe(self) -> bool:
        critic = self.config.critic
        learns = critic is not None and critic.train and self.config.rollout.criticised > 0
        return learns and self.config.bilevel.lam != 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One layout of the whole job."""

    parallel: dict[str, ParallelConfig]
    engine_tp: dict[str, int]
    engine_gpus: int
    micro_batch: int

    @property
    def name(self) -> str:
        parts = []
        for role, p in self.parallel.items():
            text = f"{role} tp{p.tp} pp{p.pp}"
            text += " recompute" if p.recompute == "full" else ""
            parts.append(f"{text} engine tp{self.engine_tp[role]}")
        place = f"{self.engine_gpus} GPUs for engines" if self.engine_gpus else "colocated"
        return f"{'; '.join(parts)}; {place}; micro-batch {self.micro_batch:,}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A layout that fits, with what it costs."""

    candidate: Candidate
    bytes_by_kind: dict[str, int]
    """Of the fullest GPU."""
    memory: int
    phases: Phases

    @property
    def step(self) -> float:
        return self.phases.step

    @property
    def needed(self) -> int:
        """Bytes without the KV cache, which takes what is left and runs with less."""
        return self.memory - self.bytes_by_kind.get("KV cache", 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A layout that is out, and why."""

    candidate: str
    why: str
    kind: str
    """illegal, memory or slower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What a search found."""

    best: list[Planned]
    """No other is both faster and smaller; the fastest first."""
    lost: list[Lost]
    tried: int

    def reasons(self) -> Counter[str]:
        return Counter(item.kind for item in self.lost)


def search(job: Job, shares: Shares) -> Search:
    """Try every layout of the job; ValueError where the job itself makes no sense."""
    fitting: list[Planned] = []
    lost: list[Lost] = []
    tried = 0
    seen: set[tuple[str, str]] = set()
    for candidate in _candidates(job):
        if not all(text in candidate.name for text in job.only):
            continue
        tried += 1
        why = illegal(job, candidate)
        if why is not None:
            if (candidate.name, why) not in seen:
                seen.add((candidate.name, why))
                lost.append(Lost(candidate=candidate.name, why=why, kind="illegal"))
            continue
        kinds, room = bytes_by_kind(job, candidate)
        total = sum(kinds.values())
        if total > job.gpu.memory or room <= 0:
            over = max(total - job.gpu.memory, -room) / 2**30
            largest = max(kinds, key=lambda k: kinds[k])
            why = f"over by {over:.1f} GiB, most of it {largest} ({kinds[largest] / 2**30:.1f} GiB)"
            lost.append(Lost(candidate=candidate.name, why=why, kind="memory"))
            continue
        phases = predict(job, candidate, shares, room)
        fitting.append(
            Planned(candidate=candidate, bytes_by_kind=kinds, memory=total, phases=phases)
        )
    fitting.sort(key=lambda p: (p.step, p.needed))
    best: list[Planned] = []
    for plan in fitting:
        if not best or plan.needed < min(b.needed for b in best):
            best.append(plan)
        else:
            lost.append(_slower(plan, best[0]))
    return Search(best=best, lost=lost, tried=tried)


def _slower(plan: Planned, winner: Planned) -> Lost:
    """Why a layout that fits is behind the fastest: the cause that grew most."""
    grown: dict[str, float] = {}
    for mine, theirs in (
        (plan.phases.causes, winner.phases.causes),
        (
            {k: v for k, v in plan.phases.seconds.items() if k in ("play", "probe", "refit")},
            winner.phases.seconds,
        ),
    ):
        for cause, value in mine.items():
            grown[cause] = grown.get(cause, 0.0) + value - theirs.get(cause, 0.0)
    worst = max(grown, key=lambda k: grown[k])
    why = f"{plan.step / winner.step:.2f} x the step of the best: {grown[worst]:+.1f} s of {worst}"
    return Lost(candidate=plan.candidate.name, why=why, kind="slower")


def _candidates(job: Job) -> Iterator[Candidate]:
    """Every combination that the number of GPUs admits."""
    sizes = [n for n in (1, 2, 4, 8) if n <= job.gpus]
    stages = [n for n in (1, 2, 4, 8, 16) if n <= job.gpus]
    layouts = [
        ParallelConfig(tp=tp, pp=pp, sequence_parallel=tp > 1, recompute=recompute)
        for tp, pp, recompute in itertools.product(sizes, stages, ("none", "full"))
    ]
    least = max(job.role(role).model.max_sequence_length for role in job.kinds)
    micro_batches = sorted({max(least, size) for size in MICRO_BATCHES})
    apart = [0, *(n for n in (int(job.gpus * s) for s in ENGINE_SHARES) if 0 < n < job.gpus)]
    roles = list(job.kinds)
    # A second role of the same shape gets the same layout: nothing would tell the two apart.
    same = len(roles) == 2 and job.shapes["actor"] == job.shapes["critic"]
    choices = (
        [(p,) * len(roles) for p in layouts]
        if same
        else itertools.product(layouts, repeat=len(roles))
    )
    for parallel in choices:
        for engine_gpus, tp, micro in itertools.product(apart, sizes, micro_batches):
            yield Candidate(
                parallel=dict(zip(roles, parallel, strict=True)),
                engine_tp=dict.fromkeys(roles, tp),
                engine_gpus=engine_gpus,
                micro_batch=micro,
            )


def names(job: Job) -> list[str]:
    """Names of every combination, legal or not."""
    return [candidate.name for candidate in _candidates(job)]


def illegal(job: Job, candidate: Candidate) -> str | None:
    """Why Megatron-Core or the machine would refuse a layout, None where it is legal."""
    training = job.gpus - candidate.engine_gpus
    for role, parallel in candidate.parallel.items():
        shape = job.shapes[role]
        ranks = parallel.tp * parallel.pp
        engine_tp = candidate.engine_tp[role]
        if training % ranks:
            return f"{role}: tp x pp = {ranks} does not divide {training} GPUs"
        if parallel.tp > job.gpu.per_node:
            return f"{role}: tp {parallel.tp} leaves a node of {job.gpu.per_node} GPUs"
        if shape.heads % parallel.tp or shape.kv_heads % parallel.tp:
            return f"{role}: tp {parallel.tp} does not divide {shape.kv_heads} key-value heads"
        if shape.num_layers % (parallel.pp * parallel.vpp):
            return f"{role}: pp {parallel.pp} does not divide {shape.num_layers} layers"
        if (candidate.engine_gpus or job.gpus) % engine_tp:
            return f"{role}: an engine of {engine_tp} GPUs does not divide what there is"
        if shape.kv_heads % engine_tp:
            heads = f"{shape.kv_heads} key-value heads"
            return f"{role}: an engine's tp {engine_tp} does not divide {heads}"
        rows = sum(job.answers(kind).samples for kind in job.kinds[role])
        if training // ranks > rows:
            return f"{role}: {training // ranks} data-parallel ranks for {rows} sequences"
    return None


def bytes_by_kind(job: Job, candidate: Candidate) -> tuple[dict[str, int], float]:
    """Bytes of the fullest training GPU by kind, and the room that its KV cache gets.

    Both roles stay on the GPU through the step. Engines that share it sleep while a role learns, so
    that activations and engine take turns: the larger of the two counts.
    """
    kinds: Counter[str] = Counter()
    activations = tile = 0
    engine = 0
    training = job.gpus - candidate.engine_gpus
    for role, parallel in candidate.parallel.items():
        shape, config = job.shapes[role], job.role(role)
        dp = training // (parallel.tp * parallel.pp)
        stages = [
            memory.static_bytes(
                shape,
                parallel,
                dp=dp,
                stage=stage,
                train=config.train,
                reference=config.train and config.loss.kl_coef > 0,
                precision=job.precision,
                distributed=config.optimizer.distributed,
            )
            for stage in range(parallel.pp)
        ]
        fullest = max(stages, key=lambda s: s.total)
        for kind in ("weights", "gradients", "optimizer", "reference"):
            kinds[kind] += getattr(fullest, kind)
        longest = max(job.answers(k).prompt + job.answers(k).longest for k in job.kinds[role])
        tokens = max(candidate.micro_batch, round(longest))
        micro = _micro_batches(job, role, parallel, training, tokens)
        activations = max(
            activations,
            max(
                memory.activation_bytes(
                    shape,
                    parallel,
                    tokens=tokens,
                    stage=stage,
                    num_micro_batches=micro,
                    precision=job.precision,
                )
                for stage in range(parallel.pp)
            )
            if config.train
            else 0,
        )
        tile = max(tile, memory.TILE_BYTES)
        width = memory.DTYPE_BYTES[job.precision]
        engine = max(engine, shape.num_parameters * width // candidate.engine_tp[role])
    if "critic" in job.shapes and "critic" not in candidate.parallel:
        # It is loaded for evaluations and never asked in a step; taken as split like the actor.
        actor = candidate.parallel["actor"]
        idle = job.shapes["critic"].num_parameters * memory.DTYPE_BYTES[job.precision]
        kinds["weights"] += idle // (actor.tp * actor.pp)
    free = job.gpu.memory - ALLOWANCE - sum(kinds.values())
    if candidate.engine_gpus:
        kinds["activations"] = activations
        room = 0.9 * job.gpu.memory - ALLOWANCE - engine
        kinds["log-prob tile"] = tile
        kinds["context, NCCL, gaps (assumed)"] = ALLOWANCE
        return dict(kinds), room
    room = free - engine
    cache = max(0.0, min(room, _cache_wanted(job, candidate)))
    if activations + tile >= engine + cache:
        kinds["activations"] = activations
        kinds["log-prob tile"] = tile
    else:
        kinds["engine weights"] = engine
        kinds["KV cache"] = round(cache)
    kinds["context, NCCL, gaps (assumed)"] = ALLOWANCE
    return dict(kinds), room


def _cache_wanted(job: Job, candidate: Candidate) -> float:
    """Bytes of KV cache with which the largest batch of answers would not have to wait."""
    wanted = 0.0
    for role, kinds in job.kinds.items():
        shape, tp = job.shapes[role], candidate.engine_tp[role]
        engines = (candidate.engine_gpus or job.gpus) // tp
        for kind in kinds:
            answers = job.answers(kind)
            samples = -(-answers.samples // engines)
            wanted = max(
                wanted,
                memory.kv_bytes(
                    shape,
                    tp=tp,
                    pp=1,
                    sequences=samples,
                    tokens=round(answers.prompt + answers.answer),
                    precision=job.precision,
                ),
            )
    return wanted


def _micro_batches(
    job: Job, role: str, parallel: ParallelConfig, training: int, tokens: int
) -> int:
    dp = training // (parallel.tp * parallel.pp)
    total = sum(job.answers(kind).tokens for kind in job.kinds[role])
    updates = job.role(role).loss.updates_per_batch
    return max(1, round(total / (dp * updates * tokens)))


def predict(job: Job, candidate: Candidate, shares: Shares, room: float) -> Phases:
    """Seconds of a step by phase, averaged over a block of K steps."""
    cfg = job.config
    engines = candidate.engine_gpus or job.gpus
    training = job.gpus - candidate.engine_gpus
    seconds: Counter[str] = Counter({"play": 0.0})
    causes: Counter[str] = Counter()
    model = trained = sampled = 0.0
    every = cfg.bilevel.actor_steps_per_critic_step
    for role, kinds in job.kinds.items():
        shape, config = job.shapes[role], job.role(role)
        layout = Layout(
            gpus=training,
            parallel=candidate.parallel[role],
            engine_tp=candidate.engine_tp[role],
            engine_gpus=candidate.engine_gpus,
            expert_ranks=candidate.parallel[role].ep,
        )
        for kind in kinds:
            answers = job.answers(kind)
            one = sampling_seconds(
                shape,
                answers,
                job.gpu,
                shares,
                gpus=engines,
                tp=candidate.engine_tp[role],
                room=max(room, 1e8),
            )
            times = 1.0
            seconds["play"] += one
            if kind == "revision" and job.has_probe:
                seconds["probe"] += one / every
                times += 1.0 / every
            sampled += times * answers.samples * answers.answer
            model += times * _sampling_flops(shape, answers)
        if not config.train:
            continue
        phase, share = ("follow", 1.0) if role == "actor" else ("lead", 1.0 / every)
        for kind in kinds:
            answers = job.answers(kind)
            learned = pass_seconds(
                shape,
                answers,
                job.gpu,
                shares,
                layout,
                forward_only=False,
                updates=config.loss.updates_per_batch,
                tokens_per_micro_batch=candidate.micro_batch,
            )
            parts = [learned]
            scored = 1 if config.loss.kl_coef > 0 else 0
            scored += 1 if config.loss.updates_per_batch > 1 else 0
            if scored:
                once = pass_seconds(
                    shape,
                    answers,
                    job.gpu,
                    shares,
                    layout,
                    forward_only=True,
                    tokens_per_micro_batch=candidate.micro_batch,
                )
                parts += [once] * scored
            if len(kinds) > 1 and kind != kinds[0]:
                # One update for all kinds of a role: its reduction is paid once.
                parts = [replace(p, data=0.0) for p in parts]
            for part in parts:
                seconds[phase] += share * part.total
                for cause in ("compute", "tensor", "experts", "bubble", "data"):
                    causes[cause] += share * getattr(part, cause)
            work = _work(answers)
            model += share * (3 + scored) * flops.forward_flops(shape, work)
            trained += share * answers.samples * answers.answer
        seconds["refit"] += share * refit_seconds(shape, job.gpu, shares, layout)
    seconds["fixed"] = shares.fixed_seconds
    return Phases(
        seconds=dict(seconds),
        model_flops=model,
        trained_tokens=trained,
        sampled_tokens=sampled,
        causes=dict(causes),
    )


def _work(answers: Answers) -> flops.Work:
    return flops.Work(
        tokens=round(answers.tokens),
        pairs=round(answers.pairs),
        scored=round(answers.samples * answers.answer),
    )


def _sampling_flops(shape: Shape, answers: Answers) -> float:
    grown = flops.Work(
        tokens=round(answers.samples * answers.answer + answers.prompts * answers.prompt),
        pairs=round(
            answers.samples * answers.answer * (answers.prompt + answers.answer / 2)
            + answers.prompts * answers.prompt**2 / 2
        ),
        scored=round(answers.samples * answers.answer),
    )
    return flops.forward_flops(shape, grown)
