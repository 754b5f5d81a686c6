"""Tokens and floating-point operations of a model, as a person would count them.

A multiply and an add are two operations. Counted are matrix products: projections, feed-forward,
attention scores and their mix, the head. Not counted: the input embedding, which is a table, norms,
rotary embeddings, softmax, and everything a kernel does twice. Tokens are real ones, never padding;
of routed experts only those that a token meets count.

    forward  = 2 T W + 4 P N D L + 2 S V H        training = 3 forward

with T tokens, W weights of the projections and the active feed-forward of all L layers, P pairs of
a query and a key that it may see (a causal sequence of n tokens has n (n + 1) / 2), N D the width
of all query heads, S tokens that are scored by the head, V real columns, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_binac.planner.shapes import Shape

FORMULA = (
    "model FLOPs = 2 T W + 4 P N D L + 2 S V H forward (T real tokens, W layer weights a token "
    "meets, P causal query-key pairs, S scored tokens), times 3 for training, and once more for a "
    "reference; MFU = model FLOPs / (seconds x peak FLOP/s), every turn as if alone; HFU counts "
    "what was executed: padding and recomputation too, and what turns share once, so that it can "
    "be the smaller one"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a pass has to do. Example: ``Work(tokens=10, pairs=55, scored=2)``."""

    tokens: int
    """Tokens that go through the layers."""
    pairs: int
    """Query-key pairs that attention looks at."""
    scored: int
    """Tokens whose distribution the head computes."""

    def __add__(self, other: Work) -> Work:
        return Work(
            tokens=self.tokens + other.tokens,
            pairs=self.pairs + other.pairs,
            scored=self.scored + other.scored,
        )


def causal(lengths: Iterable[int], scored: int) -> Work:
    """Whole sequences, each token seeing itself and what is before it."""
    lengths = list(lengths)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    return Work(tokens=sum(lengths), pairs=pairs, scored=scored)


def generation(prompts: Iterable[int], answers: Iterable[Iterable[int]]) -> Work:
    """Sampling: every distinct prompt is read once, and each answer grows from its cache.

    The last token of an answer is sampled and never read. Each sampled token is scored once; the
    first of all answers to a prompt come from one scored row.
    """
    total = Work(tokens=0, pairs=0, scored=0)
    for prompt, lengths in zip(prompts, answers, strict=True):
        total += Work(tokens=prompt, pairs=prompt * (prompt + 1) // 2, scored=1)
        for length in lengths:
            read = max(length - 1, 0)
            pairs = read * prompt + read * (read + 1) // 2
            total += Work(tokens=read, pairs=pairs, scored=read)
    return total


def forward_flops(shape: Shape, work: Work) -> int:
    """Operations of one forward pass."""
    weights = shape.num_layers * (shape.attention_weights + shape.active_mlp_weights)
    layers = 2 * work.tokens * weights
    attention = 4 * work.pairs * shape.query_width * shape.num_layers
    head = 2 * work.scored * shape.vocab * shape.hidden
    return layers + attention + head


def training_flops(shape: Shape, work: Work) -> int:
    """Forward and backward: the backward pass has two products for each of the forward's."""
    return 3 * forward_flops(shape, work)


def executed_flops(shape: Shape, work: Work, *, training: bool, recompute: bool = False) -> int:
    """What a pass runs: `work` with padding counted in, and the layers again where recomputed."""
    once = forward_flops(shape, work)
    if not training:
        return once
    head = 2 * work.scored * shape.vocab * shape.hidden
    # The fused log-prob makes its logits a second time in the backward pass.
    return 3 * once + head + ((once - head) if recompute else 0)
