"""Rules between fields, `--set`, and the JSON that a resumed run reads."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_binac import config as configs
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
    from_json,
    override,
    to_json,
)

ROOT = Path(__file__).resolve().parents[1]
BASE = Config(recipe="toy")


def test_import_needs_no_torch() -> None:
    code = (
        "import sys, megatron_binac.config\n"
        "found = {'torch', 'numpy', 'megatron'} & set(sys.modules)\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: ModelConfig(num_layers=0), "model.num_layers is 0"),
        (lambda: ModelConfig(hidden_size=130), "hidden_size 130 is not a multiple"),
        (lambda: ModelConfig(num_query_groups=3), "change num_query_groups"),
        (lambda: ParallelConfig(tp=0), "parallel.tp is 0"),
        (lambda: ParallelConfig(vpp=2), "set pp above 1"),
        (lambda: ParallelConfig(sequence_parallel=True), "set tp above 1"),
        (lambda: OptimizerConfig(lr=-1.0), "optimizer.lr is -1.0"),
        (lambda: OptimizerConfig(lr=1e-3, min_lr=1e-2), "between 0 and optimizer.lr"),
        (lambda: OptimizerConfig(beta2=1.0), "optimizer.beta2 is 1.0"),
        (lambda: LossConfig(clip_low=1.0), "loss.clip_low is 1.0"),
        (lambda: LossConfig(updates_per_batch=0), "loss.updates_per_batch is 0"),
        (lambda: RoleConfig(parallel=ParallelConfig(tp=3)), "tp 3 does not divide"),
        (lambda: RoleConfig(parallel=ParallelConfig(tp=4)), "num_query_groups 2"),
        (lambda: RoleConfig(parallel=ParallelConfig(pp=3)), "does not divide model.num_layers"),
        (lambda: RoleConfig(max_tokens_per_micro_batch=64), "one sequence would not fit"),
        (lambda: RolloutConfig(criticised=9), "between 0 and rollout.attempts 8"),
        (lambda: RolloutConfig(feedbacks=0), "rollout.criticised to 0"),
        (lambda: RolloutConfig(temperature=0.0), "greedy decoding is for evaluation"),
        (lambda: BilevelConfig(actor_steps_per_critic_step=0), "expected 1 or more"),
        (lambda: EvalConfig(num_prompts=0), "eval.num_prompts is 0"),
        (lambda: Config(recipe="toy", num_steps=0), "num_steps is 0"),
        (lambda: Config(recipe="toy", critic=None), "set rollout.criticised to 0"),
        (
            lambda: Config(recipe="toy", rollout=RolloutConfig(max_feedback_tokens=128)),
            "the three turns may take 144 tokens",
        ),
    ],
)
def test_a_broken_rule_names_the_field_that_mends_it(build: Any, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert expected in str(caught.value)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.seed = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("num_steps=7", ("num_steps",), 7),
        ("actor.optimizer.lr=3e-4", ("actor", "optimizer", "lr"), 3e-4),
        ("actor.optimizer.lr=1", ("actor", "optimizer", "lr"), 1.0),
        ("critic.train=false", ("critic", "train"), False),
        ("critic.train=False", ("critic", "train"), False),
        ("actor.optimizer.schedule=cosine", ("actor", "optimizer", "schedule"), "cosine"),
        ("actor.loss.dual_clip=3", ("actor", "loss", "dual_clip"), 3.0),
        ("track.wandb_project=null", ("track", "wandb_project"), None),
        ("track.wandb_project=a=b", ("track", "wandb_project"), "a=b"),
        ("task.options.level=4", ("task", "options"), {"level": 4}),
        ('task.options={"a": [1]}', ("task", "options"), {"a": [1]}),
        ("bilevel.lam=-0.1", ("bilevel", "lam"), -0.1),
    ],
)
def test_set_reaches_the_field_with_its_type(
    assignment: str, path: tuple[str, ...], value: Any
) -> None:
    node: Any = override(BASE, [assignment])
    for name in path:
        node = getattr(node, name)
    assert node == value
    assert type(node) is type(value)


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("num_step=7", "closest is 'num_steps'"),
        ("actor.optimiser.lr=1", "closest is 'actor.optimizer.lr'"),
        ("actor.lr=1", "optimizer.lr'"),
        ("actor.optimizer=1", "expected an object with fields"),
        ("num_steps.deep=1", "unknown key"),
        ("num_steps=1.5", "num_steps is 1.5 (float), expected int"),
        ("num_steps=true", "num_steps is True (bool), expected int"),
        ("critic.train=1", "critic.train is 1 (int), expected bool"),
        ("actor.optimizer.lr=fast", "actor.optimizer.lr is 'fast' (str), expected float"),
        ("actor.precision=fp64", "expected one of 'fp32', 'bf16'"),
        ("=3", "expected key=value"),
        ("num_steps", "expected key=value"),
        ("actor.parallel.tp=3", "tp 3 does not divide"),
    ],
)
def test_set_refuses_and_says_why(assignment: str, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        override(BASE, [assignment])
    assert expected in str(caught.value)


def test_rules_are_checked_after_all_assignments() -> None:
    # Either one alone would break a rule of the other.
    both = override(BASE, ["actor.parallel.vpp=2", "actor.parallel.pp=2"])
    assert (both.actor.parallel.pp, both.actor.parallel.vpp) == (2, 2)
    lone = override(BASE, ["critic=null", "rollout.criticised=0"])
    assert lone.critic is None


def test_keys_are_what_set_takes() -> None:
    names = configs.keys()
    assert len(names) == len(set(names))
    assert {"num_steps", "actor.optimizer.lr", "critic.parallel.tp", "task.options"} <= set(names)
    # Setting each key to its own value changes nothing.
    for name in names:
        node: Any = BASE
        for part in name.split("."):
            node = getattr(node, part)
        assert override(BASE, [f"{name}={json.dumps(node)}"]) == BASE, name


def test_json_round_trip() -> None:
    changed = override(
        BASE,
        ["actor.loss.dual_clip=3", "task.options.digits=[1, 2]", "critic.model.num_layers=8"],
    )
    for config in (BASE, changed, override(BASE, ["critic=null", "rollout.criticised=0"])):
        assert from_json(to_json(config)) == config


def test_json_with_an_unknown_key_is_refused() -> None:
    tree = json.loads(to_json(BASE))
    tree["actor"]["optimizer"]["momentum"] = 0.9
    with pytest.raises(ValueError, match=r"unknown key 'actor\.optimizer\.momentum'"):
        from_json(json.dumps(tree))


@pytest.mark.parametrize(
    ("actor", "critic", "world", "expected"),
    [
        ((2, 1), (1, 1), 2, None),
        ((1, 2), (2, 1), 4, None),
        ((2, 2), (1, 1), 2, "actor.parallel.tp * pp = 4 does not divide the 2 ranks"),
        ((1, 1), (2, 1), 3, "critic.parallel.tp * pp = 2 does not divide the 3 ranks"),
    ],
)
def test_a_layout_is_checked_against_the_ranks(
    actor: tuple[int, int], critic: tuple[int, int], world: int, expected: str | None
) -> None:
    layouts = [RoleConfig(parallel=ParallelConfig(tp=tp, pp=pp)) for tp, pp in (actor, critic)]
    config = Config(recipe="toy", actor=layouts[0], critic=layouts[1])
    if expected is None:
        config.check_world(world)
        assert layouts[0].data_parallel(world, "actor") == world // (actor[0] * actor[1])
    else:
        with pytest.raises(ValueError) as caught:
            config.check_world(world)
        assert expected in str(caught.value)


HTTP = 'text_critic={"kind": "http", "base_url": "http://localhost:1/v1", "model": "m"}'


def test_what_an_http_critic_is_asked_is_set_field_by_field() -> None:
    sets = ["critic=null", HTTP, "text_critic.system=be brief", "text_critic.options.top_p=0.9"]
    sets += ["text_critic.template={problem}: {attempt}", "text_critic.options.seed=null"]
    config = override(Config(recipe="a"), sets)
    assert config.text_critic is not None
    assert config.text_critic.system == "be brief"
    assert config.text_critic.template == "{problem}: {attempt}"
    assert config.text_critic.options == {"top_p": 0.9, "seed": None}
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ((HTTP, "text_critic.template={problem}"), "with {problem} and {attempt}"),
        ((HTTP, "text_critic.options.n=4"), "options set ['n']"),
        (("text_critic={}", "text_critic.system=x"), "text_critic.system is 'x' with kind 'rule'"),
        (("text_critic={}", "text_critic.options.top_p=1"), "it is for kind http"),
    ],
)
def test_what_no_request_can_be_is_refused(assignments: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        override(Config(recipe="a"), ["critic=null", *assignments])
