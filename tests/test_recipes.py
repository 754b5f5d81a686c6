"""Every recipe: it is a config, it runs, and it resumes exactly."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_runs import arguments, assert_same_checkpoint, rows, run, transcripts

from megatron_binac import method_recipes, quickstart, recipes
from megatron_binac.config import Config, from_json, to_json

METHODS = [recipe.__name__ for recipe in method_recipes.RECIPES]
OWN = [recipe.__name__ for recipe in (*quickstart.RECIPES, *method_recipes.RECIPES)]
"""All that train here: smollm2 has 135 M parameters a role, too many for a test on a CPU."""


def sets(name: str, *more: str) -> tuple[str, ...]:
    """Three steps of a recipe at the size of a test, its own tree kept."""
    config = recipes.get(name)
    tree = ("attempts", "criticised", "feedbacks", "revisions")
    out = [f"rollout.{part}={getattr(config.rollout, part)}" for part in tree]
    out += [f"bilevel.actor_steps_per_critic_step={min(2, _k(config))}", "task.options.seed=1"]
    out += ["num_steps=3", "save_every=1", "keep_checkpoints=9", "eval.every=0"]
    out += ["eval.num_prompts=3", "rollout.prompts_per_step=4"]
    return (*out, *more)


def _k(config: Config) -> int:
    return config.bilevel.actor_steps_per_critic_step


def argv(run_dir: Path, cache: Path, name: str, *more: str) -> list[str]:
    """The command line without the settings of a role that the recipe does not have."""
    full = arguments(run_dir, cache, *sets(name, *more), recipe=name)
    if recipes.get(name).critic is not None:
        return full
    pairs = list(zip(full[4::2], full[5::2], strict=True))
    kept = [part for pair in pairs if not pair[1].startswith("critic.") for part in pair]
    return full[:4] + kept


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm starts that all runs of this file share."""
    return tmp_path_factory.mktemp("warm")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Callable[[str], Path]:
    """The run of a recipe that nobody stopped, by its name; made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            path = tmp_path_factory.mktemp(name) / "run"
            run(1, argv(path, cache, name))
            made[name] = path
        return made[name]

    return folder


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_is_a_config_of_its_name(name: str) -> None:
    config = recipes.get(name)
    assert config.recipe == name
    assert from_json(to_json(config)) == config
    doc = recipes.RECIPES[name].__doc__
    assert doc and doc.strip()


def test_every_method_is_described() -> None:
    page = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    missing = [name for name in OWN if f"`{name}`" not in page]
    assert not missing


def test_methods_share_the_budget_and_the_start_of_the_quickstart() -> None:
    base = recipes.get("quickstart")
    for name in METHODS:
        config = recipes.get(name)
        assert config.max_generated_tokens == base.max_generated_tokens
        assert config.warm_start == base.warm_start
        assert config.actor.optimizer == base.actor.optimizer


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OWN)
def test_a_recipe_takes_three_steps(name: str, straight: Callable[[str], Path]) -> None:
    """Finite losses of whoever learns, and a role that does not learn has none."""
    run_dir = straight(name)
    found = rows(run_dir)
    assert [row["step"] for row in found] == [-1, 0, 1, 2]
    config = from_json((run_dir / "config.json").read_text(encoding="utf-8"))
    for row in found[1:]:
        learned = [key for key in row if key.endswith("/loss")]
        assert all(math.isfinite(row[key]) for key in learned), learned
        assert ("actor/follow/num_tokens" in row or "actor/follow/loss" in row) == bool(
            config.actor.train
        )
        feedback = config.text_critic is None and config.rollout.criticised > 0
        spoken = ("actor", "critic") if feedback else ("actor",)
        assert all(row[f"{role}/play/flops"] > 0 for role in spoken)
        assert (row.get("actor/follow/flops", 0) > 0) == ("actor/follow/loss" in row)
    leads = [row for row in found if any(k.startswith("critic/lead/") for k in row)]
    assert all(row["critic/lead/flops"] > 0 for row in leads if "critic/lead/loss" in row)
    learns = config.critic_learns and config.rollout.criticised > 0
    assert len(leads) == (3 // _k(config) if learns else 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OWN)
def test_a_recipe_resumes_exactly(
    name: str, tmp_path: Path, straight: Callable[[str], Path]
) -> None:
    """From the checkpoint of step 1 the rest is what it was: metrics and every saved number."""
    run_dir, again = straight(name), tmp_path / "again"
    shutil.copytree(run_dir, again)
    for step in (2, 3):
        shutil.rmtree(again / "checkpoints" / f"step_{step:06d}")
    (again / "checkpoints" / "latest").unlink()
    run(1, ["train", "--resume", str(again)])
    assert "step 1 comes next" in (again / "log.txt").read_text(encoding="utf-8")
    assert rows(again) == rows(run_dir)
    assert transcripts(again) == transcripts(run_dir)
    last = run_dir / "checkpoints" / "step_000003"
    roles = tuple(sorted(path.name for path in last.iterdir() if path.is_dir()))
    assert "actor" in roles
    assert_same_checkpoint(again, run_dir, 3, roles=roles)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_grpo_is_the_tree_without_a_critic(tmp_path: Path, cache: Path) -> None:
    """C = 0 under Bi-NAC's own credit is the group credit without a standard deviation."""
    plain = ("rollout.criticised=0", "bilevel.lam=0", "rollout.attempts=4")
    run(1, argv(tmp_path / "tree", cache, "fixed_critic", *plain))
    group = ("actor.loss.aggregate=token_mean", 'credit={"kind": "group"}', "rollout.attempts=4")
    run(1, argv(tmp_path / "group", cache, "grpo", *group))
    for one, other in zip(rows(tmp_path / "tree"), rows(tmp_path / "group"), strict=True):
        assert one == other
    assert_same_checkpoint(tmp_path / "tree", tmp_path / "group", 3, roles=("actor",))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_score_is_a_constant_critic(tmp_path: Path, cache: Path) -> None:
    """Every feedback of a SCoRe run is the one text, and no policy is asked for it."""
    run(1, argv(tmp_path / "run", cache, "score", "track.transcripts_per_step=4"))
    lines = (tmp_path / "run" / "transcripts.jsonl").read_text(encoding="utf-8").splitlines()
    said = {z["text"] for line in lines for z in json.loads(line)["tree"]["feedbacks"]}
    assert said == {"off"}
