"""Settings of the methods beside Bi-NAC: who pays the actor, what is added to its loss, who speaks.

Each block is off where the config holds None for it, so that no coefficient stands there unused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


def check(ok: bool, message: str) -> None:
    """Raise ValueError with `message` where a rule is broken."""
    if not ok:
        raise ValueError(message)


CreditKind = Literal[
    "tree", "group", "running", "chain", "two_turn", "progress", "union", "regenerated", "spans",
    "value", "none",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditConfig:
    """How the actor's turns are paid."""

    kind: CreditKind = "tree"
    """tree: Bi-NAC's credit of attempts and revisions; group: attempts among their siblings;
    running: attempts against a moving average; chain: Bi-NAC eq. 3 to the letter, against a moving
    average; two_turn: RLTF's returns by turn; progress: SCoRe's second answer, and what it gained
    on the first; union: attempts and revisions as one group (Critique-GRPO); regenerated: attempts
    and regenerated answers, each among their own (MulFeRL); spans: by token, from what the critic
    quotes (Text2Grad); value: revisions against a value head (MLMT-RL); none: no policy gradient
    (SDPO)."""
    scale: Literal["mean", "leave_one_out", "std", "mean_normalized"] = "mean"
    """Of group: what is taken off the reward of an attempt, and what divides it."""
    momentum: float = 0.9
    """Of running and chain: how slowly the moving average forgets, per step."""
    next_weight: float = 0.1
    """Of two_turn: weight of the revision's reward in the attempt's return."""
    attempt_kl_coef: float | None = None
    """Of progress: weight of the KL to the reference on attempts, apart from that on revisions;
    None for one and the same."""

    def __post_init__(self) -> None:
        check(0 <= self.momentum < 1, f"credit.momentum is {self.momentum}, expected in [0, 1)")
        check(self.next_weight >= 0, f"credit.next_weight is {self.next_weight}, expected >= 0")
        check(
            self.attempt_kl_coef is None or self.attempt_kl_coef > 0,
            f"credit.attempt_kl_coef is {self.attempt_kl_coef}, expected above 0, or null for the "
            "same as on revisions",
        )
        idle = {
            "scale": (self.scale != "mean", ("group",)),
            "momentum": (self.momentum != 0.9, ("running", "chain")),
            "next_weight": (self.next_weight != 0.1, ("two_turn",)),
            "attempt_kl_coef": (self.attempt_kl_coef is not None, ("progress",)),
        }
        for name, (is_set, kinds) in idle.items():
            check(
                not is_set or self.kind in kinds,
                f"credit.{name} is set but credit.kind {self.kind!r} does not use it; leave it "
                f"out, or set credit.kind to {' or '.join(kinds)}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfDistillConfig:
    """RLTF-SD: good revisions are learned as answers to the problem alone (arXiv 2602.02482)."""

    coef: float = 0.1
    ramp_steps: int = 0
    """Steps over which the coefficient rises from 0; 0 starts with all of it."""
    floor: float = -5.0
    """Tokens less likely than this under the problem alone (log-prob) are left out."""

    def __post_init__(self) -> None:
        check(self.coef > 0, f"self_distill.coef is {self.coef}, expected above 0; null is off")
        check(
            self.ramp_steps >= 0,
            f"self_distill.ramp_steps is {self.ramp_steps}, expected 0 or more",
        )
        check(self.floor < 0, f"self_distill.floor is {self.floor}, expected a log-prob below 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackModelConfig:
    """RLTF-FM: the actor also learns to predict the feedback on its attempt (arXiv 2602.02482)."""

    coef: float = 0.1

    def __post_init__(self) -> None:
        check(self.coef > 0, f"feedback_model.coef is {self.coef}, expected above 0; null is off")


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """SDPO: the policy that has read the feedback teaches the one that has not (2601.20802)."""

    coef: float = 1.0
    alpha: float = 0.5
    """0: KL(teacher || student); 1: KL(student || teacher); between: Jensen-Shannon."""
    top_k: int = 20
    """Ids that are told apart; the rest of the vocabulary is one bucket."""
    ratio_clip: float | None = 2.0
    """Cap of the importance weight of a token; null for no weight."""
    trust_region: float = 0.0
    """How far the teacher is held to the reference: proportional to policy^(1-w) * reference^w."""

    def __post_init__(self) -> None:
        check(self.coef > 0, f"teacher.coef is {self.coef}, expected above 0; null is off")
        check(0 <= self.alpha <= 1, f"teacher.alpha is {self.alpha}, expected in [0, 1]")
        check(self.top_k > 0, f"teacher.top_k is {self.top_k}, expected 1 or more")
        check(
            0 <= self.trust_region <= 1,
            f"teacher.trust_region is {self.trust_region}, expected in [0, 1]",
        )
        check(
            self.ratio_clip is None or self.ratio_clip > 0,
            f"teacher.ratio_clip is {self.ratio_clip}, expected above 0, or null",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedConfig:
    """Critique-GRPO: revisions are learned as answers to the problem alone, with the weight
    p / (p + gamma) of each token (arXiv 2506.03106)."""

    gamma: float = 0.1

    def __post_init__(self) -> None:
        check(self.gamma > 0, f"shaped.gamma is {self.gamma}, expected above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ContrastConfig:
    """MulFeRL: a group that was solved on feedback against the failed one (arXiv 2601.22900)."""

    coef: float = 0.01
    tau: float = 0.005
    margin: float = 0.0

    def __post_init__(self) -> None:
        check(self.coef > 0, f"contrast.coef is {self.coef}, expected above 0; null is off")
        check(self.tau > 0, f"contrast.tau is {self.tau}, expected above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanConfig:
    """Text2Grad: token rewards from quoted spans, advantages by GAE (arXiv 2505.22338)."""

    kl_coef: float = 0.0
    """b: KL to the reference of each token, taken off its reward."""
    outcome_weight: float = 1.0
    """Weight of the verifier's outcome at the last token."""
    gamma: float = 1.0
    gae_lam: float = 0.95

    def __post_init__(self) -> None:
        check(self.kl_coef >= 0, f"spans.kl_coef is {self.kl_coef}, expected 0 or more")
        for name in ("gamma", "gae_lam"):
            check(
                0 <= getattr(self, name) <= 1,
                f"spans.{name} is {getattr(self, name)}, expected in [0, 1]",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueHeadConfig:
    """A scalar head on the actor's hidden states. The trunk gets no gradient from it."""

    lr: float = 1e-2
    steps: int = 1
    """Adam steps of the head on each step's data."""
    ahead_steps: int = 4
    """k: further steps of a copy of the head, which gives V^k (MLMT-RL)."""

    def __post_init__(self) -> None:
        check(self.lr > 0, f"value_head.lr is {self.lr}, expected above 0")
        check(self.steps > 0, f"value_head.steps is {self.steps}, expected 1 or more")
        check(self.ahead_steps > 0, f"value_head.ahead_steps is {self.ahead_steps}, expected >= 1")


def check_request(template: str | None, options: Mapping[str, Any]) -> None:
    """Raise ValueError where a critic behind HTTP could not be asked like this."""
    places = {"{problem}", "{attempt}"}
    check(
        template is None or places <= set(re.findall(r"\{\w+\}", template)),
        f"critic template is {template!r}, expected one with {{problem}} and {{attempt}}",
    )
    reserved = sorted({"messages", "model", "stream", "n"} & options.keys())
    check(not reserved, f"critic options set {reserved}, which are not for them; leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCriticConfig:
    """A critic that is no policy of this run: a rule, one fixed text, or a model behind HTTP."""

    kind: Literal["rule", "constant", "http"] = "rule"
    """rule: the task's own right feedback; constant: `text`; http: an OpenAI-compatible one."""
    text: str = ""
    base_url: str = ""
    """Of http, such as "http://critic-host:8000/v1"."""
    model: str = ""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key, never written; empty for none."""
    temperature: float = 1.0
    system: str | None = None
    """Of http: the system message; None for the default (`rollout.http_critic.SYSTEM`), empty for
    none."""
    template: str | None = None
    """Of http: the user message, with {problem} and {attempt} in their places; None for the
    default."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of http: further fields of a request, such as {"top_p": 0.9, "stop": ["\\n\\n"]}; null leaves
    one out that the endpoint does not take, such as {"seed": null}."""
    timeout: float = 60.0
    """Seconds until a request counts as lost."""
    max_retries: int = 5
    max_parallel: int = 16
    """Requests under way at once."""
    cache_dir: str = "runs/critic_cache"

    def __post_init__(self) -> None:
        check(
            (self.kind == "constant") == bool(self.text),
            f"text_critic.text is {self.text!r} with kind {self.kind!r}; set it for kind constant, "
            "and leave it out elsewhere",
        )
        check(
            (self.kind == "http") == bool(self.base_url and self.model),
            f"text_critic has kind {self.kind!r}, base_url {self.base_url!r} and model "
            f"{self.model!r}; kind http needs both, the others neither",
        )
        for name in ("system", "template", "options"):
            value = getattr(self, name)
            check(
                self.kind == "http" or value is None or value == {},
                f"text_critic.{name} is {value!r} with kind {self.kind!r}; it is for kind http",
            )
        check_request(self.template, self.options)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """A part of the run with other settings: SCoRe and Critique-RL have two."""

    start: float = 0.0
    """Share of the run (of its steps, or of its budget of tokens, whichever is further)."""
    train: tuple[str, ...] = ("actor", "critic")
    """Roles that learn in it."""
    set: tuple[str, ...] = ()
    """Settings as on the command line, such as "bilevel.value_weight=0"."""

    def __post_init__(self) -> None:
        check(0 <= self.start < 1, f"stages.start is {self.start}, expected in [0, 1)")
        for role in self.train:
            check(
                role in ("actor", "critic"),
                f"stages.train holds {role!r}, expected actor and critic",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CollapseConfig:
    """When a critic that says nothing any more ends the run."""

    patience: int = 3
    """Evaluations in a row."""
    min_uplift: float = 0.0
    """Second answers under feedback less those under another problem's, sampled; at or below this
    the critic adds nothing."""
    max_entropy: float = 0.05
    """Nats per token of the critic; a critic that is surer than this has nothing left to explore.
    """

    def __post_init__(self) -> None:
        check(self.patience > 0, f"collapse.patience is {self.patience}, expected 1 or more")
