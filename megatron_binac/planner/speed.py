"""Seconds of a step by phase, from shapes, figures of the GPU and a handful of shares.

Everything is counted (FLOPs, bytes) and divided by a peak times a share of it that real programs
reach. The shares are in `Shares`; `calibrate` fits them to published steps, and `published` prints
what error is left. Where a GPU's figure is a peak, no share is 1.

Model of a phase: sampling is bound by reading weights and KV cache once a token, and by a floor for
each layer; training by FLOPs, plus the tensor-parallel collectives that are not hidden, plus the
pipeline's bubble, plus the data-parallel reduction once an update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_binac.config import ParallelConfig
from megatron_binac.planner import flops
from megatron_binac.planner.hardware import Gpu
from megatron_binac.planner.shapes import Shape

SEGMENTS = 48
"""Pieces in which the growth of a batch of answers is added up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """What a program reaches of a peak, and its floors; the values are fitted, see `calibrate`."""

    dense: float = 0.40
    """Of the peak FLOP/s in training and scoring, dense layers."""
    experts: float = 0.12
    """The same of layers with routed experts: small products, tokens sorted and sent."""
    memory: float = 0.60
    """Of the memory's bandwidth while sampling."""
    layer_seconds: float = 25e-6
    """Floor of one layer for one sampled token, launches and collectives of its tensor ranks."""
    links: float = 0.70
    """Of NVLink and of the network."""
    fixed_seconds: float = 10.0
    """Of a step outside the models: data, grading, waking an engine, taking weights over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Answers that are sampled together, or scored. Example: 64 prompts of 130 tokens, 2,048
    answers of 1,060 on average and 4,096 at most."""

    samples: int
    prompts: int
    """Distinct prompts; each is read once."""
    prompt: float
    """Tokens of a prompt."""
    answer: float
    """Mean tokens of an answer."""
    longest: int
    """Most tokens of an answer."""

    @property
    def tokens(self) -> float:
        """Prompt and answer of every sample, as they are trained on."""
        return self.samples * (self.prompt + self.answer)

    @property
    def pairs(self) -> float:
        """Causal query-key pairs, as if all sequences had the mean length."""
        n = self.prompt + self.answer
        return self.samples * n * (n + 1) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where one role trains and samples."""

    gpus: int
    parallel: ParallelConfig
    engine_tp: int
    engine_gpus: int = 0
    """GPUs that only sample; 0: the training ones do."""
    cp: int = 1
    expert_ranks: int = 1
    """GPUs that an expert layer is spread over."""

    @property
    def dp(self) -> int:
        return self.gpus // (self.parallel.tp * self.parallel.pp * self.cp)


@lru_cache(maxsize=4096)
def survival(mean: float, longest: int) -> tuple[float, ...]:
    """Share of answers that are still growing at SEGMENTS points, evenly over the longest.

    S(t) = exp(-(t / c)^1.5) up to the cap, where what is left is cut off; c is such that the mean
    comes out. Falls from 1; with the mean at the cap all answers are equally long.
    """
    points = [(i + 0.5) / SEGMENTS for i in range(SEGMENTS)]
    target = min(mean / longest, 0.999)
    low, high = 1e-4, 1e4
    for _ in range(60):
        scale = math.sqrt(low * high)
        found = sum(math.exp(-((p / scale) ** 1.5)) for p in points) / SEGMENTS
        low, high = (scale, high) if found < target else (low, scale)
    return tuple(math.exp(-((p / scale) ** 1.5)) for p in points)


def touched_weights(shape: Shape, batch: float) -> float:
    """Weights that are read for one token of each of `batch` sequences; experts as they are hit."""
    attention = shape.num_layers * shape.attention_weights
    if not shape.num_experts:
        return attention + shape.num_layers * shape.mlp_weights + shape.vocab * shape.hidden
    share = 1.0 - (1.0 - shape.experts_per_token / shape.num_experts) ** batch
    return attention + share * shape.num_layers * shape.mlp_weights + shape.vocab * shape.hidden


def sampling_seconds(
    shape: Shape,
    answers: Answers,
    gpu: Gpu,
    shares: Shares,
    *,
    gpus: int,
    tp: int,
    room: float,
    width: int = 2,
) -> float:
    """Seconds until the last answer is there; `room`: bytes of a GPU that the KV cache may take.

    Replicas share the samples out. What does not fit the cache waits, and the batch shrinks as
    answers end: the longest ones are finished by a batch that reads all weights for few tokens.
    """
    replicas = max(1, gpus // tp)
    samples = answers.samples / replicas
    kv = shape.kv_values_per_token * width / tp
    held = room / (kv * (answers.prompt + answers.answer))
    waves = max(1.0, samples / max(held, 1.0))
    alive = survival(answers.answer, answers.longest)
    pace = answers.longest / SEGMENTS
    across = tp > gpu.per_node
    layer = shares.layer_seconds * (3.0 if across else 1.0)
    total = 0.0
    for i, share in enumerate(alive):
        batch = max(1.0, samples * share / waves)
        context = answers.prompt + (i + 0.5) * pace
        read = touched_weights(shape, batch) * width / tp + batch * context * kv
        products = 2 * batch * shape.active_parameters / tp
        seconds = max(
            read / (gpu.hbm * shares.memory),
            products / (gpu.flops * shares.dense),
        )
        # Waves overlap: a place that falls free is taken at once, all but the last one's tail.
        full = waves - 1.0 if share > 0.5 else 0.0
        total += (1.0 + full) * pace * (seconds + shape.num_layers * layer)
    prompts = flops.Work(
        tokens=round(answers.prompts * answers.prompt),
        pairs=round(answers.prompts * answers.prompt**2 / 2),
        scored=answers.prompts,
    )
    efficiency = shares.experts if shape.num_experts else shares.dense
    return total + flops.forward_flops(shape, prompts) / (gpus * gpu.flops * efficiency)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Seconds of passes over one role's tokens, by cause."""

    compute: float
    tensor: float
    experts: float
    bubble: float
    data: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.experts + self.bubble + self.data


def pass_seconds(
    shape: Shape,
    answers: Answers,
    gpu: Gpu,
    shares: Shares,
    layout: Layout,
    *,
    forward_only: bool,
    updates: int = 1,
    tokens_per_micro_batch: int = 16384,
    width: int = 2,
) -> Training:
    """Seconds to score the answers once (`forward_only`), or to learn from them once."""
    parallel = layout.parallel
    tp, pp = parallel.tp, parallel.pp
    work = flops.Work(
        tokens=round(answers.tokens),
        pairs=round(answers.pairs),
        scored=round(answers.samples * answers.answer),
    )
    recompute = parallel.recompute == "full"
    done = flops.executed_flops(shape, work, training=not forward_only, recompute=recompute)
    efficiency = shares.experts if shape.num_experts else shares.dense
    compute = done / (layout.gpus * gpu.flops * efficiency)
    passes = 1 if forward_only else (4 if recompute else 3)
    inside = gpu.nvlink if tp <= gpu.per_node else gpu.network
    own_tokens = answers.tokens / (layout.dp * layout.cp)
    stream = own_tokens * shape.hidden * width
    layers = shape.num_layers / pp
    # A layer has two all-reduces forward and two backward; each moves its bytes about twice.
    tensor = passes * 2 * layers * stream * 2 * (tp - 1) / tp / (inside * shares.links)
    experts = 0.0
    if shape.num_experts and layout.expert_ranks > 1:
        link = gpu.nvlink if layout.expert_ranks <= gpu.per_node else gpu.network
        away = (layout.expert_ranks - 1) / layout.expert_ranks
        sent = passes * 2 * layers * stream / tp * shape.experts_per_token * away
        experts = sent / (link * shares.links)
    micro = max(1.0, answers.tokens / (layout.dp * max(updates, 1) * tokens_per_micro_batch))
    bubble = (compute + tensor + experts) * (pp - 1) / (micro * parallel.vpp)
    data = 0.0
    if not forward_only and layout.dp > 1:
        local = shape.num_parameters / (tp * pp)
        nodes = layout.gpus > gpu.per_node
        link = gpu.network if nodes else gpu.nvlink
        # Gradients are reduced in fp32 and weights gathered; every update pays it.
        moved = local * (4 + width) * (layout.dp - 1) / layout.dp
        data = updates * moved / (link * shares.links)
    return Training(compute=compute, tensor=tensor, experts=experts, bubble=bubble, data=data)


def refit_seconds(shape: Shape, gpu: Gpu, shares: Shares, layout: Layout, width: int = 2) -> float:
    """Seconds to bring new weights to the engines: each GPU gets its engine's share of them."""
    received = shape.num_parameters * width / layout.engine_tp
    nodes = layout.gpus + layout.engine_gpus > gpu.per_node
    link = gpu.network if nodes else gpu.nvlink
    return received / (link * shares.links)


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Seconds of a step by phase."""

    seconds: dict[str, float]
    overlapped: bool = False
    """Sampling of the next step runs beside the learning of this one."""
    model_flops: float = 0.0
    trained_tokens: float = 0.0
    sampled_tokens: float = 0.0
    causes: dict[str, float] = field(default_factory=dict)
    """Seconds of the learning phases by cause, over all roles."""

    @property
    def step(self) -> float:
        parts = dict(self.seconds)
        fixed = parts.pop("fixed", 0.0)
        if not self.overlapped:
            return sum(parts.values()) + fixed
        sampling = parts.pop("play", 0.0) + parts.pop("probe", 0.0)
        return max(sampling, sum(parts.values())) + fixed


def grpo_step(
    shape: Shape,
    answers: Answers,
    gpu: Gpu,
    shares: Shares,
    layout: Layout,
    *,
    updates: int,
    reference: bool = True,
    off_policy: bool = False,
    room: float | None = None,
) -> Phases:
    """One step of one role: sample, score under the old (and the reference) weights, learn."""
    learners = layout
    engines = layout.engine_gpus or layout.gpus
    if room is None:
        room = 0.8 * gpu.memory - 2 * shape.num_parameters / layout.engine_tp
    play = sampling_seconds(
        shape, answers, gpu, shares, gpus=engines, tp=layout.engine_tp, room=max(room, 1e9)
    )
    score = pass_seconds(shape, answers, gpu, shares, learners, forward_only=True)
    follow = pass_seconds(
        shape, answers, gpu, shares, learners, forward_only=False, updates=updates
    )
    seconds = {
        "play": play,
        "score": score.total * (2 if reference else 1),
        "follow": follow.total,
        "refit": refit_seconds(shape, gpu, shares, layout),
        "fixed": shares.fixed_seconds,
    }
    return Phases(seconds=seconds, overlapped=off_policy, trained_tokens=answers.tokens)
