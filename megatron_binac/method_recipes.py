"""The methods, each on the quickstart's task and models, at its budget of sampled tokens. No torch.

A recipe is what differs from the quickstart. Every one keeps the quickstart's critic for evaluation
where it has none of its own, so that both answers are measured the same way.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_binac.config import Config, LossConfig
from megatron_binac.method_config import (
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
from megatron_binac.quickstart import (
    quickstart,
    quickstart_fixed_critic,
    quickstart_grpo,
    quickstart_joint,
)

# ---- the actor alone: a group of attempts, no feedback -------------------------------------------


def grpo() -> Config:
    """GRPO: attempts over their group's standard deviation, mean of answer means (2402.03300)."""
    loss = LossConfig(kl_coef=1e-3, aggregate="sequence_mean")
    return _plain("grpo", loss, CreditConfig(kind="group", scale="std"))


def dr_grpo() -> Config:
    """Dr. GRPO: no standard deviation, a constant in the place of the length (2503.20783)."""
    limit = quickstart().rollout.max_attempt_tokens
    loss = LossConfig(kl_coef=0.0, aggregate="constant", constant_length=limit)
    return _plain("dr_grpo", loss, CreditConfig(kind="group"))


def dapo() -> Config:
    """DAPO: higher upper clip, groups without signal drawn anew, token mean, soft length limit
    (2503.14476)."""
    loss = LossConfig(kl_coef=0.0, clip_high=0.28)
    base = _plain("dapo", loss, CreditConfig(kind="group", scale="std"))
    # Four tokens with a ramp over the last: an honest answer takes two and is not punished.
    rollout = replace(base.rollout, resample=3, max_attempt_tokens=4, overlong_buffer=1)
    return replace(base, rollout=rollout)


def rloo() -> Config:
    """RLOO: leave-one-out baseline, REINFORCE on whole answers (2402.14740)."""
    loss = LossConfig(kl_coef=1e-3, ratio="none", aggregate="sequence_sum")
    return _plain("rloo", loss, CreditConfig(kind="group", scale="leave_one_out"))


def reinforce() -> Config:
    """REINFORCE against a moving average of earlier steps (Williams 1992)."""
    loss = LossConfig(kl_coef=1e-3, ratio="none", aggregate="sequence_sum")
    return _plain("reinforce", loss, CreditConfig(kind="running"))


def gspo() -> Config:
    """GSPO: one ratio for the whole answer, clipped narrowly (2507.18071)."""
    loss = LossConfig(
        kl_coef=0.0, ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregate="sequence_mean"
    )
    return _plain("gspo", loss, CreditConfig(kind="group", scale="std"))


# ---- a critic that does not learn ----------------------------------------------------------------


def fixed_critic() -> Config:
    """The tree of Bi-NAC with the critic frozen: critic lr 0."""
    return replace(quickstart_fixed_critic(), recipe="fixed_critic")


def score() -> Config:
    """SCoRe: a second try on one constant text; first held near the start, then paid for progress
    (2409.12917)."""
    base = quickstart()
    return replace(
        base,
        recipe="score",
        critic=None,
        text_critic=TextCriticConfig(kind="constant", text="off"),
        rollout=replace(base.rollout, criticised=8, feedbacks=1, revisions=1),
        bilevel=replace(base.bilevel, lam=0.0, attempt_weight=0.0, attempt_value_weight=0.0),
        credit=CreditConfig(kind="progress", attempt_kl_coef=0.1),
        stages=(
            StageConfig(start=0.0),
            StageConfig(
                start=0.5,
                set=(
                    "bilevel.attempt_weight=1",
                    "bilevel.improvement_weight=10",
                    "credit.attempt_kl_coef=0.01",
                    "actor.loss.kl_coef=0.01",
                ),
            ),
        ),
    )


def rltf_sd() -> Config:
    """RLTF with self-distillation: revisions are learned as first answers (2602.02482)."""
    return replace(_two_turn("rltf_sd"), self_distill=SelfDistillConfig(coef=0.1))


def rltf_fm() -> Config:
    """RLTF with feedback modelling: the actor learns to predict the feedback too (2602.02482)."""
    return replace(_two_turn("rltf_fm"), feedback_model=FeedbackModelConfig(coef=0.1))


def critique_grpo() -> Config:
    """Critique-GRPO: seven attempts and a revision as one group, revisions learned as first answers
    (2506.03106)."""
    base = quickstart_fixed_critic()
    return _without_kl(
        replace(
            base,
            recipe="critique_grpo",
            rollout=replace(
                base.rollout,
                prompts_per_step=64,
                attempts=7,
                criticised=1,
                feedbacks=1,
                revisions=1,
            ),
            credit=CreditConfig(kind="union"),
            shaped=ShapedConfig(gamma=0.1),
        )
    )


def mulferl() -> Config:
    """MulFeRL: only failed groups are criticised and answered again, twice at most (2601.22900)."""
    base = quickstart_fixed_critic()
    return replace(
        base,
        recipe="mulferl",
        rollout=replace(
            base.rollout,
            prompts_per_step=64,
            criticised=8,
            feedbacks=1,
            revisions=1,
            select="failed_groups",
            rounds=2,
        ),
        credit=CreditConfig(kind="regenerated"),
        contrast=ContrastConfig(coef=0.01, tau=0.005),
    )


def text2grad() -> Config:
    """Text2Grad: spans that a critic quotes reward the tokens of the attempt (2505.22338)."""
    base = quickstart_fixed_critic()
    return _without_kl(
        replace(
            _quoting(base),
            recipe="text2grad",
            rollout=replace(
                base.rollout, criticised=8, feedbacks=1, revisions=0, max_feedback_tokens=14
            ),
            credit=CreditConfig(kind="spans"),
            spans=SpanConfig(kl_coef=0.01),
            value_head=ValueHeadConfig(),
        )
    )


def sdpo() -> Config:
    """SDPO: the policy after feedback teaches the policy before it, token by token (2601.20802)."""
    base = quickstart_fixed_critic()
    return _without_kl(
        replace(
            base,
            recipe="sdpo",
            rollout=replace(base.rollout, criticised=8, feedbacks=1, revisions=0),
            credit=CreditConfig(kind="none"),
            teacher=TeacherConfig(),
        )
    )


# ---- a critic that learns ------------------------------------------------------------------------


def ctrl() -> Config:
    """CTRL: the critic alone learns, from what a frozen actor makes of its words (2502.03492)."""
    base = quickstart_joint()
    return replace(base, recipe="ctrl", actor=replace(base.actor, train=False))


def critique_rl() -> Config:
    """Critique-RL: first to tell right from wrong, then to help as well; the actor is frozen
    (2510.24320)."""
    base = ctrl()
    return replace(
        base,
        recipe="critique_rl",
        stages=(
            StageConfig(start=0.0, set=("bilevel.value_weight=0", "bilevel.discrimination_coef=1")),
            StageConfig(start=0.5, set=("bilevel.discrimination_coef=0.2",)),
        ),
    )


def joint() -> Config:
    """Both roles on the same reward, without the penalty: lambda 0."""
    return replace(quickstart_joint(), recipe="joint")


def mlmt() -> Config:
    """MLMT-RL: a value head, now and some regression steps ahead, stands for the actor and its best
    response (OpenReview u1RjV99DPu)."""
    base = quickstart()
    return replace(
        base,
        recipe="mlmt",
        bilevel=replace(
            base.bilevel, adaptation="value", attempt_weight=0.0, attempt_value_weight=1.0
        ),
        credit=CreditConfig(kind="value"),
        value_head=ValueHeadConfig(steps=1, ahead_steps=4),
    )


def binac_paper() -> Config:
    """Bi-NAC to the letter: one attempt, one feedback, one revision, REINFORCE with moving
    baselines (2605.24547, eqs. 3 and 4)."""
    base = quickstart()
    loss = LossConfig(kl_coef=1e-3, ratio="none", aggregate="sequence_sum")
    assert base.critic is not None
    return replace(
        base,
        recipe="binac_paper",
        num_steps=1600,
        actor=replace(base.actor, loss=loss),
        critic=replace(base.critic, loss=loss),
        rollout=replace(
            base.rollout, prompts_per_step=128, attempts=1, criticised=1, feedbacks=1, revisions=1
        ),
        bilevel=replace(base.bilevel, actor_steps_per_critic_step=5),
        credit=CreditConfig(kind="chain"),
        eval=replace(base.eval, every=40),
    )


def binac() -> Config:
    """Bi-NAC with trees, leave-one-out credit and the actor's own steps as its best response."""
    return replace(quickstart(), recipe="binac")


def binac_lookahead() -> Config:
    """Bi-NAC whose best response takes further steps on a scratch copy."""
    base = quickstart()
    bilevel = replace(base.bilevel, adaptation="lookahead", lookahead_steps=1)
    return replace(base, recipe="binac_lookahead", bilevel=bilevel)


def binac_sd() -> Config:
    """Bi-NAC whose revisions are also learned as first answers, so that the critic can be dropped
    at inference."""
    return replace(quickstart(), recipe="binac_sd", self_distill=SelfDistillConfig(coef=0.1))


def binac_shared() -> Config:
    """Bi-NAC with one set of weights for both roles, told apart by their prompts."""
    base = quickstart()
    assert base.critic is not None
    # The larger of the two shapes, with both roles' examples in its warm start.
    return replace(
        base,
        recipe="binac_shared",
        actor=replace(base.actor, model=base.critic.model),
        critic=None,
        shared_policy=True,
    )


# ---- pieces --------------------------------------------------------------------------------------


def _plain(name: str, loss: LossConfig, credit: CreditConfig) -> Config:
    base = quickstart_grpo()
    return replace(base, recipe=name, actor=replace(base.actor, loss=loss), credit=credit)


def _two_turn(name: str) -> Config:
    """A chain that ends where the attempt is right; the critic does not learn."""
    base = quickstart_fixed_critic()
    return replace(
        base,
        recipe=name,
        rollout=replace(base.rollout, criticised=8, feedbacks=1, revisions=1, select="wrong"),
        credit=CreditConfig(kind="two_turn", next_weight=0.1),
    )


def _quoting(base: Config) -> Config:
    """Feedback that ends in a signed quote of the attempt."""
    task = replace(base.task, options={**base.task.options, "quotes": True})
    return replace(base, task=task)


def _without_kl(config: Config) -> Config:
    return replace(
        config, actor=replace(config.actor, loss=replace(config.actor.loss, kl_coef=0.0))
    )


RECIPES = (
    grpo, dr_grpo, dapo, rloo, reinforce, gspo, fixed_critic, score, rltf_sd, rltf_fm,
    critique_grpo, mulferl, text2grad, sdpo, ctrl, critique_rl, joint, mlmt, binac_paper, binac,
    binac_lookahead, binac_sd, binac_shared,
)  # fmt: skip
