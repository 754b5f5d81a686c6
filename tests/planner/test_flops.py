"""Tokens and FLOPs against counts by hand: a tied head, grouped queries, routed experts."""

from __future__ import annotations

import pytest

from megatron_binac.planner import shapes
from megatron_binac.planner.flops import (
    Work,
    causal,
    executed_flops,
    forward_flops,
    generation,
    training_flops,
)
from megatron_binac.planner.shapes import Shape

TIED = Shape(num_layers=1, hidden=4, ffn=6, heads=2, kv_heads=2, head_dim=2, vocab=10, tied=True)
GROUPED = Shape(num_layers=2, hidden=8, ffn=12, heads=4, kv_heads=1, head_dim=2, vocab=16)
EXPERTS = Shape(
    num_layers=3, hidden=4, ffn=0, heads=2, kv_heads=1, head_dim=2, vocab=8,
    num_experts=5, experts_per_token=2, expert_ffn=3,
)  # fmt: skip


def test_tied_head_by_hand() -> None:
    # Layer: q, k, v, o are four 4x4 = 64; gate, up, down are three 4x6 = 72; two norms of 4.
    # Outside: one table 10x4 = 40 for both ends, the last norm 4.
    assert TIED.num_parameters == 64 + 72 + 8 + 4 + 40
    # Three tokens: 2 * 3 * 136 = 816. Pairs 1 + 2 + 3 = 6, each 2 * 4 for the score and 2 * 4 for
    # the mix: 96. Head on two tokens: 2 * 2 * 40 = 160. The embedding is a table: nothing.
    assert forward_flops(TIED, causal([3], scored=2)) == 816 + 96 + 160
    assert training_flops(TIED, causal([3], scored=2)) == 3 * 1072


def test_grouped_queries_by_hand() -> None:
    # q and o are 8x8, k and v 8x2: 64 + 64 + 16 + 16 = 160; the gated unit 3 * 8 * 12 = 288.
    assert GROUPED.attention_weights == 160
    assert GROUPED.num_parameters == 2 * (160 + 288 + 16) + 8 + 2 * 128
    # Two sequences of 2 and 3: 5 tokens, 3 + 6 = 9 pairs; fewer keys save weights, not pairs.
    # 2 * 5 * 448 * 2 layers = 8960; 4 * 9 * 8 * 2 layers = 576; head 2 * 4 * 128 = 1024.
    assert forward_flops(GROUPED, causal([2, 3], scored=4)) == 8960 + 576 + 1024
    assert GROUPED.kv_values_per_token == 2 * 2 * 2


def test_routed_experts_by_hand() -> None:
    # q, o 4x4, k, v 4x2: 48. Router 5x4 = 20. An expert 3 * 4 * 3 = 36: five stored, two met.
    assert EXPERTS.attention_weights == 48
    assert EXPERTS.num_parameters == 3 * (48 + 20 + 5 * 36 + 8) + 4 + 2 * 32
    assert EXPERTS.active_parameters == 3 * (48 + 20 + 2 * 36) + 32
    # 2 * 4 tokens * 140 * 3 layers = 3360; 4 * 10 pairs * 4 * 3 = 480; head 2 * 1 * 32 = 64.
    assert forward_flops(EXPERTS, causal([4], scored=1)) == 3360 + 480 + 64


def test_generation_by_hand() -> None:
    # A prompt of 3, answers of 2 and 1: the prompt is read once (6 pairs) and scored once; of the
    # first answer one token is read (4 pairs: 3 + itself), of the second none.
    assert generation([3], [[2, 1]]) == Work(tokens=4, pairs=10, scored=2)
    # Two answers of 3: each reads two tokens, 3 + 1 and 3 + 2 pairs.
    assert generation([3], [[3, 3]]) == Work(tokens=7, pairs=6 + 2 * 9, scored=5)


def test_generation_reads_what_a_full_pass_would_but_for_the_last_token() -> None:
    grown = generation([5], [[4]])
    assert grown.pairs == causal([8], scored=0).pairs
    assert grown.tokens == 8


def test_executed_counts_the_second_logits_and_the_second_forward() -> None:
    work = causal([3], scored=2)
    assert executed_flops(TIED, work, training=False) == 1072
    assert executed_flops(TIED, work, training=True) == 3 * 1072 + 160
    assert executed_flops(TIED, work, training=True, recompute=True) == 3 * 1072 + 160 + 912


@pytest.mark.parametrize("name", shapes.known())
def test_parameters_are_those_of_the_card(name: str) -> None:
    assert shapes.named(name).num_parameters == pytest.approx(shapes.known()[name], rel=0.01)


def test_a_wrong_name_names_the_closest() -> None:
    with pytest.raises(ValueError, match="llama3:8b"):
        shapes.named("llama3:8B")


def test_tensors_of_all_stages_are_the_whole_model() -> None:
    deep = Shape(num_layers=4, hidden=8, ffn=12, heads=4, kv_heads=2, head_dim=2, vocab=128)
    parts = [sum(deep.parameters_by_tensor(tp=1, pp=2, stage=stage)) for stage in range(2)]
    assert sum(parts) == deep.num_parameters
    # Two tensor ranks hold every matrix once and every norm (9 of 8) twice.
    half = sum(deep.parameters_by_tensor(tp=2, pp=1, stage=0))
    assert 2 * half == deep.num_parameters + 9 * 8


def test_a_tied_head_away_from_the_embedding_is_stored_twice() -> None:
    parts = [sum(TIED.parameters_by_tensor(tp=1, pp=1, stage=0))]
    assert parts == [64 + 72 + 12 + 128 * 4]
