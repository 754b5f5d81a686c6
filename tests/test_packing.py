"""Packing by hand: small inputs whose right answer can be written down, on both twins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from megatron_binac import packing, packing_reference
from megatron_binac.packing import Alignment, CostModel, Ragged


@pytest.fixture(params=["reference", "cpp"])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on the Python reference and on the extension."""
    if request.param == "reference":
        monkeypatch.setattr(packing, "_core", packing_reference)
    else:
        extension = pytest.importorskip("megatron_binac._C", reason="the extension was not built")
        monkeypatch.setattr(packing, "_core", extension)
    return request.param


def rows(*values: list[int]) -> list[np.ndarray]:
    return [np.array(v, dtype=np.int32) for v in values]


def first(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def as_lists(plan: packing.Plan) -> list[list[list[int]]]:
    return [[m.tolist() for m in plan.microbatches(r)] for r in range(plan.dp_size)]


# ---- parallel splits ---------------------------------------------------------


def test_short_sequence_is_padded_before_it_is_split(twin: str) -> None:
    align = Alignment.for_layout(tensor=2, context=2, sequence_parallel=True)
    packed = packing.gather(rows([11, 12]), first(1), alignment=align, pad_id=9)
    assert packed.tokens_T.tolist() == [11, 12, 9, 9]
    slices = [
        packed.tokens_T[packing.context_slots(packed.cu_seqlens_padded, size=2, rank=r)].tolist()
        for r in range(2)
    ]
    # Rank 0 holds chunks 0 and 3, rank 1 chunks 1 and 2; tensor parallelism then halves each.
    assert slices == [[11, 9], [12, 9]]


@pytest.mark.parametrize(("tensor", "context"), [(1, 2), (2, 2), (4, 2), (2, 4)])
def test_every_rank_holds_its_share_at_every_length(twin: str, tensor: int, context: int) -> None:
    align = Alignment.for_layout(tensor=tensor, context=context, sequence_parallel=True)
    for length in range(1, 2 * align.seq_multiple + 1):
        ids = rows(list(range(length)), [7])
        packed = packing.gather(ids, first(2), alignment=align)
        total = packed.num_tokens
        slots = [
            packing.context_slots(packed.cu_seqlens_padded, size=context, rank=r)
            for r in range(context)
        ]
        assert sorted(itertools.chain(*slots)) == list(range(total))
        assert {len(s) for s in slots} == {total // context}
        assert total // context % tensor == 0


def test_context_split_refuses_what_was_not_padded() -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens_padded: sequence 1 has 6 padded tokens"):
        packing.context_slots(np.array([0, 4, 10], np.int32), size=2, rank=0)


@pytest.mark.parametrize(("context", "tensor", "multiple"), [(2, 2, 4), (2, 4, 8), (4, 1, 8)])
def test_sequence_multiple_under_context_parallelism(
    context: int, tensor: int, multiple: int
) -> None:
    align = Alignment.for_layout(tensor=tensor, context=context, sequence_parallel=True)
    assert align.seq_multiple == multiple


def test_without_context_parallelism_the_pack_is_padded_not_the_sequence(twin: str) -> None:
    align = Alignment(pack_multiple=16)
    plan = packing.plan([5, 3, 7], capacity=16, alignment=align)
    assert plan.stored.tolist() == [16]
    assert plan.stats.padding == pytest.approx(1 / 16)


def test_odd_total_under_sequence_parallelism(twin: str) -> None:
    align = Alignment.for_layout(tensor=2, sequence_parallel=True)
    packed = packing.gather(rows([1, 2, 3, 4, 5, 6, 7]), first(1), alignment=align)
    assert packed.num_tokens == 8
    assert packed.loss_mask_T.tolist() == [False] + [True] * 6 + [False]
    assert packed.cu_seqlens.tolist() == [0, 7]
    assert packed.cu_seqlens_padded.tolist() == [0, 8]
    values = np.arange(8, dtype=np.float32)
    back = packing.scatter([values], [packed], np.array([7]))
    assert back[0].tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("tokens", "multiple", "stored"),
    [(4092, 16, 4096), (1905, 16, 1920), (1905, 32, 1920), (1905, 128, 2048), (1, 16, 32)],
)
def test_fp8_counts_tokens_after_the_split(tokens: int, multiple: int, stored: int) -> None:
    align = Alignment.for_layout(tensor=2, sequence_parallel=True, token_multiple=multiple)
    assert align.stored(tokens) == stored
    assert stored // 2 % multiple == 0


def test_fp8_under_context_parallelism() -> None:
    align = Alignment.for_layout(tensor=2, context=2, sequence_parallel=True, token_multiple=16)
    assert (align.seq_multiple, align.pack_multiple, align.total_multiple) == (4, 64, 64)
    assert align.stored(65) == 128


def test_fixed_length_must_fit_the_multiples() -> None:
    with pytest.raises(ValueError, match=r"fixed_length: got 40, expected a multiple of 16"):
        Alignment(pack_multiple=16, fixed_length=40)
    assert Alignment(pack_multiple=16, fixed_length=48).stored(3) == 48


# ---- the buffers -------------------------------------------------------------


def test_labels_never_cross_a_border(twin: str) -> None:
    packed = packing.gather(rows([1, 2, 3], [7, 8]), first(2), ignore_id=-1)
    assert packed.tokens_T.tolist() == [1, 2, 3, 7, 8]
    assert packed.labels_T.tolist() == [2, 3, -1, 8, -1]
    assert packed.position_ids_T.tolist() == [0, 1, 2, 0, 1]
    assert packed.sample_ids_T.tolist() == [0, 0, 0, 1, 1]
    assert packed.max_seqlen == 3


def test_one_value_a_token_and_the_first_is_masked(twin: str) -> None:
    packed = packing.gather(rows([1, 2, 3], [7], [4, 5]), np.array([2, 0, 1], np.int32))
    assert packed.tokens_T.tolist() == [4, 5, 1, 2, 3, 7]
    assert packed.loss_mask_T.tolist() == [False, True, False, True, True, False]
    # The output before a token scores it: output t scores labels[t] = tokens[t + 1].
    scored = np.flatnonzero(packed.loss_mask_T)
    assert packed.labels_T[scored - 1].tolist() == packed.tokens_T[scored].tolist()


def test_prompts_are_seen_and_not_trained_on(twin: str) -> None:
    packed = packing.gather(
        rows([3, 4], [9]),
        first(2),
        prompts=rows([1, 2], []),
        loss_mask=[np.array([True, False]), np.array([True])],
        fields={
            "old_logprobs": [np.array([-1, -2], np.float32), np.array([-3], np.float32)],
            "advantages": np.array([0.5, -0.5], np.float32),
        },
        alignment=Alignment(seq_multiple=3),
        pad_id=0,
    )
    assert packed.tokens_T.tolist() == [1, 2, 3, 4, 0, 0, 9, 0, 0]
    assert packed.labels_T.tolist() == [2, 3, 4, -100, -100, -100, -100, -100, -100]
    assert packed.position_ids_T.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0]
    assert packed.loss_mask_T.tolist() == [False, False, True] + [False] * 6
    assert packed.sample_ids_T.tolist() == [0, 0, 0, 0, -1, -1, 1, -1, -1]
    assert packed.fields["old_logprobs"].tolist() == [0, 0, -1, -2, 0, 0, -3, 0, 0]
    assert packed.fields["advantages"].tolist() == [0, 0, 0.5, 0.5, 0, 0, -0.5, 0, 0]
    assert packed.cu_seqlens.tolist() == [0, 4, 5]
    assert packed.cu_seqlens_padded.tolist() == [0, 6, 9]
    back = packing.scatter([packed.fields["old_logprobs"]], [packed], np.array([2, 1]))
    assert [r.tolist() for r in back] == [[-1, -2], [-3]]


def test_pad_equal_to_eos_does_not_eat_the_end(twin: str) -> None:
    ids_BT = np.array([[5, 6, 2, 2, 2], [5, 6, 7, 8, 9], [2, 5, 2, 2, 2]])
    assert packing.true_lengths(ids_BT, 2).tolist() == [3, 5, 1]
    after_prompt = packing.true_lengths(ids_BT, 2, prompt_lengths=np.array([1, 1, 1]))
    assert after_prompt.tolist() == [3, 5, 3]
    packed = packing.gather(
        rows([5, 6, 2]), first(1), alignment=Alignment(pack_multiple=5), pad_id=2
    )
    assert packed.tokens_T.tolist() == [5, 6, 2, 2, 2]
    assert packed.loss_mask_T.tolist() == [False, True, True, False, False]
    assert packed.labels_T.tolist() == [6, 2, -100, -100, -100]


def test_gather_writes_into_the_buffers_it_is_given(twin: str) -> None:
    made: list[np.ndarray] = []

    def empty(size: int, dtype: type) -> np.ndarray:
        made.append(np.full(size, 77).astype(dtype))
        return made[-1]

    packed = packing.gather(
        rows([1, 2]), first(1), fields={"a": np.ones(1, np.float32)}, empty=empty
    )
    assert any(packed.tokens_T is buffer for buffer in made)
    assert len(made) == 6
    assert packed.tokens_T.tolist() == [1, 2]


def test_ragged_and_lists_give_the_same(twin: str) -> None:
    ids = rows([1, 2, 3], [], [4], [5, 6])
    prompts = rows([9], [8, 8], [7], [])
    take = np.array([3, 1, 0], np.int32)
    one = packing.gather(ids, take, prompts=prompts)
    other = packing.gather(Ragged.from_rows(ids), take, prompts=Ragged.from_rows(prompts))
    assert one.tokens_T.tolist() == [5, 6, 8, 8, 9, 1, 2, 3] == other.tokens_T.tolist()
    assert one.loss_mask_T.tolist() == other.loss_mask_T.tolist()


def test_truncation_cuts_the_end_and_is_counted(twin: str) -> None:
    ids = rows(list(range(10)), [1, 2])
    plan = packing.plan(
        [10, 2], capacity=7, alignment=Alignment(seq_multiple=3), oversize="truncate"
    )
    assert plan.lengths_S.tolist() == [6, 2]
    assert (plan.stats.num_truncated, plan.stats.truncated_tokens) == (1, 4)
    packs = [
        packing.gather(ids, m, lengths=plan.lengths_S, alignment=plan.alignment)
        for m in plan.microbatches(0)
    ]
    values = [p.tokens_T.astype(np.float32) for p in packs]
    back = packing.scatter(values, packs, np.array([10, 2]), missing=-1)
    assert back[0].tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1, -1]
    assert back[1].tolist() == [1, 2]


# ---- the planner -------------------------------------------------------------


def test_first_fit_is_not_next_fit(twin: str) -> None:
    stats = packing.plan([6, 5, 5, 4], capacity=10).stats
    assert (stats.num_bins, stats.lower_bound, stats.num_microbatches) == (2, 2, 2)


def test_bins_are_completed_where_best_fit_wastes_one(twin: str) -> None:
    """Best fit makes [5, 4], [4, 3, 2], [2]; two bins of ten will do: [5, 3, 2], [4, 4, 2]."""
    plan = packing.plan([5, 4, 4, 3, 2, 2], capacity=10)
    assert plan.stats.num_bins == 2
    assert sorted(as_lists(plan)[0]) == [[0, 3, 4], [1, 2, 5]]


def test_ranks_agree_on_the_number_of_microbatches(twin: str) -> None:
    plan = packing.plan([10, 10, 10, 10], capacity=10, dp_size=2, ranks=[0, 1, 1, 1])
    assert plan.num_microbatches == 3
    assert [len(m) for m in plan.microbatches(0)] == [1, 0, 0]
    assert sorted(np.concatenate(plan.microbatches(1)).tolist()) == [1, 2, 3]
    assert plan.stats.num_dummies == 2


def test_gradient_with_dummies_equals_the_single_rank_one(twin: str) -> None:
    """Loss = sum over scored tokens of w * token / number of them; the derivative by w is known."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(1, 50, 10).astype(np.int32) for _ in range(4)]
    scored = 4 * 9
    wanted = sum(int(row[1:].sum()) for row in ids) / scored
    plan = packing.plan([10] * 4, capacity=10, dp_size=2, ranks=[0, 1, 1, 1])
    total = 0.0
    for rank in range(2):
        for indices in plan.microbatches(rank):
            packed = packing.gather(ids, indices, pad_id=1000, alignment=plan.alignment)
            total += np.where(packed.loss_mask_T, packed.tokens_T, 0).sum() / scored
    assert total == pytest.approx(wanted, rel=1e-12)


def test_dummy_is_padding_that_attends_to_itself(twin: str) -> None:
    align = Alignment(pack_multiple=4)
    packed = packing.gather(
        rows([1]), first(0), alignment=align, fields={"a": np.ones(1, np.float32)}, pad_id=3
    )
    assert packed.tokens_T.tolist() == [3, 3, 3, 3]
    assert packed.labels_T.tolist() == [-100] * 4
    assert not packed.loss_mask_T.any()
    assert packed.sample_ids_T.tolist() == [-1] * 4
    assert packed.fields["a"].tolist() == [0] * 4
    assert packed.cu_seqlens.tolist() == packed.cu_seqlens_padded.tolist() == [0, 4]


def test_no_rows_give_dummies_on_every_rank(twin: str) -> None:
    plan = packing.plan(np.zeros(0, np.int64), capacity=8, dp_size=3, microbatch_multiple=2)
    assert as_lists(plan) == [[[], []]] * 3
    assert plan.stats.num_dummies == 6


def test_bins_are_split_before_a_dummy_is_made(twin: str) -> None:
    plan = packing.plan([2, 2, 2, 2], capacity=8, dp_size=2, microbatch_multiple=2)
    assert plan.stats.num_bins == 1
    assert [len(m) for rank in range(2) for m in plan.microbatches(rank)] == [1, 1, 1, 1]
    # Three sequences can't fill four micro-batches.
    assert packing.plan([2] * 3, capacity=8, dp_size=4).stats.num_dummies == 1


def test_microbatches_come_costliest_first(twin: str) -> None:
    plan = packing.plan([1, 2, 3, 4, 5, 6], capacity=7, dp_size=1)
    sizes = [sum(i + 1 for i in m) for m in as_lists(plan)[0]]
    assert sizes == sorted(sizes, reverse=True)


def test_one_long_sequence_is_made_up_for(twin: str) -> None:
    """Costs of 200 and 30 * 10 over 2 x 2 bins: bins of [200, 100, 100, 100] would be dealt out 300
    to 200, while 200 + 50 against 250 is equal."""
    lengths = [100] + [10] * 30
    costs = np.array([200.0] + [10.0] * 30)
    plan = packing.plan(lengths, capacity=150, dp_size=2, costs=costs)
    assert plan.num_microbatches == 2
    assert plan.stats.rank_balance == 1.0


def test_groups_stay_together(twin: str) -> None:
    plan = packing.plan([4, 4, 4, 4], capacity=8, groups=[7, 9, 9, 7])
    assert sorted(as_lists(plan)[0]) == [[0, 3], [1, 2]]


def test_oversize_group_is_named(twin: str) -> None:
    with pytest.raises(ValueError, match=r"groups: the group .* of sequence 1 has 12 tokens"):
        packing.plan([4, 6, 6], capacity=8, groups=[0, 5, 5])


def test_trees_stay_together_and_attention_to_ancestors_costs(twin: str) -> None:
    # Two trees, 0 -> 1 -> 2 and 3 -> 4: a path of 4 + 2 + 1 tokens costs 49, one of 5 + 3 costs 64.
    plan = packing.plan(
        [4, 2, 1, 5, 3],
        parents=[-1, 0, 1, -1, 3],
        capacity=8,
        dp_size=2,
        costs=CostModel(a=0.0, b=1.0),
    )
    assert as_lists(plan) in ([[[0, 1, 2]], [[3, 4]]], [[[3, 4]], [[0, 1, 2]]])
    assert plan.stats.rank_balance == pytest.approx(64 / ((49 + 64) / 2))


def test_cost_model_is_counted_from_the_shape() -> None:
    model = CostModel.from_shape(num_layers=2, hidden=8, ffn=16, heads=4, kv_heads=2, vocab=10)
    projections = 8 * 8 + 2 * 8 * 4 + 8 * 8  # q, k and v of half the width, out
    per_token = 2 * (projections + 3 * 8 * 16) + 8 * 10
    assert model.a == 6 * per_token
    # s * s / 2 causal pairs, scores and values, 8 wide, 2 layers, 2 FLOPs, backward twice
    assert model.b == 2 * 2 * 0.5 * 8 * 2 * 3
    assert model(np.array([3]))[0] == 3 * model.a + 9 * model.b
    # A path costs the same whole or in segments.
    parts = model(np.array([3, 4]), np.array([0, 3])).sum()
    assert parts == pytest.approx(model(np.array([7]))[0])


def test_plan_does_not_depend_on_the_twin() -> None:
    extension = pytest.importorskip("megatron_binac._C", reason="the extension was not built")
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 4000, 3000)
    costs = CostModel(a=1e9, b=1e5)(lengths)
    args = (lengths, costs, None, None, 8192, 8, 1, 1)
    for one, other in zip(extension.plan(*args), packing_reference.plan(*args), strict=True):
        assert np.array_equal(one, other)


# ---- shared prefixes ---------------------------------------------------------


def test_prefix_layout_by_hand(twin: str) -> None:
    ids = rows([1, 2, 3], [1, 2, 4], [9, 1], [1, 2, 3, 7])
    layout = packing.share_prefixes(
        packing.gather(ids, first(4)), alignment=Alignment(pack_multiple=8), pad_id=5
    )
    assert layout.tokens_D.tolist() == [1, 2, 3, 7, 4, 9, 1, 5]
    assert layout.position_ids_D.tolist() == [0, 1, 2, 3, 2, 0, 1, 0]
    assert layout.parents_D.tolist() == [-1, 0, 1, 2, 1, -1, 5, -1]
    assert layout.segment_starts_N.tolist() == [0, 2, 4, 5, 7]
    assert layout.segment_lengths_N.tolist() == [2, 2, 1, 2, 1]
    assert layout.segment_parents_N.tolist() == [-1, 0, 0, -1, -1]
    assert layout.subtree_ends_N.tolist() == [5, 4, 5, 7, 8]
    assert layout.slots_T.tolist() == [0, 1, 2, 0, 1, 4, 5, 6, 0, 1, 2, 3]
    assert (layout.num_distinct, layout.num_real) == (7, 12)
    assert layout.saved == pytest.approx(5 / 12)


def test_equal_rows_are_stored_once(twin: str) -> None:
    layout = packing.share_prefixes(packing.gather(rows([1, 2], [1, 2], [1]), first(3)))
    assert layout.tokens_D.tolist() == [1, 2]
    assert layout.slots_T.tolist() == [0, 1, 0, 1, 0]


def test_tails_that_nobody_reads_are_not_stored(twin: str) -> None:
    packed = packing.gather(rows([1, 2, 3], [1, 2, 4], [1, 2, 3, 7]), first(3))
    layout = packing.share_prefixes(packed, lengths=np.asarray([2, 1, 3]))
    assert layout.tokens_D.tolist() == [1, 2, 3]
    assert layout.slots_T.tolist() == [0, 1, 0, 0, 0, 0, 0, 1, 2, 0]
    assert (layout.num_distinct, layout.num_real) == (3, 10)
    for bad in ([2, 0, 3], [2, 3, 5]):
        with pytest.raises(ValueError, match="expected 1 to the length of each sequence"):
            packing.share_prefixes(packed, lengths=np.asarray(bad))


def test_the_other_row_that_begins_with_the_most_of_it(twin: str) -> None:
    rng = np.random.default_rng(0)
    draw = lambda: rng.integers(0, 3, int(rng.integers(1, 7))).astype(np.int32)  # noqa: E731
    asked, others = [draw() for _ in range(60)], [draw() for _ in range(25)]
    best, length = packing.match_prefixes(asked, others)

    def common(a: np.ndarray, b: np.ndarray) -> int:
        num = min(len(a), len(b))
        return int(np.append(np.flatnonzero(a[:num] != b[:num]), num)[0])

    for row, index, num in zip(asked, best.tolist(), length.tolist(), strict=True):
        assert num == max(common(row, other) for other in others)
        assert num == common(row, others[index])
    assert {1, 2, 3, 4} <= set(length.tolist())


def test_a_tree_larger_than_a_microbatch_is_cut(twin: str) -> None:
    ids = rows([1, 2, 3], [1, 2, 4], [1, 2, 5], [9])
    plan = packing.plan_shared(ids, groups=[0, 0, 0, 1], capacity=4)
    assert sorted(as_lists(plan)[0]) == [[0, 1], [2, 3]]
    assert plan.stats.real_tokens == 4 + 3 + 1  # the trunk [1, 2] is there twice
    assert plan.stored.tolist() == [4, 4]


def test_prefix_layout_refuses_context_parallelism() -> None:
    packed = packing.gather(rows([1, 2]), first(1))
    with pytest.raises(ValueError, match=r"seq_multiple: got 4, expected 1: a tree can't be cut"):
        packing.share_prefixes(packed, alignment=Alignment(seq_multiple=4))


# ---- wrong input names the argument ------------------------------------------


def bad_plans() -> Iterator[tuple[str, dict]]:
    good = {"lengths": [3, 4], "capacity": 8}
    strided = np.arange(1, 9)[::2]
    yield "lengths: sequence 1 has 0 tokens", {**good, "lengths": [3, 0]}
    yield "lengths: sequence 0 has -3 tokens", {**good, "lengths": [-3, 4]}
    yield "lengths: got dtype float64", {**good, "lengths": np.array([3.0, 4.0])}
    yield "lengths: got dtype uint64", {**good, "lengths": np.array([3, 4], np.uint64)}
    yield "lengths: got a strided array", {**good, "lengths": strided}
    yield "lengths: got 2 dimensions", {**good, "lengths": np.ones((2, 2), np.int64)}
    yield "lengths: sequence 1 has 9 tokens, expected at most 8", {**good, "lengths": [3, 9]}
    yield "lengths: sequence 0 has 4611686018427387904", {**good, "lengths": [2**62, 1]}
    yield "capacity: got 0", {**good, "capacity": 0}
    yield "capacity: got 4294967296", {**good, "capacity": 2**32}
    yield (
        "capacity: got 2147483647 tokens, expected at most 16777216",
        {
            **good,
            "capacity": 2**31 - 1,
        },
    )
    yield "capacity: got 8.0", {**good, "capacity": 8.0}
    yield (
        "capacity: got 8, expected at least 16",
        {
            **good,
            "alignment": Alignment(pack_multiple=16),
        },
    )
    yield (
        "fixed_length: got 16, expected at most capacity=8",
        {
            **good,
            "alignment": Alignment(fixed_length=16),
        },
    )
    yield "dp_size: got 0", {**good, "dp_size": 0}
    yield "dp_size: got 1099511627776", {**good, "dp_size": 2**40}
    yield "dp_size: got True", {**good, "dp_size": True}
    yield "microbatch_multiple: got -1", {**good, "microbatch_multiple": -1}
    yield (
        "microbatch_multiple: 1048576 on each of dp_size=1048576",
        {
            **good,
            "dp_size": 2**20,
            "microbatch_multiple": 2**20,
        },
    )
    yield "costs: got 1 values, expected 2", {**good, "costs": np.ones(1)}
    yield "costs: got dtype int64", {**good, "costs": np.ones(2, np.int64)}
    yield "costs: sequence 1 costs nan", {**good, "costs": np.array([1.0, np.nan])}
    yield "costs: sequence 0 costs -1.0", {**good, "costs": np.array([-1.0, 1.0])}
    yield "costs: expected numbers whose sum is finite", {**good, "costs": np.full(2, 1.7e308)}
    yield "groups: got 3 values, expected 2", {**good, "groups": [1, 2, 3]}
    yield "parents: sequence 0 has parent 0", {**good, "parents": [0, -1]}
    yield "parents: sequence 1 has parent -2", {**good, "parents": [-1, -2]}
    yield (
        "parents: a prefix-shared layout",
        {
            **good,
            "parents": [-1, 0],
            "alignment": Alignment(seq_multiple=2),
        },
    )
    yield "groups: sequence 1 has another group", {**good, "parents": [-1, 0], "groups": [1, 2]}
    yield "ranks: expected values in", {**good, "ranks": [0, 1]}
    yield (
        "ranks: sequence 1 is on another rank",
        {
            **good,
            "dp_size": 2,
            "ranks": [0, 1],
            "groups": [5, 5],
        },
    )
    yield "lengths: got dtype bool", {**good, "lengths": [True, True]}
    yield "lengths: got dtype uint64", {**good, "lengths": [2**63]}
    yield "oversize: got 'drop'", {**good, "oversize": "drop"}


@pytest.mark.parametrize(("message", "arguments"), list(bad_plans()))
def test_wrong_plan_input_names_the_argument(message: str, arguments: dict) -> None:
    with pytest.raises(ValueError) as error:
        packing.plan(**arguments)
    assert str(error.value).startswith(message)


def bad_gathers() -> Iterator[tuple[str, dict]]:
    good = {"ids": rows([1, 2], [3]), "indices": first(2)}
    half = np.ones(1, np.float32)
    yield "indices: expected values in [0, 1]", {**good, "indices": np.array([2], np.int32)}
    yield "indices: expected values in [0, 1]", {**good, "indices": np.array([-1], np.int32)}
    yield "indices: got dtype float64", {**good, "indices": np.array([0.0])}
    yield "ids: row 0", {**good, "ids": [np.array([1, 2]), np.array([3])]}
    yield "ids: row 0", {**good, "ids": [np.arange(8, dtype=np.int32)[::2], rows([1])[0]]}
    yield "ids: row 1", {**good, "ids": [rows([1])[0], [2]]}
    yield "ids: sequence 1 has no tokens", {**good, "ids": rows([1], [])}
    yield "prompts: got 1 rows, expected 2", {**good, "prompts": rows([1])}
    yield "loss_mask: row 1 has 2 values", {**good, "loss_mask": [np.ones(2, bool)] * 2}
    yield "old: row 0 has 1 values", {**good, "fields": {"old": [half, half]}}
    yield "old: row 0", {**good, "fields": {"old": [np.ones(2), np.ones(1)]}}
    yield "old: got 1 rows, expected 2", {**good, "fields": {"old": half}}
    yield "old: got dtype float64", {**good, "fields": {"old": np.ones(2)}}
    yield "lengths: got 1 values", {**good, "lengths": np.array([2])}
    yield "num_threads: got -1", {**good, "num_threads": -1}
    yield "indices: sequence 1 is there twice", {**good, "indices": np.array([0, 1, 1], np.int32)}
    for name, odd in {
        "int64 (4,)": lambda size, dtype: np.empty(size + 1, dtype),
        "float64 (3,)": lambda size, dtype: np.empty(size),
        "int64 (3,)": lambda size, dtype: np.empty(2 * size, dtype)[::2],
        "list": lambda size, dtype: [0] * size,
    }.items():
        yield f"empty: made {name} for tokens, expected a writeable", {**good, "empty": odd}
    yield (
        "indices: these sequences have 3 tokens",
        {
            **good,
            "alignment": Alignment(fixed_length=2),
        },
    )


@pytest.mark.parametrize(("message", "arguments"), list(bad_gathers()))
def test_wrong_gather_input_names_the_argument(twin: str, message: str, arguments: dict) -> None:
    with pytest.raises(ValueError) as error:
        packing.gather(**arguments)
    assert str(error.value).startswith(message)


def test_wrong_scatter_input_names_the_argument(twin: str) -> None:
    packed = packing.gather(rows([1, 2], [3]), first(2))
    values = np.zeros(3, np.float32)
    lengths = np.array([2, 1])
    for message, arguments in [
        ("values: got 0, expected 1", ([], [packed], lengths)),
        (r"values\[0\]: got 2 tokens, expected 3", ([values[:2]], [packed], lengths)),
        ("lengths: sequence 0 has more ids", ([values], [packed], np.array([1, 1]))),
        ("lengths: got 1 values, .* packs hold sequence 1", ([values], [packed], np.array([2]))),
        ("packs: micro-batch 1 holds a sequence", ([values] * 2, [packed] * 2, lengths)),
    ]:
        with pytest.raises(ValueError, match=message):
            packing.scatter(*arguments)


def test_the_extension_guards_its_own_memory() -> None:
    """Called past the front door, with sizes that would read or write outside a buffer."""
    extension = pytest.importorskip("megatron_binac._C", reason="the extension was not built")
    one = np.ones(1, np.int64)
    for message, call in [
        ("starts: run 0 leaves", lambda: extension.scatter(one, one, one, one, one * 0, 1)),
        ("out_starts: run 0", lambda: extension.scatter(one, one * 0, one, one, one * -1, 1)),
        ("lengths: sequence 0 leaves", lambda: extension.sort_by_prefix(one, one, one, one)),
        ("lengths: sequence 0", lambda: extension.plan(one * 9, one * 1.0, None, None, 8, 1, 1, 1)),
        ("ranks: sequence 0", lambda: extension.plan(
            one, one * 1.0, None, np.ones(1, np.int32), 8, 1, 1, 1)),
        ("units: got 2 values", lambda: extension.plan(
            one, one * 1.0, np.ones(2, np.int64), None, 8, 1, 1, 1)),
        ("capacity: got 0", lambda: extension.plan(one, one * 1.0, None, None, 0, 1, 1, 1)),
        ("lengths: expected a contiguous vector of int64", lambda: extension.plan(
            one.astype(np.int32), one * 1.0, None, None, 8, 1, 1, 1)),
    ]:  # fmt: skip
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value).startswith(message)


def test_a_missing_extension_is_said_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BINAC_PACKING", "auto")
    monkeypatch.setitem(__import__("sys").modules, "megatron_binac._C", None)
    monkeypatch.delattr("megatron_binac._C", raising=False)
    with caplog.at_level("WARNING", logger="megatron_binac.packing"):
        core, name = packing._load_core()
    assert (core, name) == (packing_reference, "reference")
    assert "Install a C++17 compiler" in caplog.text
    monkeypatch.setenv("BINAC_PACKING", "cpp")
    with pytest.raises(ImportError):
        packing._load_core()
