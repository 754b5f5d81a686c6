"""What sampling a step's trees takes, for `planner.flops` to count."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_binac.planner.flops import Work, generation
from megatron_binac.rollout.play import kinds_of
from megatron_binac.types import Role, Tree, Turn


def sampling_work(trees: Sequence[Tree], *, probes: bool = False) -> dict[Role, Work]:
    """Of the turns that were sampled for these trees (or for their probes), by who spoke them.

    A prompt that several turns answer is read once. A text critic's words are the critic's.
    """
    spoken: dict[Role, list[Turn]] = {"actor": [], "critic": []}
    for tree in trees:
        if probes:
            spoken["actor"] += [t for ys_F in tree.probes for ys in ys_F for t in ys]
            continue
        for kind in kinds_of(tree):
            spoken["critic" if kind == "feedback" else "actor"] += tree.turns(kind)
    return {role: _work([t for t in turns if len(t.ids)]) for role, turns in spoken.items()}


def _work(turns: Sequence[Turn]) -> Work:
    prompts: dict[bytes, int] = {}
    answers: dict[bytes, list[int]] = {}
    for turn in turns:
        key = turn.prompt_ids.tobytes()
        prompts[key] = len(turn.prompt_ids)
        answers.setdefault(key, []).append(len(turn.ids))
    return generation(prompts.values(), answers.values())
