"""Every setting of a run: frozen dataclasses, checked when they are made, with no torch in sight.

A run is one `Config`. `recipes.py` holds functions that return one; `--set a.b=c` changes single
fields (`override`); `to_json` / `from_json` write it beside the run and read it for a resume. A
cross-field rule raises `ValueError` and names the field that fixes it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_binac.method_config import (
    CollapseConfig,
    ContrastConfig,
    CreditConfig,
    FeedbackModelConfig,
    SelfDistillConfig,
    ShapedConfig,
    SpanConfig,
    StageConfig,
    TeacherConfig,
    TextCriticConfig,
    ValueHeadConfig,
)
from megatron_binac.method_config import check as _check


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for sequences longer than a model was first trained
    on."""

    kind: Literal["linear", "llama3", "yarn"] = "llama3"
    factor: float = 8.0
    """How many times longer."""
    original_max_positions: int = 8192
    """Tokens of the first training; not read by `linear`."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """Of `llama3`: wavelengths between original_max_positions over these two are blended."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Of `yarn`: turns within original_max_positions between which frequencies are blended."""
    attention_factor: float | None = None
    """Of `yarn`: factor on queries and keys; None is 0.1 ln(factor) + 1."""

    def __post_init__(self) -> None:
        _check(self.factor >= 1, f"rope_scaling.factor is {self.factor}, expected 1 or more")
        _check(
            self.low_freq_factor < self.high_freq_factor,
            f"rope_scaling.low_freq_factor {self.low_freq_factor} is not below high_freq_factor "
            f"{self.high_freq_factor}; change one of the two",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Every feed-forward layer as a mixture of experts, as in Qwen3-MoE: no shared expert, no
    capacity limit."""

    num_experts: int = 8
    top_k: int = 2
    """Experts that each token goes to."""
    ffn_hidden_size: int = 352
    """Of one expert."""
    renormalize: bool = True
    """The weights of the chosen experts add up to 1."""

    def __post_init__(self) -> None:
        _check(
            0 < self.top_k <= self.num_experts,
            f"moe.top_k is {self.top_k}, expected between 1 and moe.num_experts "
            f"{self.num_experts}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A Llama-shaped decoder: RMSNorm, gated feed-forward, RoPE, grouped-query attention."""

    num_layers: int = 4
    hidden_size: int = 128
    ffn_hidden_size: int = 352
    num_attention_heads: int = 4
    num_query_groups: int = 2
    """Key-value heads; divides `num_attention_heads`."""
    max_sequence_length: int = 128
    """Tokens of prompt and answer together."""
    tied_head: bool = False
    """Share the input embedding with the output layer."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    """Standard deviation of fresh weights; output projections get it over sqrt(2 * num_layers)."""
    head_dim: int | None = None
    """Width of a head; None is hidden_size over num_attention_heads."""
    vocab_size: int | None = None
    """Rows of the embedding that a pretrained model has; None: one for each id of the
    tokenizer."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Of the gate in the feed-forward layers."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias (Qwen2)."""
    qk_norm: bool = False
    """Queries and keys are normalised by head before the rotary embedding (Qwen3)."""
    zero_centered_norm: bool = False
    """Norms multiply by 1 + weight (Gemma)."""
    scale_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden_size) (Gemma)."""
    rope_scaling: RopeScaling | None = None
    moe: MoEConfig | None = None
    """None: dense layers."""
    weights: str | None = None
    """Where the first weights come from: a folder that `binac convert` wrote, a Hugging Face
    folder, a .gguf file, or `package:NAME` for the one in an installed package; None starts from
    fresh ones."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
                     "num_query_groups", "max_sequence_length"):  # fmt: skip
            _check(
                getattr(self, name) > 0,
                f"model.{name} is {getattr(self, name)}, expected a positive number",
            )
        _check(
            self.head_dim is not None or self.hidden_size % self.num_attention_heads == 0,
            f"model.hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
            f"{self.num_attention_heads}; change one of the two",
        )
        _check(
            self.head_width % 2 == 0,
            f"model.head_dim is {self.head_width}, expected an even number: rotary embeddings turn "
            "pairs",
        )
        _check(
            self.num_attention_heads % self.num_query_groups == 0,
            f"model.num_attention_heads {self.num_attention_heads} is not a multiple of "
            f"num_query_groups "
            f"{self.num_query_groups}; change num_query_groups",
        )

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How one role is split over the ranks of the job; data parallelism takes what is left."""

    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Virtual stages held by each pipeline rank; 1 is the plain 1F1B schedule."""
    ep: int = 1
    """Expert-parallel ranks, among the tensor-parallel ones of a replica: whole experts lie on
    tp / ep ranks each."""
    sequence_parallel: bool = False
    """Split norms and residuals over the TP ranks along the tokens."""
    recompute: Literal["none", "full"] = "none"
    """Recompute a layer's activations in the backward pass instead of keeping them."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "ep"):
            _check(
                getattr(self, name) > 0,
                f"parallel.{name} is {getattr(self, name)}, expected 1 or more",
            )
        _check(
            self.tp % self.ep == 0,
            f"parallel.ep {self.ep} does not divide parallel.tp {self.tp}: experts lie on the "
            "tensor-parallel ranks; change one of the two",
        )
        _check(
            self.vpp == 1 or self.pp > 1,
            f"parallel.vpp is {self.vpp} with pp 1; set pp above 1 or vpp to 1",
        )
        _check(
            not (self.sequence_parallel and self.tp == 1),
            "parallel.sequence_parallel is on with tp 1, where it can do nothing; set tp above 1 "
            "or turn it off",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Adam with decoupled weight decay, as Megatron-Core builds it."""

    lr: float = 1e-3
    min_lr: float = 0.0
    """Where a decaying schedule ends."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Optimizer steps from 0 to `lr`."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    distributed: bool = True
    """Shard the optimizer's state over the data-parallel ranks."""

    def __post_init__(self) -> None:
        _check(self.lr >= 0, f"optimizer.lr is {self.lr}, expected 0 or more")
        _check(
            0 <= self.min_lr <= self.lr,
            f"optimizer.min_lr is {self.min_lr}, expected between 0 and optimizer.lr {self.lr}",
        )
        _check(
            self.warmup_steps >= 0,
            f"optimizer.warmup_steps is {self.warmup_steps}, expected 0 or more",
        )
        for name in ("beta1", "beta2"):
            _check(
                0 <= getattr(self, name) < 1,
                f"optimizer.{name} is {getattr(self, name)}, expected in [0, 1)",
            )
        _check(
            self.clip_grad >= 0,
            f"optimizer.clip_grad is {self.clip_grad}, expected 0 (off) or more",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """The clipped policy gradient of one role (token mean over the global batch)."""

    ratio: Literal["token", "sequence", "none"] = "token"
    """Importance ratio of a token (PPO), of the whole answer (GSPO), or none (REINFORCE)."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """Bound of the ratio for negative advantages; None is off."""
    aggregate: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """Mean over all tokens of the batch (DAPO), over answers of their token means (GRPO), over
    answers of their token sums (RLOO), or token sums over answers times `constant_length`
    (Dr. GRPO)."""
    constant_length: int = 0
    """Tokens that stand for an answer's length where `aggregate` is constant; 0 elsewhere."""
    kl_coef: float = 1e-3
    """Weight of the KL to the frozen reference; 0 also saves the reference forward pass."""
    kl_estimator: Literal["k2", "k3", "k1_score"] = "k3"
    """How the KL is estimated from the sampled token."""
    entropy_coef: float = 0.0
    engine_is_cap: float | None = None
    """Cap of the truncated importance weight learner/engine; None is off."""
    updates_per_batch: int = 1
    """Optimizer steps taken on one batch of turns; old log-probs are fixed before the first."""

    def __post_init__(self) -> None:
        _check(0 <= self.clip_low < 1, f"loss.clip_low is {self.clip_low}, expected in [0, 1)")
        _check(self.clip_high >= 0, f"loss.clip_high is {self.clip_high}, expected 0 or more")
        _check(self.kl_coef >= 0, f"loss.kl_coef is {self.kl_coef}, expected 0 or more")
        _check(
            (self.constant_length > 0) == (self.aggregate == "constant"),
            f"loss.constant_length is {self.constant_length} with aggregate {self.aggregate!r}; "
            "set it to the longest answer in tokens for 'constant', and to 0 otherwise",
        )
        _check(
            self.updates_per_batch > 0,
            f"loss.updates_per_batch is {self.updates_per_batch}, expected 1 or more",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What samples from a role."""

    kind: Literal["megatron", "vllm", "vllm_server"] = "megatron"
    """The learner's own layers, vLLM beside the learner, or vLLM servers on other nodes."""
    tp: int = 1
    """vLLM: neighbouring ranks that hold one replica."""
    urls: list[str] = field(default_factory=list)
    """vllm_server: addresses of the replicas, as http://host:8000. An entry `$NAME` stands for what
    that variable holds when the run starts, several with commas between them."""
    wait_s: float = 900.0
    """vllm_server: seconds that servers may take to start, counted from the start of the run."""
    transport: Literal["auto", "memory", "file", "ipc", "nccl"] = "auto"
    """How new weights get there: within the process, as files, over CUDA IPC, over NCCL. auto:
    memory for vllm, file for vllm_server."""
    refit_dir: str | None = None
    """Folder for the transport `file`, on a disk that both sides see; None: in the run's folder."""
    bucket_mib: int = 256
    """Size of the pieces in which weights are handed over."""
    memory_share: float = 0.4
    """vLLM: share of a GPU's memory for its weights and KV cache."""
    sleep: bool = False
    """vLLM on a GPU: give its memory up while a role learns; with offload_idle."""
    address: str = "127.0.0.1"
    port: int = 29600
    """Transport nccl: where the servers' workers meet the first rank; address may be `$NAME`."""
    workers_per_server: int = 1
    correct: bool = True
    """Weigh tokens by learner/engine, capped at 2, where the engine has numerics of its own and
    loss.engine_is_cap names no cap."""

    def __post_init__(self) -> None:
        fits = {
            "megatron": ("auto",),
            "vllm": ("auto", "memory", "file"),
            "vllm_server": ("auto", "file", "ipc", "nccl"),
        }[self.kind]
        _check(
            self.transport in fits,
            f"engine.transport is {self.transport!r} with engine.kind {self.kind!r}, expected one "
            f"of {', '.join(fits)}",
        )
        _check(
            (self.kind == "vllm_server") == bool(self.urls),
            f"engine.urls is {self.urls} with engine.kind {self.kind!r}; give addresses to "
            "vllm_server, and to it alone",
        )
        _check(
            0 < self.memory_share < 1,
            f"engine.memory_share is {self.memory_share}, expected in (0, 1)",
        )
        for name in ("tp", "bucket_mib", "workers_per_server", "wait_s"):
            _check(
                getattr(self, name) > 0,
                f"engine.{name} is {getattr(self, name)}, expected 1 or more",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleConfig:
    """One of the two policies: its shape, its layout, how it learns."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: bool = True
    """False: a frozen policy. It answers, it never learns, and it needs no optimizer."""
    precision: Literal["fp32", "bf16", "fp8_tensorwise", "fp8_blockwise", "mxfp8"] = "fp32"
    """Number format of the layers; FP8 needs Transformer Engine and a GPU that has it."""
    bf16_edge_layers: int = 0
    """Layers at either end that stay in bf16 under an FP8 precision."""
    require_te: bool = False
    """Refuse to run without Transformer Engine's layers, in place of taking local ones."""
    max_tokens_per_micro_batch: int = 16384
    """Capacity of one packed micro-batch, tokens per data-parallel rank."""
    share_prefixes: bool | None = False
    """Learn from each distinct token of a prompt's turns once: the same gradient, up to rounding,
    from a fraction of the tokens. Dense models on local layers, without pp and
    sequence_parallel; None: wherever that is so."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    mismatch_alarm: float = 0.3
    """Warn where the 99th percentile of |engine - learner|, nats per token, is above; 0 is off."""

    def __post_init__(self) -> None:
        heads, groups, tp = (
            self.model.num_attention_heads,
            self.model.num_query_groups,
            self.parallel.tp,
        )
        _check(
            heads % tp == 0,
            f"parallel.tp {tp} does not divide model.num_attention_heads {heads}; use a tp that "
            f"does",
        )
        _check(
            groups % tp == 0,
            f"parallel.tp {tp} does not divide model.num_query_groups {groups}; use a smaller tp "
            f"or more groups",
        )
        _check(
            self.model.ffn_hidden_size % tp == 0,
            f"parallel.tp {tp} does not divide model.ffn_hidden_size {self.model.ffn_hidden_size}",
        )
        moe = self.model.moe
        _check(
            not self.share_prefixes or self._can_share_prefixes(),
            "share_prefixes is on with experts, parallel.pp above 1 or sequence_parallel, which "
            "need rows of their own; turn one of the two off",
        )
        _check(
            not (self.share_prefixes and self.require_te),
            "share_prefixes and require_te are both on: Transformer Engine's attention knows no "
            "tree; turn one of the two off",
        )
        _check(
            moe is not None or self.parallel.ep == 1,
            f"parallel.ep is {self.parallel.ep} but the model has no experts; set it to 1",
        )
        if moe is not None:
            ep = self.parallel.ep
            _check(
                moe.num_experts % ep == 0,
                f"parallel.ep {ep} does not divide model.moe.num_experts {moe.num_experts}",
            )
            _check(
                moe.ffn_hidden_size % (tp // ep) == 0,
                f"parallel.tp / ep = {tp // ep} does not divide model.moe.ffn_hidden_size "
                f"{moe.ffn_hidden_size}",
            )
            _check(
                tp == 1 or self.parallel.sequence_parallel,
                f"parallel.tp is {tp} with experts, which needs sequence parallelism (each tensor "
                "rank routes its own tokens); set parallel.sequence_parallel=true",
            )
        stages = self.parallel.pp * self.parallel.vpp
        _check(
            self.model.num_layers % stages == 0,
            f"parallel.pp * parallel.vpp = {stages} does not divide model.num_layers "
            f"{self.model.num_layers}; "
            "change parallel.pp, parallel.vpp or model.num_layers",
        )
        self._check_precision()
        _check(
            self.mismatch_alarm >= 0,
            f"mismatch_alarm is {self.mismatch_alarm}, expected 0 (off) or more",
        )
        _check(
            not self.engine.sleep or self.engine.kind == "vllm",
            f"engine.sleep is on with engine.kind {self.engine.kind!r}; only vllm can sleep",
        )
        own_numerics = self.engine.kind != "megatron"  # the learner's own layers need no weights
        if own_numerics and self.engine.correct and self.loss.engine_is_cap is None:
            loss = dataclasses.replace(self.loss, engine_is_cap=2.0)
            object.__setattr__(self, "loss", loss)
        _check(
            self.max_tokens_per_micro_batch >= self.model.max_sequence_length,
            f"max_tokens_per_micro_batch {self.max_tokens_per_micro_batch} is below "
            f"model.max_sequence_length "
            f"{self.model.max_sequence_length}: one sequence would not fit; raise it",
        )

    def _check_precision(self) -> None:
        fp8 = self.precision not in ("fp32", "bf16")
        edges, per_stage = self.bf16_edge_layers, self.model.num_layers // self.parallel.pp
        _check(
            edges == 0 or (fp8 and 0 < edges <= per_stage),
            f"bf16_edge_layers is {edges} with precision {self.precision!r} and {per_stage} layers "
            "a pipeline stage; expected 0, or under FP8 at most the layers of a stage",
        )
        tp = self.parallel.tp
        for name, size in (
            ("hidden_size", self.model.hidden_size),
            ("ffn_hidden_size / tp", self.model.ffn_hidden_size // tp),
            ("num_query_groups * head width / tp", self._kv_rows() // tp),
        ):
            _check(
                not fp8 or size % 16 == 0,
                f"model.{name} is {size}, expected a multiple of 16 with precision "
                f"{self.precision!r}; use bf16 or another size",
            )

    def shares_prefixes(self, *, local_layers: bool) -> bool:
        """Whether turns of a prompt share what they begin with, on the layers that were chosen."""
        if self.share_prefixes is None:
            return local_layers and self._can_share_prefixes()
        return self.share_prefixes

    def _can_share_prefixes(self) -> bool:
        parallel = self.parallel
        return self.model.moe is None and parallel.pp == 1 and not parallel.sequence_parallel

    def _kv_rows(self) -> int:
        return self.model.num_query_groups * self.model.head_width

    def data_parallel(self, world_size: int, role: str) -> int:
        """Data-parallel replicas of this role on `world_size` ranks; ValueError where they do not
        divide."""
        ranks = self.parallel.tp * self.parallel.pp
        _check(
            world_size % ranks == 0,
            f"{role}.parallel.tp * pp = {ranks} does not divide the {world_size} ranks of the job; "
            f"change {role}.parallel or --nproc",
        )
        return world_size // ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """The tree of one prompt and how its turns are sampled."""

    prompts_per_step: int = 32
    """Prompts of one step over all ranks."""
    attempts: int = 8
    """G: attempts per prompt."""
    criticised: int = 4
    """C <= G: attempts per prompt that get feedback; 0 is plain RL without a critic."""
    feedbacks: int = 4
    """F: feedbacks per criticised attempt."""
    revisions: int = 2
    """M: revisions per feedback."""
    select: Literal["natural", "prefer_wrong", "wrong", "failed_groups"] = "natural"
    """Which attempts are criticised. `prefer_wrong` is weighted back to the natural mix in the
    loss; `wrong` takes wrong ones only, `failed_groups` only those of a prompt that no attempt
    solved."""
    rounds: int = 1
    """Times that the revisions of a prompt without any right answer are criticised and revised
    again, the first one included; above 1 only where `select` is failed_groups."""
    resample: int = 0
    """Further draws of prompts in place of those whose attempts all got the same reward (DAPO's
    dynamic sampling)."""
    overlong_buffer: int = 0
    """Last tokens of `max_attempt_tokens` over which an attempt's reward falls by 1 (DAPO); 0 is
    off."""
    temperature: float = 1.0
    """Of sampling; log-probs are taken at the same temperature."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that hold this much probability; 1 is off."""
    max_attempt_tokens: int = 8
    max_feedback_tokens: int = 16
    max_revision_tokens: int = 8
    """Longest answers, in tokens, the end token included."""
    max_sequences_per_batch: int = 1024
    """Sequences decoded together on one data-parallel rank; bounds the KV cache, and as much again
    that is held of attempts for their revisions; changes no result."""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "attempts", "max_attempt_tokens", "max_feedback_tokens",
                     "max_revision_tokens", "max_sequences_per_batch"):  # fmt: skip
            _check(
                getattr(self, name) > 0,
                f"rollout.{name} is {getattr(self, name)}, expected 1 or more",
            )
        _check(
            0 <= self.criticised <= self.attempts,
            f"rollout.criticised is {self.criticised}, expected between 0 and rollout.attempts "
            f"{self.attempts}",
        )
        if self.criticised:
            _check(
                self.feedbacks > 0,
                f"rollout.feedbacks is {self.feedbacks} while rollout.criticised is "
                f"{self.criticised}; set it to 1 or more, or rollout.criticised to 0",
            )
        _check(self.revisions >= 0, f"rollout.revisions is {self.revisions}, expected 0 or more")
        _check(
            self.temperature > 0,
            f"rollout.temperature is {self.temperature}, expected above 0 (greedy decoding is for "
            f"evaluation)",
        )
        _check(
            self.rounds == 1 or (self.rounds > 1 and self.select == "failed_groups"),
            f"rollout.rounds is {self.rounds} with select {self.select!r}; expected 1, or more "
            "with select failed_groups",
        )
        _check(self.resample >= 0, f"rollout.resample is {self.resample}, expected 0 or more")
        _check(
            0 <= self.overlong_buffer <= self.max_attempt_tokens,
            f"rollout.overlong_buffer is {self.overlong_buffer}, expected between 0 and "
            f"rollout.max_attempt_tokens {self.max_attempt_tokens}",
        )
        _check(self.top_k >= 0, f"rollout.top_k is {self.top_k}, expected 0 (off) or more")
        _check(0 < self.top_p <= 1, f"rollout.top_p is {self.top_p}, expected in (0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class BilevelConfig:
    """Who is paid for what (Bi-NAC, arXiv 2605.24547, eq. 2-4) and who moves when."""

    lam: float = 0.1
    """Weight of the value-function penalty. 0 is joint training; above 0, V* > V lowers a
    feedback's credit."""
    adaptation: Literal["follow", "lookahead", "value"] = "follow"
    """How the best response th* is had. follow: the actor as it stands after the block's own steps;
    lookahead: after `lookahead_steps` more on a scratch copy; value: V and V^k of a value head in
    the place of V and V* (MLMT-RL)."""
    lookahead_steps: int = 1
    """Of lookahead: further actor steps on the block's last batch, taken back afterwards."""
    value_weight: float = 1.0
    """Weight of the value of a feedback in its utility; 0 leaves discrimination alone."""
    actor_steps_per_critic_step: int = 1
    """K: actor updates between two critic updates."""
    discrimination_coef: float = 0.0
    """b_dis: reward of a verdict tag that agrees with the verifier."""
    leak_coef: float = 0.0
    """b_leak: penalty of a feedback that holds the verified answer."""
    attempt_weight: float = 1.0
    """w0: weight of the attempt's own reward in its credit."""
    attempt_value_weight: float = 0.1
    """g: weight of the mean value of the feedback on the attempt in its credit."""
    improvement_weight: float = 0.0
    """alpha: weight of R(y1) - R(y0) in the revision's credit."""

    def __post_init__(self) -> None:
        _check(
            self.actor_steps_per_critic_step > 0,
            f"bilevel.actor_steps_per_critic_step is {self.actor_steps_per_critic_step}, expected "
            f"1 or more",
        )
        _check(
            self.lookahead_steps > 0
            and (self.lookahead_steps == 1 or self.adaptation == "lookahead"),
            f"bilevel.lookahead_steps is {self.lookahead_steps} with adaptation "
            f"{self.adaptation!r}; it acts under adaptation lookahead only, from 1 up",
        )
        for name in ("discrimination_coef", "leak_coef", "attempt_weight", "attempt_value_weight",
                     "value_weight"):  # fmt: skip
            _check(
                getattr(self, name) >= 0,
                f"bilevel.{name} is {getattr(self, name)}, expected 0 or more",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """What is asked and who grades it."""

    name: str = "checksum"
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task's builder, JSON-able."""
    vocab_size: int = 320
    """Size of the SentencePiece vocabulary that is trained from the task's own text."""
    tokenizer: str | None = None
    """Path of a SentencePiece model or of a Hugging Face tokenizer folder; None trains one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleWarmStart:
    """Supervised steps of one role before any reinforcement learning."""

    steps: int = 0
    """Most steps that are taken; 0 starts from fresh weights."""
    stop_loss: float = 0.0
    """Stop early once the mean loss of the last 5 steps (nats per token) is below; 0 takes all
    steps."""
    batch: int = 128
    """Examples of one step over all ranks."""
    lr: float = 2e-3
    warmup_steps: int = 20

    def __post_init__(self) -> None:
        _check(self.steps >= 0, f"warm_start steps is {self.steps}, expected 0 or more")
        _check(self.batch > 0, f"warm_start batch is {self.batch}, expected 1 or more")
        _check(
            self.stop_loss >= 0,
            f"warm_start stop_loss is {self.stop_loss}, expected 0 (off) or more",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartConfig:
    """Short supervised training for the formats of the three turns, cached by content."""

    actor: RoleWarmStart = field(default_factory=RoleWarmStart)
    critic: RoleWarmStart = field(default_factory=RoleWarmStart)
    seed: int = 1
    """Of the fresh weights; apart from the run's seed, so that runs share one warm start."""
    cache_dir: str = "runs/warm_start"
    """Folder of the cache; the key is a hash of everything that decides the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Held-out measurement, the same in the loop and in `binac eval`."""

    every: int = 0
    """Steps between evaluations inside the run; 0 evaluates only before the first and after the
    last step."""
    num_prompts: int = 256
    """Held-out prompts, the same ones every time."""
    samples: int = 1
    """Sampled attempts per prompt (each with one feedback and one revision), beside the greedy
    one."""

    def __post_init__(self) -> None:
        _check(self.every >= 0, f"eval.every is {self.every}, expected 0 or more")
        _check(self.num_prompts > 0, f"eval.num_prompts is {self.num_prompts}, expected 1 or more")
        _check(self.samples > 0, f"eval.samples is {self.samples}, expected 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackConfig:
    """Where metrics go beside `metrics.jsonl`."""

    tensorboard: bool = True
    wandb_project: str | None = None
    """Weights & Biases project; None is off. Needs the extra `track`."""
    transcripts_per_step: int = 1
    """Trees written to `transcripts.jsonl` each step."""
    trace: bool = False
    """A Chrome trace of the phases of every rank, in `trace/` of the run folder."""
    profile_steps: int = 0
    """So many steps, from the third of a start on, under torch's profiler: a trace a rank."""
    nvtx: bool = False
    """NVTX ranges around the phases, for Nsight Systems; needs a CUDA device."""

    def __post_init__(self) -> None:
        _check(
            self.transcripts_per_step >= 0,
            f"track.transcripts_per_step is {self.transcripts_per_step}, expected 0 or more",
        )
        _check(
            self.profile_steps >= 0,
            f"track.profile_steps is {self.profile_steps}, expected 0 or more",
        )


STAGED = ("bilevel.", "credit.", "rollout.", "self_distill.", "actor.loss.", "critic.loss.")
"""What a stage may change: nothing that models, optimizers or engines are built from."""
FOR_GOOD = (
    "bilevel.actor_steps_per_critic_step",
    "bilevel.adaptation",
    "bilevel.lookahead_steps",
    "rollout.temperature",
    "rollout.max_sequences_per_batch",
    "actor.loss.updates_per_batch",
    "critic.loss.updates_per_batch",
)
"""What is read once: the length of a block, what the learners score at, what schedules end by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One run."""

    recipe: str
    """Name of the recipe it came from; a run folder belongs to one recipe."""
    seed: int = 1
    default_ranks: int = 1
    """Ranks that `binac` starts on this machine without --nproc and without a launcher."""
    num_steps: int = 100
    """Steps of the outer loop: one actor update each."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves only at the end and on a signal."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    keep_best: int = 0
    """Checkpoints kept beside the newest for their held-out score: acc_t2, acc_t1 without a critic.
    Only a step that was also evaluated has one."""
    offload_idle: bool = False
    """Keep gradients and optimizer of a role in host memory while it is not training, and all of
    it while the other role trains."""
    placement: Literal["colocated", "disjoint"] = "colocated"
    """Both roles on all ranks, in turns; disjoint ranks are not possible in this version."""
    save_async: bool = False
    """Write checkpoints beside the training; a copy of the tensors in host memory is the price."""
    max_generated_tokens: int = 0
    """Stop after the step that passes this many sampled tokens over all ranks; 0 is off."""
    actor: RoleConfig = field(default_factory=RoleConfig)
    critic: RoleConfig | None = field(default_factory=RoleConfig)
    """None: a recipe without a critic (rollout.criticised is 0), evaluated without feedback; or one
    whose feedback comes from `text_critic`."""
    shared_policy: bool = False
    """One set of weights plays both roles, told apart by their prompts; `critic` is None then, and
    `actor` says how the policy learns."""
    text_critic: TextCriticConfig | None = None
    """Feedback from outside, in the place of a critic policy."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    bilevel: BilevelConfig = field(default_factory=BilevelConfig)
    credit: CreditConfig = field(default_factory=CreditConfig)
    self_distill: SelfDistillConfig | None = None
    feedback_model: FeedbackModelConfig | None = None
    teacher: TeacherConfig | None = None
    shaped: ShapedConfig | None = None
    contrast: ContrastConfig | None = None
    spans: SpanConfig | None = None
    value_head: ValueHeadConfig | None = None
    stages: tuple[StageConfig, ...] = ()
    """Parts of the run with settings of their own, by their start."""
    collapse: CollapseConfig | None = None
    """Ends a run whose critic has nothing left to say; None lets it go on."""
    task: TaskConfig = field(default_factory=TaskConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        _check(self.num_steps > 0, f"num_steps is {self.num_steps}, expected 1 or more")
        _check(self.default_ranks > 0, f"default_ranks is {self.default_ranks}, expected 1 or more")
        _check(self.save_every >= 0, f"save_every is {self.save_every}, expected 0 or more")
        _check(
            self.keep_checkpoints > 0,
            f"keep_checkpoints is {self.keep_checkpoints}, expected 1 or more",
        )
        _check(
            self.placement == "colocated",
            "placement is 'disjoint', but roles on ranks of their own are not possible in this "
            "version (both sample and learn with all ranks of the job); use placement=colocated, "
            "with offload_idle=true where memory is short",
        )
        _check(
            not self.offload_idle or self.bilevel.adaptation != "lookahead",
            "offload_idle is on with bilevel.adaptation 'lookahead', which takes steps back after "
            "the role's turn; turn one of the two off",
        )
        sleeping = [r.engine.sleep for r in (self.actor, self.critic) if r is not None]
        _check(
            not any(sleeping) or self.offload_idle,
            "engine.sleep is on without offload_idle, which is when an engine is put to sleep; "
            "set offload_idle=true",
        )
        _check(self.keep_best >= 0, f"keep_best is {self.keep_best}, expected 0 or more")
        _check(
            self.max_generated_tokens >= 0,
            f"max_generated_tokens is {self.max_generated_tokens}, expected 0 or more",
        )
        self._check_critic()
        self._check_methods()
        longest = self.actor.model.max_sequence_length
        turns = (
            self.rollout.max_attempt_tokens
            + self.rollout.max_feedback_tokens
            + self.rollout.max_revision_tokens
        )
        _check(
            not self.rollout.criticised or turns < longest,
            f"the three turns may take {turns} tokens but actor.model.max_sequence_length is "
            f"{longest}; raise it or "
            "lower rollout.max_*_tokens",
        )

    @property
    def critic_learns(self) -> bool:
        """Whether any policy is trained as the critic."""
        return self.shared_policy or (self.critic is not None and self.critic.train)

    @property
    def critic_loss(self) -> LossConfig:
        """The loss of whatever policy is the critic."""
        return self.actor.loss if self.critic is None else self.critic.loss

    def _check_critic(self) -> None:
        speakers = [
            name
            for name, there in (
                ("critic", self.critic is not None),
                ("shared_policy", self.shared_policy),
                ("text_critic", self.text_critic is not None),
            )
            if there
        ]
        _check(
            len(speakers) <= 1,
            f"{' and '.join(speakers)} are set, expected one source of feedback at most; set the "
            "others to null (shared_policy to false)",
        )
        _check(
            bool(speakers) or self.rollout.criticised == 0,
            f"rollout.criticised is {self.rollout.criticised} but there is no critic; set "
            f"rollout.criticised to 0 "
            "or use a recipe with a critic",
        )
        _check(
            self.rollout.resample == 0 or self.rollout.criticised == 0,
            f"rollout.resample is {self.rollout.resample} with rollout.criticised "
            f"{self.rollout.criticised}; drawing anew looks at attempts alone, set one to 0",
        )

    def _check_methods(self) -> None:
        """No setting stands there unused, and every block has what it works on."""
        kind, criticised = self.credit.kind, self.rollout.criticised
        feedback = ("chain", "two_turn", "union", "regenerated", "spans", "value")
        _check(
            criticised > 0 or kind not in feedback,
            f"credit.kind is {kind!r} with rollout.criticised 0; it pays for answers to feedback, "
            "set rollout.criticised to 1 or more or credit.kind to group",
        )
        _check(
            self.rollout.revisions > 0
            or not criticised
            or (kind in ("spans", "none") and not self.critic_learns),
            f"rollout.revisions is 0 while rollout.criticised is {criticised}; feedback that "
            "nobody answers is of use to credit spans and none with a critic that does not learn: "
            "set it to 1 or more, or rollout.criticised to 0",
        )
        _check(
            kind != "two_turn" or criticised == self.rollout.attempts,
            f"credit.kind is two_turn with rollout.criticised {criticised} of "
            f"{self.rollout.attempts} attempts; every chain needs a second turn, set the two equal",
        )
        _check(
            (kind == "regenerated") == (self.rollout.select == "failed_groups"),
            f"credit.kind is {kind!r} with rollout.select {self.rollout.select!r}; regenerated and "
            "failed_groups go together",
        )
        _check(
            (kind == "spans") == (self.spans is not None),
            f"credit.kind is {kind!r} and spans is {'set' if self.spans else 'null'}; set both or "
            "neither",
        )
        _check(
            (kind == "union") == (self.shaped is not None),
            f"credit.kind is {kind!r} and shaped is {'set' if self.shaped else 'null'}; union pays "
            "revisions as answers to the problem alone: set both or neither",
        )
        _check(
            self.bilevel.adaptation != "value" or kind == "value",
            f"bilevel.adaptation is value with credit.kind {kind!r}, under which nothing fits the "
            "value head; set credit.kind to value or bilevel.adaptation to follow",
        )
        _check(
            self.collapse is None or (self.critic_learns and criticised > 0),
            "collapse is set but no critic learns; set collapse to null",
        )
        _check(
            self.contrast is None or kind == "regenerated",
            f"contrast is set with credit.kind {kind!r}; it compares regenerated groups, set "
            "credit.kind to regenerated or contrast to null",
        )
        for name in ("self_distill", "feedback_model", "teacher"):
            _check(
                getattr(self, name) is None or criticised > 0,
                f"{name} is set with rollout.criticised 0; it learns from feedback, set "
                f"rollout.criticised to 1 or more or {name} to null",
            )
        values = kind in ("value", "spans") or self.bilevel.adaptation == "value"
        _check(
            values == (self.value_head is not None),
            f"value_head is {'set' if self.value_head else 'null'} with credit.kind {kind!r} and "
            f"bilevel.adaptation {self.bilevel.adaptation!r}; credit value or spans and adaptation "
            "value read it, the others do not",
        )
        starts = [stage.start for stage in self.stages]
        _check(
            starts == sorted(set(starts)) and (not starts or starts[0] == 0.0),
            f"stages start at {starts}, expected 0 first and each later than the one before",
        )
        for stage in self.stages:
            for item in stage.set:
                _check(
                    item.startswith(STAGED) and not item.startswith(FOR_GOOD),
                    f"stages.set holds {item!r}, expected a setting of {', '.join(STAGED)} that is "
                    f"not read once for the whole run ({', '.join(FOR_GOOD)})",
                )
            override(dataclasses.replace(self, stages=()), list(stage.set))

    def at(self, progress: float) -> Config:
        """The config as it stands at this share of the run: its stage's settings put in, and roles
        that rest in it frozen (`train` False)."""
        now = [stage for stage in self.stages if stage.start <= progress]
        if not now:
            return self
        there = override(dataclasses.replace(self, stages=()), list(now[-1].set))
        for role in ("actor", "critic"):
            config = getattr(there, role)
            if config is not None and role not in now[-1].train:
                there = dataclasses.replace(
                    there, **{role: dataclasses.replace(config, train=False)}
                )
        return there

    def check_world(self, world_size: int) -> None:
        """Raise ValueError where a role's layout does not fit `world_size` ranks."""
        self.actor.data_parallel(world_size, "actor")
        if self.critic is not None:
            self.critic.data_parallel(world_size, "critic")


def to_json(config: Config) -> str:
    """The resolved config as indented JSON; `from_json` gives an equal one back."""
    return json.dumps(dataclasses.asdict(config), indent=2, sort_keys=True)


def from_json(text: str) -> Config:
    """A config from `to_json`'s text; ValueError names a key that is not known."""
    return typing.cast(Config, _build(Config, json.loads(text), ""))


def model_from_json(text: str) -> ModelConfig:
    """A model's shape from JSON; ValueError names a key that is not known."""
    return typing.cast(ModelConfig, _build(ModelConfig, json.loads(text), "model."))


def plain(value: Any) -> Any:
    """A setting as JSON has it."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value


def override(config: Config, assignments: list[str]) -> Config:
    """Change single fields by `a.b=value`, as `--set` does; the whole config is checked again.

    Values are JSON where they parse as JSON and plain text otherwise. Example:
    ``override(config, ["actor.optimizer.lr=3e-4", "rollout.criticised=0"])``. Raises ValueError
    for an unknown key (naming the closest), a value of the wrong type, or a broken rule.
    """
    tree = dataclasses.asdict(config)
    for assignment in assignments:
        key, sep, raw = assignment.partition("=")
        _check(
            bool(sep) and bool(key),
            f"--set got {assignment!r}, expected key=value, such as num_steps=10",
        )
        node, path = tree, key.split(".")
        for depth, part in enumerate(path):
            if node is None and depth:
                block = ".".join(path[:depth])
                raise ValueError(
                    f"{key} cannot be set: {block} is null in this recipe; turn it on with its "
                    f"defaults first, --set {block}={{}}"
                )
            free_form = path[:depth] in (["task", "options"], ["text_critic", "options"])
            if not free_form and (not isinstance(node, dict) or part not in node):
                raise ValueError(_unknown_key(key))
            if depth < len(path) - 1:
                node = node[part]
        try:
            value = json.loads(raw)
        except json.JSONDecodeError:
            value = {"True": True, "False": False, "None": None}.get(raw, raw)
        if node.get(path[-1]) is None and isinstance(value, dict):
            value = _block(path, value)
        node[path[-1]] = value
    return typing.cast(Config, _build(Config, tree, ""))


def _block(path: list[str], value: dict[str, Any]) -> dict[str, Any]:
    """A block that was null, with its defaults put in, so that later settings find its fields."""
    hint: Any = Config
    for part in path:
        cls = _dataclass_of(hint)
        if cls is None:
            return value
        hint = typing.get_type_hints(cls).get(part)
    inner = _dataclass_of(hint)
    if inner is None:
        return value
    return dataclasses.asdict(_build(inner, value, ".".join(path) + "."))


def keys(cls: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key that `--set` takes."""
    names: list[str] = []
    for item, hint in _fields(cls):
        inner = _dataclass_of(hint)
        if inner is None or item.default is None:  # a part that is off is set as a whole, as JSON
            names.append(prefix + item.name)
        else:
            names += keys(inner, f"{prefix}{item.name}.")
    return names


def _unknown_key(key: str) -> str:
    known = keys()
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [name for name in known if name.rsplit(".", 1)[-1] == leaf]
    best = same_leaf or close
    return f"unknown key {key!r}; the closest is {best[0]!r} (`binac recipes --keys` lists all)"


def _fields(cls: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return [(item, hints[item.name]) for item in dataclasses.fields(cls)]


def _dataclass_of(hint: Any) -> type | None:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def _build(cls: type, tree: dict[str, Any], prefix: str) -> Any:
    if not isinstance(tree, dict):
        raise ValueError(
            f"{prefix.rstrip('.') or 'config'} is {tree!r}, expected an object with fields"
        )
    hints = {item.name: hint for item, hint in _fields(cls)}
    for name in tree:
        if name not in hints:
            raise ValueError(_unknown_key(prefix + name))
    values = {name: _convert(hints[name], value, prefix + name) for name, value in tree.items()}
    return cls(**values)


def _convert(hint: Any, value: Any, key: str) -> Any:
    """`value` as the field's type: ints pass as floats, nothing else is bent."""
    inner = _dataclass_of(hint)
    union = isinstance(hint, types.UnionType)
    if value is None and union and type(None) in typing.get_args(hint):
        return None
    if inner is not None:
        return _build(inner, value, key + ".")
    if typing.get_origin(hint) is tuple:
        _check(isinstance(value, list | tuple), f"{key} is {value!r}, expected a list")
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, v, f"{key}[{i}]") for i, v in enumerate(value))
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        _check(
            value in choices, f"{key} is {value!r}, expected one of {', '.join(map(repr, choices))}"
        )
        return value
    kinds = [k for k in typing.get_args(hint) if k is not type(None)] if union else [hint]
    kind = typing.get_origin(kinds[0]) or kinds[0]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    good = isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
    _check(good, f"{key} is {value!r} ({type(value).__name__}), expected {kind.__name__}")
    return value
