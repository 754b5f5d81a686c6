"""Roles that start from a public model: its weights, its tokenizer, its chat template."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from megatron_binac.algo.chat_prompts import ChatTemplate
from megatron_binac.algo.prompts import Template
from megatron_binac.config import Config, RoleConfig
from megatron_binac.first_rank import on_first
from megatron_binac.models.checkpoint import load_learner
from megatron_binac.models.convert import folder
from megatron_binac.models.convert.command import PRETRAINED, prepare
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.tasks.base import Task, wording_of
from megatron_binac.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from megatron_binac.types import Role

TOKENIZER = "tokenizer"
"""Folder of a run that says what its ids mean."""


def prepare_weights(config: Config, run_dir: Path) -> dict[Role, Path]:
    """The converted folder of each role that starts from a public model; collective.

    Their small files go to the run, so that it can be read and exported without its sources.
    Raises ValueError, on every rank, where weights are absent or of another shape.
    """
    roles = {role: c for role, c in _roles(config).items() if c.model.weights is not None}
    if not roles:
        return {}

    def prepared() -> dict[Role, Path]:
        try:
            return _prepare(config, roles, run_dir)
        except (ImportError, OSError) as error:
            raise ValueError(str(error)) from error

    return on_first(prepared)


def _prepare(config: Config, roles: Mapping[Role, RoleConfig], run_dir: Path) -> dict[Role, Path]:
    found: dict[Role, Path] = {}
    for role, role_config in roles.items():
        source = role_config.model.weights
        assert source is not None
        path = prepare(source, Path(config.warm_start.cache_dir))
        folder.check_shape(role, role_config.model, source, folder.describe(path).model)
        folder.copy_small_files(path, run_dir / PRETRAINED / role)
        found[role] = path
    if config.task.tokenizer is not None:
        return found
    tokenizers = {role: (p / folder.BESIDE / "tokenizer.json") for role, p in found.items()}
    absent = [str(path) for path in tokenizers.values() if not path.is_file()]
    if absent:
        raise ValueError(f"there is no {absent[0]}; set task.tokenizer to a tokenizer's folder")
    if len({path.read_bytes() for path in tokenizers.values()}) > 1:
        raise ValueError(
            "actor and critic come with different tokenizers, but what one says the other reads as "
            "ids; give both weights of one family, or set task.tokenizer"
        )
    first = next(iter(tokenizers.values())).parent
    shutil.copytree(first, run_dir / TOKENIZER, dirs_exist_ok=True)
    return found


def _roles(config: Config) -> dict[Role, RoleConfig]:
    roles: dict[Role, RoleConfig] = {"actor": config.actor}
    if config.critic is not None:
        roles["critic"] = config.critic
    return roles


def own_tokenizer(config: Config, run_dir: Path) -> Tokenizer | None:
    """The tokenizer that came with the weights; None where no role starts from a public model."""
    if all(c.model.weights is None for c in _roles(config).values()):
        return None
    return load_tokenizer(run_dir / TOKENIZER)


def load_weights(path: Path, learner: MegatronLearner) -> None:
    """Put the weights of a converted folder into a learner, whatever its layout; collective."""
    load_learner(path / folder.WEIGHTS, learner, weights_only=True)


def embedding_rows(role: str, config: RoleConfig, tokenizer: Tokenizer) -> int:
    """Rows of the embedding that are real: the model's own where it came with some.

    ValueError where they are fewer than the tokenizer has ids.
    """
    rows = config.model.vocab_size or tokenizer.vocab_size
    if rows < tokenizer.vocab_size:
        raise ValueError(
            f"{role}.model.vocab_size is {rows}, but the tokenizer has {tokenizer.vocab_size} ids; "
            "set it to null, or name the model's own tokenizer"
        )
    return rows


def build_template(
    tokenizer: Tokenizer, task: Task, max_prompt_tokens: int
) -> Template | ChatTemplate:
    """Prompts by turn markers, or in the chat template of a model that was tuned to chat."""
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.is_chat:
        return ChatTemplate(
            tokenizer,
            tokenizer.render,
            tokenizer.encode_markup,
            wording_of(task),
            max_prompt_tokens=max_prompt_tokens,
        )
    return Template(tokenizer, max_prompt_tokens=max_prompt_tokens)
