"""What sampling takes: prompts read once, answers by who spoke them, counted by hand."""

from __future__ import annotations

import numpy as np

from megatron_binac.planner.flops import Work
from megatron_binac.rollout.work import sampling_work
from megatron_binac.types import Prompt, Tree, Turn, TurnKind

PROMPT = Prompt(id="p", text="x", gold="y", task="t")
NONE = Work(tokens=0, pairs=0, scored=0)


def turn(kind: TurnKind, prompt: list[int], length: int) -> Turn:
    ids = np.ones(length, np.int32)
    return Turn(
        kind=kind,
        prompt_ids=np.asarray(prompt, np.int32),
        ids=ids,
        logprobs=ids.astype(np.float32),
        finish="stop" if length else "failed",
        version=0,
        text="",
    )


def tree() -> Tree:
    """Two attempts on a prompt of 3; one feedback on a prompt of 4; of two revisions on a prompt of
    2 one was not asked for; one probe of 3 tokens."""
    return Tree(
        prompt=PROMPT,
        attempts=[turn("attempt", [1, 2, 3], 2), turn("attempt", [1, 2, 3], 1)],
        criticised=[0],
        feedbacks=[[turn("feedback", [1, 2, 3, 4], 3)]],
        revisions=[[[turn("revision", [5, 6], 1), turn("revision", [7, 8], 0)]]],
        probes=[[[turn("revision", [5, 6], 3)]]],
    )


def test_a_tree_by_hand() -> None:
    # Attempts: the prompt is 3 tokens and 6 pairs; of the first answer one token is read, which
    # sees 4. Revision: 2 tokens, 3 pairs. Every first token comes from a prompt's one scored row.
    actor = Work(tokens=3 + 1 + 2, pairs=6 + 4 + 3, scored=1 + 1 + 1)
    # Feedback: 4 tokens, 10 pairs; two tokens read, which see 5 and 6.
    critic = Work(tokens=4 + 2, pairs=10 + 5 + 6, scored=1 + 2)
    assert sampling_work([tree()]) == {"actor": actor, "critic": critic}


def test_probes_are_the_actors_and_apart() -> None:
    # 2 tokens, 3 pairs; two tokens read, which see 3 and 4.
    probe = Work(tokens=2 + 2, pairs=3 + 3 + 4, scored=1 + 2)
    assert sampling_work([tree()], probes=True) == {"actor": probe, "critic": NONE}


def test_attempts_of_a_further_round_were_sampled_as_revisions() -> None:
    again = tree()
    again.round = 1
    assert sampling_work([again])["actor"] == Work(tokens=2, pairs=3, scored=1)


def test_the_same_prompt_in_two_trees_is_read_once() -> None:
    once, twice = sampling_work([tree()])["actor"], sampling_work([tree(), tree()])["actor"]
    assert twice.tokens == once.tokens + 1
    assert sampling_work([]) == {"actor": NONE, "critic": NONE}
