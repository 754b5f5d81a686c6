"""Trees through JSON, as a checkpoint in the middle of a block keeps them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from helpers_toy import JUNK, ONE, ZERO, Xor, toy_config, toy_players

from megatron_binac.rollout.batch import actor_turns
from megatron_binac.rollout.play import play, replay
from megatron_binac.training.trees import trees_from_json, trees_to_json
from megatron_binac.types import Sampling, Tree


def varied(
    prompt: np.ndarray, seed: int, sampling: Sampling
) -> tuple[list[int], list[float]] | None:
    """Odd numbers of all kinds, and now and then nothing at all."""
    if seed % 7 == 0:
        return None
    return [(ZERO, ONE, JUNK)[seed % 3]], [-float(np.float32(seed % 1000003) / 3)]


def plain(tree: Tree) -> Any:
    """The tree as nested lists and numbers."""

    def flat(node: Any) -> Any:
        if isinstance(node, np.ndarray):
            return [str(node.dtype), *node.tolist()]
        if isinstance(node, dict):
            return {k: flat(v) for k, v in node.items()}
        return [flat(v) for v in node] if isinstance(node, list) else node

    return flat(asdict(tree))


def test_trees_come_back_equal_to_the_last_bit() -> None:
    players = toy_players(varied, varied, task=Xor(breaks_on="?"))
    prompts = [replace(players.task.prompt("train", i), meta={"level": "easy"}) for i in range(4)]
    config = toy_config()
    trees = replay(players, play(players, prompts, config.rollout, 3), config.rollout, 3)
    actor_turns(trees, config.bilevel)
    assert any(t.failed for tree in trees for t in tree.attempts)
    assert any(t.advantage not in (0.0, 1.0) for tree in trees for t in tree.attempts)
    text = json.dumps(trees_to_json(trees), allow_nan=False)
    again = trees_from_json(json.loads(text))
    assert [plain(t) for t in again] == [plain(t) for t in trees]


def test_no_trees_are_no_trees() -> None:
    assert trees_from_json(json.loads(json.dumps(trees_to_json([])))) == []
