"""The quickstart: small models on a made-up problem, on two CPU cores in minutes. No torch.

`quickstart` and its three baselines differ in nothing but what they are named after. Every method
of `method_recipes.py` starts from it.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_binac.config import (
    BilevelConfig,
    Config,
    EvalConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RoleConfig,
    RoleWarmStart,
    RolloutConfig,
    TaskConfig,
    WarmStartConfig,
)


def quickstart() -> Config:
    """Bi-NAC on check digits: a small actor answers at once, a larger critic checks by working."""
    return Config(
        recipe="quickstart",
        num_steps=400,
        max_generated_tokens=400_000,
        actor=RoleConfig(
            model=ModelConfig(
                num_layers=2, hidden_size=128, ffn_hidden_size=336, max_sequence_length=40
            ),
            optimizer=OptimizerConfig(lr=2e-4, warmup_steps=5),
            loss=LossConfig(kl_coef=1e-3),
            share_prefixes=None,
        ),
        critic=RoleConfig(
            model=ModelConfig(
                num_layers=4, hidden_size=128, ffn_hidden_size=352, max_sequence_length=40
            ),
            optimizer=OptimizerConfig(lr=2e-4, warmup_steps=5),
            loss=LossConfig(kl_coef=1e-3),
            share_prefixes=None,
        ),
        rollout=RolloutConfig(
            prompts_per_step=32,
            attempts=8,
            criticised=2,
            feedbacks=4,
            revisions=4,
            max_attempt_tokens=2,
            max_feedback_tokens=9,
            max_revision_tokens=2,
        ),
        bilevel=BilevelConfig(lam=0.1, actor_steps_per_critic_step=1),
        task=TaskConfig(name="checksum", options={"easy_share": 0.5, "seed": 1}),
        warm_start=WarmStartConfig(
            actor=RoleWarmStart(steps=600, stop_loss=0.08, batch=96, lr=2e-3),
            critic=RoleWarmStart(steps=400, stop_loss=0.12, batch=32, lr=1.5e-3),
        ),
        eval=EvalConfig(every=10, num_prompts=512),
    )


def quickstart_grpo() -> Config:
    """Plain RL without feedback at the same number of sampled tokens; the frozen critic is only
    evaluated."""
    base = quickstart()
    assert base.critic is not None
    return replace(
        base,
        recipe="quickstart_grpo",
        critic=replace(base.critic, train=False),
        rollout=replace(base.rollout, prompts_per_step=64, attempts=16, criticised=0),
        bilevel=replace(base.bilevel, lam=0.0),
        eval=replace(base.eval, every=30),  # a step samples a third of the tokens
    )


def quickstart_fixed_critic() -> Config:
    """The same tree with the warm-started critic frozen."""
    base = quickstart()
    assert base.critic is not None
    return replace(
        base,
        recipe="quickstart_fixed_critic",
        critic=replace(base.critic, train=False),
        bilevel=replace(base.bilevel, lam=0.0),
    )


def quickstart_joint() -> Config:
    """Both roles trained on the same reward without the penalty: Bi-NAC at lambda 0."""
    base = quickstart()
    return replace(base, recipe="quickstart_joint", bilevel=replace(base.bilevel, lam=0.0))


RECIPES = (quickstart, quickstart_grpo, quickstart_fixed_critic, quickstart_joint)
