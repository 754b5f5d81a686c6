"""Trees as JSON: what a checkpoint in the middle of a block keeps for the probe at the block's
end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_binac.types import Grade, Prompt, Tree, Turn


def trees_to_json(trees: Sequence[Tree]) -> list[dict[str, Any]]:
    """JSON-able twins of the trees, ids and log-probs included; `trees_from_json` gives equal ones
    back."""
    return [
        {
            "prompt": asdict(tree.prompt),
            "attempts": [_turn_to_json(t) for t in tree.attempts],
            "criticised": tree.criticised,
            "weights": tree.weights,
            "feedbacks": [[_turn_to_json(t) for t in zs] for zs in tree.feedbacks],
            "revisions": [[[_turn_to_json(t) for t in ys] for ys in zs] for zs in tree.revisions],
            "probes": [[[_turn_to_json(t) for t in ys] for ys in zs] for zs in tree.probes],
            "round": tree.round,
        }
        for tree in trees
    ]


def trees_from_json(data: Sequence[dict[str, Any]]) -> list[Tree]:
    """The trees that `trees_to_json` was given."""
    return [
        Tree(
            prompt=Prompt(**d["prompt"]),
            attempts=[_turn_from_json(t) for t in d["attempts"]],
            criticised=d["criticised"],
            weights=d["weights"],
            feedbacks=[[_turn_from_json(t) for t in zs] for zs in d["feedbacks"]],
            revisions=[[[_turn_from_json(t) for t in ys] for ys in zs] for zs in d["revisions"]],
            probes=[[[_turn_from_json(t) for t in ys] for ys in zs] for zs in d["probes"]],
            round=d["round"],
        )
        for d in data
    ]


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    # A float32 goes through JSON's decimal text and comes back the same.
    return {
        "kind": turn.kind,
        "prompt_ids": turn.prompt_ids.tolist(),
        "ids": turn.ids.tolist(),
        "logprobs": [float(x) for x in turn.logprobs],
        "finish": turn.finish,
        "version": turn.version,
        "text": turn.text,
        "grade": None if turn.grade is None else asdict(turn.grade),
        "advantage": turn.advantage,
        "trainable": turn.trainable,
    }


def _turn_from_json(data: dict[str, Any]) -> Turn:
    return Turn(
        **{
            **data,
            "prompt_ids": np.asarray(data["prompt_ids"], np.int32),
            "ids": np.asarray(data["ids"], np.int32),
            "logprobs": np.asarray(data["logprobs"], np.float32),
            "grade": None if data["grade"] is None else Grade(**data["grade"]),
        }
    )
