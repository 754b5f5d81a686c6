"""What holds for every input, on both twins: nothing lost, no limit broken, alignment exact."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_binac import packing, packing_reference
from megatron_binac.packing import Alignment, CostModel, Ragged

try:
    from megatron_binac import _C as extension
except ImportError:
    extension = None

TWINS = [
    pytest.param(packing_reference, id="reference"),
    pytest.param(
        extension,
        id="cpp",
        marks=pytest.mark.skipif(extension is None, reason="the extension was not built"),
    ),
]
both_twins = pytest.mark.parametrize("core", TWINS)
many = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def running(core: Any) -> Iterator[None]:
    before = packing._core
    packing._core = core
    try:
        yield
    finally:
        packing._core = before


@st.composite
def alignments(draw: st.DrawFn) -> Alignment:
    return Alignment.for_layout(
        tensor=draw(st.sampled_from([1, 2, 4])),
        context=draw(st.sampled_from([1, 1, 2, 4])),
        sequence_parallel=draw(st.booleans()),
        token_multiple=draw(st.sampled_from([1, 16, 32, 128])),
    )


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `plan` that it has to accept."""
    align = draw(alignments())
    unit = align.total_multiple
    room = unit * draw(st.integers(1, 40))
    if draw(st.booleans()):
        align = Alignment(
            seq_multiple=align.seq_multiple, pack_multiple=align.pack_multiple, fixed_length=room
        )
    longest = draw(st.integers(1, room))
    lengths = draw(st.lists(st.integers(1, longest), max_size=60))
    dp_size = draw(st.integers(1, 9))
    out: dict[str, Any] = {
        "lengths": np.array(lengths, dtype=draw(st.sampled_from([np.int32, np.int64]))),
        "capacity": room + draw(st.integers(0, unit - 1)),
        "dp_size": dp_size,
        "alignment": align,
        "microbatch_multiple": draw(st.sampled_from([1, 1, 2, 4, 8])),
        "costs": draw(
            st.sampled_from(
                [None, CostModel(a=1.0, b=0.01), CostModel(a=3e9, b=2e5), CostModel(a=0.0, b=0.0)]
            )
        ),
    }
    labels = np.array(
        draw(st.lists(st.integers(0, 30), min_size=len(lengths), max_size=len(lengths)))
    )
    kind = draw(st.sampled_from(["free", "groups", "ranks", "groups on ranks"]))
    if "groups" in kind and lengths:
        # Sequences leave a group that is too large; their labels are then their own.
        weights = Counter()
        groups = []
        for i, (length, label) in enumerate(zip(lengths, labels.tolist(), strict=True)):
            padded = -(-length // align.seq_multiple) * align.seq_multiple
            fits = weights[label] + padded <= room
            weights[label] += padded if fits else 0
            groups.append(label if fits else 1000 + i)
        out["groups"] = np.array(groups)
    if "ranks" in kind:
        out["ranks"] = (out.get("groups", labels) % dp_size).astype(np.int32)
    return out


def units_of(problem: dict[str, Any]) -> int:
    groups = problem.get("groups")
    return len(problem["lengths"]) if groups is None else len(set(groups.tolist()))


@both_twins
@many
@given(problem=problems())
def test_plan_keeps_every_promise(core: Any, problem: dict[str, Any]) -> None:
    with running(core):
        plan = packing.plan(**problem)
        again = packing.plan(**problem)
    align, lengths, dp_size = problem["alignment"], problem["lengths"], problem["dp_size"]
    assert np.array_equal(plan.indices_S, again.indices_S)
    assert np.array_equal(plan.bounds, again.bounds)

    # Every sequence exactly once, as many micro-batches on every rank, a multiple as asked.
    assert sorted(plan.indices_S.tolist()) == list(range(len(lengths)))
    assert plan.num_microbatches % problem["microbatch_multiple"] == 0
    assert plan.num_microbatches >= 1
    by_rank = [plan.microbatches(r) for r in range(dp_size)]
    assert {len(bins) for bins in by_rank} == {plan.num_microbatches}

    # Alignment is exact and no capacity is broken.
    stored = iter(plan.stored.tolist())
    for indices in itertools.chain(*by_rank):
        tokens = sum(
            -(-int(lengths[i]) // align.seq_multiple) * align.seq_multiple for i in indices
        )
        held = next(stored)
        assert tokens <= held <= problem["capacity"]
        if align.fixed_length is not None:
            assert held == align.fixed_length
        else:
            assert held % align.pack_multiple == 0
            assert held % align.seq_multiple == 0
            assert held - max(tokens, 1) < align.total_multiple

    # Groups stay together, sequences stay on their rank.
    place = np.zeros(len(lengths), dtype=int)
    place[plan.indices_S] = np.repeat(np.arange(len(plan.bounds) - 1), np.diff(plan.bounds))
    groups = problem.get("groups")
    if groups is not None:
        assert len(set(zip(groups.tolist(), place.tolist(), strict=True))) == units_of(problem)
    if "ranks" in problem:
        assert (place // plan.num_microbatches == problem["ranks"]).all()
        return

    # No micro-batch more than the packing needs, no dummy that could have been a sequence.
    multiple = problem["microbatch_multiple"]
    needed = max(1, -(-plan.stats.num_bins // dp_size))
    assert plan.num_microbatches == -(-needed // multiple) * multiple
    assert plan.stats.num_dummies == max(0, len(plan.bounds) - 1 - units_of(problem))


@pytest.mark.skipif(extension is None, reason="the extension was not built")
@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_twins_make_the_same_plan(problem: dict[str, Any]) -> None:
    plans = []
    for core in (packing_reference, extension):
        with running(core):
            plans.append(packing.plan(**problem))
    one, other = plans
    assert np.array_equal(one.indices_S, other.indices_S)
    assert np.array_equal(one.bounds, other.bounds)
    assert one.stats == other.stats


@both_twins
@many
@given(problem=problems())
def test_cost_statistics_are_what_the_plan_has(core: Any, problem: dict[str, Any]) -> None:
    with running(core):
        plan = packing.plan(**problem)
    lengths = problem["lengths"].astype(np.int64)
    model = problem["costs"] or CostModel(a=1.0, b=0.0)
    cost = model(lengths) if len(lengths) else np.zeros(0)
    rank = [sum(cost[m].sum() for m in plan.microbatches(r)) for r in range(plan.dp_size)]
    if sum(rank) > 0:
        assert plan.stats.rank_balance == pytest.approx(max(rank) / np.mean(rank), rel=1e-9)
    assert plan.stats.real_tokens == lengths.sum()
    assert plan.stats.stored_tokens == plan.stored.sum()


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """The optimum, by trying every way to open or reuse a bin."""
    best = len(lengths)

    def place(at: int, rooms: list[int]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if at == len(lengths):
            best = len(rooms)
            return
        for i, room in enumerate(rooms):
            if room >= lengths[at] and room not in rooms[:i]:
                place(at + 1, [*rooms[:i], room - lengths[at], *rooms[i + 1 :]])
        place(at + 1, [*rooms, capacity - lengths[at]])

    place(0, [])
    return best


@both_twins
@many
@given(
    data=st.data(),
    capacity=st.integers(5, 60),
)
def test_lower_bound_and_packing_enclose_the_optimum(
    core: Any, data: st.DataObject, capacity: int
) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=9))
    with running(core):
        stats = packing.plan(lengths, capacity=capacity).stats
    optimum = fewest_bins(sorted(lengths, reverse=True), capacity)
    assert stats.lower_bound <= optimum <= stats.num_bins
    assert stats.num_bins <= 11 / 9 * optimum + 6 / 9  # what best-fit decreasing is proved to keep
    assert stats.lower_bound >= 2 / 3 * optimum  # and of the bound


@both_twins
@many
@given(data=st.data(), align=alignments())
def test_gather_and_scatter_are_exact(core: Any, data: st.DataObject, align: Alignment) -> None:
    num = data.draw(st.integers(1, 12))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    with_prompts = data.draw(st.booleans())
    own = rng.integers(0 if with_prompts else 1, 30, num)
    before = rng.integers(1, 20, num) if with_prompts else np.zeros(num, int)
    ids = [rng.integers(0, 1000, n).astype(np.int32) for n in own]
    prompts = [rng.integers(0, 1000, n).astype(np.int32) for n in before]
    mask = [rng.random(n) < 0.5 for n in own]
    old = [rng.standard_normal(n).astype(np.float32) for n in own]
    advantages = rng.standard_normal(num).astype(np.float32)
    threads = data.draw(st.sampled_from([0, 1, 3]))
    as_ragged = data.draw(st.booleans())
    wrap = Ragged.from_rows if as_ragged else (lambda rows: rows)
    lengths = own + before
    with running(core):
        plan = packing.plan(
            lengths,
            capacity=align.stored(int(lengths.max())) + align.total_multiple,
            dp_size=data.draw(st.integers(1, 3)),
            alignment=align,
        )
        packs = [
            packing.gather(
                wrap(ids),
                indices,
                prompts=wrap(prompts) if with_prompts else None,
                loss_mask=wrap(mask),
                fields={"old": wrap(old), "advantages": advantages},
                alignment=align,
                pad_id=1000,
                num_threads=threads,
            )
            for rank in range(plan.dp_size)
            for indices in plan.microbatches(rank)
        ]
        back = packing.scatter([p.fields["old"] for p in packs], packs, own, num_threads=threads)
        own_ids = packing.scatter([p.tokens_T for p in packs], packs, own, num_threads=threads)

    assert [p.num_tokens for p in packs] == plan.stored.tolist()
    for i in range(num):
        assert np.array_equal(back[i], old[i])
        assert np.array_equal(own_ids[i], ids[i])
    for packed in packs:
        real = packed.sample_ids_T >= 0
        assert (packed.tokens_T[~real] == 1000).all()
        assert not packed.loss_mask_T[~real].any()
        assert (packed.labels_T[~real] == -100).all()
        assert (packed.position_ids_T[~real] == 0).all()
        assert (packed.fields["advantages"][~real] == 0).all()
        for k, i in enumerate(packed.indices_s):
            start = packed.cu_seqlens_padded[k]
            assert start % align.seq_multiple == 0
            here = slice(start, start + lengths[i])
            whole = np.concatenate([prompts[i], ids[i]])
            assert np.array_equal(packed.tokens_T[here], whole)
            assert (packed.sample_ids_T[here] == i).all()
            assert np.array_equal(packed.position_ids_T[here], np.arange(lengths[i]))
            assert np.array_equal(packed.labels_T[here], [*whole[1:], -100])
            wanted = np.concatenate([np.zeros(before[i], bool), mask[i]])
            wanted[0] = False
            assert np.array_equal(packed.loss_mask_T[here], wanted)
            spread = np.concatenate([np.zeros(before[i]), np.full(own[i], advantages[i])])
            assert np.array_equal(packed.fields["advantages"][here], spread.astype(np.float32))


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[np.ndarray], list[int]]:
    """Rows that share prefixes: children continue a cut of an earlier row of their tree."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows: list[np.ndarray] = []
    groups: list[int] = []
    for group in range(draw(st.integers(1, 3))):
        mine: list[np.ndarray] = []
        for _ in range(draw(st.integers(1, 8))):
            trunk = mine[rng.integers(len(mine))] if mine else np.zeros(0, np.int32)
            kept = trunk[: rng.integers(len(trunk) + 1)]
            new = rng.integers(0, 3, rng.integers(0 if len(kept) else 1, 6))
            mine.append(np.concatenate([kept, new]).astype(np.int32))
        rows += mine
        groups += [group] * len(mine)
    return rows, groups


@both_twins
@many
@given(tree=trees(), multiple=st.sampled_from([1, 8]))
def test_prefix_layout_is_the_tree(core: Any, tree: Any, multiple: int) -> None:
    rows, _ = tree
    with running(core):
        packed = packing.gather(rows, np.arange(len(rows), dtype=np.int32))
        layout = packing.share_prefixes(
            packed, alignment=Alignment(pack_multiple=multiple), pad_id=9
        )
    distinct = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    assert layout.num_distinct == len(distinct)
    assert layout.num_real == sum(len(row) for row in rows)
    assert len(layout.tokens_D) % multiple == 0
    assert np.array_equal(layout.tokens_D[layout.slots_T], packed.tokens_T)
    assert np.array_equal(layout.position_ids_D[layout.slots_T], packed.position_ids_T)
    for a, b in itertools.pairwise(packed.cu_seqlens.tolist()):
        slots = layout.slots_T[a:b]
        assert np.array_equal(layout.parents_D[slots], [-1, *slots[:-1]])

    # The ancestor mask against the chain of parents.
    size = len(layout.tokens_D)
    seen = np.zeros((size, size), dtype=bool)
    for slot in range(size):
        at = slot
        while at >= 0:
            seen[slot, at] = True
            at = layout.parents_D[at]
    q, k = np.mgrid[:size, :size]
    assert np.array_equal(seen, (k <= q) & (q < layout.subtree_ends_D[k]))


@pytest.mark.skipif(extension is None, reason="the extension was not built")
@many
@given(tree=trees())
def test_twins_sort_prefixes_alike(tree: Any) -> None:
    rows, groups = tree
    flat = Ragged.from_rows(rows, np.int64)
    args = (flat.values, flat.offsets[:-1].copy(), flat.lengths, np.array(groups))
    for one, other in zip(
        packing_reference.sort_by_prefix(*args), extension.sort_by_prefix(*args), strict=True
    ):
        assert np.array_equal(one, other)


@both_twins
@many
@given(tree=trees(), extra=st.integers(0, 20), dp_size=st.integers(1, 3))
def test_shared_plan_fits_its_layouts(core: Any, tree: Any, extra: int, dp_size: int) -> None:
    rows, groups = tree
    capacity = max(len(row) for row in rows) + extra
    with running(core):
        plan = packing.plan_shared(rows, groups=groups, capacity=capacity, dp_size=dp_size)
        assert sorted(plan.indices_S.tolist()) == list(range(len(rows)))
        for number, indices in enumerate(
            itertools.chain(*(plan.microbatches(r) for r in range(dp_size)))
        ):
            layout = packing.share_prefixes(packing.gather(rows, indices))
            assert layout.num_distinct <= plan.stored[number] <= capacity


@both_twins
@many
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    data=st.data(),
)
def test_segments_of_a_tree_share_a_microbatch(
    core: Any, lengths: list[int], data: st.DataObject
) -> None:
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(lengths))]
    with running(core):
        plan = packing.plan(
            lengths, capacity=sum(lengths), parents=parents, dp_size=data.draw(st.integers(1, 4))
        )
    place = np.zeros(len(lengths), dtype=int)
    place[plan.indices_S] = np.repeat(np.arange(len(plan.bounds) - 1), np.diff(plan.bounds))
    for child, parent in enumerate(parents):
        if parent >= 0:
            assert place[child] == place[parent]


anything = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(-3, 2**65), st.floats(), st.none()), max_size=4),
    st.sampled_from(
        [
            np.zeros(0, np.int32),
            np.arange(1, 7, dtype=np.int64)[::2],
            np.ones((2, 2), np.int64),
            np.array([1, 2], np.uint64),
            np.array(["a"]),
            np.array([None]),
        ]
    ),
)


@pytest.mark.parametrize("core", TWINS[1:])  # the checks are in front of both
@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(
        ["lengths", "capacity", "dp_size", "costs", "groups", "parents", "ranks", "oversize"]
    ),
    value=anything,
)
def test_nonsense_is_refused_by_name(core: Any, name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"lengths": [3, 1, 2], "capacity": 8, "dp_size": 2, name: value}
    with running(core):
        try:
            plan = packing.plan(**arguments)
        except ValueError as error:
            assert name in str(error) or (name == "capacity" and "lengths" in str(error))
        else:
            assert sorted(plan.indices_S.tolist()) == list(range(len(arguments["lengths"])))


def length_laws(num: int, capacity: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    short, long = rng.normal(500, 150, num), rng.normal(6000, 2000, num)
    draws = {
        "log-normal": rng.lognormal(6.5, 0.9, num),
        "heavy tail": 256 * (1 + rng.pareto(1.1, num)),
        "bimodal": np.where(rng.random(num) < 0.7, short, long),
    }
    return {law: np.clip(x, 1, capacity).astype(np.int64) for law, x in draws.items()}


@pytest.mark.skipif(extension is None, reason="the extension was not built")
@pytest.mark.parametrize("law", ["log-normal", "heavy tail", "bimodal"])
@pytest.mark.parametrize("dp_size", [1, 8, 64])
@pytest.mark.parametrize("capacity", [4096, 32768])
def test_fill_and_balance_on_length_laws(law: str, dp_size: int, capacity: int) -> None:
    lengths = length_laws(100_000, capacity)[law]
    model = CostModel.from_shape(
        num_layers=24, hidden=2048, ffn=8192, heads=16, kv_heads=8, vocab=128000
    )
    with running(extension):
        stats = packing.plan(lengths, capacity=capacity, dp_size=dp_size, costs=model).stats
    assert stats.num_bins <= 1.005 * stats.lower_bound
    assert stats.num_microbatches < 1.005 * stats.lower_bound + dp_size
    assert stats.rank_balance <= 1.005
    assert stats.fill == 1.0
